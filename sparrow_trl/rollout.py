"""Rollout generation with block-sparse attention: TRL's [`VLLMGeneration`] with a sparse engine inside.

It differs from the stock class in four places: the engine it builds (the policy's dtype, the schedule, the sparse
backend), the log-probs it hands back (always the sampled token's, and a share of the sequences with the sampler's most
likely tokens beside them), the weights it sends (adapters merged into copies), and a check that they arrived.
"""

import copy
import logging
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .versions import check_version


check_version("trl")
check_version("vllm")

import torch  # noqa: E402
from accelerate.utils import is_peft_model  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.logprobs import FlatLogprobs, Logprob  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from .schedule import SparsityScheduleConfig  # noqa: E402
from .vllm_plugin import register  # noqa: E402


if TYPE_CHECKING:
    from .rollout_adapter import RolloutAdapter


logger = logging.getLogger(__name__)

# Mean absolute difference of log-probs on the same prompt tokens above which the engine's weights are not the
# policy's. Rounding gives below 1e-5 in float32 and up to 0.05 in bfloat16 (float32 weights under autocast, tokens the
# model cannot predict); a tied head that missed one update gives 0.4.
WEIGHT_SYNC_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-1}

WEIGHT_SYNC_CHECK_PROMPTS = 2
WEIGHT_SYNC_CHECK_TOKENS = 128

# Engine settings that the rollout class decides itself.
_RESERVED_ENGINE_KWARGS = (
    "additional_config",
    "attention_backend",
    "block_size",
    "distributed_executor_backend",
    "dtype",
    "enable_sleep_mode",
    "logprobs_mode",
    "max_logprobs",
    "model",
    "model_impl",
    "quantization",
    "speculative_config",
    "tensor_parallel_size",
)


