"""The control study's example: its settings, its runs on one engine, and its report."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_training import make_config, make_dataset, share_of_small_letters
from trl import ModelConfig


EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import control_study  # noqa: E402
from control_study import OversamplingTrainer, Setting, Study, StudyArguments  # noqa: E402
from control_study_report import has_collapsed, load_runs, report, summarize  # noqa: E402

from sparrow_trl import SparsityScheduleConfig  # noqa: E402


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense", ("dense", None, None, False)),
        ("tail-0.86+uncorrected", ("tail", 0.86, "uncorrected", False)),
        ("pages-8", ("pages", 8, None, False)),
        ("harsh+mask+oversample", ("harsh", None, "mask", True)),
    ],
)
def test_settings_are_read(name, expected):
    setting = Setting.parse(name)
    assert (setting.rollouts, setting.value, setting.correction, setting.oversample) == expected
    assert setting.name == name


@pytest.mark.parametrize(
    "name", ["sparse", "tail", "tail-x", "dense-3", "harsh+mask+truncate", "harsh+other", "harsh+"]
)
def test_other_settings_are_refused(name):
    with pytest.raises(ValueError, match="is no setting"):
        Setting.parse(name)


@pytest.fixture(scope="module")
def oversampled(tiny_qwen3, tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("oversampled"), max_steps=2, num_generations=4)
    trainer = OversamplingTrainer(
        tiny_qwen3,
        share_of_small_letters,
        config,
        train_dataset=make_dataset(16),
        schedule=SparsityScheduleConfig(top_k_pages=[3], bin_tokens=64, dense_layers=[0]),
    )
    batches = []
    score = trainer._generate_and_score_completions

    def keep(inputs):
        batches.append(score(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = keep
    trainer.train()
    trainer.batches = batches
    return trainer


def test_the_better_half_is_learnt_from(oversampled):
    (entry,) = (log for log in oversampled.state.log_history if log.get("step") == 1 and "reward" in log)
    assert entry["reward_kept"] > entry["reward"]
    assert oversampled.state.global_step == 2
    for batch in oversampled.batches:
        # Two prompts with four completions each: two of each are left.
        assert len(batch["completion_ids"]) == len(batch["prompt_ids"]) == len(batch["advantages"]) == 4
        assert torch.equal(batch["prompt_ids"][0], batch["prompt_ids"][1])
        assert not torch.equal(batch["prompt_ids"][0], batch["prompt_ids"][2])
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
        texts = oversampled.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
        rewards = torch.tensor(share_of_small_letters(texts)).view(2, 2)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        assert torch.allclose(batch["advantages"].view(2, 2).cpu(), expected, atol=1e-4)
    rewards = oversampled._latest_rewards.view(2, 4)
    assert torch.allclose(
        torch.tensor(share_of_small_letters(texts)).view(2, 2).sort(1).values, rewards.sort(1).values[:, 2:].cpu()
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Four settings of the tiny reasoner for a step each."""
    folder = tmp_path_factory.mktemp("study")
    training_args = make_config(
        folder,
        sparsity_schedule=str(EXAMPLES / "tiny_reasoner" / "schedules" / "study"),
        max_steps=1,
        max_completion_length=190,
        vllm_max_model_length=768,
        vllm_block_size=None,
        acceptance_probe_fraction=1.0,
        vllm_engine_kwargs={"enforce_eager": True, "kv_cache_memory_bytes": 2**27, "max_num_seqs": 16},
    )
    arguments = StudyArguments(
        settings=["dense", "guard", "tail-0.9", "harsh+uncorrected"],
        page_counts=[7, 16, 30],
        calibration_tasks=12,
        num_eval_tasks=4,
        num_train_tasks=20,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_study, "TOKENS_BELOW_TAIL", 1)
        study = Study(arguments, training_args, ModelConfig(str(EXAMPLES / "tiny_reasoner" / "model")))
        engines = []
        for name in arguments.settings:
            study.run(Setting.parse(name), 3)
            engines.append(study.engine)
    study.engines = engines
    return study


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
    study.run(Setting.parse("dense"), 3)
    assert "there already" in capsys.readouterr().out


def write_run(folder, setting, seed, accuracies, tail, kept, rewards):
    path = folder / setting / f"seed-{seed}"
    path.mkdir(parents=True)
    history = [
        {"reward": reward, "grad_norm": 0.1, "acceptance/tail": tail, "sparsity/kept_fraction": kept,
         "completions/mean_length": 100.0}
        for reward in rewards
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
    for name in ("summary.json", "table.md", "curves.png", "tradeoff.png"):
        assert (tmp_path / name).stat().st_size > 500
    runs = load_runs(tmp_path, ["harsh+mask"])
    assert [has_collapsed(run) for run in runs["harsh+mask"]] == [True, False]
    assert math.isclose(summarize(runs)["harsh+mask"]["final_accuracy"], 0.4)


def test_a_study_without_runs_has_nothing_to_report(tmp_path):
    assert "no runs" in report(tmp_path, ["dense"])
