"""Requests that commit, fetch and delete the offsets of consumer groups."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import model
from holdfast.broker.groups.coordinator import FetchedOffset, GroupCoordinator
from holdfast.broker.groups.offsets import DEFAULT_RETENTION
from holdfast.broker.node.context import Answer, Fields, Later, RequestContext
from holdfast.broker.node.coordination import CoordinatorPartition
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.services import GroupServices
from holdfast.broker.transactions.coordinator import Refusals
from holdfast.broker.transactions.model import NEWER_PROTOCOL, OLDER_PROTOCOL, AddPartitions, ProducerIdentity
from holdfast.errors import ApiError
from holdfast.seams import Now


class Committing(NamedTuple):
    """The topics of a commit request, told apart before a group is asked."""

    topics: tuple[model.TopicCommit, ...]
    """What exists."""
    refused: dict[tuple[str | UUID, int], ErrorCode]
    """What does not, by the name or id the client used."""


def known_topics(node: GroupServices, topics: Any, *, by_id: bool) -> Committing:
    """Look up what a commit names. `topics` are entities of OffsetCommit or TxnOffsetCommit."""
    known: list[model.TopicCommit] = []
    refused: dict[tuple[str | UUID, int], ErrorCode] = {}
    for topic in topics:
        if by_id:
            given: str | UUID = topic.topic_id or model.NO_TOPIC_ID
            facts = node.groups.topics.by_id(topic.topic_id or model.NO_TOPIC_ID)
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
                    model.PartitionCommit(
                        index,
                        partition.committed_offset,
                        getattr(partition, "committed_leader_epoch", -1),
                        partition.committed_metadata,
                    )
                )
        if commits and facts is not None:
            known.append(model.TopicCommit(facts.name, facts.topic_id, tuple(commits)))
    return Committing(tuple(known), refused)


def commit_fields(
    node: GroupServices,
    request: Any,
    refused: dict[tuple[str | UUID, int], ErrorCode],
    reply: model.CommitReply | ErrorCode,
) -> Fields:
    """One error for all that exists, or one for each partition; what does not exist comes first, as in Kafka."""
    topics: list[tuple[bool, Fields]] = []
    for topic in request.topics:
        topic_id = getattr(topic, "topic_id", None)
        given: str | UUID = topic.name if hasattr(topic, "name") else topic_id or model.NO_TOPIC_ID
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
    return {"topics": [fields for _, fields in topics]}


TOPIC_IDS_FROM: Final = 10


def offset_commit(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """OffsetCommit (8), versions 2 to 10: commit offsets; from version 10 on topics are named by id.

    Versions 2 to 4 may carry a retention time of their own.
    """
    known, refused = known_topics(node, request.topics, by_id=context.version >= TOPIC_IDS_FROM)

    def fields(reply: model.CommitReply | ErrorCode) -> Fields:
        return commit_fields(node, request, refused, reply)

    if not known:
        return fields({})
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return fields(error.code)
    reply: model.CommitReply | ErrorCode
    try:
        reply = machine.commit(
            model.CommitRequest(
                request.group_id,
                request.member_id,
                getattr(request, "group_instance_id", None),
                request.generation_id_or_member_epoch,
                known,
                getattr(request, "retention_time", DEFAULT_RETENTION),
                context.version,
            ),
            now,
        )
    except ApiError as error:
        reply = model.append_error(error)
    return journal.answer(fields(reply), fields)


ABORTABLE_VERSION: Final = 4
"""Clients from here on know TRANSACTION_ABORTABLE."""
ADDING_VERSION: Final = 5


def txn_offset_commit(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """TxnOffsetCommit (28), versions 0 to 5: offsets of a group that count once the transaction is committed.

    The partition of `__consumer_offsets` that holds the group is part of the transaction like any other. From
    version 5 on it is added to the transaction here (KIP-890); older clients have added it with AddOffsetsToTxn,
    which is verified.
    """
    topics = known_topics(node, request.topics, by_id=False)

    def fields(reply: model.CommitReply | ErrorCode) -> Fields:
        return commit_fields(node, request, topics.refused, reply)

    if not topics.topics:
        return fields({})
    if not request.group_id:
        return fields(ErrorCode.invalid_group_id)
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return fields(error.code)
    hosted = journal.hosted
    offsets_partition = (hosted.topic, hosted.index)
    producer = ProducerIdentity(request.producer_id, request.producer_epoch)
    later = Later()

    def commit() -> model.CommitReply:
        return machine.commit_in_transaction(
            model.TransactionalCommit(
                request.group_id,
                getattr(request, "member_id", ""),
                getattr(request, "group_instance_id", None),
                getattr(request, "generation_id", -1),
                topics.topics,
                *producer,
                context.version,
            ),
            now,
        )

    def added(refusals: Refusals) -> None:
        # Meanwhile topics may have gone, or been recreated.
        nonlocal topics
        topics = known_topics(node, request.topics, by_id=False)
        go_on(refusals)

    def go_on(refusals: Refusals) -> None:
        try:
            if offsets_partition in refusals:
                raise ApiError(_commit_error(refusals[offsets_partition], context.version))
            reply: model.CommitReply | ErrorCode = commit()
        except ApiError as error:
            reply = error.code
        journal.release(later, fields(reply), fields)

    if hosted.log.producers.has_transaction(*producer):
        go_on({})
        return later
    is_newer = context.version >= ADDING_VERSION
    addition = AddPartitions(
        request.transactional_id,
        producer,
        frozenset((offsets_partition,)),
        NEWER_PROTOCOL if is_newer else OLDER_PROTOCOL,
    )
    if is_newer:
        node.transactions.add_before_write(addition, now, later.step(added))
    else:
        node.transactions.verify(addition, now, later.step(added))
    return later


def _commit_error(code: ErrorCode, version: int) -> ErrorCode:
    if code is ErrorCode.producer_fenced:
        return ErrorCode.invalid_producer_epoch
    if code is ErrorCode.transaction_abortable and version < ABORTABLE_VERSION:
        return ErrorCode.invalid_txn_state
    return code


TOP_LEVEL_ERROR_FROM: Final = 2
SEVERAL_FROM: Final = 8


def offset_fetch(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """OffsetFetch (9), versions 1 to 10: the committed offsets of groups.

    One group up to version 7, several from 8 on; all committed offsets when no topics are named (from 2 on); those
    that no transaction is about to change when `require_stable` is set (from 7 on); topics by id from 10 on.
    """
    require_stable = getattr(request, "require_stable", False)
    journals: list[CoordinatorPartition] = []
    asked = request.groups if context.version >= SEVERAL_FROM else [request]
    groups = [_fetched_group(node, context, group, require_stable, journals, now) for group in asked]

    def refusal(code: ErrorCode) -> Fields:
        return _fetched(context, asked, [_fetch_failed(group, code) for group in asked])

    return answer_all(journals, _fetched(context, asked, groups), refusal)


def _fetched(context: RequestContext, asked: Any, groups: list[Fields]) -> Fields:
    if context.version >= SEVERAL_FROM:
        return {"groups": groups}
    (group,) = groups
    if context.version < TOP_LEVEL_ERROR_FROM and group["error_code"]:
        # The oldest version has no place for an error but the partitions.
        nowhere = FetchedOffset(group["error_code"], None)
        group["topics"] = [
            {
                "name": topic.name,
                "partitions": [_fetched_partition(index, nowhere) for index in topic.partition_indexes],
            }
            for topic in asked[0].topics
        ]
    return {
        "error_code": group["error_code"],
        "topics": group["topics"],
    }


def _fetch_failed(group: Any, code: ErrorCode) -> Fields:
    return {"group_id": group.group_id, "error_code": code, "topics": []}


def _fetched_group(
    node: GroupServices,
    context: RequestContext,
    group: Any,
    require_stable: bool,
    journals: list[CoordinatorPartition],
    now: Now,
) -> Fields:
    try:
        journal, machine = node.groups.find(group.group_id, now)
        journals.append(journal)
        machine.check_offset_fetch(
            group.group_id, getattr(group, "member_id", None), getattr(group, "member_epoch", -1)
        )
    except ApiError as error:
        return _fetch_failed(group, error.code)
    if group.topics is None:
        topics = _all(node, context, machine, group.group_id, require_stable)
    else:
        topics = [
            _topic(node, context, machine, group.group_id, topic, require_stable) for topic in group.topics
        ]
    return {"group_id": group.group_id, "error_code": ErrorCode.none, "topics": topics}


def _all(
    node: GroupServices,
    context: RequestContext,
    machine: GroupCoordinator,
    group_id: str,
    require_stable: bool,
) -> list[Fields]:
    by_topic: dict[str, list[tuple[int, UUID]]] = {}
    for (topic, index), committed in machine.offsets.of_group(group_id).items():
        by_topic.setdefault(topic, []).append((index, committed.topic_id))
    topics: list[Fields] = []
    for name, found in by_topic.items():
        facts = node.groups.topics.by_name(name)
        topic_id = model.NO_TOPIC_ID if facts is None else facts.topic_id
        partitions = [
            _fetched_partition(index, machine.committed(group_id, name, index, require_stable=require_stable))
            for index, committed_for in found
            if not _differ(committed_for, topic_id)
        ]
        if partitions and (facts is not None or context.version < TOPIC_IDS_FROM):
            topics.append({**_named(context, name, topic_id), "partitions": partitions})
    return topics


def _topic(
    node: GroupServices,
    context: RequestContext,
    machine: GroupCoordinator,
    group_id: str,
    topic: Any,
    require_stable: bool,
) -> Fields:
    if context.version >= TOPIC_IDS_FROM:
        topic_id: UUID = topic.topic_id or model.NO_TOPIC_ID
        name = node.partitions.topic_name(topic_id)
        if name is None:
            unknown = FetchedOffset(ErrorCode.unknown_topic_id, None)
            partitions = [_fetched_partition(index, unknown) for index in topic.partition_indexes]
            return {"topic_id": topic_id, "partitions": partitions}
    else:
        name = topic.name
        facts = node.groups.topics.by_name(name)
        topic_id = model.NO_TOPIC_ID if facts is None else facts.topic_id
    partitions = []
    for index in topic.partition_indexes:
        fetched = machine.committed(group_id, name, index, require_stable=require_stable)
        if fetched.committed is not None and _differ(fetched.committed.topic_id, topic_id):
            fetched = FetchedOffset(ErrorCode.none, None)
        partitions.append(_fetched_partition(index, fetched))
    return {**_named(context, name, topic_id), "partitions": partitions}


def _named(context: RequestContext, name: str, topic_id: UUID) -> Fields:
    return {"topic_id": topic_id} if context.version >= TOPIC_IDS_FROM else {"name": name}


def _differ(committed_for: UUID, asked: UUID) -> bool:
    """Whether a committed offset is that of another topic which had this name before."""
    return committed_for != asked and model.NO_TOPIC_ID not in (committed_for, asked)


def _fetched_partition(index: int, fetched: FetchedOffset) -> Fields:
    committed = fetched.committed
    return {
        "partition_index": index,
        "committed_offset": -1 if committed is None else committed.offset,
        "committed_leader_epoch": -1 if committed is None else committed.leader_epoch,
        "metadata": "" if committed is None else committed.metadata,
        "error_code": fetched.error,
    }


Outcomes: TypeAlias = dict[tuple[str, int], ErrorCode]


def offset_delete(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """OffsetDelete (47), version 0: forget committed offsets in topics that the group does not read."""
    if not request.group_id:
        return _not_deleted(ErrorCode.invalid_group_id)
    refused: Outcomes = {}
    known: list[tuple[str, int]] = []
    for topic in request.topics:
        facts = node.groups.topics.by_name(topic.name)
        for partition in topic.partitions:
            place = (topic.name, partition.partition_index)
            if facts is None or not 0 <= partition.partition_index < facts.partitions:
                refused[place] = ErrorCode.unknown_topic_or_partition
            else:
                known.append(place)
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return _not_deleted(error.code)
    try:
        deleted = machine.delete_offsets(request.group_id, known, now)
    except ApiError as error:
        return journal.answer(_not_deleted(model.append_error(error)), _not_deleted)
    return journal.answer(_deleted(request, refused, deleted), _not_deleted)


def _deleted(request: Any, refused: Outcomes, deleted: Outcomes) -> Fields:
    """What does not exist comes first, and a topic without partitions is left out, as in Kafka."""
    topics: list[Fields] = []
    for topic in request.topics:
        indexes = [partition.partition_index for partition in topic.partitions]
        outcomes = [
            (index, refused[topic.name, index]) for index in indexes if (topic.name, index) in refused
        ]
        outcomes += [
            (index, deleted[topic.name, index]) for index in indexes if (topic.name, index) in deleted
        ]
        if outcomes:
            topics.append(
                {
                    "name": topic.name,
                    "partitions": [
                        {"partition_index": index, "error_code": code} for index, code in outcomes
                    ],
                }
            )
    return {"error_code": ErrorCode.none, "topics": topics}


def _not_deleted(code: ErrorCode) -> Fields:
    return {"error_code": code, "topics": []}
