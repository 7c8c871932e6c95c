"""Making the golden data directories of a broker: `broker-clean`, stopped in order, and `broker-killed`, by SIGKILL.

Both come out of one life of four runs, each a process of its own: the first is killed and leaves a torn tail, the
second recovers and stops cleanly, the third shortens the metadata log by a snapshot and stops cleanly, which is
`broker-clean`; the fourth goes on from there and is killed in the middle of everything."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tests.golden.opening import StoppedClock, broker_at, text_of
from tests.golden.scene import BROKER, GROUPS, TOPIC, TRANSACTIONS, Scene
from tests.golden.transactions import GoldenProducer

from holdfast.broker.node import metadata_log
from holdfast.testing.wire_client import WireClient
from holdfast.wire.batch import HEADER_SIZE, Record, build_batch, read_header
from holdfast.wire.codecs import Codec

RUNS: Final = ("first", "second", "third", "fourth")
KILLED_RUNS: Final = ("first", "fourth")
START_MS: Final = 1_767_225_600_000  # the first of January 2026
HOUR_MS: Final = 3_600_000
BOOT_ID: Final = "11111111-2222-4333-8444-555555555555"
LISTEN: Final = "127.0.0.1:39092"
"""It stands in the metadata log, so it is always the same."""
LOG_DIRS: Final = ("first", "second")
SETTINGS: Final = {
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "log.cleaner.backoff.ms": "100",
    "holdfast.clock.settle.ms": "0",  # an hour passes between two runs, by the wall clock alone
}
FOR_EVER: Final = {"retention.ms": "-1"}
TOPICS: Final[Mapping[str, tuple[int, Mapping[str, str]]]] = {
    "orders": (2, {**FOR_EVER, "internal.segment.bytes": "4096", "index.interval.bytes": "512"}),
    "prices": (
        1,
        {
            "cleanup.policy": "compact",
            "internal.segment.bytes": "2048",
            "index.interval.bytes": "256",
            "min.cleanable.dirty.ratio": "0.01",
        },
    ),
    "payments": (2, {**FOR_EVER, "internal.segment.bytes": "2048", "index.interval.bytes": "256"}),
    "stamped": (1, {**FOR_EVER, "message.timestamp.type": "LogAppendTime"}),
    "shortened": (1, {**FOR_EVER, "internal.segment.bytes": "1024"}),
    "again": (1, FOR_EVER),
    "former": (1, FOR_EVER),
    "dropped": (1, FOR_EVER),
}
CODECS: Final = tuple(Codec)


def numbered(name: str, start: int, count: int, *, padding: int = 80) -> list[Record]:
    """Records of which no two are alike, with every kind of key, value and header now and then."""
    records = []
    for delta, number in enumerate(range(start, start + count)):
        key: bytes | None = b"%s-%d" % (name.encode(), number % 7)
        value: bytes | None = b"%s %d " % (name.encode(), number) + bytes(
            (number * 31 + at * 17) % 256 for at in range(padding)
        )
        headers: tuple[tuple[str, bytes | None], ...] = ()
        if number % 5 == 1:
            key = None
        if number % 11 == 3:
            value = None
        if number % 13 == 4:
            value = b""
        if number % 4 == 2:
            headers = (("trace", b"\x00\xff%d" % number), ("empty", b""), ("none", None), ("größe", b"7"))
        records.append(Record(delta, delta * 3, key, value, headers))
    return records


def keyed(prices: Mapping[str, int | None]) -> list[Record]:
    return [
        Record(delta, delta, key.encode(), None if price is None else b"%d " % price + b"." * 60)
        for delta, (key, price) in enumerate(prices.items())
    ]


# The runs


def first_run(scene: Scene) -> None:
    for name, (partitions, configs) in TOPICS.items():
        scene.create(name, partitions, configs)
    for turn in range(15):
        scene.send("orders", 0, numbered("order", 10 * turn, 6), CODECS[turn % len(CODECS)])
        scene.clock.wall_ms += 1000
    producer = scene.idempotent_producer()
    for turn in range(12):
        batch = scene.send("orders", 1, numbered("sure", 10 * turn, 5), sequence=5 * turn, producer=producer)
    scene.expected["producers"]["orders 1"] = {
        "producer_id": producer[0],
        "producer_epoch": producer[1],
        "next_sequence": 60,
        "last_batch": text_of(batch),
        "last_offset": scene.partition("orders", 1)["end"] - 5,
    }
    for turn in range(40):
        prices: dict[str, int | None] = {f"item-{turn % 6}": turn, f"item-{(turn + 3) % 9}": 100 + turn}
        if turn in (11, 12, 30):
            prices["item-7"] = None
        scene.send("prices", 0, keyed(prices))
        scene.clock.wall_ms += 1000
    scene.wait_for_compaction("prices")
    for turn in range(3):
        scene.send("stamped", 0, numbered("stamp", 10 * turn, 2, padding=4), CODECS[turn])
        scene.clock.wall_ms += 500
    for turn in range(8):
        scene.send("shortened", 0, numbered("short", 10 * turn, 5, padding=40))
    scene.send("again", 0, numbered("before", 0, 3))
    scene.send("former", 0, numbered("former", 0, 3))
    scene.send("dropped", 0, numbered("dropped", 0, 3))
    classic_groups(scene)
    new_groups(scene)
    transactions(scene)
    scene.delete("former")
    scene.delete("again")
    scene.create("again", 2, {**FOR_EVER, "max.message.bytes": "54321"})
    scene.send("again", 1, numbered("after", 0, 4))


def classic_groups(scene: Scene) -> None:
    scene.find_coordinator(GROUPS, "billing")
    member = scene.join_classic("billing", "orders")
    scene.commit("billing", "orders", {0: 17, 1: 23}, "as far as the invoice", **member)
    scene.commit("billing", "prices", {0: 5}, **member)
    scene.leave_classic("billing", member)
    scene.commit("alone", "orders", {0: 3}, "nobody is a member here")
    scene.commit("outdated", "orders", {0: 1})
    scene.forget_group("outdated")


def new_groups(scene: Scene) -> None:
    scene.find_coordinator(GROUPS, "shipping")
    member = scene.join_consumer("shipping", "orders")
    scene.commit("shipping", "orders", {0: 40, 1: 41}, **member)
    scene.leave_consumer("shipping")


def transactions(scene: Scene) -> None:
    scene.find_coordinator(TRANSACTIONS, "transfer")
    transfer = GoldenProducer(scene, "transfer")
    for turn in range(10):
        transfer.produce("payments", 0, numbered("paid", 10 * turn, 3, padding=40))
        if turn % 2:
            transfer.produce("payments", 1, numbered("paid-too", 10 * turn, 2, padding=40))
        transfer.commit_position("copies", "orders", 0, 10 + turn, counts=turn % 3 != 2)
        transfer.end(is_commit=turn % 3 != 2)
    older = GoldenProducer(scene, "older-client", is_newer=False)
    for turn in range(4):
        older.produce("payments", 1, numbered("older", 10 * turn, 2, padding=40))
        older.end(is_commit=turn % 2 == 0)
    # One that reaches over others, decided in the next run.
    long = GoldenProducer(scene, "long")
    long.produce("payments", 0, numbered("long", 0, 2, padding=40))
    transfer.produce("payments", 0, numbered("behind", 0, 2, padding=40))
    transfer.end(is_commit=True)
    scene.expected["transactions"]["long"] |= {"state": "Ongoing"}


def second_run(scene: Scene) -> None:
    long = GoldenProducer.resumed(scene, "long")
    long.produce("payments", 0, numbered("long", 10, 2, padding=40))
    long.end(is_commit=False)
    scene.send("orders", 0, numbered("order", 500, 6))
    scene.alter(TOPIC, "orders", "max.message.bytes", "654321")
    scene.alter(TOPIC, "orders", "index.interval.bytes", "1024")
    scene.alter(BROKER, "", "message.max.bytes", "765432")
    scene.alter(BROKER, "1", "log.cleaner.backoff.ms", "90")
    scene.grow("orders", 3)
    scene.send("orders", 2, numbered("grown", 0, 9), Codec.ZSTD)
    scene.shorten("shortened", 22)
    known = scene.expected["producers"]["orders 1"]
    producer = known["producer_id"], known["producer_epoch"]
    batch = scene.send("orders", 1, numbered("sure", 300, 5), sequence=60, producer=producer)
    known |= {
        "next_sequence": 65,
        "last_batch": text_of(batch),
        "last_offset": scene.partition("orders", 1)["end"] - 5,
    }
    # A second producer in the same partition, whose last batch is older than those of others.
    scene.send("orders", 0, numbered("other", 0, 3), sequence=0, producer=scene.idempotent_producer())


def third_run(scene: Scene) -> None:
    """The start has written a snapshot of the metadata; what comes now is behind it."""
    assert list(scene.directory.glob("*/__cluster_metadata-0/*.checkpoint"))
    scene.create("latest", 1, FOR_EVER)
    scene.send("latest", 0, numbered("latest", 0, 5), Codec.GZIP)
    scene.alter(TOPIC, "prices", "min.compaction.lag.ms", "0")
    scene.commit("alone", "latest", {0: 4})
    transfer = GoldenProducer.resumed(scene, "transfer", anew=True)
    transfer.produce("payments", 0, numbered("third", 0, 3, padding=40))
    transfer.commit_position("copies", "orders", 1, 7, counts=True)
    transfer.end(is_commit=True)


def fourth_run(scene: Scene) -> None:
    """The broker dies in the middle of everything."""
    scene.send("orders", 0, numbered("order", 700, 6), Codec.SNAPPY)
    for turn in range(20):
        scene.send("prices", 0, keyed({f"item-{turn % 4}": 1000 + turn, f"item-{turn % 5}": 2000 + turn}))
    scene.wait_for_compaction("prices")
    # Small flushes in a row, of one partition alone: zeros are written ahead.
    for number in range(60):
        scene.send("latest", 0, numbered("ahead", number, 1, padding=20))
    scene.join_classic("billing", "orders", instance_id="till")
    scene.join_consumer("shipping", "orders", instance_id="van")
    scene.find_coordinator(GROUPS, "watching")
    scene.join_consumer("watching", regex="pay.*")
    transfer = GoldenProducer.resumed(scene, "transfer", anew=True)
    transfer.produce("payments", 0, numbered("open", 0, 3, padding=40))
    transfer.produce("payments", 1, numbered("open-too", 0, 1, padding=40))
    transfer.commit_position("copies", "orders", 0, 99, counts=False)
    scene.expected["transactions"]["transfer"] |= {"state": "Ongoing"}
    scene.expected["pending"] = {"copies": {"orders": {"0": [99, ""]}}}
    other = GoldenProducer.resumed(scene, "older-client", anew=True)
    other.produce("payments", 1, numbered("aborted", 0, 2, padding=40))
    other.end(is_commit=False)
    scene.delete("dropped")


WORK: Final[Mapping[str, Callable[[Scene], None]]] = {
    "first": first_run,
    "second": second_run,
    "third": third_run,
    "fourth": fourth_run,
}


def new_expected() -> dict[str, Any]:
    return {
        "boot_id": BOOT_ID,
        "clock_ms": START_MS,
        "settings": SETTINGS,
        "log_dirs": list(LOG_DIRS),
        "topics": {},
        "brokers": {},
        "positions": {},
        "pending": {},
        "classic": {},
        "consumer": {},
        "producers": {},
        "transactions": {},
        "torn": {},
    }


@contextmanager
def shorter_history() -> Iterator[None]:
    """A snapshot of the metadata after dozens of records, where it usually takes thousands."""
    with (
        mock.patch.object(metadata_log, "HISTORY_RECORDS_MIN", 20),
        mock.patch.object(metadata_log, "HISTORY_FACTOR", 1),
    ):
        yield


def run(name: str, directory: Path, notes: Path) -> None:
    """In a process of its own: one run, which ends as it should end."""
    expected = json.loads(notes.read_text("utf-8")) if notes.exists() else new_expected()
    number = RUNS.index(name)
    clock = StoppedClock(START_MS + number * HOUR_MS)
    log_dirs = ",".join(str(directory / each) for each in LOG_DIRS)
    said: list[str] = []
    with shorter_history() if name == "third" else mock.patch.object(metadata_log, "HISTORY_FACTOR", 4):
        broker = broker_at(
            clock, log_dirs, boot_id=BOOT_ID, seed=number + 1, settings=SETTINGS, listen=LISTEN, said=said
        )
        with broker as running, WireClient(running.bootstrap_servers) as client:
            scene = Scene(client, clock, directory, expected)
            WORK[name](scene)
            scene.check()
            clock.wall_ms += 1000
            expected["clock_ms"] = clock.wall_ms
            notes.write_text(json.dumps(expected) + "\n", "utf-8")
            print(*said, sep="\n")
            if name in KILLED_RUNS:
                os.kill(os.getpid(), signal.SIGKILL)


def tear(directory: Path, notes: Path, topic: str = "orders", partition: int = 0) -> None:
    """Half a batch behind the last: what the kernel leaves of a write that a kill interrupts."""
    (home,) = directory.glob(f"*/{topic}-{partition}")
    path = max(home.glob("*.log"))
    data = path.read_bytes()
    end, offset = 0, 0
    while end + HEADER_SIZE < len(data) and (header := read_header(data, end)).batch_length > 0:
        end, offset = end + header.size, header.next_offset
    torn = build_batch(numbered("torn", 0, 4), base_timestamp=START_MS)
    torn = offset.to_bytes(8, "big") + torn[8 : len(torn) // 2]
    with path.open("r+b") as file:
        file.seek(end)
        file.write(torn)
    expected = json.loads(notes.read_text("utf-8"))
    expected["torn"][f"{topic} {partition}"] = text_of(torn)
    notes.write_text(json.dumps(expected) + "\n", "utf-8")
