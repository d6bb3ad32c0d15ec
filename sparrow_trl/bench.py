"""
`sparrow-trl bench`: decode steps of dense (vLLM's own attention) and sparse rollouts, side by side on one workload.

Each variant runs in a process of its own (`bench_worker`), one after the other, and differs from the other in the
attention backend and the schedule alone. Contexts are not computed: on a GPU the KV cache is filled with random keys
and values. Nothing is reported unless all of it was verified.

Written to the output folder: `bench.json` (every number), `bench.png`, and each engine's log.
"""

import contextlib
import datetime
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .bench_plan import (
    ENGINE_RESERVE_BYTES,
    MODEL_SHAPES,
    engine_arguments,
    integrate_rollout,
    largest_batch,
    num_new_tokens,
    rollout_contexts,
    shape_config,
)
from .bench_report import draw, group_kernels
from .bench_traffic import ModelShape, step_traffic
from .bench_worker import PROGRESS
from .json_files import dump_json_object, read_json_object, write_atomically
from .schedule import SparsityScheduleConfig
from .versions import check_version


RESULT_NAME = "bench.json"
PICTURE_NAME = "bench.png"

VARIANTS = ("dense", "sparse")

LOG_TAIL_LINES = 25

# Tokens that one step of the engine prefills, with `prefill`.
PREFILL_TOKENS = 8192

MAX_RESULT_BYTES = 64 * 2**20


class BenchError(RuntimeError):
    """A variant could not be measured."""


@dataclass(kw_only=True)
class BenchOptions:
    """
    What to measure.

    Args:
        model (`str`):
            One of `bench_plan.MODEL_SHAPES`, which get dummy weights, a folder, or a Hub id.
        schedule ([`SparsityScheduleConfig`]):
            Schedule of the sparse variant.
        workloads (`list[tuple[int, int]]`, *optional*, defaults to `[]`):
            Batch and context of each workload.
        rollout_length (`int`, *optional*):
            Time a whole rollout up to this length.
        rollout_batch (`int`, *optional*):
            Batch of that rollout; by default the largest that fits in both variants at its full length.
        rollout_points (`int`, *optional*, defaults to `17`):
            Contexts at which the rollout is timed.
        auto_contexts (`list[int]`, *optional*, defaults to `[]`):
            Contexts that get the largest batch that fits in both variants at the longest of them.
        variants (`tuple[str, ...]`, *optional*, defaults to `("dense", "sparse")`):
            Which of the two to run.
        steps (`int`, *optional*, defaults to `24`):
            Decode steps in a timed block.
        blocks (`int`, *optional*, defaults to `3`):
            Timed blocks of each workload.
        warmup (`int`, *optional*, defaults to `8`):
            Decode steps before them.
        breakdown (`bool`, *optional*, defaults to `False`):
            Whether to measure the time of each kernel as well.
        prefill (`bool`, *optional*, defaults to `False`):
            Whether to compute the prompts instead of filling the KV cache. Always so on a CPU.
        model_runner (`str`, *optional*, defaults to `"v1"`):
            vLLM's model runner, `"v1"` (that of the trainer's rollouts) or `"v2"`.
        load_format (`str`, *optional*, defaults to `"dummy"`):
            vLLM's `load_format`; model shapes have no weights to load.
        dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Type of the weights and of the KV cache.
        gpu_memory_utilization (`float`, *optional*, defaults to `0.9`):
            Share of the GPU's memory that the engine may use.
        kv_cache_memory_bytes (`int`, *optional*):
            Size of the KV cache, instead of what is left in that share.
        block_size (`int`, *optional*):
            Tokens in a block of the KV cache.
        max_model_len (`int`, *optional*):
            Longest sequence of the engine; by default the longest that is measured.
        enforce_eager (`bool`, *optional*, defaults to `False`):
            Whether to run without CUDA graphs.
    """

    model: str
    schedule: SparsityScheduleConfig
    workloads: list[tuple[int, int]] = field(default_factory=list)
    rollout_length: int | None = None
    rollout_batch: int | None = None
    rollout_points: int = 17
    auto_contexts: list[int] = field(default_factory=list)
    variants: tuple[str, ...] = VARIANTS
    steps: int = 24
    blocks: int = 3
    warmup: int = 8
    breakdown: bool = False
    prefill: bool = False
    model_runner: str = "v1"
    load_format: str = "dummy"
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    enforce_eager: bool = False


