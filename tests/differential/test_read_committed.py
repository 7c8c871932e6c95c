"""Transactions as partitions show them: bounds, aborted lists, lookups, producers, and markers sent by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from tests.support.differential import Script, Side

from holdfast.wire.api_keys import DESCRIBE_TRANSACTIONS, FETCH, LIST_OFFSETS
from holdfast.wire.batch import Record, build_batch

FIND_COORDINATOR, DELETE_RECORDS, INIT_PRODUCER_ID, ADD_PARTITIONS, END_TXN = 10, 21, 22, 24, 26
WRITE_TXN_MARKERS, INCREMENTAL_ALTER_CONFIGS, DESCRIBE_PRODUCERS = 27, 44, 61
NOW = int(time.time() * 1000) - 60_000
"""Records are older than markers, whose time is the broker's own."""
COMMIT, ABORT = True, False
Compare = Callable[[Script], None]


class Producer:
    """A transactional producer by the older protocol, which tells which partitions it will write to."""

    def __init__(self, side: Side, name: str) -> None:
        self.side = side
        self.name = name
        self.id = self.epoch = -1
        self.sequence = 0

        def is_ready() -> bool:
            side.client.ask(FIND_COORDINATOR, 4, {"key_type": 1, "coordinator_keys": [name]})
            fields = {
                "transactional_id": name,
                "transaction_timeout": 60_000,
                "producer_id": -1,
                "producer_epoch": -1,
            }
            answer = side.client.ask(INIT_PRODUCER_ID, 4, fields)
            self.id, self.epoch = answer.producer_id, answer.producer_epoch
            return answer.error_code is ErrorCode.none

        side.wait_until(is_ready)

    @property
    def identity(self) -> dict[str, Any]:
        return {"transactional_id": self.name, "producer_id": self.id, "producer_epoch": self.epoch}

    def write(self, topic: str, *values: bytes, timestamp: int = NOW) -> None:
        self.add(topic)
        assert self.send(topic, *values, timestamp=timestamp) is ErrorCode.none

    def add(self, topic: str) -> None:
        def is_added() -> bool:
            wanted = {
                "v3_and_below_transactional_id": self.name,
                "v3_and_below_producer_id": self.id,
                "v3_and_below_producer_epoch": self.epoch,
                "v3_and_below_topics": [{"name": topic, "partitions": [0]}],
            }
            answer = self.side.client.ask(ADD_PARTITIONS, 3, wanted)
            (result,) = answer.results_by_topic_v3_and_below[0].results_by_partition
            return result.partition_error_code is ErrorCode.none

        self.side.wait_until(is_added)

    def send(self, topic: str, *values: bytes, timestamp: int = NOW) -> ErrorCode:
        batch = build_batch(
            [Record(index, index, None, value) for index, value in enumerate(values)],
            base_timestamp=timestamp,
            producer_id=self.id,
            producer_epoch=self.epoch,
            base_sequence=self.sequence,
            is_transactional=True,
        )
        data = [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}]
        fields = {"transactional_id": self.name, "acks": -1, "timeout": 30_000, "topic_data": data}
        answer = self.side.client.ask(0, 9, fields)
        code = ErrorCode(answer.responses[0].partition_responses[0].error_code)
        if code is ErrorCode.none:
            self.sequence += len(values)
        return code

    def end(self, result: bool) -> None:
        """End the transaction and wait until its marker is written, and counts."""

        def is_ended() -> bool:
            answer = self.side.client.ask(END_TXN, 3, {**self.identity, "committed": result})
            return answer.error_code is ErrorCode.none

        def is_marked() -> bool:
            answer = self.side.client.ask(DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [self.name]})
            return answer.transaction_states[0].transaction_state in ("CompleteCommit", "CompleteAbort")

        self.side.wait_until(is_ended)
        self.side.wait_until(is_marked)


def offsets(timestamp: int, isolation_level: int, topic: str) -> dict[str, Any]:
    partitions = [{"partition_index": 0, "timestamp": timestamp}]
    topics = [{"name": topic, "partitions": partitions}]
    return {"replica_id": -1, "isolation_level": isolation_level, "topics": topics}


def latest(side: Side, topic: str, isolation_level: int = 0) -> int:
    answer = side.client.ask(LIST_OFFSETS, 7, offsets(-1, isolation_level, topic))
    return int(answer.topics[0].partitions[0].offset)


