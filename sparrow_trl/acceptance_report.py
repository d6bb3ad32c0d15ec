"""What a run's acceptance statistics look like: a table per bin of cached length, and a picture."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .acceptance import AcceptanceTracker


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console


# Training is stable with the tail acceptance above this, for Qwen3 from 1.7B to 14B (paper, section 3.2).
PAPER_THRESHOLD = 0.86

LOWEST_SHARE = 1e-3


def acceptance_table(tracker: AcceptanceTracker) -> tuple[list[str], list[list[str]]]:
    """
    Header and rows of the table, as text.

    Args:
        tracker ([`AcceptanceTracker`]):
            The statistics.

    Returns:
        `tuple[list[str], list[list[str]]]`: one row per bin of cached length. The tail of a bin with too few tokens,
        and a Beta fit that could not be made, are `"-"`.
    """
    schedule = tracker.schedule
    header = [
        "cached length",
        "tokens",
        "mean",
        f"tail (q{100 * schedule.tail_quantile:02.3g})",
        "below 0.5",
        "bound gap",
        "Beta fit KS",
    ]
    rows = []
    for entry in tracker.bin_statistics():
        fit = tracker.fit_beta_tail(entry.start)
        rows.append(
            [
                f"{entry.start:,}-{entry.start + schedule.bin_tokens:,}",
                f"{entry.tokens:,}",
                f"{entry.mean:.4f}",
                f"{entry.tail:.4f}" if entry.tokens >= tracker.min_tokens else "-",
                f"{entry.share_below_half:.2%}",
                f"{entry.bound_gap:.4f}",
                f"{fit.ks_distance:.3f}" if fit else "-",
            ]
        )
    return header, rows


def render_acceptance_table(tracker: AcceptanceTracker, target: float | None = None) -> str:
    """
    The table as plain text, with a line that compares the tail acceptance with its target.

    Args:
        tracker ([`AcceptanceTracker`]):
            The statistics.
        target (`float`, *optional*):
            Tail acceptance to hold; by default the schedule's, else the paper's 0.86.
    """
    header, rows = acceptance_table(tracker)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, _verdict(tracker, target)])


def print_acceptance_table(
    tracker: AcceptanceTracker, target: float | None = None, console: "Console | None" = None
) -> None:
    """
    Print the table: with rich on a terminal or in a notebook, as plain text elsewhere.

    Args:
        tracker ([`AcceptanceTracker`]):
            The statistics.
        target (`float`, *optional*):
            As in [`render_acceptance_table`].
        console (`rich.console.Console`, *optional*):
            Where to print; by default standard output.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        sys.stdout.write(render_acceptance_table(tracker, target) + "\n")
        return
    console = console or Console()
    if not (console.is_terminal or console.is_jupyter):
        console.file.write(render_acceptance_table(tracker, target) + "\n")
        return
    header, rows = acceptance_table(tracker)
    table = Table(title="Acceptance of sparse rollouts")
    for name in header:
        table.add_column(name, justify="right")
    target = _target(tracker, target)
    for row, entry in zip(rows, tracker.bin_statistics(), strict=True):
        if entry.tokens >= tracker.min_tokens:
            color = "green" if entry.tail >= target else "red"
            row[3] = f"[{color}]{row[3]}[/{color}]"
        table.add_row(*row)
    console.print(table)
    console.print(_verdict(tracker, target), highlight=False)


def plot_acceptance(
    tracker: AcceptanceTracker, log_history: Iterable[dict[str, Any]] = (), target: float | None = None
) -> "Figure":
    """
    Draw the distribution of the acceptance rate per bin of cached length, the tail of each bin against the target, and
    the tail over the training steps when the log history has it.

    Args:
        tracker ([`AcceptanceTracker`]):
            The statistics.
        log_history (`Iterable[dict[str, Any]]`, *optional*):
            Logged metrics, as in `trainer.state.log_history`.
        target (`float`, *optional*):
            As in [`render_acceptance_table`].

    Returns:
        `matplotlib.figure.Figure`
    """
    from matplotlib.figure import Figure

    target = _target(tracker, target)
    steps = [entry for entry in log_history if entry.get("acceptance/tail") is not None and "step" in entry]
    num_panels = 3 if steps else 2
    # A figure of its own, not pyplot's: the callback may run in any thread and must not touch the user's figures.
    figure = Figure(figsize=(5 * num_panels, 4), layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)
    axes = figure.subplots(1, num_panels)
    _plot_distributions(axes[0], tracker, target)
    _plot_bins(axes[1], tracker, target)
    if steps:
        _plot_steps(axes[2], steps, target)
    return figure


