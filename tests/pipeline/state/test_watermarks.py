"""Event time: the watermark never goes back, and where batches are cut does not decide what is late."""

from __future__ import annotations

import uuid

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline.definition.model import EventTime
from holdfast.pipeline.positions import Place
from holdfast.pipeline.state.watermarks import (
    NOTHING,
    Clock,
    Seen,
    Watermarks,
    counted,
    is_late,
    own_watermark_ms,
    running,
)

TOPIC = uuid.UUID(int=7)
A, B = Place("orders", TOPIC, 0), Place("orders", TOPIC, 1)
CLOCK = Clock(delay_ms=10)


def test_the_slowest_partition_holds_the_watermark() -> None:
    after = Watermarks().after(CLOCK, 1_000, [A, B], {A: 500, B: 300})
    assert after.watermark_ms == 290
    assert after.waits_for(CLOCK, 1_000) == B


def test_a_partition_without_any_event_holds_it_back_whole() -> None:
    after = Watermarks().after(CLOCK, 1_000, [A, B], {A: 500})
    assert after.watermark_ms is None
    assert after.waits_for(CLOCK, 1_000) == B


def test_it_never_goes_back_when_a_partition_is_added() -> None:
    first = Watermarks().after(CLOCK, 1_000, [A], {A: 500})
    second = first.after(CLOCK, 2_000, [A, B], {B: 100})
    assert (first.watermark_ms, second.watermark_ms) == (490, 490)


def test_an_idle_partition_is_left_out_until_it_has_a_record_again() -> None:
    clock = Clock(delay_ms=10, idle_ms=60_000)
    first = Watermarks().after(clock, 0, [A, B], {A: 500, B: 300})
    busy = first.after(clock, 59_999, [A, B], {A: 700})
    idle = busy.after(clock, 60_000, [A, B], {A: 800})
    back = idle.after(clock, 61_000, [A, B], {A: 900, B: 310})
    assert [each.watermark_ms for each in (first, busy, idle, back)] == [290, 290, 790, 790]


def test_where_idle_ones_are_left_out_so_are_those_that_never_had_a_record() -> None:
    clock = Clock(delay_ms=10, idle_ms=60_000)
    first = Watermarks().after(clock, 0, [A, B], {A: 500})
    assert first.watermark_ms == 490
    assert first.after(clock, 1, [A, B], {B: 100}).watermark_ms == 490


def test_a_partition_with_records_in_the_batch_is_never_idle() -> None:
    clock = Clock(idle_ms=0)
    assert Watermarks().after(clock, 7, [A, B], {A: 500, B: 300}).watermark_ms == 300


def test_all_idle_leaves_it_where_it_is() -> None:
    clock = Clock(delay_ms=0, idle_ms=5)
    first = Watermarks().after(clock, 0, [A], {A: 500})
    assert first.after(clock, 1_000, [A], {}).watermark_ms == 500
    assert first.after(clock, 1_000, [A], {}).waits_for(clock, 1_000) is None


def test_records_without_an_event_time_keep_a_partition_awake_and_move_nothing() -> None:
    after = Watermarks().after(CLOCK, 5, [A], {A: None})
    assert after.places[A] == Seen(None, 5)
    assert after.watermark_ms is None


def test_json_keeps_everything() -> None:
    after = Watermarks().after(CLOCK, 1_000, [A, B], {A: 500})
    assert Watermarks.from_json(after.as_json()) == after
    assert Watermarks.from_json({}) == Watermarks()


def test_durations_are_read_as_written() -> None:
    assert Clock.of(EventTime("at", delay="10m", idle="1m", ahead="2h")) == Clock(600_000, 60_000, 7_200_000)
    assert Clock.of(EventTime("at")) == Clock(0, None, 3_600_000)


def test_a_clock_that_is_far_ahead_does_not_count() -> None:
    events = np.array([1_000, 2**62, 7_000, NOTHING], np.int64)
    found = counted(events, np.array([1_000, 1_000, 6_000, 0], np.int64), Clock(ahead_ms=1_000))
    assert found.tolist() == [1_000, NOTHING, 7_000, NOTHING]


def test_the_greatest_before_each_event() -> None:
    seen, greatest = running(np.array([5, 3, 9, NOTHING, 1], np.int64))
    assert seen.tolist() == [NOTHING, 5, 5, 9, 9]
    assert greatest == 9
    assert running(np.array([], np.int64), 4)[1] == 4


def late_rows(logs: list[list[int]], cuts: list[list[int]], clock: Clock, window_ms: int) -> list[list[bool]]:
    """What is late when each batch takes so many records of each partition; then all the rest."""
    places = [Place("orders", TOPIC, number) for number in range(len(logs))]
    at = [0] * len(logs)
    found: list[list[bool]] = [[] for _ in logs]
    stands = Watermarks()
    for cut in [*cuts, [len(log) for log in logs]]:
        greatest: dict[Place, int | None] = {}
        for number, (log, share) in enumerate(zip(logs, cut, strict=True)):
            taken = np.array(log[at[number] : at[number] + share], np.int64)
            before = stands.greatest_ms(places[number])
            seen, most = running(taken, NOTHING if before is None else before)
            for event, earlier in zip(taken.tolist(), seen.tolist(), strict=True):
                own = own_watermark_ms(None if earlier == NOTHING else earlier, stands.watermark_ms, clock)
                found[number].append(is_late(event - event % window_ms + window_ms, own))
            at[number] += len(taken)
            if len(taken):
                greatest[places[number]] = most
        after = stands.after(clock, 0, places, greatest)
        assert stands.watermark_ms is None or (
            after.watermark_ms is not None and after.watermark_ms >= stands.watermark_ms
        )
        stands = after
    return found


@given(
    logs=st.lists(st.lists(st.integers(0, 200), max_size=12), min_size=1, max_size=3),
    shares=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=6),
    delay_ms=st.integers(0, 60),
)
def test_any_cut_of_the_same_logs_has_the_same_rows_late(
    logs: list[list[int]], shares: list[list[int]], delay_ms: int
) -> None:
    clock = Clock(delay_ms=delay_ms)
    cuts = [share[: len(logs)] for share in shares]
    assert late_rows(logs, cuts, clock, 20) == late_rows(logs, [], clock, 20)


@given(
    logs=st.lists(st.lists(st.integers(0, 200), max_size=12), min_size=1, max_size=3),
    shares=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=6),
)
def test_what_is_not_late_belongs_to_nothing_that_is_closed(
    logs: list[list[int]], shares: list[list[int]]
) -> None:
    clock = Clock(delay_ms=7)
    places = [Place("orders", TOPIC, number) for number in range(len(logs))]
    at = [0] * len(logs)
    stands = Watermarks()
    for share in shares:
        greatest: dict[Place, int | None] = {}
        for number, log in enumerate(logs):
            taken = np.array(log[at[number] : at[number] + share[number]], np.int64)
            before = stands.greatest_ms(places[number])
            seen, most = running(taken, NOTHING if before is None else before)
            for event, earlier in zip(taken.tolist(), seen.tolist(), strict=True):
                own = own_watermark_ms(None if earlier == NOTHING else earlier, stands.watermark_ms, clock)
                end = event - event % 20 + 20
                closed = stands.watermark_ms is not None and end <= stands.watermark_ms
                assert is_late(end, own) or not closed
            at[number] += len(taken)
            if len(taken):
                greatest[places[number]] = most
        stands = stands.after(clock, 0, places, greatest)
