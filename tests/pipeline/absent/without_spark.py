"""A run of a pipeline whose batches need no Spark: everything else of it is real.

Starts, plans, ledgers, the state's store, reading and staging, the sinks' prepare and commit and what their tasks do
are the pipeline's own. In the place of Spark's frames are Arrow tables, and in that of the steps three of their kind: a
filter, a lookup that reads the pinned version, a deduplication that reads and adds to the state. A `PlainRouter` is for
definitions without steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import Row, StructType

from holdfast.pipeline.aside import DUPLICATE, FILTERED
from holdfast.pipeline.definition.model import Lookup, PipelineDefinition
from holdfast.pipeline.digest import Tally, place_hash
from holdfast.pipeline.engine import batches, running
from holdfast.pipeline.engine.aside import Gathering, SideOutput
from holdfast.pipeline.engine.routing import Routed, Stream
from holdfast.pipeline.engine.staging import Staged
from holdfast.pipeline.engine.stateful import StateUpdate
from holdfast.pipeline.ledger import Routes
from holdfast.pipeline.sinks import dead_letter, kafka, kafka_writer, postgres, writing
from holdfast.pipeline.sinks.postgres_copy import copy_task
from holdfast.pipeline.state import lookups
from holdfast.pipeline.state.operator import OperatorResult
from holdfast.pipeline.state.segments import StateDamaged, StepState, check_present

LINEAGE = pa.struct(
    [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("index", pa.int32())]
)
COLUMNS = pa.schema([("_hf", LINEAGE), ("id", pa.int64()), ("user", pa.string()), ("city", pa.string())])
LETTERS = pa.schema(
    [
        ("_hf", LINEAGE), ("key", pa.binary()), ("value", pa.binary()), ("timestamp_ms", pa.int64()),
        ("reason", pa.string()), ("error", pa.string()),
    ]
)  # fmt: skip
REMEMBERED = pa.schema([("id", pa.int64()), ("_until", pa.int64())])
FOR_EVER = 1 << 60


@dataclass(frozen=True)
class Frame:
    """What sinks ask of Spark's, of an Arrow table."""

    table: pa.Table

    @property
    def schema(self) -> StructType:
        return from_arrow_schema(self.table.schema)

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def mapInArrow(self, task: Callable[..., Any], schema: Any) -> SimpleNamespace:
        def collect() -> list[dict[str, Any]]:
            reports = task(iter(self.table.to_batches()))
            return [row for report in reports for row in report.to_pylist()]

        return SimpleNamespace(
            collect=collect, limit=lambda count: SimpleNamespace(collect=lambda: collect()[:count])
        )

    def toArrow(self) -> pa.Table:
        return self.table

    def collect(self) -> list[Row]:
        return [Row(**row) for row in self.table.to_pylist()]

    @property
    def tally(self) -> Tally:
        places = self.table.column("_hf").to_pylist()
        hashes = (place_hash(at["topic"], at["partition"], at["offset"]) for at in places)
        return Tally(len(places), sum(hashes) % (1 << 64))


class Router:
    """The steps, in the order of the definition."""

    def __init__(self, spark: Any, definition: PipelineDefinition, tables: Any) -> None:
        self._home = tables._home
        [self._lookup] = [step for step in definition.steps if isinstance(step, Lookup)]
        lookups.added_columns(self._lookup, definition.directory)  # as it is asked at a start
        self.operators = {"once": None}
        self.makes_values = True
        self.empty_dead = Frame(LETTERS.empty_table())

    def empty(self, rows: str) -> Frame:
        return Frame(COLUMNS.empty_table())

    def walk(
        self,
        staged: Staged,
        batch_time_ms: int,
        scratch: str,
        update: StateUpdate,
        versions: Mapping[str, str],
    ) -> SimpleNamespace:
        def settle(*, have_run: bool) -> Routed:
            return self._routed(staged, update, versions)

        return SimpleNamespace(is_observed=False, main=None, staged_rows=None, settle=settle)

    def _routed(self, staged: Staged, update: StateUpdate, versions: Mapping[str, str]) -> Routed:
        path = lookups._snapshot(self._lookup, versions[self._lookup.name], self._home)
        cities = {row["login"]: row["city"] for row in pq.read_table(path).to_pylist()}
        seen = self._remembered(update)
        main, letters, filtered, again = [], [], [], []
        for row, place in _placed(staged):
            if row["_error"] is not None:
                letters.append(_letter(row, place))
            elif row["amount"] <= 0:
                filtered.append(place)
            elif row["id"] in seen:
                again.append(place)
            else:
                seen.add(row["id"])
                main.append(
                    {"_hf": place, "id": row["id"], "user": row["user"], "city": cities.get(row["user"])}
                )
        stream = Frame(pa.Table.from_pylist(main, COLUMNS))
        self._remember(update, stream, again)
        dead = Frame(pa.Table.from_pylist(letters, LETTERS))
        routes = Routes(
            len(main),
            {"parse": len(letters)} if letters else {},
            {"real": len(filtered)} if filtered else {},
            len(again),
        )
        aside = [*_left(FILTERED, "real", filtered, 0), *_left(DUPLICATE, "once", again, 1)]
        return Routed({"": _stream(stream)}, _stream(dead), routes, {}, tuple(aside))

    def _remembered(self, update: StateUpdate) -> set[int]:
        held = update.start.steps.get("once")
        found: set[int] = set()
        for segment in held.segments if held else ():
            check_present(update.state.store.path, segment)
            for path in update.state.store.paths(segment):
                try:
                    found.update(pq.read_table(path, schema=REMEMBERED).column("id").to_pylist())
                except (OSError, pa.ArrowException) as error:
                    raise StateDamaged(path, f"cannot be read ({error})") from error
        return found

    def _remember(self, update: StateUpdate, rows: Frame, again: list[Any]) -> None:
        store, held = update.state.store, update.start.steps.get("once")
        directory = store.segment_dir(update.context.label, "once")
        os.makedirs(directory)
        ids = rows.table.column("id")
        table = pa.table({"id": ids, "_until": pa.repeat(pa.scalar(FOR_EVER), len(ids))}, REMEMBERED)
        pq.write_table(
            table, os.path.join(directory, "part-0.parquet"), compression="none", write_page_checksum=True
        )
        segment = store.adopt(directory)
        known = () if held is None else held.segments
        state = replace(held or StepState(), segments=(*known, *([segment] if segment else [])))
        given: Any = rows
        update.results["once"] = OperatorResult(
            given, state, rows.tally, Tally(), Tally(len(again)), rows.tally.rows
        )


