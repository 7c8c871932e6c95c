"""How a measure is run: brokers started, each series warmed until steady, then alternating rounds.

Within a round every series runs once; even rounds run them in order, odd ones backwards, so that a drift
of the machine falls on both sides alike. Before each run what earlier runs left unwritten is flushed
(`sync`), outside the clock: no series pays for another's write-back.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from bench import topics
from bench.load import Spec, run_closed_loops
from bench.model import MeasureResult, Metrics, Round, Row
from bench.servers import Broker, Durability, HoldfastBroker, KafkaBroker
from bench.stats import is_steady, percentile

WARM_RUNS_MAX: Final = 8


class Series(NamedTuple):
    """One side of a measure: runs once and returns its metrics. `rate` is the one to become steady."""

    key: str
    run: Callable[[], Metrics]
    rate: str | None = None


class Measure(ABC):
    """An experiment: a name for `--only`, the rows it fills, and how it is run."""

    name: ClassVar[str]
    title: ClassVar[str]
    rows: ClassVar[Sequence[Row]]
    shares_brokers: ClassVar[bool]
    """Whether it can use the long-running pair of brokers, or needs brokers of its own."""

    @abstractmethod
    def run(self, bench: Bench) -> MeasureResult:
        """Take the figures."""


@dataclass(slots=True)
class Pair:
    """Ours and Apache Kafka, side by side."""

    ours: Broker
    kafka: Broker

    def close(self) -> None:
        """End both."""
        self.ours.close()
        self.kafka.close()


@dataclass(slots=True)
class Bench:
    """The settings of a run and what the measures share."""

    work_dir: Path
    rounds: int = 9
    scale: float = 1.0
    """1 for figures that count; `--quick` makes everything smaller and proves only that it works."""
    stand_in: bool = False
    """Apache Kafka on both sides: the ratios then show the noise of machine and method."""
    begun_at: float = field(default_factory=time.monotonic)
    _pair: Pair | None = None
    _topics: int = 0

    def say(self, text: str) -> None:
        """One line of progress."""
        minutes, seconds = divmod(int(time.monotonic() - self.begun_at), 60)
        print(f"[{minutes:3d}:{seconds:02d}] {text}", file=sys.stderr, flush=True)

    def seconds(self, full: float) -> float:
        """A window's length, scaled."""
        return max(full * self.scale, 0.5)

    def count(self, full: int) -> int:
        """A number of records, scaled."""
        return max(int(full * self.scale), 1_000)

    def topic_name(self, stem: str) -> str:
        """A name no earlier run used."""
        self._topics += 1
        return f"bench-{stem}-{self._topics}"

    # -- brokers

    def kafka(self, name: str, properties: Mapping[str, str] | None = None) -> Broker:
        """An Apache Kafka of its own, not started yet."""
        return KafkaBroker(properties, directory=self.fresh_directory(name))

    def ours(self, name: str, properties: Mapping[str, str] | None = None) -> Broker:
        """Our broker, not started yet."""
        if self.stand_in:
            return self.kafka(f"{name}-stand-in", properties)
        return HoldfastBroker(properties, directory=self.fresh_directory(name))

    def fresh_directory(self, name: str) -> Path:
        """An empty directory."""
        directory = self.work_dir / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return directory

    @property
    def pair(self) -> Pair:
        """The brokers that serve one measure after the other, started when first asked for."""
        if self._pair is None:
            pair = Pair(self.ours("shared-ours"), self.kafka("shared-kafka"))
            try:
                pair.ours.start()
                pair.kafka.start()
            except BaseException:
                pair.close()
                raise
            self._pair = pair
        return self._pair

    def close_pair(self) -> None:
        """End the shared brokers, so that what needs the machine for itself has it."""
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    @contextmanager
    def topic(
        self, broker: Broker, stem: str, durability: Durability, partitions: int = 1, **settings: str
    ) -> Iterator[str]:
        """A topic for the length of a block. Settings are passed with underscores in place of dots."""
        name = self.topic_name(stem)
        dotted = {key.replace("_", "."): value for key, value in settings.items()}
        topics.create(broker, name, partitions, {**broker.topic_settings(durability), **dotted})
        yield name
        topics.delete(broker, name)

    # -- running

    def alternate(
        self, name: str, series: Sequence[Series], warm: Sequence[str] | None = None
    ) -> MeasureResult:
        """Warm up (`warm`: only these series) and run the rounds."""
        result = MeasureResult(name, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
        for each in series:
            if each.rate is not None and (warm is None or each.key in warm):
                self._warm(name, each, result)
        for number in range(self.rounds):
            ordered = series if number % 2 == 0 else list(reversed(series))
            measured: Round = {}
            for each in ordered:
                os.sync()
                measured[each.key] = each.run()
            result.rounds.append(measured)
            self.say(f"{name} round {number + 1}/{self.rounds}: {_brief(series, measured)}")
        return result

    def _warm(self, name: str, series: Series, result: MeasureResult) -> None:
        assert series.rate is not None
        rates: list[float] = []
        most = WARM_RUNS_MAX if self.scale >= 1 else 1
        while len(rates) < most and not is_steady(rates):
            os.sync()
            rates.append(series.run()[series.rate])
        said = " ".join(f"{rate:,.0f}" for rate in rates)
        self.say(f"{name} warming {series.key}: {said}")
        if self.scale >= 1 and not is_steady(rates):
            result.notes.append(f"{series.key} was not steady after {most} warming runs: {said}.")

    def closed_loop(self, spec: Spec, processes: int, full_seconds: float) -> Metrics:
        """Run a closed-loop generator in several processes and put their figures together."""
        share = spec["clients"] // processes
        specs = [{**spec, "clients": share, "first_client": share * each} for each in range(processes)]
        return latency_metrics(run_closed_loops(specs, self.seconds(full_seconds)))


def latency_metrics(found: Sequence[Mapping[str, Any]]) -> Metrics:
    """Requests per second and latency percentiles of generators that ran in the same window."""
    latencies: list[int] = [value for each in found for value in each["latencies_us"]]
    if not latencies:
        raise RuntimeError("nothing was acknowledged within the window")
    client_s = sum(each["cpu_s"] for each in found) / len(latencies)
    return {
        "requests_per_s": len(latencies) / max(each["window_s"] for each in found),
        "client_us": client_s * 1e6,
        # What the clients' own processor time leaves: no broker, not one that costs nothing, is faster on this machine.
        "clients_alone_per_s": (os.cpu_count() or 1) / client_s,
        "p50_us": percentile(latencies, 0.50),
        "p99_us": percentile(latencies, 0.99),
    }


def _brief(series: Sequence[Series], measured: Round) -> str:
    parts = []
    for each in series:
        metrics = measured[each.key]
        shown = each.rate if each.rate is not None else next(iter(metrics))
        parts.append(f"{each.key} {metrics[shown]:,.5g}")
    return ", ".join(parts)
