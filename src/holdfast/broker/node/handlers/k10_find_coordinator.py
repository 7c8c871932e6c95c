"""FindCoordinator (10), versions 0 to 6: who coordinates a group (key type 0) or a transactional id (1).

On one node it is always this one; asking makes the internal topic when it is not there yet. Share groups (2) are not
served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.handlers.administration import brokers_on
from holdfast.broker.node.services import ClusterServices, GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.broker.node.coordination import Coordination

BATCHED_FROM: Final = 4
GROUP: Final = 0
TRANSACTION: Final = 1


class FindServices(ClusterServices, GroupServices, Protocol):
    pass


def handle(node: FindServices, context: RequestContext, request: Any, now: Now) -> Fields:
    key_type = getattr(request, "key_type", GROUP)
    if context.version >= BATCHED_FROM:
        return {
            "throttle_time": 0,
            "coordinators": [
                {"key": key, **_find(node, context, key_type, key, now)} for key in request.coordinator_keys
            ],
        }
    return {"throttle_time": 0, **_find(node, context, key_type, request.key, now)}


def _find(node: FindServices, context: RequestContext, key_type: int, key: str, now: Now) -> Fields:
    try:
        _coordination(node, key_type).find(key, now)
        for broker_id, address in brokers_on(node, context.session.listener):
            if broker_id == node.identity.node_id:
                return {
                    "error_code": ErrorCode.none,
                    "error_message": "" if context.version >= BATCHED_FROM else "NONE",
                    "node_id": broker_id,
                    "host": address["host"],
                    "port": address["port"],
                }
        raise ApiError(ErrorCode.coordinator_not_available)
    except ApiError as error:
        return {
            "error_code": error.code,
            "error_message": error.message,
            "node_id": -1,
            "host": "",
            "port": -1,
        }


def _coordination(node: FindServices, key_type: int) -> Coordination[Any]:
    if key_type == GROUP:
        return node.groups
    if key_type == TRANSACTION:
        return node.transactions
    raise ApiError(ErrorCode.invalid_request, f"no coordinators of type {key_type} here")
