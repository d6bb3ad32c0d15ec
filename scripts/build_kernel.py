"""
Lay `kernels/` out as the Kernel Hub has it: a folder for each backend with the sources and their metadata.

    python scripts/build_kernel.py [--output kernels/build]

The result is what `kernels.get_local_kernel` loads and `kernel-builder upload` publishes. The kernels are Triton and
PyTorch, so nothing is compiled, and a build with Nix is not needed for it.
"""

import argparse
import hashlib
import json
import shutil
import tomllib
from pathlib import Path


KERNELS = Path(__file__).resolve().parent.parent / "kernels"

# Older versions of `kernels` import the folder of the kernel's name in the variant.
COMPATIBILITY = '''"""For versions of `kernels` that look for a folder of the kernel's name."""

import importlib.util
import sys
from pathlib import Path


_PATH = Path(__file__).resolve().parent.parent / "__init__.py"
_NAME = "{identifier}"
if _NAME not in sys.modules:
    _SPEC = importlib.util.spec_from_file_location(_NAME, _PATH)
    sys.modules[_NAME] = importlib.util.module_from_spec(_SPEC)
    _SPEC.loader.exec_module(sys.modules[_NAME])
globals().update({{name: value for name, value in vars(sys.modules[_NAME]).items() if not name.startswith("__")}})
'''


def build_kernel(output: Path) -> list[Path]:
    """
    Write the variants of all backends in `build.toml`, in the place of those that are there.

    Args:
        output (`pathlib.Path`): Folder for them.

    Returns:
        `list[pathlib.Path]`: Folder of each variant.
    """
    general = tomllib.loads((KERNELS / "build.toml").read_text())["general"]
    module = general["name"].replace("-", "_")
    sources = sorted((KERNELS / "torch-ext" / module).glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:7]
    variants = []
    for backend in general["backends"]:
        folder = output / f"torch-{backend}"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / module).mkdir(parents=True)
        for source in sources:
            shutil.copy(source, folder)
        # Kernels of several versions may be loaded in one process, each under its own name.
        identifier = f"_{module}_{backend}_{digest}"
        (folder / module / "__init__.py").write_text(COMPATIBILITY.format(identifier=identifier))
        metadata = {
            "name": general["name"],
            "id": identifier,
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        variants.append(folder)
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=KERNELS / "build", help="folder for the variants")
    for folder in build_kernel(parser.parse_args().output):
        print(f"Wrote {folder}")


if __name__ == "__main__":
    main()
