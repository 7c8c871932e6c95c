"""What an audit of a pipeline is about: from which offset to which, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit.ledgers import Chain
from holdfast.audit.scope import PipelineScope, decide_scope, start_ms
from holdfast.audit.source import LogEnds
from holdfast.errors import UsageError
from holdfast.pipeline.positions import Place, Position, Positions

ONE = Place("orders", UUID(int=1), 0)
TWO = Place("orders", UUID(int=1), 1)


def chain(
    sink: str, starts: Mapping[Place, int], ends: Mapping[Place, int], unsure: frozenset[Place] = frozenset()
) -> Chain:
    return Chain(sink, dict(starts), unsure, Positions({place: Position(end) for place, end in ends.items()}))


def scope_of(*chains: Chain, logs: Mapping[Place, LogEnds], **more: object) -> PipelineScope:
    return decide_scope({each.sink: each for each in chains}, logs, **more)  # type: ignore[arg-type]


def test_it_begins_where_the_pipeline_began_and_ends_where_the_last_sink_stands() -> None:
    scope = scope_of(
        chain("a", {ONE: 5}, {ONE: 90}), chain("b", {ONE: 5}, {ONE: 70}), logs={ONE: LogEnds(0, 100)}
    )
    assert (scope.spans, scope.pending, scope.offsets) == ({ONE: (5, 70)}, {ONE: 30}, 65)
    assert not scope.unproven


def test_a_partition_that_one_sink_does_not_know_is_pending_as_a_whole() -> None:
    scope = scope_of(
        chain("a", {ONE: 0, TWO: 4}, {ONE: 9, TWO: 9}),
        chain("b", {ONE: 0}, {ONE: 9}),
        logs={ONE: LogEnds(0, 9), TWO: LogEnds(4, 9)},
    )
    assert scope.spans == {ONE: (0, 9), TWO: (4, 4)}
    assert scope.pending[TWO] == 5


@pytest.mark.parametrize(("added_at", "is_gap"), [({}, True), ({ONE: 39}, True), ({ONE: 40}, False)])
def test_what_a_sink_had_before_it_began_anew_is_a_gap_unless_it_had_nothing(
    added_at: Mapping[Place, int], is_gap: bool
) -> None:
    anew = replace(chain("b", {ONE: 40}, {ONE: 90}), begins_anew=True, added_at=added_at)
    scope = scope_of(chain("a", {ONE: 0}, {ONE: 90}), anew, logs={ONE: LogEnds(0, 90)})
    assert [each.is_gap for each in scope.unproven] == [True] * is_gap
    assert scope.sink_starts["b"] == {ONE: 40}


def test_what_lies_below_the_log_start_is_a_gap_and_named() -> None:
    scope = scope_of(chain("a", {ONE: 0}, {ONE: 50}), logs={ONE: LogEnds(20, 60)})
    assert (scope.spans[ONE], scope.expired) == ((0, 50), {ONE: 20})
    (gap,) = scope.unproven
    assert gap.is_gap
    assert "20 offsets of orders-0 (0-19)" in gap.what


def test_a_log_that_has_expired_beyond_the_ledgers_leaves_nothing() -> None:
    scope = scope_of(chain("a", {ONE: 0}, {ONE: 50}), logs={ONE: LogEnds(80, 90)})
    assert scope.expired == {ONE: 50}
    later = scope_of(chain("a", {ONE: 0}, {ONE: 50}), logs={ONE: LogEnds(80, 90)}, given=lambda place: 80)
    assert (later.spans[ONE], later.unproven) == ((50, 50), [])


def test_positions_beyond_the_log_end_the_scope_there_and_are_a_gap() -> None:
    scope = scope_of(chain("a", {ONE: 0}, {ONE: 50}), logs={ONE: LogEnds(0, 30)})
    assert (scope.spans, scope.pending) == ({ONE: (0, 30)}, {ONE: 0})
    (gap,) = scope.unproven
    assert gap.is_gap
    assert "20 offsets of orders-0 (30-49)" in gap.what


def test_the_caller_may_begin_later_and_never_earlier() -> None:
    sinks = chain("a", {ONE: 10}, {ONE: 50})
    logs = {ONE: LogEnds(20, 60)}
    assert scope_of(sinks, logs=logs, given=lambda place: 30, given_text="--from x").spans == {ONE: (30, 50)}
    assert scope_of(sinks, logs=logs, given=lambda place: 0).spans == {ONE: (20, 50)}
    assert scope_of(sinks, logs=logs, given=lambda place: 55).spans == {ONE: (50, 50)}


def test_what_was_proven_before_is_left_out_where_it_is_known() -> None:
    sinks = chain("a", {ONE: 0, TWO: 0}, {ONE: 50, TWO: 50})
    logs = {ONE: LogEnds(0, 60), TWO: LogEnds(0, 60)}
    assert scope_of(sinks, logs=logs, since={ONE: 40}).spans == {ONE: (40, 50), TWO: (0, 50)}


def test_a_beginning_that_no_ledger_keeps_is_the_logs_start_and_said() -> None:
    pruned = chain("topic", {ONE: 30}, {ONE: 50}, frozenset({ONE}))
    scope = scope_of(pruned, logs={ONE: LogEnds(10, 60)})
    assert scope.spans == {ONE: (10, 50)}
    assert [each.is_gap for each in scope.unproven] == [False]
    latest = scope_of(pruned, logs={ONE: LogEnds(10, 60)}, starts_at_log_start=False)
    assert latest.spans == {ONE: (30, 50)}
    sure = scope_of(pruned, chain("files", {ONE: 20}, {ONE: 50}), logs={ONE: LogEnds(10, 60)})
    assert (sure.spans, sure.unproven) == ({ONE: (20, 50)}, [])


def test_another_incarnation_of_a_topic_and_a_topic_that_is_gone_are_gaps() -> None:
    again = ONE._replace(topic_id=UUID(int=2))
    scope = scope_of(chain("a", {ONE: 0, TWO: 0}, {ONE: 9, TWO: 9}), logs={again: LogEnds(0, 4)})
    assert scope.spans == {}
    recreated, gone = scope.unproven
    assert "deleted and created again" in recreated.why
    assert "not there any more" in gone.why
    assert recreated.is_gap
    assert gone.is_gap


def test_a_sink_that_began_later_is_held_to_what_came_since() -> None:
    scope = scope_of(
        chain("a", {ONE: 0}, {ONE: 50}), chain("new", {ONE: 30}, {ONE: 50}), logs={ONE: LogEnds(0, 50)}
    )
    assert scope.sink_starts == {"new": {ONE: 30}}
    assert scope.spans == {ONE: (0, 50)}


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60), st.integers(0, 60), st.integers(0, 70))
def test_no_offset_is_counted_twice_or_below_zero(
    start: int, length: int, log_start: int, log: int, begin: int
) -> None:
    ends = LogEnds(log_start, max(log_start, start + length, log))
    scope = scope_of(
        chain("a", {ONE: start}, {ONE: start + length}), logs={ONE: ends}, given=lambda place: begin
    )
    first, behind = scope.spans[ONE]
    assert start <= first <= behind == start + length
    assert scope.pending[ONE] == ends.end - behind
    assert scope.expired.get(ONE, 0) == 0, "who says where to begin accepts what has expired"


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("earliest", None),
        ("1970-01-01T00:00:01Z", 1000),
        ("1970-01-01T00:00:01", 1000),
        ("1970-01-01T02:00:00+02:00", 0),
    ],
)
def test_a_place_to_begin_is_a_word_or_a_time(text: str, milliseconds: int | None) -> None:
    assert start_ms(text) == milliseconds


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match="latest"):
        start_ms("latest")
