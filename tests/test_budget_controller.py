"""Closed-loop control of budgets against a simulated model whose tail follows from the pages kept."""

import numpy as np
import pytest

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.budget_controller import BudgetController


SCHEDULE = SparsityScheduleConfig(top_k_pages=[61, 61, 61, 61], bin_tokens=1024, dense_layers=[])
TARGET = 0.86


class Simulation:
    """
    Acceptance rates whose distance from 1 has an exponential distribution, and whose 5th percentile is
    `1 - difficulty * pages**-exponent`.
    """

    def __init__(self, difficulties, exponent=0.65, seed=0):
        self.difficulties, self.exponent = difficulties, exponent
        self.generator = np.random.default_rng(seed)

    def tail(self, index, schedule):
        pages = schedule.top_k(index * schedule.bin_tokens + 1) + schedule.sink_pages + schedule.recent_pages
        if pages * schedule.page_size >= schedule.bin_lengths(index)[1]:
            return 1.0
        return 1 - self.difficulties[index] * pages**-self.exponent

    def rates(self, schedule, tokens):
        result = {}
        for index in range(len(self.difficulties)):
            scale = (1 - self.tail(index, schedule)) / np.log(20)
            result[index] = np.clip(1 - scale * self.generator.exponential(size=tokens), 0, 1)
        return result

    def least_pages(self, target):
        """Budgets that hold `target` exactly."""
        return [(difficulty / (1 - target)) ** (1 / self.exponent) for difficulty in self.difficulties]


class BrokenTokens(Simulation):
    """Tokens are untouched or broken; broken ones are the `quantile` at `least` pages, and more by a power below."""

    def __init__(self, least, exponent, quantile, seed=0):
        super().__init__(least, exponent, seed)
        self.quantile = quantile

    def share(self, index, schedule):
        pages = schedule.top_k(index * schedule.bin_tokens + 1) + schedule.sink_pages + schedule.recent_pages
        return min(1.0, self.quantile * (self.difficulties[index] / pages) ** self.exponent)

    def tail(self, index, schedule):
        return 0.1 if self.share(index, schedule) > self.quantile else 0.999

    def rates(self, schedule, tokens):
        return {
            index: np.where(self.generator.random(tokens) < self.share(index, schedule), 0.1, 0.999)
            for index in range(len(self.difficulties))
        }


def make_controller(schedule=SCHEDULE, max_tokens=4080, **kwargs):
    return BudgetController(schedule, max_tokens, **{"target": TARGET, **kwargs})


@pytest.mark.parametrize("exponent", [0.5, 0.65, 0.8])
@pytest.mark.parametrize("start", [[5], [250]], ids=["from below", "from above"])
@pytest.mark.parametrize("seed", range(3))
def test_budgets_come_to_the_least_that_hold_the_target(exponent, start, seed):
    least = np.array([20, 30, 45, 60])
    simulation = Simulation((1 - TARGET) * least**exponent, exponent, seed)
    np.testing.assert_allclose(simulation.least_pages(TARGET), least)
    schedule = SparsityScheduleConfig(top_k_pages=start, bin_tokens=1024, dense_layers=[])
    controller = make_controller(schedule)
    history = []
    for _ in range(60):
        controller.update(simulation.rates(controller.schedule, tokens=600))
        history.append([simulation.tail(index, controller.schedule) for index in range(4)])
    assert np.min(history[20:]) > TARGET - 0.03
    pages = np.array(controller.schedule.top_k_pages) + 3
    assert least.sum() * 0.95 <= pages.sum() <= 1.15 * least.sum()


