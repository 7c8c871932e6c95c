"""Kafka's DumpLogSegments reads our data directory, with no broker running."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from tests.support.clients import CLIENTS, Message

from holdfast.testing.apache import DUMP_LOG, run_tool
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import require_apache_kafka
from holdfast.wire.codecs import Codec

pytestmark = [pytest.mark.check, pytest.mark.java]

SEGMENT_BYTES = 1 << 20
VALUE_BYTES = 10_000
BATCHES = 150
BASE_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a broker left behind after a clean stop: several segments, all codecs, topics made and deleted."""
    require_apache_kafka()
    directory = tmp_path_factory.mktemp("dumped") / "holdfast"
    with BrokerProcess(str(directory)) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
        topics = [
            NewTopic(
                "rolled", 1, 1, config={"segment.bytes": str(SEGMENT_BYTES), "index.interval.bytes": "4096"}
            ),
            NewTopic("codecs", 2, 1, config={"cleanup.policy": "compact"}),
            NewTopic("short-lived", 1, 1),
        ]
        for made in admin.create_topics(topics).values():
            made.result(30)
        admin.create_partitions([NewPartitions("codecs", 3)])["codecs"].result(30)
        admin.delete_topics(["short-lived"])["short-lived"].result(30)
        client = CLIENTS[0]
        settings = {"batch.num.messages": 2}
        messages = [
            Message(b"key %d" % number, b"%d" % number + b"." * VALUE_BYTES, (("h", b"v"),), BASE_MS + number)
            for number in range(2 * BATCHES)
        ]
        client.produce(broker.bootstrap_servers, "rolled", messages, settings=settings)
        for codec in Codec:
            client.produce(broker.bootstrap_servers, "codecs", messages[:5], codec=codec.name.lower())
        assert broker.stop() == 0
    return directory


def dump(*arguments: str) -> str:
    done = run_tool(DUMP_LOG, *arguments)
    assert not done.stderr, done.stderr.decode()
    return done.stdout.decode()


def files(directory: Path, partition: str, suffix: str) -> list[str]:
    return sorted(str(path) for path in (directory / partition).glob(f"*{suffix}"))


def test_segments_and_their_indexes_are_read_and_agree(data_directory: Path) -> None:
    logs = files(data_directory, "rolled-0", ".log")
    indexes = files(data_directory, "rolled-0", ".index") + files(data_directory, "rolled-0", ".timeindex")
    assert len(logs) > 2
    assert len(indexes) == 2 * len(logs)
    # A mismatch of index and log is printed and named.
    text = dump("--files", ",".join(logs + indexes))
    assert "mismatch" not in text.lower()
    assert "Non-consecutive" not in text
    assert "out of order" not in text.lower()
    offsets = [int(each) for each in re.findall(r"^baseOffset: (\d+) ", text, re.M)]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert max(int(each) for each in re.findall(r" lastOffset: (\d+) ", text)) == 2 * BATCHES - 1
    assert set(re.findall(r" isvalid: (\w+)", text)) == {"true"}
    assert re.findall(r"^offset: (\d+) position: (\d+)$", text, re.M), "the offset index has entries"
    times = re.findall(r"^timestamp: (\d+) offset: (\d+)$", text, re.M)
    assert times
    assert all(int(moment) - BASE_MS == int(offset) for moment, offset in times)


def test_records_of_every_codec_are_read(data_directory: Path) -> None:
    logs = files(data_directory, "codecs-0", ".log")
    text = dump("--print-data-log", "--files", ",".join(logs))
    codecs = set(re.findall(r" compresscodec: (\w+) ", text))
    assert codecs == {"none", "gzip", "snappy", "lz4", "zstd"}
    records = re.findall(r"^\| offset: (\d+) .* headerKeys: \[h\] key: key (\d) payload: \2\.", text, re.M)
    assert len(records) == 5 * len(Codec)


def test_indexes_pass_the_check_kafka_makes_at_its_start(data_directory: Path) -> None:
    indexes = files(data_directory, "rolled-0", ".index") + files(data_directory, "rolled-0", ".timeindex")
    text = dump("--index-sanity-check", "--files", ",".join(indexes))
    assert text.count("passed sanity check.") == len(indexes)


def test_producer_snapshots_are_read(data_directory: Path) -> None:
    snapshots = files(data_directory, "rolled-0", ".snapshot")
    assert snapshots
    text = dump("--files", ",".join(snapshots))
    entries = re.findall(r"producerId: (\d+) producerEpoch: 0 .*?lastSequence: (\d+)", text)
    assert entries
    assert int(entries[-1][1]) == 2 * BATCHES - 1


def test_the_metadata_log_is_decoded(data_directory: Path) -> None:
    logs = files(data_directory, "__cluster_metadata-0", ".log")
    text = dump("--cluster-metadata-decoder", "--files", ",".join(logs))
    kinds = re.findall(r'"type":"(\w+)"', text)
    assert {"TOPIC_RECORD", "PARTITION_RECORD", "CONFIG_RECORD", "REMOVE_TOPIC_RECORD"} <= set(kinds)
    assert {"FEATURE_LEVEL_RECORD", "PRODUCER_IDS_RECORD", "REGISTER_BROKER_RECORD"} <= set(kinds)
    assert kinds.count("TOPIC_RECORD") == 3
    assert kinds.count("PARTITION_RECORD") == 5
    assert '"name":"rolled"' in text
    assert "Could not deserialize" not in text
    assert "could not be decoded" not in text


def test_transactions_are_read_from_index_log_and_snapshot(tmp_path: Path) -> None:
    require_apache_kafka()
    directory = tmp_path / "holdfast"
    with BrokerProcess(str(directory)) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
        admin.create_topics([NewTopic("t", 1, 1)])["t"].result(30)
        producer = Producer(
            {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "x", "log_level": 0}
        )
        producer.init_transactions(30)
        for end in (producer.commit_transaction, producer.abort_transaction, producer.abort_transaction):
            producer.begin_transaction()
            for value in (b"1", b"2"):
                producer.produce("t", value, partition=0)
            producer.flush(30)
            end(30)
        producer.begin_transaction()
        producer.produce("t", b"open", partition=0)
        producer.flush(30)
        assert broker.stop() == 0
    text = dump("--files", ",".join(files(directory, "t-0", ".txnindex")))
    assert re.findall(r"firstOffset: (\d+) lastOffset: (\d+) lastStableOffset: (\d+)", text) == [
        ("3", "5", "6"),
        ("6", "8", "9"),
    ]
    text = dump("--files", ",".join(files(directory, "t-0", ".snapshot")))
    assert set(re.findall(r"currentTxnFirstOffset: (\S+)", text)) == {"OptionalLong[9]"}
    text = dump("--print-data-log", "--files", ",".join(files(directory, "t-0", ".log")))
    assert re.findall(r"endTxnMarker: (\w+)", text) == ["COMMIT", "ABORT", "ABORT"]
