"""What the Kernel Hub asks of a kernel's sources, and what this repository's layout asks of its tests."""

import ast
import importlib
import sys
from pathlib import Path

import pytest


KERNELS = Path(__file__).resolve().parent.parent
SOURCES = sorted((KERNELS / "torch-ext" / "sparrow_attention").glob("*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_sources_are_python_3_9_and_import_only_torch_and_themselves(source):
    tree = ast.parse(source.read_text(), feature_version=(3, 9))
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        assert {name.partition(".")[0] for name in names} <= allowed
    # Otherwise annotations such as `int | None` are evaluated, which Python 3.9 cannot do.
    has_functions = any(isinstance(node, ast.FunctionDef) for node in tree.body)
    assert not has_functions or "from __future__ import annotations" in source.read_text()


def test_the_tests_see_hugging_faces_kernels():
    # With pytest's importlib mode, or an __init__.py in one of these folders, `kernels` would be this project's.
    module = importlib.import_module("kernels")
    assert hasattr(module, "get_kernel")
    assert not any((folder / "__init__.py").exists() for folder in (KERNELS, KERNELS / "tests", KERNELS / "torch-ext"))


def test_public_names(sparrow_attention):
    assert set(sparrow_attention.__all__) == {
        "page_landmarks",
        "select_pages",
        "sparse_attention",
        "sparse_decode_attention",
    }
    assert all(callable(getattr(sparrow_attention, name)) for name in sparrow_attention.__all__)
    assert all(hasattr(sparrow_attention.reference, name) for name in sparrow_attention.__all__)
