"""A link to a broker that fails: a relay of TCP connections on the loopback interface.

    link = Link()
    settings = {"advertised.listeners": f"PLAINTEXT://{link.address}"}
    broker = BrokerProcess(data, settings=settings).start()
    link.lead_to(broker.bootstrap_servers)
    link.cut()                     # connections die, new ones too
    link.silence()                 # connections stay, and nothing comes through
    link.silence("responses")      # one way only: what is asked arrives, what is answered does not
    link.delay(0.2)                # everything takes so long to cross
    link.mend()

Clients that are to feel it are given the link's address, which the broker must tell them as its own. What is written
into a silent link is kept and arrives once it is mended, as TCP sends again what a network has lost.

`KafkaLink` reads the headers of the frames it passes on, and so can do the same to single clients, known by their
`client.id`, and to single requests and answers, known by their API key:

    link.silence_clients(lambda client_id: client_id == "zombie")
    held = link.hold(PRODUCE, 2)   # the next two answers to sends stay here
    held.wait()
    held.drop()                    # they are lost, and with them their connections; or release() lets them go on
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, Self

CHUNK_BYTES: Final = 1 << 16
ON_THE_WAY_MAX: Final = 256
"""Chunks or frames that are on the way in one direction; who sends more waits, as with a full window."""
REQUEST_HEADER: Final = struct.Struct(">hhih")
"""API key, version, correlation id, length of the client id."""

Direction = Literal["requests", "responses"]
DIRECTIONS: Final[tuple[Direction, Direction]] = ("requests", "responses")


@dataclass(eq=False)
class Connection:
    """One client's connection, both legs of it."""

    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    client_id: str | None = None
    """As its first request says; None before that, and on links that do not read what they pass on."""
    asked: dict[int, int] = field(default_factory=dict)
    """API keys of requests that were not answered, by correlation id and in their order."""

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


@dataclass(frozen=True)
class Crossing:
    """Something on its way: due on the other side at that time of the loop."""

    data: bytes
    due: float
    api_key: int | None = None


