"""
The acceptance rate of many page budgets (paper, section 3.2).

[`measure_acceptance`] does it teacher-forced: the dense model and, for each budget, the model under sparse attention
run over the same tokens. [`measure_rollout_acceptance`] does it the paper's way, on the tokens that each budget has
generated itself. Either collects the exact acceptance rate of every position in an
[`~sparrow_trl.acceptance_table.AcceptanceTable`].
"""

import hashlib
import inspect
import json
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .acceptance import acceptance_rate
from .acceptance_table import MAX_TABLE_BYTES, AcceptanceTable
from .attention import sparse_attention_context
from .json_files import read_json_object, write_atomically
from .schedule import SparsityScheduleConfig


if TYPE_CHECKING:
    from .rollout_adapter import RolloutAdapter


CHECKPOINT_VERSION = 1
# A checkpoint is written after each sequence, and between budgets when the last one is older: a table of a long sweep
# takes a second to write, one pass of a small model on a GPU less.
CHECKPOINT_SECONDS = 10
# Budgets that share the dense logits of a chunk: more hold more hidden states, and lose more work when interrupted.
BUDGETS_AT_ONCE = 4

# Values of each weight that tell one checkpoint of a model from another: a training step changes nearly all of them.
FINGERPRINT_VALUES = 64


@dataclass(frozen=True)
class TokenSequence:
    """
    A prompt and its completion as token ids.

    Args:
        token_ids (`list[int]`):
            Tokens of the prompt and, after them, of the completion.
        prompt_length (`int`):
            Number of prompt tokens.
    """

    token_ids: list[int]
    prompt_length: int

    @property
    def cached_lengths(self) -> torch.Tensor:
        """
        Cached tokens at each query that counts, its own included: from `prompt_length + 1` to `len(token_ids) - 1`.
        The query that samples token `t` (from 0) of the completion has `prompt_length + t` of them. `t = 0` belongs
        to the dense prefill, and the query after the last token samples nothing.
        """
        return torch.arange(self.prompt_length + 1, len(self.token_ids))


def measure_acceptance(
    model: nn.Module,
    sequences: list[TokenSequence],
    schedule_recipe: SparsityScheduleConfig,
    page_counts: list[int],
    bin_tokens: int = 2048,
    *,
    model_name: str | None = None,
    checkpoint_path: str | Path | None = None,
    chunk_size: int = 256,
) -> AcceptanceTable:
    """
    Measure the acceptance rate of page budgets on given sequences, teacher-forced.

    Each sequence takes one pass of the dense model and one per budget. The logits of both are made from their hidden
    states `chunk_size` positions at a time by the model's own forward pass, with whatever it does to logits.

    With `torch.distributed` initialized (`accelerate launch`), the sequences are split over the processes, all of
    which must pass the same arguments and get the same table.

    Args:
        model (`torch.nn.Module`):
            Causal language model of transformers, bare or wrapped (PEFT, DDP). It runs in evaluation mode.
        sequences (`list[TokenSequence]`):
            What to measure on, such as from [`~sparrow_trl.sequence_generation.generate_sequences`]; each completion
            has at least two tokens.
        schedule_recipe ([`SparsityScheduleConfig`]):
            How pages are scored and reserved, and the dense layers. Its table of pages is not used.
        page_counts (`list[int]`):
            Budgets in pages, the reserved ones included, in ascending order.
        bin_tokens (`int`, *optional*, defaults to `2048`):
            Tokens in a bin of cached length, a multiple of the page size.
        model_name (`str`, *optional*):
            Name of the model in the table; by default the model's `name_or_path`.
        checkpoint_path (`str` or `pathlib.Path`, *optional*):
            File to write the progress to, and to go on from when it exists. Further processes append `.rank1`, ... to
            its name. It stays when the measurement is done; measuring again then reads the table from it.
        chunk_size (`int`, *optional*, defaults to `256`):
            Positions whose logits are held at once, of the dense and of the sparse pass.

    Returns:
        [`~sparrow_trl.acceptance_table.AcceptanceTable`]

    Raises:
        ValueError: for invalid arguments, a model that sparse attention does not support, and a checkpoint of another
            measurement, before anything is measured; and when a pass gives logits that are not finite, with the
            position and the first module whose output is not.

    Example:

    ```python
    >>> sequences = generate_sequences(model, tokenizer, prompts, max_length=4096)
    >>> recipe = SparsityScheduleConfig(top_k_pages=[0], dense_layers=[])
    >>> table = measure_acceptance(model, sequences, recipe, [16, 32, 64, 128])
    >>> print(table.describe())
    ```
    """
    budgets = range(len(page_counts)) if isinstance(page_counts, (list, tuple)) else ()
    work = [_Work(f"`sequences[{index}]`", sequence, tuple(budgets)) for index, sequence in enumerate(sequences)]
    tokens = [[sequence.prompt_length, sequence.token_ids] for sequence in sequences]
    return _measure(
        model,
        work,
        tokens,
        schedule_recipe,
        page_counts,
        bin_tokens,
        method="teacher_forced",
        model_name=model_name,
        checkpoint_path=checkpoint_path,
        chunk_size=chunk_size,
    )


