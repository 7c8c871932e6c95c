"""A definition held against the kept one, the ledgers and the state."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from holdfast.pipeline.changes.classifying import NeedsRebuild
from holdfast.pipeline.core.failures import EnvironmentFails
from holdfast.pipeline.definition.fingerprint import canonical, fingerprint, state_marks
from holdfast.pipeline.definition.model import EventTime, ParquetSink, PipelineDefinition, Source, Window
from holdfast.pipeline.definition.naming import home_of
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.resetting import _forget_definition
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.engine.status import SinkStatus, Status
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.operations import against_running
from holdfast.pipeline.operations.against_running import Judgement, column_changes, judge, misfits
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span
from holdfast.pipeline.sinks.parquet import Layout
from holdfast.pipeline.state.segments import StepState
from holdfast.pipeline.state.store import StateStore, Version, state_path

PLACE = Place("orders", uuid.UUID(int=7), 0)
LAKE = ParquetSink("lake", name="lake")
TOTALS = Window("totals", {"n": "count(*)"}, size="1h")


@pytest.fixture
def plain(tmp_path: Path) -> PipelineDefinition:
    return PipelineDefinition("p", Source(topics=("orders",)), sinks=(LAKE,), directory=str(tmp_path))


@pytest.fixture
def stateful(plain: PipelineDefinition) -> PipelineDefinition:
    source = Source(topics=("orders",), event_time=EventTime("_timestamp"))
    return replace(plain, source=source, steps=(TOTALS,))


def entry(mark: str, end: int = 10) -> Entry:
    positions = Positions({PLACE: Position(end)})
    return Entry("p", "lake", 3, BatchRange({PLACE: Span(0, end)}), positions, 1_000, mark)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Judge with these ledgers, and nobody at the source."""

    def ask(
        definition: PipelineDefinition,
        *sinks: SinkStatus,
        source_problem: str | None = None,
        columns: dict[str, dict[str, str]] | None = None,
    ) -> Judgement:
        status = Status("p", home_of(definition), "g", sinks, source_problem, None, None)
        monkeypatch.setattr(against_running, "read_status", lambda _, bootstrap: status)
        monkeypatch.setattr(against_running, "_ids", lambda *_: None)
        return judge(definition, columns=columns)

    return ask


def kept(definition: PipelineDefinition) -> SinkStatus:
    """The definition ran, and this is where its sink stands."""
    with Home(home_of(definition), "p") as home:
        home.note_definition(canonical(definition))
    return SinkStatus("lake", "parquet", entry(fingerprint(definition)))


def changes(found: Judgement) -> list[tuple[str, str]]:
    return [(change.level.value, change.where) for change in found.changes]


def test_a_pipeline_that_has_not_run_has_no_changes(judged: Any, plain: PipelineDefinition) -> None:
    found = judged(plain, SinkStatus("lake", "parquet", None))
    assert (found.has_run, found.changes, found.is_unsafe) == (False, (), False)


def test_the_kept_definition_tells_what_changed(judged: Any, plain: PipelineDefinition) -> None:
    stands = kept(plain)
    found = judged(plain, stands)
    assert (found.changes, found.notes) == ((), ())
    found = judged(replace(plain, sinks=(LAKE, ParquetSink("b", name="b"))), stands)
    assert changes(found) == [("safe", "sinks.b")]
    found = judged(replace(plain, sinks=(replace(LAKE, name="renamed"),)), stands)
    assert (changes(found), found.is_unsafe) == ([("refused", "sinks.renamed")], True)
    assert found.as_json()["level"] == "refused"


def test_a_ledger_of_another_definition_is_noted(judged: Any, plain: PipelineDefinition) -> None:
    kept(plain)
    found = judged(plain, SinkStatus("lake", "parquet", entry("0" * 64)))
    assert found.changes == ()
    assert "made by an earlier definition (0000000000000000)" in found.notes[0]


def test_without_a_kept_definition_the_fingerprint_alone_is_compared(
    judged: Any, plain: PipelineDefinition
) -> None:
    assert judged(plain, SinkStatus("lake", "parquet", entry(fingerprint(plain)))).changes == ()
    found = judged(plain, SinkStatus("lake", "parquet", entry("0" * 64)))
    assert changes(found) == [("safe", "pipeline")]
    assert "cannot be listed" in found.changes[0].why


def test_what_cannot_be_asked_is_noted_and_the_rest_stands(judged: Any, plain: PipelineDefinition) -> None:
    kept(plain)
    away = SinkStatus("lake", "parquet", None, problem="no permission")
    found = judged(replace(plain, name="p", trigger="5s"), away, source_problem="nobody answers")
    assert found.changes == ()
    assert found.notes == ("sink 'lake' could not be asked: no permission", "the source: nobody answers")


def test_nothing_kept_and_nobody_to_ask_is_not_taken_for_nothing_changed(
    judged: Any, plain: PipelineDefinition
) -> None:
    with pytest.raises(EnvironmentFails, match="is not known: sink 'lake' could not be asked: away"):
        judged(plain, SinkStatus("lake", "parquet", None, problem="away"))