@contextmanager
def swapped(owner, name: str, value):
    """Replace attribute `name` of `owner` by `value` inside the context: for what TRL calls without a hook."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@dataclass
class RolloutProbe:
    """The sampler's most likely tokens along one completion.

    Args:
        row (`int`): Index of the sequence in the local batch.
        prompt_length (`int`): Tokens in its prompt.
        token_ids (`torch.Tensor` of shape `[completion_length, top_k]`): Most likely tokens, most likely first.
        logprobs (`torch.Tensor` of shape `[completion_length, top_k]`):
            Their log-probs under the sparse sampler, after temperature, float32.
        sampled_ids (`torch.Tensor` of shape `[completion_length]`): Sampled tokens.
        sampled_logprobs (`torch.Tensor` of shape `[completion_length]`): Their log-probs under the sparse sampler.
    """

    row: int
    prompt_length: int
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    sampled_ids: torch.Tensor
    sampled_logprobs: torch.Tensor


class RolloutLLM(LLM):
    """A [`vllm.LLM`] whose `generate` returns sampled tokens' log-probs and keeps some sequences' most likely ones.

    Attributes:
        probe_rows (callable): Maps the number of requests of the next call to the rows to probe.
        probe_top_k (`int`): Most likely tokens per position of a probed sequence.
        probes (`dict[int, RolloutProbe]`): Probes of the last call, by row.
        arguments (`dict`): What it was built with.
        before_generate (callable): Called with the prompts once the engine is ready for them.
    """

    probe_top_k = 0
    probes = {}
    arguments = {}

    @staticmethod
    def probe_rows(num_rows: int) -> list[int]:
        """Which of `num_rows` requests to probe: none, until the owner sets another."""
        return []

    @staticmethod
    def before_generate(prompts: list[list[int]]) -> None:
        """
        Called before the prompts of a call are sent; does nothing, until the owner sets another.

        Args:
            prompts (`list[list[int]]`): Their token ids.
        """

    def generate(self, prompts, sampling_params, **kwargs):
        self.before_generate([prompt["prompt_token_ids"] for prompt in prompts])
        sampling_params.flat_logprobs = True
        if not sampling_params.stop:
            sampling_params.detokenize = False  # TRL decodes the token ids itself
        rows = set(self.probe_rows(len(prompts)))
        probing_params = sampling_params.clone()
        probing_params.logprobs = self.probe_top_k
        outputs = super().generate(
            prompts, [probing_params if row in rows else sampling_params for row in range(len(prompts))], **kwargs
        )
        self.probes = {}
        for row, request in enumerate(outputs):
            for completion in request.outputs:
                token_ids, logprobs = _read_logprobs(request, completion)
                if row in rows:
                    self.probes[row] = RolloutProbe(
                        row=row,
                        prompt_length=len(request.prompt_token_ids),
                        token_ids=token_ids[:, 1:],
                        logprobs=logprobs[:, 1:],
                        sampled_ids=token_ids[:, 0],
                        sampled_logprobs=logprobs[:, 0],
                    )
                completion.logprobs = [
                    {token: Logprob(logprob=logprob, rank=1)}
                    for token, logprob in zip(completion.token_ids, logprobs[:, 0].tolist(), strict=True)
                ]
        return outputs

    def _run_engine(self, *args, **kwargs):
        try:
            return super()._run_engine(*args, **kwargs)
        except BaseException:
            # After an error or an interrupted notebook cell, the next call would finish what is left and return it
            # ahead of its own requests, and the prefix cache could not be reset.
            unfinished = list(self.llm_engine.output_processor.request_states)
            self.llm_engine.abort_request(unfinished, internal=True)
            raise


def _read_logprobs(request, completion) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and log-probs at each position of a completion, `[completion_length, 1 + top_k]`.

    vLLM stores the sampled token first, whatever its rank, and again in its place among the most likely ones.
    """
    flat = completion.logprobs or FlatLogprobs()  # an empty completion may come without
    length = len(completion.token_ids)
    shape = (length, len(flat.logprobs) // length if length else 1)
    token_ids = torch.tensor(flat.token_ids, dtype=torch.long).reshape(shape)
    logprobs = torch.tensor(flat.logprobs, dtype=torch.float32).reshape(shape)
    broken = logprobs.isnan().any(dim=1).nonzero()
    if len(broken):
        position = int(broken[0])
        raise RuntimeError(
            f"The engine returned a NaN log-prob for token {completion.token_ids[position]} at position {position} of "
            f"the completion of request {request.request_id}. The attention kernel or the weights are broken; nothing "
            "was trained on this batch."
        )
    return token_ids, logprobs


def checked_prompts(prompts: list[list[int]]) -> list[list[int]]:
    """What of `prompts` (`list[list[int]]`, token ids) the engine's weights are checked on."""
    return [ids[:WEIGHT_SYNC_CHECK_TOKENS] for ids in prompts if len(ids) > 1][:WEIGHT_SYNC_CHECK_PROMPTS]


def check_policy(model) -> None:
    """Refuse, with a `ValueError`, a `model` that sparse rollouts cannot serve."""
    config = model.config
    text_config = config.get_text_config()
    if text_config is not config or getattr(config, "vision_config", None) is not None:
        raise ValueError(
            f"{config.model_type!r} is a multimodal model. Sparse rollouts support text-only policies; use the "
            "text-only checkpoint or TRL's GRPOTrainer."
        )
    if getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "The policy is quantised. Sparse rollouts compare the engine's probabilities with the policy's, so both "
            "must hold the same weights. Load the model without a quantization_config."
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if has_window or layer_types != {"full_attention"}:
        raise ValueError(
            f"{config.model_type!r} has layers with another kind of attention ({', '.join(sorted(layer_types))}, "
            f"sliding_window={getattr(config, 'sliding_window', None)}). Sparse rollouts need full attention in every "
            "layer."
        )
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        raise ValueError(f"{config.model_type!r} has learned attention sinks, which sparse rollouts do not support.")
    if any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        raise ValueError(
            f"{config.model_type!r} is a mixture of experts. transformers and vLLM store the experts' weights under "
            "different names, so the engine would not get those that are trained. Use a dense model."
        )
    if is_peft_model(model) and model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"The policy uses {model.active_peft_config.peft_type}, whose virtual tokens the engine does not see. Use "
            "LoRA, or fine-tune all weights."
        )


