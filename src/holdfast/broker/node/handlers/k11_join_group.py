"""JoinGroup (11), versions 0 to 9: take part in the next generation of a classic group.

Parked until everybody the group waits for has joined, too. From version 4 on a dynamic member is first given an id
(MEMBER_ID_REQUIRED) and joins with it; from 5 on it may be static; from 9 on a leader may be told to assign nothing.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import JoinReply, JoinRequest, MemberProtocol
from holdfast.broker.node.context import Answer, Fields, Later, RequestContext
from holdfast.broker.node.handlers.groups import client_host, milliseconds
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

MEMBER_ID_FIRST_FROM: Final = 4
NULLABLE_PROTOCOL_FROM: Final = 7
SKIP_ASSIGNMENT_FROM: Final = 9


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    version = context.version

    def refusal(code: ErrorCode) -> Fields:
        return _fields(JoinReply(code, request.member_id), version)

    if not request.group_id:
        return refusal(ErrorCode.invalid_group_id)
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return refusal(error.code)
    session_timeout_ms = milliseconds(request.session_timeout)
    rebalance_timeout = getattr(request, "rebalance_timeout", None)
    later = Later()
    machine.join(
        JoinRequest(
            request.group_id,
            request.member_id,
            getattr(request, "group_instance_id", None),
            context.session.client_id or "",
            client_host(context),
            session_timeout_ms,
            session_timeout_ms if rebalance_timeout is None else milliseconds(rebalance_timeout),
            request.protocol_type,
            tuple(MemberProtocol(protocol.name, bytes(protocol.metadata)) for protocol in request.protocols),
            version >= MEMBER_ID_FIRST_FROM,
            version >= SKIP_ASSIGNMENT_FROM,
            getattr(request, "reason", None),
        ),
        later.step(lambda reply: journal.release(later, _fields(reply, version), refusal)),
        now,
    )
    return later


def _fields(reply: JoinReply, version: int) -> Fields:
    return {
        "throttle_time": 0,
        "error_code": reply.error,
        "generation_id": reply.generation,
        "protocol_type": reply.protocol_type,
        "protocol_name": reply.protocol_name
        if version >= NULLABLE_PROTOCOL_FROM
        else reply.protocol_name or "",
        "leader": reply.leader,
        "skip_assignment": reply.skip_assignment,
        "member_id": reply.member_id,
        "members": [
            {"member_id": member_id, "group_instance_id": group_instance_id, "metadata": metadata}
            for member_id, group_instance_id, metadata in reply.members
        ],
    }
