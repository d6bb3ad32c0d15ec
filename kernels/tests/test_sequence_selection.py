from unittest import mock

import pytest
import torch
from paged_batch import SEQUENCE_DTYPES, exact_page_scores


pytestmark = pytest.mark.usefixtures("poisoned_memory")

RECIPES = [("mean_query", 1), ("group_softmax", 1), ("group_softmax", 2), ("group_softmax", 4)]
ON_GPU = torch.cuda.is_available()
# Scores are sums of float32 products in an order of the hardware's choice. On multiples of 1/4 the mean query's are
# exact; where numbers are rounded, pages may be exchanged whose scores, of order 1, are closer than this.
CLOSE_SCORES = 1e-5


class Sequences:
    """Queries and keys in which all padding is NaN."""

    def __init__(
        self, lengths, *, starts=None, tokens=None, kv_heads=2, group=2, head_dim=64, dtype=torch.float16, dyadic=True,
        seed=0, page_size=16,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.starts = lengths, starts or [0] * len(lengths)
        self.page_size = page_size
        tokens = tokens or max(length + start for length, start in zip(lengths, self.starts, strict=True))

        def numbers(heads):
            shape = (len(lengths), heads, tokens, head_dim)
            if dyadic:  # few different ones: many pages tie
                return (torch.randint(-4, 5, shape, generator=generator) / 4).to(dtype)
            return torch.randn(shape, generator=generator).to(dtype)

        self.query, self.key = numbers(kv_heads * group), numbers(kv_heads)
        if dyadic:
            # All keys of a page are equal, and pages have one of three: their means are exact.
            page = torch.arange(tokens) // page_size
            which = torch.randint(0, 3, (len(page),), generator=generator)[page] * page_size
            for row, start in enumerate(self.starts):
                pages = self.key[row][:, which.clamp(max=tokens - 1)]
                self.key[row] = pages.roll(start, 1)
        for row, (start, length) in enumerate(zip(self.starts, lengths, strict=True)):
            for x in (self.query, self.key):
                x[row, :, :start] = torch.nan
                x[row, :, start + length :] = torch.nan

    def row(self, row):
        real = slice(self.starts[row], self.starts[row] + self.lengths[row])
        return self.query[row, :, real], self.key[row, :, real]


def recipe_of(page_score="mean_query", landmarks_per_page=1, sink_pages=1, recent_pages=2, landmark_dtype=None):
    return {
        "page_score": page_score,
        "landmarks_per_page": landmarks_per_page,
        "sink_pages": sink_pages,
        "recent_pages": recent_pages,
        "landmark_dtype": landmark_dtype,
    }


def select(kernels, device, sequences, prompt_lengths, top_k_table, recipe):
    """The mask of the kernels as bool `[batch, kv_heads, tokens, pages]`."""
    module = kernels.sequence_selection
    prompt_lengths = torch.tensor(prompt_lengths, device=device)
    starts, lengths = (torch.tensor(x, device=device) for x in (sequences.starts, sequences.lengths))
    tokens = sequences.query.shape[2]
    mask = module.keep_pages_of_sequences(
        sequences.query.to(device),
        sequences.key.to(device),
        *module.real_tokens(tokens, starts, lengths, like=prompt_lengths),
        prompt_lengths=prompt_lengths,
        top_k_table=torch.tensor(top_k_table, device=device),
        page_size=sequences.page_size,
        **recipe,
    )
    pages = -(-tokens // sequences.page_size)
    assert mask.dtype == torch.int32 and mask.shape[-1] == -(-pages // 32)
    bits = (mask.cpu()[..., None] >> torch.arange(32)) & 1
    kept = bits.flatten(-2).bool()
    assert not kept[..., pages:].any()
    return kept[..., :pages]


def assert_same(sparrow_attention, kernels, device, sequences, prompt_lengths, top_k_table, **recipe):
    """Compares with the reference; returns what is kept and the share of real tokens that chose by score."""
    recipe, page_size = recipe_of(**recipe), sequences.page_size
    found = select(kernels, device, sequences, prompt_lengths, top_k_table, recipe)
    kv_heads = sequences.key.shape[1]
    chose = real = 0
    for row, length in enumerate(sequences.lengths):
        assert not found[row, :, length:].any()
        query, key = sequences.row(row)
        full = length // page_size
        landmarks = sparrow_attention.page_landmarks(
            key[:, : full * page_size].unflatten(1, (full, page_size)),
            recipe["landmarks_per_page"],
            recipe["landmark_dtype"],
        )
        pages = -(-length // page_size)
        padded = torch.zeros((kv_heads, pages, *landmarks.shape[2:]))
        padded[:, :full] = landmarks.float()
        num_pages = torch.arange(length) // page_size + 1
        top_k = torch.tensor(top_k_table)[num_pages.clamp(max=len(top_k_table) - 1)]
        top_k[: prompt_lengths[row]] = pages
        if not length:
            continue
        expected = sparrow_attention.selection.keep_pages(
            query.unflatten(0, (kv_heads, -1)).transpose(1, 2)[None],
            padded[None],
            num_pages[None],
            top_k[None],
            page_score=recipe["page_score"],
            sink_pages=recipe["sink_pages"],
            recent_pages=recipe["recent_pages"],
        )[0]
        real += kv_heads * length
        chose += (expected.sum(-1) < num_pages).sum().item()
        differs = (found[row, :, :length, :pages] != expected).any(-1)
        for head, token in differs.nonzero().tolist():
            where = f"row {row} of {length} tokens, head {head}, token {token}"
            candidates = [*range(recipe["sink_pages"], int(num_pages[token]) - recipe["recent_pages"])]
            group = query.unflatten(0, (kv_heads, -1))[head, :, token]
            scores = exact_page_scores(group, padded[head, candidates], recipe["page_score"])
            scores = dict(zip(candidates, scores.tolist(), strict=True))
            kept, wanted = found[row, head, token, :pages], expected[head, token]
            exchanged = (kept != wanted).nonzero().flatten().tolist()
            assert kept.sum() == wanted.sum() and scores.keys() >= set(exchanged), where
            for page in exchanged:
                for other in exchanged:
                    # Pages of equal landmarks tie, and the lower one is kept.
                    tied = torch.equal(padded[head, page], padded[head, other])
                    assert tied == (page == other) or kept[page] == kept[other], where
                    assert abs(scores[page] - scores[other]) < CLOSE_SCORES, where
    return found, chose / max(1, real)


@pytest.mark.parametrize(
    ("page_size", "dyadic", "page_score", "landmarks_per_page"),
    [
        (16, True, "mean_query", 1),
        (16, True, "group_softmax", 1),
        (16, False, "group_softmax", 4),
        (32, True, "mean_query", 1),
        (32, False, "group_softmax", 2),
        (64, False, "mean_query", 1),
        (64, True, "group_softmax", 4),
    ],
)
def test_equal_to_the_reference(
    sparrow_attention, triton_kernels, device, page_size, dyadic, page_score, landmarks_per_page
):
    lengths = [page_size * 6 + 3] if page_size > 16 else [page_size * 7 + 3, page_size * 6 - 1]
    sequences = Sequences(
        lengths, starts=[0, 9][: len(lengths)], kv_heads=1, dyadic=dyadic, page_size=page_size, seed=page_size
    )
    _, chose = assert_same(
        sparrow_attention, triton_kernels, device, sequences, [0, 30][: len(lengths)], [0, 0, 0, 0, 0, 1, 2, 3],
        page_score=page_score, landmarks_per_page=landmarks_per_page,
    )  # fmt: skip
    assert chose > 0.2


def test_every_length(sparrow_attention, triton_kernels, device):
    lengths = [*range(71)] if ON_GPU else [0, 1, 15, 16, 17, 48, 49, *range(62, 68)]
    sequences = Sequences(lengths, starts=[length * 5 % 8 for length in lengths], tokens=78, kv_heads=1, seed=1)
    assert_same(sparrow_attention, triton_kernels, device, sequences, [0] * len(lengths), [1])


@pytest.mark.parametrize(
    ("group", "head_dim", "page_score"),
    [
        (1, 64, "mean_query"),
        (2, 80, "group_softmax"),
        (5, 96, "mean_query"),
        (6, 128, "group_softmax"),
        (7, 64, "mean_query"),
        (16, 64, "group_softmax"),
        (2, 256, "mean_query"),
    ],
)
def test_groups_and_head_dims(sparrow_attention, triton_kernels, device, group, head_dim, page_score):
    sequences = Sequences([100], group=group, head_dim=head_dim, dyadic=False, seed=group)
    found, chose = assert_same(
        sparrow_attention, triton_kernels, device, sequences, [0], [1], page_score=page_score
    )  # fmt: skip
    assert chose > 0.2 and not torch.equal(found[:, 0], found[:, 1])


@pytest.mark.parametrize("dtype", SEQUENCE_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("landmark_dtype", "page_score"),
    [(None, "mean_query"), (torch.float8_e4m3fn, "group_softmax"), (torch.float32, "mean_query")],
    ids=str,
)
def test_types(sparrow_attention, triton_kernels, device, page_score, landmark_dtype, dtype):
    # Keys of a page are equal multiples of 1/4, which every type holds.
    sequences = Sequences([100], kv_heads=1, dtype=dtype, seed=2)
    assert_same(
        sparrow_attention, triton_kernels, device, sequences, [0], [1], page_score=page_score,
        landmark_dtype=landmark_dtype,
    )  # fmt: skip


@pytest.mark.skipif(not ON_GPU, reason="the interpreter mistakes the carry where it rounds to float8")
@pytest.mark.parametrize(("page_score", "landmarks_per_page"), RECIPES)
def test_rounded_float8_landmarks(sparrow_attention, triton_kernels, device, page_score, landmarks_per_page):
    sequences = Sequences([700], dtype=torch.bfloat16, dyadic=False, seed=3)
    assert_same(
        sparrow_attention, triton_kernels, device, sequences, [0], [9], page_score=page_score,
        landmarks_per_page=landmarks_per_page, landmark_dtype=torch.float8_e4m3fn,
    )  # fmt: skip


@pytest.mark.parametrize(("sink_pages", "recent_pages"), [(0, 1), (1, 4), (50, 2)])
def test_reserved_pages(sparrow_attention, triton_kernels, device, sink_pages, recent_pages):
    sequences = Sequences([115], kv_heads=1, seed=4)
    reserved = {"sink_pages": sink_pages, "recent_pages": recent_pages}
    found, _ = assert_same(sparrow_attention, triton_kernels, device, sequences, [0], [1], **reserved)
    assert found[0, 0, 114].sum() == min(8, sink_pages + recent_pages + 1)


@pytest.mark.parametrize("top_k", [0, 3, 4, 2**40])
def test_budgets_at_the_edges(sparrow_attention, triton_kernels, device, top_k):
    # The last token has 4 candidates.
    sequences = Sequences([112], kv_heads=1, seed=5)
    found, _ = assert_same(sparrow_attention, triton_kernels, device, sequences, [0], [top_k])
    assert found[0, 0, 111].sum() == min(7, top_k + 3)


def test_prompts_keep_all_pages(sparrow_attention, triton_kernels, device):
    sequences = Sequences([110, 100], starts=[0, 3], kv_heads=1, seed=6)
    found, _ = assert_same(sparrow_attention, triton_kernels, device, sequences, [100, 2**40], [1])
    counts = found.sum(-1)[:, 0]
    assert counts[0, 99:101].tolist() == [7, 4] and counts[1, 99] == 7


def test_chunks_change_nothing(triton_kernels, device):
    sequences = Sequences([130], kv_heads=1, seed=7)
    for page_score in ("mean_query", "group_softmax"):
        arguments = (triton_kernels, device, sequences, [70], [1], recipe_of(page_score))
        expected = select(*arguments)
        with mock.patch.multiple(triton_kernels.sequence_selection, SCRATCH_BYTES=1, SCORE_QUERIES=64):
            assert torch.equal(select(*arguments), expected)


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_a_page_with_broken_keys_is_kept(triton_kernels, device, page_score):
    # By the head whose keys they are.
    sequences = Sequences([112], seed=8)
    arguments = (triton_kernels, device, sequences, [0], [1], recipe_of(page_score))
    before = select(*arguments)
    sequences.key[0, 1, 16 * 3 + 3, 5] = torch.nan
    found = select(*arguments)
    assert torch.equal(found[0, 0], before[0, 0])
    assert found[0, 1, 111].nonzero().flatten().tolist() == [0, 3, 5, 6]


# Few tokens far into a sequence, whose scores are given.
@pytest.mark.parametrize(
    ("num_pages", "softmax"), [(32, False), (513, False), (1024, True), (2049, False), (8192, True)]
)
@pytest.mark.parametrize("kind", ["random", "ties", "equal"])
def test_rows_of_every_width(triton_kernels, device, kind, num_pages, softmax):
    generator = torch.Generator().manual_seed(num_pages)
    tokens = num_pages * 16
    first = tokens - 3
    scores = torch.randn((2, 3, num_pages), generator=generator)
    if kind == "ties":
        scores = scores.round()
    elif kind == "equal":
        scores.fill_(-0.0)
    if softmax:
        scores = scores.mul(4).exp()
    scores[..., 0] = scores[..., -2:] = torch.nan  # no candidates
    mask = torch.zeros((1, 2, tokens, -(-num_pages // 32)), dtype=torch.int32, device=device)
    top_k = num_pages // 5
    lengths, prompt_lengths = (torch.tensor([x], dtype=torch.int32, device=device) for x in (tokens - 1, 0))
    triton_kernels.sequence_selection.keep_best_pages(
        scores.to(device), mask, lengths, prompt_lengths, torch.tensor([top_k], device=device), 1, 1, 2, first=first,
        last=tokens, page_size=16, softmax=softmax,
    )  # fmt: skip
    bits = ((mask[0, :, first:].cpu()[..., None] >> torch.arange(32)) & 1).flatten(-2)
    # The last of the three tokens is padding, and nothing is written for the ones before them.
    assert not bits[:, 2].any() and not mask[0, :, :first].any()
    candidates = range(1, num_pages - 2)
    for head in range(2):
        for token in range(2):
            row = scores[head, token].tolist()
            best = sorted(candidates, key=lambda page: (-row[page], page))[:top_k]  # noqa: B023
            expected = sorted([0, *best, num_pages - 2, num_pages - 1])
            assert bits[head, token].nonzero().flatten().tolist() == expected


def test_scores_at_the_edges_of_float32(triton_kernels, device):
    inf, nan, tiny, huge = torch.inf, torch.nan, 2.0**-149, torch.finfo(torch.float32).max
    rows = [
        [0.0, -0.0, -0.0, 0.0, -0.0, 0.0],
        [-1.0, -3.0, -2.0, -2.0, -5.0, -1.0],
        [-inf, inf, 0.0, -inf, huge, -huge],
        [-inf] * 6,
        [1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 1.0, 1.0 + 2.0**-23, 1.0],
        [0.0, tiny, -tiny, 2 * tiny, -0.0, tiny],
        [1.0, nan, inf, 2.0, 5.0, 3.0],
    ]
    scores = torch.tensor([[[9.0, *row, 9.0, 9.0]] for row in rows])
    lengths, prompt_lengths = (torch.tensor([x], dtype=torch.int32, device=device) for x in (144, 0))
    for top_k in (0, 1, 2, 3, 5):
        mask = torch.zeros((1, len(rows), 144, 1), dtype=torch.int32, device=device)
        triton_kernels.sequence_selection.keep_best_pages(
            scores.to(device), mask, lengths, prompt_lengths, torch.tensor([top_k], device=device), 1, 1, 2,
            first=143, last=144, page_size=16, softmax=False,
        )  # fmt: skip
        for head, row in enumerate(rows):
            # NaN first, whatever its sign.
            order = sorted(range(6), key=lambda page: (row[page] == row[page], -row[page], page))  # noqa: B023
            expected = sorted([0, *(page + 1 for page in order[:top_k]), 7, 8])
            word = mask[0, head, 143].item()
            assert [page for page in range(9) if word >> page & 1] == expected, f"{row}, {top_k} kept"
