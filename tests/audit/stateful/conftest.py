"""A small pipeline played by hand: one record after the other, in plain Python, by the rules of docs/adr/0010."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.support.audit_sinks import Ledger

from holdfast.audit.decoding import SourceDecoder
from holdfast.audit.left import Departure, Left
from holdfast.audit.lineage import LineageBatch
from holdfast.audit.sinks.base import (
    EVERYTHING,
    ContentBatch,
    ErasedRows,
    SinkReader,
    SinkScope,
    Values,
)
from holdfast.audit.stateful import StatefulCheck, StatefulResult
from holdfast.audit.stateful.carried import Carried
from holdfast.pipeline.aside import DUPLICATE, LATE, LATE_FOR
from holdfast.pipeline.definition.model import (
    Decoding,
    Dedupe,
    EventTime,
    Field,
    ParquetSink,
    PipelineDefinition,
    SinkDefinition,
    Source,
    Step,
    Window,
)
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.digest import MASK, place_hash
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place, Positions
from holdfast.reader import SCHEMA

TOPIC_ID = uuid.UUID(int=7)
T0 = 1_700_000_000_000
VALUE = Decoding(
    "json",
    (
        Field("customer", "string", required=False),
        Field("at", "timestamp", required=False),
        Field("amount", "long"),
    ),
)


@dataclass(frozen=True)
class Sent:
    """One record: its partition, its key, its event (milliseconds after T0) and the time Kafka keeps with it."""

    partition: int
    customer: str | None
    event: int | None
    time: int = 0
    amount: int = 1
    id: str | None = None
    """That a spooling producer gave it."""

    @property
    def value(self) -> bytes:
        at = None if self.event is None else _iso(T0 + self.event)
        return json.dumps({"customer": self.customer, "at": at, "amount": self.amount}).encode()


def _iso(time_ms: int) -> str:
    return f"{np.datetime64(time_ms, 'ms')}Z"


@dataclass
class Row:
    """What a window step gave out."""

    customer: str | None
    start: int
    end: int
    count: int
    digest: int
    turn: int
    total: int = 0


@dataclass
class Played:
    """What became of the records."""

    entries: list[Entry]
    rows: list[Row]
    late: list[tuple[int, int]] = field(default_factory=list)
    """Of the window step."""
    dedupe_late: list[tuple[int, int]] = field(default_factory=list)
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    went_on: list[tuple[int, int]] = field(default_factory=list)
    unknown: str = ""
    """Why it is not known at which step some left."""

    def left(self) -> Left:
        """What was recorded of those that left, or were late."""
        return Left(
            {},
            departures=[
                Departure(
                    LineageBatch("orders", partition, np.array([offset]), np.zeros(1, np.int32)), *where
                )
                for where, found in (
                    (("once", LATE), self.dedupe_late),
                    (("once", DUPLICATE), self.duplicates),
                    (("totals", LATE_FOR), self.late),
                )
                for partition, offset in found
            ],
            unknown=self.unknown,
        )


def place(partition: int) -> Place:
    return Place("orders", TOPIC_ID, partition)


@dataclass
class Reader(SinkReader):
    """A sink in memory."""

    name: str
    held: list[Row]
    ledger: list[Entry]
    step: str = "totals"
    kind: str = "parquet"
    takes: str = "totals"
    is_exact: bool = True
    keyed: list[tuple[str, int, int]] = field(default_factory=list)
    """Customer, partition, offset: of a table with one row for each key."""
    keeps_digests: bool | None = None
    erased: Sequence[ErasedRows] = ()

    def contents(self, types: Mapping[str, str], scope: SinkScope = EVERYTHING) -> Iterator[ContentBatch]:
        return iter(())

    def columns(self) -> Sequence[str]:
        return ("_hf", "customer")

    def entries(self) -> Sequence[Entry]:
        return self.ledger

    def positions(self) -> Positions:
        return self.ledger[-1].positions

    def rows(self, scope: SinkScope) -> Iterator[LineageBatch]:
        return iter(())

    def values(self, columns: Sequence[str] | None = None, scope: SinkScope = EVERYTHING) -> Iterator[Values]:
        if columns is not None:
            yield from self._keys()
        elif self.held:
            times = pa.timestamp("us", tz="UTC")
            signed = [row.digest - 2**64 if row.digest >= 2**63 else row.digest for row in self.held]
            yield Values(
                pa.table(
                    {
                        "_hf_topic": [self.step] * len(self.held),
                        "_hf_partition": [0] * len(self.held),
                        "_hf_offset": [row.turn for row in self.held],
                        "_hf_index": list(range(len(self.held))),
                        "customer": pa.array([row.customer for row in self.held], pa.string()),
                        "window_start": pa.array([row.start * 1000 for row in self.held], times),
                        "window_end": pa.array([row.end * 1000 for row in self.held], times),
                        "total": pa.array([row.total for row in self.held], pa.int64()),
                        "_hf_count": [row.count for row in self.held],
                        "_hf_digest": pa.array(signed, pa.int64()),
                    }
                )
            )

    def _keys(self) -> Iterator[Values]:
        for customer, partition, offset in self.keyed:
            place = {"_hf_topic": "orders", "_hf_partition": partition, "_hf_offset": offset, "_hf_index": 0}
            yield Values(pa.Table.from_pylist([{**place, "customer": customer}]))

    def table_batches(self, columns: Sequence[str], scope: SinkScope = EVERYTHING) -> Iterator[pa.Table]:
        return iter(())

    def find(self, place: Place, offset: int) -> list[str]:
        return []

    def problems(self) -> Sequence[Any]:
        return []

    def gaps(self) -> Sequence[Any]:
        return []

    def close(self) -> None:
        return


@dataclass
class World:
    """A definition, its records, and how they were cut into batches."""

    steps: tuple[Step, ...]
    records: list[Sent]
    cuts: list[int]
    """After how many records, in the order they were sent, a batch ends."""
    event: EventTime = field(default_factory=lambda: EventTime("at", "2s"))
    sinks: tuple[SinkDefinition, ...] = (ParquetSink("unused", rows="totals", name="windows"),)
    partitions: int = 2

    @property
    def definition(self) -> PipelineDefinition:
        source = Source(topics=("orders",), value=VALUE, event_time=self.event)
        return PipelineDefinition("play", source, self.steps, self.sinks)

    # -------------------------------------------------------------------- the play

    def play(self) -> Played:
        return _Play(self).run()

    # -------------------------------------------------------------------- the audit

    def audit(
        self,
        played: Played,
        readers: Sequence[SinkReader] | None = None,
        *,
        cut: bool = False,
        others: Mapping[str, Collection[str]] | None = None,
        turns: tuple[int, int | None] = (0, None),
        before: Carried | None = None,
    ) -> StatefulResult:
        """Of the batches between these two; `before` is what an audit of those before them has handed on."""
        check = StatefulCheck(self.definition, SourceDecoder(self.definition.source), others, before)
        decoder = SourceDecoder(self.definition.source)
        logs = self.logs
        starts, ends = self.ends_of(turns[0]), self.ends_of(turns[1])
        spans = {at: (1 if cut else starts[at], ends[at]) for at in map(place, range(self.partitions))}
        observer = check.begin(spans)
        assert observer is not None
        for number, log in enumerate(logs):
            first, last = spans[place(number)]
            for begin in range(first, last, 3):  # batches of three records
                batch = _batch(number, begin, log[begin : min(begin + 3, last)])
                observer.take(place(number), batch, decoder.once("orders", batch))
        given = readers or [Reader("windows", played.rows, played.entries)]
        return check.examine(played.left(), given, {at: end for at, (_, end) in spans.items()})

    @property
    def logs(self) -> list[list[Sent]]:
        found: list[list[Sent]] = [[] for _ in range(self.partitions)]
        for record in self.records:
            found[record.partition].append(record)
        return found

    def ends_of(self, turns: int | None) -> dict[Place, int]:
        """Where so many batches end."""
        found = dict.fromkeys(map(place, range(self.partitions)), 0)
        for spans in self.spans()[:turns]:
            found |= {at: end for at, (_, end) in spans.items()}
        return found

    def spans(self) -> list[dict[Place, tuple[int, int]]]:
        """Of each batch."""
        found = []
        at = [0] * self.partitions
        for begin, end in zip([0, *self.cuts], [*self.cuts, len(self.records)], strict=True):
            after = list(at)
            for record in self.records[begin:end]:
                after[record.partition] += 1
            taken = {place(n): (at[n], after[n]) for n in range(self.partitions) if after[n] > at[n]}
            if taken:
                found.append(taken)
            at = after
        return found


def _batch(partition: int, first: int, records: Sequence[Sent]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "key": [None] * len(records),
            "value": [record.value for record in records],
            "topic": ["orders"] * len(records),
            "partition": [partition] * len(records),
            "offset": list(range(first, first + len(records))),
            "timestamp": [(T0 + record.time) * 1000 for record in records],
            "timestampType": [0] * len(records),
            "headers": [
                [] if record.id is None else [{"key": "hf-id", "value": record.id.encode()}]
                for record in records
            ],
        },
        schema=SCHEMA(),
    )


class _Play:
    def __init__(self, world: World) -> None:
        self.world = world
        self.delay = parse_duration_ms(world.event.delay)
        self.ahead = parse_duration_ms(world.event.ahead)
        self.greatest: dict[int, int] = {}
        self.active: dict[int, int] = {}
        self.watermark: int | None = None
        self.dedupe = next((step for step in world.steps if isinstance(step, Dedupe)), None)
        self.window = next((step for step in world.steps if isinstance(step, Window)), None)
        self.passed: dict[str | None, list[int]] = {}
        self.rows_in: list[tuple[str | None, int, int, int, int]] = []
        """Customer, event, own watermark, hash, amount: of rows that the window step took, ever."""
        self.given: dict[tuple[str | None, int], tuple[int, int]] = {}
        self.played = Played([], [])

    def run(self) -> Played:
        ledger = Ledger("play", "windows")
        self.played.entries.append(ledger.opening({place(n): 0 for n in range(self.world.partitions)}))
        for number, spans in enumerate(self.world.spans(), start=1):
            started = self.watermark
            new = self.take(spans)
            for at in spans:
                self.active[at.partition] = number
            self.advance(number)
            rows = self.give(number, started, new)
            self.played.rows += rows
            self.played.entries.append(
                ledger.entry(spans, rows=len(rows), state=number, watermark_ms=started, batch_time_ms=number)
            )
        return self.played

    def take(self, spans: Mapping[Place, tuple[int, int]]) -> list[tuple[str | None, int, int, int, int]]:
        new = []
        for at in sorted(spans):
            log = self.world.logs[at.partition]
            for offset in range(*spans[at]):
                sent = log[offset]
                seen = self.greatest.get(at.partition)
                own = [
                    each
                    for each in (None if seen is None else seen - self.delay, self.watermark)
                    if each is not None
                ]
                watermark = max(own, default=-(2**62))
                event = None if sent.event is None else T0 + sent.event
                if self.world.event.field == "_timestamp":
                    event = T0 + sent.time
                if event is not None and event <= T0 + sent.time + self.ahead:
                    self.greatest[at.partition] = event if seen is None else max(seen, event)
                where = at.partition, offset
                key = sent.customer if self.dedupe is None or self.dedupe.by == "key" else sent.id
                if self.dedupe is not None and not self.goes_on(where, key, event, watermark):
                    continue
                self.played.went_on.append(where)
                if self.window is not None:
                    hashed = place_hash("orders", at.partition, offset)
                    if event is None or self.is_late(event, watermark):
                        self.played.late.append(where)
                    else:
                        new.append((sent.customer, event, watermark, hashed, sent.amount))
        self.rows_in += new
        return new

    def goes_on(self, where: tuple[int, int], key: str | None, event: int | None, watermark: int) -> bool:
        assert self.dedupe is not None
        within = parse_duration_ms(self.dedupe.within)
        if key is None:
            return True
        if event is None or event + within <= watermark:
            self.played.dedupe_late.append(where)
            return False
        known = self.passed.setdefault(key, [])
        if any(abs(event - other) < within for other in known):
            self.played.duplicates.append(where)
            return False
        known.append(event)
        return True

    def advance(self, now: int) -> None:
        """Batches are a millisecond apart."""
        awake = list(range(self.world.partitions))
        if self.world.event.idle is not None:
            idle = max(1, parse_duration_ms(self.world.event.idle))
            awake = [each for each in awake if each in self.active and now - self.active[each] < idle]
        if awake and all(each in self.greatest for each in awake):
            least = min(self.greatest[each] for each in awake) - self.delay
            self.watermark = least if self.watermark is None else max(self.watermark, least)

    # -------------------------------------------------------------------- windows

    def starts(self, event: int, watermark: int) -> list[int]:
        """Of the windows it belongs to and is not late for."""
        assert self.window is not None
        size = parse_duration_ms(self.window.size or "1s")
        every = parse_duration_ms(self.window.every or self.window.size or "1s")
        hold = parse_duration_ms(self.window.correct_within) if self.window.late == "correct" else 0
        last = event - event % every
        found = [last - number * every for number in range(size // every + 1)]
        return [start for start in found if start <= event < start + size and start + size + hold > watermark]

    def is_late(self, event: int, watermark: int) -> bool:
        assert self.window is not None
        if self.window.kind == "session":
            hold = parse_duration_ms(self.window.correct_within) if self.window.late == "correct" else 0
            return event + parse_duration_ms(self.window.gap or "1s") + hold <= watermark
        return not self.starts(event, watermark)

    def state(self) -> dict[tuple[str | None, int], tuple[int, int, int, int]]:
        """Every window of the rows so far: end, count, digest, total."""
        assert self.window is not None
        found: dict[tuple[str | None, int], tuple[int, int, int, int]] = {}
        if self.window.kind != "session":
            size = parse_duration_ms(self.window.size or "1s")
            for customer, event, watermark, hashed, amount in self.rows_in:
                for start in self.starts(event, watermark):
                    _, count, digest, total = found.get((customer, start), (0, 0, 0, 0))
                    found[customer, start] = (
                        start + size,
                        count + 1,
                        (digest + hashed) & MASK,
                        total + amount,
                    )
            return found
        gap = parse_duration_ms(self.window.gap or "1s")
        for customer in {row[0] for row in self.rows_in}:
            mine = sorted((row[1], row[3], row[4]) for row in self.rows_in if row[0] == customer)
            begun: int | None = None
            reach: int | None = None
            for event, hashed, amount in mine:
                if reach is None or event > reach:
                    begun = event
                assert begun is not None
                reach = event + gap
                _, count, digest, total = found.get((customer, begun), (0, 0, 0, 0))
                found[customer, begun] = (reach, count + 1, (digest + hashed) & MASK, total + amount)
        return found

    def give(self, number: int, started: int | None, new: Sequence[Any]) -> list[Row]:
        """Windows that are new or differ, when they are due."""
        if self.window is None:
            return []
        wait = parse_duration_ms(self.window.gap or "1s") if self.window.kind == "session" else 0
        rows = []
        for (customer, start), (end, count, digest, total) in self.state().items():
            is_over = self.watermark is not None and end + wait <= self.watermark
            is_due = is_over or self.window.emit == "changes"
            if is_due and self.given.get((customer, start)) != (count, digest):
                self.given[customer, start] = count, digest
                rows.append(Row(customer, start, end, count, digest, number, total))
        for customer, start in [each for each in self.given if each not in self.state()]:
            del self.given[customer, start]  # a session that is part of another one now
            rows.append(Row(customer, start, start, 0, 0, number))
        return rows


@pytest.fixture(scope="session")
def world() -> type[World]:
    return World


@pytest.fixture(scope="session")
def sent() -> type[Sent]:
    return Sent


@pytest.fixture(scope="session")
def reader() -> type[Reader]:
    return Reader
