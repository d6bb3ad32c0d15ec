"""
The GPU backend's bookkeeping, without a GPU: how a batch is split, what the kernels are given, where landmarks lie.

The kernels themselves are replaced by the reference here; `kernels/tests` compares them with it.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.forward_context import override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from sparrow_attention import page_landmarks, sparse_decode_attention
from sparrow_trl import SparsityScheduleConfig, vllm_backend, vllm_cuda_backend
from sparrow_trl.vllm_backend import BatchLengths, SparseRolloutState


SCHEDULE = SparsityScheduleConfig(
    top_k_pages=[1, 2, 3], bin_tokens=64, dense_layers=[0], layer_top_k_pages={"2": [0, 4]}
)
BLOCK, KV_HEADS, GROUP, HEAD_DIM, LAYERS = 16, 2, 2, 64, 3


def common_metadata(query_lens, seq_lens, blocks=None):
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
    tokens = int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(query_lens),
        num_actual_tokens=tokens,
        max_query_len=max(query_lens),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.arange(len(query_lens) * 40, dtype=torch.int32).view(-1, 40)
        if blocks is None
        else blocks,
        slot_mapping=torch.arange(tokens),
    )


@pytest.fixture
def state():
    return SparseRolloutState(SCHEDULE, max_model_len=640, block_size=BLOCK)


@pytest.fixture
def vllm_config():
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS)),
    )


@pytest.fixture
def builder(state, vllm_config, monkeypatch):
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder,
        "build",
        lambda self, prefix, common, fast_build=False: SimpleNamespace(common=common, fast_build=fast_build),
    )
    builder = object.__new__(vllm_cuda_backend.SparseFlashAttentionMetadataBuilder)
    vars(builder).update(
        state=state,
        vllm_config=vllm_config,
        device=torch.device("cpu"),
        num_heads_q=KV_HEADS * GROUP,
        num_heads_kv=KV_HEADS,
        headdim=HEAD_DIM,
    )
    return builder


class TestBatches:
    def test_decodes_alone_run_no_flash_attention(self, builder, state):
        state.prompt_lengths = lambda common: torch.tensor([100, 20, 7])
        metadata = builder.build(0, common_metadata([1, 1, 1], [101, 20, 300]))
        (rows,) = metadata.decode_rows
        assert metadata.first_prefill_token is None and metadata.fast_build
        assert rows.tokens == slice(0, 3) and rows.seq_lens.tolist() == [101, 20, 300]
        # The second row is the last token of its prompt, found all but one in the prefix cache.
        assert rows.dense_until.tolist() == [100, 20, 7]
        assert state.counted.sparse_tokens == 2

    def test_rows_that_fill_a_graph_up_are_no_tokens(self, builder, state):
        state.prompt_lengths = lambda common: torch.tensor([10, 10])
        metadata = builder.build(0, common_metadata([1, 1, 0, 0], [50, 60, 0, 0]))
        (rows,) = metadata.decode_rows
        assert rows.seq_lens.tolist() == [50, 60, 0, 0] and len(rows.dense_until) == 4
        assert metadata.first_prefill_token is None
        assert state.counted.sparse_tokens == 2

    def test_prompts_go_to_flash_attention_without_the_decodes_before_them(self, builder, state):
        state.prompt_lengths = lambda common: torch.tensor([30, 40, 64, 5])
        metadata = builder.build(0, common_metadata([1, 1, 50, 5], [90, 41, 60, 5]))
        assert metadata.first_prefill_token == 2 and not metadata.fast_build
        (rows,) = metadata.decode_rows
        assert rows.tokens == slice(0, 2) and rows.block_table.shape[0] == 2
        rest = metadata.common
        assert (rest.num_reqs, rest.num_actual_tokens) == (2, 55)
        assert rest.query_start_loc.tolist() == rest.query_start_loc_cpu.tolist() == [0, 50, 55]
        assert rest.seq_lens.tolist() == rest.seq_lens_cpu_upper_bound.tolist() == [60, 5]
        assert rest.block_table_tensor[:, 0].tolist() == [80, 120]
        assert rest.slot_mapping.tolist() == list(range(2, 57))

    def test_tokens_computed_again_are_rows_of_their_own(self, builder, state):
        # The second request was preempted after 11 tokens: 30 of its 41 are prompt, and 8 are in the prefix cache.
        state.prompt_lengths = lambda common: torch.tensor([30, 30])
        metadata = builder.build(0, common_metadata([1, 33], [90, 41]))
        decoded, *recomputed = metadata.decode_rows
        assert decoded.tokens == slice(0, 1)
        assert [len(rows.tokens) for rows in recomputed] == [8, 3]  # steps of at most eight rows
        assert torch.cat([rows.tokens for rows in recomputed]).tolist() == list(range(23, 34))
        assert torch.cat([rows.seq_lens for rows in recomputed]).tolist() == list(range(31, 42))
        assert all((rows.block_table[:, 0] == 40).all() and rows.dense_until is None for rows in recomputed)
        assert state.counted.sparse_tokens == 1 + 11

    def test_dense_rollouts(self, builder, state):
        state.prompt_lengths = lambda common: torch.tensor([30, 30])
        state.dense = True
        metadata = builder.build(0, common_metadata([1, 33], [90, 41]))
        (rows,) = metadata.decode_rows
        assert rows.dense_until.tolist() == [2**31 - 1]
        assert state.counted.sparse_tokens == 0
        state.dense = False
        state.prompt_lengths = lambda common: torch.tensor([30])
        assert builder.build(0, common_metadata([1], [91])).decode_rows[0].dense_until.tolist() == [30]

    def test_unknown_prompts_are_counted_and_kept_dense(self, builder, state):
        metadata = builder.build(0, common_metadata([1, 33], [90, 41]))
        assert len(metadata.decode_rows) == 1
        assert state.counted.unattributed_tokens == 33

    def test_an_index_of_requests_is_followed(self, builder, state):
        # Model runner V2 keeps requests in a table, in another order than the batch.
        prompt_len = torch.tensor([0, 0, 70, 0, 40]).numpy()
        impl = object.__new__(Impl)
        impl.state = state
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=prompt_len))),
            vllm_config=SimpleNamespace(
                compilation_config=SimpleNamespace(static_forward_context={"0": SimpleNamespace(impl=impl)}),
            ),
        )
        assert vllm_backend.attach_sparse_rollout(worker) is state
        common = common_metadata([1, 1, 0], [80, 60, 0]).replace(req_idx=torch.tensor([4, 2]).numpy())
        assert builder.build(0, common).decode_rows[0].dense_until.tolist() == [40, 70, 0]

    def test_lengths_are_copied_only_when_they_change(self, builder, state, monkeypatch):
        state.prompt_lengths = lambda common: torch.tensor([10, 20])
        builder.build(0, common_metadata([1, 1], [50, 60]))
        held = state.decode_buffers.dense_until
        held[0] = -7
        builder.build(0, common_metadata([1, 1], [51, 61]))
        assert held[0] == -7
        state.prompt_lengths = lambda common: torch.tensor([10, 21])
        builder.build(0, common_metadata([1, 1], [52, 62]))
        assert held[:2].tolist() == [10, 21]


def test_what_flash_attention_supports_and_the_kernels_do_not():
    backend, stock = vllm_cuda_backend.SparseFlashAttentionBackend, FlashAttentionBackend
    for supported in (
        lambda cls: cls.supports_dcp(),
        lambda cls: cls.supports_batch_invariance(),
        lambda cls: cls.get_builder_cls().supports_update_block_table,
    ):
        assert supported(stock) and not supported(backend)


class TestSchedules:
    def test_tables_of_all_layers_change_in_place(self, builder, state):
        builder.build(0, common_metadata([1], [50]))
        tables = state.decode_buffers.tables
        address = tables.data_ptr()
        for layer in range(LAYERS):
            assert torch.equal(tables[layer], SCHEDULE.to_table(640, layer=layer))
        other = SparsityScheduleConfig(top_k_pages=[5], bin_tokens=64, dense_layers=[1], sink_pages=2, recent_pages=3)
        state.set_schedule(other)
        assert state.decode_buffers.tables.data_ptr() == address
        for layer in range(LAYERS):
            assert torch.equal(tables[layer], other.to_table(640, layer=layer))
        assert state.decode_buffers.decoder._reserved.tolist() == [2, 3]

    def test_the_page_structure_cannot_change(self):
        # From when vLLM asks how large a block is, before any batch.
        make_cache(SCHEDULE)
        state = SparseRolloutState.newest()
        with pytest.raises(ValueError, match="page_score, landmark_dtype cannot change in a running engine"):
            state.set_schedule(
                SparsityScheduleConfig(top_k_pages=[1], page_score="group_softmax", landmark_dtype="fp8_e4m3")
            )
        assert state.schedule == SCHEDULE

    def test_counters_are_those_of_the_kernels(self, builder, state):
        assert state.counters.kept_pages == 0
        builder.build(0, common_metadata([1], [50]))
        state.decode_buffers.decoder.totals[:, 0, 1] = torch.tensor([3, 4])
        assert (state.counters.kept_pages, state.counters.cached_pages) == (3, 4)
        state.reset_counters()
        assert (state.counters.kept_pages, state.counters.sparse_tokens) == (0, 0)


# Holds what the backend holds weakly.
ENGINES = {}


def make_cache(schedule, dtype=torch.bfloat16, block_size=BLOCK, blocks=200):
    """One layer's KV cache as vLLM allocates it, with the backend's spec."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=dtype)
    engine = SparseRolloutState(schedule, max_model_len=640, block_size=block_size)
    vllm_backend._STATES["cache"] = ENGINES["cache"] = engine
    vllm_backend._newest_engine = "cache"
    padded = vllm_cuda_backend.SparseFlashAttentionBackend.customize_spec(spec)
    assert engine.schedule is schedule
    size = padded.page_size_bytes * blocks
    raw = torch.randint(-100, 100, (size,), dtype=torch.int8)
    tensor = KVCacheTensor(size=size, layers=["0"], layer_stride=size, block_stride=padded.page_size_bytes, offset=0)
    (layout,) = vllm_cuda_backend.SparseFlashAttentionBackend.supported_kv_cache_layouts()
    assert layout is KVCacheLayout.LBHNC
    (view,) = create_kv_cache_views(raw, padded, blocks, layout, tensor, kernel_block_size=block_size)
    return raw, view


