"""Runs programs that are not trusted against their tests, several at a time, and says how each test ended."""

import contextlib
import json
import logging
import math
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from . import plain_data
from .code_tests import CodeTests, parse_tests, same_text, same_value
from .sandbox import Report, Sandbox, SandboxConfig, SandboxError, choose_isolation


logger = logging.getLogger(__name__)

# How often a sandbox that fails is replaced before the failure is the caller's.
ATTEMPTS = 5
# Of tests that were not done in the time of the whole call.
UNFINISHED = "total_seconds had passed."
MAX_MESSAGE = 500

STATUS_OF_REASON = {"wall": "timeout", "stuck": "timeout", "output": "output", "memory": "memory", "files": "files"}
MESSAGE_OF_REASON = {
    "wall": "It ran longer than wall_seconds.",
    "stuck": "Its sandbox did not answer in time, or ended, and was removed as a whole.",
    "output": "It wrote more than output_bytes.",
    "memory": "Its processes together used more than memory_bytes.",
    "files": "It wrote more than file_bytes, or too many files.",
}


@dataclass(frozen=True)
class CodeTestResult:
    """
    How one test of a program ended.

    Args:
        status (`str`):
            `"passed"`; `"wrong"`, another output or value than expected; `"error"`, an exception, an exit status other
            than 0, no data, or processes left running; `"timeout"`, `"memory"`, `"output"` or `"files"`, a limit; or
            `"skipped"`, not run.
        message (`str`, *optional*, defaults to `""`):
            What happened, in words or as the program's last error.
        seconds (`float`, *optional*, defaults to `0.0`):
            How long it took.
    """

    status: str
    message: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return self.status == "passed"


def run_code_tests(
    code: str, tests: Any, config: SandboxConfig | None = None, *, tolerance: float = 0.0
) -> list[CodeTestResult]:
    """
    Run a program that is not trusted against its tests.

    Args:
        code (`str`):
            The program.
        tests (`Any`):
            Its tests, as [`~sparrow_trl.code_tests.parse_tests`] takes them.
        config ([`SandboxConfig`], *optional*):
            Limits and isolation, by default those of `SandboxConfig()`.
        tolerance (`float`, *optional*, defaults to `0.0`):
            How far numbers in outputs and returned values may be from the expected ones, absolutely or relative to
            them.

    Returns:
        `list[CodeTestResult]`: one result a test.

    Raises:
        ValueError: for tests of another form.
        SandboxError: when the isolation does not work here.

    Example:

    ```python
    >>> tests = {"inputs": ["1 2", "2 2"], "outputs": ["3", "4"]}
    >>> [result.status for result in run_code_tests("print(sum(map(int, input().split())))", tests)]
    ['passed', 'passed']
    ```
    """
    return run_programs([code], [parse_tests(tests)], config or SandboxConfig(), tolerance=tolerance)[0]


def run_programs(
    programs: Sequence[str],
    tests: Sequence[CodeTests],
    config: SandboxConfig,
    *,
    tolerance: float = 0.0,
    stop_at_failure: bool = False,
) -> list[list[CodeTestResult]]:
    """
    Run several programs against their tests, in parallel.

    Args:
        programs (`Sequence[str]`):
            The programs.
        tests (`Sequence[CodeTests]`):
            The tests of each.
        config ([`SandboxConfig`]):
            Limits and isolation.
        tolerance (`float`, *optional*, defaults to `0.0`):
            As for [`run_code_tests`].
        stop_at_failure (`bool`, *optional*, defaults to `False`):
            Whether to skip the tests of a program after one that does not pass.

    Returns:
        `list[list[CodeTestResult]]`: one result a test of each program.

    Raises:
        SandboxError: when the isolation does not work here.
    """
    deadline = time.monotonic() + config.total_seconds
    level = choose_isolation(config).level
    evaluators = _Evaluators(config, level)

    def run(program: str, its_tests: CodeTests) -> list[CodeTestResult]:
        runner = _Runner(program, its_tests, config, level, evaluators, tolerance, deadline)
        return runner.run(stop_at_failure)

    workers = max(1, min(config.num_workers, len(programs)))
    try:
        with ThreadPoolExecutor(workers, thread_name_prefix="sparrow-sandbox") as pool:
            try:
                return list(pool.map(run, programs, tests))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # of an interrupted training, say
                raise
    finally:
        evaluators.close()


