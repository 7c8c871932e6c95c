"""A disk that fills up and slows down, and a clock that tests move: for a broker that runs, without root or FUSE.

`FaultyDisk` and `MovedClock` are this machine's disk and clock, asked for `Faults` at every step. They stand where the
broker expects the real ones, so everything the broker stores goes through them; what a full disk refuses is the same
`OSError` that the kernel raises. Only the child that compacts logs writes past them.

A test holds a `Disk` and a `Clock`, which hand changes to whoever has the `Faults`: this process, or another one.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from holdfast.errors import UsageError
from holdfast.real import RealClock, RealFile, RealFileSystem
from holdfast.seams import Buffer, Now, OpenMode

if TYPE_CHECKING:
    from holdfast.broker.server.server import Machine


@dataclass
class Faults:
    """What is wrong with the machine that a broker runs on."""

    free_bytes: int | None = None
    """How much files may still grow; None is as much as the disk has."""
    flush_seconds: float = 0.0
    """How much longer than the disk takes every flush of a file lasts."""
    passed_ms: int = 0
    """How much more time has passed than on other machines, by every clock."""
    stepped_ms: int = 0
    """How far the wall clock alone is ahead."""

    def change(self, fields: Mapping[str, float | None]) -> None:
        for name, value in fields.items():
            setattr(self, name, value)


Change: TypeAlias = Callable[[Mapping[str, float | None]], None]
"""Hands fields of `Faults` to whoever has them."""


class Disk:
    """The disk of a broker under test."""

    def __init__(self, change: Change) -> None:
        self._change = change

    @contextmanager
    def full(self, *, free_bytes: int = 0) -> Iterator[None]:
        """Inside the block files grow by no more than `free_bytes`, and what is beyond gets ENOSPC."""
        if free_bytes < 0:
            raise UsageError(f"free_bytes={free_bytes}: no disk has less than 0 bytes free")
        self._change({"free_bytes": free_bytes})
        try:
            yield
        finally:
            self._change({"free_bytes": None})

    @contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        """Inside the block every flush of a file takes so much longer."""
        if seconds < 0:
            raise UsageError(f"a disk cannot be slowed down by {seconds} seconds")
        self._change({"flush_seconds": seconds})
        try:
            yield
        finally:
            self._change({"flush_seconds": 0.0})


class Clock:
    """The clock of a broker under test."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._passed_ms = 0
        self._stepped_ms = 0

    def advance(self, seconds: float) -> None:
        """Let time pass for the broker: what is due within `seconds` is due now, sessions and retention included."""
        if seconds < 0:
            raise UsageError(
                f"time does not run backwards by {-seconds} s; step({seconds}) sets the wall clock back"
            )
        self._passed_ms += round(seconds * 1000)
        self._change({"passed_ms": self._passed_ms})

    def step(self, seconds: float) -> None:
        """Set the broker's wall clock forward or back, as an operator or NTP does; no time passes."""
        self._stepped_ms += round(seconds * 1000)
        self._change({"stepped_ms": self._stepped_ms})


class FaultyFile(RealFile):
    __slots__ = ("_disk",)

    def __init__(self, fd: int, path: str, disk: FaultyDisk) -> None:
        super().__init__(fd, path)
        self._disk = disk

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        self._disk.take(self, position + sum(map(len, buffers)))
        return super().pwritev(buffers, position)

    def flush(self) -> None:
        self._disk.dawdle()
        super().flush()


class FaultyDisk(RealFileSystem):
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def open(self, path: str, mode: OpenMode) -> FaultyFile:
        opened = super().open(path, mode)
        fd, opened.fd = opened.fd, -1
        return FaultyFile(fd, path, self)

    def free_bytes(self, path: str) -> int:
        free = self._faults.free_bytes
        return super().free_bytes(path) if free is None else free

    def take(self, file: FaultyFile, end: int) -> None:
        """Let a file grow to `end`, or refuse: nothing is written then."""
        free = self._faults.free_bytes
        if free is not None and (growth := end - file.size()) > 0:
            if growth > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.path)
            self._faults.free_bytes = free - growth

    def dawdle(self) -> None:
        if self._faults.flush_seconds:
            time.sleep(self._faults.flush_seconds)


class MovedClock(RealClock):
    """Durations are measured by the real clock; it is deadlines and dates that move."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def now(self) -> Now:
        now, faults = super().now(), self._faults
        return Now(now.wall_ms + faults.passed_ms + faults.stepped_ms, now.monotonic_ms + faults.passed_ms)

    def since_boot_ms(self) -> int:
        return super().since_boot_ms() + self._faults.passed_ms


def machine_with(faults: Faults) -> Machine:
    """What a broker runs on whose disk and clock have these faults."""
    from holdfast.broker.server.server import Machine  # here: a test that starts a process needs none of it

    return Machine(FaultyDisk(faults), MovedClock(faults), is_short_lived=True)
