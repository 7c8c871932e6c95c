"""HF102, HF103: a leader that dies, on three brokers of Apache Kafka.

All of it is one outage, which takes seconds: the followers are frozen, the leader gets messages, the leader is killed,
the followers thaw and one of them is elected. Plain producers and ours go through it side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer as RawProducer

from holdfast.client import Delivery, Producer
from holdfast.testing.apache_cluster import ApacheCluster
from holdfast.testing.engines import QUIET, wait_until
from holdfast.testing.kafka_fixtures import require_apache_kafka
from holdfast.testing.risks import Report, numbers

LEADER = 2
FOLLOWERS = (1, 3)
COUNT = 5
"""Few, and little time to give up in: followers frozen for longer than broker.session.timeout.ms are missed."""


class Outage(NamedTuple):
    """What the producers were told, and what is there when a new leader is."""

    reported: dict[str, Report]
    """By topic, for plain producers."""
    settled_early: bool
    """Whether a producer of ours was told of a delivery while only the leader had the message."""
    delivered: list[int]
    """The offsets that ours were told in the end."""
    stored: dict[str, list[str]]


@pytest.fixture(scope="session")
def outage() -> Iterator[Outage]:
    require_apache_kafka()
    with ApacheCluster() as cluster:
        yield go_through(cluster)


def plain(cluster: ApacheCluster, settings: dict[str, Any]) -> RawProducer:
    return RawProducer({"bootstrap.servers": cluster.bootstrap_servers, **QUIET, **settings})


def send(producer: RawProducer, topic: str, value: str, report: Report) -> None:
    producer.produce(topic, value, on_delivery=report)
    wait_until(lambda: producer.flush(0.1) == 0, f"something is said about {value}")


def go_through(cluster: ApacheCluster) -> Outage:
    topics = ("hf102-plain", "hf102-ours", "hf103-plain", "hf103-ours")
    for topic in topics:
        cluster.create_topic(topic, leader=LEADER)
    reported = {topic: Report() for topic in topics}
    hasty, short = plain(cluster, {"acks": 1}), plain(cluster, {"message.timeout.ms": 500})
    with Producer(cluster.bootstrap_servers, config={"log_level": 0, "message.timeout.ms": 100_000}) as ours:
        # Confirmed by all, so that every follower has it.
        send(plain(cluster, {"acks": "all"}), "hf102-plain", "before", reported["hf102-plain"])
        hasty.list_topics("hf102-plain", timeout=30)
        short.list_topics("hf103-plain", timeout=30)
        deliveries: list[Delivery] = [ours.send(topic, "before") for topic in ("hf102-ours", "hf103-ours")]
        for delivery in deliveries:
            delivery.wait(60)
        cluster.freeze(*FOLLOWERS)
        deliveries += ours.send_many("hf102-ours", numbers(0, COUNT))
        # The first of these may answer a fetch that a follower had sent before; the last cannot.
        for value in numbers(0, COUNT):
            send(hasty, "hf102-plain", value, reported["hf102-plain"])
        settled_early = any(delivery.is_settled for delivery in deliveries[2:])
        cluster.kill(LEADER)
        deliveries.append(ours.send("hf103-ours", "during"))
        # The controller is frozen: there is no new leader before the message is given up.
        send(short, "hf103-plain", "during", reported["hf103-plain"])
        cluster.thaw(*FOLLOWERS)
        wait_until(
            lambda: all(cluster.leader(topic) in FOLLOWERS for topic in topics), "there are new leaders", 90
        )
        delivered = [delivery.wait(120).offset for delivery in deliveries]
    engine = cluster.engine()
    return Outage(reported, settled_early, delivered, {topic: engine.read(topic)[0] for topic in topics})


def test_hf102_dead_leader_plain_client_loses_what_was_confirmed(outage: Outage) -> None:
    assert outage.reported["hf102-plain"].delivered == ["before", *numbers(0, COUNT)]
    stored = outage.stored["hf102-plain"]
    assert stored[0] == "before"
    assert str(COUNT - 1) not in stored


def test_hf102_dead_leader_ours_confirms_only_what_followers_have(outage: Outage) -> None:
    assert not outage.settled_early
    assert outage.stored["hf102-ours"] == ["before", *numbers(0, COUNT)]
    assert outage.delivered[2 : 2 + COUNT] == list(range(1, COUNT + 1))


def test_hf103_election_plain_client_gives_up(outage: Outage) -> None:
    assert [value for value, _ in outage.reported["hf103-plain"].failed] == ["during"]
    assert outage.stored["hf103-plain"] == []


def test_hf103_election_ours_waits_for_it(outage: Outage) -> None:
    assert outage.stored["hf103-ours"] == ["before", "during"]
