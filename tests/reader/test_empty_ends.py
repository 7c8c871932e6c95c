"""A log whose last offsets are in no batch, asked of real brokers: nothing is there, and nothing is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient
from tests.support.reader_cases import flush, make_producer, whole

from holdfast.reader import Cluster, RangeReport, TopicPartition, fetch_messages
from holdfast.reader.fetch_messages import FetchAnswer, walk_fetch

from .conftest import topic_maker


@pytest.fixture(params=["ours", pytest.param("apache", marks=pytest.mark.apache_kafka)])
def servers(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "ours":
        yield request.getfixturevalue("bootstrap")
    else:
        yield request.getfixturevalue("apache_kafka").bootstrap_servers


def test_an_end_that_is_empty_is_missing(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = topic_maker(servers)("ends")
    producer = make_producer(servers)
    for number in range(10):
        producer.produce(topic, b"%d" % number)
    flush(producer)
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.delete_records([Place(topic, 0, 4)])[Place(topic, 0)].result(30)

    def emptied(body: memoryview) -> FetchAnswer:
        """As if compaction had taken every record."""
        answer = walk_fetch(body)
        return answer._replace(
            partitions=[each._replace(records=memoryview(b"")) for each in answer.partitions]
        )

    monkeypatch.setattr(fetch_messages, "walk_fetch", emptied)
    with Cluster({"bootstrap.servers": servers}) as cluster:
        assert cluster.local_start(TopicPartition(topic, 0)) == 4
        reports: list[RangeReport] = []
        found: list[Any] = list(cluster.read(whole(cluster, topic), reports=reports))
    assert found == []
    assert [(report.records, report.missing, report.is_complete) for report in reports] == [(0, 6, True)]
