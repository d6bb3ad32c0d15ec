"""The environment of a process that starts an engine of its own."""

import os
import socket


def fresh_environment() -> dict[str, str]:
    """This process's variables, but for what engines in it have left, whose port is taken, and what pytest has set."""
    left = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in left}
    with socket.socket() as probe:
        probe.bind(("", 0))
        return {**environment, "MASTER_PORT": str(probe.getsockname()[1])}
