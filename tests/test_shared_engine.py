"""A trainer that goes on with the engine of another one."""

import pytest
import torch
from test_trainer import OTHER_SCHEDULE, SCHEDULE, make_trainer
from tiny_training import make_config

from sparrow_trl import SparsityScheduleConfig


@pytest.fixture(scope="module")
def first(tiny_qwen3, tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("first"), max_steps=2, learning_rate=1e-2)
    trainer = make_trainer(tiny_qwen3, config, schedule=SCHEDULE)
    trainer.train()
    return trainer


def assert_parity(trainer):
    """The engine's log-probs are those of the trainer's own policy under its own schedule, at every step."""
    for rollout in trainer.rollouts:
        for engine, sparse, ids in zip(rollout.logprobs, rollout.sparse, rollout.completions, strict=True):
            policy = sparse.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            assert (torch.tensor(engine) - policy).abs().max() < 1e-3


@pytest.mark.parametrize(
    "schedule", [SCHEDULE, OTHER_SCHEDULE, SparsityScheduleConfig.dense()], ids=["same", "other", "dense"]
)
def test_another_trainer_goes_on_with_the_engine(first, tiny_qwen3, tmp_path, schedule):
    llm = first.vllm_generation.llm
    trainer = make_trainer(
        tiny_qwen3, make_config(tmp_path, max_steps=2, learning_rate=1e-2), schedule=schedule, engine=llm
    )
    # It begins with the model's own weights, not with those that the first has trained.
    assert not torch.equal(trainer.model.model.norm.weight, first.model.model.norm.weight)
    trainer.train()
    assert trainer.vllm_generation.llm is llm and trainer.schedule == schedule
    assert_parity(trainer)
    assert trainer.vllm_generation.state.counters.sparse_tokens < sum(
        len(ids) for rollout in trainer.rollouts for ids in rollout.completions
    )


def test_an_engine_with_other_settings_is_refused(first, tiny_qwen3, tmp_path):
    config = make_config(tmp_path, vllm_max_model_length=192)
    with pytest.raises(ValueError, match="max_model_len 256 and not 192"):
        make_trainer(tiny_qwen3, config, schedule=SCHEDULE, engine=first.vllm_generation.llm)
    config = make_config(tmp_path, vllm_enable_sleep_mode=True)
    with pytest.raises(ValueError, match="sleep mode"):
        make_trainer(tiny_qwen3, config, schedule=SCHEDULE, engine=first.vllm_generation.llm)
