"""Who is asking: what a handler may know about a request besides its content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from holdfast.broker.log.segment import Slice
from holdfast.seams import Buffer

Part: TypeAlias = Buffer | Slice
"""A piece of a response: bytes, or bytes of a file that the shell sends as they are."""
Fields: TypeAlias = dict[str, Any]
"""A response as nested plain data, keyed by the schema's field names."""

ANONYMOUS: Final = "User:ANONYMOUS"
T = TypeVar("T")


class Session:
    """What the broker knows of the client at the other end of a connection. A handler may change it: authentication
    will set the principal, and keep here how far an exchange of it has come."""

    __slots__ = ("address", "client_id", "listener", "principal")

    def __init__(self, listener: str, address: str) -> None:
        self.listener = listener
        self.address = address
        self.principal = ANONYMOUS
        self.client_id: str | None = None
        """As the latest request names it."""

    def __str__(self) -> str:
        return f"{self.address} ({self.client_id!r}, {self.principal} on {self.listener})"


class RequestContext(NamedTuple):
    session: Session
    api_key: int
    version: int


class Packed(NamedTuple):
    """A response body already packed by hand."""

    parts: list[Part]


class NoResponse:
    """The request gets no answer at all: a produce with acks=0."""


NO_RESPONSE: Final = NoResponse()


class Hangup(NamedTuple):
    """Instead of an answer the connection is closed: the only way to tell a client that wants no answer."""

    reason: str


class Within(NamedTuple):
    """A response about changes of the image that are not durable yet, with the client's patience."""

    fields: Fields
    deadline_ms: int
    too_late: Fields
    """The response instead when time is over. It leaves at once, so it tells nothing that rests on the image."""


Response: TypeAlias = Fields | Packed | NoResponse | Hangup | Within
"""What comes of a request in the end."""


class Later:
    """A response that is not due yet: `resolve` is called once, when it is, or `abandon` when nobody wants it.

    Whatever a request waits for it waits for in `step`s, so that a defect on the way ends its connection: the client
    neither waits for ever nor takes anything for done, and whoever waits for the same event gets an answer.
    """

    __slots__ = ("_deliver", "_failure", "_give_up", "_response", "is_resolved", "when_abandoned")

    def __init__(self, when_abandoned: Callable[[], None] | None = None) -> None:
        self.is_resolved = False
        self.when_abandoned = when_abandoned
        """Lets go of what waits only for this response."""
        self._response: Response | None = None
        self._deliver: Callable[[Response], None] | None = None
        self._failure: Exception | None = None
        self._give_up: Callable[[Exception], None] | None = None

    def resolve(self, response: Response) -> None:
        if self.is_resolved:
            return
        self.is_resolved = True
        if self._deliver is not None:
            self._deliver(response)
        else:
            self._response = response

    def abandon(self) -> None:
        """The client has gone: there is no sense in waiting on."""
        if not self.is_resolved:
            self.is_resolved = True
            self._deliver = None
            if self.when_abandoned is not None:
                self.when_abandoned()

    def step(self, action: Callable[[T], None]) -> Callable[[T], None]:
        """The action, as something to be called when the request can go on."""
        return lambda event: self.take(action, event)

    def take(self, action: Callable[[T], None], event: T) -> None:
        """Take a step now."""
        try:
            action(event)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must not wait for ever
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """A step has raised; if the response has left already, whoever called for the step is to tell of it."""
        if self.is_resolved:
            raise error
        self._failure = error
        self.abandon()
        if self._give_up is not None:
            self._give_up(error)

    def then(self, deliver: Callable[[Response], None], give_up: Callable[[Exception], None]) -> None:
        """Call `deliver` with the response, or `give_up` with the defect that the request ran into."""
        if self._failure is not None:
            give_up(self._failure)
        elif self.is_resolved:
            assert self._response is not None
            deliver(self._response)
        else:
            self._deliver = deliver
            self._give_up = give_up


Answer: TypeAlias = Fields | Packed | Later | NoResponse | Within
