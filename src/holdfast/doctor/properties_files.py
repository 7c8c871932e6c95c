"""Files with client settings: Java properties, dictionaries in YAML and JSON, and Spring's application files.

- The role (producer or consumer) is told by the caller; a file with sections `producer` and `consumer` gives the one
  asked for, under what stands beside them.
- The client is told, or taken from the kind of file: properties and Spring are Java's, a dictionary with dotted names
  is librdkafka's, one with underscores kafka-python's.
- Spring's container turns auto-commit off unless the file says otherwise, and writes names with hyphens; everything
  below `properties` keeps Kafka's names. A document of a profile is read on top of those before it.
- What cannot be read raises `UnreadableFile` with the file and the reason; a line number when there is one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.config.properties import parse_properties
from holdfast.doctor.client_defaults import Client, Role, canonical
from holdfast.doctor.client_settings import UNKNOWN, ClientSettings, Setting, Style, make_settings
from holdfast.doctor.findings import DoctorError, Place
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
class Entry:
    """One value of a file: the path to it, the value, and the line it stands on."""

    path: tuple[str, ...]
    value: Any
    line: int


def client_named(name: str) -> Client:
    try:
        return Client(name.lower())
    except ValueError:
        known = ", ".join(client.value for client in Client)
        raise DoctorError(f"unknown client {name!r}; known are {known}") from None


def read_clients(path: str, role: Role, client: Client | None = None) -> list[ClientSettings]:
    """The settings of this role in a file: one, or one for each of Spring's profiles."""
    text = read_text(path)
    documents = list(_documents(path, text))
    if any(_is_spring(entries) for entries in documents):
        return list(_spring(path, documents, role))
    entries = [entry for document in documents for entry in document]
    written = list(_section(entries, role))
    style: Style = _style(path)
    chosen = client or _guess(style, written)
    names = (".".join(entry.path).removeprefix(TOPIC_SECTION) for entry in written)
    settings = [Setting(name, e.value, Place(path, e.line)) for name, e in zip(names, written, strict=True)]
    if client in (Client.KAFKA_PYTHON, Client.AIOKAFKA) and style == "properties":
        style = "yaml"
    return [make_settings(role, chosen, Place(path), settings, style=style)]


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


def read_entries(path: str) -> list[Entry]:
    """Every value of a file with its path and line, whatever the kind of file."""
    return [entry for document in _documents(path, read_text(path)) for entry in document]


def _style(path: str) -> Style:
    lower = path.lower()
    if lower.endswith((".yml", ".yaml")):
        return "yaml"
    return "json" if lower.endswith(".json") else "properties"


def _guess(style: Style, written: Sequence[Entry]) -> Client:
    if style == "properties":
        return Client.JAVA
    underscores = any("_" in entry.path[-1] and "." not in entry.path[-1] for entry in written)
    return Client.KAFKA_PYTHON if underscores else Client.LIBRDKAFKA


def _documents(path: str, text: str) -> Iterator[list[Entry]]:
    match _style(path):
        case "yaml":
            yield from _yaml_documents(path, text)
        case "json":
            yield _json_document(path, text)
        case _:
            yield _properties_document(path, text)


def _properties_document(path: str, text: str) -> list[Entry]:
    try:
        properties = parse_properties(text, path)
    except ConfigError as error:
        raise UnreadableFile(str(error)) from error
    if not properties and text.strip() and not re.search(r"^\s*[#!]", text, re.MULTILINE):
        raise UnreadableFile(f"{path}: no settings in it")
    earlier = [Entry((name,), _value_at(text, line), line) for name, line, _ in properties.repeated]
    return [*earlier, *(Entry((name,), value, properties.lines[name]) for name, value in properties.items())]


