"""The documentation: it builds strictly, and what it says of messages, commands, presets and names is so."""

import ast
import dataclasses
import html.parser
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import zlib
from itertools import groupby
from pathlib import Path

import pytest
import yaml

import sparrow_trl
from sparrow_trl import SparsityScheduleConfig, preset_names
from sparrow_trl.cli import _parser


ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
OFFLINE = """
import socket

def refuse(*args):
    raise OSError("the documentation is built without network")

socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = refuse
"""

# Raises whose text is not in the sources, and why.
WITHOUT_TEXT = {
    ("sparrow_trl.cli", "argparse.ArgumentTypeError(str(error))"): "the text of the error that it replaces",
    ("sparrow_trl.sequence_generation", "RuntimeError(failures[0])"): "the text of the engine's error",
    ("sparrow_trl.sandbox_evaluator", "KeyError(name)"): "a name that a test asks for, caught by Python's own lookup",
    ("sparrow_trl.sandbox_evaluator", "_ProgramGone()"): "ends the evaluator, and is shown to nobody",
    ("sparrow_trl.sandbox_evaluator", "_exception(answer['error'])"): "the program's own exception",
}


def load_script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. Takes half a minute on two busy cores."""
    folder = tmp_path_factory.mktemp("site")
    guard = tmp_path_factory.mktemp("offline")
    (guard / "sitecustomize.py").write_text(OFFLINE)
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(guard), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def error_index():
    return load_script("error_index")


@pytest.fixture(scope="module")
def messages(error_index):
    return error_index.ErrorIndex().messages()


class TextOf(html.parser.HTMLParser):
    """Text of the index, by module."""

    def __init__(self, page: str):
        super().__init__()
        self.sections, self._heading, self._section = {}, None, None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag in ("h2", "h3"):
            self._heading = ""

    def handle_endtag(self, tag):
        if tag in ("h2", "h3"):
            self._section, self._heading = self._heading.strip("¶ \n"), None

    def handle_data(self, data):
        if self._heading is not None:
            self._heading += data
        elif self._section is not None:
            self.sections[self._section] = self.sections.get(self._section, "") + data


@pytest.fixture(scope="module")
def indexed(site):
    sections = TextOf((site / "troubleshooting" / "index.html").read_text()).sections
    return {name: " ".join(text.split()) for name, text in sections.items()}


def sources():
    for package, folder in (
        ("sparrow_trl", ROOT / "sparrow_trl"),
        ("sparrow_attention", ROOT / "kernels/torch-ext/sparrow_attention"),
    ):
        for path in sorted(folder.rglob("*.py")):
            parts = [part for part in path.relative_to(folder).with_suffix("").parts if part != "__init__"]
            yield ".".join([package, *parts]), ast.parse(path.read_text())


def fragments(node):
    """What is written out in an expression, outside of the values that are filled in."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    children = {
        ast.JoinedStr: lambda: node.values,
        ast.BinOp: lambda: [node.left, node.right],
        ast.IfExp: lambda: [node.body, node.orelse],
        ast.BoolOp: lambda: node.values,
    }.get(type(node), list)()
    return [fragment for child in children for fragment in fragments(child)]


def blocks(page, language):
    """Fenced blocks of a page, with the line before each."""
    lines = page.read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if line.strip() == f"```{language}"]
    for start in starts:
        end = next(index for index in range(start + 1, len(lines)) if lines[index].strip() == "```")
        yield lines[start - 1], textwrap.dedent("\n".join(lines[start + 1 : end]))


# The site


def test_site_is_self_contained(site):
    for page in site.rglob("*.html"):
        for tag in re.findall(r"<(?:link|script|img|iframe)\b[^>]*>", page.read_text()):
            target = re.search(r'(?:src|href)="?([^" >]+)', tag)
            assert not (target and re.match(r"(https?:)?//", target[1])), (page.name, tag)


def test_every_page_is_in_the_nav():
    def files(entries):
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else files(value)

    nav = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == [page.name for page in PAGES]


def test_make_docs_is_strict():
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["strict"] is True
    assert "mkdocs build" in (ROOT / "Makefile").read_text()


def test_reference_has_every_public_name(site):
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    documented = {line.split()[0] for line in inventory.splitlines()}
    for name in sparrow_trl.__all__:
        if name != "__version__":
            module = sparrow_trl._MODULE_OF.get(name)
            assert f"sparrow_trl.{f'{module}.' if module else ''}{name}" in documented, name
    for name in ("page_landmarks", "select_pages", "sparse_attention", "sparse_decode_attention"):
        assert f"sparrow_attention.{name}" in documented


# The index of messages


def test_index_has_every_raised_message(indexed, messages):
    found = {(message.module, message.line): message.texts for message in messages}
    checked, explained = 0, set()
    for module, tree in sources():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            call = node.exc
            # Dict keys and format arguments are no message, the arguments of the exception are.
            written = [" ".join(text.split()) for argument in call.args for text in fragments(argument)]
            written = [text for text in written if re.search(r"[A-Za-z]{2}", text)]
            texts = written or found[module, call.lineno]
            if not texts:
                explained.add((module, ast.unparse(call)))
            for text in texts:
                assert text in indexed.get(module, ""), f"{module}:{node.lineno}: {text}"
            checked += bool(texts)
    assert explained == WITHOUT_TEXT.keys()
    assert checked > 400


def test_index_has_every_warning(indexed):
    checked = 0
    for module, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and re.fullmatch(
                r"(warnings\.warn|logger\.(warning|error|log))", ast.unparse(node.func)
            ):
                written = [text for argument in node.args for text in fragments(argument)]
                parts = [part for text in written for part in re.split(r"%(?:\.\d+)?[sdgr]", text)]
                for part in (" ".join(part.split()) for part in parts):
                    assert part in indexed.get(module, ""), f"{module}:{node.lineno}: {part}"
                checked += bool(parts)
    assert checked > 15


