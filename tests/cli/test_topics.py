from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable
from typing import Any

Run = Callable[..., subprocess.CompletedProcess[bytes]]
MakeTopic = Callable[..., str]


def described(run: Run, topic: str, *flags: str) -> dict[str, Any]:
    result = run("topics", "describe", "--topic", topic, "--output", "json", *flags)
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout)["topics"]
    return dict(found)


def test_a_topic_is_created_as_asked(run: Run, make_topic: MakeTopic) -> None:
    topic = make_topic("--partitions", "3", "--replication-factor", "1", "--config", "retention.ms=60000")
    found = described(run, topic)
    assert found["topic"] == topic
    assert found["internal"] is False
    assert found["partition_count"] == 3
    assert found["replication_factor"] == 1
    assert found["configs"] == {"retention.ms": "60000"}
    assert [part["partition"] for part in found["partitions"]] == [0, 1, 2]
    for part in found["partitions"]:
        assert part["replicas"] == part["isr"] == [part["leader"]]
    assert len(found["topic_id"]) == 22


def test_partitions_and_factor_default_to_the_clusters(run: Run, make_topic: MakeTopic) -> None:
    made = make_topic()
    found = described(run, made)
    broker = str(found["partitions"][0]["leader"])
    shown = run("configs", "describe", "--broker", broker, "--all", "--output", "json")
    [entity] = json.loads(shown.stdout)["entities"]
    settings = {each["name"]: each["value"] for each in entity["configs"]}
    assert str(found["partition_count"]) == settings["num.partitions"]
    assert str(found["replication_factor"]) == settings["default.replication.factor"]


def test_replicas_can_be_assigned_by_hand(run: Run, make_topic: MakeTopic, topic: str) -> None:
    broker = described(run, topic)["partitions"][0]["leader"]
    made = make_topic("--replica-assignment", f"{broker},{broker}")
    assert described(run, made)["partition_count"] == 2


def test_an_existing_topic_is_refused_unless_told_otherwise(run: Run, topic: str) -> None:
    refused = run("topics", "create", "--topic", topic)
    assert refused.returncode == 1
    assert topic in refused.stderr.decode()
    assert "--if-not-exists" in refused.stderr.decode()
    accepted = run("topics", "create", "--topic", topic, "--if-not-exists", "--output", "json")
    assert accepted.returncode == 0
    assert json.loads(accepted.stdout) == {"results": [{"topic": topic, "action": "exists", "error": None}]}


def test_refusals_say_what_to_do(run: Run) -> None:
    name = f"cli-{uuid.uuid4().hex}"
    for flags, advice in (
        (("--topic", "not a name"), "letters, digits"),
        (("--topic", name, "--config", "nonsense=1"), "configs describe"),
        (("--topic", name, "--replication-factor", "99"), "--replication-factor"),
    ):
        result = run("topics", "create", *flags)
        assert result.returncode == 1
        assert advice in result.stderr.decode()
        assert b"Traceback" not in result.stderr
    assert name not in run("topics", "list").stdout.decode().splitlines()


def test_list_takes_a_regular_expression_over_whole_names(run: Run, make_topic: MakeTopic) -> None:
    mark = uuid.uuid4().hex[:8]
    first, second = make_topic(prefix=f"{mark}-a"), make_topic(prefix=f"{mark}-b")
    assert run("topics", "list", "--topic", f"{mark}-a.*").stdout.decode().split() == [first]
    assert run("topics", "list", "--topic", mark).stdout == b""
    both = run("topics", "list", "--topic", f"{first},{second}", "--output", "json")
    assert json.loads(both.stdout) == {"topics": sorted([first, second])}
    everything = run("topics", "list", "--exclude-internal").stdout.decode().split()
    assert {first, second} <= set(everything)
    assert not [name for name in everything if name.startswith("__consumer_offsets")]


def test_describe_prints_tables_that_grep_can_read(run: Run, topic: str) -> None:
    lines = run("topics", "describe", "--topic", topic).stdout.decode().splitlines()
    assert lines[0].split() == ["Topic", "TopicId", "PartitionCount", "ReplicationFactor", "Configs"]
    assert lines[1].split()[0] == topic
    assert lines[3].split() == ["Topic", "Partition", "Leader", "Replicas", "Isr"]
    assert lines[4].split()[:2] == [topic, "0"]


