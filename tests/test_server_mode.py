"""Sparse rollouts from a `vllm serve` process in TRL's server mode."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fresh_process import run_two_processes
from server_process import ServerProcess
from test_trainer import OTHER_SCHEDULE, SCHEDULE
from tiny_training import RecordingTrainer, make_config, make_dataset, share_of_small_letters

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.cli_serve import run_serve, serve_command
from sparrow_trl.rollout_server import NOT_FINITE, SparseVLLMClient, check_server, read_completion
from sparrow_trl.vllm_worker_extension import WORKER_EXTENSION


OPTIONS = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--block-size", "32"]
OPTIONS += ["--kv-cache-memory-bytes", str(2**26), "--max-num-seqs", "16"]


def start_server(model, folder, worker_in_core, options=OPTIONS):
    """A server that answers and has `SCHEDULE`."""
    SCHEDULE.save_pretrained(folder)
    server = ServerProcess(model, str(folder), folder / "server.log", *options, worker_in_core=worker_in_core)
    server.wait()
    return server


@pytest.fixture(scope="module")
def server(tiny_qwen3, tmp_path_factory):
    server = start_server(tiny_qwen3, tmp_path_factory.mktemp("server"), worker_in_core=True)
    yield server
    server.stop()


@pytest.fixture
def server_of_workers(tiny_qwen3, tmp_path):
    server = start_server(tiny_qwen3, tmp_path, worker_in_core=False)
    yield server
    server.stop()


def server_config(folder, server, **kwargs):
    kwargs = {"vllm_engine_kwargs": None, "vllm_block_size": None, "vllm_max_model_length": None, **kwargs}
    return make_config(folder, vllm_mode="server", vllm_server_base_url=server.url, **kwargs)


def train_and_evaluate(model, config):
    """Train from `SCHEDULE` on, a further step under `OTHER_SCHEDULE`, and evaluate."""
    trainer = RecordingTrainer(
        model,
        share_of_small_letters,
        config,
        train_dataset=make_dataset(16),
        eval_dataset=make_dataset(4, seed=1),
        schedule=SCHEDULE,
    )
    trainer.train()
    trainer.schedule = OTHER_SCHEDULE
    trainer.args.max_steps += 1
    trainer.train()
    trainer.evaluate()
    return trainer


@pytest.fixture(scope="module")
def trained(server, tiny_qwen3, tmp_path_factory):
    config = server_config(tmp_path_factory.mktemp("trained"), server, max_steps=2, learning_rate=1e-2)
    return train_and_evaluate(tiny_qwen3, config)


def test_the_engine_in_the_server_computes_what_the_policy_does(trained):
    """Parity over HTTP: after real updates, under both schedules, and densely in the evaluation."""
    schedules = [rollout.schedule for rollout in trained.rollouts if rollout.mode == "train"]
    assert SCHEDULE in schedules and OTHER_SCHEDULE in schedules
    for rollout in trained.rollouts:
        distributions = rollout.dense if rollout.mode == "eval" else rollout.sparse
        for engine, policy, ids in zip(rollout.logprobs, distributions, rollout.completions, strict=True):
            expected = policy.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            assert (torch.tensor(engine) - expected).abs().max() < 1e-3


def test_rollouts_are_sparse_and_evaluations_dense(trained):
    for rollout in trained.rollouts:
        counters = rollout.counters
        if rollout.mode == "eval":
            assert counters.sparse_tokens == 0
        else:
            assert 0 < counters.kept_pages < counters.cached_pages
            # The first token of a completion comes from its prompt.
            assert counters.sparse_tokens == sum(len(ids) - 1 for ids in rollout.completions)
            assert counters.unattributed_tokens == 0


def test_probes_are_the_rows_they_say(trained):
    probed = 0
    for rollout in trained.rollouts:
        for probe in rollout.probes:
            probed += 1
            completion = rollout.completions[probe.row]
            assert probe.sampled_ids.tolist() == list(completion)
            assert probe.prompt_length == len(rollout.prompts[probe.row])
            policy = rollout.sparse[probe.row]
            assert probe.sampled_logprobs.tolist() == pytest.approx(rollout.logprobs[probe.row])
            top = policy.topk(probe.token_ids.size(1))
            assert (probe.logprobs - top.values).abs().max() < 1e-3
            assert (policy.gather(1, probe.token_ids) - probe.logprobs).abs().max() < 1e-3
    assert probed
    assert all("acceptance/mean" in log for log in trained.state.log_history if "reward" in log)


def test_a_synchronisation_that_does_not_arrive_is_noticed(trained, monkeypatch):
    generation = trained.vllm_generation
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.mul_(1.5)
    monkeypatch.setattr(generation.vllm_client, "update_named_params", lambda metadata, params: list(params))
    generation.sync_weights()
    with pytest.raises(RuntimeError, match="engine's log-probs differ from the policy's"):
        generation.check_weights([[5, 9, 12, 30, 7, 21]])


def test_a_worker_that_fails_says_why(trained):
    client = trained.vllm_generation.vllm_client
    with pytest.raises(RuntimeError, match="sparrow_load_weights: FileNotFoundError.*No such file"):
        client.call_workers("sparrow_load_weights", "/nowhere/weights.safetensors")
    with pytest.raises(RuntimeError, match="page_size 64 does not divide the engine's KV block of 32"):
        trained.schedule = SparsityScheduleConfig(top_k_pages=[1], page_size=64, bin_tokens=64)
    assert trained.schedule == OTHER_SCHEDULE


@pytest.fixture
def on_a_gpu(trained, monkeypatch):
    """The trainer's client, as if on the GPU `"GPU-0"`, and what the workers answer, by the name of the method."""
    client = trained.vllm_generation.vllm_client
    answers = {"sparrow_device": [{"gpu": "GPU-1"}, {"gpu": "GPU-2"}]}
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(client, "call_workers", lambda method: answers[method])
    monkeypatch.setattr(client, "communicator", None)
    return client, answers


