"""AlterPartitionReassignments (45), versions 0 and 1: replicas stay where they are.

Asking for the replicas a partition has is fine and changes nothing, cancelling finds nothing to cancel, and
anything else is refused: there is one broker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import checked_replicas, existing_topic
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    return {
        "throttle_time": 0,
        "allow_replication_factor_change": context.version < 1 or request.allow_replication_factor_change,
        "error_code": ErrorCode.none,
        "error_message": None,
        "responses": [
            {
                "name": topic.name,
                "partitions": [_one(node, topic.name, partition) for partition in topic.partitions],
            }
            for topic in request.topics
        ],
    }


def _one(node: ClusterServices, topic: str, partition: Any) -> Fields:
    code, message = ErrorCode.none, None
    try:
        _check(node, topic, partition.partition_index, partition.replicas)
    except ApiError as refused:
        code, message = refused.code, refused.message
    return {"partition_index": partition.partition_index, "error_code": code, "error_message": message}


def _check(node: ClusterServices, topic: str, index: int, replicas: Sequence[int] | None) -> None:
    existing_topic(node.metadata.image, topic)
    partition = node.metadata.image.partition(topic, index)
    if partition is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"topic {topic!r} has no partition {index}")
    if replicas is None:
        raise ApiError(ErrorCode.no_reassignment_in_progress, f"{topic}-{index} is not being moved")
    if checked_replicas(node.metadata.image, replicas, None) != partition.replicas:
        raise ApiError(ErrorCode.invalid_replica_assignment, f"{topic}-{index} cannot be moved")
