"""What is wrong for a while: said when it begins, once an hour while it lasts, and when it is over.

A trouble is known by its kind and its subject (a directory, a partition). `begin` may be called as often as the
trouble shows; each time is counted, and the first is said. So whoever meets with it need not know whether somebody
has before, and a client that tries a thousand times a second does not fill the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from typing import Final

from holdfast.saying import Line, Say, error

REMIND_MS: Final = 3_600_000
REMINDED_MAX: Final = 10
"""Troubles of one kind that are said again one by one; of the rest only the number is."""


class Kind(StrEnum):
    NO_ROOM = "no-room"
    NO_DESCRIPTORS = "no-descriptors"
    DIRECTORY_OFFLINE = "directory-offline"
    PARTITION_OFFLINE = "partition-offline"
    COORDINATOR_OFFLINE = "coordinator-offline"
    NOT_COMPACTED = "not-compacted"
    DAMAGED = "damaged"
    FLUSH_STUCK = "flush-stuck"
    CLOCK_AHEAD = "clock-ahead"


class Trouble:
    __slots__ = ("count", "last_ms", "line", "said_ms", "since_ms", "subject")

    def __init__(self, subject: str, now_ms: int) -> None:
        self.subject = subject
        self.line = Line("")
        """What was last to be said of it."""
        self.count = 0
        self.since_ms = self.last_ms = self.said_ms = now_ms


class Troubles:
    def __init__(self, say: Say, now_ms: Callable[[], int]) -> None:
        self._say = say
        self._now_ms = now_ms
        self._lasting: dict[Kind, dict[str, Trouble]] = {kind: {} for kind in Kind}
        self.counts: Counter[Kind] = Counter()
        """How often each kind has shown since the start."""

    def lasting(self, kind: Kind) -> list[Trouble]:
        return list(self._lasting[kind].values())

    def begin(self, kind: Kind, subject: str, text: str) -> None:
        """The trouble shows; a plain text is an error."""
        self.counts[kind] += 1
        troubles = self._lasting[kind]
        is_new = subject not in troubles
        trouble = troubles.setdefault(subject, Trouble(subject, self._now_ms()))
        trouble.line = text if isinstance(text, Line) else error(text)
        trouble.count += 1
        trouble.last_ms = self._now_ms()
        if is_new:
            self._say(trouble.line)

    def end(self, kind: Kind, subject: str, text: str) -> None:
        """The trouble is over, if there was one."""
        trouble = self._lasting[kind].pop(subject, None)
        if trouble is not None:
            self._say(f"{text}, {self._history(trouble)}")

    def forget(self, subject: str) -> None:
        """Nobody has this trouble any more: the subject is gone, or has worse."""
        for troubles in self._lasting.values():
            troubles.pop(subject, None)

    def forget_all(self, kind: Kind) -> None:
        self._lasting[kind].clear()

    def remind(self) -> None:
        """Say again what was last said an hour ago."""
        now_ms = self._now_ms()
        for troubles in self._lasting.values():
            due = [trouble for trouble in troubles.values() if now_ms - trouble.said_ms >= REMIND_MS]
            for number, trouble in enumerate(due):
                trouble.said_ms = now_ms
                line = trouble.line
                if number < REMINDED_MAX:
                    self._say(Line(f"still so, {self._history(trouble)}: {line}", line.level))
                elif number == REMINDED_MAX:
                    self._say(Line(f"so are {len(due) - number:,} others", line.level))

    def _history(self, trouble: Trouble) -> str:
        lasted = timedelta(seconds=(self._now_ms() - trouble.since_ms) // 1000)
        return f"after {lasted}" + (f" and {trouble.count:,} times" if trouble.count > 1 else "")
