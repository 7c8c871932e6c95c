from __future__ import annotations

import json
import re
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from holdfast.testing.broker import BrokerProcess

Run = Callable[..., subprocess.CompletedProcess[bytes]]
Start = Callable[..., subprocess.Popen[bytes]]
MakeTopic = Callable[..., str]

EVERYTHING = [
    argument
    for name in ("timestamp", "partition", "offset", "epoch", "headers", "key", "value")
    for argument in ("--formatter-property", f"print.{name}=true")
]


def fill(run: Run, topic: str, lines: bytes, *flags: str) -> None:
    result = run("produce", "--topic", topic, *flags, stdin=lines)
    assert result.returncode == 0, result.stderr


def test_values_come_one_per_line_and_the_count_on_standard_error(run: Run, topic: str) -> None:
    fill(run, topic, b"one\ntwo\n")
    result = run("consume", "--topic", topic, "--from-beginning", "--max-messages", "2")
    assert (result.returncode, result.stdout) == (0, b"one\ntwo\n")
    assert b"processed a total of 2 messages" in result.stderr


def test_the_format_is_kafkas(run: Run, topic: str) -> None:
    flags = ("--reader-property", "parse.key=true", "--reader-property", "parse.headers=true")
    fill(run, topic, b"h:1,i:2\tk\tv\n", *flags)
    fill(run, topic, b"plain\n")
    read = ("consume", "--topic", topic, "--from-beginning", "--max-messages", "2")
    first, second = run(*read, *EVERYTHING).stdout.decode().splitlines()
    assert re.fullmatch(r"CreateTime:\d{13}\tPartition:0\tOffset:0\tEpoch:\d+\th:1,i:2\tk\tv", first)
    assert re.fullmatch(
        r"CreateTime:\d{13}\tPartition:0\tOffset:1\tEpoch:\d+\tNO_HEADERS\tnull\tplain", second
    )
    separated = run(
        *read,
        *("--property", "print.key=true", "--property", "print.headers=true"),
        *("--property", "key.separator= | ", "--property", "headers.separator=;"),
        *("--property", "null.literal=-", "--property", "line.separator=%\n"),
    )
    assert separated.stdout == b"h:1;i:2 | k | v%\nNO_HEADERS | - | plain%\n"
    without_value = run(*read, "--property", "print.value=false", "--property", "print.key=true")
    assert without_value.stdout == b"k\nnull\n"


def test_log_append_time_is_named(run: Run, make_topic: MakeTopic) -> None:
    topic = make_topic("--config", "message.timestamp.type=LogAppendTime")
    fill(run, topic, b"v\n")
    read = ("consume", "--topic", topic, "--from-beginning", "--max-messages", "1")
    assert run(*read, "--property", "print.timestamp=true").stdout.startswith(b"LogAppendTime:")


def test_json_lines_have_every_key(run: Run, topic: str) -> None:
    fill(run, topic, b"\xff\n")
    read = ("consume", "--topic", topic, "--from-beginning", "--max-messages", "1", "--output", "json")
    message = json.loads(run(*read).stdout)
    assert message.pop("timestamp_ms") > 1_600_000_000_000
    assert message.pop("leader_epoch") >= 0
    assert message == {
        "topic": topic,
        "partition": 0,
        "offset": 0,
        "timestamp_type": "CreateTime",
        "key": None,
        "key_encoding": None,
        "value": "/w==",
        "value_encoding": "base64",
        "headers": [],
    }


def test_an_offset_of_a_partition_is_where_it_starts(run: Run, topic: str) -> None:
    fill(run, topic, b"0\n1\n2\n")
    read = ("consume", "--topic", topic, "--partition", "0")
    assert run(*read, "--offset", "1", "--max-messages", "2").stdout == b"1\n2\n"
    assert run(*read, "--offset", "earliest", "--max-messages", "3").stdout == b"0\n1\n2\n"
    assert run(*read, "--offset", "latest", "--timeout-ms", "300").stdout == b""
    assert run(*read, "--offset", "3", "--timeout-ms", "300").stdout == b""


def test_an_offset_that_does_not_exist_is_no_silent_jump(run: Run, topic: str) -> None:  # HF305
    fill(run, topic, b"0\n1\n")
    beyond = run("consume", "--topic", topic, "--partition", "0", "--offset", "7")
    assert beyond.returncode == 1
    assert f"offset 7 of {topic}-0 does not exist yet: the log ends at 2" in beyond.stderr.decode()
    nowhere = run("consume", "--topic", topic, "--partition", "9")
    assert nowhere.returncode == 1
    assert b"no partition 9" in nowhere.stderr


