"""How `pipeline run`, `status`, `reset` and `compact` call the engine, and what they make of its answers."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.admin.errors import Unreachable
from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import (
    DefinitionWrong,
    EnvironmentFails,
    RuleBroken,
    StepError,
    Unbalanced,
)
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.engine import resetting, running, status
from holdfast.pipeline.engine.progress import BatchDone, Started, Summary
from holdfast.pipeline.engine.resetting import ResetPlan, ResetSink
from holdfast.pipeline.engine.status import SinkStatus, Status
from holdfast.pipeline.ledger import Entry, Intake, Routes
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span
from holdfast.reader.errors import TopicMissing

Run = Callable[..., subprocess.CompletedProcess[bytes]]
PLACE = Place("t", uuid.UUID(int=7), 0)
ROUTES = Routes(main=8, dead_letter={"parse": 1}, filtered={"f": 1})
ENTRY = Entry(
    pipeline="p",
    sink="parquet",
    number=4,
    range=BatchRange({PLACE: Span(0, 10)}),
    positions=Positions({PLACE: Position(10)}),
    batch_time_ms=0,
    fingerprint="f",
    intake=Intake(records=10),
    routes=ROUTES,
    rows=8,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(
        "pipeline: p\nsource: {topics: t, settings: {sasl.password: '${HF_TEST_PASSWORD:-none}'}}\n"
        "sinks: [parquet: out]\n"
    )
    return path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[dict[str, Any]]]:
    """Puts something in the engine's place: an error it ends with, or the summary of one batch."""

    def replace(outcome: Any) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run_pipeline(definition: PipelineDefinition, **options: Any) -> Summary:
            calls.append({"definition": definition, **options})
            options["progress"](Started("p", "/h", ("dead-letter", "parquet"), 10))
            if isinstance(outcome, Exception):
                raise outcome
            options["progress"](
                BatchDone(ENTRY.range, 0, ENTRY.intake, ROUTES, {}, {"parquet": 8}, {"stage": 100}, 1, 100)
            )
            return outcome  # type: ignore[no-any-return]

        monkeypatch.setattr(running, "run_pipeline", run_pipeline)
        return calls

    return replace


SUMMARY = Summary("p", 1, ENTRY.intake, ROUTES, {}, {"parquet": 8, "dead-letter": 1}, 2_000)


def test_run_shows_batches_on_standard_error_and_the_summary_on_standard_output(
    run_here_anywhere: Run, file: Path, engine: Callable[[Any], list[dict[str, Any]]]
) -> None:
    calls = engine(SUMMARY)
    result = run_here_anywhere(
        "pipeline", "run", str(file), "--once", "--master", "local[3]", "--bootstrap-server", "h:1"
    )
    assert result.returncode == 0, result.stderr
    (call,) = calls
    assert (call["bootstrap"], call["master"], call["once"]) == ("h:1", "local[3]", True)
    assert call["definition"].source.settings == {"sasl.password": "${HF_TEST_PASSWORD:-none}"}
    assert b"batch 1: 10 records in 100 ms" in result.stderr
    assert b"dead letter: parse" in result.stdout
    assert b"batch 1" not in result.stdout


def test_without_flags_definition_and_environment_decide(
    run_here_anywhere: Run, file: Path, engine: Callable[[Any], list[dict[str, Any]]]
) -> None:
    calls = engine(SUMMARY)
    assert run_here_anywhere("pipeline", "run", str(file)).returncode == 0
    assert [(call["bootstrap"], call["master"], call["once"]) for call in calls] == [(None, None, None)]


def test_as_json_every_line_is_a_document(
    run_here_anywhere: Run, file: Path, engine: Callable[[Any], list[dict[str, Any]]]
) -> None:
    engine(SUMMARY)
    result = run_here_anywhere("pipeline", "run", str(file), "--output", "json")
    assert [json.loads(line)["event"] for line in result.stdout.splitlines()] == ["batch", "summary"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DefinitionWrong("correct it"), 2),
        (StepError("s", "the function raised KeyError"), 2),
        (TopicMissing("there is no topic"), 2),
        (EnvironmentFails("no space left"), 3),
        (Unreachable("the broker cannot be spoken to"), 3),
        (OSError(28, "No space left on device", "/home"), 3),
        (PermissionError(13, "Permission denied", "/home"), 3),
        (RuleBroken("a rule"), 1),
        (Unbalanced("routes"), 1),
        (HoldfastError("something"), 1),
    ],
)
def test_what_stops_a_run_is_one_line_and_an_exit_code(
    run_here_anywhere: Run,
    file: Path,
    engine: Callable[[Any], list[dict[str, Any]]],
    error: Exception,
    code: int,
) -> None:
    engine(error)
    result = run_here_anywhere("pipeline", "run", str(file))
    assert result.returncode == code
    lines = result.stderr.decode().splitlines()
    assert [line.startswith("holdfast: ") for line in lines] == [False, True]
    assert "Traceback" not in result.stderr.decode()
    assert result.stdout == b""


def test_no_error_shows_a_secret(
    run_here_anywhere: Run,
    file: Path,
    engine: Callable[[Any], list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TEST_PASSWORD", "hunter2")
    engine(EnvironmentFails("the broker refuses hunter2"))
    result = run_here_anywhere("pipeline", "run", str(file))
    assert b"the broker refuses ${HF_TEST_PASSWORD}" in result.stderr


def test_status_is_a_table_with_problems_on_standard_error(
    run_here_anywhere: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = (
        SinkStatus("dead-letter", "dead-letter", None, problem="sink 'dead-letter': no answer"),
        SinkStatus("parquet", "parquet", ENTRY, lag=5, is_of_this_definition=False),
    )
    found = Status("p", "/h", "hf-p", sinks, "the source is gone", 4711, None)
    monkeypatch.setattr(status, "read_status", lambda definition, **options: found)
    result = run_here_anywhere("pipeline", "status", str(file))
    assert result.returncode == 1
    lines = result.stdout.decode().splitlines()
    assert lines[1].startswith("running as process 4711; home /h")
    assert any(
        " ".join(line.split()) == "parquet parquet 4 5 8 main 8, dead letter: parse 1, filtered: f 1"
        for line in lines
    )
    assert lines[-1].split() == ["parquet", "t-0", "10"]
    assert result.stderr.decode().splitlines() == [
        "holdfast: sink 'dead-letter': no answer",
        "holdfast: sink 'parquet': its last batch was made by another version of the definition",
        "holdfast: source: the source is gone",
    ]


@pytest.mark.parametrize("yes", [True, False])
def test_reset_does_nothing_without_a_yes(
    run_here_anywhere: Run, file: Path, monkeypatch: pytest.MonkeyPatch, yes: bool
) -> None:
    done: list[ResetPlan] = []
    start = Positions({PLACE: Position(0)})

    def plan_reset(definition: PipelineDefinition, *, sinks: Any, bootstrap: Any) -> ResetPlan:
        assert sinks == ["parquet"]
        return ResetPlan(definition, bootstrap, (ResetSink("parquet", ENTRY.positions, start),))

    monkeypatch.setattr(resetting, "plan_reset", plan_reset)
    monkeypatch.setattr(resetting, "perform_reset", done.append)
    flags = ["--yes"] if yes else []
    result = run_here_anywhere("pipeline", "reset", str(file), "--sink", "parquet", *flags)
    assert b"parquet: 10 offsets again, 0 left out (t-0 10 \xe2\x86\x92 0)" in result.stdout
    assert result.returncode == (0 if yes else 2)
    assert len(done) == (1 if yes else 0)
