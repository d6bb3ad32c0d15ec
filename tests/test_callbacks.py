import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sparrow_trl import callbacks
from sparrow_trl.acceptance import AcceptanceTracker
from sparrow_trl.callbacks import PICTURE_NAME, STATISTICS_NAME, TailAcceptanceCallback
from sparrow_trl.schedule import SparsityScheduleConfig


def new_tracker(**fields) -> AcceptanceTracker:
    return AcceptanceTracker(SparsityScheduleConfig(**{"top_k_pages": [5], "bin_tokens": 64, **fields}))


def measure(tracker: AcceptanceTracker, seed: int, count: int = 500) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    lower = torch.tensor(np.where(rng.random(count) < 0.7, 1, rng.beta(3, 0.6, count)), dtype=torch.float32)
    tracker.update(lower, lower, torch.tensor(rng.integers(1, 120, count)))
    return tracker.end_step()


@pytest.fixture
def run(tmp_path):
    """A callback attached to a trainer that measures, and the arguments of its events."""
    callback = TailAcceptanceCallback()
    trainer = SimpleNamespace(acceptance=new_tracker())
    callback.attach(trainer)
    args = SimpleNamespace(output_dir=str(tmp_path / "out"), resume_from_checkpoint=None)
    state = TrainerState(global_step=0)

    def event(name: str) -> None:
        getattr(callback, name)(args, state, TrainerControl())

    return SimpleNamespace(
        callback=callback, trainer=trainer, tracker=trainer.acceptance, args=args, state=state, event=event
    )


def checkpoint(folder, tracker: AcceptanceTracker):
    folder.mkdir(parents=True)
    (folder / STATISTICS_NAME).write_text(json.dumps(tracker.state_dict()))
    return folder


class TestAttaching:
    def test_never_attached(self, run):
        with pytest.raises(ValueError, match="SparseRolloutGRPOTrainer"):
            TailAcceptanceCallback().on_train_begin(run.args, run.state, TrainerControl())

    def test_attached_to_a_trainer_that_does_not_measure(self, run):
        run.callback.attach(SimpleNamespace())
        with pytest.raises(ValueError, match="SparseRolloutGRPOTrainer"):
            run.event("on_train_begin")

    def test_a_new_run_keeps_what_the_trainer_has(self, run):
        before = measure(run.tracker, 0).keys()
        run.event("on_train_begin")
        assert run.tracker.metrics().keys() == before


