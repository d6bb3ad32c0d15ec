"""
Per-token acceptance rate of sparse rollouts and its tail (section 3.1 of the
[Sparrow paper](https://huggingface.co/papers/2606.08446)).

With `p` the dense policy's distribution of the next token and `q` the sparse sampler's, the acceptance rate of a token
is `alpha = sum over v of min(p(v), q(v))`. Most tokens have `alpha` above 0.999 whatever the sparsity, so that the
mean says little; the *tail acceptance* is a low quantile (the 5th percentile) of `alpha` in a bin of cached length.

The functions here take tensors and know nothing of trainers or engines. A completion's first token is sampled from the
dense prefill, where `p` and `q` are the same: whoever collects the tokens leaves it out.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from .schedule import SparsityScheduleConfig


if TYPE_CHECKING:
    from accelerate import Accelerator


# A tail token is one below this acceptance rate; the paper's Beta fit covers [0, 0.999].
TAIL_BOUND = 0.999
MIN_BETA_FIT_TOKENS = 50
# Rates that stand for the tokens of a distribution in a fit, whose time grows with their number.
MAX_FIT_TOKENS = 10_000
# Cells of the run-level histogram: 0.5 and 0.999 fall on edges, and a quantile is known to 5e-4.
HISTOGRAM_CELLS = 2000
# Float32 rounding of probabilities that sum to 1 stays far below; a repeated token id of any weight does not.
PROBABILITY_TOLERANCE = 1e-2


@torch.no_grad()
def acceptance_rate(dense_logits: torch.Tensor, sparse_logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """
    Exact acceptance rate of each position.

    Args:
        dense_logits (`torch.Tensor`):
            Logits `[..., vocab]` of the dense policy. `-inf` is allowed.
        sparse_logits (`torch.Tensor`):
            Logits `[..., vocab]` of the sparse sampler.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.

    Returns:
        `torch.Tensor`: `alpha` in [0, 1], `[...]`, float32 (float64 for float64 logits).

    Raises:
        ValueError: when the shapes differ, or a position has no distribution (NaN, `+inf`, or nothing but `-inf`).
    """
    _check_same_shape(dense_logits=dense_logits, sparse_logits=sparse_logits)
    _check_temperature(temperature)
    dense, sparse = (
        (logits if temperature == 1 else logits / temperature).softmax(-1)
        for logits in (_upcast(dense_logits), _upcast(sparse_logits))
    )
    rates = torch.minimum(dense, sparse).sum(-1)
    if rates.isnan().any():
        for name, probabilities in (("dense_logits", dense), ("sparse_logits", sparse)):
            _refuse(probabilities.isnan().any(-1), f"`{name}` give no distribution (NaN or infinite logits)")
    return rates.clamp(max=1)


@torch.no_grad()
def acceptance_rate_from_hidden_states(
    dense_hidden_states: torch.Tensor,
    sparse_hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    chunk_size: int = 256,
) -> torch.Tensor:
    """
    [`acceptance_rate`] from the hidden states before the LM head, a chunk of positions at a time, so that no logits of
    the whole sequence exist.

    Args:
        dense_hidden_states (`torch.Tensor`):
            Last hidden states `[..., hidden]` of the dense forward, after the final norm.
        sparse_hidden_states (`torch.Tensor`):
            The same of the sparse forward.
        lm_head_weight (`torch.Tensor`):
            `[vocab, hidden]`.
        bias (`torch.Tensor`, *optional*):
            `[vocab]`.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.
        logit_scale (`float`, *optional*, defaults to `1.0`):
            Factor that the model applies to its logits.
        final_logit_softcapping (`float`, *optional*):
            Bound `c` of models that map their logits to `c * tanh(logits / c)`.
        chunk_size (`int`, *optional*, defaults to `256`):
            Positions whose logits are held at once, for both sides.

    Returns:
        `torch.Tensor`: `alpha` `[...]`.
    """
    _check_same_shape(dense_hidden_states=dense_hidden_states, sparse_hidden_states=sparse_hidden_states)
    head = (lm_head_weight, bias, logit_scale, final_logit_softcapping)
    chunks = zip(*(_chunks(states, chunk_size) for states in (dense_hidden_states, sparse_hidden_states)), strict=True)
    alpha = [acceptance_rate(_logits(dense, *head), _logits(sparse, *head), temperature) for dense, sparse in chunks]
    return torch.cat(alpha).view(dense_hidden_states.shape[:-1])


@torch.no_grad()
def gather_dense_logprobs(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float = 1.0,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    chunk_size: int = 256,
) -> torch.Tensor:
    """
    Log-probabilities of given tokens under the dense policy, from the hidden states before the LM head, a chunk of
    positions at a time.

    The projection runs in the head's own dtype, as in the model, and the log-sum-exp in float32.

    Args:
        hidden_states (`torch.Tensor`):
            Last hidden states `[positions, hidden]`, after the final norm. Row `t` predicts the tokens of row `t` of
            `token_ids`.
        lm_head_weight (`torch.Tensor`):
            `[vocab, hidden]`.
        token_ids (`torch.Tensor`):
            Integer ids `[positions, k]`.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature.
        bias (`torch.Tensor`, *optional*):
            `[vocab]`.
        logit_scale (`float`, *optional*, defaults to `1.0`):
            Factor that the model applies to its logits.
        final_logit_softcapping (`float`, *optional*):
            Bound `c` of models that map their logits to `c * tanh(logits / c)`.
        chunk_size (`int`, *optional*, defaults to `256`):
            Positions whose logits are held at once.

    Returns:
        `torch.Tensor`: log-probabilities `[positions, k]`, float32 (float64 for a float64 head).
    """
    _check_temperature(temperature)
    if hidden_states.dim() != 2 or token_ids.dim() != 2 or len(hidden_states) != len(token_ids):
        raise ValueError(
            "`hidden_states` must be [positions, hidden] and `token_ids` [positions, k], got "
            f"{tuple(hidden_states.shape)} and {tuple(token_ids.shape)}."
        )
    vocab_size = lm_head_weight.size(0)
    # Out of range, the gather would end a CUDA process with an assertion that names nothing.
    _refuse(((token_ids < 0) | (token_ids >= vocab_size)).any(-1), f"`token_ids` are outside [0, {vocab_size})")
    logprobs = []
    for states, ids in zip(_chunks(hidden_states, chunk_size), _chunks(token_ids, chunk_size), strict=True):
        logits = _logits(states, lm_head_weight, bias, logit_scale, final_logit_softcapping) / temperature
        logprobs.append(logits.gather(-1, ids.long()) - logits.logsumexp(-1, keepdim=True))
    return torch.cat(logprobs)


@torch.no_grad()
def top_k_acceptance_bounds(
    dense_logprobs: torch.Tensor, sparse_logprobs: torch.Tensor, token_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Bounds on the acceptance rate from the log-probabilities of a few tokens, such as the sampler's top K.

    `lower` sums `min(p, q)` over the given tokens; the others add at most the smaller of the two remaining masses,
    which gives `upper`.

    Args:
        dense_logprobs (`torch.Tensor`):
            Dense log-probabilities `[..., k]`. `-inf` contributes 0, so it may pad a row.
        sparse_logprobs (`torch.Tensor`):
            The sampler's, `[..., k]`, of the same tokens.
        token_ids (`torch.Tensor`, *optional*):
            The tokens `[..., k]`. When given, a token that a row repeats counts once; vLLM's flat log-probs list the
            sampled token first and again among the top K.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `lower` and `upper`, each `[...]` in [0, 1].

    Raises:
        ValueError: when the shapes differ, a log-probability is NaN, or a row's probabilities sum to more than 1. The
            message names the positions.
    """
    _check_same_shape(dense_logprobs=dense_logprobs, sparse_logprobs=sparse_logprobs)
    if token_ids is not None:
        _check_same_shape(sparse_logprobs=sparse_logprobs, token_ids=token_ids)
    probabilities = []
    for name, logprobs in (("dense_logprobs", dense_logprobs), ("sparse_logprobs", sparse_logprobs)):
        _refuse(logprobs.isnan().any(-1), f"`{name}` are NaN, so the kernel that computed them is broken,")
        values = _upcast(logprobs).exp()
        if token_ids is not None:
            values = values.masked_fill(_repeated(token_ids), 0)
        _refuse(
            values.sum(-1) > 1 + PROBABILITY_TOLERANCE,
            f"`{name}` hold probabilities that sum to more than 1 (pass `token_ids` when a row repeats a token)",
        )
        probabilities.append(values)
    dense, sparse = probabilities
    lower = torch.minimum(dense, sparse).sum(-1).clamp(max=1)
    remaining = torch.minimum(1 - dense.sum(-1), 1 - sparse.sum(-1)).clamp(min=0)
    return lower, (lower + remaining).clamp(max=1)


