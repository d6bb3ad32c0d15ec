"""
DistillSparse without RL: an adapter for the rollouts of a model, distilled on given sequences before any training.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from .acceptance import BinStatistics
from .acceptance_sweep import (
    TokenSequence,
    causal_lm_of,
    check_sequences,
    check_sparse_layers,
    process_rank,
    weights_fingerprint,
)
from .calibration import measure_schedule
from .distill import DistillSparseConfig, save_tensors
from .distill_step import AdapterTrainer, Trajectories
from .json_files import dump_json_object, write_atomically
from .pictures import save_figure
from .rollout_adapter import RolloutAdapter
from .schedule import SparsityScheduleConfig
from .tables import Table


PROGRESS_NAME = "distill_progress.pt"
SUMMARY_NAME = "summary.json"
PICTURE_NAME = "distill_sparse.png"

# At least so long lies between two writings of the progress, but for the last.
SAVE_SECONDS = 30
# Each step is some 200 bytes of it.
MAX_SUMMARY_BYTES = 2**28


@dataclass(frozen=True)
class DistillResult:
    """
    A distilled adapter, and what it did to the tail acceptance.

    Args:
        adapter ([`~sparrow_trl.rollout_adapter.RolloutAdapter`]):
            The adapter.
        schedule ([`SparsityScheduleConfig`]):
            Schedule that it was distilled under.
        measured (`dict[str, SparsityScheduleConfig]`):
            Schedules that the tail acceptance was measured under, by name.
        before (`dict[str, list[BinStatistics]]`):
            By the name of each of these, acceptance per bin of cached length without the adapter.
        after (`dict[str, list[BinStatistics]]`):
            The same with it.
        steps (`list[dict[str, float]]`):
            What each step reported, see [`~sparrow_trl.distill_step.AdapterTrainer.step`].
        min_tokens (`int`):
            Tokens a bin needs before its tail counts.
    """

    adapter: RolloutAdapter
    schedule: SparsityScheduleConfig
    measured: dict[str, SparsityScheduleConfig]
    before: dict[str, list[BinStatistics]]
    after: dict[str, list[BinStatistics]]
    steps: list[dict[str, float]]
    min_tokens: int

    def tail(self, name: str, when: str = "after") -> float | None:
        """The smallest tail over the bins with enough tokens of the schedule `name` (`str`), `"before"` or `"after"`;
        `None` where no bin has enough."""
        tails = [entry.tail for entry in getattr(self, when)[name] if entry.tokens >= self.min_tokens]
        return min(tails, default=None)

    @property
    def tokens(self) -> int:
        """`int`: Tokens that were distilled on, each as often as it was."""
        return int(sum(step["tokens"] for step in self.steps))

    def table(self) -> Table:
        """Tails before and after, a row for each schedule and bin with enough tokens."""
        table = Table("Tail acceptance", ["schedule", "cached tokens", "before", "after", "gain", "tokens"])
        for name, bins in self.before.items():
            for old, new in zip(bins, self.after[name], strict=True):
                if old.tokens >= self.min_tokens:
                    last = old.start + self.measured[name].bin_tokens - 1
                    gain = f"{new.tail - old.tail:+.4f}"
                    cells = [name, f"{old.start:,}-{last:,}", f"{old.tail:.4f}", f"{new.tail:.4f}", gain]
                    table.rows.append([*cells, f"{old.tokens:,}"])
        return table

    def summary(self) -> dict[str, Any]:
        """Everything but the adapter, as JSON values."""
        return {
            "tail_before": {name: self.tail(name, "before") for name in self.before},
            "tail_after": {name: self.tail(name) for name in self.after},
            "bins_before": {name: [asdict(entry) for entry in bins] for name, bins in self.before.items()},
            "bins_after": {name: [asdict(entry) for entry in bins] for name, bins in self.after.items()},
            "num_steps": len(self.steps),
            "tokens": self.tokens,
            # What is not finite, such as the norm of a gradient that was left out, is no JSON.
            "steps": [
                {name: value if math.isfinite(value) else None for name, value in step.items()} for step in self.steps
            ],
        }

    def plot(self):
        """Tails over the cached length before and after, a color for each schedule (the paper's figure 7).

        Returns:
            `matplotlib.figure.Figure`
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for index, name in enumerate(self.before):
            half = self.measured[name].bin_tokens / 2
            for bins, style, when in ((self.before[name], "-", "before"), (self.after[name], "--", "after")):
                shown = [entry for entry in bins if entry.tokens >= self.min_tokens]
                lengths, tails = [entry.start + half for entry in shown], [entry.tail for entry in shown]
                axes.plot(lengths, tails, style, marker="o", color=f"C{index}", label=f"{name}, {when}")
        axes.set(xlabel="cached tokens", ylabel="tail acceptance", title="DistillSparse")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        return figure

    def save(self, folder: str | Path) -> None:
        """Write the adapter with its schedule, `summary.json` and a picture to `folder`."""
        folder = Path(folder)
        self.adapter.save_pretrained(folder)
        self.schedule.save_pretrained(folder)
        write_atomically(folder / SUMMARY_NAME, dump_json_object(self.summary(), SUMMARY_NAME, MAX_SUMMARY_BYTES))
        save_figure(self.plot(), folder / PICTURE_NAME)


def distill(
    model: nn.Module,
    sequences: list[TokenSequence],
    schedule: SparsityScheduleConfig,
    config: DistillSparseConfig | None = None,
    *,
    held_out: list[TokenSequence] = (),
    measured: Mapping[str, SparsityScheduleConfig] | None = None,
    num_epochs: int = 1,
    sequences_per_step: int = 4,
    temperature: float = 1.0,
    min_tokens: int = 200,
    seed: int = 0,
    output_dir: str | Path | None = None,
    report: Callable[[str], None] | None = None,
) -> DistillResult:
    """
    Distil an adapter on given sequences: texts, or rollouts of the model.

    There are no rewards, so the loss is the divergence alone. With `torch.distributed` initialized, the sequences of
    each step are split over the processes.

    Args:
        model (`torch.nn.Module`):
            Causal language model of transformers. It is left as it is.
        sequences (`list[TokenSequence]`):
            What to distil on, such as from [`~sparrow_trl.sequence_generation.generate_sequences`].
        schedule ([`SparsityScheduleConfig`]):
            Schedule of the student.
        config ([`DistillSparseConfig`], *optional*):
            Adapter, divergence and optimizer. Its stages are not used.
        held_out (`list[TokenSequence]`, *optional*):
            Sequences on which the tail acceptance is measured before and after.
        measured (`Mapping[str, SparsityScheduleConfig]`, *optional*):
            Schedules, by name, under which it is measured; by default `schedule` alone.
        num_epochs (`int`, *optional*, defaults to `1`):
            How often to go through the sequences.
        sequences_per_step (`int`, *optional*, defaults to `4`):
            Sequences of one step.
        temperature (`float`, *optional*, defaults to `1.0`):
            What logits are divided by, as in the rollouts.
        min_tokens (`int`, *optional*, defaults to `200`):
            Tokens a bin of cached length needs before its tail counts.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the adapter's first weights and of the order of the sequences.
        output_dir (`str` or `pathlib.Path`, *optional*):
            Folder to write the progress and the results to. Where it holds the progress of the same distillation, that
            goes on.
        report (`Callable[[str], None]`, *optional*):
            Told what is being done.

    Returns:
        [`DistillResult`]

    Raises:
        ValueError: for arguments that nothing can be distilled with, and a folder with another distillation.

    Example:

    ```python
    >>> sequences = generate_sequences(model, tokenizer, prompts, max_length=4096)
    >>> schedule = SparsityScheduleConfig.from_preset("qwen3-1.7b-0.80")
    >>> result = distill(model, sequences[8:], schedule, held_out=sequences[:8], output_dir="adapter")
    >>> print(result.table().to_markdown())
    ```
    """
    model = causal_lm_of(model)
    config = replace(config or DistillSparseConfig(), ppo_weight=0.0)
    if config.teacher == "old":
        raise ValueError("teacher='old' needs the log-probs of a training run. Use teacher='current'.")
    if not sequences or sequences_per_step < 1 or num_epochs < 1:
        raise ValueError(
            f"`sequences` ({len(sequences)}), `sequences_per_step` ({sequences_per_step}) and `num_epochs` "
            f"({num_epochs}) must each be at least 1."
        )
    check_sequences(model, {f"`sequences[{index}]`": sequence for index, sequence in enumerate(sequences)})
    check_sparse_layers(model, schedule)
    report = report or (lambda text: None)
    measured = {"schedule": schedule} if measured is None else dict(measured)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        adapter = RolloutAdapter(model, config.lora).to(model.device)
    order = _order(len(sequences), num_epochs, sequences_per_step, seed)
    trainer = AdapterTrainer(model, adapter, config, num_steps=len(order), temperature=temperature)
    identity = _identity(model, adapter, sequences, schedule, config, order, temperature)
    steps = []
    progress_file = None
    if output_dir is not None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        progress_file = Path(output_dir) / PROGRESS_NAME
        steps = _resume(progress_file, identity, adapter, trainer)
        if steps:
            report(f"Going on after step {len(steps)} of {len(order)}.")

    def measure(using: RolloutAdapter | None) -> dict[str, list[BinStatistics]]:
        return {
            name: measure_schedule(model, list(held_out), entry, temperature=temperature, adapter=using)
            for name, entry in measured.items()
        }

    report("Measuring without the adapter.")
    before = measure(None)
    rank, num_processes = process_rank()
    with tqdm(
        total=len(order), initial=len(steps), desc="Distilling", unit="step", disable=None if rank == 0 else True
    ) as bar:
        written = time.monotonic()
        for indices in order[len(steps) :]:
            own = [_trajectory(sequences[index], model.device) for index in indices[rank::num_processes]]
            # Dropout is the same whether the run was interrupted or not.
            with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
                torch.manual_seed(seed + len(steps))
                steps.append(trainer.step(own, schedule))
            bar.update()
            bar.set_postfix(kl=f"{steps[-1].get('kl', math.nan):.4f}")
            due = time.monotonic() - written >= SAVE_SECONDS or len(steps) == len(order)
            if progress_file is not None and rank == 0 and due:
                _save(progress_file, identity, adapter, trainer, steps)
                written = time.monotonic()
    report("Measuring with the adapter.")
    result = DistillResult(adapter, schedule, measured, before, measure(adapter), steps, min_tokens)
    if output_dir is not None and rank == 0:
        result.save(output_dir)
    return result


def _trajectory(sequence: TokenSequence, device: torch.device) -> Trajectories:
    input_ids = torch.tensor([sequence.token_ids], device=device)
    mask = torch.ones_like(input_ids)
    return Trajectories(input_ids, mask, mask[:, sequence.prompt_length :])


def _order(num_sequences: int, num_epochs: int, per_step: int, seed: int) -> list[list[int]]:
    """Indices of the sequences of each step, each epoch in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    epochs = (torch.randperm(num_sequences, generator=generator).tolist() for _ in range(num_epochs))
    return [epoch[start : start + per_step] for epoch in epochs for start in range(0, num_sequences, per_step)]


def _identity(model, adapter, sequences, schedule, config, order, temperature) -> dict[str, str]:
    """What progress must share with the distillation that goes on from it."""
    settings = {name: value for name, value in asdict(config).items() if name != "lora" and "stage" not in name}
    parts = {
        "weights": weights_fingerprint(model),
        "adapter": json.dumps(adapter.config.to_dict(), default=sorted, sort_keys=True),
        "sequences": [[sequence.prompt_length, sequence.token_ids] for sequence in sequences],
        "schedule": schedule.to_dict(),
        "configuration": settings,
        "order": order,
        "temperature": temperature,
    }
    return {name: hashlib.sha256(json.dumps(part, default=str).encode()).hexdigest() for name, part in parts.items()}


def _save(path: Path, identity, adapter: RolloutAdapter, trainer: AdapterTrainer, steps: list[dict[str, float]]):
    state = {"identity": identity, "adapter": adapter.state_dict(), "trainer": trainer.state_dict(), "steps": steps}
    save_tensors(path, state)


def _resume(path: Path, identity, adapter: RolloutAdapter, trainer: AdapterTrainer) -> list[dict[str, float]]:
    """Take over the progress in `path`, and return its steps; none without a file."""
    if not path.exists():
        return []
    state = torch.load(path, map_location="cpu", weights_only=True)
    differing = [name for name, value in identity.items() if state.get("identity", {}).get(name) != value]
    if differing:
        raise ValueError(
            f"{path} belongs to another distillation: its {', '.join(differing)} differ from these. Use another "
            "output_dir, or remove the file to start over."
        )
    adapter.load_state_dict(state["adapter"], source=str(path))
    trainer.load_state_dict(state["trainer"])
    return state["steps"]
