"""`holdfast consume --group` on both engines: what is printed once, where it goes on, what is committed."""

from __future__ import annotations

import json
import signal
import subprocess
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from holdfast.cli.consuming import GroupMember

Run = Callable[..., subprocess.CompletedProcess[bytes]]
Start = Callable[..., subprocess.Popen[bytes]]

WAIT_S = 60.0
QUIET: dict[str, Any] = {"log_level": 0}
QUICK = ("--timeout-ms", "1500")
PROTOCOLS = {
    "range": (),
    "cooperative": ("--command-property", "partition.assignment.strategy=cooperative-sticky"),
    "consumer": ("--command-property", "group.protocol=consumer"),
}
TRIED = ["range", pytest.param("cooperative", marks=pytest.mark.long), "consumer"]


@pytest.fixture(scope="session")
def bootstrap_servers(engine_address: str) -> str:
    return engine_address


@pytest.fixture
def admin(bootstrap_servers: str) -> AdminClient:
    return AdminClient({**QUIET, "bootstrap.servers": bootstrap_servers})


@pytest.fixture
def group() -> str:
    return f"consume-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def topic(admin: AdminClient) -> str:
    """A topic with one partition."""
    return new_topic(admin, 1)


def new_topic(admin: AdminClient, partitions: int) -> str:
    name = f"consume-{uuid.uuid4().hex[:12]}"
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result(WAIT_S)
    return name


@pytest.fixture
def fill(bootstrap_servers: str) -> Callable[..., None]:
    def produce(topic: str, *values: str, partition: int = 0) -> None:
        producer = Producer({**QUIET, "bootstrap.servers": bootstrap_servers, "enable.idempotence": True})
        for value in values:
            producer.produce(topic, value, partition=partition)
        assert producer.flush(WAIT_S) == 0

    return produce


@pytest.fixture
def commit(bootstrap_servers: str) -> Callable[..., None]:
    def commit_position(group: str, topic: str, offset: int) -> None:
        consumer = Consumer({**QUIET, "bootstrap.servers": bootstrap_servers, "group.id": group})
        consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
        consumer.close()

    return commit_position


def position_of(run_here: Run, group: str) -> dict[int, int]:
    result = run_here("groups", "describe", "--group", group, "--output", "json")
    groups = json.loads(result.stdout)["groups"]
    return {
        row["partition"]: row["current_offset"]
        for each in groups
        for row in each["offsets"]
        if row["current_offset"] is not None
    }


@pytest.mark.parametrize("protocol", TRIED)
@pytest.mark.check
def test_a_group_goes_on_where_it_stopped(
    run_here: Run, topic: str, group: str, fill: Any, protocol: str
) -> None:
    fill(topic, *"abcde")
    consume = ("consume", "--topic", topic, "--group", group, "--from-beginning", *PROTOCOLS[protocol])
    first = run_here(*consume, "--max-messages", "2")
    assert (first.returncode, first.stdout) == (0, b"a\nb\n")
    assert position_of(run_here, group) == {0: 2}
    second = run_here(*consume, "--max-messages", "3")
    assert (second.returncode, second.stdout) == (0, b"c\nd\ne\n")
    assert position_of(run_here, group) == {0: 5}


def test_a_group_without_committed_offsets_begins_at_the_end_and_comes_back_there(
    run_here: Run, topic: str, group: str, fill: Any
) -> None:
    fill(topic, "old")
    consume = ("consume", "--topic", topic, "--group", group)
    nothing = run_here(*consume, *QUICK)
    assert (nothing.returncode, nothing.stdout) == (0, b"")
    assert position_of(run_here, group) == {0: 1}
    fill(topic, "meanwhile")
    assert run_here(*consume, "--max-messages", "1").stdout == b"meanwhile\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_commits_what_was_printed(
    run_here: Run, start: Start, topic: str, group: str, fill: Any, number: int
) -> None:
    fill(topic, *"abc")
    process = start("consume", "--topic", topic, "--group", group, "--from-beginning")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == [b"a\n", b"b\n", b"c\n"]
    process.send_signal(number)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert b"processed a total of 3 messages" in errors
    assert position_of(run_here, group) == {0: 3}
    assert run_here("groups", "describe", "--group", group, "--members").stdout.count(b"\n") == 1  # it left


