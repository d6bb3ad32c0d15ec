"""The streamed statistics of a sweep over page budgets."""

import copy
import json

import numpy as np
import pytest
import torch

from sparrow_trl.acceptance_table import RECIPE_FIELDS, AcceptanceTable
from sparrow_trl.schedule import SparsityScheduleConfig


RECIPE = SparsityScheduleConfig(top_k_pages=[7], page_size=16, dense_layers=[1], sink_pages=2, recent_pages=1)


def make_table(page_counts=(4, 8), bin_tokens=64, num_bins=3, recipe=RECIPE, **kwargs):
    return AcceptanceTable(recipe, list(page_counts), bin_tokens, num_bins, **{"model_name": "tiny", **kwargs})


def rates(rng, kind, size):
    """Acceptance rates as models give them: most within a few 1e-5 of 1, a Beta-shaped tail, and a lump at 1."""
    if kind == "ones":
        return np.ones(size)
    if kind == "uniform":
        return rng.uniform(0, 1, size)
    if kind == "near_one":
        return 1 - rng.uniform(0, 1e-4, size)
    if kind == "equal":
        return np.full(size, 0.7431)
    tail = rng.beta(8, 1.5, size)
    return np.where(rng.random(size) < 0.3, tail, 1 - 10 ** rng.uniform(-7, -3, size)).astype(np.float32)


def filled(seed=0, num_sequences=6, tokens=150, kind="mixed", **kwargs):
    """A table, and the lengths and rates that went into it as `[budget][sequence]`."""
    rng, table = np.random.default_rng(seed), make_table(**kwargs)
    updates = [[] for _ in table.page_counts]
    for budget in range(len(table.page_counts)):
        for _ in range(num_sequences):
            updates[budget].append((rng.integers(1, 177, tokens), rates(rng, kind, tokens)))
            table.update(budget, *updates[budget][-1])
    return table, updates


