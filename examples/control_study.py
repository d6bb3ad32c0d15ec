# /// script
# dependencies = [
#     "math-verify",
#     "sparrow-trl[gpu]",
# ]
# ///

"""
How sparse may rollouts be? Trains the same model on dense rollouts, on rollouts held at several tail acceptances, with
a guard and on harshly sparse rollouts, several seeds each, and draws what becomes of them (paper, figure 1 and the
second row of figure 4).

A reduced form on the tiny reasoner that comes with the repository, half an hour on two cores; it is what runs without
arguments where there is no GPU:

    accelerate launch --cpu examples/control_study.py --config examples/tiny_reasoner/control_study_reduced.yaml

The full form, on one GPU:

    accelerate launch --num_processes 1 examples/control_study.py --config examples/tiny_reasoner/control_study.yaml

All runs share one engine. Each is written to the output folder when it ends, and found there when the study is started
again. So several starts may share the work, each with some of the seeds or settings; `--report_only` with all settings
then puts together what there is.

A setting is `dense`, `guard`, `tail-X` (the cheapest schedule whose rollouts have a tail acceptance of X before the
training), `harsh` or `pages-N` (N pages by score at every length), with any of these behind a plus:

    mask              importance-sampling correction that leaves tokens with a large ratio out; by default ratios are
                      truncated
    sequence          one that leaves whole completions out, TRL's own default, which long completions do not allow
    uncorrected       none at all
    oversample        twice the completions, of which the better half is learnt from (paper, appendix A)
"""

import copy
import gc
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from control_study_report import report  # noqa: E402
from grpo_sparse import TINY_REASONER, greedy_rewards  # noqa: E402
from tiny_reasoner import task  # noqa: E402
from transformers import PrinterCallback, TrainerCallback, set_seed  # noqa: E402
from trl import TrlParser  # noqa: E402

from sparrow_trl import (  # noqa: E402
    ScheduleGuardCallback,
    ScheduleGuardConfig,
    SparseRolloutGRPOConfig,
    SparseRolloutGRPOTrainer,
    SparsityScheduleConfig,
)
from sparrow_trl.acceptance_sweep import TokenSequence, measure_rollout_acceptance  # noqa: E402
from sparrow_trl.acceptance_table import AcceptanceTable  # noqa: E402
from sparrow_trl.json_files import write_atomically  # noqa: E402
from sparrow_trl.schedule import MAX_PAGES  # noqa: E402
from sparrow_trl.schedule_search import search_schedule  # noqa: E402


# Modes of TRL's importance-sampling correction.
CORRECTIONS = {"mask": "token_mask", "sequence": "sequence_mask"}
# Tokens that a bin of cached length needs below its tail quantile to count.
TOKENS_BELOW_TAIL = 10
# What runs must agree in to be compared.
SHARED_ARGUMENTS = (
    "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "num_generations", "generation_batch_size",
    "temperature", "max_completion_length", "beta", "loss_type", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
)  # fmt: skip


