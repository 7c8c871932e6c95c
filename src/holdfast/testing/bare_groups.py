"""Members of groups on a `BareNode`: each has a connection of its own and says what it is told to.

node = BareNode({"group.initial.rebalance.delay.ms": "0"})
ann = BareMember(node, "group")
ann.join()
ann.sync({ann.member_id: b"work"})
ann.commit({("orders", 0): 17})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.wire.consumer_protocol import ConsumerSubscription

OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP = range(8, 15)
DESCRIBE_GROUPS, LIST_GROUPS = 15, 16
DELETE_GROUPS, OFFSET_DELETE = 42, 47


class BareMember:
    def __init__(self, node: BareNode, group: str, *, instance_id: str | None = None) -> None:
        self.node = node
        self.client: BareClient = node.connect()
        self.group = group
        self.member_id = ""
        self.instance_id = instance_id
        self.generation = -1
        self.assignment = b""

    # Joining

    def join_fields(self, topics: Sequence[str] = (), **fields: Any) -> dict[str, Any]:
        metadata = ConsumerSubscription(topics=tuple(topics)).encode()
        return {
            "group_id": self.group,
            "session_timeout": 10_000,
            "rebalance_timeout": 20_000,
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": metadata}],
            **fields,
        }

    def begin_join(self, version: int = 9, **fields: Any) -> int:
        return self.client.begin(JOIN_GROUP, version, **self.join_fields(**fields))

    def joined(self, correlation_id: int) -> Any:
        answer = self.client.answer(correlation_id)
        self.member_id = answer.member_id or self.member_id
        if not answer.error_code:
            self.generation = answer.generation_id
        return answer

    def join(self, version: int = 9, **fields: Any) -> Any:
        """Join until it is in, alone or with members that have begun to."""
        correlation_id = self.begin_join(version, **fields)
        self.node.settle()
        answer = self.joined(correlation_id)
        if answer.error_code.name == "member_id_required":
            correlation_id = self.begin_join(version, **fields)
            self.node.settle()
            answer = self.joined(correlation_id)
        return answer

    # Syncing

    def sync_fields(self, assignments: Mapping[str, bytes] | None = None, **fields: Any) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [
                {"member_id": who, "assignment": part} for who, part in (assignments or {}).items()
            ],
            **fields,
        }

    def begin_sync(
        self, assignments: Mapping[str, bytes] | None = None, version: int = 5, **fields: Any
    ) -> int:
        return self.client.begin(SYNC_GROUP, version, **self.sync_fields(assignments, **fields))

    def sync(self, assignments: Mapping[str, bytes] | None = None, version: int = 5, **fields: Any) -> Any:
        return self.client.ask(SYNC_GROUP, version, **self.sync_fields(assignments, **fields))

    def settle_alone(self, work: bytes = b"all") -> None:
        """The only member of a stable group."""
        assert not self.join().error_code
        assert not self.sync({self.member_id: work}).error_code

    # Staying and leaving

    def beat_fields(self, **fields: Any) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
            **fields,
        }

    def beat(self, version: int = 4, **fields: Any) -> Any:
        return self.client.ask(HEARTBEAT, version, **self.beat_fields(**fields)).error_code

    def leave_fields(self) -> dict[str, Any]:
        who = {"member_id": self.member_id, "group_instance_id": self.instance_id, "reason": "done"}
        return {"group_id": self.group, "member_id": self.member_id, "members": [who]}

    def leave(self, version: int = 5) -> Any:
        return self.client.ask(LEAVE_GROUP, version, **self.leave_fields())

    # Positions

    def commit_fields(
        self, positions: Mapping[tuple[str, int], int], metadata: str | None = "", **fields: Any
    ) -> dict[str, Any]:
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, index), offset in positions.items():
            topics.setdefault(topic, []).append(
                {
                    "partition_index": index,
                    "committed_offset": offset,
                    "committed_leader_epoch": 0,
                    "committed_metadata": metadata,
                }
            )
        return {
            "group_id": self.group,
            "generation_id_or_member_epoch": self.generation,
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
            "topics": [
                {"name": topic, "topic_id": self._topic_id(topic), "partitions": partitions}
                for topic, partitions in topics.items()
            ],
            **fields,
        }

    def _topic_id(self, topic: str) -> Any:
        known = self.node.node.metadata.image.topic(topic)
        return None if known is None else known.topic_id

    def begin_commit(self, positions: Mapping[tuple[str, int], int], version: int = 9, **fields: Any) -> int:
        return self.client.begin(OFFSET_COMMIT, version, **self.commit_fields(positions, **fields))

    def commit(self, positions: Mapping[tuple[str, int], int], version: int = 9, **fields: Any) -> Any:
        """The error codes of the partitions, in order."""
        answer = self.client.ask(OFFSET_COMMIT, version, **self.commit_fields(positions, **fields))
        return [partition.error_code for topic in answer.topics for partition in topic.partitions]

    def begin_fetch(self, version: int = 9, *, require_stable: bool = False) -> int:
        """All positions of the group."""
        group = {"group_id": self.group, "topics": None}
        return self.client.begin(OFFSET_FETCH, version, groups=[group], require_stable=require_stable)

    def positions(self) -> dict[tuple[str, int], int]:
        correlation_id = self.begin_fetch()
        self.node.settle()
        (group,) = self.client.answer(correlation_id).groups
        assert not group.error_code, group
        return {
            (topic.name, partition.partition_index): partition.committed_offset
            for topic in group.topics
            for partition in topic.partitions
        }
