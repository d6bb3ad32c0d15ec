"""From measured budgets to a schedule: search, check of the schedule as a whole, and the command around it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from sparrow_trl import SparsityScheduleConfig, calibration, cli_calibrate
from sparrow_trl.acceptance import BinStatistics
from sparrow_trl.acceptance_sweep import TokenSequence, sequence_acceptance
from sparrow_trl.acceptance_table import AcceptanceTable
from sparrow_trl.calibration import calibrate, fit_schedule, measure_schedule
from sparrow_trl.cli import main
from sparrow_trl.cli_calibrate import CalibrateArguments, complete_prompts, cut_texts, load_prompts


RECIPE = SparsityScheduleConfig(top_k_pages=[0], dense_layers=[0])
PAGE_COUNTS = [3, 5, 8, 100]
TEXT = "Sparse rollouts read some pages of the cache, dense ones read them all. "


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3").eval()


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(0)
    return [TokenSequence(torch.randint(2, 70, (n,), generator=generator).tolist(), 20) for n in (241, 236, 230)]


def tail_of(model, sequences, schedule, first, last):
    """5th percentile over the cached lengths from `first` to `last`, of all rates at hand."""
    rates, lengths = [], []
    for sequence in sequences:
        rates += next(sequence_acceptance(model, sequence, [schedule])).tolist()
        lengths += sequence.cached_lengths.tolist()
    rates, lengths = np.array(rates), np.array(lengths)
    return np.quantile(rates[(lengths >= first) & (lengths <= last)], 0.05)


def test_a_schedule_holds_its_target_as_a_whole(model, sequences):
    options = {"recipe": RECIPE, "page_counts": PAGE_COUNTS, "bin_tokens": 64, "min_tokens": 50}
    free = fit_schedule(model, sequences, target_acceptance=0.01, **options)
    # Between what the smallest budget and what all pages give, so that bins differ in what they need.
    tails = [entry.tail for entry in free.verified]
    assert min(tails) < 0.9
    target = round((min(tails) + 1) / 2, 3)
    result = fit_schedule(model, sequences, target_acceptance=target, **options)
    schedule = result.schedule
    assert sorted(schedule.top_k_pages) == schedule.top_k_pages
    assert set(schedule.top_k_pages) <= {count - 3 for count in PAGE_COUNTS}
    assert sum(schedule.top_k_pages) > sum(free.schedule.top_k_pages)
    assert not result.short_bins and schedule.target_acceptance == target and schedule.dense_layers == [0]
    for entry in result.verified:
        # Lengths are rounded up to whole pages.
        assert entry.tail == pytest.approx(
            tail_of(model, sequences, schedule, max(1, entry.start - 15), entry.start + 48), abs=1e-3
        )
        assert entry.tail >= target
    assert schedule.calibration["sequences"] == 3 and schedule.calibration["tokens"] == 220 + 215 + 209
    assert schedule.calibration["tails"] == {str(e.start): round(e.tail, 4) for e in result.verified if e.tokens >= 50}


def bins_of(*tails, tokens=1000):
    return [BinStatistics(64 * i, tokens, 0.99, tail, 0.0, 0.0) for i, tail in enumerate(tails)]


def test_bins_that_fall_short_as_a_whole_are_raised(model, sequences, monkeypatch):
    measured, lines = [], []
    answers = [bins_of(0.9, 0.001, 0.9, 0.9), bins_of(0.9, 0.9, 0.9, 0.002), bins_of(0.9, 0.9, 0.9, 0.9)]

    def measure(model, sequences, schedule, chunk_size):
        measured.append(schedule.top_k_pages)
        return answers[len(measured) - 1]

    monkeypatch.setattr(calibration, "measure_schedule", measure)
    options = {"recipe": RECIPE, "page_counts": PAGE_COUNTS, "bin_tokens": 64, "min_tokens": 50}
    result = fit_schedule(model, sequences, target_acceptance=0.01, report=lines.append, **options)
    # The second bin is raised and takes the later ones along; then the last one alone is.
    assert measured == [[0, 0, 0, 0], [0, 2, 2, 2], [0, 2, 2, 5]]
    assert result.schedule.top_k_pages == [0, 2, 2, 5] and result.search.schedule.top_k_pages == [0] * 4
    assert len(lines) == 2 and "1 of 4 bins fall short of 0.01 (lowest: 0.0010 around 96 tokens)" in lines[0]
    rows = result.to_table().rows
    assert [row[1] for row in rows] == ["3", "5", "5", "8"]
    assert "raised from 3" in rows[3][5] and "raised" not in rows[0][5]


def test_what_even_the_largest_budget_does_not_reach_is_named(model, sequences, monkeypatch):
    # In the last bin the largest budget is 8 of 15 pages; in the second one it is all there are.
    options = {"recipe": RECIPE, "page_counts": [3, 5, 8], "bin_tokens": 64, "min_tokens": 50}
    answer = bins_of(0.9, 0.001, 0.9, 0.001)
    monkeypatch.setattr(calibration, "measure_schedule", lambda *args, **kwargs: answer)
    result = fit_schedule(model, sequences, target_acceptance=0.01, **options)
    assert [entry.start for entry in result.short_bins] == [192]
    assert result.schedule.top_k_pages == [0, 5, 5, 5]
    answer = [*bins_of(0.9), *bins_of(0.9, 0.001, 0.9, 0.001, tokens=10)[1:]]
    assert not fit_schedule(model, sequences, target_acceptance=0.01, **options).short_bins


def test_what_cannot_be_fitted_is_refused_before_it_is_measured(model, sequences, monkeypatch):
    monkeypatch.setattr(calibration, "measure_acceptance", lambda *args, **kwargs: pytest.fail("measured"))
    for wrong in ({"target_acceptance": 86}, {"target_acceptance": None}, {"min_tokens": 0}, {"bin_tokens": 100}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            fit_schedule(model, sequences, **wrong)


def test_confidence_asks_more_of_a_budget(model, sequences):
    options = {"recipe": RECIPE, "page_counts": PAGE_COUNTS, "bin_tokens": 64, "min_tokens": 50}
    seen = []
    fit_schedule(model, sequences, target_acceptance=0.01, on_measured=seen.append, **options)
    (table,) = seen
    tails, lower = table.quantile(0.05), table.quantile_interval(0.05, level=0.9)[..., 0]
    row, column = np.argwhere((lower < tails - 0.005) & (table.count >= 50) & (np.arange(4) == 3))[0]
    # Between the two: enough for the tail itself, too little for the lower end of its interval.
    target = float(lower[row, column] + tails[row, column]) / 2
    plain, careful = (
        fit_schedule(
            model, sequences, target_acceptance=target, confidence=level, **options
        ).search.schedule.top_k_pages
        for level in (None, 0.9)
    )
    assert plain[column] <= PAGE_COUNTS[row] - 3 < careful[column]
    with pytest.raises(ValueError, match="`confidence` must be between 0 and 1, got 1.5"):
        fit_schedule(model, sequences, confidence=1.5)


def test_an_unreachable_target_leaves_the_table(model, sequences):
    seen = []
    options = {"recipe": RECIPE, "page_counts": [3, 5], "bin_tokens": 64, "min_tokens": 50}
    with pytest.raises(ValueError, match="No measured budget reaches"):
        fit_schedule(model, sequences, target_acceptance=0.999, on_measured=seen.append, **options)
    assert seen[0].page_counts == [3, 5] and seen[0].count.sum() > 0


def test_measuring_leaves_the_model_in_its_mode(model, sequences):
    model.train()
    try:
        schedule = SparsityScheduleConfig(top_k_pages=[2], bin_tokens=64, dense_layers=[])
        measured = measure_schedule(model, sequences, schedule)
        assert model.training
    finally:
        model.eval()
    assert [entry.start for entry in measured] == [0, 64, 128, 192]
    assert sum(entry.tokens for entry in measured) == 220 + 215 + 209
    assert all(entry.bound_gap == 0 for entry in measured)


def test_a_saved_result_loads_again(model, sequences, tmp_path):
    result = fit_schedule(
        model, sequences, recipe=RECIPE, page_counts=PAGE_COUNTS, bin_tokens=64, min_tokens=50, allow_dense=True
    )
    result.save(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    names = {"acceptance_table.json", "sparsity_schedule.json", "tail_acceptance.png", "schedule.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert SparsityScheduleConfig.from_pretrained(folder) == result.schedule
    assert AcceptanceTable.load(folder / "acceptance_table.json") == result.table
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))


def test_the_picture_shows_budgets_and_the_schedule(model, sequences):
    result = fit_schedule(
        model, sequences, recipe=RECIPE, page_counts=PAGE_COUNTS, bin_tokens=64, min_tokens=50, allow_dense=True
    )
    (ax,) = result.plot_tails().axes
    lines = {line.get_label(): line for line in ax.lines}
    assert {"3", "5", "8", "100"} <= lines.keys()
    tails = result.table.quantile(0.05)
    enough = result.table.count[0] >= 50
    assert lines["5"].get_ydata() == pytest.approx(tails[1][enough])
    middles = [sum(result.schedule.bin_lengths(index)) / 2 for index in np.flatnonzero(enough).tolist()]
    assert lines["5"].get_xdata() == pytest.approx(middles) and middles[:2] == [24.5, 80.5]


def test_calibrate_generates_what_it_measures_on(model):
    result = calibrate(
        model,
        tiny_tokenizer(),
        ["12+34=", "7*8="],
        max_length=120,
        generator="transformers",
        seed=1,
        recipe=RECIPE,
        page_counts=[3, 100],
        bin_tokens=64,
        min_tokens=1,
        allow_dense=True,
    )
    assert result.table.count.sum() > 0 and result.schedule.calibration["sequences"] <= 2


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "model"
    tiny_model("qwen3").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_command_on_texts(saved, tmp_path, capsys):
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": TEXT * 4}, {"text": TEXT[::-1] * 4}, {"text": TEXT}])
    settings = tmp_path / "settings.yaml"
    settings.write_text(
        "bin_tokens: 64\npage_size: 32\npage_counts: [3, 6, 100]\ndense_layers: [-1]\nmin_tokens: 20\nnum_prompts: 2\n"
    )
    output = tmp_path / "out"
    arguments = ["calibrate", "--model_name_or_path", str(saved), "--texts", texts, "--output_dir", str(output)]
    options = ["--prompt_tokens", "30", "--max_length", "200", "--config", str(settings), "--allow_dense", "True"]
    assert main([*arguments, *options]) == 0
    printed = capsys.readouterr().out
    assert "2 sequences of 200 to 200 tokens." in printed and "tail, whole schedule" in printed
    schedule = SparsityScheduleConfig.from_pretrained(output)
    assert schedule.bin_tokens == 64 and schedule.dense_layers == [] and schedule.target_acceptance == 0.86
    table = AcceptanceTable.load(output / "acceptance_table.json")
    assert table.page_counts == [3, 6, 100] and table.count.sum(1).tolist() == [2 * 169] * 3
    # All is there already: the measurement is read from its file, with other targets too.
    assert main([*arguments, *options, "--target_acceptance", "0.5"]) == 0
    assert SparsityScheduleConfig.from_pretrained(output).target_acceptance == 0.5


def test_the_command_on_prompts(saved, tmp_path, capsys):
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"question": "12+34=", "answer": "46"}] * 3)
    output = tmp_path / "out"
    arguments = ["--model_name_or_path", str(saved), "--dataset", prompts, "--output_dir", str(output)]
    options = ["--max_length", "90", "--bin_tokens", "32", "--page_counts", "3", "100", "--min_tokens", "5"]
    options += ["--generator", "transformers"]
    assert main(["calibrate", *arguments, *options, "--allow_dense", "True"]) == 0
    assert "transformers completes the prompts." in capsys.readouterr().out
    assert SparsityScheduleConfig.from_pretrained(output).calibration["sequences"] <= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --dataset"),
        (["--texts", "a.txt", "--dataset", "b"], "either --dataset"),
        (["--texts", "a.txt", "--prompt_tokens", "4095"], "--prompt_tokens must be between 1 and 4094"),
        (["--dataset", "b", "--num_prompts", "0"], "--num_prompts must be positive, got 0"),
        (["--dataset", "b", "--target_acceptance", "86"], "target_acceptance"),
        (["--dataset", "b", "--page_counts", "8", "4"], "`page_counts` must ascend"),
        (["--dataset", "b", "--dtype", "fp16"], "--dtype must be one of auto, bfloat16, float16, float32, got 'fp16'"),
        (["--texts", "b", "--prompt_column", "c"], "--prompt_column is for --dataset"),
        (["--dataset", "b", "--method", "paper"], "--method must be one of teacher_forced, rollout, got 'paper'"),
        (["--dataset", "b", "--generator", "tgi"], "--generator must be one of auto, vllm, transformers, got 'tgi'"),
        (["--texts", "b", "--method", "rollout"], "--method rollout generates what it measures on: give --dataset"),
        (["--dataset", "b", "--method", "rollout", "--generator", "transformers"], "generates with vLLM alone"),
        (["--dataset", "b", "--vllm_gpu_memory_utilization", "90"], "must be above 0 and at most 1, got 90"),
        (["--dataset", "b", "--config", "nothing-there.yaml"], "nothing-there.yaml"),
        (["--dataset", "b", "--config"], "--config needs a YAML file"),
        (["--dataset", "b", "--page_score", "quest"], "page_score"),
        (["--texts", "nothing-there.txt"], "--texts must be a file, got 'nothing-there.txt'"),
    ],
)
def test_arguments_that_cannot_be_calibrated(arguments, message, capsys):
    assert main(["calibrate", "--model_name_or_path", "m", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_data_that_cannot_be_calibrated(saved, tmp_path, capsys):
    model = ["calibrate", "--model_name_or_path", str(saved), "--output_dir", str(tmp_path / "out")]
    rows = write_lines(tmp_path / "rows.jsonl", [{"sentence": TEXT}])
    assert main([*model, "--dataset", rows]) == 1
    assert "no column prompt or problem or question or text; its columns are sentence" in capsys.readouterr().err
    assert main([*model, "--dataset", rows, "--prompt_column", "words"]) == 1
    assert "no column words" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("Short.")
    assert main([*model, "--texts", str(short)]) == 1
    assert "1 of 1 texts have fewer than 258 tokens" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"prompt": None}], "row 1 has 'None'"),
        ([{"prompt": 5}], "must hold texts, or conversations throughout; row 0 has '5'"),
        ([], "could not be read as JSON Lines"),
    ],
)
def test_prompts_of_other_kinds_are_refused(tmp_path, capsys, rows, message):
    data = write_lines(tmp_path / "rows.jsonl", rows)
    assert main(["calibrate", "--model_name_or_path", "m", "--dataset", data]) == 1
    assert message in capsys.readouterr().err


def test_long_texts_are_cut_and_prompts_are_lines(tmp_path):
    tokenizer = tiny_tokenizer()
    args = CalibrateArguments("m", texts="t.txt", prompt_tokens=10, max_length=100, num_prompts=3)
    (one,) = [TEXT * 5]  # 355 tokens, one a character
    cut = cut_texts(tokenizer, [one], args)
    assert [len(sequence.token_ids) for sequence in cut] == [100, 100, 100]
    assert sum((sequence.token_ids for sequence in cut), []) == tokenizer(one)["input_ids"][:300]
    assert [len(s.token_ids) for s in cut_texts(tokenizer, [TEXT[:50], one], args)] == [50, 100]
    (tmp_path / "p.txt").write_text("a=\n\nb=\nc=\nd=\n")
    prompts = CalibrateArguments("m", dataset=str(tmp_path / "p.txt"), num_prompts=3)
    assert load_prompts(prompts) == ["a=", "b=", "c="]


def test_completions_are_kept_for_a_run_that_goes_on(model, tmp_path, monkeypatch):
    args = CalibrateArguments("m", dataset="d", max_length=60, seed=3, generator="transformers")
    prompts, path = ["1+2=", "3*4="], tmp_path / "sequences.json"
    first = complete_prompts(model, tiny_tokenizer(), prompts, args, path)
    monkeypatch.setattr(cli_calibrate, "generate_sequences", lambda *args, **kwargs: pytest.fail("generated again"))
    assert complete_prompts(model, tiny_tokenizer(), prompts, args, path) == first
    with pytest.raises(pytest.fail.Exception):
        complete_prompts(model, tiny_tokenizer(), prompts, replace(args, seed=4), path)


def test_help_of_calibrate_explains_its_arguments(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: sparrow-trl calibrate" in printed and "Tail acceptance to keep." in printed
