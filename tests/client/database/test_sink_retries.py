"""Handlers of sinks that fail: tried again, then set aside before the position moves past them. X."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.database.sink import DatabaseSink
from holdfast.client.database.store import Database, open_database
from holdfast.client.dead_letter_dialects import read_failure
from holdfast.client.errors import HandlerFailed
from holdfast.client.messages import DeadLetter, Message, Retry, from_raw
from holdfast.client.retries import RetryPolicy
from holdfast.client.side_topics import SideTopicMissing
from holdfast.testing.broker import BrokerProcess

PARTITIONS = 2
COUNT = 60
QUICK = RetryPolicy(attempts=3, first_seconds=0.01)
SOON = {"fetch.wait.max.ms": 50}
"""Whatever else a member asks its broker for waits behind its fetch."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    settings = {"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "1000"}
    directory = tmp_path_factory.mktemp("retries") / "broker"
    with BrokerProcess(str(directory), settings=settings) as process:
        yield process


class Scene:
    """A topic with numbers, a database with a table for them, and a topic for what does not go in."""

    def __init__(self, broker: BrokerProcess, url: str, *, has_letters: bool = True) -> None:
        self.bootstrap = broker.bootstrap_servers
        self.url = url
        self.topic = f"in-{uuid4().hex[:8]}"
        self.letters = f"{self.topic}-dlt"
        names = [self.topic, *([self.letters] if has_letters else [])]
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for made in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names]).values():
            made.result()
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True})
        for number in range(COUNT):
            producer.produce(self.topic, b"%d" % number, partition=number % PARTITIONS)
        assert producer.flush(30) == 0
        self.database: Database = open_database(url)
        self.database.connect()
        self.database.migrate()
        self.database.run("create table results (number integer)", {})
        self.database.run("create table taken (number integer primary key)", {})

    def sink(self, retry: RetryPolicy | None = QUICK, **arguments: Any) -> DatabaseSink:
        return DatabaseSink(
            self.bootstrap,
            group="sink",
            topics=[self.topic],
            database=self.url,
            retry=retry,
            **{"batch_messages": 25, "batch_seconds": 0.02, "config": SOON, **arguments},
        )

    def insert(self, message: Message, connection: Any, table: str = "results") -> None:
        mark = "%s" if self.url.startswith("postgres") else "?"
        connection.execute(f"insert into {table} values ({mark})", (int(message.value or b""),))

    def inserting(self, fail: Callable[[int], Any]) -> Callable[[Message, Any], Any]:
        def handler(message: Message, connection: Any) -> Any:
            self.insert(message, connection)
            return fail(int(message.value or b""))

        return handler

    def positions(self) -> int:
        keys = [(self.topic, index) for index in range(PARTITIONS)]
        return sum(each.position for each in self.database.positions("sink", keys).values())

    def run(self, run: Callable[[], None], sink: DatabaseSink) -> None:
        """Until every position is at the end."""
        positions = open_database(self.url)
        positions.connect()
        keys = [(self.topic, index) for index in range(PARTITIONS)]

        def watch() -> None:
            pause = threading.Event()
            while sum(each.position for each in positions.positions("sink", keys).values()) < COUNT:
                pause.wait(0.02)
            sink.stop()

        watcher = threading.Thread(target=watch)
        watcher.start()
        run()
        watcher.join()
        positions.close()

    def numbers(self) -> list[int]:
        return sorted(row[0] for row in self.database.run("select number from results", {}).fetchall())

    def dead(self) -> list[Message]:
        consumer = RawConsumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "reader",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
            }
        )
        consumer.assign([TopicPartition(self.letters, index, 0) for index in range(PARTITIONS)])
        found: list[Message] = []
        ended = 0
        while ended < PARTITIONS:
            raw: Any = consumer.poll(10)
            assert raw is not None
            if raw.error():
                ended += 1
            else:
                found.append(from_raw(raw))
        consumer.close()
        return found


@pytest.fixture
def scene(broker: BrokerProcess, database_url: str) -> Iterator[Scene]:
    scene = Scene(broker, database_url)
    yield scene
    scene.database.close()


def all_but(*without: int) -> list[int]:
    return [number for number in range(COUNT) if number not in without]


def test_a_message_that_fails_at_first_is_stored_once(scene: Scene) -> None:
    attempts: Counter[int] = Counter()

    def fail(number: int) -> Any:
        attempts[number] += 1
        if number in (6, 9, 10) and attempts[number] < 3:
            return Retry("not yet")
        return None

    sink = scene.sink()
    scene.run(lambda: sink.run(scene.inserting(fail)), sink)
    assert scene.numbers() == all_but()
    assert [attempts[number] for number in (6, 9, 10)] >= [3, 3, 3]
    assert scene.dead() == []


