"""Values of records against values of rows: held against a plain model, in memory and dealt out to files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit.heaps import (
    RECORD_COLUMNS,
    ROW_COLUMNS,
    Buckets,
    Heap,
    Outcome,
    Zone,
    buckets_of,
    compare,
)
from holdfast.audit.model import Fate
from holdfast.pipeline.dealt import BUCKETS

Record = tuple[bytes | None, int, Zone]
"""A value, its partition and zone; its offset is its place in the list."""

values = st.one_of(st.none(), st.sampled_from([b"", b"a", b"b", b"cc", b"ddd", b"\x00"]))
record_lists = st.lists(st.tuples(values, st.integers(0, 1), st.sampled_from(list(Zone))), max_size=25)
row_lists = st.lists(values, max_size=25)


def compared(
    records: list[Record],
    rows: list[bytes | None],
    directory: str,
    in_memory: int,
    *,
    is_distinct: bool = False,
) -> Outcome:
    mine = Heap(RECORD_COLUMNS, f"{directory}/records", bytes_in_memory=in_memory)
    theirs = Heap(ROW_COLUMNS, f"{directory}/rows", bytes_in_memory=in_memory)
    for offset, (value, place, zone) in enumerate(records):
        numbers = {"place": place, "offset": offset, "zone": int(zone), "time_ms": 1000 * offset}
        mine.add(
            pa.array([value], pa.large_binary()), {name: np.array([each]) for name, each in numbers.items()}
        )
    theirs.add(
        pa.array(rows, pa.large_binary()),
        {"source": np.zeros(len(rows), np.int64), "row": np.arange(len(rows))},
    )
    return compare(mine, theirs, Buckets.between(0, 1000 * len(records)), is_distinct=is_distinct)


def offsets(outcome: Outcome, found: dict[int, list[np.ndarray]]) -> list[int]:
    return sorted(int(each) for place in found for each in outcome.offsets(found, place))


@given(record_lists, row_lists, st.sampled_from([0, 10**9]))
def test_what_is_lost_twice_and_extra_is_what_the_counts_say(
    records: list[Record], rows: list[bytes | None], in_memory: int
) -> None:
    with TemporaryDirectory() as directory:
        outcome = compared(records, rows, directory, in_memory)
        assert list(Path(directory).rglob("*.arrow")) == []
    scope = Counter(value for value, _, zone in records if zone is Zone.SCOPE)
    before = Counter(value for value, _, zone in records if zone is Zone.BEFORE)
    everywhere = Counter(value for value, _, _ in records)
    there = Counter(rows)
    lost = offsets(outcome, outcome.lost)
    assert Counter(records[each][0] for each in lost) == scope - there
    assert all(records[each][2] is Zone.SCOPE for each in lost)
    known = Counter({value: count for value, count in there.items() if everywhere[value]})
    assert sum(outcome.duplicated_rows.values()) == (known - everywhere).total()
    assert {records[each][0] for each in offsets(outcome, outcome.duplicated)} == set(known - everywhere)
    assert outcome.extra == sum(count for value, count in there.items() if not everywhere[value])
    assert outcome.unsure == sum(
        min(scope[value], max(0, before[value] + scope[value] - there[value]))
        for value in scope
        if there[value] >= scope[value]
    )
    total = sum(sum(fates.values()) for fates in outcome.fates.values())
    assert total == scope.total()
    assert sum(int(times.sum()) for times in outcome.times.values()) == total
    assert outcome.rows == len(rows)


@given(record_lists, row_lists)
def test_where_one_row_stands_for_a_value_the_last_record_counts(
    records: list[Record], rows: list[bytes | None]
) -> None:
    with TemporaryDirectory() as directory:
        outcome = compared(records, rows, directory, 10**9, is_distinct=True)
    scope = [each for each, record in enumerate(records) if record[2] is Zone.SCOPE]
    last = {records[each][0]: each for each in scope}
    everywhere, there = {record[0] for record in records}, Counter(rows)
    assert offsets(outcome, outcome.lost) == sorted(
        each for value, each in last.items() if value not in there
    )
    assert sum(outcome.duplicated_rows.values()) == sum(
        count - 1 for value, count in there.items() if value in everywhere
    )
    counts: Counter[Fate] = Counter()
    for fates in outcome.fates.values():
        counts.update(fates)
    assert counts.total() == len(scope)


@given(st.lists(st.one_of(st.none(), st.binary(max_size=20)), min_size=1, max_size=50))
def test_equal_values_meet_in_one_bucket_wherever_they_stand(found: list[bytes | None]) -> None:
    array = pa.array([None, b"x" * 7, *found], pa.large_binary())
    numbers = buckets_of(array.slice(2))
    assert all(0 <= number < BUCKETS for number in numbers)
    alone = [int(buckets_of(pa.array([value], pa.large_binary()))[0]) for value in found]
    assert numbers.tolist() == alone


def test_many_values_are_dealt_out_evenly() -> None:
    numbers = buckets_of(pa.array([str(each).encode() for each in range(64_000)], pa.large_binary()))
    counts = np.bincount(numbers, minlength=BUCKETS)
    assert counts.min() > 500
    assert counts.max() < 1500


def test_times_fall_into_few_buckets() -> None:
    buckets = Buckets.between(1_000, 1_000_000)
    assert buckets.count <= 200
    counted = buckets.counted(np.array([1_000, 1_000_000, 999_999]))
    assert (counted[0], counted[-1]) == (1, 2)
    assert buckets.timeline({Fate.OUTPUT: counted}).starts_ms[0] == 1_000
