# /// script
# dependencies = [
#     "math-verify",
#     "sparrow-trl[gpu]",
# ]
# ///

"""
Train a dense policy with GRPO on block-sparse rollouts.

Without arguments it trains the tiny reasoner that comes with the repository, on a CPU in a few minutes:

    accelerate launch examples/grpo_sparse.py

Qwen3-1.7B on a GPU with the paper's schedule:

    accelerate launch examples/grpo_sparse.py \
        --model_name_or_path Qwen/Qwen3-1.7B \
        --dataset_name trl-lib/DeepMath-103K \
        --sparsity_schedule qwen3-1.7b-0.86 \
        --max_completion_length 16384 --vllm_max_model_length 18432 \
        --num_generations 8 --per_device_train_batch_size 1 --gradient_accumulation_steps 64 \
        --learning_rate 1e-6 --gradient_checkpointing --output_dir outputs/qwen3-1.7b-sparse

A dataset may also be a file: JSON Lines with the columns `prompt` and `solution`, or `question` and `answer` as in
GSM8K (`--dataset_name openai/gsm8k --dataset_config main`).

The paper's trainings are in `examples/recipes`, each with its launch commands for one GPU, one node and four nodes:

    accelerate launch --config_file examples/accelerate/fsdp2_1node.yaml examples/grpo_sparse.py \
        --config examples/recipes/qwen3-1.7b_polaris.yaml
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from scipy.stats import bootstrap  # noqa: E402
from tiny_reasoner import task  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config  # noqa: E402
from trl.rewards import accuracy_reward, reasoning_accuracy_reward  # noqa: E402

from sparrow_trl import SparseRolloutGRPOConfig, SparseRolloutGRPOTrainer  # noqa: E402
from sparrow_trl.cli_eval import ANSWER_COLUMNS, INSTRUCTION, PROMPT_COLUMNS  # noqa: E402
from sparrow_trl.code_tests import parse_tests  # noqa: E402
from sparrow_trl.dataset_rows import choose_column, read_dataset  # noqa: E402
from sparrow_trl.evaluation import boxed  # noqa: E402
from sparrow_trl.rewards import sandboxed_code_reward  # noqa: E402
from sparrow_trl.rollout import swapped  # noqa: E402
from sparrow_trl.sequence_generation import encode_prompts  # noqa: E402
from sparrow_trl.versions import installed_version  # noqa: E402


TINY_REASONER = Path(__file__).parent / "tiny_reasoner"


@dataclass
class SparseRolloutScriptArguments(ScriptArguments):
    """
    Arguments of the scripts that train on sparse rollouts.

    Args:
        dataset_name (`str`, *optional*, defaults to `"tiny_reasoner"`):
            Dataset or JSON Lines file with the columns `prompt` and `solution`, or `question` and `answer` as in
            GSM8K; `tiny_reasoner` for the tasks made here.
        num_train_tasks (`int`, *optional*, defaults to `4000`):
            Tasks to make for training the tiny reasoner.
        num_eval_tasks (`int`, *optional*, defaults to `500`):
            Held-out tasks to make for measuring its accuracy before and after.
    """

    dataset_name: str = field(
        default="tiny_reasoner",
        metadata={
            "help": "Dataset or JSON Lines file with the columns `prompt` and `solution`, or `question` and `answer` "
            "as in GSM8K; `tiny_reasoner` for the tasks made here."
        },
    )
    num_train_tasks: int = field(default=4000, metadata={"help": "Tasks to make for training the tiny reasoner."})
    num_eval_tasks: int = field(
        default=500,
        metadata={"help": "Held-out tasks to make for measuring its accuracy before and after."},
    )


@dataclass
class GRPOScriptArguments(SparseRolloutScriptArguments):
    """
    Arguments of this script.

    Args:
        reward (`str`, *optional*, defaults to `"math"`):
            How completions are rewarded: `math` compares the answer with the dataset's; `reasoning` does so for
            models that think first, and gives nothing for a completion that is still thinking at its end; `code` runs
            the program against the dataset's tests (a column `tests`, or `input_output` as in TACO). The tiny
            reasoner has a reward of its own.
        max_prompt_length (`int`, *optional*):
            Tokens of a prompt above which a problem is left out.
        updates_per_generation (`int`, *optional*):
            Updates from each generation batch. With it, `gradient_accumulation_steps` follows from
            `generation_batch_size` and the number of processes, and need not be given.
    """

    reward: str = field(
        default="math",
        metadata={
            "help": "How completions are rewarded: `math` compares the answer with the dataset's; `reasoning` does so "
            "for models that think first, and gives nothing for a completion that is still thinking at its end; "
            "`code` runs the program against the dataset's tests (a column `tests`, or `input_output` as in TACO). "
            "The tiny reasoner has a reward of its own."
        },
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Tokens of a prompt above which a problem is left out."}
    )
    updates_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "Updates from each generation batch. With it, `gradient_accumulation_steps` follows from "
            "`generation_batch_size` and the number of processes, and need not be given."
        },
    )

    def __post_init__(self):
        if self.reward not in ("math", "reasoning", "code"):
            raise ValueError(f"reward={self.reward!r} must be 'math', 'reasoning' or 'code'.")
        for name in ("max_prompt_length", "updates_per_generation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")


def load_math_problems(script_args: ScriptArguments) -> Dataset:
    """The training split of a dataset of problems whose solutions `accuracy_reward` can check."""
    name = script_args.dataset_name
    dataset = read_dataset(name, script_args.dataset_train_split, script_args.dataset_config, kind="math problems")
    if not {"question", "problem"} & set(dataset.column_names):
        return dataset
    question, answer = choose_column(dataset, name, PROMPT_COLUMNS), choose_column(dataset, name, ANSWER_COLUMNS)

    def ask(row):
        solution = str(row[answer])
        if "####" in solution:  # GSM8K writes the number it asks for behind its solution
            solution = solution.rpartition("####")[2].strip().replace(",", "")
        content = f"{row[question]}\n{INSTRUCTION}"
        return {"prompt": [{"role": "user", "content": content}], "solution": boxed(solution)}

    return dataset.map(ask, remove_columns=dataset.column_names)


def load_code_problems(script_args: ScriptArguments) -> Dataset:
    """The training split of a dataset of programming problems, without those whose tests cannot be read."""
    name = script_args.dataset_name
    dataset = read_dataset(name, script_args.dataset_train_split, script_args.dataset_config, kind="code problems")
    question = choose_column(dataset, name, PROMPT_COLUMNS)
    tests = choose_column(dataset, name, ("tests", "input_output"))

    def ask(row):
        try:
            parsed = parse_tests(row[tests])
        except ValueError:  # such as none at all, which TACO has
            return {"prompt": [], "tests": row[tests]}
        starter = (row.get("starter_code") or "").strip("\n")
        if starter:
            wanted = f"Complete this Python code:\n```python\n{starter}\n```\nPut all of it"
        elif parsed.style == "stdin":
            wanted = "Write a Python program that reads standard input and writes standard output. Put it"
        else:
            wanted = f"Write a Python function{f' `{parsed.name}`' if parsed.name else ''}. Put it"
        content = f"{row[question]}\n\n{wanted} in one ```python block."
        return {"prompt": [{"role": "user", "content": content}], "tests": row[tests]}

    dataset = dataset.map(ask, remove_columns=[column for column in dataset.column_names if column != "tests"])
    return dataset.filter(bool, input_columns="prompt")


def load_problems(script_args: GRPOScriptArguments, model_name: str) -> tuple[Dataset, Callable]:
    """The problems whose prompts are not too long in the tokens of a model, and their reward."""
    if script_args.reward == "code":
        dataset, reward = load_code_problems(script_args), sandboxed_code_reward
    else:
        dataset = load_math_problems(script_args)
        reward = accuracy_reward if script_args.reward == "math" else reasoning_accuracy_reward
    limit = script_args.max_prompt_length
    if limit is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_name)
        dataset = dataset.filter(
            lambda prompts: [len(ids) <= limit for ids in encode_prompts(tokenizer, prompts)],
            input_columns="prompt",
            batched=True,
        )
    if not len(dataset):
        raise ValueError(
            f"No problem of {script_args.dataset_name} is left: all have longer prompts than "
            f"max_prompt_length={limit}, or no tests that can be read."
        )
    return dataset, reward


def accumulate(script_args: GRPOScriptArguments, training_args: SparseRolloutGRPOConfig) -> None:
    """Set the accumulation steps that make as many updates of a generation batch as are wanted."""
    updates, steps = script_args.updates_per_generation, training_args.steps_per_generation
    if updates is None:
        return
    if training_args.deepspeed is not None:
        raise ValueError(
            f"updates_per_generation={updates} decides gradient_accumulation_steps, which the DeepSpeed configuration "
            f"of --deepspeed {training_args.deepspeed} has been given already. Give DeepSpeed's settings to "
            "`accelerate launch --config_file` instead, as in examples/accelerate, or gradient_accumulation_steps "
            "itself."
        )
    if steps % updates:
        raise ValueError(
            f"updates_per_generation={updates} does not divide the {steps} forward passes of each process, which are "
            f"generation_batch_size={training_args.generation_batch_size} over "
            f"per_device_train_batch_size={training_args.per_device_train_batch_size} and the number of processes "
            f"({training_args.world_size})."
        )
    training_args.gradient_accumulation_steps = steps // updates


def greedy_rewards(trainer, tasks) -> np.ndarray:
    """Reward of the policy's greedy completion of each task, with dense attention."""
    generation = trainer.vllm_generation
    generation.sync_weights()
    prompt_ids = trainer.processing_class(list(tasks["prompt"]))["input_ids"]
    with (
        generation.dense_rollouts(),
        swapped(generation, "temperature", 0.0),
        swapped(generation, "probe_rows", None),
    ):
        _, completion_ids, _, _ = generation.generate(prompt_ids, None, num_generations=1)
    completions = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    return np.array(task.accuracy_reward(completions, answer=tasks["answer"]))


