"""The training-side sparse attention inside transformers models."""

import copy

import loop_model
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import create_causal_mask

from sparrow_trl import attention
from sparrow_trl.attention import SPARSE_ATTENTION, sparse_attention_context
from sparrow_trl.schedule import SparsityScheduleConfig
from sparrow_trl.sequence_layout import SequenceLayout


# The names that every transformers 5 knows, some of which later ones warn about.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(past_key_values|gradient_checkpointing).*(deprecated|removed):FutureWarning"
)

SPARSE = SparsityScheduleConfig(top_k_pages=[1], dense_layers=[])
ALL_PAGES = SparsityScheduleConfig(top_k_pages=[1000], dense_layers=[])
# Every field away from its default.
GROUP_SOFTMAX = SparsityScheduleConfig(
    top_k_pages=[1, 2],
    page_size=32,
    page_score="group_softmax",
    landmarks_per_page=2,
    bin_tokens=128,
    sink_pages=0,
    recent_pages=1,
    dense_layers=[0],
)

PROMPTS, LENGTHS = torch.tensor([30, 41, 17]), torch.tensor([150, 129, 101])


def build_model(architecture="qwen3", **overrides):
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }[architecture]
    values = dict(
        vocab_size=59,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        # Large enough for attention to be uneven, so that a dropped page shows.
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return model_class(config_class(**{**values, **overrides})).eval()


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request):
    return build_model(request.param)


@pytest.fixture(scope="module")
def qwen3():
    return build_model()


