"""
What a rollout costs: the formulas of the Sparrow paper, and an estimate in seconds from what decode steps read.

The paper's cost (section 3.3 of the [Sparrow paper](https://huggingface.co/papers/2606.08446), in full on its project
page) adds up FLOPs and memory traffic, the traffic weighted with the hardware's arithmetic intensity `I` ("eFLOPs").
With `P` parameters, `N` samples of a prompt of `L_in` tokens, `L_out` generated tokens each, `D` the key-value
dimension of all layers, `r` query heads per key-value head, a budget of `B` tokens and pages of `s` tokens:

    dense:  C_comp = 2 P N L_out + r (2 L_in + L_out) L_out N D
            C_mem  = 2 L_in L_out D + N L_out^2 D
    sparse: C_comp = 2 P N L_out + 2 r N D B L_out + 2 N L_in D L_out + r N D L_out^2 / (2 s)
            C_mem  = 2 N D B L_out + 2 L_in D L_out + N D L_out^2 / (2 s)
    cost    C      = C_comp + I C_mem

Neither the paper nor the page says whether `D` counts keys and values once or twice. Here it counts them once
(`kv_heads * head_dim` in each layer) and `I` is in FLOPs per element, so that the 2 in `C_mem` stands for keys and
values. Read the other way, `D` counts both and `I` is in FLOPs per byte of 2-byte numbers, as are the `2 P L_out` for
reading weights in the paper's appendix F. Then the memory terms come out the same, and the compute of attention
doubles, which is `r / I` of its cost, about a hundredth. The scoring terms of the prompt are not divided by the page
size; they are kept as published.

The formulas leave out the reading of weights, dense layers and how landmarks are stored. [`step_seconds`] and
[`rollout_seconds`] count these, on the bytes of [`~sparrow_trl.bench_traffic.step_traffic`].
"""

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bench_traffic import ModelShape, step_traffic
from .schedule import SparsityScheduleConfig


# Lengths are summed over one by one.
MAX_ROLLOUT_TOKENS = 2**24

PAPER_PAGE_TOKENS = 16


def _check_rollout(prompt_tokens: Any, output_tokens: Any, **positive: Any) -> None:
    lowest = {"prompt_tokens": 0, "output_tokens": 1, **dict.fromkeys(positive, 1)}
    for name, value in {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, **positive}.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < lowest[name]:
            raise ValueError(f"`{name}` must be an integer of at least {lowest[name]}, got {value!r}.")
    if prompt_tokens + output_tokens > MAX_ROLLOUT_TOKENS:
        raise ValueError(
            f"`prompt_tokens` and `output_tokens` must be at most {MAX_ROLLOUT_TOKENS:,} together, got "
            f"{prompt_tokens + output_tokens:,}."
        )


def _check_number(
    name: str, value: Any, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf
) -> None:
    valid = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if valid and value > above and at_least <= value <= at_most:
        return
    limits = [("above", above), ("at least", at_least), ("at most", at_most)]
    wanted = " and ".join(f"{words} {limit:g}" for words, limit in limits if math.isfinite(limit))
    raise ValueError(f"`{name}` must be a number {wanted}, got {value!r}.")


def _check_full_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kinds.add("sliding_attention")
    if not getattr(config, "num_attention_heads", None) or not getattr(config, "num_hidden_layers", None):
        raise ValueError(f"A configuration of {type(config).__name__} does not name attention heads and layers.")
    if kinds:
        raise ValueError(
            f"The cost model is for models whose layers all attend to the whole context; {type(config).__name__} has "
            f"{', '.join(sorted(kinds))}."
        )


# Hardware


@dataclass(frozen=True)
class Hardware:
    """
    Peak rates of a device.

    Args:
        name (`str`):
            Name of the device.
        peak_flops (`float`):
            Dense bfloat16 FLOP/s, without structured sparsity.
        bandwidth (`float`):
            Bytes/s of its memory.

    Raises:
        ValueError: when a rate is not a positive number.
    """

    name: str
    peak_flops: float
    bandwidth: float

    def __post_init__(self):
        for field in ("peak_flops", "bandwidth"):
            _check_number(field, getattr(self, field), above=0)

    def arithmetic_intensity(self, element_bytes: int = 2) -> float:
        """
        FLOPs that the device can do while it reads one number: `I` of the paper's cost model.

        Args:
            element_bytes (`int`, *optional*, defaults to `2`):
                Bytes of the number.
        """
        return self.peak_flops / self.bandwidth * element_bytes


