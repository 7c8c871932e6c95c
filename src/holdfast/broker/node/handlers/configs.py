"""Requests that describe and alter settings.

What the two ways to alter settings have in common: one result per resource, each resource at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import existing_topic
from holdfast.broker.metadata.image import Resource, ResourceType
from holdfast.broker.metadata.names import check_topic_name
from holdfast.broker.metadata.settings import (
    alter_settings,
    check_broker_name,
    check_request,
    replace_settings,
    resource_of,
)
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.services import ClusterServices
from holdfast.config import describe
from holdfast.config.descriptions import DESCRIPTIONS
from holdfast.config.dynamic import Alteration
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.metadata_records import MetadataRecord


def describe_configs(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """DescribeConfigs (32), versions 1 to 4: settings with value, source, synonyms, type and documentation.

    Topics, this broker, all brokers (a broker without name), groups and client-metrics subscriptions. No names,
    or an empty list of them, asks for every setting; names that do not exist are left out. A broker's loggers show
    their levels.
    """
    documentation = context.version >= 3 and request.include_documentation
    return {"results": [_describe(node, asked, request, documentation) for asked in request.resources]}


def _describe(node: ClusterServices, asked: Any, request: Any, documentation: bool) -> Fields:
    result: Fields = {
        "error_code": ErrorCode.none,
        "error_message": "",
        "resource_type": asked.resource_type,
        "resource_name": asked.resource_name,
        "configs": [],
    }
    try:
        resource = resource_of(asked.resource_type, asked.resource_name)
        entries = _entries(node, resource, asked.configuration_keys or None)
    except ApiError as refused:
        return {**result, "error_code": refused.code, "error_message": refused.message}
    configs = [_entry_fields(entry, request.include_synonyms, documentation) for entry in entries]
    return {**result, "configs": configs}


def _entries(
    node: ClusterServices, resource: Resource, names: tuple[str, ...] | None
) -> list[describe.ConfigEntry]:
    settings = node.metadata.image.settings(resource)
    match resource.type:
        case ResourceType.TOPIC:
            check_topic_name(resource.name)
            existing_topic(node.metadata.image, resource.name)
            return describe.describe_topic(node.settings.broker, settings, names)
        case ResourceType.BROKER:
            if not resource.name:
                return describe.describe_all_brokers(node.settings.broker, names)
            _check_is_this_broker(node, resource.name)
            return describe.describe_broker(node.settings.broker, names)
        case ResourceType.BROKER_LOGGER:
            _check_is_this_broker(node, resource.name)
            return node.seams.levels.described(names)
    if not resource.name:
        raise ApiError(ErrorCode.invalid_request, "a group or client-metrics subscription must be named")
    if resource.type is ResourceType.GROUP:
        return describe.describe_group(node.settings.broker, settings, names)
    return describe.describe_client_metrics(settings, names)


def _check_is_this_broker(node: ClusterServices, name: str) -> None:
    if check_broker_name(node.metadata.image, name) != node.identity.node_id:
        raise ApiError(
            ErrorCode.invalid_request, f"ask broker {name} itself; this is {node.identity.node_id}"
        )


def _entry_fields(entry: describe.ConfigEntry, include_synonyms: bool, documentation: bool) -> Fields:
    return {
        **entry._asdict(),
        "synonyms": [synonym._asdict() for synonym in entry.synonyms] if include_synonyms else [],
        "documentation": (
            ""
            if entry.config_source == describe.Source.BROKER_LOGGER
            else DESCRIPTIONS.get(entry.name)
            if documentation
            else None
        ),
    }


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
    return {"responses": responses}


def alter_configs(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """AlterConfigs (33), versions 0 to 2: the settings given are all the resource has afterwards.

    Kafka's older way, kept for older tools; IncrementalAlterConfigs changes single settings.
    """
    return alter_each(
        node,
        request,
        now,
        lambda resource, asked: replace_settings(
            node.metadata.image,
            resource,
            [(config.name, config.value) for config in asked.configs],
            node.settings.broker,
        ),
    )


def incremental_alter_configs(
    node: ClusterServices, context: RequestContext, request: Any, now: Now
) -> Fields:
    """IncrementalAlterConfigs (44), versions 0 and 1: set, delete, append to and subtract from single settings.

    The level of a broker's logger is set or deleted at once and is no record: it lasts until the broker stops.
    """

    def records_for(resource: Resource, asked: Any) -> list[MetadataRecord]:
        changes = [Alteration(each.name, each.config_operation, each.value) for each in asked.configs]
        if resource.type is not ResourceType.BROKER_LOGGER:
            return alter_settings(node.metadata.image, resource, changes, node.settings.broker)
        _check_is_this_broker(node, resource.name)
        check_request(changes)
        node.seams.levels.check(changes)
        if not request.validate_only:
            node.seams.levels.alter(changes)
        return []

    return alter_each(node, request, now, records_for)


def list_config_resources(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """ListConfigResources (74), versions 0 and 1: whatever can have settings.

    Version 0 asks for client-metrics subscriptions only; later, no types means all of them. Topics and brokers are
    listed whether they have settings of their own or not, groups and subscriptions exist by having some.
    """
    wanted = request.resource_types if context.version >= 1 else (ResourceType.CLIENT_METRICS,)
    known = {resource_type.value for resource_type in ResourceType}
    if not known.issuperset(wanted):
        return {"error_code": ErrorCode.unsupported_version, "config_resources": []}
    types = [ResourceType(number) for number in dict.fromkeys(wanted)] or list(ResourceType)
    return {
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
