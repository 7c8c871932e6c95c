"""Values of records against values of rows: held against a plain model."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.audit.matched_values import Buckets, MatchedValues, Outcome, Zone
from holdfast.audit.model import Fate
from holdfast.pipeline.scratch import LONG_BYTES, MEMORY_BYTES, ScratchDatabase, shortened

Record = tuple[bytes | None, int, Zone]
"""A value, its partition and zone; its offset is its place in the list."""

values = st.one_of(st.none(), st.sampled_from([b"", b"a", b"b", b"cc", b"ddd", b"\x00"]))
record_lists = st.lists(st.tuples(values, st.integers(0, 1), st.sampled_from(list(Zone))), max_size=25)
row_lists = st.lists(values, max_size=25)


def compared(
    records: list[Record],
    rows: list[bytes | None],
    *,
    is_distinct: bool = False,
    nulls_apart: bool = False,
    memory_bytes: int = MEMORY_BYTES,
) -> Outcome:
    with (
        TemporaryDirectory() as directory,
        ScratchDatabase(directory, memory_bytes=memory_bytes) as database,
    ):
        found = MatchedValues(database)
        for offset, (value, place, zone) in enumerate(records):
            at = np.array([offset])
            found.add_records(pa.array([value], pa.large_binary()), place, zone, at, 1000 * at)
        found.add_rows(pa.array(rows, pa.large_binary()), 0, np.arange(len(rows)))
        buckets = Buckets.between(0, 1000 * len(records))
        outcome = found.compare(buckets, is_distinct=is_distinct, nulls_apart=nulls_apart)
        assert [name for name in os.listdir(directory) if not name.startswith("duckdb_temp")] == []
        return outcome


def offsets(found: dict[int, np.ndarray]) -> list[int]:
    return sorted(int(each) for part in found.values() for each in part)


@settings(max_examples=examples(30), deadline=None)
@given(record_lists, row_lists)
def test_what_is_lost_twice_and_extra_is_what_the_counts_say(
    records: list[Record], rows: list[bytes | None]
) -> None:
    outcome = compared(records, rows)
    scope = Counter(value for value, _, zone in records if zone is Zone.SCOPE)
    before = Counter(value for value, _, zone in records if zone is Zone.BEFORE)
    everywhere = Counter(value for value, _, _ in records)
    there = Counter(rows)
    lost = offsets(outcome.lost)
    assert Counter(records[each][0] for each in lost) == scope - there
    assert all(records[each][2] is Zone.SCOPE for each in lost)
    known = Counter({value: count for value, count in there.items() if everywhere[value]})
    assert sum(outcome.duplicated_rows.values()) == (known - everywhere).total()
    assert {records[each][0] for each in offsets(outcome.duplicated)} == set(known - everywhere)
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


@settings(max_examples=examples(30), deadline=None)
@given(record_lists, row_lists)
def test_where_one_row_stands_for_a_value_the_last_record_counts(
    records: list[Record], rows: list[bytes | None]
) -> None:
    outcome = compared(records, rows, is_distinct=True)
    scope = [each for each, record in enumerate(records) if record[2] is Zone.SCOPE]
    last = {records[each][0]: each for each in sorted(scope, key=lambda each: (records[each][1], each))}
    everywhere, there = {record[0] for record in records}, Counter(rows)
    assert offsets(outcome.lost) == sorted(each for value, each in last.items() if value not in there)
    assert sum(outcome.duplicated_rows.values()) == sum(
        count - 1 for value, count in there.items() if value in everywhere
    )
    counts: Counter[Fate] = Counter()
    for fates in outcome.fates.values():
        counts.update(fates)
    assert counts.total() == len(scope)


def test_null_rows_that_nobody_explains_are_counted_apart_where_asked() -> None:
    outcome = compared([(b"a", 0, Zone.SCOPE)], [None, None, b"x"], nulls_apart=True)
    assert (outcome.null_rows, outcome.extra, outcome.extra_values.to_pylist()) == (2, 1, [b"x"])
    assert compared([(b"a", 0, Zone.SCOPE)], [None, None, b"x"]).extra == 3


@pytest.mark.check
def test_more_than_memory_holds_is_compared_in_files(tmp_path: Path) -> None:
    count = 400_000
    numbers = np.arange(count)
    values = pa.array([b"%032d" % each for each in range(count)], pa.large_binary())
    with ScratchDatabase(str(tmp_path), memory_bytes=32 << 20) as database:
        found = MatchedValues(database)
        found.add_rows(values.slice(1).take(pa.array(numbers[: count - 1][::-1])), 0, numbers[1:])
        found.add_records(values, 0, Zone.SCOPE, numbers, numbers)
        outcome = found.compare(Buckets.between(0, count))
        spilled = sum(each.stat().st_size for each in tmp_path.iterdir())
    assert spilled > 1 << 20
    assert offsets(outcome.lost) == [0]
    assert (outcome.extra, outcome.duplicated_rows) == (0, {})


@pytest.mark.check
def test_long_values_are_told_apart_to_their_last_byte_in_little_memory(tmp_path: Path) -> None:
    long = b"x" * 200_000
    values = [b"%06d" % each + long for each in range(300)]
    rows: list[bytes | None] = [*values[:-2], values[-2][:-1] + b"y"]
    outcome = compared([(each, 0, Zone.SCOPE) for each in values], rows, memory_bytes=32 << 20)
    assert offsets(outcome.lost) == [298, 299]
    assert outcome.extra == 1
    assert outcome.extra_examples[0].value is not None
    assert outcome.extra_examples[0].value.startswith(b"000298xxx")


@pytest.mark.parametrize("length", [0, 1, LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 1, 10 * LONG_BYTES])
def test_no_short_value_is_a_long_one(length: int) -> None:
    value = b"\0" * length
    [short] = shortened(pa.array([value], pa.large_binary())).to_pylist()
    assert (short == value) == (length < LONG_BYTES)
    assert len(short) == min(length, LONG_BYTES)
    [again] = shortened(pa.array([short], pa.large_binary())).to_pylist()
    assert length < LONG_BYTES or again != short  # what looks like a digest is a value of its own


def test_times_fall_into_few_buckets() -> None:
    buckets = Buckets.between(1_000, 1_000_000)
    assert buckets.count <= 200
    numbers = np.zeros(buckets.count, np.int64)
    numbers[0] = 1
    assert buckets.timeline({Fate.OUTPUT: numbers}).starts_ms[0] == 1_000
