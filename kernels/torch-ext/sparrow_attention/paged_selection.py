"""
Page selection for a decode step over a paged KV cache, in one Triton kernel: for each row and kv head, programs score
the candidate pages from their landmarks, and the one that is done last finds the best of them and lists what is kept.
The reference is [`select_pages`][sparrow_attention.select_pages].

The same launch may write the rows' new keys and values into the cache, and the landmarks of pages that they complete:
their pages are among the recent ones, which are not scored, so neither waits for the other.

Everything that varies from step to step (lengths, budgets, which rows keep all their pages) is read on the device, so
the kernel may be captured in a CUDA graph and a changed schedule needs no new capture.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import READY_BITS, signal, strides
from .paged_landmarks import largest_landmark, write_landmarks


__all__ = ["MAX_PAGES", "choose_pages", "score_pages", "select_scored_pages"]

# Longest row that one program can hold the scores of in registers.
MAX_PAGES = 8192
# Programs of a launch: the pages of a row and head are split between as many as that takes, up to `MAX_SPLITS`.
PROGRAMS = 600
MAX_SPLITS = 8
# Rows times heads up to which one program reads 128 landmarks at a time.
LONG_READS_UNTIL = 256


def choose_pages(
    query: torch.Tensor,
    landmarks: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    budget: tuple[torch.Tensor, ...],
    scores: torch.Tensor,
    kept: torch.Tensor,
    counts: torch.Tensor,
    totals: torch.Tensor,
    *,
    page_size: int,
    softmax: bool,
    append: tuple[torch.Tensor, ...] | None = None,
    arrived: torch.Tensor | None = None,
    ready: torch.Tensor | None = None,
) -> None:
    """
    List the pages that each kv head keeps: the best-scored candidates, ties to the lower index, and the reserved ones.

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
            Scratch, float32: `[rows, kv_heads, 1, max_pages]` for scores by the mean query,
            `[rows, kv_heads, group, max_pages]` for the logits of each query head, from which the selection takes the
            softmax. What pages that are no candidates get has no meaning.
        kept (`torch.Tensor` of shape `[rows, kv_heads, max_pages]`):
            Written, int32: kept pages in ascending order, numbered as in the cache (block times pages per block plus
            page in the block). Rows that keep all pages write no list: theirs is the block table.
        counts (`torch.Tensor` of shape `[rows, kv_heads]`):
            Written, int32: how many pages are kept.
        totals (`torch.Tensor` of shape `[2, rows, kv_heads]`):
            int64: kept and cached pages of rows longer than `dense_until` are added, for statistics.
        page_size (`int`):
            Tokens in a page.
        softmax (`bool`):
            Whether `scores` holds logits of query heads.
        append (`tuple` of `torch.Tensor`, *optional*):
            What to write into the cache: `key` and `value`, both `[rows, kv_heads, head_dim]`; `key_cache` and
            `value_cache`, both `[blocks, kv_heads, block_size, head_dim]` and of the same strides;
            `slot_mapping [rows]`, as [`update_landmarks`][sparrow_attention.update_landmarks] takes it.
        arrived (`torch.Tensor` of shape `[rows, kv_heads]`, *optional*):
            int32 scratch, zero before and after. With it, several programs score the pages of a row and head.
        ready (`torch.Tensor` of shape `[rows, kv_heads]`, *optional*):
            int32, for launches that begin before this one has ended: once all that is written for a row and head can
            be read, its lowest bits have risen by [`num_ready`][sparrow_attention.paged_selection.num_ready], and
            those above by the number of kept pages.
    """
    lists = (kept, counts, totals)
    pages_per_block = landmarks.shape[2]
    _launch(
        query, landmarks, block_table, seq_lens, budget, scores, lists, page_size, pages_per_block, softmax, append,
        arrived, ready,
    )  # fmt: skip


def num_ready(append: tuple[torch.Tensor, ...] | None) -> int:
    """Signals that `ready` counts for each row and head: one of the list, one of what `append` has written."""
    return 1 if append is None else 2


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
    """The first half of [`choose_pages`], by itself: write the scores."""
    _launch(query, landmarks, block_table, seq_lens, budget, scores, None, page_size, landmarks.shape[2], softmax)


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
    """The second half of [`choose_pages`], by itself: list the pages that given scores keep."""
    lists = (kept, counts, totals)
    _launch(None, None, block_table, seq_lens, budget, scores, lists, page_size, pages_per_block, softmax)


def _launch(
    query, landmarks, block_table, seq_lens, budget, scores, lists, page_size, pages_per_block, softmax, append=None,
    arrived=None, ready=None,
):  # fmt: skip
    rows, kv_heads, queries, max_pages = scores.shape
    group, head_dim, landmarks_per_page = queries, 64, 1
    query_strides, landmark_strides, list_strides = (0, 0), (0,) * 4, (0,) * 4
    if query is not None:
        group, head_dim, landmarks_per_page = query.shape[1] // kv_heads, query.shape[2], landmarks.shape[3]
        query_strides, landmark_strides = strides(query, 2), strides(landmarks, 4)
    if lists is not None:
        kept, counts, totals = lists
        list_strides = (*strides(kept, 2), *totals.stride()[:2])
    append_strides = (0,) * 7
    if append is not None:
        key, value, key_cache, value_cache, slot_mapping = append
        append_strides = (*strides(key, 2), *strides(value, 2), *strides(key_cache, 3))
    head_dim_pad = triton.next_power_of_2(head_dim)
    splits = 1 if arrived is None else max(1, min(MAX_SPLITS, -(-PROGRAMS // (rows * kv_heads))))
    # Only launches that overlap name the option, which Triton's backends for other devices do not know.
    overlapping = {"launch_pdl": True} if ready is not None else {}
    # Rows one after the other, so that the first of them are listed while others are scored. What a part that does not
    # run would read or write is never touched.
    _choose_pages_kernel[(splits + (append is not None), kv_heads, rows)](
        scores if query is None else query,
        scores if query is None else landmarks,
        block_table,
        seq_lens,
        *budget,
        scores,
        *(lists or (scores, scores, scores)),
        *(append or (scores,) * 5),
        scores if arrived is None else arrived,
        scores if ready is None else ready,
        *query_strides,
        *landmark_strides,
        block_table.stride(0),
        *strides(scores, 3),
        *list_strides,
        *append_strides,
        budget[0].shape[0],
        head_dim**-0.5,
        splits,
        KV_HEADS=kv_heads,
        PAGE=page_size,
        PAGES_PER_BLOCK=pages_per_block,
        RUNS=landmarks_per_page,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        D=head_dim,
        D_PAD=head_dim_pad,
        # Few programs read more pages at a time; with many, those of short rows end sooner.
        BLOCK=min(
            128 if rows * kv_heads <= LONG_READS_UNTIL else 64, min(128, 2**14 // head_dim_pad) // landmarks_per_page
        ),
        SOFTMAX=softmax,
        MAX_PAGES=max(512, triton.next_power_of_2(max_pages)),
        SCORE=query is not None,
        SELECT=lists is not None,
        APPEND=append is not None,
        SPLIT=arrived is not None,
        SIGNAL=ready is not None,
        LARGEST=None if landmarks is None else largest_landmark(landmarks),
        num_warps=4,
        num_stages=3,
        **overlapping,
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
def _score_candidates(
    query_ptr,
    landmark_ptr,
    block_table_ptr,
    score_ptr,
    first,
    last,
    query_head,
    landmark_block,
    landmark_page,
    landmark_run,
    score_query,
    scale,
    PAGES_PER_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    """Write the scores of the pages from `first` on and before `last` of one row and head."""
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    q = tl.load(
        query_ptr + g[:, None] * query_head + d[None, :], mask=(g[:, None] < GROUP) & (d[None, :] < D), other=0.0
    )
    # Halves hold what 8-bit landmarks hold, and convert in one instruction.
    HALVES: tl.constexpr = q.dtype == tl.bfloat16 and landmark_ptr.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.float16 if HALVES else q.dtype
    q = tl.trans(q.to(dtype))
    for start in range(first, last, BLOCK):
        page = start + tl.arange(0, BLOCK)
        inside = page < last
        block = tl.load(block_table_ptr + page // PAGES_PER_BLOCK, mask=inside, other=0)
        landmark = block.to(tl.int64) * landmark_block + page % PAGES_PER_BLOCK * landmark_page
        keys = landmark_ptr + landmark[:, None] + d[None, :]
        readable = inside[:, None] & (d[None, :] < D)
        logits = tl.dot(tl.load(keys, mask=readable, other=0.0).to(dtype), q, input_precision="ieee")
        if SOFTMAX:
            logits *= scale
            if RUNS > 1:
                highest = logits
                total = tl.full(logits.shape, 1.0, tl.float32)
                for run in tl.static_range(1, RUNS):
                    other = tl.load(keys + run * landmark_run, mask=readable, other=0.0).to(dtype)
                    logits = tl.dot(other, q, input_precision="ieee") * scale
                    higher = tl.maximum(highest, logits)
                    total = total * tl.exp(highest - higher) + tl.exp(logits - higher)
                    highest = higher
                logits = highest + tl.log(total)
            out = score_ptr + page[:, None] + g[None, :] * score_query
            tl.store(out, logits, mask=inside[:, None] & (g[None, :] < GROUP))
        else:
            # The sum over the group orders the pages as its mean does; padded heads add zeros.
            tl.store(score_ptr + page, tl.sum(logits, 1), mask=inside)


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
    # Read early, needed late.
    block = tl.load(block_table_ptr + page // PAGES_PER_BLOCK, mask=page < num_pages, other=0)
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
    tl.store(kept_ptr + slot, block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK, mask=kept)


@triton.jit
def _append_token(
    new_key_ptr,
    new_value_ptr,
    key_ptr,
    value_ptr,
    slot_ptr,
    landmark_ptr,
    cache_block,
    cache_token,
    landmark_block,
    landmark_page,
    landmark_run,
    PAGE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write the key and value of one token and head into the cache, and the landmarks of the page they complete."""
    slot = tl.load(slot_ptr).to(tl.int64)
    if slot >= 0:
        BLOCK_SIZE: tl.constexpr = PAGE * PAGES_PER_BLOCK
        d = tl.arange(0, D_PAD)
        place = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_token + d
        tl.store(key_ptr + place, tl.load(new_key_ptr + d, mask=d < D), mask=d < D)
        tl.store(value_ptr + place, tl.load(new_value_ptr + d, mask=d < D), mask=d < D)
        if slot % PAGE == PAGE - 1:
            tl.debug_barrier()  # other threads read the key than wrote it
            write_landmarks(
                slot, key_ptr, landmark_ptr, cache_block, cache_token, landmark_block, landmark_page, landmark_run,
                BLOCK_SIZE, PAGE, RUNS, D, D_PAD, LARGEST,
            )  # fmt: skip


