"""The audit's readers on what a pipeline really wrote: every kind of sink in one run, before and after merging."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.audit.sinks.letters import dead_letters
from holdfast.audit.sinks.opening import open_dead_letters, open_sink
from holdfast.pipeline.definition.model import (
    Decoding,
    DeltaSink,
    EventTime,
    Expect,
    Field,
    Filter,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Source,
    Window,
)
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.sinks.compacting import compact
from holdfast.testing.postgres import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.broker.server.embed import Broker

pytestmark = pytest.mark.holdfast(mode="thread")

START_MS = 1_767_225_600_000
FIELDS = (Field("id", "long"), Field("country", "string"), Field("at", "timestamp"))


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer(settings=("fsync=off",)) as server:
        yield server


def produce(broker: Broker, numbers: range) -> None:
    """Order n in partition n % 2, a minute after n - 1; each tenth is no JSON."""
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for number in numbers:
        value = {"id": number, "country": ("nl", "be")[number % 2], "at": START_MS + number * 60_000}
        text = b"no json" if number % 10 == 9 else json.dumps(value).encode()
        producer.produce("orders", text, key=str(number), partition=number % 2)
    assert producer.flush(30) == 0


def definition_of(broker: Broker, postgres: PostgresServer, directory: Path) -> PipelineDefinition:
    return PipelineDefinition(
        "shop",
        Source(
            topics=("orders",),
            bootstrap=broker.bootstrap_servers,
            value=Decoding("json", FIELDS),
            event_time=EventTime("at"),
        ),
        steps=(
            Expect("known", "id <> 3"),
            Filter("even-hundreds", "id <> 4"),
            Window("totals", {"n": "count(*)"}, size="10m", key=("country",)),
        ),
        sinks=(
            ParquetSink(str(directory / "files"), name="files", partition_by=("country",)),
            DeltaSink(str(directory / "delta"), name="delta", partition_by=("country",)),
            PostgresSink(postgres.url, "orders", name="rows"),
            PostgresSink(postgres.url, "countries", name="latest", mode="upsert", key=("country",)),
            KafkaSink("orders-out", name="topic", writers=2, headers={"country": "country"}),
            ParquetSink(str(directory / "totals"), name="totals", rows="totals"),
        ),
        home=str(directory / "home"),
        directory=str(directory),
    )


def places(reader: SinkReader) -> Counter[tuple[str, int, int]]:
    found: Counter[tuple[str, int, int]] = Counter()
    for batch in reader.rows(SinkScope({})):
        assert not batch.indexes.any()
        found.update((batch.topic, batch.partition, offset) for offset in batch.offsets.tolist())
    return found


def expected(numbers: range) -> Counter[tuple[str, int, int]]:
    return Counter(
        ("orders", number % 2, number // 2) for number in numbers if number % 10 != 9 and number not in (3, 4)
    )


def test_what_a_pipeline_wrote_is_read_by_the_audit(
    holdfast_broker: Broker, postgres: PostgresServer, spark: SparkSession, tmp_path: Path
) -> None:
    admin = AdminClient({"bootstrap.servers": holdfast_broker.bootstrap_servers})
    admin.create_topics([NewTopic("orders", 2, 1)])["orders"].result(30)
    definition = definition_of(holdfast_broker, postgres, tmp_path)
    produce(holdfast_broker, range(60))
    run_pipeline(definition, spark=spark)

    look(definition, holdfast_broker.bootstrap_servers)
    prove(definition)
    assert {"files", "totals"} <= {each.sink for each in compact(definition)}
    look(definition, holdfast_broker.bootstrap_servers)
    prove(definition)


def prove(definition: PipelineDefinition) -> None:
    report = audit_pipeline(definition)
    assert report.exit_code() == 0, report.reasons
    assert {sink.name: sink.rows for sink in report.sinks}["delta"] == sum(expected(range(60)).values())


def look(definition: PipelineDefinition, bootstrap: str) -> None:
    settings = {"bootstrap.servers": bootstrap}
    readers: dict[str, SinkReader] = {
        sink.name: open_sink(definition, sink, settings) for sink in definition.sinks
    }
    letters = open_dead_letters(definition, settings)
    readers["dead-letter"] = letters
    try:
        for name in ("files", "delta", "rows", "topic"):
            assert places(readers[name]) == expected(range(60)), name
        assert places(letters) == Counter(
            ("orders", n % 2, n // 2) for n in range(60) if n % 10 == 9 or n == 3
        )
        assert Counter(row.reason for row in dead_letters(letters)) == {"parse": 6, "known": 1}
        keys = {
            row["country"]: (row["_hf_partition"], row["_hf_offset"])
            for batch in readers["latest"].values(["country"])
            for row in batch.table.to_pylist()
        }
        assert keys == {"nl": (0, 29), "be": (1, 28)}
        for name, reader in readers.items():
            assert list(reader.problems()) == [], name
            assert list(reader.gaps()) == [], name
            assert {at.offset for at in reader.positions().at.values()} == {30}
            assert reader.entries()[-1].number == max(entry.number for entry in reader.entries())
        check_windows(readers["totals"])
        assert len(readers["files"].find(next(iter(letters.positions())), 0)) == 1
    finally:
        for reader in readers.values():
            reader.close()


def check_windows(reader: SinkReader) -> None:
    """Windows that closed: those that end at or before the lowest of the partitions' greatest events."""
    rows = pa.concat_tables(batch.table for batch in reader.values()).to_pylist()
    found = {(row["country"], int(row["window_start"].timestamp() * 1000)): row["_hf_count"] for row in rows}
    counts: Counter[tuple[str, int]] = Counter()
    for topic, partition, offset in expected(range(60)):
        assert topic == "orders"
        number = offset * 2 + partition
        counts[("nl", "be")[partition], START_MS + number // 10 * 600_000] += 1
    closed_ms = START_MS + 57 * 60_000
    assert found == {key: count for key, count in counts.items() if key[1] + 600_000 <= closed_ms}
    assert {row["_hf_topic"] for row in rows} == {"totals"}
    assert sum(row["n"] for row in rows) == sum(found.values())
