"""
Page selection for a decode step over a paged KV cache, in two Triton kernels: one scores the candidate pages from
their landmarks, one finds the best of them and lists what each kv head keeps. The reference is
[`select_pages`][sparrow_attention.select_pages].

Everything that varies from step to step (lengths, budgets, which rows keep all their pages) is read on the device, so
both may be captured in a CUDA graph and a changed schedule needs no new capture.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .launching import next_power_of_2, strides


__all__ = ["MAX_PAGES", "score_pages", "select_scored_pages"]

# Longest row that one program of the selection can hold in registers.
MAX_PAGES = 8192


def score_pages(
    query: torch.Tensor,
    landmarks: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budget: tuple[torch.Tensor, ...],
    scores: torch.Tensor,
    *,
    page_size: int,
    softmax: bool,
) -> None:
    """
    Score the candidate pages of every row that does not keep them all.

    Args:
        query (`torch.Tensor` of shape `[rows, q_heads, head_dim]`):
            Queries.
        landmarks (`torch.Tensor` of shape `[blocks, kv_heads, block_size / page_size, landmarks_per_page, head_dim]`):
            Landmarks of the cache's pages.
        block_table (`torch.Tensor` of shape `[rows, max_blocks]`):
            Cache blocks of each row.
        seq_lens (`torch.Tensor` of shape `[rows]`):
            Cached tokens; rows of length 0 are left out.
        budget (`tuple` of `torch.Tensor`):
            `top_k_table [n]`, candidates to keep by the number of pages; `reserved [2]`, sink and recent pages;
            `dense_until [rows]`, length up to which a row keeps all pages. All int32.
        scores (`torch.Tensor`):
            Written, float32: `[rows, kv_heads, 1, max_pages]` for scores by the mean query,
            `[rows, kv_heads, group, max_pages]` for the logits of each query head, from which the selection takes the
            softmax. What pages that are no candidates get has no meaning.
        page_size (`int`):
            Tokens in a page.
        softmax (`bool`):
            Whether to write logits of query heads.
    """
    rows, q_heads, head_dim = query.shape
    kv_heads, pages_per_block, landmarks_per_page = landmarks.shape[1:4]
    group = q_heads // kv_heads
    block = min(128, 2**14 // next_power_of_2(head_dim)) // landmarks_per_page
    # A program reads a block of pages for several heads, whose landmarks follow one another, but not for so many that
    # few rows leave the device idle.
    heads = math.gcd(kv_heads, 16)
    while heads > 1 and rows * kv_heads < 40 * heads:
        heads //= 2
    _score_pages_kernel[(triton.cdiv(scores.shape[-1], block), kv_heads // heads, rows)](
        query,
        landmarks,
        block_table,
        seq_lens,
        *budget,
        scores,
        *strides(query, 2),
        *strides(landmarks, 4),
        block_table.stride(0),
        *strides(scores, 3),
        budget[0].shape[0],
        head_dim**-0.5,
        PAGE=page_size,
        PAGES_PER_BLOCK=pages_per_block,
        RUNS=landmarks_per_page,
        HEADS=heads,
        GROUP=group,
        GROUP_PAD=max(16, next_power_of_2(group)),
        D=head_dim,
        D_PAD=next_power_of_2(head_dim),
        BLOCK=block,
        SOFTMAX=softmax,
        num_warps=4,
        num_stages=3,
    )


def select_scored_pages(
    scores: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budget: tuple[torch.Tensor, ...],
    kept: torch.Tensor,
    counts: torch.Tensor,
    totals: torch.Tensor,
    *,
    page_size: int,
    pages_per_block: int,
    softmax: bool,
) -> None:
    """
    List the pages that each kv head keeps: the best-scored candidates, ties to the lower index, and the reserved ones.

    Args:
        scores (`torch.Tensor` of shape `[rows, kv_heads, group or 1, max_pages]`):
            What [`score_pages`] wrote.
        block_table, seq_lens, budget:
            As in [`score_pages`].
        kept (`torch.Tensor` of shape `[rows, kv_heads, max_pages]`):
            Written, int32: kept pages in ascending order, numbered as in the cache (block times pages per block plus
            page in the block). Rows that keep all pages write no list: theirs is the block table.
        counts (`torch.Tensor` of shape `[rows, kv_heads]`):
            Written, int32: how many pages are kept.
        totals (`torch.Tensor` of shape `[2, rows, kv_heads]`):
            int64: kept and cached pages of rows longer than `dense_until` are added, for statistics.
        page_size (`int`):
            Tokens in a page.
        pages_per_block (`int`):
            Pages in a block of the cache.
        softmax (`bool`):
            Whether `scores` holds logits of query heads.
    """
    rows, kv_heads = counts.shape
    max_pages = scores.shape[-1]
    _select_pages_kernel[(kv_heads, rows)](
        scores,
        block_table,
        seq_lens,
        *budget,
        kept,
        counts,
        totals,
        *strides(scores, 3),
        block_table.stride(0),
        *strides(kept, 2),
        *strides(counts, 1),
        *totals.stride()[:2],
        budget[0].shape[0],
        PAGE=page_size,
        PAGES_PER_BLOCK=pages_per_block,
        QUERIES=scores.shape[2],
        SOFTMAX=softmax,
        MAX_PAGES=max(512, next_power_of_2(max_pages)),
        num_warps=2,
    )


@triton.jit
def _row_budget(row, seq_len_ptr, table_ptr, reserved_ptr, dense_until_ptr, table_len, PAGE: tl.constexpr):
    """Length, pages, candidates to keep, sink and recent pages of a row, and whether it keeps all pages."""
    seq_len = tl.load(seq_len_ptr + row)
    dense_until = tl.load(dense_until_ptr + row)
    sink = tl.load(reserved_ptr)
    recent = tl.load(reserved_ptr + 1)
    num_pages = (seq_len + PAGE - 1) // PAGE
    top_k = tl.load(table_ptr + tl.minimum(num_pages, table_len - 1))
    keep_all = (top_k >= num_pages - recent - sink) | (seq_len <= dense_until)
    return seq_len, dense_until, num_pages, top_k, sink, recent, keep_all


@triton.jit
def _score_pages_kernel(
    query_ptr,
    landmark_ptr,
    block_table_ptr,
    seq_len_ptr,
    table_ptr,
    reserved_ptr,
    dense_until_ptr,
    score_ptr,
    query_row,
    query_head,
    landmark_block,
    landmark_head,
    landmark_page,
    landmark_run,
    table_row,
    score_row,
    score_head,
    score_query,
    table_len,
    scale,
    PAGE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    row = tl.program_id(2)
    start = tl.program_id(0) * BLOCK
    seq_len, dense_until, num_pages, top_k, sink, recent, keep_all = _row_budget(
        row, seq_len_ptr, table_ptr, reserved_ptr, dense_until_ptr, table_len, PAGE
    )
    last = num_pages - recent
    if keep_all | (start >= last):
        return
    page = start + tl.arange(0, BLOCK)
    inside = page < last
    block = tl.load(block_table_ptr + row.to(tl.int64) * table_row + page // PAGES_PER_BLOCK, mask=inside, other=0)
    landmark = block.to(tl.int64) * landmark_block + page % PAGES_PER_BLOCK * landmark_page
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    for i in range(HEADS):
        head = tl.program_id(1) * HEADS + i
        q = tl.load(
            query_ptr + row.to(tl.int64) * query_row + (head * GROUP + g[:, None]) * query_head + d[None, :],
            mask=(g[:, None] < GROUP) & (d[None, :] < D),
            other=0.0,
        )
        # Halves hold what 8-bit landmarks hold, and convert in one instruction.
        HALVES: tl.constexpr = q.dtype == tl.bfloat16 and landmark_ptr.dtype.element_ty.primitive_bitwidth == 8
        dtype: tl.constexpr = tl.float16 if HALVES else q.dtype
        q = q.to(dtype)
        keys = landmark_ptr + landmark[:, None] + head * landmark_head + d[None, :]
        readable = inside[:, None] & (d[None, :] < D)
        logits = tl.dot(tl.load(keys, mask=readable, other=0.0).to(dtype), tl.trans(q), input_precision="ieee")
        out = score_ptr + row.to(tl.int64) * score_row + head * score_head + page
        if SOFTMAX:
            logits *= scale
            if RUNS > 1:
                highest = logits
                total = tl.full(logits.shape, 1.0, tl.float32)
                for run in tl.static_range(1, RUNS):
                    other = tl.load(keys + run * landmark_run, mask=readable, other=0.0).to(dtype)
                    logits = tl.dot(other, tl.trans(q), input_precision="ieee") * scale
                    higher = tl.maximum(highest, logits)
                    total = total * tl.exp(highest - higher) + tl.exp(logits - higher)
                    highest = higher
                logits = highest + tl.log(total)
            tl.store(
                out[:, None] + g[None, :] * score_query,
                logits,
                mask=inside[:, None] & (g[None, :] < GROUP),
            )
        else:
            # The sum over the group orders the pages as its mean does; padded heads add zeros.
            tl.store(out, tl.sum(logits, 1), mask=inside)


@triton.jit
def _to_key(score):
    """An integer that orders as the float does."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _to_score(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _selection_keys(score_ptr, page, candidate, score_query, QUERIES: tl.constexpr, SOFTMAX: tl.constexpr):
    """Scores as integers in the same order: NaN above all, so that a page with broken keys shows; -0.0 equals 0.0."""
    if SOFTMAX:
        score = tl.zeros(page.shape, tl.float32)
        for g in tl.static_range(QUERIES):
            logit = tl.load(score_ptr + g * score_query + page, mask=candidate, other=float("-inf"))
            real = logit == logit
            weight = tl.exp(logit - tl.max(tl.where(real, logit, float("-inf")), 0))
            score += weight / tl.sum(tl.where(real, weight, 0.0), 0)
    else:
        score = tl.load(score_ptr + page, mask=candidate, other=0.0)
    return tl.where(score == score, _to_key(tl.where(score == 0.0, 0.0, score)), 0x7FFFFFFF)


