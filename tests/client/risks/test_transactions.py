"""HF108, HF109, HF310, HF311: writes that belong together, and those that must not count."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.client import Consumer, Message, Output, Processor, UnsafeSetting
from holdfast.client.database.store import open_database
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import SHORT_SESSION, Background, Scene, numbers, take, value_of

CONSUMER: dict[str, Any] = {**SHORT_SESSION, "log_level": 0}
PRODUCER: dict[str, Any] = {"log_level": 0}

# ---------------------------------------------------------------- HF108: a writer that was replaced


def test_hf108_zombie_plain_client_writes_twice(here: Scene) -> None:
    source, target = here.create_topic("hf108-plain"), here.create_topic("hf108-plain-out")
    here.write(source, {0: ["job"]})
    settings = {"max.poll.interval.ms": 1500, **SHORT_SESSION}
    zombie, successor = here.consumer(source, settings), here.consumer(source, settings)
    zombie.subscribe([source])
    (job,) = take(zombie, 1)
    # It is so long at it that the group gives its job to another, who does it.
    successor.subscribe([source])
    (same,) = take(successor, 1)
    for message in (same, job):
        producer = here.producer()
        producer.produce(target, value_of(message))
        producer.flush(30)
    for member in (zombie, successor):
        member.close()
    assert here.read(target) == {0: ["job", "job"]}


def test_hf108_zombie_ours_is_refused(here: Scene) -> None:
    source, target = here.create_topic("hf108-ours"), here.create_topic("hf108-ours-out")
    here.write(source, {0: ["job"]})
    is_replaced, has_begun = threading.Event(), threading.Event()

    def make() -> Processor:
        return Processor(
            here.bootstrap_servers,
            group=source,
            topics=[source],
            commit_seconds=0.1,
            consumer_config={**CONSUMER, "max.poll.interval.ms": 1500},
            producer_config=PRODUCER,
        )

    def slowly(message: Message) -> list[Output]:
        has_begun.set()
        is_replaced.wait(60)
        return [Output(target, message.value)]

    zombie, successor = make(), make()
    running = Background(lambda: zombie.run(slowly))
    assert has_begun.wait(60)
    also_running = Background(lambda: successor.run(lambda message: [Output(target, message.value)]))
    wait_until(lambda: successor.committed == 1, "another does the job")
    is_replaced.set()
    # The next job is done once too: by then the zombie has learnt that the first was not its to finish.
    here.write(source, {0: ["next"]})
    wait_until(lambda: zombie.committed + successor.committed == 2, "the next job is done")
    for processor in (zombie, successor):
        processor.stop()
    running.finish()
    also_running.finish()
    assert here.read(target) == {0: ["job", "next"]}


# ---------------------------------------------------------------- HF109: half of what belongs together

PLAIN_HALF = """
import os, signal, sys
from confluent_kafka import Producer
bootstrap, taken, given = sys.argv[1:]
producer = Producer({"bootstrap.servers": bootstrap})
producer.produce(taken, "10 from a")
producer.flush()
os.kill(os.getpid(), signal.SIGKILL)
producer.produce(given, "10 to b")
producer.flush()
"""
OURS_HALF = """
import os, signal, sys, threading
from confluent_kafka import Consumer, TopicPartition
from holdfast.client import Output, Processor
bootstrap, transfers, taken, given, *dies = sys.argv[1:]
def die():
    # Not before the first half is in the log.
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "looks", "isolation.level": "read_uncommitted"})
    while reader.get_watermark_offsets(TopicPartition(taken, 0))[1] == 0:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
if dies:
    threading.Thread(target=die).start()
def book(message):
    return [Output(taken, b"10 from a"), Output(given, b"10 to b")]
