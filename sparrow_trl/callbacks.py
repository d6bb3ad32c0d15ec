"""Trainer callbacks for sparse rollouts."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .acceptance import AcceptanceTracker
from .acceptance_report import plot_acceptance, print_acceptance_table
from .acceptance_sweep import TokenSequence, evaluating, sequence_acceptance
from .hub_cards import without_local_model
from .json_files import dump_json_object, read_json_object, write_atomically
from .pictures import save_figure
from .schedule import SparsityScheduleConfig


if TYPE_CHECKING:
    from .trainer import SparseRolloutGRPOTrainer


logger = logging.getLogger(__name__)

# Above it the paper finds training stable (section 3.2).
DEFAULT_TARGET = 0.86

STATISTICS_NAME = "acceptance_statistics.json"
PICTURE_NAME = "acceptance.png"

# A length bin takes up to 60 kB after a long run, and a schedule may have hundreds of them.
MAX_STATISTICS_BYTES = 64 * 2**20


class TailAcceptanceCallback(TrainerCallback):
    """
    Keeps the acceptance statistics of a [`SparseRolloutGRPOTrainer`] across checkpoints, and reports them when
    training ends: a table per bin of cached length, and `acceptance.png` in the output folder.

    The trainer measures and logs; this callback saves the statistics beside each checkpoint
    (`acceptance_statistics.json`) and loads them when training resumes, so that the report covers the whole
    run.

    Args:
        target (`float`, *optional*):
            Tail acceptance that the report compares with; by default the schedule's `target_acceptance`, else the
            paper's 0.86.

    Example:

    ```python
    >>> trainer = SparseRolloutGRPOTrainer(..., callbacks=[TailAcceptanceCallback()])
    >>> trainer.train()
    ```
    """

    def __init__(self, target: float | None = None):
        self.target = target
        self._trainer = None

    def attach(self, trainer: "SparseRolloutGRPOTrainer") -> None:
        """Called by the `trainer` that this callback is given to; its `acceptance` holds the statistics."""
        self._trainer = trainer

    @property
    def tracker(self) -> AcceptanceTracker:
        """The trainer's statistics ([`AcceptanceTracker`]); complete on the main process."""
        tracker = getattr(self._trainer, "acceptance", None)
        check_attached(self, tracker)
        return tracker

    def load_statistics(self, checkpoint: str | Path) -> None:
        """
        Continue the statistics of a checkpoint.

        Args:
            checkpoint (`str` or `pathlib.Path`):
                Checkpoint folder.

        Raises:
            ValueError: when the file is damaged or its length bins are not the schedule's.
        """
        self.tracker.load_state_dict(read_json_object(Path(checkpoint) / STATISTICS_NAME, MAX_STATISTICS_BYTES))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        tracker = self.tracker
        if state.global_step == 0 or not state.is_world_process_zero:
            return
        file = resumed_file(self._trainer, args, state, STATISTICS_NAME)
        if file is None:
            logger.warning(
                f"No {STATISTICS_NAME} found for the checkpoint of step {state.global_step}: the acceptance report "
                "will cover only the steps from here on."
            )
            return
        try:
            self.load_statistics(file.parent)
        except ValueError as error:
            logger.warning(
                f"The acceptance report will cover only the steps from {state.global_step} on, because "
                f"{file} cannot be continued: {error}"
            )
            tracker.reset()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        folder = checkpoint_to_write(args, state)
        if folder is None:
            return
        self._write_statistics(folder)

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero and self.tracker.bin_statistics():
            self._write_statistics(Path(args.output_dir))
            self._write_picture(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if not state.is_world_process_zero:
            return
        tracker = self.tracker
        if not tracker.bin_statistics():
            logger.warning("No acceptance rate was measured, so there is no acceptance report.")
            return
        print_acceptance_table(tracker, self.target)
        self._write_picture(args, state)

    def _write_statistics(self, folder: Path) -> None:
        try:
            data = dump_json_object(self.tracker.state_dict(), STATISTICS_NAME, MAX_STATISTICS_BYTES)
        except ValueError as error:
            logger.warning(f"{folder} is saved without acceptance statistics: {error} Use wider bins (bin_tokens).")
            return
        write_atomically(folder / STATISTICS_NAME, data)

    def _write_picture(self, args: TrainingArguments, state: TrainerState) -> None:
        figure = plot_acceptance(self.tracker, state.log_history, self.target)
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_figure(figure, folder / PICTURE_NAME)


class HubFilesCallback(TrainerCallback):
    """
    Puts the schedule and a model card that is up to date into the output folder when it is about to be pushed. The
    trainer adds it after the callbacks that put files of their own there.
    """

    def attach(self, trainer: "SparseRolloutGRPOTrainer") -> None:
        """Called by the `trainer` that has this callback."""
        self._trainer = trainer

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            without_local_model(self._trainer.schedule).save_pretrained(args.output_dir)
            self._trainer.create_model_card(model_name=Path(self._trainer.hub_model_id or args.output_dir).name)


def target_of(config, schedule: SparsityScheduleConfig) -> float:
    """
    Tail acceptance to hold.

    Args:
        config: A callback's configuration, whose `target_acceptance` comes first.
        schedule ([`SparsityScheduleConfig`]): The trainer's schedule, whose own comes next.
    """
    given = (config.target_acceptance, schedule.target_acceptance, DEFAULT_TARGET)
    return next(target for target in given if target is not None)


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """
    Folder of the checkpoint of a step.

    Args:
        args ([`~transformers.TrainingArguments`]): Arguments of the training.
        state ([`~transformers.TrainerState`]): Its state, which says the step.
    """
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def checkpoint_to_write(args: TrainingArguments, state: TrainerState) -> Path | None:
    """
    Folder of the checkpoint that has just been saved, on the main process; `None` on others, and where there is none.

    Args:
        args ([`~transformers.TrainingArguments`]): Arguments of the training.
        state ([`~transformers.TrainerState`]): Its state.
    """
    folder = checkpoint_folder(args, state)
    # Creating the folder would leave something that looks like a checkpoint and cannot be resumed from.
    return folder if state.is_world_process_zero and folder.is_dir() else None


def check_attached(callback: TrainerCallback, trainer) -> None:
    """
    Refuse, with a `ValueError`, a callback that no trainer with sparse rollouts has attached.

    Args:
        callback ([`~transformers.TrainerCallback`]): The callback.
        trainer ([`SparseRolloutGRPOTrainer`] or `None`): What it is attached to, or what it needs of it.
    """
    if trainer is None:
        raise ValueError(
            f"`{type(callback).__name__}` is attached to no trainer with sparse rollouts: pass it in the `callbacks` "
            "of a `SparseRolloutGRPOTrainer`. Other trainers, and `add_callback` after construction, do not attach it."
        )


def resumed_file(trainer, args: TrainingArguments, state: TrainerState, name: str) -> Path | None:
    """
    A file of the checkpoint that training was resumed from; `None` where it has none.

    Args:
        trainer ([`SparseRolloutGRPOTrainer`]): The trainer.
        args ([`~transformers.TrainingArguments`]): Its arguments.
        state ([`~transformers.TrainerState`]): Its state.
        name (`str`): Name of the file within a checkpoint.
    """
    # The folder given to `train(resume_from_checkpoint=...)` reaches no callback; the trainer keeps it.
    folders = [
        getattr(trainer, "resume_checkpoint", None),
        args.resume_from_checkpoint,
        checkpoint_folder(args, state),
    ]
    files = (Path(folder) / name for folder in folders if folder)
    return next((file for file in files if file.is_file()), None)


def track_acceptance(
    trainer: "SparseRolloutGRPOTrainer", sequences: Iterable[TokenSequence], trackers: list[AcceptanceTracker]
) -> None:
    """
    Measure the acceptance of the policy teacher-forced, with the adapter of its rollouts, if there is one.

    Args:
        trainer ([`SparseRolloutGRPOTrainer`]): The trainer, whose policy it is.
        sequences (`Iterable[TokenSequence]`): What to measure on, of this process.
        trackers (`list[AcceptanceTracker]`): Take the rates, each those under its own schedule.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    schedules, adapter = [tracker.schedule for tracker in trackers], trainer.vllm_generation.adapter
    with evaluating(policy), trainer.accelerator.autocast():
        for sequence in sequences:
            rates = sequence_acceptance(policy, sequence, schedules, temperature=trainer.temperature, adapter=adapter)
            for tracker, values in zip(trackers, rates, strict=True):
                tracker.update(values, values, sequence.cached_lengths)
