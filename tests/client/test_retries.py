"""When a message is tried again and when it is enough."""

from __future__ import annotations

import pytest

from holdfast.client.messages import DeadLetter, Retry
from holdfast.client.retries import Again, Enough, RetryPolicy
from holdfast.errors import UsageError


def test_waits_grow_up_to_the_longest() -> None:
    policy = RetryPolicy(attempts=10, first_seconds=1, factor=3, longest_seconds=20)
    assert [policy.wait_after(attempt) for attempt in (1, 2, 3, 4, 50)] == [1, 3, 9, 20, 20]


def test_the_last_attempt_is_the_last() -> None:
    policy = RetryPolicy(attempts=3)
    assert isinstance(policy.judge(OSError("away"), 2, 0), Again)
    verdict = policy.judge(OSError("away"), 3, 0)
    assert isinstance(verdict, Enough)
    assert "3 attempts" in verdict.reason
    assert "away" in verdict.reason


def test_time_ends_the_retries_too() -> None:
    policy = RetryPolicy(attempts=100, first_seconds=5, within_seconds=12)
    assert policy.judge(OSError(), 1, 1) == Again(5)
    assert isinstance(policy.judge(OSError(), 2, 8), Enough)


def test_errors_that_cannot_be_mended_are_not_retried() -> None:
    policy = RetryPolicy(retried=(OSError,), final=(FileNotFoundError,))
    assert isinstance(policy.judge(ConnectionError(), 1, 0), Again)
    assert isinstance(policy.judge(FileNotFoundError(), 1, 0), Enough)
    assert isinstance(policy.judge(ValueError(), 1, 0), Enough)


def test_a_handler_may_say_when_to_ask_again_or_that_it_is_enough() -> None:
    policy = RetryPolicy(retried=())
    assert policy.judge(Retry("later", after_seconds=7), 1, 0) == Again(7)
    assert policy.judge(DeadLetter("no such customer"), 1, 0) == Enough("no such customer", is_final=True)


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError):
        RetryPolicy(attempts=0)
    with pytest.raises(UsageError):
        RetryPolicy(factor=0.5)
