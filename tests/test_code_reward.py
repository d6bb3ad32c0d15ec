"""Rewards of programs, right, wrong and dishonest, in all styles of tests."""

import json
import subprocess
import sys
import time

import pytest
from sandbox_levels import ALL_LEVELS, AVAILABLE, config_of, run_all_at, run_at

from sparrow_trl import SandboxConfig, SandboxedCodeReward, plain_data, run_code_tests, sandboxed_code_reward
from sparrow_trl.code_tests import extract_code, parse_tests, same_text, same_value


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sandboxes need Linux")

at_every_level = pytest.mark.parametrize("level", ALL_LEVELS)

STDIN = {"inputs": ["1 2\n", "10 -4"], "outputs": ["3\n", "6"]}
CALL = {"inputs": [[1, 2], ["a", "b"], [[1], [2]]], "outputs": [3, "ab", [1, 2]], "fn_name": "add"}
ASSERTS = ["assert add(1, 2) == 3", "assert add('a', b='b') == 'ab'", "assert sorted(add([2], [1])) == [1, 2]"]
STYLES = {"stdin": STDIN, "call": CALL, "asserts": ASSERTS}
ADD = "def add(a, b):\n    return a + b\n\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))\n"
WRONG = ADD.replace("a + b", "a")


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


@pytest.fixture(params=AVAILABLE)
def reward(request):
    return SandboxedCodeReward(config_of(request.param))


# Honest programs


@at_every_level
@pytest.mark.parametrize("style", STYLES)
def test_right_programs_pass_and_wrong_ones_do_not(level, style):
    right, wrong, broken = run_all_at(level, [ADD, WRONG, "def add(a, b) return"], STYLES[style])
    assert [result.status for result in right] == ["passed"] * len(right)
    assert {result.status for result in wrong} == {"wrong"}
    assert {result.status for result in broken} == {"error"}
    assert "SyntaxError" in broken[0].message


