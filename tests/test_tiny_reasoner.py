import json
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from sparrow_trl import SparsityScheduleConfig


EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_reasoner import task as dial  # noqa: E402
from tiny_reasoner.evaluate import accuracy, held_out_tasks  # noqa: E402
from tiny_reasoner.tokenizer import CHARACTERS, build_tokenizer  # noqa: E402
from tiny_reasoner.train import IGNORED, Demonstrations  # noqa: E402


FOLDER = EXAMPLES / "tiny_reasoner"
MODEL = FOLDER / "model"
SCHEDULES = sorted(path.name for path in (FOLDER / "schedules").iterdir())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def sample_tasks(size, split="train"):
    rng = random.Random(7)
    return [dial.sample_task(rng, split) for _ in range(size)]


def follow(task):
    """Answer found by reading the prompt alone."""
    table, question, rest = task.prompt.split("\n")
    assert rest == ""
    facts = {entry[:3]: (int(entry[4:6]), entry[7:]) for entry in table.split(" ")}
    words = question.replace(",", "").split(" ")
    mark, room = int(words[1]), words[3]
    for _ in range(int(words[5])):
        turn, room = facts[room]
        mark += turn
    return f"{mark % 100:02d}"


def test_answer_follows_from_the_prompt():
    for task in sample_tasks(200):
        assert follow(task) == task.answer


def test_worked_solution_is_right_and_haste_is_wrong_about_carries():
    rng = random.Random(0)
    tasks = sample_tasks(400)
    worked = [dial.write_solution(task, rng, haste=0) for task in tasks]
    hasty = [dial.write_solution(task, rng, haste=1) for task in tasks]
    answers = [task.answer for task in tasks]
    assert dial.accuracy_reward(worked, answers) == [1.0] * len(tasks)
    rewards = dial.accuracy_reward(hasty, answers)
    # Forgetting a carry loses 10, and no task has the ten carries that would bring it back to where it was.
    assert rewards == [float(dial.count_carries(task) == 0) for task in tasks]
    assert 0.4 < sum(rewards) / len(rewards) < 0.6


def test_lengths_stay_within_the_limits():
    rng = random.Random(0)
    for task in sample_tasks(200):
        assert len(task.prompt) <= dial.MAX_PROMPT_TOKENS
        # The end token comes after the text.
        assert len(dial.write_solution(task, rng, haste=0)) + 1 <= dial.MAX_COMPLETION_TOKENS
    longest = dial.sample_task(rng, num_rooms=dial.MAX_ROOMS)
    assert len(longest.prompt) == dial.MAX_PROMPT_TOKENS


def test_splits_start_in_different_rooms():
    starts = {
        split: {task.prompt.split("enter ")[1][:3] for task in sample_tasks(500, split)} for split in ("train", "test")
    }
    assert starts["test"] <= dial.HELD_OUT_ROOMS
    assert not starts["train"] & dial.HELD_OUT_ROOMS
    assert len(starts["test"]) > 100


def test_dataset_repeats_with_its_seed():
    first, again, other = (dial.make_dataset("test", 20, seed) for seed in (1, 1, 2))
    assert list(first["prompt"]) == list(again["prompt"])
    assert not set(first["prompt"]) & set(other["prompt"])
    assert set(first.column_names) == {"prompt", "answer", "num_rooms", "num_carries"}
    assert [task.prompt for task in held_out_tasks(20, seed=1)] == list(first["prompt"])
    assert first["num_rooms"][0] == first["prompt"][0].split("\n")[0].count(" ") + 1


@pytest.mark.parametrize("arguments", [{"split": "eval"}, {"num_rooms": dial.NUM_STEPS}])
def test_impossible_tasks_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        dial.sample_task(random.Random(0), **arguments)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("kib:41>lom 38+41=79\nanswer 79", "79"),
        ("answer 12\nanswer 34", "34"),
        ("answer 07", "07"),
        ("answer07 and so on", "07"),
        ("answer 790", "790"),
        ("answer", None),
        ("answer x", None),
        ("kib:41>lom 38+41=79", None),
        ("unanswer 5", None),
        ("answer ٧٩", None),
        ("", None),
    ],
)
def test_answer_is_read_from_any_text(completion, answer):
    assert dial.extract_answer(completion) == answer


