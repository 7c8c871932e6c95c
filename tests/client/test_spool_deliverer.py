"""Delivering a spool: in order, without giving up, nothing lost and nobody left waiting, whatever the broker does."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError
from tests.support.fake_producer import FakeCluster, Stored, Verdict
from tests.support.faulty_files import FaultyFiles
from tests.support.interrupting import interrupted_at

from holdfast.client.delivery import Bell, Delivery
from holdfast.client.errors import DeliveryFailed, DeliveryStopped, NotStored
from holdfast.client.spool import feed as feed_module
from holdfast.client.spool import idempotent as idempotent_module
from holdfast.client.spool import sender as sender_module
from holdfast.client.spool.format import UNDECIDED, Headers, SpooledMessage
from holdfast.client.spool.groups import make_item
from holdfast.client.spool.home import SpoolHome
from holdfast.client.spool.progress import read_progress
from holdfast.client.spool.refused import RefusedMessages
from holdfast.client.spool.sender import SpooledSender
from holdfast.client.spool.store import SpoolFailed, SpoolFull
from holdfast.client.spool.writer import GROUP_BYTES_MAX
from holdfast.errors import HoldfastError
from holdfast.real import RealRandomness
from holdfast.testing.engines import wait_until


class Spool:
    """A sender on a real disk and a cluster in memory."""

    def __init__(self, home: Path, cluster: FakeCluster, **options: Any) -> None:
        self.home = home
        self.cluster = cluster
        self.files = FaultyFiles()
        self.lines: list[str] = []
        max_bytes = options.pop("max_bytes", 1 << 30)
        self.sender = SpooledSender(
            self.files,
            str(home),
            RealRandomness(),
            {"bootstrap.servers": "fake"},
            max_bytes,
            say=self.lines.append,
            make=cluster.make,
            **options,
        )

    def send(
        self,
        value: bytes,
        topic: str = "orders",
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout: float = 30.0,
    ) -> Delivery:
        return self.sender.send(topic, partition, key, value, headers, -1, timeout)

    def flush(self, timeout: float = 30.0) -> int:
        return self.sender.flush(timeout)

    @property
    def directory(self) -> str:
        return f"{self.home}/{self.sender.id}"

    def refused(self) -> list[bytes]:
        return [each.message.value or b"" for each in RefusedMessages(self.files, self.directory)]


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"orders": 1, "wide": 4})


@pytest.fixture
def open_spool(
    tmp_path: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Spool]]:
    monkeypatch.setattr(idempotent_module, "BROKEN_SECONDS", 0.0)
    opened: list[Spool] = []

    def open_one(**options: Any) -> Spool:
        spool = Spool(tmp_path / "home", cluster, **options)
        opened.append(spool)
        return spool

    yield open_one
    cluster.release_reports()
    for spool in opened:
        if not spool.sender._is_closing:
            spool.sender.close()


def in_order(cluster: FakeCluster, topic: str = "orders", partitions: int = 1) -> list[bytes]:
    """The values of a topic, each once: what a reader keeps that drops repeated ids; fails when order is broken."""
    values: list[bytes] = []
    for partition in range(partitions):
        following = 0
        for message in cluster.log(topic, partition):
            _, _, name, number, sequence = message.id.split(b":")
            assert name == topic.encode()
            assert int(number) == partition
            if int(sequence) >= following:
                assert int(sequence) == following, f"{sequence!r} after {following - 1}"
                following += 1
                values.append(message.value or b"")
    return values


def test_messages_arrive_in_order_with_ids_and_the_time_of_sending(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    deliveries = [spool.send(b"%d" % number, headers=(("trace", b"1"),)) for number in range(500)]
    assert spool.flush() == 0
    log = cluster.log("orders")
    assert [message.value for message in log] == [b"%d" % number for number in range(500)]
    opening = spool.sender._own.store.opening
    assert [message.id for message in log] == [
        b"%s:%08x:orders:0:%d" % (spool.sender.id.encode(), opening, number) for number in range(500)
    ]
    assert all(message.headers["trace"] == b"1" and message.timestamp_ms > 1e12 for message in log)
    assert [delivery.wait(0).offset for delivery in deliveries] == list(range(500))
    assert spool.sender.delivered == 500


def test_stored_does_not_wait_for_the_broker(open_spool: Callable[..., Spool], cluster: FakeCluster) -> None:
    spool = open_spool()
    spool.send(b"first").wait(30)
    cluster.away()
    delivery = spool.send(b"second")
    delivery.wait_stored(30)
    with pytest.raises(TimeoutError):
        delivery.wait(0.01)
    assert spool.flush(0) == 1
    cluster.back()
    assert delivery.wait(30).offset == 1


def test_after_a_fatal_error_what_is_unconfirmed_is_sent_again_and_every_delivery_is_settled(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    cluster.hold_reports()
    deliveries = [spool.send(b"%d" % number) for number in range(300)]
    # They have arrived, and nobody knows.
    cluster.wait_until(lambda: len(cluster.values("orders")) == 300)
    cluster.break_producers()
    cluster.release_reports()
    more = [spool.send(b"%d" % number) for number in range(300, 600)]
    for delivery in deliveries + more:
        assert delivery.wait(30).partition == 0
    assert in_order(cluster) == [b"%d" % number for number in range(600)]
    assert spool.sender.delivered == 600
    assert spool.flush() == 0


def test_producers_that_break_again_and_again_lose_and_reorder_nothing(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    cluster.batch_max = 7
    spool = open_spool()
    settled: list[Delivery] = []
    for number in range(2000):
        delivery = spool.send(b"%d" % number, "wide", key=b"%d" % (number % 13)).then(settled.append)
        if number % 250 == 100:
            cluster.break_producers(KafkaError.UNKNOWN_PRODUCER_ID)
        elif number % 250 == 200:
            delivery.wait(30)
    assert spool.flush(60) == 0
    assert sorted(in_order(cluster, "wide", 4)) == sorted(b"%d" % number for number in range(2000))
    assert len(settled) == len(set(map(id, settled))) == 2000
    assert all(delivery.delivered for delivery in settled)
    assert sum("new producer" in line for line in spool.lines) == 8


def test_a_message_too_large_for_the_client_is_set_aside_and_blocks_nothing(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    large = spool.send(b"x" * 1_100_000)
    small = spool.send(b"small")
    with pytest.raises(DeliveryFailed, match="too large") as refused:
        large.wait(30)
    assert (refused.value.code, refused.value.is_final) == ("MSG_SIZE_TOO_LARGE", True)
    assert small.wait(30).offset == 0
    assert spool.flush() == 0
    assert [len(value) for value in spool.refused()] == [1_100_000]
    assert len(cluster.settings) == 1, "nothing needed a new producer"


def bad(topic: str, partition: int, message: Stored) -> Verdict | None:
    is_bad = message.value is not None and message.value.startswith(b"bad")
    return Verdict(KafkaError.INVALID_RECORD, takes_batch_along=True) if is_bad else None


def test_a_batch_refused_for_one_message_costs_that_message_alone(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    cluster.refuse(bad)
    cluster.away()
    spool = open_spool()
    values = [b"bad%d" % number if number in (3, 4, 20) else b"%d" % number for number in range(40)]
    deliveries = [spool.send(value, partition=0) for value in values]
    cluster.back()
    assert spool.flush() == 0
    # The refused ones keep their numbers: the gaps are theirs.
    assert cluster.values("orders") == [value for value in values if not value.startswith(b"bad")]
    assert spool.refused() == [b"bad3", b"bad4", b"bad20"]
    assert [delivery.error is not None for delivery in deliveries] == [v.startswith(b"bad") for v in values]
    assert spool.sender.delivered == 37


def test_a_search_for_one_bad_message_costs_those_of_another_partition_nothing(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    def first_seen_later(topic: str, partition: int, message: Stored) -> Verdict | None:
        if partition == 1 and len(cluster.settings) == 1:
            # Still on its way when the other partition's batch was refused.
            return Verdict(KafkaError._PURGE_QUEUE)
        return bad(topic, partition, message)

    cluster.refuse(first_seen_later)
    cluster.away()
    spool = open_spool()
    values = [b"bad%d" % number if number in (6, 13) else b"%d" % number for number in range(40)]
    deliveries = [spool.send(value, "wide", partition=number % 2) for number, value in enumerate(values)]
    cluster.back()
    assert spool.flush() == 0
    for partition in (0, 1):
        good = [value for value in values[partition::2] if not value.startswith(b"bad")]
        # In order and once: what is sent again behind a later message is dropped by readers, who take it for seen.
        assert cluster.values("wide", partition) == good
    assert sorted(spool.refused()) == [b"bad13", b"bad6"]
    assert [each.error is not None for each in deliveries] == [value.startswith(b"bad") for value in values]


def test_batches_too_large_for_a_topic_are_made_smaller(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    def too_large(topic: str, partition: int, message: Stored) -> Verdict | None:
        batch_bytes = int(cluster.settings[-1].get("batch.size", 1_000_000))
        return (
            Verdict(KafkaError.MSG_SIZE_TOO_LARGE, takes_batch_along=True) if batch_bytes > 100_000 else None
        )

    cluster.refuse(too_large)
    cluster.away()
    spool = open_spool()
    for number in range(20):
        spool.send(b"%d" % number, partition=0)
    cluster.back()
    assert spool.flush() == 0
    assert cluster.values("orders") == [b"%d" % number for number in range(20)]
    assert spool.refused() == []


def test_messages_for_a_topic_that_no_broker_can_have_are_set_aside_and_others_go_on(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    cluster.refuse(
        lambda topic, partition, message: Verdict(KafkaError.TOPIC_EXCEPTION) if topic == "wide" else None
    )
    spool = open_spool()
    for number in range(10):
        spool.send(b"w%d" % number, "wide", partition=0)
        spool.send(b"o%d" % number)
    assert spool.flush() == 0
    assert in_order(cluster) == [b"o%d" % number for number in range(10)]
    assert sorted(spool.refused()) == sorted(b"w%d" % number for number in range(10))
    seen = spool.sender.seen_refused()
    assert (len(seen.named), seen.total) == (10, 10)
    seen.tell()
    assert spool.sender.seen_refused().total == 0


def test_a_refused_message_waits_in_the_spool_while_the_disk_has_no_room_to_set_it_aside(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    spool.files.fail("write", errno.ENOSPC, "refused/")
    large = spool.send(b"x" * 1_100_000)
    small = spool.send(b"small")
    assert small.wait(30).offset == 0
    assert not large.is_settled
    assert spool.flush(0) == 1
    # The producer breaks meanwhile: the message must not be taken for one to send again.
    cluster.break_producers()
    spool.send(b"again").wait(30)
    assert not large.is_settled
    spool.files.mend()
    with pytest.raises(DeliveryFailed):
        large.wait(30)
    assert [len(value) for value in spool.refused()] == [1_100_000]


def test_a_full_disk_refuses_what_is_sent_and_later_sends_work_again(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    spool.send(b"before").wait(30)
    spool.files.fail("write", errno.ENOSPC, ".spool")
    refused = spool.send(b"refused")
    with pytest.raises(NotStored, match="no room"):
        refused.wait_stored(30)
    unseen = spool.send(b"unseen")
    spool.flush()
    spool.files.mend()
    spool.send(b"after").wait(30)
    assert in_order(cluster) == [b"before", b"after"]
    # The first failure was told to whoever waited; the other one is named.
    seen = spool.sender.seen_refused()
    assert seen.total == 1
    assert "no room" in seen.named[0].reason
    assert unseen.error is not None


def test_a_failed_flush_refuses_everything_from_then_on_and_what_was_stored_is_delivered(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    spool.send(b"first").wait(30)
    cluster.away()
    spool.send(b"stored").wait_stored(30)
    spool.files.fail("flush", errno.EIO, ".spool")
    for value in (b"one", b"two"):
        with pytest.raises(NotStored):
            spool.send(value).wait_stored(30)
        spool.files.mend()
    cluster.back()
    assert spool.flush() == 0
    spool.sender.close()
    again = open_spool()
    again.send(b"next").wait(30)
    assert in_order(cluster) == [b"first", b"stored", b"next"]


def test_a_spool_that_is_full_makes_senders_wait_and_then_says_so(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool(max_bytes=20_000)
    spool.send(b"first").wait(30)
    cluster.away()
    taken = 0
    with pytest.raises(SpoolFull, match="spool_max_bytes is 20000"):
        for _ in range(1000):
            spool.send(b"x" * 500, timeout=0.05)
            taken += 1
    assert 10 < taken < 40
    waiting = threading.Thread(target=lambda: spool.send(b"patient"))
    waiting.start()
    cluster.back()
    waiting.join(30)
    assert spool.flush() == 0
    # Room does not run out with what was delivered.
    for _ in range(200):
        spool.send(b"x" * 500)
    assert spool.flush() == 0
    with pytest.raises(SpoolFull):
        spool.send(b"x" * 30_000, timeout=1000)


def test_progress_is_written_down_and_segments_go(
    open_spool: Callable[..., Spool], cluster: FakeCluster, tmp_path: Path
) -> None:
    spool = open_spool(max_bytes=80_000)
    for _ in range(400):
        spool.send(b"x" * 500)
    assert spool.flush() == 0
    spool.sender.close()
    progress = read_progress(spool.files, spool.directory)
    assert progress.confirmed == {("orders", 0): 400}
    used = sum(path.stat().st_size for path in Path(spool.directory).glob("*.spool"))
    assert used < 80_000


def test_the_next_process_sends_what_is_left_and_nothing_that_had_arrived(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    for number in range(100):
        spool.send(b"%d" % number)
    spool.flush()
    cluster.away()
    for number in range(100, 200):
        spool.send(b"%d" % number).wait_stored(30)
    left = spool.sender.close()
    assert (left.total, left.named) == (0, [])
    assert "100 messages" in (left.line or "")
    cluster.back()
    again = open_spool()
    assert again.flush() == 0
    assert cluster.values("orders") == [b"%d" % number for number in range(200)]


def test_without_a_readable_progress_everything_in_the_spool_is_sent_again_recognisably(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    for number in range(10):
        spool.send(b"%d" % number)
    spool.flush()
    spool.sender.close()
    Path(spool.directory, "progress").write_bytes(b"garbage")
    again = open_spool()
    assert again.flush() == 0
    assert len(cluster.values("orders")) == 20
    assert in_order(cluster) == [b"%d" % number for number in range(10)]


def test_what_one_stuck_partition_holds_up_is_not_sent_twice_by_the_next_process(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    def stuck(topic: str, partition: int, message: Stored) -> Verdict | None:
        return Verdict(KafkaError._PURGE_QUEUE) if partition == 2 else None

    cluster.refuse(stuck)
    spool = open_spool()
    for number in range(100):
        spool.send(b"%d" % number, "wide", partition=number % 4)
    cluster.wait_until(lambda: sum(len(cluster.values("wide", each)) for each in (0, 1, 3)) == 75)
    assert spool.flush(0) > 0
    spool.sender.close()
    cluster.refuse(lambda topic, partition, message: None)
    again = open_spool()
    assert again.flush() == 0
    assert [len(cluster.values("wide", each)) for each in range(4)] == [25, 25, 25, 25]


# Memory


def test_a_delivery_nobody_holds_is_not_kept_and_one_with_a_callback_is(
    open_spool: Callable[..., Spool], cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "FRESH_BYTES_MAX", 10_000)
    monkeypatch.setattr(idempotent_module, "WINDOW_BYTES_MAX", 10_000)
    spool = open_spool()
    spool.sender._own.deliverer._feed._fresh_bytes_max = 10_000
    spool.send(b"first").wait(30)
    cluster.away()
    called: list[Delivery] = []
    for number in range(50):
        spool.send(b"x" * 1000 + b"%d" % number).wait_stored(30)
    dropped = weakref.ref(spool.send(b"dropped" + b"x" * 1000))
    spool.send(b"called" + b"x" * 1000).then(called.append)
    held = spool.send(b"held" + b"x" * 1000)
    held.wait_stored(30)
    gc.collect()
    assert dropped() is None
    assert held.value is None  # type: ignore[attr-defined]
    cluster.back()
    assert held.wait(30).offset == 53
    assert spool.flush() == 0
    assert [delivery.delivered is not None for delivery in called] == [True]
    assert [value.rstrip(b"x") for value in in_order(cluster)[-3:]] == [b"dropped", b"called", b"held"]
    assert spool.sender._waiting.kept == set()


def test_memory_stays_bounded_while_the_broker_is_away(
    open_spool: Callable[..., Spool], cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotent_module, "WINDOW_BYTES_MAX", 50_000)
    spool = open_spool()
    feed = spool.sender._own.deliverer._feed
    feed._fresh_bytes_max = 50_000
    spool.send(b"first").wait(30)
    cluster.away()
    for _ in range(10_000):
        spool.send(b"x" * 400)
    spool.sender._own.writer.wait_stored(30)
    window = spool.sender._own.deliverer.window
    # What is looked at last before it is full is one group, whatever its size.
    assert window.bytes <= 50_000 + 2 * GROUP_BYTES_MAX
    assert feed.fresh_bytes <= 50_000
    # The thread that wrote the last group lets go of it in its own time.
    deadline = time.monotonic() + 30
    while len(feed._held) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(feed._held) == 0
    cluster.back()
    assert spool.flush() == 0
    assert len(in_order(cluster)) == 10_001


# Ends


def test_a_spool_that_cannot_be_read_stops_delivering_and_everybody_is_told(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    spool.sender._own.deliverer._feed._fresh_bytes_max = 0
    spool.send(b"first").wait(30)
    spool.files.fail("read", errno.EIO, ".spool")
    lost = spool.send(b"unreadable")
    lost.wait_stored(30)
    with pytest.raises(DeliveryStopped, match="nothing more is delivered"):
        lost.wait(30)
    with pytest.raises(DeliveryStopped):
        spool.flush()
    assert any("nothing more is delivered" in line for line in spool.lines)
    spool.files.mend()
    spool.sender.close()
    again = open_spool()
    assert again.flush() == 0
    assert in_order(cluster) == [b"first", b"unreadable"]


def test_a_callback_that_fails_is_logged_and_stops_nothing(
    open_spool: Callable[..., Spool], cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    spool = open_spool()

    def fail(delivery: Delivery) -> None:
        raise RuntimeError("from the callback")

    spool.send(b"one").then(fail).when_stored(fail)
    spool.send(b"two").wait(30)
    assert spool.flush() == 0
    assert caplog.text.count("RuntimeError: from the callback") == 2


def test_the_spool_of_a_dead_owner_is_adopted_and_removed_when_it_is_empty(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    first, second = open_spool(), open_spool()
    first.send(b"from the first").wait(30)
    cluster.away()
    for spool in (first, second):
        spool.send(b"stored by %s" % spool.sender.id.encode()).wait_stored(30)
        spool.sender.close()
    assert len(SpoolHome(first.files, str(first.home), RealRandomness()).ids()) == 2
    cluster.back()
    third = open_spool()
    assert third.flush() == 0
    third.sender.close()
    assert SpoolHome(first.files, str(first.home), RealRandomness()).ids() == [third.sender.id]
    assert len(cluster.values("orders")) == 3


def test_a_spool_whose_owner_dies_later_is_adopted_by_one_that_lives(
    open_spool: Callable[..., Spool], cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "LOOK_AFTER_SECONDS", 0.02)
    monkeypatch.setattr(sender_module, "ADOPT_SECONDS", 0.02)
    living, dying = open_spool(), open_spool()
    living.send(b"from the living").wait(30)
    cluster.away()
    dying.send(b"left behind").wait_stored(30)
    dying.sender.close()
    cluster.back()
    cluster.wait_until(lambda: b"left behind" in cluster.values("orders"))
    assert living.flush() == 0
    wait_until(lambda: any("its owner is gone" in line for line in living.lines), "it is told")


def test_many_threads_share_one_producer_and_each_keeps_its_order(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()

    def send_all(thread: int) -> None:
        for number in range(500):
            spool.send(b"%d:%d" % (thread, number))

    threads = [threading.Thread(target=send_all, args=(each,)) for each in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert spool.flush() == 0
    arrived = [value.split(b":") for value in in_order(cluster)]
    for thread in range(6):
        assert [int(n) for who, n in arrived if int(who) == thread] == list(range(500))
    assert spool.sender.delivered == 3000


def test_a_damaged_spool_is_said_and_left_alone_and_sending_goes_on(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    spool = open_spool()
    for number in range(3):
        spool.send(b"%d" % number).wait(30)
    spool.sender.close()
    (segment,) = Path(spool.directory).glob("*.spool")
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    again = open_spool()
    assert again.sender.id != spool.sender.id
    assert any("damaged at byte" in line for line in again.lines)
    again.send(b"after").wait(30)
    assert segment.read_bytes() == data


@pytest.mark.parametrize("has_room", [True, False])
def test_an_interrupt_anywhere_in_sending_loses_nothing_that_was_taken_and_blocks_nobody(
    open_spool: Callable[..., Spool], cluster: FakeCluster, has_room: bool
) -> None:
    spool = open_spool()
    spool.send(b"first").wait(30)
    writer = spool.sender._own.writer
    codes = (writer.send.__code__, writer._look.__code__, writer._reserve.__code__, Bell.ring.__code__)
    taken = [b"first"]
    point = 0
    while len(taken) == 1:
        point += 1
        value = b"%d" % point
        wait_until(lambda: writer._is_wanted, "the thread that writes rests")
        if not has_room:
            writer._handed_max = 0  # as far as is known: they have to look
        if not interrupted_at(point, partial(spool.send, value), codes):
            taken.append(value)
    assert point > 5, "the interrupts came where messages are handed over"
    assert spool.flush() == 0
    spool.send(b"last").wait(30)
    arrived = in_order(cluster)
    assert len(set(arrived)) == len(arrived), "nothing twice"
    assert [value for value in arrived if value in taken] == taken
    assert arrived[-1] == b"last"
    wait_until(lambda: writer._taken_bytes == writer._handed_bytes, "no room is held for what never came")


def test_senders_that_race_with_the_end_are_refused_or_their_messages_are_stored(
    open_spool: Callable[..., Spool], cluster: FakeCluster
) -> None:
    for _ in range(5):
        spool = open_spool()
        begun = threading.Barrier(5)
        stored: list[Delivery] = []

        def send_until_refused(begun: threading.Barrier, spool: Spool, stored: list[Delivery]) -> None:
            begun.wait(30)
            with pytest.raises(HoldfastError):
                while True:
                    stored.append(spool.send(b"x"))

        threads = [threading.Thread(target=send_until_refused, args=(begun, spool, stored)) for _ in range(4)]
        for each in threads:
            each.start()
        begun.wait(30)
        wait_until(lambda stored=stored: len(stored) > 100, "they send")  # type: ignore[misc]
        spool.sender.close()
        for each in threads:
            each.join(30)
        assert stored
        assert all(delivery.is_stored for delivery in stored)


def test_a_message_handed_over_after_the_end_is_taken_back(open_spool: Callable[..., Spool]) -> None:
    """What no thread switch brings about, and nothing may depend on: a sender that slept from check to queue."""
    spool = open_spool()
    spool.send(b"first").wait(30)
    writer = spool.sender._own.writer
    spool.sender.close()
    late = make_item(SpooledMessage("orders", UNDECIDED, None, b"late", (), -1, -1), spool.sender._waiting)
    writer._handed.append(late)
    with pytest.raises(SpoolFailed):
        writer._look(late)
    assert not writer.unstored