def pooled(updates, bin_index):
    """Rates of a budget in a bin of 64 tokens: lengths rounded up to pages of 16, four pages a bin."""
    lengths, values = (np.concatenate(parts) for parts in zip(*updates, strict=True))
    return values[np.ceil(lengths / 16).astype(int) // 4 == bin_index]


# Statistics


def test_correlation_with_length_equals_numpys():
    rng, table, lengths, alphas = np.random.default_rng(3), make_table(num_bins=6), [], []
    for _ in range(4):
        lengths.append(rng.integers(1, 369, 3000))
        # Falls with the length, at the bottom more than in the mean.
        alphas.append(1 - rng.random(3000) ** 8 * lengths[-1] / 400)
        table.update(0, lengths[-1], alphas[-1])
    bins, rates = np.ceil(np.concatenate(lengths) / 16).astype(int) // 4, np.concatenate(alphas)
    of_tokens, of_tails = table.length_correlation(0.05)
    assert of_tokens[0] == pytest.approx(np.corrcoef(bins, rates)[0, 1], abs=1e-3)
    tails = [np.quantile(rates[bins == index], 0.05) for index in range(6)]
    assert of_tails[0] == pytest.approx(np.corrcoef(range(6), tails)[0, 1], abs=1e-3)
    assert -0.5 < of_tokens[0] < -0.05 and of_tails[0] < -0.9
    assert np.isnan(of_tokens[1]) and np.isnan(of_tails[1])  # no tokens
    assert "single tokens" in table.describe() and "8 pages: - of single tokens" in table.describe()


def test_nothing_correlates_with_one_length_or_equal_rates():
    table = make_table()
    table.update(0, np.full(50, 20), np.linspace(0, 1, 50))
    assert np.isnan(table.length_correlation()).all()
    # Two bins say something about tokens, but nothing about quantiles by bin.
    table.update(0, np.full(50, 80), np.linspace(0, 0.5, 50))
    of_tokens, of_quantiles = table.length_correlation()
    assert of_tokens[0] < -0.3 and np.isnan(of_quantiles).all()
    table = make_table()
    table.update(0, np.full(50, 20), np.linspace(0, 1, 50))
    table.update(1, np.arange(1, 151), np.ones(150))
    assert np.isnan(table.length_correlation()).all()


@pytest.mark.parametrize("kind", ["mixed", "uniform", "near_one", "equal", "ones"])
@pytest.mark.parametrize("tokens", [7, 5000])
def test_statistics_equal_numpys_on_the_pooled_tokens(kind, tokens):
    table, updates = filled(kind=kind, tokens=tokens, num_sequences=3)
    for budget in range(2):
        for bin_index in range(3):
            values = pooled(updates[budget], bin_index).astype(np.float64)
            assert table.count[budget, bin_index] == len(values) > 0
            assert table.mean[budget, bin_index] == pytest.approx(values.mean(), abs=1e-9)
            for q in (0, 0.001, 0.05, 0.31, 0.5, 0.9, 1):
                expected = np.quantile(values, q)
                # Within a cell; above 0.952 one has 1% of the distance from 1.
                tolerance = 5.1e-4 if expected < 0.95 else 1.1e-2 * (1 - expected) + 1.1e-6
                # With few tokens numpy interpolates between two that are far apart, each known to its own cell.
                tolerance = 5.1e-4 if tokens == 7 and kind == "mixed" else tolerance
                assert table.quantile(q)[budget, bin_index] == pytest.approx(expected, abs=tolerance), q


def test_values_a_few_1e_5_apart_near_1_are_told_apart():
    table = make_table(num_bins=1)
    table.update(0, np.full(100, 20), np.full(100, 0.99990))
    table.update(1, np.full(100, 20), np.full(100, 0.99993))
    lower, higher = table.quantile(0.05)[:, 0]
    assert higher - lower == pytest.approx(3e-5, abs=3e-6)


def test_all_ones_have_a_quantile_of_exactly_1():
    table = make_table()
    table.update(0, np.array([20, 21]), np.ones(2))
    assert table.quantile(0.05)[0, 0] == 1 and table.mean[0, 0] == 1
    assert np.isnan(table.quantile(0.05)[1]).all() and np.isnan(table.mean[1]).all()


def test_a_lone_value_lies_in_the_middle_of_its_cell():
    values = np.concatenate([[0], np.random.default_rng(0).uniform(0, 0.95, 200)])
    for value in values:
        table = make_table(num_bins=1)
        table.update(0, np.array([20]), np.array([value]))
        assert table.quantile(0.05)[0, 0] == pytest.approx(value, abs=2.6e-4)


def test_a_length_falls_in_the_bin_of_its_pages():
    table = make_table()
    # 48 tokens are 3 pages, 49 are 4 and begin the second bin; 112 are 7 and 113 are 8.
    for length, expected in ((1, 0), (48, 0), (49, 1), (112, 1), (113, 2), (176, 2)):
        before = table.count[0].copy()
        table.update(0, np.array([length]), np.array([0.5]))
        assert (table.count[0] - before).tolist() == [int(index == expected) for index in range(3)]
        assert table.schedule(0).bin_index(length) == expected


def test_torch_tensors_are_taken_too():
    one, other = make_table(), make_table()
    lengths, alphas = torch.tensor([20, 60]), torch.tensor([0.25, 0.75])
    one.update(0, lengths, alphas)
    other.update(0, lengths.numpy(), alphas.numpy())
    assert one == other and one.count.sum() == 2


def test_cumulative_is_the_share_of_tokens_below():
    table, updates = filled(tokens=2000)
    values = pooled(updates[1], 2)
    points, shares = table.cumulative(1, 2)
    assert points[0] == 0 and points[-1] == 1 and shares[0] == 0 and shares[-1] == 1
    for point, share in zip(points[:-2:50], shares[:-2:50], strict=True):
        assert share == pytest.approx((values < point).mean(), abs=1e-3)
    with pytest.raises(ValueError, match="no tokens under 4 pages in bin 1"):
        make_table().cumulative(0, 1)


# Order and merging


def test_neither_order_nor_split_changes_a_table():
    whole, updates = filled()
    parts = [make_table(), make_table()]
    for budget, sequences in enumerate(updates):
        for index, (lengths, alphas) in enumerate(reversed(sequences)):
            parts[index % 2].update(budget, lengths, alphas)
    parts[0].merge(parts[1])
    assert parts[0] == whole
    assert np.array_equal(parts[0].mean, whole.mean)
    assert np.array_equal(parts[0].quantile_interval(0.05), whole.quantile_interval(0.05))
    parts[1].update(0, np.array([20]), np.array([0.5]))  # the merged table keeps nothing of the other's
    assert parts[0] == whole and parts[1] != whole


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model_name", {"model_name": "other"}),
        ("method", {"method": "rollout"}),
        ("page_counts", {"page_counts": (4, 9)}),
        ("bin_tokens", {"bin_tokens": 128}),
        ("num_bins", {"num_bins": 4}),
        ("recipe", {"recipe": SparsityScheduleConfig(top_k_pages=[7], dense_layers=[])}),
    ],
)
def test_tables_of_different_sweeps_are_not_merged(name, changes):
    table, _ = filled()
    before = copy.deepcopy(table)
    with pytest.raises(ValueError, match=f"cannot be merged: `{name}` is"):
        table.merge(make_table(**changes))
    assert table == before