@dataclass(frozen=True)
class BetaTailFit:
    """
    A Beta distribution scaled to [0, 0.999] that models the acceptance rates below 0.999 (paper, figure 3).

    Args:
        a (`float`):
            First shape parameter.
        b (`float`):
            Second shape parameter.
        ks_distance (`float`):
            Kolmogorov-Smirnov distance between the fit and the tokens. The paper reports less than 0.04.
    """

    a: float
    b: float
    ks_distance: float


def fit_beta_tail(alpha: "torch.Tensor | np.ndarray") -> BetaTailFit | None:
    """
    Maximum-likelihood Beta fit of the acceptance rates below 0.999.

    Args:
        alpha (`torch.Tensor` or `numpy.ndarray`):
            Acceptance rates, of any shape.

    Returns:
        [`BetaTailFit`], or `None` when fewer than 50 tokens are below 0.999 or no Beta distribution fits them, as when
        all are equal.
    """
    from scipy import stats

    alpha = np.asarray(alpha, dtype=np.float64).ravel()
    tail = alpha[alpha < TAIL_BOUND] / TAIL_BOUND
    if len(tail) < MIN_BETA_FIT_TOKENS or np.ptp(tail) == 0:
        return None
    # The likelihood needs the open interval; one float32 step of a probability is closer to 0 than any measured rate.
    tail = tail.clip(np.finfo(np.float32).eps, 1 - np.finfo(np.float32).eps)
    try:
        a, b, _, _ = stats.beta.fit(tail, floc=0, fscale=1)
    except stats.FitError:
        return None
    return BetaTailFit(float(a), float(b), float(stats.ks_1samp(tail, stats.beta(a, b).cdf).statistic))


