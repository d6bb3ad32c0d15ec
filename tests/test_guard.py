"""`ScheduleGuardCallback` in training: budgets that follow the tail, schedules found at the start, and breaks."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fresh_process import run_two_processes
from test_distill import make_callback
from test_trainer import make_trainer
from tiny_training import make_config, make_dataset, share_of_small_letters
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer

from sparrow_trl import (
    ScheduleGuardCallback,
    ScheduleGuardConfig,
    SparseRolloutGRPOTrainer,
    SparsityScheduleConfig,
)
from sparrow_trl import trainer as trainer_module
from sparrow_trl.break_detector import RolloutSignals
from sparrow_trl.calibration import measure_schedule
from sparrow_trl.distill_step import Trajectories
from sparrow_trl.guard import STATE_NAME, _joined


SCHEDULE = SparsityScheduleConfig(top_k_pages=[3, 4, 5, 6], bin_tokens=64, dense_layers=[0])


def make_guard(**kwargs):
    return ScheduleGuardCallback(
        ScheduleGuardConfig(**{"min_tokens": 100, "step_tokens": 50, "tail_floor": 0.0, "kl_limit": 1e9, **kwargs})
    )


def start(model, folder, guard, schedule=SCHEDULE, callbacks=(), **kwargs):
    config = make_config(folder, **{"acceptance_probe_fraction": 1.0, "learning_rate": 1e-5, **kwargs})
    return make_trainer(model, config, schedule=schedule, callbacks=[guard, *callbacks])


def events(guard):
    return [(entry["step"], entry["event"]) for entry in guard.history]


def is_dense(rollout):
    """Whether the engine's log-probs are those of the dense policy."""
    pairs = zip(rollout.logprobs, rollout.dense, rollout.completions, strict=True)
    return all(
        (torch.tensor(engine) - dense.gather(1, torch.tensor(ids)[:, None]).squeeze(1)).abs().max() < 1e-3
        for engine, dense, ids in pairs
    )


