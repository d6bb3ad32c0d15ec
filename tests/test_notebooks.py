"""The example notebooks: each runs in a process of its own on the tiny reasoner, smaller than it is committed."""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest
from fresh_process import fresh_environment
from hub_server import HubServer
from nbclient import NotebookClient

import sparrow_trl
from sparrow_trl import AcceptanceTable, SparsityScheduleConfig


ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_of(cell):
    """Python code of a cell, without IPython's commands."""
    return re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE)


def parameters_cell(notebook):
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    return cell


def execute(name, tmp_path, parameters, result, **environment):
    """
    Run a notebook with other parameters.

    Returns:
        `tuple`: what the expression `result` is at the end, and outputs by the id of their cell.
    """
    notebook = read(name)
    cell = parameters_cell(notebook)
    assigned = {target.id for node in ast.parse(cell.source).body for target in node.targets}
    assert set(parameters) <= assigned
    cell.source += "\n" + "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\n\nprint(json.dumps({result}))", id="result"))
    # Under pytest the kernel would leave standard output as it is, without the descriptor that vLLM asks for.
    settings = {"HF_HOME": str(tmp_path / "home"), "IPYTHONDIR": str(tmp_path / "ipython"), **environment}
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env=fresh_environment() | settings)
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    printed = "".join(output.text for output in outputs["result"] if output.output_type == "stream")
    return json.loads(printed.splitlines()[-1]), outputs


def has_picture(outputs):
    return any("image/png" in output.get("data", ()) for output in outputs)


def test_train(tmp_path):
    folder = tmp_path / "policy"
    parameters = {"MAX_STEPS": 3, "TASKS_PER_STEP": 2, "OUTPUT_DIR": str(folder)}
    result = """{
        "rewards": list(steps["reward"]),
        "tails": list(steps["acceptance/tail"]),
        "kept": list(steps["sparsity/kept_fraction"]),
        "bins": [entry.tokens for entry in trainer.acceptance.bin_statistics()],
        "before": schedule.top_k_pages,
    }"""
    found, outputs = execute("train", tmp_path, parameters, result)
    assert len(found["rewards"]) == 3
    assert all(0 <= reward <= 1 for reward in found["rewards"])
    assert all(0 <= tail <= 1 for tail in found["tails"])
    assert found["bins"] and all(tokens > 0 for tokens in found["bins"])
    saved = SparsityScheduleConfig.from_pretrained(folder)
    assert saved.top_k_pages == [3 * pages // 4 for pages in found["before"]]
    # The first step alone is under the first schedule.
    assert max(found["kept"][1:]) < found["kept"][0] < 1
    assert (folder / "model.safetensors").is_file() and (folder / "acceptance.png").is_file()
    assert has_picture(outputs["plot-schedule"]) and has_picture(outputs["plot-history"])
    assert any("text/html" in output.get("data", ()) for output in outputs["acceptance-table"])


def test_calibrate_and_publish(tmp_path):
    folder = tmp_path / "calibration"
    parameters = {
        "NUM_PROMPTS": 6,
        "PAGE_COUNTS": [7, 12, 24],
        "REPO_ID": "alice/tiny-reasoner-schedule",
        "OUTPUT_DIR": str(folder),
    }
    result = """{
        "shares": {name: share_read(schedule) for name, schedule in schedules.items()},
        "tails": {name: [entry.tail for entry in result.verified] for name, result in results.items()},
    }"""
    with HubServer() as hub:
        found, outputs = execute(
            "calibrate_and_publish",
            tmp_path,
            parameters,
            result,
            HF_ENDPOINT=hub.endpoint,
            HF_TOKEN="hf_alice",
            HF_HUB_OFFLINE="0",
            # Its uploads go to servers of their own.
            HF_HUB_DISABLE_XET="1",
        )
        pushed = hub.repo("alice/tiny-reasoner-schedule").files()
    saved = SparsityScheduleConfig.from_pretrained(folder)
    assert saved.target_acceptance == 0.95
    assert AcceptanceTable.load(folder / "acceptance_table.json").page_counts == [7, 12, 24]
    # A path on this machine is nobody else's model.
    assert json.loads(pushed["sparsity_schedule.json"]) == {**saved.to_dict(), "base_model_name_or_path": None}
    assert b"sparrow-schedule" in pushed["README.md"]
    assert str(saved.top_k_pages) in outputs["push"][-1].text
    assert set(found["tails"]) == {"presets' recipe", "four landmarks"}
    assert all(0 < share <= 1 for share in found["shares"].values())
    for cell in ("plot-tails", "plot-tails-landmarks", "plot-schedules"):
        assert has_picture(outputs[cell])


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_committed_as_written(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    # The first cell with code is where names are changed.
    assert parameters_cell(notebook) == next(cell for cell in notebook.cells if cell.cell_type == "code")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            assert cell.source.strip()


@pytest.mark.parametrize("name", NAMES)
def test_notebook_names_only_what_is_public(name):
    """What the package exports, or a module that the reference describes."""
    described = re.findall(r"^::: (\S+)$", REFERENCE, flags=re.MULTILINE)
    for cell in read(name).cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(code_of(cell))):
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0].startswith("sparrow") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0].startswith("sparrow"):
                for alias in node.names:
                    if node.module == "sparrow_trl":
                        assert alias.name in sparrow_trl.__all__
                    else:
                        assert node.module in described and not alias.name.startswith("_")
            elif isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")


def test_there_are_two_notebooks():
    assert NAMES == ["calibrate_and_publish", "train"]
