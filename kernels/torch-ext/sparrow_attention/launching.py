"""How the Triton kernels are launched."""

from __future__ import annotations

import torch


def strides(tensor: torch.Tensor, axes: int) -> tuple[int, ...]:
    """The strides of the first `axes` axes, in elements, of a tensor whose last axis must be contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"The last axis must be contiguous, got strides {tuple(tensor.stride())}.")
    return tuple(tensor.stride()[:axes])
