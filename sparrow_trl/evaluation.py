"""
Accuracy on problems with answers that can be checked: avg@k and pass@k, with dense or sparse generation.

Each round samples one completion of every problem in an engine and is kept in a file, so that an interrupted
evaluation goes on from the last whole round.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from .acceptance_sweep import causal_lm_of, gather_objects, process_rank, weights_fingerprint
from .kept_results import load_kept, save_kept
from .pass_at_k import mean_interval, pass_at_k
from .schedule import SparsityScheduleConfig
from .sequence_generation import (
    GPU_MEMORY_UTILIZATION,
    choose_generator,
    complete_on_engine,
    end_token_ids,
    start_engine,
    tokenize_prompts,
)
from .tables import Table


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Ten thousand completions of 32K tokens as text.
MAX_ROUND_BYTES = 2**31


@dataclass(frozen=True)
class Problem:
    """
    A problem.

    Args:
        prompt (`str` or `list[dict[str, str]]`):
            Text, or conversation for the tokenizer's chat template.
        answer (`str`):
            The right answer.
    """

    prompt: str | list[dict[str, str]]
    answer: str


@dataclass(frozen=True)
class EvaluationResult:
    """
    What an evaluation has found.

    Args:
        correct (`numpy.ndarray`):
            Which completions are right, bool `[rounds, problems]`.
        lengths (`numpy.ndarray`):
            Their tokens, integers `[rounds, problems]`.
        truncated (`numpy.ndarray`):
            Which of them were cut off at the maximum length, bool `[rounds, problems]`.
    """

    correct: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray

    def average(self) -> tuple[float, tuple[float, float] | None]:
        """avg@k, k being all rounds: the share of right completions, and its 95% interval over problems."""
        shares = self.correct.mean(axis=0)
        return float(shares.mean()), mean_interval(shares)

    def pass_at(self, k: int) -> tuple[float, tuple[float, float] | None]:
        """pass@k ([`~sparrow_trl.pass_at_k.pass_at_k`]) and its 95% interval over problems."""
        values = pass_at_k(len(self.correct), self.correct.sum(axis=0), k)
        return float(values.mean()), mean_interval(values)

    def metrics(self, ks: Sequence[int]) -> dict[str, tuple[float, tuple[float, float] | None]]:
        """avg@k over all rounds and pass@k for each of `ks`, by name."""
        return {
            f"avg@{len(self.correct)}": self.average(),
            **{f"pass@{k}": self.pass_at(k) for k in ks},
        }

    def to_table(self, title: str, ks: Sequence[int]) -> Table:
        """The metrics for each of `ks`, with their intervals."""
        table = Table(title, ["metric", "value", "95% interval over problems"])
        for name, (value, interval) in self.metrics(ks).items():
            table.rows.append(
                [name, f"{value:.1%}", "-" if interval is None else "{:.1%} to {:.1%}".format(*interval)]
            )
        table.rows.append(["tokens of a completion", f"{self.lengths.mean():,.0f}", "-"])
        table.rows.append(["cut off at the maximum length", f"{self.truncated.mean():.1%}", "-"])
        return table

    def to_dict(self, ks: Sequence[int]) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "num_problems": self.correct.shape[1],
            "num_samples": self.correct.shape[0],
            "metrics": {
                name: {"value": value, "interval": interval} for name, (value, interval) in self.metrics(ks).items()
            },
            "mean_length": float(self.lengths.mean()),
            "truncated": float(self.truncated.mean()),
            "correct": self.correct.sum(axis=0).tolist(),
        }


def boxed(answer: str) -> str:
    """An answer (`str`) as models are asked to put it, unless it already is."""
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"


def score_answers(texts: list[str], answers: list[str]) -> list[float | None]:
    """
    Whether completions have the right answer, by [`trl.rewards.accuracy_reward`] (math-verify), which wants it in
    LaTeX, best within `\\boxed{}`.

    Args:
        texts (`list[str]`): Completions.
        answers (`list[str]`): The right answer to each.

    Returns:
        `list[float | None]`: 1, 0, or `None` for an answer that cannot be parsed.
    """
    from trl.rewards import accuracy_reward

    scores = []
    for text, answer in zip(texts, answers, strict=True):
        try:
            scores += accuracy_reward([[{"role": "assistant", "content": text}]], [boxed(answer)])
        except Exception:  # a completion may hold what breaks the parser, such as a number of thousands of digits
            scores.append(0.0)
    return scores


def check_answers(answers: list[str]) -> None:
    """Refuse, with a `ValueError`, answers (`list[str]`) that are not even right as answers to themselves."""
    bad = [
        index
        for index, value in enumerate(score_answers([boxed(answer) for answer in answers], answers))
        if value != 1
    ]
    if bad:
        raise ValueError(
            f"{len(bad)} of {len(answers)} answers cannot be read, the first in row {bad[0]}: "
            f"{answers[bad[0]]!r:.100}. Remove these rows, or name another column of answers."
        )


def evaluate_problems(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    *,
    num_samples: int,
    max_length: int,
    schedule: SparsityScheduleConfig | None = None,
    temperature: float = 0.6,
    top_p: float = 0.95,
    seed: int = 0,
    folder: str | Path,
    model_path: str | Path | None = None,
    score: Callable[[list[str], list[str]], list[float | None]] = score_answers,
    vllm_gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    report: Callable[[str], None] | None = None,
) -> EvaluationResult:
    """
    Sample completions of problems and check their answers.

    Args:
        model (`torch.nn.Module`):
            Causal language model of transformers that vLLM has too, without adapters, bare or wrapped (DDP). With
            `torch.distributed` initialized, each process has an engine and completes a part of the problems.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        problems (`Sequence[Problem]`):
            The problems.
        num_samples (`int`):
            Completions of each.
        max_length (`int`):
            Most tokens of a sequence, prompt included.
        schedule ([`SparsityScheduleConfig`], *optional*):
            Schedule of sparse generation. By default vLLM attends as it does by itself.
        temperature (`float`, *optional*, defaults to `0.6`):
            Temperature; 0 takes the likeliest token each time.
        top_p (`float`, *optional*, defaults to `0.95`):
            Share of the probability that is sampled from.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the sampling.
        folder (`str` or `pathlib.Path`):
            Folder of the rounds, which is created when missing.
        model_path (`str` or `pathlib.Path`, *optional*):
            Folder or Hub id of the model, where its weights are those of `model`. By default the weights as they are
            now are written to a temporary folder.
        score (callable, *optional*, defaults to [`score_answers`]):
            Takes completions and answers, and returns a number for each, 1 where it is right. It is asked again when
            an evaluation goes on.
        vllm_gpu_memory_utilization (`float`, *optional*, defaults to `0.5`):
            Share of the GPU's memory for the engine, beside `model`.
        report (callable, *optional*):
            Called with lines of text about the progress.

    Returns:
        [`EvaluationResult`]

    Raises:
        ValueError: for no problems or samples, a prompt that is too long, an answer that the default `score` cannot
            read, and a folder with the rounds of another evaluation.
        RuntimeError: when the engine fails.
    """
    if not problems or num_samples < 1:
        raise ValueError(
            f"There must be problems and samples, got {len(problems)} problems and {num_samples} samples."
        )
    answers = [problem.answer for problem in problems]
    if score is score_answers:
        check_answers(answers)
    choose_generator("vllm", model)
    model = causal_lm_of(model)
    prompt_ids = tokenize_prompts(model, tokenizer, [problem.prompt for problem in problems], max_length)
    settings = {
        "weights": weights_fingerprint(model),
        "problems": hashlib.sha256(json.dumps([prompt_ids, answers]).encode()).hexdigest(),
        "maximum length": max_length,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "schedule": None if schedule is None else schedule.to_dict(),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"sample-{index:04d}.json" for index in range(num_samples)]
    is_main = process_rank()[0] == 0

    def load(file: Path) -> dict[str, Any] | None:
        names = ("texts", "lengths", "truncated")
        return load_kept(file, settings, names, MAX_ROUND_BYTES, what="samples", work="evaluation")

    try:
        present = [load(file) for file in files] if is_main else None
    except ValueError as error:
        present = error  # for all processes, which would wait
    (present, *_) = gather_objects(present)
    if isinstance(present, ValueError):
        raise present
    stop_token_ids = end_token_ids(model, tokenizer)
    engine, entries = None, []
    try:
        for index, entry in enumerate(present):
            if entry is None:
                if engine is None:
                    if report is not None:
                        report(
                            f"Starting vLLM's engine for {present.count(None)} samples of {len(problems)} problems."
                        )
                    engine = start_engine(
                        model, model_path, prompt_ids, max_length, vllm_gpu_memory_utilization, schedule
                    )
                completions = complete_on_engine(
                    engine,
                    prompt_ids,
                    max_length,
                    seed + index * len(problems),
                    stop_token_ids,
                    f"Sample {index + 1} of {num_samples}",
                    sampling={"temperature": temperature, "top_p": top_p},
                )
                rows = [completions[row] for row in range(len(problems))]
                entry = {
                    "texts": tokenizer.batch_decode(rows, skip_special_tokens=True),
                    "lengths": [len(row) for row in rows],
                    "truncated": [row[-1] not in stop_token_ids for row in rows],
                }
                if is_main:
                    save_kept(files[index], settings, entry, MAX_ROUND_BYTES)
            # By one process: those of a machine would compete for the time that a comparison may take.
            correct = [value == 1 for value in score(entry["texts"], answers)] if is_main else None
            (correct, *_) = gather_objects(correct)
            entries.append({"correct": correct, "lengths": entry["lengths"], "truncated": entry["truncated"]})
            if report is not None:
                share = np.mean([entry["correct"] for entry in entries])
                report(f"Sample {index + 1} of {num_samples}: {share:.1%} right so far")
    finally:
        if engine is not None:
            engine.close()
    columns = ([entry[name] for entry in entries] for name in ("correct", "lengths", "truncated"))
    return EvaluationResult(*map(np.array, columns))
