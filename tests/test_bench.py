"""`sparrow-trl bench`: its arithmetic, what it refuses to report, and both variants through the command line."""

import dataclasses
import io
import json
import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_models import tiny_config, tiny_model

from sparrow_trl import SparsityScheduleConfig, preset_names
from sparrow_trl.bench import (
    BenchError,
    BenchOptions,
    BenchPlan,
    _run_variant,
    plan_bench,
    prepare_job,
    run_bench,
    summarize,
)
from sparrow_trl.bench_checks import VerificationError, check_full_step, check_kept_fraction, check_logprobs
from sparrow_trl.bench_plan import (
    FIRST_CONTEXT,
    MODEL_SHAPES,
    cache_bytes_per_token,
    engine_arguments,
    integrate_rollout,
    largest_batch,
    num_new_tokens,
    parse_workload,
    rollout_contexts,
    shape_config,
)
from sparrow_trl.bench_report import (
    compare_attention,
    draw,
    group_kernels,
    kernel_group,
    markdown_tables,
    print_tables,
    tables,
)
from sparrow_trl.bench_traffic import ModelShape, StepTraffic, kept_fraction, num_kept_pages, step_traffic


# 3 layers with 2 kv heads of 4 dimensions in 2 bytes: 32 bytes a token and layer, 16 bytes a landmark.
SHAPE = ModelShape(num_layers=3, kv_heads=2, head_dim=4, weight_bytes=1000, total_weight_bytes=1200, element_bytes=2)
SCHEDULE = SparsityScheduleConfig(top_k_pages=[1, 2, 3, 4], bin_tokens=64, dense_layers=[0])
# Every layer sparse, with twice the landmarks of half the size.
FP8_SCHEDULE = SparsityScheduleConfig(
    top_k_pages=[2],
    bin_tokens=64,
    page_score="group_softmax",
    landmarks_per_page=2,
    landmark_dtype="fp8_e4m3",
    dense_layers=[],
)

Counters = namedtuple("Counters", ["kept_fraction", "sparse_tokens"])


# What a step reads


@pytest.mark.parametrize("name", ["qwen3", "qwen3_untied", "qwen2", "llama"])
def test_weights_are_those_of_the_model(name):
    model = tiny_model(name)
    total = sum(parameter.numel() for parameter in model.parameters())
    shape = ModelShape.from_config(tiny_config(name), element_bytes=4)
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    assert shape.total_weight_bytes == 4 * total
    assert shape.weight_bytes == 4 * (total - embedding)
    cache = model(torch.ones(1, 1, dtype=torch.long), use_cache=True).past_key_values
    values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert shape.kv_bytes_per_token == 4 * values


@pytest.mark.parametrize(
    "name, parameters, kv_bytes",
    [
        ("qwen3-1.7b", 1_720_574_976, 114_688),
        ("qwen3-4b", 4_022_468_096, 147_456),
        ("qwen3-8b", 8_190_735_360, 147_456),
        ("qwen3-14b", 14_768_307_200, 163_840),
    ],
)
def test_model_shapes_have_the_published_sizes(name, parameters, kv_bytes):
    shape = ModelShape.from_config(shape_config(name))
    assert shape.total_weight_bytes == 2 * parameters
    assert shape.kv_bytes_per_token == kv_bytes
    assert list(MODEL_SHAPES)[:1] == ["qwen3-1.7b"]


def test_traffic_of_dense_attention():
    traffic = step_traffic(SHAPE, 5, [100, 102])
    assert traffic == StepTraffic(dense_kv=5 * 101 * 3 * 32, sparse_kv=0, landmarks=0, weights=1000)
    assert traffic.total == 5 * 101 * 96 + 1000


def test_traffic_of_a_schedule():
    # 170 tokens are 11 pages, in bin 11 // 4 = 2: 1 + 3 + 2 pages are kept, 5 are not, 8 are candidates.
    traffic = step_traffic(SHAPE, 2, [170], SCHEDULE)
    assert traffic.dense_kv == 2 * 170 * 32
    assert traffic.sparse_kv == 2 * 2 * (170 - 5 * 16) * 32
    assert traffic.landmarks == 2 * 2 * 8 * 16
    assert step_traffic(SHAPE, 1, [170], FP8_SCHEDULE).landmarks == 3 * 8 * 2 * 8