@triton.jit
def _choose_pages_kernel(
    query_ptr,
    landmark_ptr,
    block_table_ptr,
    seq_len_ptr,
    table_ptr,
    reserved_ptr,
    dense_until_ptr,
    score_ptr,
    kept_ptr,
    count_ptr,
    total_ptr,
    new_key_ptr,
    new_value_ptr,
    key_ptr,
    value_ptr,
    slot_ptr,
    arrived_ptr,
    ready_ptr,
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
    kept_row,
    kept_head,
    total_kind,
    total_row,
    new_key_row,
    new_key_head,
    new_value_row,
    new_value_head,
    cache_block,
    cache_head,
    cache_token,
    table_len,
    scale,
    splits,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SCORE: tl.constexpr,
    SELECT: tl.constexpr,
    APPEND: tl.constexpr,
    SPLIT: tl.constexpr,
    SIGNAL: tl.constexpr,
    LARGEST: tl.constexpr,
):
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    ready_ptr += row * KV_HEADS + head
    if SIGNAL:
        tl.extra.cuda.gdc_wait()  # for whatever writes the query
        tl.extra.cuda.gdc_launch_dependents()
    if APPEND:
        if split == splits:
            _append_token(
                new_key_ptr + row.to(tl.int64) * new_key_row + head * new_key_head,
                new_value_ptr + row.to(tl.int64) * new_value_row + head * new_value_head,
                key_ptr + head * cache_head, value_ptr + head * cache_head, slot_ptr + row,
                landmark_ptr + head * landmark_head, cache_block, cache_token, landmark_block, landmark_page,
                landmark_run, PAGE, PAGES_PER_BLOCK, RUNS, D, D_PAD, LARGEST,
            )  # fmt: skip
            if SIGNAL:
                signal(ready_ptr)
            return
    seq_len, dense_until, num_pages, top_k, sink, recent, keep_all = _row_budget(
        row, seq_len_ptr, table_ptr, reserved_ptr, dense_until_ptr, table_len, PAGE
    )
    count = tl.where(keep_all, num_pages, top_k + sink + recent)
    if SELECT:
        if split == 0:
            tl.store(count_ptr + row * KV_HEADS + head, count)
            if seq_len > dense_until:
                # No other program writes these two: atomics only because nothing then waits for what was there.
                total = total_ptr + row * total_row + head
                tl.atomic_add(total, count.to(tl.int64), sem="relaxed")
                tl.atomic_add(total + total_kind, num_pages.to(tl.int64), sem="relaxed")
            if SIGNAL and keep_all:
                signal(ready_ptr, 1 + (count << READY_BITS))
    if keep_all:
        return
    score_ptr += row.to(tl.int64) * score_row + head * score_head
    block_table_ptr += row.to(tl.int64) * table_row
    last = num_pages - recent
    size = tl.cdiv(tl.cdiv(last, BLOCK), splits) * BLOCK
    if split * size >= last:
        return
    if SCORE:
        _score_candidates(
            query_ptr + row.to(tl.int64) * query_row + head * GROUP * query_head, landmark_ptr + head * landmark_head,
            block_table_ptr, score_ptr, split * size, tl.minimum(split * size + size, last), query_head,
            landmark_block, landmark_page, landmark_run, score_query, scale, PAGES_PER_BLOCK, RUNS, GROUP, GROUP_PAD,
            D, D_PAD, BLOCK, SOFTMAX,
        )  # fmt: skip
    if SCORE and SELECT:
        # What each thread wrote is now read by others of the program, and perhaps of another one.
        tl.debug_barrier()
        if SPLIT:
            arrived_ptr += row * KV_HEADS + head
            others = tl.cdiv(last, size) - 1
            arrived = 0
            if others > 0:
                arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
            if arrived != others:
                return
            tl.store(arrived_ptr, 0)
    if SELECT:
        kept_ptr += row.to(tl.int64) * kept_row + head * kept_head
        QUERIES: tl.constexpr = GROUP if SOFTMAX else 1
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
        if SIGNAL:
            signal(ready_ptr, 1 + (count << READY_BITS))
