"""
What a vLLM server's workers do for a trainer: the class that `vllm serve --worker-extension-cls` mixes into them.

Its methods are reached by name through the server's `/collective_rpc`, which carries strings there and dictionaries
back. What goes wrong comes back as `{"error": text}`, because a server answers an exception without its words and the
client would try again.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

from .schedule import SparsityScheduleConfig


# What `--worker-extension-cls` must be.
WORKER_EXTENSION = "sparrow_trl.vllm_worker_extension.SparseRolloutWorkerExtension"


def _answering(method: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    @wraps(method)
    def answer(self, *args: str) -> dict[str, Any]:
        try:
            return method(self, *args) or {}
        except Exception as error:  # whatever it is, the trainer should read it
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


class SparseRolloutWorkerExtension:
    """Methods of a server's workers. All names begin with `sparrow_`, since a worker has many of its own."""

    @_answering
    def sparrow_attach(self) -> dict[str, Any]:
        """Connect the attention layers with the runner, and say what they are. To be called before anything else."""
        from .vllm_backend import attach_sparse_rollout

        self._sparrow_state = attach_sparse_rollout(self)
        return {
            "attention_backend": self._sparrow_state.attention_backend,
            "schedule": self._sparrow_state.schedule.to_dict(),
        }

    @_answering
    def sparrow_set_schedule(self, schedule: str) -> None:
        """Use `schedule` (its fields as JSON) from the next step on."""
        self._sparrow_state.set_schedule(SparsityScheduleConfig.from_dict(json.loads(schedule)))

    @_answering
    def sparrow_set_dense(self, dense: str) -> None:
        """Attend to every page, or sparsely again: `"true"` or `"false"`."""
        self._sparrow_state.dense = json.loads(dense)

    @_answering
    def sparrow_counters(self) -> dict[str, Any]:
        """What the attention layers have read, this worker's kv heads alone."""
        return asdict(self._sparrow_state.counters)

    @_answering
    def sparrow_device(self) -> dict[str, Any]:
        """Which GPU this worker is on, `None` without one."""
        import torch

        return {"gpu": str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else None}

    @_answering
    def sparrow_transfer(self) -> dict[str, Any]:
        """Whether NCCL connects this worker with the trainer. vLLM goes on in silence where it finds no library."""
        return {"connected": not self.weight_transfer_engine.model_update_group.disabled}

    @_answering
    def sparrow_load_weights(self, path: str) -> None:
        """Load a safetensors file into the engine."""
        import torch
        from safetensors.torch import load_file

        from .vllm_backend import reload_packed_weights

        # On the CPU: an engine leaves no room for a second copy of the model.
        weights = load_file(path).items()
        if self.device.type == "cpu":
            reload_packed_weights(self, weights)
        else:
            with torch.no_grad():
                self.model_runner.model.load_weights(weights)
