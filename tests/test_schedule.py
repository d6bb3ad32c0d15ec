import dataclasses
import hashlib
import json
import math
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch

from sparrow_trl.json_files import MAX_JSON_BYTES, dump_json_object, parse_json_object
from sparrow_trl.schedule import MAX_PAGES, MAX_TABLE_BINS, SCHEDULE_NAME, SparsityScheduleConfig, preset_names


# SHA-256 of the 20 published tables as one JSON object with sorted keys.
PUBLISHED_TABLES_SHA256 = "4d9569f9f3f4e8d0c1aff7de1aba51a0bc3e336db2f49042a943ebaf95476f32"


@pytest.fixture
def schedule():
    return SparsityScheduleConfig(top_k_pages=[29, 61, 93], target_acceptance=0.86, calibration={"tokens": 10})


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)


class TestPresets:
    def test_all_published_schedules_load_as_published(self):
        tables = {name: SparsityScheduleConfig.from_preset(name).top_k_pages for name in preset_names()}
        assert len(tables) == 20
        digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()
        assert digest == PUBLISHED_TABLES_SHA256

    @pytest.mark.parametrize("name", preset_names())
    def test_preset_is_the_paper_recipe_and_names_its_source(self, name):
        schedule = SparsityScheduleConfig.from_preset(name)
        family, size, target = name.split("-")
        assert (schedule.page_size, schedule.bin_tokens, schedule.sink_pages, schedule.recent_pages) == (
            16,
            2000,
            1,
            2,
        )
        assert (schedule.page_score, schedule.landmarks_per_page, schedule.dense_layers) == ("mean_query", 1, [0, 1])
        assert schedule.target_acceptance == float(target)
        assert schedule.base_model_name_or_path == f"Qwen/Qwen3-{size.upper()}"
        assert "2606.08446" in schedule.calibration["source"]
        assert len(schedule.top_k_pages) == 20
        assert schedule.top_k_pages == sorted(schedule.top_k_pages)

    def test_published_values(self):
        assert 385 in SparsityScheduleConfig.from_preset("qwen3-8b-0.86").top_k_pages
        assert SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86").top_k_pages[:8] == [
            29, 61, 93, 93, 125, 157, 189, 221,
        ]  # fmt: skip

    @pytest.mark.parametrize("name", ["qwen3-1.7b-0.85", "Qwen3-1.7B-0.86", "", "../schedule", None, 3, ["a"]])
    def test_unknown_preset_lists_the_known_ones(self, name):
        with pytest.raises(ValueError) as error:
            SparsityScheduleConfig.from_preset(name)
        assert all(known in str(error.value) for known in preset_names())

    def test_unknown_preset_suggests_a_close_one(self):
        with pytest.raises(ValueError, match="Did you mean 'qwen3-1.7b-0.86'"):
            SparsityScheduleConfig.from_preset("Qwen3-1.7B-0.86")


