"""DeleteRecords (21), versions 0 to 2: move the start of a partition forward.

-1 means up to the high watermark; an offset below the present start changes nothing. What a producer was told is
stored may be deleted, also when it is not flushed yet (acks=1): the request waits for the flush within its time-out.
The new starts are durable before the answer leaves and before files go: one write per log directory and request.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.names import refuse_internal
from holdfast.broker.node.context import Fields, Later, RequestContext
from holdfast.broker.node.handlers.administration import code_of, deadline_ms
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import DataServices
from holdfast.broker.node.timers import Timer
from holdfast.errors import ApiError
from holdfast.seams import Now

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
        self.fields: Fields = {"throttle_time": 0, "topics": []}

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


def handle(node: DataServices, context: RequestContext, request: Any, now: Now) -> Later:
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
