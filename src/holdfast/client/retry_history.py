"""What a message in a retry topic carries with it: where it was first, how often it failed, and when it is due.

The history replaces the one before it, so that a message's headers do not grow from topic to topic. It is taken away
when the message leaves the retry topics. A message without one, or with one that is broken, counts as new: it is
handled at once, since nothing says that it has to wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.client.dead_letter_dialects import Header, Headers
from holdfast.client.messages import RETRY_PREFIX, Message, Origin

TEXT_BYTES_MAX: Final = 1024
"""Of the last error's words."""


@dataclass(frozen=True, slots=True)
class History:
    """The attempts on one message so far."""

    origin: Origin
    group: str | None = None
    """Whose attempts these are; other groups read the same retry topics and pass over it."""
    attempts: int = 0
    step: int | None = None
    """Which delay it waits for, from 0; None where it has failed nowhere yet."""
    first_ms: int | None = None
    """When it failed first."""
    due_ms: int = 0
    error: str = ""
    """What the last attempt failed with."""

    @classmethod
    def read(cls, message: Message) -> History:
        """The history in a message's headers, an empty one where there is none."""
        origin = message.origin
        found = {
            name[len(RETRY_PREFIX) :]: value
            for name, value in message.headers
            if name.startswith(RETRY_PREFIX) and value is not None
        }
        numbers = {name: _number(found.get(name)) for name in ("attempts", "step", "first", "due")}
        if not found or any(number is None for number in numbers.values()):
            return cls(origin)
        return cls(
            origin,
            _text(found.get("group")),
            numbers["attempts"] or 0,
            numbers["step"],
            numbers["first"],
            numbers["due"] or 0,
            _text(found.get("error")),
        )

    def headers(self) -> Headers:
        origin = self.origin
        values: list[tuple[str, bytes]] = [
            ("topic", origin.topic.encode("utf-8", "replace")),
            ("partition", b"%d" % origin.partition),
            ("offset", b"%d" % origin.offset),
            ("timestamp", b"%d" % origin.timestamp_ms),
            ("group", (self.group or "").encode("utf-8", "replace")),
            ("attempts", b"%d" % self.attempts),
            ("step", b"%d" % (self.step or 0)),
            ("first", b"%d" % (self.first_ms or 0)),
            ("due", b"%d" % self.due_ms),
            ("error", self.error.encode("utf-8", "replace")[:TEXT_BYTES_MAX]),
        ]
        return tuple((f"{RETRY_PREFIX}{name}", value) for name, value in values)


def without_history(headers: Iterable[Header]) -> Headers:
    return tuple(each for each in headers if not each[0].startswith(RETRY_PREFIX))


def _number(value: bytes | None) -> int | None:
    return int(value) if value is not None and len(value) <= 20 and value.isdigit() else None


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")
