import math

import brute_force
import numpy as np
import pytest
import torch
from paged_batch import make_batch


RECIPES = [("mean_query", 1), ("group_softmax", 1), ("group_softmax", 2), ("group_softmax", 4)]

# Outputs are averages of values of order 1; selections are compared exactly, so only rounding is left.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def check_against_brute_force(sparrow_attention, batch, top_k, page_size=16, page_score="mean_query", **recipe):
    """Compares kept pages and outputs of a decode step with loops; returns how many pages were chosen by score."""
    landmarks_per_page = recipe.get("landmarks_per_page", 1)
    sink_pages, recent_pages = recipe.get("sink_pages", 1), recipe.get("recent_pages", 2)
    output, kept = sparrow_attention.sparse_decode_attention(
        *batch.tensors, torch.tensor(top_k), page_size=page_size, page_score=page_score, return_kept=True, **recipe
    )
    rows, q_heads, _ = batch.query.shape
    kv_heads = batch.key_cache.shape[1]
    group = q_heads // kv_heads
    query = batch.query.double().numpy()
    longest = max(batch.seq_lens.tolist())
    assert kept.shape == (rows, kv_heads, math.ceil(longest / page_size))
    assert output.shape == batch.query.shape and output.dtype == batch.query.dtype
    expected_output = np.zeros(output.shape)
    by_score = 0
    for row, length in enumerate(batch.seq_lens.tolist()):
        candidates = brute_force.candidate_pages(length, page_size, sink_pages, recent_pages)
        for head in range(kv_heads):
            queries = query[row, head * group : (head + 1) * group]
            keys, values = batch.keys[row][head], batch.values[row][head]
            landmarks = {
                page: brute_force.page_landmarks(
                    keys[page * page_size : (page + 1) * page_size].tolist(), landmarks_per_page
                )
                for page in candidates
            }
            scores = brute_force.page_scores(queries.tolist(), landmarks, candidates, page_score)
            expected = brute_force.kept_pages(length, top_k[row], scores, page_size, sink_pages, recent_pages)
            pages = kept[row, head].nonzero().flatten().tolist()
            assert brute_force.same_up_to_close_scores(pages, expected, scores, 1e-5), (
                f"row {row} of length {length}, head {head}: kept {pages}, expected {expected} of "
                f"{ {page: float(score) for page, score in scores.items()} }"
            )
            by_score += top_k[row] < len(candidates)
            tokens = brute_force.tokens_of(pages, length, page_size)
            for i in range(group if length else 0):
                expected_output[row, head * group + i] = brute_force.attention(
                    queries[i], keys, values, tokens, recipe.get("scale")
                )
    atol = TOLERANCE[batch.query.dtype]
    np.testing.assert_allclose(output.double().numpy(), expected_output, rtol=0, atol=atol)
    return by_score


@pytest.mark.parametrize(("page_score", "landmarks_per_page"), RECIPES)
@pytest.mark.parametrize("group", [1, 2, 5, 7])
@pytest.mark.parametrize(("page_size", "pages_per_block"), [(16, 1), (16, 4), (32, 2), (64, 1)])
def test_every_length_and_tie(sparrow_attention, page_size, pages_per_block, group, page_score, landmarks_per_page):
    lengths = [*range(1, 201), *range(page_size * 6 - 1, page_size * 6 + 2)]
    batch = make_batch(
        lengths,
        group=group,
        head_dim=4,
        page_size=page_size,
        pages_per_block=pages_per_block,
        dyadic=True,
        seed=page_size + group,
    )
    by_score = check_against_brute_force(
        sparrow_attention,
        batch,
        [length % 5 for length in lengths],
        page_size,
        page_score,
        landmarks_per_page=landmarks_per_page,
        recent_pages=1,
    )
    assert by_score > 20


