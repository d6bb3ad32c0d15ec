import os
import socket


# Read when vLLM, huggingface_hub and the tokenizers are imported, so this comes before any import of theirs.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

# Test processes that share the cores would wait for each other's threads most of the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})

# TRL tries the same few ports first, which two test processes on one machine would both find free.
with socket.socket() as probe:
    probe.bind(("", 0))
    os.environ["MASTER_PORT"] = str(probe.getsockname()[1])

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory):
    """Maps the name of a model of `tiny_models` to its folder, which is written at the first use."""
    root = tmp_path_factory.mktemp("tiny_models")

    def path(name: str) -> str:
        from tiny_models import save_tiny_model

        folder = root / name
        return str(folder) if folder.exists() else save_tiny_model(name, folder)

    return path


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_model_path) -> str:
    """Folder of a Qwen3 model with tied embeddings."""
    return tiny_model_path("qwen3")


@pytest.fixture(scope="session")
def tiny_qwen3_untied(tiny_model_path) -> str:
    """Folder of a Qwen3 model with a head of its own."""
    return tiny_model_path("qwen3_untied")


@pytest.fixture(scope="session")
def build_generation():
    """Builds a `SparseVLLMGeneration` for a model; the engine runs eagerly in this process."""
    from accelerate import Accelerator
    from transformers import AutoTokenizer

    from sparrow_trl import SparseVLLMGeneration

    def build(model, schedule, engine_kwargs=None, **kwargs):
        return SparseVLLMGeneration(
            model,
            Accelerator(cpu=True),
            AutoTokenizer.from_pretrained(model.name_or_path),
            schedule=schedule,
            engine_kwargs={"enforce_eager": True, "kv_cache_memory_bytes": 2**26, **(engine_kwargs or {})},
            **{"max_model_length": 512, "max_num_seqs": 16, "max_completion_length": 80, **kwargs},
        )

    return build
