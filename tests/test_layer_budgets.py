"""Levels of groups of layers: what they read, the lowest that hold, and their exchange between groups."""

import itertools

import numpy as np
import pytest

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.bench_traffic import ModelShape, step_traffic
from sparrow_trl.cost_model import page_equivalents, read_bytes
from sparrow_trl.layer_budgets import LayerBudgets, fit_levels, layer_ranges, lower_levels


SHAPE = ModelShape(num_layers=6, kv_heads=2, head_dim=32, weight_bytes=1000, total_weight_bytes=1000, element_bytes=2)
RECIPE = SparsityScheduleConfig(
    top_k_pages=[0], bin_tokens=256, page_score="group_softmax", landmarks_per_page=2, dense_layers=[]
)
LADDER = (4, 6, 8, 12, 16, 24, 32, 48)


def budgets_of(groups=((0, 1, 2, 3, 4, 5),), judged=(True,) * 4, recipe=RECIPE, first_length=33, ladder=LADDER):
    return LayerBudgets(recipe, [list(group) for group in groups], SHAPE, np.array(judged), first_length, ladder)


class Measure:
    """Answers from a rule, and remembers what was measured (once, as measurements are kept) and what held."""

    def __init__(self, rule):
        self.rule, self.asked, self.held = rule, [], []

    def __call__(self, levels):
        holds = np.array(self.rule(levels), dtype=bool)
        if not any((levels == earlier).all() for earlier in self.asked):
            self.asked.append(levels.copy())
            if holds.all():
                self.held.append(levels.copy())
        return holds


@pytest.mark.parametrize(
    ("layers", "keys"), [([3], ["3"]), ([11, 3, 9, 10], ["3", "9-11"]), ([0, 1], ["0-1"]), ([], [])]
)
def test_layers_become_ranges(layers, keys):
    assert layer_ranges(layers) == keys


def test_read_bytes_are_those_of_single_steps():
    schedule = SparsityScheduleConfig(
        top_k_pages=[4, 20], bin_tokens=256, dense_layers=[0], layer_top_k_pages={"2-3": [1, 9]}
    )
    read = read_bytes(SHAPE, 100, 700, schedule)
    for length in (100, 101, 240, 241, 399, 512, 700):
        traffic = step_traffic(SHAPE, 1, [length], schedule)
        assert read[length - 100] == pytest.approx(traffic.kv + traffic.landmarks)
    assert page_equivalents(SHAPE, read_bytes(SHAPE, 160, 160)[0]) == pytest.approx(10)
    with pytest.raises(ValueError, match="lengths from 1"):
        read_bytes(SHAPE, 0, 5)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dense_layers", [[], [5]])
