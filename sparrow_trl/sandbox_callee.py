"""
Runs inside of the sandbox, in the process of a program that is not trusted: calls its functions and sends back what
they return, as plain data. The program may tamper with all of this, and so return any data, which it may anyway.
"""

import sys
import types

from . import plain_data


def main(code: str, requests: int, replies: int) -> int:
    """
    Define what a program defines, and answer requests: `{"get": name}`, or `{"call": name}` with `args` and `kwargs`.

    Args:
        code (`str`): The program.
        requests (`int`): Descriptor to read requests from.
        replies (`int`): Descriptor to write replies to: an object with `value`, `callable`, `missing` or `error`.

    Returns:
        `int`: exit status.
    """
    # Not the main module, so that what a program does when it is run as a script is left out.
    module = sys.modules["solution"] = types.ModuleType("solution")
    try:
        exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.__excepthook__(type(error), error.with_traceback(trace), trace)
        return 1
    while (message := plain_data.read_message(requests)) is not None:
        plain_data.write_message(replies, _answer(module, plain_data.decode(message)))
    return 0


def _answer(module: types.ModuleType, request: dict) -> bytes:
    try:
        name = request.get("get") or request["call"]
        if name in module.__dict__:
            value = module.__dict__[name]
        elif hasattr(getattr(module, "Solution", None), name):
            value = getattr(module.Solution(), name)
        else:
            return plain_data.encode({"missing": True})
        if "call" in request:
            return plain_data.encode({"value": value(*request["args"], **request["kwargs"])})
        return plain_data.encode({"callable": True} if callable(value) else {"value": value})
    except Exception as error:
        return plain_data.encode({"error": [type(error).__name__, f"{error}"[:500]]})
