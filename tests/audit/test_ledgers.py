"""Ledgers as evidence: chains without gaps, entries that count what is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.audit_sinks import Ledger

from holdfast.audit.compare import Holding
from holdfast.audit.ledgers import (
    Books,
    added_at,
    check_intake,
    check_routes,
    check_rows,
    cover,
    follow,
    is_whole,
)
from holdfast.audit.lineage import LineageBatch
from holdfast.audit.model import Fate, Finding
from holdfast.audit.source import COMPACTED, EXPIRED, RECORD, PartitionWalk, SourceWalk
from holdfast.pipeline.digest import digest_of_offsets
from holdfast.pipeline.ledger import Entry, Intake, Reached, Routes
from holdfast.pipeline.positions import Place, Position, Positions

PLACE = Place("orders", UUID(int=1), 0)
OTHER = Place("orders", UUID(int=1), 1)


def digest(offsets: Iterable[int]) -> int:
    return digest_of_offsets(PLACE.topic, PLACE.partition, np.array(list(offsets), np.int64))


def taking(ledger: Ledger, start: int, end: int, **more: Any) -> Entry:
    """An entry that read every offset of a range as a record and put a row of each in the sink."""
    count = end - start
    intake = Intake(records=count, digest=digest(range(start, end)))
    given = {"rows": count, "intake": intake, "routes": Routes(main=count), **more}
    return ledger.entry({PLACE: (start, end)}, **given)


def chain(*spans: tuple[int, int], sink: str = "files") -> list[Entry]:
    ledger = Ledger("shop", sink)
    return [ledger.opening({PLACE: spans[0][0]}), *(taking(ledger, start, end) for start, end in spans)]


def whats(findings: Iterable[Finding]) -> list[str]:
    return [each.what() for each in findings]


# ---------------------------------------------------------------------------- chains


def test_a_ledger_without_a_gap_says_where_the_sink_began_and_stands() -> None:
    found = follow("files", "parquet", "shop", chain((5, 9), (9, 9), (9, 20)))
    assert (dict(found.starts), found.unsure) == ({PLACE: 5}, frozenset())
    assert found.positions.at[PLACE].offset == 20
    assert not found.examined.findings
    assert not found.examined.unproven


def test_an_entry_that_is_missing_is_told_and_where_entries_are_pruned_it_is_only_unproven() -> None:
    entries = chain((0, 4), (4, 8), (8, 9), (9, 12))
    broken = [entries[0], entries[1], entries[4]]
    (finding,) = follow("files", "parquet", "shop", broken).examined.findings
    assert finding.what() == (
        "1 altered in files: entries 2 to 3 are missing in its ledger, with the rows they stand for"
    )
    pruned = follow("topic", "kafka", "shop", broken).examined
    assert not pruned.findings
    (unproven,) = pruned.unproven
    assert not unproven.is_gap


def test_a_ledger_whose_beginning_is_not_kept_is_unsure_of_it() -> None:
    entries = chain((0, 4), (4, 8))[2:]
    found = follow("topic", "kafka", "shop", entries)
    assert dict(found.starts) == {PLACE: 4}
    assert set(found.unsure) == {PLACE}


def test_a_partition_that_came_later_begins_with_its_own_first_entry() -> None:
    ledger = Ledger("shop", "files")
    entries = [ledger.opening({PLACE: 3}), taking(ledger, 3, 5), ledger.opening({OTHER: 7})]
    assert dict(follow("files", "parquet", "shop", entries).starts) == {PLACE: 3, OTHER: 7}


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (
            ((0, 4), (6, 8)),
            "2 altered orders-0 at 4-5 in files: entry 2 of its ledger leaves out these offsets",
        ),
        (((0, 4), (3, 8)), "1 altered orders-0 at 3 in files: entry 2 of its ledger repeats these offsets"),
    ],
)
def test_a_range_that_does_not_continue_the_one_before_is_told(
    spans: tuple[tuple[int, int], ...], words: str
) -> None:
    (what,) = whats(follow("files", "parquet", "shop", chain(*spans)).examined.findings)
    assert what.startswith(words)


def test_where_a_sink_was_added_the_ledgers_of_the_others_tell() -> None:
    dead, came = {"dead-letter": Reached(0, 0, "")}, {"later": Reached(0, 0, "")}
    entries = [replace(entry, others=dead) for entry in chain((0, 4), (4, 8), (8, 9))]
    named = [*entries[:2], *(replace(entry, others={**dead, **came}) for entry in entries[2:])]
    behind = [*named[:1], replace(named[1], others={**dead, **came})]
    assert added_at("later", [named]) == {PLACE: 4}
    assert added_at("later", [named, entries]) == {PLACE: 4}
    assert added_at("later", [named, behind]) == {PLACE: 0}, "it began where the one furthest behind stood"
    assert added_at("later", [named[2:]]) == {}, "what was before is not kept"
    assert added_at("later", [named, named[2:]]) == {PLACE: 4}, "one that came even later says nothing"
    assert added_at("later", [[replace(entry, others={}) for entry in named[:2]] + named[2:]]) == {}
    assert added_at("later", [entries]) == {}


def test_positions_that_do_not_follow_from_the_range_are_told() -> None:
    first, second = chain((0, 4))
    wrong = replace(second, positions=Positions({PLACE: Position(5, 0)}))
    (what,) = whats(follow("files", "parquet", "shop", [first, wrong]).examined.findings)
    assert "the positions of entry 1" in what


def test_an_entry_of_another_pipeline_or_another_incarnation_of_the_topic_is_told() -> None:
    first, second = chain((0, 4))
    (what,) = whats(
        follow("files", "parquet", "shop", [first, replace(second, pipeline="mall")]).examined.findings
    )
    assert "is of pipeline 'mall'" in what
    again = PLACE._replace(topic_id=UUID(int=2))
    ledger = Ledger("shop", "files", last=second)
    entries = [first, second, ledger.entry({again: (0, 2)}, rows=2)]
    whole = whats(follow("files", "parquet", "shop", entries).examined.findings)
    assert any("goes on in another topic named orders" in what for what in whole)


# ---------------------------------------------------------------------------- which entry is about what


@given(
    st.lists(st.lists(st.integers(1, 5), max_size=6), min_size=1, max_size=4),
    st.integers(0, 4),
    st.integers(0, 25),
)
def test_no_offset_is_covered_twice_and_none_is_left_out_that_some_ledger_has(
    cuts: list[list[int]], start: int, length: int
) -> None:
    chains: dict[str, list[Entry]] = {}
    for number, sizes in enumerate(cuts):
        bounds = np.cumsum([0, *sizes]).tolist()
        chains[f"sink-{number}"] = chain(*pairwise(bounds)) if sizes else []
    spans = {PLACE: (start, start + length)}
    chosen = cover(chains, spans)
    covered = [
        offset
        for entry in chosen
        for offset in range(entry.range.spans[PLACE].start, entry.range.spans[PLACE].end)
    ]
    assert len(covered) == len(set(covered))
    longest = max((sum(sizes) for sizes in cuts), default=0)
    first = max(
        (entries for entries in chains.values()), key=lambda entries: _taken(entries, spans), default=[]
    )
    assert _taken(chosen, spans) >= _taken(first, spans)
    assert set(covered) <= set(range(longest))


def _taken(entries: Iterable[Entry], spans: Mapping[Place, tuple[int, int]]) -> int:
    start, end = spans[PLACE]
    return sum(
        len(range(max(start, span.start), min(end, span.end)))
        for entry in entries
        for span in entry.range.spans.values()
    )


def test_an_entry_is_whole_when_all_it_took_is_in_the_scope() -> None:
    opening, entry = chain((4, 8))
    assert is_whole(entry, {PLACE: (4, 8)})
    assert not is_whole(entry, {PLACE: (5, 20)})
    assert not is_whole(entry, {PLACE: (0, 7)})
    assert not is_whole(opening, {PLACE: (0, 20)})


# ---------------------------------------------------------------------------- what entries counted


def books_of(
    codes: list[int],
    held: Iterable[int],
    routes: Mapping[Fate, Iterable[int]] | None = None,
    doubtful: Iterable[int] = (),
) -> Books:
    array = np.array(codes, np.uint8)
    walk = SourceWalk({PLACE: PartitionWalk(PLACE, 0, len(codes), array, np.zeros(len(codes), np.int32))})
    spans = {PLACE: (0, len(codes))}

    def holding(name: str, offsets: Iterable[int]) -> Holding:
        found = Holding(name, spans)
        listed = np.array(list(offsets), np.int64)
        found.add([LineageBatch("orders", 0, listed, np.zeros(len(listed), np.int32))])
        return found

    doubt = np.zeros(len(codes), np.bool_)
    doubt[list(doubtful)] = True
    return Books(
        walk,
        {
            fate: holding(str(fate), (routes or {}).get(fate, ()))
            for fate in (Fate.DEAD_LETTER, Fate.FILTERED, Fate.DUPLICATE, Fate.LATE)
        },
        {"files": holding("files", held)},
        {PLACE: doubt},
    )


def test_entries_that_say_what_is_there_pass() -> None:
    entries = chain((0, 4), (4, 10))
    books = books_of([RECORD] * 10, range(10))
    assert not check_intake(entries, books).findings
    assert not check_routes(entries, books, books.routes).findings
    assert not check_rows("files", entries, books).findings


def test_an_entry_that_read_something_else_than_the_log_has_is_told() -> None:
    ledger = Ledger("shop", "files")
    one_less = taking(ledger, 0, 4, intake=Intake(records=3, digest=digest([0, 1, 3])))
    others = taking(ledger, 4, 8, intake=Intake(records=4, digest=digest([4, 5, 6, 9])))
    books = books_of([RECORD] * 8, range(8))
    less, other = check_intake([one_less, others], books).findings
    assert (less.fate, less.ranges) == (Fate.ALTERED, ((0, 3),))
    assert "says that 3 records were read, and the log has 4" in less.detail
    assert (other.fate, other.ranges) == (Fate.ALTERED, ((4, 7),))
    assert other.detail.endswith("as many, but others")


def test_records_compacted_away_since_are_proven_by_the_digest_of_what_sinks_still_have() -> None:
    codes = [RECORD, COMPACTED, COMPACTED, RECORD]
    everything = taking(Ledger("shop", "files"), 0, 4)
    assert not check_intake([everything], books_of(codes, range(4))).findings
    filtered = books_of(codes, [0, 1, 3], {Fate.FILTERED: [2]})
    assert not check_intake([everything], filtered).findings
    (lost,) = check_intake([everything], books_of(codes, [0, 1, 3])).findings
    assert (lost.fate, lost.count) == (Fate.LOST, 1)
    assert "compacted away since" in lost.detail
    never_there = taking(Ledger("shop", "files"), 0, 4, intake=Intake(records=2, digest=digest([0, 3])))
    assert not check_intake([never_there], books_of(codes, [0, 3])).findings


def test_rows_of_offsets_that_were_in_no_batch_when_they_were_read_are_extra() -> None:
    codes = [RECORD, COMPACTED, RECORD, COMPACTED]
    intake = Intake(records=2, digest=digest([0, 2]))
    entry = taking(Ledger("shop", "files"), 0, 4, rows=2, intake=intake, routes=Routes(main=2))
    books = books_of(codes, [0, 1, 2])
    (extra,) = check_intake([entry], books).findings
    assert (extra.fate, extra.sink, extra.ranges) == (Fate.EXTRA, "files", ((1, 1),))
    assert not check_rows("files", [entry], books).findings, "told once"


def test_more_rows_of_compacted_offsets_than_records_were_compacted_are_extra() -> None:
    codes = [RECORD, COMPACTED, COMPACTED, RECORD]
    intake = Intake(records=3, digest=digest([0, 1, 3]))
    entry = taking(Ledger("shop", "files"), 0, 4, rows=3, intake=intake, routes=Routes(main=3))
    (extra,) = check_intake([entry], books_of(codes, range(4))).findings
    assert (extra.fate, extra.ranges) == (Fate.EXTRA, ((1, 2),))
    assert extra.detail.startswith("1 of these")


@pytest.mark.parametrize(
    ("held", "fate", "count"),
    [([0, 1, 2], Fate.LOST, 1), ([0, 1, 2, 3, 3], Fate.DUPLICATED, 1), ([0, 1, 2, 3], None, 0)],
)
def test_the_rows_of_an_entry_are_counted(held: list[int], fate: Fate | None, count: int) -> None:
    findings = check_rows("files", chain((0, 4)), books_of([RECORD] * 4, held)).findings
    assert [(each.fate, each.count) for each in findings] == ([] if fate is None else [(fate, count)])


def test_as_many_rows_of_other_records_are_found_by_the_digest_where_the_entry_has_one() -> None:
    digests = {"main": f"{digest([0, 1, 3]):016x}"}
    entry = taking(Ledger("shop", "files"), 0, 4, rows=3, routes=Routes(main=3), digests=digests)
    assert not check_rows("files", [entry], books_of([RECORD] * 4, [0, 1, 3])).findings
    (finding,) = check_rows("files", [entry], books_of([RECORD] * 4, [0, 1, 2])).findings
    assert finding.fate is Fate.ALTERED
    assert finding.detail.endswith("of other records")


def test_each_route_is_counted() -> None:
    routes = Routes(main=1, dead_letter={"parse": 1, "rule": 1}, filtered={"a": 1}, duplicate=1, late=1)
    entry = taking(Ledger("shop", "files"), 0, 6, rows=1, routes=routes)
    found = {Fate.DEAD_LETTER: [0, 1], Fate.FILTERED: [2], Fate.DUPLICATE: [3], Fate.LATE: [4]}
    books = books_of([RECORD] * 6, [5], found)
    assert not check_routes([entry], books, books.routes).findings
    for fate in found:
        short = books_of([RECORD] * 6, [5], {**found, fate: found[fate][1:]})
        (finding,) = check_routes([entry], short, short.routes).findings
        assert (finding.fate, finding.sink, finding.count) == (Fate.LOST, str(fate), 1)
        assert not check_routes([entry], short, [each for each in found if each is not fate]).findings


def test_what_is_explained_already_or_has_expired_is_not_told_again() -> None:
    entries = chain((0, 4))
    assert not check_rows("files", entries, books_of([RECORD] * 4, [0, 1, 2], doubtful=[3])).findings
    assert not check_rows("files", entries, books_of([EXPIRED, RECORD, RECORD, RECORD], [1, 2])).findings
