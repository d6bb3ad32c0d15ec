"""
Block-sparse causal attention over whole sequences in Triton kernels, forward and backward. The reference is
[`sparse_attention`][sparrow_attention.sparse_attention] in plain torch, which comes here by itself where it can.

Which pages a token keeps is a mask of bits that [`keep_pages_of_sequences`] writes. The query heads of a kv head share
it, so a tile of queries holds the heads of its first token, then those of the next one, and so on: keys, values and
mask are read once for all of them. Blocks of keys of which a tile keeps no page are not in its list of blocks, and are
not read. Positions count from a row's first real token, and padding is never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .launching import strides
from .sequence_selection import keep_pages_of_sequences, real_tokens


__all__ = ["attend_to_kept_bits", "sparse_sequence_attention"]

# Queries (tokens times heads of a group) and keys of a tile, warps and stages, by the padded head dim. A block of keys
# is at least a page.
FORWARD = {64: (128, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)}
BACKWARD_QUERY = {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2)}
BACKWARD_KEY = {64: (128, 64, 4, 2), 128: (32, 64, 4, 3), 256: (32, 64, 8, 2)}
# The same for float32, which no tensor core multiplies.
FLOAT32 = (32, 32, 8, 1)


def sparse_sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    prompt_lengths: torch.Tensor,
    top_k_table: torch.Tensor,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    page_size: int = 16,
    page_score: str = "mean_query",
    landmarks_per_page: int = 1,
    sink_pages: int = 1,
    recent_pages: int = 2,
    scale: float | None = None,
    landmark_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """
    [`sparse_attention`][sparrow_attention.sparse_attention] in Triton kernels, without its checks.

    Until the backward pass are held: queries, keys, values, the output, a float32 per query and head, and a bit per
    token, kv head and page.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    starts, lengths = real_tokens(query.shape[2], starts, lengths, like=prompt_lengths)
    with torch.no_grad():
        mask = keep_pages_of_sequences(
            query,
            key,
            starts,
            lengths,
            prompt_lengths=prompt_lengths,
            top_k_table=top_k_table,
            page_size=page_size,
            page_score=page_score,
            landmarks_per_page=landmarks_per_page,
            sink_pages=sink_pages,
            recent_pages=recent_pages,
            landmark_dtype=landmark_dtype,
        )
    if torch.is_autocast_enabled(query.device.type):
        # As in torch's own attention. Pages were chosen before: their scores know no mixed precision.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    return attend_to_kept_bits(query, key, value, mask, starts, lengths, page_size=page_size, scale=scale)


