"""The command `sparrow-trl`: what it loads, and how it answers to arguments that are wrong."""

import subprocess
import sys

import pytest

from sparrow_trl import versions
from sparrow_trl.cli import main


BENCH = ["bench", "--model", "qwen3-1.7b", "--preset", "qwen3-1.7b-0.86"]


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"]])
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
    assert "usage: sparrow-trl" in run.stdout and "bench" in run.stdout


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
