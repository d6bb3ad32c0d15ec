"""Server mode on a GPU: a server and its trainer on the same one, or on two where there are two."""

import json
import os

import pytest
import torch
from test_gpu_backend import BFLOAT16_TOLERANCE, GRAPHS, SPARSE_SHARE, model  # noqa: F401
from test_parity import mean_difference
from test_server_mode import server_config, start_server, train_and_evaluate
from test_trainer import OTHER_SCHEDULE, SCHEDULE


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and vLLM's CUDA build")

OPTIONS = ["--dtype", "bfloat16", "--max-model-len", "256", "--kv-cache-memory-bytes", str(2**28)]
# vLLM wants this share of the memory to be free, though the KV cache has a size of its own.
OPTIONS += ["--gpu-memory-utilization", "0.3", "--max-num-seqs", "16"]
OPTIONS += ["--kernel-config", json.dumps({"enable_jit_warmup": False})]
OPTIONS += ["--compilation-config", json.dumps(GRAPHS["compilation_config"])]


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("gpu_server")
    with pytest.MonkeyPatch.context() as patch:
        # The trainer takes the first GPU.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        patch.setenv("CUDA_VISIBLE_DEVICES", visible.split(",")[-1])
        server = start_server(model.name_or_path, folder, worker_in_core=True, options=OPTIONS)
    try:
        config = server_config(folder, server, max_steps=1, learning_rate=1e-3, use_cpu=False, bf16=True)
        yield train_and_evaluate(model.name_or_path, config)
    finally:
        server.stop()


def test_the_engine_in_the_server_computes_what_the_policy_does(trained):
    schedules = [rollout.schedule for rollout in trained.rollouts if rollout.mode == "train"]
    assert SCHEDULE in schedules and OTHER_SCHEDULE in schedules
    for rollout in trained.rollouts:
        sparse, dense = (
            mean_difference(
                rollout.logprobs,
                [
                    logprobs.gather(1, torch.tensor(ids)[:, None]).squeeze(1).numpy()
                    for logprobs, ids in zip(distributions, rollout.completions, strict=True)
                ],
            )
            for distributions in (rollout.sparse, rollout.dense)
        )
        print(f"{rollout.mode}: mean difference {sparse:.2e} from sparse, {dense:.2e} from dense log-probs")
        if rollout.mode == "eval":
            assert dense < BFLOAT16_TOLERANCE and rollout.counters.sparse_tokens == 0
        else:
            assert sparse < SPARSE_SHARE * dense
            assert 0 < rollout.counters.kept_pages < rollout.counters.cached_pages


def test_weights_travel_by_nccl_between_two_gpus_alone(trained):
    communicator = trained.vllm_generation.vllm_client.communicator
    assert (communicator is not None) == (torch.cuda.device_count() > 1)
