"""`DistillSparseCallback` in training: what has the adapter, what has not, and what is saved."""

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from fresh_process import run_two_processes
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from test_parity import FLOAT32_TOLERANCE, make_prompts, policy_logprobs, roll_out
from test_rollout_adapter import make_adapter
from test_trainer import make_trainer
from tiny_models import tiny_model
from tiny_training import make_config, make_dataset, share_of_small_letters
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from sparrow_trl import (
    DistillSparseCallback,
    DistillSparseConfig,
    RolloutAdapter,
    SparseRolloutGRPOTrainer,
    SparsityScheduleConfig,
)
from sparrow_trl.distill import ADAPTER_FOLDER, STATE_NAME, _check_stages
from sparrow_trl.rollout import swapped
from sparrow_trl.schedule import SCHEDULE_NAME


SCHEDULE = SparsityScheduleConfig(top_k_pages=[2, 3], bin_tokens=64, dense_layers=[0])
CHEAPER = SparsityScheduleConfig(top_k_pages=[1, 2], bin_tokens=64, dense_layers=[0])
CHEAPEST = SparsityScheduleConfig(top_k_pages=[0, 1], bin_tokens=64, dense_layers=[0])
PROMPTS = make_prompts([50, 90, 120])


def make_callback(**kwargs):
    defaults = {"lora": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), "learning_rate": 5e-3}
    return DistillSparseCallback(DistillSparseConfig(**{**defaults, "warmup_steps": 0, **kwargs}))


class Witness(TrainerCallback):
    """Keeps, at each step, the adapter and the policy as the rollouts that follow find them."""

    def __init__(self, distill):
        self.distill, self.adapters = distill, []

    def on_step_end(self, args, state, control, **kwargs):
        self.adapters.append({name: value.clone() for name, value in self.distill.adapter.state_dict().items()})


def start_run(model, folder):
    """A trainer that moves on to the last of three stages, with checkpoints, evaluation and checkpointed gradients."""
    distill = make_callback(
        stages=[CHEAPER, CHEAPEST],
        target_acceptance=0.05,
        stage_check_interval=1,
        stage_patience=1,
        stage_min_tokens=20,
    )
    witness = Witness(distill)
    config = make_config(
        folder,
        max_steps=3,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        gradient_checkpointing=True,
        acceptance_probe_fraction=1.0,
    )
    trainer = make_trainer(
        model, config, schedule=SCHEDULE, callbacks=[distill, witness], eval_dataset=make_dataset(1, seed=1)
    )
    trainer.distill, trainer.witness = distill, witness

    def generate(*args, generate=trainer.vllm_generation.generate, **kwargs):
        # The engine draws from torch's generator, of which a run that goes on has used less.
        with torch.random.fork_rng():
            torch.manual_seed(trainer.state.global_step)
            return generate(*args, **kwargs)

    trainer.vllm_generation.generate = generate
    return trainer


@pytest.fixture(scope="module")
def run(tiny_qwen3, tmp_path_factory):
    """Three steps of training."""
    trainer = start_run(tiny_qwen3, tmp_path_factory.mktemp("distill"))
    trainer.train()
    return trainer


