"""Where committed offsets shall go: the flags of `groups reset-offsets`, and the plan they make.

A plan names an offset for every partition it touches and is made before anything is changed. The rules:

- An offset outside the log is moved to the log's nearest end, and said.
- A time after the last message means the log's end, and is said.
- A partition without a committed offset cannot be shifted; with --to-current it gets the log's end, as Kafka does.
- A committed offset whose topic is gone cannot be moved; it is said and left alone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

from confluent_kafka.admin import OffsetSpec

from holdfast.cli.client import describe_error
from holdfast.cli.exits import CannotConnect, CommandFailed, complain
from holdfast.cli.groups_admin import EARLIEST, LATEST, CommittedOffset, Group, GroupAdmin, Place
from holdfast.errors import UsageError

_DURATION = re.compile(
    r"(?P<sign>[-+]?)P"
    r"(?:(?P<days>[-+]?\d+)D)?"
    r"(?P<time>T"
    r"(?:(?P<hours>[-+]?\d+)H)?"
    r"(?:(?P<minutes>[-+]?\d+)M)?"
    r"(?:(?P<seconds>[-+]?\d+)(?:[.,](?P<fraction>\d{0,9}))?S)?"
    r")?",
    re.IGNORECASE,
)
_DATETIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?(Z|[-+]\d{2}(:?\d{2})?)?")


class Scenario(StrEnum):
    """Where to: each value is its flag."""

    EARLIEST = "--to-earliest"
    LATEST = "--to-latest"
    CURRENT = "--to-current"
    OFFSET = "--to-offset"
    DATETIME = "--to-datetime"
    DURATION = "--by-duration"
    SHIFT = "--shift-by"
    FILE = "--from-file"


@dataclass(frozen=True)
class ResetTarget:
    """A scenario and what it needs to know: an offset, a shift, a time in milliseconds, or nothing."""

    scenario: Scenario
    number: int = 0


def parse_datetime(text: str) -> int:
    """Milliseconds since 1970 of `YYYY-MM-DDThh:mm:ss.sss`; UTC unless it says otherwise, as in Kafka."""
    if _DATETIME.fullmatch(text):
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as error:
            raise UsageError(f"--to-datetime {text!r}: {error}") from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return round(moment.timestamp() * 1000)
    raise UsageError(
        f"--to-datetime {text!r} is not a time like 2026-01-31T12:00:00.000 (UTC unless followed by a zone)"
    )


def parse_duration(text: str) -> int:
    """Milliseconds of an ISO-8601 duration in days, hours, minutes and seconds."""
    match = _DURATION.fullmatch(text)
    amounts = match.groupdict() if match else {}
    units = ("days", "hours", "minutes", "seconds")
    empty = all(amounts.get(unit) is None for unit in units) or (amounts.get("time") or "").upper() == "T"
    if match is None or empty:
        raise UsageError(f"--by-duration {text!r} is not a duration like P7D, PT12H or P1DT2H30M10S")
    days, hours, minutes, seconds = (int(amounts[unit] or 0) for unit in units)
    milliseconds = int((amounts["fraction"] or "").ljust(3, "0")[:3])
    if (amounts["seconds"] or "").startswith("-"):
        milliseconds = -milliseconds
    total = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000 + milliseconds
    return -total if amounts["sign"] == "-" else total


def parse_topics(texts: Iterable[str]) -> dict[str, list[int] | None]:
    """`topic` or `topic:0,1`, repeated; None means all partitions."""
    topics: dict[str, list[int] | None] = {}
    for text in texts:
        topic, colon, numbers = text.partition(":")
        partitions = None
        if colon:
            try:
                partitions = [int(number) for number in numbers.split(",")]
            except ValueError:
                partitions = [-1]
        if not topic or (partitions is not None and min(partitions) < 0):
            raise UsageError(f"--topic {text!r} is not a topic, or a topic and partitions like orders:0,1")
        known = topics.get(topic, [])
        topics[topic] = None if partitions is None or known is None else sorted({*known, *partitions})
    return topics


def places_of(admin: GroupAdmin, topics: Mapping[str, list[int] | None]) -> list[Place]:
    """The partitions named, all of which exist."""
    found = admin.partitions()
    places = [
        (topic, partition)
        for topic, partitions in topics.items()
        for partition in (partitions if partitions is not None else found.get(topic, [0]))
    ]
    admin.check_exist(places)
    return places


def read_plans(path: str, groups: Sequence[str]) -> dict[str, dict[Place, int]]:
    """The offsets in a CSV file: `topic,partition,offset` for one group, or `group,topic,partition,offset`."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file), start=1) if any(row)]
    except OSError as error:
        raise UsageError(f"cannot read the plan {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"the plan {path} is no CSV file: {error}") from error
    plans: dict[str, dict[Place, int]] = {}
    for number, row in rows:
        where = f"line {number} of {path}"
        if len(row) == 3 and len(groups) == 1:
            row = [groups[0], *row]
        if len(row) != 4:
            shape = "topic,partition,offset" if len(groups) == 1 else "group,topic,partition,offset"
            raise UsageError(f"{where} is not {shape}")
        group, topic, partition, offset = (cell.strip() for cell in row)
        if not (partition.isdecimal() and offset.isdecimal() and group and topic):
            raise UsageError(f"{where}: partition and offset are whole numbers from 0, names are not empty")
        place = (topic, int(partition))
        if place in plans.setdefault(group, {}):
            raise UsageError(f"{where} names {topic}-{partition} of group '{group}' a second time")
        plans[group][place] = int(offset)
    if not plans:
        raise UsageError(f"the plan {path} is empty")
    return plans


def places_to_delete(admin: GroupAdmin, group: str, topics: Mapping[str, list[int] | None]) -> list[Place]:
    """The partitions named; those of a whole topic are the ones it has, or has committed offsets for."""
    found = admin.partitions()
    offsets = admin.offsets(group)
    places: set[Place] = set()
    for topic, partitions in topics.items():
        left = [partition for name, partition in offsets if name == topic]
        if topic not in found and not left:
            raise CommandFailed(
                f"topic '{topic}' does not exist, and group '{group}' has no committed offset for it; "
                f"'holdfast groups describe --group {group}' shows those it has"
            )
        places.update((topic, each) for each in (partitions or [*found.get(topic, []), *left]))
    return sorted(places)


class Move(NamedTuple):
    """One committed offset: where it was, where it goes or went."""

    topic: str
    partition: int
    old_offset: int | None
    new_offset: int
    error: str | None = None


@dataclass(frozen=True)
class Reset:
    """What shall become, or has become, of one group's offsets."""

    group: str
    moves: tuple[Move, ...] = ()
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "offsets": [move._asdict() for move in self.moves],
            "error": self.error,
        }


