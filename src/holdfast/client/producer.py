"""A producer that cannot forget a message without saying so.

    with Producer("localhost:9092", value=as_json) as producer:
        producer.send("orders", {"id": 7}, key="7").wait()

`send` returns at once with a `Delivery`, to wait on or to be called back about. Leaving the `with` block waits for
what is under way, and raises `UndeliveredMessages`, which names them, when some did not arrive. There is no
fire-and-forget: a program that ends with an open producer exits with a code that is not zero.

With `spool=DIR` a message is first *stored*, flushed to this machine's disk together with its neighbours, and then
delivered by a thread that never gives up: through restarts of the broker, of this process, and of the machine. What is
stored is safe, so leaving the `with` block waits for it a bounded time, and says how much is left to the next process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypedDict

from holdfast.client import exit_guard
from holdfast.client.delivery import Delivery, Seen
from holdfast.client.errors import (
    ClientError,
    DeliveryStopped,
    ForkedProducer,
    LeftBehind,
    ProducerClosed,
    Undelivered,
    UndeliveredMessages,
)
from holdfast.client.messages import forwarded
from holdfast.client.metrics import Metrics, watched
from holdfast.client.partitioner import DEFAULT_PARTITIONER
from holdfast.client.process import say
from holdfast.client.serializers import Serializer, as_bytes
from holdfast.client.settings import SPOOL_BOUND, producer_settings, spool_bound, spool_settings
from holdfast.client.spool.format import Headers
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.client.direct import DirectSender
    from holdfast.client.spool.sender import SpooledSender
    from holdfast.client.tracing import Tracing

Guarantee: TypeAlias = Literal["at-least-once", "exactly-once"]
GUARANTEES: Final = ("at-least-once", "exactly-once")
HeadersLike: TypeAlias = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]

SEND_TIMEOUT_SECONDS: Final = 60.0
SPOOL_MAX_BYTES: Final = 1 << 30
CLOSE_SECONDS: Final = 10.0
"""How long leaving waits for what is stored in a spool; without one it waits as long as librdkafka tries."""
NO_TIMESTAMP: Final = -1


class ProducerOptions(TypedDict, total=False):
    """What a `Producer` takes besides the brokers' address, for whoever hands it on."""

    spool: str | Path | None
    delivery: Guarantee
    key: Serializer
    value: Serializer
    partitioner: str
    config: Mapping[str, Any] | None
    unsafe: Collection[str]
    send_timeout: float
    spool_max_bytes: int
    metrics: Metrics | None
    tracing: Tracing | None


class FlushReport:
    """What became of everything sent so far.

    Whoever reads what was refused has been told of it. What nobody reads is named when the producer is closed.
    """

    __slots__ = ("_refused", "delivered", "under_way")

    def __init__(self, delivered: int, refused: Seen, under_way: int) -> None:
        self.delivered = delivered
        self._refused = refused
        self.under_way = under_way
        """Neither delivered nor refused yet; with a spool they are on disk and will be sent."""

    def __repr__(self) -> str:
        return f"FlushReport(delivered={self.delivered}, refused={self._refused.total}, under_way={self.under_way})"

    @property
    def refused(self) -> list[Undelivered]:
        """Those that failed for good and nobody was told of before: the first of them, when they are many. With a
        spool, what brokers refused is kept in its directory `refused`."""
        self._refused.tell()
        return self._refused.named

    @property
    def refused_count(self) -> int:
        """How many were refused."""
        self._refused.tell()
        return self._refused.total

    @property
    def is_complete(self) -> bool:
        return not self.refused_count and not self.under_way


class EndsWithItsBlock(ABC):
    """What leaving a `with` block closes."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> object:
        """End; raises for what is left behind."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ClientError as left_behind:
            if error is None:
                raise
            note_left_behind(error, left_behind)


