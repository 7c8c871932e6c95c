"""Stateful steps in a running pipeline: any batching and any crash, the same rows and the same state."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from tests.support.tiers import is_long

from holdfast.pipeline.core.failures import DefinitionWrong, StateMissing, StateOutdated
from holdfast.pipeline.definition.model import (
    Decoding,
    Dedupe,
    EventTime,
    Expect,
    Field,
    Filter,
    Lookup,
    ParquetSink,
    Sql,
    Window,
)
from holdfast.pipeline.engine.faults import Faults
from holdfast.pipeline.engine.status import read_status
from holdfast.pipeline.state.store import StateStore, state_path

if TYPE_CHECKING:
    from .conftest import Bench, MemorySink

CLICKS = Decoding(
    "json", (Field("id", "long"), Field("user", "string"), Field("at", "timestamp", required=False))
)
MIDNIGHT_MS = 1_772_323_200_000
ONCE = Dedupe("once", key=("id",), within="1h")
STEPS = (
    Expect("named", "user <> ''"),
    ONCE,
    Window("totals", {"n": "count(*)", "ids": "sum(id)"}, size="1m", key=("user",)),
)
STREAMS = {
    "main": "",
    "totals": "totals",
    "late": "totals.late",
    "again": "once.duplicates",
    "too-late": "once.late",
}


def click(number: int, second: int | None, user: str = "ann") -> bytes:
    at = (
        None
        if second is None
        else f"2026-03-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"
    )
    return json.dumps({"id": number, "user": user, "at": at}).encode()


def delayed_click(number: int, keys: int) -> tuple[list[bytes | None], str, int]:
    """Every seventh comes late; an id comes again after some, always in its own partition."""
    second = max(0, number * 9 - (95 if number % 7 == 3 else 0))
    identity = number % keys
    return [click(identity, second, "ann" if number % 3 else "bob")], "orders", identity % 2


def with_memory(bench: Bench, steps: tuple[Any, ...], streams: dict[str, str], **source: Any) -> None:
    sink_type = type(bench.sinks["main"])
    bench.sinks = {name: sink_type(name) for name in ("dead-letter", *streams)}
    bench.change(
        source=replace(
            bench.definition.source, value=CLICKS, event_time=EventTime("at", delay="10s"), **source
        ),
        steps=steps,
        sinks=tuple(ParquetSink(path=name, name=name, rows=rows) for name, rows in streams.items()),
    )


def totals(sink: MemorySink) -> Counter[tuple[str, str, int, int]]:
    return Counter(
        (str(row["window_start"])[11:16], row["user"], row["n"], row["ids"]) for row in sink.content
    )


def outputs(bench: Bench) -> dict[str, Any]:
    """Everything the sinks hold, but for the numbers of versions."""
    return {name: totals(sink) if name == "totals" else sink.places for name, sink in bench.sinks.items()}


class TestOneBatch:
    def test_each_row_goes_where_it_belongs_and_everything_is_accounted_for(self, bench: Bench) -> None:
        with_memory(bench, STEPS, STREAMS)
        values = [
            click(1, 0), click(2, 30, "bob"), click(1, 31), click(3, 61), click(4, 5, ""), click(5, 200),
            click(6, 20), click(7, None), click(1, 199),
        ]  # fmt: skip
        bench.produce(list(values), partition=0)
        bench.produce([click(8, 150)], partition=1)
        [done] = bench.run_batches()
        assert bench.sinks["main"].ids == [1, 2, 3, 5, 6, 8]
        assert totals(bench.sinks["totals"]) == {
            ("00:00", "ann", 1, 1): 1,
            ("00:00", "bob", 1, 2): 1,
            ("00:01", "ann", 1, 3): 1,
        }
        assert bench.sinks["late"].ids == [6]
        assert bench.sinks["again"].ids == [1, 1]
        assert bench.sinks["too-late"].ids == [7]
        assert (done.routes.main, done.routes.duplicate, done.routes.late) == (6, 2, 1)
        assert done.routes.dead_letter == {"named": 1}
        assert done.step_counts["totals"]["taken"] == 5
        assert done.step_counts["totals"]["late"] == 1
        assert done.step_counts["totals"]["closed"] == 3
        assert done.state is not None
        assert done.state.watermark_ms == MIDNIGHT_MS + 140_000
        entry = bench.sinks["totals"].ledger[-1]
        assert (entry.state, entry.rows, entry.watermark_ms) == (1, 3, None)
        assert entry.taps["once"]["duplicate"] == 2
        for row in bench.sinks["totals"].content:
            assert (row["_hf"]["topic"], row["_hf"]["partition"], row["_hf"]["offset"]) == ("totals", 0, 1)
            assert row["_hf_count"] == 1
        status = read_status(bench.definition).state
        assert status is not None
        assert status.now == done.state
        assert status.waits_for == "orders-1"
        [logged] = [line for line in bench.log if line["event"] == "batch"]
        assert logged["state"]["watermark_ms"] == done.state.watermark_ms
        assert logged["step_counts"]["once"]["duplicate"] == 2

    def test_rows_that_no_step_gives_are_refused(self, bench: Bench) -> None:
        with_memory(bench, STEPS, STREAMS)
        bench.change(sinks=(ParquetSink(path="unused", name="main", rows="total"),))
        with pytest.raises(DefinitionWrong, match=r"asks for the rows 'total'.*'totals'"):
            bench.run()


POINTS = (
    "opened:totals",
    "planned",
    "staged",
    "routed",
    "state-written",
    "state-published",
    "prepared:totals",
    "committed:dead-letter",
    "committed:main",
    "committed:totals",
    "monitored",
)
POINTS_OF_STATE = ("state-written", "state-published", "prepared:totals", "committed:main")
"""Where a state and the sinks stand apart; of the others test_crashes.py has every one."""


class TestCrashes:
    def test_cut_anywhere_and_killed_anywhere_it_gives_the_rows_and_the_state_of_one_batch(
        self, bench: Bench, crash_at: Callable[..., Faults]
    ) -> None:
        """Each run takes some records and dies at another point; then one batch over everything is compared."""
        with_memory(bench, STEPS, {name: STREAMS[name] for name in ("main", "totals", "late")})
        number = 0
        for point in POINTS if is_long() else POINTS_OF_STATE:
            for _ in range(5):
                bench.produce(*delayed_click(number, 17))
                number += 1
            bench.run_until_crash(crash_at(point))
        bench.run()
        broken, state = outputs(bench), memory_of(bench)
        assert broken["late"]
        for sink in bench.sinks.values():
            numbers = [entry.state or 0 for entry in sink.ledger if entry.range]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert versions(bench) == numbers[-1:]  # those that no sink stands at are gone
        start_over(bench)
        bench.run(accept_loss=[*bench.sinks, "digest-key"])
        assert len(bench.sinks["main"].ledger) == 2
        assert outputs(bench) == broken
        assert memory_of(bench) == state


class TestExpanding:
    def test_rows_of_one_record_may_go_different_ways(self, bench: Bench) -> None:
        both = Sql("both", "SELECT _hf, id, explode(array(user, 'all')) AS user FROM input", expand=True)
        once = Dedupe("once", key=("user",), within="1h")
        totals = Window("totals", {"n": "count(*)"}, size="1m", key=("user",))
        streams = {"main": "", "again": "once.duplicates", "totals": "totals"}
        with_memory(bench, (both, once, totals), streams)
        bench.produce([click(1, 1), click(2, 2, "bob"), click(3, 3, "bob")], partition=0)
        bench.produce([click(4, 90, "eve")], partition=0)
        bench.produce([click(5, 90, "joe")], partition=1)
        [done] = bench.run_batches()
        assert Counter(row["user"] for row in bench.sinks["main"].content) == Counter(
            ["ann", "all", "bob", "eve", "joe"]
        )
        assert (done.intake.records, done.routes.main, done.routes.duplicate) == (5, 5, 5)
        assert Counter((row["user"], row["n"]) for row in bench.sinks["totals"].content) == Counter(
            {("ann", 1): 1, ("all", 1): 1, ("bob", 1): 1}
        )


class TestMissingState:
    def test_without_its_state_or_with_that_of_another_step_it_does_not_start(self, bench: Bench) -> None:
        remembering_ids(bench)
        bench.produce([click(1, 1)], partition=0)
        bench.run()
        bench.produce([click(2, 2)], partition=0)
        bench.change(steps=(Dedupe("once", key=("id",), within="2h"),))
        with pytest.raises(StateOutdated, match=r"steps\.once\.within: 1h → 2h(.|\n)*--against-running"):
            bench.run()
        lose_definition(bench)
        with pytest.raises(StateOutdated, match=r"'once' or a step before it has changed.*--against-running"):
            bench.run()
        bench.change(steps=(Dedupe("twice", key=("id",), within="1h"),))
        bench.change(sinks=bench.definition.sinks[:1])
        with pytest.raises(StateOutdated, match="'twice' is new"):
            bench.run()
        shutil.rmtree(state_path(bench.definition.home))
        with pytest.raises(StateMissing, match=r"as version 1.*holdfast pipeline rebuild") as caught:
            bench.run()
        assert caught.value.exit_code == 3
        assert bench.sinks["main"].ids == [1]

    def test_a_pipeline_that_had_no_memory_does_not_start_one_in_the_middle(self, bench: Bench) -> None:
        with_memory(bench, (), {"main": ""})
        bench.produce([click(1, 1)], partition=0)
        bench.run()
        assert bench.sinks["main"].ledger[-1].state == -1
        bench.change(steps=(ONCE,))
        bench.produce([click(2, 2)], partition=0)
        with pytest.raises(StateOutdated, match=r"steps\.once: new dedupe"):
            bench.run()
        lose_definition(bench)
        with pytest.raises(StateMissing, match="by a pipeline without state"):
            bench.run()

    def test_sinks_that_were_reset_start_with_an_empty_memory(self, bench: Bench) -> None:
        remembering_ids(bench)
        bench.produce([click(1, 1), click(1, 2)], partition=0)
        bench.run()
        for sink in bench.sinks.values():
            sink.content.clear()
            sink.forget()
        bench.run(accept_loss=bench.sinks.keys())
        assert bench.sinks["main"].ids == [1]
        assert bench.sinks["again"].ids == [1]
        assert versions(bench) == [3]  # which counts on, for those who hold rows of before


class TestPartitions:
    def test_one_that_is_added_and_a_sink_that_is_added_go_on_from_the_same_state(self, bench: Bench) -> None:
        from confluent_kafka.admin import NewPartitions

        remembering_ids(bench)
        bench.produce([click(1, 1), click(2, 300)], partition=0)
        bench.produce([click(3, 280)], partition=1)
        bench.run()
        bench.admin.create_partitions([NewPartitions("orders", 3)])["orders"].result(30)
        bench.produce([click(1, 301)], partition=0)
        bench.produce([click(5, 500)], partition=1)
        bench.sinks["second"] = type(bench.sinks["main"])("second")
        [done] = bench.run_batches()
        assert bench.sinks["main"].ids == [1, 2, 3, 5]
        assert bench.sinks["second"].ids == [5]
        assert bench.sinks["again"].ids == [1]
        assert done.state is not None
        assert done.state.watermark_ms == MIDNIGHT_MS + 270_000  # the new one holds it
        status = read_status(bench.definition).state
        assert status is not None
        assert status.waits_for == "orders-2"


class TestEmpty:
    def test_a_batch_without_a_record_makes_a_version_too(self, bench: Bench) -> None:
        with_memory(bench, STEPS, {"main": "", "totals": "totals", "late": "totals.late"})
        bench.produce([click(1, 1)], partition=0)
        bench.run()
        servers = bench.broker.bootstrap_servers
        producer = Producer({"bootstrap.servers": servers, "transactional.id": "t"})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce("orders", click(2, 2), partition=0)
        producer.flush(30)
        producer.abort_transaction(30)
        [done] = bench.run_batches()
        assert (done.intake.records, done.intake.aborted, done.intake.control) == (0, 1, 1)
        assert versions(bench) == [2]
        assert bench.sinks["main"].ids == [1]


class TestTopics:
    def test_each_topic_is_decoded_its_own_way(self, bench: Bench) -> None:
        bench.create("refunds", 1)
        with_memory(bench, (Sql("all", "SELECT * FROM input"),), {"main": ""})
        refunds = Decoding("csv", (Field("at", "timestamp"), Field("reason", "string")))
        source = bench.definition.source
        bench.change(source=replace(source, topics=("orders", "refunds"), values={"refunds": refunds}))
        bench.produce([click(1, 1)], partition=0)
        bench.produce([b"2026-03-01T00:00:02Z,broken"], topic="refunds")
        bench.run()
        found = {row["id"]: (row["user"], row["reason"]) for row in bench.sinks["main"].content}
        assert found == {1: ("ann", None), None: (None, "broken")}
        assert bench.sinks["main"].ledger[-1].state == -1


class TestLookups:
    def test_a_batch_sees_one_version_and_says_which(self, bench: Bench, tmp_path: Path) -> None:
        (tmp_path / "users.csv").write_text("name,country\nann,NZ\n")
        lookup = Lookup("users", "users.csv", on={"user": "name"}, columns=("country",), missing="quarantine")
        with_memory(bench, (lookup, Filter("there", "country <> 'XX'")), {"main": ""})
        bench.produce([click(1, 1), click(2, 2, "eve")], partition=0)
        [done] = bench.run_batches()
        assert [(row["id"], row["country"]) for row in bench.sinks["main"].content] == [(1, "NZ")]
        assert done.routes.dead_letter == {"users": 1}
        [letter] = bench.sinks["dead-letter"].content
        assert json.loads(letter["_raw"])["user"] == "eve"
        entry = bench.sinks["main"].ledger[-1]
        assert set(entry.lookups) == {"users"}


def lose_definition(bench: Bench) -> None:
    """The home does not know which definition made the newest batch; the state does."""
    os.unlink(os.path.join(bench.definition.home, "definition.json"))


def remembering_ids(bench: Bench) -> None:
    with_memory(bench, (ONCE,), {"main": "", "again": "once.duplicates"})


def versions(bench: Bench) -> list[int]:
    store = StateStore(state_path(bench.definition.home), is_writer=False)
    return [version.number for version in store.versions()]


def start_over(bench: Bench) -> None:
    for sink in bench.sinks.values():
        sink.content.clear()
        sink.ledger.clear()
    shutil.rmtree(bench.definition.home)


def memory_of(bench: Bench) -> dict[str, Any]:
    """What the newest version holds: event times, and the keys that were seen."""
    import pyarrow.parquet as pq

    store = StateStore(state_path(bench.definition.home), is_writer=False)
    version = store.newest()
    assert version is not None
    places = [place[:4] for place in version.watermark["places"]]  # without the times of batches
    keys: Counter[str] = Counter()
    for segment in version.steps["once"].segments:
        for path in store.paths(segment):
            keys.update(str(sorted(row.items())) for row in pq.read_table(path).to_pylist())
    return {"watermark_ms": version.watermark["watermark_ms"], "places": places, "keys": keys}
