"""Distilling on given sequences, from Python and from the command line."""

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel
from tiny_models import random_token_ids, save_tiny_model, tiny_model, tiny_tokenizer

from sparrow_trl import DistillSparseConfig, SparsityScheduleConfig, distill_texts
from sparrow_trl.acceptance_sweep import TokenSequence
from sparrow_trl.calibration import measure_schedule
from sparrow_trl.cli import main
from sparrow_trl.distill_texts import PICTURE_NAME, PROGRESS_NAME, SUMMARY_NAME, distill
from sparrow_trl.schedule import SCHEDULE_NAME


SCHEDULE = SparsityScheduleConfig(top_k_pages=[1], bin_tokens=64, dense_layers=[])
HARSHER = replace(SCHEDULE, top_k_pages=[0])
SEQUENCES = [TokenSequence(ids, 20) for ids in random_token_ids(*[150] * 9)]
CONFIG = DistillSparseConfig(
    lora=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"), learning_rate=3e-3, warmup_steps=0
)


@pytest.fixture
def model():
    return tiny_model("qwen3").eval()


def run(model, folder=None, **kwargs):
    defaults = {"held_out": SEQUENCES[:1], "sequences_per_step": 2, "min_tokens": 20, "output_dir": folder}
    return distill(model, SEQUENCES[1:], SCHEDULE, CONFIG, **{**defaults, **kwargs})


def test_tails_rise_and_are_what_they_are_said_to_be(model, tmp_path):
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    schedules = {"own": SCHEDULE, "harsher": HARSHER}
    # On what it learns from: random tokens have nothing to generalize.
    result = run(model, tmp_path, held_out=SEQUENCES[1:], measured=schedules, num_epochs=5)
    assert len(result.steps) == 20 and result.tokens == 5 * 8 * 130
    assert result.steps[-1]["kl"] < 0.7 * result.steps[0]["kl"]
    assert result.tail("own") > result.tail("own", "before") + 0.03
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for name, schedule in schedules.items():
        assert result.before[name] == measure_schedule(model, SEQUENCES[1:], schedule)
        assert result.after[name] == measure_schedule(model, SEQUENCES[1:], schedule, adapter=result.adapter)

    summary = json.loads((tmp_path / SUMMARY_NAME).read_text())
    assert summary["tail_after"] == {name: result.tail(name) for name in schedules}
    assert summary["tail_before"]["own"] == result.tail("own", "before") and summary["num_steps"] == 20
    assert SparsityScheduleConfig.from_pretrained(tmp_path / SCHEDULE_NAME) == SCHEDULE
    assert (tmp_path / PICTURE_NAME).stat().st_size > 10_000
    rows = result.table().rows
    assert {row[0] for row in rows} == set(schedules) and all(row[4].startswith(("+", "-")) for row in rows)
    with torch.no_grad(), result.adapter.active():
        expected = model(input_ids=torch.tensor([SEQUENCES[0].token_ids])).logits
    peft_model = PeftModel.from_pretrained(tiny_model("qwen3"), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(peft_model(input_ids=torch.tensor([SEQUENCES[0].token_ids])).logits, expected)


def test_an_interrupted_run_gives_the_same_adapter(model, tmp_path, monkeypatch):
    monkeypatch.setattr(CONFIG.lora, "lora_dropout", 0.3)
    expected = run(model, num_epochs=2).adapter.state_dict()
    monkeypatch.setattr(distill_texts, "SAVE_SECONDS", 0)
    step, calls = distill_texts.AdapterTrainer.step, []

    def interrupted(self, *args):
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(1)
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(distill_texts.AdapterTrainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path, num_epochs=2)
    told = []
    result = run(model, tmp_path, num_epochs=2, report=told.append)
    assert told[0] == "Going on after step 5 of 8." and len(result.steps) == 8
    assert all(torch.equal(value, expected[name]) for name, value in result.adapter.state_dict().items())
    # Once more: nothing is left to do.
    again = run(model, tmp_path, num_epochs=2)
    assert all(torch.equal(value, expected[name]) for name, value in again.adapter.state_dict().items())


def test_progress_of_another_distillation_is_refused(model, tmp_path):
    run(model, tmp_path)
    assert (tmp_path / PROGRESS_NAME).is_file()
    for kwargs, part in (
        ({"temperature": 0.5}, "temperature"),
        ({"num_epochs": 2}, "order"),
        ({"seed": 1}, "order"),
    ):
        with pytest.raises(ValueError, match=f"another distillation: its .*{part}"):
            run(model, tmp_path, **kwargs)
    with pytest.raises(ValueError, match="weights"):
        run(tiny_model("qwen3", seed=1).eval(), tmp_path)


def test_a_step_that_was_left_out_is_no_reason_to_lose_the_results(model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: torch.tensor(torch.inf))
    result = run(model, tmp_path)
    assert result.steps[0]["grad_norm"] == torch.inf
    summary = json.loads((tmp_path / SUMMARY_NAME).read_text())
    assert summary["steps"][0]["grad_norm"] is None and summary["steps"][0]["kl"] > 0


def test_bins_are_those_of_each_measured_schedule(model):
    wide = replace(SCHEDULE, bin_tokens=128)
    rows = run(model, measured={"narrow": SCHEDULE, "wide": wide}).table().rows
    assert [row[:2] for row in rows] == [["narrow", "0-63"], ["narrow", "64-127"], ["narrow", "128-191"]] + [
        ["wide", "0-127"],
        ["wide", "128-255"],
    ]


@pytest.mark.parametrize(
    ("sequences", "schedule", "message"),
    [
        ([TokenSequence([5, 6, 7], 0)], SCHEDULE, "sequences\\[0\\].*prompt of 0 tokens"),
        ([TokenSequence([5, 6, 999], 1)], SCHEDULE, "token ids outside"),
        ([TokenSequence([5] * 3000, 1)], SCHEDULE, "3000 tokens, but the model has 2048 positions"),
        (SEQUENCES, SparsityScheduleConfig.dense(), "nothing is sparse"),
        (SEQUENCES, replace(SCHEDULE, dense_layers=[9]), "layer 9"),
    ],
    ids=["prompt", "token", "length", "dense", "layer"],
)
def test_sequences_and_schedules_that_do_not_suit_are_refused(model, sequences, schedule, message):
    with pytest.raises(ValueError, match=message):
        distill(model, sequences, schedule)


def test_float16_is_refused(model):
    with pytest.raises(ValueError, match="float16"):
        distill(model.half(), SEQUENCES, SCHEDULE)


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        ({"kl_weight": 0.0}, {}, "would learn nothing"),
        ({"teacher": "old", "divergence": "k3"}, {}, "teacher='old'"),
        ({}, {"num_epochs": 0}, "`num_epochs`"),
        ({}, {"sequences_per_step": 0}, "`sequences_per_step`"),
    ],
    ids=["weight", "teacher", "epochs", "step"],
)
def test_bad_arguments_are_refused(model, config, kwargs, message):
    with pytest.raises(ValueError, match=message):
        distill(model, SEQUENCES, SCHEDULE, DistillSparseConfig(**config), **kwargs)


