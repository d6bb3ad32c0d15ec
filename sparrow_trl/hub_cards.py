"""Texts beside what is published: the card of a schedule, and what a model's card says about its rollouts."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .published_files import ADAPTER_FOLDER, PICTURES, TABLE_NAME
from .schedule import SCHEDULE_NAME, SparsityScheduleConfig
from .schedule_report import describe_recipe, schedule_tables
from .tables import Table


if TYPE_CHECKING:
    from huggingface_hub import ModelCard


# What `sparrow-trl find` looks for.
SCHEDULE_TAG = "sparrow-schedule"
SCHEDULE_CARD_TAGS = ["sparse-attention", "sparse-rollout", SCHEDULE_TAG, "trl"]
LIBRARY_NAME = "sparrow-trl"

# Without this line a card is somebody's own, and stays as it is.
GENERATED = (
    "<!-- Written by sparrow-trl, which replaces it at the next push. Remove this line to keep your changes. -->"
)

MAX_RECORD_ENTRIES = 20

# Of files, which may be on another machine.
DATA_SUFFIXES = (".arrow", ".csv", ".gz", ".json", ".jsonl", ".parquet", ".tsv", ".txt")

PAPER = {
    "title": "Sparrow: Sparse Rollout for Stable and Efficient Long-context RL of Large Language Models",
    "id": "2606.08446",
    # docstyle-ignore
    "citation": (
        "@article{zhou2026sparrow,\n"
        "    title  = {{Sparrow: Sparse Rollout for Stable and Efficient Long-context RL of Large Language "
        "Models}},\n"
        "    author = {Yang Zhou and Ranajoy Sadhukhan and Zhaofeng Sun and Zhuoming Chen and Souvik Kundu and "
        "Saket Dingliwal and Sai Muralidhar Jayanthi and Aram Galstyan and Haizhong Zheng and Beidi Chen},\n"
        "    year   = 2026,\n"
        "    eprint = {arXiv:2606.08446},\n"
        "}"
    ),
}


def is_hub_id(name: Any) -> bool:
    """
    Whether `name` can be the id of a repository: it has the form of one, and no local file or folder has this name,
    which would come first when it is loaded.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not isinstance(name, str) or not name:
        return False
    try:
        validate_repo_id(name)
        return not (Path(name).exists() or Path(name).suffix in DATA_SUFFIXES)
    except (HFValidationError, OSError, ValueError):
        return False


def without_local_model(schedule: SparsityScheduleConfig) -> SparsityScheduleConfig:
    """
    The `schedule` ([`SparsityScheduleConfig`]) without a path as its model's name, which says nothing to others and
    may say something about its user.
    """
    name = schedule.base_model_name_or_path
    return schedule if name is None or is_hub_id(name) else dataclasses.replace(schedule, base_model_name_or_path=None)


def is_generated(text: str) -> bool:
    """Whether the card `text` (`str`) is one that [`schedule_card`] made and nobody has claimed."""
    return GENERATED in text


def card_body(text: str) -> str:
    """The card `text` (`str`) without its metadata."""
    match = re.match(r"\s*---[ \t]*\n.*?\n---[ \t]*(\n|$)", text, flags=re.DOTALL)
    return text[match.end() :].strip() if match else text.strip()


