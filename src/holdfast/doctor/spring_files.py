"""Spring's application files: `spring.kafka`, and the Kafka binder of Spring Cloud Stream.

Spring's container turns auto-commit off unless the file says otherwise, and writes names with hyphens; everything
below `properties` keeps Kafka's names. A document of a profile is read on top of those before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.doctor.client_defaults import Client, Role, canonical
from holdfast.doctor.client_settings import ClientSettings, Setting, make_settings
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
BINDER: Final = "spring.cloud.stream.kafka.binder."
BINDER_DEFAULTS: Final[Mapping[str, Any]] = {"acks": "1", "auto.offset.reset": "earliest"}
"""What the binder sets: it waits for the leader alone, and groups begin at the start."""
_DURATION = re.compile(r"(?i)^(\d+)(ms|s|m|h)?$")
_DATA_SIZE = re.compile(r"(?i)^(\d+)(B|KB|MB|GB)$")
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_UNITS_BYTES: Final = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def is_spring(documents: Documents) -> bool:
    return any(_is_spring(entries) for entries in documents)


def _is_spring(entries: Sequence[Entry]) -> bool:
    return any(".".join(entry.path).startswith(("spring.kafka.", BINDER)) for entry in entries)


def spring_roles(documents: Documents) -> Iterator[Role]:
    """The roles that a file says something about."""
    names = [".".join(entry.path) for entries in documents for entry in entries]
    roles: tuple[Role, ...] = ("producer", "consumer")
    for role in roles:
        binder = role == "producer" and any(name.startswith(BINDER) for name in names)
        if binder or any(name.startswith((f"spring.kafka.{role}.", f"{BINDER}{role}")) for name in names):
            yield role


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
            if any(".".join(entry.path).startswith(BINDER) for entry in merged):
                defaults |= BINDER_DEFAULTS
            yield make_settings(
                role, Client.JAVA, Place(path), list(last.values()), style="spring", defaults=defaults
            )


def _binder_setting(path: str, entry: Entry, name: str, role: Role) -> Iterator[Setting]:
    """One of Spring Cloud Stream's binder: its own few names, and Kafka's below `configuration` and the like."""
    place = Place(path, entry.line)
    rest = name.removeprefix(BINDER)
    if re.sub("[-_]", "", rest).lower() == "requiredacks" and role == "producer":
        yield Setting("acks", entry.value, place, rest)
    for section in ("configuration.", f"{role}-properties.", f"{role}Properties."):
        if rest.startswith(section):
            yield Setting(rest.removeprefix(section).strip("[]"), entry.value, place)


def _spring_setting(path: str, entry: Entry, role: Role) -> Iterator[Setting]:
    name = ".".join(entry.path)
    if name.startswith(BINDER):
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
