"""Block-sparse decode attention in vLLM: what its attention backends share, and the backend for CPUs.

Each backend subclasses a stock one, which does all dense work on prompts. The tokens that attend sparsely are those at
positions past their request's prompt, also when vLLM recomputes them after a preemption and sends them as a prefill.

What the parts share lives in one [`SparseRolloutState`] per engine: the schedule in use, the prompt lengths and the
counters. It is found through the engine's `instance_id`, because vLLM builds layers and metadata builders in places
that share nothing else. An engine without a schedule in its `additional_config` gets the stock classes; on a GPU the
sparse backend is `CUSTOM`, and asking for it without a schedule is refused.

Landmarks are written with the keys, page by physical page, so that prefix caching and preemption need no bookkeeping
of their own.
"""

import logging
import weakref
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from sparrow_attention import page_landmarks, sparse_decode_attention

from .schedule import SparsityScheduleConfig


ADDITIONAL_CONFIG_KEY = "sparrow_schedule"

# What a GPU engine's KV cache and captured graphs are laid out for.
LAYOUT_FIELDS = ("page_size", "page_score", "landmarks_per_page", "landmark_dtype")

_STATES: "weakref.WeakValueDictionary[str, SparseRolloutState]" = weakref.WeakValueDictionary()
# Key of the engine whose layers were built last: vLLM asks a backend for KV cache specs without naming the engine.
_newest_engine = None


@dataclass
class DecodeCounters:
    """What the attention layers really read, summed over layers, kv heads and tokens past the prompt.

    Args:
        kept_pages (`int`): Pages read.
        cached_pages (`int`): Pages that dense attention would have read.
        sparse_tokens (`int`): Tokens that attended sparsely, counted once per forward pass.
        unattributed_tokens (`int`):
            Tokens of prefills whose prompt length the engine could not tell, attended densely.
    """

    kept_pages: int = 0
    cached_pages: int = 0
    sparse_tokens: int = 0
    unattributed_tokens: int = 0

    def since(self, earlier: "DecodeCounters") -> "DecodeCounters":
        """What was counted after `earlier`, a copy of these counters."""
        return DecodeCounters(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})

    @property
    def kept_fraction(self) -> float | None:
        """`float` or `None`: Share of the cached pages that was read; `None` before the first decoded token."""
        return self.kept_pages / self.cached_pages if self.cached_pages else None


class SparseRolloutState:
    """What one engine's attention layers, metadata builders and owner share.

    Args:
        schedule ([`SparsityScheduleConfig`]): Schedule in use.
        max_model_len (`int`): Longest sequence the engine accepts, in tokens.
        block_size (`int`): Tokens in a block of the engine's KV cache.
    """

    def __init__(self, schedule: SparsityScheduleConfig, max_model_len: int, block_size: int):
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.counted = DecodeCounters()
        # Dense rollouts (evaluation) from a sparse engine: every token keeps all pages.
        self.dense = False
        self.prompt_lengths = None
        self.attention_backend = None
        # On a GPU, whether the KV cache has been laid out for the schedule's pages, and what captured graphs read.
        self.layout_is_fixed = False
        self.decode_buffers = None
        self.set_schedule(schedule)

    def set_schedule(self, schedule: SparsityScheduleConfig) -> None:
        """Change the schedule. The caller resets the prefix cache, since cached keys depend on the old one."""
        if self.block_size % schedule.page_size:
            raise ValueError(
                f"The schedule's page_size {schedule.page_size} does not divide the engine's KV block of "
                f"{self.block_size} tokens. Choose a page_size that divides it, or a block size that is a multiple of "
                f"{schedule.page_size}."
            )
        if self.layout_is_fixed:
            changed = [name for name in LAYOUT_FIELDS if getattr(schedule, name) != getattr(self.schedule, name)]
            if changed:
                raise ValueError(
                    f"{', '.join(changed)} cannot change in a running engine, whose KV cache and captured graphs are "
                    f"laid out for {', '.join(f'{name}={getattr(self.schedule, name)!r}' for name in changed)}. "
                    "Budgets, reserved pages and dense layers can. Build a new engine for this schedule."
                )
        if self.decode_buffers is not None:
            self.decode_buffers.set_schedule(schedule)
        self.schedule = schedule
        self._tables: dict[int, torch.Tensor] = {}

    @property
    def counters(self) -> DecodeCounters:
        """[`DecodeCounters`]: A copy of what was counted so far. On a GPU, reading them waits for the device."""
        if self.decode_buffers is None:
            return replace(self.counted)
        kept, cached = self.decode_buffers.decoder.totals.sum((1, 2)).tolist()
        return replace(self.counted, kept_pages=kept, cached_pages=cached)

    def reset_counters(self) -> None:
        """Count from zero."""
        self.counted = DecodeCounters()
        if self.decode_buffers is not None:
            self.decode_buffers.decoder.totals.zero_()

    def top_k(self, layer: int, num_pages: torch.Tensor) -> torch.Tensor:
        """Pages to keep beside the reserved ones, for rows with `num_pages` pages in `layer`. Shape `[rows]`."""
        if layer not in self._tables:
            self._tables[layer] = self.schedule.to_table(self.max_model_len, layer=layer, device=num_pages.device)
        table = self._tables[layer]
        return table[num_pages.clamp(max=table.numel() - 1).long()]

    @classmethod
    def newest(cls) -> "SparseRolloutState":
        """State of the engine whose layers were built last."""
        return _STATES[_newest_engine]

    @classmethod
    def of_engine(cls, vllm_config) -> "SparseRolloutState | None":
        """State of the engine with `vllm_config`, made at the first call; `None` if it carries no schedule."""
        record = (vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY)
        if record is None:
            return None
        state = _STATES.get(vllm_config.instance_id)
        if state is None:
            state = cls(
                SparsityScheduleConfig.from_dict(record),
                max_model_len=vllm_config.model_config.max_model_len,
                block_size=vllm_config.cache_config.block_size,
            )
            _STATES[vllm_config.instance_id] = state
        return state


