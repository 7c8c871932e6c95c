"""A backfill is a pipeline of its own: other places, a fixed range, resumed by running it again."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.broker.server.embed import Broker
from holdfast.errors import UsageError
from holdfast.pipeline.definition.model import (
    DeadLetter,
    Decoding,
    DeltaSink,
    Field,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Source,
)
from holdfast.pipeline.definition.naming import home_of, monitoring_group, own_topics
from holdfast.pipeline.engine.planning import Bounds, Log
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.operations.backfilling import (
    derive,
    destinations,
    plan_backfill,
    resolve,
    run_backfill,
)
from holdfast.pipeline.positions import Place
from holdfast.reader.model import OffsetAnswer, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = Decoding("json", (Field("id", "long"),))
ALL = PipelineDefinition(
    "orders",
    Source(topics=("orders",), value=ORDERS),
    sinks=(
        ParquetSink("lake/", name="lake"),
        DeltaSink("${LAKE}/delta", name="delta"),
        PostgresSink("postgresql://h/d", "orders", name="db"),
        KafkaSink("big", name="out"),
    ),
    monitoring_group="watched",
    trigger="10s",
)


def test_every_place_carries_the_name() -> None:
    made = derive(ALL, "jan.2026")
    assert made.name == "orders.jan.2026"
    assert destinations(made) == {
        "dead-letter": "topic orders-dlt.jan.2026",
        "lake": "parquet lake-jan.2026",
        "delta": "delta ${LAKE}/delta-jan.2026",
        "db": "table public.orders_jan_2026",
        "out": "topic big.jan.2026",
    }


def test_the_guides_places_carry_the_name_as_it_says() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "changing-a-pipeline.md").read_text()
    [(name, made)] = re.findall(r"--into (\S+)\n\nruns .*? as a pipeline of its own, `(\S+)`", guide)
    becomes = dict(re.findall(r"`(\S+)`\s+becomes\s+`(\S+)`", guide))
    lake, table, topic = becomes
    definition = replace(
        ALL, sinks=(ParquetSink(lake), PostgresSink("postgresql://h/d", table), KafkaSink(topic))
    )
    derived = derive(definition, name)
    assert derived.name == made
    assert list(destinations(derived).values()) == [
        f"topic {made.partition('.')[0]}-dlt.{name}",
        f"parquet {becomes[lake]}",
        f"table public.{becomes[table]}",
        f"topic {becomes[topic]}",
    ]


def test_nothing_of_the_live_pipeline_is_shared() -> None:
    made = derive(replace(ALL, dead_letter=DeadLetter("bad", "other:1")), "x")
    assert home_of(made) != home_of(ALL)
    assert home_of(derive(replace(ALL, home="/h/"), "x")) == "/h.x"
    assert monitoring_group(made) == "hf-orders.x"
    assert made.dead_letter == DeadLetter("bad.x", "other:1")
    assert not own_topics(made) & own_topics(ALL)
    assert (made.source, made.steps) == (ALL.source, ALL.steps)


@pytest.mark.parametrize("name", ["", "a b", "x..y", "-x", "n" * 100])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--into"):
        derive(ALL, name)


def test_a_table_whose_name_would_be_cut_is_refused() -> None:
    long = replace(ALL, sinks=(PostgresSink("u", "t" * 60),))
    with pytest.raises(UsageError, match="more than 63 bytes"):
        derive(long, "long")


def test_names_that_would_make_one_table_are_refused(tmp_path: Path) -> None:
    there = replace(ALL, directory=str(tmp_path), sinks=(PostgresSink("u", "t"),))
    for name in ("v1.2", "v1-2"):
        with pytest.raises(UsageError, match="would make one table"):
            plan_backfill(there, begin="earliest", end="latest", into=name)


def test_what_the_backfill_writes_must_not_be_read_by_the_live_pipeline() -> None:
    patterned = replace(ALL, source=Source(pattern="orders.*"))
    with pytest.raises(UsageError, match=r"finds the topic 'orders-dlt\.x'"):
        derive(patterned, "x")


# ---------------------------------------------------------------------------- the range

ID = uuid.UUID(int=3)
P0, P1 = Place("orders", ID, 0), Place("orders", ID, 1)
LOGS = {P0: Log(10, 100), P1: Log(0, 50)}


class Cluster:
    """Knows one time: 2026-01-01 is offset 40 of the first partition and past the end of the second."""

    def offsets(
        self, places: Mapping[TopicPartition, Place], spec: int
    ) -> dict[TopicPartition, OffsetAnswer]:
        assert spec == 1_767_225_600_000
        answers = {0: 40, 1: -1}
        return {each: OffsetAnswer(answers[each.partition], -1, -1) for each in places}


def resolved(begin: str, end: str) -> list[tuple[int, int, int]]:
    cluster: Any = Cluster()
    bounds = resolve(cluster, LOGS, begin, end)
    return [(place.partition, bounds.start[place], bounds.end[place]) for place in sorted(bounds.end)]


def test_a_range_is_resolved_to_offsets_once() -> None:
    assert resolved("earliest", "latest") == [(0, 10, 100), (1, 0, 50)]
    assert resolved("earliest", "2026-01-01") == [(0, 10, 40), (1, 0, 50)]
    assert resolved("2026-01-01T00:00:00Z", "latest") == [(0, 40, 100), (1, 50, 50)]
    assert resolved("orders:0=20, orders:1=5", "latest") == [(0, 20, 100), (1, 5, 50)]
    assert resolved("earliest", "orders:1=7") == [(1, 0, 7)]


@pytest.mark.parametrize(
    ("begin", "end", "reason"),
    [
        ("yesterday", "latest", "write earliest, latest, a time"),
        ("orders:x=3", "latest", "TOPIC:PARTITION=OFFSET"),
        ("orders:7=3", "latest", "reads no partition orders:7"),
        ("orders:0=3", "latest", "offset 3 is gone: the log begins at 10"),
        ("earliest", "orders:0=101", "does not exist yet: the log ends at 100"),
        ("orders:0=50", "orders:0=40", "behind --to"),
        ("latest", "latest", "nothing between"),
        ("orders:0=50", "orders:1=40", "nothing between"),
    ],
)
def test_a_range_that_is_none_is_refused(begin: str, end: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        resolved(begin, end)


# ---------------------------------------------------------------------------- running


class Crash(BaseException):
    """The driver is gone."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[PipelineDefinition]:
    """A pipeline over a topic of two partitions with ten orders each; it has not run."""
    with Broker(str(tmp_path / "broker")) as broker:
        address: dict[str, Any] = {"bootstrap.servers": broker.bootstrap_servers}
        admin = AdminClient(address)
        admin.create_topics([NewTopic("orders", 2, 1)])["orders"].result(30)
        producer = Producer(address)
        for number in range(20):
            producer.produce("orders", f'{{"id": {number}}}'.encode(), partition=number % 2)
        producer.produce("orders", b"not an order", partition=0)
        assert producer.flush(30) == 0
        yield PipelineDefinition(
            "orders",
            Source(topics=("orders",), bootstrap=broker.bootstrap_servers, value=ORDERS, batch_records=4),
            sinks=(ParquetSink("lake", name="lake"),),
            directory=str(tmp_path),
        )


