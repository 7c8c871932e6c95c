"""The stream of messages: events of a kind, some of them spoilt, sent twice or long overdue; and what it came to.

The same settings give the same bytes, on every machine. Memory does not grow with the number of messages: besides what
the kind remembers there are the last messages, from which copies are taken, and counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from holdfast.demo.generate.chance import Chance, time_text
from holdfast.demo.generate.kinds import KINDS, Event
from holdfast.demo.generate.settings import GenerateSettings
from holdfast.errors import UsageError

RECENT_MAX: Final = 256
"""A copy is of one of so many messages before it: what a producer that tries again has in flight."""


class Message(NamedTuple):
    key: bytes
    value: bytes
    """Without a line end in it."""


class Generator:
    """Messages by iteration, once; `summary` tells what they came to so far."""

    def __init__(self, settings: GenerateSettings) -> None:
        choice = KINDS.get(settings.kind)
        if choice is None:
            raise UsageError(f"there is no {settings.kind!r}; there are {', '.join(KINDS)}")
        self._settings = settings
        self._chance = Chance(f"{settings.kind}:{settings.seed}")
        self._kind = choice.make(
            Chance(f"{settings.kind}:{settings.seed}:events"), settings.keys or choice.keys
        )
        self._recent: list[Message] = []
        self._now_ms = settings.start_ms
        self._messages = self._events = self._copies = self._malformed = self._late = 0
        self._bytes = 0
        self._times_ms: tuple[int, int] | None = None
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[Message]:
        while self._messages < self._settings.count:
            message = self._next()
            self._messages += 1
            self._bytes += len(message.value)
            self._digest.update(message.value + b"\n")
            yield message

    def _next(self) -> Message:
        settings, chance = self._settings, self._chance
        self._now_ms += int(2 * settings.spacing_ms * chance.draw())
        if self._kind.is_fixed(self._now_ms):
            return self._event(self._now_ms)
        part = chance.draw()
        if part < settings.duplicates:
            if self._recent:
                self._copies += 1
                return chance.one_of(self._recent)
        elif part < settings.duplicates + settings.malformed:
            self._malformed += 1
            return self._spoilt()
        at_ms = self._now_ms - int(settings.disorder_ms * chance.draw())
        if (
            part >= 1 - settings.late and self._events >= RECENT_MAX
        ):  # nothing is late where nothing came before
            self._late += 1
            at_ms -= int(settings.late_by_ms * (1 + chance.draw()))
        return self._event(at_ms)

    def _event(self, at_ms: int) -> Message:
        event: Event = self._kind.make(self._now_ms, at_ms)
        message = Message(event.key.encode(), event.value.encode())
        first, last = self._times_ms or (at_ms, at_ms)
        self._times_ms = min(first, at_ms), max(last, at_ms)
        if len(self._recent) < RECENT_MAX:
            self._recent.append(message)
        else:
            self._recent[self._events % RECENT_MAX] = message
        self._events += 1
        return message

    def _spoilt(self) -> Message:
        """What no parser may take: cut, doubled, not UTF-8, or no JSON at all."""
        whole = self._chance.one_of(self._recent) if self._recent else Message(b"none", b'{"id":0}')
        match self._chance.below(4):
            case 0:
                return Message(whole.key, whole.value[: 1 + self._chance.below(len(whole.value) - 1)])
            case 1:
                return Message(whole.key, whole.value + whole.value)
            case 2:
                return Message(whole.key, whole.value[:-1] + b"\xff\xfe")
            case _:
                return Message(whole.key, b"<html>502 Bad Gateway</html>")

    def summary(self) -> dict[str, Any]:
        """What was generated, and what results over it must come to."""
        first, last = self._times_ms or (None, None)
        return {
            "kind": self._settings.kind,
            "seed": self._settings.seed,
            "messages": self._messages,
            "bytes": self._bytes,
            "sha256": self._digest.hexdigest(),
            "events": self._events,
            "duplicates": self._copies,
            "malformed": self._malformed,
            "late": self._late,
            "first": None if first is None else time_text(first),
            "last": None if last is None else time_text(last),
            "results": self._kind.results(),
        }
