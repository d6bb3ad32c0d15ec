"""
What this package relies on inside TRL, vLLM, transformers and PEFT.

Their internals are overridden and swapped, so a release may break a promise that nobody gave. Each test states one,
by behaviour where that is cheap, and says which module of this package has to follow when it fails.
"""

import copy
import dataclasses
import importlib.util
import inspect
import math
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, extract_logprobs
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.trainer import grpo_trainer
from trl.trainer.utils import maybe_gather_lm_head_ctx
from vllm import LLM, SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from sparrow_trl import SparsityScheduleConfig, cli_serve, config, rollout, vllm_plugin
from sparrow_trl.rollout import swapped
from sparrow_trl.versions import installed_version


SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2], bin_tokens=64, dense_layers=[0])


def broken(package: str, module: str, what: str) -> str:
    """Message of a failed contract."""
    found = installed_version(package) if package in ("trl", "vllm") else version(package)
    return f"{package} {found}: {what}. Adapt sparrow_trl/{module}.py."


def check_parameters(package: str, module: str, function, expected: list[str]):
    found = [name for name in inspect.signature(function).parameters if name != "self"]
    assert found == expected, broken(package, module, f"{function.__qualname__} takes {found}, not {expected}")


# TRL: the generation class


@pytest.fixture(scope="module")
def policy(tiny_qwen3):
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)