def test_topics_of_the_ledgers_decide_about_a_pattern(judged: Any, plain: PipelineDefinition) -> None:
    before = replace(plain, source=Source(pattern="or.*"))
    stands = kept(before)
    assert changes(judged(replace(plain, source=Source(pattern="ord.*")), stands)) == [
        ("safe", "source.pattern")
    ]
    assert ("refused", "source.topics") in changes(
        judged(replace(plain, source=Source(pattern="x.*")), stands)
    )


# ---------------------------------------------------------------------------- what sinks hold


def test_columns_that_a_sink_does_not_hold_so_are_refused() -> None:
    held = {"id": "bigint", "total": "double"}
    assert not [*misfits("lake", "fail", held, {"total": "double", "id": "bigint"})]
    (changed,) = misfits("lake", "add-columns", held, {"id": "string", "more": "int"})
    assert (changed.level.value, changed.what) == (
        "refused",
        "column 'id' is bigint there, and the rows bring string",
    )
    assert [change.what for change in misfits("lake", "fail", held, {"id": "bigint", "more": "int"})] == [
        "it does not hold more",
        "it holds, and the rows lack, total",
    ]


def test_columns_of_a_parquet_sink_are_read_from_its_newest_batch(
    judged: Any, plain: PipelineDefinition, tmp_path: Path
) -> None:
    stands = kept(plain)
    batch = tmp_path / "lake" / f"batch={3:020d}"
    batch.mkdir(parents=True)
    columns = StructType([StructField("_hf", LongType()), StructField("id", LongType())])
    (batch / "_schema.json").write_bytes(Layout(columns, ()).encoded)
    assert judged(plain, stands, columns={"": {"id": "bigint"}}).changes == ()
    assert changes(judged(plain, stands, columns={"": {"id": "string"}})) == [("refused", "sinks.lake")]
    [sink] = plain.sinks
    beside = replace(plain, sinks=(replace(sink, rows="once.late"),))
    found = list(column_changes(beside, {"": {"id": "bigint"}, "once.late": {"id": "string"}}))
    assert [each.where for each in found] == ["sinks.lake"]


# ---------------------------------------------------------------------------- after a reset


def test_a_sink_that_was_reset_is_new_and_when_all_were_nothing_is_kept(plain: PipelineDefinition) -> None:
    class Forgetful:
        def __init__(self, entry: Entry | None) -> None:
            self.entry = entry

        def last_entry(self) -> Entry | None:
            return self.entry

    with Home(home_of(plain), "p") as home:
        home.note_definition(canonical(plain))
        opened: Any = {"lake": Forgetful(None), "dead-letter": Forgetful(entry("f"))}
        _forget_definition(home, {"lake"}, opened)
        left = home.kept_definition()
        assert left is not None
        assert left["sinks"] == []
        opened["dead-letter"].entry = None
        _forget_definition(home, {"dead-letter"}, opened)
        assert home.kept_definition() is None


# ---------------------------------------------------------------------------- the state itself


def publish(definition: PipelineDefinition, marks: dict[str, str]) -> None:
    steps = {name: StepState(fingerprint=mark) for name, mark in marks.items()}
    StateStore(state_path(home_of(definition))).publish(
        Version(3, Positions({PLACE: Position(10)}), {}, steps)
    )


def test_a_state_of_these_rules_is_fine_and_one_of_others_is_not(
    judged: Any, stateful: PipelineDefinition
) -> None:
    stands = kept(stateful)
    publish(stateful, state_marks(canonical(stateful)))
    assert judged(stateful, stands).changes == ()
    publish(stateful, {"totals": "other"})
    assert changes(judged(stateful, stands)) == [("rebuild", "steps.totals")]


def test_a_run_refuses_before_it_asks_spark_or_a_broker(stateful: PipelineDefinition) -> None:
    kept(stateful)
    with pytest.raises(NeedsRebuild, match=r"steps\.totals\.size"):
        run_pipeline(replace(stateful, steps=(replace(TOTALS, size="2h"),)), signals=False)


def test_a_state_that_is_gone_or_damaged_needs_a_rebuild(judged: Any, stateful: PipelineDefinition) -> None:
    stands = kept(stateful)
    assert changes(judged(stateful, stands)) == [("rebuild", "state")]
    publish(stateful, state_marks(canonical(stateful)))
    (manifest,) = Path(state_path(home_of(stateful)), "versions").glob("*.json")
    manifest.write_text("{}")
    found = judged(stateful, stands)
    assert (changes(found), found.changes[0].what) == ([("rebuild", "state")], "it cannot be read")


def test_nothing_was_read_yet_so_nothing_is_missing(judged: Any, stateful: PipelineDefinition) -> None:
    kept(stateful)
    opened = replace(entry(fingerprint(stateful)), range=BatchRange({PLACE: Span(0, 0)}), state=None)
    assert judged(stateful, SinkStatus("lake", "parquet", opened)).changes == ()
