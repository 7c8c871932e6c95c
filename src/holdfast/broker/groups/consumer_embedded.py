"""Between the partitions a group of the consumer protocol gives out, by topic id, and what its classic members say and
are told, which is by name and inside JoinGroup and SyncGroup."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from holdfast.broker.groups.consumer_member import Held
from holdfast.broker.groups.model import Topics
from holdfast.wire.consumer_protocol import ConsumerAssignment, OwnedPartitions, decode_subscription


def by_topic_id(named: Iterable[OwnedPartitions], topics: Topics) -> dict[UUID, tuple[int, ...]]:
    """Topics that are gone are left out."""
    found = ((topics.by_name(each.topic), each.partitions) for each in named)
    return {facts.topic_id: partitions for facts, partitions in found if facts is not None}


def embedded_assignment(held: Held, metadata: bytes, topics: Topics) -> bytes:
    """What a classic member holds, in the layout of what it said of itself."""
    found = ((topics.by_id(topic_id), partitions) for topic_id, partitions in held.items())
    assigned = sorted(
        (
            OwnedPartitions(facts.name, tuple(sorted(partitions)))
            for facts, partitions in found
            if facts is not None
        ),
        key=lambda each: each.topic,
    )
    try:
        version, _ = decode_subscription(metadata)
    except ValueError:
        version = 0
    return ConsumerAssignment(assigned_partitions=tuple(assigned)).encode(version)
