"""A client's connection: request frames out, answers in, in the order of the requests.

Answers are never handled inside the broker's call that produced them: frames wait in the world's inbox until
that call has returned, as they would on a socket. `Client` is what most clients have in common: one request at a time
over a link of their own. `NOT_NOW` are the answers to which a client tries again, later or elsewhere.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kio.schema.errors import ErrorCode
from tests.support.checkers import Violation
from tests.support.simulator.broker import Broker, BrokerConnection

from holdfast.wire import apis
from holdfast.wire.messages import decode_response, encode_request

if TYPE_CHECKING:
    from tests.support.simulator.world import World


_HEADER = struct.Struct(">hhih")
_CORRELATION = struct.Struct(">i")

OnAnswer = Callable[[Any | None], None]
"""Called with the decoded response, or with None when the connection went before it came."""


class _Pending(NamedTuple):
    correlation_id: int
    api_key: int
    version: int
    on_answer: OnAnswer


class Link:
    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self._client_id = name.encode()
        self._connection: BrokerConnection | None = None
        self._life = 0
        self._correlation_id = 0
        self._pending: deque[_Pending] = deque()
        self._held: deque[bytes] = deque()
        """Frames that left the client and have not reached the broker."""
        world.links.append(self)

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def request(
        self, api_key: int, version: int, fields: Mapping[str, Any], on_answer: OnAnswer | None
    ) -> None:
        """Send a request; without `on_answer` none is expected."""
        self._correlation_id += 1
        header = _HEADER.pack(api_key, version, self._correlation_id, len(self._client_id)) + self._client_id
        if apis.request_header_version(api_key, version) == 2:
            header += b"\0"
        if on_answer is not None:
            self._pending.append(_Pending(self._correlation_id, api_key, version, on_answer))
        self._held.append(header + encode_request(api_key, version, fields))
        if self.world.rng.random() < 0.9:
            self.deliver()

    def deliver(self) -> None:
        """Let the broker have what was sent."""
        broker = self.world.broker
        if broker is None:
            self.cut()
            return
        while self._held:
            if self._connection is None:
                self._connection = self._connect(broker)
            self._connection.send(self._held.popleft(), self.world.clock.now())

    def _connect(self, broker: Broker) -> BrokerConnection:
        self._life += 1
        life = self._life
        inbox = self.world.inbox
        return broker.connect(
            lambda frame: inbox.append((self, life, frame)),
            lambda reason: inbox.append((self, life, None)),
        )

    def receive(self, life: int, frame: bytes | None) -> None:
        """A response frame, without its length; None when the broker closed the connection."""
        if life != self._life or self._connection is None:
            return
        if frame is None:
            self.world.say(f"{self.name}: the broker closed the connection")
            self.cut()
            return
        (correlation_id,) = _CORRELATION.unpack_from(frame)
        if not self._pending or self._pending[0].correlation_id != correlation_id:
            expected = self._pending[0].correlation_id if self._pending else "none"
            raise Violation("answer-order", f"{self.name}: answer {correlation_id}, expected {expected}")
        pending = self._pending.popleft()
        offset = 4 + (1 if apis.response_header_version(pending.api_key, pending.version) else 0)
        pending.on_answer(decode_response(pending.api_key, pending.version, frame, offset))

    def cut(self) -> None:
        """The connection is gone: what was not answered never will be."""
        if self._connection is not None:
            self._connection.cut()
            self._connection = None
        self._held.clear()
        pending, self._pending = self._pending, deque()
        for each in pending:
            each.on_answer(None)

    def retire(self) -> None:
        """The client is no more."""
        self.cut()
        self.world.links.remove(self)

    def forget(self) -> None:
        """The broker died: like `cut`, but there is nobody left to tell."""
        self._connection = None
        self.cut()


class Client:
    """Whoever asks the broker over a link of its own, one request at a time, and has nothing to bring to an end."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.link = Link(world, name)
        self.is_waiting = False
        """A request is under way, and nothing else is sent before it is answered."""

    @property
    def is_settled(self) -> bool:
        return True

    def settle(self) -> None:
        """Faults are over: bring what is under way to its end, begin nothing."""

    def ask(
        self,
        kind: str,
        api_key: int,
        version: int,
        fields: Mapping[str, Any],
        answered: Callable[[Any], object],
        lost: Callable[[], None] = lambda: None,
    ) -> bool:
        """Send one request; one that is never answered is counted as unknown."""
        self.is_waiting = True

        def receive(response: Any | None) -> None:
            self.is_waiting = False
            if response is None:
                self.world.count(kind, "unknown")
                lost()
            else:
                answered(response)

        self.link.request(api_key, version, fields, receive)
        return True


UNKNOWN_TOPIC = frozenset({ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id})
NOT_NOW = frozenset(
    {
        ErrorCode.request_timed_out,
        ErrorCode.not_leader_or_follower,
        ErrorCode.leader_not_available,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.not_coordinator,
        ErrorCode.concurrent_transactions,
    }
)

REFUSED_MEMBER = frozenset(
    {
        ErrorCode.unknown_member_id,
        ErrorCode.illegal_generation,
        ErrorCode.fenced_instance_id,
        ErrorCode.stale_member_epoch,
        ErrorCode.fenced_member_epoch,
        ErrorCode.group_id_not_found,
    }
)
"""Answers to a member that is none, or not with this generation or epoch: nothing was changed."""