def test_bytes_of_levels_are_those_of_their_schedule(page_size, dense_layers):
    recipe = SparsityScheduleConfig(top_k_pages=[0], bin_tokens=256, page_size=page_size, dense_layers=dense_layers)
    groups = [[1, 3], [0, 2, 4], [5]][: 3 - len(dense_layers)]
    budgets = budgets_of(groups, recipe=recipe)
    rng = np.random.default_rng(0)
    levels = budgets.non_decreasing(rng.integers(0, len(budgets.page_counts), (len(groups), 4)))
    schedule = budgets.schedule(levels)
    for group, row in zip(groups, levels, strict=True):
        for index, level in enumerate(row):
            first, last = schedule.bin_lengths(index)
            pages = last // page_size
            kept = min(pages, schedule.budget(last, group[0]) // page_size)
            assert kept == min(pages, budgets.page_counts[level])
    lengths = range(33, budgets.recipe.bin_lengths(3)[1] + 1)
    traffic = step_traffic(SHAPE, 1, lengths, schedule)
    assert budgets.total_bytes(levels) == pytest.approx(traffic.kv + traffic.landmarks)
    last_bin = [length for length in lengths if schedule.bin_index(length) == 3]
    traffic = step_traffic(SHAPE, 1, last_bin, schedule)
    assert budgets.bin_bytes(levels)[3] == pytest.approx(traffic.kv + traffic.landmarks)


def test_the_ladder_ends_with_the_context():
    budgets = budgets_of()
    assert budgets.page_counts.tolist() == [4, 6, 8, 12, 16, 24, 32, 48, 63]
    assert budgets.page_counts[budgets.full].tolist() == [16, 32, 48, 63]
    # The reserved pages are three of 64 tokens, as many as 12 of 16.
    large = SparsityScheduleConfig(top_k_pages=[0], bin_tokens=256, page_size=64, dense_layers=[])
    assert budgets_of(recipe=large).page_counts.tolist() == [3, 4, 6, 8, 12, 15]


def test_groups_that_read_everything_are_dense():
    budgets = budgets_of([[0, 4], [1, 2], [3, 5]])
    levels = np.array([budgets.full, [0, 1, 1, 1], [0, 1, 1, 1]])
    schedule = budgets.schedule(levels)
    assert schedule.dense_layers == [0, 4] and schedule.top_k_pages == [1, 3, 3, 3]
    assert schedule.layer_top_k_pages is None
    assert budgets.schedule(np.array([budgets.full] * 3)).is_dense
    levels[2] = 2
    schedule = budgets.schedule(levels)
    assert schedule.dense_layers == [0, 4]
    assert {layer: schedule.top_k(1000, layer) for layer in (1, 2, 3, 5)} == {1: 3, 2: 3, 3: 5, 5: 5}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("warm", [False, True])
def test_fit_finds_the_lowest_levels(seed, warm):
    budgets = budgets_of()
    rng = np.random.default_rng(seed)
    need = np.minimum(rng.integers(0, 9, 4), budgets.full)
    lowest = budgets.non_decreasing(need[None])[0]
    measure = Measure(lambda levels: levels[0] >= need)
    start = np.clip(lowest + rng.integers(-1, 2, 4), 0, budgets.full) if warm else None
    assert fit_levels(budgets, measure, start).tolist() == lowest.tolist()
    assert any((lowest == held).all() for held in measure.held)
    assert len(measure.asked) <= 7


def test_fit_raises_shorter_contexts_for_what_reaches_longer_ones():
    budgets = budgets_of()
    # The last bin holds only when the second reads its 24 pages, whatever it reads itself.
    measure = Measure(lambda levels: [True, True, True, levels[0, 1] >= 5])
    levels = fit_levels(budgets, measure)
    assert levels[1] == 5
    for failing in (0, 3):
        with pytest.raises(ValueError, match="Even with all pages"):
            fit_levels(budgets, lambda levels, failing=failing: np.arange(4) != failing)


def test_bins_that_are_not_judged_follow_their_neighbours():
    budgets = budgets_of(judged=[False, True, False, True, False])
    assert budgets.num_bins == 4
    measure = Measure(lambda levels: np.array([False, levels[0, 1] >= 2, False, levels[0, 3] >= 7]))
    measure.rule, rule = (lambda levels: rule(levels) | np.array([True, False, True, False])), measure.rule
    assert fit_levels(budgets, measure).tolist() == [2, 2, 2, 7]


def additive(budgets, weights, limit):
    """A tail that falls by a weight over the pages, in each layer, and holds below `limit`."""

    def rule(levels):
        pages = budgets.page_counts[levels]
        sizes = np.array([len(group) for group in budgets.groups])
        return ((sizes * weights)[:, None] / pages).sum(0) <= limit

    return rule


@pytest.mark.parametrize("weights", [(30, 3, 1), (30, 15, 1), (10, 9, 1), (5, 5, 5)])
def test_exchange_comes_near_the_best_levels(weights):
    ladder = tuple(range(4, 25, 2)) + tuple(range(28, 61, 4))
    budgets = budgets_of([[0], [1, 2], [3, 4, 5]], ladder=ladder)
    limit = np.dot(weights, [1, 2, 3]) / 34 * np.array([2.85, 1.9, 1.425, 1.235])
    measure = Measure(additive(budgets, np.array(weights), limit))
    uniform = fit_levels(budgets, measure)
    start = np.tile(uniform, (3, 1))
    levels = lower_levels(budgets, measure, start)
    assert any((levels == held).all() for held in measure.held)
    assert (np.diff(levels, axis=1) >= 0).all()
    best = [np.inf] * 4
    for column in itertools.product(range(len(budgets.page_counts)), repeat=3):
        column = np.minimum(np.array(column)[:, None], budgets.full)
        holds, read = measure.rule(column), budgets.bin_bytes(column)
        best = np.where(holds, np.minimum(best, read), best)
    # One table for all reads up to 1.72 times the best.
    assert (budgets.bin_bytes(levels) <= 1.06 * best).all()
    assert len(measure.asked) <= 60


def test_bins_keep_what_they_had_where_a_move_fails_them():
    budgets = budgets_of([[0], [1, 2, 3, 4, 5]])
    start = np.array([[3, 4, 5, 6], [3, 4, 5, 6]])
    # Only the last two bins can spare anything, and only in the second group.
    measure = Measure(lambda levels: (levels >= start - np.array([[0, 0, 0, 0], [0, 0, 2, 2]])).all(0))
    levels = lower_levels(budgets, measure, start, steps=(2, 1))
    assert (levels[:, :2] == start[:, :2]).all() and (levels[1] >= [3, 4, 3, 4]).all()
    assert budgets.bin_bytes(levels)[3] < budgets.bin_bytes(start)[3]
    assert any((levels == held).all() for held in measure.held)


def test_a_mixture_that_falls_short_is_not_taken():
    budgets = budgets_of([[0, 1, 2, 3, 4, 5]])
    start = np.array([[3, 4, 5, 6]])
    # Any change of a shorter context reaches the last bin.
    measure = Measure(lambda levels: [True, True, True, (levels == start).all()])
    assert (lower_levels(budgets, measure, start) == start).all()


def test_exchange_ends_when_nothing_more_may_be_measured():
    budgets = budgets_of([[0], [1, 2, 3, 4, 5]])
    measure = Measure(lambda levels: [True] * 4)
    start = np.tile(budgets.full, (2, 1))
    levels = lower_levels(budgets, measure, start, may_measure=lambda: len(measure.asked) < 3)
    assert len(measure.asked) == 3 and (levels == measure.asked[-1]).all()
    untouched = lower_levels(budgets, measure, start, may_measure=lambda: False)
    assert (untouched == start).all()
