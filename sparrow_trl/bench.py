"""
`sparrow-trl bench`: decode steps of dense (vLLM's own attention) and sparse rollouts, side by side on one workload.

Each variant, the dense one and one per schedule, runs in a process of its own (`bench_worker`), one after the other,
and differs from the others in the attention backend and the schedule alone. Contexts are not computed: on a GPU the KV
cache is filled with random keys and values. Nothing is reported unless all of it was verified.

Written to the output folder: `bench.json` (every number, written anew after each workload), `bench.png`, and each
engine's log.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .bench_plan import (
    ENGINE_RESERVE_BYTES,
    MODEL_SHAPES,
    SPARE_CACHE_TOKENS,
    cache_bytes_per_token,
    engine_arguments,
    integrate_rollout,
    largest_batch,
    load_config,
    num_new_tokens,
    rollout_contexts,
)
from .bench_report import DENSE, compare_attention, draw, group_kernels
from .bench_traffic import ModelShape, step_traffic
from .bench_worker import PROGRESS
from .json_files import dump_json_object, read_json_object, write_atomically
from .schedule import SparsityScheduleConfig
from .versions import check_version


RESULT_NAME = "bench.json"
PICTURE_NAME = "bench.png"

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
        schedules (`dict[str, SparsityScheduleConfig]`):
            Schedule of each sparse variant, by the name of the variant.
        workloads (`list[tuple[int, int]]`, *optional*, defaults to `[]`):
            Batch and context of each workload.
        rollout_length (`int`, *optional*):
            Time a whole rollout up to this length.
        rollout_batch (`int`, *optional*):
            Batch of that rollout; by default the largest that fits in all variants at its full length.
        rollout_points (`int`, *optional*, defaults to `12`):
            Contexts at which the rollout is timed. With 12, the bytes of keys and values that the published schedules
            read in a rollout to 32K are integrated to within 1%.
        auto_contexts (`list[int]`, *optional*, defaults to `[]`):
            Contexts that get the largest batch that fits in all variants at the longest of them.
        variant (`str`, *optional*, defaults to `"both"`):
            `"dense"` or `"sparse"` to run those variants alone.
        steps (`int`, *optional*, defaults to `16`):
            Decode steps in a timed block.
        blocks (`int`, *optional*, defaults to `3`):
            Timed blocks of each workload.
        processes (`int`, *optional*, defaults to `1`):
            Processes that each variant is timed in, in turn with the other variants. Where steps are so short that
            the host decides, processes differ more than blocks do.
        warmup (`int`, *optional*, defaults to `16`):
            Decode steps before them. In 16 steps a sequence passes each position in a page, and each number modulo 16,
            which Triton compiles for.
        breakdown (`bool`, *optional*, defaults to `False`):
            Whether to measure the time of each kernel as well, at the workloads. Sparse variants run once more for
            it, with kernels that do not overlap.
        prefill (`bool`, *optional*, defaults to `False`):
            Whether to compute the prompts instead of filling the KV cache. Always so on a CPU.
        model_runner (`str`, *optional*):
            vLLM's model runner, `"v1"` or `"v2"`; by default vLLM chooses.
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
        compile (`bool`, *optional*, defaults to `True`):
            Whether `torch.compile` compiles the model. Without it engines start sooner; decode steps are captured in
            CUDA graphs either way.
    """

    model: str
    schedules: dict[str, SparsityScheduleConfig]
    workloads: list[tuple[int, int]] = field(default_factory=list)
    rollout_length: int | None = None
    rollout_batch: int | None = None
    rollout_points: int = 12
    auto_contexts: list[int] = field(default_factory=list)
    variant: str = "both"
    steps: int = 16
    blocks: int = 3
    processes: int = 1
    warmup: int = 16
    breakdown: bool = False
    prefill: bool = False
    model_runner: str | None = None
    load_format: str = "dummy"
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    enforce_eager: bool = False
    compile: bool = True


