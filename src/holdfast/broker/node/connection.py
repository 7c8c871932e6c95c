"""One client connection: requests begun in order, answered in order.

Up to `holdfast.requests.in.flight.max` requests are under way at once, so that pipelined produces share a flush. A
response that is ready waits behind one that is not; past the limit the shell is asked to stop reading the socket.

A response leaves only when everything it may have been built on is durable. For requests that are answered
from the cluster's image this means the metadata log: `MetadataLog.is_durable` is consulted when the response
is ready, not when the request came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from holdfast.broker.log.segment import Slice
from holdfast.broker.node import dispatch
from holdfast.broker.node.context import (
    Answer,
    Hangup,
    Later,
    NoResponse,
    Packed,
    Part,
    RequestContext,
    Response,
    Session,
    Within,
)
from holdfast.broker.node.metadata_log import MetadataLog, Settings
from holdfast.broker.node.meter import Meter
from holdfast.broker.node.timers import Timer, Timers
from holdfast.broker.node.usual_produce import UsualProduce
from holdfast.errors import MalformedFrame
from holdfast.seams import Buffer, Now
from holdfast.wire.apis import API_VERSIONS, PRODUCE
from holdfast.wire.messages import encode_response, parse_request_header, response_header


class RequestServices(Protocol):
    """What a connection needs of the broker."""

    metadata: MetadataLog
    settings: Settings
    timers: Timers
    meter: Meter
    usual_produce: UsualProduce
    report: Callable[[str, Exception], None]

    def handle(self, context: RequestContext, frame: Buffer, body_offset: int, now: Now) -> Answer: ...


class Exchange:
    __slots__ = (
        "api_key",
        "arrived_ns",
        "begun_ns",
        "connection",
        "correlation_id",
        "is_dropped",
        "later",
        "parked_ns",
        "parts",
        "ready_ns",
        "version",
    )

    def __init__(self, connection: Connection, api_key: int, version: int, correlation_id: int) -> None:
        self.connection = connection
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.later: Later | None = None
        self.parts: list[Part] | None = None
        self.is_dropped = False
        """The request gets no response; it only keeps its place in the order."""
        # Its moments: see `meter`.
        self.begun_ns = self.parked_ns = self.ready_ns = connection.meter.clock.read_ns
        self.arrived_ns = connection.arrived_ns or self.begun_ns

    def deliver(self, response: Response) -> None:
        connection = self.connection
        if connection.is_closed:
            return
        metadata = connection.metadata
        if metadata.is_durable:
            self._finish(response)
        else:
            timer: Timer | None = None
            if isinstance(response, Within):
                too_late = response.too_late
                timer = connection.node.timers.at(response.deadline_ms, lambda: self._finish(too_late))
            metadata.when_durable(lambda error: self._durable(response, error, timer))

    def _durable(self, response: Response, error: Exception | None, timer: Timer | None) -> None:
        if timer is not None:
            timer.cancel()
        if self.parts is not None:
            return
        if error is None:
            self._finish(response)
        else:
            # What the response tells may not be on disk, and nobody can say: the client learns nothing from it.
            self.connection.close(f"the metadata log failed: {error}")

    def _finish(self, response: Response) -> None:
        try:
            self.parts = self._encode(response)
            self.ready_ns = ready_ns = self.connection.meter.clock.monotonic_ns()
            self.connection.send_ready(ready_ns)
        except Exception as error:  # noqa: BLE001 - others wait for the same flush and must get their answers
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        self.connection.give_up(self.api_key, self.version, error)

    def _encode(self, response: Response) -> list[Part]:
        if isinstance(response, Packed):
            body = response.parts
        elif isinstance(response, NoResponse):
            return []
        elif isinstance(response, Hangup):
            self.connection.close(response.reason)
            return []
        else:
            if isinstance(response, Within):
                response = response.fields
            connection = self.connection
            connection.meter.look_through(connection.session, self.api_key, response)
            body = [encode_response(self.api_key, self.version, response)]
        head = response_header(self.api_key, self.version, self.correlation_id)
        length = len(head)
        for part in body:
            length += part.length if isinstance(part, Slice) else len(part)
        head = length.to_bytes(4, "big") + head
        first = body[0]
        if isinstance(first, Slice):
            return [head, *body]
        body[0] = head + first
        return body

    def drop(self) -> None:
        self.is_dropped = True
        self.parts = []
        self.ready_ns = ready_ns = self.connection.meter.clock.monotonic_ns()
        self.connection.send_ready(ready_ns)


class Connection:
    def __init__(
        self,
        node: RequestServices,
        session: Session,
        transmit: Callable[[list[Part]], None],
        close: Callable[[str], None],
    ) -> None:
        self.node = node
        self.metadata = node.metadata
        self.meter = node.meter
        self.session = session
        self.arrived_ns = 0
        """When the last byte of a request came that was not begun at once; 0 for one that is."""
        self.transmit = transmit
        """Takes responses, or none: there may be room for requests all the same."""
        self._close = close
        self._under_way: deque[Exchange] = deque()
        self._under_way_max = node.settings.broker.holdfast_requests_in_flight_max
        """Enough for a pipelining producer to fill a flush group, few enough to bound what one connection holds."""
        self.is_closed = False

    @property
    def is_saturated(self) -> bool:
        """Whether the shell should stop reading until `transmit` is called."""
        return len(self._under_way) >= self._under_way_max

    def waiting(self) -> Iterator[int]:
        """The API keys of the requests that are not answered yet."""
        return (exchange.api_key for exchange in self._under_way)

    @property
    def requests_under_way(self) -> int:
        return len(self._under_way)

    def receive(self, frame: Buffer, now: Now) -> None:
        """Begin one request. A frame that is no request closes this connection and no other."""
        try:
            header = parse_request_header(frame)
        except MalformedFrame as error:
            self.close(str(error))
            return
        try:
            self.session.client_id = header.client_id
            if header.api_key == PRODUCE and self.node.usual_produce.begin(self, header, frame, now):
                return
            exchange = self.enqueue(header.api_key, header.version, header.correlation_id)
            context = RequestContext(self.session, header.api_key, header.version)
            answer = self.node.handle(context, frame, header.body_offset, now)
            exchange.parked_ns = self.meter.clock.monotonic_ns()
        except MalformedFrame as error:
            self.close(str(error))
            return
        except Exception as error:  # noqa: BLE001 - one request's defect must not take the broker down
            self.give_up(header.api_key, header.version, error)
            return
        if isinstance(answer, Later):
            exchange.later = answer
            answer.then(exchange.deliver, exchange.give_up)
        elif isinstance(answer, NoResponse):
            exchange.drop()
        else:
            # ApiVersions falls back to version 0 for versions it does not know.
            if header.api_key == API_VERSIONS:
                exchange.version = header.version if dispatch.is_offered(API_VERSIONS, header.version) else 0
            exchange.deliver(answer)

    def enqueue(self, api_key: int, version: int, correlation_id: int) -> Exchange:
        """A place among the answers, in the order of the requests."""
        exchange = Exchange(self, api_key, version, correlation_id)
        self._under_way.append(exchange)
        return exchange

    def send_next(self, exchange: Exchange, response: bytes, left_ns: int) -> bool:
        """Send a response if it is next in order, which the caller then counts; otherwise nothing has happened."""
        under_way = self._under_way
        if not under_way or under_way[0] is not exchange:
            return False
        under_way.popleft()
        self._send([response])
        if under_way and under_way[0].parts is not None:
            self.send_ready(left_ns)
        return True

    def send_ready(self, left_ns: int) -> None:
        """Send every response that is ready and next in order; the shell looks for room even if there is none."""
        under_way = self._under_way
        out: list[Part] = []
        while under_way and under_way[0].parts is not None:
            exchange = under_way.popleft()
            out += exchange.parts or ()
            self.meter.answered(exchange, left_ns)
        if not self.is_closed:
            self._send(out)

    def _send(self, parts: list[Part]) -> None:
        try:
            self.transmit(parts)
        except Exception as error:  # noqa: BLE001 - others wait for the same flush and must get their answers
            self.node.report("sending answers", error)
            self.close(f"sending answers failed: {error!r}")

    def give_up(self, api_key: int, version: int, error: Exception) -> None:
        """A request ran into a defect of ours: it is told with its place, and only this connection ends."""
        self.node.report(f"API {api_key} version {version}", error)
        self.close(f"API {api_key} version {version} failed: {error!r}")

    def close(self, reason: str) -> None:
        if not self.is_closed:
            self.lost()
            self._close(reason)

    def lost(self) -> None:
        """The other side went away: whatever is under way has nobody to answer to."""
        self.is_closed = True
        under_way, self._under_way = self._under_way, deque()
        for exchange in under_way:
            if exchange.later is not None:
                try:
                    exchange.later.abandon()
                except Exception as error:  # noqa: BLE001 - the others wait as well
                    self.node.report("letting go of a request", error)
