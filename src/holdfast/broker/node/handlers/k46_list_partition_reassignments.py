"""ListPartitionReassignments (46), version 0: no partition is ever on the move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.broker.node.node import Node


def handle(node: Node, context: RequestContext, request: Any, now: Now) -> Fields:
    return {"throttle_time": 0, "error_code": ErrorCode.none, "error_message": None, "topics": []}
