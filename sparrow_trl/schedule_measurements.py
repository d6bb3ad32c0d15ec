"""
Acceptance rates of whole schedules on the same sequences, kept from one run to the next.

A search measures one schedule after the other, each chosen by what the last one showed. The dense pass over a sequence
is made once for all of them. Rates are kept on disk in one file per schedule, named by a hash of the model's weights
and of what the schedule reads at the lengths that were measured: two notations of one schedule share a file, another
model or recipe never does. A file is a JSON object with `format_version`, `schedule` (what was read) and `rates`,
which maps the hash of a sequence to its rates: deflated little-endian 16-bit integers, in units of 1/65535, in base64.
"""

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from .acceptance_sweep import TokenSequence, gather_objects, process_rank, sequence_acceptance, weights_fingerprint
from .json_files import dump_json_object, read_json_object, write_atomically
from .schedule import SparsityScheduleConfig


FORMAT_VERSION = 1
# 64 sequences of 128K tokens stay below.
MAX_FILE_BYTES = 2**25
RATE_STEPS = 65_535
NUM_RESAMPLES = 200


@dataclass(frozen=True)
class BinTails:
    """
    Tail acceptance of a schedule by bin of cached length.

    Args:
        tails (`numpy.ndarray` of shape `[bins]`):
            Quantile of the pooled rates; NaN without tokens.
        guarded (`numpy.ndarray` of shape `[bins]`):
            What a search judges by: the tail, or the lower end of its bootstrap interval where that is lower.
        tokens (`numpy.ndarray` of shape `[bins]`):
            Tokens behind them.
    """

    tails: np.ndarray
    guarded: np.ndarray
    tokens: np.ndarray


