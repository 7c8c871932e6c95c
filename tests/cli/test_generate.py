"""`holdfast generate`: the same bytes in a file and in a topic, and a summary that says what they are."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[bytes]]
Start = Callable[..., subprocess.Popen[bytes]]
MIXED = ("--malformed", "0.05", "--duplicates", "0.05", "--late", "0.05", "--disorder", "2s")


def summary_of(result: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


@pytest.mark.parametrize("kind", ["orders", "activity", "logs", "changes", "payments"])
def test_a_file_holds_what_the_summary_says(run: Run, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "out.jsonl"
    summary = summary_of(
        run("generate", kind, "--to", str(file), "--count", "500", *MIXED, "--output", "json")
    )
    content = file.read_bytes()
    assert summary["messages"] == content.count(b"\n") == 500
    assert summary["sha256"] == hashlib.sha256(content).hexdigest()
    assert summary["file"] == str(file)


def test_a_topic_gets_the_same_messages_with_their_keys(run: Run, topic: str, tmp_path: Path) -> None:
    flags = ("--count", "300", "--seed", "7", "--duplicates", "0.1", "--output", "json")
    sent = summary_of(run("generate", "orders", "--topic", topic, *flags))
    file = tmp_path / "out.txt"
    run("generate", "orders", "--to", str(file), "--with-keys", *flags)
    assert (sent["delivered"], sent["failed"]) == (300, 0)
    result = run(
        *("consume", "--topic", topic, "--from-beginning", "--max-messages", "300"),
        *("--timeout-ms", "5000", "--output", "json"),
    )
    messages = [json.loads(line) for line in result.stdout.splitlines()]
    stored = sorted(f"{message['key']}\t{message['value']}" for message in messages)
    assert stored == sorted(file.read_text().splitlines())


def test_standard_output_gets_messages_alone(run: Run) -> None:
    result = run("generate", "logs", "--to", "-", "--count", "20")
    assert result.returncode == 0
    assert all(json.loads(line)["service"] for line in result.stdout.splitlines())
    assert len(result.stdout.splitlines()) == 20
    assert b"messages: 20" in result.stderr


def test_people_get_a_summary_they_can_read(run: Run, tmp_path: Path) -> None:
    result = run("generate", "payments", "--to", str(tmp_path / "o"), "--count", "2000", "--spacing", "1s")
    assert b"messages: 2,000\n" in result.stdout
    assert b"frauds: " in result.stdout


def test_events_begin_when_they_are_told_to(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "o"
    run("generate", "orders", "--to", str(file), "--count", "1", "--start", "2027-03-04T05:06:07+01:00")
    assert json.loads(file.read_text())["at"].startswith("2027-03-04T04:06:07.")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("orders",), "give --topic, or --to and a file"),
        (("orders", "--to", "a", "--topic", "b"), "one of the two"),
        (("ordres", "--to", "a"), "'ordres' is not one of 'orders'"),
        (("orders", "--to", "a", "--spacing", "fast"), "--spacing: 'fast' is not a duration"),
        (("orders", "--to", "a", "--start", "soon"), "--start 'soon' is no time"),
        (("orders", "--to", "a", "--late", "0.7", "--malformed", "0.7"), "more than all"),
    ],
)
def test_what_is_wrong_with_the_flags_is_said(run: Run, flags: tuple[str, ...], error: str) -> None:
    result = run("generate", *flags)
    assert result.returncode == 2
    assert error in result.stderr.decode()


def test_a_topic_that_is_missing_is_not_made(run: Run) -> None:
    result = run("generate", "orders", "--topic", "nowhere-to-be-seen", "--count", "1")
    assert result.returncode == 1
    assert b"holdfast topics create" in result.stderr


def test_an_interrupt_ends_it_with_a_summary_of_what_was_sent(run: Run, start: Start, topic: str) -> None:
    process = start(
        *("generate", "orders", "--topic", topic, "--rate", "20", "--count", "100000", "--output", "json")
    )
    first = run(
        *("consume", "--topic", topic, "--from-beginning", "--max-messages", "1", "--timeout-ms", "40000")
    )
    assert first.stdout.startswith(b'{"id":1,')
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    summary = json.loads(output)
    assert 0 < summary["messages"] == summary["delivered"] < 100_000
    assert process.returncode == 130
