"""Subscriptions by regular expression."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from holdfast.errors import ApiError
from holdfast.groups.regex import check, matching


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
