"""DescribeAcls (29), versions 1 to 3: there are none, since authorisation is off: every principal may do everything."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    return {
        "throttle_time": 0,
        "error_code": ErrorCode.security_disabled,
        "error_message": "this broker has no authorizer, so it keeps no access control lists",
        "resources": [],
    }
