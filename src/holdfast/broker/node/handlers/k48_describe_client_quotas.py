"""DescribeClientQuotas (48), versions 0 and 1: no client has one."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now

ENTITY_TYPES: Final = frozenset({"user", "client-id", "ip"})
EXACT: Final = 0
MATCHES: Final = (EXACT, 1, 2)
"""An exact name, the default, any."""


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    refusal = _refusal(request.components)
    if refusal is not None:
        code, message = refusal
        return {"throttle_time": 0, "error_code": code, "error_message": message, "entries": None}
    return {"throttle_time": 0, "error_code": ErrorCode.none, "error_message": "", "entries": []}


def _refusal(components: Any) -> tuple[ErrorCode, str] | None:
    seen: set[str] = set()
    for component in components:
        kind, match = component.entity_type, component.match
        if kind not in ENTITY_TYPES:
            kinds = ", ".join(sorted(ENTITY_TYPES))
            return ErrorCode.unsupported_version, f"quotas belong to {kinds}, not to {kind!r}"
        if kind in seen:
            return ErrorCode.invalid_request, f"{kind!r} is asked for twice"
        seen.add(kind)
        if component.match_type not in MATCHES:
            return ErrorCode.invalid_request, f"no way to match has the number {component.match_type}"
        if (match is None) == (component.match_type == EXACT):
            return ErrorCode.invalid_request, "an exact match, and no other, names what it matches"
    return None