# Bootstrap


def test_interval_is_that_of_a_bootstrap_over_sequences():
    rng, table = np.random.default_rng(0), make_table(num_bins=1)
    sequences = [rng.uniform(low, 1, 400) for low in rng.uniform(0.2, 0.8, 12)]
    for values in sequences:
        table.update(0, np.full(400, 20), values)
    resampled = [
        np.quantile(np.concatenate([sequences[i] for i in rng.integers(0, 12, 12)]), 0.05) for _ in range(2000)
    ]
    arguments = {"q": 0.05, "level": 0.8, "num_resamples": 2000}
    intervals = table.quantile_interval(**arguments, seed=3)
    assert intervals[0, 0] == pytest.approx(np.quantile(resampled, [0.1, 0.9]), abs=1e-2)
    assert np.diff(np.quantile(resampled, [0.1, 0.2])) > 2e-2  # another level would show
    assert np.array_equal(intervals, table.quantile_interval(**arguments, seed=3), equal_nan=True)
    few = [table.quantile_interval(0.05, num_resamples=10, seed=seed)[0, 0].tolist() for seed in range(4)]
    assert len(set(map(tuple, few))) == 4


def test_sequences_without_tokens_in_a_bin_do_not_count_there():
    table, _ = filled(kind="uniform")
    before = table.quantile_interval(0.05)
    for _ in range(6):
        table.update(0, np.full(100, 150), np.full(100, 0.5))
    after = table.quantile_interval(0.05)
    assert np.array_equal(after[0, :2], before[0, :2]) and not np.array_equal(after[0, 2], before[0, 2])


def test_interval_covers_the_spread_between_sequences():
    """Sequences that differ give a wide interval, although each token-level quantile would look certain."""
    table = make_table(num_bins=1)
    for value in np.linspace(0.5, 0.95, 8):
        table.update(0, np.full(1000, 20), np.full(1000, value))
        table.update(1, np.full(1000, 20), np.full(1000, 0.7))
    wide, narrow = table.quantile_interval(0.05)[:, 0]
    assert wide[1] - wide[0] > 0.05
    assert narrow[1] - narrow[0] < 4.1e-3 and narrow[0] <= 0.7 + 4e-3
    assert (table.num_sequences(0) == 8).all()


def test_a_wider_level_gives_a_wider_interval():
    table, _ = filled(kind="uniform")
    widths = [np.diff(table.quantile_interval(0.1, level)).squeeze(-1) for level in (0.5, 0.9, 0.99)]
    assert (widths[0] < widths[1]).all() and (widths[1] < widths[2]).all()


def test_one_sequence_has_no_interval():
    table = make_table()
    table.update(0, np.array([20, 60]), np.array([0.2, 0.3]))
    table.update(0, np.array([20, 30]), np.array([0.2, 0.3]))
    intervals = table.quantile_interval(0.05)
    assert np.isfinite(intervals[0, 0]).all() and np.isnan(intervals[0, 1:]).all() and np.isnan(intervals[1]).all()
    assert table.num_sequences(0).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": 1.5}, r"`q` must be in \[0, 1\], got 1.5"),
        ({"q": 0.5, "level": 1}, r"`level` must be in \(0, 1\), got 1"),
        ({"q": 0.5, "num_resamples": 0}, "`num_resamples` must be a positive integer, got 0"),
    ],
)
def test_invalid_intervals_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        filled()[0].quantile_interval(**arguments)


