"""`holdfast groups` on both engines, and held against what kafka-consumer-groups prints."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from holdfast.cli.groups_admin import CommittedOffset, GroupAdmin
from holdfast.testing.apache import CONSUMER_GROUPS, run_tool
from holdfast.testing.kafka_fixtures import require_apache_kafka

from .conftest import OUR_BROKER_LATER

Run = Callable[..., subprocess.CompletedProcess[bytes]]
MakeTopic = Callable[..., str]
Join = Callable[..., Consumer]

WAIT_S = 60.0
QUIET: dict[str, Any] = {"log_level": 0}
DAY_MS = 86_400_000


@pytest.fixture(scope="session")
def bootstrap_servers(engine_address: str) -> str:
    return engine_address


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def make_topic(bootstrap_servers: str) -> MakeTopic:
    """Create topics and fill their partitions with so many messages each, a second apart."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap_servers})

    def make(*messages: int, start_ms: int = 1_700_000_000_000) -> str:
        topic = f"groups-{uuid.uuid4().hex[:12]}"
        new = NewTopic(topic, len(messages), 1, config={"retention.ms": "-1"})
        admin.create_topics([new])[topic].result(WAIT_S)
        producer = Producer({**QUIET, "bootstrap.servers": bootstrap_servers, "enable.idempotence": True})
        for partition, count in enumerate(messages):
            for number in range(count):
                timestamp_ms = start_ms + number * 1000
                producer.produce(topic, f"{number}", partition=partition, timestamp=timestamp_ms)
        assert producer.flush(WAIT_S) == 0
        return topic

    return make


@pytest.fixture
def topic(make_topic: MakeTopic) -> str:
    """Three partitions with ten, twenty and no messages."""
    return make_topic(10, 20, 0)


@pytest.fixture
def commit(bootstrap_servers: str) -> Callable[[str, str, dict[int, int]], None]:
    """Give a group committed offsets without joining it."""

    def commit_offsets(group: str, topic: str, positions: dict[int, int]) -> None:
        consumer = Consumer({**QUIET, "bootstrap.servers": bootstrap_servers, "group.id": group})
        offsets = [TopicPartition(topic, partition, offset) for partition, offset in positions.items()]
        consumer.commit(offsets=offsets, asynchronous=False)
        consumer.close()

    return commit_offsets


@pytest.fixture
def join(bootstrap_servers: str) -> Iterator[Join]:
    """Members that own partitions; they leave with the test."""
    joined: list[Consumer] = []

    def begin(group: str, topic: str, **settings: Any) -> Consumer:
        consumer = Consumer(
            {
                **QUIET,
                "bootstrap.servers": bootstrap_servers,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **{name.replace("_", "."): value for name, value in settings.items()},
            }
        )
        joined.append(consumer)
        consumer.subscribe([topic])
        settle(*joined)
        return consumer

    yield begin
    for consumer in joined:
        consumer.close()


def settle(*consumers: Consumer) -> None:
    """Poll until the last one owns something."""
    deadline = time.monotonic() + WAIT_S
    while not consumers[-1].assignment():
        assert time.monotonic() < deadline, "nothing was assigned"
        for consumer in consumers:
            consumer.poll(0.02)


def rows_of(output: bytes) -> list[list[str]]:
    """The cells of a table that is not a terminal's, the heading first."""
    return [line.split() for line in output.decode().splitlines() if line.strip()]


def kafkas_rows(bootstrap_servers: str, *arguments: str) -> list[list[str]]:
    """The same table as Kafka's own tool prints it."""
    require_apache_kafka()
    done = run_tool(CONSUMER_GROUPS, "--bootstrap-server", bootstrap_servers, *arguments)
    return rows_of(done.stdout)


def in_order(rows: list[list[str]]) -> list[list[str]]:
    """Rows sorted below their heading: Kafka's tool has no order of its own."""
    return [rows[0], *sorted(rows[1:])]


