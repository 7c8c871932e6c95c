"""The batch reader beside confluent-kafka's consumer: the same topics, both in a process of their own.

The reader checks every checksum and makes whole Arrow batches; the consumer hands over its messages in lists of up to
ten thousand and nobody looks at them. The export to files is timed from the start of the process.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from bench.driver import Bench, Measure, Series
from bench.load import LoadFailed, kafka_load, run_load
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker

CELLS: Final = ((200, "none"), (200, "lz4"), (200, "zstd"), (1_000, "none"))
RECORDS: Final = {200: 2_000_000, 1_000: 500_000}
PARTITIONS: Final = 4
FORMATS: Final = ("parquet", "arrow", "csv", "jsonl")
CONSUMER: Final = "confluent-kafka"


def _name(size: int, codec: str) -> str:
    return f"{size} B, {'uncompressed' if codec == 'none' else codec}"


class Reader(Measure):
    """One Apache Kafka, which both sides read."""

    name = "reader"
    title = "Batch reader"
    shares_brokers = True
    rows = (
        *(
            Row(
                f"read a topic of records of {_name(size, codec)}",
                "records/s",
                f"reader_{size}_{codec}.records_per_s",
                f"consumer_{size}_{codec}.records_per_s",
                against=CONSUMER,
                at_least=1.0,
            )
            for size, codec in CELLS
        ),
        *(
            Row(
                f"records per second of the reader's own processor time, {_name(size, codec)}",
                "records/s",
                f"reader_{size}_{codec}.records_per_cpu_s",
            )
            for size, codec in CELLS
        ),
        *(Row(f"export to {each}, 200 B", "records/s", f"export_{each}.records_per_s") for each in FORMATS),
        Row("a fresh process to its first batch", "s", "first.seconds"),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Topics are filled once; reading does not change them."""
        broker = bench.pair.kafka
        with ExitStack() as stack:
            series = []
            topics = {}
            for size, codec in CELLS:
                topic = stack.enter_context(bench.topic(broker, "reader", "page cache", PARTITIONS))
                topics[size, codec] = topic
                count = _filled(bench, broker, topic, size, codec)
                series += [
                    _reading(broker, topic, size, codec, count, "reader", "reader_read"),
                    _reading(broker, topic, size, codec, count, "consumer", "bulk_consume"),
                ]
                if (size, codec) == CELLS[0]:
                    series += [_exporting(bench, broker, topic, count, each) for each in FORMATS]
            series.append(_first(broker, topics[CELLS[0]]))
            return bench.alternate(self.name, series)


def _filled(bench: Bench, broker: Broker, topic: str, size: int, codec: str) -> int:
    spec = kafka_load(
        "bulk_produce",
        broker.bootstrap_servers,
        topic,
        partitions=PARTITIONS,
        size=size,
        codec=codec,
        keys=100_000,
        count=bench.count(RECORDS[size]),
    )
    return int(run_load(spec)["count"]) + PARTITIONS  # one more in each, sent before the clock starts


def _reading(broker: Broker, topic: str, size: int, codec: str, count: int, side: str, kind: str) -> Series:
    def once() -> Metrics:
        wanted = count if side == "reader" else count - 1  # the consumer's first comes before its clock
        spec = kafka_load(
            kind, broker.bootstrap_servers, topic, partitions=PARTITIONS, size=size, count=wanted
        )
        found = run_load(spec)
        if found["count"] != wanted:
            raise LoadFailed(f"{found['count']} records were read where {wanted} are")
        metrics = {"records_per_s": wanted / found["seconds"]}
        if side == "reader":
            metrics["records_per_cpu_s"] = wanted / found["cpu_seconds"]
        return metrics

    return Series(f"{side}_{size}_{codec}", once, rate="records_per_s")


def _exporting(bench: Bench, broker: Broker, topic: str, count: int, format_: str) -> Series:
    def once() -> Metrics:
        path = str(bench.work_dir / f"export.{format_}")
        spec = kafka_load(
            "reader_export", broker.bootstrap_servers, topic, size=200, path=path, format=format_
        )
        return {"records_per_s": count / run_load(spec)["seconds"]}

    return Series(f"export_{format_}", once)


def _first(broker: Broker, topic: str) -> Series:
    def once() -> Metrics:
        spec = kafka_load("reader_first", broker.bootstrap_servers, topic, size=200)
        return {"seconds": run_load(spec)["seconds"]}

    return Series("first", once)
