"""The comparison of rows with the log, against a model that goes record by record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from uuid import UUID

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.audit import compare
from holdfast.audit.compare import CODE, Holding, fates_of, judge, judge_routes, strays
from holdfast.audit.lineage import NOWHERE, LineageBatch, as_ranges, split_columns, split_struct
from holdfast.audit.model import Fate, Finding
from holdfast.audit.source import ABORTED, COMPACTED, CONTROL, EXPIRED, RECORD, PartitionWalk
from holdfast.pipeline.positions import Place

EXAMPLES = 50
PLACE = Place("orders", UUID(int=1), 0)
Row = tuple[int, int]
"""Offset and number."""


def walk_of(codes: Sequence[int], start: int = 0) -> PartitionWalk:
    array = np.array(codes, np.uint8)
    return PartitionWalk(PLACE, start, start + len(codes), array, np.zeros(len(codes), np.int32))


def batch_of(rows: Iterable[Row]) -> LineageBatch:
    listed = list(rows)
    offsets = np.array([offset for offset, _ in listed], np.int64)
    return LineageBatch(PLACE.topic, PLACE.partition, offsets, np.array([at for _, at in listed], np.int32))


def holding_of(name: str, rows: Iterable[Row], walk: PartitionWalk, *, numbers: bool = False) -> Holding:
    holding = Holding(name, {PLACE: (walk.start, walk.end)}, numbers_rows=numbers)
    listed = list(rows)
    holding.add([batch_of(listed[at : at + 3]) for at in range(0, len(listed), 3)])
    return holding


def offsets_in(findings: Iterable[Finding], fate: Fate) -> set[int]:
    return {
        offset
        for each in findings
        if each.fate is fate
        for first, last in each.ranges
        for offset in range(first, last + 1)
    }


CODES = st.lists(st.sampled_from([RECORD, RECORD, RECORD, CONTROL, ABORTED, COMPACTED]), max_size=24)


@settings(max_examples=EXAMPLES)
@given(CODES, st.integers(0, 5), st.data())
def test_a_sink_is_judged_as_a_model_judges_it_record_by_record(
    codes: list[int], start: int, data: st.DataObject
) -> None:
    walk = walk_of(codes, start)
    offset = st.integers(walk.start, max(walk.start, walk.end - 1))
    rows = st.lists(offset, max_size=2 * len(codes)) if codes else st.just([])
    held = data.draw(rows)
    dead = data.draw(rows)
    late = data.draw(rows)

    judged = judge(
        holding_of("sink", [(each, 0) for each in held], walk),
        [
            holding_of("dead_letter", [(each, 0) for each in dead], walk),
            holding_of("late", [(each, 0) for each in late], walk),
        ],
        walk,
    )

    have, gone = Counter(held), Counter(dead) + Counter(late)
    kinds = {walk.start + at: code for at, code in enumerate(codes)}
    assert offsets_in(judged.findings, Fate.LOST) == {
        each for each, code in kinds.items() if code == RECORD and not have[each] and not gone[each]
    }
    assert offsets_in(judged.findings, Fate.DUPLICATED) == {
        each for each in kinds if have[each] > 1 or (have[each] and gone[each])
    }
    assert offsets_in(judged.findings, Fate.EXTRA) == {
        each for each, code in kinds.items() if have[each] and code in (ABORTED, CONTROL)
    }


@settings(max_examples=EXAMPLES)
@given(CODES, st.data())
def test_routes_are_judged_as_a_model_judges_them(codes: list[int], data: st.DataObject) -> None:
    walk = walk_of(codes)
    rows = st.lists(st.integers(0, len(codes) - 1), max_size=len(codes)) if codes else st.just([])
    listed = [data.draw(rows) for _ in range(3)]
    routes = [
        holding_of(name, [(each, 0) for each in offsets], walk)
        for name, offsets in zip(("dead_letter", "filtered", "late"), listed, strict=True)
    ]

    judged = judge_routes(routes, walk)

    counts = [Counter(offsets) for offsets in listed]
    total = sum(counts, Counter())
    assert offsets_in(judged.findings, Fate.DUPLICATED) == {
        each for each, count in total.items() if count > 1
    }
    assert offsets_in(judged.findings, Fate.EXTRA) == {
        each for each in total if codes[each] in (ABORTED, CONTROL)
    }


@settings(max_examples=EXAMPLES)
@given(st.lists(st.integers(0, 4), max_size=8), st.data())
def test_rows_of_expanded_records_are_accounted_for_by_number(sizes: list[int], data: st.DataObject) -> None:
    """Some rows go to the sink, some are filtered with their number, some are dead letters without one; then one row
    may be dropped and one repeated."""
    walk = walk_of([RECORD] * len(sizes))
    rows = [(offset, number) for offset, size in enumerate(sizes) for number in range(max(1, size))]
    where = [data.draw(st.sampled_from(["sink", "filtered", "dead"])) for _ in rows]
    parts = {name: [row for row, at in zip(rows, where, strict=True) if at == name] for name in set(where)}
    numbered = [*parts.get("sink", []), *parts.get("filtered", [])]
    dropped = data.draw(st.sampled_from([None, *numbered])) if numbered else None
    repeated = data.draw(st.sampled_from([None, *numbered])) if numbered else None
    sink = [row for row in parts.get("sink", []) if row != dropped]
    filtered = [row for row in parts.get("filtered", []) if row != dropped]
    if repeated is not None and repeated != dropped:
        sink.append(repeated)

    judged = judge(
        holding_of("sink", sink, walk, numbers=True),
        [
            holding_of("filtered", filtered, walk, numbers=True),
            holding_of("dead_letter", [(offset, 0) for offset, _ in parts.get("dead", [])], walk),
        ],
        walk,
    )

    expected_lost = set()
    for offset in range(len(sizes)):
        numbers = {number for at, number in [*sink, *filtered] if at == offset}
        dead = sum(at == offset for at, _ in parts.get("dead", []))
        highest = max(numbers, default=-1)
        if (not numbers and not dead) or highest + 1 > len(numbers) + dead:
            expected_lost.add(offset)
    assert offsets_in(judged.findings, Fate.LOST) == expected_lost
    is_twice = repeated is not None and repeated != dropped
    assert offsets_in(judged.findings, Fate.DUPLICATED) == ({repeated[0]} if is_twice and repeated else set())


@settings(max_examples=EXAMPLES)
@given(CODES, st.data())
def test_every_record_has_one_fate_and_nothing_else_has_any(codes: list[int], data: st.DataObject) -> None:
    walk = walk_of(codes)
    rows = st.lists(st.integers(0, len(codes) - 1), max_size=len(codes)) if codes else st.just([])
    sink, dead, filtered = (
        holding_of(name, [(each, 0) for each in data.draw(rows)], walk)
        for name in ("sink", "dead_letter", "filtered")
    )
    judged = judge(sink, [dead, filtered], walk)
    routes = {Fate.DEAD_LETTER: dead, Fate.FILTERED: filtered}

    fates = fates_of(walk, routes, [sink], Fate.OUTPUT, [judged, judge_routes([dead, filtered], walk)])

    assert [code != compare.NO_FATE for code in fates.tolist()] == [code == RECORD for code in codes]
    lost = {at for at, code in enumerate(fates.tolist()) if code == CODE[Fate.LOST]}
    assert lost == offsets_in(judged.findings, Fate.LOST)


def test_one_row_lost_and_one_repeated_are_found_although_the_counts_agree() -> None:
    walk = walk_of([RECORD] * 5)
    judged = judge(holding_of("sink", [(0, 0), (1, 0), (1, 0), (3, 0), (4, 0)], walk), [], walk)
    assert [(each.fate, each.ranges, each.count) for each in judged.findings] == [
        (Fate.LOST, ((2, 2),), 1),
        (Fate.DUPLICATED, ((1, 1),), 1),
    ]


def test_a_record_many_times_in_a_sink_is_counted_and_does_not_wrap_around() -> None:
    walk = walk_of([RECORD, RECORD])
    holding = Holding("sink", {PLACE: (0, 2)})
    holding.add([batch_of([(0, 0)] * 70_000), batch_of([(0, 0), (1, 0)])])
    judged = judge(holding, [], walk)
    assert [(each.fate, each.count) for each in judged.findings] == [(Fate.DUPLICATED, compare.COUNT_MAX - 1)]


def test_offsets_that_have_expired_are_judged_by_nobody() -> None:
    walk = walk_of([EXPIRED, EXPIRED, RECORD])
    judged = judge(holding_of("sink", [(0, 0), (2, 0)], walk), [], walk)
    assert judged.findings == []


def test_a_sink_that_began_later_owes_nothing_from_before() -> None:
    walk = walk_of([RECORD] * 6, 10)
    judged = judge(holding_of("sink", [(14, 0)], walk), [], walk, since=13)
    assert offsets_in(judged.findings, Fate.LOST) == {13, 15}


def test_rows_of_nobody_are_extra() -> None:
    holding = Holding("sink", {PLACE: (10, 20)})
    holding.add(
        [
            batch_of([(5, 0), (12, 0), (25, 0), (31, 0), (40, 0), (13, 2)]),
            LineageBatch("others", 3, np.array([7, 8, 8]), np.zeros(3, np.int32)),
            LineageBatch(NOWHERE, -1, np.array([-1]), np.zeros(1, np.int32)),
        ]
    )
    exact = strays(holding, {PLACE: 30}, {PLACE: 40}, is_exact=True)
    assert [(each.place, each.ranges, each.count) for each in exact] == [
        (None, (), 1),
        (None, ((7, 8),), 3),
        (PLACE, ((13, 13),), 1),
        (PLACE, ((40, 40),), 1),
        (PLACE, ((31, 31),), 1),
    ]
    assert {each.fate for each in exact} == {Fate.EXTRA}
    assert 5 not in np.concatenate(holding.beyond[PLACE])
    moving = strays(holding, {PLACE: 30}, {PLACE: 40}, is_exact=False)
    assert (PLACE, ((31, 31),)) not in [(each.place, each.ranges) for each in moving]


def test_a_finding_keeps_its_count_when_its_ranges_are_cut_short() -> None:
    walk = walk_of([RECORD, RECORD] * 1500)
    judged = judge(holding_of("sink", [(at, 0) for at in range(0, 3000, 2)], walk), [], walk)
    (lost,) = judged.findings
    assert (lost.count, len(lost.ranges)) == (1500, compare.RANGES_MAX)


@given(st.lists(st.integers(0, 60)))
def test_ranges_name_each_offset_once(offsets: list[int]) -> None:
    ranges = as_ranges(np.array(sorted(offsets), np.int64))
    assert [each for first, last in ranges for each in range(first, last + 1)] == sorted(set(offsets))
    assert all(one[1] + 1 < other[0] for one, other in pairwise(ranges))


LINEAGE = st.lists(
    st.one_of(
        st.none(),
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3), st.integers(0, 99), st.integers(0, 2)),
    ),
    max_size=40,
)


@given(LINEAGE)
def test_lineage_is_split_by_partition_and_nothing_is_dropped(
    rows: list[tuple[str, int, int, int] | None],
) -> None:
    kind = pa.struct(
        [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("index", pa.int32())]
    )
    names = ("topic", "partition", "offset", "index")
    column = pa.array([None if row is None else dict(zip(names, row, strict=True)) for row in rows], kind)

    found: Counter[tuple[str, int, int, int] | None] = Counter()
    for batch in split_struct(column):
        for offset, index in zip(batch.offsets.tolist(), batch.indexes.tolist(), strict=True):
            is_known = batch.topic != NOWHERE
            found[(batch.topic, batch.partition, offset, index) if is_known else None] += 1

    assert found == Counter(rows)


def test_many_changes_of_partition_are_sorted_first() -> None:
    size = 4000
    numbers = np.arange(size)
    batches = list(
        split_columns(
            pa.array(["t"] * size),
            pa.array(numbers % 2, pa.int32()),
            pa.array(numbers),
            pa.array(np.zeros(size), pa.int32()),
        )
    )
    assert [(batch.partition, len(batch)) for batch in batches] == [(0, size // 2), (1, size // 2)]
    assert batches[0].offsets.tolist() == list(range(0, size, 2))
