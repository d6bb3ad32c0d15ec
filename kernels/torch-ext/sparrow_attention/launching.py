"""How the Triton kernels are launched."""

from __future__ import annotations

import torch


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def strides(tensor: torch.Tensor, axes: int) -> tuple[int, ...]:
    """The strides of the first `axes` axes, in elements, of a tensor whose last axis must be contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"The last axis must be contiguous, got strides {tuple(tensor.stride())}.")
    return tuple(tensor.stride()[:axes])


def launch(kernel, grid, *args, **kwargs) -> None:
    """
    Launch a kernel that begins with `if PDL: gdc_wait()`.

    On Hopper and later the launch overlaps with the end of the kernel before it (programmatic dependent launch), which
    saves about a microsecond for each of the small kernels of a decode step.
    """
    device = next(arg for arg in args if isinstance(arg, torch.Tensor)).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        kernel[grid](*args, PDL=True, launch_pdl=True, **kwargs)
    else:
        kernel[grid](*args, PDL=False, **kwargs)
