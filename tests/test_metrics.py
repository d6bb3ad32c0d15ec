"""The metrics for `evaluate`, loaded from their folder."""

from importlib.resources import files

import evaluate
import numpy as np
import pytest
from huggingface_hub import RepoCard


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield evaluate.load(
            str(files("sparrow_trl") / "metrics" / "tail_acceptance"), cache_dir=str(tmp_path_factory.mktemp("cache"))
        )


def test_tails_are_quantiles_by_bin(metric):
    generator = np.random.default_rng(0)
    rates, lengths = generator.beta(20, 1, 1000), generator.integers(1, 4096, 1000)
    result = metric.compute(predictions=rates, references=lengths, bin_tokens=1024, tail_quantile=0.1)
    # Lengths are rounded up to whole pages.
    bins = -(-lengths // 16) * 16 // 1024
    expected = {1024 * index: np.quantile(rates[bins == index], 0.1) for index in range(4)}
    found = {start: tail for start, tail in result["tail_by_bin"].items() if start < 4096}
    assert found == pytest.approx(
        {start: tail for start, tail in expected.items() if (bins == start // 1024).sum() >= 200}
    )
    assert len(found) >= 3
    assert result["tail_acceptance"] == min(result["tail_by_bin"].values())
    assert result["mean_acceptance"] == pytest.approx(rates.mean())


def test_batches_add_up(metric):
    for rate in (0.5, 0.9):
        metric.add_batch(predictions=[rate] * 200, references=[100] * 200)
    result = metric.compute()
    assert result["tail_by_bin"] == {0: pytest.approx(0.5)} and result["mean_acceptance"] == pytest.approx(0.7)


def test_bins_of_few_tokens_have_no_tail(metric):
    result = metric.compute(predictions=[0.2, 0.9], references=[10, 20])
    assert "tail_acceptance" not in result and result["share_below_0.5"] == 0.5
    assert metric.compute(predictions=[0.2, 0.9], references=[10, 20], min_tokens=2)["tail_acceptance"] < 0.25


def test_the_card_says_what_it_is():
    card = RepoCard.load(files("sparrow_trl") / "metrics" / "tail_acceptance" / "README.md")
    assert card.data.sdk == "gradio" and {"evaluate", "metric"} <= set(card.data.tags)
