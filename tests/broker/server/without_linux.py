"""A machine that is not Linux, as far as a program can tell: run as `python without_linux.py PART ARGUMENTS`.

Linux's calls are taken away, `sys.platform` is that of macOS, and F_FULLFSYNC is recorded by path in the file that
FLUSHED names before the flush is done. PART is `serve` or `worker`.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import fcntl
import os
import resource
import subprocess
import sys
import time
from typing import Any

import uvloop

F_FULLFSYNC = 51
OPEN_MAX = 10_240
LACKED = {
    os: ("fdatasync", "posix_fadvise", "RWF_NOWAIT", "copy_file_range", "sendfile", "eventfd", "pidfd_open"),
    time: ("CLOCK_BOOTTIME",),
}
IN_LIBRARY = ("syncfs", "prctl", "mallopt", "syscall", "renameat2")


def take_linux_away(flushed: str) -> None:
    assert asyncio
    assert subprocess  # and uvloop: what looks at the platform when it is imported has seen Linux's
    assert uvloop
    for module, names in LACKED.items():
        for name in names:
            delattr(module, name)
    for name in [name for name in dir(os) if name.startswith(("SCHED_", "sched_"))]:
        delattr(os, name)
    _take_proc_away()
    _take_library_away()
    _limit_descriptors()
    sys.platform = "darwin"
    put(fcntl, F_FULLFSYNC=F_FULLFSYNC)
    plain, readlink, fsync = fcntl.fcntl, os.readlink, os.fsync

    def full_flush(fd: int, command: int, *more: Any) -> Any:
        if command != F_FULLFSYNC:
            return plain(fd, command, *more)
        fsync(fd)
        with original_open(flushed, "a", encoding="utf-8") as file:
            file.write(readlink(f"/proc/self/fd/{fd}") + "\n")
        return 0

    put(fcntl, fcntl=full_flush)

    def left_in_the_cache(fd: int) -> None:
        raise AssertionError("a flush by fsync alone is none on macOS")

    put(os, fsync=left_in_the_cache)


original_open = open


def put(place: object, **values: object) -> None:
    for name, value in values.items():
        setattr(place, name, value)


def _take_proc_away() -> None:
    status, listing = os.stat, os.listdir

    def guarded(function: Any) -> Any:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str) and path.startswith(("/proc", "/sys")):
                raise FileNotFoundError(2, "No such file or directory", path)
            return function(path, *arguments, **options)

        return call

    put(builtins, open=guarded(original_open))
    put(os, stat=guarded(status), listdir=guarded(listing))


def _take_library_away() -> None:
    class Library(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            if name in IN_LIBRARY:
                raise AttributeError(name)
            return super().__getattr__(name)

    put(ctypes, CDLL=Library)


def _limit_descriptors() -> None:
    plain = resource.setrlimit

    def setrlimit(what: int, limits: tuple[int, int]) -> None:
        if limits[0] > OPEN_MAX:
            raise ValueError("current limit exceeds maximum limit")
        plain(what, (limits[0], resource.getrlimit(what)[1]))

    put(resource, setrlimit=setrlimit)


if __name__ == "__main__":
    take_linux_away(os.environ["FLUSHED"])
    part = sys.argv.pop(1)
    if part == "serve":
        from holdfast.cli.__main__ import main

        # Its child is of the same machine.
        here = os.path.abspath(__file__)
        start = asyncio.create_subprocess_exec

        async def start_here(program: str, *arguments: str, **options: Any) -> Any:
            assert arguments[:3] == ("-P", "-m", "holdfast.broker.server.worker_main")
            return await start(program, here, "worker", *arguments[3:], **options)

        put(asyncio, create_subprocess_exec=start_here)
        sys.argv[1:1] = ["serve"]
        main()
    else:
        from holdfast.broker.server.worker_main import main as work

        work()
