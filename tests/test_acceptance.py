import json
import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from sparrow_trl import acceptance
from sparrow_trl.acceptance import (
    HISTOGRAM_CELLS,
    AcceptanceTracker,
    acceptance_rate,
    acceptance_rate_from_hidden_states,
    fit_beta_tail,
    gather_dense_logprobs,
    top_k_acceptance_bounds,
)
from sparrow_trl.schedule import SparsityScheduleConfig


VOCAB, HIDDEN = 97, 24


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def softmax64(logits) -> np.ndarray:
    return special.softmax(np.asarray(logits, dtype=np.float64), axis=-1)


def alpha64(dense_logits, sparse_logits) -> np.ndarray:
    """Total variation form: an expression other than the one under test."""
    return 1 - 0.5 * np.abs(softmax64(dense_logits) - softmax64(sparse_logits)).sum(-1)


def close(tensor: torch.Tensor, expected: np.ndarray, atol: float = 2e-6):
    np.testing.assert_allclose(tensor.double().numpy(), expected, rtol=0, atol=atol)


class TestAcceptanceRate:
    @pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
    def test_against_float64(self, rng, temperature):
        dense, sparse = rng.normal(size=(2, 3, 50, VOCAB)) * 4
        sparse = dense + 0.3 * sparse
        alpha = acceptance_rate(torch.tensor(dense).float(), torch.tensor(sparse).float(), temperature)
        assert alpha.shape == (3, 50) and alpha.dtype == torch.float32
        close(alpha, alpha64(dense / temperature, sparse / temperature))
        exact = acceptance_rate(torch.tensor(dense), torch.tensor(sparse), temperature)
        close(exact, alpha64(dense / temperature, sparse / temperature), atol=1e-13)

    def test_ends_of_the_range(self):
        logits = torch.randn(20, 50_000) * 10
        alpha = acceptance_rate(logits, logits + 7)
        assert (alpha <= 1).all()
        torch.testing.assert_close(alpha, torch.ones(20), rtol=0, atol=1e-5)
        masked = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]])
        assert acceptance_rate(masked, masked.flip(-1)).item() == 0
        half = acceptance_rate(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([[0.0, -torch.inf, 0.0]]))
        assert half.item() == pytest.approx(0.5)

    @pytest.mark.parametrize("row", [[math.nan, 0, 0], [math.inf, 0, 0], [-math.inf] * 3])
    @pytest.mark.parametrize("side", ["dense_logits", "sparse_logits"])
    def test_rows_without_a_distribution_are_named(self, row, side):
        logits = {"dense_logits": torch.zeros(5, 3), "sparse_logits": torch.zeros(5, 3)}
        logits[side][3] = torch.tensor(row)
        with pytest.raises(ValueError, match=rf"`{side}`.*positions \[3\]"):
            acceptance_rate(**logits)

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="same shape"):
            acceptance_rate(torch.zeros(2, 3), torch.zeros(3, 3))
        for temperature in (0, -1, math.nan):
            with pytest.raises(ValueError, match="temperature"):
                acceptance_rate(torch.zeros(2, 3), torch.zeros(2, 3), temperature)


@pytest.fixture
def head(rng):
    weight, bias = rng.normal(size=(VOCAB, HIDDEN)), rng.normal(size=VOCAB)
    dense = rng.normal(size=(2, 19, HIDDEN))
    sparse = dense + 0.2 * rng.normal(size=dense.shape)
    return weight, bias, dense, sparse