# NVIDIA's datasheets: the SXM variants where there are several, A100 with 80 GB, B200 as one of eight in an HGX.
HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware("H200", peak_flops=989.5e12, bandwidth=4.8e12),
        Hardware("H100", peak_flops=989.5e12, bandwidth=3.35e12),
        Hardware("A100", peak_flops=312e12, bandwidth=2.039e12),
        Hardware("B200", peak_flops=2250e12, bandwidth=8e12),
        Hardware("L40S", peak_flops=362.05e12, bandwidth=0.864e12),
    )
}


def get_hardware(hardware: str | Hardware) -> Hardware:
    """
    The device that `hardware` stands for.

    Args:
        hardware (`str` or [`Hardware`]):
            Name of a device in `HARDWARE`, in upper or lower case, or the figures of another.

    Raises:
        ValueError: when the name is unknown; the message lists those there are.
    """
    if isinstance(hardware, Hardware):
        return hardware
    known = {name.lower(): value for name, value in HARDWARE.items()}
    try:
        return known[hardware.lower()]
    except (KeyError, AttributeError):
        raise ValueError(
            f"Unknown hardware {hardware!r}. The known ones are {', '.join(HARDWARE)}; for another, give its figures: "
            "Hardware(name, peak_flops=..., bandwidth=...)."
        ) from None


# The model


@dataclass(frozen=True)
class CostShape(ModelShape):
    """
    What of a model decides the cost of a rollout: what a step reads, and the query heads that use it.

    Args:
        num_layers (`int`): Attention layers.
        kv_heads (`int`): Key-value heads of a layer.
        head_dim (`int`): Dimensions of a head.
        weight_bytes (`int`): Weights that every step reads: all, but for an input embedding that is not the head too.
        total_weight_bytes (`int`): All weights.
        element_bytes (`int`): Bytes of a weight, and of a number in the KV cache.
        query_heads (`int`): Query heads of a layer.
    """

    query_heads: int

    @property
    def num_parameters(self) -> float:
        """`float`: Parameters, tied ones once (`P`)."""
        return self.total_weight_bytes / self.element_bytes

    @property
    def kv_dim(self) -> int:
        """`int`: Dimension of the keys of all layers, which is also that of the values (`D`)."""
        return self.num_layers * self.kv_heads * self.head_dim

    @property
    def gqa_ratio(self) -> float:
        """`float`: Query heads per key-value head (`r`)."""
        return self.query_heads / self.kv_heads

    @classmethod
    def from_config(cls, config, element_bytes: int = 2) -> "CostShape":
        """
        Shape of the model that a transformers `config` describes. All experts of a mixture count.

        Args:
            config ([`~transformers.PreTrainedConfig`]): Configuration of a causal language model.
            element_bytes (`int`, *optional*, defaults to `2`): Bytes of a weight, and of a number in the KV cache.

        Raises:
            ValueError: for a model whose layers do not all attend to the whole context.
        """
        _check_full_attention(config)
        shape = ModelShape.from_config(config, element_bytes)
        return cls(**dataclasses.asdict(shape), query_heads=config.num_attention_heads)


# The paper's formulas


@dataclass(frozen=True)
class RolloutCost:
    """
    Cost of a rollout by the paper's formulas.

    Args:
        flops (`float`):
            Computation in FLOPs (`C_comp`).
        elements (`float`):
            Numbers read from memory (`C_mem`).
    """

    flops: float
    elements: float

    def eflops(self, intensity: float) -> float:
        """
        `C = C_comp + I C_mem`.

        Args:
            intensity (`float`):
                FLOPs per number read (`I`), from [`Hardware.arithmetic_intensity`].
        """
        return self.flops + intensity * self.elements


