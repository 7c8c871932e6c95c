"""OffsetForLeaderEpoch (23), versions 2 to 4: where an epoch ended, so that a client can see a cut (KIP-320)."""

from __future__ import annotations

from typing import Any

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.handlers.k01_fetch import check_leader_epoch
from holdfast.broker.node.services import DataServices
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: DataServices, context: RequestContext, request: Any, now: Now) -> Fields:
    return {
        "throttle_time": 0,
        "topics": [
            {
                "topic": topic.topic,
                "partitions": [_one(node, topic.topic, wanted) for wanted in topic.partitions],
            }
            for topic in request.topics
        ],
    }


def _one(node: DataServices, topic: str, wanted: Any) -> Fields:
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
