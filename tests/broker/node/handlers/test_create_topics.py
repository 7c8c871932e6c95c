"""CreateTopics, at every version: what Apache Kafka 4.3 answers, item by item."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

CREATE_TOPICS = 19
VERSIONS = range(2, 8)


def topic(name: str, partitions: int = 1, factor: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": factor,
        "assignments": more.get("assignments", []),
        "configs": [{"name": n, "value": v} for n, v in more.get("configs", [])],
    }


def codes(answer: Any) -> dict[str, ErrorCode]:
    return {result.name: result.error_code for result in answer.topics}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_topic_is_created_in_every_version(desk: Any, version: int) -> None:
    answer = desk.ask(CREATE_TOPICS, version, topics=[topic("orders", 3)], timeout=1000)
    assert codes(answer) == {"orders": ErrorCode.none}
    assert len(desk.node.metadata.image.topics["orders"].partitions) == 3


def test_the_answer_describes_the_topic(desk: Any) -> None:
    (result,) = desk.ask(
        CREATE_TOPICS, 7, topics=[topic("orders", 3, configs=[("retention.ms", "5000")])], timeout=1000
    ).topics
    assert result.topic_id == desk.node.metadata.image.topics["orders"].topic_id
    assert (result.num_partitions, result.replication_factor) == (3, 1)
    assert (result.error_message, result.topic_config_error_code) == (None, 0)
    configs = {config.name: config for config in result.configs}
    assert (configs["retention.ms"].value, configs["retention.ms"].config_source) == ("5000", 1)
    assert (configs["cleanup.policy"].value, configs["cleanup.policy"].config_source) == ("delete", 5)
    assert [config.name for config in result.configs] == sorted(configs)


def test_minus_one_takes_the_brokers_defaults(make_desk: Any) -> None:
    desk = make_desk({"num.partitions": "4"})
    (result,) = desk.ask(CREATE_TOPICS, 7, topics=[topic("orders", -1, -1)], timeout=1000).topics
    assert (result.num_partitions, result.replication_factor) == (4, 1)


def test_validating_creates_nothing_and_answers_as_if(desk: Any) -> None:
    (result,) = desk.ask(
        CREATE_TOPICS, 7, topics=[topic("orders", 3)], timeout=1000, validate_only=True
    ).topics
    assert (result.error_code, result.num_partitions) == (ErrorCode.none, 3)
    assert desk.node.metadata.image.topic("orders") is None


def test_one_refused_topic_does_not_spoil_the_others(desk: Any) -> None:
    answer = desk.ask(
        CREATE_TOPICS,
        7,
        topics=[
            topic("good"),
            topic("bad name"),
            topic("many", 0),
            topic("copies", 1, 3),
            topic("odd", configs=[("no.such.setting", "1")]),
            topic("manual", -1, -1, assignments=[{"partition_index": 0, "broker_ids": [9]}]),
            topic("also.good"),
            topic("also_good"),
        ],
        timeout=1000,
    )
    assert codes(answer) == {
        "good": ErrorCode.none,
        "bad name": ErrorCode.invalid_topic_exception,
        "many": ErrorCode.invalid_partitions,
        "copies": ErrorCode.invalid_replication_factor,
        "odd": ErrorCode.invalid_config,
        "manual": ErrorCode.invalid_replica_assignment,
        "also.good": ErrorCode.none,
        "also_good": ErrorCode.invalid_topic_exception,
    }
    refused = [result for result in answer.topics if result.error_code]
    assert all(result.error_message for result in refused)
    assert {(r.num_partitions, r.replication_factor, r.topic_id, r.configs) for r in refused} == {
        (-1, -1, None, ())
    }
    assert set(desk.node.metadata.image.topics) == {"good", "also.good"}


def test_a_topic_named_twice_is_made_not_at_all(desk: Any) -> None:
    answer = desk.ask(CREATE_TOPICS, 7, topics=[topic("twice"), topic("once"), topic("twice")], timeout=1000)
    assert [(r.name, r.error_code) for r in answer.topics] == [
        ("once", ErrorCode.none),
        ("twice", ErrorCode.invalid_request),
    ]
    assert set(desk.node.metadata.image.topics) == {"once"}


def test_an_existing_topic_stays_as_it_is(desk: Any) -> None:
    desk.create("orders", 2)
    before = desk.node.metadata.image.topics["orders"]
    answer = desk.ask(CREATE_TOPICS, 7, topics=[topic("orders", 5)], timeout=1000)
    assert codes(answer) == {"orders": ErrorCode.topic_already_exists}
    assert desk.node.metadata.image.topics["orders"] is before


@pytest.mark.parametrize("timeout_ms", [0, -1])
def test_a_request_without_time_is_not_begun(desk: Any, timeout_ms: int) -> None:
    answer = desk.ask(CREATE_TOPICS, 7, topics=[topic("orders")], timeout=timeout_ms)
    assert codes(answer) == {"orders": ErrorCode.request_timed_out}
    assert desk.node.metadata.image.topic("orders") is None


def test_the_answer_waits_until_the_topic_is_durable(desk: Any) -> None:
    desk.begin(CREATE_TOPICS, 7, topics=[topic("orders")], timeout=1000)
    while desk.turn:
        desk.turn.popleft()()
    assert desk.sent == []
    desk.settle()
    assert len(desk.sent) == 1


def test_a_created_topic_survives_a_restart_with_id_settings_and_a_higher_epoch(desk: Any) -> None:
    created = desk.create("orders", 2, retention_ms="5000")
    again = desk.restart()
    found = again.node.metadata.image.topics["orders"]
    assert found.topic_id == created.topic_id
    assert [partition.leader_epoch for partition in found.partitions] == [1, 1]
    assert again.node.settings.topic("orders").retention_ms == 5000


def test_a_failed_metadata_log_refuses_and_creates_nothing(desk: Any) -> None:
    desk.disk.read_only = True
    answer = desk.ask(CREATE_TOPICS, 7, topics=[topic("orders")], timeout=1000)
    assert codes(answer) == {"orders": ErrorCode.kafka_storage_error}
    assert desk.node.metadata.image.topic("orders") is None
