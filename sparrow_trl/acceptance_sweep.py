"""
The acceptance rate of many page budgets on the same sequences, teacher-forced (paper, section 3.2, where each budget
generates its own).

[`generate_sequences`] samples completions from the dense model once. [`measure_acceptance`] then runs the dense model
and, for each budget, the model under sparse attention over the same tokens, and collects the exact acceptance rate of
every position in an [`~sparrow_trl.acceptance_table.AcceptanceTable`].
"""

import hashlib
import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from .acceptance import acceptance_rate
from .acceptance_table import MAX_TABLE_BYTES, AcceptanceTable
from .attention import sparse_attention_context
from .json_files import read_json_object, write_atomically
from .schedule import SparsityScheduleConfig


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHECKPOINT_VERSION = 1
# A checkpoint is written after each sequence, and after a budget when the last one is older: a table of a long sweep
# takes a second to write, one pass of a small model on a GPU less.
CHECKPOINT_SECONDS = 10

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
            What to measure on, such as from [`generate_sequences`]; each completion has at least two tokens.
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
    passes = _Passes(model, chunk_size)
    _check_sequences(passes.model, sequences)
    model_name = model_name or passes.model.name_or_path or None
    longest = max(len(sequence.token_ids) for sequence in sequences) - 1
    # The schedule checks the two before they are divided.
    bins = AcceptanceTable(schedule_recipe, page_counts, bin_tokens, 1).schedule(0)
    _check_layers(passes.model, schedule_recipe)
    table = AcceptanceTable(
        schedule_recipe, page_counts, bin_tokens, bins.bin_index(longest) + 1, model_name=model_name
    )
    _warn_without_full_bin(sequences, bins)

    rank, num_processes = process_rank()
    # The longest first, so that processes finish together and a sequence that does not fit into memory shows at once.
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index].token_ids))[rank::num_processes]
    checkpoint = None
    completed = 0
    if checkpoint_path is not None:
        identity = _identity(passes.model, sequences, table, num_processes)
        checkpoint = _Checkpoint(Path(checkpoint_path), rank, identity)
        table, completed = checkpoint.load(table, len(order) * len(page_counts))
        # A disk or folder that cannot be written to shows now.
        checkpoint.save(table, completed)

    with passes.evaluating():
        if order and completed < len(order) * len(page_counts):
            # What sparse attention does not support shows on three tokens.
            first = sequences[order[0]].token_ids[:3]
            for _ in passes.acceptance(TokenSequence(first, 1), [table.schedule(0)], f"`sequences[{order[0]}]`"):
                pass
        costs = [len(sequences[index].token_ids) for index in order]
        done, first_budget = divmod(completed, len(page_counts))
        with tqdm(
            total=sum(costs) * len(page_counts),
            initial=sum(costs[:done]) * len(page_counts) + sum(costs[done : done + 1]) * first_budget,
            desc="Measuring acceptance",
            unit="tok",
            unit_scale=True,
            # None: no bar where standard error is no terminal.
            disable=None if rank == 0 else True,
        ) as progress:
            for index in order[done:]:
                sequence = sequences[index]
                schedules = [table.schedule(budget) for budget in range(first_budget, len(page_counts))]
                rates = passes.acceptance(sequence, schedules, f"`sequences[{index}]`")
                for budget, alphas in enumerate(rates, start=first_budget):
                    table.update(budget, sequence.cached_lengths, alphas)
                    completed += 1
                    if checkpoint is not None and (completed % len(page_counts) == 0 or checkpoint.is_due()):
                        checkpoint.save(table, completed)
                    progress.update(len(sequence.token_ids))
                first_budget = 0
    return _merged(table)


def sequence_acceptance(
    model: nn.Module, sequence: TokenSequence, schedules: list[SparsityScheduleConfig], *, chunk_size: int = 256
) -> Iterator[torch.Tensor]:
    """
    Exact acceptance rates of one sequence under each of several schedules, which need not keep the same budget at
    every length.

    Args:
        model (`torch.nn.Module`):
            As in [`measure_acceptance`], in evaluation mode.
        sequence ([`TokenSequence`]):
            What to measure on.
        schedules (`list[SparsityScheduleConfig]`):
            Schedules, one pass of the model each.
        chunk_size (`int`, *optional*, defaults to `256`):
            As in [`measure_acceptance`].

    Returns:
        Iterator over `torch.Tensor` of shape `[len(sequence.cached_lengths)]`, float32 (float64 for a float64 model):
        the rates at the sequence's `cached_lengths`, one tensor per schedule.

    Raises:
        ValueError: as in [`measure_acceptance`].
    """
    passes = _Passes(model, chunk_size)
    if passes.model.training:
        raise ValueError("The model is in training mode, where dropout would act: call `model.eval()` first.")
    _check_sequences(passes.model, [sequence])
    return passes.acceptance(sequence, schedules, "the sequence")


