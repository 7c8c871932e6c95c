"""DescribeTopicPartitions (75), version 0: topics in the order of their names, a page at a time.

A page ends at the limit of partitions, and its cursor names the partition the next page begins with. No names
asks for every topic.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.names import check_topic_name
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.handlers.administration import (
    OPERATIONS_NOT_ASKED,
    TOPIC_OPERATIONS,
    is_internal,
    partition_fields,
)
from holdfast.broker.node.services import ClusterServices
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    cursor = request.cursor
    asked = sorted({topic.name for topic in request.topics} or node.metadata.image.topics)
    if cursor is not None and _is_beside(cursor, request):
        return {
            "throttle_time": 0,
            "topics": [_failed(name, ErrorCode.invalid_request, OPERATIONS_NOT_ASKED) for name in asked],
            "next_cursor": None,
        }
    first = 0
    if cursor is not None:
        asked = [name for name in asked if name >= cursor.topic_name]
        if asked and asked[0] == cursor.topic_name:
            first = cursor.partition_index
    room = max(
        1, min(request.response_partition_limit, node.settings.broker.max_request_partition_size_limit)
    )
    topics: list[Fields] = []
    for name in asked:
        if room == 0:
            return {"throttle_time": 0, "topics": topics, "next_cursor": _cursor(name, 0)}
        shown, left = _one(node, name, first, room)
        topics.append(shown)
        if left is not None:
            return {"throttle_time": 0, "topics": topics, "next_cursor": _cursor(name, left)}
        room -= len(shown["partitions"])
        first = 0
    return {"throttle_time": 0, "topics": topics, "next_cursor": None}


def _is_beside(cursor: Any, request: Any) -> bool:
    """Whether the cursor cannot be one this request's earlier page ended with."""
    names = {topic.name for topic in request.topics}
    return cursor.partition_index < 0 or bool(names and cursor.topic_name not in names)


def _one(node: ClusterServices, name: str, first: int, room: int) -> tuple[Fields, int | None]:
    """A topic from one of its partitions on, and the partition that no longer fits."""
    topic = node.metadata.image.topic(name)
    if topic is None:
        try:
            check_topic_name(name)
        except ApiError as refused:
            return _failed(name, refused.code, TOPIC_OPERATIONS), None
        return _failed(name, ErrorCode.unknown_topic_or_partition, TOPIC_OPERATIONS), None
    shown = topic.partitions[first : first + room]
    fields = {
        "error_code": ErrorCode.none,
        "name": name,
        "topic_id": topic.topic_id,
        "is_internal": is_internal(name),
        "partitions": [
            {
                **partition_fields(node, topic, partition),
                "eligible_leader_replicas": partition.eligible_leader_replicas,
                "last_known_elr": partition.last_known_elr,
            }
            for partition in shown
        ],
        "topic_authorized_operations": TOPIC_OPERATIONS,
    }
    end = first + len(shown)
    return fields, end if end < len(topic.partitions) and shown else None


def _failed(name: str, code: ErrorCode, operations: int) -> Fields:
    return {
        "error_code": code,
        "name": name,
        "topic_id": None,
        "is_internal": is_internal(name),
        "partitions": [],
        "topic_authorized_operations": operations,
    }


def _cursor(topic: str, index: int) -> Fields:
    return {"topic_name": topic, "partition_index": index}
