"""Pictures of acceptance tables, and the command that draws them."""

import numpy as np
import pytest
from scipy import stats

from sparrow_trl import SparsityScheduleConfig
from sparrow_trl.acceptance import fit_beta_tail
from sparrow_trl.acceptance_plots import fit_cell, plot_costs, plot_distribution, plot_tails
from sparrow_trl.acceptance_table import AcceptanceTable
from sparrow_trl.bench_traffic import ModelShape, step_traffic
from sparrow_trl.cli import main


SHAPE = ModelShape(num_layers=2, kv_heads=2, head_dim=8, weight_bytes=0, total_weight_bytes=0, element_bytes=2)


def make_table(page_size=16, tokens=3000, seed=0, bin_tokens=128, page_counts=(4, 8)):
    """A table whose rates are Beta distributed, better with more pages, and with half of the tokens at 1."""
    recipe = SparsityScheduleConfig(top_k_pages=[0], page_size=page_size, bin_tokens=bin_tokens, dense_layers=[])
    table = AcceptanceTable(recipe, list(page_counts), bin_tokens, 3, model_name="a model")
    generator = np.random.default_rng(seed)
    samples = {}
    for row, pages in enumerate(page_counts):
        for column in range(2):
            rates = generator.beta(2 + pages / 4, 1.5, tokens) * 0.999
            rates[::2] = 1
            table.update(row, np.full(tokens, column * bin_tokens + 64), rates)
            samples[row, column] = rates
    return table, samples


def test_tails_over_the_length():
    table, samples = make_table()
    fields = {"bin_tokens": 128, "target_acceptance": 0.5, "dense_layers": []}
    schedule = SparsityScheduleConfig(top_k_pages=[1, 5], **fields)
    (ax,) = plot_tails(table, schedule).axes
    lines = {line.get_label(): line for line in ax.lines}
    for row, label in enumerate(("4", "8")):
        assert lines[label].get_xdata() == pytest.approx([56.5, 176.5])
        expected = [np.quantile(samples[row, column], 0.05) for column in range(2)]
        assert lines[label].get_ydata() == pytest.approx(expected, abs=1e-3)
    marked = [lines["4"].get_ydata()[0], lines["8"].get_ydata()[1]]
    assert lines["schedule"].get_ydata() == pytest.approx(marked)
    assert [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"] == [0.5]
    assert not plot_tails(table, min_tokens=3001).axes[0].lines
    # With other bins than the table's, what counts is the budget at the length.
    (ax,) = plot_tails(table, SparsityScheduleConfig(top_k_pages=[1], **{**fields, "bin_tokens": 64})).axes
    lines = {line.get_label(): line for line in ax.lines}
    assert lines["schedule"].get_ydata() == pytest.approx(lines["4"].get_ydata())
    with pytest.raises(ValueError, match=r"different recipes: dense_layers \[0\] and \[\]"):
        plot_tails(table, SparsityScheduleConfig(top_k_pages=[1], dense_layers=[0]))
    with pytest.raises(ValueError, match="one budget for all sparse layers"):
        plot_tails(table, SparsityScheduleConfig.dense())


def test_the_fit_of_a_cell_is_that_of_its_tokens():
    table, samples = make_table()
    for row, column in ((0, 0), (1, 1)):
        fit, expected = fit_cell(table, row, column), fit_beta_tail(samples[row, column])
        assert (fit.a, fit.b) == pytest.approx((expected.a, expected.b), rel=0.02)
        assert fit.ks_distance == pytest.approx(expected.ks_distance, abs=0.005)


def test_distribution():
    table, samples = make_table()
    (ax,) = plot_distribution(table, 1, 0).axes
    (line,) = ax.lines
    tail = samples[1, 0][samples[1, 0] < 0.999] / 0.999
    a, b, _, _ = stats.beta.fit(tail, floc=0, fscale=1)
    rates = line.get_xdata()
    assert line.get_ydata() == pytest.approx(stats.beta(a, b).pdf(rates / 0.999) / 0.999, rel=0.1)
    area = sum(patch.get_height() * patch.get_width() for patch in ax.patches)
    assert area == pytest.approx(1) and "8 pages, cached lengths 1 to 112 (3,000 tokens)" in ax.get_title()


def test_costs_of_two_page_sizes():
    small, large = make_table()[0], make_table(page_size=32, page_counts=(4, 6))[0]
    (ax,) = plot_costs({"16": small, "32": large}, SHAPE).axes
    lines = {line.get_label(): line for line in ax.lines}
    step = step_traffic(SHAPE, 1, [176], large.schedule(1))
    assert lines["32"].get_xdata()[1] == pytest.approx((step.kv + step.landmarks) / 1e6)
    assert lines["16"].get_ydata() == pytest.approx(small.quantile(0.05)[:, 1])
    assert lines["dense"].get_xdata()[0] == pytest.approx(step_traffic(SHAPE, 1, [176]).kv / 1e6)
    with pytest.raises(ValueError, match="Bin 2 does not have 200 tokens"):
        plot_costs({"16": small}, SHAPE, bin_index=2)
    with pytest.raises(ValueError, match="No bin has 4000 tokens"):
        plot_costs({"16": small}, SHAPE, min_tokens=4000)
    with pytest.raises(ValueError, match=r"same `bin_tokens`, got \[128, 256\]"):
        plot_costs({"16": small, "other": make_table(bin_tokens=256)[0]}, SHAPE)


def test_the_command(tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_table(seed=len(name))[0].save(tmp_path / name / "acceptance_table.json")
    folders = [str(tmp_path / "one"), str(tmp_path / "two" / "acceptance_table.json")]
    output = tmp_path / "pictures"
    SparsityScheduleConfig(top_k_pages=[1], dense_layers=[]).save_pretrained(tmp_path / "mine")
    options = ["--pages", "8", "--length", "200", "--model", "qwen3-1.7b", "--schedule", str(tmp_path / "mine")]
    assert main(["plot", *folders, "--output", str(output), *options]) == 0
    names = {"one-tails.png", "two-tails.png", "one-distribution.png", "two-distribution.png", "costs.png"}
    assert {path.name for path in output.iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in output.iterdir())
    capsys.readouterr()
    for arguments, message in (
        (["--pages", "8"], "needs both --pages and --length"),
        (["--pages", "5", "--length", "9"], "one has no budget of 5 pages, but [4, 8]"),
        (["--pages", "8", "--length", "900"], "one ends at 384 tokens, before 900"),
        (["--min-tokens", "9999", "--model", "qwen3-4b"], "No bin has 9999 tokens"),
        ([folders[0]], "Each table needs a name of its own"),
    ):
        assert main(["plot", folders[0], *arguments, "--output", str(tmp_path / "none")]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
