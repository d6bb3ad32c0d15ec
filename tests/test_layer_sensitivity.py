"""Measured schedules are remembered, and the layer that matters is found by its sensitivity."""

import json

import numpy as np
import pytest
from tiny_models import model_of_one_layer, random_token_ids, tiny_model

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.acceptance_sweep import TokenSequence, sequence_acceptance
from sparrow_trl.layer_sensitivity import LayerSensitivity, group_by_sensitivity, measure_sensitivity, split_layers
from sparrow_trl.schedule_measurements import ScheduleMeasurements


SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 3], bin_tokens=128, dense_layers=[])
LAYER = 2


@pytest.fixture(scope="module")
def model():
    return model_of_one_layer(LAYER)


@pytest.fixture(scope="module")
def sequences():
    return [TokenSequence(row, 20) for row in random_token_ids(391, 386, 380)]


def test_rates_are_those_of_single_schedules_after_one_dense_pass(model, sequences):
    other = SparsityScheduleConfig(top_k_pages=[2], bin_tokens=128, dense_layers=[0])
    measurements = ScheduleMeasurements(model, sequences)
    passes = []
    hook = model.model.layers[0].register_forward_hook(lambda *args: passes.append(model.config._attn_implementation))
    first, second = measurements.rates(SCHEDULE), measurements.rates(other, 2)
    hook.remove()
    assert passes.count("sparrow_sparse") == 5 and len(passes) == 5 + 3
    assert (measurements.passes, measurements.requested) == (5, 5)
    for rates, schedule in ((first, SCHEDULE), (second, other)):
        for values, sequence in zip(rates, sequences, strict=False):
            expected = next(sequence_acceptance(model, sequence, [schedule])).numpy()
            np.testing.assert_allclose(values, expected, atol=1e-5)
    assert len(second) == 2
    assert measurements.rates(SCHEDULE)[2].tolist() == first[2].tolist() and measurements.passes == 5


def test_measurements_outlive_an_interruption(model, sequences, tmp_path):
    first = ScheduleMeasurements(model, sequences, folder=tmp_path)
    expected = first.rates(SCHEDULE, 2)
    calls = []
    again = ScheduleMeasurements(model, sequences, folder=tmp_path, on_measured=calls.append)
    # Another notation of what is read at these lengths.
    same = SparsityScheduleConfig(
        top_k_pages=[9, 9],
        bin_tokens=128,
        dense_layers=[],
        layer_top_k_pages={"0-1": [1, 3], "2": [1, 3, 3], "3": [1, 3]},
    )
    assert [values.tolist() for values in again.rates(same, 2)] == [values.tolist() for values in expected]
    assert again.passes == 0 and again.requested == 2 and calls == [2]
    again.rates(SCHEDULE)
    assert again.passes == 1 and calls == [2, 1] and len(list(tmp_path.iterdir())) == 1

    (path,) = tmp_path.iterdir()
    for other in (
        SparsityScheduleConfig(top_k_pages=[1, 3], bin_tokens=128, dense_layers=[], landmark_dtype="fp8_e4m3"),
        SparsityScheduleConfig(top_k_pages=[1, 3], bin_tokens=128, dense_layers=[3]),
        SparsityScheduleConfig(top_k_pages=[1, 4], bin_tokens=128, dense_layers=[]),
    ):
        again.rates(other, 1)
    assert again.passes == 4 and len(list(tmp_path.iterdir())) == 4
    # A group that reads everything is measured as what it is.
    dense = ScheduleMeasurements(model, sequences, folder=tmp_path)
    tables = {"0": [9, 99]}
    whole = SparsityScheduleConfig(top_k_pages=[1, 3], bin_tokens=128, dense_layers=[], layer_top_k_pages=tables)
    dense.rates(whole, 1)
    dense.rates(SparsityScheduleConfig(top_k_pages=[1, 3], bin_tokens=128, dense_layers=[0]), 1)
    assert dense.passes == 1

    trained = tiny_model("qwen3", seed=1).eval()
    other = ScheduleMeasurements(trained, sequences, folder=tmp_path)
    other.rates(SCHEDULE, 1)
    assert other.passes == 1

    state = json.loads(path.read_text())
    state["rates"] = {name: text[:-9] for name, text in state["rates"].items()}
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=f"{path.name} is damaged.*Remove it"):
        ScheduleMeasurements(model, sequences, folder=tmp_path).rates(SCHEDULE)


