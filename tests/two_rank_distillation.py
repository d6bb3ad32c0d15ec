"""
Two steps of training with a rollout adapter, one engine per rank; each rank writes what it ended with.

    ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 two_rank_distillation.py MODEL OUTPUT_DIR
"""

import json
import sys
from pathlib import Path

from peft import LoraConfig
from tiny_training import make_config, make_dataset, share_of_small_letters

from sparrow_trl import (
    DistillSparseCallback,
    DistillSparseConfig,
    SparseRolloutGRPOTrainer,
    SparsityScheduleConfig,
)


def main():
    model, output_dir = sys.argv[1:]
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    distill = DistillSparseCallback(DistillSparseConfig(lora=lora, learning_rate=5e-3, warmup_steps=0))
    trainer = SparseRolloutGRPOTrainer(
        model,
        share_of_small_letters,
        make_config(output_dir, max_steps=2, gradient_accumulation_steps=1),
        train_dataset=make_dataset(16),
        schedule=SparsityScheduleConfig(top_k_pages=[1, 2], bin_tokens=64, dense_layers=[0]),
        callbacks=[distill],
    )
    trainer.train()
    record = {
        "kl": [entry["distill/kl"] for entry in trainer.state.log_history if "distill/kl" in entry],
        "adapter": {name: float(value.double().sum()) for name, value in distill.adapter.state_dict().items()},
    }
    (Path(output_dir) / f"rank_{trainer.accelerator.process_index}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
