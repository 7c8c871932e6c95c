"""Kafka's own consumers and its tool for groups, on Apache Kafka and on our broker, the same answers. C1, C2, C5."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.group_clients import MESSAGES, Kind, Work

from holdfast.testing.apache import (
    CONSOLE_CONSUMER,
    CONSUMER_GROUPS,
    VERIFIABLE_CONSUMER,
    VERIFIABLE_PRODUCER,
    run_tool,
)
from holdfast.testing.engines import Engine, Scenario

pytestmark = pytest.mark.long

OnBoth = Callable[[Scenario], Any]
JAVA = (
    Kind("java", "range"),
    Kind("java", "cooperative-sticky"),
    Kind("java", "uniform", "consumer"),
)


def java_members(kind: Kind, engine: Engine) -> Any:
    """Kafka's Java consumer shares with librdkafka's of the same protocol, and takes over when that leaves."""
    other = Kind("confluent-kafka", *kind[1:])
    with closing(Work(engine, f"shared-{kind}", topics=1)) as work:
        java = work.join(kind)
        beside = work.join(other)
        work.share("both have some", [1, 2])
        work.write_and_read("together")
        work.leave(beside)
        work.share("the Java consumer has everything")
        work.write_and_read("alone")
        work.join(other)
        work.share("both again", [1, 2])
        work.leave(java)
        work.share("the other has everything")
        work.write_and_read("the other alone")
    return {"committed": engine.committed(work.group)}


@pytest.mark.parametrize("kind", JAVA, ids=str)
def test_java_consumers_and_librdkafka_s_share_a_group(kind: Kind, on_both: OnBoth) -> None:
    seen = on_both(lambda engine: java_members(kind, engine))
    assert set(seen["committed"].values()) == {3 * MESSAGES}


def events_of(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]


def verifiable(engine: Engine) -> Any:
    topic = engine.create_topic("verifiable", 3)
    where = ("--bootstrap-server", engine.bootstrap_servers, "--topic", topic)
    produced = events_of(run_tool(VERIFIABLE_PRODUCER, *where, "--max-messages", "300").stdout)
    summary = next(each for each in produced if each["name"] == "tool_data")
    sent = sum(each["name"] == "producer_send_success" for each in produced)
    assert (sent, summary["sent"], summary["acked"]) == (300, 300, 300)
    seen = {}
    for protocol in ("classic", "consumer"):
        group = f"verifiable-{protocol}"
        options = ("--group-protocol", protocol, "--group-id", group, "--max-messages", "300")
        events = events_of(run_tool(VERIFIABLE_CONSUMER, *where, *options).stdout)
        assert all(each["success"] for each in events if each["name"] == "offsets_committed")
        seen[protocol] = {
            "read": sum(each["count"] for each in events if each["name"] == "records_consumed"),
            "assigned": sum(
                len(each["partitions"]) for each in events if each["name"] == "partitions_assigned"
            ),
            "committed": sum(engine.committed(group).values()),
        }
    return seen


def test_verifiable_producer_and_consumer_agree(on_both: OnBoth) -> None:
    seen = on_both(verifiable)
    assert seen["classic"] == seen["consumer"] == {"read": 300, "assigned": 3, "committed": 300}


def console(engine: Engine) -> Any:
    """Two console consumers of one group, one after the other: the second goes on where the first stopped."""
    topic = engine.create_topic("console", 2)
    engine.write(topic, {0: [f"a{n}" for n in range(10)], 1: [f"b{n}" for n in range(10)]})
    read: list[list[str]] = []
    for protocol in ("classic", "consumer"):
        done = run_tool(
            CONSOLE_CONSUMER,
            *("--bootstrap-server", engine.bootstrap_servers, "--topic", topic, "--group", "console"),
            *("--from-beginning", "--max-messages", "10", "--timeout-ms", "30000"),
            *("--command-property", f"group.protocol={protocol}"),
        )
        read.append(done.stdout.decode().split())
    everything = sorted(read[0] + read[1])
    assert everything == sorted([f"a{n}" for n in range(10)] + [f"b{n}" for n in range(10)])
    return {"read": everything, "committed": engine.committed("console")}


def test_a_console_consumer_goes_on_where_the_group_stood(on_both: OnBoth) -> None:
    assert on_both(console)["committed"] == {"console-0": 10, "console-1": 10}


class GroupsTool:
    """kafka-consumer-groups, and its tables as lists of rows without what differs from run to run."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *arguments: str) -> list[str]:
        done = run_tool(
            CONSUMER_GROUPS, "--bootstrap-server", self._engine.bootstrap_servers, *arguments, check=False
        )
        text = (done.stdout + done.stderr).decode()
        text = re.sub(r"\S*rdkafka-[0-9a-f-]{36}", "<member>", text)
        text = re.sub(re.escape(self._engine.bootstrap_servers), "<address>", text)
        text = re.sub(r"@[0-9a-f]{6,8}\b", "", text)
        text = re.sub(r"(?m)^\[\d{4}-[^]]*\] ", "", text)
        # The words of an error are the broker's own.
        text = re.sub(r"(\.errors\.\w+Exception): .*", r"\1", text)
        lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
        return sorted(line for line in lines if line and not line.startswith("at "))


