"""
Block-sparse attention inside a transformers model: what the sparse rollouts attended to, for the model being trained.

The attention is registered with transformers under the name [`SPARSE_ATTENTION`], and [`sparse_attention_context`]
switches a model to it. What a forward pass needs to know travels as a keyword argument from the backbone down to every
attention layer, so that it is still there when gradient checkpointing runs a layer again.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sparrow_attention import sparse_attention


if TYPE_CHECKING:
    from .schedule import SparsityScheduleConfig


SPARSE_ATTENTION = "sparrow_sparse"

# What a model may ask of an attention function beyond causal attention, with the name users know it by.
UNSUPPORTED_OPTIONS = {
    "sliding_window": "a sliding window",
    "softcap": "capped attention logits",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "cu_seq_lens_q": "packed sequences",
}


@dataclass
class SparseForward:
    """One forward pass under sparse attention: the schedule, the real tokens of each row, and the layers that ran."""

    schedule: "SparsityScheduleConfig"
    prompt_lengths: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    layers: set[int] = field(default_factory=set)


@contextmanager
def sparse_attention_context(
    model: nn.Module,
    schedule: "SparsityScheduleConfig",
    *,
    prompt_lengths: torch.Tensor | None = None,
    prompt_width: int | None = None,
    attention_mask: torch.Tensor | None = None,
) -> Iterator[None]:
    """
    Makes a model attend as sparse rollouts did, and back again on leaving.

    In its forward passes, a token at a position below its row's prompt length, and every token in the schedule's dense
    layers, attends to all tokens before it; all others attend to the pages that the schedule keeps for them (section
    3.1 of the [Sparrow paper](https://huggingface.co/papers/2606.08446)). Padding may be on either side. The forward
    passes must see whole sequences, without a filled KV cache. Backward passes may run after the context is left,
    with transformers' gradient checkpointing too; with other ways of recomputing they must run inside.

    Args:
        model (`torch.nn.Module`):
            A transformers model that uses the attention interface, bare or wrapped (PEFT, DDP).
        schedule ([`SparsityScheduleConfig`]):
            Pages to keep at each cached length.
        prompt_lengths (`torch.Tensor` of shape `[batch]`, *optional*):
            Number of prompt tokens in each row, padding not counted. Each forward pass must have this batch.
        prompt_width (`int`, *optional*):
            Number of leading columns that hold the prompts, padding included: prompts padded on the left to one
            width, with their completions after them. Suits forward passes over parts of a batch.
            Pass either this or `prompt_lengths`.
        attention_mask (`torch.Tensor` of shape `[batch, tokens]`, *optional*):
            1 for real tokens and 0 for padding, where forward passes are made without an attention mask.

    Raises:
        ValueError: for a model without the attention interface, with sliding windows, attention sinks or capped
            logits (from its forward pass), for masks with holes, packed sequences, a filled KV cache, attention
            dropout, and a batch that `prompt_lengths` does not fit.

    Example:

    ```python
    >>> with sparse_attention_context(model, schedule, prompt_width=prompt_ids.shape[1]):
    ...     logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
    ```
    """
    if (prompt_lengths is None) == (prompt_width is None):
        raise ValueError("Pass either `prompt_lengths` or `prompt_width`, to tell prompts from completions.")
    backbone = _backbone(model)

    def add_sparse_forward(module, args, kwargs):
        inputs = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        if attention_mask is not None and inputs.get("attention_mask") is None:
            inputs["attention_mask"] = kwargs["attention_mask"] = attention_mask
        starts, lengths = _real_tokens(inputs)
        if prompt_lengths is None:
            row_prompts = (prompt_width - starts).clamp(min=0)
        elif prompt_lengths.shape == starts.shape:
            row_prompts = prompt_lengths.to(starts)
        else:
            raise ValueError(
                f"`prompt_lengths` has shape {list(prompt_lengths.shape)}, but the batch has {len(starts)} rows."
            )
        if inputs.get("position_ids") is None:
            # The engine counts positions from the first real token. Attention alone would not tell, but landmarks are
            # rounded to their dtype after the rotary embedding.
            last = inputs["attention_mask"].shape[-1] if inputs.get("attention_mask") is not None else int(lengths[0])
            column = torch.arange(last, device=starts.device)
            kwargs["position_ids"] = (column - starts[:, None]).clamp(min=0)
        return args, {**kwargs, "sparse_forward": SparseForward(schedule, row_prompts, starts, lengths)}

    def check_layers(module, args, kwargs, output):
        if not kwargs["sparse_forward"].layers:
            raise ValueError(
                f"{type(module).__name__} ran without sparse attention: none of its layers called the attention "
                "interface of transformers, or none passed its keyword arguments on."
            )

    # Gradient checkpointing looks the attention up again in the backward pass, when the model may be switched back.
    checkpointing = {
        module: module._gradient_checkpointing_func
        for module in backbone.modules()
        if hasattr(module, "_gradient_checkpointing_func")
    }
    hooks = [
        backbone.register_forward_pre_hook(add_sparse_forward, with_kwargs=True),
        backbone.register_forward_hook(check_layers, with_kwargs=True),
    ]
    try:
        for module, checkpoint in checkpointing.items():
            module._gradient_checkpointing_func = functools.partial(_checkpoint_sparse, checkpoint, backbone)
        with _sparse_implementation(backbone):
            yield
    finally:
        for module, checkpoint in checkpointing.items():
            module._gradient_checkpointing_func = checkpoint
        for hook in hooks:
            hook.remove()


def sparse_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sparse_forward: SparseForward | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    The attention function behind [`SPARSE_ATTENTION`]: `query [batch, q_heads, tokens, head_dim]`, `key` and `value`
    `[batch, kv_heads, tokens, head_dim]` to `[batch, tokens, q_heads, head_dim]`.
    """
    if sparse_forward is None:
        raise ValueError(f'The attention "{SPARSE_ATTENTION}" works inside `sparse_attention_context` alone.')
    for option, name in UNSUPPORTED_OPTIONS.items():
        if kwargs.get(option) is not None:
            raise ValueError(f"Sparse attention does not support {name}, which layer {module.layer_idx} asks for.")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"Sparse attention sees whole sequences, got {query.shape[2]} queries for {key.shape[2]} cached keys. Run "
            "the model without a filled KV cache."
        )
    schedule = sparse_forward.schedule
    sparse_forward.layers.add(module.layer_idx)
    if schedule.is_dense_layer(module.layer_idx):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    if dropout:
        raise ValueError(f"Sparse attention does not support attention dropout, got {dropout}.")
    output = sparse_attention(
        query,
        key,
        value,
        prompt_lengths=sparse_forward.prompt_lengths,
        top_k_table=schedule.to_table(query.shape[2], layer=module.layer_idx, device=query.device),
        starts=sparse_forward.starts,
        lengths=sparse_forward.lengths,
        scale=scaling,
        landmark_dtype=schedule.storage_dtype(key.dtype),
        **schedule.recipe,
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(SPARSE_ATTENTION, sparse_attention_forward)
# Without a mask function of its own an attention gets no mask at all, and dense layers would attend to padding.
AttentionMaskInterface.register(SPARSE_ATTENTION, sdpa_mask)


def _backbone(model: nn.Module) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module.base_model
    raise ValueError(f"Sparse attention needs a transformers model, got {type(model).__name__}.")


@contextmanager
def _sparse_implementation(backbone: PreTrainedModel) -> Iterator[None]:
    config = backbone.config
    implementation = config._attn_implementation
    config._attn_implementation = SPARSE_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = implementation


def _checkpoint_sparse(checkpoint: Callable, backbone: PreTrainedModel, function: Callable, *args):
    def run_sparse(*args):
        with _sparse_implementation(backbone):
            return function(*args)

    return checkpoint(run_sparse, *args)


def _real_tokens(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """First real token and number of real tokens of each row, from the arguments of a backbone's forward pass."""
    tokens = inputs.get("input_ids")
    if tokens is None:
        tokens = inputs["inputs_embeds"]
    batch, length = tokens.shape[:2]
    mask = inputs.get("attention_mask")
    if mask is None:
        positions = inputs.get("position_ids")
        if positions is not None and (positions.diff(dim=-1) != 1).any():
            raise ValueError("Sparse attention does not support packed sequences: pad them and pass `attention_mask`.")
        mask = torch.ones((batch, length), device=tokens.device)
    if not isinstance(mask, torch.Tensor) or mask.shape != (batch, length):
        raise ValueError(
            f"Sparse attention needs an attention mask of shape [batch, tokens] = {[batch, length]}, got "
            f"{list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__}."
        )
    mask = mask.to(tokens.device).bool()
    lengths = mask.sum(-1)
    starts = mask.int().argmax(-1)
    column = torch.arange(length, device=tokens.device)
    if (mask != ((column >= starts[:, None]) & (column < (starts + lengths)[:, None]))).any():
        raise ValueError("Sparse attention needs the real tokens of each row side by side; the mask has holes.")
    return starts, lengths