class TestLookup:
    @pytest.mark.parametrize("page_size, bin_tokens", [(16, 2000), (16, 16), (32, 2048), (64, 64)])
    def test_every_length_against_the_definition(self, page_size, bin_tokens):
        table = [1, 2, 3, 5, 8, 13]
        schedule = SparsityScheduleConfig(top_k_pages=table, page_size=page_size, bin_tokens=bin_tokens)
        max_length = 8 * bin_tokens
        device_table = schedule.to_table(max_length)
        assert device_table.dtype == torch.int32
        assert device_table.shape == (math.ceil(max_length / page_size) + 1,)
        for length in range(max_length + 1):
            pages = math.ceil(length / page_size)
            bin_index = pages // (bin_tokens // page_size)
            expected = table[min(bin_index, len(table) - 1)]
            assert schedule.bin_index(length) == bin_index
            assert schedule.top_k(length) == device_table[pages] == expected
            assert schedule.budget(length) == (1 + expected + 2) * page_size

    def test_bin_edge_is_the_page_count_as_published(self):
        # The release compares the number of pages with 125, so 1,985 tokens (125 pages) are in the second bin.
        schedule = SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86")
        assert [schedule.top_k(length) for length in (1, 1984, 1985, 2000, 3984, 3985, 10**6)] == [
            29, 29, 61, 61, 61, 93, 253,
        ]  # fmt: skip

    def test_bins_of_a_tensor(self, schedule):
        lengths = torch.tensor([0, 1, 1984, 1985, 50_000])
        assert schedule.bin_index(lengths).tolist() == [schedule.bin_index(length) for length in lengths.tolist()]

    def test_layers(self):
        schedule = SparsityScheduleConfig(
            top_k_pages=[10, 20], dense_layers=[0], layer_top_k_pages={"9-11": [40, 50], "3": [5]}
        )
        assert [schedule.top_k(100, layer) for layer in (None, 1, 2, 3, 4, 8, 9, 10, 11, 12)] == [
            10, 10, 10, 5, 10, 10, 40, 40, 40, 10,
        ]  # fmt: skip
        assert schedule.top_k(5000, layer=9) == 50
        assert schedule.top_k(5000, layer=3) == 5
        assert schedule.is_dense_layer(0) and not schedule.is_dense_layer(1)
        assert schedule.top_k(100, layer=0) == 7
        assert schedule.budget(100, layer=0) == 100
        assert schedule.to_table(64, layer=0).tolist() == [0, 1, 2, 3, 4]
        assert schedule.to_table(4000, layer=10).unique().tolist() == [40, 50]

    def test_fixed_counts_the_reserved_pages(self):
        schedule = SparsityScheduleConfig.fixed(1024)
        assert schedule.top_k_pages == [61]
        assert {schedule.budget(length) for length in (1, 1000, 10**5)} == {1024}
        assert SparsityScheduleConfig.fixed(48).top_k_pages == [0]
        wide = SparsityScheduleConfig.fixed(512, page_size=32, bin_tokens=2048, sink_pages=2, dense_layers=[])
        assert (wide.top_k_pages, wide.dense_layers) == ([12], [])

    @pytest.mark.parametrize("budget", [0, 32, 1000, -16, 1024.0, True, "1024", None])
    def test_fixed_refuses_a_budget_it_cannot_keep(self, budget):
        with pytest.raises(ValueError, match="budget_tokens"):
            SparsityScheduleConfig.fixed(budget)

    def test_dense(self):
        schedule = SparsityScheduleConfig.dense()
        assert schedule.is_dense and schedule.dense_layers == "all"
        assert schedule.is_dense_layer(77)
        assert schedule.budget(12_345) == 12_345
        assert schedule.top_k(12_345) == math.ceil(12_345 / 16)
        assert schedule.to_table(48).tolist() == [0, 1, 2, 3]
        through_the_sparse_path = dataclasses.replace(schedule, dense_layers=[])
        assert not through_the_sparse_path.is_dense
        assert through_the_sparse_path.top_k(10**8) == MAX_PAGES

    @pytest.mark.parametrize("length", [-1, 1.5, True, "10", None, 10**12])
    def test_lengths_are_checked(self, schedule, length):
        for method in (schedule.top_k, schedule.budget, schedule.bin_index, schedule.to_table):
            with pytest.raises(ValueError, match="length"):
                method(length)
        with pytest.raises(ValueError, match="layer"):
            schedule.is_dense_layer(-1)


INVALID_FIELDS = [
    ("page_size", 8),
    ("page_size", 24),
    ("page_size", 8192),
    ("page_size", 16.0),
    ("page_size", True),
    ("page_size", "16"),
    ("page_score", "max"),
    ("page_score", None),
    ("page_score", ["mean_query"]),
    ("landmarks_per_page", 3),
    ("landmarks_per_page", 2),
    ("landmarks_per_page", True),
    ("bin_tokens", 0),
    ("bin_tokens", 2001),
    ("bin_tokens", -2000),
    ("top_k_pages", []),
    ("top_k_pages", 61),
    ("top_k_pages", "61"),
    ("top_k_pages", None),
    ("top_k_pages", {"0": 61}),
    ("top_k_pages", [29, -1]),
    ("top_k_pages", [29, 61.0]),
    ("top_k_pages", [29, True]),
    ("top_k_pages", [29, None]),
    ("top_k_pages", [29, math.nan]),
    ("top_k_pages", [29, [61]]),
    ("top_k_pages", [MAX_PAGES + 1]),
    ("top_k_pages", [10**400]),
    ("top_k_pages", [1] * (MAX_TABLE_BINS + 1)),
    ("sink_pages", -1),
    ("sink_pages", False),
    ("recent_pages", 0),
    ("recent_pages", 2.5),
    ("dense_layers", "none"),
    ("dense_layers", 0),
    ("dense_layers", [-1]),
    ("dense_layers", [0, True]),
    ("dense_layers", None),
    ("dense_layers", range(2)),
    ("layer_top_k_pages", [29]),
    ("layer_top_k_pages", {"3": []}),
    ("layer_top_k_pages", {"3": [1.5]}),
    ("layer_top_k_pages", {"11-9": [29]}),
    ("layer_top_k_pages", {"03": [29]}),
    ("layer_top_k_pages", {"-3": [29]}),
    ("layer_top_k_pages", {"3-": [29]}),
    ("layer_top_k_pages", {" 3": [29]}),
    ("layer_top_k_pages", {"3\n": [29]}),
    ("layer_top_k_pages", {"٣": [29]}),
    ("layer_top_k_pages", {"3-999999999": [29]}),
    ("layer_top_k_pages", {True: [29]}),
    ("layer_top_k_pages", {"3-5": [29], "5-7": [61]}),
    ("layer_top_k_pages", {"4": [29], "3-9": [61]}),
    ("layer_top_k_pages", {3: [29], "3": [61]}),
    ("layer_top_k_pages", {"0-4": [29]}),
    ("landmark_dtype", "int8"),
    ("landmark_dtype", None),
    ("tail_quantile", 0),
    ("tail_quantile", 1),
    ("tail_quantile", math.nan),
    ("tail_quantile", "0.05"),
    ("tail_quantile", True),
    ("target_acceptance", 0.0),
    ("target_acceptance", 1.01),
    ("target_acceptance", math.inf),
    ("target_acceptance", math.nan),
    ("target_acceptance", True),
    ("target_acceptance", 10**400),
    ("base_model_name_or_path", ""),
    ("base_model_name_or_path", 3),
    ("calibration", "none"),
    ("calibration", [1]),
    ("calibration", {"tail": math.nan}),
    ("calibration", {"when": ...}),
]


