"""
The GPU backend, where there is a GPU: the same definition, read from FlashAttention's cache in bfloat16.

Both model runners of vLLM are tested, eager and with decode steps captured in CUDA graphs.
"""

import numpy as np
import pytest
import torch
from test_parity import make_prompts, mean_difference, policy_logprobs, record_preemptions, roll_out
from test_rollout_adapter import make_adapter
from tiny_models import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.rollout import swapped


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and vLLM's CUDA build")

BFLOAT16_TOLERANCE = 2e-2
# Engine and policy round keys differently, so that near ties between pages fall either way, the more often the coarser
# landmarks are. Against dense log-probs, the reference on a CPU differs from the policy in bfloat16 by a ninth (8-bit
# landmarks) to a nineteenth; a wrong selection differs as much as dense attention does.
SPARSE_SHARE = 1 / 6
SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2, 3, 4], bin_tokens=64, dense_layers=[0])
EAGER = {"enforce_eager": True}
# Graphs of decode steps alone: the rest of the model need not be compiled for what is tested here.
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
RECIPES = {
    "budgets and dense layers": SparsityScheduleConfig(
        top_k_pages=[0, 2, 3], bin_tokens=128, dense_layers=[2], sink_pages=2, recent_pages=1
    ),
    "layer tables": SparsityScheduleConfig(
        top_k_pages=[4], bin_tokens=64, dense_layers=[], layer_top_k_pages={"1": [1, 2], "2-3": [0, 1, 3]}
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu_model")
    config = tiny_config("qwen3")
    # FlashAttention 3 has no kernel for heads of 32. A milder range keeps bfloat16 rounding from deciding selections.
    config.update({"head_dim": 64, "initializer_range": 0.08})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")


def build(model, schedule=SCHEDULE, **kwargs):
    from accelerate import Accelerator
    from transformers import AutoTokenizer

    from sparrow_trl import SparseVLLMGeneration

    engine_kwargs = {
        "kv_cache_memory_bytes": 2**28,
        "kernel_config": {"enable_jit_warmup": False},
        **kwargs.pop("engine_kwargs", EAGER),
    }
    # vLLM wants this share of the memory to be free, though the KV cache has a size of its own.
    defaults = {
        "gpu_memory_utilization": 0.3,
        "max_model_length": 1024,
        "max_num_seqs": 16,
        "max_completion_length": 80,
    }
    return SparseVLLMGeneration(
        model,
        Accelerator(),
        AutoTokenizer.from_pretrained(model.name_or_path),
        schedule=schedule,
        engine_kwargs=engine_kwargs,
        generation_kwargs={"ignore_eos": True},
        **{**defaults, **kwargs},
    )


def use_model_runner(patch, runner):
    # vLLM reads the environment variable once in a process.
    patch.setattr("vllm.config.VllmConfig.use_v2_model_runner", property(lambda config: runner == "v2"))


@pytest.fixture(scope="module", params=["v1 eager", "v1 graphs", "v2 eager", "v2 graphs"])
def generation(model, request):
    runner, mode = request.param.split()
    with pytest.MonkeyPatch.context() as patch:
        use_model_runner(patch, runner)
        generation = build(model, engine_kwargs=EAGER if mode == "eager" else GRAPHS)
    runner_class = generation.llm.collective_rpc(lambda worker: type(worker.model_runner).__module__)
    assert runner_class == [f"vllm.v1.worker.gpu{'_model_runner' if runner == 'v1' else '.model_runner'}"]
    return generation


def check_parity(generation, model, schedule, prompts):
    completions, engine = roll_out(generation, prompts)
    assert 0 < generation.counters.kept_fraction < 0.9
    assert generation.counters.unattributed_tokens == 0
    assert generation.counters.sparse_tokens >= sum(map(len, completions)) - len(completions)
    sparse = mean_difference(engine, policy_logprobs(model, schedule, prompts, completions))
    dense = mean_difference(engine, policy_logprobs(model, SparsityScheduleConfig.dense(), prompts, completions))
    print(f"mean difference: {sparse:.2e} from sparse, {dense:.2e} from dense log-probs")
    assert sparse < SPARSE_SHARE * dense


def test_engine_matches_the_training_side(generation, model):
    check_parity(generation, model, SCHEDULE, make_prompts([5, 40, 64, 113, 175, 250, 250, 250], seed=1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_schedule_changes_without_a_new_capture(generation, model, recipe):
    generation.set_schedule(RECIPES[recipe])
    try:
        check_parity(generation, model, RECIPES[recipe], make_prompts([64, 200, 330, 470], seed=2))
    finally:
        generation.set_schedule(SCHEDULE)


def test_what_the_engine_is_laid_out_for_cannot_change(generation):
    with pytest.raises(ValueError, match="page_score, landmarks_per_page cannot change in a running engine"):
        generation.set_schedule(
            SparsityScheduleConfig(top_k_pages=[1], page_score="group_softmax", landmarks_per_page=2)
        )
    assert generation.schedule == SCHEDULE


def test_engine_has_the_adapter_as_the_student_has_it(generation, model):
    prompts = make_prompts([100, 128], seed=6)
    generation.sync_weights()
    rounding = generation.check_weights(prompts)
    generation.adapter = make_adapter(model, std=0.04).to(model.device)
    try:
        generation.sync_weights()
        assert generation.check_weights(prompts) < 1.5 * rounding
        with swapped(generation, "_sent_adapter", None), pytest.raises(RuntimeError, match="log-probs differ"):
            generation.check_weights(prompts)
    finally:
        generation.adapter = None
        generation.sync_weights()


def test_keeping_every_page_equals_dense(generation, model):
    prompts = make_prompts([33, 120, 180], seed=3)
    generation.set_schedule(SparsityScheduleConfig.fixed(2**15, dense_layers=[]))
    completions, engine = roll_out(generation, prompts)
    generation.set_schedule(SCHEDULE)
    dense = mean_difference(engine, policy_logprobs(model, SparsityScheduleConfig.dense(), prompts, completions))
    print(f"mean difference: {dense:.2e}")
    assert dense < BFLOAT16_TOLERANCE


def test_dense_rollouts_keep_every_page(generation, model):
    prompts = make_prompts([33, 120, 180], seed=4)
    with generation.dense_rollouts():
        completions, engine = roll_out(generation, prompts)
    assert generation.counters.cached_pages == 0
    dense = mean_difference(engine, policy_logprobs(model, SparsityScheduleConfig.dense(), prompts, completions))
    assert dense < BFLOAT16_TOLERANCE
    check_parity(generation, model, SCHEDULE, make_prompts([250, 250], seed=5))


def test_prefix_hits_of_several_generations(generation, model):
    (prompt,) = make_prompts([256], seed=6)  # whole blocks: all but the last token of the prompt is found
    check_parity(generation, model, SCHEDULE, [prompt] * 8)


def check_landmarks(worker):
    from sparrow_attention import page_landmarks

    compared = 0
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        keys, _, landmarks = layer.impl.views(layer.kv_cache)
        used = landmarks.float().abs().sum((1, 2, 3, 4)) > 0
        expected = page_landmarks(keys.unflatten(2, (landmarks.shape[2], -1)), landmarks.shape[3], landmarks.dtype)
        # Blocks that are not full yet hold what their last user left.
        equal = (landmarks.float() == expected.float()).flatten(1).all(1)
        compared += int((equal & used).sum())
    return compared


def test_landmarks_are_those_of_the_cached_keys(generation):
    roll_out(generation, make_prompts([250, 333], seed=7))
    (compared,) = generation.llm.collective_rpc(check_landmarks)
    assert compared >= 4 * (250 // 16 + 333 // 16)


def reverse_selection(generation, monkeypatch):
    """From the second step on, the worst pages of what was computed until then in the place of the best."""
    from sparrow_trl import vllm_cuda_backend

    def reverse_landmarks(worker):
        for layer in worker.vllm_config.compilation_config.static_forward_context.values():
            landmarks = layer.impl.views(layer.kv_cache)[2]
            landmarks.neg_()

    steps = iter(range(10**6))
    hold = vllm_cuda_backend.DecodeBuffers.hold_dense_until

    def hold_and_reverse(buffers, lengths):
        if next(steps) == 1:
            generation.llm.collective_rpc(reverse_landmarks)
        return hold(buffers, lengths)

    monkeypatch.setattr(vllm_cuda_backend.DecodeBuffers, "hold_dense_until", hold_and_reverse)


def test_a_wrong_selection_does_not_pass(generation, model, monkeypatch):
    reverse_selection(generation, monkeypatch)
    with pytest.raises(AssertionError):
        check_parity(generation, model, SCHEDULE, make_prompts([250, 300, 350, 400], seed=8))


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    "case",
    ["chunked prefill", "preemption", "two landmarks in fp8", "block of 64", "page of 32"],
)
def test_special_engines(model, monkeypatch, runner, case):
    use_model_runner(monkeypatch, runner)
    schedule, kwargs, prompts = SCHEDULE, {"engine_kwargs": dict(GRAPHS)}, make_prompts([250, 300, 350, 400], seed=9)
    if case == "chunked prefill":  # prompts arrive in pieces, beside tokens that are decoded
        kwargs["engine_kwargs"] |= {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
        prompts = make_prompts([250, 5, 300, 60, 350, 400] * 3, seed=9)
    elif case == "preemption":  # eight requests grow from 7 or 8 blocks each to 12 or 13
        kwargs["engine_kwargs"] |= {"num_gpu_blocks_override": 72}
        prompts = make_prompts([100, 103, 106, 109, 112, 115, 118, 121], seed=9)
    elif case == "two landmarks in fp8":
        schedule = SparsityScheduleConfig(
            top_k_pages=[1, 2],
            bin_tokens=128,
            dense_layers=[],
            page_score="group_softmax",
            landmarks_per_page=2,
            landmark_dtype="fp8_e4m3",
        )
    elif case == "block of 64":
        kwargs["block_size"] = 64
    elif case == "page of 32":
        schedule = SparsityScheduleConfig(page_size=32, top_k_pages=[1, 2], bin_tokens=128, dense_layers=[])
        kwargs["block_size"] = 32
    generation = build(model, schedule, **kwargs)
    preempted = record_preemptions(generation, monkeypatch)
    check_parity(generation, model, schedule, prompts)
    if case == "preemption":
        assert sum(tokens > 16 for tokens in preempted) >= 2


def test_sleep_between_rollouts(model):
    # vLLM lets one engine of a process sleep, so this runs with the model runner that it chooses by itself.
    generation = build(model, engine_kwargs=GRAPHS, enable_sleep_mode=True)
    for seed in (10, 11):  # after the first, the engine sleeps without its KV cache
        generation.sync_weights()
        check_parity(generation, model, SCHEDULE, make_prompts([250, 300, 350, 400], seed=seed))


def test_training_runs_with_checked_weights(model, tmp_path):
    from datasets import Dataset

    from sparrow_trl import SparseRolloutGRPOConfig, SparseRolloutGRPOTrainer

    args = SparseRolloutGRPOConfig(
        str(tmp_path),
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-4,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=60,
        vllm_max_model_length=512,
        vllm_engine_kwargs={"kv_cache_memory_bytes": 2**28, **GRAPHS},
        weight_sync_check_interval=1,
        acceptance_probe_fraction=1.0,
        acceptance_min_tokens=20,
        report_to="none",
    )
    trainer = SparseRolloutGRPOTrainer(
        model,
        lambda completions, **kwargs: [
            float(np.mean([c in "abc" for c in text])) if text else 0.0 for text in completions
        ],
        args,
        train_dataset=Dataset.from_list([{"prompt": "abcdefghij0123456789 " * 8}] * 16),
        schedule=SCHEDULE,
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "acceptance/tail" in log]
    assert len(logs) == 3
    assert trainer.vllm_generation.state.attention_backend == "SparseFlashAttentionImpl"
    assert all(0 < log["sparsity/kept_fraction"] < 1 for log in logs)
    print({name: logs[-1][name] for name in ("acceptance/tail", "acceptance/mean", "sparsity/kept_fraction")})
