"""Connections: order, limits, idleness, and what they may cost in memory."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.broker.server.server import Server, connections_allowed, sweep_seconds
from holdfast.real import RealFile
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import CLOSED, SILENT, WireClient, frame
from holdfast.wire.api_keys import API_VERSIONS, FETCH, INIT_PRODUCER_ID, METADATA, PRODUCE
from holdfast.wire.batch import Record, build_batch, make_batch
from holdfast.wire.messages import encode_request

MIB = 1 << 20
CreateTopic = Callable[..., None]
StartBroker = Callable[..., BrokerProcess]
METADATA_BODY = encode_request(METADATA, 9, {"topics": None})


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def connect(broker: BrokerProcess) -> socket.socket:
    host, _, port = broker.bootstrap_servers.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def produce_body(topic: str, value: bytes, partition: int = 0, acks: int = -1) -> bytes:
    batch = make_batch([value], timestamp=time.time_ns() // 1_000_000)
    data = [{"index": partition, "records": batch}]
    fields = {"acks": acks, "timeout": 30_000, "topic_data": [{"name": topic, "partition_data": data}]}
    return encode_request(PRODUCE, 9, fields)


def fetch_body(topic: str, offset: int, *, max_wait_ms: int = 0, max_bytes: int = 50 * MIB) -> bytes:
    wanted = {
        "partition": 0,
        "fetch_offset": offset,
        "partition_max_bytes": max_bytes,
        "current_leader_epoch": -1,
        "last_fetched_epoch": -1,
    }
    fields = {
        "max_wait": max_wait_ms,
        "min_bytes": 1,
        "max_bytes": max_bytes,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [wanted]}],
    }
    return encode_request(FETCH, 12, fields)


def correlation_ids(client: WireClient, count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        answer = client.receive()
        assert isinstance(answer, bytes), (answer, found)
        found.append(struct.unpack_from(">i", answer)[0])
    return found


# Order


def test_pipelined_requests_of_all_kinds_are_answered_in_order(
    broker: BrokerProcess, create_topic: CreateTopic
) -> None:
    create_topic(broker, "t")
    kinds = [
        (PRODUCE, 9, produce_body("t", b"x" * 100)),
        (METADATA, 9, METADATA_BODY),
        (FETCH, 12, fetch_body("t", 0)),
        (API_VERSIONS, 0, b""),
        (PRODUCE, 9, produce_body("t", b"y", acks=1)),
    ]
    data = b"".join(
        frame(*kinds[number % len(kinds)][:2], kinds[number % len(kinds)][2], correlation_id=number)
        for number in range(50)
    )
    with WireClient(broker.bootstrap_servers) as client:
        client.send(data)
        assert correlation_ids(client, 50) == list(range(50))


@pytest.mark.parametrize("limit", ["1", "3", "64"])
@pytest.mark.check
def test_more_requests_than_may_be_under_way_are_all_answered_in_order(
    start_broker: StartBroker, create_topic: CreateTopic, limit: str
) -> None:
    broker = start_broker(holdfast_requests_in_flight_max=limit)
    create_topic(broker, "t")
    data = b"".join(
        frame(PRODUCE, 9, produce_body("t", b"%d" % number), correlation_id=number) for number in range(1000)
    )
    with WireClient(broker.bootstrap_servers) as client:
        client.send(data)
        assert correlation_ids(client, 1000) == list(range(1000))


@pytest.mark.parametrize("limit", ["1", "16"])
@pytest.mark.check
def test_requests_that_wait_and_get_no_answer_make_room_for_the_next(
    start_broker: StartBroker, create_topic: CreateTopic, limit: str
) -> None:
    """Produces of a transaction with acks=0 wait for its coordinator: nothing is sent when that has agreed."""
    broker = start_broker(holdfast_requests_in_flight_max=limit, transaction_state_log_num_partitions="1")
    create_topic(broker, "t", partitions=40)
    with WireClient(broker.bootstrap_servers) as client:
        fields = {
            "transactional_id": "silent",
            "transaction_timeout": 60_000,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        assert eventually(lambda: client.ask(INIT_PRODUCER_ID, 5, fields).error_code == 0)
        producer = client.ask(INIT_PRODUCER_ID, 5, fields)
        produces = b"".join(
            frame(PRODUCE, 12, transactional_body("silent", producer, "t", partition))
            for partition in range(40)
        )
        client.send(produces + frame(API_VERSIONS, 0, b"", correlation_id=41))
        assert correlation_ids(client, 1) == [41]


def transactional_body(transactional_id: str, producer: Any, topic: str, partition: int) -> bytes:
    batch = build_batch(
        [Record(0, 0, None, b"x")],
        base_timestamp=time.time_ns() // 1_000_000,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=0,
        is_transactional=True,
    )
    data = [{"index": partition, "records": batch}]
    fields = {
        "transactional_id": transactional_id,
        "acks": 0,
        "timeout": 30_000,
        "topic_data": [{"name": topic, "partition_data": data}],
    }
    return encode_request(PRODUCE, 12, fields)


def test_requests_behind_a_parked_fetch_wait_and_those_of_others_do_not(
    broker: BrokerProcess, create_topic: CreateTopic
) -> None:
    create_topic(broker, "t")
    with WireClient(broker.bootstrap_servers) as parked, WireClient(broker.bootstrap_servers) as other:
        parked.send(frame(FETCH, 12, fetch_body("t", 0, max_wait_ms=60_000), correlation_id=1))
        parked.send(frame(API_VERSIONS, 0, b"", correlation_id=2))
        assert other.is_alive()
        other.send(frame(PRODUCE, 9, produce_body("t", b"wake up"), correlation_id=9))
        assert correlation_ids(other, 1) == [9]
        assert correlation_ids(parked, 2) == [1, 2]


def test_a_thousand_parked_fetches_hold_no_threads_and_all_wake(
    broker: BrokerProcess, create_topic: CreateTopic
) -> None:
    create_topic(broker, "t")
    with ExitStack() as stack:
        clients = [stack.enter_context(WireClient(broker.bootstrap_servers)) for _ in range(200)]
        for client in clients:
            for number in range(5):
                client.send(frame(FETCH, 12, fetch_body("t", 0, max_wait_ms=60_000), correlation_id=number))
        with WireClient(broker.bootstrap_servers) as other:
            assert other.is_alive()
            with open(f"/proc/{broker.pid}/status", encoding="ascii") as status:
                threads = next(int(line.split()[1]) for line in status if line.startswith("Threads:"))
            assert threads < 20
            other.send(frame(PRODUCE, 9, produce_body("t", b"wake up"), correlation_id=9))
            assert correlation_ids(other, 1) == [9]
        for client in clients:
            assert correlation_ids(client, 5) == [0, 1, 2, 3, 4]


# Idleness


@pytest.mark.check
def test_an_idle_connection_is_closed_and_a_busy_one_is_not(start_broker: StartBroker) -> None:
    broker = start_broker(connections_max_idle_ms="2000", connection_failed_authentication_delay_ms="0")
    with WireClient(broker.bootstrap_servers) as idle, WireClient(broker.bootstrap_servers) as busy:
        assert idle.is_alive()
        while (said := idle.receive_within(0)) is None:
            assert busy.is_alive()
        assert said == CLOSED
        assert busy.is_alive()


@pytest.mark.parametrize(
    "begun",
    [
        b"\0",
        b"\0\0\0",
        struct.pack(">i", 100),
        frame(METADATA, 9, METADATA_BODY)[:-1],
        struct.pack(">i", 50 * MIB) + bytes(300_000),
    ],
    ids=["one byte", "three bytes", "a length", "all but one byte", "the beginning of a large frame"],
)
@pytest.mark.check
def test_a_frame_that_stalls_half_way_ends_with_its_connection(
    start_broker: StartBroker, begun: bytes
) -> None:
    broker = start_broker(connections_max_idle_ms="500", connection_failed_authentication_delay_ms="0")
    with WireClient(broker.bootstrap_servers) as stalled:
        stalled.send(begun)
        assert stalled.receive(timeout_s=20) == CLOSED
    with WireClient(broker.bootstrap_servers) as other:
        assert other.is_alive()


@pytest.mark.parametrize(
    ("limit_ms", "seconds"), [(0, 0.05), (1, 0.05), (2_000, 0.5), (600_000, 30.0), (2**63 - 1, 30.0)]
)
def test_looking_for_idle_connections_never_keeps_the_loop_busy(limit_ms: int, seconds: float) -> None:
    assert sweep_seconds(limit_ms / 1000) == seconds


def test_a_connection_that_waits_for_its_answer_is_not_idle(
    start_broker: StartBroker, create_topic: CreateTopic
) -> None:
    broker = start_broker(connections_max_idle_ms="400", connection_failed_authentication_delay_ms="0")
    create_topic(broker, "t")
    with WireClient(broker.bootstrap_servers) as waiting:
        waiting.send(frame(FETCH, 12, fetch_body("t", 0, max_wait_ms=1500), correlation_id=3))
        assert correlation_ids(waiting, 1) == [3]


def test_connections_beyond_the_maximum_are_refused_and_told(start_broker: StartBroker) -> None:
    broker = start_broker(max_connections="5")
    with ExitStack() as stack:
        clients = [stack.enter_context(WireClient(broker.bootstrap_servers)) for _ in range(5)]
        assert all(client.is_alive() for client in clients)
        with WireClient(broker.bootstrap_servers) as sixth:
            assert not sixth.is_alive()
        assert all(client.is_alive() for client in clients)
        clients[0].close()
        with WireClient(broker.bootstrap_servers) as again:
            assert eventually(again.is_alive)
    assert broker.has_said("max.connections=5")


@pytest.mark.parametrize(
    ("max_connections", "descriptors", "allowed"),
    [(5, 20_000, 5), (2**31 - 1, 20_000, 15_000), (2**31 - 1, 512, 256)],
)
def test_a_part_of_the_descriptors_stays_for_files(
    max_connections: int, descriptors: int, allowed: int
) -> None:
    assert connections_allowed(max_connections, descriptors) == allowed


@pytest.mark.check
def test_connections_cannot_use_up_the_files_of_the_logs(tmp_path: Path) -> None:
    """With few descriptors, clients that only connect are refused, and the broker goes on storing."""
    prefix = ("prlimit", "--nofile=400:400")
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not installed")
    with BrokerProcess(str(tmp_path / "few"), prefix=prefix) as broker, ExitStack() as stack:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        # Both have the connections they need: a client that comes later is refused like the others.
        admin.create_topics([NewTopic("first", 1, 1)])["first"].result(30)
        producer.produce("first", b"x")
        assert producer.flush(30) == 0
        host, port = broker.bootstrap_servers.split(":")
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port))))
        assert broker.has_said("refusing one")
        for future in admin.create_topics([NewTopic("stored", 20, 1)]).values():
            future.result(30)
        reports: list[object] = []
        for partition in range(20):
            producer.produce(
                "stored", b"x", partition=partition, on_delivery=lambda error, _: reports.append(error)
            )
        assert producer.flush(30) == 0
        assert reports == [None] * 20
        assert "offline" not in broker.log()


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes to hold: for what the other side notices in its own time."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():
            return True
    return False


# Memory


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """This process may open a thousand sockets as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if wanted < 1200:
        pytest.skip(f"this machine allows only {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.check
@pytest.mark.usefixtures("many_descriptors")
def test_a_thousand_idle_connections_cost_little(broker: BrokerProcess) -> None:
    with WireClient(broker.bootstrap_servers) as client:
        assert client.is_alive()
        before = resident_bytes(broker.pid)
        with ExitStack() as stack:
            for _ in range(1000):
                idle = stack.enter_context(connect(broker))
                idle.sendall(frame(API_VERSIONS, 0, b""))
                assert idle.recv(4096)
            assert client.is_alive()
            grown = resident_bytes(broker.pid) - before
    assert grown < 16 * MIB, f"{grown / MIB:.1f} MiB for 1,000 connections"


@pytest.mark.usefixtures("many_descriptors")
def test_a_hundred_announced_giants_cost_what_they_send_not_what_they_announce(broker: BrokerProcess) -> None:
    with WireClient(broker.bootstrap_servers) as client:
        assert client.is_alive()
        before = resident_bytes(broker.pid)
        with ExitStack() as stack:
            for _ in range(100):
                giant = stack.enter_context(connect(broker))
                giant.sendall(struct.pack(">i", 100 * MIB) + bytes(10_000))
            assert client.is_alive()
            grown = resident_bytes(broker.pid) - before
    assert grown < 16 * MIB, f"{grown / MIB:.1f} MiB"


def test_half_received_frames_are_bounded_together_where_asked(start_broker: StartBroker) -> None:
    broker = start_broker(socket_request_max_bytes=str(4 * MIB), queued_max_request_bytes=str(8 * MIB))
    request = frame(METADATA, 9, encode_request(METADATA, 9, {"topics": [{"name": "n" * 200}] * 15_000}))
    assert 2 * MIB < len(request) < 4 * MIB
    with ExitStack() as stack:
        clients = [stack.enter_context(WireClient(broker.bootstrap_servers)) for _ in range(5)]
        for client in clients:
            client.send(request[:200_000])
        with WireClient(broker.bootstrap_servers) as other:
            assert other.is_alive(), "small requests pass"
        for client in clients:
            client.send(request[200_000:])
        for client in clients:
            assert isinstance(client.receive(), bytes)


@pytest.mark.check
def test_stalled_senders_hold_no_more_than_the_limit_and_one_frame(start_broker: StartBroker) -> None:
    limit, largest = 16 * MIB, 8 * MIB
    broker = start_broker(socket_request_max_bytes=str(largest), queued_max_request_bytes=str(limit))
    with ExitStack() as stack, WireClient(broker.bootstrap_servers) as client:
        assert client.is_alive()
        before = resident_bytes(broker.pid)
        for _ in range(20):
            stalled = stack.enter_context(connect(broker))
            stalled.settimeout(0.1)
            with suppress(TimeoutError):  # it is not read any more, which is the point
                stalled.sendall(struct.pack(">i", largest) + bytes(largest - 1))
        assert client.is_alive()
        grown = resident_bytes(broker.pid) - before
    assert grown < limit + largest + 20 * MIB, f"{grown / MIB:.1f} MiB of the 160 that were sent"


@pytest.fixture
def large_topic(broker: BrokerProcess, create_topic: CreateTopic) -> str:
    """60 MB in one partition."""
    create_topic(broker, "large")
    with WireClient(broker.bootstrap_servers) as client:
        value = bytes(range(256)) * 3600
        for _ in range(65):
            client.tell_encoded(PRODUCE, 9, produce_body("large", value))
        assert len(correlation_ids(client, 65)) == 65
    return "large"


def test_readers_that_do_not_read_cost_little_and_harm_nobody(
    broker: BrokerProcess, large_topic: str
) -> None:
    before = resident_bytes(broker.pid)
    with ExitStack() as stack:
        for _ in range(20):
            slow = stack.enter_context(connect(broker))
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for number in range(20):
                slow.sendall(frame(FETCH, 12, fetch_body(large_topic, 0), correlation_id=number))
        with WireClient(broker.bootstrap_servers) as other:
            for _ in range(3):
                other.tell_encoded(FETCH, 12, fetch_body(large_topic, 0, max_bytes=8 * MIB))
                answer = other.receive()
                assert isinstance(answer, bytes)
                assert len(answer) >= 7 * MIB
        grown = resident_bytes(broker.pid) - before
    assert grown < 80 * MIB, f"{grown / MIB:.1f} MiB for 20 readers who asked for 24 GB"


def test_a_slow_reader_gets_everything_in_the_end(broker: BrokerProcess, large_topic: str) -> None:
    with connect(broker) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        slow.sendall(frame(FETCH, 12, fetch_body(large_topic, 0, max_bytes=20 * MIB), correlation_id=1))
        slow.sendall(frame(API_VERSIONS, 0, b"", correlation_id=2))
        first = receive_slowly(slow)
        second = receive_slowly(slow)
    assert len(first) >= 19 * MIB
    assert struct.unpack_from(">i", first) == (1,)
    assert struct.unpack_from(">i", second) == (2,)


def receive_slowly(connection: socket.socket) -> bytes:
    """One frame, in small sips."""
    data = bytearray()
    while len(data) < 4:
        data += connection.recv(4 - len(data))
    (length,) = struct.unpack(">i", data)
    body = bytearray()
    while len(body) < length:
        piece = connection.recv(min(length - len(body), 20_000))
        assert piece
        body += piece
    return bytes(body)


def test_a_reader_that_never_reads_is_closed_when_it_has_been_idle_too_long(
    start_broker: StartBroker, create_topic: CreateTopic
) -> None:
    broker = start_broker(connections_max_idle_ms="500", connection_failed_authentication_delay_ms="0")
    create_topic(broker, "large")
    with WireClient(broker.bootstrap_servers) as client:
        for _ in range(20):
            client.tell_encoded(PRODUCE, 9, produce_body("large", bytes(900_000)))
        assert len(correlation_ids(client, 20)) == 20
    with connect(broker) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(frame(FETCH, 12, fetch_body("large", 0)))
        assert broker.has_said("does not take its answers")


@pytest.mark.check
def test_pipelined_metadata_to_a_reader_that_does_not_read_is_bounded(
    broker: BrokerProcess, create_topic: CreateTopic
) -> None:
    """Small requests with large answers: what was read in one go must not all be answered into memory."""
    for number in range(5):
        create_topic(broker, f"wide-{number}", partitions=400)
    before = resident_bytes(broker.pid)
    with connect(broker) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(0.5)
        with suppress(TimeoutError):  # the broker reads no more, which is the point
            slow.sendall(frame(METADATA, 9, METADATA_BODY) * 5000)
        with WireClient(broker.bootstrap_servers) as other:
            assert other.is_alive()
        grown = resident_bytes(broker.pid) - before
    assert grown < 60 * MIB, f"{grown / MIB:.1f} MiB"


@pytest.mark.check
def test_clients_that_come_and_go_leave_nothing_behind(
    broker: BrokerProcess, create_topic: CreateTopic
) -> None:
    create_topic(broker, "t")

    def visit(times: int) -> None:
        for _ in range(times):
            with connect(broker) as client:
                client.sendall(frame(FETCH, 12, fetch_body("t", 0, max_wait_ms=100)))

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{broker.pid}/fd"))

    visit(300)
    with WireClient(broker.bootstrap_servers) as client:
        assert client.is_alive()
        before = resident_bytes(broker.pid)
        visit(2000)
        assert client.is_alive()
        assert eventually(lambda: descriptors() < 40)
        grown = resident_bytes(broker.pid) - before
    assert grown < 12 * MIB, f"{grown / MIB:.1f} MiB"


def test_nothing_asked_is_nothing_answered(broker: BrokerProcess) -> None:
    with WireClient(broker.bootstrap_servers) as client:
        client.send(b"")
        assert client.receive(timeout_s=0.2) == SILENT


class Unreadable:
    """A file whose reading runs into what no disk reports."""

    def pread(self, length: int, position: int) -> bytes:
        raise MemoryError


@pytest.mark.parametrize("has_threads", [True, False])
async def test_a_cold_read_that_ends_in_whatever_way_is_reported(has_threads: bool) -> None:
    loop = asyncio.get_running_loop()
    readers = ThreadPoolExecutor(1)
    if not has_threads:
        readers.shutdown()
    shell = SimpleNamespace(loop=loop, _readers=readers)
    told: asyncio.Future[tuple[bytes, BaseException | None]] = loop.create_future()
    Server.read_in_thread(
        cast(Server, shell),
        cast(RealFile, Unreadable()),
        10,
        0,
        lambda data, error: told.set_result((data, error)),
    )
    data, error = await told
    assert data == b""
    assert isinstance(error, MemoryError if has_threads else RuntimeError)
    readers.shutdown()