@pytest.fixture(scope="module")
def lora_policy(tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return model.eval()


class RecordingLLM:
    """Stands in for `vllm.LLM`, and remembers how it was called."""

    outputs = ()

    def __init__(self, *args, **kwargs):
        self.init_args, self.init_kwargs = args, kwargs
        self.calls = []

    def generate(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.outputs

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")


def stock_generation(model, tokenizer_path, **kwargs) -> VLLMGeneration:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    with swapped(vllm_generation, "LLM", RecordingLLM):
        return VLLMGeneration(model, Accelerator(cpu=True), tokenizer, **kwargs)


def test_trl_builds_the_engine_from_the_name_llm_in_its_module(policy, tiny_qwen3):
    generation = stock_generation(policy, tiny_qwen3)
    assert isinstance(generation.llm, RecordingLLM), broken("trl", "rollout", "LLM is not looked up in its module")
    assert not generation.llm.init_args, broken("trl", "rollout", "LLM gets positional arguments")
    literals = generation.llm.init_kwargs
    chosen_by_config = {"gpu_memory_utilization", "max_model_len", "max_num_seqs", "seed", "trust_remote_code"}
    chosen_by_config |= {"max_num_batched_tokens"}
    assert set(literals) <= chosen_by_config | set(rollout._RESERVED_ENGINE_KWARGS), broken(
        "trl", "rollout", f"LLM gets new arguments, check them against those of ours: {sorted(literals)}"
    )
    assert literals["distributed_executor_backend"] == "external_launcher", broken(
        "trl", "rollout", "the engine may no longer run in the trainer's process, where its layers are reached"
    )
    assert literals["logprobs_mode"] == "processed_logprobs", broken(
        "trl", "rollout", "the engine's log-probs are not those after temperature"
    )
    assert not {"dtype", "block_size", "additional_config", "attention_backend", "max_logprobs"} & set(literals), (
        broken("trl", "rollout", "LLM gets an argument that the sparse engine overrides")
    )


def test_trl_initialises_the_engine_last(policy, tiny_qwen3):
    class Generation(VLLMGeneration):
        def _init_vllm(self):
            self.seen = set(vars(self))

    generation = Generation(policy, Accelerator(cpu=True), AutoTokenizer.from_pretrained(tiny_qwen3))
    used = {"model", "accelerator", "processing_class", "tensor_parallel_size", "max_model_length", "temperature"}
    assert used <= generation.seen, broken("trl", "rollout", "_init_vllm runs before the attributes it reads are set")


def test_signatures_of_the_generation_class():
    check_parameters("trl", "rollout", VLLMGeneration._init_vllm, [])
    check_parameters("trl", "rollout", VLLMGeneration.sync_weights, [])
    check_parameters("trl", "rollout", VLLMGeneration._iter_named_params, [])
    check_parameters("trl", "rollout", VLLMGeneration._fix_param_name_to_vllm, ["name", "extra_prefixes"])
    generate = ["prompts", "images", "num_generations", "profiler"]
    check_parameters("trl", "rollout", VLLMGeneration.generate, generate)


def test_trl_generates_with_one_request_per_prompt(policy, tiny_qwen3):
    generation = stock_generation(policy, tiny_qwen3, temperature=0.7, max_completion_length=5)
    flat = FlatLogprobs()
    flat.append({7: Logprob(-1.5, rank=1)})
    completion = SimpleNamespace(token_ids=[7], logprobs=flat)
    generation.llm.outputs = [SimpleNamespace(prompt_token_ids=[3], outputs=[completion])] * 2
    output = generation.generate([[3], [3]], None, 2)
    ((args, kwargs),) = generation.llm.calls
    assert args == ([{"prompt_token_ids": [3]}] * 2,), broken("trl", "rollout", "prompts reach the engine otherwise")
    assert set(kwargs) == {"sampling_params", "use_tqdm"}, broken("trl", "rollout", f"generate gets {set(kwargs)}")
    params = kwargs["sampling_params"]
    assert (params.n, params.logprobs, params.temperature, params.max_tokens) == (1, 0, 0.7, 5), broken(
        "trl", "rollout", "the sampling parameters that the trainer's are merged with have changed"
    )
    assert output == ([[3], [3]], [[7], [7]], [[[-1.5]]] * 2, [[[7]]] * 2), broken(
        "trl", "rollout", "generate returns something other than ids and log-probs of [sequences, tokens, 1]"
    )


def test_trl_sorts_logprobs_by_rank_and_hides_nan():
    # Why the sampled token's log-prob is handed over alone, and NaN is looked for before TRL sees it.
    sampled = {9: Logprob(-4.0, rank=9), 2: Logprob(-0.5, rank=1)}
    outputs = [SimpleNamespace(outputs=[SimpleNamespace(logprobs=[sampled, {3: Logprob(math.nan, rank=1)}])])]
    logprobs, token_ids = extract_logprobs(outputs)
    assert (logprobs, token_ids) == ([[[-0.5, -4.0], [None]]], [[[2, 9], [3]]]), broken(
        "trl", "rollout", "extract_logprobs no longer sorts by rank or no longer replaces NaN; simplify RolloutLLM"
    )


def test_trl_names_weights_as_the_checkpoint_does(policy, tiny_qwen3):
    generation = stock_generation(policy, tiny_qwen3)
    names = {name: param.data_ptr() for name, param in generation._iter_named_params()}
    expected = {name: param.data_ptr() for name, param in policy.named_parameters()}
    assert names == expected, broken("trl", "rollout", "_iter_named_params yields other names or copies")


def test_trl_merges_adapters_through_two_methods_of_the_model(lora_policy, tiny_qwen3):
    generation = stock_generation(lora_policy, tiny_qwen3)
    called = []
    with (
        swapped(lora_policy, "merge_adapter", lambda: called.append("merge")),
        swapped(lora_policy, "unmerge_adapter", lambda: called.append("unmerge")),
    ):
        names = [name for name, _ in generation._iter_named_params()]
    assert called == ["merge", "unmerge"], broken("trl", "rollout", "adapters are merged in another way")
    base = [name for name, _ in AutoModelForCausalLM.from_pretrained(tiny_qwen3).named_parameters()]
    assert names == base, broken("trl", "rollout", "a PEFT policy's weights have other names than its base model's")


def test_trl_resets_the_prefix_cache_after_sending_weights(policy, tiny_qwen3):
    generation = stock_generation(policy, tiny_qwen3)
    loaded = []
    runner = SimpleNamespace(model=SimpleNamespace(load_weights=loaded.extend))
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    generation.llm.llm_engine = SimpleNamespace(model_executor=executor)
    generation.sync_weights()
    assert len(loaded) == len(list(policy.parameters())), broken("trl", "rollout", "not every weight is sent")
    assert generation.llm.calls == ["reset_prefix_cache"], broken("trl", "rollout", "cached keys outlive the weights")


# TRL: the trainer


class FakeGeneration:
    """Stands in for `VLLMGeneration`: completions of different lengths, two log-probs per token."""

    def __init__(self, *args, **kwargs):
        self.init_args, self.init_kwargs = args, kwargs
        self.synced = 0
        self.calls = []

    def sync_weights(self):
        self.synced += 1

    def generate(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        prompts = kwargs["prompts"]
        completions = [[5 + row] * (row % 3 + 1) + [1] for row in range(len(prompts))]
        logprobs = [[[-0.25, -9.0] for _ in ids] for ids in completions]
        return prompts, completions, logprobs, [[[token, 2] for token in ids] for ids in completions]


@pytest.fixture(scope="module")
def stock_trainer(tiny_qwen3, tmp_path_factory):
    """A stock `GRPOTrainer` on a tiny policy, its engine replaced."""
    args = GRPOConfig(
        str(tmp_path_factory.mktemp("stock") / "out"),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        report_to="none",
        num_generations=4,
        temperature=0.8,
        per_device_train_batch_size=4,
        max_completion_length=8,
        gradient_checkpointing=False,
        vllm_importance_sampling_mode="token_truncate",
    )
    prompts = Dataset.from_list([{"prompt": "abc"}] * 4)
    made = []

    def create(*args, **kwargs):
        made.append((args, kwargs))
        return AutoModelForCausalLM.from_pretrained(*args, **kwargs)

    with (
        swapped(grpo_trainer, "VLLMGeneration", FakeGeneration),
        swapped(grpo_trainer, "create_model_from_path", create),
    ):
        trainer = GRPOTrainer(tiny_qwen3, lambda completions, **_: [float(len(c)) for c in completions], args, prompts)
    trainer.policies_made = made
    return trainer


@pytest.fixture(scope="module")
def scored_batch(stock_trainer):
    """One batch of the stock trainer, and how it scored it."""
    calls = []
    score = stock_trainer._get_per_token_logps_and_entropies

    def record(*args, **kwargs):
        result = score(*args, **kwargs)
        calls.append(SimpleNamespace(args=args, kwargs=kwargs, result=result, grad=torch.is_grad_enabled()))
        return result

    stock_trainer.model.train()
    stock_trainer._get_per_token_logps_and_entropies = record
    try:
        rows = [{"prompt": prompt} for prompt in ("a", "a", "abcdef", "abcdef")]
        output = stock_trainer._generate_and_score_completions(rows)
    finally:
        del stock_trainer._get_per_token_logps_and_entropies
    return SimpleNamespace(output=output, scored=calls)


def test_trl_builds_generation_and_policy_from_names_in_its_module(stock_trainer, tiny_qwen3):
    generation = stock_trainer.vllm_generation
    assert isinstance(generation, FakeGeneration), broken("trl", "trainer", "VLLMGeneration is not looked up by name")
    assert not generation.init_args, broken("trl", "trainer", "VLLMGeneration gets positional arguments")
    stock = set(inspect.signature(VLLMGeneration.__init__).parameters)
    assert set(generation.init_kwargs) <= stock, broken("trl", "trainer", "VLLMGeneration gets unknown arguments")
    assert generation.init_kwargs["logprobs"] == 0, broken("trl", "rollout", "TRL asks for more than one log-prob")
    assert generation.init_kwargs["model"] is stock_trainer.model, broken("trl", "rollout", "another model is passed")
    (((path,), _),) = stock_trainer.policies_made
    assert path == tiny_qwen3, broken("trl", "trainer", "a policy given by name is not made by create_model_from_path")


def test_trl_generates_once_a_batch_after_sending_the_weights(stock_trainer, scored_batch):
    generation = stock_trainer.vllm_generation
    ((args, kwargs),) = generation.calls
    assert not args and set(kwargs) == {"prompts", "images", "num_generations", "profiler"}, broken(
        "trl", "rollout", f"generate is called with {args} and {sorted(kwargs)}"
    )
    assert kwargs["images"] is None and kwargs["num_generations"] == 4
    assert [len(ids) for ids in kwargs["prompts"]] == [1, 1, 6, 6], broken(
        "trl", "rollout", "prompts are not lists of ids without padding, one for each completion"
    )
    assert generation.synced == 1, broken("trl", "rollout", "weights are not sent once before a generation batch")
    check_parameters(
        "trl",
        "trainer",
        GRPOTrainer._generate_single_turn,
        ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
    )


def test_trl_keeps_entry_0_of_the_logprobs(scored_batch):
    kept = scored_batch.output["sampling_per_token_logps"]
    assert kept[scored_batch.output["completion_mask"].bool()].eq(-0.25).all(), broken(
        "trl", "rollout", "the first of a position's log-probs is no longer the one that is kept"
    )


def test_trl_pads_prompts_left_and_completions_right(scored_batch):
    output = scored_batch.output
    assert {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask"} <= output.keys(), broken(
        "trl", "trainer", f"a scored batch has the keys {sorted(output)}"
    )
    assert output["prompt_mask"].tolist() == [[0] * 5 + [1]] * 2 + [[1] * 6] * 2, broken(
        "trl", "trainer", "prompts are not padded on the left"
    )
    assert output["completion_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], broken(
        "trl", "trainer", "completions are not padded on the right"
    )


def test_trl_scores_each_rollout_with_the_policy_first_and_without_gradients(stock_trainer, scored_batch):
    output = scored_batch.output
    (call,) = scored_batch.scored
    model, input_ids, attention_mask, logits_to_keep = call.args
    assert model is stock_trainer.model and not call.grad, broken("trl", "trainer", "p is not the policy's")
    assert torch.equal(input_ids, torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)), broken(
        "trl", "trainer", "prompts and completions are laid out otherwise for scoring"
    )
    assert torch.equal(attention_mask, torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1))
    assert logits_to_keep == output["completion_ids"].size(1)
    assert len(call.result) == 3 and call.result[0].shape == output["completion_ids"].shape, broken(
        "trl", "trainer", "scoring does not return log-probs of the completions as the first of three"
    )


def test_trl_scores_tokens_from_the_hidden_states_of_the_position_before(stock_trainer, scored_batch):
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    leading = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
    assert parameters[:6] == leading, broken("trl", "trainer", f"scoring takes {parameters}")
    chunks = []
    model = stock_trainer.model
    hook = model.base_model.register_forward_hook(lambda module, inputs, output: chunks.append(output))
    _, *args = scored_batch.scored[0].args
    try:
        with torch.no_grad():
            logps, _, _ = stock_trainer._get_per_token_logps_and_entropies(model, *args, batch_size=3)
    finally:
        hook.remove()
    states = [getattr(chunk, "last_hidden_state", None) for chunk in chunks]
    assert [state is not None and len(state) for state in states] == [3, 1], broken(
        "trl", "trainer", "the backbone does not run once per chunk of the batch, in order, with its hidden states out"
    )
    input_ids, _, keep = args
    hidden = torch.cat(states)[:, -keep - 1 : -1]
    logits = hidden @ model.get_output_embeddings().weight.T / stock_trainer.temperature
    expected = logits.log_softmax(-1).gather(-1, input_ids[:, -keep:, None]).squeeze(-1)
    mask = scored_batch.output["completion_mask"].bool()
    torch.testing.assert_close(logps[mask], expected[mask], rtol=0, atol=1e-5)


def test_trl_averages_the_lists_in_metrics(stock_trainer):
    stock_trainer._metrics["train"]["acceptance/tail"] += [0.5, 0.7]
    stock_trainer.model.train()
    stock_trainer.log(logs := {})
    assert logs["acceptance/tail"] == pytest.approx(0.6), broken("trl", "trainer", "_metrics are logged otherwise")


def test_trl_computes_the_loss_of_a_batch_in_a_method_of_its_own(stock_trainer, scored_batch):
    check_parameters("trl", "trainer", GRPOTrainer._compute_loss, ["model", "inputs"])
    seen = []
    with swapped(stock_trainer, "_compute_loss", lambda model, inputs: seen.append(inputs)):
        stock_trainer.compute_loss(stock_trainer.model, scored_batch.output)
    assert seen == [scored_batch.output], broken("trl", "trainer", "compute_loss does not go through _compute_loss")
    names = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}
    names |= {"old_per_token_logps", "sampling_per_token_logps"}
    assert names <= scored_batch.output.keys(), broken("trl", "distill", "batches have other names")


