"""DeleteGroups (42), versions 0 to 2: forget groups without members, with their committed offsets."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import append_error
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.coordinator_partition import CoordinatorPartition
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    journals: list[CoordinatorPartition] = []
    outcomes = {
        group_id: _delete(node, group_id, journals, now) for group_id in dict.fromkeys(request.groups_names)
    }

    def refusal(code: ErrorCode) -> Fields:
        return _fields(dict.fromkeys(outcomes, code))

    return answer_all(journals, _fields(outcomes), refusal)


def _delete(node: GroupServices, group_id: str, journals: list[CoordinatorPartition], now: Now) -> ErrorCode:
    try:
        journal, machine = node.groups.find(group_id, now)
        journals.append(journal)
        machine.delete(group_id, now)
    except ApiError as error:
        return append_error(error)
    return ErrorCode.none


def _fields(outcomes: dict[str, ErrorCode]) -> Fields:
    return {
        "throttle_time": 0,
        "results": [{"group_id": group_id, "error_code": code} for group_id, code in outcomes.items()],
    }
