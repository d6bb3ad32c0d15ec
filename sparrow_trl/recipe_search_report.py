"""What a recipe search found, as tables and as a picture."""

from typing import TYPE_CHECKING

import numpy as np

from .recipe_search import FittedSchedule, RecipeSearchResult, recipe_name
from .schedule_search import bin_text
from .tables import Table


if TYPE_CHECKING:
    from matplotlib.figure import Figure


REPORT_NAME = "recipe_search.md"
PICTURE_NAME = "recipe_search.png"


def search_tables(result: RecipeSearchResult) -> list[Table]:
    """The tables of `result` ([`RecipeSearchResult`]): the outcome, by bin, the budgets, and the recipes compared."""
    return [_summary(result), _by_bin(result), _budgets(result), _candidates(result)]


def _summary(result: RecipeSearchResult) -> Table:
    options = result.options
    table = Table(
        f"Tail acceptance of {options['target_acceptance']:g} at cached lengths from {options['first_length']:,} to "
        f"{options['last_length']:,}, fitted on {options['sequences']} sequences",
        [
            "schedule",
            "pages a layer",
            "MB a token",
            "of the paper's",
            "lowest tail",
            "held out",
            "speedup (paper)",
            "(bytes)",
        ],
    )
    for fit in (result.paper, result.uniform, result.found):
        held = getattr(result.held_out, fit.name, None) if result.held_out else None
        speedup = result.speedups.get(fit.name)
        table.rows.append(
            [
                f"{fit.name}: {recipe_name(fit.schedule)}",
                f"{fit.pages:.1f}",
                f"{fit.total_bytes / 1e6:.3f}",
                f"{fit.total_bytes / result.paper.total_bytes:.1%}",
                f"{fit.lowest_tail:.4f}",
                "-" if held is None else _tail(min((tail for tail in held if tail is not None), default=None)),
                "-" if speedup is None else f"{speedup.paper:.2f}x",
                "-" if speedup is None else f"{speedup.refined:.2f}x",
            ]
        )
    return table


def _by_bin(result: RecipeSearchResult) -> Table:
    held = result.held_out
    columns = ["cached tokens", "tokens", "paper MB", "found MB", "ratio", "paper tail", "found tail"]
    table = Table("By cached length", columns + (["paper held out", "found held out"] if held else []))
    paper, found = result.paper, result.found
    for index, ratio in enumerate(result.bin_ratios):
        row = [
            bin_text(found.schedule, index),
            f"{found.tokens[index]:,}",
            f"{paper.bin_bytes[index] / 1e6:.3f}",
            f"{found.bin_bytes[index] / 1e6:.3f}",
            f"{ratio:.1%}",
            _tail(paper.tails[index]),
            _tail(found.tails[index]),
        ]
        table.rows.append(row + ([_tail(held.paper[index]), _tail(held.found[index])] if held else []))
    return table


def _budgets(result: RecipeSearchResult) -> Table:
    schedule = result.found.schedule
    bins = range(len(result.found.tails))
    table = Table(
        "Pages that a query reads, reserved ones included", ["layers"] + [bin_text(schedule, i) for i in bins]
    )
    for layers in result.groups:
        budgets = [schedule.budget(max(1, schedule.bin_lengths(index)[1]), layers[0]) for index in bins]
        pages = [str(budget // schedule.page_size) for budget in budgets]
        table.rows.append([", ".join(map(str, layers)), *pages])
    return table


def _candidates(result: RecipeSearchResult) -> Table:
    table = Table(
        "Recipes with one table", ["recipe", "pages a layer", "MB a token", "lowest tail", "schedules tried"]
    )
    for fit in result.candidates:
        table.rows.append(
            [
                fit.name,
                f"{fit.pages:.1f}",
                f"{fit.total_bytes / 1e6:.3f}",
                f"{fit.lowest_tail:.4f}",
                str(len(fit.tried)),
            ]
        )
    return table


def draw_search(result: RecipeSearchResult) -> "Figure":
    """Draw `result` ([`RecipeSearchResult`]): the layers' sensitivity, tails over bytes, and bytes over the length."""
    # Without pyplot, whose backend is the caller's choice.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5), layout="constrained")
    sensitivity, tails, lengths = figure.subplots(1, 3)
    for entry in result.sensitivities:
        base = np.array(result.uniform.tails, dtype=float)
        for values, color, label in ((entry.smaller, "C3", "smaller budget"), (entry.larger, "C0", "larger budget")):
            change = np.nanmean(np.array(values, dtype=float) - base[: len(values)])
            first = entry is result.sensitivities[0]
            sensitivity.bar(
                np.mean(entry.layers), change, 0.8 * len(entry.layers), color=color, label=label if first else None
            )
    sensitivity.xaxis.get_major_locator().set_params(integer=True)
    sensitivity.axhline(0, color="0.5", linewidth=1)
    sensitivity.set_xlabel("layer with another budget than the rest")
    sensitivity.set_ylabel("change of the tail acceptance, mean over bins")
    sensitivity.legend()

    for number, fit in enumerate([*result.candidates, result.paper, result.found]):
        megabytes, lowest = np.array(fit.tried or [(fit.total_bytes, fit.lowest_tail)]).T
        color = f"C{number}"
        tails.plot(megabytes / 1e6, lowest, ".", color=color, alpha=0.5)
        tails.plot(fit.total_bytes / 1e6, fit.lowest_tail, "o", color=color, label=_short(fit))
    tails.axhline(result.options["target_acceptance"], color="0.5", linestyle="--", linewidth=1)
    tails.set_xlabel("keys, values and landmarks read for a token (MB)")
    tails.set_ylabel("lowest tail acceptance of a bin")
    tails.legend(fontsize="x-small")

    for fit in (result.paper, result.uniform, result.found):
        edges = np.arange(len(fit.bin_bytes) + 1) * fit.schedule.bin_tokens
        lengths.stairs(np.array(fit.bin_bytes) / 1e6, edges, label=fit.name, baseline=None)
    lengths.set_ylim(bottom=0)
    lengths.set_xlabel("cached length (tokens)")
    lengths.set_ylabel("keys, values and landmarks read for a token (MB)")
    lengths.legend()
    figure.suptitle(result.options["model"] or "Recipe search")
    return figure


def _short(fit: FittedSchedule) -> str:
    return fit.name.replace(", pages of 16", "").replace(", dense layers none", "")


def _tail(tail: float | None) -> str:
    return "-" if tail is None else f"{tail:.4f}"
