"""What the handlers of groups share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import NO_TOPIC_ID, CommitReply, PartitionCommit, TopicCommit
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.handlers.administration import DELETE, DESCRIBE, OPERATIONS_NOT_ASKED, READ
from holdfast.broker.node.services import GroupServices

_MS: Final = timedelta(milliseconds=1)
DESCRIBE_CONFIGS, ALTER_CONFIGS = 10, 11
GROUP_OPERATIONS: Final = sum(
    1 << operation for operation in (READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS)
)


def milliseconds(duration: timedelta) -> int:
    return duration // _MS


def client_host(context: RequestContext) -> str:
    """As Kafka writes an address without a name."""
    host, _, _ = context.session.address.rpartition(":")
    return "/" + host.strip("[]")


def group_operations(asked: bool) -> int:
    return GROUP_OPERATIONS if asked else OPERATIONS_NOT_ASKED


class Committing(NamedTuple):
    """The topics of a commit request, told apart before a group is asked."""

    topics: tuple[TopicCommit, ...]
    """What exists."""
    refused: dict[tuple[str | UUID, int], ErrorCode]
    """What does not, by the name or id the client used."""


def known_topics(node: GroupServices, topics: Any, *, by_id: bool) -> Committing:
    """Look up what a commit names. `topics` are entities of OffsetCommit or TxnOffsetCommit."""
    known: list[TopicCommit] = []
    refused: dict[tuple[str | UUID, int], ErrorCode] = {}
    for topic in topics:
        if by_id:
            given: str | UUID = topic.topic_id or NO_TOPIC_ID
            facts = node.groups.topics.by_id(topic.topic_id or NO_TOPIC_ID)
            missing = ErrorCode.unknown_topic_id
        else:
            given = topic.name
            facts = node.groups.topics.by_name(topic.name)
            missing = ErrorCode.unknown_topic_or_partition
        commits = []
        for partition in topic.partitions:
            index = partition.partition_index
            if facts is None:
                refused[given, index] = missing
            elif not 0 <= index < facts.partitions:
                refused[given, index] = ErrorCode.unknown_topic_or_partition
            else:
                commits.append(
                    PartitionCommit(
                        index,
                        partition.committed_offset,
                        getattr(partition, "committed_leader_epoch", -1),
                        partition.committed_metadata,
                    )
                )
        if commits and facts is not None:
            known.append(TopicCommit(facts.name, facts.topic_id, tuple(commits)))
    return Committing(tuple(known), refused)


def commit_fields(
    node: GroupServices,
    request: Any,
    refused: dict[tuple[str | UUID, int], ErrorCode],
    reply: CommitReply | ErrorCode,
) -> Fields:
    """One error for all that exists, or one for each partition; what does not exist comes first, as in Kafka."""
    topics: list[tuple[bool, Fields]] = []
    for topic in request.topics:
        topic_id = getattr(topic, "topic_id", None)
        given: str | UUID = topic.name if hasattr(topic, "name") else topic_id or NO_TOPIC_ID
        name = given if isinstance(given, str) else node.partitions.topic_name(given)
        wrong: list[Fields] = []
        right: list[Fields] = []
        for partition in topic.partitions:
            index = partition.partition_index
            error = refused.get((given, index))
            if error is not None:
                wrong.append({"partition_index": index, "error_code": error})
            else:
                error = reply if isinstance(reply, ErrorCode) else reply[name or "", index]
                right.append({"partition_index": index, "error_code": error})
        if wrong or right:
            fields = {"name": name or "", "topic_id": topic_id, "partitions": wrong + right}
            topics.append((not wrong, fields))
    if refused:
        topics.sort(key=lambda entry: entry[0])
    return {"throttle_time": 0, "topics": [fields for _, fields in topics]}
