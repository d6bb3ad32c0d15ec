"""
Draw the figures of docs/concepts.md and docs/schedules.md, from the package's own functions.

    python scripts/draw_concepts.py [--output docs/images]

Keys, queries and token distributions are made up, with a fixed seed; schedules are the published ones.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sparrow_attention import page_landmarks, select_pages
from sparrow_trl import SparsityScheduleConfig, acceptance_rate
from sparrow_trl.acceptance_report import PAPER_THRESHOLD
from sparrow_trl.pictures import save_figure


IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
BLUE, ORANGE, GREY, RED = "#3b6fb6", "#e08a2b", "#d9dde3", "#c0392b"


def make_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def draw_schedules() -> Figure:
    """The budgets of a published schedule, and what those of one target read."""
    figure = make_figure(10, 3.8)
    left, right = figure.subplots(1, 2)
    SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86").plot(left)
    left.set_title("qwen3-1.7b-0.86: budget of a sparse layer")
    left.set_ylim(0, 8000)
    lengths = np.arange(16, 40_001, 16)
    for size, color in (("1.7b", BLUE), ("4b", ORANGE), ("8b", "#4d9a6a"), ("14b", "#7d5ba6")):
        schedule = SparsityScheduleConfig.from_preset(f"qwen3-{size}-0.86")
        shares = [min(1, schedule.budget(int(length)) / length) for length in lengths]
        right.plot(lengths, shares, color=color, label=f"qwen3-{size}-0.86")
    right.set(xlim=(0, 40_000), ylim=(0, 1.02), xlabel="cached length (tokens)", ylabel="share of the pages")
    right.set_title("what a sparse layer reads")
    right.legend(frameon=False)
    for ax in (left, right):
        ax.set_xticks(range(0, 40_001, 10_000))
        ax.xaxis.set_major_formatter("{x:,.0f}")
    left.yaxis.set_major_formatter("{x:,.0f}")
    return figure


def draw_pages() -> Figure:
    """The pages that the queries of one kv head keep, by `select_pages`, with keys that come in topics."""
    page_size, pages, head_dim, top_k = 16, 40, 64, 5
    generator = torch.Generator().manual_seed(7)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    topics = 1.5 * randn(8, head_dim)
    topic_of_page = torch.randint(8, (pages,), generator=generator)
    keys = topics[topic_of_page][:, None] + randn(pages, page_size, head_dim)
    lengths = torch.arange(9, pages + 1) * page_size
    topic_of_query = (torch.arange(len(lengths)) // 4) % 8
    queries = topics[topic_of_query][:, None] + randn(len(lengths), 2, head_dim)
    landmarks = page_landmarks(keys)[None, None].expand(len(lengths), 1, -1, -1, -1)
    kept = select_pages(
        queries, landmarks, lengths, torch.full_like(lengths, top_k), page_size=page_size, sink_pages=1, recent_pages=2
    )[:, 0]

    covered = torch.arange(pages) < (lengths // page_size)[:, None]
    reserved = (torch.arange(pages) == 0) | (torch.arange(pages) >= (lengths // page_size)[:, None] - 2)
    state = torch.where(covered, torch.where(kept, torch.where(reserved, 2, 3), 1), 0)
    figure = make_figure(8, 4.4)
    ax = figure.subplots()
    ax.pcolormesh(
        np.arange(pages + 1),
        np.arange(9, pages + 2) - 0.5,
        state.numpy(),
        cmap=ListedColormap(["white", GREY, BLUE, ORANGE]),
        vmin=0,
        vmax=3,
        edgecolors="white",
        linewidth=0.5,
    )
    ax.invert_yaxis()
    ax.set(xlabel="page of 16 tokens", ylabel="pages cached when the query comes")
    ax.set_title("Pages that one kv head reads, a query every 16 tokens")
    names = ((BLUE, "first and last pages"), (ORANGE, "5 best-scored pages"), (GREY, "cached, not read"))
    ax.legend(handles=[Patch(color=color, label=label) for color, label in names], loc="upper right", frameon=False)
    return figure


def draw_acceptance() -> Figure:
    """What the acceptance rate is, and two sets of tokens with one mean and different tails."""
    figure = make_figure(10, 3.8)
    left, right = figure.subplots(1, 2)

    dense = torch.tensor([2.2, 1.6, 0.6, 0.2, -0.4, -1.0])
    sparse = torch.tensor([1.2, 1.9, 1.1, -0.4, -0.2, -1.2])
    p, q = dense.softmax(0).numpy(), sparse.softmax(0).numpy()
    tokens = np.arange(len(p))
    left.bar(tokens - 0.2, p, 0.4, color=BLUE, label="p, dense policy")
    left.bar(tokens + 0.2, q, 0.4, color=ORANGE, label="q, sparse sampler")
    for token, share in zip(tokens, np.minimum(p, q), strict=True):
        left.plot([token - 0.4, token + 0.4], [share, share], color="black", linewidth=2)
    left.plot([], [], color="black", linewidth=2, label="min(p, q)")
    left.set_xticks(tokens, ["A", "B", "C", "D", "E", "F"])
    left.set(xlabel="next token", ylabel="probability", ylim=(0, 0.62))
    left.set_title(f"one token: acceptance rate {acceptance_rate(dense, sparse):.2f}")
    left.legend(frameon=False)

    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 50, generator=generator)
    noise = torch.randn(20_000, 50, generator=generator)
    all_off = acceptance_rate(logits, logits + 0.148 * noise)
    few_off = acceptance_rate(logits, logits + torch.where(torch.arange(20_000)[:, None] % 14 == 0, 2.5, 0.02) * noise)
    for rates, color, name in ((all_off, BLUE, "all a little off"), (few_off, RED, "a few far off")):
        label = f"{name}: mean {rates.mean():.2f}, tail {rates.quantile(0.05):.2f}"
        right.plot(rates.sort().values.numpy(), np.linspace(0, 1, len(rates)), color=color, label=label)
    right.axhline(0.05, color="0.5", linestyle=":", linewidth=1)
    right.annotate("5% of the tokens", (0.02, 0.055), color="0.35", fontsize=9)
    right.axvline(PAPER_THRESHOLD, color="0.5", linestyle="--", linewidth=1)
    right.annotate(f"{PAPER_THRESHOLD}", (PAPER_THRESHOLD - 0.01, 0.45), color="0.35", fontsize=9, ha="right")
    right.set_yscale("log")
    right.set(xlim=(0, 1), ylim=(1e-3, 1), xlabel="acceptance rate", ylabel="share of tokens below")
    right.set_title("many tokens: one mean, two tails")
    right.legend(frameon=False, loc="upper left")
    return figure


FIGURES = {
    "concepts_pages.png": draw_pages,
    "concepts_acceptance.png": draw_acceptance,
    "concepts_schedules.png": draw_schedules,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder for the figures")
    folder = parser.parse_args().output
    for name, draw in FIGURES.items():
        save_figure(draw(), folder / name)
        print(f"Wrote {folder / name}, {math.ceil((folder / name).stat().st_size / 1024)} KiB")


if __name__ == "__main__":
    main()
