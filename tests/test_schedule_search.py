"""The search against brute force on random tables, and what it says where nothing was measured or nothing reaches."""

import dataclasses
import itertools

import numpy as np
import pytest

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.schedule_search import ScheduleSearchResult, search_schedule, select_cheapest


NAN = float("nan")


def search(page_counts, tails, counts=None, target=0.86, **options):
    """Search with bins of 1024 tokens (64 pages) and as many tokens everywhere as are needed."""
    counts = np.full(np.shape(tails), 1000) if counts is None else counts
    options = {"bin_tokens": 1024, "target_acceptance": target, "min_tokens": 1000, **options}
    return search_schedule(page_counts, tails, counts, **options)


def kept_pages(result: ScheduleSearchResult) -> list[int]:
    return [choice.pages for choice in result.bins]


def statuses(result: ScheduleSearchResult) -> list[str]:
    return [choice.status for choice in result.bins]


# Which budget


def test_each_bin_takes_the_smallest_budget_that_reaches_the_target():
    result = search([8, 16, 32], [[0.90, 0.80, 0.70], [0.95, 0.86, 0.85], [0.99, 0.95, 0.90]])
    assert kept_pages(result) == [8, 16, 32]
    # 3 of the pages are reserved; budgets count them.
    assert result.schedule.top_k_pages == [5, 13, 29]
    assert [result.schedule.budget(length) for length in (500, 1500, 2500, 9999)] == [128, 256, 512, 512]
    assert [choice.tail for choice in result.bins] == [0.90, 0.86, 0.90]
    assert [choice.start for choice in result.bins] == [0, 1024, 2048]
    assert statuses(result) == ["measured"] * 3


def test_a_budget_never_falls():
    result = search([8, 16, 32], [[0.80, 0.90, 0.90], [0.80, 0.92, 0.92], [0.90, 0.95, 0.95]])
    assert kept_pages(result) == [32, 32, 32]


def test_where_a_larger_budget_is_worse_the_next_that_reaches_is_taken():
    # The running maximum of the smallest budgets would be 16, 16: below the target in the second bin.
    result = search([8, 16, 32], [[0.80, 0.88], [0.87, 0.84], [0.90, 0.89]])
    assert kept_pages(result) == [16, 32]
    assert [choice.tail for choice in result.bins] == [0.87, 0.89]


def admissible_schedules(page_counts, tails, target, allow_dense):
    """Every non-decreasing choice of a measured or dense budget that reaches the target in each bin of 64 pages."""
    whole = [64 * (index + 1) - 1 for index in range(tails.shape[1])]
    levels = sorted({*page_counts, *(whole if allow_dense else [])})
    for pages in itertools.product(levels, repeat=tails.shape[1]):
        if list(pages) == sorted(pages) and all(
            (kept in page_counts and tails[page_counts.index(kept), index] >= target)
            or (allow_dense and kept >= whole[index])
            for index, kept in enumerate(pages)
        ):
            yield pages


