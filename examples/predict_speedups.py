# /// script
# dependencies = [
#     "sparrow-trl",
# ]
# ///

"""
Predict what the paper's published schedules gain, beside what the paper measured.

    python examples/predict_speedups.py
    python examples/predict_speedups.py --hardware B200 --batch_size 64

No model is downloaded: the shapes of Qwen3 are known. Two predictions are printed. "Formula" is the paper's cost model
(section 3.3 and its project page), in which attention reads the schedule's budget and nothing else is read. "Reads"
counts all that a decode step reads: weights, the layers that stay dense, kept pages and landmarks. Neither knows the
time of the host, of launching kernels and of sampling, so that an engine normally gains less.

The measured speedups are those of the paper's Table 2, of the rollout and of one RL step (4 x H200, AIME 2024 with 8
samples a problem, up to 32K tokens).
"""

import argparse

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.bench_plan import MODEL_SHAPES, shape_config
from sparrow_trl.cost_model import HARDWARE, CostShape, get_hardware, predicted_speedup


TARGET = "0.86"

# Table 2 of the paper: rollout and RL one-step speedup.
MEASURED = {
    "qwen3-1.7b-0.86": (2.21, 1.97),
    "qwen3-4b-0.86": (2.41, 2.11),
    "qwen3-8b-0.86": (2.06, 1.81),
    "qwen3-14b-0.86": (1.48, 1.35),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    add = parser.add_argument
    add("--hardware", default="H200", help=f"one of {', '.join(HARDWARE)} (%(default)s)")
    add("--batch_size", type=int, default=32, help='sequences that decode together, for "reads" (%(default)s)')
    add("--num_samples", type=int, default=8, help='samples of a prompt, for "formula" (%(default)s)')
    add("--prompt_tokens", type=int, default=0, help="tokens of a prompt (%(default)s)")
    add("--output_tokens", type=int, default=32_768, help="tokens that each sample generates (%(default)s)")
    add("--overhead_ms", type=float, default=0.0, help='time of a step beside reading, for "reads" (%(default)s)')
    add(
        "--bandwidth_share",
        type=float,
        default=1.0,
        help='achievable share of the bandwidth, for "reads" (%(default)s)',
    )
    args = parser.parse_args()

    try:
        hardware = get_hardware(args.hardware)
        speedups = {
            f"{model}-{TARGET}": predicted_speedup(
                CostShape.from_config(shape_config(model)),
                SparsityScheduleConfig.from_preset(f"{model}-{TARGET}"),
                hardware,
                num_samples=args.num_samples,
                batch_size=args.batch_size,
                prompt_tokens=args.prompt_tokens,
                output_tokens=args.output_tokens,
                overhead_seconds=args.overhead_ms / 1e3,
                bandwidth_share=args.bandwidth_share,
            )
            for model in MODEL_SHAPES
        }
    except ValueError as error:
        parser.error(str(error))

    print(
        f"{hardware.name}: {hardware.peak_flops / 1e12:g} TFLOP/s, {hardware.bandwidth / 1e12:g} TB/s (datasheet). "
        f"Rollouts of {args.output_tokens:,} tokens, {args.batch_size} sequences at a time.\n"
    )
    print(f"{'':15}{'predicted':>18}  {'measured (Table 2)':>20}")
    print(f"{'schedule':15}{'formula':>9}{'reads':>9}  {'rollout':>10}{'RL step':>10}")
    for name, speedup in speedups.items():
        rollout, step = MEASURED[name]
        print(f"{name:15}{speedup.paper:>8.2f}x{speedup.refined:>8.2f}x  {rollout:>9.2f}x{step:>9.2f}x")


if __name__ == "__main__":
    main()
