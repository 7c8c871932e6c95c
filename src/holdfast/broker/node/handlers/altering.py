"""What the two ways to alter settings have in common: one result per resource, each resource at most once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.image import Resource
from holdfast.broker.metadata.settings import resource_of
from holdfast.broker.node.context import Fields
from holdfast.broker.node.services import ClusterServices
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.metadata_records import MetadataRecord


def alter_each(
    node: ClusterServices,
    request: Any,
    now: Now,
    records_for: Callable[[Resource, Any], list[MetadataRecord]],
) -> Fields:
    times = Counter((asked.resource_type, asked.resource_name) for asked in request.resources)
    responses = []
    for asked in request.resources:
        code, message = ErrorCode.none, None
        try:
            if times[asked.resource_type, asked.resource_name] > 1:
                raise ApiError(ErrorCode.invalid_request, "a resource is named more than once in the request")
            records = records_for(resource_of(asked.resource_type, asked.resource_name), asked)
            if not request.validate_only:
                node.metadata.append(records, now)
        except ApiError as refused:
            code, message = refused.code, refused.message
        responses.append(
            {
                "error_code": code,
                "error_message": message,
                "resource_type": asked.resource_type,
                "resource_name": asked.resource_name,
            }
        )
    return {"throttle_time": 0, "responses": responses}
