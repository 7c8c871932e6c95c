"""A broker's server.properties, or the settings of a topic in a file: what they lose by themselves.

What such a file says is also what the clients beside it are held against (`combinations.against_topics`). What a
file does not say is Kafka's default; a replication factor that is not said is not guessed for a topic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.doctor.client_settings import UNKNOWN, shown
from holdfast.doctor.combinations import TopicFacts
from holdfast.doctor.findings import Finding, Fix, Place, Severity, finding
from holdfast.doctor.properties_files import Entry, read_entries

DEFAULTS: Final[Mapping[str, str]] = {
    "auto.create.topics.enable": "true",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "message.max.bytes": "1048588",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "unclean.leader.election.enable": "false",
}
"""Kafka 4.3's, of a broker."""


@dataclass(frozen=True)
class BrokerFile:
    path: str
    entries: Mapping[str, Entry]
    is_topic: bool
    """Settings of one topic; else of a broker."""
    name: str

    def value(self, name: str) -> str | None:
        if name in self.entries:
            value: Any = self.entries[name].value
            text = shown(value).strip()
            return None if value is UNKNOWN or "${" in text else text.lower()
        return None if self.is_topic else DEFAULTS.get(name)

    def number(self, name: str) -> int | None:
        value = self.value(name)
        return int(value) if value is not None and re.fullmatch(r"-?\d+", value) else None

    def place(self, *names: str) -> Place:
        line = next((self.entries[name].line for name in names if name in self.entries), 0)
        return Place(self.path, line)

    def said(self, name: str) -> str:
        default = "" if name in self.entries else " (the default)"
        return f"{name}={self.value(name)}{default}"

    @property
    def is_embedded(self) -> bool:
        """Our broker: one node that flushes before it acknowledges."""
        return any(name.startswith("holdfast.") for name in self.entries)

    def set_to(self, name: str, value: str) -> Fix:
        if self.is_topic:
            command = f"holdfast configs alter --topic {self.name} --add-config {name}={value}"
            return Fix(command, "command")
        return Fix(f"{name}={value}", "settings")


def read_broker(path: str) -> BrokerFile:
    entries = {".".join(entry.path): entry for entry in read_entries(path)}
    is_topic = bool({"topic", "replication.factor", "max.message.bytes"} & entries.keys())
    named = entries.get("topic") or entries.get("name")
    return BrokerFile(path, entries, is_topic, str(named.value) if is_topic and named else "the topic")


def facts(file: BrokerFile) -> TopicFacts:
    """What a topic has by this file: of its own, or by the broker's defaults."""
    factor = file.number("replication.factor" if file.is_topic else "default.replication.factor")
    settings = {
        name: value
        for name in ("min.insync.replicas", "cleanup.policy", "unclean.leader.election.enable")
        if (value := file.value(name)) is not None
    }
    limit = file.value("max.message.bytes" if file.is_topic else "message.max.bytes")
    if limit is not None:
        settings["max.message.bytes"] = limit
    name = file.name if file.is_topic else f"topics of {file.path}"
    return TopicFacts(name, file.place("min.insync.replicas"), factor, settings)


def check_broker(file: BrokerFile) -> Iterator[Finding]:
    if not file.is_embedded:
        yield from _replication(file)
    yield from _elections(file)
    if not file.is_topic:
        yield from _cluster(file)


def _replication(file: BrokerFile) -> Iterator[Finding]:
    name = "replication.factor" if file.is_topic else "default.replication.factor"
    factor, minimum = file.number(name), file.number("min.insync.replicas")
    if factor is not None and 0 < factor < 3:
        yield finding(
            "HF201",
            file.place(name),
            file.said(name),
            fix=Fix("3 replicas; holdfast topics create --replication-factor 3, or a reassignment", "advice"),
        )
    if minimum is None or factor is None or factor < 2:
        return
    if minimum == 1:
        yield finding(
            "HF202",
            file.place("min.insync.replicas"),
            f"{file.said('min.insync.replicas')} with {file.said(name)}",
            fix=file.set_to("min.insync.replicas", "2"),
            related=("HF209",),
        )
    elif minimum >= factor:
        yield finding(
            "HF203",
            file.place("min.insync.replicas"),
            f"{file.said('min.insync.replicas')} with {file.said(name)}: one broker down stops every write",
            severity=Severity.ERROR if minimum > factor else Severity.WARNING,
            fix=file.set_to("min.insync.replicas", str(max(1, factor - 1))),
        )


def _elections(file: BrokerFile) -> Iterator[Finding]:
    if file.value("unclean.leader.election.enable") == "true":
        yield finding(
            "HF204",
            file.place("unclean.leader.election.enable"),
            file.said("unclean.leader.election.enable"),
            fix=file.set_to("unclean.leader.election.enable", "false"),
        )
    if file.value("holdfast.flush") == "os":
        yield finding(
            "HF205",
            file.place("holdfast.flush"),
            "holdfast.flush=os: acknowledged before it is on disk, on a single node",
            severity=Severity.WARNING,
            fix=file.set_to("holdfast.flush", "group"),
        )


def _cluster(file: BrokerFile) -> Iterator[Finding]:
    created = file.value("auto.create.topics.enable")
    if created == "true" and ("auto.create.topics.enable" in file.entries or not file.is_embedded):
        yield finding(
            "HF207",
            file.place("auto.create.topics.enable"),
            file.said("auto.create.topics.enable"),
            fix=file.set_to("auto.create.topics.enable", "false"),
        )
    for name in ("offsets.topic.replication.factor", "transaction.state.log.replication.factor"):
        factor = file.number(name)
        if factor is not None and factor < 3 and not file.is_embedded:
            yield finding("HF211", file.place(name), file.said(name), fix=file.set_to(name, "3"))
    fetched, accepted = file.number("replica.fetch.max.bytes"), file.number("message.max.bytes")
    if fetched is not None and accepted is not None and fetched < accepted:
        yield finding(
            "HF208",
            file.place("replica.fetch.max.bytes"),
            f"{file.said('replica.fetch.max.bytes')} is less than {file.said('message.max.bytes')}: "
            "followers fetch a large message alone, and fall behind",
            severity=Severity.NOTE,
            fix=file.set_to("replica.fetch.max.bytes", str(accepted)),
        )
