"""As much as one client can push and pull: 100 B and 1 KB, one and eight partitions, plain and lz4.

Each run has a topic of its own, deleted afterwards. What was produced to the brokers in page-cache mode
is read back at once, which is the consume half. The disk's own flushed rate is taken in the same rounds:
no broker that flushes can be faster than that.
"""

from __future__ import annotations

import os
import time
from itertools import product
from typing import Final, NamedTuple

from bench.driver import Bench, Measure, Series
from bench.load import LoadFailed, kafka_load, run_load
from bench.load.payload import payloads
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker, Durability

COUNTS: Final = {100: 600_000, 1_000: 300_000}
"""Records per run: a second or two of work, the same on both sides."""
DISK_BLOCK_BYTES: Final = 1_000_000
"""What librdkafka puts into one batch at most, and so what a flush has to write per request."""
COMPRESSED_MOST: Final = 0.8
"""The payloads shrink to less than half; what is larger was not compressed."""
DISK_BYTES: Final = 200_000_000


class Cell(NamedTuple):
    """One combination."""

    size: int
    partitions: int
    codec: str

    @property
    def key(self) -> str:
        """As part of a series' name."""
        return f"{self.size}b_{self.partitions}p_{self.codec}"

    def __str__(self) -> str:
        size = "1 KB" if self.size == 1_000 else f"{self.size} B"
        where = "one partition" if self.partitions == 1 else "eight partitions"
        return f"{size}, {where}, {'uncompressed' if self.codec == 'none' else self.codec}"


CELLS: Final = tuple(Cell(*each) for each in product((100, 1_000), (1, 8), ("none", "lz4")))


def _rows() -> list[Row]:
    rows = [
        Row(
            f"bulk produce, {cell}, page cache on both sides",
            "records/s",
            f"ours_page_cache_{cell.key}.produced_per_s",
            f"kafka_page_cache_{cell.key}.produced_per_s",
            at_least=1.2,
        )
        for cell in CELLS
    ]
    rows += [
        Row(
            f"bulk produce, {cell}, ours flushed, Kafka's not",
            "records/s",
            f"ours_flushed_{cell.key}.produced_per_s",
            f"kafka_page_cache_{cell.key}.produced_per_s",
            at_least=1.0,
            or_reaches="disk.mb_per_s",
            or_reaches_with=f"ours_flushed_{cell.key}.written_mb_per_s",
        )
        for cell in CELLS
    ]
    rows += [
        Row(
            f"bulk consume, {cell}",
            "records/s",
            f"ours_page_cache_{cell.key}.consumed_per_s",
            f"kafka_page_cache_{cell.key}.consumed_per_s",
            at_least=1.0,
        )
        for cell in CELLS
    ]
    return rows


class Bulk(Measure):
    """With confluent-kafka, idempotent, one process."""

    name = "bulk"
    title = "Bulk produce and consume"
    rows = _rows()
    shares_brokers = True

    def run(self, bench: Bench) -> MeasureResult:
        """Every cell: ours in both modes, Kafka in its own."""
        series = [Series("disk", lambda: disk_rate(bench))]
        for cell in CELLS:
            series.append(_series(bench, "ours", bench.pair.ours, "page cache", cell))
            series.append(_series(bench, "kafka", bench.pair.kafka, "page cache", cell))
            series.append(_series(bench, "ours", bench.pair.ours, "flushed", cell))
        # One plain and one compressed cell bring each broker to speed; the others run the same paths.
        warm = [
            each.key for each in series if each.key.endswith(("_page_cache_1000b_8p_none", "_100b_1p_lz4"))
        ]
        return bench.alternate(self.name, series, warm)


def _series(bench: Bench, side: str, broker: Broker, durability: Durability, cell: Cell) -> Series:
    mode = durability.replace(" ", "_")

    def once() -> Metrics:
        return bulk_run(bench, broker, durability, cell, consume=durability == "page cache")

    return Series(f"{side}_{mode}_{cell.key}", once, rate="produced_per_s")


def bulk_run(bench: Bench, broker: Broker, durability: Durability, cell: Cell, consume: bool) -> Metrics:
    """Produce to a fresh topic and, if asked, read it back."""
    with bench.topic(broker, "bulk", durability, cell.partitions, file_delete_delay_ms="1000") as topic:
        spec = kafka_load(
            "bulk_produce",
            broker.bootstrap_servers,
            topic,
            partitions=cell.partitions,
            size=cell.size,
            codec=cell.codec,
            count=bench.count(COUNTS[cell.size]),
        )
        made = run_load(spec)
        written = _written_bytes(broker, topic)
        if cell.codec != "none" and written > COMPRESSED_MOST * made["count"] * cell.size:
            # librdkafka sends uncompressed, and says nothing, what it believes the broker cannot read.
            raise LoadFailed(f"records sent to {broker.label} as {cell.codec} arrived uncompressed")
        found = {
            "produced_per_s": made["count"] / made["seconds"],
            "written_mb_per_s": written / made["seconds"] / 1e6,
        }
        if consume:
            read = run_load({**spec, "kind": "bulk_consume", "count": made["count"]})
            found["consumed_per_s"] = read["count"] / read["seconds"]
        return found


def _written_bytes(broker: Broker, topic: str) -> int:
    """What the run put on the disk: after compression, before indexes."""
    return sum(each.stat().st_size for each in broker.data_dir.glob(f"{topic}-*/*.log"))


def disk_rate(bench: Bench) -> Metrics:
    """Append blocks to a file, each flushed before the next."""
    block = b"".join(payloads(DISK_BLOCK_BYTES // 512, 512))
    path = bench.work_dir / "disk-rate"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        written = 0
        begun_at = time.monotonic()
        while written < DISK_BYTES * min(bench.scale, 1):
            written += os.pwrite(descriptor, block, written)
            os.fdatasync(descriptor)
        seconds = time.monotonic() - begun_at
    finally:
        os.close(descriptor)
        path.unlink()
    return {"mb_per_s": written / seconds / 1e6}
