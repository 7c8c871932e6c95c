"""A broker's server.properties, or the settings of a topic in a file: what they lose by themselves.

What such a file says is also what the clients beside it are held against (`combinations.against_topics`). What a
file does not say is Kafka's default; a replication factor that is not said is not guessed for a topic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.doctor.client_settings import Setting, WrittenSettings, shown, spelled
from holdfast.doctor.combinations import TopicFacts
from holdfast.doctor.findings import Finding, Fix, Location, Severity, finding
from holdfast.doctor.properties_files import Documents
from holdfast.doctor.spark_options import is_temporary

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
JUDGED: Final = frozenset(
    {*DEFAULTS, "replication.factor", "max.message.bytes", "cleanup.policy", "log.dirs", "log.dir"}
)
"""Settings that a rule looks at: one whose value is not known has not been examined."""
TOPIC_NAMES: Final = frozenset({"topic", "replication.factor", "max.message.bytes"})
BROKER_NAMES: Final = frozenset(
    {*DEFAULTS, "broker.id", "node.id", "process.roles", "log.dirs", "log.dir", "num.partitions"}
    | {"zookeeper.connect", "listeners", "advertised.listeners", "holdfast.flush", "cleanup.policy"}
    | {"controller.quorum.voters", "log.retention.hours", "log.retention.ms", "replica.fetch.max.bytes"}
)


@dataclass(frozen=True)
class BrokerSettings(WrittenSettings):
    place: Location
    settings: Mapping[str, Setting]
    is_topic: bool = False
    """Settings of one topic; else of a broker."""
    name: str = "the topic"
    spelling: str = "{}={}"
    defaults: Mapping[str, str] = field(default_factory=lambda: DEFAULTS)
    kept: tuple[str, ...] | None = None
    """In a container: the directories that outlive it."""

    def value(self, name: str) -> str | None:
        if name in self.settings:
            setting = self.settings[name]
            return shown(setting.value).strip().lower() if setting.is_known else None
        return None if self.is_topic else self.defaults.get(name)

    def number(self, name: str) -> int | None:
        value = self.value(name)
        return int(value) if value is not None and re.fullmatch(r"-?\d+", value) else None

    def said(self, name: str) -> str:
        written = self.settings.get(name)
        return str(written) if written is not None else f"{name}={self.value(name)} (the default)"

    @property
    def is_embedded(self) -> bool:
        """Our broker: one node that flushes before it acknowledges."""
        return any(name.startswith("holdfast.") for name in self.settings)

    @property
    def only_controls(self) -> bool:
        return self.value("process.roles") == "controller"

    def set_to(self, name: str, value: str) -> Fix:
        text = spelled(self.spelling, name, value)
        return Fix(text, "command" if text.startswith("holdfast ") else "settings")


def plain_broker(path: str, documents: Documents) -> BrokerSettings:
    settings = {
        (name := ".".join(entry.path)): Setting(name, entry.value, Location(path, entry.line))
        for document in documents
        for entry in document
    }
    if not TOPIC_NAMES & settings.keys():
        return BrokerSettings(Location(path), settings)
    named = settings.get("topic") or settings.get("name")
    name = str(named.value) if named else "the topic"
    command = f"holdfast configs alter --topic {name} --add-config {{}}={{}}"
    return BrokerSettings(Location(path), settings, is_topic=True, name=name, spelling=command)


def facts(file: BrokerSettings) -> TopicFacts:
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
    name = file.name if file.is_topic else f"topics of {file.place}"
    return TopicFacts(name, file.place_of("min.insync.replicas"), factor, settings)


def check_broker(file: BrokerSettings) -> Iterator[Finding]:
    if not file.is_embedded and not file.only_controls:
        yield from _replication(file)
    yield from _elections(file)
    if not file.is_topic:
        yield from _disk(file)
    if not file.is_topic and not file.only_controls:
        yield from _cluster(file)


def _replication(file: BrokerSettings) -> Iterator[Finding]:
    name = "replication.factor" if file.is_topic else "default.replication.factor"
    factor, minimum = file.number(name), file.number("min.insync.replicas")
    if factor is not None and 0 < factor < 3:
        more = Fix("3 replicas; holdfast topics create --replication-factor 3, or a reassignment", "advice")
        yield file.finding("HF201", name, "", fix=more)
    if minimum is None or factor is None or factor < 2:
        return
    if minimum == 1:
        yield file.finding(
            "HF202", "min.insync.replicas", f" with {file.said(name)}", "2", related=("HF209",)
        )
    elif minimum >= factor:
        yield file.finding(
            "HF203",
            "min.insync.replicas",
            f" with {file.said(name)}: one broker down stops every write",
            str(max(1, factor - 1)),
            severity=Severity.ERROR if minimum > factor else Severity.WARNING,
        )


def _elections(file: BrokerSettings) -> Iterator[Finding]:
    if file.value("unclean.leader.election.enable") == "true":
        yield file.finding("HF204", "unclean.leader.election.enable", "", "false")
    if file.value("holdfast.flush") == "os":
        why = ": acknowledged before it is on disk, on a single node"
        yield file.finding("HF205", "holdfast.flush", why, "group", severity=Severity.WARNING)


def _disk(file: BrokerSettings) -> Iterator[Finding]:
    """HF212: what the system empties, or what goes with its container."""
    name = "log.dir" if "log.dir" in file.settings and "log.dirs" not in file.settings else "log.dirs"
    written = file.value(name)
    directories = [each.strip() for each in (written or "").split(",")]
    if file.kept is None:
        is_lost = any(map(is_temporary, directories))
        why, severity = "a restart of the machine may empty it", Severity.ERROR
    else:
        roots = tuple(f"{root.rstrip('/')}/" for root in file.kept)
        is_lost = not roots if written is None else not all(f"{d}/".startswith(roots) for d in directories)
        why, severity = "on no volume: what the broker stores goes with its container", Severity.WARNING
    if is_lost and (written is not None or name not in file.settings):
        said = f"{file.said(name)}: {why}" if written is not None else why
        fix = (
            file.set_to(name, "/var/lib/kafka")
            if file.kept is None
            else Fix("a volume at its data directory")
        )
        yield finding("HF212", file.place_of(name), said, severity=severity, fix=fix)


def _cluster(file: BrokerSettings) -> Iterator[Finding]:
    created = file.value("auto.create.topics.enable")
    if created == "true" and ("auto.create.topics.enable" in file.settings or not file.is_embedded):
        yield file.finding("HF207", "auto.create.topics.enable", "", "false")
    for name in ("offsets.topic.replication.factor", "transaction.state.log.replication.factor"):
        factor = file.number(name)
        if factor is not None and factor < 3 and not file.is_embedded:
            yield file.finding("HF211", name, "", "3")
    fetched, accepted = file.number("replica.fetch.max.bytes"), file.number("message.max.bytes")
    if fetched is not None and accepted is not None and fetched < accepted:
        yield file.finding(
            "HF208",
            "replica.fetch.max.bytes",
            f" is less than {file.said('message.max.bytes')}: followers fetch a large message alone, and fall behind",
            str(accepted),
            severity=Severity.NOTE,
        )
