"""Changes of settings: what is asked of a topic, a broker or all brokers, turned into records.

A change is checked as the *result* it would have: the resource's settings after it must be valid together.
A record is made only for a setting whose value changes, except for brokers, where setting a value again is
how an operator asks for files named by it to be read again. A setting at its default is no record at all:
deleting a setting gives it back to the broker's, and asking for the default's own value pins it.

The codes are Kafka's: a bad setting of a broker or of a client-metrics subscription is INVALID_REQUEST,
one of a topic or group INVALID_CONFIG; an operation that does not fit a setting's type is INVALID_CONFIG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.image import ClusterImage, Resource, ResourceType
from holdfast.broker.metadata.names import REQUIRED_SETTINGS, check_topic_name
from holdfast.config.broker import BrokerConfig
from holdfast.config.catalog import BROKER, CLIENT_METRICS, GROUP, TOPIC
from holdfast.config.definitions import Setting
from holdfast.config.dynamic import Alteration, Operation, alter, validate_broker_overrides
from holdfast.config.values import parse_value
from holdfast.errors import ApiError, ConfigError
from holdfast.wire.metadata_records import Config, MetadataRecord

_SETTINGS: Final[Mapping[ResourceType, Mapping[str, Setting]]] = {
    ResourceType.TOPIC: TOPIC,
    ResourceType.BROKER: BROKER,
    ResourceType.GROUP: GROUP,
    ResourceType.CLIENT_METRICS: CLIENT_METRICS,
}
_REFUSED_AS_REQUEST: Final = frozenset({ResourceType.BROKER, ResourceType.CLIENT_METRICS})


def resource_of(resource_type: int, name: str) -> Resource:
    """The resource a request names."""
    try:
        return Resource(ResourceType(resource_type), name)
    except ValueError:
        raise ApiError(ErrorCode.invalid_request, f"resource type {resource_type} is unknown") from None


def new_topic_settings(
    topic: str, configs: Sequence[tuple[str, str | None]], config: BrokerConfig
) -> dict[str, str]:
    """The settings a topic is created with; of a name given twice the last value counts."""
    settings: dict[str, str] = dict(REQUIRED_SETTINGS.get(topic, {}))
    for name, value in configs:
        if value is None:
            raise ApiError(ErrorCode.invalid_config, f"setting {name!r} of topic {topic!r} has no value")
        settings[name] = value
    _check(Resource(ResourceType.TOPIC, topic), settings, config)
    return settings


def replace_settings(
    image: ClusterImage, resource: Resource, configs: Sequence[tuple[str, str | None]], config: BrokerConfig
) -> list[MetadataRecord]:
    """AlterConfigs: the given settings are all the resource has afterwards."""
    check_request([Alteration(name, Operation.SET, value) for name, value in configs])
    settings = {name: value for name, value in configs if value is not None}
    return _records(image, resource, settings, frozenset(settings), config)


def alter_settings(
    image: ClusterImage, resource: Resource, changes: Sequence[Alteration], config: BrokerConfig
) -> list[MetadataRecord]:
    """IncrementalAlterConfigs: only the named settings change."""
    check_request(changes)
    try:
        settings = alter(image.settings(resource), changes, _SETTINGS.get(resource.type, {}))
    except ConfigError as refused:
        raise ApiError(ErrorCode.invalid_config, str(refused)) from refused
    return _records(image, resource, settings, frozenset(change.name for change in changes), config)


def check_broker_name(image: ClusterImage, name: str) -> int:
    """The broker a resource names, which must be registered."""
    try:
        broker_id = int(name)
    except ValueError:
        raise ApiError(ErrorCode.invalid_request, f"a broker is named by its number, not {name!r}") from None
    if broker_id not in image.brokers:
        known = ", ".join(map(str, sorted(image.brokers)))
        raise ApiError(ErrorCode.invalid_request, f"there is no broker {broker_id}; there is {known}")
    return broker_id


def check_request(changes: Sequence[Alteration]) -> None:
    names = [change.name for change in changes]
    if len(set(names)) != len(names):
        raise ApiError(ErrorCode.invalid_request, "a setting is named more than once for one resource")
    for name, operation, value in changes:
        if operation not in Operation.__members__.values():
            raise ApiError(ErrorCode.invalid_request, f"operation {operation} on setting {name!r} is unknown")
        if value is None and operation != Operation.DELETE:
            raise ApiError(ErrorCode.invalid_request, f"setting {name!r} has no value")


def _records(
    image: ClusterImage,
    resource: Resource,
    settings: Mapping[str, str],
    named: frozenset[str],
    config: BrokerConfig,
) -> list[MetadataRecord]:
    _check_resource(image, resource)
    _check(resource, settings, config)
    current = image.settings(resource)
    repeats = resource.type is ResourceType.BROKER
    return [
        Config(resource_type=resource.type, resource_name=resource.name, name=name, value=settings.get(name))
        for name in sorted(current.keys() | settings.keys() | named)
        if settings.get(name) != current.get(name) or (repeats and name in named)
    ]


def _check_resource(image: ClusterImage, resource: Resource) -> None:
    match resource.type:
        case ResourceType.TOPIC:
            if not resource.name:
                raise ApiError(ErrorCode.invalid_request, "settings of all topics are settings of the broker")
            check_topic_name(resource.name)
            if resource.name not in image.topics:
                raise ApiError(
                    ErrorCode.unknown_topic_or_partition, f"topic {resource.name!r} does not exist"
                )
        case ResourceType.BROKER:
            if resource.name:
                check_broker_name(image, resource.name)
        case ResourceType.GROUP | ResourceType.CLIENT_METRICS:
            if not resource.name:
                what = resource.type.name.lower().replace("_", " ")
                raise ApiError(ErrorCode.invalid_request, f"a {what} resource must have a name")
        case _:
            raise ApiError(ErrorCode.invalid_request, f"resource type {resource.type} has no stored settings")


def _check(resource: Resource, settings: Mapping[str, str], config: BrokerConfig) -> None:
    try:
        match resource.type:
            case ResourceType.TOPIC:
                config.validate_topic_overrides(settings)
                _check_required(resource.name, settings)
            case ResourceType.BROKER:
                validate_broker_overrides(config, settings, per_broker=bool(resource.name))
            case _:
                _check_each(resource, settings, config)
    except ConfigError as refused:
        as_request = resource.type in _REFUSED_AS_REQUEST
        code = ErrorCode.invalid_request if as_request else ErrorCode.invalid_config
        raise ApiError(code, str(refused)) from refused


def _check_required(topic: str, settings: Mapping[str, str]) -> None:
    for name, value in REQUIRED_SETTINGS.get(topic, {}).items():
        if settings.get(name) != value:
            raise ConfigError(f"{topic} keeps {name}={value}: it holds committed offsets or transactions")


def _check_each(resource: Resource, settings: Mapping[str, str], config: BrokerConfig) -> None:
    known = _SETTINGS[resource.type]
    for name, text in settings.items():
        if name not in known:
            what = resource.type.name.lower().replace("_", " ")
            raise ConfigError(f"{name} is not a {what} setting; there is {', '.join(sorted(known))}")
        value = parse_value(known[name], text)
        if resource.type is ResourceType.GROUP and isinstance(value, int):
            _check_group_bounds(name, value, config)


def _check_group_bounds(name: str, value: int, config: BrokerConfig) -> None:
    """The broker bounds many settings of groups: `consumer.x` by `group.consumer.min.x` and `.max.x`."""
    kind, _, quantity = name.partition(".")
    lowest = config.values.get(f"group.{kind}.min.{quantity}")
    highest = config.values.get(f"group.{kind}.max.{quantity}")
    if isinstance(lowest, int) and value < lowest:
        raise ConfigError(f"{name}={value}: group.{kind}.min.{quantity} is {lowest}")
    if isinstance(highest, int) and value > highest:
        raise ConfigError(f"{name}={value}: group.{kind}.max.{quantity} is {highest}")
