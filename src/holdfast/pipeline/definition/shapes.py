"""What may stand at a place of a definition, as values that can both read it and describe it.

Each shape turns a document's node into a value, or adds a finding and returns `WRONG`; and each gives its JSON Schema,
so that the file an editor checks with and the check itself are one table, which `model.py` is: a field's type means a
shape (`shape_of`), or carries one (`Annotated`), and its description makes it a key (`Record.of`). Reading goes on
after an error, and gives what could be read without it: an author sees all errors at once, those of the rules that come
after too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
)

from holdfast.pipeline.definition.errors import Path, nearest
from holdfast.pipeline.definition.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration_ms, parse_size

if TYPE_CHECKING:
    from holdfast.pipeline.definition.documents import Findings, Node


class _Wrong:
    """The value of what was not readable."""


WRONG: Final = _Wrong()


class Shape(Protocol):
    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        """The value, or `WRONG` after adding a finding."""

    def schema(self) -> dict[str, Any]:
        """The same as JSON Schema."""


def expected(what: str, node: Node, path: Path, findings: Findings) -> _Wrong:
    findings.add(path, f"expected {what}, found {node.words}", node.mark)
    return WRONG


@dataclass(frozen=True)
class Text:
    what: str = "a text"
    loose: bool = False
    """Editors may leave numbers and truth values unquoted: they mean the text."""

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if node.kind != "text":
            return expected(self.what, node, path, findings)
        if not node.text.strip():
            return expected(f"{self.what}, not an empty one", node, path, findings)
        return node.text

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "number", "boolean"] if self.loose else "string", "pattern": r"\S"}


@dataclass(frozen=True)
class Raw(Text):
    """A text in which blanks and nothing at all may be meant."""

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        return node.text if node.kind == "text" else expected(self.what, node, path, findings)

    def schema(self) -> dict[str, Any]:
        return {"type": "string"}


@dataclass(frozen=True)
class Choice:
    among: tuple[str, ...]

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if node.kind == "text" and node.text in self.among:
            return node.text
        if node.kind == "null" and "null" in self.among:
            return "null"  # YAML has a word of its own for it
        hint = nearest(node.text, self.among) if node.kind == "text" else ""
        findings.add(path, f"{node.words} is not one of {', '.join(self.among)}{hint}", node.mark)
        return WRONG

    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.among, None] if "null" in self.among else list(self.among)}


@dataclass(frozen=True)
class Truth:
    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if node.kind == "text" and node.text in ("true", "false"):
            return node.text == "true"
        return expected("true or false", node, path, findings)

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Count:
    least: int = 1
    most: int = 2**53

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        digits = node.text.replace("_", "")
        if node.kind != "text" or not digits.isascii() or not digits.isdecimal():
            return expected("a whole number", node, path, findings)
        if not self.least <= int(digits) <= self.most:
            return expected(f"a number from {self.least} to {self.most}", node, path, findings)
        return int(digits)

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Size:
    """A number of bytes, with or without a unit."""

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if node.kind != "text":
            return expected("a size such as 64MiB", node, path, findings)
        try:
            size = parse_size(node.text)
        except ValueError as error:
            findings.add(path, str(error), node.mark)
            return WRONG
        return size if size > 0 else expected("a size above nothing", node, path, findings)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]}


@dataclass(frozen=True)
class Duration:
    """A time with its unit, kept as it was written; or one of some words."""

    words: tuple[str, ...] = ()
    least_ms: int = 1

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if node.kind == "text" and node.text in self.words:
            return node.text
        choices = " or ".join([*(repr(word) for word in self.words), "a duration such as 10s"])
        if node.kind != "text":
            return expected(choices, node, path, findings)
        try:
            duration_ms = parse_duration_ms(node.text)
        except ValueError as error:
            hint = nearest(node.text, self.words)
            findings.add(path, f"expected {choices}: {error}{hint}", node.mark)
            return WRONG
        if duration_ms < self.least_ms:
            return expected("a duration above nothing", node, path, findings)
        return node.text

    def schema(self) -> dict[str, Any]:
        duration = {"type": "string", "pattern": DURATION_PATTERN}
        return {"anyOf": [{"enum": list(self.words)}, duration]} if self.words else duration


@dataclass(frozen=True)
class ListOf:
    element: Shape
    lone: bool = False
    """A single element may stand without its list."""
    stand_in: Callable[[int], Any] | None = None
    """Takes the place of an element that cannot be read, so that the others keep theirs and are checked too."""
    make: Callable[[tuple[Any, ...]], Any] = tuple

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if self.lone and node.kind == "text":
            value = self.element.read(node, path, findings)
            return WRONG if value is WRONG else self.make((value,))
        if node.kind != "list":
            return expected("a list", node, path, findings)
        for index, each in enumerate(node.elements):
            _remember(findings, (*path, index), each)
        values = [
            self.element.read(each, (*path, index), findings) for index, each in enumerate(node.elements)
        ]
        if self.stand_in is not None:
            values = [self.stand_in(index) if value is WRONG else value for index, value in enumerate(values)]
        return WRONG if any(value is WRONG for value in values) else self.make(tuple(values))

    def schema(self) -> dict[str, Any]:
        inner = self.element.schema()
        listed = {"type": "array", "items": inner}
        return {"anyOf": [inner, listed]} if self.lone else listed


@dataclass(frozen=True)
class MapOf:
    """Keys of the author's choice."""

    element: Shape
    make: Callable[[dict[str, Any]], Any] = dict

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if node.kind != "map":
            return expected("a mapping", node, path, findings)
        values = {}
        for item in node.items:
            _remember(findings, (*path, item.key), item.node)
            values[item.key] = self.element.read(item.node, (*path, item.key), findings)
        if any(value is WRONG for value in values.values()):
            return WRONG
        return self.make(values)

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.element.schema()}


