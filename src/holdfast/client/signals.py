"""Ending a client by a signal, and its words for whoever runs it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


def say(line: str) -> None:
    """One line for the operator. Nothing depends on its being said: standard error may be closed, or nobody's."""
    if sys.stderr is not None:  # or `print` takes standard output, which belongs to the program
        with suppress(OSError, ValueError):
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
