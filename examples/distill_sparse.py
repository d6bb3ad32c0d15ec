# /// script
# dependencies = [
#     "math-verify",
#     "sparrow-trl[gpu]",
# ]
# ///

"""
Train a dense policy with GRPO on block-sparse rollouts, and beside it a LoRA of the rollouts that brings them closer
to the dense policy, so that a cheaper schedule will do (DistillSparse).

Without arguments it trains the tiny reasoner that comes with the repository, on a CPU in a few minutes:

    accelerate launch examples/distill_sparse.py

Qwen3-1.7B on a GPU, from the paper's schedule for a tail acceptance of 0.86 to that for 0.80:

    accelerate launch examples/distill_sparse.py \
        --model_name_or_path Qwen/Qwen3-1.7B \
        --dataset_name trl-lib/DeepMath-103K \
        --sparsity_schedule qwen3-1.7b-0.86 --stages qwen3-1.7b-0.80 \
        --max_completion_length 16384 --vllm_max_model_length 18432 \
        --num_generations 8 --per_device_train_batch_size 1 --gradient_accumulation_steps 64 \
        --learning_rate 1e-6 --gradient_checkpointing --output_dir outputs/qwen3-1.7b-distill

To distil without training, use `sparrow-trl distill`.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from grpo_sparse import TINY_REASONER, SparseRolloutScriptArguments, greedy_rewards, load_math_problems
from peft import LoraConfig
from tiny_reasoner import task
from trl import ModelConfig, TrlParser
from trl.rewards import accuracy_reward

from sparrow_trl import (
    DistillSparseCallback,
    DistillSparseConfig,
    SparseRolloutGRPOConfig,
    SparseRolloutGRPOTrainer,
    SparsityScheduleConfig,
)
from sparrow_trl.acceptance_sweep import TokenSequence
from sparrow_trl.calibration import measure_schedule
from sparrow_trl.sequence_generation import encode_prompts


# A bin of cached length needs so many tokens before its tail counts.
MIN_TOKENS = 200


@dataclass
class DistillScriptArguments(SparseRolloutScriptArguments):
    """
    Arguments of this script, in addition to those of `grpo_sparse.py`.

    Args:
        stages (`list[str]`, *optional*):
            Cheaper schedules to move on to, from lenient to cheap: presets, paths or Hub ids.
        measured_schedules (`list[str]`, *optional*):
            Further schedules to measure the tail acceptance at, before and after.
        num_measured (`int`, *optional*, defaults to `32`):
            Prompts whose dense completions the tail acceptance is measured on.
        distill_learning_rate (`float`, *optional*, defaults to `1e-4`):
            Learning rate of the LoRA.
        distill_r (`int`, *optional*, defaults to `16`):
            Rank of the LoRA; its alpha is twice that.
        divergence (`str`, *optional*, defaults to `"reverse_kl"`):
            Divergence that it learns from.
        ppo_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the policy loss beside it.
        stage_check_interval (`int`, *optional*, defaults to `50`):
            Steps between checks of the tail acceptance.
        stage_patience (`int`, *optional*, defaults to `3`):
            Checks in a row in which the next stage must keep the target.
        target_acceptance (`float`, *optional*):
            Tail acceptance to keep.
    """

    stages: list[str] = field(
        default_factory=list,
        metadata={"help": "Cheaper schedules to move on to, from lenient to cheap: presets, paths or Hub ids."},
    )
    measured_schedules: list[str] = field(
        default_factory=list,
        metadata={"help": "Further schedules to measure the tail acceptance at, before and after."},
    )
    num_measured: int = field(
        default=32, metadata={"help": "Prompts whose dense completions the tail acceptance is measured on."}
    )
    distill_learning_rate: float = field(default=1e-4, metadata={"help": "Learning rate of the LoRA."})
    distill_r: int = field(default=16, metadata={"help": "Rank of the LoRA; its alpha is twice that."})
    divergence: str = field(default="reverse_kl", metadata={"help": "Divergence that it learns from."})
    ppo_weight: float = field(default=1.0, metadata={"help": "Weight of the policy loss beside it."})
    stage_check_interval: int = field(default=50, metadata={"help": "Steps between checks of the tail acceptance."})
    stage_patience: int = field(
        default=3, metadata={"help": "Checks in a row in which the next stage must keep the target."}
    )
    target_acceptance: float | None = field(default=None, metadata={"help": "Tail acceptance to keep."})


def dense_completions(trainer, prompts) -> list[TokenSequence]:
    """A completion of each prompt by the policy with dense attention, at the training's temperature."""
    generation = trainer.vllm_generation
    prompt_ids = encode_prompts(trainer.processing_class, prompts)
    with generation.dense_rollouts():
        generation.sync_weights()
        _, completion_ids, _, _ = generation.generate(prompt_ids, None, num_generations=1)
    pairs = zip(prompt_ids, completion_ids, strict=True)
    # The engines of several processes sample differently; all measure on what the first one sampled.
    sequences = [TokenSequence(prompt + ids, len(prompt)) for prompt, ids in pairs if len(ids) > 1]
    return broadcast_object_list([sequences])[0]


