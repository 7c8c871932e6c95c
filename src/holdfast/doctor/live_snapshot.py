"""One look at a cluster: what the brokers said, before anybody judges it.

The rules these types keep:

- A snapshot holds answers only. What could not be asked or was refused is absent from it and named in `gaps`; a rule
  that misses something says nothing about it.
- `looks` are earlier snapshots cut down to what changes with time: committed offsets, where the logs begin and end, and
  the ids of the topics. They are what `--history` keeps, one JSON document a line.

A history is a file of earlier looks: one JSON document a line, the oldest first; each look at the cluster adds its own.
A line that is none is a gap with its number, and the others count. Only the last lines are used: what was long ago
says nothing about the rate of today.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from holdfast.doctor.combinations import TopicFacts
from holdfast.doctor.findings import DoctorError, Gap
from holdfast.doctor.findings import Location as Spot

Place = tuple[str, int]
"""A topic and one of its partitions."""

DYNAMIC_TOPIC: Final = 1
"""Where a setting comes from that was set on the topic itself."""


class Setting(NamedTuple):
    value: str
    source: int = 5

    @property
    def is_own(self) -> bool:
        """Whether it was set on the topic itself, not taken from the brokers."""
        return self.source == DYNAMIC_TOPIC


class Settings(dict[str, Setting]):
    """Settings of one topic or broker, by Kafka's names."""

    def text(self, name: str) -> str | None:
        found = self.get(name)
        return None if found is None else found.value

    def number(self, name: str) -> int | None:
        value = self.text(name) or ""
        return int(value) if value.lstrip("-").isdecimal() else None

    def flag(self, name: str) -> bool | None:
        return {"true": True, "false": False}.get((self.text(name) or "").lower())


@dataclass(frozen=True)
class BrokerFacts:
    broker_id: int
    address: str
    rack: str | None = None
    settings: Settings | None = None
    """None when they could not be read."""


@dataclass(frozen=True)
class PartitionFacts:
    leader: int
    """-1 when nobody leads."""
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    leader_epoch: int = -1
    may_lead: tuple[int, ...] = ()
    """Of a partition that nobody leads, the replicas that have everything acknowledged, as far as the cluster says."""


@dataclass(frozen=True)
class LiveTopic:
    name: str
    topic_id: str = ""
    is_internal: bool = False
    partitions: Mapping[int, PartitionFacts] = field(default_factory=dict)
    settings: Settings | None = None

    @property
    def spot(self) -> Spot:
        return Spot(resource=f"topic {plain(self.name)}")

    @property
    def replication_factor(self) -> int:
        """The smallest of its partitions."""
        return min((len(each.replicas) for each in self.partitions.values()), default=0)

    @property
    def deletes(self) -> bool:
        """Whether time or size removes messages."""
        return self.settings is not None and "delete" in (self.settings.text("cleanup.policy") or "")

    @property
    def retention_ms(self) -> int | None:
        """None when it is unknown, or when time removes nothing."""
        if not self.deletes or self.settings is None:
            return None
        retention = self.settings.number("retention.ms")
        return None if retention is None or retention < 0 else retention

    @property
    def keeps_by_size(self) -> bool:
        """Whether the oldest messages go when there are too many."""
        return (
            self.deletes
            and self.settings is not None
            and (self.settings.number("retention.bytes") or -1) >= 0
        )


class Bounds(NamedTuple):
    """Where a partition's log begins, where it ends, and up to where every transaction is decided."""

    start: int
    end: int
    stable: int


@dataclass(frozen=True)
class GroupFacts:
    name: str
    state: str = ""
    type: str = ""
    coordinator: int = -1
    committed_offsets: Mapping[Place, int] = field(default_factory=dict)

    @property
    def has_members(self) -> bool:
        return self.state not in ("", "Empty", "Dead")


@dataclass(frozen=True)
class TransactionFacts:
    """An open transaction as its coordinator knows it."""

    transactional_id: str
    producer_id: int
    state: str
    timeout_ms: int
    start_ms: int | None
    places: tuple[Place, ...]


@dataclass(frozen=True)
class OpenProducer:
    """A producer that a partition remembers with an open transaction."""

    place: Place
    producer_id: int
    start_offset: int
    last_timestamp_ms: int


