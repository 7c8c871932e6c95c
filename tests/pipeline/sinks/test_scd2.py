"""Versions of a key with their spans, in PostgreSQL and in Delta: the same however batches and partitions lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pyarrow as pa
import pyspark.sql
import pytest
from deltalake import DeltaTable
from tests.audit.soundness.columns import Frame, Functions
from tests.audit.soundness.executor import RESERVED
from tests.pipeline.sinks.conftest import Batches

from holdfast.pipeline.definition.model import DeltaSink, PostgresSink
from holdfast.pipeline.ledger import Entry, Erasure
from holdfast.pipeline.positions import BatchRange
from holdfast.pipeline.row_digest import DigestKey
from holdfast.pipeline.sealing import sealed
from holdfast.pipeline.sinks.base import RowsRejected, Sink, SinkContext, SinkError
from holdfast.pipeline.sinks.delta_upsert import DeltaUpsertWriter
from holdfast.pipeline.sinks.erasing import DeltaEraser, Request
from holdfast.pipeline.sinks.erasing_postgres import PostgresEraser
from holdfast.pipeline.sinks.postgres import PostgresSinkWriter
from holdfast.testing.postgres import PostgresServer

pytestmark = pytest.mark.check  # a PostgreSQL server of its own
KEY = DigestKey(b"k" * 32)
COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("at", pa.int64()), ("_key_id", pa.int64())])
SHOWN = "id, name, at, valid_from, valid_to, is_current, is_deleted"
Row = dict[str, Any]
Place = tuple[int, int, Row]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(settings=("fsync=off",)) as server:
        yield server


@pytest.fixture(autouse=True)
def functions() -> Iterator[None]:
    known = Functions()
    known.known["name = 'gone'"] = (lambda row: row["name"] == "gone", pa.bool_())
    with patch.object(pyspark.sql, "functions", known):
        yield


class Tried:
    """One sink of a kind, and what is in it."""

    def __init__(self, sink: Any, read: Callable[[], list[tuple[Any, ...]]]) -> None:
        self.sink: Sink = sink
        self.read = read
        self.cut = Batches(sink.name)
        sink.key = KEY

    def write(self, number: int, rows: Sequence[Place]) -> Entry:
        batch = self.cut.at(number, number + 1)
        prepared = self.sink.prepare(batch, frame(rows))  # type: ignore[arg-type]
        previous = self.sink.last_entry()
        entry = sealed(self.cut.entry(batch, previous, prepared.rows), previous, prepared.written, KEY)
        return prepared.commit(entry) or entry


@pytest.fixture(params=["postgres", "delta"])
def tried(
    request: pytest.FixtureRequest, server: PostgresServer, tmp_path: Path, context: SinkContext
) -> Iterator[Tried]:
    words: dict[str, Any] = {
        "mode": "scd2", "key": ("id",), "order_by": "at", "delete_when": "name = 'gone'", "name": "versions"
    }  # fmt: skip
    if request.param == "delta":
        path = str(tmp_path / "table")
        table = DeltaUpsertWriter(DeltaSink(path, **words), "shop")
        yield Tried(table, lambda: _shown(DeltaTable(path).to_pyarrow_table().to_pylist()))
        return
    with psycopg.connect(server.url, autocommit=True, row_factory=psycopg.rows.dict_row) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        sink = PostgresSinkWriter(PostgresSink(server.url, "versions", **words), "shop")
        sink.open(context, pyspark.sql)  # type: ignore[arg-type]  # anything but nothing: the ledger is made
        yield Tried(sink, lambda: _shown(connection.execute("SELECT * FROM versions").fetchall()))
        sink.close()


def _shown(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return sorted(tuple(row[name] for name in SHOWN.split(", ")) for row in rows)


def frame(rows: Sequence[Place]) -> Frame:
    listed = [
        {"_hf": {"topic": "orders", "partition": partition, "offset": offset, "index": 0}, **row}
        for partition, offset, row in rows
    ]
    return Frame(pa.Table.from_pylist(listed, pa.schema([*RESERVED, *COLUMNS])))


def versions(rows: Sequence[Place]) -> list[tuple[Any, ...]]:
    """What must be there, by the book."""
    last: dict[tuple[int, int], tuple[int, int, Row]] = {}
    for partition, offset, row in sorted(rows, key=lambda each: each[:2]):
        last[row["id"], row["at"]] = (partition, offset, row)
    found = []
    for (number, at), (_, _, row) in last.items():
        later = [other for key, other in last if key == number and other > at]
        is_gone = row["name"] == "gone"
        until = at if is_gone else min(later, default=None)
        found.append((number, row["name"], at, at, until, not is_gone and not later, is_gone))
    return sorted(found)


@pytest.mark.parametrize("seed", range(3))
def test_versions_and_spans_are_the_same_however_rows_come(tried: Tried, seed: int) -> None:
    chance = random.Random(seed)
    rows = [
        (partition, offset, {"id": chance.randrange(3), "name": chance.choice(("a", "b", "gone")), "at": at})
        for partition in range(3)
        for offset in range(10)
        for at in [chance.randrange(8)]
    ]
    wanted = versions(rows)
    chance.shuffle(rows)
    number = 0
    while rows:
        size = chance.randrange(1, 9)
        entry = tried.write(number, rows[:size])
        rows, number = rows[size:], number + 1
    assert tried.read() == wanted
    assert tried.sink.last_entry() == entry


def test_a_late_version_is_put_in_its_place_and_a_deletion_is_remembered(tried: Tried) -> None:
    tried.write(0, [(0, 0, {"id": 1, "name": "a", "at": 5})])
    assert tried.read() == [(1, "a", 5, 5, None, True, False)]
    tried.write(1, [(0, 1, {"id": 1, "name": "gone", "at": 9}), (0, 2, {"id": 2, "name": "gone", "at": 4})])
    assert tried.read()[0] == (1, "a", 5, 5, 9, False, False)
    # Both are older than the deletion of their key: neither brings it back.
    tried.write(2, [(1, 0, {"id": 1, "name": "late", "at": 7}), (1, 1, {"id": 2, "name": "late", "at": 3})])
    assert [row[:2] + row[3:6] for row in tried.read()] == [
        (1, "a", 5, 7, False),
        (1, "gone", 9, 9, False),
        (1, "late", 7, 9, False),
        (2, "gone", 4, 4, False),
        (2, "late", 3, 4, False),
    ]


def test_a_row_without_its_beginning_is_named_and_a_deletion_takes_the_records_key(tried: Tried) -> None:
    # Which row of a table it is, only Spark's tasks tell: the copy itself says no more.
    with pytest.raises((RowsRejected, RuntimeError), match=r"column \W*at\W"):
        tried.sink.prepare(
            tried.cut.at(0, 1),
            frame([(0, 0, {"id": 1, "name": "a", "at": 1}), (0, 1, {"id": 1, "name": "b"})]),  # type: ignore[arg-type]
        )
    tried.write(0, [(0, 0, {"id": 1, "name": "a", "at": 1}), (0, 2, {"name": "gone", "_key_id": 1, "at": 2})])
    assert [row[:2] + row[4:6] for row in tried.read()] == [(1, "a", 2, False), (1, "gone", 2, False)]


def test_versions_that_are_erased_are_no_end_of_others(tried: Tried) -> None:
    entry = tried.write(0, [(0, at, {"id": 1, "name": "abc"[at], "at": at}) for at in range(3)])

    def seal(erasure: Erasure, went: int) -> Entry:
        return replace(entry, number=1, range=BatchRange({}), rows=0, erased=erasure)

    request = Request("at = 1", "asked", KEY)
    if isinstance(tried.sink, PostgresSinkWriter):
        assert PostgresEraser(tried.sink._definition, tried.sink, request).erase(seal) is not None
        assert [row[1:6] for row in tried.read()] == [("a", 0, 0, 2, False), ("c", 2, 2, None, True)]
        return
    assert isinstance(tried.sink, DeltaUpsertWriter)
    with pytest.raises(SinkError, match="keeps versions in Delta, where rows cannot be erased yet"):
        DeltaEraser(tried.sink._definition, tried.sink, request).erase(seal)
