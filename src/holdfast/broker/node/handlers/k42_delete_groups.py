"""DeleteGroups (42), versions 0 to 2: forget groups without members, with their positions."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import append_error
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.services import GroupServices
from holdfast.broker.node.shard import Shard
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    shards: list[Shard] = []
    outcomes = {
        group_id: _delete(node, group_id, shards, now) for group_id in dict.fromkeys(request.groups_names)
    }

    def refusal(code: ErrorCode) -> Fields:
        return _fields(dict.fromkeys(outcomes, code))

    return answer_all(shards, _fields(outcomes), refusal)


def _delete(node: GroupServices, group_id: str, shards: list[Shard], now: Now) -> ErrorCode:
    try:
        shard, machine = node.groups.find(group_id, now)
        shards.append(shard)
        machine.delete(group_id, now)
    except ApiError as error:
        return append_error(error)
    return ErrorCode.none


def _fields(outcomes: dict[str, ErrorCode]) -> Fields:
    return {
        "throttle_time": 0,
        "results": [{"group_id": group_id, "error_code": code} for group_id, code in outcomes.items()],
    }
