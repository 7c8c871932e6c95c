"""The PostgreSQL sink on a real server: staged, verified, merged with the ledger, or not at all."""

from __future__ import annotations

import datetime
import decimal
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from holdfast.pipeline.definition.model import KafkaSink, PostgresSink
from holdfast.pipeline.sinks.base import (
    RowsRejected,
    SchemaChanged,
    SinkContext,
    SinkError,
    SinkFenced,
    SinkUnavailable,
)
from holdfast.pipeline.sinks.kafka import KafkaSinkWriter
from holdfast.pipeline.sinks.postgres import PostgresSinkWriter
from holdfast.testing.postgres import PostgresServer

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def database(server: PostgresServer) -> Iterator[psycopg.Connection[Any]]:
    """A connection to an empty schema `public`."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        yield connection


Make = Callable[..., PostgresSinkWriter]


@pytest.fixture
def make(server: PostgresServer, database: Any, context: SinkContext, spark: SparkSession) -> Iterator[Make]:
    opened: list[PostgresSinkWriter] = []

    def build(**settings: Any) -> PostgresSinkWriter:
        sink = PostgresSinkWriter(PostgresSink(server.url, "orders", **settings), "shop")
        sink.open(context, spark)
        opened.append(sink)
        return sink

    yield build
    for sink in opened:
        sink.close()


def ids(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": number, "name": f"n{number}"} for number in numbers]


def table(database: Any, columns: str = "id", *, where: str = "") -> list[Any]:
    found = database.execute(f"SELECT {columns} FROM orders {where} ORDER BY 1").fetchall()
    return [row[0] if len(row) == 1 else row for row in found]


def stages(database: Any) -> list[str]:
    found = database.execute("SELECT tablename FROM pg_tables WHERE tablename LIKE 'holdfast_stage%'")
    return [row[0] for row in found.fetchall()]


def test_rows_are_appended_with_their_lineage_and_the_ledger_moves(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("postgres")
    assert sink.last_entry() is None
    cut.write(sink, cut.at(0, 0), rows([]))
    first = cut.write(sink, cut.at(0, 4), rows(ids(*range(4))).repartition(2))
    assert (first.rows, sink.last_entry()) == (4, first)
    second = cut.write(sink, cut.at(4, 6), rows([]))
    assert make().last_entry() == second
    assert table(database, "id, name, _hf_topic, _hf_partition, _hf_offset, _hf_index")[3] == (
        3,
        "n3",
        "orders",
        0,
        3,
        0,
    )
    assert stages(database) == []


def test_every_type_arrives_as_it_was(make: Make, database: Any, rows: Any, batches: Any) -> None:
    sink, cut = make(), batches("postgres")
    columns = (
        "id bigint, flag boolean, small smallint, real float, many double, price decimal(12,3), text string, "
        "raw binary, day date, at timestamp, tags array<string>, nested struct<a:int>"
    )
    utc = datetime.UTC
    value = {
        "id": 1,
        "flag": True,
        "small": -3,
        "real": 1.5,
        "many": float("inf"),
        "price": decimal.Decimal("-12345.678"),
        "text": 'quotes " and , commas\nand \\N backslashes \\ \t ü 🦊',
        "raw": b"\x00\xff",
        "day": datetime.date(2026, 2, 28),
        "at": datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=utc),
        "tags": ["a", 'b"c', None],
        "nested": {"a": 7},
    }
    cut.write(sink, cut.at(0, 3), rows([value, {"id": 2}, {"id": 3, "text": ""}], columns))
    names = [part.split()[0] for part in columns.split(", ")]
    found = database.execute(f"SELECT {', '.join(names)} FROM orders ORDER BY id").fetchall()
    assert dict(zip(names, found[0], strict=True)) == value
    assert found[1][1:] == (None,) * (len(names) - 1)
    assert found[2][6] == ""


def test_upsert_keeps_the_last_row_of_a_key_and_never_an_older_one(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink, cut = make(mode="upsert", key=("id",)), batches("postgres")
    values = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 1, "name": "c"}]
    entry = cut.write(sink, cut.at(0, 3), rows(values).repartition(3))
    assert entry.rows == 3
    assert table(database, "id, name") == [(1, "c"), (2, "b")]
    cut.write(sink, cut.at(3, 4), rows([{"id": 2, "name": "d"}], start=3))
    # A replay from before: the table knows better.
    cut.write(sink, cut.at(4, 5), rows([{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]))
    assert table(database, "id, name, _hf_offset") == [(1, "c", 2), (2, "d", 3)]


@pytest.mark.parametrize("cuts", [(range(6),), (range(3), range(3, 6)), (range(3, 6), range(3))])
def test_the_greatest_of_an_order_wins_however_rows_come(
    make: Make, database: Any, rows: Any, batches: Any, cuts: tuple[range, ...]
) -> None:
    """Rows of two partitions; of those that are equal the later place wins."""
    values = [
        {"id": 1, "name": "older", "at": 5},
        {"id": 1, "name": "newer", "at": 7},
        {"id": 2, "name": "null", "at": None},
        {"id": 2, "name": "known", "at": -1},
        {"id": 3, "name": "0-2", "at": 4},
        {"id": 3, "name": "1-2", "at": 4},
    ]
    frame = rows(values, "id bigint, name string, at bigint", partitions=2)
    sink, cut = make(mode="upsert", key=("id",), order_by="at"), batches("postgres")
    for number, taken in enumerate(cuts):
        places = " OR ".join(f"(_hf.partition = {at % 2} AND _hf.offset = {at // 2})" for at in taken)
        cut.write(sink, cut.at(number, number + 1), frame.where(places))
    assert table(database, "id, name") == [(1, "newer"), (2, "known"), (3, "1-2")]
    sink.forget()
    cut.write(
        sink, cut.at(0, 1), rows([{"id": 1, "name": "mended", "at": 1}], "id bigint, name string, at bigint")
    )
    assert table(database, "name", where="WHERE id = 1") == ["mended"]


def test_versions_by_spark_have_their_spans(make: Make, database: Any, rows: Any, batches: Any) -> None:
    """What tasks and expressions do; `test_scd2` has the rules, without Spark."""
    sink = make(mode="scd2", key=("id",), order_by="at", delete_when="_tombstone")
    columns, cut = "id bigint, name string, at date, _key_id bigint", batches("postgres")
    days = [datetime.date(2026, 1, day) for day in (1, 2, 3)]
    cut.write(sink, cut.at(0, 1), rows([{"id": 1, "name": "a", "at": days[0]}], columns))
    gone = {"_key_id": 1, "at": days[2], "_tombstone": True}
    cut.write(sink, cut.at(1, 2), rows([gone], columns, start=1))
    cut.write(sink, cut.at(2, 3), rows([{"id": 1, "name": "late", "at": days[1]}], columns, start=2))
    assert table(database, "valid_from, name, valid_to, is_current, is_deleted") == [
        (days[0], "a", days[1], False, False),
        (days[1], "late", days[2], False, False),
        (days[2], None, days[2], False, True),
    ]
    with pytest.raises(RowsRejected, match="orders-0 at offset 4"):
        sink.prepare(cut.at(3, 5), rows([{"id": 1, "at": days[0]}, {"id": 1}], columns, start=3))


def test_after_a_reset_an_upsert_takes_whatever_comes(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    """A topic made anew begins at lower offsets; a step that was mended gives other rows at the same ones."""
    sink = make(mode="upsert", key=("id",), delete_when="name = 'gone'")
    cut = batches("postgres")
    cut.write(sink, cut.at(0, 9), rows(ids(1, 2, 3, 4), start=5))
    sink.forget()
    assert sink.last_entry() is None
    assert table(database, "id, name") == [(1, "n1"), (2, "n2"), (3, "n3"), (4, "n4")]
    values = [{"id": 1, "name": "low"}, {"id": 2, "name": "gone"}]
    cut.write(sink, cut.at(0, 2), rows(values))
    cut.write(sink, cut.at(2, 8), rows([{"id": 3, "name": "same place"}], start=7))
    assert table(database, "id, name, _hf_offset") == [(1, "low", 0), (3, "same place", 7), (4, "n4", -1)]
    # From here on it is a life like any other.
    cut.write(sink, cut.at(8, 9), rows([{"id": 3, "name": "older"}], start=6))
    assert table(database, "name", where="WHERE id = 3") == ["same place"]


def test_a_reset_that_fails_half_way_changes_nothing(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink, cut = make(mode="upsert", key=("id",)), batches("postgres")
    entry = cut.write(sink, cut.at(0, 2), rows(ids(1, 2)))
    database.execute("ALTER TABLE orders ADD CHECK (_hf_offset >= 0)")
    with pytest.raises(SinkError, match="violates check constraint"):
        sink.forget()
    assert sink.last_entry() == entry
    assert table(database, "id, _hf_offset") == [(1, 0), (2, 1)]


def test_a_reset_leaves_the_places_of_appended_rows(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("postgres")
    cut.write(sink, cut.at(0, 2), rows(ids(1, 2)))
    sink.forget()
    assert sink.last_entry() is None
    assert table(database, "id, _hf_offset") == [(1, 0), (2, 1)]


def test_a_reset_before_the_table_has_lineage(make: Make, database: Any, rows: Any, batches: Any) -> None:
    sink, cut = make(mode="upsert", key=("id",)), batches("postgres")
    cut.write(sink, cut.at(0, 0), rows([]))
    sink.forget()
    assert sink.last_entry() is None
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY, name text)")
    cut.write(sink, cut.at(0, 0), rows([]))
    sink.forget()
    assert sink.last_entry() is None


def test_upsert_deletes_the_keys_whose_last_row_says_so(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink = make(mode="upsert", key=("id",), delete_when="_tombstone OR name = 'gone'")
    cut = batches("postgres")
    cut.write(sink, cut.at(0, 3), rows(ids(1, 2, 3)))
    values = [
        {"id": 1, "_tombstone": True},
        {"id": 2, "name": "gone"},
        {"id": 2, "name": "back"},
        {"id": 4, "name": "new"},
        {"id": 4, "name": "gone"},
    ]
    cut.write(sink, cut.at(3, 8), rows(values, start=3))
    assert table(database, "id, name") == [(2, "back"), (3, "n3")]


def test_a_tombstone_deletes_by_the_key_of_its_record(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink, cut = make(mode="upsert", key=("id",), delete_when="_tombstone"), batches("postgres")
    cut.write(sink, cut.at(0, 3), rows(ids(1, 2, 3)))
    columns = "id bigint, name string, _key_id bigint"
    gone = [{"_key_id": 1, "_tombstone": True}, {"id": 2, "name": "kept", "_key_id": 3}]
    cut.write(sink, cut.at(3, 5), rows(gone, columns, start=3))
    assert table(database, "id, name") == [(2, "kept"), (3, "n3")]


def test_a_row_without_its_key_is_named_whether_it_stores_or_deletes(
    make: Make, rows: Any, batches: Any
) -> None:
    sink, cut = make(mode="upsert", key=("id",), delete_when="_tombstone"), batches("postgres")
    values = [{"id": 1}, {"name": "nobody"}, {"id": 2}, {"_tombstone": True}]
    with pytest.raises(RowsRejected) as caught:
        sink.prepare(cut.at(0, 4), rows(values))
    assert sorted(row.offset for row in caught.value.rows) == [1, 3]
    assert all('null value in column "id"' in row.why for row in caught.value.rows)


def test_a_server_that_crashes_between_copy_and_merge_takes_nothing_in_half(
    server: PostgresServer, make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("postgres")
    first = cut.write(sink, cut.at(0, 2), rows(ids(0, 1)))
    prepared = sink.prepare(cut.at(2, 5), rows(ids(2, 3, 4), start=2).coalesce(1))
    server.crash()
    server.start()
    with pytest.raises(SinkUnavailable):
        prepared.commit(cut.entry(cut.at(2, 5), first, 3))  # the connection is gone
    with pytest.raises(SinkUnavailable, match="3 rows were staged and 0 are there"):
        prepared.commit(cut.entry(cut.at(2, 5), first, 3))
    prepared.discard()
    assert sink.last_entry() == first
    cut.write(sink, cut.at(2, 5), rows(ids(2, 3, 4), start=2))
    with psycopg.connect(server.url) as again:
        assert table(again) == [0, 1, 2, 3, 4]
        assert stages(again) == []


def test_a_failure_at_any_step_of_the_merge_leaves_nothing(
    make: Make, database: Any, rows: Any, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, cut = make(), batches("postgres")
    prepared = sink.prepare(cut.at(0, 2), rows(ids(0, 1)))
    entry = cut.entry(cut.at(0, 2), None, 2)
    for step in ("_advance", "_verify", "_change"):
        for when in ("before", "after"):
            honest = getattr(PostgresSinkWriter, step)

            def failing(*arguments: Any, when: str = when, honest: Any = honest) -> None:
                if when == "after":
                    honest(*arguments)
                raise ConnectionAbortedError("the driver dies here")

            with monkeypatch.context() as patch:
                patch.setattr(PostgresSinkWriter, step, failing)
                with pytest.raises(ConnectionAbortedError):
                    prepared.commit(entry)
            assert sink.last_entry() is None
            assert database.execute("SELECT to_regclass('orders')").fetchone() == (None,)
            assert len(stages(database)) == 1
    # A new run: what was staged is swept up.
    again = make()
    assert stages(database) == []
    cut.write(again, cut.at(0, 2), rows(ids(0, 1)))
    assert table(database) == [0, 1]


def test_a_commit_whose_answer_was_lost_is_found_in_the_ledger(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("postgres")
    entry = cut.write(sink, cut.at(0, 2), rows(ids(0, 1)))
    sink.close()
    again = make()
    assert again.last_entry() == entry
    with pytest.raises(SinkFenced):
        again.prepare(cut.at(0, 2), rows(ids(0, 1))).commit(entry)
    assert table(database) == [0, 1]


def test_of_two_copies_that_commit_at_once_one_is_fenced(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    """HF408: two copies of one pipeline."""
    one, two, cut = make(), make(), batches("postgres")
    batch = cut.at(0, 2)
    prepared = [sink.prepare(cut.at(0, 2), rows(ids(0, 1))) for sink in (one, two)]
    entry = cut.entry(batch, None, 2)
    outcomes: list[str] = []

    def commit(each: Any) -> None:
        try:
            each.commit(entry)
            outcomes.append("written")
        except SinkFenced:
            outcomes.append("fenced")

    threads = [threading.Thread(target=commit, args=(each,)) for each in prepared]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["fenced", "written"]
    assert table(database) == [0, 1]


def test_a_copy_whose_stage_was_swept_up_by_a_later_one_writes_nothing(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    old, cut = make(), batches("postgres")
    prepared = old.prepare(cut.at(0, 1), rows(ids(0)))
    make()
    with pytest.raises(SinkError, match="another copy"):
        prepared.commit(cut.entry(cut.at(0, 1), None, 1))
    assert old.last_entry() is None


def test_rows_of_an_attempt_that_was_not_reported_are_not_merged(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    """A task that copied its rows, and died before it could say so, ran again."""
    sink, cut = make(), batches("postgres")
    prepared: Any = sink.prepare(cut.at(0, 2), rows(ids(0, 1)))
    name = sql.Identifier(prepared.stage)
    database.execute(sql.SQL("INSERT INTO {} (_hf_attempt, id) VALUES (-5, 99)").format(name))
    prepared.commit(cut.entry(cut.at(0, 2), None, 2))
    assert table(database) == [0, 1]


def test_a_task_that_dies_half_way_leaves_nothing(
    make: Make, database: Any, rows: Any, batches: Any, spark: SparkSession, tmp_path: Path
) -> None:
    marker = str(tmp_path / "failed")

    def fail_once(parts: Any) -> Any:
        yield from parts
        if not os.path.exists(marker):
            open(marker, "w").close()
            raise RuntimeError("worker dies")

    sink, cut = make(), batches("postgres")
    frame = rows(ids(*range(10))).coalesce(1)
    flaky = frame.mapInArrow(fail_once, frame.schema)
    with pytest.raises(Exception, match="worker dies"):
        sink.prepare(cut.at(0, 10), flaky)
    cut.write(sink, cut.at(0, 10), flaky)
    assert table(database) == list(range(10))


def test_columns_are_added_in_the_transaction_where_that_is_allowed(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    cut = batches("postgres")
    strict = make()
    cut.write(strict, cut.at(0, 1), rows(ids(1)))
    wider = rows([{"id": 2, "name": "b", "size": 1.5}], "id bigint, name string, size double", start=1)
    with pytest.raises(SchemaChanged, match="'size'"):
        strict.prepare(cut.at(1, 2), wider)
    adding = make(schema="add-columns")
    with pytest.raises(SchemaChanged, match=r"'id' as bigint.*as string"):
        adding.prepare(cut.at(1, 2), rows([{"id": "x"}], "id string", start=1))
    prepared = adding.prepare(cut.at(1, 2), wider)
    assert "size" not in columns_of(database)
    prepared.commit(cut.entry(cut.at(1, 2), adding.last_entry(), 1))
    assert table(database, "id, name, size") == [(1, "n1", None), (2, "b", 1.5)]


def columns_of(database: Any) -> list[str]:
    found = database.execute("SELECT column_name FROM information_schema.columns WHERE table_name = 'orders'")
    return [row[0] for row in found.fetchall()]


def test_a_table_made_by_hand_is_used_as_it_is(make: Make, database: Any, rows: Any, batches: Any) -> None:
    database.execute("CREATE TABLE orders (id integer PRIMARY KEY, name varchar(5))")
    cut = batches("postgres")
    with pytest.raises(SchemaChanged, match="lacks the columns '_hf_topic'"):
        make().prepare(cut.at(0, 1), rows(ids(1)))
    sink = make(schema="add-columns", mode="upsert", key=("id",))
    cut.write(sink, cut.at(0, 1), rows(ids(1)))
    assert table(database, "id, name") == [(1, "n1")]
    with pytest.raises(SinkError, match="value too long for type"):
        sink.prepare(cut.at(1, 2), rows([{"id": 2, "name": "far too long"}], start=1))
    database.execute("ALTER TABLE orders ALTER COLUMN name TYPE date USING NULL")
    with pytest.raises(SchemaChanged, match=r"'name' of public.orders is date"):
        sink.prepare(cut.at(1, 2), rows(ids(2), start=1))


def test_upsert_into_a_table_without_a_key_is_explained(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    database.execute("CREATE TABLE orders (id bigint, name text)")
    sink, cut = make(schema="add-columns", mode="upsert", key=("id",)), batches("postgres")
    with pytest.raises(SinkError, match="no primary key or unique constraint"):
        cut.write(sink, cut.at(0, 1), rows(ids(1)))


def test_a_table_that_was_dropped_stops_the_pipeline(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("postgres")
    cut.write(sink, cut.at(0, 1), rows(ids(1)))
    assert sink.missing() is None
    database.execute("DROP TABLE orders")
    assert sink.missing() == "the table public.orders is gone, and the ledger says that it has rows"
    with pytest.raises(SinkError, match="is gone"):
        sink.prepare(cut.at(1, 2), rows(ids(2), start=1))


def test_a_user_without_rights_is_told_which(
    server: PostgresServer, database: Any, context: SinkContext, spark: SparkSession
) -> None:
    database.execute("DROP ROLE IF EXISTS guest")
    database.execute("CREATE ROLE guest LOGIN")
    url = server.url.replace("holdfast@", "guest@")
    sink = PostgresSinkWriter(PostgresSink(url, "orders"), "shop")
    with pytest.raises(SinkError, match="right to use and create tables"):
        sink.open(context, spark)
    sink.close()


def test_a_server_that_is_away_is_told_without_the_password(
    context: SinkContext, spark: SparkSession
) -> None:
    sink = PostgresSinkWriter(PostgresSink("postgresql://u:secret@127.0.0.1:1/db", "orders"), "shop")
    with pytest.raises(SinkError, match="cannot be reached") as told:
        sink.open(context, spark)
    assert "secret" not in str(told.value)


def test_a_definition_that_does_not_fit_is_told(rows: Any) -> None:
    schema = rows([]).schema
    checks = {
        PostgresSink("", "t", mode="upsert"): "key",
        PostgresSink("", "t", key=("id",)): "key",
        PostgresSink("", "t", mode="upsert", key=("no",)): "key",
        PostgresSink("", "t", mode="upsert", key=("id", "name")): "key",
        PostgresSink("", "t", delete_when="true"): "delete_when",
        PostgresSink("", "t", mode="upsert", key=("id",), order_by="name"): "order_by",
        PostgresSink("", "t", mode="upsert", key=("id",), order_by="nothing"): "order_by",
        PostgresSink("", "t", mode="upsert", key=("id",), delete_when="id"): "delete_when",
        PostgresSink("", "t", mode="upsert", key=("id",), delete_when="nothing"): "delete_when",
    }
    for definition, where in checks.items():
        problems = PostgresSinkWriter(definition, "shop").check(schema)
        assert [problem.where for problem in problems] == [where], definition
    assert PostgresSinkWriter(PostgresSink("", "t", mode="upsert", key=("id",)), "shop").check(schema) == []


def test_keys_of_maps_that_json_has_no_word_for_are_told(spark: SparkSession) -> None:
    schema = spark.sql(
        "SELECT 1 AS id, array(map(X'ff', 1)) AS bytes, map(DATE'2026-01-01', 1) AS days, map(1, 2) AS n"
    )
    problems = PostgresSinkWriter(PostgresSink("", "t"), "shop").check(schema.schema)
    assert [problem.message.split(",")[0] for problem in problems] == [
        "column 'bytes' is array<map<binary",
        "column 'days' is map<date",
    ]
    assert KafkaSinkWriter(KafkaSink("t"), "shop").check(schema.schema) == problems
    assert KafkaSinkWriter(KafkaSink("t", value="string(id)"), "shop").check(schema.schema) == []


def test_rows_that_the_server_does_not_take_are_found_with_their_columns(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint, name varchar(4), _hf_topic text, _hf_partition int, "
        "_hf_offset bigint, _hf_index int)"
    )
    sink, cut = make(), batches("postgres")
    given = [{"id": at, "name": {3: "a\0b", 11: "too long"}.get(at, "fine")} for at in range(16)]
    with pytest.raises(RowsRejected) as caught:
        sink.prepare(cut.at(0, 16), rows(given))
    found = {each.offset: each.why for each in caught.value.rows}
    assert found == {
        3: "invalid byte sequence for encoding \"UTF8\": 0x00 in column 'name'",
        11: "value too long for type character varying(4) in column 'name'",
    }
    cut.write(sink, cut.at(0, 16), rows([each for each in given if each["id"] not in (3, 11)]))
    assert database.execute("SELECT count(*) FROM orders").fetchone() == (14,)


def test_years_that_cannot_be_written_are_found(
    make: Make, database: Any, rows: Any, batches: Any, spark: SparkSession
) -> None:
    """Milliseconds taken for seconds: the year 55,840, of which Arrow's CSV makes another one."""
    sink, cut = make(), batches("postgres")
    seconds = [1_700_000_000_000, 1_700_000_000, 9_223_372_036_854, -62_135_596_800, 971_890_963_200]
    frame = rows([{"id": at} for at in seconds], "id bigint").selectExpr("*", "timestamp_seconds(id) AS at")
    with pytest.raises(RowsRejected) as caught:
        sink.prepare(cut.at(0, 5), frame)
    assert {each.offset for each in caught.value.rows} == {0, 2, 4}
    assert all("in column 'at'" in each.why for each in caught.value.rows)
    cut.write(sink, cut.at(0, 5), frame.where("id NOT IN (1700000000000, 9223372036854, 971890963200)"))
    assert table(database, "at::text") == ["0001-01-01 00:00:00+00", "2023-11-14 22:13:20+00"]


