"""The command line's own client, against a broker that says what the test tells it to."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.cli import wire
from holdfast.cli.client import Connection
from holdfast.cli.exits import CannotConnect, CommandFailed
from holdfast.cli.wire import Cluster, Refused
from holdfast.wire import apis, messages

Answer = Callable[[Any], Mapping[str, Any]]

HANG_UP = "hang up"


class ScriptedBroker:
    """Answers each request by a function of the test's, and remembers what came."""

    def __init__(self) -> None:
        self.offered = {api.key: (api.min, api.max) for api in apis.APIS}
        self.answers: dict[int, Answer | str] = {}
        self.requests: list[tuple[int, int, Any]] = []
        """Key, version and body of everything but ApiVersions."""
        broker = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                while (frame := _frame(self.request)) is not None:
                    answer = broker.answer(frame)
                    if answer is None:
                        return
                    self.request.sendall(struct.pack(">i", len(answer)) + answer)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.host, self.port = self.server.server_address[:2]
        self.address = f"127.0.0.1:{self.port}"
        broker_list = [{"node_id": 7, "host": "127.0.0.1", "port": self.port}]
        self.metadata: dict[str, Any] = {"brokers": broker_list, "topics": []}
        self.answers[wire.METADATA] = lambda _: self.metadata

    def answer(self, frame: bytes) -> bytes | None:
        header = messages.parse_request_header(frame)
        head = messages.response_header(header.api_key, header.version, header.correlation_id)
        if header.api_key == apis.API_VERSIONS:
            keys = [
                {"api_key": key, "min_version": low, "max_version": high}
                for key, (low, high) in self.offered.items()
            ]
            return head + messages.encode_response(apis.API_VERSIONS, 0, {"api_keys": keys})
        request = messages.decode_request(header.api_key, header.version, frame, header.body_offset)
        self.requests.append((header.api_key, header.version, request))
        script = self.answers[header.api_key]
        if isinstance(script, str):
            return None
        return head + messages.encode_response(header.api_key, header.version, script(request))


