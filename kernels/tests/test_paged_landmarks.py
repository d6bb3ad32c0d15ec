import pytest
import torch
from paged_batch import LAYOUTS, arrange_cache


FLOAT8 = torch.float8_e4m3fn


def make_keys(device, *, blocks=5, kv_heads=2, block_size=32, head_dim=80, dtype=torch.float32, dyadic=False):
    generator = torch.Generator().manual_seed(block_size)
    shape = (blocks, kv_heads, block_size, head_dim)
    keys = torch.randint(-8, 9, shape, generator=generator) / 8 if dyadic else torch.randn(shape, generator=generator)
    return keys.to(dtype).to(device)


def empty_landmarks(keys, page_size, landmarks_per_page, dtype=None):
    """Landmarks that were never written: NaN."""
    blocks, kv_heads, block_size, head_dim = keys.shape
    shape = (blocks, kv_heads, block_size // page_size, landmarks_per_page, head_dim)
    return torch.full(shape, torch.nan, device=keys.device).to(dtype or keys.dtype)


def reference_landmarks(sparrow_attention, keys, page_size, landmarks_per_page, dtype=None):
    return sparrow_attention.page_landmarks(keys.unflatten(2, (-1, page_size)), landmarks_per_page, dtype)


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def assert_same_landmarks(landmarks, expected, device):
    """
    Equality to the last bit, NaN where NaN is expected. Triton's interpreter cuts float32 off where it should round it
    to bfloat16, so there the last place may be lower by one, towards zero.
    """
    assert landmarks.dtype == expected.dtype
    assert torch.equal(landmarks.isnan(), expected.isnan())
    if device == "cpu" and landmarks.dtype == torch.bfloat16:
        lost = (bits(expected).int() - bits(landmarks).int())[~expected.isnan()]
        assert ((lost == 0) | (lost == 1)).all()
    else:
        real = ~expected.isnan()
        assert torch.equal(bits(landmarks)[real], bits(expected)[real])


@pytest.mark.parametrize("landmarks_per_page", [1, 2, 4])
@pytest.mark.parametrize(("page_size", "pages_per_block"), [(16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (64, 1)])
def test_equal_to_the_reference(
    sparrow_attention, triton_kernels, device, page_size, pages_per_block, landmarks_per_page
):
    keys = make_keys(device, blocks=2, block_size=page_size * pages_per_block)
    landmarks = empty_landmarks(keys, page_size, landmarks_per_page)
    # Only the last token of each page matters, so that the interpreter need not run the others.
    slots = torch.arange(page_size - 1, 2 * keys.shape[2], page_size, device=device)
    triton_kernels.paged_landmarks.update_landmarks(keys, landmarks, slots)
    expected = reference_landmarks(sparrow_attention, keys, page_size, landmarks_per_page)
    assert_same_landmarks(landmarks, expected, device)
    assert landmarks.isfinite().all()


@pytest.mark.parametrize(
    ("head_dim", "layout"),
    [(64, LAYOUTS[0]), (80, LAYOUTS[1]), (96, LAYOUTS[2]), (128, LAYOUTS[1]), (256, LAYOUTS[2])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_types_head_dims_and_layouts(sparrow_attention, triton_kernels, device, dtype, head_dim, layout):
    keys = make_keys(device, blocks=2, head_dim=head_dim, dtype=dtype)
    key_view, _ = arrange_cache(keys, torch.full_like(keys, torch.nan), layout)
    landmarks = empty_landmarks(keys, 16, 2)
    slots = torch.tensor([15, 31, 63], device=device)
    triton_kernels.paged_landmarks.update_landmarks(key_view, landmarks, slots)
    expected = reference_landmarks(sparrow_attention, keys, 16, 2)
    expected[1, :, 0] = torch.nan
    assert_same_landmarks(landmarks, expected, device)


@pytest.mark.parametrize("landmarks_per_page", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_float8_landmarks(sparrow_attention, triton_kernels, device, dtype, landmarks_per_page):
    # The interpreter mistakes the carry where it rounds to float8; on a GPU all numbers are rounded rightly. Runs of
    # equal keys have means that float8 holds.
    if device == "cpu":
        keys = make_keys(device, blocks=2, dtype=dtype, dyadic=True)
        run_tokens = 16 // landmarks_per_page
        keys = keys[:, :, ::run_tokens].repeat_interleave(run_tokens, 2)
    else:
        keys = make_keys(device, blocks=2, dtype=dtype) * 4
    landmarks = empty_landmarks(keys, 16, landmarks_per_page, FLOAT8)
    triton_kernels.paged_landmarks.update_landmarks(keys, landmarks, torch.arange(15, 64, 16, device=device))
    expected = reference_landmarks(sparrow_attention, keys, 16, landmarks_per_page, FLOAT8)
    assert_same_landmarks(landmarks, expected, device)
    assert landmarks.float().isfinite().all() and landmarks.float().unique().numel() > 10


def test_float8_landmarks_saturate(triton_kernels, device):
    keys = torch.tensor([1.0, 448.0, 1000.0, -1e6], device=device).expand(1, 1, 16, 4).contiguous()
    landmarks = empty_landmarks(keys, 16, 1, FLOAT8)
    triton_kernels.paged_landmarks.update_landmarks(keys, landmarks, torch.tensor([15], device=device))
    assert landmarks.float().flatten().tolist() == [1.0, 448.0, 448.0, -448.0]


def test_broken_keys_give_broken_landmarks(triton_kernels, device):
    # Only in the run and the head that hold them: a page must show that it is broken.
    keys = make_keys(device, blocks=2)
    keys[1, 1, 9, 3] = torch.nan
    landmarks = empty_landmarks(keys, 16, 2)
    triton_kernels.paged_landmarks.update_landmarks(keys, landmarks, torch.arange(15, 64, 16, device=device))
    broken = torch.zeros_like(landmarks, dtype=torch.bool)
    broken[1, 1, 0, 1, 3] = True
    assert torch.equal(landmarks.isnan(), broken)
    if device == "cuda":  # the interpreter makes a number of it
        landmarks = empty_landmarks(keys, 16, 2, FLOAT8).zero_()
        triton_kernels.paged_landmarks.update_landmarks(keys, landmarks, torch.arange(15, 64, 16, device=device))
        assert torch.equal(landmarks.isnan(), broken)


def test_sums_in_float32(triton_kernels, device):
    # In float16 the ones would be lost beside 4096.
    keys = torch.ones(1, 1, 16, 4, dtype=torch.float16, device=device)
    keys[:, :, 0] = 4096
    landmarks = empty_landmarks(keys, 16, 1, torch.float32)
    triton_kernels.paged_landmarks.update_landmarks(keys, landmarks, torch.tensor([15], device=device))
    assert (landmarks == (4096 + 15) / 16).all()


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=str)
def test_only_pages_that_a_token_completes_are_written(sparrow_attention, triton_kernels, device, slot_dtype):
    keys = make_keys(device, blocks=6)
    # Block 0: both pages, out of order. Block 1: the second page lacks its last token. Block 2: nothing, as its
    # tokens are padding. Block 3: tokens of an earlier step complete a page with the one of this step. Block 4: the
    # last token of the second page alone, as in decoding. Block 5: not mentioned.
    slots = [31, *range(31), *range(32, 63), *[-1] * 5, -64, -17, 3 * 32 + 14, 3 * 32 + 15, 3 * 32 + 16, 4 * 32 + 31]
    completed = [(0, 0), (0, 1), (1, 0), (3, 0), (4, 1)]
    for block, page in [(1, 1), (3, 1)]:  # unwritten tokens of partial pages
        keys[block, :, 16 * page + 15] = torch.nan
    landmarks = empty_landmarks(keys, 16, 1)
    triton_kernels.paged_landmarks.update_landmarks(
        keys, landmarks, torch.tensor(slots, dtype=slot_dtype, device=device)
    )
    reference = reference_landmarks(sparrow_attention, keys, 16, 1)
    expected = empty_landmarks(keys, 16, 1)
    for block, page in completed:
        expected[block, :, page] = reference[block, :, page]
    assert_same_landmarks(landmarks, expected, device)


def test_landmarks_follow_rewritten_keys(sparrow_attention, triton_kernels, device):
    keys = make_keys(device, blocks=1)
    landmarks = empty_landmarks(keys, 16, 1)
    slots = torch.tensor([15, 31], device=device)
    triton_kernels.paged_landmarks.update_landmarks(keys, landmarks, slots)
    before = landmarks.clone()
    keys[:, :, 16:] += 1
    triton_kernels.paged_landmarks.update_landmarks(keys, landmarks, slots)
    assert_same_landmarks(landmarks, reference_landmarks(sparrow_attention, keys, 16, 1), device)
    assert torch.equal(landmarks[:, :, 0], before[:, :, 0]) and (landmarks[:, :, 1] != before[:, :, 1]).all()


def test_a_step_without_tokens(triton_kernels, device):
    keys = make_keys(device, blocks=1)
    landmarks = empty_landmarks(keys, 16, 1)
    triton_kernels.paged_landmarks.update_landmarks(keys, landmarks, torch.zeros(0, dtype=torch.int64, device=device))
    assert landmarks.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_cache": torch.zeros(2, 32, 8)}, r"`key_cache` must have shape \[blocks, kv_heads, block_size"),
        ({"landmarks": torch.zeros(2, 2, 2, 8)}, r"`landmarks` must have shape .*, got \[2, 2, 2, 8\]"),
        ({"landmarks": torch.zeros(3, 2, 2, 1, 8)}, r"= \[2, 2, \?, \?, 8\], got \[3, 2, 2, 1, 8\]"),
        ({"landmarks": torch.zeros(2, 1, 2, 1, 8)}, r"got \[2, 1, 2, 1, 8\]"),
        ({"landmarks": torch.zeros(2, 2, 2, 1, 16)}, r"got \[2, 2, 2, 1, 16\]"),
        ({"slot_mapping": torch.zeros(1, 4, dtype=torch.int64)}, r"`slot_mapping` must have shape \[tokens\]"),
        ({"key_cache": torch.zeros(2, 2, 8, 32).transpose(2, 3)}, "last axis must be contiguous"),
    ],
)
def test_refuses(triton_kernels, device, change, message):
    arguments = {
        "key_cache": torch.zeros(2, 2, 32, 8),
        "landmarks": torch.zeros(2, 2, 2, 1, 8),
        "slot_mapping": torch.zeros(4, dtype=torch.int64),
    }
    arguments = {name: tensor.to(device) for name, tensor in {**arguments, **change}.items()}
    with pytest.raises(ValueError, match=message):
        triton_kernels.paged_landmarks.update_landmarks(**arguments)
