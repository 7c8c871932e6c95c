"""What a pipeline has recorded of its own past, and the batches that a replay of it is made of.

There are the batches of its log, and the entries of ledgers that keep them all. Nothing depends on it being complete.
The log is set aside when it has grown, so that the oldest batches may be missing; a Kafka sink's ledger keeps its last
entry only. Who uses it says what was not known.

A replay goes from where the pipeline began to where it stands now, through every offset once. It takes the batches that
are recorded, with the times that stood for "now" in them, wherever they continue it; what lies between two of them, or
behind the last, it cuts itself, with the time of the next recorded batch, or of the replay.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.engine.planning import Limits, share_out
from holdfast.pipeline.ledger import Entry, Intake, Rejected
from holdfast.pipeline.positions import BatchRange, Place, Span

LOGS: Final = ("log.jsonl.1", "log.jsonl")


@dataclass(frozen=True)
class Recorded:
    """One batch, as it was."""

    range: BatchRange
    batch_time_ms: int
    sinks: tuple[str, ...] = ()
    """Those it went to."""
    intake: Intake | None = None
    """What was read; None where it was not recorded, or the entry is an opening."""
    rejected: tuple[Rejected, ...] = ()


def recorded_batches(home: str) -> list[Recorded]:
    """The batches of a pipeline's log that some sink has not been made to forget since, oldest first."""
    found: list[Recorded] = []
    for document in _lines(home):
        if document.get("event") == "reset":
            found = list(_without(found, set(document.get("sinks", ()))))
        if document.get("event") == "batch" and "range" in document:
            found.append(
                Recorded(
                    BatchRange.from_json(document["range"]),
                    int(document["batch_time_ms"]),
                    tuple(document.get("sinks", ())),
                    Intake.from_json(document["intake"]) if "intake" in document else None,
                    tuple(Rejected(*each) for each in document.get("rejected", ())),
                )
            )
    return found


def _without(batches: Iterable[Recorded], sinks: set[str]) -> Iterator[Recorded]:
    for batch in batches:
        left = tuple(name for name in batch.sinks if name not in sinks)
        if left:
            yield replace(batch, sinks=left)


def _lines(home: str) -> Iterator[dict[str, Any]]:
    for name in LOGS:
        try:
            with open(os.path.join(home, name), encoding="utf-8") as file:
                for line in file:
                    try:
                        document = json.loads(line)
                    except ValueError:
                        continue  # cut short by a crash
                    if isinstance(document, dict):
                        yield document
        except FileNotFoundError:
            continue


def of_entries(entries: Iterable[Entry]) -> list[Recorded]:
    """Batches as a ledger keeps them, openings included: those take nothing, at a place."""
    return [
        Recorded(
            entry.range,
            entry.batch_time_ms,
            (entry.sink,),
            entry.intake if entry.range else None,
            entry.rejected,
        )
        for entry in entries
    ]


def beginnings(recorded: Iterable[Recorded]) -> dict[Place, int]:
    """The least offset each partition was read from."""
    found: dict[Place, int] = {}
    for batch in recorded:
        for place, span in batch.range.spans.items():
            found[place] = min(span.start, found.get(place, span.start))
    return found


def kept_entries(definition: PipelineDefinition, sink: SinkDefinition) -> list[Entry] | None:
    """The whole ledger of a sink, oldest first; nothing for one that keeps its last entry only, or has lost some.

    Of a definition with its secrets expanded.
    """
    match sink:
        case ParquetSink():
            from holdfast.pipeline.sinks.parquet import ParquetSinkWriter

            return list(ParquetSinkWriter(sink, definition.name, definition.directory).store.entries())
        case DeltaSink():
            return _delta(definition, sink)
        case PostgresSink():
            return _postgres(definition, sink)
        case KafkaSink():
            return None


def _delta(definition: PipelineDefinition, sink: DeltaSink) -> list[Entry] | None:
    """From the last entry back to the opening of this life, by the files of entries.

    Those of lives before a reset stay beside them, and those of commits that failed, under the same numbers: an entry
    counts if the one after it goes on from where it ends. Nothing when one is missing: where it began is not known.
    """
    from holdfast.pipeline.sinks.delta import DeltaSinkWriter

    ledger = DeltaSinkWriter(sink, definition.name, definition.directory).ledger
    table = ledger.table()
    last = None if table is None else ledger.last_entry(table)
    if last is None or not os.path.isdir(ledger.directory):
        return None
    by_number: dict[int, list[Entry]] = {}
    for entry in _entries_in(ledger.directory):
        by_number.setdefault(entry.number, []).append(entry)
    found = [last]
    while found[-1].number:
        after = found[-1]
        before = [each for each in by_number.get(after.number - 1, ()) if _leads_to(each, after)]
        if not before:
            return None
        # Two lives can have taken the same batches: of this one is what was made last, and not later than what follows.
        found.append(
            max(before, key=lambda each: (each.batch_time_ms <= after.batch_time_ms, each.batch_time_ms))
        )
    return found[::-1]


