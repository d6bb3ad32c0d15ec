"""What the tests train on, and a trainer that keeps each rollout beside distributions computed independently."""

from dataclasses import dataclass, field, replace

import torch
from datasets import Dataset
from tiny_models import tiny_tokenizer

from sparrow_trl import SparseRolloutGRPOConfig, SparseRolloutGRPOTrainer, SparsityScheduleConfig
from sparrow_trl.attention import sparse_attention_context
from sparrow_trl.rollout import RolloutProbe, swapped
from sparrow_trl.vllm_backend import DecodeCounters


def make_dataset(num_rows, seed=0):
    """Random prompts of 60 to 200 characters."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(60, 200, (num_rows,), generator=generator)
    tokenizer = tiny_tokenizer()
    prompts = [tokenizer.decode(torch.randint(2, 70, (length,), generator=generator)) for length in lengths]
    return Dataset.from_dict({"prompt": prompts})


def share_of_small_letters(completions, **kwargs):
    """A reward that a few steps can raise."""
    return [sum(character.islower() for character in completion) / 40 for completion in completions]


def make_config(output_dir, **kwargs):
    """Configuration of a run on the CPU with two prompts in a generation batch."""
    return SparseRolloutGRPOConfig(
        str(output_dir),
        **{
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "disable_tqdm": True,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "max_completion_length": 40,
            "vllm_max_model_length": 256,
            "vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_memory_bytes": 2**26},
            "weight_sync_check_interval": 1,
            "num_generations": 4,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "gradient_checkpointing": False,
            "acceptance_probe_fraction": 0.5,
            "acceptance_min_tokens": 30,
            "vllm_block_size": 32,
            **kwargs,
        },
    )


@dataclass
class Rollout:
    """One call of the engine and what the trainer made of it.

    Args:
        mode (`str`): `"train"` or `"eval"`.
        step (`int`): Optimizer steps taken before.
        schedule ([`SparsityScheduleConfig`]): Schedule in use.
        prompts (`list[list[int]]`): Token ids of each row's prompt.
        completions (`list[list[int]]`): Token ids of each row's completion.
        logprobs (`list[list[float]]`): The engine's log-probs of the completions.
        probes (`list[RolloutProbe]`): Probed rows.
        counters ([`DecodeCounters`]): Pages read.
        batch (`dict[str, torch.Tensor]`): What the loss is computed from.
        metrics (`dict[str, float]`): Metrics logged for this rollout.
        bounds (`list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]`):
            Lower and upper acceptance bounds and cached lengths of each probed row.
        dense (`list[torch.Tensor]`): Dense policy's log-probs of each row, `[completion_length, vocab]`.
        sparse (`list[torch.Tensor]`): The same under the training-side sparse attention.
    """

    mode: str
    step: int
    schedule: SparsityScheduleConfig
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    probes: list[RolloutProbe] = field(default_factory=list)
    counters: DecodeCounters | None = None
    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    bounds: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    dense: list[torch.Tensor] = field(default_factory=list)
    sparse: list[torch.Tensor] = field(default_factory=list)


class RecordingTrainer(SparseRolloutGRPOTrainer):
    """
    Keeps every rollout.

    Attributes:
        rollouts (`list[Rollout]`): Rollouts so far, of training and evaluation.
    """

    def __init__(self, *args, **kwargs):
        self.rollouts = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        before = replace(self.vllm_generation.state.counters)
        completions, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        rollout = self.rollouts[-1]
        rollout.prompts, rollout.completions, rollout.logprobs = prompt_ids, completions, logprobs
        rollout.counters = self.vllm_generation.state.counters.since(before)
        rollout.probes = list(self.vllm_generation.probes)
        return completions, logprobs

    def _generate_and_score_completions(self, inputs):
        mode = "train" if self.model.training else "eval"
        rollout = Rollout(mode, self.state.global_step, self.schedule)
        self.rollouts.append(rollout)
        known = {name: len(values) for name, values in self._metrics[mode].items()}
        update = self.acceptance.update

        def record_bounds(*bounds):
            rollout.bounds.append(bounds)
            update(*bounds)

        with swapped(self.acceptance, "update", record_bounds):
            rollout.batch = super()._generate_and_score_completions(inputs)
        rollout.metrics = {
            name: values[-1] for name, values in self._metrics[mode].items() if len(values) > known.get(name, 0)
        }
        for schedule, logprobs in (
            (SparsityScheduleConfig.dense(), rollout.dense),
            (rollout.schedule, rollout.sparse),
        ):
            logprobs.extend(self._distributions(rollout, schedule))
        return rollout.batch

    @torch.no_grad()
    def _distributions(self, rollout, schedule):
        """Log-probs after temperature of each row on its own, without padding."""
        training = self.model.training
        self.model.eval()
        for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True):
            input_ids = torch.tensor([prompt + list(completion)], device=self.model.device)
            with (
                self.accelerator.autocast(),
                sparse_attention_context(self.model, schedule, prompt_width=len(prompt)),
            ):
                logits = self.model(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            yield (logits.float() / self.temperature).log_softmax(-1).cpu()
        self.model.train(training)
