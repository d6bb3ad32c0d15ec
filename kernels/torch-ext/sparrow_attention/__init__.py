"""
Block-sparse attention over a paged KV cache, with page selection by landmark keys: the sparse rollouts of the
[Sparrow paper](https://huggingface.co/papers/2606.08446).

- [`page_landmarks`]: the mean keys that stand for a page when pages are scored.
- [`select_pages`]: which pages each kv head keeps for one query per row.
- [`sparse_decode_attention`]: one decode step over a paged cache.
- [`sparse_attention`]: whole sequences, differentiable, for training.
"""

from .reference import page_landmarks, select_pages, sparse_attention, sparse_decode_attention


__all__ = ["page_landmarks", "select_pages", "sparse_attention", "sparse_decode_attention"]