def _plot_distributions(ax: "Axes", tracker: AcceptanceTracker, target: float) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    bins = tracker.bin_statistics()
    bin_tokens = tracker.schedule.bin_tokens
    colors = colormaps["viridis_r"](np.linspace(0.1, 1, len(bins)))
    for entry, color in zip(bins, colors, strict=True):
        rates, shares = tracker.cumulative(entry.start)
        ax.plot(rates, shares, color=color, linewidth=1.5, label=f"{entry.start:,}-{entry.start + bin_tokens:,}")
    quantile = tracker.schedule.tail_quantile
    ax.axhline(quantile, color="0.5", linestyle=":", linewidth=1)
    ax.annotate(
        f"q = {quantile:g}", (0.01, quantile), textcoords="offset points", xytext=(0, 3), color="0.4", fontsize=8
    )
    ax.axvline(target, color="tab:red", linestyle="--", linewidth=1)
    ax.set_yscale("log")
    ax.set_xlim(0, 1)
    ax.set_ylim(min(LOWEST_SHARE, quantile / 10), 1)
    ax.set_xlabel("acceptance rate")
    ax.set_ylabel("share of tokens below")
    ax.set_title("Distribution by cached length")
    if len(bins) <= 8:
        ax.legend(title="cached length", fontsize=8, title_fontsize=8, loc="upper left")
    else:
        edges = [entry.start for entry in bins] + [bins[-1].start + bin_tokens]
        mappable = ScalarMappable(BoundaryNorm(edges, len(bins)), colormaps["viridis_r"].resampled(len(bins)))
        colorbar = ax.figure.colorbar(mappable, ax=ax, label="cached length (tokens)", spacing="proportional")
        colorbar.ax.yaxis.set_major_formatter("{x:,.0f}")


def _plot_bins(ax: "Axes", tracker: AcceptanceTracker, target: float) -> None:
    bin_tokens = tracker.schedule.bin_tokens
    bins = tracker.bin_statistics()
    measured = [entry for entry in bins if entry.tokens >= tracker.min_tokens]
    counts = ax.twinx()
    counts.bar(
        [entry.start for entry in bins],
        [entry.tokens for entry in bins],
        width=bin_tokens,
        align="edge",
        color="0.9",
        edgecolor="white",
    )
    counts.set_ylabel("tokens measured", color="0.5", loc="bottom")
    counts.tick_params(axis="y", colors="0.5")
    most = max(entry.tokens for entry in bins)
    counts.set_ylim(0, 3 * most)
    counts.set_yticks([0, most], ["0", f"{most:,}"])
    # The bars belong behind the curves, which are on the other axes.
    ax.set_zorder(counts.get_zorder() + 1)
    ax.patch.set_visible(False)

    for entries, field, label, style in (
        (bins, "mean", "mean", {"color": "tab:blue", "marker": "o", "linestyle": "-", "alpha": 0.6}),
        (measured, "tail", f"tail (q = {tracker.schedule.tail_quantile:g})", {"color": "black", "marker": "o"}),
    ):
        centers = [entry.start + bin_tokens / 2 for entry in entries]
        ax.plot(centers, [getattr(entry, field) for entry in entries], label=label, markersize=4, **style)
    ax.axhline(target, color="tab:red", linestyle="--", linewidth=1, label=f"target {target:g}")
    lowest = min([target, *(entry.tail for entry in measured), *(entry.mean for entry in bins)])
    ax.set_ylim(max(0, lowest - 0.35 * (1 - lowest) - 0.02), 1.005)
    ax.set_xlim(left=0)
    ax.locator_params(axis="x", nbins=6)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("cached length (tokens)")
    ax.set_ylabel("acceptance rate")
    ax.set_title("Tail acceptance by cached length")
    _legend_below(ax)


def _plot_steps(ax: "Axes", steps: list[dict[str, Any]], target: float) -> None:
    numbers = [entry["step"] for entry in steps]
    marker = "o" if len(steps) <= 50 else None
    means = [(entry["step"], entry["acceptance/mean"]) for entry in steps if entry.get("acceptance/mean") is not None]
    if means:
        ax.plot(*zip(*means, strict=True), color="tab:blue", alpha=0.6, marker=marker, markersize=3, label="mean")
    tails = [entry["acceptance/tail"] for entry in steps]
    ax.plot(numbers, tails, color="black", marker=marker, markersize=3, label="tail (lowest bin)")
    ax.axhline(target, color="tab:red", linestyle="--", linewidth=1, label=f"target {target:g}")
    ax.set_ylim(top=1.005)
    ax.set_xlabel("step")
    ax.set_ylabel("acceptance rate")
    ax.set_title("Tail acceptance over training")
    ax.locator_params(axis="x", integer=True)
    _legend_below(ax)


def _legend_below(ax: "Axes") -> None:
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)


def _target(tracker: AcceptanceTracker, target: float | None) -> float:
    return target if target is not None else tracker.schedule.target_acceptance or PAPER_THRESHOLD


def _verdict(tracker: AcceptanceTracker, target: float | None) -> str:
    target = _target(tracker, target)
    tail = tracker.metrics().get("acceptance/tail")
    if tail is None:
        return f"No bin has the {tracker.min_tokens} tokens that a tail acceptance needs."
    side = "at or above" if tail >= target else "below"
    return f"Tail acceptance (lowest bin) {tail:.4f}, {side} the target of {target:g}."