@pytest.mark.parametrize("allow_dense", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_no_admissible_schedule_is_cheaper(seed, allow_dense):
    rng = np.random.default_rng(seed)
    num_budgets, num_bins = rng.integers(1, 5), rng.integers(1, 5)
    page_counts = sorted(rng.choice(np.arange(3, 300), num_budgets, replace=False).tolist())
    tails = rng.random((num_budgets, num_bins))
    tails[rng.random(tails.shape) < 0.1] = NAN
    tails[rng.integers(num_budgets)] = 0.5  # a measurement in every bin
    target = rng.uniform(0.2, 0.8)
    admissible = list(admissible_schedules(page_counts, tails, target, allow_dense))
    if not admissible:
        with pytest.raises(ValueError, match="No measured budget reaches"):
            search(page_counts, tails, target=target)
        return
    found = kept_pages(search(page_counts, tails, target=target, allow_dense=allow_dense))
    assert tuple(found) in admissible
    weights = rng.random(num_bins)  # some bins are dearer than others
    for cost in (lambda pages: weights @ np.array(pages), lambda pages: weights @ np.sqrt(pages)):
        assert cost(found) == min(map(cost, admissible))


# Where too little was measured


def test_too_few_tokens_fall_back_to_the_next_larger_budget():
    tails = [[0.9, 0.9, 0.9, 0.9, 0.9], [0.9] * 5, [0.9] * 5, [0.9] * 5]
    counts = np.full((4, 5), 1000)
    counts[:, 2:] = 999
    result = search([8, 16, 32, 48], tails, counts)
    assert kept_pages(result) == [8, 8, 16, 32, 48]
    assert statuses(result) == ["measured"] * 2 + ["too few tokens"] * 3
    assert [choice.tokens for choice in result.bins] == [1000, 1000, 999, 999, 999]
    assert [choice.best_tail for choice in result.bins] == [0.9, 0.9, None, None, None]


def test_the_fallback_stays_at_the_largest_budget():
    result = search([8, 16], [[0.8, NAN, NAN], [0.9, NAN, NAN]])
    assert kept_pages(result) == [16, 16, 16]
    assert [choice.tail for choice in result.bins] == [0.9, None, None]


def test_the_fallback_stays_below_what_longer_contexts_need():
    # Alone the second bin would take 32 pages; the third has shown that 16 are enough for longer contexts.
    result = search([8, 16, 32, 48], [[0.8, NAN, 0.8], [0.9, NAN, 0.9], [0.9, NAN, 0.9], [0.9, NAN, 0.9]])
    assert kept_pages(result) == [16, 16, 16]
    result = search([8, 16, 32, 48], [[0.9, NAN, 0.8], [0.9, NAN, 0.8], [0.9, NAN, 0.8], [0.9, NAN, 0.9]])
    assert kept_pages(result) == [8, 16, 48]


def test_bins_before_the_first_measured_one_take_its_budget():
    result = search([8, 16, 32], [[NAN, NAN, 0.80], [NAN, NAN, 0.87], [NAN, NAN, 0.90]])
    assert kept_pages(result) == [16, 16, 16]
    assert statuses(result) == ["too few tokens"] * 2 + ["measured"]


@pytest.mark.parametrize("missing", ["tokens", "measurement"])
def test_a_budget_without_enough_tokens_gives_way_to_the_next_larger_one(missing):
    tails, counts = np.array([[0.90], [0.91], [0.92]]), np.array([[999], [1000], [1000]])
    if missing == "measurement":
        tails[0], counts[0] = NAN, 5000
    result = search([8, 16, 32], tails, counts)
    assert kept_pages(result) == [16]
    assert statuses(result) == ["measured"]


def test_nothing_measured_anywhere_is_an_error():
    with pytest.raises(ValueError, match="No bin has the 1,000 tokens .*the most is 999"):
        search([8, 16], [[0.9, NAN], [0.9, NAN]], np.array([[999, 5000], [3, 5000]]))


# Where nothing reaches the target


UNREACHABLE = [[0.90, 0.70, 0.60], [0.95, 0.8123, 0.75]]


def test_without_dense_the_error_names_the_bins_and_their_best_tails():
    with pytest.raises(ValueError) as error:
        search([8, 16], UNREACHABLE)
    assert "tail acceptance of 0.86" in str(error.value)
    assert "1,009-2,032 (best 0.8123 with 8 pages or more); 2,033-3,056 (best 0.7500" in str(error.value)
    assert "1-1,008" not in str(error.value) and "allow_dense=True" in str(error.value)


def test_budgets_below_the_bin_before_do_not_count_as_reachable():
    with pytest.raises(ValueError, match=r"1,009-2,032 \(best 0\.8500 with 16 pages or more\)\."):
        search([8, 16, 32], [[0.80, 0.90], [0.90, 0.84], [0.90, 0.85]])
    with pytest.raises(ValueError, match="not measured with the 16 pages that shorter contexts need, or more"):
        search([8, 16], [[0.80, 0.90], [0.90, NAN]])


def test_dense_bins_keep_all_their_pages():
    result = search([8, 16], UNREACHABLE, allow_dense=True)
    assert statuses(result) == ["measured", "unreachable: dense", "unreachable: dense"]
    assert [choice.best_tail for choice in result.bins] == [0.95, 0.8123, 0.75]
    for length in (1009, 2032, 2033, 3056):  # first and last lengths of the two bins: pages 64 to 127 and 128 to 191
        assert result.schedule.bin_index(length) == (1 if length < 2033 else 2)
        assert result.schedule.budget(length) >= length
    assert result.schedule.budget(1008) == 8 * 16
    assert [choice.tail for choice in result.bins] == [0.90, None, None]


def test_after_a_dense_bin_the_fallback_is_dense():
    result = search([8, 300], [[0.7, NAN, NAN], [NAN, NAN, NAN]], allow_dense=True)
    assert kept_pages(result) == [63, 127, 191]
    assert statuses(result) == ["unreachable: dense", "too few tokens", "too few tokens"]


def test_a_budget_beyond_the_context_is_not_taken_over_dense():
    # 200 pages would be dense in the first bin as well, but cost the second one more than the 100 it needs.
    result = search([8, 100, 200], [[0.7, 0.7], [NAN, 0.9], [1.0, 0.95]], allow_dense=True)
    assert kept_pages(result) == [63, 100]


# The result


def test_the_recipe_goes_into_the_schedule():
    recipe = {
        "page_size": 32,
        "page_score": "group_softmax",
        "landmarks_per_page": 2,
        "landmark_dtype": "fp8_e4m3",
        "sink_pages": 2,
        "recent_pages": 1,
        "dense_layers": [],
        "base_model_name_or_path": "org/model",
    }
    schedule = search([4], [[0.9]], **recipe).schedule
    expected = SparsityScheduleConfig(top_k_pages=[1], bin_tokens=1024, target_acceptance=0.86, **recipe)
    assert schedule == expected


def test_describe_says_what_each_bin_rests_on():
    counts = np.array([[1000] * 4, [12345] * 4])
    result = search([8, 70], [[0.9, 0.80, 0.70, NAN], [0.95, 0.8765, 0.75, NAN]], counts, allow_dense=True)
    assert result.describe().splitlines() == [
        "Target tail acceptance 0.86",
        "cached length  pages  budget    tail  tokens  status",
        "      1-1,008      8     128  0.9000   1,000  measured",
        "  1,009-2,032     70   1,120  0.8765  12,345  measured",
        "  2,033-3,056    191   3,056       -  12,345  unreachable: dense (best 0.7500)",
        "  3,057-4,080    255   4,080       -  12,345  too few tokens",
    ]


def test_describe_says_when_a_bin_is_dense_for_the_sake_of_the_order():
    result = search([8, 16, 200], [[0.8, 0.9], [0.9, 0.8], [1.0, 1.0]], allow_dense=True)
    assert kept_pages(result) == [16, 127]
    assert result.describe().endswith("unreachable: dense (0.9000 with fewer pages than shorter contexts need)")


def test_the_cheapest_result_is_selected():
    results = [search([count], [[0.9]]) for count in (32, 8, 16, 8)]
    assert select_cheapest(iter(results), lambda schedule: schedule.budget(5000)) is results[1]
    assert select_cheapest(results, lambda schedule: -schedule.budget(5000)) is results[0]
    assert results[3] is not results[1]


def test_a_selection_needs_candidates_with_costs():
    with pytest.raises(ValueError, match="no schedule to select from"):
        select_cheapest([], lambda schedule: 0)
    with pytest.raises(ValueError, match="candidate 1 is nan"):
        results = [search([count], [[0.9]]) for count in (8, 16)]
        select_cheapest(results, lambda schedule: NAN if schedule.top_k_pages == [13] else 1)


# Bad input


VALID = {
    "page_counts": [8, 16],
    "tails": [[0.9], [0.95]],
    "counts": [[5000], [5000]],
    "bin_tokens": 1024,
    "target_acceptance": 0.86,
}


def test_the_defaults_search():
    assert search_schedule(**VALID).schedule.top_k_pages == [5]
    with pytest.raises(ValueError, match="the 200 tokens"):
        search_schedule(**{**VALID, "counts": [[199], [199]]})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_counts": [16, 8]}, r"`page_counts` must increase, got \[16, 8\]"),
        ({"page_counts": [8, 8]}, "`page_counts` must increase"),
        ({"page_counts": [8.0, 16.0]}, "`page_counts` must be a list of integers"),
        ({"page_counts": []}, "`page_counts` must be a list of integers"),
        ({"page_counts": [2, 16]}, "must be at least 3 .*got 2"),
        ({"page_counts": [8, 16, 32]}, r"with 3 budgets and at least one bin, got \(2, 1\) and \(2, 1\)"),
        ({"counts": [[5000, 1], [5000, 1]]}, r"got \(2, 1\) and \(2, 2\)"),
        ({"tails": [[], []], "counts": [[], []]}, "at least one bin"),
        ({"tails": [[0.9], [1.01]]}, "`tails` must be in .*got 1.01"),
        ({"tails": [[float("-inf")], [0.9]]}, "`tails` must be in .*got -inf"),
        ({"counts": [[5000], [-1]]}, "`counts` must be integers of at least 0"),
        ({"counts": [[5000.0], [1.0]]}, "`counts` must be integers of at least 0"),
        ({"min_tokens": 0}, "`min_tokens` must be a positive integer, got 0"),
        ({"min_tokens": True}, "`min_tokens` must be a positive integer"),
        ({"target_acceptance": None}, "`target_acceptance` must be a number in .*None"),
        ({"target_acceptance": 1.5}, "`target_acceptance` must be a number in .*1.5"),
        ({"bin_tokens": 1000, "page_size": 32}, "`bin_tokens` must be a multiple of `page_size`"),
        ({"landmarks_per_page": 2}, "`landmarks_per_page` must be 1"),
    ],
)
def test_bad_arguments_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        search_schedule(**{**VALID, **changed})


def test_results_cannot_be_changed():
    result = search([8], [[0.9]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.schedule = None
