"""
The sparsity schedule: how many KV pages a sparse layer reads at each cached length, and its file format.

A schedule is stored as `sparsity_schedule.json`, an object with the fields of [`SparsityScheduleConfig`].
"""

import dataclasses
import difflib
import json
import numbers
import operator
import os
import re
import reprlib
import warnings
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .json_files import MAX_JSON_BYTES, dump_json_object, parse_json_object, read_json_object, write_atomically


if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes


SCHEDULE_NAME = "sparsity_schedule.json"

PAGE_SCORES = ("mean_query", "group_softmax")
LANDMARKS_PER_PAGE = (1, 2, 4)
LANDMARK_DTYPES = ("auto", "fp8_e4m3")

MAX_PAGE_SIZE = 4096
# More pages than any context has, and small enough for sums of page counts to stay within int32.
MAX_PAGES = 2**20
MAX_LENGTH = 2**27
MAX_TABLE_BINS = 16_384
MAX_LAYERS = 10_000
MAX_RECORD_DEPTH = 64

_NESTED = (dict, list)


@dataclass(frozen=True, kw_only=True)
class SparsityScheduleConfig:
    """
    Number of KV pages that sparse decoding keeps, as a function of the cached length (sparsity scheduling, section 3.2
    of the [Sparrow paper](https://huggingface.co/papers/2606.08446)), with the page-selection recipe it was made for.

    A query with `L` cached tokens (its own included) covers `P = ceil(L / page_size)` pages and falls in bin
    `P // (bin_tokens // page_size)`. A sparse layer keeps the first `sink_pages`, the last `recent_pages` and the
    `top_k_pages[bin]` best-scored pages in between; the last entry extends to every longer context.

    A schedule is validated when it is built and cannot be changed afterwards; [`dataclasses.replace`] makes a changed
    copy.

    Args:
        top_k_pages (`list[int]`):
            Pages kept by score in each bin of cached length, on top of the reserved ones.
        page_size (`int`, *optional*, defaults to `16`):
            Tokens in a page: a power of two, at least 16.
        page_score (`str`, *optional*, defaults to `"mean_query"`):
            How a page is scored. `"mean_query"` (the paper's) is the dot product of the page's mean key with the mean
            query of the group; `"group_softmax"` sums over the group each query head's softmax over the candidate
            pages.
        landmarks_per_page (`int`, *optional*, defaults to `1`):
            Mean keys held per page: 1 (the paper), 2 or 4. `"mean_query"` allows only 1.
        bin_tokens (`int`, *optional*, defaults to `2000`):
            Tokens in a bin of cached length, a multiple of `page_size`. The default is the paper's and suits pages of
            16; 2048 suits every page size up to 2048.
        sink_pages (`int`, *optional*, defaults to `1`):
            Pages at the start of the context that are always kept.
        recent_pages (`int`, *optional*, defaults to `2`):
            Pages at the end of the context that are always kept, the partial one included. At least 1, since a query
            attends to its own page.
        dense_layers (`list[int]` or `str`, *optional*, defaults to `[0, 1]`):
            Layers that attend to every page, or `"all"` for a dense rollout.
        layer_top_k_pages (`dict[str, list[int]]`, *optional*):
            Layers with a table of their own: maps a layer (`"3"`) or an inclusive range of layers (`"9-11"`) to a
            table like `top_k_pages`.
        landmark_dtype (`str`, *optional*, defaults to `"auto"`):
            Storage type of the landmarks: `"auto"` (the KV cache's) or `"fp8_e4m3"`.
        tail_quantile (`float`, *optional*, defaults to `0.05`):
            Quantile of the acceptance rate that is the tail acceptance, in (0, 1).
        target_acceptance (`float`, *optional*):
            Tail acceptance that the schedule is meant to hold in every bin, in (0, 1].
        base_model_name_or_path (`str`, *optional*):
            Model that the schedule was calibrated for.
        calibration (`dict`, *optional*):
            Free record of where the numbers come from (data, token counts, acceptance table, versions). Anything that
            JSON can hold.

    Raises:
        ValueError: when a field is invalid; the message names the field and the value.

    Example:

    ```python
    >>> from sparrow_trl import SparsityScheduleConfig

    >>> schedule = SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86")
    >>> schedule.budget(10_000)
    2560
    >>> SparsityScheduleConfig.fixed(1024).top_k_pages
    [61]
    ```
    """

    top_k_pages: list[int]
    page_size: int = 16
    page_score: Literal["mean_query", "group_softmax"] = "mean_query"
    landmarks_per_page: Literal[1, 2, 4] = 1
    bin_tokens: int = 2000
    sink_pages: int = 1
    recent_pages: int = 2
    dense_layers: list[int] | Literal["all"] = dataclasses.field(default_factory=lambda: [0, 1])
    layer_top_k_pages: dict[str, list[int]] | None = None
    landmark_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    tail_quantile: float = 0.05
    target_acceptance: float | None = None
    base_model_name_or_path: str | None = None
    calibration: dict[str, Any] | None = None

    def __post_init__(self):
        def put(field, value):
            object.__setattr__(self, field, value)

        for field, low, high in (
            ("page_size", 16, MAX_PAGE_SIZE),
            ("landmarks_per_page", 1, max(LANDMARKS_PER_PAGE)),
            ("bin_tokens", 1, MAX_LENGTH),
            ("sink_pages", 0, MAX_PAGES),
            ("recent_pages", 1, MAX_PAGES),
        ):
            put(field, _integer(field, getattr(self, field), low, high))
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"`page_size` must be a power of two, got {self.page_size}.")
        if self.bin_tokens % self.page_size:
            raise ValueError(
                f"`bin_tokens` must be a multiple of `page_size` ({self.page_size}), got {self.bin_tokens}. "
                "2000 suits pages of 16 tokens; 2048 suits every page size up to 2048."
            )

        for field, choices in (
            ("page_score", PAGE_SCORES),
            ("landmarks_per_page", LANDMARKS_PER_PAGE),
            ("landmark_dtype", LANDMARK_DTYPES),
        ):
            if getattr(self, field) not in choices:
                raise ValueError(f"`{field}` must be one of {choices}, got {_short(getattr(self, field))}.")
        if self.page_score == "mean_query" and self.landmarks_per_page != 1:
            raise ValueError(
                f'`landmarks_per_page` must be 1 with `page_score="mean_query"`, got {self.landmarks_per_page}. Use '
                '`page_score="group_softmax"` for several landmarks a page.'
            )

        put("top_k_pages", _table("top_k_pages", self.top_k_pages))
        if not isinstance(self.dense_layers, str):
            layers = _integers("dense_layers", self.dense_layers, 0, MAX_LAYERS - 1, MAX_LAYERS)
            put("dense_layers", sorted(set(layers)))
        elif self.dense_layers != "all":
            raise ValueError(f'`dense_layers` must be a list of layers or "all", got {_short(self.dense_layers)}.')
        if self.layer_top_k_pages is not None:
            put("layer_top_k_pages", self._checked_layer_tables())

        if not (_is_number(self.tail_quantile) and 0 < self.tail_quantile < 1):
            raise ValueError(f"`tail_quantile` must be a number in (0, 1), got {_short(self.tail_quantile)}.")
        put("tail_quantile", float(self.tail_quantile))
        if self.target_acceptance is not None:
            if not (_is_number(self.target_acceptance) and 0 < self.target_acceptance <= 1):
                raise ValueError(
                    f"`target_acceptance` must be a number in (0, 1], got {_short(self.target_acceptance)}."
                )
            put("target_acceptance", float(self.target_acceptance))

        name = self.base_model_name_or_path
        if name is not None and not (isinstance(name, str) and name):
            raise ValueError(f"`base_model_name_or_path` must be a non-empty string or None, got {_short(name)}.")
        if self.calibration is not None:
            put("calibration", _json_record("calibration", self.calibration))
        # What cannot be saved is refused here rather than at a training run's first checkpoint.
        dump_json_object(self.to_dict(), SCHEDULE_NAME)

    def _checked_layer_tables(self) -> dict[str, list[int]]:
        field = "layer_top_k_pages"
        if not isinstance(self.layer_top_k_pages, dict):
            raise ValueError(f"`{field}` must be a dict or None, got {_short(self.layer_top_k_pages)}.")
        tables = [(_layer_range(key), str(key), table) for key, table in self.layer_top_k_pages.items()]
        tables.sort(key=lambda entry: entry[0].start)
        for (first, first_key, _), (second, second_key, _) in zip(tables, tables[1:], strict=False):
            if second.start < first.stop:
                raise ValueError(f"`{field}` gives some layers two tables: {first_key!r} and {second_key!r} overlap.")
        for layers, key, _ in tables:
            if self.is_dense or any(layer in layers for layer in self.dense_layers):
                raise ValueError(
                    f"`{field}` has a table for {key!r}, some of which `dense_layers` ({_short(self.dense_layers)}) "
                    "makes dense. Remove them from one of the two."
                )
        return {key: _table(f"{field}[{key!r}]", table) for _, key, table in tables}

    # Making one

    @classmethod
    def from_preset(cls, name: str) -> "SparsityScheduleConfig":
        """
        One of the schedules published with the paper; `preset_names()` lists them.

        Args:
            name (`str`):
                Model and target tail acceptance, such as `"qwen3-1.7b-0.86"`.

        Raises:
            ValueError: when there is no such preset; the message lists those there are.
        """
        known = preset_names()
        if name not in known:
            raise ValueError(f"There is no sparsity schedule preset {_short(name)}. {_known_presets(name)}.")
        return cls.from_dict(parse_json_object((_presets() / f"{name}.json").read_bytes(), f"preset {name}"))

    @classmethod
    def fixed(cls, budget_tokens: int, **fields) -> "SparsityScheduleConfig":
        """
        The same budget at every length.

        Args:
            budget_tokens (`int`):
                Tokens that a sparse layer reads, the reserved pages included: a multiple of the page size that covers
                at least the reserved pages.
            **fields:
                Further fields of the schedule.
        """
        empty = cls(top_k_pages=[0], **fields)
        reserved = empty.sink_pages + empty.recent_pages
        budget_tokens = _integer("budget_tokens", budget_tokens, 0, MAX_LENGTH)
        if budget_tokens % empty.page_size or budget_tokens < reserved * empty.page_size:
            raise ValueError(
                f"`budget_tokens` must be a multiple of `page_size` ({empty.page_size}) and cover the {reserved} "
                f"reserved pages ({reserved * empty.page_size} tokens), got {budget_tokens}."
            )
        return dataclasses.replace(empty, top_k_pages=[budget_tokens // empty.page_size - reserved])

    @classmethod
    def dense(cls, **fields) -> "SparsityScheduleConfig":
        """Every layer reads every page, as in a dense rollout. `fields` are further fields of the schedule."""
        # The table keeps every page as well, so that making some layers sparse again drops nothing by accident.
        return cls(**{"top_k_pages": [MAX_PAGES], "dense_layers": "all", **fields})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SparsityScheduleConfig":
        """
        Build a schedule from a dict of its fields.

        Args:
            values (`dict`):
                Fields of the schedule, by name.

        Raises:
            ValueError: when a key is unknown or missing, or a field is invalid.
        """
        if not isinstance(values, dict):
            raise ValueError(f"A sparsity schedule is made from a dict of its fields, got {_short(values)}.")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ValueError(f"Unknown field of a sparsity schedule: {_short(unknown)}. The fields are {known}.")
        if "top_k_pages" not in values:
            raise ValueError(
                "A sparsity schedule needs the field `top_k_pages`, the pages kept per bin of cached length."
            )
        return cls(**values)

    @classmethod
    def from_pretrained(cls, path_or_repo_id: str | os.PathLike, **hub_kwargs) -> "SparsityScheduleConfig":
        """
        Load a schedule from disk or from the Hugging Face Hub.

        Args:
            path_or_repo_id (`str` or `os.PathLike`):
                A folder that holds `sparsity_schedule.json`, a schedule file, or the id of a Hub model repository.
                What exists locally comes first.
            **hub_kwargs:
                Passed to [`~huggingface_hub.hf_hub_download`]: `revision`, `token`, `subfolder`, `cache_dir`,
                `local_files_only`, ...

        Raises:
            ValueError: when nothing is found (the message says what was tried) or the file is invalid.
        """
        return cls._load(path_or_repo_id, hub_kwargs, tried=[])

    @classmethod
    def resolve(cls, value: "SparsityScheduleConfig | str | os.PathLike", **hub_kwargs) -> "SparsityScheduleConfig":
        """
        The schedule that `value` stands for.

        Args:
            value ([`SparsityScheduleConfig`], `str` or `os.PathLike`):
                A schedule, the name of a preset, a local file or folder, or a Hub repository id, tried in this order.
            **hub_kwargs:
                As in [`from_pretrained`].

        Raises:
            ValueError: when `value` is none of these; the message says what was tried.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value in preset_names():
            return cls.from_preset(value)
        return cls._load(value, hub_kwargs, tried=[f"no preset has this name ({_known_presets(value)})"])

    @classmethod
    def _load(
        cls, source: str | os.PathLike, hub_kwargs: dict[str, Any], tried: list[str]
    ) -> "SparsityScheduleConfig":
        if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
            raise ValueError(
                "A sparsity schedule is given as a `SparsityScheduleConfig`, a preset name, a local path or a Hub "
                f"repository id, got {_short(source)}."
            )
        try:
            path = Path(source).expanduser()
            is_folder, is_file = path.is_dir(), path.is_file()
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{_short(source)} cannot be a path or a Hub repository id: {reason}") from error
        if is_folder:
            path = path / SCHEDULE_NAME
            if not path.is_file():
                raise ValueError(
                    f"The folder {os.fspath(source)!r} holds no {SCHEDULE_NAME}. If a repository of the Hub is meant, "
                    "start from another folder, or `sparrow-trl pull` it: what exists locally comes first."
                )
        elif not is_file:
            path = cls._download(os.fspath(source), hub_kwargs, [*tried, "there is no such local file or folder"])
        try:
            return cls.from_dict(read_json_object(path))
        except ValueError as error:
            raise ValueError(f"The sparsity schedule {str(path)!r} is invalid: {error}") from error

    @classmethod
    def _download(cls, repo_id: str, hub_kwargs: dict[str, Any], tried: list[str]) -> Path:
        try:
            # A name without an owner is most likely a misspelt preset or path: asking the Hub would only take time.
            if "/" not in repo_id:
                raise ValueError("no Hub repository has it, since those are named user/name")
            from .hub_files import download_file

            return download_file(repo_id, SCHEDULE_NAME, MAX_JSON_BYTES, **hub_kwargs)
        except ValueError as error:
            tried.append(str(error).removesuffix("."))
            raise ValueError(f"Found no sparsity schedule {_short(repo_id)}: {'; '.join(tried)}.") from error

    # Keeping it

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict that [`from_dict`] and JSON accept."""
        return dataclasses.asdict(self)

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """
        Write `sparsity_schedule.json` into a folder, which is created when missing. The file appears complete or not
        at all.

        Args:
            save_directory (`str` or `os.PathLike`):
                Folder to write to.
        """
        data = dump_json_object(self.to_dict(), SCHEDULE_NAME)
        folder = Path(save_directory)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"`save_directory` must be a folder, {str(folder)!r} is a file.")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / SCHEDULE_NAME, data)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload sparsity schedule",
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        license: str | None = None,
    ) -> str:
        """
        Publish the schedule in a model repository of the Hugging Face Hub, which is created when missing:
        `sparsity_schedule.json` and a card, in one commit. A card that is not of this package is kept. A local path
        as `base_model_name_or_path` is left out.

        Args:
            repo_id (`str`):
                Repository to push to.
            commit_message (`str`, *optional*, defaults to `"Upload sparsity schedule"`):
                Message of the commit.
            private (`bool`, *optional*):
                Whether a new repository is private. By default the organization's setting decides. `True` refuses to
                push to a public repository that exists.
            token (`bool` or `str`, *optional*):
                Token to use; by default the stored one.
            revision (`str`, *optional*):
                Branch to push to, which is created when missing.
            create_pr (`bool`, *optional*, defaults to `False`):
                Whether to open a pull request instead of committing.
            license (`str`, *optional*):
                License for the card, such as `"apache-2.0"`.

        Returns:
            `str`: The URL of the commit, or of the pull request.

        Raises:
            ValueError: when the Hub refuses; the message says why.
            ConnectionError: when it cannot be reached or the connection breaks. The repository's files are as they
                were then.
        """
        from .hub import push_schedule

        return push_schedule(
            self,
            repo_id,
            commit_message=commit_message,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            license=license,
        ).url

    # Reading it

    @property
    def recipe(self) -> dict[str, Any]:
        """How pages are scored and reserved: the keyword arguments that the functions of `sparrow_attention` share."""
        names = ("page_size", "page_score", "landmarks_per_page", "sink_pages", "recent_pages")
        return {name: getattr(self, name) for name in names}

    def storage_dtype(self, cache_dtype: "torch.dtype") -> "torch.dtype":
        """Type that landmarks are stored in beside a cache of `cache_dtype` (`torch.dtype`)."""
        import torch

        return torch.float8_e4m3fn if self.landmark_dtype == "fp8_e4m3" else cache_dtype

    @property
    def is_dense(self) -> bool:
        """Whether every layer is dense."""
        return self.dense_layers == "all"

    def is_dense_layer(self, layer: int) -> bool:
        """Whether `layer` (`int`, counted from 0) attends to every page."""
        layer = _integer("layer", layer, 0, MAX_LAYERS - 1)
        return self.is_dense or layer in self.dense_layers

    def bin_index(self, length: "int | torch.Tensor") -> "int | torch.Tensor":
        """
        Bin of cached length that a query falls in. Bins go on past the end of the table.

        Args:
            length (`int` or `torch.Tensor`):
                Cached tokens, the query's own included; an integer tensor gives a tensor of bins.
        """
        if not hasattr(length, "dtype"):
            length = _integer("length", length, 0, MAX_LENGTH)
        return self._num_pages(length) // self._pages_per_bin

    def bin_lengths(self, bin_index: int) -> tuple[int, int]:
        """
        First and last cached length of a bin. Lengths are rounded up to whole pages, so a bin begins and ends within
        the page before a multiple of `bin_tokens`.

        Args:
            bin_index (`int`):
                Bin, as from [`bin_index`].

        Returns:
            `tuple[int, int]`: the last is below the first where there are no lengths, in the first bin of one page.
        """
        start = bin_index * self.bin_tokens
        return max(1, start - self.page_size + 1), start + self.bin_tokens - self.page_size

    def top_k(self, length: int, layer: int | None = None) -> int:
        """
        Pages kept by score, on top of the reserved ones.

        Args:
            length (`int`):
                Cached tokens, the query's own included.
            layer (`int`, *optional*):
                Layer; by default any sparse layer without a table of its own. A dense layer keeps all
                `ceil(length / page_size)` pages.
        """
        bin_index = self.bin_index(length)
        table = self._layer_table(layer)
        return self._num_pages(length) if table is None else table[min(bin_index, len(table) - 1)]

    def budget(self, length: int, layer: int | None = None) -> int:
        """
        Tokens that a query may read, reserved pages included. A context shorter than its budget is read whole; on a
        dense layer the budget is `length` itself.

        Args:
            length (`int`):
                Cached tokens, the query's own included.
            layer (`int`, *optional*):
                As in [`top_k`].
        """
        top_k = self.top_k(length, layer)
        if self._layer_table(layer) is None:
            return length
        return (self.sink_pages + top_k + self.recent_pages) * self.page_size

    def to_table(
        self, max_length: int, layer: int | None = None, device: "torch.device | str | None" = None
    ) -> "torch.Tensor":
        """
        [`top_k`] by number of pages, for kernels.

        Args:
            max_length (`int`):
                Largest cached length that the table covers.
            layer (`int`, *optional*):
                As in [`top_k`].
            device (`torch.device` or `str`, *optional*):
                Where to put the table.

        Returns:
            `torch.Tensor`: int32 `[ceil(max_length / page_size) + 1]`, indexed by the number of pages.
        """
        import torch

        max_length = _integer("max_length", max_length, 0, MAX_LENGTH)
        pages = torch.arange(self._num_pages(max_length) + 1, dtype=torch.int32, device=device)
        table = self._layer_table(layer)
        if table is None:
            return pages
        bins = (pages // self._pages_per_bin).clamp(max=len(table) - 1)
        return torch.tensor(table, dtype=torch.int32, device=device)[bins]

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """
        Draw the budget over the cached length, reserved pages included.

        Args:
            ax (`matplotlib.axes.Axes`, *optional*):
                Where to draw; a new figure by default.

        Returns:
            `matplotlib.axes.Axes`
        """
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots(figsize=(6, 4), layout="constrained")[1]
        tables = {f"layers {key}": table for key, table in (self.layer_top_k_pages or {}).items()}
        if not self.is_dense:
            tables["other layers" if tables else "sparse layers"] = self.top_k_pages
        end = max((len(table) for table in tables.values()), default=16) * self.bin_tokens
        top = end if self.is_dense else 0
        for label, table in tables.items():
            edges = [index * self.bin_tokens for index in range(len(table))] + [end]
            pages = [self.sink_pages + top_k + self.recent_pages for top_k in [*table, table[-1]]]
            budgets = [count * self.page_size for count in pages]
            ax.step(edges, budgets, where="post", label=label)
            top = max(top, *budgets)
        ax.plot([0, end], [0, end], color="0.6", linestyle="--", linewidth=1, label="dense")
        ax.set_xlim(0, end)
        ax.set_ylim(0, 1.1 * top)
        ax.set_xlabel("cached length (tokens)")
        ax.set_ylabel("budget (tokens)")
        ax.set_title("Sparsity schedule")
        ax.legend()
        return ax

    @property
    def _pages_per_bin(self) -> int:
        return self.bin_tokens // self.page_size

    def _num_pages(self, length):
        return -(-length // self.page_size)

    def _layer_table(self, layer: int | None) -> list[int] | None:
        """The table of `layer`, or `None` when it is dense."""
        if self.is_dense if layer is None else self.is_dense_layer(layer):
            return None
        if layer is not None:
            for key, table in (self.layer_top_k_pages or {}).items():
                if layer in _layer_range(key):
                    return table
        return self.top_k_pages


def preset_names() -> list[str]:
    """Names that [`SparsityScheduleConfig.from_preset`] knows."""
    return sorted(path.name.removesuffix(".json") for path in _presets().iterdir() if path.name.endswith(".json"))


def _presets():
    return resources.files(__package__) / "presets"


def _known_presets(name: Any) -> str:
    known = preset_names()
    close = difflib.get_close_matches(name.lower(), known, n=3) if isinstance(name, str) and len(name) < 100 else []
    hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}The presets are {', '.join(known)}"


def _short(value: Any) -> str:
    """`repr` of bounded length: a hostile value must not flood the message."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 200
    return shortener.repr(value)


def _integer(field: str, value: Any, low: int, high: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        value = operator.index(value)
    except TypeError:
        raise ValueError(f"`{field}` must be an integer, got {_short(value)}.") from None
    if not low <= value <= high:
        raise ValueError(f"`{field}` must be between {low} and {high}, got {_short(value)}.")
    return value


def _integers(field: str, values: Any, low: int, high: int, max_items: int) -> list[int]:
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"`{field}` must be a list of integers, got {_short(values)}.")
    if len(values) > max_items:
        raise ValueError(f"`{field}` must have at most {max_items} entries, got {len(values)}.")
    return [_integer(f"{field}[{index}]", value, low, high) for index, value in enumerate(values)]


def _table(field: str, values: Any) -> list[int]:
    table = _integers(field, values, 0, MAX_PAGES, MAX_TABLE_BINS)
    if not table:
        raise ValueError(f"`{field}` must have at least one entry, got [].")
    if table != sorted(table):
        warnings.warn(
            f"`{field}` decreases along the cached length, got {_short(table)}: acceptance falls with length, so a "
            "longer context normally needs more pages.",
            stacklevel=4,
        )
    return table


def _layer_range(key: Any) -> range:
    match = re.fullmatch(r"(0|[1-9][0-9]{0,5})(?:-(0|[1-9][0-9]{0,5}))?", str(key))
    layers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if not layers or layers.stop > MAX_LAYERS:
        raise ValueError(
            f'A key of `layer_top_k_pages` must be a layer ("3") or an increasing range of layers ("9-11") below '
            f"{MAX_LAYERS}, got {_short(key)}."
        )
    return layers


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _json_record(field: str, value: Any) -> dict[str, Any]:
    """A copy of `value` as JSON keeps it, so that what is compared is what is saved."""
    if not isinstance(value, dict):
        raise ValueError(f"`{field}` must be a dict or None, got {_short(value)}.")
    try:
        record = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`{field}` must hold only what JSON can: {error}. Got {_short(value)}.") from error
    level = [record]
    for _ in range(MAX_RECORD_DEPTH):
        containers = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, _NESTED)]
        level = [child for container in containers for child in container]
    if level:
        raise ValueError(f"`{field}` may be nested {MAX_RECORD_DEPTH} levels deep, got more: {_short(value)}.")
    return record
