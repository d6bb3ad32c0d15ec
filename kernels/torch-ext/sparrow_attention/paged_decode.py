"""A decode step of block-sparse attention over a paged KV cache in Triton kernels: buffers, checks, launch order."""

from __future__ import annotations

import torch

from .launching import can_overlap
from .paged_attention import attend_to_kept_pages, num_splits
from .paged_selection import MAX_PAGES, choose_pages, num_ready
from .validation import check_heads, check_integers, check_recipe, check_shape


__all__ = ["PagedDecoder", "check_decoder"]

HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16
MAX_PAGE_SIZE = 64


def check_decoder(max_tokens: int, q_heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    """Refuses, with a `ValueError`, shapes that the kernels do not support."""
    check_heads(q_heads, kv_heads)
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"The kernels support attention heads of {', '.join(map(str, HEAD_DIMS))} dimensions, got {head_dim}."
        )
    if q_heads // kv_heads > MAX_GROUP:
        raise ValueError(
            f"At most {MAX_GROUP} query heads may share a kv head, got {q_heads} query heads over {kv_heads}."
        )
    if page_size > MAX_PAGE_SIZE:
        raise ValueError(f"`page_size` must be at most {MAX_PAGE_SIZE} on a GPU, got {page_size}.")
    if max_tokens > MAX_PAGES * page_size:
        raise ValueError(
            f"With pages of {page_size} tokens, rows may have up to {MAX_PAGES * page_size} tokens, got {max_tokens}. "
            "Use a larger page or shorter sequences."
        )


