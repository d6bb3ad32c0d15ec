"""The benchmark verifies what it times."""

import importlib.util
import json
from pathlib import Path

import pytest


SCRIPT = Path(__file__).parents[1] / "benchmarks" / "bench_sequence_attention.py"
ARGUMENTS = ["--model", "Qwen2.5-0.5B", "--tokens", "70", "--top-k", "1"]


@pytest.fixture
def bench(triton_kernels, monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("bench_sequence_attention", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(module.SHAPES, "Qwen2.5-0.5B", (4, 2, 64))
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *ARGUMENTS, "--json", str(tmp_path / "results.json")])
    return module


def test_right_kernels_are_verified(bench, capsys, tmp_path):
    bench.main()
    assert "1 x 70 tokens, 1 candidates of a token kept: verified" in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert all(result["forward_ms"] > 0 and result["peak_mib"] > 0 for result in results)


@pytest.mark.parametrize("broken", ["outputs", "gradients of queries", "gradients of keys", "gradients of values"])
def test_wrong_kernels_get_no_speed(bench, monkeypatch, capsys, broken, tmp_path):
    gradients = bench.Case.gradients

    def wrong(case, attend):
        found = [*gradients(case, attend)]
        wrong_one = ["outputs", "gradients of queries", "gradients of keys", "gradients of values"].index(broken)
        found[wrong_one] = found[wrong_one] * 1.1
        return found

    monkeypatch.setattr(bench.Case, "gradients", wrong)
    with pytest.raises(SystemExit, match=f"The {broken} are off by .*No speed is printed"):
        bench.main()
    assert "verified" not in capsys.readouterr().out and not (tmp_path / "results.json").exists()
