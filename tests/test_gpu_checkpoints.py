"""
Real checkpoints on a GPU: parity with the training side at long contexts, and stock vLLM's greedy tokens.

    SPARROW_TEST_CHECKPOINTS=FOLDER python -m pytest tests/test_gpu_checkpoints.py -s

The folder has checkpoints of transformers in its subfolders.
"""

import functools
import itertools
import json
import math
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from stock_rollouts import greedy_rollouts
from test_gpu_backend import EAGER, GRAPHS, build, reverse_selection
from test_parity import mean_difference, policy_logprobs, roll_out
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparrow_trl import SparsityScheduleConfig


CHECKPOINTS = sorted(
    path.parent for path in Path(os.environ.get("SPARROW_TEST_CHECKPOINTS", "?")).glob("*/config.json")
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not CHECKPOINTS,
    reason="needs a CUDA GPU, vLLM's CUDA build, and a folder of checkpoints in SPARROW_TEST_CHECKPOINTS",
)

MODES = {"eager": EAGER, "graphs": GRAPHS}
# At 4K it moves log-probs on these texts by 0.33 (SmolLM2-135M) and 0.23 (Qwen2.5-Coder-0.5B); rounding, by 0.05.
SCHEDULE = SparsityScheduleConfig.fixed(256, dense_layers=[])
# Pages end at different tokens, and all prompts of 4K are prefilled in one step.
PROMPT_LENGTHS = {"4K": [4000, 3961, 4003, 3937], "16K": [16000, 15973, 16011]}
COMPLETION_LENGTH = 128
PREFILL_TOKENS = 16384

GREEDY_PROMPT_LENGTHS = range(100, 612, 8)
GREEDY_SAMPLING = {"max_tokens": 256, "ignore_eos": True, "logprobs": 5}