def token_ids(batch=3, tokens=150):
    return torch.randint(0, 59, (batch, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model, schedule=None, input_ids=None, attention_mask=None, **context):
    inputs = {"input_ids": token_ids() if input_ids is None else input_ids, "attention_mask": attention_mask}
    if schedule is None:
        return model(**inputs).logits
    with sparse_attention_context(model, schedule, **(context or {"prompt_lengths": PROMPTS})):
        return model(**inputs).logits


def test_dense_schedule_is_the_stock_attention(model):
    assert torch.equal(logits_of(model, SparsityScheduleConfig.dense()), logits_of(model))


# In float64, because in float32 the two stock implementations differ by 1e-5; "eager" takes its softmax in float32.
@pytest.mark.parametrize(("implementation", "atol"), [("sdpa", 1e-9), ("eager", 1e-5)])
def test_keeping_all_pages_equals_dense_attention(model, implementation, atol):
    model, reference = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    reference.set_attn_implementation(implementation)
    for schedule in (ALL_PAGES, SparsityScheduleConfig.dense()):
        torch.testing.assert_close(logits_of(model, schedule), logits_of(reference), rtol=0, atol=atol)


def test_sparse_differs_after_the_prompt_alone(model):
    gap = (logits_of(model, SPARSE) - logits_of(model)).abs().amax(-1)
    for row, prompt_length in enumerate(PROMPTS.tolist()):
        # Until its 81st token a row has no more pages than one candidate beside the three reserved ones.
        assert gap[row, : max(prompt_length, 64)].max() < 1e-4
        assert gap[row, 80:].median() > 1e-2


@pytest.mark.parametrize("schedule", [SPARSE, GROUP_SOFTMAX], ids=["mean_query", "group_softmax"])
def test_equals_the_loop_written_model(model, schedule):
    ids = token_ids(batch=1)[0].tolist()
    logits = logits_of(model, schedule, torch.tensor([ids]), prompt_lengths=torch.tensor([20]))[0]
    expected = torch.tensor(loop_model.sequence_logits(model, model.config, ids, 20, schedule))
    # Weights in float32 against float64; a page chosen otherwise would show as in the test above.
    assert (logits - expected).abs().amax(-1).max() < 1e-2
    assert (logits - expected).abs().mean() < 1e-4


def test_layers_follow_their_own_tables(qwen3):
    only_layer_1 = SparsityScheduleConfig(top_k_pages=[1], dense_layers=[0, 2])
    by_table = SparsityScheduleConfig(top_k_pages=[1], dense_layers=[], layer_top_k_pages={"0": [1000], "2": [1000]})
    by_range = SparsityScheduleConfig(top_k_pages=[1000], dense_layers=[], layer_top_k_pages={"1-1": [1]})
    expected = logits_of(qwen3, only_layer_1)
    torch.testing.assert_close(logits_of(qwen3, by_table), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits_of(qwen3, by_range), expected, rtol=0, atol=1e-4)
    for other in (SPARSE, ALL_PAGES):
        assert (logits_of(qwen3, other) - expected).abs().max() > 0.1


def test_follows_the_schedule_by_cached_length(qwen3):
    # The second bin starts at 8 pages, with token 112.
    growing = SparsityScheduleConfig(top_k_pages=[0, 1000], bin_tokens=128, dense_layers=[])
    none = SparsityScheduleConfig(top_k_pages=[0], dense_layers=[])
    one_layer = build_model(num_hidden_layers=1)
    gap = (logits_of(one_layer, growing) - logits_of(one_layer, none)).abs().amax(-1)
    assert gap[:, :112].max() == 0 and gap[:, 112:].median() > 1e-3
    dense_gap = (logits_of(one_layer, growing) - logits_of(one_layer)).abs().amax(-1)
    assert dense_gap[:, 112:].max() < 1e-4 and dense_gap[:, 64:112].median() > 1e-3


@pytest.mark.parametrize("schedule", [SPARSE, GROUP_SOFTMAX], ids=["mean_query", "group_softmax"])
def test_padding_changes_nothing(model, schedule):
    ids = token_ids()
    position = torch.arange(180)
    left_starts, both_starts = 180 - LENGTHS, torch.tensor([30, 0, 11])
    results = []
    for starts in (left_starts, torch.zeros(3, dtype=torch.long), both_starts):
        mask = (position >= starts[:, None]) & (position < (starts + LENGTHS)[:, None])
        padded = torch.zeros(3, 180, dtype=torch.long)
        padded[mask] = torch.cat([row[:length] for row, length in zip(ids, LENGTHS, strict=True)])
        logits = logits_of(model, schedule, padded, mask.long())
        results.append([row[real] for row, real in zip(logits, mask, strict=True)])
    for row, (left, right, both) in enumerate(zip(*results, strict=True)):
        alone = logits_of(model, schedule, ids[row : row + 1, : LENGTHS[row]], prompt_lengths=PROMPTS[row : row + 1])[
            0
        ]
        for logits in (left, right, both):
            torch.testing.assert_close(logits, alone, rtol=0, atol=2e-3)


def test_prompt_width_counts_columns(qwen3):
    # Prompts padded on the left to 120 columns, completions on the right.
    prompt_lengths = torch.tensor([120, 90, 100])
    mask = (torch.arange(150) >= 120 - prompt_lengths[:, None]).long()
    mask[1, 145:] = 0
    expected = logits_of(qwen3, SPARSE, None, mask, prompt_lengths=prompt_lengths)
    assert torch.equal(logits_of(qwen3, SPARSE, None, mask, prompt_width=120), expected)
    assert not torch.equal(logits_of(qwen3, SPARSE, None, mask, prompt_width=110), expected)
    longer = prompt_lengths + torch.tensor([0, 30, 20])
    assert not torch.equal(logits_of(qwen3, SPARSE, None, mask, prompt_lengths=longer), expected)
    with sparse_attention_context(qwen3, SPARSE, prompt_width=120), torch.no_grad():
        parts = [
            qwen3(input_ids=token_ids()[rows], attention_mask=mask[rows]).logits for rows in (slice(0, 2), slice(2, 3))
        ]
    torch.testing.assert_close(torch.cat(parts)[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-4)


def test_default_attention_mask(qwen3):
    mask = torch.ones(3, 150, dtype=torch.long)
    mask[:, :12] = 0
    schedule = SparsityScheduleConfig(top_k_pages=[1], dense_layers=[1])
    expected = logits_of(qwen3, schedule, None, mask)
    with torch.no_grad(), sparse_attention_context(qwen3, schedule, prompt_lengths=PROMPTS, attention_mask=mask):
        logits = qwen3(token_ids()).logits
    assert torch.equal(logits, expected)


def gradients(model, schedule=GROUP_SOFTMAX, checkpointing=False, backward_inside=True, use_reentrant=False):
    model = copy.deepcopy(model).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    weights = torch.randn(59, generator=torch.Generator().manual_seed(2))
    with sparse_attention_context(model, schedule, prompt_lengths=PROMPTS):
        loss = (model(input_ids=token_ids(), use_cache=False).logits.log_softmax(-1) @ weights).mean()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(model, backward_inside, use_reentrant):
    expected, dense = gradients(model), gradients(model, SparsityScheduleConfig.dense())
    result = gradients(model, GROUP_SOFTMAX, True, backward_inside, use_reentrant)
    assert result.keys() == expected.keys()
    for name, gradient in result.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=name)
        assert (expected[name] - dense[name]).norm() > 0.01 * dense[name].norm(), name


def test_the_model_is_left_as_it_was(qwen3):
    model = copy.deepcopy(qwen3).train()
    model.gradient_checkpointing_enable()
    checkpoint_functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    expected = logits_of(model)

    def assert_restored():
        assert model.config._attn_implementation == "sdpa"
        assert not model.model._forward_pre_hooks and not model.model._forward_hooks
        assert [layer._gradient_checkpointing_func for layer in model.model.layers] == checkpoint_functions
        assert torch.equal(logits_of(model), expected)

    with pytest.raises(RuntimeError, match="stop here"):
        with sparse_attention_context(model, SPARSE, prompt_lengths=PROMPTS):
            assert model.config._attn_implementation == SPARSE_ATTENTION
            raise RuntimeError("stop here")
    assert_restored()
    with sparse_attention_context(model, SPARSE, prompt_lengths=PROMPTS), pytest.raises(ValueError, match="3 rows"):
        with sparse_attention_context(model, SPARSE, prompt_lengths=PROMPTS[:2]):
            model(input_ids=token_ids())
    assert_restored()


def test_peft_and_wrapped_models(qwen3):
    expected = logits_of(qwen3, SPARSE)

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    peft_model = get_peft_model(copy.deepcopy(qwen3), LoraConfig(target_modules=["q_proj", "v_proj"])).eval()
    for wrapped in (peft_model, Wrapper(qwen3), Wrapper(peft_model)):
        torch.testing.assert_close(logits_of(wrapped, SPARSE), expected, rtol=0, atol=1e-4)
    with torch.no_grad(), sparse_attention_context(qwen3.model, SPARSE, prompt_lengths=PROMPTS):
        hidden = qwen3.model(token_ids()).last_hidden_state
    torch.testing.assert_close(qwen3.lm_head(hidden), expected, rtol=0, atol=1e-4)


def test_bfloat16_and_float8_landmarks(qwen3):
    model = copy.deepcopy(qwen3).bfloat16()
    dense, sparse = logits_of(model), logits_of(model, SPARSE)
    assert sparse.dtype == torch.bfloat16 and sparse.isfinite().all()
    expected = logits_of(qwen3, SPARSE)
    assert (sparse - expected)[:, 80:].abs().mean() < 0.3 * (dense - expected)[:, 80:].abs().mean()
    float8 = SparsityScheduleConfig(top_k_pages=[1], dense_layers=[], landmark_dtype="fp8_e4m3")
    assert not torch.equal(logits_of(qwen3, float8), expected)


def test_refuses_how_it_is_called(qwen3):
    with pytest.raises(ValueError, match="either `prompt_lengths` or `prompt_width`"):
        with sparse_attention_context(qwen3, SPARSE):
            pass
    with pytest.raises(ValueError, match="either `prompt_lengths` or `prompt_width`"):
        with sparse_attention_context(qwen3, SPARSE, prompt_lengths=PROMPTS, prompt_width=3):
            pass
    with pytest.raises(ValueError, match="needs a transformers model, got Linear"):
        with sparse_attention_context(nn.Linear(2, 2), SPARSE, prompt_width=3):
            pass


@pytest.mark.parametrize("cached", [1, 40, 100])
def test_tokens_in_the_cache_are_as_if_they_were_inputs(qwen3, cached):
    ids = token_ids()[1:2]
    prompts = torch.tensor([100])
    with sparse_attention_context(qwen3, SPARSE, prompt_lengths=prompts), torch.no_grad():
        expected = qwen3(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        cache = qwen3(input_ids=ids[:, :cached], use_cache=True).past_key_values
    with sparse_attention_context(qwen3, SPARSE, prompt_lengths=prompts, cached_tokens=cached), torch.no_grad():
        logits = qwen3(input_ids=ids[:, cached:], past_key_values=cache).logits
    assert (logits - expected[:, cached:]).abs().max() < 1e-4
    dense = qwen3(input_ids=ids, use_cache=False).logits
    assert (dense - expected).abs().max() > 1e-2


def test_cached_tokens_belong_to_one_row_without_padding(qwen3):
    ids = token_ids()
    with sparse_attention_context(qwen3, SPARSE, prompt_lengths=PROMPTS, cached_tokens=9):
        with pytest.raises(ValueError, match="a single row without padding, but the forward pass has 3 row"):
            qwen3(input_ids=ids)
    with sparse_attention_context(qwen3, SPARSE, prompt_lengths=PROMPTS[:1], cached_tokens=9):
        with pytest.raises(ValueError, match="has 1 row.s. with attention_mask"):
            qwen3(input_ids=ids[:1], attention_mask=torch.ones_like(ids[:1]))
        with pytest.raises(ValueError, match="got 150 queries for 150 cached keys"):
            qwen3(input_ids=ids[:1])


def test_refuses_what_it_would_get_wrong(qwen3):
    ids, holes = token_ids(), torch.ones(3, 150, dtype=torch.long)
    holes[1, 70] = 0
    with pytest.raises(ValueError, match="the mask has holes"):
        logits_of(qwen3, SPARSE, ids, holes)
    with pytest.raises(ValueError, match=r"an attention mask of shape \[batch, tokens\] = \[3, 150\]"):
        logits_of(qwen3, SPARSE, ids, torch.ones(3, 1, 150, 150, dtype=torch.bool).tril())
    with sparse_attention_context(qwen3, SPARSE, prompt_lengths=PROMPTS), torch.no_grad():
        cache = qwen3(input_ids=ids[:, :100], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="got 50 queries for 150 cached keys"):
            qwen3(input_ids=ids[:, 100:], past_key_values=cache)


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        ("mistral", {"sliding_window": 64}, "does not support a sliding window, which layer 0 asks for"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding window, .* 1"),
        ("llama", {"attention_dropout": 0.1}, "does not support attention dropout, got 0.1"),
        ("llama", {"is_causal": False}, "is causal, but layer 0 attends in both directions"),
        ("llama", {"attention_chunk_size": 64}, "a llama model asks for another mask"),
    ],
)
def test_refuses_other_attention(architecture, overrides, message):
    model = build_model(architecture, **overrides).train()
    with pytest.raises(ValueError, match=message):
        logits_of(model, SPARSE)


@pytest.mark.parametrize(
    "other",
    [
        {"or_mask_function": lambda batch, head, query, key: key < 5, "attention_mask": None},
        {"block_sequence_ids": torch.zeros(3, 150, dtype=torch.long)},
    ],
    ids=["own function", "two-way blocks"],
)
def test_refuses_masks_other_than_causal_ones(qwen3, other):
    arguments = {
        "config": switched(qwen3).config,
        "inputs_embeds": torch.zeros(3, 150, 32),
        "attention_mask": torch.ones(3, 150),
        "past_key_values": None,
    }
    assert isinstance(create_causal_mask(**arguments), attention.PaddingMask)
    with pytest.raises(ValueError, match="supports causal attention alone; a qwen3 model asks for another mask"):
        create_causal_mask(**{**arguments, **other})


def test_refuses_a_model_that_never_calls_the_attention_interface(qwen3):
    model = copy.deepcopy(qwen3)
    model.model.layers = nn.ModuleList()
    model.config.num_hidden_layers = 0
    with pytest.raises(ValueError, match="Qwen3Model ran without sparse attention"):
        logits_of(model, SPARSE)


# Keyword arguments of the forward pass, without the context

# Layer 1 is dense, the others are not. Rows are padded on both sides.
ONE_DENSE_LAYER = SparsityScheduleConfig(top_k_pages=[1], dense_layers=[1])
POSITION = torch.arange(150)
MASK = ((POSITION >= torch.tensor([[30], [0], [11]])) & (POSITION < torch.tensor([[150], [149], [112]]))).long()
POSITION_IDS = (MASK.cumsum(-1) - 1).clamp(min=0)
PADDED = {"input_ids": token_ids(), "attention_mask": MASK, "position_ids": POSITION_IDS}


def switched(model):
    model = copy.deepcopy(model)
    model.set_attn_implementation(SPARSE_ATTENTION)
    return model


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_is_selectable_when_loading(architecture, tmp_path):
    model = build_model(architecture)
    model.save_pretrained(tmp_path)
    sparse_model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sparrow_sparse").eval()
    with torch.no_grad():
        for schedule in (ONE_DENSE_LAYER, GROUP_SOFTMAX):
            arguments = {"sparsity_schedule": schedule, "prompt_lengths": PROMPTS, "labels": PADDED["input_ids"]}
            output = sparse_model(**PADDED, **arguments)
            with sparse_attention_context(model, schedule, prompt_lengths=PROMPTS):
                expected = model(**PADDED, labels=PADDED["input_ids"])
            assert torch.equal(output.logits, expected.logits) and output.loss == expected.loss
        stock = model(**PADDED).logits
        dense = sparse_model(**PADDED, sparsity_schedule=SparsityScheduleConfig.dense(), prompt_lengths=PROMPTS).logits
    torch.testing.assert_close(dense[MASK.bool()], stock[MASK.bool()], rtol=0, atol=1e-3)
    assert (output.logits - stock)[MASK.bool()].abs().max() > 0.1


def test_schedule_and_prompts_belong_to_one_call(qwen3):
    model = switched(qwen3)
    calls = [(SPARSE, PROMPTS), (GROUP_SOFTMAX, PROMPTS), (SPARSE, PROMPTS + 60)]
    with torch.no_grad():
        results = [
            model(token_ids(), sparsity_schedule=schedule, prompt_lengths=prompts).logits
            for schedule, prompts in calls * 2
        ]
    for (schedule, prompts), first, second in zip(calls, results, results[3:], strict=False):
        assert torch.equal(first, second)
        assert torch.equal(first, logits_of(qwen3, schedule, prompt_lengths=prompts))
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_a_mask_may_serve_several_calls(qwen3):
    model = switched(qwen3)
    inputs = {**PADDED, "attention_mask": {"full_attention": attention.PaddingMask(MASK.bool())}}
    with torch.no_grad():
        for schedule, prompts in ((SPARSE, PROMPTS), (SPARSE, PROMPTS + 60), (GROUP_SOFTMAX, PROMPTS)):
            arguments = {"sparsity_schedule": schedule, "prompt_lengths": prompts}
            assert torch.equal(model(**inputs, **arguments).logits, model(**PADDED, **arguments).logits)


def padded_loss(model, **arguments):
    logits = model(**PADDED, use_cache=False, **arguments).logits
    weights = torch.randn(59, generator=torch.Generator().manual_seed(2)).to(logits)
    return (logits.log_softmax(-1) @ weights * MASK).sum() / MASK.sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_keyword_arguments_survive_gradient_checkpointing(architecture, use_reentrant):
    expected = build_model(architecture).double().train()
    with sparse_attention_context(expected, ONE_DENSE_LAYER, prompt_lengths=PROMPTS):
        padded_loss(expected).backward()
    model = switched(build_model(architecture).double()).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    loss = padded_loss(model, sparsity_schedule=ONE_DENSE_LAYER, prompt_lengths=PROMPTS)
    # Another forward pass comes between this one and its recomputation.
    padded_loss(model, sparsity_schedule=GROUP_SOFTMAX, prompt_lengths=PROMPTS)
    loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_finds_the_sequences_once_in_a_forward_pass(qwen3, monkeypatch, use_reentrant):
    layouts = []

    def counted(*args):
        layouts.append(SequenceLayout(*args))
        return layouts[-1]

    monkeypatch.setattr(attention, "SequenceLayout", counted)
    model = switched(qwen3).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    padded_loss(model, sparsity_schedule=ONE_DENSE_LAYER, prompt_lengths=PROMPTS).backward()
    assert len(layouts) == 1


def test_keyword_arguments_pass_through_peft(qwen3):
    peft_model = get_peft_model(switched(qwen3), LoraConfig(target_modules=["q_proj", "v_proj"])).eval()
    with torch.no_grad():
        logits = peft_model(input_ids=token_ids(), sparsity_schedule=SPARSE, prompt_lengths=PROMPTS).logits
    torch.testing.assert_close(logits, logits_of(qwen3, SPARSE), rtol=0, atol=1e-4)


def test_left_padding_needs_positions(qwen3):
    arguments = {"sparsity_schedule": SPARSE, "prompt_lengths": PROMPTS}
    model, right = switched(qwen3), (POSITION < LENGTHS[:, None]).long()
    with pytest.raises(ValueError, match=r"token 30 of row 0 is at position 30\. Padding is not counted: pass"):
        model(token_ids(), attention_mask=MASK, **arguments)
    with torch.no_grad():
        logits = model(token_ids(), attention_mask=right, **arguments).logits
    assert torch.equal(logits, logits_of(qwen3, SPARSE, None, right))
    # The positions of padding may be anything.
    positions = POSITION_IDS.masked_fill(MASK == 0, 7)
    with torch.no_grad():
        logits = [
            model(**{**PADDED, "position_ids": position_ids}, **arguments).logits
            for position_ids in (positions, POSITION_IDS)
        ]
    assert torch.equal(*logits)


def test_refuses_keyword_arguments(qwen3):
    model, ids = switched(qwen3), token_ids()
    complete = {"sparsity_schedule": SPARSE, "prompt_lengths": PROMPTS}
    with pytest.raises(ValueError, match="needs a schedule .* `sparsity_schedule` and .* got no `sparsity_schedule`"):
        model(ids)
    with pytest.raises(ValueError, match="Layer 0 got no `prompt_lengths`"):
        model(ids, sparsity_schedule=SPARSE)
    with pytest.raises(ValueError, match=r"`prompt_lengths` has shape \[2\], but the batch has 3 rows"):
        model(ids, sparsity_schedule=SPARSE, prompt_lengths=PROMPTS[:2])
    with pytest.raises(ValueError, match="must be a `SparsityScheduleConfig`, got str"):
        model(ids, sparsity_schedule="qwen3-1.7b-0.86", prompt_lengths=PROMPTS)
    with pytest.raises(ValueError, match=r"mask of shape \[batch, tokens\] or none, .* Tensor"):
        model(ids, attention_mask=torch.ones(3, 1, 150, 150, dtype=torch.bool).tril(), **complete)
    with pytest.raises(ValueError, match="the mask has holes"):
        model(ids, attention_mask=torch.ones_like(ids).index_fill(1, torch.tensor([70]), 0), **complete)
    with pytest.raises(ValueError, match="got 50 queries for 150 cached keys"):
        cache = model(ids[:, :100], use_cache=True, **complete).past_key_values
        model(ids[:, 100:], past_key_values=cache, **complete)
    with pytest.raises(ValueError, match="either to `sparse_attention_context` or to the forward pass"):
        with sparse_attention_context(model, SPARSE, prompt_lengths=PROMPTS):
            model(ids, **complete)


def test_refuses_a_model_that_keeps_positions_to_itself(qwen3):
    model = switched(qwen3)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "position_ids": None}), with_kwargs=True
        )
    with pytest.raises(ValueError, match="hands no `position_ids` to layer 0. Run it inside"):
        model(token_ids(), sparsity_schedule=SPARSE, prompt_lengths=PROMPTS)
    assert torch.equal(logits_of(model, SPARSE), logits_of(qwen3, SPARSE))


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(output) if torch.is_tensor(x)]
        self.elements = max(self.elements, *sizes, 0)
        return output


@pytest.mark.parametrize("padding", [0, 9])
def test_makes_no_mask_of_all_pairs_of_tokens(padding):
    tokens = 8192
    model = switched(build_model(num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, head_dim=8))
    mask = (torch.arange(tokens) >= padding).long()[None]
    schedule = SparsityScheduleConfig(top_k_pages=[1], dense_layers=[0])
    with torch.no_grad(), LargestTensor() as largest:
        model.model(
            token_ids(1, tokens),
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            sparsity_schedule=schedule,
            prompt_lengths=torch.tensor([8000]),
        )
    assert largest.elements < tokens**2 / 16
