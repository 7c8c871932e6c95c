"""Reading files of settings, Java properties, YAML and JSON, and client settings that stand in them plainly.

- A file is documents, a document is entries: every value with the path to it and its line. Kinds of files that have a
  structure of their own (compose, Kubernetes, Connect, Spring) are read from the same entries elsewhere.
- The role (producer or consumer) is told by the caller; a file with sections `producer` and `consumer` gives the one
  asked for, under what stands beside them.
- The client is told, or taken from the kind of file: properties are Java's, a dictionary with dotted names is
  librdkafka's, one with underscores kafka-python's.
- What cannot be read raises `UnreadableFile` with the file and the reason; a line number when there is one.

A `Tree` is a document's entries as the tree they came from: compose files and Kubernetes resources are looked up in it.
A list is a branch whose names are its numbers; a list of scalars is one leaf. Looking up what is not there gives an
empty branch or None, never an error: a file may have anything anywhere.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Union

import yaml

from holdfast.config.properties import parse_properties
from holdfast.doctor.client_defaults import Client, Role
from holdfast.doctor.client_settings import ClientSettings, Setting, Style, make_settings, shown
from holdfast.doctor.findings import DoctorError, Location
from holdfast.errors import ConfigError

FILE_BYTES_MAX: Final = 4 * 1024 * 1024
"""No file of settings is larger; something else was named by mistake."""
ENTRIES_MAX: Final = 20_000
"""More values than any file of settings has: aliases of YAML can stand for billions."""


TOPIC_SECTION: Final = "default.topic.config."
"""Where older programs of confluent-kafka put what is of topics; it counts like the rest."""


class UnreadableFile(DoctorError):
    """A file that cannot be read, or is not what its name says."""


@dataclass(frozen=True)
class PropertyEntry:
    """One value of a file: the path to it, the value, and the line it stands on."""

    path: tuple[str, ...]
    value: Any
    """A scalar, a list of scalars, or an empty dictionary; what holds more is entries of its own."""
    line: int
    lines: tuple[int, ...] = ()
    """Those of a list's items."""


Documents = list[list[PropertyEntry]]


def client_named(name: str) -> Client:
    try:
        return Client(name.lower())
    except ValueError:
        known = ", ".join(client.value for client in Client)
        raise DoctorError(f"unknown client {name!r}; known are {known}") from None


def plain_client(
    path: str, documents: Documents, role: Role, client: Client | None = None, named: str = ""
) -> ClientSettings:
    """The settings of a file that has nothing else in it; `named` tells how it is written."""
    entries = [entry for document in documents for entry in document if not entry.path[0].startswith("[")]
    style: Style = _style(named or path)
    settings = list(_section(path, entries, role))
    # A section of an INI file: Python's configparser reads it.
    is_ini = style == "properties" and len(entries) < sum(map(len, documents))
    chosen = client or (Client.LIBRDKAFKA if is_ini else _guess(style, settings))
    # A prefix is that of some program, whose own defaults are not known.
    framed = style == "properties" and any(setting.written for setting in settings)
    if client in (Client.KAFKA_PYTHON, Client.AIOKAFKA) and style == "properties":
        style = "yaml"
    spelling = f"{role}.{{}}={{}}" if framed else ""
    return make_settings(
        role, chosen, Location(path), settings, style=style, open_ended=framed, spelling=spelling
    )


