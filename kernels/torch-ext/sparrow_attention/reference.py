"""
Block-sparse attention in plain torch: the definition that every other implementation is compared with, and what runs
where there is no GPU.

Shapes are written with `rows` for the queries of a decode step, `kv_heads` and `q_heads` for the heads (a kv head
serves a group of `q_heads / kv_heads` query heads, which share its pages) and `pages` for the longest row's pages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .selection import count_pages, keep_pages, page_landmarks, select_pages
from .sequence_dispatch import has_sequence_kernels
from .validation import check_heads, check_integers, check_recipe, check_shape


__all__ = ["page_landmarks", "select_pages", "sparse_attention", "sparse_decode_attention"]

# Bytes of keys, and as many of values, gathered at a time in a decode step: they stay in a CPU's cache until attended.
GATHER_BYTES = 2**20


def sparse_decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: torch.Tensor,
    *,
    page_size: int = 16,
    page_score: str = "mean_query",
    landmarks_per_page: int = 1,
    sink_pages: int = 1,
    recent_pages: int = 2,
    landmarks: torch.Tensor | None = None,
    scale: float | None = None,
    return_kept: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """
    One decode step of block-sparse attention over a paged KV cache (section 3.1 of the
    [Sparrow paper](https://huggingface.co/papers/2606.08446)).

    Each kv head attends to all tokens of the pages that [`select_pages`] keeps. Unwritten slots of the cache and
    unused entries of the block table may hold anything, NaN included.

    Args:
        query (`torch.Tensor` of shape `[rows, q_heads, head_dim]`):
            Queries, after the rotary embedding.
        key_cache (`torch.Tensor` of shape `[blocks, kv_heads, block_size, head_dim]`):
            Keys, after the rotary embedding. The block size is any multiple of the page size. A layout whose blocks,
            heads and tokens do not follow one another in memory is copied whole.
        value_cache (`torch.Tensor` of shape `[blocks, kv_heads, block_size, head_dim]`):
            Values.
        block_table (`torch.Tensor` of shape `[rows, max_blocks]`):
            Cache blocks of each row, in order.
        seq_lens (`torch.Tensor` of shape `[rows]`):
            Cached tokens, the query's own included. Rows of length 0 give zeros.
        top_k (`torch.Tensor` of shape `[rows]`):
            Candidate pages to keep, see [`select_pages`]. The number of the row's pages, or more, makes it dense.
        page_size, page_score, sink_pages, recent_pages:
            As in [`select_pages`].
        landmarks_per_page (`int`, *optional*, defaults to `1`):
            As in [`page_landmarks`].
        landmarks (`torch.Tensor`, *optional*):
            Landmarks of the cache's pages, of shape
            `[blocks, kv_heads, block_size / page_size, landmarks_per_page, head_dim]`; those of pages that are not
            full may hold anything. By default computed from the keys, in their type.
        scale (`float`, *optional*):
            Factor of the attention logits, by default `head_dim**-0.5`.
        return_kept (`bool`, *optional*, defaults to `False`):
            Whether to return the kept pages too.

    Returns:
        `torch.Tensor` of shape `[rows, q_heads, head_dim]`; with `return_kept=True` also a bool tensor of shape
        `[rows, kv_heads, pages]`, where `pages` is the number of pages of the longest row.

    Raises:
        ValueError: as in [`select_pages`], for a block size that is no multiple of the page size, and for a block
            table with fewer blocks than the longest row.
    """
    check_shape("query", query, (None, None, None), "[rows, q_heads, head_dim]")
    rows, q_heads, head_dim = query.shape
    check_shape("key_cache", key_cache, (None, None, None, head_dim), "[blocks, kv_heads, block_size, head_dim]")
    blocks, kv_heads, block_size, _ = key_cache.shape
    check_shape("value_cache", value_cache, tuple(key_cache.shape), "[blocks, kv_heads, block_size, head_dim]")
    check_shape("block_table", block_table, (rows, None), "[rows, max_blocks]")
    check_shape("seq_lens", seq_lens, (rows,), "[rows]")
    check_shape("top_k", top_k, (rows,), "[rows]")
    check_integers(block_table=block_table, seq_lens=seq_lens, top_k=top_k)
    check_recipe(page_size, page_score, landmarks_per_page, sink_pages, recent_pages)
    check_heads(q_heads, kv_heads)
    if block_size % page_size:
        raise ValueError(f"The cache's block size must be a multiple of `page_size` ({page_size}), got {block_size}.")
    pages_per_block = block_size // page_size
    if landmarks is not None:
        expected = (blocks, kv_heads, pages_per_block, landmarks_per_page, head_dim)
        layout = "[blocks, kv_heads, block_size / page_size, landmarks_per_page, head_dim]"
        check_shape("landmarks", landmarks, expected, layout)
    num_pages = count_pages(seq_lens, page_size)
    pages = int(num_pages.max()) if rows else 0
    if pages > block_table.shape[1] * pages_per_block:
        raise ValueError(
            f"`block_table` has {block_table.shape[1]} blocks of {block_size} tokens per row, but the longest row has "
            f"{int(seq_lens.max())} tokens."
        )
    grouped_query = query.unflatten(1, (kv_heads, -1))
    if not pages:
        output, kept = torch.zeros_like(query), query.new_zeros((rows, kv_heads, 0), dtype=torch.bool)
        return (output, kept) if return_kept else output

    page = torch.arange(pages, device=query.device)
    block = block_table[:, page // pages_per_block].masked_fill(page >= num_pages[:, None], 0)
    head = torch.arange(kv_heads, device=query.device)
    # Where each page lies in the cache seen as one run of pages, [rows, kv_heads, pages].
    cache_page = (block[:, None].long() * kv_heads + head[:, None]) * pages_per_block + page % pages_per_block
    if landmarks is None:
        key_pages = F.embedding(cache_page, key_cache.reshape(-1, page_size * head_dim))
        row_landmarks = page_landmarks(key_pages.unflatten(-1, (page_size, head_dim)), landmarks_per_page)
    else:
        row_landmarks = F.embedding(cache_page, landmarks.reshape(-1, landmarks_per_page * head_dim))
        row_landmarks = row_landmarks.unflatten(-1, (landmarks_per_page, head_dim))
    kept = keep_pages(
        grouped_query.unsqueeze(2),
        row_landmarks,
        num_pages[:, None],
        top_k[:, None],
        page_score=page_score,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
    ).squeeze(2)
    output = _attend_to_pages(grouped_query, key_cache, value_cache, cache_page, kept, seq_lens, page_size, scale)
    # Rows of length 0 have read a slot that may never have been written.
    output = output.flatten(1, 2).masked_fill((seq_lens == 0)[:, None, None], 0)
    return (output, kept) if return_kept else output


def _attend_to_pages(query, key_cache, value_cache, cache_page, kept, seq_lens, page_size, scale):
    """Attention of `query [rows, kv_heads, group, head_dim]` over the pages in `kept [rows, kv_heads, pages]`."""
    rows, kv_heads, _, head_dim = query.shape
    pages = kept.shape[-1]
    keys, values = key_cache.reshape(-1, head_dim), value_cache.reshape(-1, head_dim)
    counts = kept.sum(-1).amax(1).tolist()
    slots = max(counts)
    # Kept pages in ascending order, [rows, kv_heads, slots]; slots left over hold a page that no row reaches.
    page = torch.arange(pages, device=query.device).expand_as(kept)
    slot = torch.where(kept, kept.cumsum(-1) - 1, slots)
    page = page.new_full((rows, kv_heads, slots + 1), pages).scatter(-1, slot, page)[..., :slots]

    # Positions of the tokens and where they lie in the cache, [rows, kv_heads, slots * page_size].
    offset = torch.arange(page_size, device=query.device)
    position = (page[..., None] * page_size + offset).flatten(2)
    token = (cache_page.gather(-1, page.clamp(max=pages - 1))[..., None] * page_size + offset).flatten(2)
    readable = position < seq_lens[:, None, None]
    # An unwritten slot may hold NaN, which a weight of 0 would not silence: read the first kept token in its place.
    token = torch.where(readable, token, token[..., :1])

    row_bytes = max(1, sum(counts)) * kv_heads * page_size * head_dim * keys.element_size() // rows
    rows_at_once = max(1, GATHER_BYTES // row_bytes)
    output = []
    for start in range(0, rows, rows_at_once):
        chunk = slice(start, start + rows_at_once)
        length = max(1, *counts[chunk]) * page_size
        index = token[chunk, :, :length]
        output.append(
            F.scaled_dot_product_attention(
                query[chunk],
                F.embedding(index, keys),
                F.embedding(index, values),
                attn_mask=readable[chunk, :, None, :length],
                scale=scale,
            )
        )
    return torch.cat(output)


def sparse_attention(
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
    query_chunk: int = 128,
) -> torch.Tensor:
    """
    Block-sparse causal attention over whole sequences: every token sees what [`sparse_decode_attention`] shows it
    when it is decoded.

    A token at a position below its prompt length attends densely, any other one to the pages that [`select_pages`]
    keeps for it. Positions and pages count from the row's first real token. Gradients flow through the attention, not
    through the choice of pages; for them the attention is computed again in the backward pass, so that what is held
    until then are the kept pages rather than attention weights.

    On a data-center GPU (NVIDIA H100 and later), Triton kernels do the work, at a speed near that of dense attention:
    for bfloat16 and float16 of head dims up to 256, float32 of up to 128 (which is slow), pages of up to 64 tokens, up
    to 8192 of them, and a scale above 0. Everything else, float64 or the last queries of longer sequences for example,
    runs in plain torch.

    Args:
        query (`torch.Tensor` of shape `[batch, q_heads, tokens, head_dim]`):
            Queries, after the rotary embedding: of all tokens of a row or, without padding, of its last ones.
        key (`torch.Tensor` of shape `[batch, kv_heads, row_tokens, head_dim]`):
            Keys, after the rotary embedding.
        value (`torch.Tensor` of shape `[batch, kv_heads, row_tokens, head_dim]`):
            Values.
        prompt_lengths (`torch.Tensor` of shape `[batch]`):
            Real tokens at the start of each row that attend densely.
        top_k_table (`torch.Tensor` of shape `[n]`):
            Candidate pages to keep for a query that covers `P` pages, at index `P`; the last entry stands for all
            longer contexts.
        starts (`torch.Tensor` of shape `[batch]`, *optional*):
            Padding at the left of each row, by default none.
        lengths (`torch.Tensor` of shape `[batch]`, *optional*):
            Real tokens that follow it, by default all.
        page_size, page_score, sink_pages, recent_pages:
            As in [`select_pages`].
        landmarks_per_page (`int`, *optional*, defaults to `1`):
            As in [`page_landmarks`].
        scale (`float`, *optional*):
            Factor of the attention logits, by default `head_dim**-0.5`.
        landmark_dtype (`torch.dtype`, *optional*):
            Type that landmarks are rounded to, by default that of the keys.
        query_chunk (`int`, *optional*, defaults to `128`):
            Queries worked on at a time in plain torch. Memory grows with it, results do not depend on it.

    Returns:
        `torch.Tensor` of shape `[batch, q_heads, tokens, head_dim]`, zeros at padding.

    Raises:
        ValueError: as in [`select_pages`].
    """
    check_shape("query", query, (None, None, None, None), "[batch, q_heads, tokens, head_dim]")
    batch, q_heads, tokens, head_dim = query.shape
    check_shape("key", key, (batch, None, None, head_dim), "[batch, kv_heads, row_tokens, head_dim]")
    check_shape("value", value, tuple(key.shape), "[batch, kv_heads, row_tokens, head_dim]")
    past = key.shape[2] - tokens
    padded = starts is not None or lengths is not None
    if past < 0 or (past and padded):
        raise ValueError(
            f"`query` has {tokens} tokens and `key` {key.shape[2]}; they must be as many, or, without padding, the "
            "last ones of the keys'."
        )
    for name, tensor in (("prompt_lengths", prompt_lengths), ("starts", starts), ("lengths", lengths)):
        if tensor is not None:
            check_shape(name, tensor, (batch,), "[batch]")
    check_shape("top_k_table", top_k_table, (None,), "[n]")
    check_integers(prompt_lengths=prompt_lengths, top_k_table=top_k_table, starts=starts, lengths=lengths)
    if not top_k_table.numel():
        raise ValueError("`top_k_table` is empty.")
    check_recipe(page_size, page_score, landmarks_per_page, sink_pages, recent_pages)
    kv_heads = key.shape[1]
    check_heads(q_heads, kv_heads)
    if query_chunk < 1:
        raise ValueError(f"`query_chunk` must be at least 1, got {query_chunk}.")

    if has_sequence_kernels(query, key, value, page_size, scale):
        from .sequence_attention import sparse_sequence_attention

        return sparse_sequence_attention(
            query,
            key,
            value,
            prompt_lengths=prompt_lengths,
            top_k_table=top_k_table,
            starts=starts,
            lengths=lengths,
            page_size=page_size,
            page_score=page_score,
            landmarks_per_page=landmarks_per_page,
            sink_pages=sink_pages,
            recent_pages=recent_pages,
            scale=scale,
            landmark_dtype=landmark_dtype,
        )

    position = torch.arange(past, past + tokens, device=query.device)
    if padded:
        starts = torch.zeros_like(prompt_lengths) if starts is None else starts
        lengths = tokens - starts if lengths is None else lengths
        real = (position < lengths[:, None])[:, None, :, None]
        # Real tokens first, as if all padding were on the right.
        query, key, value = (_roll(x, -starts).masked_fill(~real, 0) for x in (query, key, value))

    with torch.no_grad():
        missing = -(past + tokens) % page_size
        key_pages = F.pad(key, (0, 0, 0, missing)).unflatten(2, (-1, page_size))
        landmarks = page_landmarks(key_pages, landmarks_per_page, landmark_dtype).float()
        num_pages = position // page_size + 1
        top_k = top_k_table[num_pages.clamp(max=len(top_k_table) - 1)].expand(batch, tokens)
        top_k = torch.where(position < prompt_lengths[:, None], num_pages, top_k)

    grouped_query = query.unflatten(1, (kv_heads, -1))
    recompute = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    output = []
    for start in range(0, tokens, query_chunk):
        stop = min(start + query_chunk, tokens)
        chunk_query = grouped_query[:, :, :, start:stop]
        kept = keep_pages(
            chunk_query.transpose(2, 3),
            landmarks[:, :, : int(num_pages[stop - 1])],
            num_pages[start:stop].expand(batch, -1),
            top_k[:, start:stop],
            page_score=page_score,
            sink_pages=sink_pages,
            recent_pages=recent_pages,
        )
        arguments = (chunk_query, key[:, :, : past + stop], value[:, :, : past + stop], kept, page_size, scale)
        if recompute:
            output.append(checkpoint(_attend_causally, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            output.append(_attend_causally(*arguments))
    output = torch.cat(output, dim=3).flatten(1, 2) if output else torch.zeros_like(query)
    return _roll(output.masked_fill(~real, 0), starts) if padded else output


def _roll(x: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Rolls the tokens of `x [batch, heads, tokens, head_dim]` to the right by a number of their own in each row."""
    tokens = x.shape[2]
    index = (torch.arange(tokens, device=x.device) - shifts[:, None]) % tokens
    return x.gather(2, index[:, None, :, None].expand_as(x))


def _attend_causally(query, key, value, kept, page_size, scale):
    """
    Attention of `query [batch, kv_heads, group, queries, head_dim]`, the last queries of the sequence that `key` and
    `value [batch, kv_heads, tokens, head_dim]` hold, to the tokens of the pages in
    `kept [batch, kv_heads, queries, pages]` up to their own.
    """
    group, queries = query.shape[2:4]
    tokens = key.shape[2]
    # Numbers to add, made for each page: on a CPU attention would make them of a mask, for each token.
    mask = torch.zeros_like(kept, dtype=query.dtype).masked_fill_(~kept, -torch.inf)
    mask = mask.repeat_interleave(page_size, -1)[..., :tokens]
    # All tokens before the chunk's are in the past of all its queries.
    future = torch.ones((queries, queries), dtype=torch.bool, device=query.device).triu(1)
    mask[..., tokens - queries :].masked_fill_(future, -torch.inf)
    # A kv head of a row becomes a batch entry with its group as heads: mask, keys and values are shared, not repeated.
    key, value = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (key, value))
    output = F.scaled_dot_product_attention(
        query.flatten(0, 1), key, value, attn_mask=mask.flatten(0, 1)[:, None], scale=scale
    )
    return output.unflatten(0, kept.shape[:2])
