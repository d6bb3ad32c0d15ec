import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_batch import KERNEL_DTYPES, SHAPE_DTYPES, arrange_cache, exact_page_scores, excess, make_batch


ON_GPU = torch.cuda.is_available()
RECIPES = [("mean_query", 1), ("group_softmax", 1), ("group_softmax", 2), ("group_softmax", 4)]

# Scores are float32 sums: where the last page kept and the first one dropped are closer than this, in units of the
# row's largest score, either choice is right.
CLOSE_SCORES = 1e-5


@pytest.fixture(autouse=True)
def few_programs(request, monkeypatch):
    """The interpreter runs programs one by one, so it gets only as many as make some rows split."""
    if not ON_GPU and "triton_kernels" in request.fixturenames:
        kernels = request.getfixturevalue("triton_kernels")
        monkeypatch.setattr(kernels.paged_attention, "PROGRAMS", 8)


def make_decoder(kernels, batch, *, max_rows=None, max_tokens=None, **recipe):
    """A decoder for the batch whose scratch holds NaN."""
    rows, q_heads, head_dim = batch.query.shape
    decoder = kernels.paged_decode.PagedDecoder(
        max_rows=max_rows or rows,
        max_tokens=max_tokens or max(batch.seq_lens.tolist()),
        q_heads=q_heads,
        kv_heads=batch.key_cache.shape[1],
        head_dim=head_dim,
        device=batch.query.device,
        **recipe,
    )
    for buffer in vars(decoder).values():
        if isinstance(buffer, torch.Tensor) and buffer.is_floating_point():
            buffer.fill_(torch.nan)
    return decoder


def landmarks_of(sparrow_attention, batch, page_size=16, landmarks_per_page=1, dtype=None):
    """By the reference, on the batch's device; those of partial pages are NaN."""
    landmarks = sparrow_attention.page_landmarks(
        batch.key_cache.cpu().unflatten(2, (-1, page_size)), landmarks_per_page, dtype
    )
    return landmarks.to(batch.query.device)


def device_table(batch, table):
    return torch.tensor(table, dtype=torch.int32, device=batch.query.device)


