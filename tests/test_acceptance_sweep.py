"""Teacher-forced measurement of acceptance rates, and the sequences it runs on."""

import copy
import json
import warnings

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_models import SHAPE, tiny_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PhiConfig,
)

from sparrow_trl import acceptance_sweep
from sparrow_trl.acceptance_sweep import (
    TokenSequence,
    measure_acceptance,
    sequence_acceptance,
)
from sparrow_trl.acceptance_table import AcceptanceTable
from sparrow_trl.attention import sparse_attention_context
from sparrow_trl.schedule import SparsityScheduleConfig


RECIPE = SparsityScheduleConfig(top_k_pages=[0], dense_layers=[0])
PAGE_COUNTS = [3, 5, 100]
BIN_TOKENS = 64


def random_sequences(shapes=((150, 37), (201, 20), (90, 61), (121, 118)), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        TokenSequence(torch.randint(2, 70, (length,), generator=generator).tolist(), prompt)
        for length, prompt in shapes
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3").eval()


@pytest.fixture(scope="module")
def sequences():
    return random_sequences()


@pytest.fixture(scope="module")
def table(model, sequences):
    return measure_acceptance(model, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)


def brute_force_rates(model, sequence, schedule):
    """Rate of each completion token but the first, from the logits of two whole forward passes, in float64."""
    input_ids = torch.tensor([sequence.token_ids])
    with torch.no_grad():
        dense = model(input_ids).logits[0].double().numpy()
        with sparse_attention_context(model, schedule, prompt_lengths=torch.tensor([sequence.prompt_length])):
            sparse = model(input_ids).logits[0].double().numpy()
    rates = []
    for token in range(1, len(sequence.token_ids) - sequence.prompt_length):
        query = sequence.prompt_length + token - 1  # samples this token, with `prompt_length + token` cached
        p, q = (np.exp(logits[query] - logits[query].max()) for logits in (dense, sparse))
        p, q = p / p.sum(), q / q.sum()
        rates.append(sum(min(a, b) for a, b in zip(p, q, strict=True)))
    return np.array(rates)


def schedule_of(page_count, recipe=RECIPE):
    return SparsityScheduleConfig(
        top_k_pages=[page_count - recipe.sink_pages - recipe.recent_pages],
        **{**recipe.recipe, "dense_layers": recipe.dense_layers},
    )


# Models that do something to their logits beside a matrix product.
HEAD_CONFIGS = {
    "granite": GraniteConfig(**SHAPE, logits_scaling=3.0),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.25),
    "phi": PhiConfig(**SHAPE),
    "gemma2": Gemma2Config(
        **{**SHAPE, "initializer_range": 0.5},
        final_logit_softcapping=3.0,
        attn_logit_softcapping=None,
        layer_types=["full_attention"] * SHAPE["num_hidden_layers"],
        query_pre_attn_scalar=32,
    ),
}


# Rates


@pytest.mark.parametrize("chunk_size", [1, 37, 1000])
def test_rates_equal_a_brute_force_computation(model, sequences, chunk_size):
    for sequence in sequences:
        rates = list(
            sequence_acceptance(model, sequence, [schedule_of(count) for count in PAGE_COUNTS], chunk_size=chunk_size)
        )
        for count, values in zip(PAGE_COUNTS, rates, strict=True):
            expected = brute_force_rates(model, sequence, schedule_of(count))
            assert values.shape == expected.shape == sequence.cached_lengths.shape
            np.testing.assert_allclose(values.numpy(), expected, rtol=0, atol=1e-4)
    # Two budgets are told apart far above the tolerance.
    first, second, everything = (
        values.mean()
        for values in sequence_acceptance(model, sequences[1], [schedule_of(count) for count in PAGE_COUNTS])
    )
    assert first < second - 0.02 < everything - 0.04


