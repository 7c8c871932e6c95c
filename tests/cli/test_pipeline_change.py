"""`pipeline check --against-running`, `rebuild`, `backfill` and `compare`: what they ask for, show and end with."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.pipeline.changes.levels import Change, Level
from holdfast.pipeline.engine.planning import Bounds
from holdfast.pipeline.engine.progress import Summary
from holdfast.pipeline.ledger import Entry, Intake
from holdfast.pipeline.operations import against_running, backfilling, erasing, rebuilding, refilling
from holdfast.pipeline.operations.against_running import Judgement
from holdfast.pipeline.operations.backfilling import Backfill
from holdfast.pipeline.operations.rebuilding import CannotRebuild, Rebuilt
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span, to_text
from holdfast.pipeline.state.segments import StepState
from holdfast.pipeline.state.store import Version

Run = Callable[..., subprocess.CompletedProcess[bytes]]
PLACE = Place("t", uuid.UUID(int=7), 0)


def pipeline(directory: Path, name: str) -> Path:
    path = directory / f"{name}.yaml"
    path.write_text(
        f"pipeline: {name}\nsource: {{topics: t}}\nsinks: [parquet: {{path: {name}, name: lake}}]\n"
    )
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return pipeline(tmp_path, "p")


# ---------------------------------------------------------------------------- check --against-running

SAFE = Change(Level.SAFE, "sinks.new", "new parquet sink", "It starts there.")
REBUILD = Change(Level.REBUILD, "steps.w.size", "1h → 2h", "Made by the old rule.", "Run it.")


@pytest.mark.parametrize(
    ("changes", "code", "verdict"),
    [
        ((), 0, b"no changes since the last run; a run goes on with it"),
        ((SAFE,), 0, b"1 change since the last run; a run goes on with it"),
        ((REBUILD, SAFE), 1, b"2 changes since the last run; run `holdfast pipeline rebuild` first"),
        ((Change(Level.REFUSED, "pipeline", "a", "b", "c"),), 1, b"a run refuses it"),
    ],
)
def test_check_lists_what_changed_and_its_code_says_whether_a_run_goes_on(
    run_here_anywhere: Run,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: tuple[Change, ...],
    code: int,
    verdict: bytes,
) -> None:
    asked: list[Any] = []

    def judge(definition: Any, *, bootstrap: str | None, columns: Any) -> Judgement:
        asked.append(bootstrap)
        return Judgement("p", changes, ("nobody answered",), has_run=True)

    monkeypatch.setattr(against_running, "judge", judge)
    flags = ("--no-spark", "--against-running", "--bootstrap-server", "h:1")
    result = run_here_anywhere("pipeline", "check", str(file), *flags)
    assert (result.returncode, asked) == (code, ["h:1"])
    assert verdict in result.stdout
    assert b"nobody answered" in result.stderr
    for change in changes:
        assert change.where.encode() in result.stdout
    result = run_here_anywhere("pipeline", "check", str(file), *flags, "--output", "json")
    assert result.returncode == code
    found = json.loads(result.stdout)["against_running"]
    assert [change["where"] for change in found["changes"]] == [change.where for change in changes]


def test_check_without_the_flag_asks_nobody(
    run_here_anywhere: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(against_running, "judge", None)
    result = run_here_anywhere("pipeline", "check", str(file), "--no-spark", "--output", "json")
    assert (result.returncode, "against_running" in json.loads(result.stdout)) == (0, False)


def test_a_definition_that_is_wrong_is_not_held_against_anything(
    run_here_anywhere: Run, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("pipeline: p\n")
    assert (
        run_here_anywhere("pipeline", "check", str(wrong), "--no-spark", "--against-running").returncode == 2
    )


# ---------------------------------------------------------------------------- rebuild


class Plan:
    def __str__(self) -> str:
        return "the state of w is made anew"


REBUILT = Rebuilt("p", Version(8, Positions({}), {}, {"w": StepState()}), 3, Intake(records=70), 1, 5, 2_000)


@pytest.fixture
def rebuild(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    calls: dict[str, Any] = {}

    def plan_rebuild(definition: Any, **options: Any) -> Plan:
        calls["plan"] = options
        return Plan()

    def perform_rebuild(plan: Any, **options: Any) -> Rebuilt:
        calls["master"] = options["master"]
        return REBUILT

    monkeypatch.setattr(rebuilding, "plan_rebuild", plan_rebuild)
    monkeypatch.setattr(rebuilding, "perform_rebuild", perform_rebuild)
    return calls


def test_rebuild_shows_its_plan_and_does_it_when_told(
    run_here_anywhere: Run, file: Path, rebuild: dict[str, Any]
) -> None:
    result = run_here_anywhere(
        "pipeline",
        "rebuild",
        str(file),
        "--yes",
        "--from-available",
        "--bootstrap-server",
        "h:1",
        "--master",
        "m",
    )
    assert result.returncode == 0, result.stderr
    assert rebuild == {"plan": {"bootstrap": "h:1", "from_available": True}, "master": "m"}
    assert b"the state of w is made anew" in result.stderr
    assert b"batches with fewer records than then" in result.stdout


def test_rebuild_without_a_terminal_does_nothing_unasked(
    run_here_anywhere: Run, file: Path, rebuild: dict[str, Any]
) -> None:
    result = run_here_anywhere("pipeline", "rebuild", str(file))
    assert (result.returncode, "master" in rebuild) == (2, False)
    assert b"--yes" in result.stderr


def test_rebuild_as_json_ends_with_what_it_made(
    run_here_anywhere: Run, file: Path, rebuild: dict[str, Any]
) -> None:
    result = run_here_anywhere("pipeline", "rebuild", str(file), "--yes", "--output", "json")
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["event"], found["version"], found["offsets_missing"]) == ("rebuilt", 8, 5)


def test_a_rebuild_that_cannot_be_done_is_a_finding(
    run_here_anywhere: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_rebuild(definition: Any, **options: Any) -> Plan:
        raise CannotRebuild("the source no longer has 5 of the offsets")

    monkeypatch.setattr(rebuilding, "plan_rebuild", plan_rebuild)
    result = run_here_anywhere("pipeline", "rebuild", str(file), "--yes")
    assert result.returncode == 1
    assert b"no longer has 5" in result.stderr


# ---------------------------------------------------------------------------- refill


def test_refill_shows_its_plan_and_does_it_when_told(
    run_here_anywhere: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Any] = {}

    def plan_refill(definition: Any, sink: str, **options: Any) -> str:
        calls["plan"] = (sink, options)
        return "sink 'o' is written from 70 offsets"

    def perform_refill(plan: Any, **options: Any) -> Summary:
        calls["master"] = options["master"]
        return Summary("p", batches=3)

    monkeypatch.setattr(refilling, "plan_refill", plan_refill)
    monkeypatch.setattr(refilling, "perform_refill", perform_refill)
    unasked = run_here_anywhere("pipeline", "refill", str(file), "o")
    assert (unasked.returncode, "master" in calls) == (2, False)
    assert b"--yes" in unasked.stderr
    result = run_here_anywhere(
        "pipeline", "refill", str(file), "o", "--yes", "--from-available", "--master", "m"
    )
    assert result.returncode == 0, result.stderr
    assert calls == {"plan": ("o", {"bootstrap": None, "from_available": True}), "master": "m"}
    assert b"is written from 70 offsets" in result.stderr
    assert b"o refilled" in result.stdout


# ---------------------------------------------------------------------------- backfill


def test_backfill_tells_its_range_and_where_the_rows_went(
    run_here_anywhere: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def plan_backfill(definition: Any, **options: Any) -> Backfill:
        asked.append(options)
        derived = backfilling.derive(definition, options["into"])
        return Backfill(derived, Bounds({PLACE: 3}, {PLACE: 9}), is_resumed=False)

    def run_backfill(plan: Backfill, **options: Any) -> Summary:
        asked.append(options["master"])
        return Summary(plan.definition.name, 1, Intake(records=6))

    monkeypatch.setattr(backfilling, "plan_backfill", plan_backfill)
    monkeypatch.setattr(backfilling, "run_backfill", run_backfill)
    arguments = ("pipeline", "backfill", str(file), "--from", "earliest", "--to", "t:0=9", "--into", "x")
    result = run_here_anywhere(*arguments, "--master", "m")
    assert result.returncode == 0, result.stderr
    assert asked == [{"begin": "earliest", "end": "t:0=9", "into": "x", "bootstrap": None}, "m"]
    assert b"backfill p.x: t-0 [3, 9)" in result.stderr
    assert b"parquet p-x" in result.stdout
    assert b"topic p-dlt.x" in result.stdout
    found = json.loads(run_here_anywhere(*arguments, "--output", "json").stdout)
    assert found["backfill"]["destinations"] == {"dead-letter": "topic p-dlt.x", "lake": "parquet p-x"}


def test_backfill_needs_to_be_told_the_range_and_the_name(run_here_anywhere: Run, file: Path) -> None:
    assert run_here_anywhere("pipeline", "backfill", str(file), "--from", "earliest").returncode == 2


# ---------------------------------------------------------------------------- compare


def write(directory: Path, name: str, end: int, ids: list[int]) -> Path:
    entry = Entry(
        name, "lake", 0, BatchRange({PLACE: Span(0, end)}), Positions({PLACE: Position(end)}), 1, "f"
    )
    batch = directory / name / f"batch={0:020d}"
    batch.mkdir(parents=True)
    (batch / "_ledger.json").write_text(to_text(entry.as_json()))
    lineage = [{"topic": "t", "partition": 0, "offset": at, "index": 0} for at in range(len(ids))]
    pq.write_table(pa.table({"_hf": lineage, "id": ids}), batch / "part-0.parquet")
    return pipeline(directory, name)


def test_compare_ends_with_what_it_found(run_here_anywhere: Run, tmp_path: Path) -> None:
    one, same = write(tmp_path, "one", 2, [7, 8]), write(tmp_path, "same", 2, [7, 8])
    other = write(tmp_path, "other", 2, [7, 9])
    late = pipeline(tmp_path, "late")
    result = run_here_anywhere("pipeline", "compare", str(one), str(same))
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"lake: equal; 2 rows of A and 2 of B compared" in result.stdout
    result = run_here_anywhere("pipeline", "compare", str(one), str(other))
    assert result.returncode == 1
    assert b"1 rows differ, in id (1)" in result.stdout
    assert b"A: _hf=t-0@1#0, id=8" in result.stdout
    result = run_here_anywhere("pipeline", "compare", str(one), str(late))
    assert result.returncode == 4
    assert b"B has not run yet" in result.stdout
    result = run_here_anywhere(
        "pipeline", "compare", str(one), str(other), "--ignore", "id", "--output", "json"
    )
    assert (result.returncode, json.loads(result.stdout)["verdict"]) == (0, "equal")


def test_compare_wants_pairs_of_sinks(run_here_anywhere: Run, tmp_path: Path) -> None:
    one, other = pipeline(tmp_path, "one"), pipeline(tmp_path, "two")
    result = run_here_anywhere("pipeline", "compare", str(one), str(other), "--sink", "lake")
    assert result.returncode == 2
    assert b"NAME=NAME" in result.stderr


# ---------------------------------------------------------------------------- erase


def test_erase_counts_asks_and_erases_when_told(
    run_here_anywhere: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def plan_erase(definition: Any, where: str, reason: str, **options: Any) -> erasing.ErasePlan:
        assert options == {"sinks": ["lake"], "bootstrap": "h:1"}
        return erasing.ErasePlan(definition, "h:1", where, reason, {"lake": 7}, {"t": "it is a topic"})

    def perform_erase(plan: Any, **options: Any) -> erasing.Erased:
        done.append(f"{plan.where} by {plan.reason}")
        return erasing.Erased("p", plan.reason, plan.rows, plan.untouched)

    monkeypatch.setattr(erasing, "plan_erase", plan_erase)
    monkeypatch.setattr(erasing, "perform_erase", perform_erase)
    flags = ("--where", "id = 1", "--reason", "request 7", "--sink", "lake", "--bootstrap-server", "h:1")
    unasked = run_here_anywhere("pipeline", "erase", str(file), *flags)
    assert (unasked.returncode, done) == (2, [])
    assert b"--yes" in unasked.stderr
    counted = run_here_anywhere("pipeline", "erase", str(file), *flags, "--dry-run")
    assert (counted.returncode, done) == (0, [])
    assert b"lake: 7 rows" in counted.stderr
    assert b"t: not erased: it is a topic" in counted.stderr
    told = run_here_anywhere("pipeline", "erase", str(file), *flags, "--yes", "--output", "json")
    assert (told.returncode, done) == (0, ["id = 1 by request 7"])
    found = json.loads(told.stdout)
    assert (found["event"], found["sinks"], found["dry_run"]) == ("erased", {"lake": 7}, False)


@pytest.mark.parametrize("flags", [("--where", " ", "--reason", "r"), ("--where", "true", "--reason", "")])
def test_an_erasure_needs_a_condition_and_a_reason(
    run_here_anywhere: Run, file: Path, flags: tuple[str, ...]
) -> None:
    result = run_here_anywhere("pipeline", "erase", str(file), *flags)
    assert (result.returncode, b"is empty" in result.stderr) == (2, True)