@pytest.mark.parametrize(("page_score", "landmarks_per_page"), RECIPES)
@pytest.mark.parametrize(("sink_pages", "recent_pages"), [(0, 1), (1, 2), (2, 3), (20, 1)])
def test_real_numbers_and_reserved_pages(sparrow_attention, sink_pages, recent_pages, page_score, landmarks_per_page):
    batch = make_batch([1, 15, 16, 17, 160, 161, 175, 240], group=3, seed=1)
    check_against_brute_force(
        sparrow_attention,
        batch,
        [3] * 8,
        page_score=page_score,
        landmarks_per_page=landmarks_per_page,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
        scale=0.7,
    )


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_each_kv_head_has_keys_and_pages_of_its_own(sparrow_attention, page_score):
    batch = make_batch([256, 250, 193], kv_heads=2, group=6, head_dim=16, seed=2)
    check_against_brute_force(sparrow_attention, batch, [2, 4, 3], page_score=page_score)
    _, kept = sparrow_attention.sparse_decode_attention(
        *batch.tensors, torch.tensor([2, 4, 3]), page_score=page_score, return_kept=True
    )
    assert (kept[:, 0] != kept[:, 1]).any()


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_head_dims(sparrow_attention, head_dim):
    batch = make_batch([100, 141], kv_heads=1, group=2, head_dim=head_dim, seed=3)
    check_against_brute_force(sparrow_attention, batch, [2, 3], page_score="group_softmax", landmarks_per_page=2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_dtypes(sparrow_attention, dtype, page_score):
    # Small multiples of 1/4 and the means of 16 of them are exact in every one of these types.
    batch = make_batch([100, 141, 31, 240], group=4, dyadic=True, dtype=dtype, seed=4)
    check_against_brute_force(sparrow_attention, batch, [2, 3, 1, 5], page_score=page_score)


def test_a_batch_equals_its_rows_one_by_one(sparrow_attention):
    # More rows than are gathered at a time, dense and sparse ones mixed.
    lengths = [(37 * row) % 900 + 1 for row in range(60)]
    batch = make_batch(lengths, head_dim=32, seed=5)
    top_k = torch.tensor([100 if row % 7 == 0 else 4 for row in range(60)])
    output, kept = sparrow_attention.sparse_decode_attention(*batch.tensors, top_k, return_kept=True)
    query, key_cache, value_cache, block_table, seq_lens = batch.tensors
    for row in range(60):
        one = slice(row, row + 1)
        row_output, row_kept = sparrow_attention.sparse_decode_attention(
            query[one], key_cache, value_cache, block_table[one], seq_lens[one], top_k[one], return_kept=True
        )
        torch.testing.assert_close(output[one], row_output, rtol=0, atol=1e-6)
        assert torch.equal(kept[one, :, : row_kept.shape[2]], row_kept)
        assert not kept[one, :, row_kept.shape[2] :].any()
    assert torch.equal(kept.sum(-1)[0], torch.tensor([math.ceil(lengths[0] / 16)] * 2))


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_covering_top_k_is_dense_attention(sparrow_attention, page_score):
    lengths = [1, 16, 17, 100, 333]
    batch = make_batch(lengths, group=2, dtype=torch.float64, seed=6)
    for top_k in (torch.tensor([-(-length // 16) for length in lengths]), torch.full((5,), 2**30)):
        output, kept = sparrow_attention.sparse_decode_attention(
            *batch.tensors, top_k, page_score=page_score, return_kept=True
        )
        assert kept.sum(-1)[:, 0].tolist() == [-(-length // 16) for length in lengths]
        for row, length in enumerate(lengths):
            for head in range(4):
                keys, values = batch.keys[row][head // 2], batch.values[row][head // 2]
                expected = brute_force.attention(batch.query[row, head].numpy(), keys, values, range(length))
                np.testing.assert_allclose(output[row, head].numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_given_landmarks_are_used(sparrow_attention, dtype):
    batch = make_batch([100, 141, 16], group=2, pages_per_block=2, seed=7)
    pages = batch.key_cache.unflatten(2, (-1, 16))
    landmarks = sparrow_attention.page_landmarks(pages, 2, dtype=dtype)
    # Partial and unwritten pages have no landmark.
    assert landmarks.float().isnan().any()
    arguments = dict(page_score="group_softmax", landmarks_per_page=2, return_kept=True)
    top_k = torch.tensor([2, 2, 2])
    output, kept = sparrow_attention.sparse_decode_attention(*batch.tensors, top_k, landmarks=landmarks, **arguments)
    assert output.isfinite().all()
    if dtype is None:
        expected, expected_kept = sparrow_attention.sparse_decode_attention(*batch.tensors, top_k, **arguments)
        assert torch.equal(kept, expected_kept) and torch.equal(output, expected)
    # Landmarks that praise other pages change what is kept.
    _, opposite = sparrow_attention.sparse_decode_attention(
        *batch.tensors, top_k, landmarks=(-landmarks.float()).to(landmarks.dtype), **arguments
    )
    assert not torch.equal(opposite, kept)


def test_rows_of_length_zero_are_zero_and_change_nothing(sparrow_attention):
    lengths = [0, 40, 0, 123, 0]
    batch = make_batch(lengths, seed=8)
    query, key_cache, value_cache, block_table, seq_lens = batch.tensors
    query[0] = torch.nan
    block_table[2] = 10**6
    top_k = torch.tensor([5, 1, 0, 2, 10**6])
    output, kept = sparrow_attention.sparse_decode_attention(
        query, key_cache, value_cache, block_table, seq_lens, top_k, return_kept=True
    )
    real = torch.tensor(lengths) > 0
    assert not output[~real].any() and not kept[~real].any()
    expected = sparrow_attention.sparse_decode_attention(
        query[real], key_cache, value_cache, block_table[real], seq_lens[real], top_k[real]
    )
    torch.testing.assert_close(output[real], expected, rtol=0, atol=1e-6)


def test_a_batch_of_nothing(sparrow_attention):
    batch = make_batch([0, 0], seed=9)
    output, kept = sparrow_attention.sparse_decode_attention(*batch.tensors, torch.tensor([1, 1]), return_kept=True)
    assert not output.any() and kept.shape == (2, 2, 0)
    query, key_cache, value_cache, block_table, seq_lens = batch.tensors
    output = sparrow_attention.sparse_decode_attention(
        query[:0], key_cache, value_cache, block_table[:0], seq_lens[:0], torch.ones(0, dtype=torch.int32)
    )
    assert output.shape == (0, 4, 8)


@pytest.mark.parametrize("layout", ["interleaved", "token_major"])
def test_cache_layouts(sparrow_attention, layout):
    batch = make_batch([70, 141], seed=10)
    query, key_cache, value_cache, block_table, seq_lens = batch.tensors
    if layout == "interleaved":
        packed = torch.cat([key_cache, value_cache], dim=-1)
        key_view, value_view = packed[..., :8], packed[..., 8:]
    else:
        key_view, value_view = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key_cache, value_cache))
    assert not key_view.is_contiguous()
    top_k = torch.tensor([1, 2])
    output = sparrow_attention.sparse_decode_attention(query, key_view, value_view, block_table, seq_lens, top_k)
    expected = sparrow_attention.sparse_decode_attention(*batch.tensors, top_k)
    assert torch.equal(output, expected)


def test_a_page_with_broken_keys_shows_in_the_output(sparrow_attention):
    batch = make_batch([160], seed=11)
    block = batch.block_table[0, 4]
    batch.key_cache[block, 0, 3] = torch.nan
    output, kept = sparrow_attention.sparse_decode_attention(*batch.tensors, torch.tensor([1]), return_kept=True)
    assert kept[0, 0, 4]
    assert output[0, :2].isnan().all() and output[0, 2:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 8}, "`page_size` must be a power of two, at least 16, got 8"),
        ({"page_size": 24}, "power of two, at least 16, got 24"),
        ({"page_size": 64}, r"block size must be a multiple of `page_size` \(64\), got 32"),
        ({"page_score": "quest"}, "`page_score` must be one of .* got 'quest'"),
        ({"landmarks_per_page": 2}, "scores one landmark per page, got 2"),
        ({"landmarks_per_page": 3, "page_score": "group_softmax"}, r"one of \(1, 2, 4\), got 3"),
        ({"sink_pages": -1}, "`sink_pages` must be at least 0, got -1"),
        ({"recent_pages": 0}, "`recent_pages` must be at least 1, got 0"),
        ({"query": torch.zeros(2, 5, 8)}, "must be a multiple of the number of kv heads, got 5 and 2"),
        ({"query": torch.zeros(2, 4, 1, 8)}, r"`query` must have shape \[rows, q_heads, head_dim\]"),
        ({"query": torch.zeros(2, 4, 16)}, r"`key_cache` must have shape .* = \[\?, \?, \?, 16\]"),
        ({"value_cache": torch.zeros(1, 2, 32, 8)}, "`value_cache` must have shape"),
        ({"seq_lens": torch.tensor([40])}, r"`seq_lens` must have shape \[rows\] = \[2\], got \[1\]"),
        ({"seq_lens": torch.tensor([40.0, 41.0])}, "`seq_lens` must hold integers"),
        ({"top_k": torch.tensor([1])}, "`top_k` must have shape"),
        ({"top_k": torch.tensor([True, False])}, "`top_k` must hold integers"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "has 1 blocks of 32 tokens per row.* has 60 tokens"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, "`block_table` must have shape"),
        ({"landmarks": torch.zeros(5, 2, 1, 1, 8)}, "`landmarks` must have shape"),
    ],
)
def test_refuses(sparrow_attention, change, message):
    batch = make_batch([40, 60], pages_per_block=2)
    names = ("query", "key_cache", "value_cache", "block_table", "seq_lens", "top_k")
    arguments = dict(zip(names, (*batch.tensors, torch.tensor([1, 1])), strict=True))
    sparrow_attention.sparse_decode_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        sparrow_attention.sparse_decode_attention(**{**arguments, **change})
