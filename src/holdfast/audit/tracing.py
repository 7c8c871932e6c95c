"""The life of one record, looked up: the log, the ledgers, the sinks, the home's record of what left the steps.

Readers are opened once and serve many records; a sink that cannot be read is told as such, and hides no other.

Rows that do not name the record they were made of, found by what is in it: windows, and rows that replaced others.

A window's row names its step and turn; a table that keeps one row for each key names the last record alone. Where the
key, and for windows the event time, are fields of the record that no step has made, the row is the one that has them.
Otherwise nobody can tell without running the steps, and nothing is found.

What became of a record, concluded from what was found of it.

Nothing is concluded from what is absent unless a ledger says that it should be there: a record that no ledger covers is
pending, not lost; one whose batch kept no record of what left it may have left; and what cannot be read may hold it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit import unaltered
from holdfast.audit.decoding import SourceDecoder
from holdfast.audit.left import expands
from holdfast.audit.lineage import COLUMNS
from holdfast.audit.lives import ENDS, Departure, Life, SinkLife, Standing
from holdfast.audit.model import Fate
from holdfast.audit.sinks.base import ERASED, SinkReader
from holdfast.audit.sinks.letters import DeadLetterRow, dead_letters
from holdfast.audit.sinks.opening import open_dead_letters, open_sink
from holdfast.audit.stored import Stored, look_up
from holdfast.errors import HoldfastError
from holdfast.pipeline.aside import LATE_FOR, LEAVING, AsideDamaged, batch_name, read_all
from holdfast.pipeline.definition.columns import plain_columns
from holdfast.pipeline.definition.model import (
    DeltaSink,
    Join,
    Keyed,
    PipelineDefinition,
    PostgresSink,
    Window,
)
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, home_of
from holdfast.pipeline.definition.streams import merge_key, merged
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.reader.cluster import Cluster

RECORD_TIME = "_timestamp"


@dataclass(frozen=True)
class Content:
    """A record's fields, as the source decodes them."""

    fields: Mapping[str, Any]
    timestamp: datetime
    plain: Mapping[str, str]
    """Columns of rows that are fields, unchanged."""

    def key(self, names: Sequence[str]) -> dict[str, Any] | None:
        """Its key in the rows; nothing where a step makes part of it."""
        if any(name not in self.plain for name in names):
            return None
        return {name: self.fields[self.plain[name]] for name in names}


def content_of(definition: PipelineDefinition, record: pa.RecordBatch, rows: str) -> Content:
    """Of a record as the reader of logs gives it; `rows` says which rows its columns are compared with."""
    decoder = SourceDecoder(definition.source)
    columns = decoder.decode(record.column("topic")[0].as_py(), record).columns
    fields = {name: column[0].as_py() for name, column in columns.items()}
    plain = plain_columns(definition, decoder.types, rows).columns
    return Content(fields, record.column("timestamp")[0].as_py(), plain)


# ------------------------------------------------------------------------ windows


def windows_of(definition: PipelineDefinition, reader: SinkReader, record: pa.RecordBatch) -> Iterator[str]:
    """The windows of this sink that hold the record."""
    step = next(
        (each for each in definition.steps if isinstance(each, Window) and each.name == reader.takes), None
    )
    event_time = definition.source.event_time
    if step is None or event_time is None:
        return
    content = content_of(definition, record, step.name)
    key = content.key(step.key)
    event = content.timestamp if event_time.field == RECORD_TIME else content.fields.get(event_time.field)
    if key is None or event is None:
        return
    moment = _moment(event)
    for table, where in reader.values():
        names = set(table.column_names)
        wanted = [name for name in ("window_start", "window_end", "_hf_count", *step.key) if name in names]
        for row in table.select(wanted).to_pylist():
            if row.get("_hf_count") == 0 or not _holds(step, row, moment):
                continue
            if all(_same(row.get(name), value) for name, value in key.items()):
                yield _told(where, row, key)


def _holds(step: Window, row: Mapping[str, Any], moment: datetime) -> bool:
    start, end = _moment(row["window_start"]), _moment(row["window_end"])
    return start <= moment <= end if step.kind == "session" else start <= moment < end


def _moment(value: Any) -> datetime:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    assert isinstance(value, datetime)
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


