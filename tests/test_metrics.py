"""The metrics for `evaluate`, loaded from their folder and as a Space of the Hub."""

import http.server
import json
import os
import subprocess
import sys
import threading
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


def test_it_loads_from_a_space(tmp_path):
    """`evaluate.load("user/tail_acceptance")`, from a server with the files that the Hub would have."""
    folder, asked = files("sparrow_trl") / "metrics" / "tail_acceptance", []

    class Space(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            prefix = "/spaces/user/tail_acceptance/resolve/main/"
            name = self.path.removeprefix(prefix).partition("?")[0]
            file = folder / name
            found = self.path.startswith(prefix) and "/" not in name and file.is_file()
            self.send_response(200 if found else 404)
            self.send_header("ETag", '"1"')
            self.end_headers()
            if found and self.command == "GET":
                self.wfile.write(file.read_bytes())

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Space)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "import evaluate, json\n"
        "metric = evaluate.load('user/tail_acceptance')\n"
        "result = metric.compute(predictions=[0.25] * 10 + [0.95] * 390, references=[100] * 400)\n"
        "print(json.dumps(result))\n"
    )
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    environment = {name: value for name, value in environment.items() if name not in ("HF_HUB_OFFLINE", "NO_PROXY")}
    finished = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "NO_PROXY": "127.0.0.1"}, capture_output=True, text=True
    )
    server.shutdown()
    server.server_close()
    assert finished.returncode == 0, finished.stderr[-2000:]
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["tail_acceptance"] == pytest.approx(0.95) and result["share_below_0.5"] == pytest.approx(0.025)
    assert any(path.startswith("/spaces/user/tail_acceptance/resolve/main/tail_acceptance.py") for path in asked)


def test_the_card_says_what_it_is():
    card = RepoCard.load(files("sparrow_trl") / "metrics" / "tail_acceptance" / "README.md")
    assert card.data.sdk == "gradio" and {"evaluate", "metric"} <= set(card.data.tags)
