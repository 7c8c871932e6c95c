"""Names, types, defaults and scopes of Kafka's settings and ours. Pure.

    definitions*.py   what a setting is, and the tables of all of them
    catalog.py        every setting by name, our changes to Kafka's tables, names that are no setting
    values.py         text to typed values and back
    properties.py     Java's .properties files
    listeners.py      what to bind and what to advertise
    topic.py          one topic's settings in force
    broker.py         the broker's settings in force, the reading of its file, rules that bind several settings
    dynamic.py        changes while running
    describe.py       what DescribeConfigs answers
    descriptions.py   one line of meaning for each setting we act on, and the tables of docs/CONFIGURATION.md

Nothing here reads a file or the clock: callers bring text and take typed values.
"""

from __future__ import annotations

from holdfast.config.broker import BrokerConfig
from holdfast.config.definitions import Scope, Setting, Type, Value
from holdfast.config.listeners import Listener, listeners_for
from holdfast.config.properties import Properties, parse_properties
from holdfast.config.topic import TopicConfig, validate_topic_overrides

__all__ = [
    "BrokerConfig",
    "Listener",
    "Properties",
    "Scope",
    "Setting",
    "TopicConfig",
    "Type",
    "Value",
    "listeners_for",
    "parse_properties",
    "validate_topic_overrides",
]