def _same(held: Any, wanted: Any) -> bool:
    """Sinks that keep text keep numbers as text too."""
    return held == wanted or (held is not None and wanted is not None and str(held) == str(wanted))


def _told(where: str, row: Mapping[str, Any], key: Mapping[str, Any]) -> str:
    named = key_text(key)
    span = f"{_moment(row['window_start']):%Y-%m-%d %H:%M:%S} to {_moment(row['window_end']):%H:%M:%S}"
    count = row.get("_hf_count")
    of = "" if count is None else f", made of {count:,} rows"
    return f"window {span}{f' of {named}' if named else ''}{of} ({where})"


def key_text(key: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in key.items())


# ------------------------------------------------------------------------ rows that replaced others


def standing_for(
    definition: PipelineDefinition, sink: PostgresSink | DeltaSink, reader: SinkReader, record: pa.RecordBatch
) -> Standing | None:
    """What stands for this record's key in a table that is upserted; nothing where its key cannot be told."""
    key = content_of(definition, record, sink.rows).key(merge_key(sink))
    if key is None:
        return None
    named = key_text(key)
    for table, _ in reader.values(merge_key(sink)):
        for row in table.to_pylist():
            if all(_same(row.get(name), value) for name, value in key.items()):
                topic, partition, offset, _ = (row.get(name) for name in COLUMNS)
                return Standing(named, topic or "", partition, offset)
    return Standing(named)


# ---------------------------------------------------------------------------- trace fate


def without_pipeline(stored: Stored) -> Life:
    if stored.outcome == "record":
        return Life(stored, fate="record", conclusion="it is in the log, and can be read")
    return Life(stored, fate=stored.outcome, conclusion=ENDS[stored.outcome])


def conclude(
    definition: PipelineDefinition,
    stored: Stored,
    sinks: Sequence[SinkLife],
    departures: Sequence[Departure],
    dead: Sequence[DeadLetterRow],
    is_known: bool,
) -> tuple[str, str]:
    if any(each.standing == "other" for each in sinks):
        said = "the sinks were fed from an earlier topic of this name, which was deleted: this record is not of it"
        return "other", said
    mains = [each for each in sinks if not each.takes and each.kind != "dead_letter"]
    held = [each for each in mains if each.held]
    if stored.outcome in ("aborted", "control", "not_yet", "open"):
        if held:
            return Fate.EXTRA, f"{ENDS[stored.outcome]}; and yet {_names(held)} has a row of it"
        return stored.outcome, ENDS[stored.outcome]
    if held and all(text.startswith(ERASED) for each in held for text in each.held):
        return Fate.ERASED, f"it was {held[0].held[0]}, and no sink has a row of it any more"
    twice = [each for each in held if len(each.held) > 1]
    if twice and not expands(definition):
        return Fate.DUPLICATED, f"it is there more than once in {_names(twice)}"
    found = _found(definition, stored, mains, held, departures, dead)
    if found is not None:
        return found
    troubled = [each for each in mains if each.standing == "unreadable" or each.problem]
    if troubled:
        return "unknown", f"it is nowhere that can be read, and {_names(troubled)} cannot be read"
    if stored.outcome in ENDS:
        return stored.outcome, f"{ENDS[stored.outcome]}; no sink holds a row of it"
    if all(each.standing in ("pending", "empty") for each in sinks):
        return Fate.PENDING, "no sink has taken its offset yet"
    if all(each.standing == "before" for each in sinks if each.standing not in ("pending", "empty")):
        return "before", "the pipeline began behind it"
    if not is_known:
        return (
            "unknown",
            "its batch let rows go, and the record of which ones is missing or damaged: it may be one",
        )
    windows = [each for each in sinks if each.takes and each.held]
    if not mains and windows:
        return Fate.AGGREGATED, f"it counts in {_names(windows)}"
    if not mains:
        said = "no sink keeps rows by themselves, and which windows it counts in cannot be told here"
        return "unknown", said
    taken = [each for each in mains if each.standing == "taken"]
    return Fate.LOST, f"the ledger of {_names(taken)} covers it, and it is nowhere"


