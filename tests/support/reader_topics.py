"""Topics for the reader's tests: filled with anything a client may send, and read back by another client."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from tests.support.reader_cases import rows_of

from holdfast.reader import Cluster, Isolation, PartitionRange, RangeReport, ranges_of
from holdfast.reader.reference import Row
from holdfast.testing.decided import await_decided

QUIET: Final = {"log_level": 0}
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
HUGE_BYTES: Final = 900_000
WAIT_S: Final = 30.0

Rows = dict[int, list[Row]]
"""By partition."""


def random_message(chance: random.Random, *, is_huge: bool = False) -> dict[str, Any]:
    def field() -> bytes | None:
        size = chance.choice((-1, 0, 1, 10, 100, 2000))
        return None if size < 0 else chance.randbytes(size // 2) + bytes(size - size // 2)

    names = ("", "h", "trace-id", "größe")
    message: dict[str, Any] = {"key": field(), "value": field()}
    if is_huge:
        message["value"] = chance.randbytes(1000) * (HUGE_BYTES // 1000)
    count = chance.choice((0, 0, 0, 1, 3))
    if count:
        message["headers"] = [(chance.choice(names), field()) for _ in range(count)]
    if chance.random() < 0.3:
        message["timestamp"] = 1_700_000_000_000 + chance.randrange(10**9)
    return message


def make_producer(bootstrap_servers: str, codec: str = "none", **settings: Any) -> Producer:
    return Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "compression.type": codec,
            "linger.ms": 5,
            **QUIET,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
    )


def flush(producer: Producer) -> None:
    left = producer.flush(WAIT_S)
    if left:
        raise KafkaException(f"{left} messages were not acknowledged in time")


def fill(bootstrap_servers: str, topic: str, partitions: int, seed: int, *, count: int = 60) -> None:
    """Messages of every kind with every codec, in batches of one and of many."""
    chance = random.Random(seed)
    for codec in chance.sample(CODECS, len(CODECS)):
        producer = make_producer(bootstrap_servers, codec)
        for number in range(count):
            message = random_message(chance, is_huge=number == count // 2)
            producer.produce(topic, partition=chance.randrange(partitions), **message)
            if chance.random() < 0.05:
                flush(producer)
        flush(producer)


def fill_transactions(
    bootstrap_servers: str, topic: str, partitions: int, seed: int, *, leave_open: bool = False
) -> list[Producer]:
    """Transactions that commit, abort, interleave with each other and with plain messages.

    With `leave_open` one stays open at the end; its producer is returned, and so must be kept.
    """
    chance = random.Random(seed)
    producers = [
        make_producer(
            bootstrap_servers, chance.choice(CODECS), transactional_id=f"{topic}-{number}-{seed}", linger_ms=0
        )
        for number in range(3)
    ]
    plain = make_producer(bootstrap_servers, "lz4")
    for producer in producers:
        producer.init_transactions(WAIT_S)
    begun: list[Producer] = []
    for _ in range(40):
        producer = chance.choice(producers)
        if producer not in begun:
            producer.begin_transaction()
            begun.append(producer)
        for _ in range(chance.randrange(1, 6)):
            message = random_message(chance)
            producer.produce(topic, partition=chance.randrange(partitions), **message)
        flush(producer)
        if chance.random() < 0.5:
            plain.produce(topic, partition=chance.randrange(partitions), **random_message(chance))
            flush(plain)
        if chance.random() < 0.4:
            begun.remove(producer)
            _end(producer, is_commit=chance.random() < 0.5)
    for producer in begun[1:] if leave_open else begun:
        _end(producer, is_commit=chance.random() < 0.5)
    if not leave_open and not await_decided(bootstrap_servers, topic, WAIT_S):
        raise KafkaException(f"a transaction in {topic} stays open")
    return begun[:1] if leave_open else []


def _end(producer: Producer, *, is_commit: bool) -> None:
    if is_commit:
        producer.commit_transaction(WAIT_S)
    else:
        producer.abort_transaction(WAIT_S)


def consumed(bootstrap_servers: str, topic: str, partitions: Iterable[int], isolation: Isolation) -> Rows:
    """Everything in a topic, as confluent-kafka reads it."""
    numbers = list(partitions)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "unused",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
            "enable.auto.commit": False,
            **QUIET,
        }
    )
    rows: Rows = {number: [] for number in numbers}
    unfinished = set(numbers)
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
        while unfinished:
            message: Any = consumer.poll(WAIT_S)
            if message is None:
                raise TimeoutError(f"{topic}: no message within {WAIT_S} s")
            error = message.error()
            if error is None:
                rows[message.partition()].append(_row(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                unfinished.discard(message.partition())
            else:
                raise KafkaException(error)
    finally:
        consumer.close()
    return rows


def _row(message: Any) -> Row:
    kind, timestamp_ms = message.timestamp()
    headers = tuple((name, value) for name, value in message.headers() or ())
    return Row(message.offset(), timestamp_ms * 1000, kind - 1, message.key(), message.value(), headers)


def read_rows(
    cluster: Cluster,
    ranges: list[PartitionRange],
    *,
    isolation: Isolation = "read_committed",
    batch_bytes: int = 4 << 20,
) -> tuple[Rows, list[RangeReport]]:
    """Ranges as our reader reads them, with every offset accounted for."""
    reports: list[RangeReport] = []
    rows: Rows = defaultdict(list)
    for each in ranges:
        rows[each.partition] = []
    for batch in cluster.read(ranges, isolation=isolation, batch_bytes=batch_bytes, reports=reports):
        (partition,) = set(batch.column("partition").to_pylist())
        rows[partition] += rows_of([batch])
    for report in reports:
        told = report.records + report.control + report.aborted + report.missing
        assert told == report.range.end - report.range.start, report
        assert report.is_complete
    return dict(rows), reports


def whole(cluster: Cluster, topic: str, isolation: Isolation = "read_committed") -> list[PartitionRange]:
    return ranges_of(cluster, topic, isolation=isolation)


MakeTopic = Callable[..., str]
