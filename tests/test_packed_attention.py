"""Packed sequences under the training-side sparse attention: each attends to itself alone."""

import copy

import pytest
import torch
from test_attention import GROUP_SOFTMAX, build_model
from transformers import DataCollatorWithFlattening
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sparrow_trl.attention import SPARSE_ATTENTION, sparse_attention_context
from sparrow_trl.schedule import SparsityScheduleConfig
from sparrow_trl.sequence_layout import SequenceLayout


# The name that every transformers 5 knows, which later ones warn about.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*(deprecated|removed):FutureWarning")

# Layer 1 is dense; the tables of the others differ.
SCHEDULE = SparsityScheduleConfig(top_k_pages=[1], dense_layers=[1], layer_top_k_pages={"2": [2]})

# Lengths and starts that are no multiple of a page, one sequence of a single token, one that is all prompt.
LENGTHS, PROMPTS = [150, 33, 1, 131, 70], torch.tensor([30, 33, 0, 100, 17])
GENERATOR = torch.Generator().manual_seed(3)
SEQUENCES = [torch.randint(0, 59, (length,), generator=GENERATOR) for length in LENGTHS]
INPUT_IDS = torch.cat(SEQUENCES)[None]
POSITION_IDS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
BY_POSITIONS = {"position_ids": POSITION_IDS}
BY_BOUNDS = {
    "position_ids": POSITION_IDS,
    "cu_seq_lens_q": BOUNDS,
    "cu_seq_lens_k": BOUNDS,
    "max_length_q": 150,
    "max_length_k": 150,
}


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def model(request):
    # In float64, so that what is left of a difference is a fault.
    return build_model(request.param).double()


@pytest.fixture(scope="module")
def qwen3():
    return build_model().double()


def loss_of(logits):
    weights = torch.randn(59, generator=torch.Generator().manual_seed(2)).double()
    return (logits.log_softmax(-1) @ weights).sum()


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def one_by_one(model, schedule):
    model = copy.deepcopy(model).train()
    logits = []
    for sequence, prompt in zip(SEQUENCES, PROMPTS, strict=True):
        with sparse_attention_context(model, schedule, prompt_lengths=prompt[None]):
            logits.append(model(sequence[None], use_cache=False).logits)
    logits = torch.cat(logits, dim=1)
    loss_of(logits).backward()
    return logits.detach(), gradients_of(model)


def packed_logits(model, schedule, inputs, context):
    if context:
        with sparse_attention_context(model, schedule, prompt_lengths=PROMPTS):
            return model(INPUT_IDS, use_cache=False, **inputs).logits
    model.set_attn_implementation(SPARSE_ATTENTION)
    return model(INPUT_IDS, use_cache=False, sparsity_schedule=schedule, prompt_lengths=PROMPTS, **inputs).logits


