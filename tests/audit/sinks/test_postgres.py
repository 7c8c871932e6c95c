"""What a PostgreSQL sink's table and ledger hold, read by the auditor: one snapshot, and the right to SELECT only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from tests.support.audit_sinks import PostgresBuilder, rows_of

from holdfast.audit.lineage import NOWHERE
from holdfast.audit.sinks import postgres
from holdfast.audit.sinks.base import SinkScope, SinkUnreadable
from holdfast.audit.sinks.opening import open_sink
from holdfast.audit.sinks.postgres import PostgresReader
from holdfast.pipeline.definition.model import PostgresSink, Window
from holdfast.testing.postgres import PostgresServer

if TYPE_CHECKING:
    from tests.audit.sinks.conftest import Shop

NUMBERS = itertools.count()
Make = Callable[..., PostgresBuilder]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(settings=("fsync=off",)) as server:
        yield server


@pytest.fixture
def make(server: PostgresServer) -> Iterator[Make]:
    """Builders in a schema of the test's own, which a role named like it may only read."""
    schema = f"test_{next(NUMBERS)}"
    made: list[PostgresBuilder] = []
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        connection.execute(f"CREATE ROLE {schema} LOGIN")
        connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {schema}")
        connection.execute(f"ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} GRANT SELECT ON TABLES TO {schema}")

    def build(**changes: Any) -> PostgresBuilder:
        sink = PostgresSink(server.url, "orders", name="out", schema_name=schema, **changes)
        made.append(PostgresBuilder(sink, "shop"))
        return made[-1]

    yield build
    for builder in made:
        builder.close()


@pytest.fixture
def builder(make: Make) -> PostgresBuilder:
    return make()


def auditor(sink: PostgresSink) -> PostgresSink:
    """The sink as seen by the role that may only read."""
    return replace(sink, url=sink.url.replace("holdfast@", f"{sink.schema_name}@"))


def reader_of(shop: Shop, builder: PostgresBuilder, **changes: Any) -> PostgresReader:
    sink = replace(auditor(builder.sink), **changes)
    definition = shop.definition(sink)
    if sink.rows:
        definition = replace(definition, steps=(Window(sink.rows, {"n": "count(*)"}, size="1m"),))
    reader = open_sink(definition, sink, {})
    assert isinstance(reader, PostgresReader)
    return reader


def filled(shop: Shop, builder: PostgresBuilder, batches: int = 3) -> None:
    builder.commit(shop.opening())
    for number in range(batches):
        builder.commit(shop.entry(number), shop.rows(number))


def test_every_row_and_every_entry_is_read_by_a_role_that_may_only_select(
    shop: Shop, builder: PostgresBuilder
) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert [entry.number for entry in reader.entries()] == [0, 1, 2, 3]
    assert reader.positions().at[shop.place].offset == 30
    assert list(reader.problems()) == []
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        reader._connection.execute("DELETE FROM orders")
    reader.close()