def attend_to_kept_bits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page_size: int,
    scale: float | None = None,
) -> torch.Tensor:
    """
    Causal attention to the pages in `mask`; differentiable in queries, keys and values.

    Args:
        query (`torch.Tensor` of shape `[batch, q_heads, tokens, head_dim]`):
            Queries.
        key, value (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`):
            Keys and values.
        mask, starts, lengths:
            As [`keep_pages_of_sequences`][sparrow_attention.sequence_selection.keep_pages_of_sequences] returns and
            takes them. Every token keeps its own page and none after it.
        page_size (`int`):
            Tokens in a page: 16, 32 or 64.
        scale (`float`, *optional*):
            Factor of the attention logits, above 0, by default `head_dim**-0.5`.

    Returns:
        `torch.Tensor` of shape `[batch, q_heads, tokens, head_dim]`, zeros at padding.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _SequenceAttention.apply(query, key, value, mask, starts, lengths, page_size, scale)


class _SequenceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask, starts, lengths, page_size, scale):
        batch, q_heads, tokens, _ = query.shape
        output = torch.empty_like(query)
        lse = torch.empty((batch, q_heads * tokens), dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, lse, mask, starts, lengths)
        ctx.page_size, ctx.scale = page_size, scale
        if not output.numel():
            return output
        shape, options, grid = _tiles(FORWARD, query, key, page_size)
        listed = _list_blocks(mask, lengths, shape)
        _forward_kernel[grid](
            query,
            key,
            value,
            mask,
            *listed,
            output,
            lse,
            starts,
            lengths,
            *strides(query, 3),
            *strides(key, 3),
            *strides(value, 3),
            *strides(output, 3),
            mask.stride(2),
            tokens,
            scale * 1.4426950408889634,  # for base-2 exponentials
            **shape,
            **options,
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        query, key, value, output, lse, mask, starts, lengths = ctx.saved_tensors
        grad_output = grad_output if grad_output.stride(-1) == 1 else grad_output.contiguous()
        grads = [torch.empty_like(x) for x in (query, key, value)]
        if not query.numel():
            return (*grads, None, None, None, None, None)
        delta = torch.empty_like(lse)
        tensors = (query, key, value, output, grad_output, mask)
        rows = (lse, delta, starts, lengths)
        steps = [step for x in (query, key, value, output, grad_output) for step in strides(x, 3)]
        scales = (query.shape[2], ctx.scale, ctx.scale * 1.4426950408889634)
        shape, options, grid = _tiles(BACKWARD_QUERY, query, key, ctx.page_size)
        listed = _list_blocks(mask, lengths, shape)
        _backward_query_kernel[grid](
            *tensors, *listed, *rows, grads[0], *steps, *strides(grads[0], 3), mask.stride(2), *scales, **shape,
            **options,
        )  # fmt: skip
        shape, options, _ = _tiles(BACKWARD_KEY, query, key, ctx.page_size)
        listed = _list_blocks(mask, lengths, shape, by_key=True)
        _backward_key_kernel[listed[1].shape](
            *tensors, *listed, *rows, *grads[1:], *steps, *strides(grads[1], 3), *strides(grads[2], 3),
            mask.stride(2), *scales, **shape, **options,
        )  # fmt: skip
        return (*grads, None, None, None, None, None)


def _tiles(sizes, query, key, page_size):
    """What the kernels are compiled for, their launch options, and a grid of tiles of queries."""
    batch, q_heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    head_dim_pad = max(16, triton.next_power_of_2(head_dim))
    block_m, block_n, warps, stages = FLOAT32 if query.dtype == torch.float32 else sizes[max(64, head_dim_pad)]
    shape = dict(KV_HEADS=kv_heads, GROUP=q_heads // kv_heads, PAGE=page_size, D=head_dim, D_PAD=head_dim_pad)
    shape |= dict(BLOCK_M=block_m, BLOCK_N=max(block_n, page_size))
    grid = (batch * kv_heads, triton.cdiv(tokens * (q_heads // kv_heads), block_m))
    return shape, dict(num_warps=warps, num_stages=stages), grid


def _list_blocks(mask, lengths, shape, by_key=False):
    """
    The blocks of keys of which each tile of queries keeps a page, in ascending order: `[batch * kv_heads, tiles,
    blocks]` and how many they are, `[batch * kv_heads, tiles]`, int32. With `by_key=True`, the tiles of queries that
    keep a page of each block of keys.
    """
    batch, kv_heads, tokens, words = mask.shape
    block_m, block_n, group = shape["BLOCK_M"], shape["BLOCK_N"], shape["GROUP"]
    tiles, blocks = triton.cdiv(tokens * group, block_m), triton.cdiv(tokens, block_n)
    occupied = torch.empty((batch * kv_heads, tiles, blocks), dtype=torch.int8, device=mask.device)
    _occupied_kernel[(batch * kv_heads, tiles)](
        mask,
        lengths,
        occupied,
        mask.stride(1),
        mask.stride(2),
        blocks,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_M=block_m,
        TOKENS=triton.next_power_of_2((block_m - 2) // group + 2),
        PAGES=block_n // shape["PAGE"],
        WORDS=min(64, triton.next_power_of_2(words)),
    )
    occupied = occupied.transpose(1, 2) if by_key else occupied
    listed = torch.empty(occupied.shape, dtype=torch.int32, device=mask.device)
    counts = listed.new_empty(occupied.shape[:2])
    _list_kernel[counts.shape](
        occupied,
        listed,
        counts,
        *occupied.stride(),
        listed.shape[2],
        BLOCK=min(1024, triton.next_power_of_2(listed.shape[2])),
    )
    return listed, counts


@triton.jit
def _occupied_kernel(
    mask_ptr,
    length_ptr,
    occupied_ptr,
    mask_head,
    mask_token,
    blocks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Whether any token of a tile keeps a page of each block of keys."""
    row_head = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    length = tl.load(length_ptr + row_head // KV_HEADS)
    first = tile * BLOCK_M // GROUP
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, length - 1)
    token = first + tl.arange(0, TOKENS)
    rows = mask_ptr + row_head * mask_head + token[:, None].to(tl.int64) * mask_token
    occupied_ptr += (row_head * tl.num_programs(1) + tile) * blocks
    BLOCKS: tl.constexpr = 32 // PAGES  # of a word
    for begin in range(0, mask_token, WORDS):
        word = begin + tl.arange(0, WORDS)
        bits = tl.load(rows + word[None, :], mask=(token <= last)[:, None] & (word < mask_token)[None, :], other=0)
        for block in tl.static_range(BLOCKS):
            kept = (bits >> (block * PAGES)) & ((1 << PAGES) - 1)
            index = word * BLOCKS + block
            tl.store(occupied_ptr + index, tl.max((kept != 0).to(tl.int32), 0).to(tl.int8), mask=index < blocks)


