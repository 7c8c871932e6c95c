"""Every cell of a real run: what is nested, partitioned, computed, aggregated or keyed by a query is recomputed, and a
change to any of it is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.audit.model import Report, Verdict
from holdfast.audit.pipeline_audit import AuditOptions, audit_pipeline
from holdfast.audit.spark.auditing import audit_with_spark
from holdfast.broker.server.embed import Broker
from holdfast.pipeline.definition.model import (
    Decoding,
    EventTime,
    Expect,
    Field,
    Filter,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Source,
    Sql,
    Window,
)
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.testing.postgres import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.check

T0 = 1_767_225_600_000
FIELDS = (
    Field("id", "long"),
    Field("customer", "string"),
    Field("amount", "double"),
    Field("at", "timestamp"),
    Field("scores", "map<string,double>", required=False),
    Field("address", "struct<city:string,lines:array<string>>", required=False),
)
MARKED = "SELECT *, concat(upper(customer), '!') AS marked, amount * 2 AS worth FROM input"
AGGREGATES = {
    "total": "sum(amount)",
    "worth": "sum(worth * 2)",
    "names": "count(DISTINCT upper(customer))",
    "latest": "last(id)",
    "several": "count(DISTINCT customer, id)",
}


@dataclass
class Made:
    definition: PipelineDefinition
    directory: Path
    url: str

    def audit(self, **options: Any) -> Report:
        return audit_pipeline(self.definition, options=AuditOptions(**options))


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    directory = tmp_path_factory.mktemp("cells")
    with Broker(str(directory / "broker")) as broker, PostgresServer(settings=("fsync=off",)) as server:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        for future in admin.create_topics(
            [NewTopic(name, 2, 1, config={"retention.ms": "-1"}) for name in ("orders", "out")]
        ).values():
            future.result(30)
        _produce(broker.bootstrap_servers, 60)
        definition = PipelineDefinition(
            name="cells",
            source=Source(
                topics=("orders",),
                bootstrap=broker.bootstrap_servers,
                value=Decoding("json", FIELDS),
                event_time=EventTime("at", "2s"),
                batch_records=25,
            ),
            steps=(
                Expect("positive", "amount >= 0"),
                Filter("few", "id % 7 <> 0"),
                Sql("marked", MARKED),
                Window("totals", AGGREGATES, size="4s", key=("marked",)),
            ),
            sinks=(
                ParquetSink(str(directory / "lake"), "lake", partition_by=("customer",)),
                ParquetSink(str(directory / "totals"), "totals", rows="totals"),
                PostgresSink(server.url, "orders", "table"),
                PostgresSink(server.url, "newest", "newest", mode="upsert", key=("marked",), order_by="id"),
                KafkaSink(
                    "out",
                    key="marked",
                    value="concat(marked, ':', worth)",
                    headers={"worth": "string(worth)"},
                ),
            ),
            home=str(directory / "home"),
            directory=str(directory),
        )
        run_pipeline(definition, spark=spark, signals=False)
        yield Made(definition, directory, server.url)


def _produce(bootstrap: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(count):
        order = {
            "id": number,
            "customer": f"c{number % 3}",
            "amount": -1.0 if number == 20 else number / 4,
            "at": f"2026-01-01T00:00:{number // 2 % 60:02d}.5Z",
            "scores": {"b": 1.5, "a": number} if number % 2 else None,
            "address": {"city": "Kiel", "lines": ["x", str(number)]},
        }
        value = b"broken" if number == 11 else json.dumps(order).encode()
        headers: list[tuple[str, str | bytes | None]] = [("trace", b"t%d" % number)]
        producer.produce(
            "orders", value, f"k{number}", number % 2, headers=headers, timestamp=T0 + number * 500
        )
    assert producer.flush(30) == 0


def not_recomputed(report: Report) -> set[str]:
    return {each.name for each in report.coverage if each.unaltered or each.trusted}


def test_everything_is_recomputed_but_why_a_record_failed(made: Made, spark: SparkSession) -> None:
    plain = made.audit(accepted=("dead-letter.failure",))
    assert [each.what() for each in plain.findings] == []
    assert {
        "lake.customer",
        "lake.scores",
        "lake.address",
        "table.address",
        "dead-letter.headers",
    } & not_recomputed(plain) == set()
    assert {"lake.worth", "steps.few", "totals.marked", "kafka.value"} <= not_recomputed(plain)
    report = audit_with_spark(made.definition, spark=spark)
    assert [each.what() for each in report.findings] == []
    assert not_recomputed(report) == {"dead-letter.failure"}


def in_files(
    directory: str, column: str, change: Callable[[Any], Any]
) -> Callable[[Made], Callable[[], None]]:
    """One cell of one row, in the first file that has a row with one; what puts it back."""

    def damage(made: Made) -> Callable[[], None]:
        for path in sorted((made.directory / directory).rglob("part-*.parquet")):
            table = pq.ParquetFile(path).read()
            values = table.column(column).to_pylist()
            at = next((at for at, each in enumerate(values) if each is not None), None)
            if at is None:
                continue
            before = path.read_bytes()
            values[at] = change(values[at])
            field = table.schema.field(column)
            place = table.column_names.index(column)
            pq.write_table(table.set_column(place, field, pa.array(values, field.type)), path)
            return lambda: _put_back(path, before)
        raise AssertionError("no rows")

    return damage


def _put_back(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def moved(made: Made) -> Callable[[], None]:
    one = next(iter(sorted((made.directory / "lake").rglob("customer=c1"))))
    other = one.with_name("customer=c9")
    os.rename(one, other)
    return lambda: os.rename(other, one)


def in_table(change: str, back: str) -> Callable[[Made], Callable[[], None]]:
    def damage(made: Made) -> Callable[[], None]:
        def run(statement: str) -> None:
            with psycopg.connect(made.url, autocommit=True) as connection:
                assert connection.execute(statement.encode()).rowcount > 0

        run(change)
        return lambda: run(back)

    return damage


PLAIN = {
    "a leaf of a struct": ("lake", in_files("lake", "address", lambda it: {**it, "lines": ["x"]})),
    "an entry of a map": ("lake", in_files("lake", "scores", lambda it: [*it[:-1], (it[-1][0], 9.0)])),
    "the name of a partition": ("lake", moved),
    "a value in jsonb": (
        "table",
        in_table(
            "UPDATE orders SET address = jsonb_set(address, '{city}', '\"Bonn\"') WHERE id = 3",
            "UPDATE orders SET address = jsonb_set(address, '{city}', '\"Kiel\"') WHERE id = 3",
        ),
    ),
}
COMPUTED = {
    "a computed column": ("lake", "worth", in_files("lake", "worth", lambda it: it + 1)),
    "an aggregate over a computed column": (
        "totals",
        "worth is",
        in_files("totals", "worth", lambda it: it + 1),
    ),
    "a distinct count": ("totals", "names is", in_files("totals", "names", lambda it: it + 1)),
    "the computed key of an upsert": (
        "newest",
        "another key",
        in_table(
            "UPDATE newest SET marked = 'C9!' WHERE marked = 'C1!'",
            "UPDATE newest SET marked = 'C1!' WHERE marked = 'C9!'",
        ),
    ),
}


def recomputed(report: Report) -> list[tuple[str, str]]:
    """Findings that do not come from digests: sink and what."""
    assert report.verdict is Verdict.FAILED
    return [(each.sink, each.detail) for each in report.findings if "digest" not in each.detail]


@pytest.mark.parametrize("what", PLAIN)
def test_a_change_to_a_field_of_the_record_is_found(made: Made, what: str) -> None:
    sink, damage = PLAIN[what]
    undo = damage(made)
    try:
        assert sink in {name for name, _ in recomputed(made.audit())}
    finally:
        undo()
    assert made.audit().findings == ()


def test_changes_to_what_steps_compute_are_found(made: Made, spark: SparkSession) -> None:
    with ExitStack() as stack:
        for _, _, damage in COMPUTED.values():
            stack.callback(damage(made))
        by_digest = {each.sink for each in made.audit().findings}
        found = recomputed(audit_with_spark(made.definition, spark=spark))
    for what, (sink, detail, _) in COMPUTED.items():
        assert sink in by_digest, what
        assert any(name == sink and detail in each for name, each in found), (what, found)