# Construction and update


def test_a_budget_includes_the_reserved_pages():
    table = make_table(page_counts=(3, 8))
    assert [table.schedule(index).top_k_pages for index in range(2)] == [[0], [5]]
    schedule = table.schedule(1)
    assert schedule.budget(10_000) == 8 * 16
    assert schedule.bin_tokens == 64 and schedule.base_model_name_or_path == "tiny"
    assert {name: getattr(schedule, name) for name in RECIPE_FIELDS} == table.recipe
    assert table.recipe["sink_pages"] == 2 and table.recipe["dense_layers"] == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_counts": (2, 8)}, "cover the 3 reserved pages .* got 2"),
        ({"page_counts": (8, 8)}, r"`page_counts` must ascend, got \[8, 8\]"),
        ({"page_counts": (8, 4)}, "`page_counts` must ascend"),
        ({"page_counts": ()}, "`page_counts` must be a list of integers"),
        ({"page_counts": (4, 8.0)}, "`page_counts` must be a list of integers"),
        ({"bin_tokens": 100}, "`bin_tokens` must be a multiple of `page_size`"),
        ({"num_bins": 0}, "`num_bins` must be an integer between 1"),
        ({"method": "guess"}, "`method` must be one of"),
        ({"recipe": SparsityScheduleConfig.dense()}, "all layers dense"),
        (
            {"recipe": SparsityScheduleConfig(top_k_pages=[1], layer_top_k_pages={"3": [2]})},
            "`layer_top_k_pages`, but a budget is the same",
        ),
        ({"recipe": {}}, "`recipe` must be a SparsityScheduleConfig, got dict"),
    ],
)
def test_invalid_tables_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_table(**changes)


@pytest.mark.parametrize(
    ("budget", "lengths", "alphas", "message"),
    [
        (0, [20, 21], [0.5], r"alike, got \[2\] and \[1\]"),
        (0, [20, 21], [0.5, np.nan], "in .0, 1., got nan at index 1"),
        (0, [20, 21], [1.01, 0.5], "got 1.01 at index 0"),
        (0, [20, 21], [-0.1, 0.5], "got -0.1 at index 0"),
        (0, [0, 21], [0.5, 0.5], "`lengths` must be positive integers"),
        (0, [20.0, 21.0], [0.5, 0.5], "`lengths` must be positive integers"),
        (0, [20, 177], [0.5, 0.5], "A cached length of 177 is past the table's 3 bins of 64"),
        (2, [20], [0.5], "`budget_index` must be below 2, got 2"),
        (-1, [20], [0.5], "`budget_index` must be below 2, got -1"),
    ],
)
def test_invalid_updates_change_nothing(budget, lengths, alphas, message):
    table = make_table()
    with pytest.raises(ValueError, match=message):
        table.update(budget, np.array(lengths), np.array(alphas))
    assert table == make_table()


# File


def test_a_loaded_table_equals_the_saved_one(tmp_path):
    table, _ = filled(method="rollout")
    table.save(tmp_path / "table.json")
    loaded = AcceptanceTable.load(tmp_path / "table.json")
    assert loaded == table
    for name in ("page_counts", "bin_tokens", "num_bins", "recipe", "model_name", "method"):
        assert getattr(loaded, name) == getattr(table, name)
    assert np.array_equal(loaded.mean, table.mean) and np.array_equal(loaded.count, table.count)
    assert np.array_equal(loaded.quantile(0.05), table.quantile(0.05))
    assert np.array_equal(loaded.quantile_interval(0.05), table.quantile_interval(0.05))
    loaded.update(0, np.array([20]), np.array([0.5]))
    assert loaded != table
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    table, _ = filled()
    table.save(tmp_path / "table.json")

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparrow_trl.json_files.os.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        make_table().save(tmp_path / "table.json")
    assert AcceptanceTable.load(tmp_path / "table.json") == table
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def changed(*path_and_value):
    *path, last, value = path_and_value

    def change(values):
        for key in path:
            values = values[key]
        values[last] = value

    return change