def positions_in(run_here: Run, group: str) -> dict[tuple[str, int], int]:
    result = run_here("groups", "describe", "--group", group, "--output", "json")
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout)["groups"]
    return {
        (row["topic"], row["partition"]): row["current_offset"]
        for row in found["offsets"]
        if row["current_offset"] is not None
    }


# ---------------------------------------------------------------------------- list


def test_groups_are_listed_with_state_and_type(
    run_here: Run, topic: str, group: str, commit: Any, join: Join
) -> None:
    commit(group, topic, {0: 1})
    active = f"{group}-active"
    join(active, topic)
    names = run_here("groups", "list").stdout.decode().splitlines()
    assert {group, active} <= set(names)
    assert names == sorted(names)
    table = rows_of(run_here("groups", "list", "--state", "--type").stdout)
    assert table[0] == ["GROUP", "TYPE", "STATE"]
    assert [group, "Classic", "Empty"] in table
    assert [active, "Classic", "Stable"] in table
    only = run_here("groups", "list", "--state", "stable", "--type", "classic", "--output", "json")
    listed = json.loads(only.stdout)["groups"]
    assert {"group": active, "type": "Classic", "state": "Stable"} in listed
    assert group not in [each["group"] for each in listed]


def test_groups_of_the_new_protocol_are_listed(run_here: Run, topic: str, group: str, join: Join) -> None:
    join(group, topic, group_protocol="consumer")
    table = rows_of(run_here("groups", "list", "--type", "consumer").stdout)
    assert table[0] == ["GROUP", "TYPE"]
    assert [group, "Consumer"] in table
    classic = rows_of(run_here("groups", "list", "--type", "classic").stdout)
    assert [group, "Classic"] not in classic


# ---------------------------------------------------------------------------- describe


@OUR_BROKER_LATER
@pytest.mark.java
def test_committed_offsets_lag_and_owner_are_kafkas(
    run_here: Run, topic: str, group: str, commit: Any, join: Join, bootstrap_servers: str
) -> None:
    commit(group, topic, {0: 4, 1: 20})
    join(group, topic, client_id="reader")
    ours = run_here("groups", "describe", "--group", group)
    table = rows_of(ours.stdout)
    assert table[0][:6] == ["GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG"]
    assert [row[:6] for row in table[1:]] == [
        [group, topic, "0", "4", "10", "6"],
        [group, topic, "1", "20", "20", "0"],
        [group, topic, "2", "-", "0", "-"],
    ]
    assert {row[8] for row in table[1:]} == {"reader"}
    assert in_order(kafkas_rows(bootstrap_servers, "--describe", "--group", group)) == in_order(table)


@OUR_BROKER_LATER
@pytest.mark.java
def test_committed_offsets_without_members_are_kafkas(
    run_here: Run, topic: str, group: str, commit: Any, bootstrap_servers: str
) -> None:
    commit(group, topic, {0: 4, 2: 0})
    result = run_here("groups", "describe", "--group", group, "--verbose")
    assert result.returncode == 0
    assert b"has no active members" in result.stderr
    kafkas = kafkas_rows(bootstrap_servers, "--describe", "--group", group, "--verbose")
    assert in_order(kafkas) == in_order(rows_of(result.stdout))
    (document,) = json.loads(run_here("groups", "describe", "--group", group, "--output", "json").stdout)[
        "groups"
    ]
    assert (document["group"], document["type"], document["state"]) == (group, "Classic", "Empty")
    assert document["offsets"][0] == {
        "topic": topic,
        "partition": 0,
        "current_offset": 4,
        "log_end_offset": 10,
        "lag": 6,
        "leader_epoch": None,
        "member_id": None,
        "host": None,
        "client_id": None,
    }


