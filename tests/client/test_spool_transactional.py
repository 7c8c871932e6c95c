"""Delivering exactly once: messages and progress are one, and after any doubt the brokers know what was delivered."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError
from tests.support.fake_producer import FakeCluster, Stored, Verdict
from tests.support.faulty_files import FaultyFiles

from holdfast.client.delivery import Delivery
from holdfast.client.errors import DeliveryFailed, DeliveryStopped
from holdfast.client.spool import transactional
from holdfast.client.spool.refused import RefusedMessages
from holdfast.client.spool.sender import SpooledSender
from holdfast.client.spool.transactional import PROGRESS_TOPIC, decode_told
from holdfast.real import RealRandomness

Open = Callable[[], SpooledSender]


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"orders": 2, PROGRESS_TOPIC: 1})


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def open_sender(
    tmp_path: Path,
    cluster: FakeCluster,
    files: FaultyFiles,
    monkeypatch: pytest.MonkeyPatch,
    progress_topic: None,
) -> Iterator[Open]:
    monkeypatch.setattr(transactional, "BROKEN_SECONDS", 0.0)
    opened: list[SpooledSender] = []

    def open_one() -> SpooledSender:
        sender = SpooledSender(
            files,
            str(tmp_path / "home"),
            RealRandomness(),
            {"bootstrap.servers": "fake"},
            1 << 30,
            is_exactly_once=True,
            make=cluster.make,
        )
        opened.append(sender)
        return sender

    yield open_one
    for sender in opened:
        if not sender._is_closing:
            sender.close()


def send(sender: SpooledSender, value: bytes, partition: int = 0) -> Delivery:
    return sender.send("orders", partition, None, value, (), -1, 30.0)


def numbers(start: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, end)]


def test_messages_and_progress_arrive_together(open_sender: Open, cluster: FakeCluster) -> None:
    sender = open_sender()
    deliveries = [send(sender, value, number % 2) for number, value in enumerate(numbers(0, 100))]
    assert sender.flush(30) == 0
    assert cluster.values("orders", 0) == [b"%d" % number for number in range(0, 100, 2)]
    assert cluster.values("orders", 1) == [b"%d" % number for number in range(1, 100, 2)]
    assert all(delivery.wait(0).offset >= 0 for delivery in deliveries)
    last = decode_told(cluster.log(PROGRESS_TOPIC)[-1].value or b"").progress
    assert last.confirmed == {("orders", 0): 50, ("orders", 1): 50}
    assert last.prefix == sender._own.store.end
    assert {"transactional.id": f"holdfast-spool-{sender.id}"}.items() <= cluster.settings[-1].items()


def test_a_process_that_lost_its_own_note_sends_nothing_twice(
    open_sender: Open, cluster: FakeCluster, tmp_path: Path
) -> None:
    sender = open_sender()
    for value in numbers(0, 50):
        send(sender, value)
    sender.flush(30)
    cluster.away()
    for value in numbers(50, 80):
        send(sender, value).wait_stored(30)
    sender.close()
    (tmp_path / "home" / sender.id / "progress").unlink()
    cluster.back()
    sender = open_sender()
    assert sender.flush(30) == 0
    assert cluster.values("orders") == numbers(0, 80)


def test_a_commit_whose_answer_is_lost_counts(open_sender: Open, cluster: FakeCluster) -> None:
    sender = open_sender()
    send(sender, b"0").wait(30)
    cluster.lose_commit_answer()
    assert send(sender, b"1").wait(30).offset >= 0
    send(sender, b"2").wait(30)
    assert cluster.values("orders") == [b"0", b"1", b"2"]
    assert cluster.transactions.count("commit") == 3


def test_producers_that_break_again_and_again_send_everything_exactly_once(
    open_sender: Open, cluster: FakeCluster
) -> None:
    sender = open_sender()
    deliveries = []
    for number, value in enumerate(numbers(0, 600)):
        deliveries.append(send(sender, value))
        if number % 200 == 50:
            cluster.break_producers()
        elif number % 200 == 100:
            cluster.lose_commit_answer()
        elif number % 200 == 150:
            deliveries[-1].wait(30)
    assert sender.flush(30) == 0
    assert cluster.values("orders") == numbers(0, 600)
    assert all(delivery.delivered for delivery in deliveries)


def is_bad(topic: str, partition: int, message: Stored) -> Verdict | None:
    bad = topic == "orders" and (message.value or b"").startswith(b"bad")
    return Verdict(KafkaError.INVALID_RECORD, takes_batch_along=True) if bad else None


def test_a_refused_message_is_set_aside_and_the_rest_arrives_once(
    open_sender: Open, cluster: FakeCluster, files: FaultyFiles, tmp_path: Path
) -> None:
    cluster.refuse(is_bad)
    cluster.away()
    sender = open_sender()
    values = [b"bad%d" % number if number in (7, 30, 31) else b"%d" % number for number in range(64)]
    deliveries = [send(sender, value) for value in values]
    cluster.back()
    assert sender.flush(30) == 0
    assert cluster.values("orders") == [value for value in values if not value.startswith(b"bad")]
    assert [each.error is not None for each in deliveries] == [value.startswith(b"bad") for value in values]
    refused = [each.message.value for each in RefusedMessages(files, f"{tmp_path}/home/{sender.id}")]
    assert refused == [b"bad7", b"bad30", b"bad31"]
    assert "abort" in cluster.transactions
    assert sender.delivered == 61


def test_what_was_set_aside_stays_aside_when_the_process_dies_before_the_rest_is_sent(
    open_sender: Open, cluster: FakeCluster, files: FaultyFiles, tmp_path: Path
) -> None:
    cluster.refuse(is_bad)
    sender = open_sender()
    bad = send(sender, b"bad")
    with pytest.raises(DeliveryFailed):
        bad.wait(30)
    send(sender, b"good").wait(30)
    sender.close()
    # Nobody noted it: neither here nor there.
    (tmp_path / "home" / sender.id / "progress").unlink()
    cluster.logs.pop((PROGRESS_TOPIC, 0))
    cluster.refuse(lambda topic, partition, message: None)
    sender = open_sender()
    assert sender.flush(30) == 0
    assert b"bad" not in cluster.values("orders")


def test_without_room_to_set_a_message_aside_the_others_go_on(
    open_sender: Open, cluster: FakeCluster, files: FaultyFiles
) -> None:
    sender = open_sender()
    files.fail("write", errno.ENOSPC, "refused/")
    large = sender.send("orders", 0, None, b"x" * 1_100_000, (), -1, 30.0)
    assert send(sender, b"small").wait(30).offset >= 0
    assert not large.is_settled
    files.mend()
    with pytest.raises(DeliveryFailed):
        large.wait(30)
    assert sender.flush(30) == 0


def test_the_broker_may_stay_away(open_sender: Open, cluster: FakeCluster) -> None:
    cluster.away()
    sender = open_sender()
    early = [send(sender, value) for value in numbers(0, 20)]
    for delivery in early:
        delivery.wait_stored(30)
    cluster.back()
    for delivery in early:
        delivery.wait(30)
    assert cluster.values("orders") == numbers(0, 20)


def test_an_old_copy_of_a_spool_is_not_sent_from(
    open_sender: Open, cluster: FakeCluster, tmp_path: Path
) -> None:
    sender = open_sender()
    send(sender, b"0").wait(30)
    sender.close()
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    sender = open_sender()
    send(sender, b"1").wait(30)
    sender.close()
    shutil.rmtree(tmp_path / "home")
    shutil.copytree(tmp_path / "copy", tmp_path / "home")
    sender = open_sender()
    delivery = send(sender, b"not 1")
    with pytest.raises(DeliveryStopped, match="older copy"):
        delivery.wait(30)


def test_what_was_sent_at_least_once_before_is_not_sent_again(
    open_sender: Open, cluster: FakeCluster, tmp_path: Path, files: FaultyFiles
) -> None:
    first = SpooledSender(
        files,
        str(tmp_path / "home"),
        RealRandomness(),
        {"bootstrap.servers": "fake"},
        1 << 30,
        make=cluster.make,
    )
    send(first, b"0").wait(30)
    first.close()
    sender = open_sender()
    send(sender, b"1").wait(30)
    assert cluster.values("orders") == [b"0", b"1"]