def generate_sequences(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[str] | list[list[dict[str, str]]],
    *,
    max_length: int,
    batch_size: int = 8,
    seed: int = 0,
) -> list[TokenSequence]:
    """
    Sample one completion per prompt from the dense model with transformers' `generate`.

    Sampling is from the model's own distribution, at temperature 1: the generation settings that come with the model
    (top-k, top-p, penalties) are set aside. A completion whose first token is the last, about which there is nothing
    to measure, is left out with a warning. With `torch.distributed` initialized, the batches are split over the
    processes, and every process gets all sequences.

    Args:
        model (`torch.nn.Module`):
            Causal language model of transformers, bare or wrapped (PEFT, DDP).
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.
        prompts (`list[str]` or `list[list[dict[str, str]]]`):
            Texts, or conversations for the tokenizer's chat template.
        max_length (`int`):
            Most tokens of a sequence, prompt included. A batch stops where its longest prompt reaches it.
        batch_size (`int`, *optional*, defaults to `8`):
            Prompts to complete at once.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling. The random state outside does not change.

    Returns:
        `list[TokenSequence]`: in the order of the prompts.

    Raises:
        ValueError: when there are no prompts, a prompt leaves no room for two tokens, or no completion is long enough.
    """
    causal_lm = _causal_lm(model)
    prompt_ids = _tokenized(tokenizer, prompts)
    limit = _max_positions(causal_lm)
    if limit is not None and max_length > limit:
        raise ValueError(f"`max_length` is {max_length}, but the model has {limit} positions.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be positive, got {batch_size}.")
    for index, ids in enumerate(prompt_ids):
        if not 1 <= len(ids) <= max_length - 2:
            raise ValueError(
                f"`prompts[{index}]` has {len(ids)} tokens; at least 1 is needed, and at most {max_length - 2} leave "
                f"room for two more within `max_length` ({max_length})."
            )
    rank, num_processes = process_rank()
    # Prompts of like length together, since a batch has as much room as its longest prompt leaves.
    order = sorted(range(len(prompts)), key=lambda index: len(prompt_ids[index]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    completions: dict[int, list[int]] = {}
    device = causal_lm.device
    rng_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(rng_devices), evaluating(model):
        for number in tqdm(
            range(rank, len(batches), num_processes),
            desc="Generating sequences",
            unit="batch",
            disable=None if rank == 0 else True,
        ):
            # Each batch its own seed: the split over processes does not change what is sampled.
            torch.manual_seed(seed + number)
            batch = batches[number]
            rows = _generate_batch(causal_lm, tokenizer, [prompt_ids[index] for index in batch], max_length)
            completions.update(zip(batch, rows, strict=True))
    for gathered in gather_objects(completions):
        completions.update(gathered)
    kept = [index for index in range(len(prompts)) if len(completions[index]) > 1]
    if not kept:
        raise ValueError("The model ended every completion with its first token, so there is nothing to measure.")
    if len(kept) < len(prompts):
        warnings.warn(
            f"{len(prompts) - len(kept)} of {len(prompts)} completions ended with their first token and are left out.",
            stacklevel=2,
        )
    return [TokenSequence(prompt_ids[index] + completions[index], len(prompt_ids[index])) for index in kept]


class _Passes:
    """The dense and sparse forward passes of a model, and its logits from hidden states."""

    def __init__(self, model: nn.Module, chunk_size: int):
        if chunk_size < 1:
            raise ValueError(f"`chunk_size` must be positive, got {chunk_size}.")
        self.model = _causal_lm(model)
        self.backbone = self.model.base_model
        self.chunk_size = chunk_size
        self._output_type = None

    def evaluating(self):
        return evaluating(self.model)

    @torch.no_grad()
    def acceptance(
        self, sequence: TokenSequence, schedules: list[SparsityScheduleConfig], name: str
    ) -> Iterator[torch.Tensor]:
        # The last token is context of no query that counts.
        input_ids = torch.tensor([sequence.token_ids[:-1]], device=self.model.device)
        start = sequence.prompt_length
        dense = self.hidden_states(input_ids, start)[start:]
        for schedule in schedules:
            sparse = self.hidden_states(input_ids, start, schedule)[start:]
            rates = []
            for chunk in range(0, len(dense), self.chunk_size):
                logits = []
                for states, its_schedule in ((dense, None), (sparse, schedule)):
                    states = states[chunk : chunk + self.chunk_size]
                    logits.append(self.logits(states))
                    bad = ~logits[-1].isfinite().all(-1)
                    if bad.any():
                        self._report(logits[-1], bad, start + chunk, input_ids, start, its_schedule, name)
                rates.append(acceptance_rate(*logits))
            yield torch.cat(rates)

    def hidden_states(
        self, input_ids: torch.Tensor, prompt_length: int, schedule: SparsityScheduleConfig | None = None
    ) -> torch.Tensor:
        """Last hidden states `[tokens, hidden]`, under sparse attention with a `schedule`."""
        context = nullcontext()
        if schedule is not None:
            prompt_lengths = torch.tensor([prompt_length], device=input_ids.device)
            context = sparse_attention_context(self.model, schedule, prompt_lengths=prompt_lengths)
        with context:
            output = self.backbone(input_ids=input_ids, use_cache=False)
        self._output_type = type(output)
        return output.last_hidden_state[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """
        Logits `[positions, vocab]` of hidden states `[positions, hidden]`: the model's forward pass with these in
        place of its backbone's, so that a bias, a scale or a cap on the logits is the model's own.
        """
        used = []

        def forward(*args, **kwargs):
            used.append(True)
            return self._output_type(last_hidden_state=states[None])

        with _swapped(self.backbone, "forward", forward):
            logits = self.model(torch.zeros((1, len(states)), dtype=torch.long, device=states.device)).logits
        if not used or logits.shape[:2] != (1, len(states)):
            raise ValueError(
                f"{type(self.model).__name__} does not make logits from the hidden states of its backbone "
                f"({type(self.backbone).__name__}), so they cannot be made in chunks."
            )
        return logits[0]

    def _report(self, logits, bad, offset, input_ids, prompt_length, schedule, name):
        """Raise with the first bad position, and the first module that gave something not finite in a second run."""
        row = int(bad.int().argmax())
        kind = "NaN" if logits[row].isnan().any() else "infinite"
        pages = "dense pass" if schedule is None else f"sparse pass with `top_k_pages` {schedule.top_k_pages}"
        message = f"The {pages} gives {kind} logits at position {offset + row} of {name}."
        with _first_not_finite(self.model, first_position=0, num_tokens=input_ids.shape[1]) as found:
            states = self.hidden_states(input_ids, prompt_length, schedule)
        if not found:
            with _first_not_finite(self.model, first_position=offset, num_tokens=len(bad)) as found:
                self.logits(states[offset : offset + len(bad)])
        if found:
            message += f" The first module whose output is not finite is {found[0]}."
        else:
            message += " In a second run every module's output was finite, so the failure comes and goes."
        raise ValueError(message)


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


def _identity(
    model: PreTrainedModel, sequences: list[TokenSequence], table: AcceptanceTable, num_processes: int
) -> dict[str, Any]:
    """What a checkpoint must share with the measurement that goes on from it."""
    weights = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights.update(f"{name} {list(parameter.shape)} {parameter.dtype} ".encode())
        if not parameter.is_meta:
            values = parameter.detach().flatten()
            values = values[:: max(1, len(values) // FINGERPRINT_VALUES)][:FINGERPRINT_VALUES]
            weights.update(values.to("cpu", torch.float64).numpy().tobytes())
    tokens = json.dumps([[sequence.prompt_length, sequence.token_ids] for sequence in sequences]).encode()
    return {
        "model": table.model_name,
        "weights": weights.hexdigest(),
        "recipe": table.recipe,
        "page counts": table.page_counts,
        "bin tokens": table.bin_tokens,
        "sequences": hashlib.sha256(tokens).hexdigest(),
        "number of processes": num_processes,
    }


def _causal_lm(model: nn.Module) -> PreTrainedModel:
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("A PEFT adapter that puts virtual tokens before the prompt is not supported.")
    causal_lm = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if causal_lm is None or causal_lm.get_output_embeddings() is None:
        raise ValueError(f"Calibration needs a causal language model of transformers, got {type(model).__name__}.")
    return causal_lm


def _max_positions(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _check_sequences(model: PreTrainedModel, sequences: list[TokenSequence]) -> None:
    if not sequences:
        raise ValueError("There are no sequences to measure on.")
    limit, vocab_size = _max_positions(model), model.get_input_embeddings().num_embeddings
    for index, sequence in enumerate(sequences):
        name, length, prompt_length = f"`sequences[{index}]`", len(sequence.token_ids), sequence.prompt_length
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


def _check_layers(model: PreTrainedModel, recipe: SparsityScheduleConfig) -> None:
    num_layers = model.config.get_text_config().num_hidden_layers
    if recipe.dense_layers and max(recipe.dense_layers) >= num_layers:
        raise ValueError(f"`dense_layers` names layer {max(recipe.dense_layers)}, but the model has {num_layers}.")
    if all(map(recipe.is_dense_layer, range(num_layers))):
        raise ValueError(f"All {num_layers} layers are dense (`dense_layers`), so there is nothing to calibrate.")


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
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
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


def _tokenized(tokenizer, prompts) -> list[list[int]]:
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise ValueError(f"`prompts` must be a list of at least one text or conversation, got {prompts!r:.200}.")
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    return [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        for prompt in prompts
    ]


def _generate_batch(
    model: PreTrainedModel, tokenizer, prompt_ids: list[list[int]], max_length: int
) -> list[list[int]]:
    """Completions of the prompts, each to its first end-of-sequence token."""
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    eos_ids = {eos} if isinstance(eos, int) else set(eos or ())
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = min(eos_ids, default=0)
    width = max(map(len, prompt_ids))
    padded = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompt_ids], device=model.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=model.device)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max_length - width,
        eos_token_id=sorted(eos_ids) or None,
        pad_token_id=pad,
    )
    # `generate` fills what is not set from the model's own settings.
    with _swapped(model, "generation_config", settings), torch.no_grad():
        output = model.generate(input_ids=padded, attention_mask=mask)
    completions = []
    for row in output[:, width:].tolist():
        end = next((index for index, token in enumerate(row) if token in eos_ids), len(row) - 1)
        completions.append(row[: end + 1])
    return completions
