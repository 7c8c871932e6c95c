"""UpdateFeatures (57), versions 0 to 2: features stand at the highest level and stay there.

Asking for the level a feature has is fine. Higher ones are not supported and lower ones are refused: the data
on disk may need what the present level brought. One refusal refuses the whole request.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now
from holdfast.wire.apis import FEATURES


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    refusals = [
        refusal
        for update in request.feature_updates
        if (refusal := _refusal(node, update.feature, update.max_version_level)) is not None
    ]
    if refusals:
        return {
            "throttle_time": 0,
            "error_code": ErrorCode.invalid_update_version,
            "error_message": "; ".join(refusals),
            "results": [],
        }
    return {
        "throttle_time": 0,
        "error_code": ErrorCode.none,
        "error_message": None,
        "results": [
            {"feature": update.feature, "error_code": ErrorCode.none, "error_message": None}
            for update in request.feature_updates
        ],
    }


def _refusal(node: ClusterServices, name: str, level: int) -> str | None:
    feature = next((feature for feature in FEATURES if feature.name == name), None)
    if feature is None:
        return f"feature {name!r} is unknown"
    if not feature.min <= level <= feature.max:
        return f"feature {name} has levels {feature.min} to {feature.max}, not {level}"
    current = node.metadata.image.features.get(name, feature.finalized)
    if level != current:
        return f"feature {name} stands at level {current} and cannot be set to {level}"
    return None
