"""Heartbeat (12), versions 0 to 4: a member of a classic group is alive, and learns whether to join again.

The request a broker with many members gets most often: the answers are the same dictionaries over and over.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import HeartbeatRequest
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    group_id = request.group_id
    if not group_id:
        return _fields(ErrorCode.invalid_group_id)
    try:
        journal, machine = node.groups.find(group_id, now)
    except ApiError as error:
        return _fields(error.code)
    instance_id = request.group_instance_id if context.version >= 3 else None
    outcome = machine.heartbeat(
        HeartbeatRequest(group_id, request.generation_id, request.member_id, instance_id), now
    )
    return journal.answer(_fields(outcome), _fields)


def _fields(code: ErrorCode) -> Fields:
    return {"throttle_time": 0, "error_code": code}
