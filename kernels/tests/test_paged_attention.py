from unittest import mock

import numpy as np
import pytest
import torch
from paged_batch import KERNEL_DTYPES, LAYOUTS, SHAPE_DTYPES, excess, make_batch


ON_GPU = torch.cuda.is_available()


def random_pages(batch, page_size, share=0.4, seed=0):
    """Per row and head, kept pages in ascending order; every third row keeps all, as None."""
    generator = np.random.default_rng(seed)
    kv_heads = batch.key_cache.shape[1]
    pages = []
    for row, length in enumerate(batch.seq_lens.tolist()):
        num_pages = -(-length // page_size)
        kept = min(num_pages, max(1, int(share * num_pages)))
        if row % 3 == 0 or kept == num_pages:
            pages.append([None] * kv_heads)
        else:
            # The last page is always kept. Heads keep the same number of pages, but not the same ones.
            others = [generator.permutation(num_pages - 1)[: kept - 1] for _ in range(kv_heads)]
            pages.append([sorted([*map(int, others[head]), num_pages - 1]) for head in range(kv_heads)])
    return pages


def attend(kernels, batch, pages, *, page_size, splits, taper=False, query=None, output=None, scale=None):
    """Attention by the kernels with that many splits; all that they may not read is NaN, or the page of a NaN."""
    query = batch.query if query is None else query
    rows, q_heads, head_dim = query.shape
    blocks, kv_heads, block_size, _ = batch.key_cache.shape
    device = query.device
    pages_per_block = block_size // page_size
    block_table = batch.block_table.cpu()
    num_pages = (-(-batch.seq_lens // page_size)).tolist()
    used = {
        int(block) for row, count in enumerate(num_pages) for block in block_table[row, : -(-count // pages_per_block)]
    }
    unwritten = min({*range(blocks)} - used) * pages_per_block
    kept = torch.full((rows, kv_heads, max(1, *num_pages)), unwritten, dtype=torch.int32)
    counts = torch.zeros((rows, kv_heads), dtype=torch.int32)
    for row, heads in enumerate(pages):
        for head, listed in enumerate(heads):
            counts[row, head] = num_pages[row] if listed is None else len(listed)
            for i, page in enumerate(listed or ()):
                kept[row, head, i] = (
                    block_table[row, page // pages_per_block] * pages_per_block + page % pages_per_block
                )
    output = torch.full_like(query, torch.nan) if output is None else output
    parts = rows * q_heads * splits
    constants = {"PROGRAMS": splits * rows * kv_heads, "TAPER_FROM": 0 if taper else splits * rows * kv_heads + 1}
    with mock.patch.multiple(kernels.paged_attention, **constants):
        assert kernels.paged_attention.num_splits(rows, kv_heads) == splits
        kernels.paged_attention.attend_to_kept_pages(
            query,
            batch.key_cache,
            batch.value_cache,
            batch.block_table,
            batch.seq_lens,
            kept.to(device),
            counts.to(device),
            torch.full((parts, head_dim), torch.nan, device=device),
            torch.full((parts,), torch.nan, device=device),
            output,
            page_size=page_size,
            scale=head_dim**-0.5 if scale is None else scale,
        )
    return output


def check(
    kernels, device, lengths, *, page_size=16, layout="packed", splits=2, taper=False, share=0.4, scale=None, **kwargs
):
    batch = make_batch(lengths, page_size=page_size, **kwargs).placed(device, layout)
    pages = random_pages(batch, page_size, share)
    output = attend(kernels, batch, pages, page_size=page_size, splits=splits, taper=taper, scale=scale)
    assert excess(output, batch, pages, page_size, scale) < 1
    return batch, pages, output


@pytest.mark.parametrize("dtype", SHAPE_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "group"),
    [
        *((64, group) for group in (1, 2, 3, 4, 5, 6, 7, 9, 16)),
        *((80, group) for group in (1, 3)),
        *((96, group) for group in (2, 7)),
        *((128, group) for group in (1, 4, 5, 16)),
        *((256, group) for group in (2, 6)),
    ],
)
def test_head_dims_and_groups(triton_kernels, device, head_dim, group, dtype):
    check(triton_kernels, device, [40, 135], head_dim=head_dim, group=group, dtype=dtype, seed=group)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pages_per_block", [1, 2, 4])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_page_sizes_and_blocks(triton_kernels, device, page_size, pages_per_block, head_dim):
    check(
        triton_kernels,
        device,
        [4 * page_size, page_size + 1, 6 * page_size - 1],
        page_size=page_size,
        pages_per_block=pages_per_block,
        head_dim=head_dim,
        dtype=torch.float16,
        layout=LAYOUTS[pages_per_block // 2],
    )


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_every_length(triton_kernels, device, page_size, dtype):
    # Dense and sparse rows alternate, so every length is checked as either in one of the two orders.
    lengths = [*range(1, 301)] if ON_GPU else [1, 15, 16, 17, 33, 64, 65, 129, 177]
    for order in (lengths, [3, *lengths], [3, 3, *lengths]) if ON_GPU else (lengths,):
        check(triton_kernels, device, order, page_size=page_size, head_dim=64, dtype=dtype, splits=4 if ON_GPU else 1)


@pytest.mark.skipif(not ON_GPU, reason="too long for Triton's interpreter")
@pytest.mark.parametrize("share", [0.03, 0.4])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_rows(triton_kernels, device, head_dim, dtype, share):
    lengths = [40960, 40959, 32768, 4097, 16385, 1000, 8191]
    check(triton_kernels, device, lengths, head_dim=head_dim, dtype=dtype, splits=64, share=share)


@pytest.mark.parametrize("taper", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16, 32, 64])
def test_splits(triton_kernels, device, splits, taper):
    # 1,100 tokens are 69 pages: with one split, more than a program lists at a time. Splits without pages stay unread.
    lengths = [1100, 0, 40, 1090]
    check(triton_kernels, device, lengths, head_dim=64, kv_heads=1, dtype=torch.float16, splits=splits, taper=taper)


@pytest.mark.parametrize("num_pages", [1, 4, 5, 31, 32, 33, 64, 65])
def test_lists_of_every_length(triton_kernels, device, num_pages):
    # Of a row that has one page more, in one split.
    batch = make_batch([16 * num_pages + 9], head_dim=64, kv_heads=1, dtype=torch.float16, seed=1).placed(device)
    pages = [[[*range(1, num_pages + 1)]]]
    output = attend(triton_kernels, batch, pages, page_size=16, splits=1)
    assert excess(output, batch, pages, 16) < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_same_bits(triton_kernels, device, layout):
    batch = make_batch([70, 141], pages_per_block=2, head_dim=80, dtype=torch.float16, seed=2)
    pages = random_pages(batch, 16)
    outputs = [
        attend(triton_kernels, batch.placed(device, name), pages, page_size=16, splits=2)
        for name in (layout, "packed")
    ]
    assert torch.equal(*outputs)
    assert excess(outputs[0], batch, pages, 16) < 1


def test_queries_and_outputs_inside_larger_tensors(triton_kernels, device):
    # As when one projection makes queries, keys and values.
    batch = make_batch([70, 141], head_dim=64, dtype=torch.float16, seed=3).placed(device)
    fused = torch.full((2, 8, 64), torch.nan, dtype=torch.float16, device=device)
    fused[:, 2:6] = batch.query
    around = torch.full((2, 6, 80), 7.0, dtype=torch.float16, device=device)
    pages = random_pages(batch, 16)
    output = attend(
        triton_kernels, batch, pages, page_size=16, splits=2, query=fused[:, 2:6], output=around[:, 1:5, :64]
    )
    assert torch.equal(output, attend(triton_kernels, batch, pages, page_size=16, splits=2))
    around[:, 1:5, :64] = 7
    assert (around == 7).all()


def test_scale(triton_kernels, device):
    batch, pages, output = check(triton_kernels, device, [70, 141], head_dim=64, dtype=torch.float16, scale=0.7)
    assert excess(output, batch, pages, 16) > 10


def test_rows_of_length_zero_are_zero(triton_kernels, device):
    batch, pages, output = check(triton_kernels, device, [0, 40, 0, 0, 123], head_dim=64, dtype=torch.float16)
    assert not output[[0, 2, 3]].any() and output[[1, 4]].any(-1).all()
    # Even where the padding holds NaN queries.
    batch.query[batch.seq_lens == 0] = torch.nan
    assert torch.equal(attend(triton_kernels, batch, pages, page_size=16, splits=2), output)


def test_large_logits(triton_kernels, device):
    # Their exponentials overflow, and attention is all on one token.
    batch = make_batch([100, 141], head_dim=64, dtype=torch.float16, seed=4).placed(device)
    batch.query.mul_(100)
    pages = random_pages(batch, 16)
    assert excess(attend(triton_kernels, batch, pages, page_size=16, splits=2), batch, pages, 16) < 1


def test_a_broken_token_shows_where_it_is_kept_alone(triton_kernels, device):
    batch = make_batch([160, 160], head_dim=64, dtype=torch.float16, seed=5).placed(device)
    pages = [[[1, 4, 9], [1, 5, 9]], [[0, 4, 9], [2, 4, 9]]]
    before = attend(triton_kernels, batch, pages, page_size=16, splits=1)
    batch.key_cache[batch.block_table[0, 4].item(), :, 3, 0] = torch.nan
    after = attend(triton_kernels, batch, pages, page_size=16, splits=1)
    assert after[0, :2].isnan().all()
    assert torch.equal(after[0, 2:], before[0, 2:]) and torch.equal(after[1], before[1])


def test_a_row_without_a_finite_logit_shows(triton_kernels, device):
    batch = make_batch([40, 70], head_dim=64, dtype=torch.float16).placed(device)
    batch.query[0] = batch.query[0].abs() + 1
    for block in batch.block_table[0]:
        batch.key_cache[block.item()] = -torch.inf
    output = attend(triton_kernels, batch, random_pages(batch, 16), page_size=16, splits=2)
    assert output[0].isnan().all() and output[1].isfinite().all()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_the_tolerance_notices_one_wrong_page_or_token(triton_kernels, device, dtype):
    batch = make_batch([300], head_dim=64, kv_heads=1, dtype=dtype, seed=6).placed(device)
    output = attend(triton_kernels, batch, [[[0, 4, 7, 12, 17, 18]]], page_size=16, splits=2)
    assert excess(output, batch, [[[0, 4, 7, 12, 17, 18]]], 16) < 1
    for wrong in ([0, 4, 8, 12, 17, 18], [0, 4, 7, 12, 17], [0, 4, 7, 10, 12, 17, 18]):
        assert excess(output, batch, [[wrong]], 16) > 10
    batch.seq_lens -= 1
    assert excess(output, batch, [[[0, 4, 7, 12, 17, 18]]], 16) > 2
