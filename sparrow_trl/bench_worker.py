"""
One engine variant of `sparrow-trl bench`, measured in a process of its own: `python -m sparrow_trl.bench_worker JOB
RESULT`.

`JOB` is a JSON object: `schedule` (the fields of a sparsity schedule, or null for dense attention), `workloads` (pairs
of batch and context; without any, the engine only starts), `steps`, `blocks`, `warmup`, `breakdown` (those workloads
whose kernels are timed too), `overlap` (whether the launches of a sparse decode step may overlap), `prefill` (whether
prompts are computed, or the cache is filled with random keys and values), `prefill_steps` (most steps until the last
request has its first token), `model_runner` (`"v1"`, `"v2"` or null), and `engine` (keyword arguments of
[`vllm.LLM`]). `RESULT` is written anew after each workload, once that is measured and verified. Lines of the standard
output that begin with [`PROGRESS`] say what has been done.

One engine serves all workloads. Requests end by their own `max_tokens`, so the number of forward passes past each
prompt is known, and the pages that were read can be held against the schedule exactly.
"""

import gc
import itertools
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .bench_checks import VerificationError, check_full_step, check_kept_fraction, check_logprobs
from .bench_plan import num_new_tokens
from .json_files import dump_json_object, read_json_object, write_atomically
from .schedule import SparsityScheduleConfig
from .versions import check_version, installed_version


PROGRESS = "[bench] "

CHECK_TOKENS = 4
PROFILE_STEPS = 4


def progress(text: str) -> None:
    """Tell the parent process what is being done."""
    sys.stdout.write(f"{PROGRESS}{text}\n")
    sys.stdout.flush()


