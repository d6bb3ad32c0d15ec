"""The search as a whole: it finds the layer that matters, and its result is what independent measurements say."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import model_of_one_layer, random_token_ids, tiny_tokenizer

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.acceptance_sweep import TokenSequence, sequence_acceptance
from sparrow_trl.bench_traffic import step_traffic
from sparrow_trl.cli import main
from sparrow_trl.cli_search import cut_texts, load_sequences, load_texts, parse_arguments
from sparrow_trl.cost_model import CostShape
from sparrow_trl.recipe_search import RecipeChoices, RecipeSearchResult, plan_passes, search_recipe
from sparrow_trl.recipe_search_report import search_tables


REASONER = Path(__file__).parent.parent / "examples" / "tiny_reasoner" / "model"
LAYER = 2
OPTIONS = {"bin_tokens": 128, "target_acceptance": 0.9, "margin": 0.01, "min_tokens": 50, "max_passes": 200}


@pytest.fixture(scope="module")
def model():
    return model_of_one_layer(LAYER)


@pytest.fixture(scope="module")
def sequences():
    return [TokenSequence(row, 20) for row in random_token_ids(391, 386, 380)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("search")


@pytest.fixture(scope="module")
def result(model, sequences, folder):
    return search_recipe(
        model,
        sequences[:2],
        held_out=sequences[2:],
        recipe_sequences=1,
        measurements_folder=folder,
        **OPTIONS,
    )


def tails_of(model, sequences, schedule, num_bins):
    rates = np.concatenate([next(sequence_acceptance(model, entry, [schedule])).numpy() for entry in sequences])
    bins = schedule.bin_index(np.concatenate([entry.cached_lengths.numpy() for entry in sequences]))
    return [float(np.quantile(rates[bins == index], 0.05)) for index in range(num_bins)]


def test_the_bytes_go_to_the_layer_that_matters(result):
    schedule = result.schedule
    assert result.groups[0] == [LAYER] and schedule.dense_layers == []
    budgets = [schedule.budget(300, layer) for layer in range(4)]
    assert budgets[LAYER] > max(budgets[:LAYER] + budgets[LAYER + 1 :])
    # The paper's recipe reads two layers whole that do not matter.
    assert result.ratio == result.found.total_bytes / result.paper.total_bytes < 0.6
    assert result.found.total_bytes < result.uniform.total_bytes < result.paper.total_bytes
    for name in ("paper", "refined"):
        assert getattr(result.speedups["found"], name) > getattr(result.speedups["paper"], name)


def test_tails_and_bytes_are_what_other_measurements_say(model, sequences, result):
    shape = CostShape.from_config(model.config)
    for fit in (result.paper, result.uniform, result.found):
        assert fit.schedule.target_acceptance == 0.9
        assert fit.tails == pytest.approx(tails_of(model, sequences[:2], fit.schedule, 3), abs=1e-4)
        assert min(fit.tails) >= 0.91
        lengths = range(21, fit.schedule.bin_lengths(2)[1] + 1)
        traffic = step_traffic(shape, 1, lengths, fit.schedule)
        assert fit.total_bytes == pytest.approx(traffic.kv + traffic.landmarks)
        assert fit.pages == pytest.approx(fit.total_bytes / 16 / shape.kv_bytes_per_token)
    assert result.bin_ratios[2] == result.found.bin_bytes[2] / result.paper.bin_bytes[2]
    assert result.paper.schedule.dense_layers == [0, 1] and result.paper.schedule.layer_top_k_pages is None
    held = result.held_out
    assert held.num_sequences == 1 and held.tokens == [92, 128, 128]
    assert held.found == pytest.approx(tails_of(model, sequences[2:], result.schedule, 3), abs=1e-4)
    assert held.paper == pytest.approx(tails_of(model, sequences[2:], result.paper.schedule, 3), abs=1e-4)
    tails = result.schedule.calibration["tails"]
    assert list(tails) == ["0", "128", "256"] and tails["256"] == round(result.found.tails[2], 4)


def test_recipes_are_searched_one_coordinate_after_the_other(result):
    names = [fit.name for fit in result.candidates]
    assert names[0] == "mean_query, landmarks 1 x auto, pages of 16, dense layers 0, 1"
    assert names[1] == "mean_query, landmarks 1 x auto, pages of 16, dense layers none"
    assert names[2] == "group_softmax, landmarks 1 x auto, pages of 16, dense layers none"
    assert len(names) == len(set(names)) <= RecipeChoices().num_candidates == 6
    cheapest = min(result.candidates, key=lambda fit: fit.total_bytes)
    for field in ("page_score", "landmarks_per_page", "landmark_dtype", "dense_layers", "page_size"):
        assert getattr(result.uniform.schedule, field) == getattr(cheapest.schedule, field)


def test_dense_layers_must_earn_it(model, sequences):
    choices = RecipeChoices(
        dense_layers=[[0, 1]], page_scores=["group_softmax"], landmark_dtypes=["auto"], landmarks_per_page=[1]
    )
    result = search_recipe(model, sequences[:1], choices=choices, **OPTIONS)
    assert result.uniform.schedule.dense_layers == [0, 1] and [0, 1] in result.groups
    assert result.schedule.dense_layers == []
    assert result.schedule.budget(300, 0) < 100 and min(result.found.tails) >= 0.91


def test_a_search_goes_on_where_it_was(model, sequences, folder, result, monkeypatch):
    calls = []
    original = sequence_acceptance

    def counted(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr("sparrow_trl.schedule_measurements.sequence_acceptance", counted)
    again = search_recipe(
        model, sequences[:2], held_out=sequences[2:], recipe_sequences=1, measurements_folder=folder, **OPTIONS
    )
    assert again == result and not calls
    for path in list(folder.iterdir())[::3]:
        path.unlink()
    again = search_recipe(
        model, sequences[:2], held_out=sequences[2:], recipe_sequences=1, measurements_folder=folder, **OPTIONS
    )
    assert again == result and calls


def as_long_as_allowed(budgets, measure, levels, may_measure, **options):
    for index in itertools.product(*map(range, budgets.full + 1)):
        if not may_measure():
            return levels
        measure(np.array([index, *levels[1:]]))


def test_passes_are_bounded(result, model, sequences, monkeypatch):
    plan = plan_passes(
        RecipeChoices(), num_layers=4, num_sequences=2, recipe_sequences=1, max_passes=200, held_out_sequences=1
    )
    assert plan == {
        "recipes": (6 + 2) + 5 * 5,
        "fits on all sequences": 2 * 5 * 2,
        "sensitivity": 2 * 4 * 2,
        "budgets": 200 - 33 - 20 - 16,
        "held out": 2,
    }
    assert result.passes.keys() == plan.keys() and all(result.passes[name] <= plan[name] for name in plan)
    assert result.passes["sensitivity"] == 16 and result.passes["held out"] == 2
    with monkeypatch.context() as patch:
        patch.setattr("sparrow_trl.recipe_search.lower_levels", as_long_as_allowed)
        few = search_recipe(model, sequences[:2], recipe_sequences=1, **{**OPTIONS, "max_passes": 72})
    # A schedule takes two sequences.
    assert sum(few.passes.values()) in (71, 72)
    with pytest.raises(ValueError, match="`max_passes` is 40, but the stages before the budgets may take 69 passes"):
        search_recipe(model, sequences[:2], recipe_sequences=1, **{**OPTIONS, "max_passes": 40})


def test_results_survive_json(result, tmp_path):
    result.save(tmp_path)
    assert RecipeSearchResult.load(tmp_path) == result
    assert SparsityScheduleConfig.from_pretrained(tmp_path) == result.schedule
    assert (tmp_path / "recipe_search.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "recipe_search.md").read_text()
    assert f"{result.ratio:.1%}" in text and f"{result.held_out.found[1]:.4f}" in text
    values = json.loads((tmp_path / "recipe_search.json").read_text())
    with pytest.raises(ValueError, match="another version"):
        RecipeSearchResult.from_dict({**values, "format_version": 9})
    with pytest.raises(ValueError, match="damaged: KeyError: 'paper'"):
        RecipeSearchResult.from_dict({name: value for name, value in values.items() if name != "paper"})
    budgets = search_tables(result)[2]
    assert budgets.rows[0] == [str(LAYER), *[str(result.schedule.budget(n, LAYER) // 16) for n in (112, 240, 368)]]


def test_without_enough_tokens_nothing_is_measured(model, sequences):
    with pytest.raises(ValueError, match="No bin has the 5,000 tokens .* on 3 sequences is 384"):
        search_recipe(model, sequences, **{**OPTIONS, "min_tokens": 5000})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 0}, "`num_groups` must be a positive integer, got 0"),
        ({"margin": 0.2}, "must be in .* together, got 0.9 and 0.2"),
        ({"sensitivity_factor": 1}, "`sensitivity_factor` must be above 1"),
        ({"page_ladder": [4, 0]}, "`page_ladder` must hold positive integers"),
        ({"bin_tokens": 100}, "multiple of `page_size`"),
        ({"choices": RecipeChoices(page_sizes=[256])}, "multiple of `page_size`"),
        ({"choices": RecipeChoices(dense_layers=[[4]])}, "The model has 4 layers"),
        ({"steps": [0]}, "`steps` must be positive"),
        ({"confidence": 2}, "`confidence` must be between 0 and 1"),
    ],
)
def test_bad_options_are_refused(model, sequences, options, message):
    with pytest.raises(ValueError, match=message):
        search_recipe(model, sequences, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"page_scores": []}, "`page_scores` must have at least one"),
        ({"page_scores": ["mean_query"], "landmarks_per_page": [2, 4]}, "go with no score"),
        ({"page_scores": ["quest"]}, "`page_score` must be one of"),
        ({"page_sizes": [24]}, "power of two"),
    ],
)
def test_impossible_recipes_are_refused(lists, message):
    with pytest.raises(ValueError, match=message):
        RecipeChoices(**lists)


# The command


def test_the_command_needs_neither_trl_nor_vllm():
    code = (
        "import sys\nsys.modules.update(trl=None, vllm=None)\n"
        "import sparrow_trl.cli, sparrow_trl.cli_search, sparrow_trl.recipe_search_report\n"
        "sparrow_trl.cli.main(['search', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--max_passes" in done.stdout, done.stderr


def test_the_command_searches_for_the_tiny_reasoner(tmp_path, capsys):
    from transformers import AutoTokenizer

    train = json.loads((REASONER / "training_log.json").read_text())
    assert train
    vocabulary = [token for token in AutoTokenizer.from_pretrained(REASONER).get_vocab() if len(token) == 1]
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(sorted(vocabulary), 420)) for _ in range(3)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in [texts[0], "short", *texts[1:]]))
    config = tmp_path / "search.yaml"
    config.write_text("num_sequences: 2\nheldout: 1\nlandmark_dtypes: [auto]\ndense_layers: ['0,1', none]\n")
    arguments = ["--model_name_or_path", str(REASONER), "--texts", str(path), "--config", str(config)]
    arguments += ["--max_length", "400", "--prompt_tokens", "20", "--bin_tokens", "128", "--min_tokens", "50"]
    arguments += ["--target_acceptance", "0.7", "--max_passes", "150", "--output_dir", str(tmp_path / "out")]
    assert main(["search", *arguments, "--plan_only", "True"]) == 0
    assert "150" not in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["search", *arguments]) == 0
    output = capsys.readouterr().out
    result = RecipeSearchResult.load(tmp_path / "out")
    assert f"reads {result.ratio:.1%} of the bytes" in output and "At most 152 passes" in output
    assert result.ratio <= 1 and result.held_out.num_sequences == 1 and result.options["model"] == str(REASONER)
    assert all(fit.schedule.landmark_dtype == "auto" for fit in result.candidates)
    assert SparsityScheduleConfig.from_pretrained(tmp_path / "out").base_model_name_or_path == str(REASONER)
    assert list((tmp_path / "out" / "measurements").glob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give either --texts or --sequences"),
        (["--texts", "a", "--sequences", "b"], "Give either"),
        (["--texts", "a", "--num_sequences", "0"], "--num_sequences must be positive"),
        (["--texts", "a", "--dtype", "int4"], "--dtype must be one of"),
        (["--texts", "a", "--prompt_tokens", "4095"], "--prompt_tokens must be between 1 and 4094"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(["--model_name_or_path", "m", *arguments])


def test_yaml_gives_defaults_and_unknown_keys_are_refused(tmp_path):
    path = tmp_path / "search.yaml"
    path.write_text("model_name_or_path: m\ntexts: t\nmargin: 0.02\nnum_groups: 3\n")
    args = parse_arguments(["--config", str(path), "--num_groups", "5", "--dense_layers", "none", "2,3"])
    assert (args.model_name_or_path, args.margin, args.num_groups) == ("m", 0.02, 5)
    assert args.choices.values("dense_layers") == [[], [2, 3]]
    with pytest.raises(ValueError, match="--dense_layers takes lists of layers"):
        _ = replace(args, dense_layers=["first"]).choices
    path.write_text("model: m\n")
    with pytest.raises(ValueError, match="unknown arguments: model"):
        parse_arguments([f"--config={path}"])


def test_texts_and_sequences_are_read(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "abcdefgh"}\n\n{"text": "ab"}\n{"text": "abcd"}\n')
    args = parse_arguments(["--model_name_or_path", "m", "--texts", "t", "--max_length", "6", "--prompt_tokens", "2"])
    rows = cut_texts(tiny_tokenizer(), load_texts(str(path)), args)
    assert [(len(row.token_ids), row.prompt_length) for row in rows] == [(6, 2), (4, 2)]
    (tmp_path / "one.txt").write_text("abcdefghijklmno")
    rows = cut_texts(tiny_tokenizer(), load_texts(str(tmp_path / "one.txt")), args)
    assert [len(row.token_ids) for row in rows] == [6, 6] and rows[0].token_ids[0] != rows[1].token_ids[0]
    for line, message in (("{", "line 2"), ('{"prompt": "a"}', "Line 2 .* column `text`")):
        path.write_text('{"text": "a"}\n' + line)
        with pytest.raises(ValueError, match=message):
            load_texts(str(path))
    with pytest.raises(ValueError, match="--texts must be a file"):
        load_texts(str(tmp_path / "missing.txt"))

    path = tmp_path / "sequences.json"
    path.write_text(json.dumps({"settings": {}, "sequences": [[2, [5, 6, 7, 8, 9]], [3, [5, 6, 7]]]}))
    assert load_sequences(path, 4) == [TokenSequence([5, 6, 7, 8], 2)]
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no sequences of sparrow-trl calibrate"):
        load_sequences(path, 4)