def moved_count(values):
    """A count in another cell of the same bin, far away: the sum no longer fits."""
    cells, counts = values["budgets"][0]["bins"][0]
    values["budgets"][0]["bins"][0] = [[0], [sum(counts)]]
    assert cells


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("format_version", 2), "`format_version` 1, got 2"),
        (lambda values: values.pop("format_version"), "`format_version` 1, got None"),
        (lambda values: values.pop("budgets"), "must have the keys"),
        (changed("extra", 1), "must have the keys"),
        (changed("num_cells", 2000), "`num_cells` must be"),
        (changed("page_counts", [4]), "one entry for each of the 1 page counts"),
        (changed("page_counts", [8, 4]), "must ascend"),
        (changed("num_bins", 4), "for each of the 4 bins"),
        (changed("method", "guess"), "`method` must be one of"),
        (changed("bin_tokens", 100), "multiple of `page_size`"),
        (changed("recipe", {"page_size": 16}), "`recipe` must have the fields"),
        (changed("recipe", "page_size", 20), "`page_size` must be a power of two"),
        (changed("budgets", 0, {}), r"`budgets\[0\]` is damaged: it must have the keys"),
        (changed("budgets", 1, "sums", [1, 2]), r"`budgets\[1\]` is damaged: `bins` and `sums` must have one entry"),
        (changed("budgets", 0, "sums", 0, -1), "a sum does not fit"),
        (changed("budgets", 0, "sums", 0, 10**12), "a sum does not fit"),
        (changed("budgets", 0, "sums", 0, 10**30), "damaged"),
        (changed("budgets", 0, "sums", 0, 1.5), "a list of integers holds something else"),
        (changed("budgets", 0, "bins", 0, 1, 0, -3), "a count is not between 1 and .*: -3"),
        (changed("budgets", 0, "bins", 0, 1, 0, 0), "a count is not between 1"),
        (changed("budgets", 0, "bins", 0, 1, 0, True), "a list of integers holds something else"),
        (changed("budgets", 0, "bins", 0, 0, 0, -1), "cells of a histogram must ascend from 0"),
        (changed("budgets", 0, "bins", 0, 0, -1, 10**6), "cells of a histogram must ascend from 0"),
        (changed("budgets", 0, "bins", 0, [[5, 5], [3, 4]]), "cells of a histogram must ascend from 0"),
        (changed("budgets", 0, "bins", 0, [[1, 2], [3]]), "has 2 cells and 1 counts"),
        (changed("budgets", 0, "bins", 0, [1]), "a list of cells and a list of counts"),
        (changed("budgets", 0, "sequences", []), "do not add up"),
        (moved_count, "a sum does not fit"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, message):
    values = filled()[0].to_dict()
    change(values)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message) as error:
        AcceptanceTable.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, text):
    values = filled()[0].to_dict()
    values["budgets"][0]["sums"][0] = "HERE"
    path = tmp_path / "table.json"
    path.write_text(json.dumps(values).replace('"HERE"', text))
    with pytest.raises(ValueError, match="not a finite number"):
        AcceptanceTable.load(path)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "table.json"
    for text, message in (("[]", "JSON object at its top level"), ("{", "not valid JSON"), ("{}", "format_version")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            AcceptanceTable.load(path)


# Text


def test_description_shows_every_cell():
    table = make_table()
    table.update(0, np.full(1200, 20), np.full(1200, 0.7314))
    table.update(1, np.array([60, 61]), np.array([0.25, 0.75]))
    lines = table.describe().splitlines()
    assert lines[0].startswith("Acceptance rate of tiny, teacher forced (page_size 16, page_score mean_query")
    assert lines[2] == "Quantile 0.05 by pages kept" and lines[8] == "Mean by pages kept"
    assert lines[3].split() == ["cached", "length", "tokens", "4", "pages", "8", "pages"]
    quantile = table.quantile(0.05)
    assert lines[4].split() == ["0-64", "1,200", f"{quantile[0, 0]:.4f}", "-"]
    assert lines[5].split() == ["64-128", "2", "-", f"{quantile[1, 1]:.4f}"]
    assert lines[6].split() == ["128-192", "0", "-", "-"]
    assert lines[10].split() == ["0-64", "1,200", "0.7314", "-"]
    assert lines[11].split() == ["64-128", "2", "-", "0.5000"]
    assert len({len(line) for line in lines[3:7]}) == 1
    assert "Quantile 0.5 by" in table.describe(0.5)
