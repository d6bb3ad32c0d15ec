"""
From a model and prompts to the cheapest schedule that keeps the tail acceptance (paper, sections 3.2 and 3.3).

Three steps: measure the acceptance rates of many budgets, search the cheapest schedule that these allow, and measure
that schedule itself. The third is needed because keys and values at a length also carry what was read at shorter ones,
under other budgets than the one that was measured there; bins that fall short are raised.

Teacher-forced, everything is measured on the same sequences, which the dense model has generated. With rollouts, the
paper's way, each budget and each schedule generates its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import nn

from .acceptance import AcceptanceTracker, BinStatistics
from .acceptance_plots import plot_tails
from .acceptance_sweep import (
    TokenSequence,
    evaluating,
    gather_objects,
    measure_acceptance,
    measure_rollout_acceptance,
    process_rank,
    sequence_acceptance,
)
from .acceptance_table import METHODS, AcceptanceTable
from .pictures import save_figure
from .published_files import TABLE_NAME
from .rollout_sequences import SparseRollouts
from .schedule import SparsityScheduleConfig
from .schedule_report import draw_schedule
from .schedule_search import ScheduleSearchResult, bin_text, search_schedule
from .sequence_generation import GENERATORS, GPU_MEMORY_UTILIZATION, generate_sequences
from .tables import Table


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase

    from .rollout_adapter import RolloutAdapter


# Pages in total, reserved ones included: as many budgets as the paper sweeps, from its schedules' range.
PAGE_COUNTS = (16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 896)

# The first two layers dense.
PAPER_RECIPE = SparsityScheduleConfig(top_k_pages=[0])

TAIL_PICTURE_NAME = "tail_acceptance.png"
SCHEDULE_PICTURE_NAME = "schedule.png"


@dataclass(frozen=True)
class CalibrationResult:
    """
    A calibrated schedule and the measurements behind it.

    Args:
        schedule ([`SparsityScheduleConfig`]):
            The schedule.
        table ([`~sparrow_trl.acceptance_table.AcceptanceTable`]):
            Acceptance rates of the single budgets.
        search ([`~sparrow_trl.schedule_search.ScheduleSearchResult`]):
            What the search chose from them, before any bin was raised.
        verified (`list[BinStatistics]`):
            Acceptance under `schedule` itself, by bin of cached length: on the same sequences, or on those that it
            generated.
        min_tokens (`int`):
            Tokens that a bin's tail needs to count.
    """

    schedule: SparsityScheduleConfig
    table: AcceptanceTable
    search: ScheduleSearchResult
    verified: list[BinStatistics]
    min_tokens: int

    @property
    def short_bins(self) -> list[BinStatistics]:
        """`list[BinStatistics]`: Bins with enough tokens in which even the largest budget fell short of the target."""
        return _short_bins(self.verified, self.schedule, self.min_tokens)

    def to_table(self) -> Table:
        """What was chosen for each bin, and what it turned out to keep."""
        columns = ["cached tokens", "pages", "tail, budget alone", "tail, whole schedule", "tokens", "chosen as"]
        table = Table(f"Schedule for a tail acceptance of {self.schedule.target_acceptance:g}", columns)
        verified = {entry.start: entry for entry in self.verified}
        tails, enough_alone = self.table.quantile(self.schedule.tail_quantile), self.table.count >= self.min_tokens
        for index, (choice, top_k) in enumerate(zip(self.search.bins, self.schedule.top_k_pages, strict=True)):
            pages = self.schedule.sink_pages + top_k + self.schedule.recent_pages
            entry = verified.get(choice.start)
            enough = entry is not None and entry.tokens >= self.min_tokens
            alone = "-"
            if pages in self.table.page_counts:
                row = self.table.page_counts.index(pages)
                alone = f"{tails[row, index]:.4f}" if enough_alone[row, index] else "-"
            table.rows.append(
                [
                    bin_text(self.schedule, index),
                    str(pages),
                    alone,
                    f"{entry.tail:.4f}" if enough else "-",
                    f"{entry.tokens:,}" if entry else "0",
                    choice.status if pages == choice.pages else f"{choice.status}, raised from {choice.pages}",
                ]
            )
        return table

    def plot_tails(self) -> "Figure":
        """The tail acceptance over the cached length, budget by budget, with the schedule's budgets marked."""
        return plot_tails(self.table, self.schedule, q=self.schedule.tail_quantile, min_tokens=self.min_tokens)

    def save(self, folder: str | Path) -> None:
        """
        Write `acceptance_table.json`, `sparsity_schedule.json` and pictures of both.

        Args:
            folder (`str` or `pathlib.Path`):
                Folder to write to, which is created when missing.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.table.save(folder / TABLE_NAME)
        self.schedule.save_pretrained(folder)
        save_figure(self.plot_tails(), folder / TAIL_PICTURE_NAME)
        save_figure(draw_schedule(self.schedule), folder / SCHEDULE_PICTURE_NAME)


def calibrate(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[str] | list[list[dict[str, str]]],
    *,
    max_length: int,
    method: Literal["teacher_forced", "rollout"] = "teacher_forced",
    generator: Literal["auto", "vllm", "transformers"] = "auto",
    batch_size: int = 8,
    seed: int = 0,
    model_path: str | Path | None = None,
    vllm_gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    **fit_options,
) -> CalibrationResult:
    """
    Calibrate a schedule on completions that the model writes.

    Args:
        model (`torch.nn.Module`):
            Causal language model of transformers.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts (`list[str]` or `list[list[dict[str, str]]]`):
            Texts or conversations, of the kind that rollouts will start from.
        max_length (`int`):
            Most tokens of a sequence, prompt included. Longer contexts get the budget of the last bin.
        method (`str`, *optional*, defaults to `"teacher_forced"`):
            `"teacher_forced"`: the dense model completes the prompts once, and every budget is measured on these
            sequences. `"rollout"`, the paper's way: every budget generates its own in vLLM's engine under sparse
            attention, and the dense model scores those.
        generator (`str`, *optional*, defaults to `"auto"`):
            What generates: `"vllm"`, `"transformers"` (teacher-forced alone), or `"auto"`, vLLM where it can.
        batch_size (`int`, *optional*, defaults to `8`):
            Prompts that transformers completes at once. vLLM sees to that itself.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling.
        model_path (`str` or `pathlib.Path`, *optional*):
            Folder or Hub id of the model, for vLLM, where its weights are those of `model`. By default the weights as
            they are now are written to a temporary folder.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.5`):
            Share of the GPU's memory for vLLM's engine, beside `model`. The engine ends when the sequences are
            generated, and with rollouts when the schedule is found.
        **fit_options:
            As in [`fit_schedule`]. With rollouts, generated sequences are kept beside `checkpoint_path`, in a folder
            of its name and `_rollouts`.

    Returns:
        [`CalibrationResult`]

    Raises:
        ValueError: as in [`~sparrow_trl.sequence_generation.generate_sequences`],
            [`~sparrow_trl.rollout_sequences.SparseRollouts`] and [`fit_schedule`].
        ImportError: for vLLM without a supported version of it.
        RuntimeError: when vLLM's engine fails.

    Example:

    ```python
    >>> result = calibrate(model, tokenizer, prompts, max_length=4096, target_acceptance=0.86)
    >>> result.save("calibration")
    >>> trainer = SparseRolloutGRPOTrainer(..., args=SparseRolloutGRPOConfig(sparsity_schedule="calibration"))
    ```
    """
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}.")
    options = {
        "max_length": max_length,
        "seed": seed,
        "model_path": model_path,
        "vllm_gpu_memory_utilization": vllm_gpu_memory_utilization,
        "report": fit_options.get("report"),
    }
    if method == "teacher_forced":
        sequences = generate_sequences(
            model, tokenizer, prompts, generator=generator, batch_size=batch_size, **options
        )
        return fit_schedule(model, sequences, **fit_options)
    if generator not in GENERATORS or generator == "transformers":
        raise ValueError(
            f"`generator` must be 'vllm' or 'auto' with rollouts, which its engine generates; got {generator!r}."
        )
    recipe = fit_options.get("recipe") or PAPER_RECIPE
    checkpoint_path = fit_options.get("checkpoint_path")
    if checkpoint_path is not None:
        options["folder"] = rollouts_folder(checkpoint_path)
    with SparseRollouts(model, tokenizer, prompts, recipe, **options) as rollouts:
        return fit_schedule(model, rollouts, **fit_options)


def rollouts_folder(checkpoint_path: str | Path) -> Path:
    """Folder of the generated sequences beside the checkpoint `checkpoint_path` (`str` or `pathlib.Path`)."""
    return Path(checkpoint_path).with_name(f"{Path(checkpoint_path).stem}_rollouts")


def fit_schedule(
    model: nn.Module,
    sequences: list[TokenSequence] | SparseRollouts,
    *,
    recipe: SparsityScheduleConfig | None = None,
    page_counts: list[int] | None = None,
    bin_tokens: int = 2048,
    target_acceptance: float = 0.86,
    min_tokens: int = 200,
    confidence: float | None = None,
    allow_dense: bool = False,
    model_name: str | None = None,
    checkpoint_path: str | Path | None = None,
    chunk_size: int = 256,
    report: Callable[[str], None] | None = None,
    on_measured: Callable[[AcceptanceTable], None] | None = None,
) -> CalibrationResult:
    """
    Calibrate a schedule on given sequences, teacher-forced, or with rollouts.

    Args:
        model (`torch.nn.Module`):
            As in [`~sparrow_trl.acceptance_sweep.measure_acceptance`].
        sequences (`list[TokenSequence]` or [`~sparrow_trl.rollout_sequences.SparseRollouts`]):
            What to measure every budget on, or what generates sequences for each.
        recipe ([`SparsityScheduleConfig`], *optional*):
            How pages are scored and reserved, and the dense layers; by default that of the rollouts, or the paper's,
            with the first two layers dense.
        page_counts (`list[int]`, *optional*):
            Budgets to measure in pages, reserved ones included, in ascending order; by default those of `PAGE_COUNTS`
            that are shorter than the longest sequence (of rollouts: than it may be).
        bin_tokens (`int`, *optional*, defaults to `2048`):
            Tokens in a bin of cached length.
        target_acceptance (`float`, *optional*, defaults to `0.86`):
            Tail acceptance to keep. The paper finds training stable above 0.86.
        min_tokens (`int`, *optional*, defaults to `200`):
            Tokens that a bin's tail needs to count. With rollouts, a bin counts where the largest budget's have them.
        confidence (`float`, *optional*):
            Judge a budget by the lower end of the bootstrap interval of its tail at this level, such as 0.9, instead
            of by the tail itself. It resamples sequences: a few damaged ones more or less can move the 5th percentile
            far where many tokens lie on either side of it.
        allow_dense (`bool`, *optional*, defaults to `False`):
            Whether bins in which no budget reaches the target may keep all their pages.
        model_name (`str`, *optional*):
            Name of the model in the results; by default the model's own.
        checkpoint_path (`str` or `pathlib.Path`, *optional*):
            File that the measurement of the budgets goes on from after an interruption.
        chunk_size (`int`, *optional*, defaults to `256`):
            Positions whose logits are held at once.
        report (callable, *optional*):
            Called with a line of text when something was decided.
        on_measured (callable, *optional*):
            Called with the acceptance table before the search, which may find that no budget reaches the target.

    Returns:
        [`CalibrationResult`]

    Raises:
        ValueError: as in [`~sparrow_trl.acceptance_sweep.measure_acceptance`] and
            [`~sparrow_trl.schedule_search.search_schedule`].
    """
    rollouts = sequences if isinstance(sequences, SparseRollouts) else None
    recipe = recipe or (PAPER_RECIPE if rollouts is None else rollouts.recipe)
    # Refused before the long part.
    replace(recipe, bin_tokens=bin_tokens, target_acceptance=target_acceptance)
    if target_acceptance is None or isinstance(min_tokens, bool) or not isinstance(min_tokens, int) or min_tokens < 1:
        raise ValueError(
            "`target_acceptance` must be a number in (0, 1] and `min_tokens` a positive integer, got "
            f"{target_acceptance!r} and {min_tokens!r}."
        )
    if confidence is not None and not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0 and 1, got {confidence!r}.")
    if page_counts is None:
        if rollouts is not None:
            longest = rollouts.max_length
        else:
            longest = max((len(sequence.token_ids) for sequence in sequences), default=0)
        longest //= recipe.page_size
        page_counts = [pages for pages in PAGE_COUNTS if pages <= longest] or [PAGE_COUNTS[0]]
    options = {"model_name": model_name, "checkpoint_path": checkpoint_path, "chunk_size": chunk_size}
    if rollouts is None:
        table = measure_acceptance(model, sequences, recipe, page_counts, bin_tokens, **options)
    else:
        budgets = AcceptanceTable(recipe, page_counts, bin_tokens, 1)
        generated = [rollouts.generate(budgets.schedule(index)) for index in range(len(page_counts))]
        table = measure_rollout_acceptance(model, generated, recipe, page_counts, bin_tokens, **options)
    if on_measured is not None:
        on_measured(table)
    tails = table.quantile(recipe.tail_quantile)
    if confidence is not None:
        lower = table.quantile_interval(recipe.tail_quantile, level=confidence)[..., 0]
        tails = np.where(np.isnan(lower), tails, np.minimum(lower, tails))
    counts = table.count
    if rollouts is not None:
        # Damaged rollouts run on for longer. What they alone reach is no length that the found schedule will see.
        counts = np.where(counts[-1] >= min_tokens, counts, 0)
    search = search_schedule(
        table.page_counts,
        tails,
        counts,
        bin_tokens=bin_tokens,
        target_acceptance=target_acceptance,
        min_tokens=min_tokens,
        allow_dense=allow_dense,
        tail_quantile=recipe.tail_quantile,
        base_model_name_or_path=table.model_name,
        **table.recipe,
    )
    schedule = search.schedule
    while True:
        if rollouts is not None:
            sequences = rollouts.generate(schedule)
        verified = measure_schedule(model, sequences, schedule, chunk_size=chunk_size)
        short = _short_bins(verified, schedule, min_tokens)
        raised = _raise_bins(schedule, [entry.start // bin_tokens for entry in short], table.page_counts)
        if raised == schedule:
            break
        worst = min(short, key=lambda entry: entry.tail)
        if report is not None:
            report(
                f"Under the schedule itself {len(short)} of {len(verified)} bins fall short of {target_acceptance:g} "
                f"(lowest: {worst.tail:.4f} around {worst.start + bin_tokens // 2:,} tokens). They get the next "
                "larger budget."
            )
        schedule = raised
    tokens = sum(len(sequence.cached_lengths) for sequence in sequences)
    schedule = replace(
        schedule,
        calibration={
            "method": table.method,
            "sequences": len(sequences),
            "tokens": tokens,
            "tails": {str(entry.start): round(entry.tail, 4) for entry in verified if entry.tokens >= min_tokens},
        },
    )
    return CalibrationResult(schedule, table, search, verified, min_tokens)


def measure_schedule(
    model: nn.Module,
    sequences: list[TokenSequence],
    schedule: SparsityScheduleConfig,
    *,
    chunk_size: int = 256,
    temperature: float = 1.0,
    adapter: "RolloutAdapter | None" = None,
) -> list[BinStatistics]:
    """
    Acceptance under a schedule as a whole, teacher-forced. With `torch.distributed` initialized, the sequences are
    split over the processes.

    Args:
        model (`torch.nn.Module`):
            As in [`~sparrow_trl.acceptance_sweep.measure_acceptance`].
        sequences (`list[TokenSequence]`):
            What to measure on.
        schedule ([`SparsityScheduleConfig`]):
            The schedule.
        chunk_size (`int`, *optional*, defaults to `256`):
            Positions whose logits are held at once.
        temperature (`float`, *optional*, defaults to `1.0`):
            What logits are divided by.
        adapter ([`~sparrow_trl.rollout_adapter.RolloutAdapter`], *optional*):
            Adapter that the sparse passes have.

    Returns:
        `list[BinStatistics]`: one per bin of cached length with tokens in it, shortest first.
    """
    rank, num_processes = process_rank()
    rates = {}
    with evaluating(model):
        for index in range(rank, len(sequences), num_processes):
            (values,) = sequence_acceptance(
                model,
                sequences[index],
                [schedule],
                chunk_size=chunk_size,
                temperature=temperature,
                adapter=adapter,
            )
            rates[index] = values.cpu()
    tracker = AcceptanceTracker(schedule)
    for gathered in gather_objects(rates):
        for index, values in gathered.items():
            tracker.update(values, values, sequences[index].cached_lengths)
    tracker.end_step()
    return tracker.bin_statistics()


def _short_bins(
    verified: list[BinStatistics], schedule: SparsityScheduleConfig, min_tokens: int
) -> list[BinStatistics]:
    """Bins below the target that a larger budget could still help."""
    short = []
    for entry in verified:
        last = schedule.bin_lengths(entry.start // schedule.bin_tokens)[1]
        if entry.tokens >= min_tokens and entry.tail < schedule.target_acceptance and schedule.budget(last) < last:
            short.append(entry)
    return short


def _raise_bins(schedule: SparsityScheduleConfig, bins: list[int], page_counts: list[int]) -> SparsityScheduleConfig:
    """The schedule with the next larger measured budget in `bins`, and no smaller one in the bins after them."""
    reserved = schedule.sink_pages + schedule.recent_pages
    pages, previous = [], 0
    for index, top_k in enumerate(schedule.top_k_pages):
        kept = top_k + reserved
        if index in bins:
            kept = next((count for count in page_counts if count > kept), kept)
        previous = max(previous, kept)
        pages.append(previous - reserved)
    return replace(schedule, top_k_pages=pages)
