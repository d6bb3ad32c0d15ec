"""The loop-written model against transformers in float64, and against examples worked out by hand."""

import math
from dataclasses import dataclass, replace

import loop_model
import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparrow_trl.schedule import SparsityScheduleConfig


@dataclass(frozen=True)
class Schedule:
    page_size: int = 16
    page_score: str = "mean_query"
    landmarks_per_page: int = 1
    bin_tokens: int = 2048
    top_k_pages: tuple[int, ...] = (1,)
    sink_pages: int = 1
    recent_pages: int = 2
    dense_layers: tuple[int, ...] | str = ()
    layer_top_k_pages: dict | None = None


DENSE = Schedule(dense_layers="all")
# Every page after the 16th token may be dropped: the harshest schedule, so that a query that is not dense shows.
OWN_PAGE_ONLY = Schedule(sink_pages=0, recent_pages=1, top_k_pages=(0,))


def build_model(architecture, num_kv_heads=2, tied=False, num_layers=3, **overrides):
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[architecture]
    config = config_class(
        vocab_size=53,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
        **overrides,
    )
    model = model_class(config).double().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        # The default initialisation leaves biases at 0 and norms at 1, where forgetting them would not show.
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.25)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1.0)
    return model


def use_float64_norms(model):
    """transformers computes RMSNorm in float32 whatever the model's dtype, which is off by 1e-7."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            weight, eps = module.weight, module.variance_epsilon
            module.forward = lambda x, weight=weight, eps=eps: F.rms_norm(x, weight.shape, weight, eps)


def draw_tokens(num_tokens, vocab_size=53):
    return np.random.default_rng(7).integers(vocab_size, size=num_tokens).tolist()


def transformers_logits(model, token_ids):
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


# Dense forward pass


@pytest.mark.parametrize(
    "architecture, overrides",
    [
        pytest.param("qwen3", {}, id="qwen3"),
        pytest.param("qwen3", {"tied": True}, id="qwen3-tied"),
        pytest.param("qwen3", {"num_kv_heads": 4}, id="qwen3-group-1"),
        pytest.param("qwen3", {"num_kv_heads": 1}, id="qwen3-group-4"),
        pytest.param("qwen3", {"attention_bias": True}, id="qwen3-bias"),
        pytest.param("qwen2", {}, id="qwen2"),
        pytest.param("llama", {}, id="llama"),
        pytest.param("llama", {"mlp_bias": True, "attention_bias": True}, id="llama-bias"),
    ],
)
def test_dense_logits_are_those_of_transformers(architecture, overrides):
    model = build_model(architecture, **overrides)
    token_ids = draw_tokens(40)
    logits = loop_model.sequence_logits(model, model.config, token_ids, 5, DENSE)
    np.testing.assert_allclose(transformers_logits(model, token_ids), logits, rtol=0, atol=2e-5)
    use_float64_norms(model)
    np.testing.assert_allclose(transformers_logits(model, token_ids), logits, rtol=0, atol=1e-9)
    assert np.abs(logits).max() > 1


def test_logprobs_are_of_the_next_token_at_the_temperature():
    model = build_model("qwen3")
    use_float64_norms(model)
    token_ids = draw_tokens(20)
    logprobs = loop_model.sequence_logprobs(model.state_dict(), model.config, token_ids, 5, DENSE, temperature=0.6)
    expected = torch.from_numpy(transformers_logits(model, token_ids) / 0.6).log_softmax(-1)
    np.testing.assert_allclose(logprobs, [expected[t, token_ids[t + 1]] for t in range(19)], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
    ],
)
def test_what_is_not_modelled_is_refused(overrides, message):
    model = build_model("qwen3")
    for name, value in overrides.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=message):
        loop_model.sequence_logits(model, model.config, [1, 2], 1, DENSE)


def test_unknown_weights_are_refused():
    model = build_model("qwen3")
    state_dict = model.state_dict() | {"model.layers.0.self_attn.sinks": torch.zeros(4)}
    with pytest.raises(ValueError, match="self_attn.sinks"):
        loop_model.sequence_logits(state_dict, model.config, [1, 2], 1, DENSE)


# Schedule


@pytest.mark.parametrize(
    "cached_tokens, pages, bin_index",
    [
        (1, 1, 0),
        (16, 1, 0),
        (17, 2, 0),
        (1984, 124, 0),
        (1985, 125, 1),
        (2000, 125, 1),
        (3984, 249, 1),
        (3985, 250, 2),
    ],
)
def test_bin_counts_whole_pages(cached_tokens, pages, bin_index):
    schedule = Schedule(bin_tokens=2000)
    assert loop_model.count_pages(cached_tokens, 16) == pages
    assert loop_model.bin_index(cached_tokens, schedule) == bin_index


def test_top_k_follows_the_bins_and_the_last_extends():
    # Bins of 2 pages: pages 1 | 2, 3 | 4, 5 | ...
    schedule = Schedule(bin_tokens=32, top_k_pages=(5, 7, 9))
    expected = {1: 5, 16: 5, 17: 7, 32: 7, 48: 7, 49: 9, 80: 9, 81: 9, 100_000: 9}
    assert {length: loop_model.top_k(length, 0, schedule) for length in expected} == expected


def test_layer_tables_replace_the_common_one():
    schedule = Schedule(top_k_pages=(5,), layer_top_k_pages={"3": (11,), "9-11": (13,)})
    top_k = {layer: loop_model.top_k(100, layer, schedule) for layer in (2, 3, 4, 8, 9, 10, 11, 12)}
    assert top_k == {2: 5, 3: 11, 4: 5, 8: 5, 9: 13, 10: 13, 11: 13, 12: 5}
    with pytest.raises(ValueError, match="layer 9 has 2 tables"):
        loop_model.top_k(100, 9, replace(schedule, layer_top_k_pages={"9": (1,), "9-11": (2,)}))


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86"), id="preset"),
        pytest.param(
            SparsityScheduleConfig(
                page_size=32,
                bin_tokens=256,
                top_k_pages=[2, 3, 5, 8],
                layer_top_k_pages={"2": [7], "4-5": [9, 11]},
            ),
            id="layer-tables",
        ),
    ],
)
def test_top_k_is_that_of_the_schedule_class(schedule):
    # On a dense layer the class answers with all pages, and the model never asks.
    for layer in set(range(7)) - set(schedule.dense_layers):
        for length in [*range(1, 2200), *range(3900, 4100), 31_999, 32_000, 32_001, 100_000]:
            assert loop_model.top_k(length, layer, schedule) == schedule.top_k(length, layer)


# Landmarks, scores and selection by hand


@pytest.mark.parametrize("landmarks_per_page, means", [(1, [7.5]), (2, [3.5, 11.5]), (4, [1.5, 5.5, 9.5, 13.5])])
def test_landmarks_are_means_of_equal_runs(landmarks_per_page, means):
    page_keys = np.stack([np.arange(16.0), np.ones(16)], axis=1)
    landmarks = loop_model.page_landmarks(page_keys, landmarks_per_page)
    np.testing.assert_array_equal(landmarks, [[mean, 1.0] for mean in means])


def test_landmarks_are_rounded_to_their_dtype():
    # The mean of 1 and 16 is 8.5; e4m3 has 3 mantissa bits, so between 8 and 16 it holds whole numbers, ties to even.
    page_keys = np.repeat([[1.0], [16.0]], 8, axis=0)
    assert loop_model.page_landmarks(page_keys, 1, "fp8_e4m3") == 8.0
    assert loop_model.page_landmarks(page_keys, 1, torch.bfloat16) == 8.5
    assert loop_model.page_landmarks(page_keys + 1 / 64, 1, torch.bfloat16) == 8.5
    assert loop_model.page_landmarks(page_keys + 1 / 64, 1, "float32") == 8.5 + 1 / 64
    with pytest.raises(ValueError, match="does not fit in fp8_e4m3"):
        loop_model.page_landmarks(page_keys * 100, 1, "fp8_e4m3")


# 100 cached tokens are 7 pages, the last with 4 tokens. Page 0 is the sink, pages 5 and 6 are recent: pages 1 to 4 are
# candidates. The mean of the two query heads is (1/2, 1/2), so the candidates score 1, 2, 1, 2.
HAND_QUERIES = np.array([[1.0, 0.0], [0.0, 1.0]])
HAND_LANDMARKS = {
    page: np.array([key]) for page, key in {1: (2.0, 0.0), 2: (0.0, 4.0), 3: (1.0, 1.0), 4: (3.0, 1.0)}.items()
}


@pytest.mark.parametrize(
    "num_kept, kept, margin",
    [
        (0, [0, 5, 6], math.inf),
        (1, [0, 2, 5, 6], 0.0),
        (2, [0, 2, 4, 5, 6], 1.0),
        (3, [0, 1, 2, 4, 5, 6], 0.0),
        (4, [0, 1, 2, 3, 4, 5, 6], math.inf),
        (9, [0, 1, 2, 3, 4, 5, 6], math.inf),
    ],
)
def test_highest_scores_are_kept_and_ties_go_to_the_lower_page(num_kept, kept, margin):
    selection = loop_model.select_pages(HAND_QUERIES, HAND_LANDMARKS, 100, num_kept, Schedule())
    assert selection == loop_model.Selection(kept, margin)


def test_signed_zeros_tie():
    landmarks = {page: np.array([[zero]]) for page, zero in enumerate([-0.0, 0.0, -0.0])}
    schedule = Schedule(sink_pages=0, recent_pages=1)
    assert loop_model.select_pages(np.ones((1, 1)), landmarks, 64, 1, schedule).kept == [0, 3]


@pytest.mark.parametrize(
    "cached_tokens, kept_without_candidates",
    [
        (1, [0]),
        (15, [0]),
        (16, [0]),
        (17, [0, 1]),
        (48, [0, 1, 2]),
        # 4 pages, of which page 1 is the only candidate.
        (49, [0, 2, 3]),
    ],
)
def test_reserved_pages_of_short_contexts(cached_tokens, kept_without_candidates):
    landmarks = {1: np.zeros((1, 2))}
    selection = loop_model.select_pages(HAND_QUERIES, landmarks, cached_tokens, 0, Schedule())
    assert selection.kept == kept_without_candidates


def exponent_landmarks(weights, head_dim):
    """Landmarks whose channel h, over sqrt(head_dim), is the log of `weights[page][run][h]`, for unit query heads."""
    landmarks = {}
    for page, runs in weights.items():
        landmarks[page] = np.zeros((len(runs), head_dim))
        landmarks[page][:, : len(runs[0])] = np.log(runs) * math.sqrt(head_dim)
    return landmarks


def test_group_softmax_sums_each_query_heads_shares():
    # Head 0 gives pages 1, 2, 3 the shares 8, 1, 1 of 10; head 1 gives 1/16, 1, 15/16 of 2.
    #   sums of shares:            0.8 + 0.03125 = 0.83125, 0.1 + 0.5 = 0.6, 0.1 + 0.46875 = 0.56875
    #   mean query, up to a scale: log(8 / 16) = -0.69,     log(1 * 1) = 0,  log(1 * 15 / 16) = -0.06
    queries = np.eye(2, 4)
    landmarks = exponent_landmarks({1: [(8, 1 / 16)], 2: [(1, 1)], 3: [(1, 15 / 16)]}, head_dim=4)
    softmax = Schedule(page_score="group_softmax")
    scores = loop_model.page_scores(queries, landmarks, range(1, 4), softmax)
    assert scores == pytest.approx({1: 0.83125, 2: 0.6, 3: 0.56875}, abs=1e-12)

    # 6 pages: page 0 is the sink, pages 4 and 5 are recent.
    selection = loop_model.select_pages(queries, landmarks, 96, 1, softmax)
    assert selection.kept == [0, 1, 4, 5]
    assert selection.margin == pytest.approx(0.23125, abs=1e-12)
    assert loop_model.select_pages(queries, landmarks, 96, 1, Schedule()).kept == [0, 2, 4, 5]
    assert loop_model.select_pages(queries, landmarks, 96, 2, Schedule()).kept == [0, 2, 3, 4, 5]


def test_runs_of_a_page_add_up():
    # Page 2 wins with 2 + 2.5 = 4.5 of 10 although page 1 has the single highest run.
    landmarks = exponent_landmarks({1: [(3,), (1,)], 2: [(2,), (2.5,)], 3: [(1,), (0.5,)]}, head_dim=4)
    schedule = Schedule(page_score="group_softmax", landmarks_per_page=2)
    scores = loop_model.page_scores(np.eye(1, 4), landmarks, range(1, 4), schedule)
    assert scores == pytest.approx({1: 0.4, 2: 0.45, 3: 0.15}, abs=1e-12)
    assert loop_model.select_pages(np.eye(1, 4), landmarks, 96, 1, schedule).kept == [0, 2, 4, 5]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"page_score": "quest"}, "'quest'"),
        ({"landmarks_per_page": 2}, "mean_query takes 1 landmark a page, not 2"),
        ({"recent_pages": 0}, "recent_pages is 0"),
    ],
)
def test_undefined_recipes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        loop_model.select_pages(HAND_QUERIES, HAND_LANDMARKS, 100, 1, replace(Schedule(), **changes))


# Sparse forward pass


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_keeping_all_pages_is_exactly_dense(page_score):
    model = build_model("qwen3")
    token_ids = draw_tokens(120)
    # 8 pages at most, 3 of them reserved.
    schedule = Schedule(page_score=page_score, top_k_pages=(5,))
    dense = loop_model.sequence_logits(model, model.config, token_ids, 5, DENSE)
    np.testing.assert_array_equal(dense, loop_model.sequence_logits(model, model.config, token_ids, 5, schedule))
    fewer = replace(schedule, top_k_pages=(4,))
    rows = (dense != loop_model.sequence_logits(model, model.config, token_ids, 5, fewer)).any(axis=1)
    # The eighth page starts with the 113th token.
    assert rows.tolist() == [False] * 112 + [True] * 8


@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17, 31, 39])
def test_prompt_tokens_are_dense_and_completion_tokens_are_not(prompt_length):
    model = build_model("qwen3")
    token_ids = draw_tokens(40)
    dense = loop_model.sequence_logits(model, model.config, token_ids, prompt_length, DENSE)
    sparse, selections = loop_model.run_sequence(model, model.config, token_ids, prompt_length, OWN_PAGE_ONLY)
    # Up to 16 cached tokens the query's own page is the whole context.
    first_sparse = max(prompt_length, 16)
    rows = (dense != sparse).any(axis=1)
    assert rows.tolist() == [False] * first_sparse + [True] * (40 - first_sparse)
    for (_, position, _), selection in selections.items():
        own_page = position // 16
        assert selection.kept == (list(range(own_page + 1)) if position < first_sparse else [own_page])

    # Log-prob t is predicted by the query at position t: the first completion token's is dense.
    dense_logprobs = loop_model.token_logprobs(dense, token_ids)
    sparse_logprobs = loop_model.sequence_logprobs(model, model.config, token_ids, prompt_length, OWN_PAGE_ONLY)
    rows = dense_logprobs != sparse_logprobs
    assert rows.tolist() == [False] * first_sparse + [True] * (39 - first_sparse)


def test_dense_layers_and_layer_tables_apply_to_their_layers():
    model = build_model("qwen3", num_layers=4)
    token_ids = draw_tokens(100)
    schedule = Schedule(top_k_pages=(0,), dense_layers=(0,), layer_top_k_pages={"0-1": (1,), "3": (2,)})
    selections = loop_model.kept_pages(model, model.config, token_ids, 10, schedule)
    # The last query has 7 pages, 3 of them reserved.
    for layer, num_pages in enumerate([7, 4, 3, 5]):
        for kv_head in range(2):
            assert len(selections[layer, 99, kv_head].kept) == num_pages


@pytest.fixture
def replayed_attention():
    """Attention of transformers that reads `masks[layer]` and leaves queries and keys after RoPE in `captured`."""
    masks, captured = {}, {}

    def replay(module, query, key, value, attention_mask, scaling, **kwargs):
        captured[module.layer_idx] = (query[0], key[0])
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        mask = masks[module.layer_idx].repeat_interleave(group, dim=0)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        return output.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["loop_model_replay"] = replay
    yield masks, captured
    del ALL_ATTENTION_FUNCTIONS["loop_model_replay"]


def whole_sequence_scores(query, key, schedule):
    """Scores `[kv_heads, T, T // page_size]` of a whole sequence by tensor operations; only the candidates' count."""
    num_kv_heads, num_tokens, head_dim = key.shape
    num_pages = num_tokens // schedule.page_size
    runs = key[:, : num_pages * schedule.page_size].unflatten(1, (num_pages, schedule.landmarks_per_page, -1))
    queries = query.unflatten(0, (num_kv_heads, -1))
    logits = torch.einsum("hgtd,hprd->hgtpr", queries, runs.mean(3))
    if schedule.page_score == "mean_query":
        return logits.mean(1)[..., 0]
    pages = torch.arange(num_pages)
    num_query_pages = torch.arange(num_tokens) // schedule.page_size + 1
    candidates = (pages >= schedule.sink_pages) & (pages < num_query_pages[:, None] - schedule.recent_pages)
    return (logits * head_dim**-0.5).logsumexp(-1).masked_fill(~candidates, -torch.inf).softmax(-1).sum(1)


