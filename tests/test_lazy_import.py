import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sparrow_trl


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "import sparrow_trl; dir(sparrow_trl); sparrow_trl.__version__",
        "from sparrow_trl import SparsityScheduleConfig as S; S.from_preset('qwen3-1.7b-0.86').budget(9000)",
    ],
)
def test_neither_import_nor_schedule_needs_torch_trl_or_vllm(statement):
    heavy = ("torch", "trl", "vllm", "transformers", "numpy", "scipy", "matplotlib", "huggingface_hub")
    code = f"import sys\n{statement}\nprint([name for name in {heavy} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_acceptance_needs_neither_trl_nor_vllm():
    code = (
        "import sys\nimport sparrow_trl.acceptance\nprint([name for name in ('trl', 'vllm') if name in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_every_lazy_name_is_listed_and_declared_for_type_checkers():
    tree = ast.parse(Path(sparrow_trl.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    submodules = {name for name, module in declared.items() if module is None}
    assert {name: module for name, module in declared.items() if module} == sparrow_trl._MODULE_OF
    assert set(sparrow_trl.__all__) == {"__version__", *declared}
    assert submodules == {Path(f"{name}.py").stem for name in sparrow_trl._MODULE_OF.values()}
    assert set(sparrow_trl.__all__) <= set(dir(sparrow_trl))


def test_names_resolve_and_unknown_ones_raise():
    from sparrow_trl.schedule import SparsityScheduleConfig

    assert sparrow_trl.SparsityScheduleConfig is SparsityScheduleConfig
    assert sparrow_trl.acceptance.__name__ == "sparrow_trl.acceptance"
    assert sparrow_trl.acceptance_rate is sparrow_trl.acceptance.acceptance_rate
    with pytest.raises(AttributeError, match="no attribute 'Sparse'"):
        _ = sparrow_trl.Sparse
    with pytest.raises(ImportError):
        exec("from sparrow_trl import Sparse")


def test_version_and_type_marker():
    assert sparrow_trl.__version__[0].isdigit()
    assert (Path(sparrow_trl.__file__).parent / "py.typed").is_file()
