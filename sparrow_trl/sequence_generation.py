"""
Completions to measure acceptance rates on: samples of a model's own distribution, at temperature 1.

They come from vLLM where it is installed and has the model, and from transformers' `generate` otherwise. vLLM's engine
runs in a process of its own ([`EngineProcess`]), so that all of its memory is free again once that has ended.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import is_peft_model
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from .acceptance_sweep import (
    TokenSequence,
    causal_lm_of,
    evaluating,
    gather_objects,
    max_positions,
    process_rank,
    swapped_attribute,
)
from .bench_plan import cache_bytes_per_token, engine_arguments
from .bench_traffic import ModelShape
from .schedule import SparsityScheduleConfig
from .versions import check_version


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


GENERATORS = ("auto", "vllm", "transformers")

# Share of a GPU's memory for the engine: half, since the model that measures is there too.
GPU_MEMORY_UTILIZATION = 0.5

# Sequences that the engine completes at once.
MAX_CONCURRENT_SEQUENCES = 256
# The KV cache of an engine on a CPU, but for one sequence at least.
MAX_CPU_CACHE_BYTES = 4 * 2**30
# Tokens of prompts that it takes at once, where one is no longer.
MIN_CPU_STEP_TOKENS = 4096

LOG_TAIL_BYTES, LOG_TAIL_LINES = 8000, 12
SHUTDOWN_SECONDS = 10

# What `accelerate launch` tells its processes, which an engine would take for its own.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def generate_sequences(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[str] | list[list[dict[str, str]]],
    *,
    max_length: int,
    batch_size: int = 8,
    seed: int = 0,
    generator: Literal["auto", "vllm", "transformers"] = "auto",
    model_path: str | Path | None = None,
    vllm_gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    report: Callable[[str], None] | None = None,
) -> list[TokenSequence]:
    """
    Sample one completion per prompt from the dense model.

    Sampling is from the model's own distribution, at temperature 1: the generation settings that come with the model
    (top-k, top-p, penalties) are set aside. A completion whose first token is the last, about which there is nothing
    to measure, is left out with a warning. With `torch.distributed` initialized, the prompts are split over the
    processes, and every process gets all sequences.

    Args:
        model (`torch.nn.Module`):
            Causal language model of transformers, bare or wrapped (PEFT, DDP).
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.
        prompts (`list[str]` or `list[list[dict[str, str]]]`):
            Texts, or conversations for the tokenizer's chat template.
        max_length (`int`):
            Most tokens of a sequence, prompt included. A batch of transformers stops where its longest prompt reaches
            it.
        batch_size (`int`, *optional*, defaults to `8`):
            Prompts that transformers completes at once. vLLM sees to that itself.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling. The random state outside does not change. The two generators sample differently.
        generator (`str`, *optional*, defaults to `"auto"`):
            `"vllm"`, `"transformers"`, or `"auto"`: vLLM if it is installed for the model's device, has the model's
            architecture and starts, and transformers otherwise.
        model_path (`str` or `pathlib.Path`, *optional*):
            Folder or Hub id of the model, for vLLM, where its weights are those of `model`. By default the weights as
            they are now are written to a temporary folder.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.5`):
            Share of the GPU's memory for vLLM's engine while it generates, beside `model`.
        report (callable, *optional*):
            Called with a line of text that says which generator was chosen, and why.

    Returns:
        `list[TokenSequence]`: in the order of the prompts.

    Raises:
        ValueError: when there are no prompts, a prompt leaves no room for two tokens, no completion is long enough,
            or `generator` is unknown or cannot generate from this model.
        ImportError: for `"vllm"` without a supported version of it.
        RuntimeError: when vLLM's engine fails.
    """
    causal_lm = causal_lm_of(model)
    prompt_ids = tokenize_prompts(causal_lm, tokenizer, prompts, max_length)
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be positive, got {batch_size}.")
    chosen, reason = choose_generator(generator, model)
    completions = None
    if chosen == "vllm":
        try:
            engine = start_engine(causal_lm, model_path, prompt_ids, max_length, vllm_gpu_memory_utilization)
            failure = None
        except RuntimeError as error:
            engine, failure = None, str(error)
        # One process alone would wait for the others' completions, or split the prompts in another way.
        failures = [text for text in gather_objects(failure) if text is not None]
        with engine or contextlib.nullcontext():
            if not failures:
                _report(report, "vLLM completes the prompts.")
                stop = end_token_ids(causal_lm, tokenizer)
                completions = complete_on_engine(engine, prompt_ids, max_length, seed, stop, "Generating sequences")
        if failures and generator == "vllm":
            raise RuntimeError(failures[0])
        if failures:
            reason = f"vLLM's engine did not start.\n{failures[0]}"
    if completions is None:
        _report(report, f"transformers completes the prompts{f': {reason}' if reason else '.'}")
        completions = _complete_with_transformers(causal_lm, tokenizer, prompt_ids, max_length, batch_size, seed)
    return join_sequences(prompt_ids, completions)


def choose_generator(generator: str, model: nn.Module) -> tuple[Literal["vllm", "transformers"], str | None]:
    """
    Which of the two generates from `model` (`torch.nn.Module`).

    Args:
        generator (`str`):
            `"auto"`, `"vllm"` or `"transformers"`.
        model (`torch.nn.Module`):
            Causal language model of transformers, bare or wrapped.

    Returns:
        `tuple[str, str | None]`: `"vllm"` or `"transformers"`, and for `"auto"` what kept vLLM from being chosen.

    Raises:
        ValueError: for an unknown `generator`, and for `"vllm"` with a model that it cannot generate from.
        ImportError: for `"vllm"` without a supported version of it.
    """
    if generator not in GENERATORS:
        raise ValueError(f"`generator` must be one of {', '.join(GENERATORS)}, got {generator!r}.")
    if generator == "transformers":
        return generator, None
    try:
        check_version("vllm")
        obstacle = _obstacle(model)
    except ImportError as error:
        if generator == "vllm":
            raise
        return "transformers", str(error)
    if obstacle is None:
        return "vllm", None
    if generator == "vllm":
        raise ValueError(f"vLLM cannot generate from this model: {obstacle} Or use transformers as the generator.")
    return "transformers", obstacle


def _obstacle(model: nn.Module) -> str | None:
    """What keeps vLLM from generating from `model`, and what would help; `None` where nothing is known to."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    causal_lm = causal_lm_of(model)
    if is_peft_model(model):
        return "it has PEFT adapters, which the engine does not load. Merge them (`merge_and_unload`)."
    if getattr(causal_lm, "is_quantized", False):
        return "it is quantised, and the engine would compute with other weights. Load it without quantisation."
    if causal_lm.device.type != current_platform.device_type:
        return f"it is on {causal_lm.device}, but vLLM runs on {current_platform.device_type or 'no device here'}."
    allowed = (torch.float16, torch.bfloat16, *([torch.float32] if current_platform.is_cpu() else []))
    if causal_lm.dtype not in allowed:
        # vLLM's attention on GPUs has no kernel for float32.
        return f"it is in {causal_lm.dtype}. Load it in {' or '.join(map(str, allowed))}."
    if type(causal_lm).__name__ not in ModelRegistry.get_supported_archs():
        return f"vLLM has no {type(causal_lm).__name__}."
    return None


def tokenize_prompts(
    model: PreTrainedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[str] | list[list[dict[str, str]]],
    max_length: int,
) -> list[list[int]]:
    """
    Token ids of each prompt, as [`generate_sequences`] takes them, with room for two more tokens within `max_length`.

    Raises:
        ValueError: when there are no prompts, one is too long or empty, or the model has fewer positions.
    """
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise ValueError(f"`prompts` must be a list of at least one text or conversation, got {prompts!r:.200}.")
    prompt_ids = encode_prompts(tokenizer, prompts)
    limit = max_positions(model)
    if limit is not None and max_length > limit:
        raise ValueError(f"`max_length` is {max_length}, but the model has {limit} positions.")
    for index, ids in enumerate(prompt_ids):
        if not 1 <= len(ids) <= max_length - 2:
            raise ValueError(
                f"`prompts[{index}]` has {len(ids)} tokens; at least 1 is needed, and at most {max_length - 2} leave "
                f"room for two more within `max_length` ({max_length})."
            )
    return prompt_ids


def join_sequences(prompt_ids: list[list[int]], completions: dict[int, list[int]]) -> list[TokenSequence]:
    """
    Prompts and their completions, by the index of the prompt. Those of one token are left out with a warning.

    Raises:
        ValueError: when all have one token.
    """
    kept = [index for index in range(len(prompt_ids)) if len(completions[index]) > 1]
    if not kept:
        raise ValueError("The model ended every completion with its first token, so there is nothing to measure.")
    if len(kept) < len(prompt_ids):
        warnings.warn(
            f"{len(prompt_ids) - len(kept)} of {len(prompt_ids)} completions ended with their first token and are "
            "left out.",
            stacklevel=3,
        )
    return [TokenSequence(prompt_ids[index] + completions[index], len(prompt_ids[index])) for index in kept]


def end_token_ids(model: PreTrainedModel, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokens that end a sequence, as the model's generation settings or else its tokenizer name them."""
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    return [eos] if isinstance(eos, int) else sorted(eos or ())


# vLLM


class EngineProcess:
    """
    A vLLM engine in a process of its own, which ends with the context or with [`close`].

    Args:
        engine (`dict`):
            Keyword arguments of [`vllm.LLM`].
        schedule ([`SparsityScheduleConfig`], *optional*):
            Schedule to begin with, whose page structure stays. By default the engine attends as vLLM does.
        device (`torch.device`, *optional*):
            GPU that the engine shares.

    Raises:
        RuntimeError: when the engine does not start; the message ends with its last lines.
    """

    def __init__(
        self,
        engine: dict[str, Any],
        schedule: SparsityScheduleConfig | None = None,
        device: torch.device | None = None,
    ):
        self._log = tempfile.TemporaryFile()
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", f"{__package__}.generation_worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=_engine_environment(device),
            pass_fds=[theirs.fileno()],
        )
        # From now on the process alone has it, so that its end shows.
        theirs.close()
        try:
            self._send({"engine": engine, "schedule": None if schedule is None else schedule.to_dict()})
            self._receive()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def complete(
        self,
        prompt_ids: list[list[int]],
        seeds: list[int],
        max_length: int,
        stop_token_ids: list[int],
        schedule: SparsityScheduleConfig | None = None,
        sampling: dict[str, float] | None = None,
    ) -> Iterator[tuple[int, list[int]]]:
        """
        Sample a completion of each prompt.

        Args:
            prompt_ids (`list[list[int]]`):
                Token ids of the prompts.
            seeds (`list[int]`):
                Seed of each.
            max_length (`int`):
                Most tokens of a sequence, prompt included.
            stop_token_ids (`list[int]`):
                Tokens that end a completion, of which they are part.
            schedule ([`SparsityScheduleConfig`], *optional*):
                Schedule from now on, for an engine that began with one; by default it stays.
            sampling (`dict[str, float]`, *optional*):
                Fields of [`vllm.SamplingParams`]. By default the model's own distribution is sampled.

        Returns:
            Iterator over `tuple[int, list[int]]`: index and token ids of each completion, as they end.

        Raises:
            RuntimeError: when the engine fails; the message ends with its last lines.
        """
        self._send(
            {
                "prompts": prompt_ids,
                "seeds": seeds,
                "max_length": max_length,
                "stop_token_ids": stop_token_ids,
                "schedule": None if schedule is None else schedule.to_dict(),
                "sampling": sampling,
            }
        )
        for _ in prompt_ids:
            yield self._receive()

    def close(self) -> None:
        """End the process, and with it what it holds of the device's memory."""
        self._connection.close()
        try:
            # An engine that waits for prompts ends by itself. One at work may not notice.
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._receive()  # what it said before its end

    def _receive(self) -> Any:
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            kind, value = "failed", f"Its process ended with exit status {self._process.wait()}."
        if kind != "failed":
            return value
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        tail = "\n".join(self._log.read().decode(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:])
        raise RuntimeError(f"vLLM's engine failed. {value}" + (f"\nIts last lines:\n{tail}" if tail else ""))


def start_engine(
    model: PreTrainedModel,
    model_path: str | Path | None,
    prompt_ids: list[list[int]],
    max_length: int,
    gpu_memory_utilization: float,
    schedule: SparsityScheduleConfig | None = None,
) -> EngineProcess:
    """
    Start an engine for this process's share of the prompts.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model.
        model_path (`str` or `pathlib.Path`, *optional*):
            Folder or Hub id of its weights; by default they are written to a folder that goes away.
        prompt_ids (`list[list[int]]`):
            Token ids of all prompts.
        max_length (`int`):
            Most tokens of a sequence, prompt included.
        gpu_memory_utilization (`float`):
            Share of a GPU's memory for the engine.
        schedule ([`SparsityScheduleConfig`], *optional*):
            Schedule of sparse rollouts.

    Raises:
        RuntimeError: when the engine does not start.
    """
    on_cpu = model.device.type == "cpu"
    rank, num_processes = process_rank()
    batch = max(1, min(len(prompt_ids[rank::num_processes]), MAX_CONCURRENT_SEQUENCES))
    options: dict[str, Any] = {}
    if schedule is not None:
        # vLLM's CPU kernels read keys in groups of 32.
        options["block_size"] = max(schedule.page_size, 32 if on_cpu else 16)
    if on_cpu:
        shape = ModelShape.from_config(model.config.get_text_config(), model.dtype.itemsize)
        sequence_bytes = cache_bytes_per_token(shape) * (max_length + 256)  # whole blocks, and one spare
        options["kv_cache_memory_bytes"] = int(max(min(batch * sequence_bytes, MAX_CPU_CACHE_BYTES), sequence_bytes))
        # vLLM winds a request's seed back after each part of a prompt but the last, which fails on a CPU.
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_length, MIN_CPU_STEP_TOKENS)}
    else:
        options["gpu_memory_utilization"] = gpu_memory_utilization
    with contextlib.ExitStack() as stack:
        if model_path is None:
            model_path = stack.enter_context(tempfile.TemporaryDirectory(prefix="sparrow-model-"))
            model.save_pretrained(model_path)
        arguments = engine_arguments(
            str(model_path),
            [(batch, max_length)],
            0,
            device_is_cpu=on_cpu,
            # It starts in a fraction of the time, and decode steps are captured in graphs all the same.
            compile=False,
            dtype=str(model.dtype).removeprefix("torch."),
            generation_config="vllm",
            **options,
        )
        # The weights are in memory once it has started.
        return EngineProcess(arguments, schedule, model.device)


def complete_on_engine(
    engine: EngineProcess,
    prompt_ids: list[list[int]],
    max_length: int,
    seed: int,
    stop_token_ids: list[int],
    title: str,
    schedule: SparsityScheduleConfig | None = None,
    sampling: dict[str, float] | None = None,
) -> dict[int, list[int]]:
    """
    Completion of each prompt by its index, with the work split over the processes.

    Args:
        engine ([`EngineProcess`]):
            This process's engine.
        prompt_ids (`list[list[int]]`):
            Token ids of all prompts.
        max_length (`int`):
            Most tokens of a sequence, prompt included.
        seed (`int`):
            Each prompt has the seed `seed` plus its index, so that the split does not change what is sampled.
        stop_token_ids (`list[int]`):
            Tokens that end a completion.
        title (`str`):
            What the progress bar says.
        schedule ([`SparsityScheduleConfig`], *optional*):
            As in [`EngineProcess.complete`].
        sampling (`dict[str, float]`, *optional*):
            As in [`EngineProcess.complete`].
    """
    rank, num_processes = process_rank()
    own = range(rank, len(prompt_ids), num_processes)
    completions = {}
    with tqdm(total=len(own), desc=title, unit="seq", disable=None if rank == 0 else True) as progress:
        own_prompts, seeds = [prompt_ids[index] for index in own], [seed + index for index in own]
        for number, token_ids in engine.complete(own_prompts, seeds, max_length, stop_token_ids, schedule, sampling):
            completions[own[number]] = token_ids
            progress.update()
    for gathered in gather_objects(completions):
        completions.update(gathered)
    return completions


def _engine_environment(device: torch.device | None) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    if device is not None and device.type == "cuda":
        # The engine takes the first GPU that it sees.
        index = torch.cuda.current_device() if device.index is None else device.index
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index].strip() if visible else str(index)
    return environment


def _report(report: Callable[[str], None] | None, text: str) -> None:
    if report is not None:
        report(text)


# transformers


def _complete_with_transformers(
    model: PreTrainedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompt_ids: list[list[int]],
    max_length: int,
    batch_size: int,
    seed: int,
) -> dict[int, list[int]]:
    rank, num_processes = process_rank()
    # Prompts of like length together, since a batch has as much room as its longest prompt leaves.
    order = sorted(range(len(prompt_ids)), key=lambda index: len(prompt_ids[index]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    completions: dict[int, list[int]] = {}
    rng_devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(rng_devices), evaluating(model):
        for number in tqdm(
            range(rank, len(batches), num_processes),
            desc="Generating sequences",
            unit="batch",
            disable=None if rank == 0 else True,
        ):
            # Each batch its own seed: the split over processes does not change what is sampled.
            torch.manual_seed(seed + number)
            batch = batches[number]
            rows = _generate_batch(model, tokenizer, [prompt_ids[index] for index in batch], max_length)
            completions.update(zip(batch, rows, strict=True))
    for gathered in gather_objects(completions):
        completions.update(gathered)
    return completions


def _generate_batch(
    model: PreTrainedModel, tokenizer: "PreTrainedTokenizerBase", prompt_ids: list[list[int]], max_length: int
) -> list[list[int]]:
    """Completions of the prompts, each to its first end-of-sequence token."""
    eos_ids = end_token_ids(model, tokenizer)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = min(eos_ids, default=0)
    width = max(map(len, prompt_ids))
    padded = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompt_ids], device=model.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=model.device)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max_length - width,
        eos_token_id=eos_ids or None,
        pad_token_id=pad,
    )
    # `generate` fills what is not set from the model's own settings.
    with swapped_attribute(model, "generation_config", settings), torch.no_grad():
        output = model.generate(input_ids=padded, attention_mask=mask)
    completions = []
    for row in output[:, width:].tolist():
        end = next((index for index, token in enumerate(row) if token in eos_ids), len(row) - 1)
        completions.append(row[: end + 1])
    return completions


def encode_prompts(tokenizer: "PreTrainedTokenizerBase", prompts) -> list[list[int]]:
    """
    Token ids of prompts.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The tokenizer.
        prompts (`list[str]` or `list[list[dict[str, str]]]`): Texts, or conversations for its chat template.
    """
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    return [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        for prompt in prompts
    ]
