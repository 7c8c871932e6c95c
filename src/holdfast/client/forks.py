"""Handlers that fork: the child ends where its handler does.

The frames above a handler are the parent's, and so are the threads, the transaction, the database's connection and the
membership that they would end on the way out. The child has inherited the frames and nothing behind them: it would roll
back its parent's work, or wait for ever. Forked children leave by `os._exit`, and so does this one.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def end_if_forked(pid: int, error: BaseException) -> None:
    """Called with what a handler raised, and the process that it was called in."""
    if os.getpid() == pid:
        return
    code = 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
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
            return work(*arguments)
        except BaseException as error:
            end_if_forked(pid, error)
            raise

    return watched
