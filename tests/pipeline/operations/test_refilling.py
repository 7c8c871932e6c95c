"""One sink is written again from the log, exactly, whatever is killed, and the others are left alone."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from tests.support.tiers import by_tier

from holdfast.pipeline.aside import recorded
from holdfast.pipeline.core.failures import SinkLost, StateMissing
from holdfast.pipeline.definition.model import ParquetSink
from holdfast.pipeline.definition.naming import home_of
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.operations.rebuilding import CannotRebuild, plan_rebuild
from holdfast.pipeline.operations.refilling import CannotRefill, perform_refill, plan_refill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.pipeline.definition.model import PipelineDefinition

    from .conftest import Shop


class Killed(BaseException):
    """The driver is gone: nothing of it may catch this."""


def rows(directory: Path) -> list[dict[str, Any]]:
    """Every row with its place, and the number of its batch left out."""
    found = [
        row
        for path in sorted(directory.glob("batch=*/*.parquet"))
        for row in pq.read_table(path, partitioning=None).to_pylist()
    ]
    return sorted(found, key=lambda row: str(row["_hf"]))


def killed_after(points: int) -> Callable[[str], None]:
    passed: list[str] = []

    def hook(point: str) -> None:
        passed.append(point)
        if len(passed) == points:
            raise Killed

    return hook


def refill(
    definition: PipelineDefinition, sink: str, spark: SparkSession, faults: Faults = no_faults
) -> None:
    perform_refill(plan_refill(definition, sink), spark=spark, signals=False, faults=faults)


def refill_killed_at_every_point(
    definition: PipelineDefinition, sink: str, spark: SparkSession, *, step: int = 7
) -> int:
    """Kill it after ever more points that it passes; every attempt goes on where the one before was killed."""
    for points in range(4, 100, step):
        try:
            refill(definition, sink, spark, killed_after(points))
            return points
        except Killed:
            continue
    raise AssertionError("it never came to its end")


@pytest.fixture
def ran(shop: Shop, spark: SparkSession) -> tuple[PipelineDefinition, Callable[[], int]]:
    """A pipeline with windows, after two batches."""
    definition = shop.pipeline()
    run: Any = lambda: run_pipeline(definition, spark=spark, signals=False).batches  # noqa: E731
    shop.produce(60)
    assert run() == 2
    return definition, run


def test_a_lost_sink_of_windows(
    ran: tuple[PipelineDefinition, Callable[[], int]], shop: Shop, spark: SparkSession
) -> None:
    definition, run = ran
    totals, others = shop.directory / "shop-totals", shop.directory / "shop-rows"
    had, kept = rows(totals), rows(others)
    shutil.rmtree(totals)
    with pytest.raises(SinkLost, match="pipeline refill FILE totals"):
        run()
    with pytest.raises(SinkLost):
        plan_rebuild(definition)

    with pytest.raises(Killed):
        refill(definition, "totals", spark, lambda point: stop_at(point, "committed:totals"))
    with pytest.raises(StateMissing, match=r"'totals' stand behind .*pipeline refill FILE totals"):
        run()
    with pytest.raises(CannotRebuild, match="pipeline refill FILE SINK"):
        plan_rebuild(definition)
    refill_killed_at_every_point(definition, "totals", spark)
    assert rows(totals) == had
    assert rows(others) == kept
    assert not Path(home_of(definition), "refill", "totals").exists()

    shop.produce(30)
    assert run() == 1
    assert rows(totals)[: len(had)] == had  # and what came since stands behind them
    assert len(rows(totals)) > len(had)
    with pytest.raises(CannotRefill, match="holds rows, and no ledger says which"):
        forget(definition, "totals")
        plan_refill(definition, "totals")


def test_a_sink_that_was_restored_to_an_earlier_batch(
    ran: tuple[PipelineDefinition, Callable[[], int]], shop: Shop, spark: SparkSession
) -> None:
    definition, run = ran
    totals = shop.directory / "shop-totals"
    had = rows(totals)
    shutil.rmtree(totals / "batch=00000000000000000002")
    with pytest.raises(SinkLost, match="its ledger has 2 entries, and it had 3"):
        run()
    assert (
        refill_killed_at_every_point(definition, "totals", spark, step=by_tier(quick=16, check=16, long=7))
        > 4
    )
    assert rows(totals) == had
    shop.produce(5)
    assert run() == 1


def test_a_new_sink_can_have_the_past_too_as_far_as_the_source_has_it(
    ran: tuple[PipelineDefinition, Callable[[], int]], shop: Shop, spark: SparkSession
) -> None:
    definition, _ = ran
    more = replace(definition, sinks=(*definition.sinks, ParquetSink("copy", name="copy")))
    refill(more, "copy", spark)
    assert rows(shop.directory / "copy") == rows(shop.directory / "shop-rows")
    recorded_by = Counter(batch.fingerprint for batch in recorded(home_of(more)).values())
    assert len(recorded_by) == 2, "which rows left is on record for the batches of both definitions"
    assert len(set(recorded_by.values())) == 1
    assert run_pipeline(more, spark=spark, signals=False).batches == 0

    shutil.rmtree(shop.directory / "copy")
    shop.truncate(0, 7)
    with pytest.raises(CannotRefill, match=r"clicks-0 lacks offsets 0 to 6.*--from-available"):
        plan_refill(more, "copy")
    plan = plan_refill(more, "copy", from_available=True)
    assert plan.begin[shop.place(0)] == 7
    assert "the sink will lack" in str(plan)


def stop_at(point: str, wanted: str) -> None:
    if point == wanted:
        raise Killed


def forget(definition: PipelineDefinition, sink: str) -> None:
    from holdfast.pipeline.engine.resetting import perform_reset, plan_reset

    perform_reset(plan_reset(definition, sinks=[sink]))