class PagedDecoder:
    """
    Decode steps of block-sparse attention (section 3.1 of the
    [Sparrow paper](https://huggingface.co/papers/2606.08446)) on a GPU. The reference is
    [`sparse_decode_attention`][sparrow_attention.sparse_decode_attention].

    A step launches three kernels, which choose the pages, attend to them and merge the partial results. The first also
    writes new keys and values into the cache, when a step is given some. A step allocates nothing, never waits for
    the device, and reads lengths and budgets there, so it may be captured in a CUDA graph and replayed while
    `seq_lens`, `block_table`, `dense_until`, the top-k table or `set_reserved` change. One decoder serves all layers
    of a model, one after the other.

    Args:
        max_rows (`int`):
            Most rows of a step.
        max_tokens (`int`):
            Longest row, in tokens.
        q_heads (`int`):
            Query heads.
        kv_heads (`int`):
            Key-value heads.
        head_dim (`int`):
            Dimensions of a head: 64, 80, 96, 128 or 256.
        page_size (`int`, *optional*, defaults to `16`):
            Tokens in a page: 16, 32 or 64.
        page_score (`str`, *optional*, defaults to `"mean_query"`):
            `"mean_query"` or `"group_softmax"`.
        landmarks_per_page (`int`, *optional*, defaults to `1`):
            Landmarks of a page: 1, 2 or 4.
        sink_pages (`int`, *optional*, defaults to `1`):
            Pages kept at the start of the context.
        recent_pages (`int`, *optional*, defaults to `2`):
            Pages kept at its end, the partial one included.
        device (`torch.device`, *optional*):
            Where the buffers live.

    Attributes:
        totals (`torch.Tensor` of shape `[2, max_rows, kv_heads]`):
            int64: pages kept, and pages cached, by the rows longer than `dense_until`, summed over all steps.

    Raises:
        ValueError: for a shape that the kernels do not support.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int = 16,
        page_score: str = "mean_query",
        landmarks_per_page: int = 1,
        sink_pages: int = 1,
        recent_pages: int = 2,
        device: torch.device | str | None = None,
    ):
        check_decoder(max_tokens, q_heads, kv_heads, head_dim, page_size)
        check_recipe(page_size, page_score, landmarks_per_page, sink_pages, recent_pages)
        group, max_pages = q_heads // kv_heads, -(-max_tokens // page_size)
        self._heads = (q_heads, kv_heads, head_dim)
        self._landmarks_per_page = landmarks_per_page
        self.page_size = page_size
        self.softmax = page_score == "group_softmax"
        self.max_rows = max_rows
        # A step with few rows splits them more, so each count of rows has its own need of scratch.
        parts = max(rows * q_heads * num_splits(rows, kv_heads) for rows in range(1, max_rows + 1))
        queries = group if self.softmax else 1

        def buffer(*shape, dtype):
            return torch.zeros(shape, dtype=dtype, device=device)

        self._scores = buffer(max_rows, kv_heads, queries, max_pages, dtype=torch.float32)
        self._kept = buffer(max_rows, kv_heads, max_pages, dtype=torch.int32)
        self._counts = buffer(max_rows, kv_heads, dtype=torch.int32)
        self._partial_output = buffer(parts, head_dim, dtype=torch.float32)
        self._partial_lse = buffer(parts, dtype=torch.float32)
        self._never_dense = buffer(max_rows, dtype=torch.int32)
        self._reserved = buffer(2, dtype=torch.int32)
        self._arrived = buffer(max_rows, kv_heads, dtype=torch.int32)
        overlap = can_overlap(self._arrived.device)
        self._signals = buffer(2, max_rows, kv_heads, dtype=torch.int32) if overlap else None
        self.totals = buffer(2, max_rows, kv_heads, dtype=torch.int64)
        self.set_reserved(sink_pages, recent_pages)

    def set_reserved(self, sink_pages: int, recent_pages: int) -> None:
        """Change the pages kept at the start and at the end of the context, from the next step on."""
        self._reserved.copy_(torch.tensor([sink_pages, recent_pages], dtype=torch.int32))

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        top_k_table: torch.Tensor,
        landmarks: torch.Tensor,
        *,
        output: torch.Tensor,
        dense_until: torch.Tensor | None = None,
        scale: float | None = None,
        append: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """
        One step.

        Args:
            query (`torch.Tensor` of shape `[rows, q_heads, head_dim]`):
                Queries, after the rotary embedding.
            key_cache, value_cache (`torch.Tensor` of shape `[blocks, kv_heads, block_size, head_dim]`):
                Keys and values. The block size is any multiple of the page size. Fastest where the tokens of a head
                follow one another.
            block_table (`torch.Tensor` of shape `[rows, max_blocks]`):
                int32: cache blocks of each row, in order.
            seq_lens (`torch.Tensor` of shape `[rows]`):
                int32: cached tokens, the query's own included. Rows of length 0 give zeros.
            top_k_table (`torch.Tensor` of shape `[n]`):
                int32: candidate pages to keep for a row of `P` pages, at index `P`; the last entry stands for all
                longer rows. A row whose candidates are no more keeps all its pages.
            landmarks (`torch.Tensor`):
                Landmarks as [`update_landmarks`][sparrow_attention.update_landmarks] writes them.
            output (`torch.Tensor` of shape `[rows, q_heads, head_dim]`):
                Written and returned.
            dense_until (`torch.Tensor` of shape `[rows]`, *optional*):
                int32: rows of up to this length keep all their pages.
            scale (`float`, *optional*):
                Factor of the attention logits, by default `head_dim**-0.5`.
            append (`tuple` of `torch.Tensor`, *optional*):
                `key` and `value`, both of shape `[rows, kv_heads, head_dim]`, and `slot_mapping`, of shape `[rows]`:
                what each row's newest token adds to the cache, and its slot there (block times block size plus
                offset), negative for rows without one. Keys, values and the landmarks of the pages that they complete
                are written before the row attends. By default the cache holds them already.
        """
        q_heads, kv_heads, head_dim = self._heads
        check_shape("query", query, (None, q_heads, head_dim), "[rows, q_heads, head_dim]")
        rows = query.shape[0]
        cache_shape = (None, kv_heads, None, head_dim)
        check_shape("key_cache", key_cache, cache_shape, "[blocks, kv_heads, block_size, head_dim]")
        check_shape("value_cache", value_cache, tuple(key_cache.shape), "[blocks, kv_heads, block_size, head_dim]")
        blocks, _, block_size, _ = key_cache.shape
        landmarks_shape = (blocks, kv_heads, block_size // self.page_size, self._landmarks_per_page, head_dim)
        layout = "[blocks, kv_heads, block_size / page_size, landmarks_per_page, head_dim]"
        check_shape("landmarks", landmarks, landmarks_shape, layout)
        check_shape("output", output, tuple(query.shape), "[rows, q_heads, head_dim]")
        check_shape("seq_lens", seq_lens, (rows,), "[rows]")
        check_shape("block_table", block_table, (rows, None), "[rows, max_blocks]")
        check_shape("top_k_table", top_k_table, (None,), "[n]")
        if dense_until is not None:
            check_shape("dense_until", dense_until, (rows,), "[rows]")
        check_integers(seq_lens=seq_lens, block_table=block_table, top_k_table=top_k_table, dense_until=dense_until)
        if append is not None:
            key, value, slot_mapping = append
            check_shape("key", key, (rows, kv_heads, head_dim), "[rows, kv_heads, head_dim]")
            check_shape("value", value, (rows, kv_heads, head_dim), "[rows, kv_heads, head_dim]")
            check_shape("slot_mapping", slot_mapping, (rows,), "[rows]")
            check_integers(slot_mapping=slot_mapping)
            append = (key, value, key_cache, value_cache, slot_mapping)
        if rows > self.max_rows:
            raise ValueError(f"A step of {rows} rows does not fit in the decoder's {self.max_rows}.")
        if key_cache.stride() != value_cache.stride():
            raise ValueError("`key_cache` and `value_cache` must have the same strides.")
        if not rows:
            return output
        budget = (top_k_table, self._reserved, self._never_dense[:rows] if dense_until is None else dense_until)
        scores, kept, counts = self._scores[:rows], self._kept[:rows], self._counts[:rows]
        signals = None if self._signals is None else tuple(self._signals[:, :rows])
        try:
            choose_pages(
                query,
                landmarks,
                block_table,
                seq_lens,
                budget,
                scores,
                kept,
                counts,
                self.totals,
                page_size=self.page_size,
                softmax=self.softmax,
                append=append,
                arrived=self._arrived,
                ready=None if signals is None else signals[0],
            )
            attend_to_kept_pages(
                query,
                key_cache,
                value_cache,
                block_table,
                seq_lens,
                kept,
                counts,
                self._partial_output,
                self._partial_lse,
                output,
                page_size=self.page_size,
                scale=head_dim**-0.5 if scale is None else scale,
                signals=None if signals is None else (*signals, num_ready(append)),
            )
        except BaseException:
            # A step that an interrupt cuts off between its launches must not tell the next one that all is ready.
            if self._signals is not None:
                self._signals.zero_()
            raise
        return output
