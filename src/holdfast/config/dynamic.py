"""Changes made while the broker runs: how operations apply, and which broker settings they may touch.

Kafka answers a refused topic change with INVALID_CONFIG and a refused broker change with INVALID_REQUEST; an
operation that does not fit the setting's type is INVALID_CONFIG for both. Everything refused here is a
ConfigError; the caller knows which resource it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

from holdfast.config.broker import BrokerConfig, known_setting
from holdfast.config.catalog import BROKER, DYNAMIC_ONLY, LISTENER_PREFIX, listener_base, nearest
from holdfast.config.definitions import Scope, Setting, Type
from holdfast.config.values import format_value, split_list
from holdfast.errors import ConfigError

_LISTENER_SETTINGS_FOR_ALL = frozenset(
    {"max.connections", "max.connection.creation.rate", "num.network.threads"}
)


class Operation(IntEnum):
    """What IncrementalAlterConfigs can do to one setting, numbered as the protocol does."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class Alteration(NamedTuple):
    name: str
    operation: int
    """An `Operation`, or what a client takes for one."""
    value: str | None = None


def alter(
    current: Mapping[str, str], alterations: Iterable[Alteration], settings: Mapping[str, Setting]
) -> dict[str, str]:
    """The settings of a resource after the alterations; `current` is left alone and nothing is validated.

    APPEND and SUBTRACT start from the resource's own value, else from the setting's default.
    """
    altered = dict(current)
    for name, operation, value in alterations:
        if operation == Operation.DELETE:
            altered.pop(name, None)
            continue
        if value is None:
            raise ConfigError(f"{name}: {Operation(operation).name} needs a value")
        if operation == Operation.SET:
            altered[name] = value
            continue
        setting = settings.get(name)
        if setting is None or setting.type is not Type.LIST:
            raise ConfigError(f"{name}: {Operation(operation).name} is for lists, and this is none")
        present = altered[name] if name in altered else format_value(setting.default)
        before = split_list(present or "")
        changed = split_list(value)
        if operation == Operation.APPEND:
            after = before + tuple(item for item in changed if item not in before)
        else:
            after = tuple(item for item in before if item not in changed)
        altered[name] = ",".join(after)
    return altered


def validate_broker_overrides(
    config: BrokerConfig, overrides: Mapping[str, str], *, per_broker: bool
) -> None:
    """ConfigError unless these may be all the altered settings of this broker, or of every broker."""
    mistakes = [
        mistake for name in overrides if (mistake := _not_alterable(name, per_broker=per_broker)) is not None
    ]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    if per_broker:
        config.with_dynamic(overrides, config.dynamic_default)
    else:
        config.with_dynamic(config.dynamic, overrides)


def _not_alterable(name: str, *, per_broker: bool) -> str | None:
    setting = known_setting(name)
    if setting is None:
        guess = nearest(name, [*BROKER, *DYNAMIC_ONLY])
        return f"{name} is no broker setting" + (f"; did you mean {guess}?" if guess else "")
    if name.startswith(LISTENER_PREFIX):
        if not per_broker and listener_base(name) not in _LISTENER_SETTINGS_FOR_ALL:
            return f"{name} can be altered for one broker only, by its id"
        return None
    if setting.scope is Scope.READ_ONLY:
        return f"{name} is read at start only; change the file and restart"
    if name.startswith("ssl."):
        return f"{name} can be altered for one listener only, as {LISTENER_PREFIX}<listener>.{name}"
    if setting.scope is Scope.PER_BROKER and not per_broker:
        return f"{name} can be altered for one broker only, by its id"
    if name == "min.insync.replicas" and per_broker:
        # The controller decides by it who may lead, so it must be the same everywhere.
        return f"{name} can be altered for all brokers or for a topic, not for one broker"
    return None
