"""
Spend the bytes where they count: the cheapest recipe and per-layer budgets that hold a tail acceptance.

Beyond the Sparrow paper, which fixes how pages are scored and gives all layers but the first two one table. The search
goes through four stages, all teacher-forced on the same sequences, every choice measured:

1. **Recipes.** From the paper's recipe on, coordinate by coordinate: dense layers, page score, type and number of
   landmarks, page size. Each candidate gets the cheapest table that holds the target
   ([`~sparrow_trl.layer_budgets.fit_levels`], which begins at the candidate before), on the first `recipe_sequences`
   sequences. The cheapest recipe wins. It and the paper's are then fitted on all sequences.
2. **Sensitivity.** For each layer (or `layer_group_size` neighbours) the tails with a smaller and with a larger budget
   in it alone, on the first `sensitivity_sequences`.
3. **Budgets.** Layers in `num_groups` groups by rank, whose budgets are exchanged as long as bytes are saved
   ([`~sparrow_trl.layer_budgets.lower_levels`]), on all sequences.
4. **Held out.** The paper's and the found schedule on sequences that nothing was fitted on.

The cost is what a decode step reads: keys, values and landmarks, averaged over the cached lengths. The number of
passes (one schedule over one sequence) follows from the options, see [`plan_passes`]; `max_passes` bounds it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from tqdm import tqdm

from .acceptance_sweep import TokenSequence, evaluating, process_rank
from .cost_model import CostShape, Hardware, PredictedSpeedup, page_equivalents, predicted_speedup
from .json_files import dump_json_object, read_json_object, write_atomically
from .layer_budgets import PAGE_LADDER, LayerBudgets, fit_levels, lower_levels
from .layer_sensitivity import LayerSensitivity, group_by_sensitivity, measure_sensitivity, split_layers
from .schedule import LANDMARK_DTYPES, LANDMARKS_PER_PAGE, PAGE_SCORES, SparsityScheduleConfig
from .schedule_measurements import BinTails, ScheduleMeasurements


RESULT_NAME = "recipe_search.json"
FORMAT_VERSION = 1
MAX_RESULT_BYTES = 2**26

PAPER_DENSE_LAYERS = (0, 1)
# Schedules that a fit measures when it begins at the table of a recipe that differs in one thing.
WARM_FIT_SCHEDULES = 5


@dataclass(frozen=True)
class RecipeChoices:
    """
    What a search chooses from. A recipe takes one value of each; the first are not special.

    Args:
        dense_layers (`Sequence[Sequence[int]]`, *optional*, defaults to `((0, 1), ())`):
            Layers that may stay dense: the paper's, or none.
        page_scores (`Sequence[str]`, *optional*, defaults to `("mean_query", "group_softmax")`):
            How pages may be scored.
        landmark_dtypes (`Sequence[str]`, *optional*, defaults to `("auto", "fp8_e4m3")`):
            Types of the landmarks.
        landmarks_per_page (`Sequence[int]`, *optional*, defaults to `(1, 2, 4)`):
            Landmarks of a page; more than 1 is tried with `"group_softmax"` alone.
        page_sizes (`Sequence[int]`, *optional*, defaults to `(16,)`):
            Tokens in a page.

    Raises:
        ValueError: when a list is empty, or no recipe can be made of the values.
    """

    dense_layers: Sequence[Sequence[int]] = (PAPER_DENSE_LAYERS, ())
    page_scores: Sequence[str] = PAGE_SCORES
    landmark_dtypes: Sequence[str] = LANDMARK_DTYPES
    landmarks_per_page: Sequence[int] = LANDMARKS_PER_PAGE
    page_sizes: Sequence[int] = (16,)

    # The order in which they are searched. Cheap landmarks first: they decide how many a page may have.
    FIELDS = {
        "dense_layers": "dense_layers",
        "page_score": "page_scores",
        "landmark_dtype": "landmark_dtypes",
        "landmarks_per_page": "landmarks_per_page",
        "page_size": "page_sizes",
    }

    def __post_init__(self):
        for name in self.FIELDS.values():
            if not len(getattr(self, name)):
                raise ValueError(f"`{name}` must have at least one value.")
        self.start()

    def values(self, field: str) -> list[Any]:
        """Values of the field `field` (`str`) of [`SparsityScheduleConfig`]."""
        values = getattr(self, self.FIELDS[field])
        return [list(value) for value in values] if field == "dense_layers" else list(values)

    def start(self) -> dict[str, Any]:
        """Fields of the recipe that a search begins with: the nearest to the paper's that the values allow."""
        paper = {name: getattr(paper_recipe(), name) for name in self.FIELDS}
        ranked = itertools.product(
            *(sorted(self.values(name), key=lambda value, name=name: value != paper[name]) for name in self.FIELDS)
        )
        for values in ranked:
            recipe = dict(zip(self.FIELDS, values, strict=True))
            if _is_possible(recipe):
                SparsityScheduleConfig(top_k_pages=[0], bin_tokens=recipe["page_size"], **recipe)
                return recipe
        raise ValueError(
            f"`landmarks_per_page` {list(self.landmarks_per_page)} go with no score in {list(self.page_scores)}: "
            '"mean_query" has 1.'
        )

    @property
    def num_candidates(self) -> int:
        """`int`: Most recipes that a search goes through."""
        return 1 + sum(len(getattr(self, name)) - 1 for name in self.FIELDS.values())


