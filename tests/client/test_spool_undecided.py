"""Topics that nobody has ever seen, with the broker away: stored first, decided later, once and in order."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.delivery import Delivery
from holdfast.client.errors import DeliveryFailed
from holdfast.client.partitioner import partition_of_key
from holdfast.client.spool import sender as sender_module
from holdfast.client.spool import undecided as undecided_module
from holdfast.client.spool.format import UNDECIDED
from holdfast.client.spool.refused import RefusedMessages
from holdfast.client.spool.sender import SpooledSender
from holdfast.client.spool.store import SpoolStore
from holdfast.real import RealFileSystem, RealRandomness
from holdfast.testing.engines import wait_until
from holdfast.testing.fake_producer import FakeCluster
from holdfast.testing.faulty_files import FaultyFiles

Open = Callable[[], SpooledSender]


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster({"orders": 6})
    cluster.away()
    return cluster


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(RealFileSystem())


@pytest.fixture
def open_sender(
    tmp_path: Path, cluster: FakeCluster, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    monkeypatch.setattr(undecided_module, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(sender_module, "LOOK_AFTER_SECONDS", 0.02)
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
    """Each message once, in the partition of its key, in order, numbered from 0."""
    arrived = []
    for partition in range(6):
        log = cluster.log("orders", partition)
        assert [message.id.split(b":")[1:] for message in log] == [
            [b"%d" % partition, b"%d" % sequence] for sequence in range(len(log))
        ]
        wanted = [value for key, value in sent if partition_of_key(key, 6) == partition]
        assert [message.value for message in log] == wanted
        arrived += log
    assert len(arrived) == len(sent)


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


def test_messages_for_a_topic_that_never_comes_are_set_aside(
    open_sender: Open, cluster: FakeCluster, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "MISSING_SECONDS", 0.1)
    cluster.back()
    sender = open_sender()
    lost = [send(sender, b"%d" % number, None, "unheard-of") for number in range(5)]
    for delivery in lost:
        with pytest.raises(DeliveryFailed, match="unheard-of") as refused:
            delivery.wait(30)
        assert refused.value.is_final
    assert sender.flush(30) == 0
    refused_file = RefusedMessages(files, f"{sender._home.path}/{sender.id}")
    assert [each.message.value for each in refused_file] == [b"%d" % number for number in range(5)]
    # They stay where they are, and nothing is left for the next process.
    sender.close()
    assert open_sender().flush(0) == 0


def test_without_room_for_the_second_copies_moving_waits(
    open_sender: Open, cluster: FakeCluster, files: FaultyFiles
) -> None:
    sender = open_sender()
    deliveries = [send(sender, value, key) for key, value in pairs(0, 30)]
    for delivery in deliveries:
        delivery.wait_stored(30)
    files.fail("write", errno.ENOSPC, ".spool")
    cluster.back()
    wait_until(lambda: not sender._own.mover.asked(), "the number of partitions is known")
    assert not any(delivery.is_settled for delivery in deliveries)
    files.mend()
    for delivery in deliveries:
        delivery.wait(30)
    check(cluster, pairs(0, 30))


def test_a_crash_between_two_steps_of_moving_gives_no_message_two_ids(
    open_sender: Open,
    cluster: FakeCluster,
    tmp_path: Path,
    files: FaultyFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender = open_sender()
    for key, value in pairs(0, 40):
        send(sender, value, key).wait_stored(30)
    sender.close()
    # One step of moving, as a process does it that dies before anything of it is sent.
    monkeypatch.setattr(undecided_module, "MOVE_BYTES", 1)
    store = SpoolStore(files, f"{tmp_path}/{sender.id}")
    mover: Any = undecided_module.Mover(
        store, sender._tools.layout, _partitioner(), sender._waiting, _Nobody(), lambda topic, timeout: None
    )
    mover.learn("orders", 6)
    mover.move_some(lambda group: None)
    moved = store.counters["orders", -2]
    store.close()
    assert 0 < moved < store.counters["orders", UNDECIDED] == 40
    cluster.back()
    sender = open_sender()
    assert sender.flush(30) == 0
    check(cluster, pairs(0, 40))


def _partitioner() -> Any:
    from holdfast.client.partitioner import Partitioner

    return Partitioner("murmur2_random", RealRandomness())


class _Nobody:
    """Whoever delivers, and does nothing."""

    def refuse_undecided(self, refused: Any) -> None:
        raise AssertionError(refused)

    settle_undecided = refuse_undecided

    prefix = 0

    def claim(self, place: int) -> None:
        return None

    def moved(self) -> None:
        return None