class _Evaluators:
    """Sandboxes that evaluate assertions, kept while programs come and go."""

    def __init__(self, config: SandboxConfig, level: str):
        self._config, self._level = config, level
        self._free: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()

    @contextlib.contextmanager
    def one(self):
        try:
            sandbox = self._free.get_nowait()
        except queue.Empty:
            sandbox = Sandbox(self._config, self._level)
        try:
            yield sandbox
        except BaseException:
            sandbox.close()
            raise
        if sandbox.usable:
            self._free.put(sandbox)

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait().close()


class _Runner:
    """Runs the tests of one program, one after the other."""

    def __init__(
        self,
        program: str,
        tests: CodeTests,
        config: SandboxConfig,
        level: str,
        evaluators: _Evaluators,
        tolerance: float,
        deadline: float,
    ):
        self.program, self.tests, self.config, self.level = program, tests, config, level
        self.evaluators, self.tolerance, self.deadline = evaluators, tolerance, deadline
        self.sandbox: Sandbox | None = None

    def run(self, stop_at_failure: bool) -> list[CodeTestResult]:
        results: list[CodeTestResult] = []
        try:
            for number in range(len(self.tests)):
                if time.monotonic() >= self.deadline:
                    results.append(CodeTestResult("skipped", UNFINISHED))
                elif stop_at_failure and results and not results[-1].passed:
                    skipped = CodeTestResult("skipped", "An earlier test did not pass.")
                    return results + [skipped] * (len(self.tests) - number)
                else:
                    result = self._attempt(number)
                    if result.status == "timeout" and time.monotonic() >= self.deadline:
                        result = CodeTestResult("skipped", UNFINISHED, result.seconds)
                    results.append(result)
        finally:
            if self.sandbox is not None:
                self.sandbox.close()
        return results

    def _attempt(self, number: int) -> CodeTestResult:
        for attempt in range(ATTEMPTS):
            try:
                if self.sandbox is None or not self.sandbox.usable:
                    self.sandbox = Sandbox(self.config, self.level)
                return self._test(number)
            except (SandboxError, OSError):
                # A machine that is short of processes or memory for a moment says nothing about the program.
                if self.sandbox is not None:
                    self.sandbox.close()
                if time.monotonic() >= self.deadline:
                    return CodeTestResult("skipped", UNFINISHED)
                if attempt + 1 == ATTEMPTS:
                    raise
                time.sleep(0.1 * 4**attempt)
        raise AssertionError("unreachable")

    def _test(self, number: int) -> CodeTestResult:
        tests = self.tests
        if tests.style == "stdin":
            report = self.sandbox.run(self.program, tests.inputs[number], self.deadline)
            failure = _failure(report)
            if failure is None and not same_text(report.stdout, tests.outputs[number], self.tolerance):
                message = f"It wrote {report.stdout!r:.200} instead of {tests.outputs[number]!r:.200}."
                failure = CodeTestResult("wrong", message, report.seconds)
            return failure or CodeTestResult("passed", seconds=report.seconds)
        self.sandbox.start(self.program, "callee", deadline=self.deadline)
        if tests.style == "call":
            return self._called(number)
        return self._asserted(number)

    def _called(self, number: int) -> CodeTestResult:
        tests = self.tests
        request = {"call": tests.name, "args": tests.inputs[number], "kwargs": {}}
        reply = self.sandbox.ask(plain_data.encode(request))
        report = self.sandbox.end()
        if (failure := _failure(report, asked=True, answered=reply is not None)) is not None:
            return failure
        try:
            answer = plain_data.decode(reply)
        except plain_data.PlainDataError as error:
            return CodeTestResult("error", f"It sent no plain data: {error}.", report.seconds)
        if not isinstance(answer, dict) or "value" not in answer:
            return CodeTestResult("error", _without_value(answer, tests.name), report.seconds)
        try:
            same = same_value(answer["value"], tests.outputs[number], self.tolerance)
        except (RecursionError, TypeError, ValueError):  # of values that nobody expects
            same = False
        if same:
            return CodeTestResult("passed", seconds=report.seconds)
        message = f"It returned {_short(answer['value'])} instead of {_short(tests.outputs[number])}."
        return CodeTestResult("wrong", message, report.seconds)

    def _asserted(self, number: int) -> CodeTestResult:
        tests = self.tests
        task = {"setup": tests.setup, "test": tests.inputs[number], "names": list(tests.program_names)}
        with self.evaluators.one() as evaluator:
            evaluator.start(json.dumps(task), "evaluator", deadline=self.deadline)
            # An assertion may pass without the program, which must have got as far as to answer all the same.
            gone = self.sandbox.ask(plain_data.encode({"get": "__name__"})) is None
            question = evaluator.ask(b"start")
            verdict = None
            while question is not None:
                decoded = plain_data.decode(question)
                if "verdict" in decoded:
                    verdict = decoded
                    break
                reply = None if gone else self.sandbox.ask(question)
                gone = reply is None
                question = evaluator.ask(b"G" if gone else b"D" + reply)
            evaluation = evaluator.end()
        report = self.sandbox.end()
        if (failure := _failure(report, asked=True, answered=not gone)) is not None:
            return failure
        if verdict is None:
            status = STATUS_OF_REASON.get(evaluation.reason, "error")
            message = MESSAGE_OF_REASON.get(evaluation.reason) or evaluation.stderr[-MAX_MESSAGE:]
            return CodeTestResult(status, f"The test itself did not end: {message}", evaluation.seconds)
        status = {"passed": "passed", "wrong": "wrong"}.get(verdict["verdict"], "error")
        message = verdict["message"]
        if status == "wrong":
            message = message or f"Not so: {tests.inputs[number]:.200}"
        return CodeTestResult(status, message, report.seconds)


