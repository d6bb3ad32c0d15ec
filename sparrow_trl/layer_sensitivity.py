"""
How much each layer's budget matters for the tail acceptance.

The sensitivity of a layer is what the tail gains between two schedules that differ in this layer alone: with a smaller
and with a larger budget there than the others have. Both are needed: a layer that hardly suffers from a smaller budget
may still be the one that gains most from a larger one.
"""

from dataclasses import dataclass, replace

import numpy as np

from .layer_budgets import layer_ranges
from .schedule import SparsityScheduleConfig
from .schedule_measurements import ScheduleMeasurements


@dataclass(frozen=True)
class LayerSensitivity:
    """
    Tails with another budget in some adjacent layers alone, by bin of cached length.

    Args:
        layers (`list[int]`):
            The layers.
        smaller (`list[float | None]`):
            Tails with a smaller budget in these layers; `None` in bins without enough tokens.
        larger (`list[float | None]`):
            Tails with a larger one.
    """

    layers: list[int]
    smaller: list[float | None]
    larger: list[float | None]

    @property
    def score(self) -> float:
        """`float`: Mean gain of the tail per layer, from the smaller to the larger budget."""
        gains = np.subtract(np.array(self.larger, dtype=float), np.array(self.smaller, dtype=float))
        return float(np.nanmean(gains)) / len(self.layers)


def split_layers(layers: list[int], size: int) -> list[list[int]]:
    """`layers` (`list[int]`) in pieces of `size` (`int`) neighbours, the last of which may be shorter."""
    return [layers[start : start + size] for start in range(0, len(layers), size)]


def measure_sensitivity(
    measurements: ScheduleMeasurements,
    schedule: SparsityScheduleConfig,
    layer_groups: list[list[int]],
    *,
    judged: np.ndarray,
    factor: float = 4.0,
    num_sequences: int | None = None,
) -> list[LayerSensitivity]:
    """
    Measure what a smaller and a larger budget do in each group of layers alone: two schedules a group.

    Args:
        measurements ([`~sparrow_trl.schedule_measurements.ScheduleMeasurements`]):
            What to measure on.
        schedule ([`SparsityScheduleConfig`]):
            Schedule with one table for all sparse layers. In a dense layer both budgets are smaller than its own.
        layer_groups (`list[list[int]]`):
            Layers that change together.
        judged (`numpy.ndarray` of shape `[bins]`):
            Bins with enough tokens.
        factor (`float`, *optional*, defaults to `4.0`):
            The smaller budget is the schedule's over this, but at least the reserved pages; the larger is the
            schedule's times this.
        num_sequences (`int`, *optional*):
            How many sequences to measure on; by default all.

    Returns:
        `list[LayerSensitivity]`: in the order of `layer_groups`.
    """
    reserved = schedule.sink_pages + schedule.recent_pages

    def tails(layers: list[int], scale: float) -> list[float | None]:
        table = [max(0, round((top_k + reserved) * scale) - reserved) for top_k in schedule.top_k_pages]
        changed = replace(
            schedule,
            dense_layers=[layer for layer in schedule.dense_layers if layer not in layers],
            layer_top_k_pages=dict.fromkeys(layer_ranges(layers), table),
        )
        measured = measurements.tails(changed, len(judged), num_sequences)
        return [float(tail) if counts else None for tail, counts in zip(measured.tails, judged, strict=True)]

    return [LayerSensitivity(layers, tails(layers, 1 / factor), tails(layers, factor)) for layers in layer_groups]


def group_by_sensitivity(sensitivities: list[LayerSensitivity], num_groups: int) -> list[list[int]]:
    """
    Layers by their rank in sensitivity, in groups of about as many.

    Args:
        sensitivities (`list[LayerSensitivity]`):
            Sensitivities of all sparse layers.
        num_groups (`int`):
            Number of groups; fewer where there are not as many measurements.

    Returns:
        `list[list[int]]`: the most sensitive layers first.
    """
    ranked = sorted(sensitivities, key=lambda entry: -entry.score)
    parts = np.array_split(np.arange(len(ranked)), min(num_groups, len(ranked)))
    return [sorted(layer for index in part for layer in ranked[index].layers) for part in parts]
