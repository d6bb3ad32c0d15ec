"""`sparrow-trl calibrate`: arguments, the model and the texts; [`calibration`] does the work."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl import TrlParser

from .schedule import SparsityScheduleConfig
from .tables import make_console


CHECKPOINT_NAME = "measurement.json"
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
        metadata={"help": "Texts to measure on, without generating: a text file, or JSON Lines with a column `text`."},
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
    batch_size: int = field(default=8, metadata={"help": "Prompts to complete at once."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})

    def __post_init__(self):
        if (self.dataset is None) == (self.texts is None):
            raise ValueError("Give either --dataset, whose prompts are completed, or --texts.")
        if self.num_prompts < 1:
            raise ValueError(f"--num_prompts must be positive, got {self.num_prompts}.")
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
    (args,) = parser.parse_args_and_config(args=arguments)
    recipe = args.recipe  # refused before the model is loaded

    from accelerate import PartialState
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .acceptance_sweep import TokenSequence, generate_sequences
    from .calibration import fit_schedule

    state = PartialState()
    console = make_console()

    def report(text: str) -> None:
        if state.is_main_process:
            console.print(text)

    prompts = load_prompts(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype).to(state.device)
    if args.texts is None:
        sequences = generate_sequences(
            model, tokenizer, prompts, max_length=args.max_length, batch_size=args.batch_size, seed=args.seed
        )
    else:
        ids = tokenizer(prompts, truncation=True, max_length=args.max_length)["input_ids"]
        short = sum(len(row) < args.prompt_tokens + 2 for row in ids)
        if short:
            raise ValueError(
                f"{short} of {len(ids)} texts have fewer than {args.prompt_tokens + 2} tokens: --prompt_tokens "
                f"({args.prompt_tokens}) and two more. Leave them out, or lower --prompt_tokens."
            )
        sequences = [TokenSequence(row, args.prompt_tokens) for row in ids]
    report(f"{len(sequences)} sequences of {min(len(s.token_ids) for s in sequences)} to "
           f"{max(len(s.token_ids) for s in sequences)} tokens.")  # fmt: skip
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    result = fit_schedule(
        model,
        sequences,
        recipe=recipe,
        page_counts=args.page_counts or None,
        bin_tokens=args.bin_tokens,
        target_acceptance=args.target_acceptance,
        min_tokens=args.min_tokens,
        allow_dense=args.allow_dense,
        model_name=args.model_name_or_path,
        checkpoint_path=folder / CHECKPOINT_NAME,
        report=report,
    )
    if not state.is_main_process:
        return
    result.save(folder)
    result.to_table().print(console)
    for entry in result.short_bins:
        report(
            f"From {entry.start:,} tokens on the tail is {entry.tail:.4f} even with the largest budget. Measure "
            "larger ones (--page_counts), or allow these bins to be dense (--allow_dense True)."
        )
    report(f"Wrote {folder}/: the schedule (give the folder as sparsity_schedule), the acceptance table and pictures.")


def load_prompts(args: CalibrateArguments) -> list[Any]:
    """The first prompts or texts that `args` ([`CalibrateArguments`]) name."""
    from datasets import load_dataset, load_from_disk

    source = Path(args.texts or args.dataset)
    if args.texts and not source.is_file():
        raise ValueError(f"--texts must be a file, got {args.texts!r}.")
    if source.suffix == ".txt":
        rows = [source.read_text(encoding="utf-8")]
        return rows
    if source.is_file():
        dataset = load_dataset("json", data_files=str(source), split="train")
    elif (source / "dataset_info.json").exists() or (source / "dataset_dict.json").exists():
        dataset = load_from_disk(str(source))
        dataset = dataset[args.dataset_split] if isinstance(dataset, dict) else dataset
    else:
        dataset = load_dataset(args.dataset, split=args.dataset_split)
    columns = ("text",) if args.texts else (args.prompt_column,) if args.prompt_column else PROMPT_COLUMNS
    column = next((name for name in columns if name in dataset.column_names), None)
    if column is None:
        raise ValueError(
            f"{args.texts or args.dataset} has no column {' or '.join(columns)}; its columns are "
            f"{', '.join(dataset.column_names)}. Name one with --prompt_column."
        )
    return dataset[: args.num_prompts][column]
