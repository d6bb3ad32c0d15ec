"""
Landmarks and page selection in plain torch.

Selections must not depend on where a page lies in a tensor, or two pages with equal scores would not stay tied. Every
sum that decides between pages therefore adds its terms one after the other: `torch.sum` changes the order of its
additions from column to column.
"""

from __future__ import annotations

import torch

from .validation import (
    check_heads,
    check_integers,
    check_landmarks_per_page,
    check_page_size,
    check_recipe,
    check_shape,
)


def page_landmarks(
    key_pages: torch.Tensor, landmarks_per_page: int = 1, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """
    Mean keys that stand for full pages when pages are scored (section 3.1 of the
    [Sparrow paper](https://huggingface.co/papers/2606.08446), which has one per page).

    A page is cut into `landmarks_per_page` runs of consecutive tokens, and each run gives the mean of its keys, summed
    in float32.

    Args:
        key_pages (`torch.Tensor` of shape `[..., page_size, head_dim]`):
            Keys of full pages, after the rotary embedding.
        landmarks_per_page (`int`, *optional*, defaults to `1`):
            Runs that a page is cut into: 1, 2 or 4.
        dtype (`torch.dtype`, *optional*):
            Type to store, by default that of the keys. Means beyond the range of an 8-bit type are stored as its
            largest value.

    Returns:
        `torch.Tensor` of shape `[..., landmarks_per_page, head_dim]`.

    Raises:
        ValueError: for a page size that is not a power of two or below 16, and for other numbers of landmarks.
    """
    if key_pages.ndim < 2:
        raise ValueError(f"`key_pages` must have shape [..., page_size, head_dim], got {list(key_pages.shape)}.")
    page_size = key_pages.shape[-2]
    check_page_size(page_size)
    check_landmarks_per_page(landmarks_per_page)
    dtype = dtype or key_pages.dtype
    run_tokens = page_size // landmarks_per_page
    runs = key_pages.float().unflatten(-2, (landmarks_per_page, run_tokens))
    landmarks = sum(runs.unbind(-2)) / run_tokens
    if dtype.itemsize == 1:
        # Not every version of torch saturates in a cast to float8_e4m3fn; others make NaN of what it cannot hold.
        landmarks = landmarks.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return landmarks.to(dtype)


def select_pages(
    query: torch.Tensor,
    landmarks: torch.Tensor,
    seq_lens: torch.Tensor,
    top_k: torch.Tensor,
    *,
    page_size: int = 16,
    page_score: str = "mean_query",
    sink_pages: int = 1,
    recent_pages: int = 2,
) -> torch.Tensor:
    """
    Pages that each kv head keeps for one query per row (section 3.1 of the
    [Sparrow paper](https://huggingface.co/papers/2606.08446)).

    A row with `L` cached tokens covers `P = ceil(L / page_size)` pages. The first `sink_pages` and the last
    `recent_pages` are kept; of the pages between them, the candidates, the `top_k` with the highest float32 scores
    are, and of candidates with equal scores those with the lower index.

    Args:
        query (`torch.Tensor` of shape `[rows, q_heads, head_dim]`):
            Queries, after the rotary embedding.
        landmarks (`torch.Tensor` of shape `[rows, kv_heads, pages, landmarks_per_page, head_dim]`):
            Landmarks of each row's pages, see [`page_landmarks`]. Those of pages that are no candidates may hold
            anything, NaN included.
        seq_lens (`torch.Tensor` of shape `[rows]`):
            Cached tokens `L`, the query's own included; 0 for rows that only fill the batch up.
        top_k (`torch.Tensor` of shape `[rows]`):
            Candidates to keep. A row whose candidates are no more than this keeps all its pages.
        page_size (`int`, *optional*, defaults to `16`):
            Tokens in a page: a power of two, at least 16.
        page_score (`str`, *optional*, defaults to `"mean_query"`):
            `"mean_query"` (the paper's) is the dot product of the landmark with the mean of the group's query heads.
            `"group_softmax"` takes for each query head a softmax over the candidates of `q · landmark / sqrt(d)`, the
            logit of a page with several landmarks being their log-sum-exp, and sums over the group.
        sink_pages (`int`, *optional*, defaults to `1`):
            Pages kept at the start of the context.
        recent_pages (`int`, *optional*, defaults to `2`):
            Pages kept at its end, the partial one included. At least 1.

    Returns:
        `torch.Tensor` of shape `[rows, kv_heads, pages]`, bool: the kept pages, reserved ones included.

    Raises:
        ValueError: for an unknown page score, several landmarks with `"mean_query"`, and sizes that do not fit.
    """
    check_shape("query", query, (None, None, None), "[rows, q_heads, head_dim]")
    rows, q_heads, head_dim = query.shape
    layout = "[rows, kv_heads, pages, landmarks_per_page, head_dim]"
    check_shape("landmarks", landmarks, (rows, None, None, None, head_dim), layout)
    check_shape("seq_lens", seq_lens, (rows,), "[rows]")
    check_shape("top_k", top_k, (rows,), "[rows]")
    check_integers(seq_lens=seq_lens, top_k=top_k)
    kv_heads, pages, landmarks_per_page = landmarks.shape[1:4]
    check_recipe(page_size, page_score, landmarks_per_page, sink_pages, recent_pages)
    check_heads(q_heads, kv_heads)
    num_pages = count_pages(seq_lens, page_size)
    if rows and int(num_pages.max()) > pages:
        raise ValueError(
            f"`landmarks` has {pages} pages, but the longest row covers {int(num_pages.max())} pages of {page_size}."
        )
    kept = keep_pages(
        query.view(rows, kv_heads, 1, q_heads // kv_heads, head_dim),
        landmarks,
        num_pages[:, None],
        top_k[:, None],
        page_score=page_score,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
    )
    return kept.squeeze(2)


def count_pages(seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (seq_lens + page_size - 1) // page_size


@torch.no_grad()
def keep_pages(
    query: torch.Tensor,
    landmarks: torch.Tensor,
    num_pages: torch.Tensor,
    top_k: torch.Tensor,
    *,
    page_score: str,
    sink_pages: int,
    recent_pages: int,
) -> torch.Tensor:
    """
    [`select_pages`] for several queries per row, without its checks.

    Args:
        query (`torch.Tensor` of shape `[rows, kv_heads, queries, group, head_dim]`):
            Queries, those of a kv head's group side by side.
        landmarks (`torch.Tensor` of shape `[rows, kv_heads, pages, landmarks_per_page, head_dim]`):
            Landmarks that all queries of the row share.
        num_pages (`torch.Tensor` of shape `[rows, queries]`):
            Pages that each query covers.
        top_k (`torch.Tensor` of shape `[rows, queries]`):
            Candidates that each query keeps.

    Returns:
        `torch.Tensor` of shape `[rows, kv_heads, queries, pages]`, bool.
    """
    rows, kv_heads, queries = query.shape[:3]
    pages = landmarks.shape[2]
    page = torch.arange(pages, device=query.device)
    num_pages, top_k = num_pages[:, None, :, None], top_k[:, None, :, None]
    covered = page < num_pages
    candidates = (page >= sink_pages) & (page < num_pages - recent_pages)
    keep_all = top_k >= num_pages - recent_pages - sink_pages
    if keep_all.all():
        return covered.expand(rows, kv_heads, queries, pages)

    # Mixed precision would score in bfloat16.
    with torch.autocast(query.device.type, enabled=False):
        scores = _page_scores(query.float(), landmarks.float(), candidates, page_score)
    scores = scores.masked_fill(~candidates, -torch.inf)
    most = max(1, int(top_k.masked_fill(keep_all, 0).max()))
    rank = top_k.clamp(1, most).long() - 1
    threshold = scores.topk(most, dim=-1).values.gather(-1, rank.expand(rows, kv_heads, queries, 1))
    # Written so that a NaN score is above every threshold: a page with broken keys is kept, and shows in the output.
    above = ~(scores <= threshold)
    tied = (scores == threshold) & candidates
    room = top_k - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1) <= room))
    return covered & (keep_all | ~candidates | chosen)


def _page_scores(
    query: torch.Tensor, landmarks: torch.Tensor, candidates: torch.Tensor, page_score: str
) -> torch.Tensor:
    """Scores `[rows, kv_heads, queries, pages]` of the candidates; what other pages get has no meaning."""
    group, head_dim = query.shape[3:]
    pages, landmarks_per_page = landmarks.shape[2:4]
    # All landmarks of a head as the columns of one matrix.
    columns = landmarks.flatten(2, 3).transpose(-1, -2)
    if page_score == "mean_query":
        # The sum orders the pages as the mean does, and is exact where a division by 3, 5 or 7 would round.
        return query.sum(3) @ columns
    logits = (query.flatten(2, 3) @ columns) * head_dim**-0.5
    logits = logits.unflatten(-1, (pages, landmarks_per_page)).unflatten(2, (-1, group))
    logits = logits.masked_fill(~candidates[:, :, :, None, :, None], -torch.inf)
    # A page's share is the sum of its runs' shares, which is the softmax of their log-sum-exp.
    shares = logits.flatten(-2).softmax(-1).unflatten(-1, (pages, landmarks_per_page))
    return sum(sum(shares.unbind(-1)).unbind(3))