@dataclass
class StudyArguments:
    """
    Arguments of the study, beside those of training, which all runs share.

    Args:
        model_name_or_path (`str`):
            The tiny reasoner, or a model that was trained on its tasks.
        settings (`list[str]`):
            What to compare.
        seeds (`list[int]`, *optional*, defaults to `[0]`):
            Seeds of the training tasks, the sampling and the training.
        harsh_pages (`int`, *optional*, defaults to `4`):
            Pages by score of the setting `harsh`.
        guard_target (`float`, *optional*, defaults to `0.86`):
            Tail acceptance that the guard holds.
        page_counts (`list[int]`):
            Budgets to choose from for the settings `tail-X`, in pages with the reserved ones.
        calibration_tasks (`int`, *optional*, defaults to `64`):
            Tasks whose completions under each of these budgets are measured.
        num_eval_tasks (`int`, *optional*, defaults to `256`):
            Held-out tasks for the accuracy, greedy and dense.
        eval_interval (`int`, *optional*, defaults to `10`):
            Steps between two measurements of it.
        num_train_tasks (`int`, *optional*, defaults to `4000`):
            Tasks to train on.
        report_only (`bool`, *optional*, defaults to `False`):
            Whether to train nothing, and to report on the runs that are there.
    """

    model_name_or_path: str = field(metadata={"help": "The tiny reasoner, or a model trained on its tasks."})
    settings: list[str] = field(metadata={"help": "What to compare."})
    page_counts: list[int] = field(metadata={"help": "Budgets to choose from, in pages with the reserved ones."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds of the runs."})
    harsh_pages: int = field(default=4, metadata={"help": "Pages by score of the setting `harsh`."})
    guard_target: float = field(default=0.86, metadata={"help": "Tail acceptance that the guard holds."})
    calibration_tasks: int = field(
        default=64, metadata={"help": "Tasks whose completions under each of these budgets are measured."}
    )
    num_eval_tasks: int = field(default=256, metadata={"help": "Held-out tasks for the accuracy, greedy and dense."})
    eval_interval: int = field(default=10, metadata={"help": "Steps between two measurements of the accuracy."})
    num_train_tasks: int = field(default=4000, metadata={"help": "Tasks to train on."})
    report_only: bool = field(default=False, metadata={"help": "Train nothing; report on the runs that are there."})


@dataclass(frozen=True)
class Setting:
    """
    One way of making rollouts and learning from them.

    Args:
        name (`str`): As on the command line.
        rollouts (`str`): `dense`, `guard`, `harsh`, `tail` or `pages`.
        value (`float`, *optional*): Tail acceptance or pages.
        correction (`str`, *optional*): `mask`, `sequence` or `uncorrected`; by default the configuration's.
        oversample (`bool`): Whether to learn from the better half of twice the completions.
    """

    name: str
    rollouts: str
    value: float | None = None
    correction: str | None = None
    oversample: bool = False

    @classmethod
    def parse(cls, name: str) -> "Setting":
        """
        Raises:
            ValueError: for a name that is none.
        """
        base, *modifiers = name.split("+")
        rollouts, _, value = base.partition("-")
        unknown = set(modifiers) - {*CORRECTIONS, "uncorrected", "oversample"}
        corrections = [modifier for modifier in modifiers if modifier != "oversample"]
        number = None
        if rollouts == "pages" and value.isdigit():
            number = int(value)
        elif rollouts == "tail" and re.fullmatch(r"0?\.\d+", value):
            number = float(value)
        if (
            unknown
            or len(corrections) > 1
            or rollouts not in ("dense", "guard", "harsh", "tail", "pages")
            or (not number if rollouts in ("tail", "pages") else value)
        ):
            raise ValueError(
                f"{name!r} is no setting. Use dense, guard, harsh, tail-X (such as tail-0.86) or pages-N (such as "
                "pages-8), with mask, sequence or uncorrected and oversample behind a plus (such as harsh+mask)."
            )
        return cls(name, rollouts, number, *corrections, oversample="oversample" in modifiers)


class OversamplingTrainer(SparseRolloutGRPOTrainer):
    """Samples `num_generations` completions of a prompt, and learns from the better half of them."""

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        self._latest_rewards = rewards.nansum(dim=1)
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        rewards = self._latest_rewards.view(-1, self.num_generations)
        kept, columns = rewards.topk(self.num_generations // 2, dim=1)
        rows = (columns + torch.arange(len(rewards), device=columns.device)[:, None] * self.num_generations).flatten()
        advantages = (kept - kept.mean(dim=1, keepdim=True)) / (kept.std(dim=1, keepdim=True) + 1e-4)
        for name, value in output.items():
            if torch.is_tensor(value) and value.dim() and len(value) == rewards.numel():
                output[name] = value[rows]
        output["advantages"] = advantages.flatten()
        output["num_items_in_batch"] = output["completion_mask"].sum()
        self._metrics["train"]["reward_kept"].append(kept.mean().item())
        return output


class HeldOutAccuracy(TrainerCallback):
    """Measures the policy's accuracy on held-out tasks, greedy and dense, before and during training."""

    def __init__(self, tasks, interval: int, label: str):
        self.tasks, self.interval, self.label = tasks, interval, label
        self.trainer = None
        self.accuracy: dict[int, float] = {}

    def attach(self, trainer) -> None:
        self.trainer = trainer

    def measure(self, step: int) -> None:
        self.accuracy[step] = float(greedy_rewards(self.trainer, self.tasks).mean())
        print(f"{self.label}, step {step}: accuracy {self.accuracy[step]:.1%}", flush=True)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.measure(0)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % self.interval == 0 or state.global_step == state.max_steps:
            self.measure(state.global_step)


class Study:
    """Trains one setting and seed after the other, all on one engine."""

    def __init__(self, arguments: StudyArguments, training_args: SparseRolloutGRPOConfig):
        self.arguments, self.training_args = arguments, training_args
        self.folder = Path(training_args.output_dir)
        self.recipe = replace(SparsityScheduleConfig.resolve(training_args.sparsity_schedule), layer_top_k_pages=None)
        self.engine = None

    def conditions(self, setting: Setting) -> dict[str, Any]:
        """What a run was made under: one found in the folder must be the one that would be made now."""
        values = {name: getattr(self.training_args, name) for name in SHARED_ARGUMENTS}
        names = ("model_name_or_path", "num_train_tasks", "num_eval_tasks", "eval_interval")
        values |= {name: getattr(self.arguments, name) for name in names}
        values["schedule"] = None if setting.rollouts == "dense" else self.schedule(setting).to_dict()
        if setting.rollouts == "guard":
            values["guard_target"] = self.arguments.guard_target
        return json.loads(json.dumps(values))

    def check_run(self, setting: Setting, seed: int) -> bool:
        """
        Whether a run is there already.

        Raises:
            ValueError: when one is there that was made under other conditions.
        """
        file = self.run_folder(setting, seed) / "run.json"
        if not file.exists():
            return False
        theirs, ours = json.loads(file.read_text()).get("conditions", {}), self.conditions(setting)
        differing = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
        if differing:
            raise ValueError(
                f"{file} was made with other settings: its {', '.join(differing)} differ. Use another output_dir, or "
                "remove it to make the run again."
            )
        return True

    def run_folder(self, setting: Setting, seed: int) -> Path:
        return self.folder / setting.name / f"seed-{seed}"

    def run(self, setting: Setting, seed: int) -> None:
        """Train, and write `SETTING/seed-N/run.json`, unless it is there."""
        if self.check_run(setting, seed):
            print(f"{setting.name}, seed {seed}: there already")
            return
        arguments, folder = self.arguments, self.run_folder(setting, seed)
        held_out = HeldOutAccuracy(
            task.make_dataset("test", arguments.num_eval_tasks, seed=0),
            arguments.eval_interval,
            f"{setting.name}, seed {seed}",
        )
        guard = None
        if setting.rollouts == "guard":
            # The tiny reasoner's tokens are untouched or broken, so that a floor would be no lower than the target.
            guard = ScheduleGuardCallback(
                ScheduleGuardConfig(
                    target_acceptance=arguments.guard_target, search=True, auto_sequences=64, tail_floor=0.0
                )
            )
        trainer = self.trainer(setting, self.schedule(setting), folder, seed, [held_out, *filter(None, [guard])])
        set_seed(seed)  # the engine, which samples in this process, has its own seed when it starts
        started = time.time()
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "reward" in entry]
        result = {
            "setting": setting.name,
            "seed": seed,
            "conditions": self.conditions(setting),
            "top_k_pages": list(trainer.schedule.top_k_pages),
            "accuracy": held_out.accuracy,
            "tail_by_bin": {
                entry.start: entry.tail
                for entry in trainer.acceptance.bin_statistics()
                if entry.tokens >= self.min_tokens
            },
            "history": history,
            "rollout_tokens": round(
                trainer.args.generation_batch_size * sum(entry["completions/mean_length"] for entry in history)
            ),
            "guard": guard.history if guard else [],
            "seconds": round(time.time() - started, 1),
        }
        write_atomically(folder / "run.json", json.dumps(result, indent=1).encode())
        report(self.folder, arguments.settings)

    @property
    def min_tokens(self) -> int:
        """Tokens that a bin of cached length needs to have a tail."""
        return round(TOKENS_BELOW_TAIL / self.recipe.tail_quantile)

    def trainer(self, setting: Setting, schedule, folder: Path, seed: int, callbacks=()) -> SparseRolloutGRPOTrainer:
        args = copy.copy(self.training_args)
        args.output_dir, args.seed, args.sparsity_schedule, args.logging_steps = str(folder), seed, None, 1
        if setting.correction == "uncorrected":
            args.vllm_importance_sampling_correction = False
        elif setting.correction is not None:
            args.vllm_importance_sampling_mode = CORRECTIONS[setting.correction]
        if setting.oversample:
            args.num_generations *= 2
            args.per_device_train_batch_size *= 2
            args.generation_batch_size *= 2
        trainer_class = OversamplingTrainer if setting.oversample else SparseRolloutGRPOTrainer
        trainer = trainer_class(
            model=self.arguments.model_name_or_path,
            reward_funcs=task.accuracy_reward,
            args=args,
            train_dataset=task.make_dataset("train", self.arguments.num_train_tasks, seed=seed),
            schedule=schedule,
            engine=self.engine,
            callbacks=list(callbacks),
        )
        trainer.remove_callback(PrinterCallback)  # a line for each step
        self.engine = trainer.vllm_generation.llm
        gc.collect()  # the trainer before this one, and its model
        return trainer

    def schedule(self, setting: Setting) -> SparsityScheduleConfig:
        """
        The schedule that a setting begins with.

        Raises:
            ValueError: when no budget has the tail acceptance that a setting asks for.
        """
        if setting.rollouts == "dense":
            return replace(self.recipe, top_k_pages=[MAX_PAGES], dense_layers="all")
        pages = {"guard": MAX_PAGES, "harsh": self.arguments.harsh_pages, "pages": setting.value}
        if setting.rollouts in pages:
            return replace(self.recipe, top_k_pages=[pages[setting.rollouts]])
        tails, counts = self.measured_tails
        found = search_schedule(
            self.arguments.page_counts,
            tails,
            counts,
            bin_tokens=self.recipe.bin_tokens,
            target_acceptance=setting.value,
            min_tokens=self.min_tokens,
            **self.recipe.recipe,
        )
        return replace(self.recipe, top_k_pages=found.schedule.top_k_pages, target_acceptance=setting.value)

    @cached_property
    def measured_tails(self) -> tuple[np.ndarray, np.ndarray]:
        """Tails and tokens `[budgets, bins]` of the rollouts of each budget, before any training (section 3.2)."""
        file = self.folder / "calibration" / "acceptance_table.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            table = self.measure_budgets()
            if not file.exists():  # by another process meanwhile: all must have the same schedules
                table.save(file)
        table = AcceptanceTable.load(file)
        ours = (self.arguments.page_counts, self.recipe.bin_tokens, self.arguments.model_name_or_path)
        if (table.page_counts, table.bin_tokens, table.model_name) != ours or any(
            getattr(self.recipe, name) != value for name, value in table.recipe.items()
        ):
            raise ValueError(
                f"{file} has measured other budgets, another recipe or another model. Remove the file to measure "
                "again, or use another output_dir."
            )
        return table.quantile(self.recipe.tail_quantile), table.count

    def measure_budgets(self) -> AcceptanceTable:
        dense = Setting.parse("dense")
        trainer = self.trainer(dense, self.schedule(dense), self.folder, seed=0)
        generation, arguments = trainer.vllm_generation, self.arguments
        tasks = task.make_dataset("test", arguments.calibration_tasks, seed=1)
        prompts = trainer.processing_class(list(tasks["prompt"]))["input_ids"]
        generation.sync_weights()
        reserved = self.recipe.sink_pages + self.recipe.recent_pages
        rollouts = []
        for pages in arguments.page_counts:
            print(f"Measuring the tail acceptance of rollouts that keep {pages} pages", flush=True)
            generation.set_schedule(replace(self.recipe, top_k_pages=[pages - reserved]))
            _, completions, _, _ = generation.generate(prompts, None, num_generations=1)
            pairs = zip(prompts, completions, strict=True)
            rollouts.append([TokenSequence(ids + new, len(ids)) for ids, new in pairs if len(new) > 1])
        with trainer.accelerator.autocast():
            return measure_rollout_acceptance(
                trainer.model,
                rollouts,
                self.recipe,
                arguments.page_counts,
                self.recipe.bin_tokens,
                model_name=arguments.model_name_or_path,
            )


def main(arguments, training_args):
    settings = [Setting.parse(name) for name in arguments.settings]
    if training_args.sparsity_schedule is None:
        raise ValueError("The study needs a recipe: --sparsity_schedule, of whose schedule the budgets do not count.")
    if training_args.distributed_state.num_processes > 1:
        raise ValueError("The study runs in one process: start it with `accelerate launch --num_processes 1`.")
    if not training_args.acceptance_probe_fraction or training_args.temperature != 1:
        raise ValueError("The study measures tails at temperature 1: it needs acceptance_probe_fraction above 0.")
    folder = Path(training_args.output_dir)
    if not arguments.report_only:
        study = Study(arguments, training_args)
        # What cannot be found, or compared, stops the study before it trains anything, and tails, which take a
        # calibration, come last.
        for setting in sorted(settings, key=lambda setting: setting.rollouts == "tail"):
            study.schedule(setting)
            for file in folder.glob(f"{setting.name}/seed-*/run.json"):
                study.check_run(setting, int(file.parent.name.removeprefix("seed-")))
        for seed in arguments.seeds:  # seed by seed, so that an interrupted study still compares all settings
            for setting in settings:
                study.run(setting, seed)
    print(report(folder, arguments.settings))


if __name__ == "__main__":
    parser = TrlParser((StudyArguments, SparseRolloutGRPOConfig))
    name = "control_study.yaml" if torch.cuda.is_available() else "control_study_reduced.yaml"
    main(*parser.parse_args_and_config(args=sys.argv[1:] or ["--config", str(TINY_REASONER / name)]))
