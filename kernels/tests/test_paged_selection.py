from dataclasses import dataclass

import numpy as np
import pytest
import torch
from paged_batch import KERNEL_DTYPES, exact_page_scores


RECIPES = [("mean_query", 1), ("group_softmax", 1), ("group_softmax", 2), ("group_softmax", 4)]

# Scores are sums of float32 products in an order of the hardware's choice. On multiples of 1/4 the mean query's are
# exact; where numbers are rounded, pages may be exchanged whose scores, of order 1, are closer than this.
CLOSE_SCORES = 1e-5

# What unwritten integers hold: no page, and no count.
UNWRITTEN = -12345


@dataclass
class Rows:
    """Queries, and the landmarks of each row's pages `[rows, kv_heads, pages, landmarks_per_page, head_dim]`."""

    query: torch.Tensor
    landmarks: torch.Tensor
    seq_lens: torch.Tensor


def make_rows(
    lengths,
    *,
    kv_heads=2,
    group=2,
    head_dim=64,
    landmarks_per_page=1,
    page_size=16,
    dtype=torch.float32,
    dyadic=False,
    seed=0,
):
    """With `dyadic=True`, multiples of 1/4 and three landmarks that all pages share, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    pages = max(1, -(-max(lengths) // page_size))

    def numbers(*shape):
        if dyadic:
            return (torch.randint(-4, 5, shape, generator=generator) / 4).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    landmarks = numbers(len(lengths), kv_heads, pages, landmarks_per_page, head_dim)
    if dyadic:
        which = torch.randint(0, 3, (len(lengths), pages), generator=generator)
        landmarks = torch.stack([row[:, page] for row, page in zip(landmarks, which, strict=True)])
    query = numbers(len(lengths), kv_heads * group, head_dim)
    return Rows(query, landmarks, torch.tensor(lengths, dtype=torch.int32))


class Selection:
    """Scores and selects with the kernels, over a paged cache in which everything that no one may read is NaN."""

    def __init__(self, kernels, device, rows, *, page_size=16, pages_per_block=1, page_score="mean_query"):
        self.kernels, self.device, self.rows = kernels.paged_selection, device, rows
        self.page_size, self.pages_per_block, self.page_score = page_size, pages_per_block, page_score
        num_rows, kv_heads, pages = rows.landmarks.shape[:3]
        self.num_pages = (-(-rows.seq_lens // page_size)).tolist()
        generator = np.random.default_rng(pages)
        blocks = -(-pages // pages_per_block)
        # Unused entries of a block table are whatever was in memory.
        self.block_table = generator.choice([-1, 10**6], (num_rows, blocks + 1)).astype(np.int32)
        free = generator.permutation(num_rows * blocks).astype(np.int32)
        for row, count in enumerate(self.num_pages):
            used = -(-count // pages_per_block)
            self.block_table[row, :used], free = free[:used], free[used:]
        self.totals = torch.zeros(2, num_rows, kv_heads, dtype=torch.int64, device=device)

    def cache_page(self, row, page):
        return self.block_table[row, page // self.pages_per_block] * self.pages_per_block + page % self.pages_per_block

    def __call__(self, top_k_table, *, sink_pages=1, recent_pages=2, dense_until=None, max_pages=None):
        """
        Kept pages `[rows][kv_heads]`, as lists in the order of the kernel, of rows that keep some; a row that keeps
        them all writes no list, which is checked here.
        """
        rows, device = self.rows, self.device
        num_rows, kv_heads, pages, landmarks_per_page, head_dim = rows.landmarks.shape
        group = rows.query.shape[1] // kv_heads
        max_pages = max_pages or pages
        shape = (num_rows * self.block_table.shape[1], kv_heads, self.pages_per_block, landmarks_per_page, head_dim)
        landmarks = torch.full(shape, torch.nan, dtype=rows.landmarks.dtype)
        for row, count in enumerate(self.num_pages):
            for page in range(sink_pages, count - recent_pages):
                block, place = divmod(int(self.cache_page(row, page)), self.pages_per_block)
                landmarks[block, :, place] = rows.landmarks[row, :, page]
        softmax = self.page_score == "group_softmax"
        scores = torch.full((num_rows, kv_heads, group if softmax else 1, max_pages), torch.nan, device=device)
        kept = torch.full((num_rows, kv_heads, max_pages), UNWRITTEN, dtype=torch.int32, device=device)
        counts = torch.full((num_rows, kv_heads), UNWRITTEN, dtype=torch.int32, device=device)
        dense_until = torch.zeros(num_rows, dtype=torch.int32) if dense_until is None else torch.tensor(dense_until)
        budget = (
            torch.tensor(top_k_table, dtype=torch.int32, device=device),
            torch.tensor([sink_pages, recent_pages], dtype=torch.int32, device=device),
            dense_until.int().to(device),
        )
        block_table = torch.tensor(self.block_table, device=device)
        seq_lens = rows.seq_lens.to(device)
        self.kernels.choose_pages(
            rows.query.to(device),
            landmarks.to(device),
            block_table,
            seq_lens,
            budget,
            scores,
            kept,
            counts,
            self.totals,
            page_size=self.page_size,
            softmax=softmax,
        )
        return self._read_lists(kept.cpu(), counts.cpu())

    def _read_lists(self, kept, counts):
        lists = []
        for row, num_pages in enumerate(self.num_pages):
            page_of = {int(self.cache_page(row, page)): page for page in range(num_pages)}
            lists.append([])
            for head, count in enumerate(counts[row].tolist()):
                assert (kept[row, head, count:] == UNWRITTEN).all()
                if count == num_pages:
                    assert (kept[row, head] == UNWRITTEN).all()
                    lists[-1].append([*range(num_pages)])
                else:
                    lists[-1].append([page_of[page] for page in kept[row, head, :count].tolist()])
        return lists


def reference_lists(sparrow_attention, selection, top_k_table, *, sink_pages=1, recent_pages=2, dense_until=None):
    rows = selection.rows
    top_k = [top_k_table[min(pages, len(top_k_table) - 1)] for pages in selection.num_pages]
    for row, length in enumerate(dense_until or []):
        if rows.seq_lens[row] <= length:
            top_k[row] = selection.num_pages[row]
    kept = sparrow_attention.select_pages(
        rows.query,
        rows.landmarks,
        rows.seq_lens,
        torch.tensor(top_k),
        page_size=selection.page_size,
        page_score=selection.page_score,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
    )
    return [[head.nonzero().flatten().tolist() for head in row] for row in kept]


def exact_scores(selection, row, head, candidates):
    rows = selection.rows
    group = rows.query.shape[1] // rows.landmarks.shape[1]
    query = rows.query[row, head * group : (head + 1) * group]
    return exact_page_scores(query, rows.landmarks[row, head, candidates], selection.page_score)


def assert_same_lists(sparrow_attention, selection, top_k_table, **budget):
    """
    Compares the kernels' lists with the reference's, exactly where scores are exact; returns the kernels' lists and
    how many were chosen by score.
    """
    exact = selection.page_score == "mean_query" and (selection.rows.query * 4 % 1 == 0).all()
    expected = reference_lists(sparrow_attention, selection, top_k_table, **budget)
    lists = selection(top_k_table, **budget)
    by_score = 0
    for row, num_pages in enumerate(selection.num_pages):
        for head, (pages, expected_pages) in enumerate(zip(lists[row], expected[row], strict=True)):
            by_score += len(pages) < num_pages
            assert pages == sorted(set(pages))
            if exact or pages == expected_pages:
                assert pages == expected_pages, f"row {row} of {num_pages} pages, head {head}"
                continue
            candidates = [*range(budget.get("sink_pages", 1), num_pages - budget.get("recent_pages", 2))]
            scores = dict(zip(candidates, exact_scores(selection, row, head, candidates), strict=True))
            exchanged = set(pages) ^ set(expected_pages)
            assert len(pages) == len(expected_pages) and exchanged <= scores.keys()
            values = [scores[page] for page in exchanged]
            assert 0 < max(values) - min(values) < CLOSE_SCORES, f"row {row} of {num_pages} pages, head {head}"
    return lists, by_score


@pytest.mark.parametrize(("page_score", "landmarks_per_page"), RECIPES)
@pytest.mark.parametrize(
    ("page_size", "pages_per_block", "dyadic"), [(16, 1, True), (16, 4, False), (32, 2, True), (64, 1, False)]
)
def test_equal_to_the_reference(
    sparrow_attention, triton_kernels, device, page_size, pages_per_block, dyadic, page_score, landmarks_per_page
):
    # From no candidates to several tiles of scores, with partial last pages; every row has a budget of its own.
    lengths = [pages * page_size - pages * 5 % page_size for pages in (4, 11, 70 // landmarks_per_page)]
    rows = make_rows(
        [*lengths, 0], dyadic=dyadic, landmarks_per_page=landmarks_per_page, page_size=page_size, seed=page_size
    )
    selection = Selection(
        triton_kernels, device, rows, page_size=page_size, pages_per_block=pages_per_block, page_score=page_score
    )
    lists, by_score = assert_same_lists(sparrow_attention, selection, [pages % 6 for pages in range(71)])
    assert by_score >= 4
    assert lists[-1] == [[], []]


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 9, 16])
def test_groups(sparrow_attention, triton_kernels, device, group, page_score):
    rows = make_rows([16 * 40], group=group, seed=group)
    selection = Selection(triton_kernels, device, rows, page_score=page_score)
    lists, by_score = assert_same_lists(sparrow_attention, selection, [6])
    assert by_score == 2 and lists[0][0] != lists[0][1]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("page_score", "landmarks_per_page"), [RECIPES[0], RECIPES[2]])
def test_head_dims(sparrow_attention, triton_kernels, device, head_dim, page_score, landmarks_per_page):
    rows = make_rows([16 * 40], head_dim=head_dim, landmarks_per_page=landmarks_per_page, seed=head_dim)
    selection = Selection(triton_kernels, device, rows, page_score=page_score)
    assert assert_same_lists(sparrow_attention, selection, [9])[1] == 2


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("landmark_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_types(sparrow_attention, triton_kernels, device, page_score, landmark_dtype, dtype):
    rows = make_rows([16 * 40, 16 * 57], dtype=dtype, dyadic=True, seed=1)
    rows.landmarks = rows.landmarks.to(landmark_dtype or dtype)
    selection = Selection(triton_kernels, device, rows, page_score=page_score)
    assert assert_same_lists(sparrow_attention, selection, [9])[1] == 4


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
@pytest.mark.parametrize(("sink_pages", "recent_pages"), [(0, 1), (0, 2), (1, 5), (3, 1), (50, 2)])
def test_reserved_pages(sparrow_attention, triton_kernels, device, sink_pages, recent_pages, page_score):
    rows = make_rows([17, 16 * 5, 16 * 6 + 3, 16 * 30 + 1], dyadic=True, seed=2)
    selection = Selection(triton_kernels, device, rows, page_score=page_score)
    budget = {"sink_pages": sink_pages, "recent_pages": recent_pages}
    assert_same_lists(sparrow_attention, selection, [2], **budget)


def test_budgets_at_the_edges(sparrow_attention, triton_kernels, device):
    # 37 candidates: none kept, one, all but one, exactly all, and more than there are.
    rows = make_rows([16 * 40], dyadic=True, seed=3)
    selection = Selection(triton_kernels, device, rows)
    for top_k in (0, 1, 36, 37, 2**30):
        lists, _ = assert_same_lists(sparrow_attention, selection, [top_k])
        assert [len(pages) for pages in lists[0]] == [min(40, top_k + 3)] * 2


def test_the_table_may_change_between_layers_and_steps(sparrow_attention, triton_kernels, device):
    rows = make_rows([16 * pages - 7 for pages in (4, 12, 33)], dyadic=True, seed=4)
    selection = Selection(triton_kernels, device, rows)
    # The last entry stands for all longer rows.
    for table in ([3], [0, 1, 2, 3, 4, 5], [pages // 3 for pages in range(200)], [1000]):
        lists, _ = assert_same_lists(sparrow_attention, selection, table)
        for pages, row in zip(selection.num_pages, lists, strict=True):
            assert len(row[0]) == min(pages, table[min(pages, len(table) - 1)] + 3)
    assert_same_lists(sparrow_attention, selection, [3], sink_pages=0, recent_pages=5)


def test_rows_up_to_dense_until_keep_all_pages(sparrow_attention, triton_kernels, device):
    rows = make_rows([160, 161, 160, 500, 0, 500, 0], dyadic=True, seed=5)
    selection = Selection(triton_kernels, device, rows)
    dense_until = [160, 160, 159, 10**6, 0, 0, 7]
    lists, _ = assert_same_lists(sparrow_attention, selection, [2], dense_until=dense_until)
    counts = [len(row[0]) for row in lists]
    assert counts == [10, 5, 5, 32, 0, 5, 0]
    # Kept and cached pages, of the rows beyond their `dense_until` alone.
    assert selection.totals[0].tolist() == [[0, 0], [5, 5], [5, 5], [0, 0], [0, 0], [5, 5], [0, 0]]
    assert selection.totals[1].tolist() == [[0, 0], [11, 11], [10, 10], [0, 0], [0, 0], [32, 32], [0, 0]]
    # A further step is added to them.
    selection([3])
    assert selection.totals[0, :, 0].tolist() == [6, 11, 11, 6, 0, 11, 0]
    assert selection.totals[1, :, 0].tolist() == [10, 22, 20, 32, 0, 64, 0]


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_a_page_with_broken_landmarks_is_kept(triton_kernels, device, page_score):
    # By the head whose landmark it is; otherwise a broken page would go unnoticed.
    rows = make_rows([16 * 30], dyadic=True, seed=6)
    rows.landmarks[0, 1, 17, 0, 5] = torch.nan
    selection = Selection(triton_kernels, device, rows, page_score=page_score)
    first, third = selection([1]), selection([3])
    assert first[0][1] == [0, 17, 28, 29]
    # The other head, and the healthy pages of this one, are chosen as if that page were the worst.
    rows.landmarks[0, 1, 17] = -100 * rows.query[0, 2:].sum(0).sign()
    assert first[0][0] == selection([1])[0][0]
    assert third[0][1] == sorted([*selection([2])[0][1], 17])


def select_from_scores(triton_kernels, device, scores, num_pages, top_k_table, *, softmax=False, totals=None):
    """Kept pages by scores `[rows, kv_heads, queries, max_pages]` of which pages that are no candidates have none."""
    num_rows, kv_heads, _, max_pages = scores.shape
    page = torch.arange(max_pages)
    counts_of_rows = torch.tensor(num_pages)[:, None]
    candidates = (page >= 1) & (page < counts_of_rows - 2)
    scores = scores.masked_fill(~candidates[:, None, None], torch.nan)
    kept = torch.full((num_rows, kv_heads, max_pages), UNWRITTEN, dtype=torch.int32, device=device)
    counts = torch.full((num_rows, kv_heads), UNWRITTEN, dtype=torch.int32, device=device)
    triton_kernels.paged_selection.select_scored_pages(
        scores.to(device),
        page.int().expand(num_rows, -1).contiguous().to(device),
        torch.tensor([16 * count for count in num_pages], dtype=torch.int32, device=device),
        (
            torch.tensor(top_k_table, dtype=torch.int32, device=device),
            torch.tensor([1, 2], dtype=torch.int32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
        ),
        kept,
        counts,
        torch.zeros(2, num_rows, kv_heads, dtype=torch.int64, device=device),
        page_size=16,
        pages_per_block=1,
        softmax=softmax,
    )
    kept, counts = kept.cpu(), counts.cpu()
    assert (kept.masked_fill(page < counts[..., None], UNWRITTEN) == UNWRITTEN).all()
    # Rows that keep all their pages write no list.
    return [
        [
            [*range(num_pages[row])]
            if counts[row, head] == num_pages[row]
            else kept[row, head, : counts[row, head]].tolist()
            for head in range(kv_heads)
        ]
        for row in range(num_rows)
    ]


def best_pages(scores, num_pages, top_k):
    """What is kept by `scores` of pages, a list: the best, ties to the lower page, and the reserved ones."""
    candidates = sorted(range(1, num_pages - 2), key=lambda page: (-scores[page], page))
    return sorted([0, *candidates[:top_k], num_pages - 2, num_pages - 1])


# The kernel is made for the longest row that may come and then works at the width of the row at hand.
@pytest.mark.parametrize(
    ("max_pages", "num_pages"),
    [
        (300, [300, 5]),
        (512, [512, 511]),
        (1000, [512, 513, 1000]),
        (2048, [512, 1024, 1025, 2048]),
        (4096, [512, 600, 2000, 2049, 4096]),
        (8192, [400, 1024, 1500, 4096, 4097, 8192]),
    ],
)
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_rows_of_every_width(triton_kernels, device, max_pages, num_pages, kind):
    generator = torch.Generator().manual_seed(max_pages)
    shape = (len(num_pages), 1, 1, max_pages)
    if kind == "ties":
        scores = torch.randint(-3, 4, shape, generator=generator) / 2
    else:
        scores = torch.randn(shape, generator=generator)
    table = [1 + pages * 3 // 10 for pages in range(max_pages + 1)]
    lists = select_from_scores(triton_kernels, device, scores, num_pages, table)
    for row, pages in enumerate(num_pages):
        assert lists[row][0] == best_pages(scores[row, 0, 0].tolist(), pages, table[pages])


def test_scores_at_the_edges_of_float32(triton_kernels, device):
    inf, tiny, huge = torch.inf, 2.0**-149, torch.finfo(torch.float32).max
    rows = {
        "signed zeros tie": [0.0, -0.0, -0.0, 0.0, -0.0, 0.0],
        "negative zeros alone": [-0.0, 0.0, -0.0, -0.0, -0.0, -0.0],
        "all equal": [0.7] * 6,
        "all negative": [-1.0, -3.0, -2.0, -2.0, -5.0, -1.0],
        "infinite": [-inf, inf, 0.0, -inf, huge, -huge],
        "all minus infinity": [-inf] * 6,
        "neighbours": [1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 1.0, 1.0 + 2.0**-23, 1.0],
        "subnormal": [0.0, tiny, -tiny, 2 * tiny, -0.0, tiny],
    }
    scores = torch.tensor([[9.0, *row, 9.0, 9.0] for row in rows.values()])[:, None, None]
    for top_k in (0, 1, 2, 3, 5):
        lists = select_from_scores(triton_kernels, device, scores, [9] * len(rows), [top_k])
        for name, row, (pages,) in zip(rows, scores[:, 0, 0].tolist(), lists, strict=True):
            assert pages == best_pages(row, 9, top_k), f"{name}, {top_k} kept"


def test_nan_scores_come_first(triton_kernels, device):
    # Whatever their sign and payload, the lower page first among themselves.
    scores = torch.tensor([9.0, 1.0, 2.0, torch.inf, 3.0, -1.0, 4.0, 9.0, 9.0])
    scores.view(torch.int32)[2] = 0x7FC00000
    scores.view(torch.int32)[5] = -1
    scores = scores[None, None, None]
    kept = {k: select_from_scores(triton_kernels, device, scores, [9], [k])[0][0] for k in (1, 2, 3, 4)}
    assert kept == {1: [0, 2, 7, 8], 2: [0, 2, 5, 7, 8], 3: [0, 2, 3, 5, 7, 8], 4: [0, 2, 3, 5, 6, 7, 8]}


@pytest.mark.parametrize("queries", [1, 2, 5, 16])
def test_shares_of_query_heads_are_summed(triton_kernels, device, queries):
    generator = torch.Generator().manual_seed(queries)
    # Logits far from 0, which a softmax without its maximum would not survive, and of different levels by head.
    logits = torch.randn((2, 2, queries, 70), generator=generator) * 3 + 200 * torch.arange(queries)[:, None]
    lists = select_from_scores(triton_kernels, device, logits, [70, 41], [8], softmax=True)
    for row, num_pages in enumerate([70, 41]):
        for head in range(2):
            shares = logits[row, head, :, 1 : num_pages - 2].double().softmax(-1).sum(0)
            assert shares.sort().values.diff().min() > 1e-9
            assert lists[row][head] == best_pages([0.0, *shares.tolist()], num_pages, 8)
