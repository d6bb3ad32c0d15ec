"""`sparrow-trl search`: arguments, the model and the texts; [`recipe_search`] does the work. Needs no TRL."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from .acceptance_sweep import TokenSequence, process_rank
from .json_files import read_json_object
from .layer_budgets import PAGE_LADDER
from .recipe_search import RecipeChoices, plan_passes, search_recipe
from .schedule import LANDMARK_DTYPES, LANDMARKS_PER_PAGE, PAGE_SCORES


MEASUREMENTS_NAME = "measurements"
MAX_SEQUENCES_BYTES = 2**28
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class SearchArguments:
    """
    Find the recipe and the per-layer page budgets that read the fewest bytes while the tail acceptance holds. Writes
    sparsity_schedule.json, recipe_search.json, recipe_search.md and a picture. The same command goes on after an
    interruption. Run under `accelerate launch` to use several processes.

    Args:
        model_name_or_path (`str`):
            Folder or Hub id of the model.
        output_dir (`str`):
            Folder for the results.
        texts (`str`, *optional*):
            Texts to measure on: text file, or JSON Lines file with a column `text`.
        sequences (`str`, *optional*):
            The sequences.json of `sparrow-trl calibrate --dataset` instead.
    """

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of the model."})
    output_dir: str = field(default="search", metadata={"help": "Folder for the results."})
    texts: str | None = field(
        default=None, metadata={"help": "Texts to measure on: a .txt file, or JSON Lines with a column `text`."}
    )
    sequences: str | None = field(
        default=None, metadata={"help": "Sequences to measure on: the sequences.json of calibrate --dataset."}
    )
    num_sequences: int = field(default=8, metadata={"help": "Sequences to fit on, from the first on."})
    heldout: int = field(default=0, metadata={"help": "Sequences after those, on which the result is checked."})
    prompt_tokens: int = field(
        default=256, metadata={"help": "With texts: tokens at the start of each that stand for the prompt."}
    )
    max_length: int = field(default=4096, metadata={"help": "Most tokens of a sequence, prompt included."})
    bin_tokens: int = field(default=2048, metadata={"help": "Tokens in a bin of cached length."})
    target_acceptance: float = field(default=0.86, metadata={"help": "Tail acceptance to hold."})
    margin: float = field(
        default=0.005, metadata={"help": "Guard against noise: what a tail must have above the target."}
    )
    confidence: float | None = field(
        default=None,
        metadata={"help": "Guard against noise: judge by the lower end of a tail's bootstrap interval, as 0.9."},
    )
    min_tokens: int = field(default=200, metadata={"help": "Tokens that a bin's tail needs to count."})
    dense_layers: list[str] = field(
        default_factory=lambda: ["0,1", "none"],
        metadata={"help": "Layers that may stay dense, such as: 0,1 none."},
    )
    page_scores: list[str] = field(
        default_factory=lambda: list(PAGE_SCORES), metadata={"help": "Scores to try: mean_query, group_softmax."}
    )
    landmark_dtypes: list[str] = field(
        default_factory=lambda: list(LANDMARK_DTYPES), metadata={"help": "Landmark types to try: auto, fp8_e4m3."}
    )
    landmarks_per_page: list[int] = field(
        default_factory=lambda: list(LANDMARKS_PER_PAGE), metadata={"help": "Landmarks of a page to try: 1, 2, 4."}
    )
    page_sizes: list[int] = field(default_factory=lambda: [16], metadata={"help": "Tokens in a page to try."})
    page_ladder: list[int] = field(
        default_factory=lambda: list(PAGE_LADDER),
        metadata={"help": "Budgets in pages of 16 tokens, reserved ones included."},
    )
    recipe_sequences: int = field(default=4, metadata={"help": "Sequences on which recipes are compared."})
    sensitivity_sequences: int = field(default=2, metadata={"help": "Sequences on which sensitivity is measured."})
    layer_group_size: int = field(
        default=1, metadata={"help": "Adjacent layers whose sensitivity is measured together."}
    )
    num_groups: int = field(default=4, metadata={"help": "Groups of layers with a table of their own."})
    max_passes: int = field(
        default=600, metadata={"help": "Most passes of one schedule over one sequence, but for the held-out ones."}
    )
    plan_only: bool = field(default=False, metadata={"help": "Print how many passes the search takes, and stop."})
    dtype: str = field(default="auto", metadata={"help": "Type of the weights: auto, bfloat16, float16 or float32."})
    chunk_size: int = field(default=256, metadata={"help": "Positions whose logits are held at once."})
    hardware: str = field(default="H200", metadata={"help": "Device of the predicted speedups."})
    batch_size: int = field(default=32, metadata={"help": "Sequences that decode together in these."})

    def __post_init__(self):
        check_sources(self)
        if self.num_sequences < 1 or self.heldout < 0:
            raise ValueError(
                f"--num_sequences must be positive and --heldout not negative, got {self.num_sequences} and "
                f"{self.heldout}."
            )

    @property
    def choices(self) -> RecipeChoices:
        """[`~sparrow_trl.recipe_search.RecipeChoices`]: What the search chooses from."""
        return RecipeChoices(
            dense_layers=[_layers(text) for text in self.dense_layers],
            page_scores=self.page_scores,
            landmark_dtypes=self.landmark_dtypes,
            landmarks_per_page=self.landmarks_per_page,
            page_sizes=self.page_sizes,
        )


def run_search(arguments: list[str]) -> None:
    """
    Run the command.

    Args:
        arguments (`list[str]`): Arguments after the name of the command; `--config FILE` reads them from YAML.

    Raises:
        ValueError: for arguments, texts or a model that nothing can be searched for.
    """
    args = parse_arguments(arguments)
    choices = args.choices
    from accelerate import PartialState
    from transformers import AutoConfig, AutoModelForCausalLM

    stages = {name: getattr(args, name) for name in ("recipe_sequences", "sensitivity_sequences", "layer_group_size")}
    plan = plan_passes(
        choices,
        num_layers=AutoConfig.from_pretrained(args.model_name_or_path).get_text_config().num_hidden_layers,
        num_sequences=args.num_sequences,
        num_levels=len(args.page_ladder),
        max_passes=args.max_passes,
        held_out_sequences=args.heldout,
        **stages,
    )
    if args.plan_only:
        print_lines(*(f"{count:5d} {name}" for name, count in plan.items()), f"{sum(plan.values()):5d} in total")
        return
    sequences = read_sequences(args)
    wanted = args.num_sequences + args.heldout
    if len(sequences) < wanted:
        raise ValueError(
            f"There are {len(sequences)} sequences of at least {args.prompt_tokens + 2} tokens, fewer than the "
            f"{wanted} of --num_sequences and --heldout together."
        )
    state = PartialState()
    is_main = process_rank()[0] == 0

    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype).to(state.device)
    try:
        result = search_recipe(
            model,
            sequences[: args.num_sequences],
            held_out=sequences[args.num_sequences : wanted],
            choices=choices,
            page_ladder=args.page_ladder,
            bin_tokens=args.bin_tokens,
            target_acceptance=args.target_acceptance,
            margin=args.margin,
            confidence=args.confidence,
            min_tokens=args.min_tokens,
            num_groups=args.num_groups,
            max_passes=args.max_passes,
            hardware=args.hardware,
            batch_size=args.batch_size,
            model_name=args.model_name_or_path,
            measurements_folder=folder / MEASUREMENTS_NAME,
            chunk_size=args.chunk_size,
            report=print_once,
            **stages,
        )
    except KeyboardInterrupt:
        print_once(f"Interrupted. What was measured is in {folder}: the same command goes on from there.")
        raise
    if not is_main:
        return
    from .recipe_search_report import search_tables

    for table in search_tables(result):
        print_once(table.to_markdown() + "\n")
    result.save(folder)
    print_once(
        f"The found schedule reads {result.ratio:.1%} of the bytes of the paper's recipe. Wrote {folder}/: the "
        "schedule (give the folder as sparsity_schedule), the search as JSON and Markdown, and a picture."
    )


def parse_arguments(arguments: list[str], kind: type = SearchArguments, command: str = "search"):
    """
    The arguments of a command.

    Args:
        arguments (`list[str]`): Arguments after the name of the command.
        kind (`type`, *optional*): Dataclass of its arguments.
        command (`str`, *optional*): Its name.

    Returns:
        A `kind`, with what `arguments` leave out from the YAML file of `--config`.
    """
    parser = HfArgumentParser(kind, prog=f"sparrow-trl {command}")
    parser.add_argument("--config", metavar="FILE", help="YAML file of arguments.")
    known = {action.dest for action in parser._actions}
    path = None
    for index, argument in enumerate(arguments):
        if argument == "--config" or argument.startswith("--config="):
            path = argument.partition("=")[2] or next(iter(arguments[index + 1 :]), None)
    if path is not None:
        settings = _read_yaml(path)
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ValueError(f"{path} has unknown arguments: {', '.join(map(str, unknown))}.")
        parser.set_defaults(**settings)
        for action in parser._actions:
            action.required = action.required and action.dest not in settings
    values = vars(parser.parse_args(arguments))
    values.pop("config")
    return kind(**values)


def check_sources(args) -> None:
    """Refuse, with a `ValueError`, arguments (`args`) that say no way to get sequences, or no type of weights."""
    if (args.texts is None) == (args.sequences is None):
        raise ValueError("Give either --texts or --sequences.")
    if args.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {args.dtype!r}.")
    if args.texts is not None and not 1 <= args.prompt_tokens <= args.max_length - 2:
        raise ValueError(
            f"--prompt_tokens must be between 1 and {args.max_length - 2}, two less than --max_length, got "
            f"{args.prompt_tokens}."
        )


def read_sequences(args) -> list[TokenSequence]:
    """The sequences that the arguments (`args`) name, or those cut from their texts by the model's tokenizer."""
    if args.sequences is not None:
        return load_sequences(Path(args.sequences), args.max_length)
    from transformers import AutoTokenizer

    return cut_texts(AutoTokenizer.from_pretrained(args.model_name_or_path), load_texts(args.texts), args)


