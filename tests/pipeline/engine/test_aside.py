"""Rows that leave the steps are written down, by place, before any sink has the batch."""

from __future__ import annotations

import gc
import os
import pickle
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from holdfast.pipeline import aside
from holdfast.pipeline.core.failures import Unbalanced
from holdfast.pipeline.definition.model import (
    Dedupe,
    EventTime,
    Expect,
    Filter,
    Sql,
    Window,
)
from holdfast.pipeline.digest import MASK, place_hash
from holdfast.pipeline.engine import aside as writing
from holdfast.pipeline.engine.aside import FANOUT, AsideFiles, forget_aside
from holdfast.pipeline.engine.faults import Faults
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span

if TYPE_CHECKING:
    from .conftest import Bench

CrashAt = Callable[..., Faults]
PLACE = Place("orders", uuid.UUID(int=7), 0)


def recorded(bench: Bench) -> Counter[tuple[str, str, int]]:
    """Rows by route, step and the record's number: partition and offset are looked up in what was produced."""
    return Counter(
        (row["route"], row["step"], row["partition"] << 32 | row["offset"])
        for _, table in aside.read_all(bench.definition.home)
        for row in table.to_pylist()
    )


def by_route(bench: Bench) -> Counter[tuple[str, str]]:
    return Counter((route, step) for route, step, _ in recorded(bench).elements())


def files(bench: Bench) -> dict[str, bytes]:
    directory = Path(aside.aside_path(bench.definition.home))
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


STEPS = (
    Expect("positive", "amount >= 0", "quarantine"),
    Filter("no-trials", "id % 3 <> 0"),
    Sql("not-five", "SELECT * FROM input WHERE id % 5 <> 0"),
    Expect("small", "id < 35", "drop"),
)


def test_every_row_that_left_is_recorded_once_with_its_step_and_matches_the_ledger(bench: Bench) -> None:
    bench.change(steps=STEPS)
    bench.produce_orders(40)
    bench.run()
    expected = {
        ("filtered", "no-trials"): 14,
        ("filtered", "not-five"): sum(1 for n in range(40) if n % 3 and n % 5 == 0),
        ("filtered", "small"): sum(1 for n in range(35, 40) if n % 3 and n % 5),
    }
    assert by_route(bench) == expected
    entry = bench.sinks["main"].ledger[-1]
    assert {step: count for (_, step), count in expected.items()} == entry.routes.filtered
    ((batch, table),) = aside.read_all(bench.definition.home)
    assert batch.name == aside.batch_name(entry.range, entry.fingerprint)
    digest = (
        sum(place_hash(row["topic"], row["partition"], row["offset"]) for row in table.to_pylist()) & MASK
    )
    assert entry.digests["filtered"] == f"{digest:016x}"
    assert set(entry.digests) == {"main", "filtered"}
    assert Entry.from_json(entry.as_json()) == entry


def test_rows_noted_while_routes_are_counted_are_those_a_job_finds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    honest = writing._collected

    def counted(*given: Any) -> Any:
        asked.append(1)
        return honest(*given)

    monkeypatch.setattr(writing, "_collected", counted)
    bench.change(steps=(Expect("positive", "amount >= 0"), *STEPS[1:2], *STEPS[3:]))
    bench.produce_orders(40)
    bench.run()
    noted = files(bench)
    assert by_route(bench) == {("filtered", "no-trials"): 14, ("filtered", "small"): 3}
    assert not asked
    bench.lose_home()
    for sink in bench.sinks.values():
        sink.forget()
    monkeypatch.setattr("holdfast.pipeline.engine.routing.ROWS_NOTED_MAX", -1)
    monkeypatch.setattr(writing, "COLLECTED_ROWS_MAX", 3)  # through files of the stage
    bench.run(accept_loss=[*bench.sinks, "digest-key"])
    assert asked
    assert files(bench) == noted


def test_notes_that_are_not_complete_are_not_taken() -> None:
    from holdfast.pipeline.digest import Tally
    from holdfast.pipeline.engine.aside import Gathering, SideOutput, _noted

    def no_frame() -> Any:
        raise AssertionError

    codes = {3: SideOutput("filtered", "f", Tally(2, 0))}
    complete = _noted(Gathering(no_frame, codes, 2, "1,1,0,5,1,1,0,6"), ["orders"], ["orders"])
    assert complete is not None
    assert complete.offset.tolist() == [5, 6]
    for wrong in (None, "", "1,1,0,5", "1,0,0,5,1,1,0,6", "7,1,0,5,1,1,0,6"):
        assert _noted(Gathering(no_frame, codes, 2, wrong), ["orders"], ["orders"]) is None


def test_a_batch_whose_rows_all_stayed_writes_nothing(bench: Bench) -> None:
    bench.change(steps=(Filter("all", "id >= 0"),))
    bench.produce_orders(10)
    bench.run()
    assert not os.path.exists(aside.aside_path(bench.definition.home))


