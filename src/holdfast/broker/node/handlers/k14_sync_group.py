"""SyncGroup (14), versions 0 to 5: a member asks for its part of the work; the leader brings everybody's.

Parked until the leader's has come and is recorded. From version 5 on a member names the protocol it has agreed to.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import SyncReply, SyncRequest
from holdfast.broker.node.context import Answer, Fields, Later, RequestContext
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

PROTOCOL_NAMED_FROM: Final = 5


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    if context.version >= PROTOCOL_NAMED_FROM and not (request.protocol_type and request.protocol_name):
        return _refusal(ErrorCode.inconsistent_group_protocol)
    if not request.group_id:
        return _refusal(ErrorCode.invalid_group_id)
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return _refusal(error.code)
    later = Later()
    machine.sync(
        SyncRequest(
            request.group_id,
            request.generation_id,
            request.member_id,
            getattr(request, "group_instance_id", None),
            getattr(request, "protocol_type", None),
            getattr(request, "protocol_name", None),
            tuple((given.member_id, bytes(given.assignment)) for given in request.assignments),
        ),
        later.step(lambda reply: journal.release(later, _fields(reply), _refusal)),
        now,
    )
    return later


def _refusal(code: ErrorCode) -> Fields:
    return _fields(SyncReply(code))


def _fields(reply: SyncReply) -> Fields:
    return {
        "throttle_time": 0,
        "error_code": reply.error,
        "protocol_type": reply.protocol_type,
        "protocol_name": reply.protocol_name,
        "assignment": reply.assignment,
    }
