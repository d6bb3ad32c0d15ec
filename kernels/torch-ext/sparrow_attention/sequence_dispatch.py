"""When whole sequences are left to the Triton kernels."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch


KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
# No tensor core multiplies float32: longer vectors would not fit into registers.
MAX_FLOAT32_HEAD_DIM = 128
# Tiles have at least the keys of a page.
MAX_PAGE_SIZE = 64
# Scores of a query's pages are held in registers.
MAX_PAGES = 8192
# Major compute capabilities with the shared memory that the tiles take: Hopper and its successors for data centers.
CAPABILITIES = (9, 10)


def has_sequence_kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, page_size: int, scale: float | None
) -> bool:
    """Whether the kernels can do what [`sparse_attention`][sparrow_attention.sparse_attention] is asked for."""
    if any(x.device.type != "cuda" or x.dtype not in KERNEL_DTYPES for x in (query, key, value)):
        return False
    if not (query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled("cuda")):
        return False
    tokens, head_dim = query.shape[2:]
    if key.shape[2] != tokens:
        return False
    longest = MAX_FLOAT32_HEAD_DIM if query.dtype == torch.float32 else MAX_HEAD_DIM
    fits = head_dim <= longest and page_size <= MAX_PAGE_SIZE and tokens <= MAX_PAGES * page_size
    return fits and (scale is None or scale > 0) and _runs_kernels(query.device)


@lru_cache
def _runs_kernels(device: torch.device) -> bool:
    if torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in CAPABILITIES
