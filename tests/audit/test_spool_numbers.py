"""The numbers of spools: ranges, repeats and order against a plain model."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit.spool_numbers import Line, Sequences, SpoolLines, count_of, merged, without
from holdfast.reader import SCHEMA

SPOOL = "00112233445566ff"
ranges = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 5)).map(lambda made: (made[0], made[0] + made[1]))
)


def numbers_of(found: list[tuple[int, int]]) -> set[int]:
    return {number for first, last in found for number in range(first, last + 1)}


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=10), max_size=6))
def test_numbers_that_were_seen_are_told_whatever_batches_they_came_in(batches: list[list[int]]) -> None:
    seen = Sequences()
    offset = 0
    for batch in batches:
        seen.add(np.array(batch, np.int64), np.arange(offset, offset + len(batch)))
        offset += len(batch)
    every = [number for batch in batches for number in batch]
    assert numbers_of(seen.ranges) == set(every)
    assert seen.ranges == merged(seen.ranges)
    assert (seen.distinct, seen.repeated) == (len(set(every)), len(every) - len(set(every)))
    late = [
        place
        for place, number in enumerate(every)
        if number not in every[:place] and any(other > number for other in every[:place])
    ]
    assert seen.backwards == len(late)
    assert seen.backwards_at == (late[0] if late else -1)
    end = 35
    assert numbers_of(seen.gaps(0, end)) == set(range(end)) - set(every)
    assert numbers_of(seen.gaps(10, 20)) == set(range(10, 20)) - set(every)


@given(ranges, ranges)
def test_ranges_without_others(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    mine = merged(one)
    left = without(mine, other)
    assert numbers_of(left) == numbers_of(one) - numbers_of(other)
    assert count_of(mine) == len(numbers_of(one))


def batch(ids: list[bytes | None], partition: int = 0) -> pa.RecordBatch:
    count = len(ids)
    headers = [
        [] if each is None else [{"key": "x", "value": b"y"}, {"key": "hf-id", "value": each}] for each in ids
    ]
    columns = {
        "key": [None] * count,
        "value": [b""] * count,
        "topic": ["orders"] * count,
        "partition": [partition] * count,
        "offset": list(range(count)),
        "timestamp": [0] * count,
        "timestampType": [0] * count,
        "headers": headers,
    }
    schema = SCHEMA()
    return pa.record_batch(
        [pa.array(columns[name], schema.field(name).type) for name in schema.names], schema
    )


def test_ids_are_read_from_headers_and_what_is_none_is_counted() -> None:
    lines = SpoolLines()
    other = "ff00000000000000"
    ids = [f"{SPOOL}:0:0", None, f"{other}:0:7", f"{SPOOL}:0:1", "nonsense", f"{SPOOL}:0:1"]
    lines.take(batch([None if each is None else each.encode() for each in ids]))
    lines.take(batch([b"\xff\xfe"]))
    assert lines.lines[Line(SPOOL, "orders", 0)].ranges == [(0, 1)]
    assert lines.lines[Line(SPOOL, "orders", 0)].repeated == 1
    assert lines.lines[Line(other, "orders", 0)].ranges == [(7, 7)]
    assert (lines.unnumbered, lines.strange) == ({"orders": 1}, {"orders": 2})


@pytest.mark.parametrize(("partition", "expected"), [(0, 1), (1, 0)])
def test_order_means_something_only_in_the_partition_that_was_counted(partition: int, expected: int) -> None:
    lines = SpoolLines()
    lines.take(batch([f"{SPOOL}:0:{number}".encode() for number in (0, 2, 1)], partition))
    assert lines.lines[Line(SPOOL, "orders", 0)].backwards == expected


def test_numbers_go_on_over_the_openings_of_a_spool_and_undecided_messages_have_their_own() -> None:
    lines = SpoolLines()
    ids = [f"{SPOOL}:0:0", f"{SPOOL}:0000000a:orders:0:1", f"{SPOOL}:0000000b:orders:0:2"]
    undecided = [f"{SPOOL}:0000000a:orders:0:u{number}" for number in (0, 3)]
    lines.take(batch([each.encode() for each in ids + undecided]))
    lines.take(batch([f"{SPOOL}:0000000a:orders:1:u{number}".encode() for number in (1, 2)], 1))
    assert lines.lines[Line(SPOOL, "orders", 0)].ranges == [(0, 2)]
    assert lines.lines[Line(SPOOL, "orders", -1)].ranges == [(0, 3)]
    assert lines.strange == {}