def test_trl_sends_weights_again_only_after_another_step(stock_trainer, scored_batch):
    # The rollout class sends them itself when the adapter comes or goes in between.
    assert stock_trainer._last_loaded_step == stock_trainer.state.global_step, broken(
        "trl", "rollout", "the step whose weights were sent is not in _last_loaded_step"
    )


def test_arguments_of_the_chunked_kernels():
    check_parameters(
        "trl",
        "distill_step",
        ChunkedDivergenceFunction.forward,
        ["ctx", "student_hidden", "student_weight", "student_bias", "teacher_hidden", "teacher_weight", "teacher_bias"]
        + ["beta", "temperature", "student_logit_scale", "student_final_logit_softcapping", "teacher_logit_scale"]
        + ["teacher_final_logit_softcapping"],
    )
    check_parameters(
        "trl",
        "distill_step",
        ChunkedLogProbFunction.forward,
        ["ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping"]
        + ["logit_scale", "outputs"],
    )


def test_checkpointed_layers_say_so():
    model = AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(num_hidden_layers=1, hidden_size=64, head_dim=16)
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layer = model.model.layers[0]
    assert isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing, broken(
        "transformers", "distill_step", "gradient checkpointing is switched on in another place"
    )


def test_peft_wraps_layers_in_place(tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    linear = model.model.layers[0].self_attn.q_proj
    LoraModel(model, LoraConfig(target_modules=["q_proj"]), "default")
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.base_layer is linear, broken("peft", "rollout_adapter", "a layer is copied when it is wrapped")
    assert set(layer._modules) >= {"base_layer", "lora_A", "lora_B", "lora_dropout"}, broken(
        "peft", "rollout_adapter", "a layer has other parts"
    )
    assert hasattr(model, "peft_config"), broken("peft", "rollout_adapter", "the model keeps its adapters elsewhere")


def test_attributes_of_the_trainer(stock_trainer):
    for name in ("_step", "num_iterations", "temperature", "model", "accelerator", "callback_handler", "state"):
        assert hasattr(stock_trainer, name), broken("trl", "trainer", f"GRPOTrainer has no attribute {name}")
    for name in ("epsilon_low", "epsilon_high", "is_fsdp_enabled", "is_deepspeed_enabled"):
        assert hasattr(stock_trainer, name), broken("trl", "distill", f"GRPOTrainer has no attribute {name}")
    assert stock_trainer.args.steps_per_generation == 1
    assert isinstance(GRPOTrainer._tag_names, list) and isinstance(GRPOTrainer._name, str), broken(
        "trl", "trainer", "model cards are filled in from other attributes"
    )
    assert {"title", "id", "citation"} == set(GRPOTrainer._paper), broken("trl", "trainer", "_paper has other keys")


def test_checkpoints_are_saved_and_loaded_through_two_methods(stock_trainer, tmp_path):
    check_parameters("transformers", "trainer", Trainer._save, ["output_dir", "state_dict"])
    check_parameters("transformers", "trainer", Trainer._load_optimizer_and_scheduler, ["checkpoint"])
    saved = []
    with swapped(stock_trainer, "_save", lambda output_dir=None, state_dict=None: saved.append(output_dir)):
        stock_trainer.save_model(str(tmp_path))
    assert saved == [str(tmp_path)], broken("transformers", "trainer", "save_model does not go through _save")
    assert "self._load_optimizer_and_scheduler(resume_from_checkpoint)" in inspect.getsource(Trainer), broken(
        "transformers", "trainer", "resuming does not go through _load_optimizer_and_scheduler"
    )


@pytest.fixture
def pushing_trainer(tmp_path):
    """A stock `Trainer` of a linear model that saves and pushes at its only step, and what it did in which order."""
    events = []

    class Events(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            events.append("on_save")

        def on_push_begin(self, args, state, control, **kwargs):
            events.append("on_push_begin")

        def on_train_end(self, args, state, control, **kwargs):
            events.append("on_train_end")

    class Linear(torch.nn.Linear):
        def forward(self, x, labels=None):
            return {"loss": super().forward(x).mean()}

    class PushingTrainer(Trainer):
        def _maybe_log_save_evaluate(self, *args, **kwargs):
            super()._maybe_log_save_evaluate(*args, **kwargs)
            events.append("end of the step")

        def _finish_current_push(self):
            events.append("wait")
            super()._finish_current_push()

        def create_model_card(self, **kwargs):
            events.append("card")

    options = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1}
    args = TrainingArguments(str(tmp_path / "out"), max_steps=1, **options)
    trainer = PushingTrainer(Linear(2, 1), args, train_dataset=[{"x": torch.ones(2)}] * 8, callbacks=[Events()])
    # As `init_hf_repo` leaves it.
    trainer.args.push_to_hub, trainer.hub_model_id, trainer.push_in_progress = True, "owner/name", None
    trainer.events = events
    return trainer


class FakeHub:
    """Stands in for the Hub's client of transformers, and remembers what it was to upload."""

    def __init__(self, events):
        self.events, self.uploads, self.job = events, [], Future()
        self.job.set_exception(ConnectionError("broken"))

    def upload_folder(self, **kwargs):
        self.events.append("upload")
        self.uploads.append(kwargs)
        return self.job


def test_transformers_pushes_a_checkpoint_before_the_callbacks_save(pushing_trainer):
    check_parameters("transformers", "trainer", Trainer._push_from_checkpoint, ["checkpoint_folder"])
    hub = FakeHub(pushing_trainer.events)
    with swapped(transformers.trainer, "hf_api", lambda: hub):
        pushing_trainer.train()
    events = pushing_trainer.events
    assert events[:4] == ["on_push_begin", "upload", "on_save", "end of the step"], broken(
        "transformers", "trainer", f"a step ends with {events}, and the push is held back in vain or too late"
    )
    assert events[-2:] == ["on_train_end", "wait"], broken("transformers", "trainer", f"training ends with {events}")
    (upload,) = hub.uploads
    assert upload["folder_path"] == pushing_trainer.args.output_dir and upload["run_as_future"], broken(
        "transformers", "callbacks", f"not the output folder is pushed in the background: {upload}"
    )
    assert "checkpoint-*" in upload["ignore_patterns"], broken("transformers", "trainer", "checkpoints are pushed too")
    assert pushing_trainer.push_in_progress.jobs == [hub.job], broken(
        "transformers", "trainer", "the jobs of a push are kept elsewhere, so that a failed one is not reported"
    )


def test_transformers_makes_the_card_last_before_it_pushes(pushing_trainer):
    parameters = ["commit_message", "blocking", "token", "revision", "private", "kwargs"]
    check_parameters("transformers", "trainer", Trainer.push_to_hub, parameters)
    check_parameters("transformers", "trainer", Trainer.init_hf_repo, ["token", "private"])
    hub = FakeHub(pushing_trainer.events)
    with swapped(transformers.trainer, "hf_api", lambda: hub):
        pushing_trainer.push_to_hub()
    assert pushing_trainer.events == ["on_push_begin", "card", "wait", "upload"], broken(
        "transformers", "trainer", f"push_to_hub does {pushing_trainer.events}"
    )
    assert hub.uploads[0]["folder_path"] == pushing_trainer.args.output_dir


def test_trl_writes_a_card_with_these_texts(stock_trainer):
    check_parameters("trl", "trainer", GRPOTrainer.create_model_card, ["model_name", "dataset_name", "tags"])
    stock_trainer.create_model_card("name", "owner/data")
    card = Path(stock_trainer.args.output_dir, "README.md").read_text()
    for text in (
        "fine-tuned version of [None](https://huggingface.co/None)",
        'model="None"',
        "licence: license",
        "\n### Framework versions\n",
        "datasets: owner/data",
    ):
        assert text in card, broken("trl", "hub_cards", f"the model card no longer has {text!r}")


def test_defaults_of_the_config_that_are_overridden():
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    assert defaults["use_vllm"] is False, broken("trl", "config", "use_vllm has another default")
    assert defaults["vllm_importance_sampling_mode"] == "sequence_mask", broken(
        "trl", "config", "vllm_importance_sampling_mode has another default; the override may be needless"
    )


def test_fields_of_the_config_that_are_checked(tmp_path):
    stock = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, generation_kwargs='{"seed": 1}')
    assert stock.generation_kwargs == {"seed": 1}, broken("trl", "config", "JSON strings are no longer parsed first")
    for name, neutral in config._NEUTRAL_SAMPLING.items():
        if hasattr(stock, name):
            assert getattr(stock, name) in neutral, broken("trl", "config", f"{name} defaults to a biased sampler")
    assert {"top_p", "top_k", "min_p", "repetition_penalty"} <= vars(stock).keys()
    for name, value in (
        ("vllm_mode", "colocate"),
        ("vllm_model_impl", "vllm"),
        ("vllm_importance_sampling_correction", True),
        ("vllm_structured_outputs_regex", None),
        ("mask_truncated_completions", False),
    ):
        assert getattr(stock, name, "missing") == value, broken("trl", "config", f"{name} is missing or not {value!r}")


