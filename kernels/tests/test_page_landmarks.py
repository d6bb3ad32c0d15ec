import brute_force
import numpy as np
import pytest
import torch


@pytest.mark.parametrize("landmarks_per_page", [1, 2, 4])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_mean_of_each_run(sparrow_attention, page_size, landmarks_per_page):
    keys = torch.randint(-8, 9, (2, 3, page_size, 5), generator=torch.Generator().manual_seed(0)) / 8
    landmarks = sparrow_attention.page_landmarks(keys, landmarks_per_page)
    assert landmarks.shape == (2, 3, landmarks_per_page, 5)
    for i, j in np.ndindex(2, 3):
        assert landmarks[i, j].tolist() == brute_force.page_landmarks(keys[i, j].tolist(), landmarks_per_page)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_stored_in_the_type_of_the_keys_and_summed_in_float32(sparrow_attention, dtype):
    # In bfloat16 and float16 the ones would be lost beside 4096.
    keys = torch.ones(16, 1, dtype=dtype)
    keys[0] = 4096
    landmark = sparrow_attention.page_landmarks(keys)
    assert landmark.dtype == dtype
    assert landmark.item() == torch.tensor((4096 + 15) / 16).to(dtype).item()
    assert sparrow_attention.page_landmarks(keys, dtype=torch.float32).item() == (4096 + 15) / 16


def test_float8_landmarks_saturate(sparrow_attention):
    keys = torch.tensor([1.0, 447.0, 1000.0, -1e6]).expand(16, 4)
    landmarks = sparrow_attention.page_landmarks(keys, dtype=torch.float8_e4m3fn)
    assert landmarks.dtype == torch.float8_e4m3fn
    assert landmarks.float().tolist() == [[1.0, 448.0, 448.0, -448.0]]
    broken = sparrow_attention.page_landmarks(keys * torch.nan, dtype=torch.float8_e4m3fn)
    assert broken.float().isnan().all()


def test_memory_layout_does_not_change_a_bit(sparrow_attention):
    keys = torch.randn(5, 16, 33, generator=torch.Generator().manual_seed(0))
    expected = sparrow_attention.page_landmarks(keys)
    for strided in (
        keys.transpose(0, 1).contiguous().transpose(0, 1),
        keys.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([keys, keys], dim=-1)[..., :33],
    ):
        assert torch.equal(sparrow_attention.page_landmarks(strided), expected)
    # Whether a page is computed alone, as the engine does, or with all others, as training does.
    assert torch.equal(torch.stack([sparrow_attention.page_landmarks(page) for page in keys]), expected)
    assert torch.equal(sparrow_attention.page_landmarks(keys[..., 30:31]), expected[..., 30:31])


@pytest.mark.parametrize(
    ("shape", "landmarks_per_page", "message"),
    [
        ((8, 4), 1, "`page_size` must be a power of two, at least 16, got 8"),
        ((48, 4), 1, "power of two, at least 16, got 48"),
        ((16, 4), 3, r"`landmarks_per_page` must be one of \(1, 2, 4\), got 3"),
        ((16, 4), 8, "got 8"),
        ((16,), 1, r"must have shape \[..., page_size, head_dim\], got \[16\]"),
    ],
)
def test_refuses(sparrow_attention, shape, landmarks_per_page, message):
    with pytest.raises(ValueError, match=message):
        sparrow_attention.page_landmarks(torch.zeros(shape), landmarks_per_page)
