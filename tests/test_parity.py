"""
The log-probs that the engine reports for sparse rollouts are those of the model under the definition of sparse
attention.

The engine is compared token by token with two models that share no code with it: `loop_model`, written with loops from
the definition, and the policy under the training-side sparse attention.
"""

import sys
from pathlib import Path

import loop_model
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.attention import sparse_attention_context


sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from tiny_reasoner import task  # noqa: E402


# Rounding alone stays an order of magnitude below this, and one page too many does not.
FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 2e-2
# Sparse and dense log-probs of the same tokens are further apart than this.
SPARSE_EFFECT = 2e-2

SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2, 3, 4], bin_tokens=64, dense_layers=[0])
RECIPES = {
    "mean_query": SCHEDULE,
    "no dense layers": SparsityScheduleConfig(top_k_pages=[2], bin_tokens=64, dense_layers=[]),
    "more reserved pages": SparsityScheduleConfig(
        top_k_pages=[1, 2], bin_tokens=128, dense_layers=[1], sink_pages=2, recent_pages=3
    ),
    "no sink, one recent page": SparsityScheduleConfig(
        top_k_pages=[1, 2], bin_tokens=128, dense_layers=[], sink_pages=0, recent_pages=1
    ),
    "group_softmax": SparsityScheduleConfig(
        top_k_pages=[1, 2], bin_tokens=128, dense_layers=[], page_score="group_softmax"
    ),
    "two landmarks": SparsityScheduleConfig(
        top_k_pages=[1, 2], bin_tokens=128, dense_layers=[], page_score="group_softmax", landmarks_per_page=2
    ),
    "four landmarks in fp8": SparsityScheduleConfig(
        top_k_pages=[1, 2],
        bin_tokens=128,
        dense_layers=[],
        page_score="group_softmax",
        landmarks_per_page=4,
        landmark_dtype="fp8_e4m3",
    ),
    "page of 32": SparsityScheduleConfig(page_size=32, top_k_pages=[1, 2], bin_tokens=128, dense_layers=[]),
    "layer tables": SparsityScheduleConfig(
        top_k_pages=[4], bin_tokens=64, dense_layers=[], layer_top_k_pages={"1": [1, 2], "2-3": [0, 1, 3]}
    ),
}


def make_prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 70, (length,), generator=generator).tolist() for length in lengths]


def roll_out(generation, prompts):
    """Completions and the engine's log-prob of each of their tokens."""
    _, completions, logprobs, _ = generation.generate(prompts, None, num_generations=1)
    assert [len(ids) for ids in completions] == [len(values) for values in logprobs]
    return completions, [np.array(values).squeeze(1) for values in logprobs]


def policy_logprobs(model, schedule, prompts, completions):
    """Log-probs of the completions under the training-side attention, in one left- and right-padded batch."""
    width, longest = max(map(len, prompts)), max(map(len, completions))
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        padding = width - len(prompt), longest - len(completion)
        ids = [0] * padding[0] + prompt + list(completion) + [0] * padding[1]
        rows.append((ids, [0] * padding[0] + [1] * (len(prompt) + len(completion)) + [0] * padding[1]))
    input_ids, attention_mask = (torch.tensor(values, device=model.device) for values in zip(*rows, strict=True))
    with torch.no_grad(), sparse_attention_context(model, schedule, prompt_width=width):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=longest + 1).logits[:, :-1]
    logprobs = logits.float().log_softmax(-1).gather(-1, input_ids[:, width:, None]).squeeze(-1)
    return [row[: len(completion)].cpu().numpy() for row, completion in zip(logprobs, completions, strict=True)]


def loop_logprobs(model, schedule, prompt, completion):
    """Log-probs of one completion under the loop-written model, and which of them no near-tie in a score decided."""
    ids = prompt + list(completion)
    logits, selections = loop_model.run_sequence(model, model.config, ids, len(prompt), schedule)
    margins = np.full(len(ids), np.inf)
    for (_, position, _), selection in selections.items():
        margins[position] = min(margins[position], selection.margin)
    # A page chosen differently in a near-tie changes the keys of every later token. Softmax shares of candidates that
    # hardly matter are small numbers, known to as many digits.
    clear = np.minimum.accumulate(margins) > (1e-5 if schedule.page_score == "mean_query" else 1e-9)
    rows = slice(len(prompt) - 1, len(ids) - 1)
    return loop_model.token_logprobs(logits, ids)[rows], clear[rows]


