"""How a benchmark's numbers are shown: kernels by what they do, tables for terminals and Markdown, the picture."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .bench_traffic import StepTraffic
from .pictures import save_figure
from .tables import Table


# Name of the variant that runs vLLM's own attention. The others have the names of their schedules.
DENSE = "dense"

# The first pattern found in a kernel's name says what it does.
KERNEL_GROUPS = {
    "landmark update": r"^_\w*landmark",
    "page selection": r"^_choose_",
    "attention": r"^_attend_",
    "merge": r"^_merge_|FlashAttnFwdCombine",
    "cache write": r"reshape_and_cache",
    "dense attention": r"flash|fmha",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|splitk",
    "other": r"",
}

# Over what the bytes of keys and values are divided, as columns of a table.
BANDWIDTHS = {"attention": "attention kernel", "merge": "and merge", "selection": "and page selection"}

HATCHES = (None, "//", "..", "xx", "++")


def kernel_group(name: str) -> str:
    """What the kernel `name` (`str`) does: a key of `KERNEL_GROUPS`."""
    return next(group for group, pattern in KERNEL_GROUPS.items() if re.search(pattern, name, re.IGNORECASE))


def group_kernels(
    kernels: dict[str, dict[str, float]], step_seconds: float, traffic: StepTraffic, num_layers: int
) -> dict[str, Any]:
    """
    Where the time of a step goes.

    Args:
        kernels (`dict[str, dict]`): Microseconds and calls per step by kernel name.
        step_seconds (`float`): Time of a step without the profiler.
        traffic ([`StepTraffic`]): What a step reads.
        num_layers (`int`): Attention layers.

    Returns:
        `dict[str, Any]`: `groups` (microseconds and calls per step, microseconds per layer), `idle_microseconds` (the
        step less all kernels), `kv_bandwidth` (bytes of keys and values per second of the attention kernels, of these
        and the merge of what they found, and of all that and the page selection), and `selection_share` (scoring and
        selecting pages in the time of sparse attention). Layers that attend densely run the same kernels, so the time
        of reading is split between the layers by bytes.
    """
    groups: dict[str, dict[str, float]] = {}
    for name, kernel in kernels.items():
        group = groups.setdefault(kernel_group(name), {"microseconds": 0.0, "calls": 0.0})
        group["microseconds"] += kernel["microseconds"]
        group["calls"] += kernel["calls"]
    groups = {name: groups[name] for name in KERNEL_GROUPS if name in groups}
    for group in groups.values():
        group["microseconds_per_layer"] = group["microseconds"] / num_layers

    def microseconds(*names):
        return sum(groups[name]["microseconds"] for name in names if name in groups)

    attention = microseconds("dense attention", "attention")
    reading, choosing = attention + microseconds("merge"), microseconds("page selection")
    times = {"attention": attention, "merge": reading, "selection": reading + choosing}
    return {
        "groups": groups,
        "idle_microseconds": 1e6 * step_seconds - microseconds(*groups),
        "kv_bandwidth": {name: traffic.kv / time * 1e6 if time else None for name, time in times.items()},
        "selection_share": choosing / (choosing + reading * traffic.sparse_kv / traffic.kv) if choosing else None,
    }


def compare_attention(variants: dict[str, dict[str, Any]]) -> None:
    """Add to the breakdowns of a workload's `variants` (`dict`) their bandwidths as shares of the dense variant's."""
    dense = variants.get(DENSE, {}).get("breakdown")
    for name, variant in variants.items():
        if name != DENSE and dense and "breakdown" in variant:
            bandwidth = variant["breakdown"]["kv_bandwidth"]
            variant["breakdown"]["kv_bandwidth_ratio"] = {
                key: bandwidth[key] / value if value and bandwidth[key] else None
                for key, value in dense["kv_bandwidth"].items()
            }


def print_tables(record: dict[str, Any], console) -> None:
    """Print what `bench.json` holds, `record` (`dict`), to a [`rich.console.Console`]."""
    console.print(describe(record))
    for table in tables(record):
        table.print(console)


def markdown_tables(record: dict[str, Any]) -> str:
    """The tables of what `bench.json` holds, `record` (`dict`), in Markdown, with the command and the machine."""
    parts = [f"```bash\n{record['command']}\n```", describe(record), *(t.to_markdown() for t in tables(record))]
    return "\n\n".join(parts) + "\n"


def describe(record: dict[str, Any]) -> str:
    """One line about the machine, the software and the state of what `bench.json` holds, `record` (`dict`)."""
    if not record["variants"]:
        return f"{record['model']}: nothing was measured yet"
    raw = _any_variant(record)
    versions = ", ".join(f"{name} {version}" for name, version in raw["versions"].items() if version)
    runners = " and ".join(sorted({result["model_runner"] for result in record["variants"].values()}))
    text = (
        f"{record['model']} on {raw['device']} ({versions}; model runner {runners}); memory copies at "
        f"{record['copy_bandwidth'] / 1e12:.2f} TB/s"
    )
    return text if record["complete"] else f"{text}. INCOMPLETE: the run was cut off"


def tables(record: dict[str, Any]) -> Iterator[Table]:
    """All tables of what `bench.json` holds, `record` (`dict`)."""
    if record["workloads"]:
        yield _step_table(record["workloads"])
    profiled = [
        workload
        for workload in record["workloads"]
        if any("breakdown" in variant for variant in workload["variants"].values())
    ]
    for workload in profiled:
        yield _kernel_table(workload)
    if profiled:
        yield _attention_table(profiled)
    if record["rollout"]:
        yield from _rollout_tables(record["rollout"], list(record["variants"]))


def _any_variant(record: dict[str, Any]) -> dict[str, Any]:
    return next(iter(record["variants"].values()))


def _name(workload: dict[str, Any]) -> str:
    return f"{workload['batch']} x {workload['context']}"


def _number(value: float | None, text: str, scale: float = 1) -> str:
    """`scale` times `value` in the format `text`, or nothing where it is `None`."""
    return "" if value is None else text.format(scale * value)


def _step_table(workloads: list[dict[str, Any]]) -> Table:
    columns = ("ms a step", "spread", "tokens/s", "KV GB", "landmark GB", "KV TB/s", "roofline ms", "of roofline")
    table = Table("Decode steps", ["batch x context", "variant", *columns, "speedup"])
    for workload in workloads:
        for name, row in workload["variants"].items():
            table.rows.append(
                [
                    _name(workload),
                    name,
                    f"{1e3 * row['step_seconds']:.2f}",
                    f"{1e3 * row['step_seconds_spread']:.2f}",
                    f"{row['tokens_per_second']:.0f}",
                    f"{row['bytes']['kv'] / 1e9:.2f}",
                    f"{row['bytes']['landmarks'] / 1e9:.2f}",
                    f"{row['kv_bandwidth_over_step'] / 1e12:.2f}",
                    f"{1e3 * row['roofline_seconds']:.2f}",
                    f"{row['roofline_ratio']:.2f}x",
                    _number(row.get("speedup"), "{:.2f}x"),
                ]
            )
    return table


def _kernel_table(workload: dict[str, Any]) -> Table:
    breakdowns = {name: row["breakdown"] for name, row in workload["variants"].items() if "breakdown" in row}
    columns = [column for name in breakdowns for column in (f"{name}: us a step", "us a layer")]
    table = Table(f"Kernels, {_name(workload)}, without overlap", ["kernels", *columns])
    for group in KERNEL_GROUPS:
        cells = [breakdown["groups"].get(group, {}) for breakdown in breakdowns.values()]
        if any(cells):
            row = [
                text
                for cell in cells
                for text in (
                    _number(cell.get("microseconds"), "{:.0f}"),
                    _number(cell.get("microseconds_per_layer"), "{:.1f}"),
                )
            ]
            table.rows.append([group, *row])
    idle = [text for b in breakdowns.values() for text in (f"{b['idle_microseconds']:.0f}", "")]
    table.rows.append(["idle", *idle])
    steps = [text for b in breakdowns.values() for text in (f"{1e6 * b['step_seconds']:.0f}", "")]
    table.rows.append(["step", *steps])
    return table


def _attention_table(workloads: list[dict[str, Any]]) -> Table:
    columns = [column for name in BANDWIDTHS.values() for column in (name, "of dense")]
    title = "KV bytes of all layers per second (TB/s) of the kernels that read them, and the cost of choosing pages"
    selection = "scoring, selection of sparse attention"
    table = Table(title, ["batch x context", "variant", *columns, selection])
    for workload in workloads:
        for name, row in workload["variants"].items():
            if "breakdown" not in row:
                continue
            breakdown, cells = row["breakdown"], []
            for key in BANDWIDTHS:
                cells.append(_number(breakdown["kv_bandwidth"][key], "{:.3g}", 1e-12))
                cells.append(_number(breakdown.get("kv_bandwidth_ratio", {}).get(key), "{:.1f}%", 100))
            share = _number(breakdown["selection_share"], "{:.1f}%", 100)
            table.rows.append([_name(workload), name, *cells, share])
    return table


def _rollout_tables(rollout: dict[str, Any], names: list[str]) -> Iterator[Table]:
    size = f"{rollout['batch']} x {rollout['length']} tokens"
    table = Table(f"Rollout of {size}", ["variant", "seconds", "tokens/s", "speedup"])
    for name, row in rollout["variants"].items():
        rate = rollout["batch"] * rollout["length"] / row["seconds"]
        table.rows.append([name, f"{row['seconds']:.1f}", f"{rate:.0f}", _number(row.get("speedup"), "{:.2f}x")])
    yield table
    columns = [column for name in names for column in ([f"{name} ms"] + (["speedup"] if name != DENSE else []))]
    table = Table(f"Steps of the rollout of {size}", ["cached tokens", *columns])
    for point in rollout["points"]:
        cells = []
        for name in names:
            row = point["variants"].get(name, {})
            cells.append(_number(row.get("step_seconds"), "{:.2f}", 1e3))
            if name != DENSE:
                cells.append(_number(row.get("speedup"), "{:.2f}x"))
        table.rows.append([str(point["context"]), *cells])
    yield table


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw what `bench.json` holds, `record` (`dict`), to the PNG file `path` (`pathlib.Path`)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    workloads, rollout, names = record["workloads"], record["rollout"], list(record["variants"])
    panels = bool(workloads) + bool(rollout)
    figure, axes = plt.subplots(1, panels, figsize=(6.8 * panels, 4.6), layout="constrained", squeeze=False)
    if workloads:
        _draw_steps(workloads, names, axes[0, 0])
    if rollout:
        _draw_rollout(rollout, names, axes[0, -1])
    figure.suptitle(f"{record['model']}, {_any_variant(record)['device']}")
    save_figure(figure, path)
    plt.close(figure)


def _draw_steps(workloads: list[dict[str, Any]], names: list[str], ax) -> None:
    """A bar per workload and variant, cut by what its kernels do where that was measured, and a line at its time."""
    from matplotlib.patches import Patch

    width = 0.8 / len(names)
    colors = {group: f"C{index}" for index, group in enumerate([*KERNEL_GROUPS, "idle"])}
    hatches = {name: HATCHES[index % len(HATCHES)] for index, name in enumerate(names)}
    shown = {}
    for index, workload in enumerate(workloads):
        for offset, name in enumerate(names):
            if name not in workload["variants"]:
                continue
            row = workload["variants"][name]
            position = index + (offset - (len(names) - 1) / 2) * width
            milliseconds = 1e3 * row["step_seconds"]
            parts = {None: milliseconds}
            if "breakdown" in row:
                groups = row["breakdown"]["groups"]
                parts = {group: kernels["microseconds"] / 1e3 for group, kernels in groups.items()}
                parts["idle"] = max(row["breakdown"]["idle_microseconds"], 0) / 1e3
            bottom = 0.0
            for group, height in parts.items():
                color = colors.get(group, "0.75")
                style = {"color": color, "hatch": hatches[name], "edgecolor": "white", "linewidth": 0.5}
                ax.bar(position, height, 0.92 * width, bottom=bottom, **style)
                bottom += height
                if group:
                    shown[group] = Patch(color=color, label=group)
            # Kernels by themselves take longer than where they overlap.
            ax.hlines(milliseconds, position - 0.46 * width, position + 0.46 * width, color="black", linewidth=1)
            text = f"{milliseconds:.1f}" + _number(row.get("speedup"), "\n{:.2f}x")
            ax.annotate(text, (position, max(bottom, milliseconds)), ha="center", va="bottom", fontsize="small")
    variants = [Patch(facecolor="0.75", edgecolor="white", hatch=hatch, label=name) for name, hatch in hatches.items()]
    ax.set_xticks(range(len(workloads)), [_name(workload) for workload in workloads])
    ax.set_xlabel("batch x context (tokens)")
    ax.set_ylabel("decode step (ms)")
    ax.margins(y=0.18)
    ax.legend(handles=[*variants, *shown.values()], fontsize="x-small")


def _draw_rollout(rollout: dict[str, Any], names: list[str], ax) -> None:
    """Step time over the cached length, and the speedup of each sparse variant."""
    speedups = ax.twinx()
    for index, name in enumerate(names):
        rows = [point["variants"][name] for point in rollout["points"] if name in point["variants"]]
        lengths = [row["mean_length"] for row in rows]
        total = rollout["variants"].get(name, {})
        label = name + _number(total.get("seconds"), ", {:.0f} s in all") + _number(total.get("speedup"), ", {:.2f}x")
        steps = [1e3 * row["step_seconds"] for row in rows]
        ax.plot(lengths, steps, color=f"C{index}", marker="o", markersize=4, label=label)
        if all("speedup" in row for row in rows):
            ratios = [row["speedup"] for row in rows]
            speedups.plot(lengths, ratios, color=f"C{index}", linestyle="--", linewidth=1)
    ax.set_xlabel("cached length (tokens)")
    ax.set_ylabel("decode step (ms)")
    ax.set_xlim(0, rollout["length"])
    ax.set_ylim(0)
    speedups.set_ylim(0)
    speedups.set_ylabel("speedup (dashed)")
    speedups.set_visible(bool(speedups.lines))
    ax.set_title(f"Rollout of {rollout['batch']} sequences to {rollout['length']} tokens", fontsize="medium")
    ax.legend(loc="upper left", fontsize="small")
