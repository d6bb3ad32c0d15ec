"""Calibration the paper's way: each budget on the sequences that it has generated itself."""

import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import SHAPE, save_tiny_model, tiny_model, tiny_tokenizer

from sparrow_trl import SparsityScheduleConfig, rollout_sequences
from sparrow_trl.acceptance_sweep import TokenSequence, measure_rollout_acceptance, sequence_acceptance
from sparrow_trl.acceptance_table import AcceptanceTable
from sparrow_trl.attention import sparse_attention_context
from sparrow_trl.calibration import calibrate, fit_schedule
from sparrow_trl.cli import main
from sparrow_trl.rollout_sequences import SparseRollouts


RECIPE = SparsityScheduleConfig(top_k_pages=[0], bin_tokens=64, dense_layers=[0])
ALL_PAGES = replace(RECIPE, top_k_pages=[97])
PROMPTS = ["Which pages does it read? " * n + str(n) for n in (2, 3, 3, 4, 4, 5)]
MAX_LENGTH = 240
OPTIONS = {"bin_tokens": 64, "min_tokens": 50, "chunk_size": 64}


def without_end():
    """The tiny model with an end of sequence that it hardly ever samples, so that lengths suffice."""
    model = tiny_model("qwen3_untied").eval()
    with torch.no_grad():
        model.lm_head.weight[1] = 0
    return model


@pytest.fixture(scope="module")
def model():
    return without_end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("calibration") / "measurement_rollouts"


@pytest.fixture(scope="module")
def rollouts(model, folder):
    with SparseRollouts(model, tiny_tokenizer(), PROMPTS, RECIPE, max_length=MAX_LENGTH, folder=folder) as rollouts:
        yield rollouts


def log_ratios(model, sequences, schedule):
    """Log-probs of the sampled tokens under sparse attention less those under dense, but for the first tokens."""
    ratios = []
    for sequence in sequences:
        ids, start = torch.tensor([sequence.token_ids]), sequence.prompt_length
        with torch.no_grad():
            dense = model(ids).logits[0]
            with sparse_attention_context(model, schedule, prompt_lengths=torch.tensor([start])):
                sparse = model(ids).logits[0]
        both = (sparse.log_softmax(-1) - dense.log_softmax(-1))[start:-1]
        ratios.append(both.gather(-1, ids[0, start + 1 :, None])[:, 0])
    return torch.cat(ratios)


def test_sequences_are_samples_under_their_schedule(model, rollouts):
    sparse, everything = rollouts.generate(replace(RECIPE, top_k_pages=[0])), rollouts.generate(ALL_PAGES)
    assert sparse != everything
    for sequences in (sparse, everything):
        prompts = [sequence.token_ids[: sequence.prompt_length] for sequence in sequences]
        assert prompts == tiny_tokenizer()(PROMPTS)["input_ids"]
        assert np.mean([len(sequence.token_ids) for sequence in sequences]) > 150
    # The mean log-ratio is the Kullback-Leibler divergence of one to the other: its sign tells who sampled.
    schedule = replace(RECIPE, top_k_pages=[0])
    assert log_ratios(model, sparse, schedule).mean() > 0.1
    assert log_ratios(model, everything, schedule).mean() < -0.1
    # The prompt is dense, and so is the first token.
    firsts = [[sequence.token_ids[sequence.prompt_length] for sequence in them] for them in (sparse, everything)]
    assert firsts[0] == firsts[1]


def test_one_engine_serves_every_schedule(rollouts, monkeypatch):
    before = rollouts.generate(replace(RECIPE, top_k_pages=[2]))
    monkeypatch.setattr(rollout_sequences, "start_engine", lambda *args: pytest.fail("another engine"))
    growing = rollouts.generate(replace(RECIPE, top_k_pages=[2, 2, 5]))
    assert growing != before
    # The same schedule in other words, and the same sequences once more.
    assert rollouts.generate(replace(RECIPE, top_k_pages=[2, 2, 2])) is before
    again = rollouts._complete(replace(RECIPE, top_k_pages=[2]))
    assert again == before
    with pytest.raises(ValueError, match="has another recipe"):
        rollouts.generate(replace(RECIPE, top_k_pages=[2], dense_layers=[]))


