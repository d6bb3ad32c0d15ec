"""Configuration of [`SparseRolloutGRPOTrainer`]: TRL's [`~trl.GRPOConfig`] and what sparse rollouts add to it."""

from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real

from .number_checks import check_numbers
from .versions import check_version


check_version("trl")

from trl import GRPOConfig  # noqa: E402


# These change the sampler's distribution q after the model, but not the policy's p, so acceptance rates and importance
# ratios would measure the sampling rule instead of the attention.
_NEUTRAL_SAMPLING = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0,),
    "logit_bias": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "trace_decode_token_ids": (None,),
}

# Set by the trainer for every request.
_RESERVED_SAMPLING = (
    "n",
    "temperature",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "flat_logprobs",
    "max_tokens",
)


@dataclass
class SparseRolloutGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`SparseRolloutGRPOTrainer`].

    It has all the arguments of [`~trl.GRPOConfig`], of which `use_vllm` defaults to `True` here and
    `vllm_importance_sampling_mode` to `"token_truncate"`, and the following ones.

    Parameters:
        > Parameters that control the sparse rollouts

        sparsity_schedule (`str`, *optional*):
            Sparsity schedule of the rollouts: the name of a published preset, a local path or a Hub id, or `auto` to
            find one during the first steps. The trainer's `schedule` argument takes an object instead.
        dense_evaluation (`bool`, *optional*, defaults to `True`):
            Whether `evaluate()` samples with dense attention. If `False`, it samples like the rollouts.
        vllm_block_size (`int`, *optional*):
            Tokens in a block of vLLM's KV cache, a multiple of the schedule's page size. vLLM chooses if unset.
        vllm_engine_kwargs (`dict` or `str`, *optional*):
            Further keyword arguments of the `vllm.LLM` that generates the rollouts, in colocate mode.

        > Parameters that control the acceptance measurement

        acceptance_probe_fraction (`float`, *optional*, defaults to `0.125`):
            Share of the sequences of a generation batch whose acceptance rate is measured. `0` turns it off.
        acceptance_probe_interval (`int`, *optional*, defaults to `1`):
            Measure at every this many generation batches.
        acceptance_top_k (`int`, *optional*, defaults to `20`):
            Most likely tokens of the sampler whose probabilities are compared at each position. The rest of the
            vocabulary is bounded.
        acceptance_min_tokens (`int`, *optional*, defaults to `200`):
            Tokens a bin of cached length needs before its tail counts in `acceptance/tail`.

        > Parameters that control the weight synchronisation check

        weight_sync_check_interval (`int`, *optional*, defaults to `3`):
            After each of the first three weight synchronisations and then at every this many, the engine's log-probs
            are compared with the policy's on a few prompts, and training stops if they part. `0` turns it off.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["vllm_engine_kwargs"]

    # Parameters whose default values are overridden from GRPOConfig
    use_vllm: bool = field(
        default=True, metadata={"help": "Whether to use vLLM. Sparse rollouts need it, so it must stay `True`."}
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={
            "help": "Importance sampling correction of the rollouts: `token_truncate` or `token_mask`. The sequence "
            "modes of TRL drive the weight of long sparse rollouts to zero and are refused."
        },
    )

    # Parameters that control the sparse rollouts
    sparsity_schedule: str | None = field(
        default=None,
        metadata={
            "help": "Sparsity schedule of the rollouts: the name of a published preset, a local path or a Hub id, or "
            "`auto` to find one during the first steps. The trainer's `schedule` argument takes an object instead."
        },
    )
    dense_evaluation: bool = field(
        default=True,
        metadata={
            "help": "Whether `evaluate()` samples with dense attention. If `False`, it samples like the rollouts."
        },
    )
    vllm_block_size: int | None = field(
        default=None,
        metadata={
            "help": "Tokens in a block of vLLM's KV cache, a multiple of the schedule's page size. vLLM chooses if "
            "unset."
        },
    )
    vllm_engine_kwargs: dict | str | None = field(
        default=None,
        metadata={
            "help": "Further keyword arguments of the `vllm.LLM` that generates the rollouts, in colocate mode."
        },
    )

    # Parameters that control the acceptance measurement
    acceptance_probe_fraction: float = field(
        default=0.125,
        metadata={
            "help": "Share of the sequences of a generation batch whose acceptance rate is measured. `0` turns it off."
        },
    )
    acceptance_probe_interval: int = field(
        default=1, metadata={"help": "Measure at every this many generation batches."}
    )
    acceptance_top_k: int = field(
        default=20,
        metadata={
            "help": "Most likely tokens of the sampler whose probabilities are compared at each position. The rest of "
            "the vocabulary is bounded."
        },
    )
    acceptance_min_tokens: int = field(
        default=200,
        metadata={"help": "Tokens a bin of cached length needs before its tail counts in `acceptance/tail`."},
    )

    # Parameters that control the weight synchronisation check
    weight_sync_check_interval: int = field(
        default=3,
        metadata={
            "help": "After each of the first three weight synchronisations and then at every this many, the engine's "
            "log-probs are compared with the policy's on a few prompts, and training stops if they part. `0` turns it "
            "off."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.use_vllm:
            raise ValueError(
                "use_vllm=False: sparse rollouts are generated by vLLM. Leave use_vllm at True, or use TRL's "
                "GRPOTrainer for dense rollouts with transformers."
            )
        if self.vllm_mode == "server":
            self._check_server_mode()
        if self.vllm_model_impl != "vllm":
            raise ValueError(
                f"vllm_model_impl={self.vllm_model_impl!r}: sparse attention needs vLLM's own model implementations. "
                "Set vllm_model_impl='vllm'."
            )
        if self.vllm_importance_sampling_correction and self.vllm_importance_sampling_mode not in (
            "token_truncate",
            "token_mask",
        ):
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r}: a sequence's ratio is the "
                "product of its tokens' ratios, which goes to zero on long sparse rollouts and silences them. Use "
                "'token_truncate' or 'token_mask'."
            )
        if (self.model_init_kwargs or {}).get("quantization_config") is not None:
            raise ValueError(
                "model_init_kwargs['quantization_config'] quantises the policy, but acceptance rates and importance "
                "ratios need the engine and the policy to hold the same weights. Remove it."
            )
        if not isinstance(self.vllm_engine_kwargs, (dict, type(None))):
            raise ValueError(
                f"vllm_engine_kwargs must be a dict, or a string with a JSON object, but it is "
                f"{self.vllm_engine_kwargs!r}."
            )
        self._check_sampling()
        check_numbers(
            self,
            (
                ("vllm_block_size", Integral, 1, inf),
                ("acceptance_probe_fraction", Real, 0, 1),
                ("acceptance_probe_interval", Integral, 1, inf),
                ("acceptance_top_k", Integral, 1, inf),
                ("acceptance_min_tokens", Integral, 1, inf),
                ("weight_sync_check_interval", Integral, 0, inf),
            ),
            optional=("vllm_block_size",),
        )

    def _check_server_mode(self):
        options = (
            ("vllm_engine_kwargs", None, "its own options"),
            ("vllm_block_size", None, "--block-size"),
            ("vllm_tensor_parallel_size", 1, "--tensor-parallel-size"),
            ("vllm_max_model_length", None, "--max-model-len"),
            ("vllm_enable_sleep_mode", False, "a GPU of its own"),
        )
        for name, unset, option in options:
            value = getattr(self, name)
            if value != unset:
                raise ValueError(
                    f"{name}={value!r} is of the engine in the trainer's processes, and with vllm_mode='server' there "
                    f"is none. Remove it, and start the server with {option}."
                )

    def _check_sampling(self):
        # Lower positive temperatures would be raised to 0.01 by vLLM, for the sampler alone.
        if not 0.01 <= self.temperature <= 2:
            raise ValueError(
                f"temperature={self.temperature} must be between 0.01 and 2, the range in which vLLM samples at the "
                "temperature that the policy's logits are divided by."
            )
        generation_kwargs = self.generation_kwargs or {}
        for name in _RESERVED_SAMPLING:
            if name in generation_kwargs:
                raise ValueError(
                    f"generation_kwargs[{name!r}] is set by the trainer. Remove it"
                    + (" and use the `temperature` argument." if name == "temperature" else ".")
                )
        if generation_kwargs.get("seed") is not None:
            raise ValueError(
                f"generation_kwargs['seed']={generation_kwargs['seed']!r} would give every generation of a prompt the "
                "same tokens, and so all of them an advantage of zero. Remove it and use the `seed` argument."
            )
        for name, neutral in _NEUTRAL_SAMPLING.items():
            value = generation_kwargs.get(name, getattr(self, name, neutral[0]))
            if value not in neutral:
                raise ValueError(
                    f"{name}={value!r} changes the sampler's distribution but not the policy's, so acceptance rates "
                    f"and importance ratios would be biased. Leave {name} at {neutral[0]!r}; use `temperature` to "
                    "sharpen both."
                )
        if self.vllm_structured_outputs_regex is not None:
            raise ValueError(
                "vllm_structured_outputs_regex restricts the sampler's distribution but not the policy's, so "
                "acceptance rates and importance ratios would be biased. Remove it and check the format in the reward."
            )