def summarize(trainer, before: np.ndarray, after: np.ndarray, seconds: float) -> dict:
    """Result of the tiny reasoner's training, as written to `summary.json`."""
    gains = after - before
    # Where every task gained the same, such as nothing, there is nothing to resample.
    interval = (gains[0], gains[0])
    if np.ptp(gains):
        interval = bootstrap((gains,), np.mean, confidence_level=0.95, rng=0).confidence_interval
    bins = trainer.acceptance.bin_statistics()
    state = trainer.vllm_generation.state
    sparse_steps = [log for log in trainer.state.log_history if log.get("sparsity/kept_fraction", 1) < 1]
    return {
        "accuracy_before": before.mean(),
        "accuracy_after": after.mean(),
        "num_eval": len(before),
        "gain_interval": [round(float(bound), 4) for bound in interval],
        "tail_by_bin": {str(entry.start): entry.tail for entry in bins},
        "mean_by_bin": {str(entry.start): entry.mean for entry in bins},
        "tokens_by_bin": {str(entry.start): entry.tokens for entry in bins},
        "kept_fraction": state.counters.kept_fraction,
        "sparse_steps": len(sparse_steps),
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 1),
        "attention_backend": state.attention_backend,
        "versions": {
            "vllm": installed_version("vllm"),
            **{name: version(name) for name in ("sparrow-trl", "trl", "transformers", "accelerate", "torch")},
        },
    }


