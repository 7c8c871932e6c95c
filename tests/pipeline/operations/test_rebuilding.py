"""A rebuilt state is the one the new definition would have made; what cannot be rebuilt is said before anything."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from holdfast.pipeline.changes.classifying import NeedsRebuild, UnsafeChange
from holdfast.pipeline.changes.levels import Level
from holdfast.pipeline.core.failures import AlreadyRunning, DefinitionWrong
from holdfast.pipeline.definition.fingerprint import canonical
from holdfast.pipeline.definition.model import (
    PipelineDefinition,
)
from holdfast.pipeline.definition.naming import home_of
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.progress import BatchDone, Event
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.operations.against_running import judge
from holdfast.pipeline.operations.comparing import Verdict, compare_pipelines
from holdfast.pipeline.operations.rebuilding import (
    CannotRebuild,
    perform_rebuild,
    plan_rebuild,
    take_the_place,
)
from holdfast.pipeline.positions import BatchRange, Position, Positions, Span
from holdfast.pipeline.state.store import StateStore, Version, state_path

from .conftest import REAL, TOTALS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .conftest import Shop


def newest(definition: PipelineDefinition) -> tuple[StateStore, Version]:
    store = StateStore(state_path(home_of(definition)), is_writer=False)
    version = store.newest()
    assert version is not None
    return store, version


def remembered(definition: PipelineDefinition) -> dict[str, Counter[str]]:
    """By step, the rows of its state."""
    store, version = newest(definition)
    return {
        name: Counter(
            str(sorted(row.items(), key=str))
            for segment in state.segments
            for path in store.paths(segment)
            for row in pq.read_table(path, partitioning=None).to_pylist()
        )
        for name, state in version.steps.items()
    }


# ---------------------------------------------------------------------------- with Spark


@pytest.mark.long
def test_the_state_is_the_one_that_the_new_definition_would_have_made(
    shop: Shop, spark: SparkSession
) -> None:
    def run(definition: PipelineDefinition) -> int:
        return run_pipeline(definition, spark=spark, signals=False).batches

    shop.produce(50)
    assert run(shop.pipeline()) == 2
    changed = shop.pipeline(steps=(REAL, replace(TOTALS, size="2m")))
    sinks = sorted((str(path), path.stat().st_mtime_ns) for path in shop.directory.glob("shop-*/**/*"))

    with pytest.raises(UnsafeChange, match=r"pipeline rebuild(.|\n)*steps\.totals\.size: 1m → 2m"):
        run(changed)
    judged = judge(changed)
    assert [(change.level, change.where) for change in judged.changes] == [
        (Level.REBUILD, "steps.totals.size")
    ]

    plan = plan_rebuild(changed)
    assert [cut.is_recorded for cut in plan.cuts] == [True, True]
    events: list[Event] = []
    rebuilt = perform_rebuild(plan, spark=spark, progress=events.append)
    assert (rebuilt.batches, rebuilt.intake.records, rebuilt.shrunk) == (2, 50, 0)
    assert [event.lag for event in events if isinstance(event, BatchDone)][-1] == 0
    assert sinks == sorted(
        (str(path), path.stat().st_mtime_ns) for path in shop.directory.glob("shop-*/**/*")
    )
    assert judge(changed).changes == ()

    # The same definition, from the beginning, in the same batches.
    beside = shop.pipeline("beside", changed.steps)
    _run_in_these_batches(beside, plan.cuts, spark)
    assert remembered(changed) == remembered(beside)
    (_, mine), (_, theirs) = newest(changed), newest(beside)
    assert mine.watermark["watermark_ms"] == theirs.watermark["watermark_ms"]
    assert (mine.number, theirs.number) == (4, 2)

    # Both go on alike.
    shop.produce(30)
    assert run(changed) == run(beside) == 1
    assert remembered(changed) == remembered(beside)
    rows, totals = compare_pipelines(changed, beside)
    assert rows.verdict is Verdict.EQUAL
    assert totals.differences.only_b > 0  # windows of two minutes from before the change


def _run_in_these_batches(definition: PipelineDefinition, cuts: tuple[Any, ...], spark: SparkSession) -> None:
    """By ends: each run takes what one batch of then took."""
    from holdfast.pipeline.engine.planning import Bounds

    start = {place: 0 for cut in cuts for place in cut.range.spans}
    end = dict(start)
    for cut in cuts:
        end.update({place: span.end for place, span in cut.range.spans.items()})
        assert (
            run_pipeline(definition, spark=spark, signals=False, bounds=Bounds(start, dict(end))).batches == 1
        )


def test_a_pipeline_without_a_memory_gets_one_as_if_it_had_always_had_it(
    shop: Shop, spark: SparkSession
) -> None:
    plain = shop.pipeline(steps=(REAL,))
    plain = replace(plain, sinks=plain.sinks[:1])
    shop.produce(20)
    run_pipeline(plain, spark=spark, signals=False)
    shop.produce(20)
    with pytest.raises(NeedsRebuild, match=r"steps\.totals: new window"):
        run_pipeline(shop.pipeline(), spark=spark, signals=False)
    perform_rebuild(plan_rebuild(shop.pipeline()), spark=spark)
    summary = run_pipeline(shop.pipeline(), spark=spark, signals=False)
    assert summary.rows_by_sink["rows"] == 20
    counted: Counter[int] = Counter()
    for path in (shop.directory / "shop-totals").glob("batch=*/*.parquet"):
        for row in pq.read_table(path, partitioning=None).to_pylist():
            counted[row["window_start"].minute] += row["n"]
    # Five of the six of the second minute were read before there was a window; what had closed by then is not told.
    assert counted == {2: 6, 3: 6, 4: 6}


# ---------------------------------------------------------------------------- without


@dataclass
class Stand:
    """A sink that is somewhere."""

    name: str
    entry: Entry | None
    half: Entry | None = None

    def open(self, context: Any, spark: Any) -> None:
        return

    def last_entry(self) -> Entry | None:
        return self.entry

    def unfinished(self) -> Entry | None:
        return self.half

    def missing(self) -> str | None:
        return None

    def close(self) -> None:
        return


def standing(shop: Shop, sink: str, *offsets: int, state: int | None = 4) -> Stand:
    places = [shop.place(partition) for partition in range(len(offsets))]
    return Stand(
        sink,
        Entry(
            "shop",
            sink,
            9,
            BatchRange({place: Span(0, at) for place, at in zip(places, offsets, strict=True)}),
            Positions({place: Position(at) for place, at in zip(places, offsets, strict=True)}),
            1_000,
            "f",
            state=state,
        ),
    )


def plan_with(shop: Shop, *stands: Stand, **options: Any) -> Any:
    build: Any = lambda definition: {stand.name: stand for stand in stands}  # noqa: E731
    return plan_rebuild(shop.pipeline(), build=build, **options)


def test_without_a_record_it_is_read_from_the_start_of_the_log_and_said(shop: Shop) -> None:
    shop.produce(80)
    plan = plan_with(shop, standing(shop, "rows", 40, 30))
    assert "is not recorded: it is read from the log's start" in str(plan)
    assert "the batches of 70 of the offsets are not recorded" in str(plan)
    assert (plan.offsets, len(plan.cuts), plan.number) == (70, 3, 4)


def test_what_the_source_no_longer_has_is_named_and_refused(shop: Shop) -> None:
    shop.produce(80)
    stand = standing(shop, "rows", 40, 40)
    home = Path(home_of(shop.pipeline()))
    home.mkdir(parents=True)
    assert stand.entry is not None
    line = {"event": "batch", "range": stand.entry.range.as_json(), "batch_time_ms": 5, "sinks": {"rows": 1}}
    (home / "log.jsonl").write_text(json.dumps(line) + "\n")
    assert [cut.batch_time_ms for cut in plan_with(shop, stand).cuts] == [5]
    later = {**line, "range": BatchRange({shop.place(0): Span(30, 40), shop.place(1): Span(0, 40)}).as_json()}
    (home / "log.jsonl").write_text(json.dumps(later) + "\n")
    assert "the earliest batch that is recorded began in clicks-0 at 30 (its log begins at 0)" in str(
        plan_with(shop, stand)
    )
    (home / "log.jsonl").write_text(json.dumps(line) + "\n")
    shop.truncate(0, 25)
    with pytest.raises(
        CannotRebuild, match=r"no longer has 25 .*clicks-0 lacks offsets 0 to 24.*--from-available"
    ):
        plan_with(shop, stand)
    plan = plan_with(shop, stand, from_available=True)
    assert (plan.offsets, sum(plan.missing.values())) == (55, 25)
    assert "25 offsets are gone, and the state will lack them" in str(plan)


def test_sinks_that_stand_apart_have_no_one_state(shop: Shop) -> None:
    with pytest.raises(CannotRebuild, match=r"'rows' and 'totals' do not stand .*Run the pipeline once"):
        plan_with(shop, standing(shop, "rows", 4, 4), standing(shop, "totals", 4, 3))


def test_a_batch_that_is_half_in_a_sink_comes_first(shop: Shop) -> None:
    stand = standing(shop, "rows", 4, 4)
    with pytest.raises(CannotRebuild, match="has a batch half"):
        plan_with(shop, replace(stand, half=stand.entry))


def test_a_sink_that_is_new_does_not_matter(shop: Shop) -> None:
    shop.produce(8)
    assert plan_with(shop, standing(shop, "rows", 4, 4), Stand("totals", None)).offsets == 8


def test_a_partition_that_no_sink_knows_yet_is_opened_by_the_next_run(shop: Shop) -> None:
    shop.produce(8)
    plan = plan_with(shop, standing(shop, "rows", 4))
    assert {place.partition: at.offset for place, at in plan.end.at.items()} == {0: 4, 1: 0}
    assert plan.offsets == 4


def test_a_pipeline_that_has_not_run_has_nothing_to_rebuild(shop: Shop) -> None:
    with pytest.raises(CannotRebuild, match="has not run"):
        plan_with(shop, Stand("rows", None))


def test_a_pipeline_that_remembers_nothing_has_nothing_to_rebuild(shop: Shop) -> None:
    with pytest.raises(DefinitionWrong, match="no step of the pipeline remembers anything"):
        plan_rebuild(replace(shop.pipeline(steps=()), sinks=()))


def test_what_is_refused_is_not_helped_by_a_rebuild(shop: Shop) -> None:
    definition = shop.pipeline()
    with Home(home_of(definition), "shop") as home:
        home.note_definition(canonical(replace(definition, name="other")))
    with pytest.raises(UnsafeChange, match="A rebuild does not help"):
        plan_rebuild(definition)


def test_the_new_state_takes_the_place_of_the_old_whatever_a_crash_had_left(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    for name in ("state.before", "state", "state.rebuild"):
        (tmp_path / name / "versions").mkdir(parents=True)
        (tmp_path / name / name).touch()
    take_the_place(str(tmp_path))
    assert (names(), (tmp_path / "state" / "state.rebuild").exists()) == (["state"], True)
    # A crash between the two renames: there is no state, and the next rebuild puts one there.
    (tmp_path / "state").rename(tmp_path / "state.before")
    (tmp_path / "state.rebuild").mkdir()
    take_the_place(str(tmp_path))
    assert names() == ["state"]


def test_a_pipeline_that_runs_is_not_rebuilt(shop: Shop) -> None:
    shop.produce(8)
    plan = plan_with(shop, standing(shop, "rows", 4, 4))
    with Home(home_of(shop.pipeline()), "shop"), pytest.raises(AlreadyRunning):
        perform_rebuild(plan)