@pytest.mark.long
def test_a_batch_that_is_repeated_gives_the_same_file(bench: Bench, crash_at: CrashAt) -> None:
    bench.change(steps=STEPS)
    bench.produce_orders(40)
    for point in ("aside-written", "committed:main"):
        bench.run_until_crash(crash_at(point))
        if point == "aside-written":
            assert not bench.sinks["main"].content
            first = files(bench)
    bench.run()
    assert files(bench) == first
    assert sum(recorded(bench).values()) == sum(bench.sinks["main"].ledger[-1].routes.filtered.values())


def test_what_an_attempt_left_that_nobody_has_goes_when_its_offsets_are_taken_again(
    bench: Bench, crash_at: CrashAt
) -> None:
    bench.change(steps=STEPS)
    bench.produce_orders(20)
    bench.run_until_crash(crash_at("aside-written"))
    (old,) = files(bench)
    bench.change(steps=(Filter("others", "id % 2 = 0"),))
    bench.run()
    assert by_route(bench) == {("filtered", "others"): 10}
    assert old not in files(bench)


def test_rows_that_change_when_asked_again_stop_the_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = writing._collected
    monkeypatch.setattr(writing, "_collected", lambda *given: honest(*given).slice(1))
    bench.change(steps=STEPS)
    bench.produce_orders(20)
    with pytest.raises(Unbalanced, match="written down"):
        bench.run()
    assert not bench.sinks["main"].content


@pytest.mark.long
def test_duplicates_and_late_rows_are_recorded_and_those_late_for_a_tap_apart(bench: Bench) -> None:
    source = replace(
        bench.definition.source,
        value=replace(
            bench.definition.source.value,
            fields=(*bench.definition.source.value.fields, _timestamp_field()),
        ),
        event_time=EventTime("at", "5s", ahead="100000d"),
    )
    bench.change(
        source=source,
        steps=(
            Dedupe("once", ("id",), within="1h"),
            Window("totals", {"total": "sum(amount)"}, size="10s"),
        ),
    )
    times = [0, 30, 60, 61, 90, 40, 20, 120]
    bench.produce([_order(number % 6, at) for number, at in enumerate(times)], partition=0)
    bench.run()
    found = by_route(bench)
    entry = bench.sinks["main"].ledger[-1]
    assert found["duplicate", "once"] == entry.routes.duplicate == 2
    assert found["late-for", "totals"] == entry.taps["totals"]["late"] == 1
    assert set(entry.digests) == {"main", "duplicate", "late-for:totals"}
    assert entry.routes.main == 6  # what is late for a tap goes on


def _timestamp_field() -> Any:
    from holdfast.pipeline.definition.model import Field

    return Field("at", "timestamp")


def _order(number: int, second: int) -> bytes:
    return (
        f'{{"id": {number}, "amount": 1, "at": "2026-01-01T00:{second // 60:02d}:{second % 60:02d}Z"}}'
    ).encode()


# ---------------------------------------------------------------------------- files, without Spark


def rows(first: int, count: int) -> pa.Table:
    def text(value: str) -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))

    zeros = pa.array([0] * count, pa.int32())
    offsets = pa.array(range(first, first + count), pa.int64())
    columns = [text("orders"), zeros, offsets, zeros, text("filtered"), text(f"step-{first % 3}")]
    return pa.Table.from_arrays(columns, schema=aside.schema())


def batch(number: int) -> BatchRange:
    return BatchRange({PLACE: Span(number * 10, number * 10 + 10)})


def standing(offset: int) -> Entry:
    return Entry("orders", "main", 1, batch(0), Positions({PLACE: Position(offset)}), 0, "f")


