"""
Schedules on the Hugging Face Hub: publish one with what belongs to it, fetch it, find others'.

A push is one commit. Large files are uploaded before it, but belong to nothing until it is made: a push that is
interrupted leaves the repository as it was. From the Hub comes data alone, and only the files of
[`~sparrow_trl.published_files`]: their sizes are checked before the download, their contents after it.
"""

import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .hub_cards import SCHEDULE_TAG, card_body, is_generated, is_hub_id, schedule_card, without_local_model
from .hub_files import download_file, hub_errors
from .json_files import dump_json_object, read_json_object
from .published_files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_FILES,
    ADAPTER_SCHEDULE_FILE,
    CARD_FILE,
    CARD_NAME,
    PICTURES,
    PUBLISHED_FILES,
    SCHEDULE_FILE,
    TABLE_FILE,
    PublishedFile,
)
from .schedule import SCHEDULE_NAME, SparsityScheduleConfig, preset_names
from .tables import Table


if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo


@dataclass(frozen=True)
class PushResult:
    """
    What a push did.

    Args:
        repo_id (`str`): The repository, with its owner.
        url (`str`): URL of the commit, or of the pull request.
        files (`list[str]`): Paths in the repository of what was uploaded.
        kept_card (`bool`): Whether the repository has a card of its own, which was kept.
    """

    repo_id: str
    url: str
    files: list[str]
    kept_card: bool


def collect_files(
    source: "SparsityScheduleConfig | str | os.PathLike",
) -> tuple[SparsityScheduleConfig, dict[str, bytes | Path]]:
    """
    The schedule of `source`, and what of it is published.

    Args:
        source ([`SparsityScheduleConfig`], `str` or `os.PathLike`):
            A schedule, the name of a preset, a schedule file, or a folder with one: of `sparrow-trl calibrate`,
            `search` or `distill`, of a training run, or of an adapter.

    Returns:
        `tuple[SparsityScheduleConfig, dict[str, bytes | pathlib.Path]]`: the schedule, and contents or files by their
        path in the repository. Paths of local models are left out of the contents.

    Raises:
        ValueError: when there is no schedule, or a file is damaged.
    """
    folder = None
    if isinstance(source, SparsityScheduleConfig):
        schedule = source
    elif isinstance(source, str) and source in preset_names():
        schedule = SparsityScheduleConfig.from_preset(source)
    else:
        path = Path(source).expanduser()
        if not path.exists():
            raise ValueError(
                f"{str(source)!r:.200} is no local file or folder with a {SCHEDULE_NAME}, and no preset has this name."
            )
        schedule = SparsityScheduleConfig.from_pretrained(path)
        folder = path if path.is_dir() else None

    files: dict[str, bytes | Path] = {SCHEDULE_NAME: _schedule_data(schedule)}
    if folder is None:
        return schedule, files
    for file in (TABLE_FILE, *PICTURES):
        if (folder / file.name).is_file():
            file.check(folder / file.name)
            files[file.path] = folder / file.name
    if TABLE_FILE.path in files:
        files[TABLE_FILE.path] = _table_without_local_model(folder / TABLE_FILE.name)
    # The folder of an adapter has a schedule as well.
    adapter = folder if (folder / ADAPTER_CONFIG_NAME).is_file() else folder / ADAPTER_FILES[0].path.partition("/")[0]
    if all((adapter / file.name).is_file() for file in ADAPTER_FILES):
        for file in ADAPTER_FILES:
            file.check(adapter / file.name)
            files[file.path] = adapter / file.name
        config = read_json_object(adapter / ADAPTER_CONFIG_NAME)
        if not is_hub_id(config.get("base_model_name_or_path")):
            config["base_model_name_or_path"] = without_local_model(schedule).base_model_name_or_path
        files[ADAPTER_FILES[0].path] = dump_json_object(config, ADAPTER_CONFIG_NAME)
        if adapter != folder and (adapter / SCHEDULE_NAME).is_file():
            files[ADAPTER_SCHEDULE_FILE.path] = _schedule_data(SparsityScheduleConfig.from_pretrained(adapter))
    card = folder / CARD_NAME
    # A model's card, such as that of a training run, is no schedule's.
    if card.is_file() and card.stat().st_size <= CARD_FILE.max_bytes:
        CARD_FILE.check(card)
        if SCHEDULE_TAG in _card_tags(card.read_text(encoding="utf-8")):
            files[CARD_NAME] = card
    return schedule, files


