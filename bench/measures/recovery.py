"""A 2 GiB partition after a crash: how long until it can be read again.

The log is produced once, in batches of 16 KB, and copied to both sides. Before each run what a crash
would have left stale is removed on both: the recovery point, the clean-shutdown marker, indexes and
snapshots; and the log's pages are dropped from the page cache, as after a power loss. The clock runs from
the start of the process until ListOffsets answers with the whole log; a clean start of the same directory
is timed after it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench import topics
from bench.driver import Bench, Measure, Series
from bench.load import kafka_load, run_load
from bench.model import MeasureResult, Metrics, Row
from bench.protocol import Connection, ProtocolError
from bench.servers import START_TIMEOUT_S, Broker

TOPIC: Final = "recovered"
BATCH_BYTES: Final = 16_384
RECORD_BYTES: Final = 1_000
COUNT: Final = 2 * 2**30 // RECORD_BYTES
STALE_FILES: Final = ("recovery-point-offset-checkpoint", ".kafka_cleanshutdown")
STALE_SUFFIXES: Final = (".index", ".timeindex", ".txnindex", ".snapshot")


class Recovery(Measure):
    """Each broker with its defaults, one log directory."""

    name = "recovery"
    title = "Recovery of 2 GiB"
    shares_brokers = False
    rows = (
        Row(
            "start with recovery of a 2 GiB partition of 16 KB batches",
            "s",
            "ours.recovery_s",
            "kafka.recovery_s",
            at_most=1.0,
        ),
        Row("recovery of the same beyond a clean start", "s", "ours.beyond_start_s", "kafka.beyond_start_s"),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Produce the log, copy it to both, and crash."""
        with ExitStack() as stack:
            ours, kafka = bench.ours("recovery-ours"), bench.kafka("recovery-kafka")
            stack.callback(ours.close)
            stack.callback(kafka.close)
            for broker in (kafka, ours):
                broker.start()
                topics.create(broker, TOPIC, 1, {"retention.ms": "-1"})
            end_offset = _produce(bench, kafka)
            kafka.stop()
            ours.stop()
            _copy_log(kafka, ours)
            series = [_series("ours", ours, end_offset), _series("kafka", kafka, end_offset)]
            return bench.alternate(self.name, series)


def _produce(bench: Bench, broker: Broker) -> int:
    spec = kafka_load("bulk_produce", broker.bootstrap_servers, TOPIC, size=RECORD_BYTES)
    spec |= {"count": bench.count(COUNT), "idempotent": False, "settings": {"batch.size": BATCH_BYTES}}
    run_load(spec)
    connection = Connection(broker.host, broker.port)
    end_offset = connection.end_offset(TOPIC, 0)
    connection.close()
    if end_offset is None:
        raise ProtocolError(f"{broker.label} does not know the end of {TOPIC}")
    return end_offset


def _partition(broker: Broker) -> Path:
    return broker.data_dir / f"{TOPIC}-0"


def _copy_log(source: Broker, target: Broker) -> None:
    for each in _partition(target).glob("*.log"):
        each.unlink()
    for each in _partition(source).glob("*.log"):
        shutil.copy(each, _partition(target) / each.name)


def _crash(broker: Broker) -> None:
    """Leave the directory as a crash would find it."""
    for name in STALE_FILES:
        (broker.data_dir / name).unlink(missing_ok=True)
    for each in _partition(broker).iterdir():
        if each.suffix in STALE_SUFFIXES:
            each.unlink()
    os.sync()
    _drop_pages(sorted(_partition(broker).glob("*.log")))


def _drop_pages(files: Sequence[Path]) -> None:
    for each in files:
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _series(key: str, broker: Broker, end_offset: int) -> Series:
    def once() -> Metrics:
        _crash(broker)
        recovery_s = _start_until_readable(broker, end_offset)
        broker.stop()
        start_s = _start_until_readable(broker, end_offset)
        broker.stop()
        return {"recovery_s": recovery_s, "start_s": start_s, "beyond_start_s": recovery_s - start_s}

    return Series(key, once)


def _start_until_readable(broker: Broker, end_offset: int) -> float:
    broker.prepare()
    begun_at = time.monotonic()
    broker.launch()
    while time.monotonic() < begun_at + START_TIMEOUT_S:
        found: int | None = None
        try:
            connection = Connection(broker.host, broker.port)
            found = connection.end_offset(TOPIC, 0)
            connection.close()
        except (OSError, ProtocolError):
            found = None
        if found == end_offset:
            return time.monotonic() - begun_at
        if found is not None and found > 0:
            raise ProtocolError(f"{broker.label} recovered up to {found} instead of {end_offset}")
        time.sleep(0.005)
    raise TimeoutError(f"{broker.label} did not recover within {START_TIMEOUT_S:.0f} s")
