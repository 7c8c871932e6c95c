"""What a broker shows over HTTP: numbers that Prometheus' parser reads, health that supervisors act on."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Broker
from holdfast.broker.node import metrics
from holdfast.broker.node.metrics import FAMILIES
from holdfast.broker.server.metrics_endpoint import CONNECTIONS_MAX, StartingThread, gathered
from holdfast.errors import UsageError
from holdfast.testing.bare_node import BareNode
from holdfast.testing.fakes import START_WALL_MS
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import DELETE_TOPICS, METADATA
from holdfast.wire.batch import Record, build_batch

SETTINGS = {"holdfast.metrics.listener": "0"}
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(broker: Broker, path: str) -> tuple[int, str]:
    assert broker.server is not None
    assert broker.server.metrics is not None
    return fetch(f"http://{broker.server.metrics.address}{path}")


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def scraped(broker: Broker) -> Series:
    status, text = get(broker, "/metrics")
    assert status == 200
    return series_of(text)


def series_of(text: str) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data", settings=SETTINGS) as broker:
        broker.create_topic("orders", 2)
        yield broker


def batch() -> bytes:
    return build_batch([Record(0, 0, None, b"a"), Record(1, 0, None, b"b")], base_timestamp=START_WALL_MS)


def produce(broker: Broker, count: int, **config: str) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, **config})
    for number in range(count):
        producer.produce("orders", b"x" * 100, partition=number % 2)
    producer.flush()


def test_prometheus_reads_every_family_and_the_numbers_are_right(broker: Broker) -> None:
    produce(broker, 10, acks="all")
    produce(broker, 10, acks="1", **{"compression.type": "gzip"})
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "billing"})
    consumer.assign([TopicPartition("orders", 0, 0), TopicPartition("orders", 1, 0)])
    read = 0
    while read < 20:
        read += len(consumer.consume(20, timeout=1))
    consumer.commit(offsets=[TopicPartition("orders", 0, 4)], asynchronous=False)
    with WireClient(broker.bootstrap_servers) as client:
        client.ask(METADATA, 12, {"topics": [{"name": "nowhere"}], "allow_auto_topic_creation": False})
    found = scraped(broker)
    consumer.close()
    names = {name for name, _ in found}
    shown = {
        name
        for name, family in FAMILIES.items()
        if names & {name, f"{name}_bucket" if family.kind == "histogram" else f"{name}_total"}
    }
    assert set(FAMILIES) - shown == set()
    zero, all_topics = {"topic": "orders", "partition": "0"}, "kafka_server_brokertopicmetrics"
    assert value(found, "kafka_brokers") == 1
    assert value(found, "kafka_topic_partitions", topic="orders") == 2
    assert value(found, "kafka_topic_partition_current_offset", **zero) == 10
    assert value(found, "holdfast_partition_durable_end_offset", **zero) == 10
    assert value(found, "kafka_topic_partition_leader", **zero) == 1
    assert value(found, "kafka_consumergroup_current_offset", consumergroup="billing", **zero) == 4
    assert value(found, "kafka_consumergroup_lag", consumergroup="billing", **zero) == 6
    assert value(found, "kafka_consumergroup_lag_sum", consumergroup="billing", topic="orders") == 6
    assert value(found, f"{all_topics}_messagesin_total", topic="orders") == 20
    assert value(found, f"{all_topics}_bytesin_total", topic="orders") > 1000
    assert value(found, f"{all_topics}_bytesout_total", topic="orders") > 1000
    assert value(found, f"{all_topics}_totalproducerequests_total", topic="orders") >= 4
    assert value(found, "kafka_log_log_size", **zero) > 500
    refused = {"request": "Metadata", "error": "UNKNOWN_TOPIC_OR_PARTITION"}
    assert value(found, "holdfast_refusals_total", **refused) == 1
    assert value(found, "holdfast_request_seconds_count", request="Produce") >= 4
    assert value(found, "holdfast_request_part_seconds_total", request="Produce", part="flush") > 0
    assert value(found, "holdfast_ready") == 1


def test_counters_survive_the_deletion_of_their_topic() -> None:
    bare = BareNode()
    client = bare.connect()
    client.create_topic("gone")
    client.produce("gone", batch())
    before = series_of("".join(metrics.scrape(bare.node, bare.clock.now(), lambda sheet: None)))
    client.ask(DELETE_TOPICS, 3, topic_names=["gone"], timeout=5000)
    after = series_of("".join(metrics.scrape(bare.node, bare.clock.now(), lambda sheet: None)))
    name = "kafka_server_brokertopicmetrics_messagesin_total"
    assert value(before, name) == value(before, name, topic="gone") == value(after, name) == 2
    assert (name, frozenset({("topic", "gone")})) not in after


def test_health_names_what_is_wrong(tmp_path: Path) -> None:
    with Broker(f"{tmp_path / 'a'},{tmp_path / 'b'}", settings=SETTINGS) as broker:
        assert broker.server is not None
        node = broker.server.node
        assert get(broker, "/livez") == (200, "alive\n")
        assert get(broker, "/readyz") == (200, "ready\n")
        assert json.loads(get(broker, "/buildinfo")[1])["version"]
        assert get(broker, "/other")[0] == 404
        metadata = node.metadata.hosted.directory
        other = next(each for each in node.directories if each is not metadata)
        broker.server.loop.call_soon_threadsafe(other.take_offline, OSError(5, "gone"))
        status, body = get(broker, "/readyz")
        assert status == 200
        assert f"log directory {other.path} is offline" in body
        assert get(broker, "/readyz?directories=all")[0] == 503
        found = scraped(broker)
        assert value(found, "holdfast_log_directory_online", directory=other.path) == 0
        assert value(found, "kafka_log_logmanager_offlinelogdirectorycount") == 1
        assert value(found, "holdfast_troubles", kind="directory-offline") == 1


def test_a_full_disk_is_not_ready_and_shows(broker: Broker) -> None:
    assert broker.server is not None
    directory = broker.server.node.metadata.hosted.directory
    broker.server.loop.call_soon_threadsafe(directory.refuses, OSError(28, "No space left on device"))
    status, body = get(broker, "/readyz")
    assert status == 503
    assert "metadata cannot be written" in body
    assert value(scraped(broker), "holdfast_troubles", kind="no-room") == 1
    assert value(scraped(broker), "holdfast_ready") == 0


def test_a_stuck_flush_shows_and_is_told_of() -> None:
    bare = BareNode()
    client = bare.connect()
    client.create_topic("orders")
    client.begin_produce("orders", batch())
    bare.turn()
    for _ in range(6):
        bare.advance(1000)
    found = series_of("".join(metrics.scrape(bare.node, bare.clock.now(), lambda sheet: None)))
    assert value(found, "holdfast_flush_oldest_seconds") >= 5
    assert value(found, "holdfast_troubles", kind="flush-stuck") == 1
    assert any("does not answer" in line for line in bare.said)
    bare.settle()
    bare.advance(1000)
    found = series_of("".join(metrics.scrape(bare.node, bare.clock.now(), lambda sheet: None)))
    assert value(found, "holdfast_flush_oldest_seconds") == 0
    assert value(found, "holdfast_troubles", kind="flush-stuck") == 0
    assert any("answers again" in line for line in bare.said)


def test_a_broker_that_starts_lives_and_is_not_ready() -> None:
    """Recovery keeps the loop busy for as long as it takes."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    port = sock.getsockname()[1]
    starting = StartingThread(sock)
    try:
        assert fetch(f"http://127.0.0.1:{port}/livez") == (200, "alive\n")
        assert fetch(f"http://127.0.0.1:{port}/readyz") == (503, "not ready: recovering\n")
        assert fetch(f"http://127.0.0.1:{port}/metrics")[0] == 503
        with socket.create_connection(("127.0.0.1", port)):
            pass  # says nothing, and goes
        assert fetch(f"http://127.0.0.1:{port}/livez")[0] == 200
    finally:
        starting.close()
        sock.close()


