"""Pictures of calibration: the tail over the length, the shape of the tail, and what a tail costs."""

from typing import TYPE_CHECKING

import numpy as np

from .acceptance import MAX_FIT_TOKENS, TAIL_BOUND, BetaTailFit, fit_beta_tail, tail_sample
from .acceptance_table import AcceptanceTable
from .bench_traffic import ModelShape, step_traffic
from .schedule import SparsityScheduleConfig


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_tails(
    table: AcceptanceTable,
    schedule: SparsityScheduleConfig | None = None,
    *,
    q: float = 0.05,
    min_tokens: int = 200,
) -> "Figure":
    """
    Draw the tail acceptance over the cached length, one line per budget (the paper's figure 4, top row).

    Args:
        table ([`~sparrow_trl.acceptance_table.AcceptanceTable`]):
            Acceptance rates of the budgets.
        schedule ([`SparsityScheduleConfig`], *optional*):
            Schedule of the same recipe whose budgets and target are marked.
        q (`float`, *optional*, defaults to `0.05`):
            Quantile of the tail.
        min_tokens (`int`, *optional*, defaults to `200`):
            Bins with fewer tokens are left out.

    Returns:
        `matplotlib.figure.Figure`
    """
    import matplotlib

    figure, ax = _figure()
    tails, enough = table.quantile(q), table.count >= min_tokens
    lengths = np.array([sum(table.schedule(0).bin_lengths(index)) / 2 for index in range(table.num_bins)])
    colors = matplotlib.colormaps["viridis"]
    for row, pages in enumerate(table.page_counts):
        color, shown = colors(row / max(1, len(table.page_counts) - 1)), enough[row]
        if shown.any():
            ax.plot(lengths[shown], tails[row][shown], marker="o", markersize=3, color=color, label=f"{pages}")
    if schedule is not None:
        _check_recipe(table, schedule)
        marks = []
        for column, length in enumerate(lengths):
            pages = schedule.budget(int(length)) // schedule.page_size
            row = table.page_counts.index(pages) if pages in table.page_counts else None
            if row is not None and enough[row, column]:
                marks.append((length, tails[row, column]))
        if marks:
            style = {"markersize": 10, "markerfacecolor": "none", "color": "C3"}
            ax.plot(*zip(*marks, strict=True), "o", **style, label="schedule")
        if schedule.target_acceptance is not None:
            ax.axhline(schedule.target_acceptance, color="0.5", linestyle="--", linewidth=1)
    ax.set_xlabel("cached length (tokens)")
    ax.set_ylabel(f"tail acceptance (q{100 * q:02.3g})")
    ax.set_title(table.model_name or "Tail acceptance by pages kept")
    ax.legend(title="pages", fontsize="x-small", ncols=2)
    return figure


def fit_cell(table: AcceptanceTable, budget_index: int, bin_index: int) -> BetaTailFit | None:
    """
    Beta fit of the acceptance rates below 0.999 in one cell (the paper's figure 3).

    Args:
        table ([`~sparrow_trl.acceptance_table.AcceptanceTable`]):
            Acceptance rates of the budgets.
        budget_index (`int`):
            Index of the budget in `table.page_counts`.
        bin_index (`int`):
            Bin of cached length.

    Returns:
        [`~sparrow_trl.acceptance.BetaTailFit`], or `None` where
        [`~sparrow_trl.acceptance.fit_beta_tail`] cannot fit.
    """
    return fit_beta_tail(_tail_sample(table, budget_index, bin_index))


def plot_distribution(table: AcceptanceTable, budget_index: int, bin_index: int) -> "Figure":
    """
    Draw the distribution of the acceptance rates below 0.999 in one cell, with its Beta fit (the paper's figure 3).

    Args:
        table ([`~sparrow_trl.acceptance_table.AcceptanceTable`]):
            Acceptance rates of the budgets.
        budget_index (`int`):
            Index of the budget in `table.page_counts`.
        bin_index (`int`):
            Bin of cached length.

    Returns:
        `matplotlib.figure.Figure`
    """
    from scipy import stats

    figure, ax = _figure()
    sample = _tail_sample(table, budget_index, bin_index)
    fit = fit_beta_tail(sample)
    tokens = table.count[budget_index, bin_index]
    if len(sample):
        label = f"{len(sample) if len(sample) < MAX_FIT_TOKENS else 'tokens'} below {TAIL_BOUND}"
        ax.hist(sample, bins=50, range=(0, TAIL_BOUND), density=True, color="C0", alpha=0.5, label=label)
    if fit is not None:
        rates = np.linspace(0, TAIL_BOUND, 502)[1:-1]
        density = stats.beta(fit.a, fit.b).pdf(rates / TAIL_BOUND) / TAIL_BOUND
        label = f"Beta({fit.a:.2f}, {fit.b:.2f}), KS distance {fit.ks_distance:.3f}"
        ax.plot(rates, density, color="C1", label=label)
    first, last = table.schedule(0).bin_lengths(bin_index)
    span = f"{first:,} to {last:,}"
    ax.set_title(f"{table.page_counts[budget_index]} pages, cached lengths {span} ({tokens:,} tokens)")
    ax.set_xlabel("acceptance rate")
    ax.set_ylabel("density")
    ax.legend()
    return figure