def load_texts(path: str) -> list[str]:
    """Texts of a `.txt` file, which is one, or of the column `text` of the JSON Lines file `path` (`str`)."""
    source = Path(path)
    if not source.is_file():
        raise ValueError(f"--texts must be a file, got {path!r}.")
    content = source.read_text(encoding="utf-8")
    if source.suffix == ".txt":
        return [content]
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} is no JSON Lines file: line {number}: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise ValueError(f"Line {number} of {path} must be an object with a text in the column `text`.")
            texts.append(row["text"])
    return texts


def cut_texts(tokenizer, texts: list[str], args) -> list[TokenSequence]:
    """The first `max_length` tokens of each text that is long enough, or pieces of that length of a single one."""
    rows = tokenizer(texts)["input_ids"] if texts else []
    if len(rows) == 1:
        rows = [rows[0][start : start + args.max_length] for start in range(0, len(rows[0]), args.max_length)]
    rows = [row[: args.max_length] for row in rows if len(row) >= args.prompt_tokens + 2]
    return [TokenSequence(row, args.prompt_tokens) for row in rows]


def load_sequences(path: Path, max_length: int) -> list[TokenSequence]:
    """Sequences that `sparrow-trl calibrate` generated, cut to `max_length` (`int`), from its file `path`."""
    try:
        rows = read_json_object(path, MAX_SEQUENCES_BYTES)["sequences"]
        sequences = [TokenSequence(token_ids[:max_length], prompt_length) for prompt_length, token_ids in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no sequences of sparrow-trl calibrate: {error}") from error
    return [sequence for sequence in sequences if len(sequence.token_ids) >= sequence.prompt_length + 2]


def print_lines(*lines: str) -> None:
    """Print `lines` (`str`) at once, whatever the output is."""
    from sys import stdout

    stdout.write("\n".join(lines) + "\n")
    stdout.flush()


def print_once(text: str) -> None:
    """Print `text` (`str`), on the first process alone."""
    if process_rank()[0] == 0:
        print_lines(text)


def _layers(text: Any) -> list[int]:
    if text == "none":
        return []
    try:
        return [int(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"--dense_layers takes lists of layers such as 0,1, or none; got {text!r}.") from None


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"--config needs a YAML file of arguments: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"--config needs a YAML file of arguments, got {path}.")
    return settings
