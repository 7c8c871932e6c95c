"""PartitionOffsets: who is told what when the durable end moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.broker.partition.offsets import PartitionOffsets
from holdfast.errors import LogDirectoryOffline
from holdfast.wire.positions import LogPosition


def at(offset: int, segment_base: int = 0) -> LogPosition:
    return LogPosition(offset, segment_base, offset * 100)


def raised(defect: Exception) -> None:
    raise AssertionError("no waiter raises here") from defect


@pytest.fixture
def offsets() -> PartitionOffsets:
    return PartitionOffsets(at(10), raised)


class Watcher:
    """A parked fetch."""

    def __init__(self) -> None:
        self.times = 0
        self.leaves: Callable[[], None] = lambda: None

    def data_arrived(self) -> None:
        self.times += 1
        self.leaves()


def note(told: list[Exception | None]) -> Callable[[Exception | None], None]:
    return told.append


def test_what_recovery_found_is_committed_at_once(offsets: PartitionOffsets) -> None:
    told: list[Exception | None] = []
    offsets.when_committed(10, note(told))
    assert told == [None]
    assert offsets.is_committed(10)
    assert not offsets.is_committed(11)


def test_a_waiter_is_told_when_a_flush_reaches_its_offset_and_not_before(offsets: PartitionOffsets) -> None:
    told: list[Exception | None] = []
    offsets.when_committed(12, note(told))
    offsets.advance_durable_end(at(11))
    assert told == []
    offsets.advance_durable_end(at(12))
    assert told == [None]
    offsets.advance_durable_end(at(13))
    assert told == [None]


def test_waiters_are_told_in_the_order_they_came(offsets: PartitionOffsets) -> None:
    order: list[int] = []
    for end in (11, 11, 12, 14):
        offsets.when_committed(end, lambda error, end=end: order.append(end))  # type: ignore[misc]
    offsets.advance_durable_end(at(12))
    assert order == [11, 11, 12]
    offsets.advance_durable_end(at(20))
    assert order == [11, 11, 12, 14]


def test_nothing_moves_back(offsets: PartitionOffsets) -> None:
    offsets.advance_durable_end(at(15))
    offsets.advance_durable_end(at(12))
    assert offsets.durable_end == at(15)
    assert offsets.high_watermark == at(15)


def test_a_roll_without_appends_moves_the_bound_into_the_new_segment(offsets: PartitionOffsets) -> None:
    offsets.advance_durable_end(LogPosition(10, 10, 0))
    assert offsets.high_watermark == LogPosition(10, 10, 0)
    offsets.advance_durable_end(at(10))
    assert offsets.high_watermark == LogPosition(10, 10, 0)


def test_parked_fetches_are_woken_by_a_rise_and_may_leave_while_they_are(offsets: PartitionOffsets) -> None:
    first, second = Watcher(), Watcher()
    for watcher in (first, second):
        offsets.fetch_waiters[watcher] = None
        watcher.leaves = lambda watcher=watcher: offsets.fetch_waiters.pop(watcher)  # type: ignore[misc]
    offsets.advance_durable_end(at(10))
    assert (first.times, second.times) == (0, 0)
    offsets.advance_durable_end(at(11))
    assert (first.times, second.times) == (1, 1)
    offsets.advance_durable_end(at(12))
    assert (first.times, second.times) == (1, 1)


def test_the_high_watermark_is_up_when_waiters_are_told(offsets: PartitionOffsets) -> None:
    seen: list[int] = []
    offsets.when_committed(11, lambda error: seen.append(offsets.high_watermark.offset))
    watcher = Watcher()
    watcher.leaves = lambda: seen.append(offsets.high_watermark.offset)
    offsets.fetch_waiters[watcher] = None
    offsets.advance_durable_end(at(11))
    assert seen == [11, 11]


def test_a_failure_tells_everybody_now_and_later(offsets: PartitionOffsets) -> None:
    told: list[Exception | None] = []
    watcher = Watcher()
    offsets.fetch_waiters[watcher] = None
    offsets.when_committed(11, note(told))
    offsets.when_committed(12, note(told))
    error = LogDirectoryOffline("gone")
    offsets.fail(error)
    assert told == [error, error]
    assert watcher.times == 1
    offsets.when_committed(13, note(told))
    assert told[2:] == [error]
    offsets.when_committed(10, note(told))
    assert told[3:] == [None]


def test_the_last_stable_offset_stops_at_an_undecided_transaction_and_never_passes_the_high_watermark(
    offsets: PartitionOffsets,
) -> None:
    assert offsets.last_stable_offset == 10
    offsets.first_unstable_offset = 7
    assert offsets.last_stable_offset == 7
    offsets.first_unstable_offset = 12
    assert offsets.last_stable_offset == 10
    offsets.advance_durable_end(at(20))
    assert offsets.last_stable_offset == 12


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("wait"), st.integers(0, 30)), st.tuples(st.just("flush"), st.integers(0, 30))
        )
    )
)
def test_nobody_is_told_early_nobody_twice_nobody_never(steps: list[tuple[str, int]]) -> None:
    offsets = PartitionOffsets(at(0), raised)
    told: dict[int, list[int]] = {}
    waiting: dict[int, int] = {}
    end = durable = 0
    for number, (step, value) in enumerate(steps):
        if step == "wait":
            # Batches are appended in order, so waiters come in the order of their offsets.
            end = max(end, value)
            waiting[number] = end
            told[number] = []
            offsets.when_committed(
                end,
                lambda error, number=number: told[number].append(offsets.durable_end.offset),  # type: ignore[misc]
            )
        else:
            durable = max(durable, min(value, end))
            offsets.advance_durable_end(at(min(value, end)))
        assert offsets.high_watermark.offset == offsets.durable_end.offset == durable
        for who, wanted in waiting.items():
            assert len(told[who]) == (1 if wanted <= durable else 0)
            assert all(seen >= wanted for seen in told[who])


@pytest.mark.parametrize("end", ["flushed", "failed"])
def test_what_a_waiter_raises_is_reported_and_costs_nobody_else_an_answer(end: str) -> None:
    reported: list[Exception] = []
    offsets = PartitionOffsets(at(10), reported.append)
    told: list[Exception | None] = []
    watcher = Watcher()
    broken = Watcher()
    defects = [KeyError("a"), MemoryError(), RecursionError()]

    def raises(defect: Exception) -> Callable[[Exception | None], None]:
        def waiter(error: Exception | None) -> None:
            raise defect

        return waiter

    def leaves() -> None:
        raise defects[2]

    broken.leaves = leaves
    offsets.fetch_waiters |= {broken: None, watcher: None}
    for defect in defects[:2]:
        offsets.when_committed(11, raises(defect))
        offsets.when_committed(11, note(told))
    failure = LogDirectoryOffline("gone")
    if end == "flushed":
        offsets.advance_durable_end(at(11))
    else:
        offsets.fail(failure)
    assert told == [None if end == "flushed" else failure] * 2
    assert watcher.times == broken.times == 1
    assert reported == defects
