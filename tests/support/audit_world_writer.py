"""Writes the worlds of `audit_worlds`: the log into a `FakeCluster`, the sinks where their readers look for them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Self

import pyarrow as pa
from tests.support.audit_sinks import DeltaBuilder, Ledger, ParquetBuilder, PostgresBuilder, rows_of
from tests.support.audit_topics import (
    FakeTopics,
    Sent,
    TopicBuilder,
    append_transaction,
    dead_letter,
    dead_letters,
    sink_record,
)
from tests.support.audit_worlds import PIPELINE, TOPIC, Held, Made, Plan, Row, Told, definition_of, iso
from tests.support.fake_cluster import FakeCluster, FakePartition

from holdfast.client.messages import away_from_home
from holdfast.pipeline.aside import schema as aside_schema
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.model import PipelineDefinition, PostgresSink
from holdfast.pipeline.engine.aside import AsideFiles
from holdfast.pipeline.ledger import STATELESS, Entry
from holdfast.pipeline.positions import BatchRange, Place, Span
from holdfast.wire.batch import Record, build_batch

TIME: Final = pa.timestamp("us", tz="UTC")
MAIN_TYPES: Final = {
    "id": pa.int64(),
    "customer": pa.string(),
    "amount": pa.float64(),
    "at": TIME,
    "note": pa.string(),
}
WINDOW_TYPES: Final = {
    "customer": pa.string(),
    "window_start": TIME,
    "window_end": TIME,
    "orders": pa.int64(),
    "total": pa.float64(),
    "most": pa.float64(),
    "_hf_count": pa.int64(),
    "_hf_digest": pa.int64(),
}
FILES: Final = 2
"""Of a batch, in sinks that write files."""


@dataclass
class World:
    """A plan that is written."""

    plan: Plan
    definition: PipelineDefinition
    directory: str
    files: dict[str, list[str]] = field(default_factory=dict)
    """By sink: the files its batches wrote, in order."""
    places: dict[int, Place] = field(default_factory=dict)


@dataclass
class WorldWriter:
    """Worlds one after the other; each removes the one before it."""

    cluster: FakeCluster
    directory: str
    postgres_url: str = ""
    _schema: str = ""
    _connection: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        if self._connection is not None:
            self._connection.close()

    def clear(self) -> None:
        self.cluster.topics.clear()
        shutil.rmtree(os.path.join(self.directory, "world"), ignore_errors=True)
        if self._schema:
            self.run(f'DROP SCHEMA "{self._schema}" CASCADE')
            self._schema = ""

    def write(self, plan: Plan) -> World:
        self.clear()
        directory = os.path.join(self.directory, "world")
        os.makedirs(directory)
        schema = ""
        if any(held.kind in ("append", "upsert") for held in plan.sinks.values()):
            schema = self._schema = f"world_{plan.seed}"
            self.run(f'CREATE SCHEMA "{schema}"')
        bootstrap = self.cluster.bootstrap_servers
        definition = definition_of(plan, bootstrap, directory, self.postgres_url, schema)
        world = World(plan, definition, directory)
        topic = self.cluster.add_topic(TOPIC, len(plan.log))
        for number, told in plan.log.items():
            write_log(topic.partitions[number], told, plan.starts[number])
            world.places[number] = Place(TOPIC, topic.topic_id, number)
        self._write_aside(world)
        for held in (plan.dead, *plan.sinks.values()):
            self._write_sink(world, held)
        return world

    def run(self, statement: str) -> Any:
        """Tell the database something."""
        import psycopg

        if self._connection is None:
            self._connection = psycopg.connect(self.postgres_url, autocommit=True)
            self._connection.execute("SET client_min_messages = warning")
            self._connection.execute("SET synchronous_commit = off")
        return self._connection.execute(statement)

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = self.run(statement).fetchall()
        return found

    def _write_sink(self, world: World, held: Held) -> None:
        plan = world.plan
        ledger = Ledger(PIPELINE, held.name, fingerprint(world.definition))
        commit = self._committing(world, held)
        starts = {world.places[number]: start for number, start in plan.starts.items()}
        commit(ledger.opening(starts), None)
        count = len(plan.batches) - plan.lags.get(held.name, 0)
        for made, rows, told in zip(
            plan.batches[:count], held.batches[:count], _counts(plan, held)[:count], strict=True
        ):
            commit(_entry(world, ledger, made, told), rows)

    def _committing(self, world: World, held: Held) -> Any:
        plan, name = world.plan, held.name
        path = os.path.join(world.directory, name)
        types = WINDOW_TYPES if held.takes else MAIN_TYPES
        written = world.files.setdefault(name, [])
        if held is plan.dead:
            letters = dead_letters(FakeTopics(self.cluster), f"{PIPELINE}-dlt", PIPELINE)
            return lambda entry, rows: letters.commit(entry, [_letter(plan, row) for row in rows or ()])
        if held.kind == "parquet":
            parquet = ParquetBuilder(path, FILES)
            return lambda entry, rows: written.extend(
                parquet.commit(entry, None if rows is None else table_of(rows, types))
            )
        if held.kind == "delta":
            delta = DeltaBuilder(path, PIPELINE, name, FILES)
            return lambda entry, rows: written.extend(delta.commit(entry, table_of(rows or [], types)))
        if held.kind == "kafka":
            topic = TopicBuilder(FakeTopics(self.cluster), f"{name}-{plan.seed}", PIPELINE, name)
            return lambda entry, rows: topic.commit(entry, [_sent(plan, held, row) for row in rows or ()])
        sink = next(each for each in world.definition.sinks if each.name == name)
        assert isinstance(sink, PostgresSink)
        postgres = PostgresBuilder(sink, PIPELINE, self._connection)
        return lambda entry, rows: postgres.commit(entry, table_of(rows or [], types))

    def _write_aside(self, world: World) -> None:
        files = AsideFiles(os.path.join(world.directory, "home"))
        os.makedirs(os.path.join(world.directory, "home"), exist_ok=True)
        mark = fingerprint(world.definition)
        for made, left in zip(world.plan.batches, world.plan.aside, strict=True):
            rows = sorted(((each.partition, each.offset, route, step) for each, route, step in left))
            if rows:
                files.write(_range(world, made), mark, _aside_table(rows), [])


def _counts(plan: Plan, held: Held) -> list[int]:
    """How many rows the ledger says: as the plan was made, whatever was changed since."""
    if held.takes:
        return [made.taps[held.takes]["rows"] for made in plan.batches]
    if held is plan.dead:
        return [sum(made.routes.dead_letter.values()) for made in plan.batches]
    return [made.routes.main for made in plan.batches]


def _range(world: World, made: Made) -> BatchRange:
    return BatchRange(
        {world.places[number]: Span(start, end, 0) for number, (start, end) in made.spans.items()}
    )


def _entry(world: World, ledger: Ledger, made: Made, rows: int) -> Entry:
    return ledger.entry(
        {world.places[number]: span for number, span in made.spans.items()},
        rows=rows,
        intake=made.intake,
        routes=made.routes,
        digests=dict(made.digests),
        taps=made.taps if world.plan.is_stateful else {},
        state=made.state if world.plan.is_stateful else STATELESS,
        watermark_ms=made.watermark_ms,
    )


def table_of(rows: Sequence[Row], types: dict[str, pa.DataType]) -> pa.Table:
    columns = {}
    for name, kind in types.items():
        values = [row.values[name] for row in rows]
        if pa.types.is_timestamp(kind):
            values = [None if each is None else each * 1000 for each in values]
        columns[name] = pa.array(values, kind)
    return rows_of([row.lineage for row in rows], columns)


def _letter(plan: Plan, row: Row) -> Sent:
    topic, partition, offset, _ = row.lineage
    key, value, reason = (row.values[name] for name in ("key", "value", "reason"))
    told = next((each for each in plan.log.get(partition, ()) if each.offset == offset), None)
    own = () if told is None else away_from_home(_headers(told))
    return dead_letter(PIPELINE, (topic, partition, offset), key, value, reason=reason, own=own)


def _sent(plan: Plan, held: Held, row: Row) -> Sent:
    values = {
        name: iso(each).replace("Z", "000Z") if name in ("at", "window_start", "window_end") else each
        for name, each in row.values.items()
        if name != "_key"
    }
    key: bytes | None
    if held.takes:
        key = json.dumps({"customer": row.values["customer"]}, separators=(",", ":")).encode()
    else:
        key = row.values.get("_key", _key_of(plan, row.lineage))
    return sink_record(row.lineage, key, json.dumps(values, ensure_ascii=False).encode())


def _key_of(plan: Plan, lineage: tuple[str, int, int, int]) -> bytes | None:
    _, partition, offset, _ = lineage
    return next((each.key for each in plan.log.get(partition, ()) if each.offset == offset), None)


def _aside_table(rows: Sequence[tuple[int, int, str, str]]) -> pa.Table:
    partitions, offsets, routes, steps = zip(*rows, strict=True)
    columns: list[Any] = [
        [TOPIC] * len(rows),
        list(partitions),
        list(offsets),
        [0] * len(rows),
        list(routes),
        list(steps),
    ]
    arrays = [
        pa.array(each, field.type.value_type).dictionary_encode().cast(field.type)
        if pa.types.is_dictionary(field.type)
        else pa.array(each, field.type)
        for each, field in zip(columns, aside_schema(), strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=aside_schema())


# ------------------------------------------------------------------------ the log


def write_log(partition: FakePartition, told: Sequence[Told], start: int) -> None:
    """Every offset as it is told: batches, transactions and their markers, gaps."""
    partition.log_start = partition.log_end = start
    runs = [(kind, list(run)) for kind, run in groupby(told, key=lambda each: each.kind)]
    for at, (kind, run) in enumerate(runs):
        follows = runs[at + 1][0] if at + 1 < len(runs) else ""
        if kind == "record":
            last = run[-1:] if follows == "control" else []
            if run[: len(run) - len(last)]:
                _append(partition, run[: len(run) - len(last)])
            if last:
                _append_transaction(partition, last, is_commit=True)
        elif kind == "aborted":
            _append_transaction(partition, run, is_commit=False)
    partition.log_end = told[-1].offset + 1


def _headers(told: Told) -> tuple[tuple[str, bytes | None], ...]:
    return (("hf-id", told.spool_id.encode()),) if told.spool_id else ()


def _append(partition: FakePartition, run: Sequence[Told]) -> None:
    first = run[0]
    records = [
        Record(each.offset - first.offset, each.time_ms - first.time_ms, each.key, each.value, _headers(each))
        for each in run
    ]
    batch = build_batch(records, base_timestamp=first.time_ms)
    partition.append(batch, base_offset=first.offset)


def _append_transaction(partition: FakePartition, run: Sequence[Told], *, is_commit: bool) -> None:
    partition.log_end = run[0].offset
    sent = [Sent(each.key, each.value, _headers(each)) for each in run]
    append_transaction(
        partition, sent, producer_id=77 + run[0].offset, timestamp_ms=run[0].time_ms, is_commit=is_commit
    )
