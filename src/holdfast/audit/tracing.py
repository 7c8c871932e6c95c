"""The life of one record, looked up: the log, the ledgers, the sinks, the home's record of what left the steps.

Readers are opened once and serve many records; a sink that cannot be read is told as such, and hides no other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.audit.lives import Departure, Life, SinkLife
from holdfast.audit.row_places import standing_for, windows_of
from holdfast.audit.sinks.base import DeadLetterRow, SinkReader
from holdfast.audit.sinks.opening import open_dead_letters, open_sink
from holdfast.audit.stored import Stored, look_up
from holdfast.audit.trace_fate import conclude, without_pipeline
from holdfast.errors import HoldfastError
from holdfast.pipeline.aside import AsideDamaged, batch_name, read_all
from holdfast.pipeline.definition.model import Join, Keyed, PipelineDefinition, PostgresSink, Window
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, home_of
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.reader.cluster import Cluster

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
        whole = tuple(each for each in held if not DAMAGED.match(each))
        return SinkLife(
            name,
            reader.kind,
            reader.takes,
            standing,
            entry,
            whole,
            "; ".join(damaged),
            instead,
            upsert is not None,
        )

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
        found: list[Departure] = []
        for batch, table in recorded:
            found += [
                Departure(row["route"], row["step"], row["index"], batch.name)
                for row in _rows_at(table, stored)
            ]
        names = {batch.name for batch, _ in recorded}
        is_known = entries is not None and all(
            name in names or not _has_left(entry) for name, entry in entries.items()
        )
        return tuple(sorted(found, key=lambda each: (each.index, each.route, each.step))), is_known

    def _dead_letters(self, stored: Stored) -> Iterator[DeadLetterRow]:
        reader: Any = self._readers.get(DEAD_LETTER_NAME)
        if reader is None:
            return
        place = stored.place
        for row in reader.dead_letters():
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


def _reads(definition: PipelineDefinition, topic: str) -> bool:
    source = definition.source
    return topic in source.topics or bool(source.pattern and re.fullmatch(source.pattern, topic))


def _upsert(definition: PipelineDefinition, name: str) -> PostgresSink | None:
    return next(
        (
            each
            for each in definition.sinks
            if each.name == name and isinstance(each, PostgresSink) and each.mode == "upsert"
        ),
        None,
    )


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
    known = standing[1]
    first = min(
        (entry.range.spans[stored.place].start for entry in entries if stored.place in entry.range.spans),
        default=known.offset,
    )
    # Ledgers of topics keep only their newest entries: what lies before the first kept was taken or came before.
    return ("before" if stored.offset < first and entries[0].number == 0 else "taken"), None
