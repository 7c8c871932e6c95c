"""Commits that are answered, refused, repeated, or not ours any more."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from holdfast.client.consuming.commits import Commits, OffsetsNotCommitted, Refusal, refusal
from holdfast.client.consuming.tracker import PartitionTracker


class Coordinator:
    """Answers commits as it was told, then stores them."""

    def __init__(self, *refusals: int) -> None:
        self.refusals = list(refusals)
        self.stored: dict[tuple[str, int], tuple[int, str]] = {}
        self.asked: list[TopicPartition] = []

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition] | None:
        self.asked = offsets
        if asynchronous:
            return None
        if self.refusals:
            raise KafkaException(KafkaError(self.refusals.pop(0)))
        for each in offsets:
            self.stored[each.topic, each.partition] = (each.offset, each.metadata or "")
        return offsets


def finished(partition: int, count: int) -> PartitionTracker:
    tracker = PartitionTracker("orders", partition, 0)
    tracker.begin_all(range(count))
    tracker.finish_all(range(count))
    return tracker


def positions(coordinator: Any, said: list[str] | None = None) -> Commits:
    return Commits(coordinator, (said if said is not None else []).append, lambda tracker: "note")


def test_a_commit_that_was_waited_for_is_stored_with_its_note() -> None:
    coordinator, tracker = Coordinator(), finished(0, 3)
    positions(coordinator).commit_now([tracker], 1, is_last=True)
    assert coordinator.stored == {("orders", 0): (3, "note")}
    assert not tracker.has_news


def test_a_passing_refusal_is_repeated() -> None:
    coordinator = Coordinator(KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.REBALANCE_IN_PROGRESS)
    tracker = finished(0, 3)
    positions(coordinator).commit_now([tracker], 30, is_last=True)
    assert coordinator.stored == {("orders", 0): (3, "note")}


def test_a_member_that_was_replaced_gives_up_without_an_error() -> None:
    # HF307
    said: list[str] = []
    coordinator, tracker = Coordinator(KafkaError.ILLEGAL_GENERATION), finished(0, 3)
    positions(coordinator, said).commit_now([tracker], 30, is_last=True)
    assert (coordinator.stored, tracker.committed) == ({}, 0)
    assert "not ours" in said[0]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_commit_that_is_never_stored_is_an_error_at_the_end(is_last: bool) -> None:
    # HF309
    said: list[str] = []
    coordinator = Coordinator(*[KafkaError._WAIT_COORD] * 100)
    if is_last:
        with pytest.raises(OffsetsNotCommitted, match="orders-0 to 3, committed 0"):
            positions(coordinator, said).commit_now([finished(0, 3)], 0, is_last=True)
    else:
        positions(coordinator, said).commit_now([finished(0, 3)], 0, is_last=False)
        assert "handed out again" in said[0]


def test_what_no_repetition_mends_is_an_error_at_once() -> None:
    coordinator = Coordinator(KafkaError.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(OffsetsNotCommitted):
        positions(coordinator).commit_now([finished(0, 3)], 30, is_last=False)


def test_an_answer_counts_for_what_was_asked_and_one_is_under_way_at_a_time() -> None:
    coordinator, tracker, other = Coordinator(), finished(0, 3), finished(1, 2)
    both = positions(coordinator)
    both.commit_soon([tracker, other])
    first = coordinator.asked
    tracker.begin(3)
    tracker.finish(3)
    both.commit_soon([tracker, other])
    assert coordinator.asked is first
    both.answered(None, [first[0]])
    assert (tracker.committed, tracker.has_news, other.has_news) == (3, True, True)
    both.commit_soon([tracker, other])
    assert sorted((each.partition, each.offset) for each in coordinator.asked) == [(0, 4), (1, 2)]


def test_a_refused_answer_leaves_everything_to_be_committed_again() -> None:
    coordinator, tracker = Coordinator(), finished(0, 3)
    ours = positions(coordinator)
    ours.commit_soon([tracker])
    ours.answered(KafkaError(KafkaError._TRANSPORT), [])
    assert tracker.has_news
    ours.commit_soon([tracker])
    ours.answered(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), [])
    assert isinstance(ours.error, KafkaException)


def test_a_partition_that_was_taken_away_is_not_committed_in_the_background() -> None:
    coordinator, tracker = Coordinator(), finished(0, 3)
    tracker.close()
    positions(coordinator).commit_soon([tracker])
    assert coordinator.asked == []


def test_refusals_are_told_apart() -> None:
    assert refusal(KafkaError(KafkaError.FENCED_MEMBER_EPOCH)) is Refusal.FENCED
    assert refusal(KafkaError(KafkaError.STALE_MEMBER_EPOCH)) is Refusal.AGAIN
    assert refusal(KafkaError(KafkaError.INVALID_GROUP_ID)) is Refusal.HOPELESS
