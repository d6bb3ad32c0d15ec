"""The control study's example: its settings, its runs on one engine, and its report."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_training import make_config


EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import control_study  # noqa: E402
from control_study import Setting, Study, StudyArguments  # noqa: E402
from control_study_report import has_collapsed, kept_of, load_runs, metric_curve, report, summarize  # noqa: E402

from sparrow_trl import SparsityScheduleConfig  # noqa: E402


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense", ("dense", None, None, False)),
        ("tail-0.86+uncorrected", ("tail", 0.86, "uncorrected", False)),
        ("pages-8", ("pages", 8, None, False)),
        ("harsh+mask+oversample", ("harsh", None, "mask", True)),
        ("tail-.9+sequence", ("tail", 0.9, "sequence", False)),
    ],
)
def test_settings_are_read(name, expected):
    setting = Setting.parse(name)
    assert (setting.rollouts, setting.value, setting.correction, setting.oversample) == expected
    assert setting.name == name


@pytest.mark.parametrize(
    "name",
    ["sparse", "tail", "tail-x", "tail-86", "tail-0", "tail-0.0", "pages-0", "pages--3", "pages-8.5", "dense-3"]
    + ["harsh+mask+sequence", "harsh+other", "harsh+"],
)
def test_other_settings_are_refused(name):
    with pytest.raises(ValueError, match="is no setting"):
        Setting.parse(name)


def make_arguments(**kwargs):
    return StudyArguments(
        **{
            "model_name_or_path": str(EXAMPLES / "tiny_reasoner" / "model"),
            "settings": ["dense", "guard", "tail-0.9", "harsh+uncorrected"],
            "harsh_pages": 2,
            "page_counts": [5, 16, 34],
            "calibration_tasks": 12,
            "num_eval_tasks": 4,
            "num_train_tasks": 20,
            **kwargs,
        }
    )


def make_training_args(folder, **kwargs):
    # The recipe of the example, but with a tail that a step's few tokens have.
    recipe = SparsityScheduleConfig.from_pretrained(EXAMPLES / "tiny_reasoner" / "schedules" / "study")
    replace(recipe, tail_quantile=0.05).save_pretrained(folder / "recipe")
    return make_config(
        folder,
        **{
            "sparsity_schedule": str(folder / "recipe"),
            "max_steps": 1,
            "max_completion_length": 190,
            "vllm_max_model_length": 768,
            "vllm_block_size": None,
            "acceptance_probe_fraction": 1.0,
            "vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_memory_bytes": 2**27, "max_num_seqs": 16},
            **kwargs,
        },
    )


def record(trainer):
    """The batches that a trainer learns from, and the rows of its generation batches."""
    trainer.batches, trainer.generated = [], []
    score = trainer._generate_and_score_completions

    def keep(inputs):
        trainer.generated.append([row["prompt"] for row in inputs])
        trainer.batches.append(score(inputs))
        return trainer.batches[-1]

    trainer._generate_and_score_completions = keep
    return trainer


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Settings of the tiny reasoner for a step each, on one engine."""
    study = Study(make_arguments(), make_training_args(tmp_path_factory.mktemp("study")))
    study.engines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_study, "TOKENS_BELOW_TAIL", 1)
        for name in study.arguments.settings:
            study.run(Setting.parse(name), 3)
            study.engines.append(study.engine)
    return study


@pytest.fixture(scope="module")
def oversampled(study, tmp_path_factory):
    setting = Setting.parse("pages-30+oversample")
    trainer = study.trainer(setting, study.schedule(setting), tmp_path_factory.mktemp("oversampled"), 0)
    # Rewards that differ within each group.
    trainer.reward_funcs[0] = lambda completions, **kwargs: [hash_share(text) for text in completions]
    record(trainer).train()
    return trainer


def hash_share(text):
    return (sum(map(ord, text)) % 97) / 97


def test_the_better_half_of_twice_the_completions_is_learnt_from(oversampled):
    (log,) = (log for log in oversampled.state.log_history if "reward_kept" in log)
    assert log["reward_kept"] > log["reward"]
    # Two prompts and four completions of each to learn from, as in the other settings, out of eight.
    (prompts,), (batch,) = oversampled.generated, oversampled.batches
    assert [prompts.count(prompt) for prompt in dict.fromkeys(prompts)] == [8, 8]
    assert {len(batch[name]) for name in ("prompt_ids", "completion_ids", "completion_mask", "advantages")} == {8}
    assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    for half in (slice(0, 4), slice(4, 8)):
        assert len(set(map(tuple, batch["prompt_ids"][half].tolist()))) == 1
    texts = oversampled.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    rewards = torch.tensor([hash_share(text) for text in texts]).view(2, 4)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    assert torch.allclose(batch["advantages"].view(2, 4).cpu(), expected, atol=1e-4)
    best = oversampled._latest_rewards.view(2, 8).sort(1).values[:, 4:]
    assert torch.allclose(rewards.sort(1).values, best.cpu().float(), atol=1e-6)
    assert oversampled.args.generation_batch_size == 16


