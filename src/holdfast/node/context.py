"""Who is asking: what a handler may know about a request besides its content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.log.segment import Slice
from holdfast.seams import Buffer

Part: TypeAlias = Buffer | Slice
"""A piece of a response: bytes, or bytes of a file that the shell sends as they are."""
Fields: TypeAlias = dict[str, Any]
"""A response as nested plain data, keyed by the schema's field names."""

ANONYMOUS: Final = "User:ANONYMOUS"


class ConnectionInfo(NamedTuple):
    """What stays the same over a connection; authorisation and quotas hook in here."""

    id: int
    listener: str
    address: str
    principal: str = ANONYMOUS


class RequestContext(NamedTuple):
    connection: ConnectionInfo
    client_id: str | None
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


Response: TypeAlias = Fields | Packed | NoResponse | Hangup
"""What comes of a request in the end."""


class Later:
    """A response that is not due yet: `resolve` is called once, when it is, or `abandon` when nobody wants it."""

    __slots__ = ("_deliver", "_response", "is_resolved", "when_abandoned")

    def __init__(self, when_abandoned: Callable[[], None] | None = None) -> None:
        self.is_resolved = False
        self.when_abandoned = when_abandoned
        """Lets go of what waits only for this response."""
        self._response: Response | None = None
        self._deliver: Callable[[Response], None] | None = None

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

    def then(self, deliver: Callable[[Response], None]) -> None:
        if self.is_resolved:
            assert self._response is not None
            deliver(self._response)
        else:
            self._deliver = deliver


Answer: TypeAlias = Fields | Packed | Later | NoResponse
