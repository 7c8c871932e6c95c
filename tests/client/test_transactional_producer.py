"""A transactional producer against a cluster in memory: what a refusal means."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError
from tests.support.fake_producer import FakeCluster, Verdict

from holdfast.client import transactional
from holdfast.client.errors import DeliveryFailed
from holdfast.client.transactional import Output, TransactionalProducer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster({"changes": 1})
    monkeypatch.setattr(transactional, "RawProducer", cluster.make)
    return cluster


def test_the_refusal_of_a_message_that_somebody_else_hears_of_is_final_too(cluster: FakeCluster) -> None:
    cluster.refuse(lambda topic, partition, message: Verdict(KafkaError.MSG_SIZE_TOO_LARGE))
    heard: list[Any] = []
    producer = TransactionalProducer({"transactional.id": "t"}, lambda: False)
    producer.start()
    producer.begin()
    producer.produce(Output("changes", b"v", partition=0), lambda error, message: heard.append(error))
    with pytest.raises(DeliveryFailed, match="changes-0: refused on purpose"):
        producer.commit([], b"")
    assert [error.code() for error in heard] == [KafkaError.MSG_SIZE_TOO_LARGE]


def test_whoever_wants_to_know_where_a_message_went_is_told(cluster: FakeCluster) -> None:
    heard: list[Any] = []
    producer = TransactionalProducer({"transactional.id": "t"}, lambda: False)
    producer.start()
    producer.begin()
    producer.produce(Output("changes", b"v", partition=0), lambda error, message: heard.append(error))
    producer.commit([], b"")
    assert heard == [None]
    assert cluster.values("changes") == [b"v"]
