import pytest
import torch
import torch.nn.functional as F


RECIPES = [("mean_query", 1), ("group_softmax", 1), ("group_softmax", 2), ("group_softmax", 4)]


def make_sequences(batch=2, q_heads=4, kv_heads=2, tokens=150, head_dim=8, dyadic=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def numbers(heads):
        shape = (batch, heads, tokens, head_dim)
        if dyadic:
            return (torch.randint(-4, 5, shape, generator=generator) / 4).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    return numbers(q_heads), numbers(kv_heads), numbers(kv_heads)


def decode_token_by_token(
    sparrow_attention, query, key, value, prompt_lengths, top_k_table, page_size=16, landmark_dtype=None, **recipe
):
    """The same attention as decode steps, one row of the paged cache per sequence; also returns the kept pages."""
    batch, _, tokens, _ = query.shape
    pages = -(-tokens // page_size)
    # One block per page; the blocks of a sequence follow one another.
    caches = [F.pad(x, (0, 0, 0, pages * page_size - tokens), value=torch.nan) for x in (key, value)]
    caches = [x.unflatten(2, (pages, page_size)).transpose(1, 2).flatten(0, 1) for x in caches]
    landmarks = sparrow_attention.page_landmarks(
        caches[0].unsqueeze(2), recipe.get("landmarks_per_page", 1), landmark_dtype
    )
    block_table = torch.arange(batch * pages).view(batch, pages)
    outputs, kept = [], []
    for position in range(tokens):
        num_pages = position // page_size + 1
        top_k = top_k_table[min(num_pages, len(top_k_table) - 1)]
        output, kept_pages = sparrow_attention.sparse_decode_attention(
            query[:, :, position],
            *caches,
            block_table,
            torch.full((batch,), position + 1),
            torch.where(position < prompt_lengths, num_pages, top_k),
            page_size=page_size,
            landmarks=landmarks,
            return_kept=True,
            **recipe,
        )
        outputs.append(output)
        kept.append(F.pad(kept_pages, (0, pages - num_pages)))
    return torch.stack(outputs, dim=2), torch.stack(kept, dim=2)


def attend_densely(query, key, value, kept, page_size=16):
    """Attention with the full matrix of logits, masked to the kept pages `[batch, kv_heads, tokens, pages]`."""
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask = mask & kept.repeat_interleave(page_size, -1)[..., :tokens].repeat_interleave(group, dim=1)
    logits = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return logits.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("dyadic", [False, True], ids=["real", "dyadic"])
@pytest.mark.parametrize(("page_score", "landmarks_per_page"), RECIPES)
@pytest.mark.parametrize(("page_size", "q_heads", "kv_heads"), [(16, 4, 2), (16, 7, 1), (32, 5, 1), (16, 12, 2)])
def test_agrees_with_decoding_token_by_token(
    sparrow_attention, page_size, q_heads, kv_heads, page_score, landmarks_per_page, dyadic
):
    sequences = make_sequences(q_heads=q_heads, kv_heads=kv_heads, tokens=page_size * 9 + 3, dyadic=dyadic)
    prompt_lengths, top_k_table = torch.tensor([0, 40]), torch.tensor([0, 0, 0, 1, 1, 1, 1, 3, 2])
    recipe = dict(page_size=page_size, page_score=page_score, landmarks_per_page=landmarks_per_page)
    output = sparrow_attention.sparse_attention(
        *sequences, prompt_lengths=prompt_lengths, top_k_table=top_k_table, query_chunk=50, **recipe
    )
    expected, kept = decode_token_by_token(sparrow_attention, *sequences, prompt_lengths, top_k_table, **recipe)
    torch.testing.assert_close(output, expected, rtol=0, atol=3e-6)
    # Another page makes another output: the comparison above is one of selections too.
    shifted = kept.clone()
    shifted[..., 1:7] = kept[..., 1:7].flip(-1)
    changed = attend_densely(*sequences, shifted, page_size)
    assert ((changed - expected).abs().amax(-1) > 3e-6).float().mean() > 0.3


def test_float8_landmarks_and_scale_agree_with_decoding(sparrow_attention):
    sequences = make_sequences()
    arguments = torch.tensor([20, 0]), torch.tensor([1])
    recipe = dict(page_score="group_softmax", landmarks_per_page=2, landmark_dtype=torch.float8_e4m3fn, scale=0.7)
    output = sparrow_attention.sparse_attention(
        *sequences, prompt_lengths=arguments[0], top_k_table=arguments[1], **recipe
    )
    expected, kept = decode_token_by_token(sparrow_attention, *sequences, *arguments, **recipe)
    torch.testing.assert_close(output, expected, rtol=0, atol=3e-6)
    _, exact = decode_token_by_token(
        sparrow_attention, *sequences, *arguments, page_score="group_softmax", landmarks_per_page=2
    )
    assert not torch.equal(kept, exact)


@pytest.mark.parametrize(
    "dense", [{"top_k_table": [9]}, {"prompt_lengths": [150, 150]}, {"sink_pages": 8}, {"recent_pages": 9}], ids=str
)
def test_dense_attention_in_float64(sparrow_attention, dense):
    sequences = make_sequences(dtype=torch.float64)
    arguments = {"prompt_lengths": torch.tensor([0, 3]), "top_k_table": torch.tensor([1])}
    arguments |= {name: torch.tensor(x) if isinstance(x, list) else x for name, x in dense.items()}
    output = sparrow_attention.sparse_attention(*sequences, **arguments)
    expected = F.scaled_dot_product_attention(*sequences, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    del arguments[next(iter(dense))]
    sparse = {"prompt_lengths": torch.tensor([0, 3]), "top_k_table": torch.tensor([1]), **arguments}
    assert (sparrow_attention.sparse_attention(*sequences, **sparse) - expected).abs().max() > 0.1


def test_prompts_are_dense_and_the_token_after_them_is_not(sparrow_attention):
    sequences = make_sequences()
    dense = F.scaled_dot_product_attention(*sequences, is_causal=True, enable_gqa=True)
    prompt_lengths = torch.tensor([100, 130])
    output = sparrow_attention.sparse_attention(
        *sequences, prompt_lengths=prompt_lengths, top_k_table=torch.tensor([0])
    )
    for row, length in enumerate(prompt_lengths.tolist()):
        torch.testing.assert_close(output[row, :, :length], dense[row, :, :length], rtol=0, atol=1e-5)
        assert (output[row, :, length] - dense[row, :, length]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("page_score", ["mean_query", "group_softmax"])
def test_padding_changes_nothing(sparrow_attention, page_score):
    query, key, value = make_sequences(batch=3, tokens=131)
    lengths, starts = torch.tensor([131, 100, 65]), torch.tensor([0, 19, 40])
    arguments = dict(top_k_table=torch.tensor([1]), page_score=page_score)
    prompt_lengths = torch.tensor([20, 0, 33])
    padded = [torch.full((3, x.shape[1], 150, 8), torch.nan) for x in (query, key, value)]
    for row in range(3):
        real = slice(int(starts[row]), int(starts[row] + lengths[row]))
        for x, source in zip(padded, (query, key, value), strict=True):
            x[row, :, real] = source[row, :, : lengths[row]]
    output = sparrow_attention.sparse_attention(
        *padded, prompt_lengths=prompt_lengths, starts=starts, lengths=lengths, **arguments
    )
    for row in range(3):
        one, real = slice(row, row + 1), slice(int(starts[row]), int(starts[row] + lengths[row]))
        alone = sparrow_attention.sparse_attention(
            *(x[one, :, : lengths[row]] for x in (query, key, value)), prompt_lengths=prompt_lengths[one], **arguments
        )
        torch.testing.assert_close(output[one, :, real], alone, rtol=0, atol=3e-6)
        assert not output[row, :, : real.start].any() and not output[row, :, real.stop :].any()


def test_padding_on_one_side_alone(sparrow_attention):
    query, key, value = make_sequences(tokens=120)
    arguments = dict(prompt_lengths=torch.tensor([9, 9]), top_k_table=torch.tensor([1]))
    expected = sparrow_attention.sparse_attention(query, key, value, **arguments)
    left = [F.pad(x, (0, 0, 7, 0)) for x in (query, key, value)]
    right = [F.pad(x, (0, 0, 0, 7)) for x in (query, key, value)]
    output = sparrow_attention.sparse_attention(*left, starts=torch.tensor([7, 7]), **arguments)
    torch.testing.assert_close(output[:, :, 7:], expected, rtol=0, atol=3e-6)
    output = sparrow_attention.sparse_attention(*right, lengths=torch.tensor([120, 120]), **arguments)
    torch.testing.assert_close(output[:, :, :120], expected, rtol=0, atol=3e-6)


def test_rows_without_tokens(sparrow_attention):
    sequences = make_sequences(tokens=60)
    output = sparrow_attention.sparse_attention(
        *sequences,
        prompt_lengths=torch.tensor([0, 5]),
        top_k_table=torch.tensor([0]),
        lengths=torch.tensor([0, 60]),
    )
    assert not output[0].any() and output[1].isfinite().all() and output[1].any()
    empty = [x[:, :, :0] for x in sequences]
    arguments = dict(prompt_lengths=torch.tensor([0, 0]), top_k_table=torch.tensor([0]))
    assert sparrow_attention.sparse_attention(*empty, **arguments).shape == (2, 4, 0, 8)


@pytest.mark.parametrize("query_chunk", [1, 16, 37, 1000])
def test_chunks_change_nothing(sparrow_attention, query_chunk):
    sequences = make_sequences()
    arguments = dict(prompt_lengths=torch.tensor([10, 20]), top_k_table=torch.tensor([1]))
    expected = sparrow_attention.sparse_attention(*sequences, **arguments)
    output = sparrow_attention.sparse_attention(*sequences, query_chunk=query_chunk, **arguments)
    torch.testing.assert_close(output, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("padding", [0, 11])
def test_gradients_are_those_of_masked_attention(sparrow_attention, padding):
    sequences = make_sequences(tokens=130, dtype=torch.float64)
    prompt_lengths, top_k_table = torch.tensor([10, 50]), torch.tensor([1])
    _, kept = decode_token_by_token(sparrow_attention, *sequences, prompt_lengths, top_k_table)
    weights = torch.randn(sequences[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(attend, inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad((attend(*inputs) * weights).sum(), inputs)

    def sparse(query, key, value):
        query, key, value = (F.pad(x, (0, 0, padding, 0)) for x in (query, key, value))
        starts = torch.tensor([padding, padding]) if padding else None
        output = sparrow_attention.sparse_attention(
            query, key, value, prompt_lengths=prompt_lengths, top_k_table=top_k_table, starts=starts, query_chunk=48
        )
        return output[:, :, padding:]

    expected = gradients(lambda *x: attend_densely(*x, kept), sequences)
    for gradient, expected_gradient in zip(gradients(sparse, sequences), expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-10)


def test_reads_the_table_at_the_number_of_pages(sparrow_attention):
    # With this table only queries with exactly six pages, tokens 80 to 95, keep a candidate.
    sequences = make_sequences()
    arguments = dict(prompt_lengths=torch.tensor([0, 0]))
    none = sparrow_attention.sparse_attention(*sequences, top_k_table=torch.tensor([0]), **arguments)
    some = sparrow_attention.sparse_attention(
        *sequences, top_k_table=torch.tensor([0, 0, 0, 0, 0, 0, 1, 0]), **arguments
    )
    changed = (none != some).any(-1).all(1)
    assert changed.nonzero()[:, 1].tolist() == [*range(80, 96)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 20}, "`page_size` must be"),
        ({"page_score": "max"}, "`page_score` must be one of"),
        ({"landmarks_per_page": 4}, "scores one landmark per page, got 4"),
        ({"key": torch.zeros(2, 3, 20, 8), "value": torch.zeros(2, 3, 20, 8)}, "got 4 and 3"),
        ({"key": torch.zeros(2, 2, 20, 4)}, "`key` must have shape"),
        ({"key": torch.zeros(2, 2, 21, 8)}, "`value` must have shape"),
        ({"value": torch.zeros(2, 2, 20, 4)}, "`value` must have shape"),
        ({"prompt_lengths": torch.tensor([1])}, "`prompt_lengths` must have shape"),
        ({"starts": torch.tensor([1.0, 0.0])}, "`starts` must hold integers"),
        ({"lengths": torch.tensor([[1, 0]])}, "`lengths` must have shape"),
        ({"top_k_table": torch.zeros(0, dtype=torch.int32)}, "`top_k_table` is empty"),
        ({"top_k_table": torch.tensor([0.5])}, "`top_k_table` must hold integers"),
        ({"query_chunk": 0}, "`query_chunk` must be at least 1"),
    ],
)
def test_refuses(sparrow_attention, change, message):
    query, key, value = make_sequences(tokens=20)
    arguments = dict(
        query=query, key=key, value=value, prompt_lengths=torch.tensor([1, 2]), top_k_table=torch.tensor([1])
    )
    sparrow_attention.sparse_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        sparrow_attention.sparse_attention(**{**arguments, **change})


@pytest.mark.parametrize("past", [1, 16, 70, 149])
def test_the_last_queries_alone_see_what_they_see_among_all(sparrow_attention, past):
    query, key, value = make_sequences()
    arguments = {"prompt_lengths": torch.tensor([20, 90]), "top_k_table": torch.tensor([2]), "query_chunk": 32}
    expected = sparrow_attention.sparse_attention(query, key, value, **arguments)
    output = sparrow_attention.sparse_attention(query[:, :, past:], key, value, **arguments)
    assert (output - expected[:, :, past:]).abs().max() < 1e-6
    with pytest.raises(ValueError, match="without padding"):
        sparrow_attention.sparse_attention(query[:, :, past:], key, value, starts=torch.tensor([0, 1]), **arguments)
    with pytest.raises(ValueError, match="they must be as many"):
        sparrow_attention.sparse_attention(query, key[:, :, past:], value[:, :, past:], **arguments)