def test_the_command(tmp_path, capsys):
    folder = save_tiny_model("qwen3", tmp_path / "model")
    tokenizer = tiny_tokenizer()
    rows = [{"text": tokenizer.decode(sequence.token_ids)} for sequence in SEQUENCES]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    SCHEDULE.save_pretrained(tmp_path / "schedule")
    HARSHER.save_pretrained(tmp_path / "harsher")
    command = ["distill", "--model_name_or_path", folder, "--texts", str(tmp_path / "texts.jsonl")]
    command += ["--sparsity_schedule", str(tmp_path / "schedule"), "--output_dir", str(tmp_path / "out")]
    options = ["--measured_schedules", str(tmp_path / "harsher"), "--held_out", "2", "--num_sequences", "4"]
    options += ["--prompt_tokens", "20", "--min_tokens", "20", "--lora_r", "4", "--sequences_per_step", "2"]
    assert main(command + options) == 0
    output = capsys.readouterr().out
    assert "Distilled on 520 tokens in 2 steps" in output and "| harsher |" in output
    summary = json.loads((tmp_path / "out" / SUMMARY_NAME).read_text())
    assert list(summary["tail_before"]) == ["schedule", "harsher"]
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 4

    assert main([*command, "--held_out", "9", "--prompt_tokens", "20"]) == 1
    assert "none beyond the 9 of --held_out" in capsys.readouterr().err
    assert main([*command, "--prompt_tokens", "0"]) == 1
    assert "--prompt_tokens must be between 1" in capsys.readouterr().err
    assert main([*command, "--sequences", "x"]) == 1
    assert "Give either --texts or --sequences" in capsys.readouterr().err
