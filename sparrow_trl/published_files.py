"""
Which files belong to a schedule on the Hub, and what each must be. Nothing else is pushed from a folder, and nothing
else is pulled: a name that is not listed here (a token, a log, an optimizer's state) stays where it is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .json_files import MAX_JSON_BYTES, read_json_object
from .schedule import SCHEDULE_NAME


CARD_NAME = "README.md"
TABLE_NAME = "acceptance_table.json"

# An adapter at the root would be taken for the model's own.
ADAPTER_FOLDER = "distill_sparse"
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# A safetensors file begins with the length of its JSON header, in 8 bytes.
MAX_TENSORS_HEADER = 100 * 2**20


@dataclass(frozen=True)
class PublishedFile:
    """
    A file that may lie in a repository with a schedule.

    Args:
        path (`str`): Path in the repository.
        kind (`str`): `"json"`, `"picture"`, `"tensors"` or `"card"`.
        max_bytes (`int`): Largest size.
        text (`str`, *optional*, defaults to `""`): What a picture shows.
    """

    path: str
    kind: Literal["json", "picture", "tensors", "card"]
    max_bytes: int
    text: str = ""

    @property
    def name(self) -> str:
        """`str`: The path without folders."""
        return self.path.rpartition("/")[2]

    def check(self, file: Path) -> None:
        """
        Refuse, with a `ValueError`, a `file` (`pathlib.Path`) that is too large or of another kind. No tensor is read.
        """
        size = file.stat().st_size
        self.check_size(size, str(file))
        if self.kind == "json":
            read_json_object(file, self.max_bytes)
        elif self.kind == "picture":
            with open(file, "rb") as opened:
                if opened.read(len(PNG_SIGNATURE)) != PNG_SIGNATURE:
                    raise ValueError(f"{file} is no PNG picture.")
        elif self.kind == "tensors":
            with open(file, "rb") as opened:
                length, start = int.from_bytes(opened.read(8), "little"), opened.read(1)
            if start != b"{" or not 2 <= length <= min(size - 8, MAX_TENSORS_HEADER):
                raise ValueError(f"{file} is no safetensors file.")
        else:
            try:
                file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: {error}") from error

    def check_size(self, size: int | None, source: str) -> None:
        """
        Refuse, with a `ValueError`, a `size` (`int` or `None`) in bytes above the limit, or one that is unknown, of
        what `source` (`str`) names.
        """
        if size is None:
            raise ValueError(f"The server does not say how large {source} is, so it is not read.")
        if size > self.max_bytes:
            raise ValueError(f"{source} has {size:,} bytes; the limit for {self.name} is {self.max_bytes:,}.")


SCHEDULE_FILE = PublishedFile(SCHEDULE_NAME, "json", MAX_JSON_BYTES)
CARD_FILE = PublishedFile(CARD_NAME, "card", 2**20)
TABLE_FILE = PublishedFile(TABLE_NAME, "json", 2**28)
PICTURES = tuple(
    PublishedFile(name, "picture", 16 * 2**20, text)
    for name, text in (
        ("tail_acceptance.png", "Tail acceptance of single budgets over the cached length"),
        ("schedule.png", "Budget over the cached length"),
        ("recipe_search.png", "What the found schedule reads and keeps, and what the paper's does"),
        ("acceptance.png", "Acceptance rates of the rollouts by cached length and over training"),
        ("distill_sparse.png", "Distillation of the adapter"),
    )
)
ADAPTER_FILES = (
    PublishedFile(f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG_NAME}", "json", 2**20),
    PublishedFile(f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS_NAME}", "tensors", 8 * 2**30),
)
ADAPTER_SCHEDULE_FILE = PublishedFile(f"{ADAPTER_FOLDER}/{SCHEDULE_NAME}", "json", MAX_JSON_BYTES)

PUBLISHED_FILES = (SCHEDULE_FILE, CARD_FILE, TABLE_FILE, *PICTURES, *ADAPTER_FILES, ADAPTER_SCHEDULE_FILE)
