"""The engine's weights are the policy's after every synchronisation, and training stops when they are not."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparrow_trl import SparseVLLMGeneration, SparsityScheduleConfig
from sparrow_trl.rollout import swapped


SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2], bin_tokens=64, dense_layers=[0])
PROMPTS = [[5 + i % 60 for i in range(start, start + 40)] for start in (0, 7, 19)]


@pytest.fixture(params=["tiny_qwen3", "tiny_qwen3_untied"])
def policy_and_generation(request, build_generation):
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(request.param), dtype=torch.float32)
    return model, build_generation(model, SCHEDULE, block_size=32)


def take_step(model, optimizer, step):
    ids = torch.tensor(PROMPTS).roll(step, dims=1)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_twenty_steps_keep_engine_and_policy_equal(policy_and_generation):
    # NVIDIA-NeMo/RL#227: a head tied to the embedding must follow training too.
    model, generation = policy_and_generation
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(20):
        take_step(model, optimizer, step)
        with pytest.raises(RuntimeError, match="synchronisation"):
            generation.check_weights(PROMPTS)  # the step was large enough to be seen
        generation.sync_weights()
        assert generation.check_weights(PROMPTS) < 1e-4


def test_a_synchronisation_that_does_nothing_stops_the_next_rollout(policy_and_generation):
    model, generation = policy_and_generation
    take_step(model, torch.optim.SGD(model.parameters(), lr=1e-2), step=0)
    with swapped(generation.llm, "collective_rpc", lambda *args, **kwargs: None):
        generation.sync_weights()
    with pytest.raises(RuntimeError, match="differ from the policy's"):
        generation.generate(PROMPTS, None, num_generations=1)


def test_a_tied_head_left_behind_is_noticed(build_generation, tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    generation = build_generation(model, SCHEDULE, block_size=32)
    take_step(model, torch.optim.SGD(model.parameters(), lr=1e-2), step=0)
    # vLLM's own reload, which leaves the packed copy of a tied head as it was.
    (worker,) = generation.llm.collective_rpc(lambda worker: worker)
    worker.model_runner.reload_weights(weights_iterator=generation._iter_named_params())
    with pytest.raises(RuntimeError, match="differ from the policy's"):
        generation.check_weights(PROMPTS)


def test_every_third_synchronisation_is_checked_after_the_first_three(build_generation, tiny_qwen3, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    generation = build_generation(model, SCHEDULE, block_size=32, max_completion_length=1)
    checked = []
    monkeypatch.setattr(generation, "check_weights", lambda prompts: checked.append(generation.num_syncs))
    for _ in range(9):
        generation.sync_weights()
        generation.generate(PROMPTS, None, num_generations=1)
        generation.generate(PROMPTS, None, num_generations=1)  # the same weights need one check
    assert checked == [1, 2, 3, 6, 9]


def test_the_check_leaves_the_policy_as_it_was(build_generation, tiny_qwen3):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    generation = build_generation(model, SCHEDULE, block_size=32)
    generation.check_weights(PROMPTS)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_the_engine_takes_the_dtype_of_most_weights(tiny_qwen3, adapted):
    # TRL's cast_lm_head_to_fp32 makes a tied embedding, the first of the parameters, float32 too.
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.bfloat16)
    model.lm_head.float()
    assert next(model.parameters()).dtype == torch.float32
    if adapted:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    generation = object.__new__(SparseVLLMGeneration)
    for precision, dtype in (("no", torch.bfloat16), ("fp16", torch.float16)):
        generation.model, generation.accelerator = model, SimpleNamespace(mixed_precision=precision)
        assert generation.engine_dtype == dtype