@pytest.mark.parametrize("exponent", [2, 4])
@pytest.mark.parametrize("start", [12, 60, 250])
@pytest.mark.parametrize("seed", range(3))
def test_budgets_do_not_fall_to_where_the_tail_breaks(exponent, start, seed):
    least = np.array([20.0, 30, 45, 60])
    simulation = BrokenTokens(least, exponent, quantile=0.01, seed=seed)
    schedule = SparsityScheduleConfig(top_k_pages=[start], bin_tokens=1024, dense_layers=[], tail_quantile=0.01)
    controller = make_controller(schedule, min_tokens=5000)
    broken = []
    for _ in range(60):
        controller.update(simulation.rates(controller.schedule, tokens=2500))
        broken.append([simulation.share(index, controller.schedule) > 0.01 for index in range(4)])
    assert not np.any(broken[20:])
    pages = np.array(controller.schedule.top_k_pages) + 3
    assert np.all(pages >= least) and pages.sum() <= (1.15 if exponent == 4 else 1.3) * least.sum()


def test_a_tail_that_holds_changes_nothing():
    simulation = Simulation([0.8, 0.9, 1.0, 1.0])
    at = [simulation.tail(index, SCHEDULE) for index in range(4)]
    controller = make_controller(target=min(at) - 0.005, headroom=0.06)
    changes = [controller.update(simulation.rates(controller.schedule, 400)) for _ in range(50)]
    assert sum(map(len, changes)) <= 2
    assert np.abs(np.array(controller.schedule.top_k_pages) - 61).max() <= 4


def test_few_tokens_raise_a_budget_only_where_they_leave_no_doubt():
    controller = make_controller(min_tokens=1000)
    rates = np.linspace(0.9, 1, 300)
    assert controller.update({1: rates}) == []
    rates[:40] = 0.3
    (first, *others) = controller.update({1: rates})
    assert (first.start, first.before) == (1024, 64) and first.after == 96
    assert "below 0.860" in first.reason and first.tokens == 600 and first.tail < 0.86
    # Longer bins keep no fewer, shorter ones are left alone.
    assert [change.start for change in others] == [2048, 3072]
    assert controller.schedule.top_k_pages == [60, 93, 93, 93]


def test_budgets_fall_only_with_enough_tokens_and_confidence():
    controller = make_controller(min_tokens=1000)
    assert controller.update({0: np.full(999, 0.99)}) == []
    (change,) = controller.update({0: np.full(1, 0.99)})
    assert (change.before, change.after) == (63, 42) and "above 0.860" in change.reason
    # No longer bin has fewer pages than one before it.
    assert controller.update({1: np.full(1000, 0.99)})[0].after == 43
    assert controller.update({2: np.full(1000, TARGET), 3: np.full(1000, 0.99)}) == []


def test_a_bin_that_was_raised_is_not_lowered_with_a_longer_one():
    controller = make_controller(min_tokens=1000)
    rates = np.linspace(0.9, 1, 300)
    rates[:40] = 0.3
    (first, *_) = controller.update({1: rates})
    assert (first.start, first.after) == (1024, 96)
    controller.update({3: np.full(1000, 0.99)})
    assert controller.schedule.top_k_pages[1] == 93


def test_bins_without_tokens_hold_no_longer_one_up():
    least = np.array([45, 60])
    simulation = Simulation((1 - TARGET) * least**0.65)
    # Prompts are longer than the first two bins.
    controller = make_controller(SparsityScheduleConfig(top_k_pages=[150], bin_tokens=1024, dense_layers=[]))
    changes = []
    for _ in range(60):
        table = SparsityScheduleConfig(
            top_k_pages=controller.schedule.top_k_pages[2:], bin_tokens=1024, dense_layers=[]
        )
        rates = simulation.rates(table, tokens=600)
        changes += controller.update({index + 2: values for index, values in rates.items()})
    pages = np.array(controller.schedule.top_k_pages) + 3
    assert least.sum() * 0.95 <= pages[2:].sum() <= 1.15 * least.sum()
    assert max(pages[:2]) <= pages[2]
    assert any(change.reason == "no more than from 1,024 on" for change in changes if change.start == 0)


