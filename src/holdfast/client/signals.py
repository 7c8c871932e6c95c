"""Ending a client by a signal, and its words for whoever runs it."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

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