@pytest.mark.parametrize(("ours", "theirs"), [(True, True), (True, False), (False, True), (False, False)])
def test_weights_go_through_a_file_where_nccl_is_missing(on_a_gpu, monkeypatch, caplog, ours, theirs):
    """vLLM's broadcasts then do nothing, in either process and without a word."""
    client, answers = on_a_gpu

    def connect(self, device):
        self.communicator = SimpleNamespace(disabled=not ours)

    monkeypatch.setattr("sparrow_trl.rollout_server.VLLMClient.init_communicator", connect)
    answers["sparrow_transfer"] = [{"connected": True}, {"connected": theirs}]
    client.init_communicator("cuda:0")
    assert (client.communicator is not None) == (ours and theirs)
    assert ("VLLM_NCCL_SO_PATH" in caplog.text) == (not (ours and theirs))


def test_weights_go_through_a_file_to_a_server_on_the_same_gpu(on_a_gpu, monkeypatch):
    """NCCL refuses two processes on one GPU."""
    client, answers = on_a_gpu
    answers["sparrow_device"][1]["gpu"] = "GPU-0"
    monkeypatch.setattr("sparrow_trl.rollout_server.VLLMClient.init_communicator", lambda *_: pytest.fail("NCCL"))
    client.init_communicator("cuda:0")
    assert client.communicator is None


def test_two_processes_get_their_own_rows(server_of_workers, tiny_qwen3, tmp_path):
    script = Path(__file__).with_name("two_rank_training.py")
    run_two_processes(str(script), tiny_qwen3, str(tmp_path), server_of_workers.url)
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert first["num_processes"] == 2
    assert first["completions"] != second["completions"]
    # Each measures its own rows, and both have some: scoring them is collective where the head is sharded.
    assert all(first["probed_tokens"]) and all(second["probed_tokens"])
    # The main process alone reads the server's counters.
    assert all(kept > 0 for kept in first["kept_pages"]) and not any(second["kept_pages"])
    assert first["engine_difference"] < 1e-3 and second["engine_difference"] < 1e-3
    assert first["weights_sum"] == pytest.approx(second["weights_sum"])


