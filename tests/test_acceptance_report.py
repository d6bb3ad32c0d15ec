import io
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from sparrow_trl.acceptance import AcceptanceTracker
from sparrow_trl.acceptance_report import (
    acceptance_table,
    plot_acceptance,
    print_acceptance_table,
    render_acceptance_table,
)
from sparrow_trl.schedule import SparsityScheduleConfig


@pytest.fixture
def tracker():
    """Three bins of 64 tokens: one that holds the tail, one that does not, one with too few tokens."""
    rng = np.random.default_rng(0)
    tracker = AcceptanceTracker(SparsityScheduleConfig(top_k_pages=[5], bin_tokens=64))
    for length, rates in (
        (10, np.linspace(0.9, 1.0, 1001)),
        (70, np.concatenate([0.999 * rng.beta(2, 0.7, 400), np.ones(600)])),
        (130, np.full(20, 0.25)),
    ):
        lower = torch.tensor(rates, dtype=torch.float32)
        tracker.update(lower, (lower + 0.01).clamp(max=1), torch.full(lower.shape, length))
    tracker.end_step()
    return tracker


@pytest.fixture
def log_history():
    return [
        {"step": 1, "loss": 0.5, "acceptance/tail": 0.8, "acceptance/mean": 0.95},
        {"step": 2, "loss": 0.4},
        {"step": 3, "acceptance/tail": None, "acceptance/mean": None},
        {"step": 4, "acceptance/tail": 0.9, "acceptance/mean": 0.97},
        {"train_runtime": 3.0},
    ]


def empty_tracker():
    return AcceptanceTracker(SparsityScheduleConfig(top_k_pages=[5]))


class TestTable:
    def test_cells(self, tracker):
        header, rows = acceptance_table(tracker)
        assert header == [
            "cached length", "tokens", "mean", "tail (q05)", "below 0.5", "bound gap", "Beta fit KS",
        ]  # fmt: skip
        assert [row[:2] for row in rows] == [["0-64", "1,001"], ["64-128", "1,000"], ["128-192", "20"]]
        assert rows[0][2:6] == ["0.9500", "0.9050", "0.00%", "0.0095"]
        assert rows[2][2:] == ["0.2500", "-", "100.00%", "0.0100", "-"]
        for row in rows[:2]:
            assert 0 < float(row[6]) < 1

    def test_plain_text(self, tracker):
        text = render_acceptance_table(tracker, target=0.6)
        lines = text.splitlines()
        assert len({len(line) for line in lines[:5]}) == 1
        tail = tracker.metrics()["acceptance/tail"]
        assert lines[-1] == f"Tail acceptance (lowest bin) {tail:.4f}, below the target of 0.6."
        assert tail < 0.6
        assert "at or above the target of 0.4." in render_acceptance_table(tracker, target=0.4)
        assert "target of 0.86" in render_acceptance_table(tracker)
        assert "No bin has the 200 tokens" in render_acceptance_table(empty_tracker())

    def test_target_is_the_schedules_when_it_has_one(self):
        tracker = AcceptanceTracker(SparsityScheduleConfig(top_k_pages=[5], target_acceptance=0.5), min_tokens=1)
        tracker.update(torch.tensor([0.6]), torch.tensor([0.6]), torch.tensor([3]))
        tracker.end_step()
        assert "at or above the target of 0.5." in render_acceptance_table(tracker)

    def test_rich_on_a_terminal(self, tracker):
        console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system="standard")
        print_acceptance_table(tracker, console=console)
        text = console.file.getvalue()
        assert "┃" in text and "Tail acceptance (lowest bin)" in text
        assert "\x1b[32m0.9050" in text
        assert f"\x1b[31m{tracker.metrics()['acceptance/tail']:.4f}" in text

    def test_plain_elsewhere(self, tracker, capsys):
        print_acceptance_table(tracker)
        assert capsys.readouterr().out == render_acceptance_table(tracker) + "\n"

    def test_plain_without_rich(self, tracker, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich.console", None)
        print_acceptance_table(tracker)
        assert capsys.readouterr().out == render_acceptance_table(tracker) + "\n"


class TestPlot:
    def test_draws_the_statistics(self, tracker, log_history):
        figure = plot_acceptance(tracker, log_history, target=0.7)
        distributions, bins, steps = (ax for ax in figure.axes if ax.get_title())
        lines = {line.get_label(): line for ax in (distributions, bins, steps) for line in ax.get_lines()}
        rates, shares = lines["64-128"].get_data()
        expected_rates, expected_shares = tracker.cumulative(64)
        assert np.array_equal(rates, expected_rates) and np.array_equal(shares, expected_shares)

        statistics = tracker.bin_statistics()
        centers, means = bins.get_lines()[0].get_data()
        assert list(centers) == [32, 96, 160] and list(means) == [entry.mean for entry in statistics]
        assert list(lines["tail (q = 0.05)"].get_ydata()) == [entry.tail for entry in statistics[:2]]
        assert list(lines["target 0.7"].get_ydata()) == [0.7, 0.7]
        assert [list(data) for data in lines["tail (lowest bin)"].get_data()] == [[1, 4], [0.8, 0.9]]

    def test_without_a_history_there_are_two_panels(self, tracker):
        figure = plot_acceptance(tracker, [{"step": 1, "loss": 1.0}])
        assert len([ax for ax in figure.axes if ax.get_title()]) == 2

    def test_many_bins_have_a_colorbar_in_place_of_a_legend(self):
        tracker = AcceptanceTracker(SparsityScheduleConfig(top_k_pages=[5], bin_tokens=64))
        lengths = torch.arange(1, 64 * 20)
        tracker.update(torch.ones(len(lengths)), torch.ones(len(lengths)), lengths)
        tracker.end_step()
        figure = plot_acceptance(tracker)
        assert figure.axes[0].get_legend() is None
        assert any("cached length" in ax.get_ylabel() for ax in figure.axes)
        figure.savefig(io.BytesIO())

    def test_leaves_the_users_pyplot_figures_alone(self, tracker):
        import matplotlib.pyplot as plt

        before = plt.get_fignums()
        plot_acceptance(tracker)
        assert plt.get_fignums() == before