class TestCheckpoints:
    def test_statistics_are_saved_in_the_checkpoint(self, run, tmp_path):
        measure(run.tracker, 0)
        run.state.global_step = 7
        folder = tmp_path / "out" / "checkpoint-7"
        folder.mkdir(parents=True)
        run.event("on_save")
        assert [file.name for file in folder.iterdir()] == [STATISTICS_NAME]
        assert json.loads((folder / STATISTICS_NAME).read_text()) == run.tracker.state_dict()

    def test_statistics_of_many_bins(self, run, tmp_path):
        bins = 200
        lengths = torch.arange(1, bins + 1).repeat_interleave(4000) * run.tracker.schedule.bin_tokens
        alpha = torch.rand(len(lengths), generator=torch.Generator().manual_seed(0))
        run.tracker.update(alpha, alpha, lengths)
        run.tracker.end_step()
        run.state.global_step = 7
        folder = tmp_path / "out" / "checkpoint-7"
        folder.mkdir(parents=True)
        run.event("on_save")
        assert (folder / STATISTICS_NAME).stat().st_size > 4 * 2**20
        before = run.tracker.metrics()
        run.callback.load_statistics(folder)
        assert run.tracker.metrics() == before

    def test_statistics_too_large_to_save_do_not_end_training(self, run, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(callbacks, "MAX_STATISTICS_BYTES", 100)
        measure(run.tracker, 0)
        run.state.global_step = 7
        folder = tmp_path / "out" / "checkpoint-7"
        folder.mkdir(parents=True)
        run.event("on_save")
        assert not list(folder.iterdir()) and "saved without acceptance statistics" in caplog.text

    def test_no_checkpoint_folder_is_made_up(self, run, tmp_path):
        measure(run.tracker, 0)
        run.event("on_save")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("where", ["trainer", "args", "output_dir"])
    def test_resuming_continues_the_statistics(self, run, tmp_path, where):
        earlier = new_tracker()
        measure(earlier, 1)
        if where == "output_dir":
            checkpoint(tmp_path / "out" / "checkpoint-5", earlier)
        else:
            # The nearest source wins over what lies in the output folder.
            other = new_tracker()
            measure(other, 2, count=50)
            checkpoint(tmp_path / "out" / "checkpoint-5", other)
            folder = str(checkpoint(tmp_path / "elsewhere", earlier))
            if where == "args":
                run.args.resume_from_checkpoint = folder
            else:
                run.trainer.resume_checkpoint = folder
        run.state.global_step = 5
        run.event("on_train_begin")
        assert run.tracker.metrics() == earlier.metrics()
        assert measure(run.tracker, 3) == measure(earlier, 3)
        assert run.tracker.state_dict() == earlier.state_dict()

    def test_resuming_without_statistics_warns(self, run, caplog):
        run.state.global_step = 5
        with caplog.at_level(logging.WARNING):
            run.event("on_train_begin")
        assert "will cover only the steps" in caplog.text

    @pytest.mark.parametrize("content", ["{", "[]", '{"bins": {}}', '{"bins": NaN}', None])
    def test_resuming_from_damaged_or_other_statistics_warns_and_starts_anew(self, run, tmp_path, caplog, content):
        folder = checkpoint(tmp_path / "out" / "checkpoint-5", new_tracker(bin_tokens=128))
        if content is not None:
            (folder / STATISTICS_NAME).write_text(content)
        measure(run.tracker, 0)
        run.state.global_step = 5
        with caplog.at_level(logging.WARNING):
            run.event("on_train_begin")
        assert "cannot be continued" in caplog.text and ("bin_tokens" in caplog.text or content is not None)
        assert run.tracker.metrics() == {}

    def test_loading_by_hand_raises(self, run, tmp_path):
        folder = checkpoint(tmp_path / "out" / "checkpoint-5", new_tracker(bin_tokens=128))
        with pytest.raises(ValueError, match="bin_tokens"):
            run.callback.load_statistics(folder)


class TestReport:
    def test_table_and_picture(self, run, tmp_path, capsys):
        run.state.log_history = [{"step": step, **measure(run.tracker, step)} for step in range(1, 4)]
        run.event("on_train_end")
        out = capsys.readouterr().out
        assert f"Tail acceptance (lowest bin) {run.tracker.metrics()['acceptance/tail']:.4f}" in out
        assert "0-64" in out and "64-128" in out
        assert [file.name for file in (tmp_path / "out").iterdir()] == [PICTURE_NAME]
        assert (tmp_path / "out" / PICTURE_NAME).read_bytes().startswith(b"\x89PNG")

    def test_target(self, run, capsys):
        run.callback.target = 0.123
        measure(run.tracker, 0)
        run.event("on_train_end")
        assert "at or above the target of 0.123." in capsys.readouterr().out

    def test_nothing_measured(self, run, tmp_path, capsys, caplog):
        with caplog.at_level(logging.WARNING):
            run.event("on_train_end")
        assert "No acceptance rate was measured" in caplog.text
        assert capsys.readouterr().out == "" and not (tmp_path / "out").exists()

    def test_only_the_main_process_reads_and_writes(self, run, tmp_path, capsys):
        other = new_tracker()
        measure(other, 1)
        folder = checkpoint(tmp_path / "out" / "checkpoint-5", other)
        (tmp_path / "out" / "checkpoint-6").mkdir()
        before = measure(run.tracker, 0).keys()
        run.state.is_world_process_zero = False
        run.state.global_step = 5
        run.event("on_train_begin")
        assert run.tracker.metrics().keys() == before
        run.state.global_step = 6
        run.event("on_save")
        run.event("on_train_end")
        assert capsys.readouterr().out == ""
        assert sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file()) == [STATISTICS_NAME]
        assert (folder / STATISTICS_NAME).is_file()


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.linear(x).squeeze(-1) - labels).pow(2).mean()}


class MeasuringTrainer(Trainer):
    """The part of the sparse trainer's contract that the callback rests on, on the real training loop."""

    def __init__(self, output_dir, callback: TrainerCallback, max_steps: int):
        args = TrainingArguments(
            output_dir=str(output_dir), max_steps=max_steps, save_steps=2, logging_steps=1, report_to="none",
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        data = [{"x": [0.0, 1.0], "labels": 1.0}] * 8
        super().__init__(Regression(), args, train_dataset=data, callbacks=[callback])
        self.acceptance = new_tracker()

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs.update(measure(self.acceptance, self.state.global_step))
        super().log(logs, *args, **kwargs)


class TestInTheTrainingLoop:
    def test_a_trainer_that_does_not_attach_is_refused_before_training(self, tmp_path):
        trainer = MeasuringTrainer(tmp_path, TailAcceptanceCallback(), max_steps=1)
        with pytest.raises(ValueError, match="SparseRolloutGRPOTrainer"):
            trainer.train()
        assert trainer.state.global_step == 0

    def test_resumed_run_reports_what_an_unbroken_one_does(self, tmp_path, capsys):
        def train(folder, max_steps, **kwargs):
            callback = TailAcceptanceCallback()
            trainer = MeasuringTrainer(folder, callback, max_steps)
            callback.attach(trainer)
            trainer.train(**kwargs)
            assert (folder / PICTURE_NAME).is_file()
            return trainer.acceptance.state_dict(), capsys.readouterr().out

        unbroken, table = train(tmp_path / "unbroken", 4)
        broken, _ = train(tmp_path / "broken", 2)
        assert broken != unbroken
        assert (tmp_path / "broken" / "checkpoint-2" / STATISTICS_NAME).is_file()
        resumed, resumed_table = train(tmp_path / "broken", 4, resume_from_checkpoint=True)
        assert resumed == unbroken
        assert table.splitlines()[-6:] == resumed_table.splitlines()[-6:]
        assert table.splitlines()[-6].split()[:2] == ["cached", "length"]
