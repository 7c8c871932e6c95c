"""Headers of many records at once: where a record came from, without a Python object for each.

A batch of records has its headers as one list of names and values behind the other. What is looked for is found by
comparing all names at once; numbers are read digit by digit, all of them side by side. Values in the form in which
sinks write them (`topic:partition@offset#index`) are taken apart in the buffer they lie in; a batch in which any is in
no such form goes through a slower, exact way that names no place for those.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

SOURCE: Final = re.compile(rb"(?s)(.+):(\d{1,10})@(\d{1,19})#(\d{1,10})")
DIGITS_MAX: Final = 18
"""More may not fit 64 bits: those go the slower way."""


class Places(NamedTuple):
    """Of each record: where it came from; -1 and null where it does not say."""

    topics: pa.Array
    """A dictionary of strings."""
    partitions: Numbers
    offsets: Numbers
    indexes: Numbers


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


def raw(values: pa.Array) -> tuple[Bytes, Numbers, Numbers]:
    """The bytes of binary values, and where each begins and ends."""
    _, ends, data = values.buffers()
    bounds = np.frombuffer(ends, np.int32, len(values) + 1, 4 * values.offset).astype(np.int64)
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return content, bounds[:-1], bounds[1:]


def numbers_between(content: Bytes, starts: Numbers, ends: Numbers) -> Numbers | None:
    """Decimal numbers in a buffer; None when any of them is none."""
    lengths = ends - starts
    if len(lengths) == 0:
        return np.empty(0, np.int64)
    if lengths.min() < 1 or lengths.max() > DIGITS_MAX:
        return None
    total = np.zeros(len(starts), np.int64)
    longest = int(lengths.max())
    for digit in range(longest):
        inside = digit < lengths
        byte = content[np.where(inside, starts + digit, starts)]
        value = byte.astype(np.int64) - ord("0")
        if ((value < 0) | (value > 9)).any():
            return None
        total = np.where(inside, total * 10 + value, total)
    return total


def decimal(values: pa.Array) -> Numbers:
    """Values that are decimal numbers; -1 for the others."""
    if values.null_count == 0:
        content, starts, ends = raw(values)
        fast = numbers_between(content, starts, ends)
        if fast is not None:
            return fast
    texts = values.to_pylist()
    return np.array(
        [
            int(text) if text is not None and len(text) <= DIGITS_MAX and text.isdigit() else -1
            for text in texts
        ],
        np.int64,
    )


def parse_sources(values: pa.Array) -> Places:
    """What values of `hf-source` say."""
    if len(values) and values.null_count == 0:
        fast = _parse_fast(values)
        if fast is not None:
            return fast
    return _parse_exactly(values)


def _parse_fast(values: pa.Array) -> Places | None:
    """`topic:partition@offset#index`, where each sign stands once in each value."""
    content, starts, ends = raw(values)
    begin, behind = int(starts[0]), int(ends[-1])
    part = content[begin:behind]
    signs = [np.flatnonzero(part == ord(sign)).astype(np.int64) + begin for sign in ":@#"]
    if any(len(each) != len(starts) for each in signs):
        return None
    colons, ats, hashes = signs
    is_ordered = (starts < colons) & (colons < ats) & (ats < hashes) & (hashes < ends)
    if not is_ordered.all():
        return None
    found = [
        numbers_between(content, first + 1, last)
        for first, last in ((colons, ats), (ats, hashes), (hashes, ends))
    ]
    partitions, offsets, indexes = found
    if partitions is None or offsets is None or indexes is None:
        return None
    topics = _topics(content, starts, colons)
    return None if topics is None else Places(topics, partitions, offsets, indexes)


def _topics(content: Bytes, starts: Numbers, ends: Numbers) -> pa.Array | None:
    """The texts between, as a dictionary; None when one of them is no text."""
    lengths = ends - starts
    codes = np.empty(len(starts), np.int32)
    names: list[str] = []
    for length in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == length)
        table = content[starts[rows][:, None] + np.arange(length)]
        if (table == table[0]).all():
            found, inverse = table[:1], np.zeros(len(rows), np.int64)
        else:
            as_one = np.ascontiguousarray(table).view(f"V{length}").ravel()
            _, where, inverse = np.unique(as_one, return_index=True, return_inverse=True)
            found = table[where]
        try:
            texts = [row.tobytes().decode("utf-8") for row in found]
        except UnicodeDecodeError:
            return None
        codes[rows] = inverse + len(names)
        names += texts
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names, pa.string()))


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
