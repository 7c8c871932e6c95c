"""Subscriptions by regular expression: RE2's language, as the protocol has it.

RE2 runs in time linear in the name it looks at, so no expression a client sends can hold up the broker; that is why
it is used and not Python's own engine. An expression must match the whole name of a topic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import re2
from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import Topics
from holdfast.errors import ApiError

MEMORY_BYTES_MAX: Final = 8 << 20
"""What one compiled expression may take: RE2's own default, under which larger ones are refused."""
COMPILED_MAX: Final = 256
"""Expressions kept compiled: more than the groups of one broker have between them in practice."""
MATCHED_MAX: Final = 64
"""Expressions whose topics are kept; each may be for all topics there are."""
CHANGED_MAX: Final = 1_000
"""Topics that may change before an expression nobody asked for meanwhile is forgotten."""

_OPTIONS: Final = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = MEMORY_BYTES_MAX


class Resolution(NamedTuple):
    """The topics an expression stood for when it was last looked at."""

    topics: frozenset[str]
    version: int
    """Of the metadata they were looked up in."""
    resolved_at_ms: int
    """By the wall clock."""


class _Matched(NamedTuple):
    topics: frozenset[str]
    changed: set[str]
    """Topics that have been made or deleted since."""


class Matches:
    """The topics that expressions match, found once for all groups that subscribe alike.

    When topics change, only their own names are matched again.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._matched: dict[str, _Matched] = {}
        """By expression; the one longest not asked for is the first."""

    def changed(self, names: Collection[str]) -> None:
        for expression, matched in list(self._matched.items()):
            matched.changed.update(names)
            if len(matched.changed) > CHANGED_MAX:
                del self._matched[expression]

    def of(self, expression: str) -> frozenset[str]:
        matched = self._matched.pop(expression, None)
        if matched is None:
            if len(self._matched) >= MATCHED_MAX:
                del self._matched[next(iter(self._matched))]
            matched = _Matched(matching(expression, self._topics.names()), set())
        elif matched.changed:
            there = [name for name in matched.changed if self._topics.by_name(name) is not None]
            matched = _Matched(matched.topics - matched.changed | matching(expression, there), set())
        self._matched[expression] = matched
        return matched.topics


@lru_cache(maxsize=COMPILED_MAX)
def _compiled(expression: str) -> Any:
    return re2.compile(expression, _OPTIONS)


def check(expression: str) -> None:
    """INVALID_REGULAR_EXPRESSION unless this is one."""
    try:
        _compiled(expression)
    except re2.error as error:
        raise ApiError(
            ErrorCode.invalid_regular_expression,
            f"{expression!r} is no valid regular expression: {_reason(error)}",
        ) from error


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else "it cannot be compiled"
    return reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)


def matching(expression: str, names: Iterable[str]) -> frozenset[str]:
    """The names an expression matches from beginning to end; none if it is not one any more."""
    try:
        fullmatch = _compiled(expression).fullmatch
    except re2.error:
        # Stored by a version that understood more: a member that joins with it will be told.
        return frozenset()
    return frozenset(name for name in names if fullmatch(name))
