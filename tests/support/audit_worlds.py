"""Small worlds for the audit: a log, a pipeline and what its sinks must hold, from one seed and without Spark.

    plan = make_plan(seed)                      # records, batches, and the rows of every sink: plain values
    with WorldWriter(cluster, directory, postgres_url) as writer:
        world = writer.write(plan)              # log and sinks, in their real formats
    audit(world.definition)

What the pipeline would have done is worked out here once more, in plain Python, record by record, as the guides say it:
rules, a filter, deduplication, late rows and windows. A test may change the rows of a plan before it is written; the
ledgers still tell what was there.

Every world has gaps, markers and aborted records in its log; most have records beyond the last batch, and in some a
sink lags.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal

from holdfast.pipeline.definition.model import (
    DeadLetter,
    Decoding,
    Dedupe,
    DeltaSink,
    EventTime,
    Expect,
    Field,
    Filter,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
    Source,
    Step,
    Window,
)
from holdfast.pipeline.digest import MASK, place_hash
from holdfast.pipeline.ledger import Intake, Routes

TOPIC: Final = "orders"
PIPELINE: Final = "shop"
DEAD_LETTER: Final = "dead-letter"
RULE: Final = "positive"
FILTER: Final = "no-trials"
DEDUPE: Final = "once"
WINDOW: Final = "totals"
BEGIN_MS: Final = 1_700_000_000_000
DELAY_MS: Final = 60_000
SIZE_MS: Final = 60_000
FIELDS: Final = (
    Field("id", "long"),
    Field("customer", "string"),
    Field("amount", "double"),
    Field("at", "timestamp"),
    Field("note", "string", required=False),
)

SinkKind = Literal["parquet", "delta", "append", "upsert", "kafka"]
KINDS: Final[tuple[SinkKind, ...]] = ("parquet", "delta", "append", "upsert", "kafka")
Kind = Literal["record", "aborted", "control", "missing"]


@dataclass(frozen=True)
class Told:
    """One offset of the log."""

    partition: int
    offset: int
    kind: Kind
    key: bytes | None = None
    value: bytes | None = None
    spool_id: str = ""
    time_ms: int = 0
    row: Mapping[str, Any] | None = None
    """What is in it; nothing for what cannot be read."""


@dataclass
class Row:
    """One row of a sink: its place, and its columns."""

    lineage: tuple[str, int, int, int]
    values: dict[str, Any]


@dataclass
class Held:
    """What one sink must hold, batch by batch."""

    name: str
    kind: SinkKind
    takes: str = ""
    batches: list[list[Row]] = field(default_factory=list)

    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch]


@dataclass(frozen=True)
class Made:
    """What the ledgers say of one batch."""

    spans: Mapping[int, tuple[int, int]]
    intake: Intake
    routes: Routes
    digests: Mapping[str, str]
    taps: Mapping[str, Mapping[str, int]]
    state: int
    watermark_ms: int | None


@dataclass
class Plan:
    """A world on paper."""

    seed: int
    log: dict[int, list[Told]]
    """By partition, every offset in order."""
    starts: dict[int, int]
    """Where the log begins, and the pipeline with it."""
    batches: list[Made]
    sinks: dict[str, Held]
    dead: Held
    aside: list[list[tuple[Told, str, str]]]
    """By batch: what left the chain, by which route and at which step."""
    definition: PipelineDefinition
    lags: dict[str, int] = field(default_factory=dict)
    """By sink: how many batches it has not taken yet."""
    lost_spool_id: str = ""
    """The number of a message that a spool sent and no broker has."""

    @property
    def is_stateful(self) -> bool:
        return any(isinstance(step, Dedupe | Window) for step in self.definition.steps)

    def taken(self) -> Iterator[Told]:
        """The records that some batch has."""
        for made in self.batches:
            for partition, (start, end) in made.spans.items():
                yield from (
                    each
                    for each in self.log[partition]
                    if each.kind == "record" and start <= each.offset < end
                )

    def let_go(self, told: Told, step: str) -> None:
        """A record of the first batch leaves at this step, in every sink, ledger and record alike."""
        lineage = (TOPIC, told.partition, told.offset, 0)
        for held in self.sinks.values():
            held.batches[0] = [row for row in held.batches[0] if row.lineage != lineage]
        self.aside[0].append((told, "filtered", step))
        made = self.batches[0]
        digests = {
            route: f"{(int(made.digests.get(route, '0'), 16) + sign * _hash(told)) & MASK:016x}"
            for route, sign in (("main", -1), ("filtered", 1))
        }
        filtered = {**made.routes.filtered, step: made.routes.filtered.get(step, 0) + 1}
        routes = replace(made.routes, main=made.routes.main - 1, filtered=filtered)
        self.batches[0] = replace(made, routes=routes, digests={**made.digests, **digests})

    def at(self, partition: int, offset: int) -> Told:
        return next(each for each in self.log[partition] if each.offset == offset)


def _hash(told: Told) -> int:
    return place_hash(TOPIC, told.partition, told.offset)


# ------------------------------------------------------------------------ the log


@dataclass
class _Orders:
    """Gives out orders: mostly good ones."""

    chance: random.Random
    partitions: int
    spool: int
    has_duplicates: bool
    clock_ms: int = BEGIN_MS
    number: int = 0
    sequences: dict[int, int] = field(default_factory=dict)
    earlier: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def next(self, partition: int, *, is_spooled: bool = True) -> dict[str, Any]:
        chance = self.chance
        self.clock_ms += chance.randrange(500, 9000)
        self.number += 1
        own = [each for each in range(12) if each % self.partitions == partition]
        customer = "trial" if chance.random() < 0.08 else f"customer-{chance.choice(own)}"
        row: dict[str, Any] = {
            "id": self.number,
            "customer": customer,
            "amount": round(chance.uniform(1, 500), 2),
            "at": self.clock_ms - (chance.randrange(200_000, 400_000) if chance.random() < 0.08 else 0),
            "note": chance.choice((None, "", "naïve ☃", "gift")),
        }
        if chance.random() < 0.06:
            row["amount"] = -row["amount"]
        known = self.earlier.setdefault(partition, [])
        if self.has_duplicates and known and chance.random() < 0.1:
            row = dict(chance.choice(known))
        known.append(row)
        value = json.dumps(
            {**{name: each for name, each in row.items() if each is not None}, "at": iso(row["at"])}
        ).encode()
        readable: dict[str, Any] | None = row
        if chance.random() < 0.06:
            value, readable = chance.choice((b"{", value + b"}", b'{"id": 1}', b"", b"\xff")), None
        spool_id = ""
        if self.spool and is_spooled:
            sequence = self.sequences.get(partition, -1) + 1
            self.sequences[partition] = sequence
            spool_id = f"{self.spool:016x}:{partition}:{sequence}"
        return {
            "key": None if chance.random() < 0.05 else customer.encode(),
            "value": value,
            "spool_id": spool_id,
            "time_ms": self.clock_ms,
            "row": readable,
        }


def iso(time_ms: int) -> str:
    return (
        datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _make_log(
    chance: random.Random, orders: _Orders, start: int, partition: int, count: int, *, has_gaps: bool
) -> list[Told]:
    """About so many records, with everything between them that a log may have."""
    found: list[Told] = []
    offset = start

    def add(kind: Kind, **more: Any) -> None:
        nonlocal offset
        found.append(Told(partition, offset, kind, **more))
        offset += 1

    while sum(each.kind == "record" for each in found) < count:
        what = chance.random()
        size = chance.randrange(1, 6)
        if what < 0.70 or (orders.spool and what < 0.9):
            for _ in range(size):
                add("record", **orders.next(partition))
        elif what < 0.80:
            for _ in range(size):
                add("record", **orders.next(partition, is_spooled=False))
            add("control")
        elif what < 0.90:
            for _ in range(size):
                add("aborted", **orders.next(partition, is_spooled=False))
            add("control")
        elif has_gaps:
            for _ in range(size):
                add("missing")
    return found


# ------------------------------------------------------------------------ the pipeline, in plain Python


@dataclass
class _Engine:
    """What the pipeline does with a batch."""

    steps: tuple[Step, ...]
    partitions: int
    has_event_time: bool
    seen_ids: set[int] = field(default_factory=set)
    greatest: dict[int, int] = field(default_factory=dict)
    watermark_ms: int | None = None
    windows: dict[tuple[int, str], list[Told]] = field(default_factory=dict)
    number: int = 0

    def run(
        self, spans: Mapping[int, tuple[int, int]], log: Mapping[int, list[Told]]
    ) -> tuple[Made, dict[str, list[Row]], list[Row], list[tuple[Told, str, str]]]:
        inside = [
            each
            for partition, (start, end) in sorted(spans.items())
            for each in log[partition]
            if start <= each.offset < end
        ]
        records = [each for each in inside if each.kind == "record"]
        main: list[Row] = []
        dead: list[Row] = []
        aside: list[tuple[Told, str, str]] = []
        before_ms = self.watermark_ms
        for told in records:
            seen = self.greatest.get(told.partition)
            if told.row is not None:
                self.greatest[told.partition] = max(seen or 0, told.row["at"])
            own = None if seen is None else max(seen - DELAY_MS, before_ms or 0)
            self._one(told, own, main, dead, aside)
        self.number += 1
        closed = self._close()
        routes = Routes(
            main=len(main),
            dead_letter=_counted(row.values["reason"] for row in dead),
            filtered=_counted(step for _, route, step in aside if route == "filtered"),
            duplicate=sum(route == "duplicate" for _, route, _ in aside),
        )
        late = sum(route == "late-for" for _, route, _ in aside)
        made = Made(
            dict(spans),
            _intake(inside, records),
            routes,
            self._digests(main, dead, aside),
            self._taps(main, routes, late, len(closed)),
            self.number,
            before_ms if self.has_event_time else None,
        )
        return made, {"": main, WINDOW: closed}, dead, aside

    def _one(
        self,
        told: Told,
        own_ms: int | None,
        main: list[Row],
        dead: list[Row],
        aside: list[tuple[Told, str, str]],
    ) -> None:
        lineage = (TOPIC, told.partition, told.offset, 0)

        def reject(reason: str) -> None:
            dead.append(Row(lineage, {"key": told.key, "value": told.value, "reason": reason}))

        if told.row is None:
            return reject("parse")
        for step in self.steps:
            match step:
                case Expect() if told.row["amount"] <= 0:
                    return reject(RULE)
                case Filter() if told.row["customer"] == "trial":
                    return aside.append((told, "filtered", step.name))
                case Dedupe():
                    if told.row["id"] in self.seen_ids:
                        return aside.append((told, "duplicate", step.name))
                    self.seen_ids.add(told.row["id"])
                case Window():
                    start = told.row["at"] // SIZE_MS * SIZE_MS
                    if own_ms is not None and start + SIZE_MS <= own_ms:
                        aside.append((told, "late-for", step.name))
                    else:
                        self.windows.setdefault((start, told.row["customer"]), []).append(told)
        main.append(Row(lineage, dict(told.row)))
        return None

    def _close(self) -> list[Row]:
        if len(self.greatest) == self.partitions:
            reached = min(self.greatest.values()) - DELAY_MS
            self.watermark_ms = max(self.watermark_ms or reached, reached)
        if self.watermark_ms is None:
            return []
        over = sorted(
            (customer, start) for start, customer in self.windows if start + SIZE_MS <= self.watermark_ms
        )
        rows = []
        for index, (customer, start) in enumerate(over):
            told = self.windows.pop((start, customer))
            amounts = [each.row["amount"] for each in told if each.row is not None]
            digest = sum(place_hash(TOPIC, each.partition, each.offset) for each in told) & MASK
            values = {
                "customer": customer,
                "window_start": start,
                "window_end": start + SIZE_MS,
                "orders": len(told),
                "total": sum(amounts),
                "most": max(amounts),
                "_hf_count": len(told),
                "_hf_digest": digest - (1 << 64) if digest >> 63 else digest,
            }
            rows.append(Row((WINDOW, 0, self.number, index), values))
        return rows

    def _digests(
        self, main: list[Row], dead: list[Row], aside: list[tuple[Told, str, str]]
    ) -> dict[str, str]:
        totals: dict[str, int] = {}
        named = [("main", row.lineage) for row in main] + [("dead_letter", row.lineage) for row in dead]
        for told, route, step in aside:
            name = f"{route}:{step}" if route == "late-for" else route
            named.append((name, (TOPIC, told.partition, told.offset, 0)))
        for name, (topic, partition, offset, _) in named:
            totals[name] = (totals.get(name, 0) + place_hash(topic, partition, offset)) & MASK
        return {name: f"{digest:016x}" for name, digest in totals.items()}

    def _taps(self, main: list[Row], routes: Routes, late: int, closed: int) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for step in self.steps:
            if isinstance(step, Dedupe):
                more = {"duplicate": routes.duplicate} if routes.duplicate else {}
                found[step.name] = {"taken": len(main), "late": 0, **more, "rows": len(main)}
            elif isinstance(step, Window):
                found[step.name] = {"taken": len(main) - late, "late": late, "rows": closed}
        return found


def _counted(names: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found


def _intake(inside: list[Told], records: list[Told]) -> Intake:
    kinds = _counted(each.kind for each in inside)
    return Intake(
        records=len(records),
        control=kinds.get("control", 0),
        aborted=kinds.get("aborted", 0),
        missing=kinds.get("missing", 0),
        bytes=100 * len(records),
        digest=sum(place_hash(TOPIC, each.partition, each.offset) for each in records) & MASK,
    )


# ------------------------------------------------------------------------ plans


def make_plan(
    seed: int,
    *,
    kinds: tuple[SinkKind, ...] = (),
    window_kinds: tuple[SinkKind, ...] = (),
    has_spool: bool | None = None,
    loses_spooled: bool = False,
    records: int = 45,
) -> Plan:
    """A world on paper. Without `kinds` and `window_kinds` it has one or two sinks of any kind."""
    chance = random.Random(seed)
    if not kinds and not window_kinds:
        kinds = tuple(chance.sample(KINDS, chance.choice((1, 1, 2))))
        if chance.random() < 0.3:
            window_kinds = (chance.choice(("parquet", "delta", "append", "kafka")),)
    partitions = chance.randrange(1, 4)
    spool = chance.getrandbits(63) | 1 if (chance.random() < 0.5 if has_spool is None else has_spool) else 0
    steps: list[Step] = [Expect(RULE, "amount > 0"), Filter(FILTER, "customer <> 'trial'")]
    if chance.random() < 0.4:
        steps.append(Dedupe(DEDUPE, ("id",), within="1d"))
    if window_kinds:
        aggregates = {"orders": "count(*)", "total": "sum(amount)", "most": "max(amount)"}
        steps.append(Window(WINDOW, aggregates, size="1m", key=("customer",)))
    has_duplicates = any(isinstance(step, Dedupe) for step in steps)
    orders = _Orders(chance, partitions, spool, has_duplicates)
    starts = {number: chance.choice((0, 0, chance.randrange(1, 1000))) for number in range(partitions)}
    # Partitions grow together, so that event time does.
    log: dict[int, list[Told]] = {number: [] for number in range(partitions)}
    for _ in range(6):
        for number in range(partitions):
            start = log[number][-1].offset + 1 if log[number] else starts[number]
            size = records // (6 * partitions) + 1
            # A number that a spool gave may have been compacted away: without gaps it has not.
            log[number] += _make_log(chance, orders, start, number, size, has_gaps=not loses_spooled)
    lost = _lose_one(chance, log, spool) if loses_spooled else ""
    engine = _Engine(tuple(steps), partitions, has_duplicates or bool(window_kinds))
    plan = Plan(
        seed,
        log,
        starts,
        [],
        {f"{kind}-sink": Held(f"{kind}-sink", kind) for kind in kinds}
        | {f"{kind}-totals": Held(f"{kind}-totals", kind, WINDOW) for kind in window_kinds},
        Held(DEAD_LETTER, "kafka"),
        [],
        PipelineDefinition(PIPELINE, Source(), tuple(steps)),
        lost_spool_id=lost,
    )
    for spans in _cut(chance, log, starts):
        made, streams, dead, aside = engine.run(spans, log)
        plan.batches.append(made)
        plan.dead.batches.append(dead)
        plan.aside.append(aside)
        for held in plan.sinks.values():
            held.batches.append([Row(row.lineage, dict(row.values)) for row in streams[held.takes]])
    if len(plan.sinks) > 1 and len(plan.batches) > 1 and chance.random() < 0.2:
        plan.lags[chance.choice(sorted(plan.sinks))] = 1
    return plan


def _lose_one(chance: random.Random, log: dict[int, list[Told]], spool: int) -> str:
    """Take a spooled message out of the log, as if no broker had ever had it; the last of a spool is never missed."""
    assert spool, "only a spool numbers its messages"
    newest: dict[int, int] = {}
    for partition, told in log.items():
        newest[partition] = max((each.offset for each in told if each.spool_id), default=-1)
    found = [
        each
        for told in log.values()
        for each in told
        if each.spool_id and each.offset != newest[each.partition]
    ]
    lost = chance.choice(found)
    kept = [each for each in log[lost.partition] if each is not lost]
    log[lost.partition] = [
        each if each.offset < lost.offset else replace(each, offset=each.offset - 1) for each in kept
    ]
    return lost.spool_id


def _cut(
    chance: random.Random, log: Mapping[int, list[Told]], starts: Mapping[int, int]
) -> list[dict[int, tuple[int, int]]]:
    """Batches, one behind the other in every partition; what is behind the last one is pending."""
    count = chance.randrange(2, 5)
    found: list[dict[int, tuple[int, int]]] = [{} for _ in range(count)]
    for partition, told in log.items():
        end = told[-1].offset + 1
        reached = end if chance.random() < 0.5 else chance.randrange(starts[partition] + 1, end + 1)
        cuts = sorted(chance.randrange(starts[partition], reached + 1) for _ in range(count - 1))
        bounds = [starts[partition], *cuts, reached]
        for number in range(count):
            if bounds[number] < bounds[number + 1]:
                found[number][partition] = (bounds[number], bounds[number + 1])
    return [spans for spans in found if spans]


def definition_of(
    plan: Plan, bootstrap: str, directory: str, postgres_url: str, schema: str
) -> PipelineDefinition:
    """The plan's definition, with places to write to."""
    has_event_time = plan.is_stateful
    sinks: list[SinkDefinition] = []
    for held in plan.sinks.values():
        path = f"{directory}/{held.name}"
        match held.kind:
            case "parquet":
                sinks.append(ParquetSink(path, held.name, rows=held.takes))
            case "delta":
                sinks.append(DeltaSink(path, held.name, rows=held.takes))
            case "append" | "upsert":
                table = held.name.replace("-", "_")
                key = ("customer",) if held.kind == "upsert" else ()
                mode: Literal["append", "upsert"] = "upsert" if key else "append"
                sinks.append(
                    PostgresSink(
                        postgres_url, table, held.name, mode, key, schema_name=schema, rows=held.takes
                    )
                )
            case "kafka":
                sinks.append(KafkaSink(f"{held.name}-{plan.seed}", held.name, rows=held.takes))
    return PipelineDefinition(
        PIPELINE,
        Source(
            topics=(TOPIC,),
            bootstrap=bootstrap,
            value=Decoding("json", FIELDS),
            event_time=EventTime("at", "1m") if has_event_time else None,
        ),
        plan.definition.steps,
        tuple(sinks),
        DeadLetter(f"{PIPELINE}-dlt"),
        home=f"{directory}/home",
        directory=directory,
    )