# What is refused


@pytest.fixture(scope="module")
def server_info(server):
    return SparseVLLMClient(base_url=server.url).get_server_info()


def changed(info, section, **values):
    return {**info, section: {**info[section], **values}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda info: {**info, "additional_config": {}}, ("no sparsity schedule", "sparrow-trl serve")),
        (lambda info: changed(info, "parallel_config", worker_extension_cls=""), ("extension ''", WORKER_EXTENSION)),
        (lambda info: changed(info, "parallel_config", data_parallel_size=2), ("2 engines", "--tensor-parallel-size")),
        (lambda info: changed(info, "cache_config", block_size=24), ("24 tokens", "--block-size")),
        (lambda info: changed(info, "model_config", dtype="torch.bfloat16"), ("torch.bfloat16", "--dtype float32")),
        (
            lambda info: changed(info, "model_config", logprobs_mode="raw_logprobs"),
            ("raw_logprobs", "--logprobs-mode"),
        ),
        (lambda info: changed(info, "model_config", max_logprobs=5), ("at most 5", "--max-logprobs 20")),
    ],
)
def test_servers_that_cannot_serve(server_info, change, words):
    check_server(server_info, SCHEDULE, torch.float32, 20, "URL")
    with pytest.raises(ValueError) as error:
        check_server(change(server_info), SCHEDULE, torch.float32, 20, "URL")
    assert "URL" in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_another_page_structure(server_info):
    other = SparsityScheduleConfig(top_k_pages=[1], page_size=32, bin_tokens=64)
    with pytest.raises(ValueError, match="page_size 16 and not 32"):
        check_server(server_info, other, torch.float32, 20, "URL")


def test_a_schedule_of_other_budgets_is_the_trainers(server_info):
    check_server(server_info, OTHER_SCHEDULE, torch.float32, 20, "URL")


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("vllm_engine_kwargs", {"max_num_seqs": 4}, "its own options"),
        ("vllm_block_size", 32, "--block-size"),
        ("vllm_tensor_parallel_size", 2, "--tensor-parallel-size"),
        ("vllm_max_model_length", 256, "--max-model-len"),
        ("vllm_enable_sleep_mode", True, "a GPU of its own"),
    ],
)
def test_settings_of_an_engine_in_the_trainer(tmp_path, name, value, option):
    others = {"vllm_engine_kwargs": None, "vllm_block_size": None, "vllm_max_model_length": None}
    with pytest.raises(ValueError, match=f"{name}=.*{option}"):
        make_config(tmp_path, vllm_mode="server", **{**others, name: value})


def test_an_engine_and_a_server(tiny_qwen3, tmp_path):
    config = make_config(
        tmp_path, vllm_mode="server", vllm_engine_kwargs=None, vllm_block_size=None, vllm_max_model_length=None
    )
    with pytest.raises(ValueError, match="engine is given"):
        RecordingTrainer(
            tiny_qwen3,
            share_of_small_letters,
            config,
            train_dataset=make_dataset(4),
            schedule=SCHEDULE,
            engine=object(),
        )


# Pieces


def test_the_sampled_token_is_found_whatever_its_rank():
    completion, sampled, probe = read_completion(
        [7, 3], [[-0.5, -1.5, -9.0], [-0.1, -2.5]], [[4, 5, 7], [3, 9]], top_k=2, row=4, prompt_length=11
    )
    assert completion == [7, 3] and sampled == [-9.0, -0.1]
    assert probe.token_ids.tolist() == [[4, 5], [3, 9]]
    assert probe.row == 4 and probe.prompt_length == 11 and probe.sampled_logprobs.tolist() == pytest.approx(sampled)