@dataclass(kw_only=True)
class BenchPlan:
    """
    What is measured, as it follows from the options.

    Args:
        shape ([`ModelShape`]): The model.
        schedules (`dict[str, SparsityScheduleConfig]`): Schedule of each sparse variant.
        workloads (`list[tuple[int, int]]`): Batch and context of each workload.
        rollout_workloads (`list[tuple[int, int]]`): Those of the rollout's points, by increasing context.
        rollout_length (`int`, *optional*): Length of the rollout.
        jobs (`dict[str, dict]`): What [`bench_worker`][sparrow_trl.bench_worker] is to do, by variant.
    """

    shape: ModelShape
    schedules: dict[str, SparsityScheduleConfig]
    workloads: list[tuple[int, int]]
    rollout_workloads: list[tuple[int, int]]
    rollout_length: int | None
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)


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
        BenchError: when a variant fails; the message ends with its last lines. What was measured before it is in
            `bench.json`, which then says `"complete": false`.
    """
    plan = plan_bench(options)
    output.mkdir(parents=True, exist_ok=True)
    measured = {}
    record = {
        "command": _command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": options.model,
        "shape": {**asdict(plan.shape), "kv_bytes_per_token": plan.shape.kv_bytes_per_token},
        "schedules": {name: schedule.to_dict() for name, schedule in plan.schedules.items()},
        "variants": measured,
    }

    def save(complete: bool) -> dict[str, Any]:
        result = {"complete": complete, **record, **summarize(measured, plan)}
        write_atomically(output / RESULT_NAME, dump_json_object(result, RESULT_NAME, MAX_RESULT_BYTES))
        return result

    def merge(variant: str, result: dict[str, Any]) -> None:
        measured[variant] = join_processes(earlier[variant], result) if variant in earlier else result
        save(complete=False)

    def merge_separate(variant: str, result: dict[str, Any]) -> None:
        found = {(workload["batch"], workload["context"]): workload for workload in result["workloads"]}
        for workload in measured[variant]["workloads"]:
            if (workload["batch"], workload["context"]) in found:
                workload["separate"] = found[workload["batch"], workload["context"]]
        save(complete=False)

    save(complete=False)  # in place of the result of an earlier run
    for number in range(options.processes):
        earlier = dict(measured)
        for variant, job in plan.jobs.items():
            # Kernels are timed once, and those of sparse variants in one more process.
            overlaps = job["schedule"] is not None and job["breakdown"]
            timed = {**job, "breakdown": []} if overlaps or number else job
            log_name = f"{variant}-{number + 1}" if number else None
            _run_variant(variant, timed, output, report, merge, log_name)
            if overlaps and not number:
                separate = {**job, "workloads": job["breakdown"], "overlap": False}
                _run_variant(variant, separate, output, report, merge_separate, log_name=f"{variant}-separate")
    result = save(complete=True)
    draw(result, output / PICTURE_NAME)
    return result


def join_processes(earlier: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """`earlier` (`dict`), the result of a variant's first processes, with the step times of one more, `result`."""
    found = {(workload["batch"], workload["context"]): workload for workload in result["workloads"]}
    workloads = []
    for workload in earlier["workloads"]:
        more = found.get((workload["batch"], workload["context"]))
        seconds = workload["step_seconds"] + (more["step_seconds"] if more else [])
        workloads.append({**workload, "step_seconds": seconds})
    return {**earlier, "workloads": workloads}


def _command() -> str:
    """The command that runs, which `python -m` would show as a path."""
    program = Path(sys.argv[0])
    return shlex.join(["sparrow-trl" if program.name == "__main__.py" else program.name, *sys.argv[1:]])


def prepare_bench(options: BenchOptions, output: Path, report: Callable[[str], None]) -> None:
    """
    Start the engine of every variant, all at once, and stop it: [`run_bench`] then finds everything compiled.

    The engines differ from the measured ones in nothing that is part of the key of vLLM's compile cache, only in the
    size of the KV cache, so that they fit beside one another.

    Args:
        options ([`BenchOptions`]): What is to be measured.
        output (`pathlib.Path`): Folder for the logs, which is created when missing.
        report (callable): Called with each line of progress.

    Raises:
        ValueError: for options that cannot be measured.
        BenchError: when an engine does not start.
    """
    plan = plan_bench(options)
    output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(plan.jobs)) as pool:
        runs = [
            pool.submit(_run_variant, variant, prepare_job(job, plan), output, report)
            for variant, job in plan.jobs.items()
        ]
    for run in runs:
        run.result()


def prepare_job(job: dict[str, Any], plan: BenchPlan) -> dict[str, Any]:
    """The job that only starts the engine of `job` (`dict`), with a KV cache of one longest sequence."""
    engine = dict(job["engine"])
    tokens = engine["max_model_len"] + SPARE_CACHE_TOKENS
    engine["kv_cache_memory_bytes"] = int(tokens * cache_bytes_per_token(plan.shape, list(plan.schedules.values())))
    if "gpu_memory_utilization" in engine:
        # vLLM wants this share to be free at the start, also where the cache's size is given.
        engine["gpu_memory_utilization"] /= len(plan.jobs)
    return {**job, "engine": engine, "workloads": [], "breakdown": []}