# transformers, PEFT


def test_quantised_models_say_so():
    from transformers.quantizers.base import HfQuantizer

    assert '"is_quantized", True' in inspect.getsource(HfQuantizer), broken(
        "transformers", "rollout", "quantised models are marked otherwise"
    )


def test_configs_tell_multimodal_models_and_windows_apart():
    text = transformers.Qwen3Config()
    assert text.get_text_config() is text, broken("transformers", "rollout", "a text model has a text config apart")
    assert transformers.LlavaConfig().get_text_config() is not None
    assert transformers.LlavaConfig().get_text_config().model_type != "llava"
    windows = transformers.Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=1)
    assert "sliding_attention" in windows.layer_types and windows.sliding_window == 64, broken(
        "transformers", "rollout", "sliding windows are declared otherwise"
    )


def test_adapters_merge_into_a_copy(lora_policy):
    layers = [module for module in lora_policy.modules() if isinstance(module, BaseTunerLayer)]
    layer = layers[0]
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    before = layer.get_base_layer().weight.clone()
    merged = copy.deepcopy(layer).float()
    merged.merge()
    torch.testing.assert_close(merged.get_base_layer().weight, before + delta)
    assert torch.equal(layer.get_base_layer().weight, before) and layer.disable_adapters is False, broken(
        "peft", "rollout", "merging a copy of a tuner layer changes the original"
    )
    names = [name for name, _ in lora_policy.named_modules()]
    assert "base_model.model.model.layers.0.self_attn.q_proj" in names, broken("peft", "rollout", "names changed")


