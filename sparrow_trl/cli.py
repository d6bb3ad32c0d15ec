"""The command `sparrow-trl`. Each subcommand is thin: it reads its arguments and calls the module of its name."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .cli_hub import add_hub_commands


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments, by default those of the process.

    Returns:
        `int`: Exit status.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    try:
        if args.command == "calibrate":
            from .cli_calibrate import run_calibrate

            run_calibrate(rest)
        elif args.command == "search":
            from .cli_search import run_search

            run_search(rest)
        elif args.command == "distill":
            from .cli_distill import run_distill

            run_distill(rest)
        elif args.command == "eval":
            from .cli_eval import run_eval

            run_eval(rest)
        elif args.command == "serve":
            from .cli_serve import run_serve

            run_serve(rest)
        elif rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        else:
            args.run(args)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"sparrow-trl {args.command}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparrow-trl", description="Sparse rollouts for TRL.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_bench(commands)
    # Its arguments are fields of a dataclass, which may come from a file of settings as well.
    commands.add_parser("calibrate", add_help=False, help="find the cheapest schedule that keeps the tail acceptance")
    commands.add_parser("search", add_help=False, help="find the cheapest recipe and budgets of layers that keep it")
    commands.add_parser("distill", add_help=False, help="distil a LoRA that lets the rollouts read less")
    commands.add_parser("eval", add_help=False, help="measure avg@k and pass@k with dense or sparse generation")
    commands.add_parser("serve", add_help=False, help="run `vllm serve` with sparse attention, for TRL's server mode")
    _add_plot(commands)
    _add_show(commands)
    _add_estimate(commands)
    add_hub_commands(commands)
    return parser


def _add_bench(commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure decode steps of dense and sparse rollouts",
        description="Measure decode steps of dense (vLLM's own attention) and sparse rollouts on the same workload.",
    )
    bench.set_defaults(run=_run_bench)
    add = bench.add_argument
    add("--model", required=True, help="qwen3-1.7b, -4b, -8b or -14b (dummy weights), a folder, or a Hub id")
    add(
        "--preset",
        dest="schedules",
        action="append",
        type=lambda text: ("preset", text),
        metavar="NAME",
        help="published schedule to measure, such as qwen3-1.7b-0.86; repeatable",
    )
    add(
        "--schedule",
        dest="schedules",
        action="append",
        type=lambda text: ("pretrained", text),
        metavar="PATH",
        help="folder, file or Hub id of a schedule to measure, which gets the folder's name; repeatable",
    )
    add(
        "--output",
        type=Path,
        default=Path("bench"),
        help="folder for bench.json, bench.png and the engines' logs (bench)",
    )
    add(
        "--prepare",
        action="store_true",
        help="only start and stop every engine, all at once and each with a small KV cache, so that the same command "
        "without this option finds everything compiled",
    )

    what = bench.add_argument_group("what to measure")
    add = what.add_argument
    add("--workload", action="append", type=_workload, metavar="BxC", help="B sequences of C tokens; repeatable")
    add("--batch", type=_batch, metavar="N", help="sequences at each --context, or 'auto': as many as fit")
    add("--context", type=_contexts, metavar="C[,C...]", help="cached tokens, each measured with --batch sequences")
    add("--profile", choices=["rollout"], help="time a whole rollout, with --batch sequences or as many as fit")
    add("--max-length", type=_positive, default=32_768, metavar="TOKENS", help="length of that rollout (%(default)s)")
    add("--points", type=_positive, default=12, metavar="N", help="contexts at which it is timed (%(default)s)")
    add("--variant", choices=["dense", "sparse", "both"], default="both", help="which to run (%(default)s)")
    add("--steps", type=_positive, default=16, metavar="N", help="decode steps in a timed block (%(default)s)")
    add("--blocks", type=_positive, default=3, metavar="N", help="timed blocks of a workload (%(default)s)")
    add(
        "--processes",
        type=_positive,
        default=1,
        metavar="N",
        help="processes to time each variant in, in turn: shows how much they differ (%(default)s)",
    )
    add("--warmup", type=_positive, default=16, metavar="N", help="decode steps before them (%(default)s)")
    add("--breakdown", action="store_true", help="time each kernel at the workloads as well (GPU)")

    engine = bench.add_argument_group("engine")
    add = engine.add_argument
    add("--model-runner", choices=["v1", "v2"], help="vLLM's model runner; by default vLLM chooses")
    add("--load-format", default="dummy", help="dummy weights, or auto for the model's (%(default)s)")
    add(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float16", "float32"],
        help="of weights and KV cache (%(default)s)",
    )
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="of the GPU's memory (%(default)s)")
    add("--kv-cache-memory", type=float, metavar="GIB", help="size of the KV cache, instead of what is left")
    add("--block-size", type=_positive, metavar="TOKENS", help="tokens in a block of the KV cache")
    add("--max-model-len", type=_positive, metavar="TOKENS", help="longest sequence; by default what is measured")
    add("--enforce-eager", action="store_true", help="run without CUDA graphs")
    add("--no-compile", action="store_true", help="run without torch.compile, for a quicker start")
    add("--prefill", action="store_true", help="compute the prompts instead of filling the KV cache (always on CPU)")


def _run_bench(args: argparse.Namespace) -> None:
    from .versions import check_version

    check_version("vllm")
    from .bench import PICTURE_NAME, RESULT_NAME, BenchOptions, prepare_bench, run_bench
    from .bench_report import print_tables
    from .tables import make_console

    rollout = args.profile == "rollout"
    if args.context and args.batch is None:
        raise ValueError("--context needs --batch: a number of sequences, or 'auto'.")
    if args.batch is not None and not args.context and not rollout:
        raise ValueError("--batch needs --context or --profile rollout.")
    contexts, auto = args.context or [], args.batch == "auto"
    console = make_console()
    options = BenchOptions(
        model=args.model,
        schedules=_load_schedules(args.schedules or []),
        workloads=[*(args.workload or []), *([] if auto else [(args.batch, context) for context in contexts])],
        auto_contexts=contexts if auto else [],
        rollout_length=args.max_length if rollout else None,
        rollout_batch=None if auto else args.batch,
        rollout_points=args.points,
        variant=args.variant,
        steps=args.steps,
        blocks=args.blocks,
        processes=args.processes,
        warmup=args.warmup,
        breakdown=args.breakdown,
        prefill=args.prefill,
        model_runner=args.model_runner,
        load_format=args.load_format,
        dtype=args.dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=None if args.kv_cache_memory is None else int(args.kv_cache_memory * 2**30),
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        enforce_eager=args.enforce_eager,
        compile=not args.no_compile,
    )
    if args.prepare:
        prepare_bench(options, args.output, console.print)
        return
    print_tables(run_bench(options, args.output, console.print), console)
    console.print(f"Wrote {args.output / RESULT_NAME} and {args.output / PICTURE_NAME}.")


SCHEDULE_HELP = "name of a preset, such as qwen3-1.7b-0.86, a folder, a file, or a Hub id"


def _add_show(commands) -> None:
    show = commands.add_parser(
        "show",
        help="print a schedule as a table",
        description="Print a schedule: what a query reads at each cached length.",
    )
    show.set_defaults(run=_run_show)
    add = show.add_argument
    add("schedule", help=SCHEDULE_HELP)
    add("--plot", type=Path, metavar="FILE", help="also draw it to this picture, such as schedule.png")


def _run_show(args: argparse.Namespace) -> None:
    from .pictures import save_figure
    from .schedule import SparsityScheduleConfig
    from .schedule_report import describe_recipe, draw_schedule, schedule_tables
    from .tables import make_console

    schedule = SparsityScheduleConfig.resolve(args.schedule)
    if args.plot:
        save_figure(draw_schedule(schedule), args.plot)
    console = make_console()
    console.print(describe_recipe(schedule))
    for table in schedule_tables(schedule):
        table.print(console)
    if args.plot:
        console.print(f"Wrote {args.plot}.")


def _add_plot(commands) -> None:
    plot = commands.add_parser(
        "plot",
        help="draw acceptance tables",
        description="Draw acceptance tables: the tail acceptance over the cached length, the distribution behind one "
        "tail, and what several recipes read for the tail they keep.",
    )
    plot.set_defaults(run=_run_plot)
    add = plot.add_argument
    add("tables", nargs="+", type=Path, metavar="TABLE", help="acceptance_table.json, or the folder that holds it")
    add("--output", type=Path, default=Path("plots"), metavar="FOLDER", help="folder for the pictures (%(default)s)")
    add("--schedule", help=f"schedule to mark: {SCHEDULE_HELP}")
    add("--pages", type=_positive, metavar="N", help="with --length: draw the distribution under this budget")
    add("--length", type=_positive, metavar="TOKENS", help="at this cached length")
    add("--model", help="of several tables, to draw tails over what is read: as in estimate")
    add("--min-tokens", type=_positive, default=200, metavar="N", help="that a tail needs to count (%(default)s)")


def _run_plot(args: argparse.Namespace) -> None:
    from .acceptance_plots import plot_costs, plot_distribution, plot_tails
    from .acceptance_table import AcceptanceTable
    from .bench_plan import load_config
    from .bench_traffic import ModelShape
    from .calibration import TABLE_NAME
    from .pictures import save_figure
    from .schedule import SparsityScheduleConfig

    if (args.pages is None) != (args.length is None):
        raise ValueError("A distribution needs both --pages and --length.")
    paths = [path / TABLE_NAME if path.is_dir() else path for path in args.tables]
    names = [path.parent.name if path.name == TABLE_NAME else path.stem for path in map(Path.resolve, paths)]
    if len(set(names)) < len(names):
        raise ValueError(f"Each table needs a name of its own, got {', '.join(names)}. Rename their folders.")
    schedule = SparsityScheduleConfig.resolve(args.schedule) if args.schedule else None
    tables = {name: AcceptanceTable.load(path) for name, path in zip(names, paths, strict=True)}
    figures = {}
    for name, table in tables.items():
        figures[f"{name}-tails"] = plot_tails(table, schedule, min_tokens=args.min_tokens)
        if args.pages is not None:
            if args.pages not in table.page_counts:
                raise ValueError(f"{name} has no budget of {args.pages} pages, but {table.page_counts}.")
            row, column = table.page_counts.index(args.pages), table.schedule(0).bin_index(args.length)
            if column >= table.num_bins:
                raise ValueError(f"{name} ends at {table.num_bins * table.bin_tokens} tokens, before {args.length}.")
            figures[f"{name}-distribution"] = plot_distribution(table, row, column)
    if args.model is not None:
        shape = ModelShape.from_config(load_config(args.model))
        figures["costs"] = plot_costs(tables, shape, min_tokens=args.min_tokens)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        save_figure(figure, args.output / f"{name}.png")
        sys.stdout.write(f"Wrote {args.output / name}.png\n")


def _add_estimate(commands) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="predict what a schedule gains on a model",
        description="Predict the speedup of sparse rollouts over dense ones, by the Sparrow paper's cost formula and "
        "by the least time of each decode step: what it reads over the bandwidth, or its computation.",
    )
    estimate.set_defaults(run=_run_estimate)
    add = estimate.add_argument
    add("--model", required=True, help="qwen3-1.7b, -4b, -8b or -14b, a folder with a config.json, or a Hub id")
    add(
        "--schedule",
        dest="schedules",
        action="append",
        required=True,
        metavar="S",
        help=f"{SCHEDULE_HELP}; repeatable",
    )
    add("--hardware", default="H200", help="H200, H100, A100, B200 or L40S (%(default)s)")
    add("--peak-tflops", type=float, metavar="TFLOPS", help="with --bandwidth: figures of another device (bfloat16)")
    add("--bandwidth", type=float, metavar="TB/S", help="of its memory")
    add("--batch", type=_positive, default=32, metavar="N", help="sequences that decode together (%(default)s)")
    add("--samples", type=_positive, default=8, metavar="N", help="samples of a prompt in the formula (%(default)s)")
    add("--prompt-tokens", type=int, default=0, metavar="TOKENS", help="tokens of a prompt (%(default)s)")
    add("--output-tokens", type=_positive, default=32_768, metavar="TOKENS", help="tokens generated (%(default)s)")
    add("--overhead-ms", type=float, default=0.0, metavar="MS", help="of a step, beside what it reads (%(default)s)")
    add("--bandwidth-share", type=float, default=1.0, metavar="SHARE", help="achievable share of it (%(default)s)")


def _run_estimate(args: argparse.Namespace) -> None:
    from .bench_plan import load_config
    from .cost_model import CostShape, Hardware, predicted_speedup
    from .schedule import SparsityScheduleConfig
    from .schedule_report import estimate_table
    from .tables import make_console

    if (args.peak_tflops is None) != (args.bandwidth is None):
        raise ValueError("Another device needs both figures: --peak-tflops and --bandwidth.")
    hardware = args.hardware
    if args.bandwidth is not None:
        hardware = Hardware("the given device", args.peak_tflops * 1e12, args.bandwidth * 1e12)
    schedules = {name: SparsityScheduleConfig.resolve(name) for name in args.schedules}
    shape = CostShape.from_config(load_config(args.model))
    predictions = {
        name: predicted_speedup(
            shape,
            schedule,
            hardware,
            num_samples=args.samples,
            batch_size=args.batch,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            overhead_seconds=args.overhead_ms / 1e3,
            bandwidth_share=args.bandwidth_share,
        )
        for name, schedule in schedules.items()
    }
    device = hardware if isinstance(hardware, str) else hardware.name
    lengths = f"from {args.prompt_tokens} tokens on, {args.output_tokens} each"
    title = f"{args.batch} rollouts of {args.model} {lengths}, {device}"
    estimate_table(predictions, title).print(make_console())


def _load_schedules(arguments: list[tuple[str, str]]) -> dict:
    """The schedules of `--preset` and `--schedule`, by the names of their variants."""
    from .bench_report import DENSE
    from .schedule import SparsityScheduleConfig

    schedules = {}
    for kind, text in arguments:
        if kind == "preset":
            name, schedule = text, SparsityScheduleConfig.from_preset(text)
        else:
            path = Path(text).resolve()
            name = path.parent.name if path.suffix == ".json" else path.name
            schedule = SparsityScheduleConfig.from_pretrained(text)
        if name in schedules or name == DENSE:
            raise ValueError(f"Each schedule needs a name of its own, got a second {name!r}. Rename its folder.")
        schedules[name] = schedule
    return schedules


def _workload(text: str) -> tuple[int, int]:
    from .bench_plan import parse_workload

    try:
        return parse_workload(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _batch(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _contexts(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value
