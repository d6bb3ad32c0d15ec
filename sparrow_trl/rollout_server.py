"""
Sparse rollouts from a vLLM server: TRL's server mode with `vllm serve` under this package's plug-in.

The server has its schedule in `--additional-config`, and workers with [`SparseRolloutWorkerExtension`]. What it is,
the trainer reads from the server's own `/server_info` before anything starts; the schedule in use, dense evaluation
and the counters go through `/collective_rpc`. The main process alone talks to it, and hands the others what is theirs.
"""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import save_file
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from .rollout import RolloutProbe, SparseVLLMGeneration, checked_prompts, swapped
from .schedule import SparsityScheduleConfig
from .vllm_backend import ADDITIONAL_CONFIG_KEY, LAYOUT_FIELDS, DecodeCounters
from .vllm_worker_extension import WORKER_EXTENSION


logger = logging.getLogger(__name__)

# What a server answers for a log-prob that is not finite, since JSON has no word for it.
NOT_FINITE = -9999.0

SERVE_COMMAND = "sparrow-trl serve MODEL --schedule SCHEDULE"


def check_server(
    info: dict[str, Any], schedule: SparsityScheduleConfig, dtype: torch.dtype, top_k: int, url: str
) -> None:
    """
    Refuse a server that cannot make the sparse rollouts of a trainer.

    Args:
        info (`dict`): The server's `VllmConfig`, as from `/server_info`.
        schedule ([`SparsityScheduleConfig`]): Schedule of the rollouts.
        dtype (`torch.dtype`): What the policy computes in.
        top_k (`int`): Most likely tokens that are asked for at each position of a probed sequence.
        url (`str`): Where the server is, for the message.

    Raises:
        ValueError: saying what is wrong with the server and how to start it.
    """
    model, cache, parallel = info["model_config"], info["cache_config"], info["parallel_config"]
    record = (info.get("additional_config") or {}).get(ADDITIONAL_CONFIG_KEY)
    start = f"Start it with `{SERVE_COMMAND}`"
    if record is None:
        raise ValueError(
            f"The vLLM server at {url} has no sparsity schedule, so its rollouts would be dense. {start}."
        )
    if parallel["worker_extension_cls"] != WORKER_EXTENSION:
        raise ValueError(
            f"The workers of the vLLM server at {url} have the extension {parallel['worker_extension_cls']!r} and not "
            f"{WORKER_EXTENSION!r}, through which the trainer changes schedules and reads counters. {start}."
        )
    if parallel["data_parallel_size"] > 1:
        raise ValueError(
            f"The vLLM server at {url} runs {parallel['data_parallel_size']} engines in parallel, of which a schedule "
            "change would reach some only. Start it with --tensor-parallel-size instead of --data-parallel-size."
        )
    theirs = SparsityScheduleConfig.from_dict(record)
    differing = [name for name in LAYOUT_FIELDS if getattr(theirs, name) != getattr(schedule, name)]
    if differing:
        pairs = ", ".join(
            f"{name} {getattr(theirs, name)!r} and not {getattr(schedule, name)!r}" for name in differing
        )
        raise ValueError(
            f"The vLLM server at {url} has laid its KV cache out for another schedule: {pairs}. {start}, with the "
            "trainer's schedule or one that differs in budgets, reserved pages and dense layers alone."
        )
    if cache["block_size"] % schedule.page_size:
        raise ValueError(
            f"The KV block of the vLLM server at {url} has {cache['block_size']} tokens, which the schedule's "
            f"page_size {schedule.page_size} does not divide. Start it with another --block-size."
        )
    name = str(dtype).removeprefix("torch.")
    if model["dtype"].removeprefix("torch.") != name:
        raise ValueError(
            f"The vLLM server at {url} computes in {model['dtype']} and the policy in {name}: the log-probs of equal "
            f"weights would differ. {start} --dtype {name}."
        )
    if model["quantization"] is not None:
        raise ValueError(
            f"The vLLM server at {url} quantises the model ({model['quantization']}), and acceptance rates and "
            f"importance ratios need it to hold the policy's weights. {start}, without --quantization."
        )
    if model["logprobs_mode"] != "processed_logprobs":
        raise ValueError(
            f"The vLLM server at {url} runs with logprobs_mode={model['logprobs_mode']!r}, whose log-probs are not "
            f"those that tokens are drawn from. {start} --logprobs-mode processed_logprobs."
        )
    if 0 <= model["max_logprobs"] < top_k:
        raise ValueError(
            f"The vLLM server at {url} gives at most {model['max_logprobs']} log-probs a token, and acceptance_top_k "
            f"asks for {top_k}. Start it with --max-logprobs {top_k}, or lower acceptance_top_k."
        )


