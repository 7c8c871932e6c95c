"""Numbers and health over HTTP: `/metrics`, `/livez`, `/readyz`, `/buildinfo`.

Requests are answered on the broker's own loop, since a second busy thread would fight it for the interpreter. A scrape
is cut into slices: after `SLICE_S` of work the loop turns to whatever has become due, and comes back. So a broker
whose loop is stuck does not answer `/livez`, which is what that path is for. While the broker starts, the loop is busy
with recovery, which may take minutes: until it is over a thread answers, that the process lives and is not ready.

`/readyz` says 200 when the broker has recovered, listens, can write its metadata, and has a log directory that is
online. Directories that are offline are named in its body, and with `/readyz?directories=all` they fail it. Nothing
here changes anything, and nothing here is secret but names of topics, groups and directories; whoever binds it to more
than this machine shows them.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from holdfast.broker.node.meter import api_name
from holdfast.broker.node.metrics import scrape
from holdfast.broker.node.troubles import Kind
from holdfast.config.listeners import address_text
from holdfast.errors import UsageError
from holdfast.exposition import CONTENT_TYPE, Histogram, Sheet, parse_address

if TYPE_CHECKING:
    from holdfast.broker.server.server import Server

SLICE_S: Final = 0.002
"""How long a scrape works at a time. A slice ends at the next stop of the generator, well before 5 ms."""
REQUEST_BYTES_MAX: Final = 8192
CONNECTIONS_MAX: Final = 32
"""More than any number of scrapers and supervisors: what comes on top is closed."""
PATIENCE_S: Final = 10.0
"""A client that has not sent its request, or not taken its answer, is left."""
DELAY_EVERY_S: Final = 0.5
"""How often the loop's delay is measured."""
FLUSH_STUCK_S: Final = 10
"""A broker whose oldest flush has been under way for so long acknowledges nothing: it is not ready."""
PLAIN: Final = "text/plain; charset=utf-8"


def build_info() -> dict[str, str]:
    try:
        number = version("holdfast")
    except PackageNotFoundError:  # run from a source tree
        number = "unknown"
    return {"version": number, "python": platform.python_version()}


def response(status: str, body: bytes, content_type: str = PLAIN) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


NOT_FOUND: Final = response("404 Not Found", b"/metrics, /livez, /readyz and /buildinfo are here\n")
NOT_ALLOWED: Final = response("405 Method Not Allowed", b"GET is all there is\n")
ALIVE: Final = response("200 OK", b"alive\n")


def path_of(head: bytes) -> str | None:
    """What a request asks for, with its query; None for another method than GET."""
    method, _, rest = head.partition(b" ")
    return rest.partition(b" ")[0].decode("ascii", "replace") if method in (b"GET", b"HEAD") else None


def starting_response(head: bytes) -> bytes:
    match (path_of(head) or "").partition("?")[0]:
        case "/livez":
            return ALIVE
        case "/buildinfo":
            return response("200 OK", json.dumps(build_info()).encode() + b"\n", "application/json")
        case "/readyz" | "/metrics":
            return response("503 Service Unavailable", b"not ready: recovering\n")
        case _:
            return NOT_FOUND