@pytest.mark.parametrize("layers", [None, {"2": [9]}], ids=["one table", "layer tables"])
def test_tokens_that_keep_all_pages_are_taken_from_the_dense_pass(model, sequences, monkeypatch, layers):
    schedules = [
        SparsityScheduleConfig(top_k_pages=[count], bin_tokens=64, dense_layers=[0], layer_top_k_pages=layers)
        for count in (0, 4, 100)
    ]
    seen, run = [], acceptance_sweep._Passes._run

    def recorded(self, input_ids, cache):
        seen.append(input_ids.shape[1])
        return run(self, input_ids, cache)

    monkeypatch.setattr(acceptance_sweep._Passes, "_run", recorded)
    rates = list(sequence_acceptance(model, sequences[1], schedules))
    # Of 200 tokens, those before the first that leaves one of its pages of 16 out: 3 are reserved.
    assert seen == [200, 200 - 48, 200 - 112, 200 - 192 if layers else 1]  # one token shows what is unsupported
    monkeypatch.setattr(acceptance_sweep._Passes, "_first_sparse_token", lambda *args: 0)
    expected = list(sequence_acceptance(model, sequences[1], schedules))
    assert seen[-4:] == [200] * 4
    for values, others in zip(rates, expected, strict=True):
        assert (values - others).abs().max() < 1e-5
    assert (rates[0] < 0.99).any()


@pytest.mark.parametrize("name", HEAD_CONFIGS)
def test_what_a_model_does_to_its_logits_is_kept(name, sequences):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEAD_CONFIGS[name], dtype=torch.float32).eval()
    if name == "phi":  # the only one with a bias, which is 0 at first
        torch.nn.init.normal_(model.lm_head.bias, std=3.0)
    expected = brute_force_rates(model, sequences[0], schedule_of(4))
    (rates,) = sequence_acceptance(model, sequences[0], [schedule_of(4)], chunk_size=50)
    np.testing.assert_allclose(rates.numpy(), expected, rtol=0, atol=1e-4)
    # The bare product of the head's weight with the hidden states would show.
    bare = copy.deepcopy(model)
    bare.config.logits_scaling, bare.logit_scale, bare.config.final_logit_softcapping = 1.0, 1.0, None
    if name == "phi":
        bare.lm_head.bias = None
    assert np.abs(brute_force_rates(bare, sequences[0], schedule_of(4)) - expected).max() > 1e-2


def test_every_field_of_the_recipe_counts(model, sequences):
    recipe = SparsityScheduleConfig(
        top_k_pages=[0],
        page_size=32,
        page_score="group_softmax",
        landmarks_per_page=2,
        landmark_dtype="fp8_e4m3",
        bin_tokens=2048,
        sink_pages=0,
        recent_pages=1,
        dense_layers=[2],
    )
    table = measure_acceptance(model, sequences[1:2], recipe, [2], BIN_TOKENS)
    expected = SparsityScheduleConfig(
        top_k_pages=[1], landmark_dtype="fp8_e4m3", dense_layers=[2], bin_tokens=64, **recipe.recipe
    )
    rates = brute_force_rates(model, sequences[1], expected)
    bins = expected.bin_index(sequences[1].cached_lengths).numpy()
    for index in range(table.num_bins):
        if (bins == index).any():
            assert table.mean[0, index] == pytest.approx(rates[bins == index].mean(), abs=1e-5)
    assert table.recipe == {"landmark_dtype": "fp8_e4m3", "dense_layers": [2], **recipe.recipe}


