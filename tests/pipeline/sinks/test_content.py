"""What comes back from every kind of sink has the digest that it was written with, whatever the types; and what
somebody changed has not."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.audit.sinks.base import SinkReader
from holdfast.audit.sinks.opening import open_dead_letters, open_sink
from holdfast.audit.unaltered import NO_COLUMN, NO_DIGEST, Keeper, Unaltered, check
from holdfast.pipeline.definition.model import (
    DeadLetter,
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
    Source,
)
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.row_digest import DigestKey
from holdfast.pipeline.sealing import sealed
from holdfast.pipeline.sinks.base import Sink, SinkContext
from holdfast.pipeline.sinks.building import build_dead_letter, build_sink
from holdfast.testing.postgres import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEY = DigestKey(b"k" * 32)
COLUMNS = (
    "id bigint, flag boolean, tiny tinyint, small smallint, whole int, single float, many double, "
    "price decimal(12,3), tall decimal(38,18), text string, raw binary, day date, at timestamp, wall timestamp_ntz, "
    "tags array<string>, nested struct<b:double,a:struct<c:timestamp,d:decimal(5,2)>>, by map<string,double>, "
    "deep array<struct<x:int,y:array<string>>>"
)
UTC = datetime.UTC
FULL: dict[str, Any] = {
    "flag": True,
    "tiny": -3,
    "small": 300,
    "whole": -70_000,
    "single": 0.1,
    "many": 0.1,
    "price": decimal.Decimal("-12345.600"),
    "tall": decimal.Decimal("0.000000000000000001"),
    "text": 'quotes " and , commas\nand \\N backslashes \\ \t ü 🦊',
    "raw": b"\x00\xffA",
    "day": datetime.date(2026, 2, 28),
    "at": datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    "wall": datetime.datetime(1969, 1, 2, 3, 4, 5, 100),
    "tags": ["a", 'b"c', None],
    "nested": {
        "b": 1e300,
        "a": {"c": datetime.datetime(2026, 1, 1, tzinfo=UTC), "d": decimal.Decimal("1.50")},
    },
    "by": {"z": 1.0, "aa": -0.5, "b": None},
    "deep": [{"x": 1, "y": ["a"]}, None, {"x": None, "y": []}],
}
VALUES: list[dict[str, Any]] = [
    {"id": 0, **FULL},
    {"id": 1},
    {"id": 2, "many": float("nan"), "single": float("-inf"), "text": "", "raw": b"", "tags": [], "by": {}},
    {"id": 3, "many": -0.0, "single": -0.0, "nested": {"b": -0.0, "a": None}, "tall": decimal.Decimal(0)},
    {
        "id": 4,
        "many": float("inf"),
        "day": datetime.date(1583, 1, 1),
        "nested": {"b": float("nan"), "a": None},
    },
    {"id": 5, "many": 5e-324, "single": 1e-45, "by": {"x": 123456789.125, "ü": 1e-7}, "flag": False},
]


class Bench:
    """Sinks, written as the engine writes them and read as the audit does."""

    def __init__(self, context: SinkContext, spark: SparkSession, batches: Any) -> None:
        self.context, self.spark, self.batches = context, spark, batches
        self.opened: list[Sink] = []
        self.key: DigestKey | None = KEY

    def sink(self, definition: SinkDefinition | None, letters: DeadLetter | None = None) -> Writing:
        whole = PipelineDefinition(
            "shop",
            Source(("orders",)),
            sinks=() if definition is None else (definition,),
            dead_letter=letters,
            directory=str(Path(self.context.home).parent),
        )
        return Writing(self, whole, definition)


class Writing:
    def __init__(self, bench: Bench, whole: PipelineDefinition, definition: SinkDefinition | None) -> None:
        self.bench, self.whole, self.definition = bench, whole, definition
        self.cut = bench.batches("dead-letter" if definition is None else definition.name)
        self.last: Entry | None = None

    def write(self, start: int, end: int, rows: DataFrame) -> Entry:
        made = (
            build_dead_letter(self.whole)
            if self.definition is None
            else build_sink(self.whole, self.definition)
        )
        made.open(self.bench.context, self.bench.spark)
        try:
            made.key = self.bench.key
            batch = self.cut.at(start, end)
            prepared = made.prepare(batch, rows)
            entry = self.cut.entry(batch, made.last_entry(), prepared.rows)
            if self.bench.key is not None:
                entry = sealed(entry, made.last_entry(), prepared.written, self.bench.key)
            self.last = prepared.commit(entry) or entry
            assert made.last_entry() == self.last
            return self.last
        finally:
            made.close()

    def reader(self) -> SinkReader:
        settings = dict(self.bench.context.source)
        if self.definition is None:
            return open_dead_letters(self.whole, settings)
        return open_sink(self.whole, self.definition, settings)

    def check(self) -> Unaltered:
        reader = self.reader()
        try:
            return check(reader, Keeper(KEY))
        finally:
            reader.close()


@pytest.fixture
def bench(context: SinkContext, spark: SparkSession, batches: Any) -> Bench:
    return Bench(context, spark, batches)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def database(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        yield connection


def names(columns: str = COLUMNS) -> set[str]:
    import re

    return {"_hf", *re.findall(r"(?:^|, )(\w+) ", columns)}


def unaltered(found: Unaltered, rows: int, columns: set[str]) -> None:
    assert found.findings == ()
    assert (found.rows, found.unaltered, found.trusted, found.why) == (rows, rows, 0, "")
    assert set(found.columns) == columns


@pytest.mark.parametrize("partition_by", [(), ("day", "flag", "text", "price")], ids=["whole", "partitioned"])
def test_files_of_every_type_come_back_unaltered(
    bench: Bench, rows: Any, tmp_path: Path, partition_by: tuple[str, ...]
) -> None:
    # A directory cannot be told from null where its text is empty.
    values = [{**value, "text": value.get("text") or None} for value in VALUES]
    for definition in (
        ParquetSink(str(tmp_path / "files"), "files", partition_by=partition_by),
        DeltaSink(str(tmp_path / "table"), "table", partition_by=partition_by),
    ):
        sink = bench.sink(definition)
        sink.write(0, 6, rows(values, COLUMNS).repartition(2))
        sink.write(6, 9, rows([], COLUMNS))
        sink.write(9, 15, rows(values, COLUMNS, start=9))
        unaltered(sink.check(), 12, names())


def test_a_file_moved_to_another_directory_is_found(bench: Bench, rows: Any, tmp_path: Path) -> None:
    sink = bench.sink(ParquetSink(str(tmp_path / "files"), "files", partition_by=("name",)))
    sink.write(0, 2, rows([{"id": 1, "name": "nl"}, {"id": 2, "name": "de"}]))
    [batch] = (tmp_path / "files").glob("batch=*")
    (batch / "name=nl").rename(batch / "name=fr")
    [finding] = sink.check().findings
    assert "are not those that were written" in finding.detail


def test_a_cell_of_a_delta_table_changed_by_its_own_means_is_found(
    bench: Bench, rows: Any, tmp_path: Path
) -> None:
    from deltalake import DeltaTable

    sink = bench.sink(DeltaSink(str(tmp_path / "table"), "table"))
    for start in (0, 3):
        sink.write(start, start + 3, rows([{"id": each, "name": "n"} for each in range(3)], start=start))
    table = DeltaTable(str(tmp_path / "table"))
    table.optimize.compact()
    unaltered(sink.check(), 6, {"_hf", "id", "name"})
    table.update(updates={"name": "'other'"}, predicate="_hf.offset = 4")
    [finding] = sink.check().findings
    assert finding.ranges == ((3, 5),)


def test_appended_rows_of_every_type_come_back_unaltered(
    bench: Bench, rows: Any, server: PostgresServer, database: Any
) -> None:
    sink = bench.sink(PostgresSink(server.url, "orders", "table"))
    sink.write(0, 6, rows(VALUES, COLUMNS).repartition(2))
    sink.write(6, 12, rows(VALUES, COLUMNS, start=6))
    unaltered(sink.check(), 12, names())
    for change in (
        "nested = jsonb_set(nested, '{a,d}', '1.51')",
        "many = 0.0 WHERE id = 3",
        "at = at + interval '1 microsecond'",
        "raw = '\\x00ff42'",
        "by = by || '{\"b\": 0}'",
        "_hf_index = 1",
        "text = NULL",
    ):
        changed = change if "WHERE" in change else f"{change} WHERE id = 0"
        with database.transaction(force_rollback=False):
            database.execute(
                f"CREATE TABLE kept AS SELECT * FROM orders; UPDATE orders SET {changed} AND _hf_offset >= 6"
            )
        [finding] = sink.check().findings
        assert finding.ranges == ((6, 11),), change
        database.execute("TRUNCATE orders; INSERT INTO orders SELECT * FROM kept; DROP TABLE kept")
    unaltered(sink.check(), 12, names())


def test_columns_that_a_table_made_by_hand_spells_otherwise_are_not_in_the_digest(
    bench: Bench, rows: Any, server: PostgresServer, database: Any
) -> None:
    database.execute(
        "CREATE TABLE orders (_hf_topic text, _hf_partition int, _hf_offset bigint, _hf_index int, "
        "id numeric, name uuid, price real, own text DEFAULT 'mine')"
    )
    sink = bench.sink(PostgresSink(server.url, "orders", "table"))
    given = [{"id": 1, "name": "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "price": 1.5}]
    sink.write(0, 1, rows(given, "id bigint, name string, price float"))
    unaltered(sink.check(), 1, {"_hf", "price"})


def upserted(server: PostgresServer, **settings: Any) -> PostgresSink:
    return PostgresSink(server.url, "orders", "table", mode="upsert", key=("id",), **settings)


def test_rows_of_an_upsert_keep_their_digests_through_updates_and_deletes(
    bench: Bench, rows: Any, server: PostgresServer, database: Any
) -> None:
    sink = bench.sink(upserted(server, delete_when="flag = false AND whole = -1"))
    sink.write(0, 6, rows(VALUES, COLUMNS).repartition(2))
    unaltered(sink.check(), 6, names())
    gone = {**VALUES[4], "flag": False, "whole": -1}
    sink.write(6, 9, rows([{**VALUES[0], "whole": 5}, {"id": 99, "tiny": 1}, gone], COLUMNS, start=6))
    unaltered(sink.check(), 6, names())
    sink.write(9, 12, rows([], COLUMNS))
    unaltered(sink.check(), 6, names())
    database.execute("CREATE TABLE kept AS SELECT * FROM orders")
    for change, word in (
        ("UPDATE orders SET whole = 6 WHERE id = 0", "1 rows are not those"),
        ("DELETE FROM orders WHERE id = 99", "rows were removed"),
        ("UPDATE orders SET _hf_content = _hf_content + 1 WHERE id = 99", "rows"),
        ("INSERT INTO orders SELECT (kept).* FROM kept WHERE false", ""),
        (
            "UPDATE orders a SET _hf_content = b._hf_content, whole = b.whole, _hf_offset = b._hf_offset "
            "FROM orders b WHERE a.id = 99 AND b.id = 0",
            "1 rows are not those",
        ),
    ):
        database.execute(change)
        found = " ".join(finding.detail for finding in sink.check().findings)
        assert bool(found) == bool(word), change
        assert word in found
        database.execute("TRUNCATE orders; INSERT INTO orders SELECT * FROM kept")
    unaltered(sink.check(), 6, names())


def test_an_older_row_put_back_with_its_digest_is_found_by_the_total(
    bench: Bench, rows: Any, server: PostgresServer, database: Any
) -> None:
    sink = bench.sink(upserted(server))
    sink.write(0, 1, rows([{"id": 1, "name": "old"}]))
    database.execute("CREATE TABLE older AS SELECT * FROM orders")
    sink.write(1, 2, rows([{"id": 1, "name": "new"}], start=1))
    unaltered(sink.check(), 1, {"_hf", "id", "name"})
    database.execute("TRUNCATE orders; INSERT INTO orders SELECT * FROM older")
    [finding] = sink.check().findings
    assert "older ones put back" in finding.detail


def test_rows_of_an_upsert_without_a_digest_are_trusted(
    bench: Bench, rows: Any, server: PostgresServer, database: Any
) -> None:
    bench.key = None
    sink = bench.sink(upserted(server))
    sink.write(0, 2, rows([{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]))
    bench.key = KEY
    sink.write(2, 3, rows([{"id": 3, "name": "c"}], start=2))
    assert sink.check() == Unaltered("table", why=NO_COLUMN) or sink.check().why
    assert "_hf_content" not in {
        row[0] for row in database.execute("SELECT attname FROM pg_attribute").fetchall()
    }
    database.execute("ALTER TABLE orders ADD COLUMN _hf_content numeric(39,0)")
    sink.write(3, 4, rows([{"id": 4, "name": "d"}], start=3))
    found = sink.check()
    assert (found.rows, found.unaltered, found.trusted, found.why, found.findings) == (4, 1, 3, NO_DIGEST, ())
    made = build_sink(sink.whole, upserted(server))
    made.open(bench.context, None)
    made.forget()
    made.close()
    sink.write(0, 1, rows([{"id": 1, "name": "e"}]))
    found = sink.check()
    assert (found.unaltered, found.trusted, found.findings) == (1, 3, ())


def test_after_a_change_of_key_the_rows_before_are_trusted(
    bench: Bench, rows: Any, server: PostgresServer, database: Any
) -> None:
    bench.key = DigestKey(b"o" * 32)
    sink = bench.sink(upserted(server))
    sink.write(0, 2, rows([{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]))
    bench.key = KEY
    sink.write(2, 3, rows([{"id": 3, "name": "c"}], start=2))
    found = sink.check()
    assert (found.unaltered, found.trusted, found.findings) == (1, 2, ())


@pytest.fixture
def cluster(bench: Bench, holdfast_broker: Any) -> str:
    bootstrap = str(holdfast_broker.bootstrap_servers)
    bench.context = replace(bench.context, source={"bootstrap.servers": bootstrap})
    return bootstrap


@pytest.mark.holdfast(mode="thread")
@pytest.mark.parametrize(
    "headers", [{}, {"kind": "name", "none": "CAST(NULL AS STRING)"}], ids=["plain", "headers"]
)
def test_records_come_back_unaltered_and_a_planted_one_is_found(
    bench: Bench, rows: Any, cluster: str, headers: dict[str, str]
) -> None:
    from confluent_kafka import Producer

    sink = bench.sink(KafkaSink("out", "topic", headers=headers))
    sink.write(0, 3, rows([{"id": each, "name": f"n{each}"} for each in range(3)]))
    sink.write(3, 5, rows([{"id": 9, "_tombstone": True}, {"id": 8, "_key": None}], start=3))
    unaltered(sink.check(), 5, {"_hf", "key", "value", "headers"})
    producer = Producer({"bootstrap.servers": cluster})
    producer.produce("out", b'{"id":9,"name":"n"}', b"k", headers=[("hf-source", b"orders:0@4#0")])
    producer.flush()
    [finding] = sink.check().findings
    assert finding.ranges == ((3, 4),)


@pytest.mark.holdfast(mode="thread")
def test_dead_letters_come_back_unaltered(bench: Bench, rows: Any, cluster: str) -> None:
    at = datetime.datetime(2026, 1, 1, tzinfo=UTC)
    sink = bench.sink(None, DeadLetter("letters"))
    own = [{"key": "mine", "value": b"x"}, {"key": "none", "value": None}]
    given = [
        {"_raw": b"\xff", "_headers": own, "_reason": "parse", "_error": "no JSON", "_timestamp": at},
        {"_raw": None, "_key": None, "_reason": "rule", "_error": None, "_timestamp": at},
    ]
    sink.write(0, 2, rows(given, "id bigint"))
    unaltered(sink.check(), 2, {"_hf", "key", "value", "headers", "failure"})


def test_an_empty_batch_and_one_more_column_go_on_with_the_total(
    bench: Bench, rows: Any, tmp_path: Path
) -> None:
    sink = bench.sink(ParquetSink(str(tmp_path / "files"), "files", schema="add-columns"))
    sink.write(0, 1, rows([{"id": 1, "name": "a"}]))
    sink.write(1, 2, rows([{"id": 2, "name": "b", "more": 5}], "id bigint, name string, more int", start=1))
    sink.write(2, 3, rows([{"id": 3}], "id bigint", start=2))
    unaltered(sink.check(), 3, {"_hf", "id", "name", "more"})
    [first] = sorted((tmp_path / "files").glob("batch=*0/*.parquet"))
    table = pq.read_table(first, partitioning=None)
    pq.write_table(table.append_column("more", pa.array([7], pa.int32())), first)
    [finding] = sink.check().findings
    assert finding.ranges == ((0, 0),), "a value in a column that came later"
