"""How a benchmark's numbers are shown: kernels by what they do, tables on the terminal, and the picture."""

import io
import re
from pathlib import Path
from typing import Any

from .bench_traffic import StepTraffic
from .json_files import write_atomically


# The first pattern found in a kernel's name says what it does.
KERNEL_GROUPS = {
    "landmark update": r"^_\w*landmark",
    "scoring": r"^_score_",
    "selection": r"^_(select|list)_",
    "attention": r"^_attend_",
    "merge": r"^_merge_",
    "cache write": r"reshape_and_cache",
    "dense attention": r"flash|fmha",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|splitk",
    "other": r"",
}


def kernel_group(name: str) -> str:
    """What the kernel `name` (`str`) does: a key of `KERNEL_GROUPS`."""
    return next(group for group, pattern in KERNEL_GROUPS.items() if re.search(pattern, name, re.IGNORECASE))


def group_kernels(kernels: dict[str, dict[str, float]], step_seconds: float, traffic: StepTraffic) -> dict[str, Any]:
    """
    Where the time of a step goes.

    Args:
        kernels (`dict[str, dict]`): Microseconds and calls per step by kernel name.
        step_seconds (`float`): Time of a step without the profiler.
        traffic ([`StepTraffic`]): What a step reads.

    Returns:
        `dict[str, Any]`: `groups` (microseconds and calls per step, microseconds per call), `idle_microseconds` (the
        step less all kernels), `kv_bandwidth_over_attention` (bytes of keys and values per second, over all that
        attention takes), `kv_bandwidth_of_attention_kernels` (over the kernels that read them and merge what they
        found), and `selection_share` (of sparse attention's time).
    """
    groups: dict[str, dict[str, float]] = {}
    for name, kernel in kernels.items():
        group = groups.setdefault(kernel_group(name), {"microseconds": 0.0, "calls": 0.0})
        group["microseconds"] += kernel["microseconds"]
        group["calls"] += kernel["calls"]
    groups = {name: groups[name] for name in KERNEL_GROUPS if name in groups}
    for group in groups.values():
        group["microseconds_per_call"] = group["microseconds"] / group["calls"]

    def microseconds(*names):
        return sum(groups[name]["microseconds"] for name in names if name in groups)

    def bandwidth(time):
        return traffic.kv / time * 1e6 if time else None

    reading = microseconds("dense attention", "attention", "merge")
    choosing = microseconds("scoring", "selection")
    return {
        "groups": groups,
        "idle_microseconds": 1e6 * step_seconds - microseconds(*groups),
        "kv_bandwidth_over_attention": bandwidth(reading + choosing),
        "kv_bandwidth_of_attention_kernels": bandwidth(reading),
        "selection_share": choosing / (microseconds("attention", "merge") + choosing) if choosing else None,
    }


def print_tables(result: dict[str, Any], console) -> None:
    """Print what `bench.json` holds, `result` (`dict`), to a [`rich.console.Console`]."""
    versions = ", ".join(f"{name} {version}" for name, version in _any_variant(result)["versions"].items() if version)
    console.print(
        f"{result['model']} on {_any_variant(result)['device']} ({versions}); memory copies at "
        f"{result['copy_bandwidth'] / 1e12:.2f} TB/s"
    )
    console.print(_step_table(result))
    for workload in result["workloads"]:
        if any("breakdown" in workload.get(variant, {}) for variant in result["variants"]):
            console.print(_breakdown_table(workload, list(result["variants"])))
    if result["rollout"]:
        console.print(_rollout_table(result["rollout"], list(result["variants"])))


def _any_variant(result: dict[str, Any]) -> dict[str, Any]:
    return next(iter(result["variants"].values()))


def _table(title: str, *columns: str):
    from rich.table import Table

    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _step_table(result: dict[str, Any]):
    columns = ("ms a step", "spread", "tokens/s", "KV GB", "landmark GB", "KV TB/s", "roofline ms", "of roofline")
    table = _table("Decode steps", "batch x context", "variant", *columns, "speedup")
    for workload in result["workloads"]:
        for variant in result["variants"]:
            row = workload[variant]
            speedup = workload.get("speedup") if variant == "sparse" else None
            table.add_row(
                f"{workload['batch']} x {workload['context']}",
                variant,
                f"{1e3 * row['step_seconds']:.2f}",
                f"{1e3 * row['step_seconds_spread']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['bytes']['kv'] / 1e9:.2f}",
                f"{row['bytes']['landmarks'] / 1e9:.2f}",
                f"{row['kv_bandwidth_over_step'] / 1e12:.2f}",
                f"{1e3 * row['roofline_seconds']:.2f}",
                f"{row['roofline_ratio']:.2f}x",
                f"{speedup:.2f}x" if speedup else "",
            )
    return table


