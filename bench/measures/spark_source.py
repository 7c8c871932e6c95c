"""Our Spark source against Spark's own Kafka connector: the same topic, the same session, into nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Final

from bench import spark as sparks
from bench.driver import Bench, Measure, Series
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker
from holdfast.testing.spark_connector import CONNECTOR_VERSION

RECORDS: Final = 8_000_000
CELL_RECORDS: Final = 2_000_000
PARTITIONS: Final = 4
CELLS: Final = ((200, "lz4"), (200, "zstd"), (100, "none"), (1_000, "none"))
TARGETS: Final = {(200, "zstd"): 1.8, (1_000, "none"): 1.8}
"""Of the cells that have one."""
CONNECTOR: Final = f"Spark's connector {CONNECTOR_VERSION}"


def _cell_rows() -> list[Row]:
    return [
        Row(
            f"stream to nothing, {size} B, {'uncompressed' if codec == 'none' else codec}",
            "records/s",
            f"ours_{size}_{codec}.records_per_s",
            f"connector_{size}_{codec}.records_per_s",
            against=CONNECTOR,
            at_least=TARGETS.get((size, codec)),
        )
        for size, codec in CELLS
    ]


class SparkSource(Measure):
    """Both read committed, check checksums and carry keys, headers and timestamps."""

    name = "spark-source"
    title = "Spark source"
    shares_brokers = False
    rows = (
        Row(
            "stream to nothing, 8 million records of 200 B, warm",
            "records/s",
            "ours.records_per_s",
            "connector.records_per_s",
            against=CONNECTOR,
            at_least=2.5,
        ),
        *_cell_rows(),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """One Apache Kafka, one session, the sources in turn."""
        broker = bench.kafka("spark-source")
        broker.start()
        with ExitStack() as stack:
            stack.callback(broker.close)
            spark = stack.enter_context(sparks.session(bench.fresh_directory("spark-home")))
            topics = {"": (bench.count(RECORDS), self._topic(bench, stack, broker, RECORDS, 200, "none"))}
            for size, codec in CELLS:
                name = self._topic(bench, stack, broker, CELL_RECORDS, size, codec)
                topics[f"_{size}_{codec}"] = (bench.count(CELL_RECORDS), name)
            checkpoint = bench.fresh_directory("checkpoint")

            def series(side: str, suffix: str) -> Series:
                records, topic = topics[suffix]

                def once() -> Metrics:
                    took = sparks.drain(sparks.stream(spark, side, broker, topic), checkpoint)
                    return {"records_per_s": records / took}

                return Series(f"{side}{suffix}", once, rate="records_per_s")

            every = [series(side, suffix) for suffix in topics for side in sparks.SOURCES]
            return bench.alternate(self.name, every)

    def _topic(
        self, bench: Bench, stack: ExitStack, broker: Broker, records: int, size: int, codec: str
    ) -> str:
        topic = stack.enter_context(bench.topic(broker, f"orders-{size}-{codec}", "page cache", PARTITIONS))
        bench.say(f"filling {topic}")
        sparks.fill(broker, topic, bench.count(records), size=size, partitions=PARTITIONS, codec=codec)
        return topic


class SparkFirstQuery(Measure):
    """The first query of a fresh session, the session's own start left out."""

    name = "spark-first-query"
    title = "First query of a fresh Spark session"
    shares_brokers = False
    rows = (
        Row(
            "first query of a fresh session, ours later than Spark's connector by",
            "s",
            "pair.later_s",
            below=2.0,
        ),
        Row("first query of a fresh session", "s", "pair.ours_s", "pair.connector_s", against=CONNECTOR),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Each in a process of its own, one after the other."""
        broker = bench.kafka("spark-first")
        broker.start()
        with ExitStack() as stack:
            stack.callback(broker.close)
            topic = stack.enter_context(bench.topic(broker, "first", "page cache", PARTITIONS))
            sparks.fill(broker, topic, bench.count(200_000), partitions=PARTITIONS)

            def once() -> Metrics:
                ours = _fresh(bench, "ours", broker, topic)
                connector = _fresh(bench, "connector", broker, topic)
                return {"ours_s": ours, "connector_s": connector, "later_s": ours - connector}

            return bench.alternate(self.name, [Series("pair", once)])


def _fresh(bench: Bench, side: str, broker: Broker, topic: str) -> float:
    home = bench.fresh_directory(f"first-{side}")
    command = [
        sys.executable,
        "-m",
        "bench.measures.spark_source",
        side,
        broker.bootstrap_servers,
        topic,
        str(home),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    seconds: float = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return seconds


def _first_query(side: str, bootstrap: str, topic: str, home: str) -> float:
    from pathlib import Path
    from types import SimpleNamespace

    with sparks.session(Path(home)) as spark:
        broker = SimpleNamespace(bootstrap_servers=bootstrap)
        return sparks.drain(sparks.stream(spark, side, broker, topic), Path(home) / "checkpoint")


if __name__ == "__main__":
    print(json.dumps({"seconds": _first_query(*sys.argv[1:])}))