def _failure(report: Report, asked: bool = False, answered: bool = False) -> CodeTestResult | None:
    """Why a run cannot have passed, whatever was written, if so."""
    if report.reason is not None:
        return CodeTestResult(STATUS_OF_REASON[report.reason], MESSAGE_OF_REASON[report.reason], report.seconds)
    last = report.stderr.strip()[-MAX_MESSAGE:]
    if report.leftover:
        return CodeTestResult("error", "It left processes running.", report.seconds)
    if asked and answered:
        return None  # it was told to end after its answer
    if report.exit is not None and report.exit < 0:
        if -report.exit in (9, 24):  # SIGKILL and SIGXCPU, by which the limit on CPU time acts
            return CodeTestResult("timeout", "It used more than cpu_seconds, or killed itself.", report.seconds)
        return CodeTestResult("error", f"It was ended by signal {-report.exit}. {last}".strip(), report.seconds)
    if report.exit == 0 and not asked:
        return None
    if last.rpartition("\n")[2].startswith("MemoryError"):
        return CodeTestResult("memory", last, report.seconds)
    if asked:
        message = f"It ended before it was asked for a value, with status {report.exit}. {last}".strip()
    else:
        message = f"It ended with status {report.exit}. {last}".strip()
    return CodeTestResult("error", message, report.seconds)


def _without_value(answer: Any, name: str) -> str:
    if isinstance(answer, dict) and answer.get("missing"):
        return f"It defines no {name}."
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, list) and len(error) == 2:
        return f"{error[0]!s:.100}: {error[1]!s:.400}"
    return "It sent an answer of another form."


def _short(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except (ValueError, RecursionError):  # an integer with too many digits
        return f"a {type(value).__name__}"


def share_passed(results: Sequence[CodeTestResult]) -> float:
    """
    Share of tests that passed.

    Args:
        results (`Sequence[CodeTestResult]`): Their results.
    """
    return math.fsum(result.passed for result in results) / len(results) if results else 0.0