def test_rates_of_a_schedule_that_grows_with_length(model, sequences):
    schedule = SparsityScheduleConfig(top_k_pages=[0, 1, 2], bin_tokens=64, dense_layers=[])
    (rates,) = sequence_acceptance(model, sequences[1], [schedule])
    np.testing.assert_allclose(rates.numpy(), brute_force_rates(model, sequences[1], schedule), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
def test_half_precision_models(model, sequences, dtype, tolerance):
    half = copy.deepcopy(model).to(dtype)
    *_, everything = rates = list(
        sequence_acceptance(half, sequences[1], [schedule_of(count) for count in PAGE_COUNTS])
    )
    for count, values in zip(PAGE_COUNTS, rates, strict=True):
        assert values.dtype == torch.float32
        np.testing.assert_allclose(
            values.numpy(), brute_force_rates(half, sequences[1], schedule_of(count)), rtol=0, atol=1e-4
        )
    assert everything.min() > 1 - tolerance


def test_wrapped_models(model, sequences):
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    ).eval()
    (rates,) = sequence_acceptance(adapted, sequences[0], [schedule_of(4)])
    np.testing.assert_allclose(
        rates.numpy(), brute_force_rates(adapted, sequences[0], schedule_of(4)), rtol=0, atol=1e-4
    )
    (base,) = sequence_acceptance(model, sequences[0], [schedule_of(4)])
    assert (rates - base).abs().max() > 1e-2


def test_a_model_in_training_mode_is_refused(model, sequences):
    with pytest.raises(ValueError, match="training mode, where dropout would act"):
        sequence_acceptance(copy.deepcopy(model).train(), sequences[0], [schedule_of(4)])


# Tables


def test_the_table_holds_every_position_in_its_bin(model, sequences, table):
    lengths = torch.cat([sequence.cached_lengths for sequence in sequences]).numpy()
    # The first completion token is the dense prefill's, and nothing follows the last.
    assert lengths[:112].tolist() == list(range(38, 150)) and len(lengths) == 112 + 180 + 28 + 2
    bins = np.ceil(lengths / 16).astype(int) // (BIN_TOKENS // 16)
    assert table.num_bins == bins.max() + 1 == 4
    assert table.model_name is None and table.method == "teacher_forced" and table.bin_tokens == BIN_TOKENS
    for budget, count in enumerate(PAGE_COUNTS):
        rates = np.concatenate([brute_force_rates(model, sequence, schedule_of(count)) for sequence in sequences])
        for index in range(table.num_bins):
            values = rates[bins == index]
            assert table.count[budget, index] == len(values) > 0
            assert table.mean[budget, index] == pytest.approx(values.mean(), abs=1e-5)
            assert table.quantile(0.05)[budget, index] == pytest.approx(np.quantile(values, 0.05), abs=6e-4)
        assert table.num_sequences(budget).tolist() == [2, 3, 3, 1]


def test_keeping_all_pages_gives_one(table):
    assert (table.quantile(0)[-1] > 1 - 1e-5).all() and (table.mean[-1] > 1 - 1e-6).all()
    assert table.mean[0, 1:].max() < 0.9  # the first bin has hardly more pages than are reserved


def test_the_model_is_left_as_it_was(model, sequences):
    model = copy.deepcopy(model).train()
    model.model.layers[1].eval()
    forward, implementation = model.model.forward, model.config._attn_implementation
    measure_acceptance(model, sequences[:1], RECIPE, [4], BIN_TOKENS)
    assert model.training and not model.model.layers[1].training and model.model.layers[2].mlp.training
    assert model.model.forward == forward and "forward" not in vars(model.model)
    assert model.config._attn_implementation == implementation
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dropout_does_not_act(model, sequences, table):
    model = copy.deepcopy(model).train()
    for layer in model.model.layers:
        layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.5)).train()
    assert measure_acceptance(model, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS) == table


def test_no_more_than_a_chunk_of_logits_exists(model, sequences, monkeypatch):
    sizes = []
    project = torch.nn.Linear.forward

    def forward(module, states):
        logits = project(module, states)
        if logits.shape[-1] == SHAPE["vocab_size"]:
            sizes.append(logits.shape[:-1].numel())
        return logits

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    list(sequence_acceptance(model, sequences[1], [schedule_of(4), schedule_of(5)], chunk_size=50))
    assert sizes == [50, 50, 50, 50, 50, 50, 30, 30] * 2
    # Budgets measured at once share the logits of the dense pass: here two of three do.
    sizes.clear()
    monkeypatch.setattr(acceptance_sweep, "BUDGETS_AT_ONCE", 2)
    measure_acceptance(model, sequences[1:2], RECIPE, PAGE_COUNTS, BIN_TOKENS, chunk_size=50)
    assert sizes[-20:] == [50] * 9 + [30] * 3 + [50] * 6 + [30] * 2


