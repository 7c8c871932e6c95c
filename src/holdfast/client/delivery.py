"""What became of a message: two moments, each of which can be waited for or called back about.

*Stored* means that the message is on this machine's disk, in the spool, and will be sent whatever happens to this
process; without a spool it never comes by itself. *Delivered* means that the broker has acknowledged it: its topic,
partition and offset are known; or that it failed for good, and why.

A delivery is settled once, by a thread of the producer; waiting and calling back are safe from any thread, and leave
nothing locked when a signal handler interrupts them. A failure that nobody was told of, by a callback or by waiting, is
named when the producer is closed.
"""

from __future__ import annotations

import logging
from _thread import TIMEOUT_MAX, allocate_lock
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from time import monotonic
from typing import Any, Final, NamedTuple

from holdfast.client import exit_guard
from holdfast.client.errors import NAMED_MAX, ClientError, DeliveryFailed, Undelivered
from holdfast.errors import UsageError

_log = logging.getLogger(__name__)


class Delivered(NamedTuple):
    """Where a message is now."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


FAILURES_KEPT_MAX: Final = 1000
"""How many failures that nobody was told of are kept with their deliveries; some more by name, the rest are counted."""

Callback = Callable[["Delivery"], None]


class Waiting:
    """Those who wait for any delivery of one producer, and the threads of ours that wake them."""

    __slots__ = ("_sleepers", "kept", "on_stop", "orphaned", "stopped", "threads")

    def __init__(self) -> None:
        self._sleepers: list[Bell] = []
        self.threads: set[int] = set()
        """Those that settle deliveries, and call back: they cannot wait for themselves."""
        self.kept: set[Delivery] = set()
        """Deliveries that somebody must be called back about, whether or not anybody holds them."""
        self.stopped: ClientError | None = None
        """Why nothing more will be delivered, once that is so."""
        self.on_stop: list[Callable[[ClientError], None]] = []
        """Whom to tell, when it is."""
        self.orphaned: ClientError | None = None
        """Why nobody can wait here, in a process that was forked: it has no threads of ours."""

    @contextmanager
    def settling(self) -> Iterator[None]:
        """This thread settles deliveries, and calls back."""
        self.threads.add(get_ident())
        try:
            yield
        finally:
            self.threads.discard(get_ident())  # another thread may get this number

    @property
    def is_ours(self) -> bool:
        """Whether this code runs in a thread that settles deliveries."""
        return get_ident() in self.threads

    def check_thread(self) -> None:
        """Refuse what would wait for the thread that it is called in."""
        if self.is_ours:
            raise UsageError(
                "a delivery callback cannot wait for deliveries, nor flush or close the producer: it runs in the "
                "thread that delivers. Let another thread do it"
            )

    @property
    def is_awaited(self) -> bool:
        return bool(self._sleepers)

    def wait(self, is_over: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `is_over`, which threads of ours bring about; false when the time has passed first."""
        if is_over():
            return True
        if self.orphaned is not None:
            raise self.orphaned
        if timeout != 0:
            self.check_thread()
        deadline = None if timeout is None else monotonic() + timeout
        bell = Bell()
        self._sleepers.append(bell)
        try:
            # Looked at again when the bell is known: whoever changes something rings afterwards.
            while not is_over():
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    return False
                bell.wait(left)
        finally:
            self._sleepers.remove(bell)
        return True

    def stop(self, why: ClientError) -> None:
        """Nothing more will be delivered: nobody shall wait for it."""
        if self.stopped is None:
            self.stopped = why
        self.wake()
        for tell in self.on_stop:
            tell(why)

    def wake(self) -> None:
        if self._sleepers:
            for bell in self._sleepers.copy():
                bell.ring()


class _Hooks:
    """What most deliveries never need: who is to be called back, and who was told."""

    __slots__ = ("callbacks", "is_told", "stored_callbacks")

    def __init__(self) -> None:
        self.callbacks: deque[Callback] = deque()
        self.stored_callbacks: deque[Callback] = deque()
        self.is_told = False


_first_hooks: dict[Delivery, _Hooks] = {}
"""Of deliveries that are getting theirs now: when several threads give them at once, all use the same."""


