"""Pipelines that are broken on purpose, in the ways pipelines are, go through a crash: the audit fails each of them.

The engine here is ours with one rule taken out. With all of them in place, the same crash leaves a proven pipeline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.audit.model import Fate, Report, Verdict
from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.pipeline.core.failures import SinkLost
from holdfast.pipeline.definition.model import (
    Decoding,
    EventTime,
    Field,
    ParquetSink,
    PipelineDefinition,
    Source,
    Window,
)
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.known_sinks import KnownSinks
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.sinks.parquet import (
    LEDGER,
    ParquetSinkWriter,
    ParquetStore,
    PreparedParquet,
    batch_directory,
)
from holdfast.pipeline.state.watermarks import Clock, Watermarks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.broker.server.embed import Broker

pytestmark = pytest.mark.holdfast(mode="thread")

BEGIN_MS = 1_700_000_000_000
ORDERS = Decoding("json", (Field("id", "long"), Field("customer", "string"), Field("at", "timestamp")))


class Killed(BaseException):
    """The driver is gone: nothing of it may catch this."""


class Case:
    """One partition, one pipeline into a Parquet sink, runs that end as they end."""

    def __init__(self, broker: Broker, spark: SparkSession, directory: Path) -> None:
        self.broker = broker
        self.spark = spark
        self.produced = 0
        self.definition = PipelineDefinition(
            "orders",
            Source(
                ("orders",),
                bootstrap=broker.bootstrap_servers,
                value=ORDERS,
                event_time=EventTime("at", "10s"),
            ),
            sinks=(ParquetSink(str(directory / "out"), "main"),),
            home=str(directory / "home"),
            directory=str(directory),
        )
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        kept = {"retention.ms": "-1"}  # the orders are of a fixed day long ago
        admin.create_topics([NewTopic("orders", 1, 1, config=kept)])["orders"].result(30)

    def produce(self, count: int) -> None:
        """Orders ten seconds apart, each in order."""
        producer = Producer({"bootstrap.servers": self.broker.bootstrap_servers})
        for number in range(self.produced, self.produced + count):
            at_ms = BEGIN_MS + 10_000 * number
            customer = f"c{number % 3}"
            text = json.dumps({"id": number, "customer": customer, "at": _iso(at_ms)})
            producer.produce("orders", text, key=customer, timestamp=at_ms)
        assert producer.flush(30) == 0
        self.produced += count

    def cut(self, records: int) -> None:
        self.definition = replace(
            self.definition, source=replace(self.definition.source, batch_records=records)
        )

    def run(self, faults: Faults = no_faults) -> None:
        run_pipeline(self.definition, spark=self.spark, faults=faults, signals=False)

    def run_until_killed(self, faults: Faults = no_faults) -> None:
        with pytest.raises(Killed):
            self.run(faults)

    def audit(self) -> Report:
        return audit_pipeline(self.definition)


def _iso(time_ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat().replace("+00:00", "Z")


@pytest.fixture
def case(holdfast_broker: Broker, spark: SparkSession, tmp_path: Path) -> Case:
    return Case(holdfast_broker, spark, tmp_path)


def kill_at(point: str, times: int = 1) -> Faults:
    left = [times]

    def hook(name: str) -> None:
        if name == point:
            left[0] -= 1
            if left[0] == 0:
                raise Killed

    return hook


def lost(report: Report, sink: str) -> set[int]:
    return {
        offset
        for finding in report.findings
        if finding.fate is Fate.LOST and finding.sink == sink
        for first, last in finding.ranges
        for offset in range(first, last + 1)
    }


TOTALS = Window("totals", {"orders": "count(*)"}, size="1m", key=("customer",))


def with_windows(case: Case, tmp_path: Path) -> None:
    totals = ParquetSink(str(tmp_path / "totals"), "totals", rows="totals")
    case.definition = replace(case.definition, steps=(TOTALS,), sinks=(*case.definition.sinks, totals))


def test_a_pipeline_as_it_is_survives_the_kill_and_is_proven(case: Case, tmp_path: Path) -> None:
    with_windows(case, tmp_path)
    case.produce(40)
    case.run_until_killed(kill_at("committed:main"))
    case.produce(10)
    case.run()
    report = case.audit()
    assert report.exit_code() == 0, report.reasons
    assert report.total(Fate.OUTPUT) == 50


@pytest.mark.long
def test_a_ledger_by_batch_number_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:  # HF404
    """The sink keeps numbers of batches; a driver that lost its checkpoint counts from the start again."""
    case.produce(40)
    case.run()
    mine: dict[str, Entry] = {}
    commit = PreparedParquet.commit

    def by_number(self: PreparedParquet, entry: Entry) -> None:
        mine[entry.sink] = entry
        if not os.path.exists(os.path.join(self._store.path, batch_directory(entry.number))):
            commit(self, entry)

    def of_this_driver(self: ParquetSinkWriter) -> Entry | None:
        return mine.get(self.name)

    monkeypatch.setattr(PreparedParquet, "commit", by_number)
    monkeypatch.setattr(ParquetSinkWriter, "last_entry", of_this_driver)
    case.produce(80)
    case.cut(40)
    with pytest.raises(SinkLost):
        case.run()
    monkeypatch.setattr(KnownSinks, "lost", lambda *_: {})  # nor does anything else know how far the sink was
    case.run()
    report = case.audit()
    assert report.verdict is Verdict.FAILED
    assert report.verdict.exit_code == 1
    assert lost(report, "main") == set(range(40, 80))


@pytest.mark.long
def test_a_commit_before_the_write_is_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger moves first; the driver dies before the rows follow."""
    case.produce(20)
    case.run()
    case.produce(10)
    commit = PreparedParquet.commit

    def entry_first(self: PreparedParquet, entry: Entry) -> None:
        store: ParquetStore = self._store
        directory = os.path.join(store.path, batch_directory(entry.number))
        os.makedirs(directory)
        with open(os.path.join(directory, LEDGER), "w", encoding="utf-8") as file:
            json.dump(entry.as_json(), file)
        raise Killed

    monkeypatch.setattr(PreparedParquet, "commit", entry_first)
    case.run_until_killed()
    monkeypatch.setattr(PreparedParquet, "commit", commit)
    with pytest.raises(SinkLost, match="batch=00000000000000000002"):
        case.run()
    report = case.audit()
    assert report.verdict is Verdict.FAILED
    assert lost(report, "main") == set(range(20, 30))


@pytest.mark.long
def test_a_watermark_from_the_wall_clock_is_caught(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows close by when they are computed: after a pause, what the log has in order counts as late."""
    after: Callable[..., Watermarks] = Watermarks.after

    def by_the_clock(self: Watermarks, clock: Clock, batch_time_ms: int, *more: Any) -> Watermarks:
        return replace(after(self, clock, batch_time_ms, *more), watermark_ms=batch_time_ms - clock.delay_ms)

    monkeypatch.setattr(Watermarks, "after", by_the_clock)
    with_windows(case, tmp_path)
    case.produce(30)
    case.run_until_killed(kill_at("committed:main"))
    case.produce(10)
    case.run()
    report = case.audit()
    assert report.verdict is Verdict.FAILED
    assert any("totals" in (each.sink, *each.what().split()) for each in report.findings), report.reasons