def check_engine_arguments(
    schedule: SparsityScheduleConfig, block_size: int | None = None, engine_kwargs: dict | None = None
) -> None:
    """Refuse, with a `ValueError`, settings with which no sparse engine can be built.

    Args:
        schedule ([`SparsityScheduleConfig`]): Sparsity schedule of the rollouts.
        block_size (`int`, *optional*): Tokens in a block of the engine's KV cache.
        engine_kwargs (`dict`, *optional*): Further keyword arguments of [`vllm.LLM`].
    """
    reserved = sorted(set(engine_kwargs or {}) & set(_RESERVED_ENGINE_KWARGS))
    if reserved:
        raise ValueError(
            f"vllm_engine_kwargs must not contain {', '.join(reserved)}: the trainer sets them from its arguments, "
            "the policy and the schedule."
            + (" Use vllm_block_size for the KV block." if "block_size" in reserved else "")
            + (" It follows from acceptance_top_k." if reserved == ["max_logprobs"] else "")
            + (" The engine takes the dtype the policy computes in." if "dtype" in reserved else "")
        )
    # vLLM's CPU kernels read keys in groups of 32, and every page size is a power of two.
    unit = max(schedule.page_size, 32 if current_platform.is_cpu() else 1)
    if block_size is not None and (block_size <= 0 or block_size % unit):
        raise ValueError(
            f"vllm_block_size={block_size} is not a multiple of {unit}, as the schedule's page_size "
            f"{schedule.page_size} and vLLM's kernels need it. Use for instance {max(unit, 32)}, or a schedule with a "
            "smaller page."
        )


def check_layers(schedule: SparsityScheduleConfig, num_layers: int) -> None:
    """Refuse, with a `ValueError`, a `schedule` that names layers which a policy of `num_layers` does not have."""
    dense = [] if schedule.is_dense else schedule.dense_layers
    missing = [str(layer) for layer in dense if layer >= num_layers]
    missing += [key for key in schedule.layer_top_k_pages or () if int(key.rpartition("-")[2]) >= num_layers]
    if missing:
        raise ValueError(
            f"The schedule names the layers {', '.join(missing)}, but the policy has {num_layers}, counted from 0. "
            "Use a schedule made for this model, or change its dense_layers and layer_top_k_pages."
        )


