"""Subscriptions by regular expression."""

from __future__ import annotations

from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import TopicFacts
from holdfast.broker.groups.regex import CHANGED_MAX, MATCHED_MAX, Matches, check, matching
from holdfast.errors import ApiError


def test_the_whole_name_must_match() -> None:
    names = ["orders", "orders-eu", "my-orders", "order"]
    assert matching("orders", names) == {"orders"}
    assert matching("orders.*", names) == {"orders", "orders-eu"}
    assert matching("order|my-orders", names) == {"order", "my-orders"}


@pytest.mark.parametrize("expression", ["(", "[", "a**", "(?=a)", r"\1", "a{1001}", "x" * 2 + "{1000}{1000}"])
def test_what_re2_does_not_know_is_refused(expression: str) -> None:
    with pytest.raises(ApiError) as refused:
        check(expression)
    assert refused.value.code is ErrorCode.invalid_regular_expression


def test_an_expression_that_would_make_python_backtrack_is_answered() -> None:
    assert matching("(a*)*b", ["a" * 249]) == frozenset()


def test_an_expression_nobody_can_compile_any_more_matches_nothing() -> None:
    assert matching("(", ["a"]) == frozenset()


class SomeTopics:
    """Topics of which a test knows how often each was matched."""

    def __init__(self, *names: str) -> None:
        self.all = set(names)
        self.listed = 0

    def names(self) -> list[str]:
        self.listed += 1
        return list(self.all)

    def by_name(self, name: str) -> TopicFacts | None:
        return TopicFacts(name, UUID(int=1), 1) if name in self.all else None

    def by_id(self, topic_id: UUID) -> TopicFacts | None:
        raise AssertionError("nobody asks")

    def matching(self, expression: str) -> frozenset[str]:
        raise AssertionError("nobody asks")


def test_topics_that_come_and_go_are_followed_without_looking_at_the_others() -> None:
    topics = SomeTopics("orders", "payments")
    matches = Matches(topics)
    assert matches.of("o.*") == {"orders"}
    topics.all |= {"offers", "refunds"}
    matches.changed({"offers", "refunds"})
    topics.all.discard("orders")
    matches.changed({"orders"})
    assert matches.of("o.*") == {"offers"}
    topics.all.add("orders")
    matches.changed({"orders"})
    assert matches.of("o.*") == {"offers", "orders"}
    assert topics.listed == 1


def test_what_is_kept_of_expressions_is_bounded() -> None:
    topics = SomeTopics("orders")
    matches = Matches(topics)
    for number in range(MATCHED_MAX):
        matches.of(f"x{number}")
    matches.of("x0")
    assert topics.listed == MATCHED_MAX
    matches.of("new")
    matches.of("x0")
    assert topics.listed == MATCHED_MAX + 1, "the one asked for last is kept"
    matches.of("x1")
    assert topics.listed == MATCHED_MAX + 2, "the one longest not asked for went"
    names = {f"t{number}" for number in range(CHANGED_MAX + 1)}
    topics.all |= names
    matches.changed(names)
    assert matches.of("t.*") == names
    assert matches.of("x0") == frozenset()
    assert topics.listed == MATCHED_MAX + 4