def measure_tails(trainer, sequences, schedules, adapter=None) -> dict[str, dict[str, float]]:
    """Tail acceptance per schedule and bin of cached length, teacher-forced."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    tails = {}
    for name, schedule in schedules.items():
        bins = measure_schedule(policy, sequences, schedule, temperature=trainer.temperature, adapter=adapter)
        tails[name] = {str(entry.start): entry.tail for entry in bins if entry.tokens >= MIN_TOKENS}
    return tails


def print_summary(summary: dict, output_dir: str) -> None:
    print(f"\nTail acceptance, smallest over the bins with at least {MIN_TOKENS} tokens:")
    print(f"{'schedule':30s} {'before':>8s} {'after':>8s} {'after, without the LoRA':>24s}")
    for name in summary["tail_before"]:
        cells = (summary[key][name] for key in ("tail_before", "tail_after", "tail_after_without_adapter"))
        before, after, without = ("-" if tail is None else f"{tail:.4f}" for tail in cells)
        print(f"{name[-30:]:30s} {before:>8s} {after:>8s} {without:>24s}")
    if "accuracy_after" in summary:
        print(
            f"Greedy dense accuracy on held-out tasks: {summary['accuracy_before']:.1%} before, "
            f"{summary['accuracy_after']:.1%} after"
        )
    print(
        f"{summary['steps']} steps, now at stage {summary['stage']}. The LoRA's part of a training step: "
        f"{summary['distill_share']:.0%}. Everything took {summary['seconds']:.0f} s. Policy, distill_sparse/ (the "
        f"LoRA with its schedule) and summary.json: {output_dir}"
    )


class StepTimes:
    """Time of the LoRA's steps, as a share of all training."""

    def __init__(self, callback):
        self.seconds, self._on_step_end = 0.0, callback.on_step_end
        callback.on_step_end = self

    def __call__(self, *args, **kwargs):
        started = time.time()
        self._on_step_end(*args, **kwargs)
        self.seconds += time.time() - started


def main(script_args, training_args, model_args):
    started = time.time()
    on_tiny_reasoner = script_args.dataset_name == "tiny_reasoner"
    if on_tiny_reasoner:
        train_dataset = task.make_dataset("train", script_args.num_train_tasks, seed=training_args.seed)
        eval_tasks = task.make_dataset("test", script_args.num_eval_tasks, seed=0)
        held_out = eval_tasks[: script_args.num_measured]["prompt"]
        reward = task.accuracy_reward
    else:
        dataset = load_math_problems(script_args)
        train_dataset = dataset.skip(script_args.num_measured)
        held_out = dataset[: script_args.num_measured]["prompt"]
        reward = accuracy_reward
    if training_args.model_init_kwargs is None and model_args.dtype not in (None, "auto"):
        training_args.model_init_kwargs = {"dtype": model_args.dtype}
    names = [training_args.sparsity_schedule, *script_args.stages, *script_args.measured_schedules]
    schedules = {name: SparsityScheduleConfig.resolve(name) for name in names}
    distill = DistillSparseCallback(
        DistillSparseConfig(
            lora=LoraConfig(
                r=script_args.distill_r, lora_alpha=2 * script_args.distill_r, target_modules="all-linear"
            ),
            learning_rate=script_args.distill_learning_rate,
            divergence=script_args.divergence,
            ppo_weight=script_args.ppo_weight,
            stages=script_args.stages,
            stage_check_interval=script_args.stage_check_interval,
            stage_patience=script_args.stage_patience,
            target_acceptance=script_args.target_acceptance,
        )
    )
    times = StepTimes(distill)
    trainer = SparseRolloutGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward,
        args=training_args,
        train_dataset=train_dataset,
        callbacks=[distill],
    )
    print(f"Measuring the tail acceptance at {len(schedules)} schedules")
    before = measure_tails(trainer, dense_completions(trainer, held_out), schedules)
    accuracy = {}
    if on_tiny_reasoner:
        accuracy["accuracy_before"] = greedy_rewards(trainer, eval_tasks).mean()
    print("Training on sparse rollouts")
    training = time.time()
    trainer.train()
    training = time.time() - training
    trainer.save_model()
    print("Measuring the tail acceptance again")
    sequences = dense_completions(trainer, held_out)
    after = measure_tails(trainer, sequences, schedules, distill.adapter)
    without = measure_tails(trainer, sequences, schedules)
    if on_tiny_reasoner:
        accuracy["accuracy_after"] = greedy_rewards(trainer, eval_tasks).mean()
    if trainer.accelerator.is_main_process:
        history = trainer.state.log_history
        summary = {
            **{
                key: {name: min(tails.values(), default=None) for name, tails in measured.items()}
                for key, measured in (
                    ("tail_before", before),
                    ("tail_after", after),
                    ("tail_after_without_adapter", without),
                )
            },
            **accuracy,
            "bins_before": before,
            "bins_after": after,
            "bins_after_without_adapter": without,
            "stage": distill.stage,
            "steps": trainer.state.global_step,
            "rewards": [entry["reward"] for entry in history if "reward" in entry],
            "kl": [entry["distill/kl"] for entry in history if "distill/kl" in entry],
            "distill_share": times.seconds / training,
            "seconds": round(time.time() - started, 1),
        }
        Path(training_args.output_dir, "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print_summary(summary, training_args.output_dir)
    return trainer


if __name__ == "__main__":
    parser = TrlParser((DistillScriptArguments, SparseRolloutGRPOConfig, ModelConfig))
    # vLLM's attention computes in float32 on the CPU only.
    demo = ["--config", str(TINY_REASONER / "distill.yaml"), "--bf16", str(torch.cuda.is_available())]
    main(*parser.parse_args_and_config(args=sys.argv[1:] or demo))