def test_prompt_learning_says_so(lora_policy):
    assert PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=1).is_prompt_learning
    assert lora_policy.active_peft_config.is_prompt_learning is False, broken("peft", "rollout", "is_prompt_learning")


# TRL and vLLM: server mode


class RecordingClient:
    """Stands in for TRL's client, and remembers how it was called."""

    def __init__(self, **kwargs):
        self.init_kwargs, self.calls = kwargs, []

    def init_communicator(self, device):
        self.calls.append(("init_communicator", device))

    def generate(self, **kwargs):
        self.calls.append(("generate", kwargs))
        rows = len(kwargs["prompts"]) * kwargs["n"]
        ids = {"prompt_ids": kwargs["prompts"], "completion_ids": [[7]] * rows}
        return {**ids, "logprobs": [[[-1.5]]] * rows, "logprob_token_ids": [[[7]]] * rows}

    def update_named_params(self, metadata, named_params):
        self.calls.append(("update_named_params", metadata, [name for name, _ in named_params]))

    def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache",))


def test_trl_talks_to_a_server_through_the_name_vllmclient(policy, tiny_qwen3):
    module = "rollout_server"
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    with swapped(vllm_generation, "VLLMClient", RecordingClient):
        generation = VLLMGeneration(policy, Accelerator(cpu=True), tokenizer, mode="server", temperature=0.7)
    client = generation.vllm_client
    assert isinstance(client, RecordingClient), broken("trl", module, "VLLMClient is not looked up in its module")
    assert client.calls[0][0] == "init_communicator", broken("trl", module, "the communicator is not opened at once")
    output = generation.generate([[3], [3], [4], [4]], None, 2)
    kwargs = client.calls[1][1]
    assert (kwargs["prompts"], kwargs["n"], kwargs["logprobs"]) == ([[3], [4]], 2, 0), broken(
        "trl", module, "prompts reach the client otherwise than once each, with their number of completions"
    )
    assert output[1:] == ([[7]] * 4, [[[-1.5]]] * 4, [[[7]]] * 4), broken("trl", module, "completions come otherwise")
    generation.sync_weights()
    (_, metadata, names), reset = client.calls[2:]
    assert [name for name, *_ in metadata] == names and reset == ("reset_prefix_cache",), broken(
        "trl", module, "weights are announced otherwise than by name, dtype and shape, or the cache is not reset"
    )


def test_signatures_of_the_client():
    module = "rollout_server"
    connection = ["base_url", "host", "server_port", "group_port", "connection_timeout"]
    check_parameters("trl", module, VLLMClient.__init__, connection)
    check_parameters("trl", module, VLLMClient.init_communicator, ["device"])
    check_parameters("trl", module, VLLMClient.update_named_params, ["metadata", "named_params"])
    check_parameters("trl", module, VLLMClient._post, ["url", "kwargs"])
    generate = list(inspect.signature(VLLMClient.generate).parameters)
    assert generate[1:4] == ["prompts", "features", "n"], broken("trl", module, f"generate takes {generate}")


