"""
Attention over the kept pages of a paged KV cache, in two Triton kernels: the pages of a row are split between
programs, whose partial results are then merged.

Few long rows and many short ones fill the device alike, because the number of splits follows the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import READY_BITS, signal, strides, wait_for


__all__ = ["attend_to_kept_pages", "num_splits"]

PROGRAMS = 1536
MAX_SPLITS = 64
# From this many programs on a large GPU cannot run all at once. Later splits are then made smaller, and run last, so
# that the device stays full to the end.
TAPER_FROM = 1024


def num_splits(rows: int, kv_heads: int) -> int:
    """Programs that the pages of a row and head are split between, a power of two."""
    return min(MAX_SPLITS, triton.next_power_of_2(-(-PROGRAMS // (rows * kv_heads))))


def attend_to_kept_pages(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
    *,
    page_size: int,
    scale: float,
    signals: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> None:
    """
    Softmax attention of every row over the tokens of the pages that its kv heads keep.

    Args:
        query (`torch.Tensor` of shape `[rows, q_heads, head_dim]`):
            Queries.
        key_cache, value_cache (`torch.Tensor` of shape `[blocks, kv_heads, block_size, head_dim]`):
            Keys and values, of the same strides.
        block_table (`torch.Tensor` of shape `[rows, max_blocks]`):
            Cache blocks of each row.
        seq_lens (`torch.Tensor` of shape `[rows]`):
            Cached tokens. Rows of length 0 give zeros.
        kept, counts:
            As [`choose_pages`][sparrow_attention.paged_selection.choose_pages] writes them.
        partial_output (`torch.Tensor`), partial_lse (`torch.Tensor`):
            float32 scratch of at least `rows * q_heads * num_splits` times `head_dim`, and times 1, elements.
        output (`torch.Tensor` of shape `[rows, q_heads, head_dim]`):
            Written.
        page_size (`int`):
            Tokens in a page.
        scale (`float`):
            Factor of the attention logits.
        signals (`tuple`, *optional*):
            `ready` and `done`, both int32 of shape `[rows, kv_heads]` and zero before and after a step, and how many
            signals the lowest bits of `ready` count for each row and head. With them, programs start while the launch
            before this one, of [`choose_pages`][sparrow_attention.paged_selection.choose_pages], still runs, and wait
            for their row and head alone; so do those that merge.
    """
    rows, q_heads, head_dim = query.shape
    kv_heads, block_size = key_cache.shape[1:3]
    splits = num_splits(rows, kv_heads)
    taper = rows * kv_heads * splits >= TAPER_FROM
    head_dim_pad = triton.next_power_of_2(head_dim)
    overlap = signals is not None
    ready, done, num_ready = signals or (counts, counts, 0)
    # Only launches that overlap name the option, which Triton's backends for other devices do not know.
    overlapping = {"launch_pdl": True} if overlap else {}
    _attend_kernel[(kv_heads, rows, splits)](
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        kept,
        counts,
        partial_output,
        partial_lse,
        ready,
        done,
        *strides(query, 2),
        *strides(key_cache, 3),
        block_table.stride(0),
        *strides(kept, 2),
        scale * 1.4426950408889634,  # for base-2 exponentials
        splits,
        num_ready,
        TAPER=taper,
        OVERLAP=overlap,
        KV_HEADS=kv_heads,
        GROUP=q_heads // kv_heads,
        GROUP_PAD=max(16, triton.next_power_of_2(q_heads // kv_heads)),
        PAGE=page_size,
        PAGES_PER_BLOCK=block_size // page_size,
        TOKENS=64,
        D=head_dim,
        D_PAD=head_dim_pad,
        num_warps=2,
        num_stages=2,
        **overlapping,
    )
    _merge_kernel[(q_heads, rows)](
        partial_output,
        partial_lse,
        output,
        ready,
        done,
        *strides(output, 2),
        splits,
        OVERLAP=overlap,
        KV_HEADS=kv_heads,
        GROUP=q_heads // kv_heads,
        SPLITS_PAD=splits,
        D=head_dim,
        D_PAD=head_dim_pad,
        num_warps=1 if splits <= 16 else 4,
        **overlapping,
    )


@triton.jit
def _split_range(count, split, splits, TAPER: tl.constexpr):
    """First page of a split, and the page after its last."""
    if TAPER:
        rest = splits - split
        begin = count - count * rest * rest // (splits * splits)
        end = count - count * (rest - 1) * (rest - 1) // (splits * splits)
    else:
        chunk = tl.maximum(tl.cdiv(count, splits), 4)  # below a few pages a split costs more than it saves
        begin = tl.minimum(split * chunk, count)
        end = tl.minimum(begin + chunk, count)
    return begin, end


@triton.jit(do_not_specialize=["splits", "num_ready"])
def _attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    block_table_ptr,
    seq_len_ptr,
    kept_ptr,
    count_ptr,
    output_ptr,
    lse_ptr,
    ready_ptr,
    done_ptr,
    query_row,
    query_head,
    cache_block,
    cache_head,
    cache_token,
    table_row,
    kept_row,
    kept_head,
    scale,
    splits,
    num_ready,
    TAPER: tl.constexpr,
    OVERLAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    LISTED: tl.constexpr = 32
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_len_ptr + row)
    done_ptr += row * KV_HEADS + head
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        count = wait_for(ready_ptr + row * KV_HEADS + head, num_ready, READY_BITS) >> READY_BITS
    else:
        count = tl.load(count_ptr + row * KV_HEADS + head)
    begin, end = _split_range(count, split, splits, TAPER)
    g = tl.arange(0, GROUP_PAD)
    # Partial results of a row lie together, [row, kv head, split, query of the group].
    part = ((row * KV_HEADS + head) * splits + split) * GROUP + g
    if begin == end:
        tl.store(lse_ptr + part, float("-inf"), mask=g < GROUP)
        if OVERLAP:
            signal(done_ptr)
        return
    num_pages = tl.cdiv(seq_len, PAGE)
    last_tokens = seq_len - (num_pages - 1) * PAGE
    block_table_ptr += row.to(tl.int64) * table_row
    kept_ptr += row.to(tl.int64) * kept_row + head * kept_head
    d = tl.arange(0, D_PAD)
    q = tl.load(
        query_ptr + row.to(tl.int64) * query_row + (head * GROUP + g[:, None]) * query_head + d[None, :],
        mask=(g[:, None] < GROUP) & (d[None, :] < D),
        other=0.0,
    )
    highest = tl.full((GROUP_PAD,), -1e30, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    t = tl.arange(0, TOKENS)
    listed = tl.arange(0, LISTED)
    for first in range(begin, end, LISTED):
        stop = tl.minimum(first + LISTED, end)
        # Page numbers are read ahead and kept in registers: a load of them inside the loop over keys would leave
        # Triton a single buffer for the keys.
        i = tl.minimum(first + listed, stop - 1)
        if count == num_pages:
            pages = tl.load(block_table_ptr + i // PAGES_PER_BLOCK) * PAGES_PER_BLOCK + i % PAGES_PER_BLOCK
        else:
            pages = tl.load(kept_ptr + i)
        for p in range(first, stop, TOKENS // PAGE):
            # What lies beyond the row is replaced by a token of it and masked: no address is invalid, and no
            # unwritten slot, which may hold NaN, is read.
            slot = tl.minimum(p + t // PAGE, stop - 1)
            readable = tl.where(slot == count - 1, last_tokens, PAGE)
            token = tl.minimum(t % PAGE, readable - 1)
            valid = (p + t // PAGE < stop) & (t % PAGE < readable)
            page = tl.gather(pages, slot - first, 0)
            offset = (page // PAGES_PER_BLOCK).to(tl.int64) * cache_block + head * cache_head
            offset += (page % PAGES_PER_BLOCK * PAGE + token) * cache_token
            if D == D_PAD:
                k = tl.load(key_ptr + offset[:, None] + d[None, :])
                v = tl.load(value_ptr + offset[:, None] + d[None, :])
            else:
                k = tl.load(key_ptr + offset[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
                v = tl.load(value_ptr + offset[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            logits = tl.where(valid[None, :], logits, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(logits, 1))
            decay = tl.exp2(highest - new_highest)
            weight = tl.exp2(logits - new_highest[:, None])
            total = total * decay + tl.sum(weight, 1)
            acc = acc * decay[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            highest = new_highest
    tl.store(
        output_ptr + part.to(tl.int64)[:, None] * D + d[None, :],
        acc / total[:, None],
        mask=(g[:, None] < GROUP) & (d[None, :] < D),
    )
    # A total of 0, of logits that are all -inf, shows as NaN, not as a split without pages.
    lse = tl.where(total > 0.0, highest + tl.log2(total), float("nan"))
    tl.store(lse_ptr + part, lse, mask=g < GROUP)
    if OVERLAP:
        signal(done_ptr)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    output_ptr,
    ready_ptr,
    done_ptr,
    output_row,
    output_head,
    splits,
    OVERLAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    item = row * KV_HEADS + head // GROUP
    if OVERLAP:
        wait_for(done_ptr + item, splits)
    s = tl.arange(0, SPLITS_PAD)
    d = tl.arange(0, D_PAD)
    part = (item * splits + s) * GROUP + head % GROUP
    lse = tl.load(lse_ptr + part)
    # Read whether a split had pages or not, so that this does not wait for what tells.
    partial = tl.load(partial_ptr + part.to(tl.int64)[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)
    used = lse != float("-inf")
    # A row without pages has no weights: it gives zeros.
    weight = tl.where(used, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    total = tl.sum(weight, 0)
    merged = tl.sum(tl.where(used[:, None], weight[:, None] * partial, 0.0), 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        output_ptr + row.to(tl.int64) * output_row + head * output_head + d,
        merged.to(output_ptr.dtype.element_ty),
        mask=d < D,
    )
    if OVERLAP:
        # Zero before and after a step: this launch may begin before the first one of the step has written anything,
        # and must not find what the step before has left. The last of the group's programs that have waited resets.
        if tl.atomic_add(done_ptr + item, 1, sem="relaxed") == splits + GROUP - 1:
            tl.store(done_ptr + item, 0)
            tl.store(ready_ptr + item, 0)
