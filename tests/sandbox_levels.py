"""The isolations of this machine, for tests, and how to run programs in each; also as a user who is not root."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from sparrow_trl.code_runner import CodeTestResult, run_programs
from sparrow_trl.code_tests import parse_tests
from sparrow_trl.sandbox import LEVELS, SandboxConfig, isolation_problem


# Without root, programs are of the trainer's user, and namespaces are those of a new user namespace. This one may read
# the files of others, since the interpreter may lie in a folder of root's.
UNPRIVILEGED = "-unprivileged"
UNPRIVILEGED_UID = 23456
AS_USER = ["setpriv", f"--reuid={UNPRIVILEGED_UID}", f"--regid={UNPRIVILEGED_UID}", "--clear-groups"]
AS_USER += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search", "--"]
RUN_FROM_STDIN = """
import json, sys
from dataclasses import asdict
from sparrow_trl.code_runner import run_programs
from sparrow_trl.code_tests import parse_tests
from sparrow_trl.sandbox import SandboxConfig
job = json.load(sys.stdin)
tests = [parse_tests(job["tests"])] * len(job["programs"])
outcomes = run_programs(job["programs"], tests, SandboxConfig(**job["config"]))
print(json.dumps([[asdict(result) for result in results] for results in outcomes]))
"""


def _unprivileged_levels() -> list[str]:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return []
    code = "from sparrow_trl.sandbox import isolation_problem as problem"
    code += "\nprint(*(level for level in ('namespaces', 'rlimits') if problem(level) is None))"
    result = subprocess.run([*AS_USER, sys.executable, "-B", "-c", code], capture_output=True, text=True, cwd="/")
    return [level + UNPRIVILEGED for level in result.stdout.split()]


AVAILABLE = [level for level in LEVELS if isolation_problem(level) is None]
ALL_LEVELS = AVAILABLE + _unprivileged_levels()


def is_unprivileged(level: str) -> bool:
    return level.endswith(UNPRIVILEGED)


def command_prefix(level: str) -> list[str]:
    return AS_USER if is_unprivileged(level) else []


def config_of(level: str, **limits) -> SandboxConfig:
    return SandboxConfig(isolation=level.split("-")[0], **{"wall_seconds": 5, "cpu_seconds": 3, **limits})


def run_all_at(level: str, programs: list[str], tests, **limits) -> list[list[CodeTestResult]]:
    """Run programs against the same tests at a level."""
    config = config_of(level, **limits)
    if not is_unprivileged(level):
        return run_programs(programs, [parse_tests(tests)] * len(programs), config)
    job = json.dumps({"programs": programs, "tests": tests, "config": asdict(config)})
    command = [*AS_USER, sys.executable, "-B", "-c", RUN_FROM_STDIN]
    result = subprocess.run(command, input=job, capture_output=True, text=True, timeout=120, cwd="/")
    assert result.returncode == 0, result.stderr
    return [[CodeTestResult(**values) for values in results] for results in json.loads(result.stdout)]


def run_at(level: str, program: str, tests, **limits) -> list[CodeTestResult]:
    """Run a program against tests at a level."""
    return run_all_at(level, [program], tests, **limits)[0]


def named_processes(name: str) -> list[int]:
    """Processes of a name, in all namespaces below this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            if f"Name:\t{name}\n" in status and "State:\tZ" not in status:
                found.append(int(entry.name))
    return found


def wait_until(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
