"""A definition before it means anything: texts, lists and mappings that know where they were written.

YAML's own guesses are not used: a scalar is the text the author wrote, and what it stands for is decided by what the
place takes. So `no` is a text where a text is wanted, `1e3` is no number of rows, and a version `4.10` does not lose
its zero. Duplicate keys are refused, since YAML would silently keep the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from holdfast.pipeline.definition.errors import Finding, Mark, Path

DOCUMENT_BYTES_MAX = 4 << 20
"""A definition is written by people; what is larger is something else by mistake."""


@dataclass(frozen=True)
class Item:
    """One key of a mapping."""

    key: str
    node: Node
    mark: Mark | None


@dataclass(frozen=True)
class Node:
    kind: Literal["text", "null", "list", "map", "object"]
    text: str = ""
    items: tuple[Item, ...] = ()
    elements: tuple[Node, ...] = ()
    value: Any = None
    """Of kind `object`: a Python value that has no written form, such as a function."""
    mark: Mark | None = None

    @property
    def words(self) -> str:
        """What it is, for a message."""
        names = {"null": "empty", "list": "a list", "map": "a mapping"}
        if self.kind == "text":
            return repr(self.text)
        if self.kind == "object":
            return f"a {type(self.value).__name__}"
        return names[self.kind]


@dataclass
class Findings:
    """Collects what is wrong and remembers where every path was written."""

    file: str | None = None
    found: list[Finding] = field(default_factory=list)
    places: dict[Path, Mark] = field(default_factory=dict)

    def add(self, path: Path, message: str, mark: Mark | None = None) -> None:
        self.found.append(Finding(path, message, mark=mark or self.place(path), file=self.file))

    def place(self, path: Path) -> Mark | None:
        """Where the path, or what it lies in, was written."""
        while path:
            if path in self.places:
                return self.places[path]
            path = path[:-1]
        return self.places.get(())

    def located(self, finding: Finding) -> Finding:
        """The same finding with this file's name and place."""
        return Finding(finding.path, finding.message, finding.level, self.place(finding.path), self.file)


def from_yaml(text: str, findings: Findings) -> Node | None:
    """The document of a YAML text, or nothing when it is no YAML; then `findings` says why."""
    if len(text) > DOCUMENT_BYTES_MAX:
        findings.add((), "the file is larger than a pipeline's definition can be")
        return None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        mark = Mark(at.line + 1, at.column + 1) if at else None
        findings.add((), f"this is not YAML: {_reason(error)}", mark)
        return None
    except yaml.YAMLError as error:
        findings.add((), f"this is not YAML: {error}")
        return None
    if root is None:
        findings.add((), "the file is empty; 'holdfast pipeline init' writes one that works")
        return None
    return _Conversion(findings).node(root, (), frozenset())


def _reason(error: yaml.MarkedYAMLError) -> str:
    parts = [part for part in (error.problem, error.context) if part]
    reason = ", ".join(parts)
    if "cannot start any token" in reason and "'\\t'" in reason:
        return "a tab cannot indent; use spaces"
    if "mapping values are not allowed" in reason:
        return "a ':' stands where none can; quote the text, or start a new line before it"
    if "but got '?'" in reason:
        return "inside { } a text with '?' must be quoted, such as \"string?\"; or write one field a line"
    if "expected a single document" in reason:
        return "there is a second document ('---'); a file holds one pipeline"
    return reason


class _Conversion:
    """Nodes of YAML to ours. What aliases share is converted once, so that they cannot be used to swell a file."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._done: dict[int, Node] = {}

    def node(self, node: yaml.Node, path: Path, within: frozenset[int]) -> Node:
        mark = Mark(node.start_mark.line + 1, node.start_mark.column + 1)
        if id(node) in within:
            self._findings.add(path, "an alias (*) cannot stand inside what it names", mark)
            return Node("null", mark=mark)
        if not node.tag.startswith("tag:yaml.org,2002:"):
            message = (
                f"{node.tag} is a tag of YAML, which mean nothing here; quote a text that begins with '!'"
            )
            self._findings.add(path, message, mark)
        if id(node) not in self._done:
            self._done[id(node)] = self._convert(node, path, within | {id(node)}, mark)
        return self._done[id(node)]

    def _convert(self, node: yaml.Node, path: Path, within: frozenset[int], mark: Mark) -> Node:
        if isinstance(node, yaml.ScalarNode):
            is_null = node.tag == "tag:yaml.org,2002:null" and node.style is None
            return Node("null" if is_null else "text", text=node.value, mark=mark)
        if isinstance(node, yaml.SequenceNode):
            elements = (self.node(each, (*path, index), within) for index, each in enumerate(node.value))
            return Node("list", elements=tuple(elements), mark=mark)
        return Node("map", items=self._items(node, path, within), mark=mark)

    def _items(self, node: yaml.Node, path: Path, within: frozenset[int]) -> tuple[Item, ...]:
        items: dict[str, Item] = {}
        for key_node, value_node in node.value:
            mark = Mark(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                self._findings.add(path, "a key must be a text", mark)
                continue
            key = str(key_node.value)
            inner = self.node(value_node, (*path, key), within)
            if key in items:
                first = items[key].mark
                line = f" in line {first.line}" if first else ""
                message = f"the key {key!r} was given already{line}; keep one of the two"
                self._findings.add((*path, key), message, mark)
                continue
            items[key] = Item(key, inner, mark)
        return tuple(items.values())


def from_values(value: Any) -> Node:
    """Python's values as a document; keys whose value is None are as good as absent."""
    if isinstance(value, bool):
        return Node("text", text="true" if value else "false")
    if isinstance(value, str | int | float):
        return Node("text", text=str(value))
    if value is None:
        return Node("null")
    if isinstance(value, Mapping):
        return Node(
            "map",
            items=tuple(
                Item(str(key), from_values(each), None) for key, each in value.items() if each is not None
            ),
        )
    if isinstance(value, Sequence | set | frozenset):
        return Node("list", elements=tuple(from_values(each) for each in value))
    return Node("object", value=value)