def fetch(topic: str, offset: int, *, max_bytes: int = 1 << 20, isolation_level: int = 1) -> dict[str, Any]:
    wanted = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": max_bytes}
    return {
        "replica_id": -1,
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": 50 << 20,
        "isolation_level": isolation_level,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [wanted]}],
    }


def describe(side: Side, label: str, topic: str) -> None:
    side.ask(label, DESCRIBE_PRODUCERS, 0, {"topics": [{"name": topic, "partition_indexes": [0]}]})


def interleaved_transactions(side: Side) -> None:
    """A commits, B aborts, C aborts while A is open again, D stays open."""
    topic = "interleaved"
    side.create_topic(topic, configs={"index.interval.bytes": "200"})
    a, b, c, d = (Producer(side, f"{topic}-{name}") for name in "abcd")
    a.write(topic, b"a1")
    b.write(topic, b"b1", b"b2")
    a.end(COMMIT)
    side.ask("a decided, b open", FETCH, 12, fetch(topic, 0))
    b.write(topic, b"b3" * 200)
    a.write(topic, b"a2")
    c.write(topic, b"c1" * 100)
    b.end(ABORT)
    c.end(ABORT)
    side.ask("a holds back", FETCH, 12, fetch(topic, 0))
    a.end(COMMIT)
    d.write(topic, b"d1")
    a.write(topic, b"a3")
    a.end(ABORT)
    for version in (4, 5, 7, 11, 12):
        side.ask(f"version {version}", FETCH, version, fetch(topic, 0))
    side.ask("uncommitted too", FETCH, 12, fetch(topic, 0, isolation_level=0))
    end = latest(side, topic)
    for offset in range(end + 2):
        side.ask(f"from {offset}", FETCH, 12, fetch(topic, offset))
    for limit in (1, 100, 300, 700, 1500):
        side.ask(f"{limit} bytes", FETCH, 12, fetch(topic, 0, max_bytes=limit))
    describe(side, "producers", topic)
    d.end(COMMIT)
    side.ask("all decided", FETCH, 12, fetch(topic, 0))
    describe(side, "producers at rest", topic)


def lookups_by_time(side: Side) -> None:
    topic = "lookups"
    side.create_topic(topic)
    plain = build_batch([Record(0, 0, None, b"plain")], base_timestamp=NOW)
    side.produce("plain", topic, plain)
    producer = Producer(side, topic)
    producer.write(topic, b"x", b"y", timestamp=NOW + 1000)
    for when in ("open", "decided"):
        for isolation_level in (0, 1):
            for timestamp in (-1, -2, -3, NOW, NOW + 1, NOW + 1001, NOW + 1002):
                place = timestamp - NOW if timestamp > 0 else timestamp
                label = f"{when}, isolation level {isolation_level}, time {place}"
                answer = side.client.ask(LIST_OFFSETS, 7, offsets(timestamp, isolation_level, topic))
                # A marker's time is the broker's own.
                side.note(label, answer.topics[0].partitions[0].offset)
        if when == "open":
            producer.end(COMMIT)


def deleting_into_an_open_transaction(side: Side) -> None:
    topic = "deleting"
    side.create_topic(topic)
    producer = Producer(side, topic)
    for value in (b"1", b"2", b"3"):
        producer.write(topic, value)
    wanted = [{"name": topic, "partitions": [{"partition_index": 0, "offset": 2}]}]
    side.ask("delete", DELETE_RECORDS, 2, {"topics": wanted, "timeout": 10_000})
    side.note("last stable offset", latest(side, topic, 1))
    side.ask("fetch", FETCH, 12, fetch(topic, 2))
    describe(side, "producers", topic)
    producer.end(ABORT)
    side.ask("aborted", FETCH, 12, fetch(topic, 2))


def marker(producer_id: int, epoch: int, result: bool, topic: str, **fields: Any) -> dict[str, Any]:
    return {
        "producer_id": producer_id,
        "producer_epoch": epoch,
        "transaction_result": result,
        "topics": [{"name": topic, "partition_indexes": fields.get("indexes", [0])}],
        "coordinator_epoch": fields.get("coordinator_epoch", 0),
        "transaction_version": fields.get("transaction_version", 0),
    }


