"""`holdfast doctor --bootstrap-server`: flags, exit codes, and changes only after a yes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

Result = subprocess.CompletedProcess[str]


def doctor(*arguments: str, stdin: str = "") -> Result:
    command = [sys.executable, "-m", "holdfast.cli", "doctor", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def server(holdfast_broker: Any) -> str:
    """A broker with a compacted topic that forgets deletions after a second."""
    servers = str(holdfast_broker.bootstrap_servers)
    settings = {"cleanup.policy": "compact", "delete.retention.ms": "1000"}
    admin = AdminClient({"bootstrap.servers": servers})
    (created,) = admin.create_topics([NewTopic("orders", 1, 1, config=settings)]).values()
    created.result()
    return servers


def delete_retention_ms(server: str) -> str | None:
    admin = AdminClient({"bootstrap.servers": server})
    (future,) = admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, "orders")]).values()
    value: str | None = future.result()["delete.retention.ms"].value
    return value


def test_findings_of_a_cluster_are_reported_with_commands_that_reach_it(server: str, tmp_path: Path) -> None:
    history = tmp_path / "looks.jsonl"
    result = doctor("--bootstrap-server", server, "--output", "json", "--history", str(history))
    assert result.returncode == 1, result.stderr
    document = json.loads(result.stdout)
    (found,) = [each for each in document["findings"] if each["id"] == "HF210"]
    assert found["where"] == "topic orders"
    assert found["fix"]["text"].endswith(f"delete.retention.ms=86400000 --bootstrap-server {server}")
    assert document["complete"]
    assert len(history.read_text().splitlines()) == 1


@pytest.mark.parametrize("answer", ["n\n", ""], ids=["no", "nobody to ask"])
def test_nothing_is_changed_without_a_yes(server: str, answer: str) -> None:
    result = doctor("--bootstrap-server", server, "--fix", "--apply", stdin=answer)
    assert "nothing was changed" in result.stderr
    assert "holdfast configs alter --topic orders" in result.stdout
    assert delete_retention_ms(server) == "1000"


def test_a_yes_changes_the_settings_and_accepted_findings_are_left_alone(server: str, tmp_path: Path) -> None:
    accepted = tmp_path / "accepted.yaml"
    accepted.write_text(
        "suppressions: [{id: HF210, where: topic orders, reason: tried, expires: 2999-01-01}]\n"
    )
    doctor("--bootstrap-server", server, "--apply", "--yes", "--suppressions", str(accepted))
    assert delete_retention_ms(server) == "1000"
    result = doctor("--bootstrap-server", server, "--apply", stdin="y\n")
    assert "changed delete.retention.ms=86400000 of topic orders" in result.stderr
    assert delete_retention_ms(server) == "86400000"


def test_nobody_there_is_exit_code_3() -> None:
    result = doctor("--bootstrap-server", "127.0.0.1:1", "--connect-timeout-ms", "500")
    assert result.returncode == 3
    assert "127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [["--group", "billing"], ["--history", "x"], ["--watch", "1"], ["--apply"], ["--yes"]],
    ids=lambda flags: flags[0],
)
def test_a_flag_about_a_cluster_needs_one(flags: list[str]) -> None:
    result = doctor(*flags)
    assert result.returncode == 2
    assert flags[0] in result.stderr


def test_a_watch_looks_again_until_it_is_interrupted_and_outlasts_the_cluster(holdfast_broker: Any) -> None:
    arguments = [
        "--bootstrap-server",
        holdfast_broker.bootstrap_servers,
        "--watch",
        "0.1",
        "--output",
        "json",
    ]
    command = [sys.executable, "-m", "holdfast.cli", "doctor", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        try:
            assert documents_until(watch.stdout, lambda each: "earlier look" in str(each["examined"]))
            holdfast_broker.stop()
            assert documents_until(watch.stdout, lambda each: "the cluster" in str(each["notExamined"]))
            watch.send_signal(signal.SIGINT)
            watch.stdout.read()
            assert watch.wait(30) == 130
        finally:
            watch.kill()


def documents_until(lines: IO[str], test: Callable[[Any], bool]) -> bool:
    """Whether one of the documents that come passes."""
    text = ""
    for line in lines:
        text += line
        if line == "}\n":
            if test(json.loads(text)):
                return True
            text = ""
    return False