def the_tool(engine: Engine) -> Any:
    tool = GroupsTool(engine)
    seen: dict[str, list[str]] = {}
    with closing(Work(engine, "tool", topics=1)) as work:
        member = work.join(Kind("confluent-kafka", "range"))
        work.share("one member")
        work.write_and_read("first")
        group, topic = work.group, work.topics[0]
        of_group = ("--group", group)
        seen["list"] = [line for line in tool("--list", "--state", "--type") if group in line]
        seen["describe"] = tool("--describe", *of_group)
        seen["members"] = tool("--describe", *of_group, "--members", "--verbose")
        seen["state"] = tool("--describe", *of_group, "--state")
        reset = ("--reset-offsets", *of_group)
        seen["reset while active"] = tool(*reset, "--all-topics", "--to-earliest", "--execute")
        seen["delete while active"] = tool("--delete", *of_group)
        seen["delete offsets while active"] = tool("--delete-offsets", *of_group, "--topic", topic)
        work.leave(member)
    engine.await_state(group, "EMPTY")
    seen["empty"] = tool("--describe", *of_group)
    return seen


def test_the_tool_for_groups_describes_a_group_at_work(on_both: OnBoth) -> None:
    seen = on_both(the_tool)
    assert seen["list"] == ["group-tool Classic Stable"]
    assert sum(line.startswith("group-tool tool-a") for line in seen["describe"]) == 3


def resets(engine: Engine) -> Any:
    tool = GroupsTool(engine)
    seen: dict[str, Any] = {}
    topic = engine.create_topic("resets", 3)
    engine.write(topic, {index: [f"{index}-{n}" for n in range(20)] for index in range(3)})
    group = "group-resets"
    reset = ("--reset-offsets", "--group", group)
    everything = (*reset, "--topic", topic)
    seen["a new group"] = tool(*everything, "--to-offset", "7", "--execute")
    seen["dry run"] = tool(*everything, "--to-latest", "--dry-run")
    assert set(engine.committed(group).values()) == {7}
    seen["shifted"] = tool(*everything, "--shift-by", "5", "--execute")
    seen["shifted too far"] = tool(*reset, "--topic", f"{topic}:1", "--shift-by", "-100", "--execute")
    seen["by duration"] = tool(*reset, "--topic", f"{topic}:0", "--by-duration", "PT1H", "--execute")
    seen["to a moment"] = tool(*reset, "--topic", f"{topic}:2", "--to-datetime", "2100-01-01T00:00:00.000")
    plan = tool(*reset, "--all-topics", "--to-current", "--export", "--dry-run")
    seen["export"] = plan
    seen["committed"] = engine.committed(group)
    seen["delete offsets"] = tool("--delete-offsets", "--group", group, "--topic", f"{topic}:1")
    seen["after it"] = engine.committed(group)
    seen["delete"] = tool("--delete", "--group", group)
    seen["deleted"] = tool("--describe", "--group", group)
    seen["delete again"] = tool("--delete", "--group", group)
    return seen


def test_the_tool_for_groups_resets_and_deletes_committed_offsets(on_both: OnBoth) -> None:
    seen = on_both(resets)
    assert seen["committed"] == {"resets-0": 0, "resets-1": 0, "resets-2": 12}
    assert seen["after it"] == {"resets-0": 0, "resets-2": 12}


def from_a_file(engine: Engine, directory: Path) -> Any:
    topic = engine.create_topic("reset-from-file", 2)
    engine.write(topic, {index: [f"{n}" for n in range(20)] for index in range(2)})
    plan = directory / f"{engine.name}.csv"
    plan.write_text(f"{topic},0,3\n{topic},1,99\n")
    tool = GroupsTool(engine)
    said = tool("--reset-offsets", "--group", "from-file", "--from-file", str(plan), "--execute")
    return {"said": said, "committed": engine.committed("from-file")}


def test_the_tool_for_groups_takes_committed_offsets_from_a_file(on_both: OnBoth, tmp_path: Path) -> None:
    seen = on_both(lambda engine: from_a_file(engine, tmp_path))
    assert seen["committed"] == {"reset-from-file-0": 3, "reset-from-file-1": 20}
