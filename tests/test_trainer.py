"""`SparseRolloutGRPOTrainer` on a tiny model, from its arguments to its checkpoints."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fresh_process import run_in_a_process, run_two_processes
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_models import SHAPE, tiny_model, tiny_tokenizer
from tiny_training import RecordingTrainer, make_config, make_dataset, share_of_small_letters
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.integrations import integration_utils
from trl import TrlParser
from vllm import LLM
from vllm.logprobs import FlatLogprobs

from sparrow_trl import SparseRolloutGRPOConfig, SparseRolloutGRPOTrainer, SparsityScheduleConfig
from sparrow_trl import trainer as trainer_module
from sparrow_trl.callbacks import STATISTICS_NAME
from sparrow_trl.schedule import SCHEDULE_NAME


SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2, 3], bin_tokens=64, dense_layers=[0])
OTHER_SCHEDULE = SparsityScheduleConfig(top_k_pages=[0, 1], bin_tokens=96, dense_layers=[1, 3], recent_pages=1)
PRESET = "qwen3-1.7b-0.86"
END_TOKEN_IDS = [1, *range(3, SHAPE["vocab_size"], 3)]


class LogKeeper(TrainerCallback):
    """Stands for an experiment tracker."""

    logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


class ScheduleChange(TrainerCallback):
    """Changes the schedule after the first step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer.schedule = OTHER_SCHEDULE

    def attach(self, trainer):
        self.trainer = trainer


def make_trainer(model, config, trainer_class=RecordingTrainer, **kwargs):
    return trainer_class(model, share_of_small_letters, config, **{"train_dataset": make_dataset(16), **kwargs})