@pytest.mark.parametrize(
    "architecture, num_kv_heads, recipe",
    [
        pytest.param("qwen3", 2, {}, id="qwen3-mean_query"),
        pytest.param("qwen2", 1, {}, id="qwen2-mean_query"),
        pytest.param("qwen3", 2, {"page_score": "group_softmax"}, id="qwen3-group_softmax"),
        pytest.param(
            "llama", 2, {"page_score": "group_softmax", "landmarks_per_page": 4}, id="llama-group_softmax-4-landmarks"
        ),
    ],
)
def test_sparse_logits_are_those_of_transformers_under_the_kept_pages(
    replayed_attention, architecture, num_kv_heads, recipe
):
    masks, captured = replayed_attention
    model = build_model(architecture, num_kv_heads=num_kv_heads)
    use_float64_norms(model)
    token_ids = draw_tokens(200)
    prompt_length = 50
    schedule = Schedule(bin_tokens=64, top_k_pages=(1, 1, 2, 3), dense_layers=(1,), **recipe)
    logits, selections = loop_model.run_sequence(model, model.config, token_ids, prompt_length, schedule)

    for layer in range(3):
        masks[layer] = torch.zeros(num_kv_heads, 200, 200, dtype=torch.bool)
    for (layer, position, kv_head), selection in selections.items():
        for page in selection.kept:
            masks[layer][kv_head, position, page * 16 : (page + 1) * 16] = True
    for mask in masks.values():
        mask &= torch.ones(200, 200, dtype=torch.bool).tril()
    model.set_attn_implementation("loop_model_replay")
    np.testing.assert_allclose(transformers_logits(model, token_ids), logits, rtol=0, atol=1e-9)

    num_compared = 0
    for layer in (0, 2):
        scores = whole_sequence_scores(*captured[layer], schedule)
        for position in range(prompt_length, 200):
            num_pages = position // 16 + 1
            first_recent = num_pages - 2
            num_kept = (1, 1, 2, 3)[min(num_pages // 4, 3)]
            for kv_head in range(num_kv_heads):
                selection = selections[layer, position, kv_head]
                candidates = scores[kv_head, position, 1:first_recent]
                if num_kept >= len(candidates):
                    assert selection == loop_model.Selection(list(range(num_pages)))
                    continue
                top = candidates.topk(num_kept + 1)
                assert selection.margin == pytest.approx(float(top.values[-2] - top.values[-1]), abs=1e-9)
                kept = sorted((top.indices[:num_kept] + 1).tolist())
                assert selection.kept == [0, *kept, num_pages - 2, num_pages - 1]
                num_compared += 1
    assert num_compared > 200 * num_kv_heads


def test_kv_heads_select_for_themselves():
    model = build_model("qwen3")
    selections = loop_model.kept_pages(model, model.config, draw_tokens(150), 20, Schedule())
    differing = [
        key for key, selection in selections.items() if selection.kept != selections[key[0], key[1], 1 - key[2]].kept
    ]
    assert differing


def test_landmark_dtype_changes_the_scores():
    model = build_model("qwen3")
    token_ids = draw_tokens(100)
    margins = {}
    for landmark_dtype in (None, "float32", "bfloat16", "fp8_e4m3"):
        selections = loop_model.kept_pages(model, model.config, token_ids, 90, Schedule(), landmark_dtype)
        # Only the first layer's queries do not depend on earlier selections.
        margins[landmark_dtype] = np.array(
            [s.margin for (layer, t, _), s in selections.items() if layer == 0 and t >= 90]
        )
    assert np.isfinite(margins[None]).all()
    errors = {name: np.abs(margin - margins[None]).max() for name, margin in margins.items()}
    assert 0 == errors[None] < errors["float32"] < 1e-5 < errors["bfloat16"] < errors["fp8_e4m3"]
