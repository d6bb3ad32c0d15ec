"""What a benchmark verifies before it reports a time: the log-probs, the pages read, and that the batch ran whole."""

import math

from .bench_traffic import kept_fraction
from .schedule import SparsityScheduleConfig


class VerificationError(RuntimeError):
    """What was generated is not what was to be measured, so no time of it means anything."""


def check_logprobs(logprobs: list[float], request_id: str) -> None:
    """Refuse log-probs of sampled tokens that are not finite or are positive."""
    broken = [value for value in logprobs if not (math.isfinite(value) and value <= 1e-6)]
    if broken:
        raise VerificationError(
            f"Request {request_id} has the log-prob {broken[0]} at a sampled token. The attention kernel or the "
            "weights are broken, so nothing is reported."
        )


def check_kept_fraction(
    counters, schedule: SparsityScheduleConfig, num_layers: int, batch: int, context: int, num_passes: int
) -> float:
    """
    Refuse a share of pages read that is not the schedule's.

    Args:
        counters ([`vllm_backend.DecodeCounters`]): What was read by `batch` requests of `context` prompt tokens.
        schedule ([`SparsityScheduleConfig`]): The schedule in use.
        num_layers (`int`): Attention layers of the model.
        batch (`int`): Requests.
        context (`int`): Prompt tokens of each.
        num_passes (`int`): Fewest forward passes past the prompt. The engine may start one more than it needs.

    Returns:
        `float`: The share of the cached pages that was read.
    """
    passes, rest = divmod(counters.sparse_tokens, batch)
    if rest or not num_passes <= passes <= num_passes + 1:
        raise VerificationError(
            f"{counters.sparse_tokens} tokens attended sparsely, but {batch} requests made {num_passes} steps past "
            "their prompts. The sparse path does not see the steps it should, so nothing is reported."
        )
    expected = kept_fraction(schedule, num_layers, range(context + 1, context + 1 + passes))
    measured = counters.kept_fraction
    if measured is None or not math.isclose(measured, expected, rel_tol=1e-6):
        raise VerificationError(
            f"The layers read {measured} of the cached pages at {context} tokens, the schedule says {expected:.6f}. "
            "Nothing is reported."
        )
    return measured


def check_full_step(outputs: list, batch: int) -> None:
    """Refuse a step in which not each of the `batch` (`int`) requests got one token."""
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    if tokens != [1] * batch:
        raise VerificationError(
            f"A timed step gave {sum(tokens)} tokens to {len(tokens)} requests instead of one to each of {batch}: the "
            "batch does not run as a whole. Use a smaller batch or a shorter context."
        )
