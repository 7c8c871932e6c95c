"""Handlers that fork: the child ends where its handler does.

The frames above a handler are the parent's, and so are the threads, the transaction, the database's connection and the
membership that they would end on the way out. The child has inherited the frames and nothing behind them: it would roll
back its parent's work, handle its messages a second time, or wait for ever. Forked children leave by `os._exit`, and so
does this one.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from holdfast.errors import UsageError


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


def check_idle(pid: int | None, what: str) -> None:
    """Refuse a second run beside the one that goes on in this process."""
    if pid is not None and pid != os.getpid():
        raise UsageError(
            f"this {what} runs in the process that this one was forked from: make one in the child, after the fork"
        )
    if pid is not None:
        raise UsageError(f"this {what} is running: one run at a time")


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