def _frame(connection: socket.socket) -> bytes | None:
    head = connection.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    return connection.recv(struct.unpack(">i", head)[0], socket.MSG_WAITALL)


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    scripted = ScriptedBroker()
    thread = threading.Thread(target=scripted.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield scripted
    scripted.server.shutdown()
    scripted.server.server_close()
    thread.join()


@pytest.fixture
def cluster(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(wire, "BACKOFF_S", 0.001)
    with Cluster(Connection(broker.address, 5000), timeout_ms=5000) as made:
        yield made


def coordinator(broker: ScriptedBroker, *codes: ErrorCode) -> Answer:
    """FindCoordinator that answers with these codes, one after the other, and then with the broker."""
    left = list(codes)

    def answer(request: Any) -> Mapping[str, Any]:
        code = left.pop(0) if left else ErrorCode.none
        found = {"key": "k", "node_id": 7, "host": "127.0.0.1", "port": broker.port, "error_code": code}
        return {"coordinators": [found]}

    return answer


def test_the_version_is_the_newest_that_both_know(broker: ScriptedBroker, cluster: Cluster) -> None:
    broker.offered[wire.LIST_TRANSACTIONS] = (0, 1)
    broker.answers[wire.LIST_TRANSACTIONS] = lambda _: {}
    cluster.ask_any(wire.LIST_TRANSACTIONS, {"transactional_id_pattern": "not in version 1"})
    cluster.ask_any(wire.METADATA, {"topics": None})
    versions = [(key, version) for key, version, _ in broker.requests]
    assert versions == [(wire.LIST_TRANSACTIONS, 1), (wire.METADATA, apis.BY_KEY[wire.METADATA].max)]


@pytest.mark.parametrize("offered", [None, (5, 9)])
def test_a_request_that_is_not_offered_is_named(
    broker: ScriptedBroker, cluster: Cluster, offered: tuple[int, int] | None
) -> None:
    del broker.offered[wire.LIST_TRANSACTIONS]
    if offered is not None:
        broker.offered[wire.LIST_TRANSACTIONS] = offered
    with pytest.raises(CommandFailed, match=r"does not offer ListTransactions"):
        cluster.ask_any(wire.LIST_TRANSACTIONS, {})


def test_the_next_bootstrap_server_is_asked_when_one_is_dead(
    broker: ScriptedBroker, dead_address: str
) -> None:
    with Cluster(Connection(f"{dead_address}, {broker.address}", 5000)) as cluster:
        assert cluster.broker_ids() == [7]


def test_nobody_there_is_said_with_the_address(dead_address: str, silent_address: str) -> None:
    with (
        Cluster(Connection(dead_address, 300)) as cluster,
        pytest.raises(CannotConnect, match=f"{dead_address} within 300 ms: Connection refused"),
    ):
        cluster.broker_ids()
    with (
        Cluster(Connection(silent_address, 300)) as cluster,
        pytest.raises(CannotConnect, match=f"{silent_address} within 300 ms: it did not answer in time"),
    ):
        cluster.broker_ids()
    with (
        Cluster(Connection("nonsense", 300)) as cluster,
        pytest.raises(CannotConnect, match="'nonsense' is no HOST:PORT"),
    ):
        cluster.broker_ids()


def test_a_broker_that_hangs_up_is_said(broker: ScriptedBroker, cluster: Cluster) -> None:
    broker.answers[wire.LIST_TRANSACTIONS] = HANG_UP
    with pytest.raises(CannotConnect, match="it closed the connection"):
        cluster.ask_any(wire.LIST_TRANSACTIONS, {})
    assert cluster.broker_ids() == [7]  # a new connection


def test_a_coordinator_that_is_not_there_yet_is_asked_for_again(
    broker: ScriptedBroker, cluster: Cluster
) -> None:
    not_yet = (ErrorCode.coordinator_not_available, ErrorCode.coordinator_load_in_progress)
    broker.answers[wire.FIND_COORDINATOR] = coordinator(broker, *not_yet)
    assert cluster.retried(lambda: cluster.coordinator_of("group", "k")) == (7, broker.address)
    assert [key for key, _, _ in broker.requests] == [wire.FIND_COORDINATOR] * 3
    cluster.coordinator_of("group", "k")
    assert len(broker.requests) == 3  # it is remembered


def test_a_coordinator_that_moved_is_looked_for_again(broker: ScriptedBroker, cluster: Cluster) -> None:
    broker.answers[wire.FIND_COORDINATOR] = coordinator(broker)
    broker.answers[wire.OFFSET_DELETE] = lambda _: {"error_code": ErrorCode.none}
    codes = [ErrorCode.not_coordinator, ErrorCode.none]

    def attempt() -> None:
        cluster.ask_coordinator("group", "k", wire.OFFSET_DELETE, {"group_id": "k"})
        wire.check(codes.pop(0), "cannot delete")

    cluster.retried(attempt)
    asked = [key for key, _, _ in broker.requests]
    assert asked == [wire.FIND_COORDINATOR, wire.OFFSET_DELETE] * 2


def test_a_refusal_that_does_not_pass_is_raised_at_once(broker: ScriptedBroker, cluster: Cluster) -> None:
    denied = ErrorCode.group_authorization_failed
    broker.answers[wire.FIND_COORDINATOR] = coordinator(broker, denied)
    with pytest.raises(Refused, match=r"coordinator of group 'k': .*GROUP_AUTHORIZATION_FAILED") as caught:
        cluster.retried(lambda: cluster.coordinator_of("group", "k"))
    assert caught.value.code is denied
    assert len(broker.requests) == 1


def test_a_refusal_that_never_passes_is_raised_when_the_time_is_up(broker: ScriptedBroker) -> None:
    def refuse() -> None:
        wire.check(ErrorCode.concurrent_transactions, "cannot abort", "Still busy.", "wait")

    with (
        Cluster(Connection(broker.address, 5000), timeout_ms=0) as cluster,
        pytest.raises(Refused, match=r"^cannot abort: Still busy \(CONCURRENT_TRANSACTIONS\); wait$"),
    ):
        cluster.retried(refuse)


def test_a_leader_is_waited_for_and_what_is_not_there_is_named(
    broker: ScriptedBroker, cluster: Cluster
) -> None:
    partitions = [{"partition_index": 0, "leader_id": -1}, {"partition_index": 1, "leader_id": 7}]
    broker.metadata["topics"] = [{"name": "t", "partitions": partitions}]
    assert cluster.leader_of("t", 1) == 7
    with pytest.raises(Refused, match=r"leader of t-0: .*LEADER_NOT_AVAILABLE"):
        cluster.leader_of("t", 0)

    def attempt() -> int:
        try:
            return cluster.leader_of("t", 0)
        finally:
            partitions[0]["leader_id"] = 7

    assert cluster.retried(attempt) == 7
    with pytest.raises(CommandFailed, match="topic 't' has no partition 5; it has 0 to 1"):
        cluster.leader_of("t", 5)
    with pytest.raises(CommandFailed, match="topic 'nowhere' does not exist"):
        cluster.leader_of("nowhere", 0)
    with pytest.raises(CommandFailed, match="broker 9 is not in the cluster; its brokers are 7"):
        cluster.ask_broker(9, wire.LIST_TRANSACTIONS, {})


def test_a_secured_cluster_is_refused_in_words() -> None:
    connection = Connection("127.0.0.1:1", 300, {"security.protocol": "sasl_ssl"})
    with pytest.raises(CommandFailed, match="plain connection only, not SASL_SSL"):
        Cluster(connection)