@pytest.mark.java
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_members_and_their_assignments_are_kafkas(
    run_here: Run, topic: str, group: str, join: Join, bootstrap_servers: str, protocol: str
) -> None:
    join(group, topic, group_protocol=protocol, client_id="reader", group_instance_id="first")
    ours = run_here("groups", "describe", "--group", group, "--members", "--verbose")
    table = rows_of(ours.stdout)
    assert table[0][2] == "GROUP-INSTANCE-ID"
    assert table[1][2:6] == ["first", "/127.0.0.1", "reader", "3"]
    assert f"{topic}:0,1,2" in table[1]
    kafkas = kafkas_rows(bootstrap_servers, "--describe", "--group", group, "--members", "--verbose")
    assert kafkas == table
    (document,) = json.loads(
        run_here("groups", "describe", "--group", group, "--members", "--output", "json").stdout
    )["groups"]
    (member,) = document["members"]
    assert member["group_instance_id"] == "first"
    assert member["assignment"] == [{"topic": topic, "partitions": [0, 1, 2]}]
    if protocol == "consumer":
        assert member["target_assignment"] == member["assignment"]
        assert member["epoch"] == member["target_epoch"] > 0
    else:
        assert (member["epoch"], member["target_assignment"]) == (None, None)


@OUR_BROKER_LATER
@pytest.mark.java
def test_members_of_a_group_between_the_protocols_are_kafkas(
    run_here: Run, topic: str, group: str, join: Join, bootstrap_servers: str
) -> None:
    first = join(group, topic, group_protocol="consumer", client_id="new")
    second = join(group, topic, group_protocol="classic", client_id="old")
    deadline = time.monotonic() + WAIT_S
    table: list[list[str]] = []
    while not table or any(row[5:7] != row[7:9] for row in table[1:]):  # still moving
        assert time.monotonic() < deadline, table
        first.poll(0.05)
        second.poll(0.05)
        table = rows_of(run_here("groups", "describe", "--group", group, "--members", "--verbose").stdout)
    assert table[0][-1] == "UPGRADED"
    assert {(row[3], row[-1]) for row in table[1:]} == {("new", "true"), ("old", "false")}
    kafkas = kafkas_rows(bootstrap_servers, "--describe", "--group", group, "--members", "--verbose")
    assert in_order(kafkas) == in_order(table)


@OUR_BROKER_LATER
@pytest.mark.java
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_states_are_kafkas(
    run_here: Run, topic: str, group: str, join: Join, bootstrap_servers: str, protocol: str
) -> None:
    join(group, topic, group_protocol=protocol)
    ours = run_here("groups", "describe", "--group", group, "--state", "--verbose")
    kafkas = kafkas_rows(bootstrap_servers, "--describe", "--group", group, "--state", "--verbose")
    assert kafkas == rows_of(ours.stdout)
    (document,) = json.loads(
        run_here("groups", "describe", "--group", group, "--state", "--output", "json").stdout
    )["groups"]
    assert document["state"] == "Stable"
    assert document["coordinator"]["address"] == bootstrap_servers
    assert document["member_count"] == 1
    assert document["assignment_strategy"] == ("uniform" if protocol == "consumer" else "range")
    assert (document["group_epoch"] is None) == (protocol == "classic")


def test_a_missing_group_is_a_finding_and_the_others_are_shown(
    run_here: Run, topic: str, group: str, commit: Any
) -> None:
    commit(group, topic, {0: 4})
    result = run_here("groups", "describe", "--group", "is-not-there", "--group", group)
    assert result.returncode == 1
    assert b"group 'is-not-there' does not exist" in result.stderr
    assert rows_of(result.stdout)[1][:4] == [group, topic, "0", "4"]


def test_all_groups_are_described(run_here: Run, topic: str, group: str, commit: Any) -> None:
    commit(f"{group}-a", topic, {0: 1})
    commit(f"{group}-b", topic, {0: 2})
    result = run_here("groups", "describe", "--all-groups", "--output", "json")
    found = {each["group"]: each for each in json.loads(result.stdout)["groups"]}
    assert found[f"{group}-a"]["offsets"][0]["current_offset"] == 1
    assert found[f"{group}-b"]["offsets"][0]["current_offset"] == 2


