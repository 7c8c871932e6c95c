"""The memory of frames that are being received, of all connections together.

What counts is what has arrived, not what was announced. Once `queued.max.request.bytes` have, a connection that sends
more of its frame is not read until others are done. One frame at a time is excepted, so that there is always one that
can get done; with it, at most the limit and one largest frame are held, and a little for each connection's last read.

While somebody waits for memory, a frame has to go on arriving: a connection whose frame comes too slowly, or not at
all, is closed. Otherwise a few who begin large frames and fall silent would keep everybody's larger requests out.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final, Protocol

from holdfast.real import unfilled_buffer

WINDOW_SECONDS: Final = 10.0
WINDOW_BYTES: Final = 640 * 1024
"""How much of a frame must arrive in each such time while others wait for memory, unless it gets done."""
LOOK_SECONDS: Final = 1.0
"""How often frames that come too slowly are looked for while somebody waits."""
READ_BYTES_MIN: Final = 4096
"""What is read at a time of a frame for which no memory is left, before its connection is known to wait."""
MEMORY_SHARE: Final = 4
"""Frames may take one part in so many of the memory, where no limit is given."""
LARGEST_FRAMES_MIN: Final = 2
"""However little memory there is, so many of the largest frames have room."""
UNLIMITED: Final = 1 << 62
CGROUP_LIMITS: Final = ("/sys/fs/cgroup{}/memory.max", "/sys/fs/cgroup/memory{}/memory.limit_in_bytes")


class Receiver(Protocol):
    """The connection a frame arrives on."""

    def go_on(self) -> None: ...
    def lose(self, reason: str) -> None: ...


class HalfFrame:
    """A frame of which some bytes are still to come."""

    __slots__ = ("arrived", "buffer", "receiver", "seen", "seen_at", "waits")

    def __init__(self, receiver: Receiver, length: int, begun: memoryview) -> None:
        self.receiver = receiver
        self.buffer = unfilled_buffer(length)
        self.arrived = len(begun)
        self.buffer[: self.arrived] = begun
        self.seen = 0
        self.seen_at = 0.0
        """How much had arrived when it was last found to go on, and when that was."""
        self.waits = False
        """Nothing is read of it until there is memory."""

    @property
    def is_whole(self) -> bool:
        return self.arrived == len(self.buffer)


class FrameMemory:
    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        """A limit of 0 or less is none."""
        self._limit = limit if limit > 0 else UNLIMITED
        self._loop = loop
        self._frames: dict[HalfFrame, None] = {}
        self._waiting: dict[HalfFrame, None] = {}
        """In the order they came; never without a favoured one that is read."""
        self._favoured: HalfFrame | None = None
        """The frame that is read although nothing is left."""
        self._look: asyncio.TimerHandle | None = None
        self.held = 0

    def begin(self, frame: HalfFrame) -> bool:
        """A frame has begun to arrive; whether more of it may be read now."""
        frame.seen_at = self._loop.time()
        self._frames[frame] = None
        self.held += frame.arrived
        return self._may_go_on(frame)

    def arrived(self, frame: HalfFrame, count: int) -> bool:
        """More of a frame has arrived; whether it may go on, which one that is whole need not."""
        frame.arrived += count
        self.held += count
        return frame.is_whole or self._may_go_on(frame)

    def end(self, frame: HalfFrame) -> None:
        """A frame is whole, or its connection is gone."""
        del self._frames[frame]
        self._waiting.pop(frame, None)
        self.held -= frame.arrived
        if frame is self._favoured:
            self._favoured = None
        if self.held < self._limit:
            self._favoured = None
            released, self._waiting = self._waiting, {}
            for waiting in released:
                self._release(waiting)
        elif self._favoured is None and self._waiting:
            self._favoured = first = next(iter(self._waiting))
            del self._waiting[first]
            self._release(first)

    def room(self, frame: HalfFrame) -> int:
        """How many bytes of a frame may be read at once."""
        return UNLIMITED if frame is self._favoured else max(self._limit - self.held, READ_BYTES_MIN)

    def _may_go_on(self, frame: HalfFrame) -> bool:
        if self.held < self._limit or frame is self._favoured:
            return True
        if self._favoured is None:
            self._favoured = frame
            return True
        frame.waits = True
        self._waiting[frame] = None
        if self._look is None:
            self._look = self._loop.call_later(LOOK_SECONDS, self._look_for_slow_ones)
        return False

    def _release(self, frame: HalfFrame) -> None:
        frame.waits = False
        frame.seen, frame.seen_at = frame.arrived, self._loop.time()
        frame.receiver.go_on()

    def _look_for_slow_ones(self) -> None:
        self._look = None
        if not self._waiting:
            return
        now = self._loop.time()
        for frame in [frame for frame in self._frames if not frame.waits]:
            if frame.arrived - frame.seen >= WINDOW_BYTES:
                frame.seen, frame.seen_at = frame.arrived, now
            elif now - frame.seen_at >= WINDOW_SECONDS:
                frame.receiver.lose(
                    f"others wait for memory (queued.max.request.bytes={self._limit}), and of its request of "
                    f"{len(frame.buffer)} bytes {frame.arrived} have come, fewer than {WINDOW_BYTES} of them in "
                    f"the last {WINDOW_SECONDS:g} seconds"
                )
        self._look = self._loop.call_later(LOOK_SECONDS, self._look_for_slow_ones)


def frame_bytes_limit(given: int | None, largest_frame: int) -> int:
    """`queued.max.request.bytes`, or what stands for it where it is not given: a share of the memory there is."""
    if given is not None:
        return given
    return max(memory_bytes() // MEMORY_SHARE, LARGEST_FRAMES_MIN * largest_frame)


def memory_bytes() -> int:
    """What this process may use: the machine's memory, or less where it runs in a group that is allowed less."""
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _cgroup_files():
        try:
            with open(path, encoding="ascii") as file:
                allowed = file.read().strip()
        except OSError:
            continue
        if allowed.isdecimal():
            least = min(least, int(allowed))
    return least


def _cgroup_files() -> list[str]:
    """Where the limits of this process's control group and those around it stand, if it has one."""
    groups = {""}
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            for line in file:
                _, controllers, group = line.rstrip("\n").split(":", 2)
                while controllers in ("", "memory") and group.strip("/"):
                    groups.add(group)
                    group = group.rpartition("/")[0]
    except OSError:
        pass
    return [place.format(group) for place in CGROUP_LIMITS for group in groups]
