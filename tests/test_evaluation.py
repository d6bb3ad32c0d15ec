"""`sparrow-trl eval`: estimators, rounds that are kept, and the command on the tiny reasoner."""

import itertools
import json
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fresh_process import run_two_processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparrow_trl import cli_eval, evaluation
from sparrow_trl.cli import main
from sparrow_trl.cli_eval import EvalArguments, as_prompt, check_texts, load_problems
from sparrow_trl.evaluation import EvaluationResult, Problem, evaluate_problems, score_answers
from sparrow_trl.pass_at_k import mean_interval, pass_at_k


EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_reasoner.evaluate import accuracy  # noqa: E402
from tiny_reasoner.task import extract_answer, sample_tasks  # noqa: E402


MODEL = EXAMPLES / "tiny_reasoner" / "model"


@pytest.mark.parametrize("num_samples", [1, 4, 7])
def test_pass_at_k_counts_the_subsets_with_a_right_sample(num_samples):
    for k in range(1, num_samples + 1):
        expected = []
        for num_correct in range(num_samples + 1):
            subsets = list(itertools.combinations([True] * num_correct + [False] * (num_samples - num_correct), k))
            expected.append(sum(map(any, subsets)) / len(subsets))
        assert pass_at_k(num_samples, np.arange(num_samples + 1), k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    (value,) = pass_at_k(10_000, [3], 5_000)
    assert value == pytest.approx(0.875, abs=1e-3)


@pytest.mark.parametrize(("k", "counts"), [(0, [1]), (5, [1]), (2, [5]), (2, [-1])])
def test_pass_at_k_refuses_what_cannot_be(k, counts):
    with pytest.raises(ValueError, match="must"):
        pass_at_k(4, counts, k)


def test_intervals_are_over_problems():
    values = np.array([0.0] * 50 + [1.0] * 50)
    low, high = mean_interval(values)
    assert low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.015) and high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.015)
    assert mean_interval(np.ones(10)) is None
    assert mean_interval(np.ones(1)) is None


def test_results_are_averages_over_problems():
    correct = np.array([[True, False, True], [True, False, False]])
    result = EvaluationResult(correct, np.array([[2, 4, 6], [4, 6, 8]]), np.zeros((2, 3), dtype=bool))
    metrics = result.to_dict([1, 2])["metrics"]
    assert metrics["avg@2"]["value"] == metrics["pass@1"]["value"] == pytest.approx(0.5)
    assert metrics["pass@2"]["value"] == pytest.approx(2 / 3)
    assert result.to_dict([1])["correct"] == [2, 0, 1] and result.to_dict([1])["mean_length"] == 5
    assert [row[0] for row in result.to_table("t", [2]).rows][:2] == ["avg@2", "pass@2"]


def test_answers_are_read_by_what_they_are():
    texts = ["so \\boxed{0.5}", "the answer is $\\frac{1}{2}$", "3 and 4 are \\boxed{07}", "\\boxed{3}", "nothing"]
    assert score_answers(texts, ["1/2", "\\boxed{\\frac12}", "7", "4", "1"]) == [1, 1, 1, 0, 0]


class FakeEngine:
    closed = 0

    def close(self):
        FakeEngine.closed += 1


@pytest.fixture
def rounds(monkeypatch):
    """An engine that writes the right answer in every second round; the seeds that it was asked for."""
    seeds = []

    def complete(engine, prompt_ids, max_length, seed, stop_token_ids, title, sampling):
        assert sampling == {"temperature": 0.6, "top_p": 0.95}
        seeds.append(seed)
        if len(seeds) % 2:
            ids = [*tokenizer()("answer 07")["input_ids"], tokenizer().eos_token_id]
        else:  # cut off
            ids = tokenizer()("answer 08")["input_ids"]
        return dict.fromkeys(range(len(prompt_ids)), ids)

    FakeEngine.closed = 0
    monkeypatch.setattr(evaluation, "start_engine", lambda *args: FakeEngine())
    monkeypatch.setattr(evaluation, "complete_on_engine", complete)
    return seeds


