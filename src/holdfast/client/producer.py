"""A producer that cannot forget a message without saying so.

    with Producer("localhost:9092") as producer:
        producer.send("orders", {"id": 7}, key="7").wait()

`send` returns at once with a `Delivery`, to wait on or to be called back about. Leaving the `with` block waits for
what is under way, and raises `UndeliveredMessages`, which names them, when some did not arrive. There is no
fire-and-forget: a program that ends with an open producer exits with a code that is not zero.

With `spool=DIR` a message is first *stored*, flushed to this machine's disk together with its neighbours, and then
delivered by a thread that never gives up: through restarts of the broker, of this process, and of the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from holdfast.client import exit_guard
from holdfast.client.delivery import Delivery
from holdfast.client.errors import ProducerClosed, Undelivered, UndeliveredMessages
from holdfast.client.serializers import Serializer, as_bytes
from holdfast.client.settings import DELIVERY_TIMEOUT_MS, INFINITE, producer_settings
from holdfast.client.spool.format import Headers
from holdfast.errors import UsageError

Guarantee: TypeAlias = Literal["at-least-once", "exactly-once"]
HeadersLike: TypeAlias = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]

SEND_TIMEOUT_SECONDS: Final = 60.0
SPOOL_MAX_BYTES: Final = 1 << 30
NO_TIMESTAMP: Final = -1


class FlushReport(NamedTuple):
    """What became of everything sent so far."""

    delivered: int
    refused: list[Undelivered]
    """Those no broker will take, since the last report; with a spool they are kept in its directory `refused`."""
    under_way: int
    """Neither delivered nor refused yet; with a spool they are on disk and will be sent."""

    @property
    def is_complete(self) -> bool:
        return not self.refused and not self.under_way


class Sender(Protocol):
    """How messages leave: straight to the broker, or through the spool."""

    def send(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int,
        timeout: float,
    ) -> Delivery: ...

    @property
    def delivered(self) -> int: ...

    def take_refused(self) -> list[Undelivered]:
        """What was refused for good since the last call."""
        ...

    @property
    def undelivered(self) -> list[Undelivered]:
        """What would be lost if the process ended now."""
        ...

    def flush(self, timeout: float | None) -> int: ...

    def close(self) -> None: ...


class Producer:
    def __init__(
        self,
        bootstrap: str,
        *,
        spool: str | Path | None = None,
        delivery: Guarantee = "at-least-once",
        key: Serializer = as_bytes,
        value: Serializer = as_bytes,
        config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
        send_timeout: float = SEND_TIMEOUT_SECONDS,
        spool_max_bytes: int = SPOOL_MAX_BYTES,
    ) -> None:
        """`config` takes librdkafka's dotted names; `send_timeout` bounds, in seconds, the wait for room."""
        if delivery == "exactly-once" and spool is None:
            raise UsageError('delivery="exactly-once" keeps its progress in a spool: give spool=DIR')
        self._key = key
        self._value = value
        self._send_timeout = send_timeout
        self._is_closed = False
        self._sender = self._make_sender(
            bootstrap, spool, delivery, dict(config or {}), unsafe, spool_max_bytes
        )
        exit_guard.watch(self)

    @staticmethod
    def _make_sender(
        bootstrap: str,
        spool: str | Path | None,
        delivery: Guarantee,
        config: Mapping[str, Any],
        unsafe: Collection[str],
        spool_max_bytes: int,
    ) -> Sender:
        timeout_ms = DELIVERY_TIMEOUT_MS if spool is None else INFINITE
        settings = producer_settings(bootstrap, config, unsafe, message_timeout_ms=timeout_ms)
        if spool is None:
            from holdfast.client.direct import DirectSender

            return DirectSender(settings)
        from holdfast.client.spool.sender import SpooledSender
        from holdfast.real import RealFileSystem, RealRandomness

        return SpooledSender(
            RealFileSystem(), str(spool), RealRandomness(), settings, spool_max_bytes, say=_say
        )

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
    ) -> Delivery:
        """Hand a message over. Raises only if it was not taken: a serializer that failed, or no room in time."""
        if self._is_closed:
            raise ProducerClosed(f"a message for {topic} was sent after the producer was closed")
        return self._sender.send(
            topic,
            partition,
            None if key is None else self._key(key, topic),
            None if value is None else self._value(value, topic),
            _headers(headers) if headers else (),
            timestamp_ms,
            self._send_timeout,
        )

    def send_many(
        self, topic: str, values: Iterable[Any], *, key: Callable[[Any], Any] | None = None
    ) -> list[Delivery]:
        """Hand over many messages; `key` makes the key of each from its value."""
        return [self.send(topic, value, key=None if key is None else key(value)) for value in values]

    def flush(self, timeout: float | None = None) -> FlushReport:
        """Wait until everything sent so far is delivered or refused, or the time has passed; and say which."""
        under_way = self._sender.flush(timeout)
        return FlushReport(self._sender.delivered, self._sender.take_refused(), under_way)

    # Ending

    def close(self, timeout: float | None = None) -> None:
        """Deliver what is under way and end. Raises `UndeliveredMessages` for what did not arrive."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            report = self.flush(timeout)
            left = self._sender.undelivered
            self._sender.close()
        finally:
            exit_guard.unwatch(self)
        if report.refused or left:
            raise UndeliveredMessages([*report.refused, *left])

    def abandon(self, timeout: float) -> int:
        """The program ends: a last attempt; returns how many messages are lost if it does."""
        self._is_closed = True
        self._sender.flush(timeout)
        return len(self._sender.undelivered)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UndeliveredMessages as undelivered:
            if error is None:
                raise
            # The error that ended the block goes on; what it left behind is said with it.
            error.add_note(str(undelivered))


def _say(line: str) -> None:
    print(f"holdfast: {line}", file=sys.stderr, flush=True)


def _headers(headers: HeadersLike) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs)