def tail_sample(rates: np.ndarray, shares: np.ndarray, tokens: int) -> np.ndarray:
    """
    Acceptance rates below 0.999 that stand for the tokens of a distribution.

    Args:
        rates (`numpy.ndarray`):
            Rates from 0 to 1 `[points]`.
        shares (`numpy.ndarray`):
            Share of the tokens below each of them.
        tokens (`int`):
            Number of tokens.

    Returns:
        `numpy.ndarray`: one rate per token below 0.999, at most 10,000, evenly spaced over their ranks.
    """
    below = float(np.interp(TAIL_BOUND, rates, shares))
    size = min(round(below * tokens), MAX_FIT_TOKENS)
    return np.interp((np.arange(size) + 0.5) / max(size, 1) * below, shares, rates)


@dataclass(frozen=True)
class BinStatistics:
    """
    Acceptance of the tokens in one bin of cached length.

    Args:
        start (`int`):
            Start of the bin in tokens, a multiple of the schedule's `bin_tokens`. Lengths are rounded up to whole
            pages, so the lowest length in the bin is `start - page_size + 1`.
        tokens (`int`):
            Number of tokens.
        mean (`float`):
            Mean acceptance rate (lower bound).
        tail (`float`):
            Tail acceptance: the schedule's `tail_quantile` of the lower bound.
        share_below_half (`float`):
            Share of tokens whose lower bound is below 0.5.
        bound_gap (`float`):
            Mean distance from the lower to the upper bound.
    """

    start: int
    tokens: int
    mean: float
    tail: float
    share_below_half: float
    bound_gap: float