def ids(directory: Path) -> list[int]:
    found = [pq.read_table(path, partitioning=None) for path in directory.glob("batch=*/*.parquet")]
    return sorted(number for table in found for number in table.column("id").to_pylist())


@pytest.mark.long
def test_a_backfill_stopped_goes_on_and_touches_nothing_of_the_live_pipeline(
    live: PipelineDefinition, tmp_path: Path, spark: SparkSession
) -> None:
    run_pipeline(live, spark=spark, signals=False)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / ".holdfast" / "orders").rglob("*")}
    assert ids(tmp_path / "lake") == list(range(20))

    def crash(point: str) -> None:
        if point == "committed:lake":
            raise Crash

    wanted = {"begin": "orders:0=2,orders:1=3", "end": "orders:0=11,orders:1=8", "into": "again"}
    plan = plan_backfill(live, **wanted)
    assert (plan.offsets, plan.is_resumed) == (14, False)
    with pytest.raises(Crash):
        run_backfill(plan, spark=spark, signals=False, faults=crash)
    assert 0 < len(ids(tmp_path / "lake-again")) < 13

    plan = plan_backfill(live, **wanted)
    assert plan.is_resumed
    summary = run_backfill(plan, spark=spark, signals=False)
    expected = [*range(4, 20, 2), *range(7, 16, 2)]
    assert ids(tmp_path / "lake-again") == sorted(expected)
    assert summary.routes.dead_letter == {"parse": 1}
    assert run_backfill(plan_backfill(live, **wanted), spark=spark, signals=False).batches == 0

    with pytest.raises(UsageError, match="was begun from orders:0=2"):
        plan_backfill(live, **{**wanted, "end": "latest"})
    assert ids(tmp_path / "lake") == list(range(20))
    assert before == {
        path: path.stat().st_mtime_ns for path in (tmp_path / ".holdfast" / "orders").rglob("*")
    }
    admin = AdminClient({"bootstrap.servers": live.source.bootstrap or ""})
    shown = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("hf-orders")])[
        "hf-orders"
    ].result(30)
    assert {each.partition: each.offset for each in shown.topic_partitions} == {0: 11, 1: 10}


def test_a_run_within_bounds_sees_no_other_partition_and_no_later_record() -> None:
    assert Bounds({P0: 20}, {P0: 30}).within(LOGS) == {P0: Log(10, 30)}
    assert Bounds({P1: 0}, {P1: 90}).within(LOGS) == {P1: Log(0, 50)}