class Producer(EndsWithItsBlock):
    def __init__(
        self,
        bootstrap: str,
        *,
        spool: str | Path | None = None,
        delivery: Guarantee = "at-least-once",
        key: Serializer = as_bytes,
        value: Serializer = as_bytes,
        partitioner: str = DEFAULT_PARTITIONER,
        config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
        send_timeout: float = SEND_TIMEOUT_SECONDS,
        spool_max_bytes: int = SPOOL_MAX_BYTES,
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`config` takes librdkafka's dotted names, and `partitioner` librdkafka's names of partitioners.

        `send_timeout` bounds, in seconds, the wait for room. `spool_max_bytes` (in `config`: `spool.max.bytes`) bounds
        what the spool holds.
        """
        if delivery not in GUARANTEES:
            raise UsageError(f"delivery={delivery!r}: there are {' and '.join(GUARANTEES)}")
        if delivery == "exactly-once" and spool is None:
            raise UsageError('delivery="exactly-once" keeps its progress in a spool: give spool=DIR')
        self._key = key
        self._value = value
        self._changes_keys = key is not as_bytes
        self._changes_values = value is not as_bytes
        self._send_timeout = send_timeout
        self.is_closed = False
        """Whether it was closed, and whoever closed it has heard what it left behind."""
        self._is_said = False
        self._is_abandoned = False
        """Whether the program ends, and says itself what is left behind."""
        self._has_spool = spool is not None
        given = {"partitioner": partitioner, **(config or {})}
        if "transactional.id" in given:
            raise UsageError(
                'transactional.id: a producer with delivery="exactly-once" has one of its own, and a `Processor` too'
            )
        spool_max_bytes = spool_bound(given.pop(SPOOL_BOUND, spool_max_bytes))
        self._sender: DirectSender | SpooledSender = (
            _direct_sender(bootstrap, given, unsafe)
            if spool is None
            else _spooled_sender(bootstrap, str(spool), delivery, given, unsafe, spool_max_bytes)
        )
        self._hand_over: Callable[..., Delivery] = self._sender.send
        if tracing is not None:
            self._hand_over = tracing.sending(self._hand_over)
        self._tally = watched(metrics, str(given.get("client.id", "producer")), self._sender.numbers)
        exit_guard.watch(self)

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
        # Bytes stay as they are without a call: most messages are bytes already.
        if value is not None and (value.__class__ is not bytes or self._changes_values):
            value = self._value(value, topic)
        if key is not None and (key.__class__ is not bytes or self._changes_keys):
            key = self._key(key, topic)
        return self._hand_over(
            topic,
            partition,
            key,
            value,
            as_headers(headers) if headers else (),
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
        return FlushReport(self._sender.delivered, self._sender.seen_refused(), under_way)

    def wait_settled(self, timeout: float | None = None) -> int:
        """Wait as `flush` does, and take no report; returns how many messages are still under way."""
        return self._sender.flush(timeout)

    @property
    def under_way(self) -> int:
        """How many messages are neither delivered nor refused."""
        return self._sender.left

    @property
    def set_aside(self) -> int:
        """With a spool: how many messages lie in its directory `refused`, refused and not delivered."""
        return self._sender.set_aside

    @property
    def waiting(self) -> list[str]:
        """With a spool: why stored messages wait although brokers answer, one line for each cause."""
        return self._sender.waiting

    # Ending

    def close(self, timeout: float | None = None) -> None:
        """Deliver what is under way and end. Raises `UndeliveredMessages` for what did not arrive.

        With a spool, what is stored and not delivered within the time, 10 seconds unless given, is no failure: it is
        said how many messages the next process will find.
        """
        if self.is_closed:
            return
        self._sender.check_thread()
        try:
            left = self.end(timeout)
            if left.total and not self._is_abandoned:
                raise exit_guard.raised(UndeliveredMessages(left.named, left.total))
        except ClientError:
            self.set_closed()
            raise
        self.set_closed()

    def set_closed(self) -> None:
        """Somebody hears of what it left behind."""
        self.is_closed = True
        self._tally.end()
        exit_guard.unwatch(self)

    def end(self, timeout: float | None) -> LeftBehind:
        """Deliver what can be delivered. A signal may interrupt it, and whoever is interrupted may call it again."""
        if timeout is None and self._has_spool:
            timeout = CLOSE_SECONDS
        self._hand_over = _refuse_late
        stopped: DeliveryStopped | None = None
        try:
            self._sender.flush(timeout)
        except DeliveryStopped as failure:
            stopped = failure
        left = self._sender.close()
        if left.line is not None and not self._is_said:
            self._is_said = True
            say(left.line)
        if stopped is not None:
            raise stopped
        return left

    def abandon(self, timeout: float) -> int:
        """The program ends: a last attempt; returns how many messages are lost, or refused and nobody was told."""
        if self.is_closed:
            return 0
        self._is_abandoned = True
        lost = self.end(timeout).total
        # A generator that holds the block open is ended when Python has forgotten our modules.
        self.is_closed = True
        return lost

    def orphan(self) -> None:
        """This is a child of the process that the producer works in."""
        self.is_closed = True
        self._hand_over = _refuse_in_child
        self._sender.orphan(USED_IN_CHILD)


def note_left_behind(error: BaseException, left_behind: ClientError) -> None:
    """The error that ended a block goes on; what it left behind is said with it, and nobody may come to see that."""
    error.add_note(str(left_behind))
    exit_guard.owe(left_behind.count if isinstance(left_behind, UndeliveredMessages) else 0, str(left_behind))


def _refuse_late(topic: str, *message: object) -> Delivery:
    raise ProducerClosed(f"a message for {topic} was sent after the producer was closed")


USED_IN_CHILD: Final = ForkedProducer(
    "this producer was made before the process was forked: its threads and its messages are the parent's, which "
    "delivers them. Make a producer in the child, after the fork"
)


def _refuse_in_child(topic: str, *message: object) -> Delivery:
    raise USED_IN_CHILD


def _direct_sender(bootstrap: str, config: Mapping[str, Any], unsafe: Collection[str]) -> DirectSender:
    from holdfast.client.direct import DirectSender

    return DirectSender(producer_settings(bootstrap, config, unsafe))


def _spooled_sender(
    bootstrap: str,
    home: str,
    delivery: Guarantee,
    config: Mapping[str, Any],
    unsafe: Collection[str],
    max_bytes: int,
) -> SpooledSender:
    from holdfast.client.spool.sender import SpooledSender
    from holdfast.real import RealFileSystem, RealRandomness

    settings = spool_settings(bootstrap, config, unsafe)
    return SpooledSender(
        RealFileSystem(),
        home,
        RealRandomness(),
        settings,
        max_bytes,
        partitioner=str(settings.pop("partitioner")),
        is_exactly_once=delivery == "exactly-once",
        say=say,
    )


def as_headers(headers: HeadersLike) -> Headers:
    """The headers of a message as they are sent; see `forwarded`."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return forwarded(
        tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs)
    )
