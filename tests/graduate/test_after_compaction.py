"""Kafka on a directory with a snapshot of the metadata and compacted segments; and after it has compacted itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Producer

from holdfast import Broker
from holdfast.broker.node import metadata_log
from holdfast.graduate.handing_over import MANIFEST_FILE, Request, graduate, prepare
from holdfast.graduate.starting import start_kafka
from holdfast.graduate.verifying import verify
from holdfast.manifest.directory import read_directories
from holdfast.manifest.model import decode
from holdfast.testing.apache import SHORT_LIVED_JVM
from holdfast.testing.engines import QUIET, Engine, read_log, wait_until
from holdfast.testing.processes import free_ports

KEYS = 40
SETTINGS = {
    "cleanup.policy": "compact",
    "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
}


@pytest.fixture
def snapshots_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_log, "HISTORY_RECORDS_MIN", 0)
    monkeypatch.setattr(metadata_log, "HISTORY_FACTOR", 0)


def write(server: str, values: range) -> None:
    producer = Producer({"bootstrap.servers": server, **QUIET})
    for value in values:
        producer.produce("prices", f"{value}" * 200, str(value % KEYS))
    assert producer.flush(60) == 0


@pytest.mark.usefixtures("snapshots_at_every_start")
def test_the_image_behind_a_snapshot_is_the_image(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with Broker(data) as broker:
        broker.create_topic("prices", 1, SETTINGS)
        broker.restart()
        broker.create_topic("orders", 2)
        assert broker.server is not None
        image = broker.server.node.metadata.image
    found = read_directories([data], is_running=False)
    assert list(Path(data, "__cluster_metadata-0").glob("*.checkpoint"))
    assert found.image == image
    assert found.image.last_offset >= image.last_offset


@pytest.mark.long
@pytest.mark.java
@pytest.mark.usefixtures("snapshots_at_every_start")
def test_last_values_are_there_after_kafka_has_compacted(tmp_path: Path) -> None:
    port, controller = free_ports(2)
    data, output = str(tmp_path / "data"), str(tmp_path / "out")
    with Broker(data, listen=f"127.0.0.1:{port}") as broker:
        Engine("holdfast", broker.bootstrap_servers).create_topic("prices", 1, SETTINGS)
        write(broker.bootstrap_servers, range(20_000))
        broker.restart()
        prepare([data], output)
    given = {"log.cleaner.backoff.ms": "200"}
    graduate(Request((data,), ("127.0.0.1", port), ("127.0.0.1", controller), output, given=given))
    manifest = decode(Path(output, MANIFEST_FILE).read_bytes(), MANIFEST_FILE)
    kafka = start_kafka(output, is_detached=False, jvm_options=SHORT_LIVED_JVM)
    try:
        server = kafka.bootstrap_servers
        first = verify(manifest, output, {"bootstrap.servers": server})
        assert first.findings == []
        assert first.counts.keys_proven == KEYS
        # Half of the keys get newer values, and the log rolls so that all before may be compacted.
        write(server, range(20_000, 20_000 + KEYS // 2))
        write(server, range(KEYS * 1000, KEYS * 1000 + 20_000 * KEYS, KEYS))
        wait_until(lambda: sum(1 for _ in read_log(server, "prices")) < 20_000, "Kafka has compacted", 120)
        second = verify(manifest, output, {"bootstrap.servers": server})
        assert second.findings == []
        assert second.counts.keys_superseded >= 1
        assert second.counts.keys_proven + second.counts.keys_superseded == KEYS
    finally:
        kafka.close()
