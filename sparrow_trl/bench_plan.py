"""What a benchmark measures: model shapes, the batch that fits, the contexts of a rollout and its time from them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench_traffic import ModelShape, step_traffic
from .schedule import SparsityScheduleConfig


_QWEN3 = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}

# The models of the paper, to be measured with dummy weights: times do not depend on what the weights are.
MODEL_SHAPES = {
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
}

FIRST_CONTEXT = 256

# Activations, CUDA graphs and the allocator's slack of an engine, beside its weights and its KV cache.
ENGINE_RESERVE_BYTES = 4 * 2**30

# Tokens of a KV cache beside one longest sequence, for an engine that only starts: blocks that are never handed out.
SPARE_CACHE_TOKENS = 1024


def shape_config(name: str):
    """transformers configuration of the model shape `name` (`str`, a key of `MODEL_SHAPES`)."""
    from transformers import Qwen3Config

    return Qwen3Config(**_QWEN3, **MODEL_SHAPES[name], architectures=["Qwen3ForCausalLM"], dtype="bfloat16")


def load_config(model: str):
    """
    transformers configuration of a model shape, or of the model in a folder or on the Hub.

    Args:
        model (`str`): One of `MODEL_SHAPES`, a folder, or a Hub id.

    Raises:
        ValueError: when it is none of these.
    """
    from transformers import AutoConfig

    if model in MODEL_SHAPES:
        return shape_config(model)
    if "/" not in model and not Path(model).exists():
        raise ValueError(
            f"There is no model shape, folder or Hub id {model!r}. The shapes are {', '.join(MODEL_SHAPES)}."
        )
    return AutoConfig.from_pretrained(model)


def num_new_tokens(num_steps: int, warmup: int, prefill_steps: int) -> int:
    """
    Tokens that each request must be able to generate for all of them to be in every timed step.

    Args:
        num_steps (`int`): Timed steps.
        warmup (`int`): Steps of the whole batch before them.
        prefill_steps (`int`): Most steps until the last request has its first token.
    """
    return num_steps + warmup + prefill_steps + 1


def cache_bytes_per_token(shape: ModelShape, schedules: Sequence[SparsityScheduleConfig] = ()) -> float:
    """
    Bytes of a token's keys, values and landmarks in the variant that needs most.

    Args:
        shape ([`ModelShape`]): The model.
        schedules (`Sequence[SparsityScheduleConfig]`, *optional*): Schedules whose landmarks are stored.
    """
    landmarks = (shape.page_landmark_bytes(schedule) / schedule.page_size for schedule in schedules)
    return shape.kv_bytes_per_token + shape.num_layers * max(landmarks, default=0)


def largest_batch(
    shape: ModelShape, tokens: int, cache_bytes: float, schedules: Sequence[SparsityScheduleConfig] = ()
) -> int:
    """
    Sequences whose keys, values and landmarks fit beside one another in every variant.

    Args:
        shape ([`ModelShape`]): The model.
        tokens (`int`): Tokens of each sequence.
        cache_bytes (`float`): Memory for them.
        schedules (`Sequence[SparsityScheduleConfig]`, *optional*): Schedules whose landmarks are stored.
    """
    per_token = cache_bytes_per_token(shape, schedules)
    batch = int(cache_bytes / (tokens * per_token))
    if batch < 1:
        raise ValueError(
            f"Not one sequence of {tokens} tokens ({tokens * per_token / 2**30:.1f} GiB) fits in the "
            f"{max(cache_bytes, 0) / 2**30:.1f} GiB that are left for the KV cache. Use a shorter context or another "
            "model."
        )
    return batch


def rollout_contexts(
    shape: ModelShape, schedules: Sequence[SparsityScheduleConfig], max_length: int, window: int, points: int
) -> list[int]:
    """
    Contexts at which to time a rollout, so that straight lines between them follow what the schedules read.

    A point is added where the line of some schedule is furthest off, until there are enough. No point's window of
    steps crosses a change of a schedule's budget, so that each is a time of one budget.

    Args:
        shape ([`ModelShape`]): The model.
        schedules (`Sequence[SparsityScheduleConfig]`): The schedules, at least one.
        max_length (`int`): Length of the rollout, in tokens.
        window (`int`): Tokens that each measurement generates past its context.
        points (`int`): Number of contexts.
    """
    import numpy as np

    last = max_length - window
    if points < 2 or last <= FIRST_CONTEXT:
        raise ValueError(
            f"A rollout profile needs at least 2 points and a length above {FIRST_CONTEXT + window}, got {points} "
            f"points and {max_length} tokens."
        )
    step = math.lcm(*(schedule.page_size for schedule in schedules))
    grid = np.unique(np.append(np.arange(FIRST_CONTEXT, last, step), last))
    whole = np.ones(len(grid), dtype=bool)
    for schedule in schedules:
        first_pages, last_pages = -(-(grid + 1) // schedule.page_size), -(-(grid + window) // schedule.page_size)
        for layer in range(shape.num_layers):
            if not schedule.is_dense_layer(layer):
                table = schedule.to_table(max_length, layer).numpy()
                whole &= table[first_pages] == table[last_pages]
    whole[[0, -1]] = True
    grid = grid[whole]
    reads = np.array(
        [
            [step_traffic(shape, 1, [int(context) + window // 2], schedule).total for context in grid]
            for schedule in schedules
        ]
    )
    reads /= reads.max(axis=1, keepdims=True)
    chosen = [0, len(grid) - 1]
    while len(chosen) < min(points, len(grid)):
        lines = [np.interp(grid, grid[chosen], line[chosen]) for line in reads]
        error = np.abs(lines - reads).max(axis=0)
        worst = int(error.argmax())
        if error[worst] <= 1e-9:  # straight already: halve the widest gap
            gap = int(np.diff(chosen).argmax())
            worst = (chosen[gap] + chosen[gap + 1]) // 2
        chosen = sorted({*chosen, worst})
    return grid[chosen].tolist()


def integrate_rollout(lengths: list[float], step_seconds: list[float], max_length: int) -> float:
    """
    Time of a rollout in which each position from 1 to `max_length` costs one step.

    Args:
        lengths (`list[float]`): Cached lengths at which steps were timed, increasing.
        step_seconds (`list[float]`): Times of those steps. Between them they change linearly, outside not at all.
        max_length (`int`): Length of the rollout.
    """
    import numpy as np

    return float(np.interp(np.arange(1, max_length + 1), lengths, step_seconds).sum())


def parse_workload(text: str) -> tuple[int, int]:
    """Batch and context of a workload written as `64x16384`."""
    batch, _, context = text.lower().partition("x")
    try:
        workload = int(batch), int(context)
    except ValueError:
        workload = 0, 0
    if min(workload) < 1:
        raise ValueError(f"A workload is written BATCHxCONTEXT, such as 64x16384, got {text!r}.")
    return workload


def engine_arguments(
    model: str,
    workloads: list[tuple[int, int]],
    tokens: int,
    *,
    device_is_cpu: bool,
    compile: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """
    Keyword arguments of [`vllm.LLM`] that all variants share.

    Args:
        model (`str`): Folder or Hub id of the model.
        workloads (`list[tuple[int, int]]`): Batch and context of each workload.
        tokens (`int`): Tokens that each request generates at most.
        device_is_cpu (`bool`): Whether the engine runs on the CPU, which has no graphs.
        compile (`bool`, *optional*, defaults to `True`): Whether `torch.compile` compiles the model.
        **options: Further arguments; those that are `None` are left to vLLM.
    """
    batches = sorted({batch for batch, _ in workloads})
    longest = max(context for _, context in workloads) + tokens
    arguments = {
        "model": model,
        "max_model_len": longest,
        "max_num_seqs": batches[-1],
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        # What the measured steps need is compiled by those before them; vLLM's warm-up takes minutes for all else.
        "kernel_config": {"enable_jit_warmup": False},
    }
    if device_is_cpu or options.get("enforce_eager"):
        arguments["enforce_eager"] = True
    else:
        # Graphs of these sizes alone, for a quick start.
        arguments["compilation_config"] = {"cudagraph_capture_sizes": batches}
        if not compile:
            arguments["compilation_config"] |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    arguments.update({name: value for name, value in options.items() if value is not None})
    return arguments
