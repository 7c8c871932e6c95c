"""AlterClientQuotas (49), versions 0 and 1: refused.

A quota that is stored and not enforced would be worse than none.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    return {
        "throttle_time": 0,
        "entries": [
            {
                "error_code": ErrorCode.unsupported_version,
                "error_message": "this broker does not enforce client quotas, so it stores none",
                "entity": [
                    {"entity_type": entity.entity_type, "entity_name": entity.entity_name}
                    for entity in entry.entity
                ],
            }
            for entry in request.entries
        ],
    }
