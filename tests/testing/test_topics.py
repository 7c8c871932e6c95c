"""The helpers of tests: what is produced is what is read, up to the end at the time of the call."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from holdfast.errors import UsageError
from holdfast.reader.cluster import Cluster
from holdfast.testing import BrokerProcess, NotProduced, Topics
from holdfast.testing.topic_records import BATCH_BYTES_MAX


def texts(topics: Topics, topic: str, **options: Any) -> list[str]:
    return [record.text for record in topics.consume_all(topic, **options)]


def test_what_is_produced_is_read_with_key_headers_and_time(
    holdfast_session_broker: BrokerProcess, holdfast_topic: str
) -> None:
    produced = holdfast_session_broker.produce(
        holdfast_topic,
        "text",
        b"\xff",
        None,
        key="7",
        headers={"source": "web", "none": None},
        timestamp_ms=17,
    )
    assert [(each.key, each.value, each.timestamp_ms) for each in produced] == [
        (b"7", b"text", 17),
        (b"7", b"\xff", 17),
        (b"7", None, 17),
    ]
    assert produced[0].headers == (("source", b"web"), ("none", None))
    assert [each.offset for each in produced] == [0, 1, 2]
    assert holdfast_session_broker.consume_all(holdfast_topic) == produced


def test_the_broker_stamps_what_it_is_to_stamp(holdfast_session_broker: BrokerProcess) -> None:
    topic = "stamped-by-the-broker"
    settings = {"message.timestamp.type": "LogAppendTime"}
    holdfast_session_broker.create_topic(topic, settings=settings)
    produced = holdfast_session_broker.produce(topic, "now", timestamp_ms=17)
    assert produced[0].timestamp_ms > 17
    assert holdfast_session_broker.consume_all(topic) == produced


def test_keys_decide_and_values_without_a_key_take_turns(holdfast_session_broker: BrokerProcess) -> None:
    holdfast_session_broker.create_topic("spread", partitions=3)
    of_a_key = holdfast_session_broker.produce("spread", *"abc", key="customer-1")
    assert len({each.partition for each in of_a_key}) == 1
    of_none = holdfast_session_broker.produce("spread", *"defghi")
    assert [each.partition for each in of_none] == [0, 1, 2, 0, 1, 2]
    assert [each.text for each in of_none] == list("defghi")
    chosen = holdfast_session_broker.produce("spread", "j", partition=2)
    assert texts(holdfast_session_broker, "spread", partition=2)[-1] == "j"
    assert chosen[0].partition == 2


def test_more_than_a_batch_is_sent_in_several(
    holdfast_session_broker: BrokerProcess, holdfast_topic: str
) -> None:
    values = [b"%d" % number + bytes(BATCH_BYTES_MAX // 2) for number in range(4)]
    produced = holdfast_session_broker.produce(holdfast_topic, *values)
    assert [each.offset for each in produced] == [0, 1, 2, 3]
    assert [each.value for each in holdfast_session_broker.consume_all(holdfast_topic)] == values


def test_it_ends_where_the_topic_ended_when_it_was_called(
    holdfast_session_broker: BrokerProcess, holdfast_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast_session_broker.produce(holdfast_topic, "before")
    asked = Cluster.offsets

    def offsets(cluster: Cluster, partitions: Any, spec: Any) -> Any:
        answer = asked(cluster, partitions, spec)
        if spec == "latest":
            holdfast_session_broker.produce(holdfast_topic, "after")
        return answer

    monkeypatch.setattr(Cluster, "offsets", offsets)
    assert texts(holdfast_session_broker, holdfast_topic) == ["before"]


def test_what_is_deleted_meanwhile_is_left_out(
    holdfast_session_broker: BrokerProcess, holdfast_topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast_session_broker.produce(holdfast_topic, "old", "new")
    asked = Cluster.offsets

    def offsets(cluster: Cluster, partitions: Any, spec: Any) -> Any:
        answer = asked(cluster, partitions, spec)
        if spec == "latest":
            admin = AdminClient({"bootstrap.servers": holdfast_session_broker.bootstrap_servers})
            (deleted,) = admin.delete_records([TopicPartition(holdfast_topic, 0, 1)]).values()
            deleted.result(60)
        return answer

    monkeypatch.setattr(Cluster, "offsets", offsets)
    assert texts(holdfast_session_broker, holdfast_topic) == ["new"]


def test_read_committed_leaves_out_what_was_aborted_and_what_is_undecided(
    holdfast_session_broker: BrokerProcess, holdfast_topic: str
) -> None:
    settings = {
        "bootstrap.servers": holdfast_session_broker.bootstrap_servers,
        "transactional.id": holdfast_topic,
    }
    producer = Producer(settings)
    producer.init_transactions(60)
    for value, end in (("aborted", producer.abort_transaction), ("kept", producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(holdfast_topic, value)
        producer.flush(60)
        end(60)
    producer.begin_transaction()
    producer.produce(holdfast_topic, "undecided")
    producer.flush(60)
    assert texts(holdfast_session_broker, holdfast_topic, isolation="read_committed") == ["kept"]
    assert texts(holdfast_session_broker, holdfast_topic) == ["aborted", "kept", "undecided"]
    producer.abort_transaction(60)


def test_mistakes_are_named(holdfast_session_broker: BrokerProcess) -> None:
    broker = holdfast_session_broker
    broker.create_topic("payments")
    with pytest.raises(UsageError, match="no topic 'payment'; did you mean 'payments'"):
        broker.consume_all("payment")
    with pytest.raises(UsageError, match="did you mean 'payments'"):
        broker.produce("payment", "x")
    with pytest.raises(UsageError, match="no partition 3; it has 0 to 0"):
        broker.produce("payments", "x", partition=3)
    with pytest.raises(UsageError, match="'committed' is neither"):
        broker.consume_all("payments", isolation="committed")  # type: ignore[arg-type]
    with pytest.raises(NotProduced, match="has 0 of 1 records: MESSAGE_TOO_LARGE"):
        broker.produce("payments", bytes(2 << 20))


@pytest.mark.check
def test_the_same_words_work_on_apache_kafka(apache_kafka: Topics) -> None:
    apache_kafka.create_topic("in-a-tests-words", partitions=2)
    produced = apache_kafka.produce("in-a-tests-words", *"abcd", headers={"source": "web"})
    assert sorted(apache_kafka.consume_all("in-a-tests-words")) == sorted(produced)