class Link:
    def __init__(self) -> None:
        self._target: tuple[str, int] | None = None
        self._loop = asyncio.new_event_loop()
        self._is_cut = False
        self._silent: set[Direction] = set()
        self._delays_s: dict[Direction, float] = dict.fromkeys(DIRECTIONS, 0.0)
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Set, and recreated, whenever what may pass has changed."""
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

    def silence(self, direction: Direction | None = None) -> None:
        """Nothing comes through, that way or either way, and nobody is told."""
        self._call(lambda: self._silent.update(DIRECTIONS if direction is None else (direction,)))

    def delay(self, seconds: float, direction: Direction | None = None) -> None:
        """What is sent from now on takes so long to cross, in its order."""
        self._call(
            lambda: self._delays_s.update(
                dict.fromkeys(DIRECTIONS if direction is None else (direction,), seconds)
            )
        )

    def mend(self) -> None:
        self._call(self._mend)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # On the link's own thread

    def _call(self, action: Callable[[], None]) -> None:
        """Do it between two steps of the relays, and have those that wait look again."""

        async def act() -> None:
            action()
            self._changed.set()
            self._changed = asyncio.Event()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result()

    def _has_been_cut(self) -> bool:
        """While it was connecting, perhaps."""
        return self._is_cut

    def _cut(self) -> None:
        self._is_cut = True
        for connection in self._connections:
            connection.abort()
        self._connections.clear()

    def _mend(self) -> None:
        self._is_cut = False
        self._silent.clear()
        self._delays_s = dict.fromkeys(DIRECTIONS, 0.0)

    async def _close(self) -> None:
        self._server.close()
        self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._is_cut or self._target is None:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            # The broker is away: its clients find nobody there.
            writer.transport.abort()
            return
        connection = Connection((writer, far_writer))
        if self._has_been_cut():
            connection.abort()
        else:
            self._connections.add(connection)
        self._relay(connection, "requests", reader, far_writer)
        self._relay(connection, "responses", far_reader, writer)

    def _relay(
        self,
        connection: Connection,
        direction: Direction,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
    ) -> None:
        on_the_way: asyncio.Queue[Crossing | None] = asyncio.Queue(ON_THE_WAY_MAX)
        taking = asyncio.create_task(self._take(connection, direction, source, on_the_way))
        giving = asyncio.create_task(self._give(connection, direction, on_the_way, sink))
        giving.add_done_callback(lambda _: taking.cancel())
        for task in (taking, giving):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take(
        self,
        connection: Connection,
        direction: Direction,
        source: asyncio.StreamReader,
        on_the_way: asyncio.Queue[Crossing | None],
    ) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            async for data, api_key in self._pieces(connection, direction, source):
                due = self._loop.time() + self._delays_s[direction]
                await on_the_way.put(Crossing(data, due, api_key))
        await on_the_way.put(None)

    async def _give(
        self,
        connection: Connection,
        direction: Direction,
        on_the_way: asyncio.Queue[Crossing | None],
        sink: asyncio.StreamWriter,
    ) -> None:
        """One direction, to its end; the death of one side is passed on to the other."""
        try:
            with suppress(ConnectionError):
                while (crossing := await on_the_way.get()) is not None:
                    if (early_s := crossing.due - self._loop.time()) > 0:
                        await asyncio.sleep(early_s)
                    while self._is_held_back(connection, direction):
                        await self._changed.wait()
                    if await self._passes(connection, direction, crossing):
                        sink.write(crossing.data)
                        await sink.drain()
        finally:
            self._connections.discard(connection)
            connection.abort()

    # What a link that reads along does otherwise

    async def _pieces(
        self, connection: Connection, direction: Direction, source: asyncio.StreamReader
    ) -> AsyncIterator[tuple[bytes, int | None]]:
        while data := await source.read(CHUNK_BYTES):
            yield data, None

    def _is_held_back(self, connection: Connection, direction: Direction) -> bool:
        return direction in self._silent

    async def _passes(self, connection: Connection, direction: Direction, crossing: Crossing) -> bool:
        return connection in self._connections


class Held:
    """Requests or answers that were stopped on their way: `wait` for them, then `release` or `drop` them."""

    def __init__(self, link: KafkaLink, api_key: int, count: int, direction: Direction) -> None:
        self._link = link
        self.api_key = api_key
        self.direction: Direction = direction
        self.left = count
        """How many are still to be stopped."""
        self.is_released = False
        self._are_there = threading.Event()
        self.connections: list[Connection] = []
        """Of those that were stopped."""

    @property
    def is_done(self) -> bool:
        """Whether as many were stopped as were asked for."""
        return self._are_there.is_set()

    def wait(self, timeout_s: float = 60.0) -> bool:
        return self._are_there.wait(timeout_s)

    def release(self) -> None:
        """What was stopped goes on, and nothing more is stopped."""
        self._link.settle(self, is_lost=False)

    def drop(self) -> None:
        """What was stopped is lost, and its connections with it: TCP loses nothing between two that live on."""
        self._link.settle(self, is_lost=True)

    def stop(self, connection: Connection) -> None:
        self.left -= 1
        self.connections.append(connection)
        if self.left == 0:
            self._are_there.set()


class KafkaLink(Link):
    """A link that knows requests, answers, and whose they are."""

    def __init__(self) -> None:
        self._held: list[Held] = []
        self._is_silenced: Callable[[str], bool] = lambda _: False
        super().__init__()

    def silence_clients(self, is_silenced: Callable[[str], bool]) -> None:
        """To and from clients with such an id nothing comes through; in place of those silenced before."""

        def change() -> None:
            self._is_silenced = is_silenced

        self._call(change)

    def hold(self, api_key: int, count: int = 1, direction: Direction = "responses") -> Held:
        """Stop the next so many answers to requests of this kind, or the requests themselves.

        What comes behind one on the same connection waits behind it, as in any stream.
        """
        held = Held(self, api_key, count, direction)
        self._call(lambda: self._held.append(held))
        return held

    def swallow(self, api_key: int, count: int = 1) -> Held:
        """The next so many answers to requests of this kind are lost; with the last goes the connection."""
        held = _Swallowed(self, api_key, count, "responses")
        self._call(lambda: self._held.append(held))
        return held

    def settle(self, held: Held, *, is_lost: bool) -> None:
        def act() -> None:
            held.is_released = True
            if held in self._held:
                self._held.remove(held)
            if is_lost:
                for connection in held.connections:
                    connection.abort()
                    self._connections.discard(connection)

        self._call(act)

    def _mend(self) -> None:
        super()._mend()
        self._is_silenced = lambda _: False
        for held in self._held:
            held.is_released = True
        self._held.clear()

    async def _pieces(
        self, connection: Connection, direction: Direction, source: asyncio.StreamReader
    ) -> AsyncIterator[tuple[bytes, int | None]]:
        while True:
            size = await source.readexactly(4)
            frame = await source.readexactly(int.from_bytes(size, "big"))
            yield size + frame, self._api_key(connection, direction, frame)

    def _api_key(self, connection: Connection, direction: Direction, frame: bytes) -> int | None:
        if direction == "responses":
            # Answers come in the order of the requests: what was asked before and not answered never will be.
            correlation_id = int.from_bytes(frame[:4], "big", signed=True)
            while connection.asked:
                asked = next(iter(connection.asked))
                found = connection.asked.pop(asked)
                if asked == correlation_id:
                    return found
            return None
        api_key, _, correlation_id, length = REQUEST_HEADER.unpack_from(frame)
        connection.asked[correlation_id] = api_key
        if connection.client_id is None:
            start = REQUEST_HEADER.size
            connection.client_id = frame[start : start + max(length, 0)].decode(errors="replace")
        return int(api_key)

    def _is_held_back(self, connection: Connection, direction: Direction) -> bool:
        return super()._is_held_back(connection, direction) or self._is_silenced(connection.client_id or "")

    async def _passes(self, connection: Connection, direction: Direction, crossing: Crossing) -> bool:
        for held in self._held:
            if held.left and (held.api_key, held.direction) == (crossing.api_key, direction):
                held.stop(connection)
                if isinstance(held, _Swallowed):
                    if held.left == 0:
                        self._held.remove(held)
                        raise ConnectionAbortedError
                    return False
                while not held.is_released:
                    await self._changed.wait()
                break
        return await super()._passes(connection, direction, crossing)


class _Swallowed(Held):
    """Answers that are gone at once, in a row."""