def test_vllm_serves_by_these_modules():
    for name in (cli_serve.VLLM_SERVE[0], "vllm.entrypoints.launchers.api_server.entry"):
        source = Path(importlib.util.find_spec(name).origin).read_text()
        assert 'if __name__ == "__main__":' in source, broken("vllm", "cli_serve", f"{name} is no program any more")
    from vllm.entrypoints.serve.dev.rpc import api_router

    source = inspect.getsource(api_router.collective_rpc)
    assert "isinstance(result, dict | list)" in source, broken(
        "vllm", "vllm_worker_extension", "/collective_rpc may not hand dictionaries back as they are"
    )


# vLLM: plug-ins and backends


def test_backends_are_registered_by_name():
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins", broken(
        "vllm", "vllm_plugin", "plug-ins are found elsewhere"
    )
    check_parameters("vllm", "vllm_plugin", register_backend, ["backend", "class_path", "is_mamba"])
    stock = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert AttentionBackendEnum.CPU_ATTN.value == stock, broken("vllm", "vllm_backend", "CPU_ATTN is another class")
    vllm_plugin.register()
    for backend, name in (
        ("CPU_ATTN", "vllm_backend.SparseCPUAttentionBackend"),
        ("CUSTOM", "vllm_cuda_backend.SparseFlashAttentionBackend"),
    ):
        assert AttentionBackendEnum[backend].get_path() == f"sparrow_trl.{name}", broken(
            "vllm", "vllm_plugin", f"{backend} cannot be registered"
        )


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the CPU platform chooses its own backend")
def test_the_cpu_platform_takes_cpu_attn_whatever_is_asked_for():
    vllm_plugin.register()
    selector = SimpleNamespace(use_sparse=False, use_mla=False)
    path = current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, selector)
    assert path == AttentionBackendEnum.CPU_ATTN.get_path(), broken(
        "vllm", "vllm_plugin", "the CPU platform honours the requested backend; ask for CUSTOM there too"
    )


def attention_classes():
    from vllm.v1.attention.backends import flash_attn

    return [
        (cpu_attn.CPUAttentionBackendImpl, cpu_attn.CPUAttentionMetadataBuilder),
        (flash_attn.FlashAttentionImpl, flash_attn.FlashAttentionMetadataBuilder),
    ]


@pytest.mark.parametrize(("impl", "builder"), attention_classes())
def test_signatures_of_the_attention_classes(impl, builder):
    check_parameters(
        "vllm",
        "vllm_backend",
        impl.__init__,
        ["num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"]
        + ["logits_soft_cap", "attn_type", "kv_sharing_target_layer_name", "sinks"],
    )
    check_parameters(
        "vllm",
        "vllm_backend",
        impl.forward,
        ["layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"]
        + ["output_scale", "output_block_scale"],
    )
    check_parameters(
        "vllm", "vllm_backend", impl.do_kv_cache_update, ["layer", "key", "value", "kv_cache", "slot_mapping"]
    )
    check_parameters(
        "vllm", "vllm_backend", builder.__init__, ["kv_cache_spec", "layer_names", "vllm_config", "device"]
    )
    build = ["common_prefix_len", "common_attn_metadata", "fast_build"]
    check_parameters("vllm", "vllm_backend", builder.build, build)


def test_attributes_of_the_stock_implementation():
    impl = cpu_attn.CPUAttentionBackendImpl(4, 32, 0.5, 2, None, None, "auto")
    expected = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 32,
        "scale": 0.5,
        "alibi_slopes": None,
        "sliding_window": -1,
        "sinks": None,
        "logits_soft_cap": 0,
        "kv_cache_dtype": "auto",
        "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
    }
    found = {name: getattr(impl, name, "missing") for name in expected}
    assert found == expected, broken("vllm", "vllm_backend", f"plain causal attention shows as {found}")
    assert cpu_attn.CPUAttentionBackend.forward_includes_kv_cache_update is False, broken(
        "vllm", "vllm_backend", "keys are written inside forward, so do_kv_cache_update is not called"
    )


def test_head_and_block_sizes_of_the_cpu_kernels():
    backend = cpu_attn.CPUAttentionBackend
    assert {32, 64, 80, 96, 128, 256} <= set(backend.get_supported_head_sizes()), broken(
        "vllm", "vllm_backend", "the CPU kernels have lost a head size"
    )
    (unit,) = backend.get_supported_kernel_block_sizes()
    assert unit.base == 32, broken("vllm", "rollout", "KV blocks on a CPU are multiples of something else than 32")


def test_fields_of_the_attention_metadata():
    fields = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    used = {"num_reqs", "num_actual_tokens", "query_start_loc", "query_start_loc_cpu", "seq_lens", "req_idx"}
    used |= {"seq_lens_cpu_upper_bound", "block_table_tensor", "slot_mapping", "positions", "is_prefilling"}
    assert used <= fields, broken("vllm", "vllm_backend", f"CommonAttentionMetadata has lost {sorted(used - fields)}")
    metadata = cpu_attn.CPUAttentionMetadata
    assert dataclasses.is_dataclass(metadata) and not hasattr(metadata, "__slots__"), broken(
        "vllm", "vllm_backend", "the metadata takes no further attribute"
    )


