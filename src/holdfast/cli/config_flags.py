"""The flags of kafka-configs that need more than a type: which entity, which settings to add and remove."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.cli.client_settings import read_properties
from holdfast.errors import ConfigError, UsageError

_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")

ENTITY_TYPES = ("topics", "brokers")


class Entity(NamedTuple):
    """What the settings belong to; `name` None is every entity of the kind, "" the default of all brokers."""

    kind: str
    name: str | None

    @property
    def is_broker_default(self) -> bool:
        return self.name == ""

    def __str__(self) -> str:
        if self.is_broker_default:
            return "the default of all brokers"
        return f"{self.kind.removesuffix('s')} {self.name}"


def choose_entity(
    entity_type: str | None,
    entity_name: str | None,
    entity_default: bool,
    topic: str | None,
    broker: str | None,
    broker_defaults: bool,
) -> Entity:
    """One entity from Kafka's two ways to name it: --entity-type with a name, or --topic and --broker."""
    short = [
        Entity(kind, name)
        for kind, name in (
            ("topics", topic),
            ("brokers", broker),
            ("brokers", "" if broker_defaults else None),
        )
        if name is not None
    ]
    if len(short) + (entity_type is not None) != 1:
        raise UsageError(
            "name one entity: --topic, --broker, --broker-defaults, or --entity-type with --entity-name"
        )
    if short:
        if entity_name is not None or entity_default:
            raise UsageError("--entity-name and --entity-default belong to --entity-type")
        entity = short[0]
    else:
        assert entity_type is not None
        if entity_type not in ENTITY_TYPES:
            raise UsageError(f"--entity-type {entity_type!r} is not one of {', '.join(ENTITY_TYPES)}")
        if entity_default and (entity_name is not None or entity_type != "brokers"):
            raise UsageError("--entity-default goes with --entity-type brokers and without --entity-name")
        entity = Entity(entity_type, "" if entity_default else entity_name)
    if entity.kind == "brokers" and entity.name and not entity.name.isdecimal():
        raise UsageError(f"a broker is named by its id, a number, not {entity.name!r}")
    return entity


def parse_additions(texts: Sequence[str], config_path: str | None) -> dict[str, str]:
    """--add-config 'k1=v1,k2=[a,b]' and --add-config-file; brackets keep commas together."""
    additions = read_properties(config_path) if config_path is not None else {}
    for text in texts:
        for pair in _COMMA_OUTSIDE_BRACKETS.split(text):
            if not pair.strip():
                continue
            name, equals, value = pair.partition("=")
            if not equals or not name.strip():
                raise ConfigError(
                    f"--add-config {pair!r} is not NAME=VALUE; put values with commas in brackets, k=[a,b]"
                )
            value = value.strip()
            if value.startswith("[") and value.endswith("]"):
                value = value[1:-1]
            additions[name.strip()] = value
    return additions


def parse_removals(texts: Sequence[str]) -> list[str]:
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]
