"""What the compiler makes of the counters by which launches wait for one another. Needs no GPU: nothing runs."""

import importlib.util
import os
import subprocess
import sys

import pytest


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

# A process of its own, because Triton's interpreter, which the other tests run in, compiles nothing.
COMPILE = """
import triton
from sparrow_attention import paged_attention, paged_selection
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    "block_table_ptr": "*i32", "seq_len_ptr": "*i32", "kept_ptr": "*i32", "count_ptr": "*i32", "ready_ptr": "*i32",
    "done_ptr": "*i32", "table_ptr": "*i32", "reserved_ptr": "*i32", "dense_until_ptr": "*i32", "arrived_ptr": "*i32",
    "total_ptr": "*i64", "slot_ptr": "*i64", "score_ptr": "*fp32", "lse_ptr": "*fp32", "partial_ptr": "*fp32",
    "scale": "fp32",
}
SHAPE = {"KV_HEADS": 2, "GROUP": 4, "D": 64, "D_PAD": 64}
SPLIT = {"TAPER": False, "OVERLAP": True}
PAGED = {"GROUP_PAD": 16, "PAGE": 16, "PAGES_PER_BLOCK": 1}
CHOOSE = {
    "RUNS": 1, "BLOCK": 64, "SOFTMAX": False, "MAX_PAGES": 512, "SCORE": True, "SELECT": True, "APPEND": True,
    "SPLIT": True, "SIGNAL": True, "LARGEST": None,
}


def ptx(kernel, constants, **types):
    types = {**TYPES, **types}
    signature = {}
    for name in kernel.arg_names:
        pointer = "*bf16" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, pointer)
    return triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32)).asm["ptx"]


chosen = ptx(paged_selection._choose_pages_kernel, {**SHAPE, **PAGED, **CHOOSE})
attended = ptx(paged_attention._attend_kernel, {**SHAPE, **SPLIT, **PAGED, "TOKENS": 64}, output_ptr="*fp32")
merged = ptx(paged_attention._merge_kernel, {**SHAPE, "OVERLAP": True, "SPLITS_PAD": 8})
WORDS = (".acquire", ".release", ".acq_rel", "griddepcontrol.launch_dependents", "griddepcontrol.wait")
for name, text in (("choose", chosen), ("attend", attended), ("merge", merged)):
    print(name, *(word in text for word in WORDS))
"""


def test_waiting_acquires_and_signals_release():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    # An acquire whose result is not used is dropped, and what others have written then read from stale caches.
    assert process.stdout.splitlines() == [
        "choose False True True True True",
        "attend True True False True False",
        "merge True False False False False",
    ]
