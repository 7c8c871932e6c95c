"""DescribeCluster, DescribeTopicPartitions, DescribeQuorum, DescribeLogDirs and what consoles ask in passing."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

ACLS, LOG_DIRS, ELECT, REASSIGN, REASSIGNMENTS = 29, 35, 43, 45, 46
QUOTAS, ALTER_QUOTAS, SCRAM, QUORUM, FEATURES, CLUSTER, PARTITIONS = 48, 49, 50, 55, 57, 60, 75
NOT_ASKED = -(2**31)


@pytest.mark.parametrize("version", range(3))
def test_the_cluster_is_described_in_every_version(desk: Any, version: int) -> None:
    answer = desk.ask(CLUSTER, version, include_cluster_authorized_operations=False)
    assert (answer.error_code, answer.cluster_id, answer.controller_id) == (
        0,
        desk.node.identity.cluster_id,
        1,
    )
    assert answer.cluster_authorized_operations == NOT_ASKED
    assert [(b.broker_id, b.host, b.port, b.rack) for b in answer.brokers] == [(1, "127.0.0.1", 9092, None)]
    asked = desk.ask(CLUSTER, version, include_cluster_authorized_operations=True)
    assert asked.cluster_authorized_operations == 8096


@pytest.mark.parametrize(
    ("endpoint_type", "code"),
    [(2, ErrorCode.mismatched_endpoint_type), (9, ErrorCode.unsupported_endpoint_type)],
)
def test_a_broker_is_not_a_controller(desk: Any, endpoint_type: int, code: ErrorCode) -> None:
    answer = desk.ask(CLUSTER, 1, endpoint_type=endpoint_type)
    assert (answer.error_code, answer.controller_id, answer.brokers) == (code, -1, ())
    assert answer.error_message


def pages(desk: Any, names: list[str], limit: int) -> list[list[tuple[str, int]]]:
    """Every page of DescribeTopicPartitions, as (topic, partition)."""
    found = []
    cursor: dict[str, Any] | None = None
    while True:
        answer = desk.ask(
            PARTITIONS,
            topics=[{"name": name} for name in names],
            response_partition_limit=limit,
            cursor=cursor,
        )
        found.append([(t.name, p.partition_index) for t in answer.topics for p in t.partitions])
        if answer.next_cursor is None:
            return found
        cursor = {
            "topic_name": answer.next_cursor.topic_name,
            "partition_index": answer.next_cursor.partition_index,
        }


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("names", [[], ["b", "a", "c", "a"]])
def test_pages_of_partitions_show_each_once_in_order(desk: Any, names: list[str], limit: int) -> None:
    for name, count in (("b", 3), ("a", 2), ("c", 1)):
        desk.create(name, count)
    shown = pages(desk, names, limit)
    assert all(len(page) <= limit for page in shown)
    everything = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]
    assert [one for page in shown for one in page] == everything


def test_a_described_partition_has_everything(desk: Any) -> None:
    topic_id = desk.create("orders").topic_id
    (topic,) = desk.ask(PARTITIONS, topics=[{"name": "orders"}]).topics
    assert (topic.error_code, topic.topic_id, topic.is_internal) == (ErrorCode.none, topic_id, False)
    assert topic.topic_authorized_operations == 3576
    (partition,) = topic.partitions
    assert (partition.leader_id, partition.leader_epoch) == (1, 0)
    assert partition.replica_nodes == partition.isr_nodes == (1,)
    assert (partition.eligible_leader_replicas, partition.last_known_elr) == ((), ())
    assert partition.offline_replicas == ()


def test_topics_that_cannot_be_described_are_told(desk: Any) -> None:
    desk.create("orders")
    answer = desk.ask(PARTITIONS, topics=[{"name": name} for name in ("unknown", "bad name", "orders")])
    assert [(topic.name, topic.error_code) for topic in answer.topics] == [
        ("bad name", ErrorCode.invalid_topic_exception),
        ("orders", ErrorCode.none),
        ("unknown", ErrorCode.unknown_topic_or_partition),
    ]


@pytest.mark.parametrize("cursor", [("orders", -1), ("strange", 0)])
def test_a_cursor_no_page_ended_with_is_refused(desk: Any, cursor: tuple[str, int]) -> None:
    desk.create("orders")
    (topic,) = desk.ask(
        PARTITIONS,
        topics=[{"name": "orders"}],
        cursor={"topic_name": cursor[0], "partition_index": cursor[1]},
    ).topics
    assert (topic.error_code, topic.topic_authorized_operations) == (ErrorCode.invalid_request, NOT_ASKED)


def test_a_cursor_past_the_last_partition_shows_none(desk: Any) -> None:
    desk.create("orders")
    answer = desk.ask(
        PARTITIONS, topics=[{"name": "orders"}], cursor={"topic_name": "orders", "partition_index": 9}
    )
    assert answer.topics[0].partitions == ()
    assert answer.next_cursor is None


def test_no_page_exceeds_the_brokers_own_limit(make_desk: Any) -> None:
    desk = make_desk({"max.request.partition.size.limit": "2"})
    desk.create("orders", 5)
    assert [len(page) for page in pages(desk, [], 100)] == [2, 2, 1]


@pytest.mark.parametrize("version", range(3))
def test_the_quorum_is_this_node(desk: Any, version: int) -> None:
    metadata = {"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}
    answer = desk.ask(QUORUM, version, topics=[metadata])
    (partition,) = answer.topics[0].partitions
    assert (answer.error_code, partition.error_code, partition.leader_id) == (0, 0, 1)
    assert partition.leader_epoch == desk.node.metadata.hosted.leader_epoch
    (voter,) = partition.current_voters
    assert voter.replica_id == 1
    assert voter.log_end_offset == partition.high_watermark == desk.node.metadata.image.last_offset + 1
    if version >= 2:
        assert voter.replica_directory_id == desk.node.directories[0].id
        assert [(n.node_id, n.listeners[0].port) for n in answer.nodes] == [(1, 9092)]


@pytest.mark.parametrize(("topic", "index"), [("orders", 0), ("__cluster_metadata", 1)])
def test_other_topics_have_no_quorum(desk: Any, topic: str, index: int) -> None:
    desk.create("orders")
    answer = desk.ask(QUORUM, topics=[{"topic_name": topic, "partitions": [{"partition_index": index}]}])
    (partition,) = answer.topics[0].partitions
    assert (partition.partition_index, partition.error_code) == (index, ErrorCode.unknown_topic_or_partition)
    assert answer.nodes == ()


@pytest.mark.parametrize("version", range(1, 6))
def test_log_directories_are_described_in_every_version(make_desk: Any, version: int) -> None:
    desk = make_desk({"log.dirs": "/one,/two"})
    desk.create("orders", 4)
    answer = desk.ask(LOG_DIRS, version, topics=None)
    assert [result.log_dir for result in answer.results] == ["/one", "/two"]
    held = [[(t.name, len(t.partitions)) for t in result.topics] for result in answer.results]
    assert held == [[("orders", 2)], [("orders", 2)]]
    if version >= 4:
        assert all(result.usable_bytes > 0 for result in answer.results)


def test_log_directories_can_be_asked_about_some_partitions(desk: Any) -> None:
    desk.create("orders", 2)
    wanted = [{"topic": "orders", "partitions": [1, 9]}, {"topic": "unknown", "partitions": [0]}]
    (result,) = desk.ask(LOG_DIRS, topics=wanted).results
    ((name, partitions),) = [(topic.name, topic.partitions) for topic in result.topics]
    assert (name, [p.partition_index for p in partitions]) == ("orders", [1])
    assert (partitions[0].partition_size, partitions[0].offset_lag, partitions[0].is_future_key) == (
        0,
        0,
        False,
    )
    (result,) = desk.ask(LOG_DIRS, topics=[]).results
    assert result.topics == ()


def test_an_offline_log_directory_is_told(make_desk: Any) -> None:
    desk = make_desk({"log.dirs": "/one,/two"})
    desk.create("orders", 2)
    desk.node.directories[1].take_offline(OSError("gone"))
    one, two = desk.ask(LOG_DIRS, topics=None).results
    assert (one.error_code, len(one.topics)) == (ErrorCode.none, 1)
    assert (two.error_code, two.topics) == (ErrorCode.kafka_storage_error, ())


@pytest.mark.parametrize("version", range(3))
def test_the_only_broker_leads_already(desk: Any, version: int) -> None:
    desk.create("orders")
    wanted = [{"topic": "orders", "partitions": [0, 9]}, {"topic": "unknown", "partitions": [0]}]
    answer = desk.ask(ELECT, version, topic_partitions=wanted)
    results = [
        (topic.topic, partition.partition_id, partition.error_code)
        for topic in answer.replica_election_results
        for partition in topic.partition_result
    ]
    assert results == [
        ("orders", 0, ErrorCode.election_not_needed),
        ("orders", 9, ErrorCode.unknown_topic_or_partition),
        ("unknown", 0, ErrorCode.unknown_topic_or_partition),
    ]


def test_electing_everywhere_leaves_out_what_needs_no_election(desk: Any) -> None:
    desk.create("orders")
    (topic,) = desk.ask(ELECT, topic_partitions=None).replica_election_results
    assert (topic.topic, topic.partition_result) == ("orders", ())


def test_an_unknown_election_is_refused(desk: Any) -> None:
    desk.create("orders")
    wanted = [{"topic": "orders", "partitions": [0]}]
    answer = desk.ask(ELECT, election_type=9, topic_partitions=wanted)
    assert answer.error_code == ErrorCode.invalid_request
    (topic,) = answer.replica_election_results
    assert topic.partition_result[0].error_code == ErrorCode.invalid_request
    unclean = desk.ask(ELECT, election_type=1, topic_partitions=wanted).replica_election_results[0]
    assert unclean.partition_result[0].error_code == ErrorCode.election_not_needed


@pytest.mark.parametrize("version", range(2))
def test_replicas_stay_where_they_are(desk: Any, version: int) -> None:
    desk.create("orders")
    wishes: list[list[int] | None] = [[1], None, [9], [], [1, 1]]
    for wish, code in zip(
        wishes,
        [
            ErrorCode.none,
            ErrorCode.no_reassignment_in_progress,
            ErrorCode.invalid_replica_assignment,
            ErrorCode.invalid_replica_assignment,
            ErrorCode.invalid_replica_assignment,
        ],
        strict=True,
    ):
        partitions = [{"partition_index": 0, "replicas": wish}, {"partition_index": 7, "replicas": [1]}]
        answer = desk.ask(
            REASSIGN,
            version,
            topics=[
                {"name": "orders", "partitions": partitions},
                {"name": "no", "partitions": partitions[:1]},
            ],
        )
        found = [p.error_code for topic in answer.responses for p in topic.partitions]
        unknown = ErrorCode.unknown_topic_or_partition
        assert found == [code, unknown, unknown]


def test_nothing_is_being_moved(desk: Any) -> None:
    desk.create("orders")
    answer = desk.ask(REASSIGNMENTS, topics=None)
    assert (answer.error_code, answer.topics) == (ErrorCode.none, ())


@pytest.mark.parametrize("version", [1, 2, 3])
def test_there_are_no_access_control_lists(desk: Any, version: int) -> None:
    answer = desk.ask(ACLS, version, resource_type_filter=1, operation=1, permission_type=1)
    assert (answer.error_code, answer.resources) == (ErrorCode.security_disabled, ())


@pytest.mark.parametrize("version", [0, 1])
def test_nobody_has_a_quota_and_none_can_be_set(desk: Any, version: int) -> None:
    answer = desk.ask(QUOTAS, version, components=[{"entity_type": "user", "match_type": 0, "match": "x"}])
    assert (answer.error_code, answer.entries) == (ErrorCode.none, ())
    strange = desk.ask(QUOTAS, version, components=[{"entity_type": "planet", "match_type": 0}])
    assert (strange.error_code, strange.entries) == (ErrorCode.unsupported_version, None)
    entry = {
        "entity": [{"entity_type": "user", "entity_name": "x"}],
        "ops": [{"key": "producer_byte_rate", "value": 1.0}],
    }
    (refused,) = desk.ask(ALTER_QUOTAS, version, entries=[entry]).entries
    assert refused.error_code == ErrorCode.unsupported_version
    assert [(e.entity_type, e.entity_name) for e in refused.entity] == [("user", "x")]


def test_no_user_has_scram_credentials(desk: Any) -> None:
    assert desk.ask(SCRAM, users=None).results == ()
    answer = desk.ask(SCRAM, users=[{"name": "x"}, {"name": "y"}, {"name": "y"}])
    assert [(result.user, result.error_code) for result in answer.results] == [
        ("x", ErrorCode.resource_not_found),
        ("y", ErrorCode.duplicate_resource),
    ]


@pytest.mark.parametrize("version", range(3))
@pytest.mark.parametrize(
    ("feature", "level", "code"),
    [
        ("metadata.version", 30, ErrorCode.none),
        ("metadata.version", 29, ErrorCode.invalid_update_version),
        ("group.version", 99, ErrorCode.invalid_update_version),
        ("no.such.version", 1, ErrorCode.invalid_update_version),
    ],
)
def test_features_stay_at_their_level(
    desk: Any, version: int, feature: str, level: int, code: ErrorCode
) -> None:
    before = dict(desk.node.metadata.image.features)
    update = {"feature": feature, "max_version_level": level}
    answer = desk.ask(FEATURES, version, feature_updates=[update])
    assert answer.error_code == code
    assert desk.node.metadata.image.features == before
    if version <= 1 and code == ErrorCode.none:
        assert [(result.feature, result.error_code) for result in answer.results] == [(feature, 0)]