def test_index_follows_helpers_variables_and_constants(error_index, tmp_path, monkeypatch):
    (tmp_path / "sample.py").write_text(
        "LIMIT = 7\n"
        "def refuse(what):\n"
        "    return TypeError(f'The thing {what}. Leave it.')\n"
        "def check(value, hint):\n"
        "    state = 'is old' if value else f'has {value} parts'\n"
        "    if value:\n"
        "        raise refuse('is no text')\n"
        "    if hint:\n"
        "        raise ValueError(f'It {state}, at most {LIMIT}.{hint}')\n"
        "    logger.warning('%s of %d failed', value, 3)\n"
        "    raise KeyError(value)\n"
        "check(1, ' Use the other one.')\n"
    )
    monkeypatch.setattr(error_index, "PACKAGES", {"sample": tmp_path})
    found = {message.line: message for message in error_index.ErrorIndex().messages()}
    assert found[7].kind == "TypeError" and found[7].texts == ("The thing is no text. Leave it.",)
    assert found[9].texts == (
        "It is old, at most 7. Use the other one.",
        "It has … parts, at most 7. Use the other one.",
    )
    assert found[10].kind == "logged warning" and found[10].texts == ("… of … failed",)
    assert found[11].texts == ()
    page = error_index.index_html()
    assert (
        "### sample.sample" in page and "<li><strong>TypeError</strong>: The thing is no text. Leave it.</li>" in page
    )


def test_search_finds_a_message(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    hits = [entry["location"] for entry in entries if "There is no sparsity schedule preset" in entry["text"]]
    assert any(re.fullmatch(r"troubleshooting/#sparrow_trlschedule", location) for location in hits), hits


def test_quoted_messages_are_those_of_the_sources(messages):
    texts = [text for message in messages for text in message.texts]
    page = DOCS / "troubleshooting.md"
    quoted = [line for _, block in blocks(page, "text") for line in block.splitlines()]
    assert len(quoted) >= 20
    for line in quoted:
        assert any(line in text for text in texts), line


# Code and commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile(page):
    for _, block in blocks(page, "python"):
        ast.parse(block, str(page))


def test_runnable_blocks_run():
    runnable = [block for page in PAGES for before, block in blocks(page, "python") if before == "<!-- runnable -->"]
    assert len(runnable) >= 4
    program = "".join(f"exec({block!r}, {{}})\n" for block in runnable)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def subparsers():
    return next(action for action in _parser()._actions if action.dest == "command").choices


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    text = page.read_text()
    code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *(block for _, block in blocks(page, "bash"))])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (?:[A-Z]+=\S+ )*([a-z-]+)", code, re.MULTILINE)) <= targets
    assert set(re.findall(r"sparrow-trl ([a-z]+)\b", code)) <= set(subparsers())


def test_options_of_commands_exist():
    """Those of the commands whose arguments are fields of a dataclass are looked for in the sources."""
    fields = {"config", "set_defaults_with_config"}
    for name in ("cli_calibrate", "cli_search", "cli_distill", "cli_eval", "distill"):
        tree = ast.parse((ROOT / "sparrow_trl" / f"{name}.py").read_text())
        fields |= {
            node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and hasattr(node.target, "id")
        }
    checked = 0
    for page in PAGES:
        for _, block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                line = line.partition(" #")[0]
                command = re.search(r"sparrow-trl ([a-z]+)\b", line)
                if command is None or command[1] == "serve":  # all but one of its options are vLLM's
                    continue
                options = set(re.findall(r" --([A-Za-z_-]+)", line))
                known = {option[2:] for option in subparsers()[command[1]]._option_string_actions} | fields
                assert options <= known, (page.name, line)
                checked += len(options)
    assert checked > 40


# Figures and tables


def test_figures_of_the_concepts(tmp_path):
    script = load_script("draw_concepts")
    used = (DOCS / "concepts.md").read_text() + (DOCS / "schedules.md").read_text()
    for name, draw in script.FIGURES.items():
        assert f"images/{name}" in used
        assert (DOCS / "images" / name).stat().st_size < 150_000
        script.save_figure(draw(), tmp_path / name)
        assert (tmp_path / name).stat().st_size == pytest.approx((DOCS / "images" / name).stat().st_size, rel=0.2)


def test_table_of_presets():
    rows = dict(re.findall(r"^\| `(qwen3-[^`]+)` \| (.+) \|$", (DOCS / "schedules.md").read_text(), re.MULTILINE))
    assert sorted(rows) == preset_names()
    for name, row in rows.items():
        schedule = SparsityScheduleConfig.from_preset(name)
        runs = [(pages, len(list(group))) for pages, group in groupby(schedule.top_k_pages)]
        table = ", ".join(str(pages) if count == 1 else f"{pages} ({count}x)" for pages, count in runs)
        budgets = " / ".join(f"{schedule.budget(length):,}" for length in (4_000, 16_000, 32_000))
        assert row == f"{table} | {budgets}", name


def test_table_of_fields():
    names = {field.name for field in dataclasses.fields(SparsityScheduleConfig)}
    section = (DOCS / "schedules.md").read_text().partition("## Fields")[2].partition("**Bins.**")[0]
    first_cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    assert {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)} == names


def test_supported_versions():
    """Those of the quickstart are those of the package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "trl>=1.16,<1.17" in extras["dependencies"] and extras["optional-dependencies"]["gpu"] == [
        "vllm>=0.30,<0.32"
    ]
    assert "vLLM 0.30 or 0.31 and TRL 1.16 are needed" in (DOCS / "quickstart.md").read_text()