def measure_rollout_acceptance(
    model: nn.Module,
    rollouts: list[list[TokenSequence]],
    schedule_recipe: SparsityScheduleConfig,
    page_counts: list[int],
    bin_tokens: int = 2048,
    *,
    model_name: str | None = None,
    checkpoint_path: str | Path | None = None,
    chunk_size: int = 256,
) -> AcceptanceTable:
    """
    Measure the acceptance rate of page budgets, each on the sequences that it has generated (paper, section 3.2).

    Each sequence takes one pass of the dense model and one under its budget. The probabilities under sparse attention
    are those of the training side, which equal the engine's.

    Args:
        model (`torch.nn.Module`):
            As in [`measure_acceptance`].
        rollouts (`list[list[TokenSequence]]`):
            The sequences of each budget, such as from [`~sparrow_trl.rollout_sequences.SparseRollouts`].
        schedule_recipe ([`SparsityScheduleConfig`]):
            How pages were scored and reserved, and the dense layers. Its table of pages is not used.
        page_counts (`list[int]`):
            Budgets in pages, the reserved ones included, in ascending order.
        bin_tokens (`int`, *optional*, defaults to `2048`):
            Tokens in a bin of cached length, a multiple of the page size.
        model_name (`str`, *optional*):
            As in [`measure_acceptance`].
        checkpoint_path (`str` or `pathlib.Path`, *optional*):
            As in [`measure_acceptance`].
        chunk_size (`int`, *optional*, defaults to `256`):
            As in [`measure_acceptance`].

    Returns:
        [`~sparrow_trl.acceptance_table.AcceptanceTable`]: with the method `"rollout"`.

    Raises:
        ValueError: as in [`measure_acceptance`], and when the numbers of budgets differ.
    """
    if len(rollouts) != len(page_counts):
        raise ValueError(f"`rollouts` has {len(rollouts)} budgets, but `page_counts` has {len(page_counts)}.")
    work = [
        _Work(f"`rollouts[{budget}][{index}]`", sequence, (budget,))
        for budget, sequences in enumerate(rollouts)
        for index, sequence in enumerate(sequences)
    ]
    tokens = [[[sequence.prompt_length, sequence.token_ids] for sequence in sequences] for sequences in rollouts]
    return _measure(
        model,
        work,
        tokens,
        schedule_recipe,
        page_counts,
        bin_tokens,
        method="rollout",
        model_name=model_name,
        checkpoint_path=checkpoint_path,
        chunk_size=chunk_size,
    )


@dataclass(frozen=True)
class _Work:
    """A sequence, its name in messages, and the budgets (indices) to measure on it."""

    name: str
    sequence: TokenSequence
    budgets: tuple[int, ...]