class TestFromHiddenStates:
    @pytest.mark.parametrize("chunk_size", [1, 7, 38, 1000])
    def test_against_float64(self, head, chunk_size):
        weight, bias, dense, sparse = (torch.tensor(array).float() for array in head)
        alpha = acceptance_rate_from_hidden_states(
            dense, sparse, weight, bias=bias, temperature=0.7, chunk_size=chunk_size
        )
        weight, bias, dense, sparse = head
        close(alpha, alpha64((dense @ weight.T + bias) / 0.7, (sparse @ weight.T + bias) / 0.7), atol=2e-5)

    def test_scaled_and_capped_logits(self, head):
        weight, _, dense, sparse = (torch.tensor(array).float() for array in head)
        alpha = acceptance_rate_from_hidden_states(dense, sparse, weight, logit_scale=0.5, final_logit_softcapping=3.0)
        weight, _, dense, sparse = head
        expected = alpha64(*(3 * np.tanh(states @ weight.T * 0.5 / 3) for states in (dense, sparse)))
        close(alpha, expected, atol=2e-5)

    @pytest.mark.parametrize("function", ["acceptance", "gather"])
    def test_never_holds_the_logits_of_all_positions(self, function, monkeypatch):
        largest = 0
        linear = torch.nn.functional.linear

        def spy(*args):
            nonlocal largest
            logits = linear(*args)
            largest = max(largest, logits.numel())
            return logits

        monkeypatch.setattr(acceptance.F, "linear", spy)
        states, weight = torch.randn(100, HIDDEN), torch.randn(VOCAB, HIDDEN)
        if function == "acceptance":
            acceptance_rate_from_hidden_states(states, states, weight, chunk_size=8)
        else:
            gather_dense_logprobs(states, weight, torch.zeros(100, 3, dtype=torch.long), chunk_size=8)
        assert largest == 8 * VOCAB

    def test_no_positions(self):
        empty = torch.empty(0, HIDDEN)
        assert acceptance_rate_from_hidden_states(empty, empty, torch.randn(VOCAB, HIDDEN)).shape == (0,)
        ids = torch.empty(0, 4, dtype=torch.long)
        assert gather_dense_logprobs(empty, torch.randn(VOCAB, HIDDEN), ids).shape == (0, 4)


class TestGatherDenseLogprobs:
    @pytest.mark.parametrize("chunk_size", [1, 7, 38, 1000])
    @pytest.mark.parametrize("temperature", [0.6, 1.0])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_against_float64(self, head, rng, chunk_size, temperature, dtype):
        weight, bias, dense, _ = head
        dense = dense.reshape(-1, HIDDEN)
        ids = rng.integers(0, VOCAB, size=(len(dense), 5))
        logprobs = gather_dense_logprobs(
            torch.tensor(dense).float(),
            torch.tensor(weight).float(),
            torch.tensor(ids, dtype=dtype),
            temperature,
            bias=torch.tensor(bias).float(),
            chunk_size=chunk_size,
        )
        expected = special.log_softmax((dense @ weight.T + bias) / temperature, axis=-1)
        assert logprobs.dtype == torch.float32
        close(logprobs, np.take_along_axis(expected, ids, -1), atol=2e-5)

    def test_a_bfloat16_head_gives_what_the_model_gives(self, head, rng):
        weight, _, dense, _ = (torch.tensor(array).bfloat16() for array in head)
        dense = dense.view(-1, HIDDEN)
        ids = torch.tensor(rng.integers(0, VOCAB, size=(len(dense), 5)))
        model_logits = torch.nn.functional.linear(dense, weight).float()
        torch.testing.assert_close(
            gather_dense_logprobs(dense.float(), weight, ids), model_logits.log_softmax(-1).gather(-1, ids)
        )

    def test_keeps_no_graph(self, head):
        weight = torch.tensor(head[0]).float().requires_grad_()
        states = torch.randn(3, HIDDEN, requires_grad=True)
        assert not gather_dense_logprobs(states, weight, torch.zeros(3, 1, dtype=torch.long)).requires_grad

    def test_bad_arguments(self):
        states, weight = torch.randn(4, HIDDEN), torch.randn(VOCAB, HIDDEN)
        for token in (-1, VOCAB):
            ids = torch.zeros(4, 2, dtype=torch.long)
            ids[2, 1] = token
            with pytest.raises(ValueError, match=rf"outside \[0, {VOCAB}\) at positions \[2\]"):
                gather_dense_logprobs(states, weight, ids)
        with pytest.raises(ValueError, match=r"\[positions, k\]"):
            gather_dense_logprobs(states, weight, torch.zeros(3, 2, dtype=torch.long))
        with pytest.raises(ValueError, match="chunk_size"):
            gather_dense_logprobs(states, weight, torch.zeros(4, 2, dtype=torch.long), chunk_size=0)