def push_schedule(
    source: "SparsityScheduleConfig | str | os.PathLike",
    repo_id: str,
    *,
    commit_message: str = "Upload sparsity schedule",
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    license: str | None = None,
    datasets: Iterable[str] = (),
) -> PushResult:
    """
    Publish a schedule and what belongs to it, in one commit.

    Args:
        source ([`SparsityScheduleConfig`], `str` or `os.PathLike`):
            As in [`collect_files`].
        repo_id (`str`):
            Model repository, which is created when missing. Without an owner it is one of the token's user.
        commit_message (`str`, *optional*, defaults to `"Upload sparsity schedule"`):
            Message of the commit.
        private (`bool`, *optional*):
            Whether a new repository is private. By default the organization's setting decides. `True` refuses to push
            to a public repository that exists.
        token (`bool` or `str`, *optional*):
            Token to use; by default the stored one.
        revision (`str`, *optional*):
            Branch to push to, which is created when missing.
        create_pr (`bool`, *optional*, defaults to `False`):
            Whether to open a pull request instead of committing.
        license (`str`, *optional*):
            License for the card.
        datasets (`Iterable[str]`, *optional*, defaults to `()`):
            Hub ids of datasets for the card, beside those in the record of the calibration (`dataset`, `datasets`).

    Returns:
        [`PushResult`]

    Raises:
        ValueError: when `source` has no schedule, a file is damaged, or the Hub refuses.
        ConnectionError: when the Hub cannot be reached or the connection breaks. The repository's files are as they
            were then.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    schedule, files = collect_files(source)
    api = HfApi(token=token, library_name="sparrow-trl")
    unchanged = " The files of the repository are as they were."
    with hub_errors(repo_id, revision=revision, suffix=unchanged):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        info = _model_info(api, repo_id, revision, create=not create_pr)
        if private and not info.private:
            raise ValueError(
                f"{repo_id} exists and is public, so nothing was pushed. Make it private in its settings, or push "
                "without `private`."
            )
        existing = _existing_card(api, info, revision)
        keeps = existing is not None and not is_generated(existing) and card_body(existing) != ""
        if keeps:
            files.pop(CARD_NAME, None)
        elif CARD_NAME not in files:
            base_model = schedule.base_model_name_or_path
            recorded = schedule.calibration or {}
            recorded = [recorded.get("dataset"), *_list(recorded.get("datasets"))]
            card = schedule_card(
                schedule,
                repo_id,
                # A path on another machine may look like an id.
                base_model=base_model if is_hub_id(base_model) and api.repo_exists(base_model) else None,
                files=files,
                datasets=[name for name in [*recorded, *datasets] if is_hub_id(name)],
                license=license or _license(existing),
            )
            files[CARD_NAME] = str(card).encode()
        commit = api.create_commit(
            repo_id,
            [CommitOperationAdd(path, content) for path, content in sorted(files.items())],
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,  # the card was looked at there
        )
    return PushResult(repo_id, commit.pr_url or commit.commit_url, sorted(files), keeps)


def pull_schedule(
    repo_id: str,
    folder: str | os.PathLike,
    *,
    revision: str | None = None,
    token: bool | str | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """
    Fetch a schedule and what belongs to it.

    Args:
        repo_id (`str`):
            Model repository with a schedule. A local folder of this name is not looked at.
        folder (`str` or `os.PathLike`):
            Folder to write to, which is created when missing.
        revision (`str`, *optional*):
            Branch, tag or commit.
        token (`bool` or `str`, *optional*):
            Token to use; by default the stored one.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether files of `folder` with other contents are replaced.

    Returns:
        `list[pathlib.Path]`: what was written.

    Raises:
        ValueError: when there is no such repository, a file is too large, of another kind or invalid, or `folder` has
            another file of the same name. Nothing is written then.
        ConnectionError: when the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    if "/" not in repo_id:
        hint = " It is the name of a preset, which needs no download." if repo_id in preset_names() else ""
        raise ValueError(f"A repository id is user/name, got {repo_id!r:.200}.{hint}")
    with hub_errors(repo_id, revision=revision):
        info = HfApi(token=token).model_info(repo_id, revision=revision, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
    wanted = [file for file in PUBLISHED_FILES if file.path in sizes]
    if SCHEDULE_FILE not in wanted:
        raise ValueError(f"{repo_id} has no {SCHEDULE_NAME}.")
    for file in wanted:
        file.check_size(sizes[file.path], f"{file.path} of {repo_id}")
    fetched = {}
    for file in wanted:
        fetched[file] = download_file(repo_id, file.path, file.max_bytes, revision=info.sha, token=token)
        file.check(fetched[file])
    for file in (SCHEDULE_FILE, ADAPTER_SCHEDULE_FILE):
        if file in fetched:
            _check_schedule(fetched[file], f"{file.path} of {repo_id}")
    return _write(fetched, Path(folder), overwrite)


def find_schedules(
    *,
    base_model: str | None = None,
    author: str | None = None,
    search: str | None = None,
    limit: int = 20,
    token: bool | str | None = None,
) -> Table:
    """
    Schedules on the Hub, the most downloaded first.

    Args:
        base_model (`str`, *optional*):
            Hub id of the model that they were made for.
        author (`str`, *optional*):
            User or organization.
        search (`str`, *optional*):
            Part of the repository's name.
        limit (`int`, *optional*, defaults to `20`):
            Most of them.
        token (`bool` or `str`, *optional*):
            Token to use; by default the stored one.

    Returns:
        [`~sparrow_trl.tables.Table`]: one row per repository.

    Raises:
        ValueError: when the Hub refuses.
        ConnectionError: when it cannot be reached.
    """
    from huggingface_hub import HfApi

    filters = [SCHEDULE_TAG] if base_model is None else [SCHEDULE_TAG, f"base_model:{base_model}"]
    with hub_errors("the list of schedules"):
        found = list(
            HfApi(token=token).list_models(filter=filters, author=author, search=search, limit=limit, sort="downloads")
        )
    table = Table("Schedules on the Hub", ["repository", "base model", "downloads", "updated"])
    for info in found:
        updated = "" if info.last_modified is None else f"{info.last_modified:%Y-%m-%d}"
        table.rows.append([info.id, _base_model(info.tags or ()), f"{info.downloads or 0:,}", updated])
    return table


def _schedule_data(schedule: SparsityScheduleConfig) -> bytes:
    return dump_json_object(without_local_model(schedule).to_dict(), SCHEDULE_NAME)


def _table_without_local_model(path: Path) -> bytes | Path:
    values = read_json_object(path, TABLE_FILE.max_bytes)
    name = values.get("model_name")
    if name is None or is_hub_id(name):
        return path
    import json

    return json.dumps({**values, "model_name": None}, allow_nan=False).encode() + b"\n"


def _model_info(api: "HfApi", repo_id: str, revision: str | None, create: bool) -> "ModelInfo":
    """The repository at a revision, a branch which is made when missing."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return api.model_info(repo_id, revision=revision, files_metadata=True)
    except RevisionNotFoundError:
        if not create or revision is None:
            raise
        api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.model_info(repo_id, revision=revision, files_metadata=True)


def _existing_card(api: "HfApi", info: "ModelInfo", revision: str | None) -> str | None:
    """Text of the repository's card. One that is too large to be of ours is not read."""
    size = next((sibling.size for sibling in info.siblings or () if sibling.rfilename == CARD_NAME), None)
    if size is None:
        return None
    if size > CARD_FILE.max_bytes:
        return "too large"
    path = download_file(info.id, CARD_NAME, CARD_FILE.max_bytes, revision=info.sha, token=api.token)
    return path.read_text(encoding="utf-8", errors="replace")


def _metadata(text: str) -> dict:
    import yaml
    from huggingface_hub import ModelCard

    try:
        return ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, yaml.YAMLError):  # metadata of someone else's that is none
        return {}


