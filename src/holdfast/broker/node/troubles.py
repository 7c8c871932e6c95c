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

from holdfast.broker.node.directories import NO_DESCRIPTOR_ERRNOS, LogDirectory
from holdfast.saying import Line, Say, error
from holdfast.seams import FileSystem

REMIND_MS: Final = 3_600_000
REMINDED_MAX: Final = 10
"""Troubles of one kind that are said again one by one; of the rest only the number is."""
QUIET_MS: Final = 10_000
"""A directory that has refused nothing for so long is tried, and takes writes again or refuses once more."""


class Kind(StrEnum):
    NO_ROOM = "no-room"
    NO_DESCRIPTORS = "no-descriptors"
    DIRECTORY_OFFLINE = "directory-offline"
    PARTITION_OFFLINE = "partition-offline"
    COORDINATOR_OFFLINE = "coordinator-offline"
    NOT_COMPACTED = "not-compacted"
    DAMAGED = "damaged"
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


class Refusals:
    """Directories that refuse writes for want of room or descriptors, and when they take them again."""

    def __init__(
        self, fs: FileSystem, troubles: Troubles, try_to_write: Callable[[LogDirectory], bool]
    ) -> None:
        """`try_to_write` writes something small, and has `refused` called if that is refused."""
        self._fs = fs
        self._troubles = troubles
        self._try_to_write = try_to_write

    def refused(self, directory: LogDirectory, refusal: OSError) -> None:
        if refusal.errno in NO_DESCRIPTOR_ERRNOS:
            kind, what_to_do = Kind.NO_DESCRIPTORS, "Let this process open more files (ulimit -n)"
        else:
            kind, what_to_do = Kind.NO_ROOM, "Make room, or have topics keep less"
        self._troubles.begin(
            kind,
            directory.path,
            f"log directory {directory.path} refuses writes: {refusal}; {self._free(directory)}. Clients are told "
            f"KAFKA_STORAGE_ERROR and try again; nothing that was acknowledged is lost. {what_to_do}",
        )

    def check(self, directories: list[LogDirectory], now_ms: int) -> None:
        """Find out who takes writes again, once nothing was refused for a while."""
        for kind in (Kind.NO_ROOM, Kind.NO_DESCRIPTORS):
            for trouble in self._troubles.lasting(kind):
                directory = next(each for each in directories if each.path == trouble.subject)
                if now_ms - trouble.last_ms >= QUIET_MS and self._try_to_write(directory):
                    text = f"log directory {directory.path} takes writes again ({self._free(directory)})"
                    self._troubles.end(kind, directory.path, text)

    def _free(self, directory: LogDirectory) -> str:
        try:
            return f"{self._fs.free_bytes(directory.path):,} bytes are free"
        except OSError:
            return "how much is free cannot be asked"
