"""The asyncio shell: binds listeners, runs a node on one event loop, keeps its timers, stops it cleanly."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from holdfast.broker.node.loggers import Levels
from holdfast.broker.node.node import Node
from holdfast.broker.node.services import NodeSeams
from holdfast.broker.server.flusher import AdaptiveFlusher
from holdfast.broker.server.frame_memory import FrameMemory, frame_bytes_limit
from holdfast.broker.server.metrics_endpoint import MetricsEndpoint
from holdfast.broker.server.preload import preload_first, preload_when_idle
from holdfast.broker.server.staying_awake import StayingAwake
from holdfast.broker.server.transport import RECEIVE_BYTES, ClientProtocol
from holdfast.broker.server.worker import ProcessWorker
from holdfast.config.broker import BrokerConfig
from holdfast.config.listeners import EVERY_ADDRESS, Listener, address_text
from holdfast.errors import UsageError
from holdfast.real import RealClock, RealFile, RealFileSystem, RealRandomness, boot_id, missing_here
from holdfast.saying import Say, warn
from holdfast.seams import Now
from holdfast.wire.metadata_records import EndPoint

READ_THREADS = 4
"""Reads of cold data that may wait for the disk at a time."""
SECURITY_PROTOCOLS = {"PLAINTEXT": 0, "SSL": 1, "SASL_PLAINTEXT": 2, "SASL_SSL": 3}
IDLE_SWEEPS_PER_LIMIT: Final = 4
"""An idle connection outlives `connections.max.idle.ms` by at most this part of it."""
IDLE_SWEEP_SECONDS_MIN: Final = 0.05
"""A limit of nothing at all must not keep the loop busy with sweeps."""
IDLE_SWEEP_SECONDS_MAX: Final = 30.0
FILE_DESCRIPTORS_MIN: Final = 256
"""Kept for files, however few a process may have open."""
OTHER_WRITER_QUIET_SECONDS: Final = 10.0
"""Twenty times what a controller of Kafka's lets pass between two records."""
OTHER_WRITER_SECONDS_MAX: Final = 300.0
"""It has tried the lock long before; a supervisor must not wait for ever."""
OTHER_WRITER_LOOK_SECONDS: Final = 0.5
DESCRIPTORS_UNLIMITED: Final = 1 << 30
DESCRIPTORS_OF_MACOS: Final = 10_240
"""OPEN_MAX: the most that it takes for a limit, whatever it says the limit is."""


class Machine(NamedTuple):
    """What a broker runs on. Tests give it a disk that fills up or a clock that they move."""

    file_system: RealFileSystem
    clock: RealClock
    is_short_lived: bool = False
    """Whether the broker ends soon: then it loads nothing ahead of need."""