def test_no_bar_without_a_terminal(model, sequences, capsys):
    measure_acceptance(model, sequences[:1], RECIPE, [4], BIN_TOKENS)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_bar_on_a_terminal(model, sequences, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    measure_acceptance(model, sequences[:2], RECIPE, [4, 5], BIN_TOKENS)
    assert "Measuring acceptance: 100%" in capsys.readouterr().err


# Interruptions


class Interruption(Exception):
    pass


@pytest.fixture
def interrupt_after(monkeypatch):
    """Lets so many sequences and budgets into tables, and raises at the next."""
    update = AcceptanceTable.update

    def arm(updates):
        left = iter(range(updates))

        def interrupted(*args):
            if next(left, None) is None:
                raise Interruption
            update(*args)

        monkeypatch.setattr(AcceptanceTable, "update", interrupted)

    yield arm


@pytest.mark.parametrize(("interval", "at_once"), [(0, 1), (0, 2), (0, 4), (1e9, 2)])
def test_resuming_after_any_interruption_gives_the_same_table(
    model, sequences, table, tmp_path, monkeypatch, interrupt_after, interval, at_once
):
    monkeypatch.setattr(acceptance_sweep, "CHECKPOINT_SECONDS", interval)
    monkeypatch.setattr(acceptance_sweep, "BUDGETS_AT_ONCE", at_once)
    update = AcceptanceTable.update
    num_pairs = len(sequences) * len(PAGE_COUNTS)
    for updates in range(num_pairs + 1):
        path = tmp_path / f"{updates}.json"
        arguments = (model, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)
        if updates < num_pairs:
            interrupt_after(updates)
            with pytest.raises(Interruption):
                measure_acceptance(*arguments, checkpoint_path=path)
        measured = []

        def counting(*args, measured=measured):
            measured.append(args)
            update(*args)

        monkeypatch.setattr(AcceptanceTable, "update", counting)
        assert measure_acceptance(*arguments, checkpoint_path=path) == table
        of_last = updates % len(PAGE_COUNTS)
        kept = updates - of_last + (of_last // at_once * at_once if interval == 0 else 0)
        assert len(measured) == (num_pairs - kept if updates < num_pairs else num_pairs)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{n}.json" for n in range(num_pairs + 1))


def test_a_finished_checkpoint_needs_no_model_pass(model, sequences, table, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.json"
    arguments = (model, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)
    measure_acceptance(*arguments, checkpoint_path=path)
    monkeypatch.setattr(type(model.model), "forward", None)
    assert measure_acceptance(*arguments, checkpoint_path=path) == table


def trained(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.model.layers[3].mlp.parameters():
            parameter.mul_(1.001)
    return model


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("sequences", lambda a: a | {"sequences": a["sequences"][:-1]}),
        (
            "sequences",
            lambda a: a | {"sequences": [TokenSequence(s.token_ids, s.prompt_length - 1) for s in a["sequences"]]},
        ),
        ("page counts", lambda a: a | {"page_counts": [3, 5]}),
        ("bin tokens", lambda a: a | {"bin_tokens": 128}),
        ("recipe", lambda a: a | {"schedule_recipe": SparsityScheduleConfig(top_k_pages=[0], dense_layers=[1])}),
        ("model", lambda a: a | {"model_name": "other"}),
        ("weights", lambda a: a | {"model": trained(a["model"])}),
        ("weights", lambda a: a | {"model": copy.deepcopy(a["model"]).double()}),
    ],
)
def test_a_checkpoint_of_another_measurement_is_refused(model, sequences, tmp_path, interrupt_after, what, change):
    path = tmp_path / "checkpoint.json"
    arguments = {
        "model": model,
        "sequences": sequences,
        "schedule_recipe": RECIPE,
        "page_counts": PAGE_COUNTS,
        "bin_tokens": BIN_TOKENS,
        "checkpoint_path": path,
    }
    interrupt_after(4)
    with pytest.raises(Interruption):
        measure_acceptance(**arguments)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"belongs to another calibration: its {what} differ .* remove the file"):
        measure_acceptance(**change(arguments))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("identity"), "is no checkpoint of a calibration"),
        (lambda state: state.update(checkpoint_version=2), "another version of sparrow_trl"),
        (lambda state: state.update(identity=[]), "belongs to another calibration"),
        (lambda state: state.update(completed=13), "`completed` is 13, which must be between 0 and 12"),
        (lambda state: state.update(completed=-1), "`completed` is -1"),
        (lambda state: state["table"]["budgets"].pop(), "is damaged: `budgets` must have one entry"),
        (lambda state: state["table"].update(model_name="other"), "is damaged: .*`model_name` is"),
    ],
)
def test_a_damaged_checkpoint_is_refused(model, sequences, tmp_path, change, message):
    path = tmp_path / "checkpoint.json"
    arguments = (model, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)
    measure_acceptance(*arguments, checkpoint_path=path)
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=message):
        measure_acceptance(*arguments, checkpoint_path=path)