def reference_kept(sparrow_attention, batch, table, landmarks, page_size=16, dense_until=None, **recipe):
    """
    Pages that the reference keeps, `[rows, kv_heads, pages]`, of float32 inputs, and whether each row's choice is
    clear, `[rows, kv_heads]`.
    """
    query, key_cache, value_cache, block_table, seq_lens = (tensor.cpu() for tensor in batch.tensors)
    num_pages = -(-seq_lens // page_size)
    top_k = torch.tensor(table)[num_pages.clamp(max=len(table) - 1).long()]
    if dense_until is not None:
        top_k = torch.where(seq_lens <= dense_until, num_pages, top_k)
    _, kept = sparrow_attention.sparse_decode_attention(
        query.float(),
        key_cache.float(),
        value_cache.float(),
        block_table,
        seq_lens,
        top_k,
        page_size=page_size,
        landmarks=landmarks.cpu(),
        return_kept=True,
        **recipe,
    )
    rows, kv_heads, _ = kept.shape
    group = query.shape[1] // kv_heads
    pages_per_block = landmarks.shape[2]
    sink, recent = recipe.get("sink_pages", 1), recipe.get("recent_pages", 2)
    clear = torch.ones(rows, kv_heads, dtype=torch.bool)
    for row, head in np.ndindex(rows, kv_heads):
        page = torch.arange(sink, max(sink, int(num_pages[row]) - recent))
        if not 0 < top_k[row] < len(page):
            continue
        row_landmarks = landmarks.cpu()[block_table[row, page // pages_per_block], head, page % pages_per_block]
        scores = exact_page_scores(
            query[row, head * group : (head + 1) * group].float(),
            row_landmarks.float(),
            recipe.get("page_score", "mean_query"),
        )
        best = np.sort(scores)[::-1]
        gap = best[top_k[row] - 1] - best[top_k[row]]
        clear[row, head] = bool(gap == 0 or gap > CLOSE_SCORES * np.abs(scores).max())
    return kept, clear


def check_step(sparrow_attention, decoder, batch, table, landmarks, page_size=16, dense_until=None, **recipe):
    """
    One step against the reference's kept pages and attention in double precision over them; returns the output and
    how many pages each row and head kept.
    """
    kept, clear = reference_kept(sparrow_attention, batch, table, landmarks, page_size, dense_until, **recipe)
    assert clear.all(), "choose another seed"
    before = decoder.totals.clone()
    output = torch.full_like(batch.query, torch.nan)
    returned = decoder(
        *batch.tensors,
        device_table(batch, table),
        landmarks,
        output=output,
        dense_until=None if dense_until is None else dense_until.to(batch.query.device),
    )
    assert returned is output
    pages = [[head.nonzero().flatten().tolist() for head in row] for row in kept]
    assert excess(output, batch, pages, page_size) < 1
    counted = (decoder.totals - before).cpu()[:, : len(kept)]
    counts = kept.sum(-1)
    seq_lens = batch.seq_lens.cpu()
    sparse = seq_lens > (0 if dense_until is None else dense_until)
    assert torch.equal(counted[0], counts * sparse[:, None])
    assert torch.equal(counted[1], (-(-seq_lens // page_size) * sparse)[:, None].expand_as(counts))
    return output, counts


@pytest.mark.parametrize(("page_score", "landmarks_per_page"), RECIPES)
@pytest.mark.parametrize("dtype", SHAPE_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "pages_per_block", "layout"),
    [
        (64, 2, 16, 1, "packed"),
        (128, 5, 16, 2, "separate"),
        (80, 3, 32, 1, "packed_token_major"),
        (256, 1, 64, 2, "packed"),
    ],
)
def test_equal_to_the_reference(
    sparrow_attention,
    triton_kernels,
    device,
    head_dim,
    group,
    page_size,
    pages_per_block,
    layout,
    dtype,
    page_score,
    landmarks_per_page,
):
    lengths = [page_size * 9 + 5, 0, page_size * 12 - 1]
    batch = make_batch(
        lengths,
        head_dim=head_dim,
        group=group,
        page_size=page_size,
        pages_per_block=pages_per_block,
        dtype=dtype,
        seed=head_dim,
    ).placed(device, layout)
    recipe = {"page_score": page_score, "landmarks_per_page": landmarks_per_page}
    landmarks = landmarks_of(sparrow_attention, batch, page_size, landmarks_per_page)
    decoder = make_decoder(triton_kernels, batch, page_size=page_size, **recipe)
    _, counts = check_step(
        sparrow_attention, decoder, batch, [pages // 4 for pages in range(20)], landmarks, page_size, **recipe
    )
    assert counts[:, 0].tolist() == [5, 0, 6]


@pytest.mark.parametrize(("page_score", "landmarks_per_page"), [RECIPES[0], RECIPES[2]])
def test_rows_that_several_programs_score(sparrow_attention, triton_kernels, device, page_score, landmarks_per_page):
    # Of 282, 131 and 20 pages: three programs, or more, two and one.
    batch = make_batch([4501, 2090, 320], kv_heads=1, head_dim=64, dtype=torch.float16, seed=12).placed(device)
    recipe = {"page_score": page_score, "landmarks_per_page": landmarks_per_page}
    landmarks = landmarks_of(sparrow_attention, batch, 16, landmarks_per_page)
    decoder = make_decoder(triton_kernels, batch, **recipe)
    for top_k in (9, 60):  # the second time, what the first has left
        _, counts = check_step(sparrow_attention, decoder, batch, [top_k], landmarks, **recipe)
        assert counts[:, 0].tolist() == [top_k + 3, top_k + 3, min(top_k + 3, 20)]


@pytest.mark.skipif(not ON_GPU, reason="too long for Triton's interpreter")
@pytest.mark.parametrize(("page_score", "landmarks_per_page"), [RECIPES[0], RECIPES[2]])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_long_rows(sparrow_attention, triton_kernels, device, dtype, page_score, landmarks_per_page):
    lengths = [40960, 40945, 30000, 16385, 16384, 8193, 5000, 1000, 100]
    batch = make_batch(lengths, head_dim=128, dtype=dtype, seed=1).placed(device)
    recipe = {"page_score": page_score, "landmarks_per_page": landmarks_per_page}
    landmarks = landmarks_of(sparrow_attention, batch, 16, landmarks_per_page)
    decoder = make_decoder(triton_kernels, batch, **recipe)
    table = [2 + pages // 8 for pages in range(2561)]
    # Where thousands of pages compete, the last one kept and the first one dropped may be close.
    kept, clear = reference_kept(sparrow_attention, batch, table, landmarks, **recipe)
    assert clear.float().mean() > 0.6
    output = decoder(
        *batch.tensors, device_table(batch, table), landmarks, output=torch.full_like(batch.query, torch.nan)
    )
    assert torch.equal(decoder.totals[0].cpu(), kept.sum(-1))
    clear_rows = clear.all(-1)
    output[~clear_rows.to(device)] = 0
    batch.seq_lens[~clear_rows.to(device)] = 0
    pages = [[head.nonzero().flatten().tolist() for head in row] for row in kept]
    assert excess(output, batch, pages, 16) < 1


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_ties_and_float8_landmarks(sparrow_attention, triton_kernels, device, page_score):
    batch = make_batch([300, 275], head_dim=64, group=3, dyadic=True, dtype=torch.float16, seed=2).placed(device)
    decoder = make_decoder(triton_kernels, batch, page_score=page_score)
    for dtype in (torch.float16, torch.float8_e4m3fn):
        landmarks = landmarks_of(sparrow_attention, batch, dtype=dtype)
        _, counts = check_step(sparrow_attention, decoder, batch, [5], landmarks, page_score=page_score)
        assert (counts == 8).all()


def test_one_decoder_for_changing_steps(sparrow_attention, triton_kernels, device):
    # Rows come and go, layers have tables of their own, the schedule changes: nothing of a step is left in the next.
    decoder = None
    steps = [
        ([300, 20, 160], [4], (1, 2)),
        ([301, 310], [1, 2, 3, 4, 5, 6, 7, 8], (1, 2)),
        ([16], [0], (1, 2)),
        ([320, 0, 319], [100], (1, 2)),
        ([300, 20, 160], [2], (0, 5)),
        ([300], [3], (2, 1)),
    ]
    for seed, (lengths, table, (sink_pages, recent_pages)) in enumerate(steps):
        batch = make_batch(lengths, head_dim=64, dtype=torch.float16, seed=seed).placed(device)
        decoder = decoder or make_decoder(triton_kernels, batch, max_rows=3, max_tokens=320)
        decoder.set_reserved(sink_pages, recent_pages)
        landmarks = landmarks_of(sparrow_attention, batch)
        check_step(
            sparrow_attention, decoder, batch, table, landmarks, sink_pages=sink_pages, recent_pages=recent_pages
        )


def test_rows_up_to_dense_until_are_dense_and_not_counted(sparrow_attention, triton_kernels, device):
    batch = make_batch([160, 161, 300, 0, 300], head_dim=64, dtype=torch.float16, seed=3).placed(device)
    dense_until = torch.tensor([160, 160, 400, 50, 0], dtype=torch.int32)
    decoder = make_decoder(triton_kernels, batch)
    landmarks = landmarks_of(sparrow_attention, batch)
    _, counts = check_step(sparrow_attention, decoder, batch, [3], landmarks, dense_until=dense_until)
    assert counts[:, 0].tolist() == [10, 6, 19, 0, 6]
    assert decoder.totals[0, :, 0].tolist() == [0, 6, 0, 0, 6]
    assert decoder.totals[1, :, 0].tolist() == [0, 11, 0, 0, 19]


def test_decoding_token_by_token(sparrow_attention, triton_kernels, device):
    # Landmarks as the kernel writes them when keys arrive: first those of the prompts, then a token per row and step.
    final = make_batch([83, 147], head_dim=64, pages_per_block=2, dtype=torch.float16, seed=4).placed(device)
    update_landmarks = triton_kernels.paged_landmarks.update_landmarks
    blocks, kv_heads, _, head_dim = final.key_cache.shape
    landmarks = torch.full((blocks, kv_heads, 2, 1, head_dim), torch.nan, dtype=torch.float16, device=device)

    def slot(row, position):
        return int(final.block_table[row, position // 32]) * 32 + position % 32

    def update(positions):
        slots = [slot(row, position) for row, row_positions in enumerate(positions) for position in row_positions]
        update_landmarks(final.key_cache, landmarks, torch.tensor(slots, device=device))

    decoder = make_decoder(triton_kernels, final)
    update([range(78), range(142)])
    for step in range(6):
        lengths = [78 + step, 142 + step]
        if step:
            update([[length - 1] for length in lengths])
        final.seq_lens.copy_(torch.tensor(lengths))
        expected = landmarks_of(sparrow_attention, final)
        complete = [
            (int(final.block_table[row, page // 2]), page % 2)
            for row in range(2)
            for page in range(lengths[row] // 16)
        ]
        written = torch.zeros(blocks, 2, dtype=torch.bool)
        for block, place in complete:
            written[block, place] = True
            assert torch.equal(landmarks[block, :, place], expected[block, :, place])
        assert torch.equal(landmarks.isnan().all(-1).all(-1).all(1).cpu(), ~written)
        if step in (0, 5):
            check_step(sparrow_attention, decoder, final, [2], landmarks)


@pytest.mark.parametrize(
    ("page_size", "pages_per_block", "layout", "head_dim", "landmarks_per_page", "landmark_dtype"),
    [
        (16, 1, "packed", 64, 1, None),
        # Triton's interpreter does not round to float8 as a GPU does.
        (16, 2, "separate", 80, 2, torch.float8_e4m3fn if ON_GPU else None),
        (32, 1, "packed_token_major", 64, 4, None),
    ],
)
def test_a_step_that_writes_the_cache_equals_one_that_finds_it_written(
    sparrow_attention,
    triton_kernels,
    device,
    page_size,
    pages_per_block,
    layout,
    head_dim,
    landmarks_per_page,
    landmark_dtype,
):
    # One page is completed by its row's new token, others have just begun, and the rows of length 0 have no token.
    lengths = [page_size * 9, page_size * 9 - 1, 0, page_size * 10 + 1, 1]
    final = make_batch(
        lengths,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_block=pages_per_block,
        dtype=torch.float16,
        seed=11,
    ).placed(device, layout)
    recipe = {"landmarks_per_page": landmarks_per_page}
    if landmarks_per_page > 1:
        recipe["page_score"] = "group_softmax"
    expected_landmarks = landmarks_of(sparrow_attention, final, page_size, landmarks_per_page, landmark_dtype)
    table = device_table(final, [2])
    expected = make_decoder(triton_kernels, final, page_size=page_size, **recipe)(
        *final.tensors, table, expected_landmarks, output=torch.full_like(final.query, torch.nan)
    )

    # As when one projection makes queries, keys and values.
    rows, kv_heads = len(lengths), final.key_cache.shape[1]
    new = torch.full((rows, 3 * kv_heads, head_dim), torch.nan, dtype=torch.float16, device=device)
    key, value = new[:, kv_heads : 2 * kv_heads], new[:, 2 * kv_heads :]
    slots = torch.full((rows,), -1, device=device)
    key_cache, value_cache = arrange_cache(final.key_cache.clone(), final.value_cache.clone(), layout)
    landmarks = expected_landmarks.clone()
    block_size = page_size * pages_per_block
    for row, length in enumerate(lengths):
        if not length:
            continue
        block, offset = int(final.block_table[row, (length - 1) // block_size]), (length - 1) % block_size
        slots[row] = block * block_size + offset
        key[row], value[row] = final.key_cache[block, :, offset], final.value_cache[block, :, offset]
        key_cache[block, :, offset] = value_cache[block, :, offset] = torch.nan
        page = offset // page_size
        if length % page_size:
            expected_landmarks[block, :, page] = landmarks[block, :, page] = 7  # stays
        else:
            landmarks[block, :, page] = torch.nan
    output = make_decoder(triton_kernels, final, page_size=page_size, **recipe)(
        final.query,
        key_cache,
        value_cache,
        *final.tensors[3:],
        table,
        landmarks,
        output=torch.full_like(final.query, torch.nan),
        append=(key, value, slots),
    )
    assert torch.equal(output, expected)
    for written, want in (
        (key_cache, final.key_cache),
        (value_cache, final.value_cache),
        (landmarks.float(), expected_landmarks.float()),
    ):
        # Nothing else was written.
        assert torch.equal(written.nan_to_num(7e4), want.nan_to_num(7e4))


def test_queries_and_outputs_inside_larger_tensors(sparrow_attention, triton_kernels, device):
    # As when one projection makes queries, keys and values.
    batch = make_batch([70, 241], head_dim=64, dtype=torch.float16, seed=5).placed(device)
    landmarks, table = landmarks_of(sparrow_attention, batch), device_table(batch, [3])
    expected = make_decoder(triton_kernels, batch)(
        *batch.tensors, table, landmarks, output=torch.full_like(batch.query, torch.nan)
    )
    fused = torch.full((2, 8, 64), torch.nan, dtype=torch.float16, device=device)
    fused[:, 2:6] = batch.query
    around = torch.full((2, 6, 80), 7.0, dtype=torch.float16, device=device)
    make_decoder(triton_kernels, batch)(
        fused[:, 2:6], *batch.tensors[1:], table, landmarks, output=around[:, 1:5, :64]
    )
    assert torch.equal(around[:, 1:5, :64], expected)
    around[:, 1:5, :64] = 7
    assert (around == 7).all()


def test_scale(sparrow_attention, triton_kernels, device):
    # Of the attention alone: pages are scored with the scale that the recipe says.
    batch = make_batch([300], head_dim=64, dtype=torch.float16, seed=6).placed(device)
    landmarks = landmarks_of(sparrow_attention, batch)
    kept, clear = reference_kept(sparrow_attention, batch, [4], landmarks, page_score="group_softmax")
    assert clear.all()
    output = make_decoder(triton_kernels, batch, page_score="group_softmax")(
        *batch.tensors, device_table(batch, [4]), landmarks, output=torch.full_like(batch.query, torch.nan), scale=0.7
    )
    pages = [[head.nonzero().flatten().tolist() for head in row] for row in kept]
    assert excess(output, batch, pages, 16, scale=0.7) < 1
    assert excess(output, batch, pages, 16) > 10


def test_a_page_with_broken_keys_shows_in_the_output(sparrow_attention, triton_kernels, device):
    batch = make_batch([200, 200], head_dim=64, dtype=torch.float16, seed=7).placed(device)
    batch.key_cache[batch.block_table[0, 4].item(), 0, 3] = torch.nan
    for page_score in ("mean_query", "group_softmax"):
        output = make_decoder(triton_kernels, batch, page_score=page_score)(
            *batch.tensors,
            device_table(batch, [1]),
            landmarks_of(sparrow_attention, batch),
            output=torch.zeros_like(batch.query),
        )
        assert output[0, :2].isnan().all() and output[0, 2:].isfinite().all() and output[1].isfinite().all()


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_two_runs_give_the_same_bits(sparrow_attention, triton_kernels, device, page_score):
    lengths = [300, 17, 160] * (20 if ON_GPU else 1)
    batch = make_batch(lengths, head_dim=64, dtype=torch.float16, seed=8).placed(device)
    landmarks, table = landmarks_of(sparrow_attention, batch), device_table(batch, [4])
    decoder = make_decoder(triton_kernels, batch, page_score=page_score)
    first, second = (
        decoder(*batch.tensors, table, landmarks, output=torch.full_like(batch.query, torch.nan)) for _ in range(2)
    )
    assert torch.equal(first, second) and first.isfinite().all()


def test_a_step_without_rows(sparrow_attention, triton_kernels, device):
    batch = make_batch([40], head_dim=64, dtype=torch.float16).placed(device)
    decoder = make_decoder(triton_kernels, batch)
    none = [tensor[:0] if tensor.shape[0] == 1 else tensor for tensor in batch.tensors]
    output = decoder(
        none[0],
        batch.key_cache,
        batch.value_cache,
        *none[3:],
        device_table(batch, [1]),
        landmarks_of(sparrow_attention, batch),
        output=torch.zeros_like(none[0]),
    )
    assert output.shape == (0, 4, 64) and not decoder.totals.any()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("copies", [8, 1], ids=["more programs than run at once", "all programs at once"])
def test_launches_that_overlap_give_the_same_bits(sparrow_attention, triton_kernels, device, monkeypatch, copies):
    # Long rows to choose from and little to attend to: whoever did not wait would read what is not there yet.
    lengths = [20000, 0, 19000, 16, 40, 12345] * copies
    batch = make_batch(lengths, head_dim=128, dtype=torch.bfloat16, seed=13).placed(device)
    landmarks, table = landmarks_of(sparrow_attention, batch), device_table(batch, [4])
    monkeypatch.setenv("SPARROW_ATTENTION_OVERLAP", "0")
    apart = make_decoder(triton_kernels, batch)
    monkeypatch.delenv("SPARROW_ATTENTION_OVERLAP")
    overlapping = make_decoder(triton_kernels, batch)
    assert apart._signals is None
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("launches overlap from Hopper on")
    expected = apart(*batch.tensors, table, landmarks, output=torch.full_like(batch.query, torch.nan))
    for _ in range(20):
        overlapping._kept.zero_()
        overlapping._counts.zero_()
        overlapping._partial_output.fill_(torch.nan)
        output = torch.full_like(batch.query, torch.nan)
        assert torch.equal(overlapping(*batch.tensors, table, landmarks, output=output), expected)
        # A launch that begins before the first one of its step has written anything must find all counters at zero.
        assert not overlapping._signals.any() and not overlapping._arrived.any()


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_a_cuda_graph_follows_all_that_changes(sparrow_attention, triton_kernels, device, page_score):
    rows, max_tokens = 6, 2000
    steps = [
        ([40, 1, 17, 0, 0, 0], [1], [0] * rows, (1, 2)),  # what is captured
        ([2000, 1999, 500, 33, 1, 800], [4], [0] * rows, (1, 2)),
        ([2000, 1999, 500, 33, 1, 800], [20], [0, 2000, 0, 0, 0, 0], (1, 2)),
        ([0, 0, 1200, 1201, 0, 64], [6], [0] * rows, (0, 5)),
    ]
    longest = make_batch([max_tokens] * rows, head_dim=64, dtype=torch.bfloat16, seed=9).placed(device)
    decoder = make_decoder(triton_kernels, longest, max_tokens=max_tokens, page_score=page_score)
    landmarks = torch.zeros_like(landmarks_of(sparrow_attention, longest))
    query, key_cache, value_cache, block_table, seq_lens = longest.tensors
    output = torch.empty_like(query)
    table, dense_until = device_table(longest, [1] * 200), device_table(longest, [0] * rows)

    def step():
        decoder(*longest.tensors, table, landmarks, output=output, dense_until=dense_until)

    def load(index):
        lengths, top_k, dense, reserved = steps[index]
        batch = make_batch(lengths, head_dim=64, dtype=torch.bfloat16, seed=10 + index).placed(device)
        blocks = batch.key_cache.shape[0]
        query.copy_(batch.query)
        for cache, new in ((key_cache, batch.key_cache), (value_cache, batch.value_cache)):
            cache.fill_(torch.nan)[:blocks] = new
        landmarks.fill_(torch.nan)[:blocks] = landmarks_of(sparrow_attention, batch)
        block_table.fill_(-1)[:, : batch.block_table.shape[1]] = batch.block_table
        seq_lens.copy_(batch.seq_lens)
        table.fill_(top_k[0])
        dense_until.copy_(torch.tensor(dense))
        decoder.set_reserved(*reserved)

    load(0)
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    outputs = []
    for index in range(len(steps)):
        load(index)
        decoder.totals.zero_()
        output.fill_(torch.nan)
        graph.replay()
        replayed, totals = output.clone(), decoder.totals.clone()
        decoder.totals.zero_()
        output.fill_(torch.nan)
        step()
        assert output.isfinite().all() and torch.equal(replayed, output)
        assert totals.any() and torch.equal(totals, decoder.totals)
        outputs.append(replayed)
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "64, 80, 96, 128, 256.*got 72"),
        ({"q_heads": 34}, "At most 16 query heads may share a kv head, got"),
        ({"q_heads": 5}, "must be a multiple of the number of kv heads, got 5 and 2"),
        ({"page_size": 128}, "`page_size` must be at most 64.*got 128"),
        ({"page_size": 24}, "`page_size` must be a power of two, at least 16, got 24"),
        ({"max_tokens": 8192 * 16 + 1}, "up to 131072 tokens.*got .*131073"),
        ({"max_tokens": 8192 * 64 + 1, "page_size": 64}, "up to 524288 tokens.*got .*524289"),
        ({"page_score": "quest"}, "`page_score` must be one of .* got 'quest'"),
        ({"landmarks_per_page": 2}, "scores one landmark per page, got 2"),
        ({"landmarks_per_page": 3, "page_score": "group_softmax"}, r"one of \(1, 2, 4\), got 3"),
        ({"sink_pages": -1}, "`sink_pages` must be at least 0, got -1"),
        ({"recent_pages": 0}, "`recent_pages` must be at least 1, got 0"),
    ],
)
def test_refuses_shapes_without_kernels(triton_kernels, change, message):
    arguments = {"max_rows": 1, "max_tokens": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 64}
    triton_kernels.paged_decode.PagedDecoder(**arguments)
    with pytest.raises(ValueError, match=message):
        triton_kernels.paged_decode.PagedDecoder(**{**arguments, **change})


def test_refuses_steps_that_do_not_fit(sparrow_attention, triton_kernels, device):
    batch = make_batch([40, 60], head_dim=64, dtype=torch.float16).placed(device)
    names = ("query", "key_cache", "value_cache", "block_table", "seq_lens")
    arguments = dict(zip(names, batch.tensors, strict=True))
    arguments |= {
        "top_k_table": device_table(batch, [1]),
        "landmarks": landmarks_of(sparrow_attention, batch),
        "output": torch.zeros_like(batch.query),
    }
    make_decoder(triton_kernels, batch)(**arguments)
    new, slots = batch.key_cache[:2, :, 0], torch.tensor([-1, -1], device=device)
    for change, message in (
        ({"output": arguments["output"][:1]}, r"`output` must have shape .* = \[2, 4, 64\], got \[1, 4, 64\]"),
        ({"seq_lens": batch.seq_lens[:1]}, r"`seq_lens` must have shape \[rows\] = \[2\], got \[1\]"),
        ({"block_table": batch.block_table[:1]}, r"`block_table` must have shape \[rows, max_blocks\] = \[2, \?\]"),
        ({"key_cache": batch.key_cache.contiguous()}, "`key_cache` and `value_cache` must have the same strides"),
        ({"query": batch.query.transpose(1, 2).contiguous().transpose(1, 2)}, "last axis must be contiguous"),
        ({"append": (new[:1], new, slots)}, r"`key` must have shape .* = \[2, 2, 64\], got \[1, 2, 64\]"),
        ({"append": (new, new[..., :32], slots)}, r"`value` must have shape .* = \[2, 2, 64\], got \[2, 2, 32\]"),
        ({"append": (new, new, slots[:1])}, r"`slot_mapping` must have shape \[rows\] = \[2\], got \[1\]"),
        ({"append": (new, new, slots.float())}, "`slot_mapping` must hold integers, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            make_decoder(triton_kernels, batch)(**{**arguments, **change})
    with pytest.raises(ValueError, match="A step of 2 rows does not fit in the decoder's 1"):
        make_decoder(triton_kernels, batch, max_rows=1)(**arguments)


@pytest.mark.parametrize("launch", ["choose_pages", "attend_to_kept_pages"])
def test_an_interrupted_step_leaves_no_signal(sparrow_attention, triton_kernels, device, monkeypatch, launch):
    batch = make_batch([100, 60], head_dim=64, dtype=torch.float16).placed(device)
    decoder = make_decoder(triton_kernels, batch)
    decoder._signals = torch.full((2, 2, 2), 1, dtype=torch.int32, device=device)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    if not ON_GPU:  # where launches do not overlap
        monkeypatch.setattr(triton_kernels.paged_decode, "choose_pages", lambda *args, **kwargs: None)
    monkeypatch.setattr(triton_kernels.paged_decode, launch, interrupt)
    landmarks = landmarks_of(sparrow_attention, batch)
    with pytest.raises(KeyboardInterrupt):
        decoder(*batch.tensors, device_table(batch, [1]), landmarks, output=torch.empty_like(batch.query))
    assert not decoder._signals.any()


def test_the_kernels_are_interpreted_where_there_is_no_gpu(triton_kernels, device):
    # Else the tests would compare nothing, or everything with itself.
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    functions = [value for module in vars(triton_kernels).values() for value in vars(module).values()]
    kernels = [value for value in functions if hasattr(value, "fn") and value.__name__.endswith("_kernel")]
    assert len(kernels) >= 4
    for function in (*kernels, tl.sum, tl.cumsum):
        assert isinstance(function, InterpretedFunction) == (device == "cpu")


def test_exported_on_first_use(sparrow_attention, triton_kernels):
    assert sparrow_attention.PagedDecoder is triton_kernels.paged_decode.PagedDecoder
    assert sparrow_attention.update_landmarks is triton_kernels.paged_landmarks.update_landmarks
    with pytest.raises(AttributeError, match="has no attribute 'PagedEncoder'"):
        _ = sparrow_attention.PagedEncoder


def test_without_triton_the_rest_works_and_the_error_says_what_to_install(sparrow_attention):
    folder = Path(sparrow_attention.__file__).parent
    script = f"""
import sys
sys.modules["triton"] = None
sys.path.insert(0, {str(folder.parent)!r})
import {folder.name} as package
from {folder.name} import *
assert sparse_decode_attention is package.sparse_decode_attention
for name in ("PagedDecoder", "update_landmarks"):
    try:
        getattr(package, name)
    except ImportError as error:
        assert f"`{{name}}` needs Triton" in str(error) and "pip install triton" in str(error), error
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
