"""The life of one record as plain values: what was found of it, where, and what that means.

The life of a record in order, line by line, for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from holdfast.audit import words
from holdfast.audit.model import FAULTS, Document
from holdfast.audit.sinks.letters import DeadLetterRow
from holdfast.audit.stored import Stored, codec_name, shown_bytes
from holdfast.pipeline.aside import LATE_FOR
from holdfast.pipeline.definition.streams import DUPLICATES, LATE
from holdfast.pipeline.ledger import Entry

ENDS: Final[Mapping[str, str]] = {
    "expired": "it is gone: retention or a deletion moved the start of the log past it",
    "compacted": "it is gone: the topic is compacted, and a later record of its key took its place, or it never was",
    "aborted": "its transaction was aborted: readers of committed records never see it",
    "control": "it is no record but the marker that ended a transaction",
    "open": "its transaction has not ended: nobody may take it yet",
    "not_yet": "the log has not grown to it yet",
}


@dataclass(frozen=True)
class Standing:
    """The row that a table has for a record's key."""

    key: str
    topic: str = ""
    """Nothing: it has none."""
    partition: int = -1
    offset: int = -1

    @property
    def name(self) -> str:
        return f"{self.topic}:{self.partition}@{self.offset}"

    def is_older_than(self, topic: str, partition: int, offset: int) -> bool:
        """Whether it comes for certain before that record: order holds within a partition."""
        return (self.topic, self.partition) == (topic, partition) and self.offset < offset


@dataclass(frozen=True)
class SinkLife:
    """One sink and the record."""

    name: str
    kind: str
    takes: str = ""
    standing: str = "taken"
    """`taken`: its ledger covers the offset; `before`: it began behind it; `other`: it was fed from
    another topic of the name; `pending`, `empty`, `unreadable`."""
    entry: Entry | None = None
    held: tuple[str, ...] = ()
    """Where the rows made of it are."""
    problem: str = ""
    instead: Standing | None = None
    """A table of one row for each key: what stands for the record's key, where that can be told."""
    keeps_last: bool = False
    """It is such a table."""

    def as_json(self) -> dict[str, Any]:
        entry = self.entry
        return {
            "name": self.name,
            "kind": self.kind,
            "takes": self.takes,
            "standing": self.standing,
            "entry": None
            if entry is None
            else {
                "number": entry.number,
                "batch_time_ms": entry.batch_time_ms,
                "range": entry.range.as_json(),
                "fingerprint": entry.fingerprint,
            },
            "held": list(self.held),
            "instead": self.instead.name if self.instead is not None and self.instead.topic else None,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Departure(Document):
    """A row of the record that left the steps."""

    route: str
    step: str
    index: int
    batch: str


@dataclass(frozen=True)
class Life:
    stored: Stored
    pipeline: str = ""
    sinks: tuple[SinkLife, ...] = ()
    departures: tuple[Departure, ...] = ()
    dead_letters: tuple[DeadLetterRow, ...] = ()
    fate: str = ""
    """One of the audit's fates, or what the offset is instead of a record; `unknown` where nobody can tell."""
    conclusion: str = ""

    @property
    def is_fault(self) -> bool:
        return self.fate in FAULTS

    def as_json(self) -> dict[str, Any]:
        return {
            "record": self.stored.as_json(),
            "pipeline": self.pipeline or None,
            "sinks": [each.as_json() for each in self.sinks],
            "left": [each.as_json() for each in self.departures],
            "dead_letters": [
                {"index": each.index, "reason": each.reason, "error": each.error, "where": each.where}
                for each in self.dead_letters
            ],
            "fate": self.fate,
            "conclusion": self.conclusion,
        }


# ---------------------------------------------------------------------------- trace text


def events(life: Life) -> Iterator[tuple[str, str, str]]:
    """The life in order: when, where, what."""
    stored = life.stored
    yield from _origin(stored)
    if stored.batch is not None:
        yield from _in_log(stored)
    elif stored.outcome != "record":
        yield (
            "-",
            "log",
            ENDS[stored.outcome] + f" (the log holds {words.span_text(stored.log_start, stored.log_end)})",
        )
    seen: set[tuple[int, str]] = set()
    for sink in life.sinks:
        if sink.entry is not None and (sink.entry.batch_time_ms, str(sink.entry.range)) not in seen:
            seen.add((sink.entry.batch_time_ms, str(sink.entry.range)))
            span = sink.entry.range.spans[stored.place]
            offsets = words.span_text(span.start, span.end)
            taken = f"taken with offsets {offsets}, by definition {sink.entry.fingerprint[:12]}"
            yield _moment(sink.entry.batch_time_ms), f"batch of {life.pipeline}", taken
    for departure in life.departures:
        said = (
            "was too late for it, and went on" if departure.route == LATE_FOR else f"left: {departure.route}"
        )
        yield "-", f"step {departure.step}", said + _row_number(departure.index)
    for dead in life.dead_letters:
        yield "-", "dead letter", f"{dead.reason}: {dead.error} ({dead.where}){_row_number(dead.index)}"
    for sink in life.sinks:
        if sink.kind != "dead_letter" or sink.standing != "taken":
            yield from _in_sink(sink)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _moment(milliseconds: int) -> str:
    at = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}.{milliseconds % 1000:03d} UTC"


