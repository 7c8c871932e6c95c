"""What a run shows: lines without a terminal, a table with one, a summary at the end."""

from __future__ import annotations

import io
import json
import socket
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.cli.pipeline_output import JsonProgress, LiveProgress, PlainProgress, summary_rows, supervised
from holdfast.pipeline.engine.progress import (
    BatchDone,
    Event,
    Retrying,
    Started,
    StateNow,
    Stopping,
    Summary,
    Waiting,
    Warned,
)
from holdfast.pipeline.ledger import Intake, Routes
from holdfast.pipeline.positions import BatchRange, Place, Span
from holdfast.supervisor import Supervisor

STARTED = Started("orders", "/h", ("dead-letter", "parquet"), lag=5_000)


def batch(number: int = 1, records: int = 1_000, lag: int = 4_000) -> BatchDone:
    dead = records // 100
    return BatchDone(
        number=number,
        range=BatchRange({Place("orders", uuid.UUID(int=1), 0): Span(0, records)}),
        batch_time_ms=0,
        intake=Intake(records=records),
        routes=Routes(main=records - 2 * dead, dead_letter={"parse": dead}, filtered={"no-tests": dead}),
        warned={"young": 3},
        rows_by_sink={"dead-letter": dead, "parquet": records - 2 * dead},
        duration_ms=500,
        times_ms={"stage": 300, "commit": 200},
        lag=lag,
    )


def lines(*events: Event) -> list[str]:
    stream = io.StringIO()
    with PlainProgress(stream) as progress:
        for event in events:
            progress(event)
    return stream.getvalue().splitlines()


def test_without_a_terminal_each_batch_is_a_line() -> None:
    assert lines(
        STARTED,
        batch(),
        Waiting(),
        Waiting(),
        Retrying("no broker", 500),
        Warned("w"),
        Stopping("SIGTERM: ending"),
    ) == [
        "pipeline orders: 5,000 offsets to read, to dead-letter, parquet",
        "batch 1: 1,000 records in 500 ms (2,000/s), main 980, dead letter: parse 10, filtered: no-tests 10; "
        "lag 4,000 [stage 300 commit 200]",
        "waiting for records",
        "trying again in 0.5 s: no broker",
        "warning: w",
        "SIGTERM: ending",
    ]


def remembering() -> BatchDone:
    return replace(
        batch(),
        step_counts={"totals": {"closed": 7, "taken": 970, "late": 10, "rows": 7}, "quiet": {"taken": 0}},
        state=StateNow(3, 1_772_323_200_000, {"totals": (40, 5_000), "once": (900, 1_000)}),
    )


def test_a_memory_is_told_with_its_watermark_and_size() -> None:
    [line] = lines(remembering())
    assert (
        "filtered: no-tests 10; totals: closed 7, taken 970, late 10, rows 7; "
        "watermark 2026-03-01T00:00:00Z, state 6,000 B; lag 4,000" in line
    )
    assert "totals: closed 7" in drawn(STARTED, remembering())


def test_as_json_each_batch_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    progress = JsonProgress(io.StringIO())
    progress(STARTED)
    progress(batch())
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["routes"]["main"] == 980


def drawn(*events: Event) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    live = LiveProgress("orders", console=console, clock=lambda: 0.0)
    for event in events:
        live(event)
    console.print(live.table())
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_on_a_terminal_a_table_shows_rows_speed_lag_and_routes() -> None:
    text = drawn(STARTED, batch(1), batch(2, records=3_000, lag=1_000))
    for part in ("4,000", "4,000/s, 2 batches", "dead letter: parse", "filtered: no-tests", "1,000", "1.0 %"):
        assert part in text
    assert "warned: young" in text
    assert "500 ms" in text


def test_the_table_says_what_it_waits_for() -> None:
    assert "starting Spark" in drawn()
    assert "waiting for records" in drawn(STARTED, Waiting())
    assert "trying again in 2 s: [no] broker" in drawn(STARTED, Retrying("[no] broker", 2_000))
    assert "SIGTERM: ending" in drawn(STARTED, Stopping("SIGTERM: ending"))
    assert "warning: [x]" in drawn(Warned("[x]"))


def test_the_summary_has_every_route_and_sink() -> None:
    done = batch()
    summary = Summary(
        "orders",
        1,
        Intake(records=1_000, aborted=5),
        done.routes,
        done.warned,
        done.rows_by_sink,
        2_000,
        4_000,
    )
    assert summary_rows(summary) == [
        ("batches", "1"),
        ("records", "1,000"),
        ("time", "2.0 s, 500/s"),
        ("aborted", "5"),
        ("→ main", "980"),
        ("→ dead letter: parse", "10"),
        ("→ filtered: no-tests", "10"),
        ("warned: young", "3"),
        ("written to dead-letter", "10"),
        ("written to parquet", "980"),
        ("lag", "4,000"),
    ]


def test_an_empty_run_has_a_summary_too() -> None:
    assert ("time", "0.0 s") in summary_rows(Summary("orders"))


def test_a_supervisor_hears_that_a_run_gets_on(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(tmp_path / "notify"))
        ear.settimeout(30)
        tell = supervised(Supervisor({"NOTIFY_SOCKET": str(tmp_path / "notify")}))
        for event, said in (
            (STARTED, "READY=1\nSTATUS=running, 5,000 behind"),
            (batch(), "WATCHDOG=1\nSTATUS=batch of 1,000 records done, 4,000 behind"),
            (Waiting(), "WATCHDOG=1"),
            (Retrying("no\nREADY=1", 500), "WATCHDOG=1\nSTATUS=trying again: no READY=1"),
            (Stopping("SIGTERM"), "STOPPING=1\nSTATUS=stopping"),
        ):
            tell(event)
            assert ear.recv(4096).decode() == said