# Under the same names, so that the next to run takes over at once.
processor = Processor(
    bootstrap, group=transfers, topics=[transfers], commit_seconds=10 if dies else 0.1,
    consumer_config={"group.instance.id": "booker"}, producer_config={"transactional.id": transfers},
)
processor.run(book)
"""


def test_hf109_half_of_two_writes_plain_client_leaves_visible(here: Scene) -> None:
    taken, given = here.create_topic("hf109-plain-taken"), here.create_topic("hf109-plain-given")
    here.program(PLAIN_HALF, taken, given).ends()
    assert (here.read(taken), here.read(given)) == ({0: ["10 from a"]}, {0: []})


def test_hf109_half_of_two_writes_ours_is_never_visible(here: Scene) -> None:
    transfers, taken, given = (here.create_topic(f"hf109-ours-{name}") for name in ("in", "taken", "given"))
    here.write(transfers, {0: ["a to b"]})
    arguments = (transfers, taken, given)
    here.program(OURS_HALF, *arguments, "dies").ends()
    assert here.read(taken, isolation="read_uncommitted") == {0: ["10 from a"]}
    assert (here.read(taken), here.read(given)) == ({0: []}, {0: []})
    here.program(OURS_HALF, *arguments)
    wait_until(lambda: here.read(given) == {0: ["10 to b"]}, "the transfer is made")
    wait_until(lambda: here.read(taken) == {0: ["10 from a"]}, "and what was half made is taken back")


# ---------------------------------------------------------------- HF310: messages that were taken back


@pytest.fixture
def taken_back(here: Scene) -> Iterator[str]:
    """A topic with a message that counts, one that was taken back, and one that nobody has decided about."""
    topic = here.create_topic(f"hf310-{id(here)}")
    producer = here.producer({"transactional.id": topic})
    producer.init_transactions(30)
    for value, end in (
        ("kept", producer.commit_transaction),
        ("taken back", producer.abort_transaction),
        ("undecided", None),
    ):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(30)
        if end is not None:
            end(30)
    yield topic
    producer.abort_transaction(30)


def test_hf310_aborted_message_plain_client_hands_out(here: Scene, taken_back: str) -> None:
    consumer = here.consumer(taken_back, {"isolation.level": "read_uncommitted"})
    consumer.subscribe([taken_back])
    assert [value_of(message) for message in take(consumer, 3)] == ["kept", "taken back", "undecided"]
    consumer.close()


def test_hf310_aborted_message_ours_does_not_hand_out(here: Scene, taken_back: str) -> None:
    handled: list[str] = []
    consumer = Consumer(here.bootstrap_servers, group=taken_back, topics=[taken_back], commit_seconds=0.05)
    running = Background(lambda: consumer.run(lambda message: handled.append(value_of(message))))
    # Behind the kept one and its marker, the one taken back and its marker; before the undecided one.
    wait_until(lambda: here.position(taken_back, taken_back) == 4, "everything decided is read")
    consumer.stop()
    running.finish()
    assert handled == ["kept"]
    with pytest.raises(UnsafeSetting, match="HF310"):
        Consumer(
            here.bootstrap_servers, group="g", topics=["t"], config={"isolation.level": "read_uncommitted"}
        )


# ---------------------------------------------------------------- HF311: a side effect and its position

PLAIN_ROWS = """
import os, signal, sqlite3, sys
from confluent_kafka import Consumer
bootstrap, topic, path, *dies = sys.argv[1:]
database = sqlite3.connect(path, isolation_level=None)
consumer = Consumer({
    "bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest", "enable.auto.commit": False,
    "session.timeout.ms": 1000, "heartbeat.interval.ms": 200,
})
consumer.subscribe([topic])
while True:
    message = consumer.poll(1)
    if message is None:
        continue
    database.execute("insert into payments values (?)", (message.value().decode(),))
    if dies and message.value() == b"3":
        os.kill(os.getpid(), signal.SIGKILL)
    consumer.commit(message, asynchronous=False)
"""
OURS_ROWS = """
import os, signal, sys
from holdfast.client import DatabaseSink
bootstrap, topic, path, *dies = sys.argv[1:]
def pay(message, connection):
    connection.execute("insert into payments values (?)", (message.value.decode(),))
    if dies and message.value == b"3":
        os.kill(os.getpid(), signal.SIGKILL)
DatabaseSink(
    bootstrap, group=topic, topics=[topic], database=path, batch_messages=2,
    config={"session.timeout.ms": 1000, "heartbeat.interval.ms": 200},
).run(pay)
"""


def payments(path: Path) -> list[str]:
    with sqlite3.connect(path) as database:
        return [
            row[0] for row in database.execute("select what from payments order by cast(what as integer)")
        ]


def with_payments(here: Scene, topic: str, path: Path) -> str:
    here.create_topic(topic)
    here.write(topic, {0: numbers(0, 5)})
    with sqlite3.connect(path) as database:
        database.execute("create table payments (what text)")
    return topic


def test_hf311_death_between_effect_and_position_plain_client_pays_twice(here: Scene, tmp_path: Path) -> None:
    path = tmp_path / "payments"
    topic = with_payments(here, "hf311-plain", path)
    here.program(PLAIN_ROWS, topic, str(path), "dies").ends()
    here.program(PLAIN_ROWS, topic, str(path))
    wait_until(lambda: here.position(topic, topic) == 5, "everything is paid")
    assert payments(path) == ["0", "1", "2", "3", "3", "4"]


def test_hf311_death_between_effect_and_position_ours_pays_once(here: Scene, tmp_path: Path) -> None:
    path = tmp_path / "payments"
    topic = with_payments(here, "hf311-ours", path)
    database = open_database(str(path))
    database.connect()
    database.migrate()
    database.close()
    here.program(OURS_ROWS, topic, str(path), "dies").ends()
    here.program(OURS_ROWS, topic, str(path))
    wait_until(lambda: payments(path)[-1:] == ["4"], "everything is paid")
    assert payments(path) == numbers(0, 5)
