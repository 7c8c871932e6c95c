"""What may stand at a place of a definition, as values that can both read it and describe it.

Each shape turns a document's node into a value, or adds a finding and returns `WRONG`; and each gives its JSON Schema,
so that the file an editor checks with and the check itself are one table (`table.py`). Reading goes on after an error,
and gives what could be read without it: an author sees all errors at once, those of the rules that come after too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from holdfast.pipeline.definition.documents import Findings, Node
from holdfast.pipeline.definition.errors import Path, nearest
from holdfast.pipeline.definition.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration_ms, parse_size


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

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if self.lone and node.kind == "text":
            value = self.element.read(node, path, findings)
            return WRONG if value is WRONG else (value,)
        if node.kind != "list":
            return expected("a list", node, path, findings)
        for index, each in enumerate(node.elements):
            _remember(findings, (*path, index), each)
        values = [
            self.element.read(each, (*path, index), findings) for index, each in enumerate(node.elements)
        ]
        if self.stand_in is not None:
            values = [self.stand_in(index) if value is WRONG else value for index, value in enumerate(values)]
        return WRONG if any(value is WRONG for value in values) else tuple(values)

    def schema(self) -> dict[str, Any]:
        inner = self.element.schema()
        listed = {"type": "array", "items": inner}
        return {"anyOf": [inner, listed]} if self.lone else listed


@dataclass(frozen=True)
class MapOf:
    """Keys of the author's choice."""

    element: Shape
    make: Callable[[dict[str, Any], Path, Findings], Any] = lambda values, path, findings: values

    def read(self, node: Node, path: Path, findings: Findings) -> Any:
        if node.kind != "map":
            return expected("a mapping", node, path, findings)
        values = {}
        for item in node.items:
            _remember(findings, (*path, item.key), item.node)
            values[item.key] = self.element.read(item.node, (*path, item.key), findings)
        if any(value is WRONG for value in values.values()):
            return WRONG
        return self.make(values, path, findings)

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


def _remember(findings: Findings, path: Path, node: Node) -> None:
    if node.mark:
        findings.places[path] = node.mark


def _listed(names: Iterable[str], word: str = "and") -> str:
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last
