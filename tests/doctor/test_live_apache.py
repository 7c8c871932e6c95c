"""The live doctor at Apache Kafka: it finds there what it finds at our broker, and says so with the same exit codes.

Apache Kafka is shared with other tests: whatever is looked at here has a name that begins with `doctor-`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client.parser import text_string_to_metric_families

from holdfast.broker.server.embed import Broker
from holdfast.doctor.exporting import FAMILIES, Exporter
from holdfast.doctor.files import Asked, examine_files
from holdfast.doctor.findings import ConfigChange, Examination
from holdfast.doctor.live import apply_fixes, changes_of, examine_cluster, judge
from holdfast.doctor.live_ask import Cluster
from holdfast.doctor.live_collect import collect

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS

TOPICS: Final[Mapping[str, Mapping[str, str]]] = {
    "doctor-orders": {"retention.ms": str(8 * DAY_MS)},
    "doctor-fleeting": {
        "retention.ms": str(12 * HOUR_MS),
        "min.insync.replicas": "2",
        "unclean.leader.election.enable": "true",
    },
    "doctor-prices": {"cleanup.policy": "compact", "delete.retention.ms": "1000"},
    "doctor-small": {"max.message.bytes": "100000"},
    "doctor-sound": {"retention.ms": "-1"},
    "doctor-grown": {},
}
EXPECTED: Final = {
    ("HF106", "producer.properties:2"),
    ("HF204", "topic doctor-fleeting"),
    ("HF304", "group doctor-billing on topic doctor-grown"),
    ("HF206", "group doctor-billing on topic doctor-orders"),
    ("HF206", "group doctor-lost on topic doctor-small"),
    ("HF206", "topic doctor-fleeting"),
    ("HF208", "producer.properties:1"),
    ("HF210", "topic doctor-prices"),
    ("HF408", "group doctor-ahead on topic doctor-sound"),
    ("HF411", "transactional id doctor-payments"),
}


@dataclass(frozen=True)
class Engine:
    server: str
    controller: str = ""
    """Where Apache Kafka's controllers listen: Kafka, and yet the wrong port. Our broker has none."""

    @property
    def settings(self) -> dict[str, str]:
        return {"bootstrap.servers": self.server}


