"""Timers: deadlines in order, each once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.broker.node.timers import Timers


def fail(action: Callable[[], None], error: Exception) -> None:
    raise AssertionError(f"{action} raised {error!r}")


def test_timers_run_in_the_order_of_their_deadlines_and_ties_in_the_order_they_were_set() -> None:
    timers = Timers(fail)
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
    timers = Timers(fail)
    ran: list[str] = []
    timers.at(5, lambda: ran.append("cancelled")).cancel()
    timers.at(7, lambda: ran.append("kept"))
    assert timers.next_deadline_ms == 7
    timers.run_due(100)
    assert ran == ["kept"]
    assert timers.next_deadline_ms is None


def test_an_action_may_set_timers_that_are_due_already() -> None:
    timers = Timers(fail)
    ran: list[int] = []

    def chain(left: int) -> None:
        ran.append(left)
        if left:
            timers.at(10, lambda: chain(left - 1))

    timers.at(10, lambda: chain(3))
    timers.run_due(10)
    assert ran == [3, 2, 1, 0]


def test_the_shell_is_told_of_earlier_deadlines_only() -> None:
    timers = Timers(fail)
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
    timers = Timers(fail)
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
    timers = Timers(fail)
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


def test_an_action_that_raises_is_reported_and_spoils_no_other() -> None:
    failed: list[tuple[str, str]] = []
    timers = Timers(lambda action, error: failed.append((action.__name__, repr(error))))
    ran: list[str] = []

    def broken() -> None:
        own.cancel()
        timers.at(30, lambda: ran.append("set before it raised"))
        raise OSError(5, "broken")

    own = timers.at(10, broken)
    timers.at(10, lambda: ran.append("same time"))
    timers.at(20, lambda: ran.append("later"))
    timers.run_due(20)
    assert ran == ["same time", "later"]
    assert failed == [("broken", "OSError(5, 'broken')")]
    assert timers.next_deadline_ms == 30
    timers.run_due(30)
    assert ran == ["same time", "later", "set before it raised"]
    assert len(failed) == 1


def test_what_is_no_mere_error_ends_the_run() -> None:
    """A power failure in the simulator, or Ctrl-C: nothing may go on as if it had not been."""
    failed: list[BaseException] = []
    timers = Timers(lambda action, error: failed.append(error))

    def interrupted() -> None:
        raise KeyboardInterrupt

    timers.at(10, interrupted)
    with pytest.raises(KeyboardInterrupt):
        timers.run_due(10)
    assert failed == []