def dense_cost(shape: CostShape, num_samples: int, prompt_tokens: int, output_tokens: int) -> RolloutCost:
    """
    Cost of a dense rollout (project page, "Dense attention").

    Args:
        shape ([`CostShape`]):
            The model.
        num_samples (`int`):
            Samples of the prompt, which read its keys and values together (`N`).
        prompt_tokens (`int`):
            Tokens of the prompt (`L_in`).
        output_tokens (`int`):
            Tokens that each sample generates (`L_out`).

    Returns:
        [`RolloutCost`]
    """
    _check_rollout(prompt_tokens, output_tokens, num_samples=num_samples)
    n, l_in, l_out, d = num_samples, prompt_tokens, output_tokens, shape.kv_dim
    return RolloutCost(
        flops=2 * shape.num_parameters * n * l_out + shape.gqa_ratio * (2 * l_in + l_out) * l_out * n * d,
        elements=2 * l_in * l_out * d + n * l_out**2 * d,
    )


def sparse_cost(
    shape: CostShape,
    num_samples: int,
    prompt_tokens: int,
    output_tokens: int,
    budget_tokens: float,
    page_size: int = 16,
) -> RolloutCost:
    """
    Cost of a block-sparse rollout with one budget at every length (project page, "Block-sparse attention").

    As published, a context shorter than the budget is charged with the whole budget; [`schedule_cost`] is not so.

    Args:
        shape ([`CostShape`]):
            The model.
        num_samples (`int`):
            Samples of the prompt (`N`).
        prompt_tokens (`int`):
            Tokens of the prompt (`L_in`).
        output_tokens (`int`):
            Tokens that each sample generates (`L_out`).
        budget_tokens (`float`):
            Tokens that a query reads (`B`).
        page_size (`int`, *optional*, defaults to `16`):
            Tokens in a page.

    Returns:
        [`RolloutCost`]
    """
    _check_rollout(prompt_tokens, output_tokens, num_samples=num_samples, page_size=page_size)
    _check_number("budget_tokens", budget_tokens, above=0)
    n, l_in, l_out = num_samples, prompt_tokens, output_tokens
    d, r, b, s = shape.kv_dim, shape.gqa_ratio, budget_tokens, page_size
    scoring_flops = 2 * n * l_in * d * l_out + r * n * d * l_out**2 / (2 * s)
    scoring_elements = 2 * l_in * d * l_out + n * d * l_out**2 / (2 * s)
    return RolloutCost(
        flops=2 * n * shape.num_parameters * l_out + 2 * r * n * d * b * l_out + scoring_flops,
        elements=2 * n * d * b * l_out + scoring_elements,
    )


