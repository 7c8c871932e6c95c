"""Plain Structured Streaming for `holdfast demo --unsafe`: what the guides show, run as a process of its own.

Spark's Kafka connector, `from_json`, a watermark, `dropDuplicatesWithinWatermark`, and `foreachBatch` that appends to
two Parquet directories. Nothing in it is made worse than it is found in the wild, and nothing better:

- `foreachBatch` is at-least-once: a batch whose first output is written when the process dies is written again;
- what `from_json` cannot read is null, and null is left out;
- what is behind the watermark is dropped.

    python -m holdfast.demo.plain '{"bootstrap": …, "directory": …, "batch": …}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Final

from holdfast.demo.orders import JAVA_OPTIONS, SOURCE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIELDS: Final = "id BIGINT, customer STRING, country STRING, amount DECIMAL(10,2), at TIMESTAMP, note STRING"


def plain_session(directory: str) -> SparkSession:
    from pyspark.sql import SparkSession

    from holdfast.pipeline.java import find_java
    from holdfast.testing.spark_connector import connector_jars

    os.environ["JAVA_HOME"] = find_java()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.jars": ",".join(str(jar) for jar in connector_jars()),
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.local.dir": os.path.join(directory, "scratch"),
    }
    builder = SparkSession.builder.appName("plain orders").master("local[*]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def plain_orders(spark: SparkSession, bootstrap: str, batch: int) -> DataFrame:
    from pyspark.sql import functions

    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", SOURCE)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(batch))
        .load()
    )
    parsed = functions.from_json(functions.col("value").cast("string"), FIELDS)
    return (
        records.select(parsed.alias("order"))
        .select("order.*")
        .where("id IS NOT NULL AND amount > 0 AND note IS NULL")
        .withWatermark("at", "2 minutes")
        .dropDuplicatesWithinWatermark(["id"])
    )


def main() -> None:
    errand = json.loads(sys.argv[1])
    directory: str = errand["directory"]
    spark = plain_session(directory)

    def write(rows: DataFrame, number: int) -> None:
        from pyspark.sql import functions

        rows.persist()
        rows.write.mode("append").parquet(f"{directory}/out/orders")
        totals = rows.groupBy("country", functions.window("at", "30 seconds")).agg(
            functions.count("*").alias("orders"), functions.sum("amount").alias("total")
        )
        totals.write.mode("append").parquet(f"{directory}/out/totals")
        rows.unpersist()

    query = (
        plain_orders(spark, errand["bootstrap"], errand["batch"])
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(processingTime="1 second")
        .start()
    )

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    query.awaitTermination()


if __name__ == "__main__":
    main()
