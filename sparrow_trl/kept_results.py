"""Results that are kept in files beside the settings that they were made with, so that interrupted work goes on."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .json_files import dump_json_object, read_json_object, write_atomically


def load_kept(
    path: Path, settings: dict[str, Any], names: Iterable[str], max_bytes: int, *, what: str, work: str
) -> dict[str, Any] | None:
    """
    Read results, unless there are none.

    Args:
        path (`pathlib.Path`): Their file.
        settings (`dict`): What they must have been made with, by what to call it.
        names (`Iterable[str]`): Names of the results.
        max_bytes (`int`): Largest size of the file.
        what (`str`): What the results are, for the message.
        work (`str`): What they are of.

    Raises:
        ValueError: for a file with anything else, and for results with other settings.
    """
    if not path.exists():
        return None
    values = read_json_object(path, max_bytes)
    hint = "Use another folder, or remove this one to start over."
    if values.keys() != {"settings", *names} or not isinstance(values["settings"], dict):
        raise ValueError(f"{path} holds no {what}. {hint}")
    kept = values.pop("settings")
    differing = [name for name, value in settings.items() if kept.get(name) != value]
    if differing:
        raise ValueError(
            f"{path} holds {what} of another {work}: its {', '.join(differing)} differ from these. {hint}"
        )
    return values


def save_kept(path: Path, settings: dict[str, Any], results: dict[str, Any], max_bytes: int) -> None:
    """
    Write results.

    Args:
        path (`pathlib.Path`): Their file, which stays as it was until all is written.
        settings (`dict`): What they were made with.
        results (`dict`): The results by name.
        max_bytes (`int`): Largest size of the file.
    """
    write_atomically(path, dump_json_object({"settings": settings, **results}, path.name, max_bytes))
