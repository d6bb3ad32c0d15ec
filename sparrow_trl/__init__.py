"""
Sparse rollouts for TRL: generate GRPO rollouts with block-sparse attention, train the dense policy, and measure how
far the two drift apart.

Everything is imported on first use, so that `import sparrow_trl` needs neither torch nor TRL nor vLLM.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from . import (
        acceptance,
        acceptance_table,
        calibration,
        callbacks,
        code_runner,
        config,
        cost_model,
        distill,
        guard,
        rewards,
        rollout,
        rollout_adapter,
        sandbox,
        schedule,
        trainer,
    )
    from .acceptance import (
        AcceptanceTracker,
        acceptance_rate,
        acceptance_rate_from_hidden_states,
        fit_beta_tail,
        gather_dense_logprobs,
        top_k_acceptance_bounds,
    )
    from .acceptance_table import AcceptanceTable
    from .calibration import calibrate, fit_schedule
    from .callbacks import TailAcceptanceCallback
    from .code_runner import CodeTestResult, run_code_tests
    from .config import SparseRolloutGRPOConfig
    from .cost_model import predicted_speedup
    from .distill import DistillSparseCallback, DistillSparseConfig
    from .guard import ScheduleGuardCallback, ScheduleGuardConfig
    from .rewards import SandboxedCodeReward, sandboxed_code_reward
    from .rollout import SparseVLLMGeneration
    from .rollout_adapter import RolloutAdapter
    from .sandbox import SandboxConfig
    from .schedule import SparsityScheduleConfig, preset_names
    from .trainer import SparseRolloutGRPOTrainer


try:
    __version__ = version("sparrow-trl")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0.0.0"

__all__ = [
    "__version__",
    "AcceptanceTable",
    "AcceptanceTracker",
    "CodeTestResult",
    "DistillSparseCallback",
    "DistillSparseConfig",
    "RolloutAdapter",
    "SandboxConfig",
    "SandboxedCodeReward",
    "ScheduleGuardCallback",
    "ScheduleGuardConfig",
    "SparseRolloutGRPOConfig",
    "SparseRolloutGRPOTrainer",
    "SparseVLLMGeneration",
    "SparsityScheduleConfig",
    "TailAcceptanceCallback",
    "acceptance_rate",
    "acceptance_rate_from_hidden_states",
    "calibrate",
    "fit_beta_tail",
    "fit_schedule",
    "gather_dense_logprobs",
    "predicted_speedup",
    "preset_names",
    "run_code_tests",
    "sandboxed_code_reward",
    "top_k_acceptance_bounds",
    "acceptance",
    "acceptance_table",
    "calibration",
    "callbacks",
    "code_runner",
    "config",
    "cost_model",
    "distill",
    "guard",
    "rewards",
    "rollout",
    "rollout_adapter",
    "sandbox",
    "schedule",
    "trainer",
]

_MODULE_OF = {
    "AcceptanceTable": "acceptance_table",
    "AcceptanceTracker": "acceptance",
    "CodeTestResult": "code_runner",
    "DistillSparseCallback": "distill",
    "DistillSparseConfig": "distill",
    "RolloutAdapter": "rollout_adapter",
    "SandboxConfig": "sandbox",
    "SandboxedCodeReward": "rewards",
    "ScheduleGuardCallback": "guard",
    "ScheduleGuardConfig": "guard",
    "SparseRolloutGRPOConfig": "config",
    "SparseRolloutGRPOTrainer": "trainer",
    "SparseVLLMGeneration": "rollout",
    "SparsityScheduleConfig": "schedule",
    "TailAcceptanceCallback": "callbacks",
    "acceptance_rate": "acceptance",
    "acceptance_rate_from_hidden_states": "acceptance",
    "calibrate": "calibration",
    "fit_beta_tail": "acceptance",
    "fit_schedule": "calibration",
    "gather_dense_logprobs": "acceptance",
    "predicted_speedup": "cost_model",
    "preset_names": "schedule",
    "run_code_tests": "code_runner",
    "sandboxed_code_reward": "rewards",
    "top_k_acceptance_bounds": "acceptance",
}


def __getattr__(name: str):
    if name in _MODULE_OF:
        value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
