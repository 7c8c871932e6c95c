"""Kafka's own command line tools against our broker: topics, configs, offsets, log directories, quorum."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.clients import CLIENTS, Message

from holdfast.testing.apache import (
    CLUSTER,
    CONFIGS,
    DELETE_RECORDS,
    GET_OFFSETS,
    LOG_DIRS,
    METADATA_QUORUM,
    TOPICS,
    run_tool,
)
from holdfast.testing.kafka_fixtures import require_apache_kafka

pytestmark = [pytest.mark.check, pytest.mark.java]

MakeTopic = Callable[..., str]
LEADER_ELECTION = "org.apache.kafka.tools.LeaderElectionCommand"
BROKER_API_VERSIONS = "org.apache.kafka.tools.BrokerApiVersionsCommand"
FEATURES = "org.apache.kafka.tools.FeatureCommand"


@pytest.fixture(autouse=True)
def apache_kafka_is_there() -> None:
    require_apache_kafka()


def said(tool: str, bootstrap: str, *arguments: str) -> str:
    """What a tool printed on its standard output."""
    return run_tool(tool, "--bootstrap-server", bootstrap, *arguments).stdout.decode()


def test_topics_from_creation_to_deletion(bootstrap: str) -> None:
    topic = "from-java"
    made = said(
        TOPICS, bootstrap, "--create", "--topic", topic, "--partitions", "3", "--config", "retention.ms=7000"
    )
    assert f"Created topic {topic}." in made
    said(TOPICS, bootstrap, "--alter", "--topic", topic, "--partitions", "5")
    described = said(TOPICS, bootstrap, "--describe", "--topic", topic)
    assert re.search(r"PartitionCount: 5\s+ReplicationFactor: 1\s+Configs: .*retention\.ms=7000", described)
    assert len(re.findall(r"Partition: \d\s+Leader: 1\s+Replicas: 1\s+Isr: 1", described)) == 5
    assert topic in said(TOPICS, bootstrap, "--list").split()
    said(TOPICS, bootstrap, "--delete", "--topic", topic)
    again = run_tool(TOPICS, "--bootstrap-server", bootstrap, "--describe", "--topic", topic, check=False)
    assert again.returncode == 1
    assert b"does not exist" in again.stdout + again.stderr


@pytest.mark.long
def test_settings_of_topics_and_brokers(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic("configured")
    on_topic = ("--entity-type", "topics", "--entity-name", topic)
    said(
        CONFIGS,
        bootstrap,
        "--alter",
        *on_topic,
        "--add-config",
        "retention.ms=9000,cleanup.policy=[compact,delete]",
    )
    described = said(CONFIGS, bootstrap, "--describe", *on_topic)
    assert "retention.ms=9000 sensitive=false synonyms={DYNAMIC_TOPIC_CONFIG:retention.ms=9000" in described
    assert "cleanup.policy=compact,delete" in described
    said(CONFIGS, bootstrap, "--alter", *on_topic, "--delete-config", "retention.ms")
    assert "retention.ms" not in said(CONFIGS, bootstrap, "--describe", *on_topic)
    of_broker = said(
        CONFIGS, bootstrap, "--describe", "--entity-type", "brokers", "--entity-name", "1", "--all"
    )
    assert "log.segment.bytes=1073741824 sensitive=false" in of_broker
    refused = run_tool(
        CONFIGS,
        "--bootstrap-server",
        bootstrap,
        "--alter",
        *on_topic,
        "--add-config",
        "retention.ms=x",
        check=False,
    )
    assert refused.returncode == 1
    assert b"retention.ms" in refused.stderr + refused.stdout


def test_levels_of_loggers_are_changed(bootstrap: str) -> None:
    of_loggers = ("--entity-type", "broker-loggers", "--entity-name", "1")
    said(CONFIGS, bootstrap, "--alter", *of_loggers, "--add-config", "holdfast.broker.requests=DEBUG")
    described = said(CONFIGS, bootstrap, "--describe", *of_loggers)
    assert "holdfast.broker.requests=DEBUG sensitive=false" in described
    assert "root=INFO" in described
    said(CONFIGS, bootstrap, "--alter", *of_loggers, "--delete-config", "holdfast.broker.requests")
    assert "holdfast.broker.requests=INFO" in said(CONFIGS, bootstrap, "--describe", *of_loggers)


def test_offsets_are_told_and_records_deleted(bootstrap: str, make_topic: MakeTopic, tmp_path: Path) -> None:
    topic = make_topic("trimmed", 2)
    CLIENTS[0].produce(bootstrap, topic, [Message(None, b"%d" % number) for number in range(10)])
    order = {"version": 1, "partitions": [{"topic": topic, "partition": 0, "offset": 4}]}
    (tmp_path / "order.json").write_text(json.dumps(order))
    done = said(DELETE_RECORDS, bootstrap, "--offset-json-file", str(tmp_path / "order.json"))
    assert "low_watermark: 4" in done
    earliest = said(GET_OFFSETS, bootstrap, "--topic", topic, "--time", "earliest")
    assert earliest.split() == [f"{topic}:0:4", f"{topic}:1:0"]
    latest = said(GET_OFFSETS, bootstrap, "--topic", topic, "--time", "latest")
    assert latest.split() == [f"{topic}:0:10", f"{topic}:1:0"]


def test_the_cluster_describes_itself(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic("inspected")
    with ThreadPoolExecutor(2) as pool:
        quorum = pool.submit(said, METADATA_QUORUM, bootstrap, "describe", "--status")
        directories = pool.submit(said, LOG_DIRS, bootstrap, "--describe", "--topic-list", topic)
        cluster = pool.submit(run_tool, CLUSTER, "cluster-id", "--bootstrap-server", bootstrap)
        election = pool.submit(
            said, LEADER_ELECTION, bootstrap, "--election-type", "PREFERRED", "--all-topic-partitions"
        )
        versions = pool.submit(said, BROKER_API_VERSIONS, bootstrap)
        features = pool.submit(said, FEATURES, bootstrap, "describe")
    assert re.search(r"LeaderId:\s+1\n", quorum.result())
    found = json.loads(directories.result().splitlines()[-1])
    assert [part["partition"] for each in found["brokers"][0]["logDirs"] for part in each["partitions"]] == [
        f"{topic}-0"
    ]
    assert re.search(rb"Cluster ID: \S{22}", cluster.result().stdout)
    assert "rror" not in election.result()
    assert "Produce(0): 0 to 13 [usable: 13]" in versions.result()
    assert "Fetch(1): 4 to 18 [usable: 18]" in versions.result()
    assert re.search(r"Feature: metadata\.version\s.*FinalizedVersionLevel: 4\.3", features.result())
