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


__all__ = ["can_overlap", "signal", "strides", "wait_for"]


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
def signal(counter_ptr):
    """Raise a counter by one: what all threads of this program have written can be read."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait_for(counter_ptr, count):
    """Wait until a counter has reached `count`, and read what was written before it was raised."""
    # Plain loads while it has not: each that acquires empties the cache of its multiprocessor, which others read from.
    reached = tl.load(counter_ptr, volatile=True)
    while reached < count:
        reached = tl.load(counter_ptr, volatile=True)
    # The loop uses the result: an acquire without use is dropped by the compiler, and the loads above order nothing.
    reached = tl.atomic_add(counter_ptr, 0, sem="acquire")
    while reached < count:
        reached = tl.atomic_add(counter_ptr, 0, sem="acquire")
