"""A LoRA beside the model: the model stays as it is, and the adapter is one that PEFT reads."""

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import random_token_ids, tiny_model

from sparrow_trl import RolloutAdapter


INPUT_IDS = torch.tensor(random_token_ids(24))


def make_adapter(model, seed=0, std=0.05, **kwargs):
    """An adapter that does something: PEFT begins with B = 0."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapter = RolloutAdapter(model, LoraConfig(r=4, lora_alpha=8, **{"target_modules": "all-linear", **kwargs}))
        with torch.no_grad():
            for parameter in adapter.parameters:
                parameter.normal_(std=std)
    return adapter


@torch.no_grad()
def logits(model):
    return model(input_ids=INPUT_IDS).logits


@pytest.fixture
def model():
    return tiny_model("qwen3").eval()


def test_the_model_is_the_one_that_there_was(model):
    model.model.embed_tokens.weight.requires_grad_(False)
    before = logits(model)
    modules, trainable = dict(model.named_modules()), [p.requires_grad for p in model.parameters()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = make_adapter(model)
    with adapter.active():
        assert (logits(model) - before).abs().max() > 1e-2
    assert torch.equal(logits(model), before)
    assert dict(model.named_modules()) == modules
    assert [p.requires_grad for p in model.parameters()] == trainable
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.state_dict().keys() == weights.keys() and not hasattr(model, "peft_config")
    assert not {id(p) for p in adapter.parameters} & {id(p) for p in model.parameters()}


def test_a_new_adapter_changes_nothing(model):
    before = logits(model)
    adapter = RolloutAdapter(model)
    with adapter.active():
        assert torch.equal(logits(model), before)
    assert adapter.config.r == 16
    assert all(name.rpartition(".")[2].endswith("_proj") for name in adapter.target_names)


def test_contexts_nest_and_end_after_an_error(model):
    before, adapter = logits(model), make_adapter(model)
    with adapter.active():
        inside = logits(model)
        with adapter.active():
            assert torch.equal(logits(model), inside)
        assert torch.equal(logits(model), inside)
    with pytest.raises(KeyError), adapter.active():
        raise KeyError
    assert torch.equal(logits(model), before)


def test_dropout_acts_where_it_is_asked_for(model):
    adapter = make_adapter(model, lora_dropout=0.5)
    with adapter.active():
        assert torch.equal(logits(model), logits(model))
    with adapter.active(dropout=True):
        assert not torch.equal(logits(model), logits(model))
    with adapter.active():
        assert torch.equal(logits(model), logits(model))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}])
def test_merged_weights_are_those_of_the_student(model, options):
    adapter = make_adapter(model, **options)
    with adapter.active():
        expected = logits(model)
    merged = {name: adapter.merged(name, value) for name, value in model.state_dict().items()}
    changed = {name for name, value in merged.items() if value is not model.state_dict()[name]}
    same = {name for name in merged if torch.equal(merged[name], model.state_dict()[name])}
    assert {f"{name}.weight" for name in adapter.target_names} == set(merged) - same
    assert changed
    student = tiny_model("qwen3").eval()
    student.load_state_dict(merged)
    assert (logits(student) - expected).abs().max() < 1e-4


ENGINE_CASES = pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["float32", "autocast", "bfloat16"],
)


@ENGINE_CASES
def test_the_student_has_the_weights_of_an_engine_in_bfloat16(model, dtype, autocast):
    model.to(dtype)
    adapter = make_adapter(model, std=0.02)
    adapter.engine_dtype = torch.bfloat16
    engine = tiny_model("qwen3").eval().to(dtype)
    engine.load_state_dict(
        {
            name: adapter.merged(name, value).bfloat16() if "_proj" in name else value
            for name, value in model.state_dict().items()
        }
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = logits(engine)
        with adapter.active():
            assert torch.equal(logits(model), expected)
            assert torch.equal(model(input_ids=INPUT_IDS).logits, expected)  # with gradients, too
        adapter.engine_dtype = torch.float32
        with adapter.active():
            assert not torch.equal(logits(model), expected)


@ENGINE_CASES
def test_rounding_leaves_the_gradients_alone(model, dtype, autocast):
    model.to(dtype)
    adapter = make_adapter(model, std=0.02)
    adapter.engine_dtype = torch.bfloat16
    weights = torch.randn(24, model.config.vocab_size, generator=torch.Generator().manual_seed(0))

    def gradients(student, **kwargs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (student(input_ids=INPUT_IDS, **kwargs).logits.float().log_softmax(-1) * weights).sum()
        return torch.autograd.grad(loss, adapter.parameters)

    # W + BA as one weight, with the value of the rounded one and the gradient of the exact one.
    whole = dict(model.named_parameters())
    for name in adapter.target_names:
        layer = adapter._layers[name]
        exact = 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        rounded = adapter.merged(f"{name}.weight", whole[f"{name}.weight"]).bfloat16().to(dtype)
        whole[f"{name}.weight"] = rounded.detach() + (exact - exact.detach()).to(dtype)
    expected = gradients(lambda **kwargs: torch.func.functional_call(model, whole, kwargs=kwargs))
    with adapter.active():
        found = gradients(model)
    tolerance = 1e-5 if (dtype, autocast) == (torch.float32, False) else 3e-2
    for value, reference in zip(found, expected, strict=True):
        assert (value - reference).norm() < tolerance * reference.norm()


def test_what_dropout_leaves_out_is_left_out_of_the_rounded_weights(model):
    adapter = make_adapter(model, lora_dropout=0.5)
    adapter.engine_dtype = torch.bfloat16
    with adapter.active():
        plain = logits(model)
    with adapter.active(dropout=True):
        torch.manual_seed(0)
        rounded = logits(model)
        adapter.engine_dtype = torch.float32
    with adapter.active(dropout=True):
        torch.manual_seed(0)
        exact = logits(model)
    assert (rounded - exact).abs().max() < 0.2 * (rounded - plain).abs().max()


def test_merging_computes_in_float32(model):
    adapter = make_adapter(model)
    name = f"{adapter.target_names[0]}.weight"
    layer = adapter._layers[adapter.target_names[0]]
    a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    weight = model.get_parameter(name).detach().bfloat16()
    exact = weight.double() + 2.0 * b @ a  # alpha / r
    merged = adapter.merged(name, weight)
    assert merged.dtype == torch.bfloat16
    # To the nearest bfloat16, but where float32 itself is off.
    assert (merged == exact.bfloat16()).float().mean() > 0.999


def test_base_weights_are_bit_identical_after_a_hundred_merges(model):
    adapter = make_adapter(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(100):
        for name, value in model.named_parameters():
            adapter.merged(name, value.data)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_peft_loads_what_was_saved(tmp_path):
    base = tmp_path / "base"
    tiny_model("qwen3").save_pretrained(base)
    model = type(tiny_model("qwen3")).from_pretrained(base).eval()
    adapter = make_adapter(model, target_modules=["q_proj", "v_proj", "up_proj"], use_rslora=True)
    adapter.save_pretrained(tmp_path / "adapter")
    with adapter.active():
        expected = logits(model)

    assert set(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == set(adapter.state_dict())
    peft_model = PeftModel.from_pretrained(type(model).from_pretrained(base), tmp_path / "adapter").eval()
    assert torch.equal(logits(peft_model), expected)

    again = RolloutAdapter.from_pretrained(model, tmp_path / "adapter")
    with again.active():
        assert torch.equal(logits(model), expected)
    assert all(parameter.requires_grad for parameter in again.parameters)


def test_an_adapter_that_peft_saved_is_read(model, tmp_path):
    policy = get_peft_model(tiny_model("qwen3"), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    policy.eval().save_pretrained(tmp_path)
    adapter = RolloutAdapter.from_pretrained(model, tmp_path)
    with adapter.active():
        assert torch.equal(logits(model), logits(policy))


def test_an_adapter_of_another_model_is_refused(model, tmp_path):
    make_adapter(model).save_pretrained(tmp_path / "qwen3")
    untied = tiny_model("qwen3")
    untied.name_or_path = "somewhere/other-model"
    model.name_or_path = "somewhere/this-model"
    make_adapter(model).save_pretrained(tmp_path / "named")
    with pytest.raises(ValueError, match="this-model.*other-model"):
        RolloutAdapter.from_pretrained(untied, tmp_path / "named")
    narrow = type(model)(type(model.config)(**{**model.config.to_dict(), "intermediate_size": 128}))
    with pytest.raises(ValueError, match=r"another adapter or model: .*gate_proj.*of shape \[4, 128\]|of shape"):
        RolloutAdapter.from_pretrained(narrow, tmp_path / "qwen3")


def test_the_base_model_can_be_another_folder(model, tmp_path):
    model.name_or_path = "somewhere/base"
    adapter = make_adapter(model)
    adapter.save_pretrained(tmp_path / "adapter", base_model="runs/trained")
    model.name_or_path = "elsewhere/trained"
    RolloutAdapter.from_pretrained(model, tmp_path / "adapter")


def test_weights_are_taken_over_from_an_adapter_of_the_same_scale_alone(model, tmp_path):
    adapter, other = make_adapter(model), make_adapter(model, seed=1)
    other.save_pretrained(tmp_path / "same")
    make_adapter(model, seed=2, use_rslora=True).save_pretrained(tmp_path / "scaled")
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    with pytest.raises(ValueError, match="use_rslora=True, but use_rslora=False"):
        adapter.load_pretrained(tmp_path / "scaled")
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict().items())
    adapter.load_pretrained(tmp_path / "same")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in adapter.state_dict().items())


def test_a_state_that_does_not_fit_changes_nothing(model):
    adapter, other = make_adapter(model), make_adapter(model, seed=1)
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    state = other.state_dict()
    del state[next(reversed(state))]
    with pytest.raises(ValueError, match="missing in it"):
        adapter.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in adapter.state_dict().items())
    adapter.load_state_dict(other.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in adapter.state_dict().items())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(target_modules=["no_such_layer"]), "no_such_layer"),
        (LoraConfig(target_modules=["lm_head"]), "the head"),
        (LoraConfig(target_modules=["embed_tokens"]), "no linear layer"),
        (LoraConfig(target_modules=["q_proj"], bias="all"), "bias='all'"),
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "use_dora=True"),
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "modules_to_save"),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "pissa"),
        (PromptTuningConfig(num_virtual_tokens=2), "PromptTuningConfig"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_plain_lora_is_refused_and_leaves_the_model(model, config, message):
    before, modules = logits(model), dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        RolloutAdapter(model, config)
    assert torch.equal(logits(model), before) and dict(model.named_modules()) == modules
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_peft_policy_is_refused(model):
    with pytest.raises(ValueError, match="PEFT adapters of its own"):
        RolloutAdapter(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
