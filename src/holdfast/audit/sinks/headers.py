"""Headers of many records at once: where a record came from, without a Python object for each.

A batch of records has its headers as one list of names and values behind the other. What is looked for is found by
comparing all names at once. Values (`topic:partition@offset#index`) are taken apart by Arrow; a batch in which one is
no text, or has a number beyond 64 bits, goes through a slower, exact way that names no place for those.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[np.int64]

SOURCE: Final = re.compile(
    rb"(?s)(?P<topic>.+):(?P<partition>\d{1,10})@(?P<offset>\d{1,19})#(?P<index>\d{1,10})"
)
DIGITS_MAX: Final = 18
"""More may not fit 64 bits."""
DIGITS: Final = rf"\A\d{{1,{DIGITS_MAX}}}\z"


class Places(NamedTuple):
    """Of each record: where it came from; -1 and null where it does not say."""

    topics: pa.Array
    """A dictionary of strings."""
    partitions: Numbers
    offsets: Numbers
    indexes: Numbers

    def columns(self) -> dict[str, pa.Array]:
        """As the columns of lineage that rows in tables have."""
        return {
            "_hf_topic": self.topics.dictionary_decode(),
            "_hf_partition": pa.array(self.partitions, pa.int32()),
            "_hf_offset": pa.array(self.offsets, pa.int64()),
            "_hf_index": pa.array(self.indexes, pa.int32()),
        }


def flat_headers(column: pa.Array) -> tuple[pa.Array, pa.Array, Numbers]:
    """Names and values of all headers of a column, one behind the other, and where each record's begin and end."""
    if column.null_count:
        column = pc.fill_null(column, pa.scalar([], column.type))
    ends = np.asarray(column.offsets.to_numpy(), np.int64)
    first, behind = int(ends[0]), int(ends[-1])
    items = column.values.slice(first, behind - first)
    return items.field(0), items.field(1), ends - first


def places_of(names: pa.Array, name: str) -> Numbers:
    """At which places a name stands."""
    found: Numbers = np.flatnonzero(pc.equal(names, name).to_numpy(zero_copy_only=False)).astype(np.int64)
    return found


def first_of_each(at: Numbers, ends: Numbers) -> Numbers:
    """For each record the first of these places that is its own; -1 where there is none."""
    chosen = np.searchsorted(at, ends[:-1])
    padded = np.append(at, np.int64(2**62))
    found = padded[chosen]
    return np.where(found < ends[1:], found, -1)


def last_of_each(at: Numbers, ends: Numbers) -> Numbers:
    """For each record the last of these places that is its own; -1 where there is none."""
    chosen = np.searchsorted(at, ends[1:]) - 1
    padded = np.append(at, np.int64(-1))
    found = padded[chosen]
    return np.where((chosen >= 0) & (found >= ends[:-1]), found, -1)


def taken(values: pa.Array, at: Numbers) -> pa.Array:
    """The values at these places; null for -1."""
    if len(values) == 0:
        return pa.nulls(len(at), values.type)
    if len(at) and at[0] >= 0 and len(at) == len(values) and np.array_equal(at, np.arange(len(at))):
        return values
    return values.take(pa.array(at, mask=at < 0))


def first_header(column: pa.Array, name: str) -> pa.Array:
    """Of each record the value of its first header of this name; null where it has none."""
    names, values, ends = flat_headers(column)
    return taken(values, first_of_each(places_of(names, name), ends))


def last_header(column: pa.Array, name: str) -> pa.Array:
    """The same of the last one."""
    names, values, ends = flat_headers(column)
    return taken(values, last_of_each(places_of(names, name), ends))


def decimal(values: pa.Array) -> Numbers:
    """Values that are decimal numbers; -1 for the others."""
    digits = pc.if_else(pc.match_substring_regex(values, DIGITS), values, None)
    return _numbers(digits.cast(pa.string()))


def _numbers(digits: pa.Array) -> Numbers:
    """Texts of digits as numbers, -1 for null; `ArrowInvalid` where one does not fit 64 bits."""
    return np.asarray(pc.fill_null(digits.cast(pa.int64()), -1).to_numpy(zero_copy_only=False), np.int64)


def parse_sources(values: pa.Array) -> Places:
    """What values of `hf-source` say."""
    return _parse_fast(values) or _parse_exactly(values)


def _parse_fast(values: pa.Array) -> Places | None:
    """All at once; nothing where one of them is no text, or has a number that does not fit."""
    try:
        parsed = pc.extract_regex(values.cast(pa.string()), f"\\A{SOURCE.pattern.decode()}\\z")
        topics, *numbers = (pc.struct_field(parsed, part) for part in range(4))
        return Places(pc.dictionary_encode(topics), *map(_numbers, numbers))
    except pa.ArrowInvalid:
        return None


def _parse_exactly(values: pa.Array) -> Places:
    topics: list[str | None] = []
    numbers = np.full((3, len(values)), -1, np.int64)
    for at, value in enumerate(values.to_pylist()):
        match = SOURCE.fullmatch(value) if value is not None else None
        topic = None
        if match is not None and all(int(match[part]) < 2**63 for part in (2, 3, 4)):
            try:
                topic = match[1].decode("utf-8")
            except UnicodeDecodeError:
                topic = None
            if topic is not None:
                numbers[:, at] = [int(match[part]) for part in (2, 3, 4)]
        topics.append(topic)
    encoded = pc.dictionary_encode(pa.array(topics, pa.string()))
    return Places(encoded, numbers[0], numbers[1], numbers[2])


def without(column: pa.Array, pattern: str, renamed: tuple[str, str] | None = None) -> pa.Array:
    """The headers of each record but for those whose names match; one of them under another name."""
    names, values, ends = flat_headers(column)
    if renamed is not None:
        names = pc.if_else(pc.equal(names, renamed[0]), renamed[1], names)
    kept = pc.invert(pc.match_substring_regex(names, pattern))
    before = np.concatenate(([0], np.cumsum(kept.to_numpy(zero_copy_only=False)))).astype(np.int32)
    items = pa.StructArray.from_arrays([names.filter(kept), values.filter(kept)], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(before[ends], pa.int32()), items)
