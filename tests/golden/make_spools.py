"""Making the golden spools: homes of producers that died with messages undelivered, and the broker they sent to.

One home delivers at least once, the other exactly once, whose progress stands in a topic as well; so the broker's
directory is part of it. In each, some messages are delivered, some refused, some left to send: with a partition, in
columns and in groups, and for a topic that nobody knew, without one. A second spool of the first home lost its owner
before the first did.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tests.golden.opening import broker_at, check_code, text_of

from holdfast import real
from holdfast.client.producer import Guarantee, Producer
from holdfast.real import RealClock
from holdfast.testing.fakes import SeededRandomness
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import CREATE_TOPICS

START_MS: Final = 1_767_225_600_000  # the first of January 2026
BOOT_ID: Final = "11111111-2222-4333-8444-555555555555"
SETTINGS: Final = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "auto.create.topics.enable": "false",
}
TOPICS: Final[dict[str, tuple[int, dict[str, str]]]] = {
    "letters": (2, {"retention.ms": "-1"}),
    "receipts": (1, {"retention.ms": "-1"}),
    "addresses": (1, {"cleanup.policy": "compact"}),
}
GUARANTEES: Final[tuple[Guarantee, ...]] = ("at-least-once", "exactly-once")
SPOOL_BYTES: Final = 64 * 1024
"""An eighth of it is a segment: small ones, so that there are several."""
QUIET: Final = {"log_level": 0}


class Sending:
    """A producer with a spool, and what must become of what it is given."""

    def __init__(self, home: Path, guarantee: Guarantee, bootstrap: str, seed: int, notes: list[Any]) -> None:
        with mock.patch.object(real, "RealRandomness", return_value=SeededRandomness(seed)):
            self.producer = Producer(
                bootstrap, spool=home, delivery=guarantee, config=QUIET, spool_max_bytes=SPOOL_BYTES
            )
        self._notes = notes

    @property
    def id(self) -> str:
        return str(self.producer._sender.id)  # type: ignore[union-attr]

    def send(self, topic: str, number: int, fate: str, **options: Any) -> None:
        partition = options.get("partition")
        key: bytes | None = options.pop("key", b"key-%d" % (number % 3))
        headers: dict[str, bytes | str | None] = options.pop("headers", {})
        value: bytes | None = b"%s %d " % (topic.encode(), number) + bytes(range(256)) * options.pop(
            "pages", 0
        )
        if number % 7 == 5:
            value = None
        delivery = self.producer.send(
            topic, value, key=key, headers=headers, timestamp_ms=START_MS + number, partition=partition
        )
        delivery.wait_stored(30)
        if fate == "delivered":
            delivery.wait(30)
        counted = Counter(
            (each["topic"], each["partition"]) for each in self._notes if each["spool"] == self.id
        )
        self._notes.append(
            {
                "spool": self.id,
                "topic": topic,
                "partition": partition,
                "sequence": counted[topic, partition],
                "timestamp": START_MS + number,
                "key": text_of(key),
                "value": text_of(value),
                "headers": [
                    [name, text_of(given.encode() if isinstance(given, str) else given)]
                    for name, given in headers.items()
                ],
                "fate": fate,
            }
        )


def deliver_some(sending: Sending, start: int) -> None:
    for number in range(start, start + 12):
        headers: dict[str, str | None] = {"trace": f"{number}", "none": None} if number % 4 == 1 else {}
        sending.send("letters", number, "delivered", partition=number % 2, headers=headers)


def be_refused(sending: Sending, start: int) -> None:
    """Without a key, a message has no place in a compacted topic."""
    for number in range(start, start + 3):
        is_bad = number != start + 1
        sending.send(
            "addresses",
            number,
            "refused" if is_bad else "delivered",
            partition=0,
            key=None if is_bad else sending.id.encode(),
            headers={"why": "no key"},
        )
    report = sending.producer.flush(30)
    assert (report.under_way, report.refused_count) == (0, 2), report


def leave_some(sending: Sending, start: int) -> None:
    for number in range(start, start + 40):
        headers = {"trace": f"{number}"} if number % 10 == 3 else {}
        sending.send("letters", number, "left", partition=number % 2, headers=headers, pages=number % 4)
    for number in range(start + 40, start + 46):
        sending.send("receipts", number, "left", headers={"trace": "late"} if number % 2 else {})
    for number in range(start + 46, start + 50):
        sending.send("letters", number, "left", partition=0)


def run(name: str, directory: Path, notes: Path) -> None:
    """In a process of its own, which kills itself."""
    sent: dict[str, list[Any]] = {guarantee: [] for guarantee in GUARANTEES}
    broker = broker_at(RealClock(), str(directory / "data"), boot_id=BOOT_ID, seed=1, settings=SETTINGS)
    with broker as running, WireClient(running.bootstrap_servers) as client:
        address = running.bootstrap_servers
        for topic in ("letters", "addresses"):
            partitions, configs = TOPICS[topic]
            create(client, topic, partitions, configs)
        for seed, guarantee in enumerate(GUARANTEES, start=10):
            home = directory / guarantee
            sending = Sending(home, guarantee, address, seed, sent[guarantee])
            deliver_some(sending, 100)
            be_refused(sending, 200)
            sending.producer.close()
        # While the first spool of the home has an owner, this is another. What it had refused keeps it.
        home = directory / "at-least-once"
        first = Sending(home, "at-least-once", address, 20, [])
        second = Sending(home, "at-least-once", address, 30, sent["at-least-once"])
        be_refused(second, 210)
        first.producer.close()
        second.producer.close()
    left = []  # nobody is at the address any more
    for guarantee in GUARANTEES:
        left.append(Sending(directory / guarantee, guarantee, address, 20, sent[guarantee]))
        leave_some(left[-1], 300)
    second = Sending(home, "at-least-once", address, 30, sent["at-least-once"])
    for number in range(500, 506):
        second.send("letters", number, "left", partition=1)
    expected = {
        "boot_id": BOOT_ID,
        "clock_ms": START_MS,
        "settings": SETTINGS,
        "log_dirs": ["data"],
        "topics_to_come": {"receipts": TOPICS["receipts"]},
        "sent": sent,
    }
    notes.write_text(json.dumps(expected) + "\n", "utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def create(client: WireClient, name: str, partitions: int, configs: dict[str, str]) -> None:
    listed = [{"name": setting, "value": value} for setting, value in configs.items()]
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "assignments": []}
    (made,) = client.ask(CREATE_TOPICS, 7, {"topics": [{**topic, "configs": listed}], "timeout": 5000}).topics
    check_code(made, f"creating {name}")