@dataclass(frozen=True)
class Look:
    """What changes with time, at one time."""

    time_ms: int
    committed_offsets: Mapping[str, Mapping[Place, int]] = field(default_factory=dict)
    """By group."""
    bounds: Mapping[Place, tuple[int, int]] = field(default_factory=dict)
    """Where each log begins and ends."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "time_ms": self.time_ms,
            "groups": {group: _nested(places) for group, places in self.committed_offsets.items()},
            "logs": _nested({place: list(bounds) for place, bounds in self.bounds.items()}),
            "topic_ids": dict(self.topic_ids),
        }

    @classmethod
    def from_json(cls, document: Any) -> Look:
        """The look a line of a history holds; ValueError when it holds none."""
        try:
            return cls(
                int(document["time_ms"]),
                {
                    str(group): {place: int(offset) for place, offset in _flat(places)}
                    for group, places in document["groups"].items()
                },
                {place: (int(start), int(end)) for place, (start, end) in _flat(document["logs"])},
                {str(name): str(value) for name, value in document.get("topic_ids", {}).items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"it is no look at a cluster ({type(error).__name__}: {error})") from error


def _nested(places: Mapping[Place, Any]) -> dict[str, dict[str, Any]]:
    topics: dict[str, dict[str, Any]] = {}
    for (topic, partition), value in places.items():
        topics.setdefault(topic, {})[str(partition)] = value
    return topics


def _flat(topics: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Place, Any]]:
    for topic, partitions in topics.items():
        for partition, value in partitions.items():
            yield (str(topic), int(partition)), value


@dataclass
class Snapshot:
    """Everything one look found out."""

    time_ms: int
    brokers: dict[int, BrokerFacts] = field(default_factory=dict)
    topics: dict[str, LiveTopic] = field(default_factory=dict)
    bounds: dict[Place, Bounds] = field(default_factory=dict)
    groups: dict[str, GroupFacts] = field(default_factory=dict)
    written_ms: dict[tuple[Place, int], int] = field(default_factory=dict)
    """When the message at an offset was written, at the earliest. Known only for committed offsets in the older half of
    what retention keeps: the others have more than half of it left."""
    transactions: list[TransactionFacts] | None = None
    """The open ones; None when no coordinator could be asked."""
    open_producers: list[OpenProducer] = field(default_factory=list)
    """In partitions whose decided part ends before the log does."""
    gaps: list[Gap] = field(default_factory=list)

    def topic_of(self, place: Place) -> LiveTopic | None:
        return self.topics.get(place[0])

    def look(self) -> Look:
        return Look(
            self.time_ms,
            {
                name: dict(group.committed_offsets)
                for name, group in self.groups.items()
                if group.committed_offsets
            },
            {place: (bounds.start, bounds.end) for place, bounds in self.bounds.items()},
            {topic.name: topic.topic_id for topic in self.topics.values() if topic.topic_id},
        )

    def topic_facts(self) -> list[TopicFacts]:
        """The topics for rules about clients and topics; the cluster's own are left out."""
        return [
            TopicFacts(
                topic.name,
                topic.spot,
                topic.replication_factor or None,
                {name: setting.value for name, setting in (topic.settings or {}).items()},
            )
            for topic in self.topics.values()
            if not topic.is_internal
        ]


def named(place: Place) -> str:
    return f"{plain(place[0])}-{place[1]}"


def plain(name: str) -> str:
    """A name as it may be printed: groups and transactional ids are any text, line breaks included."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def quoted(name: str) -> str:
    """A name as a shell takes it."""
    return shlex.quote(plain(name))


LOOKS_MAX: Final = 100
"""Bounds the memory: a look at ten thousand partitions and a thousand groups is about a megabyte."""


def read_looks(path: str) -> tuple[list[Look], list[Gap]]:
    """The looks of a history, the oldest first, and its lines that hold none. No file yet is no look."""
    lines: deque[tuple[int, str]] = deque(maxlen=LOOKS_MAX)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines.extend((number, line) for number, line in enumerate(file, 1) if line.strip())
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise DoctorError(f"cannot read the history {path}: {error.strerror}") from error
    looks, gaps = [], []
    for number, line in lines:
        try:
            looks.append(Look.from_json(json.loads(line)))
        except ValueError as error:
            what = f"line {number} of the history {path}"
            gaps.append(Gap(what, f"{error}; it is left out", "unreadable"))
    return sorted(looks, key=lambda look: look.time_ms), gaps


def append_looks(path: str, looks: Iterable[Look]) -> None:
    """Add looks at the end, each as a whole line even where the last writer was cut off."""
    text = "".join(json.dumps(look.as_json(), separators=(",", ":")) + "\n" for look in looks)
    try:
        with open(path, "ab+") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = "\n" + text
            file.write(text.encode())
    except OSError as error:
        raise DoctorError(f"cannot write the history {path}: {error.strerror}") from error
