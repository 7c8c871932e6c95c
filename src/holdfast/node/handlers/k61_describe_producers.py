"""DescribeProducers (61), version 0: who writes to a partition, as its producer state knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.errors import ApiError
from holdfast.node.context import Fields, RequestContext
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.node.node import Node


def handle(node: Node, context: RequestContext, request: Any, now: Now) -> Fields:
    return {
        "throttle_time": 0,
        "topics": [
            {
                "name": topic.name,
                "partitions": [_one(node, topic.name, index) for index in topic.partition_indexes],
            }
            for topic in request.topics
        ],
    }


def _one(node: Node, topic: str, index: int) -> Fields:
    try:
        hosted = node.leader_of(topic, index)
    except ApiError as error:
        return {"partition_index": index, "error_code": error.code, "error_message": error.message}
    return {
        "partition_index": index,
        "error_code": 0,
        "active_producers": [producer._asdict() for producer in hosted.log.producers.describe()],
    }