def schedule_cost(
    shape: CostShape, num_samples: int, prompt_tokens: int, output_tokens: int, schedule: SparsityScheduleConfig
) -> RolloutCost:
    """
    Cost of a rollout under a schedule: the sparse formula integrated over the cached length.

    The formula is linear in the budget, so that its integral has the average of what queries read for `B`: the
    schedule's budget, or the context where that is shorter (as `H` in the paper's appendix F), over all sparse layers.
    As in the formula, dense layers count as sparse ones and every page has one landmark of the cache's type. Without
    any sparse layer the cost is the dense one.

    Args:
        shape ([`CostShape`]):
            The model.
        num_samples (`int`):
            Samples of the prompt (`N`).
        prompt_tokens (`int`):
            Tokens of the prompt (`L_in`).
        output_tokens (`int`):
            Tokens that each sample generates (`L_out`).
        schedule ([`SparsityScheduleConfig`]):
            The schedule.

    Returns:
        [`RolloutCost`]
    """
    sparse_layers = [layer for layer in range(shape.num_layers) if not schedule.is_dense_layer(layer)]
    if not sparse_layers:
        return dense_cost(shape, num_samples, prompt_tokens, output_tokens)
    _check_rollout(prompt_tokens, output_tokens)
    lengths = np.arange(prompt_tokens + 1, prompt_tokens + output_tokens + 1)
    pages = -(-lengths // schedule.page_size)
    reserved = schedule.sink_pages + schedule.recent_pages
    contexts = lengths - 0.5  # the closed forms integrate over the length: a step counts with its middle
    total = 0.0
    for layer in sparse_layers:
        budgets = (schedule.to_table(int(lengths[-1]), layer).numpy()[pages] + reserved) * schedule.page_size
        total += np.minimum(budgets, contexts).mean()
    budget = total / len(sparse_layers)
    return sparse_cost(shape, num_samples, prompt_tokens, output_tokens, budget, schedule.page_size)


# Seconds


def step_seconds(
    shape: CostShape,
    hardware: str | Hardware,
    batch_size: int,
    length: int,
    schedule: SparsityScheduleConfig | None = None,
    *,
    overhead_seconds: float = 0.0,
    bandwidth_share: float = 1.0,
) -> float:
    """
    Least time of a decode step: reading weights, kept keys and values, and landmarks, or computing with them,
    whichever takes longer. Every sequence reads its own prompt.

    Args:
        shape ([`CostShape`]):
            The model.
        hardware (`str` or [`Hardware`]):
            Device, as in [`get_hardware`].
        batch_size (`int`):
            Sequences in the step.
        length (`int`):
            Cached tokens of each sequence, the query's own included.
        schedule ([`SparsityScheduleConfig`], *optional*):
            Sparsity schedule; dense attention by default.
        overhead_seconds (`float`, *optional*, defaults to `0.0`):
            Time of a step beside that, such as the host's.
        bandwidth_share (`float`, *optional*, defaults to `1.0`):
            Achievable share of the device's bandwidth, in (0, 1]. Copies within an H200's memory reach 0.86 to 0.88.

    Returns:
        `float`: Seconds.
    """
    _check_rollout(0, 1, batch_size=batch_size, length=length)
    traffic = step_traffic(shape, batch_size, [length], schedule)
    roofline = _Roofline(shape, hardware, batch_size, schedule, overhead_seconds, bandwidth_share)
    return float(roofline.seconds(traffic.kv, traffic.landmarks))


def rollout_seconds(
    shape: CostShape,
    hardware: str | Hardware,
    batch_size: int,
    prompt_tokens: int,
    output_tokens: int,
    schedule: SparsityScheduleConfig | None = None,
    *,
    overhead_seconds: float = 0.0,
    bandwidth_share: float = 1.0,
) -> float:
    """
    Least time of a rollout in which every sequence generates `output_tokens`: the sum of [`step_seconds`] over its
    lengths.

    Args:
        shape ([`CostShape`]):
            The model.
        hardware (`str` or [`Hardware`]):
            Device, as in [`get_hardware`].
        batch_size (`int`):
            Sequences that decode together.
        prompt_tokens (`int`):
            Tokens of each prompt. Computing them is not part of the time.
        output_tokens (`int`):
            Tokens that each sequence generates.
        schedule ([`SparsityScheduleConfig`], *optional*):
            Sparsity schedule; dense attention by default.
        overhead_seconds (`float`, *optional*, defaults to `0.0`):
            As in [`step_seconds`], of each step.
        bandwidth_share (`float`, *optional*, defaults to `1.0`):
            As in [`step_seconds`].

    Returns:
        `float`: Seconds.
    """
    _check_rollout(prompt_tokens, output_tokens, batch_size=batch_size)
    roofline = _Roofline(shape, hardware, batch_size, schedule, overhead_seconds, bandwidth_share)
    kv, landmarks = _traffic_by_length(shape, batch_size, prompt_tokens + 1, prompt_tokens + output_tokens, schedule)
    return float(roofline.seconds(kv, landmarks).sum())


def read_bytes(shape: ModelShape, first: int, last: int, schedule: SparsityScheduleConfig | None = None) -> np.ndarray:
    """
    Keys, values and landmarks that one sequence's decode step reads, at each cached length.

    Args:
        shape ([`~sparrow_trl.bench_traffic.ModelShape`]):
            The model.
        first (`int`):
            First cached length.
        last (`int`):
            Last cached length.
        schedule ([`SparsityScheduleConfig`], *optional*):
            Sparsity schedule; dense attention by default.

    Returns:
        `numpy.ndarray` of shape `[last - first + 1]`: Bytes.
    """
    if not 1 <= first <= last <= MAX_ROLLOUT_TOKENS:
        raise ValueError(f"`first` and `last` must be lengths from 1 to {MAX_ROLLOUT_TOKENS:,}, got {first}, {last}.")
    kv, landmarks = _traffic_by_length(shape, 1, first, last, schedule)
    return kv + landmarks


def page_equivalents(shape: ModelShape, num_bytes):
    """
    Bytes of a decode step, as pages of 16 tokens that an average layer reads.

    Args:
        shape ([`~sparrow_trl.bench_traffic.ModelShape`]):
            The model.
        num_bytes (`float` or `numpy.ndarray`):
            Bytes, as from [`read_bytes`].
    """
    return num_bytes / (PAPER_PAGE_TOKENS * shape.kv_bytes_per_token)


class _Roofline:
    """Time of a step from the bytes of its keys, values and landmarks (numbers or arrays)."""

    def __init__(self, shape, hardware, batch_size, schedule, overhead_seconds, bandwidth_share):
        hardware = get_hardware(hardware)
        _check_number("overhead_seconds", overhead_seconds, at_least=0)
        _check_number("bandwidth_share", bandwidth_share, above=0, at_most=1)
        self.bandwidth, self.peak_flops = hardware.bandwidth * bandwidth_share, hardware.peak_flops
        self.overhead_seconds, self.weight_bytes = overhead_seconds, shape.weight_bytes
        self.weight_flops = 2 * batch_size * shape.weight_bytes / shape.element_bytes
        # Each number of a key or a value meets every query head of its group in one multiply-add.
        self.flops_per_kv_byte = 2 * shape.gqa_ratio / shape.element_bytes
        self.flops_per_landmark_byte = 0
        if schedule is not None:
            # "mean_query" averages the group before it scores.
            heads = shape.query_heads if schedule.page_score == "group_softmax" else shape.kv_heads
            page_flops = 2 * schedule.landmarks_per_page * heads * shape.head_dim
            self.flops_per_landmark_byte = page_flops / shape.page_landmark_bytes(schedule)

    def seconds(self, kv, landmarks):
        memory = (kv + landmarks + self.weight_bytes) / self.bandwidth
        flops = self.weight_flops + kv * self.flops_per_kv_byte + landmarks * self.flops_per_landmark_byte
        return np.maximum(memory, flops / self.peak_flops) + self.overhead_seconds


def _traffic_by_length(
    shape: ModelShape, batch_size: int, first: int, last: int, schedule: SparsityScheduleConfig | None
) -> tuple[np.ndarray, np.ndarray]:
    """
    Bytes of keys and values, and of landmarks, in the steps at lengths `first` to `last`.

    Between two changes of a budget both are linear in the page and, within a page, in the token. So the first and last
    token of the first and last page of each such segment tell the rest.
    """
    page_size = 16 if schedule is None else schedule.page_size
    lengths = np.arange(first, last + 1)
    pages = -(-lengths // page_size)
    changes = set() if schedule is None else _change_pages(schedule)
    starts = np.array(sorted({pages[0]} | {page for page in changes if pages[0] < page <= pages[-1]}))
    ends = np.append(starts[1:] - 1, pages[-1])

    def read(page: int) -> list[tuple[float, float]]:
        tokens = ((page - 1) * page_size + 1, page * page_size)
        steps = [step_traffic(shape, batch_size, [int(length)], schedule) for length in tokens]
        return [(traffic.kv, traffic.landmarks) for traffic in steps]

    first_pages, last_pages = (np.array([read(page) for page in edges]) for edges in (starts, ends))
    segment = np.searchsorted(starts, pages, side="right") - 1
    across = ((pages - starts[segment]) / np.maximum(ends - starts, 1)[segment])[:, None, None]
    first_tokens, last_tokens = np.moveaxis(
        first_pages[segment] + across * (last_pages - first_pages)[segment], source=1, destination=0
    )
    within = ((lengths - 1) % page_size / (page_size - 1))[:, None]
    kv, landmarks = (first_tokens + within * (last_tokens - first_tokens)).T
    return kv, landmarks


def _change_pages(schedule: SparsityScheduleConfig) -> set[int]:
    """Pages of context from which on a query may read by another rule than with one page less."""
    tables = [schedule.top_k_pages, *(schedule.layer_top_k_pages or {}).values()]
    bins = range(1, max(map(len, tables)))
    reserved = schedule.sink_pages + schedule.recent_pages
    full = {reserved + top_k + 1 for table in tables for top_k in table}  # the first context that loses a page
    return full | {index * (schedule.bin_tokens // schedule.page_size) for index in bins}


# Speedups


@dataclass(frozen=True)
class PredictedSpeedup:
    """
    How much less a sparse rollout costs than a dense one, by both estimates.

    Args:
        dense_eflops (`float`):
            Cost of the dense rollout by the paper's formula.
        sparse_eflops (`float`):
            That of the sparse rollout.
        dense_seconds (`float`):
            Least time of the dense rollout, from what its steps read.
        sparse_seconds (`float`):
            That of the sparse rollout.
    """

    dense_eflops: float
    sparse_eflops: float
    dense_seconds: float
    sparse_seconds: float

    @property
    def paper(self) -> float:
        """`float`: Speedup by the paper's formula."""
        return self.dense_eflops / self.sparse_eflops

    @property
    def refined(self) -> float:
        """`float`: Speedup by the least times of the steps."""
        return self.dense_seconds / self.sparse_seconds


def predicted_speedup(
    shape: CostShape,
    schedule: SparsityScheduleConfig,
    hardware: str | Hardware = "H200",
    *,
    num_samples: int = 8,
    batch_size: int = 32,
    prompt_tokens: int = 0,
    output_tokens: int = 32768,
    overhead_seconds: float = 0.0,
    bandwidth_share: float = 1.0,
) -> PredictedSpeedup:
    """
    Predict the speedup of a rollout by the paper's formula and by what its steps read.

    Args:
        shape ([`CostShape`]):
            The model.
        schedule ([`SparsityScheduleConfig`]):
            The schedule.
        hardware (`str` or [`Hardware`], *optional*, defaults to `"H200"`):
            Device, as in [`get_hardware`].
        num_samples (`int`, *optional*, defaults to `8`):
            Samples of a prompt in the paper's formula; the default is that of its appendix C.
        batch_size (`int`, *optional*, defaults to `32`):
            Sequences that decode together in the other estimate. The more, the less the weights count.
        prompt_tokens (`int`, *optional*, defaults to `0`):
            Tokens of a prompt.
        output_tokens (`int`, *optional*, defaults to `32768`):
            Tokens that each sequence generates.
        overhead_seconds (`float`, *optional*, defaults to `0.0`):
            As in [`step_seconds`].
        bandwidth_share (`float`, *optional*, defaults to `1.0`):
            As in [`step_seconds`].

    Returns:
        [`PredictedSpeedup`]

    Example:

    ```python
    >>> from transformers import AutoConfig
    >>> shape = CostShape.from_config(AutoConfig.from_pretrained("Qwen/Qwen3-1.7B"))
    >>> speedup = predicted_speedup(shape, SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86"))
    >>> speedup.paper, speedup.refined
    ```
    """
    hardware = get_hardware(hardware)
    dense_layers = () if schedule.is_dense else schedule.dense_layers
    if dense_layers and max(dense_layers) >= shape.num_layers:
        raise ValueError(f"`dense_layers` names layer {max(dense_layers)}, but the model has {shape.num_layers}.")
    tokens = (prompt_tokens, output_tokens)
    intensity = hardware.arithmetic_intensity(shape.element_bytes)
    options = {"overhead_seconds": overhead_seconds, "bandwidth_share": bandwidth_share}
    return PredictedSpeedup(
        dense_eflops=dense_cost(shape, num_samples, *tokens).eflops(intensity),
        sparse_eflops=schedule_cost(shape, num_samples, *tokens, schedule).eflops(intensity),
        dense_seconds=rollout_seconds(shape, hardware, batch_size, *tokens, **options),
        sparse_seconds=rollout_seconds(shape, hardware, batch_size, *tokens, schedule, **options),
    )
