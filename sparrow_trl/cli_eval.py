"""`sparrow-trl eval`: arguments, the model and the problems; [`evaluation`] does the work."""

from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from math import inf
from numbers import Integral, Real
from pathlib import Path

from .cli_search import parse_arguments, print_once
from .dataset_rows import choose_column, read_dataset
from .evaluation import Problem, check_answers, evaluate_problems
from .json_files import dump_json_object, write_atomically
from .number_checks import check_numbers
from .schedule import SparsityScheduleConfig
from .versions import installed_version


# Sets that have a problem beside a prompt have often put the prompt into some model's chat template.
PROMPT_COLUMNS = ("question", "problem", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer", "solution")
INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
RESULT_NAME = "eval.json"


@dataclass
class EvalArguments:
    """
    Accuracy on math problems with dense or sparse generation: avg@k and pass@k with confidence intervals, in
    eval.json. The same command goes on after an interruption, and with more samples from those that are there. Run
    under `accelerate launch` to use several processes.

    Args:
        model_name_or_path (`str`):
            Folder or Hub id of the model.
        dataset (`str`):
            JSON Lines file, or Hub id or folder of a dataset, with problems and answers.
    """

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of the model."})
    dataset: str = field(metadata={"help": "JSON Lines file, or Hub id or folder of a dataset."})
    output_dir: str = field(default="eval", metadata={"help": "Folder for the results and the samples."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a dataset that is no file."})
    dataset_split: str = field(default="test", metadata={"help": "Split of a dataset that is no file."})
    prompt_column: str | None = field(
        default=None, metadata={"help": f"Column of the problems, by default {', '.join(PROMPT_COLUMNS)}."}
    )
    answer_column: str | None = field(
        default=None, metadata={"help": f"Column of the answers, by default {', '.join(ANSWER_COLUMNS)}."}
    )
    num_problems: int | None = field(default=None, metadata={"help": "First problems to use, by default all."})
    instruction: str = field(default=INSTRUCTION, metadata={"help": "Line behind problems that are texts."})
    sparsity_schedule: str | None = field(
        default=None,
        metadata={"help": "Schedule of sparse generation: a preset, a file or folder, or a Hub id. Default: dense."},
    )
    num_samples: int = field(default=8, metadata={"help": "Completions of each problem."})
    k: list[int] = field(default_factory=list, metadata={"help": "Which pass@k to estimate beside avg@num_samples."})
    max_length: int = field(default=4096, metadata={"help": "Most tokens of a sequence, prompt included."})
    temperature: float = field(default=0.6, metadata={"help": "Temperature; 0 takes the likeliest token each time."})
    top_p: float = field(default=0.95, metadata={"help": "Share of the probability that is sampled from."})
    dtype: str = field(default="auto", metadata={"help": "Type of the weights: auto, bfloat16, float16 or float32."})
    vllm_gpu_memory_utilization: float = field(default=0.5, metadata={"help": "Share of the GPU for the engine."})
    seed: int = field(default=0, metadata={"help": "Seed."})

    def __post_init__(self):
        check_numbers(
            self,
            (
                ("num_samples", Integral, 1, 10_000),
                ("num_problems", Integral, 1, inf),
                ("max_length", Integral, 4, inf),
                ("temperature", Real, 0, 10),
                ("top_p", Real, 0.01, 1),
            ),
            optional=("num_problems",),
        )
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"At --temperature 0 all of the {self.num_samples} samples would be the same. Set --num_samples 1."
            )
        self.k = self.k if isinstance(self.k, list) else [self.k]
        bad = [k for k in self.k if not 1 <= k <= self.num_samples]
        if bad:
            raise ValueError(f"--k must lie between 1 and --num_samples ({self.num_samples}), got {bad}.")


def load_problems(args: EvalArguments) -> list[Problem]:
    """
    The problems that `args` ([`EvalArguments`]) name.

    Raises:
        ValueError: when they cannot be read, or columns are missing.
    """
    dataset = read_dataset(args.dataset, args.dataset_split, args.dataset_config, kind="problems")
    columns = [
        choose_column(dataset, args.dataset, choices if name is None else (name,), f"Name one with --{option}.")
        for option, name, choices in (
            ("prompt_column", args.prompt_column, PROMPT_COLUMNS),
            ("answer_column", args.answer_column, ANSWER_COLUMNS),
        )
    ]
    rows = dataset.select_columns(columns)
    if args.num_problems is not None:
        rows = rows.select(range(min(args.num_problems, len(rows))))
    problems = []
    for index, row in enumerate(rows):
        prompt, answer = (row[column] for column in columns)
        answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
        if not prompt or not isinstance(prompt, (str, list)):
            raise ValueError(
                f"Row {index} of {args.dataset} has no text or conversation as {columns[0]}: {prompt!r:.100}"
            )
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
            raise ValueError(f"Row {index} of {args.dataset} has no single answer as {columns[1]}: {answer!r:.100}")
        # GSM8K writes the number it asks for behind its solution.
        problems.append(Problem(prompt, str(answer).rpartition("####")[2].strip()))
    return problems


def check_texts(problems: list[Problem], tokenizer) -> None:
    """
    Refuse texts that are in a chat template already.

    Raises:
        ValueError: for a text with a special token of the `tokenizer` in it.
    """
    for index, problem in enumerate(problems):
        text = problem.prompt if isinstance(problem.prompt, str) else ""
        token = next((token for token in tokenizer.all_special_tokens if token in text), None)
        if token is not None:
            raise ValueError(
                f"The problem in row {index} has the special token {token!r}: it is a prompt in a chat template, and "
                "would get another one. Name a column of plain problems with --prompt_column."
            )


def as_prompt(problem: str | list, instruction: str, chat: bool) -> str | list[dict[str, str]]:
    """
    What the model is asked: a conversation as it is, a text with the instruction behind it.

    Args:
        problem (`str` or `list`): The problem.
        instruction (`str`): Line behind a text.
        chat (`bool`): Whether the model has a chat template, for which a text becomes a user's message.
    """
    if not isinstance(problem, str):
        return problem
    text = f"{problem}\n{instruction}\n" if instruction else problem
    return [{"role": "user", "content": text.rstrip()}] if chat else text


def run_eval(arguments: list[str]) -> None:
    """
    Run the command.

    Args:
        arguments (`list[str]`): Arguments after the name of the command; `--config FILE` reads them from YAML.

    Raises:
        ValueError: for arguments, problems or a model that nothing can be evaluated with.
    """
    args = parse_arguments(arguments, EvalArguments, "eval")
    schedule = None if args.sparsity_schedule is None else SparsityScheduleConfig.resolve(args.sparsity_schedule)
    problems = load_problems(args)
    check_answers([problem.answer for problem in problems])
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # One process may decode its problems long after the others have theirs.
    state = PartialState(timeout=timedelta(days=7))

    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    check_texts(problems, tokenizer)
    chat = tokenizer.chat_template is not None
    problems = [Problem(as_prompt(entry.prompt, args.instruction, chat), entry.answer) for entry in problems]
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype).to(state.device)
    folder = Path(args.output_dir)
    try:
        result = evaluate_problems(
            model,
            tokenizer,
            problems,
            num_samples=args.num_samples,
            max_length=args.max_length,
            schedule=schedule,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            folder=folder / "samples",
            model_path=args.model_name_or_path,
            vllm_gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            report=print_once,
        )
    except KeyboardInterrupt:
        print_once(f"Interrupted. The samples are in {folder / 'samples'}: the same command goes on from there.")
        raise
    generation = "dense generation" if schedule is None else f"sparse generation, {args.sparsity_schedule}"
    table = result.to_table(f"{Path(args.dataset).name}, {len(problems)} problems, {generation}", args.k)
    values = {
        **{name: getattr(args, name) for name in ("model_name_or_path", "dataset", "sparsity_schedule", "max_length")},
        **{name: getattr(args, name) for name in ("temperature", "top_p", "seed")},
        **result.to_dict(args.k),
        "versions": {
            "vllm": installed_version("vllm"),
            **{name: version(name) for name in ("sparrow-trl", "trl", "transformers", "torch")},
        },
    }
    if state.is_main_process:
        write_atomically(folder / RESULT_NAME, dump_json_object(values, RESULT_NAME))
    print_once(f"{table.to_markdown()}\n\nWrote {folder / RESULT_NAME}.")
