"""A record whose row a sink does not take for what is in it becomes a dead letter, and all sinks stay alike."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from holdfast.pipeline.definition.model import Sql
from holdfast.pipeline.ledger import Entry, Rejected
from holdfast.pipeline.sinks.base import REJECTED_MAX, Batch, RowsRejected, SinkError

from .conftest import MemoryPrepared, MemorySink, order

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from .conftest import Bench


class Picky(MemorySink):
    """Takes no row whose id it does not like."""

    dislikes: Callable[[int], bool] = staticmethod(lambda number: number % 4 == 1)
    topic: str | None = None

    def prepare(self, batch: Batch, rows: DataFrame) -> MemoryPrepared:
        prepared = super().prepare(batch, rows)
        wrong = [row["_hf"] for row in prepared.content if self.dislikes(row["id"])]
        if wrong:
            raise RowsRejected(
                [
                    Rejected(
                        self.topic or at["topic"], at["partition"], at["offset"], self.name, "not that one"
                    )
                    for at in wrong
                ]
            )
        return prepared


def places(sink: MemorySink) -> set[tuple[str, int, int]]:
    return {place[:3] for place in sink.places}


def test_it_is_in_no_sink_but_the_dead_letter_and_named_there(bench: Bench) -> None:
    bench.sinks["second"] = Picky("second")
    bench.produce_orders(8)
    (done,) = bench.run_batches()
    kept = [0, 2, 3, 4, 6, 7]
    assert bench.sinks["main"].ids == bench.sinks["second"].ids == kept
    dead = bench.sinks["dead-letter"].content
    assert {row["_reason"] for row in dead} == {"sink:second"}
    assert {row["_error"] for row in dead} == {"sink:second: not that one"}
    assert all(row["_raw"] for row in dead)
    assert places(bench.sinks["dead-letter"]).isdisjoint(places(bench.sinks["main"]))
    assert done.routes.dead_letter == {"sink:second": 2}
    entry = bench.sinks["main"].ledger[-1]
    assert {each[:3] for each in entry.rejected} == places(bench.sinks["dead-letter"])
    assert Entry.from_json(entry.as_json()) == entry


def test_a_text_that_is_not_utf_8_is_a_dead_letter(bench: Bench) -> None:
    """A CAST of bytes gives it: files would keep it for readers to stumble over, and JSON would have another text."""
    bench.change(steps=(Sql("keys", "SELECT _hf, id, CAST(_key AS STRING) AS name FROM input"),))
    producer = Producer({"bootstrap.servers": bench.broker.bootstrap_servers})
    for number, key in enumerate((b"fine", b"\xff", "\u00fc".encode(), b"\xc3", None)):
        producer.produce("orders", order(number), key, partition=0)
    assert producer.flush(30) == 0
    bench.run()
    assert [row["name"] for row in bench.sinks["main"].content] == ["fine", "\u00fc", None]
    dead = bench.sinks["dead-letter"].content
    assert {(row["_hf"]["offset"], row["_error"]) for row in dead} == {
        (1, "sink:main: column 'name' is not UTF-8"),
        (3, "sink:main: column 'name' is not UTF-8"),
    }


def test_a_sink_behind_leaves_it_out_too(bench: Bench, crash_at: Any) -> None:
    from .conftest import Crash

    bench.sinks["second"] = Picky("second")
    bench.produce_orders(8)
    with pytest.raises(Crash):
        bench.run(crash_at("committed:main"))
    bench.run()
    assert bench.sinks["main"].ids == bench.sinks["second"].ids == [0, 2, 3, 4, 6, 7]
    assert len(bench.sinks["dead-letter"].content) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"topic": "totals"}, "does not take 2 rows for what is in them, the first made of totals-"),
        ({"dislikes": lambda number: True}, f"More than {REJECTED_MAX} records"),
    ],
)
def test_what_is_not_about_single_records_stops_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr("holdfast.pipeline.engine.batches.REJECTED_MAX", 3)
    picky = bench.sinks["second"] = Picky("second")
    for name, value in change.items():
        setattr(picky, name, value)
    bench.produce_orders(8)
    with pytest.raises(SinkError, match=said.replace(str(REJECTED_MAX), "3")):
        bench.run()
    assert bench.sinks["main"].content == []


def test_a_batch_that_the_dead_letter_sink_has_stops_a_sink_behind(bench: Bench) -> None:
    bench.produce_orders(8)
    bench.run()
    behind = Picky("second", ledger=bench.sinks["second"].ledger[:1])
    behind.ledger[0] = replace(behind.ledger[0], generation=1)
    bench.sinks["second"] = behind
    with pytest.raises(SinkError, match="The dead letter sink has this batch already"):
        bench.run()