@pytest.mark.parametrize("logprob", [None, NOT_FINITE, float("nan")])
def test_a_broken_log_prob_names_its_token(logprob):
    with pytest.raises(RuntimeError, match="token 7 at position 1 of completion 2"):
        read_completion([3, 7], [[-0.1], [logprob]], [[3], [7]], top_k=0, row=2, prompt_length=5)


class OneGroupAtATime(SparseVLLMClient):
    """A client whose requests are answered here: each completion is its prompt's first token and a number."""

    def __init__(self, rows):
        self.probe_rows, self.probe_top_k, self.requests = (lambda num_rows: rows), 2, []


def answer(client, prompts, features, n, logprobs):
    client.requests.append((len(prompts), n, logprobs))
    ids = [[prompt[0], 100 * logprobs + index] for prompt in prompts for index in range(n)]
    top = [[[-0.1, -0.2, -3.0][: logprobs + 1]] * 2 for _ in ids]
    names = [[[token, 8, 9][: logprobs + 1] for token in pair] for pair in ids]
    return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": top, "logprob_token_ids": names}


def test_probed_completions_take_the_rows_that_were_chosen(monkeypatch):
    monkeypatch.setattr("sparrow_trl.rollout_server.VLLMClient.generate", answer)
    client = OneGroupAtATime([1, 3, 6])
    output = client.generate([[5], [6], [7]], n=3)
    # Prompts of one probed completion and two others are asked for together.
    assert sorted(client.requests) == [(3, 1, 2), (3, 2, 0)]
    assert [ids[0] for ids in output["completion_ids"]] == [5, 5, 5, 6, 6, 6, 7, 7, 7]
    assert sorted(client.probes) == [1, 3, 6]
    for row, ids in enumerate(output["completion_ids"]):
        assert (ids[1] >= 100) == (row in client.probes)
        if row in client.probes:
            assert client.probes[row].sampled_ids.tolist() == ids and client.probes[row].row == row
    assert output["logprobs"] == [[[-0.1], [-0.1]]] * 9


def test_an_empty_completion():
    assert read_completion([], [], [], top_k=0, row=0, prompt_length=3) == ([], [], None)
    assert read_completion([], [], [], top_k=4, row=0, prompt_length=3)[2].token_ids.shape == (0, 4)


def test_the_command_line():
    command = serve_command("model", SCHEDULE, ["--port", "9000", "--max-logprobs", "40"])
    config = json.loads(command[command.index("--additional-config") + 1])
    assert SparsityScheduleConfig.from_dict(config["sparrow_schedule"]) == SCHEDULE
    assert command[-4:] == ["--port", "9000", "--max-logprobs", "40"] and "processed_logprobs" in command


@pytest.mark.parametrize("option", ["--additional-config", "--worker_extension_cls=x", "--quantization", "-q"])
def test_options_that_are_decided(option):
    with pytest.raises(ValueError, match="cannot be given"):
        serve_command("model", SCHEDULE, [option])


def test_the_model_comes_first(tmp_path):
    with pytest.raises(ValueError, match="--port comes before the model"):
        run_serve(["--port", "8000", "model", "--schedule", "qwen3-4b-0.86"])


def test_what_fails_in_the_main_process_fails_in_all(trained, monkeypatch):
    generation = trained.vllm_generation

    def fail():
        raise KeyError("weight")

    with pytest.raises(KeyError, match="weight"):
        generation._from_main(fail)
    # What another process is sent.
    monkeypatch.setattr(
        "sparrow_trl.rollout_server.broadcast_object_list", lambda *_, **__: [None, "KeyError: weight"]
    )
    with pytest.raises(RuntimeError, match="main process failed with the vLLM server. KeyError: weight"):
        generation._from_main(lambda: None)
