"""The manifest of a real directory: topics, records, offsets, transactions and producers, before and after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from holdfast import Broker
from holdfast.errors import DataDirectoryError
from holdfast.manifest.digesting import DigestCache
from holdfast.manifest.directory import read_directories
from holdfast.manifest.model import CommittedOffset, ManifestError, decode, encode
from holdfast.manifest.taking import digest_ahead, take
from holdfast.testing.engines import QUIET, Engine, wait_until


@pytest.mark.check
def test_a_manifest_has_everything_a_directory_holds(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    cache = DigestCache(str(tmp_path / "digests.json"))
    tables: dict[str, bytes] = {}
    with Broker(data) as broker:
        engine = Engine("holdfast", broker.bootstrap_servers)
        engine.create_topic("orders", 2, {"retention.ms": "100000"})
        engine.create_topic("prices", 1, {"cleanup.policy": "compact"})
        engine.write("orders", {0: map(str, range(500)), 1: ["one"]})
        settings = {"bootstrap.servers": broker.bootstrap_servers, **QUIET}
        keyed = Producer({**settings, "transactional.id": "t"})
        keyed.init_transactions(30)
        keyed.begin_transaction()
        for value in ("1", "2"):
            keyed.produce("prices", value, "a")
        keyed.commit_transaction(30)
        keyed.begin_transaction()
        keyed.produce("prices", "3", "b")
        keyed.flush(30)
        consumer = Consumer({**settings, "group.id": "g", "enable.auto.commit": False})
        consumer.commit(offsets=[TopicPartition("orders", 0, 77)], asynchronous=False)
        consumer.close()
        wait_until(
            lambda: digest_ahead(read_directories([data], is_running=True), cache) > 5000, "segments digested"
        )
    manifest = take(read_directories([data], is_running=False), cache, 7, tables.__setitem__)
    assert cache.bytes_known > 5000
    topics = {topic.name: topic for topic in manifest.topics}
    assert [each.records for each in topics["orders"].partitions] == [500, 1]
    assert topics["orders"].settings == {"retention.ms": "100000"}
    assert topics["orders"].partitions[0].producers[0].last_sequence == 499
    prices = topics["prices"].partitions[0]
    assert prices.key_table is not None
    assert prices.key_table.keys == 1
    assert tables["keys/prices-0.keys"].startswith(b"hf-keys1")
    assert prices.producers[0].transaction_first_offset == 3
    assert [(each.group, each.offsets) for each in manifest.groups] == [
        ("g", (CommittedOffset("orders", 0, 77, ""),))
    ]
    assert [(each.transactional_id, each.status, each.partitions) for each in manifest.transactions] == [
        ("t", 1, (("prices", 0),))
    ]
    assert decode(encode(manifest), "manifest.json") == manifest


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with Broker(data) as broker:
        broker.create_topic("orders")
    text = encode(
        take(read_directories([data], is_running=False), DigestCache(str(tmp_path / "digests.json")), 7)
    )
    document = json.loads(text)
    document["topics"][0]["partitions"][0]["end_offset"] += 1
    with pytest.raises(ManifestError, match="was changed"):
        decode(json.dumps(document).encode(), "manifest.json")
    with pytest.raises(ManifestError, match="no manifest"):
        decode(b"[]", "manifest.json")


def test_all_log_directories_must_be_there(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b")]
    with Broker(",".join(paths)) as broker:
        broker.create_topic("orders", 4)
    assert len(read_directories(paths, is_running=False).partitions) == 4
    for path in paths:
        with pytest.raises(DataDirectoryError, match=r"metadata log|is not among"):
            read_directories([path], is_running=False)