def test_what_the_gpu_backend_overrides():
    from vllm.model_executor.layers.attention import attention
    from vllm.v1.attention.backends import flash_attn

    backend = flash_attn.FlashAttentionBackend
    check_parameters("vllm", "vllm_cuda_backend", backend.customize_spec, ["spec"])
    check_parameters("vllm", "vllm_cuda_backend", backend.supported_kv_cache_layouts, [])
    assert backend.forward_includes_kv_cache_update is False, broken(
        "vllm", "vllm_cuda_backend", "keys are written inside forward, so do_kv_cache_update is not called"
    )
    # Decode steps put off the write of keys and values from the one operation to the other.
    check_parameters("vllm", "vllm_cuda_backend", attention.get_attention_context, ["layer_name"])
    order = inspect.getsource(attention.Attention.forward)
    assert 0 < order.find("unified_kv_cache_update(") < order.find("unified_attention_with_output("), broken(
        "vllm", "vllm_cuda_backend", "attention does not write the KV cache before it attends"
    )
    builder = flash_attn.FlashAttentionMetadataBuilder
    check_parameters(
        "vllm",
        "vllm_cuda_backend",
        builder._init_reorder_batch_threshold,
        ["reorder_batch_threshold", "supports_spec_as_decode", "supports_dcp_with_varlen"],
    )
    assert inspect.signature(builder.use_cascade_attention).return_annotation is bool, broken(
        "vllm", "vllm_cuda_backend", "use_cascade_attention does not say whether"
    )
    source = inspect.getsource(builder.__init__)
    missing = [name for name in ("num_heads_q", "num_heads_kv", "headdim") if f"self.{name} = " not in source]
    assert not missing, broken("vllm", "vllm_cuda_backend", f"the builder does not know {', '.join(missing)}")
    padded = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, page_size_padded=9000
    )
    assert padded.page_size_bytes == 9000, broken("vllm", "vllm_cuda_backend", "a KV block has no room for landmarks")


def test_both_model_runners_let_the_backend_pad_its_blocks_and_know_the_prompts():
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import attn_utils, states
    from vllm.v1.worker.gpu.model_states import default

    for function in (gpu_model_runner.GPUModelRunner.get_kv_cache_spec, attn_utils.get_kv_cache_spec):
        assert "customize_spec(" in inspect.getsource(function), broken(
            "vllm", "vllm_cuda_backend", f"{function.__module__} does not ask backends for their KV cache spec"
        )
    assert "req_idx=input_batch.idx_mapping_np" in inspect.getsource(default), broken(
        "vllm", "vllm_backend", "model runner V2 does not say which request a row is"
    )
    assert "self.prompt_len = UvaBackedTensor(" in inspect.getsource(states.RequestState), broken(
        "vllm", "vllm_backend", "model runner V2 keeps prompt lengths elsewhere"
    )


def test_the_connector_that_fills_the_cache_for_benchmarks():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert "DecodeBenchConnector" in KVConnectorFactory._registry, broken(
        "vllm", "bench_worker", "there is no DecodeBenchConnector"
    )


def test_every_sampling_parameter_is_accounted_for():
    # A new one may change the sampler's distribution; decide where it belongs.
    harmless = {
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "extra_args",
        "skip_reading_prefix_cache",
        "repetition_detection",  # ends a completion, as a stop string does
        "routed_experts_prompt_start",
        "watermarking",  # of a watermark that the engine would have to be given
    }
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    known = harmless | set(config._NEUTRAL_SAMPLING) | set(config._RESERVED_SAMPLING)
    assert fields == known, broken("vllm", "config", f"sampling parameters came or went: {sorted(fields ^ known)}")
    defaults = SamplingParams()
    for name, neutral in config._NEUTRAL_SAMPLING.items():
        assert getattr(defaults, name) in neutral, broken("vllm", "config", f"{name} is not neutral by default")


# vLLM: a running engine


