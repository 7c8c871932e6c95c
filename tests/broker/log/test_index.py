"""Offset and time indexes: lookups against a plain list, files against every cut and flip."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.broker.log.index import NO_TIMESTAMP, POSITION_MAX, RELATIVE_OFFSET_MAX, OffsetIndex, TimeIndex
from holdfast.errors import CorruptLog, UsageError

BASE = 5_000_000_000
"""Past 2^32: only relative offsets fit the file."""

Pairs: TypeAlias = list[tuple[int, int]]

steps = st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 100_000)), max_size=60)


def offset_pairs(increments: Pairs) -> Pairs:
    """(offset, position) entries from increments."""
    offset, position, pairs = BASE, 0, []
    for offset_step, position_step in increments:
        offset += offset_step
        position += position_step
        pairs.append((offset, position))
    return pairs


def near(values: list[int]) -> st.SearchStrategy[int]:
    """One of `values`, or its neighbour: where a lookup could be off by one."""
    return st.builds(int.__add__, st.sampled_from(values), st.integers(-1, 1))


def offset_index(increments: Pairs) -> OffsetIndex:
    index = OffsetIndex(BASE)
    for offset, position in offset_pairs(increments):
        index.append(offset, position)
    return index


def time_index(increments: Pairs) -> TimeIndex:
    index = TimeIndex(BASE)
    for offset, timestamp in offset_pairs(increments):
        assert index.append(1_700_000_000_000 + timestamp, offset)
    return index


# ---- offsets


@given(steps, st.data())
def test_offset_lookup_finds_the_greatest_entry_at_or_below(increments: Pairs, data: st.DataObject) -> None:
    target = data.draw(near([BASE, *(offset for offset, _ in offset_pairs(increments))]))
    expected = [pair for pair in offset_pairs(increments) if pair[0] <= target]
    assert offset_index(increments).lookup(target) == (expected[-1] if expected else (BASE, 0))


@given(steps, st.data())
def test_offset_at_or_after_a_position(increments: Pairs, data: st.DataObject) -> None:
    position = data.draw(near([0, *(position for _, position in offset_pairs(increments))]))
    expected = [offset for offset, start in offset_pairs(increments) if start >= position]
    assert offset_index(increments).offset_at_or_after(position) == (expected[0] if expected else None)


@given(steps)
def test_offset_index_survives_its_file(increments: Pairs) -> None:
    index = offset_index(increments)
    data = index.to_bytes()
    assert len(data) == 8 * len(increments)
    again = OffsetIndex.from_bytes(data, BASE)
    assert list(again.entries) == list(index.entries) == offset_pairs(increments)
    assert again.last_entry == index.last_entry


def test_offset_index_file_is_kafkas() -> None:
    index = OffsetIndex(100)
    index.append(109, 4200)
    index.append(100 + RELATIVE_OFFSET_MAX, POSITION_MAX)
    assert index.to_bytes() == bytes.fromhex("00000009 00001068 7fffffff 7fffffff")


@given(steps, st.integers(0, 50))
def test_zeros_after_the_entries_are_a_file_allocated_ahead(increments: Pairs, padding: int) -> None:
    data = offset_index(increments).to_bytes() + bytes(8 * padding)
    assert list(OffsetIndex.from_bytes(data, BASE).entries) == offset_pairs(increments)


@pytest.mark.parametrize(
    ("offset", "position"),
    [
        (BASE + 10, 200),
        (BASE + 9, 200),
        (BASE + 11, 100),
        (BASE + 11, 99),
        (BASE - 1, 200),
        (BASE + RELATIVE_OFFSET_MAX + 1, 200),
        (BASE + 11, POSITION_MAX + 1),
    ],
)
def test_an_entry_that_does_not_follow_or_fit_is_refused_and_changes_nothing(
    offset: int, position: int
) -> None:
    index = OffsetIndex(BASE)
    index.append(BASE + 10, 100)
    with pytest.raises(UsageError):
        index.append(offset, position)
    assert list(index.entries) == [(BASE + 10, 100)]


@pytest.mark.parametrize(
    "damaged",
    [
        "00000009 000010",  # a cut entry
        "00000009 00001068 00000009 00002000",  # the same offset again
        "00000009 00001068 0000000a 00001068",  # the same position again
        "00000009 00001068 00000008 00002000",
        "00000000 00000000 00000009 00001068 00000000 00000001",
        "ffffffff 00001068",  # negative
        "00000009 80000000",
    ],
)
def test_an_offset_index_no_append_wrote_is_corrupt(damaged: str) -> None:
    with pytest.raises(CorruptLog, match=str(BASE)):
        OffsetIndex.from_bytes(bytes.fromhex(damaged), BASE)


# ---- timestamps


@given(steps, st.data())
def test_time_lookup_finds_the_greatest_entry_at_or_below(increments: Pairs, data: st.DataObject) -> None:
    index = time_index(increments)
    target = data.draw(near([1_700_000_000_000, *(timestamp for timestamp, _ in index.entries)]))
    expected = [entry for entry in index.entries if entry[0] <= target]
    assert index.lookup(target) == (expected[-1] if expected else (NO_TIMESTAMP, BASE))


def test_a_timestamp_that_is_not_larger_is_no_news() -> None:
    index = TimeIndex(BASE)
    assert not index.append(NO_TIMESTAMP, BASE)
    assert index.append(50, BASE + 3)
    assert not index.append(50, BASE + 9)
    assert not index.append(49, BASE + 9)
    assert list(index.entries) == [(50, BASE + 3)]


@pytest.mark.parametrize("offset", [BASE + 2, BASE + RELATIVE_OFFSET_MAX + 1])
def test_a_time_entry_for_an_offset_that_falls_or_does_not_fit_is_refused(offset: int) -> None:
    index = TimeIndex(BASE)
    index.append(50, BASE + 3)
    with pytest.raises(UsageError):
        index.append(60, offset)
    assert list(index.entries) == [(50, BASE + 3)]


def test_time_index_file_is_kafkas() -> None:
    index = TimeIndex(100)
    index.append(1_700_000_000_000, 109)
    assert index.to_bytes() == bytes.fromhex("0000018bcfe56800 00000009")


@given(steps, st.integers(0, 50), st.booleans())
def test_time_index_survives_its_file(increments: Pairs, padding: int, has_untimed: bool) -> None:
    index = time_index(increments)
    index.has_untimed = has_untimed
    again = TimeIndex.from_bytes(index.to_bytes() + (bytes(12 * padding) if increments else b""), BASE)
    assert (list(again.entries), again.has_untimed) == (list(index.entries), has_untimed)


def test_a_single_time_entry_of_zeros_is_an_entry_and_many_are_none() -> None:
    index = TimeIndex(BASE)
    index.append(0, BASE)
    for index.has_untimed in (False, True):
        assert list(TimeIndex.from_bytes(index.to_bytes(), BASE).entries) == [(0, BASE)]
    assert not list(TimeIndex.from_bytes(bytes(12 * 3), BASE).entries)


@pytest.mark.parametrize(
    "damaged",
    [
        "0000018bcfe56800 000000",
        "0000018bcfe56800 00000009 0000018bcfe56800 0000000a",
        "0000018bcfe56800 00000009 0000018bcfe56801 00000008",
        "ffffffffffffffff 00000009",
        "0000018bcfe56800 ffffffff",
    ],
)
def test_a_time_index_no_append_wrote_is_corrupt(damaged: str) -> None:
    with pytest.raises(CorruptLog, match=str(BASE)):
        TimeIndex.from_bytes(bytes.fromhex(damaged), BASE)


# ---- files


@given(steps, st.data(), st.booleans())
def test_a_damaged_file_gives_ordered_entries_or_corrupt(
    increments: Pairs, data: st.DataObject, is_time: bool
) -> None:
    index = time_index(increments) if is_time else offset_index(increments)
    content = bytearray(index.to_bytes())
    if content and data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = bytes(content[: data.draw(st.integers(0, len(content)))])
    read: Callable[[bytes, int], OffsetIndex | TimeIndex] = (
        TimeIndex.from_bytes if is_time else OffsetIndex.from_bytes
    )
    try:
        entries = list(read(cut, BASE).entries)
    except CorruptLog:
        return
    assert entries == sorted(entries)
    assert all((entry[1] if is_time else entry[0]) >= BASE for entry in entries)
