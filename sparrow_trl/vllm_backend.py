"""Block-sparse decode attention as vLLM attention backends.

Each backend subclasses a stock one. The stock implementation does all dense work (prompts, dense layers, dense
rollouts), and the sparse one overwrites the rows of the tokens that attend sparsely: those at positions past their
request's prompt, also when vLLM recomputes them after a preemption and sends them as a prefill.

What the parts share lives in one [`SparseRolloutState`] per engine: the schedule in use, the prompt lengths and the
counters. It is found through the engine's `instance_id`, because vLLM builds layers and metadata builders in places
that share nothing else. An engine without a schedule in its `additional_config` gets the stock classes; on a GPU the
sparse backend is `CUSTOM`, and asking for it without a schedule is refused.

Landmarks are written with the keys, page by physical page, so that prefix caching and preemption need no bookkeeping
of their own.
"""

import logging
import math
import weakref
from dataclasses import dataclass, fields, replace

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from sparrow_attention import page_landmarks, sparse_decode_attention

from .schedule import SparsityScheduleConfig


ADDITIONAL_CONFIG_KEY = "sparrow_schedule"

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
        # What captured graphs read, on a GPU.
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
        if self.decode_buffers is not None:
            self.decode_buffers.set_schedule(schedule)
        self.schedule = schedule
        self._tables: dict[int, torch.Tensor] = {}

    @property
    def counters(self) -> DecodeCounters:
        """[`DecodeCounters`]: What was counted so far. On a GPU, reading them waits for the device."""
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


def attach_sparse_rollout(worker) -> SparseRolloutState:
    """Connect a vLLM worker's sparse attention layers with its table of prompt lengths, and return their state.

    The metadata that vLLM hands to attention backends does not say where a request's prompt ends, and a request that
    is resumed after a preemption comes back as one long prefill.

    Raises:
        RuntimeError: If an attention layer of the worker does not run the sparse implementation.
    """
    runner = worker.model_runner
    state = SparseRolloutState.of_engine(worker.vllm_config)
    layers = worker.vllm_config.compilation_config.static_forward_context
    impls = {name: layer.impl for name, layer in layers.items() if hasattr(layer, "impl")}
    stock = {name: type(impl).__name__ for name, impl in impls.items() if not isinstance(impl, SparseDecodeMixin)}
    if state is None or stock or not impls:
        raise RuntimeError(
            "The engine does not run the sparse attention backend, so its rollouts would be dense without a word. "
            f"Layers with another implementation: {stock or 'all'}. Check that the package's vLLM plug-in is "
            "installed and that VLLM_PLUGINS does not exclude it."
        )
    state.reset_counters()  # of what warming up has counted
    state.attention_backend = ", ".join(sorted({type(impl).__name__ for impl in impls.values()}))
    if hasattr(runner, "input_batch"):  # model runner V1
        state.prompt_lengths = lambda common: runner.input_batch.num_prompt_tokens_cpu_tensor[: common.num_reqs]
    elif hasattr(runner, "req_states"):  # model runner V2, whose batches are not in the order of its table
        state.prompt_lengths = lambda common: torch.from_numpy(runner.req_states.prompt_len.np[common.req_idx])
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
    """Lengths of a batch's requests, int64 on the host, each of shape `[requests]`.

    Args:
        starts (`torch.Tensor`): Index of each request's first token in the flat batch.
        query_lens (`torch.Tensor`): Tokens of each request in the batch.
        seq_lens (`torch.Tensor`): Its tokens up to and including those.
        prompt_lengths (`torch.Tensor`): Tokens of its prompt.
    """

    starts: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    prompt_lengths: torch.Tensor

    @classmethod
    def of(cls, common, state: SparseRolloutState) -> "BatchLengths":
        """Read them from a `CommonAttentionMetadata`, without waiting for the device."""
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].long()
        query_lens = starts.diff()
        # Exact where no draft tokens are verified.
        seq_lens = common.seq_lens_cpu_upper_bound[: common.num_reqs].long()
        prompt_lengths = torch.zeros_like(seq_lens)
        if state.prompt_lengths is not None:
            known = state.prompt_lengths(common).long()
            prompt_lengths[: len(known)] = known  # rows that only fill a graph's batch up have no request
        else:
            prefilling = query_lens > 1
            if common.is_prefilling is not None:
                prefilling[: len(common.is_prefilling)] = common.is_prefilling[: common.num_reqs].cpu()
            prompt_lengths = torch.where(prefilling, seq_lens, prompt_lengths)
            state.counted.unattributed_tokens += int(query_lens[prefilling].sum())
        return cls(starts[:-1], query_lens, seq_lens, prompt_lengths)

    def sparse_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Index in the flat batch, request and length of each token past its request's prompt."""
        requests = torch.repeat_interleave(torch.arange(len(self.starts)), self.query_lens)
        token = torch.arange(len(requests))
        lengths = (self.seq_lens - self.query_lens - self.starts)[requests] + self.starts[0] + token + 1
        tokens = torch.nonzero(lengths > self.prompt_lengths[requests]).squeeze(1)
        return tokens + self.starts[0], requests[tokens], lengths[tokens]

    def after(self, requests: int) -> "BatchLengths":
        """Those of all but the first `requests`."""
        return BatchLengths(*(getattr(self, field.name)[requests:] for field in fields(self)))


