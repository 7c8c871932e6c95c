"""What the administrative handlers share: authorised operations, addresses, partitions as clients see them.

Every handler here answers item by item: one refused topic or resource never spoils the others, and an item
that fails leaves no trace. A change is appended and applied item by item too; the node holds the response
back until all of it is durable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.image import NO_LEADER, PartitionImage, TopicImage
from holdfast.broker.metadata.names import INTERNAL_TOPICS
from holdfast.broker.node.context import Fields, RequestContext, Within
from holdfast.broker.node.services import ClusterServices
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.metadata_records import EndPoint

OPERATIONS_NOT_ASKED: Final = -(2**31)
"""Stands in an answer for authorised operations nobody asked about."""


def _bits(*operations: int) -> int:
    return sum(1 << operation for operation in operations)


READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE = range(3, 9)
CLUSTER_ACTION, DESCRIBE_CONFIGS, ALTER_CONFIGS, IDEMPOTENT_WRITE = range(9, 13)

TOPIC_OPERATIONS: Final = _bits(READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS)
"""All that can be done with a topic: without authorisation everybody may."""
CLUSTER_OPERATIONS: Final = _bits(
    CREATE, ALTER, DESCRIBE, CLUSTER_ACTION, DESCRIBE_CONFIGS, ALTER_CONFIGS, IDEMPOTENT_WRITE
)
GROUP_OPERATIONS: Final = _bits(READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS)


def topic_operations(asked: bool) -> int:
    return TOPIC_OPERATIONS if asked else OPERATIONS_NOT_ASKED


def cluster_operations(asked: bool) -> int:
    return CLUSTER_OPERATIONS if asked else OPERATIONS_NOT_ASKED


def group_operations(asked: bool) -> int:
    return GROUP_OPERATIONS if asked else OPERATIONS_NOT_ASKED


def brokers_on(
    node: ClusterServices, listener: str, *, fenced_too: bool = False
) -> Iterator[tuple[int, Fields]]:
    """Each broker's id with its address on the listener the client came in by."""
    for broker_id in sorted(node.metadata.image.brokers):
        broker = node.metadata.image.brokers[broker_id]
        if broker.fenced and not fenced_too:
            continue
        known: dict[str, EndPoint] = {end_point.name: end_point for end_point in broker.end_points}
        if broker_id == node.identity.node_id:
            known |= node.identity.endpoints
        end_point = known.get(listener)
        if end_point is not None:
            yield (
                broker_id,
                {
                    "host": end_point.host,
                    "port": end_point.port,
                    "rack": broker.rack,
                },
            )


def partition_fields(node: ClusterServices, topic: TopicImage, partition: PartitionImage) -> Fields:
    """One partition as Metadata and DescribeTopicPartitions show it.

    A replica on this node whose log cannot be used is offline, and cannot lead whatever the image says.
    """
    offline = [
        broker_id for broker_id in partition.replicas if _is_offline(node, topic, partition, broker_id)
    ]
    leader = NO_LEADER if partition.leader in offline else partition.leader
    return {
        "error_code": ErrorCode.leader_not_available if leader == NO_LEADER else ErrorCode.none,
        "partition_index": partition.index,
        "leader_id": leader,
        "leader_epoch": partition.leader_epoch,
        "replica_nodes": partition.replicas,
        "isr_nodes": partition.isr,
        "offline_replicas": offline,
    }


def _is_offline(node: ClusterServices, topic: TopicImage, partition: PartitionImage, broker_id: int) -> bool:
    if broker_id != node.identity.node_id:
        broker = node.metadata.image.brokers.get(broker_id)
        return broker is None or broker.fenced
    hosted = node.partitions.get(topic.name, partition.index)
    return hosted is None or hosted.offline


def is_internal(topic: str) -> bool:
    return topic in INTERNAL_TOPICS


NOT_IN_TIME: Final = "the request's time-out has passed; what it asks for may come true later"


def has_no_time(request: Any) -> bool:
    """A change that may take no time at all is not begun: it would be done and reported as not done."""
    return bool(request.timeout.total_seconds() <= 0)


def deadline_ms(request: Any, now: Now) -> int:
    return now.monotonic_ms + int(request.timeout.total_seconds() * 1000)


def within(request: Any, now: Now, key: str, results: list[Fields], too_late: list[Fields]) -> Within:
    """The results of an administrative request under their `key`, or those of one whose time is over."""
    return Within({key: results}, deadline_ms(request, now), {key: too_late})


def code_of(error: Exception) -> ErrorCode:
    """What a client is told of whatever ended its waiting."""
    return error.code if isinstance(error, ApiError) else ErrorCode.kafka_storage_error


def client_name(context: RequestContext) -> str:
    return f"client {context.session.client_id or '(unnamed)'!r} at {context.session.address}"