def test_what_was_generated_needs_no_engine(model, rollouts, folder, monkeypatch):
    expected = rollouts.generate(ALL_PAGES)
    assert all(not path.name.startswith(".") for path in folder.iterdir())
    monkeypatch.setattr(rollout_sequences, "start_engine", lambda *args: pytest.fail("started an engine"))
    arguments = (model, tiny_tokenizer(), PROMPTS, RECIPE)
    assert SparseRollouts(*arguments, max_length=MAX_LENGTH, folder=folder).generate(ALL_PAGES) == expected
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    for changed, options, what in (
        (model, {"seed": 1}, "seed"),
        (model, {"max_length": 239}, "maximum length"),
        (other, {}, "weights"),
    ):
        others = SparseRollouts(changed, *arguments[1:], **{"max_length": MAX_LENGTH, "folder": folder, **options})
        with pytest.raises(ValueError, match=f"rollouts of another calibration: its {what} differ from these. Use"):
            others.generate(ALL_PAGES)


def test_a_schedule_is_fitted_to_rollouts(model, rollouts):
    page_counts = [3, 5, 8, 100]
    seen = []
    options = {**OPTIONS, "page_counts": page_counts, "on_measured": seen.append}
    result = fit_schedule(model, rollouts, target_acceptance=0.5, allow_dense=True, **options)
    (table,) = seen
    assert result.table is table and table.method == "rollout" and table.recipe["dense_layers"] == [0]
    assert result.schedule.calibration["method"] == "rollout"
    for budget, count in enumerate(page_counts):
        schedule = replace(RECIPE, top_k_pages=[count - 3])
        rates, lengths = [], []
        for sequence in rollouts.generate(schedule):
            rates += next(sequence_acceptance(model, sequence, [schedule])).tolist()
            lengths += sequence.cached_lengths.tolist()
        bins = RECIPE.bin_index(np.array(lengths))
        assert table.count[budget].tolist() == np.bincount(bins, minlength=table.num_bins).tolist()
        for index in np.unique(bins):
            assert table.mean[budget, index] == pytest.approx(np.array(rates)[bins == index].mean(), abs=1e-5)
    assert table.mean[0, 2] < 0.9 < 0.999 < table.mean[3, 2]
    # What is verified are the schedule's own rollouts.
    rates, lengths = [], []
    for sequence in rollouts.generate(result.schedule):
        rates += next(sequence_acceptance(model, sequence, [result.schedule])).tolist()
        lengths += sequence.cached_lengths.tolist()
    bins = RECIPE.bin_index(np.array(lengths))
    assert sum(entry.tokens for entry in result.verified) == len(rates) == result.schedule.calibration["tokens"]
    for entry in result.verified:
        tail = np.quantile(np.array(rates)[bins == entry.start // 64], 0.05)
        assert entry.tail == pytest.approx(tail, abs=1e-3)


def test_the_command_goes_on_from_what_was_generated(model, rollouts, folder, tmp_path, monkeypatch, capsys):
    rollouts.generate(ALL_PAGES)
    saved, output = tmp_path / "model", tmp_path / "out"
    save_tiny_model("qwen3_untied", saved)
    model.save_pretrained(saved)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    shutil.copytree(folder, output / "measurement_rollouts")
    monkeypatch.setattr(rollout_sequences, "start_engine", lambda *args: pytest.fail("started an engine"))
    arguments = ["calibrate", "--model_name_or_path", str(saved), "--dataset", str(prompts), "--method", "rollout"]
    options = [
        "--output_dir",
        str(output),
        "--max_length",
        str(MAX_LENGTH),
        "--bin_tokens",
        "64",
        "--min_tokens",
        "50",
    ]
    assert main([*arguments, *options, "--dense_layers", "0", "--page_counts", "100"]) == 0
    assert "tail, whole schedule" in capsys.readouterr().out
    table = AcceptanceTable.load(output / "acceptance_table.json")
    assert table.method == "rollout" and table.page_counts == [100] and table.quantile(0.05)[0, 2] > 0.999
    assert SparsityScheduleConfig.from_pretrained(output).calibration["method"] == "rollout"
    assert main([*arguments, *options, "--dense_layers", "0", "--page_counts", "100", "--seed", "1"]) == 1
    assert "its seed differ from these" in capsys.readouterr().err


# Without an engine


@pytest.fixture(scope="module")
def given():
    """Sequences of three budgets, of other numbers and lengths."""
    generator = torch.Generator().manual_seed(0)
    shapes = [[(150, 37), (201, 20)], [(90, 61)], [(121, 118), (140, 30), (100, 30)]]
    return [
        [TokenSequence(torch.randint(2, 70, (n,), generator=generator).tolist(), prompt) for n, prompt in budget]
        for budget in shapes
    ]


def test_each_budget_is_measured_on_its_own_sequences(model, given):
    table = measure_rollout_acceptance(model, given, RECIPE, [3, 5, 100], 64)
    for budget, sequences in enumerate(given):
        expected = [next(sequence_acceptance(model, item, [table.schedule(budget)])).numpy() for item in sequences]
        assert table.count[budget].sum() == sum(map(len, expected))
        total = (table.mean[budget] * table.count[budget])[table.count[budget] > 0].sum()
        assert total == pytest.approx(sum(rates.sum() for rates in expected), abs=1e-3)
    # Bins that each budget's sequences reach into.
    assert [table.num_sequences(budget).sum() for budget in range(3)] == [3 + 4, 1, 1 + 3 + 2]
    with pytest.raises(ValueError, match="`rollouts` has 3 budgets, but `page_counts` has 2"):
        measure_rollout_acceptance(model, given, RECIPE, [3, 5], 64)
    bad = [given[0], [TokenSequence([2] * 9, 8)], given[2]]
    with pytest.raises(ValueError, match=r"`rollouts\[1\]\[0\]` has a completion of 1 tokens"):
        measure_rollout_acceptance(model, bad, RECIPE, [3, 5, 100], 64)


def test_lengths_that_damaged_rollouts_alone_reach_do_not_count(model):
    class Given(SparseRollouts):
        def __init__(self):
            self.recipe, self.max_length = RECIPE, 240

        def generate(self, schedule):
            longest = 240 if schedule.top_k_pages[-1] == 0 else 170
            generator = torch.Generator().manual_seed(0)
            return [TokenSequence(torch.randint(2, 70, (longest,), generator=generator).tolist(), 20)] * 2

    result = fit_schedule(model, Given(), page_counts=[3, 100], target_acceptance=0.99, **OPTIONS)
    assert result.table.count[:, 3].min() == 0 and result.table.count[:, 3].max() >= 50
    assert [choice.status for choice in result.search.bins] == ["measured"] * 3 + ["too few tokens"]
    assert result.schedule.top_k_pages[1:] == [97] * 3


class Interruption(Exception):
    pass


def test_scoring_goes_on_after_any_interruption(model, given, tmp_path, monkeypatch):
    monkeypatch.setattr("sparrow_trl.acceptance_sweep.CHECKPOINT_SECONDS", 0)
    arguments = (model, given, RECIPE, [3, 5, 100], 64)
    expected, update = measure_rollout_acceptance(*arguments), AcceptanceTable.update
    for stop in range(6):
        path, calls = tmp_path / f"{stop}.json", []

        def counting(*args, calls=calls, stop=stop):
            if len(calls) == stop:
                calls.append(None)
                raise Interruption
            calls.append(args)
            update(*args)

        monkeypatch.setattr(AcceptanceTable, "update", counting)
        with pytest.raises(Interruption):
            measure_rollout_acceptance(*arguments, checkpoint_path=path)
        assert measure_rollout_acceptance(*arguments, checkpoint_path=path) == expected
        assert len(calls) == 6 + 1  # each pair once, and the interruption
        monkeypatch.setattr(AcceptanceTable, "update", update)
    with pytest.raises(ValueError, match="belongs to another calibration: its sequences differ"):
        measure_rollout_acceptance(model, [given[0], given[0], given[2]], *arguments[2:], checkpoint_path=path)


def test_what_cannot_be_rolled_out_is_refused_before_an_engine_starts(model, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_sequences, "start_engine", lambda *args: pytest.fail("started an engine"))
    arguments = (tiny_tokenizer(), PROMPTS)
    options = {"max_length": MAX_LENGTH, "method": "rollout", "recipe": RECIPE, "page_counts": [3, 100], **OPTIONS}
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
    layers = replace(RECIPE, dense_layers=[SHAPE["num_hidden_layers"]])
    for other, changes, message in (
        (model, {"method": "paper"}, "`method` must be one of teacher_forced, rollout, got 'paper'"),
        (model, {"generator": "transformers"}, "must be 'vllm' or 'auto' with rollouts"),
        (model, {"page_counts": [5, 3]}, "`page_counts` must ascend"),
        (model, {"page_counts": [2, 5]}, "must cover the 3 reserved pages"),
        (model, {"recipe": layers}, "names the layers 4, but the policy has 4"),
        (model, {"max_length": 60}, r"`prompts\[\d\]` has \d+ tokens"),
        (model, {"checkpoint_path": tmp_path / "missing" / "m.json"}, "missing is no folder"),
        (model, {"target_acceptance": 86}, "target_acceptance"),
        (adapted, {}, "PEFT adapters, which the engine does not load"),
        (tiny_model("mistral_window"), {}, "need full attention in every layer"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(other, *arguments, **{**options, **changes})
