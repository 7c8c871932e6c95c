"""What became of a message: two moments, each of which can be waited for or called back about.

*Stored* means that the message is on this machine's disk, in the spool, and will be sent whatever happens to this
process; without a spool it never comes by itself. *Delivered* means that the broker has acknowledged it: its topic,
partition and offset are known; or that it failed for good, and why.

A delivery is settled once, by the thread that hears of it; waiting and calling back are safe from any thread. A failure
that nobody was told of, by a callback or by waiting, is named when the producer is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition, Lock
from time import monotonic
from typing import Any, Final, NamedTuple, Protocol

from holdfast.client.errors import ClientError, DeliveryFailed, Undelivered

_log = logging.getLogger(__name__)


class Delivered(NamedTuple):
    """Where a message is now."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


SERVE_SECONDS: Final = 0.05
"""How long one serving of reports lasts at most before the outcome is looked at again."""
HANDOVER_SECONDS: Final = 0.01
FAILURES_KEPT_MAX: Final = 1000
"""How many failures that nobody was told of are kept by name; more are counted."""

Callback = Callable[["Delivery"], None]
Serve = Callable[[float], object]


class Waiting:
    """Those who wait for any delivery of one producer: one lock for all of them, taken only when somebody waits.

    With `serve`, a function that brings reports for so many seconds, one thread at a time serves: a report that two
    wait for goes to one of them, and the other would sleep on.
    """

    __slots__ = ("_serve", "_serving", "condition", "count", "kept", "on_stop", "stopped")

    def __init__(self, serve: Serve | None = None) -> None:
        self.condition = Condition()
        self.count = 0
        self._serve = serve
        self._serving = Lock()
        self.kept: set[Delivery] = set()
        """Deliveries that somebody must be called back about, whether or not anybody holds them."""
        self.stopped: ClientError | None = None
        """Why nothing more will be delivered, once that is so."""
        self.on_stop: list[Callable[[ClientError], None]] = []
        """Whom to tell, when it is."""

    def serve_with(self, serve: Serve) -> None:
        """From now on those who wait for reports bring them with this."""
        self._serve = serve

    def wait(self, is_over: Callable[[], bool], timeout: float | None, *, reports: bool = True) -> bool:
        """Wait until `is_over`, which others bring about; false when the time has passed first.

        Whether it is `reports` that bring it about: then whoever waits serves them.
        """
        deadline = None if timeout is None else monotonic() + timeout
        with self.condition:
            self.count += 1
        try:
            while not is_over():
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    return False
                seconds = SERVE_SECONDS if left is None else min(left, SERVE_SECONDS)
                if not reports or not self.serve(seconds):
                    self._sleep(is_over, left, reports=reports)
        finally:
            with self.condition:
                self.count -= 1
        return True

    def _sleep(self, is_over: Callable[[], bool], left: float | None, *, reports: bool) -> None:
        if reports and self._serve is not None:
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
        self.wake()
        return True

    def stop(self, why: ClientError) -> None:
        """Nothing more will be delivered: nobody shall wait for it."""
        if self.stopped is None:
            self.stopped = why
        self.wake()
        for tell in self.on_stop:
            tell(why)

    def wake(self) -> None:
        # Read without the lock: whoever begins to wait looks at the outcome after it has counted itself.
        if self.count:
            with self.condition:
                self.condition.notify_all()


class _Hooks:
    """What most deliveries never need: who is to be called back, and who was told."""

    __slots__ = ("callbacks", "is_told", "stored_callbacks")

    def __init__(self) -> None:
        self.callbacks: tuple[Callback, ...] = ()
        self.stored_callbacks: tuple[Callback, ...] = ()
        self.is_told = False


