"""The doctor at a real broker, and at one that is not there."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.admin.errors import Unreachable
from holdfast.doctor.findings import ConfigChange, Severity
from holdfast.doctor.live import apply_fixes, changes_of, examine_cluster
from holdfast.doctor.live_ask import Cluster
from holdfast.doctor.live_collect import collect
from holdfast.wire.api_keys import METADATA

DAY_MS = 86_400_000


@pytest.fixture
def server(holdfast_broker: Any) -> str:
    return str(holdfast_broker.bootstrap_servers)


def create(server: str, name: str, partitions: int = 1, **settings: str) -> None:
    topic = NewTopic(
        name,
        num_partitions=partitions,
        replication_factor=1,
        config={key.replace("_", "."): value for key, value in settings.items()},
    )
    admin = AdminClient({"bootstrap.servers": server})
    for future in admin.create_topics([topic]).values():
        future.result()


def write(server: str, topic: str, times_ms: list[int], partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": server})
    for time_ms in times_ms:
        producer.produce(topic, b"x", partition=partition, timestamp=time_ms)
        producer.flush(10)


def commit(server: str, group: str, topic: str, position: int, partition: int = 0) -> None:
    consumer = Consumer({"bootstrap.servers": server, "group.id": group, "enable.auto.commit": False})
    consumer.commit(offsets=[TopicPartition(topic, partition, position)], asynchronous=False)
    consumer.close()


def test_a_single_broker_is_one_note(server: str) -> None:
    for number in range(3):
        create(server, f"topic-{number}")
    examination = examine_cluster({"bootstrap.servers": server})
    (note,) = [found for found in examination.findings if found.id == "HF201"]
    assert note.severity is Severity.NOTE
    assert examination.complete, examination.gaps
    assert not [found for found in examination.findings if found.id == "HF202"]


def test_the_time_left_is_that_of_the_message_at_the_position(server: str) -> None:
    # HF206
    now_ms = int(time.time() * 1000)
    create(server, "orders", retention_ms=str(8 * DAY_MS))
    write(server, "orders", [now_ms - 6 * DAY_MS, now_ms - 5 * DAY_MS, now_ms - DAY_MS, now_ms])
    commit(server, "billing", "orders", 1)
    commit(server, "current", "orders", 3)
    examination = examine_cluster({"bootstrap.servers": server}, now_ms=lambda: now_ms)
    (found,) = [found for found in examination.findings if found.id == "HF206" and "group" in found.where]
    assert found.where == "group billing on topic orders"
    assert "3 behind" in found.found
    assert "retention passes it in 3 d" in found.found


def test_only_the_groups_asked_for_are_looked_at_and_an_unknown_one_is_missed(server: str) -> None:
    create(server, "orders")
    write(server, "orders", [0])
    commit(server, "one", "orders", 0)
    commit(server, "two", "orders", 0)
    with Cluster({"bootstrap.servers": server}) as cluster:
        snapshot = collect(cluster, ["one", "three"], lambda: 1)
    assert list(snapshot.groups) == ["one"]
    assert snapshot.groups["one"].committed_offsets == {("orders", 0): 0}
    (gap,) = snapshot.gaps
    assert "three" in gap.what


def test_an_open_transaction_names_who_holds_it(server: str) -> None:
    # HF411
    create(server, "orders")
    producer = Producer(
        {"bootstrap.servers": server, "transactional.id": "billing-1", "transaction.timeout.ms": 60_000}
    )
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce("orders", b"x", partition=0)
    producer.flush(10)
    with Cluster({"bootstrap.servers": server}) as cluster:
        snapshot = collect(cluster, (), lambda: 1)
    (transaction,) = snapshot.transactions or []
    assert (transaction.transactional_id, transaction.places) == ("billing-1", (("orders", 0),))
    (held,) = snapshot.open_producers
    assert (held.place, held.start_offset) == (("orders", 0), 0)
    assert held.producer_id == transaction.producer_id
    in_an_hour = (transaction.start_ms or 0) + 3_600_000
    examination = examine_cluster({"bootstrap.servers": server}, now_ms=lambda: in_an_hour)
    (found,) = [found for found in examination.findings if found.id == "HF411"]
    assert found.where == "transactional id billing-1"
    assert "open for 1 h" in found.found
    producer.abort_transaction(10)


def test_looks_of_a_history_are_compared_and_added_to(server: str, tmp_path: Path) -> None:
    create(server, "orders")
    write(server, "orders", [0, 0])
    commit(server, "billing", "orders", 1)
    history = str(tmp_path / "looks.jsonl")
    first = examine_cluster({"bootstrap.servers": server}, history=history, now_ms=lambda: 1_000_000)
    assert not [found for found in first.findings if "while the log grew" in found.found]
    write(server, "orders", [0, 0])
    second = examine_cluster({"bootstrap.servers": server}, history=history, now_ms=lambda: 1_600_000)
    (stalled,) = [found for found in second.findings if "while the log grew" in found.found]
    assert "has been 1 for 10 min" in stalled.found
    assert len(Path(history).read_text().splitlines()) == 2


def test_a_fix_is_made_when_it_is_applied_and_not_before(server: str) -> None:
    create(server, "orders", retention_ms="60000")
    write(server, "orders", [0])
    commit(server, "billing", "orders", 0)
    settings = {"bootstrap.servers": server}
    examination = examine_cluster(settings)
    changes = [each for each in changes_of(examination.findings) if each.setting == "retention.ms"]
    assert changes == [ConfigChange("topic", "orders", "retention.ms", str(7 * DAY_MS))]
    again = examine_cluster(settings)
    assert changes_of(again.findings) == changes_of(examination.findings)
    assert apply_fixes(settings, changes) == [(changes[0], None)]
    after = examine_cluster(settings)
    assert not [each for each in changes_of(after.findings) if each.setting == "retention.ms"]


def test_a_change_the_cluster_refuses_says_why(server: str) -> None:
    change = ConfigChange("topic", "nowhere", "retention.ms", "1")
    ((_, refused),) = apply_fixes({"bootstrap.servers": server}, [change])
    assert refused


def test_nobody_there_is_an_error_with_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(Unreachable, match=address) as raised:
            examine_cluster({"bootstrap.servers": address})
    assert raised.value.exit_code == 3


def test_a_broker_that_dies_is_gone_and_not_asked_again(holdfast_broker: Any) -> None:
    with Cluster({"bootstrap.servers": holdfast_broker.bootstrap_servers}) as cluster:
        cluster.metadata([])
        holdfast_broker.stop()
        with pytest.raises(Unreachable):
            cluster.ask_broker(1, METADATA, {"topics": []})
        holdfast_broker.start()
        with pytest.raises(Unreachable):
            cluster.ask_any(METADATA, {"topics": []})