def test_reward_needs_the_exact_answer():
    completions = ["answer 07", "answer 7", "answer 070", "answer 08", "", "answer " + "9" * 10_000]
    assert dial.accuracy_reward(completions, ["07"] * 6, prompts=None) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_tokenizer_in_the_folder_is_the_one_built_here(tokenizer):
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.padding_side) == (0, 1, "left")


def test_tokenizer_gives_a_token_per_character_and_nothing_else(tokenizer):
    texts = [task.prompt for task in sample_tasks(3)] + [CHARACTERS, "a  b\n\n c", ""]
    for text, ids in zip(texts, tokenizer(text=texts)["input_ids"], strict=True):
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*tokenizer("ab")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == "ab"
    assert tokenizer("A")["input_ids"] == [tokenizer.unk_token_id]


def test_demonstrations_teach_the_completion_and_its_end(tokenizer):
    ids, labels = next(iter(Demonstrations(tokenizer, batch_size=8, growth_steps=0, seed=0)))
    for row, learnt in zip(ids, labels, strict=True):
        completion = learnt[learnt != IGNORED]
        text = tokenizer.decode(completion)
        assert text.endswith("<eos>") and dial.extract_answer(text) is not None
        start = int((learnt != IGNORED).nonzero()[0])
        assert tokenizer.decode(row[:start]).endswith(f"visit {dial.NUM_STEPS} rooms\n")
        assert torch.equal(row[start : start + len(completion)], completion)


def test_tables_grow_over_the_first_demonstrations(tokenizer):
    data = Demonstrations(tokenizer, batch_size=1, growth_steps=100, seed=0)
    rng = random.Random(0)
    assert data.num_rooms(0, rng) == dial.NUM_STEPS + 1
    assert max(data.num_rooms(99, rng) for _ in range(300)) == dial.MAX_ROOMS
    assert data.num_rooms(100, rng) is None


def test_model_is_small_enough_and_of_the_shape_that_is_promised(model, tokenizer):
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 8 * 2**20
    assert isinstance(model, Qwen3ForCausalLM)
    config = model.config
    assert config.num_hidden_layers >= 4
    assert config.num_key_value_heads >= 2
    assert config.num_attention_heads >= 2 * config.num_key_value_heads
    assert config.vocab_size == len(tokenizer)
    assert config.max_position_embeddings >= dial.MAX_PROMPT_TOKENS + dial.MAX_COMPLETION_TOKENS
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_dense_greedy_accuracy_is_midway(model, tokenizer):
    result = accuracy(model, tokenizer, held_out_tasks(32))
    # 50% on 500 tasks; three standard deviations of 32 tasks.
    assert 0.23 < result["accuracy"] < 0.77
    assert result["worked_steps"] < 0.1


def test_model_can_work_its_steps_when_it_sets_out_to(model, tokenizer):
    """What reinforcement learning is to find: a worked step is right, carry or not."""
    rng = random.Random(1)
    tasks = [task for task in sample_tasks(60, "test") if dial.count_carries(task)][:8]
    rows = [tokenizer(task.prompt + dial.write_solution(task, rng, haste=0))["input_ids"] for task in tasks]
    correct = total = 0
    for task, row in zip(tasks, rows, strict=True):
        with torch.no_grad():
            guess = model(input_ids=torch.tensor([row])).logits[0, :-1].argmax(-1)
        target, start = torch.tensor(row[1:]), len(task.prompt)
        digits = torch.tensor([character in "0123456789" for character in tokenizer.decode(row[1:])])
        digits[:start] = False
        correct += int((guess == target)[digits].sum())
        total += int(digits.sum())
    assert correct / total > 0.99


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_load_and_drop_pages(name):
    schedule = SparsityScheduleConfig.from_pretrained(FOLDER / "schedules" / name)
    longest = dial.MAX_PROMPT_TOKENS + dial.MAX_COMPLETION_TOKENS
    shortest = 11 * dial.MIN_ROOMS + 34
    for length in range(shortest, longest + 1, schedule.page_size):
        assert schedule.budget(length) < length
    assert json.loads((FOLDER / "schedules" / name / "sparsity_schedule.json").read_text()) == schedule.to_dict()
