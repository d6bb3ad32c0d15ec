"""A `sparrow-trl serve` process for the tests."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from fresh_process import fresh_environment


SECONDS_TO_START = 240


class ServerProcess:
    """
    A server on a free port of this machine, with its output in a file.

    Args:
        model (`str`): Folder of the model.
        schedule (`str`): Folder of the schedule.
        log (`pathlib.Path`): File for the output.
        *options (`str`): Further options.
        worker_in_core (`bool`):
            Whether the worker is in the engine core's process, as with one GPU, or in one of its own, as with several.
    """

    def __init__(self, model: str, schedule: str, log: Path, *options: str, worker_in_core: bool):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "sparrow_trl", "serve", model, "--schedule", schedule, "--port", str(port)]
        command += ["--host", "127.0.0.1", *options]
        self.log = log
        environment = {**fresh_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not worker_in_core))}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.stop()
        raise AssertionError(f"The server did not start:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        """End it and its workers."""
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
