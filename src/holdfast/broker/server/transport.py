"""One socket: frames in, responses out, both bounded.

All connections of a server share one receive buffer: asyncio asks for a buffer, fills it and reports in one step, so
an idle connection holds none. Whole frames in it are handed on at once; of a frame that has only begun, what is
there moves to a buffer of the frame's announced size, which takes memory as bytes arrive, not before. A length that
is negative or above `socket.request.max.bytes` closes the connection before anything is read.

Reading stops while too many requests are under way, while the other side does not take its answers, and while
half-received frames fill `queued.max.request.bytes`: see `holdfast.broker.server.frame_memory`. What was already
read waits in `_rest`.

File slices are read and written piece by piece as the socket drains, so a slow reader holds one piece in memory,
not its whole answer.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Final, cast

from holdfast.broker.log.segment import Slice
from holdfast.broker.node.connection import Connection
from holdfast.broker.node.context import Part
from holdfast.broker.node.loggers import CONNECTIONS
from holdfast.broker.server.frame_memory import HalfFrame
from holdfast.real import RealFile
from holdfast.saying import Line, debug, error
from holdfast.seams import Buffer

if TYPE_CHECKING:
    from holdfast.broker.server.server import Server

RECEIVE_BYTES: Final = 128 * 1024
"""The receive buffer of a server: many small requests arrive in one read."""
SLICE_BYTES: Final = 256 * 1024
"""What is read of a file at a time."""
WRITE_HIGH_BYTES: Final = 512 * 1024
"""Unsent bytes after which nothing more is read from files or from the socket."""
OUTGOING_PARTS_MAX: Final = 256
"""Pieces of answers that wait for a file to be read, after which no more requests are taken."""
BULK_BYTES: Final = 64 * 1024
"""A request or a slice from which on its client is after throughput: it has work to do before it asks again."""
LENGTH_BYTES: Final = 4
_LENGTH: Final = struct.Struct(">i").unpack_from
PULSES: Final = (b"\x00\x0c", b"\x00\x44")
"""How requests begin after whose answer a client is silent for seconds: Heartbeat and ConsumerGroupHeartbeat."""


class ClientProtocol(asyncio.BufferedProtocol):
    def __init__(self, server: Server, listener: str) -> None:
        self._server = server
        self.listener = listener
        self._transport: asyncio.Transport | None = None
        self.connection: Connection | None = None
        self._rest = b""
        """Bytes read and not handed on: less than a frame's length, or frames that came while reading was paused."""
        self._frame: HalfFrame | None = None
        """The frame that is being received."""
        self._outgoing: deque[Part] = deque()
        self._writable = True
        self._reads_file = False
        """A read from disk is under way in a thread; what follows it waits."""
        self._reading = True
        self._socket_paused = False
        self._consuming = False
        self._is_unhurried = False
        """No reason to stay awake for the next request: the last one was a heartbeat, or this is bulk."""
        self.last_active = 0.0
        """The loop's time when a byte last came or unsent bytes drained: what idleness is counted from."""
        self._rest_arrived_ns = 0
        """When `_rest` came, by the clock that durations are measured with."""

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        peer = transport.get_extra_info("peername")
        address = f"{peer[0]}:{peer[1]}" if peer else "?"
        self.last_active = self._server.loop.time()
        self.connection = self._server.node.connect(self.listener, address, self._transmit, self._close)
        self._server.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._outgoing.clear()
        self._rest = b""
        if self._frame is not None:
            self._server.frame_memory.end(self._frame)
            self._frame = None
        if self.connection is not None:
            self.connection.lost()
        self._server.disconnected(self)

    def get_buffer(self, size_hint: int) -> memoryview:
        frame = self._frame
        if frame is not None:
            end = frame.arrived + self._server.frame_memory.room(frame)
            return memoryview(frame.buffer)[frame.arrived : end]
        return self._server.receive_view

    def buffer_updated(self, count: int) -> None:
        self.last_active = self._server.loop.time()
        frame = self._frame
        if frame is not None:
            memory = self._server.frame_memory
            if not memory.arrived(frame, count):
                self._pause()
            elif frame.is_whole:
                self._frame = None
                memory.end(frame)
                self._receive(frame.buffer)
            return
        if not self._rest:
            view = self._server.receive_view
            # A client that waits for its answers sends one whole frame at a time.
            length = count - LENGTH_BYTES
            is_whole = 0 < length <= self._server.frame_bytes_max and _LENGTH(view)[0] == length
            if is_whole and self._reading:
                self._receive(bytes(view[LENGTH_BYTES:count]))
            else:
                self._consume(view, count, monotonic_ns())
        else:
            data = self._rest + self._server.receive_view[:count]
            self._consume(memoryview(data), len(data), monotonic_ns())
        if not self._reading:
            self.resume()

    def _consume(self, data: memoryview, have: int, arrived_ns: int) -> None:
        """Hand every whole frame of `data[:have]` to the node, as long as reading goes on; keep the rest."""
        position = 0
        self._consuming = True
        assert self.connection is not None
        self.connection.arrived_ns = self._rest_arrived_ns = arrived_ns
        while have - position >= LENGTH_BYTES and self._reading:
            start = position + LENGTH_BYTES
            (length,) = _LENGTH(data, position)
            if length < 0 or length > self._server.frame_bytes_max:
                self._close(f"a frame of {length} bytes is not between 0 and {self._server.frame_bytes_max}")
                return
            end = start + length
            if end > have:
                self._begin_frame(length, data[start:have])
                position = have
                break
            position = end
            self._receive(bytes(data[start:end]))
            if self._transport is None or self._transport.is_closing():
                return
        self._rest = bytes(data[position:have]) if position < have else b""
        self._consuming = False
        self.connection.arrived_ns = 0

    def _begin_frame(self, length: int, begun: memoryview) -> None:
        """Take the first bytes of a frame; the rest is read when there is memory for it."""
        self._frame = HalfFrame(self, length, begun)
        if not self._server.frame_memory.begin(self._frame):
            self._pause()

    def _receive(self, frame: bytes | bytearray) -> None:
        connection = self.connection
        assert connection is not None
        self._is_unhurried = len(frame) >= BULK_BYTES or frame[:2] in PULSES
        connection.receive(frame, self._server.now())
        if connection.is_saturated or len(self._outgoing) >= OUTGOING_PARTS_MAX:
            self._pause()

    def pause_writing(self) -> None:
        self._writable = False
        self._pause()

    def resume_writing(self) -> None:
        self._writable = True
        self.last_active = self._server.loop.time()
        self._send()

    def eof_received(self) -> bool:
        return False

    # Sending

    def _transmit(self, parts: list[Part]) -> None:
        if not parts:
            if not self._reading:
                self.resume()
        elif self._writable:
            first = parts[0]
            if len(parts) == 1 and not self._outgoing and not isinstance(first, Slice):
                self._write(first)
            else:
                self._outgoing += parts
                self._send()
            if not self._is_unhurried:
                self._server.stay_awake()
        else:
            self._outgoing += parts

    def _write(self, data: Buffer) -> None:
        """An answer in one piece, with none before it that waits: the usual case."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            if not self._reading:
                self.resume()

    def _send(self) -> None:
        transport = self._transport
        outgoing = self._outgoing
        if transport is None or transport.is_closing():
            outgoing.clear()
            return
        while outgoing and self._writable and not self._reads_file:
            # A response is a few pieces around file slices: they leave in one system call.
            pieces: list[Buffer] = []
            gathered = 0
            while outgoing and gathered < SLICE_BYTES:
                part = outgoing.popleft()
                if isinstance(part, Slice):
                    data = self._cached(part)
                    if data is None:
                        break
                else:
                    data = part
                pieces.append(data)
                gathered += len(data)
            if len(pieces) == 1:
                transport.write(pieces[0])
            elif pieces:
                transport.writelines(pieces)
            if transport.is_closing():
                return
        if not self._reading:
            self.resume()

    def _cached(self, part: Slice) -> Buffer | None:
        """The beginning of a slice, whose rest is put back in front; None when a thread has to read it first."""
        wanted = min(part.length, SLICE_BYTES)
        self._is_unhurried = self._is_unhurried or wanted >= BULK_BYTES
        file = cast(RealFile, part.file)
        try:
            data = file.pread_cached(wanted, part.position)
        except OSError as failure:
            self._close(error(f"reading {file.path} failed: {failure}", kind=f"reading {file.path}"))
            return None
        if data is None:
            self._outgoing.appendleft(part)
            self._reads_file = True
            self._server.read_in_thread(file, wanted, part.position, self._file_read)
        else:
            self._put_back(part, len(data))
        return data

    def _put_back(self, part: Slice, sent: int) -> None:
        if sent < part.length:
            self._outgoing.appendleft(Slice(part.file, part.position + sent, part.length - sent))

    def _file_read(self, data: bytes, failure: BaseException | None) -> None:
        """A read that needed the disk has returned."""
        self._reads_file = False
        if self._transport is None or self._transport.is_closing():
            self._outgoing.clear()
            return
        part = self._outgoing.popleft()
        assert isinstance(part, Slice)
        if failure is not None or not data:
            path = part.file.path
            what = failure or f"it ends before the {part.position + part.length} bytes promised"
            self._close(error(f"reading {path} failed: {what}", kind=f"reading {path}"))
            return
        self._put_back(part, len(data))
        self._transport.write(data)
        self._send()

    # Reading, or not

    def _pause(self) -> None:
        self._reading = False
        if not self._socket_paused and self._transport is not None:
            self._socket_paused = True
            self._transport.pause_reading()

    @property
    def _may_read(self) -> bool:
        connection, transport = self.connection, self._transport
        return (
            self._writable
            and (self._frame is None or not self._frame.waits)
            and connection is not None
            and not connection.is_saturated
            and len(self._outgoing) < OUTGOING_PARTS_MAX
            and transport is not None
            and not transport.is_closing()
        )

    def resume(self) -> None:
        """Read on if nothing stands against it: first what is already here, then the socket."""
        if self._consuming:
            return
        while not self._reading and self._may_read:
            self._reading = True
            if len(self._rest) >= LENGTH_BYTES:
                # May well pause again.
                self._consume(memoryview(self._rest), len(self._rest), self._rest_arrived_ns)
        if self._reading and self._socket_paused and self._transport is not None:
            self._socket_paused = False
            self._transport.resume_reading()

    def _close(self, reason: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._tell(reason)
            self._transport.close()

    def _tell(self, reason: str) -> None:
        """Say why the connection ends, at the level of the reason. A client can have this said as often as it likes."""
        peer = self.connection.session.address if self.connection is not None else "?"
        line = Line.of(reason)
        text = f"closing the connection of {peer}: {reason}"
        self._server.say(Line(text, line.level, line.kind or "closed connection", CONNECTIONS))

    def close_idle(self, reason: str) -> None:
        """End a connection nobody uses. Answers its client never took would keep it open, so they are dropped."""
        if self._transport is not None and (self._outgoing or self._transport.get_write_buffer_size()):
            self.lose(f"it does not take its answers: {reason}")
        else:
            self._close(debug(reason))

    def go_on(self) -> None:
        """There is memory for more of the frame."""
        self.last_active = self._server.loop.time()
        self.resume()

    def lose(self, reason: str) -> None:
        """End a connection at once, whatever it has yet to be sent."""
        self._tell(reason)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
