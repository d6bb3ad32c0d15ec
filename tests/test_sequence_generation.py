"""Completions to measure on, from either generator."""

import copy
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from peft import LoraConfig, get_peft_model
from tiny_models import EOS_TOKEN_ID, SHAPE, tiny_model, tiny_tokenizer
from transformers import GenerationConfig

from sparrow_trl import sequence_generation, versions
from sparrow_trl.sequence_generation import EngineProcess, choose_generator, generate_sequences


PROMPTS = ["12+34=", "a", "What is the sum of 1 and 2?", "x*y", "hello"]


def complete(*args, **kwargs):
    return generate_sequences(*args, generator="transformers", **kwargs)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3").eval()


def test_generated_sequences_are_the_models_own_samples(model):
    tokenizer = tiny_tokenizer()
    model = copy.deepcopy(model)
    # Settings that would leave a single token.
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=1, temperature=0.3, min_p=0.9, repetition_penalty=2.0, eos_token_id=EOS_TOKEN_ID
    )
    settings = model.generation_config.to_dict()

    # A first token that ends the completion would be left out.
    def never_end(module, args, output):
        output.logits[..., EOS_TOKEN_ID] = -1e4
        return output

    model.register_forward_hook(never_end)
    prompts = ["abc"] * 400
    state = torch.get_rng_state()
    generated = complete(model, tokenizer, prompts, max_length=5, batch_size=400)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.generation_config.to_dict() == settings
    ids = tokenizer("abc")["input_ids"]
    assert all(sequence.token_ids[:3] == ids and sequence.prompt_length == 3 for sequence in generated)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    counts = torch.bincount(
        torch.tensor([sequence.token_ids[3] for sequence in generated]), minlength=SHAPE["vocab_size"]
    )
    # Total variation between 400 samples and the distribution; a sharper one is much farther.
    assert (counts / counts.sum() - expected).abs().sum() / 2 < 0.25
    sharper = expected.pow(2) / expected.pow(2).sum()
    assert (sharper - expected).abs().sum() / 2 > 0.3


def test_padding_does_not_change_what_is_sampled(model):
    tokenizer = tiny_tokenizer()
    together = complete(model, tokenizer, PROMPTS, max_length=60)
    assert [s.token_ids[: s.prompt_length] for s in together] == tokenizer(PROMPTS)["input_ids"]
    longest = max(len(ids) for ids in tokenizer(PROMPTS)["input_ids"])
    for sequence in together:
        completion = sequence.token_ids[sequence.prompt_length :]
        assert EOS_TOKEN_ID not in completion[:-1]
        assert len(completion) == 60 - longest or completion[-1] == EOS_TOKEN_ID
    assert complete(model, tokenizer, PROMPTS, max_length=60) == together
    assert complete(model, tokenizer, PROMPTS, max_length=60, seed=1) != together
    # The sampled tokens are likely under the model, which left padding seen as text would prevent.
    logprobs, uniform = [], -np.log(SHAPE["vocab_size"])
    for sequence in together:
        with torch.no_grad():
            logits = model(torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
        targets = torch.tensor(sequence.token_ids[sequence.prompt_length :])
        logprobs.append(logits[sequence.prompt_length - 1 : -1].gather(-1, targets[:, None]).mean())
    assert min(logprobs) > uniform + 0.5


def test_conversations_use_the_chat_template(model):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    (sequence,) = complete(model, tokenizer, [[{"role": "user", "content": "1+1"}]], max_length=20)
    assert tokenizer.decode(sequence.token_ids[: sequence.prompt_length]) == "1+1;A"


def test_completions_of_one_token_are_left_out(model):
    model = copy.deepcopy(model)
    ending = tiny_tokenizer()("b")["input_ids"][0]

    def end_after_b(module, args, kwargs, output):
        ends = kwargs["input_ids"][:, -1] == ending
        output.logits[:, -1, EOS_TOKEN_ID] = torch.where(ends, 1e4, -1e4)
        return output

    model.register_forward_hook(end_after_b, with_kwargs=True)
    with pytest.warns(UserWarning, match="1 of 2 completions ended with their first token and are left out"):
        (sequence,) = complete(model, tiny_tokenizer(), ["ab", "a"], max_length=12)
    assert sequence.prompt_length == 1
    with pytest.raises(ValueError, match="ended every completion with its first token"):
        complete(model, tiny_tokenizer(), ["ab", "bb"], max_length=12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "`prompts` must be a list of at least one"),
        ({"prompts": "abc"}, "`prompts` must be a list of at least one"),
        ({"prompts": ["a", ""]}, r"`prompts\[1\]` has 0 tokens"),
        ({"prompts": ["a", "b" * 19]}, r"`prompts\[1\]` has 19 tokens; .* at most 18"),
        ({"max_length": 4096}, "`max_length` is 4096, but the model has 2048"),
        ({"batch_size": 0}, "`batch_size` must be positive"),
    ],
)
def test_bad_prompts_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        complete(model, tiny_tokenizer(), **{"prompts": ["a"], "max_length": 20, **changes})


