"""What every program shares: its place, its notes for the judge, and things of the user's that must be left alone."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tests.endings.axes import Combination

MESSAGES: Final = 5
WAIT_SECONDS_MAX: Final = 10.0
"""Longer than anything here takes; a program that waits so long has hung."""
CHILD_SECONDS_MAX: Final = 8.0
SIGNAL_SECONDS: Final = 0.05
"""How long the program is at what it does when the signal comes."""
MINE: Final = "what the user wrote and did not flush"
PRINTED: Final = "what the user printed"


class Job(NamedTuple):
    """One program to run."""

    client: str
    under_way: str
    way: str
    bootstrap: str
    silent: str
    """The address of a broker that gets no produce request, through no fault of its own."""
    directory: str

    @property
    def combination(self) -> Combination:
        return Combination(self.client, self.under_way, self.way)

    @property
    def topic(self) -> str:
        """A name of its own, which is that of its group and of its client too."""
        return os.path.basename(self.directory)

    @property
    def outputs(self) -> str:
        return f"{self.topic}-out"

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}"


class Meant(Exception):
    """What the program raises on purpose."""


class Notes:
    """Numbers written for the judge, each in one system call: they outlive the process, however it ends."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, number: int) -> None:
        os.write(self._file, b"%d\n" % number)


_kept: list[Any] = []
"""Things that live until the interpreter ends."""


def keep(thing: Any) -> None:
    _kept.append(thing)


def leave_things_open(job: Job) -> None:
    """A file with something in its buffer, text in that of stdout, and a function to be called at the end."""
    mine = open(job.path("mine"), "w")  # noqa: SIM115 - left open on purpose
    mine.write(MINE)
    keep(mine)
    print(PRINTED)
    ran = os.open(job.path("atexit"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # Functions registered earlier run later: this one runs after ours.
    atexit.register(os.write, ran, b"ran\n")


def until(is_so: Callable[[], bool], seconds_max: float = WAIT_SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds_max
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("the program waits in vain")
        time.sleep(0.002)


def signal_soon(number: int) -> None:
    """While the main thread goes on with what it does."""
    timer = threading.Timer(SIGNAL_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def raising(error: BaseException) -> Callable[..., None]:
    def handler(*_: object) -> None:
        raise error

    return handler


def break_stream(number: int) -> None:
    """A pipe nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, number)
    os.close(writer)


def prepare_streams(way: str) -> None:
    if way == "stderr-closed":
        # As a shell's `2>&-` starts a program.
        sys.stderr = None
        os.close(2)
    elif way == "stderr-broken":
        break_stream(2)
    elif way == "stdout-broken":
        break_stream(1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def in_child(job: Job, work: Callable[[], None], end: Callable[[int], object] = sys.exit) -> None:
    """Fork; the child does the work and goes on from here to its own end, the parent notes how the child ended."""
    child = os.fork()
    if child == 0:
        work()
        end(0)
    until_ended(job, child)


def until_ended(job: Job, child: int) -> None:
    ended: list[int] = []

    def has_ended() -> bool:
        which, status = os.waitpid(child, os.WNOHANG)
        if which:
            ended.append(os.waitstatus_to_exitcode(status))
        return bool(which)

    try:
        until(has_ended, CHILD_SECONDS_MAX)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ended.append(-signal.SIGKILL)
    with open(job.path("child"), "w") as note:
        note.write(str(ended[0]))
