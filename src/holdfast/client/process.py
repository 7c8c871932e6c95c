"""The process that a client runs in: one run at a time, its end by a signal, its forks, and words for whoever runs it.

A handler may fork: the child ends where its handler does. The frames above a handler are the parent's, and so are the
threads, the transaction, the database's connection and the membership that they would end on the way out. The child has
inherited the frames and nothing behind them: it would roll back its parent's work, handle its messages a second time,
or wait for ever. Forked children leave by `os._exit`, and so does this one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol
from weakref import WeakSet

from holdfast.errors import UsageError

_log: Final = logging.getLogger("holdfast.client")


def say(line: str) -> None:
    """A line for the operator, by `logging`; a program that has not set that up shows it on standard error.

    Nothing depends on its being said: standard error may be closed, or nobody's. Where nobody has set `logging` up, its
    own last resort is not used: it swallows what a handler of a signal raises meanwhile, such as a time limit.
    """
    with suppress(OSError, ValueError):
        if _log.hasHandlers():
            _log.warning("holdfast: %s", line)
        elif sys.stderr is not None and _log.isEnabledFor(logging.WARNING):
            print(f"holdfast: {line}", file=sys.stderr, flush=True)


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT stop; whatever handled them before is put back. Other threads than the main one cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, lambda *_: stop()) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Runs:
    """What runs until it is stopped, one run at a time, in the process that made it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.is_stopping = False
        self._running_in: int | None = None
        """The process of the run that goes on."""

    def stop(self) -> None:
        """End `run` cleanly, with what is finished committed; safe from any thread and from signal handlers."""
        self.is_stopping = True

    @contextmanager
    def _one_run(self) -> Iterator[None]:
        """Refuse a second run beside the one that goes on in this process."""
        if self._running_in not in (None, os.getpid()):
            raise UsageError(
                f"this {self._what} runs in the process that this one was forked from: make one in the child, after "
                "the fork"
            )
        if self._running_in is not None:
            raise UsageError(f"this {self._what} is running: one run at a time")
        self._running_in = os.getpid()
        try:
            yield
        finally:
            self._running_in = None
            self.is_stopping = False


class Closes(Protocol):
    def close(self) -> object: ...


_closed_in_child: WeakSet[Closes] = WeakSet()


def close_in_child(each: Closes) -> None:
    """Close something in children that are forked from here on: what they do in it does not count."""
    _closed_in_child.add(each)


def _after_fork() -> None:
    for each in list(_closed_in_child):
        each.close()


os.register_at_fork(after_in_child=_after_fork)


def end_if_forked(pid: int, error: BaseException | None = None) -> None:
    """Called when a handler is done, with what it raised, and the process that it was called in."""
    if os.getpid() == pid:
        return
    code = 1
    if error is None:
        code = 0
    elif isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = (error.code or 0) & 0xFF
    else:
        with suppress(Exception):
            traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def ending_in_child(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where a transaction is open around the work."""
    pid = os.getpid()

    def watched(*arguments: Any) -> Any:
        try:
            outcome = work(*arguments)
        except BaseException as error:
            end_if_forked(pid, error)
            raise
        end_if_forked(pid)
        return outcome

    return watched
