import pytest
import torch


def landmarks_scoring(scores):
    """Landmarks `[1, 1, pages, 1, 2]` that score as given with the query `[1, 0]`."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    return torch.stack([scores, torch.zeros_like(scores)], dim=-1)[None, None, :, None]


def kept_of(sparrow_attention, scores, top_k, seq_len=None, query=(1.0, 0.0), **recipe):
    landmarks = landmarks_scoring(scores)
    kept = sparrow_attention.select_pages(
        torch.tensor([[query]]),
        landmarks,
        torch.tensor([16 * len(scores) if seq_len is None else seq_len]),
        torch.tensor([top_k]),
        **recipe,
    )
    return kept[0, 0].nonzero().flatten().tolist()


def test_highest_scores_and_reserved_pages(sparrow_attention):
    scores = [9.0, 1.0, 5.0, 3.0, 4.0, 2.0, 9.0, 9.0]
    assert kept_of(sparrow_attention, scores, 0) == [0, 6, 7]
    assert kept_of(sparrow_attention, scores, 2) == [0, 2, 4, 6, 7]
    assert kept_of(sparrow_attention, scores, 2, sink_pages=0, recent_pages=1) == [0, 6, 7]
    assert kept_of(sparrow_attention, scores, 5) == [*range(8)]
    assert kept_of(sparrow_attention, scores, 1, seq_len=16 * 5 + 1) == [0, 2, 4, 5]


def test_negative_scores_are_chosen_before_pages_that_are_no_candidates(sparrow_attention):
    assert kept_of(sparrow_attention, [0.0, -3.0, -1.0, -2.0, 0.0, 0.0], 2) == [0, 2, 3, 4, 5]


def test_scores_of_minus_infinity_are_still_candidates(sparrow_attention):
    low = -torch.inf
    assert kept_of(sparrow_attention, [0.0, low, 1.0, low, low, 0.0, 0.0], 2) == [0, 1, 2, 5, 6]


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
@pytest.mark.parametrize("pages", [7, 8, 12, 37, 100])
def test_ties_go_to_the_lower_page(sparrow_attention, pages, page_score):
    assert kept_of(sparrow_attention, [0.7] * pages, 3, page_score=page_score) == [0, 1, 2, 3, pages - 2, pages - 1]
    scores = [0.3] * pages
    scores[4] = 0.7
    assert kept_of(sparrow_attention, scores, 2, page_score=page_score) == [0, 1, 4, pages - 2, pages - 1]


def test_signed_zeros_tie(sparrow_attention):
    scores = [0.0, -0.0, -0.0, 0.0, -0.0, 0.0, 0.0, 0.0]
    assert kept_of(sparrow_attention, scores, 2, query=(1.0, 1.0)) == [0, 1, 2, 6, 7]
    assert kept_of(sparrow_attention, scores, 2, query=(-1.0, -1.0)) == [0, 1, 2, 6, 7]


@pytest.mark.parametrize("group", [3, 5, 7])
def test_pages_of_equal_mean_stay_tied_in_odd_groups(sparrow_attention, group):
    # Landmarks of equal mean score and different directions, which a rounded mean of the queries could part.
    query = torch.zeros(1, group, 4)
    query[0, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0])
    landmarks = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [0, 0, 0.75, 0.25]]).repeat(5, 1)
    kept = sparrow_attention.select_pages(
        query, landmarks[None, None, :, None], torch.tensor([320]), torch.tensor([6])
    )
    assert kept[0, 0].nonzero().flatten().tolist() == [*range(7), 18, 19]


@pytest.mark.parametrize("landmarks_per_page", [1, 2, 4])
def test_group_softmax_ties_hold_at_every_column(sparrow_attention, landmarks_per_page):
    # Equal pages at all columns of a wide matrix: a sum whose order changes from column to column would part them.
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 7, 16, generator=generator)
    landmark = torch.randint(-8, 9, (1, 1, 1, landmarks_per_page, 16), generator=generator) / 8
    landmarks = landmark.expand(1, 1, 101, landmarks_per_page, 16).clone()
    kept = sparrow_attention.select_pages(
        query, landmarks, torch.tensor([101 * 16]), torch.tensor([40]), page_score="group_softmax"
    )
    assert kept[0, 0].nonzero().flatten().tolist() == [*range(41), 99, 100]


def test_several_landmarks_add_up_their_shares(sparrow_attention):
    # Page 1 has the best single run, page 2 the larger sum of exponentials.
    runs = torch.tensor([[0.0, 0.0], [1.0, -9.0], [0.8, 0.8], [0.0, 0.0], [0.0, 0.0]])
    landmarks = runs[None, None, :, :, None]
    kept = sparrow_attention.select_pages(
        torch.ones(1, 1, 1), landmarks, torch.tensor([80]), torch.tensor([1]), page_score="group_softmax"
    )
    assert kept[0, 0].tolist() == [True, False, True, True, True]


def test_page_scores_differ_where_heads_disagree(sparrow_attention):
    # Page 2 is all that the first head wants and what the second wants least: their mean sees nothing in it.
    query = torch.tensor([[[4.0, 0.0], [-4.0, 0.1]]])
    landmarks = torch.tensor([[0.0, 0], [0, 0.2], [3, 0], [0, 0], [0, 0], [0, 0]])[None, None, :, None]
    lengths = torch.tensor([96]), torch.tensor([1])
    mean = sparrow_attention.select_pages(query, landmarks, *lengths)
    softmax = sparrow_attention.select_pages(query, landmarks, *lengths, page_score="group_softmax")
    assert mean[0, 0].tolist() == [True, True, False, False, True, True]
    assert softmax[0, 0].tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_pages_that_are_no_candidates_are_never_read(sparrow_attention, page_score):
    generator = torch.Generator().manual_seed(0)
    landmarks = torch.randn(3, 2, 12, 1, 8, generator=generator)
    query = torch.randn(3, 4, 8, generator=generator)
    seq_lens, top_k = torch.tensor([12 * 16, 9 * 16 + 1, 0]), torch.tensor([3, 2, 4])
    expected = sparrow_attention.select_pages(query, landmarks, seq_lens, top_k, page_score=page_score)
    for row, num_pages in enumerate((12, 10, 0)):
        landmarks[row, :, :1] = torch.nan
        landmarks[row, :, max(0, num_pages - 2) :] = torch.nan
    kept = sparrow_attention.select_pages(query, landmarks, seq_lens, top_k, page_score=page_score)
    assert torch.equal(kept, expected)
    assert kept.shape == (3, 2, 12) and kept.dtype == torch.bool
    assert kept.sum(-1).tolist() == [[6, 6], [5, 5], [0, 0]]
    assert not kept[1, :, 10:].any()


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_half_precision_inputs_and_autocast_score_in_float32(sparrow_attention, page_score):
    # Scores 1 and 1 + 2^-12 are the same number in bfloat16.
    scores = [0.0, 1.0, 1.0, 1 + 2**-12, 0.0, 0.0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept_of(sparrow_attention, scores, 1, page_score=page_score) == [0, 3, 4, 5]
    query = torch.tensor([[[1.0, 1.0]]], dtype=torch.bfloat16)
    landmarks = torch.zeros(1, 1, 6, 1, 2, dtype=torch.bfloat16)
    landmarks[0, 0, 1:4, 0, 0] = 1
    landmarks[0, 0, 3, 0, 1] = 2**-12
    kept = sparrow_attention.select_pages(
        query, landmarks, torch.tensor([96]), torch.tensor([1]), page_score=page_score
    )
    assert kept[0, 0].nonzero().flatten().tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"landmarks": torch.zeros(1, 2, 4, 1, 8)}, r"`landmarks` has 4 pages, .* covers 5 pages of 16"),
        ({"landmarks": torch.zeros(1, 2, 5, 2, 8)}, "scores one landmark per page, got 2"),
        ({"landmarks": torch.zeros(1, 3, 5, 1, 8)}, "got 4 and 3"),
        ({"landmarks": torch.zeros(1, 2, 5, 8)}, "`landmarks` must have shape"),
        ({"query": torch.zeros(1, 4, 4)}, "`landmarks` must have shape"),
        ({"page_size": 12}, "`page_size` must be"),
        ({"page_score": "max"}, "`page_score` must be one of"),
        ({"top_k": torch.tensor([1.0])}, "`top_k` must hold integers"),
        ({"seq_lens": torch.tensor([[80]])}, "`seq_lens` must have shape"),
    ],
)
def test_refuses(sparrow_attention, change, message):
    arguments = dict(
        query=torch.zeros(1, 4, 8),
        landmarks=torch.zeros(1, 2, 5, 1, 8),
        seq_lens=torch.tensor([80]),
        top_k=torch.tensor([1]),
    )
    sparrow_attention.select_pages(**arguments)
    with pytest.raises(ValueError, match=message):
        sparrow_attention.select_pages(**{**arguments, **change})
