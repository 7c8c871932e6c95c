"""Lines for the operator: text, how bad it is, and what kind of line it is.

Whoever has something to say is given a `Say` and calls it with text. Plain text is INFO; `warn`, `error` and `debug`
make a `Line` of it, which is text as well, so that a list's `append` serves as a `Say` in a test.

- ERROR: something is lost or refused, or will be, until somebody acts.
- WARN: something went wrong, and the broker has coped with it, or tries again by itself.
- INFO: what an operator wants to have read afterwards.
- DEBUG: what happens all the time.

A line that a client can cause at will has a `kind`. Whoever writes lines down may write the first few of a kind and
count the rest; a line without a kind is never left out.

A line comes from a logger, whose name `named` puts on every line of a part of the broker. Levels are kept by logger:
see `holdfast.broker.node.loggers`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Self, TypeAlias

Say: TypeAlias = Callable[[str], None]


class Level(IntEnum):
    """In Kafka's words; the numbers are those of Python's `logging`."""

    DEBUG = 10
    INFO = 20
    WARN = 30
    ERROR = 40


class Line(str):
    __slots__ = ("kind", "level", "logger")

    level: Level
    kind: str
    logger: str

    def __new__(cls, text: str, level: Level = Level.INFO, kind: str = "", logger: str = "") -> Self:
        line = super().__new__(cls, text)
        line.level = level
        line.kind = kind
        line.logger = logger
        return line

    @classmethod
    def of(cls, text: str) -> Line:
        return text if isinstance(text, Line) else Line(text)


def debug(text: str, kind: str = "") -> Line:
    return Line(text, Level.DEBUG, kind)


def info(text: str, kind: str) -> Line:
    return Line(text, Level.INFO, kind)


def warn(text: str, kind: str = "") -> Line:
    return Line(text, Level.WARN, kind)


def error(text: str, kind: str = "") -> Line:
    return Line(text, Level.ERROR, kind)


def named(say: Say, logger: str) -> Say:
    """The lines of one logger. A line that has a logger keeps it."""

    def speak(text: str) -> None:
        line = Line.of(text)
        say(line if line.logger else Line(line, line.level, line.kind, logger))

    return speak


def unfailing(say: Say) -> Say:
    """Nothing that is done depends on its being said: not on a dead standard error, nor on a program's own `say`."""

    def guarded(line: str) -> None:
        with suppress(Exception):
            say(line)

    return guarded
