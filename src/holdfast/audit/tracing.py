"""The life of one record: sent, stored, taken in a batch, and then in a row, a file, a window, a route, or gone.

Everything here is looked up where it stands: the log, the ledgers, the sinks, the home's record of what left the steps.
Nothing is concluded from what is absent unless a ledger says that it should be there: a record that no ledger covers is
pending, not lost, and one whose batch kept no record of what left it may have left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.audit import words
from holdfast.audit.left import expands
from holdfast.audit.model import Fate
from holdfast.audit.sinks.base import DeadLetterRow, SinkReader
from holdfast.audit.sinks.opening import open_dead_letters, open_sink
from holdfast.audit.stored import Stored, look_up, shown_bytes
from holdfast.audit.window_places import windows_of
from holdfast.errors import HoldfastError
from holdfast.pipeline.aside import LATE_FOR, LEAVING, AsideDamaged, batch_name, read_all
from holdfast.pipeline.definition.model import PipelineDefinition, PostgresSink
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, home_of
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.reader.cluster import Cluster

DAMAGED: Final = re.compile(r"^\S+\.parquet: ")
"""How a reader's `find` begins when a file that may hold the record cannot be read."""

ENDS: Final[Mapping[str, str]] = {
    "expired": "it is gone: retention or a deletion moved the start of the log past it",
    "compacted": "it is gone: the topic is compacted, and a later record of its key took its place, or it never was",
    "aborted": "its transaction was aborted: readers of committed records never see it",
    "control": "it is no record but the marker that ended a transaction",
    "open": "its transaction has not ended: nobody may take it yet",
    "not_yet": "the log has not grown to it yet",
}


@dataclass(frozen=True)
class SinkLife:
    """One sink and the record."""

    name: str
    kind: str
    takes: str = ""
    standing: str = "taken"
    """`taken`: its ledger covers the offset; `before`: it began behind it; `pending`, `empty`, `unreadable`."""
    entry: Entry | None = None
    held: tuple[str, ...] = ()
    """Where the rows made of it are."""
    problem: str = ""

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
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Departure:
    """A row of the record that left the steps."""

    route: str
    step: str
    index: int
    batch: str

    def as_json(self) -> dict[str, Any]:
        return {"route": self.route, "step": self.step, "index": self.index, "batch": self.batch}


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
        return self.fate in {str(fate) for fate in words.FAULTS}

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


# ------------------------------------------------------------------------ looking


@dataclass
class Tracer:
    """The log alone, or the log and one pipeline on it, whose definition comes with its secrets expanded."""

    cluster: Cluster
    definition: PipelineDefinition | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    _readers: dict[str, SinkReader] = field(init=False, default_factory=dict)
    _problems: dict[str, tuple[str, str]] = field(init=False, default_factory=dict)
    """By sink, its kind and why it cannot be read."""
    _dead: list[DeadLetterRow] | None = field(init=False, default=None)
    _stack: ExitStack = field(init=False, default_factory=ExitStack)

    def __enter__(self) -> Tracer:
        if self.definition is None:
            return self
        self._open(DEAD_LETTER_NAME, "dead_letter", lambda: open_dead_letters(self._known(), self.settings))
        for sink in self.definition.sinks:
            kind = type(sink).__name__.removesuffix("Sink").lower()
            self._open(sink.name, kind, lambda each=sink: open_sink(self._known(), each, self.settings))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _known(self) -> PipelineDefinition:
        assert self.definition is not None
        return self.definition

    def _open(self, name: str, kind: str, make: Any) -> None:
        try:
            reader = make()
        except HoldfastError as error:
            self._problems[name] = (kind, str(error))
            return
        self._stack.callback(reader.close)
        self._readers[name] = reader

    def trace(self, place: Place, offset: int) -> Life:
        """The life of the record at this offset."""
        stored = look_up(self.cluster, place, offset)
        if self.definition is None:
            return _without_pipeline(stored)
        sinks = [self._sink_life(name, reader, stored) for name, reader in self._readers.items()]
        sinks += [
            SinkLife(name, kind, standing="unreadable", problem=why)
            for name, (kind, why) in self._problems.items()
        ]
        entries = {
            batch_name(each.entry.range, each.entry.fingerprint): each.entry for each in sinks if each.entry
        }
        departures, known = self._departures(stored, entries)
        dead = tuple(self._dead_letters(stored))
        fate, conclusion = _conclude(self.definition, stored, sinks, departures, dead, known)
        return Life(stored, self.definition.name, tuple(sinks), departures, dead, fate, conclusion)

    def _sink_life(self, name: str, reader: SinkReader, stored: Stored) -> SinkLife:
        life = SinkLife(name, reader.kind, reader.takes)
        try:
            entries = reader.entries()
            standing, entry = _covering(entries, stored)
            held = (
                tuple(reader.find(stored.place, stored.offset))
                if not _is_window(self._known(), reader)
                else ()
            )
            if not held and stored.row is not None and _is_window(self._known(), reader):
                held = tuple(windows_of(self._known(), reader, stored.row))
        except HoldfastError as error:
            return SinkLife(name, reader.kind, reader.takes, "unreadable", problem=str(error))
        damaged = [each for each in held if DAMAGED.match(each)]
        whole = tuple(each for each in held if not DAMAGED.match(each))
        return SinkLife(name, life.kind, life.takes, standing, entry, whole, "; ".join(damaged))

    def _departures(self, stored: Stored, entries: Mapping[str, Entry]) -> tuple[tuple[Departure, ...], bool]:
        """What left the steps, and whether the record of it can be relied on for the batches that took the offset."""
        try:
            recorded = read_all(home_of(self._known()), entries)
        except (AsideDamaged, OSError):
            return (), False
        found: list[Departure] = []
        for batch, table in recorded:
            found += [
                Departure(row["route"], row["step"], row["index"], batch.name)
                for row in _rows_at(table, stored)
            ]
        names = {batch.name for batch, _ in recorded}
        is_known = all(name in names or not _has_left(entry) for name, entry in entries.items())
        return tuple(sorted(found, key=lambda each: (each.index, each.route, each.step))), is_known

    def _dead_letters(self, stored: Stored) -> Iterator[DeadLetterRow]:
        reader: Any = self._readers.get(DEAD_LETTER_NAME)
        if reader is None:
            return
        if self._dead is None:
            self._dead = list(reader.dead_letters())
        place = stored.place
        for row in self._dead:
            if (row.topic, row.partition, row.offset) == (place.topic, place.partition, stored.offset):
                yield row


