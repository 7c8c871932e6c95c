"""The driver dies at every point of a batch, and every sink holds every record exactly once.  # HF403 HF404"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.pipeline.definition.model import Filter
from holdfast.pipeline.engine.faults import Faults

if TYPE_CHECKING:
    from .conftest import Bench

POINTS = (
    "opened:dead-letter",
    "opened:main",
    "planned",
    "staged",
    "routed",
    "prepared:dead-letter",
    "prepared:second",
    "balanced",
    "aside-written",
    "committed:dead-letter",
    "committed:main",
    "committed:second",
    "monitored",
    "done",
)
CrashAt = Callable[..., Faults]


@pytest.fixture
def bench(either_bench: Bench) -> Bench:
    return either_bench


def assert_exactly_once(bench: Bench, count: int, broken: int) -> None:
    for name in ("main", "second"):
        assert bench.sinks[name].ids == list(range(count)), name
        assert max(bench.sinks[name].places.values()) == 1
    assert len(bench.sinks["dead-letter"].content) == broken
    assert max(bench.sinks["dead-letter"].places.values(), default=1) == 1


@pytest.mark.parametrize(
    ("point", "loses_home"),
    [(point, point in ("staged", "committed:dead-letter", "committed:main", "done")) for point in POINTS]
    + [("committed:main", False)],
)
def test_a_crash_loses_and_repeats_nothing(
    bench: Bench, crash_at: CrashAt, point: str, loses_home: bool
) -> None:
    bench.produce_orders(20)
    bench.produce([b"broken"])
    bench.run_until_crash(crash_at(point))
    bench.produced -= 1
    bench.produce_orders(5)
    if loses_home:
        bench.lose_home()
    bench.run()
    assert_exactly_once(bench, count=25, broken=1)


def test_a_sink_that_died_right_after_its_commit_is_found_in_its_ledger(
    bench: Bench, crash_at: CrashAt
) -> None:
    bench.produce_orders(10)
    bench.run()
    bench.produce_orders(10)
    bench.sinks["main"].fails_after_commit = True
    bench.run_until_crash(crash_at("never"))
    assert len(bench.sinks["main"].content) == 20
    assert len(bench.sinks["second"].content) == 10
    [caught_up] = bench.run_batches()
    assert caught_up.rows_by_sink == {"second": 10}
    assert caught_up.batch_time_ms == bench.sinks["main"].ledger[-1].batch_time_ms
    assert_exactly_once(bench, count=20, broken=0)


def test_a_sink_added_later_starts_where_the_pipeline_stands(bench: Bench) -> None:
    late = bench.sinks.pop("second")
    bench.produce_orders(10)
    bench.run()
    bench.sinks["second"] = late
    bench.produce_orders(5)
    bench.run()
    assert bench.sinks["main"].ids == list(range(15))
    assert late.ids == list(range(10, 15))
    assert sum(span.end for span in late.ledger[0].range.spans.values()) == 10


def test_a_definition_that_changed_goes_on_where_the_ledgers_stand(
    spark_bench: Bench, crash_at: CrashAt
) -> None:
    spark_bench.produce_orders(10)
    spark_bench.run_until_crash(crash_at("committed:main"))
    spark_bench.change(steps=(Filter("few", "id < 5"),))
    spark_bench.run()
    assert spark_bench.sinks["main"].ids == list(range(10))
    assert spark_bench.sinks["second"].ids == list(range(5))
    fingerprints = {name: sink.ledger[-1].fingerprint for name, sink in spark_bench.sinks.items()}
    assert fingerprints["main"] != fingerprints["second"]


def test_a_batch_that_was_cut_small_is_cut_again_anywhere_after_the_crash(
    bench: Bench, crash_at: CrashAt
) -> None:
    bench.change(source=replace(bench.definition.source, batch_records=7))
    bench.produce_orders(40)
    bench.run_until_crash(crash_at("committed:main", 3))
    bench.change(source=replace(bench.definition.source, batch_records=1000))
    bench.run()
    assert_exactly_once(bench, count=40, broken=0)


def test_partitions_added_while_it_runs_are_read_from_their_start(
    bench: Bench, crash_at: CrashAt
) -> None:  # HF402
    from confluent_kafka.admin import NewPartitions

    bench.change(source=replace(bench.definition.source, starting="latest"))
    bench.run()
    bench.produce_orders(6)
    grown: list[Any] = []

    def grow(point: str) -> None:
        if point == "done" and not grown:
            grown.append(True)
            bench.admin.create_partitions([NewPartitions("orders", 4)])["orders"].result(30)
            bench.produce_orders(6, partition=3)

    bench.run(grow)
    bench.run_until_crash(crash_at("opened:main"))
    bench.run()
    assert grown
    assert_exactly_once(bench, count=12, broken=0)
