"""The front of finished work: never ahead of a message that is not done, never behind one it could pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.errors import UsageError


def test_a_slow_message_holds_back_those_behind_it() -> None:
    tracker = PartitionTracker("orders", 0, 10)
    for offset in (10, 11, 12):
        tracker.begin(offset)
    tracker.finish(12)
    tracker.finish(11)
    assert tracker.commit_offset == 10
    tracker.finish(10)
    assert tracker.commit_offset == 13


def test_a_position_that_is_not_stored_is_to_be_committed() -> None:
    assert not PartitionTracker("orders", 0, 10).has_news
    assert PartitionTracker("orders", 0, 10, is_stored=False).has_news


def test_gaps_hold_nothing_back() -> None:
    tracker = PartitionTracker("orders", 0, 0)
    tracker.begin(5)
    assert tracker.commit_offset == 5
    tracker.begin(9)
    tracker.finish(5)
    assert tracker.commit_offset == 9
    tracker.finish(9)
    assert tracker.commit_offset == 10


def test_the_markers_behind_the_last_message_are_passed_once_it_is_finished() -> None:
    tracker = PartitionTracker("orders", 0, 0)
    tracker.begin(0)
    tracker.passed(4)
    assert tracker.commit_offset == 0
    tracker.finish(0)
    assert tracker.commit_offset == 4


def test_what_finishes_after_the_partition_was_taken_away_does_not_count() -> None:
    tracker = PartitionTracker("orders", 0, 0)
    tracker.begin(0)
    tracker.close()
    assert tracker.finish(0) is False
    assert tracker.commit_offset == 0


def test_a_message_is_finished_once() -> None:
    tracker = PartitionTracker("orders", 0, 0)
    tracker.begin(0)
    tracker.begin(1)
    tracker.finish(1)
    with pytest.raises(UsageError):
        tracker.finish(1)
    with pytest.raises(UsageError):
        tracker.begin(1)


@given(
    gaps=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    choose=st.randoms(use_true_random=False),
    start=st.integers(0, 1000),
)
def test_the_position_is_always_the_first_unfinished_message(
    gaps: list[int], choose: object, start: int
) -> None:
    tracker = PartitionTracker("orders", 0, start)
    offsets = []
    following = start
    for gap in gaps:
        offsets.append(following + gap)
        following += gap + 1
    begun: list[int] = []
    unfinished: set[int] = set()
    waiting = list(offsets)
    while waiting or unfinished:
        if waiting and (not unfinished or choose.random() < 0.5):  # type: ignore[attr-defined]
            offset = waiting.pop(0)
            tracker.begin(offset)
            begun.append(offset)
            unfinished.add(offset)
        else:
            offset = choose.choice(sorted(unfinished))  # type: ignore[attr-defined]
            unfinished.discard(offset)
            assert tracker.finish(offset)
        assert tracker.commit_offset == (min(unfinished) if unfinished else begun[-1] + 1)
        assert len(tracker) == len(unfinished)