@pytest.fixture(scope="module", params=["holdfast", pytest.param("apache", marks=pytest.mark.apache_kafka)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A broker with everything in EXPECTED, and a transaction that is open."""
    if request.param == "apache":
        kafka = request.getfixturevalue("apache_kafka")
        with troubled(kafka.bootstrap_servers):
            yield Engine(kafka.bootstrap_servers, f"{kafka.host}:{kafka.controller_port}")
        return
    with (
        Broker(str(tmp_path_factory.mktemp("broker"))) as broker,
        troubled(broker.bootstrap_servers),
    ):
        yield Engine(broker.bootstrap_servers)


@contextmanager
def troubled(server: str) -> Iterator[None]:
    """The topics, their messages and the positions of groups; within, a transaction is open."""
    admin = AdminClient({"bootstrap.servers": server})
    topics = [
        NewTopic(name, 2 if name == "doctor-grown" else 1, 1, config=dict(settings))
        for name, settings in TOPICS.items()
    ]
    for created in admin.create_topics(topics).values():
        created.result()
    now_ms = time.time_ns() // 1_000_000
    plain = Producer({"bootstrap.servers": server, "linger.ms": 0})
    for days in (6, 5, 1, 0):
        plain.produce("doctor-orders", b"x", partition=0, timestamp=now_ms - days * DAY_MS)
        assert plain.flush(30) == 0  # one by one: each in a batch of its own
    for name in ("doctor-fleeting", "doctor-small", "doctor-small", "doctor-sound"):
        plain.produce(name, b"x", partition=0)
    plain.produce("doctor-grown", b"x", partition=1)
    assert plain.flush(30) == 0
    (cut,) = admin.delete_records([TopicPartition("doctor-small", 0, 2)]).values()
    cut.result()
    commit(server, "doctor-billing", "doctor-orders", 1)
    commit(server, "doctor-billing", "doctor-grown", 0)  # as if its second partition had come later
    commit(server, "doctor-late", "doctor-fleeting", 0)
    commit(server, "doctor-lost", "doctor-small", 0)
    commit(server, "doctor-ahead", "doctor-sound", 99)
    settings = {"transactional.id": "doctor-payments", "transaction.timeout.ms": 600_000}
    holder = Producer({"bootstrap.servers": server, **settings})
    holder.init_transactions(60)
    holder.begin_transaction()
    holder.produce("doctor-sound", b"x", partition=0)
    assert holder.flush(30) == 0
    try:
        yield
    finally:
        holder.abort_transaction(60)
        for deleted in admin.delete_topics(list(TOPICS)).values():
            deleted.result()


def commit(server: str, group: str, topic: str, position: int) -> None:
    consumer = Consumer({"bootstrap.servers": server, "group.id": group, "enable.auto.commit": False})
    consumer.commit(offsets=[TopicPartition(topic, 0, position)], asynchronous=False)
    consumer.close()


@pytest.fixture
def producer_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Settings that are wrong for topics of the cluster."""
    monkeypatch.chdir(tmp_path)
    Path("producer.properties").write_text("max.request.size=200000\nenable.idempotence=false\nacks=all\n")
    return "producer.properties"


def in_half_an_hour() -> int:
    return time.time_ns() // 1_000_000 + HOUR_MS // 2


def ours(examination: Examination) -> set[tuple[str, str]]:
    """What is said about these tests' own things."""
    told = {(found.id, found.where) for found in examination.findings}
    return {(risk, where) for risk, where in told if "doctor-" in where or "producer.properties" in where}


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast.cli", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_findings_are_the_same_on_both(engine: Engine, producer_file: str) -> None:
    clients = examine_files(Asked([producer_file])).clients
    examination = examine_cluster(engine.settings, clients=clients, now_ms=in_half_an_hour)
    assert ours(examination) == EXPECTED
    assert examination.complete, examination.gaps
    words = {found.where: found.found for found in examination.findings}
    assert "retention passes it in 2 d 23 h" in words["group doctor-billing on topic doctor-orders"]
    assert "2 removed unread" in words["group doctor-lost on topic doctor-small"]
    assert "doctor-sound-0" in words["transactional id doctor-payments"]


def test_the_command_exits_as_documented(engine: Engine, producer_file: str, tmp_path: Path) -> None:
    live = ("--bootstrap-server", engine.server, "--group", "doctor-billing", "--output", "json")
    history = tmp_path / "looks.jsonl"
    result = doctor(*live, "--producer", producer_file, "--history", str(history))
    assert result.returncode == 1, result.stderr
    document = json.loads(result.stdout)
    told = {(each["id"], each["where"]) for each in document["findings"]}
    assert ("HF206", "group doctor-billing on topic doctor-orders") in told
    assert ("HF208", "producer.properties:1") in told
    assert document["complete"]
    (look,) = [json.loads(line) for line in history.read_text().splitlines()]
    assert look["groups"] == {"doctor-billing": {"doctor-orders": {"0": 1}, "doctor-grown": {"0": 0}}}


def test_a_group_that_is_not_there_is_named(engine: Engine) -> None:
    (gap,) = examine_cluster(engine.settings, groups=["doctor-nobody"]).gaps
    assert "doctor-nobody" in gap.what


def test_a_fix_is_made_when_it_is_applied(engine: Engine) -> None:
    # Only this topic's: others share the cluster.
    (change,) = changes_of_prices(engine)
    assert change == ConfigChange("topic", "doctor-prices", "delete.retention.ms", str(DAY_MS))
    assert apply_fixes(engine.settings, [change]) == [(change, None)]
    assert changes_of_prices(engine) == []
    back = ConfigChange("topic", "doctor-prices", "delete.retention.ms", "1000")
    assert apply_fixes(engine.settings, [back]) == [(back, None)]
    for refused in (
        ConfigChange("topic", "doctor-nowhere", "retention.ms", "1"),
        ConfigChange("topic", "doctor-prices", "retention.ms", "soon"),
    ):
        ((_, why),) = apply_fixes(engine.settings, [refused])
        assert why


def changes_of_prices(engine: Engine) -> list[ConfigChange]:
    found = examine_cluster(engine.settings).findings
    return [each for each in changes_of(found) if each.resource_name == "doctor-prices"]


def test_a_group_that_stands_still_is_told_from_two_looks(engine: Engine, tmp_path: Path) -> None:
    history = str(tmp_path / "looks.jsonl")
    before_ms = time.time_ns() // 1_000_000 - HOUR_MS
    examine_cluster(engine.settings, groups=["doctor-late"], history=history, now_ms=lambda: before_ms)
    producer = Producer({"bootstrap.servers": engine.server})
    producer.produce("doctor-fleeting", b"x", partition=0)
    assert producer.flush(30) == 0
    second = examine_cluster(engine.settings, groups=["doctor-late"], history=history)
    (stalled,) = [found for found in second.findings if "while the log grew" in found.found]
    assert (stalled.id, stalled.where) == ("HF206", "group doctor-late on topic doctor-fleeting")


class Dying(Cluster):
    """A cluster whose brokers are gone as soon as they have said where they are."""

    def metadata(self, topics: Iterable[str] | None, *, lowest: int = 1) -> Any:
        answer = super().metadata(topics, lowest=lowest)
        self._addresses = dict.fromkeys(self._addresses, ("127.0.0.1", 1))
        return answer


def test_a_cluster_that_dies_half_way_is_judged_by_what_it_said(engine: Engine) -> None:
    with Dying(engine.settings) as cluster:
        snapshot = collect(cluster, (), in_half_an_hour)
    examination = judge(snapshot)
    assert ("HF204", "topic doctor-fleeting") in ours(examination)
    assert not [found for found in examination.findings if found.id in ("HF408", "HF411")]
    assert not examination.complete
    assert {gap.kind for gap in examination.gaps} == {"connection"}
    missed = " ".join(gap.what for gap in examination.gaps)
    for what in ("settings of brokers", "groups", "offsets of partitions", "transactions"):
        assert what in missed


@pytest.mark.parametrize("engine", [pytest.param("apache", marks=pytest.mark.apache_kafka)], indirect=True)
def test_the_port_of_a_controller_is_exit_code_3(engine: Engine) -> None:
    result = doctor("--bootstrap-server", engine.controller)
    assert result.returncode == 3
    assert engine.controller in result.stderr


def test_the_exporter_shows_both_alike(engine: Engine) -> None:
    exporter = Exporter(engine.settings, lambda: in_half_an_hour() / 1000)
    exporter.look()
    found = {
        (
            sample.name,
            *(value for label, value in sorted(sample.labels.items()) if label != "id"),
        ): sample.value
        for family in text_string_to_metric_families(exporter.text())
        for sample in family.samples
    }
    assert found["holdfast_exporter_up",] == found["kafka_brokers",] == 1
    assert found["holdfast_exporter_gaps",] == 0
    orders = ("0", "doctor-orders")
    assert found["kafka_topic_partition_current_offset", *orders] == 4
    assert found["kafka_topic_partition_oldest_offset", *orders] == 0
    assert found["kafka_topic_partition_in_sync_replica", *orders] == 1
    assert found["kafka_consumergroup_lag", "doctor-billing", *orders] == 3
    assert found["kafka_consumergroup_lag_sum", "doctor-billing", "doctor-orders"] == 3
    assert found["kafka_consumergroup_members", "doctor-billing"] == 0
    left_s = found["holdfast_consumergroup_seconds_to_loss", "doctor-billing", "doctor-orders"]
    assert 2 * DAY_MS < left_s * 1000 < 3 * DAY_MS
    # Half of the twelve hours: more than that is left.
    assert found["holdfast_consumergroup_seconds_to_loss", "doctor-late", "doctor-fleeting"] == 6 * 3600
    outside = "holdfast_consumergroup_outside_log_offsets"
    assert found[outside, "doctor-lost", "0", "doctor-small", "before"] == 2
    assert found[outside, "doctor-ahead", "0", "doctor-sound", "behind"] >= 96
    assert found["holdfast_open_transactions",] >= 1
    assert found["holdfast_open_transaction_oldest_seconds",] > 1700
    assert found["holdfast_late_transactions",] >= 1
    assert found["holdfast_partition_last_stable_offset", "0", "doctor-sound"] == 1
    hanging = {
        "holdfast_hanging_transactions"
    }  # none of this scene; other tests on the same Kafka may leave one
    assert {name for name, *_ in found} - hanging == set(FAMILIES) - hanging


def test_the_exporter_command_serves_until_it_is_stopped(engine: Engine) -> None:
    command = (sys.executable, "-m", "holdfast.cli", "exporter", "--bootstrap-server", engine.server)
    with subprocess.Popen([*command, "--listen", "0"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            url = line.partition(" at ")[2].strip()
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert b"holdfast_exporter_up 1" in answer.read()
        finally:
            process.terminate()


def test_the_exporter_counts_how_long_a_group_has_no_member_and_shows_nothing_of_one_that_is_gone(
    engine: Engine,
) -> None:
    now_s = 1_000_000.0
    exporter = Exporter(engine.settings, lambda: now_s)
    exporter.look()
    now_s += 90
    exporter.look()
    series = 'holdfast_consumergroup_without_member_seconds{consumergroup="doctor-billing"}'
    assert f"{series} 90\n" in exporter.text()
    gone = Exporter({"bootstrap.servers": "127.0.0.1:1"})
    gone.look()
    assert "holdfast_exporter_up 0\n" in gone.text()
    assert "kafka_" not in gone.text()
