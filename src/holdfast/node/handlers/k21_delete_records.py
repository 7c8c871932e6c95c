"""DeleteRecords (21), versions 0 to 2: move the start of a partition forward.

-1 means up to the high watermark; an offset below the present start changes nothing. The new start is durable
before the answer leaves and before files go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from holdfast.errors import ApiError, LogDirectoryOffline
from holdfast.metadata.names import refuse_internal
from holdfast.node.context import Fields, RequestContext
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.node.node import Node

UP_TO_HIGH_WATERMARK: Final = -1


def handle(node: Node, context: RequestContext, request: Any, now: Now) -> Fields:
    return {
        "throttle_time": 0,
        "topics": [
            {
                "name": topic.name,
                "partitions": [_one(node, topic.name, wanted, now) for wanted in topic.partitions],
            }
            for topic in request.topics
        ],
    }


def _one(node: Node, topic: str, wanted: Any, now: Now) -> Fields:
    index = wanted.partition_index
    try:
        hosted = node.leader_of(topic, index)
        refuse_internal(topic, "keeps its records: they are the state of groups or transactions")
        config = hosted.log.config
        if "delete" not in config.cleanup_policy and "compact" in config.cleanup_policy:
            raise ApiError(ErrorCode.policy_violation, f"{topic} is compacted and does not delete records")
        high_watermark = hosted.offsets.high_watermark.offset
        offset = high_watermark if wanted.offset == UP_TO_HIGH_WATERMARK else wanted.offset
        if not 0 <= offset <= high_watermark:
            raise ApiError(
                ErrorCode.offset_out_of_range,
                f"{hosted.name}: {offset} is not between 0 and {high_watermark}",
            )
        node.move_log_start(hosted, offset)
        hosted.require_online()
        if hosted.log.start_offset < offset:
            raise ApiError(ErrorCode.kafka_storage_error, f"{hosted.directory.path} is full")
    except LogDirectoryOffline:
        return {"partition_index": index, "low_watermark": -1, "error_code": ErrorCode.kafka_storage_error}
    except ApiError as error:
        return {"partition_index": index, "low_watermark": -1, "error_code": error.code}
    return {"partition_index": index, "low_watermark": hosted.log.start_offset, "error_code": 0}
