"""Rows that Spark wrote, partitioned and in windows, are erased; the pipeline goes on, and an audit tells all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from holdfast.audit.model import Fate
from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.pipeline.definition.model import DeltaSink, ParquetSink
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.operations.erasing import perform_erase, plan_erase
from holdfast.pipeline.sinks.compacting import compact

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .conftest import Shop


@pytest.mark.check
def test_a_person_is_forgotten_and_the_audit_says_so(shop: Shop, spark: SparkSession) -> None:
    definition = shop.pipeline()
    sinks = (
        ParquetSink("rows", name="rows", partition_by=("user",)),
        DeltaSink("table", name="table", partition_by=("user",)),
        ParquetSink("totals", name="totals", rows="totals"),
    )
    definition = replace(definition, sinks=sinks)
    shop.produce(60)
    run_pipeline(definition, spark=spark, signals=False)
    before = audit_pipeline(definition)
    assert before.exit_code() == 0, before.reasons
    plan = plan_erase(definition, "user = 'bob'", "request 4711")
    assert all(plan.rows.values()), plan.rows
    assert perform_erase(plan).sinks == plan.rows
    shop.produce(12)
    run_pipeline(definition, spark=spark, signals=False)
    compact(definition)
    after = audit_pipeline(definition)
    assert (after.findings, after.verdict) == ((), before.verdict)
    assert {
        name: sum(each.count for each in after.erased if each.sink == name) for name in plan.rows
    } == plan.rows
    erased = sum(account.fates.get(Fate.ERASED, 0) for account in after.partitions)
    assert erased == plan.rows["rows"]
    assert not (shop.directory / "rows" / "batch=00000000000000000001" / "user=bob").exists()
    found = ds.dataset(shop.directory / "rows", format="parquet", partitioning="hive").to_table()
    assert set(found.column("user").to_pylist()) == {"ann", "bob"}, "bob came again since"