@dataclass(frozen=True)
class Planner:
    """Makes the plan of one group after the other, and carries it out."""

    admin: GroupAdmin
    target: ResetTarget
    places: Collection[Place] | None
    """The partitions to touch; None means those the group has a committed offset for."""
    plans: Mapping[str, Mapping[Place, int]] | None
    """The offsets of a file, which take the place of target and places."""

    def reset(self, name: str, found: Group | None, *, execute: bool) -> Reset:
        """A group that is refused is said and does not stop the others; a lost connection stops all."""
        try:
            if found is not None and found.has_members:
                raise CommandFailed(
                    f"group '{name}' has active members ({found.state}, {len(found.members)} of them); "
                    "its committed offsets can be reset when all have stopped"
                )
            offsets = self.admin.offsets(name)
            plan = self._plan(name, offsets)
            if found is None and not execute:
                complain(
                    f"group '{name}' does not exist yet; --execute creates it with these committed offsets"
                )
            errors = self.admin.set_offsets(name, plan) if execute and plan else {}
        except CannotConnect:
            raise
        except CommandFailed as error:
            complain(str(error))
            return Reset(name, error=str(error))
        moves = []
        for place, offset in plan.items():
            refused = errors.get(place)
            if refused is not None:
                complain(f"group '{name}', {_name(place)}: {describe_error(refused, place[0])}")
            old = offsets[place].offset if place in offsets else None
            moves.append(Move(*place, old, offset, None if refused is None else refused.name()))
        failed = any(move.error for move in moves)
        return Reset(name, tuple(moves), "some committed offsets could not be reset" if failed else None)

    def _plan(self, name: str, offsets: Mapping[Place, CommittedOffset]) -> dict[Place, int]:
        if self.plans is not None:
            if name not in self.plans:
                raise CommandFailed(f"the file has no line for group '{name}'")
            self.admin.check_exist(self.plans[name])
            return self._within_log(name, self.plans[name])
        if self.places is None and not offsets:
            raise CommandFailed(
                f"group '{name}' has no committed offsets; name its topics with --topic to give it some"
            )
        return self._towards_target(name, offsets.keys() if self.places is None else self.places, offsets)

    def _towards_target(
        self, group: str, places: Collection[Place], offsets: Mapping[Place, CommittedOffset]
    ) -> dict[Place, int]:
        target = self.target
        match target.scenario:
            case Scenario.EARLIEST:
                return self._present(group, self.admin.log_offsets(places, EARLIEST))
            case Scenario.LATEST:
                return self._present(group, self.admin.log_offsets(places, LATEST))
            case Scenario.DATETIME | Scenario.DURATION:
                return self._at_time(group, places, target.number)
            case Scenario.CURRENT:
                return self._current(group, places, offsets)
            case Scenario.OFFSET:
                return self._within_log(group, dict.fromkeys(places, target.number))
            case Scenario.SHIFT:
                return self._within_log(group, self._shifted(group, places, offsets, target.number))
            case Scenario.FILE:
                raise AssertionError("a plan from a file is read, not made")

    def _within_log(self, group: str, wanted: Mapping[Place, int]) -> dict[Place, int]:
        """The offsets wanted, moved to where the log begins or ends when they lie outside."""
        starts = self._present(group, self.admin.log_offsets(wanted.keys(), EARLIEST))
        ends = self._present(group, self.admin.log_offsets(starts.keys(), LATEST))
        offsets: dict[Place, int] = {}
        for place, end in ends.items():
            offset = offsets[place] = min(max(wanted[place], starts[place]), end)
            if offset != wanted[place]:
                side = "after its end" if offset < wanted[place] else "before its start"
                topic, partition = place
                complain(
                    f"group '{group}': offset {wanted[place]} of {topic}-{partition} lies {side}; "
                    f"{offset} is taken instead"
                )
        return offsets

    def _at_time(self, group: str, places: Collection[Place], timestamp_ms: int) -> dict[Place, int]:
        offsets = self._present(
            group, self.admin.log_offsets(places, OffsetSpec.for_timestamp(max(timestamp_ms, 0)))
        )
        late = [place for place, offset in offsets.items() if offset < 0]
        for place, end in self._present(group, self.admin.log_offsets(late, LATEST)).items():
            complain(f"group '{group}': {_name(place)} has no message that late; its end {end} is taken")
            offsets[place] = end
        return offsets

    def _current(
        self, group: str, places: Collection[Place], offsets: Mapping[Place, CommittedOffset]
    ) -> dict[Place, int]:
        missing = [place for place in places if place not in offsets]
        ends = self._present(group, self.admin.log_offsets(missing, LATEST))
        for place, end in ends.items():
            complain(f"group '{group}' has no committed offset for {_name(place)}; its end {end} is taken")
        kept = {place: offsets[place].offset for place in places if place in offsets}
        return self._present(group, {**kept, **ends})

    @staticmethod
    def _shifted(
        group: str, places: Collection[Place], offsets: Mapping[Place, CommittedOffset], shift: int
    ) -> dict[Place, int]:
        missing = [_name(place) for place in places if place not in offsets]
        if missing:
            raise CommandFailed(
                f"group '{group}' has no committed offset to shift for {', '.join(missing)}; "
                "leave these out, or use --to-earliest, --to-latest or --to-offset"
            )
        return {place: offsets[place].offset + shift for place in places}

    @staticmethod
    def _present(group: str, offsets: Mapping[Place, int | None]) -> dict[Place, int]:
        for place, offset in offsets.items():
            if offset is None:
                complain(
                    f"group '{group}': {_name(place)} does not exist (any more); its committed offset stays. "
                    f"'holdfast groups delete-offsets --group {group} --topic {place[0]}' removes it"
                )
        return {place: offset for place, offset in sorted(offsets.items()) if offset is not None}


def _name(place: Place) -> str:
    topic, partition = place
    return f"{topic}-{partition}"