def complete_on_a_rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    generated = complete(tiny_model("qwen3").eval(), tiny_tokenizer(), PROMPTS, max_length=40, batch_size=2)
    (folder / f"generated_{rank}.json").write_text(json.dumps([[s.token_ids, s.prompt_length] for s in generated]))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*completions ended with their first token")
def test_two_processes_equal_one(model, tmp_path):
    mp.start_processes(complete_on_a_rank, args=(tmp_path,), nprocs=2, start_method="spawn")
    generated = complete(model, tiny_tokenizer(), PROMPTS, max_length=40, batch_size=2)
    for rank in range(2):
        found = json.loads((tmp_path / f"generated_{rank}.json").read_text())
        assert found == [[s.token_ids, s.prompt_length] for s in generated]


# vLLM


@pytest.fixture(scope="module")
def from_vllm(model):
    """Completions of 300 times one prompt and of `PROMPTS`, by an engine with the weights in memory."""
    lines = []
    with pytest.warns(UserWarning, match="ended with their first token"):
        generated = generate_sequences(
            model, tiny_tokenizer(), ["abc"] * 300 + PROMPTS, max_length=60, generator="vllm", report=lines.append
        )
    assert lines == ["vLLM completes the prompts."]
    return generated


def test_vllm_samples_the_models_own_distribution(model, from_vllm):
    ids = tiny_tokenizer()("abc")["input_ids"]
    first = [sequence.token_ids[3] for sequence in from_vllm if sequence.token_ids[:3] == ids]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    expected[EOS_TOKEN_ID] = 0  # left out
    expected /= expected.sum()
    counts = torch.bincount(torch.tensor(first), minlength=SHAPE["vocab_size"])
    assert len(first) > 200
    assert (counts / counts.sum() - expected).abs().sum() / 2 < 0.25
    assert len({tuple(sequence.token_ids) for sequence in from_vllm}) > 200  # a seed for each prompt


