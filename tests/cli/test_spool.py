"""`holdfast spool`: looking changes nothing and works beside a running producer; draining delivers what is left."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from holdfast.client.producer import Producer
from holdfast.client.spool.home import SpoolHome
from holdfast.errors import ExitCode
from holdfast.real import RealFileSystem, RealRandomness
from holdfast.testing.engines import wait_until

NOBODY = "127.0.0.1:1"
QUIET = {"log_level": 0}
DEAF = {"log_level": 0, "security.protocol": "ssl"}
"""Of a producer that understands no broker of ours, at the right address."""


@pytest.fixture
def left_behind(tmp_path: Path, bootstrap_servers: str, topic: str) -> Path:
    """A home whose only producer ended with three messages to be sent, behind one that was delivered."""
    home = tmp_path / "home"
    with Producer(bootstrap_servers, spool=home) as producer:
        producer.send(topic, b"delivered").wait(30)
    away = Producer(bootstrap_servers, spool=home, config=DEAF)
    for number in range(3):
        away.send(topic, b"left %d" % number, key=b"\xff", headers={"trace": "7"}).wait_stored(30)
    away.close(timeout=0)
    return home


def parsed(output: bytes) -> Any:
    return json.loads(output)


def lines(output: bytes) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


def files_of(home: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}


def values_in(bootstrap_servers: str, topic: str) -> list[bytes]:
    consumer: Any = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": uuid.uuid4().hex})
    where = TopicPartition(topic, 0, 0)
    _, end = consumer.get_watermark_offsets(where, timeout=30)
    consumer.assign([where])
    values = [consumer.poll(30).value() for _ in range(end)]
    consumer.close()
    return values


def test_status_tells_what_is_left_and_changes_nothing(run_here_anywhere: Any, left_behind: Path) -> None:
    before = files_of(left_behind)
    table = run_here_anywhere("spool", "status", "--spool", str(left_behind))
    assert table.returncode == ExitCode.FINDINGS, "nobody is there to deliver it"
    (spool_id,) = SpoolHome(RealFileSystem(), str(left_behind), RealRandomness()).ids()
    assert table.stdout.decode().splitlines()[1].split()[:5] == [
        spool_id,
        "left",
        "behind",
        "at-least-once",
        "3",
    ]
    (state,) = parsed(
        run_here_anywhere("spool", "status", "--spool", str(left_behind), "--output", "json").stdout
    )["spools"]
    assert (state["state"], state["to_send"], state["refused"], state["damages"]) == ("left_behind", 3, 0, [])
    assert [(each["stored"], each["confirmed"]) for each in state["partitions"]] == [(4, 1)]
    assert state["oldest_ms"] > 1_600_000_000_000
    assert files_of(left_behind) == before


def test_status_and_inspect_work_beside_a_running_producer(
    run_here_anywhere: Any, left_behind: Path, topic: str, bootstrap_servers: str
) -> None:
    away = Producer(bootstrap_servers, spool=left_behind, config=DEAF)
    try:
        away.send(topic, b"new").wait_stored(30)
        (state,) = parsed(
            run_here_anywhere("spool", "status", "--spool", str(left_behind), "--output", "json").stdout
        )["spools"]
        assert (state["state"], state["to_send"]) == ("in_use", 4)
        shown = lines(
            run_here_anywhere("spool", "inspect", "--spool", str(left_behind), "--output", "json").stdout
        )
        assert [message["value"] for message in shown] == ["left 0", "left 1", "left 2", "new"]
        away.send(topic, b"unharmed").wait_stored(30)
    finally:
        away.close(timeout=0)


def test_inspect_shows_messages_whole_as_json_and_short_as_a_table(
    run_here_anywhere: Any, left_behind: Path, topic: str
) -> None:
    arguments = ("spool", "inspect", "--spool", str(left_behind))
    (first,) = lines(run_here_anywhere(*arguments, "--max-messages", "1", "--output", "json").stdout)
    assert first | {"timestamp_ms": 0, "spool": ""} == {
        "spool": "",
        "topic": topic,
        "partition": 0,
        "sequence": 1,
        "timestamp_ms": 0,
        "key": "/w==",
        "key_encoding": "base64",
        "value": "left 0",
        "value_encoding": "utf-8",
        "headers": [{"name": "trace", "value": "7", "value_encoding": "utf-8"}],
        "to_send": True,
    }
    assert lines(run_here_anywhere(*arguments, "--topic", "another", "--output", "json").stdout) == []
    table = run_here_anywhere(*arguments).stdout.decode()
    assert "left 2" in table
    assert "Reason" not in table


def test_what_was_delivered_and_is_still_in_the_files_is_shown_when_asked_for(
    run_here_anywhere: Any, tmp_path: Path, bootstrap_servers: str, topic: str
) -> None:
    with Producer(bootstrap_servers, spool=tmp_path) as producer:
        producer.send(topic, b"delivered").wait(30)
    arguments = ("spool", "inspect", "--spool", str(tmp_path), "--output", "json")
    assert lines(run_here_anywhere(*arguments).stdout) == []
    (shown,) = lines(run_here_anywhere(*arguments, "--all").stdout)
    assert (shown["value"], shown["to_send"]) == ("delivered", False)


def test_messages_without_a_partition_are_shown_as_such(run_here_anywhere: Any, tmp_path: Path) -> None:
    away = Producer(NOBODY, spool=tmp_path, config=QUIET)
    away.send("unheard-of", b"x").wait_stored(30)
    away.close(timeout=0)
    (state,) = parsed(
        run_here_anywhere("spool", "status", "--spool", str(tmp_path), "--output", "json").stdout
    )["spools"]
    assert (state["to_send"], state["undecided"], state["partitions"]) == (1, {"unheard-of": 1}, [])
    (message,) = lines(
        run_here_anywhere("spool", "inspect", "--spool", str(tmp_path), "--output", "json").stdout
    )
    assert (message["partition"], message["value"]) == (None, "x")


def test_refused_messages_are_shown_with_the_reason(
    run_here_anywhere: Any, tmp_path: Path, bootstrap_servers: str, topic: str
) -> None:
    producer = Producer(bootstrap_servers, spool=tmp_path)
    producer.send(topic, b"y" * 2_000_000)
    assert producer.flush(30).refused_count == 1
    producer.close()
    arguments = ("--spool", str(tmp_path), "--refused")
    table = run_here_anywhere("spool", "inspect", *arguments).stdout.decode()
    assert "MSG_SIZE_TOO_LARGE" in table
    assert "y…" in table
    (exported,) = lines(run_here_anywhere("spool", "export", *arguments).stdout)
    assert (len(exported["value"]), exported["code"]) == (2_000_000, "MSG_SIZE_TOO_LARGE")


def test_what_was_set_aside_is_shown_counted_and_sent_once_more(
    run_here: Any, tmp_path: Path, bootstrap_servers: str, topic: str
) -> None:
    with Producer(bootstrap_servers, spool=tmp_path, config={"message.max.bytes": 2000}) as producer:
        for number in range(3):
            producer.send(topic, b"%d" % number * 3000, partition=0)
        producer.send(topic, b"fits", partition=0).wait(30)
        assert producer.flush(30).refused_count == 3
        assert producer.set_aside == 3
    home = ("--spool", str(tmp_path))
    status = run_here("spool", "status", *home, "--output", "json")
    assert status.returncode == ExitCode.FINDINGS
    (state,) = parsed(status.stdout)["spools"]
    assert (state["state"], state["to_send"], state["refused"]) == ("refused", 0, 3)
    assert run_here("spool", "drain", *home).returncode == ExitCode.FINDINGS
    assert run_here("spool", "retry", *home).returncode == ExitCode.USAGE
    done = run_here("spool", "retry", "--refused", *home, "--output", "json")
    assert done.returncode == ExitCode.FINE
    (retried,) = parsed(done.stdout)["spools"]
    assert (retried["delivered"], retried["refused"], retried["left"]) == (3, 0, 0)
    assert values_in(bootstrap_servers, topic) == [b"fits", *(b"%d" % number * 3000 for number in range(3))]
    assert SpoolHome(RealFileSystem(), str(tmp_path), RealRandomness()).ids() == []


def test_a_producer_in_use_sends_once_more_what_it_set_aside(
    run_here: Any, tmp_path: Path, bootstrap_servers: str, topic: str
) -> None:
    with Producer(bootstrap_servers, spool=tmp_path) as producer:
        producer.send(topic, b"x" * 2_000_000)
        assert producer.flush(30).refused_count == 1
        retried = run_here("spool", "retry", "--refused", "--spool", str(tmp_path))
        assert retried.returncode == ExitCode.FINDINGS
        assert b"its owner was asked" in retried.stdout
        wait_until(lambda: producer.flush(30).refused_count == 1, "it was tried, and refused again")
        assert producer.set_aside == 1


def test_drain_delivers_what_the_dead_left_in_order(
    run_here: Any, left_behind: Path, bootstrap_servers: str, topic: str
) -> None:
    done = run_here("spool", "drain", "--spool", str(left_behind), "--output", "json")
    assert done.returncode == ExitCode.FINE
    (drained,) = parsed(done.stdout)["spools"]
    assert (drained["delivered"], drained["refused"], drained["left"], drained["problem"]) == (3, 0, 0, None)
    assert values_in(bootstrap_servers, topic) == [b"delivered", b"left 0", b"left 1", b"left 2"]
    assert SpoolHome(RealFileSystem(), str(left_behind), RealRandomness()).ids() == []


def test_drain_keeps_exactly_once(run_here: Any, tmp_path: Path, bootstrap_servers: str, topic: str) -> None:
    with Producer(bootstrap_servers, spool=tmp_path, delivery="exactly-once") as producer:
        producer.send(topic, b"1").wait(30)
    for note in tmp_path.rglob("progress"):
        note.unlink()
    assert run_here("spool", "drain", "--spool", str(tmp_path)).returncode == ExitCode.FINE
    consumer: Any = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": uuid.uuid4().hex})
    consumer.assign([TopicPartition(topic, 0, 0)])
    assert consumer.poll(30).value() == b"1"
    assert consumer.poll(1) is None, "it was sent again"
    consumer.close()


def test_drain_leaves_a_spool_in_use_to_its_owner(
    run_here: Any, left_behind: Path, bootstrap_servers: str
) -> None:
    away = Producer(bootstrap_servers, spool=left_behind, config=DEAF)
    try:
        done = run_here("spool", "drain", "--spool", str(left_behind), "--output", "json")
        assert done.returncode == ExitCode.FINDINGS
        (drained,) = parsed(done.stdout)["spools"]
        assert (drained["left"], drained["problem"]) == (3, "in use: its owner delivers it")
    finally:
        away.close(timeout=0)


def test_drain_without_a_broker_cannot_connect(run_here_anywhere: Any, left_behind: Path) -> None:
    done = run_here_anywhere(
        "spool",
        "drain",
        "--spool",
        str(left_behind),
        "--bootstrap-server",
        NOBODY,
        "--connect-timeout-ms",
        "300",
    )
    assert done.returncode == ExitCode.CANNOT_CONNECT


@pytest.fixture
def damaged(left_behind: Path) -> Path:
    """The second of four groups of the home has a flipped bit."""
    (segment,) = left_behind.rglob("*.spool")
    data = bytearray(segment.read_bytes())
    data[data.index(b"left 0")] ^= 1
    segment.write_bytes(data)
    return left_behind


def test_damage_is_named_and_what_can_be_read_is_exported(
    run_here_anywhere: Any, damaged: Path, tmp_path: Path
) -> None:
    shown = run_here_anywhere("spool", "status", "--spool", str(damaged))
    assert shown.returncode == ExitCode.FINDINGS
    assert b"damaged" in shown.stdout
    assert b"cannot be read" in shown.stderr
    rescued = tmp_path / "rescued.jsonl"
    done = run_here_anywhere("spool", "export", "--spool", str(damaged), "--file", str(rescued))
    assert done.returncode == ExitCode.FINDINGS
    assert [message["value"] for message in lines(rescued.read_bytes())] == ["left 1", "left 2"]
    again = run_here_anywhere("spool", "export", "--spool", str(damaged), "--file", str(rescued))
    assert again.returncode == ExitCode.USAGE
    assert b"exists already" in again.stderr


def test_drain_says_that_a_spool_is_damaged(run_here: Any, damaged: Path) -> None:
    done = run_here("spool", "drain", "--spool", str(damaged))
    assert done.returncode == ExitCode.FINDINGS
    assert b"damaged at byte" in done.stdout


@pytest.mark.parametrize("command", ["status", "inspect", "export", "drain"])
def test_a_directory_without_spools_is_a_usage_error(
    command: str, run_here_anywhere: Any, tmp_path: Path
) -> None:
    missing = run_here_anywhere("spool", command, "--spool", str(tmp_path / "missing"))
    assert missing.returncode == ExitCode.USAGE
    assert b"spool=DIR" in missing.stderr
    empty = run_here_anywhere("spool", command, "--spool", str(tmp_path))
    assert empty.returncode == ExitCode.USAGE
    assert b"holds no spool" in empty.stderr


def test_one_spool_in_place_of_its_home_is_explained(run_here_anywhere: Any, left_behind: Path) -> None:
    (spool,) = (path for path in left_behind.iterdir() if path.is_dir())
    shown = run_here_anywhere("spool", "status", "--spool", str(spool))
    assert shown.returncode == ExitCode.USAGE
    assert b"the home above it" in shown.stderr
    unknown = run_here_anywhere("spool", "status", "--spool", str(left_behind), "--id", "0" * 16)
    assert unknown.returncode == ExitCode.USAGE


def test_a_spool_that_cannot_be_read_holds_up_no_other(
    run_here: Any, damaged: Path, bootstrap_servers: str, topic: str
) -> None:
    (broken,) = SpoolHome(RealFileSystem(), str(damaged), RealRandomness()).ids()
    away = Producer(bootstrap_servers, spool=damaged, config=DEAF)
    away.send(topic, b"of another").wait_stored(30)
    away.close(timeout=0)
    done = run_here("spool", "drain", "--spool", str(damaged), "--output", "json")
    assert done.returncode == ExitCode.FINDINGS
    drained = {each["id"]: each for each in parsed(done.stdout)["spools"]}
    assert "damaged at byte" in drained.pop(broken)["problem"]
    assert [(each["delivered"], each["left"]) for each in drained.values()] == [(1, 0)]
    assert b"of another" in values_in(bootstrap_servers, topic)


def test_a_spool_waits_for_its_own_cluster_until_somebody_accepts_another(
    run_here: Any, left_behind: Path, topic: str
) -> None:
    (identity,) = left_behind.rglob("identity.json")
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"cluster_id": "another"}))
    home = ("--spool", str(left_behind))
    waiting = run_here("spool", "drain", *home, "--output", "json")
    assert waiting.returncode == ExitCode.FINDINGS
    (drained,) = parsed(waiting.stdout)["spools"]
    assert drained["left"] == 3
    assert "its messages are for cluster another" in drained["problem"]
    status = run_here("spool", "status", *home)
    assert status.returncode == ExitCode.FINDINGS
    assert b"its messages are for cluster another" in status.stderr
    assert run_here("spool", "accept-cluster", *home).returncode == ExitCode.FINE
    assert run_here("spool", "drain", *home).returncode == ExitCode.FINE


@pytest.mark.check
def test_an_older_copy_is_delivered_under_a_new_id(
    run_here: Any, tmp_path: Path, bootstrap_servers: str, topic: str
) -> None:
    home = tmp_path / "home"
    with Producer(bootstrap_servers, spool=home, delivery="exactly-once") as producer:
        producer.send(topic, b"0").wait(30)
    shutil.copytree(home, tmp_path / "copy")
    with Producer(bootstrap_servers, spool=home, delivery="exactly-once") as producer:
        producer.send(topic, b"1").wait(30)
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "copy", home)
    away = Producer(bootstrap_servers, spool=home, delivery="exactly-once", config=DEAF)
    away.send(topic, b"2").wait_stored(30)
    away.close(timeout=0)
    stopped = run_here("spool", "drain", "--spool", str(home), "--output", "json")
    assert stopped.returncode == ExitCode.FINDINGS
    (drained,) = parsed(stopped.stdout)["spools"]
    assert "holdfast spool renew" in drained["problem"]
    assert run_here("spool", "renew", "--spool", str(home), "--id", drained["id"]).returncode == ExitCode.FINE
    assert run_here("spool", "drain", "--spool", str(home)).returncode == ExitCode.FINE
    consumer: Any = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": uuid.uuid4().hex,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    assert [consumer.poll(30).value() for _ in range(3)] == [b"0", b"1", b"2"]
    consumer.close()
