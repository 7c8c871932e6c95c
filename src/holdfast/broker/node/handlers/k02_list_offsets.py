"""ListOffsets (2), versions 1 to 11: an offset by time, or one of the special places.

    -1 latest (the last stable offset for read_committed)     -2 earliest
    -3 the record with the largest timestamp                  -4 earliest kept locally: the same as -2 here
    -5 latest in tiered storage: none                         -6 earliest not yet tiered: none

Lookups stop at the same bounds as fetches: nobody learns of a record that is not committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.log.scan import FoundBatch
from holdfast.broker.log.segment import Segment
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.handlers.k01_fetch import READ_COMMITTED, check_leader_epoch
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import DataServices
from holdfast.errors import ApiError, CorruptLog, InvalidRecords
from holdfast.saying import error as error_line
from holdfast.seams import Now
from holdfast.wire.batch import iterate_records, nearest_timestamp
from holdfast.wire.positions import LogPosition

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
EARLIEST_PENDING_UPLOAD: Final = -6
NOTHING: Final = (-1, -1)
FIRST_VERSION: Final = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9, EARLIEST_PENDING_UPLOAD: 11}


def handle(node: DataServices, context: RequestContext, request: Any, now: Now) -> Fields:
    read_committed = getattr(request, "isolation_level", 0) == READ_COMMITTED
    seen: set[tuple[str, int]] = set()
    repeated: set[tuple[str, int]] = set()
    for topic in request.topics:
        for partition in topic.partitions:
            key = (topic.name, partition.partition_index)
            (repeated if key in seen else seen).add(key)
    return {
        "throttle_time": 0,
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    _one(node, context, topic.name, partition, read_committed, repeated)
                    for partition in topic.partitions
                ],
            }
            for topic in request.topics
        ],
    }


def _one(
    node: DataServices,
    context: RequestContext,
    topic: str,
    partition: Any,
    read_committed: bool,
    repeated: set[tuple[str, int]],
) -> Fields:
    index = partition.partition_index
    try:
        if (topic, index) in repeated:
            raise ApiError(ErrorCode.invalid_request)
        hosted = node.partitions.leader_of(topic, index)
        check_leader_epoch(hosted, getattr(partition, "current_leader_epoch", -1))
        if context.version < FIRST_VERSION.get(partition.timestamp, 0) or partition.timestamp < min(
            FIRST_VERSION
        ):
            raise ApiError(ErrorCode.unsupported_version)
        timestamp, offset = find_offset(hosted, partition.timestamp, read_committed)
    except ApiError as error:
        return {"partition_index": index, "error_code": error.code, "timestamp": -1, "offset": -1}
    except (CorruptLog, OSError) as failure:
        node.say(error_line(f"looking up {topic}-{index} failed: {failure}", kind=f"reading {topic}-{index}"))
        return {
            "partition_index": index,
            "error_code": ErrorCode.kafka_storage_error,
            "timestamp": -1,
            "offset": -1,
        }
    return {
        "partition_index": index,
        "error_code": 0,
        "timestamp": timestamp,
        "offset": offset,
        "leader_epoch": _epoch_of(hosted, partition.timestamp, offset),
    }


def _epoch_of(hosted: HostedPartition, timestamp: int, offset: int) -> int:
    """The leader epoch of an offset; where nothing is written yet, the one the next record will have."""
    if offset < 0:
        return -1
    if timestamp == LATEST or offset >= hosted.log.end_offset:
        return hosted.leader_epoch
    return hosted.log.epochs.epoch_for(offset)


def find_offset(hosted: HostedPartition, timestamp: int, read_committed: bool) -> tuple[int, int]:
    """(timestamp, offset) for a time or special place; (-1, -1) when there is none."""
    log = hosted.log
    bound = hosted.readable_end(read_committed=read_committed)
    if timestamp == LATEST:
        return -1, bound.offset
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return -1, log.start_offset
    if timestamp == MAX_TIMESTAMP:
        return _max_timestamp(hosted, bound)
    if timestamp < 0:
        return NOTHING
    return _first_at_or_after(hosted, timestamp, bound)


def _first_at_or_after(hosted: HostedPartition, timestamp: int, bound: LogPosition) -> tuple[int, int]:
    log = hosted.log
    found = log.batch_at_or_after_time(timestamp, bound)
    if found is None:
        return NOTHING
    answer = _first_record(*found, at_least=timestamp, start=log.start_offset)
    if answer != NOTHING:
        return answer
    # The records that made the batch look right lie below the log start, or its producer told a maximum that none
    # of them has: a later batch has the answer.
    for candidate in log.batches_from(found[1].header.next_offset, bound):
        if candidate.header.max_timestamp >= timestamp and candidate.header.records_count:
            segment = log.segments[log.segment_for(candidate.header.base_offset)]
            answer = _first_record(segment, candidate, at_least=timestamp, start=log.start_offset)
            if answer != NOTHING:
                return answer
    return NOTHING


def _max_timestamp(hosted: HostedPartition, bound: LogPosition) -> tuple[int, int]:
    """None for a committed reader while the record with the largest timestamp is undecided, as Kafka answers."""
    high_watermark = hosted.offsets.high_watermark
    if bound.offset < high_watermark.offset:
        timestamp, offset = _max_timestamp(hosted, high_watermark)
        return (timestamp, offset) if offset < bound.offset else NOTHING
    found = hosted.log.newest_batch(bound)
    if found is None:
        return NOTHING
    start = hosted.log.start_offset
    answer = _first_record(*found, at_least=found[1].header.max_timestamp, start=start)
    if answer != NOTHING:
        return answer
    # Its producer told a maximum that none of its records has.
    times = [record for record in _records(*found) if record[0] >= 0 and record[1] >= start]
    return max(times, key=lambda record: (record[0], -record[1]), default=NOTHING)


def _first_record(segment: Segment, found: FoundBatch, *, at_least: int, start: int) -> tuple[int, int]:
    """The first record of a batch whose timestamp is `at_least`."""
    header = found.header
    try:
        for timestamp, offset in _records(segment, found):
            if timestamp >= at_least and offset >= start:
                return timestamp, offset
    except InvalidRecords:
        # Its producer wrote records that nobody can read. The batch's start passes over nothing.
        return header.max_timestamp, max(header.base_offset, start)
    return NOTHING


def _records(segment: Segment, found: FoundBatch) -> Iterator[tuple[int, int]]:
    """Timestamp and offset of every record of a batch."""
    header = found.header
    for record in iterate_records(segment.file.pread(header.size, found.position)):
        timestamp = nearest_timestamp(header.base_timestamp + record.timestamp_delta)
        offset = header.base_offset + record.offset_delta
        yield header.max_timestamp if header.is_log_append_time else timestamp, offset
