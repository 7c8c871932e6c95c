"""DescribeClientQuotas (48), versions 0 and 1: no client has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from holdfast.node.context import Fields, RequestContext
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.node.node import Node

ENTITY_TYPES: Final = frozenset({"user", "client-id", "ip"})


def handle(node: Node, context: RequestContext, request: Any, now: Now) -> Fields:
    strange = sorted({component.entity_type for component in request.components} - ENTITY_TYPES)
    if strange:
        return {
            "throttle_time": 0,
            "error_code": ErrorCode.unsupported_version,
            "error_message": f"quotas belong to {', '.join(sorted(ENTITY_TYPES))}, not to {strange[0]!r}",
            "entries": None,
        }
    return {"throttle_time": 0, "error_code": ErrorCode.none, "error_message": "", "entries": []}
