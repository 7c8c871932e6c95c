"""A client that says exactly what it is told: raw Kafka requests over one blocking socket.

Real clients hide what a broker does: they retry, choose versions, repair. Tests that want to see each answer,
and tools that want to say something wrong on purpose, use this instead.

    with WireClient("127.0.0.1:9092") as client:
        answer = client.ask(METADATA, 12, {"topics": None})      # a kio entity, or CLOSED

A connection the broker has closed is reported once as `CLOSED`; the next request opens a new one.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from holdfast.errors import HoldfastError
from holdfast.wire import apis
from holdfast.wire.api_keys import API_VERSIONS
from holdfast.wire.messages import decode_response, encode_request, response_header_version

CLOSED: Final[Literal["connection closed"]] = "connection closed"
"""What is returned when the broker closes the connection instead of answering."""
SILENT: Final[Literal["no answer"]] = "no answer"
"""What is returned when the broker neither answers nor closes while it is waited for."""
ANSWER_BYTES_MAX: Final = 256 << 20
"""No test asks for more; a larger length is garbage."""


class UnexpectedAnswer(HoldfastError):
    """The broker answered something that is no answer to what was asked."""


def frame(
    api_key: int,
    version: int,
    body: bytes,
    *,
    correlation_id: int = 1,
    client_id: str | None = "holdfast-wire-client",
    header_version: int | None = None,
) -> bytes:
    """One request with its length prefix."""
    name = b"" if client_id is None else client_id.encode()
    head = struct.pack(">hhih", api_key, version, correlation_id, -1 if client_id is None else len(name))
    if header_version is None:
        header_version = apis.request_header_version(api_key, version)
    head += name + (b"\0" if header_version == 2 else b"")
    return struct.pack(">i", len(head) + len(body)) + head + body


class WireClient:
    """One connection at a time to one broker; requests are answered before the next is sent."""

    def __init__(self, bootstrap_servers: str, *, timeout_s: float = 30.0) -> None:
        host, _, port = bootstrap_servers.rpartition(":")
        self._address = (host.strip("[]"), int(port))
        self.timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._correlation_id = 0

    def ask(self, api_key: int, version: int, fields: Mapping[str, Any]) -> Any:
        """Send one request and return the decoded response, or `CLOSED`, or `SILENT`."""
        return self.ask_encoded(api_key, version, encode_request(api_key, version, fields))

    def ask_encoded(self, api_key: int, version: int, body: bytes) -> Any:
        """The same with a body already encoded, right or wrong."""
        correlation_id = self.tell_encoded(api_key, version, body)
        answer = self.receive()
        if isinstance(answer, str):
            return answer
        return self.decode(answer, api_key, version, correlation_id)

    def tell(self, api_key: int, version: int, fields: Mapping[str, Any]) -> int:
        """Send a request and do not wait; returns its correlation id."""
        return self.tell_encoded(api_key, version, encode_request(api_key, version, fields))

    def tell_encoded(self, api_key: int, version: int, body: bytes) -> int:
        self._correlation_id += 1
        self.send(frame(api_key, version, body, correlation_id=self._correlation_id))
        return self._correlation_id

    def send(self, data: bytes) -> None:
        """Any bytes at all. A connection that is already gone shows when the answer is awaited."""
        connection = self._connected()
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self, timeout_s: float | None = None) -> bytes | Literal["connection closed", "no answer"]:
        """The next response, without its length."""
        connection = self._connected()
        connection.settimeout(timeout_s or self.timeout_s)
        try:
            (size,) = struct.unpack(">i", self._exactly(connection, 4))
            if not 4 <= size <= ANSWER_BYTES_MAX:
                raise UnexpectedAnswer(f"an answer of {size} bytes")
            return self._exactly(connection, size)
        except TimeoutError:
            self.close()
            return SILENT
        except (EOFError, ConnectionError):
            self.close()
            return CLOSED
        finally:
            if self._socket is not None:
                connection.settimeout(self.timeout_s)

    def receive_within(
        self, seconds: float | None
    ) -> bytes | Literal["connection closed", "no answer"] | None:
        """The next response, or None when none has begun to come within this time; the connection stays."""
        if seconds is not None:
            ready, _, _ = select.select([self._connected()], [], [], seconds)
            if not ready:
                return None
        return self.receive()

    def decode(self, answer: bytes, api_key: int, version: int, correlation_id: int) -> Any:
        """The entity in a raw response to the request with this correlation id."""
        (found,) = struct.unpack_from(">i", answer)
        if found != correlation_id:
            raise UnexpectedAnswer(f"correlation id {found} where {correlation_id} was asked")
        return decode_response(api_key, version, answer, 4 + response_header_version(api_key, version))

    def is_alive(self) -> bool:
        """Whether the connection still answers, asked with ApiVersions 0 (what is parked must be answered)."""
        correlation_id = self.tell_encoded(API_VERSIONS, 0, b"")
        answer = self.receive()
        if isinstance(answer, str):
            return False
        (found,) = struct.unpack_from(">i", answer)
        return bool(found == correlation_id)

    def half_close(self) -> None:
        """Say that nothing more will be sent."""
        self._connected().shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=self.timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    @staticmethod
    def _exactly(connection: socket.socket, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = connection.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
