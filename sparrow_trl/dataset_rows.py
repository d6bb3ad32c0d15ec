"""Rows of datasets that the commands take: files, folders and Hub ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset


def read_dataset(name: str, split: str, config: str | None = None, *, kind: str) -> "Dataset":
    """
    Read a dataset.

    Args:
        name (`str`):
            JSON Lines file, folder of [`~datasets.Dataset.save_to_disk`], or what [`~datasets.load_dataset`] takes.
        split (`str`):
            Split of a dataset that is no file.
        config (`str`, *optional*):
            Configuration of a dataset that is neither a file nor such a folder.
        kind (`str`):
            What it should be, for the message.

    Raises:
        ValueError: when it cannot be read, or has no such split.
    """
    from datasets import load_dataset, load_from_disk

    source = Path(name)
    try:
        if source.is_file():
            dataset = load_dataset("json", data_files=str(source), split="train")
        elif (source / "dataset_info.json").exists() or (source / "dataset_dict.json").exists():
            dataset = load_from_disk(str(source))
        else:
            dataset = load_dataset(name, config, split=split)
    except Exception as error:  # of many kinds, most of which do not name the file
        raise ValueError(f"{name} could not be read as {kind}: {error or type(error).__name__}") from error
    if isinstance(dataset, dict):
        if split not in dataset:
            raise ValueError(f"{name} has no split {split!r}; its splits are {', '.join(dataset)}.")
        dataset = dataset[split]
    return dataset


def choose_column(dataset: "Dataset", name: str, columns: Sequence[str], hint: str = "") -> str:
    """
    The first of some columns that a dataset has.

    Args:
        dataset ([`~datasets.Dataset`]): The dataset.
        name (`str`): Its name, for the message.
        columns (`Sequence[str]`): Names, the preferred one first.
        hint (`str`, *optional*): What to do without them.

    Raises:
        ValueError: when it has none of them.
    """
    column = next((column for column in columns if column in dataset.column_names), None)
    if column is None:
        raise ValueError(
            f"{name} has no column {' or '.join(columns)}; its columns are {', '.join(dataset.column_names)}."
            + (hint and f" {hint}")
        )
    return column
