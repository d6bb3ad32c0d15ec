"""Processes that start engines of their own, and their environment."""

import os
import socket
import subprocess
import sys
from pathlib import Path


SECONDS_TO_END = 600


def fresh_environment() -> dict[str, str]:
    """This process's variables, but for what engines in it have left, whose port is taken, and what pytest has set."""
    left = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in left}
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {**environment, "MASTER_PORT": str(probe.getsockname()[1])}


def run_in_a_process(command: list[str], **variables: str) -> str:
    """Run a command with the tests' modules on its path and further environment variables, and return its output."""
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    environment = {**fresh_environment(), **defaults, **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS_TO_END)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_two_processes(*arguments: str) -> str:
    """
    Run a script, or a module behind `-m`, in two processes on the CPU.

    accelerate's launcher starts several processes on a CPU through MPI alone; they are the same under torchrun.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return run_in_a_process([*launcher, *arguments], ACCELERATE_USE_CPU="true")
