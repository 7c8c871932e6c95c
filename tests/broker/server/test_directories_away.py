"""Real brokers on real directories: one that is away, given up, and a cluster that is pinned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

from holdfast import Broker
from holdfast.broker.log.checkpoints import encode_uuid
from holdfast.errors import DataDirectoryError
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import CREATE_TOPICS, PRODUCE
from holdfast.wire.batch import make_batch

LONGEST = "n" * 249


def create(client: WireClient, name: str, partitions: int) -> None:
    topic = {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": 1,
        "assignments": [],
        "configs": [],
    }
    client.ask(CREATE_TOPICS, 5, {"topics": [topic], "timeout": 30_000})


def produce(client: WireClient, topic: str, index: int) -> tuple[ErrorCode, int]:
    """The error and the offset of one message."""
    data = [{"index": index, "records": make_batch([b"x"], timestamp=1_700_000_000_000)}]
    topics = [{"name": topic, "partition_data": data}]
    fields = {"transactional_id": None, "acks": -1, "timeout": 30_000, "topic_data": topics}
    answer = client.ask(PRODUCE, 9, fields).responses[0].partition_responses[0]
    return answer.error_code, answer.base_offset


def test_a_directory_away_stays_away_until_it_is_back_or_given_up(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    both = f"{one},{two}"
    with Broker(both) as broker, WireClient(broker.bootstrap_servers) as client:
        create(client, LONGEST, 2)
        first = [produce(client, LONGEST, index) for index in (0, 1)]
        assert first == [(ErrorCode.none, 0)] * 2
        assert broker.server is not None
        (lost,) = (each.id for each in broker.server.node.directories if each.path == str(two))
    two.rename(tmp_path / "away")
    two.mkdir()  # a mount point
    with Broker(both) as broker, WireClient(broker.bootstrap_servers) as client:
        outcomes = {produce(client, LONGEST, index) for index in (0, 1)}
        assert outcomes == {(ErrorCode.none, 1), (ErrorCode.kafka_storage_error, -1)}
        assert list(two.iterdir()) == []
    two.rmdir()
    (tmp_path / "away").rename(two)
    with Broker(both) as broker, WireClient(broker.bootstrap_servers) as client:
        assert {produce(client, LONGEST, index)[1] for index in (0, 1)} == {1, 2}
    said: list[str] = []
    given_up = Broker(str(one), accept_loss=[encode_uuid(lost.bytes)], say=said.append)
    with given_up as broker, WireClient(broker.bootstrap_servers) as client:
        assert {produce(client, LONGEST, index)[1] for index in (0, 1)} == {0, 3}
    assert any("is recreated, empty" in line for line in said)


def test_a_process_pins_its_cluster_and_refuses_an_empty_directory(tmp_path: Path) -> None:
    broker = BrokerProcess(str(tmp_path / "data")).start()
    assert broker.has_said("a new cluster begins here; with --cluster-id=")
    broker.stop()
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--listen", "127.0.0.1:0", "--cluster-id", "x"]
    command += ["--data-dir", str(tmp_path / "empty")]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, b"Is it mounted?" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "empty").exists()


def test_metadata_that_is_away_ends_the_start_with_the_flag_that_gives_it_up(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    Broker(f"{one},{two}").start().stop()
    with pytest.raises(DataDirectoryError, match="--accept-loss=__cluster_metadata-0"):
        Broker(str(two)).start()
