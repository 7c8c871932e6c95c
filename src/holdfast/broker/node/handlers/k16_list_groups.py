"""ListGroups (16), versions 0 to 5: every group, or those in some states (from version 4) and of some types (5)."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import GroupType
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.services import GroupServices
from holdfast.seams import Now


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    states = {state.strip().lower() for state in getattr(request, "states_filter", ())}
    wanted = {name.strip().lower() for name in getattr(request, "types_filter", ())}
    types = {kind for kind in GroupType if kind.value.lower() in wanted}
    coordinators = list(node.groups)
    groups: list[Fields] = []
    if types or not wanted:
        groups = [
            {
                "group_id": group.group_id,
                "protocol_type": group.protocol_type,
                "group_state": group.state,
                "group_type": group.type.value,
            }
            for _, machine in coordinators
            for group in machine.list(states, types)
        ]
    answer: Fields = {"throttle_time": 0, "error_code": ErrorCode.none, "groups": groups}
    return answer_all([journal for journal, _ in coordinators], answer, _refusal)


def _refusal(code: ErrorCode) -> Fields:
    return {"throttle_time": 0, "error_code": code, "groups": []}