@pytest.mark.check
def test_members_share_the_partitions(
    run_here: Run, start: Start, admin: AdminClient, group: str, fill: Any
) -> None:
    topic = new_topic(admin, 2)
    both = [start("consume", "--topic", topic, "--group", group, "--from-beginning") for _ in range(2)]
    owners: set[str] = set()
    while len(owners) < 2:
        shown = run_here("groups", "describe", "--group", group, "--output", "json")
        groups = json.loads(shown.stdout)["groups"]
        owners = {row["member_id"] for each in groups for row in each["offsets"] if row["member_id"]}
    fill(topic, "zero", partition=0)
    fill(topic, "one", partition=1)
    lines = set()
    for process in both:
        assert process.stdout is not None
        lines.add(process.stdout.readline())
        process.send_signal(signal.SIGINT)
    assert lines == {b"zero\n", b"one\n"}
    assert [process.wait(WAIT_S) for process in both] == [130, 130]
    assert position_of(run_here, group) == {0: 1, 1: 1}


def test_nothing_is_committed_when_told_so(run_here: Run, topic: str, group: str, fill: Any) -> None:
    fill(topic, "a")
    consume = ("consume", "--topic", topic, "--group", group, "--from-beginning", "--max-messages", "1")
    result = run_here(*consume, "--command-property", "enable.auto.commit=false")
    assert (result.returncode, result.stdout) == (0, b"a\n")
    assert position_of(run_here, group) == {}


@pytest.mark.check
def test_committed_offsets_that_expired_are_named(
    run_here: Run, admin: AdminClient, topic: str, group: str, fill: Any, commit: Any
) -> None:  # HF305
    fill(topic, *"abcd")
    commit(group, topic, 1)
    (deleted,) = admin.delete_records([TopicPartition(topic, 0, 3)]).values()
    deleted.result(WAIT_S)
    result = run_here("consume", "--topic", topic, "--group", group, "--max-messages", "1")
    assert (result.returncode, result.stdout) == (0, b"d\n")
    assert f"offsets 1 to 2 of {topic}-0 are gone" in result.stderr.decode()


@pytest.mark.check
@pytest.mark.parametrize("protocol", TRIED)
def test_committed_offsets_that_expire_while_it_reads_are_named(
    run_here: Run,
    admin: AdminClient,
    group: str,
    fill: Any,
    commit: Any,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
) -> None:  # HF305
    topic = new_topic(admin, 2)
    fill(topic, *"abcd", partition=0)
    fill(topic, "other", partition=1)
    commit(group, topic, 1)
    (deleted,) = admin.delete_records([TopicPartition(topic, 0, 3)]).values()
    deleted.result(WAIT_S)
    # As if the messages had been there a moment ago, when the partition was assigned.
    monkeypatch.setattr(GroupMember, "_next", lambda self, place, offset: offset)
    consume = ("consume", "--topic", topic, "--group", group, "--from-beginning", *PROTOCOLS[protocol])
    result = run_here(*consume, "--max-messages", "2")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == [b"d", b"other"]
    assert f"offsets 1 to 2 of {topic}-0 are gone" in result.stderr.decode()
    assert position_of(run_here, group) == {0: 4, 1: 1}


def test_a_committed_offset_after_the_end_of_the_log_is_no_silent_jump(
    run_here: Run, topic: str, group: str, fill: Any, commit: Any
) -> None:  # HF305
    fill(topic, "a")
    commit(group, topic, 7)
    result = run_here("consume", "--topic", topic, "--group", group, *QUICK)
    assert (result.returncode, result.stdout) == (1, b"")
    said = result.stderr.decode()
    assert f"group '{group}' is at offset 7 of {topic}-0, which ends at 1" in said
    assert "groups reset-offsets" in said
    assert position_of(run_here, group) == {0: 7}


