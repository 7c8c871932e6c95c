"""From the stop of holdfast to the first message that Apache Kafka acknowledges on its directory: ten gigabytes.

The log is produced once, to eight partitions, and each round gets the same files by hard links; what a run changes in
place, the last segment of each partition and the small files, is copied. holdfast runs on them, `graduate prepare`
has read them, and the clock runs from SIGTERM on: the stop, the hand-over, Kafka's start. Verification is timed after
it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench import topics
from bench.driver import Bench, Measure, Series
from bench.load import kafka_load, run_load
from bench.model import MeasureResult, Metrics, Row
from bench.protocol import first_acknowledgement
from bench.servers import START_TIMEOUT_S, Broker, HoldfastBroker
from holdfast.graduate.handing_over import MANIFEST_FILE, Request, graduate, prepare
from holdfast.graduate.starting import start_kafka
from holdfast.graduate.verifying import verify
from holdfast.manifest.model import decode
from holdfast.testing.processes import free_ports

TOPIC: Final = "handed-over"
PARTITIONS: Final = 8
RECORD_BYTES: Final = 1_000
COUNT: Final = 10 * 10**9 // RECORD_BYTES
PRODUCED_AT_ONCE: Final = 1_000_000
"""librdkafka's queue holds two gigabytes, and the generator fills it before it waits."""
SEGMENT_BYTES: Final = 256 << 20


class Graduation(Measure):
    """Ours alone: nobody else hands a directory over."""

    name = "graduation"
    title = "Handing 10 GB over to Apache Kafka"
    shares_brokers = False
    rows = (
        Row(
            "stop of holdfast to the first message Kafka acknowledges, 10 GB", "s", "ours.total_s", below=15.0
        ),
        Row("of it, holdfast's stop", "s", "ours.stop_s"),
        Row("of it, `holdfast graduate`", "s", "ours.graduate_s"),
        Row("of it, Kafka's start", "s", "ours.kafka_s"),
        Row("`holdfast graduate prepare` beforehand, for each GB", "s", "ours.prepare_s_per_gb"),
        Row("`holdfast graduate verify` afterwards, for each GB", "s", "ours.verify_s_per_gb"),
        Row("data handed over", "GB", "ours.gb"),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Fill a directory once; each round hands a copy over."""
        with ExitStack() as stack:
            filled = bench.ours("graduation-filled")
            stack.callback(filled.close)
            filled.start()
            settings = {"retention.ms": "-1", "segment.bytes": str(SEGMENT_BYTES)}
            topics.create(filled, TOPIC, PARTITIONS, settings)
            spec = kafka_load(
                "bulk_produce", filled.bootstrap_servers, TOPIC, partitions=PARTITIONS, size=RECORD_BYTES
            )
            count = bench.count(COUNT)
            for first in range(0, count, PRODUCED_AT_ONCE):
                some = min(PRODUCED_AT_ONCE, count - first)
                run_load(spec | {"count": some, "idempotent": True, "settings": {"batch.size": 65_536}})
            filled.stop()
            template = bench.work_dir / "graduation-filled" / "data"
            return bench.alternate(self.name, [Series("ours", _round(bench, template))])


def _round(bench: Bench, template: Path) -> Callable[[], Metrics]:
    def once() -> Metrics:
        directory = bench.fresh_directory("graduation-round")
        ours = HoldfastBroker(directory=directory)
        _link(template, ours.data_dir)
        data, output = str(ours.data_dir), str(directory / "out")
        ours.start()
        prepared_at = time.monotonic()
        known = prepare([data], output)
        prepare_s = time.monotonic() - prepared_at
        with ExitStack() as stack:
            stack.callback(ours.close)
            return _switch(ours, data, output, prepare_s, known, stack)

    return once


def _switch(ours: Broker, data: str, output: str, prepare_s: float, known: int, stack: ExitStack) -> Metrics:
    (controller,) = free_ports(1)
    begun_at = time.monotonic()
    ours.stop()
    stopped_at = time.monotonic()
    outcome = graduate(Request((data,), ("127.0.0.1", ours.port), ("127.0.0.1", controller), output))
    graduated_at = time.monotonic()
    kafka = start_kafka(output, is_detached=False)
    stack.callback(kafka.close)
    first_acknowledgement(kafka.host, kafka.port, TOPIC, begun_at + START_TIMEOUT_S)
    served_at = time.monotonic()
    manifest = decode(Path(output, MANIFEST_FILE).read_bytes(), MANIFEST_FILE)
    report = verify(manifest, output, {"bootstrap.servers": kafka.bootstrap_servers})
    if report.verdict != "proven":
        raise RuntimeError(f"{report.verdict}: {report.findings[:3]}")
    gb = outcome.manifest.bytes / 1e9
    return {
        "total_s": served_at - begun_at,
        "stop_s": stopped_at - begun_at,
        "graduate_s": graduated_at - stopped_at,
        "kafka_s": served_at - graduated_at,
        "prepare_s_per_gb": prepare_s / (known / 1e9),
        "verify_s_per_gb": report.seconds / gb,
        "gb": gb,
    }


def _link(template: Path, target: Path) -> None:
    """Sealed segments by hard links, for nobody writes to them; everything else is copied."""
    for directory, _, names in os.walk(template):
        to = target / Path(directory).relative_to(template)
        to.mkdir(parents=True, exist_ok=True)
        logs = sorted(name for name in names if name.endswith(".log"))
        for name in names:
            if name in logs[:-1]:
                os.link(Path(directory, name), to / name)
            else:
                shutil.copy2(Path(directory, name), to / name)