def test_a_message_that_is_given_up_on_is_set_aside_and_everything_else_is_stored(scene: Scene) -> None:
    def fail(number: int) -> None:
        if number in (6, 8, 9):
            raise ValueError("never")
        if number == 21:
            raise DeadLetter("nobody wants it")

    sink = scene.sink()
    scene.run(lambda: sink.run(scene.inserting(fail)), sink)
    assert scene.numbers() == all_but(6, 8, 9, 21)
    letters = {int(each.value or b""): each for each in scene.dead()}
    assert sorted(letters) == [6, 8, 9, 21]
    failure = read_failure(letters[6].headers)
    assert failure is not None
    assert (failure.topic, failure.partition, failure.offset) == (scene.topic, 0, 3)
    assert (failure.error, failure.attempts) == ("ValueError", 3)
    assert sink.stored == COUNT - 4


def test_what_the_database_refuses_is_judged_like_any_other_failure(scene: Scene) -> None:
    scene.database.run("insert into taken values (6)", {})

    def handler(message: Message, connection: Any) -> None:
        scene.insert(message, connection, "taken")
        scene.insert(message, connection)

    sink = scene.sink()
    scene.run(lambda: sink.run(handler), sink)
    assert scene.numbers() == all_but(6)
    (letter,) = scene.dead()
    failure = read_failure(letter.headers)
    assert failure is not None
    assert failure.error in ("psycopg.errors.UniqueViolation", "sqlite3.IntegrityError")


@pytest.mark.parametrize("in_batches", [False, True])
def test_what_is_refused_at_the_commit_is_judged_like_any_other_failure(
    broker: BrokerProcess, postgres_url: str, in_batches: bool
) -> None:
    scene = Scene(broker, postgres_url)
    scene.database.run("alter table results add unique (number) deferrable initially deferred", {})
    scene.database.run("insert into results values (6), (33)", {})

    def handler(message: Message, connection: Any) -> None:
        scene.insert(message, connection)

    def all_of(batch: Sequence[Message], connection: Any) -> None:
        for message in batch:
            handler(message, connection)

    sink = scene.sink()
    scene.run(lambda: sink.run_batches(all_of) if in_batches else sink.run(handler), sink)
    assert scene.numbers() == list(range(COUNT))
    assert sorted(int(each.value or b"") for each in scene.dead()) == [6, 33]
    failure = read_failure(scene.dead()[0].headers)
    assert failure is not None
    assert failure.error == "psycopg.errors.UniqueViolation"
    scene.database.close()