def _measure(
    model: nn.Module,
    work: list[_Work],
    tokens: list,
    schedule_recipe: SparsityScheduleConfig,
    page_counts: list[int],
    bin_tokens: int,
    *,
    method: str,
    model_name: str | None,
    checkpoint_path: str | Path | None,
    chunk_size: int,
) -> AcceptanceTable:
    """As [`measure_acceptance`]; `tokens` tell one measurement from another."""
    passes = _Passes(model, chunk_size)
    check_sequences(passes.model, {item.name: item.sequence for item in work})
    sequences = [item.sequence for item in work]
    model_name = model_name or passes.model.name_or_path or None
    longest = max(len(sequence.token_ids) for sequence in sequences) - 1
    # The schedule checks the two before they are divided.
    bins = AcceptanceTable(schedule_recipe, page_counts, bin_tokens, 1).schedule(0)
    check_sparse_layers(passes.model, schedule_recipe)
    table = AcceptanceTable(
        schedule_recipe, page_counts, bin_tokens, bins.bin_index(longest) + 1, model_name=model_name, method=method
    )
    _warn_without_full_bin(sequences, bins)

    rank, num_processes = process_rank()
    # The longest first, so that processes finish together and a sequence that does not fit into memory shows at once.
    work = sorted(work, key=lambda item: -len(item.sequence.token_ids))[rank::num_processes]
    lengths = [len(item.sequence.token_ids) for item in work for _ in item.budgets]
    checkpoint = None
    completed = 0
    if checkpoint_path is not None:
        identity = _identity(passes.model, tokens, table, num_processes)
        checkpoint = _Checkpoint(Path(checkpoint_path), rank, identity)
        table, completed = checkpoint.load(table, len(lengths))
        # A disk or folder that cannot be written to shows now.
        checkpoint.save(table, completed)

    with passes.evaluating():
        if completed < len(lengths):
            # What sparse attention does not support shows on three tokens.
            first = TokenSequence(work[0].sequence.token_ids[:3], 1)
            for _ in passes.acceptance(first, [[table.schedule(work[0].budgets[0])]], work[0].name):
                pass
        with tqdm(
            total=sum(lengths),
            initial=sum(lengths[:completed]),
            desc="Measuring acceptance",
            unit="tok",
            unit_scale=True,
            # None: no bar where standard error is no terminal.
            disable=None if rank == 0 else True,
        ) as progress:
            skipped = completed
            for item in work:
                budgets = item.budgets[skipped:]
                skipped -= len(item.budgets) - len(budgets)
                if not budgets:
                    continue
                groups = [budgets[i : i + BUDGETS_AT_ONCE] for i in range(0, len(budgets), BUDGETS_AT_ONCE)]
                schedules = ([table.schedule(budget) for budget in group] for group in groups)
                rates = passes.acceptance(item.sequence, schedules, item.name)
                for group, rates_of_group in zip(groups, rates, strict=True):
                    for budget, alphas in zip(group, rates_of_group, strict=True):
                        table.update(budget, item.sequence.cached_lengths, alphas)
                    completed += len(group)
                    if checkpoint is not None and (
                        completed % len(page_counts) == 0 or completed == len(lengths) or checkpoint.is_due()
                    ):
                        checkpoint.save(table, completed)
                    progress.update(len(item.sequence.token_ids) * len(group))
    return _merged(table)


def sequence_acceptance(
    model: nn.Module,
    sequence: TokenSequence,
    schedules: Iterable[SparsityScheduleConfig],
    *,
    chunk_size: int = 256,
    temperature: float = 1.0,
    adapter: "RolloutAdapter | None" = None,
) -> Iterator[torch.Tensor]:
    """
    Exact acceptance rates of one sequence under each of several schedules, which need not keep the same budget at
    every length.

    Args:
        model (`torch.nn.Module`):
            As in [`measure_acceptance`], in evaluation mode.
        sequence ([`TokenSequence`]):
            What to measure on.
        schedules (`Iterable[SparsityScheduleConfig]`):
            Schedules, one pass of the model each. The next is asked for when its rates are.
        chunk_size (`int`, *optional*, defaults to `256`):
            As in [`measure_acceptance`].
        temperature (`float`, *optional*, defaults to `1.0`):
            What logits are divided by.
        adapter ([`~sparrow_trl.rollout_adapter.RolloutAdapter`], *optional*):
            Adapter that the sparse passes have.

    Returns:
        Iterator over `torch.Tensor` of shape `[len(sequence.cached_lengths)]`, float32 (float64 for a float64 model):
        the rates at the sequence's `cached_lengths`, one tensor per schedule.

    Raises:
        ValueError: as in [`measure_acceptance`].
    """
    passes = _Passes(model, chunk_size, temperature, adapter)
    if passes.model.training:
        raise ValueError("The model is in training mode, where dropout would act: call `model.eval()` first.")
    check_sequences(passes.model, {"`sequence`": sequence})
    rates = passes.acceptance(sequence, ([schedule] for schedule in schedules), "the sequence")
    return (rates_of_schedule for (rates_of_schedule,) in rates)


