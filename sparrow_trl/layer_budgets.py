"""
The cheapest page budgets of groups of layers that hold a tail acceptance.

Budgets are levels on a ladder of page counts, one for each group of layers and bin of cached length. What is read adds
up over layers and bins, so its bytes are known without measuring; the tails are measured, always under the schedule as
a whole. One pass over a sequence measures all bins at once, and their levels are searched side by side:

- [`fit_levels`], with the same level in every layer, brackets each bin's level between one that fell short and one
  that held, and halves the brackets: about `log2(levels) + 2` schedules from scratch, 2 to 4 from a good start.
- [`lower_levels`] exchanges budgets between groups. A move shifts the levels against each other (a tilt from the most
  to the least sensitive group, or one group up or down) and then lowers all groups together until each bin reads fewer
  bytes than before. Bins that fall short under it keep what they had; the mixture is measured again and must hold as
  well. So a move takes one schedule where it is rejected, and mostly two where it is accepted in some bins. It is
  made again as long as it is accepted.

Along the cached length no group's budget falls. Bins with too few tokens follow their neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .bench_traffic import ModelShape
from .cost_model import PAPER_PAGE_TOKENS, read_bytes
from .schedule import SparsityScheduleConfig


# In pages of 16 tokens, reserved ones included: steps of an eighth to a third.
PAGE_LADDER = (
    *(4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096),
)

# Times that a mixture of accepted bins is measured anew without those that fell short in it.
MAX_REPAIRS = 3

# Called with levels `[groups, bins]`: whether each bin holds its tail under their schedule (booleans `[bins]`).
Measure = Callable[[np.ndarray], np.ndarray]


class LayerBudgets:
    """
    Schedules of one recipe by the levels of groups of layers, and what they read.

    Args:
        recipe ([`SparsityScheduleConfig`]):
            How pages are scored and reserved, the bins and the dense layers. Its tables of pages are not used.
        groups (`list[list[int]]`):
            Layers of each group: together all that the recipe does not make dense.
        shape ([`~sparrow_trl.bench_traffic.ModelShape`]):
            The model.
        judged (`numpy.ndarray` of shape `[bins]`):
            Bins with enough tokens, the last of which ends the tables.
        first_length (`int`):
            First cached length that counts for what is read.
        page_ladder (`Sequence[int]`, *optional*, defaults to `PAGE_LADDER`):
            Budgets in ascending order, in pages of 16 tokens, reserved ones included. With larger pages, as many as
            have these tokens. Those that exceed the longest context are left out, and one that covers it is added.
    """

    def __init__(
        self,
        recipe: SparsityScheduleConfig,
        groups: list[list[int]],
        shape: ModelShape,
        judged: np.ndarray,
        first_length: int,
        page_ladder: Sequence[int] = PAGE_LADDER,
    ):
        self.groups, self.judged = groups, np.flatnonzero(judged)
        self.num_bins = int(self.judged[-1]) + 1
        self.recipe = replace(recipe, top_k_pages=[0], layer_top_k_pages=None)
        reserved = recipe.sink_pages + recipe.recent_pages
        spans = [recipe.bin_lengths(index) for index in range(self.num_bins)]
        bin_pages = [max(reserved, -(-last // recipe.page_size)) for _, last in spans]
        counts = {max(reserved, count * PAPER_PAGE_TOKENS // recipe.page_size) for count in page_ladder}
        self.page_counts = np.array(sorted({count for count in counts if count < bin_pages[-1]} | {bin_pages[-1]}))
        # The lowest level at which a bin reads everything: higher ones are no different.
        self.full = np.searchsorted(self.page_counts, bin_pages)

        first_length = min(max(1, first_length), spans[-1][1])
        lengths = np.arange(first_length, spans[-1][1] + 1)
        bins = recipe.bin_index(lengths)
        self._share = np.bincount(bins, minlength=self.num_bins) / len(lengths)
        layer = replace(shape, num_layers=1)

        def bin_means(schedule):
            sums = np.bincount(bins, read_bytes(layer, first_length, lengths[-1], schedule), self.num_bins)
            return sums / np.maximum(1, np.bincount(bins, minlength=self.num_bins))

        # [levels, bins], of one layer.
        self._level_bytes = np.array(
            [
                bin_means(replace(self.recipe, top_k_pages=[int(count) - reserved], dense_layers=[]))
                for count in self.page_counts
            ]
        )
        self._dense_bytes = (shape.num_layers - sum(map(len, groups))) * bin_means(None)

    def schedule(self, levels: np.ndarray) -> SparsityScheduleConfig:
        """
        The schedule of `levels` (`numpy.ndarray` of shape `[groups, bins]`). A group that reads everything in every
        bin is dense.
        """
        reserved = self.recipe.sink_pages + self.recipe.recent_pages
        tables: dict[tuple[int, ...], list[int]] = {}
        dense = list(self.recipe.dense_layers)
        for layers, row in zip(self.groups, levels, strict=True):
            if (row == self.full).all():
                dense += layers
            else:
                tables.setdefault(tuple((self.page_counts[row] - reserved).tolist()), []).extend(layers)
        if not tables:
            return replace(self.recipe, top_k_pages=[int(self.page_counts[-1]) - reserved], dense_layers="all")
        common = max(tables, key=lambda table: len(tables[table]))
        own = {
            name: list(table) for table, layers in tables.items() if table != common for name in layer_ranges(layers)
        }
        return replace(
            self.recipe, top_k_pages=list(common), layer_top_k_pages=own or None, dense_layers=sorted(dense)
        )

    def bin_bytes(self, levels: np.ndarray) -> np.ndarray:
        """Mean bytes of a decode step in each bin (`[bins]`) under `levels` (`numpy.ndarray`, `[groups, bins]`)."""
        columns = np.arange(self.num_bins)
        layers = (len(group) * self._level_bytes[row, columns] for group, row in zip(self.groups, levels, strict=True))
        return self._dense_bytes + sum(layers)

    def total_bytes(self, levels: np.ndarray) -> float:
        """Mean bytes of a decode step over all lengths under `levels` (`numpy.ndarray` of shape `[groups, bins]`)."""
        return float(self._share @ self.bin_bytes(levels))

    def non_decreasing(self, levels: np.ndarray) -> np.ndarray:
        """`levels` (`numpy.ndarray` of shape `[groups, bins]`) with bins that are not judged filled, none falling."""
        levels = levels.copy()
        for index in range(self.num_bins):
            if index not in self.judged:
                before, after = self.judged[self.judged < index], self.judged[self.judged > index]
                levels[:, index] = levels[:, before[-1] if len(before) else after[0]]
        return np.maximum.accumulate(np.minimum(levels, self.full), axis=1)


def layer_ranges(layers: list[int]) -> list[str]:
    """The keys of [`SparsityScheduleConfig`]'s `layer_top_k_pages` for `layers` (`list[int]`): `["3", "9-11"]`."""
    layers = sorted(layers)
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    return [f"{first}-{last}" if first < last else f"{first}" for first, last in zip(starts, ends, strict=True)]


