"""`--filter`: which dead letters are meant.

    error=ValueError  group!=audit  message~time.?out  attempts>=3  time<=2026-11-15T08:00  header.tenant=acme

`=` and `!=` compare whole texts, `~` and `!~` search for a regular expression, `>=` and `<=` compare numbers and times.
What a dead letter does not tell is empty text, and no number. All filters must hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from holdfast.client.dead_letter_dialects import Failure, Header, read_failure
from holdfast.errors import UsageError

REDRIVES_HEADER: Final = "hf-redrives"
TEXTS: Final = ("topic", "group", "error", "message", "reason", "dialect", "key", "value")
NUMBERS: Final = ("partition", "offset", "attempts", "redrives", "time")
_SHAPE: Final = re.compile(r"([a-z]+|header\.[^=!~<>]+)(!=|!~|>=|<=|=|~)(.*)", re.DOTALL)


@dataclass(frozen=True)
class Letter:
    """A message of a dead-letter topic, understood as far as possible."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    failure: Failure

    @property
    def is_marked(self) -> bool:
        """Whether its headers say, in any dialect, that it is a dead letter."""
        return read_failure(self.headers) is not None

    @property
    def redrives(self) -> int:
        """How often it was redriven before."""
        return redrives_of(self.headers)

    @property
    def time_ms(self) -> int:
        """When it was given up on."""
        return self.failure.failed_ms if self.failure.failed_ms is not None else self.timestamp_ms

    @property
    def place(self) -> str:
        return f"{self.topic}-{self.partition}@{self.offset}"

    def text(self, name: str) -> str:
        if name.startswith("header."):
            found = [value for header, value in self.headers if header == name[len("header.") :]]
            return _text(found[-1]) if found else ""
        if name in ("key", "value"):
            return _text(self.key if name == "key" else self.value)
        if name in NUMBERS:
            number = self.number(name)
            return "" if number is None else str(number)
        return getattr(self.failure, name) or ""

    def number(self, name: str) -> int | None:
        if name == "redrives":
            return self.redrives
        if name == "time":
            return self.time_ms
        found: int | None = getattr(self.failure, name)
        return found


def redrives_of(headers: Iterable[Header]) -> int:
    found = [value for name, value in headers if name == REDRIVES_HEADER]
    return int(found[-1]) if found and found[-1] is not None and found[-1].isdigit() else 0


class Filter:
    def __init__(self, expressions: Iterable[str]) -> None:
        self._tests = [_parse(expression) for expression in expressions]

    def __call__(self, letter: Letter) -> bool:
        return all(test(letter) for test in self._tests)


def _parse(expression: str) -> Callable[[Letter], bool]:
    shape = _SHAPE.fullmatch(expression)
    if shape is None:
        raise UsageError(f"--filter {expression!r} is not NAME=VALUE, with one of = != ~ !~ >= <= between")
    name, operator, operand = shape[1], shape[2], shape[3]
    if name not in TEXTS and name not in NUMBERS and not name.startswith("header."):
        raise UsageError(
            f"--filter {expression!r}: there is no {name}; there are {', '.join((*TEXTS, *NUMBERS))}, header.NAME"
        )
    if operator in (">=", "<="):
        if name not in NUMBERS:
            raise UsageError(f"--filter {expression!r}: {name} is text, and is compared with = != ~ !~")
        return _comparison(name, operator, _number(name, operand, expression))
    if operator in ("~", "!~"):
        try:
            pattern = re.compile(operand)
        except re.error as error:
            raise UsageError(
                f"--filter {expression!r}: {operand!r} is not a regular expression: {error}"
            ) from error
        return lambda letter: (pattern.search(letter.text(name)) is not None) == (operator == "~")
    if name in NUMBERS:
        number = _number(name, operand, expression)
        return lambda letter: (letter.number(name) == number) == (operator == "=")
    return lambda letter: (letter.text(name) == operand) == (operator == "=")


def _comparison(name: str, operator: str, limit: int) -> Callable[[Letter], bool]:
    def holds(letter: Letter) -> bool:
        number = letter.number(name)
        return number is not None and (number >= limit if operator == ">=" else number <= limit)

    return holds


def _number(name: str, text: str, expression: str) -> int:
    if text.isdecimal():
        return int(text)
    if name == "time":
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(
                f"--filter {expression!r}: {text!r} is neither a time like 2026-11-15T08:00 nor milliseconds"
            ) from None
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    raise UsageError(f"--filter {expression!r}: {text!r} is not a number")


def _text(data: Any) -> str:
    return "" if data is None else bytes(data).decode("utf-8", "replace")
