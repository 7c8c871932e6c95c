"""DescribeConfigs (32), versions 1 to 4: settings with value, source, synonyms, type and documentation.

Topics, this broker, all brokers (a broker without name), groups and client-metrics subscriptions. No names,
or an empty list of them, asks for every setting; names that do not exist are left out. Broker loggers exist
for Kafka's sake and have no levels to show.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import existing_topic
from holdfast.broker.metadata.image import Resource, ResourceType
from holdfast.broker.metadata.names import check_topic_name
from holdfast.broker.metadata.settings import check_broker_name, resource_of
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.config.describe import (
    ConfigEntry,
    describe_all_brokers,
    describe_broker,
    describe_client_metrics,
    describe_group,
    describe_topic,
)
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    documentation = context.version >= 3 and request.include_documentation
    return {
        "throttle_time": 0,
        "results": [_one(node, asked, request, documentation) for asked in request.resources],
    }


def _one(node: ClusterServices, asked: Any, request: Any, documentation: bool) -> Fields:
    result: Fields = {
        "error_code": ErrorCode.none,
        "error_message": "",
        "resource_type": asked.resource_type,
        "resource_name": asked.resource_name,
        "configs": [],
    }
    try:
        resource = resource_of(asked.resource_type, asked.resource_name)
        entries = _entries(node, resource, asked.configuration_keys or None, documentation)
    except ApiError as refused:
        return {**result, "error_code": refused.code, "error_message": refused.message}
    return {**result, "configs": [_fields(entry, request.include_synonyms) for entry in entries]}


def _entries(
    node: ClusterServices, resource: Resource, names: tuple[str, ...] | None, documentation: bool
) -> list[ConfigEntry]:
    settings = node.metadata.image.settings(resource)
    match resource.type:
        case ResourceType.TOPIC:
            check_topic_name(resource.name)
            existing_topic(node.metadata.image, resource.name)
            return describe_topic(node.settings.broker, settings, names, documentation=documentation)
        case ResourceType.BROKER:
            if not resource.name:
                return describe_all_brokers(node.settings.broker, names, documentation=documentation)
            _check_is_this_broker(node, resource.name)
            return describe_broker(node.settings.broker, names, documentation=documentation)
        case ResourceType.BROKER_LOGGER:
            _check_is_this_broker(node, resource.name)
            return []
    if not resource.name:
        raise ApiError(ErrorCode.invalid_request, "a group or client-metrics subscription must be named")
    if resource.type is ResourceType.GROUP:
        return describe_group(node.settings.broker, settings, names, documentation=documentation)
    return describe_client_metrics(settings, names, documentation=documentation)


def _check_is_this_broker(node: ClusterServices, name: str) -> None:
    if check_broker_name(node.metadata.image, name) != node.identity.node_id:
        raise ApiError(
            ErrorCode.invalid_request, f"ask broker {name} itself; this is {node.identity.node_id}"
        )


def _fields(entry: ConfigEntry, include_synonyms: bool) -> Fields:
    fields = entry._asdict()
    del fields["is_default"]  # of version 0, which is no longer offered
    fields["synonyms"] = [synonym._asdict() for synonym in entry.synonyms] if include_synonyms else []
    return fields