def paper_recipe(**fields) -> SparsityScheduleConfig:
    """The paper's recipe, with further `fields` of a [`SparsityScheduleConfig`]."""
    return SparsityScheduleConfig(**{"top_k_pages": [0], "dense_layers": list(PAPER_DENSE_LAYERS), **fields})


@dataclass(frozen=True)
class FittedSchedule:
    """
    A schedule that holds the target, as it was measured, and what it reads.

    Args:
        name (`str`):
            What it is.
        schedule ([`SparsityScheduleConfig`]):
            The schedule.
        tails (`list[float | None]`):
            Tail acceptance by bin of cached length; `None` in bins with too few tokens.
        tokens (`list[int]`):
            Tokens by bin.
        bin_bytes (`list[float]`):
            Keys, values and landmarks that a decode step of one sequence reads, by bin.
        total_bytes (`float`):
            Their mean over all lengths.
        pages (`float`):
            The same as pages of 16 tokens that an average layer reads.
        tried (`list[tuple[float, float]]`):
            Mean bytes and lowest tail of every schedule that was measured on the way.
    """

    name: str
    schedule: SparsityScheduleConfig
    tails: list[float | None]
    tokens: list[int]
    bin_bytes: list[float]
    total_bytes: float
    pages: float
    tried: list[tuple[float, float]]

    @property
    def lowest_tail(self) -> float:
        """`float`: Tail of the bin that holds it least."""
        return min(tail for tail in self.tails if tail is not None)


@dataclass(frozen=True)
class HeldOut:
    """
    Tails on sequences that nothing was fitted on.

    Args:
        num_sequences (`int`):
            Number of sequences.
        tokens (`list[int]`):
            Their tokens by bin of cached length.
        paper (`list[float | None]`):
            Tails under the paper's recipe; `None` in bins with too few tokens.
        found (`list[float | None]`):
            Tails under the found schedule.
    """

    num_sequences: int
    tokens: list[int]
    paper: list[float | None]
    found: list[float | None]


