"""
The index of error messages on the page "Troubleshooting", as a hook of mkdocs.

Sources are parsed, not imported: every `raise` with a message, every warning and every logged warning of the two
packages becomes an entry, with `…` where a value is filled in. What a message is put together from (constants, local
variables, helper functions, and the texts that callers hand to a helper) is followed as far as it is written out.
"""

import ast
import functools
import html
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"sparrow_trl": ROOT / "sparrow_trl", "sparrow_attention": ROOT / "kernels/torch-ext/sparrow_attention"}
PAGE = "troubleshooting.md"
MARKER = "<!-- error index -->"

GAP = "…"
# Alternatives of one value that are written out, and of one message.
MAX_VALUES = 12
MAX_TEXTS = 40
MAX_DEPTH = 6

LOG_METHODS = {"warning": "logged warning", "error": "logged error", "log": "logged"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Message:
    """
    A message of the packages.

    Args:
        module (`str`): Module that it is in.
        line (`int`): Where.
        kind (`str`): Class of the exception, or what kind of warning it is.
        texts (`tuple[str, ...]`): What it may say; none where the sources do not tell.
    """

    module: str
    line: int
    kind: str
    texts: tuple[str, ...]


class _Module:
    def __init__(self, name: str, path: Path):
        self.name = name
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, _FUNCTIONS)}
        self.constants, self.imports = {}, {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                try:
                    self.constants[node.targets[0].id] = ast.literal_eval(node.value)
                except ValueError:
                    pass
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (node.module or "").rpartition(".")[2], alias.name

    def enclosing(self, node: ast.AST) -> Iterator[ast.FunctionDef]:
        while (node := self.parents.get(node)) is not None:
            if isinstance(node, _FUNCTIONS):
                yield node


class ErrorIndex:
    """The messages of the packages, by module."""

    def __init__(self):
        self._modules = {}
        for package, folder in PACKAGES.items():
            for path in sorted(folder.rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join([package, *(part for part in parts if part != "__init__")])
                self._modules[name] = _Module(name, path)
        # Calls of each name, and the modules that define it.
        self._calls: dict[str, list[tuple[_Module, ast.Call]]] = {}
        self._homes: dict[str, list[_Module]] = {}
        for module in self._modules.values():
            for name in module.functions:
                self._homes.setdefault(name, []).append(module)
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call) and (name := _called(node)):
                    self._calls.setdefault(name, []).append((module, node))

    def messages(self) -> list[Message]:
        """All of them, in the order of the sources."""
        found = []
        for module in self._modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    found += self._raised(module, node.exc, {}, 0)
                elif isinstance(node, ast.Call) and (kind := _warning_kind(node)):
                    index = 1 if kind == "logged" else 0
                    texts = self._texts(module, node.args[index])
                    if kind.startswith("logged"):  # the logging module's own placeholders
                        texts = tuple(re.sub(r"%(?:\.\d+)?[sdgr]", GAP, text) for text in texts)
                    found.append(Message(module.name, node.lineno, kind, texts))
        return sorted(found, key=lambda message: (message.module, message.line))

    def _raised(self, module: _Module, call: ast.Call, bound: dict, depth: int) -> list[Message]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", GAP)
        maker = module.functions.get(name)
        if maker is not None and depth < MAX_DEPTH:  # a function that makes the exception
            arguments = {key: self._render(module, value, bound) for key, value in _arguments(maker, call).items()}
            made = [node.value for node in ast.walk(maker) if isinstance(node, ast.Return)]
            found = [
                self._raised(module, value, arguments, depth + 1) for value in made if isinstance(value, ast.Call)
            ]
            return [Message(module.name, call.lineno, entry.kind, entry.texts) for entry in itertools.chain(*found)]
        if not name.lstrip("_")[:1].isupper():  # a variable that holds the class
            kinds = [
                getattr(value, "id", GAP)
                for function in module.enclosing(call)
                for value in _locals(function).get(name, ())
            ]
            name = " or ".join(dict.fromkeys(kinds)) or GAP
        # An `OSError` has a number before its message.
        texts = self._texts(module, call.args[-1], bound) if call.args else ()
        return [Message(module.name, call.lineno, name, texts)]

    def _texts(self, module: _Module, node: ast.expr, bound: dict | None = None) -> tuple[str, ...]:
        texts = (" ".join(re.sub(f"{GAP}+", GAP, text).split()) for text in self._render(module, node, bound or {}))
        return tuple(dict.fromkeys(text for text in texts if re.search(r"[A-Za-z]{2}", text)))

    # Expressions, each as the texts that it may be

    def _render(self, module: _Module, node: ast.expr, bound: dict, depth: int = 0) -> list[str]:
        def render(part):
            return self._render(module, part, bound, depth + 1)

        if depth > MAX_DEPTH * 3:
            return [GAP]
        if isinstance(node, ast.Constant):
            return [] if node.value is None else [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            return _joined([render(part) for part in node.values])
        if isinstance(node, ast.FormattedValue):
            texts = render(node.value) if node.conversion == -1 else [GAP]
            return texts if 0 < len(texts) <= MAX_VALUES else [GAP]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            if isinstance(node.right, ast.Constant) and not isinstance(node.right.value, str):
                return [GAP]
            return _joined([render(node.left), render(node.right)])
        if isinstance(node, ast.IfExp):
            return render(node.body) + render(node.orelse)
        if isinstance(node, ast.BoolOp):
            values = node.values[-1:] if isinstance(node.op, ast.And) else node.values
            return list(itertools.chain(*map(render, values)))
        if isinstance(node, ast.Name):
            return self._render_name(module, node, bound, depth)
        if isinstance(node, ast.Call):
            return self._render_call(module, node, bound, depth)
        return [GAP]

    def _render_name(self, module: _Module, node: ast.Name, bound: dict, depth: int) -> list[str]:
        name = node.id
        if name in bound:
            return bound[name]
        for function in module.enclosing(node):
            values = _locals(function).get(name)
            if values:
                added = [value for value in values if isinstance(module.parents.get(value), ast.AugAssign)]
                first = [value for value in values if value not in added]
                texts = [text for value in first for text in self._render(module, value, bound, depth + 1)]
                more = [text for value in added for text in self._render(module, value, bound, depth + 1)]
                return _joined([texts, more]) if more else texts
            if name in _parameters(function):
                return self._render_parameter(module, function, name, depth)
            if values is not None:
                return [GAP]
        source, original = module, name
        if name in module.imports:
            stem, original = module.imports[name]
            source = self._modules.get(f"{module.name.partition('.')[0]}.{stem}", module)
        return _constant(source.constants.get(original))

    def _render_parameter(self, module: _Module, function: ast.FunctionDef, name: str, depth: int) -> list[str]:
        """What callers hand over, if these are phrases: single words and values are gaps."""
        texts = []
        if depth <= MAX_DEPTH:
            for other, call in self._calls.get(function.name, ()):
                if other is not module and len(self._homes[function.name]) > 1:
                    continue  # it may be another function of this name
                given = _arguments(function, call).get(name)
                texts += [GAP] if given is None else self._render(other, given, {}, depth + 2)
        phrases = [text for text in dict.fromkeys(texts) if re.search(r"[A-Za-z]\S* +\S*[A-Za-z]", text)]
        gaps = [GAP] if not phrases or len(phrases) < len(set(texts)) else []
        return phrases + gaps if len(phrases) <= MAX_VALUES else [GAP]

    def _render_call(self, module: _Module, node: ast.Call, bound: dict, depth: int) -> list[str]:
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Constant) and node.args:
            joined = self._render(module, node.args[0], bound, depth + 1)
            return joined if function.attr == "join" and joined != [GAP] and len(joined) == 1 else [GAP]
        if isinstance(function, ast.Attribute) and function.attr in ("strip", "rstrip", "removesuffix"):
            return self._render(module, function.value, bound, depth + 1)
        name, source = getattr(function, "id", None), module
        if name in module.imports:
            stem, name = module.imports[name]
            source = self._modules.get(f"{module.name.partition('.')[0]}.{stem}", module)
        helper = source.functions.get(name)
        if helper is None or depth > MAX_DEPTH:
            return [GAP]
        arguments = {
            key: self._render(module, value, bound, depth + 2) for key, value in _arguments(helper, node).items()
        }
        arguments = {key: texts if len(texts) <= 2 else [GAP] for key, texts in arguments.items()}
        returned = [value.value for value in ast.walk(helper) if isinstance(value, ast.Return) and value.value]
        return list(
            dict.fromkeys(text for value in returned for text in self._render(source, value, arguments, depth + 2))
        )


def _joined(parts: list[list[str]]) -> list[str]:
    """All ways to put alternatives of the parts one after the other; where these are too many, gaps."""
    # What is there in some cases only is always shown: one long message instead of many.
    parts = [[text for text in part if text] or [""] for part in parts]
    while (total := _product(map(len, parts))) > MAX_TEXTS:
        longest = max(range(len(parts)), key=lambda index: len(parts[index]))
        parts[longest] = [GAP]
        if total == 1:
            break
    return ["".join(texts) for texts in itertools.product(*parts)]


def _product(numbers) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _constant(value) -> list[str]:
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return [str(value)]
    if isinstance(value, (tuple, list)) and value and all(isinstance(item, (str, int)) for item in value):
        return [", ".join(map(str, value))]
    return [GAP]


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]


