"""What a setting is: its name, type, default, rule and scope; and the tables of all of them.

The tables in `definitions_*.py` hold every broker, topic, group and client-metrics setting of Apache Kafka
4.3, one row each, and `definitions_log.py` those, too, that holdfast adds. The rows carry Kafka's own defaults and
scopes; the few that differ here stand with their reasons in `catalog.py`, which puts the tables together.

Rules kept:

- A setting's name, type and meaning are Kafka's. Nothing is renamed.
- `acted_on` is a promise: the broker's behaviour follows the value. Settings without it are accepted,
  checked, described, and named in a notice at start.
- Defaults are typed values, never text; `None` means that there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypeAlias

Value: TypeAlias = bool | int | float | str | tuple[str, ...] | None
"""A parsed value: LIST is a tuple, CLASS and PASSWORD are strings, `None` is "not set and no default"."""

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
DOUBLE_MAX = 1.7976931348623157e308


class Type(IntEnum):
    """Kafka's types, numbered as DescribeConfigs numbers them."""

    UNKNOWN = 0
    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


class Scope(Enum):
    """Where a broker setting may be changed while the broker runs."""

    READ_ONLY = "read-only"
    PER_BROKER = "per-broker"
    CLUSTER_WIDE = "cluster-wide"


class Rule(NamedTuple):
    """What a value must satisfy beyond its type."""

    accepts: Callable[[Any], bool]
    allowed: str
    """Completes the sentence "allowed is …"."""


class Setting(NamedTuple):
    name: str
    type: Type
    default: Value
    rule: Rule | None = None
    scope: Scope = Scope.READ_ONLY
    acted_on: bool = False
    internal: bool = False
    """Kafka keeps it out of documentation and of DescribeConfigs unless it is set."""

    @property
    def is_sensitive(self) -> bool:
        return self.type is Type.PASSWORD

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("holdfast.")


BOOLEAN = Type.BOOLEAN
STRING = Type.STRING
INT = Type.INT
SHORT = Type.SHORT
LONG = Type.LONG
DOUBLE = Type.DOUBLE
LIST = Type.LIST
CLASS = Type.CLASS
PASSWORD = Type.PASSWORD

PER_BROKER = Scope.PER_BROKER
CLUSTER_WIDE = Scope.CLUSTER_WIDE
READ_ONLY = Scope.READ_ONLY


def at_least(lowest: float) -> Rule:
    return Rule(lambda value: value >= lowest, f"{lowest} or more")


def between(lowest: float, highest: float) -> Rule:
    return Rule(lambda value: lowest <= value <= highest, f"{lowest} to {highest}")


def one_of(*choices: str) -> Rule:
    return Rule(lambda value: value in choices, "one of " + ", ".join(choices))


def one_of_any_case(*choices: str) -> Rule:
    folded = frozenset(choice.lower() for choice in choices)
    return Rule(lambda value: value.lower() in folded, "one of " + ", ".join(choices) + " in any case")


def items_of(*choices: str) -> Rule:
    """A list, possibly empty, of the choices."""
    return Rule(
        lambda value: set(value).issubset(choices), "a list of " + ", ".join(choices) + ", or nothing"
    )


def some_of(*choices: str) -> Rule:
    """A list with at least one of the choices and nothing else."""
    return Rule(
        lambda value: bool(value) and set(value).issubset(choices), "at least one of " + ", ".join(choices)
    )


def _is_throttled_replicas(value: tuple[str, ...]) -> bool:
    if value == ("*",):
        return True
    pairs = [item.split(":") for item in value]
    return all(
        len(pair) == 2 and all(number.isascii() and number.isdigit() for number in pair) for pair in pairs
    )


NOT_EMPTY = Rule(bool, "anything but nothing")
GZIP_LEVEL = Rule(lambda value: value == -1 or 1 <= value <= 9, "1 to 9, or -1 for gzip's own default")
THROTTLED_REPLICAS = Rule(_is_throttled_replicas, "* or a list of partition:broker")
SHARE_OFFSET_RESET = Rule(
    lambda value: value in ("latest", "earliest") or value.startswith("by_duration:P"),
    "latest, earliest, or by_duration:P… with an ISO-8601 duration",
)
