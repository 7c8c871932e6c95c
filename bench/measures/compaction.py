"""Does background work hurt? One message in flight, the broker first quiet, then compacting 1 GiB.

The topic is filled under `cleanup.policy=delete` and turned to `compact` when the clock starts;
compaction is over when the broker writes the topic into its cleaner-offset-checkpoint, which both keep in
Kafka's format.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench import topics
from bench.driver import Bench, Measure, Pair, Series, latency_metrics
from bench.load import RunningLoad, Spec, kafka_load, run_load
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker, Durability

RECORD_BYTES: Final = 1_000
COUNT: Final = 2**30 // RECORD_BYTES
KEYS: Final = 200_000
"""A fifth of the records survive."""
SEGMENT_BYTES: Final = 64 * 2**20
SEGMENT_BYTES_MIN: Final = 2**20
QUIET_S: Final = 3.0
COMPACTION_TIMEOUT_S: Final = 180.0
PROBE_BYTES: Final = 100


class Compaction(Measure):
    """With confluent-kafka; each broker with its own default durability."""

    name = "compaction"
    title = "Produce latency while 1 GiB compacts"
    shares_brokers = False
    rows = (
        Row(
            "produce p99 while a 1 GiB topic compacts, against ours quiet",
            "µs",
            "ours.compacting_p99_us",
            "ours.quiet_p99_us",
            against="quiet",
            at_most=2.0,
        ),
        Row(
            "the same of Apache Kafka, against Kafka quiet",
            "µs",
            "kafka.compacting_p99_us",
            "kafka.quiet_p99_us",
            against="quiet",
        ),
        Row("time to compact 1 GiB", "s", "ours.compaction_s", "kafka.compaction_s"),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Brokers of its own: the cleaner looks for work ten times a second instead of every fifteen."""
        properties = {"log.cleaner.backoff.ms": "100"}
        ours, kafka = bench.ours("compaction-ours", properties), bench.kafka("compaction-kafka", properties)
        with ExitStack() as stack:
            stack.callback(Pair(ours, kafka).close)
            ours.start()
            kafka.start()
            series = [_series(bench, "ours", ours, "flushed"), _series(bench, "kafka", kafka, "page cache")]
            return bench.alternate(self.name, series)


def _series(bench: Bench, key: str, broker: Broker, durability: Durability) -> Series:
    def once() -> Metrics:
        with bench.topic(broker, "probe", durability) as probe:
            spec = kafka_load("closed_loop", broker.bootstrap_servers, probe, size=PROBE_BYTES, clients=1)
            with _filled_topic(bench, broker, durability) as topic:
                quiet = bench.closed_loop(spec, processes=1, full_seconds=QUIET_S)
                compacting, seconds = _while_compacting(bench, broker, topic, spec)
        return {
            "compacting_p99_us": compacting["p99_us"],
            "compacting_p50_us": compacting["p50_us"],
            "quiet_p99_us": quiet["p99_us"],
            "quiet_p50_us": quiet["p50_us"],
            "quiet_requests_per_s": quiet["requests_per_s"],
            "compaction_s": seconds,
        }

    return Series(key, once, rate="quiet_requests_per_s")


@contextmanager
def _filled_topic(bench: Bench, broker: Broker, durability: Durability) -> Iterator[str]:
    segment_bytes = max(int(SEGMENT_BYTES * bench.scale), SEGMENT_BYTES_MIN)
    settings: dict[str, str] = {
        "cleanup_policy": "delete",
        "retention_ms": "-1",
        "segment_bytes": str(segment_bytes),
    }
    settings |= {"min_cleanable_dirty_ratio": "0.01", "file_delete_delay_ms": "1000"}
    with bench.topic(broker, "compacted", durability, 1, **settings) as topic:
        fill = kafka_load("bulk_produce", broker.bootstrap_servers, topic, size=RECORD_BYTES)
        run_load({**fill, "count": bench.count(COUNT), "keys": KEYS})
        os.sync()
        yield topic


def _while_compacting(bench: Bench, broker: Broker, topic: str, spec: Spec) -> tuple[Metrics, float]:
    """The latency from the change of policy to the end of compaction, and how long that took."""
    load = RunningLoad(spec)
    try:
        load.wait_until_ready()
        begin_at = time.monotonic()
        load.set_window(begin_at=begin_at)
        topics.alter(broker, topic, {"cleanup.policy": "compact"})
        while not _is_compacted(broker.data_dir, topic):
            if time.monotonic() > begin_at + COMPACTION_TIMEOUT_S:
                raise TimeoutError(f"{broker.label} did not compact within {COMPACTION_TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        end_at = time.monotonic()
        load.set_window(end_at=end_at)
        return latency_metrics([load.result()]), end_at - begin_at
    finally:
        load.kill()


def _is_compacted(data_dir: Path, topic: str) -> bool:
    try:
        lines = (data_dir / "cleaner-offset-checkpoint").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    return any(line.startswith(f"{topic} 0 ") for line in lines)
