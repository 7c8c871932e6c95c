"""Programs on our clients, as golden directories were made with and are gone on with: the same code for both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer
from tests.golden.scene import wait_until

from holdfast.client.consumer import Consumer
from holdfast.client.database.sink import DatabaseSink
from holdfast.client.messages import DeadLetter, Message
from holdfast.client.processor import Output
from holdfast.client.retries import RetryTopics
from holdfast.client.state import State, StatefulProcessor

PARTITIONS: Final = 2
KEYS: Final = 5
PER_PART: Final = 30
SOON: Final = {"fetch.wait.max.ms": 50}
READINGS, BOOKINGS, MAIL = "readings", "bookings", "mail"
TOPICS: Final = (READINGS, f"{READINGS}-totals", BOOKINGS, MAIL)


def numbers(part: int) -> range:
    return range((part - 1) * PER_PART, part * PER_PART)


def fill(bootstrap: str, topic: str, part: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "log_level": 0})
    for number in numbers(part):
        key = number % KEYS
        producer.produce(topic, b"%d" % number, key=b"%d" % key, partition=key % PARTITIONS)
        producer.flush(30)


def run_until(client: Any, run: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Run a client on this thread, and stop it when it is over."""

    def watch() -> None:
        try:
            wait_until(is_over)
        finally:
            client.stop()

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    watcher.join()
    assert is_over()


# A processor with a state


def total(message: Message, state: State) -> list[Output]:
    """The sum and the count so far, per key."""
    key = message.key or b""
    summed, count = map(int, (state.get(key) or b"0 0").split())
    state[key] = b"%d %d" % (summed + int(message.value or b""), count + 1)
    return [Output(f"{READINGS}-totals", state[key], key=key)]


def totals(parts: int) -> list[tuple[bytes, bytes]]:
    """Every output there must be: a message that is counted twice or not at all changes all that follow."""
    sums: dict[bytes, tuple[int, int]] = {}
    found = []
    for number in range(parts * PER_PART):
        key = b"%d" % (number % KEYS)
        summed, count = sums.get(key, (0, 0))
        sums[key] = summed + number, count + 1
        found.append((key, b"%d %d" % sums[key]))
    return sorted(found)


def process(bootstrap: str, directory: Path, count: int) -> None:
    processor = StatefulProcessor(
        bootstrap,
        group="adders",
        topics=[READINGS],
        directory=str(directory / "state"),
        commit_seconds=0.05,
        config=SOON,
    )
    run_until(processor, lambda: processor.run(total), lambda: processor.committed >= count)


# A database


def book(message: Message, connection: Any) -> None:
    connection.execute("insert into results values (?)", (int(message.value or b""),))


def store(bootstrap: str, directory: Path, count: int) -> None:
    sink = DatabaseSink(
        bootstrap,
        group="bookers",
        topics=[BOOKINGS],
        database=f"sqlite:///{directory / 'bookings.sqlite'}",
        batch_seconds=0.02,
        config=SOON,
    )
    run_until(sink, lambda: sink.run(book), lambda: sink.stored >= count)


# A consumer that tries again


class Mailer:
    """Some addresses cannot be reached while it is `away`, some never."""

    def __init__(self, *, is_away: bool) -> None:
        self.is_away = is_away
        self.sent: list[tuple[int, str]] = []

    def __call__(self, message: Message) -> None:
        number = int(message.value or b"")
        if number % 10 == 3:
            raise DeadLetter("no such address")
        if number % 10 == 7 and self.is_away:
            raise ConnectionError("away")
        self.sent.append((number, message.topic))


def consume(bootstrap: str, mailer: Mailer, count: int) -> None:
    consumer = Consumer(
        bootstrap,
        group="mailers",
        topics=[MAIL],
        retry=RetryTopics(delays=(5.0, 10.0), create=True),
        config=SOON,
    )
    run_until(consumer, lambda: consumer.run(mailer), lambda: consumer.handled >= count)