def make_main_trainer(model, output_dir, report_to, callbacks=None):
    config = make_config(
        output_dir,
        max_steps=3,
        temperature=0.8,
        report_to=report_to,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    eval_dataset = make_dataset(1, seed=1)
    return make_trainer(model, config, schedule=SCHEDULE, eval_dataset=eval_dataset, callbacks=callbacks)


@pytest.fixture(scope="module")
def main_run(tiny_qwen3, tmp_path_factory):
    """Three steps with an evaluation, a checkpoint and a report at each; the schedule changes after the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "log_keeper", LogKeeper)
        patch.setattr(LogKeeper, "logs", [])
        trainer = make_main_trainer(
            tiny_qwen3, tmp_path_factory.mktemp("main"), report_to="log_keeper", callbacks=[ScheduleChange()]
        )
        trainer.train()
        trainer.tracker_logs = LogKeeper.logs
    return trainer


@pytest.fixture(scope="module")
def reuse_run(tiny_qwen3_untied, tmp_path_factory):
    """Rollouts used twice, without the importance-sampling correction; the schedule is a file."""
    folder = tmp_path_factory.mktemp("reuse")
    SCHEDULE.save_pretrained(folder)
    config = make_config(
        folder / "out",
        max_steps=5,
        temperature=1.3,
        vllm_importance_sampling_correction=False,
        num_iterations=2,
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        gradient_checkpointing=True,
        sparsity_schedule=str(folder / SCHEDULE_NAME),
    )
    trainer = make_trainer(tiny_qwen3_untied, config)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def masked_run(tiny_qwen3, tmp_path_factory):
    """Truncated completions are masked out of the loss; the schedule is a folder."""
    folder = tmp_path_factory.mktemp("masked")
    OTHER_SCHEDULE.save_pretrained(folder)
    config = make_config(
        folder / "out",
        max_steps=2,
        mask_truncated_completions=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        acceptance_probe_fraction=1.0,
        beta=0.1,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    trainer = make_trainer(
        model, config, schedule=str(folder), processing_class=AutoTokenizer.from_pretrained(tiny_qwen3)
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def adapter_run(tiny_qwen3, tmp_path_factory):
    """A LoRA policy without the correction, whose reference is the same model with the adapter switched off."""
    config = make_config(
        tmp_path_factory.mktemp("adapter"),
        max_steps=3,
        learning_rate=3e-2,
        beta=0.04,
        vllm_importance_sampling_correction=False,
        gradient_checkpointing=True,
        save_strategy="steps",
        save_steps=3,
    )
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    trainer = make_trainer(
        tiny_qwen3, config, schedule=SCHEDULE, peft_config=LoraConfig(r=4, lora_alpha=16, target_modules=modules)
    )
    trainer.base_weights = {name: value.clone() for name, value in base_weights(trainer.model).items()}
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def short_run(tiny_qwen3, tmp_path_factory):
    """A third of the vocabulary ends a completion, often at the first token; the schedule is a preset."""
    folder = tmp_path_factory.mktemp("short")
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    model.generation_config.eos_token_id = END_TOKEN_IDS
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tiny_qwen3).save_pretrained(folder / "model")
    config = make_config(folder / "out", max_steps=2, acceptance_probe_fraction=1.0, sparsity_schedule=PRESET)
    trainer = make_trainer(str(folder / "model"), config)
    trainer.train()
    return trainer


RUNS = ["main_run", "reuse_run", "masked_run", "adapter_run", "short_run"]


@pytest.fixture(scope="module", params=RUNS)
def run(request):
    return request.getfixturevalue(request.param)


def training_rollouts(run):
    return [rollout for rollout in run.rollouts if rollout.mode == "train"]


def base_weights(model):
    return {name: value for name, value in model.state_dict().items() if "lora" not in name}


def sampled(logprobs, completion):
    return logprobs.gather(1, torch.tensor(completion)[:, None]).squeeze(1)


def assert_logprobs(rollout, distributions, tolerance=1e-3):
    """The engine's log-probs are those of `distributions`, but for the odd page chosen differently in a near-tie."""
    expected = [sampled(*row) for row in zip(distributions, rollout.completions, strict=True)]
    assert [len(logprobs) for logprobs in rollout.logprobs] == [len(logprobs) for logprobs in expected]
    assert np.abs(np.concatenate(rollout.logprobs) - np.concatenate(expected)).mean() < tolerance


def count_pages(rollout):
    """Pages kept and cached, from the definition: the last token of a completion is sampled and never attends."""
    schedule, kept, cached = rollout.schedule, 0, 0
    for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True):
        for length in range(len(prompt) + 1, len(prompt) + len(completion)):
            pages = -(-length // schedule.page_size)
            bin_index = pages // (schedule.bin_tokens // schedule.page_size)
            top_k = schedule.top_k_pages[min(bin_index, len(schedule.top_k_pages) - 1)]
            budget = schedule.sink_pages + top_k + schedule.recent_pages
            for layer in range(SHAPE["num_hidden_layers"]):
                kept += pages if layer in schedule.dense_layers else min(pages, budget)
                cached += pages
    return kept * SHAPE["num_key_value_heads"], cached * SHAPE["num_key_value_heads"]


def measured_rows(rollout):
    """Rows whose acceptance counts, and for each its cached lengths and positions: the first token is left out."""
    for probe in rollout.probes:
        prompt, completion = rollout.prompts[probe.row], rollout.completions[probe.row]
        if len(completion) > 1:
            yield probe.row, torch.arange(len(prompt) + 1, len(prompt) + len(completion)), slice(1, None)


def expected_metrics(rollout, min_tokens, top_k=20):
    """The acceptance metrics from the definition and the two full distributions."""
    lowers, uppers, lengths, divergences = [], [], [], []
    for row, row_lengths, positions in measured_rows(rollout):
        p, q = rollout.dense[row][positions].exp(), rollout.sparse[row][positions].exp()
        top = q.topk(top_k).indices
        lower = torch.minimum(p, q).gather(1, top).sum(1)
        lowers.append(lower)
        uppers.append(lower + torch.minimum(1 - p.gather(1, top).sum(1), 1 - q.gather(1, top).sum(1)))
        lengths.append(row_lengths)
        ratio = sampled(p, rollout.completions[row][positions]) / sampled(q, rollout.completions[row][positions])
        divergences.append(ratio - 1 - ratio.log())
    lower, upper, length = (torch.cat(values).double().numpy() for values in (lowers, uppers, lengths))
    schedule = rollout.schedule
    pages_per_bin = schedule.bin_tokens // schedule.page_size
    bins = -(-length // schedule.page_size) // pages_per_bin
    metrics = {
        "acceptance/mean": lower.mean(),
        "acceptance/share_below_0.5": (lower < 0.5).mean(),
        "acceptance/bound_gap": (upper - lower).mean(),
        "kl/sparse_dense": torch.cat(divergences).mean().item(),
    }
    for index in np.unique(bins).astype(int):
        if (bins == index).sum() >= min_tokens:
            start = index * schedule.bin_tokens
            metrics[f"acceptance/tail_bin_{start}"] = np.quantile(lower[bins == index], schedule.tail_quantile)
            top_k_pages = schedule.top_k_pages[min(index, len(schedule.top_k_pages) - 1)]
            budget = (schedule.sink_pages + top_k_pages + schedule.recent_pages) * schedule.page_size
            metrics[f"sparsity/budget_tokens_bin_{start}"] = budget
    tails = [value for name, value in metrics.items() if "tail_bin" in name]
    if tails:
        metrics["acceptance/tail"] = min(tails)
    return metrics


class TestRollouts:
    def test_the_logprobs_are_the_sparse_samplers(self, run):
        for rollout in training_rollouts(run):
            assert_logprobs(rollout, rollout.sparse)

    def test_padding_hides_no_difference(self, run):
        for rollout in training_rollouts(run):
            assert len(set(map(len, rollout.prompts))) > 1
            assert rollout.batch["prompt_mask"].sum() == sum(map(len, rollout.prompts))

    def test_kept_fraction_is_what_the_layers_read(self, run):
        for rollout in training_rollouts(run):
            kept, cached = count_pages(rollout)
            assert (rollout.counters.kept_pages, rollout.counters.cached_pages) == (kept, cached)
            assert rollout.metrics["sparsity/kept_fraction"] == kept / cached

    def test_no_metric_is_missing_or_nan(self, run):
        assert run.state.log_history
        for logs in run.state.log_history:
            for name, value in logs.items():
                assert value is not None and math.isfinite(value), name


class TestAcceptance:
    def test_bounds_bracket_the_exact_rate_at_the_right_lengths(self, run):
        for rollout in training_rollouts(run):
            rows = list(measured_rows(rollout))
            assert len(rollout.bounds) == len(rows) > 0
            for (row, row_lengths, positions), (lower, upper, lengths) in zip(rows, rollout.bounds, strict=True):
                p, q = rollout.dense[row][positions].exp(), rollout.sparse[row][positions].exp()
                exact = torch.minimum(p, q).sum(1)
                assert lengths.tolist() == row_lengths.tolist()
                assert (lower <= exact + 1e-2).all() and (exact <= upper + 1e-2).all()

    def test_metrics_are_their_definitions(self, run):
        for rollout in training_rollouts(run):
            prefixes = ("acceptance/", "kl/", "sparsity/budget")
            measured = {name: value for name, value in rollout.metrics.items() if name.startswith(prefixes)}
            assert measured == pytest.approx(expected_metrics(rollout, run.args.acceptance_min_tokens), abs=5e-3)

    def test_sparsity_shows(self, main_run):
        for rollout in training_rollouts(main_run):
            assert rollout.metrics["acceptance/mean"] < 0.95
            assert rollout.metrics["kl/sparse_dense"] > 1e-3

    def test_a_preset_that_keeps_every_page_accepts_everything(self, short_run):
        assert short_run.schedule == SparsityScheduleConfig.from_preset(PRESET)
        for rollout in training_rollouts(short_run):
            assert rollout.metrics["sparsity/kept_fraction"] == 1
            assert rollout.metrics["kl/sparse_dense"] < 1e-6
            assert rollout.metrics["acceptance/mean"] + rollout.metrics["acceptance/bound_gap"] > 0.999

    def test_share_of_rows(self, run):
        for rollout in training_rollouts(run):
            rows = [probe.row for probe in rollout.probes]
            assert len(rows) == len(set(rows)) == run.args.acceptance_probe_fraction * len(rollout.prompts)

    def test_reused_rollouts_are_measured_once(self, reuse_run):
        # Five steps of two iterations over two batches: one rollout at the first step and one at the fifth.
        assert [rollout.step for rollout in reuse_run.rollouts] == [0, 4]

    def test_statistics_cover_the_run(self, reuse_run):
        tokens = sum(len(lengths) for rollout in reuse_run.rollouts for _, _, lengths in rollout.bounds)
        assert sum(entry.tokens for entry in reuse_run.acceptance.bin_statistics()) == tokens

    def test_rows_follow_from_seed_and_step(self, main_run, monkeypatch):
        def rows_at(step, seed=42, num_rows=64):
            monkeypatch.setattr(main_run.args, "seed", seed)
            monkeypatch.setattr(main_run.state, "global_step", step)
            monkeypatch.setattr(main_run, "_step", step * main_run.args.gradient_accumulation_steps)
            return main_run._choose_probe_rows(num_rows)

        assert rows_at(0) == rows_at(0) == sorted(rows_at(0))
        assert len({tuple(rows_at(step)) for step in range(5)} | {tuple(rows_at(0, seed=7))}) == 6
        assert {row for step in range(20) for row in rows_at(step)} == set(range(64))
        monkeypatch.setattr(main_run.args, "acceptance_probe_interval", 3)
        assert [len(rows_at(step)) for step in range(7)] == [32, 0, 0, 32, 0, 0, 32]
        monkeypatch.setattr(main_run.args, "acceptance_probe_fraction", 0.01)
        assert len(rows_at(3)) == 1
        monkeypatch.setattr(main_run.args, "acceptance_probe_fraction", 0)
        assert rows_at(3) == []

    def test_switched_off(self, main_run, monkeypatch):
        monkeypatch.setattr(main_run.args, "acceptance_probe_fraction", 0)
        rollout = roll_out(main_run)
        assert rollout.probes == rollout.bounds == []
        assert {name for name in rollout.metrics if name.startswith(("acceptance", "kl", "sparsity"))} == {
            "sparsity/kept_fraction"
        }

    def test_a_head_that_transforms_its_logits_is_noticed(self, main_run, monkeypatch):
        gather = trainer_module.gather_dense_logprobs
        monkeypatch.setattr(
            trainer_module, "gather_dense_logprobs", lambda *args, **kwargs: 0.8 * gather(*args, **kwargs)
        )
        with pytest.raises(RuntimeError, match="acceptance_probe_fraction=0"):
            roll_out(main_run)

    def test_a_logit_rounded_elsewhere_is_no_such_head(self, main_run, monkeypatch):
        gather = trainer_module.gather_dense_logprobs

        def round_one(*args, **kwargs):
            logprobs = gather(*args, **kwargs)
            logprobs[1, 0] += 0.125  # a unit in the last place of a bfloat16 logit of 16 and more
            return logprobs

        monkeypatch.setattr(trainer_module, "gather_dense_logprobs", round_one)
        roll_out(main_run)


def roll_out(run, num_prompts=2):
    """Generate and score one batch in training mode, and return its record."""
    run.model.train()
    rows = run.train_dataset.select(range(num_prompts)).to_list()
    run._metrics["train"].clear()
    try:
        run._generate_and_score_completions([row for row in rows for _ in range(run.num_generations)])
    finally:
        rollout = run.rollouts.pop()
    return rollout


class TestImportanceSampling:
    def test_default_mode(self, main_run):
        assert SparseRolloutGRPOConfig.vllm_importance_sampling_mode == "token_truncate"
        assert main_run.vllm_importance_sampling_mode == "token_truncate"

    @pytest.mark.parametrize("name", ["main_run", "short_run", "masked_run"])
    def test_ratio_is_dense_over_sparse(self, request, name):
        run = request.getfixturevalue(name)
        for rollout in training_rollouts(run):
            ratio = rollout.batch["importance_sampling_ratio"]
            assert ratio.shape == rollout.batch["completion_ids"].shape and ratio.isfinite().all()
            for row, completion in enumerate(rollout.completions):
                if rollout.batch["completion_mask"][row].any():
                    log_ratio = sampled(rollout.dense[row] - rollout.sparse[row], completion)
                    expected = log_ratio.exp().clamp(max=run.vllm_importance_sampling_clip_max)
                    assert (ratio[row, : len(completion)] - expected).abs().mean() < 2e-3

    def test_off(self, reuse_run):
        assert all("importance_sampling_ratio" not in rollout.batch for rollout in reuse_run.rollouts)


class TestShortCompletions:
    def test_any_end_token_may_come_first(self, short_run):
        lengths = [len(ids) for rollout in short_run.rollouts for ids in rollout.completions]
        assert 1 in lengths and max(lengths) > 3
        for rollout in short_run.rollouts:
            ended = [completion[-1] in END_TOKEN_IDS for completion in rollout.completions]
            assert all(end or len(ids) == 40 for end, ids in zip(ended, rollout.completions, strict=True))
            assert len({ids[-1] for ids in rollout.completions} & set(END_TOKEN_IDS)) > 1
            assert rollout.metrics["completions/clipped_ratio"] == ended.count(False) / len(ended)
            assert rollout.metrics["completions/min_length"] == 1

    @pytest.mark.parametrize("name", ["main_run", "reuse_run", "adapter_run"])
    def test_empty_completions(self, request, name, monkeypatch):
        run = request.getfixturevalue(name)
        monkeypatch.setattr(run.args, "acceptance_probe_fraction", 1.0)
        generate = LLM.generate

        def some_empty(self, *args, **kwargs):
            outputs = generate(self, *args, **kwargs)
            for output in outputs[:3] if len(outputs) == 8 else []:
                output.outputs[0].token_ids, output.outputs[0].logprobs = [], FlatLogprobs()
            return outputs

        monkeypatch.setattr(LLM, "generate", some_empty)
        rollout = roll_out(run)
        assert [len(ids) for ids in rollout.completions[:3]] == [1, 1, 1]
        assert len(rollout.probes) == 8 and len(rollout.bounds) == 5
        assert all(math.isfinite(value) for value in rollout.metrics.values())
        assert rollout.batch.get("importance_sampling_ratio", torch.zeros(1)).isfinite().all()
        with torch.no_grad():
            assert run._compute_loss(run.model, rollout.batch).isfinite()


class TestEvaluation:
    def test_dense_by_default_and_sparse_again_afterwards(self, main_run):
        modes = [rollout.mode for rollout in main_run.rollouts]
        assert modes == ["train", "eval"] * 3
        for rollout in main_run.rollouts:
            if rollout.mode == "train":
                assert 0 < rollout.counters.kept_pages < rollout.counters.cached_pages
            else:
                assert vars(rollout.counters) == dict.fromkeys(vars(rollout.counters), 0)
                assert rollout.probes == []
                assert_logprobs(rollout, rollout.dense)

    def test_sparse_on_request(self, main_run, monkeypatch):
        monkeypatch.setattr(main_run.args, "dense_evaluation", False)
        known = main_run.acceptance.state_dict()
        metrics = main_run.evaluate()
        rollout = main_run.rollouts.pop()
        kept, cached = count_pages(rollout)
        assert rollout.mode == "eval" and metrics["eval_sparsity/kept_fraction"] == kept / cached < 1
        assert_logprobs(rollout, rollout.sparse)
        assert main_run.acceptance.state_dict() == known

    def test_metrics_of_an_evaluation_are_its_own(self, main_run):
        evaluations = [logs for logs in main_run.state.log_history if "eval_reward" in logs]
        assert len(evaluations) >= 3
        for logs in evaluations[:3]:
            assert not [name for name in logs if "sparsity" in name or "acceptance" in name or "kl/" in name]


class TestReports:
    def test_log_history_and_trackers_get_the_metrics(self, main_run):
        history = [logs for logs in main_run.state.log_history if "loss" in logs]
        tracked = [logs for _, logs in main_run.tracker_logs if "loss" in logs]
        assert len(history) == len(tracked) == 3
        for logs, sent, rollout in zip(history, tracked, training_rollouts(main_run), strict=True):
            expected = expected_metrics(rollout, main_run.args.acceptance_min_tokens)
            expected["sparsity/kept_fraction"] = rollout.counters.kept_fraction
            for metrics in (logs, sent):
                own = {
                    name: value for name, value in metrics.items() if name.startswith(("acceptance", "sparsity", "kl"))
                }
                assert own == pytest.approx(expected, abs=5e-3)

    def test_names(self, main_run):
        names = {name for logs in main_run.tracker_logs[0][1:] for name in logs}
        assert {name for name in names if name.startswith(("acceptance", "sparsity", "kl/"))} == {
            "acceptance/tail",
            "acceptance/mean",
            "acceptance/share_below_0.5",
            "acceptance/bound_gap",
            "acceptance/tail_bin_64",
            "acceptance/tail_bin_128",
            "acceptance/tail_bin_192",
            "sparsity/budget_tokens_bin_64",
            "sparsity/budget_tokens_bin_128",
            "sparsity/budget_tokens_bin_192",
            "sparsity/kept_fraction",
            "kl/sparse_dense",
        }


class TestScheduleChange:
    def test_takes_effect_at_the_next_rollout(self, main_run):
        assert [rollout.schedule for rollout in training_rollouts(main_run)] == [
            SCHEDULE,
            OTHER_SCHEDULE,
            OTHER_SCHEDULE,
        ]
        assert main_run.schedule == main_run.acceptance.schedule == OTHER_SCHEDULE

    def test_by_name(self, main_run):
        main_run.schedule = PRESET
        try:
            rollout = roll_out(main_run)
            assert rollout.schedule == SparsityScheduleConfig.from_preset(PRESET)
            assert rollout.metrics["sparsity/kept_fraction"] == 1
        finally:
            main_run.schedule = OTHER_SCHEDULE

    def test_what_does_not_fit_changes_nothing(self, main_run):
        with pytest.raises(ValueError, match="does not divide"):
            main_run.schedule = SparsityScheduleConfig(page_size=64, bin_tokens=128, top_k_pages=[1])
        assert main_run.schedule == main_run.acceptance.schedule == OTHER_SCHEDULE


class TestCheckpoints:
    def test_hold_the_schedule_in_use(self, main_run):
        folder = Path(main_run.args.output_dir)
        for step, schedule in ((1, OTHER_SCHEDULE), (2, OTHER_SCHEDULE), (3, OTHER_SCHEDULE)):
            checkpoint = folder / f"checkpoint-{step}"
            assert SparsityScheduleConfig.from_pretrained(checkpoint) == schedule
            assert (checkpoint / STATISTICS_NAME).is_file()
            AutoModelForCausalLM.from_pretrained(checkpoint)

    def test_save_model(self, main_run, tmp_path):
        main_run.save_model(tmp_path)
        assert SparsityScheduleConfig.from_pretrained(tmp_path) == main_run.schedule
        weights = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in main_run.model.state_dict().items())

    def test_model_card(self, main_run):
        card = (Path(main_run.args.output_dir) / "README.md").read_text()
        for text in ("- sparrow-trl", "- sparse-rollout", "- grpo", "2606.08446", "zhou2026sparrow"):
            assert text in card

    def test_resumed_run_continues_like_the_unbroken_one(self, main_run, tiny_qwen3, tmp_path):
        checkpoint = str(Path(main_run.args.output_dir) / "checkpoint-2")
        resumed = make_main_trainer(tiny_qwen3, tmp_path, report_to="none")
        resumed.train(resume_from_checkpoint=checkpoint)
        assert resumed.state.global_step == 3
        assert resumed.schedule == resumed.acceptance.schedule == OTHER_SCHEDULE
        assert SparsityScheduleConfig.from_pretrained(tmp_path / "checkpoint-3") == OTHER_SCHEDULE
        expected = main_run.rollouts[4]
        assert resumed.rollouts[0].prompts == expected.prompts
        assert [list(ids) for ids in resumed.rollouts[0].completions] == [list(ids) for ids in expected.completions]
        assert [probe.row for probe in resumed.rollouts[0].probes] == [probe.row for probe in expected.probes]
        for name in ("model.safetensors", "optimizer.pt", STATISTICS_NAME):
            one, other = (Path(folder) / "checkpoint-3" / name for folder in (tmp_path, main_run.args.output_dir))
            if name.endswith(".json"):
                assert json.loads(one.read_text()) == json.loads(other.read_text())
            else:
                load = load_file if name.endswith("safetensors") else torch.load
                torch.testing.assert_close(load(one), load(other), atol=0, rtol=0)


class TestAdapter:
    def test_trains_the_adapter_alone(self, adapter_run):
        weights = base_weights(adapter_run.model)
        assert weights.keys() == adapter_run.base_weights.keys()
        assert all(torch.equal(value, adapter_run.base_weights[name]) for name, value in weights.items())
        adapter = adapter_run.model.state_dict()
        assert all(value.abs().max() > 1e-2 for name, value in adapter.items() if "lora_B" in name)

    def test_the_engine_follows_the_adapter(self, adapter_run):
        prompts = adapter_run.rollouts[0].prompts
        adapter_run.vllm_generation.sync_weights()
        assert adapter_run.vllm_generation.check_weights(prompts) < 1e-4
        with adapter_run.model.disable_adapter(), pytest.raises(RuntimeError, match="differ from the policy's"):
            adapter_run.vllm_generation.check_weights(prompts)

    def test_checkpoint_holds_adapter_and_schedule(self, adapter_run):
        folder = Path(adapter_run.args.output_dir) / "checkpoint-3"
        assert SparsityScheduleConfig.from_pretrained(folder) == SCHEDULE
        assert (folder / "adapter_config.json").is_file() and not (folder / "model.safetensors").exists()
        assert all("lora" in name for name in load_file(folder / "adapter_model.safetensors"))


def test_bf16_policy(tmp_path):
    """Autocast decides the engine's dtype, and the log-probs of both sides agree within rounding."""
    model = tiny_model("qwen3")
    with torch.no_grad():  # the random model's wide weights turn rounding into large errors
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.dim() == 2 else 1)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    trainer = make_trainer(
        str(tmp_path / "model"), make_config(tmp_path / "out", bf16=True, max_steps=2), schedule=SCHEDULE
    )
    trainer.train()
    assert trainer.vllm_generation.llm.model_config.dtype == trainer.vllm_generation.engine_dtype == torch.bfloat16
    for rollout in trainer.rollouts:
        differences = [
            np.abs(logprobs - sampled(sparse, completion).numpy())
            for logprobs, sparse, completion in zip(rollout.logprobs, rollout.sparse, rollout.completions, strict=True)
        ]
        assert np.concatenate(differences).mean() < 2e-2
        for (row, _, positions), (lower, upper, _) in zip(measured_rows(rollout), rollout.bounds, strict=True):
            exact = torch.minimum(rollout.dense[row][positions].exp(), rollout.sparse[row][positions].exp()).sum(1)
            assert (lower <= exact + 5e-2).all() and (exact <= upper + 5e-2).all()


