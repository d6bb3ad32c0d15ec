"""
Greedy rollouts of vLLM's stock engine, in a process of its own that proves it is stock.

    python stock_rollouts.py MODEL < prompts.json > completions.json

The package and its vLLM plug-in are installed here as everywhere; only the schedule is missing.
"""

import json
import os
import sys


def main():
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    load_general_plugins()
    assert AttentionBackendEnum.CPU_ATTN.get_path().startswith("sparrow_trl."), "the plug-in is not installed"
    llm = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        enforce_eager=True,
        kv_cache_memory_bytes=2**28,
        block_size=32,
    )
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert {type(layer.impl) for layer in layers} == {CPUAttentionBackendImpl}
    (worker,) = llm.collective_rpc(lambda worker: worker)
    builders = {type(group.get_metadata_builder()) for groups in worker.model_runner.attn_groups for group in groups}
    assert builders == {CPUAttentionMetadataBuilder}

    prompts = [{"prompt_token_ids": ids} for ids in json.load(sys.stdin)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=80), use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