def test_many_files_become_one_and_every_batch_keeps_its_rows(tmp_path: Path) -> None:
    written = AsideFiles(str(tmp_path))
    for number in range(2 * FANOUT + 3):
        written.write(batch(number), "f", rows(number * 10, 1 + number % 4), [standing(number * 10)])
        written.merge([standing(number * 10 + 10)])
    assert len(os.listdir(written.path)) == 5
    found = aside.read_all(str(tmp_path))
    assert {each.name for each, _ in found} == {
        aside.batch_name(batch(number), "f") for number in range(2 * FANOUT + 3)
    }
    for each, table in found:
        first = each.range.spans[PLACE].start
        assert table.column("offset").to_pylist() == list(range(first, first + 1 + first // 10 % 4))
        assert set(table.column("step").to_pylist()) == {f"step-{first % 3}"}


def held_batches() -> int:
    """How many batches of the record this process holds in memory."""
    gc.collect()
    return sum(type(each) is aside.AsideBatch for each in gc.get_objects())


@pytest.mark.parametrize("rows_max", [2, 10_000])
@pytest.mark.check
def test_what_a_batch_costs_does_not_grow_with_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_max: int
) -> None:
    """Files too large to be merged stay one by one, and are not held either."""
    monkeypatch.setattr(writing, "FANOUT", 4)
    monkeypatch.setattr(writing, "MERGED_ROWS_MAX", rows_max)
    looked_at: list[int] = []
    honest = writing._overlap

    def counted(*given: Any) -> bool:
        looked_at[-1] += 1
        return honest(*given)

    monkeypatch.setattr(writing, "_overlap", counted)
    before, written = held_batches(), AsideFiles(str(tmp_path))
    sizes = []
    for number in range(100):
        if number == 50:
            written = AsideFiles(str(tmp_path))
        looked_at.append(0)
        written.write(batch(number), "f", rows(number * 10, 1 + number % 4), [standing(number * 10)])
        written.merge([standing(number * 10 + 10)])
        state = vars(written)
        sizes.append(len(pickle.dumps({name: state[name] for name in state if name != "_disk"})))
    assert held_batches() <= before
    assert max(looked_at[:50] + looked_at[51:]) <= 1
    assert max(sizes) < 16 * max(sizes[:4])
    found = {each.name: table.column("offset").to_pylist() for each, table in aside.read_all(str(tmp_path))}
    assert found == {
        aside.batch_name(batch(number), "f"): list(range(number * 10, number * 10 + 1 + number % 4))
        for number in range(100)
    }


def test_batches_that_settle_late_are_merged_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "FANOUT", 4)
    for number in range(7):
        AsideFiles(str(tmp_path)).write(batch(number), "f", rows(number * 10, 1), [standing(number * 10)])
    written = AsideFiles(str(tmp_path))
    written.write(batch(7), "f", rows(70, 1), [standing(20), standing(70)])
    written.merge([standing(20), standing(80)])
    assert len(os.listdir(written.path)) == 8
    written.write(batch(2), "f", rows(20, 1), [standing(20), standing(80)])  # a sink behind takes it again
    written.merge([standing(80), standing(80)])
    (merged,) = (name for name in os.listdir(written.path) if name.startswith("merged-1-"))
    assert aside.read_file(os.path.join(written.path, merged)).column("offset").to_pylist() == [0, 10, 20, 30]
    assert len(aside.recorded(str(tmp_path))) == 8


def test_batches_that_a_sink_has_not_are_not_merged(tmp_path: Path) -> None:
    written = AsideFiles(str(tmp_path))
    for number in range(FANOUT + 1):
        written.write(batch(number), "f", rows(number * 10, 2), [standing(number * 10)])
    written.merge([standing(10_000), standing(20)])
    assert len(os.listdir(written.path)) == FANOUT + 1


def test_a_merge_that_was_cut_short_leaves_every_batch_once(tmp_path: Path) -> None:
    written = AsideFiles(str(tmp_path))
    for number in range(FANOUT):
        written.write(batch(number), "f", rows(number * 10, 2), [standing(number * 10)])
    kept = {name: (Path(written.path) / name).read_bytes() for name in os.listdir(written.path)}
    written.merge([standing(10_000)])
    for name, content in kept.items():
        (Path(written.path) / name).write_bytes(content)
    (Path(written.path) / "half.parquet.tmp").write_bytes(b"half")
    assert len(aside.recorded(str(tmp_path))) == FANOUT
    again = AsideFiles(str(tmp_path))
    again.write(batch(FANOUT), "f", rows(FANOUT * 10, 2), [standing(FANOUT * 10)])
    assert len(os.listdir(again.path)) == 2
    assert len(aside.recorded(str(tmp_path))) == FANOUT + 1


def test_another_definition_over_the_same_offsets_has_a_record_of_its_own(tmp_path: Path) -> None:
    written = AsideFiles(str(tmp_path))
    written.write(batch(0), "old", rows(0, 2), [standing(0)])
    written.write(batch(0), "new", rows(0, 3), [standing(10)])  # one sink has the old one
    assert {each.fingerprint: each.rows for each in aside.recorded(str(tmp_path)).values()} == {
        "old": 2,
        "new": 3,
    }


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    written = AsideFiles(str(tmp_path))
    written.write(batch(0), "f", rows(0, 100), [])
    (name,) = os.listdir(written.path)
    path = Path(written.path) / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(aside.AsideDamaged, match=name):
        aside.recorded(str(tmp_path))
    AsideFiles(str(tmp_path)).write(batch(1), "f", rows(10, 3), [])  # and the pipeline goes on
    assert name in os.listdir(written.path)
    assert len(os.listdir(written.path)) == 2


def test_a_reset_of_all_sinks_forgets_the_record(tmp_path: Path) -> None:
    AsideFiles(str(tmp_path)).write(batch(0), "f", rows(0, 2), [])
    forget_aside(str(tmp_path))
    assert aside.recorded(str(tmp_path)) == {}
    forget_aside(str(tmp_path))