def _value_at(text: str, line: int) -> str:
    """The value of a pair that a later one with the same name replaced."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return next(iter(parse_properties(lines[line - 1]).values()), "")


def _json_document(path: str, text: str) -> list[Entry]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableFile(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except RecursionError:
        raise UnreadableFile(f"{path}: nested too deeply") from None
    if not isinstance(document, Mapping):
        raise UnreadableFile(f"{path}: not a dictionary of settings")
    return list(_walk_json(document, (), text, [0]))


def _walk_json(
    mapping: Mapping[str, Any], path: tuple[str, ...], text: str, cursor: list[int]
) -> Iterator[Entry]:
    """The values in reading order; `cursor` is how far the text has been read, so that lines are the right ones."""
    for name, value in mapping.items():
        start = text.find(json.dumps(name, ensure_ascii=False), cursor[0])
        cursor[0] = start + 1 if start >= 0 else cursor[0]
        if isinstance(value, Mapping):
            yield from _walk_json(value, (*path, name), text, cursor)
        else:
            yield Entry((*path, name), value, text.count("\n", 0, cursor[0]) + 1)


def _yaml_documents(path: str, text: str) -> Iterator[list[Entry]]:
    import yaml

    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        for node in nodes:
            if node is None:
                continue
            if not isinstance(node, yaml.MappingNode):
                raise UnreadableFile(f"{path}:{node.start_mark.line + 1}: not a dictionary of settings")
            entries = list(itertools.islice(_walk_yaml(node, (), yaml, set()), ENTRIES_MAX + 1))
            if len(entries) > ENTRIES_MAX:
                raise UnreadableFile(f"{path}: more than {ENTRIES_MAX} values, which no file of settings has")
            yield entries
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark is not None else path
        raise UnreadableFile(f"{where}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UnreadableFile(f"{path}: not YAML: {error}") from error


def _walk_yaml(node: Any, path: tuple[str, ...], yaml: Any, above: set[int]) -> Iterator[Entry]:
    if id(node) in above:
        return  # an alias to what it stands in
    for key, value in node.value:
        name = str(key.value)
        if isinstance(value, yaml.MappingNode):
            if name == "<<":
                yield from _walk_yaml(value, path, yaml, above | {id(node)})
            else:
                yield from _walk_yaml(value, (*path, name), yaml, above | {id(node)})
        else:
            yield Entry((*path, name), _plain(value, yaml), key.start_mark.line + 1)


def _plain(node: Any, yaml: Any) -> Any:
    """A scalar, or a list of them; what is nested further is no value of a setting."""
    if isinstance(node, yaml.ScalarNode):
        return yaml.SafeLoader("").construct_object(node)
    if all(isinstance(each, yaml.ScalarNode) for each in node.value):
        return [yaml.SafeLoader("").construct_object(each) for each in node.value]
    return UNKNOWN


def _section(entries: Sequence[Entry], role: Role) -> Iterator[Entry]:
    """The entries of one role: those of its section and those beside the sections, or all when there are none."""
    sections = {entry.path[0] for entry in entries if len(entry.path) > 1} & {
        "producer",
        "consumer",
        "common",
    }
    for entry in entries:
        first = entry.path[0]
        if first in sections and len(entry.path) > 1:
            if first in (role, "common"):
                yield Entry(entry.path[1:], entry.value, entry.line)
        else:
            yield entry


# Spring

_SPRING_NAMES: Final[Mapping[str, str]] = {
    "bootstrap-servers": "bootstrap.servers",
    "client-id": "client.id",
    "compression-type": "compression.type",
    "batch-size": "batch.size",
    "buffer-memory": "buffer.memory",
    "enable-auto-commit": "enable.auto.commit",
    "auto-offset-reset": "auto.offset.reset",
    "auto-commit-interval": "auto.commit.interval.ms",
    "fetch-max-wait": "fetch.max.wait.ms",
    "fetch-min-size": "fetch.min.bytes",
    "group-id": "group.id",
    "heartbeat-interval": "heartbeat.interval.ms",
    "isolation-level": "isolation.level",
    "max-poll-records": "max.poll.records",
    "max-poll-interval": "max.poll.interval.ms",
    "key-serializer": "key.serializer",
    "value-serializer": "value.serializer",
    "key-deserializer": "key.deserializer",
    "value-deserializer": "value.deserializer",
    "transaction-id-prefix": "transactional.id",
    "acks": "acks",
    "retries": "retries",
}
_SPRING_OTHERS: Final = frozenset({"bootstrap-servers", "client-id"})
SPRING_DEFAULTS: Final[Mapping[str, Any]] = {"enable.auto.commit": False}
"""What the listener container sets where the file says nothing."""
_DURATION = re.compile(r"(?i)^(\d+)(ms|s|m|h)?$")
_DATA_SIZE = re.compile(r"(?i)^(\d+)(B|KB|MB|GB)$")
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_UNITS_BYTES: Final = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def _is_spring(entries: Sequence[Entry]) -> bool:
    return any(".".join(entry.path).startswith("spring.kafka.") for entry in entries)


def _spring(path: str, documents: Sequence[Sequence[Entry]], role: Role) -> Iterator[ClientSettings]:
    base: list[Entry] = []
    for entries in documents:
        profile = any("on-profile" in entry.path[-1] or entry.path[-1] == "profiles" for entry in entries)
        merged = [*base, *entries]
        if not profile:
            base = merged
        last: dict[str, Setting] = {}
        for entry in merged:
            for setting in _spring_setting(path, entry, role):
                last[canonical(Client.JAVA, setting.name)] = setting
        if _is_spring(entries):
            yield make_settings(
                role, Client.JAVA, Place(path), list(last.values()), style="spring", defaults=SPRING_DEFAULTS
            )


def _spring_setting(path: str, entry: Entry, role: Role) -> Iterator[Setting]:
    parts = ".".join(entry.path).split(".")
    if parts[:2] != ["spring", "kafka"]:
        return
    parts = parts[2:]
    if parts and parts[0] == role:
        parts = parts[1:]
    elif parts and parts[0] != "properties" and parts[0] != "bootstrap-servers":
        return
    if parts and parts[0] == "properties":
        name = ".".join(parts[1:]).strip("[]")
        yield Setting(name, entry.value, Place(path, entry.line))
        return
    kebab = re.sub(r"(?<=[a-z])([A-Z])", r"-\1", ".".join(parts)).replace("_", "-").lower()
    known = _SPRING_NAMES.get(kebab)
    if known is not None:
        yield Setting(known, _spring_value(known, entry.value), Place(path, entry.line))
    elif kebab not in _SPRING_OTHERS and not kebab.startswith(("ssl.", "security.")):
        # Kafka's spelling of what was written: the check of names says what was meant.
        yield Setting(kebab.replace("-", "."), entry.value, Place(path, entry.line))


def _spring_value(name: str, value: Any) -> Any:
    """Durations and sizes with Spring's units, as the numbers Kafka takes."""
    text = str(value).strip()
    if name.endswith(".ms") and (match := _DURATION.match(text)):
        return int(match[1]) * _UNITS_MS[(match[2] or "ms").lower()]
    if name.endswith((".size", ".bytes", ".memory")) and (match := _DATA_SIZE.match(text)):
        return int(match[1]) * _UNITS_BYTES[match[2].lower()]
    return value
