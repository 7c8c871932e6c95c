"""The batch reader on Apache Kafka: the same rows as confluent-kafka reads there, and the same errors as on ours."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.reader_cases import (
    consumed,
    fill,
    fill_transactions,
    flush,
    make_producer,
    read_rows,
    whole,
)

from holdfast.reader import Cluster, OffsetGone, TopicPartition, TopicRecreated
from holdfast.testing.apache import ApacheKafka
from holdfast.testing.engines import wait_until

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def admin(apache_kafka: ApacheKafka) -> AdminClient:
    return AdminClient({"bootstrap.servers": apache_kafka.bootstrap_servers, "log_level": 0})


@pytest.fixture
def cluster(apache_kafka: ApacheKafka) -> Iterator[Cluster]:
    with Cluster({"bootstrap.servers": apache_kafka.bootstrap_servers}) as cluster:
        yield cluster


def make(admin: AdminClient, prefix: str, partitions: int = 1) -> str:
    name = f"{prefix}-{uuid.uuid4().hex[:8]}"
    # Some messages carry old timestamps on purpose: retention must not take them while they are compared.
    wanted = NewTopic(name, partitions, 1, config={"retention.ms": "-1"})
    admin.create_topics([wanted])[name].result(30)
    return name


def test_reader_and_confluent_kafka_read_the_same_from_apache_kafka(
    apache_kafka: ApacheKafka, admin: AdminClient, cluster: Cluster
) -> None:
    address = apache_kafka.bootstrap_servers
    topic = make(admin, "reader", 2)
    fill(address, topic, 2, seed=11, count=30)
    fill_transactions(address, topic, 2, seed=12)
    for isolation in ("read_committed", "read_uncommitted"):
        for batch_bytes in (1000, 4 << 20):
            rows, _ = read_rows(
                cluster,
                whole(cluster, topic, isolation),
                isolation=isolation,
                batch_bytes=batch_bytes,
            )
            assert rows == consumed(address, topic, range(2), isolation)


def test_recreated_topics_and_deleted_records_are_errors_on_apache_kafka(
    apache_kafka: ApacheKafka, admin: AdminClient, cluster: Cluster
) -> None:
    topic = make(admin, "reader")
    producer = make_producer(apache_kafka.bootstrap_servers)
    for number in range(10):
        producer.produce(topic, b"%d" % number)
    flush(producer)
    (full,) = whole(cluster, topic)
    from confluent_kafka import TopicPartition as Place

    admin.delete_records([Place(topic, 0, 4)])[Place(topic, 0)].result(30)
    with pytest.raises(OffsetGone, match="offsets 0 to 3 are gone") as gone:
        list(cluster.read([full]))
    assert (gone.value.offset, gone.value.log_start, gone.value.log_end) == (0, 4, 10)
    rows, _ = read_rows(cluster, [full._replace(start=4)])
    assert [row.value for row in rows[0]] == [b"4", b"5", b"6", b"7", b"8", b"9"]
    with pytest.raises(OffsetGone, match="offset 11 does not exist: the log ends at 10"):
        list(cluster.read([full._replace(start=11, end=12)]))
    place = TopicPartition(topic, 0)
    assert cluster.epoch_ends({place: 0})[place][1] == 10

    admin.delete_topics([topic])[topic].result(30)
    _create_again(admin, topic)
    with pytest.raises(TopicRecreated, match="was deleted and created again"):
        list(cluster.read([full._replace(start=4)]))


def _create_again(admin: AdminClient, topic: str) -> None:
    """The old one is still being deleted for a moment, and the new one unknown to the broker for another."""
    from confluent_kafka import KafkaException

    def is_made() -> bool:
        try:
            admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                raise
            return False
        return True

    wait_until(is_made, "the old topic is deleted")
    wait_until(
        lambda: admin.list_topics(topic, timeout=10).topics[topic].error is None,
        "the broker knows the new topic",
    )
