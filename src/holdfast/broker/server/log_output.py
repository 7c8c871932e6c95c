"""The broker's log, written by a thread of its own: what reads it may be slow, stuck or gone, and the broker goes on.

`LogOutput` takes a line and returns at once. Lines wait in a queue of at most `LINES_MAX`; what comes while it is full
is counted and dropped, and the next line that gets through is preceded by how many those were. Writing never happens
under the lock, so nobody waits for it; what it raises costs that line and nothing else.

Of each kind of line (see `holdfast.saying`) the first `LIMIT_LINES` in `LIMIT_SECONDS` are written, and at the end of
that time one that counts the others. What is below its logger's level (`holdfast.broker.node.loggers`) is not written.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.broker.node.loggers import BROKER, LIBRARIES, Levels
from holdfast.saying import Level, Line, Say, warn

LINES_MAX: Final = 1024
"""Lines that wait: more than a start with trouble in every partition of a usual broker says at once."""
LINE_CHARACTERS_MAX: Final = 8192
"""Of a longer line the middle is left out: a trace back tells most at its end. With LINES_MAX, 8 MB wait at most."""
LIMIT_LINES: Final = 10
LIMIT_SECONDS: Final = 60.0
CLOSE_SECONDS: Final = 1.0
"""How long a stop waits for what is still to be written."""
STANDARD_ERROR: Final = 2
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    10: "\n    ",
    9: "\t",
}
"""A name that a client has chosen neither begins a line of its own nor tells a terminal what to do."""

Write = Callable[[float, Line], None]
"""Takes the time of a line, in seconds since the epoch, and the line. May block, and may raise."""


class _Window:
    """One kind of line, in the time since the first of them."""

    __slots__ = ("ends", "last", "left_out", "lines")

    def __init__(self, ends: float) -> None:
        self.ends = ends
        self.lines = 0
        self.left_out = 0
        self.last = Line("")


class Limits:
    """Which lines are written. Those without a kind always are."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def admits(self, line: Line, now: float) -> bool:
        """Whether to write a line. Ask `summaries` first: a window that is over counts no more."""
        if not line.kind:
            return True
        window = self._windows.setdefault(line.kind, _Window(now + LIMIT_SECONDS))
        window.lines += 1
        if window.lines <= LIMIT_LINES:
            return True
        window.left_out += 1
        window.last = line
        return False

    def summaries(self, now: float) -> list[Line]:
        """What was left out in the windows that are over; these are then forgotten."""
        over = [kind for kind, window in self._windows.items() if window.ends <= now]
        windows = [self._windows.pop(kind) for kind in over]
        return [
            Line(
                f"{window.left_out:,} more lines like this in the last minute: {window.last}",
                window.last.level,
                logger=window.last.logger,
            )
            for window in windows
            if window.left_out
        ]

    @property
    def next_end(self) -> float | None:
        return min((window.ends for window in self._windows.values()), default=None)


class LogOutput:
    """A `Say` that writes lines of at least their logger's level."""

    def __init__(
        self, write: Write, levels: Levels | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self.levels = levels or Levels()
        self._clock = clock
        self._limits = Limits()
        self._waiting: deque[tuple[float, Line]] = deque()
        self._dropped = 0
        self._is_closing = False
        self._changed = threading.Condition()
        """Guards all of the above, and is never held while something is written."""
        self._thread = threading.Thread(target=self._run, name="holdfast-log", daemon=True)
        self._thread.start()

    def __call__(self, text: str) -> None:
        line = Line.of(text)
        if not self.levels.admit(line):
            return
        with self._changed:
            self._summarise(self._clock())
            if self._limits.admits(line, self._clock()):
                self._put(line)
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, for as long as `CLOSE_SECONDS`; whoever does not take it until then has lost it."""
        with self._changed:
            self._summarise(float("inf"))
            self._is_closing = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)

    def _summarise(self, now: float) -> None:
        for summary in self._limits.summaries(now):
            self._put(summary)

    def _put(self, line: Line) -> None:
        if len(self._waiting) < LINES_MAX:
            self._waiting.append((time.time(), line))
        else:
            self._dropped += 1

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            dropped, at, line = taken
            try:
                if dropped:
                    self._write(at, warn(f"{dropped:,} lines before this one were dropped: nobody took them"))
                    dropped = 0
                self._write(at, line)
            except Exception:  # noqa: BLE001 - whatever it is, it must not end the log
                with self._changed:
                    self._dropped += dropped + 1

    def _take(self) -> tuple[int, float, Line] | None:
        """Wait for a line, and how many were dropped before it; None when the log is closed and all is written."""
        with self._changed:
            while not self._waiting:
                if self._is_closing:
                    return None
                end = self._limits.next_end
                self._changed.wait(None if end is None else max(0.0, end - self._clock()))
                self._summarise(self._clock())
            dropped, self._dropped = self._dropped, 0
            return (dropped, *self._waiting.popleft())


def write_to_standard_error(at: float, line: Line) -> None:
    """Write a line with its time and level."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    _write_all(f"{stamp} {line.level.name} {_shortened(line).translate(_CONTROLS)}\n")


def write_json_to_standard_error(at: float, line: Line) -> None:
    """Write a line as an object of JSON, with its time in UTC, level and logger."""
    whole, part = divmod(int(at * 1000), 1000)
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{part:03}Z"
    entry = {"time": stamp, "level": line.level.name, "logger": line.logger or BROKER}
    _write_all(json.dumps({**entry, "message": _shortened(line)}) + "\n")


def log_with_logging(at: float, line: Line) -> None:
    """For a broker inside another program: its lines are that program's, which says what becomes of them."""
    logging.getLogger(line.logger or BROKER).log(line.level, "%s", line)


def logged_level() -> Level:
    """The least that the program around this broker has logged."""
    logger = logging.getLogger(BROKER)
    if not logger.hasHandlers():
        logger.addHandler(logging.NullHandler())  # otherwise Python writes warnings to standard error
    number = logger.getEffectiveLevel()
    return max((level for level in Level if level <= number), default=Level.DEBUG)


def _shortened(line: Line) -> str:
    if len(line) <= LINE_CHARACTERS_MAX:
        return str(line)
    half = LINE_CHARACTERS_MAX // 2
    return f"{line[:half]} […] {line[-half:]}"


def _write_all(text: str) -> None:
    """To the descriptor, not to `sys.stderr`: an interpreter that ends while a thread waits in there aborts."""
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(STANDARD_ERROR, data) :]


def occupy_standard_descriptors() -> None:
    """Put the null device where a standard stream is closed: a data file would get its number, and lines meant for
    standard error."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        pass
    os.close(descriptor)


class LibraryLines(logging.Handler):
    """What libraries log, the event loop among them: by themselves they write to standard error, and wait for it."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        level = Level.ERROR if record.levelno >= logging.ERROR else Level.WARN
        text, kind = f"{record.name}: {self.format(record)}", f"library {record.name}"
        self._say(Line(text, level, kind, LIBRARIES))