@triton.jit
def _list_best_pages(
    score_ptr,
    block_table_ptr,
    kept_ptr,
    num_pages,
    top_k,
    sink,
    recent,
    score_query,
    PAGES_PER_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    SOFTMAX: tl.constexpr,
    WIDTH: tl.constexpr,
):
    page = tl.arange(0, WIDTH)
    candidate = (page >= sink) & (page < num_pages - recent)
    key = _selection_keys(score_ptr, page, candidate, score_query, QUERIES, SOFTMAX)
    # Narrow down a threshold that exactly top_k keys reach or, among ties, the key of the last one kept: by the counts
    # at both ends, which takes a few steps for scores, with halvings in between, which end whatever the scores are.
    low = tl.min(tl.where(candidate, key, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(candidate, key, -0x7FFFFFFF - 1), 0)
    reach = num_pages - recent - sink  # keys from low on
    beyond = 0  # keys over high
    step = 0
    while (low < high) & (reach != top_k):
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        if (step < 32) & (step % 4 != 3):
            share = (top_k - beyond).to(tl.float32) / (reach - beyond).to(tl.float32)
            if SOFTMAX:  # shares are spread over orders of magnitude, as their keys are
                guess = high - ((high - low).to(tl.float32) * share).to(tl.int32)
            else:
                guess = _to_key(_to_score(high) * (1 - share) + _to_score(low) * share)
            middle = tl.minimum(tl.maximum(guess, low + 1), high)
        step += 1
        reach_middle = tl.sum((candidate & (key >= middle)).to(tl.int32), 0)
        if reach_middle >= top_k:
            low = middle
            reach = reach_middle
        else:
            high = middle - 1
            beyond = reach_middle
    kept = candidate & (key >= low)
    if reach > top_k:
        above = candidate & (key > low)
        tied = candidate & (key == low)
        room = top_k - tl.sum(above.to(tl.int32), 0)
        kept = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    kept = kept | ((page < num_pages) & (candidate == 0))
    slot = tl.cumsum(kept.to(tl.int32), 0) - 1
    block = tl.load(block_table_ptr + page // PAGES_PER_BLOCK, mask=kept, other=0)
    tl.store(kept_ptr + slot, block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK, mask=kept)


@triton.jit
def _select_pages_kernel(
    score_ptr,
    block_table_ptr,
    seq_len_ptr,
    table_ptr,
    reserved_ptr,
    dense_until_ptr,
    kept_ptr,
    count_ptr,
    total_ptr,
    score_row,
    score_head,
    score_query,
    table_row,
    kept_row,
    kept_head,
    count_row,
    total_kind,
    total_row,
    table_len,
    PAGE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    SOFTMAX: tl.constexpr,
    MAX_PAGES: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    seq_len, dense_until, num_pages, top_k, sink, recent, keep_all = _row_budget(
        row, seq_len_ptr, table_ptr, reserved_ptr, dense_until_ptr, table_len, PAGE
    )
    count = tl.where(keep_all, num_pages, top_k + sink + recent)
    tl.store(count_ptr + row * count_row + head, count)
    if seq_len > dense_until:
        # No other program writes these two: atomics only because nothing then waits for what was there.
        total = total_ptr + row * total_row + head
        tl.atomic_add(total, count.to(tl.int64), sem="relaxed")
        tl.atomic_add(total + total_kind, num_pages.to(tl.int64), sem="relaxed")
    if keep_all:
        return
    score_ptr += row.to(tl.int64) * score_row + head * score_head
    block_table_ptr += row.to(tl.int64) * table_row
    kept_ptr += row.to(tl.int64) * kept_row + head * kept_head
    # The work is sized by the row, not by the longest that may come.
    if (MAX_PAGES == 512) | (num_pages <= 512):
        _list_best_pages(score_ptr, block_table_ptr, kept_ptr, num_pages, top_k, sink, recent, score_query,
                         PAGES_PER_BLOCK, QUERIES, SOFTMAX, 512)  # fmt: skip
    elif (MAX_PAGES == 1024) | (num_pages <= 1024):
        if MAX_PAGES >= 1024:
            _list_best_pages(score_ptr, block_table_ptr, kept_ptr, num_pages, top_k, sink, recent, score_query,
                             PAGES_PER_BLOCK, QUERIES, SOFTMAX, 1024)  # fmt: skip
    elif (MAX_PAGES == 2048) | (num_pages <= 2048):
        if MAX_PAGES >= 2048:
            _list_best_pages(score_ptr, block_table_ptr, kept_ptr, num_pages, top_k, sink, recent, score_query,
                             PAGES_PER_BLOCK, QUERIES, SOFTMAX, 2048)  # fmt: skip
    elif (MAX_PAGES == 4096) | (num_pages <= 4096):
        if MAX_PAGES >= 4096:
            _list_best_pages(score_ptr, block_table_ptr, kept_ptr, num_pages, top_k, sink, recent, score_query,
                             PAGES_PER_BLOCK, QUERIES, SOFTMAX, 4096)  # fmt: skip
    else:
        if MAX_PAGES >= 8192:
            _list_best_pages(score_ptr, block_table_ptr, kept_ptr, num_pages, top_k, sink, recent, score_query,
                             PAGES_PER_BLOCK, QUERIES, SOFTMAX, 8192)  # fmt: skip