def test_rows_that_the_table_itself_does_not_take_are_found(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    """By checks, foreign keys (deferred ones too), unique columns, beside each other and beside what is there."""
    database.execute("CREATE TABLE names (name text PRIMARY KEY)")
    database.execute("INSERT INTO names VALUES ('ann'), ('bob')")
    database.execute(
        "CREATE TABLE orders (id bigint UNIQUE, name text REFERENCES names DEFERRABLE INITIALLY DEFERRED, "
        "amount int NOT NULL CHECK (amount > 0), _hf_topic text, _hf_partition int, _hf_offset bigint, _hf_index int)"
    )
    sink, cut = make(), batches("postgres")
    columns = "id bigint, name string, amount int"
    given = [{"id": at, "name": "ann", "amount": 1} for at in range(12)]
    given[2]["amount"], given[5]["name"], given[7]["id"], given[9]["amount"] = 0, "eve", 6, None
    with pytest.raises(RowsRejected) as caught:
        sink.prepare(cut.at(0, 12), rows(given, columns).repartition(2))
    found = {each.offset: each.why for each in caught.value.rows}
    assert sorted(found) == [2, 5, 7, 9]
    assert "orders_amount_check" in found[2]
    assert ": Key (name)=(eve) is not present in table" in found[5]
    assert ": Key (id)=(6) already exists." in found[7]
    assert '"amount"' in found[9]
    assert table(database) == []
    assert database.execute("SELECT count(*) FROM pg_tables WHERE tablename ~ 'stage'").fetchone() == (0,)
    cut.write(sink, cut.at(0, 2), rows(given[:2], columns))
    with pytest.raises(RowsRejected, match=r"offset 2: .*already exists"):
        sink.prepare(cut.at(2, 3), rows(given[:1], columns, start=2))


def test_a_key_too_long_for_the_index_is_found(make: Make, database: Any, rows: Any, batches: Any) -> None:
    sink, cut = make(mode="upsert", key=("name",)), batches("postgres")
    noise = "".join(chr(0x4E00 + at * 7919 % 20_000) for at in range(2000))
    given = [{"id": 0, "name": "a"}, {"id": 1, "name": noise}, {"id": 2, "name": "long but alike " * 300}]
    with pytest.raises(RowsRejected, match=r"offset 1: index row size .* exceeds"):
        sink.prepare(cut.at(0, 3), rows(given))
    cut.write(sink, cut.at(0, 3), rows([given[0], given[2]]))
    assert sorted(table(database)) == [0, 2]


def test_a_database_of_another_encoding_has_the_same_text(
    server: PostgresServer, database: Any, context: SinkContext, spark: SparkSession, rows: Any, batches: Any
) -> None:
    database.execute("DROP DATABASE IF EXISTS latin")
    database.execute("CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    url = psycopg.conninfo.make_conninfo(server.url, dbname="latin")
    sink, cut = PostgresSinkWriter(PostgresSink(url, "orders"), "shop"), batches("postgres")
    sink.open(context, spark)
    try:
        cut.write(sink, cut.at(0, 1), rows([{"id": 1, "name": "Öl"}]))
        with pytest.raises(RowsRejected, match=r"offset 1: .* has no equivalent in encoding"):
            sink.prepare(cut.at(1, 2), rows([{"id": 2, "name": "日本"}], start=1))
    finally:
        sink.close()
    with psycopg.connect(url, client_encoding="UTF8") as latin:
        assert latin.execute("SELECT name FROM orders").fetchall() == [("Öl",)]


def test_a_table_that_was_emptied_or_replaced_is_missed(
    make: Make, database: Any, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("postgres")
    cut.write(sink, cut.at(0, 1), rows([]))
    assert sink.missing() is None
    cut.write(sink, cut.at(1, 2), rows(ids(1), start=1))
    assert sink.missing() is None
    database.execute("CREATE TABLE restored AS SELECT * FROM orders")
    database.execute("DROP TABLE orders")
    database.execute("ALTER TABLE restored RENAME TO orders")
    assert "was dropped and created again" in str(sink.missing())
    database.execute("ALTER TABLE holdfast_ledger RENAME TO old")
    database.execute("CREATE TABLE holdfast_ledger (LIKE old INCLUDING ALL)")
    database.execute("INSERT INTO holdfast_ledger SELECT * FROM old")
    assert sink.missing() is None  # restored together
    database.execute("TRUNCATE orders")
    told = "the table public.orders is empty, and the ledger says that rows were written to it"
    assert sink.missing() == told
    assert make(mode="upsert", key=("id",)).missing() == told
    assert make(mode="upsert", key=("id",), delete_when="name = 'gone'").missing() is None
