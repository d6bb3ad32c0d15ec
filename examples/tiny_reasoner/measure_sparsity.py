"""
Measure sparsity schedules on the tiny reasoner: accuracy of its sparse rollouts and their tail acceptance per bin.

    python -m tiny_reasoner.measure_sparsity tiny_reasoner/schedules/*    # in examples/

The rollouts are sampled at temperature 1 by the engine that training uses, held-out tasks, one completion each.
Acceptance is exact: the policy with sparse attention against the policy with dense attention, on these rollouts.
"""

import argparse
import json
import os
from pathlib import Path


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from sparrow_trl import SparseVLLMGeneration, SparsityScheduleConfig  # noqa: E402
from sparrow_trl.acceptance import AcceptanceTracker, acceptance_rate  # noqa: E402
from sparrow_trl.attention import sparse_attention_context  # noqa: E402

from .task import MAX_COMPLETION_TOKENS, MAX_PROMPT_TOKENS, accuracy_reward, make_dataset  # noqa: E402


MODEL = Path(__file__).parent / "model"


@torch.no_grad()
def measure_acceptance(
    model,
    schedule: SparsityScheduleConfig,
    prompts: list[list[int]],
    completions: list[list[int]],
    batch_size: int = 16,
) -> AcceptanceTracker:
    """Exact acceptance rate of every completion token but the first, by cached length of its query."""
    tracker = AcceptanceTracker(schedule, min_tokens=1)
    for start in range(0, len(prompts), batch_size):
        batch = list(zip(prompts, completions, strict=True))[start : start + batch_size]
        rows = [torch.tensor(prompt + completion) for prompt, completion in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        prompt_lengths = torch.tensor([len(prompt) for prompt, _ in batch])[:, None]
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        inputs = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths).long()}
        dense = model(**inputs).logits
        with sparse_attention_context(model, schedule, prompt_lengths=prompt_lengths[:, 0]):
            sparse = model(**inputs).logits
        cached = torch.arange(1, ids.shape[1] + 1).expand_as(ids)
        # The query that predicts a completion's first token is the prompt's last, which is dense.
        queries = (cached > prompt_lengths) & (cached < lengths)
        alpha = acceptance_rate(dense[queries], sparse[queries])
        tracker.update(alpha, alpha, cached[queries])
    tracker.end_step()
    return tracker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="+", help="folders with a sparsity_schedule.json, or `dense`")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--num_tasks", type=int, default=256)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tasks = make_dataset("test", args.num_tasks, seed=1)
    prompts = tokenizer(list(tasks["prompt"]))["input_ids"]
    generation = SparseVLLMGeneration(
        model,
        Accelerator(cpu=not torch.cuda.is_available()),
        tokenizer,
        schedule=SparsityScheduleConfig.dense(),
        engine_kwargs={"enforce_eager": True},
        max_model_length=MAX_PROMPT_TOKENS + MAX_COMPLETION_TOKENS,
        max_completion_length=MAX_COMPLETION_TOKENS,
        max_num_seqs=64,
    )
    for name in args.schedules:
        schedule = SparsityScheduleConfig.dense() if name == "dense" else SparsityScheduleConfig.from_pretrained(name)
        generation.set_schedule(schedule)
        _, completions, _, _ = generation.generate(prompts, None, num_generations=1)
        rewards = accuracy_reward(tokenizer.batch_decode(completions, skip_special_tokens=True), tasks["answer"])
        result = {
            "schedule": name,
            "accuracy": sum(rewards) / len(rewards),
            "mean_length": sum(map(len, completions)) / len(completions),
            "kept_fraction": generation.counters.kept_fraction,
        }
        if not schedule.is_dense:
            tracker = measure_acceptance(model, schedule, prompts, completions)
            result["bins"] = {
                entry.start: {"tail": round(entry.tail, 4), "mean": round(entry.mean, 4), "tokens": entry.tokens}
                for entry in tracker.bin_statistics()
            }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
