"""
Completions that the model writes under sparse attention, for the paper's way of calibrating (section 3.2): each budget
is measured on the tokens that it has generated itself.

One engine serves all schedules of a recipe, since a schedule can change while it runs. What it has generated is kept
in a folder, one JSON file per schedule: `settings` (what it was generated with), `top_k_pages` (the schedule's table),
and `sequences` (pairs of the prompt's length and the token ids). A schedule that is there already needs no engine.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .acceptance_sweep import TokenSequence, causal_lm_of, gather_objects, process_rank, weights_fingerprint
from .acceptance_table import RECIPE_FIELDS
from .kept_results import load_kept, save_kept
from .schedule import SparsityScheduleConfig
from .sequence_generation import (
    GPU_MEMORY_UTILIZATION,
    choose_generator,
    complete_on_engine,
    end_token_ids,
    join_sequences,
    start_engine,
    tokenize_prompts,
)


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A thousand sequences of 32K tokens.
MAX_ROLLOUTS_BYTES = 2**28


class SparseRollouts:
    """
    Samples completions of the same prompts under one schedule after the other, at temperature 1.

    The engine starts with the first schedule that has not been generated yet, and ends with the context. Each prompt
    has the same seed under every schedule, so that budgets differ by less than two draws from one distribution. With
    `torch.distributed` initialized, each process has an engine and completes a part of the prompts.

    Args:
        model (`torch.nn.Module`):
            Causal language model of transformers that vLLM has too, without adapters, bare or wrapped (DDP).
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts (`list[str]` or `list[list[dict[str, str]]]`):
            Texts, or conversations for the tokenizer's chat template.
        recipe ([`SparsityScheduleConfig`]):
            How pages are scored and reserved, and the dense layers. Its table of pages is not used.
        max_length (`int`):
            Most tokens of a sequence, prompt included.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling.
        folder (`str` or `pathlib.Path`, *optional*):
            Folder to keep the sequences in, and to read those from that an interrupted run has left; it is created
            when missing. By default they are kept in memory alone.
        model_path (`str` or `pathlib.Path`, *optional*):
            Folder or Hub id of the model, where its weights are those of `model`. By default the weights as they are
            now are written to a temporary folder.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.5`):
            Share of the GPU's memory for the engine, beside `model`.
        report (callable, *optional*):
            Called with a line of text when the engine starts.

    Raises:
        ValueError: for prompts as in [`~sparrow_trl.sequence_generation.generate_sequences`], and for a model that
            sparse rollouts do not support.
        ImportError: without a supported version of vLLM or TRL.

    Example:

    ```python
    >>> recipe = SparsityScheduleConfig(top_k_pages=[0], dense_layers=[])
    >>> with SparseRollouts(model, tokenizer, prompts, recipe, max_length=4096) as rollouts:
    ...     sequences = rollouts.generate(SparsityScheduleConfig(top_k_pages=[13, 29], dense_layers=[]))
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: "PreTrainedTokenizerBase",
        prompts: list[str] | list[list[dict[str, str]]],
        recipe: SparsityScheduleConfig,
        *,
        max_length: int,
        seed: int = 0,
        folder: str | Path | None = None,
        model_path: str | Path | None = None,
        vllm_gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
        report: Callable[[str], None] | None = None,
    ):
        choose_generator("vllm", model)
        from .rollout import check_layers, check_policy

        self.model = causal_lm_of(model)
        check_policy(self.model)
        check_layers(recipe, self.model.config.num_hidden_layers)
        self.recipe = recipe
        self.max_length = max_length
        self.prompt_ids = tokenize_prompts(self.model, tokenizer, prompts, max_length)
        self._seed = seed
        self._stop_token_ids = end_token_ids(self.model, tokenizer)
        self._model_path = model_path
        self._gpu_memory_utilization = vllm_gpu_memory_utilization
        self._report = report
        self._engine = None
        self._generated: dict[str, list[TokenSequence]] = {}
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            if not self.folder.parent.is_dir():
                raise ValueError(f"Rollouts are kept in {self.folder}, but {self.folder.parent} is no folder.")
            self.folder.mkdir(exist_ok=True)
        self._settings = {
            "weights": weights_fingerprint(self.model),
            "recipe": self._fields(recipe),
            "prompts": hashlib.sha256(json.dumps(self.prompt_ids).encode()).hexdigest(),
            "maximum length": max_length,
            "seed": seed,
        }

    def __enter__(self) -> "SparseRollouts":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. The next schedule that was not generated yet would start another."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @torch.no_grad()
    def generate(self, schedule: SparsityScheduleConfig) -> list[TokenSequence]:
        """
        Sequences that the model generates under a schedule, from the folder where they are there.

        Args:
            schedule ([`SparsityScheduleConfig`]):
                Schedule with the recipe's page structure and dense layers.

        Returns:
            `list[TokenSequence]`: in the order of the prompts, without completions that end with their first token.

        Raises:
            ValueError: for a schedule of another recipe, and when the folder holds rollouts of other prompts, weights
                or settings.
            RuntimeError: when the engine fails.
        """
        if self._fields(schedule) != self._settings["recipe"] or schedule.layer_top_k_pages is not None:
            raise ValueError("The schedule has another recipe than these rollouts.")
        table = list(schedule.top_k_pages)
        while len(table) > 1 and table[-2] == table[-1]:
            table.pop()  # the last bin extends to all longer contexts
        key = hashlib.sha256(json.dumps([schedule.bin_tokens, table]).encode()).hexdigest()[:16]
        if key not in self._generated:
            kept = self._load(key) if process_rank()[0] == 0 else None
            (kept, *_) = gather_objects(kept)
            if kept is None:
                kept = self._complete(replace(schedule, top_k_pages=table))
                if process_rank()[0] == 0:
                    self._save(key, table, kept)
            self._generated[key] = kept
        return self._generated[key]

    def _complete(self, schedule: SparsityScheduleConfig) -> list[TokenSequence]:
        if self._engine is None:
            if self._report is not None:
                self._report("Starting vLLM's engine, which completes the prompts under each schedule.")
            self._engine = start_engine(
                self.model,
                self._model_path,
                self.prompt_ids,
                self.max_length,
                self._gpu_memory_utilization,
                schedule,
            )
        reserved = schedule.sink_pages + schedule.recent_pages
        pages = sorted({reserved + count for count in schedule.top_k_pages})
        title = f"Generating with {' to '.join(str(count) for count in dict.fromkeys((pages[0], pages[-1])))} pages"
        completions = complete_on_engine(
            self._engine, self.prompt_ids, self.max_length, self._seed, self._stop_token_ids, title, schedule
        )
        return join_sequences(self.prompt_ids, completions)

    def _load(self, key: str) -> list[TokenSequence] | None:
        path = None if self.folder is None else self.folder / f"{key}.json"
        if path is None:
            return None
        names = ("top_k_pages", "sequences")
        kept = load_kept(path, self._settings, names, MAX_ROLLOUTS_BYTES, what="rollouts", work="calibration")
        if kept is None:
            return None
        return [TokenSequence(token_ids, prompt_length) for prompt_length, token_ids in kept["sequences"]]

    def _save(self, key: str, table: list[int], sequences: list[TokenSequence]) -> None:
        if self.folder is None:
            return
        rows = [[sequence.prompt_length, sequence.token_ids] for sequence in sequences]
        results = {"top_k_pages": table, "sequences": rows}
        save_kept(self.folder / f"{key}.json", self._settings, results, MAX_ROLLOUTS_BYTES)

    @staticmethod
    def _fields(schedule: SparsityScheduleConfig) -> dict[str, Any]:
        return {name: getattr(schedule, name) for name in RECIPE_FIELDS}