class SparseVLLMClient(VLLMClient):
    """
    TRL's client with the sampled tokens' log-probs, probes and the server's sparse attention.

    Attributes:
        probe_rows (callable): Maps the number of completions of the next call to the rows to probe.
        probe_top_k (`int`): Most likely tokens per position of a probed sequence.
        probes (`dict[int, RolloutProbe]`): Probes of the last call, by row.
        dtype (`torch.dtype`): What the server computes in.
    """

    probe_top_k = 0
    probes = {}
    dtype = torch.float32

    @staticmethod
    def probe_rows(num_rows: int) -> list[int]:
        """Which of `num_rows` completions to probe: none, until the owner sets another."""
        return []

    def call_workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        """
        Call a method of [`SparseRolloutWorkerExtension`] in every worker.

        Raises:
            RuntimeError: with the worker's words when it failed.
        """
        results = self._post(f"{self.base_url}/collective_rpc", json={"method": method, "args": list(args)})["results"]
        for result in results:
            if "error" in result:
                raise RuntimeError(f"The vLLM server at {self.base_url} could not do {method}: {result['error']}")
        return results

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        if torch.device(device).type == "cpu":  # no NCCL without a GPU
            return
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        if any(worker["gpu"] == gpu for worker in self.call_workers("sparrow_device")):
            return  # no NCCL between processes on one GPU either
        super().init_communicator(device)
        workers = self.call_workers("sparrow_transfer")
        if self.communicator.disabled or not all(worker["connected"] for worker in workers):
            # Broadcasts would do nothing, and the server's weights would become zeros.
            self.communicator = None
            logger.warning(
                "vLLM has found no NCCL library (libnccl.so.2), so weights go to the server through a file, which it "
                "must be able to read. Set VLLM_NCCL_SO_PATH for the trainer and the server to send them by NCCL."
            )

    def update_named_params(self, metadata, named_params) -> None:
        if self.communicator is not None:
            super().update_named_params(metadata, named_params)
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "weights.safetensors")
            weights = {name: weight.to("cpu", self.dtype).contiguous() for name, weight in named_params}
            save_file(weights, path)
            self.call_workers("sparrow_load_weights", str(path))

    def reset_prefix_cache(self) -> None:
        """
        Forget cached prompts, whose keys depend on the weights and the schedule.

        Raises:
            RuntimeError: when requests of others keep the server from it.
        """
        if not self._post(f"{self.base_url}/reset_prefix_cache").get("success", True):
            raise RuntimeError(
                f"The vLLM server at {self.base_url} could not reset its prefix cache: it works on requests of "
                "others. Rollouts need a server of their own."
            )

    def prompt_logprobs(self, prompts: list[list[int]]) -> list[list[float]]:
        """Log-probs of each prompt's tokens after the first, under the server's weights."""
        payload = {"model": self.model, "prompt": prompts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        choices = self._post(f"{self.base_url}/v1/completions", json=payload)["choices"]
        return [
            [
                position[str(token)]["logprob"]
                for token, position in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
            ]
            for ids, choice in zip(prompts, choices, strict=True)
        ]

    def generate(self, prompts, features=None, n: int = 1, **sampling) -> dict[str, list]:
        """
        As TRL's, with the sampled token's log-prob alone at each position, and `probes` filled.

        Completions of a prompt that are probed are asked for apart from the others, since the number of log-probs is a
        request's. Which completion of a prompt becomes which row does not matter, so they take the rows chosen.
        """
        chosen = set(self.probe_rows(len(prompts) * n))
        counts = Counter(row // n for row in chosen)
        groups: dict[tuple[int, int], list[int]] = {}
        for prompt in range(len(prompts)):
            for count, top_k in ((counts[prompt], self.probe_top_k), (n - counts[prompt], 0)):
                if count:
                    groups.setdefault((count, top_k), []).append(prompt)

        def send(count: int, top_k: int, members: list[int]) -> dict[str, list]:
            arguments = {**sampling, "logprobs": top_k}
            # Not super(), which takes the first argument of this function for the client.
            return VLLMClient.generate(self, [prompts[prompt] for prompt in members], features, n=count, **arguments)

        with ThreadPoolExecutor(len(groups) or 1) as executor:
            futures = {key: executor.submit(send, *key, members) for key, members in groups.items()}
            outputs = {key: future.result() for key, future in futures.items()}

        self.probes = {}
        prompt_ids = [None for _ in prompts]
        rows = [None] * (len(prompts) * n)
        for (count, top_k), members in groups.items():
            output = outputs[count, top_k]
            for index, prompt in enumerate(members):
                prompt_ids[prompt] = output["prompt_ids"][index]
                own_rows = [row for row in range(prompt * n, (prompt + 1) * n) if (row in chosen) == bool(top_k)]
                for row, column in zip(own_rows, range(index * count, (index + 1) * count), strict=True):
                    fields = (output[name][column] for name in ("completion_ids", "logprobs", "logprob_token_ids"))
                    rows[row] = read_completion(*fields, top_k, row, len(prompt_ids[prompt]))
                    if top_k:
                        self.probes[row] = rows[row][2]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [completion for completion, *_ in rows],
            "logprobs": [[[logprob] for logprob in logprobs] for _, logprobs, _ in rows],
            "logprob_token_ids": [[[token] for token in completion] for completion, *_ in rows],
        }


def read_completion(
    completion: list[int],
    logprobs: list[list[float]],
    token_ids: list[list[int]],
    top_k: int,
    row: int,
    prompt_length: int,
) -> tuple[list[int], list[float], RolloutProbe | None]:
    """
    The sampled tokens' log-probs of one completion, and its probe when `top_k` is not zero.

    Args:
        completion (`list[int]`): Sampled tokens.
        logprobs (`list[list[float]]`): Log-probs at each position, the highest first.
        token_ids (`list[list[int]]`): Their tokens; the sampled one is among them.
        top_k (`int`): Most likely tokens to keep.
        row (`int`): Row of the completion.
        prompt_length (`int`): Tokens of its prompt.

    Raises:
        RuntimeError: for a log-prob of a sampled token that is not finite.
    """
    sampled = []
    for position, token in enumerate(completion):
        logprob = logprobs[position][token_ids[position].index(token)]
        if logprob is None or not logprob > NOT_FINITE:
            raise RuntimeError(
                f"The vLLM server returned a log-prob that is not finite for token {token} at position {position} of "
                f"completion {row}. The attention kernel or the weights are broken; nothing was trained on this batch."
            )
        sampled.append(logprob)
    if not top_k:
        return completion, sampled, None
    shape = (len(completion), top_k)
    # A sampled token that is none of the most likely ones comes last.
    probe = RolloutProbe(
        row=row,
        prompt_length=prompt_length,
        token_ids=torch.tensor([ids[:top_k] for ids in token_ids], dtype=torch.long).reshape(shape),
        logprobs=torch.tensor([values[:top_k] for values in logprobs], dtype=torch.float32).reshape(shape),
        sampled_ids=torch.tensor(completion, dtype=torch.long),
        sampled_logprobs=torch.tensor(sampled, dtype=torch.float32),
    )
    return completion, sampled, probe


class ServerRolloutState:
    """
    A server's sparse attention as [`~sparrow_trl.vllm_backend.SparseRolloutState`] shows an engine's.

    Args:
        client ([`SparseVLLMClient`], *optional*): Connection to the server; `None` in processes without one.
        schedule ([`SparsityScheduleConfig`]): Schedule to use from now on.
        from_main (`Callable`): Calls a function in the main process, and gives all processes its result or error.
    """

    def __init__(
        self, client: SparseVLLMClient | None, schedule: SparsityScheduleConfig, from_main: Callable[[Callable], Any]
    ):
        self.client, self._from_main = client, from_main
        (attached, *_) = from_main(lambda: client.call_workers("sparrow_attach"))
        self.attention_backend = attached["attention_backend"]
        self.dense = False  # a trainer before this one may have left it
        self.set_schedule(schedule)

    def set_schedule(self, schedule: SparsityScheduleConfig) -> None:
        """Change the schedule, in all processes. The caller resets the prefix cache."""
        self._from_main(lambda: self.client.call_workers("sparrow_set_schedule", json.dumps(schedule.to_dict())))
        self.schedule = schedule

    @property
    def dense(self) -> bool:
        """`bool`: Whether every token keeps all pages. To be set in all processes."""
        return self._dense

    @dense.setter
    def dense(self, dense: bool) -> None:
        self._from_main(lambda: self.client.call_workers("sparrow_set_dense", json.dumps(dense)))
        self._dense = dense

    @property
    def counters(self) -> DecodeCounters:
        """[`DecodeCounters`]: What all workers have counted; nothing in processes without a connection."""
        totals = Counter()
        for counters in self.client.call_workers("sparrow_counters") if self.client is not None else ():
            totals.update(counters)
        return DecodeCounters(**totals)


class ServerSparseVLLMGeneration(SparseVLLMGeneration):
    """[`SparseVLLMGeneration`] from a vLLM server instead of an engine in the trainer's processes."""

    def _init_vllm(self) -> None:
        self._check_policy()
        self.vllm_client = None
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"

        def connect() -> int:
            client = SparseVLLMClient(url, group_port=self.group_port, connection_timeout=self.server_timeout)
            info = client.get_server_info()
            top_k = min(self._probe_top_k, self.model.config.vocab_size)
            check_server(info, self._initial_schedule, self.engine_dtype, top_k, url)
            client.probe_top_k, client.dtype = top_k, self.engine_dtype
            self.vllm_client = client
            return info["model_config"]["max_model_len"]

        self._max_context_tokens = self._from_main(connect)
        with swapped(vllm_generation, "VLLMClient", lambda **kwargs: self.vllm_client):
            super(SparseVLLMGeneration, self)._init_vllm()
        self.state = ServerRolloutState(self.vllm_client, self._initial_schedule, self._from_main)

    def _from_main(self, make: Callable[[], Any]) -> Any:
        """What `make` gives in the main process, in all of them, which must all call this. So with its error."""
        value = error = None
        if self.accelerator.is_main_process:
            try:
                value = make()
            except Exception as raised:
                error = raised
        # The others would wait for what the main process never sends.
        value, text = broadcast_object_list([value, error and f"{type(error).__name__}: {error}"], from_process=0)
        if error is not None:
            raise error
        if text is not None:
            raise RuntimeError(f"The main process failed with the vLLM server. {text}")
        return value

    @property
    def num_sharing(self) -> int:
        return self.accelerator.num_processes

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    def _reset_prefix_cache(self) -> None:
        self._from_main(lambda: self.vllm_client.reset_prefix_cache())

    def _prepare_batch(self, prompts: list[list[int]]) -> None:
        # The policy is asked too, by all processes together.
        self._check_weights_if_due(prompts)
        if self.vllm_client is not None:
            self.vllm_client.probe_rows = self.probe_rows or SparseVLLMClient.probe_rows

    def _local_probes(self, num_rows: int) -> list[RolloutProbe]:
        probes = self._from_main(lambda: self.vllm_client.probes)
        start = self.accelerator.process_index * num_rows
        return [replace(probe, row=row - start) for row, probe in probes.items() if start <= row < start + num_rows]

    def _send_weights(self) -> None:
        VLLMGeneration.sync_weights(self)

    def check_weights(self, prompts: list[list[int]]) -> float:
        # All processes ask the policy together, so all must call this, and with the same prompts.
        return super().check_weights(self._from_main(lambda: checked_prompts(prompts)))

    def _prompt_logprobs(self, prompts: list[list[int]]) -> list[list[float]]:
        return self._from_main(lambda: self.vllm_client.prompt_logprobs(prompts))
