"""Retry topics: where a failed message goes next, what it carries, and how long it is held back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.messages import DeadLetter, Message, Origin, Retry, away_from_home
from holdfast.client.retries import (
    Enough,
    HeldBack,
    History,
    Later,
    RetryPolicy,
    RetryStep,
    RetryTopics,
    headers_for,
    next_history,
    without_history,
)
from holdfast.errors import UsageError

NEW = Message("orders", 2, 7, 5, b"k", b"v", (("trace", b"1"),))
POLICY = RetryTopics(delays=[5, 60])


def retried(due_ms: int, *, offset: int = 0, group: str = "mailer", step: int = 0) -> Message:
    history = History(Origin("orders", 2, 7, 5), group, 1, step, 1, due_ms)
    return Message(f"orders-retry-{step}", 2, offset, 9, b"k", b"v", history.headers())


def test_a_failed_message_goes_from_topic_to_topic_and_then_nowhere() -> None:
    history = History.read(NEW)
    seen = []
    now_ms = 1_000_000
    while isinstance(following := POLICY.follow(history, OSError("away"), 1, now_ms), Later):
        seen.append((following.topic, following.seconds))
        history = next_history(history, "mailer", following, 1, now_ms)
        assert history.due_ms == now_ms + following.seconds * 1000
        now_ms = history.due_ms
    assert seen == [("orders-retry-0", 5), ("orders-retry-1", 60)]
    assert isinstance(following, Enough)
    assert following.reason == "3 attempts, the last: OSError: away"
    assert history.origin == ("orders", 2, 7, 5)


def test_errors_that_cannot_be_mended_go_no_further() -> None:
    policy = RetryTopics(
        delays=[5], in_place=RetryPolicy(attempts=1, retried=(OSError,), final=(FileNotFoundError,))
    )
    history = History.read(NEW)
    assert isinstance(policy.follow(history, ConnectionError(), 1, 0), Later)
    assert isinstance(policy.follow(history, Retry("not yet"), 1, 0), Later)
    for error in (FileNotFoundError(), ValueError(), DeadLetter("never")):
        following = policy.follow(history, error, 1, 0)
        assert isinstance(following, Enough)
        assert following.is_final


def test_no_attempt_is_planned_past_the_time_allowed() -> None:
    policy = RetryTopics(delays=[5, 60], within_seconds=30)
    history = History(Origin("orders", 0, 0, 0), "g", 1, 0, first_ms=1000, due_ms=6000)
    following = policy.follow(history, OSError(), 1, 6000)
    assert isinstance(following, Enough)
    assert "30 s" in following.reason


def test_every_topic_has_its_retry_topics() -> None:
    assert POLICY.places(["a", "b"]) == {
        "a-retry-0": RetryStep("a", 0),
        "a-retry-1": RetryStep("a", 1),
        "b-retry-0": RetryStep("b", 0),
        "b-retry-1": RetryStep("b", 1),
    }
    with pytest.raises(UsageError, match="pattern"):
        POLICY.places(["^orders.*"])
    with pytest.raises(UsageError):
        RetryTopics(delays=[])
    with pytest.raises(UsageError):
        RetryTopics(delays=[-1])


histories = st.builds(
    History,
    origin=st.builds(Origin, st.text(), st.integers(0, 2**31), st.integers(0, 2**63), st.integers(-1, 2**63)),
    group=st.text(),
    attempts=st.integers(0, 1000),
    step=st.integers(0, 50),
    first_ms=st.integers(1, 2**63),
    due_ms=st.integers(0, 2**63),
    error=st.text(max_size=50),
)
own_headers = st.lists(
    st.tuples(st.text().filter(lambda name: not name.startswith("hf-")), st.none() | st.binary())
).map(tuple)


@given(histories, histories, own_headers)
def test_a_history_is_read_back_and_replaces_the_one_before(
    first: History, second: History, own: tuple[tuple[str, bytes | None], ...]
) -> None:
    message = Message("t", 0, 0, 0, None, None, own)
    for history in (first, second):
        message = message._replace(headers=headers_for(message, history))
        assert History.read(message) == history
        assert message.origin == history.origin
    assert without_history(message.headers) == own
    assert len(message.headers) == len(own) + len(second.headers())


@given(
    st.lists(
        st.tuples(
            st.sampled_from([name for name, _ in History(Origin("t", 0, 0, 0)).headers()]),
            st.none() | st.binary(max_size=30),
        )
    )
)
def test_a_broken_history_breaks_nothing(headers: list[tuple[str, bytes | None]]) -> None:
    message = Message("orders-retry-0", 0, 3, 0, None, None, tuple(headers))
    assert History.read(message).origin == message.origin
    HeldBack({"orders-retry-0": 5000}, "mailer").hold(message, 0)


def test_an_id_is_kept_under_a_name_that_nobody_counts_by() -> None:
    assert away_from_home((("hf-id", b"x:1:2"), ("a", None))) == (("hf-origin-id", b"x:1:2"), ("a", None))


def test_what_is_not_due_is_held_and_comes_in_order() -> None:
    held = HeldBack({"orders-retry-0": 5000}, "mailer")
    first, second = retried(4000, offset=0), retried(4500, offset=1)
    assert held.hold(first, 1000)
    assert held.hold(second, 1000)
    assert ("orders-retry-0", 2) in held
    assert held.take_due(3999) == []
    assert held.take_due(4000) == [first]
    assert held.take_due(9000) == [second]
    assert ("orders-retry-0", 2) not in held
    assert not held.hold(retried(4000), 4000)


def test_nothing_overtakes_what_is_held() -> None:
    held = HeldBack({"orders-retry-0": 5000}, "mailer")
    waiting, due = retried(4000, offset=0), retried(500, offset=1)
    assert held.hold(waiting, 1000)
    assert held.hold(due, 1000)
    assert held.take_due(1000) == []
    assert held.take_due(4000) == [waiting, due]


def test_a_clock_set_back_holds_nothing_longer_than_its_delay() -> None:
    held = HeldBack({"orders-retry-0": 5000}, "mailer")
    message = retried(10**12)
    assert held.hold(message, 1000)
    assert held.take_due(6000) == [message]


def test_other_topics_and_other_groups_are_not_held() -> None:
    held = HeldBack({"orders-retry-0": 5000}, "mailer")
    assert not held.hold(NEW, 0)
    foreign = retried(4000, group="billing")
    assert not held.hold(foreign, 0)
    assert held.is_foreign(foreign)
    assert not held.is_foreign(retried(4000))
    assert not held.is_foreign(NEW)


def test_a_partition_that_goes_takes_what_was_held_with_it() -> None:
    held = HeldBack({"orders-retry-0": 5000}, "mailer")
    held.hold(retried(4000), 0)
    held.forget(("orders-retry-0", 2))
    assert held.take_due(5000) == []
    assert len(held) == 0
