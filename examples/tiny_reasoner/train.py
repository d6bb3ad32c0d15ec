"""Train the tiny reasoner from scratch on demonstrations of mixed quality.

    python -m tiny_reasoner.train --output_dir tiny_reasoner/model    # in examples/

A few minutes on a GPU (bfloat16 autocast, float32 weights), many hours on a CPU. The table grows from a few rooms to
its full length over the first part of the training: looking a room up is learnt on short tables and then holds on long
ones.

The loss per character falls in steps: to 0.13 when next rooms are looked up, and to 0.024, which is what the random
choice between worked and hasty steps leaves, when turns are looked up too. Some runs stay at 0.13 for thousands of
steps: take another seed, or train for longer.
"""

import argparse
import json
import math
import random
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from .evaluate import accuracy, held_out_tasks
from .task import MAX_ROOMS, MIN_ROOMS, NUM_STEPS, sample_task, write_solution
from .tokenizer import build_tokenizer


IGNORED = -100
# More than in the tasks, so that carries are practised often.
DEMONSTRATED_ONES_DIGIT = 3


class Demonstrations(IterableDataset):
    """
    Endless batches of tasks with their demonstrations, generated as they are needed.

    Yields `input_ids` and `labels`, int64 `[batch_size, length]`, padded on the right; a prompt is not learnt. The
    number of rooms is drawn between `NUM_STEPS + 1` and a limit that grows linearly over `growth_steps` batches to
    `MAX_ROOMS`, and from then on as in `sample_task`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, batch_size: int, growth_steps: int, seed: int):
        self.token_of = tokenizer.get_vocab()
        self.pad, self.eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.batch_size, self.growth_steps, self.seed = batch_size, growth_steps, seed

    def num_rooms(self, step: int, rng: random.Random) -> int | None:
        if step >= self.growth_steps:
            return None
        least = NUM_STEPS + 1
        return min(rng.randint(least, least + math.ceil((MAX_ROOMS - least) * step / self.growth_steps)), MAX_ROOMS)

    def example(self, rng: random.Random, step: int) -> tuple[list[int], int]:
        task = sample_task(rng, num_rooms=self.num_rooms(step, rng), max_ones_digit=DEMONSTRATED_ONES_DIGIT)
        text = task.prompt + write_solution(task, rng)
        return [*(self.token_of[character] for character in text), self.eos], len(task.prompt)

    def __iter__(self):
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        step = first
        while True:
            rng = random.Random(f"demonstrations-{self.seed}-{step}")
            examples = [self.example(rng, step) for _ in range(self.batch_size)]
            longest = max(len(ids) for ids, _ in examples)
            ids = torch.tensor([row + [self.pad] * (longest - len(row)) for row, _ in examples])
            positions = torch.arange(longest)
            prompt_lengths = torch.tensor([length for _, length in examples])[:, None]
            lengths = torch.tensor([len(row) for row, _ in examples])[:, None]
            yield ids, ids.masked_fill((positions < prompt_lengths) | (positions >= lengths), IGNORED)
            step += stride


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=2048,
        rope_theta=1e6,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--intermediate_size", type=int, default=192)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--num_kv_heads", type=int, default=2)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--growth_steps", type=int, default=2500)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--warmup_steps", type=int, default=200)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--max_seconds", type=float, help="end in this time, the learning rate with it")
    parser.add_argument("--num_workers", type=int, default=3)
    parser.add_argument("--log_steps", type=int, default=500)
    parser.add_argument("--eval_steps", type=int, default=2000)
    parser.add_argument("--eval_size", type=int, default=200)
    parser.add_argument("--final_eval_size", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(args, tokenizer).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {MIN_ROOMS} to {MAX_ROOMS} rooms", flush=True)

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay
    )
    started = time.time()

    def progress(step: int) -> float:
        by_time = (time.time() - started) / args.max_seconds if args.max_seconds else 0.0
        return min(max(step / args.steps, by_time), 1.0)

    data = Demonstrations(tokenizer, args.batch_size, args.growth_steps, args.seed)
    # spawn: forking after CUDA is up is not safe. In order, so that the table grows as planned.
    workers = {"num_workers": args.num_workers, "prefetch_factor": 8, "multiprocessing_context": "spawn"}
    loader = DataLoader(data, batch_size=None, **(workers if args.num_workers else {}))
    on_gpu = args.device.startswith("cuda")
    autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()

    arguments = {name: value for name, value in vars(args).items() if name not in ("output_dir", "device")}
    log = {"arguments": arguments, "history": []}
    recent_losses = []
    for step, (ids, labels) in enumerate(loader):
        done = progress(step)
        if done >= 1:
            break
        warmup = min((step + 1) / args.warmup_steps, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * warmup * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        ids, labels = ids.to(args.device, non_blocking=True), labels.to(args.device, non_blocking=True)
        # Padding is on the right and not learnt, so causal attention needs no mask.
        with autocast:
            logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        recent_losses.append(loss.detach())
        last = progress(step + 1) >= 1
        if (step + 1) % args.log_steps == 0 or last:
            entry = {
                "step": step + 1,
                "loss": torch.stack(recent_losses).mean().item(),
                "seconds": time.time() - started,
            }
            recent_losses = []
            if (step + 1) % args.eval_steps == 0 and not last:
                entry["greedy"] = accuracy(model, tokenizer, held_out_tasks(args.eval_size, seed=1))
            log["history"].append(entry)
            print(json.dumps(entry), flush=True)

    tasks = held_out_tasks(args.final_eval_size)
    log["final"] = {
        "greedy": accuracy(model, tokenizer, tasks),
        "sampled": accuracy(model, tokenizer, tasks, temperature=1.0),
    }
    print(json.dumps(log["final"]), flush=True)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    (args.output_dir / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