def fit_levels(budgets: LayerBudgets, measure: Measure, start: np.ndarray | None = None) -> np.ndarray:
    """
    The lowest levels that hold in every bin, the same in all groups.

    Args:
        budgets ([`LayerBudgets`]):
            The schedules.
        measure (callable):
            Says whether each bin holds its tail under the schedule of levels `[groups, bins]`: booleans `[bins]`.
        start (`numpy.ndarray` of shape `[bins]`, *optional*):
            Levels to begin with; by default half-way up.

    Returns:
        `numpy.ndarray` of shape `[bins]`: Levels whose schedule was measured as a whole, and held.

    Raises:
        ValueError: when a bin falls short even with all pages.
    """
    full, judged = budgets.full, budgets.judged
    # Per bin: the highest level that fell short, and the lowest above it that held, or may at least.
    low, high = np.full_like(full, -1), full.copy()
    step = full.clip(min=1) if start is None else np.ones_like(full)
    held = np.zeros(len(full), dtype=bool)
    levels = budgets.non_decreasing((full // 2 if start is None else np.asarray(start))[None])[0]
    while True:
        holds = measure(np.tile(levels, (len(budgets.groups), 1)))
        target = levels.copy()
        for index in judged:
            level = levels[index]
            if holds[index]:
                high[index], held[index] = min(high[index], level), True
            else:
                low[index] = max(low[index], level)
                if high[index] <= low[index]:
                    high[index], held[index] = full[index], False
                if (levels[: index + 1] == full[: index + 1]).all():
                    raise ValueError(
                        "Even with all pages the tail acceptance falls short of the target: lower it, or the guard "
                        "(`margin`, `confidence`)."
                    )
                if level >= full[index]:
                    # The context itself carries what shorter contexts lost: they need more.
                    low[index], high[index] = full[index] - 1, full[index]
                    low[:index] = np.maximum(low[:index], levels[:index])
                    high[:index], held[:index] = full[:index], False
        for index in judged:
            span = high[index] - low[index]
            if span <= 1:
                target[index] = high[index]
            elif low[index] >= 0 and held[index]:
                target[index] = low[index] + span // 2
            else:
                # From a good start in steps that double, until there is a level on either side.
                reach = min(step[index], span // 2)
                target[index] = high[index] - reach if held[index] else low[index] + reach
                step[index] *= 2
        target = budgets.non_decreasing(target[None])[0]
        if holds[judged].all() and (target == levels).all():
            return levels
        levels = target


def lower_levels(
    budgets: LayerBudgets,
    measure: Measure,
    levels: np.ndarray,
    *,
    steps: Sequence[int] = (3, 2, 1),
    min_saving: float = 0.01,
    may_measure: Callable[[], bool] | None = None,
    report: Callable[[str], None] | None = None,
) -> np.ndarray:
    """
    Exchange budgets between groups as long as every bin holds and bytes are saved.

    Args:
        budgets ([`LayerBudgets`]):
            The schedules, with their groups in the order of their sensitivity, the most sensitive first.
        measure (callable):
            Says whether each bin holds its tail under the schedule of levels `[groups, bins]`: booleans `[bins]`.
        levels (`numpy.ndarray` of shape `[groups, bins]`):
            Levels that hold.
        steps (`Sequence[int]`, *optional*, defaults to `(3, 2, 1)`):
            By how many levels groups are shifted in each round of moves.
        min_saving (`float`, *optional*, defaults to `0.01`):
            Share of a bin's bytes that a move must save.
        may_measure (callable, *optional*):
            Asked before each schedule is measured; `False` ends the search.
        report (callable, *optional*):
            Called with a line of text for each accepted move.

    Returns:
        `numpy.ndarray` of shape `[groups, bins]`: Levels whose schedule was measured as a whole, and held.
    """
    may_measure = may_measure or (lambda: True)
    for step in steps:
        for name, shift in _moves(len(budgets.groups), step):
            # A move that helped once is made again.
            while (accepted := _try_move(budgets, measure, levels, shift, min_saving, may_measure)) is not None:
                if report is not None:
                    saved = 1 - budgets.total_bytes(accepted) / budgets.total_bytes(levels)
                    report(f"{name}: {saved:.1%} fewer bytes")
                levels = accepted
            if not may_measure():
                return levels
    return levels


def _moves(num_groups: int, step: int) -> list[tuple[str, np.ndarray]]:
    """Shifts of the groups' levels against each other, with their names."""
    none = np.zeros(num_groups, dtype=int)
    if num_groups == 1:
        return [("all layers down", none)]
    moves = [(f"tilt by {step}", np.rint(np.linspace(step, -step, num_groups)).astype(int))]
    for group in range(num_groups):
        for sign, word in ((1, "up"), (-1, "down")):
            moves.append(
                (f"group {group + 1} {word} by {step}", none + sign * step * (np.arange(num_groups) == group))
            )
    return [*moves, ("all layers down", none)]


def _try_move(budgets, measure, levels, shift, min_saving, may_measure) -> np.ndarray | None:
    trial = budgets.non_decreasing(_cheaper(budgets, levels, shift, min_saving))
    taken = np.ones(budgets.num_bins, dtype=bool)
    for _ in range(1 + MAX_REPAIRS):
        if budgets.total_bytes(trial) >= budgets.total_bytes(levels) or not may_measure():
            return None
        holds = measure(trial)
        if holds[budgets.judged].all():
            return trial
        taken &= holds
        mixed = budgets.non_decreasing(np.where(taken, trial, levels))
        if (mixed == trial).all():
            return None  # a bin falls short without having changed: what shorter contexts lost reaches it
        trial = mixed
    return None


def _cheaper(budgets: LayerBudgets, levels: np.ndarray, shift: np.ndarray, min_saving: float) -> np.ndarray:
    """In each bin the shifted levels, lowered together by as little as saves `min_saving` of its bytes."""
    limit = (1 - min_saving) * budgets.bin_bytes(levels)
    trial, missing = levels.copy(), np.ones(budgets.num_bins, dtype=bool)
    for common in range(len(budgets.page_counts), -len(budgets.page_counts), -1):
        shifted = (levels + shift[:, None] + common).clip(0, budgets.full)
        found = missing & (budgets.bin_bytes(shifted) <= limit)
        trial[:, found] = shifted[:, found]
        missing &= ~found
    return trial