def _row_number(index: int) -> str:
    return f", row {index} of those made of it" if index else ""


def _origin(stored: Stored) -> Iterator[tuple[str, str, str]]:
    if stored.batch is None or stored.outcome == "control":
        return
    at = "-" if stored.timestamp_ms is None or stored.is_append_time else _moment(stored.timestamp_ms)
    by = (
        "sent"
        if stored.spool is None
        else f"sent by spool {stored.spool[0]} as its number {stored.spool[2]:,}"
    )
    if stored.batch.producer_id >= 0:
        sequence = stored.batch.base_sequence + stored.offset - stored.batch.base_offset
        by += f", producer {stored.batch.producer_id} epoch {stored.batch.producer_epoch} sequence {sequence}"
    key = shown_bytes(stored.key)
    size = "no value" if stored.value is None else _count(len(stored.value), "byte")
    yield at, "sender", f"{by}; {'no key' if key is None else f'key {key}'}, {size}"


def _in_log(stored: Stored) -> Iterator[tuple[str, str, str]]:
    batch = stored.batch
    assert batch is not None
    at = _moment(stored.timestamp_ms) if stored.timestamp_ms is not None and stored.is_append_time else "-"
    codec = codec_name(batch)
    packed = "" if codec == "none" else f", {codec}"
    whole = (
        f"in leader epoch {batch.leader_epoch}, batch {words.span_text(batch.base_offset, batch.last_offset + 1)} of "
        f"{_count(batch.records_count, 'record')} and {_count(batch.size, 'byte')}{packed}"
    )
    yield (
        at,
        f"log {stored.name}",
        f"stored {whole}" if stored.outcome != "compacted" else f"was stored {whole}",
    )
    if stored.outcome == "compacted":
        yield "-", f"log {stored.name}", ENDS["compacted"]
    elif stored.outcome == "control":
        yield "-", f"log {stored.name}", f"{ENDS['control']}: {stored.transaction}"
    elif stored.transaction != "none":
        when = "-" if stored.marker_ms is None else _moment(stored.marker_ms)
        marker = "" if stored.marker_offset is None else f", by the marker at {stored.marker_offset}"
        yield when, "transaction", f"{stored.transaction}{marker}"


def _absent(sink: SinkLife, number: str) -> str:
    instead = sink.instead
    if instead is not None and instead.topic:
        return f"no row of it{number}; for {instead.key} it has the row made of {instead.name}"
    if sink.takes.endswith((f".{LATE}", f".{DUPLICATES}")):
        step, _, kind = sink.takes.rpartition(".")
        what = "came too late for it" if kind == LATE else "it had seen before"
        return f"no row of it: only rows of step {step!r} that {what} are there{number}"
    if sink.takes:
        return f"no row that can be told to hold it: not closed yet, or its key is made by a step{number}"
    return f"no row of it{number}"


def _in_sink(sink: SinkLife) -> Iterator[tuple[str, str, str]]:
    where = f"sink {sink.name}"
    number = f", entry {sink.entry.number:,} of its ledger" if sink.entry is not None else ""
    for each in sink.held:
        yield "-", where, f"{each}{number}"
    if sink.problem:
        yield "-", where, f"cannot be read: {sink.problem}"
    elif not sink.held:
        said = {
            "taken": _absent(sink, number),
            "pending": "has not taken its offset yet",
            "before": "began behind it",
            "empty": "has taken nothing yet",
            "other": "was fed from an earlier topic of this name",
        }[sink.standing]
        yield "-", where, said