@contextmanager
def unverified(side: Side) -> Iterator[None]:
    """Partitions take transactional batches that no coordinator knows of, as brokers before 3.6 did."""

    def alter(operation: int) -> None:
        setting = "transaction.partition.verification.enable"
        change = {"name": setting, "config_operation": operation, "value": "false"}
        resource = {"resource_type": 4, "resource_name": "", "configs": [change]}
        request = {"resources": [resource], "validate_only": False}
        (result,) = side.client.ask(INCREMENTAL_ALTER_CONFIGS, 1, request).responses
        assert result.error_code is ErrorCode.none, result

    alter(0)
    yield
    alter(1)


def markers_by_hand(side: Side) -> None:
    """As an operator's tool sends them to end a transaction that hangs."""
    topic = "by-hand"
    side.create_topic(topic, 2)
    side.create_topic("by-hand-after")
    producer, numbers = Producer(side, topic), count()
    with unverified(side):
        # A setting is in force some time after it is answered.
        side.wait_until(lambda: producer.send(topic, b"1") is ErrorCode.none)
    # One that has been let in once is not asked again.
    side.wait_until(
        lambda: Producer(side, f"after-{next(numbers)}").send("by-hand-after", b"1") is not ErrorCode.none
    )
    known, epoch = producer.id, producer.epoch

    def send(label: str, *markers: dict[str, Any], version: int = 1) -> None:
        side.ask(label, WRITE_TXN_MARKERS, version, {"markers": list(markers)})

    send("no markers")
    send("no partitions", marker(known, epoch, COMMIT, topic, indexes=[]))
    send("unknown topic", marker(known, epoch, COMMIT, "nowhere"))
    send("unknown partition", marker(known, epoch, COMMIT, topic, indexes=[7, -1]))
    send("older epoch", marker(known, epoch - 1, COMMIT, topic))
    send(
        "same epoch by the newer rules", marker(known, epoch, COMMIT, topic, transaction_version=2), version=2
    )
    send("a producer nobody knows", marker(987_654_321, 0, ABORT, topic, indexes=[1]))
    send("no producer", marker(-1, 0, COMMIT, topic, indexes=[1]))
    send("no epoch", marker(known, -1, COMMIT, topic, indexes=[1]))
    send(
        "neither, and a good one",
        marker(-1, -1, COMMIT, topic, indexes=[1]),
        marker(7_777_777, 0, COMMIT, topic, indexes=[1]),
    )
    send("positions of groups", marker(7_777_777, 0, COMMIT, "__consumer_offsets", indexes=[0, 1]))
    side.note("still open", latest(side, topic, 1))
    send(
        "good, bad, and twice",
        marker(known, epoch, ABORT, topic, indexes=[0, 9]),
        marker(987_654_321, 0, COMMIT, topic, indexes=[1]),
    )
    side.note("decided", latest(side, topic, 1))
    describe(side, "producers", topic)
    side.ask("what is stored", FETCH, 12, fetch(topic, 0))
    send("an older coordinator", marker(known, epoch, COMMIT, topic, coordinator_epoch=-1))
    send("again", marker(known, epoch, COMMIT, topic))
    send("newer epoch", marker(known, epoch + 3, COMMIT, topic, transaction_version=2), version=2)


def markers_of_strangers(side: Side) -> None:
    """Markers in a transaction that goes on, of epochs that nobody has reached, and where nothing is open."""
    topic = "strangers"
    side.create_topic(topic, 2)
    producer = Producer(side, topic)
    producer.write(topic, b"1")
    known, epoch = producer.id, producer.epoch

    def send(label: str, one: dict[str, Any]) -> None:
        side.ask(label, WRITE_TXN_MARKERS, 1, {"markers": [one]})

    send(
        "a coordinator of the future", marker(known, epoch, ABORT, topic, indexes=[1], coordinator_epoch=100)
    )
    send("a transaction that goes on", marker(known, epoch, ABORT, topic))
    producer.end(COMMIT)
    side.ask("what was committed", FETCH, 12, fetch(topic, 0))


@pytest.mark.parametrize(
    "script",
    [
        interleaved_transactions,
        lookups_by_time,
        deleting_into_an_open_transaction,
        markers_by_hand,
        markers_of_strangers,
    ],
    ids=lambda script: script.__name__,
)
def test_partitions_show_transactions_as_kafka_does(compare: Compare, script: Script) -> None:
    compare(script)