class PlainRouter:
    """No steps: what can be read goes on as it is."""

    def __init__(self, spark: Any, definition: PipelineDefinition, tables: Any) -> None:
        assert not definition.steps, "steps need Spark"
        self.operators: dict[str, Any] = {}
        self.makes_values = False
        self.empty_dead = Frame(LETTERS.empty_table())

    def empty(self, rows: str) -> Frame:
        return Frame(pa.table({"_hf": pa.array([], LINEAGE)}))

    def walk(self, staged: Staged, *_: Any) -> SimpleNamespace:
        def settle(*, have_run: bool) -> Routed:
            main, letters = [], []
            for row, place in _placed(staged):
                if row["_error"] is not None:
                    letters.append(_letter(row, place))
                else:
                    main.append(
                        {"_hf": place} | {name: row[name] for name in row if not name.startswith("_")}
                    )
            rows, dead = pa.Table.from_pylist(main) if main else self.empty("").table, letters
            routes = Routes(len(main), {"parse": len(letters)} if letters else {})
            return Routed(
                {"": _stream(Frame(rows))},
                _stream(Frame(pa.Table.from_pylist(dead, LETTERS))),
                routes,
                {},
                (),
            )

        return SimpleNamespace(is_observed=False, main=None, staged_rows=None, settle=settle)


def _placed(staged: Staged) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The rows of a stage, each with its place."""
    for path in staged.files.values():
        for row in pq.read_table(path).to_pylist():
            place = {name: row[f"_{name}"] for name in ("topic", "partition", "offset")}
            yield row, place | {"index": 0}


def _letter(row: Mapping[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    error = {"value": row["_raw"], "timestamp_ms": 0, "reason": "parse", "error": row["_error"]}
    return {"_hf": place, "key": row["_key"], **error}


def _stream(frame: Any) -> Stream:
    return Stream(frame, frame.tally)


def _left(route: str, step: str, places: list[dict[str, Any]], code: int) -> Iterator[Gathering]:
    if places:
        noted = ",".join(f"0,1,{at['partition']},{at['offset']}" for at in places)
        digest = sum(place_hash(at["topic"], at["partition"], at["offset"]) for at in places) % (1 << 64)
        part = SideOutput(route, step, Tally(len(places), digest))
        yield Gathering(lambda: None, {code: part}, code, noted)  # type: ignore[arg-type,return-value]


def _records(sink: Any, rows: Frame) -> Frame:
    found = [
        {
            "_hf": row["_hf"],
            "key": str(row["id"]).encode(),
            "value": f"{row['id']} {row['user']} {row['city']}".encode(),
            "source": f"orders:0@{row['_hf']['offset']}#0".encode(),
        }
        for row in rows.table.to_pylist()
    ]
    kinds = [("_hf", LINEAGE), ("key", pa.binary()), ("value", pa.binary()), ("source", pa.binary())]
    return Frame(pa.Table.from_pylist(found, pa.schema(kinds)))


def _letters(sink: Any, rows: Frame) -> Frame:
    none = pa.array(
        [[]] * rows.table.num_rows, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    )
    return Frame(rows.table.add_column(3, "headers", none))


def _copied(sink: Any, rows: Frame, schema: Any, target: Any, stage: str, digesting: Any) -> list[Any]:
    places = rows.table.column("_hf").combine_chunks()
    flat = {f"_hf_{name}": places.field(name) for name in ("topic", "partition", "offset", "index")}
    table = pa.table(
        {"_hf": places, **flat, **{name: rows.table.column(name) for name in ("id", "user", "city")}}
    )
    with sink._explained() as connection:
        statement = target.copy(stage).as_string(connection)
    url = sink._definition.url
    found = Frame(table).mapInArrow(lambda given: copy_task(given, url, statement, digesting), None)
    return found.collect()  # type: ignore[no-any-return]


@contextmanager
def without_spark(router: type[Any] = Router, *, retries: int = 0) -> Iterator[Any]:
    """Inside, what it gives stands for the session of `run_pipeline`."""
    session = SimpleNamespace(sparkContext=Mock(master="local[1]", environment={}))
    same = lambda rows, schema: rows  # noqa: E731
    with (
        patch.object(running, "refuse_session", lambda *given: None),
        patch.object(running, "refuse_changed", lambda *given: ""),
        patch.object(running, "Router", router),
        patch.object(running, "BACK_OFF_MS", (0,)),
        patch.object(running, "RETRIES_MAX", retries),
        patch.dict(kafka_writer.DEFAULTS, {"transaction.timeout.ms": 5_000}),
        patch.object(batches, "with_checked_text", lambda rows: rows),
        patch.object(writing, "projected", same),
        patch.object(postgres.PostgresSinkWriter, "_copy", _copied),
        patch.object(kafka.KafkaSinkWriter, "records", _records),
        patch.object(dead_letter.DeadLetterSink, "records", _letters),
    ):
        yield session