class Delivery:
    """One message on its way."""

    __slots__ = ("__weakref__", "_hooks", "_place", "_waiting", "error", "key", "partition", "topic")

    def __init__(self, waiting: Waiting, topic: str, partition: int | None, key: bytes | None) -> None:
        self._waiting = waiting
        self.topic = topic
        self.partition = partition
        """The partition asked for or chosen; None as long as nobody has chosen."""
        self.key = key
        self.error: ClientError | None = None
        """Why it will not arrive, once that is so."""
        self._place: Any = None
        """Partition, offset and timestamp, once the broker has acknowledged the message; or the report that has them,
        without the value: to ask it costs more than to keep it, and few want to know. Of a spooled message, which has
        the others elsewhere, the offset."""
        self._hooks: _Hooks | None = None

    def __repr__(self) -> str:
        state = self.delivered or self.error or ("stored" if self.is_stored else "under way")
        return f"<Delivery to {self.topic}: {state}>"

    @property
    def delivered(self) -> Delivered | None:
        """Where it is, once the broker has acknowledged it."""
        place = self._place
        if place is None:
            return None
        if place.__class__ is not tuple:
            place = (place.partition(), place.offset(), place.timestamp()[1])
        return Delivered(self.topic, *place)

    has_spool = False
    """Whether a spool tells when the message is stored, before any report."""

    @property
    def is_stored(self) -> bool:
        """Whether the message is in the spool, on disk."""
        return False

    @property
    def is_acknowledged(self) -> bool:
        """Whether the broker has it."""
        return self._place is not None

    @property
    def is_settled(self) -> bool:
        return self.error is not None or self.is_acknowledged

    def wait_stored(self, timeout: float | None = None) -> None:
        """Return when the message is on this machine's disk, or is already delivered; raise if it will be neither."""
        if not self.is_stored and not self.is_settled:
            self._waiting.wait(lambda: self.is_stored or self.is_settled, timeout, reports=not self.has_spool)
        self._raise_failure()
        if not self.is_stored and not self.is_acknowledged:
            raise TimeoutError(f"the message for {self.topic} was not stored within {timeout} s")

    def wait(self, timeout: float | None = None) -> Delivered:
        """Where the message is, when the broker has acknowledged it; raises `DeliveryFailed` when it never will."""
        if not self.is_settled:
            waiting = self._waiting
            waiting.wait(lambda: self.is_settled or waiting.stopped is not None, timeout)
        self._raise_failure()
        delivered = self.delivered
        if delivered is None:
            if self._waiting.stopped is not None:
                raise self._waiting.stopped
            raise TimeoutError(f"the message for {self.topic} was not acknowledged within {timeout} s")
        return delivered

    def _raise_failure(self) -> None:
        if self.error is not None:
            with self._waiting.condition:
                self._hook().is_told = True
            raise self.error

    def then(self, callback: Callback) -> Delivery:
        """Call back once delivered or failed: from another thread, or at once when it is already so.

        What a callback raises is logged and goes nowhere else.
        """
        with self._waiting.condition:
            self._hook().is_told = True
        return self.notify(callback)

    def notify(self, callback: Callback) -> Delivery:
        """As `then`, for whoever only passes it on: a failure counts as told when somebody asks for it."""
        with self._waiting.condition:
            hooks = self._hook()
            hooks.callbacks = (*hooks.callbacks, callback)
            self._waiting.kept.add(self)
        # Looked at after the callback is in its place: it is called here, or by the thread that settles.
        if self.is_settled:
            self.call_back()
        return self

    def when_stored(self, callback: Callback) -> Delivery:
        """Call back once stored in the spool, or failed: from another thread, or at once when it is already so."""
        with self._waiting.condition:
            hooks = self._hook()
            hooks.stored_callbacks = (*hooks.stored_callbacks, callback)
            self._waiting.kept.add(self)
        if self.is_stored or self.is_settled:
            self.call_back_stored()
        return self

    def _hook(self) -> _Hooks:
        """Needs the condition of those who wait."""
        if self._hooks is None:
            self._hooks = _Hooks()
        return self._hooks

    @property
    def is_told(self) -> bool:
        """Whether somebody has heard of its failure, or will."""
        return self._hooks is not None and self._hooks.is_told

    # Settling; by the producer alone, which wakes those who wait when it has settled many

    def set_delivered(self, partition: int, offset: int, timestamp_ms: int) -> None:
        self._place = (partition, offset, timestamp_ms)
        if self._hooks is not None:
            self.call_back()

    def set_failed(self, error: ClientError) -> None:
        self.error = error
        if self._hooks is not None:
            self.call_back()

    def call_back(self) -> None:
        """Settled: call whoever wants to be called."""
        self.call_back_stored()
        with self._waiting.condition:
            hooks = self._hook()
            callbacks, hooks.callbacks = hooks.callbacks, ()
            self._waiting.kept.discard(self)
        self._call(callbacks)

    def call_back_stored(self) -> None:
        with self._waiting.condition:
            hooks = self._hook()
            callbacks, hooks.stored_callbacks = hooks.stored_callbacks, ()
            if not hooks.callbacks:
                self._waiting.kept.discard(self)
        self._call(callbacks)

    @property
    def awaits_storing(self) -> bool:
        """Whether somebody wants to be called back when it is stored."""
        return self._hooks is not None and bool(self._hooks.stored_callbacks)

    def _call(self, callbacks: tuple[Callback, ...]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001  the message is delivered or not, whatever its callback does
                _log.exception("a callback of %r failed", self)

    def as_undelivered(self) -> Undelivered:
        reason = (
            self.error.reason if isinstance(self.error, DeliveryFailed) else str(self.error or "no answer")
        )
        return Undelivered(self.topic, self.partition, self.key, reason)


class SendMethod(Protocol):
    """What `Producer.send` is."""

    def __call__(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: Any = (),
        partition: int | None = None,
        timestamp_ms: int = -1,
    ) -> Delivery: ...


class Failures:
    """What failed for good, to be named by whoever asks next unless somebody was told before."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: list[Delivery] = []
        self._named: list[Undelivered] = []
        """Those that are named in any case."""
        self._more = 0

    def add(self, delivery: Delivery, *, although_told: bool = False) -> None:
        """Remember a delivery that has just failed."""
        if delivery.is_told and not although_told:
            return
        with self._lock:
            if len(self._kept) + len(self._named) >= FAILURES_KEPT_MAX:
                self._kept = [each for each in self._kept if not each.is_told]
            if len(self._kept) + len(self._named) >= FAILURES_KEPT_MAX:
                self._more += 1
            elif although_told:
                self._named.append(delivery.as_undelivered())
            else:
                self._kept.append(delivery)

    def take(self) -> tuple[list[Undelivered], int]:
        """Those that nobody was told of, as far as they are kept, and how many there are."""
        with self._lock:
            kept, self._kept = [each for each in self._kept if not each.is_told], []
            named, self._named = self._named, []
            more, self._more = self._more, 0
        named = [*(each.as_undelivered() for each in kept), *named]
        return named, len(named) + more
