from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.configs import Entity, EntityFlags, parse_additions, parse_removals
from holdfast.errors import UsageError

Run = Callable[..., subprocess.CompletedProcess[bytes]]


def settings(run: Run, *flags: str) -> dict[str, dict[str, Any]]:
    result = run("configs", "describe", *flags, "--output", "json")
    assert result.returncode == 0, result.stderr
    (entity,) = json.loads(result.stdout)["entities"]
    return {entry["name"]: entry for entry in entity["configs"]}


def broker_id(run: Run, topic: str) -> str:
    result = run("topics", "describe", "--topic", topic, "--output", "json")
    return str(json.loads(result.stdout)["topics"][0]["partitions"][0]["leader"])


def test_settings_of_a_topic_are_set_and_given_back(run: Run, topic: str) -> None:
    assert settings(run, "--topic", topic) == {}
    changed = run(
        *("configs", "alter", "--topic", topic),
        *("--add-config", "retention.ms=60000,cleanup.policy=[compact,delete]"),
    )
    assert changed.returncode == 0, changed.stderr
    found = settings(run, "--entity-type", "topics", "--entity-name", topic)
    assert {name: entry["value"] for name, entry in found.items()} == {
        "retention.ms": "60000",
        "cleanup.policy": "compact,delete",
    }
    assert found["retention.ms"]["source"] == "DYNAMIC_TOPIC_CONFIG"
    assert found["retention.ms"]["read_only"] is False
    back = run("configs", "alter", "--topic", topic, "--delete-config", "retention.ms,cleanup.policy")
    assert back.returncode == 0, back.stderr
    assert settings(run, "--topic", topic) == {}


def test_all_shows_defaults_and_where_they_come_from(run: Run, topic: str) -> None:
    found = settings(run, "--topic", topic, "--all")
    assert found["segment.bytes"]["source"] == "DEFAULT_CONFIG"
    assert found["segment.bytes"]["value"] == "1073741824"
    assert [synonym["name"] for synonym in found["segment.bytes"]["synonyms"]] == ["log.segment.bytes"]


def test_settings_come_from_a_file(run: Run, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "topic.properties"
    file.write_text("# ours\nretention.ms=60000\nsegment.ms: 70000\n")
    result = run("configs", "alter", "--topic", topic, "--add-config-file", str(file), "--output", "json")
    assert json.loads(result.stdout)["set"] == {"retention.ms": "60000", "segment.ms": "70000"}
    assert settings(run, "--topic", topic)["segment.ms"]["value"] == "70000"


def test_the_settings_of_a_broker_are_shown(run: Run, topic: str) -> None:
    broker = broker_id(run, topic)
    found = settings(run, "--broker", broker, "--all")
    assert found["log.retention.hours"]["value"] == "168"
    everything = run("configs", "describe", "--entity-type", "brokers", "--output", "json")
    assert broker in [entity["entity_name"] for entity in json.loads(everything.stdout)["entities"]]


def test_settings_of_a_broker_are_set_and_given_back(run: Run, topic: str) -> None:
    broker = broker_id(run, topic)
    alter = ("configs", "alter", "--broker", broker)
    assert run(*alter, "--add-config", "log.cleaner.threads=1").returncode == 0
    assert settings(run, "--broker", broker)["log.cleaner.threads"]["source"] == "DYNAMIC_BROKER_CONFIG"
    assert run(*alter, "--delete-config", "log.cleaner.threads").returncode == 0
    assert "log.cleaner.threads" not in settings(run, "--broker", broker)


def test_the_default_of_all_brokers_is_set_and_given_back(run: Run) -> None:
    alter = ("configs", "alter", "--entity-type", "brokers", "--entity-default")
    changed = run(*alter, "--add-config", "log.cleaner.backoff.ms=14000")
    assert changed.returncode == 0, changed.stderr
    found = settings(run, "--broker-defaults")["log.cleaner.backoff.ms"]
    assert (found["value"], found["source"]) == ("14000", "DYNAMIC_DEFAULT_BROKER_CONFIG")
    assert run(*alter, "--delete-config", "log.cleaner.backoff.ms").returncode == 0
    assert "log.cleaner.backoff.ms" not in settings(run, "--broker-defaults")
    refused = run(*alter, "--add-config", "log.cleaner.backoff.ms=soon")
    assert refused.returncode == 1
    assert b"log.cleaner.backoff.ms" in refused.stderr


def test_levels_of_loggers_are_set(run: Run, topic: str) -> None:
    loggers = ("--entity-type", "broker-loggers", "--entity-name", broker_id(run, topic))
    before = settings(run, *loggers)["root"]["value"]
    assert run("configs", "alter", *loggers, "--add-config", "root=ERROR").returncode == 0
    found = settings(run, *loggers)["root"]
    assert (found["value"], found["source"]) == ("ERROR", "DYNAMIC_BROKER_LOGGER_CONFIG")
    assert run("configs", "alter", *loggers, "--add-config", f"root={before}").returncode == 0
    refused = run("configs", "alter", *loggers, "--add-config", "no.such=INFO")
    assert refused.returncode == 1
    assert b"no.such" in refused.stderr


def test_refusals_name_the_entity_and_the_reason(run: Run, topic: str) -> None:
    for flags, reason in (
        (("--add-config", "retention.ms=soon"), "retention.ms"),
        (("--add-config", "nonsense=1"), "nonsense"),
        (("--delete-config", "retention.ms"), "no setting of its own"),
    ):
        result = run("configs", "alter", "--topic", topic, *flags)
        assert result.returncode == 1
        assert reason in result.stderr.decode()
        assert topic in result.stderr.decode()
    assert run("configs", "describe", "--topic", "cli-is-not-there").returncode == 1
    missing = run("configs", "describe", "--broker", "4711")
    assert missing.returncode == 1
    assert b"its brokers are" in missing.stderr


def test_tables_are_whole_when_piped(run: Run, topic: str) -> None:
    lines = run("configs", "describe", "--topic", topic, "--all").stdout.decode().splitlines()
    assert lines[0] == f"All settings of topic {topic}:"
    assert lines[1].split() == ["Name", "Value", "Source", "Read-only"]
    assert any(line.split()[:2] == ["flush.ms", "9223372036854775807"] for line in lines)
    assert run("configs", "describe", "--topic", topic).stdout.decode() == (
        f"Dynamic settings of topic {topic}: none\n"
    )


def test_brackets_keep_commas_together() -> None:
    assert parse_additions(["a=1,b=[x,y],c=", "d=[z]"], None) == {"a": "1", "b": "x,y", "c": "", "d": "z"}
    assert parse_removals(["a, b", "c"]) == ["a", "b", "c"]
    with pytest.raises(UsageError, match="brackets"):
        parse_additions(["a=x,y"], None)


def test_an_entity_is_named_in_one_way_only() -> None:
    def choose(**given: Any) -> Entity:
        return EntityFlags(**given).chosen()

    assert choose(topic="t") == Entity("topics", "t")
    assert choose(entity_type="topics") == Entity("topics", None)
    assert choose(entity_type="brokers", entity_default=True) == Entity("brokers", "")
    assert choose(broker_defaults=True) == Entity("brokers", "")
    for wrong in (
        {},
        {"topic": "t", "broker": "1"},
        {"topic": "t", "entity_type": "topics"},
        {"topic": "t", "entity_name": "t"},
        {"broker": "one"},
        {"entity_type": "topics", "entity_default": True},
    ):
        with pytest.raises(UsageError):
            choose(**wrong)