def out_of_space(url: str) -> Exception:
    if url.startswith("postgres"):
        return psycopg.errors.DiskFull("no space left")
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_fault_of_the_database_is_waited_out_and_no_message_is_blamed(
    scene: Scene, is_wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [out_of_space(scene.url) for _ in range(2)]

    def fail(number: int) -> None:
        if number == 6 and faults:
            fault = faults.pop()
            if is_wrapped:
                raise LookupError("a handler's own") from fault
            raise fault

    sink = scene.sink(RetryPolicy(attempts=1))
    scene.run(lambda: sink.run(scene.inserting(fail)), sink)
    assert scene.numbers() == list(range(COUNT))
    assert scene.dead() == []
    assert "nothing can be stored now" in caplog.text


def test_a_statement_that_takes_too_long_once_is_waited_out(broker: BrokerProcess, postgres_url: str) -> None:
    scene = Scene(broker, postgres_url)
    slow = [1]

    def handler(message: Message, connection: Any) -> None:
        if message.value == b"6" and slow:
            slow.pop()
            connection.execute("set local statement_timeout = 1")
            connection.execute("select pg_sleep(10)")
        scene.insert(message, connection)

    sink = scene.sink(None)
    scene.run(lambda: sink.run(handler), sink)
    assert scene.numbers() == list(range(COUNT))
    scene.database.close()


def test_a_batch_that_fails_is_divided_down_to_the_message(scene: Scene) -> None:
    sizes: list[int] = []

    def handler(batch: Sequence[Message], connection: Any) -> None:
        sizes.append(len(batch))
        for message in batch:
            scene.insert(message, connection)
            if message.value in (b"6", b"33"):
                raise ValueError("never")

    sink = scene.sink()
    scene.run(lambda: sink.run_batches(handler), sink)
    assert scene.numbers() == all_but(6, 33)
    assert sorted(int(each.value or b"") for each in scene.dead()) == [6, 33]
    assert min(sizes) == 1
    assert max(sizes) > 1


def test_a_policy_may_say_stop(scene: Scene) -> None:
    def fail(number: int) -> None:
        if number == 6:
            raise ValueError("never")

    sink = scene.sink(RetryPolicy(attempts=2, first_seconds=0.01, give_up="stop"))
    with pytest.raises(HandlerFailed, match=f"{scene.topic}-0@3.*2 attempts"):
        sink.run(scene.inserting(fail))
    assert 6 not in scene.numbers()


def test_no_position_passes_a_message_that_is_not_safe_elsewhere(
    broker: BrokerProcess, database_url: str
) -> None:
    scene = Scene(broker, database_url, has_letters=False)

    def fail(number: int) -> None:
        if number == 6:
            raise DeadLetter("never")

    with pytest.raises(SideTopicMissing, match=scene.letters):
        scene.sink().run(scene.inserting(fail))
    stands = scene.database.positions("sink", [(scene.topic, 0)])[scene.topic, 0]
    assert stands.position <= 3
    sink = scene.sink(create_topics=True)
    scene.run(lambda: sink.run(scene.inserting(fail)), sink)
    assert scene.numbers() == all_but(6)
    assert [each.value for each in scene.dead()] == [b"6"]
    scene.database.close()


# The pipeline


def test_with_a_pipeline_every_message_is_stored_once(scene: Scene) -> None:
    sink = scene.sink(pipeline=True)
    scene.run(lambda: sink.run(scene.inserting(lambda number: None)), sink)
    assert scene.numbers() == all_but()


def test_with_a_pipeline_the_message_that_was_refused_is_found(scene: Scene) -> None:
    scene.database.run("insert into taken values (6), (39)", {})

    def handler(message: Message, connection: Any) -> None:
        scene.insert(message, connection, "taken")
        scene.insert(message, connection)

    sink = scene.sink(pipeline=True)
    scene.run(lambda: sink.run(handler), sink)
    assert scene.numbers() == all_but(6, 39)
    assert sorted(int(each.value or b"") for each in scene.dead()) == [6, 39]


def test_with_a_pipeline_and_without_retries_the_message_is_named(
    broker: BrokerProcess, postgres_url: str
) -> None:
    scene = Scene(broker, postgres_url)
    scene.database.run("insert into taken values (6)", {})

    def handler(message: Message, connection: Any) -> None:
        scene.insert(message, connection, "taken")

    with pytest.raises(psycopg.errors.UniqueViolation) as raised:
        scene.sink(None, pipeline=True).run(handler)
    assert f"while handling {scene.topic}-0@3" in raised.value.__notes__
    scene.database.close()


def test_with_a_pipeline_a_handler_can_read_what_it_wrote(broker: BrokerProcess, postgres_url: str) -> None:
    scene = Scene(broker, postgres_url)
    seen: list[int] = []

    def handler(message: Message, connection: Any) -> None:
        scene.insert(message, connection)
        seen.append(connection.execute("select count(*) from results").fetchone()[0])

    sink = scene.sink(pipeline=True)
    scene.run(lambda: sink.run(handler), sink)
    assert seen == list(range(1, COUNT + 1))
    scene.database.close()


def test_with_a_pipeline_a_handler_can_ask_what_a_statement_did(
    broker: BrokerProcess, postgres_url: str
) -> None:
    scene = Scene(broker, postgres_url)
    scene.database.run("insert into taken values (6)", {})
    wanted = "update taken set number = number where number = %s"

    def handler(message: Message, connection: Any) -> None:
        done = connection.execute(wanted, (int(message.value or b""),))
        if done.rowcount == 0:
            assert done.statusmessage == "UPDATE 0"
            assert connection.execute("select 1 as one").description[0].name == "one"
            scene.insert(message, connection)

    sink = scene.sink(pipeline=True)
    scene.run(lambda: sink.run(handler), sink)
    assert scene.numbers() == all_but(6)
    scene.database.close()


def test_a_refusal_that_a_handler_deals_with_is_dealt_with_in_spite_of_the_pipeline(
    broker: BrokerProcess, postgres_url: str
) -> None:
    scene = Scene(broker, postgres_url)
    scene.database.run("insert into taken values (6), (39)", {})

    def handler(message: Message, connection: Any) -> None:
        try:
            with connection.transaction():
                scene.insert(message, connection, "taken")
        except psycopg.errors.UniqueViolation:
            return
        scene.insert(message, connection)

    sink = scene.sink(pipeline=True)
    scene.run(lambda: sink.run(handler), sink)
    assert scene.numbers() == all_but(6, 39)
    assert scene.dead() == []
    scene.database.close()


def test_a_handler_that_hides_every_refusal_does_not_hide_those_of_others(
    broker: BrokerProcess, postgres_url: str
) -> None:
    scene = Scene(broker, postgres_url)
    scene.database.run("insert into taken values (6)", {})

    def handler(message: Message, connection: Any) -> None:
        scene.insert(message, connection, "taken")
        with suppress(psycopg.Error):
            connection.execute("select 1").fetchone()
        scene.insert(message, connection)

    sink = scene.sink(pipeline=True)
    scene.run(lambda: sink.run(handler), sink)
    assert scene.numbers() == all_but(6)
    assert [each.value for each in scene.dead()] == [b"6"]
    scene.database.close()


def test_a_handler_may_copy_which_no_pipeline_can(broker: BrokerProcess, postgres_url: str) -> None:
    scene = Scene(broker, postgres_url)
    calls: list[int] = []

    def handler(batch: Sequence[Message], connection: Any) -> None:
        calls.append(len(batch))
        with connection.cursor().copy("copy results from stdin") as copy:
            for message in batch:
                copy.write_row((int(message.value or b""),))

    sink = scene.sink(pipeline=True)
    scene.run(lambda: sink.run_batches(handler), sink)
    assert scene.numbers() == all_but()
    assert sum(calls) == COUNT + calls[0]
    scene.database.close()
