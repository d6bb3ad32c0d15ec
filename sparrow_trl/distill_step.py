"""
One DistillSparse step: the adapter learns to make sparse attention behave like the dense model (Algorithm 1, lines 7
and 8 of the [Sparrow paper](https://huggingface.co/papers/2606.08446)).

The student is the model with the adapter under sparse attention, the teacher the same model without either. Both run
over given trajectories; only the adapter has gradients. Logits never exist in full: TRL's chunked kernels project
hidden states tile by tile.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer

from .acceptance_sweep import TokenSequence, evaluating
from .attention import sparse_attention_context
from .rollout_adapter import RolloutAdapter
from .schedule import SparsityScheduleConfig
from .versions import check_version


check_version("trl")

from trl.kernels import ChunkedLogProbFunction  # noqa: E402
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction  # noqa: E402


if TYPE_CHECKING:
    from .distill import DistillSparseConfig


logger = logging.getLogger(__name__)

# TRL's kernel mixes the two distributions by this share of the teacher's; its ends are the two directions of KL.
DIVERGENCES = {"forward_kl": 0.0, "jensen_shannon": 0.5, "reverse_kl": 1.0}
SAMPLED_DIVERGENCE = "k3"

VOCAB_CHUNK_SIZE = 32768

# As between two ways to round one logit; a head that scales or caps its logits is further off.
HEAD_TOLERANCE = 5e-2


@dataclass
class Trajectories:
    """
    Rows of tokens to distil on. Prompts are padded on the left to one width, completions on the right.

    Args:
        input_ids (`torch.Tensor` of shape `[rows, tokens]`):
            Prompts and completions.
        attention_mask (`torch.Tensor` of shape `[rows, tokens]`):
            0 for padding.
        completion_mask (`torch.Tensor` of shape `[rows, completion]`):
            1 for the tokens that count, of the last `completion` columns.
        advantages (`torch.Tensor` of shape `[rows]`, *optional*):
            Advantages, without which there is no policy loss.
        sampler_logprobs (`torch.Tensor` of shape `[rows, completion]`, *optional*):
            Log-probs of the tokens under the rollouts' sampler, NaN where unknown; by default the student's own.
        teacher_logprobs (`torch.Tensor` of shape `[rows, completion]`, *optional*):
            Log-probs of the tokens under the teacher, for the divergence `"k3"`; by default from a dense pass.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    completion_mask: torch.Tensor
    advantages: torch.Tensor | None = None
    sampler_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None

    @classmethod
    def from_inputs(cls, inputs: dict[str, Any], **values) -> "Trajectories":
        """What the policy learns from in one forward pass, from the `inputs` (`dict[str, Any]`) of TRL's loss."""
        mask = inputs["completion_mask"]
        return cls(
            input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            attention_mask=torch.cat([inputs["prompt_mask"], mask], dim=1),
            completion_mask=mask,
            **values,
        )

    def sequences(self) -> Iterator[TokenSequence]:
        """The rows without padding, but for those with fewer than two tokens in the completion."""
        width = self.input_ids.shape[1] - self.completion_mask.shape[1]
        for ids, mask in zip(self.input_ids, self.attention_mask.bool(), strict=True):
            prompt_length = int(mask[:width].sum())
            if prompt_length and int(mask.sum()) >= prompt_length + 2:
                yield TokenSequence(ids[mask].tolist(), prompt_length)

    def split(self, rows: int) -> Iterator["Trajectories"]:
        """Parts of at most so many `rows` (`int`)."""
        for start in range(0, len(self.input_ids), rows):
            values = (getattr(self, field.name) for field in fields(self))
            yield Trajectories(*(value if value is None else value[start : start + rows] for value in values))


