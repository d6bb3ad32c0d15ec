"""
Block-sparse attention inside a transformers model: what the sparse rollouts attended to, for the model being trained.

Importing this module registers the attention with transformers under the name [`SPARSE_ATTENTION`]. A model that was
switched to it takes the schedule and the prompt lengths as keyword arguments of each forward pass:

```python
>>> import sparrow_trl.attention

>>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B", attn_implementation="sparrow_sparse")
>>> logits = model(input_ids, attention_mask=mask, sparsity_schedule=schedule, prompt_lengths=lengths).logits
```

Models with any other attention ignore these arguments without a word. [`sparse_attention_context`] switches a model to
this attention for a while, and counts positions from the first real token of left-padded rows, which a forward pass
with keyword arguments leaves to the caller's `position_ids`. Either way, what a forward pass needs to know travels as
keyword arguments down to every attention layer, so that it is still there when gradient checkpointing runs a layer
again.

Batches may be padded on either side, or packed: sequences one after the other in a single row without a mask, each
attending to itself alone, told apart by `position_ids` that restart at 0 (and `cu_seq_lens_q`, where given), as
padding-free collators make them. `prompt_lengths` then has an entry for each sequence.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from sparrow_attention import sparse_attention

from .schedule import SparsityScheduleConfig
from .sequence_layout import SequenceLayout


SPARSE_ATTENTION = "sparrow_sparse"

# What a model may ask of an attention function beyond causal attention, with the name users know it by.
UNSUPPORTED_OPTIONS = {
    "sliding_window": "a sliding window",
    "softcap": "capped attention logits",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


# Plain classes, since FSDP takes a module's dataclass arguments apart and copies them.
class SparseForward:
    """One forward pass under sparse attention: the schedule, where the sequences lie, their prompts' lengths, and the
    layers that ran."""

    def __init__(
        self,
        schedule: SparsityScheduleConfig,
        layout: SequenceLayout,
        prompt_lengths: torch.Tensor,
        cached_tokens: int = 0,
    ):
        if not isinstance(schedule, SparsityScheduleConfig):
            raise ValueError(
                f"`sparsity_schedule` must be a `SparsityScheduleConfig`, got {type(schedule).__name__}. "
                "`SparsityScheduleConfig.resolve` makes one from a preset's name or a file."
            )
        self.schedule = schedule
        self.layout = layout
        self.prompt_lengths = layout.check_prompt_lengths(prompt_lengths)
        self.cached_tokens = cached_tokens
        self.layers: set[int] = set()


class PaddingMask:
    """
    What attention layers get for a mask under [`SPARSE_ATTENTION`]: the 2-D mask of a forward pass, since one of
    `[tokens, tokens]` would outgrow everything else, and what its first layer made of its keyword arguments.
    """

    def __init__(self, attention_mask: torch.Tensor | None):
        self.attention_mask = attention_mask
        self._sources = self._forward = None

    def sparse_forward(
        self,
        schedule: SparsityScheduleConfig,
        prompt_lengths: torch.Tensor,
        query: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seq_lens: torch.Tensor | None,
    ) -> SparseForward:
        # By identity: a mask that was made once may serve several forward passes.
        sources = (schedule, prompt_lengths, position_ids, cu_seq_lens)
        if self._sources is None or any(new is not old for new, old in zip(sources, self._sources, strict=True)):
            layout = SequenceLayout(
                query.shape[0], query.shape[2], query.device, self.attention_mask, position_ids, cu_seq_lens
            )
            self._forward = SparseForward(schedule, layout, prompt_lengths)
            self._sources = sources
        return self._forward


@contextmanager
def sparse_attention_context(
    model: nn.Module,
    schedule: SparsityScheduleConfig,
    *,
    prompt_lengths: torch.Tensor | None = None,
    prompt_width: int | None = None,
    attention_mask: torch.Tensor | None = None,
    cached_tokens: int = 0,
) -> Iterator[None]:
    """
    Makes a model attend as sparse rollouts did, and back again on leaving.

    In its forward passes, a token at a position below its row's prompt length, and every token in the schedule's dense
    layers, attends to all tokens before it; all others attend to the pages that the schedule keeps for them (section
    3.1 of the [Sparrow paper](https://huggingface.co/papers/2606.08446)). Batches may be padded on either side, or
    hold packed sequences in one row. The forward passes must see whole sequences, but for `cached_tokens`. Backward
    passes may run after the context is left, with transformers' gradient checkpointing too; with other ways of
    recomputing they must run inside.

    Args:
        model (`torch.nn.Module`):
            A transformers model that uses the attention interface, bare or wrapped (PEFT, DDP).
        schedule ([`SparsityScheduleConfig`]):
            Pages to keep at each cached length.
        prompt_lengths (`torch.Tensor` of shape `[sequences]`, *optional*):
            Number of prompt tokens in each row, padding not counted, or in each packed sequence. Each forward pass
            must have this batch.
        prompt_width (`int`, *optional*):
            Number of leading columns that hold the prompts, padding included: prompts padded on the left to one
            width, with their completions after them. Suits forward passes over parts of a batch.
            Pass either this or `prompt_lengths`.
        attention_mask (`torch.Tensor` of shape `[batch, tokens]`, *optional*):
            1 for real tokens and 0 for padding, where forward passes are made without an attention mask.
        cached_tokens (`int`, *optional*, defaults to `0`):
            Tokens at the start of the only row, without padding, that are in the KV cache of the forward passes and
            not among their inputs.

    Raises:
        ValueError: for a model without the attention interface, with sliding windows, attention sinks or capped
            logits (from its forward pass), for masks with holes, positions that do not count each sequence's tokens
            from 0, packed sequences in several rows, a filled KV cache, attention dropout, and a batch that
            `prompt_lengths` does not fit, and for `cached_tokens` in a batch of several or padded rows.

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
        if kwargs.get("sparsity_schedule") is not None:
            raise ValueError("Pass the schedule either to `sparse_attention_context` or to the forward pass.")
        inputs = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        if attention_mask is not None and inputs.get("attention_mask") is None:
            inputs["attention_mask"] = kwargs["attention_mask"] = attention_mask
        tokens = inputs.get("input_ids")
        if tokens is None:
            tokens = inputs["inputs_embeds"]
        if cached_tokens:
            told = [name for name in ("attention_mask", "position_ids") if inputs.get(name) is not None]
            if tokens.shape[0] != 1 or told:
                raise ValueError(
                    f"`cached_tokens` is for a single row without padding, but the forward pass has "
                    f"{tokens.shape[0]} row(s){' with ' + ' and '.join(told) if told else ''}."
                )
            layout = SequenceLayout(1, cached_tokens + tokens.shape[1], tokens.device)
        else:
            layout = SequenceLayout(
                *tokens.shape[:2],
                tokens.device,
                inputs.get("attention_mask"),
                inputs.get("position_ids"),
                kwargs.get("cu_seq_lens_q"),
            )
        if inputs.get("position_ids") is None:
            # The engine counts positions from the first real token. Attention alone would not tell, but landmarks are
            # rounded to their dtype after the rotary embedding.
            kwargs["position_ids"] = layout.position_ids[:, cached_tokens:]
        row_prompts = prompt_lengths
        if prompt_width is not None:
            if layout.packed:
                raise ValueError("`prompt_width` is for padded rows: pass the `prompt_lengths` of packed sequences.")
            row_prompts = (prompt_width - layout.starts).clamp(min=0)
        return args, {**kwargs, "sparse_forward": SparseForward(schedule, layout, row_prompts, cached_tokens)}

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
    attention_mask: PaddingMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sparsity_schedule: SparsityScheduleConfig | None = None,
    prompt_lengths: torch.Tensor | None = None,
    sparse_forward: SparseForward | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    The attention function behind [`SPARSE_ATTENTION`], as the layers of a transformers model call it.

    Args:
        module (`torch.nn.Module`):
            The attention layer.
        query (`torch.Tensor` of shape `[batch, q_heads, tokens, head_dim]`):
            Queries, after the rotary embedding.
        key, value (`torch.Tensor` of shape `[batch, kv_heads, tokens, head_dim]`):
            Keys, after the rotary embedding, and values.
        attention_mask ([`PaddingMask`]):
            What [`sparse_attention_mask`] made.
        scaling (`float`, *optional*):
            Factor of the attention logits, by default `head_dim**-0.5`.
        dropout (`float`, *optional*, defaults to `0.0`):
            Attention dropout, which dense layers alone support.
        sparsity_schedule ([`SparsityScheduleConfig`], *optional*):
            Pages to keep at each cached length, from the keyword arguments of the model's forward pass.
        prompt_lengths (`torch.Tensor` of shape `[sequences]`, *optional*):
            Number of prompt tokens in each row, padding not counted, or in each packed sequence; likewise.
        sparse_forward ([`SparseForward`], *optional*):
            What [`sparse_attention_context`] gives in place of these two and the mask.
        **kwargs:
            Other keyword arguments of the model's forward pass, of which `position_ids` and `cu_seq_lens_q` tell
            packed sequences apart.

    Returns:
        `tuple`: the output of shape `[batch, tokens, q_heads, head_dim]`, zeros at padding, and `None` for the
        attention weights.

    Raises:
        ValueError: without a schedule and prompt lengths, and as in [`sparse_attention_context`].
    """
    layer = module.layer_idx
    for option, name in UNSUPPORTED_OPTIONS.items():
        if kwargs.get(option) is not None:
            raise ValueError(f"Sparse attention does not support {name}, which layer {layer} asks for.")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ValueError(f"Sparse attention is causal, but layer {layer} attends in both directions.")
    tokens, cached = key.shape[2], 0 if sparse_forward is None else sparse_forward.cached_tokens
    if tokens != query.shape[2] + cached:
        raise ValueError(
            f"Sparse attention sees whole sequences, got {query.shape[2]} queries for {tokens} cached keys. Run the "
            "model without a filled KV cache, or say by `cached_tokens` how many tokens are in it."
        )
    if sparse_forward is None:
        if sparsity_schedule is None or prompt_lengths is None:
            raise ValueError(
                f'The attention "{SPARSE_ATTENTION}" needs a schedule and the lengths of the prompts: pass '
                "`sparsity_schedule` and `prompt_lengths` to the model's forward pass, or run it inside "
                f"`sparse_attention_context`. Layer {layer} got no "
                f"{'`sparsity_schedule`' if sparsity_schedule is None else '`prompt_lengths`'}; if it was passed, the "
                "model does not hand its keyword arguments to its attention layers."
            )
        if not isinstance(attention_mask, PaddingMask):
            raise ValueError(
                f'The attention "{SPARSE_ATTENTION}" needs an attention mask of shape [batch, tokens] or none, but '
                f"layer {layer} of the model got one of its own making: {type(attention_mask).__name__}."
            )
        if (position_ids := kwargs.get("position_ids")) is None:
            raise ValueError(
                "Sparse attention needs to know whether sequences are packed, but this model hands no `position_ids` "
                f"to layer {layer}. Run it inside `sparse_attention_context`."
            )
        sparse_forward = attention_mask.sparse_forward(
            sparsity_schedule, prompt_lengths, query, position_ids, kwargs.get("cu_seq_lens_q")
        )
    schedule, layout = sparse_forward.schedule, sparse_forward.layout
    sparse_forward.layers.add(layer)
    prompts = sparse_forward.prompt_lengths.to(query.device)

    if schedule.is_dense_layer(layer):
        dense = functools.partial(
            sdpa_attention_forward, module, attention_mask=None, dropout=dropout, scaling=scaling, is_causal=True
        )
        if cached:
            # Queries are the last of the keys', which `is_causal` would take for the first.
            mask = torch.ones((query.shape[2], tokens), dtype=torch.bool, device=query.device).tril(cached)
            return dense(query, key, value, attention_mask=mask[None, None], is_causal=False)
        if not layout.packed and not layout.padded:
            return dense(query, key, value)
        return layout.attend(lambda index, *parts: dense(*parts)[0], query, key, value), None

    if dropout:
        raise ValueError(f"Sparse attention does not support attention dropout, got {dropout}.")
    sparse = functools.partial(
        sparse_attention,
        top_k_table=schedule.to_table(tokens, layer=layer, device=query.device),
        scale=scaling,
        landmark_dtype=schedule.storage_dtype(key.dtype),
        **schedule.recipe,
    )
    if layout.packed:

        def attend(index, *parts):
            return sparse(*parts, prompt_lengths=prompts[index : index + 1]).transpose(1, 2)

        return layout.attend(attend, query, key, value), None
    rows = {"prompt_lengths": prompts}
    if layout.padded:
        rows.update(starts=layout.starts.to(query.device), lengths=layout.lengths.to(query.device))
    output = sparse(query, key, value, **rows)
    return output.transpose(1, 2).contiguous(), None


def sparse_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    config: PreTrainedConfig,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs,
) -> PaddingMask:
    """
    The mask function behind [`SPARSE_ATTENTION`], as transformers calls it. Raises a `ValueError` for masks that are
    not causal ones, but for sliding windows, which the layers that have them refuse.
    """
    # For packed sequences transformers makes a mask function of its own, which then comes without an attention mask.
    other = mask_function is not causal_mask_function and attention_mask is not None and local_size is None
    if use_vmap or other or getattr(config, "attention_chunk_size", None):
        raise ValueError(
            f"Sparse attention supports causal attention alone; a {config.model_type} model asks for another mask."
        )
    return PaddingMask(attention_mask)


AttentionInterface.register(SPARSE_ATTENTION, sparse_attention_forward)
AttentionMaskInterface.register(SPARSE_ATTENTION, sparse_attention_mask)


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
