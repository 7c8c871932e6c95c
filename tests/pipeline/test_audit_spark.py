"""The audit by Spark says what the audit in memory says of the same worlds, and finds what only the steps can tell."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.audit_mutations import delete_row, plant_row, swap_rows
from tests.support.audit_world_writer import World, WorldWriter
from tests.support.audit_worlds import FILTER, Plan, make_plan
from tests.support.fake_cluster import FakeCluster

from holdfast.audit.model import Report, Verdict
from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.audit.spark.auditing import audit_with_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[WorldWriter]:
    with FakeCluster() as cluster, WorldWriter(cluster, str(tmp_path)) as writer:
        yield writer


def plain_plan(seed: int) -> Plan:
    """Without a memory: every place is Spark's to compare."""
    while True:
        plan = make_plan(seed, kinds=("parquet", "kafka"))
        if not plan.is_stateful and not plan.lags and len(plan.dead.rows()) > 1 and any(plan.aside):
            return plan
        seed += 1


def both(world: World, spark: SparkSession) -> tuple[Report, Report]:
    return audit_pipeline(world.definition), audit_with_spark(world.definition, spark=spark)


def named(report: Report) -> set[tuple[str, int, int]]:
    """Sink, partition and offset of everything that is wrong."""
    return {
        (finding.sink, finding.place.partition, offset)
        for finding in report.findings
        if finding.place is not None
        for first, last in finding.ranges
        for offset in range(first, last + 1)
    }


@pytest.mark.long
def test_an_undamaged_world_with_windows_has_the_same_report(
    writer: WorldWriter, spark: SparkSession
) -> None:
    plan = make_plan(401, kinds=("parquet", "kafka"), window_kinds=("parquet",))
    assert plan.sinks["parquet-totals"].rows()
    in_memory, by_spark = both(writer.write(plan), spark)
    assert by_spark.findings == in_memory.findings == (), by_spark.reasons
    assert by_spark.partitions == in_memory.partitions
    assert by_spark.windows == in_memory.windows
    assert by_spark.scope == in_memory.scope


def test_damage_is_named_by_both_and_a_filter_that_lied_by_its_sql(
    writer: WorldWriter, spark: SparkSession
) -> None:
    """One good record was let go and counted as filtered, in every place that counts: only the rule itself tells."""
    plan = plain_plan(200)
    chance = random.Random(200)
    parquet, kafka = plan.sinks["parquet-sink"], plan.sinks["kafka-sink"]
    row = parquet.batches[0][0]
    told = plan.at(row.lineage[1], row.lineage[2])
    plan.let_go(told, FILTER)
    strokes = [
        swap_rows(plan, kafka, chance),
        delete_row(plan, parquet, chance),
        plant_row(plan, parquet, chance),
        delete_row(plan, plan.dead, chance),
    ]
    in_memory, by_spark = both(writer.write(plan), spark)
    assert by_spark.verdict is in_memory.verdict is Verdict.FAILED
    for stroke in strokes:
        assert not stroke.missing(in_memory), in_memory.reasons
        assert not stroke.missing(by_spark), by_spark.reasons
    wanted = {(stroke.sink, *offset) for stroke in strokes for offset in stroke.offsets}
    assert wanted <= named(by_spark)
    let_go = (told.partition, told.offset)
    assert let_go not in {(partition, offset) for _, partition, offset in named(in_memory)}
    assert f"steps.{FILTER}" in {each.name for each in in_memory.coverage if each.unaltered}
    assert f"steps.{FILTER}" in {each.name for each in by_spark.coverage if each.recomputed}
    assert {("parquet-sink", *let_go), ("kafka-sink", *let_go)} <= named(by_spark)
