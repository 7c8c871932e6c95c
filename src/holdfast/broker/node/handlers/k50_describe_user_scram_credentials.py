"""DescribeUserScramCredentials (50), version 0: no user has any.

Null or an empty list asks for every user.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    times = Counter(user.name for user in request.users or ())
    return {
        "throttle_time": 0,
        "error_code": ErrorCode.none,
        "error_message": "",
        "results": [_one(user, count) for user, count in times.items()],
    }


def _one(user: str, count: int) -> Fields:
    if count > 1:
        code, message = ErrorCode.duplicate_resource, f"user {user!r} is named more than once in the request"
    else:
        code, message = ErrorCode.resource_not_found, f"user {user!r} has no SCRAM credentials"
    return {"user": user, "error_code": code, "error_message": message, "credential_infos": []}
