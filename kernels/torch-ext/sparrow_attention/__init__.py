"""
Block-sparse attention over a paged KV cache, with page selection by landmark keys: the sparse rollouts of the
[Sparrow paper](https://huggingface.co/papers/2606.08446).

- [`page_landmarks`]: the mean keys that stand for a page when pages are scored.
- [`select_pages`]: which pages each kv head keeps for one query per row.
- [`sparse_decode_attention`]: one decode step over a paged cache.
- [`sparse_attention`]: whole sequences, differentiable, for training; on data-center GPUs in Triton kernels.

On a GPU, in Triton kernels that are imported on first use:

- `PagedDecoder`: decode steps over a paged cache.
- `update_landmarks`: landmarks of the cache's pages as they fill up.
"""

from __future__ import annotations

from importlib import import_module

from .reference import page_landmarks, select_pages, sparse_attention, sparse_decode_attention


# What can be imported everywhere: a star import must not need Triton.
__all__ = ["page_landmarks", "select_pages", "sparse_attention", "sparse_decode_attention"]

_TRITON_MODULE_OF = {"PagedDecoder": ".paged_decode", "update_landmarks": ".paged_landmarks"}


def __getattr__(name: str):
    if name not in _TRITON_MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_TRITON_MODULE_OF[name], __name__)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        raise ImportError(
            f"`{name}` needs Triton, which is not installed. Install it with `pip install triton`, or install a CUDA "
            "build of PyTorch, which brings it along."
        ) from error
    return getattr(module, name)