def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def dial_score(texts, answers):
    """The tiny reasoner does not write LaTeX."""
    return [float(extract_answer(text) == answer) for text, answer in zip(texts, answers, strict=True)]


def evaluate(folder, **kwargs):
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    problems = [Problem("dial 01\n", "07"), Problem("dial 02\n", "07")]
    settings = {
        "score": dial_score,
        "num_samples": 2,
        "max_length": 32,
        "folder": folder,
        "problems": problems,
        **kwargs,
    }
    return evaluate_problems(model, tokenizer(), settings.pop("problems"), **settings)


def test_an_evaluation_goes_on_from_the_rounds_that_are_there(rounds, tmp_path):
    first = evaluate(tmp_path)
    assert first.correct.tolist() == [[True, True], [False, False]]
    assert first.lengths.tolist() == [[10, 10], [9, 9]] and first.truncated.tolist() == [[False, False], [True, True]]
    assert rounds == [0, 2] and FakeEngine.closed == 1
    again = evaluate(tmp_path)
    assert again.correct.tolist() == first.correct.tolist() and rounds == [0, 2]
    more = evaluate(tmp_path, num_samples=3)
    assert rounds == [0, 2, 4] and more.correct.tolist() == [*first.correct.tolist(), [True, True]]
    (tmp_path / "sample-0001.json").unlink()
    evaluate(tmp_path, num_samples=3)
    assert rounds == [0, 2, 4, 2]
    # What is there is compared again.
    other = evaluate(tmp_path, num_samples=3, score=lambda texts, answers: [float("8" in text) for text in texts])
    assert other.correct.tolist() == [[False, False], [True, True], [False, False]] and rounds == [0, 2, 4, 2]


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"temperature": 0.7}, "temperature"), ({"seed": 1}, "seed"), ({"max_length": 40}, "maximum length")],
)
def test_rounds_of_another_evaluation_are_refused(rounds, tmp_path, settings, name):
    evaluate(tmp_path)
    with pytest.raises(ValueError, match=f"samples of another evaluation: its {name} differ"):
        evaluate(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"problems": []}, "There must be problems"),
        (
            {"problems": [Problem("a", "7"), Problem("b", "")], "score": score_answers},
            "1 of 2 answers cannot be read, the first in row 1: ''",
        ),
        ({"max_length": 9}, "leave room for two more"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_an_engine_starts(rounds, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(tmp_path / "samples", **settings)
    assert rounds == [] and not (tmp_path / "samples").exists()


def test_problems_are_read_from_their_columns(tmp_path):
    file = tmp_path / "problems.jsonl"
    rows = [{"id": 1, "question": "1+1?", "answer": "one and one\n#### 2"}, {"id": 2, "question": "?", "answer": "3"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_problems(EvalArguments("m", str(file)))
    assert problems == [Problem("1+1?", "2"), Problem("?", "3")]
    assert load_problems(EvalArguments("m", str(file), num_problems=1)) == problems[:1]
    assert load_problems(EvalArguments("m", str(file), answer_column="id"))[1].answer == "2"
    with pytest.raises(ValueError, match="no column task; its columns are id, question, answer. Name one"):
        load_problems(EvalArguments("m", str(file), prompt_column="task"))
    for answer, match in ((None, "no single answer as answer: None"), (["1", "2"], "no single answer as answer")):
        file.write_text(json.dumps({"question": "?", "answer": answer}) + "\n")
        with pytest.raises(ValueError, match=f"Row 0 of .* has {match}"):
            load_problems(EvalArguments("m", str(file)))
    with pytest.raises(ValueError, match="could not be read as problems"):
        load_problems(EvalArguments("m", str(tmp_path / "none.jsonl")))


def test_a_text_in_a_chat_template_is_refused():
    check_texts([Problem("1+1?", "2"), Problem([{"role": "user", "content": "<eos>"}], "2")], tokenizer())
    with pytest.raises(ValueError, match="row 1 has the special token '<eos>'"):
        check_texts([Problem("1+1?", "2"), Problem("1+1?<eos>", "2")], tokenizer())


def test_a_completion_that_breaks_the_parser_is_wrong():
    assert score_answers(["\\boxed{\\binom{15000}{7500}}", "\\boxed{7}"], ["7", "7"]) == [0, 1]


def test_texts_get_the_instruction_and_conversations_stay():
    assert as_prompt("1+1?", "Think.", chat=False) == "1+1?\nThink.\n"
    assert as_prompt("1+1?\n", "", chat=False) == "1+1?\n"
    assert as_prompt("1+1?", "Think.", chat=True) == [{"role": "user", "content": "1+1?\nThink."}]
    conversation = [{"role": "user", "content": "1+1?"}]
    assert as_prompt(conversation, "Think.", chat=True) is conversation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_samples", "0"], "num_samples"),
        (["--k", "9"], "--k must lie"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_bad_arguments_are_refused(options, message, capsys):
    assert main(["eval", "--model_name_or_path", "m", "--dataset", "d", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def tasks():
    return sample_tasks("test", 24, seed=5)


@pytest.fixture(scope="module")
def command(tasks, tmp_path_factory):
    """Runs the command on the tiny reasoner, greedily, and returns its eval.json."""
    folder = tmp_path_factory.mktemp("eval")
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": task.prompt, "answer": task.answer}) + "\n" for task in tasks))

    def run(name, *options):
        arguments = ["--model_name_or_path", str(MODEL), "--dataset", str(file), "--instruction", ""]
        settings = ["--max_length", "760", "--output_dir", str(folder / name)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli_eval, "evaluate_problems", partial(evaluate_problems, score=dial_score))
            assert main(["eval", *arguments, *settings, *options]) == 0
        return json.loads((folder / name / "eval.json").read_text())

    return run


def test_the_command_measures_dense_and_sparse_generation(command, tasks, capsys):
    dense = command("dense", "--temperature", "0", "--num_samples", "1", "--k", "1")
    assert "avg@1" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    expected = accuracy(model, tokenizer(), tasks)["accuracy"]
    assert {name: entry["value"] for name, entry in dense["metrics"].items()} == pytest.approx(
        {"avg@1": expected, "pass@1": expected}
    )
    low, high = dense["metrics"]["avg@1"]["interval"]
    assert low < expected < high and not math.isclose(low, high)
    harsh = command(
        "harsh",
        "--temperature",
        "0",
        "--num_samples",
        "1",
        "--sparsity_schedule",
        str(MODEL.parent / "schedules" / "harsh"),
    )
    assert harsh["metrics"]["avg@1"]["value"] < expected - 0.2
    assert harsh["sparsity_schedule"].endswith("harsh") and dense["sparsity_schedule"] is None


def test_the_command_samples(command):
    """About two thirds of the answers are right at temperature 1, and half of them greedily."""
    sampled = command("sampled", "--num_samples", "2", "--k", "2")
    average, best = sampled["metrics"]["avg@2"]["value"], sampled["metrics"]["pass@2"]["value"]
    assert 0.35 < average < 0.85 and average < best
    assert (sampled["temperature"], sampled["top_p"], sampled["num_samples"]) == (0.6, 0.95, 2)


def test_two_processes_measure_what_one_does(tiny_qwen3, tmp_path):
    """Each samples a part of the problems, with seeds that are the problems' own."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps({"prompt": "abc" * (5 + i), "answer": str(i)}) + "\n" for i in range(5)))
    arguments = ["eval", "--model_name_or_path", tiny_qwen3, "--dataset", str(problems), "--dtype", "float32"]
    arguments += ["--num_samples", "2", "--k", "1", "--max_length", "120", "--output_dir"]
    assert main([*arguments, str(tmp_path / "one")]) == 0
    output = run_two_processes("-m", "sparrow_trl", *arguments, str(tmp_path / "two"))
    assert output.count("avg@2") == 1  # the first one alone says what came out
    for name in ("eval.json", "samples/sample-0000.json", "samples/sample-0001.json"):
        one, two = (json.loads((tmp_path / folder / name).read_text()) for folder in ("one", "two"))
        assert one == two
    assert len(set(one["texts"])) > 1
