"""One socket: frames in, responses out, both bounded.

Frames are read into a buffer of their own size, announced by the four bytes before them. A length that is
negative or above `socket.request.max.bytes` closes the connection before anything is read. File slices are read
and written piece by piece as the socket drains, so a slow reader holds one piece in memory, not its whole answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from holdfast.log.segment import Slice
from holdfast.node.connection import Connection
from holdfast.node.context import Part
from holdfast.seams import Buffer
from holdfast.server.real import RealFile

if TYPE_CHECKING:
    from holdfast.server.server import Server

RECEIVE_BYTES: Final = 64 * 1024
"""The standing receive buffer: many small requests arrive in one read."""
SLICE_BYTES: Final = 256 * 1024
"""What is read of a file at a time."""
WRITE_HIGH_BYTES: Final = 512 * 1024
"""Unsent bytes after which nothing more is read from files or from the socket."""


class ClientProtocol(asyncio.BufferedProtocol):
    def __init__(self, server: Server, listener: str) -> None:
        self._server = server
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self.connection: Connection | None = None
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._have = 0
        """Bytes in the standing buffer not consumed yet."""
        self._large: bytearray | None = None
        """The buffer of a frame larger than the standing one."""
        self._large_have = 0
        self._outgoing: deque[Part] = deque()
        self._writable = True
        self._reads_file = False
        """A read from disk is under way in a thread; what follows it waits."""
        self._reading = True
        self.last_active = 0.0

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        peer = transport.get_extra_info("peername")
        address = f"{peer[0]}:{peer[1]}" if peer else "?"
        self.connection = self._server.node.connect(self._listener, address, self._transmit, self._close)
        self._server.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._outgoing.clear()
        if self.connection is not None:
            self.connection.lost()
        self._server.disconnected(self)

    def get_buffer(self, size_hint: int) -> memoryview:
        if self._large is not None:
            return memoryview(self._large)[self._large_have :]
        return self._view[self._have :]

    def buffer_updated(self, count: int) -> None:
        self.last_active = self._server.loop.time()
        if self._large is not None:
            self._large_have += count
            if self._large_have == len(self._large):
                frame, self._large = self._large, None
                self._receive(frame)
            return
        self._have += count
        self._consume()

    def _consume(self) -> None:
        """Hand every whole frame in the standing buffer to the node; keep the rest."""
        buffer, have = self._buffer, self._have
        position = 0
        while have - position >= 4:
            length = int.from_bytes(buffer[position : position + 4], "big", signed=True)
            if length < 0 or length > self._server.frame_bytes_max:
                self._close(f"a frame of {length} bytes is not between 0 and {self._server.frame_bytes_max}")
                return
            end = position + 4 + length
            if end > have:
                if 4 + length > RECEIVE_BYTES:
                    self._large = bytearray(length)
                    self._large_have = have - position - 4
                    self._large[: self._large_have] = self._view[position + 4 : have]
                    position = have
                break
            self._receive(bytes(self._view[position + 4 : end]))
            position = end
            if self._transport is None or self._transport.is_closing():
                return
        if position:
            rest = have - position
            buffer[:rest] = buffer[position:have]
            self._have = rest

    def _receive(self, frame: bytes | bytearray) -> None:
        connection = self.connection
        assert connection is not None
        connection.receive(frame, self._server.now())
        if connection.is_saturated and self._reading:
            self._pause()

    def pause_writing(self) -> None:
        self._writable = False
        self._pause()

    def resume_writing(self) -> None:
        self._writable = True
        self._send()

    def eof_received(self) -> bool:
        return False

    # Sending

    def _transmit(self, parts: list[Part]) -> None:
        self._outgoing += parts
        if self._writable:
            self._send()
        if not self._reading:
            self._maybe_resume()

    def _send(self) -> None:
        transport = self._transport
        outgoing = self._outgoing
        if transport is None or transport.is_closing():
            outgoing.clear()
            return
        while outgoing and self._writable and not self._reads_file:
            part = outgoing.popleft()
            if not isinstance(part, Slice):
                transport.write(part)
                continue
            wanted = min(part.length, SLICE_BYTES)
            file = cast(RealFile, part.file)
            data = file.pread_cached(wanted, part.position)
            if data is None:
                outgoing.appendleft(part)
                self._reads_file = True
                self._server.read_in_thread(file, wanted, part.position, self._file_read)
                return
            self._write_slice(part, data)
        self._maybe_resume()

    def _write_slice(self, part: Slice, data: Buffer) -> None:
        """Send what was read of a slice and put the rest back in front."""
        if len(data) < part.length:
            rest = Slice(part.file, part.position + len(data), part.length - len(data))
            self._outgoing.appendleft(rest)
        assert self._transport is not None
        self._transport.write(data)

    def _file_read(self, data: bytes, error: OSError | None) -> None:
        """A read that needed the disk has returned."""
        self._reads_file = False
        if self._transport is None or self._transport.is_closing():
            self._outgoing.clear()
            return
        part = self._outgoing.popleft()
        assert isinstance(part, Slice)
        if error is not None or not data:
            what = error or f"it ends before the {part.position + part.length} bytes promised"
            self._close(f"reading {part.file.path} failed: {what}")
            return
        self._write_slice(part, data)
        self._send()

    def _pause(self) -> None:
        if self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def _maybe_resume(self) -> None:
        connection = self.connection
        if self._reading or not self._writable or self._transport is None or connection is None:
            return
        if not connection.is_saturated and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def _close(self, reason: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            peer = self.connection.info.address if self.connection is not None else "?"
            self._server.say(f"closing the connection of {peer}: {reason}")
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
