"""The broker's loggers by name, and the level of each: what Kafka's broker-loggers API describes and alters.

A logger without a level of its own has that of the nearest one above it, by the dots in their names; `root` is above
all. As in Apache Kafka, a level that was altered lasts until the broker stops.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from holdfast.config.describe import ConfigEntry, Source
from holdfast.config.dynamic import Alteration, Operation
from holdfast.errors import ApiError
from holdfast.saying import Level, Line

ROOT: Final = "root"
BROKER: Final = "holdfast.broker"
CONNECTIONS: Final = "holdfast.broker.connections"
GROUPS: Final = "holdfast.broker.groups"
LIBRARIES: Final = "holdfast.broker.libraries"
METADATA: Final = "holdfast.broker.metadata"
REQUESTS: Final = "holdfast.broker.requests"
STORAGE: Final = "holdfast.broker.storage"
TRANSACTIONS: Final = "holdfast.broker.transactions"
LOGGERS: Final = {
    ROOT: "every logger without a level of its own",
    BROKER: "start, stop, settings, topics, retention, compaction, the clock, defects",
    CONNECTIONS: "why connections end",
    GROUPS: "consumer groups and their committed offsets",
    LIBRARIES: "what libraries say, the event loop among them",
    METADATA: "the metadata log",
    REQUESTS: "refused and slow requests",
    STORAGE: "log directories, recovery, flushes, disks that are full or gone",
    TRANSACTIONS: "transactions",
}
NUMBERS: Final = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARN": 30, "ERROR": 40, "FATAL": 50}
"""Kafka's levels, in its order of words. The broker says nothing below DEBUG or above ERROR."""
_UNTYPED: Final = 0
"""The type of an entry, as Apache Kafka has it."""


class Levels:
    """May be read by any thread: a change replaces what is read."""

    def __init__(self, level: Level = Level.INFO) -> None:
        self._own = {ROOT: level.name}

    def of(self, logger: str) -> str:
        own = self._own
        while logger not in own:
            logger = logger.rpartition(".")[0] or ROOT
        return own[logger]

    def admit(self, line: Line) -> bool:
        return line.level >= NUMBERS[self.of(line.logger or BROKER)]

    def described(self, names: tuple[str, ...] | None) -> list[ConfigEntry]:
        return [
            ConfigEntry(name, self.of(name), False, Source.BROKER_LOGGER, False, (), _UNTYPED)
            for name in LOGGERS
            if names is None or name in names
        ]

    def check(self, changes: list[Alteration]) -> None:
        """Raise for what Apache Kafka refuses, with its codes."""
        for name, operation, value in changes:
            if operation not in (Operation.SET, Operation.DELETE):
                raise ApiError(ErrorCode.invalid_request, f"the level of {name} can be set and deleted")
            if name not in LOGGERS:
                raise ApiError(
                    ErrorCode.invalid_config, f"there is no logger {name}; there is {', '.join(LOGGERS)}"
                )
            if operation == Operation.DELETE:
                if name == ROOT:
                    raise ApiError(ErrorCode.invalid_request, "the level of root can be set, not deleted")
            elif (value or "").upper() not in NUMBERS:
                raise ApiError(
                    ErrorCode.invalid_config,
                    f"{value!r} is no level of {name}; there is {', '.join(NUMBERS)}",
                )

    def alter(self, changes: list[Alteration]) -> None:
        own = dict(self._own)
        for name, operation, value in changes:
            if operation == Operation.DELETE:
                own.pop(name, None)
            else:
                own[name] = (value or "").upper()
        self._own = own