class _Passes:
    """The dense and sparse forward passes of a model, and its logits from hidden states."""

    def __init__(self, model: nn.Module, chunk_size: int, temperature: float = 1.0, adapter=None):
        if chunk_size < 1:
            raise ValueError(f"`chunk_size` must be positive, got {chunk_size}.")
        self.temperature = temperature
        self.adapter = adapter
        self.model = causal_lm_of(model)
        self.backbone = self.model.base_model
        self.chunk_size = chunk_size
        self._output_type = None

    def evaluating(self):
        return evaluating(self.model)

    @torch.no_grad()
    def acceptance(
        self, sequence: TokenSequence, groups: Iterable[list[SparsityScheduleConfig]], name: str
    ) -> Iterator[list[torch.Tensor]]:
        """
        Rates under each schedule of a group, group by group. Those of a group share the dense logits, a chunk at a
        time; the next group is asked for when its rates are.
        """
        # The last token is context of no query that counts.
        input_ids = torch.tensor([sequence.token_ids[:-1]], device=self.model.device)
        start = sequence.prompt_length
        dense, cache = self.dense_states(input_ids)
        report = partial(self._report, input_ids=input_ids, prompt_length=start, name=name)
        for schedules in groups:
            sparse = [self.sparse_states(input_ids, start, schedule, dense, cache) for schedule in schedules]
            rates = [[] for _ in schedules]
            for chunk in range(start, len(dense), self.chunk_size):
                positions = slice(chunk, chunk + self.chunk_size)
                dense_logits = self._finite_logits(dense[positions], chunk, None, report)
                for its_rates, states, schedule in zip(rates, sparse, schedules, strict=True):
                    sparse_logits = self._finite_logits(states[positions], chunk, schedule, report)
                    its_rates.append(acceptance_rate(dense_logits, sparse_logits))
            yield [torch.cat(its_rates) for its_rates in rates]

    def _finite_logits(self, states, offset, schedule, report):
        """Logits of hidden states, the first of which is at position `offset`; those not finite are reported."""
        logits = self.logits(states)
        # NaN is the largest and the smallest as well; looking at each logit takes ten times as long on a CPU.
        bad = ~(logits.amax(-1).isfinite() & logits.amin(-1).isfinite())
        if bad.any():
            report(logits, bad, offset, schedule)
        return logits

    def dense_states(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, DynamicCache | None]:
        """Last hidden states `[tokens, hidden]`, and the KV cache where sparse passes can go on from it."""
        cache = self._empty_cache(input_ids.device)
        return self._run(input_ids, cache), cache

    def sparse_states(
        self,
        input_ids: torch.Tensor,
        prompt_length: int,
        schedule: SparsityScheduleConfig,
        dense: torch.Tensor | None = None,
        dense_cache: DynamicCache | None = None,
    ) -> torch.Tensor:
        """
        Last hidden states `[tokens, hidden]` under sparse attention. With the cache of the dense pass, those of the
        tokens before the first that leaves a page out are taken from it (`dense`), since they are the same.
        """
        cached_tokens, cache = 0, None
        if dense_cache is not None:
            cached_tokens = self._first_sparse_token(schedule, prompt_length, input_ids.shape[1])
            if cached_tokens == input_ids.shape[1]:
                self.sparse_states(input_ids[:, :1], 1, schedule)  # refuses what sparse attention does not support
                return dense
            cache = self._empty_cache(input_ids.device)
            for index, layer in enumerate(dense_cache.layers):
                cache.update(layer.keys[:, :, :cached_tokens], layer.values[:, :, :cached_tokens], index)
        prompt_lengths = torch.tensor([prompt_length], device=input_ids.device)
        with ExitStack() as contexts:
            contexts.enter_context(
                sparse_attention_context(
                    self.model, schedule, prompt_lengths=prompt_lengths, cached_tokens=cached_tokens
                )
            )
            if self.adapter is not None:
                contexts.enter_context(self.adapter.active())
            states = self._run(input_ids[:, cached_tokens:], cache)
        return states if cache is None else torch.cat([dense[:cached_tokens], states])

    def _run(self, input_ids: torch.Tensor, cache: DynamicCache | None) -> torch.Tensor:
        arguments = {} if cache is None else {_cache_argument(self.backbone): cache}
        output = self.backbone(input_ids=input_ids, use_cache=cache is not None, **arguments)
        self._output_type = type(output)
        return output.last_hidden_state[0]

    def _empty_cache(self, device: torch.device) -> DynamicCache | None:
        """
        `None` where sparse passes run in full: with an adapter, whose keys are not the dense pass's; for bfloat16 and
        float16, in which one query rounds otherwise than many; with kernels, which see whole sequences; and for models
        whose caches drop tokens.
        """
        exact = self.model.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(device.type)
        if self.adapter is not None or device.type != "cpu" or not exact or _cache_argument(self.backbone) is None:
            return None
        cache = DynamicCache(config=self.model.config)
        return cache if all(type(layer) is DynamicLayer for layer in cache.layers) else None

    def _first_sparse_token(self, schedule: SparsityScheduleConfig, prompt_length: int, tokens: int) -> int:
        """First position that does not keep all its pages in some layer, `tokens` where there is none."""
        num_pages = torch.arange(tokens) // schedule.page_size + 1
        candidates = num_pages - schedule.sink_pages - schedule.recent_pages
        sparse = torch.zeros(tokens, dtype=torch.bool)
        for layer in range(self.model.config.get_text_config().num_hidden_layers):
            if not schedule.is_dense_layer(layer):
                table = schedule.to_table(tokens, layer=layer)
                sparse |= table[num_pages.clamp(max=len(table) - 1)] < candidates
        sparse[:prompt_length] = False
        return int(sparse.int().argmax()) if sparse.any() else tokens

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """
        Logits `[positions, vocab]` of hidden states `[positions, hidden]`: the model's forward pass with these in
        place of its backbone's, so that a bias, a scale or a cap on the logits is the model's own.
        """
        used = []

        def forward(*args, **kwargs):
            used.append(True)
            return self._output_type(last_hidden_state=states[None])

        with swapped_attribute(self.backbone, "forward", forward):
            logits = self.model(torch.zeros((1, len(states)), dtype=torch.long, device=states.device)).logits
        if not used or logits.shape[:2] != (1, len(states)):
            raise ValueError(
                f"{type(self.model).__name__} does not make logits from the hidden states of its backbone "
                f"({type(self.backbone).__name__}), so they cannot be made in chunks."
            )
        # As the engine and the trainer do: a quotient in bfloat16 would be rounded once more.
        return logits[0] if self.temperature == 1 else logits[0].float() / self.temperature

    def _report(self, logits, bad, offset, schedule, *, input_ids, prompt_length, name):
        """Raise with the first bad position, and the first module that gave something not finite in a second run."""
        row = int(bad.int().argmax())
        kind = "NaN" if logits[row].isnan().any() else "infinite"
        pages = "dense pass" if schedule is None else f"sparse pass with `top_k_pages` {schedule.top_k_pages}"
        message = f"The {pages} gives {kind} logits at position {offset + row} of {name}."
        with _first_not_finite(self.model, first_position=0, num_tokens=input_ids.shape[1]) as found:
            if schedule is None:
                states, _ = self.dense_states(input_ids)
            else:
                states = self.sparse_states(input_ids, prompt_length, schedule)
        if not found:
            with _first_not_finite(self.model, first_position=offset, num_tokens=len(bad)) as found:
                self.logits(states[offset : offset + len(bad)])
        if found:
            message += f" The first module whose output is not finite is {found[0]}."
        else:
            message += " In a second run every module's output was finite, so the failure comes and goes."
        raise ValueError(message)