class TestValidation:
    @pytest.mark.parametrize("field, value", INVALID_FIELDS, ids=lambda value: repr(value)[:40])
    def test_invalid_field_is_named(self, field, value):
        with pytest.raises(ValueError, match=f"`{field}") as error:
            SparsityScheduleConfig(**{"top_k_pages": [29], field: value})
        assert len(str(error.value)) < 1000

    @pytest.mark.parametrize("field, value", [("page_size", 24), ("bin_tokens", 2001), ("target_acceptance", 1.01)])
    def test_invalid_value_is_shown(self, field, value):
        with pytest.raises(ValueError, match=str(value)):
            SparsityScheduleConfig(**{"top_k_pages": [29], field: value})

    def test_bin_that_is_no_multiple_of_the_page_suggests_one_that_is(self):
        with pytest.raises(ValueError, match="2048"):
            SparsityScheduleConfig(top_k_pages=[29], page_size=32)

    def test_decreasing_table_warns(self):
        with pytest.warns(UserWarning, match="decreases"):
            SparsityScheduleConfig(top_k_pages=[61, 29])

    def test_all_dense_leaves_no_layer_tables(self):
        with pytest.raises(ValueError, match="layer_top_k_pages"):
            SparsityScheduleConfig(top_k_pages=[29], dense_layers="all", layer_top_k_pages={"3": [61]})

    def test_values_are_normalised(self):
        schedule = SparsityScheduleConfig(
            top_k_pages=(np.int64(29), 61),
            dense_layers=(3, 1, 3),
            layer_top_k_pages={11: (5,), "4-9": [6]},
            target_acceptance=1,
            page_score="group_softmax",
            landmarks_per_page=np.int32(4),
        )
        assert schedule.top_k_pages == [29, 61] and type(schedule.top_k_pages[0]) is int
        assert schedule.dense_layers == [1, 3]
        assert list(schedule.layer_top_k_pages.items()) == [("4-9", [6]), ("11", [5])]
        assert schedule.target_acceptance == 1.0
        assert SparsityScheduleConfig.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule

    def test_a_built_schedule_does_not_change(self, schedule):
        with pytest.raises(dataclasses.FrozenInstanceError):
            schedule.page_size = 32
        table, record = [29], {"a": [1]}
        schedule = SparsityScheduleConfig(top_k_pages=table, calibration=record)
        table.append(-5)
        record["a"].append(2)
        assert schedule.top_k_pages == [29] and schedule.calibration == {"a": [1]}
        assert pickle.loads(pickle.dumps(schedule)) == schedule


def write(folder: Path, content: bytes | str | dict) -> Path:
    path = folder / SCHEDULE_NAME
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


