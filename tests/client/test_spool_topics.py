"""Topics that vanish, that nobody may ask about, and that no broker would make: what becomes of their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from holdfast.client.delivery import Delivery
from holdfast.client.errors import DeliveryFailed
from holdfast.client.spool import deliverer as deliverer_module
from holdfast.client.spool import idempotent, transactional, undecided
from holdfast.client.spool import sender as sender_module
from holdfast.client.spool.progress import NOTHING
from holdfast.client.spool.progress_topic import PROGRESS_TOPIC
from holdfast.client.spool.refused import RefusedMessages
from holdfast.client.spool.sender import SpooledSender
from holdfast.real import RealFileSystem, RealRandomness
from holdfast.testing.engines import wait_until
from holdfast.testing.fake_producer import FakeCluster, FakeProducer

Open = Callable[[], SpooledSender]


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
                return SimpleNamespace(topics={topic: SimpleNamespace(error=error, partitions={})})
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
        lambda settings: SimpleNamespace(make=lambda: None, read=lambda spool_id, is_over: NOTHING),
    )
    for module in (idempotent, transactional):
        monkeypatch.setattr(module, "BROKEN_SECONDS", 0.01)
    monkeypatch.setattr(undecided, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(deliverer_module, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(sender_module, "LOOK_AFTER_SECONDS", 0.02)
    sender = SpooledSender(
        RealFileSystem(),
        str(tmp_path),
        RealRandomness(),
        {"bootstrap.servers": "fake"},
        1 << 30,
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


def test_messages_for_a_topic_that_is_gone_for_long_are_set_aside_and_others_go_on(
    sender: SpooledSender, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliverer_module, "MISSING_SECONDS", 0.1)
    send(sender, b"before").wait(30)
    del cluster.topics["orders"]
    deliveries = [send(sender, b"%d" % number) for number in range(5)]
    for delivery in deliveries:
        with pytest.raises(DeliveryFailed, match="no broker knows a topic orders"):
            delivery.wait(30)
    send(sender, b"on", "others").wait(30)
    assert sender.flush(30) == 0
    assert refused(sender) == [(b"%d" % number, "UNKNOWN_TOPIC_OR_PART") for number in range(5)]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (KafkaError.TOPIC_EXCEPTION, "TOPIC_EXCEPTION"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "TOPIC_AUTHORIZATION_FAILED"),
    ],
)
def test_a_topic_that_takes_no_messages_is_refused_at_once_with_the_reason(
    sender: SpooledSender, cluster: Cluster, code: int, name: str
) -> None:
    cluster.errors["a:b"] = code
    bad = send(sender, b"bad", "a:b")
    with pytest.raises(DeliveryFailed, match="a:b is refused on purpose") as failed:
        bad.wait(30)
    assert failed.value.is_final
    assert refused(sender) == [(b"bad", name)]
    assert sender.flush(30) == 0


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