def print_summary(summary: dict, output_dir: str) -> None:
    low, high = summary["gain_interval"]
    gain = summary["accuracy_after"] - summary["accuracy_before"]
    print(
        f"\nGreedy dense accuracy on {summary['num_eval']} held-out tasks: {summary['accuracy_before']:.1%} before, "
        f"{summary['accuracy_after']:.1%} after {summary['steps']} steps on sparse rollouts "
        f"(gain {gain:+.1%}, 95% interval {low:+.1%} to {high:+.1%})"
    )
    print(
        f"Pages read while decoding: {summary['kept_fraction']:.1%} of the cached ones, counted in the attention "
        f"layers ({summary['attention_backend']})"
    )
    for start, tail in summary["tail_by_bin"].items():
        print(
            f"Tail acceptance from {start} cached tokens: {tail:.3f} (mean {summary['mean_by_bin'][start]:.3f}, "
            f"{summary['tokens_by_bin'][start]} tokens)"
        )
    print(
        f"Everything took {summary['seconds']:.0f} s. Policy, schedule, summary.json and acceptance.png: {output_dir}"
    )


def make_parser() -> TrlParser:
    return TrlParser((GRPOScriptArguments, SparseRolloutGRPOConfig, ModelConfig))


def main(script_args, training_args, model_args):
    started = time.time()
    accumulate(script_args, training_args)
    on_tiny_reasoner = script_args.dataset_name == "tiny_reasoner"
    if on_tiny_reasoner:
        train_dataset = task.make_dataset("train", script_args.num_train_tasks, seed=training_args.seed)
        held_out = task.make_dataset("test", script_args.num_eval_tasks, seed=0)
        reward = task.accuracy_reward
    else:
        with training_args.main_process_first(desc="reading the problems"):
            train_dataset, reward = load_problems(script_args, model_args.model_name_or_path)
        if training_args.process_index == 0:
            print(f"Training on {len(train_dataset)} problems")
    if training_args.model_init_kwargs is None and model_args.dtype not in (None, "auto"):
        training_args.model_init_kwargs = {"dtype": model_args.dtype}
    if model_args.attn_implementation is not None:
        training_args.model_init_kwargs = {
            "attn_implementation": model_args.attn_implementation,
            **(training_args.model_init_kwargs or {}),
        }

    trainer = SparseRolloutGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=reward,
        args=training_args,
        train_dataset=train_dataset,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    if on_tiny_reasoner:
        print(f"Measuring greedy dense accuracy on {len(held_out)} held-out tasks (about half a minute on two cores)")
        before = greedy_rewards(trainer, held_out)
        print(f"{before.mean():.1%}. Training on sparse rollouts")
    trainer.train()
    trainer.save_model()
    if on_tiny_reasoner:
        print("Measuring the accuracy again")
        after = greedy_rewards(trainer, held_out)
        if trainer.accelerator.is_main_process:
            summary = summarize(trainer, before, after, time.time() - started)
            Path(training_args.output_dir, "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            print_summary(summary, training_args.output_dir)
    return trainer


if __name__ == "__main__":
    parser = make_parser()
    # vLLM's attention computes in float32 on the CPU only.
    demo = ["--config", str(TINY_REASONER / "demo.yaml"), "--bf16", str(torch.cuda.is_available())]
    main(*parser.parse_args_and_config(args=sys.argv[1:] or demo))