def _breakdown_table(workload: dict[str, Any], variants: list[str]):
    title = f"Kernels, {workload['batch']} x {workload['context']} (us a step)"
    table = _table(title, "", *(column for variant in variants for column in (variant, "calls", "us a call")))
    breakdowns = [workload[variant]["breakdown"] for variant in variants]
    for name in KERNEL_GROUPS:
        groups = [breakdown["groups"].get(name) for breakdown in breakdowns]
        if any(groups):
            cells = [
                (f"{g['microseconds']:.0f}", f"{g['calls']:.0f}", f"{g['microseconds_per_call']:.1f}")
                if g
                else ("", "", "")
                for g in groups
            ]
            table.add_row(name, *(text for cell in cells for text in cell))
    idle = [(f"{breakdown['idle_microseconds']:.0f}", "", "") for breakdown in breakdowns]
    table.add_row("idle", *(text for cell in idle for text in cell))
    for label, name, scale, unit in (
        ("KV over attention and selection", "kv_bandwidth_over_attention", 1e-12, " TB/s"),
        ("KV over attention", "kv_bandwidth_of_attention_kernels", 1e-12, " TB/s"),
        ("scoring and selection", "selection_share", 100, "%"),
    ):
        values = [breakdown[name] for breakdown in breakdowns]
        cells = [("" if value is None else f"{value * scale:.2f}{unit}", "", "") for value in values]
        table.add_row(label, *(text for cell in cells for text in cell))
    return table


def _rollout_table(rollout: dict[str, Any], variants: list[str]):
    table = _table(f"Rollout of {rollout['batch']} x {rollout['length']} tokens", "variant", "seconds", "tokens/s")
    for variant in variants:
        seconds = rollout[variant]["seconds"]
        table.add_row(variant, f"{seconds:.1f}", f"{rollout['batch'] * rollout['length'] / seconds:.0f}")
    if "speedup" in rollout:
        table.add_row("speedup", f"{rollout['speedup']:.2f}x", "")
    return table


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw what `bench.json` holds, `result` (`dict`), to the PNG file `path` (`pathlib.Path`)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rollout, variants = result["rollout"], list(result["variants"])
    contexts = {(rollout["batch"], context) for context in rollout["contexts"]} if rollout else set()
    workloads = [w for w in result["workloads"] if (w["batch"], w["context"]) not in contexts]
    panels = bool(workloads) + bool(rollout)
    figure, axes = plt.subplots(1, panels, figsize=(6.8 * panels, 4.4), layout="constrained", squeeze=False)
    if workloads:
        _draw_steps(workloads, variants, axes[0, 0])
    if rollout:
        _draw_rollout(rollout, variants, axes[0, -1])
    figure.suptitle(f"{result['model']}, {_any_variant(result)['device']}")
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    plt.close(figure)
    write_atomically(path, image.getvalue())


def _draw_steps(workloads: list[dict[str, Any]], variants: list[str], ax) -> None:
    """A bar per workload and variant, cut by what its kernels do where that was measured."""
    from matplotlib import colormaps

    width = 0.8 / len(variants)
    colors = dict(zip([*KERNEL_GROUPS, "idle"], colormaps["tab10"].colors, strict=True))
    labelled = set()

    def bar(position, height, bottom, label, color, hatch):
        ax.bar(
            position,
            height,
            0.9 * width,
            bottom=bottom,
            color=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.5,
            label=None if label in labelled else label,
        )
        labelled.add(label)

    for index, workload in enumerate(workloads):
        for offset, variant in enumerate(variants):
            position = index + (offset - (len(variants) - 1) / 2) * width
            row, hatch = workload[variant], "//" if variant == "sparse" else None
            milliseconds = 1e3 * row["step_seconds"]
            if "breakdown" in row:
                bottom = 0.0
                parts = {name: group["microseconds"] for name, group in row["breakdown"]["groups"].items()}
                for name, microseconds in {**parts, "idle": max(row["breakdown"]["idle_microseconds"], 0)}.items():
                    bar(position, microseconds / 1e3, bottom, name, colors[name], hatch)
                    bottom += microseconds / 1e3
            else:
                bar(position, milliseconds, 0, variant, f"C{offset}", hatch)
            speedup = workload.get("speedup") if variant == "sparse" else None
            text = f"{milliseconds:.1f}" + (f"\n{speedup:.2f}x" if speedup else "")
            ax.annotate(text, (position, milliseconds), ha="center", va="bottom", fontsize="small")
    ax.set_xticks(range(len(workloads)), [f"{w['batch']} x {w['context']}" for w in workloads])
    ax.set_xlabel("batch x context (tokens)" + (", sparse hatched" if "sparse" in variants else ""))
    ax.set_ylabel("decode step (ms)")
    ax.margins(y=0.18)
    ax.legend(fontsize="small")


def _draw_rollout(rollout: dict[str, Any], variants: list[str], ax) -> None:
    """Step time over the cached length, and the ratio of the two variants."""
    for index, variant in enumerate(variants):
        line = rollout[variant]
        milliseconds = [1e3 * seconds for seconds in line["step_seconds"]]
        label = f"{variant}, {line['seconds']:.0f} s in all"
        ax.plot(line["lengths"], milliseconds, color=f"C{index}", marker="o", markersize=4, label=label)
    ax.set_xlabel("cached length (tokens)")
    ax.set_ylabel("decode step (ms)")
    ax.set_xlim(0, rollout["length"])
    ax.set_ylim(0)
    title = f"Rollout of {rollout['batch']} sequences to {rollout['length']} tokens"
    if "speedup" in rollout:
        dense, sparse = (rollout[variant]["step_seconds"] for variant in ("dense", "sparse"))
        ratio = ax.twinx()
        ratios = [d / s for d, s in zip(dense, sparse, strict=True)]
        ratio.plot(rollout["dense"]["lengths"], ratios, color="0.4", linestyle="--", linewidth=1)
        ratio.set_ylabel("dense / sparse (dashed)")
        ratio.set_ylim(0)
        title += f": {rollout['speedup']:.2f}x"
    ax.set_title(title, fontsize="medium")
    ax.legend(loc="upper left", fontsize="small")
