"""
Acceptance rates of a sweep over page budgets: their distribution per budget and bin of cached length, streamed into
histograms of constant size, and its file format.

The histogram is fine where the values are. Up to 0.952 its cells are 5e-4 wide. Above, where nearly all tokens lie
(paper, section 3.1), they shrink by 1% each with the distance from 1, from 5e-4 down to 1e-8; what is within 1e-6 of 1
counts as 1, since a float32 sum over a vocabulary is no better than that. A quantile is therefore known to 5e-4, and
to 1% of its distance from 1 above 0.952: 0.99990 and 0.99993 are well apart.

A table is stored as one JSON object: `format_version`, what was measured (`method`, `model_name`, `recipe`,
`page_counts`, `bin_tokens`, `num_bins`), `num_cells` (the binning above), and in `budgets` for each page count the
histogram of each bin as `[cells, counts]`, the sum of each bin in units of 2^-32, and a coarser histogram of each
sequence over the bins one after the other.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .json_files import read_json_object, write_atomically
from .schedule import SparsityScheduleConfig


if TYPE_CHECKING:
    import torch


FORMAT_VERSION = 1
# A sweep of 18 budgets over 100 sequences of 32K tokens stays well below.
MAX_TABLE_BYTES = 2**28
MAX_BINS = 4096
# Tokens in a cell whose sum stays within int64.
MAX_TOKENS = 2**31 - 1

METHODS = ("teacher_forced", "rollout")
RECIPE_FIELDS = (
    "page_size",
    "page_score",
    "landmarks_per_page",
    "landmark_dtype",
    "sink_pages",
    "recent_pages",
    "dense_layers",
)

# Both numbers of cells are multiples of COARSENING, so that the values at 1 keep a cell of their own in either.
LINEAR_CELLS, GEOMETRIC_CELLS, COARSENING = 1904, 1088, 8
LINEAR_END, ONE = 0.952, 1 - 1e-6
LOW = np.concatenate(
    [
        np.linspace(0, LINEAR_END, LINEAR_CELLS, endpoint=False),
        1 - np.geomspace(1 - LINEAR_END, 1 - ONE, GEOMETRIC_CELLS + 1),
    ]
)
NUM_CELLS = len(LOW)
NUM_COARSE_CELLS = NUM_CELLS // COARSENING + 1

# Sums are kept in whole units of this, so that they do not depend on the order in which tokens come.
SUM_UNIT = 2.0**-32


class AcceptanceTable:
    """
    Distribution of the acceptance rate `alpha` for each page budget and bin of cached length (paper, section 3.2 and
    figure 4).

    Tokens stream in with [`update`], one sequence and budget at a time; tables of several processes are joined with
    [`merge`]. Neither the order of updates nor the split over processes changes a table.

    Args:
        recipe ([`SparsityScheduleConfig`]):
            How pages were scored and reserved: page size, score, landmarks, reserved pages and dense layers. Its
            tables of pages are not used.
        page_counts (`list[int]`):
            Budgets in pages, the reserved ones included, in ascending order.
        bin_tokens (`int`):
            Tokens in a bin of cached length, a multiple of the page size.
        num_bins (`int`):
            Number of bins, from a cached length of 0 on.
        model_name (`str`, *optional*):
            Model that was measured.
        method (`str`, *optional*, defaults to `"teacher_forced"`):
            `"teacher_forced"` (the same sequences under every budget) or `"rollout"` (each budget generates its own).

    Raises:
        ValueError: when the page counts do not ascend or do not cover the reserved pages, or another argument is
            invalid.
    """

    def __init__(
        self,
        recipe: SparsityScheduleConfig,
        page_counts: list[int],
        bin_tokens: int,
        num_bins: int,
        *,
        model_name: str | None = None,
        method: Literal["teacher_forced", "rollout"] = "teacher_forced",
    ):
        if not isinstance(recipe, SparsityScheduleConfig):
            raise ValueError(f"`recipe` must be a SparsityScheduleConfig, got {type(recipe).__name__}.")
        if recipe.is_dense:
            raise ValueError('`recipe` makes all layers dense (`dense_layers="all"`), so no budget would matter.')
        if recipe.layer_top_k_pages is not None:
            raise ValueError("`recipe` has `layer_top_k_pages`, but a budget is the same in every sparse layer.")
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {METHODS}, got {method!r}.")
        if not _is_int(num_bins) or not 1 <= num_bins <= MAX_BINS:
            raise ValueError(f"`num_bins` must be an integer between 1 and {MAX_BINS}, got {num_bins!r}.")
        if not isinstance(page_counts, (list, tuple)) or not page_counts or not all(map(_is_int, page_counts)):
            raise ValueError(f"`page_counts` must be a list of integers, got {page_counts!r:.200}.")
        reserved = recipe.sink_pages + recipe.recent_pages
        if any(first >= second for first, second in zip(page_counts, page_counts[1:], strict=False)):
            raise ValueError(f"`page_counts` must ascend, got {page_counts!r:.200}.")
        if page_counts[0] < reserved:
            raise ValueError(
                f"`page_counts` must cover the {reserved} reserved pages ({recipe.sink_pages} at the start, "
                f"{recipe.recent_pages} at the end), which they include; got {page_counts[0]}."
            )
        self.method = method
        self.model_name = model_name
        self.page_counts = list(page_counts)
        self.num_bins = num_bins
        self._schedules = [
            dataclasses.replace(
                recipe,
                top_k_pages=[count - reserved],
                bin_tokens=bin_tokens,
                base_model_name_or_path=model_name,
                target_acceptance=None,
                calibration=None,
            )
            for count in page_counts
        ]
        self.bin_tokens = self._schedules[0].bin_tokens
        self._counts = np.zeros((len(page_counts), num_bins, NUM_CELLS), dtype=np.int64)
        self._sums = np.zeros((len(page_counts), num_bins), dtype=np.int64)
        # For each budget the non-empty cells of each sequence's coarse histograms, and their counts.
        self._sequences: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in page_counts]

    @property
    def recipe(self) -> dict[str, Any]:
        """How pages were scored and reserved, as fields of a [`SparsityScheduleConfig`]."""
        return {name: getattr(self._schedules[0], name) for name in RECIPE_FIELDS}

    def schedule(self, budget_index: int) -> SparsityScheduleConfig:
        """The schedule that keeps `page_counts[budget_index]` pages at every length (`budget_index` is an `int`)."""
        return self._schedules[budget_index]

    # Filling it

    def update(
        self,
        budget_index: int,
        lengths: "np.ndarray | torch.Tensor",
        alphas: "np.ndarray | torch.Tensor",
    ) -> None:
        """
        Add the tokens of one sequence under one budget.

        Args:
            budget_index (`int`):
                Index of the budget in `page_counts`.
            lengths (`numpy.ndarray` or `torch.Tensor`):
                Cached tokens at each query, its own included: integers `[tokens]`. A completion's first token comes
                from the dense prefill and is left out by the caller.
            alphas (`numpy.ndarray` or `torch.Tensor`):
                Acceptance rates `[tokens]`.

        Raises:
            ValueError: when the shapes differ, a rate is NaN or outside [0, 1], or a length is in none of the bins.
                Nothing has changed then.
        """
        lengths, alphas = (values.cpu().numpy() if hasattr(values, "cpu") else values for values in (lengths, alphas))
        lengths, alphas = np.asarray(lengths), np.asarray(alphas, dtype=np.float64)
        if not 0 <= budget_index < len(self.page_counts):
            raise ValueError(f"`budget_index` must be below {len(self.page_counts)}, got {budget_index}.")
        if lengths.ndim != 1 or lengths.shape != alphas.shape:
            raise ValueError(
                f"`lengths` and `alphas` must be [tokens] alike, got {list(lengths.shape)} and {list(alphas.shape)}."
            )
        if not len(lengths):
            return
        # A NaN compares false.
        bad = ~((alphas >= 0) & (alphas <= 1))
        if bad.any():
            raise ValueError(f"`alphas` must be in [0, 1], got {alphas[bad][0]} at index {bad.argmax()}.")
        if lengths.dtype.kind not in "iu" or lengths.min() < 1:
            raise ValueError("`lengths` must be positive integers.")
        bins = self._schedules[0].bin_index(lengths.astype(np.int64))
        if bins.max() >= self.num_bins:
            raise ValueError(
                f"A cached length of {lengths.max()} is past the table's {self.num_bins} bins of {self.bin_tokens}."
            )
        cells = np.searchsorted(LOW, alphas, side="right") - 1
        np.add.at(self._counts[budget_index], (bins, cells), 1)
        np.add.at(self._sums[budget_index], bins, np.rint(alphas / SUM_UNIT).astype(np.int64))
        self._sequences[budget_index].append(
            np.unique(bins * NUM_COARSE_CELLS + cells // COARSENING, return_counts=True)
        )

    def merge(self, other: "AcceptanceTable") -> None:
        """
        Add the tokens of another table of the same sweep.

        Args:
            other ([`AcceptanceTable`]):
                Table with the same model, method, recipe, page counts and bins. It does not change.

        Raises:
            ValueError: when the tables are of different sweeps; the message names what differs.
        """
        mine, others = self._header(), other._header()
        differing = [name for name in mine if mine[name] != others[name]]
        if differing:
            raise ValueError(
                "Acceptance tables of different sweeps cannot be merged: "
                + ", ".join(f"`{name}` is {mine[name]!r} and {others[name]!r}" for name in differing)
                + "."
            )
        self._counts += other._counts
        self._sums += other._sums
        for own, added in zip(self._sequences, other._sequences, strict=True):
            own.extend(added)

    # Reading it

    @property
    def count(self) -> np.ndarray:
        """`numpy.ndarray` of shape `[page_counts, bins]`: Number of tokens."""
        return self._counts.sum(-1)

    @property
    def mean(self) -> np.ndarray:
        """`numpy.ndarray` of shape `[page_counts, bins]`: Mean acceptance rate, to 1e-10; NaN without tokens."""
        count = self.count
        return np.where(count, self._sums * SUM_UNIT / np.maximum(count, 1), np.nan)

    def num_sequences(self, budget_index: int) -> np.ndarray:
        """Sequences with tokens in each bin under the budget `budget_index` (`int`): integers `[bins]`."""
        histograms = self._sequence_histograms(budget_index)
        return (histograms.sum(-1) > 0).sum(0)

    def quantile(self, q: float) -> np.ndarray:
        """
        Quantile of the acceptance rate in each cell, as `numpy.quantile` of its tokens gives, to 5e-4 (see the
        module's description).

        Args:
            q (`float`):
                Quantile in [0, 1]; 0.05 is the tail acceptance.

        Returns:
            `numpy.ndarray` of shape `[page_counts, bins]`: NaN where there are no tokens.
        """
        return _histogram_quantile(self._counts, _edges(1), q)

    def quantile_interval(self, q: float, level: float = 0.95, num_resamples: int = 1000, seed: int = 0) -> np.ndarray:
        """
        Percentile bootstrap interval of the quantile in each cell.

        Whole sequences are drawn with replacement, because the tokens of one sequence are correlated: the interval
        covers which prompts and completions came into the set, not only which tokens. It says nothing about
        prompts of another kind, and with fewer than about ten sequences it is too narrow. Sequences enter with a
        histogram of an eighth of the table's resolution (4e-3 below 0.952).

        Args:
            q (`float`):
                Quantile in [0, 1].
            level (`float`, *optional*, defaults to `0.95`):
                Coverage of the interval, in (0, 1).
            num_resamples (`int`, *optional*, defaults to `1000`):
                Bootstrap resamples.
            seed (`int`, *optional*, defaults to `0`):
                Seed of the resampling.

        Returns:
            `numpy.ndarray` of shape `[page_counts, bins, 2]`: lower and upper end; NaN in a cell with tokens of fewer
            than two sequences.
        """
        if not 0 < level < 1:
            raise ValueError(f"`level` must be in (0, 1), got {level}.")
        if not _is_int(num_resamples) or num_resamples < 1:
            raise ValueError(f"`num_resamples` must be a positive integer, got {num_resamples!r}.")
        intervals = np.full((len(self.page_counts), self.num_bins, 2), np.nan)
        edges = _edges(COARSENING)
        for budget_index in range(len(self.page_counts)):
            histograms = self._sequence_histograms(budget_index)
            for bin_index in range(self.num_bins):
                present = histograms[:, bin_index]
                present = present[present.sum(-1) > 0]
                if len(present) < 2:
                    continue
                draws = np.random.default_rng(seed).multinomial(
                    len(present), np.full(len(present), 1 / len(present)), num_resamples
                )
                # Products of counts are exact in float64, whose matrix product is far quicker than that of integers.
                quantiles = _histogram_quantile(draws.astype(np.float64) @ present, edges, q)
                intervals[budget_index, bin_index] = np.quantile(quantiles, [(1 - level) / 2, (1 + level) / 2])
        return intervals

    def length_correlation(self, q: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
        """
        Pearson's correlation of the acceptance rate with the cached length, by budget (paper, section 3.2: about -0.1
        for the rates of single tokens, -0.55 for their 5th percentile).

        Lengths are known to the bin. A quantile is a number of a bin, so its correlation is over bins and counts each
        alike.

        Args:
            q (`float`, *optional*, defaults to `0.05`):
                The quantile.

        Returns:
            `tuple[numpy.ndarray, numpy.ndarray]`: of the tokens' rates, and of the bins' quantiles, both of shape
            `[page_counts]`; NaN where fewer than two bins (for quantiles, three) have tokens, or nothing varies.
        """
        low, high = _edges(1)
        squares = (self._counts * ((low + high) / 2) ** 2).sum(-1)
        quantiles = self.quantile(q)
        of_tokens, of_quantiles = [], []
        for count, mean, square, quantile in zip(self.count, self.mean, squares, quantiles, strict=True):
            bins = np.flatnonzero(count)
            own, weights = mean[bins], count[bins]
            # What varies within a bin adds to the spread of the rates, and to nothing else.
            spread = square[bins].sum() / max(weights.sum(), 1)
            of_tokens.append(_pearson(bins, own, weights, spread))
            # Two points always lie on a line.
            of_quantiles.append(_pearson(bins, quantile[bins], np.ones(len(bins))) if len(bins) > 2 else math.nan)
        return np.array(of_tokens), np.array(of_quantiles)

    def cumulative(self, budget_index: int, bin_index: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Distribution of the acceptance rate in one cell.

        Args:
            budget_index (`int`):
                Index of the budget in `page_counts`.
            bin_index (`int`):
                Bin of cached length, with tokens in it.

        Returns:
            `tuple[numpy.ndarray, numpy.ndarray]`: rates from 0 to 1, and the share of tokens below each. The last
            two rates are 1, around the step of the tokens at 1.
        """
        counts = self._counts[budget_index, bin_index]
        if not counts.any():
            raise ValueError(f"There are no tokens under {self.page_counts[budget_index]} pages in bin {bin_index}.")
        low, high = _edges(1)
        return np.append(low, high[-1]), np.concatenate([[0], counts.cumsum()]) / counts.sum()

    def describe(self, q: float = 0.05) -> str:
        """
        The table as text: the quantile `q` (`float`) and the mean for each bin of cached length and budget, and their
        correlation with the length. A cell without tokens is `"-"`.
        """
        recipe = ", ".join(f"{name} {value}" for name, value in self.recipe.items())
        lines = [f"Acceptance rate of {self.model_name or 'a model'}, {self.method.replace('_', ' ')} ({recipe})"]
        tokens = [f"{count:,}" for count in self.count.max(0)]
        starts = [f"{index * self.bin_tokens:,}-{(index + 1) * self.bin_tokens:,}" for index in range(self.num_bins)]
        for title, values in ((f"Quantile {q:g}", self.quantile(q)), ("Mean", self.mean)):
            columns = [["cached length", *starts], ["tokens", *tokens]]
            for page_count, column in zip(self.page_counts, values, strict=True):
                cells = ["-" if np.isnan(value) else f"{value:.4f}" for value in column]
                columns.append([f"{page_count} pages", *cells])
            widths = [max(map(len, column)) for column in columns]
            lines += ["", f"{title} by pages kept"]
            for row in zip(*columns, strict=True):
                lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        lines += ["", "Correlation with the cached length (Pearson)"]
        for pages, *values in zip(self.page_counts, *self.length_correlation(q), strict=True):
            tokens, tail = ("-" if np.isnan(value) else f"{value:+.2f}" for value in values)
            lines.append(f"{pages} pages: {tokens} of single tokens, {tail} of quantile {q:g} by bin")
        return "\n".join(lines)

    # Storing it

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON values, the same for equal tables."""
        budgets = []
        for counts, sums, sequences in zip(self._counts, self._sums, self._sequences, strict=True):
            budgets.append(
                {
                    "sums": sums.tolist(),
                    "bins": [[row.nonzero()[0].tolist(), row[row.nonzero()].tolist()] for row in counts],
                    "sequences": _ordered(sequences),
                }
            )
        return {"format_version": FORMAT_VERSION, **self._header(), "num_cells": NUM_CELLS, "budgets": budgets}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AcceptanceTable":
        """
        The table that [`to_dict`] turned into `values` (`dict`).

        Raises:
            ValueError: when `values` is of another version or form, or its numbers do not fit together.
        """
        if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
            version = values.get("format_version") if isinstance(values, dict) else None
            raise ValueError(
                f"An acceptance table has `format_version` {FORMAT_VERSION}, got {version!r:.100}: it was written by "
                "another version of sparrow_trl, or is no acceptance table."
            )
        keys = {"format_version", "num_cells", "budgets", *_HEADER}
        if values.keys() != keys:
            raise ValueError(f"An acceptance table must have the keys {sorted(keys)}, got {sorted(values)!r:.400}.")
        if values["num_cells"] != NUM_CELLS:
            raise ValueError(f"`num_cells` must be {NUM_CELLS}, got {values['num_cells']!r:.100}.")
        recipe = values["recipe"]
        if not isinstance(recipe, dict) or recipe.keys() != set(RECIPE_FIELDS):
            raise ValueError(f"`recipe` must have the fields {list(RECIPE_FIELDS)}, got {recipe!r:.400}.")
        # The table of pages and the bins are set per budget.
        recipe = SparsityScheduleConfig(top_k_pages=[0], bin_tokens=recipe["page_size"], **recipe)
        table = cls(recipe, **{name: values[name] for name in _HEADER if name != "recipe"})
        budgets = values["budgets"]
        if not isinstance(budgets, list) or len(budgets) != len(table.page_counts):
            raise ValueError(f"`budgets` must have one entry for each of the {len(table.page_counts)} page counts.")
        for index, entry in enumerate(budgets):
            try:
                table._load_budget(index, entry)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"`budgets[{index}]` is damaged: {error}") from error
        return table

    def save(self, path: str | Path) -> None:
        """Write the table to the file `path` (`str` or `pathlib.Path`), whose old content stays until it is done."""
        # Without indentation: a table has up to millions of numbers, which Python's own encoder takes minutes for.
        write_atomically(Path(path), json.dumps(self.to_dict(), allow_nan=False).encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> "AcceptanceTable":
        """
        Read a table that [`save`] wrote.

        Args:
            path (`str` or `pathlib.Path`):
                File of the table.

        Raises:
            ValueError: when the file is not a valid acceptance table; the message names the file.
        """
        values = read_json_object(Path(path), MAX_TABLE_BYTES)
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path} is no acceptance table: {error}") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AcceptanceTable):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def _header(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _HEADER}

    def _sequence_histograms(self, budget_index: int) -> np.ndarray:
        """Coarse histograms `[sequences, bins, coarse cells]`, whichever way the sequences came in."""
        sequences = _ordered(self._sequences[budget_index])
        histograms = np.zeros((len(sequences), self.num_bins * NUM_COARSE_CELLS))
        for row, (cells, counts) in zip(histograms, sequences, strict=True):
            row[cells] = counts
        return histograms.reshape(-1, self.num_bins, NUM_COARSE_CELLS)

    def _load_budget(self, index: int, entry: Any) -> None:
        if not isinstance(entry, dict) or entry.keys() != {"sums", "bins", "sequences"}:
            raise ValueError("it must have the keys ['bins', 'sequences', 'sums']")
        if not all(isinstance(entry[name], list) for name in entry):
            raise ValueError("its entries must be lists")
        if len(entry["bins"]) != self.num_bins or len(entry["sums"]) != self.num_bins:
            raise ValueError(f"`bins` and `sums` must have one entry for each of the {self.num_bins} bins")
        for row, histogram in zip(self._counts[index], entry["bins"], strict=True):
            cells, counts = _checked_histogram(histogram, NUM_CELLS)
            row[cells] = counts
        self._sums[index] = _checked_integers(entry["sums"])
        low, high = _edges(1)
        totals = self._sums[index] * SUM_UNIT
        # Sums are exact to half a unit a token, and the last cell holds values a little below 1.
        slack = 1e-9 + 2e-6 * self._counts[index].sum(-1)
        if (totals < self._counts[index] @ low - slack).any() or (totals > self._counts[index] @ high + slack).any():
            raise ValueError("a sum does not fit the counts of its bin")
        sequences = [_checked_histogram(item, self.num_bins * NUM_COARSE_CELLS) for item in entry["sequences"]]
        pooled = np.zeros(self.num_bins * NUM_COARSE_CELLS, dtype=np.int64)
        for cells, counts in sequences:
            pooled[cells] += counts
        starts = np.arange(0, NUM_CELLS, COARSENING)
        if (pooled.reshape(self.num_bins, -1) != np.add.reduceat(self._counts[index], starts, axis=-1)).any():
            raise ValueError("the histograms of the sequences do not add up to those of the bins")
        self._sequences[index] = sequences


_HEADER = ("method", "model_name", "recipe", "page_counts", "bin_tokens", "num_bins")


def _ordered(sequences: list[tuple[np.ndarray, np.ndarray]]) -> list[list[list[int]]]:
    """Histograms of sequences as lists, in an order that does not depend on how they came in."""
    return sorted([cells.tolist(), counts.tolist()] for cells, counts in sequences)


def _edges(coarsening: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest value of each cell, `coarsening` cells taken as one. What is in the last cell counts as 1."""
    low = LOW[::coarsening].copy()
    high = np.append(low[1:], 1)
    low[-1] = 1
    return low, high


