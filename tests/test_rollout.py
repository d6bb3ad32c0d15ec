"""What `SparseVLLMGeneration` hands to the trainer: log-probs, probes, counters and weights."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import EOS_TOKEN_ID, SHAPE
from transformers import AutoModelForCausalLM
from vllm import LLM
from vllm.logprobs import FlatLogprobs

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.acceptance import top_k_acceptance_bounds
from sparrow_trl.attention import sparse_attention_context
from sparrow_trl.rollout import swapped


SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2, 3], bin_tokens=64, dense_layers=[0])
TEMPERATURE = 2.0  # flat enough that tokens of every rank are sampled
LAYERS, KV_HEADS, VOCAB_SIZE = (SHAPE[name] for name in ("num_hidden_layers", "num_key_value_heads", "vocab_size"))


@pytest.fixture(scope="module")
def model(tiny_qwen3):
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(build_generation, model):
    return build_generation(model, SCHEDULE, block_size=32, temperature=TEMPERATURE)


@pytest.fixture
def generation(engine):
    """The engine with the schedule and settings it was built with."""
    settings = dict(vars(engine))
    engine.set_schedule(SCHEDULE)
    yield engine
    vars(engine).clear()
    vars(engine).update(settings)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    lengths = [70, 97, 128, 130, 151, 175, 200, 223]
    return [torch.randint(2, 70, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module", params=[False, True], ids=["lora", "dora"])
def adapted_policy(request, tiny_qwen3):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.bfloat16)
    with torch.no_grad():  # the random model's wide weights turn rounding into large errors
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.dim() == 2 else 1)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=32, target_modules=modules, use_dora=request.param)
    policy = get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return policy


@pytest.fixture(scope="module")
def adapted_generation(adapted_policy, build_generation):
    return build_generation(adapted_policy, SCHEDULE, block_size=32, max_completion_length=8)


def sampler_logprobs(model, schedule, prompt, completion, temperature=TEMPERATURE):
    """Log-probs `[completion_length, vocab]` of the model under the training-side sparse attention."""
    ids = torch.tensor([prompt + list(completion)])
    with torch.no_grad(), sparse_attention_context(model, schedule, prompt_width=len(prompt)):
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def assert_logprobs(actual, expected):
    """The same log-probs, but for the odd page that the two sides choose differently in a near-tie."""
    actual = torch.as_tensor(actual)
    assert actual.shape == expected.shape
    assert (actual - expected).abs().mean() < 1e-3


def count_pages(schedule, prompts, completions, layers=LAYERS):
    """Pages kept and cached, from the definition: the last token of a completion is sampled and never attends."""
    kept = cached = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        for length in range(len(prompt) + 1, len(prompt) + len(completion)):
            pages = -(-length // schedule.page_size)
            bin_index = pages // (schedule.bin_tokens // schedule.page_size)
            top_k = schedule.top_k_pages[min(bin_index, len(schedule.top_k_pages) - 1)]
            for layer in range(layers):
                cached += pages
                dense = layer in schedule.dense_layers
                kept += pages if dense else min(pages, schedule.sink_pages + top_k + schedule.recent_pages)
    return kept * KV_HEADS, cached * KV_HEADS


def cached_blocks(generation):
    """Number of blocks that a later request could reuse."""
    pool = generation.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return sum(block.block_hash is not None for block in pool.blocks)


class TestLogprobs:
    @pytest.mark.parametrize("probe_top_k", [20, 3])
    def test_each_token_has_its_own_logprob_whatever_its_rank(
        self, generation, model, prompts, monkeypatch, probe_top_k
    ):
        # Stock TRL keeps the top-ranked entry, which is the sampled token's only by luck.
        monkeypatch.setattr(generation.llm, "probe_top_k", probe_top_k)
        generation.probe_rows = lambda num_rows: range(0, num_rows, 2)
        _, completions, logprobs, token_ids = generation.generate(prompts, None, num_generations=1)
        ranks = {True: [], False: []}
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            expected = sampler_logprobs(model, SCHEDULE, prompt, completion)
            sampled = expected.gather(1, torch.tensor(completion)[:, None])
            assert_logprobs(logprobs[row], sampled)
            assert [ids[0] for ids in token_ids[row]] == list(completion)
            ranks[row % 2 == 0].extend((1 + (expected > sampled).sum(1)).tolist())
        for row_ranks in ranks.values():
            assert 9 in row_ranks and max(row_ranks) > 20

    @pytest.mark.parametrize("probe_top_k", [20, 3])
    def test_probes_hold_the_samplers_most_likely_tokens(self, generation, model, prompts, monkeypatch, probe_top_k):
        monkeypatch.setattr(generation.llm, "probe_top_k", probe_top_k)
        generation.probe_rows = lambda num_rows: [1, 4, num_rows - 1]
        _, completions, logprobs, _ = generation.generate(prompts, None, num_generations=1)
        assert [probe.row for probe in generation.probes] == [1, 4, 7]
        for probe in generation.probes:
            prompt, completion = prompts[probe.row], completions[probe.row]
            expected = sampler_logprobs(model, SCHEDULE, prompt, completion)
            assert probe.prompt_length == len(prompt)
            assert probe.sampled_ids.tolist() == list(completion)
            assert probe.sampled_logprobs[:, None].tolist() == logprobs[probe.row]
            assert probe.token_ids.shape == probe.logprobs.shape == (len(completion), probe_top_k)
            assert_logprobs(probe.logprobs, expected.topk(probe_top_k).values)
            assert_logprobs(probe.logprobs, expected.gather(1, probe.token_ids))

    def test_probes_of_a_whole_vocabulary(self, build_generation, model, prompts):
        generation = build_generation(model, SCHEDULE, block_size=32, probe_top_k=1000, max_completion_length=4)
        generation.probe_rows = range
        generation.generate(prompts[:2], None, num_generations=1)
        for probe in generation.probes:
            assert sorted(probe.token_ids[1].tolist()) == list(range(VOCAB_SIZE))
            torch.testing.assert_close(probe.logprobs.exp().sum(1), torch.ones(len(probe.logprobs)))

    def test_infinite_entries_among_the_most_likely_count_as_zero(self, generation, prompts):
        # TRL#6789: tokens that the sampler rules out come back with a log-prob of -inf.
        generation.top_k = 5
        generation.probe_rows = range
        generation.generate(prompts, None, num_generations=1)
        for probe in generation.probes:
            assert (probe.logprobs[:, 5:] == -torch.inf).all() and probe.logprobs[:, :5].isfinite().all()
            dense = torch.full_like(probe.logprobs, 1 / VOCAB_SIZE).log()
            lower, upper = top_k_acceptance_bounds(dense, probe.logprobs)
            expected = probe.logprobs[:, :5].exp().clamp(max=1 / VOCAB_SIZE).sum(1)
            torch.testing.assert_close(lower, expected)
            torch.testing.assert_close(upper, lower)  # the sampler has no mass left

    @pytest.mark.parametrize("probed", [True, False])
    def test_a_nan_stops_the_run_and_names_the_request(self, generation, prompts, monkeypatch, probed):
        generation.probe_rows = range if probed else None
        outputs = change_outputs(monkeypatch, lambda flat: flat.logprobs.__setitem__(flat.start_indices[2], np.nan))
        with pytest.raises(RuntimeError, match="NaN log-prob for token .* at position 2") as error:
            generation.generate(prompts, None, num_generations=1)
        assert f"request {outputs[0].request_id}." in str(error.value)

    def test_a_nan_among_the_most_likely_tokens_names_the_request_too(self, generation, prompts, monkeypatch):
        generation.probe_rows = range
        outputs = change_outputs(
            monkeypatch, lambda flat: flat.logprobs.__setitem__(flat.start_indices[2] + 4, np.nan)
        )
        with pytest.raises(RuntimeError, match="NaN log-prob for token .* at position 2") as error:
            generation.generate(prompts, None, num_generations=1)
        assert f"request {outputs[0].request_id}." in str(error.value)


def change_outputs(monkeypatch, change):
    """Apply `change` to the log-probs of the first completion that vLLM returns, and collect the requests."""
    outputs = []
    generate = LLM.generate

    def changed(self, prompts, *args, **kwargs):
        result = generate(self, prompts, *args, **kwargs)
        if result[0].outputs[0].logprobs is not None:  # the weight check asks for none
            outputs.extend(result)
            change(result[0].outputs[0].logprobs)
        return result

    monkeypatch.setattr(LLM, "generate", changed)
    return outputs


class TestShortCompletions:
    @pytest.mark.parametrize("logprobs", [FlatLogprobs(), None], ids=["no entries", "no log-probs"])
    @pytest.mark.parametrize("probed", [True, False])
    def test_an_empty_completion_becomes_an_end_of_sequence(self, generation, prompts, monkeypatch, logprobs, probed):
        generate = LLM.generate

        def first_is_empty(self, *args, **kwargs):
            outputs = generate(self, *args, **kwargs)
            completion = outputs[0].outputs[0]
            completion.token_ids, completion.logprobs = [], logprobs
            return outputs

        monkeypatch.setattr(LLM, "generate", first_is_empty)
        generation.weight_sync_check_interval = 0
        generation.probe_rows = range if probed else None
        _, completions, logprobs, token_ids = generation.generate(prompts, None, num_generations=1)
        assert (completions[0], logprobs[0], token_ids[0]) == ([EOS_TOKEN_ID], [[None]], [[EOS_TOKEN_ID]])
        assert all(len(ids) == len(values) > 1 for ids, values in zip(completions[1:], logprobs[1:], strict=True))
        for probe in generation.probes:
            assert len(probe.token_ids) == (len(completions[probe.row]) if probe.row else 0)

    def test_a_completion_may_end_with_its_first_token(self, generation, model, prompts):
        stops = list(range(2, VOCAB_SIZE, 2))
        generation.generation_kwargs = {"stop_token_ids": stops}
        generation.probe_rows = range
        _, completions, logprobs, _ = generation.generate(prompts * 2, None, num_generations=2)
        lengths = [len(ids) for ids in completions]
        assert 1 in lengths and max(lengths) > 1
        for probe in generation.probes:
            completion = completions[probe.row]
            assert completion[-1] in {*stops, EOS_TOKEN_ID} or len(completion) == generation.max_completion_length
            expected = sampler_logprobs(model, SCHEDULE, (prompts * 2)[probe.row], completion)
            assert_logprobs(probe.logprobs, expected.topk(20).values)
            assert len(logprobs[probe.row]) == len(completion)


class TestSchedule:
    @pytest.mark.parametrize(
        "schedule",
        [
            SCHEDULE,
            SparsityScheduleConfig(top_k_pages=[0, 1], bin_tokens=96, dense_layers=[1, 3]),
            SparsityScheduleConfig(
                top_k_pages=[2], bin_tokens=64, dense_layers=[], page_size=32, sink_pages=0, recent_pages=1
            ),
        ],
    )
    def test_a_change_takes_effect_without_a_restart(self, generation, model, prompts, schedule):
        llm = generation.llm
        generation.set_schedule(schedule)
        assert generation.schedule == schedule and generation.llm is llm
        _, completions, logprobs, _ = generation.generate(prompts, None, num_generations=1)
        kept, cached = count_pages(schedule, prompts, completions)
        assert (generation.counters.kept_pages, generation.counters.cached_pages) == (kept, cached)
        assert generation.counters.kept_fraction == kept / cached
        assert generation.counters.sparse_tokens == sum(map(len, completions)) - len(completions)
        assert generation.counters.unattributed_tokens == 0
        for prompt, completion, values in zip(prompts, completions, logprobs, strict=True):
            expected = sampler_logprobs(model, schedule, prompt, completion)
            assert_logprobs(values, expected.gather(1, torch.tensor(completion)[:, None]))

    def test_counters_are_those_of_one_batch(self, generation, prompts):
        for batch in (prompts, prompts[:3]):
            _, completions, _, _ = generation.generate(batch, None, num_generations=1)
            assert (generation.counters.kept_pages, generation.counters.cached_pages) == count_pages(
                SCHEDULE, batch, completions
            )

    def test_a_page_that_does_not_divide_the_block_changes_nothing(self, generation):
        with pytest.raises(ValueError, match="page_size 64 does not divide the engine's KV block of 32"):
            generation.set_schedule(SparsityScheduleConfig(page_size=64, bin_tokens=128, top_k_pages=[1]))
        assert generation.schedule == SCHEDULE

    def test_keys_cached_under_one_attention_are_not_reused_under_another(self, generation, prompts):
        def blocks_after_generating():
            generation.generate(prompts, None, num_generations=1)
            return cached_blocks(generation)

        assert blocks_after_generating() > 0
        generation.set_schedule(SparsityScheduleConfig.dense())
        assert cached_blocks(generation) == 0
        assert blocks_after_generating() > 0
        with generation.dense_rollouts():
            assert cached_blocks(generation) == 0
            assert blocks_after_generating() > 0
        assert cached_blocks(generation) == 0
        assert blocks_after_generating() > 0
        generation.sync_weights()
        assert cached_blocks(generation) == 0

    def test_dense_rollouts_end_with_an_error_too(self, generation):
        with pytest.raises(ZeroDivisionError), generation.dense_rollouts():
            assert generation.state.dense
            1 / 0  # noqa: B018
        assert not generation.state.dense

    def test_dense_rollouts_are_the_dense_policys(self, generation, model, prompts):
        with generation.dense_rollouts():
            _, completions, logprobs, _ = generation.generate(prompts, None, num_generations=1)
            assert generation.counters.cached_pages == generation.counters.kept_pages == 0
        for prompt, completion, values in zip(prompts, completions, logprobs, strict=True):
            expected = sampler_logprobs(model, SparsityScheduleConfig.dense(), prompt, completion)
            assert_logprobs(values, expected.gather(1, torch.tensor(completion)[:, None]))


class TestAdapters:
    """TRL merges an adapter in place and takes it out again, which rounds the policy's weights at every turn."""

    def test_base_weights_stay_as_they_were(self, adapted_policy, adapted_generation, prompts):
        # TRL#6688
        before = copy.deepcopy(adapted_policy.state_dict())
        for _ in range(100):
            adapted_generation.sync_weights()
        after = adapted_policy.state_dict()
        assert after.keys() == before.keys()
        assert [name for name in after if not torch.equal(after[name], before[name])] == []
        assert not any(module.merged for module in adapted_policy.modules() if hasattr(module, "merged_adapters"))
        assert adapted_generation.check_weights(prompts) < 2e-2
        adapted_generation.generate(prompts, None, num_generations=1)

    def test_merged_weights_are_rounded_once(self, adapted_policy, adapted_generation):
        sent = dict(adapted_generation._iter_named_params())
        exact = copy.deepcopy(adapted_policy).double().merge_and_unload()
        assert sent.keys() == dict(exact.named_parameters()).keys()
        for name, parameter in exact.named_parameters():
            assert sent[name].dtype == torch.bfloat16
            difference = (sent[name].double() - parameter).abs()
            assert (difference <= parameter.abs() * 2**-8).all(), name  # half a unit in the last place, and no more

    def test_a_switched_off_adapter_is_not_sent(self, adapted_policy, adapted_generation):
        with adapted_policy.disable_adapter():
            sent = dict(adapted_generation._iter_named_params())
        for name, parameter in copy.deepcopy(adapted_policy).unload().named_parameters():
            assert torch.equal(sent[name], parameter)

    def test_an_adapter_that_moves_is_sent_again(self, adapted_policy, adapted_generation, prompts):
        adapted_generation.sync_weights()
        assert adapted_generation.check_weights(prompts) < 2e-2
        with torch.no_grad():
            for name, parameter in adapted_policy.named_parameters():
                if "lora_B" in name:
                    parameter.neg_()
        with pytest.raises(RuntimeError, match="differ from the policy's"):
            adapted_generation.check_weights(prompts)
        adapted_generation.sync_weights()
        assert adapted_generation.check_weights(prompts) < 2e-2


def test_swapped_restores_what_was_there():
    owner = SimpleNamespace(name="original")
    with pytest.raises(ZeroDivisionError), swapped(owner, "name", "other"):
        assert owner.name == "other"
        1 / 0  # noqa: B018
    assert owner.name == "original"
