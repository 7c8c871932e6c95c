"""A replay goes through every offset once, in the batches of then where they are recorded."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline.engine.history import (
    Cut,
    Recorded,
    beginnings,
    cuts,
    of_entries,
    recorded_batches,
    recorded_offsets,
)
from holdfast.pipeline.engine.planning import Limits
from holdfast.pipeline.ledger import Entry, Intake
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span

ID = uuid.UUID(int=7)
P0, P1 = Place("orders", ID, 0), Place("orders", ID, 1)
SMALL = Limits(10, 10**9, 1)


def batch(time_ms: int, *sinks: str, **spans: tuple[int, int]) -> Recorded:
    places = {"p0": P0, "p1": P1}
    return Recorded(
        BatchRange({places[name]: Span(*span) for name, span in spans.items()}), time_ms, sinks or ("lake",)
    )


def replay(begin: tuple[int, int], end: tuple[int, int], *recorded: Recorded) -> list[Cut]:
    return list(cuts({P0: begin[0], P1: begin[1]}, {P0: end[0], P1: end[1]}, recorded, SMALL))


def shown(found: list[Cut]) -> list[tuple[str, int | None]]:
    return [(str(cut.range), cut.batch_time_ms) for cut in found]


def test_batches_that_follow_each_other_are_taken_as_they_were() -> None:
    found = replay((0, 0), (30, 5), batch(1, p0=(0, 20), p1=(0, 5)), batch(2, p0=(20, 30)))
    assert shown(found) == [("orders-0 [0, 20), orders-1 [0, 5)", 1), ("orders-0 [20, 30)", 2)]
    assert recorded_offsets(found) == 35


def test_what_is_not_recorded_is_cut_by_the_limits_with_the_time_of_the_next() -> None:
    found = replay((0, 0), (30, 0), batch(9, p0=(15, 20)))
    assert shown(found) == [
        ("orders-0 [0, 10)", 9),
        ("orders-0 [10, 15)", 9),
        ("orders-0 [15, 20)", 9),
        ("orders-0 [20, 30)", None),
    ]
    assert recorded_offsets(found) == 5


def test_a_sink_that_caught_up_does_not_repeat_the_batch() -> None:
    found = replay((0, 0), (20, 0), batch(1, p0=(0, 10)), batch(1, p0=(0, 10)), batch(2, p0=(10, 20)))
    assert shown(found) == [("orders-0 [0, 10)", 1), ("orders-0 [10, 20)", 2)]


def test_a_batch_past_where_the_sinks_stand_is_not_taken() -> None:
    assert shown(replay((0, 0), (5, 0), batch(1, p0=(0, 10)))) == [("orders-0 [0, 5)", None)]


def test_nothing_to_replay_is_no_batch() -> None:
    assert replay((7, 3), (7, 3)) == []


def test_partitions_are_known_from_their_opening_on() -> None:
    found = replay(
        (0, 0), (20, 5), batch(0, p0=(0, 0)), batch(1, p0=(0, 20)), batch(2, p1=(0, 0)), batch(3, p1=(0, 5))
    )
    assert [cut.opened for cut in found] == [{P0}, {P0, P1}]


def test_without_recorded_openings_all_partitions_are_known_from_the_first() -> None:
    found = replay((0, 0), (20, 5), batch(1, p0=(0, 20)), batch(3, p1=(0, 5)))
    assert [cut.opened for cut in found] == [{P0, P1}, {P0, P1}]


spans = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair)))


@given(
    begin=st.tuples(st.integers(0, 10), st.integers(0, 10)),
    extra=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    recorded=st.lists(st.tuples(st.integers(0, 9), spans, spans), max_size=12),
)
def test_whatever_is_recorded_every_offset_comes_once_and_in_order(
    begin: tuple[int, int],
    extra: tuple[int, int],
    recorded: list[tuple[int, tuple[int, int], tuple[int, int]]],
) -> None:
    end = (begin[0] + extra[0], begin[1] + extra[1])
    found = replay(begin, end, *(batch(time_ms, p0=p0, p1=p1) for time_ms, p0, p1 in recorded))
    at = {P0: begin[0], P1: begin[1]}
    for cut in found:
        assert cut.range
        for place, span in cut.range.spans.items():
            assert span.start == at[place]
            assert place in cut.opened
            at[place] = span.end
    assert at == {P0: end[0], P1: end[1]}


# ---------------------------------------------------------------------------- what is recorded


def line(event: str, **more: object) -> str:
    return json.dumps({"event": event, **more}) + "\n"


def test_the_log_tells_batches_and_a_reset_forgets_them(tmp_path: Path) -> None:
    ranges = [BatchRange({P0: Span(start, start + 10)}).as_json() for start in (0, 10, 20)]
    intake = Intake(records=10).as_json()
    (tmp_path / "log.jsonl.1").write_text(
        line("batch", range=ranges[0], batch_time_ms=1, sinks={"lake": 3, "old": 3}, intake=intake)
    )
    (tmp_path / "log.jsonl").write_text(
        line("warning", message="x")
        + line("batch", range=ranges[1], batch_time_ms=2, sinks={"lake": 3}, intake=intake)
        + line("reset", sinks=["lake"])
        + line("batch", range=ranges[2], batch_time_ms=3, sinks={"lake": 0}, intake=intake)
        + '{"event": "bat'
    )
    found = recorded_batches(str(tmp_path))
    assert [(each.batch_time_ms, each.sinks) for each in found] == [(1, ("old",)), (3, ("lake",))]
    assert beginnings(found) == {P0: 0}
    assert beginnings(each for each in found if "lake" in each.sinks) == {P0: 20}
    assert found[0].intake == Intake(records=10)


def test_no_home_is_no_record(tmp_path: Path) -> None:
    assert recorded_batches(str(tmp_path / "nowhere")) == []


def test_an_opening_tells_where_a_partition_began() -> None:
    opening = BatchRange({P0: Span(5, 5), P1: Span(0, 0)})
    entry = Entry("p", "lake", 0, opening, Positions({P0: Position(5)}), 1, "f")
    (found,) = of_entries([entry])
    assert beginnings([found]) == {P0: 5, P1: 0}
    assert found.intake is None
