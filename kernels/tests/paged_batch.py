"""Random decode batches over a paged cache, in which everything that no one may read is NaN."""

import math
from dataclasses import dataclass, replace

import brute_force
import numpy as np
import torch


@dataclass
class PagedBatch:
    """
    A decode step: tensors as [`sparse_decode_attention`] takes them, and `keys[row]`, `values[row]` as arrays of shape
    `[kv_heads, length, head_dim]`.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[np.ndarray]
    values: list[np.ndarray]

    @property
    def tensors(self):
        return self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens

    def placed(self, device, layout="packed"):
        """The batch on a device, its cache in memory as `arrange_cache` does it."""
        query, key_cache, value_cache, block_table, seq_lens = (tensor.to(device) for tensor in self.tensors)
        key_cache, value_cache = arrange_cache(key_cache, value_cache, layout)
        return replace(
            self,
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            block_table=block_table,
            seq_lens=seq_lens,
        )


# What kernels that multiply matrices are tested with. Triton's interpreter takes bfloat16 matrices for integers, and
# on a GPU nobody has a float32 cache.
KERNEL_DTYPES = (torch.float16, torch.bfloat16) if torch.cuda.is_available() else (torch.float16, torch.float32)
# The same for long lists of shapes: the interpreter is slow and does the same with either type.
SHAPE_DTYPES = KERNEL_DTYPES if torch.cuda.is_available() else KERNEL_DTYPES[:1]
# The same for whole sequences, which may be float32 on a GPU too.
SEQUENCE_DTYPES = (torch.float16, torch.float32) + (torch.bfloat16,) * torch.cuda.is_available()

LAYOUTS = ("separate", "packed", "packed_token_major")


def arrange_cache(key_cache, value_cache, layout):
    """
    The same keys and values in memory as two tensors of their own (`"separate"`), as halves of one tensor
    `[blocks, kv_heads, block_size, 2 * head_dim]`, as vLLM stores them (`"packed"`), or as halves of one tensor whose
    tokens come before its heads (`"packed_token_major"`).
    """
    if layout == "separate":
        return key_cache.contiguous(), value_cache.contiguous()
    packed = torch.cat([key_cache, value_cache], dim=-1)
    if layout == "packed_token_major":
        packed = packed.transpose(1, 2).contiguous().transpose(1, 2)
    return packed.chunk(2, dim=-1)


def make_batch(
    lengths, *, kv_heads=2, group=2, head_dim=8, page_size=16, pages_per_block=1, dyadic=False, dtype=None, seed=0
):
    """
    A batch with one row per length.

    With `dyadic=True` all numbers are small multiples of 1/4, for which float32 is exact, and each page repeats one of
    three runs of keys, so that many pages tie.
    """
    generator = np.random.default_rng(seed)
    dtype = dtype or torch.float32

    def numbers(*shape):
        if dyadic:
            return generator.integers(-4, 5, shape) / 4
        # Rounded here, so that the arrays hold what the cache does.
        return torch.tensor(generator.standard_normal(shape).astype(np.float32)).to(dtype).double().numpy()

    block_size = page_size * pages_per_block
    blocks_of = [math.ceil(length / block_size) for length in lengths]
    max_blocks = max([1, *blocks_of]) + 1
    cache = np.full((2, sum(blocks_of) + 1, kv_heads, block_size, head_dim), np.nan)
    # Unused entries of a block table are whatever was in memory.
    block_table = generator.choice([-1, 10**6, 0], (len(lengths), max_blocks))
    free = generator.permutation(sum(blocks_of) + 1)
    keys, values = [], []
    runs = numbers(3, kv_heads, page_size, head_dim)
    for row, length in enumerate(lengths):
        if dyadic:
            pages = generator.integers(0, len(runs), math.ceil(length / page_size))
            row_keys = np.concatenate([runs[page] for page in pages], axis=1)[:, :length] if length else runs[0][:, :0]
        else:
            row_keys = numbers(kv_heads, length, head_dim)
        row_values = numbers(kv_heads, length, head_dim)
        blocks, free = free[: blocks_of[row]], free[blocks_of[row] :]
        block_table[row, : len(blocks)] = blocks
        for token in range(length):
            cache[0, blocks[token // block_size], :, token % block_size] = row_keys[:, token]
            cache[1, blocks[token // block_size], :, token % block_size] = row_values[:, token]
        keys.append(row_keys)
        values.append(row_values)
    return PagedBatch(
        query=torch.tensor(numbers(len(lengths), kv_heads * group, head_dim), dtype=dtype),
        key_cache=torch.tensor(cache[0], dtype=dtype),
        value_cache=torch.tensor(cache[1], dtype=dtype),
        block_table=torch.tensor(block_table, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        keys=keys,
        values=values,
    )


# Error of an output in units of the values that it averages, beyond the rounding to the cache's type: logits are
# sums of up to 256 products in float32, and an error of one is an error of the weight it gives.
FLOAT32_ERROR = 2e-5


def excess(output, batch, pages, page_size, scale=None):
    """
    Largest error of a kernel's output in units of what rounding explains.

    Each weight is rounded to the type of the values before it multiplies them, by half a unit in the last place, and
    so is the output. `pages[row][kv_head]` lists what is attended to, or is `None` for all pages.
    """
    half_unit = torch.finfo(output.dtype).eps / 2
    query = batch.query.double().cpu().numpy()
    output = output.double().cpu().numpy()
    assert np.isfinite(output).all()
    group = query.shape[1] // batch.key_cache.shape[1]
    # Rows of length 0 give zeros.
    worst = np.inf if output[batch.seq_lens.cpu().numpy() == 0].any() else 0.0
    for row, length in enumerate(batch.seq_lens.tolist()):
        for q_head in range(query.shape[1] if length else 0):
            listed = pages[row][q_head // group]
            tokens = slice(length) if listed is None else brute_force.tokens_of(listed, length, page_size)
            keys, values = batch.keys[row][q_head // group], batch.values[row][q_head // group]
            expected = brute_force.attention(query[row, q_head], keys, values, tokens, scale)
            magnitude = brute_force.attention(query[row, q_head], keys, np.abs(values), tokens, scale)
            explained = half_unit * (magnitude + np.abs(expected)) + FLOAT32_ERROR * max(1.0, magnitude.max())
            worst = max(worst, (np.abs(output[row, q_head] - expected) / explained).max())
    return worst


def exact_page_scores(query, landmarks, page_score):
    """Scores in double precision of the pages of `landmarks [pages, landmarks_per_page, d]` for `query [group, d]`."""
    logits = torch.einsum("gd,prd->gpr", query.double(), landmarks.double())
    if page_score == "mean_query":
        return logits[..., 0].mean(0).numpy()
    shares = (logits * query.shape[-1] ** -0.5).flatten(1).softmax(-1).unflatten(-1, logits.shape[1:])
    return shares.sum((0, 2)).numpy()
