"""Block-sparse decode attention on a GPU, as a vLLM attention backend.

FlashAttention reads prompts. The tokens past them are decoded by the Triton kernels of `sparrow_attention`, from
FlashAttention's own cache and in every layer: which layers are dense, and all budgets, are data on the device, so that
a captured CUDA graph serves every schedule of the page structure that the engine was built for.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from sparrow_attention.paged_decode import PagedDecoder, check_decoder
from sparrow_attention.paged_landmarks import update_landmarks

from .schedule import SparsityScheduleConfig
from .vllm_backend import BatchLengths, SparseDecodeMixin, SparseRolloutState, attention_layers


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
        num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        table = state.schedule.to_table(state.max_model_len)
        # One row per layer: which layers are dense may change without a new capture, too.
        self.tables = torch.empty((num_layers, len(table)), dtype=torch.int32, device=device)
        self.dense_until = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._dense_until = np.zeros(max_rows, dtype=np.int32)
        self.set_schedule(state.schedule)

    def set_schedule(self, schedule: SparsityScheduleConfig) -> None:
        """Use `schedule` from the next step on."""
        tables = [schedule.to_table(self.max_model_len, layer=layer) for layer in range(len(self.tables))]
        self.tables.copy_(torch.stack(tables))
        self.decoder.set_reserved(schedule.sink_pages, schedule.recent_pages)

    def hold_dense_until(self, lengths: np.ndarray) -> torch.Tensor:
        """The length up to which each row keeps all pages, on the device. Copied only when it changes."""
        rows = len(lengths)
        if not np.array_equal(lengths, self._dense_until[:rows]):
            self._dense_until[:rows] = lengths
            # From ordinary memory, which the driver reads before it returns: the next step may overwrite it.
            self.dense_until[:rows].copy_(torch.from_numpy(self._dense_until[:rows]), non_blocking=True)
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

    # The kernels expect all of a row's keys in one cache.
    supports_dcp = False

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
        # Slots of the step's keys and values, where they are still to be written.
        self._slots = None

    def views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values, and the landmarks that lie behind them in each block, as views of the cache.

        Shapes are `[blocks, kv_heads, block_size, head_dim]` twice and
        `[blocks, kv_heads, pages, landmarks_per_page, head_dim]`.
        """
        # The views keep their memory alive, so another cache has another address.
        if self._views is None or self._views[0].data_ptr() != kv_cache.data_ptr():
            keys, values = kv_cache.split(self.head_size, dim=-1)
            self._views = (keys, values, landmark_view(kv_cache, self.head_size, self.state.schedule))
        return self._views

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        attn_metadata, *_ = get_attention_context(layer.layer_name)
        # Where all rows are decoded, their decode step writes the cache: a launch less, in every layer.
        self._slots = slot_mapping if getattr(attn_metadata, "first_prefill_token", 0) is None else None
        if self._slots is None:
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
        table = buffers.tables[extract_layer_index(layer.layer_name)]
        for rows in decode_rows:
            in_place = isinstance(rows.tokens, slice)
            row_query = query[rows.tokens]
            append = None
            if start is None:
                append = (key[rows.tokens], value[rows.tokens], self._slots[rows.tokens])
            attended = buffers.decoder(
                row_query,
                keys,
                values,
                rows.block_table,
                rows.seq_lens,
                table,
                landmarks,
                output=output[rows.tokens] if in_place else torch.empty_like(row_query),
                dense_until=rows.dense_until,
                scale=self.scale,
                append=append,
            )
            if not in_place:
                output[rows.tokens] = attended
        return output


class SparseFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """Splits a batch into tokens that are decoded and prompts that FlashAttention reads."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    # The stock update would leave the decoded rows with the block table of another group of layers.
    supports_update_block_table = False

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
        several = lengths.query_lens > 1
        decodes = int(several.argmax()) if several.any() else common.num_reqs
        rows = []
        if decodes:
            until = np.full(decodes, 2**31 - 1) if state.dense else lengths.prompt_lengths[:decodes]
            rows.append(
                DecodeRows(
                    slice(0, decodes),
                    common.block_table_tensor[:decodes],
                    common.seq_lens[:decodes],
                    state.decode_buffers.hold_dense_until(until),
                )
            )
        if decodes == common.num_reqs:
            # No layer runs FlashAttention, so its schedule need not be made.
            metadata = super().build(0, common, fast_build=True)
            metadata.first_prefill_token = None
            past_prompt = (lengths.seq_lens > lengths.prompt_lengths) & (lengths.query_lens > 0)
            num_sparse = int(np.count_nonzero(past_prompt))
        else:
            metadata = super().build(0, _without_decodes(common, decodes), fast_build)
            metadata.first_prefill_token = decodes
            tokens, requests, seq_lens = lengths.sparse_tokens()
            num_sparse = len(tokens)
            # Within longer runs they are what vLLM computes again after a preemption.
            again = requests >= decodes
            if again.any() and not state.dense:
                rows += self._recomputed_rows(common, tokens[again], requests[again], seq_lens[again])
        if not state.dense:
            state.counted.sparse_tokens += num_sparse
        metadata.decode_rows = rows
        return metadata

    def _recomputed_rows(self, common, *tokens: np.ndarray) -> list[DecodeRows]:
        """Rows, in steps that fit the decoder, of tokens whose index, request and length are given on the host."""
        max_rows = self.state.decode_buffers.decoder.max_rows
        steps = zip(*(torch.from_numpy(x).to(self.device).split(max_rows) for x in tokens), strict=True)
        return [DecodeRows(index, common.block_table_tensor[row], length.int()) for index, row, length in steps]


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
    def supports_batch_invariance(cls) -> bool:
        return False  # how a row's pages are split, and so how its result is rounded, depends on the rows beside it

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
        state = SparseRolloutState.newest()
        state.layout_is_fixed = True
        return replace(spec, page_size_padded=spec.page_size_bytes + landmark_bytes(state.schedule, spec))


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
    for layer in attention_layers(worker.vllm_config).values():
        keys, _, landmarks = layer.impl.views(layer.kv_cache)
        page_size = layer.impl.state.schedule.page_size
        last = torch.arange(page_size - 1, keys.shape[0] * keys.shape[2], page_size, device=keys.device)
        update_landmarks(keys, landmarks, last)
