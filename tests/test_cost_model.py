"""The cost formulas against values worked out by hand, and the times against what single steps read."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from sparrow_trl import SparsityScheduleConfig, cost_model
from sparrow_trl.bench_plan import shape_config
from sparrow_trl.cost_model import (
    HARDWARE,
    CostShape,
    Hardware,
    dense_cost,
    get_hardware,
    predicted_speedup,
    rollout_seconds,
    schedule_cost,
    sparse_cost,
    step_seconds,
)


# P = 1200 / 2 = 600, D = 2 layers x 2 heads x 4 = 16, r = 6 / 2 = 3. Every step reads 1000 bytes of weights.
SHAPE = CostShape(
    num_layers=2, kv_heads=2, head_dim=4, weight_bytes=1000, total_weight_bytes=1200, element_bytes=2, query_heads=6
)
ENDLESS = 1e30

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def qwen():
    return CostShape.from_config(shape_config("qwen3-1.7b"))


# Hardware


def test_intensity_is_flops_per_number_read():
    hardware = Hardware("toy", peak_flops=1000, bandwidth=50)
    assert hardware.arithmetic_intensity() == 40  # 20 FLOPs a byte, 2 bytes
    assert hardware.arithmetic_intensity(4) == 80


@pytest.mark.parametrize(
    ("name", "intensity"),
    # TFLOP/s x 2 bytes / TB/s: 989.5 / 4.8, 989.5 / 3.35, 312 / 2.039, 2250 / 8, 362.05 / 0.864
    [("H200", 412.3), ("H100", 590.7), ("A100", 306.0), ("B200", 562.5), ("L40S", 838.1)],
)
def test_the_table_has_the_datasheets_dense_rates(name, intensity):
    assert get_hardware(name.lower()) is HARDWARE[name]
    assert HARDWARE[name].arithmetic_intensity() == pytest.approx(intensity, abs=0.05)


def test_hardware_of_the_user_is_taken_as_it_is():
    hardware = Hardware("mine", 1e15, 5e12)
    assert get_hardware(hardware) is hardware


@pytest.mark.parametrize("name", ["H20", "", None])
def test_unknown_hardware_is_refused_with_the_known_names(name):
    with pytest.raises(ValueError, match="H200, H100, A100, B200, L40S.*peak_flops") as error:
        get_hardware(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("value", [0, -1e12, float("nan"), float("inf"), "1e12", True, None])
@pytest.mark.parametrize("field", ["peak_flops", "bandwidth"])
def test_hardware_needs_positive_rates(field, value):
    with pytest.raises(ValueError, match=f"`{field}` must be a number above 0"):
        Hardware(**{"name": "toy", "peak_flops": 1.0, "bandwidth": 1.0, field: value})


# Shapes


def test_shape_of_qwen3(qwen):
    # A layer: 2048 x (2048 + 2 x 1024 + 2048) attention, 3 x 2048 x 6144 MLP, 2 x 2048 + 2 x 128 norms = 50,336,000.
    # 28 of them, 151,936 x 2048 embeddings that are the head too, and the last norm's 2048.
    assert qwen.num_parameters == 28 * 50_336_000 + 151_936 * 2048 + 2048
    assert qwen.kv_dim == 28 * 1024
    assert qwen.gqa_ratio == 2


def test_parameters_count_an_untied_embedding_that_steps_do_not_read():
    config = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    shape = CostShape.from_config(LlamaConfig(**config, **heads, tie_word_embeddings=False), element_bytes=4)
    assert shape.num_parameters - shape.weight_bytes / 4 == 50 * 24
    assert (shape.kv_dim, shape.gqa_ratio) == (3 * 2 * 16, 3)


def test_a_model_without_groups_has_a_ratio_of_one():
    shape = CostShape.from_config(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=32))
    assert (shape.kv_dim, shape.gqa_ratio) == (2 * 24, 1)


# The paper's formulas


def test_dense_cost():
    # C_comp: 2 P N L_out = 2 x 600 x 4 x 20 = 96,000; r (2 L_in + L_out) L_out N D = 3 x 40 x 20 x 4 x 16 = 153,600
    # C_mem: 2 L_in L_out D = 2 x 10 x 20 x 16 = 6,400; N L_out^2 D = 4 x 400 x 16 = 25,600
    cost = dense_cost(SHAPE, num_samples=4, prompt_tokens=10, output_tokens=20)
    assert cost.flops == 96_000 + 153_600
    assert cost.elements == 6_400 + 25_600
    assert cost.eflops(100) == 249_600 + 100 * 32_000


def test_sparse_cost():
    # C_comp: 96,000 as dense; 2 r N D B L_out = 2 x 3 x 4 x 16 x 32 x 20 = 245,760;
    # scoring 2 N L_in D L_out = 2 x 4 x 10 x 16 x 20 = 25,600 and r N D L_out^2 / (2 s) = 3 x 64 x 400 / 32 = 2,400
    # C_mem: 2 N D B L_out = 2 x 64 x 32 x 20 = 81,920; scoring 2 L_in D L_out = 6,400 and 64 x 400 / 32 = 800
    cost = sparse_cost(SHAPE, num_samples=4, prompt_tokens=10, output_tokens=20, budget_tokens=32, page_size=16)
    assert cost.flops == 96_000 + 245_760 + 25_600 + 2_400
    assert cost.elements == 81_920 + 6_400 + 800


def test_larger_pages_score_less():
    # s = 64 instead of 16: a quarter of 2,400 and of 800.
    cost = sparse_cost(SHAPE, num_samples=4, prompt_tokens=10, output_tokens=20, budget_tokens=32, page_size=64)
    assert cost.flops == 96_000 + 245_760 + 25_600 + 600
    assert cost.elements == 81_920 + 6_400 + 200


def test_the_integral_of_a_constant_budget_is_the_closed_form():
    arguments = {"num_samples": 3, "prompt_tokens": 1024, "output_tokens": 5000}
    integral = schedule_cost(SHAPE, **arguments, schedule=SparsityScheduleConfig.fixed(1024, dense_layers=[]))
    closed = sparse_cost(SHAPE, **arguments, budget_tokens=1024)
    assert dataclasses.astuple(integral) == pytest.approx(dataclasses.astuple(closed), rel=1e-12)


def test_the_integral_reads_no_more_than_the_context():
    # Appendix F, K = 1024 and no prompt: L_dense = 1024 of 4096 tokens,
    # H = 1024^2 + 2 x 1024 x 3072 = 7,340,032, which is 2 L_out B for B = 896.
    integral = schedule_cost(SHAPE, 3, 0, 4096, SparsityScheduleConfig.fixed(1024, dense_layers=[]))
    assert integral == sparse_cost(SHAPE, 3, 0, 4096, budget_tokens=896)


def test_a_schedule_that_keeps_everything_costs_dense_attention_and_scoring():
    keep_all = SparsityScheduleConfig(top_k_pages=[1000], dense_layers=[])
    dense, kept = dense_cost(SHAPE, 1, 40, 3000), schedule_cost(SHAPE, 1, 40, 3000, keep_all)
    # Scoring: 2 x 40 x 16 x 3000 + 16 x 3000^2 / 32 numbers; 3 times the second part in FLOPs
    assert kept.elements - dense.elements == pytest.approx(3_840_000 + 4_500_000)
    assert kept.flops - dense.flops == pytest.approx(3_840_000 + 13_500_000)


def test_a_schedule_is_integrated_over_its_bins():
    # Bin 1 starts with page 125, at 1985 tokens. Of lengths 1001 to 3000, 984 read 32 pages (512 tokens) and 1016
    # read 64 (1024): 772.096 on average.
    schedule = SparsityScheduleConfig(top_k_pages=[29, 61], dense_layers=[])
    cost = schedule_cost(SHAPE, 2, 1000, 2000, schedule)
    expected = sparse_cost(SHAPE, 2, 1000, 2000, budget_tokens=772.096)
    assert dataclasses.astuple(cost) == pytest.approx(dataclasses.astuple(expected), rel=1e-12)


def test_layers_with_tables_of_their_own_are_averaged():
    # Layer 0 reads 32 pages (512 tokens), layer 1 reads 8 (128): 320 on average.
    schedule = SparsityScheduleConfig(top_k_pages=[29], layer_top_k_pages={"1": [5]}, dense_layers=[])
    assert schedule_cost(SHAPE, 2, 600, 500, schedule) == sparse_cost(SHAPE, 2, 600, 500, budget_tokens=320)


def test_the_formula_knows_dense_layers_only_where_all_are():
    cost = schedule_cost(SHAPE, 2, 600, 500, SparsityScheduleConfig.fixed(512, dense_layers=[0]))
    assert cost == sparse_cost(SHAPE, 2, 600, 500, budget_tokens=512)
    for dense_layers in ("all", [0, 1]):
        cost = schedule_cost(SHAPE, 2, 600, 500, SparsityScheduleConfig.fixed(512, dense_layers=dense_layers))
        assert cost == dense_cost(SHAPE, 2, 600, 500)


# Seconds


def test_a_dense_step_takes_as_long_as_its_bytes():
    # 3 sequences x 100 tokens x 64 bytes (keys and values, 2 layers x 2 heads x 4, bf16) + 1000 bytes of weights
    hardware = Hardware("slow memory", peak_flops=ENDLESS, bandwidth=1000)
    assert step_seconds(SHAPE, hardware, 3, 100) == pytest.approx(20.2)
    assert step_seconds(SHAPE, hardware, 3, 100, bandwidth_share=0.5) == pytest.approx(40.4)
    assert step_seconds(SHAPE, hardware, 3, 100, bandwidth_share=0.5, overhead_seconds=1) == pytest.approx(41.4)


def test_a_dense_step_takes_as_long_as_its_flops():
    # Weights: 2 x 500 x 3 sequences = 3,000. Attention: 4 FLOPs x 6 query heads x 4 x 2 layers x 300 tokens = 57,600
    hardware = Hardware("slow compute", peak_flops=1000, bandwidth=ENDLESS)
    assert step_seconds(SHAPE, hardware, 3, 100) == pytest.approx(60.6)


# 100 tokens are 7 pages; layer 1 keeps 4 of them: 100 - 3 x 16 = 52 tokens, and scores 7 - 3 = 4.
SPARSE = SparsityScheduleConfig(top_k_pages=[1], dense_layers=[0])
SPARSE_FP8 = dataclasses.replace(SPARSE, page_score="group_softmax", landmarks_per_page=4, landmark_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        # 3 sequences x (100 + 52) tokens x 32 bytes = 14,592; landmarks 3 x 4 x 16 bytes = 192; weights 1000
        (SPARSE, 15.784),
        # landmarks 3 x 4 pages x 4 landmarks x 8 bytes = 384
        (SPARSE_FP8, 15.976),
    ],
)
def test_a_sparse_step_takes_as_long_as_its_bytes(schedule, seconds):
    hardware = Hardware("slow memory", peak_flops=ENDLESS, bandwidth=1000)
    assert step_seconds(SHAPE, hardware, 3, 100, schedule) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        # weights 3,000; attention 4 x 6 x 4 x 3 x 152 = 43,776; scores of 2 groups' means 2 x 2 x 4 x 12 pages = 192
        (SPARSE, 46.968),
        # scores of 6 query heads, 4 landmarks a page: 2 x 6 x 4 x 4 x 12 = 2,304
        (SPARSE_FP8, 49.080),
    ],
)
def test_a_sparse_step_takes_as_long_as_its_flops(schedule, seconds):
    hardware = Hardware("slow compute", peak_flops=1000, bandwidth=ENDLESS)
    assert step_seconds(SHAPE, hardware, 3, 100, schedule) == pytest.approx(seconds)


SCHEDULES = {
    "dense": None,
    "all layers dense": SparsityScheduleConfig.dense(),
    "preset": dataclasses.replace(SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86"), dense_layers=[0]),
    "tables of layers": SparsityScheduleConfig(
        top_k_pages=[5, 20, 40], layer_top_k_pages={"1": [0, 70]}, page_size=32, bin_tokens=1024, dense_layers=[]
    ),
    "no sinks": dataclasses.replace(SPARSE_FP8, top_k_pages=[3, 1000, 1000, 1001], sink_pages=0, recent_pages=1),
}


@pytest.mark.parametrize("prompt_tokens", [0, 37, 2000])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_rollout_is_the_sum_of_its_steps(schedule, prompt_tokens):
    # Weights take 5 FLOPs a byte (the batch), keys and values 3: compute bounds short steps, memory long ones.
    hardware = Hardware("toy", peak_flops=3500, bandwidth=1000)
    seconds = rollout_seconds(SHAPE, hardware, 5, prompt_tokens, 6400, schedule, overhead_seconds=0.25)
    lengths = range(prompt_tokens + 1, prompt_tokens + 6401)
    steps = [step_seconds(SHAPE, hardware, 5, length, schedule, overhead_seconds=0.25) for length in lengths]
    assert seconds == pytest.approx(sum(steps), rel=1e-12)


def test_a_rollout_looks_at_few_of_its_steps(qwen, monkeypatch):
    looked_at = []

    def counted(shape, batch, lengths, schedule):
        looked_at.extend(lengths)
        return step_traffic(shape, batch, lengths, schedule)

    step_traffic = cost_model.step_traffic
    monkeypatch.setattr(cost_model, "step_traffic", counted)
    rollout_seconds(qwen, "H200", 32, 0, 32_768, SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86"))
    assert 0 < len(looked_at) < 200


# Speedups


def test_speedup_is_dense_over_sparse(qwen):
    schedule = SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86")
    speedup = predicted_speedup(
        qwen, schedule, "h100", num_samples=4, batch_size=16, prompt_tokens=100, output_tokens=9000,
        overhead_seconds=1e-3, bandwidth_share=0.9,
    )  # fmt: skip
    intensity = HARDWARE["H100"].arithmetic_intensity(2)
    dense, sparse = dense_cost(qwen, 4, 100, 9000), schedule_cost(qwen, 4, 100, 9000, schedule)
    assert speedup.paper == dense.eflops(intensity) / sparse.eflops(intensity) > 1
    options = {"overhead_seconds": 1e-3, "bandwidth_share": 0.9}
    dense = rollout_seconds(qwen, "H100", 16, 100, 9000, **options)
    assert speedup.refined == dense / rollout_seconds(qwen, "H100", 16, 100, 9000, schedule, **options) > 1


def test_a_dense_schedule_gains_nothing(qwen):
    speedup = predicted_speedup(qwen, SparsityScheduleConfig.dense(), output_tokens=4096)
    assert speedup.paper == speedup.refined == 1


def test_more_pages_cost_more_and_longer_rollouts_gain_more(qwen):
    budgets = [predicted_speedup(qwen, SparsityScheduleConfig.fixed(tokens)) for tokens in (512, 1024, 4096)]
    lengths = [
        predicted_speedup(qwen, SparsityScheduleConfig.fixed(1024), output_tokens=tokens)
        for tokens in (32_768, 16_384, 4096)
    ]
    for estimate in ("paper", "refined"):
        for speedups in (budgets, lengths):
            values = [getattr(speedup, estimate) for speedup in speedups]
            assert values == sorted(values, reverse=True) and len(set(values)) == 3


def test_dense_layers_and_weights_lower_the_refined_speedup_alone(qwen):
    sparse, dense_layers = (SparsityScheduleConfig.fixed(1024, dense_layers=layers) for layers in ([], [0, 1]))
    small, large = (predicted_speedup(qwen, sparse, batch_size=batch) for batch in (1, 64))
    assert small.refined < large.refined and small.paper == large.paper
    with_dense_layers = predicted_speedup(qwen, dense_layers, batch_size=64)
    assert with_dense_layers.refined < large.refined and with_dense_layers.paper == large.paper


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_samples": 0}, "`num_samples` must be an integer of at least 1, got 0"),
        ({"batch_size": 1.5}, "`batch_size` must be an integer of at least 1, got 1.5"),
        ({"prompt_tokens": -1}, "`prompt_tokens` must be an integer of at least 0, got -1"),
        ({"output_tokens": 0}, "`output_tokens` must be an integer of at least 1, got 0"),
        ({"output_tokens": True}, "`output_tokens` must be an integer"),
        ({"hardware": "H20"}, "Unknown hardware 'H20'"),
        ({"overhead_seconds": -1e-3}, "`overhead_seconds` must be a number at least 0"),
        ({"bandwidth_share": 0}, "`bandwidth_share` must be a number above 0 and at most 1, got 0"),
        ({"bandwidth_share": 1.1}, "`bandwidth_share` must be a number above 0 and at most 1, got 1.1"),
        ({"bandwidth_share": float("nan")}, "`bandwidth_share` must be a number"),
    ],
)
def test_bad_arguments_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        predicted_speedup(SHAPE, SPARSE, **{"hardware": "H200", "output_tokens": 100, **changed})


@pytest.mark.parametrize("budget", [0, -16, float("nan"), "1024"])
def test_a_budget_must_be_positive(budget):
    with pytest.raises(ValueError, match="`budget_tokens` must be a number above 0"):
        sparse_cost(SHAPE, 1, 0, 100, budget)


def test_a_step_needs_a_length():
    with pytest.raises(ValueError, match="`length` must be an integer of at least 1, got 0"):
        step_seconds(SHAPE, "H200", 1, 0)


# The example


def run_example(*arguments):
    command = [sys.executable, ROOT / "examples" / "predict_speedups.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(("arguments", "hardware"), [((), "H200"), (("--hardware", "a100"), "A100")])
def test_the_example_prints_both_predictions_and_the_papers_measurements(arguments, hardware):
    result = run_example(*arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{hardware}: ") and "Table 2" in result.stdout
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.startswith("qwen3")}
    # Paper, Table 2: rollout and RL one-step speedup
    measured = {"1.7b": [2.21, 1.97], "4b": [2.41, 2.11], "8b": [2.06, 1.81], "14b": [1.48, 1.35]}
    assert list(rows) == [f"qwen3-{model}-0.86" for model in measured]
    for model, row in zip(measured, rows.values(), strict=True):
        formula, reads, *paper = (float(cell.removesuffix("x")) for cell in row)
        assert paper == measured[model]
        expected = predicted_speedup(
            CostShape.from_config(shape_config(f"qwen3-{model}")),
            SparsityScheduleConfig.from_preset(f"qwen3-{model}-0.86"),
            hardware,
        )
        assert (formula, reads) == (round(expected.paper, 2), round(expected.refined, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--hardware", "H20"), "Unknown hardware 'H20'"), (("--batch_size", "0"), "`batch_size` must be an integer")],
)
def test_the_example_refuses_bad_arguments_in_words(arguments, message):
    result = run_example(*arguments)
    assert result.returncode == 2 and not result.stdout
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": 256, "use_sliding_window": True}, "sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}, "linear_attention"),
    ],
)
def test_models_that_do_not_attend_to_all_are_refused(fields, message):
    config = Qwen3Config(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, vocab_size=32, **fields)
    with pytest.raises(ValueError, match=f"whole context; Qwen3Config has {message}"):
        CostShape.from_config(config)


def test_what_does_not_fit_the_model_or_into_memory_is_refused():
    shape = CostShape.from_config(Qwen3Config(hidden_size=64, num_hidden_layers=2, vocab_size=32))
    with pytest.raises(ValueError, match="names layer 2, but the model has 2"):
        predicted_speedup(shape, SparsityScheduleConfig(top_k_pages=[1], dense_layers=[0, 2]))
    with pytest.raises(ValueError, match="at most 16,777,216 together, got 16,777,217"):
        rollout_seconds(shape, "H200", 1, 1, 2**24)