def test_a_checkpoint_that_cannot_be_written_shows_before_the_first_pass(model, sequences, tmp_path, monkeypatch):
    arguments = (model, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)
    monkeypatch.setattr(type(model.model), "forward", None)
    for path in (tmp_path, tmp_path / "missing" / "checkpoint.json"):
        with pytest.raises(ValueError, match="must be a file in an existing folder"):
            measure_acceptance(*arguments, checkpoint_path=path)

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(acceptance_sweep, "write_atomically", full_disk)
    with pytest.raises(OSError, match="No space left"):
        measure_acceptance(*arguments, checkpoint_path=tmp_path / "checkpoint.json")


# Several processes


def measure_on_a_rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = tiny_model("qwen3").eval()
    for num_sequences in (4, 1):
        measure_acceptance(
            model,
            random_sequences()[:num_sequences],
            RECIPE,
            PAGE_COUNTS,
            BIN_TOKENS,
            checkpoint_path=folder / f"checkpoint_{num_sequences}.json",
        ).save(folder / f"table_{num_sequences}_{rank}.json")
    torch.distributed.destroy_process_group()


@pytest.fixture
def one_thread():
    """Few rows are multiplied in an order that depends on the number of threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_two_processes_equal_one(model, sequences, tmp_path, one_thread):
    mp.start_processes(measure_on_a_rank, args=(tmp_path,), nprocs=2, start_method="spawn")
    for num_sequences in (4, 1):
        arguments = (model, sequences[:num_sequences], RECIPE, PAGE_COUNTS, BIN_TOKENS)
        expected = measure_acceptance(*arguments)
        for rank in range(2):
            assert AcceptanceTable.load(tmp_path / f"table_{num_sequences}_{rank}.json") == expected
        # Each rank measured its share, and keeps it apart.
        path = tmp_path / f"checkpoint_{num_sequences}.json"
        states = [json.loads(file.read_text()) for file in (path, path.with_name(f"{path.name}.rank1"))]
        shares = [AcceptanceTable.from_dict(state["table"]).count.sum() for state in states]
        assert sum(shares) == expected.count.sum() and shares[0] > 0 and (shares[1] > 0) == (num_sequences > 1)
        with pytest.raises(ValueError, match="its number of processes differ"):
            measure_acceptance(*arguments, checkpoint_path=path)


# Broken models


def spoil(module, position, value):
    """Puts `value` at one position of what `module` gives, where sequences are long enough."""

    def hook(module, args, output):
        if -output.shape[1] <= position < output.shape[1]:
            output = output.clone()
            output[:, position, 5] = value
        return output

    return module.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("name", "position", "reported"),
    [
        ("model.layers.3.mlp.down_proj", 80, "80"),
        # Below other layers a NaN may reach earlier positions too: attention multiplies it by a probability of 0.
        ("model.layers.2.self_attn.q_proj", 100, "(100|20)"),
        ("model.layers.1.mlp.gate_proj", 80, "(80|20)"),
        # Before the completion it shows at the first position that counts.
        ("model.embed_tokens", 10, "20"),
    ],
)
def test_a_nan_is_reported_with_its_layer_and_position(model, sequences, name, position, reported):
    broken = copy.deepcopy(model)
    spoil(broken.get_submodule(name), position, float("nan"))
    # `sequences[1]` is the longest and comes first.
    message = (
        rf"^The dense pass gives NaN logits at position {reported} of `sequences\[1\]`. The first module whose output "
        rf"is not finite is `{name}`, at position {position}.$"
    )
    with pytest.raises(ValueError, match=message):
        measure_acceptance(broken, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)
    assert "forward" not in vars(broken.model)
    assert sum(len(module._forward_hooks) for module in broken.modules()) == 1


def test_a_nan_among_experts_is_reported_with_its_position(sequences):
    broken = tiny_model("qwen3_moe").eval()

    def hook(module, args, output):
        if len(output) > 80:
            output = output.clone()
            output[80, 5] = float("nan")
        return output

    broken.model.layers[3].mlp.experts.register_forward_hook(hook)  # [tokens, hidden]
    message = "at position 80 of .* whose output is not finite is `model.layers.3.mlp.experts`, at position 80.$"
    with pytest.raises(ValueError, match=message):
        measure_acceptance(broken, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)


def test_a_nan_of_the_sparse_pass_names_the_budget(model, sequences, monkeypatch):
    attention = acceptance_sweep.sparse_attention_context

    def broken_context(model, schedule, **kwargs):
        if schedule.top_k_pages == [2] and len(sequences[1].token_ids) > 100:
            hooks.append(spoil(model.model.layers[3].self_attn.o_proj, -50, float("nan")))
        return attention(model, schedule, **kwargs)

    hooks = []
    monkeypatch.setattr(acceptance_sweep, "sparse_attention_context", broken_context)
    message = (
        r"The sparse pass with `top_k_pages` \[2\] gives NaN logits at position 150 of `sequences\[1\]`. The first "
        "module whose output is not finite is `model.layers.3.self_attn.o_proj`, at position 150"
    )
    with pytest.raises(ValueError, match=message):
        measure_acceptance(copy.deepcopy(model), sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)
    assert hooks


@pytest.mark.parametrize("chunk_size", [7, 256])
@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_infinite_logits_are_reported(sequences, value, chunk_size):
    broken = tiny_model("qwen3_untied").eval()

    def hook(module, args, output):
        marked = (args[0] == spot).all(-1)
        return output.masked_fill(marked[..., None], value)

    # Found by its hidden state, since the head sees a chunk at a time.
    with torch.no_grad():
        spot = broken.model(torch.tensor([sequences[1].token_ids[:-1]])).last_hidden_state[0, 64]
    broken.lm_head.register_forward_hook(hook)
    with pytest.raises(ValueError) as error:
        measure_acceptance(broken, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS, chunk_size=chunk_size)
    assert str(error.value) == (
        "The dense pass gives infinite logits at position 64 of `sequences[1]`. The first module whose output is not "
        "finite is `lm_head`, at position 64."
    )


def test_a_failure_that_comes_and_goes_says_so(model, sequences):
    broken = copy.deepcopy(model)
    calls = []

    def hook(module, args, output):
        calls.append(output.shape[1])
        return output * float("nan") if calls.count(200) == 1 and output.shape[1] == 200 else output

    broken.model.layers[2].mlp.down_proj.register_forward_hook(hook)
    with pytest.raises(ValueError, match="NaN logits at position 20 .* the failure comes and goes"):
        measure_acceptance(broken, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)


# Refusals


class Stopped(Exception):
    pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequences": []}, "There are no sequences"),
        ({"sequences": [TokenSequence([2] * 9, 10)]}, r"`sequences\[0\]` has a prompt of 10 tokens, more than its 9"),
        ({"sequences": [TokenSequence([2] * 9, 0)]}, "has a prompt of 0 tokens; it needs at least one"),
        (
            {"sequences": [TokenSequence([2] * 9, 4), TokenSequence([2] * 9, 8)]},
            r"`sequences\[1\]` has a completion of 1 tokens; it needs at least two",
        ),
        ({"sequences": [TokenSequence([2] * 9, 9)]}, "has a completion of 0 tokens"),
        ({"sequences": [TokenSequence([2] * 2049, 9)]}, "has 2049 tokens, but the model has 2048 positions"),
        ({"sequences": [TokenSequence([2, 3.0, 4, 5], 1)]}, r"`sequences\[0\]` must have a list of `int` token ids"),
        ({"sequences": [TokenSequence([2, 3, 4, 5], 1.0)]}, "and an `int` prompt length"),
        ({"sequences": [TokenSequence(torch.tensor([2, 3, 4, 5]), 1)]}, "must have a list of `int` token ids"),
        ({"sequences": [TokenSequence([2, 3, 4, 1000], 1)]}, r"has token ids outside \[0, "),
        ({"sequences": [TokenSequence([2, 3, -4, 5], 1)]}, r"has token ids outside \[0, "),
        ({"page_counts": [2, 5]}, "must cover the 3 reserved pages"),
        ({"page_counts": [5, 4]}, "must ascend"),
        ({"bin_tokens": 100}, "multiple of `page_size`"),
        ({"chunk_size": 0}, "`chunk_size` must be positive, got 0"),
        (
            {"schedule_recipe": SparsityScheduleConfig(top_k_pages=[0], dense_layers=[1, 4])},
            "`dense_layers` names layer 4, but the model has 4",
        ),
        ({"schedule_recipe": SparsityScheduleConfig.dense()}, "all layers dense"),
        ({"model": torch.nn.Linear(2, 2)}, "needs a causal language model of transformers, got Linear"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(model, sequences, monkeypatch, tmp_path, changes, message):
    def forward(*args, **kwargs):
        raise Stopped

    monkeypatch.setattr(type(model.model), "forward", forward)
    arguments = {
        "model": model,
        "sequences": sequences,
        "schedule_recipe": RECIPE,
        "page_counts": PAGE_COUNTS,
        "bin_tokens": BIN_TOKENS,
        "checkpoint_path": tmp_path / "checkpoint.json",
    }
    with pytest.raises(ValueError, match=message):
        measure_acceptance(**{**arguments, **changes})
    assert not list(tmp_path.iterdir())
    with pytest.raises(Stopped):
        measure_acceptance(**arguments)


def test_models_that_sparse_attention_does_not_support_are_refused(sequences):
    model, lengths = tiny_model("mistral_window").eval(), []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with pytest.raises(ValueError, match="does not support a sliding window"):
        measure_acceptance(model, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)
    assert max(lengths) == 2  # before any long pass


def test_models_without_a_head_or_with_virtual_tokens_are_refused(model, sequences):
    with pytest.raises(ValueError, match="needs a causal language model"):
        measure_acceptance(AutoModel.from_config(model.config), sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)
    prompted = get_peft_model(copy.deepcopy(model), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="virtual tokens before the prompt"):
        measure_acceptance(prompted, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)


def test_a_model_that_bypasses_its_backbone_is_refused(model, sequences, monkeypatch):
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, input_ids: type("Output", (), {"logits": torch.zeros(1, input_ids.shape[1], 9)}),
    )
    with pytest.raises(ValueError, match="does not make logits from the hidden states of its backbone"):
        measure_acceptance(model, sequences, RECIPE, PAGE_COUNTS, BIN_TOKENS)


def test_sequences_inside_one_bin_give_a_warning(model, sequences):
    with pytest.warns(UserWarning, match="None of the 2 sequences .* from 21 to 200, and `bin_tokens` is 256"):
        measure_acceptance(model, sequences[:2], RECIPE, [4], 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure_acceptance(model, sequences[:2], RECIPE, [4], 128)
