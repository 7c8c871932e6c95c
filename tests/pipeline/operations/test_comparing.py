"""Two pipelines' outputs are equal, different, or not to be told apart yet. The outputs are made by hand."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import CommitProperties, write_deltalake

from holdfast.broker.server.embed import Broker
from holdfast.errors import UsageError
from holdfast.pipeline.definition.model import (
    DeltaSink,
    EventTime,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Source,
    Window,
)
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.operations.comparing import SinkComparison, Verdict, compare_pipelines, overall
from holdfast.pipeline.operations.outputs import plain_json
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span, to_text
from holdfast.pipeline.sinks.delta import DeltaSinkWriter
from holdfast.pipeline.sinks.kafka_ledger import LedgerRecord
from holdfast.pipeline.sinks.postgres_sql import create_ledger
from holdfast.testing.postgres import PostgresServer

Rows = Sequence[dict[str, Any]]
Ranges = dict[int, tuple[int, int]]
"""By partition of `orders`, from and to."""
TOPIC_ID = uuid.UUID(int=7)
LINEAGE = pa.struct(
    [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("index", pa.int32())]
)
SOURCE = Source(topics=("orders",), event_time=EventTime("_timestamp"))
TOTALS = Window("totals", {"n": "count(*)"}, size="1h", key=("user",))


def entry_of(
    pipeline: str, sink: str, ranges: Ranges, number: int = 0, topic_id: uuid.UUID = TOPIC_ID
) -> Entry:
    places = {Place("orders", topic_id, partition): span for partition, span in ranges.items()}
    return Entry(
        pipeline=pipeline,
        sink=sink,
        number=number,
        range=BatchRange({place: Span(*span) for place, span in places.items()}),
        positions=Positions({place: Position(span[1]) for place, span in places.items()}),
        batch_time_ms=1_000,
        fingerprint="f",
    )


def table_of(rows: Rows, topic: str = "orders") -> pa.Table:
    """Rows whose `at` is (partition, offset)."""
    lineage = [
        {"topic": topic, "partition": row["at"][0], "offset": row["at"][1], "index": 0} for row in rows
    ]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "at"))
    columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
    return pa.table({"_hf": pa.array(lineage, LINEAGE), **columns})


@dataclass
class Files:
    """Pipelines with one Parquet sink each, `lake`."""

    directory: Path

    def pipeline(self, name: str, rows: str = "", **settings: Any) -> PipelineDefinition:
        sink = ParquetSink(str(self.directory / name), name="lake", rows=rows, **settings)
        home = str(self.directory / f"{name}-home")
        return PipelineDefinition(name, SOURCE, steps=(TOTALS,), sinks=(sink,), home=home)

    def write(
        self,
        name: str,
        ranges: Ranges,
        rows: Rows,
        *,
        topic: str = "orders",
        number: int = 0,
        folder: str = "",
    ) -> None:
        self.commit(entry_of(name, "lake", ranges, number), rows, topic=topic, folder=folder)

    def commit(self, entry: Entry, rows: Rows, *, topic: str = "orders", folder: str = "") -> None:
        batch = self.directory / entry.pipeline / f"batch={entry.number:020d}"
        (batch / folder).mkdir(parents=True)
        (batch / "_ledger.json").write_text(to_text(entry.as_json()))
        if rows:
            pq.write_table(table_of(rows, topic), batch / folder / "part-0.parquet")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def compared(a: PipelineDefinition, b: PipelineDefinition, **options: Any) -> SinkComparison:
    (found,) = compare_pipelines(a, b, **options)
    return found


def orders(*offsets: int, **more: Any) -> list[dict[str, Any]]:
    return [{"at": (0, offset), "id": offset, "amount": offset / 2, **more} for offset in offsets]


# ---------------------------------------------------------------------------- rows of records


def test_the_same_rows_in_other_batches_and_files_are_equal(files: Files) -> None:
    files.write("a", {0: (0, 4)}, orders(0, 1, 2, 3))
    files.write("b", {0: (0, 1)}, orders(0))
    files.write("b", {0: (1, 4)}, orders(3, 2, 1), number=1)
    found = compared(files.pipeline("a"), files.pipeline("b"))
    assert (found.verdict, found.notes) == (Verdict.EQUAL, ())
    assert (found.differences.rows_a, found.differences.rows_b) == (4, 4)


def test_rows_past_what_both_have_read_do_not_count(files: Files) -> None:
    files.write("a", {0: (0, 4), 1: (0, 0)}, orders(0, 1, 2, 3))
    files.write("b", {0: (0, 2), 1: (0, 9)}, orders(0, 1))
    found = compared(files.pipeline("a"), files.pipeline("b"))
    assert found.verdict is Verdict.EQUAL
    assert found.notes == ("A is behind B by 9 offsets of orders-1", "B is behind A by 2 offsets of orders-0")
    assert found.differences.rows_a == 2


def test_rows_before_both_had_begun_do_not_count(files: Files) -> None:
    files.write("a", {0: (0, 4)}, orders(0, 1, 2, 3))
    files.write("b", {0: (2, 4)}, orders(2, 3))
    found = compared(files.pipeline("a"), files.pipeline("b"))
    assert found.verdict is Verdict.EQUAL
    assert found.notes == ("A began orders-0 at 0 and B at 2",)


def test_what_differs_is_told_by_row_and_column(files: Files) -> None:
    files.write("a", {0: (0, 4)}, orders(0, 1, 3))
    files.write("b", {0: (0, 4)}, [*orders(0, 2), {"at": (0, 3), "id": 3, "amount": 9.0}])
    found = compared(files.pipeline("a"), files.pipeline("b"))
    assert found.verdict is Verdict.DIFFERENT
    differences = found.differences
    assert (differences.only_a, differences.only_b, differences.differing) == (1, 1, 1)
    assert differences.columns == {"amount": 1}
    assert differences.examples_a == [{"id": "1", "amount": "0.5", "_hf": "orders-0@1#0"}]
    assert differences.examples[0][1]["amount"] == "9"


def test_a_row_written_twice_is_found(files: Files) -> None:
    files.write("a", {0: (0, 2)}, orders(0, 1))
    files.write("b", {0: (0, 2)}, orders(0, 1, 1))
    found = compared(files.pipeline("a"), files.pipeline("b"))
    assert (found.verdict, found.differences.only_b) == (Verdict.DIFFERENT, 1)


def test_a_new_column_is_a_difference_unless_it_is_ignored(files: Files) -> None:
    files.write("a", {0: (0, 2)}, orders(0, 1))
    files.write("b", {0: (0, 2)}, orders(0, 1, extra="x"))
    a, b = files.pipeline("a"), files.pipeline("b")
    found = compared(a, b)
    assert (found.verdict, found.columns_b) == (Verdict.DIFFERENT, ("extra",))
    assert compared(a, b, ignore=["extra"]).verdict is Verdict.EQUAL


def test_columns_of_directories_are_columns(files: Files) -> None:
    files.write("a", {0: (0, 2)}, orders(0, 1, day="2026-01-01"))
    files.write("b", {0: (0, 2)}, orders(0, 1), folder="day=2026-01-01")
    assert compared(files.pipeline("a"), files.pipeline("b", partition_by=("day",))).verdict is Verdict.EQUAL


def test_nothing_in_common_cannot_be_told(files: Files) -> None:
    files.write("a", {0: (0, 2)}, orders(0, 1))
    a, b = files.pipeline("a"), files.pipeline("b")
    assert compared(a, b).notes[-1] == "B has not run yet"
    files.write("b", {0: (5, 9)}, orders(5))
    assert compared(a, b).verdict is Verdict.INCONCLUSIVE


def test_different_topics_of_one_name_are_not_compared(files: Files) -> None:
    files.write("a", {0: (0, 2)}, [])
    files.commit(entry_of("b", "lake", {0: (0, 2)}, topic_id=uuid.UUID(int=8)), [])
    with pytest.raises(UsageError, match="different topics of the name 'orders'"):
        compared(files.pipeline("a"), files.pipeline("b"))


# ---------------------------------------------------------------------------- rows of windows


def window(user: str, start: str, n: int, number: int = 1) -> dict[str, Any]:
    return {"at": (0, number), "user": user, "window_start": start, "window_end": start + "+1h", "n": n}


def test_windows_are_paired_by_key_and_window_whatever_batch_they_came_in(files: Files) -> None:
    files.write("a", {0: (0, 9)}, [window("u", "08", 1), window("u", "09", 2)], topic="totals")
    files.write("b", {0: (0, 9)}, [window("u", "09", 2, number=5), window("u", "08", 1)], topic="totals")
    a, b = files.pipeline("a", rows="totals"), files.pipeline("b", rows="totals")
    assert compared(a, b).verdict is Verdict.EQUAL
    files.write("b", {0: (9, 9)}, [window("v", "09", 1)], topic="totals", number=1)
    files.write("a", {0: (9, 9)}, [window("v", "09", 3)], topic="totals", number=1)
    found = compared(a, b)
    assert (found.verdict, found.differences.columns) == (Verdict.DIFFERENT, {"n": 1})


def test_windows_of_one_that_is_ahead_cannot_be_judged_yet(files: Files) -> None:
    a, b = files.pipeline("a", rows="totals"), files.pipeline("b", rows="totals")
    files.write("a", {0: (0, 9)}, [window("u", "08", 1), window("u", "09", 2)], topic="totals")
    files.write("b", {0: (0, 5)}, [window("u", "08", 1)], topic="totals")
    found = compared(a, b)
    assert (found.verdict, found.differences.only_a) == (Verdict.INCONCLUSIVE, 1)
    assert "B is behind A by 4 offsets of orders-0" in found.notes


def test_a_closed_window_that_differs_is_different_wherever_they_stand(files: Files) -> None:
    a, b = files.pipeline("a", rows="totals"), files.pipeline("b", rows="totals")
    files.write("a", {0: (0, 9)}, [window("u", "08", 1), window("u", "09", 2)], topic="totals")
    files.write("b", {0: (0, 5)}, [window("u", "08", 7)], topic="totals")
    assert compared(a, b).verdict is Verdict.DIFFERENT


def test_windows_of_pipelines_that_began_apart_cannot_be_judged(files: Files) -> None:
    a, b = files.pipeline("a", rows="totals"), files.pipeline("b", rows="totals")
    files.write("a", {0: (0, 9)}, [window("u", "08", 1), window("u", "09", 2)], topic="totals")
    files.write("b", {0: (4, 9)}, [window("u", "09", 1)], topic="totals")
    assert compared(a, b).verdict is Verdict.INCONCLUSIVE


def test_rows_of_windows_are_not_held_against_rows_of_records(files: Files) -> None:
    files.write("a", {0: (0, 9)}, [])
    files.write("b", {0: (0, 9)}, [])
    with pytest.raises(UsageError, match="rows of different kinds"):
        compared(files.pipeline("a", rows="totals"), files.pipeline("b"))


# ---------------------------------------------------------------------------- pairs


def test_sinks_are_paired_by_name_by_hand_or_as_the_only_ones(files: Files) -> None:
    files.write("a", {0: (0, 2)}, orders(0, 1))
    files.write("b", {0: (0, 2)}, orders(0, 1))
    a, b = files.pipeline("a"), files.pipeline("b")
    renamed = replace(b, sinks=(replace(b.sinks[0], name="other"),))
    files.commit(entry_of("c", "other", {0: (0, 2)}), orders(0, 1))
    c = replace(files.pipeline("c"), sinks=(ParquetSink(str(files.directory / "c"), name="other"),))
    assert compared(a, c).verdict is Verdict.EQUAL
    assert compared(a, c, sinks={"lake": "other"}).sink_b == "other"
    with pytest.raises(UsageError, match="no sink 'nobody'"):
        compare_pipelines(a, renamed, sinks={"lake": "nobody"})
    two = replace(c, sinks=(*c.sinks, ParquetSink("x", name="more")))
    with pytest.raises(UsageError, match="--sink NAME=NAME"):
        compare_pipelines(a, two)


def test_sinks_of_different_kinds_are_not_compared(files: Files) -> None:
    a = files.pipeline("a")
    b = replace(a, name="b", sinks=(KafkaSink("t", name="lake"),))
    with pytest.raises(UsageError, match="are parquet and kafka"):
        compare_pipelines(a, b)


def test_one_difference_decides_and_one_doubt_is_not_equal() -> None:
    def each(verdict: Verdict) -> SinkComparison:
        return SinkComparison("a", "b", verdict)

    equal, different, unknown = map(each, (Verdict.EQUAL, Verdict.DIFFERENT, Verdict.INCONCLUSIVE))
    assert overall([equal, unknown, different]) is Verdict.DIFFERENT
    assert overall([equal, unknown]) is Verdict.INCONCLUSIVE
    assert overall([equal]) is Verdict.EQUAL
    assert overall([]) is Verdict.INCONCLUSIVE
    assert json.loads(json.dumps(different.as_json()))["verdict"] == "different"


# ---------------------------------------------------------------------------- other sinks


def delta(directory: Path, name: str, ranges: Ranges, rows: Rows) -> PipelineDefinition:
    sink = DeltaSink(str(directory / name), name="lake")
    ledger = DeltaSinkWriter(sink, name).ledger
    entry = entry_of(name, "lake", ranges)
    Path(ledger.directory).mkdir(parents=True)
    Path(ledger.directory, "1.json").write_text(to_text(entry.as_json()))
    write_deltalake(
        sink.path,
        table_of(rows),
        commit_properties=CommitProperties(app_transactions=ledger.transactions(entry, 1)),
    )
    return PipelineDefinition(name, SOURCE, sinks=(sink,), home=str(directory / f"{name}-home"))


def test_tables_of_delta_are_read_and_compared_with_files_too(tmp_path: Path, files: Files) -> None:
    a = delta(tmp_path, "a", {0: (0, 3)}, orders(0, 1, 2))
    b = delta(tmp_path, "b", {0: (0, 3)}, orders(2, 0))
    found = compared(a, b)
    assert (found.verdict, found.differences.only_a, found.differences.only_b) == (Verdict.DIFFERENT, 1, 0)
    files.write("c", {0: (0, 3)}, orders(1, 2, 0))
    assert compared(a, files.pipeline("c")).verdict is Verdict.EQUAL


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


def in_table(
    server: PostgresServer, name: str, entry: Entry, rows: Rows, **settings: Any
) -> PipelineDefinition:
    sink = PostgresSink(server.url, name, name="db", **settings)
    with psycopg.connect(server.url) as connection:
        connection.execute(create_ledger("public"))
        connection.execute(
            "INSERT INTO holdfast_ledger (pipeline, sink, number, entry) VALUES (%s, 'db', 0, %s)",
            (name, to_text(entry.as_json())),
        )
        connection.execute(
            f"CREATE TABLE {name} (_hf_topic text, _hf_partition integer, _hf_offset bigint, _hf_index integer, "
            "id bigint, amount double precision, note text)"
        )
        for row in rows:
            connection.execute(
                f"INSERT INTO {name} VALUES ('orders', %s, %s, 0, %s, %s, %s)",
                (*row["at"], row["id"], row["amount"], row.get("note")),
            )
    return PipelineDefinition(name, SOURCE, sinks=(sink,))


def test_tables_of_postgresql_are_read_as_they_are(server: PostgresServer) -> None:
    rows = [*orders(0, note='a "b",\nc'), *orders(1, note=""), *orders(2)]
    a = in_table(server, "plain_a", entry_of("plain_a", "db", {0: (0, 3)}), rows)
    b = in_table(server, "plain_b", entry_of("plain_b", "db", {0: (0, 3)}), rows[::-1])
    assert compared(a, b).verdict is Verdict.EQUAL
    c = in_table(server, "plain_c", entry_of("plain_c", "db", {0: (0, 3)}), [*rows[:2], *orders(2, note="")])
    found = compared(a, c)
    assert (found.verdict, found.differences.columns) == (Verdict.DIFFERENT, {"note": 1})


def test_upserted_tables_are_compared_by_key_where_both_stand_at_one_place(server: PostgresServer) -> None:
    upsert: dict[str, Any] = {"mode": "upsert", "key": ("id",)}
    a = in_table(server, "up_a", entry_of("up_a", "db", {0: (0, 9)}), orders(7, 8), **upsert)
    b = in_table(server, "up_b", entry_of("up_b", "db", {0: (0, 9)}), orders(8, 7), **upsert)
    c = in_table(server, "up_c", entry_of("up_c", "db", {0: (0, 8)}), orders(7), **upsert)
    assert compared(a, b).verdict is Verdict.EQUAL
    assert compared(a, c).verdict is Verdict.INCONCLUSIVE


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(str(tmp_path_factory.mktemp("compare") / "broker")) as broker:
        yield broker


def in_topic(
    broker: Broker,
    name: str,
    ranges: Ranges,
    records: Sequence[tuple[tuple[str, int, int], str | None, dict[str, Any] | None]],
    **settings: Any,
) -> PipelineDefinition:
    """Records as (source topic, offset there, index), key and value."""
    address: dict[str, Any] = {"bootstrap.servers": broker.bootstrap_servers}
    admin = AdminClient(address)
    for future in admin.create_topics(
        [NewTopic(name, 2, 1), NewTopic(f"hf-ledger-{name}--out", 1, 1)]
    ).values():
        future.result(30)
    producer = Producer(address)
    for (topic, offset, index), key, value in records:
        producer.produce(
            name,
            None if value is None else json.dumps(value).encode(),
            key,
            headers=[("hf-source", f"{topic}:0@{offset}#{index}".encode())],
        )
    producer.produce(name, b"somebody else's", "x")
    producer.produce(f"hf-ledger-{name}--out", LedgerRecord(entry_of(name, "out", ranges), 1, None).encode())
    assert producer.flush(30) == 0
    sink = KafkaSink(name, name="out", rows=settings.pop("rows", ""))
    source = replace(SOURCE, bootstrap=broker.bootstrap_servers)
    return PipelineDefinition(name, source, sinks=(sink,), home=f"/nowhere/{name}", **settings)


def test_topics_are_read_and_records_of_others_left_out(broker: Broker) -> None:
    first = [(("orders", offset, 0), f"k{offset}", {"id": offset, "n": 1}) for offset in range(3)]
    a = in_topic(broker, "topic-a", {0: (0, 3)}, first)
    b = in_topic(
        broker, "topic-b", {0: (0, 3)}, [(at, key, {"n": 1, "id": at[1]}) for at, key, _ in first[::-1]]
    )
    assert compared(a, b).verdict is Verdict.EQUAL
    c = in_topic(broker, "topic-c", {0: (0, 3)}, [*first[:2], (("orders", 2, 0), "k2", {"id": 2, "n": 9})])
    found = compared(a, c)
    assert (found.verdict, found.differences.columns) == (Verdict.DIFFERENT, {"value": 1})
    assert compared(a, c, ignore=["n"]).verdict is Verdict.EQUAL


@pytest.mark.parametrize("ignored", [(), ("n",)])
def test_numbers_in_json_are_compared_digit_by_digit(ignored: tuple[str, ...]) -> None:
    one, other = (
        plain_json(b'{"n":1,"b":[{"a":12345678901234567.%d}]}' % digits, ignored) for digits in (12, 99)
    )
    assert one != other
    assert one is not None
    assert one.startswith(b'{"b":[{"a":12345678901234567.12}]')
    assert plain_json(b'{"n":"1.50"}', ()) != plain_json(b'{"n":1.50}', ())


def test_of_windows_that_are_told_on_every_change_only_the_last_word_counts(broker: Broker) -> None:
    changes = replace(TOTALS, emit="changes")

    def records(*said: tuple[int, str, int | None]) -> list[Any]:
        return [(("totals", at, 0), key, None if n is None else {"n": n}) for at, key, n in said]

    often = records((1, "u", 1), (2, "u", 2), (2, "w", 1), (3, "w", None), (3, "u", 3))
    a = in_topic(broker, "changes-a", {0: (0, 9)}, often, steps=(changes,), rows="totals")
    b = in_topic(broker, "changes-b", {0: (0, 9)}, records((1, "u", 3)), steps=(changes,), rows="totals")
    found = compared(a, b)
    assert (found.verdict, found.differences.rows_a, found.differences.rows_b) == (Verdict.EQUAL, 1, 1)
