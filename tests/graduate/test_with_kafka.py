"""The real Apache Kafka on a directory that holdfast wrote: everything is there, and whatever is not is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from kio.schema.errors import ErrorCode
from tests.support import prepared

from holdfast.cli.app import run_command
from holdfast.cli.exits import run
from holdfast.errors import DataDirectoryLocked
from holdfast.graduate import changes
from holdfast.graduate.changes import AlreadyUsed
from holdfast.graduate.handing_over import MANIFEST_FILE, Request, graduate, prepare, undo
from holdfast.graduate.report import Fault, Report
from holdfast.graduate.starting import start_kafka
from holdfast.graduate.verifying import verify
from holdfast.manifest.model import Manifest, decode
from holdfast.testing.apache import SHORT_LIVED_JVM, ApacheKafka
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import QUIET, Engine, wait_until
from holdfast.testing.processes import free_ports
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import INIT_PRODUCER_ID, PRODUCE
from holdfast.wire.batch import Record, build_batch

pytestmark = [pytest.mark.check, pytest.mark.java]

NEW_PRODUCER = {
    "transactional_id": None,
    "transaction_timeout_ms": 60_000,
    "producer_id": -1,
    "producer_epoch": -1,
}
OUT_OF_ORDER = 45
NOT_LEADER = 6
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


RETRIED = 5
"""Batches of one producer that may be under way at once."""


def errors_of(log: str) -> list[str]:
    """Lines that say that something is wrong.

    That a busy machine is slow is no error, nor that a broker asks a controller that has only just been elected.
    """
    lines = log.splitlines()
    return [
        line
        for line, cause in zip(lines, [*lines[1:], ""], strict=True)
        if (" ERROR " in line or " FATAL " in line)
        and "EventPerformanceMonitor" not in line
        and "NotControllerException" not in cause
    ]


def produce(client: WireClient, producer_id: int, sequence: int) -> tuple[int, int]:
    """Error code and offset of a batch with one record, in the topic `retried`."""
    batch = build_batch(
        [Record(0, 0, None, str(sequence).encode())],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        base_timestamp=1_700_000_000_000,
    )
    data = [{"name": "retried", "partition_data": [{"index": 0, "records": batch}]}]
    request = {"transactional_id": None, "acks": -1, "timeout_ms": 30_000, "topic_data": data}
    while True:
        found = client.ask(PRODUCE, 9, request).responses[0].partition_responses[0]
        if int(found.error_code) != ErrorCode.request_timed_out:  # a disk was slow: again, as a producer does
            return int(found.error_code), found.base_offset


@dataclass
class HandedOver:
    kafka: ApacheKafka
    output: str
    manifest: Manifest

    def verify(self, manifest: Manifest | None = None) -> Report:
        journal = changes.load(self.output)
        assert journal is not None
        taken = frozenset((each["resource"], each["name"]) for each in journal.settings_taken)
        settings = {"bootstrap.servers": self.kafka.bootstrap_servers}
        return verify(manifest or self.manifest, self.output, settings, taken)


def fill(server: str) -> None:
    """Something of every kind."""
    engine = Engine("holdfast", server)
    settings = {"bootstrap.servers": server, **QUIET}
    admin = AdminClient(settings)
    for codec in CODECS:
        engine.create_topic(f"codec-{codec}", 1, {"segment.bytes": "1048576", "holdfast.flush": "os"})
        producer = Producer({**settings, "compression.type": codec, "linger.ms": 20})
        for number in range(3000):
            producer.produce(f"codec-{codec}", f"{number}" * 100, str(number % 7), headers={"n": str(number)})
        assert producer.flush(40) == 0
    engine.create_topic("orders", 4, {"retention.ms": "864000000"})
    engine.write("orders", {number: map(str, range(200)) for number in range(4)})
    engine.create_topic("recreated")
    engine.write("recreated", {0: ["of the first life"]})
    admin.delete_topics(["recreated"])["recreated"].result(30)
    engine.create_topic("recreated")
    engine.write("recreated", {0: ["of the second"]})
    places: Any = {TopicPartition("orders", 1, 77): None}
    next(iter(admin.delete_records(list(places)).values())).result(30)
    engine.create_topic("prices", 1, {"cleanup.policy": "compact"})
    keyed = Producer(settings)
    for number in range(500):
        keyed.produce("prices", str(number), str(number % 50))
    keyed.produce("prices", None, "49")
    assert keyed.flush(30) == 0
    for name, ending in (("done", "commit"), ("dropped", "abort"), ("open", "")):
        transactional = Producer({**settings, "transactional.id": name, "transaction.timeout.ms": 900_000})
        transactional.init_transactions(30)
        transactional.begin_transaction()
        for topic in ("orders", "prices"):
            transactional.produce(topic, name, name, partition=0)
        if ending == "commit":
            transactional.commit_transaction(30)
        elif ending == "abort":
            transactional.flush(30)
            transactional.abort_transaction(30)
        else:
            transactional.flush(30)
    engine.create_topic("retried")
    with WireClient(server) as client:
        given = client.ask(INIT_PRODUCER_ID, 4, NEW_PRODUCER).producer_id
        for sequence in range(RETRIED):
            assert produce(client, given, sequence) == (0, sequence)
    for protocol in ("classic", "consumer"):
        consumer = Consumer(
            {
                **settings,
                "group.id": protocol,
                "group.protocol": protocol,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe(["orders"])
        wait_until(partial(consumer.poll, 1.0), f"the group {protocol} reads")
        consumer.commit(
            offsets=[TopicPartition("orders", number, 100 + number) for number in range(4)],
            asynchronous=False,
        )
        consumer.close()


@pytest.fixture(scope="module")
def handed_over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandedOver]:
    where = tmp_path_factory.mktemp("handed-over")
    port, controller = free_ports(2)
    paths = (str(where / "a"), str(where / "b"))
    broker = BrokerProcess(",".join(paths), listen=f"127.0.0.1:{port}").start()
    try:
        fill(broker.bootstrap_servers)
        undecided = prepared.open_transactions(broker.bootstrap_servers)
        output = str(where / "out")
        prepare(paths, output)
    finally:
        broker.crash()
    request = Request(paths, ("127.0.0.1", port), ("127.0.0.1", controller), output)
    graduate(request)
    undo(output)
    del undecided
    prepared.decide(paths)
    outcome = graduate(request)
    assert outcome.bytes_known > 100_000
    kafka = start_kafka(output, is_detached=False, jvm_options=SHORT_LIVED_JVM)
    try:
        manifest = decode(Path(output, MANIFEST_FILE).read_bytes(), MANIFEST_FILE)
        log = kafka.log_file.read_text(encoding="utf-8", errors="replace")
        assert errors_of(log) == []
        yield HandedOver(kafka, output, manifest)
    finally:
        kafka.close()


def test_everything_is_there(handed_over: HandedOver, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = handed_over.manifest
    report = handed_over.verify()
    assert report.findings == []
    assert report.verdict == "proven"
    assert report.counts.records_proven == report.counts.records > 15_000
    assert report.counts.keys_proven == report.counts.keys > 50
    assert report.counts.offsets == 8
    assert report.counts.transactions == 3 + len(prepared.DECISIONS)
    assert report.counts.producers > 6
    assert [each.transactional_id for each in manifest.transactions if each.status == 1] == ["open"]
    assert sorted(each.status for each in manifest.transactions if each.status in (2, 3)) == [2, 2, 3, 3]
    assert "log.flush.interval.messages=1 has every broker flush first" in report.replicas
    arguments = ["graduate", "verify", "--output", handed_over.output]
    arguments += ["--bootstrap-server", handed_over.kafka.bootstrap_servers]
    certificates = os.path.join(handed_over.output, "proofs")
    assert run(lambda: run_command([*arguments, "--certificate", certificates])) == 0
    assert capsys.readouterr().out.startswith("proven: ")
    key = Path(handed_over.output, "key.pem")
    private = Ed25519PrivateKey.generate()
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    signed = [*arguments, "--certificate", certificates, "--sign-key", str(key), "--json"]
    assert run(lambda: run_command(signed)) == 0
    assert run(lambda: run_command(["audit", "verify", certificates])) == 0
    assert run(lambda: run_command([*arguments, "--sign-key", str(key)])) == 2


def test_decided_transactions_are_carried_out(handed_over: HandedOver) -> None:
    prepared.assert_carried_out(handed_over.kafka.bootstrap_servers)


def test_kafka_has_run_so_nothing_is_taken_back(handed_over: HandedOver) -> None:
    with pytest.raises(DataDirectoryLocked):
        undo(handed_over.output)
    journal = changes.load(handed_over.output)
    assert journal is not None
    with pytest.raises(AlreadyUsed, match="Kafka has written"):
        changes.take_back(journal, handed_over.output)


def test_batches_that_were_stored_and_not_answered_are_known_when_they_are_sent_again(
    handed_over: HandedOver,
) -> None:
    topic = next(topic for topic in handed_over.manifest.topics if topic.name == "retried")
    (producer,) = topic.partitions[0].producers
    with WireClient(handed_over.kafka.bootstrap_servers) as client:
        # A busy machine's Kafka may answer before it leads everything.
        wait_until(lambda: produce(client, producer.producer_id, 0)[0] != NOT_LEADER, "a leader")
        for sequence in range(RETRIED):
            assert produce(client, producer.producer_id, sequence) == (0, sequence)
        assert produce(client, producer.producer_id, RETRIED) == (0, RETRIED)
        assert produce(client, producer.producer_id, RETRIED + 5)[0] == OUT_OF_ORDER


def changed(manifest: Manifest, name: str, **fields: Any) -> Manifest:
    """The manifest of one topic, with another first partition."""
    topic = next(topic for topic in manifest.topics if topic.name == name)
    first = replace(topic.partitions[0], **fields)
    return replace(manifest, topics=(replace(topic, partitions=(first, *topic.partitions[1:])),), groups=())


def test_whatever_is_not_as_the_manifest_says_is_named(handed_over: HandedOver) -> None:
    manifest = handed_over.manifest
    orders = next(topic for topic in manifest.topics if topic.name == "orders").partitions[0]
    segment = orders.segments[-1]
    block = segment.blocks[-1]
    altered = replace(segment, blocks=(*segment.blocks[:-1], block._replace(sha256="0" * 64)))
    more = replace(segment, blocks=(*segment.blocks, block._replace(offset=block.offset + 5)))
    producer = orders.producers[0]
    group = manifest.groups[0]
    for judged, fault, words in (
        (changed(manifest, "orders", segments=(altered,)), Fault.ALTERED, "bytes are not those"),
        (
            changed(manifest, "orders", segments=(more,), end_offset=block.offset + 5),
            Fault.LOST,
            "it ends at",
        ),
        (
            changed(manifest, "orders", producers=(producer._replace(epoch=producer.epoch + 1),)),
            Fault.ALTERED,
            "has epoch",
        ),
        (
            changed(manifest, "orders", producers=(producer._replace(producer_id=99),)),
            Fault.LOST,
            "nothing is known of producer 99",
        ),
        (
            replace(
                manifest,
                groups=(replace(group, offsets=(group.offsets[0]._replace(offset=10**6),)),),
            ),
            Fault.ALTERED,
            "stood at 1000000",
        ),
        (
            replace(manifest, topics=(replace(manifest.topics[0], name="gone"),)),
            Fault.LOST,
            "no such topic",
        ),
    ):
        report = handed_over.verify(judged)
        assert report.verdict == "failed"
        assert [(each.fault, words in each.text) for each in report.findings][:1] == [(fault, True)]


def test_a_certificate_names_the_manifest_it_is_of(handed_over: HandedOver) -> None:
    report = handed_over.verify()
    document = json.loads(Path(handed_over.output, MANIFEST_FILE).read_bytes())
    assert report.as_json()["manifest_sha256"] == document["sha256"]


def trim(admin: AdminClient, to: TopicPartition) -> None:
    """Remove records below an offset; a Kafka whose controller has missed its heartbeats leads again soon."""

    def is_done() -> bool:
        (future,) = admin.delete_records([to]).values()
        error = future.exception(30)
        if error is not None and error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
            raise error
        return error is None

    wait_until(is_done, f"{to} is the log's start")


def test_what_was_removed_since_is_named(handed_over: HandedOver) -> None:
    """The last one: it takes records away."""
    manifest = changed(handed_over.manifest, "orders")
    admin = AdminClient({"bootstrap.servers": handed_over.kafka.bootstrap_servers, **QUIET})
    trim(admin, TopicPartition("orders", 2, 200))
    report = handed_over.verify(manifest)
    assert (report.findings, report.verdict) == ([], "proven")
    assert report.expired == ["orders-2: offsets 0 to 199 were removed since; the log starts at 200"]
    assert report.counts.records_proven == report.counts.records - 200
    trim(admin, TopicPartition("orders", 3, 50))
    report = handed_over.verify(manifest)
    assert report.verdict == "inconclusive"
    (found,) = report.findings
    assert (found.fault, found.subject) == (Fault.UNPROVEN, "orders-3")
    assert found.text.startswith("offsets 50 to 199: the log starts within them now")


def test_everything_is_there_when_holdfast_serves_what_kafka_left(handed_over: HandedOver) -> None:
    """The way back; it ends the Kafka that the others ask."""
    kafka, output = handed_over.kafka, handed_over.output
    kafka.stop()
    journal = changes.load(output)
    assert journal is not None
    with pytest.raises(AlreadyUsed):
        undo(output)
    paths = ",".join(journal.log_dirs)
    untouched = [topic for topic in handed_over.manifest.topics if topic.name != "orders"]
    manifest = replace(handed_over.manifest, topics=tuple(untouched))
    with BrokerProcess(paths, listen=kafka.bootstrap_servers) as broker:
        report = handed_over.verify(manifest)
        assert [each for each in report.findings if each.fault is not Fault.UNPROVEN] == []
        assert report.counts.records_proven == report.counts.records > 14_000
        assert broker.stop() == 0
    # And once more to Kafka: whoever votes stands in the log already.
    again = graduate(
        Request(journal.log_dirs, ("127.0.0.1", kafka.port), ("127.0.0.1", free_ports(1)[0]), output)
    )
    assert again.manifest.records > 14_000
    kafka.launch()
    kafka.wait_until_ready()
    report = handed_over.verify(decode(Path(output, MANIFEST_FILE).read_bytes(), MANIFEST_FILE))
    assert report.findings == []
