"""A deduplication that runs to the end of a topic, in a process that can be killed: ours, or Spark's own."""

from __future__ import annotations

import sys
from pathlib import Path

BATCH = 1_000_000


def main(side: str, home: Path, bootstrap: str, topic: str) -> None:
    {"ours": ours, "sparks": sparks}[side](home, bootstrap, topic)


def ours(home: Path, bootstrap: str, topic: str) -> None:
    from holdfast.pipeline import Pipeline

    (
        Pipeline(f"resume-{topic}", home=str(home / "home"))  # a topic of its own in each round
        .read(
            topic,
            value={"format": "json", "fields": {"k": "string", "at": "timestamp"}},
            batch_records=BATCH,
            event_time={"field": "at", "delay": "10s", "ahead": "100000d"},
        )
        .dedupe("k", within="1h", name="once")
        .dead_letter(f"{topic}-dlt")
        .write("parquet", path=str(home / "out"))
        .run(bootstrap=bootstrap, once=True)
    )


def sparks(home: Path, bootstrap: str, topic: str) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    from bench.measures.spark_state import SCHEMA, with_rocksdb
    from bench.spark import session

    with session(home / "spark") as spark:
        with_rocksdb(spark)
        frame = (
            spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(BATCH))
            .load()
        )
        rows = frame.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("row")).select("row.*")
        query = (
            rows.withWatermark("at", "1 hour")
            .dropDuplicatesWithinWatermark(["k"])
            .writeStream.format("parquet")
            .option("path", str(home / "out"))
            .option("checkpointLocation", str(home / "checkpoint"))
            .trigger(availableNow=True)
        )
        query.start().awaitTermination()


if __name__ == "__main__":
    side, home, bootstrap, topic = sys.argv[1:]
    main(side, Path(home), bootstrap, topic)
