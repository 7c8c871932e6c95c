"""What became of a message: two moments, each of which can be waited for or called back about.

*Stored* means that the message is on this machine's disk, in the spool, and will be sent whatever happens to this
process; without a spool it never comes by itself. *Delivered* means that the broker has acknowledged it: its topic,
partition and offset are known; or that it failed for good, and why.

A delivery is settled once, by the thread that hears of it first; waiting and calling back are safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Lock
from time import monotonic
from typing import Final, NamedTuple

from holdfast.client.errors import ClientError, DeliveryFailed, Undelivered


class Delivered(NamedTuple):
    """Where a message is now."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


SERVE_SECONDS: Final = 0.05
"""How long one serving of reports lasts at most before the outcome is looked at again."""
HANDOVER_SECONDS: Final = 0.01

Callback = Callable[["Delivery"], None]
_NOTHING: Final[tuple[Callback, ...]] = ()


class Waiting:
    """Those who wait for any delivery of one producer: one lock for all of them, taken only when somebody waits.

    With `serve`, a function that brings reports for so many seconds, one thread at a time serves: a report that two
    wait for goes to one of them, and the other would sleep on.
    """

    __slots__ = ("_serve", "_serving", "condition", "count")

    def __init__(self, serve: Callable[[float], object] | None = None) -> None:
        self.condition = Condition()
        self.count = 0
        self._serve = serve
        self._serving = Lock()

    def wait(self, is_over: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `is_over`, which others bring about; false when the time has passed first."""
        deadline = None if timeout is None else monotonic() + timeout
        with self.condition:
            self.count += 1
        try:
            while not is_over():
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    return False
                if not self.serve(SERVE_SECONDS if left is None else min(left, SERVE_SECONDS)):
                    self._sleep(is_over, left)
        finally:
            with self.condition:
                self.count -= 1
        return True

    def _sleep(self, is_over: Callable[[], bool], left: float | None) -> None:
        if self._serve is not None:
            # Whoever serves now may stop.
            left = HANDOVER_SECONDS if left is None else min(left, HANDOVER_SECONDS)
        with self.condition:
            self.condition.wait_for(is_over, left)

    def serve(self, seconds: float) -> bool:
        """Bring reports, unless there is nothing to serve with or another thread does it already."""
        if self._serve is None or not self._serving.acquire(blocking=False):
            return False
        try:
            self._serve(seconds)
        finally:
            self._serving.release()
        return True

    def wake(self) -> None:
        # Read without the lock: whoever begins to wait looks at the outcome after it has counted itself.
        if self.count:
            with self.condition:
                self.condition.notify_all()


class Delivery:
    """One message on its way."""

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_stored_callbacks",
        "_waiting",
        "delivered",
        "error",
        "is_stored",
        "key",
        "partition",
        "topic",
    )

    def __init__(self, waiting: Waiting, topic: str, partition: int | None, key: bytes | None) -> None:
        self._waiting = waiting
        self.topic = topic
        self.partition = partition
        self.key = key
        self.is_stored = False
        """Whether the message is in the spool, on disk."""
        self.delivered: Delivered | None = None
        """Where it is, once the broker has acknowledged it."""
        self.error: ClientError | None = None
        """Why it will not arrive, once that is so."""
        self._callbacks = _NOTHING
        self._stored_callbacks = _NOTHING

    def __repr__(self) -> str:
        state = self.delivered or self.error or ("stored" if self.is_stored else "under way")
        return f"<Delivery to {self.topic}: {state}>"

    @property
    def is_settled(self) -> bool:
        return self.delivered is not None or self.error is not None

    def wait_stored(self, timeout: float | None = None) -> None:
        """Return when the message is on this machine's disk, or is already delivered; raise if it will be neither."""
        if not self.is_stored and not self.is_settled:
            self._waiting.wait(lambda: self.is_stored or self.is_settled, timeout)
        if self.error is not None:
            raise self.error
        if not self.is_stored and self.delivered is None:
            raise TimeoutError(f"the message for {self.topic} was not stored within {timeout} s")

    def wait(self, timeout: float | None = None) -> Delivered:
        """Where the message is, when the broker has acknowledged it; raises `DeliveryFailed` when it never will."""
        if not self.is_settled:
            self._waiting.wait(lambda: self.is_settled, timeout)
        if self.error is not None:
            raise self.error
        if self.delivered is None:
            raise TimeoutError(f"the message for {self.topic} was not acknowledged within {timeout} s")
        return self.delivered

    def then(self, callback: Callback) -> Delivery:
        """Call back once delivered or failed: from another thread, or at once when it is already so."""
        with self._waiting.condition:
            self._callbacks = (*self._callbacks, callback)
        # Looked at after the callback is in its place: it is called here, or by the thread that settles.
        if self.is_settled:
            self._call_back()
        return self

    def when_stored(self, callback: Callback) -> Delivery:
        """Call back once stored in the spool: from another thread, or at once when it is already so."""
        with self._waiting.condition:
            self._stored_callbacks = (*self._stored_callbacks, callback)
        if self.is_stored:
            self._call_back_stored()
        return self

    @property
    def has_callbacks(self) -> bool:
        """Whether somebody must be told although nobody may hold this object any more."""
        return bool(self._callbacks or self._stored_callbacks)

    # Settling; by the producer alone

    def set_stored(self) -> None:
        self.is_stored = True
        if self._stored_callbacks:
            self._call_back_stored()
        self._waiting.wake()

    def set_delivered(self, delivered: Delivered) -> None:
        self.delivered = delivered
        if self._callbacks:
            self._call_back()
        self._waiting.wake()

    def set_failed(self, error: ClientError) -> None:
        self.error = error
        if self._callbacks:
            self._call_back()
        self._waiting.wake()

    def _call_back(self) -> None:
        with self._waiting.condition:
            callbacks, self._callbacks = self._callbacks, _NOTHING
        for callback in callbacks:
            callback(self)

    def _call_back_stored(self) -> None:
        with self._waiting.condition:
            callbacks, self._stored_callbacks = self._stored_callbacks, _NOTHING
        for callback in callbacks:
            callback(self)

    def as_undelivered(self) -> Undelivered:
        reason = (
            self.error.reason if isinstance(self.error, DeliveryFailed) else str(self.error or "no answer")
        )
        return Undelivered(self.topic, self.partition, self.key, reason)
