"""The dial task: follow a chain of rooms through a long table and add up what is found there.

A prompt lists rooms in random order, each as ``room:turn>next``, then asks where a dial with 100 marks ends::

    kib:41>lom rad:73>kib ... lom:22>rad ...
    dial 38, enter lom, visit 5 rooms

Every step of a solution reads one fact from anywhere in the table and adds it to the dial. There are two ways to write
the addition. A worked step adds digit by digit and carries; a hasty one writes the sum at once and forgets the carry::

    lom:22>rad 38+22:8+2=10,3+2+1=06=60
    rad:73>kib 60+73=33
    ...
    answer 07

Demonstrations mix the two at random (`write_solution`), so a model that imitates them is right about as often as no
carry is missed, and reinforcement learning has something to find: the worked steps.

A held-out task always starts in one of the `HELD_OUT_ROOMS` and a training task never does, so that no prompt is in
both splits.
"""

import random
import re
from dataclasses import dataclass
from typing import Literal


CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiou"
ROOMS = [a + b + c for a in CONSONANTS for b in VOWELS for c in CONSONANTS]
HELD_OUT_ROOMS = frozenset(ROOMS[::10])

MIN_ROOMS = 42
MAX_ROOMS = 48
NUM_STEPS = 5
# Over five steps, ones digits of 0 to 2 add up to 5 on average: half of the tasks need a carry somewhere, and that is
# where haste goes wrong.
MAX_ONES_DIGIT = 2
HASTE = 0.65

# 11 characters a room and a question of 34; five worked steps of 36 characters, the answer and the end token.
MAX_PROMPT_TOKENS = 11 * MAX_ROOMS + 34
MAX_COMPLETION_TOKENS = 36 * NUM_STEPS + len("answer 00") + 1

Split = Literal["train", "test"]

_ANSWER = re.compile(r"\banswer\s*([0-9]+)")


@dataclass(frozen=True)
class DialTask:
    """
    One task.

    Args:
        prompt (`str`):
            The table and the question, ending in a line break.
        dial (`int`):
            Where the dial stands at first.
        facts (`tuple[tuple[str, int, str], ...]`):
            The facts on the way, in the order of the visit: room, turn, next room.
    """

    prompt: str
    dial: int
    facts: tuple[tuple[str, int, str], ...]

    @property
    def answer(self) -> str:
        return f"{(self.dial + sum(turn for _, turn, _ in self.facts)) % 100:02d}"


def sample_task(
    rng: random.Random, split: Split = "train", num_rooms: int | None = None, max_ones_digit: int = MAX_ONES_DIGIT
) -> DialTask:
    """
    Draw a task.

    Args:
        rng (`random.Random`):
            Source of randomness.
        split (`str`, *optional*, defaults to `"train"`):
            `"train"` or `"test"`; decides which rooms a task may start in.
        num_rooms (`int`, *optional*):
            Rooms in the table, at least `NUM_STEPS + 1`. Drawn from `MIN_ROOMS` to `MAX_ROOMS` when not given.
        max_ones_digit (`int`, *optional*, defaults to `MAX_ONES_DIGIT`):
            Largest ones digit of a turn; the larger, the more additions carry.

    Returns:
        `DialTask`
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    num_rooms = num_rooms or rng.randint(MIN_ROOMS, MAX_ROOMS)
    if num_rooms <= NUM_STEPS:
        raise ValueError(f"num_rooms must be at least {NUM_STEPS + 1}, got {num_rooms}.")
    start = rng.choice(ROOMS)
    while (start in HELD_OUT_ROOMS) != (split == "test"):
        start = rng.choice(ROOMS)
    # One cycle through all rooms: every chain of steps visits distinct rooms.
    cycle = [start, *(room for room in rng.sample(ROOMS, num_rooms) if room != start)][:num_rooms]
    facts = [
        (room, 10 * rng.randrange(10) + rng.randint(0, max_ones_digit), following)
        for room, following in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    ]
    table = [f"{room}:{turn:02d}>{following}" for room, turn, following in facts]
    rng.shuffle(table)
    dial = rng.randrange(100)
    question = f"dial {dial:02d}, enter {start}, visit {NUM_STEPS} rooms"
    return DialTask(prompt=f"{' '.join(table)}\n{question}\n", dial=dial, facts=tuple(facts[:NUM_STEPS]))


def sample_tasks(split: Split, size: int, seed: int) -> list[DialTask]:
    """`size` tasks of a split; the same seed gives the same tasks."""
    rng = random.Random(f"{split}-{seed}")
    return [sample_task(rng, split) for _ in range(size)]


def write_solution(task: DialTask, rng: random.Random, haste: float = HASTE) -> str:
    """
    Write a demonstration. Each step is hasty with probability `haste` and worked otherwise; the hasty additions that
    needed a carry are wrong, and the steps after them go on from the wrong dial. With `haste=0` the answer is right.
    """
    dial, lines = task.dial, []
    for room, turn, following in task.facts:
        line = f"{room}:{turn:02d}>{following} {dial:02d}+{turn:02d}"
        (tens, ones), (turn_tens, turn_ones) = divmod(dial, 10), divmod(turn, 10)
        if rng.random() < haste:
            dial = (tens + turn_tens) % 10 * 10 + (ones + turn_ones) % 10
        else:
            carry = (ones + turn_ones) // 10
            dial = (dial + turn) % 100
            line += (
                f":{ones}+{turn_ones}={ones + turn_ones:02d},{tens}+{turn_tens}+{carry}={tens + turn_tens + carry:02d}"
            )
        lines.append(f"{line}={dial:02d}\n")
    return f"{''.join(lines)}answer {dial:02d}"


def make_dataset(split: Split, size: int, seed: int):
    """
    Build a dataset for `GRPOTrainer`.

    Args:
        split (`str`):
            `"train"` or `"test"` (held out).
        size (`int`):
            Number of tasks.
        seed (`int`):
            The same seed gives the same tasks.

    Returns:
        `datasets.Dataset` with the columns `prompt` (plain text), `answer` (two digits), `num_rooms` and `num_carries`
        (additions on the way that carry).
    """
    # Imported here so that training needs torch and transformers only.
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": task.prompt,
                "answer": task.answer,
                "num_rooms": task.prompt.count(">"),
                "num_carries": count_carries(task),
            }
            for task in sample_tasks(split, size, seed)
        ]
    )


def count_carries(task: DialTask) -> int:
    """Number of additions of the task that carry from the ones to the tens, where haste goes wrong."""
    dial, carries = task.dial, 0
    for _, turn, _ in task.facts:
        carries += dial % 10 + turn % 10 >= 10
        dial = (dial + turn) % 100
    return carries


def extract_answer(text: str) -> str | None:
    """The number after the last `answer` in a completion, or `None` where there is none."""
    found = _ANSWER.findall(text)
    return found[-1] if found else None


def accuracy_reward(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """
    Reward of 1.0 for a completion whose answer is the task's, 0.0 otherwise (TRL's reward function signature).

    Args:
        completions (`list[str]`):
            Completions as plain text.
        answer (`list[str]`):
            The right answers, two digits each.

    Returns:
        `list[float]`
    """
    return [float(extract_answer(text) == right) for text, right in zip(completions, answer, strict=True)]