def top_k(
    dense_logits: np.ndarray, sparse_logits: np.ndarray, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What an engine and a dense forward report: log-probs of the k likeliest tokens of the sampler."""
    ids = np.argsort(-sparse_logits, axis=-1)[..., :k]
    dense, sparse = (
        np.take_along_axis(special.log_softmax(logits, axis=-1), ids, -1) for logits in (dense_logits, sparse_logits)
    )
    return torch.tensor(dense).float(), torch.tensor(sparse).float(), torch.tensor(ids)


class TestTopKBounds:
    @pytest.mark.parametrize("k", [1, 2, 20, VOCAB])
    def test_bounds_hold_and_close(self, rng, k):
        dense_logits = rng.normal(size=(400, VOCAB)) * 3
        sparse_logits = dense_logits + rng.normal(size=dense_logits.shape)
        dense, sparse, ids = top_k(dense_logits, sparse_logits, k)
        lower, upper = top_k_acceptance_bounds(dense, sparse)
        exact = alpha64(dense_logits, sparse_logits)
        assert (lower.numpy() <= exact + 2e-6).all() and (exact <= upper.numpy() + 2e-6).all()

        p, q = (np.take_along_axis(softmax64(logits), ids.numpy(), -1) for logits in (dense_logits, sparse_logits))
        expected_lower = np.where(p < q, p, q).sum(-1)
        close(lower, expected_lower)
        close(upper, expected_lower + np.minimum(1 - p.sum(-1), 1 - q.sum(-1)), atol=4e-6)
        if k == VOCAB:
            close(lower, exact)
            close(upper, exact, atol=4e-6)

    def test_minus_infinity_contributes_nothing(self):
        inf = torch.inf
        dense = torch.tensor([[0.5, 0.25, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]).log()
        sparse = torch.tensor([[0.75, 0.0, 0.25], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]).log()
        assert dense[0, 2] == -inf and sparse[0, 1] == -inf
        lower, upper = top_k_acceptance_bounds(dense, sparse)
        close(lower, np.array([0.5, 0.5, 0.0]))
        close(upper, np.array([0.5, 0.5, 0.0]))

    def test_renormalised_sampler(self):
        # top_p = 0.9 sets the sampler's other tokens to -inf and scales up the rest.
        dense = torch.tensor([[0.6, 0.3, 0.06, 0.04]]).log()
        sparse = torch.tensor([[0.6 / 0.9, 0.3 / 0.9, 0.0, 0.0]]).log()
        lower, upper = top_k_acceptance_bounds(dense, sparse)
        close(lower, np.array([0.9]))
        close(upper, np.array([0.9]))

    @pytest.mark.parametrize("side", [0, 1])
    def test_nan_raises_and_names_positions(self, side):
        logprobs = [torch.full((2, 30, 3), -2.0) for _ in range(2)]
        logprobs[side][1, 4, 2] = torch.nan
        name = ("dense_logprobs", "sparse_logprobs")[side]
        with pytest.raises(ValueError, match=rf"`{name}` are NaN.*positions \[\[1, 4\]\]"):
            top_k_acceptance_bounds(*logprobs)
        logprobs[side][:] = torch.nan
        with pytest.raises(ValueError, match=r"\[0, 9\]\] and 50 more"):
            top_k_acceptance_bounds(*logprobs)

    def test_a_repeated_token_counts_once(self, rng):
        dense_logits = rng.normal(size=(60, VOCAB)) * 3
        sparse_logits = dense_logits + rng.normal(size=dense_logits.shape)
        dense, sparse, ids = top_k(dense_logits, sparse_logits, 5)
        lower, upper = top_k_acceptance_bounds(dense, sparse)
        # The sampled token comes first and again at its rank, as in vLLM's flat log-probs.
        rank = torch.tensor(rng.integers(0, 5, size=(60, 1)))
        flat = [torch.cat([values.gather(-1, rank), values], -1) for values in (dense, sparse, ids)]
        torch.testing.assert_close(top_k_acceptance_bounds(*flat), (lower, upper), rtol=0, atol=1e-6)

    def test_a_repeated_token_without_ids_is_noticed(self):
        logprobs = torch.tensor([[0.5, 0.3], [0.8, 0.8]]).log()
        with pytest.raises(ValueError, match=r"sum to more than 1 .*`token_ids`.* at positions \[1\]"):
            top_k_acceptance_bounds(logprobs, logprobs)
        with pytest.raises(ValueError, match=r"sum to more than 1"):
            top_k_acceptance_bounds(torch.full((1, 2), torch.inf), torch.full((1, 2), -1.0))

    def test_shapes(self):
        with pytest.raises(ValueError, match="same shape"):
            top_k_acceptance_bounds(torch.zeros(2, 3), torch.zeros(2, 4))
        with pytest.raises(ValueError, match="`token_ids` must have the same shape"):
            top_k_acceptance_bounds(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2, 2))
        lower, upper = top_k_acceptance_bounds(torch.empty(0, 20), torch.empty(0, 20))
        assert lower.shape == upper.shape == (0,)


class TestBetaFit:
    @pytest.mark.parametrize("a, b", [(2.0, 0.7), (0.6, 0.4), (5.0, 1.5)])
    def test_recovers_a_scaled_beta_below_the_bound(self, rng, a, b):
        tail = 0.999 * rng.beta(a, b, size=20_000)
        alpha = np.concatenate([tail, np.full(200_000, 0.9999)])
        fit = fit_beta_tail(torch.tensor(alpha))
        assert fit.a == pytest.approx(a, rel=0.05) and fit.b == pytest.approx(b, rel=0.05)
        ordered = np.sort(tail / 0.999)
        cdf = stats.beta.cdf(ordered, fit.a, fit.b)
        ranks = np.arange(len(ordered))
        expected = max((cdf - ranks / len(ordered)).max(), ((ranks + 1) / len(ordered) - cdf).max())
        assert fit.ks_distance == pytest.approx(expected, abs=1e-6)
        assert fit.ks_distance < 0.02

    def test_says_when_it_does_not_fit(self, rng):
        two_lumps = np.concatenate([rng.normal(0.3, 0.01, 500), rng.normal(0.8, 0.01, 500)])
        assert fit_beta_tail(two_lumps).ks_distance > 0.2

    def test_extremes(self):
        assert fit_beta_tail(np.ones(1000)) is None
        assert fit_beta_tail(np.zeros(1000)) is None
        assert fit_beta_tail(np.linspace(0.1, 0.9, 49)) is None
        assert fit_beta_tail(torch.empty(0)) is None
        fit = fit_beta_tail(np.concatenate([np.zeros(30), np.linspace(0, 0.9989, 300)]))
        assert math.isfinite(fit.a + fit.b + fit.ks_distance)


def schedule(**fields) -> SparsityScheduleConfig:
    return SparsityScheduleConfig(**{"top_k_pages": [5], "bin_tokens": 64, **fields})


def tokens(rng, count: int, max_length: int = 400):
    """Skewed rates like those of sparse rollouts: mostly near 1, with a tail."""
    lower = np.where(rng.random(count) < 0.8, 1 - 1e-4 * rng.random(count), rng.beta(3, 0.6, count)).astype(np.float32)
    upper = np.minimum(1, lower + 0.01 * rng.random(count)).astype(np.float32)
    return lower, upper, rng.integers(1, max_length, count)


def expected_metrics(lower, upper, lengths, page_size=16, bin_tokens=64, quantile=0.05, min_tokens=200):
    lower, upper = lower.astype(np.float64), upper.astype(np.float64)
    bins = [math.ceil(length / page_size) // (bin_tokens // page_size) for length in lengths.tolist()]
    metrics = {
        "acceptance/mean": lower.mean(),
        "acceptance/share_below_0.5": (lower < 0.5).mean(),
        "acceptance/bound_gap": (upper - lower).mean(),
    }
    for index in sorted(set(bins)):
        members = lower[np.array(bins) == index]
        if len(members) >= min_tokens:
            metrics[f"acceptance/tail_bin_{index * bin_tokens}"] = np.quantile(members, quantile)
    tails = [value for name, value in metrics.items() if "tail_bin" in name]
    return metrics | ({"acceptance/tail": min(tails)} if tails else {})


def feed(tracker, lower, upper, lengths):
    tracker.update(torch.tensor(lower), torch.tensor(upper), torch.tensor(lengths))


class TestTracker:
    def test_step_metrics_are_exact(self, rng):
        lower, upper, lengths = tokens(rng, 3000)
        tracker = AcceptanceTracker(schedule())
        for part in np.array_split(np.arange(3000), 7):
            feed(tracker, lower[part], upper[part], lengths[part])
        assert tracker.end_step() == pytest.approx(expected_metrics(lower, upper, lengths), abs=1e-9)

    def test_run_metrics_cover_all_steps(self, rng):
        tracker = AcceptanceTracker(schedule(tail_quantile=0.1))
        steps = [tokens(rng, count) for count in (500, 0, 4000, 1500)]
        for step in steps:
            feed(tracker, *step)
            tracker.end_step()
        everything = [np.concatenate(parts) for parts in zip(*steps, strict=True)]
        expected = expected_metrics(*everything, quantile=0.1)
        metrics = tracker.metrics()
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, abs=1 / HISTOGRAM_CELLS if "tail" in name else 1e-9), name

    @pytest.mark.parametrize("count", [1, 2, 3, 20, 21, 1000])
    @pytest.mark.parametrize("quantile", [0.01, 0.05, 0.5, 0.99])
    def test_run_quantile_is_numpys_within_a_cell(self, rng, count, quantile):
        tracker = AcceptanceTracker(schedule(tail_quantile=quantile), min_tokens=1)
        alpha = rng.random(count).astype(np.float32)
        feed(tracker, alpha, alpha, np.ones(count, dtype=int))
        step = tracker.end_step()["acceptance/tail"]
        assert step == pytest.approx(np.quantile(alpha.astype(np.float64), quantile), abs=1e-9)
        assert tracker.metrics()["acceptance/tail"] == pytest.approx(step, abs=1 / HISTOGRAM_CELLS)

    def test_a_dense_rollout_has_tail_one(self):
        tracker = AcceptanceTracker(schedule())
        feed(tracker, np.ones(500, np.float32), np.ones(500, np.float32), np.full(500, 70))
        step = tracker.end_step()
        assert step == tracker.metrics()
        assert step["acceptance/tail"] == step["acceptance/mean"] == step["acceptance/tail_bin_64"] == 1.0
        assert step["acceptance/share_below_0.5"] == step["acceptance/bound_gap"] == 0.0

    @pytest.mark.parametrize("length, start", [(1, 0), (48, 0), (49, 64), (64, 64), (112, 64), (113, 128)])
    def test_bins_are_the_schedules(self, length, start):
        tracker = AcceptanceTracker(schedule(), min_tokens=1)
        feed(tracker, np.float32([0.5]), np.float32([0.5]), np.array([length]))
        assert tracker.end_step()[f"acceptance/tail_bin_{start}"] == 0.5
        assert [entry.start for entry in tracker.bin_statistics()] == [start]

    def test_bins_with_few_tokens_do_not_count_in_the_tail(self, rng):
        tracker = AcceptanceTracker(schedule(), min_tokens=100)
        feed(tracker, np.full(100, 0.9, np.float32), np.full(100, 0.9, np.float32), np.full(100, 10))
        feed(tracker, np.full(99, 0.1, np.float32), np.full(99, 0.1, np.float32), np.full(99, 100))
        metrics = tracker.end_step()
        assert metrics["acceptance/tail"] == pytest.approx(0.9)
        assert "acceptance/tail_bin_64" not in metrics
        assert metrics["acceptance/mean"] == pytest.approx((100 * 0.9 + 99 * 0.1) / 199)
        assert [entry.tokens for entry in tracker.bin_statistics()] == [100, 99]

    def test_empty_steps_give_no_metric(self):
        tracker = AcceptanceTracker(schedule())
        assert tracker.end_step() == tracker.metrics() == {}
        feed(tracker, np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, int))
        assert tracker.end_step() == tracker.metrics() == {}
        assert tracker.bin_statistics() == []
        feed(tracker, np.float32([0.7]), np.float32([0.9]), np.array([3]))
        metrics = tracker.end_step()
        assert set(metrics) == {"acceptance/mean", "acceptance/share_below_0.5", "acceptance/bound_gap"}
        assert all(math.isfinite(value) for value in metrics.values())
        assert tracker.end_step() == {}

    @pytest.mark.parametrize(
        "lower, upper, length, message",
        [
            (math.nan, 1.0, 5, "no bounds"),
            (0.5, math.nan, 5, "no bounds"),
            (-0.1, 1.0, 5, "no bounds"),
            (0.5, 1.1, 5, "no bounds"),
            (0.9, 0.5, 5, "no bounds"),
            (0.5, 0.9, 0, "positive integers"),
            (0.5, 0.9, 5.0, "positive integers"),
        ],
    )
    def test_bad_tokens_are_refused(self, lower, upper, length, message):
        tracker = AcceptanceTracker(schedule())
        with pytest.raises(ValueError, match=message):
            tracker.update(torch.tensor([1.0, lower]), torch.tensor([1.0, upper]), torch.tensor([5, length]))
        with pytest.raises(ValueError, match="same shape"):
            tracker.update(torch.ones(2), torch.ones(2), torch.ones(3, dtype=torch.long))
        assert tracker.end_step() == {}

    @pytest.mark.parametrize("min_tokens", [0, -1, True, 1.5, None])
    def test_min_tokens_is_checked(self, min_tokens):
        with pytest.raises(ValueError, match="min_tokens"):
            AcceptanceTracker(schedule(), min_tokens=min_tokens)

    def test_another_schedule_starts_anew(self, rng):
        tracker = AcceptanceTracker(schedule())
        feed(tracker, *tokens(rng, 1000))
        before = tracker.end_step()
        tracker.set_schedule(schedule())
        assert tracker.metrics().keys() == before.keys()
        tracker.set_schedule(schedule(top_k_pages=[9], bin_tokens=128))
        assert tracker.metrics() == {}
        step = tokens(rng, 1000)
        feed(tracker, *step)
        assert tracker.end_step() == pytest.approx(expected_metrics(*step, bin_tokens=128), abs=1e-9)

    def test_memory_does_not_grow_with_tokens(self, rng):
        tracker = AcceptanceTracker(schedule())
        sizes = []
        for _ in range(3):
            for _ in range(5):
                feed(tracker, *tokens(rng, 2000))
                tracker.end_step()
            arrays = [histogram.counts.nbytes + histogram.sums.nbytes for histogram in tracker._histograms.values()]
            sizes.append((len(arrays), sum(arrays), len(tracker._pending)))
        assert sizes[0] == sizes[1] == sizes[2]

    def test_distribution_and_fit_of_a_bin(self, rng):
        tail = (0.999 * rng.beta(2.0, 0.7, 30_000)).astype(np.float32)
        alpha = np.concatenate([tail, np.ones(70_000, np.float32)])
        tracker = AcceptanceTracker(schedule())
        feed(tracker, alpha, alpha, np.full(len(alpha), 70))
        tracker.end_step()
        rates, shares = tracker.cumulative(64)
        for rate, share in zip(rates[:: HISTOGRAM_CELLS // 10], shares[:: HISTOGRAM_CELLS // 10], strict=True):
            assert share == pytest.approx((alpha < rate).mean() if rate < 1 else 1.0, abs=1e-4)
        exact, fit = fit_beta_tail(alpha), tracker.fit_beta_tail(64)
        assert fit.a == pytest.approx(exact.a, rel=0.02) and fit.b == pytest.approx(exact.b, rel=0.02)
        assert fit.ks_distance == pytest.approx(exact.ks_distance, abs=5e-3)
        assert fit.ks_distance < 0.02

    def test_no_fit_without_a_tail(self):
        tracker = AcceptanceTracker(schedule())
        feed(tracker, np.ones(500, np.float32), np.ones(500, np.float32), np.full(500, 70))
        tracker.end_step()
        assert tracker.fit_beta_tail(64) is None


class TestTrackerState:
    @pytest.fixture
    def tracker(self, rng):
        tracker = AcceptanceTracker(schedule())
        feed(tracker, *tokens(rng, 3000))
        tracker.end_step()
        return tracker

    def test_round_trip_through_json_continues_the_run(self, tracker, rng):
        state = json.loads(json.dumps(tracker.state_dict(), allow_nan=False))
        restored = AcceptanceTracker(schedule())
        restored.load_state_dict(state)
        assert restored.metrics() == tracker.metrics()
        more = tokens(rng, 1000)
        for each in (tracker, restored):
            feed(each, *more)
            each.end_step()
        assert restored.bin_statistics() == tracker.bin_statistics()
        empty = AcceptanceTracker(schedule())
        restored.load_state_dict(empty.state_dict())
        assert restored.metrics() == {}

    @pytest.mark.parametrize("fields", [{"bin_tokens": 128}, {"page_size": 32}])
    def test_other_length_bins_are_refused(self, tracker, fields):
        with pytest.raises(ValueError, match=next(iter(fields))):
            AcceptanceTracker(schedule(**fields)).load_state_dict(tracker.state_dict())

    @pytest.mark.parametrize(
        "damage",
        [
            lambda state: state.pop("bins"),
            lambda state: state.update(more=1),
            lambda state: state.update(histogram_cells=10),
            lambda state: state.update(bins=[1]),
            lambda state: state["bins"].update({"x": state["bins"]["0"]}),
            lambda state: state["bins"].update({"-1": state["bins"]["0"]}),
            lambda state: state["bins"].update({"0": None}),
            lambda state: state["bins"]["0"].pop("sums"),
            lambda state: state["bins"]["0"]["counts"].append(1),
            lambda state: state["bins"]["0"]["counts"].__setitem__(0, 0),
            lambda state: state["bins"]["0"]["counts"].__setitem__(0, -4),
            lambda state: state["bins"]["0"]["counts"].__setitem__(0, 10**30),
            lambda state: state["bins"]["0"]["counts"].__setitem__(0, "many"),
            lambda state: state["bins"]["0"]["cells"].__setitem__(0, HISTOGRAM_CELLS),
            lambda state: state["bins"]["0"]["cells"].__setitem__(0, state["bins"]["0"]["cells"][1]),
            lambda state: state["bins"]["0"]["sums"].__setitem__(0, math.nan),
            lambda state: state["bins"]["0"]["sums"].__setitem__(0, 1e9),
            lambda state: state["bins"]["0"].update(gap_sum=-1.0),
            lambda state: state["bins"]["0"].update(gap_sum=math.nan),
            lambda state: state["bins"].update({"0": {"gap_sum": 0.0, "cells": [], "counts": [], "sums": []}}),
        ],
    )
    def test_a_damaged_state_is_refused_and_changes_nothing(self, tracker, damage):
        before = tracker.state_dict()
        state = json.loads(json.dumps(before))
        damage(state)
        with pytest.raises(ValueError, match="[Aa]cceptance statistics"):
            tracker.load_state_dict(state)
        assert tracker.state_dict() == before

    def test_not_a_dict(self, tracker):
        with pytest.raises(ValueError, match="keys"):
            tracker.load_state_dict([1])


def gather_on_rank(rank: int, world_size: int, port: int, steps, folder: str):
    import os

    from accelerate import Accelerator

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    tracker = AcceptanceTracker(schedule())
    results = []
    for step in steps:
        if len(step[rank][0]):
            feed(tracker, *step[rank])
        results.append(tracker.end_step(accelerator))
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump({"steps": results, "state": tracker.state_dict()}, file)
    torch.distributed.destroy_process_group()


def test_ranks_are_gathered_before_the_quantile(rng, tmp_path):
    import socket

    # Unequal counts, a rank without tokens, and a step without any.
    steps = [[tokens(rng, count) for count in counts] for counts in ((700, 1900), (0, 800), (0, 0))]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(gather_on_rank, args=(2, port, steps, str(tmp_path)), nprocs=2)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert results[0] == results[1]
    for step, metrics in zip(steps, results[0]["steps"], strict=True):
        everything = [np.concatenate(parts) for parts in zip(*step, strict=True)]
        expected = expected_metrics(*everything) if len(everything[0]) else {}
        assert metrics == pytest.approx(expected, abs=1e-9)

    alone = AcceptanceTracker(schedule())
    for step in steps:
        for part in step:
            feed(alone, *part)
        alone.end_step()
    merged = AcceptanceTracker(schedule())
    merged.load_state_dict(results[0]["state"])
    assert merged.metrics() == pytest.approx(alone.metrics(), abs=1e-12)
