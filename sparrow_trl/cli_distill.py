"""`sparrow-trl distill`: arguments, the model and the texts; [`distill_texts`] does the work."""

from dataclasses import dataclass, field
from pathlib import Path

from peft import LoraConfig

from .cli_search import check_sources, parse_arguments, print_once, read_sequences
from .distill import DistillSparseConfig
from .distill_texts import distill
from .schedule import SparsityScheduleConfig


@dataclass
class DistillArguments:
    """
    Distil a LoRA for the rollouts of a model on texts, without RL (DistillSparse): under sparse attention and with the
    LoRA the model comes closer to itself under dense attention. Writes a PEFT adapter, sparsity_schedule.json,
    summary.json and a picture. The same command goes on after an interruption. Run under `accelerate launch` to use
    several processes.

    Args:
        model_name_or_path (`str`):
            Folder or Hub id of the model.
        sparsity_schedule (`str`):
            Schedule of the student: a preset, a file or folder, or a Hub id.
        texts (`str`, *optional*):
            Texts to distil on: text file, or JSON Lines file with a column `text`.
        sequences (`str`, *optional*):
            The sequences.json of `sparrow-trl calibrate --dataset`, with completions of the model itself, instead.
    """

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of the model."})
    sparsity_schedule: str = field(
        metadata={"help": "Schedule of the student: a preset, a file or folder, or a Hub id."}
    )
    output_dir: str = field(default="distill_sparse", metadata={"help": "Folder for the results."})
    texts: str | None = field(
        default=None, metadata={"help": "Texts to distil on: a .txt file, or JSON Lines with a column `text`."}
    )
    sequences: str | None = field(
        default=None, metadata={"help": "Sequences to distil on: the sequences.json of calibrate --dataset."}
    )
    held_out: int = field(
        default=4, metadata={"help": "First sequences, which are kept back to measure the tail acceptance on."}
    )
    num_sequences: int | None = field(default=None, metadata={"help": "Most sequences to distil on, by default all."})
    measured_schedules: list[str] = field(
        default_factory=list,
        metadata={"help": "Further schedules to measure the tail acceptance at, before and after."},
    )
    prompt_tokens: int = field(
        default=256, metadata={"help": "With texts: tokens at the start of each that stand for the prompt."}
    )
    max_length: int = field(default=4096, metadata={"help": "Most tokens of a sequence, prompt included."})
    num_epochs: int = field(default=1, metadata={"help": "How often to go through the sequences."})
    sequences_per_step: int = field(default=4, metadata={"help": "Sequences of one step."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the LoRA."})
    lora_alpha: int = field(default=32, metadata={"help": "Alpha of the LoRA."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout of the LoRA."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Layers that the LoRA adapts."}
    )
    divergence: str = field(
        default="reverse_kl", metadata={"help": "reverse_kl, forward_kl, jensen_shannon or k3 (sampled tokens)."}
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "Learning rate."})
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "Its schedule."})
    warmup_steps: int = field(default=10, metadata={"help": "Steps over which it rises from 0."})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of the rollouts."})
    min_tokens: int = field(default=200, metadata={"help": "Tokens that a bin's tail needs to count."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Compute layers again in the backward pass, to hold less."}
    )
    dtype: str = field(default="auto", metadata={"help": "Type of the weights: auto, bfloat16, float16 or float32."})
    seed: int = field(default=0, metadata={"help": "Seed."})

    def __post_init__(self):
        check_sources(self)
        if self.held_out < 0 or (self.num_sequences is not None and self.num_sequences < 1):
            raise ValueError(
                f"--held_out must not be negative and --num_sequences must be positive, got {self.held_out} and "
                f"{self.num_sequences}."
            )

    @property
    def config(self) -> DistillSparseConfig:
        """[`DistillSparseConfig`]: Adapter, divergence and optimizer."""
        targets = self.lora_target_modules
        return DistillSparseConfig(
            lora=LoraConfig(
                r=self.lora_r,
                lora_alpha=self.lora_alpha,
                lora_dropout=self.lora_dropout,
                target_modules=targets[0] if targets == ["all-linear"] else targets,
            ),
            divergence=self.divergence,
            learning_rate=self.learning_rate,
            lr_scheduler_type=self.lr_scheduler_type,
            warmup_steps=self.warmup_steps,
        )


def run_distill(arguments: list[str]) -> None:
    """
    Run the command.

    Args:
        arguments (`list[str]`): Arguments after the name of the command; `--config FILE` reads them from YAML.

    Raises:
        ValueError: for arguments, texts or a model that nothing can be distilled with.
    """
    args = parse_arguments(arguments, DistillArguments, "distill")
    config = args.config
    names = [args.sparsity_schedule, *args.measured_schedules]
    # Tables and pictures have little room for paths.
    labels = [Path(name).name for name in names]
    if len(set(labels)) < len(labels):
        labels = names
    schedules = {label: SparsityScheduleConfig.resolve(name) for label, name in zip(labels, names, strict=True)}
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM

    sequences = read_sequences(args)
    held_out, sequences = sequences[: args.held_out], sequences[args.held_out :][: args.num_sequences]
    if not sequences:
        raise ValueError(
            f"There are {len(held_out)} sequences of at least {args.prompt_tokens + 2} tokens, none beyond the "
            f"{args.held_out} of --held_out."
        )
    state = PartialState()

    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype).to(state.device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        result = distill(
            model,
            sequences,
            schedules[labels[0]],
            config,
            held_out=held_out,
            measured=schedules,
            num_epochs=args.num_epochs,
            sequences_per_step=args.sequences_per_step,
            temperature=args.temperature,
            min_tokens=args.min_tokens,
            seed=args.seed,
            output_dir=args.output_dir,
            report=print_once,
        )
    except KeyboardInterrupt:
        print_once(f"Interrupted. The progress is in {args.output_dir}: the same command goes on from there.")
        raise
    print_once(result.table().to_markdown() + "\n")
    print_once(
        f"Distilled on {result.tokens:,} tokens in {len(result.steps)} steps. Wrote {args.output_dir}/: a PEFT "
        "adapter (DistillSparseCallback(adapter=...) takes the folder), its schedule, summary.json and a picture."
    )