@pytest.mark.parametrize("landmark_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(("landmarks_per_page", "block_size"), [(1, 16), (2, 16), (4, 64)])
def test_landmarks_fill_what_is_behind_each_block(landmarks_per_page, block_size, landmark_dtype):
    schedule = SparsityScheduleConfig(
        top_k_pages=[1],
        page_score="group_softmax",
        landmarks_per_page=landmarks_per_page,
        landmark_dtype=landmark_dtype,
    )
    raw, cache = make_cache(schedule, block_size=block_size, blocks=6)
    landmarks = vllm_cuda_backend.landmark_view(cache, HEAD_DIM, schedule)
    assert landmarks.shape == (6, KV_HEADS, block_size // 16, landmarks_per_page, HEAD_DIM)
    before = cache.clone()
    landmarks.copy_(torch.ones(landmarks.shape))
    assert torch.equal(cache.view(torch.int8), before.view(torch.int8))
    # Every byte that is not a key or a value now is a landmark's.
    cache.zero_()
    one = torch.ones((), dtype=landmarks.dtype).view(torch.int8 if landmarks.itemsize == 1 else torch.int16)
    behind = raw.view(6, -1)[:, cache[0].numel() * cache.itemsize :]
    assert (behind.contiguous().view(one.dtype) == one).all()


class Impl(vllm_cuda_backend.SparseFlashAttentionImpl):
    def __init__(self, state):
        self.state, self.head_size, self.num_kv_heads, self.scale = state, HEAD_DIM, KV_HEADS, HEAD_DIM**-0.5
        self._views = self._slots = None


class ReferenceDecoder:
    """Stands in for `PagedDecoder`."""

    def __init__(self, decoder, schedule):
        self.max_rows, self.schedule = decoder.max_rows, schedule

    def __call__(
        self, query, keys, values, block_table, seq_lens, table, landmarks, *, output, dense_until, scale, append
    ):
        if append is not None:
            write_keys(keys, values, *append)
            update_landmarks(keys, landmarks, append[-1])
        num_pages = (seq_lens + self.schedule.page_size - 1) // self.schedule.page_size
        top_k = table[num_pages.clamp(max=len(table) - 1).long()]
        if dense_until is not None:
            top_k = torch.where(seq_lens <= dense_until, num_pages, top_k)
        output.copy_(
            sparse_decode_attention(
                query,
                keys,
                values,
                block_table,
                seq_lens,
                top_k,
                landmarks=landmarks,
                scale=scale,
                **self.schedule.recipe,
            )  # fmt: skip
        )
        return output


def write_keys(keys, values, key, value, slot_mapping):
    for index, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            keys[slot // BLOCK, :, slot % BLOCK], values[slot // BLOCK, :, slot % BLOCK] = key[index], value[index]


def update_landmarks(keys, landmarks, slot_mapping):
    for slot in slot_mapping[slot_mapping % 16 == 15].tolist():
        landmarks[slot // BLOCK, :, 0] = page_landmarks(keys[slot // BLOCK], 1)


@pytest.fixture
def impl(state, monkeypatch):
    """An implementation that runs without a GPU, and `impl.stock_writes`, how often vLLM's own write was called."""
    impl = Impl(state)
    impl.stock_writes = 0

    def stock_write(self, layer, key, value, kv_cache, slot_mapping):
        self.stock_writes += 1
        write_keys(*kv_cache.split(HEAD_DIM, dim=-1), key, value, slot_mapping)

    monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", stock_write)
    monkeypatch.setattr(vllm_cuda_backend, "update_landmarks", update_landmarks)
    return impl


def layer_of(index):
    return SimpleNamespace(layer_name=f"model.layers.{index}.self_attn.attn", kv_cache=None)


@contextlib.contextmanager
def forward_context(layer, metadata):
    """What vLLM's custom operations find the layer's metadata in."""
    context = SimpleNamespace(
        attn_metadata=metadata and {layer.layer_name: metadata},
        no_compile_layers={layer.layer_name: layer},
        slot_mapping={},
    )
    with override_forward_context(context):
        yield


def test_a_step_that_only_decodes_writes_the_cache_itself(builder, state, impl):
    torch.manual_seed(0)
    seq_lens, layer = [300, 64, 0], layer_of(1)  # a page that is not full, one that becomes so, a row that fills up
    state.prompt_lengths = lambda common: torch.tensor([64, 20])
    blocks = torch.randperm(200)[: 3 * 40].view(3, 40).int()
    _, cache = make_cache(SCHEDULE, dtype=torch.float32)
    cache.copy_(torch.randn(cache.shape))
    landmarks = impl.views(cache)[2]
    landmarks.copy_(torch.randn(landmarks.shape))
    common = common_metadata([1, 1, 1], seq_lens, blocks=blocks)
    slots = torch.tensor([blocks[0, 18] * BLOCK + 11, blocks[1, 3] * BLOCK + 15, -1])
    query = torch.randn(3, KV_HEADS * GROUP, HEAD_DIM)
    key, value = torch.randn(2, 3, KV_HEADS, HEAD_DIM)
    metadata = builder.build(0, common)
    state.decode_buffers.decoder = ReferenceDecoder(state.decode_buffers.decoder, SCHEDULE)

    before = cache.clone(), landmarks.clone()
    with forward_context(layer, metadata):
        impl.do_kv_cache_update(layer, key, value, cache, slots)
    assert impl.stock_writes == 0 and torch.equal(cache, before[0]) and torch.equal(landmarks, before[1])
    output = torch.full_like(query, torch.nan)
    impl.forward(layer, query, key, value, cache, metadata, output)
    written = cache.clone(), landmarks.clone()

    # As for a batch that vLLM's own write and the landmark kernel serve.
    cache.copy_(before[0]), landmarks.copy_(before[1])
    with forward_context(layer, None):
        impl.do_kv_cache_update(layer, key, value, cache, slots)
    assert impl.stock_writes == 1 and torch.equal(cache, written[0]) and torch.equal(landmarks, written[1])
    assert (cache != before[0]).sum() == 2 * 2 * KV_HEADS * HEAD_DIM and not torch.equal(landmarks, before[1])
    keys, values, _ = impl.views(cache)
    expected = sparse_decode_attention(
        query, keys, values, blocks, common.seq_lens, torch.tensor([3, 1, 0]), landmarks=landmarks, **SCHEDULE.recipe
    )
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("index", range(LAYERS))
def test_a_mixed_batch_attends_as_its_requests_do_alone(builder, state, impl, monkeypatch, index):
    torch.manual_seed(index)
    layer = layer_of(index)
    # A decode, the last token of a prompt, a prompt, and a request that is computed again from its token 20 on.
    query_lens, seq_lens, prompts = [1, 1, 40, 70], [300, 64, 40, 90], [64, 64, 40, 30]
    state.prompt_lengths = lambda common: torch.tensor(prompts)
    _, cache = make_cache(SCHEDULE, dtype=torch.float32)
    blocks = torch.randperm(200)[: 4 * 40].view(4, 40).int()
    sequences = [torch.randn(2, length, KV_HEADS, HEAD_DIM) for length in seq_lens]

    for row, (keys, values) in enumerate(sequences):
        position = torch.arange(seq_lens[row])
        slots = blocks[row, position // BLOCK] * BLOCK + position % BLOCK
        with forward_context(layer, None):
            impl.do_kv_cache_update(layer, keys, values, cache, slots)

    def attend(query, row, position, sparse):
        num_pages = (position + 16) // 16
        top_k = SCHEDULE.top_k(position + 1, layer=index) if sparse and not SCHEDULE.is_dense_layer(index) else 640
        keys, values, landmarks = impl.views(cache)
        return sparse_decode_attention(
            query[None], keys, values, blocks[row : row + 1], torch.tensor([position + 1]),
            torch.tensor([min(top_k, num_pages)]), landmarks=landmarks, **SCHEDULE.recipe,
        )[0]  # fmt: skip

    def flash(self, layer, query, key, value, kv_cache, metadata, output):
        common = metadata.common
        for request in range(common.num_reqs):
            for token in range(*common.query_start_loc_cpu[request : request + 2].tolist()):
                position = int(common.seq_lens[request] - common.query_start_loc_cpu[request + 1]) + token
                row = int((blocks[:, 0] == common.block_table_tensor[request, 0]).nonzero())
                output[token] = attend(query[token], row, position, sparse=False)

    monkeypatch.setattr(FlashAttentionImpl, "forward", flash)
    metadata = builder.build(0, common_metadata(query_lens, seq_lens, blocks=blocks))
    state.decode_buffers.decoder = ReferenceDecoder(state.decode_buffers.decoder, SCHEDULE)
    query = torch.randn(sum(query_lens), KV_HEADS * GROUP, HEAD_DIM)
    output = torch.full_like(query, torch.nan)
    assert impl.forward(layer, query, query, query, cache, metadata, output) is output

    token = 0
    for row, (query_len, seq_len, prompt) in enumerate(zip(query_lens, seq_lens, prompts, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            expected = attend(query[token], row, position, sparse=position >= prompt)
            torch.testing.assert_close(output[token], expected, rtol=1e-4, atol=1e-5)
            token += 1


def test_tokens_past_the_prompt():
    lengths = BatchLengths(*(np.array(x) for x in ([0, 1, 2], [1, 1, 9], [5, 6, 9], [1, 6, 4])))
    tokens, requests, seq_lens = lengths.sparse_tokens()
    assert tokens.tolist() == [0, 6, 7, 8, 9, 10] and requests.tolist() == [0] + [2] * 5
    assert seq_lens.tolist() == [5, 5, 6, 7, 8, 9]
