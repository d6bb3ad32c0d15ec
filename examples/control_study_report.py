"""Table and pictures of the control study, from the runs in its folder."""

import json
import math
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
import numpy as np

from sparrow_trl.json_files import write_atomically
from sparrow_trl.pictures import save_figure
from sparrow_trl.tables import Table


# A run has collapsed when it ends with less than this share of its best accuracy.
COLLAPSED = 0.5
# Steps that a point of a curve is the mean of.
SMOOTHING = 5
# Lowest gradient norm in the picture.
GRADIENT_FLOOR = 1e-4

PANELS = (
    ("reward", "reward"),
    ("accuracy", "held-out accuracy, dense"),
    ("completions/mean_length", "tokens of a completion"),
    ("acceptance/tail", "tail acceptance"),
    ("grad_norm", "gradient norm"),
)


def load_runs(folder: Path, settings: list[str]) -> dict[str, list[dict]]:
    """
    What the runs of each setting have written, in the settings' order, without those that have none.

    Raises:
        ValueError: for runs of one setting that were made under different conditions.
    """
    runs = {}
    for name in settings:
        files = sorted((folder / name).glob("seed-*/run.json"))
        if files:
            runs[name] = [json.loads(file.read_text()) for file in files]
            for file, run in zip(files, runs[name], strict=True):
                if run.get("conditions") != runs[name][0].get("conditions"):
                    raise ValueError(f"{file} was made under other conditions than {files[0]}. Remove one of them.")
    return runs


def accuracy_curve(run: dict) -> tuple[list[int], list[float]]:
    points = sorted((int(step), value) for step, value in run["accuracy"].items())
    return [step for step, _ in points], [value for _, value in points]


def has_collapsed(run: dict) -> bool:
    _, values = accuracy_curve(run)
    return values[-1] < COLLAPSED * max(values)


def metric_curve(run: dict, name: str) -> tuple[list[int], list[float]]:
    """Steps and what was logged there, smoothed; NaN where nothing was measured."""
    values = np.array([float(entry.get(name, "nan")) for entry in run["history"]])
    width = min(SMOOTHING, len(values))
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    return [entry["step"] - (width - 1) / 2 for entry in run["history"][width - 1 :]], smooth.tolist()


def tail_of(run: dict) -> float:
    """Tail acceptance over the whole training, of the lowest bin of cached length with enough tokens."""
    return min(run["tail_by_bin"].values(), default=math.nan)


def kept_of(run: dict) -> float:
    """Share of the cached pages that the rollouts have read. Rollouts that a guard made dense count none."""
    return fmean(float(entry.get("sparsity/kept_fraction", 1.0)) for entry in run["history"])


