"""
Two steps of training with one engine per rank, or one server for both; each rank writes what it saw.

    ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 two_rank_training.py MODEL OUTPUT_DIR [SERVER_URL]
"""

import json
import sys
from pathlib import Path

from tiny_training import RecordingTrainer, make_config, make_dataset, share_of_small_letters

from sparrow_trl import SparsityScheduleConfig


def main():
    model, output_dir, *urls = sys.argv[1:]
    server = {}
    if urls:
        server = {"vllm_mode": "server", "vllm_server_base_url": urls[0], "vllm_engine_kwargs": None}
        server |= {"vllm_block_size": None, "vllm_max_model_length": None}
    trainer = RecordingTrainer(
        model,
        share_of_small_letters,
        make_config(
            output_dir, max_steps=2, gradient_accumulation_steps=1, save_strategy="steps", save_steps=2, **server
        ),
        train_dataset=make_dataset(16),
        schedule=SparsityScheduleConfig(top_k_pages=[1, 2, 3], bin_tokens=64, dense_layers=[0]),
    )
    trainer.train()
    rollouts = trainer.rollouts
    trainer.vllm_generation.sync_weights()
    record = {
        "num_processes": trainer.accelerator.num_processes,
        "completions": [[list(ids) for ids in rollout.completions] for rollout in rollouts],
        "probed_tokens": [sum(len(lengths) for *_, lengths in rollout.bounds) for rollout in rollouts],
        "lower_sums": [sum(float(lower.sum()) for lower, *_ in rollout.bounds) for rollout in rollouts],
        "kept_pages": [rollout.counters.kept_pages for rollout in rollouts],
        "cached_pages": [rollout.counters.cached_pages for rollout in rollouts],
        "metrics": [rollout.metrics for rollout in rollouts],
        "statistics": trainer.acceptance.state_dict(),
        "weights_sum": sum(float(parameter.double().sum()) for parameter in trainer.model.parameters()),
        "engine_difference": trainer.vllm_generation.check_weights(rollouts[-1].prompts),
    }
    (Path(output_dir) / f"rank_{trainer.accelerator.process_index}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
