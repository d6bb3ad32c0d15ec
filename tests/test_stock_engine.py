"""An engine whose schedule keeps every page generates what stock vLLM generates, and stock vLLM stays stock."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.rollout import swapped


SPARSE = SparsityScheduleConfig(top_k_pages=[1], bin_tokens=64, dense_layers=[])
ALL_PAGES = SparsityScheduleConfig.fixed(2**15, dense_layers=[])
DENSE = SparsityScheduleConfig.dense()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(2, 70, (length,), generator=generator).tolist()
        for length in (1, 15, 16, 17, 33, 64, 120, 180, 250, 301, 350, 400)
    ]


@pytest.fixture(scope="module")
def stock_completions(tiny_qwen3, prompts):
    request = {
        "engine": {
            "model": tiny_qwen3,
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 2**28,
            "block_size": 32,
        },
        "prompts": prompts,
        "sampling": {"max_tokens": 80},
    }
    script = Path(__file__).with_name("stock_rollouts.py")
    result = subprocess.run([sys.executable, str(script)], input=json.dumps(request), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [rollout["token_ids"] for rollout in json.loads(result.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def generation(build_generation, tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    return build_generation(model, SPARSE, block_size=32, temperature=0.0)


def greedy(generation, prompts):
    return [list(ids) for ids in generation.generate(prompts, None, num_generations=1)[1]]


@pytest.mark.parametrize("schedule", [ALL_PAGES, DENSE], ids=["all pages, through the sparse path", "dense"])
def test_keeping_everything_reproduces_stock_greedy_tokens(generation, prompts, stock_completions, schedule):
    generation.set_schedule(schedule)
    assert greedy(generation, prompts) == stock_completions


@pytest.mark.parametrize("recipe", [{"page_score": "group_softmax", "landmarks_per_page": 4}, {"page_size": 32}])
def test_other_recipes_reproduce_them_too(generation, prompts, stock_completions, recipe):
    generation.set_schedule(dataclasses.replace(ALL_PAGES, bin_tokens=2048, **recipe))
    assert greedy(generation, prompts) == stock_completions


def test_dense_rollouts_of_a_sparse_engine_reproduce_them(generation, prompts, stock_completions):
    generation.set_schedule(SPARSE)
    sparse = greedy(generation, prompts)
    with generation.dense_rollouts():
        assert greedy(generation, prompts) == stock_completions
        assert generation.counters.sparse_tokens == 0
    assert greedy(generation, prompts) == sparse != stock_completions


def test_every_layer_runs_the_sparse_implementation(generation):
    assert generation.state.attention_backend == "SparseCPUAttentionImpl"


def test_an_engine_that_was_renamed_is_attached_to_its_own_layers(generation):
    """An engine core in a server gives its configuration another id once its layers are built."""
    from sparrow_trl.vllm_backend import attach_sparse_rollout

    (worker,) = generation.llm.collective_rpc(lambda worker: worker)
    with swapped(worker.vllm_config, "instance_id", "another"):
        assert attach_sparse_rollout(worker) is generation.state


def test_an_engine_with_a_stock_layer_is_refused(generation):
    from sparrow_trl.vllm_backend import attach_sparse_rollout

    (worker,) = generation.llm.collective_rpc(lambda worker: worker)
    layers = worker.vllm_config.compilation_config.static_forward_context
    name, layer = next(iter(layers.items()))
    with swapped(layer, "impl", object()), pytest.raises(RuntimeError, match=f"{name}.*object"):
        attach_sparse_rollout(worker)