class Delivery:
    """One message on its way.

    There is no `__init__`: the one place that makes deliveries of a kind sets all that there is to them.
    """

    __slots__ = ("__weakref__", "_hooks", "_place", "_waiting", "error", "key", "partition", "topic")

    _waiting: Waiting
    topic: str
    partition: int | None
    """The partition asked for or chosen; None as long as nobody has chosen."""
    key: bytes | None
    error: ClientError | None
    """Why it will not arrive, once that is so."""
    _place: Any
    """Partition, offset and timestamp, once the broker has acknowledged the message; or the report that has them,
    without the value: to ask it costs more than to keep it, and few want to know. Of a spooled message, which has the
    others elsewhere, the offset."""
    _hooks: _Hooks | None

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
            self._waiting.wait(lambda: self.is_stored or self.is_settled, timeout)
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
            self.set_told()
            raise self.error

    def then(self, callback: Callback) -> Delivery:
        """Call back once delivered or failed: from another thread, or at once when it is already so.

        What a callback raises is logged and goes nowhere else. It cannot wait for deliveries, flush or close.
        """
        return self.notify(callback, tells=True)

    def notify(self, callback: Callback, *, tells: bool = False) -> Delivery:
        """As `then`, for whoever only passes it on: a failure counts as told when somebody asks for it."""
        hooks = self._hook()
        hooks.callbacks.append(callback)
        hooks.is_told = hooks.is_told or tells
        self._waiting.kept.add(self)
        # Looked at after the callback is in its place: it is called here, or by the thread that settles.
        if self.is_settled:
            self.call_back()
        return self

    def when_stored(self, callback: Callback) -> Delivery:
        """Call back once stored in the spool, or failed: from another thread, or at once when it is already so."""
        self._hook().stored_callbacks.append(callback)
        self._waiting.kept.add(self)
        if self.is_stored or self.is_settled:
            self.call_back_stored()
        return self

    def _hook(self) -> _Hooks:
        if self._hooks is None:
            # Whoever finds others here than the first has come after these were put in their place.
            first = _first_hooks.setdefault(self, _Hooks())
            if self._hooks is None:
                self._hooks = first
            _first_hooks.pop(self, None)
        return self._hooks

    def set_told(self) -> None:
        """Somebody has heard of its failure, or will."""
        self._hook().is_told = True

    @property
    def is_told(self) -> bool:
        """Whether somebody has heard of its failure, or will."""
        return self._hooks is not None and self._hooks.is_told

    # Settling; by threads of the producer alone, which wake those who wait when they have settled many

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
        hooks = self._hook()
        self._call(hooks.stored_callbacks)
        self._call(hooks.callbacks)
        self._waiting.kept.discard(self)

    def call_back_stored(self) -> None:
        hooks = self._hook()
        self._call(hooks.stored_callbacks)
        if not hooks.callbacks:
            self._waiting.kept.discard(self)

    @property
    def awaits_storing(self) -> bool:
        """Whether somebody wants to be called back when it is stored."""
        return self._hooks is not None and bool(self._hooks.stored_callbacks)

    def _call(self, callbacks: deque[Callback]) -> None:
        while callbacks:
            try:
                callback = callbacks.popleft()
            except IndexError:
                # Another thread calls it.
                return
            try:
                callback(self)
            except Exception:  # noqa: BLE001  the message is delivered or not, whatever its callback does
                _log.exception("a callback of %r failed", self)
            except BaseException as ending:
                if not self._waiting.is_ours:
                    raise
                # It ends no program from here, and must not end this thread: it is said, and the exit code tells.
                _log.exception("a callback of %r raised %s", self, type(ending).__name__)
                exit_guard.owe(0, f"a delivery callback raised {type(ending).__name__}, which ended nothing")

    def as_undelivered(self) -> Undelivered:
        reason = (
            self.error.reason if isinstance(self.error, DeliveryFailed) else str(self.error or "no answer")
        )
        return Undelivered(self.topic, self.partition, self.key, reason)


class Seen(NamedTuple):
    """Failures that nobody was told of."""

    named: list[Undelivered]
    """The first of them, when they are many."""
    total: int
    tell: Callable[[], object]
    """Somebody was told of these."""


def seen_together(several: Sequence[Failures]) -> Seen:
    each_seen = [each.seen() for each in several]
    return Seen(
        [undelivered for seen in each_seen for undelivered in seen.named],
        sum(seen.total for seen in each_seen),
        lambda: [seen.tell() for seen in each_seen],
    )


class Failures:
    """What failed for good, to be named by whoever asks until somebody is told.

    One thread adds; any may look, and tell.
    """

    def __init__(self) -> None:
        self._failed: list[Delivery | Undelivered | None] = []
        """All that ever failed. Deliveries are named unless somebody was told, the others in any case; None is only
        counted."""
        self._told = 0
        """Up to here somebody was told. Two threads that move it at once may set it back: nothing is left unsaid."""

    def add(self, delivery: Delivery, *, although_told: bool = False) -> None:
        """Remember a delivery that has just failed."""
        if delivery.is_told and not although_told:
            return
        if len(self._failed) - self._told >= FAILURES_KEPT_MAX:
            self._pass_told()
        kept = len(self._failed) - self._told
        if kept >= FAILURES_KEPT_MAX + NAMED_MAX:
            self._failed.append(None)
        elif although_told or kept >= FAILURES_KEPT_MAX:
            self._failed.append(delivery.as_undelivered())
        else:
            self._failed.append(delivery)

    def _pass_told(self) -> None:
        through = self._told
        while through < len(self._failed) and _is_told(self._failed[through]):
            through += 1
        self._tell(through)

    def seen(self) -> Seen:
        """Those that nobody was told of, as far as they are kept, and how many there are."""
        told = self._told
        failed = self._failed[told:]
        left = [each for each in failed if not _is_told(each)]
        named = [
            each.as_undelivered() if isinstance(each, Delivery) else each for each in left if each is not None
        ]
        return Seen(named, len(left), lambda: self._tell(told + len(failed)))

    def _tell(self, through: int) -> None:
        begin = self._told
        if begin < through:
            self._told = through
            self._failed[begin:through] = [None] * (through - begin)  # nobody needs them any more


def _is_told(failed: Delivery | Undelivered | None) -> bool:
    return isinstance(failed, Delivery) and failed.is_told


class Bell:
    """Waking a thread without a lock that a signal could leave held.

    The application's threads run signal handlers at any moment, and a handler may raise or call us again. So they never
    hold anything that a thread of ours needs: what they hand over goes into queues by one call into C, and they wait
    for, and ring, a `Bell`. Everything else is done by threads of ours, where no signal handler ever runs.

    One thread waits for it; whoever rings wakes it, now or at its next wait. Several rings are one.
    """

    __slots__ = ("_silence",)

    def __init__(self) -> None:
        self._silence = allocate_lock()
        self._silence.acquire()

    def ring(self) -> None:
        if self._silence.locked():
            try:
                self._silence.release()
            except RuntimeError:
                # Another thread rang at the same moment.
                return

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it rang, before the seconds had passed."""
        return self._silence.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), TIMEOUT_MAX))