def test_corrections_are_as_their_settings_say(study, tmp_path):
    modes = {}
    for name in ("harsh", "harsh+mask", "harsh+sequence"):
        setting = Setting.parse(name)
        trainer = study.trainer(setting, study.schedule(setting), tmp_path / name, 0)
        modes[name] = trainer.vllm_importance_sampling_mode
        assert trainer.vllm_importance_sampling_correction
    assert modes == {"harsh": "token_truncate", "harsh+mask": "token_mask", "harsh+sequence": "sequence_mask"}
    assert study.training_args.vllm_importance_sampling_mode == "token_truncate"


def test_runs_share_an_engine_and_are_as_their_settings_say(study):
    assert all(engine is study.engines[0] for engine in study.engines)
    runs = {name: entries[0] for name, entries in load_runs(study.folder, study.arguments.settings).items()}
    assert list(runs) == study.arguments.settings
    kept = {name: run["history"][0]["sparsity/kept_fraction"] for name, run in runs.items()}
    # The guard has kept all pages in the only step, after which it has searched.
    assert kept["dense"] == kept["guard"] == 1
    assert kept["harsh+uncorrected"] < kept["tail-0.9"] < 1
    assert runs["guard"]["guard"][0]["event"] == "search" and len(runs["guard"]["top_k_pages"]) > 1
    for name, run in runs.items():
        assert run["setting"] == name and run["seed"] == 3
        assert set(run["accuracy"]) == {"0", "1"} and run["accuracy"]["0"] == runs["dense"]["accuracy"]["0"]
        assert run["rollout_tokens"] == pytest.approx(8 * run["history"][0]["completions/mean_length"], abs=1)
        corrected = "sampling/importance_sampling_ratio/mean" in run["history"][0]
        assert corrected == ("uncorrected" not in name)
    assert min(runs["harsh+uncorrected"]["tail_by_bin"].values()) < 0.5


def test_a_run_that_is_there_is_not_made_again(study, monkeypatch, capsys):
    monkeypatch.setattr(study, "trainer", lambda *args: pytest.fail("no training"))
    monkeypatch.setattr(control_study, "TOKENS_BELOW_TAIL", 1)
    study.run(Setting.parse("dense"), 3)
    assert "there already" in capsys.readouterr().out
    # Neither is the calibration.
    again = Study(study.arguments, study.training_args)
    monkeypatch.setattr(again, "trainer", lambda *args: pytest.fail("no training"))
    assert again.schedule(Setting.parse("tail-0.9")).top_k_pages[-1] in (13, 31)
    with pytest.raises(ValueError, match="No measured budget reaches a tail acceptance of 1 at"):
        again.schedule(Setting.parse("tail-0.9999999"))


