"""Schedules on the Hub: pushed and fetched by the real client from a server on localhost that speaks its API."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from hub_client import hub_on_localhost
from hub_server import Blob, drop
from huggingface_hub import HfApi, ModelCard, constants
from safetensors.numpy import save

from sparrow_trl import SparsityScheduleConfig, calibration, callbacks, distill, distill_texts, recipe_search_report
from sparrow_trl.acceptance_table import MAX_TABLE_BYTES, AcceptanceTable
from sparrow_trl.cli import main
from sparrow_trl.hub import collect_files, find_schedules, pull_schedule, push_schedule
from sparrow_trl.hub_cards import GENERATED, SCHEDULE_TAG, is_hub_id, schedule_card
from sparrow_trl.hub_files import explain
from sparrow_trl.pictures import save_figure
from sparrow_trl.published_files import ADAPTER_FILES, PICTURES, PUBLISHED_FILES, TABLE_FILE
from sparrow_trl.schedule import SCHEDULE_NAME
from sparrow_trl.schedule_report import draw_schedule


SCHEDULE = SparsityScheduleConfig(
    top_k_pages=[13, 29],
    bin_tokens=2048,
    target_acceptance=0.86,
    base_model_name_or_path="bob/tiny",
    calibration={
        "method": "teacher_forced",
        "sequences": 12,
        "tails": {"2048": 0.871, "0": 0.9251},
        "dataset": "bob/prompts",
        "note": "**bold** <b>|\n# title",
    },
)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with hub_on_localhost(tmp_path / "hub") as hub:
        hub.create("bob/tiny")
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        yield hub


def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "another cache"))


def save_calibration(folder, schedule=SCHEDULE):
    """What `sparrow-trl calibrate` leaves, with strangers beside it."""
    schedule.save_pretrained(folder)
    table = AcceptanceTable(schedule, [16, 32], 2048, 2, model_name=schedule.base_model_name_or_path)
    table.save(folder / "acceptance_table.json")
    save_figure(draw_schedule(schedule), folder / "schedule.png")
    for name in (".env", "token", "run.log", "sequences.json", "screenshot.png", "checkpoint.pt"):
        (folder / name).write_text("hf_secret")
    return folder


def save_adapter(folder, base_model="/home/alice/tiny"):
    folder.mkdir(parents=True, exist_ok=True)
    weights = {"lora_A": np.arange(8, dtype=np.float32)}
    (folder / "adapter_model.safetensors").write_bytes(save(weights))
    config = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": base_model}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "distill_state.pt").write_bytes(b"optimizer")
    return folder


# Pushing a schedule


def test_push_and_load(hub):
    url = SCHEDULE.push_to_hub("alice/schedule")
    repo = hub.repo("alice/schedule")
    assert url == f"{hub.endpoint}/alice/schedule/commit/{repo.branches['main']}"
    assert SparsityScheduleConfig.from_pretrained("alice/schedule") == SCHEDULE
    assert SparsityScheduleConfig.resolve("alice/schedule", revision=repo.branches["main"]) == SCHEDULE
    # One commit has it all.
    assert repo.titles() == ["Upload sparsity schedule", "initial commit"]
    assert set(repo.files()) == {SCHEDULE_NAME, "README.md"}


def test_the_uploaded_file_is_the_saved_one(hub, tmp_path):
    SCHEDULE.push_to_hub("schedule", license="apache-2.0")
    SCHEDULE.save_pretrained(tmp_path)
    # A name without an owner is one of the user's.
    assert hub.repo("alice/schedule").files()[SCHEDULE_NAME] == (tmp_path / SCHEDULE_NAME).read_bytes()
    assert hub.repo("alice/schedule").metadata()["license"] == "apache-2.0"


def test_the_card_of_a_schedule(hub):
    SCHEDULE.push_to_hub("alice/schedule")
    assert hub.repo("alice/schedule").metadata() == {
        "base_model": "bob/tiny",
        "datasets": ["bob/prompts"],
        "library_name": "sparrow-trl",
        "tags": ["sparse-attention", "sparse-rollout", "sparrow-schedule", "trl"],
    }
    card = hub.repo("alice/schedule").files()["README.md"].decode()
    assert "# Sparsity schedule for bob/tiny" in card and "[bob/tiny](https://huggingface.co/bob/tiny)" in card
    # What queries read, and the results in the order of lengths.
    assert "| 1 to 2032 | 13 | 256 |" in card
    assert card.index("| 0 to 2,048 | 0.9251 | 0.86 |") < card.index("| 2,048 to 4,096 | 0.8710 | 0.86 |")
    assert "- sequences: 12" in card and "percentile 5" in card
    assert 'schedule="alice/schedule"' in card and "@article{zhou2026sparrow," in card
    # A record may come from anywhere: it is text.
    assert r"- note: \*\*bold\*\* \<b\>\| \# title" in card
    ModelCard(card).validate()


@pytest.mark.parametrize("name", ["/home/alice/models/tiny", "./tiny", "C:\\models\\tiny", "a/b/c", "outputs/tiny"])
def test_a_local_base_model_stays_out_of_metadata_and_files(hub, name):
    Path("outputs/tiny").mkdir(parents=True)
    SparsityScheduleConfig.fixed(512, base_model_name_or_path=name).push_to_hub("alice/schedule")
    files = hub.repo("alice/schedule").files()
    assert "base_model" not in hub.repo("alice/schedule").metadata()
    assert "Made for a local model." in files["README.md"].decode()
    assert not any(name.encode() in data for data in files.values())
    assert SparsityScheduleConfig.from_pretrained("alice/schedule").base_model_name_or_path is None


def test_a_model_that_the_hub_does_not_know_is_named_in_the_text_alone(hub):
    # A path of another machine may look like this.
    SparsityScheduleConfig.fixed(512, base_model_name_or_path="outputs/tiny").push_to_hub("alice/schedule")
    assert "base_model" not in hub.repo("alice/schedule").metadata()
    assert "Made for outputs/tiny." in hub.repo("alice/schedule").files()["README.md"].decode()
    assert SparsityScheduleConfig.from_pretrained("alice/schedule").base_model_name_or_path == "outputs/tiny"


def test_the_server_refuses_a_card_with_a_path(hub):
    # What the two tests above would not notice on a server that takes everything.
    card = schedule_card(SCHEDULE, "alice/schedule", base_model="/home/alice/models/tiny")
    with pytest.raises(ValueError, match="base_model"):
        card.validate()
    hub.create("alice/bad")
    with pytest.raises(ValueError, match="Invalid metadata"):
        HfApi().upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id="alice/bad")


@pytest.mark.parametrize(
    "name, valid",
    [
        ("user/name", True),
        ("gpt2", True),
        ("a/b/c", False),
        ("/a/b", False),
        ("a--b/c", False),
        ("", False),
        (3, False),
    ],
)
def test_what_can_be_an_id(name, valid):
    assert is_hub_id(name) is valid


def test_a_dense_schedule_and_one_without_a_record_have_cards(hub):
    SparsityScheduleConfig.dense().push_to_hub("alice/dense")
    card = hub.repo("alice/dense").files()["README.md"].decode()
    assert "Made for no model in particular" in card and "## Results" not in card and "whole context" in card


@pytest.mark.parametrize(
    "record", [{"tails": {"x": 1}}, {"tails": [1]}, {"tails": {"0": "0.9"}}, {"dataset": ["/a b"]}]
)
def test_a_strange_record_makes_a_valid_card(hub, record):
    SparsityScheduleConfig.fixed(512, calibration=record).push_to_hub("alice/schedule")
    assert "datasets" not in hub.repo("alice/schedule").metadata()
    assert "tail acceptance |" not in hub.repo("alice/schedule").files()["README.md"].decode()


# Repositories that exist


def test_a_second_push_replaces_schedule_and_card(hub):
    SCHEDULE.push_to_hub("alice/schedule")
    other = SparsityScheduleConfig.fixed(512)
    other.push_to_hub("alice/schedule", commit_message="cheaper")
    repo = hub.repo("alice/schedule")
    assert repo.titles() == ["cheaper", "Upload sparsity schedule", "initial commit"]
    assert SparsityScheduleConfig.from_pretrained("alice/schedule") == other
    assert "no model in particular" in repo.files()["README.md"].decode()
    assert GENERATED in repo.files()["README.md"].decode()


@pytest.mark.parametrize(
    "card",
    ["---\nlicense: mit\n---\n# My model\n", "no metadata", "---\n: [\n---\n# Broken metadata\n", "x" * (2**20 + 1)],
)
def test_somebody_s_card_is_kept(hub, capsys, card):
    hub.create("alice/model")
    hub.add("alice/model", {"README.md": card.encode(), "config.json": b"{}"})
    assert main(["push", "qwen3-4b-0.86", "alice/model"]) == 0
    output = capsys.readouterr().out
    assert "card of its own" in output and "  README.md" not in output
    files = hub.repo("alice/model").files()
    assert files["README.md"] == card.encode() and files["config.json"] == b"{}"
    assert SparsityScheduleConfig.from_pretrained("alice/model") == SparsityScheduleConfig.from_preset("qwen3-4b-0.86")


def test_a_generated_card_that_was_claimed_is_kept(hub):
    SCHEDULE.push_to_hub("alice/schedule")
    mine = hub.repo("alice/schedule").files()["README.md"].decode().replace(GENERATED, "My words.")
    hub.add("alice/schedule", {"README.md": mine.encode()})
    assert push_schedule(SparsityScheduleConfig.fixed(512), "alice/schedule").kept_card
    assert hub.repo("alice/schedule").files()["README.md"].decode() == mine


def test_the_empty_card_of_a_new_repository_gives_its_license(hub):
    hub.create("alice/schedule")
    hub.add("alice/schedule", {"README.md": b"---\nlicense: mit\n---\n"})
    assert not push_schedule(SCHEDULE, "alice/schedule").kept_card
    metadata = hub.repo("alice/schedule").metadata()
    assert metadata["license"] == "mit" and SCHEDULE_TAG in metadata["tags"]


def test_private_repositories(hub, monkeypatch, tmp_path):
    SCHEDULE.push_to_hub("alice/secret", private=True)
    assert hub.repo("alice/secret").private
    assert SparsityScheduleConfig.from_pretrained("alice/secret") == SCHEDULE
    SCHEDULE.push_to_hub("alice/secret", private=True)  # again
    fresh_cache(monkeypatch, tmp_path)
    for token in ("hf_bob", False):
        with pytest.raises(ValueError, match="no model repository alice/secret, or it is private.*hf auth login"):
            SparsityScheduleConfig.from_pretrained("alice/secret", token=token)
    assert SparsityScheduleConfig.from_pretrained("alice/secret", token="hf_alice") == SCHEDULE


def test_private_does_not_go_to_a_public_repository(hub):
    hub.create("alice/open")
    with pytest.raises(ValueError, match="exists and is public"):
        SCHEDULE.push_to_hub("alice/open", private=True)
    assert hub.repo("alice/open").files() == {}


def test_gated_repositories(hub):
    hub.create("bob/gated", gated=True)
    hub.add("bob/gated", {SCHEDULE_NAME: b"{}"})
    with pytest.raises(ValueError, match="bob/gated is gated: ask for access"):
        SparsityScheduleConfig.from_pretrained("bob/gated")


def test_repositories_of_others_and_wrong_tokens(hub, monkeypatch):
    with pytest.raises(ValueError, match="The token does not allow this for bob/tiny"):
        SCHEDULE.push_to_hub("bob/tiny")
    with pytest.raises(ValueError, match="The token does not allow this for bob/new"):
        SCHEDULE.push_to_hub("bob/new")
    with pytest.raises(ValueError, match="does not accept the token.*hf auth login"):
        SCHEDULE.push_to_hub("alice/schedule", token="hf_nobody")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ValueError, match="hf auth login"):
        SCHEDULE.push_to_hub("alice/schedule")
    assert hub.repo("bob/tiny").titles() == ["initial commit"] and ("model", "alice/schedule") not in hub.repos


def test_a_dataset_of_the_same_name(hub):
    hub.create("alice/thing", "dataset")
    with pytest.raises(ValueError, match="alice/thing is a dataset on the Hub"):
        SparsityScheduleConfig.from_pretrained("alice/thing")
    with pytest.raises(ValueError, match="alice/thing is a dataset on the Hub"):
        pull_schedule("alice/thing", "out")
    SCHEDULE.push_to_hub("alice/thing")  # names of models are their own
    assert SparsityScheduleConfig.from_pretrained("alice/thing") == SCHEDULE
    assert hub.repo("alice/thing", "dataset").files() == {}


# Revisions


def test_branches(hub):
    SCHEDULE.push_to_hub("alice/schedule")
    other = SparsityScheduleConfig.fixed(512)
    other.push_to_hub("alice/schedule", revision="cheap/v1")
    other.push_to_hub("alice/schedule", revision="cheap/v1", commit_message="again")
    repo = hub.repo("alice/schedule")
    # The third changed nothing.
    assert repo.titles("cheap/v1") == ["Upload sparsity schedule", "Upload sparsity schedule", "initial commit"]
    assert repo.titles() == ["Upload sparsity schedule", "initial commit"]
    load = SparsityScheduleConfig.from_pretrained
    assert load("alice/schedule") == SCHEDULE and load("alice/schedule", revision="cheap/v1") == other
    assert load("alice/schedule", revision=repo.commits[repo.branches["cheap/v1"]].parent) == SCHEDULE
    with pytest.raises(ValueError, match="alice/schedule has no branch, tag or commit 'v9'"):
        load("alice/schedule", revision="v9")


def test_pull_requests(hub):
    hub.create("bob/schedule")
    url = SCHEDULE.push_to_hub("bob/schedule", create_pr=True)
    assert url == f"{hub.endpoint}/bob/schedule/discussions/1"
    assert hub.repo("bob/schedule").files() == {}
    assert SparsityScheduleConfig.from_pretrained("bob/schedule", revision="refs/pr/1") == SCHEDULE
    with pytest.raises(ValueError, match="no branch, tag or commit 'v9'"):
        SCHEDULE.push_to_hub("bob/schedule", create_pr=True, revision="v9")


# Interrupted pushes


def test_a_connection_that_breaks_at_the_commit_changes_nothing(hub):
    SCHEDULE.push_to_hub("alice/schedule")
    before = hub.repo("alice/schedule").branches["main"]
    folder = save_calibration(Path("calibration"), SparsityScheduleConfig.fixed(512))
    with hub.fault("POST", "/commit/", drop):
        with pytest.raises(ConnectionError, match="The files of the repository are as they were"):
            push_schedule(folder, "alice/schedule")
    assert hub.repo("alice/schedule").branches == {"main": before}
    assert SparsityScheduleConfig.from_pretrained("alice/schedule") == SCHEDULE
    # The large files are there already, and are not sent again.
    sent = len(hub.asked("PUT", "/upload/"))
    push_schedule(folder, "alice/schedule")
    assert sent == len(hub.asked("PUT", "/upload/")) == 1
    assert SparsityScheduleConfig.from_pretrained("alice/schedule").top_k_pages == [29]


def test_an_upload_that_is_refused_changes_nothing(hub, capsys):
    folder = save_calibration(Path("calibration"))
    with hub.fault("PUT", "/upload/", lambda handler: (handler.body(), handler.send(403, {"error": "full"}))[1]):
        assert main(["push", str(folder), "alice/schedule"]) == 1
    assert "schedule.png" in capsys.readouterr().err
    assert hub.repo("alice/schedule").titles() == ["initial commit"]
    assert main(["push", str(folder), "alice/schedule"]) == 0
    assert "schedule.png" in hub.repo("alice/schedule").files()


def test_a_process_that_is_killed_within_an_upload_changes_nothing(hub, tmp_path):
    folder = save_calibration(Path("calibration"))
    reached, leave = threading.Event(), threading.Event()

    def hold(handler):
        handler.rfile.read(100)
        reached.set()
        leave.wait(60)
        drop(handler)

    environment = client_environment(hub, tmp_path)
    command = [sys.executable, "-m", "sparrow_trl", "push", str(folder.resolve()), "alice/schedule"]
    with hub.fault("PUT", "/upload/", hold):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert reached.wait(60)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            leave.set()
    assert hub.repo("alice/schedule").titles() == ["initial commit"] and not hub.asked("POST", "/commit/")
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "schedule.png" in run.stdout and hub.repo("alice/schedule").titles()[0] == "Upload sparsity schedule"


def client_environment(hub, tmp_path, **more):
    """Settings of a client of its own process, as users make them."""
    return {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "hf_alice",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        **more,
    }


# Loading


def test_offline_the_cache_is_used(hub, tmp_path):
    SCHEDULE.push_to_hub("alice/schedule")

    def show(name, **more):
        command = [sys.executable, "-m", "sparrow_trl", "show", name]
        return subprocess.run(command, env=client_environment(hub, tmp_path, **more), capture_output=True, text=True)

    online = show("alice/schedule")
    assert online.returncode == 0 and "Made for a tail acceptance of 0.86" in online.stdout, online.stderr
    asked = len(hub.requests)
    assert show("alice/schedule", HF_HUB_OFFLINE="1").stdout == online.stdout
    another = show("alice/another", HF_HUB_OFFLINE="1")
    assert another.returncode == 1 and len(hub.requests) == asked
    assert "alice/another is not in the local cache, and the Hub is no help: it may not be asked" in another.stderr
    # And when the Hub is gone.
    assert show("alice/schedule", HF_ENDPOINT="http://127.0.0.1:9").stdout == online.stdout


def test_a_hub_that_cannot_be_reached_is_no_error_in_the_name(hub):
    try:
        raise huggingface_hub.errors.LocalEntryNotFoundError("nothing cached") from OSError("Connection refused")
    except OSError as error:
        text = explain(error, "alice/schedule", filename=SCHEDULE_NAME)
    assert text == (
        f"{SCHEDULE_NAME} of alice/schedule is not in the local cache, and the Hub is no help: it cannot be reached "
        "(Connection refused). Load it once online."
    )


def test_offline_commands_say_so(hub, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for arguments in (["pull", "alice/schedule"], ["find"], ["push", "qwen3-4b-0.86", "alice/schedule"]):
        assert main(arguments) == 1
        assert "HF_HUB_OFFLINE" in capsys.readouterr().err
    assert hub.requests == []


def test_what_is_local_comes_first(hub, capsys):
    SCHEDULE.push_to_hub("alice/schedule")
    Path("alice/schedule").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no sparsity_schedule.json.*sparrow-trl pull"):
        SparsityScheduleConfig.from_pretrained("alice/schedule")
    SparsityScheduleConfig.fixed(512).save_pretrained("alice/schedule")
    for load in (SparsityScheduleConfig.from_pretrained, SparsityScheduleConfig.resolve):
        assert load("alice/schedule", revision="main").top_k_pages == [29]
    # The command asks the Hub alone.
    assert main(["pull", "alice/schedule", "--output_dir", "out"]) == 0
    assert SparsityScheduleConfig.from_pretrained("out") == SCHEDULE


def test_the_name_of_a_preset(hub, capsys):
    assert push_schedule("qwen3-4b-0.86", "qwen3-4b-0.86").repo_id == "alice/qwen3-4b-0.86"
    hub.add("alice/qwen3-4b-0.86", {SCHEDULE_NAME: json.dumps({"top_k_pages": [5]}).encode()})
    # Alone it is the preset, with its owner the repository.
    assert SparsityScheduleConfig.resolve("qwen3-4b-0.86").base_model_name_or_path == "Qwen/Qwen3-4B"
    assert SparsityScheduleConfig.resolve("alice/qwen3-4b-0.86").top_k_pages == [5]
    assert main(["pull", "qwen3-4b-0.86"]) == 1
    assert "is user/name" in (error := capsys.readouterr().err) and "name of a preset" in error


def test_a_repository_without_a_schedule(hub):
    with pytest.raises(ValueError, match="bob/tiny has no sparsity_schedule.json"):
        SparsityScheduleConfig.from_pretrained("bob/tiny")
    with pytest.raises(ValueError, match="bob/tiny has no sparsity_schedule.json"):
        pull_schedule("bob/tiny", "out")


# Files of strangers


DEEP = b'{"top_k_pages": [1], "calibration": {"a": %s}}'


@pytest.mark.parametrize(
    "data, message",
    [
        (b'{"top_k_pages": [1], "__class__": "os.system"}', "Unknown field"),
        (b"\x80\x04\x95 pickle", "not UTF-8"),
        (b"import os", "not valid JSON"),
        (b'{"top_k_pages": [1], "top_k_pages": [2]}', "appears twice"),
        (b'{"top_k_pages": [NaN]}', "not a finite number"),
        (b'{"top_k_pages": [' + b"1," * 20_000 + b"1]}", "at most 16384 entries"),
        (DEEP % (b"[" * 100 + b"]" * 100), "nested 64 levels deep"),
        (DEEP % (b"[" * 700 + b"]" * 700), "nested 64 levels deep"),
        (DEEP % (b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
    ],
    ids=["key", "pickle", "code", "twice", "nan", "long", "deep", "deeper", "deepest"],
)
def test_hostile_schedules_are_refused(hub, data, message):
    hub.create("bob/evil")
    hub.add("bob/evil", {SCHEDULE_NAME: data})
    with pytest.raises(ValueError, match=message):
        SparsityScheduleConfig.from_pretrained("bob/evil")
    with pytest.raises(ValueError, match=message):
        pull_schedule("bob/evil", "out")
    assert not Path("out").exists()


@pytest.mark.parametrize("large", [False, True], ids=["regular", "lfs"])
def test_large_schedules_are_not_even_downloaded(hub, large):
    hub.create("bob/evil")
    hub.add("bob/evil", {SCHEDULE_NAME: Blob(b"{}", large, size=5 * 2**30)})
    with pytest.raises(ValueError, match="5,368,709,120 bytes, and the limit for a file of this kind is 4,194,304"):
        SparsityScheduleConfig.from_pretrained("bob/evil")
    with pytest.raises(ValueError, match="5,368,709,120 bytes"):
        pull_schedule("bob/evil", "out")
    assert not hub.asked("GET", "/resolve/") and not hub.asked("GET", "/large/") and not Path("out").exists()


@pytest.mark.parametrize(
    "path, data, message",
    [
        ("schedule.png", b"<svg onload=alert(1)>", "no PNG picture"),
        ("distill_sparse/adapter_model.safetensors", b"\x80\x04pickle of code....", "no safetensors file"),
        ("acceptance_table.json", b"[" * 10_000, "nested too deeply|not valid JSON"),
        ("acceptance_table.json", Blob(b"{}", False, size=2**29), "limit for acceptance_table.json"),
        ("distill_sparse/sparsity_schedule.json", b"{}", "no valid schedule"),
    ],
)
def test_a_file_of_another_kind_stops_the_pull(hub, path, data, message):
    hub.create("bob/evil")
    hub.add("bob/evil", {SCHEDULE_NAME: b'{"top_k_pages": [1]}', path: data})
    with pytest.raises(ValueError, match=message):
        pull_schedule("bob/evil", "out")
    assert not Path("out").exists()


# Folders


def test_a_folder_is_pushed_with_what_belongs_to_it_alone(hub, capsys):
    folder = save_calibration(Path("calibration"))
    assert main(["push", "calibration", "alice/schedule", "--license", "mit", "--dataset", "bob/more"]) == 0
    expected = ["README.md", "acceptance_table.json", "schedule.png", SCHEDULE_NAME]
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:-1]] == expected
    repo = hub.repo("alice/schedule")
    assert sorted(repo.files()) == expected and repo.titles() == ["Upload sparsity schedule", "initial commit"]
    for name in expected[1:]:
        assert repo.files()[name] == (folder / name).read_bytes()
    assert not any(b"hf_secret" in data for data in repo.files().values())
    card = repo.files()["README.md"].decode()
    assert "![Budget over the cached length](schedule.png)" in card and "acceptance_table.json" in card
    assert "tail_acceptance.png" not in card
    assert repo.metadata()["license"] == "mit" and repo.metadata()["datasets"] == ["bob/more", "bob/prompts"]


def test_dry_run_asks_nobody(hub, capsys):
    save_calibration(Path("calibration"))
    assert main(["push", "calibration", "alice/schedule", "--dry_run"]) == 0
    assert capsys.readouterr().out.split() == ["acceptance_table.json", "schedule.png", SCHEDULE_NAME]
    assert hub.requests == []


def test_paths_stay_out_of_everything_that_a_folder_gives(hub):
    local = str(Path("models/tiny").resolve())
    folder = save_calibration(Path("calibration"), SparsityScheduleConfig.fixed(512, base_model_name_or_path=local))
    save_adapter(folder / "distill_sparse", base_model=local)
    push_schedule(folder, "alice/schedule")
    files = hub.repo("alice/schedule").files()
    assert "acceptance_table.json" in files and "distill_sparse/adapter_config.json" in files
    assert not any(local.encode() in data for data in files.values())
    assert pull_schedule("alice/schedule", "out")
    assert AcceptanceTable.load("out/acceptance_table.json").model_name is None


@pytest.mark.parametrize("where", ["itself", "inside"])
def test_an_adapter_goes_to_a_folder_of_its_own(hub, where):
    folder = Path("run")
    SCHEDULE.save_pretrained(folder)
    adapter = save_adapter(folder if where == "itself" else folder / "distill_sparse")
    if where == "inside":
        SparsityScheduleConfig.fixed(512).save_pretrained(adapter)
    push_schedule(folder, "alice/schedule")
    files = hub.repo("alice/schedule").files()
    # At the root PEFT would take it for the adapter of the repository.
    names = {"distill_sparse/adapter_config.json", "distill_sparse/adapter_model.safetensors"}
    if where == "inside":
        names.add(f"distill_sparse/{SCHEDULE_NAME}")
    assert set(files) == {"README.md", SCHEDULE_NAME, *names}
    config = json.loads(files["distill_sparse/adapter_config.json"])
    assert config == {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "bob/tiny"}
    assert "DistillSparseCallback(adapter=" in files["README.md"].decode()
    written = pull_schedule("alice/schedule", "out")
    assert {path.relative_to("out").as_posix() for path in written} == set(files)
    assert (
        Path("out/distill_sparse/adapter_model.safetensors").read_bytes()
        == (adapter / "adapter_model.safetensors").read_bytes()
    )


def test_a_card_beside_the_schedule(hub):
    folder = save_calibration(Path("calibration"))
    (folder / "README.md").write_text("---\ntags:\n- grpo\n---\nA model's card.")
    assert "README.md" not in collect_files(folder)[1]
    mine = f"---\ntags:\n- {SCHEDULE_TAG}\n---\nMy own words."
    (folder / "README.md").write_text(mine)
    push_schedule(folder, "alice/schedule")
    assert hub.repo("alice/schedule").files()["README.md"].decode() == mine


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("schedule.png", b"no picture", "no PNG picture"),
        ("acceptance_table.json", b"{", "not valid JSON"),
        (SCHEDULE_NAME, b"{}", "needs the field"),
    ],
)
def test_damaged_files_are_not_pushed(hub, name, content, message):
    folder = save_calibration(Path("calibration"))
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        push_schedule(folder, "alice/schedule")
    assert hub.requests == []


def test_a_source_that_is_none(hub, capsys):
    assert main(["push", "nowhere", "alice/schedule"]) == 1
    assert "'nowhere' is no local file or folder" in capsys.readouterr().err
    assert main(["push", "qwen3-4b-0.86", "a/b/c"]) == 1
    assert "no repository id" in capsys.readouterr().err
    assert hub.requests == []


def test_names_are_those_that_others_write():
    pictures = {picture.path for picture in PICTURES}
    assert pictures == {
        calibration.TAIL_PICTURE_NAME,
        calibration.SCHEDULE_PICTURE_NAME,
        recipe_search_report.PICTURE_NAME,
        callbacks.PICTURE_NAME,
        distill_texts.PICTURE_NAME,
    }
    assert (TABLE_FILE.path, TABLE_FILE.max_bytes) == (calibration.TABLE_NAME, MAX_TABLE_BYTES)
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from peft.utils.constants import CONFIG_NAME

    assert [file.path for file in ADAPTER_FILES] == [
        f"{distill.ADAPTER_FOLDER}/{CONFIG_NAME}",
        f"{distill.ADAPTER_FOLDER}/{SAFETENSORS_WEIGHTS_NAME}",
    ]
    assert len({file.path for file in PUBLISHED_FILES}) == len(PUBLISHED_FILES)


# pull and find


def test_pull_writes_what_belongs_to_the_schedule_alone(hub, capsys):
    push_schedule(save_calibration(Path("calibration")), "alice/schedule")
    hub.add("alice/schedule", {"evil.py": b"import os", "pytorch_model.bin": b"weights", "other/schedule.png": b"x"})
    assert main(["pull", "alice/schedule"]) == 0
    names = {"README.md", SCHEDULE_NAME, "acceptance_table.json", "schedule.png"}
    assert {path.name for path in Path("schedule").iterdir()} == names
    assert set(capsys.readouterr().out.splitlines()) == {f"Wrote schedule/{name}" for name in names}
    for name in names:
        assert Path("schedule", name).read_bytes() == hub.repo("alice/schedule").files()[name]


def test_pull_of_a_revision_does_not_replace_what_differs(hub, capsys):
    SCHEDULE.push_to_hub("alice/schedule")
    SparsityScheduleConfig.fixed(512).push_to_hub("alice/schedule", revision="cheap")
    pull_schedule("alice/schedule", "out")
    pull_schedule("alice/schedule", "out")  # the same
    arguments = ["pull", "alice/schedule", "--revision", "cheap", "--output_dir", "out"]
    assert main(arguments) == 1
    assert "exists with other contents" in capsys.readouterr().err
    assert SparsityScheduleConfig.from_pretrained("out") == SCHEDULE
    assert main([*arguments, "--overwrite"]) == 0
    assert SparsityScheduleConfig.from_pretrained("out").top_k_pages == [29]
    with pytest.raises(ValueError, match="no branch, tag or commit 'v9'"):
        pull_schedule("alice/schedule", "out", revision="v9")
    Path("file").touch()
    with pytest.raises(ValueError, match="file is a file"):
        pull_schedule("alice/schedule", "file")


def test_find(hub, capsys):
    hub.create("bob/other")
    SCHEDULE.push_to_hub("alice/tiny-schedule")
    SparsityScheduleConfig.fixed(512, base_model_name_or_path="bob/other").push_to_hub("alice/cheap")
    SCHEDULE.push_to_hub("alice/secret", private=True)
    hub.create("bob/model")
    hub.add("bob/model", {"README.md": b"---\nbase_model: bob/tiny\ntags:\n- trl\n---\n"})
    hub.repo("alice/cheap").downloads = 1234

    def found(**options):
        return [row[0] for row in find_schedules(**options).rows]

    assert found(token=False) == ["alice/cheap", "alice/tiny-schedule"]
    assert found() == ["alice/cheap", "alice/tiny-schedule", "alice/secret"]
    assert found(base_model="bob/other") == ["alice/cheap"] and found(search="TINY") == ["alice/tiny-schedule"]
    assert found(author="bob") == [] and found(limit=1) == ["alice/cheap"]
    assert find_schedules(limit=1).rows == [["alice/cheap", "bob/other", "1,234", "2026-01-02"]]
    assert main(["find", "cheap", "--base_model", "bob/other"]) == 0
    assert "alice/cheap" in capsys.readouterr().out
    assert main(["find", "--base_model", "bob/nothing"]) == 0
    assert "no such schedule" in capsys.readouterr().out


def test_commands_load_neither_torch_nor_trl(hub, tmp_path):
    code = (
        "import sys\nfrom sparrow_trl.cli import main\n"
        "assert main(['push', 'qwen3-4b-0.86', 'alice/schedule']) == 0\n"
        "assert main(['pull', 'alice/schedule', '--output_dir', 'out']) == 0\n"
        "assert main(['find']) == 0\n"
        "assert not {'torch', 'trl', 'vllm', 'transformers'} & set(sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=client_environment(hub, tmp_path), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