def record_preemptions(generation, monkeypatch) -> list[int]:
    """Tokens that each request had generated when it was preempted, a list that grows."""
    scheduler = generation.llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda request, *args, **kwargs: (
            preempted.append(request.num_output_tokens),
            preempt(request, *args, **kwargs),
        ),
    )
    return preempted


def mean_difference(one, other):
    return np.abs(np.concatenate(one) - np.concatenate(other)).mean()


@pytest.fixture(scope="module")
def model(tiny_qwen3):
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)


@pytest.fixture(scope="module")
def generation(build_generation, model):
    return build_generation(model, SCHEDULE, block_size=32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_engine_matches_the_loop_written_model(generation, model, recipe):
    generation.set_schedule(RECIPES[recipe])
    prompts = make_prompts([40, 113, 175])
    completions, engine = roll_out(generation, prompts)
    compared = 0
    for prompt, completion, logprobs in zip(prompts, completions, engine, strict=True):
        expected, clear = loop_logprobs(model, RECIPES[recipe], prompt, completion)
        np.testing.assert_allclose(logprobs[clear], expected[clear], atol=1e-3)
        compared += clear.sum()
    assert compared > 0.9 * sum(map(len, completions))


@pytest.mark.parametrize("recipe", RECIPES)
def test_engine_matches_the_training_side(generation, model, recipe):
    generation.set_schedule(RECIPES[recipe])
    prompts = make_prompts([5, 40, 64, 113, 175, 250], seed=1)
    completions, engine = roll_out(generation, prompts)
    assert mean_difference(engine, policy_logprobs(model, RECIPES[recipe], prompts, completions)) < FLOAT32_TOLERANCE
    dense = policy_logprobs(model, SparsityScheduleConfig.dense(), prompts, completions)
    assert mean_difference(engine, dense) > SPARSE_EFFECT


def test_first_token_comes_from_the_dense_prefill(generation, model):
    generation.set_schedule(SCHEDULE)
    prompts = make_prompts([120, 180], seed=2)
    completions, engine = roll_out(generation, prompts)
    dense = policy_logprobs(model, SparsityScheduleConfig.dense(), prompts, completions)
    for sparse_row, dense_row in zip(engine, dense, strict=True):
        assert abs(sparse_row[0] - dense_row[0]) < FLOAT32_TOLERANCE
        assert np.abs(sparse_row[1:] - dense_row[1:]).mean() > SPARSE_EFFECT


@pytest.mark.parametrize("schedule", [SparsityScheduleConfig.dense(), SparsityScheduleConfig.fixed(2**15)])
def test_a_schedule_that_keeps_everything_is_dense(generation, model, schedule):
    generation.set_schedule(schedule)
    prompts = make_prompts([33, 120, 180], seed=3)
    completions, engine = roll_out(generation, prompts)
    assert generation.counters.kept_pages == generation.counters.cached_pages > 0
    dense = policy_logprobs(model, SparsityScheduleConfig.dense(), prompts, completions)
    assert mean_difference(engine, dense) < FLOAT32_TOLERANCE


def test_prefix_hits_change_nothing(generation, model):
    generation.set_schedule(SCHEDULE)
    (shared,) = make_prompts([100], seed=4)
    prompts = [shared + tail for tail in make_prompts([20, 20, 45, 75, 75, 75, 90, 90], seed=5)]
    params = SamplingParams(max_tokens=60, logprobs=0)
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    generation.llm.generate(requests[:4], params, use_tqdm=False)
    outputs = generation.llm.generate(requests, params, use_tqdm=False)
    assert all(output.num_cached_tokens >= 96 for output in outputs)
    completions = [output.outputs[0].token_ids for output in outputs]
    engine = [
        np.array([next(iter(position.values())).logprob for position in output.outputs[0].logprobs])
        for output in outputs
    ]
    assert mean_difference(engine, policy_logprobs(model, SCHEDULE, prompts, completions)) < FLOAT32_TOLERANCE


def test_a_prompt_that_continues_an_earlier_completion_is_dense(generation, model, monkeypatch):
    generation.set_schedule(SCHEDULE)
    monkeypatch.setattr(generation, "generation_kwargs", {"ignore_eos": True})
    (prompt,) = make_prompts([70], seed=10)
    (completion,), _ = roll_out(generation, [prompt])
    prompts = [prompt + list(completion[:70])]
    completions, engine = roll_out(generation, prompts)
    assert mean_difference(engine, policy_logprobs(model, SCHEDULE, prompts, completions)) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("block_size", [64, 128])
def test_chunked_prefill_mixed_with_decode(build_generation, model, block_size):
    generation = build_generation(model, SCHEDULE, block_size=block_size, engine_kwargs={"max_num_batched_tokens": 48})
    prompts = make_prompts([17, 250, 64, 200, 150, 31], seed=6)
    completions, engine = roll_out(generation, prompts)
    assert mean_difference(engine, policy_logprobs(model, SCHEDULE, prompts, completions)) < FLOAT32_TOLERANCE


def test_forced_preemption(build_generation, model, monkeypatch):
    # Eight sequences of 140 tokens and more need 40 blocks of 32, and start with 24.
    generation = build_generation(
        model,
        SCHEDULE,
        block_size=32,
        engine_kwargs={"num_gpu_blocks_override": 28},
        generation_kwargs={"ignore_eos": True},
    )
    preempted = record_preemptions(generation, monkeypatch)
    prompts = make_prompts([60, 64, 66, 70, 75, 80, 85, 90], seed=7)
    completions, engine = roll_out(generation, prompts)
    assert sum(tokens > 16 for tokens in preempted) >= 2
    assert generation.counters.unattributed_tokens == 0
    assert mean_difference(engine, policy_logprobs(model, SCHEDULE, prompts, completions)) < FLOAT32_TOLERANCE


def test_temperature_is_that_of_the_policy(build_generation, model):
    # TRL#4159: with the same temperature on both sides the importance ratio of a dense rollout is 1.
    generation = build_generation(model, SparsityScheduleConfig.dense(), block_size=32, temperature=0.6)
    prompts = make_prompts([40, 90], seed=8)
    completions, engine = roll_out(generation, prompts)
    for prompt, completion, logprobs in zip(prompts, completions, engine, strict=True):
        ids = torch.tensor([prompt + list(completion)])
        with torch.no_grad():
            expected = (model(ids).logits[0, :-1] / 0.6).log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        ratio = np.exp(expected[len(prompt) - 1 :].numpy() - logprobs)
        np.testing.assert_allclose(ratio, 1, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, FLOAT32_TOLERANCE), (torch.bfloat16, BFLOAT16_TOLERANCE)],
    ids=["float32", "bfloat16"],
)
def test_tiny_reasoner(build_generation, dtype, tolerance):
    folder = Path(__file__).parent.parent / "examples" / "tiny_reasoner"
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    schedule = SparsityScheduleConfig.from_pretrained(folder / "schedules" / "harsh")
    generation = build_generation(
        model,
        schedule,
        max_model_length=1024,
        max_completion_length=120,
    )
    prompts = generation.processing_class(list(task.make_dataset("test", 16, seed=3)["prompt"]))["input_ids"]
    completions, engine = roll_out(generation, prompts)
    sparse = mean_difference(engine, policy_logprobs(model, schedule, prompts, completions))
    dense = mean_difference(engine, policy_logprobs(model, SparsityScheduleConfig.dense(), prompts, completions))
    print(f"mean difference: {sparse:.2e} from sparse, {dense:.2e} from dense log-probs")
    assert sparse < tolerance
    assert dense > max(SPARSE_EFFECT, 5 * sparse)


