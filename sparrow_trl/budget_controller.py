"""Budgets that follow the tail acceptance measured during training: raised below the target, lowered well above it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from .schedule import SparsityScheduleConfig


# One minus the tail falls about as a power of the pages kept (0.65 between 12 and 64 pages for SmolLM2-135M at 4K).
# Only the size of a change follows from it; what is reached is measured.
TAIL_EXPONENT = 0.65

# Where tokens are either untouched or broken, the tail says nothing until it falls all at once. What grows before is
# the share of broken ones: with the third to fourth power of the pages for the tiny reasoner, from 15 to 10 pages. A
# budget is lowered only as far as the share of tokens clearly below the target then stays below this part of the
# quantile.
SHARE_EXPONENT = 4
SHARE_LIMIT = 0.9

# Standard normal quantile: bounds of a tail hold with 95% each.
CONFIDENCE = 1.645

# Bins with a budget of their own; longer contexts share the last one's.
MAX_BINS = 256

# Most tokens that a bin is judged by, as a multiple of the fewest: older ones are of another policy.
WINDOW = 4


@dataclass(frozen=True)
class _TailMeasurement:
    # Of a bin's latest tokens: the tail with its bounds, and an upper bound of the share clearly below the target.
    tail: float
    low: float
    high: float
    share: float
    tokens: int


@dataclass(frozen=True)
class BudgetChange:
    """
    A changed budget of one bin of cached length.

    Args:
        start (`int`):
            Start of the bin, in tokens.
        before (`int`):
            Pages kept before, reserved ones included.
        after (`int`):
            Pages kept from now on.
        tail (`float`, *optional*):
            Tail acceptance that was measured; `None` where the bin follows a shorter one.
        tokens (`int`):
            Tokens behind it.
        reason (`str`):
            Why, in words.
    """

    start: int
    before: int
    after: int
    tail: float | None
    tokens: int
    reason: str

    def __str__(self):
        return f"{self.before} -> {self.after} pages from {self.start:,} cached tokens ({self.reason})"


class BudgetController:
    """
    Holds the tail acceptance of every bin of cached length at a target, by closed-loop control of its budget.

    A bin is judged by its latest tokens since its budget last changed. It is raised when their tail is below the
    target with 95% confidence, or, with `min_tokens` tokens, more than `headroom` below it. It may be lowered when,
    with as many tokens, the tail is above the target with that confidence and by more than `headroom`. By how much, in
    whole pages, follows from the distance, within a factor of `max_change`, and for a lower budget from the share of
    tokens that are clearly below the target. Longer bins keep no fewer pages than shorter ones, as in calibrated
    schedules; but shorter ones that have had fewer than `min_tokens` tokens in all, such as those of contexts shorter
    than any prompt, keep no more than longer ones. Tokens of one completion are alike, so the confidence is less than
    its name. What a bin was judged by is no part of a checkpoint.

    Args:
        schedule ([`SparsityScheduleConfig`]):
            Schedule to begin with. With tables per layer, all of a bin's budgets change by the same factor.
        max_tokens (`int`):
            Longest context; bins up to it get budgets of their own.
        target (`float`):
            Tail acceptance to hold.
        headroom (`float`, *optional*, defaults to `0.01`):
            How far from the target a tail may be without a change.
        min_tokens (`int`, *optional*, defaults to `1000`):
            Tokens that a bin is judged by, at least; at most four times as many.
        max_change (`float`, *optional*, defaults to `1.5`):
            Largest factor of one change.
        floor ([`SparsityScheduleConfig`], *optional*):
            No context gets fewer tokens than here.

    Example:

    ```python
    >>> controller = BudgetController(schedule, max_tokens=16384, target=0.86)
    >>> controller.update({0: rates_of_the_first_bin})
    [BudgetChange(start=0, before=64, after=96, tail=0.81, tokens=1400, ...), ...]
    >>> controller.schedule.top_k_pages
    [93, 93, ...]
    ```
    """

    def __init__(
        self,
        schedule: SparsityScheduleConfig,
        max_tokens: int,
        *,
        target: float,
        headroom: float = 0.01,
        min_tokens: int = 1000,
        max_change: float = 1.5,
        floor: SparsityScheduleConfig | None = None,
    ):
        if not 0 < target < 1:
            raise ValueError(f"The target of a tail acceptance must be between 0 and 1, both excluded, got {target}.")
        self.target = target
        self.headroom = min(headroom, (1 - target) / 2)
        self.min_tokens = min_tokens
        self.max_change = max_change
        self.max_tokens = max_tokens
        self.floor = floor
        self.set_schedule(schedule)

    def set_schedule(self, schedule: SparsityScheduleConfig) -> None:
        """Go on from `schedule` ([`SparsityScheduleConfig`]); what was measured under another one is forgotten."""
        self._schedule = schedule
        self._reserved = schedule.sink_pages + schedule.recent_pages
        num_bins = min(schedule.bin_index(self.max_tokens) + 1, MAX_BINS)
        # Pages of the longest context of each bin: keeping more means nothing, but reserved ones are always kept.
        last = np.array([_last_length(schedule, index, self.max_tokens) for index in range(num_bins)])
        self._most = np.maximum(-(-last // schedule.page_size), self._reserved)
        least = np.full(num_bins, self._reserved)
        if self.floor is not None:
            budgets = np.array([self.floor.budget(length) for length in last.tolist()])
            least = np.maximum(least, -(-budgets // schedule.page_size))
        self._least = np.minimum(least, self._most)
        tables = {None: schedule.top_k_pages, **(schedule.layer_top_k_pages or {})}
        self._pages = {
            key: np.clip(np.array(_extended(table, num_bins)) + self._reserved, self._least, self._most)
            for key, table in tables.items()
        }
        self._windows = {index: [] for index in range(num_bins)}
        self._num_tokens = dict.fromkeys(self._windows, 0)

    @property
    def schedule(self) -> SparsityScheduleConfig:
        """[`SparsityScheduleConfig`]: The schedule with the budgets as they are now."""
        tables = {key: (pages - self._reserved).tolist() for key, pages in self._pages.items()}
        base = tables.pop(None)
        return replace(self._schedule, top_k_pages=base, layer_top_k_pages=tables or None)

    def update(self, rates: Mapping[int, np.ndarray]) -> list[BudgetChange]:
        """
        Take the acceptance rates of a step into account.

        Args:
            rates (`Mapping[int, numpy.ndarray]`):
                Acceptance rates by the index of the bin.

        Returns:
            `list[BudgetChange]`: what changed in the base table, shortest bin first.
        """
        for index, values in rates.items():
            index = min(index, len(self._windows) - 1)
            self._windows[index].append(np.asarray(values, dtype=float))
            self._num_tokens[index] += len(values)
        factors, reasons = {}, {}
        for index in self._windows:
            measured = self._tail(index)
            if measured is not None and (factor := self._factor(measured)) != 1:
                factors[index], reasons[index] = factor, measured
                if factor > 1:
                    self._num_tokens[index] = max(self._num_tokens[index], self.min_tokens)
        return self._change(factors, reasons)

    def raise_all(self, factor: float, reason: str) -> list[BudgetChange]:
        """Multiply all budgets by `factor` (`float`) for a `reason` (`str`), and forget what was measured."""
        return self._change(dict.fromkeys(self._windows, factor), {}, reason)

    def _tail(self, index: int) -> _TailMeasurement | None:
        window = self._windows[index]
        total = sum(map(len, window))
        while window and total - len(window[0]) >= WINDOW * self.min_tokens:
            total -= len(window.pop(0))
        if not total:
            return None
        rates, q = np.sort(np.concatenate(window)), self._schedule.tail_quantile
        spread = CONFIDENCE * math.sqrt(total * q * (1 - q))
        low, high = math.floor(total * q - spread), math.ceil(total * q + spread)
        if low < 0 or high >= total:
            return None
        below = int(np.searchsorted(rates, self.target - 2 * self.headroom))
        share = (below + CONFIDENCE * math.sqrt(below) + 1) / total
        return _TailMeasurement(float(np.quantile(rates, q)), float(rates[low]), float(rates[high]), share, total)

    def _factor(self, measured: _TailMeasurement) -> float:
        tail, enough = measured.tail, measured.tokens >= self.min_tokens
        aim = self.target + self.headroom / 2
        factor = (max(1 - tail, 1e-9) / (1 - aim)) ** (1 / TAIL_EXPONENT)
        if measured.high < self.target or (enough and tail < self.target - self.headroom):
            # Just off 1 where the distance is small, so that at least one page changes.
            return float(np.clip(factor, 1 + 1e-9, self.max_change))
        if enough and measured.low > self.target and tail > self.target + self.headroom:
            allowed = measured.share / (SHARE_LIMIT * self._schedule.tail_quantile)
            return float(np.clip(max(factor, allowed ** (1 / SHARE_EXPONENT)), 1 / self.max_change, 1))
        return 1

    def _change(self, factors, measured, reason: str | None = None) -> list[BudgetChange]:
        before = {key: pages.copy() for key, pages in self._pages.items()}
        for key, pages in self._pages.items():
            for index, factor in factors.items():
                pages[index] = math.ceil(pages[index] * factor)
            for index in reversed(range(len(pages) - 1)):
                # Or what is never measured, or hardly, would hold up all longer contexts.
                if self._num_tokens[index] < self.min_tokens:
                    pages[index] = min(pages[index], pages[index + 1])
            self._pages[key] = np.minimum(np.maximum(np.maximum.accumulate(pages), self._least), self._most)
        changes = []
        for index, window in self._windows.items():
            if all(self._pages[key][index] == pages[index] for key, pages in before.items()):
                continue
            window.clear()
            tail = tokens = None
            bound, neighbor = ("no more", index + 1) if self._lowered(before, index) else ("no fewer", index - 1)
            text = reason or f"{bound} than from {max(neighbor, 0) * self._schedule.bin_tokens:,} on"
            if index in measured:
                tail, tokens = measured[index].tail, measured[index].tokens
                side = "below" if tail < self.target else "above"
                text = f"tail {tail:.3f} of {tokens:,} tokens, {side} {self.target:.3f}"
            start = index * self._schedule.bin_tokens
            pages = int(before[None][index]), int(self._pages[None][index])
            changes.append(BudgetChange(start, *pages, tail, tokens or 0, text))
        return changes

    def _lowered(self, before: dict, index: int) -> bool:
        return any(self._pages[key][index] < pages[index] for key, pages in before.items())


def _extended(table: list[int], num_bins: int) -> list[int]:
    return [table[min(index, len(table) - 1)] for index in range(num_bins)]


def _last_length(schedule: SparsityScheduleConfig, index: int, max_tokens: int) -> int:
    """Longest context of a bin; the last bin that has a budget of its own stands for all longer ones."""
    last = max_tokens if index == MAX_BINS - 1 else schedule.bin_lengths(index)[1]
    return max(1, min(last, max_tokens))
