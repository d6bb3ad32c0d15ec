"""`sparrow-trl calibrate`: arguments, the model and the texts; [`calibration`] does the work."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from .acceptance_plots import plot_tails
from .acceptance_sweep import TokenSequence, process_rank
from .acceptance_table import METHODS, AcceptanceTable
from .dataset_rows import choose_column, read_dataset
from .json_files import dump_json_object, read_json_object, write_atomically
from .pictures import save_figure
from .schedule import SparsityScheduleConfig
from .sequence_generation import GENERATORS, GPU_MEMORY_UTILIZATION, generate_sequences
from .tables import make_console


CHECKPOINT_NAME = "measurement.json"
SEQUENCES_NAME = "sequences.json"
MAX_SEQUENCES_BYTES = 2**28
DTYPES = ("auto", "bfloat16", "float16", "float32")
PROMPT_COLUMNS = ("prompt", "problem", "question", "text")


@dataclass
class CalibrateArguments:
    """
    Find the cheapest sparsity schedule with which a model keeps its tail acceptance. Writes acceptance_table.json,
    sparsity_schedule.json and pictures. Run under `accelerate launch` to use several processes.

    Args:
        model_name_or_path (`str`):
            Folder or Hub id of the model.
        output_dir (`str`):
            Folder for the results.
        dataset (`str`, *optional*):
            Prompts to complete: Hub id, folder or JSON Lines file.
        texts (`str`, *optional*):
            Texts to measure on instead, without generating: text file, or JSON Lines file with a column `text`.
    """

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of the model."})
    output_dir: str = field(default="calibration", metadata={"help": "Folder for the results."})
    dataset: str | None = field(
        default=None, metadata={"help": "Prompts to complete: Hub id, folder or JSON Lines file."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the dataset."})
    prompt_column: str | None = field(
        default=None, metadata={"help": f"Column of the prompts; by default the first of {', '.join(PROMPT_COLUMNS)}."}
    )
    texts: str | None = field(
        default=None,
        metadata={"help": "Texts to measure on, without generating: a .txt file, or JSON Lines with a column `text`."},
    )
    num_prompts: int = field(default=16, metadata={"help": "Prompts or texts to use, from the first on."})
    prompt_tokens: int = field(
        default=256, metadata={"help": "With texts: tokens at the start of each that stand for the prompt."}
    )
    max_length: int = field(default=4096, metadata={"help": "Most tokens of a sequence, prompt included."})
    page_counts: list[int] = field(
        default_factory=list,
        metadata={"help": "Budgets to measure in pages, reserved ones included; by default up to 18 from 16 to 896."},
    )
    bin_tokens: int = field(default=2048, metadata={"help": "Tokens in a bin of cached length."})
    target_acceptance: float = field(default=0.86, metadata={"help": "Tail acceptance to keep."})
    min_tokens: int = field(default=200, metadata={"help": "Tokens that a bin's tail needs to count."})
    confidence: float | None = field(
        default=None,
        metadata={"help": "Judge budgets by the lower end of their tail's bootstrap interval at this level, as 0.9."},
    )
    allow_dense: bool = field(
        default=False, metadata={"help": "Keep all pages in bins where no budget reaches the target."}
    )
    page_size: int = field(default=16, metadata={"help": "Tokens in a page."})
    page_score: str = field(default="mean_query", metadata={"help": "mean_query (the paper's) or group_softmax."})
    landmarks_per_page: int = field(default=1, metadata={"help": "1, 2 or 4 (more than 1 with group_softmax)."})
    landmark_dtype: str = field(default="auto", metadata={"help": "auto (the cache's) or fp8_e4m3."})
    dense_layers: list[int] = field(
        default_factory=lambda: [0, 1], metadata={"help": "Layers that stay dense; -1 for none."}
    )
    dtype: str = field(default="auto", metadata={"help": "Type of the weights: auto, bfloat16, float16 or float32."})
    method: str = field(
        default="teacher_forced",
        metadata={
            "help": "teacher_forced: measure all budgets on the dense model's completions. rollout: each budget "
            "generates its own, with vLLM."
        },
    )
    generator: str = field(
        default="auto",
        metadata={"help": "What completes prompts: vllm, transformers, or auto (vLLM where it has the model)."},
    )
    vllm_gpu_memory_utilization: float = field(
        default=GPU_MEMORY_UTILIZATION,
        metadata={"help": "Share of the GPU's memory for vLLM, which stands beside the model that measures."},
    )
    batch_size: int = field(default=8, metadata={"help": "Prompts that transformers completes at once."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})

    def __post_init__(self):
        if (self.dataset is None) == (self.texts is None):
            raise ValueError("Give either --dataset, whose prompts are completed, or --texts.")
        if self.texts is not None and self.prompt_column is not None:
            raise ValueError("--prompt_column is for --dataset; texts are in the column `text`.")
        for name in ("num_prompts", "min_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be positive, got {getattr(self, name)}.")
        if self.confidence is not None and not 0 < self.confidence < 1:
            raise ValueError(f"--confidence must be between 0 and 1, got {self.confidence}.")
        if self.max_length < 3:
            raise ValueError(f"--max_length must be at least 3, got {self.max_length}.")
        for name, choices in (("dtype", DTYPES), ("method", METHODS), ("generator", GENERATORS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        if self.method == "rollout" and self.texts is not None:
            raise ValueError("--method rollout generates what it measures on: give --dataset, not --texts.")
        if self.method == "rollout" and self.generator == "transformers":
            raise ValueError("--method rollout generates with vLLM alone: leave out --generator transformers.")
        if not 0 < self.vllm_gpu_memory_utilization <= 1:
            raise ValueError(
                f"--vllm_gpu_memory_utilization must be above 0 and at most 1, got {self.vllm_gpu_memory_utilization}."
            )
        if self.texts is not None and not 1 <= self.prompt_tokens <= self.max_length - 2:
            raise ValueError(
                f"--prompt_tokens must be between 1 and {self.max_length - 2}, two less than --max_length, got "
                f"{self.prompt_tokens}."
            )

    @property
    def recipe(self) -> SparsityScheduleConfig:
        """[`SparsityScheduleConfig`]: How pages are scored and reserved."""
        return SparsityScheduleConfig(
            top_k_pages=[0],
            bin_tokens=self.bin_tokens,
            target_acceptance=self.target_acceptance,
            page_size=self.page_size,
            page_score=self.page_score,
            landmarks_per_page=self.landmarks_per_page,
            landmark_dtype=self.landmark_dtype,
            dense_layers=[layer for layer in self.dense_layers if layer != -1],
        )


def run_calibrate(arguments: list[str]) -> None:
    """
    Run the command.

    Args:
        arguments (`list[str]`): Arguments after the name of the command; `--config FILE` reads them from YAML.

    Raises:
        ValueError: for arguments, texts or a model that cannot be calibrated.
    """
    parser = TrlParser(CalibrateArguments, prog="sparrow-trl calibrate")
    try:
        (args,) = parser.parse_args_and_config(args=arguments)
    except (yaml.YAMLError, IndexError) as error:
        raise ValueError(f"--config needs a YAML file of arguments: {error}") from error
    recipe = args.recipe
    if args.page_counts:
        AcceptanceTable(recipe, args.page_counts, args.bin_tokens, 1)  # refused before the model is loaded
    prompts = load_prompts(args)

    from accelerate import PartialState
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .calibration import TABLE_NAME, TAIL_PICTURE_NAME, calibrate, fit_schedule

    state = PartialState()
    is_main = process_rank()[0] == 0
    console = make_console()

    def report(text: str) -> None:
        if is_main:
            console.print(text)

    def save_table(table: AcceptanceTable) -> None:
        if is_main:
            table.save(folder / TABLE_NAME)
            save_figure(plot_tails(table, min_tokens=args.min_tokens), folder / TAIL_PICTURE_NAME)

    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    texts = None if args.texts is None else cut_texts(tokenizer, prompts, args)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype).to(state.device)
    fit_options = {
        "recipe": recipe,
        "page_counts": args.page_counts or None,
        "bin_tokens": args.bin_tokens,
        "target_acceptance": args.target_acceptance,
        "min_tokens": args.min_tokens,
        "confidence": args.confidence,
        "allow_dense": args.allow_dense,
        "model_name": args.model_name_or_path,
        "checkpoint_path": folder / CHECKPOINT_NAME,
        "report": report,
        "on_measured": save_table,
    }
    try:
        if args.method == "rollout":
            result = calibrate(
                model,
                tokenizer,
                prompts,
                max_length=args.max_length,
                method=args.method,
                generator=args.generator,
                seed=args.seed,
                model_path=args.model_name_or_path,
                vllm_gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                **fit_options,
            )
        else:
            sequences = texts or complete_prompts(model, tokenizer, prompts, args, folder / SEQUENCES_NAME, report)
            lengths = [len(sequence.token_ids) for sequence in sequences]
            report(f"{len(sequences)} sequences of {min(lengths)} to {max(lengths)} tokens.")
            result = fit_schedule(model, sequences, **fit_options)
    except KeyboardInterrupt:
        report(f"Interrupted. What was measured is in {folder}: the same command goes on from there.")
        raise
    if not is_main:
        return
    result.save(folder)
    result.to_table().print(console)
    for entry in result.short_bins:
        report(
            f"Around {entry.start + args.bin_tokens // 2:,} tokens the tail is {entry.tail:.4f} even with the largest "
            "budget. Measure larger ones (--page_counts), or allow these bins to be dense (--allow_dense True)."
        )
    report(f"Wrote {folder}/: the schedule (give the folder as sparsity_schedule), the acceptance table and pictures.")


def cut_texts(tokenizer, texts: list[str], args: CalibrateArguments) -> list[TokenSequence]:
    """
    Sequences from texts: the first `max_length` tokens of each, or, of a single one, as many pieces as are asked for.
    """
    rows = tokenizer(texts)["input_ids"]
    if len(rows) == 1:
        (row,) = rows
        pieces = [row[start : start + args.max_length] for start in range(0, len(row), args.max_length)]
        rows = [piece for piece in pieces[: args.num_prompts] if len(piece) >= args.prompt_tokens + 2] or [row]
    rows = [row[: args.max_length] for row in rows]
    short = sum(len(row) < args.prompt_tokens + 2 for row in rows)
    if short:
        raise ValueError(
            f"{short} of {len(rows)} texts have fewer than {args.prompt_tokens + 2} tokens: --prompt_tokens "
            f"({args.prompt_tokens}) and two more. Leave them out, or lower --prompt_tokens."
        )
    return [TokenSequence(row, args.prompt_tokens) for row in rows]


def complete_prompts(
    model,
    tokenizer,
    prompts: list,
    args: CalibrateArguments,
    path: Path,
    report: Callable[[str], None] | None = None,
) -> list[TokenSequence]:
    """Completions of the prompts, kept in the file `path` (`pathlib.Path`) for a run that goes on."""
    settings = {
        "model": args.model_name_or_path,
        "prompts": prompts,
        "max_length": args.max_length,
        "batch_size": args.batch_size,
        "seed": args.seed,
    }
    if path.exists():
        kept = read_json_object(path, MAX_SEQUENCES_BYTES)
        if kept.get("settings") == settings:
            return [TokenSequence(token_ids, prompt_length) for prompt_length, token_ids in kept["sequences"]]
    sequences = generate_sequences(
        model,
        tokenizer,
        prompts,
        max_length=args.max_length,
        batch_size=args.batch_size,
        seed=args.seed,
        generator=args.generator,
        model_path=args.model_name_or_path,
        vllm_gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        report=report,
    )
    if process_rank()[0] == 0:
        rows = [[sequence.prompt_length, sequence.token_ids] for sequence in sequences]
        text = dump_json_object({"settings": settings, "sequences": rows}, path.name, MAX_SEQUENCES_BYTES)
        write_atomically(path, text)
    return sequences


def load_prompts(args: CalibrateArguments) -> list[Any]:
    """The first prompts or texts that `args` ([`CalibrateArguments`]) name."""
    name = args.texts or args.dataset
    source = Path(name)
    if args.texts and not source.is_file():
        raise ValueError(f"--texts must be a file, got {name!r}.")
    if source.is_file() and source.suffix == ".txt":
        text = source.read_text(encoding="utf-8")
        # A text is one text; prompts are one a line.
        return [text] if args.texts else [line for line in text.splitlines() if line.strip()][: args.num_prompts]
    kind = "JSON Lines (or .txt)" if source.is_file() else "a dataset"
    dataset = read_dataset(name, args.dataset_split, kind=kind)
    columns = ("text",) if args.texts else (args.prompt_column,) if args.prompt_column else PROMPT_COLUMNS
    column = choose_column(dataset, name, columns, "" if args.texts else "Name one with --prompt_column.")
    prompts = dataset[: args.num_prompts][column]
    kinds = {_kind(prompt) for prompt in prompts}
    if len(kinds) != 1 or kinds - ({"text"} if args.texts else {"text", "conversation"}):
        bad = next((i for i, prompt in enumerate(prompts) if _kind(prompt) != "text"), 0)
        raise ValueError(
            f"Column {column} of {name} must hold texts{'' if args.texts else ', or conversations throughout'}; row "
            f"{bad} has {str(prompts[bad] if prompts else None)!r:.100}."
        )
    return prompts


def _kind(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return "text"
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) and "role" in turn for turn in prompt):
        return "conversation"
    return None