def _cache_argument(backbone: nn.Module) -> str | None:
    """Name of the argument that takes a KV cache, `past_key_values` before transformers 5.24."""
    parameters = inspect.signature(backbone.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


class _Checkpoint:
    """Progress of one process: how many (sequence, budget) pairs are in the table, in the order they are measured."""

    def __init__(self, path: Path, rank: int, identity: dict[str, Any]):
        self.path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")
        self.identity = identity
        self._written = 0.0
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"`checkpoint_path` must be a file in an existing folder, got {str(path)!r}.")

    def is_due(self) -> bool:
        return time.monotonic() - self._written >= CHECKPOINT_SECONDS

    def load(self, empty: AcceptanceTable, num_pairs: int) -> tuple[AcceptanceTable, int]:
        """The table so far and the number of pairs in it; `empty` and 0 without a file."""
        if not self.path.exists():
            return empty, 0
        hint = "Pass another `checkpoint_path`, or remove the file to start over."
        state = read_json_object(self.path, MAX_TABLE_BYTES)
        if state.keys() != {"checkpoint_version", "identity", "completed", "table"}:
            raise ValueError(f"{self.path} is no checkpoint of a calibration. {hint}")
        if state["checkpoint_version"] != CHECKPOINT_VERSION:
            raise ValueError(f"{self.path} was written by another version of sparrow_trl. {hint}")
        if state["identity"] != self.identity:
            theirs = state["identity"] if isinstance(state["identity"], dict) else {}
            differing = [name for name, value in self.identity.items() if theirs.get(name) != value]
            raise ValueError(
                f"{self.path} belongs to another calibration: its {', '.join(differing)} differ from these. {hint}"
            )
        try:
            table = AcceptanceTable.from_dict(state["table"])
            completed = state["completed"]
            if isinstance(completed, bool) or not isinstance(completed, int) or not 0 <= completed <= num_pairs:
                raise ValueError(f"`completed` is {completed!r}, which must be between 0 and {num_pairs}")
            table.merge(empty)  # refuses a table of another sweep
        except ValueError as error:
            raise ValueError(f"{self.path} is damaged: {error} {hint}") from error
        return table, completed

    def save(self, table: AcceptanceTable, completed: int) -> None:
        state = {
            "checkpoint_version": CHECKPOINT_VERSION,
            "identity": self.identity,
            "completed": completed,
            "table": table.to_dict(),
        }
        write_atomically(self.path, json.dumps(state, allow_nan=False).encode())
        self._written = time.monotonic()


