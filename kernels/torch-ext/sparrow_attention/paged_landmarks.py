"""
Landmarks of a paged KV cache, written by a Triton kernel as pages fill up. The reference is
[`page_landmarks`][sparrow_attention.page_landmarks].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import strides
from .validation import check_shape


__all__ = ["update_landmarks"]


def update_landmarks(key_cache: torch.Tensor, landmarks: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """
    Write the landmarks of every page whose last token is among `slot_mapping`.

    Call it after the keys are written. It works in place, allocates nothing and never waits for the device, so it may
    be captured in a CUDA graph.

    Args:
        key_cache (`torch.Tensor` of shape `[blocks, kv_heads, block_size, head_dim]`):
            Keys, after the rotary embedding. Any strides, as long as a token's key is contiguous.
        landmarks (`torch.Tensor` of shape `[blocks, kv_heads, block_size / page_size, landmarks_per_page, head_dim]`):
            Landmarks of the cache's pages, in the type of the keys or `torch.float8_e4m3fn`.
        slot_mapping (`torch.Tensor` of shape `[tokens]`):
            Slot (block times block size plus offset) that each token was written to; negative where it was not.

    Raises:
        ValueError: for shapes that do not fit.
    """
    check_shape("key_cache", key_cache, (None, None, None, None), "[blocks, kv_heads, block_size, head_dim]")
    blocks, kv_heads, block_size, head_dim = key_cache.shape
    layout = "[blocks, kv_heads, block_size / page_size, landmarks_per_page, head_dim]"
    check_shape("landmarks", landmarks, (blocks, kv_heads, None, None, head_dim), layout)
    check_shape("slot_mapping", slot_mapping, (None,), "[tokens]")
    pages_per_block, landmarks_per_page = landmarks.shape[2:4]
    tokens = slot_mapping.shape[0]
    if not tokens:
        return
    _update_landmarks_kernel[(tokens, kv_heads)](
        slot_mapping,
        key_cache,
        landmarks,
        *strides(key_cache, 3),
        *strides(landmarks, 4),
        BLOCK_SIZE=block_size,
        PAGE=block_size // pages_per_block,
        RUNS=landmarks_per_page,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        LARGEST=largest_landmark(landmarks),
        num_warps=1,
    )


def largest_landmark(landmarks: torch.Tensor) -> float | None:
    """What landmarks are clamped to: a cast to an 8-bit type must saturate as the reference does."""
    return torch.finfo(landmarks.dtype).max if landmarks.dtype.itemsize == 1 else None


@triton.jit
def _update_landmarks_kernel(
    slot_ptr,
    key_ptr,
    landmark_ptr,
    key_block,
    key_head,
    key_token,
    landmark_block,
    landmark_head,
    landmark_page,
    landmark_run,
    BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LARGEST: tl.constexpr,
):
    slot = tl.load(slot_ptr + tl.program_id(0)).to(tl.int64)
    if (slot >= 0) & (slot % PAGE == PAGE - 1):
        head = tl.program_id(1)
        write_landmarks(
            slot, key_ptr + head * key_head, landmark_ptr + head * landmark_head, key_block, key_token, landmark_block,
            landmark_page, landmark_run, BLOCK_SIZE, PAGE, RUNS, D, D_PAD, LARGEST,
        )  # fmt: skip


@triton.jit
def write_landmarks(
    slot,
    key_ptr,
    landmark_ptr,
    key_block,
    key_token,
    landmark_block,
    landmark_page,
    landmark_run,
    BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write the landmarks of the page of `slot` from its keys, for the kv head that the pointers are at."""
    RUN: tl.constexpr = PAGE // RUNS
    block = slot // BLOCK_SIZE
    page = slot % BLOCK_SIZE // PAGE
    run = tl.arange(0, RUNS)[:, None]
    d = tl.arange(0, D_PAD)[None, :]
    keys = key_ptr + block * key_block + page * PAGE * key_token
    total = tl.zeros((RUNS, D_PAD), tl.float32)
    # One after the other: the reference adds in this order, and two pages with equal keys must stay tied.
    for token in tl.static_range(RUN):
        total += tl.load(keys + (run * RUN + token) * key_token + d, mask=d < D, other=0.0).to(tl.float32)
    mean = total * (1.0 / RUN)
    if LARGEST is not None:
        mean = tl.minimum(mean, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        mean = tl.maximum(mean, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    target = landmark_ptr + block * landmark_block + page * landmark_page
    tl.store(target + run * landmark_run + d, mean.to(landmark_ptr.dtype.element_ty), mask=d < D)