def schedule_card(
    schedule: SparsityScheduleConfig,
    repo_id: str,
    *,
    base_model: str | None = None,
    files: Iterable[str] = (),
    datasets: Iterable[str] = (),
    license: str | None = None,
) -> "ModelCard":
    """
    The card of a repository with a schedule.

    Args:
        schedule ([`SparsityScheduleConfig`]):
            The schedule.
        repo_id (`str`):
            The repository.
        base_model (`str`, *optional*):
            Hub id of the model that the schedule is for.
        files (`Iterable[str]`, *optional*, defaults to `()`):
            Files beside the schedule, by their path in the repository.
        datasets (`Iterable[str]`, *optional*, defaults to `()`):
            Hub ids of the datasets that it was calibrated on.
        license (`str`, *optional*):
            License, as the Hub names it.

    Returns:
        [`~huggingface_hub.ModelCard`]
    """
    from huggingface_hub import ModelCard, ModelCardData

    files = set(files)
    named, schedule = schedule, without_local_model(schedule)
    data = ModelCardData(
        base_model=base_model,
        datasets=sorted(set(datasets)) or None,
        library_name=LIBRARY_NAME,
        license=license,
        tags=list(SCHEDULE_CARD_TAGS),
    )
    if base_model is not None:
        subject = _model_link(base_model)
    elif schedule.base_model_name_or_path is not None:
        subject = _plain(schedule.base_model_name_or_path)
    elif named.base_model_name_or_path is not None:
        subject = "a local model"
    else:
        subject = "no model in particular"
    title = f"Sparsity schedule for {base_model}" if base_model is not None else "Sparsity schedule"
    model = base_model or "path/to/the/model"
    sections = [
        GENERATED,
        f"# {title}",
        "How much of its context a rollout reads while it decodes with block-sparse attention, for reinforcement "
        f"learning with [TRL](https://github.com/huggingface/trl) and sparrow-trl, after {_paper_link()}. Made for "
        f"{subject}.",
        describe_recipe(schedule),
        *(table.to_markdown() for table in schedule_tables(schedule)),
        *_results(schedule),
        *_pictures(files),
        "## How to use",
        "```python\n"
        "from sparrow_trl import SparseRolloutGRPOTrainer\n\n"
        f'trainer = SparseRolloutGRPOTrainer(model="{model}", ..., schedule="{repo_id}")\n'
        "```",
        f"`sparrow-trl show {repo_id}` prints it, and `sparrow-trl pull {repo_id}` fetches all of its files.",
        *_adapter(files, model, repo_id),
        "## Citation",
        f"```bibtex\n{PAPER['citation']}\n```",
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


def add_rollouts(
    card: "ModelCard",
    schedule: SparsityScheduleConfig,
    *,
    repo_id: str | None = None,
    acceptance: Table | None = None,
    files: Iterable[str] = (),
) -> None:
    """
    Make the card of a trained model ([`~huggingface_hub.ModelCard`]) valid, and say in it how rollouts were made.

    Args:
        card ([`~huggingface_hub.ModelCard`]):
            The card that TRL made, which is changed.
        schedule ([`SparsityScheduleConfig`]):
            Schedule of the rollouts.
        repo_id (`str`, *optional*):
            The model's repository.
        acceptance ([`~sparrow_trl.tables.Table`], *optional*):
            Acceptance rates that were measured.
        files (`Iterable[str]`, *optional*, defaults to `()`):
            Files beside the model, by their path in the repository.
    """
    files = set(files)
    text = card.text
    base_model = card.data.base_model
    if not is_hub_id(base_model):
        # A path says nothing to others, and the Hub refuses it as `base_model`.
        card.data.base_model = None
        text = text.replace(f"[{base_model}](https://huggingface.co/{base_model})", "a local model", 1)
    # TRL's placeholder is no metadata that the Hub knows.
    if getattr(card.data, "licence", None) == "license":
        del card.data.licence
    text = text.replace('model="None"', 'model="path/to/this/model"')
    name = repo_id or "path/to/this/model"
    rollouts = (
        "vLLM generated the rollouts with block-sparse attention, and the policy was trained on them with dense "
        f"attention. The schedule at the end is in [`{SCHEDULE_NAME}`]({SCHEDULE_NAME})."
    )
    sections = [
        "### Rollouts",
        rollouts,
        describe_recipe(schedule),
        *(table.to_markdown() for table in schedule_tables(schedule)),
    ]
    if acceptance is not None:
        sections.append(
            "How much the sampler of the rollouts and the dense policy have in common, by cached length "
            f"({_paper_link()}):"
        )
        sections.append(acceptance.to_markdown())
    sections += _pictures(files)
    sections.append(
        "```python\n"
        "from sparrow_trl import SparsityScheduleConfig\n\n"
        f'schedule = SparsityScheduleConfig.from_pretrained("{name}")\n'
        "```"
    )
    sections += _adapter(files, name, name)
    before, heading, after = text.partition("### Framework versions")
    card.text = f"{before.rstrip()}\n\n" + "\n\n".join(sections) + (f"\n\n{heading}{after}" if heading else "\n")


def _paper_link() -> str:
    return f"[{PAPER['title']}](https://huggingface.co/papers/{PAPER['id']})"


def _model_link(model: str) -> str:
    return f"[{model}](https://huggingface.co/{model})"


def _results(schedule: SparsityScheduleConfig) -> list[str]:
    """What the record of the calibration says: tails by bin of cached length, and single figures."""
    record = schedule.calibration or {}
    parts = []
    tails = record.get("tails")
    if isinstance(tails, dict):
        rows = [
            (int(start), tail)
            for start, tail in tails.items()
            if re.fullmatch("[0-9]{1,9}", start) and isinstance(tail, (int, float)) and not isinstance(tail, bool)
        ]
        if rows:
            quantile = f"{100 * schedule.tail_quantile:g}"
            title = f"Tail acceptance (percentile {quantile}) under the schedule"
            target = "-" if schedule.target_acceptance is None else f"{schedule.target_acceptance:g}"
            table = Table(title, ["cached tokens", "tail acceptance", "target"])
            table.rows += [
                [f"{start:,} to {start + schedule.bin_tokens:,}", f"{tail:.4f}", target]
                for start, tail in sorted(rows)
            ]
            parts.append(table.to_markdown())
    single = [
        f"- {_plain(name)}: {_plain(f'{value:,}' if type(value) is int else value)}"
        for name, value in record.items()
        if isinstance(value, (str, int, float)) and value != ""
    ]
    if single:
        parts.append("\n".join(single[:MAX_RECORD_ENTRIES]))
    return ["## Results", *parts] if parts else []


def _pictures(files: set[str]) -> list[str]:
    return [f"![{picture.text}]({picture.path})" for picture in PICTURES if picture.path in files]


def _adapter(files: set[str], model: str, repo_id: str) -> list[str]:
    parts = []
    if any(path.startswith(f"{ADAPTER_FOLDER}/") for path in files):
        parts += [
            "### Adapter of the rollouts",
            f"[`{ADAPTER_FOLDER}/`]({ADAPTER_FOLDER}) is a LoRA that was trained with DistillSparse. It is meant for "
            "sparse attention alone and is no part of the model: dense generation goes without it. To train on with "
            "it:",
            "```python\n"
            "from huggingface_hub import snapshot_download\n"
            "from sparrow_trl import DistillSparseCallback, SparseRolloutGRPOTrainer\n\n"
            f'folder = snapshot_download("{repo_id}", allow_patterns="{ADAPTER_FOLDER}/*")\n'
            f'callback = DistillSparseCallback(adapter=f"{{folder}}/{ADAPTER_FOLDER}")\n'
            f'trainer = SparseRolloutGRPOTrainer(model="{model}", ..., callbacks=[callback])\n'
            "```",
        ]
    if TABLE_NAME in files:
        parts.append(f"What each budget was measured to keep is in [`{TABLE_NAME}`]({TABLE_NAME}).")
    return parts


def _plain(value: Any) -> str:
    """A value of a record, which may come from anywhere, as one line of Markdown without markup."""
    text = " ".join(str(value).split())
    text = text if len(text) <= 200 else f"{text[:197]}..."
    return re.sub(r"([\\`*_{}\[\]<>|#!~])", r"\\\1", text)