def _resolve_model(options: BenchOptions) -> tuple[str, ModelShape]:
    from vllm import envs

    element_bytes = {"bfloat16": 2, "float16": 2, "float32": 4}.get(options.dtype)
    if element_bytes is None:
        raise ValueError(f"dtype must be bfloat16, float16 or float32, got {options.dtype!r}.")
    model = options.model
    if model in MODEL_SHAPES and options.load_format != "dummy":
        raise ValueError(
            f"{model!r} is a shape without weights, which load_format={options.load_format!r} cannot load. Leave it "
            "at 'dummy', or give the model's folder or Hub id."
        )
    config = load_config(model)
    if model in MODEL_SHAPES:
        # Always the same folder: its path is part of the key of vLLM's compile cache, which lies beside it.
        folder = Path(envs.VLLM_CACHE_ROOT) / "sparrow_trl" / model
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.json", config.to_json_string().encode())
        model = str(folder)
    return model, ModelShape.from_config(config, element_bytes)


def plan_bench(options: BenchOptions) -> BenchPlan:
    """What `options` ([`BenchOptions`]) ask to be measured, and the jobs of all variants."""
    check_version("vllm")
    from vllm.platforms import current_platform

    if not options.schedules:
        raise ValueError("There is no schedule to measure. Give --preset or --schedule.")
    schedules = list(options.schedules.values())
    is_cpu = current_platform.is_cpu()
    if options.breakdown and is_cpu:
        raise ValueError("The breakdown by kernel needs a GPU. Leave out --breakdown.")
    model, shape = _resolve_model(options)
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
        return largest_batch(shape, tokens, cache_bytes, schedules)

    workloads = list(options.workloads)
    if options.auto_contexts:
        batch = auto_batch(max(options.auto_contexts) + new_tokens(PREFILL_TOKENS))
        workloads += [(batch, context) for context in options.auto_contexts]
    rollout_workloads = []
    if options.rollout_length is not None:
        batch = options.rollout_batch or auto_batch(options.rollout_length)
        window = new_tokens(batch * options.rollout_length)
        contexts = rollout_contexts(shape, schedules, options.rollout_length, window, options.rollout_points)
        rollout_workloads = [(batch, context) for context in contexts]
    every = list(dict.fromkeys([*workloads, *rollout_workloads]))
    if not every:
        raise ValueError("There is nothing to measure. Give --workload, --batch and --context, or --profile rollout.")
    if options.breakdown and not workloads:
        raise ValueError(
            "The breakdown by kernel is made at the workloads, not at the points of a rollout. Give --workload too."
        )

    tokens = new_tokens(max(batch * context for batch, context in every))
    job = {
        "workloads": every,
        "steps": options.steps,
        "blocks": options.blocks,
        "warmup": options.warmup,
        "breakdown": workloads if options.breakdown else [],
        "overlap": True,
        "model_runner": options.model_runner,
        "prefill": prefill,
        "prefill_steps": tokens - num_new_tokens(timed, options.warmup, 0),
        "engine": engine_arguments(
            model,
            every,
            tokens,
            device_is_cpu=is_cpu,
            compile=options.compile,
            load_format=options.load_format,
            dtype=options.dtype,
            gpu_memory_utilization=None if is_cpu else options.gpu_memory_utilization,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            # At least half of a step's tokens are left for prompts while others decode.
            max_num_batched_tokens=max(PREFILL_TOKENS, 2 * max(b for b, _ in every)) if prefill else None,
            enforce_eager=options.enforce_eager or None,
        ),
    }
    jobs = {}
    if options.variant != "sparse":
        jobs[DENSE] = {**job, "schedule": None}
    if options.variant != "dense":
        jobs |= {name: {**job, "schedule": schedule.to_dict()} for name, schedule in options.schedules.items()}
    return BenchPlan(
        shape=shape,
        schedules=options.schedules,
        workloads=list(dict.fromkeys(workloads)),
        rollout_workloads=rollout_workloads,
        rollout_length=options.rollout_length,
        jobs=jobs,
    )


