"""
Training with a guard and an automatic schedule on two ranks; each writes what it saw.

    ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 two_rank_guard.py MODEL OUTPUT_DIR
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from test_guard import is_dense, make_guard
from tiny_training import RecordingTrainer, make_config, make_dataset, share_of_small_letters

from sparrow_trl.break_detector import BreakDetector
from sparrow_trl.rollout import swapped


def main():
    model, output_dir = sys.argv[1:]
    guard = make_guard(target_acceptance=0.9, dense_steps=2)
    config = make_config(
        output_dir, max_steps=4, gradient_accumulation_steps=1, learning_rate=1e-5, acceptance_probe_fraction=1.0
    )
    trainer = RecordingTrainer(
        model,
        share_of_small_letters,
        config,
        train_dataset=make_dataset(16),
        schedule="auto",
        callbacks=[guard],
    )
    signals = []

    def update(detector, measured):
        """A break at the third step, whatever was measured."""
        signals.append(asdict(measured))
        return ["a break"] if len(signals) == 3 else []

    with swapped(BreakDetector, "update", update):
        trainer.train()
    record = {
        "schedules": [rollout.schedule.to_dict() for rollout in trainer.rollouts],
        "dense": [is_dense(rollout) for rollout in trainer.rollouts],
        "completions": [list(map(list, rollout.completions)) for rollout in trainer.rollouts],
        "history": guard.history,
        "signals": signals,
    }
    (Path(output_dir) / f"rank_{trainer.accelerator.process_index}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