def test_tails_are_quantiles_of_the_pooled_rates(model, sequences):
    measurements = ScheduleMeasurements(model, sequences, confidence=0.8)
    measured = measurements.tails(SCHEDULE)
    rates, lengths = np.concatenate(measurements.rates(SCHEDULE)), [s.cached_lengths.numpy() for s in sequences]
    owners = np.repeat(range(3), [len(part) for part in lengths])
    bins = SCHEDULE.bin_index(np.concatenate(lengths))
    assert measured.tokens.tolist() == np.bincount(bins).tolist()
    for index in range(3):
        pooled = rates[bins == index]
        assert measured.tails[index] == pytest.approx(np.quantile(pooled, 0.05), abs=1e-6)
        resampled = []
        for draw in np.random.default_rng(0).multinomial(3, [1 / 3] * 3, 200):
            drawn = [np.tile(rates[(bins == index) & (owners == owner)], times) for owner, times in enumerate(draw)]
            resampled.append(np.quantile(np.concatenate(drawn), 0.05, method="lower"))
        lower = min(measured.tails[index], np.quantile(resampled, 0.1))
        assert measured.guarded[index] == pytest.approx(lower, abs=1e-6)
    assert (measured.guarded < measured.tails).any()
    plain = ScheduleMeasurements(model, sequences).tails(SCHEDULE, num_bins=2, num_sequences=1)
    assert (plain.guarded == plain.tails).all() and plain.tokens.tolist() == [112 - 20, 128]


def test_refusals(model, sequences):
    with pytest.raises(ValueError, match="no sequences"):
        ScheduleMeasurements(model, [])
    with pytest.raises(ValueError, match="between 0 and 1, got 90"):
        ScheduleMeasurements(model, sequences, confidence=90)


@pytest.mark.parametrize("dense_layers", [[], [1]])
def test_the_layer_that_matters_is_the_sensitive_one(model, sequences, dense_layers):
    measurements = ScheduleMeasurements(model, sequences)
    schedule = SparsityScheduleConfig(top_k_pages=[1, 5], bin_tokens=128, dense_layers=dense_layers)
    judged = np.array([True, True, False])
    found = measure_sensitivity(measurements, schedule, [[0], [1], [2], [3]], judged=judged, num_sequences=2)
    assert measurements.requested == 16
    base = measurements.tails(schedule, num_sequences=2).tails
    for entry in found:
        assert entry.smaller[2] is None and entry.larger[2] is None
        if entry.layers == [LAYER]:
            assert entry.smaller[1] < base[1] - 0.05 and entry.larger[1] > base[1] + 0.02
            assert entry.score > 0.05
        else:
            assert entry.smaller[1] == pytest.approx(base[1], abs=0.01)
            assert abs(entry.score) < 0.01
    assert group_by_sensitivity(found, 4)[0] == [LAYER]


def test_layers_are_grouped_by_rank():
    assert split_layers([0, 1, 2, 4, 5], 2) == [[0, 1], [2, 4], [5]]
    entries = [
        LayerSensitivity([layer], [0.5, None], [0.5 + gain, None]) for layer, gain in enumerate([1, 9, 3, 8, 2])
    ]
    assert group_by_sensitivity(entries, 2) == [[1, 2, 3], [0, 4]]
    assert group_by_sensitivity(entries, 9) == [[1], [3], [2], [4], [0]]
    # A gain counts per layer that was changed.
    assert LayerSensitivity([1, 2], [0.5, 0.7], [0.7, 0.8]).score == pytest.approx(0.075)
