"""
A guard for training on sparse rollouts: budgets that follow the measured tail acceptance, a schedule found during the
first steps, and dense rollouts when something breaks.
"""

import logging
import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from numbers import Integral, Real
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .acceptance import AcceptanceTracker
from .break_detector import BreakDetector, BreakLimits, RolloutSignals
from .budget_controller import BudgetChange, BudgetController
from .callbacks import check_attached, checkpoint_to_write, resumed_file, target_of, track_acceptance
from .distill_step import Trajectories
from .json_files import dump_json_object, read_json_object, write_atomically
from .number_checks import check_numbers
from .schedule import MAX_PAGES, SparsityScheduleConfig
from .schedule_search import search_schedule


if TYPE_CHECKING:
    from .config import SparseRolloutGRPOConfig
    from .trainer import SparseRolloutGRPOTrainer


logger = logging.getLogger(__name__)

AUTO_SCHEDULE = "auto"
# Steps with too few tokens after which the search for a schedule gives up.
MAX_SEARCHES = 5

# Bins that one entry of the history names, and entries that a checkpoint keeps.
MAX_NOTED = 8
MAX_HISTORY = 10_000
STATE_NAME = "schedule_guard.json"
MAX_STATE_BYTES = 16 * 2**20

# An automatic schedule has bins of this many tokens, or as many bins as this where contexts are short.
AUTO_BIN_TOKENS = 2048
AUTO_BINS = 8


@dataclass
class ScheduleGuardConfig:
    """
    Configuration of a [`ScheduleGuardCallback`].

    Args:
        target_acceptance (`float`, *optional*):
            Tail acceptance to hold in every bin of cached length. By default that of the trainer's schedule, else
            0.86.
        headroom (`float`, *optional*, defaults to `0.01`):
            How far from the target a tail may be without a change.
        min_tokens (`int`, *optional*):
            Measured tokens that a bin needs before its budget is lowered. By default 50 over the schedule's
            `tail_quantile`, 1000 for the 5th percentile.
        max_change (`float`, *optional*, defaults to `1.5`):
            Largest factor by which a budget changes at once.
        floor ([`SparsityScheduleConfig`] or `str`, *optional*):
            Schedule that budgets never fall below, in tokens.
        adapt (`bool`, *optional*, defaults to `True`):
            Whether budgets follow the tail. `False` only watches for breaks.

        > Parameters that control what counts as a break

        tail_floor (`float`, *optional*):
            Tail acceptance of a step below which it is a break, by the upper bounds of the rates: logged tails are of
            the lower ones. By default 0.15 below the target.
        kl_limit (`float`, *optional*, defaults to `0.2`):
            Divergence from the dense policy per token above which it is one,
        kl_factor (`float`, *optional*, defaults to `5.0`):
            where that is more than this many times its level over the last steps.
        length_drop (`float`, *optional*, defaults to `0.5`):
            Share of their level below which the length of completions is one.
        reward_drop (`float`, *optional*, defaults to `0.5`):
            Share of its level by which the reward may fall.
        step_tokens (`int`, *optional*):
            Measured tokens of one step that a bin needs before its tail is compared with `tail_floor`. By default 10
            over the schedule's `tail_quantile`, 200 for the 5th percentile.

        > Parameters that control what happens then

        dense_steps (`int`, *optional*, defaults to `10`):
            Steps with dense rollouts after a break.
        max_breaks (`int`, *optional*):
            Breaks within `break_window` steps after which training stops, with a checkpoint. By default it goes on.
        break_window (`int`, *optional*, defaults to `200`):
            Steps in which breaks are counted.

        > Parameters that control the search for a schedule

        search (`bool`, *optional*, defaults to `False`):
            Whether to find the budgets during the first steps, with the recipe of the trainer's schedule, whose own
            budgets serve until then; tables per layer are left out. `schedule="auto"` searches too, from all pages of
            the default recipe.
        auto_sequences (`int`, *optional*, defaults to `8`):
            Rollouts of a step and process that budgets are measured on, teacher-forced.
        auto_budgets (`int`, *optional*, defaults to `10`):
            How many budgets.
    """

    target_acceptance: float | None = None
    headroom: float = 0.01
    min_tokens: int | None = None
    max_change: float = 1.5
    floor: SparsityScheduleConfig | str | None = None
    adapt: bool = True
    tail_floor: float | None = None
    kl_limit: float = 0.2
    kl_factor: float = 5.0
    length_drop: float = 0.5
    reward_drop: float = 0.5
    step_tokens: int | None = None
    dense_steps: int = 10
    max_breaks: int | None = None
    break_window: int = 200
    search: bool = False
    auto_sequences: int = 8
    auto_budgets: int = 10

    def __post_init__(self):
        check_numbers(
            self,
            (
                ("target_acceptance", Real, 0, 1),
                ("headroom", Real, 0, 0.5),
                ("min_tokens", Integral, 100, inf),
                ("max_change", Real, 1.05, 10),
                ("tail_floor", Real, 0, 1),
                ("kl_limit", Real, 0, inf),
                ("kl_factor", Real, 1, inf),
                ("length_drop", Real, 0, 1),
                ("reward_drop", Real, 0, inf),
                ("step_tokens", Integral, 20, inf),
                ("dense_steps", Integral, 1, inf),
                ("max_breaks", Integral, 1, inf),
                ("break_window", Integral, 1, inf),
                ("auto_sequences", Integral, 1, inf),
                ("auto_budgets", Integral, 2, 100),
            ),
            optional=("target_acceptance", "min_tokens", "tail_floor", "step_tokens", "max_breaks"),
        )
        if self.floor is not None:
            self.floor = SparsityScheduleConfig.resolve(self.floor)