@triton.jit
def _list_kernel(
    occupied_ptr, list_ptr, count_ptr, occupied_head, occupied_line, occupied_item, items, BLOCK: tl.constexpr
):
    """Indices of what is occupied on a line."""
    row_head = tl.program_id(0).to(tl.int64)
    line = tl.program_id(1)
    occupied_ptr += row_head * occupied_head + line.to(tl.int64) * occupied_line
    place = row_head * tl.num_programs(1) + line
    count = 0
    for begin in range(0, items, BLOCK):
        item = begin + tl.arange(0, BLOCK)
        occupied = tl.load(occupied_ptr + item.to(tl.int64) * occupied_item, mask=item < items, other=0).to(tl.int32)
        tl.store(list_ptr + place * items + count + tl.cumsum(occupied, 0) - 1, item, mask=occupied != 0)
        count += tl.sum(occupied, 0)
    tl.store(count_ptr + place, count)


@triton.jit
def _load_rows(pointer, place, real, D: tl.constexpr, D_PAD: tl.constexpr, CHECK: tl.constexpr):
    """Vectors at the given places; zeros for those that are not real, where there may be such (`CHECK`)."""
    d = tl.arange(0, D_PAD)
    rows = pointer + place[:, None] + d[None, :]
    if CHECK:
        vectors = tl.load(rows, mask=real[:, None] & (d < D)[None, :], other=0.0)
    elif D != D_PAD:
        vectors = tl.load(rows, mask=(d < D)[None, :], other=0.0)
    else:
        vectors = tl.load(rows)
    return vectors