@pytest.mark.check
def test_rows_that_come_meanwhile_are_not_in_the_snapshot(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    builder.commit(shop.entry(3), shop.rows(3))
    assert shop.offsets(reader) == list(range(30))
    assert reader.positions().at[shop.place].offset == 30
    assert len(reader.find(shop.place, 35)) == 0
    reader.close()
    later = reader_of(shop, builder)
    assert shop.offsets(later) == list(range(40))
    later.close()


@pytest.mark.check
def test_a_table_is_read_slice_by_slice(
    shop: Shop, builder: PostgresBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "SLICE_BYTES", 1)
    builder.commit(shop.opening())
    offsets = list(range(2000))
    lineage = [(("orders", "else")[each % 2], each % 3, each, 0) for each in offsets]
    builder.commit(shop.entry(0, 2000), rows_of(lineage, {"id": offsets}))
    reader = reader_of(shop, builder)
    assert len(reader._slices()[0]) > 3
    found = sorted(
        (offset, batch.topic, batch.partition)
        for batch in shop.batches(reader)
        for offset in batch.offsets.tolist()
    )
    assert found == sorted((offset, topic, partition) for topic, partition, offset, _ in lineage)
    ids = [each for table in reader.table_batches(["id"]) for each in table.column("id").to_pylist()]
    assert sorted(map(int, ids)) == offsets
    reader.close()


@pytest.mark.parametrize("slice_bytes", [1, postgres.SLICE_BYTES])
@pytest.mark.check
def test_a_table_in_partitions_is_read_as_one(
    shop: Shop, builder: PostgresBuilder, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "SLICE_BYTES", slice_bytes)
    filled(shop, builder)
    schema = builder.sink.schema_name
    builder.connection.execute(
        f"ALTER TABLE {schema}.orders RENAME TO before; "
        f"CREATE TABLE {schema}.orders (LIKE {schema}.before) PARTITION BY RANGE (_hf_offset); "
        f"CREATE TABLE {schema}.low PARTITION OF {schema}.orders FOR VALUES FROM (0) TO (15); "
        f"CREATE TABLE {schema}.high PARTITION OF {schema}.orders DEFAULT; "
        f"INSERT INTO {schema}.orders SELECT * FROM {schema}.before"
    )
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert sum(table.num_rows for table in reader.table_batches(["id"])) == 30
    reader.close()


def test_a_view_is_read_as_a_table(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    schema = builder.sink.schema_name
    builder.connection.execute(
        f"ALTER TABLE {schema}.orders RENAME TO before; CREATE VIEW {schema}.orders AS SELECT * FROM {schema}.before"
    )
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert sum(table.num_rows for table in reader.table_batches(["id"])) == 30
    reader.close()


def test_rows_below_the_scope_are_left_on_the_server(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    found = [
        each for batch in reader.rows(SinkScope({shop.place: (20, 30)})) for each in batch.offsets.tolist()
    ]
    assert sorted(found) == list(range(20, 30))
    tables = reader.table_batches(["id"], SinkScope({shop.place: (20, 30)}))
    assert sum(table.num_rows for table in tables) == 10
    reader.close()


def test_rows_without_lineage_are_from_nowhere(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    table = f"{builder.sink.schema_name}.orders"
    builder.connection.execute(f"UPDATE {table} SET _hf_offset = NULL WHERE id = 3")
    builder.connection.execute(f"UPDATE {table} SET _hf_topic = NULL WHERE id = 4")
    builder.connection.execute(f"INSERT INTO {table} (id) VALUES (99)")
    reader = reader_of(shop, builder)
    found = shop.batches(reader)
    assert sum(len(each) for each in found if each.topic == NOWHERE) == 3
    assert sum(len(each) for each in found if each.topic == "orders") == 28
    reader.close()


def test_a_missing_entry_is_named_by_the_offsets_it_took(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder, 4)
    builder.connection.execute(
        f"DELETE FROM {builder.sink.schema_name}.holdfast_ledger WHERE number IN (2, 3)"
    )
    reader = reader_of(shop, builder)
    [finding] = shop.found(reader)
    assert finding.ranges == ((10, 29),)
    assert "entry 2 to 3 missing" in finding.detail
    reader.close()


def test_a_ledger_that_is_gone_is_told(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    builder.connection.execute(f"DROP TABLE {builder.sink.schema_name}.holdfast_ledger")
    reader = reader_of(shop, builder)
    [finding] = shop.found(reader)
    assert "holdfast_ledger is gone, and orders holds 30 rows" in finding.detail
    reader.close()


def test_rows_without_an_entry_may_be_from_before_a_reset(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    builder.forget()
    reader = reader_of(shop, builder)
    assert shop.found(reader) == []
    [gap] = reader.gaps()
    assert gap.is_gap
    assert gap.what.startswith("30 rows")
    reader.close()


@pytest.mark.check
def test_a_table_that_is_gone_is_told(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    builder.connection.execute(f"DROP TABLE {builder.sink.schema_name}.orders")
    reader = reader_of(shop, builder)
    [finding] = shop.found(reader)
    assert "is gone; its ledger counts 30 rows" in finding.detail
    reader.close()


def test_a_table_that_was_there_before_the_pipeline_is_no_fault(shop: Shop, builder: PostgresBuilder) -> None:
    with psycopg.connect(builder.sink.url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {builder.sink.schema_name}.orders AS SELECT 1 AS id")
    reader = reader_of(shop, builder)
    assert shop.found(reader) == []
    assert shop.batches(reader) == []
    assert [gap.is_gap for gap in reader.gaps()] == [False]
    reader.close()


def test_a_table_that_lost_its_lineage_holds_rows_from_nowhere(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    builder.connection.execute(f"ALTER TABLE {builder.sink.schema_name}.orders DROP COLUMN _hf_offset")
    reader = reader_of(shop, builder)
    assert {(each.topic, len(each)) for each in shop.batches(reader)} == {(NOWHERE, 30)}
    assert list(reader.values(["id"])) == []
    assert any("has no column" in each.detail for each in reader.problems())
    reader.close()


def test_an_entry_that_was_changed_is_told(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    builder.connection.execute(
        f"UPDATE {builder.sink.schema_name}.holdfast_ledger SET entry = entry - 'range' WHERE number = 2"
    )
    reader = reader_of(shop, builder)
    findings = shop.found(reader)
    assert any("entry 2 of holdfast_ledger: it is no entry" in each.detail for each in findings)
    reader.close()


def test_a_sink_without_rows_has_no_table_yet(shop: Shop, builder: PostgresBuilder) -> None:
    builder.commit(shop.opening())
    builder.commit(shop.entry(0, 0))
    reader = reader_of(shop, builder, rows="totals")
    assert shop.found(reader) == []
    assert list(reader.values()) == []
    assert list(reader.values(["id"])) == []
    assert list(reader.table_batches(["id"])) == []
    assert reader.find(shop.place, 3) == []
    reader.close()


def test_a_role_that_may_not_select_is_told_what_it_needs(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    schema = builder.sink.schema_name
    builder.connection.execute(f"REVOKE SELECT ON {schema}.holdfast_ledger FROM {schema}")
    with pytest.raises(SinkUnreadable, match="needs USAGE on the schema"):
        reader_of(shop, builder)


def test_a_server_that_is_away_is_no_empty_sink(shop: Shop) -> None:
    sink = PostgresSink("postgresql://nobody@127.0.0.1:1/none", "orders", name="out")
    with pytest.raises(SinkUnreadable, match="cannot be reached"):
        open_sink(shop.definition(sink), sink, {})


def test_keys_of_an_upsert_table_come_with_the_record_they_were_written_by(shop: Shop, make: Make) -> None:
    builder = make(mode="upsert", key=("id", "country"))
    builder.commit(shop.opening())
    first = rows_of(
        [("orders", 0, each, 0) for each in range(3)],
        {"id": [1, 2, 3], "country": ["a", "b", "c"], "n": [0, 0, 0]},
    )
    second = rows_of(
        [("orders", 0, 10, 0), ("orders", 1, 7, 0)], {"id": [2, 4], "country": ["b", "d"], "n": [1, 1]}
    )
    builder.commit(shop.entry(0, 3), first)
    builder.commit(shop.entry(1, 2), second)
    reader = reader_of(shop, builder)
    found = {
        (row["id"], row["country"]): (row["_hf_partition"], row["_hf_offset"])
        for batch in reader.values(["id", "country"])
        for row in batch.table.to_pylist()
    }
    assert found == {(1, "a"): (0, 0), (2, "b"): (0, 10), (3, "c"): (0, 2), (4, "d"): (1, 7)}
    assert shop.found(reader) == []
    [row] = reader.find(shop.place, 10)
    assert "id=2, country=b" in row
    reader.close()


def test_columns_come_as_values_in_windows_and_as_text_in_tables(
    shop: Shop, builder: PostgresBuilder
) -> None:
    moment = datetime(2026, 1, 1, 10, 0, 0, 500_000, tzinfo=UTC)
    rows = rows_of(
        [("totals", 0, 1, 0), ("totals", 0, 1, 1)],
        {
            "country": ["n,l", None],
            "window_start": pa.array([moment, None], pa.timestamp("us", tz="UTC")),
            "window_end": pa.array([moment, moment], pa.timestamp("us", tz="UTC")),
            "ok": [True, None],
            "total": pa.array([1.5, -0.25]),
            "_hf_count": [3, 4],
            "_hf_digest": [-5, 2**62],
        },
    )
    builder.commit(shop.opening())
    builder.commit(shop.entry(0, 2), rows)
    reader = reader_of(shop, builder, rows="totals")
    [batch] = reader.values()
    found = batch.table.to_pylist()
    assert [(row["country"], row["ok"], row["total"], row["_hf_digest"]) for row in found] == [
        ("n,l", True, 1.5, -5),
        (None, None, -0.25, 2**62),
    ]
    assert (found[0]["window_start"], found[1]["window_start"]) == (moment, None)
    assert found[0]["_hf_topic"] == "totals"
    [table] = reader.table_batches(["ok", "window_end", "total"])
    assert table.column("ok").to_pylist() == ["t", None]
    assert table.column("window_end").to_pylist() == ["2026-01-01 10:00:00.5+00"] * 2
    assert table.column("total").to_pylist() == ["1.5", "-0.25"]
    assert reader.column_types["total"] == "double precision"
    reader.close()


def test_a_row_is_found_by_its_place_in_the_table(shop: Shop, builder: PostgresBuilder) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    [row] = reader.find(shop.place, 13)
    assert row.startswith(f"{builder.sink.schema_name}.orders row (0,")
    reader.close()
