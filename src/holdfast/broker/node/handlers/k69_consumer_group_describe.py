"""ConsumerGroupDescribe (69), versions 0 and 1: groups of the consumer protocol, their members, what each has and
shall have. Version 1 tells members of the classic protocol from those of the consumer protocol."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.consumer_model import ConsumerMemberDescription, NamedPartitions
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.coordinator_partition import CoordinatorPartition
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.handlers.groups import group_operations
from holdfast.broker.node.handlers.k68_consumer_group_heartbeat import PROTOCOL
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

CLASSIC_MEMBER, CONSUMER_MEMBER = 0, 1
NOT_ASKED: Final = group_operations(False)


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    def refusal(code: ErrorCode) -> Fields:
        failed = [_failed(group_id, ApiError(code)) for group_id in request.group_ids]
        return {"throttle_time": 0, "groups": failed}

    if PROTOCOL not in node.settings.broker.group_coordinator_rebalance_protocols:
        return refusal(ErrorCode.unsupported_version)
    operations = group_operations(request.include_authorized_operations)
    journals: list[CoordinatorPartition] = []
    groups = [_group(node, group_id, operations, journals, now) for group_id in request.group_ids]
    return answer_all(journals, {"throttle_time": 0, "groups": groups}, refusal)


def _group(
    node: GroupServices, group_id: str, operations: int, journals: list[CoordinatorPartition], now: Now
) -> Fields:
    try:
        if not group_id:
            raise ApiError(ErrorCode.invalid_group_id)
        journal, machine = node.groups.find(group_id, now)
        journals.append(journal)
        group = machine.consumer_groups.describe(group_id)
    except ApiError as error:
        return _failed(group_id, error)
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "group_id": group_id,
        "group_state": group.state,
        "group_epoch": group.epoch,
        "assignment_epoch": group.assignment_epoch,
        "assignor_name": group.assignor,
        "members": [_member(member) for member in group.members],
        "authorized_operations": operations,
    }


def _member(member: ConsumerMemberDescription) -> Fields:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.member_epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": list(member.topic_names),
        "subscribed_topic_regex": member.topic_regex or "",
        "assignment": _assignment(member.assignment),
        "target_assignment": _assignment(member.target),
        "member_type": CLASSIC_MEMBER if member.is_classic else CONSUMER_MEMBER,
    }


def _assignment(partitions: tuple[NamedPartitions, ...]) -> Fields:
    return {
        "topic_partitions": [
            {"topic_id": each.topic_id, "topic_name": each.topic_name, "partitions": list(each.partitions)}
            for each in partitions
        ]
    }


def _failed(group_id: str, error: ApiError) -> Fields:
    return {
        "error_code": error.code,
        "error_message": error.message,
        "group_id": group_id,
        "group_state": "",
        "group_epoch": 0,
        "assignment_epoch": 0,
        "assignor_name": "",
        "members": [],
        "authorized_operations": NOT_ASKED,
    }
