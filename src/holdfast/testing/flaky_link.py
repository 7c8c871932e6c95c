"""A link to a broker that can be cut: a relay of TCP connections on the loopback interface.

    link = Link()
    broker = BrokerProcess(data, settings={"advertised.listeners": f"PLAINTEXT://{link.address}"}).start()
    link.lead_to(broker.bootstrap_servers)
    link.cut()       # connections die, new ones too
    link.silence()   # connections stay, and nothing comes through
    link.mend()

Clients that are to feel it are given the link's address, which the broker must tell them as its own.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

CHUNK_BYTES: Final = 1 << 16


class Link:
    def __init__(self) -> None:
        self._target: tuple[str, int] | None = None
        self._loop = asyncio.new_event_loop()
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._accepted, "127.0.0.1", 0), self._loop
        ).result()
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    def lead_to(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))

    def cut(self) -> None:
        """Every connection is reset, and so is each that is opened until it is mended."""
        self._call(self._cut)

    def silence(self) -> None:
        """Nothing comes through and nobody is told."""
        self._call(self._open.clear)

    def mend(self) -> None:
        self._call(self._mend)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # On the link's own thread

    def _call(self, action: object) -> None:
        assert callable(action)

        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result()

    def _cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def _mend(self) -> None:
        self._is_cut = False
        self._open.set()

    async def _close(self) -> None:
        self._server.close()
        self._cut()
        self._open.set()
        for task in list(self._relays):
            task.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._is_cut or self._target is None:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            # The broker is away: its clients find nobody there.
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._relay(source, sink))
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """One direction, to its end; the death of one side is passed on to the other."""
        try:
            with suppress(ConnectionError):
                while data := await source.read(CHUNK_BYTES):
                    await self._open.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.transport.abort()
