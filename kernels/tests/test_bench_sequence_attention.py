"""The benchmark verifies what it times."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch


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


def test_queries_of_a_model_are_verified(bench, monkeypatch, capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=128, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    # A tokenizer that takes each character for a token.
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda folder: lambda text, return_tensors: {"input_ids": torch.tensor([[ord(x) % 32 for x in text]])},
    )
    (tmp_path / "text").write_text("A text of more than seventy characters, from which the benchmark takes seventy.")
    files = ["--checkpoint", str(tmp_path / "model"), "--text", str(tmp_path / "text")]
    options = ["--tokens", "70", "--top-k", "1", "--json", str(tmp_path / "results.json")]
    monkeypatch.setattr("sys.argv", [str(SCRIPT), *files, *options])
    shapes = []
    verify = bench.Case.verify
    monkeypatch.setattr(
        bench.Case, "verify", lambda case: (shapes.append([x.shape for x in case.inputs]), verify(case))
    )
    bench.main()
    assert shapes == [[(1, 4, 70, 64), (1, 2, 70, 64), (1, 2, 70, 64)]] * 4
    assert "model, 1 x 70 tokens, 1 candidates of a token kept: verified" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["checkpoint"] == str(tmp_path / "model")


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