def test_vllm_stops_where_it_should_and_keeps_the_order(model, from_vllm):
    tokenizer = tiny_tokenizer()
    prompts = [sequence.token_ids[: sequence.prompt_length] for sequence in from_vllm]
    asked = tokenizer(["abc"] * 300 + PROMPTS)["input_ids"]
    positions = iter(asked)
    assert all(prompt in positions for prompt in prompts)  # in their order
    logprobs, ended = [], 0
    for sequence in from_vllm:
        completion = sequence.token_ids[sequence.prompt_length :]
        assert EOS_TOKEN_ID not in completion[:-1]
        assert len(sequence.token_ids) == 60 or completion[-1] == EOS_TOKEN_ID
        ended += completion[-1] == EOS_TOKEN_ID
        with torch.no_grad():
            logits = model(torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
        targets = torch.tensor(completion)
        entropy = -(logits.exp() * logits).sum(-1)[sequence.prompt_length - 1 : -1]
        surprise = -logits[sequence.prompt_length - 1 : -1].gather(-1, targets[:, None])[:, 0]
        logprobs.append(surprise - entropy)
    assert 0 < ended < len(from_vllm)
    # A sample is as surprising as the distribution's entropy, which another temperature or other weights would change.
    excess = torch.cat(logprobs)
    assert abs(excess.mean()) < 5 * excess.std() / len(excess) ** 0.5


def test_an_engine_that_does_not_start_says_why(tmp_path):
    folder = tmp_path / "no-model"
    folder.mkdir()
    with pytest.raises(RuntimeError, match=r"(?s)vLLM's engine failed. .*no-model"):
        EngineProcess({"model": str(folder)})


def test_an_engine_that_is_killed_says_so(monkeypatch):
    popen, processes = subprocess.Popen, []

    def start(command, **kwargs):
        code = "import sys, time; print('loading', flush=True); time.sleep(60)"
        processes.append(popen([sys.executable, "-c", code], **kwargs))
        os.kill(processes[0].pid, signal.SIGKILL)
        return processes[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(RuntimeError, match="Its process ended with exit status -9"):
        EngineProcess({})
    assert processes[0].returncode == -9


def test_auto_goes_on_with_transformers_when_the_engine_fails(model, monkeypatch):
    def fail(*args):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(sequence_generation, "start_engine", fail)
    arguments, lines = (model, tiny_tokenizer(), ["12+34="]), []
    generated = generate_sequences(*arguments, max_length=40, report=lines.append)
    assert generated == complete(*arguments, max_length=40)
    assert lines == ["transformers completes the prompts: vLLM's engine did not start.\nno memory left"]
    with pytest.raises(RuntimeError, match="no memory left"):
        generate_sequences(*arguments, max_length=40, generator="vllm")


def test_what_vllm_cannot_generate_from_is_left_to_transformers(model):
    assert choose_generator("auto", model) == ("vllm", None)
    assert choose_generator("transformers", model) == ("transformers", None)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
    unknown = copy.deepcopy(model)
    unknown.__class__ = type("MineForCausalLM", (type(model),), {})
    for other, reason in (
        (adapted, "PEFT adapters"),
        (copy.deepcopy(model).double(), "it is in torch.float64. Load it in torch.float16"),
        (copy.deepcopy(model).to("meta"), "it is on meta, but vLLM runs on cpu"),
        (unknown, "vLLM has no MineForCausalLM"),
    ):
        chosen, why = choose_generator("auto", other)
        assert chosen == "transformers" and reason in why
        with pytest.raises(ValueError, match=f"cannot generate from this model: .*{reason}"):
            choose_generator("vllm", other)
    with pytest.raises(ValueError, match="must be one of auto, vllm, transformers, got 'tgi'"):
        choose_generator("tgi", model)


def test_without_vllm_transformers_is_chosen(model, monkeypatch):
    monkeypatch.setattr(versions, "installed_version", lambda package: None)
    chosen, why = choose_generator("auto", model)
    assert chosen == "transformers" and "vllm is not installed" in why
    with pytest.raises(ImportError, match="vllm is not installed"):
        choose_generator("vllm", model)


def test_an_engine_has_one_gpu_and_no_launcher(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    monkeypatch.setenv("LOCAL_RANK", "1")
    environment = sequence_generation._engine_environment(torch.device("cuda", 1))
    assert environment["CUDA_VISIBLE_DEVICES"] == "6" and "LOCAL_RANK" not in environment
    assert os.environ["LOCAL_RANK"] == "1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sequence_generation._engine_environment(torch.device("cuda", 3))["CUDA_VISIBLE_DEVICES"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in sequence_generation._engine_environment(torch.device("cpu"))
