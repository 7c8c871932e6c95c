"""The administrative client, against a broker that says what the test tells it to."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.admin.brokers import Brokers, committed_offsets
from holdfast.admin.errors import ClusterError, Refused, Unreachable, UnsupportedBroker, check
from holdfast.admin.settings import parse_settings
from holdfast.cli.client import Connection
from holdfast.cli.exits import CannotConnect
from holdfast.errors import ConfigError
from holdfast.wire import api_keys, apis, messages

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
        self.answers[api_keys.METADATA] = lambda _: self.metadata

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
def cluster(broker: ScriptedBroker) -> Iterator[Brokers]:
    with brokers_at(broker.address) as made:
        yield made


def brokers_at(servers: str, timeout_ms: int = 5000) -> Brokers:
    timeouts = ("request.timeout.ms", "default.api.timeout.ms", "socket.connection.setup.timeout.ms")
    given = {
        "bootstrap.servers": servers,
        "retry.backoff.ms": "1",
        **dict.fromkeys(timeouts, str(timeout_ms)),
    }
    return Brokers(parse_settings(given))


@pytest.fixture
def dead_address() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def silent_address() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def coordinator(broker: ScriptedBroker, *codes: ErrorCode) -> Answer:
    """FindCoordinator that answers with these codes, one after the other, and then with the broker."""
    left = list(codes)

    def answer(request: Any) -> Mapping[str, Any]:
        code = left.pop(0) if left else ErrorCode.none
        found = {"key": "k", "node_id": 7, "host": "127.0.0.1", "port": broker.port, "error_code": code}
        return {"coordinators": [found]}

    return answer


def test_the_version_is_the_newest_that_both_know(broker: ScriptedBroker, cluster: Brokers) -> None:
    broker.offered[api_keys.LIST_TRANSACTIONS] = (0, 1)
    broker.answers[api_keys.LIST_TRANSACTIONS] = lambda _: {}
    cluster.ask_any(api_keys.LIST_TRANSACTIONS, {"transactional_id_pattern": "not in version 1"})
    cluster.ask_any(api_keys.METADATA, {"topics": None})
    versions = [(key, version) for key, version, _ in broker.requests]
    assert versions == [
        (api_keys.LIST_TRANSACTIONS, 1),
        (api_keys.METADATA, apis.BY_KEY[api_keys.METADATA].max),
    ]


@pytest.mark.parametrize("offered", [None, (5, 9)])
def test_a_request_that_is_not_offered_is_named(
    broker: ScriptedBroker, cluster: Brokers, offered: tuple[int, int] | None
) -> None:
    del broker.offered[api_keys.LIST_TRANSACTIONS]
    if offered is not None:
        broker.offered[api_keys.LIST_TRANSACTIONS] = offered
    with pytest.raises(UnsupportedBroker, match=r"offers ListTransactions (not at all|only up to)"):
        cluster.ask_any(api_keys.LIST_TRANSACTIONS, {})


def test_the_next_bootstrap_server_is_asked_when_one_is_dead(
    broker: ScriptedBroker, dead_address: str
) -> None:
    with brokers_at(f"{dead_address}, {broker.address}") as cluster:
        assert cluster.broker_ids() == [7]


def test_nobody_there_is_said_with_the_address(dead_address: str, silent_address: str) -> None:
    with (
        pytest.raises(CannotConnect, match=rf"{dead_address}: Connection refused; .*--bootstrap-server"),
        Connection(dead_address, 300).brokers() as cluster,
    ):
        cluster.broker_ids()
    with (
        brokers_at(silent_address, 300) as cluster,
        pytest.raises(Unreachable, match=f"{silent_address}: it did not answer in time"),
    ):
        cluster.broker_ids()
    with pytest.raises(ConfigError, match="'nonsense' is no HOST:PORT"):
        brokers_at("nonsense")


def test_a_broker_that_hangs_up_is_said(broker: ScriptedBroker, cluster: Brokers) -> None:
    broker.answers[api_keys.LIST_TRANSACTIONS] = HANG_UP
    with pytest.raises(Unreachable, match="it closed the connection"):
        cluster.ask_any(api_keys.LIST_TRANSACTIONS, {})
    assert cluster.broker_ids() == [7]  # a new connection


def test_a_coordinator_that_is_not_there_yet_is_asked_for_again(
    broker: ScriptedBroker, cluster: Brokers
) -> None:
    not_yet = (ErrorCode.coordinator_not_available, ErrorCode.coordinator_load_in_progress)
    broker.answers[api_keys.FIND_COORDINATOR] = coordinator(broker, *not_yet)
    assert cluster.retried(lambda: cluster.coordinator_of("group", "k")) == 7
    assert [key for key, _, _ in broker.requests] == [api_keys.FIND_COORDINATOR] * 3
    cluster.coordinator_of("group", "k")
    assert len(broker.requests) == 3  # it is remembered


def test_a_coordinator_that_moved_is_looked_for_again(broker: ScriptedBroker, cluster: Brokers) -> None:
    broker.answers[api_keys.FIND_COORDINATOR] = coordinator(broker)
    broker.answers[api_keys.OFFSET_DELETE] = lambda _: {"error_code": ErrorCode.none}
    codes = [ErrorCode.not_coordinator, ErrorCode.none]

    def attempt() -> None:
        cluster.ask_coordinator("group", "k", api_keys.OFFSET_DELETE, {"group_id": "k"})
        check(codes.pop(0), "cannot delete")

    cluster.retried(attempt)
    asked = [key for key, _, _ in broker.requests]
    assert asked == [api_keys.FIND_COORDINATOR, api_keys.OFFSET_DELETE] * 2


def test_a_refusal_that_does_not_pass_is_raised_at_once(broker: ScriptedBroker, cluster: Brokers) -> None:
    denied = ErrorCode.group_authorization_failed
    broker.answers[api_keys.FIND_COORDINATOR] = coordinator(broker, denied)
    with pytest.raises(Refused, match=r"coordinator of group 'k': .*GROUP_AUTHORIZATION_FAILED") as caught:
        cluster.retried(lambda: cluster.coordinator_of("group", "k"))
    assert caught.value.code is denied
    assert len(broker.requests) == 1


def test_a_refusal_that_never_passes_is_raised_when_the_time_is_up(broker: ScriptedBroker) -> None:
    def refuse() -> None:
        check(ErrorCode.concurrent_transactions, "cannot abort", "Still busy.", "wait")

    with (
        brokers_at(broker.address, timeout_ms=1) as cluster,
        pytest.raises(Refused, match=r"^cannot abort: Still busy \(CONCURRENT_TRANSACTIONS\); wait$"),
    ):
        cluster.retried(refuse)


def test_a_leader_is_waited_for_and_what_is_not_there_is_named(
    broker: ScriptedBroker, cluster: Brokers
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
    with pytest.raises(ClusterError, match="topic 't' has no partition 5; it has 0 to 1"):
        cluster.leader_of("t", 5)
    with pytest.raises(ClusterError, match="topic 'nowhere' does not exist"):
        cluster.leader_of("nowhere", 0)
    with pytest.raises(ClusterError, match="broker 9 is not in the cluster; its brokers are 7"):
        cluster.ask_broker(9, api_keys.LIST_TRANSACTIONS, {})


def test_the_offsets_of_a_group_are_read_from_its_coordinator(
    broker: ScriptedBroker, cluster: Brokers
) -> None:
    broker.answers[api_keys.FIND_COORDINATOR] = coordinator(broker)
    partitions = [
        {"partition_index": 0, "committed_offset": 5, "committed_leader_epoch": 2},
        {"partition_index": 1, "committed_offset": 6, "committed_leader_epoch": -1},
        {"partition_index": 2, "committed_offset": -1},
    ]
    moved = [ErrorCode.not_coordinator, ErrorCode.none]
    broker.answers[api_keys.OFFSET_FETCH] = lambda _: {
        "groups": [
            {
                "group_id": "k",
                "topics": [{"name": "t", "partitions": partitions}],
                "error_code": moved.pop(0),
            }
        ]
    }
    assert committed_offsets(cluster, "k") == {("t", 0): (5, 2), ("t", 1): (6, None)}
    moved.append(ErrorCode.none)
    partitions[2]["error_code"] = ErrorCode.topic_authorization_failed
    with pytest.raises(Refused, match=r"committed offsets of group 'k' in t-2: .*TOPIC_AUTHORIZATION_FAILED"):
        committed_offsets(cluster, "k")
