"""
Greedy rollouts of vLLM's stock engine, in a process of its own that proves it is stock.

    python stock_rollouts.py < request.json > rollouts.json

A request has the keyword arguments of `vllm.LLM` in `engine`, token ids in `prompts`, and the fields of
`vllm.SamplingParams` in `sampling`. The package and its vLLM plug-in are installed here as everywhere; only the
schedule is missing.
"""

import json
import os
import sys


def greedy_rollouts(llm, prompts: list[list[int]], **sampling) -> list[dict]:
    """Token ids of each prompt's completion, and at each of its positions `[token, logprob]` of the likeliest ones."""
    from vllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, detokenize=False, **sampling)
    # Of the base class: a rollout engine returns the sampled tokens' log-probs alone.
    outputs = LLM.generate(llm, [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [
        {
            "token_ids": list(output.outputs[0].token_ids),
            "logprobs": [
                [[token, entry.logprob] for token, entry in position.items()]
                for position in output.outputs[0].logprobs or ()
            ],
        }
        for output in outputs
    ]


def check_stock(llm) -> None:
    """Assert that the plug-in is there and that no part of it is in `llm`."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as stock

        replaced = AttentionBackendEnum.CPU_ATTN
    else:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as stock

        replaced = AttentionBackendEnum.CUSTOM
    load_general_plugins()
    assert replaced.get_path().startswith("sparrow_trl."), "the plug-in is not installed"
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert {type(layer.impl) for layer in layers} == {stock.get_impl_cls()}
    (worker,) = llm.collective_rpc(lambda worker: worker)
    builders = {type(group.get_metadata_builder()) for groups in worker.model_runner.attn_groups for group in groups}
    assert builders == {stock.get_builder_cls()}


def main():
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    request = json.load(sys.stdin)
    llm = LLM(enforce_eager=True, **request["engine"])
    check_stock(llm)
    print(json.dumps(greedy_rollouts(llm, request["prompts"], **request["sampling"])))


if __name__ == "__main__":
    main()
