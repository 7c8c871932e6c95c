"""ListConfigResources (74), versions 0 and 1: whatever can have settings.

Version 0 asks for client-metrics subscriptions only; later, no types means all of them. Topics and brokers are
listed whether they have settings of their own or not, groups and subscriptions exist by having some.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.image import ResourceType
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    wanted = request.resource_types if context.version >= 1 else (ResourceType.CLIENT_METRICS,)
    known = {resource_type.value for resource_type in ResourceType}
    if not known.issuperset(wanted):
        return {"throttle_time": 0, "error_code": ErrorCode.unsupported_version, "config_resources": []}
    types = [ResourceType(number) for number in dict.fromkeys(wanted)] or list(ResourceType)
    return {
        "throttle_time": 0,
        "error_code": ErrorCode.none,
        "config_resources": [
            {"resource_name": name, "resource_type": resource_type}
            for resource_type in types
            for name in _names(node, resource_type)
        ],
    }


def _names(node: ClusterServices, resource_type: ResourceType) -> list[str]:
    match resource_type:
        case ResourceType.TOPIC:
            return list(node.metadata.image.topics)
        case ResourceType.BROKER | ResourceType.BROKER_LOGGER:
            return [str(broker_id) for broker_id in sorted(node.metadata.image.brokers)]
    return sorted(resource.name for resource in node.metadata.image.configs if resource.type is resource_type)