@pytest.fixture(scope="module")
def generation(build_generation, tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    return build_generation(model, SCHEDULE, block_size=32)


@pytest.fixture(scope="module")
def worker(generation):
    (worker,) = generation.llm.collective_rpc(lambda worker: worker)
    return worker


PROMPTS = [[3] * 5, [4, 5, 6], list(range(2, 42))]


def test_functions_run_in_the_engine_of_this_process(generation, worker):
    driver = generation.llm.llm_engine.model_executor.driver_worker
    assert worker.model_runner is driver.model_runner, broken(
        "vllm", "rollout", "collective_rpc hands over copies, so the rollout state is not shared"
    )


def test_every_engine_has_its_own_id_and_carries_the_schedule(generation, worker, build_generation):
    other = build_generation(generation.model, SparsityScheduleConfig.dense(), block_size=32)
    (other_worker,) = other.llm.collective_rpc(lambda worker: worker)
    ids = [each.vllm_config.instance_id for each in (worker, other_worker)]
    assert all(ids) and ids[0] != ids[1], broken("vllm", "vllm_backend", f"engines share an instance_id: {ids}")
    carried = [each.vllm_config.additional_config["sparrow_schedule"] for each in (worker, other_worker)]
    assert [SparsityScheduleConfig.from_dict(record) for record in carried] == [SCHEDULE, other.schedule], broken(
        "vllm", "vllm_backend", "additional_config does not reach the worker as it was given"
    )


def test_attention_layers_are_found_with_their_number(worker):
    layers = worker.vllm_config.compilation_config.static_forward_context
    names = [layer.layer_name for layer in layers.values() if hasattr(layer, "impl")]
    assert names == [f"model.layers.{index}.self_attn.attn" for index in range(4)], broken(
        "vllm", "vllm_backend", f"attention layers are called {names}"
    )
    assert [extract_layer_index(name) for name in names] == [0, 1, 2, 3], broken(
        "vllm", "vllm_backend", "extract_layer_index reads other numbers from their names"
    )


def test_the_block_size_is_known_when_layers_are_built(build_generation, generation):
    # Without `block_size` vLLM chooses, and the schedule's page is checked against that choice.
    chosen = build_generation(generation.model, SCHEDULE)
    (worker,) = chosen.llm.collective_rpc(lambda worker: worker)
    for each, size in ((chosen, worker.vllm_config.cache_config.block_size), (generation, 32)):
        LLM.generate(each.llm, [{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=2), use_tqdm=False)
        (worker,) = each.llm.collective_rpc(lambda worker: worker)
        impl = next(iter(worker.vllm_config.compilation_config.static_forward_context.values())).impl
        assert impl._plain.shape[3] == size == each.state.block_size, broken(
            "vllm", "vllm_backend", "the KV cache has other blocks than cache_config says, or another layout"
        )


def test_the_runner_knows_every_prompt_length(generation, worker):
    table = worker.model_runner.input_batch.num_prompt_tokens
    assert isinstance(table, np.ndarray), broken("vllm", "vllm_backend", "no table")
    seen = []
    read = generation.state.prompt_lengths
    try:
        generation.state.prompt_lengths = lambda num_rows: seen.append(read(num_rows).tolist()) or read(num_rows)
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        LLM.generate(generation.llm, prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    finally:
        generation.state.prompt_lengths = read
    assert sorted(seen[-1]) == sorted(map(len, PROMPTS)), broken(
        "vllm", "vllm_backend", "num_prompt_tokens does not hold the prompt lengths of the rows in a step"
    )


def test_flat_logprobs_hold_the_sampled_token_first_and_then_the_top(generation):
    params = SamplingParams(max_tokens=20, logprobs=3, temperature=2.0, seed=0, flat_logprobs=True, ignore_eos=True)
    (request,) = LLM.generate(generation.llm, [{"prompt_token_ids": PROMPTS[0]}], params.clone(), use_tqdm=False)
    (completion,) = request.outputs
    flat = completion.logprobs
    message = broken("vllm", "rollout", "flat log-probs are laid out otherwise")
    assert isinstance(flat, FlatLogprobs) and flat.start_indices == list(range(0, 80, 4)), message
    ids, logprobs = (torch.tensor(values).reshape(20, 4) for values in (flat.token_ids, flat.logprobs))
    assert ids[:, 0].tolist() == list(completion.token_ids), message
    assert (logprobs[:, 1:].diff(dim=1) <= 0).all(), message
    in_top = ids[:, :1] == ids[:, 1:]
    assert in_top.any() and not in_top.any(1).all(), "the seed samples only from the top, or never"
    assert torch.equal(logprobs[:, :1].expand(-1, 3)[in_top], logprobs[:, 1:][in_top]), message


def test_one_logprob_per_token_without_a_top(generation):
    params = SamplingParams(max_tokens=6, logprobs=0, prompt_logprobs=0, flat_logprobs=True, ignore_eos=True)
    (request,) = LLM.generate(generation.llm, [{"prompt_token_ids": PROMPTS[2]}], params, use_tqdm=False)
    assert request.outputs[0].logprobs.token_ids == list(request.outputs[0].token_ids), broken(
        "vllm", "rollout", "logprobs=0 gives something other than the sampled tokens' log-probs"
    )
    assert request.prompt_logprobs.token_ids == PROMPTS[2][1:], broken(
        "vllm", "rollout", "prompt_logprobs=0 gives something other than the prompt's tokens from the second on"
    )


def test_stop_strings_need_detokenisation():
    SamplingParams(stop=["."])
    with pytest.raises(Exception, match="only supported when detokenize is True"):
        SamplingParams(stop=["."], detokenize=False)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="weights are packed on a CPU")
def test_weights_are_packed_on_a_cpu(generation, worker):
    reload = worker.model_runner.reload_weights
    check_parameters("vllm", "vllm_backend", reload, ["weights_iterator", "weights_path", "is_checkpoint_format"])
    name, weight = "model.layers.0.self_attn.o_proj.weight", torch.zeros(128, 128)
    try:
        worker.model_runner.model.load_weights([(name, weight)])
    except AssertionError:
        pass
    else:
        pytest.fail(broken("vllm", "rollout", "a packed weight can be loaded; TRL's sync_weights may do on a CPU too"))
    finally:
        generation.sync_weights()


@pytest.mark.skipif(not current_platform.is_cpu(), reason="weights are packed on a CPU")
def test_a_tied_head_is_stale_after_reload_weights(build_generation, tiny_qwen3):
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    check_parameters("vllm", "vllm_backend", dispatch_cpu_unquantized_gemm, ["layer", "remove_weight"])
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    generation = build_generation(model, SCHEDULE, block_size=32)
    (worker,) = generation.llm.collective_rpc(lambda worker: worker)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    worker.model_runner.reload_weights(weights_iterator=generation._iter_named_params())
    try:
        generation.check_weights(PROMPTS)
    except RuntimeError:
        pass
    else:
        pytest.fail(broken("vllm", "vllm_backend", "a tied head is packed again; remove the loop over ParallelLMHead"))
    heads = [module for module in worker.model_runner.model.modules() if isinstance(module, ParallelLMHead)]
    assert len(heads) == 1, broken("vllm", "vllm_backend", f"the model has {len(heads)} ParallelLMHead modules")
    dispatch_cpu_unquantized_gemm(heads[0], remove_weight=False)
    assert generation.check_weights(PROMPTS) < 1e-4, broken("vllm", "vllm_backend", "the head cannot be packed again")


def test_an_interrupted_engine_can_be_emptied():
    check_parameters("vllm", "rollout", LLM._run_engine, ["output_type", "use_tqdm"])
    check_parameters("vllm", "rollout", LLMEngine.abort_request, ["request_ids", "internal"])
    assert "self.request_states: dict" in inspect.getsource(OutputProcessor.__init__), broken(
        "vllm", "rollout", "the output processor keeps its requests elsewhere"
    )
    assert "self._run_engine(" in inspect.getsource(LLM._run_completion), broken(
        "vllm", "rollout", "generate does not go through _run_engine"
    )


def test_a_sharded_head_is_gathered_as_the_fused_head_does():
    (parameter,) = inspect.signature(maybe_gather_lm_head_ctx).parameters.values()
    assert parameter.kind is parameter.VAR_POSITIONAL, broken(
        "trl", "trainer", "maybe_gather_lm_head_ctx takes no list of parameters"
    )
    head = torch.nn.Linear(2, 3, bias=False)
    with maybe_gather_lm_head_ctx(head.weight, head.bias):  # without a bias, and without ZeRO-3
        assert head.weight.shape == (3, 2)
