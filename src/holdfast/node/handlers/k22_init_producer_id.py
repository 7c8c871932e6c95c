"""InitProducerId (22), versions 0 to 5: an id for an idempotent producer.

Left out until transactions are served: `transactional_id`, answered with COORDINATOR_NOT_AVAILABLE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from holdfast.errors import ApiError
from holdfast.node.context import Fields, RequestContext
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.node.node import Node

RENEWAL_VERSION: Final = 3
"""From here on a producer may name the id and epoch it has; both or neither."""


def handle(node: Node, context: RequestContext, request: Any, now: Now) -> Fields:
    if request.transactional_id is not None:
        code = (
            ErrorCode.invalid_request if not request.transactional_id else ErrorCode.coordinator_not_available
        )
        return {"error_code": code, "producer_id": -1, "producer_epoch": -1}
    if context.version >= RENEWAL_VERSION and (request.producer_id < 0) != (request.producer_epoch < 0):
        return {"error_code": ErrorCode.invalid_request, "producer_id": -1, "producer_epoch": -1}
    try:
        # An idempotent producer that has used its epochs up asks again and simply gets a new id.
        producer_id = node.producer_ids.take(now)
    except ApiError as error:
        return {"error_code": error.code, "producer_id": -1, "producer_epoch": -1}
    return {"error_code": 0, "producer_id": producer_id, "producer_epoch": 0}
