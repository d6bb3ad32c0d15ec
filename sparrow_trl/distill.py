"""
DistillSparse: a LoRA of the rollouts alone, which pulls sparse attention towards the dense model and so buys a cheaper
schedule (section 4.5 and Algorithm 1 of the [Sparrow paper](https://huggingface.co/papers/2606.08446)).
"""

import io
import logging
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from transformers import (
    SchedulerType,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)

from .acceptance import AcceptanceTracker
from .callbacks import check_attached, checkpoint_to_write, resumed_file, target_of, track_acceptance
from .distill_stages import StageController
from .distill_step import DIVERGENCES, SAMPLED_DIVERGENCE, AdapterTrainer, Trajectories
from .hub_cards import without_local_model
from .json_files import write_atomically
from .number_checks import check_numbers
from .published_files import ADAPTER_FOLDER
from .rollout_adapter import RolloutAdapter
from .schedule import SparsityScheduleConfig


if TYPE_CHECKING:
    from .trainer import SparseRolloutGRPOTrainer


logger = logging.getLogger(__name__)

STATE_NAME = "distill_state.pt"


@dataclass
class DistillSparseConfig:
    r"""
    Configuration of DistillSparse.

    Parameters:
        > Parameters that control the adapter

        lora ([`~peft.LoraConfig`] or `dict`, *optional*):
            Rank, scale, targets and dropout of the adapter. By default rank 16, alpha 32, all linear layers but the
            head.

        > Parameters that control its loss and optimizer

        divergence (`str`, *optional*, defaults to `"reverse_kl"`):
            Divergence between student and teacher: over the whole vocabulary `"reverse_kl"` (KL(student || teacher)),
            `"forward_kl"` (KL(teacher || student)) or `"jensen_shannon"`; or `"k3"`, Schulman's estimate of the
            reverse KL from the sampled tokens, whose gradient is that of an estimate of the forward KL.
        teacher (`str`, *optional*, defaults to `"current"`):
            `"current"` takes the dense model after its update, which costs a forward pass; `"old"` the log-probs from
            before it, which the trainer has anyway, for `"k3"` alone.
        kl_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the divergence.
        ppo_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the policy loss of the sparse student. `0` leaves it out.
        learning_rate (`float`, *optional*, defaults to `0.0001`):
            Learning rate of the adapter's AdamW.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            Its weight decay.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Norm to which the adapter's gradient is clipped; `0` turns clipping off.
        lr_scheduler_type (`str`, *optional*, defaults to `"constant_with_warmup"`):
            Schedule of the learning rate, as in [`~transformers.TrainingArguments`].
        warmup_steps (`int`, *optional*, defaults to `10`):
            Steps over which the learning rate rises from 0.

        > Parameters that control the stages

        stages (`list`, *optional*, defaults to `[]`):
            Cheaper schedules to move on to, from lenient to cheap: objects, names of presets, local paths or Hub ids.
            The trainer's own schedule comes first.
        target_acceptance (`float`, *optional*):
            Tail acceptance to keep. By default that of the trainer's schedule, else 0.86.
        stage_check_interval (`int`, *optional*, defaults to `50`):
            Steps between checks of the tail, at the stage in use and at the next one.
        stage_patience (`int`, *optional*, defaults to `3`):
            Checks in a row in which the next stage must keep the target before it is taken.
        stage_margin (`float`, *optional*, defaults to `0.01`):
            How far below the target the tail of the stage in use may fall before the one before it is taken again.
        stage_sequences (`int`, *optional*, defaults to `8`):
            Sequences of a step that a check measures, on each process.
        stage_min_tokens (`int`, *optional*, defaults to `200`):
            Tokens a bin of cached length needs before its tail counts in a check.
    """

    lora: LoraConfig | dict[str, Any] | None = None
    divergence: str = "reverse_kl"
    teacher: str = "current"
    kl_weight: float = 1.0
    ppo_weight: float = 1.0
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "constant_with_warmup"
    warmup_steps: int = 10
    stages: list[Any] = field(default_factory=list)
    target_acceptance: float | None = None
    stage_check_interval: int = 50
    stage_patience: int = 3
    stage_margin: float = 0.01
    stage_sequences: int = 8
    stage_min_tokens: int = 200

    def __post_init__(self):
        divergences = (*DIVERGENCES, SAMPLED_DIVERGENCE)
        for name, choices in (("divergence", divergences), ("teacher", ("current", "old"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, choices))}.")
        if self.teacher == "old" and self.divergence != SAMPLED_DIVERGENCE:
            raise ValueError(
                f"teacher='old' has log-probs of the sampled tokens alone, but divergence={self.divergence!r} needs "
                f"more. Use divergence={SAMPLED_DIVERGENCE!r}, or teacher='current'."
            )
        check_numbers(
            self,
            (
                ("kl_weight", Real, 0, inf),
                ("ppo_weight", Real, 0, inf),
                ("learning_rate", Real, 0, inf),
                ("weight_decay", Real, 0, inf),
                ("max_grad_norm", Real, 0, inf),
                ("warmup_steps", Integral, 0, inf),
                ("target_acceptance", Real, 0, 1),
                ("stage_check_interval", Integral, 1, inf),
                ("stage_patience", Integral, 1, inf),
                ("stage_margin", Real, 0, 1),
                ("stage_sequences", Integral, 1, inf),
                ("stage_min_tokens", Integral, 1, inf),
            ),
            optional=("target_acceptance",),
        )
        if not self.kl_weight and not self.ppo_weight:
            raise ValueError("kl_weight and ppo_weight are both 0, so the adapter would learn nothing.")
        self._check_lr_scheduler()
        if isinstance(self.lora, dict):
            self.lora = LoraConfig(**self.lora)
        if isinstance(self.stages, (str, SparsityScheduleConfig)):
            self.stages = [self.stages]
        self.stages = [SparsityScheduleConfig.resolve(stage) for stage in self.stages]

    def _check_lr_scheduler(self):
        name, optimizer = self.lr_scheduler_type, torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        try:
            if SchedulerType(name) == SchedulerType.REDUCE_ON_PLATEAU:
                raise ValueError("it needs evaluations")
            get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=2)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"lr_scheduler_type={name!r} cannot be used: {error}. Use for instance 'constant_with_warmup' or "
                "'linear'."
            ) from error