def plot_costs(
    tables: dict[str, AcceptanceTable],
    shape: ModelShape,
    *,
    bin_index: int | None = None,
    q: float = 0.05,
    min_tokens: int = 200,
) -> "Figure":
    """
    Draw the tail acceptance over what a decoded token reads, one line per table: page sizes or recipes side by side
    (the paper's figure 5b).

    Args:
        tables (`dict[str, AcceptanceTable]`):
            Acceptance rates of the same model under several recipes, by name.
        shape ([`~sparrow_trl.bench_traffic.ModelShape`]):
            The model.
        bin_index (`int`, *optional*):
            Bin of cached length; by default the last in which every table has enough tokens.
        q (`float`, *optional*, defaults to `0.05`):
            Quantile of the tail.
        min_tokens (`int`, *optional*, defaults to `200`):
            Tokens that a tail needs to count.

    Returns:
        `matplotlib.figure.Figure`

    Raises:
        ValueError: when the tables have different bins, or no bin has enough tokens in all of them.
    """
    bins = {table.bin_tokens for table in tables.values()}
    if len(bins) != 1:
        raise ValueError(f"The tables must have the same `bin_tokens`, got {sorted(bins)}.")
    num_bins = min(table.num_bins for table in tables.values())
    least = np.min([table.count[:, :num_bins].min(0) for table in tables.values()], axis=0)
    full = np.flatnonzero(least >= min_tokens).tolist()
    if not full if bin_index is None else bin_index not in full:
        where = "No bin has" if bin_index is None else f"Bin {bin_index} does not have"
        raise ValueError(f"{where} {min_tokens} tokens or more under every budget of every table.")
    bin_index = full[-1] if bin_index is None else bin_index
    figure, ax = _figure()
    first, last = next(iter(tables.values())).schedule(0).bin_lengths(bin_index)
    length = (first + last) // 2
    for name, table in tables.items():
        traffic = [step_traffic(shape, 1, [length], table.schedule(row)) for row in range(len(table.page_counts))]
        megabytes = [(step.kv + step.landmarks) / 1e6 for step in traffic]
        ax.plot(megabytes, table.quantile(q)[:, bin_index], marker="o", markersize=3, label=name)
    dense = step_traffic(shape, 1, [length])
    ax.axvline(dense.kv / 1e6, color="0.6", linestyle="--", linewidth=1, label="dense")
    ax.set_xlabel(f"keys, values and landmarks read for a token at {length:,} (MB)")
    ax.set_ylabel(f"tail acceptance (q{100 * q:02.3g})")
    ax.set_title(f"{first:,} to {last:,} cached tokens")
    ax.legend()
    return figure


def _check_recipe(table: AcceptanceTable, schedule: SparsityScheduleConfig) -> None:
    if schedule.is_dense or schedule.layer_top_k_pages is not None:
        raise ValueError("Only schedules with one budget for all sparse layers can be marked in a table of budgets.")
    differing = [name for name, value in table.recipe.items() if getattr(schedule, name) != value]
    if differing:
        texts = [f"{name} {getattr(schedule, name)!r} and {table.recipe[name]!r}" for name in differing]
        raise ValueError(f"The schedule and the table are of different recipes: {', '.join(texts)}.")


def _tail_sample(table: AcceptanceTable, budget_index: int, bin_index: int) -> np.ndarray:
    return tail_sample(*table.cumulative(budget_index, bin_index), int(table.count[budget_index, bin_index]))


def _figure():
    # Without pyplot, whose backend is the caller's choice.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.subplots()
