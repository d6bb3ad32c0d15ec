"""
The cheapest sparsity schedule that holds a tail acceptance, from measured tails (section 3.2 of the
[Sparrow paper](https://huggingface.co/papers/2606.08446)).

A table of measurements has a row per budget and a column per bin of cached length. In each bin the search may use the
budgets whose measured tail reaches the target, and from bin to bin the budget may not fall. It goes through the bins
in their order and takes the smallest such budget that is no smaller than the one before. By induction, no other
admissible schedule is smaller in any bin: what it has before is no smaller, so it has the same budgets or fewer to
choose from. The result is therefore the cheapest under every cost that grows with the budgets, although a larger
budget need not have the better measured tail. (Where it has not, the running maximum of each bin's smallest budget may
end on one that falls short.)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from .schedule import SparsityScheduleConfig


if TYPE_CHECKING:
    from numpy.typing import ArrayLike


MEASURED = "measured"
TOO_FEW_TOKENS = "too few tokens"
UNREACHABLE = "unreachable: dense"


@dataclass(frozen=True)
class BinChoice:
    """
    What the search chose for one bin of cached length.

    Args:
        start (`int`):
            Start of the bin in tokens, a multiple of the schedule's `bin_tokens`.
        pages (`int`):
            Pages that a query of the bin reads in each sparse layer, reserved ones included.
        tail (`float` or `None`):
            Tail acceptance measured with this budget in this bin, whatever the number of tokens; `None` where there
            is no such measurement.
        tokens (`int`):
            Tokens behind `tail`.
        status (`str`):
            `"measured"`: the tail reaches the target on enough tokens. `"too few tokens"`: no budget was measured on
            enough of them, and the next larger one than in the bin before is taken. `"unreachable: dense"`: no
            measured budget that may follow the bin before reaches the target, and all pages of the bin are kept.
        best_tail (`float` or `None`):
            Highest tail of the bin that was measured on enough tokens with any budget (for a search that allows dense
            bins: any that is no larger than the bin's contexts); `None` when there is none.
    """

    start: int
    pages: int
    tail: float | None
    tokens: int
    status: str
    best_tail: float | None


@dataclass(frozen=True)
class ScheduleSearchResult:
    """
    A schedule and what it rests on.

    Args:
        schedule ([`SparsityScheduleConfig`]):
            The cheapest schedule. A context beyond the last bin gets the last bin's budget.
        bins (`tuple[BinChoice, ...]`):
            One per bin.
    """

    schedule: SparsityScheduleConfig
    bins: tuple[BinChoice, ...]

    def describe(self) -> str:
        """A table of the bins, as text."""
        header = ("cached length", "pages", "budget", "tail", "tokens", "status")
        rows = [
            (
                bin_text(self.schedule, index),
                f"{choice.pages:,}",
                f"{choice.pages * self.schedule.page_size:,}",
                "-" if choice.tail is None else f"{choice.tail:.4f}",
                f"{choice.tokens:,}",
                choice.status + self._why_dense(choice),
            )
            for index, choice in enumerate(self.bins)
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
            for row in (header, *rows)
        ]
        return "\n".join([f"Target tail acceptance {self.schedule.target_acceptance:g}", *lines])

    def _why_dense(self, choice: BinChoice) -> str:
        if choice.status != UNREACHABLE or choice.best_tail is None:
            return ""
        if choice.best_tail >= self.schedule.target_acceptance:
            return f" ({choice.best_tail:.4f} with fewer pages than shorter contexts need)"
        return f" (best {choice.best_tail:.4f})"


def search_schedule(
    page_counts: Sequence[int],
    tails: "ArrayLike",
    counts: "ArrayLike",
    *,
    bin_tokens: int,
    target_acceptance: float,
    min_tokens: int = 200,
    allow_dense: bool = False,
    **fields,
) -> ScheduleSearchResult:
    """
    Find the cheapest non-decreasing schedule whose tail acceptance reaches the target in every bin that was measured
    on enough tokens.

    A bin in which no budget was measured on enough tokens takes the next larger page count than the bin before it (the
    largest again where there is none), but not more than the next measured bin has: at the same budget, shorter
    contexts have the better tail. Such bins before the first measured one take that one's budget.

    Args:
        page_counts (`Sequence[int]`):
            Measured budgets, increasing: pages that a query keeps **in total**, the reserved ones included, so that
            `top_k_pages` are these less `sink_pages` and `recent_pages`, and [`SparsityScheduleConfig.budget`] is
            these times `page_size`.
        tails (`numpy.ndarray`):
            Tail acceptance `[budgets, bins]` in [0, 1]; NaN where nothing was measured. Bin `i` holds the cached
            lengths whose [`SparsityScheduleConfig.bin_index`] is `i`.
        counts (`numpy.ndarray`):
            Tokens behind each of them, integers `[budgets, bins]`.
        bin_tokens (`int`):
            Tokens in a bin.
        target_acceptance (`float`):
            Tail acceptance to reach, in (0, 1].
        min_tokens (`int`, *optional*, defaults to `200`):
            Tokens that a measurement needs to count; the 5th percentile of fewer is mostly noise.
        allow_dense (`bool`, *optional*, defaults to `False`):
            Whether a bin in which no measured budget reaches the target keeps all its pages, for an acceptance of 1.
            Since budgets may not fall, later bins keep at least as many.
        **fields:
            Further fields of the schedule: the recipe that was measured (`page_size`, `page_score`,
            `landmarks_per_page`, `landmark_dtype`, `sink_pages`, `recent_pages`, `dense_layers`), and where it comes
            from (`base_model_name_or_path`, `calibration`).

    Returns:
        [`ScheduleSearchResult`]

    Raises:
        ValueError: when an argument is invalid; when no bin has enough tokens; and, without `allow_dense`, when no
            measured budget reaches the target in some bins. The message then lists these with their best tails.

    Example:

    ```python
    >>> result = search_schedule(
    ...     page_counts=[32, 64, 128],
    ...     tails=[[0.88, 0.79], [0.91, 0.85], [0.95, 0.90]],
    ...     counts=[[4000, 4000]] * 3,
    ...     bin_tokens=2048,
    ...     target_acceptance=0.86,
    ... )
    >>> result.schedule.top_k_pages
    [29, 125]
    ```
    """
    empty = SparsityScheduleConfig(
        top_k_pages=[0], bin_tokens=bin_tokens, target_acceptance=target_acceptance, **fields
    )
    if empty.target_acceptance is None:
        raise ValueError("`target_acceptance` must be a number in (0, 1], got None.")
    reserved = empty.sink_pages + empty.recent_pages
    page_counts, tails, counts = _checked_table(page_counts, tails, counts, reserved)
    if isinstance(min_tokens, bool) or not isinstance(min_tokens, Integral) or min_tokens < 1:
        raise ValueError(f"`min_tokens` must be a positive integer, got {min_tokens!r}.")
    enough = (counts >= min_tokens) & ~np.isnan(tails)
    if not enough.any():
        most = int(counts[~np.isnan(tails)].max(initial=0))
        raise ValueError(
            f"No bin has the {min_tokens:,} tokens (`min_tokens`) that a tail acceptance needs; the most is {most:,}. "
            "Measure more or longer texts."
        )

    num_bins = tails.shape[1]
    pages_per_bin = bin_tokens // empty.page_size
    # The longest context of a bin: who keeps as many pages is dense there.
    all_pages = [max((index + 1) * pages_per_bin - 1, reserved) for index in range(num_bins)]
    chosen: dict[int, int] = {}
    dense, best, failures = set(), {}, []
    previous = 0
    for index in np.flatnonzero(enough.any(axis=0)).tolist():
        # Larger budgets than the context are no different from a dense bin, but would raise the later bins.
        largest = all_pages[index] if allow_dense else page_counts[-1]
        usable = enough[:, index] & (page_counts <= largest)
        measured = tails[usable, index]
        best[index] = float(measured.max()) if measured.size else None
        reaching = page_counts[usable & (tails[:, index] >= target_acceptance) & (page_counts >= previous)]
        if reaching.size:
            previous = chosen[index] = int(reaching[0])
        elif allow_dense:
            previous = chosen[index] = all_pages[index]
            dense.add(index)
        else:
            following = tails[usable & (page_counts >= previous), index]
            failures.append(_failure(empty, index, previous, max(following.tolist(), default=None)))
    if failures:
        raise ValueError(
            f"No measured budget reaches a tail acceptance of {target_acceptance:g} at cached lengths "
            f"{'; '.join(failures)}. Measure larger budgets, lower the target, or let these bins be dense "
            "(`allow_dense=True`)."
        )

    pages = _fill_unmeasured(chosen, dense, page_counts, all_pages)
    bins = []
    for index, kept in enumerate(pages):
        tail, tokens = None, int(counts[:, index].max())
        row = int(np.searchsorted(page_counts, kept))
        if row < len(page_counts) and page_counts[row] == kept:
            tail, tokens = tails[row, index], int(counts[row, index])
            tail = None if np.isnan(tail) else float(tail)
        status = UNREACHABLE if index in dense else MEASURED if index in chosen else TOO_FEW_TOKENS
        bins.append(BinChoice(index * bin_tokens, kept, tail, tokens, status, best.get(index)))
    return ScheduleSearchResult(replace(empty, top_k_pages=[kept - reserved for kept in pages]), tuple(bins))


def select_cheapest(
    results: Iterable[ScheduleSearchResult], cost: Callable[[SparsityScheduleConfig], float]
) -> ScheduleSearchResult:
    """
    The result whose schedule costs least, such as among page sizes or recipes.

    Args:
        results (`Iterable[ScheduleSearchResult]`):
            Candidates; of equally cheap ones the first wins.
        cost (`Callable[[SparsityScheduleConfig], float]`):
            Cost of a schedule, such as the seconds of [`~sparrow_trl.cost_model.rollout_seconds`].

    Raises:
        ValueError: when there is no candidate, or a cost is not a finite number.
    """
    results = list(results)
    if not results:
        raise ValueError("There is no schedule to select from.")
    costs = [float(cost(result.schedule)) for result in results]
    for number, value in enumerate(costs):
        if not np.isfinite(value):
            raise ValueError(f"The cost of candidate {number} is {value}; a cost must be a finite number.")
    return results[costs.index(min(costs))]


def _fill_unmeasured(
    chosen: dict[int, int], dense: set[int], page_counts: np.ndarray, all_pages: list[int]
) -> list[int]:
    """Pages of every bin, from those of the measured bins (`chosen`, some of them `dense`)."""
    pages = [chosen[min(chosen)]] * min(chosen)
    for index in range(min(chosen), len(all_pages)):
        if index in chosen:
            pages.append(chosen[index])
            last_is_dense = index in dense
            continue
        if last_is_dense:
            step = max(pages[-1], all_pages[index])
        else:
            step = min(page_counts[page_counts > pages[-1]].tolist(), default=pages[-1])
        following = (chosen[later] for later in sorted(chosen) if later > index)
        pages.append(min(step, next(following, step)))
    return pages


def _checked_table(
    page_counts: Sequence[int], tails: "ArrayLike", counts: "ArrayLike", reserved: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    page_counts, tails, counts = np.asarray(page_counts), np.asarray(tails, dtype=np.float64), np.asarray(counts)
    if page_counts.ndim != 1 or not page_counts.size or not np.issubdtype(page_counts.dtype, np.integer):
        raise ValueError(f"`page_counts` must be a list of integers, got {page_counts!r}.")
    if (np.diff(page_counts) <= 0).any():
        raise ValueError(f"`page_counts` must increase, got {page_counts.tolist()}.")
    if page_counts[0] < reserved:
        raise ValueError(
            f"`page_counts` include the reserved pages and so must be at least {reserved} (`sink_pages` and "
            f"`recent_pages`), got {page_counts[0]}."
        )
    if tails.ndim != 2 or len(tails) != len(page_counts) or not tails.size or tails.shape != counts.shape:
        raise ValueError(
            f"`tails` and `counts` must be [budgets, bins] with {len(page_counts)} budgets and at least one bin, got "
            f"{tails.shape} and {counts.shape}."
        )
    if ((tails < 0) | (tails > 1)).any():
        raise ValueError(f"`tails` must be in [0, 1] or NaN, got {tails[(tails < 0) | (tails > 1)][0]}.")
    if not np.issubdtype(counts.dtype, np.integer) or (counts < 0).any():
        raise ValueError("`counts` must be integers of at least 0.")
    return page_counts, tails, counts


def bin_text(schedule: SparsityScheduleConfig, index: int) -> str:
    """The cached lengths of the bin `index` (`int`) of `schedule` ([`SparsityScheduleConfig`]), as text."""
    first, last = schedule.bin_lengths(index)
    return f"{first:,}-{last:,}"


def _failure(schedule: SparsityScheduleConfig, index: int, previous: int, best_tail: float | None) -> str:
    span = bin_text(schedule, index)
    if best_tail is None:
        return f"{span} (not measured with the {previous} pages that shorter contexts need, or more)"
    return f"{span} (best {best_tail:.4f}" + (f" with {previous} pages or more)" if previous else ")")
