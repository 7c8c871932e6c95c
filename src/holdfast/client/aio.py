"""The producer for asyncio: the same guarantees, and nothing that holds up the event loop.

    async with AsyncProducer("localhost:9092", spool="/var/spool/orders", value=as_json) as producer:
        delivery = producer.send("orders", {"id": 7}, key="7")
        await delivery.stored()
        place = await delivery.delivered()

`send` returns at once. When there is no room, the message waits in line, those sent after it behind it, until there is
or its time has passed; awaiting any of them is what slows the sender down, and a line that gets too long is refused.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar, Unpack

from holdfast.client import exit_guard
from holdfast.client.delivery import Delivered, Delivery, Seen, Waiting
from holdfast.client.errors import ClientError, LeftBehind, SendTimeout, Undelivered, UndeliveredMessages
from holdfast.client.producer import (
    NO_TIMESTAMP,
    SEND_TIMEOUT_SECONDS,
    FlushReport,
    HeadersLike,
    Producer,
    ProducerOptions,
    as_headers,
    note_left_behind,
)
from holdfast.client.spool.store import SpoolFull
from holdfast.errors import UsageError

T = TypeVar("T")

LOOK_SECONDS: Final = 0.5
LINE_MAX: Final = 10_000
"""How many messages may wait for room: their senders do not wait for any of them."""


class AsyncDelivery:
    """One message on its way, to be awaited: `stored()`, then `delivered()`. Awaiting it is awaiting `delivered()`."""

    __slots__ = ("_inner", "_producer", "_refused", "key", "topic")

    def __init__(self, producer: AsyncProducer, topic: str, key: bytes | None) -> None:
        self._producer = producer
        self._inner: Delivery | None = None
        """Nothing as long as the message waits for room."""
        self._refused: BaseException | None = None
        """Why it got none."""
        self.topic = topic
        self.key = key

    def __repr__(self) -> str:
        return repr(self._inner) if self._inner is not None else f"<Delivery to {self.topic}: waits for room>"

    @property
    def is_stored(self) -> bool:
        return self._inner is not None and self._inner.is_stored

    @property
    def is_settled(self) -> bool:
        return self._refused is not None or (self._inner is not None and self._inner.is_settled)

    @property
    def error(self) -> BaseException | None:
        """Why it will not arrive, once that is so."""
        return self._refused or (self._inner.error if self._inner is not None else None)

    async def stored(self) -> None:
        """Return when the message is on this machine's disk, or is already delivered; raise if it will be neither."""
        inner = await self._handed_over()
        if not inner.is_stored and not inner.is_settled:
            await self._producer._until(inner, inner.when_stored)
        inner.wait_stored(0)

    async def delivered(self) -> Delivered:
        """Where the message is, when the broker has acknowledged it; raises `DeliveryFailed` when it never will."""
        inner = await self._handed_over()
        if not inner.is_settled:
            await self._producer._until(inner, inner.notify)
        return inner.wait(0)

    def __await__(self) -> Generator[Any, None, Delivered]:
        return self.delivered().__await__()

    async def _handed_over(self) -> Delivery:
        while self._inner is None:
            if self._refused is not None:
                self._producer._told(self)
                raise self._refused
            await self._producer._moved.wait()
        return self._inner


class _InLine(NamedTuple):
    delivery: AsyncDelivery
    arguments: tuple[Any, ...]