def run_bench(options: BenchOptions, output: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """
    Measure, and write `bench.json` and `bench.png`.

    Args:
        options ([`BenchOptions`]): What to measure.
        output (`pathlib.Path`): Folder for the results and the logs, which is created when missing.
        report (callable): Called with each line of progress.

    Returns:
        `dict[str, Any]`: What `bench.json` holds.

    Raises:
        ValueError: for options that cannot be measured.
        BenchError: when a variant fails; the message ends with its last lines.
    """
    check_version("vllm")
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sparrow-bench-") as temporary:
        folder = Path(temporary)
        model, shape = _resolve_model(options, folder)
        job, rollout_workloads = _plan(options, model, shape)
        report(f"workloads: {', '.join(f'{batch} x {context}' for batch, context in job['workloads'])}")
        measured = {}
        for variant in options.variants:
            schedule = options.schedule.to_dict() if variant == "sparse" else None
            measured[variant] = _run_variant({**job, "variant": variant, "schedule": schedule}, folder, output, report)
    result = {
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": options.model,
        "shape": {**asdict(shape), "kv_bytes_per_token": shape.kv_bytes_per_token},
        "schedule": options.schedule.to_dict(),
        "settings": {name: value for name, value in job.items() if name != "workloads"},
        **summarize(measured, shape, options.schedule, rollout_workloads, options.rollout_length),
        "variants": measured,
    }
    write_atomically(output / RESULT_NAME, dump_json_object(result, RESULT_NAME, MAX_RESULT_BYTES))
    draw(result, output / PICTURE_NAME)
    return result


def _resolve_model(options: BenchOptions, folder: Path) -> tuple[str, ModelShape]:
    from transformers import AutoConfig

    element_bytes = {"bfloat16": 2, "float16": 2, "float32": 4}.get(options.dtype)
    if element_bytes is None:
        raise ValueError(f"dtype must be bfloat16, float16 or float32, got {options.dtype!r}.")
    model = options.model
    if model in MODEL_SHAPES:
        if options.load_format != "dummy":
            raise ValueError(
                f"{model!r} is a shape without weights, which load_format={options.load_format!r} cannot load. Leave "
                "it at 'dummy', or give the model's folder or Hub id."
            )
        config = shape_config(model)
        model = str(folder / "model")
        config.save_pretrained(model)
    elif "/" not in model and not Path(model).exists():
        raise ValueError(
            f"There is no model shape, folder or Hub id {model!r}. The shapes are {', '.join(MODEL_SHAPES)}."
        )
    else:
        config = AutoConfig.from_pretrained(model)
    return model, ModelShape.from_config(config, element_bytes)


def _plan(options: BenchOptions, model: str, shape: ModelShape) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """The job that both variants share, and the workloads that make up the rollout."""
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    if options.breakdown and is_cpu:
        raise ValueError("The breakdown by kernel needs a GPU. Leave out --breakdown.")
    prefill = options.prefill or is_cpu
    timed = options.steps * options.blocks

    def new_tokens(batch_tokens: int) -> int:
        prefill_steps = 1 if not prefill else -(-2 * batch_tokens // PREFILL_TOKENS) + 1
        return num_new_tokens(timed, options.warmup, prefill_steps)

    def auto_batch(tokens: int) -> int:
        cache_bytes = options.kv_cache_memory_bytes
        if cache_bytes is None:
            if is_cpu:
                raise ValueError("On a CPU, a batch of 'auto' needs --kv-cache-memory to say what must fit.")
            memory = options.gpu_memory_utilization * current_platform.get_device_total_memory()
            cache_bytes = memory - shape.total_weight_bytes - ENGINE_RESERVE_BYTES
        return largest_batch(shape, tokens, cache_bytes, options.schedule)

    workloads = list(options.workloads)
    if options.auto_contexts:
        batch = auto_batch(max(options.auto_contexts) + new_tokens(PREFILL_TOKENS))
        workloads += [(batch, context) for context in options.auto_contexts]
    rollout_workloads = []
    if options.rollout_length is not None:
        batch = options.rollout_batch or auto_batch(options.rollout_length)
        window = new_tokens(batch * options.rollout_length)
        contexts = rollout_contexts(shape, options.schedule, options.rollout_length, window, options.rollout_points)
        rollout_workloads = [(batch, context) for context in contexts]
    workloads = list(dict.fromkeys([*workloads, *rollout_workloads]))
    if not workloads:
        raise ValueError("There is nothing to measure. Give --workload, --batch and --context, or --profile rollout.")

    tokens = new_tokens(max(batch * context for batch, context in workloads))
    job = {
        "workloads": workloads,
        "steps": options.steps,
        "blocks": options.blocks,
        "warmup": options.warmup,
        "breakdown": options.breakdown,
        "model_runner": options.model_runner,
        "prefill": prefill,
        "prefill_steps": tokens - num_new_tokens(timed, options.warmup, 0),
        "engine": engine_arguments(
            model,
            workloads,
            tokens,
            device_is_cpu=is_cpu,
            load_format=options.load_format,
            dtype=options.dtype,
            gpu_memory_utilization=None if is_cpu else options.gpu_memory_utilization,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            # At least half of a step's tokens are left for prompts while others decode.
            max_num_batched_tokens=max(PREFILL_TOKENS, 2 * max(b for b, _ in workloads)) if prefill else None,
            enforce_eager=options.enforce_eager or None,
        ),
    }
    return job, rollout_workloads


def _run_variant(job: dict[str, Any], folder: Path, output: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure one variant in its own process, whose output goes to `<variant>.log`."""
    variant = job["variant"]
    job_path, result_path = folder / f"{variant}_job.json", folder / f"{variant}.json"
    write_atomically(job_path, dump_json_object(job, "the job"))
    log_path = output / f"{variant}.log"
    tail = deque(maxlen=LOG_TAIL_LINES)
    command = [sys.executable, "-m", f"{__package__}.bench_worker", str(job_path), str(result_path)]
    with open(log_path, "w") as log, _process(command) as worker:
        for line in worker.stdout:
            log.write(line)
            log.flush()
            tail.append(line)
            if line.startswith(PROGRESS):
                report(f"{variant}: {line.removeprefix(PROGRESS).rstrip()}")
    if worker.returncode or not result_path.exists():
        raise BenchError(
            f"The {variant} variant failed with exit status {worker.returncode}; its log is {log_path}. Its last "
            f"lines:\n{''.join(tail)}"
        )
    return read_json_object(result_path, MAX_RESULT_BYTES)


@contextlib.contextmanager
def _process(command: list[str]):
    """A process whose output can be read, and which does not outlive the context."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def summarize(
    measured: dict[str, dict[str, Any]],
    shape: ModelShape,
    schedule: SparsityScheduleConfig,
    rollout_workloads: list[tuple[int, int]],
    rollout_length: int | None,
) -> dict[str, Any]:
    """
    What the raw results of the variants say.

    Args:
        measured (`dict[str, dict]`): Result of [`bench_worker`][sparrow_trl.bench_worker] by variant.
        shape ([`ModelShape`]): The model.
        schedule ([`SparsityScheduleConfig`]): Schedule of the sparse variant.
        rollout_workloads (`list[tuple[int, int]]`): Workloads of the rollout, by increasing context.
        rollout_length (`int`, *optional*): Length of the rollout.

    Returns:
        `dict[str, Any]`: `copy_bandwidth` (bytes per second), `workloads` and `rollout`.
    """
    bandwidth = max(result["copy_bandwidth"] for result in measured.values())
    workloads: dict[tuple[int, int], dict[str, Any]] = {}
    for variant, result in measured.items():
        for raw in result["workloads"]:
            key = raw["batch"], raw["context"]
            workload = workloads.setdefault(key, {"batch": key[0], "context": key[1]})
            workload[variant] = summarize_workload(raw, shape, schedule if variant == "sparse" else None, bandwidth)
    for workload in workloads.values():
        if all(variant in workload for variant in VARIANTS):
            workload["speedup"] = workload["dense"]["step_seconds"] / workload["sparse"]["step_seconds"]
    rollout = None
    if rollout_workloads:
        rollout = {
            "length": rollout_length,
            "batch": rollout_workloads[0][0],
            "contexts": [context for _, context in rollout_workloads],
        }
        for variant in measured:
            points = [workloads[key][variant] for key in rollout_workloads]
            lengths, seconds = [p["mean_length"] for p in points], [p["step_seconds"] for p in points]
            rollout[variant] = {
                "lengths": lengths,
                "step_seconds": seconds,
                "seconds": integrate_rollout(lengths, seconds, rollout_length),
            }
        if all(variant in rollout for variant in VARIANTS):
            rollout["speedup"] = rollout["dense"]["seconds"] / rollout["sparse"]["seconds"]
    return {"copy_bandwidth": bandwidth, "workloads": list(workloads.values()), "rollout": rollout}


def summarize_workload(
    raw: dict[str, Any], shape: ModelShape, schedule: SparsityScheduleConfig | None, bandwidth: float
) -> dict[str, Any]:
    """
    Times and bytes of one workload of one variant.

    Args:
        raw (`dict`): The workload in the worker's result.
        shape ([`ModelShape`]): The model.
        schedule ([`SparsityScheduleConfig`], *optional*): The schedule; dense attention by default.
        bandwidth (`float`): Bytes per second of the device's memory.
    """
    first, last = raw["lengths"]
    seconds = statistics.median(raw["step_seconds"])
    traffic = step_traffic(shape, raw["batch"], range(first, last + 1), schedule)
    roofline = traffic.total / bandwidth
    summary = {
        "step_seconds": seconds,
        "step_seconds_spread": max(raw["step_seconds"]) - min(raw["step_seconds"]),
        "tokens_per_second": raw["batch"] / seconds,
        "mean_length": (first + last) / 2,
        "bytes": {**asdict(traffic), "kv": traffic.kv, "total": traffic.total},
        "kv_bandwidth_over_step": traffic.kv / seconds,
        "roofline_seconds": roofline,
        "roofline_ratio": seconds / roofline,
    }
    if "kernels" in raw:
        summary["breakdown"] = group_kernels(raw["kernels"], seconds, traffic)
    return summary