def test_landmarks_are_the_means_of_their_pages(generation, model):
    # PrimeIntellect-ai/prime-rl#1650: shared prefixes and then new weights must not leave stale landmarks behind.
    generation.set_schedule(SCHEDULE)
    (prompt,) = make_prompts([130], seed=9)
    weight = model.model.layers[0].self_attn.k_proj.weight
    original = weight.detach().clone()
    first = cached_landmarks(generation, prompt)
    try:
        with torch.no_grad():
            weight.mul_(-0.5)
        second = cached_landmarks(generation, prompt)
    finally:
        with torch.no_grad():
            weight.copy_(original)
        generation.sync_weights()
    for layer_first, layer_second in zip(first, second, strict=True):
        assert (layer_first[:4] - layer_second[:4]).abs().mean() > 0.01


def cached_landmarks(generation, prompt):
    """Landmarks of the blocks left in the prefix cache by eight rollouts of `prompt`, checked against their keys."""
    generation.sync_weights()
    generation.generate([prompt] * 8, None, num_generations=8)
    pool = generation.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    blocks = [block.block_id for block in pool.blocks if block.block_hash is not None]
    assert len(blocks) >= len(prompt) // 32
    layers = []
    for layer in generation.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        keys, _ = layer.impl.plain_cache(layer.kv_cache)
        means = keys[blocks].unflatten(2, (-1, SCHEDULE.page_size)).double().mean(3)
        landmarks = layer.impl.landmarks[blocks].squeeze(3)
        torch.testing.assert_close(landmarks, means.float(), atol=1e-5, rtol=1e-5)
        layers.append(landmarks)
    assert len(layers) == 4
    return layers
