"""Headers of a message that was read, given to one that is sent: what is ours in them is not the new one's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.fake_producer import FakeCluster

from holdfast.client import direct, failures, producer, transactional
from holdfast.client.aio import AsyncProducer
from holdfast.client.consumer import Consumer
from holdfast.client.dead_letter_dialects import Headers, read_failure
from holdfast.client.failures import FailureRouter
from holdfast.client.messages import DeadLetter, Message, Origin
from holdfast.client.processor import Output, Processor
from holdfast.client.producer import Producer
from holdfast.client.retries import NO_RETRIES, History, RetryTopics
from holdfast.client.spool import sender as sender_module
from holdfast.client.transactional import TransactionalProducer
from holdfast.testing.broker import BrokerProcess

HISTORY = History(Origin("orders", 2, 7, 5), "mailer", attempts=3, step=0, first_ms=1, due_ms=2)
COPIED = (("trace", b"1"), ("hf-id", b"00000000000000aa:0:7"), *HISTORY.headers())
KEPT = {"trace": b"1", "hf-origin-id": b"00000000000000aa:0:7"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Every producer made in the test is one of this cluster."""
    cluster = FakeCluster({"out": 1})
    real_direct, real_spooled = direct.DirectSender, sender_module.SpooledSender
    monkeypatch.setattr(direct, "DirectSender", lambda settings: real_direct(settings, make=cluster.make))
    monkeypatch.setattr(
        sender_module, "SpooledSender", lambda *args, **named: real_spooled(*args, make=cluster.make, **named)
    )
    monkeypatch.setattr(transactional, "RawProducer", cluster.make)
    return cluster


@pytest.mark.parametrize("given", [COPIED, list(COPIED), dict(COPIED)])
def test_a_producer_sends_a_copied_id_under_another_name(
    cluster: FakeCluster, given: producer.HeadersLike
) -> None:
    with Producer("fake") as made:
        made.send("out", b"v", headers=given)
    assert cluster.log("out")[0].headers == KEPT


def test_headers_that_only_look_alike_stay_as_they_are(cluster: FakeCluster) -> None:
    own = {"hf-identity": b"1", "hf-dlt-topic": b"2", "x-hf-id": b"3"}
    with Producer("fake") as made:
        made.send("out", b"v", headers=own)
    assert cluster.log("out")[0].headers == own


def test_a_spool_gives_a_message_its_own_id_whatever_was_copied(cluster: FakeCluster, tmp_path: Path) -> None:
    with Producer("fake", spool=tmp_path) as made:
        made.send("out", b"v", headers=COPIED).wait(30)
    (stored,) = cluster.log("out")
    own = stored.headers.pop("hf-id")
    assert stored.headers == KEPT
    assert own is not None
    assert own.endswith(b":0:0")
    assert not own.startswith(b"00000000000000aa")


