"""A rollout that an error or an interrupt ends leaves nothing behind for the next one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.rollout import swapped


SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2], bin_tokens=64, dense_layers=[0])
PROMPTS = [[5 + i % 60 for i in range(start, start + 70)] for start in (0, 7, 19)]


@pytest.fixture(scope="module")
def generation(build_generation, tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    return build_generation(model, SCHEDULE, block_size=32, generation_kwargs={"ignore_eos": True})


def interrupt(generation, after_steps):
    """Interrupt a rollout of `PROMPTS` after a number of the engine's steps."""
    engine = generation.llm.llm_engine
    step, steps = engine.step, iter(range(after_steps))

    def interrupted_step():
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with swapped(engine, "step", interrupted_step), pytest.raises(KeyboardInterrupt):
        generation.generate(PROMPTS, None, num_generations=1)


@pytest.mark.parametrize("after_steps", [0, 1, 30])
def test_the_next_rollout_gets_its_own_completions(generation, after_steps):
    interrupt(generation, after_steps)
    asked = []
    generation.llm.before_generate = asked.extend
    prompts = PROMPTS[:2]
    outputs = generation.generate(prompts, None, num_generations=1)
    assert [len(values) for values in outputs] == [2, 2, 2, 2]
    assert asked == prompts
    pool = generation.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # vLLM keeps one for padding


def test_the_prefix_cache_can_be_reset(generation):
    with generation.dense_rollouts():
        interrupt(generation, after_steps=30)
    assert not generation.state.dense
    assert generation.llm.reset_prefix_cache()


def test_dense_rollouts_may_be_nested(generation):
    with generation.dense_rollouts():
        with generation.dense_rollouts():
            pass
        assert generation.state.dense
    assert not generation.state.dense
