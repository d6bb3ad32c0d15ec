"""
Tests of programs as datasets hold them: three styles, how they are read, what counts as the right output, and which
part of a completion is the program.
"""

import json
import math
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from . import plain_data


STYLES_HELP = (
    'Tests are {"inputs": [...], "outputs": [...]} for standard input and output, the same with "fn_name" for calls, '
    '{"asserts": [...], "setup": "..."} for assertions, or a list of assertions; each also as JSON.'
)

# Without going back, which would take the square of a long line's length.
FENCE = re.compile(r"^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([\w+.-]*+)[^\n`]*+$", re.MULTILINE)
PYTHON_LANGUAGES = ("python", "python3", "py", "py3")


@dataclass(frozen=True)
class CodeTests:
    """
    Tests of one program.

    Args:
        style (`str`):
            `"stdin"`, `"call"` or `"assert"`.
        inputs (`tuple`):
            Standard inputs, lists of arguments, or sources of assertions.
        outputs (`tuple`, *optional*, defaults to `()`):
            What is expected, except for assertions.
        name (`str`, *optional*):
            Function that is called.
        setup (`str`, *optional*, defaults to `""`):
            Source that runs before each assertion.
        program_names (`tuple[str, ...]`, *optional*, defaults to `()`):
            Names that assertions take from the program even when they are Python's own.
    """

    style: str
    inputs: tuple
    outputs: tuple = ()
    name: str | None = None
    setup: str = ""
    program_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)


def parse_tests(tests: Any, where: str = "The tests") -> CodeTests:
    """
    Read tests in any of the forms that datasets have.

    Args:
        tests (`Any`):
            One of

            - `{"inputs": [...], "outputs": [...]}` with texts, or lists of lines: standard input and output;
            - the same with `"fn_name"`: lists of arguments and return values, or their JSON, one value a line;
            - `{"asserts": [...]}`, with an optional `"setup"` (a source, or a list of them) and `"names"` (those that
              are the program's even if Python has such a name): assertions;
            - a list of assertions;
            - JSON of any of them, [`CodeTests`] themselves, or a `dict` with further keys that are `None`.
        where (`str`, *optional*, defaults to `"The tests"`):
            What they are, for the message.

    Raises:
        ValueError: for anything else, and for no tests at all.
    """

    def refuse(what: str) -> ValueError:
        return ValueError(f"{where} {what}. {STYLES_HELP}")

    if isinstance(tests, CodeTests):
        return tests
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise refuse(f"are a text that is not JSON ({error}): {tests!r:.100}") from error
    if isinstance(tests, (list, tuple)):
        tests = {"asserts": tests}
    if not isinstance(tests, dict):
        raise refuse(f"are a {type(tests).__name__}, {tests!r:.100}")
    # A dataset's table gives every row all keys that any has.
    tests = {key: value for key, value in tests.items() if value is not None}
    if "asserts" in tests:
        unknown = tests.keys() - {"asserts", "setup", "names"}
        if unknown:
            raise refuse(f"have asserts and also {', '.join(sorted(map(str, unknown)))}")
        return _assert_tests(tests, refuse)
    if "inputs" in tests and "outputs" in tests:
        return _input_output_tests(tests, refuse)
    raise refuse(f"have neither asserts nor inputs and outputs, but {', '.join(map(str, tests)) or 'nothing'}")