class ScheduleMeasurements:
    """
    Measures schedules on given sequences, teacher-forced, and remembers what was measured.

    With `torch.distributed` initialized, the sequences are split over the processes, which must make the same calls.

    Args:
        model (`torch.nn.Module`):
            As in [`~sparrow_trl.acceptance_sweep.sequence_acceptance`], in evaluation mode.
        sequences (`list[TokenSequence]`):
            What to measure on. The dense hidden states of each stay in the device's memory.
        folder (`str` or `pathlib.Path`, *optional*):
            Where to keep rates; created when missing.
        tail_quantile (`float`, *optional*, defaults to `0.05`):
            Quantile of the acceptance rate that is the tail acceptance.
        confidence (`float`, *optional*):
            Level of the bootstrap interval over sequences whose lower end guards against noise, in (0, 1); without it
            the tail itself counts.
        chunk_size (`int`, *optional*, defaults to `256`):
            Positions whose logits are held at once.
        on_measured (callable, *optional*):
            Called with a number of passes when their rates are known, whether they were made now or read from disk.

    Attributes:
        passes (`int`):
            Passes of the model under a schedule over a sequence that this process made.
        requested (`int`):
            Passes that were asked for, those of all processes and those that were read from disk included.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: list[TokenSequence],
        *,
        folder: str | Path | None = None,
        tail_quantile: float = 0.05,
        confidence: float | None = None,
        chunk_size: int = 256,
        on_measured: Callable[[int], None] | None = None,
    ):
        if not sequences:
            raise ValueError("There are no sequences to measure on.")
        if confidence is not None and not 0 < confidence < 1:
            raise ValueError(f"`confidence` must be between 0 and 1, got {confidence!r}.")
        self.model, self.sequences = model, sequences
        self.tail_quantile, self.confidence, self.chunk_size = tail_quantile, confidence, chunk_size
        self.longest = max(len(sequence.token_ids) for sequence in sequences) - 1
        self.passes = self.requested = 0
        self._on_measured = on_measured
        self._asked: set[tuple[str, str]] = set()
        self._folder = None if folder is None else Path(folder)
        self._weights = weights_fingerprint(model)
        self._names = [_sequence_name(sequence) for sequence in sequences]
        self._running: dict[int, _RunningSequence] = {}
        self._rates: dict[str, dict[str, np.ndarray]] = {}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def rates(self, schedule: SparsityScheduleConfig, num_sequences: int | None = None) -> list[np.ndarray]:
        """
        Acceptance rates of the first sequences under a schedule, to 1/65535.

        Args:
            schedule ([`SparsityScheduleConfig`]):
                The schedule.
            num_sequences (`int`, *optional*):
                How many sequences; by default all.

        Returns:
            `list[numpy.ndarray]`: float32, one array per sequence, at its `cached_lengths`.

        Raises:
            ValueError: as in [`~sparrow_trl.acceptance_sweep.sequence_acceptance`], and for a damaged file.
        """
        names = self._names[:num_sequences]
        described = self._description(schedule)
        key = hashlib.sha256(json.dumps([self._weights, described]).encode()).hexdigest()[:32]
        known = self._rates.get(key)
        if known is None:
            known = self._rates[key] = self._load(key)
        if any(name not in known for name in names):
            rank, num_processes = process_rank()
            own = {}
            for index in range(rank, len(names), num_processes):
                if names[index] not in known:
                    own[names[index]] = self._measure(index, schedule)
                    if num_processes == 1:
                        known.update(own)
                        self._save(key, described)
            for gathered in gather_objects(own):
                known.update(gathered)
            if num_processes > 1 and rank == 0:
                self._save(key, described)
        asked = {(key, name) for name in names} - self._asked
        self._asked |= asked
        self.requested += len(asked)
        if asked and self._on_measured is not None:
            self._on_measured(len(asked))
        return [known[name].astype(np.float32) / RATE_STEPS for name in names]

    def tails(
        self, schedule: SparsityScheduleConfig, num_bins: int | None = None, num_sequences: int | None = None
    ) -> BinTails:
        """
        Tail acceptance by bin of cached length.

        Args:
            schedule ([`SparsityScheduleConfig`]):
                The schedule, whose bins are used.
            num_bins (`int`, *optional*):
                Bins to return, from the first on; by default all up to the longest sequence.
            num_sequences (`int`, *optional*):
                As in [`rates`].

        Returns:
            [`BinTails`]
        """
        rates = self.rates(schedule, num_sequences)
        bins = [schedule.bin_index(sequence.cached_lengths).numpy() for sequence in self.sequences[: len(rates)]]
        num_bins = schedule.bin_index(self.longest) + 1 if num_bins is None else num_bins
        tails, guarded, tokens = np.full(num_bins, np.nan), np.full(num_bins, np.nan), np.zeros(num_bins, dtype=int)
        for index in range(num_bins):
            parts = [values[its_bins == index] for values, its_bins in zip(rates, bins, strict=True)]
            parts = [part for part in parts if len(part)]
            tokens[index] = sum(map(len, parts))
            if not parts:
                continue
            tails[index] = guarded[index] = np.quantile(np.concatenate(parts), self.tail_quantile)
            if self.confidence is not None and len(parts) > 1:
                guarded[index] = min(tails[index], _lower_end(parts, self.tail_quantile, self.confidence))
        return BinTails(tails, guarded, tokens)

    def _measure(self, index: int, schedule: SparsityScheduleConfig) -> np.ndarray:
        running = self._running.get(index)
        if running is None:
            running = self._running[index] = _RunningSequence(self.model, self.sequences[index], self.chunk_size)
        try:
            rates = running.rates(schedule)
        except BaseException:
            del self._running[index]  # a generator that raised has ended
            raise
        self.passes += 1
        return np.rint(rates * RATE_STEPS).astype("<u2")

    def _description(self, schedule: SparsityScheduleConfig) -> dict[str, Any]:
        """What is read at the measured lengths, the same for every notation of a schedule."""
        reserved = schedule.sink_pages + schedule.recent_pages
        spans = map(schedule.bin_lengths, range(schedule.bin_index(self.longest) + 1))
        spans = [(first, last) for first, last in spans if first <= last]
        candidates = [max(0, -(-last // schedule.page_size) - reserved) for _, last in spans]
        layers = []
        for layer in range(self.model.config.get_text_config().num_hidden_layers):
            kept = [schedule.top_k(first, layer) for first, _ in spans]
            kept = [min(pages) for pages in zip(kept, candidates, strict=True)]
            # What reads every page is dense, whatever it is called.
            layers.append(None if schedule.is_dense_layer(layer) or kept == candidates else kept)
        return {
            **schedule.recipe,
            "landmark_dtype": schedule.landmark_dtype,
            "bin_tokens": schedule.bin_tokens,
            "layers": layers,
        }

    def _path(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{key}.json"

    def _load(self, key: str) -> dict[str, np.ndarray]:
        path = self._path(key)
        if path is None or not path.exists():
            return {}
        try:
            stored = read_json_object(path, MAX_FILE_BYTES)
            if stored.get("format_version") != FORMAT_VERSION:
                raise ValueError("it was written by another version of sparrow_trl")
            lengths = {
                name: len(sequence.cached_lengths) for name, sequence in zip(self._names, self.sequences, strict=True)
            }
            rates = {name: _decode(text) for name, text in stored["rates"].items()}
            if any(len(values) != lengths.get(name, len(values)) for name, values in rates.items()):
                raise ValueError("the rates of a sequence are not as many as its tokens")
        except (AttributeError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"The measurement {path} is damaged ({error}). Remove it to measure again.") from error
        return rates

    def _save(self, key: str, described: dict[str, Any]) -> None:
        path = self._path(key)
        if path is not None:
            rates = {name: _encode(values) for name, values in self._rates[key].items()}
            state = {"format_version": FORMAT_VERSION, "schedule": described, "rates": rates}
            write_atomically(path, dump_json_object(state, path.name, MAX_FILE_BYTES))


class _RunningSequence:
    """
    One sequence, whose dense pass is made once: the iterator of rates is asked for the next schedule only when it is
    known.
    """

    def __init__(self, model: nn.Module, sequence: TokenSequence, chunk_size: int):
        self._next: SparsityScheduleConfig | None = None
        self._iterator = sequence_acceptance(model, sequence, self._schedules(), chunk_size=chunk_size)

    def rates(self, schedule: SparsityScheduleConfig) -> np.ndarray:
        self._next = schedule
        return next(self._iterator).double().cpu().numpy()

    def _schedules(self):
        while True:
            if self._next is None:
                raise RuntimeError("`sequence_acceptance` asked for a schedule before its rates were asked for.")
            schedule, self._next = self._next, None
            yield schedule


def _lower_end(parts: Sequence[np.ndarray], q: float, level: float) -> float:
    """Lower end of the percentile bootstrap interval of a quantile; whole sequences are drawn, as their tokens hang
    together."""
    values = np.concatenate(parts)
    order = values.argsort()
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[order]
    draws = np.random.default_rng(0).multinomial(len(parts), np.full(len(parts), 1 / len(parts)), NUM_RESAMPLES)
    counts = draws[:, owners].cumsum(1)
    # The order statistic below the quantile's position.
    ranks = np.floor(q * (counts[:, -1:] - 1))
    quantiles = values[order][(counts <= ranks).sum(1)]
    return float(np.quantile(quantiles, (1 - level) / 2))


def _encode(rates: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(rates.astype("<u2").tobytes(), 1)).decode()


def _decode(text: str) -> np.ndarray:
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype="<u2")
    except binascii.Error as error:
        raise ValueError(f"it is no base64: {error}") from error


def _sequence_name(sequence: TokenSequence) -> str:
    return hashlib.sha256(json.dumps([sequence.prompt_length, sequence.token_ids]).encode()).hexdigest()[:32]