@dataclass(frozen=True)
class Function:
    """The name of a Python function; in Python, the function itself."""

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if node.kind == "object" and callable(node.value):
            return node.value
        return Text("the name of a function").read(node, path, findings)

    def schema(self) -> dict[str, Any]:
        return Text().schema()


@dataclass(frozen=True)
class Either:
    """A text in one shape, a mapping in another."""

    text: Shape
    mapping: Shape

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        return (self.mapping if node.kind == "map" else self.text).read(node, path, findings)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.text.schema(), self.mapping.schema()]}


@dataclass(frozen=True)
class Key:
    """One key of a record."""

    name: str
    shape: Shape
    doc: str
    required: bool = False
    default: Any = None
    """For readers of the schema; the value itself comes from the model."""
    attribute: str = ""
    """What the model calls it, where that differs."""
    absent: Any = None
    """What it is read as where it is not given; None leaves that to the model."""


@dataclass(frozen=True)
class Record:
    """A mapping with known keys."""

    what: str
    keys: tuple[Key, ...]
    make: Callable[..., Any]
    """Called with what was read, by attribute; keys that are absent are left to its defaults."""
    shorthand: str | None = None
    """The key that a lone text or list stands for."""
    doc: str = ""
    names: Mapping[str, Key] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", {key.name: key for key in self.keys})

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if self.shorthand and node.kind in ("text", "list", "object"):
            key = self.names[self.shorthand]
            value = key.shape.read(node, path, findings)
            return WRONG if value is WRONG else self._made({key.attribute or key.name: value})
        if node.kind != "map":
            return expected(f"{self.what}: a mapping with {_listed(self.names)}", node, path, findings)
        values: dict[str, Any] = {}
        for item in node.items:
            inner = (*path, item.key)
            known = self.names.get(item.key)
            if known is None:
                message = f"{self.what} has no key {item.key!r}{nearest(item.key, self.names)}"
                hint = "" if "did you mean" in message else f"; it has {_listed(self.names)}"
                findings.add(inner, message + hint, item.mark)
                continue
            _remember(findings, inner, item.node)
            values[known.attribute or known.name] = known.shape.read(item.node, inner, findings)
        given = {item.key for item in node.items}
        missing = [key.name for key in self.keys if key.required and key.name not in given]
        for name in missing:
            findings.add(path, f"{self.what} needs {name!r}: {self.names[name].doc}", node.mark)
        required = {key.attribute or key.name for key in self.keys if key.required}
        if missing or any(values[name] is WRONG for name in required):
            return WRONG
        return self._made({name: value for name, value in values.items() if value is not WRONG})

    @classmethod
    def of(
        cls,
        what: str,
        model: type,
        shorthand: str | None = None,
        *,
        make: Callable[..., Any] | None = None,
        extra: Iterable[Key] = (),
        only: Container[str] | None = None,
    ) -> Record:
        """The keys that a class of the model has: those of its fields that are described, or `only` some."""
        hints = get_type_hints(model, include_extras=True)
        keys = [
            _key(each, hints[each.name])
            for each in fields(model)
            if _notes(hints[each.name], str) and (only is None or each.name in only)
        ]
        return cls(what, (*keys, *extra), make or model, shorthand, inspect.getdoc(model) or "")

    def _made(self, values: dict[str, Any]) -> Any:
        absent = {key.attribute or key.name: key.absent for key in self.keys if key.absent is not None}
        return self.make(**{**absent, **values})

    def schema(self) -> dict[str, Any]:
        properties = {}
        for key in self.keys:
            described = {"description": key.doc, **key.shape.schema()}
            if key.default is not None:
                described["default"] = key.default
            properties[key.name] = described
        record: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
        required = [key.name for key in self.keys if key.required]
        if required:
            record["required"] = required
        if self.doc:
            record["description"] = self.doc
        if self.shorthand is None:
            return record
        return {"anyOf": [self.names[self.shorthand].shape.schema(), record]}


