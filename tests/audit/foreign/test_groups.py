"""What a consumer group has committed is in its table: by lineage, by a key, for plain consumers and `DatabaseSink`."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.audit.foreign_databases import split_table
from holdfast.audit.group import audit_group, lineage_match
from holdfast.audit.model import AuditError, Fate, Report, Verdict
from holdfast.client.database.sink import DatabaseSink
from holdfast.client.database.store import open_database
from holdfast.client.messages import Message
from holdfast.client.retries import RetryPolicy
from holdfast.errors import UsageError
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import QUIET, wait_until
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.postgres import NoPostgres, PostgresServer

ORDERS = 40


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = {"group.initial.rebalance.delay.ms": "0"}
    with BrokerProcess(str(tmp_path_factory.mktemp("groups") / "broker"), settings=settings) as process:
        yield process.bootstrap_servers


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        unavailable(str(missing))
    with server:
        yield server.url


@pytest.fixture
def topic(broker: str) -> str:
    """Forty orders in two partitions, each with its number as key."""
    name = f"orders-{uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": broker, **QUIET})
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(30)
    send(broker, name, range(ORDERS))
    return name


def send(broker: str, topic: str, ids: Sequence[int]) -> None:
    producer = Producer({"bootstrap.servers": broker, **QUIET})
    for each in ids:
        producer.produce(topic, json.dumps({"id": each}), key=str(each), partition=each % 2)
    assert producer.flush(30) == 0


def commit(broker: str, group: str, topic: str, *positions: int) -> None:
    consumer = Consumer({"bootstrap.servers": broker, "group.id": group, **QUIET})
    consumer.commit(
        offsets=[TopicPartition(topic, number, position) for number, position in enumerate(positions)],
        asynchronous=False,
    )
    consumer.close()


def table(url: str, columns: str) -> str:
    """A new table; its address as --sink takes it."""
    name = f"t{uuid4().hex[:8]}"
    with psycopg.connect(url) as connection:
        connection.execute(f"create table {name} ({columns})".encode())
    return f"{url}?table={name}"


def execute(sink: str, statement: str, *parameters: object) -> None:
    url, _, name = split_table(sink)
    with psycopg.connect(url) as connection:
        connection.execute(statement.format(table=name).encode(), parameters)


def audit(broker: str, group: str, sink: str, **more: object) -> Report:
    return audit_group(group, sink, {"bootstrap.servers": broker}, **more)  # type: ignore[arg-type]


@pytest.mark.check
def test_a_plain_consumer_with_lineage_in_its_table(broker: str, database: str, topic: str) -> None:
    sink = table(
        database,
        "kafka_partition int, kafka_offset bigint, body jsonb, primary key (kafka_partition, kafka_offset)",
    )
    group = f"g-{topic}"
    commit(broker, group, topic, 20, 15)
    for number, end in ((0, 20), (1, 17)):
        for offset in range(end):
            execute(sink, "insert into {table} values (%s, %s, '{{}}')", number, offset)
    report = audit(broker, group, sink)
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert (report.mode, report.scope.offsets, report.scope.pending) == ("group", 35, 5)
    assert report.scope.ends == "the group's committed positions"
    execute(sink, "delete from {table} where kafka_partition = 1 and kafka_offset in (3, 16)")
    (lost,) = audit(broker, group, sink).findings
    # What is behind the position is not promised yet.
    assert (lost.fate, lost.ranges, lost.keys) == (Fate.LOST, ((3, 3),), ("7",))


@pytest.mark.check
def test_an_idempotent_key_is_matched_and_a_second_delivery_superseded(
    broker: str, database: str, topic: str
) -> None:
    sink = table(database, "id bigint primary key, at timestamptz")
    group = f"g-{topic}"
    send(broker, topic, [3])
    commit(broker, group, topic, 20, 21)
    for number in range(ORDERS):
        execute(sink, "insert into {table} values (%s, now())", number)
    report = audit(broker, group, sink, match="id = value.id", is_distinct=True)
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert report.partitions[1].fates == {"output": 20, "superseded": 1}
    execute(sink, "insert into {table} values (999, now())")
    (extra,) = audit(broker, group, sink, match="id = key", is_distinct=True).findings
    assert (extra.fate, extra.keys) == (Fate.EXTRA, ("999",))


@pytest.mark.check
def test_a_role_that_may_only_read_suffices(broker: str, database: str, topic: str) -> None:
    sink = table(database, 'partition int, "offset" bigint')
    group, role = f"g-{topic}", f"r{uuid4().hex[:8]}"
    commit(broker, group, topic, 2, 0)
    execute(sink, "insert into {table} values (0, 0), (0, 1)")
    execute(sink, f"create role {role} login")
    execute(sink, f"grant select on {{table}} to {role}")
    reading = sink.replace("holdfast@", f"{role}@")
    assert audit(broker, group, reading).verdict is Verdict.PROVEN
    execute(sink, f"revoke select on {{table}} from {role}")
    with pytest.raises(AuditError, match="or this role may not read it"):
        audit(broker, group, reading)


@pytest.mark.check
def test_a_database_sink_says_itself_how_far_it_is(broker: str, database: str, topic: str) -> None:
    sink = table(database, "kafka_topic text, kafka_partition int, kafka_offset bigint, id bigint")
    url, _, name = split_table(sink)
    group = f"g-{topic}"
    run_sink(broker, group, topic, url, name, "%s")
    (lost,) = audit(broker, group, sink).findings
    assert (lost.fate, lost.ranges, lost.keys) == (Fate.LOST, ((3, 3),), ("7",))
    dead = f"{topic}-dlt"
    report = audit(broker, group, sink, dead_letters=dead)
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert report.scope.ends == "the positions in the database (holdfast_positions)"
    assert report.partitions[1].fates == {"output": 19, "dead_letter": 1}
    execute(sink, "insert into {table} select * from {table} where id = 10")
    (twice,) = audit(broker, group, sink, dead_letters=dead).findings
    assert (twice.fate, twice.ranges, twice.keys) == (Fate.DUPLICATED, ((5, 5),), ("10",))
    # Another group's dead letters are not this one's.
    commit(broker, f"{group}-2", topic, 20, 20)
    other = audit(broker, f"{group}-2", sink, dead_letters=dead)
    assert other.total(Fate.LOST) == 1
    with pytest.raises(AuditError, match="has no committed positions for other"):
        audit(broker, group, sink, topics=["other"])
    # Positions of a topic that was recreated are another topic's.
    execute(sink, "delete from {table} where ctid in (select max(ctid) from {table} where id = 10)")
    execute(sink, "update holdfast_positions set topic_id = %s where group_id = %s", str(UUID(int=7)), group)
    anew = audit(broker, group, sink, dead_letters=dead)
    assert anew.verdict is Verdict.INCONCLUSIVE
    assert "deleted and created again" in anew.reasons[0]


@pytest.mark.check
def test_a_database_sink_into_sqlite(broker: str, topic: str, tmp_path: Path) -> None:
    path = tmp_path / "sink.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(
            'create table orders (topic text, partition integer, "offset" integer, id integer)'
        )
    group = f"g-{topic}"
    run_sink(broker, group, topic, str(path), "orders", "?")
    sink = f"sqlite:{path}?table=orders"
    report = audit(broker, group, sink, dead_letters=f"{topic}-dlt")
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert report.scope.ends == "the positions in the database (holdfast_positions)"
    with sqlite3.connect(path) as connection:
        connection.execute("delete from orders where id = 12")
    (lost,) = audit(broker, group, sink, dead_letters=f"{topic}-dlt", match="id = value.id").findings
    assert (lost.fate, lost.ranges) == (Fate.LOST, ((6, 6),))
    with pytest.raises(AuditError, match="there is no such table"):
        audit(broker, group, f"sqlite:{path}?table=nothing", match="id = key")
    with pytest.raises(AuditError, match="unable to open"):
        audit(broker, group, f"sqlite:{tmp_path}/none?table=orders", match="id = key")
    with pytest.raises(UsageError, match="names a file and a table"):
        audit(broker, group, f"sqlite:{path}", match="id = key")


def run_sink(broker: str, group: str, topic: str, url: str, name: str, mark: str) -> None:
    """A sink that stores every order but the seventh, which becomes a dead letter."""
    opened = open_database(url)
    opened.connect()
    opened.migrate()
    opened.close()
    statement = f"insert into {name} values ({mark}, {mark}, {mark}, {mark})"

    def store(message: Message, connection: Any) -> None:
        number = json.loads(message.value or b"")["id"]
        if number == 7:
            raise ValueError("seven")
        connection.execute(statement, (message.topic, message.partition, message.offset, number))

    running = DatabaseSink(
        broker,
        group=group,
        topics=[topic],
        database=url,
        retry=RetryPolicy(attempts=1),
        create_topics=True,
        config={"auto.offset.reset": "earliest"},
    )
    thread = threading.Thread(target=running.run, args=(store,))
    thread.start()
    try:
        wait_until(lambda: running.stored >= ORDERS - 1, "all orders are stored")
    finally:
        running.stop()
        thread.join(60)


def test_files_have_lineage_too(broker: str, topic: str, tmp_path: Path) -> None:
    group = f"g-{topic}"
    commit(broker, group, topic, 3, 0)
    places = [{"topic": topic, "partition": 0, "offset": offset} for offset in range(3)]
    pq.write_table(pa.table({"_hf": pa.array(places), "x": [1, 2, 3]}), tmp_path / "a.parquet")
    assert audit(broker, group, f"parquet:{tmp_path}").verdict is Verdict.PROVEN
    assert (
        lineage_match(f"parquet:{tmp_path}", [topic])
        == "_hf.topic = topic AND _hf.partition = partition AND _hf.offset = offset"
    )


def test_where_the_scope_begins_can_be_said(broker: str, topic: str, tmp_path: Path) -> None:
    group = f"g-{topic}"
    commit(broker, group, topic, 20, 20)
    ids = list(range(10, ORDERS))
    pq.write_table(pa.table({"id": ids}), tmp_path / "a.parquet")
    sink = f"parquet:{tmp_path}"
    assert audit(broker, group, sink, match="id = value.id").total(Fate.LOST) == 10
    starts = {TopicPartitionOf(topic, 0): 5, TopicPartitionOf(topic, 1): 5}
    report = audit(broker, group, sink, match="id = value.id", starts=starts)
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert report.scope.begins == "--from"
    later = audit(broker, group, sink, match="id = value.id", starts=4_000_000_000_000)
    assert later.verdict is Verdict.INCONCLUSIVE


def TopicPartitionOf(topic: str, partition: int) -> object:
    from holdfast.reader import TopicPartition as OfReader

    return OfReader(topic, partition)


@pytest.mark.check
def test_what_cannot_be_audited_is_said(broker: str, database: str, topic: str) -> None:
    sink = table(database, "id bigint, body text")
    group = f"g-{topic}"
    with pytest.raises(AuditError, match="it has some for: none at all"):
        audit(broker, group, sink)
    commit(broker, group, topic, 1, 1)
    with pytest.raises(UsageError, match=r"no columns of .* say which record"):
        audit(broker, group, sink)
    with pytest.raises(UsageError, match="did you mean 'body'"):
        audit(broker, group, sink, match="boddy = value")
    with pytest.raises(UsageError, match=r"add \?table=NAME"):
        audit(broker, group, database, match="id = key")
    with pytest.raises(AuditError, match="there is no such table"):
        audit(broker, group, f"{database}?table=nothing", match="id = key")
    with pytest.raises(AuditError, match="cannot be reached"):
        audit(broker, group, "postgresql://holdfast@127.0.0.1:1/x?table=t", match="id = key")
    with pytest.raises(UsageError, match="--match is needed for a sink that is a topic"):
        audit(broker, group, f"topic:{topic}")