@dataclass(frozen=True)
class RecipeSearchResult:
    """
    What a search found, beside the paper's recipe at the same target on the same sequences.

    Args:
        found ([`FittedSchedule`]):
            The cheapest schedule.
        paper ([`FittedSchedule`]):
            The paper's recipe.
        uniform ([`FittedSchedule`]):
            The cheapest recipe with one table for all layers.
        candidates (`list[FittedSchedule]`):
            The recipes that were compared, on `recipe_sequences` sequences.
        sensitivities (`list[LayerSensitivity]`):
            Tails with another budget in some layers alone.
        groups (`list[list[int]]`):
            Layers of each group, the most sensitive first.
        speedups (`dict[str, PredictedSpeedup]`):
            Predicted speedups of `"paper"` and `"found"`.
        options (`dict`):
            Target, guard and sizes of the search.
        passes (`dict[str, int]`):
            Passes that each stage took.
        held_out ([`HeldOut`], *optional*):
            Both schedules on other sequences.
    """

    found: FittedSchedule
    paper: FittedSchedule
    uniform: FittedSchedule
    candidates: list[FittedSchedule]
    sensitivities: list[LayerSensitivity]
    groups: list[list[int]]
    speedups: dict[str, PredictedSpeedup]
    options: dict[str, Any]
    passes: dict[str, int]
    held_out: HeldOut | None = None

    @property
    def schedule(self) -> SparsityScheduleConfig:
        """[`SparsityScheduleConfig`]: The schedule that was found."""
        return self.found.schedule

    @property
    def ratio(self) -> float:
        """`float`: Bytes of the found schedule over those of the paper's recipe."""
        return self.found.total_bytes / self.paper.total_bytes

    @property
    def bin_ratios(self) -> list[float]:
        """`list[float]`: The same in each bin."""
        return [own / paper for own, paper in zip(self.found.bin_bytes, self.paper.bin_bytes, strict=False)]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RecipeSearchResult":
        """
        The result that [`to_dict`] turned into `values` (`dict`).

        Raises:
            ValueError: when `values` is of another version or form.
        """
        if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"A recipe search has `format_version` {FORMAT_VERSION}: this was written by another version of "
                "sparrow_trl, or is no recipe search."
            )
        try:
            fields = {name: value for name, value in values.items() if name != "format_version"}
            fields["candidates"] = [_fitted(entry) for entry in fields["candidates"]]
            fields["sensitivities"] = [LayerSensitivity(**entry) for entry in fields["sensitivities"]]
            fields["speedups"] = {name: PredictedSpeedup(**entry) for name, entry in fields["speedups"].items()}
            if fields["held_out"] is not None:
                fields["held_out"] = HeldOut(**fields["held_out"])
            return cls(**{**fields, **{name: _fitted(fields[name]) for name in ("found", "paper", "uniform")}})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"The recipe search is damaged: {type(error).__name__}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """
        Write the schedule as `sparsity_schedule.json`, the result as `recipe_search.json` and `recipe_search.md`, and
        a picture.

        Args:
            folder (`str` or `pathlib.Path`):
                Folder to write to, which is created when missing.
        """
        from .pictures import save_figure
        from .recipe_search_report import PICTURE_NAME, REPORT_NAME, draw_search, search_tables

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RESULT_NAME, dump_json_object(self.to_dict(), RESULT_NAME, MAX_RESULT_BYTES))
        self.schedule.save_pretrained(folder)
        text = "\n\n".join(table.to_markdown() for table in search_tables(self))
        write_atomically(folder / REPORT_NAME, f"{text}\n".encode())
        save_figure(draw_search(self), folder / PICTURE_NAME)

    @classmethod
    def load(cls, path: str | Path) -> "RecipeSearchResult":
        """
        Read what [`save`] wrote.

        Args:
            path (`str` or `pathlib.Path`):
                The folder, or its `recipe_search.json`.
        """
        path = Path(path)
        return cls.from_dict(read_json_object(path / RESULT_NAME if path.is_dir() else path, MAX_RESULT_BYTES))


def plan_passes(
    choices: RecipeChoices,
    *,
    num_layers: int,
    num_sequences: int,
    recipe_sequences: int = 4,
    sensitivity_sequences: int = 2,
    layer_group_size: int = 1,
    num_levels: int = len(PAGE_LADDER),
    max_passes: int = 600,
    held_out_sequences: int = 0,
) -> dict[str, int]:
    """
    Sparse passes that each stage of a search takes at most (fits mostly less). Each sequence takes one dense pass
    beside them.

    With `F = ceil(log2(num_levels)) + 2` schedules for a fit from scratch, and 5 for one that begins at another's
    table:

    - `"recipes"`: `(F + 5 (candidates - 1)) * recipe_sequences`
    - `"fits on all sequences"`: `2 * 5 * num_sequences`
    - `"sensitivity"`: `2 * ceil(num_layers / layer_group_size) * sensitivity_sequences`
    - `"budgets"`: what is left of `max_passes`
    - `"held out"`: `2 * held_out_sequences`, beyond `max_passes`

    Args:
        choices ([`RecipeChoices`]): What the search chooses from.
        num_layers (`int`): Layers of the model.
        num_sequences (`int`): Sequences that are fitted on.
        recipe_sequences (`int`, *optional*, defaults to `4`): As in [`search_recipe`].
        sensitivity_sequences (`int`, *optional*, defaults to `2`): As in [`search_recipe`].
        layer_group_size (`int`, *optional*, defaults to `1`): As in [`search_recipe`].
        num_levels (`int`, *optional*, defaults to `38`): Page counts on the ladder.
        max_passes (`int`, *optional*, defaults to `600`): As in [`search_recipe`].
        held_out_sequences (`int`, *optional*, defaults to `0`): Sequences that are held out.

    Returns:
        `dict[str, int]`: Passes by stage.

    Raises:
        ValueError: when `max_passes` leaves nothing for the budgets.
    """
    scratch = math.ceil(math.log2(max(2, num_levels))) + 2
    plan = {
        "recipes": (scratch + WARM_FIT_SCHEDULES * (choices.num_candidates - 1))
        * min(recipe_sequences, num_sequences),
        "fits on all sequences": 2 * WARM_FIT_SCHEDULES * num_sequences,
        "sensitivity": 2 * math.ceil(num_layers / layer_group_size) * min(sensitivity_sequences, num_sequences),
    }
    left = max_passes - sum(plan.values())
    if left < num_sequences:
        parts = ", ".join(f"{count} for {name}" for name, count in plan.items())
        raise ValueError(
            f"`max_passes` is {max_passes}, but the stages before the budgets may take {sum(plan.values())} passes "
            f"({parts}). Raise it, use fewer sequences in these stages, fewer recipes, or a larger `layer_group_size`."
        )
    return {**plan, "budgets": left, "held out": 2 * held_out_sequences}


def search_recipe(
    model: nn.Module,
    sequences: list[TokenSequence],
    *,
    choices: RecipeChoices | None = None,
    page_ladder: Sequence[int] = PAGE_LADDER,
    bin_tokens: int = 2048,
    target_acceptance: float = 0.86,
    margin: float = 0.005,
    confidence: float | None = None,
    min_tokens: int = 200,
    recipe_sequences: int = 4,
    sensitivity_sequences: int = 2,
    sensitivity_factor: float = 4.0,
    layer_group_size: int = 1,
    num_groups: int = 4,
    steps: Sequence[int] = (3, 2, 1),
    max_passes: int = 600,
    held_out: list[TokenSequence] | None = None,
    shape: CostShape | None = None,
    hardware: str | Hardware = "H200",
    batch_size: int = 32,
    model_name: str | None = None,
    measurements_folder: str | Path | None = None,
    chunk_size: int = 256,
    report: Callable[[str], None] | None = None,
) -> RecipeSearchResult:
    """
    Search the recipe and the per-layer budgets that read the fewest bytes with a tail acceptance of at least
    `target_acceptance` in every bin of cached length.

    Args:
        model (`torch.nn.Module`):
            Causal language model of transformers, as in [`~sparrow_trl.acceptance_sweep.sequence_acceptance`].
        sequences (`list[TokenSequence]`):
            What to fit on, such as from [`~sparrow_trl.sequence_generation.generate_sequences`].
        choices ([`RecipeChoices`], *optional*):
            What to choose from; by default those of [`RecipeChoices`].
        page_ladder (`Sequence[int]`, *optional*, defaults to `PAGE_LADDER`):
            Budgets in pages of 16 tokens, reserved ones included.
        bin_tokens (`int`, *optional*, defaults to `2048`):
            Tokens in a bin of cached length.
        target_acceptance (`float`, *optional*, defaults to `0.86`):
            Tail acceptance to hold.
        margin (`float`, *optional*, defaults to `0.005`):
            Guard against noise: what the tail must have above the target to hold.
        confidence (`float`, *optional*):
            Guard against noise: judge by the lower end of the tail's bootstrap interval over sequences at this level.
        min_tokens (`int`, *optional*, defaults to `200`):
            Tokens that a bin's tail needs to count.
        recipe_sequences (`int`, *optional*, defaults to `4`):
            Sequences on which recipes are compared.
        sensitivity_sequences (`int`, *optional*, defaults to `2`):
            Sequences on which sensitivity is measured.
        sensitivity_factor (`float`, *optional*, defaults to `4.0`):
            How much smaller and larger budgets are in that stage.
        layer_group_size (`int`, *optional*, defaults to `1`):
            Adjacent layers whose sensitivity is measured together.
        num_groups (`int`, *optional*, defaults to `4`):
            Groups of layers with a table of their own.
        steps (`Sequence[int]`, *optional*, defaults to `(3, 2, 1)`):
            Levels by which groups are shifted, as in [`~sparrow_trl.layer_budgets.lower_levels`].
        max_passes (`int`, *optional*, defaults to `600`):
            Most sparse passes over a sequence, but for the held-out ones; see [`plan_passes`].
        held_out (`list[TokenSequence]`, *optional*):
            Sequences on which the paper's and the found schedule are measured in the end.
        shape ([`~sparrow_trl.cost_model.CostShape`], *optional*):
            What decides the cost; by default the model's with a cache of 2-byte numbers.
        hardware (`str` or [`~sparrow_trl.cost_model.Hardware`], *optional*, defaults to `"H200"`):
            Device of the predicted speedups.
        batch_size (`int`, *optional*, defaults to `32`):
            Sequences that decode together in the predicted speedups.
        model_name (`str`, *optional*):
            Name of the model in the schedule; by default the model's own.
        measurements_folder (`str` or `pathlib.Path`, *optional*):
            Where to keep measurements. A search that was interrupted, or has other options, goes on from them.
        chunk_size (`int`, *optional*, defaults to `256`):
            Positions whose logits are held at once.
        report (callable, *optional*):
            Called with a line of text when something was decided.

    Returns:
        [`RecipeSearchResult`]

    Raises:
        ValueError: for invalid options, before anything is measured; when no bin has enough tokens; and as in
            [`~sparrow_trl.acceptance_sweep.sequence_acceptance`].

    Example:

    ```python
    >>> result = search_recipe(model, sequences[:8], held_out=sequences[8:], target_acceptance=0.86)
    >>> result.ratio, result.schedule.layer_top_k_pages
    >>> result.save("search")
    ```
    """
    choices = RecipeChoices() if choices is None else choices
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    dense_layers = [*PAPER_DENSE_LAYERS, *itertools.chain(*choices.values("dense_layers"))]
    if max(dense_layers) >= num_layers or any(
        len(set(layers)) >= num_layers for layers in [PAPER_DENSE_LAYERS, *choices.values("dense_layers")]
    ):
        raise ValueError(
            f"The model has {num_layers} layers, too few for the dense layers {sorted(set(dense_layers))}."
        )
    for name, value in (
        ("recipe_sequences", recipe_sequences),
        ("sensitivity_sequences", sensitivity_sequences),
        ("layer_group_size", layer_group_size),
        ("num_groups", num_groups),
        ("min_tokens", min_tokens),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
    if not sensitivity_factor > 1:
        raise ValueError(f"`sensitivity_factor` must be above 1, got {sensitivity_factor!r}.")
    if not 0 <= margin < 1 or not 0 < target_acceptance + margin <= 1:
        raise ValueError(
            f"`target_acceptance` and `margin` must be in (0, 1] together, got {target_acceptance!r} and {margin!r}."
        )
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in page_ladder):
        raise ValueError(f"`page_ladder` must hold positive integers, got {list(page_ladder)!r:.200}.")
    if any(isinstance(step, bool) or not isinstance(step, int) or step < 1 for step in steps):
        raise ValueError(f"`steps` must be positive integers, got {list(steps)!r:.200}.")
    plan = plan_passes(
        choices,
        num_layers=num_layers,
        num_sequences=len(sequences),
        recipe_sequences=recipe_sequences,
        sensitivity_sequences=sensitivity_sequences,
        layer_group_size=layer_group_size,
        num_levels=len(page_ladder),
        max_passes=max_passes,
        held_out_sequences=len(held_out or ()),
    )
    model_name = model_name or model.name_or_path or None
    common = {
        "bin_tokens": bin_tokens,
        "target_acceptance": target_acceptance,
        "base_model_name_or_path": model_name,
    }
    paper = paper_recipe(**common)
    for size in choices.page_sizes:
        replace(paper, page_size=size)  # whether the bins are multiples of it
    shape = CostShape.from_config(config) if shape is None else shape
    say = (lambda text: None) if report is None else report
    say(
        f"At most {sum(plan.values())} passes over {len(sequences)} sequences: "
        + ", ".join(f"{count} for {name}" for name, count in plan.items() if count)
        + "."
    )

    with (
        evaluating(model),
        tqdm(
            total=sum(plan.values()),
            desc="Searching",
            unit="pass",
            disable=None if process_rank()[0] == 0 else True,
        ) as progress,
    ):
        options = {"folder": measurements_folder, "tail_quantile": paper.tail_quantile, "chunk_size": chunk_size}
        measurements = ScheduleMeasurements(
            model, sequences, confidence=confidence, on_measured=progress.update, **options
        )
        search = _Search(measurements, shape, page_ladder, target_acceptance + margin, min_tokens)
        stages = _Stages(plan, measurements, progress)

        best, candidates = _search_recipes(search, choices, common, min(recipe_sequences, len(sequences)), say)
        stages.end("recipes")
        start = candidates[0] if _same_recipe(candidates[0].schedule, paper) else best
        paper_fit, _, _ = search.fit("paper", paper, start=start)
        uniform, budgets, levels = search.fit("one table", best.schedule, start=best)
        stages.end("fits on all sequences")

        dense = uniform.schedule.dense_layers
        layers = [layer for layer in range(num_layers) if layer not in dense]
        sensitivities = measure_sensitivity(
            measurements,
            uniform.schedule,
            split_layers(layers, layer_group_size),
            judged=search.judged(uniform.schedule, len(sequences))[: budgets.num_bins],
            factor=sensitivity_factor,
            num_sequences=min(sensitivity_sequences, len(sequences)),
        )
        groups = group_by_sensitivity(sensitivities, num_groups)
        levels = np.tile(levels, (len(groups), 1))
        if dense:
            # They must earn it: a group like the others, which begins with all pages.
            groups, levels = [dense, *groups], np.vstack([budgets.full, levels])
        say(f"Layers by sensitivity: {' | '.join(', '.join(map(str, group)) for group in groups)}.")
        stages.end("sensitivity")

        found = search.lower(
            uniform,
            groups,
            levels,
            steps=steps,
            may_measure=lambda: measurements.requested + len(sequences) <= max_passes,
            report=say,
        )
        stages.end("budgets")

        held = None
        if held_out:
            other = ScheduleMeasurements(model, held_out, on_measured=progress.update, **options)
            held = _measure_held_out(other, paper_fit, found, min_tokens)
            stages.passes["held out"] = other.requested
    first_length = search.first_length
    speedups = {
        fit.name: predicted_speedup(
            shape,
            fit.schedule,
            hardware,
            batch_size=batch_size,
            prompt_tokens=first_length - 1,
            output_tokens=measurements.longest - first_length + 1,
        )
        for fit in (paper_fit, found)
    }
    settings = {
        "target_acceptance": target_acceptance,
        "margin": margin,
        "confidence": confidence,
        "min_tokens": min_tokens,
        "sequences": len(sequences),
        "first_length": first_length,
        "last_length": measurements.longest,
        "hardware": hardware if isinstance(hardware, str) else hardware.name,
        "batch_size": batch_size,
        "model": model_name,
    }
    record = {
        "method": "recipe search, teacher-forced",
        "sequences": len(sequences),
        "tokens": sum(len(sequence.cached_lengths) for sequence in sequences),
        "tails": {
            str(index * bin_tokens): round(tail, 4) for index, tail in enumerate(found.tails) if tail is not None
        },
        "read_bytes": round(found.total_bytes),
        "read_bytes_of_the_papers_recipe": round(paper_fit.total_bytes),
    }
    return RecipeSearchResult(
        found=replace(found, schedule=replace(found.schedule, calibration=record)),
        paper=paper_fit,
        uniform=uniform,
        candidates=candidates,
        sensitivities=sensitivities,
        groups=groups,
        speedups=speedups,
        options=settings,
        passes=stages.passes,
        held_out=held,
    )


class _Search:
    """Fits schedules on the first sequences of some measurements."""

    def __init__(self, measurements, shape, page_ladder, threshold, min_tokens):
        self.measurements, self.shape, self.page_ladder = measurements, shape, page_ladder
        self.threshold, self.min_tokens = threshold, min_tokens
        self.first_length = min(sequence.prompt_length for sequence in measurements.sequences) + 1

    def judged(self, recipe: SparsityScheduleConfig, num_sequences: int) -> np.ndarray:
        """Bins with enough tokens."""
        tokens = _bin_tokens(recipe, self.measurements.sequences[:num_sequences])
        if tokens.max() < self.min_tokens:
            raise ValueError(
                f"No bin has the {self.min_tokens:,} tokens (`min_tokens`) that a tail acceptance needs; the most on "
                f"{num_sequences} sequences is {tokens.max():,}. Use more or longer ones, or larger bins."
            )
        return tokens >= self.min_tokens

    def fit(self, name, recipe, num_sequences=None, start: FittedSchedule | None = None):
        """The cheapest table of a recipe, with its [`LayerBudgets`] and levels."""
        num_sequences = num_sequences or len(self.measurements.sequences)
        layers = [layer for layer in range(self.shape.num_layers) if not recipe.is_dense_layer(layer)]
        budgets = self._budgets(recipe, [layers], num_sequences)
        begin = None
        if start is not None:
            lengths = [budgets.recipe.bin_lengths(index)[1] for index in range(budgets.num_bins)]
            tokens = [start.schedule.budget(max(1, length)) for length in lengths]
            begin = np.minimum(np.searchsorted(budgets.page_counts * recipe.page_size, tokens), budgets.full)
        tried = []
        levels = fit_levels(budgets, self._measure(budgets, num_sequences, tried), begin)[None]
        return self._fitted(name, budgets, levels, num_sequences, tried), budgets, levels

    def lower(self, uniform: FittedSchedule, groups, levels, **options) -> FittedSchedule:
        """The cheapest tables of groups of all layers, from `levels` that hold."""
        num_sequences = len(self.measurements.sequences)
        budgets = self._budgets(replace(uniform.schedule, dense_layers=[]), groups, num_sequences)
        tried = []
        levels = lower_levels(
            budgets,
            self._measure(budgets, num_sequences, tried),
            levels,
            **options,
        )
        return self._fitted("found", budgets, levels, num_sequences, tried)

    def _budgets(self, recipe, groups, num_sequences) -> LayerBudgets:
        judged = self.judged(recipe, num_sequences)
        return LayerBudgets(recipe, groups, self.shape, judged, self.first_length, self.page_ladder)

    def _measure(self, budgets, num_sequences, tried):
        def measure(levels):
            measured = self.measurements.tails(budgets.schedule(levels), budgets.num_bins, num_sequences)
            tried.append((budgets.total_bytes(levels), float(measured.tails[budgets.judged].min())))
            return measured.guarded >= self.threshold

        return measure

    def _fitted(self, name, budgets, levels, num_sequences, tried) -> FittedSchedule:
        schedule = budgets.schedule(levels)
        measured = self.measurements.tails(schedule, budgets.num_bins, num_sequences)
        total = budgets.total_bytes(levels)
        return FittedSchedule(
            name=name,
            schedule=schedule,
            tails=_tails_or_none(measured, self.min_tokens),
            tokens=measured.tokens.tolist(),
            bin_bytes=budgets.bin_bytes(levels).tolist(),
            total_bytes=total,
            pages=page_equivalents(self.shape, total),
            tried=tried,
        )


class _Stages:
    """Counts the passes of each stage, and keeps the total of the progress bar at what may still come."""

    def __init__(self, plan: dict[str, int], measurements: ScheduleMeasurements, progress: tqdm):
        self._left, self._measurements, self._progress = dict(plan), measurements, progress
        self.passes: dict[str, int] = {}

    def end(self, name: str) -> None:
        del self._left[name]
        self.passes[name] = self._measurements.requested - sum(self.passes.values())
        self._progress.total = self._measurements.requested + sum(self._left.values())
        self._progress.refresh()


def _search_recipes(
    search: _Search, choices: RecipeChoices, common: dict[str, Any], num_sequences: int, say: Callable[[str], None]
) -> tuple[FittedSchedule, list[FittedSchedule]]:
    """The cheapest recipe, coordinate by coordinate, and all that were compared."""

    def fit(fields, start):
        schedule = paper_recipe(**common, **fields)
        fitted = search.fit(recipe_name(schedule), schedule, num_sequences, start)[0]
        say(f"{fitted.name}: {fitted.pages:.1f} pages read in an average layer.")
        return fitted

    fields = choices.start()
    best = fit(fields, None)
    candidates = [best]
    for name in choices.FIELDS:
        for value in choices.values(name):
            other = {**fields, name: value}
            if other == fields or not _is_possible(other):
                continue
            candidates.append(fit(other, best))
            if candidates[-1].total_bytes < best.total_bytes:
                best, fields = candidates[-1], other
    return best, candidates


def recipe_name(schedule: SparsityScheduleConfig) -> str:
    """The recipe of `schedule` ([`SparsityScheduleConfig`]) in a few words."""
    landmarks = f"{schedule.landmarks_per_page} x {schedule.landmark_dtype}"
    dense = ", ".join(map(str, schedule.dense_layers)) or "none"
    return f"{schedule.page_score}, landmarks {landmarks}, pages of {schedule.page_size}, dense layers {dense}"


def _is_possible(recipe: dict[str, Any]) -> bool:
    return recipe["page_score"] != "mean_query" or recipe["landmarks_per_page"] == 1


def _same_recipe(first: SparsityScheduleConfig, second: SparsityScheduleConfig) -> bool:
    return all(getattr(first, name) == getattr(second, name) for name in RecipeChoices.FIELDS)


def _bin_tokens(schedule: SparsityScheduleConfig, sequences: list[TokenSequence]) -> np.ndarray:
    return np.bincount(np.concatenate([schedule.bin_index(entry.cached_lengths).numpy() for entry in sequences]))


def _tails_or_none(measured: BinTails, min_tokens: int) -> list[float | None]:
    return [
        float(tail) if tokens >= min_tokens else None
        for tail, tokens in zip(measured.tails, measured.tokens, strict=True)
    ]


def _measure_held_out(
    measurements: ScheduleMeasurements, paper: FittedSchedule, found: FittedSchedule, min_tokens: int
) -> HeldOut:
    tails = {fit.name: measurements.tails(fit.schedule, len(found.tails)) for fit in (paper, found)}
    return HeldOut(
        num_sequences=len(measurements.sequences),
        tokens=tails["found"].tokens.tolist(),
        **{name: _tails_or_none(measured, min_tokens) for name, measured in tails.items()},
    )


def _fitted(values: dict[str, Any]) -> FittedSchedule:
    schedule = SparsityScheduleConfig.from_dict(values["schedule"])
    return FittedSchedule(**{**values, "schedule": schedule, "tried": [tuple(pair) for pair in values["tried"]]})
