"""A real run of all that remembers, audited without Spark: proven as it is, failed when a number is changed."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.audit.model import Fate, Verdict
from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.audit.stored import place_of
from holdfast.audit.tracing import Tracer
from holdfast.broker.server.embed import Broker
from holdfast.pipeline.aside import LATE_FOR
from holdfast.pipeline.definition.model import (
    Decoding,
    Dedupe,
    EventTime,
    Expect,
    Field,
    Filter,
    ParquetSink,
    PipelineDefinition,
    Source,
    Window,
)
from holdfast.pipeline.definition.naming import client_settings
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.reader import Cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.long

T0 = 1_767_225_600_000
FIELDS = (Field("id", "long"), Field("customer", "string"), Field("amount", "long"), Field("at", "timestamp"))
TOTALS = {"total": "sum(amount)", "orders": "count(*)"}


def definition(bootstrap: str, directory: Path) -> PipelineDefinition:
    steps = (
        Expect("positive", "amount > 0"),
        Dedupe("once", ("id",), within="20s"),
        Window("totals", TOTALS, size="5s", key=("customer",), emit="changes", late="correct"),
        Filter("no-trials", "customer <> 'c3'"),
        Window("sessions", TOTALS, "session", gap="1s", key=("customer",)),
    )
    taken = ("", "totals", "sessions", "sessions.late")
    return PipelineDefinition(
        name="remembering",
        source=Source(
            topics=("orders",),
            bootstrap=bootstrap,
            value=Decoding("json", FIELDS),
            event_time=EventTime("at", "2s"),
            batch_records=200,
        ),
        steps=steps,
        sinks=tuple(
            ParquetSink(str(directory / f"sink-{rows or 'main'}"), f"sink-{rows or 'main'}", rows=rows)
            for rows in taken
        ),
        home=str(directory / "home"),
        directory=str(directory),
    )


def produce(bootstrap: str, count: int) -> None:
    """Some late, some twice, some broken, one with a clock far ahead, one without value."""
    rng = random.Random(8)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(count):
        second = number / 8 - (rng.choice((4, 9, 30)) if rng.random() < 0.1 else 0)
        order = {
            "id": number - rng.randrange(3) if rng.random() < 0.1 else number,
            "customer": f"c{rng.randrange(6)}",
            "amount": rng.randrange(-1, 20),
            "at": _iso(T0 + round(max(0.0, second) * 1000) + (36_000_000 if number == 50 else 0)),
        }
        value = b"broken" if number % 97 == 5 else json.dumps(order).encode()
        producer.produce(
            "orders",
            None if number == 77 else value,
            partition=number % 2,
            timestamp=T0 + number * 125,
        )
    assert producer.flush(30) == 0


def _iso(time_ms: int) -> str:
    import numpy as np

    return f"{np.datetime64(time_ms, 'ms')}Z"


def changed(directory: Path, column: str) -> None:
    """One number of one row, in the first file that has a row."""
    for path in sorted(directory.rglob("part-*.parquet")):
        table = pq.read_table(path, partitioning=None)
        if table.num_rows:
            values = table.column(column).to_pylist()
            values[0] += 1
            at = table.column_names.index(column)
            pq.write_table(
                table.set_column(at, column, pa.array(values, table.schema.field(column).type)), path
            )
            return
    raise AssertionError("no rows")


def traced(made: PipelineDefinition) -> Counter[str]:
    """The fates of some records, looked up one by one; a row that went on is in its windows, if it was not late."""
    settings = client_settings(made)
    fates: Counter[str] = Counter()
    with Cluster(settings) as cluster, Tracer(cluster, made, settings) as tracer:
        for offset in range(0, 200, 9):
            life = tracer.trace(place_of(cluster, "orders", offset % 2), offset)
            fates[life.fate] += 1
            assert not life.is_fault, life.conclusion
            late = {each.step for each in life.departures if each.route == LATE_FOR}
            for sink in life.sinks:
                if life.fate == "output" and sink.name in ("sink-tumbling", "sink-sliding") and offset < 100:
                    assert bool(sink.held) != (sink.takes in late), (sink, life.departures)
    return fates


def test_a_real_run_is_proven_and_two_changed_numbers_are_named(spark: SparkSession, tmp_path: Path) -> None:
    with Broker(str(tmp_path / "broker")) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        admin.create_topics([NewTopic("orders", 2, 1, config={"retention.ms": "-1"})])["orders"].result(30)
        produce(broker.bootstrap_servers, 400)
        made = definition(broker.bootstrap_servers, tmp_path)
        run_pipeline(made, spark=spark, signals=False)
        report = audit_pipeline(made)
        assert [finding.what() for finding in report.findings] == []
        assert report.exit_code() == 0, report.reasons
        for account in report.windows:
            assert account.recomputed == account.expected > 10, account
        for fate in (Fate.DUPLICATE, Fate.LATE, Fate.DEAD_LETTER, Fate.FILTERED):
            assert report.total(fate) > 0, fate
        assert {"output", "dead_letter", "filtered"} <= traced(made).keys()
        for step, column in (("totals", "_hf_count"), ("sessions", "total")):
            changed(tmp_path / f"sink-{step}", column)
        broken = audit_pipeline(made)
        assert broken.verdict is Verdict.FAILED
        named = {finding.sink for finding in broken.findings if finding.fate is Fate.ALTERED}
        assert named >= {"sink-totals", "sink-sessions"}
