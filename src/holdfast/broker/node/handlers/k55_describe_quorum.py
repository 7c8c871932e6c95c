"""DescribeQuorum (55), versions 0 to 2: who keeps the metadata log, and how far each has it.

One node is a quorum of one: the only voter, and always caught up with itself.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.names import METADATA_TOPIC
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    topics = [
        {
            "topic_name": topic.topic_name,
            "partitions": [
                _one(node, topic.topic_name, partition.partition_index, now) for partition in topic.partitions
            ],
        }
        for topic in request.topics
    ]
    served = any(not partition["error_code"] for topic in topics for partition in topic["partitions"])
    listeners = [
        {"name": end_point.name, "host": end_point.host, "port": end_point.port}
        for end_point in node.identity.endpoints.values()
    ]
    return {
        "error_code": ErrorCode.none,
        "error_message": "",
        "topics": topics,
        "nodes": [{"node_id": node.identity.node_id, "listeners": listeners}] if served else [],
    }


def _one(node: ClusterServices, topic: str, index: int, now: Now) -> Fields:
    metadata = node.metadata.hosted
    if topic != METADATA_TOPIC or index != 0:
        return {
            "partition_index": index,
            "error_code": ErrorCode.unknown_topic_or_partition,
            "error_message": f"only {METADATA_TOPIC}-0 has a quorum",
        }
    return {
        "partition_index": 0,
        "error_code": ErrorCode.none,
        "error_message": "",
        "leader_id": node.identity.node_id,
        "leader_epoch": metadata.leader_epoch,
        "high_watermark": metadata.offsets.high_watermark.offset,
        "current_voters": [_voter(node, metadata, now)],
        "observers": [],
    }


def _voter(node: ClusterServices, metadata: HostedPartition, now: Now) -> Fields:
    return {
        "replica_id": node.identity.node_id,
        "replica_directory_id": metadata.directory.id,
        "log_end_offset": metadata.log.end_offset,
        "last_fetch_timestamp": now.wall_ms,
        "last_caught_up_timestamp": now.wall_ms,
    }
