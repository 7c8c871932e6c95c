"""Whole batches of a partition as any Kafka serves them: the bytes that stand in its log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.admin.brokers import Brokers
from holdfast.admin.errors import refused
from holdfast.broker.log.scan import Batch
from holdfast.errors import InvalidRecords
from holdfast.reader.fetch_messages import FETCH, LOWEST_VERSION, Asked, Fetched, pack_fetch, walk_fetch
from holdfast.wire.api_keys import LIST_OFFSETS
from holdfast.wire.batch import HEADER_SIZE, LOG_OVERHEAD, check_whole, read_header

FETCH_BYTES: Final = 8 << 20
WAIT_MS: Final = 200
EMPTY_SECONDS_MAX: Final = 10.0
"""How long the end of a log may be below what is wanted."""
EMPTY_ANSWERS: Final = 3
"""How often in a row nothing may come although the log reaches further, before nothing is there."""


class Ends(NamedTuple):
    start: int
    end: int


def ends_of(brokers: Brokers, topic: str, partition: int) -> Ends:
    """Where a log starts, and where what consumers may read ends."""

    def ask(timestamp: int) -> int:
        def attempt() -> int:
            wanted = [{"partition_index": partition, "current_leader_epoch": -1, "timestamp": timestamp}]
            fields = {
                "replica_id": -1,
                "isolation_level": 0,
                "topics": [{"name": topic, "partitions": wanted}],
                "timeout_ms": 30_000,
            }
            answer = brokers.ask_broker(
                brokers.leader_of(topic, partition), LIST_OFFSETS, fields, lowest=4, highest=9
            )
            found = answer.topics[0].partitions[0]
            if found.error_code is not ErrorCode.none:
                raise refused(f"cannot ask for the offsets of {topic}-{partition}", found.error_code)
            return int(found.offset)

        return brokers.retried(attempt)

    return Ends(ask(-2), ask(-1))


def batches(
    brokers: Brokers, topic: str, topic_id: UUID, partition: int, start: int, end: int
) -> Iterator[Batch]:
    """Every batch with an offset in [start, end), its checksum proven. Ends early where nothing more comes.

    What a batch's data shows holds until the next one.
    """
    position = start
    deadline = time.monotonic() + EMPTY_SECONDS_MAX
    empty = 0
    while position < end and empty < EMPTY_ANSWERS and time.monotonic() < deadline:
        before = position
        fetched = brokers.retried(partial(_fetch, brokers, topic, topic_id, partition, position))
        for batch in _whole(fetched.records):
            if batch.header.next_offset <= position:
                continue
            if batch.header.base_offset >= end:
                return
            yield batch
            position = batch.header.next_offset
        if position > before:
            deadline = time.monotonic() + EMPTY_SECONDS_MAX
            empty = 0
        elif fetched.high_watermark >= end:
            empty += 1


def _fetch(brokers: Brokers, topic: str, topic_id: UUID, partition: int, position: int) -> Fetched:
    connection = brokers.connected(brokers.address_of(brokers.leader_of(topic, partition)))
    version = connection.version(FETCH, LOWEST_VERSION)
    asked = {topic_id: [Asked(partition, -1, position, FETCH_BYTES)]}
    body = pack_fetch(version, asked, isolation_level=0, wait_ms=WAIT_MS, bytes_max=FETCH_BYTES)
    answer = walk_fetch(connection.receive(connection.send(FETCH, version, body)))
    code = ErrorCode(answer.error_code or answer.partitions[0].error_code)
    if code is not ErrorCode.none:
        raise refused(f"cannot fetch {topic}-{partition} from offset {position}", code)
    return answer.partitions[0]


def _whole(records: memoryview) -> Iterator[Batch]:
    """The last batch of an answer may be cut off; it is asked for again."""
    position = 0
    while len(records) - position >= HEADER_SIZE:
        size = LOG_OVERHEAD + read_header(records, position).batch_length
        if position + size > len(records):
            return
        data = records[position : position + size]
        try:
            yield Batch(check_whole(data), data)
        except InvalidRecords as error:
            error.add_note(f"at byte {position} of an answer")
            raise
        position += size