def attention_layers(vllm_config) -> dict[str, torch.nn.Module]:
    """The engine's attention layers, those that have an implementation, by name."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if hasattr(layer, "impl")}


def attach_sparse_rollout(worker) -> SparseRolloutState:
    """Connect a vLLM worker's sparse attention layers with its table of prompt lengths, and return their state.

    Call it in the engine's process: the state holds functions of the worker and is not sent anywhere.

    The metadata that vLLM hands to attention backends does not say where a request's prompt ends, and a request that
    is resumed after a preemption comes back as one long prefill.

    Raises:
        RuntimeError: If an attention layer of the worker does not run the sparse implementation.
    """
    runner = worker.model_runner
    impls = {name: layer.impl for name, layer in attention_layers(worker.vllm_config).items()}
    stock = {name: type(impl).__name__ for name, impl in impls.items() if not isinstance(impl, SparseDecodeMixin)}
    # The layers' own: an engine core in a server renames its configuration once it is built.
    states = {impl.state for impl in impls.values() if isinstance(impl, SparseDecodeMixin)}
    if stock or len(states) != 1:
        raise RuntimeError(
            "The engine does not run the sparse attention backend, so its rollouts would be dense without a word. "
            f"Layers with another implementation: {stock or 'all'}. Check that the package's vLLM plug-in is "
            "installed and that VLLM_PLUGINS does not exclude it."
        )
    (state,) = states
    state.reset_counters()  # of what warming up has counted
    state.attention_backend = ", ".join(sorted({type(impl).__name__ for impl in impls.values()}))
    if hasattr(runner, "input_batch"):  # model runner V1
        state.prompt_lengths = lambda common: runner.input_batch.num_prompt_tokens[: common.num_reqs]
    elif hasattr(runner, "req_states"):  # model runner V2, whose batches are not in the order of its table
        state.prompt_lengths = lambda common: runner.req_states.prompt_len.np[common.req_idx]
    else:
        raise RuntimeError(
            f"{type(runner).__module__}.{type(runner).__name__} has neither `input_batch` nor `req_states` to read "
            "prompt lengths from. Use one of vLLM's own model runners."
        )
    return state


@dataclass
class SparseRows:
    """The tokens of a batch that attend sparsely, in the order of the batch.

    Args:
        tokens (`torch.Tensor` of shape `[rows]`): Index of each token in the flat batch.
        block_table (`torch.Tensor` of shape `[rows, max_blocks]`): Physical KV blocks of each token's request.
        seq_lens (`torch.Tensor` of shape `[rows]`): Cached length at each token, its own key included.
        num_pages (`torch.Tensor` of shape `[rows]`): Pages of the schedule that it covers.
        cached_pages (`int`): Their sum.
        cover_batch (`bool`): Whether no other token is in the batch.
    """

    tokens: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_pages: torch.Tensor
    cached_pages: int
    cover_batch: bool


@dataclass
class BatchLengths:
    """Lengths of a batch's requests on the host, each of shape `[requests]`.

    In NumPy, whose calls cost a fraction of PyTorch's: short steps end before the host has prepared the next.

    Args:
        starts (`numpy.ndarray`): Index of each request's first token in the flat batch.
        query_lens (`numpy.ndarray`): Tokens of each request in the batch.
        seq_lens (`numpy.ndarray`): Its tokens up to and including those.
        prompt_lengths (`numpy.ndarray`): Tokens of its prompt.
    """

    starts: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    prompt_lengths: np.ndarray

    @classmethod
    def of(cls, common, state: SparseRolloutState) -> "BatchLengths":
        """Read them from a `CommonAttentionMetadata`, without waiting for the device."""
        starts = common.query_start_loc_cpu.numpy()[: common.num_reqs + 1]
        query_lens = starts[1:] - starts[:-1]
        # Exact where no draft tokens are verified.
        seq_lens = common.seq_lens_cpu_upper_bound.numpy()[: common.num_reqs]
        prompt_lengths = np.zeros_like(seq_lens)
        if state.prompt_lengths is not None:
            known = state.prompt_lengths(common)
            prompt_lengths[: len(known)] = known  # rows that only fill a graph's batch up have no request
        else:
            prefilling = query_lens > 1
            if common.is_prefilling is not None:
                prefilling[: len(common.is_prefilling)] = common.is_prefilling[: common.num_reqs].cpu().numpy()
            prompt_lengths = np.where(prefilling, seq_lens, prompt_lengths)
            state.counted.unattributed_tokens += int(query_lens[prefilling].sum())
        return cls(starts[:-1], query_lens, seq_lens, prompt_lengths)

    def sparse_tokens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Index in the flat batch, request and length of each token past its request's prompt."""
        requests = np.arange(len(self.starts)).repeat(self.query_lens)
        lengths = (self.seq_lens - self.query_lens - self.starts)[requests] + np.arange(len(requests)) + 1
        tokens = np.flatnonzero(lengths > self.prompt_lengths[requests])
        return tokens, requests[tokens], lengths[tokens]


