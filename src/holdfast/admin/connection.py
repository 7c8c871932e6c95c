"""One broker, one blocking connection: requests go out at any time, answers come back in order.

A large answer is received into one buffer that is used again for the next one, so the memory of a read is that of its
largest answer; `receive` hands out a view that holds until the next `receive` on this connection. Everything else is
received into memory of its own, so that other questions may be asked while such a view is looked at.

Whatever fails here, the connection is closed and `Unreachable` tells why; opening a new one is the caller's decision.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.admin.errors import NotAuthorised, Unreachable, UnsupportedBroker
from holdfast.admin.sasl import dialogue
from holdfast.admin.settings import ConnectionSettings, TlsSettings
from holdfast.errors import ConfigError, PeerError
from holdfast.real import unfilled_buffer
from holdfast.wire import apis
from holdfast.wire.api_keys import API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE
from holdfast.wire.messages import decode_response, encode_request, response_header_version

ANSWER_BYTES_MAX: Final = 1 << 30
"""No answer we ask for is larger: a batch unpacks to 256 MiB at most. A greater length is garbage."""
BUFFER_BYTES_MIN: Final = 1 << 20
_TICK_S: Final = 1
"""How often a wait inside the kernel looks up: a bound on how late a time-out is noticed."""

Address = tuple[str, int]

_size = struct.Struct(">i")
_head = struct.Struct(">hhih")


def text_of(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Connection:
    def __init__(
        self, address: Address, settings: ConnectionSettings, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address = address
        self._tls = tls
        self._settings = settings
        self._client_id = settings.client_id.encode()
        self._socket: socket.socket | None = None
        self._offered: dict[int, tuple[int, int]] = {}
        self._correlation_id = 0
        self._awaited: dict[int, tuple[int, int]] = {}
        """API and version by correlation id, in the order in which the answers will come."""
        self._early: dict[int, memoryview] = {}
        """Answers that came before somebody waited for them."""
        self._buffer = memoryview(bytearray(0))
        self.not_before_s = 0.0
        """The broker asked to be left alone until then."""

    # -------------------------------------------------------------------- the connection

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def open(self) -> None:
        """Connect, find out what the broker speaks, and authenticate."""
        timeout_s = self._settings.connect_timeout_ms / 1000
        deadline_s = time.monotonic() + timeout_s
        try:
            plain = socket.create_connection(self.address, timeout=timeout_s)
            self._socket = plain
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                self._socket = self._tls.wrap_socket(plain, server_hostname=self.address[0])
            else:
                plain.setblocking(True)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    plain.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _TICK_S, 0))
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise NotAuthorised(
                f"the certificate of {text_of(self.address)} is not trusted: {error.verify_message} "
                "(ssl.ca.location)"
            ) from error
        except OSError as error:
            raise self._lost(error) from error
        # Version 0 of ApiVersions is the one every broker answers.
        answer = self._ask(API_VERSIONS, 0, {}, deadline_s)
        self._offered = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}
        if self._settings.sasl is not None:
            self._authenticate(deadline_s)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._awaited.clear()
        self._early.clear()

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def has_answer(self, correlation_id: int) -> bool:
        """Whether waiting on the descriptor would be wrong: the answer, or a part of it, is here already."""
        if correlation_id in self._early:
            return True
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    # -------------------------------------------------------------------- questions

    def version(self, api_key: int, lowest: int = 0) -> int:
        """The newest version of a request that both sides know, and that is not older than `lowest`."""
        api = apis.BY_KEY[api_key]
        broker_lowest, broker_highest = self._offered.get(api_key, (0, -1))
        found = min(api.max, broker_highest)
        if found < max(api.served_from, broker_lowest, lowest):
            has = f"only up to version {broker_highest}" if broker_highest >= 0 else "not at all"
            raise UnsupportedBroker(
                f"the broker at {text_of(self.address)} offers {api.name} {has}; version {lowest} is needed"
            )
        return found

    def ask(self, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0, highest: int = 99) -> Any:
        """Send one request and wait for its answer."""
        deadline_s = time.monotonic() + self._settings.request_timeout_ms / 1000
        return self._ask(api_key, min(self.version(api_key, lowest), highest), fields, deadline_s)

    def send(self, api_key: int, version: int, body: bytes) -> int:
        """Send one request and do not wait; returns its correlation id."""
        if self._socket is None:
            raise Unreachable(f"the connection to {text_of(self.address)} is closed")
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        head = _head.pack(api_key, version, self._correlation_id, len(self._client_id)) + self._client_id
        if apis.request_header_version(api_key, version) == 2:
            head += b"\0"
        try:
            self._socket.sendall(_size.pack(len(head) + len(body)) + head + body)
        except OSError as error:
            raise self._lost(error) from error
        self._awaited[self._correlation_id] = (api_key, version)
        return self._correlation_id

    def receive(self, correlation_id: int) -> memoryview:
        """The body of an answer; the view holds until the next call."""
        deadline_s = time.monotonic() + self._settings.request_timeout_ms / 1000
        return self._receive(correlation_id, deadline_s, reuse=True)

    def abandon(self) -> None:
        """Nobody waits any more for what was asked: the connection is of no use to others until it came."""
        if self._awaited:
            self.close()

    def _ask(self, api_key: int, version: int, fields: Mapping[str, Any], deadline_s: float) -> Any:
        correlation_id = self.send(api_key, version, encode_request(api_key, version, fields))
        body = self._receive(correlation_id, deadline_s, reuse=False)
        try:
            return decode_response(api_key, version, body)
        except PeerError as error:
            raise self._lost(error) from error

    def _receive(self, correlation_id: int, deadline_s: float, *, reuse: bool) -> memoryview:
        while correlation_id not in self._early:
            if correlation_id not in self._awaited:
                raise Unreachable(f"the connection to {text_of(self.address)} was closed")
            expected = next(iter(self._awaited))
            try:
                body = self._frame(expected, deadline_s, reuse=reuse and expected == correlation_id)
            except (OSError, PeerError) as error:
                raise self._lost(error) from error
            del self._awaited[expected]
            if expected == correlation_id:
                return body
            self._early[expected] = body
        return self._early.pop(correlation_id)

    def _frame(self, correlation_id: int, deadline_s: float, *, reuse: bool) -> memoryview:
        prefix = bytearray(8)
        self._fill(memoryview(prefix), deadline_s)
        size, found = struct.unpack(">ii", prefix)
        if not 4 <= size <= ANSWER_BYTES_MAX:
            raise PeerError(f"it announced an answer of {size} bytes")
        if found != correlation_id:
            raise PeerError(f"it answered {found} where {correlation_id} was asked")
        size -= 4
        if not reuse:
            view = memoryview(unfilled_buffer(size))
        else:
            if len(self._buffer) < size:
                self._buffer = memoryview(unfilled_buffer(max(size + size // 4, BUFFER_BYTES_MIN)))
            view = self._buffer[:size]
        self._fill(view, deadline_s)
        header_bytes = response_header_version(*self._awaited[correlation_id])
        if header_bytes and (size < 1 or view[0] != 0):
            raise PeerError("its answer's header has tagged fields nobody defined")
        return view[header_bytes:]

    def _fill(self, view: memoryview, deadline_s: float) -> None:
        """Receive until the view is full: one system call where the kernel can wait for all of it."""
        got, size = 0, len(view)
        connection = self._socket
        assert connection is not None
        while got < size:
            if self._tls is not None:
                connection.settimeout(max(0.001, deadline_s - time.monotonic()))
                count = connection.recv_into(view[got:])
            else:
                try:
                    count = connection.recv_into(view[got:], size - got, socket.MSG_WAITALL)
                except BlockingIOError:
                    count = -1
            if count == 0:
                raise ConnectionResetError("it closed the connection")
            if count > 0:
                got += count
            if got < size and time.monotonic() > deadline_s:
                raise TimeoutError("it did not answer in time")

    # -------------------------------------------------------------------- who we are

    def _authenticate(self, deadline_s: float) -> None:
        sasl = self._settings.sasl
        assert sasl is not None
        version = self.version(SASL_HANDSHAKE, lowest=1)
        answer = self._ask(SASL_HANDSHAKE, version, {"mechanism": sasl.mechanism}, deadline_s)
        if answer.error_code is not ErrorCode.none:
            self.close()
            raise NotAuthorised(
                f"the broker at {text_of(self.address)} does not take {sasl.mechanism}; "
                f"it takes {', '.join(answer.mechanisms) or 'none'} (sasl.mechanism)"
            )
        version = self.version(SASL_AUTHENTICATE)
        steps = dialogue(sasl)
        said = next(steps)
        while True:
            answer = self._ask(SASL_AUTHENTICATE, version, {"auth_bytes": said}, deadline_s)
            if answer.error_code is not ErrorCode.none:
                self.close()
                reason = answer.error_message or answer.error_code.name
                raise NotAuthorised(
                    f"the broker at {text_of(self.address)} refuses the credentials: {reason}"
                )
            try:
                said = steps.send(bytes(answer.auth_bytes))
            except StopIteration:
                return
            except NotAuthorised:
                self.close()
                raise

    def _lost(self, error: Exception) -> Unreachable:
        self.close()
        reason = (
            (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        )
        # A broker that expects TLS hangs up on plain bytes, and one that does not answers TLS with nonsense.
        is_doubtful = not self._offered and isinstance(error, ConnectionResetError | ssl.SSLError)
        hint = "; is security.protocol right?" if is_doubtful else ""
        return Unreachable(f"cannot reach the broker at {text_of(self.address)}: {reason}{hint}")


def tls_context(tls: TlsSettings | None) -> ssl.SSLContext | None:
    """What TLS needs to know, read from its files; None without TLS."""
    if tls is None:
        return None
    try:
        context = ssl.create_default_context(cafile=tls.ca_location, cadata=tls.ca_pem)
        if tls.certificate_location:
            context.load_cert_chain(tls.certificate_location, tls.key_location, tls.key_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the files of the TLS settings cannot be used: {error}") from error
    context.check_hostname = tls.verify_host and tls.verify_certificate
    if not tls.verify_certificate:
        context.verify_mode = ssl.CERT_NONE
    return context
