"""The same sixteen flushed clients against what else a user would pick, each with its own Python client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from bench.driver import Bench, Measure, Series
from bench.load import Spec
from bench.measures.clients16 import CLIENTS, PROCESSES, RECORD_BYTES, WINDOW_S, closed_loop_series
from bench.model import MeasureResult, Metrics, Row
from bench.servers import NatsServer, RedisServer, ServerUnavailable

STREAM = "bench"


class Alternatives(Measure):
    """Redis Streams with `appendfsync always` and NATS JetStream with `sync_interval: always`."""

    name = "alternatives"
    title = "Sixteen flushed clients: Redis Streams and NATS JetStream"
    shares_brokers = True
    rows = tuple(
        Row(
            f"16 clients, flushed, against {label}",
            "/s",
            "ours_flushed.requests_per_s",
            f"{key}.requests_per_s",
            against=label,
            at_least=1.0,
        )
        for key, label in (("redis", RedisServer.label), ("nats", NatsServer.label))
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Ours, and those of the two that this machine has."""
        with ExitStack() as stack:
            topic = stack.enter_context(bench.topic(bench.pair.ours, "alternatives", "flushed"))
            series = [
                closed_loop_series(bench, "ours_flushed", bench.pair.ours, topic, "closed_loop", PROCESSES)
            ]
            missing: dict[str, str] = {}
            starts: tuple[tuple[str, Callable[[Bench, ExitStack], Series]], ...]
            starts = (("redis", _redis), ("nats", _nats))
            for key, start in starts:
                try:
                    series.append(start(bench, stack))
                except ServerUnavailable as error:
                    bench.say(f"{self.name}: {error}")
                    missing[key] = str(error)
            result = bench.alternate(self.name, series)
            result.missing = missing
            return result


def _redis(bench: Bench, stack: ExitStack) -> Series:
    server = RedisServer(bench.fresh_directory("redis"))
    stack.callback(server.close)
    server.start()
    return _series(bench, "redis", {"kind": "redis", "port": server.port, "topic": STREAM})


def _nats(bench: Bench, stack: ExitStack) -> Series:
    server = NatsServer(bench.fresh_directory("nats"))
    stack.callback(server.close)
    server.start()
    asyncio.run(_add_stream(server.port))
    return _series(bench, "nats", {"kind": "nats", "port": server.port, "topic": STREAM})


async def _add_stream(port: int) -> None:
    import nats
    from nats.js.api import StorageType, StreamConfig

    connection = await nats.connect(f"nats://127.0.0.1:{port}")
    await connection.jetstream().add_stream(
        StreamConfig(name=STREAM, subjects=[STREAM], storage=StorageType.FILE)
    )
    await connection.close()


def _series(bench: Bench, key: str, spec: Spec) -> Series:
    whole = {**spec, "clients": CLIENTS, "size": RECORD_BYTES}

    def once() -> Metrics:
        return bench.closed_loop(whole, processes=PROCESSES, full_seconds=WINDOW_S)

    return Series(key, once, rate="requests_per_s")