@triton.jit
def _store_rows(pointer, place, vectors, inside, D: tl.constexpr, D_PAD: tl.constexpr):
    d = tl.arange(0, D_PAD)
    out = pointer + place[:, None] + d[None, :]
    tl.store(out, vectors.to(pointer.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def _wrap(position, start, tokens):
    """Where a position lies: what exceeds the row's length is its padding, that on the left last."""
    place = start + position
    return tl.where(place < tokens, place, place - tokens).to(tl.int64)


@triton.jit
def _diagonal_blocks(tile, length, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks, the last of the tile's list, in which keys may come after queries."""
    first = tile * BLOCK_M // GROUP
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, length - 1)
    return tl.where(first < length, last // BLOCK_N - first // BLOCK_N + 1, 0)


@triton.jit
def _kept_keys(words, block, token, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Which keys of a block the queries with these words of the mask attend to, `[queries, keys]`."""
    n = tl.arange(0, BLOCK_N)
    words = words >> (block * (BLOCK_N // PAGE) % 32)
    kept = ((words[:, None] >> (n // PAGE)[None, :]) & 1) != 0
    if CAUSAL:
        kept = kept & ((block * BLOCK_N + n)[None, :] <= token[:, None])
    return kept


@triton.jit
def _attend_to_blocks(
    q,
    highest,
    total,
    acc,
    key_ptr,
    value_ptr,
    mask_rows,
    list_ptr,
    begin,
    end,
    token,
    length,
    key_token,
    value_token,
    scale,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    PAGES: tl.constexpr = BLOCK_N // PAGE
    n = tl.arange(0, BLOCK_N)
    real = token < length
    # Read one block ahead: a load of the number of the block at hand would leave Triton a single buffer for its keys.
    next_block = tl.load(list_ptr + begin, mask=begin < end, other=0)
    for i in range(begin, end):
        block = next_block
        next_block = tl.load(list_ptr + i + 1, mask=i + 1 < end, other=0)
        words = tl.load(mask_rows + block * PAGES // 32, mask=real, other=0)
        column = block * BLOCK_N + n
        k = _load_rows(key_ptr, column.to(tl.int64) * key_token, column < length, D, D_PAD, CAUSAL)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = tl.where(_kept_keys(words, block, token, PAGE, BLOCK_N, CAUSAL), logits, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 1) * scale)
        weights = tl.exp2(logits * scale - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, 1)
        v = _load_rows(value_ptr, column.to(tl.int64) * value_token, column < length, D, D_PAD, CAUSAL)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, acc


@triton.jit
def _forward_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    mask_ptr,
    list_ptr,
    count_ptr,
    output_ptr,
    lse_ptr,
    start_ptr,
    length_ptr,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    output_row,
    output_head,
    output_token,
    mask_token,
    tokens,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    row = row_head // KV_HEADS
    head = row_head % KV_HEADS
    start = tl.load(start_ptr + row)
    length = tl.load(length_ptr + row)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = m // GROUP
    real = token < length
    query_ptr += row * query_row + head * GROUP * query_head
    place = (start + token).to(tl.int64) * query_token + (m % GROUP) * query_head
    q = _load_rows(query_ptr, place, real, D, D_PAD, True)
    key_ptr += row * key_row + head * key_head + start.to(tl.int64) * key_token
    value_ptr += row * value_row + head * value_head + start.to(tl.int64) * value_token
    mask_rows = mask_ptr + (row_head * tokens + token) * mask_token
    line = row_head * tl.num_programs(1) + tile
    list_ptr += line * tl.cdiv(tokens, BLOCK_N)
    count = tl.load(count_ptr + line)
    below = count - _diagonal_blocks(tile, length, GROUP, BLOCK_M, BLOCK_N)
    highest = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    highest, total, acc = _attend_to_blocks(
        q, highest, total, acc, key_ptr, value_ptr, mask_rows, list_ptr, 0, below, token, length, key_token,
        value_token, scale, PAGE, D, D_PAD, BLOCK_N, False,
    )  # fmt: skip
    highest, total, acc = _attend_to_blocks(
        q, highest, total, acc, key_ptr, value_ptr, mask_rows, list_ptr, below, count, token, length, key_token,
        value_token, scale, PAGE, D, D_PAD, BLOCK_N, True,
    )  # fmt: skip
    # Padding gets zeros.
    total = tl.where(real, total, 1.0)
    inside = token < tokens
    output_ptr += row * output_row + head * GROUP * output_head
    place = _wrap(token, start, tokens) * output_token + (m % GROUP) * output_head
    _store_rows(output_ptr, place, acc / total[:, None], inside, D, D_PAD)
    tl.store(lse_ptr + row_head * tokens * GROUP + m, highest + tl.log2(total), mask=inside)


@triton.jit
def _query_gradient_of_blocks(
    q,
    grad,
    lse,
    delta,
    acc,
    key_ptr,
    value_ptr,
    mask_rows,
    list_ptr,
    begin,
    end,
    token,
    length,
    key_token,
    value_token,
    scale,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    PAGES: tl.constexpr = BLOCK_N // PAGE
    n = tl.arange(0, BLOCK_N)
    real = token < length
    next_block = tl.load(list_ptr + begin, mask=begin < end, other=0)
    for i in range(begin, end):
        block = next_block
        next_block = tl.load(list_ptr + i + 1, mask=i + 1 < end, other=0)
        words = tl.load(mask_rows + block * PAGES // 32, mask=real, other=0)
        column = block * BLOCK_N + n
        k = _load_rows(key_ptr, column.to(tl.int64) * key_token, column < length, D, D_PAD, CAUSAL)
        v = _load_rows(value_ptr, column.to(tl.int64) * value_token, column < length, D, D_PAD, CAUSAL)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        kept = _kept_keys(words, block, token, PAGE, BLOCK_N, CAUSAL)
        weights = tl.where(kept, tl.exp2(logits * scale - lse[:, None]), 0.0)
        grad_weights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        grad_logits = weights * (grad_weights - delta[:, None])
        acc = tl.dot(grad_logits.to(k.dtype), k, acc, input_precision="ieee")
    return acc


@triton.jit
def _backward_query_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    grad_ptr,
    mask_ptr,
    list_ptr,
    count_ptr,
    lse_ptr,
    delta_ptr,
    start_ptr,
    length_ptr,
    grad_query_ptr,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    output_row,
    output_head,
    output_token,
    grad_row,
    grad_head,
    grad_token,
    grad_query_row,
    grad_query_head,
    grad_query_token,
    mask_token,
    tokens,
    scale,
    log2_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients of a tile of queries; also writes `delta`, the sums of output times gradient."""
    row_head = tl.program_id(0).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = row_head // KV_HEADS
    head = row_head % KV_HEADS
    start = tl.load(start_ptr + row)
    length = tl.load(length_ptr + row)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = m // GROUP
    g = m % GROUP
    real = token < length
    place = (start + token).to(tl.int64)
    grad_ptr += row * grad_row + head * GROUP * grad_head
    grad = _load_rows(grad_ptr, place * grad_token + g * grad_head, real, D, D_PAD, True)
    output_ptr += row * output_row + head * GROUP * output_head
    output = _load_rows(output_ptr, place * output_token + g * output_head, real, D, D_PAD, True)
    delta = tl.sum(output.to(tl.float32) * grad.to(tl.float32), 1)
    rows = row_head * tokens * GROUP + m
    tl.store(delta_ptr + rows, delta, mask=real)
    lse = tl.load(lse_ptr + rows, mask=real, other=0.0)
    query_ptr += row * query_row + head * GROUP * query_head
    q = _load_rows(query_ptr, place * query_token + g * query_head, real, D, D_PAD, True)
    key_ptr += row * key_row + head * key_head + start.to(tl.int64) * key_token
    value_ptr += row * value_row + head * value_head + start.to(tl.int64) * value_token
    mask_rows = mask_ptr + (row_head * tokens + token) * mask_token
    line = row_head * tl.num_programs(1) + tile
    list_ptr += line * tl.cdiv(tokens, BLOCK_N)
    count = tl.load(count_ptr + line)
    below = count - _diagonal_blocks(tile, length, GROUP, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    acc = _query_gradient_of_blocks(
        q, grad, lse, delta, acc, key_ptr, value_ptr, mask_rows, list_ptr, 0, below, token, length, key_token,
        value_token, log2_scale, PAGE, D, D_PAD, BLOCK_N, False,
    )  # fmt: skip
    acc = _query_gradient_of_blocks(
        q, grad, lse, delta, acc, key_ptr, value_ptr, mask_rows, list_ptr, below, count, token, length, key_token,
        value_token, log2_scale, PAGE, D, D_PAD, BLOCK_N, True,
    )  # fmt: skip
    grad_query_ptr += row * grad_query_row + head * GROUP * grad_query_head
    place = _wrap(token, start, tokens) * grad_query_token + g * grad_query_head
    _store_rows(grad_query_ptr, place, acc * scale, token < tokens, D, D_PAD)


@triton.jit
def _backward_key_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    output_ptr,
    grad_ptr,
    mask_ptr,
    list_ptr,
    count_ptr,
    lse_ptr,
    delta_ptr,
    start_ptr,
    length_ptr,
    grad_key_ptr,
    grad_value_ptr,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    output_row,
    output_head,
    output_token,
    grad_row,
    grad_head,
    grad_token,
    grad_key_row,
    grad_key_head,
    grad_key_token,
    grad_value_row,
    grad_value_head,
    grad_value_token,
    mask_token,
    tokens,
    scale,
    log2_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients of a block of keys and of their values."""
    PAGES: tl.constexpr = BLOCK_N // PAGE
    row_head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)  # the first keys have the most queries
    row = row_head // KV_HEADS
    head = row_head % KV_HEADS
    start = tl.load(start_ptr + row)
    length = tl.load(length_ptr + row)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    real = column < length
    place = (start + column).to(tl.int64)
    k = _load_rows(key_ptr + row * key_row + head * key_head, place * key_token, real, D, D_PAD, True)
    v = _load_rows(value_ptr + row * value_row + head * value_head, place * value_token, real, D, D_PAD, True)
    query_ptr += row * query_row + head * GROUP * query_head + start.to(tl.int64) * query_token
    grad_ptr += row * grad_row + head * GROUP * grad_head + start.to(tl.int64) * grad_token
    mask_ptr += row_head * tokens * mask_token
    lse_ptr += row_head * tokens * GROUP
    delta_ptr += row_head * tokens * GROUP
    line = row_head * tl.num_programs(1) + block
    list_ptr += line * tl.cdiv(tokens * GROUP, BLOCK_M)
    count = tl.load(count_ptr + line)
    mask_ptr += block * PAGES // 32
    bit = block * PAGES % 32 + tl.arange(0, BLOCK_N) // PAGE
    grad_k = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    grad_v = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    # In one loop, the diagonal included: with two, the second's products would wait for one another.
    next_tile = tl.load(list_ptr, mask=count > 0, other=0)
    for i in range(count):
        tile = next_tile
        next_tile = tl.load(list_ptr + i + 1, mask=i + 1 < count, other=0)
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token = m // GROUP
        g = m % GROUP
        unpadded = token < length
        q = _load_rows(query_ptr, token.to(tl.int64) * query_token + g * query_head, unpadded, D, D_PAD, True)
        grad = _load_rows(grad_ptr, token.to(tl.int64) * grad_token + g * grad_head, unpadded, D, D_PAD, True)
        words = tl.load(mask_ptr + token.to(tl.int64) * mask_token, mask=unpadded, other=0)
        lse = tl.load(lse_ptr + m, mask=unpadded, other=0.0)
        delta = tl.load(delta_ptr + m, mask=unpadded, other=0.0)
        # Keys times queries: the weights are then an operand as they are.
        logits = tl.dot(k, tl.trans(q), input_precision="ieee")
        kept = (((words[None, :] >> bit[:, None]) & 1) != 0) & (column[:, None] <= token[None, :])
        weights = tl.where(kept, tl.exp2(logits * log2_scale - lse[None, :]), 0.0)
        grad_v = tl.dot(weights.to(grad.dtype), grad, grad_v, input_precision="ieee")
        grad_weights = tl.dot(v, tl.trans(grad), input_precision="ieee")
        grad_logits = weights * (grad_weights - delta[None, :])
        grad_k = tl.dot(grad_logits.to(q.dtype), q, grad_k, input_precision="ieee")
    inside = column < tokens
    place = _wrap(column, start, tokens)
    grad_key_ptr += row * grad_key_row + head * grad_key_head
    grad_value_ptr += row * grad_value_row + head * grad_value_head
    _store_rows(grad_key_ptr, place * grad_key_token, grad_k * scale, inside, D, D_PAD)
    _store_rows(grad_value_ptr, place * grad_value_token, grad_v, inside, D, D_PAD)
