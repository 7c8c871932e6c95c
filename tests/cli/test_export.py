"""`holdfast export`: every format holds what the topic holds, and the file is whole or not there."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer

from holdfast.cli.export import EveryPartition, parse_partitions, parse_place
from holdfast.errors import UsageError

Run = Callable[..., subprocess.CompletedProcess[bytes]]
VALUES = [b"plain", None, b"", 'größe, "quoted"\n'.encode(), b"\xff\x00binary", b"last"]


@pytest.fixture(scope="module")
def filled(bootstrap_servers: str) -> str:
    """A topic of two partitions; the first has every kind of value, the second a thousand plain ones."""
    from confluent_kafka.admin import AdminClient, NewTopic

    topic = f"export-{os.urandom(4).hex()}"
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    kept = NewTopic(topic, 2, 1, config={"retention.ms": "-1"})  # whenever its messages say they were made
    admin.create_topics([kept])[topic].result(30)
    producer = Producer({"bootstrap.servers": bootstrap_servers, "log_level": 0, "linger.ms": 5})
    for number, value in enumerate(VALUES):
        headers: Any = [("h", b"x"), ("n", None)] if number == 0 else None
        producer.produce(
            topic, value, key=b"k%d" % number, partition=0, timestamp=1000 * (number + 1), headers=headers
        )
    for number in range(1000):
        producer.produce(topic, b"%d" % number, partition=1, timestamp=1_700_000_000_000 + number)
    assert producer.flush(30) == 0
    return topic


def test_parquet_and_arrow_hold_every_byte(run_here: Run, filled: str, tmp_path: Path) -> None:
    for format_ in ("parquet", "arrow"):
        path = tmp_path / f"out.{format_}"
        result = run_here("export", filled, "--format", format_, "--output", str(path))
        assert result.returncode == 0, result.stderr
        assert b"1,006 records of 2 partitions" in result.stderr
        assert b"records/s" in result.stderr
        if format_ == "parquet":
            table = pq.read_table(path)
        else:
            with pa.ipc.open_file(path) as file:
                table = file.read_all()
        rows = [row for row in table.to_pylist() if row["partition"] == 0]
        assert [row["value"] for row in rows] == VALUES
        assert rows[0]["headers"] == [{"key": "h", "value": b"x"}, {"key": "n", "value": None}]
        assert rows[1]["timestamp"] == datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)
        assert table.num_rows == 1006
    assert sorted(os.listdir(tmp_path)) == ["out.arrow", "out.parquet"]


def test_json_lines_are_those_of_consume(run_here: Run, filled: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"  # the ending tells the format
    result = run_here("export", filled, "--output", str(path), "--partitions", "0")
    assert result.returncode == 0, result.stderr
    documents = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    printed = run_here(
        *("consume", "--topic", filled, "--partition", "0", "--offset", "earliest", "--max-messages", "6"),
        *("--output", "json"),
    )
    expected = [json.loads(line) for line in printed.stdout.splitlines()]
    for document in expected:
        del document["leader_epoch"]
    assert documents == expected
    assert [document["value_encoding"] for document in documents] == [
        "utf-8",
        None,
        "utf-8",
        "utf-8",
        "base64",
        "utf-8",
    ]


def test_csv_tells_null_empty_text_and_bytes_apart(run_here: Run, filled: str) -> None:
    result = run_here("export", filled, "--format", "csv", "--output", "-", "--partitions", "0")
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader(io.StringIO(result.stdout.decode(), newline="")))
    values = [
        None
        if not row["value_encoding"]
        else base64.b64decode(row["value"])
        if row["value_encoding"] == "base64"
        else row["value"].encode()
        for row in rows
    ]
    assert values == VALUES
    assert json.loads(rows[0]["headers"])[0] == {"key": "h", "value": "x", "value_encoding": "utf-8"}
    assert [row["headers"] for row in rows[1:]] == [""] * 5
    assert rows[0]["timestamp"].startswith("1970-01-01 00:00:01")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--partitions", "0-1"], 1006),
        (["--from", "2", "--to", "4"], 4),
        (["--from", "0:5,1:990"], 11),
        (["--from", "1970-01-01T00:00:02", "--to", "1970-01-01T00:00:05Z"], 3),
        (["--from", "latest"], 0),
        (["--to", "2023-11-14"], 6),
        (["--isolation-level", "read_uncommitted"], 1006),
    ],
)
def test_places(run_here: Run, filled: str, flags: list[str], expected: int) -> None:
    result = run_here("export", filled, "--format", "jsonl", "--output", "-", *flags)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == expected


def test_an_existing_file_is_kept_unless_forced(run_here: Run, filled: str, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    path.write_text("mine")
    result = run_here("export", filled, "--output", str(path))
    assert (result.returncode, path.read_text()) == (2, "mine")
    assert b"exists; --force replaces it" in result.stderr
    result = run_here("export", filled, "--output", str(path), "--force", "--from", "0:99999")
    assert (result.returncode, path.read_text()) == (1, "mine")
    assert b"the log holds 0 to 6" in result.stderr
    assert run_here("export", filled, "--output", str(path), "--force").returncode == 0
    assert pq.read_table(path).num_rows == 1006
    assert os.listdir(tmp_path) == ["out.parquet"]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["nowhere-to-be-found", "--output", "x.parquet"], 1, b"there is no topic 'nowhere-to-be-found'"),
        (["TOPIC", "--output", "-"], 2, b"Parquet cannot be written to standard output"),
        (["TOPIC", "--output", "missing/x.parquet"], 2, b"No such file or directory"),
        (["TOPIC", "--output", "."], 2, b"is a directory"),
        (["TOPIC", "--output", "x", "--from", "yesterday"], 2, b"is no place"),
        (["TOPIC", "--output", "x", "--partitions", "3-1"], 2, b"is no list such as"),
        (["TOPIC", "--output", "x", "--partitions", "7"], 1, b"has no partition 7"),
        (["TOPIC", "--output", "x", "--isolation-level", "some"], 2, b"is not one of"),
        (["TOPIC", "--output", "x", "--command-property", "sasl.mechanism"], 2, b"is not NAME=VALUE"),
        (["TOPIC", "--output", "x", "--command-property", "security.protocol=X"], 2, b"security.protocol"),
    ],
)
def test_errors_say_what_is_wrong_and_leave_nothing(
    run_here: Run,
    filled: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    code: int,
    message: bytes,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_here("export", *(filled if flag == "TOPIC" else flag for flag in flags))
    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert result.stderr.count(b"\n") == 1
    assert os.listdir(tmp_path) == []


def test_nobody_there_is_exit_code_3(run_here_anywhere: Run, dead_address: str, tmp_path: Path) -> None:
    result = run_here_anywhere(
        *("export", "orders", "--output", str(tmp_path / "x"), "--bootstrap-server", dead_address),
        *("--connect-timeout-ms", "300"),
    )
    assert result.returncode == 3, result.stderr
    assert dead_address.encode() in result.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("format_", ["parquet", "arrow", "csv", "jsonl"])
def test_a_disk_that_takes_no_more_is_said_and_nothing_is_left(
    run_here: Run, filled: str, tmp_path: Path, format_: str
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        result = run_here("export", filled, "--format", format_, "--output", str(tmp_path / "x"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert result.returncode == 1
    assert b"the file cannot be written" in result.stderr
    assert os.listdir(tmp_path) == []


def test_sigterm_leaves_nothing_behind(
    start: Callable[..., subprocess.Popen[bytes]], silent_address: str, tmp_path: Path
) -> None:
    # A broker that never answers keeps the command waiting, its file already begun.
    process = start("export", "t", "--output", str(tmp_path / "x"), "--bootstrap-server", silent_address)
    while not os.listdir(tmp_path):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert (process.returncode, os.listdir(tmp_path)) == (130, [])


@pytest.mark.check
def test_a_reader_that_goes_away_is_no_failure(
    start: Callable[..., subprocess.Popen[bytes]], filled: str
) -> None:
    process = start("export", filled, "--format", "jsonl", "--output", "-")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, said = process.communicate(timeout=30)
    assert (process.returncode, b"Traceback" in said) == (0, False)


def test_places_and_partitions_are_parsed() -> None:
    place = parse_place("15", "--from")
    assert isinstance(place, EveryPartition)
    assert place.offset == 15
    assert parse_place("0:1,2:30", "--from") == {0: 1, 2: 30}
    assert parse_place("2026-11-01", "--from") == datetime(2026, 11, 1, tzinfo=UTC)
    assert parse_place("2026-11-01T12:00+02:00", "--to") == datetime(2026, 11, 1, 10, tzinfo=UTC)
    assert parse_partitions("0,2-4") == {0, 2, 3, 4}
    for wrong in ("", "a", "1-", "-1", "1-9999999"):
        with pytest.raises(UsageError):
            parse_partitions(wrong)