@pytest.mark.parametrize("context", [True, False], ids=["context", "keywords"])
@pytest.mark.parametrize("inputs", [BY_POSITIONS, BY_BOUNDS], ids=["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("schedule", [SCHEDULE, GROUP_SOFTMAX], ids=["mean_query", "group_softmax"])
def test_equals_the_sequences_one_by_one(model, schedule, inputs, context):
    expected_logits, expected = one_by_one(model, schedule)
    model = copy.deepcopy(model).train()
    logits = packed_logits(model, schedule, inputs, context)
    loss_of(logits).backward()
    torch.testing.assert_close(logits.detach(), expected_logits, rtol=0, atol=1e-9)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("context", [True, False], ids=["context", "keywords"])
def test_equals_them_under_gradient_checkpointing(model, context, use_reentrant):
    expected = one_by_one(model, SCHEDULE)[1]
    model = copy.deepcopy(model).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    loss_of(packed_logits(model, SCHEDULE, BY_BOUNDS, context)).backward()
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-10, msg=name)


@torch.no_grad()
def test_differs_from_dense_attention_and_from_one_long_sequence(qwen3):
    logits = packed_logits(qwen3, SCHEDULE, BY_POSITIONS, True)
    dense = packed_logits(qwen3, SparsityScheduleConfig.dense(), BY_POSITIONS, True)
    torch.testing.assert_close(dense, qwen3(INPUT_IDS, use_cache=False, **BY_POSITIONS).logits, rtol=0, atol=1e-9)
    gap = (logits - dense)[0].abs().amax(-1).split(LENGTHS)
    assert gap[0][80:].median() > 1e-2 and gap[0][:64].max() < 1e-9 and gap[1].max() < 1e-9
    with sparse_attention_context(qwen3, SCHEDULE, prompt_lengths=PROMPTS[:1]):
        long = qwen3(INPUT_IDS, use_cache=False).logits
    assert (logits - long)[:, 150:].abs().median() > 1e-2


@torch.no_grad()
def test_counts_positions_from_each_sequence_in_the_context(qwen3):
    expected = packed_logits(qwen3, SCHEDULE, BY_BOUNDS, True)
    without = {key: value for key, value in BY_BOUNDS.items() if key != "position_ids"}
    assert torch.equal(packed_logits(qwen3, SCHEDULE, without, True), expected)


@torch.no_grad()
def test_takes_what_padding_free_collators_make(qwen3):
    examples = [{"input_ids": sequence.tolist(), "labels": sequence.tolist()} for sequence in SEQUENCES]
    expected = packed_logits(copy.deepcopy(qwen3), SCHEDULE, BY_POSITIONS, False)
    model = copy.deepcopy(qwen3)
    model.set_attn_implementation(SPARSE_ATTENTION)
    collators = (
        DataCollatorWithFlattening(),
        DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
    )
    losses = set()
    for collator in collators:
        batch = collator(copy.deepcopy(examples), return_tensors="pt")
        output = model(**batch, sparsity_schedule=SCHEDULE, prompt_lengths=PROMPTS)
        assert torch.equal(output.logits, expected)
        losses.add(float(output.loss))
    assert len(losses) == 1


@torch.no_grad()
def test_refuses_packed_rows_it_would_get_wrong(qwen3):
    model = copy.deepcopy(qwen3)
    model.set_attn_implementation(SPARSE_ATTENTION)

    def assert_refused(message, prompt_lengths=PROMPTS, input_ids=INPUT_IDS, **inputs):
        with pytest.raises(ValueError, match=message):
            model(input_ids, sparsity_schedule=SCHEDULE, prompt_lengths=prompt_lengths, **inputs)
        with pytest.raises(ValueError, match=message):
            with sparse_attention_context(qwen3, SCHEDULE, prompt_lengths=prompt_lengths):
                qwen3(input_ids, **inputs)

    assert_refused(r"has shape \[4\], but the packed row holds 5 sequences", PROMPTS[:4], **BY_POSITIONS)
    assert_refused(
        "gives the prompt of packed sequence 2 100 tokens, but the sequence has 1. The lengths come in the order",
        PROMPTS[[0, 1, 3, 2, 4]],
        **BY_POSITIONS,
    )
    gap = POSITION_IDS.clone()
    gap[:, 160:] += 1
    assert_refused("token 160 of row 0 is at position 11. Packed sequences lie one after the other", position_ids=gap)
    assert_refused("token 0 of row 0 is at position 1. Packed", position_ids=POSITION_IDS + 1)
    assert_refused("token 150 of row 0 is at position 150.", **{**BY_BOUNDS, "position_ids": torch.arange(385)[None]})
    for bounds in ([0, 150, 384], [1, 385], [0, 150, 150, 385], [0, 200, 150, 385], []):
        assert_refused("must increase from 0 to the row's 385 tokens", cu_seq_lens_q=torch.tensor(bounds))
    assert_refused(
        "a batch of one row, as padding-free collators make them, got 2 rows",
        input_ids=INPUT_IDS.expand(2, -1),
        position_ids=POSITION_IDS.expand(2, -1),
    )
    assert_refused("come without `attention_mask`", attention_mask=torch.ones_like(INPUT_IDS), **BY_BOUNDS)
    assert_refused("come without `attention_mask`", attention_mask=torch.ones_like(INPUT_IDS), **BY_POSITIONS)
    with pytest.raises(ValueError, match="`prompt_width` is for padded rows"):
        with sparse_attention_context(qwen3, SCHEDULE, prompt_width=10):
            qwen3(INPUT_IDS, **BY_POSITIONS)


def test_layout():
    device = torch.device("cpu")
    packed = SequenceLayout(1, 385, device, cu_seq_lens=BOUNDS)
    assert packed.packed and not packed.padded
    assert packed.spans == [(0, 150), (150, 33), (183, 1), (184, 131), (315, 70)]
    assert torch.equal(packed.position_ids, POSITION_IDS)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
    padded = SequenceLayout(4, 5, device, mask)
    assert padded.padded and not padded.packed
    assert padded.spans == [(2, 3), (0, 2), (1, 3), (0, 0)]
    assert padded.position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert not SequenceLayout(2, 5, device, mask.new_ones(2, 5), torch.arange(5)[None]).padded
    with pytest.raises(ValueError, match=r"of shape \[batch, tokens\] = \[4, 5\], got \[3, 4, 5\]"):
        SequenceLayout(4, 5, device, mask, torch.arange(5).expand(3, 4, 5))


def test_attends_to_parts_and_leaves_padding_zero():
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]])
    query = torch.arange(1.0, 31).view(3, 2, 5, 1).requires_grad_()
    layout = SequenceLayout(3, 5, query.device, mask)
    seen = []

    def attend(index, query, key, value):
        seen.append((index, query.shape))
        return (query + 100 * index).transpose(1, 2)

    output = layout.attend(attend, query, query, query)
    assert seen == [(0, (1, 2, 3, 1)), (2, (1, 2, 3, 1))]
    index = torch.tensor([0, 0, 2])[:, None, None, None]
    assert torch.equal(output, (query.transpose(1, 2) + 100 * index * 1.0) * mask[..., None, None])
    output.sum().backward()
    assert torch.equal(query.grad, mask[:, None, :, None].expand_as(query).float())
