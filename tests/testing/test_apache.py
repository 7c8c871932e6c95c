"""The harness around Apache Kafka: what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from holdfast.testing import apache
from holdfast.testing.apache import (
    SHORT_LIVED_JVM,
    ApacheKafka,
    ApacheKafkaFailed,
    ApacheKafkaUnavailable,
    broker_answers,
    run_tool,
)
from holdfast.testing.kafka_fixtures import HEAP_OPTIONS
from holdfast.testing.processes import free_ports


@pytest.fixture
def jars() -> Path:
    try:
        return apache.jars()
    except ApacheKafkaUnavailable as missing:
        pytest.skip(str(missing))


def test_missing_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ApacheKafkaUnavailable, match="needs a Java runtime"):
        apache.java_executable()


def test_nothing_is_fetched_where_that_is_forbidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_OFFLINE", "1")
    with pytest.raises(ApacheKafkaUnavailable, match="make setup"):
        apache._download(tmp_path / "jars", {})


def test_missing_maven_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOLDFAST_OFFLINE")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ApacheKafkaUnavailable, match="'mvn' is not on the PATH"):
        apache._download(tmp_path / "jars", {})


def test_a_jar_that_differs_from_its_committed_sum_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jar").write_bytes(b"genuine")
    expected = {"a.jar": "f57ac4e4cf6a54c7b6d7c1b5a7b7a4d6d5c2e0d8a7f3a6a6ec9ad6b7a7d5f8e1"}
    assert apache._integrity_problem(tmp_path, expected) == "a.jar has another SHA-256 than the committed one"


def test_missing_and_surplus_jars_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.jar").write_bytes(b"")
    problem = apache._integrity_problem(tmp_path, {"a.jar": "00"})
    assert problem == "missing ['a.jar'], not expected ['b.jar']"


@pytest.mark.java
@pytest.mark.long
@pytest.mark.interop
@pytest.mark.usefixtures("jars")
def test_a_broker_serves_survives_a_kill_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with ApacheKafka(
        directory=tmp_path / "kafka", heap_options=HEAP_OPTIONS, jvm_options=SHORT_LIVED_JVM
    ) as kafka:
        servers = ("--bootstrap-server", kafka.bootstrap_servers)
        run_tool(apache.TOPICS, *servers, "--create", "--topic", "kept")
        first = kafka.pid
        kafka.restart(clean=False)
        assert kafka.pid != first
        assert b"kept" in run_tool(apache.TOPICS, *servers, "--list").stdout
        second = kafka.pid
    assert not kafka.running
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (first, second))


@pytest.mark.java
@pytest.mark.check
@pytest.mark.interop
@pytest.mark.usefixtures("jars")
def test_a_broker_that_cannot_start_quotes_its_log(tmp_path: Path) -> None:
    kafka = ApacheKafka({"log.segment.bytes": "1"}, directory=tmp_path / "kafka")
    with pytest.raises(ApacheKafkaFailed, match=r"log\.segment\.bytes"):
        kafka.start()
    assert not kafka.running


@pytest.mark.java
@pytest.mark.long
@pytest.mark.interop
@pytest.mark.usefixtures("jars")
def test_a_port_that_another_took_meanwhile_is_given_up_for_a_free_one(tmp_path: Path) -> None:
    kafka = ApacheKafka(directory=tmp_path / "kafka")
    kafka.prepare()
    with socket.create_server((kafka.host, kafka.port)) as taken, kafka:
        assert kafka.port != taken.getsockname()[1]
        assert broker_answers(kafka.host, kafka.port)


def test_free_ports_are_given_to_nobody_else_and_can_be_listened_on() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with pytest.raises(OSError, match="in use"), socket.socket() as without_reuse:
            without_reuse.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()