def _identity(model: PreTrainedModel, tokens: list, table: AcceptanceTable, num_processes: int) -> dict[str, Any]:
    """What a checkpoint must share with the measurement that goes on from it."""
    return {
        "method": table.method,
        "model": table.model_name,
        "weights": weights_fingerprint(model),
        "recipe": table.recipe,
        "page counts": table.page_counts,
        "bin tokens": table.bin_tokens,
        "sequences": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
        "number of processes": num_processes,
    }


def weights_fingerprint(model: nn.Module) -> str:
    """Tells one checkpoint of `model` (`torch.nn.Module`) from another."""
    weights = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights.update(f"{name} {list(parameter.shape)} {parameter.dtype} ".encode())
        if not parameter.is_meta:
            values = parameter.detach().flatten()
            values = values[:: max(1, len(values) // FINGERPRINT_VALUES)][:FINGERPRINT_VALUES]
            weights.update(values.to("cpu", torch.float64).numpy().tobytes())
    return weights.hexdigest()


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """
    The causal language model of transformers in `model` (`torch.nn.Module`), bare or wrapped.

    Raises:
        ValueError: when there is none, or an adapter puts virtual tokens before the prompt.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("A PEFT adapter that puts virtual tokens before the prompt is not supported.")
    causal_lm = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if causal_lm is None or causal_lm.get_output_embeddings() is None:
        raise ValueError(f"Calibration needs a causal language model of transformers, got {type(model).__name__}.")
    return causal_lm


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest sequence of `model` ([`~transformers.PreTrainedModel`]) in tokens, where it has a limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_sequences(model: PreTrainedModel, sequences: dict[str, TokenSequence]) -> None:
    """
    Refuse, with a `ValueError`, sequences that a model cannot be measured on.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model.
        sequences (`dict[str, TokenSequence]`): The sequences, by their names in messages.
    """
    if not sequences:
        raise ValueError("There are no sequences.")
    limit, vocab_size = max_positions(model), model.get_input_embeddings().num_embeddings
    for name, sequence in sequences.items():
        length, prompt_length = len(sequence.token_ids), sequence.prompt_length
        if not all(type(value) is int for value in (prompt_length, *sequence.token_ids)):
            raise ValueError(f"{name} must have a list of `int` token ids and an `int` prompt length.")
        if prompt_length < 1:
            raise ValueError(f"{name} has a prompt of {prompt_length} tokens; it needs at least one.")
        if prompt_length > length:
            raise ValueError(f"{name} has a prompt of {prompt_length} tokens, more than its {length} tokens.")
        if length - prompt_length < 2:
            raise ValueError(
                f"{name} has a completion of {length - prompt_length} tokens; it needs at least two, since the first "
                "comes from the dense prefill."
            )
        if limit is not None and length > limit:
            raise ValueError(f"{name} has {length} tokens, but the model has {limit} positions.")
        # Out of range, an embedding lookup would end a CUDA process with an assertion that names nothing.
        if not 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < vocab_size:
            raise ValueError(f"{name} has token ids outside [0, {vocab_size}).")


def check_sparse_layers(model: PreTrainedModel, recipe: SparsityScheduleConfig) -> None:
    """
    Refuse, with a `ValueError`, a recipe with which no layer of a model is sparse, or that names one it lacks.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model.
        recipe ([`SparsityScheduleConfig`]): The recipe.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    if not recipe.is_dense and max(recipe.dense_layers, default=0) >= num_layers:
        raise ValueError(f"`dense_layers` names layer {max(recipe.dense_layers)}, but the model has {num_layers}.")
    if all(map(recipe.is_dense_layer, range(num_layers))):
        raise ValueError(f"All {num_layers} layers are dense (`dense_layers`), so nothing is sparse.")


def _warn_without_full_bin(sequences: list[TokenSequence], bins: SparsityScheduleConfig) -> None:
    spans = [(sequence.prompt_length + 1, len(sequence.token_ids) - 1) for sequence in sequences]
    if all(bins.bin_index(first) == bins.bin_index(last) for first, last in spans):
        first, last = max(spans, key=lambda span: span[1])
        warnings.warn(
            f"None of the {len(sequences)} sequences reaches the end of the length bin it begins in: the longest has "
            f"cached lengths from {first} to {last}, and `bin_tokens` is {bins.bin_tokens}. Measure on longer "
            "sequences, or with smaller bins.",
            stacklevel=3,
        )


def process_rank() -> tuple[int, int]:
    """Rank of this process, and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_objects(value: Any) -> list[Any]:
    """`value` of every process."""
    num_processes = process_rank()[1]
    if num_processes == 1:
        return [value]
    values = [None] * num_processes
    dist.all_gather_object(values, value)
    return values


def _merged(table: AcceptanceTable) -> AcceptanceTable:
    """The tokens of every process, which leave `table` changed."""
    own_rank = process_rank()[0]
    for rank, values in enumerate(gather_objects(table.to_dict())):
        if rank != own_rank:
            table.merge(AcceptanceTable.from_dict(values))
    return table


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run `model` (`torch.nn.Module`) in evaluation mode, and put each of its modules back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def swapped_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace the attribute `name` of `owner` inside the context."""
    own = vars(owner)
    had, original = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def _first_not_finite(model: nn.Module, first_position: int, num_tokens: int) -> Iterator[list[str]]:
    """Collects the name of the first module whose output is not finite and, where it tells tokens apart, the place."""
    found = []

    def check(name, output):
        outputs = output.values() if isinstance(output, dict) else output
        for tensor in [outputs] if isinstance(outputs, torch.Tensor) else outputs or ():
            if found or not isinstance(tensor, torch.Tensor) or tensor.isfinite().all():
                continue
            bad = ~tensor.isfinite()
            # [batch, tokens, ...], or [tokens, ...] inside a mixture of experts.
            bad = bad[0] if bad.shape[:2] == (1, num_tokens) else bad
            place = ""
            if bad.dim() and len(bad) == num_tokens:
                place = f", at position {first_position + int(bad.reshape(num_tokens, -1).any(1).int().argmax())}"
            found.append(f"`{name}`{place}")

    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: check(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