def find_sparse_rows(common, state: SparseRolloutState) -> SparseRows | None:
    """Find the tokens past their request's prompt in a batch described by a `CommonAttentionMetadata`."""
    lengths = BatchLengths.of(common, state)
    tokens, requests, seq_lens = lengths.sparse_tokens()
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


if current_platform.is_cuda():
    from vllm.v1.attention.backends.flash_attn import (
        FlashAttentionBackend,
        FlashAttentionImpl,
        FlashAttentionMetadataBuilder,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from sparrow_attention.paged_decode import PagedDecoder, check_decoder
    from sparrow_attention.paged_landmarks import update_landmarks

    class DecodeBuffers:
        """What the kernels of a decode step read and write, at addresses that captured graphs keep.

        Args:
            state ([`SparseRolloutState`]): State of the engine.
            vllm_config (`vllm.config.VllmConfig`): Its configuration.
            q_heads, kv_heads, head_dim (`int`): Shape of its attention layers.
            device (`torch.device`): Where the buffers live.
        """

        def __init__(self, state, vllm_config, q_heads: int, kv_heads: int, head_dim: int, device: torch.device):
            self.max_model_len = state.max_model_len
            max_rows = vllm_config.scheduler_config.max_num_seqs
            self.decoder = PagedDecoder(
                max_rows=max_rows,
                max_tokens=state.max_model_len,
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                device=device,
                **state.schedule.recipe,
            )
            self.schedule = state.schedule
            num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
            table = state.schedule.to_table(state.max_model_len)
            # One row per layer: which layers are dense may change without a new capture, too.
            self.tables = torch.empty((num_layers, len(table)), dtype=torch.int32, device=device)
            self.dense_until = torch.zeros(max_rows, dtype=torch.int32, device=device)
            self._dense_until = torch.zeros(max_rows, dtype=torch.int32)
            self.set_schedule(state.schedule)

        def set_schedule(self, schedule: SparsityScheduleConfig) -> None:
            """Use `schedule` from the next step on."""
            fixed = ("page_size", "page_score", "landmarks_per_page", "landmark_dtype")
            changed = [name for name in fixed if getattr(schedule, name) != getattr(self.schedule, name)]
            if changed:
                raise ValueError(
                    f"{', '.join(changed)} cannot change in a running engine, whose KV cache and captured graphs are "
                    f"laid out for {', '.join(f'{name}={getattr(self.schedule, name)!r}' for name in changed)}. "
                    "Budgets, reserved pages and dense layers can. Build a new engine for this schedule."
                )
            tables = [schedule.to_table(self.max_model_len, layer=layer) for layer in range(len(self.tables))]
            self.tables.copy_(torch.stack(tables))
            self.decoder.set_reserved(schedule.sink_pages, schedule.recent_pages)
            self.schedule = schedule

        def hold_dense_until(self, lengths: torch.Tensor) -> torch.Tensor:
            """The length up to which each row keeps all pages, on the device. Copied only when it changes."""
            rows = len(lengths)
            if not torch.equal(lengths, self._dense_until[:rows]):
                self._dense_until[:rows] = lengths
                # From ordinary memory, which the driver reads before it returns: the next step may overwrite it.
                self.dense_until[:rows].copy_(self._dense_until[:rows], non_blocking=True)
            return self.dense_until[:rows]

    @dataclass
    class DecodeRows:
        """Rows of one decode step.

        Args:
            tokens (`slice` or `torch.Tensor` of shape `[rows]`): Where they are in the flat batch.
            block_table (`torch.Tensor` of shape `[rows, max_blocks]`): KV blocks of each row.
            seq_lens (`torch.Tensor` of shape `[rows]`): Cached length at each row, its own key included.
            dense_until (`torch.Tensor` of shape `[rows]`, *optional*): Length up to which it keeps all pages.
        """

        tokens: "slice | torch.Tensor"
        block_table: torch.Tensor
        seq_lens: torch.Tensor
        dense_until: torch.Tensor | None = None

    class SparseFlashAttentionImpl(SparseDecodeMixin, FlashAttentionImpl):
        """Sparse decode on the GPU: FlashAttention reads prompts, Triton kernels decode from its cache."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            check_decoder(
                self.state.max_model_len,
                self.num_heads,
                self.num_kv_heads,
                self.head_size,
                self.state.schedule.page_size,
            )
            self._views = None

        def views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """Keys, values, and the landmarks that lie behind them in each block, as views of the cache.

            Shapes are `[blocks, kv_heads, block_size, head_dim]` twice and
            `[blocks, kv_heads, pages, landmarks_per_page, head_dim]`.
            """
            if self._views is None or self._views[0].data_ptr() != kv_cache.data_ptr():
                keys, values = kv_cache.split(self.head_size, dim=-1)
                self._views = (keys, values, landmark_view(kv_cache, self.head_size, self.state.schedule))
            return self._views

        def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            keys, _, landmarks = self.views(kv_cache)
            update_landmarks(keys, landmarks, slot_mapping)

        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
            decode_rows = getattr(attn_metadata, "decode_rows", ())
            start = getattr(attn_metadata, "first_prefill_token", 0)
            if start is not None:
                super().forward(
                    layer, query[start:], key[start:], value[start:], kv_cache, attn_metadata, output[start:],
                    *args, **kwargs,
                )  # fmt: skip
            if not decode_rows:
                return output
            keys, values, landmarks = self.views(kv_cache)
            buffers = self.state.decode_buffers
            for rows in decode_rows:
                in_place = isinstance(rows.tokens, slice)
                row_query = query[rows.tokens]
                attended = buffers.decoder(
                    row_query,
                    keys,
                    values,
                    rows.block_table,
                    rows.seq_lens,
                    buffers.tables[extract_layer_index(layer.layer_name)],
                    landmarks,
                    output=output[rows.tokens] if in_place else torch.empty_like(row_query),
                    dense_until=rows.dense_until,
                    scale=self.scale,
                )
                if not in_place:
                    output[rows.tokens] = attended
            return output

    class SparseFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
        """Splits a batch into tokens that are decoded and prompts that FlashAttention reads."""

        _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self.state = SparseRolloutState.of_engine(vllm_config)
            # Decodes first, so that they are one slice of the batch.
            self._init_reorder_batch_threshold(1)

        def use_cascade_attention(self, *args, **kwargs) -> bool:
            return False

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common, state = common_attn_metadata, self.state
            if state.decode_buffers is None:
                # Not in the constructor: what is allocated there may be lost when the engine sleeps. And as ordinary
                # tensors: a schedule changes outside of the engine's inference mode.
                with torch.inference_mode(False):
                    state.decode_buffers = DecodeBuffers(
                        state, self.vllm_config, self.num_heads_q, self.num_heads_kv, self.headdim, self.device
                    )
            lengths = BatchLengths.of(common, state)
            several = torch.nonzero(lengths.query_lens > 1)
            decodes = int(several[0]) if len(several) else common.num_reqs
            rows = []
            if decodes:
                until = torch.full_like(lengths.prompt_lengths, 2**31 - 1) if state.dense else lengths.prompt_lengths
                rows.append(
                    DecodeRows(
                        slice(0, decodes),
                        common.block_table_tensor[:decodes],
                        common.seq_lens[:decodes],
                        state.decode_buffers.hold_dense_until(until[:decodes].int()),
                    )
                )
            if not state.dense:
                decoded = (lengths.seq_lens > lengths.prompt_lengths) & (lengths.query_lens > 0)
                state.counted.sparse_tokens += int(decoded[:decodes].sum())
            if decodes == common.num_reqs:
                # No layer runs FlashAttention, so its schedule need not be made.
                metadata = super().build(0, common, fast_build=True)
                metadata.first_prefill_token = None
            else:
                metadata = super().build(0, _without_decodes(common, decodes), fast_build)
                metadata.first_prefill_token = decodes
                if not state.dense:
                    rows += self._recomputed_rows(common, lengths.after(decodes), decodes)
            metadata.decode_rows = rows
            return metadata

        def _recomputed_rows(self, common, lengths: BatchLengths, decodes: int) -> list[DecodeRows]:
            """Tokens past the prompt within longer runs: what vLLM computes again after a preemption."""
            tokens, requests, seq_lens = lengths.sparse_tokens()
            self.state.counted.sparse_tokens += len(tokens)
            tokens, requests, seq_lens = (x.to(self.device) for x in (tokens, requests + decodes, seq_lens.int()))
            steps = zip(
                *(x.split(self.state.decode_buffers.decoder.max_rows) for x in (tokens, requests, seq_lens)),
                strict=True,
            )
            return [DecodeRows(t, common.block_table_tensor[r], s) for t, r, s in steps if len(t)]

    def _without_decodes(common, decodes: int):
        """The `CommonAttentionMetadata` of the requests after the first `decodes`, which have one token each."""

        def rest(tensor):
            return None if tensor is None else tensor[decodes:]

        return common.replace(
            num_reqs=common.num_reqs - decodes,
            num_actual_tokens=common.num_actual_tokens - decodes,
            query_start_loc=common.query_start_loc[decodes:] - decodes,
            query_start_loc_cpu=common.query_start_loc_cpu[decodes:] - decodes,
            seq_lens=common.seq_lens[decodes:],
            block_table_tensor=common.block_table_tensor[decodes:],
            slot_mapping=common.slot_mapping[decodes:],
            seq_lens_cpu_upper_bound=rest(common.seq_lens_cpu_upper_bound),
            is_prefilling=rest(common.is_prefilling),
            positions=rest(common.positions),
            req_idx=rest(common.req_idx),
        )

    class SparseFlashAttentionBackend(FlashAttentionBackend):
        """Registered as vLLM's `CUSTOM` backend, which an engine has to ask for."""

        @staticmethod
        def get_name() -> str:
            return "CUSTOM"

        @staticmethod
        def get_impl_cls():
            return SparseFlashAttentionImpl

        @staticmethod
        def get_builder_cls():
            return SparseFlashAttentionMetadataBuilder

        @classmethod
        def supported_kv_cache_layouts(cls):
            # A page of a head is one run of memory only in this layout, and blocks may carry landmarks behind it.
            return (KVCacheLayout.LBHNC,)

        @classmethod
        def customize_spec(cls, spec):
            """Make room for the landmarks of a block behind its keys and values.

            Landmarks then live where the KV cache lives: they are part of vLLM's memory budget, go when the engine
            sleeps, and need no bookkeeping under prefix caching.
            """
            schedule = _STATES[_newest_engine].schedule
            return replace(spec, page_size_padded=spec.page_size_bytes + landmark_bytes(schedule, spec))


def landmark_bytes(schedule: SparsityScheduleConfig, spec) -> int:
    """Bytes of a KV block's landmarks, for the `AttentionSpec` of a layer."""
    pages = spec.block_size // schedule.page_size
    size = schedule.storage_dtype(spec.dtype).itemsize
    return spec.num_kv_heads * pages * schedule.landmarks_per_page * spec.head_size * size


def landmark_view(kv_cache: torch.Tensor, head_size: int, schedule: SparsityScheduleConfig) -> torch.Tensor:
    """Landmarks behind the keys and values of each block of `kv_cache [blocks, kv_heads, block_size, 2 * head_size]`.

    Returns:
        `torch.Tensor` of shape `[blocks, kv_heads, pages, landmarks_per_page, head_size]`, sharing its memory.
    """
    blocks, kv_heads, block_size, width = kv_cache.shape
    dtype = schedule.storage_dtype(kv_cache.dtype)
    shape = (kv_heads, block_size // schedule.page_size, schedule.landmarks_per_page, head_size)
    # Offsets and strides in elements of the landmarks' type.
    ratio = kv_cache.element_size() // dtype.itemsize
    offset = (kv_cache.storage_offset() + kv_heads * block_size * width) * ratio
    strides = (kv_cache.stride(0) * ratio, *(math.prod(shape[axis:]) for axis in (1, 2, 3)), 1)
    return torch.empty(0, dtype=dtype, device=kv_cache.device).set_(
        kv_cache.untyped_storage(), offset, (blocks, *shape), strides
    )


def rebuild_landmarks(worker) -> None:
    """Compute the landmarks of every page in a GPU worker's KV cache, for caches that were filled from outside."""
    from sparrow_attention.paged_landmarks import update_landmarks

    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        keys, _, landmarks = layer.impl.views(layer.kv_cache)
        page_size = layer.impl.state.schedule.page_size
        last = torch.arange(page_size - 1, keys.shape[0] * keys.shape[2], page_size, device=keys.device)
        update_landmarks(keys, landmarks, last)
