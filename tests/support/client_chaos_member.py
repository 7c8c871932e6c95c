"""One of our clients as a process, to be killed and stopped: `python -m tests.support.client_chaos_member`.

Its one argument is a JSON object: `role` (producer, consumer, hasty, processor or sink), `name`, `bootstrap_servers`,
`topic`, `history` (a file it appends to, see `chaos_member`), and what the role needs: `home` and `delivery`; `group`,
`order` and `assignor`; `target`; `database` and `pipeline`. It runs until SIGTERM. Unlike the members of `chaos_member`
it has no watchdog and never starts over: whatever happens to the broker is our clients' business.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Final

from confluent_kafka import Consumer as RawConsumer
from tests.support.chaos_member import IMPATIENT, SESSION_MS, History

from holdfast.client import (
    Consumer,
    DatabaseSink,
    DatabaseUnreachable,
    DeadLetter,
    Message,
    Output,
    Processor,
    Producer,
    RetryPolicy,
)

WORKERS: Final = 8
BATCH_MAX: Final = 20
STORED_SECONDS_MAX: Final = 120.0
AGAIN_SECONDS: Final = 0.2
HASTY_SECONDS: Final = 0.05
FRAGILE_EVERY: Final = 37
POISON_EVERY: Final = 101
TABLE: Final = "arrived"


def produce(options: Mapping[str, Any], history: History) -> None:
    """Numbered messages into a spool; what is reported stored is noted."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    chance = random.Random(options["name"])
    config = {**IMPATIENT, "linger.ms": 2}
    with Producer(
        options["bootstrap_servers"], spool=options["home"], delivery=options["delivery"], config=config
    ) as producer:
        number = 0
        while not stopping.wait(chance.uniform(0.0, 0.03)):
            first = number
            deliveries = []
            for _ in range(chance.randint(1, BATCH_MAX)):
                value = f"{options['name']}:{number}"
                deliveries.append(producer.send(options["topic"], value, key=f"k{number % 10}"))
                number += 1
            for delivery in deliveries:
                delivery.wait_stored(STORED_SECONDS_MAX)
            history.note("stored", first=first, end=number)


def consume(options: Mapping[str, Any], history: History) -> None:
    """Eight workers; what each has done is noted at the end of its work."""
    chance = random.Random(options["name"])

    def handle(message: Message) -> None:
        time.sleep(chance.uniform(0.0, 0.003))
        history.note("processed", p=message.partition, o=message.offset, v=_text(message))

    Consumer(
        options["bootstrap_servers"],
        group=options["group"],
        topics=[options["topic"]],
        workers=WORKERS,
        order=options["order"],
        commit_seconds=0.05,
        config=_consuming(options),
    ).run(handle)


def consume_hastily(options: Mapping[str, Any], history: History) -> None:
    """What `consume` must not be: positions are committed by time, while workers are still at their messages."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    queue: SimpleQueue[Any] = SimpleQueue()

    def work() -> None:
        while True:
            raw = queue.get()
            time.sleep(HASTY_SECONDS)
            history.note("processed", p=raw.partition(), o=raw.offset(), v=raw.value().decode())

    for _ in range(WORKERS):
        threading.Thread(target=work, daemon=True).start()
    consumer = RawConsumer(
        {
            "bootstrap.servers": options["bootstrap_servers"],
            "group.id": options["group"],
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 50,
            **_consuming(options),
        }
    )
    consumer.subscribe([options["topic"]])
    while not stopping.is_set():
        raw = consumer.poll(0.1)
        if raw is not None and raw.error() is None:
            queue.put(raw)
    consumer.close()


class Trouble:
    """Some messages fail at first, and some always: what a handler of its own would raise."""

    RETRY: Final = RetryPolicy(attempts=3, first_seconds=0.02)

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def meet(self, text: str) -> None:
        if is_poison(text):
            raise DeadLetter("poison")
        if _number(text) % FRAGILE_EVERY == 0 and text not in self._failed:
            self._failed.add(text)
            raise ValueError("not at once")


def is_poison(text: str) -> bool:
    """Whether a message, `message 7`, is one that is always set aside."""
    return _number(text) % POISON_EVERY == 0


def _number(text: str) -> int:
    return int(text.rpartition(" ")[2])


def process(options: Mapping[str, Any], history: History) -> None:
    """Every message once into another topic, into the partition of the same number, or into the dead-letter topic."""
    trouble = Trouble()

    def copy(message: Message) -> list[Output]:
        trouble.meet(_text(message))
        return [Output(options["target"], message.value, partition=message.partition)]

    Processor(
        options["bootstrap_servers"],
        group=options["group"],
        topics=[options["topic"]],
        commit_seconds=0.1,
        retry=Trouble.RETRY,
        config=_consuming(options),
        producer_config={**IMPATIENT, "linger.ms": 2, "socket.timeout.ms": SESSION_MS // 2},
    ).run(copy)


def store(options: Mapping[str, Any], history: History) -> None:
    """Every message once into a table that would take it twice, or into the dead-letter topic."""
    trouble = Trouble()
    place = "%s" if options["database"].startswith("postgres") else "?"
    insert = f"insert into {TABLE} values ({place}, {place}, {place})"

    def keep(message: Message, connection: Any) -> None:
        connection.execute(insert, (message.partition, message.offset, _text(message)))
        trouble.meet(_text(message))

    while True:
        try:
            DatabaseSink(
                options["bootstrap_servers"],
                group=options["group"],
                topics=[options["topic"]],
                database=options["database"],
                batch_messages=100,
                batch_seconds=0.05,
                retry=Trouble.RETRY,
                pipeline=options.get("pipeline", False),
                config=_consuming(options),
            ).run(keep)
        except DatabaseUnreachable:
            # A sink that cannot begin says so and ends; whoever watches over it tries again.
            time.sleep(AGAIN_SECONDS)
        else:
            return


def _consuming(options: Mapping[str, Any]) -> dict[str, Any]:
    config = {**IMPATIENT, "fetch.wait.max.ms": 50}
    if options["assignor"] == "uniform":
        return {**config, "group.protocol": "consumer", "group.remote.assignor": "uniform"}
    return {
        **config,
        "session.timeout.ms": SESSION_MS,
        "heartbeat.interval.ms": 300,
        "partition.assignment.strategy": options["assignor"],
    }


def _text(message: Message) -> str:
    return (message.value or b"").decode()


ROLES: Final[Mapping[str, Callable[[Mapping[str, Any], History], None]]] = {
    "producer": produce,
    "consumer": consume,
    "hasty": consume_hastily,
    "processor": process,
    "sink": store,
}


def main() -> None:
    options = json.loads(sys.argv[1])
    history = History(options["history"])
    history.note("started", pid=os.getpid())
    ROLES[options["role"]](options, history)
    history.note("ended")


if __name__ == "__main__":
    main()
