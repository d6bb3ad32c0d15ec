"""The benchmark verifies what it times."""

import importlib.util
from pathlib import Path

import pytest


SCRIPT = Path(__file__).parents[1] / "benchmarks" / "bench_paged_decode.py"
ARGUMENTS = ["--workload", "2x200:3", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "64"]


@pytest.fixture
def bench(triton_kernels, monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_paged_decode", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *ARGUMENTS])
    return module


def test_right_kernels_are_verified(bench, capsys):
    bench.main()
    assert "2 x 200, 3 candidates kept: verified" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("landmarks", "The landmarks are not the means of their pages"),
        ("selection", "The kernels keep other pages than the definition"),
        ("attention", "The outputs are off by"),
    ],
)
def test_wrong_kernels_get_no_speed(bench, monkeypatch, capsys, broken, message):
    if broken == "landmarks":
        monkeypatch.setattr(bench, "update_landmarks", lambda keys, landmarks, slots: landmarks.fill_(1))
    else:
        decode = bench.Step.decode

        def decode_wrongly(step, index=0):
            if broken == "selection":
                step.query.neg_()
            decode(step, index)
            if broken == "selection":
                step.query.neg_()
            else:
                step.output.mul_(1.1)

        monkeypatch.setattr(bench.Step, "decode", decode_wrongly)
    with pytest.raises(SystemExit, match=f"{message}.*No speed is printed"):
        bench.main()
    assert "TB/s" not in capsys.readouterr().out
