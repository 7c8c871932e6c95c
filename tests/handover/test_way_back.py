"""`holdfast serve` on the directory of a single Apache Kafka node, and Kafka on ours again: clients see no change."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)
from tests.support import prepared
from tests.support.whole_cluster import WholeCluster, assert_same, seen_by_clients

from holdfast.broker.log.scan import read_batches
from holdfast.broker.metadata.image import UNENFORCED
from holdfast.broker.node.metadata_log import Quorum, encode_snapshot, load_image, readable_batches
from holdfast.real import RealFileSystem
from holdfast.seams import Now
from holdfast.testing.apache import CONFIGS, SHORT_LIVED_JVM, ApacheKafka, run_tool
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import wait_until
from holdfast.testing.kafka_fixtures import COORDINATORS, HEAP_OPTIONS, require_apache_kafka
from holdfast.testing.processes import free_ports
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import (
    ALTER_CLIENT_QUOTAS,
    DESCRIBE_CLIENT_QUOTAS,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
)
from holdfast.wire.batch import parse_records, records_bytes
from holdfast.wire.metadata_records import decode_metadata_record

pytestmark = pytest.mark.java

FS = RealFileSystem()
OFTEN = {"metadata_log_max_record_bytes_between_snapshots": "4000"}
"""Snapshots of the metadata log come after a few changes."""
CREATE_DELEGATION_TOKEN, DESCRIBE_DELEGATION_TOKEN = 38, 41
ACL = AclBinding(
    ResourceType.TOPIC,
    "segments",
    ResourcePatternType.LITERAL,
    "User:somebody",
    "*",
    AclOperation.READ,
    AclPermissionType.ALLOW,
)


def content(directories: tuple[Path, ...]) -> dict[Path, tuple[int, int]]:
    """Size and time of every file but the locks."""
    files = [path for directory in directories for path in directory.rglob("*") if path.name != ".lock"]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def kafka_on(directory: Path, *data: Path, **properties: str) -> ApacheKafka:
    require_apache_kafka()
    # It waits for the session of a broker that was killed, and gives up registering after a minute by default.
    waits = {"broker.session.timeout.ms": "15000", "initial.broker.registration.timeout.ms": "180000"}
    settings = {**COORDINATORS, **waits, "log.dirs": ",".join(map(str, data))}
    settings |= {name.replace("_", "."): value for name, value in properties.items()}
    return ApacheKafka(
        settings,
        directory=directory,
        data_dir=data[0],
        heap_options=HEAP_OPTIONS,
        jvm_options=SHORT_LIVED_JVM,
    )


def holdfast_on(directory: Path, *data: Path, arguments: tuple[str, ...] = ()) -> BrokerProcess:
    broker = BrokerProcess(",".join(map(str, data)), settings=COORDINATORS, arguments=arguments)
    broker.log_path = str(directory / "holdfast.log")
    return broker


UNENFORCED_WORDS = {
    "acls": "1 access control entries, which nobody would enforce",
    "quotas": "1 client quotas, which nobody would enforce",
    "scram": "1 SCRAM credentials, which nobody would enforce",
    "tokens": "1 delegation tokens, which nobody would enforce",
}


@dataclass
class Guarded:
    """An Apache Kafka with an authorizer, a listener for users with passwords, and tokens."""

    kafka: ApacheKafka
    users_address: str

    def add_rules(self) -> None:
        """One of each kind that holdfast keeps and does not enforce."""
        cluster = WholeCluster(self.kafka.bootstrap_servers)
        cluster.add_user()
        (added,) = cluster.admin.create_acls([ACL]).values()
        added.result(60)
        quota = {
            "entity": [{"entity_type": "user", "entity_name": "somebody"}],
            "ops": [{"key": "producer_byte_rate", "value": 12_345.0, "remove": False}],
        }
        with WireClient(self.kafka.bootstrap_servers) as client:
            answer = client.ask(ALTER_CLIENT_QUOTAS, 0, {"entries": [quota], "validate_only": False})
            assert [int(each.error_code) for each in answer.entries] == [0]
        renewers = [{"principal_type": "User", "principal_name": "other"}]
        assert self._as_admin(CREATE_DELEGATION_TOKEN, {"renewers": renewers}).error_code == 0

    def rules(self) -> dict[str, Any]:
        """What clients are told of them."""
        cluster = WholeCluster(self.kafka.bootstrap_servers)
        wanted = (ResourceType.TOPIC, "segments", ResourcePatternType.LITERAL, "User:somebody", "*")
        asked = AclBindingFilter(*wanted, AclOperation.ANY, AclPermissionType.ANY)
        with WireClient(self.kafka.bootstrap_servers) as client:
            quotas = client.ask(DESCRIBE_CLIENT_QUOTAS, 0, {"components": [], "strict": False})
        tokens = self._as_admin(DESCRIBE_DELEGATION_TOKEN, {"owners": None}).tokens
        return {
            "acls": [str(each) for each in cluster.admin.describe_acls(asked).result(60)],
            "scram": cluster.users(),
            "quotas": quotas.entries,
            "tokens": [(each.token_id, each.hmac, each.max_timestamp, each.renewers) for each in tokens],
        }

    def rules_if_all(self) -> dict[str, Any] | None:
        found = self.rules()
        return found if all(found.values()) else None

    def _as_admin(self, api_key: int, fields: dict[str, Any]) -> Any:
        with WireClient(self.users_address) as client:
            assert client.ask(SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"}).error_code == 0
            assert client.ask(SASL_AUTHENTICATE, 1, {"auth_bytes": b"\0admin\0secret"}).error_code == 0
            return client.ask(api_key, 1, fields)


def guarded_kafka_on(directory: Path, *data: Path) -> Guarded:
    clients, controller, users = free_ports(3)
    listeners = (
        f"PLAINTEXT://127.0.0.1:{clients},SASL://127.0.0.1:{users},CONTROLLER://127.0.0.1:{controller}"
    )
    kafka = kafka_on(directory, *data, **OFTEN)
    kafka.port, kafka.controller_port = clients, controller
    kafka.properties |= {
        "listeners": listeners,
        "advertised.listeners": listeners,
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule "
        'required user_admin="secret";',
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:admin",
        "delegation.token.secret.key": "a secret of the brokers",
    }
    return Guarded(kafka, f"127.0.0.1:{users}")


def share_some(server: str) -> str:
    """A share group, which holdfast does not serve, has taken some records; what Kafka says of it."""
    at = ("--bootstrap-server", server)
    earliest = ("--add-config", "share.auto.offset.reset=earliest")
    run_tool(CONFIGS, *at, "--alter", "--entity-type", "groups", "--entity-name", "shared", *earliest)
    few = ("--topic", "codec-none", "--group", "shared", "--max-messages", "7", "--timeout-ms", "60000")
    run_tool("org.apache.kafka.tools.consumer.ConsoleShareConsumer", *at, *few)
    found = share_groups(server)
    assert "codec-none" in found
    return found


def share_groups(server: str) -> str:
    command = "org.apache.kafka.tools.consumer.group.ShareGroupCommand"
    return run_tool(command, "--bootstrap-server", server, "--describe", "--all-groups").stdout.decode()


def kept_records(directory: Path, pattern: str) -> dict[str, set[bytes]]:
    """The bytes of every record of such a rule in files of the metadata log, by kind."""
    found: dict[str, set[bytes]] = {kind: set() for kind in UNENFORCED.values()}
    for path in (directory / "__cluster_metadata-0").glob(pattern):
        with closing(FS.open(str(path), "read")) as file:
            for batch in read_batches(file, file.size()):
                for record in parse_records(records_bytes(batch.data, batch.header)):
                    if not batch.header.is_control and record.value is not None:
                        kind = UNENFORCED.get(type(decode_metadata_record(record.value)))
                        if kind is not None:
                            found[kind].add(bytes(record.value))
    return found


def newest_snapshot(directory: Path) -> str:
    return max(each.name for each in (directory / "__cluster_metadata-0").glob("*.checkpoint"))


@pytest.mark.long
@pytest.mark.parametrize("ending", ["clean", "killed"])
def test_everything_is_there_on_the_way_back_and_there_again(tmp_path: Path, ending: str) -> None:
    data = (tmp_path / "one", tmp_path / "two")
    paths = [str(each) for each in data]
    guarded = guarded_kafka_on(tmp_path / "kafka", *data)
    kafka = guarded.kafka
    with kafka:
        filled = WholeCluster(kafka.bootstrap_servers)
        filled.fill()
        guarded.add_rules()
        shared = share_some(kafka.bootstrap_servers)
        rules = wait_until(guarded.rules_if_all, "the broker knows of every rule")
        expected = seen_by_clients(kafka.bootstrap_servers)
        undecided = prepared.open_transactions(kafka.bootstrap_servers, "decided-by-kafka")
        if ending == "clean":
            kafka.stop()
    assert int(newest_snapshot(data[0])[:20]), "Kafka has made no snapshot"
    prepared.decide(paths)
    written = kept_records(data[0], "*.log")
    assert all(written.values())
    refused = holdfast_on(tmp_path, *data, arguments=("--serve-unenforced", "scram"))
    before = content(data)
    assert refused.begin_start().wait() == 2
    for kind in UNENFORCED_WORDS.keys() - {"scram"}:
        assert refused.has_said(f"{UNENFORCED_WORDS[kind]}.*--serve-unenforced={kind}")
    assert UNENFORCED_WORDS["scram"] not in refused.log()
    assert content(data) == before
    accepted = tuple(part for kind in UNENFORCED_WORDS for part in ("--serve-unenforced", kind))
    with holdfast_on(tmp_path, *data, arguments=accepted) as broker:
        prepared.assert_carried_out(broker.bootstrap_servers, "decided-by-kafka")
        again = WholeCluster(broker.bootstrap_servers)
        again.admin.delete_topics(["decided-by-kafka"])["decided-by-kafka"].result(60)
        seen = seen_by_clients(broker.bootstrap_servers)
        for decision in prepared.DECISIONS:
            seen["groups"].pop(decision.transactional_id, None)
        assert_same(seen, expected)
        again.create("made-here")
        again.send("made-here", 10)
        again.send("compacted", 10, 50)
        expected = seen_by_clients(broker.bootstrap_servers)
        if ending == "clean":
            assert broker.stop() == 0
        else:
            broker.crash()
    metadata = str(data[0] / "__cluster_metadata-0")
    quorum = Quorum()
    image = load_image(FS, metadata, readable_batches(FS, metadata), quorum)
    snapshot = tmp_path / "snapshot" / "__cluster_metadata-0" / "of-holdfast.checkpoint"
    snapshot.parent.mkdir(parents=True)
    snapshot.write_bytes(encode_snapshot(image, image.last_epoch, Now(0, 0), quorum))
    assert kept_records(tmp_path / "snapshot", snapshot.name) == written, "a snapshot has other bytes"
    del undecided
    with kafka:
        seen = seen_by_clients(kafka.bootstrap_servers, expected)
        for decision in prepared.DECISIONS:
            for each in (seen, expected):
                each["groups"].pop(decision.transactional_id, None)
        assert_same(seen, expected)
        assert wait_until(guarded.rules_if_all, "Kafka knows of every rule") == rules
        assert share_groups(kafka.bootstrap_servers) == shared


@pytest.mark.long
def test_kafka_started_by_mistake_beside_us_takes_nothing_away(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with holdfast_on(tmp_path, data) as broker:
        cluster = WholeCluster(broker.bootstrap_servers)
        cluster.create("before")
        cluster.send("before", 100)
        kafka = kafka_on(tmp_path / "kafka", data)
        # Without voters in the log a dynamic quorum never elects anybody.
        kafka.prepare()
        kafka.properties["controller.quorum.voters"] = f"1@127.0.0.1:{kafka.controller_port}"
        kafka.properties["controller.quorum.bootstrap.servers"] = ""
        kafka.prepare()
        kafka.launch()
        made = ["before"]
        with pytest.raises(KafkaException):
            # As long as it goes on, topics are made: what Kafka writes over must come back.
            for number in range(100_000):
                topic = NewTopic(f"made-{number}", 1, 1)
                cluster.admin.create_topics([topic], request_timeout=10)[topic.topic].result(20)
                made.append(topic.topic)
        assert broker.wait() == 1
        assert broker.has_said("Apache Kafka was probably started on this directory")
        deadline = time.monotonic() + 60
        while kafka.running and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "Failed to acquire lock" in kafka.log_file.read_text(encoding="utf-8")
        kafka.kill()
    with holdfast_on(tmp_path, data) as broker:
        seen = seen_by_clients(broker.bootstrap_servers)
        assert set(made) <= set(seen["topics"])
        assert len([row for row in seen["committed"] if row[0] == "before"]) == 100


@pytest.mark.long
def test_what_kafka_has_compacted_and_deleted_is_no_loss(tmp_path: Path) -> None:
    data = tmp_path / "data"
    kafka = kafka_on(
        tmp_path / "kafka",
        data,
        log_cleaner_backoff_ms="100",
        log_retention_check_interval_ms="200",
        log_initial_task_delay_ms="0",
    )
    with kafka:
        cluster = WholeCluster(kafka.bootstrap_servers)
        compaction = {"cleanup_policy": "compact", "segment_ms": "100", "min_cleanable_dirty_ratio": "0.01"}
        cluster.create("compacted", 1, max_compaction_lag_ms="100", **compaction)
        cluster.create(
            "deleted", 1, retention_bytes="1000", segment_bytes=str(1 << 20), file_delete_delay_ms="0"
        )
        for first in range(0, 30_000, 5000):
            cluster.send("compacted", 500, first)
            cluster.send("deleted", 5000, first)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            cluster.send("compacted", 1, 40_000)  # a segment is cleaned once a later one has begun
            expected = seen_by_clients(kafka.bootstrap_servers)
            kept = [row for row in expected["committed"] if row[0] == "compacted"]
            if expected["starts"]["deleted-0"] > 0 and len(kept) < 1000:
                break
            time.sleep(0.5)
        assert expected["starts"]["deleted-0"] > 0
        assert len(kept) < 1000
        kafka.kill()
    with holdfast_on(tmp_path, data) as broker:
        seen = seen_by_clients(broker.bootstrap_servers)
        # Kafka may have cleaned once more before it was killed.
        for topic in ("compacted", "deleted"):
            known = [row for row in expected["committed"] if row[0] == topic]
            found = [row for row in seen["committed"] if row[0] == topic]
            assert set(found) <= set(known)
            assert found[-1:] == known[-1:]
        assert seen["ends"] == expected["ends"]
        assert "offline" not in broker.log()