def _entries_in(directory: str) -> Iterator[Entry]:
    for name in os.listdir(directory):
        with open(os.path.join(directory, name), encoding="utf-8") as file:
            try:
                document = json.load(file)
            except ValueError:
                continue  # cut short by a crash
        yield Entry.from_json(document)


def _leads_to(before: Entry, after: Entry) -> bool:
    at = before.positions.at
    continues = all(
        at[place].offset == span.start for place, span in after.range.spans.items() if place in at
    )
    return continues and before.positions.moved(after.range) == after.positions


def _postgres(definition: PipelineDefinition, sink: PostgresSink) -> list[Entry] | None:
    import psycopg
    from psycopg import sql

    from holdfast.pipeline.sinks.postgres_sql import ledger

    with psycopg.connect(sink.url, connect_timeout=10) as connection:
        try:
            found = connection.execute(
                sql.SQL("SELECT entry FROM {} WHERE pipeline = %s AND sink = %s ORDER BY number").format(
                    ledger(sink.schema_name)
                ),
                (definition.name, sink.name),
            ).fetchall()
        except psycopg.errors.UndefinedTable:
            return None
    return [Entry.from_json(document) for (document,) in found]


# ---------------------------------------------------------------------------- replays


@dataclass(frozen=True)
class Cut:
    """One batch of a replay."""

    range: BatchRange
    batch_time_ms: int | None
    """None for the time of the replay itself."""
    opened: frozenset[Place]
    """The partitions that the pipeline knew then."""
    is_recorded: bool = False
    intake: Intake | None = None
    rejected: tuple[Rejected, ...] = ()
    """Records of it that are dead letters for a sink's sake."""


def cuts(
    begin: Mapping[Place, int], end: Mapping[Place, int], recorded: Sequence[Recorded], limits: Limits
) -> Iterator[Cut]:
    """From `begin` to `end`, which name the same partitions."""
    replay = _Replay(dict(begin), end, limits, _opened_at_first(begin, recorded))
    for batch in recorded:
        spans = {place: span for place, span in batch.range.spans.items() if place in begin}
        if not any(span.offsets for span in spans.values()):
            replay.opened |= spans.keys()
            continue
        taken = {place: span for place, span in spans.items() if span.offsets}
        if not replay.can_reach(taken):
            continue
        yield from replay.up_to({place: span.start for place, span in taken.items()}, batch.batch_time_ms)
        yield replay.take(
            taken,
            batch.batch_time_ms,
            is_recorded=True,
            intake=batch.intake if taken.keys() == batch.range.spans.keys() else None,
            rejected=batch.rejected,
        )
    replay.opened |= begin.keys()
    yield from replay.up_to(end, None)


def _opened_at_first(begin: Mapping[Place, int], recorded: Sequence[Recorded]) -> set[Place]:
    """All partitions, unless openings are recorded: then those whose opening is not."""
    has_openings = bool(recorded) and not recorded[0].range
    if not has_openings:
        return set(begin)
    mentioned = {place for batch in recorded for place in batch.range.spans}
    return {place for place in begin if place not in mentioned}


@dataclass
class _Replay:
    at: dict[Place, int]
    end: Mapping[Place, int]
    limits: Limits
    opened: set[Place]

    def can_reach(self, spans: Mapping[Place, Span]) -> bool:
        """Whether the replay is not past the start of any of these, and may go to their ends."""
        return all(
            self.at[place] <= span.start and span.end <= self.end[place] for place, span in spans.items()
        )

    def up_to(self, ends: Mapping[Place, int], batch_time_ms: int | None) -> Iterator[Cut]:
        """Cut by ourselves what is missing before these."""
        while True:
            available = {
                place: ends[place] - self.at[place] for place in ends if ends[place] > self.at[place]
            }
            if not available:
                return
            shares = share_out(available, self.limits.allowed)
            yield self.take(
                {place: Span(self.at[place], self.at[place] + share) for place, share in shares.items()},
                batch_time_ms,
            )

    def take(
        self,
        spans: Mapping[Place, Span],
        batch_time_ms: int | None,
        *,
        is_recorded: bool = False,
        intake: Intake | None = None,
        rejected: tuple[Rejected, ...] = (),
    ) -> Cut:
        self.opened |= spans.keys()
        self.at.update({place: span.end for place, span in spans.items()})
        return Cut(
            BatchRange(dict(spans)), batch_time_ms, frozenset(self.opened), is_recorded, intake, rejected
        )


def best_cuts(
    begin: Mapping[Place, int],
    end: Mapping[Place, int],
    histories: Sequence[Sequence[Recorded]],
    limits: Limits,
) -> tuple[Cut, ...]:
    """By the history that tells most of the batches; all cut by ourselves where none does."""
    found = (tuple(cuts(begin, end, history, limits)) for history in (*histories, ()))
    return max(found, key=recorded_offsets)


def recorded_offsets(found: Sequence[Cut]) -> int:
    """How many of the offsets are replayed in the batches they came in."""
    return sum(cut.range.offsets for cut in found if cut.is_recorded)