class DistillSparseCallback(TrainerCallback):
    """
    Trains a LoRA for the rollouts of a [`SparseRolloutGRPOTrainer`] beside its policy.

    After each update of the policy the adapter takes a step on the same trajectories: the policy loss of the sparse
    student, and its divergence from the dense model. The engine's rollouts have the adapter, in weights W + BA;
    everything dense (training, old log-probs, the reference, evaluation) goes without, and the policy's checkpoints
    are those of a run without this callback. The adapter is saved beside each checkpoint and at the end, in the
    folder `distill_sparse`: a PEFT adapter with the schedule in use (`sparsity_schedule.json`).

    With `stages`, the tail acceptance at the next cheaper schedule is measured now and then, and the rollouts move to
    it once it keeps the target.

    Logged are `distill/kl`, `distill/policy_loss`, `distill/loss`, `distill/grad_norm`, `distill/learning_rate`,
    `distill/tokens` and, with stages, `distill/stage` and the tails `distill/tail` and `distill/next_tail`.

    Args:
        config ([`DistillSparseConfig`], *optional*):
            Configuration; by default a default one.
        adapter (`str`, *optional*):
            PEFT adapter to begin with, such as one that was distilled before training. It brings its own LoRA
            configuration.

    Raises:
        ValueError: for an `adapter` beside a `config.lora`.

    Example:

    ```python
    >>> config = DistillSparseConfig(stages=["qwen3-1.7b-0.80"])
    >>> trainer = SparseRolloutGRPOTrainer(..., schedule="qwen3-1.7b-0.86", callbacks=[DistillSparseCallback(config)])
    >>> trainer.train()
    ```
    """

    def __init__(self, config: DistillSparseConfig | None = None, adapter: str | Path | None = None):
        self.config = config or DistillSparseConfig()
        if adapter is not None and self.config.lora is not None:
            raise ValueError(f"The adapter {str(adapter)!r} brings its own LoRA configuration. Leave `lora` unset.")
        self.adapter: RolloutAdapter | None = None
        self._initial_adapter = adapter
        self._trainer = None
        self._adapter_trainer = None
        self._pending = []
        self._rollout_schedule = None

    def attach(self, trainer: "SparseRolloutGRPOTrainer") -> None:
        """
        Called by the `trainer` that this callback is given to.

        Raises:
            ValueError: for a policy that has adapters or is sharded, float16, reentrant gradient checkpointing,
                targets that match nothing, an adapter of another model, stages that are no cheaper or that the engine
                cannot use, `load_best_model_at_end`, a teacher whose log-probs the trainer does not have, and a second
                callback of this kind.
        """
        policy = trainer.accelerator.unwrap_model(trainer.model)
        _check_training(trainer, self.config)
        self._stages = [trainer.schedule, *self.config.stages]
        _check_stages(self._stages, policy.config.num_hidden_layers)
        target = target_of(self.config, trainer.schedule)
        self._controller = StageController(
            len(self._stages), target, self.config.stage_patience, self.config.stage_margin
        )
        # The same weights on every process, and the same random numbers for everything else as without the adapter.
        devices = [policy.device] if policy.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(trainer.args.seed)
            if self._initial_adapter is not None:
                self.adapter = RolloutAdapter.from_pretrained(policy, self._initial_adapter)
            else:
                self.adapter = RolloutAdapter(policy, self.config.lora)
        self.adapter.to(trainer.accelerator.device)
        self.adapter.engine_dtype = trainer.vllm_generation.engine_dtype
        self._trainer = trainer
        trainer.vllm_generation.adapter = self.adapter
        trainer.trajectory_listeners.append(self._keep)

    @property
    def stage(self) -> int:
        """`int`: Stage in use: 0 for the trainer's own schedule, then the index in `stages`, from 1."""
        return self._controller.stage

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        check_attached(self, self._trainer)
        trainer = self._trainer
        self._pending.clear()
        self._adapter_trainer = AdapterTrainer(
            trainer.accelerator.unwrap_model(trainer.model),
            self.adapter,
            self.config,
            num_steps=state.max_steps,
            rows_per_pass=args.per_device_train_batch_size,
            temperature=trainer.temperature,
            clip=(trainer.epsilon_low, trainer.epsilon_high),
            autocast=trainer.accelerator.autocast,
        )
        if state.global_step:
            self._resume(args, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        batches = [self._trajectories(inputs) for inputs in self._pending]
        self._pending.clear()
        trainer = self._trainer
        metrics = self._adapter_trainer.step(batches, self._rollout_schedule)
        if len(self._stages) > 1 and state.global_step % self.config.stage_check_interval == 0:
            metrics |= self._check_stage(batches)
        for name, value in metrics.items():
            trainer._metrics["train"][f"distill/{name}"].append(value)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        checkpoint = checkpoint_to_write(args, state)
        if checkpoint is None:
            return
        folder = checkpoint / ADAPTER_FOLDER
        self.save_pretrained(folder, base_model=checkpoint)
        schedules = [stage.to_dict() for stage in self._stages]
        stages = {**self._controller.state_dict(), "schedules": schedules}
        save_tensors(folder / STATE_NAME, {**self._adapter_trainer.state_dict(), "stages": stages})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            self.save_pretrained(Path(args.output_dir) / ADAPTER_FOLDER, base_model=args.output_dir)

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.is_world_process_zero:
            base_model = self._trainer.hub_model_id or args.output_dir
            self.save_pretrained(Path(args.output_dir) / ADAPTER_FOLDER, base_model=base_model)
            without_local_model(self._trainer.schedule).save_pretrained(Path(args.output_dir) / ADAPTER_FOLDER)

    def save_pretrained(self, folder: str | Path, *, base_model: str | Path | None = None) -> None:
        """
        Write the adapter, with the schedule in use beside it.

        Args:
            folder (`str` or `pathlib.Path`): Folder to write to.
            base_model (`str` or `pathlib.Path`, *optional*): Folder of the policy as it is now.
        """
        self.adapter.save_pretrained(folder, base_model=base_model)
        self._trainer.schedule.save_pretrained(folder)

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        file = resumed_file(self._trainer, args, state, f"{ADAPTER_FOLDER}/{STATE_NAME}")
        if file is None:
            logger.warning(
                f"No {ADAPTER_FOLDER}/{STATE_NAME} found for the checkpoint of step {state.global_step}: the adapter "
                "of the rollouts starts anew."
            )
            # The trainer has restored the checkpoint's.
            self._stages[0] = self._trainer.schedule
            _check_stages(self._stages, self._trainer.model.config.num_hidden_layers)
            return
        resumed = torch.load(file, map_location="cpu", weights_only=True)
        if len(self._stages) > 1:
            saved = [SparsityScheduleConfig.from_dict(stage) for stage in resumed["stages"]["schedules"]]
            if saved != self._stages:
                raise ValueError(
                    f"The checkpoint {file.parent.parent} was trained with other stages: {len(saved)} schedules, of "
                    f"which {sum(one in self._stages for one in saved)} are given now. Give the same schedule and "
                    "stages."
                )
            self._controller.load_state_dict(resumed["stages"])
        self.adapter.load_pretrained(file.parent)
        self._adapter_trainer.load_state_dict(resumed)
        self._use_stage()

    def _keep(self, inputs: dict[str, Any]) -> None:
        self._pending.append(inputs)
        # Another callback may change it before this one's step.
        self._rollout_schedule = self._trainer.schedule

    def _trajectories(self, inputs: dict[str, Any]) -> Trajectories:
        return Trajectories.from_inputs(
            inputs,
            advantages=inputs["advantages"],
            sampler_logprobs=inputs.get("sampling_per_token_logps"),
            teacher_logprobs=inputs.get("old_per_token_logps") if self.config.teacher == "old" else None,
        )

    def _check_stage(self, batches: list[Trajectories]) -> dict[str, float]:
        """Measure the tails of the stage in use and of the next one, and move to another stage if they say so."""
        following = self._controller.next_stage
        indices = [self._controller.stage] if following is None else [self._controller.stage, following]
        trackers = {index: AcceptanceTracker(self._stages[index], self.config.stage_min_tokens) for index in indices}
        sequences = chain.from_iterable(batch.sequences() for batch in batches)
        track_acceptance(self._trainer, islice(sequences, self.config.stage_sequences), list(trackers.values()))
        tails = {
            index: tracker.end_step(self._trainer.accelerator).get("acceptance/tail")
            for index, tracker in trackers.items()
        }
        before = self._controller.stage
        move = self._controller.update(tails[before], tails.get(following))
        if move:
            measured = ", ".join(f"{_text(tail)} at stage {index}" for index, tail in tails.items())
            logger.warning(
                f"DistillSparse moves from stage {before} to stage {self._controller.stage}: the tail acceptance is "
                f"{measured} (target {self._controller.target})."
            )
            self._use_stage()
        metrics = {"tail": tails[before], "next_tail": tails.get(following)}
        return {name: value for name, value in metrics.items() if value is not None} | {"stage": self.stage}

    def _use_stage(self) -> None:
        if len(self._stages) == 1:
            return
        schedule = self._stages[self._controller.stage]
        if schedule != self._trainer.schedule:
            self._trainer.schedule = schedule


def _check_training(trainer: "SparseRolloutGRPOTrainer", config: DistillSparseConfig) -> None:
    if trainer.vllm_generation.adapter is not None:
        raise ValueError("The trainer got two DistillSparseCallbacks, but its rollouts can have one adapter.")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "DistillSparseCallback does not support FSDP and DeepSpeed: its student runs in forward passes of its "
            "own, outside of their engines. Train on one GPU or with DDP."
        )
    if trainer.args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end=True would put the last adapter beside an earlier policy. Leave it False: each "
            f"checkpoint has its own {ADAPTER_FOLDER} folder."
        )
    if config.teacher == "old" and not trainer.args.vllm_importance_sampling_correction:
        raise ValueError(
            "teacher='old' needs the log-probs from before the update, which the trainer may leave out with "
            "vllm_importance_sampling_correction=False. Use teacher='current'."
        )
    if trainer.accelerator.mixed_precision == "fp16":
        raise ValueError(
            "DistillSparseCallback does not support fp16=True: its gradients are not scaled and would underflow. Use "
            "bf16=True, or float32."
        )
    if trainer.args.gradient_checkpointing and (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise ValueError(
            "DistillSparseCallback does not support reentrant gradient checkpointing, through which nothing reaches "
            "the adapter while the policy is frozen. Set gradient_checkpointing_kwargs={'use_reentrant': False}."
        )


def _check_stages(stages: list[SparsityScheduleConfig], num_layers: int) -> None:
    """Refuse stages that cannot follow each other in a running engine, or that read no less than the one before."""
    from .rollout import check_layers  # needs vLLM, which distilling on texts does without

    for stage in stages:
        check_layers(stage, num_layers)
    for index, (before, after) in enumerate(zip(stages, stages[1:], strict=False), 1):
        for name in ("page_size", "page_score", "landmarks_per_page", "landmark_dtype"):
            if getattr(before, name) != getattr(after, name):
                raise ValueError(
                    f"Stage {index} has {name}={getattr(after, name)!r}, but the schedule before it "
                    f"{getattr(before, name)!r}. An engine keeps its page structure, so all stages must share it."
                )
        longest = max(_longest_table(stage) * stage.bin_tokens for stage in (before, after))
        read = [
            sum(
                min(length, stage.budget(length, layer))
                for length in range(1, longest + stage.bin_tokens, min(before.bin_tokens, after.bin_tokens) // 2)
                for layer in range(num_layers)
            )
            for stage in (before, after)
        ]
        if read[1] >= read[0]:
            raise ValueError(
                f"Stage {index} reads no less than the schedule before it ({after.top_k_pages} after "
                f"{before.top_k_pages} top-k pages). Stages go from lenient to cheap."
            )


def _longest_table(schedule: SparsityScheduleConfig) -> int:
    """Bins of the longest of a schedule's tables."""
    return max(len(table) for table in (schedule.top_k_pages, *(schedule.layer_top_k_pages or {}).values()))


def save_tensors(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (`dict`) to `path` (`pathlib.Path`) with [`torch.save`], all of it or nothing."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


def _text(tail: float | None) -> str:
    return "unknown" if tail is None else f"{tail:.3f}"