@dataclass(frozen=True)
class Variants:
    """A mapping with one key, which says of what kind its value is."""

    what: str
    kinds: Mapping[str, Record]

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if node.kind != "map" or not node.items:
            return expected(f"{self.what}: one of {_listed(self.kinds, 'or')}", node, path, findings)
        first = next((item for item in node.items if item.key in self.kinds), None)
        for item in node.items:
            if item is not first:
                findings.add(
                    (*path, item.key), self._surplus(item.key, first.key if first else None), item.mark
                )
        if first is None:
            return WRONG
        inner = (*path, first.key)
        _remember(findings, inner, first.node)
        return self.kinds[first.key].read(first.node, inner, findings)

    def _surplus(self, key: str, kind: str | None) -> str:
        if kind is None:
            close = nearest(key, self.kinds) or f"; it is one of {_listed(self.kinds, 'or')}"
            return f"there is no {self.what.removeprefix('a ')} {key!r}{close}"
        if key in self.kinds:
            return f"{self.what} is one thing; start a new '- {key}:' for this"
        if key in self.kinds[kind].names:
            return f"{key!r} belongs below {kind!r}, indented by two more spaces"
        return f"{self.what} has one key, here {kind!r}; {key!r} has no place beside it"

    def schema(self) -> dict[str, Any]:
        properties = {
            name: {"description": record.doc, **record.schema()} for name, record in self.kinds.items()
        }
        return {
            "type": "object",
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
            "properties": properties,
        }


def listed_columns(values: Mapping[str, str]) -> str:
    """Columns given as a mapping, in Spark's one-line form."""
    columns = {name: text.strip().removesuffix("?").strip() for name, text in values.items()}
    return ", ".join(f"{_quoted(name)} {text}" for name, text in columns.items())


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) else f"`{name}`"


def pairs(other: str) -> Either:
    """Columns with those they must equal; what is called the same on both sides may be listed."""
    same = ListOf(Text("a column"), lone=True, make=lambda columns: dict(zip(columns, columns, strict=True)))
    return Either(same, MapOf(Text(other)))


def selected(select: Sequence[str]) -> Mapping[str, str]:
    """`l.id` is called `id`, `l.id AS order_id` as it says.

    What has no name of its own, or one that is taken, is called by its text, which the rules refuse.
    """
    named: dict[str, str] = {}
    for text in select:
        given = re.fullmatch(r"(?s)\s*(.+?)\s+[aA][sS]\s+(?:`([^`]+)`|(\w+))\s*", text)
        column = re.fullmatch(r"\s*[lr]\.(?:`([^`]+)`|(\w+))\s*", text)
        name, sql = text.strip(), text.strip()
        if given:
            name, sql = given[2] or given[3], given[1]
        elif column:
            name = column[1] or column[2]
        named[text.strip() if name in named else name] = sql
    return named


class Expansion(Enum):
    """What a text of the model may hold that `secrets` expands when a run begins."""

    VARIABLES = "${…}"
    SECRET = "${…}, or file: and where it is"


@dataclass(frozen=True)
class Given:
    """What a key is in a document, where its field in the model does not tell."""

    key: str = ""
    """What the document calls it."""
    required: bool = False
    absent: Any = None
    shown: Any = ...
    """The default that the schema shows, if not the field's own."""


def _notes(hint: Any, kind: type) -> list[Any]:
    """What a type carries of this kind, the outermost last."""
    return [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, kind)]


def _key(field: Field[Any], hint: Any) -> Key:
    given = (_notes(hint, Given) or [Given()])[-1]
    is_required = field.default is MISSING and field.default_factory is MISSING and given.absent is None
    shown = field.default if given.shown is ... else given.shown
    return Key(
        given.key or field.name,
        shape_of(hint),
        _notes(hint, str)[-1],
        is_required or given.required,
        shown if isinstance(shown, str | int) and shown != "" and not given.required else None,
        field.name if given.key else "",
        given.absent,
    )


def shape_of(hint: Any) -> Shape:
    """What a document holds for values of a type: the shape that it carries, else the one that it means."""
    if get_origin(hint) is Annotated:
        carried = [each for each in hint.__metadata__ if hasattr(each, "read")]
        return carried[-1] if carried else shape_of(hint.__origin__)
    arguments = [each for each in get_args(hint) if each is not type(None)]
    if get_origin(hint) is Literal:
        return Choice(tuple(arguments))
    if get_origin(hint) is tuple:
        return ListOf(shape_of(arguments[0]), lone=True)
    if get_origin(hint) is Mapping:
        return MapOf(shape_of(arguments[1]))
    if arguments:
        return shape_of(arguments[0])
    plain: Mapping[type, Shape] = {str: Text(), bool: Truth(), int: Count()}
    return plain[hint]


def _remember(findings: Findings, path: Path, node: Node) -> None:
    if node.mark:
        findings.places[path] = node.mark


def _listed(names: Iterable[str], word: str = "and") -> str:
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last
