"""OffsetDelete (47), version 0: forget positions in topics that the group does not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from holdfast.errors import ApiError
from holdfast.node.context import Answer, Fields, RequestContext
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.node.node import Node


def handle(node: Node, context: RequestContext, request: Any, now: Now) -> Answer:
    if not request.group_id:
        return _refusal(ErrorCode.invalid_group_id)
    outcomes: dict[tuple[str, int], ErrorCode] = {}
    known: list[tuple[str, int]] = []
    for topic in request.topics:
        facts = node.groups.topics.by_name(topic.name)
        for partition in topic.partitions:
            place = (topic.name, partition.partition_index)
            if facts is None or not 0 <= partition.partition_index < facts.partitions:
                outcomes[place] = ErrorCode.unknown_topic_or_partition
            else:
                known.append(place)
    try:
        shard, machine = node.groups.find(request.group_id, now)
        outcomes |= machine.delete_offsets(request.group_id, known, now)
    except ApiError as error:
        return _refusal(error.code)
    topics = [
        {
            "name": topic.name,
            "partitions": [
                {
                    "partition_index": partition.partition_index,
                    "error_code": outcomes[topic.name, partition.partition_index],
                }
                for partition in topic.partitions
            ],
        }
        for topic in request.topics
    ]
    return shard.answer({"error_code": ErrorCode.none, "throttle_time": 0, "topics": topics}, _refusal)


def _refusal(code: ErrorCode) -> Fields:
    return {"error_code": code, "throttle_time": 0, "topics": []}
