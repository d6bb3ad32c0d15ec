"""
A vLLM engine in a process of its own, which completes prompts: `python -m
sparrow_trl.generation_worker DESCRIPTOR`, with the file descriptor of a `multiprocessing` connection to the process
that asks ([`~sparrow_trl.sequence_generation.EngineProcess`]).

It first receives the keyword arguments of [`vllm.LLM`] and the fields of a sparsity schedule, or `None` for vLLM's own
attention, and answers `("ready", None)`. Each message after that is a dictionary: `prompts` (token ids of each),
`seeds` (one a prompt), `max_length` (most tokens, prompt included), `stop_token_ids`, `schedule` (the fields of the
schedule from now on, which must fit the engine's page structure, or `None` for no change), and `sampling` (fields of
[`vllm.SamplingParams`], or `None` for the model's own distribution). It answers
`("finished", (index, token ids))` as completions end, in whatever order. `("failed", text)` comes before it ends with
an error; it ends without one when the connection is closed.
"""

import math
import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from .schedule import SparsityScheduleConfig


class CompletionEngine:
    """
    The engine.

    Args:
        engine (`dict`):
            Keyword arguments of [`vllm.LLM`].
        schedule (`dict`, *optional*):
            Fields of a sparsity schedule; by default the engine attends as vLLM does.
    """

    def __init__(self, engine: dict[str, Any], schedule: dict[str, Any] | None):
        from vllm import LLM

        self.state = None
        self._num_requests = 0
        if schedule is None:
            self.llm = LLM(**engine)
            return
        from vllm.platforms import current_platform

        from . import vllm_backend
        from .vllm_plugin import register

        register()
        engine = {**engine, "additional_config": {vllm_backend.ADDITIONAL_CONFIG_KEY: schedule}}
        if not current_platform.is_cpu():
            engine["attention_backend"] = "CUSTOM"
        self.llm = LLM(**engine)
        (self.state,) = self.llm.collective_rpc(vllm_backend.attach_sparse_rollout)

    def complete(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        max_length: int,
        stop_token_ids: list[int],
        schedule: dict[str, Any] | None = None,
        sampling: dict[str, float] | None = None,
    ) -> Iterator[tuple[int, list[int]]]:
        """Index and token ids of each completion, as they end."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if schedule is not None:
            self.state.set_schedule(SparsityScheduleConfig.from_dict(schedule))
        engine, indices = self.llm.llm_engine, {}
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            params = SamplingParams(
                **{"temperature": 1.0, **(sampling or {})},
                max_tokens=max_length - len(prompt),
                seed=seed,
                stop_token_ids=stop_token_ids,
                detokenize=False,
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            indices[str(self._num_requests)] = index
            engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)
            self._num_requests += 1
        while engine.has_unfinished_requests():
            for output in engine.step():
                (completion,) = output.outputs
                index = indices[output.request_id]
                if not math.isfinite(completion.cumulative_logprob):
                    raise RuntimeError(
                        f"The engine's log-probs of the completion of prompt {index} are not finite. Its attention "
                        "kernel or the weights are broken."
                    )
                yield index, list(completion.token_ids)


def serve(connection: Connection) -> None:
    """Start the engine that is asked for over `connection`, and answer until the connection is closed."""
    # The engine is driven from this process, whose attention layers' state changes with the schedule.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = CompletionEngine(**connection.recv())
    connection.send(("ready", None))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        for finished in engine.complete(**request):
            connection.send(("finished", finished))


def main(descriptor: str) -> None:
    """Serve the connection with the file descriptor `descriptor` (`str`)."""
    connection = Connection(int(descriptor))
    status = 0
    try:
        serve(connection)
    except Exception as error:
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        status = 1
    # At once: what libraries write when the interpreter ends would hide the error.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