def test_an_address_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"holdfast\.metrics\.listener"),
        Broker(tmp_path / "data", settings={"holdfast.metrics.listener": "here"}),
    ):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with (
            pytest.raises(UsageError, match="for metrics"),
            Broker(tmp_path / "data", settings={"holdfast.metrics.listener": port}),
        ):
            pass


def test_only_so_many_connections_are_kept(broker: Broker) -> None:
    assert broker.server is not None
    assert broker.server.metrics is not None
    host, _, port = broker.server.metrics.address.rpartition(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS_MAX + 1)]
    try:
        assert sockets[-1].recv(1) == b""
        sockets[0].close()
        sockets[1].sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        assert sockets[1].recv(100).startswith(b"HTTP/1.1 200 OK")
        sockets[2].sendall(b"POST /livez HTTP/1.1\r\n\r\n")
        assert sockets[2].recv(100).startswith(b"HTTP/1.1 405")
    finally:
        for each in sockets:
            each.close()


async def test_a_scrape_lets_the_loop_go_on() -> None:
    """Slices are short whatever a scrape gathers: none of them comes to more than a few partitions."""
    bare = BareNode()
    client = bare.connect()
    client.create_topic("wide", partitions=400)
    pieces = list(metrics.scrape(bare.node, bare.clock.now(), lambda sheet: None))
    assert sum(not piece for piece in pieces) >= 400 // metrics.STRIDE
    assert b"".join(await gathered(iter(pieces))).count(b'kafka_topic_partition_leader{topic="wide"') == 400


def test_series_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PARTITIONS_MAX", 10)
    bare = BareNode()
    bare.connect().create_topic("wide", partitions=40)
    found = series_of("".join(metrics.scrape(bare.node, bare.clock.now(), lambda sheet: None)))
    assert sum(name == "kafka_topic_partition_leader" for name, _ in found) == 10
    assert value(found, "holdfast_metrics_left_out", what="partitions") == 30
    assert value(found, "kafka_server_replicamanager_partitioncount") == 40
