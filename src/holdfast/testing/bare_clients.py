"""Clients that say exactly what they are told to a `BareNode`: members of groups, and transactional producers.

Each member has a connection of its own:

    node = BareNode({"group.initial.rebalance.delay.ms": "0"})
    ann = BareMember(node, "group")
    ann.join()
    ann.sync({ann.member_id: b"work"})
    ann.commit({("orders", 0): 17})

A producer speaks either protocol:

    producer = TransactionalProducer(node.connect(), "copy")
    producer.init()
    producer.produce("orders", 0, b"one")
    producer.end(is_commit=True)

`begin_…` sends a request and lets nothing happen but its beginning; the others wait for the answer. With `is_newer` it
speaks as clients do since KIP-890: the broker enrols partitions and raises the epoch with every end. Otherwise it adds
partitions itself and keeps its epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.committed_reader import Shown, read_through
from holdfast.wire.batch import Record, build_batch
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

    # Committed offsets

    def commit_fields(
        self, offsets: Mapping[tuple[str, int], int], metadata: str | None = "", **fields: Any
    ) -> dict[str, Any]:
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, index), offset in offsets.items():
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

    def begin_commit(self, offsets: Mapping[tuple[str, int], int], version: int = 9, **fields: Any) -> int:
        return self.client.begin(OFFSET_COMMIT, version, **self.commit_fields(offsets, **fields))

    def commit(self, offsets: Mapping[tuple[str, int], int], version: int = 9, **fields: Any) -> Any:
        """The error codes of the partitions, in order."""
        answer = self.client.ask(OFFSET_COMMIT, version, **self.commit_fields(offsets, **fields))
        return [partition.error_code for topic in answer.topics for partition in topic.partitions]

    def begin_fetch(self, version: int = 9, *, require_stable: bool = False) -> int:
        """All committed offsets of the group."""
        group = {"group_id": self.group, "topics": None}
        return self.client.begin(OFFSET_FETCH, version, groups=[group], require_stable=require_stable)

    def committed_offsets(self) -> dict[tuple[str, int], int]:
        correlation_id = self.begin_fetch()
        self.node.settle()
        (group,) = self.client.answer(correlation_id).groups
        assert not group.error_code, group
        return {
            (topic.name, partition.partition_index): partition.committed_offset
            for topic in group.topics
            for partition in topic.partitions
        }


PRODUCE, FETCH, OFFSET_FETCH, INIT_PRODUCER_ID = 0, 1, 9, 22
ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT = 24, 25, 26, 28
DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 65, 66


class TransactionalProducer:
    def __init__(
        self, client: BareClient, transactional_id: str | None = "copy", *, is_newer: bool = True
    ) -> None:
        self.client = client
        self.transactional_id = transactional_id
        self.is_newer = is_newer
        self.producer_id = -1
        self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}

    # Beginning

    def begin_init(self, version: int = 5, **fields: Any) -> int:
        asked = {"transactional_id": self.transactional_id, "transaction_timeout": 60_000}
        if version >= 3:
            asked |= {"producer_id": -1, "producer_epoch": -1}
        return self.client.begin(INIT_PRODUCER_ID, version, **(asked | fields))

    def init(self, version: int = 5, **fields: Any) -> ErrorCode:
        """Comes again while it is told to, as clients do; the last answer."""
        for _ in range(3):
            answer = self._wait(self.begin_init(version, **fields))
            if answer.error_code is not ErrorCode.concurrent_transactions:
                break
        if answer.error_code is ErrorCode.none:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            self.sequences.clear()
        return ErrorCode(answer.error_code)

    # Writing

    def batch(self, topic: str, partition: int, *values: bytes, **header: Any) -> bytes:
        sequence = self.sequences.get((topic, partition), 0)
        self.sequences[topic, partition] = sequence + len(values)
        fields = {
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
            "base_sequence": sequence,
            "is_transactional": True,
        }
        return build_batch(
            [Record(index, 0, None, value) for index, value in enumerate(values)],
            base_timestamp=1_700_000_000_000,
            **(fields | header),
        )

    def begin_produce(
        self, batches: Mapping[tuple[str, int], bytes], *, version: int | None = None, acks: int = -1
    ) -> int:
        if version is None:
            version = 12 if self.is_newer else 11
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, partition), batch in batches.items():
            topics.setdefault(topic, []).append({"index": partition, "records": batch})
        return self.client.begin(
            PRODUCE,
            version,
            transactional_id=self.transactional_id,
            acks=acks,
            timeout=30_000,
            topic_data=[{"name": topic, "partition_data": data} for topic, data in topics.items()],
        )

    def produced(self, correlation_id: int) -> list[ErrorCode]:
        """The outcome of each batch of a produce request that has been answered."""
        answer = self.client.answer(correlation_id)
        return [
            ErrorCode(partition.error_code)
            for topic in answer.responses
            for partition in topic.partition_responses
        ]

    def produce(self, topic: str, partition: int, *values: bytes, version: int | None = None) -> ErrorCode:
        if not self.is_newer:
            code = self.add_partitions((topic, partition))
            if code is not ErrorCode.none:
                return code
        batch = self.batch(topic, partition, *values)
        correlation_id = self.begin_produce({(topic, partition): batch}, version=version)
        self.client.node.settle()
        (code,) = self.produced(correlation_id)
        return code

    def begin_add_partitions(self, *partitions: tuple[str, int], version: int = 3) -> int:
        topics: dict[str, list[int]] = {}
        for topic, partition in partitions:
            topics.setdefault(topic, []).append(partition)
        return self.client.begin(
            ADD_PARTITIONS_TO_TXN,
            version,
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[{"name": name, "partitions": ids} for name, ids in topics.items()],
        )

    def add_partitions(self, *partitions: tuple[str, int], version: int = 3) -> ErrorCode:
        """The one outcome that all partitions have."""
        answer = self._wait(self.begin_add_partitions(*partitions, version=version))
        codes = {
            ErrorCode(result.partition_error_code)
            for topic in answer.results_by_topic_v3_and_below
            for result in topic.results_by_partition
        }
        (code,) = codes
        return code

    # Committed offsets

    def add_offsets(self, group: str, version: int = 4) -> ErrorCode:
        answer = self._wait(
            self.client.begin(
                ADD_OFFSETS_TO_TXN,
                version,
                transactional_id=self.transactional_id,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                group_id=group,
            )
        )
        return ErrorCode(answer.error_code)

    def begin_commit_offset(
        self,
        group: str,
        topic: str,
        partition: int,
        offset: int,
        *,
        version: int | None = None,
        **fields: Any,
    ) -> int:
        position = {"partition_index": partition, "committed_offset": offset, "committed_metadata": ""}
        return self.client.begin(
            TXN_OFFSET_COMMIT,
            version if version is not None else 5 if self.is_newer else 4,
            transactional_id=self.transactional_id,
            group_id=group,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            topics=[{"name": topic, "partitions": [position]}],
            **fields,
        )

    def commit_offset(self, group: str, topic: str, partition: int, offset: int, **fields: Any) -> ErrorCode:
        if not self.is_newer:
            code = self.add_offsets(group)
            if code is not ErrorCode.none:
                return code
        answer = self._wait(self.begin_commit_offset(group, topic, partition, offset, **fields))
        return ErrorCode(answer.topics[0].partitions[0].error_code)

    # Ending

    def begin_end(self, *, is_commit: bool, version: int | None = None) -> int:
        return self.client.begin(
            END_TXN,
            version if version is not None else 5 if self.is_newer else 4,
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=is_commit,
        )

    def ended(self, correlation_id: int) -> ErrorCode:
        """Take note of the answer to an end."""
        answer = self.client.answer(correlation_id)
        if answer.error_code is ErrorCode.none and self.is_newer:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            self.sequences.clear()
        return ErrorCode(answer.error_code)

    def end(self, *, is_commit: bool, version: int | None = None) -> ErrorCode:
        correlation_id = self.begin_end(is_commit=is_commit, version=version)
        self.client.node.settle()
        return self.ended(correlation_id)

    def _wait(self, correlation_id: int) -> Any:
        self.client.node.settle()
        return self.client.answer(correlation_id)


# Looking


def read_topic(
    client: BareClient, topic: str, partition: int = 0, *, is_committed: bool = True
) -> list[Shown]:
    """Everything a reader sees of a partition."""

    def fetch(offset: int) -> tuple[bytes, list[tuple[int, int]] | None]:
        wanted = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
        answer = client.ask(
            FETCH,
            12,
            isolation_level=int(is_committed),
            max_wait=0,
            min_bytes=0,
            max_bytes=1 << 20,
            session_epoch=-1,
            topics=[{"topic": topic, "partitions": [wanted]}],
        )
        (found,) = answer.responses[0].partitions
        aborted = [(entry.producer_id, entry.first_offset) for entry in found.aborted_transactions or ()]
        return bytes(found.records or b""), aborted if is_committed else None

    return read_through(fetch, 0)


def committed_values(client: BareClient, topic: str, partition: int = 0) -> list[bytes | None]:
    return [shown.value for shown in read_topic(client, topic, partition)]


def committed_offset_of(client: BareClient, group: str, topic: str, partition: int = 0) -> int:
    """A group's committed offset; -1 when it has none."""
    asked = {"group_id": group, "topics": [{"name": topic, "partition_indexes": [partition]}]}
    answer = client.ask(OFFSET_FETCH, 9, groups=[asked], require_stable=False)
    return int(answer.groups[0].topics[0].partitions[0].committed_offset)


def described(client: BareClient, transactional_id: str) -> Any:
    """What DescribeTransactions tells of one transactional id."""
    (state,) = client.ask(DESCRIBE_TRANSACTIONS, 0, transactional_ids=[transactional_id]).transaction_states
    return state