def test_describe_finds_a_topic_by_its_id(run: Run, topic: str) -> None:
    topic_id = described(run, topic)["topic_id"]
    result = run("topics", "describe", "--topic-id", topic_id, "--output", "json")
    assert [found["topic"] for found in json.loads(result.stdout)["topics"]] == [topic]
    missing = run("topics", "describe", "--topic-id", "AAAAAAAAAAAAAAAAAAAAAQ")
    assert missing.returncode == 1


def test_describe_filters_partitions(run: Run, topic: str) -> None:
    for flag in (
        "--under-replicated-partitions",
        "--unavailable-partitions",
        "--under-min-isr-partitions",
    ):
        result = run("topics", "describe", "--topic", topic, flag)
        assert (result.returncode, result.stdout) == (0, b"")
    assert topic in run("topics", "describe", "--topic", topic, "--at-min-isr-partitions").stdout.decode()
    contradiction = run("topics", "describe", "--unavailable-partitions", "--at-min-isr-partitions")
    assert contradiction.returncode == 2


def test_describe_shows_topics_with_overrides_only(run: Run, make_topic: MakeTopic) -> None:
    mark = uuid.uuid4().hex[:8]
    make_topic(prefix=mark)
    special = make_topic("--config", "retention.ms=60000", prefix=mark)
    flags = ("--topic", f"{mark}-.*", "--topics-with-overrides", "--output", "json")
    (found,) = json.loads(run("topics", "describe", *flags).stdout)["topics"]
    assert (found["topic"], found["partitions"]) == (special, [])


def test_describing_a_missing_topic_fails_unless_told_otherwise(run: Run) -> None:
    missing = run("topics", "describe", "--topic", "cli-is-not-there")
    assert missing.returncode == 1
    assert b"topics create --topic cli-is-not-there" in missing.stderr
    assert run("topics", "describe", "--topic", "cli-is-not-there", "--if-exists").returncode == 0
    assert "cli-is-not-there" not in run("topics", "list").stdout.decode().split()


def test_partitions_are_added_and_never_removed(run: Run, topic: str) -> None:
    assert run("topics", "alter", "--topic", topic, "--partitions", "3").returncode == 0
    assert described(run, topic)["partition_count"] == 3
    fewer = run("topics", "alter", "--topic", topic, "--partitions", "2")
    assert fewer.returncode == 1
    assert b"never removed" in fewer.stderr
    missing = ("topics", "alter", "--topic", "cli-is-not-there", "--partitions", "3")
    assert run(*missing).returncode == 1
    assert run(*missing, "--if-exists").returncode == 0


def test_added_partitions_take_the_assignment(run: Run, topic: str) -> None:
    broker = described(run, topic)["partitions"][0]["leader"]
    alter = ("topics", "alter", "--topic", topic, "--partitions", "2", "--replica-assignment")
    assert run(*alter, f"{broker}").returncode == 2
    result = run(*alter, f"{broker},{broker}")
    assert result.returncode == 0, result.stderr
    assert described(run, topic)["partition_count"] == 2


def test_delete_takes_a_name_literally_and_a_pattern_as_one(run: Run, make_topic: MakeTopic) -> None:
    mark = uuid.uuid4().hex[:8]
    dashed = make_topic(prefix=f"{mark}-v1")
    dotted_twin = dashed.replace("-v1", ".v1")
    result = run("topics", "delete", "--topic", dotted_twin)
    assert result.returncode == 1, "the dot must not match the dash"
    assert run("topics", "list", "--topic", dashed).stdout.decode().split() == [dashed]
    deleted = run("topics", "delete", "--topic", f"{mark}-.*", "--output", "json")
    assert json.loads(deleted.stdout)["results"] == [{"topic": dashed, "action": "deleted", "error": None}]
    assert run("topics", "list", "--topic", dashed).stdout == b""


def test_deleting_what_is_not_there_fails_unless_told_otherwise(run: Run) -> None:
    assert run("topics", "delete", "--topic", "cli-is-not-there").returncode == 1
    assert run("topics", "delete", "--topic", "cli-is-not-there", "--if-exists").returncode == 0


def test_deleting_or_altering_what_is_not_there_does_not_advise_to_create_it(run_here: Run) -> None:
    for arguments in (("delete",), ("alter", "--partitions", "3")):
        result = run_here("topics", *arguments, "--topic", "is-not-there")
        assert result.returncode == 1
        assert b"topics list" in result.stderr
        assert b"--if-exists" in result.stderr
        assert b"create" not in result.stderr
