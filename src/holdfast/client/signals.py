"""Ending a client by a signal, and its words for whoever runs it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

_log: Final = logging.getLogger("holdfast.client")


def say(line: str) -> None:
    """A line for the operator, by `logging`; a program that has not set that up shows it on standard error.

    Nothing depends on its being said: standard error may be closed, or nobody's.
    """
    with suppress(OSError, ValueError):
        _log.warning("holdfast: %s", line)


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
