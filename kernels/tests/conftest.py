import importlib
import os

import pytest


@pytest.fixture(scope="session")
def sparrow_attention():
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
