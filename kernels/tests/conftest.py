import importlib
import importlib.util
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None


def load_package():
    """
    The package under test: a kernel build where `LOCAL_KERNELS=<org>/sparrow-attention=<folder>` names one, the
    installed package otherwise.
    """
    for entry in filter(None, os.environ.get("LOCAL_KERNELS", "").split(":")):
        repo_id = entry.partition("=")[0]
        if repo_id.endswith("/sparrow-attention"):
            from kernels import get_kernel

            return get_kernel(repo_id, version=1, trust_remote_code=True)
    return importlib.import_module("sparrow_attention")


def load_triton_kernels():
    names = ("paged_landmarks", "paged_selection", "paged_attention", "paged_decode")
    names += ("sequence_selection", "sequence_attention")
    return SimpleNamespace(**{name: importlib.import_module(f"{PACKAGE.__name__}.{name}") for name in names})


PACKAGE = load_package()
# Without a GPU the Triton kernels run in Triton's interpreter. `triton.jit` reads the variable when it decorates a
# function, Triton's own functions included, so everything is imported here: pytest reads this file before it collects
# tests that import vLLM, and with it Triton. Those tests do not get to see the variable.
INTERPRETED = {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}
with mock.patch.dict(os.environ, INTERPRETED):
    TRITON_KERNELS = load_triton_kernels() if HAS_TRITON else None


@pytest.fixture(scope="session")
def sparrow_attention():
    """The package under test."""
    return PACKAGE


@pytest.fixture(scope="session")
def device() -> str:
    """Where the Triton kernels run: natively on `"cuda"`, in Triton's interpreter on `"cpu"`."""
    return DEVICE


@pytest.fixture
def triton_kernels():
    """The modules of the Triton kernels, by name."""
    if TRITON_KERNELS is None:
        pytest.skip("needs Triton")
    # The interpreter reads the variable again where it imports parts of Triton at a first launch.
    with mock.patch.dict(os.environ, INTERPRETED):
        yield TRITON_KERNELS


@pytest.fixture
def poisoned_memory():
    """New memory holds NaN and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
