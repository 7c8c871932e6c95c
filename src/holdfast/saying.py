"""Lines for the operator: text, how bad it is, and what kind of line it is.

Whoever has something to say is given a `Say` and calls it with text. Plain text is INFO; `warn`, `error` and `debug`
make a `Line` of it, which is text as well, so that a list's `append` serves as a `Say` in a test.

- ERROR: something is lost or refused, or will be, until somebody acts.
- WARN: something went wrong, and the broker has coped with it, or tries again by itself.
- INFO: what an operator wants to have read afterwards.
- DEBUG: what happens all the time.

A line that a client can cause at will has a `kind`. Whoever writes lines down may write the first few of a kind and
count the rest; a line without a kind is never left out.
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
    __slots__ = ("kind", "level")

    level: Level
    kind: str

    def __new__(cls, text: str, level: Level = Level.INFO, kind: str = "") -> Self:
        line = super().__new__(cls, text)
        line.level = level
        line.kind = kind
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


def unfailing(say: Say) -> Say:
    """Nothing that is done depends on its being said: not on a dead standard error, nor on a program's own `say`."""

    def guarded(line: str) -> None:
        with suppress(Exception):
            say(line)

    return guarded