def measure_copy_bandwidth(device) -> float:
    """Bytes read and written per second by copies inside the memory of `device` (`torch.device`): the median of 20."""
    import torch

    cuda = device.type == "cuda"
    source = torch.zeros(2**31 if cuda else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(25):
        _synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    bandwidth = 2 * source.numel() / statistics.median(seconds[5:])
    del source, target
    if cuda:
        torch.cuda.empty_cache()
    return bandwidth


def _synchronize(device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


class VariantBench:
    """
    An engine and what is measured with it.

    Args:
        job (`dict`): As in the module's description.
        device (`torch.device`): Where the engine runs.
    """

    def __init__(self, job: dict[str, Any], device):
        from vllm import LLM

        from . import vllm_backend

        self.job, self.device = job, device
        self.schedule = self.state = None
        engine = dict(job["engine"])
        if not job["prefill"]:
            # Zero mean: keys with a common direction would make all pages' scores alike.
            engine["kv_transfer_config"] = {
                "kv_connector": "DecodeBenchConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.5},
            }
        if job["schedule"] is not None:
            from .vllm_plugin import register

            register()
            self.schedule = SparsityScheduleConfig.from_dict(job["schedule"])
            engine["additional_config"] = {vllm_backend.ADDITIONAL_CONFIG_KEY: job["schedule"]}
            if device.type == "cuda":
                engine["attention_backend"] = "CUSTOM"
            self.llm = LLM(**engine)
            (self.state,) = self.llm.collective_rpc(vllm_backend.attach_sparse_rollout)
        else:
            self.llm = LLM(**engine)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.config = self.engine.vllm_config
        self.num_layers = self.config.model_config.hf_text_config.num_hidden_layers
        self._num_requests = 0
        impls = {type(layer.impl) for layer in vllm_backend.attention_layers(self.config).values()}
        self.attention = sorted(f"{impl.__module__}.{impl.__qualname__}" for impl in impls)
        if self.schedule is None and not all(name.startswith("vllm.") for name in self.attention):
            raise VerificationError(
                f"The dense engine does not run vLLM's own attention but {', '.join(self.attention)}."
            )
        tokens = num_new_tokens(job["steps"] * job["blocks"], job["warmup"], job["prefill_steps"])
        for batch, context in job["workloads"]:
            self.check_capacity(batch, context + tokens)
        gc.collect()
        gc.freeze()

    def check_capacity(self, batch: int, tokens: int) -> None:
        """Refuse `batch` (`int`) requests of `tokens` (`int`) tokens that the KV cache does not hold."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        needed = batch * -(-tokens // self.config.cache_config.block_size)
        free = pool.get_num_free_blocks()
        if needed > free:
            raise ValueError(
                f"{batch} requests of {tokens} tokens need {needed} blocks of the KV cache, which has {free} of "
                f"{self.config.cache_config.block_size} tokens. Use a batch of at most "
                f"{free * batch // needed}, a shorter context, or a higher --gpu-memory-utilization."
            )

    def start(self, batch: int, context: int, max_tokens: int, logprobs: int | None = None) -> list:
        """Add `batch` requests of `context` prompt tokens, make their first step and return its outputs."""
        import torch
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.check_capacity(batch, context + max_tokens)
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
        )
        vocab_size = self.config.model_config.get_vocab_size()
        generator = torch.Generator().manual_seed(self._num_requests)
        prompts = torch.randint(vocab_size, (batch, context), generator=generator).tolist()
        for prompt in prompts:
            self.engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)
            self._num_requests += 1
        outputs = self.engine.step()
        if self.state is not None and not self.job["prefill"]:
            from . import vllm_cuda_backend

            # The fill writes keys past the layers, which would have kept the landmarks.
            self.llm.collective_rpc(vllm_cuda_backend.rebuild_landmarks)
        return outputs

    def finish(self) -> None:
        """Let all requests end, and check that they left nothing in the KV cache."""
        while self.engine.has_unfinished_requests():
            self.engine.step()
        while self.core.scheduler.has_requests() or self.core.batch_queue:
            self.engine.step()
        usage = self.core.scheduler.kv_cache_manager.usage
        if usage:
            raise VerificationError(f"{usage:.1%} of the KV cache is still in use after all requests have ended.")

    def verify(self, batch: int, context: int) -> dict[str, Any]:
        """Generate a few tokens, and check their log-probs and the pages read."""
        before = self.state.counters if self.state else None
        logprobs: dict[str, list[float]] = {}
        outputs = self.start(batch, context, CHECK_TOKENS, logprobs=0)
        while True:
            for output in outputs:
                completion = output.outputs[0]
                values = logprobs.setdefault(output.request_id, [])
                for token, position in zip(completion.token_ids, completion.logprobs or [], strict=True):
                    values.append(position[token].logprob)
            if not self.engine.has_unfinished_requests():
                break
            outputs = self.engine.step()
        self.finish()
        if len(logprobs) != batch or any(len(values) != CHECK_TOKENS for values in logprobs.values()):
            raise VerificationError(f"Not every one of {batch} requests got {CHECK_TOKENS} tokens with a log-prob.")
        for request_id, values in logprobs.items():
            check_logprobs(values, request_id)
        flat = [value for values in logprobs.values() for value in values]
        verified = {"logprobs": len(flat), "mean_logprob": statistics.fmean(flat)}
        if self.state:
            verified["kept_fraction"] = check_kept_fraction(
                self.state.counters.since(before), self.schedule, self.num_layers, batch, context, CHECK_TOKENS - 1
            )
        return verified

    def start_decoding(self, batch: int, context: int, num_steps: int) -> tuple[float, int]:
        """
        Bring `batch` requests to the point where `num_steps` more steps decode all of them.

        Returns:
            `tuple[float, int]`: Mean tokens generated so far, and the `max_tokens` of the requests.
        """
        max_tokens = num_new_tokens(num_steps, self.job["warmup"], self.job["prefill_steps"])
        generated: dict[str, int] = {}
        outputs = self.start(batch, context, max_tokens)
        warmup = self.job["warmup"]
        while True:
            for output in outputs:
                tokens = len(output.outputs[0].token_ids)
                generated[output.request_id] = generated.get(output.request_id, 0) + tokens
            if len(generated) == batch:
                if not warmup:
                    break
                warmup -= 1
            outputs = self.engine.step()
        return statistics.fmean(generated.values()), max_tokens

    def measure(self, batch: int, context: int) -> dict[str, Any]:
        """Step times of `batch` requests that begin with `context` cached tokens, in `blocks` blocks of `steps`."""
        verified = self.verify(batch, context)
        steps, blocks = self.job["steps"], self.job["blocks"]
        before = self.state.counters if self.state else None
        generated, max_tokens = self.start_decoding(batch, context, steps * blocks)
        # From the arrival of one step's tokens to the arrival of those of a later one, as in a rollout: an idle device
        # before or after a block would leave the host's work there uncovered. Steps overlap under asynchronous
        # scheduling, so only a whole block has a time of its own.
        outputs, arrivals = [], [time.perf_counter()]
        for _ in range(blocks):
            outputs += [self.engine.step() for _ in range(steps)]
            arrivals.append(time.perf_counter())
        seconds = [(end - start) / steps for start, end in itertools.pairwise(arrivals)]
        for step_outputs in outputs:
            check_full_step(step_outputs, batch)
        self.finish()
        if self.state:
            check_kept_fraction(
                self.state.counters.since(before), self.schedule, self.num_layers, batch, context, max_tokens - 1
            )
        return {
            "batch": batch,
            "context": context,
            "lengths": _lengths(context, generated, steps * blocks),
            "step_seconds": seconds,
            "verified": verified,
        }

    def profile(self, batch: int, context: int) -> dict[str, Any]:
        """Device time per step by kernel name: `{"microseconds": ..., "calls": ...}`, and the lengths of the steps."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        generated, _ = self.start_decoding(batch, context, PROFILE_STEPS)
        _synchronize(self.device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            outputs = [self.engine.step() for _ in range(PROFILE_STEPS)]
            _synchronize(self.device)
        for step_outputs in outputs:
            check_full_step(step_outputs, batch)
        self.finish()
        kernels: dict[str, dict[str, float]] = {}
        for event in profiler.events():
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                kernel = kernels.setdefault(event.name, {"microseconds": 0.0, "calls": 0.0})
                kernel["microseconds"] += event.time_range.elapsed_us() / PROFILE_STEPS
                kernel["calls"] += 1 / PROFILE_STEPS
        if not kernels:
            raise VerificationError("The profiler saw no kernel. Run without --breakdown.")
        return {"lengths": _lengths(context, generated, PROFILE_STEPS), "kernels": kernels}


def _lengths(context: int, generated: float, num_steps: int) -> list[int]:
    """First and last cached length of `num_steps` steps after `generated` tokens on average, the new key included."""
    first = context + round(generated) + 1
    return [first, first + num_steps - 1]


def measure_variant(job: dict[str, Any], save: Callable[[dict[str, Any]], None]) -> None:
    """
    Measure all workloads of a job.

    Args:
        job (`dict`): As in the module's description.
        save (callable): Called with the result so far after each workload.
    """
    # The engine's steps are driven and timed from this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if job["model_runner"] is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = {"v1": "0", "v2": "1"}[job["model_runner"]]
    if not job["overlap"]:
        os.environ["SPARROW_ATTENTION_OVERLAP"] = "0"
    check_version("vllm")
    import torch
    import transformers
    from vllm.platforms import current_platform

    device = torch.device("cuda" if current_platform.is_cuda() else "cpu")
    if job["workloads"]:
        progress("measuring the memory's bandwidth")
        bandwidth = measure_copy_bandwidth(device)
    progress("starting the engine")
    start = time.perf_counter()
    bench = VariantBench(job, device)
    engine_seconds = time.perf_counter() - start
    progress(f"the engine has started in {engine_seconds:.0f} s")
    if not job["workloads"]:
        return
    pool = bench.core.scheduler.kv_cache_manager.block_pool
    result = {
        "attention": bench.attention,
        "job": job,
        "copy_bandwidth": bandwidth,
        "engine_start_seconds": engine_seconds,
        "kv_cache_tokens": pool.get_num_free_blocks() * bench.config.cache_config.block_size,
        "block_size": bench.config.cache_config.block_size,
        "max_model_len": bench.config.model_config.max_model_len,
        "async_scheduling": bool(bench.config.scheduler_config.async_scheduling),
        "model_runner": "v2" if bench.config.use_v2_model_runner else "v1",
        "cudagraph_mode": str(bench.config.compilation_config.cudagraph_mode),
        "device": current_platform.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {
            "torch": torch.__version__,
            "triton": _triton_version(),
            "vllm": installed_version("vllm"),
            "transformers": transformers.__version__,
        },
        "workloads": [],
    }
    for index, (batch, context) in enumerate(job["workloads"]):
        start = time.perf_counter()
        workload = bench.measure(batch, context)
        workload["measured_in_seconds"] = time.perf_counter() - start
        result["workloads"].append(workload)
        save(result)
        progress(
            f"{batch} x {context}: {1e3 * statistics.median(workload['step_seconds']):.2f} ms a step "
            f"({index + 1} of {len(job['workloads'])}, {workload['measured_in_seconds']:.1f} s)"
        )
    # Last: a profiler that has run once may slow the steps that are timed after it.
    for workload in result["workloads"]:
        if [workload["batch"], workload["context"]] in job["breakdown"]:
            workload["profile"] = bench.profile(workload["batch"], workload["context"])
            save(result)
            progress(f"{workload['batch']} x {workload['context']}: kernels timed")


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return getattr(triton, "__version__", None)


def main(job_path: str, result_path: str) -> None:
    """Measure the job in the file `job_path` (`str`) and write the result to `result_path` (`str`)."""

    def save(result: dict[str, Any]) -> None:
        write_atomically(Path(result_path), dump_json_object(result, "the benchmark's result"))

    try:
        measure_variant(read_json_object(Path(job_path)), save)
    except Exception:
        traceback.print_exc()
        # At once: what libraries write when the interpreter ends would hide the error, which the parent quotes.
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