def test_expired_offsets_are_named(run: Run, topic: str, bootstrap_servers: str) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    fill(run, topic, b"0\n1\n2\n")
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    (deleted,) = admin.delete_records([TopicPartition(topic, 0, 2)]).values()
    deleted.result(timeout=30)
    read = ("consume", "--topic", topic, "--partition", "0", "--max-messages", "1")
    result = run(*read, "--offset", "0")
    assert (result.returncode, result.stdout) == (0, b"2\n")
    assert f"offsets 0 to 1 of {topic}-0 are gone" in result.stderr.decode()


def test_all_partitions_and_all_matching_topics_are_read(run: Run, make_topic: MakeTopic) -> None:
    mark = uuid.uuid4().hex[:8]
    first = make_topic("--partitions", "4", prefix=mark)
    second = make_topic("--partitions", "1", prefix=mark)
    lines = [f"{number}" for number in range(200)]
    fill(run, first, "\n".join(lines).encode(), "--batch-size", "100")
    fill(run, second, b"other\n")
    one = run("consume", "--topic", first, "--from-beginning", "--max-messages", "200")
    assert sorted(one.stdout.decode().split()) == sorted(lines)
    both = run("consume", "--include", f"{mark}-.*", "--from-beginning", "--max-messages", "201")
    assert sorted(both.stdout.decode().split()) == sorted([*lines, "other"])


def test_a_missing_topic_is_named_and_not_created(run: Run) -> None:
    result = run("consume", "--topic", "cli-is-not-there", "--from-beginning")
    assert result.returncode == 1
    assert b"'cli-is-not-there' does not exist" in result.stderr
    assert "cli-is-not-there" not in run("topics", "list").stdout.decode().split()


def test_silence_ends_it_when_asked(run: Run, topic: str) -> None:
    result = run("consume", "--topic", topic, "--timeout-ms", "300")
    assert (result.returncode, result.stdout) == (0, b"")


def test_an_interrupt_ends_it_with_130_after_printing(run: Run, start: Start, topic: str) -> None:
    fill(run, topic, b"one\n")
    process = start("consume", "--topic", topic, "--from-beginning")
    assert process.stdout is not None
    assert process.stdout.readline() == b"one\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"processed a total of 1 messages" in errors


def test_a_reader_that_has_enough_is_no_failure(run: Run, start: Start, topic: str) -> None:
    fill(run, topic, b"x" * 1000 + b"\n")
    process = start("consume", "--topic", topic, "--from-beginning")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    fill(run, topic, b"y\n" * 1000)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors


def test_messages_that_arrive_later_are_printed(run: Run, start: Start, topic: str) -> None:
    fill(run, topic, b"first\n")
    process = start("consume", "--topic", topic, "--from-beginning", "--max-messages", "2")
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    fill(run, topic, b"second\n")
    assert process.stdout.readline() == b"second\n"
    assert process.wait(timeout=30) == 0


@pytest.mark.check
def test_partitions_added_meanwhile_are_read_from_their_beginning(
    run: Run, start: Start, topic: str, bootstrap_servers: str
) -> None:
    # HF304: nobody begins at the end of a partition that has just appeared.
    fill(run, topic, b"old\n")
    refresh = ("--consumer-property", "metadata.max.age.ms=200")
    process = start("consume", "--topic", topic, "--max-messages", "2", "--from-beginning", *refresh)
    assert process.stdout is not None
    assert process.stdout.readline() == b"old\n"
    assert run("topics", "alter", "--topic", topic, "--partitions", "2").returncode == 0
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    producer.produce(topic, b"new", partition=1)
    assert producer.flush(30) == 0
    assert process.stdout.readline() == b"new\n"
    assert process.wait(timeout=30) == 0


def test_a_broker_that_comes_back_is_read_on(run: Run, start: Start, holdfast_broker: Any) -> None:
    there = ("--bootstrap-server", holdfast_broker.bootstrap_servers)
    assert run("topics", "create", "--topic", "t", *there).returncode == 0
    fill(run, "t", b"before\n", *there)
    refresh = ("--consumer-property", "metadata.max.age.ms=200")
    process = start("consume", "--topic", "t", "--from-beginning", "--max-messages", "2", *refresh, *there)
    assert process.stdout is not None
    assert process.stdout.readline() == b"before\n"
    holdfast_broker.crash()
    holdfast_broker.restart()
    fill(run, "t", b"after\n", *there)
    assert process.stdout.readline() == b"after\n"
    assert process.wait(timeout=30) == 0


def begun(start: Start) -> subprocess.Popen[bytes]:
    """One that ends by silence and has printed its first message: on a slow machine silence may be over before it."""
    for silence_ms in ("2000", "10000", "40000"):
        process = start("--timeout-ms", silence_ms)
        assert process.stdout is not None
        if process.stdout.readline() == b"before\n":
            return process
        assert process.wait(timeout=60) in (0, 3)  # silence, or a broker that was slow to answer
    raise AssertionError("there was nothing to read")