def _arguments(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    names = [argument.arg for argument in [*function.args.posonlyargs, *function.args.args]]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    given = dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    defaults = [*zip(reversed(names), reversed(function.args.defaults), strict=False)]
    defaults += zip((argument.arg for argument in function.args.kwonlyargs), function.args.kw_defaults, strict=True)
    return {name: value for name, value in defaults if value is not None} | given


@functools.cache
def _locals(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """
    Expressions that a function assigns to its local names; none for those that it binds in another way, by a loop, a
    `with`, an `except`, or taking something apart.
    """
    names: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        pairs = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs += zip(target.elts, node.value.elts, strict=False)
                else:
                    pairs.append((target, node.value))
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs.append((node.target, node.value))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, [])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.setdefault(node.name, [])
        for target, value in pairs:
            if isinstance(target, ast.Name):
                names.setdefault(target.id, []).append(value)
    return names


def _called(call: ast.Call) -> str | None:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)


def _warning_kind(call: ast.Call) -> str | None:
    function = call.func
    if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and call.args):
        return None
    if function.value.id == "warnings" and function.attr == "warn":
        return "warning"
    if function.value.id == "parser" and function.attr == "error":
        return "usage error"
    return LOG_METHODS.get(function.attr) if function.value.id == "logger" else None


def index_html() -> str:
    """The index as HTML, by module."""
    modules: dict[str, dict] = {}
    for message in ErrorIndex().messages():
        for text in message.texts:
            modules.setdefault(message.module, {})[message.kind, text] = None
    parts = []
    for module, entries in modules.items():
        items = "\n".join(
            f"<li><strong>{html.escape(kind)}</strong>: {html.escape(text)}</li>" for kind, text in entries
        )
        parts.append(f"### {module}\n\n<ul>\n{items}\n</ul>\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, page, **kwargs) -> str:
    """Called by mkdocs with the text of each page."""
    if page.file.src_uri != PAGE:
        return markdown
    if MARKER not in markdown:
        raise ValueError(f"{PAGE} has no line {MARKER!r} in whose place the index of error messages goes.")
    return markdown.replace(MARKER, index_html())
