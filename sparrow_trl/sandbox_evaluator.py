"""
Runs inside of a sandbox of its own: evaluates assertions whose functions are somewhere else, in the sandbox of a
program that is not trusted. All that comes from there is plain data, so the program has no say in what passes.
"""

import builtins
import importlib
import json
import sys
from collections.abc import Callable

from . import plain_data


class ProgramError(RuntimeError):
    """An exception of the program whose kind is not known here, or a value of its that is no plain data."""


class _ProgramGone(BaseException):
    """The program has ended. No `Exception`, so that no test takes it for one that it expects."""


class _Names(dict):
    """Global names of a test. What neither the test nor Python defines is asked of the program."""

    def __init__(self, ask: Callable[[dict], dict], program_names: list[str]):
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._ask = ask
        self._program_names = program_names

    def __missing__(self, name: str) -> object:
        if name not in self._program_names:
            # Else a program could define the `sorted` or the `math` that it is judged with.
            if name.startswith("__") or hasattr(builtins, name):
                raise KeyError(name)
            if name in sys.stdlib_module_names:
                return importlib.import_module(name)
        answer = self._ask({"get": name})
        if answer.get("callable"):
            return lambda *args, **kwargs: self._call(name, args, kwargs)
        if "value" not in answer:
            raise KeyError(name)
        return answer["value"]

    def _call(self, name: str, args: tuple, kwargs: dict) -> object:
        return self._ask({"call": name, "args": list(args), "kwargs": kwargs})["value"]


def main(code: str, requests: int, replies: int) -> int:
    """
    Evaluate one test.

    Args:
        code (`str`): JSON object with `setup`, `test` (sources), and `names`, which are the program's in any case.
        requests (`int`): Descriptor to read answers from: `D` and the program's reply, or `G` when it has ended.
        replies (`int`): Descriptor to write requests for the program to, and at last the `verdict`.

    Returns:
        `int`: exit status.
    """
    task = json.loads(code)

    def ask(request: dict) -> dict:
        plain_data.write_message(replies, plain_data.encode(request))
        message = plain_data.read_message(requests)
        if not message or message[:1] != b"D":
            raise _ProgramGone()
        try:
            answer = plain_data.decode(message[1:])
        except plain_data.PlainDataError as error:
            raise ProgramError(f"the program sent no plain data: {error}") from error
        if not isinstance(answer, dict) or not answer.keys() & {"value", "callable", "missing", "error"}:
            raise ProgramError("the program sent an answer of another form")
        if "error" in answer:
            raise _exception(answer["error"])
        return answer

    if plain_data.read_message(requests) is None:
        return 1
    verdict, message = "passed", ""
    names = _Names(ask, task["names"])
    try:
        exec(compile(task["setup"], "setup.py", "exec", dont_inherit=True), names)
        exec(compile(task["test"], "test.py", "exec", dont_inherit=True), names)
    except _ProgramGone:
        verdict = "gone"
    except AssertionError as error:
        verdict, message = "wrong", f"{error}"
    except BaseException as error:
        verdict, message = "error", f"{type(error).__name__}: {error}"
    plain_data.write_message(replies, plain_data.encode({"verdict": verdict, "message": message[:500]}))
    return 0


def _exception(described: object) -> Exception:
    """The exception that the program describes, if it is one of Python's own."""
    name, text = described if isinstance(described, list) and len(described) == 2 else ("", described)
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            pass
    return ProgramError(f"{name}: {text}")