def _run_variant(
    variant: str,
    job: dict[str, Any],
    output: Path,
    report: Callable[[str], None],
    merge: Callable[[str, dict[str, Any]], None] | None = None,
    log_name: str | None = None,
) -> None:
    """Do a job of one variant in its own process, whose output goes to `<log name>.log`, and `merge` its results."""
    log_path = output / f"{log_name or variant}.log"
    tail = deque(maxlen=LOG_TAIL_LINES)
    with tempfile.TemporaryDirectory(prefix="sparrow-bench-") as folder:
        job_path, result_path = Path(folder) / "job.json", Path(folder) / "result.json"
        write_atomically(job_path, dump_json_object(job, "the job"))
        command = [sys.executable, "-m", f"{__package__}.bench_worker", str(job_path), str(result_path)]
        with open(log_path, "w") as log, _process(command) as worker:
            for line in worker.stdout:
                log.write(line)
                log.flush()
                tail.append(line)
                if line.startswith(PROGRESS):
                    report(f"{variant}: {line.removeprefix(PROGRESS).rstrip()}")
                    if merge and result_path.exists():
                        merge(variant, read_json_object(result_path, MAX_RESULT_BYTES))
    if worker.returncode:
        raise BenchError(
            f"The {variant} variant failed with exit status {worker.returncode}; its log is {log_path}. Its last "
            f"lines:\n{''.join(tail)}"
        )


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


def summarize(measured: dict[str, dict[str, Any]], plan: BenchPlan) -> dict[str, Any]:
    """
    What the raw results of the variants say, as far as they go.

    Args:
        measured (`dict[str, dict]`): Result of [`bench_worker`][sparrow_trl.bench_worker] by variant.
        plan ([`BenchPlan`]): What is measured.

    Returns:
        `dict[str, Any]`: `copy_bandwidth` (bytes per second), `workloads` and `rollout`. Each workload, and each of
        the rollout's points, has its `variants` by name.
    """
    bandwidth = max((result["copy_bandwidth"] for result in measured.values()), default=None)

    def summarize_all(workloads: list[tuple[int, int]]) -> list[dict[str, Any]]:
        summaries = []
        for batch, context in workloads:
            variants = {
                name: summarize_workload(raw, plan.shape, plan.schedules.get(name), bandwidth)
                for name, result in measured.items()
                for raw in result["workloads"]
                if (raw["batch"], raw["context"]) == (batch, context)
            }
            _compare(variants, "step_seconds")
            compare_attention(variants)
            if variants:
                summaries.append({"batch": batch, "context": context, "variants": variants})
        return summaries

    rollout = None
    if plan.rollout_workloads:
        points = summarize_all(plan.rollout_workloads)
        variants = {}
        for name in measured:
            rows = [point["variants"][name] for point in points if name in point["variants"]]
            if len(rows) == len(plan.rollout_workloads):
                lengths, seconds = [row["mean_length"] for row in rows], [row["step_seconds"] for row in rows]
                variants[name] = {"seconds": integrate_rollout(lengths, seconds, plan.rollout_length)}
        _compare(variants, "seconds")
        rollout = {
            "length": plan.rollout_length,
            "batch": plan.rollout_workloads[0][0],
            "points": points,
            "variants": variants,
        }
    return {"copy_bandwidth": bandwidth, "workloads": summarize_all(plan.workloads), "rollout": rollout}


def _compare(variants: dict[str, dict[str, Any]], seconds: str) -> None:
    """Add the `speedup` over the dense variant, by the time that `seconds` (`str`) names, to all others."""
    for name, variant in variants.items():
        if name != DENSE and DENSE in variants:
            variant["speedup"] = variants[DENSE][seconds] / variant[seconds]


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

    def traffic_of(lengths):
        first, last = lengths
        return step_traffic(shape, raw["batch"], range(first, last + 1), schedule)

    seconds = statistics.median(raw["step_seconds"])
    traffic = traffic_of(raw["lengths"])
    roofline = traffic.total / bandwidth
    summary = {
        "step_seconds": seconds,
        "step_seconds_spread": max(raw["step_seconds"]) - min(raw["step_seconds"]),
        "tokens_per_second": raw["batch"] / seconds,
        "mean_length": sum(raw["lengths"]) / 2,
        "bytes": {**asdict(traffic), "kv": traffic.kv, "total": traffic.total},
        "kv_bandwidth_over_step": traffic.kv / seconds,
        "roofline_seconds": roofline,
        "roofline_ratio": seconds / roofline,
    }
    # Kernels that overlap have no times of their own, so those of sparse variants come from an engine in which they
    # do not, with its own step times.
    separate = raw.get("separate", raw)
    if "profile" in separate:
        profile, seconds = separate["profile"], statistics.median(separate["step_seconds"])
        summary["breakdown"] = {
            "step_seconds": seconds,
            **group_kernels(profile["kernels"], seconds, traffic_of(profile["lengths"]), shape.num_layers),
        }
    return summary