@pytest.fixture
def generation(build_generation, tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    return build_generation(model, SCHEDULE, block_size=32)


def largest_difference(rollout, distributions):
    """Between the engine's log-probs and those in `distributions`, one of shape `[completion_length, vocab]` a row."""
    return max(
        float((torch.tensor(engine) - logprobs.gather(1, torch.tensor(ids)[:, None]).squeeze(1)).abs().max())
        for engine, logprobs, ids in zip(rollout.logprobs, distributions, rollout.completions, strict=True)
    )


def test_the_engine_has_the_adapter_in_sparse_rollouts_alone(generation):
    model = generation.model
    adapter = generation.adapter = make_adapter(model)
    for _ in range(2):
        completions, engine = roll_out(generation, PROMPTS)
        bare = policy_logprobs(model, SCHEDULE, PROMPTS, completions)
        with adapter.active():
            student = policy_logprobs(model, SCHEDULE, PROMPTS, completions)
        for row in range(len(PROMPTS)):
            assert abs(engine[row] - student[row]).max() < FLOAT32_TOLERANCE
            assert abs(engine[row] - bare[row]).max() > 1e-2
        with generation.dense_rollouts():
            completions, engine = roll_out(generation, PROMPTS)
        dense = policy_logprobs(model, SparsityScheduleConfig.dense(), PROMPTS, completions)
        assert all(abs(engine[row] - dense[row]).max() < FLOAT32_TOLERANCE for row in range(len(PROMPTS)))


def test_another_adapter_or_none_is_sent_before_the_next_rollout(generation):
    model = generation.model
    for seed in (0, 1, None):
        generation.adapter = None if seed is None else make_adapter(model, seed=seed)
        completions, engine = roll_out(generation, PROMPTS)
        with nullcontext() if seed is None else generation.adapter.active():
            student = policy_logprobs(model, SCHEDULE, PROMPTS, completions)
        assert all(abs(engine[row] - student[row]).max() < FLOAT32_TOLERANCE for row in range(len(PROMPTS)))


def test_weights_that_arrive_without_the_adapter_stop_training(generation):
    generation.adapter = make_adapter(generation.model)
    with (
        swapped(generation.adapter, "merged", lambda name, weight: weight),
        pytest.raises(RuntimeError, match="differ from the policy's"),
    ):
        generation.generate(PROMPTS, None, num_generations=1)


def test_a_hundred_synchronisations_change_no_weight(generation):
    weights = {name: value.clone() for name, value in generation.model.state_dict().items()}
    generation.adapter = make_adapter(generation.model)
    for _ in range(100):
        generation.sync_weights()
    assert generation.check_weights(PROMPTS) < 1e-4
    assert all(torch.equal(value, weights[name]) for name, value in generation.model.state_dict().items())


def test_rollouts_are_the_students(run):
    train = [rollout for rollout in run.rollouts if rollout.mode == "train"]
    assert len(train) == 3
    assert all((value != 0).any() for value in run.distill.adapter.state_dict().values())
    # The trainer of these tests scores each rollout without the adapter, which does nothing before the first step.
    differences = [largest_difference(rollout, rollout.sparse) for rollout in train]
    assert differences[0] < FLOAT32_TOLERANCE < 1e-3 < min(differences[1:])


def test_everything_dense_goes_without_the_adapter(run):
    for rollout in run.rollouts:
        if rollout.mode == "eval":
            assert largest_difference(rollout, rollout.dense) < FLOAT32_TOLERANCE
    assert sum(rollout.mode == "eval" for rollout in run.rollouts) == 3
    with torch.no_grad():
        logits = run.model.eval()(input_ids=torch.tensor([PROMPTS[0]])).logits
        again = AutoModelForCausalLM.from_pretrained(Path(run.args.output_dir, "checkpoint-3"), dtype=torch.float32)
        assert torch.equal(again(input_ids=torch.tensor([PROMPTS[0]])).logits, logits)
    run.model.train()


def test_metrics_and_stages(run):
    logs = [entry for entry in run.state.log_history if "distill/kl" in entry]
    assert len(logs) == 3
    assert all({"distill/loss", "distill/policy_loss", "distill/grad_norm"} <= entry.keys() for entry in logs)
    assert [entry["distill/stage"] for entry in logs] == [1, 2, 2]
    assert all(0 < entry["distill/tail"] <= 1 for entry in logs) and "distill/next_tail" not in logs[2]
    assert run.schedule == CHEAPEST and run.distill.stage == 2
    assert [rollout.schedule for rollout in run.rollouts if rollout.mode == "train"] == [SCHEDULE, CHEAPER, CHEAPEST]


def test_checkpoints_are_a_plain_runs_with_the_adapter_beside(run, tiny_qwen3):
    output_dir = Path(run.args.output_dir)
    for step, schedule in ((1, CHEAPER), (3, CHEAPEST)):
        checkpoint = output_dir / f"checkpoint-{step}"
        assert set(load_file(checkpoint / "model.safetensors")) == set(
            load_file(Path(tiny_qwen3) / "model.safetensors")
        )
        saved = load_file(checkpoint / ADAPTER_FOLDER / "adapter_model.safetensors")
        expected = run.witness.adapters[step - 1]
        assert all(torch.equal(value, expected[name]) for name, value in saved.items())
        assert SparsityScheduleConfig.from_pretrained(checkpoint / ADAPTER_FOLDER) == schedule
        optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        parameters = sum(len(group["params"]) for group in optimizer["param_groups"])
        assert parameters == len(list(run.model.parameters()))
    assert (output_dir / ADAPTER_FOLDER / SCHEDULE_NAME).is_file()


def test_the_adapter_that_is_saved_is_pefts(run):
    folder = Path(run.args.output_dir)
    base = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-3", dtype=torch.float32)
    input_ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad(), run.distill.adapter.active():
        expected = run.model.eval()(input_ids=input_ids).logits
        peft_model = PeftModel.from_pretrained(base, folder / ADAPTER_FOLDER).eval()
        assert torch.equal(peft_model(input_ids=input_ids).logits, expected)
    run.model.train()


def test_vllm_loads_the_adapter_as_a_lora(run, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    checkpoint = Path(run.args.output_dir) / "checkpoint-3"
    llm = LLM(
        str(checkpoint),
        enable_lora=True,
        max_lora_rank=8,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=2**26,
    )
    (output,) = llm.generate(
        [{"prompt_token_ids": PROMPTS[2]}],
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0),
        lora_request=LoRARequest("distill_sparse", 1, str(checkpoint / ADAPTER_FOLDER)),
    )
    engine = torch.tensor([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    adapter = RolloutAdapter.from_pretrained(model, checkpoint / ADAPTER_FOLDER)
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        bare = model(input_ids=ids).logits
        with adapter.active():
            student = model(input_ids=ids).logits
    bare, student = (
        logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1) for logits in (bare, student)
    )
    assert (engine - student).abs().max() < FLOAT32_TOLERANCE < 1e-2 < (engine - bare).abs().max()


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_ended(run, tiny_qwen3, tmp_path):
    trainer = start_run(tiny_qwen3, tmp_path)
    distill, seen = trainer.distill, {}

    def keep(inputs):
        if not seen:
            seen.update({name: value.clone() for name, value in distill.adapter.state_dict().items()})
            seen["stage"], seen["schedule"] = distill.stage, trainer.schedule
            seen["optimizer"] = copy.deepcopy(distill._adapter_trainer.optimizer.state_dict()["state"])

    trainer.trajectory_listeners.append(keep)
    checkpoint = Path(run.args.output_dir, "checkpoint-1")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    state = torch.load(checkpoint / ADAPTER_FOLDER / STATE_NAME, weights_only=True)
    assert all(torch.equal(seen[name], value) for name, value in run.witness.adapters[0].items())
    assert seen["stage"] == 1 and seen["schedule"] == CHEAPER
    for index, moments in state["optimizer"]["state"].items():
        assert torch.equal(seen["optimizer"][index]["exp_avg"], moments["exp_avg"])
    assert trainer.state.global_step == 3 and trainer.distill.stage == run.distill.stage == 2
    for adapter, uninterrupted in zip(trainer.witness.adapters, run.witness.adapters[1:], strict=True):
        for name, value in adapter.items():
            assert (value - uninterrupted[name]).abs().max() < 1e-5
    for name, value in run.model.state_dict().items():
        assert (trainer.model.state_dict()[name] - value).abs().max() < 1e-5


def test_dense_log_probs_are_bit_identical_with_the_callback(run):
    input_ids = torch.tensor([PROMPTS[1]])
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    plain = tiny_model("qwen3")
    plain.load_state_dict(state)
    plain.train(run.model.training)
    mask = torch.ones_like(input_ids)
    plain_scores, ours = (
        run._get_per_token_logps_and_entropies(model, input_ids, mask, 30, batch_size=1)[0]
        for model in (_with_fused_head(run, plain), run.model)
    )
    assert torch.equal(plain_scores, ours)


def _with_fused_head(trainer, model):
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, temperature=trainer.temperature, outputs=("log_probs", "entropy"))
    return model


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"divergence": "wasserstein"}, "divergence='wasserstein' must be one of"),
        ({"teacher": "old"}, "log-probs of the sampled tokens alone"),
        ({"teacher": "older"}, "teacher='older'"),
        ({"kl_weight": 0, "ppo_weight": 0}, "would learn nothing"),
        ({"lr_scheduler_type": "no_such_schedule"}, "no_such_schedule"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "it needs evaluations"),
        ({"learning_rate": -1}, "learning_rate must be a number of at least 0, but it is -1"),
        ({"stage_patience": 0}, "stage_patience must be an integer of at least 1"),
        ({"target_acceptance": 1.5}, "target_acceptance must be a number between 0 and 1"),
        ({"stages": ["no-such-preset"]}, "no-such-preset"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_configurations_are_refused(kwargs, message):
    with pytest.raises((ValueError, OSError), match=message):
        DistillSparseConfig(**kwargs)


def test_settings_from_files():
    config = DistillSparseConfig(lora={"r": 8, "target_modules": ["q_proj"]}, stages="qwen3-1.7b-0.80")
    assert config.lora.r == 8 and config.stages == [SparsityScheduleConfig.from_preset("qwen3-1.7b-0.80")]


class NoEngine:
    """In place of the generation: these refusals come before any rollout."""

    def __init__(self, schedule, **kwargs):
        self.schedule = schedule
        self.adapter, self.engine_dtype = None, torch.float32

    def set_schedule(self, schedule):
        self.schedule = schedule


@pytest.mark.parametrize(
    ("callback", "settings", "message"),
    [
        ({"lora": LoraConfig(target_modules=["nothing"])}, {}, "nothing"),
        ({"stages": [SCHEDULE]}, {}, "reads no less"),
        ({"stages": [replace(SCHEDULE, dense_layers=[0, 9], top_k_pages=[0])]}, {}, "layers 9"),
        ({"stages": [replace(CHEAPER, dense_layers=[0, 1, 2])]}, {}, "reads no less"),
        ({"divergence": "k3", "teacher": "old"}, {"vllm_importance_sampling_correction": False}, "teacher='old'"),
        ({}, {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}, "load_best_model"),
        ({"stages": [SparsityScheduleConfig(top_k_pages=[0], page_size=32, bin_tokens=64)]}, {}, "page_size=32"),
        ({}, {"fp16": True}, "fp16=True"),
        (
            {},
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "reentrant",
        ),
        ({}, {"peft": True}, "PEFT adapters of its own"),
    ],
    ids=["targets", "stage", "layer", "dearer", "teacher", "best", "page", "fp16", "reentrant", "peft"],
)
def test_what_cannot_work_is_refused_at_the_start(tiny_qwen3, tmp_path, monkeypatch, callback, settings, message):
    from sparrow_trl import trainer as trainer_module

    monkeypatch.setattr(trainer_module, "SparseVLLMGeneration", NoEngine)
    settings = dict(settings)
    if settings.pop("peft", False):
        kwargs = {"peft_config": LoraConfig(target_modules=["q_proj"])}
    else:
        kwargs = {}
    fp16 = settings.pop("fp16", False)
    config = make_config(tmp_path, **settings)
    with pytest.raises(ValueError, match=message), monkeypatch.context() as patch:
        if fp16:
            from accelerate import Accelerator

            patch.setattr(Accelerator, "mixed_precision", property(lambda self: "fp16"))
        make_trainer(
            tiny_qwen3,
            config,
            trainer_class=SparseRolloutGRPOTrainer,
            schedule=SCHEDULE,
            eval_dataset=make_dataset(1),
            callbacks=[make_callback(**callback)],
            **kwargs,
        )


def test_stages_may_differ_in_tables_of_layers_alone():
    by_layer = replace(SCHEDULE, layer_top_k_pages={"2-3": [1]})
    _check_stages([SCHEDULE, by_layer, replace(SCHEDULE, layer_top_k_pages={"1-3": [1]})], num_layers=4)
    with pytest.raises(ValueError, match="Stage 2 reads no less"):
        _check_stages([SCHEDULE, by_layer, SCHEDULE], num_layers=4)


def test_two_callbacks_are_refused(tiny_qwen3, tmp_path, monkeypatch):
    from sparrow_trl import trainer as trainer_module

    monkeypatch.setattr(trainer_module, "SparseVLLMGeneration", NoEngine)
    with pytest.raises(ValueError, match="two DistillSparseCallbacks"):
        make_trainer(
            tiny_qwen3,
            make_config(tmp_path),
            trainer_class=SparseRolloutGRPOTrainer,
            schedule=SCHEDULE,
            callbacks=[make_callback(), make_callback()],
        )
    with pytest.raises(ValueError, match="brings its own LoRA"):
        DistillSparseCallback(DistillSparseConfig(lora=LoraConfig()), adapter="folder")


def test_other_stages_do_not_go_on_from_a_checkpoint(run, tiny_qwen3, tmp_path, monkeypatch):
    from sparrow_trl import trainer as trainer_module

    monkeypatch.setattr(trainer_module, "SparseVLLMGeneration", NoEngine)
    checkpoint = str(Path(run.args.output_dir, "checkpoint-1"))
    for kwargs, message in (
        ({"stages": [CHEAPEST]}, "other stages: 3 schedules, of which 2"),
        ({"stages": [CHEAPER, CHEAPEST], "lora": LoraConfig(r=4, lora_alpha=16)}, "lora_alpha=8, but lora_alpha=16"),
    ):
        trainer = make_trainer(
            tiny_qwen3,
            make_config(tmp_path, max_steps=2),
            trainer_class=SparseRolloutGRPOTrainer,
            schedule=SCHEDULE,
            callbacks=[make_callback(**kwargs)],
        )
        with pytest.raises(ValueError, match=message):
            trainer.train(resume_from_checkpoint=checkpoint)


def test_without_stages_the_checkpoints_schedule_stays(run, tiny_qwen3, tmp_path, monkeypatch):
    from sparrow_trl import trainer as trainer_module

    monkeypatch.setattr(trainer_module, "SparseVLLMGeneration", NoEngine)
    trainer = make_trainer(
        tiny_qwen3,
        make_config(tmp_path, max_steps=2),
        trainer_class=SparseRolloutGRPOTrainer,
        schedule=SCHEDULE,
        callbacks=[make_callback()],
    )
    monkeypatch.setattr(trainer, "training_step", lambda *args, **kwargs: pytest.fail("enough"))
    with pytest.raises(pytest.fail.Exception, match="enough"):
        trainer.train(resume_from_checkpoint=str(Path(run.args.output_dir, "checkpoint-1")))
    assert trainer.schedule == CHEAPER


def test_a_plain_grpo_trainer_is_refused(tiny_qwen3, tmp_path):
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1, num_generations=2,
                        per_device_train_batch_size=2)  # fmt: skip
    dataset = Dataset.from_dict({"prompt": ["abc"] * 4})
    trainer = GRPOTrainer(
        tiny_qwen3, share_of_small_letters, config, train_dataset=dataset, callbacks=[DistillSparseCallback()]
    )
    with pytest.raises(ValueError, match="attached to no trainer with sparse rollouts"):
        trainer.train()


def test_an_adapter_to_begin_with(run, tmp_path, monkeypatch):
    from sparrow_trl import trainer as trainer_module

    monkeypatch.setattr(trainer_module, "SparseVLLMGeneration", NoEngine)
    checkpoint = Path(run.args.output_dir) / "checkpoint-3"
    callback = DistillSparseCallback(adapter=checkpoint / ADAPTER_FOLDER)
    make_trainer(
        str(checkpoint),
        make_config(tmp_path),
        trainer_class=SparseRolloutGRPOTrainer,
        schedule=SCHEDULE,
        callbacks=[callback],
    )
    expected = run.distill.adapter.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in callback.adapter.state_dict().items())


def test_two_processes_train_one_adapter(tiny_qwen3, tmp_path):
    script = Path(__file__).with_name("two_rank_distillation.py")
    run_two_processes(str(script), tiny_qwen3, str(tmp_path))
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["kl"][0] > 0 and len(ranks[0]["kl"]) == 2
