"""DescribeGroups (15), versions 0 to 6: classic groups and their members.

A group that is not there is Dead; from version 6 on it is GROUP_ID_NOT_FOUND, with a message, as well.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import ClassicDescription
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.coordinator_partition import CoordinatorPartition
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.handlers.groups import group_operations
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

NOT_FOUND_FROM: Final = 6


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    operations = group_operations(getattr(request, "include_authorized_operations", False))
    journals: list[CoordinatorPartition] = []
    groups = [_group(node, context, group_id, operations, journals, now) for group_id in request.groups]

    def refusal(code: ErrorCode) -> Fields:
        return {
            "throttle_time": 0,
            "groups": [_failed(group_id, ApiError(code)) for group_id in request.groups],
        }

    return answer_all(journals, {"throttle_time": 0, "groups": groups}, refusal)


def _group(
    node: GroupServices,
    context: RequestContext,
    group_id: str,
    operations: int,
    journals: list[CoordinatorPartition],
    now: Now,
) -> Fields:
    try:
        journal, machine = node.groups.find(group_id, now)
        journals.append(journal)
        described = machine.describe(group_id)
    except ApiError as error:
        if error.code is not ErrorCode.group_id_not_found:
            return _failed(group_id, error)
        if context.version >= NOT_FOUND_FROM:
            return {**_failed(group_id, error), "group_state": "Dead"}
        described = ClassicDescription(group_id, "Dead", "", "", ())
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "group_id": group_id,
        "group_state": described.state,
        "protocol_type": described.protocol_type,
        "protocol_data": described.protocol,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.group_instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "member_metadata": member.metadata,
                "member_assignment": member.assignment,
            }
            for member in described.members
        ],
        "authorized_operations": operations,
    }


def _failed(group_id: str, error: ApiError) -> Fields:
    return {
        "error_code": error.code,
        "error_message": error.message,
        "group_id": group_id,
        "authorized_operations": group_operations(False),
    }
