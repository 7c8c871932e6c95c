"""Whether to sleep after an answer or to look for the next request a little longer.

A client that waits for each answer sends its next request at once, and a loop that is awake finds it without the
processor having to be woken, which takes as long as the request itself. Awake costs processor time, so it has to pay:
the loop stays awake only while requests have mostly come soon enough to be found so. Clients that send now and then
find it asleep.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Protocol

CREDIT_MAX: Final = 16
"""Answers in a row that came too late to be waited for, after which nobody is waited for any more."""


class Loop(Protocol):
    """What is needed of an event loop."""

    def call_soon(self, callback: Callable[[], object], /) -> Any: ...


class StayingAwake:
    def __init__(self, loop: Loop, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._loop = loop
        self._seconds = seconds
        """How long the next request is waited for. 0: never."""
        self._clock = clock
        self._answered_at = 0.0
        self._credit = 0
        self._is_polling = False

    def answered(self) -> None:
        """A response has left."""
        now = self._clock()
        if now - self._answered_at < self._seconds:
            if self._credit < CREDIT_MAX:
                self._credit += 1
        elif self._credit:
            self._credit -= 1
        self._answered_at = now
        if self._credit and not self._is_polling:
            self._is_polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """While something is scheduled, the loop asks the sockets without waiting for them."""
        if self._credit and self._clock() - self._answered_at < self._seconds:
            self._loop.call_soon(self._poll)
        else:
            self._is_polling = False