class ScheduleGuardCallback(TrainerCallback):
    """
    Keeps a [`SparseRolloutGRPOTrainer`] from training on rollouts that have drifted from its policy.

    The tail acceptance that the trainer measures controls the schedule: bins of cached length below the target get
    larger budgets, bins above it smaller ones, in the running engine. When a step breaks (a tail under a hard floor, a
    spike of the divergence, a collapse of the completions' length or of the reward), budgets are raised and the next
    rollouts are dense for a number of steps; after too many breaks training stops with a checkpoint.

    With `schedule="auto"` the first rollouts keep all pages; with `search` they keep what the given schedule says. On
    them the acceptance of several budgets is measured, teacher-forced, and the cheapest schedule that holds the target
    is taken, which then follows the tail as any other.

    Each change is logged with its reason, and kept in `history` and beside the checkpoints (`schedule_guard.json`).
    Logged metrics are `guard/changed_bins`, `guard/break` and `guard/dense`.

    Args:
        config ([`ScheduleGuardConfig`], *optional*):
            Configuration; by default a default one.

    Attributes:
        history (`list[dict]`): What was done: `step`, `event` and `text`.

    Example:

    ```python
    >>> guard = ScheduleGuardCallback(ScheduleGuardConfig(target_acceptance=0.86, max_breaks=3))
    >>> trainer = SparseRolloutGRPOTrainer(..., schedule="auto", callbacks=[guard])
    >>> trainer.train()
    ```
    """

    def __init__(self, config: ScheduleGuardConfig | None = None):
        self.config = config or ScheduleGuardConfig()
        self.history: list[dict[str, Any]] = []
        self._trainer = None
        self._dense = ExitStack()
        self._inputs = []
        self._rollouts: list[tuple[dict[int, np.ndarray], RolloutSignals]] = []

    def attach(self, trainer: "SparseRolloutGRPOTrainer") -> None:
        """
        Called by the `trainer` that this callback is given to.

        Raises:
            ValueError: for a trainer that measures no acceptance, a second callback that changes the schedule, a
                target of 0 or 1, and a schedule that is to be found under FSDP or DeepSpeed or from a dense one.
        """
        searching = self.config.search or trainer.is_auto_schedule
        _check_training(trainer, searching)
        config, schedule = self.config, trainer.schedule
        quantile = schedule.tail_quantile
        self._step_tokens = config.step_tokens or math.ceil(10 / quantile)
        self._adapts = config.adapt and not schedule.is_dense
        self._controller = BudgetController(
            schedule,
            trainer.vllm_generation.max_context_tokens,
            target=target_of(config, schedule),
            headroom=config.headroom,
            min_tokens=config.min_tokens or math.ceil(50 / quantile),
            max_change=config.max_change,
            floor=config.floor,
        )
        self._trainer = trainer
        self._start(searching)
        trainer.rollout_listeners.append(self._keep_rollout)
        if searching:
            trainer.trajectory_listeners.append(self._keep_inputs)

    def _start(self, searching: bool) -> None:
        """As at the first step."""
        config, target = self.config, self._controller.target
        tail_floor = max(0.0, target - 0.15) if config.tail_floor is None else config.tail_floor
        self._detector = BreakDetector(
            BreakLimits(tail_floor, config.kl_factor, config.kl_limit, config.length_drop, config.reward_drop)
        )
        self._searching = searching
        self._trackers: list[AcceptanceTracker] = []
        self._searches = 0
        self._dense.close()
        self._dense_left = 0
        self._breaks: list[int] = []
        self._inputs.clear()
        self._rollouts.clear()

    @property
    def is_dense(self) -> bool:
        """`bool`: Whether rollouts are dense after a break."""
        return self._dense_left > 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        check_attached(self, self._trainer)
        if state.global_step:
            # The trainer has restored the checkpoint's schedule.
            self._controller.set_schedule(self._trainer.schedule)
            self._resume(args, state)
        else:
            self._start(self._searching)
        if self._controller.floor is not None and self._adapts:
            self._trainer.schedule = self._controller.schedule

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        rollouts, self._rollouts = self._rollouts, []
        if not rollouts:  # none were made for this step
            return
        rates, signals = _joined(rollouts)
        metrics = {"dense": float(self.is_dense), "break": 0.0, "changed_bins": 0.0}
        if self.is_dense:
            self._detector.learn(replace(signals, kl=None))
            self._dense_left -= 1
            if not self.is_dense:
                self._dense.close()
                self._note(state, "sparse", "rollouts are sparse again")
        elif reasons := self._detector.update(signals):
            metrics["break"] = 1.0
            self._fall_back(state, control, "; ".join(reasons))
        elif self._searching:
            self._search(state)
        elif self._adapts:
            metrics["changed_bins"] = float(self._apply(state, self._controller.update(rates)))
        self._inputs.clear()
        for name, value in metrics.items():
            self._trainer._metrics["train"][f"guard/{name}"].append(value)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        folder = checkpoint_to_write(args, state)
        if folder is not None:
            self._write_state(folder)

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            self._write_state(Path(args.output_dir))

    def _write_state(self, folder: Path) -> None:
        values = {
            "detector": self._detector.state_dict(),
            "searching": self._searching,
            "dense_left": self._dense_left,
            "breaks": self._breaks,
            "history": self.history[-MAX_HISTORY:],
        }
        write_atomically(folder / STATE_NAME, dump_json_object(values, STATE_NAME, MAX_STATE_BYTES))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self._dense.close()

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        values = None
        if state.is_world_process_zero:
            file = resumed_file(self._trainer, args, state, STATE_NAME)
            if file is not None:
                values = read_json_object(file, MAX_STATE_BYTES)
        # Other processes may have no such folder, and all must do the same.
        (values,) = broadcast_object_list([values])
        if values is None:
            if state.is_world_process_zero:
                logger.warning(
                    f"No {STATE_NAME} found for the checkpoint of step {state.global_step}: the guard starts anew."
                )
            self._start(self._searching)
            return
        self._start(searching=False)
        try:
            self._detector.load_state_dict(values["detector"])
            self._searching, self._dense_left = values["searching"], values["dense_left"]
            self._breaks, self.history = values["breaks"], values["history"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"The {STATE_NAME} of the checkpoint is damaged: {type(error).__name__}: {error}. Remove it to let "
                "the guard start anew."
            ) from error
        if self.is_dense:
            self._dense.enter_context(self._trainer.vllm_generation.dense_rollouts())

    def _keep_rollout(self) -> None:
        """Keep what rollouts measured; all of it is the same on every process."""
        trainer = self._trainer
        latest = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}

        def finite(name):
            value = latest.get(name)  # TRL's mean of no rewards is NaN
            return value if value is not None and math.isfinite(value) else None

        rates = dict(trainer.acceptance.step_rates)
        # Budgets go by the lower bounds, but where many tokens are possible those are low even if all pages are kept:
        # only what the upper bounds leave no doubt about is a break.
        certain = trainer.acceptance.step_upper_rates.values()
        # Where no bin has enough tokens by itself, all of them together may.
        groups = [*certain, np.concatenate([np.empty(0), *certain])]
        quantile = trainer.schedule.tail_quantile
        tails = [float(np.quantile(group, quantile)) for group in groups if len(group) >= self._step_tokens]
        signals = RolloutSignals(
            tail=min(tails, default=None),
            kl=finite("kl/sparse_dense") if rates else None,
            length=finite("completions/mean_length"),
            reward=finite("reward"),
        )
        self._rollouts.append((rates, signals))

    def _keep_inputs(self, inputs: dict[str, Any]) -> None:
        if self._searching:
            self._inputs.append(Trajectories.from_inputs(inputs))

    def _apply(self, state: TrainerState, changes: list[BudgetChange]) -> int:
        """Use changed budgets; their number."""
        if changes:
            self._trainer.schedule = self._controller.schedule
            more = f", and {len(changes) - MAX_NOTED} more" if len(changes) > MAX_NOTED else ""
            self._note(state, "budget", "; ".join(map(str, changes[:MAX_NOTED])) + more)
        return len(changes)

    def _fall_back(self, state: TrainerState, control: TrainerControl, reason: str) -> None:
        config = self.config
        self._note(state, "break", f"{reason}. Rollouts are dense for {config.dense_steps} steps", logging.WARNING)
        if self._adapts and not self._searching:
            # What broke may go on where it was; dense rollouts do not tell.
            self._apply(state, self._controller.raise_all(config.max_change, "a break"))
        self._dense_left = config.dense_steps
        self._dense.enter_context(self._trainer.vllm_generation.dense_rollouts())
        self._breaks = [step for step in self._breaks if step > state.global_step - config.break_window]
        self._breaks.append(state.global_step)
        if config.max_breaks is not None and len(self._breaks) >= config.max_breaks:
            text = f"training stops with a checkpoint after {len(self._breaks)} breaks in {config.break_window} steps"
            self._note(state, "stop", text, logging.ERROR)
            control.should_save = control.should_training_stop = True

    def _search(self, state: TrainerState) -> None:
        """Measure several budgets on the rollouts since the start, and take the cheapest schedule that will do."""
        trainer, config = self._trainer, self.config
        schedule = self._controller.schedule
        reserved = schedule.sink_pages + schedule.recent_pages
        most = -(-self._controller.max_tokens // schedule.page_size)
        page_counts = np.unique(np.geomspace(reserved + 1, most, config.auto_budgets).round().astype(int)).tolist()
        tails, counts = self._measure(schedule, page_counts)
        self._searches += 1
        if not (counts >= self._step_tokens).any():
            if self._searches == MAX_SEARCHES:
                self._searching = False
                text = (
                    f"no bin of cached length had {self._step_tokens} tokens in {MAX_SEARCHES} steps, so budgets come "
                    "down from all pages by what is measured online. Raise auto_sequences to search"
                )
                self._note(state, "search", text, logging.WARNING)
            return
        found = search_schedule(
            page_counts,
            tails,
            counts,
            bin_tokens=schedule.bin_tokens,
            target_acceptance=self._controller.target,
            min_tokens=self._step_tokens,
            allow_dense=True,
            **schedule.recipe,
        ).schedule
        self._searching = False
        self._trackers.clear()
        self._controller.set_schedule(replace(schedule, top_k_pages=found.top_k_pages, layer_top_k_pages=None))
        trainer.schedule = self._controller.schedule
        pages = ", ".join(str(count + reserved) for count in trainer.schedule.top_k_pages)
        self._note(state, "search", f"the schedule keeps {pages} pages, in bins of {schedule.bin_tokens} tokens")

    def _measure(self, schedule: SparsityScheduleConfig, page_counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tails and tokens `[budgets, bins]`, over the sequences of all processes and of all searches so far."""
        trainer = self._trainer
        reserved = schedule.sink_pages + schedule.recent_pages
        fixed = [replace(schedule, top_k_pages=[count - reserved], layer_top_k_pages=None) for count in page_counts]
        self._trackers = self._trackers or [AcceptanceTracker(entry) for entry in fixed]
        batches, self._inputs = self._inputs, []
        sequences = chain.from_iterable(batch.sequences() for batch in batches)
        track_acceptance(trainer, islice(sequences, self.config.auto_sequences), self._trackers)
        num_bins = len(schedule.top_k_pages)
        tails, counts = np.full((len(fixed), num_bins), np.nan), np.zeros((len(fixed), num_bins), dtype=int)
        for index, tracker in enumerate(self._trackers):
            tracker.end_step(trainer.accelerator)
            for entry in tracker.bin_statistics():
                if (start := entry.start // schedule.bin_tokens) < num_bins:
                    tails[index, start], counts[index, start] = entry.tail, entry.tokens
        return tails, counts

    def _note(self, state: TrainerState, event: str, text: str, level: int = logging.INFO) -> None:
        self.history.append({"step": state.global_step, "event": event, "text": text})
        if state.is_world_process_zero:
            logger.log(level, f"Schedule guard, step {state.global_step}: {text}.")


def _joined(rollouts: list[tuple[dict[int, np.ndarray], RolloutSignals]]) -> tuple[dict, RolloutSignals]:
    """What the rollouts of one step measured, of which there may be several batches."""
    indices = sorted({index for rates, _ in rollouts for index in rates})
    rates = {index: np.concatenate([part[index] for part, _ in rollouts if index in part]) for index in indices}

    def values(name):
        return [value for _, signals in rollouts if (value := getattr(signals, name)) is not None]

    return rates, RolloutSignals(
        tail=min(values("tail"), default=None),
        kl=max(values("kl"), default=None),
        length=fmean(values("length")) if values("length") else None,
        reward=fmean(values("reward")) if values("reward") else None,
    )


def starting_schedule(args: "SparseRolloutGRPOConfig") -> SparsityScheduleConfig:
    """
    The schedule that `"auto"` begins with: it keeps all pages.

    Args:
        args ([`SparseRolloutGRPOConfig`]): Configuration of the trainer, which says how long contexts are.
    """
    page_size = 16
    longest = args.vllm_max_model_length or args.max_completion_length
    pages = max(1, min(AUTO_BIN_TOKENS, longest // AUTO_BINS) // page_size)
    return SparsityScheduleConfig(top_k_pages=[MAX_PAGES], page_size=page_size, bin_tokens=pages * page_size)


def _check_training(trainer: "SparseRolloutGRPOTrainer", searching: bool) -> None:
    if not trainer.args.acceptance_probe_fraction:
        raise ValueError(
            "ScheduleGuardCallback goes by the measured tail acceptance, but acceptance_probe_fraction is 0. Set it "
            "to a share of the rollouts to measure, such as 0.1."
        )
    others = [callback for callback in trainer.callback_handler.callbacks if _changes_schedule(callback)]
    if len(others) > 1:
        names = " and a ".join(type(callback).__name__ for callback in others)
        raise ValueError(
            f"The trainer got a {names}, and each would change the schedule. Give one of them; beside a guard, "
            "DistillSparse works without stages."
        )
    if searching and trainer.schedule.is_dense:
        raise ValueError(
            "The guard is to search a schedule, but the trainer's keeps every layer dense. Give one with sparse "
            "layers, which may keep all pages."
        )
    if searching and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        raise ValueError(
            "The search for a schedule (schedule='auto', or the guard's `search`) does not support FSDP and "
            "DeepSpeed, outside of whose engines budgets would be measured. Run `sparrow-trl calibrate` first, and "
            "give its schedule."
        )


def _changes_schedule(callback: TrainerCallback) -> bool:
    stages = getattr(getattr(callback, "config", None), "stages", None)
    return isinstance(callback, ScheduleGuardCallback) or bool(stages)
