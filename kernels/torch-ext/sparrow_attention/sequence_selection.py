"""
Page selection for every token of whole sequences, in Triton kernels: the pages that a token's kv head keeps are bits
of a mask. The reference is [`sparse_attention`][sparrow_attention.sparse_attention] in plain torch.

Positions and pages count from a row's first real token. Scores are written for a chunk of queries at a time, of all
rows and heads, into a scratch buffer of bounded size; what stays is one bit per token, kv head and page. Nothing is
read back to the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import strides
from .paged_landmarks import largest_landmark, write_landmarks
from .paged_selection import _selection_keys, _to_key, _to_score


__all__ = ["keep_pages_of_sequences", "landmarks_of_sequences", "real_tokens"]

# Bytes of scores written at a time.
SCRATCH_BYTES = 2**28
# Queries and pages of a tile of scores.
SCORE_QUERIES = 128
SCORE_PAGES = 128
# Scores of a warp that looks for the best of them. Rows of more pages take several warps, and several rows of fewer
# pages share one.
SCORES_PER_WARP = 512


def real_tokens(
    tokens: int, starts: torch.Tensor | None, lengths: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`starts` and `lengths`, int32, where both may be left out; `like`, a tensor of shape `[batch]`, has the rows."""
    starts = torch.zeros_like(like) if starts is None else starts
    lengths = tokens - starts if lengths is None else torch.minimum(lengths, tokens - starts)
    return starts.int(), lengths.clamp(min=0).int()


