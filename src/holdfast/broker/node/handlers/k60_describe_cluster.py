"""DescribeCluster (60), versions 0 to 2: the brokers, as seen on the listener the client came in by."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.handlers.administration import OPERATIONS_NOT_ASKED, brokers_on, cluster_operations
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now

BROKERS: Final = 1
CONTROLLERS: Final = 2


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    endpoint_type = request.endpoint_type if context.version >= 1 else BROKERS
    if endpoint_type == CONTROLLERS:
        return _refused(ErrorCode.mismatched_endpoint_type, "this listener is a broker's, not a controller's")
    if endpoint_type != BROKERS:
        return _refused(ErrorCode.unsupported_endpoint_type, f"endpoint type {endpoint_type} is unknown")
    fenced_too = context.version >= 2 and request.include_fenced_brokers
    return {
        "throttle_time": 0,
        "error_code": ErrorCode.none,
        "error_message": None,
        "endpoint_type": BROKERS,
        "cluster_id": node.identity.cluster_id,
        "controller_id": node.identity.node_id,
        "brokers": [
            {"broker_id": broker_id, "is_fenced": node.metadata.image.brokers[broker_id].fenced, **address}
            for broker_id, address in brokers_on(node, context.session.listener, fenced_too=fenced_too)
        ],
        "cluster_authorized_operations": cluster_operations(request.include_cluster_authorized_operations),
    }


def _refused(code: ErrorCode, message: str) -> Fields:
    return {
        "throttle_time": 0,
        "error_code": code,
        "error_message": message,
        "endpoint_type": BROKERS,
        "cluster_id": "",
        "controller_id": -1,
        "brokers": [],
        "cluster_authorized_operations": OPERATIONS_NOT_ASKED,
    }