class AsyncProducer:
    """Takes what `Producer` takes. Made in an event loop, and used in that one alone."""

    def __init__(self, bootstrap: str, **options: Unpack[ProducerOptions]) -> None:
        inspect.signature(Producer).bind(
            bootstrap, **options
        )  # a name that is wrong shows here, and not at the start
        self._make = lambda: Producer(bootstrap, **options)
        self._send_timeout = options.get("send_timeout", SEND_TIMEOUT_SECONDS)
        self._producer: Producer | None = None
        self._starting: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: deque[_InLine] = deque()
        self._line_task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self._refused: dict[AsyncDelivery, BaseException] = {}
        """What got no room, as long as nobody was told."""
        self._closing: asyncio.Task[None] | None = None
        self._left = LeftBehind([], 0)
        self._stopped_by: ClientError | None = None
        """What closing left behind, and why, as long as nobody was told."""
        self._is_orphaned = self._is_abandoned = False
        self._waiting: dict[Delivery, set[asyncio.Future[None]]] = {}
        """Futures of those who await something."""
        self._woken: deque[asyncio.Future[None]] = deque()
        self._is_waking = False
        self._heard: Waiting | None = None

    # Beginning and ending

    async def start(self) -> AsyncProducer:
        """Open the spool and the producer; `async with` does it by itself."""
        if self._producer is None:
            if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
                # One producer, however many start it, and though the first of them gives up waiting.
                self._loop = asyncio.get_running_loop()
                self._starting = self._loop.create_task(self._start())
            await asyncio.shield(self._starting)
        return self

    async def _start(self) -> None:
        self._producer = await _in_thread(self._make)
        # Watched here, with what stands in line, and not twice.
        exit_guard.watch(self)
        exit_guard.unwatch(self._producer)

    async def close(self, timeout: float | None = None) -> None:
        """As `Producer.close`; raises `UndeliveredMessages` for what did not arrive.

        Whoever gives up waiting for it stops only the waiting; the next to call it hears how it ended.
        """
        if self._is_orphaned:
            return
        if self._starting is not None and not self._starting.done():
            await asyncio.wait((self._starting,))
        if self._producer is None:
            return
        if self._closing is None or self._closing.cancelled():
            self._closing = asyncio.get_running_loop().create_task(self._close(self._producer, timeout))
        await asyncio.shield(self._closing)
        if self._is_abandoned:
            return
        refused = [_as_undelivered(delivery, error) for delivery, error in self._refused.items()]
        left, stopped = self._left, self._stopped_by
        self._refused.clear()
        self._left, self._stopped_by = LeftBehind([], 0), None
        exit_guard.unwatch(self)
        if refused or left.total:
            undelivered = UndeliveredMessages([*refused, *left.named], len(refused) + left.total)
            raise exit_guard.raised(undelivered) from stopped
        if stopped is not None:
            raise stopped

    async def _close(self, producer: Producer, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._line and self._line_task is not None:
            _, late = await asyncio.wait((self._line_task,), timeout=_left(deadline))
            if late:
                self._line_task.cancel()
                await asyncio.wait((self._line_task,))

        def end() -> None:
            # Noted by the thread itself: the event loop may not be there any more when it ends.
            try:
                if not producer.is_closed:
                    self._left = producer.end(_left(deadline))
            except ClientError as stopped:
                self._stopped_by = stopped
            producer.set_closed()

        await _in_thread(end)

    def abandon(self, timeout: float) -> int:
        """The program ends: a last attempt; returns how many messages are lost, or refused and nobody was told."""
        self._is_abandoned = True
        left = 0 if self._producer is None else self._producer.abandon(timeout)
        return (
            len(self._line)
            + len(self._refused)
            + max(left, self._left.total, 0 if self._stopped_by is None else 1)
        )

    def orphan(self) -> None:
        """See `Producer.orphan`; what stands in line is the parent's."""
        self._is_orphaned = True
        self._line.clear()
        self._refused.clear()
        if self._producer is not None:
            self._producer.orphan()

    async def __aenter__(self) -> AsyncProducer:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except ClientError as left_behind:
            if error is None:
                raise
            note_left_behind(error, left_behind)

    # Sending

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: HeadersLike = (),
        partition: int | None = None,
        timestamp_ms: int = NO_TIMESTAMP,
    ) -> AsyncDelivery:
        """Hand a message over. Raises only if it was not taken: a serializer that failed, or too many in line."""
        producer = self._producer
        if producer is None:
            raise UsageError("an AsyncProducer is used in `async with`, or after `await producer.start()`")
        arguments = (
            topic,
            partition,
            None if key is None else producer._key(key, topic),
            None if value is None else producer._value(value, topic),
            as_headers(headers) if headers else (),
            timestamp_ms,
        )
        delivery = AsyncDelivery(self, topic, arguments[2])
        if self._line:
            self._stand_in_line(delivery, arguments)
            return delivery
        try:
            delivery._inner = producer._hand_over(*arguments, 0.0)
        except (SendTimeout, SpoolFull):
            self._stand_in_line(delivery, arguments)
        return delivery

    def send_many(
        self, topic: str, values: Iterable[Any], *, key: Callable[[Any], Any] | None = None
    ) -> list[AsyncDelivery]:
        """Hand over many messages; `key` makes the key of each from its value."""
        return [self.send(topic, value, key=None if key is None else key(value)) for value in values]

    async def flush(self, timeout: float | None = None) -> FlushReport:
        """Wait until everything sent so far is delivered or refused, or the time has passed; and say which."""
        if self._producer is None:
            raise UsageError("an AsyncProducer is used in `async with`, or after `await producer.start()`")
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._line_task is not None:
            await asyncio.wait((self._line_task,), timeout=timeout)
        report = await _in_thread(partial(self._producer.flush, _left(deadline)))
        behind = report._refused
        refused = dict(self._refused)

        def tell() -> None:
            behind.tell()
            for delivery in refused:
                self._told(delivery)

        named = [_as_undelivered(delivery, error) for delivery, error in refused.items()]
        seen = Seen([*named, *behind.named], len(named) + behind.total, tell)
        return FlushReport(report.delivered, seen, report.under_way + len(self._line))

    @property
    def set_aside(self) -> int:
        """See `Producer.set_aside`."""
        return 0 if self._producer is None else self._producer.set_aside

    @property
    def waiting(self) -> list[str]:
        """See `Producer.waiting`."""
        return [] if self._producer is None else self._producer.waiting

    # Messages without room

    def _stand_in_line(self, delivery: AsyncDelivery, arguments: tuple[Any, ...]) -> None:
        if len(self._line) >= LINE_MAX:
            raise SendTimeout(f"{len(self._line)} messages wait for room already; await some of them")
        self._line.append(_InLine(delivery, arguments))
        if self._line_task is None or self._line_task.done():
            self._line_task = asyncio.get_running_loop().create_task(self._serve_line())

    async def _serve_line(self) -> None:
        """Hand over what is in line, in its order, as room is made."""
        producer = self._producer
        assert producer is not None, "messages stand in line behind a producer"
        try:
            while self._line:
                delivery, arguments = self._line[0]
                try:
                    delivery._inner = await _in_thread(
                        partial(producer._hand_over, *arguments, self._send_timeout)
                    )
                except Exception as error:  # noqa: BLE001  whoever awaits the delivery gets it
                    self._refuse(delivery, error)
                self._line.popleft()
                self._move_on()
        finally:
            # Cancelled: the event loop ends. A thread may still be at the first one, and nobody hears from it.
            while self._line:
                gone = self._line.popleft().delivery
                self._refuse(
                    gone, SendTimeout(f"no room for a message for {gone.topic} when its event loop ended")
                )
            self._move_on()

    def _refuse(self, delivery: AsyncDelivery, error: BaseException) -> None:
        delivery._refused = error
        self._refused[delivery] = error

    def _move_on(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _told(self, delivery: AsyncDelivery) -> None:
        self._refused.pop(delivery, None)

    # Awaiting

    async def _until(self, inner: Delivery, attach: Callable[[Callable[[Delivery], None]], Delivery]) -> None:
        """Wait until the delivery calls back, or nothing will be delivered any more."""
        loop = asyncio.get_running_loop()
        if self._heard is not inner._waiting:
            self._heard = inner._waiting
            self._heard.on_stop.append(self._stopped)
        future: asyncio.Future[None] = loop.create_future()
        awaited = self._waiting.setdefault(inner, set())
        awaited.add(future)
        attach(lambda delivery: self._wake(future))
        if inner._waiting.stopped is not None:
            self._wake(future)
        try:
            await future
        finally:
            awaited.discard(future)
            if not awaited:
                self._waiting.pop(inner, None)

    def _wake(self, future: asyncio.Future[None]) -> None:
        """From any thread: many futures are woken by one call into the loop."""
        self._woken.append(future)
        if not self._is_waking:
            self._is_waking = True
            assert self._loop is not None, "deliveries are made by a producer that was started"
            with suppress(RuntimeError):  # the event loop has ended, and nobody awaits anything
                self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        # Taken back first: whoever comes from now on calls again.
        self._is_waking = False
        while self._woken:
            future = self._woken.popleft()
            if not future.done():
                future.set_result(None)

    def _stopped(self, why: ClientError) -> None:
        assert self._loop is not None, "deliveries are made by a producer that was started"
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake_those_left)

    def _wake_those_left(self) -> None:
        for awaited in list(self._waiting.values()):
            for future in list(awaited):
                if not future.done():
                    future.set_result(None)


async def _in_thread(function: Callable[[], T]) -> T:
    """What may take long, in a thread of its own: an executor may be busy, and is gone when the program ends."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(settling: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            settling(value)

    def work() -> None:
        settling: tuple[Any, Any]
        try:
            settling = outcome.set_result, function()
        except BaseException as error:  # noqa: BLE001  whoever awaits it gets it
            settling = outcome.set_exception, error
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle, *settling)

    threading.Thread(target=work, name="holdfast-async", daemon=True).start()
    try:
        while not outcome.done():
            # By the clock as well: a forked child that ends this event loop takes its means of being woken away.
            await asyncio.wait((outcome,), timeout=LOOK_SECONDS)
        return outcome.result()
    finally:
        outcome.cancel()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _as_undelivered(delivery: AsyncDelivery, error: BaseException) -> Undelivered:
    return Undelivered(delivery.topic, None, delivery.key, str(error))
