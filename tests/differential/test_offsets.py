"""ListOffsets, DeleteRecords, OffsetForLeaderEpoch and the ids of producers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.differential import Script, Side

from holdfast.wire.api_keys import (
    DELETE_RECORDS,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    OFFSET_FOR_LEADER_EPOCH,
    PRODUCE,
)
from holdfast.wire.batch import Record, build_batch

NOW = int(time.time() * 1000)
MINUTE_MS = 60_000
Compare = Callable[[Script], None]


def write(side: Side, topic: str, *timestamps: int, partition: int = 0) -> None:
    """One batch with a record per timestamp."""
    records = [Record(index, moment - NOW, None, b"v") for index, moment in enumerate(timestamps)]
    part = {"index": partition, "records": build_batch(records, base_timestamp=NOW)}
    data = [{"name": topic, "partition_data": [part]}]
    answer = side.client.ask(PRODUCE, 9, {"acks": -1, "timeout": 9000, "topic_data": data})
    assert answer.responses[0].partition_responses[0].error_code == 0


def offsets(side: Side, label: str, version: int, topic: str, *wanted: dict[str, int], **fields: Any) -> None:
    parts = [{"partition_index": 0, "current_leader_epoch": -1, **each} for each in wanted]
    side.ask(label, LIST_OFFSETS, version, {"topics": [{"name": topic, "partitions": parts}], **fields})


def special_places(side: Side) -> None:
    side.create_topic("places", 2)
    for version in (1, 2, 4, 5, 6, 7, 8, 9, 10, 11):
        for place in range(-8, 0):
            offsets(side, f"empty, version {version}, {place}", version, "places", {"timestamp": place})
    write(side, "places", NOW, NOW + 5, NOW + 1)
    write(side, "places", NOW + 2, NOW + 3)
    for version in (1, 2, 4, 5, 6, 7, 8, 9, 10, 11):
        for place in range(-8, 0):
            offsets(side, f"filled, version {version}, {place}", version, "places", {"timestamp": place})
    for place in range(-6, 0):
        fields = {"timestamp": place}
        offsets(side, f"read committed, {place}", 11, "places", fields, isolation_level=1)


def places_by_time(side: Side) -> None:
    side.create_topic("times")
    offsets(side, "empty", 7, "times", {"timestamp": NOW})
    write(side, "times", NOW, NOW + 10, NOW + 5)
    write(side, "times", NOW + 20, NOW + 15)
    write(side, "times", NOW + 20)
    for delta in (-1, 0, 1, 5, 6, 10, 11, 15, 20, 21):
        for version in (1, 7):
            offsets(side, f"{delta:+d}, version {version}", version, "times", {"timestamp": NOW + delta})
    offsets(side, "zero", 7, "times", {"timestamp": 0})
    offsets(side, "read committed", 7, "times", {"timestamp": NOW + 11}, isolation_level=1)


def times_set_by_the_broker(side: Side) -> None:
    side.create_topic("append-times", 1, {"message.timestamp.type": "LogAppendTime"})
    write(side, "append-times", NOW, NOW)
    write(side, "append-times", NOW, NOW)
    part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": NOW - MINUTE_MS}
    wanted = [{"name": "append-times", "partitions": [part]}]
    found = side.client.ask(LIST_OFFSETS, 7, {"topics": wanted}).topics[0].partitions[0]
    side.note("the first", (found.error_code, found.offset, found.timestamp > NOW - MINUTE_MS))
    offsets(side, "in the future", 7, "append-times", {"timestamp": NOW + 60 * MINUTE_MS})


def times_over_segments(side: Side) -> None:
    side.create_topic("segments", 1, {"segment.bytes": "1048576"})
    for number in range(3):
        record = Record(0, 0, None, bytes(900_000))
        batch = build_batch([record], base_timestamp=NOW + number * 1000)
        side.produce(f"batch {number}", "segments", batch)
    for delta in (-1, 0, 500, 1000, 1999, 2000, 2001):
        offsets(side, f"{delta:+d}", 7, "segments", {"timestamp": NOW + delta})
    offsets(side, "maximum", 7, "segments", {"timestamp": -3})


def offsets_of_nothing(side: Side) -> None:
    side.create_topic("present", 2)
    offsets(side, "no such topic", 7, "nowhere", {"timestamp": -1})
    offsets(side, "no such partition", 7, "present", {"timestamp": -1, "partition_index": 9})
    twice = ({"timestamp": -1}, {"timestamp": -2})
    offsets(side, "the same partition twice", 7, "present", *twice)
    for epoch in (0, 1, 7):
        fields = {"timestamp": -1, "current_leader_epoch": epoch}
        offsets(side, f"current epoch {epoch}", 7, "present", fields)
    side.ask("no topics", LIST_OFFSETS, 7, {"topics": []})
    offsets(side, "as a follower", 7, "present", {"timestamp": -1}, replica_id=3)
    offsets(side, "as the debugger", 7, "present", {"timestamp": -1}, replica_id=-2)


def deletion(side: Side) -> None:
    side.create_topic("deleted", 2)
    write(side, "deleted", NOW, NOW + 1, NOW + 2, NOW + 3)
    write(side, "deleted", NOW + 4, NOW + 5)

    def delete(
        label: str, offset: int, *, topic: str = "deleted", partition: int = 0, version: int = 2
    ) -> None:
        parts = [{"partition_index": partition, "offset": offset}]
        fields = {"topics": [{"name": topic, "partitions": parts}], "timeout": 9000}
        side.ask(label, DELETE_RECORDS, version, fields)

    delete("to the start", 0)
    delete("into a batch", 2)
    offsets(side, "earliest after it", 7, "deleted", {"timestamp": -2})
    offsets(side, "earliest local after it", 8, "deleted", {"timestamp": -4})
    offsets(side, "by time before it", 7, "deleted", {"timestamp": NOW})
    offsets(side, "maximum after it", 7, "deleted", {"timestamp": -3})
    side.read_back("read at the new start", "deleted", offset=2)
    side.read_back("read below the new start", "deleted", offset=1)
    delete("backwards", 1)
    delete("beyond the end", 99)
    delete("negative", -3)
    delete("everything, version 0", -1, version=0)
    delete("everything again, version 1", -1, version=1)
    offsets(side, "earliest at the end", 7, "deleted", {"timestamp": -2})
    offsets(side, "latest at the end", 7, "deleted", {"timestamp": -1})
    offsets(side, "maximum of nothing", 7, "deleted", {"timestamp": -3})
    offsets(side, "by time of nothing", 7, "deleted", {"timestamp": NOW})
    write(side, "deleted", NOW + 9)
    side.read_back("goes on behind it", "deleted", offset=6)
    delete("empty partition", -1, partition=1)
    delete("no such partition", 0, partition=9)
    delete("no such topic", 0, topic="nowhere")
    side.create_topic("kept", 1, {"cleanup.policy": "compact"})
    delete("compacted topic", 0, topic="kept")
    side.create_topic("both", 1, {"cleanup.policy": "compact,delete"})
    delete("compacted and deleted topic", 0, topic="both")
    side.ask("no topics", DELETE_RECORDS, 2, {"topics": [], "timeout": 1000})


def ends_of_epochs(side: Side) -> None:
    side.create_topic("epoch-ends", 2)
    write(side, "epoch-ends", NOW, NOW)

    def ask(label: str, version: int, topic: str, partition: int, epoch: int, current: int = -1) -> None:
        part = {"partition": partition, "leader_epoch": epoch, "current_leader_epoch": current}
        fields = {"replica_id": -1, "topics": [{"topic": topic, "partitions": [part]}]}
        side.ask(label, OFFSET_FOR_LEADER_EPOCH, version, fields)

    for version in (2, 3, 4):
        for epoch in (-1, 0, 1, 5):
            ask(f"version {version}, epoch {epoch}", version, "epoch-ends", 0, epoch)
    ask("nothing written", 4, "epoch-ends", 1, 0)
    ask("nothing written, next epoch", 4, "epoch-ends", 1, 1)
    ask("current epoch", 4, "epoch-ends", 0, 0, current=0)
    ask("epoch of the future", 4, "epoch-ends", 0, 0, current=3)
    ask("no such partition", 4, "epoch-ends", 9, 0)
    ask("no such topic", 4, "nowhere", 0, 0)


def ids_of_producers(side: Side) -> None:
    def ask(label: str, version: int, **fields: Any) -> Any:
        wanted = {
            "transactional_id": None,
            "transaction_timeout": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        return side.ask(label, INIT_PRODUCER_ID, version, {**wanted, **fields})

    fields = {"transactional_id": None, "transaction_timeout": 60_000}
    side.wait_until(lambda: side.client.ask(INIT_PRODUCER_ID, 4, fields).producer_id >= 0)
    for version in range(6):
        ask(f"version {version}", version)
    mine = ask("another", 4).producer_id
    ask("again with an id", 4, producer_id=mine, producer_epoch=0)
    ask("no timeout", 4, transaction_timeout=0)
    ask("empty transactional id", 4, transactional_id="")
    ask("id without epoch", 4, producer_id=mine)
    ask("epoch without id", 4, producer_epoch=3)


SCRIPTS = (
    special_places,
    places_by_time,
    times_set_by_the_broker,
    times_over_segments,
    offsets_of_nothing,
    deletion,
    ends_of_epochs,
    ids_of_producers,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_offsets_are_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
