"""Topics that nobody has ever seen, with the broker away: stored first, decided later, once and in order."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.fake_producer import FakeCluster
from tests.support.faulty_files import FaultyFiles

from holdfast.client.delivery import Delivery
from holdfast.client.partitioner import POSITIVE, murmur2
from holdfast.client.spool import deliverer as deliverer_module
from holdfast.client.spool import topics as topics_module
from holdfast.client.spool.format import MOVED, UNDECIDED, Moved
from holdfast.client.spool.groups import make_item
from holdfast.client.spool.sender import SpooledSender
from holdfast.client.spool.store import SpoolStore
from holdfast.real import RealRandomness

Open = Callable[[], SpooledSender]


def partition_of_key(key: bytes, partitions: int) -> int:
    return (murmur2(key) & POSITIVE) % partitions


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster({"orders": 6})
    cluster.away()
    return cluster


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def open_sender(
    tmp_path: Path, cluster: FakeCluster, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    monkeypatch.setattr(topics_module, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(topics_module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(deliverer_module, "ANSWER_SECONDS", 0.1)
    opened: list[SpooledSender] = []

    def open_one() -> SpooledSender:
        sender = SpooledSender(
            files, str(tmp_path), RealRandomness(), {"bootstrap.servers": "fake"}, 1 << 30, make=cluster.make
        )
        opened.append(sender)
        return sender

    yield open_one
    for sender in opened:
        if not sender._is_closing:
            sender.close()


def send(sender: SpooledSender, value: bytes, key: bytes | None, topic: str = "orders") -> Delivery:
    return sender.send(topic, None, key, value, (), -1, 30.0)


def check(cluster: FakeCluster, sent: list[tuple[bytes, bytes]]) -> None:
    """Each message once, in the partition of its key, in order, with an id of its own."""
    arrived = []
    for partition in range(6):
        log = cluster.log("orders", partition)
        assert {message.id.split(b":")[3] for message in log} <= {b"%d" % partition}
        wanted = [value for key, value in sent if partition_of_key(key, 6) == partition]
        assert [message.value for message in log] == wanted
        arrived += log
    assert len({message.id for message in arrived}) == len(arrived) == len(sent)


def pairs(start: int, end: int) -> list[tuple[bytes, bytes]]:
    return [(b"k%d" % (number % 11), b"%d" % number) for number in range(start, end)]


def test_messages_of_an_unknown_topic_are_stored_and_arrive_when_the_broker_is_back(
    open_sender: Open, cluster: FakeCluster
) -> None:
    sender = open_sender()
    early = [send(sender, value, key) for key, value in pairs(0, 200)]
    for delivery in early:
        delivery.wait_stored(30)
    assert {delivery.partition for delivery in early} == {None}
    assert sender.flush(0) == 200
    cluster.back()
    late = [send(sender, value, key) for key, value in pairs(200, 400)]
    for delivery in early + late:
        assert delivery.wait(30).partition == delivery.partition
        assert delivery.is_stored
    assert sender.flush(30) == 0
    check(cluster, pairs(0, 400))
    assert sender.delivered == 400


def test_the_next_process_decides_what_is_undecided(open_sender: Open, cluster: FakeCluster) -> None:
    sender = open_sender()
    for key, value in pairs(0, 50):
        send(sender, value, key).wait_stored(30)
    assert "50 messages" in (sender.close().line or "")
    sender = open_sender()
    for key, value in pairs(50, 100):
        send(sender, value, key).wait_stored(30)
    sender.close()
    cluster.back()
    sender = open_sender()
    assert sender.flush(30) == 0
    check(cluster, pairs(0, 100))


def test_a_topic_that_was_seen_once_is_known_for_ever(open_sender: Open, cluster: FakeCluster) -> None:
    cluster.back()
    sender = open_sender()
    send(sender, b"0", b"k0").wait(30)
    sender.close()
    cluster.away()
    sender = open_sender()
    delivery = send(sender, b"1", b"k1")
    delivery.wait_stored(30)
    assert delivery.partition == partition_of_key(b"k1", 6)


def test_known_topics_do_not_wait_for_unknown_ones(open_sender: Open, cluster: FakeCluster) -> None:
    cluster.back()
    sender = open_sender()
    unknown = send(sender, b"nowhere", None, "unheard-of")
    for key, value in pairs(0, 20):
        send(sender, value, key).wait(30)
    unknown.wait_stored(30)
    assert not unknown.is_settled
    cluster.topics["unheard-of"] = 1
    assert unknown.wait(30).offset == 0
    assert sender.flush(30) == 0


def test_without_room_on_the_disk_they_are_sent_from_where_they_are(
    open_sender: Open, cluster: FakeCluster, files: FaultyFiles
) -> None:
    sender = open_sender()
    deliveries = [send(sender, value, key) for key, value in pairs(0, 30)]
    for delivery in deliveries:
        delivery.wait_stored(30)
    files.fail("write", errno.ENOSPC, "")
    cluster.back()
    for delivery in deliveries:
        delivery.wait(30)
    assert sender.flush(30) == 0
    check(cluster, pairs(0, 30))


def test_a_message_without_a_key_goes_where_it_went_when_it_is_sent_again(
    open_sender: Open, cluster: FakeCluster, tmp_path: Path
) -> None:
    sender = open_sender()
    for number in range(1000):
        send(sender, b"%d" % number, None)
    sender.close()
    cluster.back()
    first = open_sender()
    assert first.flush(30) == 0
    first.close()
    logs = {partition: cluster.log("orders", partition) for partition in range(6)}
    assert sum(map(bool, logs.values())) > 1
    # As if nobody had come to write down what was delivered.
    (tmp_path / first.id / "progress").unlink()
    cluster.logs.clear()
    assert open_sender().flush(30) == 0
    for partition, log in logs.items():
        assert [message.id for message in cluster.log("orders", partition)] == [message.id for message in log]


def test_what_an_earlier_version_had_moved_is_not_sent_again(
    open_sender: Open, cluster: FakeCluster, tmp_path: Path, files: FaultyFiles
) -> None:
    sender = open_sender()
    for key, value in pairs(0, 40):
        send(sender, value, key).wait_stored(30)
    sender.close()
    # It wrote them again, with their partitions, before it sent them.
    store = SpoolStore(files, f"{tmp_path}/{sender.id}")
    groups, _ = store.read(0, max_bytes=1 << 20)
    undecided = [message for group in groups for message in group.messages][:10]
    items = [make_item(message, sender._waiting) for message in undecided]
    for item in items:
        item.partition = partition_of_key(item.key or b"", 6)
    store.write(items, Moved("orders", 10))
    store.close()
    assert (store.counters["orders", MOVED], store.counters["orders", UNDECIDED]) == (10, 40)
    cluster.back()
    sender = open_sender()
    assert sender.flush(30) == 0
    arrived = [value or b"" for partition in range(6) for value in cluster.values("orders", partition)]
    assert sorted(arrived) == sorted(value for _, value in pairs(0, 40))