def summarize(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """Means over the seeds of each setting."""
    summary = {}
    for name, entries in runs.items():
        finals = [accuracy_curve(run)[1][-1] for run in entries]
        summary[name] = {
            "seeds": [run["seed"] for run in entries],
            "tail": fmean(tail_of(run) for run in entries),
            "kept_fraction": fmean(kept_of(run) for run in entries),
            "start_accuracy": fmean(accuracy_curve(run)[1][0] for run in entries),
            "final_accuracy": fmean(finals),
            "final_accuracies": finals,
            "best_accuracy": fmean(max(accuracy_curve(run)[1]) for run in entries),
            "collapsed": sum(map(has_collapsed, entries)),
            "rollout_tokens": fmean(run["rollout_tokens"] for run in entries),
            "steps": max(accuracy_curve(run)[0][-1] for run in entries),
            "seconds": fmean(run["seconds"] for run in entries),
        }
    return summary


def make_table(summary: dict[str, dict]) -> Table:
    columns = ["setting", "seeds", "tail", "pages read", "accuracy at the end", "lowest, highest seed", "best",
               "against dense", "collapsed", "rollout tokens"]  # fmt: skip
    start = fmean(entry["start_accuracy"] for entry in summary.values())
    table = Table(f"Control study: held-out accuracy, {start:.1%} before training", columns)
    dense = dict(zip(*(summary.get("dense", {}).get(key, []) for key in ("seeds", "final_accuracies")), strict=True))
    for name, entry in summary.items():
        finals = entry["final_accuracies"]
        # Seeds that both have: seeds differ by more than settings may.
        gains = [final - dense[seed] for seed, final in zip(entry["seeds"], finals, strict=True) if seed in dense]
        table.rows.append(
            [
                name,
                str(len(finals)),
                "-" if math.isnan(entry["tail"]) else f"{entry['tail']:.3f}",
                f"{entry['kept_fraction']:.1%}",
                f"{entry['final_accuracy']:.1%}",
                f"{min(finals):.1%}, {max(finals):.1%}",
                f"{entry['best_accuracy']:.1%}",
                f"{100 * fmean(gains):+.1f} points" if gains else "-",
                f"{entry['collapsed']} of {len(finals)}",
                f"{entry['rollout_tokens']:,.0f}",
            ]
        )
    return table


def colors_of(names: list[str]) -> dict[str, tuple]:
    """Dense is black, the guard blue, tails from green (lenient) to orange, and the others as they come."""
    tails = sorted((name for name in names if name.startswith("tail-")), reverse=True)
    others = [name for name in names if name not in tails and name not in ("dense", "guard")]
    colors = {"dense": "black", "guard": "tab:blue"}
    colors |= {name: plt.cm.RdYlGn(0.95 - 0.6 * index / max(len(tails) - 1, 1)) for index, name in enumerate(tails)}
    colors |= {name: plt.cm.Dark2(index % 8) for index, name in enumerate(others)}
    return colors


def draw_curves(runs: dict[str, list[dict]]):
    """Figure 4's second row: what is measured in training, against the steps; bands are the range of the seeds."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 4.5), layout="constrained")
    colors = colors_of(list(runs))
    for name, entries in runs.items():
        for axis, (key, _) in zip(axes, PANELS, strict=True):
            pairs = [accuracy_curve(run) if key == "accuracy" else metric_curve(run, key) for run in entries]
            length = min(len(steps) for steps, _ in pairs)
            steps, curves = pairs[0][0][:length], np.array([curve[:length] for _, curve in pairs])
            style = "--" if "+" in name else "-"
            axis.plot(steps, curves.mean(axis=0), style, color=colors[name], label=name)
            axis.fill_between(steps, curves.min(axis=0), curves.max(axis=0), color=colors[name], alpha=0.15)
    for axis, (key, title) in zip(axes, PANELS, strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if key == "grad_norm":
            axis.set_yscale("log")
            axis.set_ylim(bottom=GRADIENT_FLOOR)  # where no completion teaches anything it is 0
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


def draw_tradeoff(summary: dict[str, dict]):
    """Figure 1(a, c): accuracy at the end against what rollouts read, and against their tail acceptance."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained", sharey=True)
    colors = colors_of(list(summary))
    for axis, key, title in zip(
        axes, ("kept_fraction", "tail"), ("share of the cached pages read", "tail acceptance in training"), strict=True
    ):
        for name, entry in summary.items():
            finals = entry["final_accuracies"]
            span = [[entry["final_accuracy"] - min(finals)], [max(finals) - entry["final_accuracy"]]]
            marker = "x" if entry["collapsed"] else "o"
            axis.errorbar(
                entry[key], entry["final_accuracy"], span, color=colors[name], marker=marker, ls="", label=name
            )
        axis.set(xlabel=title)
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="held-out accuracy at the end")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right", fontsize="small", title="x: a seed collapsed")
    return figure


def report(folder: Path, settings: list[str]) -> str:
    """
    Write `summary.json`, `table.md`, `curves.png` and `tradeoff.png` into the study's folder, from the runs of these
    settings that are there.

    Args:
        folder (`pathlib.Path`): The study's folder.
        settings (`list[str]`): Names of the settings, in the order to show them in.

    Returns:
        `str`: the table in Markdown.
    """
    runs = load_runs(folder, settings)
    if not runs:
        return f"There are no runs in {folder}."
    summary = summarize(runs)
    table = make_table(summary).to_markdown()
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1).encode())
    write_atomically(folder / "table.md", f"{table}\n".encode())
    for figure, name in ((draw_curves(runs), "curves.png"), (draw_tradeoff(summary), "tradeoff.png")):
        save_figure(figure, folder / name)
        plt.close(figure)
    return f"{table}\n\nTable, summary.json, curves.png and tradeoff.png: {folder}"
