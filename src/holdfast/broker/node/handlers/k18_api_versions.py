"""ApiVersions (18), versions 0 to 4: what this broker offers, in the versions Kafka 4.3 offers it.

A client that asks in a version we do not know gets UNSUPPORTED_VERSION in version 0, with the range we do
know, and tries again.
"""

from __future__ import annotations

import re
from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.dispatch import MODULES
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now
from holdfast.wire.apis import API_VERSIONS, APIS, BY_KEY, FEATURES, supported_features

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    if context.version >= 3:
        for text in (request.client_software_name, request.client_software_version):
            if not _SOFTWARE.fullmatch(text):
                return {"error_code": ErrorCode.invalid_request, "api_keys": []}
    return {
        "error_code": 0,
        "api_keys": [
            {"api_key": api.key, "min_version": api.min, "max_version": api.max}
            for api in APIS
            if api.key in MODULES
        ],
        "throttle_time": 0,
        "supported_features": [
            {"name": feature.name, "min_version": feature.min, "max_version": feature.max}
            for feature in supported_features(context.version)
        ],
        "finalized_features_epoch": node.metadata.image.last_offset,
        "finalized_features": [
            {"name": f.name, "max_version_level": level, "min_version_level": level}
            for f in FEATURES
            if (
                level := node.metadata.image.features.get(
                    f.name, f.finalized if f.name == "kraft.version" else 0
                )
            )
        ],
        "zk_migration_ready": False,
    }


def unsupported() -> Fields:
    api = BY_KEY[API_VERSIONS]
    return {
        "error_code": ErrorCode.unsupported_version,
        "api_keys": [{"api_key": api.key, "min_version": api.min, "max_version": api.max}],
    }
