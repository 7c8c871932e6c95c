"""State as Spark writes and reads it: ranges of time, merging, and damage inside a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.pipeline.core.failures import EnvironmentFails
from holdfast.pipeline.engine.failures import explain_failure
from holdfast.pipeline.state import segments
from holdfast.pipeline.state.operator import OperatorContext
from holdfast.pipeline.state.segments import FAN_IN, Segment, StateDamaged, StepState, merged, write_segment
from holdfast.pipeline.state.store import StateStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


SCHEMA = "key string, total bigint, _until bigint"
ADDED_UP = "SELECT key, sum(total) AS total, max(_until) AS _until FROM {rows} GROUP BY key"


@pytest.fixture
def context(spark: SparkSession, tmp_path: Path) -> OperatorContext:
    store, scratch = StateStore(str(tmp_path / "state")), str(tmp_path / "scratch")
    return OperatorContext(spark, store, StepState("f"), 0, None, None, 1, scratch, "a-1")


def segment(context: OperatorContext, *rows: tuple[str, int, int]) -> Segment:
    """As a worker writes it, which is quicker than to ask Spark for it."""
    directory = context.store.segment_dir(context.label, "totals")
    os.mkdir(directory)
    names, columns = ("key", "total", "_until"), zip(*rows, strict=True)
    table = pa.table(dict(zip(names, map(list, columns), strict=True)))
    pq.write_table(table, os.path.join(directory, "part-0.parquet"))
    made = context.store.adopt(directory)
    assert made is not None
    return made


def having(context: OperatorContext, *segments: Segment) -> OperatorContext:
    return replace(context, state=StepState("f", segments))


def keys(frame: DataFrame | None) -> Sequence[str] | None:
    return None if frame is None else sorted(row["key"] for row in frame.collect())


def test_a_range_of_time_reads_only_segments_that_may_have_it(context: OperatorContext) -> None:
    early = segment(context, ("a", 1, 10), ("b", 1, 20))
    late = segment(context, ("c", 1, 30), ("d", 1, 40))
    context = having(context, early, late)

    assert keys(context.frame(SCHEMA)) == ["a", "b", "c", "d"]
    assert keys(context.frame(SCHEMA, until_above=20)) == ["c", "d"]
    assert keys(context.frame(SCHEMA, until_to=30)) == ["a", "b", "c"]
    assert keys(context.frame(SCHEMA, until_above=10, until_to=30)) == ["b", "c"]
    assert context.frame(SCHEMA, until_above=40) is None
    assert context.frame(SCHEMA, until_to=9) is None
    os.unlink(context.store.paths(early)[0])
    assert keys(context.frame(SCHEMA, until_above=20)) == ["c", "d"], "a segment that is over is not opened"
    with pytest.raises(StateDamaged, match="is missing"):
        context.frame(SCHEMA)


def test_rows_from_before_a_column_was_there_have_none(context: OperatorContext) -> None:
    context = having(context, segment(context, ("a", 1, 10)))
    frame = context.frame(SCHEMA + ", since bigint")
    assert frame is not None
    assert frame.collect()[0]["since"] is None


def test_an_empty_frame_is_no_segment(context: OperatorContext) -> None:
    assert write_segment(context, "totals", context.spark.createDataFrame([], SCHEMA)) is None


def test_a_changed_byte_within_a_segment_is_not_read_as_rows(context: OperatorContext) -> None:
    rows = [(f"key {number}", number, 10) for number in range(1000)]
    made = write_segment(context, "totals", context.spark.createDataFrame(rows, SCHEMA).coalesce(1))
    assert made is not None
    assert (made.rows, made.low_ms, made.high_ms) == (1000, 10, 10)
    path = Path(context.store.paths(made)[0])
    data = path.read_bytes()
    at = data.index(b"key 5") if b"key 5" in data else len(data) // 4
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    frame = having(context, made).frame(SCHEMA)
    assert frame is not None
    with pytest.raises(Exception, match=r"(?i)checksum|crc") as caught:
        frame.collect()
    explained = explain_failure(caught.value)
    assert isinstance(explained, StateDamaged)
    assert explained.path == str(path)


def merging(context: OperatorContext, over_ms: int | None, *segments: Segment) -> tuple[Segment, ...]:
    def added_up(rows: DataFrame, _: Sequence[Segment]) -> DataFrame:
        return context.spark.sql(ADDED_UP, rows=rows).coalesce(1)

    return merged(replace(context, next_watermark_ms=over_ms), "totals", SCHEMA, segments, added_up)


def test_merging_adds_up_and_leaves_out_what_is_over(context: OperatorContext) -> None:
    over = segment(context, ("z", 1, 5))
    live = [segment(context, ("a", number, 10), (f"k{number}", 1, 30)) for number in range(FAN_IN)]

    (one,) = merging(context, 9, over, *live)
    assert (one.tier, one.rows, one.low_ms, one.high_ms) == (1, FAN_IN + 1, 10, 30)
    frame = having(context, one).frame(SCHEMA)
    assert frame is not None
    assert {row["key"]: row["total"] for row in frame.collect()} == {
        "a": sum(range(FAN_IN)),
        **{f"k{number}": 1 for number in range(FAN_IN)},
    }
    assert [each.rows for each in merging(context, 10, over, *live)] == [FAN_IN]
    assert merging(context, 30, over, *live) == ()


def test_a_state_with_nothing_due_stays_as_it_is(context: OperatorContext) -> None:
    over, live = segment(context, ("z", 1, 5)), segment(context, ("a", 1, 10))
    assert merging(context, None, over, live) == (over, live)
    assert merging(context, 5, over, live) == (live,)


def test_rows_that_tasks_wrote_and_the_driver_does_not_see_are_missed(
    context: OperatorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = segments._parquet_files
    monkeypatch.setattr(segments, "_parquet_files", lambda *each: listed(*each)[1:])  # a stale directory
    rows = context.spark.createDataFrame([("a", 1, 10), ("b", 1, 20)], SCHEMA).repartition(2, "key")
    with pytest.raises(
        EnvironmentFails, match=r"tasks wrote 2 rows of state to .*totals-1, and [01] are there"
    ):
        write_segment(context, "totals", rows)
