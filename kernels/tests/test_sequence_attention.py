import importlib
from types import SimpleNamespace
from unittest import mock

import brute_force
import pytest
import torch
from paged_batch import SEQUENCE_DTYPES
from torch.utils.checkpoint import checkpoint


pytestmark = pytest.mark.usefixtures("poisoned_memory")

ON_GPU = torch.cuda.is_available()
# Largest error relative to the largest number: weights, and gradients of logits, are rounded once each.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def kernels(triton_kernels):
    module = triton_kernels.sequence_attention
    # The interpreter takes as long for a small tile as for a large one.
    with mock.patch.object(module, "FLOAT32", module.FLOAT32 if ON_GPU else (128, 64, 4, 1)):
        yield module


def make_tensors(lengths, *, starts=None, right=0, kv_heads=2, group=2, head_dim=64, dtype=torch.float16, seed=0):
    """Queries, keys, values and gradients of the output on the CPU; where padding is, they hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    starts = starts or [0] * len(lengths)
    tokens = right + max(start + length for start, length in zip(starts, lengths, strict=True))
    tensors = []
    for heads in (kv_heads * group, kv_heads, kv_heads, kv_heads * group):
        x = torch.randn((len(lengths), tokens, heads, head_dim), generator=generator).to(dtype)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            x[row, :start] = x[row, start + length :] = torch.nan
        tensors.append(x.transpose(1, 2))
    return tensors


def run(attend, tensors, **arguments):
    """Output and gradients."""
    *inputs, grad = tensors
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = attend(*inputs, **arguments)
    return output.detach(), *torch.autograd.grad(output, inputs, grad)


def assert_close(found, expected, tolerance):
    for name, x, y in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert x.shape == y.shape
        error = (x.double().cpu() - y).abs().max() / y.abs().max().clamp(min=1e-3)
        assert error < tolerance, f"{name} is off by {error:.2g}"


def compare(sparrow_attention, kernels, device, lengths, *, starts=None, right=0, prompts=None, top_k=(1,), **options):
    """Compares outputs and gradients with those of plain torch in float64, padding included; returns them."""
    recipe = {name: options.pop(name) for name in [*options] if name not in ("kv_heads", "group", "head_dim", "dtype")}
    tensors = make_tensors(lengths, starts=starts, right=right, seed=sum(lengths), **options)
    dtype = tensors[0].dtype
    recipe["landmark_dtype"] = recipe.get("landmark_dtype", dtype)
    numbers = {
        "prompt_lengths": prompts or [0] * len(lengths),
        "top_k_table": [*top_k],
        "starts": starts,
        "lengths": lengths,
    }
    numbers = {name: x if x is None else torch.tensor(x) for name, x in numbers.items()}
    expected = run(sparrow_attention.sparse_attention, [x.double() for x in tensors], **numbers, **recipe)
    numbers = {name: x if x is None else x.to(device) for name, x in numbers.items()}
    found = run(kernels.sparse_sequence_attention, [x.to(device) for x in tensors], **numbers, **recipe)
    assert all(x.dtype == dtype for x in found)
    assert_close(found, expected, TOLERANCE[dtype])
    return found, expected


@pytest.mark.parametrize("dtype", SEQUENCE_DTYPES, ids=str)
def test_output_by_brute_force(kernels, device, dtype):
    # Any mask will do that has each token's own page and none after it.
    lengths, starts, tokens = [70, 33, 1, 0], [0, 6, 2, 5], 75
    tensors = make_tensors(lengths, starts=starts, right=5, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand((4, 2, tokens, 5), generator=generator) < 0.4
    own = torch.arange(tokens)[:, None] // 16
    kept = (kept & (torch.arange(5) < own)) | (torch.arange(5) == own)
    mask = (kept.int() << torch.arange(5)).sum(-1, keepdim=True).int()
    starts_, lengths_ = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lengths))
    inputs = [x.to(device) for x in tensors[:3]]
    for scale in (None, 0.4):
        output = kernels.attend_to_kept_bits(
            *inputs, mask.to(device), starts_, lengths_, page_size=16, scale=scale
        ).cpu()  # fmt: skip
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            assert not output[row, :, :start].any() and not output[row, :, start + length :].any()
            query, key, value = (x[row, :, start : start + length].double().numpy() for x in tensors[:3])
            for head in range(4):
                for token in range(length):
                    pages = kept[row, head // 2, token].nonzero().flatten().tolist()
                    seen = brute_force.tokens_of(pages, token + 1, 16)
                    expected = brute_force.attention(query[head, token], key[head // 2], value[head // 2], seen, scale)
                    error = abs(output[row, head, start + token].double().numpy() - expected).max()
                    assert error < TOLERANCE[dtype] * 4, f"row {row}, head {head}, token {token}"


def test_every_length(sparrow_attention, kernels, device):
    # All lengths in one batch, with padding on both sides.
    lengths = [*range(1, 71)] if ON_GPU else [1, 15, 16, 17, 48, 49, *range(63, 68)]
    starts = [length * 5 % 7 for length in lengths]
    compare(sparrow_attention, kernels, device, lengths, starts=starts, right=3, kv_heads=1, group=2)


@pytest.mark.parametrize("dtype", SEQUENCE_DTYPES, ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 80), (5, 96), (6, 128), (7, 64), (16, 64), (2, 256)])
def test_groups_and_head_dims(sparrow_attention, kernels, device, group, head_dim, dtype):
    if dtype == torch.float32 and head_dim > 128:
        pytest.skip("left to plain torch")
    if not ON_GPU and (dtype == torch.float32) != (group in (1, 5)):
        pytest.skip("either type does the same in the interpreter")
    compare(
        sparrow_attention, kernels, device, [70], starts=[4], kv_heads=1, group=group, head_dim=head_dim,
        dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("page_size", "recipe"),
    [
        (16, {"page_score": "group_softmax", "landmarks_per_page": 2}),
        (16, {"page_score": "group_softmax", "landmarks_per_page": 4, "sink_pages": 0, "recent_pages": 1}),
        (32, {"recent_pages": 1}),
        (64, {"recent_pages": 1, "scale": 0.3}),
    ],
    ids=str,
)
def test_recipes(sparrow_attention, kernels, device, page_size, recipe):
    lengths = [page_size * 4 + 3]
    table = [0, 0, 0, 1, 1, 2]
    compare(
        sparrow_attention, kernels, device, lengths, right=2, top_k=table, kv_heads=1, page_size=page_size, **recipe
    )  # fmt: skip


@pytest.mark.skipif(not ON_GPU, reason="the interpreter is slow, and mistakes the carry where it rounds to float8")
@pytest.mark.parametrize("landmark_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("group", [1, 2, 7])
def test_long_sequences(sparrow_attention, kernels, device, group, landmark_dtype):
    recipe = {"landmark_dtype": landmark_dtype or torch.bfloat16}
    compare(
        sparrow_attention, kernels, device, [3001, 2222], starts=[0, 77], prompts=[500, 0], top_k=[20], group=group,
        head_dim=128, dtype=torch.bfloat16, **recipe,
    )  # fmt: skip


def test_blocks_that_no_query_keeps(sparrow_attention, kernels, device):
    # Blocks of 64 tokens, of which 200 tokens have four: the recent pages alone leave most of them out.
    lengths = [200]
    compare(sparrow_attention, kernels, device, lengths, top_k=[0], kv_heads=1, group=1, sink_pages=0, recent_pages=1)


def test_dense_rows_and_empty_rows(sparrow_attention, kernels, device):
    found, _ = compare(
        sparrow_attention, kernels, device, [90, 0, 90], starts=[3, 0, 0], prompts=[200, 0, 60], kv_heads=1
    )
    assert not any(x[1].any() for x in found)


def test_without_padding(sparrow_attention, kernels, device):
    tensors = make_tensors([70, 70], kv_heads=1)
    numbers = {"prompt_lengths": torch.tensor([0, 50]), "top_k_table": torch.tensor([1])}
    expected = run(
        sparrow_attention.sparse_attention, [x.double() for x in tensors], **numbers, landmark_dtype=torch.float16
    )
    numbers = {name: x.to(device) for name, x in numbers.items()}
    # A sum's gradient has strides of 0, and heads may be the outer axis.
    tensors = [x.to(device) for x in tensors]
    found = run(kernels.sparse_sequence_attention, tensors, **numbers)
    assert_close(found, expected, TOLERANCE[torch.float16])
    contiguous = run(kernels.sparse_sequence_attention, [x.contiguous() for x in tensors], **numbers)
    for x, y in zip(found, contiguous, strict=True):
        assert torch.equal(x, y)
    ones = tensors[3].new_ones(()).expand_as(tensors[3])
    strided = run(kernels.sparse_sequence_attention, [*tensors[:3], ones], **numbers)
    full = run(kernels.sparse_sequence_attention, [*tensors[:3], ones.contiguous()], **numbers)
    for x, y in zip(strided, full, strict=True):
        assert torch.equal(x, y)


def test_no_tokens(kernels, device):
    for shape in ((2, 2, 0, 64), (0, 2, 5, 64)):
        rows = torch.zeros(shape[0], dtype=torch.int64, device=device)
        tensors = [torch.zeros(shape, device=device)] * 4
        found = run(
            kernels.sparse_sequence_attention, tensors, prompt_lengths=rows, top_k_table=rows.new_ones(1), lengths=rows
        )
        assert all(x.shape == shape for x in found)


def test_what_is_held_until_the_backward_pass(kernels, device):
    *inputs, grad = [x.to(device) for x in make_tensors([70], kv_heads=1)]
    numbers = {"prompt_lengths": torch.tensor([0], device=device), "top_k_table": torch.tensor([1], device=device)}
    held = []

    def attend(*inputs):
        return kernels.sparse_sequence_attention(*inputs, **numbers)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        with torch.no_grad():
            output = attend(*inputs)
        assert not output.requires_grad and not held
        leaves = [x.requires_grad_() for x in inputs]
        attend(*leaves)
    # Queries and output, keys and values, the log-sum-exp, the mask, starts and lengths.
    sizes = sorted(x.numel() for x in held)
    assert sizes == sorted([2 * 70 * 64, 2 * 70 * 64, 70 * 64, 70 * 64, 2 * 70, 70, 1, 1])
    expected = torch.autograd.grad(attend(*leaves), leaves, grad)
    found = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False), leaves, grad)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def test_mixed_precision(kernels, device):
    # As torch's own attention: the inputs are rounded, and so is the output.
    tensors = [x.to(device) for x in make_tensors([70], kv_heads=1, dtype=torch.float32)]
    numbers = {"prompt_lengths": torch.tensor([0], device=device), "top_k_table": torch.tensor([9], device=device)}
    with torch.autocast(device, dtype=torch.float16):
        output = kernels.sparse_sequence_attention(*tensors[:3], **numbers)
    expected = kernels.sparse_sequence_attention(*(x.half() for x in tensors[:3]), **numbers)
    assert output.dtype == torch.float16 and torch.equal(output, expected)


@pytest.mark.skipif(not ON_GPU, reason="plain torch does the work on a CPU")
def test_dispatch(sparrow_attention, kernels, device):
    tensors = [x.to(device) for x in make_tensors([200, 130], starts=[0, 7], dtype=torch.bfloat16)]
    numbers = {
        "prompt_lengths": [0, 30],
        "top_k_table": [2],
        "starts": [0, 7],
        "lengths": [200, 130],
    }
    numbers = {name: torch.tensor(x, device=device) for name, x in numbers.items()}
    found = run(sparrow_attention.sparse_attention, tensors, **numbers)
    for x, y in zip(found, run(kernels.sparse_sequence_attention, tensors, **numbers), strict=True):
        assert torch.equal(x, y)
    # What the kernels do not do is done in plain torch.
    doubles = [x.double() for x in tensors]
    expected = run(sparrow_attention.sparse_attention, doubles, **numbers, landmark_dtype=torch.bfloat16)
    assert expected[0].dtype == torch.float64
    assert_close(found, [x.cpu() for x in expected], TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"shape": (1, 2, 16 * 8192, 256)}, True),
        ({"shape": (1, 2, 16 * 8192 + 1, 64)}, False),
        ({"shape": (1, 2, 50, 257)}, False),
        ({"dtype": torch.float32, "shape": (1, 2, 50, 128)}, True),
        ({"dtype": torch.float32, "shape": (1, 2, 50, 129)}, False),
        ({"dtype": torch.float64}, False),
        ({"device": torch.device("cpu")}, False),
        ({"page_size": 64}, True),
        ({"page_size": 128}, False),
        ({"scale": 0.1}, True),
        ({"scale": -0.1}, False),
        ({"capability": (9, 0)}, True),
        ({"capability": (12, 0)}, False),
        ({"capability": (8, 0)}, False),
    ],
    ids=str,
)
def test_what_is_left_to_the_kernels(sparrow_attention, monkeypatch, change, expected):
    dispatch = importlib.import_module(f"{sparrow_attention.__name__}.sequence_dispatch")
    case = {"shape": (1, 2, 50, 64), "dtype": torch.float16, "device": torch.device("cuda"), "page_size": 16}
    case = SimpleNamespace(**{**case, "scale": None, "capability": (10, 0), **change})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case.capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: name)
    dispatch._runs_kernels.cache_clear()
    tensor = SimpleNamespace(shape=torch.Size(case.shape), dtype=case.dtype, device=case.device)
    assert dispatch.has_sequence_kernels(tensor, tensor, tensor, case.page_size, case.scale) == expected
    other = SimpleNamespace(shape=tensor.shape, dtype=torch.bfloat16, device=case.device)
    assert not dispatch.has_sequence_kernels(tensor, other, other, case.page_size, case.scale)
    dispatch._runs_kernels.cache_clear()
