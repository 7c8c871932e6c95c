"""OffsetFetch (9), versions 1 to 10: the committed offsets of groups.

One group up to version 7, several from 8 on; all committed offsets when no topics are named (from 2 on); those that no
transaction is about to change when `require_stable` is set (from 7 on); topics by id from 10 on.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.coordinator import FetchedOffset, GroupCoordinator
from holdfast.broker.groups.model import NO_TOPIC_ID
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.coordinator_partition import CoordinatorPartition
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

TOP_LEVEL_ERROR_FROM: Final = 2
SEVERAL_FROM: Final = 8
TOPIC_IDS_FROM: Final = 10


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    require_stable = getattr(request, "require_stable", False)
    journals: list[CoordinatorPartition] = []
    asked = request.groups if context.version >= SEVERAL_FROM else [request]
    groups = [_group(node, context, group, require_stable, journals, now) for group in asked]

    def refusal(code: ErrorCode) -> Fields:
        return _fields(context, asked, [_failed(group, code) for group in asked])

    return answer_all(journals, _fields(context, asked, groups), refusal)


def _fields(context: RequestContext, asked: Any, groups: list[Fields]) -> Fields:
    if context.version >= SEVERAL_FROM:
        return {"throttle_time": 0, "groups": groups}
    (group,) = groups
    if context.version < TOP_LEVEL_ERROR_FROM and group["error_code"]:
        # The oldest version has no place for an error but the partitions.
        nowhere = FetchedOffset(group["error_code"], None)
        group["topics"] = [
            {
                "name": topic.name,
                "partitions": [_partition(index, nowhere) for index in topic.partition_indexes],
            }
            for topic in asked[0].topics
        ]
    return {
        "throttle_time": 0,
        "error_code": group["error_code"],
        "topics": group["topics"],
    }


def _failed(group: Any, code: ErrorCode) -> Fields:
    return {"group_id": group.group_id, "error_code": code, "topics": []}


def _group(
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
        return _failed(group, error.code)
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
        topic_id = NO_TOPIC_ID if facts is None else facts.topic_id
        partitions = [
            _partition(index, machine.committed(group_id, name, index, require_stable=require_stable))
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
        topic_id: UUID = topic.topic_id or NO_TOPIC_ID
        name = node.partitions.topic_name(topic_id)
        if name is None:
            unknown = FetchedOffset(ErrorCode.unknown_topic_id, None)
            partitions = [_partition(index, unknown) for index in topic.partition_indexes]
            return {"topic_id": topic_id, "partitions": partitions}
    else:
        name = topic.name
        facts = node.groups.topics.by_name(name)
        topic_id = NO_TOPIC_ID if facts is None else facts.topic_id
    partitions = []
    for index in topic.partition_indexes:
        fetched = machine.committed(group_id, name, index, require_stable=require_stable)
        if fetched.committed is not None and _differ(fetched.committed.topic_id, topic_id):
            fetched = FetchedOffset(ErrorCode.none, None)
        partitions.append(_partition(index, fetched))
    return {**_named(context, name, topic_id), "partitions": partitions}


def _named(context: RequestContext, name: str, topic_id: UUID) -> Fields:
    return {"topic_id": topic_id} if context.version >= TOPIC_IDS_FROM else {"name": name}


def _differ(committed_for: UUID, asked: UUID) -> bool:
    """Whether a committed offset is that of another topic which had this name before."""
    return committed_for != asked and NO_TOPIC_ID not in (committed_for, asked)


def _partition(index: int, fetched: FetchedOffset) -> Fields:
    committed = fetched.committed
    return {
        "partition_index": index,
        "committed_offset": -1 if committed is None else committed.offset,
        "committed_leader_epoch": -1 if committed is None else committed.leader_epoch,
        "metadata": "" if committed is None else committed.metadata,
        "error_code": fetched.error,
    }
