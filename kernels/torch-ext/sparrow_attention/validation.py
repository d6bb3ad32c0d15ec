"""Checks of what callers pass, shared by the implementations."""

from __future__ import annotations

import torch


PAGE_SCORES = ("mean_query", "group_softmax")
LANDMARKS_PER_PAGE = (1, 2, 4)


def check_page_size(page_size: int) -> None:
    if not isinstance(page_size, int) or page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f"`page_size` must be a power of two, at least 16, got {page_size!r}.")


def check_landmarks_per_page(landmarks_per_page: int) -> None:
    if landmarks_per_page not in LANDMARKS_PER_PAGE:
        raise ValueError(f"`landmarks_per_page` must be one of {LANDMARKS_PER_PAGE}, got {landmarks_per_page!r}.")


def check_recipe(page_size: int, page_score: str, landmarks_per_page: int, sink_pages: int, recent_pages: int) -> None:
    """Refuses a page-selection recipe that has no meaning."""
    check_page_size(page_size)
    check_landmarks_per_page(landmarks_per_page)
    if page_score not in PAGE_SCORES:
        raise ValueError(f"`page_score` must be one of {PAGE_SCORES}, got {page_score!r}.")
    if page_score == "mean_query" and landmarks_per_page != 1:
        raise ValueError(
            f'`page_score="mean_query"` scores one landmark per page, got {landmarks_per_page}. Use '
            '`page_score="group_softmax"` for several.'
        )
    if sink_pages < 0:
        raise ValueError(f"`sink_pages` must be at least 0, got {sink_pages}.")
    if recent_pages < 1:
        raise ValueError(
            f"`recent_pages` must be at least 1, got {recent_pages}: a query attends to its own page, which may be "
            "partial and then has no landmark to be scored by."
        )


def check_heads(q_heads: int, kv_heads: int) -> None:
    if kv_heads == 0 or q_heads % kv_heads:
        raise ValueError(
            f"The number of query heads must be a multiple of the number of kv heads, got {q_heads} and {kv_heads}."
        )


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int | None, ...], layout: str) -> None:
    """Compares a shape with the expected one, in which `None` stands for any size; `layout` names the axes."""
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(want not in (None, got) for want, got in zip(expected, shape)):
        sizes = ", ".join("?" if want is None else str(want) for want in expected)
        raise ValueError(f"`{name}` must have shape {layout} = [{sizes}], got {list(shape)}.")


def check_integers(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            raise ValueError(f"`{name}` must hold integers, got {tensor.dtype}.")
