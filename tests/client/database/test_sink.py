"""Messages into a database exactly once: whatever happens to members, connections and topics."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.consuming.assignment import CommittedOffsetLost
from holdfast.client.database.postgres import PostgresDatabase
from holdfast.client.database.sink import DatabaseSink
from holdfast.client.database.store import Database, DatabaseUnreachable, SchemaMissing, open_database
from holdfast.client.messages import Message
from holdfast.client.topic_ids import TopicRecreated
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.postgres import PostgresServer

PARTITIONS = 3
SETTINGS = {"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "1000"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("sinks") / "broker"
    with BrokerProcess(str(directory), settings=SETTINGS) as process:
        yield process


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    return create(broker, f"orders-{uuid4().hex[:8]}")


def create(broker: BrokerProcess, topic: str) -> str:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result()
    return topic


def fill(broker: BrokerProcess, topic: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all"})
    for number in numbers:
        producer.produce(topic, b"%d" % number, key=b"%d" % number)
    assert producer.flush(30) == 0


def prepared(url: str) -> Database:
    """A database with our tables, and one for results that has no key: what is stored twice is there twice."""
    database = open_database(url)
    database.connect()
    database.migrate()
    database.run("create table results (number integer, member text)", {})
    return database


def results(database: Database) -> list[int]:
    return [row[0] for row in database.run("select number from results order by number", {}).fetchall()]


def sink_of(broker: BrokerProcess, topic: str, database: Database, **arguments: Any) -> DatabaseSink:
    # Whatever else a member asks its broker for waits behind its fetch.
    soon = {"fetch.wait.max.ms": 50}
    arguments = {"batch_messages": 20, "batch_seconds": 0.02, "config": soon, **arguments}
    return DatabaseSink(
        broker.bootstrap_servers, group="sink", database=database.url, **{"topics": [topic], **arguments}
    )


def insert(message: Message, connection: Any) -> None:
    mark = "?" if type(connection).__module__ == "sqlite3" else "%s"
    number = int(message.value or b"")
    connection.execute(f"insert into results values ({mark}, {mark})", (number, f"pid {os.getpid()}"))


class Until:
    """Stops sinks when the database holds so many rows."""

    def __init__(self, url: str, count: int, *sinks: DatabaseSink) -> None:
        self._url = url
        self._count = count
        self._sinks = sinks
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        wait_for_rows(self._url, self._count)
        for sink in self._sinks:
            sink.stop()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def wait_for_rows(url: str, least: int) -> None:
    pause = threading.Event()
    database = open_database(url)
    while rows(database) < least:
        pause.wait(0.02)
    database.close()


def rows(database: Database) -> int:
    try:
        if database.connection is None:
            database.connect()
        return int(database.run("select count(*) from results", {}).fetchone()[0])
    except (DatabaseUnreachable, psycopg.Error):
        database.close()
        return -1


def test_every_message_is_stored_once(broker: BrokerProcess, topic: str, database_url: str) -> None:
    database = prepared(database_url)
    fill(broker, topic, range(300))
    sink = sink_of(broker, topic, database)
    with Until(database_url, 300, sink):
        sink.run(insert)
    assert (results(database), sink.stored) == (list(range(300)), 300)
    database.close()


def test_a_second_run_goes_on_where_the_database_says(
    broker: BrokerProcess, topic: str, database_url: str
) -> None:
    database = prepared(database_url)
    for last in (100, 250):
        fill(broker, topic, range(len(results(database)), last))
        sink = sink_of(broker, topic, database)
        with Until(database_url, last, sink):
            sink.run(insert)
    assert results(database) == list(range(250))
    database.close()


def test_lag_tools_see_where_every_partition_stands(
    broker: BrokerProcess, topic: str, database_url: str
) -> None:
    database = prepared(database_url)
    fill(broker, topic, range(300))
    sink = sink_of(broker, topic, database)
    with Until(database_url, 300, sink):
        sink.run(insert)
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "sink"})
    places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    ends = [consumer.get_watermark_offsets(place, 30)[1] for place in places]
    assert [place.offset for place in consumer.committed(places, 30)] == ends
    consumer.close()
    database.close()


@pytest.mark.check
def test_batches_are_handed_over_whole_and_in_order(
    broker: BrokerProcess, topic: str, database_url: str
) -> None:
    database = prepared(database_url)
    fill(broker, topic, range(200))
    sink = sink_of(broker, topic, database, batch_messages=50)
    sizes: list[int] = []
    seen: dict[int, list[int]] = {}

    def store(batch: Sequence[Message], connection: Any) -> None:
        sizes.append(len(batch))
        for message in batch:
            seen.setdefault(message.partition, []).append(message.offset)
            insert(message, connection)

    with Until(database_url, 200, sink):
        sink.run_batches(store)
    assert max(sizes) <= 50
    assert all(offsets == sorted(set(offsets)) for offsets in seen.values())
    assert results(database) == list(range(200))
    database.close()


def test_a_failing_handler_rolls_back_and_says_where(
    broker: BrokerProcess, topic: str, database_url: str
) -> None:
    database = prepared(database_url)
    fill(broker, topic, range(50))

    def fail(message: Message, connection: Any) -> None:
        insert(message, connection)
        if message.value == b"31":
            raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one") as raised:
        sink_of(broker, topic, database).run(fail)
    assert any(topic in note for note in raised.value.__notes__)
    assert 31 not in results(database)
    sink = sink_of(broker, topic, database)
    with Until(database_url, 50, sink):
        sink.run(insert)
    assert results(database) == list(range(50))
    database.close()


@pytest.mark.check
def test_missing_tables_stop_it(broker: BrokerProcess, topic: str, database_url: str) -> None:
    with pytest.raises(SchemaMissing, match="sink migrate"):
        DatabaseSink(broker.bootstrap_servers, group="g", topics=[topic], database=database_url).run(insert)


def test_a_database_that_is_starting_is_waited_for(
    broker: BrokerProcess, topic: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose machine came up before the database was done with its recovery."""
    database = prepared(postgres_url)
    fill(broker, topic, range(10))
    attempts: list[int] = []
    connect = psycopg.connect

    def starting(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            attempts.append(1)
            if len(attempts) < 3:
                raise psycopg.OperationalError("FATAL:  the database system is starting up")
        return connect(*arguments, **named)

    monkeypatch.setattr(psycopg, "connect", starting)
    sink = sink_of(broker, topic, database)
    with Until(postgres_url, 10, sink):
        sink.run(insert)
    assert results(database) == list(range(10))
    assert len(attempts) == 3
    database.close()


def test_a_topic_made_anew_stops_it_at_its_start(
    broker: BrokerProcess, topic: str, database_url: str
) -> None:
    database = prepared(database_url)
    fill(broker, topic, range(30))
    sink = sink_of(broker, topic, database)
    with Until(database_url, 30, sink):
        sink.run(insert)
    make_anew(broker, topic)
    fill(broker, topic, range(100, 200))
    with pytest.raises(TopicRecreated, match="recreated"):
        sink_of(broker, topic, database).run(insert)
    assert results(database) == list(range(30))
    going_on = sink_of(broker, topic, database, lost_offsets="earliest")
    with Until(database_url, 130, going_on):
        going_on.run(insert)
    assert results(database) == [*range(30), *range(100, 200)]
    database.close()


def test_messages_of_a_topic_made_anew_meanwhile_are_not_stored(
    broker: BrokerProcess, topic: str, database_url: str
) -> None:
    database = prepared(database_url)
    fill(broker, topic, range(1))
    sink = sink_of(broker, topic, database, batch_messages=1, batch_seconds=0)

    def store(message: Message, connection: Any) -> None:
        insert(message, connection)
        make_anew(broker, topic)
        fill(broker, topic, range(100, 200))

    with pytest.raises((TopicRecreated, CommittedOffsetLost)):
        sink.run(store)
    assert results(database) == [0]
    database.close()


def test_a_topic_that_is_deleted_holds_no_other_back(
    broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    database = prepared(str(tmp_path / "sink.sqlite"))
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    doomed = create(broker, f"doomed-{uuid4().hex[:8]}")
    for each, numbers in ((topic, range(10)), (doomed, range(10, 20))):
        fill(broker, each, numbers)
    sink = sink_of(broker, topic, database, topics=[topic, doomed])

    def delete() -> None:
        wait_for_rows(database.url, 20)
        admin.delete_topics([doomed])[doomed].result()
        fill(broker, topic, range(20, 30))
        wait_for_rows(database.url, 30)
        sink.stop()

    deleter = threading.Thread(target=delete)
    deleter.start()
    sink.run(insert)
    deleter.join()
    assert results(database) == list(range(30))
    database.close()


def make_anew(broker: BrokerProcess, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.delete_topics([topic])[topic].result()
    create(broker, topic)


def test_a_lost_connection_loses_and_doubles_nothing(
    broker: BrokerProcess, topic: str, postgres_url: str
) -> None:
    """The server ends our connection in the middle of work, and at the moment of the commit."""
    database = prepared(postgres_url)
    fill(broker, topic, range(200))
    sink = sink_of(broker, topic, database)
    cuts = iter((5, 40, 77, 120))
    cut = [next(cuts)]
    handled = [0]

    def store(message: Message, connection: Any) -> None:
        insert(message, connection)
        handled[0] += 1
        if handled[0] == cut[0]:
            cut[0] = next(cuts, -1)
            database.connection.execute("select pg_terminate_backend(%s)", (connection.info.backend_pid,))

    with Until(postgres_url, 200, sink):
        sink.run(store)
    assert cut == [-1]
    assert results(database) == list(range(200))
    database.close()


@pytest.mark.check
@pytest.mark.crash
def test_a_crashed_database_is_waited_for(broker: BrokerProcess, topic: str) -> None:
    with PostgresServer() as server:
        database = prepared(server.url)
        fill(broker, topic, range(300))
        sink = sink_of(broker, topic, database)

        def store(message: Message, connection: Any) -> None:
            insert(message, connection)
            connection.execute("select pg_sleep(0.002)")

        thread = threading.Thread(target=sink.run, args=(store,))
        with Until(server.url, 300, sink):
            thread.start()
            for least in (40, 150):
                wait_for_rows(server.url, least)
                server.crash()
                server.start()
            thread.join()
        database.connect()
        assert results(database) == list(range(300))
        database.close()


class SaysNothing(PostgresDatabase):
    """Loses its connection right after some commits, before it is told of them."""

    cuts = 3

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            yield
        if self.cuts > 0:
            self.cuts -= 1
            with psycopg.connect(self.url, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s)", (self.connection.info.backend_pid,))
            self.connection.execute("select 1")


def test_a_commit_whose_answer_is_lost_counts(broker: BrokerProcess, topic: str, postgres_url: str) -> None:
    database = prepared(postgres_url)
    fill(broker, topic, range(100))
    sink = sink_of(broker, topic, database)
    sink._database = silent = SaysNothing(postgres_url)
    with Until(postgres_url, 100, sink):
        sink.run(insert)
    assert silent.cuts == 0
    assert results(database) == list(range(100))
    database.close()


def test_a_transaction_that_another_was_in_the_way_of_is_tried_again(
    broker: BrokerProcess, topic: str, postgres_url: str
) -> None:
    database = prepared(postgres_url)
    fill(broker, topic, range(50))
    sink = sink_of(broker, topic, database)
    refusals = [2]

    def store(message: Message, connection: Any) -> None:
        insert(message, connection)
        if refusals[0]:
            refusals[0] -= 1
            raise psycopg.errors.DeadlockDetected("two in a circle")

    with Until(postgres_url, 50, sink):
        sink.run(store)
    assert refusals == [0]
    assert results(database) == list(range(50))
    database.close()


@pytest.mark.check
@pytest.mark.crash
def test_a_broker_that_crashes_is_waited_for(tmp_path: Path, database_url: str) -> None:
    database = prepared(database_url)
    with BrokerProcess(str(tmp_path / "broker"), settings=SETTINGS) as broker:
        topic = create(broker, "orders")
        fill(broker, topic, range(200))
        sink = sink_of(broker, topic, database, batch_messages=5)
        thread = threading.Thread(target=sink.run, args=(insert,))
        with Until(database_url, 400, sink):
            thread.start()
            wait_for_rows(database_url, 50)
            broker.crash()
            broker.start()
            fill(broker, topic, range(200, 400))
            thread.join()
    assert results(database) == list(range(400))
    database.close()


def test_two_members_share_the_work(broker: BrokerProcess, topic: str, postgres_url: str) -> None:
    database = prepared(postgres_url)
    fill(broker, topic, range(150))
    one, two = sink_of(broker, topic, database), sink_of(broker, topic, database)
    threads = [threading.Thread(target=each.run, args=(insert,)) for each in (one, two)]
    with Until(postgres_url, 300, one, two):
        threads[0].start()
        wait_for_rows(postgres_url, 1)
        threads[1].start()
        fill(broker, topic, range(150, 300))
        for thread in threads:
            thread.join()
    assert results(database) == list(range(300))
    database.close()


MEMBER = """
import sys, time
from holdfast.client.database.postgres import PostgresDatabase
from holdfast.client.database.sink import DatabaseSink
bootstrap, topic, url, pause = sys.argv[1:]
def insert(message, connection):
    connection.execute("insert into results values (%s, %s)", (int(message.value), sys.argv[0]))
    time.sleep(float(pause))
DatabaseSink(bootstrap, group="sink", topics=[topic], database=url, batch_messages=10, batch_seconds=0.02,
    config={"session.timeout.ms": 2000, "heartbeat.interval.ms": 300}).run(insert)
"""


def member(broker: BrokerProcess, topic: str, url: str, pause: float = 0.003) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", MEMBER, broker.bootstrap_servers, topic, url, str(pause)])


@pytest.mark.check
@pytest.mark.crash
def test_members_killed_and_stopped_store_each_message_once(
    broker: BrokerProcess, topic: str, postgres_url: str
) -> None:
    """One is killed in the middle of work; another sleeps until it was replaced, and wakes up: a zombie."""
    database = prepared(postgres_url)
    fill(broker, topic, range(400))
    members = [member(broker, topic, postgres_url)]
    try:
        wait_for_rows(postgres_url, 30)
        members[0].kill()
        members[0].wait()
        members.append(member(broker, topic, postgres_url))
        before = len(results(database))
        wait_for_rows(postgres_url, before + 1)
        members[1].send_signal(signal.SIGSTOP)
        before = len(results(database))
        members.append(member(broker, topic, postgres_url, 0.001))
        wait_for_rows(postgres_url, before + 51)
        members[1].send_signal(signal.SIGCONT)
        wait_for_rows(postgres_url, 400)
        for each in members[1:]:
            each.send_signal(signal.SIGTERM)
        assert [each.wait(30) for each in members[1:]] == [0, 0]
    finally:
        for each in members:
            each.kill()
            each.wait()
    assert results(database) == list(range(400))
    database.close()