def _rows_at(table: Any, stored: Stored) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    at = pc.and_(
        pc.equal(table.column("offset"), stored.offset),
        pc.equal(table.column("partition"), stored.place.partition),
    )
    chosen = table.filter(at)
    chosen = chosen.filter(pc.equal(chosen.column("topic").cast(pa.string()), stored.place.topic))
    rows: list[dict[str, Any]] = chosen.to_pylist()
    return rows


def _has_left(entry: Entry) -> bool:
    """Whether the batch let rows go that stand in the home's record alone."""
    routes = entry.routes
    return bool(sum(routes.filtered.values()) or routes.duplicate or routes.late)


def _is_window(definition: PipelineDefinition, reader: SinkReader) -> bool:
    """Rows of a tap name their step and turn, not the records they were made of."""
    from holdfast.pipeline.definition.model import Join, Keyed, Window

    return any(
        step.name == reader.takes for step in definition.steps if isinstance(step, Window | Keyed | Join)
    )


def _covering(entries: Sequence[Entry], stored: Stored) -> tuple[str, Entry | None]:
    """How a sink stands to the offset, and the entry of the batch that took it."""
    if not entries:
        return "empty", None
    for entry in reversed(entries):
        span = entry.range.spans.get(stored.place)
        if span is not None and span.start <= stored.offset < span.end:
            return "taken", entry
    known = entries[-1].positions.at.get(stored.place)
    if known is None or stored.offset >= known.offset:
        return "pending", None
    first = min(
        (entry.range.spans[stored.place].start for entry in entries if stored.place in entry.range.spans),
        default=known.offset,
    )
    # Ledgers of topics keep only their newest entries: what lies before the first kept was taken or came before.
    return ("before" if stored.offset < first and entries[0].number == 0 else "taken"), None


# ------------------------------------------------------------------------ concluding


def _without_pipeline(stored: Stored) -> Life:
    if stored.outcome == "record":
        return Life(stored, fate="record", conclusion="it is in the log, and can be read")
    return Life(stored, fate=stored.outcome, conclusion=ENDS[stored.outcome])


def _conclude(
    definition: PipelineDefinition,
    stored: Stored,
    sinks: Sequence[SinkLife],
    departures: Sequence[Departure],
    dead: Sequence[DeadLetterRow],
    is_known: bool,
) -> tuple[str, str]:
    mains = [each for each in sinks if not each.takes and each.kind != "dead_letter"]
    held = [each for each in mains if each.held]
    if stored.outcome in ("aborted", "control", "not_yet", "open"):
        if held:
            names = _names(held)
            return str(Fate.EXTRA), f"{ENDS[stored.outcome]}; and yet {names} has a row of it"
        return stored.outcome, ENDS[stored.outcome]
    twice = [each for each in held if len(each.held) > 1]
    if twice and not expands(definition):
        return str(Fate.DUPLICATED), f"it is there more than once in {_names(twice)}"
    found = _found(definition, mains, held, departures, dead)
    if found is not None:
        return found
    if any(each.standing == "unreadable" or each.problem for each in mains):
        troubled = _names([each for each in mains if each.standing == "unreadable" or each.problem])
        return "unknown", f"it is nowhere that can be read, and {troubled} cannot be read"
    if stored.outcome in ENDS:
        return stored.outcome, f"{ENDS[stored.outcome]}; no sink holds a row of it"
    if all(each.standing in ("pending", "empty") for each in sinks):
        return str(Fate.PENDING), "no sink has taken its offset yet"
    if all(each.standing == "before" for each in sinks if each.standing not in ("pending", "empty")):
        return "before", "the pipeline began behind it"
    if not is_known:
        return (
            "unknown",
            "its batch let rows go, and the record of which ones is missing or damaged: it may be one",
        )
    windows = [each for each in sinks if each.takes and each.held]
    if not mains and windows:
        return str(Fate.AGGREGATED), f"it counts in {_names(windows)}"
    if not mains:
        return (
            "unknown",
            "no sink keeps rows by themselves, and which windows it counts in cannot be told here",
        )
    return (
        str(Fate.LOST),
        f"the ledger of {_names([each for each in mains if each.standing == 'taken'])} covers it, and it is nowhere",
    )


