"""The GPU backend, where there is a GPU: the same definition, read from FlashAttention's cache in bfloat16."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM

from sparrow_trl import SparsityScheduleConfig


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and vLLM's CUDA build")

BFLOAT16_TOLERANCE = 2e-2
SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2, 3, 4], bin_tokens=64, dense_layers=[0])
ENGINE_KWARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 2**30}


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


@pytest.fixture(scope="module")
def generation(model):
    from accelerate import Accelerator
    from transformers import AutoTokenizer

    from sparrow_trl import SparseVLLMGeneration

    return SparseVLLMGeneration(
        model,
        Accelerator(),
        AutoTokenizer.from_pretrained(model.name_or_path),
        schedule=SCHEDULE,
        engine_kwargs=ENGINE_KWARGS,
        max_model_length=512,
        max_num_seqs=16,
        max_completion_length=80,
        generation_kwargs={"ignore_eos": True},
    )


def test_engine_matches_the_training_side(generation, model):
    from test_parity import make_prompts, mean_difference, policy_logprobs, roll_out

    prompts = make_prompts([5, 40, 64, 113, 175, 250, 250, 250], seed=1)
    completions, engine = roll_out(generation, prompts)
    assert 0 < generation.counters.kept_fraction < 0.9
    sparse = mean_difference(engine, policy_logprobs(model, SCHEDULE, prompts, completions))
    dense = mean_difference(engine, policy_logprobs(model, SparsityScheduleConfig.dense(), prompts, completions))
    print(f"mean difference: {sparse:.2e} from sparse, {dense:.2e} from dense log-probs")
    assert sparse < BFLOAT16_TOLERANCE
    assert dense > 3 * sparse


def test_keeping_every_page_equals_dense(generation, model):
    from test_parity import make_prompts, mean_difference, policy_logprobs, roll_out

    prompts = make_prompts([33, 120, 180], seed=3)
    generation.set_schedule(SparsityScheduleConfig.fixed(2**15, dense_layers=[]))
    completions, engine = roll_out(generation, prompts)
    generation.set_schedule(SCHEDULE)
    dense = mean_difference(engine, policy_logprobs(model, SparsityScheduleConfig.dense(), prompts, completions))
    print(f"mean difference: {dense:.2e}")
    assert dense < BFLOAT16_TOLERANCE


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
        vllm_engine_kwargs=ENGINE_KWARGS,
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
