from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[bytes]]
Start = Callable[..., subprocess.Popen[bytes]]
MakeTopic = Callable[..., str]


def stored(run: Run, topic: str, count: int) -> list[dict[str, Any]]:
    result = run(
        *("consume", "--topic", topic, "--from-beginning", "--max-messages", str(count)),
        *("--timeout-ms", "5000", "--output", "json"),
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_line_is_stored_in_order(run: Run, topic: str) -> None:
    lines = [f"line {number}" for number in range(5000)]
    result = run("produce", "--topic", topic, stdin="\n".join(lines).encode())
    assert result.returncode == 0
    assert f"5000 delivered to '{topic}' (acks=all), 0 failed" in result.stderr.decode()
    assert [message["value"] for message in stored(run, topic, 5000)] == lines


def test_bytes_are_stored_as_they_are(run: Run, topic: str) -> None:
    run("produce", "--topic", topic, stdin=b"\xff\xfe\n\ncarriage\r\n last ")
    result = run("consume", "--topic", topic, "--from-beginning", "--max-messages", "4")
    assert result.stdout == b"\xff\xfe\n\ncarriage\n last \n"


def test_keys_headers_and_nulls_are_parsed(run: Run, topic: str) -> None:
    result = run(
        *("produce", "--topic", topic),
        *("--reader-property", "parse.key=true", "--property", "key.separator=|"),
        *("--property", "parse.headers=true", "--property", "null.marker=NULL"),
        stdin=b"h:1,i:NULL\tkey|value|rest\nNULL\tNULL|NULL\n",
    )
    assert result.returncode == 0, result.stderr
    first, second = stored(run, topic, 2)
    assert (first["key"], first["value"]) == ("key", "value|rest")
    assert first["headers"] == [
        {"key": "h", "value": "1", "value_encoding": "utf-8"},
        {"key": "i", "value": None, "value_encoding": None},
    ]
    assert (second["key"], second["value"], second["headers"]) == (None, None, [])


def test_a_key_goes_where_the_java_client_would_put_it(run: Run, make_topic: MakeTopic) -> None:
    topic = make_topic("--partitions", "6")
    keys = ["a", "key", "holdfast", "0123456789", "中"]
    # murmur2, Kafka's default partitioner: (hash & 0x7fffffff) % 6
    expected = {key: _murmur2(key.encode()) % 6 for key in keys}
    lines = "".join(f"{key}\tv\n" for key in keys)
    run("produce", "--topic", topic, "--reader-property", "parse.key=true", stdin=lines.encode())
    assert {message["key"]: message["partition"] for message in stored(run, topic, 5)} == expected


def _murmur2(data: bytes) -> int:
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for position in range(0, whole, 4):
        k = int.from_bytes(data[position : position + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ k >> 24) * m & mask)
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return (h ^ h >> 15) & 0x7FFFFFFF


def test_a_line_that_cannot_be_parsed_is_reported_and_the_rest_is_sent(run: Run, topic: str) -> None:
    flags = ("produce", "--topic", topic, "--reader-property", "parse.key=true")
    result = run(*flags, "--output", "json", stdin=b"a\t1\nbad\nb\t2\n")
    assert result.returncode == 1
    assert f"line 2 was not delivered to '{topic}'" in result.stderr.decode()
    failure, summary = (json.loads(line) for line in result.stdout.splitlines())
    assert (failure["type"], failure["line"], failure["error"]) == ("failure", 2, "MALFORMED_LINE")
    assert summary == {
        "type": "summary",
        "topic": topic,
        "delivered": 2,
        "failed": 1,
        "partitions": [{"partition": 0, "count": 2, "first_offset": 0, "last_offset": 1}],
    }
    assert [message["value"] for message in stored(run, topic, 2)] == ["1", "2"]


def test_what_the_broker_refuses_is_reported_with_its_line(run: Run, make_topic: MakeTopic) -> None:
    topic = make_topic("--config", "max.message.bytes=2000")
    result = run("produce", "--topic", topic, "--sync", stdin=b"small\n" + b"x" * 5000 + b"\nsmall too\n")
    assert result.returncode == 1
    assert "line 2 was not delivered" in result.stderr.decode()
    assert "MSG_SIZE_TOO_LARGE" in result.stderr.decode()
    assert "2 delivered" in result.stderr.decode()
    assert [message["value"] for message in stored(run, topic, 2)] == ["small", "small too"]


def test_a_line_longer_than_a_request_is_reported_without_being_held(run: Run, topic: str) -> None:
    flags = ("produce", "--topic", topic, "--command-property", "max.request.size=100000")
    result = run(*flags, stdin=b"x" * 3_000_000 + b"\nnext\n")
    assert result.returncode == 1
    assert b"line 1 was not delivered" in result.stderr
    assert [message["value"] for message in stored(run, topic, 1)] == ["next"]


def test_a_topic_that_does_not_exist_is_not_created_by_accident(run: Run) -> None:  # HF207
    result = run("produce", "--topic", "cli-is-not-there", stdin=b"lost?\n")
    assert result.returncode == 1
    assert b"topics create --topic cli-is-not-there" in result.stderr
    assert "cli-is-not-there" not in run("topics", "list").stdout.decode().split()


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_every_codec_goes_through(run: Run, topic: str, codec: str) -> None:
    result = run("produce", "--topic", topic, "--compression-codec", codec, stdin=b"again and " * 500)
    assert result.returncode == 0, result.stderr
    (message,) = stored(run, topic, 1)
    assert message["value"] == "again and " * 500


@pytest.mark.parametrize("acks", ["0", "1", "-1", "all"])
def test_acks_can_be_chosen_and_are_named_in_the_summary(run: Run, topic: str, acks: str) -> None:
    result = run("produce", "--topic", topic, "--request-required-acks", acks, stdin=b"message\n")
    assert result.returncode == 0, result.stderr
    assert f"acks={acks}" in result.stderr.decode()
    assert [message["value"] for message in stored(run, topic, 1)] == ["message"]


def test_settings_of_the_java_client_are_understood(run: Run, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "producer.properties"
    file.write_text(
        "acks=1\nbuffer.memory=1048576\nkey.serializer=org.example.Bytes\nbootstrap.servers=nowhere:1\n"
    )
    result = run("produce", "--topic", topic, "--producer.config", str(file), stdin=b"message\n")
    assert result.returncode == 0, result.stderr
    assert b"key.serializer has no effect" in result.stderr
    assert b"acks=1" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_delivers_what_was_read_and_exits_130(
    run: Run, start: Start, topic: str, number: signal.Signals
) -> None:
    process = start("produce", "--topic", topic, "--timeout", "60000", "--output", "json")
    assert process.stdin is not None
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()
    # A line that cannot be sent is reported at once: when its report is here, the lines before it were read.
    process.stdin.write(b"x" * 1_100_000 + b"\n")
    process.stdin.flush()
    assert process.stdout is not None
    assert process.stderr is not None
    assert b"line 3" in process.stderr.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"2 delivered to '{topic}'" in errors.decode()
    assert [message["value"] for message in stored(run, topic, 2)] == ["one", "two"]


@pytest.mark.check
def test_lines_a_dead_broker_never_confirmed_are_reported(
    run: Run, start: Start, holdfast_broker: Any
) -> None:
    there = ("--bootstrap-server", holdfast_broker.bootstrap_servers)
    assert run("topics", "create", "--topic", "t", *there).returncode == 0
    bounded = ("--command-property", "delivery.timeout.ms=2000", "--sync", "--output", "json", *there)
    process = start("produce", "--topic", "t", "--reader-property", "parse.key=true", *bounded)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"k\tconfirmed\nno key\n")
    process.stdin.flush()
    assert b"line 2" in process.stderr.readline()
    holdfast_broker.crash()
    output, errors = process.communicate(b"k\tunconfirmed\nk\tneither\n", timeout=60)
    assert process.returncode == 1
    assert b"_MSG_TIMED_OUT" in errors
    events = [json.loads(line) for line in output.splitlines()]
    assert [event["line"] for event in events if event["type"] == "failure"] == [2, 3, 4]
    assert events[-1]["delivered"] == 1
