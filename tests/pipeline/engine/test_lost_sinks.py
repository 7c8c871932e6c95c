"""A sink that no longer has what it had stops the run, until somebody restores it or says that it is meant."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.pipeline.core.failures import EnvironmentFails, SinkLost
from holdfast.pipeline.definition.fingerprint import canonical
from holdfast.pipeline.definition.model import ParquetSink
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.known_sinks import KnownSinks
from holdfast.pipeline.engine.progress import Event, Warned
from holdfast.pipeline.engine.resetting import perform_reset, plan_reset
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.operations.refilling import perform_refill, plan_refill

from .conftest import MemorySink

if TYPE_CHECKING:
    from .conftest import Bench


@pytest.fixture
def bench(either_bench: Bench) -> Bench:
    return either_bench


def one_batch(bench: Bench) -> None:
    bench.produce_orders(4)
    bench.run()
    assert bench.sinks["main"].ids == list(range(4))


def refused(bench: Bench, match: str) -> str:
    before = {name: (list(sink.ledger), list(sink.content)) for name, sink in bench.sinks.items()}
    bench.produce_orders(2)
    with pytest.raises(SinkLost, match=match) as caught:
        bench.run()
    assert {name: (sink.ledger, sink.content) for name, sink in bench.sinks.items()} == before
    assert caught.value.exit_code == 3
    return str(caught.value)


class TestVanished:
    def test_the_home_knows_it(self, bench: Bench) -> None:
        one_batch(bench)
        for name in ("dead-letter", "second"):  # these say nothing of it, as an earlier holdfast's
            bench.sinks[name].ledger[:] = [replace(each, others={}) for each in bench.sinks[name].ledger]
        os.unlink(os.path.join(bench.definition.home, "log.jsonl"))
        edit_note(bench, lambda document: [document["sinks"].pop(name) for name in ("dead-letter", "second")])
        bench.sinks["main"] = MemorySink("main")
        text = refused(
            bench, r"sink 'main': nothing of this pipeline is there, and it had 2 entries .*sinks\.json"
        )
        for way in ("Restore", "holdfast pipeline refill FILE main", "--accept-loss=main"):
            assert way in text

    @pytest.mark.parametrize("witness", ["dead-letter", "second"])
    def test_without_the_home_the_ledger_of_any_other_sink_knows_it(self, bench: Bench, witness: str) -> None:
        one_batch(bench)
        bench.lose_home()
        bench.admin.delete_consumer_groups(["hf-orders"])["hf-orders"].result(30)
        other = next(name for name in ("dead-letter", "second") if name != witness)
        bench.sinks[other].ledger[:] = [replace(each, others={}) for each in bench.sinks[other].ledger]
        bench.sinks["main"] = MemorySink("main")
        refused(bench, f"sink 'main': nothing of this pipeline is there.*ledger of sink '{witness}'")

    def test_all_of_them(self, bench: Bench) -> None:
        one_batch(bench)
        bench.sinks = {name: MemorySink(name) for name in bench.sinks}
        text = refused(bench, "sink 'dead-letter': .*; sink 'main': ")
        assert "begin where the definition says" in text

    def test_a_home_of_an_earlier_holdfast_knows_it_by_its_log(self, bench: Bench) -> None:
        bench.sinks.pop("second")  # it is in no definition
        one_batch(bench)
        as_of_an_earlier_holdfast(bench)
        bench.sinks["main"] = MemorySink("main")
        refused(bench, "sink 'main': nothing of this pipeline is there")

    def test_a_sink_that_was_opened_and_has_no_rows_yet_is_known_too(self, bench: Bench) -> None:
        bench.run()
        bench.sinks["second"] = MemorySink("second")
        refused(bench, "sink 'second'")

    def test_a_directory_of_parquet_files(self, spark_bench: Bench, tmp_path: Path) -> None:
        from holdfast.pipeline.engine.running import run_pipeline

        spark_bench.change(sinks=(ParquetSink(path="rows", name="rows"),))
        run: Any = partial(run_pipeline, spark_bench.definition, spark=spark_bench.spark, signals=False)
        spark_bench.produce_orders(4)
        run()
        shutil.move(tmp_path / "rows", tmp_path / "elsewhere")
        spark_bench.produce_orders(1)
        with pytest.raises(SinkLost, match="sink 'rows'"):
            run()
        assert not (tmp_path / "rows").exists()  # nothing is in the way of what comes back
        shutil.move(tmp_path / "elsewhere", tmp_path / "rows")
        run()
        assert spark_bench.spark.read.parquet(str(tmp_path / "rows")).count() == 5


class TestGoneBack:
    def test_an_older_copy(self, bench: Bench) -> None:
        one_batch(bench)
        main = bench.sinks["main"]
        main.ledger.pop()
        main.content = []
        refused(bench, "sink 'main': its ledger has 1 entries, and it had 2 .*: it is an older copy")

    def test_another_ones_ledger(self, bench: Bench) -> None:
        one_batch(bench)
        main = bench.sinks["main"]
        main.ledger[-1] = replace(main.ledger[-1], batch_time_ms=1)
        refused(bench, r"sink 'main': entry 1 of its ledger is not the one that .*sinks\.json knows")

    def test_what_its_ledger_speaks_of_is_gone(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        one_batch(bench)
        monkeypatch.setattr(MemorySink, "missing", lambda self: "gone" if self.name == "main" else None)
        refused(bench, "sink 'main': gone")

    def test_one_that_is_ahead_of_the_home_goes_on(self, bench: Bench) -> None:
        bench.run()
        shutil.copy(note_of(bench), note_of(bench) + ".old")
        bench.produce_orders(4)
        bench.run()
        shutil.move(note_of(bench) + ".old", note_of(bench))
        bench.produce_orders(4)
        bench.run()
        assert bench.sinks["main"].ids == list(range(8))


def test_a_sink_whose_rows_are_gone_is_refilled_from_its_beginning(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_batch(bench)
    bench.sinks["main"].content.clear()
    monkeypatch.setattr(
        MemorySink, "missing", lambda self: "gone" if self.ledger and not self.content else None
    )
    bench.sinks["dead-letter"].content.append({})
    plan = plan_refill(bench.definition, "main", build=lambda _: dict(bench.sinks))
    assert plan.has_to_forget
    perform_refill(plan, spark=bench.spark, signals=False, build=lambda _: dict(bench.sinks))
    assert bench.sinks["main"].ids == list(range(4))
    assert bench.sinks["main"].ledger[-1].generation == 1
    bench.run()


class TestWhatIsMeant:
    def test_an_accepted_loss_begins_where_the_others_stand(self, bench: Bench) -> None:
        one_batch(bench)
        bench.sinks["main"] = MemorySink("main")
        bench.produce_orders(2)
        told: list[Event] = []
        bench.run(progress=told.append, accept_loss=["main"])
        assert bench.sinks["main"].ids == [4, 5]
        assert any(isinstance(event, Warned) and "begins anew" in event.message for event in told)
        for way in (bench.run, bench.lose_home, bench.run):  # it is said once, and known from then on
            way()
        bench.sinks["main"] = MemorySink("main")
        refused(bench, "sink 'main'")

    def test_an_older_copy_that_is_accepted_begins_there_too(self, bench: Bench) -> None:
        one_batch(bench)
        bench.sinks["main"].ledger.pop()
        bench.produce_orders(2)
        bench.run(accept_loss=["main"])
        assert bench.sinks["main"].ids == list(range(6))

    def test_a_sink_that_is_not_lost_is_left_alone(self, bench: Bench) -> None:
        one_batch(bench)
        bench.produce_orders(1)
        bench.run(accept_loss=["main"])
        assert bench.sinks["main"].ids == list(range(5))
        assert bench.sinks["main"].ledger[-1].generation == 0

    def test_a_reset(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("holdfast.pipeline.engine.deployment.build_sinks", lambda _: dict(bench.sinks))
        one_batch(bench)
        bench.sinks["second"] = MemorySink("second")
        perform_reset(plan_reset(bench.definition, sinks=["main", "second"]))
        bench.produce_orders(2)
        bench.run()
        assert bench.sinks["main"].ids == [*range(4), 4, 5]
        assert bench.sinks["second"].ids == [4, 5]
        bench.lose_home()  # the others' ledgers still speak of the generation before
        bench.run()

    def test_a_sink_that_is_added_is_new(self, bench: Bench) -> None:
        one_batch(bench)
        bench.sinks["third"] = MemorySink("third")
        bench.produce_orders(1)
        bench.run()
        assert bench.sinks["third"].ids == [4]

    def test_a_sink_that_the_definition_moves_is_new_at_its_new_place(self, bench: Bench) -> None:
        one_batch(bench)
        bench.change(sinks=(ParquetSink(path="elsewhere", name="main"),))
        bench.sinks["main"] = MemorySink("main")
        bench.produce_orders(1)
        bench.run()
        assert bench.sinks["main"].ids == [4]


def test_a_note_that_cannot_be_read_stops_the_run(bench: Bench) -> None:
    one_batch(bench)
    Path(note_of(bench)).write_text('{"version":', encoding="ascii")
    with pytest.raises(
        EnvironmentFails, match=r"sinks\.json says how far each sink had come, and cannot be read"
    ):
        bench.run()


def test_entries_say_how_far_the_others_had_come(bench: Bench) -> None:
    one_batch(bench)
    entry = bench.sinks["main"].ledger[-1]
    assert Entry.from_json(json.loads(json.dumps(entry.as_json()))) == entry
    assert {name: each[:2] for name, each in entry.others.items()} == {
        "dead-letter": (0, 1),
        "second": (0, 0),
    }
    with Home(bench.definition.home, "orders") as home:
        known = KnownSinks(home, canonical(bench.definition))
        ledgers = {name: sink.last_entry() for name, sink in bench.sinks.items()}
        assert known.lost(bench.sinks, ledgers) == {}


def note_of(bench: Bench) -> str:
    return os.path.join(bench.definition.home, "sinks.json")


def edit_note(bench: Bench, change: Any) -> None:
    path = Path(note_of(bench))
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def as_of_an_earlier_holdfast(bench: Bench) -> None:
    os.unlink(note_of(bench))
    for sink in bench.sinks.values():
        sink.ledger[:] = [replace(each, others={}) for each in sink.ledger]