def test_a_committed_offset_behind_an_open_transaction_is_in_the_log(
    run_here: Run, topic: str, group: str, fill: Any, bootstrap_servers: str
) -> None:
    holder = Producer({**QUIET, "bootstrap.servers": bootstrap_servers, "transactional.id": group})
    holder.init_transactions(WAIT_S)
    holder.begin_transaction()
    holder.produce(topic, "taken back", partition=0)
    assert holder.flush(WAIT_S) == 0
    to_the_end = ("groups", "reset-offsets", "--group", group, "--topic", topic, "--to-latest", "--execute")
    assert run_here(*to_the_end).returncode == 0
    assert position_of(run_here, group) == {0: 1}
    consume = ("consume", "--topic", topic, "--group", group, "--isolation-level", "read_committed")
    waiting = run_here(*consume, *QUICK)
    assert (waiting.returncode, waiting.stdout) == (0, b""), waiting.stderr
    holder.abort_transaction(WAIT_S)
    fill(topic, "next")
    assert run_here(*consume, "--max-messages", "1").stdout == b"next\n"


@pytest.mark.parametrize("protocol", TRIED)
@pytest.mark.check
def test_partitions_added_meanwhile_are_read_from_their_beginning(
    start: Start, admin: AdminClient, topic: str, group: str, fill: Any, protocol: str
) -> None:  # HF304
    refresh = ("--command-property", "metadata.max.age.ms=500")
    consume = ("consume", "--topic", topic, "--group", group, "--from-beginning", "--max-messages", "2")
    fill(topic, "old")
    process = start(*consume, *refresh, *PROTOCOLS[protocol])
    assert process.stdout is not None
    assert process.stdout.readline() == b"old\n"
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result(WAIT_S)
    fill(topic, "new", partition=1)
    output, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, output) == (0, b"new\n"), errors
    assert f"reading new partition {topic}-1 from its beginning" in errors.decode()


@pytest.mark.parametrize("protocol", TRIED)
def test_matching_topics_are_read_by_the_group(
    run_here: Run, admin: AdminClient, group: str, fill: Any, protocol: str
) -> None:
    first, second = new_topic(admin, 1), new_topic(admin, 1)
    fill(first, "one")
    fill(second, "two")
    consume = ("consume", "--include", f"{first},{second}", "--group", group, "--from-beginning")
    result = run_here(*consume, "--max-messages", "2", *PROTOCOLS[protocol])
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == [b"one", b"two"]


def test_only_committed_messages_are_printed_when_asked(
    run_here: Run, topic: str, group: str, fill: Any, bootstrap_servers: str
) -> None:  # HF310
    producer = Producer({**QUIET, "bootstrap.servers": bootstrap_servers, "transactional.id": group})
    producer.init_transactions(WAIT_S)
    for value, end in (("aborted", producer.abort_transaction), ("kept", producer.commit_transaction)):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(WAIT_S)
        end(WAIT_S)
    fill(topic, "plain")
    consume = ("consume", "--topic", topic, "--from-beginning", "--isolation-level")
    read = run_here(*consume, "read_committed", "--group", group, "--max-messages", "2")
    assert read.stdout == b"kept\nplain\n"
    assert run_here(*consume, "read_committed", "--max-messages", "2").stdout == b"kept\nplain\n"
    dirty = run_here(*consume, "read_uncommitted", "--max-messages", "3")
    assert dirty.stdout == b"aborted\nkept\nplain\n"


def test_a_missing_topic_is_named(run_here: Run, group: str) -> None:
    result = run_here("consume", "--topic", "cli-is-not-there", "--group", group)
    assert result.returncode == 1
    assert b"'cli-is-not-there' does not exist" in result.stderr