class StartingThread:
    """Answers while the loop is busy with the start."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="holdfast-starting", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._sock, self._ended], [], [])
            if self._ended in ready:
                return
            with suppress(OSError):  # whoever asked has gone
                client, _ = self._sock.accept()
                with client:
                    client.settimeout(1.0)
                    client.sendall(starting_response(client.recv(REQUEST_BYTES_MAX)))

    def close(self) -> None:
        self._end.close()
        self._thread.join()
        self._ended.close()


class MetricsEndpoint:
    def __init__(self, server: Server, address: str) -> None:
        try:
            host, port = parse_address(address)
        except UsageError as error:
            raise UsageError(f"holdfast.metrics.listener: {error}") from error
        self.server = server
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((host, port))
            self._sock.listen(CONNECTIONS_MAX)
            self._sock.setblocking(False)
        except OSError as error:
            self._sock.close()
            raise UsageError(f"cannot listen on {address} for metrics: {error.strerror}") from error
        bound_host, bound_port = self._sock.getsockname()[:2]
        self.address = address_text(bound_host, bound_port)
        self.connections: set[MetricsProtocol] = set()
        self._starting: StartingThread | None = StartingThread(self._sock)
        self._serving: asyncio.Server | None = None
        self._delay = Histogram()
        self._delay_timer: asyncio.TimerHandle | None = None
        self._started_at = process_start_seconds()

    async def serve(self) -> None:
        """The broker has started: its loop answers from now on."""
        self._end_starting()
        loop = self.server.loop
        self._serving = await loop.create_server(lambda: MetricsProtocol(self), sock=self._sock)
        self._measure_delay()

    def _end_starting(self) -> None:
        if self._starting is not None:
            self._starting.close()
            self._starting = None

    async def close(self) -> None:
        self._end_starting()
        if self._delay_timer is not None:
            self._delay_timer.cancel()
        for protocol in list(self.connections):
            protocol.abort()
        if self._serving is not None:
            self._serving.close()
        else:
            self._sock.close()

    def _measure_delay(self) -> None:
        due_s = time.monotonic() + DELAY_EVERY_S

        def run() -> None:
            self._delay.observe(max(0.0, time.monotonic() - due_s))
            self._measure_delay()

        self._delay_timer = self.server.loop.call_later(DELAY_EVERY_S, run)

    # Answers

    def scrape(self) -> Iterator[str]:
        server = self.server
        return scrape(server.node, server.now(), self._put_shell)

    def _put_shell(self, sheet: Sheet) -> None:
        server = self.server
        sheet.put("holdfast_build_info", 1, **build_info())
        sheet.put("holdfast_ready", not self.problems())
        sheet.put_histogram("holdfast_flush_seconds", server.flusher.seconds)
        sheet.put_histogram("holdfast_event_loop_delay_seconds", self._delay)
        for api_key, count in server.requests_waiting().items():
            sheet.put("holdfast_requests_waiting", count, request=api_name(api_key))
        connections = server.connections_by_listener()
        for endpoint in server.endpoints:
            count = connections[endpoint.name]
            sheet.put("kafka_server_socket_server_metrics_connection_count", count, listener=endpoint.name)
        put_process(sheet, self._started_at)

    def problems(self, *, all_directories: bool = False) -> list[str]:
        """Why the broker is not ready; nothing when it is."""
        server, node = self.server, self.server.node
        found = [] if server.is_listening else ["it does not listen"]
        if node.failures.fatal is not None:
            found.append(node.failures.fatal)
        metadata = node.metadata.hosted.directory
        refusing = {
            trouble.subject
            for kind in (Kind.NO_ROOM, Kind.NO_DESCRIPTORS)
            for trouble in node.troubles.lasting(kind)
        }
        if metadata.offline or metadata.path in refusing:
            found.append(
                f"metadata cannot be written: {metadata.path} {metadata.failure or 'refuses writes'}"
            )
        if node.commit.oldest_flush_seconds >= FLUSH_STUCK_S:
            found.append(f"a flush has been under way for {node.commit.oldest_flush_seconds} s")
        offline = self.offline_directories()
        if len(offline) == len(node.directories) or (offline and all_directories):
            found += offline
        return found

    def offline_directories(self) -> list[str]:
        directories = self.server.node.directories
        return [
            f"log directory {each.path} is offline: {each.failure}" for each in directories if each.offline
        ]

    def readiness(self, query: str) -> bytes:
        problems = self.problems(all_directories="directories=all" in query.split("&"))
        remarks = [each for each in self.offline_directories() if each not in problems]
        if problems:
            lines = [*(f"not ready: {each}" for each in problems), *remarks]
            return response("503 Service Unavailable", _body(lines))
        return response("200 OK", _body(["ready", *remarks]))


def _body(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")


class MetricsProtocol(asyncio.Protocol):
    def __init__(self, endpoint: MetricsEndpoint) -> None:
        self._endpoint = endpoint
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._task: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is one in all but name
        endpoint = self._endpoint
        endpoint.connections.add(self)
        self._patience = endpoint.server.loop.call_later(PATIENCE_S, self.abort)
        if len(endpoint.connections) > CONNECTIONS_MAX:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._endpoint.connections.discard(self)
        if self._patience is not None:
            self._patience.cancel()
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._task is not None:
            return  # one request, one answer
        if b"\r\n\r\n" in self._received or b"\n\n" in self._received:
            self._task = self._endpoint.server.loop.create_task(self._answer(self._received))
        elif len(self._received) > REQUEST_BYTES_MAX:
            self.abort()

    async def _answer(self, head: bytes) -> None:
        endpoint = self._endpoint
        transport = self._transport
        assert transport is not None
        path, _, query = (path_of(head) or "").partition("?")
        try:
            if not path:
                transport.write(NOT_ALLOWED)
            elif path == "/metrics":
                pieces = await gathered(endpoint.scrape())
                length = sum(map(len, pieces))
                transport.writelines(
                    [
                        response("200 OK", b"", CONTENT_TYPE).replace(b"Length: 0", b"Length: %d" % length),
                        *pieces,
                    ]
                )
            elif path == "/readyz":
                transport.write(endpoint.readiness(query))
            else:
                transport.write(ALIVE if path == "/livez" else starting_response(head))
        except Exception as error:  # noqa: BLE001 - a defect in a number must not go unseen, nor end the broker
            endpoint.server.node.report(f"answering {path}", error)
            transport.write(response("500 Internal Server Error", b"see the broker's log\n"))
        transport.close()


async def gathered(pieces: Iterator[str]) -> list[bytes]:
    """The text of a scrape, with the loop going on in between."""
    found = []
    began_s = time.monotonic()
    for piece in pieces:
        if piece:
            found.append(piece.encode("utf-8", "backslashreplace"))
        if time.monotonic() - began_s >= SLICE_S:
            await asyncio.sleep(0)
            began_s = time.monotonic()
    return found


# This process


def process_start_seconds() -> float:
    """When this process began, by the wall clock as it is now."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def put_process(sheet: Sheet, started_at: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    sheet.put("process_cpu_seconds_total", used.ru_utime + used.ru_stime)
    sheet.put("process_start_time_seconds", round(started_at, 3))
    sheet.put("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with suppress(OSError, ValueError, KeyError):  # no Linux: these are not told
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        sheet.put("process_resident_memory_bytes", pages * resource.getpagesize())
        sheet.put("process_open_fds", os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")))
        with open("/proc/self/io", encoding="ascii") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
        sheet.put("kafka_server_kafkaserver_linux_disk_read_bytes", int(counts["read_bytes"]))
        sheet.put("kafka_server_kafkaserver_linux_disk_write_bytes", int(counts["write_bytes"]))
