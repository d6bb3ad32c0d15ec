"""Entry point of the `vllm.general_plugins` group: it tells vLLM where the block-sparse attention backends live.

vLLM calls [`register`] in every process it starts. Only strings are registered, so nothing is imported until an engine
asks for a backend, and an engine whose `additional_config` carries no schedule keeps running the stock implementation.
"""

import logging

from .versions import check_version


logger = logging.getLogger(__name__)


def register() -> None:
    """Register the sparse attention backends with vLLM. Safe to call more than once."""
    try:
        check_version("vllm")
    except ImportError as error:
        # Raising here would break every vLLM on this machine, sparse or not.
        logger.warning("The sparse attention backends are not registered. %s", error)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "sparrow_trl.vllm_cuda_backend.SparseFlashAttentionBackend")
    # The CPU platform ignores the requested backend and always takes CPU_ATTN.
    register_backend(AttentionBackendEnum.CPU_ATTN, "sparrow_trl.vllm_backend.SparseCPUAttentionBackend")