@functools.cache
def library_text(checkpoint: Path) -> list[int]:
    """Token ids of sources of the standard library: long, varied, full of references to what came before."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "typing", "tarfile", "inspect", "doctest", "subprocess")
    text = "\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in names)
    return AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"]


def make_prompts(checkpoint: Path, lengths) -> list[list[int]]:
    tokens = iter(library_text(checkpoint))
    prompts = [list(itertools.islice(tokens, length)) for length in lengths]
    assert [len(ids) for ids in prompts] == list(lengths)
    return prompts


@functools.cache
def load_policy(checkpoint: Path):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, device_map="cuda")


@functools.cache
def start_stock_engine(checkpoint: Path) -> Future:
    """A stock engine at work on the greedy prompts in a process of its own, beside the tests."""
    request = {
        "engine": {
            "model": str(checkpoint),
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": len(GREEDY_PROMPT_LENGTHS),
            "kv_cache_memory_bytes": 2**31,
            "gpu_memory_utilization": 0.2,
            "kernel_config": {"enable_jit_warmup": False},
        },
        "prompts": make_prompts(checkpoint, GREEDY_PROMPT_LENGTHS),
        "sampling": GREEDY_SAMPLING,
    }
    command = [sys.executable, str(Path(__file__).with_name("stock_rollouts.py"))]
    return ThreadPoolExecutor().submit(
        subprocess.run, command, input=json.dumps(request), capture_output=True, text=True
    )


ENGINES = [
    pytest.param((checkpoint, mode), id=f"{checkpoint.name}-{mode}") for checkpoint in CHECKPOINTS for mode in MODES
]


@pytest.fixture(scope="module", params=ENGINES)
def checkpoint_and_generation(request):
    checkpoint, mode = request.param
    start_stock_engine(checkpoint)
    policy = load_policy(checkpoint)
    generation = build(
        policy,
        SCHEDULE,
        max_model_length=min(16384, policy.config.max_position_embeddings),
        max_num_seqs=len(GREEDY_PROMPT_LENGTHS),
        max_completion_length=COMPLETION_LENGTH,
        gpu_memory_utilization=0.2,
        engine_kwargs={"kv_cache_memory_bytes": 2**31, "max_num_batched_tokens": PREFILL_TOKENS, **MODES[mode]},
    )
    return checkpoint, generation


class Differences(NamedTuple):
    """Mean absolute differences of log-probs, on the engine's sparse and dense completions of the same prompts.

    Args:
        sparse (`float`): Engine and policy, both sparse.
        effect (`float`): Sparse engine and dense policy.
        rounding (`float`): Engine and policy, both dense: two implementations in bfloat16.
        kept_fraction (`float`): Share of the cached pages that the sparse engine read.
    """

    sparse: float
    effect: float
    rounding: float
    kept_fraction: float

    @property
    def tolerance(self) -> float:
        # Rounding moves scores too, so that now and then a page takes the place of one that scored about the same.
        return 2 * self.rounding + 5e-3


def measure(generation, prompts) -> Differences:
    def differences(completions, engine, *schedules):
        for schedule in schedules:
            # One at a time: at 16K a row's attention weights and logits are gigabytes.
            pairs = zip(prompts, completions, strict=True)
            policy = [policy_logprobs(generation.model, schedule, [ids], [tokens])[0] for ids, tokens in pairs]
            yield float(mean_difference(engine, policy))

    dense = SparsityScheduleConfig.dense()
    sparse, effect = differences(*roll_out(generation, prompts), generation.schedule, dense)
    counters = generation.counters
    assert counters.unattributed_tokens == 0
    assert counters.sparse_tokens >= len(prompts) * (COMPLETION_LENGTH - 1)
    with generation.dense_rollouts():
        (rounding,) = differences(*roll_out(generation, prompts), dense)
    measured = Differences(sparse, effect, rounding, counters.kept_fraction)
    print(f"\n{measured}, tolerance {measured.tolerance:.4f}")
    return measured


@pytest.mark.parametrize("context", PROMPT_LENGTHS)
def test_engine_matches_the_training_side(checkpoint_and_generation, context):
    checkpoint, generation = checkpoint_and_generation
    lengths = PROMPT_LENGTHS[context]
    if max(lengths) + COMPLETION_LENGTH > generation.model.config.max_position_embeddings:
        pytest.skip(f"the model's contexts end at {generation.model.config.max_position_embeddings} tokens")
    measured = measure(generation, make_prompts(checkpoint, lengths))
    assert measured.kept_fraction < 0.2
    assert measured.sparse < measured.tolerance
    assert measured.effect > 1.5 * measured.tolerance


def test_a_wrong_selection_does_not_match(checkpoint_and_generation, monkeypatch):
    checkpoint, generation = checkpoint_and_generation
    assert sum(PROMPT_LENGTHS["4K"]) <= PREFILL_TOKENS
    reverse_selection(generation, monkeypatch)
    measured = measure(generation, make_prompts(checkpoint, PROMPT_LENGTHS["4K"]))
    assert measured.sparse > 1.5 * measured.tolerance


@torch.no_grad()
def tie(policy, prompts) -> float:
    """Two steps of bfloat16 at the largest logit: what rounding alone may put between the log-probs of two tokens."""
    largest = max(float(policy(torch.tensor([ids], device=policy.device)).logits.max()) for ids in prompts)
    return 2 * 2.0 ** (math.floor(math.log2(largest)) - 7)


def greedy_gaps(stock, ours) -> list[float]:
    """How far apart the two engines' tokens were where they first differ, for each prompt on which they do.

    The larger of two numbers: what each engine's log-prob of its own token is above that of the other's.
    """
    gaps = []
    for one, other in zip(stock, ours, strict=True):
        assert len(one["token_ids"]) == len(other["token_ids"]) == GREEDY_SAMPLING["max_tokens"]
        tokens = zip(one["token_ids"], other["token_ids"], strict=True)
        position = next((index for index, (a, b) in enumerate(tokens) if a != b), None)
        if position is None:
            continue
        chosen = one["token_ids"][position], other["token_ids"][position]
        gap = 0
        for rollout, (own, others) in ((one, chosen), (other, chosen[::-1])):
            logprobs = dict(rollout["logprobs"][position])
            gap = max(gap, logprobs[own] - logprobs.get(others, -float("inf")))
        gaps.append(gap)
    return gaps


def test_dense_schedule_gives_the_greedy_tokens_of_stock_vllm(checkpoint_and_generation):
    checkpoint, generation = checkpoint_and_generation
    prompts = make_prompts(checkpoint, GREEDY_PROMPT_LENGTHS)
    ours = {}
    schedules = {"dense": SparsityScheduleConfig.dense(), "sparse": SparsityScheduleConfig.fixed(128, dense_layers=[])}
    try:
        for name, schedule in schedules.items():
            generation.set_schedule(schedule)
            ours[name] = greedy_rollouts(generation.llm, prompts, **GREEDY_SAMPLING)
    finally:
        generation.set_schedule(SCHEDULE)
    result = start_stock_engine(checkpoint).result()
    assert result.returncode == 0, result.stderr
    stock = json.loads(result.stdout.splitlines()[-1])
    gaps = {name: greedy_gaps(stock, rollouts) for name, rollouts in ours.items()}
    for name, values in gaps.items():
        same, largest = len(prompts) - len(values), max(values, default=0)
        print(f"\n{name}: {same} of {len(prompts)} completions are stock vLLM's, largest gap {largest:.3f}")
    assert max(gaps["dense"], default=0) <= tie(generation.model, prompts)
    assert max(gaps["sparse"], default=0) > 2 * tie(generation.model, prompts)
