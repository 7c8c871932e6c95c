"""Timers: deadlines in order, each once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.node.timers import Timers


def test_timers_run_in_the_order_of_their_deadlines_and_ties_in_the_order_they_were_set() -> None:
    timers = Timers()
    ran: list[str] = []
    timers.at(20, lambda: ran.append("late"))
    timers.at(10, lambda: ran.append("first"))
    timers.at(10, lambda: ran.append("second"))
    timers.run_due(9)
    assert ran == []
    timers.run_due(15)
    assert ran == ["first", "second"]
    timers.run_due(15)
    timers.run_due(20)
    assert ran == ["first", "second", "late"]


def test_a_cancelled_timer_never_runs_and_is_no_deadline() -> None:
    timers = Timers()
    ran: list[str] = []
    timers.at(5, lambda: ran.append("cancelled")).cancel()
    timers.at(7, lambda: ran.append("kept"))
    assert timers.next_deadline_ms == 7
    timers.run_due(100)
    assert ran == ["kept"]
    assert timers.next_deadline_ms is None


def test_an_action_may_set_timers_that_are_due_already() -> None:
    timers = Timers()
    ran: list[int] = []

    def chain(left: int) -> None:
        ran.append(left)
        if left:
            timers.at(10, lambda: chain(left - 1))

    timers.at(10, lambda: chain(3))
    timers.run_due(10)
    assert ran == [3, 2, 1, 0]


def test_the_shell_is_told_of_earlier_deadlines_only() -> None:
    timers = Timers()
    told: list[int | None] = []
    timers.on_earlier = lambda: told.append(timers.next_deadline_ms)
    timers.at(100, lambda: None)
    timers.at(200, lambda: None)
    early = timers.at(50, lambda: None)
    assert told == [100, 50]
    early.cancel()
    assert timers.next_deadline_ms == 100
    timers.at(60, lambda: None)
    assert told == [100, 50, 60]


def test_sweeping_cancelled_timers_while_others_run_repeats_none() -> None:
    """The heap is tidied every few thousand timers, perhaps in the middle of a run."""
    timers = Timers()
    ran: list[int] = []
    for number in range(5):
        timers.at(10, lambda number=number: ran.append(number))  # type: ignore[misc]

    def set_many() -> None:
        for _ in range(10_000):
            timers.at(1_000, lambda: None).cancel()

    timers.at(1, set_many)
    timers.run_due(10)
    timers.run_due(10)
    assert ran == [0, 1, 2, 3, 4]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=40),
    st.lists(st.integers(0, 60), max_size=10),
)
def test_every_timer_runs_once_when_due_and_not_before(
    wanted: list[tuple[int, bool]], times: list[int]
) -> None:
    timers = Timers()
    ran: list[int] = []
    for number, (deadline, is_cancelled) in enumerate(wanted):
        timer = timers.at(deadline, lambda number=number: ran.append(number))  # type: ignore[misc]
        if is_cancelled:
            timer.cancel()
    latest = -1
    for now in sorted(times):
        latest = now
        timers.run_due(now)
        live = [deadline for deadline, is_cancelled in wanted if deadline > now and not is_cancelled]
        assert timers.next_deadline_ms == min(live, default=None)
    due = [number for number, (deadline, gone) in enumerate(wanted) if deadline <= latest and not gone]
    assert sorted(ran) == due
    assert len(ran) == len(set(ran))