def test_two_ranks_measure_together(tiny_qwen3, tmp_path):
    script = Path(__file__).with_name("two_rank_training.py")
    run_two_processes(str(script), tiny_qwen3, str(tmp_path))
    one, other = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert one["num_processes"] == other["num_processes"] == 2
    assert one["completions"] != other["completions"]
    assert one["metrics"] == other["metrics"] and one["statistics"] == other["statistics"]
    for step, metrics in enumerate(one["metrics"]):
        tokens, lower, kept, cached = (
            one[name][step] + other[name][step]
            for name in ("probed_tokens", "lower_sums", "kept_pages", "cached_pages")
        )
        assert min(one["probed_tokens"][step], other["probed_tokens"][step]) > 0
        assert metrics["acceptance/mean"] == pytest.approx(lower / tokens, abs=1e-5)
        assert metrics["sparsity/kept_fraction"] == kept / cached
    assert one["weights_sum"] == other["weights_sum"]
    assert max(one["engine_difference"], other["engine_difference"]) < 1e-4
    assert SparsityScheduleConfig.from_pretrained(tmp_path / "checkpoint-2") == SCHEDULE


def test_notebook(tiny_qwen3, tmp_path):
    """One import and one constructor, at the top level of a script without a guard, as in a notebook's cells."""
    cells = f"""
from tiny_training import make_config, make_dataset, share_of_small_letters
config = make_config({str(tmp_path / "out")!r}, max_steps=1)

from sparrow_trl import SparseRolloutGRPOTrainer
trainer = SparseRolloutGRPOTrainer(
    {tiny_qwen3!r}, share_of_small_letters, config, train_dataset=make_dataset(16), schedule={PRESET!r}
)
trainer.train()
print("steps", trainer.state.global_step)
"""
    script = tmp_path / "cells.py"
    script.write_text(cells)
    assert "steps 1" in run_in_a_process([sys.executable, str(script)])
    assert (tmp_path / "out" / "acceptance.png").is_file()