class AdapterTrainer:
    """
    Trains a rollout adapter by an optimizer of its own.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model, unwrapped. It is left as it is: none of its weights gets a gradient.
        adapter ([`~sparrow_trl.rollout_adapter.RolloutAdapter`]):
            The adapter.
        config ([`~sparrow_trl.DistillSparseConfig`]):
            Losses and optimizer.
        num_steps (`int`):
            Steps that the learning rate's schedule spans.
        rows_per_pass (`int`, *optional*, defaults to `1`):
            Rows of a forward pass.
        temperature (`float`, *optional*, defaults to `1.0`):
            What logits are divided by, as in the rollouts.
        clip (`tuple[float, float]`, *optional*, defaults to `(0.2, 0.2)`):
            How far the policy loss lets the ratio to the sampler fall below and rise above 1.
        autocast (`Callable`, *optional*):
            Makes the context that forward passes run in.

    Raises:
        ValueError: for a model that makes logits otherwise than by its head's weights, and one in float16.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: RolloutAdapter,
        config: "DistillSparseConfig",
        *,
        num_steps: int,
        rows_per_pass: int = 1,
        temperature: float = 1.0,
        clip: tuple[float, float] = (0.2, 0.2),
        autocast=nullcontext,
    ):
        self.model = model
        self.adapter = adapter
        self.config = config
        self.rows_per_pass = rows_per_pass
        self.temperature = temperature
        self.clip = clip
        self._autocast = autocast
        if model.dtype == torch.float16:
            raise ValueError(
                "The model is in float16, in which the adapter's gradients would underflow. Load it in bfloat16 or "
                "float32."
            )
        self._check_head()
        self.optimizer = torch.optim.AdamW(
            adapter.parameters, lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.lr_scheduler = get_scheduler(
            config.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=max(num_steps, 1),
        )

    def step(self, trajectories: Iterable[Trajectories], schedule: SparsityScheduleConfig) -> dict[str, float]:
        """
        One update of the adapter.

        With `torch.distributed` initialized, every process must call this, each with its own trajectories; gradients
        are averaged over the tokens of all.

        Args:
            trajectories (`Iterable[Trajectories]`):
                What to learn from.
            schedule ([`SparsityScheduleConfig`]):
                Schedule of the student.

        Returns:
            `dict[str, float]`: per token the losses `kl` and `policy_loss`, their sum `loss`, the `grad_norm` before
            clipping, the `learning_rate` and the number of `tokens`, over all processes. Without tokens nothing is
            done, and only `tokens` is there.
        """
        parts = [part for batch in trajectories for part in batch.split(self.rows_per_pass)]
        parts = [part for part in parts if part.completion_mask.any()]
        device = self.adapter.parameters[0].device
        local = torch.tensor(float(sum(int(part.completion_mask.sum()) for part in parts)), device=device)
        tokens = _summed(local).item()
        if not tokens:
            return {"tokens": 0.0}
        self.optimizer.zero_grad()
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        with frozen(self.model), _student_mode(self.model):
            for part in parts:
                sums += self._backward(part, schedule, tokens)
        self._sum_gradients()
        # As in transformers, 0 is no limit.
        limit = self.config.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.parameters, limit).item()
        kl, policy_loss = (_summed(sums) / tokens).tolist()
        learning_rate = self.lr_scheduler.get_last_lr()[0]
        if math.isfinite(norm):
            self.optimizer.step()
        else:
            logger.warning("The gradient of the rollout adapter is not finite; this step of it is left out.")
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return {
            "loss": self.config.ppo_weight * policy_loss + self.config.kl_weight * kl,
            "kl": kl,
            "policy_loss": policy_loss,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "tokens": tokens,
        }

    def _sum_gradients(self) -> None:
        """Sum the adapter's gradients over the processes, of which some may have had no tokens."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        for parameter in self.adapter.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.adapter.parameters]
        flat = _summed(torch.cat([gradient.ravel() for gradient in gradients]))
        for gradient, value in zip(gradients, flat.split([x.numel() for x in gradients]), strict=True):
            gradient.copy_(value.view_as(gradient))

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer and of the learning rate's schedule."""
        return {"optimizer": self.optimizer.state_dict(), "lr_scheduler": self.lr_scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what [`state_dict`] returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def _backward(self, part: Trajectories, schedule: SparsityScheduleConfig, tokens: float) -> torch.Tensor:
        """Backward pass of one part; the sums of its divergence and of its policy loss."""
        config = self.config
        mask = part.completion_mask.bool()
        width = part.input_ids.shape[1] - mask.shape[1]
        targets = part.input_ids[:, width:][mask]
        head = self.model.get_output_embeddings()
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        sampled = config.divergence == SAMPLED_DIVERGENCE
        teacher_logprobs = teacher_states = None
        if sampled and part.teacher_logprobs is not None:
            teacher_logprobs = part.teacher_logprobs[mask]
        with self._autocast():
            if teacher_logprobs is None:
                with torch.no_grad():
                    teacher_states = self._hidden_states(part)[mask]
                    if sampled:
                        teacher_logprobs = self._logprobs(teacher_states, weight, bias, targets)
            # Gradient checkpointing runs layers again in the backward pass, which must then be inside, too.
            with (
                sparse_attention_context(self.model, schedule, prompt_width=width),
                self.adapter.active(dropout=True),
            ):
                states = self._hidden_states(part)[mask]
                logprobs = None
                if sampled or self._has_policy_loss(part):
                    logprobs = self._logprobs(states, weight, bias, targets)
                if sampled:
                    log_ratio = teacher_logprobs.float() - logprobs
                    kl = (log_ratio.exp() - 1 - log_ratio).sum()
                else:
                    divergence, _ = ChunkedDivergenceFunction.apply(
                        states, weight, bias, teacher_states, weight, bias, DIVERGENCES[config.divergence],
                        self.temperature,
                    )  # fmt: skip
                    kl = divergence.sum()
                policy_loss = kl.new_zeros(())
                if self._has_policy_loss(part):
                    policy_loss = self._policy_loss(part, mask, logprobs)
                loss = (config.kl_weight * kl + config.ppo_weight * policy_loss) / tokens
                loss.backward()
        return torch.stack([kl.detach(), policy_loss.detach()]).double()

    def _has_policy_loss(self, part: Trajectories) -> bool:
        return part.advantages is not None and self.config.ppo_weight != 0

    def _policy_loss(self, part: Trajectories, mask: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """PPO's clipped loss against the sampler, summed over tokens."""
        own = logprobs.detach()
        old = own if part.sampler_logprobs is None else part.sampler_logprobs[mask].float()
        ratio = (logprobs - torch.where(old.isnan(), own, old)).exp()
        advantages = part.advantages[:, None].expand_as(mask)[mask].float()
        low, high = self.clip
        return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages).sum()

    def _hidden_states(self, part: Trajectories) -> torch.Tensor:
        """Last hidden states `[rows, completion, hidden]` that predict the completions' tokens."""
        output = self.model.base_model(input_ids=part.input_ids, attention_mask=part.attention_mask, use_cache=False)
        return output.last_hidden_state[:, -part.completion_mask.shape[1] - 1 : -1]

    def _logprobs(self, states, weight, bias, targets) -> torch.Tensor:
        logprobs, *_ = ChunkedLogProbFunction.apply(
            states, weight, bias, targets, self.temperature, VOCAB_CHUNK_SIZE, None, 1.0, ()
        )
        return logprobs

    @torch.no_grad()
    def _check_head(self) -> None:
        tokens = torch.arange(3, device=self.model.device)[None]
        head = self.model.get_output_embeddings()
        with evaluating(self.model), self._autocast():
            states = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            own = self.model(input_ids=tokens, use_cache=False).logits
            logits = torch.nn.functional.linear(states, head.weight, head.bias)
        difference = (own.float().log_softmax(-1) - logits.float().log_softmax(-1)).abs().mean().item()
        if not difference <= HEAD_TOLERANCE:
            raise ValueError(
                f"{type(self.model).__name__} transforms the logits of its head (log-probs differ by {difference:.2g} "
                "on average), which DistillSparse does not support."
            )


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Context in which no weight of `model` ([`~transformers.PreTrainedModel`]) gets a gradient."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def _student_mode(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode, but for the layers themselves where they are checkpointed, which only happens in training."""
    with evaluating(model):
        checkpointed = [
            module
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
        ]
        for module in checkpointed:
            module.training = True
        try:
            yield
        finally:
            for module in checkpointed:
                module.training = False


def _summed(value: torch.Tensor) -> torch.Tensor:
    """Sum over the processes."""
    if dist.is_available() and dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
    return value
