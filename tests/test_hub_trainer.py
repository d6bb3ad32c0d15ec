"""What `SparseRolloutGRPOTrainer` pushes while it trains and at the end, to a Hub on localhost."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_client import hub_on_localhost
from hub_server import drop
from huggingface_hub import ModelCard, snapshot_download
from peft import LoraConfig, PeftModel
from test_trainer import SCHEDULE, make_trainer
from tiny_training import make_config
from transformers import AutoModelForCausalLM, TrainerCallback

from sparrow_trl import (
    DistillSparseCallback,
    DistillSparseConfig,
    RolloutAdapter,
    ScheduleGuardCallback,
    ScheduleGuardConfig,
    SparseRolloutGRPOTrainer,
    SparsityScheduleConfig,
)
from sparrow_trl.callbacks import PICTURE_NAME, STATISTICS_NAME, HubFilesCallback
from sparrow_trl.distill import ADAPTER_FOLDER
from sparrow_trl.distill import STATE_NAME as DISTILL_STATE_NAME
from sparrow_trl.guard import STATE_NAME as GUARD_STATE_NAME
from sparrow_trl.hub import pull_schedule
from sparrow_trl.hub_cards import add_rollouts
from sparrow_trl.schedule import SCHEDULE_NAME


CHANGED_SCHEDULE = replace(SCHEDULE, top_k_pages=[1, 1, 2])

ADAPTER = {f"{ADAPTER_FOLDER}/{name}" for name in ("adapter_config.json", "adapter_model.safetensors", SCHEDULE_NAME)}
MODEL = {"config.json", "model.safetensors", "tokenizer.json", "training_args.bin", "README.md"}
OURS = {SCHEDULE_NAME, STATISTICS_NAME, PICTURE_NAME, GUARD_STATE_NAME, *ADAPTER}


class EachPushEnds(TrainerCallback):
    """Waits for the push of a checkpoint before the next step: transformers leaves the next one out otherwise."""

    def attach(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        if args.push_to_hub:
            self.trainer._finish_current_push()

    # Before the other callbacks: what was pushed too early would lack their files, and not by chance alone.
    on_save = on_step_begin


class ScheduleChange(TrainerCallback):
    """Changes the schedule before the second step."""

    def attach(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer.schedule = CHANGED_SCHEDULE


def make_hub_trainer(model, output_dir, callbacks=(), *, schedule=SCHEDULE, engine=None, **kwargs):
    config = make_config(
        output_dir,
        **{
            "max_steps": 2,
            "max_completion_length": 24,
            "save_strategy": "steps",
            "save_steps": 1,
            "push_to_hub": True,
            **kwargs,
        },
    )
    callbacks = [EachPushEnds(), *callbacks]
    return make_trainer(model, config, SparseRolloutGRPOTrainer, schedule=schedule, engine=engine, callbacks=callbacks)


def make_distill():
    config = DistillSparseConfig(lora=LoraConfig(r=2, target_modules=["q_proj"]), learning_rate=1e-2, warmup_steps=0)
    return DistillSparseCallback(config)


def make_guard():
    # Watches, and changes nothing.
    return ScheduleGuardCallback(ScheduleGuardConfig(adapt=False, tail_floor=0.0, kl_limit=1e9, target_acceptance=0.1))


def trees(repo, branch="main"):
    """Files of each commit by its message, the last one first."""
    sha, found = repo.branches[branch], []
    while sha is not None:
        commit = repo.commits[sha]
        found.append((commit.title, {path: blob.data for path, blob in commit.tree.items() if path[0] != "."}))
        sha = commit.parent
    return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with hub_on_localhost(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="module")
def run(hub, tiny_qwen3, tmp_path_factory):
    """Two steps with a checkpoint, which is pushed, at each; the schedule changes in between."""
    trainer = make_hub_trainer(
        tiny_qwen3,
        tmp_path_factory.mktemp("run") / "out",
        [make_distill(), make_guard(), ScheduleChange()],
        hub_model_id="alice/run",
        hub_strategy="checkpoint",
        hub_private_repo=True,
    )
    trainer.train()
    return trainer


def test_each_checkpoint_is_pushed_with_what_belongs_to_it(hub, run):
    found = trees(hub.repo("alice/run"))
    assert [title for title, _ in found] == [
        "Training in progress, step 2, checkpoint",
        "Training in progress, step 2",
        "Training in progress, step 1, checkpoint",
        "Training in progress, step 1",
        "initial commit",
    ]
    for (_, files), schedule in ((found[1], CHANGED_SCHEDULE), (found[3], SCHEDULE)):
        assert MODEL | OURS <= files.keys()
        assert SparsityScheduleConfig.from_dict(json.loads(files[SCHEDULE_NAME])) == schedule
        # An adapter at the root would be taken for the model's, and optimizers are for resuming.
        assert "adapter_config.json" not in files and f"{ADAPTER_FOLDER}/{DISTILL_STATE_NAME}" not in files
        assert not any(path.startswith("checkpoint-") for path in files)
    assert hub.repo("alice/run").private
    first, second = found[3][1], found[1][1]
    for name in (f"{ADAPTER_FOLDER}/adapter_model.safetensors", "model.safetensors", PICTURE_NAME, STATISTICS_NAME):
        assert first[name] != second[name], name


def test_the_last_checkpoint_has_what_resuming_needs(hub, run):
    files = hub.repo("alice/run").files()
    checkpoint = {path.removeprefix("last-checkpoint/") for path in files if path.startswith("last-checkpoint/")}
    needed = {"model.safetensors", "optimizer.pt", "trainer_state.json", SCHEDULE_NAME, STATISTICS_NAME}
    needed |= {GUARD_STATE_NAME, f"{ADAPTER_FOLDER}/{DISTILL_STATE_NAME}", *ADAPTER}
    assert needed <= checkpoint
    local = Path(run.args.output_dir, "checkpoint-2")
    assert files[f"last-checkpoint/{STATISTICS_NAME}"] == (local / STATISTICS_NAME).read_bytes()
    # And what is at the root is of the same step.
    for name in (STATISTICS_NAME, GUARD_STATE_NAME, "model.safetensors"):
        assert files[name] == files[f"last-checkpoint/{name}"], name


def test_the_card_says_how_rollouts_were_made(hub, run, tiny_qwen3):
    repo = hub.repo("alice/run")
    metadata = repo.metadata()
    assert {"trl", "grpo", "sparrow-trl", "sparse-rollout"} <= set(metadata["tags"])
    assert metadata["library_name"] == "transformers" and metadata["model_name"] == "run"
    # A local base model, of which neither the metadata nor the text give the path.
    assert not {"base_model", "licence", "datasets"} & metadata.keys()
    card = repo.files()["README.md"].decode()
    assert "fine-tuned version of a local model" in card and tiny_qwen3 not in card and "None" not in card
    ModelCard(card).validate()
    order = ["## Quick start", "### Rollouts", "### Framework versions", "## Citations"]
    assert sorted(order, key=card.index) == order
    assert "| 1 to 112 | 1 | 64 |" in card and f"]({SCHEDULE_NAME})" in card
    assert (
        "| cached length | tokens | mean | tail (q05) |" in card
        and "Acceptance rates (target of the tail: 0.86)" in card
    )
    assert f"]({PICTURE_NAME})" in card and f'adapter=f"{{folder}}/{ADAPTER_FOLDER}"' in card
    assert 'from_pretrained("alice/run")' in card and "@article{zhou2026sparrow," in card


def test_what_was_pushed_can_be_used(run, tmp_path):
    assert SparsityScheduleConfig.from_pretrained("alice/run") == run.schedule == CHANGED_SCHEDULE
    folder = Path(snapshot_download("alice/run", ignore_patterns="last-checkpoint/*"))
    model = AutoModelForCausalLM.from_pretrained("alice/run", dtype=torch.float32)
    config = json.loads((folder / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "alice/run"
    own = next(callback for callback in run.callback_handler.callbacks if isinstance(callback, DistillSparseCallback))
    expected = own.adapter.state_dict()
    assert any(value.abs().sum() > 0 for name, value in expected.items() if "lora_B" in name)
    loaded = RolloutAdapter.from_pretrained(model, folder / ADAPTER_FOLDER).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    weights = dict(PeftModel.from_pretrained(model, "alice/run", subfolder=ADAPTER_FOLDER).named_parameters())
    assert any("lora_B" in name and weights[name].abs().sum() > 0 for name in weights)
    # The local folder, whose name is not that of the repository, goes together as well.
    model = AutoModelForCausalLM.from_pretrained(run.args.output_dir, dtype=torch.float32)
    run.callback_handler.on_push_begin(run.args, run.state, run.control)
    RolloutAdapter.from_pretrained(model, Path(run.args.output_dir, ADAPTER_FOLDER))
    written = pull_schedule("alice/run", tmp_path / "pulled")
    assert ADAPTER | {SCHEDULE_NAME, PICTURE_NAME, "README.md"} == {
        path.relative_to(tmp_path / "pulled").as_posix() for path in written
    }


def test_the_last_checkpoint_resumes(run, tiny_qwen3, tmp_path):
    folder = Path(snapshot_download("alice/run", allow_patterns="last-checkpoint/*"), "last-checkpoint")
    distill = make_distill()
    trainer = make_hub_trainer(
        tiny_qwen3,
        tmp_path / "resumed",
        [distill, make_guard()],
        engine=run.vllm_generation.llm,
        max_steps=3,
        push_to_hub=False,
        save_strategy="no",
    )
    steps = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            steps.append((state.global_step, trainer.schedule, distill.adapter.state_dict()))
            steps[-1][2].update({name: value.clone() for name, value in steps[-1][2].items()})

    trainer.add_callback(Look())
    trainer.train(resume_from_checkpoint=str(folder))
    ((step, schedule, adapter),) = steps
    assert (step, schedule) == (2, CHANGED_SCHEDULE)
    own = next(callback for callback in run.callback_handler.callbacks if isinstance(callback, DistillSparseCallback))
    assert all(torch.equal(adapter[name], value) for name, value in own.adapter.state_dict().items())
    tokens = [sum(entry.tokens for entry in one.acceptance.bin_statistics()) for one in (run, trainer)]
    assert tokens[0] > 0 and tokens[1] > tokens[0]


def test_all_checkpoints(hub, run, tiny_qwen3, tmp_path):
    trainer = make_hub_trainer(
        tiny_qwen3,
        tmp_path / "plain",
        engine=run.vllm_generation.llm,
        hub_strategy="all_checkpoints",
        hub_token="hf_bob",
        max_steps=1,
    )
    trainer.train()
    # Without a name of its own the repository has the folder's, and belongs to the token's user.
    repo = hub.repo("bob/plain")
    titles = ["Training in progress, step 1, checkpoint", "Training in progress, step 1", "initial commit"]
    assert repo.titles() == titles
    files = repo.files()
    assert MODEL | {SCHEDULE_NAME, STATISTICS_NAME, PICTURE_NAME} <= files.keys()
    assert not any(path.startswith(ADAPTER_FOLDER) for path in files) and GUARD_STATE_NAME not in files
    assert "DistillSparse" not in files["README.md"].decode()
    assert {f"checkpoint-1/{name}" for name in (STATISTICS_NAME, SCHEDULE_NAME, "optimizer.pt")} <= files.keys()


def test_a_push_that_breaks_changes_nothing_and_is_reported(hub, run, tiny_qwen3, tmp_path, caplog):
    logging.getLogger("sparrow_trl").setLevel(logging.WARNING)
    broken = []

    class Break(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            broken.append(hub.fault("POST", "/commit/", drop))
            if state.global_step == 0:
                broken[0].__enter__()
            else:
                broken[0].__exit__(None, None, None)

    trainer = make_hub_trainer(
        tiny_qwen3, tmp_path / "broken", [Break()], engine=run.vllm_generation.llm, hub_strategy="every_save"
    )
    trainer.train()
    assert trainer.state.global_step == 2
    repo = hub.repo("alice/broken")
    assert repo.titles() == ["Training in progress, step 2", "initial commit"]
    assert MODEL | {SCHEDULE_NAME, STATISTICS_NAME, PICTURE_NAME} <= repo.files().keys()
    messages = [record.getMessage() for record in caplog.records if "A push to alice/broken failed" in record.message]
    assert len(messages) == 1 and "the next one" in messages[0]


def test_push_at_the_end(hub, run, tmp_path):
    repo = hub.repo("alice/run")
    before = len(repo.titles())
    url = run.push_to_hub(dataset_name="prompts.jsonl", tags=["mine"]).commit_url
    assert url.endswith(repo.branches["main"]) and repo.titles()[0] == "End of training"
    assert len(repo.titles()) == before + 1
    files = repo.files()
    assert MODEL | OURS <= files.keys()
    assert "mine" in repo.metadata()["tags"] and "datasets" not in repo.metadata()
    assert "prompts.jsonl" not in files["README.md"].decode()
    assert "### Rollouts" in files["README.md"].decode()
    assert json.loads(files[f"{ADAPTER_FOLDER}/adapter_config.json"])["base_model_name_or_path"] == "alice/run"
    run.push_to_hub("with data", dataset_name="bob/prompts", revision=None)
    assert repo.titles()[0] == "with data" and repo.metadata()["datasets"] == "bob/prompts"


def test_a_run_without_pushes_asks_nobody_and_can_be_pushed_afterwards(hub, run, tiny_qwen3, tmp_path):
    asked = len(hub.requests)
    trainer = make_hub_trainer(
        tiny_qwen3,
        tmp_path / "later",
        [make_distill()],
        engine=run.vllm_generation.llm,
        push_to_hub=False,
        max_steps=1,
    )
    trainer.train()
    assert not [request for request in hub.requests[asked:] if "telemetry" not in request.path]
    card = Path(tmp_path, "later", "README.md").read_text()
    assert "### Rollouts" in card and "path/to/this/model" in card and "None" not in card
    assert trainer.hub_model_id is None
    trainer.push_to_hub(private=True)
    repo = hub.repo("alice/later")
    assert repo.private and repo.titles() == ["End of training", "initial commit"]
    files = repo.files()
    assert ADAPTER | {SCHEDULE_NAME, PICTURE_NAME, STATISTICS_NAME} <= files.keys()
    # The repository was made after the adapter was written.
    assert json.loads(files[f"{ADAPTER_FOLDER}/adapter_config.json"])["base_model_name_or_path"] == "alice/later"
    assert 'from_pretrained("alice/later")' in files["README.md"].decode()


def test_other_processes_write_nothing(run, tmp_path):
    args, state = SimpleNamespace(output_dir=str(tmp_path / "rank1")), SimpleNamespace(is_world_process_zero=False)
    handlers = [callback for callback in run.callback_handler.callbacks if hasattr(callback, "attach")]
    assert sum(isinstance(callback, HubFilesCallback) for callback in handlers) == 1
    for callback in handlers:
        callback.on_push_begin(args, state, None)
    assert not (tmp_path / "rank1").exists()


@pytest.mark.parametrize(
    "base_model, kept", [("Qwen/Qwen3-4B", True), ("/home/alice/tiny", False), ("../tiny", False), (None, False)]
)
def test_the_card_of_every_base_model_is_valid(hub, base_model, kept):
    text = f"is a fine-tuned version of [{base_model}](https://huggingface.co/{base_model}) on data.\n"
    metadata = "" if base_model is None else f"base_model: {base_model}\n"
    card = ModelCard(f"---\n{metadata}library_name: transformers\n---\n# A model\n\n{text}")
    add_rollouts(card, SCHEDULE)
    card.validate()
    assert (f"[{base_model}](https://huggingface.co/{base_model})" in str(card)) == kept
    assert ("a local model" in str(card)) != kept and card.data.base_model == (base_model if kept else None)
    assert "### Rollouts" in str(card)