def find_sparse_rows(common, state: SparseRolloutState) -> SparseRows | None:
    """Find the tokens past their request's prompt in a batch described by a `CommonAttentionMetadata`."""
    lengths = BatchLengths.of(common, state)
    tokens, requests, seq_lens = map(torch.from_numpy, lengths.sparse_tokens())
    if not len(tokens):
        return None
    state.counted.sparse_tokens += len(tokens)
    num_pages = (seq_lens + state.schedule.page_size - 1) // state.schedule.page_size
    return SparseRows(
        tokens=tokens,
        block_table=common.block_table_tensor[requests],
        seq_lens=seq_lens,
        num_pages=num_pages,
        cached_pages=int(num_pages.sum()),
        cover_batch=len(tokens) == int(lengths.query_lens.sum()),
    )


class SparseDecodeMixin:
    """Marks the sparse implementations, and refuses what none of them supports."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.attn_type != AttentionType.DECODER:
            raise ValueError(f"Sparse rollouts support decoder attention only, not {self.attn_type!r}.")
        if self.sliding_window not in (-1, (-1, -1)):
            raise ValueError(
                "Sparse rollouts do not support sliding-window attention: a window already limits what is read. Use a "
                "model whose layers all attend to the whole context."
            )
        if self.sinks is not None:
            raise ValueError("Sparse rollouts do not support models with learned attention sinks.")
        if self.kv_sharing_target_layer_name is not None:
            raise ValueError("Sparse rollouts do not support layers that read another layer's KV cache.")
        if self.alibi_slopes is not None or self.logits_soft_cap:
            raise ValueError("Sparse rollouts support neither ALiBi biases nor soft-capped attention logits.")
        if self.kv_cache_dtype != "auto":
            raise ValueError(
                f"Sparse rollouts need the KV cache in the model's dtype, not kv_cache_dtype={self.kv_cache_dtype!r}. "
                "Leave kv_cache_dtype at 'auto'."
            )
        vllm_config = get_current_vllm_config()
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "Sparse rollouts do not support speculative_config: which draft tokens are accepted is known too late "
                "to tell which tokens attend sparsely."
            )
        if vllm_config.parallel_config.enable_dbo:
            raise ValueError("Sparse rollouts do not support enable_dbo: micro-batches would share scratch memory.")
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector != "DecodeBenchConnector":
            raise ValueError(
                f"Sparse rollouts do not support kv_transfer_config ({transfer.kv_connector}): KV blocks that come "
                "from elsewhere have no landmarks."
            )
        self.state = SparseRolloutState.of_engine(vllm_config)
        if self.state is None:
            raise ValueError(
                f"The engine has no sparsity schedule. Give it one in additional_config[{ADDITIONAL_CONFIG_KEY!r}], "
                "or leave attention_backend unset for dense attention."
            )
        global _newest_engine
        _newest_engine = vllm_config.instance_id


class SparseCPUAttentionImpl(SparseDecodeMixin, CPUAttentionBackendImpl):
    """Sparse decode on the CPU, by the reference implementation.

    The stock key cache is packed for the machine's instruction set, so this class keeps a plain copy of both caches.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if self.head_size not in sizes:
            raise ValueError(
                f"The model's attention heads have {self.head_size} dimensions, for which vLLM has no CPU kernel. It "
                f"has one for {', '.join(map(str, sizes))}. Use another model, or a GPU."
            )
        self._plain = None
        self.landmarks = None

    def plain_cache(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the model computed them, each `[blocks, kv_heads, block_size, head_dim]`."""
        blocks, kv_heads, block_size, _ = kv_cache.shape
        if self._plain is None or self._plain.shape[1] != blocks:
            shape = (2, blocks, kv_heads, block_size, self.head_size)
            self._plain = torch.empty(shape, dtype=kv_cache.dtype)
        return self._plain[0], self._plain[1]

    def _landmark_storage(self, key_cache: torch.Tensor) -> torch.Tensor:
        """Landmarks of every physical page, `[blocks, kv_heads, pages_in_block, landmarks_per_page, head_dim]`."""
        schedule = self.state.schedule
        blocks, kv_heads, block_size, head_dim = key_cache.shape
        shape = (blocks, kv_heads, block_size // schedule.page_size, schedule.landmarks_per_page, head_dim)
        dtype = schedule.storage_dtype(key_cache.dtype)
        if self.landmarks is None or self.landmarks.shape != shape or self.landmarks.dtype != dtype:
            # A change of page structure comes with an empty prefix cache, so no landmark is lost.
            self.landmarks = torch.empty(shape, dtype=dtype, device=key_cache.device)
        return self.landmarks

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        written = slot_mapping >= 0
        slots = slot_mapping[written].long()
        key_cache, value_cache = self.plain_cache(kv_cache)
        block_size, page_size = key_cache.shape[2], self.state.schedule.page_size
        block, offset = slots // block_size, slots % block_size
        num_tokens = len(slot_mapping)
        key_cache[block, :, offset] = key[:num_tokens][written]
        value_cache[block, :, offset] = value[:num_tokens][written]
        # A page gets its landmarks when its last token is written: vLLM writes every request's tokens in order.
        full = slots[slots % page_size == page_size - 1]
        block, page = full // block_size, full % block_size // page_size
        pages = key_cache.unflatten(2, (-1, page_size))[block, :, page]
        landmarks = self._landmark_storage(key_cache)
        landmarks[block, :, page] = page_landmarks(
            pages, self.state.schedule.landmarks_per_page, dtype=landmarks.dtype
        )

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        rows = getattr(attn_metadata, "sparse_rows", None)
        if rows is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        schedule, counters = self.state.schedule, self.state.counted
        cached_pages = rows.cached_pages * self.num_kv_heads
        counters.cached_pages += cached_pages
        index = extract_layer_index(layer.layer_name)
        if schedule.is_dense_layer(index):
            counters.kept_pages += cached_pages
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if not rows.cover_batch:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        key_cache, value_cache = self.plain_cache(kv_cache)
        attended, kept = sparse_decode_attention(
            query[rows.tokens],
            key_cache,
            value_cache,
            rows.block_table,
            rows.seq_lens,
            self.state.top_k(index, rows.num_pages),
            landmarks=self._landmark_storage(key_cache),
            scale=self.scale,
            return_kept=True,
            **schedule.recipe,
        )
        counters.kept_pages += int(kept.sum())
        output[rows.tokens] = attended.to(output.dtype)
        return output


class SparseCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Adds the batch's [`SparseRows`] to the stock metadata."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.state = SparseRolloutState.of_engine(vllm_config)

    def build(self, common_prefix_len, common_attn_metadata, *args, **kwargs):
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        # Metadata is a plain dataclass: the row list rides along and no stock field changes meaning.
        metadata.sparse_rows = None if self.state.dense else find_sparse_rows(common_attn_metadata, self.state)
        return metadata


class SparseCPUAttentionBackend(CPUAttentionBackend):
    """Takes the place of vLLM's `CPU_ATTN`; engines without a schedule get the stock classes."""

    @staticmethod
    def get_impl_cls():
        if SparseRolloutState.of_engine(get_current_vllm_config()) is None:
            return CPUAttentionBackend.get_impl_cls()
        return SparseCPUAttentionImpl

    @staticmethod
    def get_builder_cls():
        if SparseRolloutState.of_engine(get_current_vllm_config()) is None:
            return CPUAttentionBackend.get_builder_cls()
        return SparseCPUMetadataBuilder


def reload_packed_weights(worker, weights) -> None:
    """Load `(name, tensor)` pairs into a CPU engine, whose linear layers keep packed copies of their weights.

    vLLM's `reload_weights` packs every layer again except a language-model head that shares the embedding's weight.
    """
    # Tied heads and rotary tables have no weights of their own, of which vLLM warns at every reload.
    layerwise = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = layerwise.level
    layerwise.setLevel(logging.ERROR)
    try:
        worker.model_runner.reload_weights(weights_iterator=weights)
    finally:
        layerwise.setLevel(level)
    for module in worker.model_runner.model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
