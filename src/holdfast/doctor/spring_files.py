"""Spring's application files: `spring.kafka`, and the Kafka binder of Spring Cloud Stream.

Spring's container turns auto-commit off unless the file says otherwise, and writes names with hyphens; everything
below `properties` keeps Kafka's names. A document of a profile is read on top of those before it. What Spring Cloud
Stream says is read as if it stood under `spring.kafka`.
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
from holdfast.doctor.findings import Location
from holdfast.doctor.properties_files import Documents, PropertyEntry

OTHER_NAMES: Final[Mapping[str, str]] = {
    "auto-commit-interval": "auto.commit.interval.ms",
    "fetch-max-wait": "fetch.max.wait.ms",
    "fetch-min-size": "fetch.min.bytes",
    "heartbeat-interval": "heartbeat.interval.ms",
    "max-poll-interval": "max.poll.interval.ms",
    "transaction-id-prefix": "transactional.id",
}
"""Where Spring's name is not Kafka's with hyphens."""
STREAM: Final = "spring.cloud.stream.kafka."
REWRITTEN: Final = (
    (r".*\.environment\.", ""),
    (r"binder\.(?:transaction\.)?required-?acks", "producer.acks"),
    (r"binder\.transaction\.transaction-?id-?prefix", "producer.transaction-id-prefix"),
    (r"binder\.configuration\.", "properties."),
    (r"binder\.(producer|consumer)-?properties\.", r"\1.properties."),
    (r"(?:bindings\.[^.]+|binder\.transaction)\.(producer|consumer)\.configuration\.", r"\1.properties."),
    (r"bindings\.[^.]+\.consumer\.start-?offset", "consumer.auto-offset-reset"),
)
"""Names of Spring Cloud Stream, below its own prefix, and what stands for them under `spring.kafka`."""
BOUND: Final[Mapping[Role, str]] = {"producer": "out(put)?", "consumer": "in(put)?"}
"""How bindings of a role end in Spring Cloud Stream."""
HANDLER: Final = re.compile(r"(?i)^spring.*\.streams\..*(deserialization.?exception.?handler|serdeerror)$")
SPRING_DEFAULTS: Final[Mapping[str, Any]] = {"enable.auto.commit": False}
"""What the listener container sets where the file says nothing."""
BINDER_DEFAULTS: Final[Mapping[str, Any]] = {"acks": "1", "auto.offset.reset": "earliest"}
"""What the binder sets: it waits for the leader alone, and groups begin at the start."""
_DURATION = re.compile(r"(?i)^(\d+)(ms|s|m|h)?$")
_DATA_SIZE = re.compile(r"(?i)^(\d+)(B|KB|MB|GB)$")
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}
_UNITS_BYTES: Final = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def is_spring(documents: Documents) -> bool:
    return any(map(_is_spring, documents))


def _is_spring(entries: Sequence[PropertyEntry]) -> bool:
    return any(_name(entry).startswith(("spring.kafka.", STREAM)) for entry in entries)


def _name(entry: PropertyEntry) -> str:
    """The whole name, what Spring Cloud Stream says as if it stood under `spring.kafka`."""
    name = ".".join(entry.path)
    for pattern, instead in REWRITTEN:
        prefix = re.escape(STREAM) if instead else ""
        name = re.sub(f"(?i)^{prefix}{pattern}", f"spring.kafka.{instead}" if instead else "", name)
    return name


def examine_spring(path: str, documents: Documents, asked_as: str | None, result: FilesExamined) -> None:
    """The roles that a file says something about, or the one asked for."""
    names = [_name(entry) for entry in itertools.chain(*documents)]
    wanted = [asked_as] if asked_as in BOUND else [role for role in BOUND if _plays(role, names)]
    for role in BOUND:
        clients = list(spring_clients(path, documents, role)) if role in wanted else []
        for each in clients:
            result.client(each, combined=each is clients[-1])
    if any(".kafka.streams." in name for name in names):
        result.examination.examined.append(f"{path} as Kafka Streams in Spring")
        handlers = {
            name: Setting(name, entry.value, Location(path, entry.line))
            for entry in itertools.chain(*documents)
            if HANDLER.search(name := _name(entry))
        }
        skipping = TABLE["deserialization.exception.handler"]
        result.examination.add(judge(handlers, dict.fromkeys(handlers, skipping), "{}: {}"))
    elif not wanted:
        why = "Spring's settings for Kafka, of which client does not show; --producer or --consumer says it"
        result.unsupported(path, why)


def _plays(role: Role, names: Sequence[str]) -> bool:
    """Whether the program has this role: by a section, or by a binding, unless it may be one of Kafka Streams."""
    section = re.compile(rf"spring\.kafka\.{role}\.|{STREAM}bindings\..*\.{role}\.")
    bound = re.compile(rf"spring\.cloud\.stream\.bindings\.([^.]*-)?{BOUND[role]}\b")
    streams = any(".kafka.streams." in name for name in names)
    return any(section.match(name) or (not streams and bound.match(name)) for name in names)


def spring_clients(path: str, documents: Documents, role: Role) -> Iterator[ClientSettings]:
    base: list[PropertyEntry] = []
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
            if any(".".join(entry.path).startswith("spring.cloud.stream.") for entry in merged):
                defaults |= BINDER_DEFAULTS
            yield make_settings(
                role, Client.JAVA, Location(path), list(last.values()), style="spring", defaults=defaults
            )


def _spring_setting(path: str, entry: PropertyEntry, role: Role) -> Iterator[Setting]:
    parts = _name(entry).split(".")
    if parts[:2] != ["spring", "kafka"]:
        return
    parts = parts[2:]
    if parts and parts[0] == role:
        parts = parts[1:]
    elif parts and parts[0] != "properties" and parts[0] != "bootstrap-servers":
        return
    if parts and parts[0] == "properties":
        yield Setting(".".join(parts[1:]).strip("[]"), entry.value, Location(path, entry.line))
        return
    kebab = re.sub(r"(?<=[a-z])([A-Z])", r"-\1", ".".join(parts)).replace("_", "-").lower()
    if not kebab.startswith(("ssl.", "security.")):
        # A name that is none of Spring's is in Kafka's spelling: the check of names says what was meant.
        known = OTHER_NAMES.get(kebab, kebab.replace("-", "."))
        yield Setting(known, _spring_value(known, entry.value), Location(path, entry.line))


def _spring_value(name: str, value: Any) -> Any:
    """Durations and sizes with Spring's units, as the numbers Kafka takes."""
    text = str(value).strip()
    if name.endswith(".ms") and (match := _DURATION.match(text)):
        return int(match[1]) * _UNITS_MS[(match[2] or "ms").lower()]
    if name.endswith((".size", ".bytes", ".memory")) and (match := _DATA_SIZE.match(text)):
        return int(match[1]) * _UNITS_BYTES[match[2].lower()]
    return value
