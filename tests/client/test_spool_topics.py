"""Topics and partitions that take no messages: what may pass with time is waited for, and holds up no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from tests.support.fake_producer import FakeCluster, FakeProducer, Stored, Verdict

from holdfast.client.delivery import Delivery
from holdfast.client.errors import DeliveryFailed
from holdfast.client.spool import deliverer as deliverer_module
from holdfast.client.spool import idempotent, transactional
from holdfast.client.spool import topics as topics_module
from holdfast.client.spool.refused import RefusedMessages
from holdfast.client.spool.sender import SpooledSender
from holdfast.client.spool.transactional import PROGRESS_TOPIC, Told
from holdfast.real import RealFileSystem, RealRandomness
from holdfast.testing.engines import wait_until

MAX_BYTES = 1 << 16
said: list[str] = []
"""The log of the sender; one test has it at a time."""


class Cluster(FakeCluster):
    """Where questions about some topics are answered with an error."""

    def __init__(self) -> None:
        super().__init__({"orders": 1, "others": 1, PROGRESS_TOPIC: 1})
        self.errors: dict[str, int] = {}
        self.questions: list[str] = []

    def make(self, settings: dict[str, Any]) -> FakeProducer:
        producer = super().make(settings)
        list_topics = producer.list_topics

        def answer(topic: str, timeout: float = -1) -> Any:
            self.questions.append(topic)
            if topic in self.errors:
                error = KafkaError(self.errors[topic], f"{topic} is refused on purpose")
                topics = {topic: SimpleNamespace(error=error, partitions={})}
                return SimpleNamespace(topics=topics, cluster_id=self.cluster_id)
            return list_topics(topic, timeout)

        producer.list_topics = answer  # type: ignore[method-assign,assignment]
        return producer


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture(params=["at-least-once", "exactly-once"])
def sender(
    request: pytest.FixtureRequest, tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SpooledSender]:
    monkeypatch.setattr(
        transactional,
        "ProgressTopic",
        lambda settings: SimpleNamespace(make=lambda: None, read=lambda spool_id, is_over: Told()),
    )
    for module in (idempotent, transactional):
        monkeypatch.setattr(module, "BROKEN_SECONDS", 0.01)
    monkeypatch.setattr(topics_module, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(topics_module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(topics_module, "PAUSE_SECONDS_MAX", 0.05)
    monkeypatch.setattr(deliverer_module, "IDLE_SECONDS", 0.01)
    said.clear()
    sender = SpooledSender(
        RealFileSystem(),
        str(tmp_path),
        RealRandomness(),
        {"bootstrap.servers": "fake"},
        MAX_BYTES,
        say=said.append,
        is_exactly_once=request.param == "exactly-once",
        make=cluster.make,
    )
    yield sender
    sender.close()


def send(sender: SpooledSender, value: bytes, topic: str = "orders") -> Delivery:
    return sender.send(topic, None, None, value, (), -1, 30.0)


def refused(sender: SpooledSender) -> list[tuple[bytes | None, str]]:
    kept = RefusedMessages(RealFileSystem(), f"{sender._home.path}/{sender.id}")
    return [(each.message.value, each.code) for each in kept]


def test_messages_for_a_topic_that_is_deleted_and_made_again_arrive(
    sender: SpooledSender, cluster: Cluster
) -> None:
    send(sender, b"before").wait(30)
    del cluster.topics["orders"]
    deliveries = [send(sender, b"%d" % number) for number in range(10)]
    # At least once it was heard that there is no such topic.
    wait_until(lambda: cluster.questions.count("orders") > 1, "it is asked for")
    send(sender, b"meanwhile", "others").wait(30)
    cluster.topics["orders"] = 1
    for delivery in deliveries:
        delivery.wait(30)
    assert cluster.values("orders") == [b"before", *(b"%d" % number for number in range(10))]
    assert refused(sender) == []
    assert sender.flush(30) == 0


def test_messages_for_a_topic_that_is_missing_wait_without_an_end_and_it_is_said(
    sender: SpooledSender, cluster: Cluster
) -> None:
    send(sender, b"before").wait(30)
    del cluster.topics["orders"]
    deliveries = [send(sender, b"%d" % number) for number in range(5)]
    wait_until(lambda: sender.waiting == ["orders: no broker knows a topic orders"], "it is known why")
    for number in range(20):
        send(sender, b"%d" % number, "others").wait(30)
    assert not any(delivery.is_settled for delivery in deliveries)
    assert (sender.left, sender.set_aside, refused(sender)) == (5, 0, [])
    assert sum("messages for orders wait" in line for line in said) == 1
    cluster.topics["orders"] = 1
    for delivery in deliveries:
        delivery.wait(30)
    assert sender.flush(30) == 0
    assert (sender.waiting, sender.delivered) == ([], 26)


def test_a_topic_whose_name_no_topic_can_have_is_refused_with_the_reason(
    sender: SpooledSender, cluster: Cluster
) -> None:
    cluster.errors["a:b"] = KafkaError.TOPIC_EXCEPTION
    bad = send(sender, b"bad", "a:b")
    with pytest.raises(DeliveryFailed, match="a:b is refused on purpose") as failed:
        bad.wait(30)
    assert failed.value.is_final
    assert refused(sender) == [(b"bad", "TOPIC_EXCEPTION")]
    assert sender.flush(30) == 0
    assert sender.set_aside == 1
    assert any("1 message is set aside" in line and "a:b is refused on purpose" in line for line in said)


def test_a_topic_that_nobody_may_write_to_is_waited_for(sender: SpooledSender, cluster: Cluster) -> None:
    cluster.errors["others"] = KafkaError.TOPIC_AUTHORIZATION_FAILED
    unseen = send(sender, b"unseen", "others")
    cluster.refuse(
        lambda topic, partition, message: (
            Verdict(KafkaError.TOPIC_AUTHORIZATION_FAILED) if topic == "orders" else None
        )
    )
    seen = [send(sender, b"%d" % number) for number in range(5)]
    wait_until(lambda: len(sender.waiting) == 2, "both are held")
    assert not unseen.is_settled
    assert refused(sender) == []
    cluster.refuse(lambda topic, partition, message: None)
    cluster.errors.clear()
    for delivery in (unseen, *seen):
        delivery.wait(30)
    assert cluster.values("orders") == [b"%d" % number for number in range(5)]


def test_a_partition_that_is_not_there_waits_and_the_others_of_its_topic_go_on(
    sender: SpooledSender, cluster: Cluster
) -> None:
    far = [sender.send("orders", 2, None, b"%d" % number, (), -1, 30.0) for number in range(3)]
    near = sender.send("orders", 0, None, b"near", (), -1, 30.0)
    near.wait(30)
    wait_until(lambda: sender.waiting == ["orders-2: orders has only 1 partitions now"], "it is known why")
    assert not any(delivery.is_settled for delivery in far)
    cluster.topics["orders"] = 3
    for delivery in far:
        delivery.wait(30)
    assert cluster.values("orders", 2) == [b"0", b"1", b"2"]
    assert refused(sender) == []


def test_messages_that_a_broker_refuses_for_its_own_clock_wait_until_it_is_right(
    sender: SpooledSender, cluster: Cluster
) -> None:
    def behind(topic: str, partition: int, message: Stored) -> Verdict | None:
        if topic != "orders":
            return None
        return Verdict(KafkaError.INVALID_TIMESTAMP, takes_batch_along=True)

    cluster.refuse(behind)
    deliveries = [send(sender, b"%d" % number) for number in range(20)]
    wait_until(lambda: len(sender.waiting) == 1, "they wait")
    send(sender, b"on", "others").wait(30)
    assert refused(sender) == []
    cluster.refuse(lambda topic, partition, message: None)
    for delivery in deliveries:
        delivery.wait(30)
    assert cluster.values("orders") == [b"%d" % number for number in range(20)]


def test_a_message_whose_own_timestamp_is_wrong_is_set_aside_and_costs_the_others_nothing(
    sender: SpooledSender, cluster: Cluster
) -> None:
    def too_late(topic: str, partition: int, message: Stored) -> Verdict | None:
        is_wrong = message.timestamp_ms > 1 << 50
        return Verdict(KafkaError.INVALID_TIMESTAMP, takes_batch_along=True) if is_wrong else None

    cluster.refuse(too_late)
    cluster.away()
    deliveries = [
        sender.send("orders", 0, None, b"%d" % number, (), 1 << 51 if number == 3 else -1, 30.0)
        for number in range(8)
    ]
    cluster.back()
    assert sender.flush(30) == 0
    assert [delivery.error is not None for delivery in deliveries] == [number == 3 for number in range(8)]
    assert refused(sender) == [(b"3", "INVALID_TIMESTAMP")]
    assert cluster.values("orders") == [b"%d" % number for number in range(8) if number != 3]


def test_what_waits_is_set_aside_before_it_keeps_the_spool_from_taking_more(
    sender: SpooledSender, cluster: Cluster
) -> None:
    del cluster.topics["orders"]
    stuck = send(sender, b"stuck", "orders")
    wait_until(lambda: bool(sender.waiting), "it waits")
    for _ in range(30):
        send(sender, b"x" * 8_000, "others").wait(30)
    with pytest.raises(DeliveryFailed, match="needed the room"):
        stuck.wait(30)
    assert refused(sender) == [(b"stuck", "WAITED_TOO_LONG")]
    assert sender.flush(30) == 0


def test_what_waits_is_found_by_the_next_process(
    sender: SpooledSender, cluster: Cluster, tmp_path: Path
) -> None:
    del cluster.topics["orders"]
    for number in range(5):
        send(sender, b"%d" % number).wait_stored(30)
        send(sender, b"on %d" % number, "others").wait(30)
    wait_until(lambda: bool(sender.waiting), "they wait")
    again = SpooledSender(
        RealFileSystem(),
        f"{tmp_path}",
        RealRandomness(),
        {"bootstrap.servers": "fake"},
        MAX_BYTES,
        make=cluster.make,
    )
    sender.close()
    assert again._own.owned.id != sender.id
    cluster.topics["orders"] = 1
    again._adopt()
    assert again.flush(30) == 0
    again.close()
    assert cluster.values("orders") == [b"%d" % number for number in range(5)]
    assert len(cluster.values("others")) == 5


def test_a_topic_that_nobody_can_say_anything_about_holds_up_no_other(
    sender: SpooledSender, cluster: Cluster
) -> None:
    cluster.errors.update({f"odd{number}": KafkaError.LEADER_NOT_AVAILABLE for number in range(8)})
    odd = [send(sender, b"odd", topic) for topic in cluster.errors]
    for delivery in odd:
        delivery.wait_stored(30)
    cluster.topics["new"] = 1
    send(sender, b"good", "new").wait(30)
    assert not any(delivery.is_settled for delivery in odd)
    cluster.topics.update(dict.fromkeys(cluster.errors, 1))
    cluster.errors.clear()
    for delivery in odd:
        delivery.wait(30)