def test_a_group_that_goes_after_it_was_listed_is_left_out(
    run_here: Run, topic: str, group: str, commit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(group, topic, {0: 1})
    monkeypatch.setattr(GroupAdmin, "names", lambda admin: ["is-not-there-any-more", group])
    result = run_here("groups", "describe", "--all-groups", "--output", "json")
    assert [each["group"] for each in json.loads(result.stdout)["groups"]] == [group]
    assert (result.returncode, result.stderr.decode()) == (
        0,
        f"holdfast: group '{group}' has no active members\n",
    )


def test_a_topic_that_goes_after_its_committed_offsets_were_read_has_no_end(
    run_here: Run, topic: str, group: str, commit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(group, topic, {0: 1})
    gone = {("is-not-there-any-more", 0): CommittedOffset(7, None)}
    monkeypatch.setattr(GroupAdmin, "offsets", lambda admin, name: gone)
    result = run_here("groups", "describe", "--group", group)
    assert result.returncode == 0, result.stderr
    assert rows_of(result.stdout)[1][:6] == [group, "is-not-there-any-more", "0", "7", "-", "-"]


# ---------------------------------------------------------------------------- reset-offsets


def planned(result: subprocess.CompletedProcess[bytes]) -> dict[int, int]:
    """New offsets by partition."""
    assert result.returncode == 0, result.stderr
    return {int(row[2]): int(row[3]) for row in rows_of(result.stdout)[1:]}


def test_without_execute_the_plan_is_shown_and_nothing_changes(
    run_here: Run, topic: str, group: str, commit: Any
) -> None:
    commit(group, topic, {0: 4, 1: 5})
    reset = ("groups", "reset-offsets", "--group", group, "--all-topics", "--to-earliest")
    plan = run_here(*reset)
    assert rows_of(plan.stdout) == [
        ["GROUP", "TOPIC", "PARTITION", "NEW-OFFSET", "OLD-OFFSET"],
        [group, topic, "0", "0", "4"],
        [group, topic, "1", "0", "5"],
    ]
    assert b"nothing was changed" in plan.stderr
    assert b"nothing was changed" not in run_here(*reset, "--dry-run").stderr
    assert positions_in(run_here, group) == {(topic, 0): 4, (topic, 1): 5}


def test_committed_offsets_move_to_the_ends_of_the_log(
    run_here: Run, topic: str, group: str, commit: Any
) -> None:
    commit(group, topic, {0: 4, 1: 5})
    reset = ("groups", "reset-offsets", "--group", group, "--execute")
    assert planned(run_here(*reset, "--all-topics", "--to-latest")) == {0: 10, 1: 20}
    assert positions_in(run_here, group) == {(topic, 0): 10, (topic, 1): 20}
    assert planned(run_here(*reset, "--topic", f"{topic}:1", "--to-earliest")) == {1: 0}
    assert positions_in(run_here, group) == {(topic, 0): 10, (topic, 1): 0}
    assert planned(run_here(*reset, "--topic", topic, "--to-earliest")) == {0: 0, 1: 0, 2: 0}
    assert positions_in(run_here, group) == {(topic, 0): 0, (topic, 1): 0, (topic, 2): 0}


def test_committed_offsets_shift_and_stay_within_the_log(
    run_here: Run, topic: str, group: str, commit: Any
) -> None:
    commit(group, topic, {0: 4, 1: 15})
    reset = ("groups", "reset-offsets", "--group", group, "--all-topics", "--execute")
    assert planned(run_here(*reset, "--shift-by", "2")) == {0: 6, 1: 17}
    back = run_here(*reset, "--shift-by", "-10")
    assert planned(back) == {0: 0, 1: 7}
    assert f"offset -4 of {topic}-0 lies before its start; 0 is taken" in back.stderr.decode()
    beyond = run_here(*reset, "--to-offset", "15")
    assert planned(beyond) == {0: 10, 1: 15}
    assert f"offset 15 of {topic}-0 lies after its end; 10 is taken" in beyond.stderr.decode()
    assert positions_in(run_here, group) == {(topic, 0): 10, (topic, 1): 15}


def test_a_partition_without_a_committed_offset_cannot_be_shifted(
    run_here: Run, topic: str, group: str, commit: Any
) -> None:
    commit(group, topic, {0: 4})
    result = run_here("groups", "reset-offsets", "--group", group, "--topic", topic, "--shift-by", "1")
    assert (result.returncode, result.stdout) == (1, b"")
    assert f"no committed offset to shift for {topic}-1, {topic}-2" in result.stderr.decode()


def test_current_offsets_stay_and_missing_ones_begin_at_the_end(
    run_here: Run, topic: str, group: str, commit: Any
) -> None:
    commit(group, topic, {0: 4})
    reset = ("groups", "reset-offsets", "--group", group, "--topic", topic, "--to-current")
    assert planned(run_here(*reset, "--execute")) == {0: 4, 1: 20, 2: 0}


def test_a_time_finds_the_first_message_that_is_not_older(
    run_here: Run, make_topic: MakeTopic, group: str
) -> None:
    start_ms = int(time.time() * 1000) - DAY_MS
    topic = make_topic(10, 3, 0, start_ms=start_ms)
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime((start_ms + 4500) // 1000))
    moment += f".{(start_ms + 4500) % 1000:03}"
    reset = ("groups", "reset-offsets", "--group", group, "--topic", topic)
    result = run_here(*reset, "--to-datetime", moment)
    assert planned(result) == {0: 5, 1: 3, 2: 0}
    assert f"{topic}-1 has no message that late" in result.stderr.decode()
    assert planned(run_here(*reset, "--by-duration", "P2D")) == {0: 0, 1: 0, 2: 0}
    assert planned(run_here(*reset, "--by-duration", "PT1H")) == {0: 10, 1: 3, 2: 0}


@OUR_BROKER_LATER
@pytest.mark.java
def test_plans_are_kafkas(run_here: Run, topic: str, group: str, commit: Any, bootstrap_servers: str) -> None:
    commit(group, topic, {0: 4, 1: 15})
    for scope, target in (
        (("--all-topics",), ("--shift-by", "-6")),
        (("--topic", topic), ("--to-current",)),
        (("--topic", f"{topic}:0,1"), ("--to-datetime", "2023-11-14T22:13:25.500")),
    ):
        ours = run_here("groups", "reset-offsets", "--group", group, *scope, *target, "--export")
        flags = ("--reset-offsets", "--group", group, *scope, *target, "--export", "--dry-run")
        kafkas = kafkas_rows(bootstrap_servers, *flags)
        plan = [row for row in kafkas if row[0].startswith(topic)]
        assert sorted(plan) == rows_of(ours.stdout), target


def test_an_exported_plan_can_be_carried_out_later(
    run_here: Run, topic: str, group: str, commit: Any, tmp_path: Path
) -> None:
    commit(group, topic, {0: 4, 1: 5})
    exported = run_here(
        "groups", "reset-offsets", "--group", group, "--all-topics", "--to-current", "--export"
    )
    assert exported.stdout.decode() == f"{topic},0,4\n{topic},1,5\n"
    plan = tmp_path / "plan.csv"
    plan.write_bytes(exported.stdout)
    commit(group, topic, {0: 1, 1: 1})
    reset = ("groups", "reset-offsets", "--from-file", str(plan), "--execute")
    assert planned(run_here(*reset, "--group", group)) == {0: 4, 1: 5}
    assert positions_in(run_here, group) == {(topic, 0): 4, (topic, 1): 5}


def test_a_plan_of_several_groups_is_exported_and_carried_out(
    run_here: Run, topic: str, group: str, commit: Any, tmp_path: Path
) -> None:
    first, second = f"{group}-a", f"{group}-b"
    commit(first, topic, {0: 4})
    commit(second, topic, {0: 5})
    both = ("--group", first, "--group", second)
    exported = run_here("groups", "reset-offsets", *both, "--all-topics", "--shift-by", "1", "--export")
    assert exported.stdout.decode() == f"{first},{topic},0,5\n{second},{topic},0,6\n"
    plan = tmp_path / "plan.csv"
    plan.write_bytes(exported.stdout + f"other,{topic},0,1\n".encode())
    result = run_here("groups", "reset-offsets", *both, "--from-file", str(plan), "--execute")
    assert result.returncode == 0
    assert b"also has offsets for other" in result.stderr
    assert positions_in(run_here, first) == {(topic, 0): 5}
    assert positions_in(run_here, second) == {(topic, 0): 6}
    lacking = ("--group", first, "--group", "lacking")
    partly = run_here("groups", "reset-offsets", *lacking, "--from-file", str(plan), "--dry-run")
    assert partly.returncode == 1
    assert b"no line for group 'lacking'" in partly.stderr
    assert rows_of(partly.stdout)[1][:4] == [first, topic, "0", "5"]


def test_a_group_with_members_is_refused_and_the_others_go_on(
    run_here: Run, topic: str, group: str, commit: Any, join: Join
) -> None:
    active = f"{group}-active"
    commit(group, topic, {0: 4})
    commit(active, topic, {0: 4})
    join(active, topic)
    both = ("--group", active, "--group", group)
    result = run_here(
        "groups", "reset-offsets", *both, "--all-topics", "--to-earliest", "--execute", "--output", "json"
    )
    assert result.returncode == 1
    assert f"group '{active}' has active members (Stable, 1 of them)" in result.stderr.decode()
    document = json.loads(result.stdout)
    assert document["executed"] is True
    refused, moved = document["groups"]
    assert (refused["group"], refused["offsets"]) == (active, [])
    assert "active members" in refused["error"]
    entry = {"topic": topic, "partition": 0, "old_offset": 4, "new_offset": 0, "error": None}
    assert moved == {"group": group, "offsets": [entry], "error": None}
    assert positions_in(run_here, active)[topic, 0] == 4
    assert positions_in(run_here, group) == {(topic, 0): 0}


def test_a_group_that_does_not_exist_yet_can_be_given_committed_offsets(
    run_here: Run, topic: str, group: str
) -> None:
    reset = ("groups", "reset-offsets", "--group", group, "--topic", f"{topic}:1", "--to-offset", "7")
    plan = run_here(*reset)
    assert b"does not exist yet" in plan.stderr
    assert planned(plan) == {1: 7}
    assert rows_of(plan.stdout)[1][4] == "-"
    assert run_here("groups", "describe", "--group", group).returncode == 1
    assert planned(run_here(*reset, "--execute")) == {1: 7}
    assert positions_in(run_here, group) == {(topic, 1): 7}


def test_what_does_not_exist_cannot_be_reset(run_here: Run, topic: str, group: str) -> None:
    reset = ("groups", "reset-offsets", "--group", group, "--to-earliest", "--execute")
    nowhere = run_here(*reset, "--topic", "is-not-there")
    assert nowhere.returncode == 1
    assert b"topic 'is-not-there' does not exist" in nowhere.stderr
    partition = run_here(*reset, "--topic", f"{topic}:0,7")
    assert partition.returncode == 1
    assert f"topic '{topic}' has no partition 7; it has 0 to 2" in partition.stderr.decode()
    nothing = run_here(*reset, "--all-topics")
    assert nothing.returncode == 1
    assert f"group '{group}' has no committed offsets" in nothing.stderr.decode()
    assert run_here("groups", "describe", "--group", group).returncode == 1


# ---------------------------------------------------------------------------- delete, delete-offsets


def test_groups_are_deleted_unless_they_have_members(
    run_here: Run, topic: str, group: str, commit: Any, join: Join
) -> None:
    active = f"{group}-active"
    commit(group, topic, {0: 4})
    join(active, topic)
    flags = ("--group", active, "--group", group, "--group", "is-not-there")
    result = run_here("groups", "delete", *flags)
    assert (result.returncode, result.stdout.decode()) == (1, f"Deleted group {group}.\n")
    said = result.stderr.decode()
    assert f"cannot delete group '{active}'" in said
    assert "NON_EMPTY_GROUP" in said
    assert f"groups describe --group {active} --members" in said
    assert "cannot delete group 'is-not-there'" in said
    names = run_here("groups", "list").stdout.decode().splitlines()
    assert active in names
    assert group not in names


def test_deletion_reports_as_json(run_here: Run, topic: str, group: str, commit: Any) -> None:
    commit(group, topic, {0: 4})
    result = run_here("groups", "delete", "--group", group, "--output", "json")
    assert result.returncode == 0
    assert json.loads(result.stdout) == {"results": [{"group": group, "action": "deleted", "error": None}]}
    again = run_here("groups", "delete", "--group", group, "--output", "json")
    assert again.returncode == 1
    (entry,) = json.loads(again.stdout)["results"]
    assert (entry["action"], entry["error"]["code"]) == ("failed", "GROUP_ID_NOT_FOUND")


def test_committed_offsets_are_deleted_one_by_one(run_here: Run, topic: str, group: str, commit: Any) -> None:
    commit(group, topic, {0: 4, 1: 5, 2: 0})
    delete = ("groups", "delete-offsets", "--group", group)
    result = run_here(*delete, "--topic", f"{topic}:1")
    assert result.returncode == 0
    assert rows_of(result.stdout) == [["TOPIC", "PARTITION", "STATUS"], [topic, "1", "Deleted"]]
    assert positions_in(run_here, group) == {(topic, 0): 4, (topic, 2): 0}
    document = json.loads(run_here(*delete, "--topic", topic, "--output", "json").stdout)
    assert document["group"] == group
    assert [entry["action"] for entry in document["results"]] == ["deleted"] * 3


def test_committed_offsets_in_use_are_not_deleted(
    run_here: Run, topic: str, group: str, commit: Any, join: Join
) -> None:
    commit(group, topic, {0: 4})
    join(group, topic)
    result = run_here("groups", "delete-offsets", "--group", group, "--topic", f"{topic}:0")
    assert result.returncode == 1
    assert rows_of(result.stdout)[1] == [topic, "0", "Failed:", "GROUP_SUBSCRIBED_TO_TOPIC"]
    assert b"stop the members that are subscribed" in result.stderr
    assert positions_in(run_here, group)[topic, 0] == 4


def test_what_does_not_exist_cannot_be_deleted(run_here: Run, topic: str, group: str, commit: Any) -> None:
    delete = ("groups", "delete-offsets", "--group", group)
    nobody = run_here(*delete, "--topic", topic)
    assert nobody.returncode == 1
    assert f"cannot delete committed offsets of group '{group}'" in nobody.stderr.decode()
    assert b"GROUP_ID_NOT_FOUND" in nobody.stderr
    commit(group, topic, {0: 4})
    nowhere = run_here(*delete, "--topic", "is-not-there")
    assert nowhere.returncode == 1
    assert b"topic 'is-not-there' does not exist" in nowhere.stderr


# ---------------------------------------------------------------------------- validate-regex


def test_expressions_are_those_of_re2(run_here_anywhere: Run) -> None:
    validate = ("groups", "validate-regex", "--regex")
    valid = run_here_anywhere(*validate, "orders.*")
    assert (valid.returncode, valid.stdout) == (0, b"The regular expression orders.* is valid.\n")
    invalid = run_here_anywhere(*validate, "a(")
    assert (invalid.returncode, invalid.stdout) == (1, b"")
    assert b"missing )" in invalid.stderr
    backtracking = run_here_anywhere(*validate, r"(a)\1", "--output", "json")
    assert backtracking.returncode == 1
    assert json.loads(backtracking.stdout)["valid"] is False
