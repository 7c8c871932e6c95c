"""HF407: rows that come after their window was closed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.pipeline.definition.model import Decoding, EventTime, Field, ParquetSink, Window

from .conftest import Scene, order

if TYPE_CHECKING:
    from pathlib import Path

PER_BATCH = 3
LATE_ID = 9
TIMED = Decoding("json", (Field("id", "long"), Field("amount", "double"), Field("at", "timestamp")))


def send_a_late_one(scene: Scene) -> None:
    """Three each of 12:00, 12:10 and 12:20; then one more of 12:00, and two of 12:30, which close all before them."""
    minutes = [0, 0, 0, 10, 10, 10, 20, 20, 20, 0, 30, 30]
    scene.send(*(order(number, at=f"2026-01-01T12:{at:02d}:05Z") for number, at in enumerate(minutes)))


def counts(scene: Scene) -> dict[int, int]:
    """Rows counted by the windows that were closed, by their minute."""
    frame = scene.spark.read.parquet(str(scene.out))
    return {row.minute: row.n for row in frame.selectExpr("minute(window_start) AS minute", "n").collect()}


def test_hf407_late_plain_spark_drops_it_unseen(plain: Scene) -> None:
    from pyspark.sql import functions as f

    send_a_late_one(plain)
    orders = plain.stream(startingOffsets="earliest", maxOffsetsPerTrigger=str(PER_BATCH)).selectExpr(
        "from_json(CAST(value AS STRING), 'id LONG, at TIMESTAMP') AS parsed"
    )
    counted = (
        orders.select("parsed.*").withWatermark("at", "1 minute").groupBy(f.window("at", "1 minute")).count()
    )
    plain.query(counted.selectExpr("window.start AS window_start", "count AS n"))
    assert counts(plain) == {0: 3, 10: 3, 20: 3}, (
        "the fourth order of 12:00 is in no window, and nobody was told"
    )


def test_hf407_late_ours_routes_and_counts_it(ours: Scene) -> None:
    send_a_late_one(ours)
    late: Path = ours.directory / "late"
    definition = ours.definition()
    source = replace(
        definition.source, value=TIMED, event_time=EventTime("at", delay="1m"), batch_records=PER_BATCH
    )
    changes: dict[str, Any] = {
        "source": source,
        "steps": (Window("per-minute", {"n": "count(*)"}, size="1m"),),
        "sinks": (
            ParquetSink(str(ours.out), name="minutes", rows="per-minute"),
            ParquetSink(str(late), name="late", rows="per-minute.late"),
        ),
    }
    summary = ours.run(**changes)
    assert counts(ours) == {0: 3, 10: 3, 20: 3}
    assert ours.ids(late) == [LATE_ID]
    assert summary.rows_by_sink["late"] == 1