class SparseVLLMGeneration(VLLMGeneration):
    """
    Generates rollouts with a colocated vLLM engine under block-sparse attention.

    Args:
        schedule ([`SparsityScheduleConfig`]):
            Sparsity schedule of the rollouts.
        block_size (`int`, *optional*):
            Tokens in a block of the engine's KV cache, a multiple of the schedule's page size.
        engine_kwargs (`dict`, *optional*):
            Further keyword arguments of [`vllm.LLM`].
        probe_top_k (`int`, *optional*, defaults to `20`):
            Most likely tokens per position of a probed sequence.
        weight_sync_check_interval (`int`, *optional*, defaults to `3`):
            The engine's weights are checked after each of the first three synchronisations and then at every this
            many; `0` turns the check off.
        engine ([`RolloutLLM`], *optional*):
            Engine to go on with, the `llm` of another generation with the same settings. Starting one takes up to a
            minute.
        **kwargs:
            Arguments of TRL's `VLLMGeneration`.

    Attributes:
        state ([`vllm_backend.SparseRolloutState`]):
            What the attention layers share: the schedule and the counters since the start.
        probe_rows (callable, *optional*):
            Maps the number of requests of a batch to the rows whose top log-probs are kept. Under tensor parallelism
            it must give the same rows on every rank.
        probes (`list[RolloutProbe]`): Probes of the last batch.
        counters ([`vllm_backend.DecodeCounters`]): What the attention layers read for the last batch.
        num_syncs (`int`): Synchronisations of the engine's weights so far.
        adapter ([`~sparrow_trl.rollout_adapter.RolloutAdapter`], *optional*):
            Adapter of the sparse rollouts; dense ones go without. Assign one to use it from the next rollout on.
    """

    def __init__(
        self,
        *args,
        schedule: SparsityScheduleConfig,
        block_size: int | None = None,
        engine_kwargs: dict | None = None,
        probe_top_k: int = 20,
        weight_sync_check_interval: int = 3,
        engine: RolloutLLM | None = None,
        **kwargs,
    ):
        check_engine_arguments(schedule, block_size, engine_kwargs)
        self._initial_schedule = schedule
        self._block_size = block_size
        self._engine_kwargs = dict(engine_kwargs or {})
        self._probe_top_k = probe_top_k
        self._engine = engine
        self.weight_sync_check_interval = weight_sync_check_interval
        self.probe_rows = None
        self.probes = []
        self.num_syncs = 0
        self._weights_unchecked = False
        # Adapter of the sparse rollouts, and the one that the engine's weights have.
        self.adapter = None
        self._sent_adapter = None
        super().__init__(*args, **kwargs)

    @property
    def schedule(self) -> SparsityScheduleConfig:
        """[`SparsityScheduleConfig`]: The schedule in use."""
        return self.state.schedule

    @property
    def num_sharing(self) -> int:
        """`int`: Processes whose prompts are in one batch of the engine."""
        return self.tensor_parallel_size

    @property
    def max_context_tokens(self) -> int:
        """`int`: Longest context that the engine takes, in tokens."""
        return self.llm.model_config.max_model_len

    def set_schedule(self, schedule: SparsityScheduleConfig) -> None:
        """Use `schedule` from the next `generate` on."""
        check_layers(schedule, self.model.config.num_hidden_layers)
        self.state.set_schedule(schedule)
        self._reset_prefix_cache()  # cached keys of generated tokens depend on the schedule they were made with

    def _reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    @property
    def _wanted_adapter(self) -> "RolloutAdapter | None":
        """Adapter that the engine's weights must have for the next rollouts."""
        return None if self.state.dense else self.adapter

    @contextmanager
    def dense_rollouts(self):
        """Context in which `generate` attends densely in every layer, with the policy's weights alone."""
        outer = self.state.dense
        self.state.dense = True
        self._reset_prefix_cache()
        try:
            yield
        finally:
            self.state.dense = outer
            self._reset_prefix_cache()

    @property
    def engine_dtype(self) -> torch.dtype:
        """`torch.dtype`: What the policy computes in: autocast's dtype, or that of its weights."""
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}
        sizes = Counter()
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                sizes[parameter.dtype] += parameter.numel()
        # Adapters may be in float32, and so may a language-model head with the embedding that it is tied to.
        return autocast.get(self.accelerator.mixed_precision, max(sizes, key=sizes.get))

    def _check_policy(self) -> None:
        """Refuse a policy whose rollouts cannot be sparse, or whose weights cannot be sent."""
        check_policy(self.model)
        check_layers(self._initial_schedule, self.model.config.num_hidden_layers)
        if is_peft_model(self.model) and self._dist.is_fsdp:
            raise ValueError(
                "A PEFT policy under FSDP is not supported: adapters are merged into copies of whole weights, which "
                "FSDP shards. Use DDP, or fine-tune all weights."
            )

    def _init_vllm(self):
        self._check_policy()
        dtype = self.engine_dtype
        if not current_platform.is_cpu() and dtype == torch.float32:
            raise ValueError(
                "The policy computes in float32, for which vLLM's GPU attention has no kernel. Load it in bfloat16 "
                "(model_init_kwargs={'dtype': 'bfloat16'}) or train with bf16=True."
            )
        register()
        from . import vllm_backend

        engine_kwargs = {
            "additional_config": {vllm_backend.ADDITIONAL_CONFIG_KEY: self._initial_schedule.to_dict()},
            "dtype": str(dtype).removeprefix("torch."),
            "max_logprobs": max(20, self._probe_top_k),
            **self._engine_kwargs,
        }
        if self._block_size is not None:
            engine_kwargs["block_size"] = self._block_size
        if not current_platform.is_cpu():
            engine_kwargs["attention_backend"] = "CUSTOM"
        # TRL's arguments are literals; those given here win.
        with swapped(vllm_generation, "LLM", lambda **kwargs: self._make_engine({**kwargs, **engine_kwargs})):
            super()._init_vllm()
        (self.state,) = self.llm.collective_rpc(vllm_backend.attach_sparse_rollout)
        if self._engine is not None:
            self.set_schedule(self._initial_schedule)
        self.llm.probe_top_k = min(self._probe_top_k, self.llm.model_config.get_vocab_size())
        self.llm.before_generate = self._check_weights_if_due
        self.llm.probe_rows = RolloutLLM.probe_rows  # a running engine has those of the trainer before

    def _make_engine(self, arguments: dict) -> RolloutLLM:
        if self._engine is None:
            engine = RolloutLLM(**arguments)
            engine.arguments = arguments
            return engine
        if self.enable_sleep_mode:
            raise ValueError("An engine in sleep mode cannot go on for another trainer. Leave `engine` unset.")
        theirs = self._engine.arguments
        # A running engine takes another schedule, and the model's weights with the first synchronisation.
        names = sorted({*arguments, *theirs} - {"additional_config", "model"})
        differing = [name for name in names if arguments.get(name) != theirs.get(name)]
        if differing:
            pairs = ", ".join(f"{name} {theirs.get(name)!r} and not {arguments.get(name)!r}" for name in differing)
            raise ValueError(f"The given engine has {pairs}. Use the same settings, or start another engine.")
        return self._engine

    def generate(self, prompts, images, num_generations, profiler=None):
        """
        Generate completions, and probe those that `probe_rows` chooses.

        Args:
            prompts (`list[list[int]]`): Token ids of each prompt.
            images (`None`): Not supported.
            num_generations (`int`): Generations per prompt; `prompts` already holds each prompt that many times.
            profiler (context manager, *optional*): TRL's profiling context.

        Returns:
            `tuple`: TRL's `(prompt_ids, completion_ids, logprobs, logprob_token_ids)`.
        """
        if images is not None:
            raise ValueError("Sparse rollouts do not support images in the prompts.")
        if self._sent_adapter is not self._wanted_adapter:
            self.sync_weights()
        self._prepare_batch(prompts)
        # A prompt that continues an earlier completion would find the keys of sparse tokens, and prompts are dense.
        self._reset_prefix_cache()
        before = self.state.counters
        prompt_ids, completion_ids, logprobs, token_ids = super().generate(
            prompts, images, num_generations, profiler=profiler
        )
        self.probes = self._local_probes(len(prompts))
        self.counters = self.state.counters.since(before)
        # TRL reads each completion's last token. An empty one gets the end-of-sequence token, with a log-prob that TRL
        # treats as unknown.
        for ids, seq_logprobs, seq_token_ids in zip(completion_ids, logprobs, token_ids, strict=True):
            if not ids:
                ids.append(self.processing_class.eos_token_id)
                seq_logprobs.append([None])
                seq_token_ids.append(ids[:])
        return prompt_ids, completion_ids, logprobs, token_ids

    def _prepare_batch(self, prompts: list[list[int]]) -> None:
        """Tell the engine what to probe of the batch that comes next."""
        self.llm.probe_rows = self.probe_rows or RolloutLLM.probe_rows

    def _local_probes(self, num_rows: int) -> list[RolloutProbe]:
        """Probes of this process's rows of the last batch, of which it has `num_rows`."""
        offset = 0
        if self.tensor_parallel_size > 1:  # the engine saw the prompts of the whole group
            offset = torch.distributed.get_rank(group=self.tp_group) * num_rows
        local = range(offset, offset + num_rows)
        return [replace(probe, row=row - offset) for row, probe in self.llm.probes.items() if row in local]

    def _iter_named_params(self):
        """The policy's parameters, adapters merged in float32 copies so that no weight of it is ever rounded."""
        if not is_peft_model(self.model):
            adapter = self._wanted_adapter
            for name, param in super()._iter_named_params():
                yield name, param if adapter is None else adapter.merged(name, param)
            return
        from peft.tuners.tuners_utils import BaseTunerLayer

        tuner_layers = {
            self._fix_param_name_to_vllm(name.removeprefix("base_model.model.")): module
            for name, module in self.model.named_modules()
            if isinstance(module, BaseTunerLayer)
        }
        with (
            swapped(self.model, "merge_adapter", lambda: None),
            swapped(self.model, "unmerge_adapter", lambda: None),
        ):
            for name, param in super()._iter_named_params():
                layer = tuner_layers.get(name.rpartition(".")[0])
                if layer is not None and not layer.disable_adapters:
                    merged = copy.deepcopy(layer).float()
                    merged.merge()
                    param = merged.get_base_layer().get_parameter(name.rpartition(".")[2]).data.to(param.dtype)
                yield name, param

    def sync_weights(self):
        """Send the policy's weights to the engine."""
        self._send_weights()
        self.num_syncs += 1
        self._weights_unchecked = True
        self._sent_adapter = self._wanted_adapter

    def _send_weights(self) -> None:
        if current_platform.is_cpu():
            from . import vllm_backend

            self.llm.collective_rpc(vllm_backend.reload_packed_weights, args=(self._iter_named_params(),))
            self.llm.reset_prefix_cache()
        else:
            super().sync_weights()

    def _check_weights_if_due(self, prompts: list[list[int]]) -> None:
        interval = self.weight_sync_check_interval
        due = interval and (self.num_syncs <= 3 or self.num_syncs % interval == 0)
        if self._weights_unchecked and due:
            self.check_weights(prompts)
        self._weights_unchecked = False

    @torch.no_grad()
    def check_weights(self, prompts: list[list[int]]) -> float:
        """
        Compare the engine's log-probs with the policy's on prompt tokens, which both attend to densely.

        Args:
            prompts (`list[list[int]]`): Token ids of prompts; the first two are used, up to 128 tokens of each.

        Returns:
            `float`: Mean absolute difference of the log-probs.

        Raises:
            RuntimeError: If the difference says that the engine's weights are not the policy's.
        """
        prompts = checked_prompts(prompts)
        if not prompts:
            return 0.0
        outputs = self._prompt_logprobs(prompts)
        differences = []
        # Dropout must be off, and a policy may keep some of its modules in evaluation mode.
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            for ids, logprobs in zip(prompts, outputs, strict=True):
                input_ids = torch.tensor([ids], device=self.accelerator.device)
                # Prompts are dense on both sides, but the engine has the adapter in its weights.
                adapter = nullcontext() if self._sent_adapter is None else self._sent_adapter.active()
                with self.accelerator.autocast(), adapter:
                    logits = self.model(input_ids=input_ids, use_cache=False).logits[0, :-1]
                policy = logits.float().log_softmax(-1).gather(-1, input_ids[0, 1:, None]).squeeze(-1)
                engine = torch.tensor(logprobs, device=policy.device)
                differences.append((engine - policy).abs())
        finally:
            for module in training:
                module.training = True
        difference = torch.cat(differences).mean().item()
        tolerance = WEIGHT_SYNC_TOLERANCE[self.engine_dtype]
        if not difference <= tolerance:
            raise RuntimeError(
                f"After weight synchronisation {self.num_syncs} the engine's log-probs differ from the policy's by "
                f"{difference:.2g} on average over {sum(map(len, differences))} prompt tokens (at most {tolerance} in "
                f"{self.engine_dtype}). The rollouts would come from other weights than those being trained, so "
                "training stops here. Check that the engine's model is the policy's and that no other code writes the "
                "engine's weights."
            )
        return difference

    def _prompt_logprobs(self, prompts: list[list[int]]) -> list[list[float]]:
        """Log-probs of each prompt's tokens after the first, under the engine's weights."""
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, flat_logprobs=True)
        outputs = LLM.generate(self.llm, [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [output.prompt_logprobs.logprobs for output in outputs]