class TestFiles:
    def test_round_trip(self, tmp_path, schedule, no_hub):
        schedule = dataclasses.replace(
            schedule,
            layer_top_k_pages={"4-9": [6]},
            calibration={"text": "[\n1]", "nested": [[1.5, -2e-7], [], ["3"]]},
        )
        schedule.save_pretrained(tmp_path / "new" / "folder")
        path = tmp_path / "new" / "folder" / SCHEDULE_NAME
        assert [file.name for file in path.parent.iterdir()] == [SCHEDULE_NAME]
        assert json.loads(path.read_text()) == schedule.to_dict()
        assert '"top_k_pages": [29, 61, 93],' in path.read_text()
        for source in (path, str(path), path.parent, str(path.parent)):
            assert SparsityScheduleConfig.from_pretrained(source) == schedule

    @pytest.mark.parametrize("name", preset_names())
    def test_preset_files_are_what_saving_writes(self, tmp_path, name):
        import sparrow_trl

        SparsityScheduleConfig.from_preset(name).save_pretrained(tmp_path)
        packaged = Path(sparrow_trl.__file__).parent / "presets" / f"{name}.json"
        assert (tmp_path / SCHEDULE_NAME).read_bytes() == packaged.read_bytes()

    def test_failed_save_leaves_the_old_file(self, tmp_path, schedule, monkeypatch):
        schedule.save_pretrained(tmp_path)

        def fail(*args):
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            SparsityScheduleConfig.fixed(1024).save_pretrained(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == [SCHEDULE_NAME]
        assert SparsityScheduleConfig.from_pretrained(tmp_path) == schedule

    def test_what_could_not_be_saved_is_refused_when_it_is_built(self):
        with pytest.raises(ValueError, match="would be larger than"):
            SparsityScheduleConfig(top_k_pages=[29], calibration={"text": "a" * MAX_JSON_BYTES})

    def test_save_refuses_a_file_as_its_folder(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="must be a folder"):
            SparsityScheduleConfig.dense().save_pretrained(tmp_path / "file")

    @pytest.mark.parametrize(
        "content, message",
        [
            (b"", "not valid JSON"),
            (b"{", "not valid JSON"),
            (b'{"top_k_pages": [29]} {}', "not valid JSON"),
            (b"[29, 61]", "JSON object at its top level, not a list"),
            (b"null", "JSON object at its top level, not a NoneType"),
            (b'{"top_k_pages": [29], "top_k_pages": [61]}', "'top_k_pages' appears twice"),
            (b'{"top_k_pages": [29], "calibration": {"a": {"b": 1, "b": 2}}}', "'b' appears twice"),
            (b'{"top_k_pages": [NaN]}', "NaN is not a finite number"),
            (b'{"top_k_pages": [29], "target_acceptance": -Infinity}', "-Infinity is not a finite number"),
            (b'{"top_k_pages": [29], "target_acceptance": 1e999}', "1e999 is not a finite number"),
            (b'{"top_k_pages": [29], "calibration": {"tail": NaN}}', "NaN is not a finite number"),
            (b'{"top_k_pages": [1e2]}', "top_k_pages"),
            (b'{"top_k_pages": [true]}', "top_k_pages"),
            (b'{"top_k_pages": [' + b"9" * 5000 + b"]}", "not valid JSON"),
            (b'{"top_k_pages": [' + b"9" * 500 + b"]}", "top_k_pages"),
            (b'{"top_k_pages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
            (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
            (b'{"top_k_pages": [' + b"1," * 200_000 + b"1]}", "at most"),
            (b'{"top_k_pages": [29]}' + b" " * MAX_JSON_BYTES, "larger than"),
            (b'{"top_k_pages": [29], "base_model_name_or_path": "\xff"}', "not UTF-8"),
            ('{"top_k_pages": [29]}'.encode("utf-16"), "not UTF-8"),
            (b'{"top_k_pages": [29], "pages": 3}', r"Unknown field of a sparsity schedule: \['pages'\]"),
            (b'{"' + b"a" * 100_000 + b'": 3}', "Unknown field"),
            (b"{}", "needs the field `top_k_pages`"),
        ],
        ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else "",
    )
    def test_corrupt_or_hostile_file(self, tmp_path, content, message, no_hub):
        path = write(tmp_path, content)
        with pytest.raises(ValueError, match=message) as error:
            SparsityScheduleConfig.from_pretrained(tmp_path)
        assert str(path) in str(error.value)
        assert len(str(error.value)) < 2000

    def test_folder_without_a_schedule(self, tmp_path, no_hub):
        with pytest.raises(ValueError, match=SCHEDULE_NAME):
            SparsityScheduleConfig.from_pretrained(tmp_path)

    def test_from_dict_needs_a_dict(self):
        with pytest.raises(ValueError, match="dict of its fields"):
            SparsityScheduleConfig.from_dict([("top_k_pages", [29])])

    def test_surrogates_and_text_survive(self, tmp_path):
        record = {"naïve": "\ud800 日本", "list": ["[\n 1, 2\n]"]}
        data = dump_json_object({"record": record}, "record")
        assert parse_json_object(data, "record") == {"record": record}


class TestHub:
    @pytest.fixture
    def hub(self, tmp_path, monkeypatch, schedule):
        schedule.save_pretrained(tmp_path / "cache")
        calls = []

        # Pushing, and loading from a server, is in test_hub.py.
        def hf_hub_download(repo_id, filename, dry_run=False, **kwargs):
            calls.append((repo_id, filename, kwargs))
            if repo_id != "owner/schedule":
                raise huggingface_hub.errors.LocalEntryNotFoundError("offline")
            file = tmp_path / "cache" / filename
            return SimpleNamespace(file_size=file.stat().st_size) if dry_run else str(file)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
        monkeypatch.chdir(tmp_path)
        return calls

    def test_from_pretrained(self, hub, schedule):
        assert SparsityScheduleConfig.from_pretrained("owner/schedule", revision="v1") == schedule
        assert hub == 2 * [("owner/schedule", SCHEDULE_NAME, {"revision": "v1"})]

    def test_resolve_tries_object_preset_path_and_hub(self, hub, schedule, tmp_path):
        resolve = SparsityScheduleConfig.resolve
        assert resolve(schedule) is schedule
        assert resolve("qwen3-4b-0.86") == SparsityScheduleConfig.from_preset("qwen3-4b-0.86")
        assert resolve(tmp_path / "cache") == schedule
        assert resolve("cache") == resolve(f"cache/{SCHEDULE_NAME}") == schedule
        assert hub == []
        assert resolve("owner/schedule", token="secret") == schedule
        assert hub == 2 * [("owner/schedule", SCHEDULE_NAME, {"token": "secret"})]

    def test_a_local_folder_comes_before_the_hub(self, hub, tmp_path):
        SparsityScheduleConfig.fixed(512).save_pretrained(tmp_path / "owner" / "schedule")
        assert SparsityScheduleConfig.resolve("owner/schedule").top_k_pages == [29]
        assert hub == []

    def test_resolve_says_what_was_tried(self, hub):
        with pytest.raises(ValueError) as error:
            SparsityScheduleConfig.resolve("owner/nothing")
        for tried in ("owner/nothing", "qwen3-1.7b-0.86", "no such local file", "not in the local cache"):
            assert tried in str(error.value)

    def test_a_misspelt_preset_does_not_reach_the_hub(self, hub):
        with pytest.raises(ValueError, match="Did you mean 'qwen3-1.7b-0.86'"):
            SparsityScheduleConfig.resolve("qwen3-1.7B-0.86")
        assert hub == []

    @pytest.mark.parametrize("value", [None, 3, True, "", b"qwen3-4b-0.86", {"top_k_pages": [29]}, ["a"]])
    def test_resolve_refuses_other_types(self, hub, value):
        with pytest.raises(ValueError, match="is given as a `SparsityScheduleConfig`"):
            SparsityScheduleConfig.resolve(value)

    @pytest.mark.parametrize("value", ["a\0b/c", "x" * 5000 + "/y"])
    def test_resolve_refuses_impossible_paths(self, hub, value):
        with pytest.raises(ValueError) as error:
            SparsityScheduleConfig.resolve(value)
        assert len(str(error.value)) < 1500


class TestPlot:
    @pytest.fixture(autouse=True)
    def no_display(self):
        import matplotlib

        matplotlib.use("Agg")

    def test_draws_the_budget_of_every_length(self):
        schedule = SparsityScheduleConfig.from_preset("qwen3-1.7b-0.86")
        ax = schedule.plot()
        line = ax.get_lines()[0]
        edges, budgets = line.get_data()
        assert line.get_drawstyle() == "steps-post"
        for length in range(100, 40_000, 400):
            drawn = budgets[np.searchsorted(edges, length, side="right") - 1]
            assert drawn == schedule.budget(length)

    def test_layers_dense_and_given_axes(self):
        from matplotlib.figure import Figure

        ax = Figure().subplots()
        schedule = SparsityScheduleConfig(top_k_pages=[10], layer_top_k_pages={"3": [5], "4-9": [20, 30]})
        assert schedule.plot(ax) is ax
        assert [text.get_text() for text in ax.get_legend().get_texts()] == [
            "layers 3", "layers 4-9", "other layers", "dense",
        ]  # fmt: skip
        ax = SparsityScheduleConfig.dense().plot(Figure().subplots())
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["dense"]
