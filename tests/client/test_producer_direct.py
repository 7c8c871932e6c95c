"""Sending without a spool: every message has an outcome, and nobody can miss it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError
from tests.support.fake_producer import FakeCluster, Stored, Verdict

from holdfast.client import direct, exit_guard
from holdfast.client.delivery import FAILURES_KEPT_MAX, Delivery
from holdfast.client.direct import BEHIND_SHARE, DirectSender, evenly
from holdfast.client.errors import NAMED_MAX, DeliveryFailed, ProducerClosed, SendTimeout
from holdfast.client.producer import Producer
from holdfast.errors import ConfigError, UsageError

SETTINGS = {"bootstrap.servers": "fake"}


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"orders": 1})


@pytest.fixture
def sender(cluster: FakeCluster) -> Iterator[DirectSender]:
    made = DirectSender(SETTINGS, make=cluster.make)
    yield made
    if not made._is_closing:
        made.close()


def send(sender: DirectSender, value: bytes, timeout: float = 30.0) -> Delivery:
    return sender.send("orders", None, None, value, (), -1, timeout)


def test_every_delivery_is_settled_without_anybody_polling(
    sender: DirectSender, cluster: FakeCluster
) -> None:
    called: list[int] = []
    everything = threading.Event()

    def count(delivery: Delivery) -> None:
        called.append(delivery.wait(0).offset)
        if len(called) == 200:
            everything.set()

    for number in range(200):
        send(sender, b"%d" % number).then(count)
    assert everything.wait(30)
    assert called == list(range(200))
    assert sender.flush(0) == 0


def test_a_fast_sender_hears_of_a_batch_in_pieces_and_of_every_message_once_and_in_order(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "TURN_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        # Its thread does not run yet.
        patch.setattr(threading.Thread, "start", lambda thread: None)
        sender = DirectSender(SETTINGS, make=cluster.make)
    called: list[int] = []
    for number in range(900):
        send(sender, b"%d" % number).then(lambda delivery: called.append(delivery.wait(0).offset))
    sender._turn_at = sender._sent - 300
    expected = evenly(300) + sender.left // BEHIND_SHARE
    sender._take_turn(0)
    assert len(called) == expected < 900
    sender._thread.start()
    assert sender.flush(30) == 0
    sender.close()  # its thread may still be calling back about the last piece
    assert called == list(range(900))
    assert sender.delivered == 900
    # What was raised to hear no more for now is kept for ever by confluent-kafka, and holds no frame of ours.
    assert direct._ENOUGH.__traceback__ is None


def test_whoever_holds_a_delivery_does_not_hold_the_value() -> None:
    with Producer("nowhere", config={"test.mock.num.brokers": 1}) as producer:
        held = producer.send("orders", b"x" * 100_000, key=b"7")
        assert held.wait(30).offset == 0
        assert held._place.value() is None
        assert held.key == b"7"


def test_a_fatal_error_fails_what_was_under_way_and_the_next_message_goes_out(
    sender: DirectSender, cluster: FakeCluster
) -> None:
    send(sender, b"before").wait(30)
    cluster.away()
    under_way = [send(sender, b"%d" % number) for number in range(10)]
    cluster.break_producers()
    for delivery in under_way:
        with pytest.raises(DeliveryFailed):
            delivery.wait(30)
    cluster.back()
    assert send(sender, b"after").wait(30).offset == 1
    assert cluster.values("orders") == [b"before", b"after"]


def test_a_thread_with_news_of_a_broken_producer_leaves_the_new_one_alone(
    sender: DirectSender, cluster: FakeCluster
) -> None:
    broken = sender._producer
    cluster.break_producers()
    send(sender, b"first")
    healthy = sender._producer
    assert healthy is not broken
    cluster.away()
    under_way = send(sender, b"under way")
    # A thread that took the old producer just before it was replaced.
    sender._produce = broken.produce
    late = send(sender, b"late")
    assert sender._producer is healthy
    cluster.back()
    under_way.wait(30)
    late.wait(30)
    assert cluster.values("orders") == [b"first", b"under way", b"late"]


def test_a_full_queue_makes_the_sender_wait_and_then_says_so(cluster: FakeCluster) -> None:
    cluster.queue_max = 5
    sender = DirectSender(SETTINGS, make=cluster.make)
    cluster.away()
    for number in range(5):
        send(sender, b"%d" % number)
    with pytest.raises(SendTimeout, match="5 messages wait"):
        send(sender, b"one too many", timeout=0.01)
    waiting = threading.Thread(target=lambda: send(sender, b"patient"))
    waiting.start()
    cluster.back()
    waiting.join(30)
    assert sender.flush(30) == 0
    sender.close()
    assert len(cluster.values("orders")) == 6


def test_what_is_left_at_the_end_is_named_and_its_deliveries_have_failed(
    sender: DirectSender, cluster: FakeCluster
) -> None:
    cluster.away()
    delivery = send(sender, b"stuck")
    assert sender.flush(0.01) == 1
    left = sender.close()
    assert (left.total, left.named[0].topic, left.named[0].reason) == (
        1,
        "orders",
        "no answer when the producer was closed",
    )
    with pytest.raises(DeliveryFailed):
        delivery.wait(0)


def test_a_topic_that_nobody_knows_fails_soon_and_with_advice(
    sender: DirectSender, cluster: FakeCluster
) -> None:
    with pytest.raises(DeliveryFailed, match="holdfast topics create --topic odrers"):
        sender.send("odrers", None, None, b"x", (), -1, 30.0).wait(30)
    assert cluster.settings[0]["topic.metadata.propagation.max.ms"] == 5000


def refuse_all(topic: str, partition: int, message: Stored) -> Verdict:
    return Verdict(KafkaError.TOPIC_AUTHORIZATION_FAILED)


def test_a_failure_somebody_was_told_of_is_not_named_again(
    sender: DirectSender, cluster: FakeCluster
) -> None:
    cluster.refuse(refuse_all)
    told: list[Delivery] = []
    send(sender, b"called back").then(told.append)
    with pytest.raises(DeliveryFailed):
        send(sender, b"waited for").wait(30)
    send(sender, b"ignored")
    sender.flush(30)
    assert len(told) == 1
    left = sender.close()
    assert (left.total, len(left.named)) == (1, 1)


def test_many_failures_are_counted_and_the_first_are_named(
    sender: DirectSender, cluster: FakeCluster
) -> None:
    cluster.refuse(refuse_all)
    for number in range(FAILURES_KEPT_MAX + 20):
        send(sender, b"%d" % number)
    sender.flush(30)
    left = sender.close()
    assert (left.total, len(left.named)) == (FAILURES_KEPT_MAX + 20, FAILURES_KEPT_MAX + NAMED_MAX)


def test_a_producer_that_is_dropped_is_still_watched() -> None:
    watched = len(exit_guard._open)
    producer = Producer("127.0.0.1:1")
    assert len(exit_guard._open) == watched + 1
    producer.close(timeout=0)
    assert len(exit_guard._open) == watched


SCRIPT = """
import sys
from holdfast.client import Producer
from holdfast.client import exit_guard
exit_guard.LAST_CHANCE_SECONDS = 0.1
Producer("127.0.0.1:1", config={"log_level": 0}).send("orders", b"x")
%s
"""


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "raise RuntimeError('crashed')"])
def test_a_program_that_ends_with_messages_under_way_says_how_many_and_exits_with_a_code(ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % ending], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == exit_guard.EXIT_UNDELIVERED
    assert "1 message had not been delivered when the program ended" in done.stderr
    assert ("crashed" in done.stderr) == ("crashed" in ending)


def test_settings_that_make_no_sense_are_refused(tmp_path: object) -> None:
    with pytest.raises(UsageError, match=r"transactional\.id"):
        Producer("127.0.0.1:1", config={"transactional.id": "mine"})
    with pytest.raises(UsageError, match="spool"):
        Producer("127.0.0.1:1", delivery="exactly-once")
    with pytest.raises(UsageError, match="at-least-once"):
        Producer("127.0.0.1:1", delivery="at-most-once")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="never given up"):
        Producer("127.0.0.1:1", spool=str(tmp_path), config={"message.timeout.ms": 300_000})
    with pytest.raises(ConfigError, match=r"spool\.max\.bytes"):
        Producer("127.0.0.1:1", spool=str(tmp_path), config={"spool.max.bytes": "much"})


def test_a_closed_producer_keeps_no_connection_that_would_log_the_end_of_the_broker(
    sender: DirectSender,
) -> None:
    made = sender._producer
    assert send(sender, b"before").wait(30).offset == 0
    sender.close()
    sender._thread.join(30)
    assert sender._producer is not made
    assert sender._produce.__self__ is not made
    assert sender.left == 0
    with pytest.raises(ProducerClosed):
        send(sender, b"late")


def test_a_queue_that_was_full_leaves_nothing_that_holds_the_producer(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullAtFirst:
        turned_away = 0

        def produce(self, *_: object) -> None:
            if self.turned_away < 3:
                self.turned_away += 1
                raise BufferError

        def __len__(self) -> int:
            return 0

    monkeypatch.setattr(direct, "FULL_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    sender = DirectSender(SETTINGS, make=lambda settings: FullAtFirst())
    made = weakref.ref(sender._producer)
    gc.disable()
    try:
        send(sender, b"in the end")
        sender._producer = sender._produce = None
        assert made() is None
    finally:
        gc.enable()