def _histogram_quantile(counts: np.ndarray, edges: tuple[np.ndarray, np.ndarray], q: float) -> np.ndarray:
    """
    Linear interpolation between order statistics, as `numpy.quantile` does, of histograms `[..., cells]`. The values
    of a cell are taken as spread evenly.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"`q` must be in [0, 1], got {q}.")
    low, high = edges
    cumulative = counts.cumsum(-1)
    total = cumulative[..., -1]
    position = q * np.maximum(total - 1, 0)

    def order_statistic(rank):
        cell = (cumulative <= rank[..., None]).sum(-1).clip(max=len(low) - 1)
        in_cell = np.take_along_axis(counts, cell[..., None], -1)[..., 0]
        before = np.take_along_axis(cumulative, cell[..., None], -1)[..., 0] - in_cell
        return low[cell] + (rank - before + 0.5) / np.maximum(in_cell, 1) * (high[cell] - low[cell])

    first = np.floor(position)
    lower, upper = order_statistic(first), order_statistic(np.ceil(position))
    return np.where(total > 0, lower + (position - first) * (upper - lower), np.nan)


def _pearson(x: np.ndarray, y: np.ndarray, weights: np.ndarray, mean_square: float | None = None) -> float:
    """Weighted correlation; `mean_square` of what the values `y` are means of, by default of themselves."""
    if len(x) < 2:
        return math.nan
    shares = weights / weights.sum()
    center, level = shares @ x, shares @ y
    variance = (shares @ y**2 if mean_square is None else mean_square) - level**2
    # Below the resolution of what is summed there is no variance.
    if variance < 1e-12:
        return math.nan
    return float(shares @ ((x - center) * (y - level)) / math.sqrt(shares @ (x - center) ** 2 * variance))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_integers(values: Any) -> np.ndarray:
    if not isinstance(values, list) or not all(map(_is_int, values)):
        raise ValueError("a list of integers holds something else")
    return np.array(values, dtype=np.int64)


def _checked_histogram(value: Any, num_cells: int) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a histogram must be a list of cells and a list of counts")
    cells, counts = map(_checked_integers, value)
    if len(cells) != len(counts):
        raise ValueError(f"a histogram has {len(cells)} cells and {len(counts)} counts")
    if len(cells) and not (cells[0] >= 0 and cells[-1] < num_cells and (np.diff(cells) > 0).all()):
        raise ValueError(f"the cells of a histogram must ascend from 0 to at most {num_cells - 1}")
    if len(cells) and not (counts.min() > 0 and counts.max() <= MAX_TOKENS):
        raise ValueError(f"a count is not between 1 and {MAX_TOKENS}: {counts.min()}")
    return cells, counts
