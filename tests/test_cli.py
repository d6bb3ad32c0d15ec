"""The command `sparrow-trl`: what it loads, and how it answers to arguments that are wrong."""

import subprocess
import sys

import pytest

from sparrow_trl import SparsityScheduleConfig, versions
from sparrow_trl.bench_plan import load_config
from sparrow_trl.cli import main
from sparrow_trl.cost_model import CostShape, predicted_speedup
from sparrow_trl.schedule_report import describe_recipe, schedule_tables


BENCH = ["bench", "--model", "qwen3-1.7b", "--preset", "qwen3-1.7b-0.86"]


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["show", "--help"], ["estimate", "--help"]])
def test_help_loads_no_library(arguments):
    code = (
        "import sys\n"
        "from sparrow_trl.cli import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "except SystemExit as stop:\n"
        "    heavy = {'torch', 'vllm', 'trl', 'transformers', 'matplotlib', 'rich', 'numpy'} & set(sys.modules)\n"
        "    sys.exit(stop.code or str(heavy or ''))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 or not run.stderr.strip(), run.stderr
    assert "usage: sparrow-trl" in run.stdout and arguments[0].strip("-") in run.stdout


def test_the_module_is_the_command():
    run = subprocess.run([sys.executable, "-m", "sparrow_trl", "bench", "--help"], capture_output=True, text=True)
    assert run.returncode == 0
    assert run.stdout.startswith("usage: sparrow-trl bench")


def test_without_vllm_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(versions, "installed_version", lambda package: None)
    assert main([*BENCH, "--workload", "1x64"]) == 1
    error = capsys.readouterr().err
    assert "vllm is not installed" in error and "pip install" in error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--workload", "64"], "BATCHxCONTEXT"),
        (["--batch", "many"], "must be a positive integer"),
        (["--context", "16,a"], "must be a positive integer"),
        (["--steps", "0"], "must be a positive integer"),
        (["--variant", "all"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*BENCH, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--context", "64"], "--context needs --batch"),
        (["--batch", "4"], "--batch needs --context"),
        (["--workload", "1x64", "--preset", "qwen3-1.7b-0.86"], "a second 'qwen3-1.7b-0.86'"),
    ],
)
def test_arguments_that_lack_others_are_refused(arguments, message, capsys):
    assert main([*BENCH, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_an_unknown_preset_is_refused_with_the_known_ones(capsys):
    assert main(["bench", "--model", "m", "--preset", "qwen3-1.7b-0.87", "--workload", "1x64"]) == 1
    assert "qwen3-1.7b-0.86" in capsys.readouterr().err


def cells(line):
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_show_prints_and_draws_a_schedule(tmp_path, capsys):
    SparsityScheduleConfig(top_k_pages=[1, 1, 4], bin_tokens=64, layer_top_k_pages={"2-3": [9]}).save_pretrained(
        tmp_path
    )
    picture = tmp_path / "schedule.png"
    assert main(["show", str(tmp_path), "--plot", str(picture)]) == 0
    output = capsys.readouterr().out
    assert "Pages of 16 tokens, mean_query, 1 landmark a page" in output and f"Wrote {picture}." in output
    rows = [cells(line) for line in output.splitlines() if line.startswith("│")]
    assert rows == [
        ["1 and more", "9", "192", "100.0%", ""],
        ["1 to 112", "1", "64", "100.0%", "57.1%"],
        ["113 and more", "4", "112", "85.8%", ""],
    ]
    assert "layers 2-3" in output and "other layers" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_show_of_a_dense_schedule_and_of_none(capsys):
    assert main(["show", "qwen3-1.7b-0.8"]) == 1
    assert "qwen3-1.7b-0.80" in capsys.readouterr().err
    assert schedule_tables(SparsityScheduleConfig.dense()) == []
    assert "whole context" in describe_recipe(SparsityScheduleConfig.dense())


@pytest.mark.parametrize("length", [1, 100, 1984, 1985, 3984, 3985, 20000])
def test_the_table_is_what_the_schedule_says(length):
    schedule = SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86")
    (table,) = schedule_tables(schedule)
    spans = [row[0].replace(" and more", f" to {10**9}").split(" to ") for row in table.rows]
    (row,) = [row for row, (first, last) in zip(table.rows, spans, strict=True) if int(first) <= length <= int(last)]
    assert int(row[1]) == schedule.top_k(length) and int(row[2]) == schedule.budget(length)


def test_estimate(capsys):
    arguments = ["--schedule", "qwen3-4b-0.86", "--batch", "27", "--bandwidth-share", "0.9", "--overhead-ms", "2"]
    assert main(["estimate", "--model", "qwen3-4b", "--schedule", "qwen3-4b-0.92", *arguments]) == 0
    rows = [cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["qwen3-4b-0.92", "qwen3-4b-0.86"]
    schedule = SparsityScheduleConfig.from_preset("qwen3-4b-0.86")
    shape = CostShape.from_config(load_config("qwen3-4b"))
    options = {"batch_size": 27, "bandwidth_share": 0.9, "overhead_seconds": 2e-3}
    expected = predicted_speedup(shape, schedule, "H200", **options)
    assert rows[1][3] == f"{expected.paper:.2f}x" and rows[1][6] == f"{expected.refined:.2f}x"
    assert rows[1][4:6] == [f"{expected.dense_seconds:.1f}", f"{expected.sparse_seconds:.1f}"]
    given = ["--peak-tflops", "989.5", "--bandwidth", "4.8"]
    assert main(["estimate", "--model", "qwen3-4b", *arguments, *given]) == 0
    (row,) = [cells(line) for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert row == rows[1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hardware", "V100"], "Unknown hardware 'V100'"),
        (["--bandwidth", "4.8"], "needs both figures"),
        (["--bandwidth-share", "1.2"], "`bandwidth_share` must be a number above 0 and at most 1"),
        (["--prompt-tokens", "-1"], "`prompt_tokens` must be an integer of at least 0, got -1"),
        (["--schedule", "nothing-there"], "nothing-there"),
        (["--model", "qwen3-2b"], "The shapes are qwen3-1.7b"),
    ],
)
def test_what_cannot_be_estimated_is_refused(arguments, message, capsys):
    assert main(["estimate", "--model", "qwen3-4b", "--schedule", "qwen3-4b-0.86", *arguments]) == 1
    assert message in capsys.readouterr().err
