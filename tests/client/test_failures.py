"""What is remembered of messages that handlers fail on."""

from __future__ import annotations

from holdfast.client.failures import Failures
from holdfast.client.messages import DeadLetter, Message
from holdfast.client.retries import Again, Enough, RetryPolicy

POLICY = RetryPolicy(attempts=3, first_seconds=1.0, within_seconds=60.0)


def message(offset: int, partition: int = 0) -> Message:
    return Message("orders", partition, offset, 0, None, b"x")


def test_attempts_are_counted_by_message_and_end() -> None:
    failures = Failures(POLICY)
    assert failures.judge(message(5), ValueError(), 0.0, 0.0) == Again(1.0)
    assert failures.judge(message(5), ValueError(), 1.0, 1.0) == Again(2.0)
    assert failures.attempts(message(5)) == 2
    assert isinstance(failures.judge(message(5), ValueError(), 3.0, 3.0), Enough)
    assert failures.attempts(message(6)) == 0
    assert failures.judge(message(6), ValueError(), 3.0, 3.0) == Again(1.0)
    assert failures.judge(message(5, partition=1), ValueError(), 3.0, 3.0) == Again(1.0)


def test_time_counts_from_the_beginning_of_the_first_attempt() -> None:
    failures = Failures(POLICY)
    assert isinstance(failures.judge(message(5), ValueError(), 155.0, 100.0), Again)
    assert isinstance(failures.judge(message(5), ValueError(), 158.5, 156.0), Enough)


def test_a_message_that_asks_for_it_is_given_up_on_at_once() -> None:
    verdict = Failures(POLICY).judge(message(5), DeadLetter("no address"), 0.0, 0.0)
    assert verdict == Enough("no address", is_final=True)


def test_what_was_set_aside_is_passed_over_until_the_position_is_behind_it() -> None:
    failures = Failures(POLICY)
    for offset in (5, 7):
        failures.set_aside(message(offset))
    assert failures.is_set_aside(message(5))
    assert not failures.is_set_aside(message(6))
    assert not failures.is_set_aside(message(5, partition=1))
    failures.passed(("orders", 0), 6)
    assert not failures.is_set_aside(message(5))
    assert failures.is_set_aside(message(7))
    failures.forget([("orders", 0)])
    assert not failures.is_set_aside(message(7))


def test_a_partition_that_comes_back_begins_anew() -> None:
    failures = Failures(POLICY)
    failures.judge(message(5), ValueError(), 0.0, 0.0)
    failures.passed(("orders", 0), 5)
    assert failures.attempts(message(5)) == 1
    failures.passed(("orders", 0), 6)
    assert failures.attempts(message(5)) == 0
    failures.judge(message(8), ValueError(), 0.0, 0.0)
    failures.forget([("orders", 0)])
    assert failures.attempts(message(8)) == 0