class TestArguments:
    @pytest.fixture
    def engine_arguments(self, tiny_qwen3, tmp_path, monkeypatch):
        """Maps arguments of the trainer to those its engine would be built with."""

        class Built(Exception):
            pass

        def build(**kwargs):
            raise Built(kwargs)

        monkeypatch.setattr(trainer_module, "SparseVLLMGeneration", build)

        def arguments(config=None, **kwargs):
            with pytest.raises(Built) as built:
                config = make_config(tmp_path / "out") if config is None else config
                make_trainer(tiny_qwen3, config, SparseRolloutGRPOTrainer, **kwargs)
            return built.value.args[0]

        return arguments

    def test_a_schedule_comes_in_many_forms(self, engine_arguments, tmp_path):
        SCHEDULE.save_pretrained(tmp_path)
        preset = SparsityScheduleConfig.from_preset(PRESET)
        for given, expected in (
            (SCHEDULE, SCHEDULE),
            (PRESET, preset),
            (str(tmp_path), SCHEDULE),
            (tmp_path / SCHEDULE_NAME, SCHEDULE),
        ):
            assert engine_arguments(schedule=given)["schedule"] == expected
        for given, expected in ((PRESET, preset), (str(tmp_path), SCHEDULE)):
            config = make_config(tmp_path / "out", sparsity_schedule=given)
            assert engine_arguments(config)["schedule"] == expected

    @pytest.mark.parametrize("source", ["command line", "yaml"])
    def test_a_config_from_outside(self, engine_arguments, tmp_path, source):
        values = {
            "output_dir": str(tmp_path / "out"),
            "sparsity_schedule": PRESET,
            "dense_evaluation": False,
            "vllm_block_size": 64,
            "vllm_engine_kwargs": '{"enforce_eager": true, "max_num_seqs": 7}',
            "acceptance_probe_fraction": 0.25,
            "acceptance_top_k": 30,
            "weight_sync_check_interval": 0,
            "temperature": 0.7,
            "use_cpu": True,
            "bf16": False,
        }
        if source == "yaml":
            (tmp_path / "config.yaml").write_text(json.dumps(values))
            arguments = ["--config", str(tmp_path / "config.yaml")]
        else:
            arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        (config,) = TrlParser(SparseRolloutGRPOConfig).parse_args_and_config(arguments)
        assert config.dense_evaluation is False and config.acceptance_probe_fraction == 0.25
        built = engine_arguments(config)
        assert built["engine_kwargs"] == {"enforce_eager": True, "max_num_seqs": 7}
        assert (built["block_size"], built["probe_top_k"], built["weight_sync_check_interval"]) == (64, 30, 0)
        assert built["temperature"] == 0.7
        assert built["schedule"] == SparsityScheduleConfig.from_preset(PRESET)
