"""Requests about the offsets of logs: where records of a time are, where an epoch ended, and where the log shall
start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from holdfast.broker.log.scan import FoundBatch
from holdfast.broker.log.segment import Segment
from holdfast.broker.metadata.names import refuse_internal
from holdfast.broker.node.context import Fields, Later, RequestContext
from holdfast.broker.node.handlers.administration import code_of, deadline_ms
from holdfast.broker.node.handlers.fetch import READ_COMMITTED, check_leader_epoch
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import DataServices
from holdfast.broker.node.timers import Timer
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


def list_offsets(node: DataServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """ListOffsets (2), versions 1 to 11: an offset by time, or one of the special places.

        -1 latest (the last stable offset for read_committed)     -2 earliest
        -3 the record with the largest timestamp                  -4 earliest kept locally: the same as -2 here
        -5 latest in tiered storage: none                         -6 earliest not yet tiered: none

    Lookups stop at the same bounds as fetches: nobody learns of a record that is not committed.
    """
    read_committed = getattr(request, "isolation_level", 0) == READ_COMMITTED
    seen: set[tuple[str, int]] = set()
    repeated: set[tuple[str, int]] = set()
    for topic in request.topics:
        for partition in topic.partitions:
            key = (topic.name, partition.partition_index)
            (repeated if key in seen else seen).add(key)
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    _list_one(node, context, topic.name, partition, read_committed, repeated)
                    for partition in topic.partitions
                ],
            }
            for topic in request.topics
        ],
    }


def _list_one(
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


def offset_for_leader_epoch(node: DataServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """OffsetForLeaderEpoch (23), versions 2 to 4: where an epoch ended, so that a client can see a cut (KIP-320)."""
    return {
        "topics": [
            {
                "topic": topic.topic,
                "partitions": [_end_of_epoch(node, topic.topic, wanted) for wanted in topic.partitions],
            }
            for topic in request.topics
        ],
    }


def _end_of_epoch(node: DataServices, topic: str, wanted: Any) -> Fields:
    try:
        hosted = node.partitions.leader_of(topic, wanted.partition)
        check_leader_epoch(hosted, wanted.current_leader_epoch)
    except ApiError as error:
        return {"partition": wanted.partition, "error_code": error.code, "leader_epoch": -1, "end_offset": -1}
    # The end of the present epoch is what is committed: an unflushed tail is nobody's business yet.
    end = hosted.end_of_epoch(wanted.leader_epoch, hosted.offsets.high_watermark.offset)
    return {
        "partition": wanted.partition,
        "error_code": 0,
        "leader_epoch": end.epoch,
        "end_offset": end.end_offset,
    }


UP_TO_HIGH_WATERMARK: Final = -1


class Deletion(NamedTuple):
    """Of the records of one partition that are below an offset."""

    hosted: HostedPartition
    offset: int
    result: Fields
    """The partition's part of the answer."""


class Deleting:
    """One request under way: what is to be deleted, and how much of it waits for a flush."""

    def __init__(self, node: DataServices) -> None:
        self._node = node
        self._deletions: list[Deletion] = []
        self._waiting = 1  # for the last partition to be added
        self._timer: Timer | None = None
        self.later = Later(self._stop_waiting)
        self.fields: Fields = {"topics": []}

    def add(self, topic: str, index: int, offset: int) -> Fields:
        # Until it is flushed: what is not in time is told so.
        result: Fields = {
            "partition_index": index,
            "low_watermark": -1,
            "error_code": ErrorCode.request_timed_out,
        }
        try:
            hosted = self._node.partitions.leader_of(topic, index)
            refuse_internal(topic, "keeps its records: they are the state of groups or transactions")
            config = hosted.log.config
            if "delete" not in config.cleanup_policy and "compact" in config.cleanup_policy:
                raise ApiError(
                    ErrorCode.policy_violation, f"{topic} is compacted and does not delete records"
                )
            # On one node the log end is where the high watermark is going to be.
            end_offset = hosted.log.end_offset
            if offset == UP_TO_HIGH_WATERMARK:
                offset = end_offset
            if not 0 <= offset <= end_offset:
                raise ApiError(
                    ErrorCode.offset_out_of_range,
                    f"{hosted.name}: {offset} is not between 0 and {end_offset}",
                )
        except ApiError as error:
            result["error_code"] = error.code
            return result
        deletion = Deletion(hosted, offset, result)
        self._deletions.append(deletion)
        self._waiting += 1
        hosted.offsets.when_committed(offset, self.later.step(lambda error: self._flushed(deletion, error)))
        return result

    def _flushed(self, deletion: Deletion, error: Exception | None) -> None:
        deletion.result["error_code"] = ErrorCode.none if error is None else code_of(error)
        self._settle()

    def _settle(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._end()

    def wait(self, deadline_ms: int) -> None:
        """All partitions were added."""
        self._settle()
        if not self.later.is_resolved:
            self._timer = self._node.timers.at(
                deadline_ms, lambda: self.later.take(lambda _: self._end(), None)
            )

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        if self.later.is_resolved:
            return
        self._stop_waiting()
        flushed = [one for one in self._deletions if one.result["error_code"] is ErrorCode.none]
        # Of two for one partition the larger offset comes last, and counts.
        flushed.sort(key=lambda one: one.offset)
        self._node.log_starts.move([(one.hosted, one.offset) for one in flushed if not one.hosted.is_deleted])
        for hosted, offset, result in flushed:
            if hosted.is_deleted:
                result["error_code"] = ErrorCode.unknown_topic_or_partition
            elif hosted.offline or hosted.log.start_offset < offset:  # it has failed, or is full
                result["error_code"] = ErrorCode.kafka_storage_error
            else:
                result["low_watermark"] = hosted.log.start_offset
        self.later.resolve(self.fields)


def delete_records(node: DataServices, context: RequestContext, request: Any, now: Now) -> Later:
    """DeleteRecords (21), versions 0 to 2: move the start of a partition forward.

    -1 means up to the high watermark; an offset below the present start changes nothing. What a producer was told
    is stored may be deleted, also when it is not flushed yet (acks=1): the request waits for the flush within its
    time-out. The new starts are durable before the answer leaves and before files go: one write per log directory
    and request.
    """
    deleting = Deleting(node)
    deleting.fields["topics"] = [
        {
            "name": topic.name,
            "partitions": [
                deleting.add(topic.name, wanted.partition_index, wanted.offset) for wanted in topic.partitions
            ],
        }
        for topic in request.topics
    ]
    deleting.wait(deadline_ms(request, now))
    return deleting.later
