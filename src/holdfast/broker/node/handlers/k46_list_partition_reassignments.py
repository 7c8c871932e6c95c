"""ListPartitionReassignments (46), version 0: no partition is ever on the move."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    return {"throttle_time": 0, "error_code": ErrorCode.none, "error_message": None, "topics": []}
