"""Rewards for reinforcement learning on code: generated programs are run against tests, in sandboxes."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .code_runner import UNFINISHED, CodeTestResult, run_programs, share_passed
from .code_tests import extract_code, parse_tests
from .sandbox import Isolation, SandboxConfig, choose_isolation


logger = logging.getLogger(__name__)

NO_CODE = CodeTestResult("error", "The completion has no fenced block of Python.")


class SandboxedCodeReward:
    """
    Reward function that runs the Python program of each completion against tests, with limits and isolated from the
    trainer: 1 when all tests pass, else 0. What a program prints, returns or does to its own process decides nothing
    but by being the expected data.

    Args:
        config ([`SandboxConfig`], *optional*):
            Limits and isolation, by default those of `SandboxConfig()`.
        partial (`bool`, *optional*, defaults to `False`):
            Whether the reward is the share of tests that pass. Otherwise tests after one that does not are skipped.
        tolerance (`float`, *optional*, defaults to `0.0`):
            How far numbers in outputs and returned values may be from the expected ones, absolutely or relative to
            them. Assertions bring their own.
        column (`str`, *optional*, defaults to `"tests"`):
            The dataset's column with the tests.
        name (`str`, *optional*, defaults to `"sandboxed_code_reward"`):
            Name in the trainer's logs.

    Example:

    ```python
    >>> from sparrow_trl import SandboxConfig, SandboxedCodeReward

    >>> reward = SandboxedCodeReward(SandboxConfig(wall_seconds=4), partial=True)
    >>> completion = [{"role": "assistant", "content": "```python\\ndef double(x):\\n    return 2 * x\\n```"}]
    >>> reward([completion], tests=[["assert double(2) == 4", "assert double(2) == 5"]])
    [0.5]
    ```
    """

    def __init__(
        self,
        config: SandboxConfig | None = None,
        *,
        partial: bool = False,
        tolerance: float = 0.0,
        column: str = "tests",
        name: str = "sandboxed_code_reward",
    ):
        if config is not None and not isinstance(config, SandboxConfig):
            raise ValueError(f"config must be a SandboxConfig, but it is a {type(config).__name__}, {config!r:.100}.")
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be a number from 0 to below 1, but it is {tolerance!r}.")
        self.config = config or SandboxConfig()
        self.partial, self.tolerance, self.column = partial, tolerance, column
        self.__name__ = name  # by which TRL calls it in logs

    @property
    def isolation(self) -> Isolation:
        """The [`Isolation`] in use."""
        return choose_isolation(self.config)

    def run(self, completions: Sequence, tests: Sequence) -> list[list[CodeTestResult]]:
        """
        Run the programs of completions.

        Args:
            completions (`Sequence`):
                Texts or conversations.
            tests (`Sequence`):
                The tests of each, as [`~sparrow_trl.code_tests.parse_tests`] takes them.

        Returns:
            `list[list[CodeTestResult]]`: one result a test of each completion.

        Raises:
            ValueError: for tests of another form, before anything is run.
            SandboxError: when the isolation does not work here.
        """
        if len(completions) != len(tests):
            raise ValueError(f"There are {len(completions)} completions and {len(tests)} tests; give each its own.")
        parsed = _parse_all(tests, self.column)
        programs = [extract_code(_text(completion, number)) for number, completion in enumerate(completions)]
        runnable = [number for number, program in enumerate(programs) if program is not None]
        outcomes = run_programs(
            [programs[number] for number in runnable],
            [parsed[number] for number in runnable],
            self.config,
            tolerance=self.tolerance,
            stop_at_failure=not self.partial,
        )
        results = [[NO_CODE] * len(its_tests) for its_tests in parsed]
        for number, outcome in zip(runnable, outcomes, strict=True):
            results[number] = outcome
        return results

    def __call__(
        self,
        completions: Sequence,
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float]:
        if self.column not in kwargs:
            raise ValueError(
                f"The dataset has no column {self.column!r} with the tests of each prompt; name another one with "
                f"`column`. Its columns are {', '.join(sorted(kwargs)) or 'none'}."
            )
        results = self.run(completions, kwargs[self.column])
        unfinished = sum(any(result.message == UNFINISHED for result in outcome) for outcome in results)
        if unfinished:
            logger.warning(
                "%d of %d programs were not done after total_seconds (%g) and have no reward for the rest. Raise it, "
                "or lower wall_seconds.",
                unfinished,
                len(results),
                self.config.total_seconds,
            )
        shares = [share_passed(outcome) for outcome in results]
        if log_extra is not None:
            log_extra("code_tests", [_summary(outcome) for outcome in results])
        if log_metric is not None and results:
            log_metric("code/tests_passed", sum(shares) / len(shares))
            log_metric("code/no_program", sum(outcome[0] is NO_CODE for outcome in results) / len(results))
            timeouts = sum(any(result.status == "timeout" for result in outcome) for outcome in results)
            log_metric("code/timeouts", timeouts / len(results))
        return shares if self.partial else [float(share == 1.0) for share in shares]


def _text(completion: Any, number: int) -> str:
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and completion and all(isinstance(message, dict) for message in completion):
        content = completion[-1].get("content")
        if isinstance(content, list):  # parts, of which some are texts
            content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
        if content is None or isinstance(content, str):
            return content or ""
    raise ValueError(f"Completion {number} is neither a text nor a list of messages: {completion!r:.100}")


def _parse_all(tests: Sequence, column: str) -> list:
    # The completions of one prompt have the same tests.
    known: dict[int, Any] = {}
    parsed = []
    for number, value in enumerate(tests):
        if id(value) not in known:
            known[id(value)] = parse_tests(value, f"The tests of example {number} (column {column!r})")
        parsed.append(known[id(value)])
    return parsed


def _summary(results: Sequence[CodeTestResult]) -> str:
    """As in `2 passed, 1 wrong`, with the first message."""
    counts = Counter(result.status for result in results)
    message = next((result.message for result in results if not result.passed and result.message), "")
    text = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{text}: {message:.200}" if message else text


_default_reward = SandboxedCodeReward()


def sandboxed_code_reward(
    completions: Sequence,
    tests: Sequence,
    log_extra: Callable[[str, list], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float]:
    r"""
    Reward function that runs the Python program of each completion against tests, with the default limits of
    [`SandboxConfig`] and isolated from the trainer: 1 when all tests pass, else 0. [`SandboxedCodeReward`] has
    options.

    Args:
        completions (`Sequence`):
            Texts or conversations. The program is in the last fenced block of Python, see
            [`~sparrow_trl.code_tests.extract_code`]; a completion without one gets 0.
        tests (`Sequence`):
            The tests of each, from the dataset's column of that name, as [`~sparrow_trl.code_tests.parse_tests`] takes
            them: standard input and output, calls, or assertions.
        log_extra (`Callable`, *optional*):
            Logs a column of the table of completions, given by the trainer.
        log_metric (`Callable`, *optional*):
            Logs a metric, given by the trainer.
        **kwargs:
            The dataset's other columns, which are not used.

    Returns:
        `list[float]`: the rewards.

    Raises:
        ValueError: for tests of another form, before anything is run.
        SandboxError: when programs cannot be isolated here.

    Example:

    ```python
    >>> from sparrow_trl import sandboxed_code_reward

    >>> completions = ["```python\nprint(int(input()) * 2)\n```", "```python\nexit(0)\n```"]
    >>> sandboxed_code_reward(completions, tests=[{"inputs": ["4"], "outputs": ["8"]}] * 2)
    [1.0, 0.0]
    ```
    """
    return _default_reward(completions, log_extra=log_extra, log_metric=log_metric, tests=tests)
