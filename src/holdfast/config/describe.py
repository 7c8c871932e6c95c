"""What DescribeConfigs answers: every setting with its value, where that came from, and what it overrides.

An entry's synonyms list every layer that names the setting, strongest first; the first one gives the source.
Kafka's peculiarity is kept, because tools compare: among names for one quantity (`log.retention.ms`,
`.minutes`, `.hours`), those before the first mention of the described name itself are dropped, so that a
topic's `retention.ms` that follows `log.retention.hours` shows no synonym and counts as a default.

Names nobody knows are described with unknown type and, to be safe, without their value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum
from typing import NamedTuple

from holdfast.config.broker import BrokerConfig, known_setting
from holdfast.config.catalog import BROKER, CLIENT_METRICS, GROUP, SYNONYMS, TOPIC, same_quantity
from holdfast.config.definitions import Scope, Setting, Type, Value
from holdfast.config.definitions_coordinators import GROUP_SYNONYMS
from holdfast.config.topic import parse_topic_overrides
from holdfast.config.values import format_value, parse_value


class Source(IntEnum):
    """Where a value comes from, numbered as DescribeConfigs numbers it."""

    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    BROKER_LOGGER = 6
    CLIENT_METRICS = 7
    GROUP = 8


class SynonymEntry(NamedTuple):
    name: str
    value: str | None
    source: int


class ConfigEntry(NamedTuple):
    """One setting, with the field names of the protocol's response."""

    name: str
    value: str | None
    read_only: bool
    config_source: int
    is_sensitive: bool
    synonyms: tuple[SynonymEntry, ...]
    config_type: int


def describe_broker(config: BrokerConfig, names: Collection[str] | None = None) -> list[ConfigEntry]:
    """Every setting of this broker, or those of the given names that exist."""
    given = {**config.static, **config.dynamic_default, **config.dynamic}
    shown = {name for name, setting in BROKER.items() if not setting.internal} | given.keys()
    return [_broker_entry(config, name, given.get(name)) for name in _chosen(shown, names)]


def describe_all_brokers(config: BrokerConfig, names: Collection[str] | None = None) -> list[ConfigEntry]:
    """What was altered for every broker: the resource without a name."""
    entries = []
    for name in _chosen(config.dynamic_default, names):
        entry = _broker_entry(config, name, config.dynamic_default[name])
        setting = known_setting(name)
        value = None if setting is None else _shown(setting, config.dynamic_default[name])
        synonyms = tuple(s for s in entry.synonyms if s.source == Source.DYNAMIC_DEFAULT_BROKER)
        entries.append(entry._replace(value=value, synonyms=synonyms, config_source=_source_of(synonyms)))
    return entries


def describe_topic(
    config: BrokerConfig,
    overrides: Mapping[str, str],
    names: Collection[str] | None = None,
) -> list[ConfigEntry]:
    """Every setting of a topic that has these of its own."""
    own = parse_topic_overrides(overrides)
    shown = {name for name, setting in TOPIC.items() if not setting.internal} | own.keys()
    entries = []
    for name in _chosen(shown, names):
        value = own[name] if name in own else config.topic_values[name]
        broker_name = SYNONYMS[name][0].name if name in SYNONYMS else None
        synonyms = () if broker_name is None else _broker_synonyms(config, broker_name)
        entries.append(_resource_entry(TOPIC[name], value, name in own, Source.TOPIC, synonyms))
    return entries


def describe_group(
    config: BrokerConfig,
    overrides: Mapping[str, str],
    names: Collection[str] | None = None,
) -> list[ConfigEntry]:
    """Every setting of a group that has these of its own."""
    entries = []
    for name in _chosen(GROUP, names):
        setting = GROUP[name]
        broker_name = GROUP_SYNONYMS.get(name)
        if broker_name is not None:
            inherited = config.values[broker_name]
            synonyms = _broker_synonyms(config, broker_name)
        else:
            inherited = setting.default
            synonyms = (SynonymEntry(name, format_value(inherited), Source.DEFAULT),)
        value = parse_value(setting, overrides[name]) if name in overrides else inherited
        entries.append(_resource_entry(setting, value, name in overrides, Source.GROUP, synonyms))
    return entries


def describe_client_metrics(
    overrides: Mapping[str, str], names: Collection[str] | None = None
) -> list[ConfigEntry]:
    """Every setting of a client-metrics subscription."""
    entries = []
    for name in _chosen(CLIENT_METRICS, names):
        setting = CLIENT_METRICS[name]
        value = parse_value(setting, overrides[name]) if name in overrides else setting.default
        entry = _resource_entry(setting, value, name in overrides, Source.CLIENT_METRICS, ())
        entries.append(entry._replace(synonyms=()))
    return entries


def _chosen(known: Collection[str], names: Collection[str] | None) -> list[str]:
    return sorted(known if names is None else set(names).intersection(known))


def _resource_entry(
    setting: Setting,
    value: Value,
    is_own: bool,
    own_source: Source,
    inherited: tuple[SynonymEntry, ...],
) -> ConfigEntry:
    """An entry of a topic, group or subscription: none of those is ever read-only or secret."""
    text = format_value(value)
    synonyms = (SynonymEntry(setting.name, text, int(own_source)), *inherited) if is_own else inherited
    return ConfigEntry(
        name=setting.name,
        value=text,
        read_only=False,
        config_source=_source_of(synonyms),
        is_sensitive=False,
        synonyms=synonyms,
        config_type=int(setting.type),
    )


def _broker_entry(config: BrokerConfig, name: str, given: str | None) -> ConfigEntry:
    setting = known_setting(name)
    value: str | None
    if setting is None:
        value = None
    elif given is not None:
        value = _shown(setting, given)
    else:
        value = None if setting.is_sensitive else format_value(setting.default)
    synonyms = _broker_synonyms(config, name)
    return ConfigEntry(
        name=name,
        value=value,
        read_only=setting is None or setting.name != name or setting.scope is Scope.READ_ONLY,
        config_source=_source_of(synonyms),
        is_sensitive=setting is None or setting.is_sensitive,
        synonyms=synonyms,
        config_type=int(Type.UNKNOWN if setting is None else setting.type),
    )


def _source_of(synonyms: tuple[SynonymEntry, ...]) -> int:
    return synonyms[0].source if synonyms else int(Source.DEFAULT)


def _shown(setting: Setting, text: str) -> str | None:
    return None if setting.is_sensitive else format_value(parse_value(setting, text))


def _broker_synonyms(config: BrokerConfig, name: str) -> tuple[SynonymEntry, ...]:
    setting = known_setting(name)
    hidden = setting is None or setting.is_sensitive
    layers = (
        (config.dynamic, Source.DYNAMIC_BROKER),
        (config.dynamic_default, Source.DYNAMIC_DEFAULT_BROKER),
        (config.static, Source.STATIC_BROKER),
    )
    family = same_quantity(name)
    found = [
        SynonymEntry(member, None if hidden else layer[member], int(source))
        for layer, source in layers
        for member in family
        if member in layer
    ]
    for member in family:
        default = format_value(BROKER[member].default) if member in BROKER else None
        if default is not None:
            found.append(SynonymEntry(member, None if hidden else default, int(Source.DEFAULT)))
    mentions = [position for position, synonym in enumerate(found) if synonym.name == name]
    return tuple(found[mentions[0] :]) if mentions else ()
