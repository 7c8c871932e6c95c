"""What the disk alone takes: no broker that flushes can be faster."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from bench.driver import Bench, Series
from bench.model import Metrics, Row
from bench.stats import percentile

WINDOW_S: Final = 3.0
BATCH_BYTES: Final = 170
"""A record of 100 B in its batch."""
SPACE_BYTES: Final = 8 * 1024 * 1024
"""Written before the clock starts: replacing bytes is flushed quicker than making a file longer."""


def small_flushes(bench: Bench) -> Series:
    """One small write after the other into space that is there, each flushed before the next."""
    batch = os.urandom(BATCH_BYTES)
    path = bench.work_dir / "disk-flushes"

    def once() -> Metrics:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.pwrite(descriptor, bytes(SPACE_BYTES), 0)
            os.fsync(descriptor)
            latencies: list[int] = []
            position = 0
            end_at = time.monotonic() + bench.seconds(WINDOW_S)
            while (begun_at := time.monotonic()) < end_at:
                os.pwrite(descriptor, batch, position)
                os.fdatasync(descriptor)
                latencies.append(int((time.monotonic() - begun_at) * 1e6))
                position = (position + BATCH_BYTES) % (SPACE_BYTES - BATCH_BYTES)
        finally:
            os.close(descriptor)
            path.unlink()
        return {"p50_us": percentile(latencies, 0.50), "p99_us": percentile(latencies, 0.99)}

    return Series("disk", once)


def disk_alone(what: str, kafka: str, quantiles: Sequence[str] = ("p50", "p99")) -> list[Row]:
    """The bound of a latency that includes a flush."""
    return [
        Row(
            f"the disk alone, a small write flushed, against {what}, {quantile}",
            "µs",
            f"disk.{quantile}_us",
            f"{kafka}.{quantile}_us",
        )
        for quantile in quantiles
    ]
