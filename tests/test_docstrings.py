"""One argument has one text, and every public name says what its parameters are."""

import dataclasses
import inspect
import re

import pytest
from trl import GRPOConfig

import sparrow_attention
import sparrow_trl
from sparrow_trl import SparseRolloutGRPOConfig


# An entry of a Hugging Face style docstring: one name or several, what is in the parentheses, and the text.
ENTRY = re.compile(
    r"^(?P<indent> *)(?P<names>[*]{0,2}\w+(?:, \w+)*)(?: \((?P<type>(?:[^()]|\([^()]*\))*)\))?:(?: (?P<text>.*))?$"
)
DEFAULT = re.compile(r"\*optional\*, defaults to `(.*)`$")


@dataclasses.dataclass
class Entry:
    type: str | None
    text: str

    @property
    def default(self) -> str | None:
        """What the entry says is the default, as source text."""
        match = DEFAULT.search(self.type or "")
        return match.group(1) if match else None


def parse_entries(docstring: str) -> dict[str, Entry]:
    """Entries of the parameter lists of a docstring, by name without the stars."""
    entries, current = {}, None
    for line in inspect.cleandoc(docstring).splitlines():
        match = ENTRY.match(line)
        if match and match["indent"]:
            current, indent = Entry(match["type"], match["text"] or ""), len(match["indent"])
            for name in match["names"].lstrip("*").split(", "):
                entries.setdefault(name, current)
        elif current and line.strip() and len(line) - len(line.lstrip()) > indent:
            current.text = f"{current.text} {line.strip()}".strip()
        elif line.strip():
            current = None
    return entries


def plain(text: str) -> str:
    """A text without what only one of its two places needs: doc-builder links and argparse's escapes."""
    return re.sub(r"\[(`[^`]*`)\]", r"\1", text).replace("`~", "`").replace("%%", "%")


# The configuration


OWN_FIELDS = {
    field.name: field
    for field in dataclasses.fields(SparseRolloutGRPOConfig)
    if field.name in SparseRolloutGRPOConfig.__annotations__
}
OVERRIDDEN = {name for name in OWN_FIELDS if name in GRPOConfig.__dataclass_fields__}


def test_the_config_documents_its_own_fields_in_their_order():
    documented = list(parse_entries(SparseRolloutGRPOConfig.__doc__))
    assert documented == [name for name in OWN_FIELDS if name not in OVERRIDDEN]


@pytest.mark.parametrize("name", sorted(OWN_FIELDS.keys() - OVERRIDDEN))
def test_docstring_help_type_and_default_of_an_argument_agree(name):
    field, entry = OWN_FIELDS[name], parse_entries(SparseRolloutGRPOConfig.__doc__)[name]
    assert plain(entry.text) == plain(field.metadata["help"])
    assert entry.default == (None if field.default is None else repr(field.default).replace("'", '"'))
    annotation = SparseRolloutGRPOConfig.__annotations__[name]
    annotation = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    kinds = [f"`{kind}`" for kind in annotation.split(" | ") if kind != "None"]
    assert entry.type.split(", *optional*")[0] == " or ".join(kinds)


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_the_docstring_names_the_defaults_that_differ_from_trl(name):
    default = OWN_FIELDS[name].default
    assert default != GRPOConfig.__dataclass_fields__[name].default
    text = " ".join(SparseRolloutGRPOConfig.__doc__.split())
    shown = repr(default).replace("'", '"')
    assert re.search(rf"`{name}`( defaults)?( here)? to `{shown}`|`{name}` defaults to `{shown}`", text)


def test_help_texts_are_safe_for_argparse():
    for name, field in OWN_FIELDS.items():
        assert not re.search(r"%(?!%|\()", field.metadata["help"].replace("%%", "")), name


# Everything else


def public_objects():
    """Public functions, classes and methods of the two packages, by qualified name."""
    listed = [(sparrow_trl, name) for name in sparrow_trl.__all__]
    listed += [(sparrow_attention, name) for name in sparrow_attention.__all__]
    for package, name in listed:
        value = getattr(package, name)
        if inspect.ismodule(value):
            members = {n: v for n, v in vars(value).items() if getattr(v, "__module__", None) == value.__name__}
        else:
            members = {name: value}
        for name, value in members.items():
            if name.startswith("_"):
                continue
            path = f"{value.__module__}.{name}"
            if inspect.isfunction(value):
                yield path, value
            elif inspect.isclass(value):
                yield path, value
                yield from public_methods(value, path)


def public_methods(cls: type, path: str):
    for name, value in vars(cls).items():
        inherited = any(hasattr(base, name) for base in cls.__mro__[1:])
        if name.startswith("_") or inherited:
            continue  # an override means what its base says
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if inspect.isfunction(value):
            yield f"{path}.{name}", value


OBJECTS = dict(public_objects())


def parameters(value) -> dict[str, inspect.Parameter]:
    """Parameters that `value` itself declares."""
    if inspect.isclass(value):
        if not dataclasses.is_dataclass(value) and "__init__" not in vars(value):
            return {}
        if dataclasses.is_dataclass(value) and value is SparseRolloutGRPOConfig:
            return {}  # above
    return {
        name: parameter
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in ("self", "cls", "args") and not name.startswith("_")
    }


def test_the_walk_finds_the_public_names():
    assert {
        "sparrow_attention.reference.sparse_attention",
        "sparrow_trl.acceptance.AcceptanceTracker.update",
        "sparrow_trl.rollout.SparseVLLMGeneration.dense_rollouts",
        "sparrow_trl.schedule.preset_names",
        "sparrow_trl.trainer.SparseRolloutGRPOTrainer",
    } <= OBJECTS.keys()


@pytest.mark.parametrize("path", OBJECTS)
def test_every_public_name_documents_its_parameters(path):
    value = OBJECTS[path]
    # A dataclass without a docstring gets its signature as one.
    own_docstring = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own_docstring and not own_docstring.startswith(f"{value.__name__}("), "no docstring"
    entries = parse_entries(own_docstring)
    declared = parameters(value)
    missing = [name for name in declared if name not in entries and f"`{name}`" not in own_docstring]
    assert not missing, f"undocumented parameters: {missing}"


@pytest.mark.parametrize("path", [path for path, value in OBJECTS.items() if parse_entries(value.__doc__ or "")])
def test_documented_defaults_are_those_of_the_signature(path):
    entries, declared = parse_entries(OBJECTS[path].__doc__), parameters(OBJECTS[path])
    for name in entries.keys() & declared.keys():
        entry, parameter = entries[name], declared[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if entry.type is None:
            continue  # documented elsewhere, which the text names
        has_default = parameter.default is not parameter.empty
        assert ("*optional*" in entry.type) == has_default, f"{name}: {entry.type}"
        if entry.default is not None and "factory" not in repr(parameter.default):
            assert entry.default == repr(parameter.default).replace("'", '"'), f"{name}: {entry.type}"
        elif entry.default is None and has_default:
            assert parameter.default is None, f"{name} defaults to {parameter.default!r}, which its entry does not say"