def test_rewards_are_of_all_tests_or_of_their_share():
    tests = [STDIN, json.dumps(CALL), ASSERTS, {"asserts": ASSERTS[:1] + ["assert add(1, 1) == 3"]}]
    completions = [[{"role": "assistant", "content": fenced(ADD)}]] * 4
    assert sandboxed_code_reward(completions, tests=tests, prompts=[""] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert SandboxedCodeReward(partial=True)(completions, tests=tests) == [1.0, 1.0, 1.0, 0.5]
    assert sandboxed_code_reward([fenced(ADD), ADD, ""], tests=[STDIN] * 3) == [1.0, 0.0, 0.0]
    assert sandboxed_code_reward([], tests=[]) == []


def test_tests_after_a_failure_are_skipped_only_without_partial():
    tests = {"inputs": ["1 2"] * 3, "outputs": ["3", "4", "3"]}
    [results] = SandboxedCodeReward().run([fenced(ADD)], [tests])
    assert [result.status for result in results] == ["passed", "wrong", "skipped"]
    [results] = SandboxedCodeReward(partial=True).run([fenced(ADD)], [tests])
    assert [result.status for result in results] == ["passed", "wrong", "passed"]


def test_trl_finds_the_reward_and_its_logs():
    from trl.trainer.utils import get_callable_name

    assert get_callable_name(sandboxed_code_reward) == "sandboxed_code_reward"
    assert get_callable_name(SandboxedCodeReward(name="code")) == "code"
    extra, metrics = {}, {}
    rewards = SandboxedCodeReward(partial=True)(
        prompts=["", ""],
        completions=[fenced(WRONG), "no idea"],
        completion_ids=[[], []],
        tests=[STDIN, STDIN],
        trainer_state=None,
        log_extra=extra.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert rewards == [0.0, 0.0]
    assert extra["code_tests"][0].startswith("2 wrong: It wrote '1")
    assert "no fenced block" in extra["code_tests"][1]
    assert metrics == {"code/tests_passed": 0.0, "code/no_program": 0.5, "code/timeouts": 0.0}


def test_what_programs_commonly_use_is_there():
    code = """
import collections, dataclasses, fractions, heapq, itertools, math, random, re, sys, threading, typing
@dataclasses.dataclass
class Point:
    x: int
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main():
    data = sys.stdin.buffer.read().split()
    open("scratch", "w").write("x")
    print(depth(20000), len(data), Point(1), open("scratch").read(), file=sys.stdout)
    exit()
thread = threading.Thread(target=main)
thread.start()
"""
    tests = {"inputs": ["1 " * 500_000], "outputs": ["20000 500000 Point(x=1) x"]}
    for level in AVAILABLE:
        [result] = run_at(level, code, tests)
        assert result.passed, result


def test_installed_packages_are_there_only_when_asked_for():
    code = "import numpy\ndef total(x): return float(numpy.sum(x))"
    tests = ["assert total([1, 2]) == 3"]
    for level in AVAILABLE:
        [result] = run_at(level, code, tests, allow_site_packages=True, wall_seconds=60, cpu_seconds=60)
        assert result.passed, result
    [result] = run_at(AVAILABLE[0], code, tests)
    assert result.status == "error" and "numpy" in result.message


def test_processes_that_end_in_time_cost_nothing():
    code = "import os, sys\npid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)\nprint(42)"
    code += "\nimport subprocess\nsubprocess.run(['/bin/true'], check=True)"
    for level in AVAILABLE:
        [result] = run_at(level, code, {"inputs": [""], "outputs": ["42"]})
        assert result.passed, (level, result)


def test_functions_of_a_solution_class_are_called():
    code = "class Solution:\n    def add(self, a, b): return (a, b)"
    [result] = run_code_tests(code, {"inputs": ["1\n[2]"], "outputs": ["[1, [2]]"], "fn_name": "add"})
    assert result.passed, result


def test_tests_have_their_own_builtins_modules_and_helpers():
    tests = {
        "setup": ["import math as m", "def check(candidate):\n    assert candidate(4) == 2, 'of four'"],
        "asserts": [
            "check(root)",
            "assert m.isclose(root(2), math.sqrt(2)) and [root(x) for x in (4, 9)] == [2, 3]",
            "try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError('no error')",
            "assert LIMIT == (1, {'a': {2}, None: b'x'}, 1j, 10**2000, float('inf'))",
        ],
    }
    code = "import math\nLIMIT = (1, {'a': {2}, None: b'x'}, 1j, 10**2000, float('inf'))\n"
    code += "def root(x): return math.sqrt(x)"
    results = run_code_tests(code, tests)
    assert [result.status for result in results] == ["passed"] * 4, results
    assert run_code_tests(code.replace("sqrt(x)", "sqrt(x) + 1"), tests)[0].message == "of four"


def test_a_name_of_pythons_is_the_programs_only_when_the_tests_say_so():
    code = "def sum(a, b): return a + b"
    assert not run_code_tests(code, ["assert sum(1, 2) == 3"])[0].passed
    assert run_code_tests(code, {"asserts": ["assert sum(1, 2) == 3"], "names": "sum"})[0].passed


def test_values_that_are_no_data_are_errors_that_say_so():
    code = "class Box: pass\ndef box(): return Box()\ndef count(): yield 1"
    results = run_code_tests(code, ["assert box()", "assert count()", "assert missing() == 1"])
    assert [result.status for result in results] == ["error"] * 3
    assert "a Box is no plain data" in results[0].message
    assert "a generator is no plain data" in results[1].message
    assert "'missing' is not defined" in results[2].message


def test_exceptions_and_exit_statuses_are_told():
    programs = {"exit(3)": "status 3", "1 / 0": "ZeroDivisionError", "import os; os.abort()": "signal 6"}
    for code, expected in programs.items():
        [result] = run_code_tests(f"print(42)\n{code}", {"inputs": [""], "outputs": ["42"]})
        assert result.status == "error" and expected in result.message, result


# Dishonest programs


LEAVING = {
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nprint('passed', flush=True)\nos._exit(0)",
    "exit in a call": "import os\ndef add(a, b): os._exit(0)",
    "system exit in a call": "def add(a, b): raise SystemExit(0)",
    "exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): exit()",
    "killed": "import os\nos.kill(os.getpid(), 9)",
}


@at_every_level
@pytest.mark.parametrize("style", STYLES)
def test_leaving_early_gets_nothing(level, style):
    for kind, results in zip(
        LEAVING, run_all_at(level, list(LEAVING.values()), STYLES[style], max_workers=2), strict=True
    ):
        assert not any(result.passed for result in results), (kind, results)


VERDICT = plain_data.encode({"verdict": "passed", "message": ""})
CHEATS = {
    "equal to all": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
    def __repr__(self): return "3"
def add(a, b): return Any()
""",
    "subclasses of data": """
class Number(int):
    def __eq__(self, other): return True
    def __index__(self): return 3
class Text(str):
    def __eq__(self, other): return True
class Items(list):
    def __eq__(self, other): return True
    def __iter__(self): return iter([1, 2])
def add(a, b): return {int: Number(7), str: Text("z"), list: Items([7])}[type(a)]
""",
    "overridden builtins": """
import builtins, sys
for module in (builtins, sys.modules["__main__"]):
    for name in ("AssertionError", "sorted", "isinstance", "eval", "exec", "compile", "bool"):
        setattr(module, name, lambda *args, **kwargs: True)
def sorted(x): return [1, 2]
def add(a, b): return None
""",
    "names of Python's": """
class math:
    isclose = staticmethod(lambda *args: True)
def sorted(x): return [1, 2]
def add(a, b): return None
""",
    "forged verdict": f"""
import os
message = {VERDICT!r}
framed = len(message).to_bytes(4, "big") + message
for descriptor in range(3, 256):
    for data in (framed, b"C" + framed, b"J" + framed, b'J' + (2).to_bytes(4, "big") + b"{{}}"):
        try: os.write(descriptor, data)
        except OSError: pass
print("passed", "3", "All tests passed", flush=True)
def add(a, b): return None
""",
    "patched sandbox": f"""
import sys
for name, module in list(sys.modules.items()):
    if "sparrow" in name or name == "json":
        for key in ("encode", "dumps"):
            if hasattr(module, key): setattr(module, key, lambda *args, **kwargs: {VERDICT!r})
def add(a, b): return None
""",
    "forged answer": """
import os
answer = b'{"d":[["value",3],["verdict","passed"],["callable",true]]}'
def add(a, b):
    os.write(4, len(answer).to_bytes(4, "big") + answer)
    os.write(4, b"\\xff\\xff\\xff\\xff")
    return None
""",
    "many answers": """
import os
def add(a, b):
    os.set_blocking(4, False)
    try:
        while True: os.write(4, bytes(4))
    except BlockingIOError: pass
""",
    "exception that tests expect": "def add(a, b): raise AssertionError\ndef __getattr__(name): return True",
    "searched frames": """
import gc, sys
def add(a, b):
    frame, seen = sys._getframe(), []
    while frame: seen.append(dict(frame.f_locals)); frame = frame.f_back
    for text in [repr(seen)] + [o for o in gc.get_objects() if isinstance(o, (dict, list))][:0]:
        if "ab" + "'" in text and "outputs" in text: return "ab"
""",
    "exit handler prints": "import atexit\natexit.register(print, 'passed')\ndef add(a, b): return 0",
}


@at_every_level
@pytest.mark.parametrize("style", ["call", "asserts"])
def test_cheating_gets_nothing(level, style):
    limits = {"max_workers": 2, "wall_seconds": 3}
    for kind, results in zip(CHEATS, run_all_at(level, list(CHEATS.values()), STYLES[style], **limits), strict=True):
        # The first assertion alone may be answered by a forged 3, which is a guess of the right value.
        passed = [result.passed for result in results]
        assert not all(passed), (kind, results)
        if kind not in ("forged answer", "subclasses of data"):
            assert not any(passed), (kind, results)


@at_every_level
def test_expected_results_are_nowhere_in_the_programs_process(level):
    code = """
import gc, sys
def search():
    for root in [o for o in gc.get_objects()] + list(sys.modules.values()):
        try: text = repr(root)
        except Exception: continue
        if "opense" + "same" in text.replace("'opense' + 'same'", ""): return True
    return False
def found(): return "yes" if search() else "no"
if __name__ == "__main__": print(found())
"""
    code = code.replace('"opense" + "same"', '"".join(["open", "se", "same"])')
    stdin = {"inputs": ["", ""], "outputs": ["opensesame", "no"]}
    called = {"inputs": [[], []], "outputs": ["opensesame", "no"], "fn_name": "found"}
    asserts = ["assert found() == 'opensesame'", "assert found() == 'no'"]
    for tests in (stdin, called, asserts):
        assert [result.status for result in run_at(level, code, tests, cpu_seconds=20, wall_seconds=30)] == [
            "wrong",
            "passed",
        ]


def test_returned_values_are_limited_in_size_and_depth():
    code = """
def large(): return "x" * 10**7
def deep():
    value = []
    for _ in range(50_000): value = [value]
    return value
def digits(): return 10**100_000
def odd(): return {float("nan"): [float("inf")]}
"""
    results = run_code_tests(
        code,
        ["assert large()", "assert deep()", "assert digits() > 0", "assert odd()", "assert large"],
        SandboxConfig(output_bytes=10**6),
    )
    assert [result.status for result in results] == ["output", "error", "passed", "passed", "passed"], results
    assert "nested more than" in results[1].message


# The call as a whole


def test_a_call_ends_by_its_time_limit_however_many_programs_there_are(caplog):
    reward = SandboxedCodeReward(SandboxConfig(wall_seconds=60, total_seconds=3, max_workers=2, cpu_seconds=60))
    started = time.monotonic()
    rewards = reward([fenced("while True: pass")] * 5 + [fenced(ADD)], tests=[STDIN] * 6)
    assert time.monotonic() - started < 30
    assert rewards == [0.0] * 6
    assert "programs were not done after total_seconds (3)" in caplog.text


def test_programs_run_in_parallel():
    code = "import time\ntime.sleep(2)\nprint(42)"
    tests = {"inputs": [""], "outputs": ["42"]}
    started = time.monotonic()
    config = SandboxConfig(max_workers=8, wall_seconds=20)
    assert SandboxedCodeReward(config)([fenced(code)] * 8, tests=[tests] * 8) == [1.0] * 8
    assert time.monotonic() - started < 14  # 16 one after the other


def test_no_sandbox_is_started_for_malformed_tests(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a sandbox was started")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(ValueError, match=r"The tests of example 1 \(column 'tests'\) have 1 inputs and 2 outputs"):
        sandboxed_code_reward([fenced(ADD)] * 2, tests=[STDIN, {"inputs": ["1"], "outputs": ["1", "2"]}])
    with pytest.raises(ValueError, match="no column 'cases' with the tests.*columns are tests"):
        SandboxedCodeReward(column="cases")([fenced(ADD)], tests=[STDIN])
    with pytest.raises(ValueError, match="2 completions and 1 tests"):
        sandboxed_code_reward([fenced(ADD)] * 2, tests=[STDIN])
    with pytest.raises(ValueError, match="Completion 0 is neither a text nor a list of messages: 5"):
        sandboxed_code_reward([5], tests=[STDIN])
    with pytest.raises(ValueError, match="config must be a SandboxConfig"):
        SandboxedCodeReward({"cpu_seconds": 1})
    with pytest.raises(ValueError, match="tolerance must be a number from 0 to below 1"):
        SandboxedCodeReward(tolerance=2)


# Tests and completions as they are written


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (5, "are a int, 5"),
        ("{", "are a text that is not JSON"),
        ({}, "have neither asserts nor inputs and outputs, but nothing"),
        ({"input": ["1"], "output": ["1"]}, "but input, output"),
        ([], "have asserts that are no list, or an empty one"),
        ({"inputs": [], "outputs": []}, "have 0 inputs and 0 outputs"),
        ({"inputs": "12", "outputs": "12"}, "have inputs that are no list: '12'"),
        ({"inputs": [1], "outputs": ["1"]}, "have an input or output that is no text: 1"),
        (["assert f(1) =="], "have a assertion that is not Python"),
        ([""], "have an assertion that is no text"),
        ({"asserts": ["assert f()"], "setup": 3}, "have a setup that is no source: 3"),
        ({"asserts": ["assert f()"], "inputs": ["1"]}, "have asserts and also inputs"),
        ({"asserts": ["assert f()"], "names": [1]}, "have names that are none"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "a b"}, "have an fn_name that is no name: 'a b'"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "have arguments that are no list: 1"),
        ({"inputs": ["1 2"], "outputs": ["3"], "fn_name": "f"}, "neither a list nor JSON a line: '1 2'"),
        ({"inputs": [[object()]], "outputs": [1], "fn_name": "f"}, "a object is no plain data"),
    ],
)
def test_malformed_tests_are_refused_in_words(tests, message):
    with pytest.raises(ValueError) as caught:
        parse_tests(tests)
    assert message in str(caught.value)
    assert 'Tests are {"inputs": [...]' in str(caught.value)


def test_tests_are_read_in_all_forms():
    assert parse_tests(json.dumps(ASSERTS)) == parse_tests({"asserts": ASSERTS, "inputs": None, "fn_name": None})
    assert parse_tests({"inputs": [["1", "2"]], "outputs": ["3"], "fn_name": None}).inputs == ("1\n2",)
    assert parse_tests({"inputs": ['1\n"a"'], "outputs": ["[2]"], "fn_name": "f"}).inputs == ([1, "a"],)


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("first\n```python\na\n```\nbetter\n```py\nb\n```\nrun\n```bash\nls\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\noutput:\n```\n3\n```", "a\n"),
        ("```python\na\nb", "a\nb"),
        ("~~~Python3\na\n~~~", "a\n"),
        ("````python\n```\na\n````", "```\na\n"),
        ("<think>```python\na\n```</think>no", None),
        ("<think>x</think>\n  ```python\n  a\n    b\n  ```", "a\n  b\n"),
        ("print(1)", None),
        ("```bash\nls\n```", None),
        ("", None),
    ],
)
def test_program_of_a_completion(completion, code):
    assert extract_code(completion) == code


def test_outputs_are_compared_by_words_and_lines():
    assert same_text(" 1  2\r\n\n3\n", "1 2\n3")
    assert not same_text("1 2 3", "1 2\n3")
    assert not same_text("1", "1.0") and same_text("1", "1.0", 1e-9)
    assert same_text("x 0.3333", "x 0.33333333", 1e-3) and not same_text("x 0.33", "x 0.33333333", 1e-3)
    assert not same_text("nan", "1", 1e-3) and not same_text("", "1") and same_text("", "\n")


def test_values_are_compared_as_json():
    assert same_value((1, {2: (3,)}), [1, {"2": [3]}])
    assert same_value(5, [5]) and not same_value([5], 5) and not same_value(5, [5, 6])
    assert not same_value([1], [1, 2]) and not same_value(None, 0) and not same_value("1", 1)
    assert not same_value(0.1 + 0.2, 0.3) and same_value([0.1 + 0.2], [0.3], 1e-9)
    assert not same_value(10**400, 0.5, 1e-9) and not same_value({1, 2}, [1, 2])


def test_keys_that_would_take_the_square_of_their_number_are_refused():
    """Multiples of 2**61 - 1 all have the hash 0."""
    numbers = [{"i": hex(number * (2**61 - 1))} for number in range(1, 5_002)]
    for tag, body in (("s", numbers), ("z", numbers), ("d", [[number, 1] for number in numbers])):
        with pytest.raises(plain_data.PlainDataError, match="more than 5,000 keys"):
            plain_data.decode(json.dumps({tag: body}).encode())
    texts = {str(number) for number in range(10_000)}
    assert plain_data.decode(plain_data.encode(texts)) == texts
    assert len(plain_data.decode(json.dumps({"t": numbers}).encode())) == 5_001


def test_long_lines_are_searched_once():
    assert extract_code("```" + "a" * 200_000 + "`") is None


def test_infinity_is_near_nothing_else():
    assert same_text("inf 2.0", "inf 2.0000001", 1e-3)
    assert not same_text("3.0", "inf", 1e-3) and not same_value(3.0, float("inf"), 1e-3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b"{}",
        b'{"x":1}',
        b'{"i":5}',
        b'{"d":[[[1],2]]}',
        b'{"s":[[1]]}',
        b'{"t":5}',
        b'{"c":[1]}',
        b"[" * 100_000,
        b"[" * 500 + b"]" * 500,
        b"9" * 5000,
        b'{"d":[[1,2]],"t":[]}',
        b"\xff",
    ],
)
def test_data_of_another_form_is_refused(data):
    with pytest.raises(plain_data.PlainDataError):
        plain_data.decode(data)