def test_the_id_of_a_spool_stands_last_behind_one_that_was_stored(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    with Producer("fake", spool=tmp_path) as made:
        # As a message that an earlier version has stored.
        made._hand_over("out", 0, None, b"v", COPIED, -1, 30.0).wait(30)
    assert cluster.log("out")[0].id.endswith(b":0:0")


async def test_a_producer_for_asyncio_does_so_too(cluster: FakeCluster) -> None:
    async with AsyncProducer("fake") as made:
        made.send("out", b"v", headers=COPIED)
    assert cluster.log("out")[0].headers == KEPT


def test_an_output_of_a_transaction_has_a_copied_id_under_another_name(cluster: FakeCluster) -> None:
    made = TransactionalProducer({"transactional.id": "t"}, lambda: False)
    made.start()
    made.begin()
    made.produce(Output("out", b"v", headers=COPIED))
    made.commit([], b"")
    assert cluster.log("out")[0].headers == KEPT


class Sent:
    """Topics that remember what goes to them."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Headers]] = []

    def send(self, topic: str, message: Message, headers: Headers, *, source: str) -> None:
        self.messages.append((topic, headers))

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent = Sent()
    monkeypatch.setattr(failures, "SideTopics", lambda *arguments, **named: sent)
    return sent


def aside(*topics: str) -> FailureRouter:
    return FailureRouter(
        "", "mailer", topics, RetryTopics(delays=[5, 60]), {}, dead_letter_topic=lambda topic: f"{topic}-dlt"
    )


def test_a_copied_history_does_not_send_a_failed_message_elsewhere(sent: Sent) -> None:
    message = Message("invoices", 1, 4, 9, b"k", b"v", COPIED)
    aside("invoices")(message, "failed", OSError("away"), 1)
    ((topic, headers),) = sent.messages
    assert topic == "invoices-retry-0"
    history = History.read(message._replace(headers=headers))
    assert history.origin == ("invoices", 1, 4, 9)
    assert (history.group, history.attempts, history.step) == ("mailer", 1, 0)


def test_a_history_of_another_topic_is_not_believed_in_a_retry_topic_either(sent: Sent) -> None:
    message = Message("invoices-retry-0", 1, 4, 9, b"k", b"v", COPIED)
    aside("invoices")(message, "failed", OSError("away"), 1)
    ((topic, headers),) = sent.messages
    assert topic == "invoices-retry-1"
    history = History.read(message._replace(headers=headers))
    assert history.origin == ("invoices", 1, 4, 9)
    assert history.attempts == 1


def test_a_history_of_our_own_retry_topic_is_believed(sent: Sent) -> None:
    message = Message("orders-retry-0", 2, 4, 9, b"k", b"v", COPIED)
    aside("invoices", "orders")(message, "failed", OSError("away"), 1)
    ((topic, headers),) = sent.messages
    assert topic == "orders-retry-1"
    history = History.read(message._replace(headers=headers))
    assert history.origin == ("orders", 2, 7, 5)
    assert history.attempts == 4


@pytest.mark.parametrize("retry", [NO_RETRIES, RetryTopics(delays=[5], in_place=NO_RETRIES)])
def test_a_dead_letter_of_a_copied_history_tells_where_the_message_is(sent: Sent, retry: Any) -> None:
    message = Message("invoices", 1, 4, 9, b"k", b"v", COPIED)
    made = FailureRouter(
        "", "mailer", ["invoices"], retry, {}, dead_letter_topic=lambda topic: f"{topic}-dlt"
    )
    made(message, "never", DeadLetter("never"), 1)
    ((topic, headers),) = sent.messages
    failure = read_failure(headers)
    assert topic == "invoices-dlt"
    assert failure is not None
    assert (failure.place, failure.attempts) == ("invoices-1@4", 1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    settings = {"group.initial.rebalance.delay.ms": "0", "auto.create.topics.enable": "false"}
    with BrokerProcess(str(tmp_path_factory.mktemp("forwarding") / "broker"), settings=settings) as process:
        yield process


def test_what_is_forwarded_with_its_headers_is_handled_once_each(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for future in admin.create_topics([NewTopic("in", 3, 1), NewTopic("twice", 1, 1)]).values():
        future.result()
    with Producer(broker.bootstrap_servers, spool=tmp_path) as made:
        for number in range(30):
            made.send("in", b"%d" % number, key=b"%d" % number, headers={"trace": b"%d" % number})
        assert made.flush(60).is_complete

    def split(message: Message) -> list[Output]:
        value = message.value or b""
        return [Output("twice", value + half, headers=message.headers) for half in (b"a", b"b")]

    processor = Processor(broker.bootstrap_servers, group="split", topics=["in"], commit_seconds=0.05)
    handled: list[bytes] = []
    consumer = Consumer(broker.bootstrap_servers, group="twice", topics=["twice"])

    def handle(message: Message) -> None:
        assert message.value is not None
        assert message.header("trace") == message.value[:-1]
        handled.append(message.value)
        if len(handled) == 60:
            consumer.stop()

    splitting = threading.Thread(target=processor.run, args=(split,))
    splitting.start()
    # A consumer that waits for more than it gets must not hold the test for ever.
    patience = threading.Timer(60, consumer.stop)
    patience.start()
    try:
        consumer.run(handle)
    finally:
        patience.cancel()
        processor.stop()
        splitting.join()
    assert sorted(handled) == sorted(
        b"%d%b" % (number, half) for number in range(30) for half in (b"a", b"b")
    )
    assert consumer.duplicates == 0