def test_what_was_measured_before_a_change_is_forgotten():
    controller = make_controller(min_tokens=500)
    assert controller.update({1: np.full(500, 0.5)})
    assert controller.update({1: np.full(400, 0.87)}) == []
    assert controller.update({1: np.full(200, 0.87)}) == []


def test_the_floor_and_the_ceiling_hold():
    floor = SparsityScheduleConfig(top_k_pages=[10, 20, 30, 40], bin_tokens=1024, dense_layers=[])
    controller = make_controller(floor=floor, min_tokens=200)
    for _ in range(40):
        controller.update({index: np.full(200, 0.99) for index in range(4)})
    assert controller.schedule.top_k_pages == floor.top_k_pages
    for _ in range(40):
        controller.update({index: np.full(200, 0.1) for index in range(4)})
    # All pages of the longest context of each bin.
    assert [pages + 3 for pages in controller.schedule.top_k_pages] == [63, 127, 191, 255]
    assert controller.update({index: np.full(200, 0.1) for index in range(4)}) == []


def test_a_floor_may_have_other_bins_and_pages_and_holds_from_the_start():
    # What counts is the longest context of each bin.
    floor = SparsityScheduleConfig(top_k_pages=[3, 7], page_size=32, bin_tokens=2048, dense_layers=[])
    controller = make_controller(
        SparsityScheduleConfig(top_k_pages=[1], bin_tokens=1024, dense_layers=[]), floor=floor
    )
    assert [pages + 3 for pages in controller.schedule.top_k_pages] == [
        12,
        20,
        20,
        20,
    ]  # at the longest context of each bin


@pytest.mark.parametrize("target", [0.0, 1.0, 1.5])
def test_a_target_without_room_is_refused(target):
    with pytest.raises(ValueError, match="between 0 and 1, both excluded"):
        make_controller(target=target)


def test_a_high_target_leaves_budgets_room_to_fall():
    controller = make_controller(target=0.995, headroom=0.05, min_tokens=1000)
    assert controller.update({3: np.full(1000, 0.999), 0: np.full(1000, 0.999)})[0].after < 63


def test_many_bins_share_the_last_budget():
    controller = make_controller(SparsityScheduleConfig(top_k_pages=[4], bin_tokens=32), max_tokens=131072)
    assert len(controller.schedule.top_k_pages) == 256
    assert controller.update({3000: np.full(1000, 0.1)})[-1].start == 255 * 32


def test_tables_of_layers_follow():
    schedule = SparsityScheduleConfig(
        top_k_pages=[17, 37], bin_tokens=1024, dense_layers=[], layer_top_k_pages={"0-1": [7, 17]}
    )
    controller = make_controller(schedule, max_tokens=2000, min_tokens=200)
    controller.update({1: np.full(200, 0.2)})
    assert controller.schedule.top_k_pages == [17, 57]
    assert controller.schedule.layer_top_k_pages == {"0-1": [7, 27]}


def test_all_budgets_can_be_raised():
    controller = make_controller()
    changes = controller.raise_all(1.25, "a break")
    assert [change.after for change in changes] == [80, 80, 80]  # the first bin keeps all its 63 pages already
    assert {change.reason for change in changes} == {"a break"}


def test_one_entry_serves_all_bins():
    controller = make_controller(SparsityScheduleConfig.fixed(1024, bin_tokens=1024))
    assert len(controller.schedule.top_k_pages) == 4


def test_bins_shorter_than_the_reserved_pages():
    schedule = SparsityScheduleConfig(top_k_pages=[2**20], bin_tokens=32, dense_layers=[])
    controller = make_controller(schedule, max_tokens=200, min_tokens=200)
    # Bins of two pages: contexts of up to 1, 3, 5, ... pages, of which three are reserved.
    assert controller.schedule.top_k_pages == [0, 0, 2, 4, 6, 8, 10]
    others = {index: np.full(200, TARGET) for index in range(1, 6)}
    (change,) = controller.update({0: np.full(200, 0.1), **others, 6: np.full(200, 0.99)})
    assert (change.start, change.after) == (192, 11)