def _found(
    definition: PipelineDefinition,
    stored: Stored,
    mains: Sequence[SinkLife],
    held: Sequence[SinkLife],
    departures: Sequence[Departure],
    dead: Sequence[DeadLetterRow],
) -> tuple[str, str] | None:
    """Where it is, if it is anywhere."""
    leaving = [each for each in departures if each.route in LEAVING]
    if held and (leaving or dead) and not expands(definition):
        route = "a dead letter" if dead else f"the record of what step {leaving[0].step!r} let go"
        return Fate.DUPLICATED, f"it is in {_names(held)} and in {route}"
    if dead:
        why = f"{dead[0].reason}: {dead[0].error}" if dead[0].error else dead[0].reason
        return Fate.DEAD_LETTER, f"it is a dead letter, because of {why}"
    if leaving and not held:
        return leaving[0].route, {
            "filtered": f"step {leaving[0].step!r} let it go",
            "duplicate": f"its key had been seen by step {leaving[0].step!r}",
            "late": f"it came too late for step {leaving[0].step!r}",
        }[leaving[0].route]
    missing = [each for each in mains if not each.held and each.standing == "taken" and not each.problem]
    replaced = [each for each in missing if each.keeps_last]
    if replaced and not (not held and any(not each.keeps_last for each in missing)):
        judged = _replaced(stored, replaced)
        if judged[0] != Fate.SUPERSEDED or not held:
            return judged
    if not held:
        return None
    lost = [each for each in missing if not each.keeps_last]
    if lost:
        return Fate.LOST, f"it is in {_names(held)}, and not in {_names(lost)}, whose ledger covers it"
    late = [each for each in departures if each.route == LATE_FOR]
    more = f"; it was too late for {', '.join(repr(each.step) for each in late)}" if late else ""
    waits = [each for each in mains if each.standing == "pending"]
    rest = f"; {_names(waits)} has not taken it yet" if waits else ""
    if replaced:
        rest += f"; {_replaced(stored, replaced)[1]}"
    return Fate.OUTPUT, f"it is in {_names(held)}{rest}{more}"


def _replaced(stored: Stored, sinks: Sequence[SinkLife]) -> tuple[str, str]:
    """What became of a record that tables of one row for each key do not have."""
    place = stored.place
    for sink in sinks:
        instead = sink.instead
        if instead is None:
            said = "keeps the last row of each key, and its key cannot be told without the steps"
            return "unknown", f"{sink.name} {said}"
        if not instead.topic:
            return "unknown", f"{sink.name} has no row of {instead.key}: it was deleted, or it is lost"
        if instead.is_older_than(place.topic, place.partition, stored.offset):
            return Fate.LOST, f"{sink.name} has an older row of {instead.key}, made of {instead.name}"
    return Fate.SUPERSEDED, "; ".join(
        f"{each.name} has a newer row of {each.instead.key}, made of {each.instead.name}"
        for each in sinks
        if each.instead is not None
    )


def _names(sinks: Sequence[SinkLife]) -> str:
    return " and ".join(each.name for each in sinks) or "no sink"


# ---------------------------------------------------------------------------- tracing


DAMAGED: Final = re.compile(r"^\S+\.parquet: ")
"""How a reader's `find` begins when a file that may hold the record cannot be read."""