def read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise UnreadableFile(f"{path}: larger than {FILE_BYTES_MAX >> 20} MiB, which no file of settings is")
    if b"\0" in data:
        raise UnreadableFile(f"{path}: not a text file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def parse_documents(path: str, text: str, named: str = "") -> Documents:
    """The documents of a file that say something; how they are written is told by the end of its name."""
    match _style(named or path):
        case "yaml":
            found = list(_yaml_documents(path, text))
        case "json":
            found = [_json_document(path, text)]
        case _:
            found = [_properties_document(path, text)]
    found = [document for document in found if document]
    if not found:
        raise UnreadableFile(f"{path}: no settings in it")
    return found


def read_entries(path: str) -> list[PropertyEntry]:
    """Every value of a file with its path and line, whatever the kind of file."""
    return [entry for document in parse_documents(path, read_text(path)) for entry in document]


def _style(path: str) -> Style:
    lower = path.lower()
    if lower.endswith((".yml", ".yaml")):
        return "yaml"
    return "json" if lower.endswith(".json") else "properties"


def _guess(style: Style, settings: Sequence[Setting]) -> Client:
    if style == "properties":
        return Client.JAVA
    underscores = any("_" in setting.name and "." not in setting.name for setting in settings)
    return Client.KAFKA_PYTHON if underscores else Client.LIBRDKAFKA


def _properties_document(path: str, text: str) -> list[PropertyEntry]:
    try:
        properties = parse_properties(text, path)
    except ConfigError as error:
        raise UnreadableFile(str(error)) from error
    earlier = [PropertyEntry((name,), _value_at(text, line), line) for name, line, _ in properties.repeated]
    return [
        *earlier,
        *(PropertyEntry((name,), value, properties.lines[name]) for name, value in properties.items()),
    ]


def _value_at(text: str, line: int) -> str:
    """The value of a pair that a later one with the same name replaced."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return next(iter(parse_properties(lines[line - 1]).values()), "")


def _json_document(path: str, text: str) -> list[PropertyEntry]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableFile(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except RecursionError:
        raise UnreadableFile(f"{path}: nested too deeply") from None
    if not isinstance(document, Mapping):
        raise UnreadableFile(f"{path}: not a dictionary of settings")
    return list(_walk_json(document, (), text, [0]))


def _walk_json(value: Any, path: tuple[str, ...], text: str, cursor: list[int]) -> Iterator[PropertyEntry]:
    """The values in reading order; `cursor` is how far the text has been read, so that lines are the right ones."""
    if isinstance(value, Mapping) and (value or not path):
        for name, inner in value.items():
            start = text.find(json.dumps(name, ensure_ascii=False), cursor[0])
            cursor[0] = start + 1 if start >= 0 else cursor[0]
            yield from _walk_json(inner, (*path, name), text, cursor)
    elif isinstance(value, list) and any(isinstance(each, (Mapping, list)) for each in value):
        for index, inner in enumerate(value):
            yield from _walk_json(inner, (*path, str(index)), text, cursor)
    else:
        yield PropertyEntry(path, value, text.count("\n", 0, cursor[0]) + 1)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """An anchor that is used again takes its new meaning, as YAML 1.2 has it."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if not isinstance(event, yaml.AliasEvent):
            self.anchors.pop(getattr(event, "anchor", None), None)
        return super().compose_node(parent, index)


def _yaml_documents(path: str, text: str) -> Iterator[list[PropertyEntry]]:
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=_Loader) if node is not None]
        for node in nodes:
            if not isinstance(node, yaml.MappingNode) and not _is_null(node):
                raise UnreadableFile(f"{path}:{node.start_mark.line + 1}: not a dictionary of settings")
            entries = list(itertools.islice(_walk_yaml(node, (), 0, frozenset()), ENTRIES_MAX + 1))
            if len(entries) > ENTRIES_MAX:
                raise UnreadableFile(f"{path}: more than {ENTRIES_MAX} values, which no file of settings has")
            yield [] if _is_null(node) else entries
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark is not None else path
        if "{{" in text:
            raise UnreadableFile(
                f"{where}: a template: fill it in first (such as helm template), and name what comes out"
            ) from error
        raise UnreadableFile(f"{where}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UnreadableFile(f"{path}: not YAML: {error}") from error


def _is_null(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _walk_yaml(node: Any, path: tuple[str, ...], line: int, above: frozenset[int]) -> Iterator[PropertyEntry]:
    if id(node) in above:
        return  # an alias to what it stands in
    above |= {id(node)}
    if isinstance(node, yaml.ScalarNode):
        yield PropertyEntry(path, _scalar(node), line)
    elif isinstance(node, yaml.SequenceNode):
        if all(isinstance(each, yaml.ScalarNode) for each in node.value):
            lines = tuple(each.start_mark.line + 1 for each in node.value)
            yield PropertyEntry(path, [_scalar(each) for each in node.value], line, lines)
            return
        for index, each in enumerate(node.value):
            yield from _walk_yaml(each, (*path, str(index)), each.start_mark.line + 1, above)
    elif node.value or not path:
        # What is merged comes first: what stands beside it overrides it.
        for key, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            if key.value == "<<":
                merged = value.value[::-1] if isinstance(value, yaml.SequenceNode) else [value]
                for each in merged:
                    yield from _walk_yaml(each, path, line, above)
            else:
                yield from _walk_yaml(value, (*path, str(key.value)), key.start_mark.line + 1, above)
    else:
        yield PropertyEntry(path, {}, line)


def _scalar(node: Any) -> Any:
    return yaml.SafeLoader("").construct_object(node)


SECTIONS: Final = ("producer", "consumer", "common")


def _section(path: str, entries: Sequence[PropertyEntry], role: Role) -> Iterator[Setting]:
    """The settings of one role: those of its section and those beside the sections, or all when there are none."""
    for entry in entries:
        whole = ".".join(entry.path)
        first, _, rest = whole.partition(".")
        if not rest or first not in SECTIONS:
            yield Setting(whole.removeprefix(TOPIC_SECTION), entry.value, Location(path, entry.line))
        elif first in (role, "common"):
            yield Setting(rest.removeprefix(TOPIC_SECTION), entry.value, Location(path, entry.line), whole)


Tree = dict[str, Union["Tree", PropertyEntry]]


def tree_of(entries: Sequence[PropertyEntry]) -> Tree:
    root: Tree = {}
    for entry in entries:
        here = root
        for name in entry.path[:-1]:
            below = here.get(name)
            if not isinstance(below, dict):
                below = here[name] = {}
            here = below
        here[entry.path[-1]] = entry
    return root


def branch(tree: Tree, *names: str) -> Tree:
    for name in names:
        below = tree.get(name)
        tree = below if isinstance(below, dict) else {}
    return tree


def branches(tree: Tree, *names: str) -> Iterator[tuple[str, Tree]]:
    """The branches below one, with their names."""
    return ((name, each) for name, each in branch(tree, *names).items() if isinstance(each, dict))


def leaf(tree: Tree, *names: str) -> PropertyEntry | None:
    below = branch(tree, *names[:-1]).get(names[-1])
    return below if isinstance(below, PropertyEntry) else None


def text(tree: Tree, *names: str) -> str:
    found = leaf(tree, *names)
    return "" if found is None or found.value in ({}, None) else shown(found.value)


def texts(tree: Tree, *names: str) -> Iterator[tuple[str, int]]:
    """The items of a list of scalars, or the one scalar there is, with their lines."""
    found = leaf(tree, *names)
    if found is not None and isinstance(found.value, list):
        yield from zip(map(shown, found.value), found.lines, strict=True)
    elif found is not None and found.value not in ({}, None):
        yield shown(found.value), found.line


def first_line(tree: Tree) -> int:
    """The line before which a branch begins, as near as its leaves tell."""
    lines = [each.line if isinstance(each, PropertyEntry) else first_line(each) for each in tree.values()]
    return min((line for line in lines if line), default=0)


def settings_of(tree: Tree, file: str) -> dict[str, Setting]:
    """The leaves below a branch, by their dotted names."""
    settings: dict[str, Setting] = {}
    for name, each in tree.items():
        if isinstance(each, PropertyEntry):
            settings[name] = Setting(name, each.value, Location(file, each.line))
        else:
            settings |= {
                f"{name}.{rest}": Setting(f"{name}.{rest}", inner.value, inner.place)
                for rest, inner in settings_of(each, file).items()
            }
    return settings
