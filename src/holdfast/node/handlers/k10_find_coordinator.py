"""FindCoordinator (10), versions 0 to 6: nobody coordinates groups or transactions here yet.

It is offered all the same, and answered COORDINATOR_NOT_AVAILABLE: librdkafka takes a broker that does not offer it
for one so old that it cannot read lz4, and sends such batches uncompressed without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from holdfast.node.context import Fields, RequestContext
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.node.node import Node

BATCHED_FROM: Final = 4
NOWHERE: Final[Fields] = {
    "node_id": -1,
    "host": "",
    "port": -1,
    "error_code": ErrorCode.coordinator_not_available,
    "error_message": "this broker does not serve groups or transactions yet",
}


def handle(node: Node, context: RequestContext, request: Any, now: Now) -> Fields:
    if context.version >= BATCHED_FROM:
        return {"coordinators": [{"key": key, **NOWHERE} for key in request.coordinator_keys]}
    return NOWHERE
