"""The cluster as tools see it: brokers, quorum, log directories, leaders, reassignments, quotas, access rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.differential import Script, Side

from holdfast.wire.api_keys import (
    ALTER_CLIENT_QUOTAS,
    ALTER_PARTITION_REASSIGNMENTS,
    DESCRIBE_ACLS,
    DESCRIBE_CLIENT_QUOTAS,
    DESCRIBE_CLUSTER,
    DESCRIBE_LOG_DIRS,
    DESCRIBE_PRODUCERS,
    DESCRIBE_QUORUM,
    DESCRIBE_USER_SCRAM_CREDENTIALS,
    ELECT_LEADERS,
    LIST_PARTITION_REASSIGNMENTS,
    UPDATE_FEATURES,
)
from holdfast.wire.batch import make_batch

Compare = Callable[[Script], None]


def the_cluster(side: Side) -> None:
    for version in range(3):
        side.ask(f"version {version}", DESCRIBE_CLUSTER, version, {"endpoint_type": 1})
    side.ask(
        "operations", DESCRIBE_CLUSTER, 2, {"endpoint_type": 1, "include_cluster_authorized_operations": True}
    )
    side.ask("fenced too", DESCRIBE_CLUSTER, 2, {"endpoint_type": 1, "include_fenced_brokers": True})
    side.ask("controllers", DESCRIBE_CLUSTER, 1, {"endpoint_type": 2})
    side.ask("unknown endpoint", DESCRIBE_CLUSTER, 1, {"endpoint_type": 7})


def the_quorum(side: Side) -> None:
    def ask(label: str, version: int, topic: str, partition: int) -> None:
        wanted = [{"topic_name": topic, "partitions": [{"partition_index": partition}]}]
        answer = side.client.ask(DESCRIBE_QUORUM, version, {"topics": wanted})
        if answer.topics:
            found = answer.topics[0].partitions[0]
            voters = [each.replica_id for each in found.current_voters]
            side.note(label, (found.error_code, found.leader_id, found.high_watermark > 0, voters))
        side.note(f"{label}: error", answer.error_code)

    for version in range(3):
        ask(f"version {version}", version, "__cluster_metadata", 0)
    ask("another partition", 2, "__cluster_metadata", 3)
    ask("another topic", 2, "other", 0)
    side.ask("nothing", DESCRIBE_QUORUM, 2, {"topics": []})


def log_directories(side: Side) -> None:
    side.create_topic("in-directories", 2)
    side.produce("some data", "in-directories", make_batch([b"x" * 1000], timestamp=1))

    def ask(label: str, version: int, topics: list[dict[str, Any]] | None) -> None:
        answer = side.client.ask(DESCRIBE_LOG_DIRS, version, {"topics": topics})
        mine = {
            (topic.name, part.partition_index): (part.partition_size, part.offset_lag, part.is_future_key)
            for directory in answer.results
            for topic in directory.topics
            for part in topic.partitions
            if topic.name == "in-directories"
        }
        side.note(
            label,
            {
                "error_code": getattr(answer, "error_code", None),
                "directories": [each.error_code for each in answer.results],
                "partitions": {f"{name}-{index}": value for (name, index), value in mine.items()},
                "space": [
                    (getattr(each, "total_bytes", 1) > 0, getattr(each, "usable_bytes", 1) > 0)
                    for each in answer.results
                ],
                "is_cordoned": [getattr(each, "is_cordoned", None) for each in answer.results],
            },
        )

    for version in range(1, 6):
        ask(f"everything, version {version}", version, None)
        ask(f"one, version {version}", version, [{"topic": "in-directories", "partitions": [0]}])
    ask("nothing", 4, [])
    ask("no such topic", 4, [{"topic": "nowhere", "partitions": [0]}])
    ask("no such partition", 4, [{"topic": "in-directories", "partitions": [9]}])


def leaders(side: Side) -> None:
    side.create_topic("elected", 2)

    def ask(label: str, kind: int, wanted: list[dict[str, Any]] | None, version: int = 2) -> None:
        fields = {"election_type": kind, "topic_partitions": wanted, "timeout": 9000}
        side.ask(label, ELECT_LEADERS, version, fields)

    for version in range(3):
        ask(f"preferred, version {version}", 0, [{"topic": "elected", "partitions": [0, 1]}], version)
    ask("unclean", 1, [{"topic": "elected", "partitions": [0]}])
    ask("unknown kind", 5, [{"topic": "elected", "partitions": [0]}])
    ask("no such partition", 0, [{"topic": "elected", "partitions": [9]}])
    ask("no such topic", 0, [{"topic": "nowhere", "partitions": [0]}])
    ask("nothing", 0, [])
    # Other scripts have made topics of their own on one side or the other.
    every = side.client.ask(ELECT_LEADERS, 2, {"election_type": 0, "topic_partitions": None, "timeout": 9000})
    mine = [each for each in every.replica_election_results if each.topic == "elected"]
    side.note(
        "everything",
        {
            "error_code": every.error_code,
            "elected": [result.error_code for each in mine for result in each.partition_result],
        },
    )


def reassignments(side: Side) -> None:
    side.create_topic("moved", 2)

    def listed(label: str, topics: list[dict[str, Any]] | None) -> None:
        side.ask(label, LIST_PARTITION_REASSIGNMENTS, 0, {"timeout": 9000, "topics": topics})

    def move(label: str, topic: str, partition: int, replicas: list[int] | None, **fields: Any) -> None:
        wanted = [{"name": topic, "partitions": [{"partition_index": partition, "replicas": replicas}]}]
        version = fields.pop("version", 1)
        body = {"timeout": 9000, "topics": wanted, **fields}
        side.ask(label, ALTER_PARTITION_REASSIGNMENTS, version, body)

    listed("all", None)
    listed("one", [{"name": "moved", "partition_indexes": [0]}])
    listed("none of no such topic", [{"name": "nowhere", "partition_indexes": [0]}])
    listed("none", [])
    move("where it is", "moved", 0, [1], version=0)
    move("where it is, version 1", "moved", 0, [1])
    move("to an unknown broker", "moved", 0, [7])
    move("to one broker twice", "moved", 0, [1, 1])
    move("to nobody", "moved", 0, [])
    move("cancel what is not under way", "moved", 0, None)
    move("no such partition", "moved", 9, [1])
    move("no such topic", "nowhere", 0, [1])


def quotas(side: Side) -> None:
    def described(
        label: str, *parts: tuple[str, int, str | None], version: int = 1, strict: bool = False
    ) -> None:
        components = [
            {"entity_type": kind, "match_type": match, "match": value} for kind, match, value in parts
        ]
        side.ask(label, DESCRIBE_CLIENT_QUOTAS, version, {"components": components, "strict": strict})

    for version in range(2):
        described(f"all, version {version}", version=version)
    described("of a client", ("client-id", 0, "me"))
    described("of any user, strictly", ("user", 2, None), strict=True)
    described("of the default user", ("user", 1, None))
    described("unknown kind", ("planet", 0, "earth"))
    described("unknown match", ("user", 9, None))
    described("a kind twice", ("user", 2, None), ("user", 2, None))
    described("exact without a name", ("user", 0, None))
    described("default with a name", ("user", 1, "me"))


def rules_of_access(side: Side) -> None:
    for version in (1, 2, 3):
        fields = {
            "resource_type_filter": 1,
            "resource_name_filter": None,
            "pattern_type_filter": 1,
            "principal_filter": None,
            "host_filter": None,
            "operation": 1,
            "permission_type": 1,
        }
        side.ask(f"version {version}", DESCRIBE_ACLS, version, fields)


def credentials(side: Side) -> None:
    side.ask("all", DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": None})
    side.ask("one", DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": [{"name": "nobody"}]})
    side.ask("twice", DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": [{"name": "nobody"}, {"name": "nobody"}]})
    side.ask("without a name", DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": [{"name": ""}]})


def features(side: Side) -> None:
    def update(
        label: str, feature: str, level: int, kind: int = 1, version: int = 2, validate: bool = True
    ) -> None:
        listed = [{"feature": feature, "max_version_level": level, "upgrade_type": kind}]
        fields = {"timeout": 9000, "feature_updates": listed, "validate_only": validate}
        side.ask(label, UPDATE_FEATURES, version, fields)

    update("to what it is", "metadata.version", 30)
    update("to what it is, version 1", "metadata.version", 30, version=1)
    update("beyond what is known", "metadata.version", 99)
    update("unknown feature", "antigravity", 1)
    update("down, although only up is allowed", "metadata.version", 20)
    side.ask("nothing", UPDATE_FEATURES, 2, {"timeout": 9000, "feature_updates": [], "validate_only": True})


def quotas_changed(side: Side) -> None:
    def change(label: str, key: str, value: float, remove: bool = False, **fields: Any) -> None:
        entity = [{"entity_type": "client-id", "entity_name": "quota-client"}]
        entry = {"entity": entity, "ops": [{"key": key, "value": value, "remove": remove}]}
        version = fields.pop("version", 1)
        side.ask(label, ALTER_CLIENT_QUOTAS, version, {"entries": [entry], "validate_only": True, **fields})

    change("a rate", "producer_byte_rate", 1000.0)
    change("an unknown key", "speed", 1.0)


def producers_of_a_partition(side: Side) -> None:
    side.create_topic("producers", 2)
    wanted = [
        {"name": "producers", "partition_indexes": [0, 1, 5]},
        {"name": "nowhere", "partition_indexes": [0]},
    ]
    side.ask("none yet", DESCRIBE_PRODUCERS, 0, {"topics": wanted})
    side.ask("nothing asked", DESCRIBE_PRODUCERS, 0, {"topics": []})


SCRIPTS = (
    the_cluster,
    the_quorum,
    log_directories,
    leaders,
    reassignments,
    quotas,
    quotas_changed,
    rules_of_access,
    credentials,
    features,
    producers_of_a_partition,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_cluster_is_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
