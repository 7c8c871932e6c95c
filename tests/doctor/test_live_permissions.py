"""The doctor as somebody who may not see everything, at an Apache Kafka that asks who one is.

One broker for all of these: StandardAuthorizer, and a listener with SASL/PLAIN. Whoever comes without a name is a
super user, and sets it up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from holdfast.testing.apache import SHORT_LIVED_JVM, ApacheKafka
from holdfast.testing.kafka_fixtures import COORDINATORS, HEAP_OPTIONS, require_apache_kafka
from holdfast.testing.processes import free_ports

pytestmark = [pytest.mark.java, pytest.mark.xdist_group("test_live_permissions")]

USERS: Final = ("root", "auditor", "operator", "reader", "nobody")
"""`auditor` may look at everything, `operator` at the cluster and one topic, `reader` at one topic and its group."""
SOUND: Final = {"retention.ms": "-1", "min.insync.replicas": "1"}
RIGHTS: Final = (
    ("auditor", ResourceType.TOPIC, "*", AclOperation.DESCRIBE),
    ("auditor", ResourceType.TOPIC, "*", AclOperation.DESCRIBE_CONFIGS),
    ("auditor", ResourceType.TOPIC, "*", AclOperation.READ),
    ("auditor", ResourceType.GROUP, "*", AclOperation.DESCRIBE),
    ("auditor", ResourceType.TRANSACTIONAL_ID, "*", AclOperation.DESCRIBE),
    ("auditor", ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE),
    ("auditor", ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE_CONFIGS),
    ("operator", ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE),
    ("operator", ResourceType.TOPIC, "orders", AclOperation.DESCRIBE),
    ("reader", ResourceType.TOPIC, "orders", AclOperation.DESCRIBE),
    ("reader", ResourceType.TOPIC, "orders", AclOperation.READ),
    ("reader", ResourceType.GROUP, "billing", AclOperation.READ),
)


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[str, str]]:
    """Where everybody is a super user, and where one says who one is."""
    port, controller_port, named_port = free_ports(3)
    users = " ".join(f'user_{name}="{name}-secret"' for name in USERS)
    listeners = f"PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{named_port}"
    properties = {
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"{listeners},CONTROLLER://127.0.0.1:{controller_port}",
        "listener.security.protocol.map": (
            "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT"
        ),
        "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller_port}",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": (
            f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"
        ),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:root",
    }
    require_apache_kafka()
    kafka = ApacheKafka(
        {**COORDINATORS, **properties}, heap_options=HEAP_OPTIONS, jvm_options=SHORT_LIVED_JVM
    )
    kafka.port, kafka.controller_port = port, controller_port
    with kafka:
        set_up(kafka.bootstrap_servers)
        yield kafka.bootstrap_servers, f"127.0.0.1:{named_port}"


def set_up(server: str) -> None:
    admin = AdminClient({"bootstrap.servers": server})
    topics = [NewTopic("orders", 1, 1, config=SOUND), NewTopic("payroll", 1, 1, config=SOUND)]
    acls = [
        AclBinding(
            kind,
            name,
            ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for user, kind, name, operation in RIGHTS
    ]
    for made in (*admin.create_topics(topics).values(), *admin.create_acls(acls).values()):
        made.result(60)
    producer = Producer({"bootstrap.servers": server})
    for topic in ("orders", "payroll"):
        producer.produce(topic, b"x")
    assert producer.flush(30) == 0
    for group, topic in (("billing", "orders"), ("salaries", "payroll")):
        consumer = Consumer({"bootstrap.servers": server, "group.id": group})
        consumer.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
        consumer.close()


def examined_by(user: str, guarded: tuple[str, str], directory: Path, *flags: str) -> tuple[int, Any]:
    """Exit code, and what was said."""
    config = directory / f"{user}.properties"
    config.write_text(
        "security.protocol=SASL_PLAINTEXT\n"
        "sasl.mechanism=PLAIN\n"
        "sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required "
        f'username="{user}" password="{user}-secret";\n'
    )
    command = [sys.executable, "-m", "holdfast.cli", "doctor", "--bootstrap-server", guarded[1]]
    command += ["--command-config", str(config), "--output", "json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def gaps(document: Any) -> set[tuple[str, str]]:
    """What may not be seen: the kind of thing, and its name."""
    assert {each["kind"] for each in document["notExamined"]} <= {"permission"}
    parted = (each["what"].partition(": ") for each in document["notExamined"])
    return {(kind, name) for kind, _, names in parted for name in names.split(", ")}


UNSEEN: Final = {(what, "those that may not be seen") for what in ("topics", "groups", "transactions")}


@pytest.mark.parametrize("user", ["root", "auditor"])
def test_a_clean_cluster_that_may_be_seen_whole_is_exit_code_0(
    user: str, guarded: tuple[str, str], tmp_path: Path
) -> None:
    code, document = examined_by(user, guarded, tmp_path)
    assert (code, document["notExamined"], document["complete"]) == (0, [], True)
    # One broker is no cluster, and where its power comes from nobody knows: notes, and no more.
    assert {each["severity"] for each in document["findings"]} == {"note"}
    (words,) = document["examined"]
    assert "1 broker: 3 topics, 5 partitions, 2 groups" in words


def test_a_finding_is_exit_code_1_for_who_sees_everything_and_for_who_does_not(
    guarded: tuple[str, str], tmp_path: Path
) -> None:
    producer = tmp_path / "producer.properties"
    producer.write_text("acks=1\nenable.idempotence=false\n")
    for user, complete in (("auditor", True), ("reader", False)):
        code, document = examined_by(user, guarded, tmp_path, "--producer", str(producer))
        assert code == 1
        assert "HF102" in {each["id"] for each in document["findings"]}
        assert document["complete"] is complete


def test_what_was_not_seen_is_named_and_the_rest_is_examined(
    guarded: tuple[str, str], tmp_path: Path
) -> None:
    code, document = examined_by("reader", guarded, tmp_path)
    assert code == 4
    assert not document["complete"]
    assert gaps(document) == UNSEEN | {
        ("settings of brokers", "broker 1"),
        ("settings of topics", "orders"),
    }
    (words,) = document["examined"]
    assert "1 broker: 1 topic, 1 partition, 1 group, in part" in words


def test_topics_that_are_left_out_are_named_to_who_may_describe_the_cluster(
    guarded: tuple[str, str], tmp_path: Path
) -> None:
    code, document = examined_by("operator", guarded, tmp_path)
    assert code == 4
    assert gaps(document) == {
        ("topics", "__consumer_offsets"),
        ("topics", "payroll"),
        ("committed offsets of groups", "billing"),
        ("committed offsets of groups", "salaries"),
        ("settings of brokers", "broker 1"),
        ("settings of topics", "orders"),
    }


def test_without_any_right_nothing_is_taken_for_clean(guarded: tuple[str, str], tmp_path: Path) -> None:
    code, document = examined_by("nobody", guarded, tmp_path, "--group", "billing")
    assert code == 4
    assert gaps(document) == UNSEEN | {("settings of brokers", "broker 1"), ("groups", "billing")}
    (words,) = document["examined"]
    assert "0 topics, 0 partitions, 0 groups, in part" in words


def test_somebody_who_is_not_who_he_says_is_exit_code_3(guarded: tuple[str, str], tmp_path: Path) -> None:
    code, said = examined_by("stranger", guarded, tmp_path)
    assert code == 3
    assert guarded[1] in said