class At(TrainerCallback):
    """Does something to the trainer after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def attach(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action(self.trainer)


@pytest.fixture(scope="module")
def auto_run(tiny_qwen3, tmp_path_factory):
    guard = make_guard(target_acceptance=0.9)
    inputs = []
    folder = tmp_path_factory.mktemp("auto")
    trainer = start(tiny_qwen3, folder, guard, "auto", max_steps=4, save_steps=4, save_strategy="steps")
    trainer.trajectory_listeners.append(lambda batch: inputs.append(Trajectories.from_inputs(batch)))
    trainer.train()
    trainer.guard, trainer.inputs = guard, inputs
    return trainer


def test_a_schedule_is_found_during_the_first_steps(auto_run):
    first, *others = auto_run.rollouts
    assert first.counters.kept_fraction == 1 and is_dense(first)
    assert events(auto_run.guard)[0] == (1, "search")
    found = others[0].schedule
    assert found.bin_tokens == 32 and found.dense_layers == [0, 1] and len(found.top_k_pages) > 1
    for rollout in others:
        assert 0.2 < rollout.counters.kept_fraction < 0.95 and not is_dense(rollout)
    # It holds the target on what it was found on, by the policy of then, which has hardly moved.
    sequences = [sequence for batch in auto_run.inputs[:2] for sequence in batch.sequences()][:8]
    tails = [entry.tail for entry in measure_schedule(auto_run.model, sequences, found) if entry.tokens >= 50]
    assert min(tails) > 0.9 - 0.03
    fewer = replace(found, top_k_pages=[max(0, pages // 2 - 2) for pages in found.top_k_pages])
    assert min(entry.tail for entry in measure_schedule(auto_run.model, sequences, fewer) if entry.tokens >= 50) < 0.87


def test_a_search_keeps_the_recipe(tiny_qwen3, tmp_path):
    recipe = SparsityScheduleConfig(
        top_k_pages=[2**15],
        bin_tokens=64,
        dense_layers=[],
        page_score="group_softmax",
        landmarks_per_page=2,
        layer_top_k_pages={"2": [2**15]},
    )
    guard = make_guard(target_acceptance=0.5, search=True)
    trainer = start(tiny_qwen3, tmp_path, guard, recipe, max_steps=3)
    trainer.train()
    assert events(guard)[0] == (1, "search")
    before, after, _ = (rollout.schedule for rollout in trainer.rollouts)
    assert before == recipe and after == replace(recipe, top_k_pages=after.top_k_pages, layer_top_k_pages=None)
    kept = [rollout.counters.kept_fraction for rollout in trainer.rollouts]
    assert kept[0] == 1 and 0.1 < kept[2] < 0.97  # the contexts of the second step happen to be short


def test_budgets_follow_the_tail_and_are_saved(auto_run):
    logs = [log for log in auto_run.state.log_history if "guard/dense" in log]
    assert len(logs) == 4 and not any(log["guard/dense"] or log["guard/break"] for log in logs)
    checkpoint = Path(auto_run.args.output_dir, "checkpoint-4")
    saved = json.loads((checkpoint / STATE_NAME).read_text())
    assert saved["history"] == auto_run.guard.history and saved["searching"] is False
    assert SparsityScheduleConfig.from_pretrained(checkpoint) == auto_run.schedule
    assert sum(log["guard/changed_bins"] > 0 for log in logs) == [event for _, event in events(auto_run.guard)].count(
        "budget"
    )


def test_a_tail_below_the_target_raises_budgets_in_the_running_engine(tiny_qwen3, tmp_path):
    guard = make_guard(target_acceptance=0.95)
    harsh = SparsityScheduleConfig(top_k_pages=[0], bin_tokens=64, dense_layers=[])
    trainer = start(tiny_qwen3, tmp_path, guard, harsh, max_steps=4)
    trainer.train()
    kept = [rollout.counters.kept_fraction for rollout in trainer.rollouts]
    assert kept[-1] > 1.3 * kept[0]
    assert all("below 0.950" in entry["text"] or "no fewer" in entry["text"] for entry in guard.history)
    # The trainer's metrics and rollouts agree on what was in use.
    assert trainer.rollouts[0].schedule == harsh != trainer.rollouts[-1].schedule


@pytest.fixture(scope="module")
def broken_run(tiny_qwen3, tmp_path_factory):
    """Every sparse step is a break: dense for two steps after each, and the end after the second."""
    guard = make_guard(tail_floor=0.9999, target_acceptance=0.5, dense_steps=2, max_breaks=2)
    folder = tmp_path_factory.mktemp("broken")
    trainer = start(tiny_qwen3, folder, guard, max_steps=9, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.guard = guard
    return trainer


def test_a_break_makes_rollouts_dense_and_too_many_stop_training(broken_run):
    assert [is_dense(rollout) for rollout in broken_run.rollouts] == [False, True, True, False]
    breaks = [entry for entry in broken_run.guard.history if entry["event"] == "break"]
    assert [entry["step"] for entry in breaks] == [1, 4] and "below 1.000" in breaks[0]["text"]
    assert broken_run.state.global_step == 4
    assert events(broken_run.guard)[-1] == (4, "stop") and (3, "sparse") in events(broken_run.guard)
    assert Path(broken_run.args.output_dir, "checkpoint-4", STATE_NAME).is_file()
    # Budgets are larger afterwards.
    before, after = (sum(broken_run.rollouts[index].schedule.top_k_pages) for index in (0, 3))
    assert after > before
    # Nothing of it is left in the engine.
    assert not broken_run.vllm_generation.state.dense


def test_a_run_goes_on_in_dense_rollouts_after_a_checkpoint(broken_run, tiny_qwen3, tmp_path):
    guard = make_guard(tail_floor=0.9999, target_acceptance=0.5, dense_steps=2, max_breaks=2)
    trainer = start(tiny_qwen3, tmp_path, guard, max_steps=4)
    trainer.train(resume_from_checkpoint=str(Path(broken_run.args.output_dir, "checkpoint-2")))
    assert [is_dense(rollout) for rollout in trainer.rollouts] == [True, False]
    assert events(guard)[0] == (1, "break") and trainer.rollouts[0].schedule == broken_run.rollouts[1].schedule


def test_two_processes_agree(tiny_qwen3, tmp_path):
    script = Path(__file__).with_name("two_rank_guard.py")
    run_two_processes(str(script), tiny_qwen3, str(tmp_path))
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert first["completions"] != second["completions"]
    for name in ("schedules", "dense", "history", "signals"):
        assert first[name] == second[name]
    assert len(first["signals"]) == 3 and None not in first["signals"][0].values()
    steps = {event: step for step, event in ((entry["step"], entry["event"]) for entry in reversed(first["history"]))}
    assert (steps["search"], steps["break"]) == (1, 3)
    assert first["dense"] == [True, False, False, True]


def drop_pages(trainer):
    """The backend drops half of the pages, whatever it is told."""
    trainer.vllm_generation.state.top_k = lambda layer, num_pages: (num_pages - 6).clamp(min=0) // 2


def test_a_broken_backend_is_noticed_within_three_steps(tiny_qwen3, tmp_path):
    wide = SparsityScheduleConfig(top_k_pages=[16], bin_tokens=64, dense_layers=[])
    guard = make_guard(target_acceptance=0.9, tail_floor=0.8, adapt=False)
    trainer = start(tiny_qwen3, tmp_path, guard, wide, [At(2, drop_pages)], max_steps=6)
    trainer.train()
    (broken,) = [step for step, event in events(guard) if event == "break"]
    assert 3 <= broken <= 5
    assert not is_dense(trainer.rollouts[broken - 1]) and is_dense(trainer.rollouts[broken])


def test_a_weight_sync_that_stops_is_noticed(tiny_qwen3, tmp_path):
    def stop(trainer):
        trainer.vllm_generation.sync_weights = lambda: None

    trainer = start(tiny_qwen3, tmp_path, make_guard(), callbacks=[At(2, stop)], max_steps=6)
    with pytest.raises(RuntimeError, match="has not had the policy's weights since step 1, and training is at step 2"):
        trainer.train()


class NoEngine:
    """In place of the generation, where nothing is generated."""

    def __init__(self, schedule, **kwargs):
        self.schedule, self.adapter, self.engine_dtype, self.max_context_tokens = schedule, None, torch.float32, 256


@pytest.mark.parametrize(
    ("settings", "others", "message"),
    [
        ({"acceptance_probe_fraction": 0.0}, [], "acceptance_probe_fraction is 0"),
        ({}, [make_guard()], "a ScheduleGuardCallback and a ScheduleGuardCallback"),
        ({"schedule": SparsityScheduleConfig.dense()}, [], "keeps every layer dense"),
        ({}, [make_callback(stages=[replace(SCHEDULE, top_k_pages=[1])])], "and each would change the schedule"),
    ],
    ids=["no probes", "two guards", "dense", "stages"],
)
def test_what_cannot_work_is_refused_at_the_start(tiny_qwen3, tmp_path, monkeypatch, settings, others, message):
    monkeypatch.setattr(trainer_module, "SparseVLLMGeneration", NoEngine)
    with pytest.raises(ValueError, match=message):
        start(tiny_qwen3, tmp_path, make_guard(search=True), callbacks=others, **settings)


@pytest.fixture
def guarded(tiny_qwen3, tmp_path, monkeypatch):
    """Makes a trainer without an engine, with a guard."""
    monkeypatch.setattr(trainer_module, "SparseVLLMGeneration", NoEngine)

    def make(guard, schedule=SCHEDULE):
        config = make_config(tmp_path, acceptance_probe_fraction=1.0)
        return make_trainer(
            tiny_qwen3, config, trainer_class=SparseRolloutGRPOTrainer, schedule=schedule, callbacks=[guard]
        )

    return make


def test_all_rollouts_of_a_step_count_and_what_is_not_finite_does_not(guarded):
    guard = make_guard()
    trainer = guarded(guard)
    for reward, rates in ((0.5, {0: np.full(60, 0.9)}), (math.nan, {0: np.full(60, 0.2), 1: np.full(10, 0.4)})):
        trainer._metrics["train"]["reward"].append(reward)
        trainer._metrics["train"]["completions/mean_length"].append(100 * (1 + len(rates)))
        trainer.acceptance.step_rates = trainer.acceptance.step_upper_rates = rates
        for listener in trainer.rollout_listeners:
            listener()
    rates, signals = _joined(guard._rollouts)
    assert {index: len(values) for index, values in rates.items()} == {0: 120, 1: 10}
    assert signals == RolloutSignals(tail=pytest.approx(0.2), length=250.0, reward=0.5)


def test_breaks_are_judged_by_the_upper_bounds_and_budgets_by_the_lower(guarded):
    """Where many tokens are possible, the most likely ones bound a rate from below at 0.6 though nothing is sparse."""
    guard = make_guard()
    trainer = guarded(guard)
    lower, upper = np.full(60, 0.6), np.full(60, 0.98)
    trainer.acceptance.update(torch.from_numpy(lower), torch.from_numpy(upper), torch.full((60,), 40))
    trainer.acceptance.end_step()
    for listener in trainer.rollout_listeners:
        listener()
    rates, signals = _joined(guard._rollouts)
    assert signals.tail == pytest.approx(0.98)
    assert rates[0] == pytest.approx(lower)


def test_dense_schedules_are_left_alone(guarded):
    guard = make_guard()
    guarded(guard, SparsityScheduleConfig.dense())
    assert not guard._adapts


def test_fewer_tokens_do_for_higher_quantiles(guarded):
    guard = ScheduleGuardCallback()
    guarded(guard, replace(SCHEDULE, tail_quantile=0.01))
    assert guard._step_tokens == 1000 and guard._controller.min_tokens == 5000


def test_a_search_without_tokens_ends(guarded, monkeypatch, caplog):
    guard = make_guard()
    trainer = guarded(guard, "auto")
    bins = len(guard._controller.schedule.top_k_pages)
    monkeypatch.setattr(guard, "_measure", lambda schedule, counts: (None, np.zeros((len(counts), bins), dtype=int)))
    for _ in range(5):
        assert guard._searching
        guard._search(trainer.state)
    assert not guard._searching and "Raise auto_sequences" in guard.history[-1]["text"]


def test_another_training_starts_anew(broken_run):
    guard = broken_run.guard
    assert guard.is_dense
    guard.on_train_begin(broken_run.args, TrainerState(), TrainerControl())
    assert not guard.is_dense and not guard._breaks and not broken_run.vllm_generation.state.dense


def test_auto_brings_a_guard(tiny_qwen3, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "SparseVLLMGeneration", NoEngine)
    config = make_config(tmp_path, sparsity_schedule="auto")
    trainer = make_trainer(tiny_qwen3, config, trainer_class=SparseRolloutGRPOTrainer)
    assert sum(isinstance(callback, ScheduleGuardCallback) for callback in trainer.callback_handler.callbacks) == 1
    config = make_config(tmp_path, sparsity_schedule="auto", acceptance_probe_fraction=0.0)
    with pytest.raises(ValueError, match="acceptance_probe_fraction is 0"):
        make_trainer(tiny_qwen3, config, trainer_class=SparseRolloutGRPOTrainer)


def test_a_plain_trainer_is_refused(tiny_qwen3, tmp_path):
    config = GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_steps=1,
        num_generations=2,
        per_device_train_batch_size=2,
    )
    trainer = GRPOTrainer(tiny_qwen3, share_of_small_letters, config, make_dataset(2), callbacks=[make_guard()])
    with pytest.raises(ValueError, match="attached to no trainer"):
        trainer.train()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_change": 1.0}, "max_change must be a number between 1.05 and 10"),
        ({"dense_steps": 0}, "dense_steps must be an integer of at least 1"),
        ({"target_acceptance": 1.2}, "target_acceptance must be a number between 0 and 1"),
        ({"floor": "no-such-schedule"}, "no-such-schedule"),
    ],
)
def test_bad_settings_are_refused(kwargs, message):
    with pytest.raises((ValueError, OSError), match=message):
        ScheduleGuardConfig(**kwargs)