def _card_tags(text: str) -> list[str]:
    return _list(_metadata(text).get("tags"))


def _license(text: str | None) -> str | None:
    """What a card says, such as the one that the Hub makes when a license is chosen for a new repository."""
    license = None if text is None else _metadata(text).get("license")
    return license if isinstance(license, str) else None


def _base_model(tags: Iterable[str]) -> str:
    models = (tag.removeprefix("base_model:") for tag in tags if tag.startswith("base_model:"))
    return next((model for model in models if ":" not in model), "")


def _list(value) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def _check_schedule(path: Path, source: str) -> None:
    try:
        SparsityScheduleConfig.from_dict(read_json_object(path))
    except ValueError as error:
        raise ValueError(f"{source} is no valid schedule: {error}") from error


def _write(fetched: dict[PublishedFile, Path], folder: Path, overwrite: bool) -> list[Path]:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; a folder is needed to write to.")
    targets = {folder / file.path: source for file, source in fetched.items()}
    for target, source in targets.items():
        if target.exists() and not overwrite and not _same(target, source):
            raise ValueError(f"{target} exists with other contents. Give another folder, or allow to overwrite.")
    for target, source in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            shutil.copyfile(source, temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    return list(targets)


def _same(first: Path, second: Path) -> bool:
    import filecmp

    return first.is_file() and filecmp.cmp(first, second, shallow=False)
