"""The kernel as the Hub has it, loaded by Hugging Face's `kernels`."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

import sparrow_attention


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("build_kernel", ROOT / "scripts" / "build_kernel.py")
    build_kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_kernel)
    folder = tmp_path_factory.mktemp("repository") / "build"
    build_kernel.build_kernel(folder)
    (folder / "torch-cpu" / "stale.py").touch()
    variants = build_kernel.build_kernel(folder)
    assert [variant.name for variant in variants] == ["torch-cpu", "torch-cuda"]
    assert not (folder / "torch-cpu" / "stale.py").exists()
    return folder


def decode_step(module):
    generator = torch.Generator().manual_seed(0)
    rows, q_heads, kv_heads, head_dim, page_size = 3, 4, 2, 16, 16
    query = torch.randn(rows, q_heads, head_dim, generator=generator)
    keys = torch.randn(32, kv_heads, page_size, head_dim, generator=generator)
    values = torch.randn(32, kv_heads, page_size, head_dim, generator=generator)
    block_table = torch.arange(30).view(rows, 10)
    top_k = torch.full((rows,), 2)
    return module.sparse_decode_attention(query, keys, values, block_table, torch.tensor([160, 90, 7]), top_k)


@pytest.mark.parametrize("backend", ["cpu", None])
def test_it_loads_and_computes_what_the_package_does(build_folder, backend):
    kernel = get_local_kernel(build_folder.parent, backend=backend)
    assert kernel is not sparrow_attention and Path(kernel.__file__).is_relative_to(build_folder)
    assert set(kernel.__all__) == set(sparrow_attention.__all__)
    assert torch.equal(decode_step(kernel), decode_step(sparrow_attention))


def test_it_needs_nothing_of_this_repository(build_folder, tmp_path):
    """In a process that cannot import the package: the sources find each other by relative imports alone."""
    code = (
        "import sys\n"
        "sys.modules['sparrow_attention'] = sys.modules['sparrow_trl'] = None\n"
        "from kernels import get_local_kernel\n"
        "from pathlib import Path\n"
        f"kernel = get_local_kernel(Path({str(build_folder)!r}) / 'torch-cpu')\n"
        "import importlib\n"
        "for name in ('paged_decode', 'sequence_attention'):\n"
        "    importlib.import_module(f'{kernel.__name__}.{name}')\n"
        "print('loaded', sorted(kernel.__all__))\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert finished.returncode == 0 and "page_landmarks" in finished.stdout, finished.stderr


def test_older_versions_find_the_folder_of_the_name(build_folder):
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(build_folder / 'torch-cpu')!r})\n"
        "import sparrow_attention\n"
        f"assert sparrow_attention.__file__.startswith({str(build_folder)!r})\n"
        "assert callable(sparrow_attention.select_pages)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=build_folder)
    assert finished.returncode == 0, finished.stderr


def test_the_example_of_the_card_runs():
    text = (ROOT / "kernels" / "CARD.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    tree = ast.parse(code)
    assert "get_kernel" in code
    # The package in the place of what `get_kernel` would fetch.
    tree.body = [node for node in tree.body if "get_kernel" not in ast.unparse(node)]
    namespace = {"sparrow_attention": sparrow_attention}
    exec(compile(tree, "CARD.md", "exec"), namespace)
    assert namespace["output"].shape == (4, 8, 64) and namespace["output"].isfinite().all()
