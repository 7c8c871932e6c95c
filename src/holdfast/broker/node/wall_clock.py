"""How late it is, for everything that goes when its time has come.

Retention, compaction and the expiry of committed offsets, producer ids and transactional ids go by the wall clock,
and a wall clock may be wrong: thirty days ahead for eight seconds would delete every log. So they ask
`WallClock.proven`, which follows the wall clock and never runs ahead of what the clock since boot vouches for:

- A step of up to a minute is believed: NTP makes such. So is a clock that gains up to a minute in an hour. -
Anything more is a jump. What expires goes on by the time that has really passed, and the operator is told. - A jump
that is taken back is over. One that lasts is believed after `holdfast.clock.settle.ms`, by running time: then the
clock was wrong before and is right now, or the machine was off. - A clock that is set back is followed at once:
everything lasts longer then, and nothing goes early.

The proven time is kept over restarts in `holdfast.clock`. Within one boot of the machine the clock since boot tells
what has passed meanwhile. Over a boot nothing does: up to an hour is believed, more is a jump like any other.

Requests see the wall clock as it is: what they stamp and bound is the clients' time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from holdfast.atomic import read_whole, write_atomically
from holdfast.broker.node.directories import LogDirectory
from holdfast.broker.node.troubles import Kind, Troubles
from holdfast.saying import Say, warn
from holdfast.seams import Clock, FileSystem, Now

CLOCK_FILE: Final = "holdfast.clock"
STEP_MS: Final = 60_000
GAIN: Final = 60
"""Of so much time that passes, the clock may gain one part more."""
AWAY_MS: Final = 3_600_000
"""A stop over a boot of the machine that is believed, with what has passed since the file was written."""
SAVE_INTERVAL_MS: Final = 600_000
SUBJECT: Final = "wall clock"


class LastSeen(NamedTuple):
    """What an earlier run knew of the time when it wrote it down."""

    boot_id: str
    since_boot_ms: int
    proven_ms: int
    ahead_for_ms: int
    """How long the wall clock has been ahead of the proven time."""


@dataclass(eq=False, repr=False)
class WallClock:
    _fs: FileSystem
    _clock: Clock
    _boot_id: str
    _settle_ms: Callable[[], int]
    _troubles: Troubles
    _say: Say
    _directory: LogDirectory | None = field(default=None, init=False)
    _path: str = field(default="", init=False)
    _ahead_for_ms: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._since_boot_ms = self._clock.since_boot_ms()
        self._proven_ms = self._clock.now().wall_ms

    def begin(self, directory: LogDirectory) -> None:
        """Go on from where the last run was."""
        self._directory = directory
        self._path = f"{directory.path}/{CLOCK_FILE}"
        last = self._read()
        if last is None:
            # Missing in a new directory, and in one of an earlier version: there is nothing to hold the clock against.
            return
        if last.boot_id == self._boot_id:
            self._proven_ms = last.proven_ms + max(0, self._since_boot_ms - last.since_boot_ms)
        elif self._proven_ms - last.proven_ms > AWAY_MS:
            self._proven_ms = last.proven_ms
        self._ahead_for_ms = last.ahead_for_ms
        self.proven()

    def proven(self) -> Now:
        """The clocks now, the wall clock as far as it may be believed."""
        wall_ms, monotonic_ms = self._clock.now()
        since_boot_ms = self._clock.since_boot_ms()
        passed_ms = since_boot_ms - self._since_boot_ms
        self._since_boot_ms = since_boot_ms
        self._proven_ms = min(wall_ms, self._proven_ms + passed_ms + passed_ms // GAIN)
        if wall_ms - self._proven_ms <= STEP_MS:
            self._ahead_for_ms = 0
            self._troubles.end(
                Kind.CLOCK_AHEAD, SUBJECT, "the wall clock agrees again with the time that has passed"
            )
            return Now(wall_ms, monotonic_ms)
        self._ahead_for_ms += passed_ms
        if not self._troubles.lasting(Kind.CLOCK_AHEAD):
            self._troubles.begin(Kind.CLOCK_AHEAD, SUBJECT, self._ahead_text(wall_ms - self._proven_ms))
        if self._ahead_for_ms >= self._settle_ms():
            self._proven_ms, self._ahead_for_ms = wall_ms, 0
            text = "the wall clock is believed from now on, and what has expired by it goes"
            self._troubles.end(Kind.CLOCK_AHEAD, SUBJECT, text)
        return Now(self._proven_ms, monotonic_ms)

    def _ahead_text(self, ahead_ms: int) -> str:
        left = _duration(self._settle_ms() - self._ahead_for_ms)
        return (
            f"the wall clock is {_duration(ahead_ms)} ahead of the time that is known to have passed: it jumped, or "
            "the machine was off. Records, committed offsets, producer ids, transactional ids and tombstones expire "
            f"by the time that has passed, and by the wall clock after another {left} of running. If the clock is "
            "wrong, set it right; if it is right, holdfast.clock.settle.ms=0 has it believed at once"
        )

    def save(self) -> None:
        """Write the proven time down, durably. Blocks for two flushes of a small file.

        A full disk leaves what stands there, from which less has passed.
        """
        directory = self._directory
        if directory is None or directory.offline:
            return
        now = self.proven()
        last = LastSeen(self._boot_id, self._since_boot_ms, now.wall_ms, self._ahead_for_ms)
        try:
            write_atomically(self._fs, self._path, json.dumps({"version": 0, **last._asdict()}).encode())
        except OSError as error:
            directory.refuses(error)

    def _read(self) -> LastSeen | None:
        try:
            fields = json.loads(read_whole(self._fs, self._path))
            if fields.pop("version") != 0:
                raise ValueError("another version's")
            last = LastSeen(**fields)
            if not all(type(value) is kind for value, kind in zip(last, (str, int, int, int), strict=True)):
                raise TypeError("not what this file holds")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._say(warn(f"{self._path} cannot be read: {error}; the wall clock is taken for right"))
            return None
        return last


def _duration(ms: int) -> str:
    days, seconds = divmod(max(0, ms) // 1000, 86_400)
    time = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{days} days {time}" if days else time
