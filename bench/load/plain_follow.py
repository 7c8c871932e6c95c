"""Plain Spark that follows a topic into Parquet files by `foreachBatch`, in a process that can be killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.pipeline.java import find_java
from holdfast.testing.spark_connector import connector_jars

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def main(home: Path, bootstrap: str, topic: str, interval: str) -> None:
    os.environ |= {"JAVA_HOME": find_java(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F  # noqa: N812

    def write(frame: DataFrame, _batch: int) -> None:
        frame.write.mode("append").parquet(str(home / "out"))

    builder = SparkSession.builder.master("local[*]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.jars", ",".join(map(str, connector_jars()))).getOrCreate()
    frame = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    row = F.from_json(F.col("value").cast("string"), "sent_ns long")
    rows = frame.select(row.alias("row")).select("row.*").where("sent_ns > 0")
    query = rows.writeStream.foreachBatch(write).option("checkpointLocation", str(home / "checkpoint"))
    query.trigger(processingTime=interval).start().awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