def _found(
    definition: PipelineDefinition,
    mains: Sequence[SinkLife],
    held: Sequence[SinkLife],
    departures: Sequence[Departure],
    dead: Sequence[DeadLetterRow],
) -> tuple[str, str] | None:
    """Where it is, if it is anywhere."""
    leaving = [each for each in departures if each.route in LEAVING]
    if held and (leaving or dead) and not expands(definition):
        route = "a dead letter" if dead else f"the record of what step {leaving[0].step!r} let go"
        return str(Fate.DUPLICATED), f"it is in {_names(held)} and in {route}"
    if dead:
        why = f"{dead[0].reason}: {dead[0].error}" if dead[0].error else dead[0].reason
        return str(Fate.DEAD_LETTER), f"it is a dead letter, because of {why}"
    if leaving and not held:
        return leaving[0].route, {
            "filtered": f"step {leaving[0].step!r} let it go",
            "duplicate": f"its key had been seen by step {leaving[0].step!r}",
            "late": f"it came too late for step {leaving[0].step!r}",
        }[leaving[0].route]
    if not held:
        return None
    missing = [each for each in mains if not each.held and each.standing == "taken" and not each.problem]
    upserts = {
        each.name for each in definition.sinks if isinstance(each, PostgresSink) and each.mode == "upsert"
    }
    lost = [each for each in missing if each.name not in upserts]
    if lost:
        return str(Fate.LOST), f"it is in {_names(held)}, and not in {_names(lost)}, whose ledger covers it"
    late = [each for each in departures if each.route == LATE_FOR]
    more = f"; it was too late for {', '.join(repr(each.step) for each in late)}" if late else ""
    waits = [each for each in mains if each.standing == "pending"]
    rest = f"; {_names(waits)} has not taken it yet" if waits else ""
    if missing:
        rest += f"; in {_names(missing)} a newer row of its key stands, or its key was deleted"
    return str(Fate.OUTPUT), f"it is in {_names(held)}{rest}{more}"


def _names(sinks: Sequence[SinkLife]) -> str:
    return " and ".join(each.name for each in sinks) or "no sink"


# ------------------------------------------------------------------------ telling


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
            yield words.moment(sink.entry.batch_time_ms), f"batch of {life.pipeline}", taken
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


def _row_number(index: int) -> str:
    return f", row {index} of those made of it" if index else ""


def _origin(stored: Stored) -> Iterator[tuple[str, str, str]]:
    if stored.batch is None or stored.outcome == "control":
        return
    at = "-" if stored.timestamp_ms is None or stored.is_append_time else words.moment(stored.timestamp_ms)
    by = (
        "sent"
        if stored.spool is None
        else f"sent by spool {stored.spool[0]} as its number {stored.spool[2]:,}"
    )
    if stored.batch.producer_id >= 0:
        sequence = stored.batch.base_sequence + stored.offset - stored.batch.base_offset
        by += f", producer {stored.batch.producer_id} epoch {stored.batch.producer_epoch} sequence {sequence}"
    key = shown_bytes(stored.key)
    size = "no value" if stored.value is None else f"{len(stored.value):,} bytes"
    yield at, "sender", f"{by}; {'no key' if key is None else f'key {key}'}, {size}"


def _in_log(stored: Stored) -> Iterator[tuple[str, str, str]]:
    batch = stored.batch
    assert batch is not None
    at = (
        words.moment(stored.timestamp_ms)
        if stored.timestamp_ms is not None and stored.is_append_time
        else "-"
    )
    packed = "" if batch.codec == "none" else f", {batch.codec}"
    whole = (
        f"in leader epoch {batch.leader_epoch}, batch {words.span_text(batch.base_offset, batch.last_offset + 1)} of "
        f"{batch.records:,} records and {batch.bytes:,} bytes{packed}"
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
        when = "-" if stored.marker_ms is None else words.moment(stored.marker_ms)
        marker = "" if stored.marker_offset is None else f", by the marker at {stored.marker_offset}"
        yield when, "transaction", f"{stored.transaction}{marker}"


def _in_sink(sink: SinkLife) -> Iterator[tuple[str, str, str]]:
    where = f"sink {sink.name}"
    number = f", entry {sink.entry.number:,} of its ledger" if sink.entry is not None else ""
    for each in sink.held:
        yield "-", where, f"{each}{number}"
    if sink.problem:
        yield "-", where, f"cannot be read: {sink.problem}"
    elif not sink.held:
        said = {
            "taken": f"no row of it{number}",
            "pending": "has not taken its offset yet",
            "before": "began behind it",
            "empty": "has taken nothing yet",
        }[sink.standing]
        yield "-", where, said