def _assert_tests(tests: dict[str, Any], refuse) -> CodeTests:
    asserts, setup, names = tests["asserts"], tests.get("setup", ""), tests.get("names", [])
    if isinstance(setup, (list, tuple)) and all(isinstance(line, str) for line in setup):
        setup = "\n".join(setup)
    if not isinstance(setup, str):
        raise refuse(f"have a setup that is no source: {setup!r:.100}")
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise refuse(f"have names that are none: {names!r:.100}")
    if not isinstance(asserts, (list, tuple)) or not asserts:
        raise refuse(f"have asserts that are no list, or an empty one: {asserts!r:.100}")
    for source, what in [(setup, "setup"), *((source, "assertion") for source in asserts)]:
        if not isinstance(source, str) or (what == "assertion" and not source.strip()):
            raise refuse(f"have an {what} that is no text: {source!r:.100}")
        try:
            compile(source, what, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise refuse(f"have a {what} that is not Python ({error}): {source!r:.100}") from error
    return CodeTests("assert", tuple(asserts), setup=setup, program_names=tuple(names))


def _input_output_tests(tests: dict[str, Any], refuse) -> CodeTests:
    inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    for key, values in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(values, (list, tuple)):
            raise refuse(f"have {key} that are no list: {values!r:.100}")
    if len(inputs) != len(outputs) or not inputs:
        raise refuse(f"have {len(inputs)} inputs and {len(outputs)} outputs")
    if name is None or name == "":
        return CodeTests("stdin", *(tuple(_text(value, refuse) for value in values) for values in (inputs, outputs)))
    if not isinstance(name, str) or not name.isidentifier():
        raise refuse(f"have an fn_name that is no name: {name!r:.100}")
    arguments, expected = [], []
    for value, output in zip(inputs, outputs, strict=True):
        if isinstance(value, str):
            try:
                value = [json.loads(line) for line in value.splitlines() if line.strip()]
                output = json.loads(output) if isinstance(output, str) else output
            except ValueError as error:
                raise refuse(f"have arguments that are neither a list nor JSON a line: {value!r:.100}") from error
        if not isinstance(value, (list, tuple)):
            raise refuse(f"have arguments that are no list: {value!r:.100}")
        arguments.append(list(value))
        expected.append(output)
        try:
            plain_data.encode([list(value), output])
        except plain_data.PlainDataError as error:
            raise refuse(f"have values that cannot be sent to a program ({error}): {value!r:.100}") from error
    return CodeTests("call", tuple(arguments), tuple(expected), name=name)


def _text(value: Any, refuse) -> str:
    """Standard input or output, which some datasets hold as lines."""
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise refuse(f"have an input or output that is no text: {value!r:.100}")
    return value


def extract_code(completion: str) -> str | None:
    """
    The program in a completion: its last fenced block that is marked as Python, or else its last block that is not
    marked at all. The last block may lack its closing fence, as in a completion that was cut off.

    Args:
        completion (`str`):
            The completion. What comes before a `</think>` is left out.

    Returns:
        `str`: the program, `None` for a completion with no such block. Plain code without a fence is none either, as
        where it begins and ends would be a guess.
    """
    completion = completion.rpartition("</think>")[2]
    marked, unmarked = None, None
    fence, language, start = None, "", 0
    for match in FENCE.finditer(completion):
        if fence is None:
            fence, language, start = match[1], match[2].lower(), match.end() + 1
        elif match[1].startswith(fence) and not match[2]:
            marked, unmarked = _later(marked, unmarked, language, completion[start : match.start()])
            fence = None
    if fence is not None:
        marked, unmarked = _later(marked, unmarked, language, completion[start:])
    return marked if marked is not None else unmarked


def _later(marked: str | None, unmarked: str | None, language: str, code: str) -> tuple[str | None, str | None]:
    code = textwrap.dedent(code)  # a block in a list is indented as a whole
    if language in PYTHON_LANGUAGES:
        return code, unmarked
    return (marked, code) if not language else (marked, unmarked)


def same_text(actual: str, expected: str, tolerance: float = 0.0) -> bool:
    """
    Whether an output is the expected one: the same words in the same lines, whatever the space around and between
    them, without the empty lines.

    Args:
        actual (`str`):
            What a program wrote.
        expected (`str`):
            What it should write.
        tolerance (`float`, *optional*, defaults to `0.0`):
            How far numbers may be apart, absolutely or relative to the expected one. With 0, words must be the same.
    """
    lines, expected_lines = ([line.split() for line in text.strip().splitlines()] for text in (actual, expected))
    lines, expected_lines = ([line for line in part if line] for part in (lines, expected_lines))
    if len(lines) != len(expected_lines):
        return False
    return all(
        len(words) == len(expected_words)
        and all(_same_word(word, other, tolerance) for word, other in zip(words, expected_words, strict=True))
        for words, expected_words in zip(lines, expected_lines, strict=True)
    )


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    if not tolerance or len(word) > 100:
        return False
    try:
        return _near(float(word), float(expected), tolerance)
    except ValueError:
        return False


def _near(value: float, expected: float, tolerance: float) -> bool:
    return value == expected or (
        math.isfinite(expected) and abs(value - expected) <= tolerance * max(1.0, abs(expected))
    )


def same_value(actual: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """
    Whether a returned value is the expected one, which comes from JSON: tuples are lists there, and keys are texts. A
    dataset may also wrap the expected value in a list of one.

    Args:
        actual (`Any`):
            Plain data that a program returned.
        expected (`Any`):
            What it should return.
        tolerance (`float`, *optional*, defaults to `0.0`):
            How far floats may be apart, absolutely or relative to the expected one.
    """
    actual, expected = _as_json(actual), _as_json(expected)
    if _same_json(actual, expected, tolerance):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same_json(actual, expected[0], tolerance)


def _as_json(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _as_json(item) for key, item in value.items()}
    return value


def _same_json(actual: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(actual, list)
            and len(actual) == len(expected)
            and all(_same_json(*pair, tolerance) for pair in zip(actual, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and actual.keys() == expected.keys()
            and all(_same_json(actual[key], expected[key], tolerance) for key in expected)
        )
    if isinstance(actual, (list, dict)):
        return False
    if tolerance and isinstance(expected, float) and isinstance(actual, (int, float)):
        try:
            return _near(float(actual), expected, tolerance)
        except OverflowError:
            return False
    return actual == expected
