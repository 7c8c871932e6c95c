"""One of our clients as a process, to be killed and stopped: `python -m holdfast.testing.client_chaos_member`.

Its one argument is a JSON object: `role` (producer, consumer, processor or sink), `name`, `bootstrap_servers`, `topic`,
`history` (a file it appends to, see `chaos_member`), and what the role needs: `home` and `delivery`; `group`, `order`
and `assignor`; `target`; `database`. It runs until SIGTERM. Unlike the members of `chaos_member` it has no watchdog and
never starts over: whatever happens to the broker is our clients' business.
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
from typing import Any, Final

from holdfast.client import Consumer, DatabaseSink, DatabaseUnreachable, Message, Output, Processor, Producer
from holdfast.testing.chaos_member import IMPATIENT, SESSION_MS, History

WORKERS: Final = 8
BATCH_MAX: Final = 20
STORED_SECONDS_MAX: Final = 120.0
AGAIN_SECONDS: Final = 0.2
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


def process(options: Mapping[str, Any], history: History) -> None:
    """Every message once into another topic, into the partition of the same number."""

    def copy(message: Message) -> list[Output]:
        return [Output(options["target"], message.value, partition=message.partition)]

    Processor(
        options["bootstrap_servers"],
        group=options["group"],
        topics=[options["topic"]],
        commit_seconds=0.1,
        consumer_config=_consuming(options),
        producer_config={**IMPATIENT, "linger.ms": 2, "socket.timeout.ms": SESSION_MS // 2},
    ).run(copy)


def store(options: Mapping[str, Any], history: History) -> None:
    """Every message once into a table that would take it twice."""
    place = "%s" if options["database"].startswith("postgres") else "?"
    insert = f"insert into {TABLE} values ({place}, {place}, {place})"

    def keep(message: Message, connection: Any) -> None:
        connection.execute(insert, (message.partition, message.offset, _text(message)))

    while True:
        try:
            DatabaseSink(
                options["bootstrap_servers"],
                group=options["group"],
                topics=[options["topic"]],
                database=options["database"],
                batch_messages=100,
                batch_seconds=0.05,
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