@dataclass
class Tracer:
    """The log alone, or the log and one pipeline on it, whose definition comes with its secrets expanded."""

    cluster: Cluster
    definition: PipelineDefinition | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    redact: Callable[[str], str] = str
    """Takes secrets out of what a sink's failure says."""
    _readers: dict[str, SinkReader] = field(init=False, default_factory=dict)
    _problems: dict[str, tuple[str, str]] = field(init=False, default_factory=dict)
    """By sink, its kind and why it cannot be read."""
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
            self._problems[name] = (kind, self.redact(str(error)))
            return
        self._stack.callback(reader.close)
        reader.erased, _ = unaltered.erasures(reader, unaltered.keeper_of(self._known()))
        self._readers[name] = reader

    def trace(self, place: Place, offset: int) -> Life:
        """The life of the record at this offset."""
        stored = look_up(self.cluster, place, offset)
        if self.definition is None:
            return without_pipeline(stored)
        if not _reads(self.definition, place.topic):
            conclusion = f"pipeline {self.definition.name!r} does not read topic {place.topic!r}"
            return Life(stored, self.definition.name, fate="not_read", conclusion=conclusion)
        sinks = [self._sink_life(name, reader, stored) for name, reader in self._readers.items()]
        sinks += [
            SinkLife(name, kind, standing="unreadable", problem=why)
            for name, (kind, why) in self._problems.items()
        ]
        entries = {
            batch_name(each.entry.range, each.entry.fingerprint): each.entry for each in sinks if each.entry
        }
        covered = any(each.standing == "taken" for each in sinks)
        departures, known = self._departures(stored, entries if entries or not covered else None)
        dead = tuple(self._dead_letters(stored))
        fate, conclusion = conclude(self.definition, stored, sinks, departures, dead, known)
        return Life(stored, self.definition.name, tuple(sinks), departures, dead, fate, conclusion)

    def _sink_life(self, name: str, reader: SinkReader, stored: Stored) -> SinkLife:
        definition = self._known()
        upsert = _upsert(definition, name)
        instead = None
        try:
            standing, entry = _covering(reader.entries(), stored)
            held: tuple[str, ...] = ()
            if not _is_window(definition, reader):
                held = tuple(reader.find(stored.place, stored.offset))
                if upsert is not None and not held and stored.row is not None:
                    instead = standing_for(definition, upsert, reader, stored.row)
            elif stored.row is not None:
                held = tuple(windows_of(definition, reader, stored.row))
        except HoldfastError as error:
            problem = self.redact(str(error))
            return SinkLife(name, reader.kind, reader.takes, "unreadable", problem=problem)
        damaged = [each for each in held if DAMAGED.match(each)]
        whole = tuple(each for each in held if each not in damaged)
        what = (standing, entry, whole, "; ".join(damaged), instead, upsert is not None)
        return SinkLife(name, reader.kind, reader.takes, *what)

    def _departures(
        self, stored: Stored, entries: Mapping[str, Entry] | None
    ) -> tuple[tuple[Departure, ...], bool]:
        """What left the steps, and whether the record of it can be relied on for the batches that took the offset.

        Without entries nobody knows which batch that was (topics keep the newest alone): all are looked through.
        """
        try:
            recorded = read_all(home_of(self._known()), entries)
        except (AsideDamaged, OSError):
            return (), False
        found = [
            Departure(row["route"], row["step"], row["index"], batch.name)
            for batch, table in recorded
            for row in _rows_at(table, stored)
        ]
        names = {batch.name for batch, _ in recorded}
        is_known = entries is not None and all(
            name in names or not _has_left(entry) for name, entry in entries.items()
        )
        return tuple(sorted(found, key=lambda each: (each.index, each.route, each.step))), is_known

    def _dead_letters(self, stored: Stored) -> Iterator[DeadLetterRow]:
        reader = self._readers.get(DEAD_LETTER_NAME)
        place = stored.place
        for row in () if reader is None else dead_letters(reader):
            if (row.topic, row.partition, row.offset) == (place.topic, place.partition, stored.offset):
                yield row


def _rows_at(table: pa.Table, stored: Stored) -> list[dict[str, Any]]:
    at = pc.and_(
        pc.equal(table.column("offset"), stored.offset),
        pc.equal(table.column("partition"), stored.place.partition),
    )
    rows: list[dict[str, Any]] = table.filter(at).to_pylist()
    return [row for row in rows if row["topic"] == stored.place.topic]


def _has_left(entry: Entry) -> bool:
    """Whether the batch let rows go that stand in the home's record alone."""
    routes = entry.routes
    return bool(sum(routes.filtered.values()) or routes.duplicate or routes.late)


def _reads(definition: PipelineDefinition, topic: str) -> bool:
    source = definition.source
    return topic in source.topics or bool(source.pattern and re.fullmatch(source.pattern, topic))


def _upsert(definition: PipelineDefinition, name: str) -> PostgresSink | DeltaSink | None:
    return merged(next((each for each in definition.sinks if each.name == name), None))


def _is_window(definition: PipelineDefinition, reader: SinkReader) -> bool:
    """Rows of a tap name their step and turn, not the records they were made of."""
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
    standing = entries[-1].positions.of(stored.place.topic, stored.place.partition)
    if standing is not None and standing[0] != stored.place:
        return "other", None
    if standing is None or stored.offset >= standing[1].offset:
        return "pending", None
    starts = [entry.range.spans[stored.place].start for entry in entries if stored.place in entry.range.spans]
    # Ledgers of topics keep only their newest entries: what lies before the first kept was taken or came before.
    is_before = stored.offset < min(starts, default=standing[1].offset) and entries[0].number == 0
    return ("before" if is_before else "taken"), None
