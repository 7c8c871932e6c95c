"""LeaveGroup (13), versions 0 to 5: members go; from version 3 on several at once, static ones by their instance."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import LeaveReply, LeaveRequest, LeavingMember, append_error
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

SEVERAL_FROM: Final = 3


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    if not request.group_id:
        return _refusal(ErrorCode.invalid_group_id)
    if context.version >= SEVERAL_FROM:
        members = tuple(
            LeavingMember(member.member_id, member.group_instance_id, getattr(member, "reason", None))
            for member in request.members
        )
    else:
        members = (LeavingMember(request.member_id, None),)
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return _refusal(error.code)
    try:
        fields = _fields(machine.leave(LeaveRequest(request.group_id, members), now), context.version)
    except ApiError as error:
        fields = _refusal(append_error(error))
    return journal.answer(fields, _refusal)


def _refusal(code: ErrorCode) -> Fields:
    return {"throttle_time": 0, "error_code": code}


def _fields(reply: LeaveReply, version: int) -> Fields:
    error = reply.error
    if version < SEVERAL_FROM and reply.members:
        ((_, error),) = reply.members
    return {
        "throttle_time": 0,
        "error_code": error,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.group_instance_id,
                "error_code": outcome,
            }
            for member, outcome in reply.members
        ],
    }
