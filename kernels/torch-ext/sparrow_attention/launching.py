"""
How the Triton kernels are launched, and how those of a step overlap.

From Hopper on, a launch may begin once all programs of the one before it have begun (programmatic dependent launch).
Its programs wait for what they read, row by row, and so keep the memory busy while others have only latencies to wait
for. No program waits for one that has not begun, so waiting ends. Set `SPARROW_ATTENTION_OVERLAP=0` to launch one
after the other, for instance to time kernels by themselves.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl


__all__ = ["READY_BITS", "can_overlap", "signal", "strides", "wait_for"]

# The lowest bits of the counter `ready` count signals. Those above are the number of pages that are kept, so that
# programs which have waited need not read it from elsewhere.
READY_BITS = tl.constexpr(2)


def strides(tensor: torch.Tensor, axes: int) -> tuple[int, ...]:
    """The strides of the first `axes` axes, in elements, of a tensor whose last axis must be contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"The last axis must be contiguous, got strides {tuple(tensor.stride())}.")
    return tuple(tensor.stride()[:axes])


def can_overlap(device: torch.device) -> bool:
    """Whether launches on `device` may begin before the one before them has ended."""
    if device.type != "cuda" or torch.version.hip or os.environ.get("SPARROW_ATTENTION_OVERLAP") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def signal(counter_ptr, amount=1):
    """Raise a counter: what all threads of this program have written can be read."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, amount, sem="release")


@triton.jit
def wait_for(counter_ptr, count, BITS: tl.constexpr = 31):
    """
    Wait until the lowest `BITS` bits of a counter have reached `count`, to read what was written before it was raised,
    and return the counter.
    """
    MASK: tl.constexpr = (1 << BITS) - 1
    # The loop uses what it acquires: the compiler drops an acquire without use, and plain loads order nothing.
    reached = tl.atomic_add(counter_ptr, 0, sem="acquire")
    while (reached & MASK) < count:
        reached = tl.atomic_add(counter_ptr, 0, sem="acquire")
    return reached