def landmarks_of_sequences(
    key: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page_size: int,
    landmarks_per_page: int = 1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """
    Landmarks `[batch, kv_heads, pages, landmarks_per_page, head_dim]` of the full pages of `key [batch, kv_heads,
    tokens, head_dim]`; those of other pages are not written. `dtype` is as in [`page_landmarks`].
    """
    batch, kv_heads, tokens, head_dim = key.shape
    pages = -(-tokens // page_size)
    landmarks = key.new_empty((batch, kv_heads, pages, landmarks_per_page, head_dim), dtype=dtype or key.dtype)
    _sequence_landmarks_kernel[(pages, kv_heads, batch)](
        key,
        landmarks,
        starts,
        lengths,
        *strides(key, 3),
        *strides(landmarks, 4),
        PAGE=page_size,
        RUNS=landmarks_per_page,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        LARGEST=largest_landmark(landmarks),
        num_warps=1,
    )
    return landmarks


def keep_pages_of_sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    prompt_lengths: torch.Tensor,
    top_k_table: torch.Tensor,
    page_size: int,
    page_score: str,
    landmarks_per_page: int,
    sink_pages: int,
    recent_pages: int,
    landmark_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """
    The pages that each token's kv head keeps: the best-scored candidates, ties to the lower index, and the reserved
    ones.

    Args:
        query (`torch.Tensor` of shape `[batch, q_heads, tokens, head_dim]`):
            Queries.
        key (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`):
            Keys. What padding holds, NaN included, is not read.
        starts, lengths (`torch.Tensor` of shape `[batch]`):
            As [`real_tokens`][sparrow_attention.sequence_selection.real_tokens] returns them.
        prompt_lengths, top_k_table, page_size, page_score, landmarks_per_page, sink_pages, recent_pages,
        landmark_dtype:
            As in [`sparse_attention`][sparrow_attention.sparse_attention].

    Returns:
        `torch.Tensor` of shape `[batch, kv_heads, tokens, ceil(pages / 32)]`, int32: bit `page % 32` of word
        `page // 32` for the token at that position of its row. Positions beyond the row's length keep nothing.
    """
    batch, q_heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    pages = -(-tokens // page_size)
    mask = torch.zeros((batch, kv_heads, tokens, -(-pages // 32)), dtype=torch.int32, device=query.device)
    if not mask.numel():
        return mask
    landmarks = landmarks_of_sequences(
        key, starts, lengths, page_size=page_size, landmarks_per_page=landmarks_per_page, dtype=landmark_dtype
    )
    # A type that holds both exactly; that of the queries holds all that 8 bits do.
    eight_bits = landmarks.dtype.itemsize == 1
    landmarks = landmarks.to(query.dtype if eight_bits else torch.promote_types(query.dtype, landmarks.dtype))
    softmax = page_score == "group_softmax"
    chunk = SCRATCH_BYTES // (4 * batch * kv_heads * pages) // SCORE_QUERIES * SCORE_QUERIES
    chunk = min(max(chunk, SCORE_QUERIES), tokens)
    # Rows of a multiple of 32, which are aligned.
    scores = torch.empty((batch * kv_heads, chunk, 32 * mask.shape[-1]), dtype=torch.float32, device=query.device)
    lse = torch.empty((batch * q_heads if softmax else 0, chunk), dtype=torch.float32, device=query.device)
    prompt_lengths = prompt_lengths.clamp(max=tokens).int()
    budget = (lengths, prompt_lengths, top_k_table, top_k_table.shape[0], sink_pages, recent_pages)
    place = (query, landmarks, scores, lse, starts, *budget, *strides(query, 3), *strides(landmarks, 4))
    shape = dict(KV_HEADS=kv_heads, GROUP=q_heads // kv_heads, PAGE=page_size, RUNS=landmarks_per_page)
    shape |= dict(D=head_dim, D_PAD=max(16, triton.next_power_of_2(head_dim)))
    # Tiles of float32, or of long vectors, take the room of several.
    narrow = landmarks.element_size() // 2 * (2 if head_dim > 128 else 1)
    block_p = SCORE_PAGES // narrow // landmarks_per_page
    shape |= dict(BLOCK_Q=SCORE_QUERIES // narrow, BLOCK_P=max(16, block_p), num_warps=8)
    for first in range(0, tokens, chunk):
        last = min(first + chunk, tokens)
        chunk_pages = -(-last // page_size)
        query_tiles = triton.cdiv(last - first, shape["BLOCK_Q"])
        arguments = (*place, scores.stride(0), scores.stride(1), head_dim**-0.5 * 1.4426950408889634, first, last)
        if softmax:
            _candidate_lse_kernel[(query_tiles, batch * q_heads)](*arguments, **shape)
        grid = (triton.cdiv(chunk_pages, shape["BLOCK_P"]), query_tiles, batch * kv_heads)
        _score_sequences_kernel[grid](*arguments, SOFTMAX=softmax, **shape)
        keep_best_pages(scores, mask, *budget, first=first, last=last, page_size=page_size, softmax=softmax)
    return mask


def keep_best_pages(
    scores: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    prompt_lengths: torch.Tensor,
    top_k_table: torch.Tensor,
    table_len: int,
    sink_pages: int,
    recent_pages: int,
    *,
    first: int,
    last: int,
    page_size: int,
    softmax: bool,
) -> None:
    """
    The second half of [`keep_pages_of_sequences`], by itself: mark what `scores [batch * kv_heads, chunk, pages]` of
    the tokens from `first` on and before `last` keep.
    """
    width = max(32, triton.next_power_of_2(-(-last // page_size)))
    rows = max(1, SCORES_PER_WARP // width)
    _keep_best_kernel[(triton.cdiv(last - first, rows), scores.shape[0])](
        scores,
        mask,
        lengths,
        prompt_lengths,
        top_k_table,
        table_len,
        sink_pages,
        recent_pages,
        *strides(scores, 2),
        *mask.stride()[1:3],
        first,
        last,
        KV_HEADS=mask.shape[1],
        PAGE=page_size,
        SPREAD=softmax,
        ROWS=rows,
        WIDTH=width,
        num_warps=max(1, width // SCORES_PER_WARP),
    )


@triton.jit
def _sequence_landmarks_kernel(
    key_ptr,
    landmark_ptr,
    start_ptr,
    length_ptr,
    key_row,
    key_head,
    key_token,
    landmark_row,
    landmark_head,
    landmark_page,
    landmark_run,
    PAGE: tl.constexpr,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LARGEST: tl.constexpr,
):
    page = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int64)
    if (page + 1) * PAGE <= tl.load(length_ptr + row):
        # A sequence is a cache whose blocks are its pages.
        write_landmarks(
            page.to(tl.int64) * PAGE + PAGE - 1, key_ptr + row * key_row + head * key_head + start * key_token,
            landmark_ptr + row * landmark_row + head * landmark_head, PAGE * key_token, key_token, landmark_page, 0,
            landmark_run, PAGE, PAGE, RUNS, D, D_PAD, LARGEST,
        )  # fmt: skip


@triton.jit
def _query_budget(
    position, row, length_ptr, prompt_ptr, table_ptr, table_len, sink, recent, first, last, PAGE: tl.constexpr
):
    """Of each query: whether it is real, its pages, the candidates that it keeps, and whether it chooses any."""
    real = position < tl.minimum(tl.load(length_ptr + row), last)
    num_pages = position // PAGE + 1
    top_k = tl.load(table_ptr + tl.minimum(num_pages, table_len - 1))
    top_k = tl.minimum(top_k, 1 << 30).to(tl.int32)
    keeps_all = (top_k >= num_pages - recent - sink) | (position < tl.load(prompt_ptr + row))
    return real, num_pages, top_k, real & (keeps_all == 0)


@triton.jit(do_not_specialize=["table_len", "sink", "recent", "first", "last"])
def _candidate_lse_kernel(
    query_ptr,
    landmark_ptr,
    score_ptr,
    lse_ptr,
    start_ptr,
    length_ptr,
    prompt_ptr,
    table_ptr,
    table_len,
    sink,
    recent,
    query_row,
    query_head,
    query_token,
    landmark_row,
    landmark_head,
    landmark_page,
    landmark_run,
    score_head,
    score_query,
    scale,
    first,
    last,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Log-sum-exp, to base 2, of a query head's logits of all candidates."""
    row = (tl.program_id(1) // (KV_HEADS * GROUP)).to(tl.int64)
    head = tl.program_id(1) % (KV_HEADS * GROUP)
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    position = first + i
    real, num_pages, top_k, chooses = _query_budget(
        position, row, length_ptr, prompt_ptr, table_ptr, table_len, sink, recent, first, last, PAGE
    )
    stop = tl.max(tl.where(chooses, num_pages - recent, 0), 0)
    if stop == 0:
        return
    d = tl.arange(0, D_PAD)
    token = (tl.load(start_ptr + row) + position).to(tl.int64)
    query = query_ptr + row * query_row + head * query_head + token[:, None] * query_token + d[None, :]
    q = tl.load(query, mask=chooses[:, None] & (d[None, :] < D), other=0.0).to(landmark_ptr.dtype.element_ty)
    landmark_ptr += row * landmark_row + (head // GROUP) * landmark_head
    highest = tl.full((BLOCK_Q,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    for begin in range(sink // BLOCK_P * BLOCK_P, stop, BLOCK_P):
        page = begin + tl.arange(0, BLOCK_P)
        candidate = (page >= sink)[None, :] & (page[None, :] < (num_pages - recent)[:, None])
        for run in tl.static_range(RUNS):
            landmark = landmark_ptr + run * landmark_run + page[:, None].to(tl.int64) * landmark_page + d[None, :]
            keys = tl.load(landmark, mask=(page < stop)[:, None] & (d[None, :] < D), other=0.0)
            logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            # A broken page counts for itself alone.
            logits = tl.where(candidate & (logits == logits), logits, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(logits, 1))
            total = total * tl.exp2(highest - new_highest) + tl.sum(tl.exp2(logits - new_highest[:, None]), 1)
            highest = new_highest
    lse = highest + tl.log2(total)
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * (score_head // score_query) + i, lse, mask=real)


@triton.jit(do_not_specialize=["table_len", "sink", "recent", "first", "last"])
def _score_sequences_kernel(
    query_ptr,
    landmark_ptr,
    score_ptr,
    lse_ptr,
    start_ptr,
    length_ptr,
    prompt_ptr,
    table_ptr,
    table_len,
    sink,
    recent,
    query_row,
    query_head,
    query_token,
    landmark_row,
    landmark_head,
    landmark_page,
    landmark_run,
    score_head,
    score_query,
    scale,
    first,
    last,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    RUNS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    row_head = tl.program_id(2).to(tl.int64)
    row = row_head // KV_HEADS
    head = row_head % KV_HEADS
    i = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    position = first + i
    real, num_pages, top_k, chooses = _query_budget(
        position, row, length_ptr, prompt_ptr, table_ptr, table_len, sink, recent, first, last, PAGE
    )
    stop = tl.max(tl.where(chooses, num_pages - recent, 0), 0)
    begin = tl.program_id(0) * BLOCK_P
    if begin >= stop:
        return
    d = tl.arange(0, D_PAD)
    page = begin + tl.arange(0, BLOCK_P)
    token = (tl.load(start_ptr + row) + position).to(tl.int64)
    query = query_ptr + row * query_row + head * GROUP * query_head + token[:, None] * query_token + d[None, :]
    query_mask = chooses[:, None] & (d[None, :] < D)
    landmark_ptr += row * landmark_row + head * landmark_head
    landmark = landmark_ptr + page[:, None].to(tl.int64) * landmark_page + d[None, :]
    landmark_mask = (page < stop)[:, None] & (d[None, :] < D)
    score = tl.zeros((BLOCK_Q, BLOCK_P), tl.float32)
    for run in tl.static_range(RUNS):
        keys = tl.trans(tl.load(landmark + run * landmark_run, mask=landmark_mask, other=0.0))
        for g in range(GROUP):
            q = tl.load(query + g * query_head, mask=query_mask, other=0.0).to(keys.dtype)
            if SOFTMAX:
                lse_head = (row_head * GROUP + g) * (score_head // score_query)
                lse = tl.load(lse_ptr + lse_head + i, mask=chooses, other=0.0)
                logits = tl.dot(q, keys, input_precision="ieee") * scale
                score += tl.exp2(logits - lse[:, None])
            else:
                # The sum over the group orders the pages as its mean does.
                score = tl.dot(q, keys, score, input_precision="ieee")
    out = score_ptr + row_head * score_head + i[:, None].to(tl.int64) * score_query + page[None, :]
    tl.store(out, score, mask=chooses[:, None] & (page < stop)[None, :])


@triton.jit(do_not_specialize=["table_len", "sink", "recent", "first", "last"])
def _keep_best_kernel(
    score_ptr,
    mask_ptr,
    length_ptr,
    prompt_ptr,
    table_ptr,
    table_len,
    sink,
    recent,
    score_head,
    score_query,
    mask_head,
    mask_token,
    first,
    last,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    SPREAD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    LOWEST: tl.constexpr = -0x7FFFFFFF - 1
    row_head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = first + i
    real, num_pages, top_k, chooses = _query_budget(
        position, row_head // KV_HEADS, length_ptr, prompt_ptr, table_ptr, table_len, sink, recent, first, last, PAGE
    )
    page = tl.arange(0, WIDTH)[None, :]
    candidate = chooses[:, None] & (page >= sink) & (page < (num_pages - recent)[:, None])
    score = score_ptr + row_head * score_head + i[:, None].to(tl.int64) * score_query
    key = _selection_keys(score, page, candidate, 0, 1, False)
    # As in `_list_best_pages`, for several rows at a time: a threshold that exactly top_k keys reach or, among ties,
    # the key of the last one kept.
    low = tl.min(tl.where(candidate, key, 0x7FFFFFFF), 1)
    key = tl.where(candidate, key, LOWEST)  # which no score has: the key of what is no candidate from here on
    high = tl.max(key, 1)
    reach = tl.where(chooses, num_pages - recent - sink, top_k)
    beyond = tl.zeros((ROWS,), tl.int32)
    step = 0
    searching = (low < high) & (reach != top_k)
    while tl.max(searching.to(tl.int32), 0) != 0:
        middle = (low | high) - ((low ^ high) >> 1)
        if (step < 32) & (step % 4 != 3):
            share = (top_k - beyond).to(tl.float32) / (reach - beyond).to(tl.float32)
            if SPREAD:
                guess = high - ((high.to(tl.float32) - low.to(tl.float32)) * share).to(tl.int32)
            else:
                guess = _to_key(_to_score(high) * (1 - share) + _to_score(low) * share)
            middle = tl.minimum(tl.maximum(guess, low + 1), high)
        step += 1
        reach_middle = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        enough = reach_middle >= top_k
        reach = tl.where(searching & enough, reach_middle, reach)
        low = tl.where(searching & enough, middle, low)
        beyond = tl.where(searching & (enough == 0), reach_middle, beyond)
        high = tl.where(searching & (enough == 0), middle - 1, high)
        searching = (low < high) & (reach != top_k)
    chosen = key >= low[:, None]
    if tl.max((reach > top_k).to(tl.int32), 0) != 0:
        above = key > low[:, None]
        tied = key == low[:, None]
        room = top_k - tl.sum(above.to(tl.int32), 1)
        chosen = above | (tied & (tl.cumsum(tied.to(tl.int32), 1) <= room[:, None]))
    kept = chosen | (real[:, None] & (page < num_pages[:, None]) & (key == LOWEST))
    bits = tl.reshape(kept.to(tl.int32) << (page % 32), (ROWS, WIDTH // 32, 32))
    word = tl.arange(0, WIDTH // 32)[None, :]
    out = mask_ptr + row_head * mask_head + position[:, None].to(tl.int64) * mask_token + word
    tl.store(out, tl.sum(bits, 2), mask=real[:, None] & (word < mask_token))
