"""Deduplication judged by its outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.audit.model import Fate
from holdfast.audit.stateful.dedupe import judge
from holdfast.pipeline.definition.model import Dedupe, ParquetSink, Sql

if TYPE_CHECKING:
    from .conftest import Sent, World

ONCE = Dedupe("once", ("customer",), within="3s")
Events = list[tuple[int, int]]


def outcome(rows: Events, within_ms: int) -> tuple[list[bool], list[bool]]:
    """One row after the other: the first of its key within the time goes on."""
    passed: dict[int, list[int]] = {}
    went_on = []
    for key, event in rows:
        known = passed.setdefault(key, [])
        is_first = all(abs(event - other) >= within_ms for other in known)
        went_on.append(is_first)
        if is_first:
            known.append(event)
    return went_on, [not each for each in went_on]


@hypothesis_settings(max_examples=examples(150))
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), min_size=1, max_size=25), data=st.data()
)
def test_the_outcome_of_judging_row_by_row_holds_and_no_other_does(rows: Events, data: st.DataObject) -> None:
    keys, events = (np.array(each, np.int64) for each in zip(*rows, strict=True))
    order = np.arange(len(rows))
    went_on, doubled = (np.array(each) for each in outcome(rows, 5))
    right = judge(keys, events, order, went_on, doubled, 5)
    assert right.repeated.tolist() == right.lost.tolist() == []
    at = data.draw(st.integers(0, len(rows) - 1))
    went_on[at], doubled[at] = doubled[at], went_on[at]
    wrong = judge(keys, events, order, went_on, doubled, 5)
    assert at in [*wrong.repeated.tolist(), *wrong.lost.tolist()] or wrong.repeated.size


def played(world: type[World], sent: type[Sent], steps: tuple[Dedupe | Sql, ...] = (ONCE,)) -> World:
    records = [
        sent(number % 2, "abc"[number % 3], number * 500, number * 500, number) for number in range(40)
    ] + [sent(0, None, 20_000, 20_000), sent(1, "a", 2_000, 20_500)]
    return world(steps, records, [11, 30], sinks=(ParquetSink("unused", name="main"),))


def test_duplicates_and_late_rows_that_were_rightly_let_go_are_no_finding(
    world: type[World], sent: type[Sent]
) -> None:
    play = played(world, sent)
    done = play.play()
    assert done.duplicates
    assert done.dedupe_late
    assert play.audit(done).examined.findings == ()


def test_a_row_that_was_wrongly_let_go_is_lost(world: type[World], sent: type[Sent]) -> None:
    play = played(world, sent)
    done = play.play()
    first = done.went_on[0]
    found = play.audit(replace(done, duplicates=[*done.duplicates, first])).examined
    lost = [finding for finding in found.findings if finding.fate is Fate.LOST]
    assert any(
        finding.place is not None
        and finding.place.partition == first[0]
        and (first[1], first[1]) in finding.ranges
        for finding in lost
    )


def test_a_duplicate_that_went_on_is_found(world: type[World], sent: type[Sent]) -> None:
    play = played(world, sent)
    done = play.play()
    partition, offset = done.duplicates[3]
    (finding,) = play.audit(
        replace(done, duplicates=[each for each in done.duplicates if each != (partition, offset)])
    ).examined.findings
    assert finding.fate is Fate.DUPLICATED
    assert finding.place is not None
    assert (finding.place.partition, finding.ranges) == (partition, ((offset, offset),))


def test_a_late_row_that_was_not_recorded_is_found(world: type[World], sent: type[Sent]) -> None:
    play = played(world, sent)
    done = play.play()
    (finding,) = play.audit(replace(done, dedupe_late=[])).examined.findings
    assert finding.fate is Fate.ALTERED
    assert "late" in finding.detail


def test_numbers_of_a_spooling_producer_are_compared(world: type[World], sent: type[Sent]) -> None:
    records = [sent(0, "a", at * 100, at * 100, id=f"s:0:{at // 2}" if at % 5 else None) for at in range(12)]
    by_id = Dedupe("once", by="hf-id", within="3s")
    play = world((by_id,), records, [7], sinks=(ParquetSink("unused", name="main"),), partitions=1)
    done = play.play()
    assert len(done.duplicates) == 3
    assert play.audit(done).examined.findings == ()
    (finding,) = play.audit(replace(done, duplicates=done.duplicates[1:])).examined.findings
    assert finding.fate is Fate.DUPLICATED


def test_a_computed_key_is_taken_on_the_pipelines_word_and_says_so(
    world: type[World], sent: type[Sent]
) -> None:
    named = Sql("named", "SELECT * EXCEPT (customer), upper(customer) AS customer FROM input")
    play = played(world, sent, (named, ONCE))
    done = play.play()
    assert done.duplicates
    found = play.audit(done).examined
    assert found.findings == ()
    [claim] = found.coverage
    assert (claim.name, claim.recomputed, claim.unaltered) == ("steps.once", 0, len(done.duplicates))