@pytest.mark.check
def test_silence_of_a_dead_broker_is_exit_code_3(run: Run, start: Start, holdfast_broker: Any) -> None:
    there = ("--bootstrap-server", holdfast_broker.bootstrap_servers)
    assert run("topics", "create", "--topic", "t", *there).returncode == 0
    fill(run, "t", b"before\n", *there)
    soon = ("--connect-timeout-ms", "2000")
    process = begun(partial(start, "consume", "--topic", "t", "--from-beginning", *there, *soon))
    holdfast_broker.crash()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert b"cannot connect" in errors


@pytest.fixture
def mortal_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that may be killed; its groups lose no time."""
    settings = {"group.initial.rebalance.delay.ms": "0"}
    with BrokerProcess(str(tmp_path / "mortal"), settings=settings) as broker:
        yield broker


@pytest.fixture
def damaged_topic(run: Run, mortal_broker: BrokerProcess) -> str:
    """Five messages in three batches; a bit of the second batch is wrong on disk."""
    there = ("--bootstrap-server", mortal_broker.bootstrap_servers)
    assert run("topics", "create", "--topic", "t", *there).returncode == 0
    for value in (b"good\n", b"damaged\nwith it\nand this\n", b"also good\n"):
        fill(run, "t", value, *there, "--command-property", "linger.ms=1000")
    (log,) = Path(mortal_broker.data_dir).glob("t-0/*.log")
    with log.open("r+b") as file:
        file.seek(log.read_bytes().index(b"damaged"))
        file.write(b"D")
    return "t"


def test_messages_in_front_of_a_damaged_one_are_printed_and_counted(
    run: Run, mortal_broker: BrokerProcess, damaged_topic: str
) -> None:
    there = ("--bootstrap-server", mortal_broker.bootstrap_servers)
    result = run("consume", "--topic", damaged_topic, "--from-beginning", "--timeout-ms", "10000", *there)
    assert (result.returncode, result.stdout) == (1, b"good\n"), result.stderr
    assert b"processed a total of 1 messages" in result.stderr
    assert b"cannot read t-0 at offset 1" in result.stderr


@pytest.mark.parametrize("as_member", [(), ("--group", "g")], ids=["alone", "member"])
def test_a_damaged_batch_is_skipped_once_when_told_so(
    run: Run, mortal_broker: BrokerProcess, damaged_topic: str, as_member: tuple[str, ...]
) -> None:
    read = ("consume", "--topic", damaged_topic, "--from-beginning", "--max-messages", "2", *as_member)
    result = run(*read, "--skip-message-on-error", "--bootstrap-server", mortal_broker.bootstrap_servers)
    assert (result.returncode, result.stdout) == (0, b"good\nalso good\n"), result.stderr
    assert result.stderr.count(b"at offset 1") == 2, "once by the client's own words"
    assert result.stderr.count(b"skipped") == 1


def test_a_member_commits_what_it_printed_in_front_of_a_damaged_message(
    run: Run, mortal_broker: BrokerProcess, damaged_topic: str
) -> None:
    read = ("consume", "--topic", damaged_topic, "--group", "g", "--from-beginning", "--timeout-ms", "10000")
    there = ("--bootstrap-server", mortal_broker.bootstrap_servers)
    outcomes = [run(*read, *there) for _ in range(2)]
    assert [(result.returncode, result.stdout) for result in outcomes] == [(1, b"good\n"), (1, b"")]


@pytest.fixture
def member(run: Run, start: Start, mortal_broker: BrokerProcess) -> Callable[..., subprocess.Popen[bytes]]:
    """A member of a group that has one message to print."""
    there = ("--bootstrap-server", mortal_broker.bootstrap_servers, "--connect-timeout-ms", "2000")
    assert run("topics", "create", "--topic", "t", *there).returncode == 0
    fill(run, "t", b"before\n", *there)

    return partial(start, "consume", "--topic", "t", "--group", "g", "--from-beginning", *there)


def test_a_member_goes_on_when_its_broker_comes_back(
    member: Start, run: Run, mortal_broker: BrokerProcess
) -> None:
    process = member("--max-messages", "2")
    assert process.stdout is not None
    assert process.stdout.readline() == b"before\n"
    mortal_broker.crash()
    mortal_broker.restart()
    fill(run, "t", b"after\n", "--bootstrap-server", mortal_broker.bootstrap_servers)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, b"after\n"), errors


@pytest.mark.check
def test_silence_of_a_dead_broker_is_exit_code_3_for_a_member_too(
    member: Start, mortal_broker: BrokerProcess
) -> None:
    process = begun(member)
    mortal_broker.crash()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert b"cannot connect" in errors


@pytest.mark.check
def test_an_interrupt_says_what_a_dead_broker_did_not_commit(
    member: Start, mortal_broker: BrokerProcess
) -> None:  # HF309
    process = member("--command-property", "auto.commit.interval.ms=600000")
    assert process.stdout is not None
    assert process.stdout.readline() == b"before\n"
    mortal_broker.crash()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert b"the last offsets were not committed" in errors