def test_a_row_that_keeps_all_pages_reads_no_landmarks():
    assert num_kept_pages(SCHEDULE, 64, 1) == 4
    assert step_traffic(SHAPE, 1, [64], SCHEDULE) == StepTraffic(64 * 32, 2 * 64 * 32, 0, 1000)
    assert step_traffic(SHAPE, 1, [1000], SparsityScheduleConfig.dense()).dense_kv == 1000 * 96


def test_kept_fraction_is_what_the_reference_selects():
    from sparrow_attention import select_pages

    lengths = [17, 64, 65, 127, 128, 200, 333]
    pages = -(-max(lengths) // 16)
    kept = torch.zeros(())
    for layer in range(SHAPE.num_layers):
        top_k = torch.tensor([SCHEDULE.top_k(length, layer) for length in lengths], dtype=torch.int32)
        kept += select_pages(
            torch.randn(len(lengths), 2, 8),
            torch.randn(len(lengths), 1, pages, 1, 8),
            torch.tensor(lengths),
            top_k,
            **{name: value for name, value in SCHEDULE.recipe.items() if name != "landmarks_per_page"},
        ).sum()
    cached = SHAPE.num_layers * sum(-(-length // 16) for length in lengths)
    assert kept_fraction(SCHEDULE, SHAPE.num_layers, lengths) == pytest.approx(kept.item() / cached)


# What is measured


def test_workloads_are_parsed():
    assert parse_workload("64x16384") == (64, 16_384)
    for text in ("64", "64x", "x5", "0x5", "64x-1", "ax5", "1x2x3"):
        with pytest.raises(ValueError, match="BATCHxCONTEXT"):
            parse_workload(text)


def test_the_largest_batch_fits_and_one_more_does_not():
    assert largest_batch(SHAPE, 100, 100 * 96 * 7) == 7
    assert largest_batch(SHAPE, 100, 100 * 96 * 7 - 1) == 6
    # A landmark of 48 bytes in 16 tokens adds 3 bytes to a token's 96.
    assert largest_batch(SHAPE, 100, 100 * 99 * 7, [SCHEDULE]) == 7
    assert largest_batch(SHAPE, 100, 100 * 99 * 7 - 1, [SCHEDULE]) == 6
    four = dataclasses.replace(SCHEDULE, page_score="group_softmax", landmarks_per_page=4)
    assert cache_bytes_per_token(SHAPE) == 96
    assert cache_bytes_per_token(SHAPE, [SCHEDULE, four, FP8_SCHEDULE]) == 96 + 4 * 3
    with pytest.raises(ValueError, match="Not one sequence of 100 tokens"):
        largest_batch(SHAPE, 100, 5)


@pytest.mark.parametrize("preset", [name for name in preset_names() if name.endswith("0.86")])
@pytest.mark.parametrize("others", [[], [dataclasses.replace(FP8_SCHEDULE, top_k_pages=[93])]], ids=["alone", "two"])
def test_lines_between_the_contexts_follow_the_schedules(preset, others):
    schedules = [SparsityScheduleConfig.from_preset(preset), *others]
    shape = ModelShape.from_config(shape_config(preset.removesuffix("-0.86")))
    options = BenchOptions(model="", schedules={})
    window = num_new_tokens(options.steps * options.blocks, options.warmup, 1)
    end, points = 32_768, options.rollout_points
    contexts = rollout_contexts(shape, schedules, end, window, points)
    assert contexts == sorted(set(contexts)) and len(contexts) == points
    assert contexts[0] == FIRST_CONTEXT and contexts[-1] == end - window
    middle = [context + window // 2 for context in contexts]
    for schedule in schedules:
        for context in contexts[:-1]:
            assert schedule.top_k(context + 1) == schedule.top_k(context + window)

        def reads(length, schedule=schedule):
            return step_traffic(shape, 1, [length], schedule).kv

        exact = 16 * sum(reads(length) for length in range(8, end, 16))
        assert integrate_rollout(middle, [reads(length) for length in middle], end) == pytest.approx(exact, rel=1e-2)


def test_contexts_of_a_dense_schedule_spread_out():
    contexts = rollout_contexts(SHAPE, [SparsityScheduleConfig.dense()], 4096, 10, 5)
    assert np.diff(contexts) == pytest.approx(np.mean(np.diff(contexts)), abs=16)
    with pytest.raises(ValueError, match="at least 2 points"):
        rollout_contexts(SHAPE, [SCHEDULE], 4096, 10, 1)
    with pytest.raises(ValueError, match="length above 266"):
        rollout_contexts(SHAPE, [SCHEDULE], 266, 10, 5)


def test_integration():
    assert integrate_rollout([1, 100], [2.0, 2.0], 100) == pytest.approx(200)
    assert integrate_rollout([1, 100], [1.0, 100.0], 100) == pytest.approx(5050)
    # Flat outside, linear inside: 1, 1, 1, 2, 3, 3.
    assert integrate_rollout([3, 5], [1.0, 3.0], 6) == pytest.approx(11)


def test_engine_arguments():
    arguments = engine_arguments("m", [(4, 100), (64, 20)], 9, device_is_cpu=False, block_size=None, dtype="bfloat16")
    assert arguments["max_num_seqs"] == 64 and arguments["max_model_len"] == 109
    assert arguments["compilation_config"] == {"cudagraph_capture_sizes": [4, 64]}
    assert "block_size" not in arguments and "enforce_eager" not in arguments
    assert arguments["kernel_config"] == {"enable_jit_warmup": False}
    without = engine_arguments("m", [(4, 100)], 9, device_is_cpu=False, compile=False)["compilation_config"]
    assert without == {"cudagraph_capture_sizes": [4], "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert engine_arguments("m", [(4, 100)], 9, device_is_cpu=True)["enforce_eager"]
    assert num_new_tokens(num_steps=10, warmup=2, prefill_steps=1) == 14


@pytest.fixture
def plan(tiny_qwen3):
    """Dense attention and two schedules, at workloads and along a rollout with a batch of its own."""
    options = BenchOptions(
        model=tiny_qwen3,
        schedules={"mine": SCHEDULE, "fp8": FP8_SCHEDULE},
        workloads=[(4, 170)],
        rollout_length=1000,
        rollout_batch=2,
        rollout_points=3,
        steps=2,
        blocks=2,
        warmup=1,
        kv_cache_memory_bytes=2**26,
    )
    return plan_bench(options)


def test_one_engine_of_each_variant_serves_workloads_and_rollout(plan):
    assert list(plan.jobs) == ["dense", "mine", "fp8"]
    assert [job["schedule"] and job["schedule"]["page_score"] for job in plan.jobs.values()] == [
        None,
        "mean_query",
        "group_softmax",
    ]
    assert plan.workloads == [(4, 170)] and [batch for batch, _ in plan.rollout_workloads] == [2, 2, 2]
    for job in plan.jobs.values():
        assert job["workloads"] == plan.workloads + plan.rollout_workloads
        assert job["engine"] == plan.jobs["dense"]["engine"]
    assert plan.jobs["mine"]["engine"]["max_num_seqs"] == 4


def test_preparing_compiles_what_the_measured_engines_look_for(plan):
    from vllm.engine.arg_utils import EngineArgs

    job = plan.jobs["fp8"]
    # As on a GPU, where the share of its memory is part of the arguments.
    job["engine"] |= {"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": 2**30}
    prepared = prepare_job(job, plan)
    assert prepared["workloads"] == prepared["breakdown"] == []
    assert prepared["engine"]["gpu_memory_utilization"] == pytest.approx(0.3)
    sequence = cache_bytes_per_token(plan.shape, [FP8_SCHEDULE]) * job["engine"]["max_model_len"]
    assert sequence < prepared["engine"]["kv_cache_memory_bytes"] < job["engine"]["kv_cache_memory_bytes"]

    def cache_key(engine):
        return EngineArgs(**engine).create_engine_config().compute_hash()

    assert cache_key(prepared["engine"]) == cache_key(job["engine"])
    assert cache_key({**job["engine"], "max_num_seqs": 5}) != cache_key(job["engine"])


def test_a_model_shape_keeps_its_path(monkeypatch, tmp_path):
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path), raising=False)
    plans = [
        plan_bench(BenchOptions(model="qwen3-1.7b", schedules={"mine": SCHEDULE}, workloads=[(1, length)]))
        for length in (64, 128)
    ]
    paths = {plan.jobs["dense"]["engine"]["model"] for plan in plans}
    assert paths == {str(tmp_path / "sparrow_trl" / "qwen3-1.7b")}
    config = json.loads((tmp_path / "sparrow_trl" / "qwen3-1.7b" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["model_type"] == "qwen3"


# What is refused


def test_log_probs_that_are_broken_are_refused():
    check_logprobs([-1.0, 0.0, -20.0], "3")
    for value in (float("nan"), float("-inf"), float("inf"), 0.5):
        with pytest.raises(VerificationError, match="Request 3 has the log-prob"):
            check_logprobs([-1.0, value], "3")


def test_a_kept_fraction_that_is_not_the_schedules_is_refused():
    right = kept_fraction(SCHEDULE, 3, range(201, 204))
    assert right < 1
    assert check_kept_fraction(Counters(right, 12), SCHEDULE, 3, 4, 200, 3) == right
    for fraction in (1.0, right * 1.001, None):
        with pytest.raises(VerificationError, match="the schedule says"):
            check_kept_fraction(Counters(fraction, 12), SCHEDULE, 3, 4, 200, 3)
    for tokens in (0, 8, 11, 13, 20):
        with pytest.raises(VerificationError, match="attended sparsely"):
            check_kept_fraction(Counters(right, tokens), SCHEDULE, 3, 4, 200, 3)


def test_a_step_without_some_request_is_refused():
    def outputs(*counts):
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * count)]) for count in counts]

    check_full_step(outputs(1, 1, 1), 3)
    for counts in [(1, 1), (1, 1, 1, 1), (1, 2), (1, 0, 1)]:
        with pytest.raises(VerificationError, match="instead of one to each of 3"):
            check_full_step(outputs(*counts), 3)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "qwen3-2b"}, "The shapes are qwen3-1.7b"),
        ({"load_format": "auto"}, "a shape without weights"),
        ({"dtype": "int8"}, "dtype must be"),
        ({"workloads": []}, "nothing to measure"),
        ({"schedules": {}}, "no schedule"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(monkeypatch, tmp_path, changes, message):
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path / "cache"), raising=False)
    options = {"model": "qwen3-1.7b", "schedules": {"mine": SCHEDULE}, "workloads": [(1, 64)], **changes}
    with pytest.raises(ValueError, match=message):
        run_bench(BenchOptions(**options), tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


def test_a_failed_worker_is_quoted(tmp_path):
    with pytest.raises(BenchError, match="(?s)mine variant failed with exit status 1.*KeyError: 'model_runner'"):
        _run_variant("mine", {}, tmp_path, print)
    assert "KeyError" in (tmp_path / "mine.log").read_text()


# What is reported


@pytest.mark.parametrize(
    "name, group",
    [
        ("_update_landmarks_kernel", "landmark update"),
        ("_choose_pages_kernel", "page selection"),
        ("_attend_kernel", "attention"),
        ("_merge_kernel", "merge"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...", "dense attention"),
        ("void flash::FlashAttnFwdCombine<cute::tuple<...", "merge"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, ...", "cache write"),
        ("nvjet_tst_64x32_64x16_4x1_v_bz_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_...", "matmul"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_select_0", "other"),
        ("Memcpy DtoH (Device -> Pinned)", "other"),
    ],
)
def test_kernels_are_grouped_by_name(name, group):
    assert kernel_group(name) == group


KERNELS = {
    "_attend_kernel": {"microseconds": 60.0, "calls": 2.0},
    "_merge_kernel": {"microseconds": 10.0, "calls": 2.0},
    "_choose_pages_kernel": {"microseconds": 30.0, "calls": 2.0},
    "nvjet_a": {"microseconds": 30.0, "calls": 1.0},
    "nvjet_b": {"microseconds": 10.0, "calls": 1.0},
}
DENSE_KERNELS = {"FlashAttnFwdSm90": {"microseconds": 50.0, "calls": 2.0}}


def test_breakdown():
    traffic = StepTraffic(dense_kv=3e6, sparse_kv=4e6, landmarks=9e9, weights=9e9)
    breakdown = group_kernels(KERNELS, 150e-6, traffic, num_layers=2)
    assert breakdown["groups"]["matmul"] == {"microseconds": 40.0, "calls": 2.0, "microseconds_per_layer": 20.0}
    assert breakdown["idle_microseconds"] == pytest.approx(10)
    assert breakdown["kv_bandwidth"] == pytest.approx({"attention": 7e6 / 60e-6, "merge": 1e11, "selection": 7e10})
    # 4 of the 7 bytes, so 40 of the 70 us of reading, are those of sparse layers.
    assert breakdown["selection_share"] == pytest.approx(30 / (30 + 40))
    dense = group_kernels(DENSE_KERNELS, 1e-4, StepTraffic(5e6, 0, 0, 0), num_layers=2)
    assert dense["kv_bandwidth"] == {"attention": 1e11, "merge": 1e11, "selection": 1e11}
    assert dense["selection_share"] is None
    variants = {"dense": {"breakdown": dense}, "mine": {"breakdown": breakdown}, "other": {}}
    compare_attention(variants)
    assert breakdown["kv_bandwidth_ratio"] == pytest.approx({"attention": 7 / 6, "merge": 1, "selection": 0.7})
    assert "kv_bandwidth_ratio" not in dense and variants["other"] == {}


def measured(seconds, kernels=None):
    """What a worker returns for a workload of 4 x 170, whose kernels it may have timed, and two of a rollout."""
    workloads = [
        {"batch": batch, "context": context, "lengths": [context + 1, context + 3], "step_seconds": times}
        for (batch, context), times in zip([(4, 170), (2, 256), (2, 1000)], seconds, strict=True)
    ]
    if kernels:
        workloads[0]["profile"] = {"lengths": [171, 172], "kernels": kernels}
    return {
        "copy_bandwidth": 1e6,
        "device": "a device",
        "model_runner": "v2",
        "versions": {"torch": "2", "triton": None},
        "workloads": workloads,
    }


PLAN = BenchPlan(
    shape=SHAPE,
    schedules={"mine": SCHEDULE, "fp8": FP8_SCHEDULE},
    workloads=[(4, 170)],
    rollout_workloads=[(2, 256), (2, 1000)],
    rollout_length=1000,
)


def make_record(variants, complete=True):
    return {
        "complete": complete,
        "model": "a model",
        "command": "sparrow-trl bench",
        **summarize(variants, PLAN),
        "variants": variants,
    }


@pytest.fixture
def variants():
    return {
        "dense": measured([[0.04, 0.05, 0.06], [0.1], [0.3]], DENSE_KERNELS),
        "mine": measured([[0.02, 0.02, 0.03], [0.1], [0.1]], KERNELS),
        "fp8": measured([[0.025], [0.05], [0.1]], KERNELS),
    }


def test_summary(variants):
    record = make_record(variants)
    (workload,) = record["workloads"]
    dense, mine, fp8 = (workload["variants"][name] for name in ("dense", "mine", "fp8"))
    assert dense["step_seconds"] == 0.05 and dense["step_seconds_spread"] == pytest.approx(0.02)
    assert dense["tokens_per_second"] == pytest.approx(80)
    assert dense["bytes"]["kv"] == 4 * 172 * 96 and dense["bytes"]["total"] == 4 * 172 * 96 + 1000
    assert dense["kv_bandwidth_over_step"] == pytest.approx(4 * 172 * 96 / 0.05)
    assert dense["roofline_seconds"] == pytest.approx((4 * 172 * 96 + 1000) / 1e6)
    assert dense["roofline_ratio"] == pytest.approx(0.05 / dense["roofline_seconds"])
    assert mine["bytes"]["kv"] < dense["bytes"]["kv"] and mine["bytes"]["landmarks"] > 0
    assert fp8["bytes"]["dense_kv"] == 0
    assert "speedup" not in dense
    assert mine["speedup"] == pytest.approx(2.5) and fp8["speedup"] == pytest.approx(2)
    # Kernels are held against the bytes of the steps in which they were timed.
    assert dense["breakdown"]["kv_bandwidth"]["attention"] == pytest.approx(4 * 171.5 * 96 / 50e-6)
    rollout = record["rollout"]
    assert [point["context"] for point in rollout["points"]] == [256, 1000]
    # 0.1 up to 258 cached tokens, linear to 0.3 at 1002, which is past the end.
    exact = 258 * 0.1 + sum(0.1 + 0.2 * (length - 258) / 744 for length in range(259, 1001))
    assert rollout["variants"]["dense"] == {"seconds": pytest.approx(exact)}
    assert rollout["variants"]["mine"] == {"seconds": pytest.approx(100), "speedup": pytest.approx(exact / 100)}
    assert rollout["points"][1]["variants"]["fp8"]["speedup"] == pytest.approx(3)


def test_kernels_of_sparse_variants_are_timed_where_they_do_not_overlap(tmp_path, monkeypatch):
    job = {"workloads": [[4, 170], [2, 256], [2, 1000]], "breakdown": [[4, 170]], "overlap": True}
    jobs = {"dense": {**job, "schedule": None}, "mine": {**job, "schedule": SCHEDULE.to_dict()}}
    plan, done = dataclasses.replace(PLAN, jobs=jobs), []

    def run(variant, job, output, report, merge, log_name=None):
        done.append((variant, len(job["workloads"]), len(job["breakdown"]), job["overlap"], log_name))
        result = measured([[0.02 if job["overlap"] else 0.03], [0.1], [0.1]], KERNELS if job["breakdown"] else None)
        del result["workloads"][len(job["workloads"]) :]
        merge(variant, result)

    monkeypatch.setattr("sparrow_trl.bench.plan_bench", lambda options: plan)
    monkeypatch.setattr("sparrow_trl.bench._run_variant", run)
    record = run_bench(BenchOptions(model="tiny", schedules={"mine": SCHEDULE}), tmp_path, print)
    assert done == [
        ("dense", 3, 1, True, None),
        ("mine", 3, 0, True, None),
        ("mine", 1, 1, False, "mine-separate"),
    ]
    (workload,) = record["workloads"]
    dense, mine = workload["variants"]["dense"], workload["variants"]["mine"]
    assert dense["step_seconds"] == dense["breakdown"]["step_seconds"] == 0.02
    assert mine["step_seconds"] == 0.02 and mine["breakdown"]["step_seconds"] == 0.03
    kernels = sum(group["microseconds"] for group in mine["breakdown"]["groups"].values())
    assert mine["breakdown"]["idle_microseconds"] == pytest.approx(0.03e6 - kernels)


def test_processes_take_turns_and_their_blocks_are_pooled(tmp_path, monkeypatch):
    job = {"workloads": [[4, 170], [2, 256], [2, 1000]], "breakdown": [[4, 170]], "overlap": True}
    jobs = {"dense": {**job, "schedule": None}, "mine": {**job, "schedule": SCHEDULE.to_dict()}}
    plan, done = dataclasses.replace(PLAN, jobs=jobs), []

    def run(variant, job, output, report, merge, log_name=None):
        done.append((variant, len(job["breakdown"]), log_name))
        number = sum(entry[0] == variant for entry in done)
        result = measured([[0.02, 0.03], [0.1 * number], [0.1]], KERNELS if job["breakdown"] else None)
        # As results grow: first a part of them.
        merge(variant, {**result, "workloads": result["workloads"][: 1 if job["overlap"] else 0]})
        merge(variant, result)

    monkeypatch.setattr("sparrow_trl.bench.plan_bench", lambda options: plan)
    monkeypatch.setattr("sparrow_trl.bench._run_variant", run)
    record = run_bench(BenchOptions(model="tiny", schedules={"mine": SCHEDULE}, processes=2), tmp_path, print)
    assert done == [
        ("dense", 1, None),
        ("mine", 0, None),
        ("mine", 1, "mine-separate"),
        ("dense", 0, "dense-2"),
        ("mine", 0, "mine-2"),
    ]
    raw = record["variants"]["dense"]["workloads"]
    assert [workload["step_seconds"] for workload in raw] == [[0.02, 0.03, 0.02, 0.03], [0.1, 0.2], [0.1, 0.1]]
    assert "profile" in raw[0]
    dense = record["rollout"]["points"][0]["variants"]["dense"]
    assert dense["step_seconds"] == pytest.approx(0.15) and dense["step_seconds_spread"] == pytest.approx(0.1)
    assert "breakdown" in record["workloads"][0]["variants"]["mine"]


def test_one_variant_alone_has_no_speedup(variants):
    summary = summarize({"mine": variants["mine"]}, PLAN)
    assert "speedup" not in summary["workloads"][0]["variants"]["mine"]
    assert list(summary["rollout"]["variants"]["mine"]) == ["seconds"]


def cut_off(variants):
    """What there is when the second variant was stopped within the rollout."""
    del variants["fp8"]
    variants["mine"]["workloads"].pop()
    return variants


@pytest.mark.parametrize("kept", ["all", "mine", "cut off"])
def test_tables_and_picture(variants, tmp_path, kept):
    from matplotlib import image

    if kept == "mine":
        variants = {"mine": variants["mine"]}
    record = make_record(cut_off(variants) if kept == "cut off" else variants, complete=kept != "cut off")
    console = Console(file=io.StringIO(), width=200)
    print_tables(record, console)
    text = console.file.getvalue()
    assert "4 x 170" in text and "20.00" in text and "Rollout of 2 x 1000" in text and "attention" in text
    assert ("2.50x" in text) == (kept != "mine")
    assert ("INCOMPLETE" in text) == (kept == "cut off")
    draw(record, tmp_path / "bench.png")
    assert [path.name for path in tmp_path.iterdir()] == ["bench.png"]
    pixels = image.imread(tmp_path / "bench.png")
    assert pixels.shape[1] > pixels.shape[0] > 300 and pixels[..., :3].std() > 0.05


def test_tables_in_markdown(variants):
    record = make_record(variants)
    steps, kernels, attention, rollout, points = tables(record)
    assert [row[1] for row in steps.rows] == ["dense", "mine", "fp8"]
    assert [row[-1] for row in steps.rows] == ["", "2.50x", "2.00x"]
    # 60 us of attention in 3 layers, beside 50 us of dense attention.
    assert ["attention", "", "", "60", "20.0", "60", "20.0"] in kernels.rows
    assert ["dense attention", "50", "16.7", "", "", "", ""] in kernels.rows
    assert attention.rows[0][3] == "" and attention.rows[1][3].endswith("%")
    assert [row[-1] for row in rollout.rows] == ["", "1.74x", "2.54x"]
    assert points.rows[1] == ["1000", "300.00", "100.00", "3.00x", "100.00", "3.00x"]
    for table in (steps, kernels, attention, rollout, points):
        assert all(len(row) == len(table.columns) for row in table.rows)

    text = markdown_tables(record)
    assert text.startswith("```bash\nsparrow-trl bench\n```\n\na model on a device (torch 2; model runner v2)")
    assert "\n\n**Decode steps**\n\n| batch x context | variant | ms a step |" in text
    assert "| 4 x 170 | mine | 20.00 | 10.00 | 200 |" in text
    grids = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(grids) == 5
    for grid in grids:
        assert len({line.count("|") for line in grid}) == 1 and set(grid[1]) == set("| -:")


def test_nothing_measured_yet_is_a_record_too():
    record = make_record({}, complete=False)
    assert record["workloads"] == [] and record["rollout"]["variants"] == {}
    assert "nothing was measured yet" in markdown_tables(record)


# All variants, through the command line


def bench_command(tiny_qwen3, tmp_path):
    SCHEDULE.save_pretrained(tmp_path / "mine")
    command = [sys.executable, "-m", "sparrow_trl", "bench", "--model", tiny_qwen3, "--load-format", "auto"]
    command += ["--schedule", str(tmp_path / "mine"), "--output", str(tmp_path / "out"), "--dtype", "float32"]
    command += ["--workload", "4x64", "--batch", "3", "--context", "200", "--steps", "3", "--blocks", "2"]
    return [*command, "--warmup", "1", "--block-size", "32", "--kv-cache-memory", "0.0625"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny model is for vLLM's CPU build")
def test_all_variants_on_the_cpu(tiny_qwen3, tmp_path):
    SparsityScheduleConfig.fixed(96).save_pretrained(tmp_path / "fixed")
    command = [*bench_command(tiny_qwen3, tmp_path), "--schedule", str(tmp_path / "fixed")]
    command += ["--profile", "rollout", "--max-length", "320", "--points", "2"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    for text in ("mine: the engine has started", "dense: 4 x 64:", "fixed: 3 x 200:", "Rollout of 3 x 320 tokens"):
        assert text in run.stdout
    names = {"bench.json", "bench.png", "dense.log", "mine.log", "fixed.log"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert record["complete"]
    raw = record["variants"]
    assert raw["dense"]["attention"] == ["vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"]
    assert raw["mine"]["attention"] == raw["fixed"]["attention"] == ["sparrow_trl.vllm_backend.SparseCPUAttentionImpl"]
    assert len({result["model_runner"] for result in raw.values()} & {"v1", "v2"}) == 1
    assert [(w["batch"], w["context"]) for w in record["workloads"]] == [(4, 64), (3, 200)]
    for workload in [*record["workloads"], *record["rollout"]["points"]]:
        dense, mine, fixed = (workload["variants"][name] for name in ("dense", "mine", "fixed"))
        assert mine["speedup"] > 0 and fixed["speedup"] > 0
        assert mine["bytes"]["kv"] <= dense["bytes"]["kv"]
    for result in raw.values():
        for workload in result["workloads"]:
            assert len(workload["step_seconds"]) == 2
            assert workload["verified"]["logprobs"] == 4 * workload["batch"]
    fractions = [workload["verified"]["kept_fraction"] for workload in raw["mine"]["workloads"]]
    assert fractions[1] == pytest.approx(kept_fraction(SCHEDULE, 4, range(201, 204))) and fractions[1] < 1
    assert record["rollout"]["batch"] == 3 and record["rollout"]["variants"]["fixed"]["speedup"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny model is for vLLM's CPU build")
def test_preparing_starts_all_engines_and_measures_nothing(tiny_qwen3, tmp_path):
    run = subprocess.run([*bench_command(tiny_qwen3, tmp_path), "--prepare"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    for variant in ("dense", "mine"):
        assert f"{variant}: the engine has started" in run.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"dense.log", "mine.log"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny model is for vLLM's CPU build")
def test_what_was_measured_before_a_failure_is_kept(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("sparrow_trl.bench.plan_bench", lambda options: plan)
    plan.jobs = {"dense": plan.jobs["dense"]}
    # Longer than the engine's longest sequence, which is found out when the second workload starts.
    plan.jobs["dense"]["workloads"] = [[4, 170], [2, 3000]]
    lines = []
    with pytest.raises(BenchError, match="(?s)dense variant failed.*3000"):
        run_bench(BenchOptions(model="tiny", schedules=plan.schedules), tmp_path, lines.append)
    record = json.loads((tmp_path / "bench.json").read_text())
    assert not record["complete"]
    assert record["workloads"][0]["variants"]["dense"]["step_seconds"] > 0
    assert "INCOMPLETE" in markdown_tables(record) and any("dense: 4 x 170:" in line for line in lines)
