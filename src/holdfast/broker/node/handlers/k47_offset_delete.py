"""OffsetDelete (47), version 0: forget committed offsets in topics that the group does not read."""

from __future__ import annotations

from typing import Any, TypeAlias

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import append_error
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

Outcomes: TypeAlias = dict[tuple[str, int], ErrorCode]


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    if not request.group_id:
        return _refusal(ErrorCode.invalid_group_id)
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
        return _refusal(error.code)
    try:
        deleted = machine.delete_offsets(request.group_id, known, now)
    except ApiError as error:
        return journal.answer(_refusal(append_error(error)), _refusal)
    return journal.answer(_fields(request, refused, deleted), _refusal)


def _fields(request: Any, refused: Outcomes, deleted: Outcomes) -> Fields:
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
    return {"error_code": ErrorCode.none, "throttle_time": 0, "topics": topics}


def _refusal(code: ErrorCode) -> Fields:
    return {"error_code": code, "throttle_time": 0, "topics": []}
