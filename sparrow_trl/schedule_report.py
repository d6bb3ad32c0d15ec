"""How schedules are shown: what a query reads at each cached length, and what that gains."""

from typing import TYPE_CHECKING

from .schedule import SparsityScheduleConfig
from .tables import Table


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .cost_model import PredictedSpeedup


def describe_recipe(schedule: SparsityScheduleConfig) -> str:
    """How `schedule` ([`SparsityScheduleConfig`]) chooses pages, in one line, and where it comes from."""
    if schedule.is_dense:
        return "A dense schedule: every query reads its whole context."
    landmarks = f"{schedule.landmarks_per_page} landmark{'s' * (schedule.landmarks_per_page > 1)} a page"
    dense = ", ".join(map(str, schedule.dense_layers)) or "none"
    text = (
        f"Pages of {schedule.page_size} tokens, {schedule.page_score}, {landmarks} ({schedule.landmark_dtype}), "
        f"{schedule.sink_pages} sink and {schedule.recent_pages} recent pages, dense layers: {dense}."
    )
    if schedule.target_acceptance is not None:
        text += f" Made for a tail acceptance of {schedule.target_acceptance:g}"
        text += f" with {schedule.base_model_name_or_path}." if schedule.base_model_name_or_path else "."
    return text


def schedule_tables(schedule: SparsityScheduleConfig) -> list[Table]:
    """
    Tables of what queries read under `schedule` ([`SparsityScheduleConfig`]), one for each group of layers.

    Rows span the cached lengths between two changes of the budget; shares are those of the context that is read at the
    first and at the last of them, in layers that are not dense.
    """
    if schedule.is_dense:
        return []
    groups = {f"layers {key}": table for key, table in (schedule.layer_top_k_pages or {}).items()}
    groups["other layers" if groups else "sparse layers"] = schedule.top_k_pages
    tables = []
    for name, top_k_pages in groups.items():
        table = Table(
            f"What a query reads: {name}",
            ["cached tokens", "pages by score", "tokens at most", "share at the start", "at the end"],
        )
        starts = [i for i, top_k in enumerate(top_k_pages) if i == 0 or top_k != top_k_pages[i - 1]]
        for index, end_index in zip(starts, [*starts[1:], None], strict=True):
            first, last = schedule.bin_lengths(index)[0], None
            span = f"{first} and more"
            if end_index is not None:
                last = schedule.bin_lengths(end_index - 1)[1]
                span = f"{first} to {last}"
                if last < first:  # lengths round up to whole pages, so bins of one page have nothing in the first
                    continue
            pages = schedule.sink_pages + top_k_pages[index] + schedule.recent_pages
            shares = ["" if length is None else f"{_share(schedule, pages, length):.1%}" for length in (first, last)]
            table.rows.append([span, str(top_k_pages[index]), str(pages * schedule.page_size), *shares])
        tables.append(table)
    return tables


def _share(schedule: SparsityScheduleConfig, pages: int, length: int) -> float:
    """Share of `length` cached tokens that `pages` kept pages hold, the last of which may be partial."""
    dropped = max(0, -(-length // schedule.page_size) - pages)
    return 1 - dropped * schedule.page_size / length


def draw_schedule(schedule: SparsityScheduleConfig) -> "Figure":
    """Draw `schedule` ([`SparsityScheduleConfig`])."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    schedule.plot(figure.subplots())
    return figure


def estimate_table(predictions: "dict[str, PredictedSpeedup]", title: str) -> Table:
    """The predictions of one model and device as a table, by the names of the schedules."""
    columns = [
        "schedule",
        "dense eFLOPs",
        "sparse eFLOPs",
        "speedup (paper)",
        "dense s",
        "sparse s",
        "speedup (bytes)",
    ]
    table = Table(title, columns)
    for name, prediction in predictions.items():
        table.rows.append(
            [
                name,
                f"{prediction.dense_eflops:.3g}",
                f"{prediction.sparse_eflops:.3g}",
                f"{prediction.paper:.2f}x",
                f"{prediction.dense_seconds:.1f}",
                f"{prediction.sparse_seconds:.1f}",
                f"{prediction.refined:.2f}x",
            ]
        )
    return table
