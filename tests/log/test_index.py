"""Offset and time indexes: lookups against a plain list, files against every cut and flip."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CorruptLog, UsageError
from holdfast.log.index import NO_TIMESTAMP, POSITION_MAX, RELATIVE_OFFSET_MAX, OffsetIndex, TimeIndex
from holdfast.testing.disk import Fault, SimulatedDisk

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
    assert len(data) == 8 * len(increments) == index.size_bytes
    again = OffsetIndex.from_bytes(data, BASE)
    assert list(again.entries) == list(index.entries) == offset_pairs(increments)
    assert again.last_entry == index.last_entry


def test_offset_index_file_is_kafkas() -> None:
    index = OffsetIndex(100)
    index.append(109, 4200)
    index.append(100 + RELATIVE_OFFSET_MAX, POSITION_MAX)
    assert index.to_bytes() == bytes.fromhex("00000009 00001068 7fffffff 7fffffff")


@given(steps, st.data())
def test_offset_truncation_forgets_the_offset_and_above(increments: Pairs, data: st.DataObject) -> None:
    offset = data.draw(near([BASE, *(offset for offset, _ in offset_pairs(increments))]))
    index = offset_index(increments)
    index.truncate_to(offset)
    assert list(index.entries) == [pair for pair in offset_pairs(increments) if pair[0] < offset]


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


def test_can_hold_says_when_a_segment_must_roll() -> None:
    index = OffsetIndex(BASE)
    assert index.can_hold(BASE)
    assert index.can_hold(BASE + RELATIVE_OFFSET_MAX)
    assert not index.can_hold(BASE + RELATIVE_OFFSET_MAX + 1)
    assert not index.can_hold(BASE - 1)


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


@given(steps, st.data())
def test_time_truncation_forgets_the_offset_and_above(increments: Pairs, data: st.DataObject) -> None:
    index = time_index(increments)
    offset = data.draw(near([BASE, *(offset for _, offset in index.entries)]))
    expected = [entry for entry in index.entries if entry[1] < offset]
    index.truncate_to(offset)
    assert list(index.entries) == expected


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


@given(steps, st.data())
def test_sync_writes_what_the_file_lacks_and_cuts_the_rest(increments: Pairs, data: st.DataObject) -> None:
    disk = SimulatedDisk()
    disk.prepare("/data")
    file = disk.open("/data/index", "create")
    file.pwritev([b"left over from before"], 0)
    index = OffsetIndex(BASE)
    for offset, position in offset_pairs(increments):
        index.append(offset, position)
        match data.draw(st.sampled_from(["append", "sync", "truncate"])):
            case "sync":
                index.sync_to(file)
                assert file.pread(file.size(), 0) == index.to_bytes()
                assert index.is_synced
            case "truncate":
                index.truncate_to(data.draw(st.integers(BASE, offset)))
                if data.draw(st.booleans()):
                    break
    index.sync_to(file)
    assert file.pread(file.size(), 0) == index.to_bytes()
    reread = OffsetIndex.from_bytes(index.to_bytes(), BASE)
    assert reread.is_synced


def test_sync_costs_one_write_for_many_entries_and_none_without_news(disk: SimulatedDisk) -> None:
    file = disk.open("/data/index", "create")
    index = offset_index([(1, 1)] * 1000)
    index.sync_to(file)
    index.sync_to(file)
    assert disk.operations["write"] == 1


def test_a_sync_that_failed_half_way_is_repaired_by_the_next(disk: SimulatedDisk) -> None:
    file = disk.open("/data/index", "create")
    index = offset_index([(1, 1)] * 100)
    index.sync_to(file)
    index.append(BASE + 1000, 1000)
    index.append(BASE + 2000, 2000)
    disk.plan(Fault("write", partial=True))
    with pytest.raises(OSError):
        index.sync_to(file)
    index.truncate_to(BASE + 2000)
    index.sync_to(file)
    assert file.pread(file.size(), 0) == index.to_bytes()


def test_a_file_allocated_ahead_is_cut_by_the_next_sync(disk: SimulatedDisk) -> None:
    file = disk.open("/data/index", "create")
    file.pwritev([offset_index([(5, 5)]).to_bytes() + bytes(80)], 0)
    index = OffsetIndex.from_bytes(file.pread(1000, 0), BASE)
    index.sync_to(file)
    assert file.size() == 8


def test_a_forgotten_file_is_written_whole(disk: SimulatedDisk) -> None:
    index = offset_index([(1, 1)] * 3)
    index.sync_to(disk.open("/data/old", "create"))
    index.forget_file()
    file = disk.open("/data/new", "create")
    index.sync_to(file)
    assert file.pread(100, 0) == index.to_bytes()
    index.clear()
    index.sync_to(file)
    assert file.size() == 0