def test_a_run_under_other_conditions_is_refused(study):
    training_args = make_training_args(study.folder, learning_rate=1e-2)
    with pytest.raises(ValueError, match="run.json was made with other settings: its learning_rate differ"):
        Study(study.arguments, training_args).check_run(Setting.parse("dense"), 3)
    other = Study(
        make_arguments(harsh_pages=9, guard_target=0.8, page_counts=[5, 30]), make_training_args(study.folder)
    )
    assert other.check_run(Setting.parse("dense"), 3)
    with pytest.raises(ValueError, match="its schedule differ"):
        other.check_run(Setting.parse("harsh+uncorrected"), 3)
    with pytest.raises(ValueError, match="its guard_target differ"):
        other.check_run(Setting.parse("guard"), 3)
    with pytest.raises(ValueError, match="has measured other budgets"):
        other.schedule(Setting.parse("tail-0.9"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"acceptance_probe_fraction": 0.0}, "acceptance_probe_fraction above 0"),
        ({"temperature": 0.7}, "at temperature 1"),
        ({"sparsity_schedule": None}, "needs a recipe"),
    ],
)
def test_what_cannot_be_studied_is_refused_at_the_start(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        control_study.main(make_arguments(), make_training_args(tmp_path, **settings))
    assert [path.name for path in tmp_path.iterdir()] == ["recipe"]


def write_run(folder, setting, seed, accuracies, tail, kept, rewards):
    path = folder / setting / f"seed-{seed}"
    path.mkdir(parents=True)
    history = [
        {"step": step, "reward": reward, "grad_norm": 0.1, "acceptance/tail": tail, "sparsity/kept_fraction": kept,
         "completions/mean_length": 100.0}
        for step, reward in enumerate(rewards, 1)
    ]  # fmt: skip
    run = {
        "setting": setting,
        "seed": seed,
        "accuracy": {str(10 * index): value for index, value in enumerate(accuracies)},
        "tail_by_bin": {"0": tail, "96": min(1.0, tail + 0.1)},
        "history": history,
        "rollout_tokens": 6400 * len(rewards),
        "seconds": 1.0,
    }
    (path / "run.json").write_text(json.dumps(run))


def test_the_report_says_what_the_runs_were(tmp_path):
    rewards = np.linspace(0.5, 1.0, 20).tolist()
    for seed in (0, 1):
        write_run(tmp_path, "dense", seed, [0.5, 0.9, 0.98 + 0.02 * seed], 1.0, 1.0, rewards)
        write_run(tmp_path, "harsh+mask", seed, [0.5, 0.6, 0.2 + 0.4 * seed], 0.3, 0.4, rewards[: 20 - seed])
    text = report(tmp_path, ["dense", "tail-0.86", "harsh+mask"])
    lines = [line.strip("|") for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert [row[0] for row in rows[2:]] == ["dense", "harsh+mask"]  # a setting without runs is left out
    assert rows[2][1:5] == ["2", "1.000", "100.0%", "99.0%"]
    assert rows[2][5:] == ["98.0%, 100.0%", "99.0%", "+0.0 points", "0 of 2", "128,000"]
    assert rows[3][1:5] == ["2", "0.300", "40.0%", "40.0%"]
    assert rows[3][5:9] == ["20.0%, 60.0%", "60.0%", "-59.0 points", "1 of 2"]
    assert (tmp_path / "table.md").read_text().strip() in text
    for name in ("curves.png", "tradeoff.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    runs = load_runs(tmp_path, ["harsh+mask"])
    assert [has_collapsed(run) for run in runs["harsh+mask"]] == [True, False]
    assert math.isclose(summarize(runs)["harsh+mask"]["final_accuracy"], 0.4)


def test_runs_under_different_conditions_are_not_averaged(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "harsh", seed, [0.5, 0.9], 0.9, 0.4, [0.5] * 5)
    file = tmp_path / "harsh" / "seed-1" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "conditions": {"learning_rate": 1e-3}}))
    with pytest.raises(ValueError, match="seed-1.run.json was made under other conditions"):
        report(tmp_path, ["harsh"])


def test_steps_without_a_measurement_leave_a_gap(tmp_path):
    write_run(tmp_path, "guard", 0, [0.5, 0.9], 0.9, 0.4, [0.5] * 20)
    (run,) = load_runs(tmp_path, ["guard"])["guard"]
    for entry in run["history"][10:]:  # dense after a break
        del entry["acceptance/tail"], entry["sparsity/kept_fraction"]
    steps, tails = metric_curve(run, "acceptance/tail")
    assert steps == [step - 2 for step in range(5, 21)]
    assert tails[:6] == pytest.approx([0.9] * 6) and all(map(math.isnan, tails[6:]))
    assert kept_of(run) == pytest.approx(0.7)


def test_seeds_that_both_have_are_compared(tmp_path):
    write_run(tmp_path, "dense", 0, [0.5, 0.9], 1.0, 1.0, [0.5] * 5)
    write_run(tmp_path, "dense", 1, [0.5, 0.5], 1.0, 1.0, [0.5] * 5)
    write_run(tmp_path, "harsh", 0, [0.5, 0.8], 0.2, 0.3, [0.5] * 5)
    write_run(tmp_path, "guard", 7, [0.5, 0.8], 0.2, 0.3, [0.5] * 5)
    lines = [line.split("|") for line in report(tmp_path, ["dense", "harsh", "guard"]).splitlines()]
    gains = {cells[1].strip(): cells[8].strip() for cells in lines if len(cells) > 8}
    assert gains["harsh"] == "-10.0 points" and gains["guard"] == "-"


def test_a_study_without_runs_has_nothing_to_report(tmp_path):
    assert "no runs" in report(tmp_path, ["dense"])
