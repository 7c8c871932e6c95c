"""Spring's application files: `spring.kafka`, and the Kafka binder of Spring Cloud Stream.

Spring's container turns auto-commit off unless the file says otherwise, and writes names with hyphens; everything
below `properties` keeps Kafka's names. A document of a profile is read on top of those before it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.doctor.client_defaults import Client, Role, canonical
from holdfast.doctor.client_settings import ClientSettings, Setting, make_settings
from holdfast.doctor.connect import TABLE, judge
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Place
from holdfast.doctor.properties_files import Documents, Entry

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
STREAM: Final = "spring.cloud.stream.kafka."
BINDER_NAMES: Final[Mapping[tuple[Role, str], str]] = {
    ("producer", "requiredacks"): "acks",
    ("producer", "transactionidprefix"): "transactional.id",
    ("consumer", "startoffset"): "auto.offset.reset",
}
HANDLER: Final = re.compile(r"(?i)^spring.*\.streams\..*(deserialization.?exception.?handler|serdeerror)$")
BINDER_DEFAULTS: Final[Mapping[str, Any]] = {"acks": "1", "auto.offset.reset": "earliest"}
"""What the binder sets: it waits for the leader alone, and groups begin at the start."""
_DURATION = re.compile(r"(?i)^(\d+)(ms|s|m|h)?$")
_DATA_SIZE = re.compile(r"(?i)^(\d+)(B|KB|MB|GB)$")
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_UNITS_BYTES: Final = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def is_spring(documents: Documents) -> bool:
    return any(_is_spring(entries) for entries in documents)


def _is_spring(entries: Sequence[Entry]) -> bool:
    return any(_name(entry).startswith(("spring.kafka.", STREAM)) for entry in entries)


def examine_spring(path: str, documents: Documents, asked_as: str | None, result: FilesExamined) -> None:
    """The roles that a file says something about, or the one asked for."""
    names = [_name(entry) for entry in itertools.chain(*documents)]
    roles: tuple[Role, ...] = ("producer", "consumer")
    wanted = [role for role in roles if role == asked_as or (asked_as not in roles and _plays(role, names))]
    for role in wanted:
        *others, last = spring_clients(path, documents, role)
        for each in others:
            result.client(each, combined=False)
        result.client(last)
    if any(".kafka.streams." in name for name in names):
        result.examination.examined.append(f"{path} as Kafka Streams in Spring")
        handlers = {
            name: Setting(name, entry.value, Place(path, entry.line))
            for entry in itertools.chain(*documents)
            if HANDLER.search(name := _name(entry))
        }
        skipping = TABLE["deserialization.exception.handler"]
        result.examination.add(judge(handlers, dict.fromkeys(handlers, skipping), "{}: {}"))
    elif not wanted:
        why = "Spring's settings for Kafka, of which client does not show; --producer or --consumer says it"
        result.unsupported(path, why)


def _name(entry: Entry) -> str:
    """A binder may be given an environment of its own: what stands in it counts as if it stood outside."""
    return ".".join(entry.path).rpartition(".environment.")[2]


def _plays(role: Role, names: Sequence[str]) -> bool:
    """Whether the program has this role: by a section, a name, or a binding of Spring Cloud Stream's Kafka binder."""
    own = re.compile(rf"spring\.kafka\.{role}\.|{STREAM}bind.*\b{role}\b")
    if any(own.match(name) or _binder_name(role, name) for name in names):
        return True
    bound = re.compile(
        rf"spring\.cloud\.stream\.bindings\.([^.]*-)?{'out' if role == 'producer' else 'in'}(put)?\b"
    )
    return any(map(bound.match, names)) and any(name.startswith(f"{STREAM}bind") for name in names)


def _binder_name(role: Role, name: str) -> str | None:
    """Kafka's name of a setting that Spring Cloud Stream gives one of its own."""
    return BINDER_NAMES.get((role, re.sub("[-_]", "", name.rpartition(".")[2]).lower()))


def spring_clients(path: str, documents: Documents, role: Role) -> Iterator[ClientSettings]:
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
            defaults = dict(SPRING_DEFAULTS)
            if any(_name(entry).startswith(f"{STREAM}bind") for entry in merged):
                defaults |= BINDER_DEFAULTS
            yield make_settings(
                role, Client.JAVA, Place(path), list(last.values()), style="spring", defaults=defaults
            )


def _binder_setting(path: str, entry: Entry, name: str, role: Role) -> Iterator[Setting]:
    """One of Spring Cloud Stream: its own few names, and Kafka's below `configuration` and the like."""
    found = re.fullmatch(
        rf"(?:binder\.(?:{role}-?[pP]roperties|configuration)|[^.]+\.[^.]+\.{role}\.configuration)\.\[?(.+?)\]?",
        name.removeprefix(STREAM),
    )
    own = _binder_name(role, name)
    if found is not None or own is not None:
        kafka_name = found[1] if found is not None else own or ""
        yield Setting(
            kafka_name, entry.value, Place(path, entry.line), "" if found else name.rpartition(".")[2]
        )


def _spring_setting(path: str, entry: Entry, role: Role) -> Iterator[Setting]:
    name = _name(entry)
    if name.startswith(STREAM):
        yield from _binder_setting(path, entry, name, role)
    parts = name.split(".")
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