class AcceptanceTracker:
    """
    Collects acceptance rates per bin of cached length: exactly within a training step, and in histograms of constant
    size over a run.

    Call [`update`] for each batch of probed tokens, and [`end_step`] once per step on every process.

    Args:
        schedule ([`SparsityScheduleConfig`]):
            Gives the length bins and the tail quantile.
        min_tokens (`int`, *optional*, defaults to `200`):
            Tokens that a bin needs before its tail is reported; the 5th percentile of fewer is mostly noise.

    Attributes:
        step_rates (`dict[int, numpy.ndarray]`): Rates (lower bounds) of the last step that ended, by index of the bin.
        step_upper_rates (`dict[int, numpy.ndarray]`): Their upper bounds.

    Example:

    ```python
    >>> tracker = AcceptanceTracker(schedule)
    >>> lower, upper = top_k_acceptance_bounds(dense_logprobs, sparse_logprobs, token_ids)
    >>> tracker.update(lower, upper, cached_lengths)
    >>> tracker.end_step(accelerator)
    {'acceptance/mean': 0.981, 'acceptance/tail': 0.872, 'acceptance/tail_bin_0': 0.872, ...}
    ```
    """

    def __init__(self, schedule: SparsityScheduleConfig, min_tokens: int = 200):
        if isinstance(min_tokens, bool) or not isinstance(min_tokens, int) or min_tokens < 1:
            raise ValueError(f"`min_tokens` must be a positive integer, got {min_tokens!r}.")
        self.schedule = schedule
        self.min_tokens = min_tokens
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._pending: list[torch.Tensor] = []
        self._histograms: dict[int, _Histogram] = {}
        self.step_rates: dict[int, np.ndarray] = {}
        self.step_upper_rates: dict[int, np.ndarray] = {}

    def set_schedule(self, schedule: SparsityScheduleConfig) -> None:
        """
        Go on under another `schedule` ([`SparsityScheduleConfig`]). What was measured before is dropped where its bins
        are others.
        """
        if (schedule.page_size, schedule.bin_tokens) != (self.schedule.page_size, self.schedule.bin_tokens):
            self.reset()
        self.schedule = schedule

    def update(self, lower: torch.Tensor, upper: torch.Tensor, cached_lengths: torch.Tensor) -> None:
        """
        Add probed tokens to the current step.

        Args:
            lower (`torch.Tensor`):
                Lower bounds of the acceptance rate, of any shape (the rate itself when it is exact).
            upper (`torch.Tensor`):
                Upper bounds, of the same shape.
            cached_lengths (`torch.Tensor`):
                Cached tokens at each query, its own included: integers of the same shape. The query that samples token
                `t` (from 0) of a completion has `prompt_length + t` cached tokens; `t = 0` is the dense prefill's and
                is left out.

        Raises:
            ValueError: when the shapes differ, a bound is NaN or outside [0, 1], `upper` is below `lower`, or a length
                is not a positive integer.
        """
        _check_same_shape(lower=lower, upper=upper, cached_lengths=cached_lengths)
        if cached_lengths.is_floating_point() or (cached_lengths < 1).any():
            raise ValueError("`cached_lengths` must be positive integers.")
        lower, upper = (bound.detach().to("cpu", torch.float32).ravel() for bound in (lower, upper))
        # A NaN compares false.
        valid = (lower >= 0) & (lower <= upper + 1e-4) & (upper <= 1 + 1e-4)
        _refuse(~valid, "`lower` and `upper` are no bounds of an acceptance rate (NaN, outside [0, 1] or crossed)")
        bins = self.schedule.bin_index(cached_lengths.detach().to("cpu").ravel())
        self._pending.append(torch.stack([lower.clamp(max=1), upper, bins.to(torch.float32)], dim=1))

    def end_step(self, accelerator: "Accelerator | None" = None) -> dict[str, float]:
        """
        Close the current step: gather its tokens over the processes, add them to the run's statistics, and compute the
        step's metrics exactly.

        Every process must call this, with or without tokens, and every process gets the same result.

        Args:
            accelerator ([`~accelerate.Accelerator`], *optional*):
                Gathers over processes. `None` keeps to this process.

        Returns:
            `dict[str, float]`: as from [`metrics`], for this step only.
        """
        tokens = torch.cat([torch.empty(0, 3), *self._pending])
        self._pending = []
        if accelerator is not None and accelerator.num_processes > 1:
            # The padding row keeps a process without tokens from gathering an empty tensor.
            tokens = torch.cat([tokens, torch.full((1, 3), -1.0)]).to(accelerator.device)
            tokens = accelerator.gather(accelerator.pad_across_processes(tokens, dim=0, pad_index=-1)).cpu()
            tokens = tokens[tokens[:, 2] >= 0]
        lower, upper, bins = tokens.double().numpy().T
        statistics = []
        self.step_rates, self.step_upper_rates = {}, {}
        for index in np.unique(bins).astype(int).tolist():
            selected = bins == index
            alpha, gap = lower[selected], (upper - lower)[selected].clip(min=0)
            self.step_rates[index], self.step_upper_rates[index] = alpha, alpha + gap
            self._histograms.setdefault(index, _Histogram()).add(alpha, gap)
            statistics.append(
                BinStatistics(
                    start=index * self.schedule.bin_tokens,
                    tokens=len(alpha),
                    mean=float(alpha.mean()),
                    tail=float(np.quantile(alpha, self.schedule.tail_quantile)),
                    share_below_half=float((alpha < 0.5).mean()),
                    bound_gap=float(gap.mean()),
                )
            )
        return self._metrics(statistics)

    def bin_statistics(self) -> list[BinStatistics]:
        """Statistics of every step so far per bin of cached length, shortest first. The tail is known to 5e-4."""
        return [
            BinStatistics(
                start=index * self.schedule.bin_tokens,
                tokens=histogram.tokens,
                mean=float(histogram.sums.sum()) / histogram.tokens,
                tail=histogram.quantile(self.schedule.tail_quantile),
                share_below_half=int(histogram.counts[: HISTOGRAM_CELLS // 2].sum()) / histogram.tokens,
                bound_gap=histogram.gap_sum / histogram.tokens,
            )
            for index, histogram in sorted(self._histograms.items())
        ]

    def metrics(self) -> dict[str, float]:
        """
        Metrics over every step so far.

        Returns:
            `dict[str, float]`: `acceptance/mean`, `acceptance/share_below_0.5` and `acceptance/bound_gap` over all
            tokens, `acceptance/tail_bin_<start>` of each bin with at least `min_tokens` tokens, and `acceptance/tail`,
            their minimum. What has no tokens behind it is left out, so that no value is ever NaN.
        """
        return self._metrics(self.bin_statistics())

    def cumulative(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Distribution of the acceptance rate in the bin that starts at `start` (`int`, tokens), over every step so far.

        Returns:
            `tuple[numpy.ndarray, numpy.ndarray]`: rates from 0 to 1, and the share of tokens below each.
        """
        histogram = self._histograms[start // self.schedule.bin_tokens]
        return _edges(), np.concatenate([[0], histogram.counts.cumsum()]) / histogram.tokens

    def fit_beta_tail(self, start: int) -> BetaTailFit | None:
        """[`fit_beta_tail`] of the bin that starts at `start` (`int`, tokens), over every step so far."""
        tokens = self._histograms[start // self.schedule.bin_tokens].tokens
        return fit_beta_tail(tail_sample(*self.cumulative(start), tokens))

    def state_dict(self) -> dict[str, Any]:
        """The run's statistics as JSON values. Tokens of a step that has not ended are not part of them."""
        return {
            "page_size": self.schedule.page_size,
            "bin_tokens": self.schedule.bin_tokens,
            "histogram_cells": HISTOGRAM_CELLS,
            "bins": {str(index): histogram.state_dict() for index, histogram in sorted(self._histograms.items())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Continue from what [`state_dict`] returned.

        Raises:
            ValueError: when `state` is of another form, or was made with other length bins. Nothing has changed then.
        """
        expected = self.state_dict() | {"bins": None}
        if not isinstance(state, dict) or state.keys() != expected.keys():
            raise ValueError(f"Acceptance statistics must have the keys {list(expected)}.")
        for key, value in expected.items():
            if key != "bins" and state[key] != value:
                raise ValueError(f"The acceptance statistics were made with `{key}` {state[key]!r}, not {value}.")
        try:
            histograms = {int(index): _Histogram.from_state(entry) for index, entry in state["bins"].items()}
            if min(histograms, default=0) < 0:
                raise ValueError("a length bin is negative")
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"The acceptance statistics are damaged: {type(error).__name__}: {error}") from error
        self._histograms = histograms
        self._pending = []

    def _metrics(self, bins: Iterable[BinStatistics]) -> dict[str, float]:
        bins = list(bins)
        total = sum(entry.tokens for entry in bins)
        if not total:
            return {}
        metrics = {
            f"acceptance/{name}": sum(getattr(entry, field) * entry.tokens for entry in bins) / total
            for name, field in (
                ("mean", "mean"),
                ("share_below_0.5", "share_below_half"),
                ("bound_gap", "bound_gap"),
            )
        }
        tails = {f"acceptance/tail_bin_{entry.start}": entry.tail for entry in bins if entry.tokens >= self.min_tokens}
        if tails:
            metrics["acceptance/tail"] = min(tails.values())
        return metrics | tails


class _Histogram:
    """Counts and sums of the acceptance rate over cells of equal width, and the sum of the bound gaps."""

    def __init__(self):
        self.counts = np.zeros(HISTOGRAM_CELLS, dtype=np.int64)
        # With a sum per cell the mean is exact, and so is a quantile among equal values (a dense rollout's ones).
        self.sums = np.zeros(HISTOGRAM_CELLS)
        self.gap_sum = 0.0

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def add(self, alpha: np.ndarray, gap: np.ndarray) -> None:
        cells = (alpha * HISTOGRAM_CELLS).astype(np.int64).clip(max=HISTOGRAM_CELLS - 1)
        self.counts += np.bincount(cells, minlength=HISTOGRAM_CELLS)
        self.sums += np.bincount(cells, weights=alpha, minlength=HISTOGRAM_CELLS)
        self.gap_sum += float(gap.sum())

    def quantile(self, q: float) -> float:
        """
        Linear interpolation between order statistics, as `numpy.quantile` does. The values of a cell are taken as
        spread evenly and as widely around their mean as the cell allows.
        """
        position = q * (self.tokens - 1)
        ranks = np.array([math.floor(position), math.ceil(position)])
        cumulative = self.counts.cumsum()
        cells = np.searchsorted(cumulative, ranks, side="right")
        counts = self.counts[cells]
        means = self.sums[cells] / counts
        spread = 2 * np.minimum(means - cells / HISTOGRAM_CELLS, (cells + 1) / HISTOGRAM_CELLS - means).clip(min=0)
        low, high = means + ((ranks - cumulative[cells] + counts + 0.5) / counts - 0.5) * spread
        return float(low + (position - ranks[0]) * (high - low))

    def state_dict(self) -> dict[str, Any]:
        cells = self.counts.nonzero()[0].tolist()
        return {
            "gap_sum": self.gap_sum,
            "cells": cells,
            "counts": self.counts[cells].tolist(),
            "sums": self.sums[cells].tolist(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "_Histogram":
        cells, counts = (np.array(state[key], dtype=np.int64) for key in ("cells", "counts"))
        sums = np.array(state["sums"], dtype=np.float64)
        gap_sum = float(state["gap_sum"])
        if not (cells.ndim == 1 and cells.shape == counts.shape == sums.shape and len(np.unique(cells)) == len(cells)):
            raise ValueError("the cells, counts and sums do not belong together")
        if not (len(cells) and cells.min() >= 0 and cells.max() < HISTOGRAM_CELLS and counts.min() > 0):
            raise ValueError("a cell or a count is out of range")
        if (
            not (np.abs(sums / counts * HISTOGRAM_CELLS - cells - 0.5) < 0.501).all()
            or not 0 <= gap_sum <= counts.sum()
        ):
            raise ValueError("a sum does not fit its count")
        histogram = cls()
        histogram.counts[cells] = counts
        histogram.sums[cells] = sums
        histogram.gap_sum = gap_sum
        return histogram


def _edges() -> np.ndarray:
    return np.linspace(0, 1, HISTOGRAM_CELLS + 1)


def _upcast(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _logits(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    bias: torch.Tensor | None,
    logit_scale: float,
    final_logit_softcapping: float | None,
) -> torch.Tensor:
    logits = _upcast(F.linear(hidden_states.to(lm_head_weight.dtype), lm_head_weight, bias)) * logit_scale
    if final_logit_softcapping is not None:
        logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
    return logits


def _chunks(values: torch.Tensor, chunk_size: int) -> tuple[torch.Tensor, ...]:
    """Rows of the last dimension, `chunk_size` at a time; one empty chunk when there are none."""
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be positive, got {chunk_size}.")
    return values.reshape(-1, values.size(-1)).split(chunk_size)


def _repeated(token_ids: torch.Tensor) -> torch.Tensor:
    """Marks the entries of a row whose id occurs earlier in the row."""
    ordered, order = token_ids.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(token_ids, dtype=torch.bool)
    return repeated.scatter(-1, order[..., 1:], ordered[..., 1:] == ordered[..., :-1])


def _check_same_shape(**tensors: torch.Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{' and '.join(f'`{name}`' for name in shapes)} must have the same shape, got {shapes}.")


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"`temperature` must be positive, got {temperature}.")


def _refuse(bad: torch.Tensor, what: str) -> None:
    """Raise a `ValueError` that says `what` at which positions are marked `bad`, if any is."""
    if bad.any():
        positions = bad.nonzero().squeeze(-1).tolist()
        more = f" and {len(positions) - 10} more" if len(positions) > 10 else ""
        raise ValueError(f"{what} at positions {positions[:10]}{more}.")
