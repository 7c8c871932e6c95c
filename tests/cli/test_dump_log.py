from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.wire.batch import Record, build_batch

Run = Callable[..., subprocess.CompletedProcess[bytes]]
NAME = "00000000000000000000"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / f"{NAME}.log"
    first = build_batch(
        [Record(0, 0, b"k", b"v", (("h1", b"1"), ("h2", None))), Record(1, 2, None, None)],
        base_timestamp=1_700_000_000_000,
        leader_epoch=3,
        producer_id=4,
        producer_epoch=0,
        base_sequence=8,
    )
    second = build_batch([Record(0, 0, b"\xff", b"x")], base_offset=2, base_timestamp=5, leader_epoch=3)
    path.write_bytes(first + second)
    return path


def test_the_lines_are_those_of_kafka_dump_log(run_anywhere: Run, log: Path) -> None:
    result = run_anywhere("dump-log", "--files", str(log), "--print-data-log")
    assert result.returncode == 0
    lines = result.stdout.decode().splitlines()
    crc = int.from_bytes(log.read_bytes()[17:21], "big")
    assert lines[:5] == [
        f"Dumping {log}",
        "Log starting offset: 0",
        "baseOffset: 0 lastOffset: 1 count: 2 baseSequence: 8 lastSequence: 9 producerId: 4 producerEpoch: 0 "
        "partitionLeaderEpoch: 3 isTransactional: false isControl: false deleteHorizonMs: OptionalLong.empty "
        f"position: 0 CreateTime: 1700000000002 size: 86 magic: 2 compresscodec: none crc: {crc} isvalid: true",
        "| offset: 0 CreateTime: 1700000000000 keySize: 1 valueSize: 1 sequence: 8 headerKeys: [h1,h2] "
        "key: k payload: v",
        "| offset: 1 CreateTime: 1700000000002 keySize: -1 valueSize: -1 sequence: 9 headerKeys: [] payload: null",
    ]


def test_json_lines_are_one_event_each(run_anywhere: Run, log: Path) -> None:
    result = run_anywhere("dump-log", "--files", str(log), "--print-data-log", "--output", "json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    kinds = [event["type"] for event in events]
    assert kinds == ["file", "batch", "record", "record", "batch", "record", "summary"]
    assert (events[5]["key"], events[5]["key_encoding"]) == ("/w==", "base64")
    assert events[-1]["end_offset"] == 3


@pytest.mark.parametrize("flags", [(), ("--verify",)])
def test_space_written_ahead_is_told_and_no_problem(
    run_anywhere: Run, log: Path, flags: tuple[str, ...]
) -> None:
    with log.open("ab") as file:
        file.write(bytes(5000))
    result = run_anywhere("dump-log", "--files", str(log), *flags)
    assert result.returncode == 0, result.stderr
    assert f"{log}: 5000 bytes written ahead" in result.stdout.decode().splitlines()


def test_only_keys_and_values_when_asked(run_anywhere: Run, log: Path) -> None:
    flags = ("--print-data-log", "--skip-record-metadata")
    result = run_anywhere("dump-log", "--files", str(log), *flags)
    assert "key: k payload: v" in result.stdout.decode().splitlines()


def test_findings_are_exit_code_1_in_every_mode(run_anywhere: Run, log: Path) -> None:
    damaged = bytearray(log.read_bytes())
    damaged[70] ^= 1
    log.write_bytes(damaged)
    for flags in (("--verify",), (), ("--output", "json"), ("--verify", "--output", "json")):
        result = run_anywhere("dump-log", "--files", str(log), *flags)
        assert result.returncode == 1
        assert b"checksum" in result.stdout
        assert b"1 problem found" in result.stderr
    assert log.read_bytes() == damaged


def test_verify_is_quiet_about_what_is_right(run_anywhere: Run, log: Path) -> None:
    (log.parent / "leader-epoch-checkpoint").write_text("0\n1\n3 0\n")
    result = run_anywhere("dump-log", "--files", str(log.parent), "--verify")
    assert result.returncode == 0
    size = log.stat().st_size
    assert result.stdout.decode() == (
        f"{log}: 2 batches, 3 records, {size} bytes, end offset 3, 0 problems\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--files", "/no/such.log"),
        ("--files", ","),
        ("--files", "/etc/hostname"),
        ("--files", "x", "--offsets-decoder", "--cluster-metadata-decoder"),
        (),
    ],
)
def test_wrong_arguments_are_exit_code_2(run_anywhere: Run, arguments: tuple[str, ...]) -> None:
    result = run_anywhere("dump-log", *arguments)
    assert result.returncode == 2
    assert len(result.stderr.decode().splitlines()) == 1


@pytest.mark.check
def test_what_a_broker_leaves_behind_when_it_is_killed_is_whole(
    run_anywhere: Run, holdfast_broker: Any
) -> None:
    there = ("--bootstrap-server", holdfast_broker.bootstrap_servers)
    assert run_anywhere("topics", "create", "--topic", "t", *there).returncode == 0
    lines = b"".join(b"line %d\n" % number for number in range(20_000))
    assert run_anywhere("produce", "--topic", "t", *there, stdin=lines).returncode == 0
    holdfast_broker.crash()
    directory = f"{holdfast_broker.data_dir}/t-0"
    result = run_anywhere("dump-log", "--files", directory, "--verify")
    assert result.returncode == 0, result.stdout
    assert b"20000 records" in result.stdout
    metadata = f"{holdfast_broker.data_dir}/__cluster_metadata-0"
    decoded = run_anywhere("dump-log", "--files", metadata, "--cluster-metadata-decoder", "--output", "json")
    assert decoded.returncode == 0, decoded.stdout
    topics = [
        event["value"]["data"]["name"]
        for event in map(json.loads, decoded.stdout.splitlines())
        if event["type"] == "record" and (event.get("value") or {}).get("type") == "TOPIC_RECORD"
    ]
    assert topics == ["t"]