class Server:
    def __init__(
        self,
        config: BrokerConfig,
        say: Say,
        accept_loss: Sequence[str] = (),
        serve_unenforced: Sequence[str] = (),
        levels: Levels | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.config = config
        """As the broker was started; `node.settings.broker` also knows what was altered while running."""
        self.loop = asyncio.get_running_loop()
        self.frame_bytes_max = config.socket_request_max_bytes
        self.receive_view = memoryview(bytearray(RECEIVE_BYTES))
        """Where every connection receives; its content is used up before the next one does."""
        limit = frame_bytes_limit(config.queued_max_request_bytes, self.frame_bytes_max)
        self.frame_memory = FrameMemory(limit, self.loop)
        machine = machine or Machine(RealFileSystem(), RealClock())
        self._is_short_lived = machine.is_short_lived
        self.now: Callable[[], Now] = machine.clock.now
        self.flusher = AdaptiveFlusher(
            config.holdfast_flush_threads, self._call_soon, self._wake, self._report_defect
        )
        self.worker = ProcessWorker(self.loop, self._report_defect)
        self.node = Node(
            config,
            NodeSeams(
                fs=machine.file_system,
                randomness=RealRandomness(),
                flusher=self.flusher,
                worker=self.worker,
                clock=machine.clock,
                call_soon=self._call_soon,
                boot_id=boot_id(),
                say=say,
                levels=levels or Levels(),
            ),
            accept_loss,
            serve_unenforced,
        )
        self.node.meter.flush_seconds = self.flusher.seconds
        self.say = self.node.say
        self._readers = ThreadPoolExecutor(READ_THREADS, "read")
        self._servers: list[asyncio.Server] = []
        self._protocols: set[ClientProtocol] = set()
        self._descriptors = raise_descriptor_limit()
        self.endpoints: list[EndPoint] = []
        """What clients are told, one address per listener."""
        self.addresses: list[str] = []
        """Where it listens, in the same order."""
        self.stay_awake = StayingAwake(self.loop, config.holdfast_busy_poll_us / 1_000_000).answered
        """To be called when a response has left."""
        self._timer: asyncio.TimerHandle | None = None
        self._idle_sweep: asyncio.TimerHandle | None = None
        self.metrics: MetricsEndpoint | None = None
        """Where numbers and health are shown, if that was asked for."""

    def _report_defect(self, where: str, error: Exception) -> None:
        self.node.report(where, error)

    def _call_soon(self, action: Callable[[], None]) -> None:
        self.loop.call_soon(action)

    def _wake(self, action: Callable[[], None]) -> None:
        self.loop.call_soon_threadsafe(action)

    # Life

    async def start(self) -> None:
        """Bind, open the data, then accept: nobody gets an answer before recovery is done."""
        preload_first()
        address = self.config.holdfast_metrics_listener
        if address is not None:
            self.metrics = MetricsEndpoint(self, address)
        try:
            await self._start()
        except BaseException:
            if self.metrics is not None:
                await self.metrics.close()
            raise

    async def _start(self) -> None:
        if lacks := missing_here():
            self.say(f"this machine, {sys.platform}, does without {lacks}")
        bound = bind_all(self.config.listeners, self.say)
        try:
            self.endpoints = advertised(bound)
            self.addresses = listening(bound)
            self.node.start(self.endpoints, self.now())
            for listener, sock in bound:
                protocol = partial(ClientProtocol, self, listener.name)
                self._servers.append(await self.loop.create_server(protocol, sock=sock, backlog=1024))
        except BaseException:
            for _, sock in bound:
                sock.close()
            raise
        self.node.timers.on_earlier = self._arm
        self._arm()
        self._sweep_idle()
        if not self._is_short_lived:
            preload_when_idle(self.loop, self._idle_seconds)
        if self.metrics is not None:
            await self.metrics.serve()

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
        if self.metrics is not None:
            await self.metrics.close()
        self.node.timers.is_stopped = True
        for protocol in list(self._protocols):
            protocol.abort()
        for handle in (self._timer, self._idle_sweep):
            if handle is not None:
                handle.cancel()
        self.flusher.close()
        self._readers.shutdown(wait=True)
        await self.worker.close()
        await self._outlast_other_writer()
        self.node.stop(self.now())

    async def _outlast_other_writer(self) -> None:
        """Keep the directories locked until another program that writes to the metadata log has given up."""
        signs = self.node.metadata.signs_of_another()
        if signs is None:
            return
        self.say(warn("the directories stay locked until the other program has ended"))
        ends = self.loop.time() + OTHER_WRITER_SECONDS_MAX
        quiet_from = self.loop.time()
        while self.loop.time() < min(ends, quiet_from + OTHER_WRITER_QUIET_SECONDS):
            await asyncio.sleep(OTHER_WRITER_LOOK_SECONDS)
            if (now := self.node.metadata.signs_of_another()) != signs:
                signs, quiet_from = now, self.loop.time()

    # Timers

    def clock_moved(self) -> None:
        """Look again at what is due: somebody has moved the clock."""
        self.loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        """Keep one loop timer, at the node's next deadline."""
        deadline_ms = self.node.next_deadline_ms
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_ms is not None:
            delay_ms = max(0, deadline_ms - self.now().monotonic_ms)
            self._timer = self.loop.call_later(delay_ms / 1000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self.node.tick(self.now())
        finally:
            self._arm()

    # Cold reads

    def read_in_thread(
        self, file: RealFile, length: int, position: int, done: Callable[[bytes, BaseException | None], None]
    ) -> None:
        """Read what is not cached without making the loop wait for the disk."""

        def finished(future: asyncio.Future[bytes]) -> None:
            error = future.exception()
            done(b"" if error is not None else future.result(), error)

        try:
            reading = self.loop.run_in_executor(self._readers, file.pread, length, position)
        except RuntimeError as error:  # the system gives us no more threads
            self.loop.call_soon(done, b"", error)
        else:
            reading.add_done_callback(finished)

    # Connections

    @property
    def is_listening(self) -> bool:
        return bool(self._servers) and all(server.is_serving() for server in self._servers)

    def connections_by_listener(self) -> Counter[str]:
        return Counter(protocol.listener for protocol in self._protocols)

    def requests_waiting(self) -> Counter[int]:
        """By API key."""
        connections = [each.connection for each in self._protocols if each.connection is not None]
        return Counter(key for connection in connections for key in connection.waiting())

    def connected(self, protocol: ClientProtocol) -> None:
        self._protocols.add(protocol)
        max_connections = self.node.settings.broker.max_connections
        limit = connections_allowed(max_connections, self._descriptors)
        if len(self._protocols) > limit:
            self.say(
                warn(
                    f"more than {limit} connections: refusing one (max.connections={max_connections}, "
                    f"and {self._descriptors} open files are allowed to this process)",
                    kind="refused connection",
                )
            )
            protocol.abort()

    def _idle_seconds(self) -> float:
        """How long no connection has sent or received anything."""
        return self.loop.time() - max((protocol.last_active for protocol in self._protocols), default=0.0)

    def disconnected(self, protocol: ClientProtocol) -> None:
        self._protocols.discard(protocol)

    def _sweep_idle(self) -> None:
        """Close what has been silent for `connections.max.idle.ms`; one walk now and then costs next to nothing."""
        limit_ms = self.config.connections_max_idle_ms
        if limit_ms < 0:
            return
        limit = limit_ms / 1000
        self._idle_sweep = self.loop.call_later(sweep_seconds(limit), self._sweep_idle)
        now = self.loop.time()
        for protocol in list(self._protocols):
            connection = protocol.connection
            has_work = connection is not None and connection.requests_under_way > 0
            if now - protocol.last_active >= limit and not has_work:
                protocol.close_idle(f"idle for connections.max.idle.ms={limit_ms}")


def sweep_seconds(limit_seconds: float) -> float:
    """How long until idle connections are looked for again."""
    wanted = limit_seconds / IDLE_SWEEPS_PER_LIMIT
    return min(max(wanted, IDLE_SWEEP_SECONDS_MIN), IDLE_SWEEP_SECONDS_MAX)


def raise_descriptor_limit() -> int:
    """Allow this process as many open files as it may have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, DESCRIPTORS_OF_MACOS):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            continue  # macOS says that there is no limit, and allows no more than it has always had
        return wanted if 0 <= wanted < DESCRIPTORS_UNLIMITED else DESCRIPTORS_UNLIMITED
    return soft


def connections_allowed(max_connections: int, descriptors: int) -> int:
    """A part of the descriptors stays for files: a log that cannot be opened would take its directory offline."""
    return min(max_connections, descriptors - max(FILE_DESCRIPTORS_MIN, descriptors // 4))


def bind(listener: Listener) -> socket.socket:
    host = listener.host or EVERY_ADDRESS
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, listener.port))
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen on {host}:{listener.port}: {error.strerror}") from error
    return sock


def bind_all(listeners: Sequence[Listener], say: Say) -> list[tuple[Listener, socket.socket]]:
    """Bind every listener; the IPv6 half of a pair takes its partner's port and may be missing."""
    bound: list[tuple[Listener, socket.socket]] = []
    ports: dict[str, int] = {}
    try:
        for listener in listeners:
            if not listener.port and listener.optional and listener.name in ports:
                listener = listener._replace(port=ports[listener.name])
            try:
                sock = bind(listener)
            except UsageError as error:
                if not listener.optional:
                    raise
                say(warn(f"{error}; serving without it"))
                continue
            ports[listener.name] = sock.getsockname()[1]
            bound.append((listener, sock))
    except BaseException:
        for _, sock in bound:
            sock.close()
        raise
    return bound


def listening(bound: Sequence[tuple[Listener, socket.socket]]) -> list[str]:
    """One address per listener name, that of the first of a pair."""
    found: dict[str, str] = {}
    for listener, sock in bound:
        found.setdefault(listener.name, address_text(listener.host or EVERY_ADDRESS, sock.getsockname()[1]))
    return list(found.values())


def advertised(bound: Sequence[tuple[Listener, socket.socket]]) -> list[EndPoint]:
    """What clients are told, one address per listener name; port 0 is the port that was bound."""
    endpoints: dict[str, EndPoint] = {}
    for listener, sock in bound:
        endpoints.setdefault(
            listener.name,
            EndPoint(
                listener.name,
                listener.advertised_host,
                listener.advertised_port or sock.getsockname()[1],
                SECURITY_PROTOCOLS[listener.protocol],
            ),
        )
    return list(endpoints.values())
