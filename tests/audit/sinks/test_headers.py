"""Where records came from, taken out of their headers in bulk: the same as one by one."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit.sinks import headers

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SOURCE = re.compile(rb"(?s)(.+):(\d{1,10})@(\d{1,19})#(\d{1,10})")

topics = st.text("abc.-_:é", min_size=1, max_size=12)
good = st.builds(
    lambda topic, partition, offset, index: f"{topic}:{partition}@{offset}#{index}".encode(),
    topics,
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**31 - 1),
)
other = st.one_of(
    st.none(), st.binary(max_size=20), st.sampled_from([b"a:1@2", b"a:1@2#", b":1@2#3", b"a:-1@2#3"])
)


def one_by_one(value: bytes | None) -> tuple[str | None, int, int, int]:
    match = SOURCE.fullmatch(value) if value is not None else None
    if match is None or any(int(match[part]) >= 2**63 for part in (2, 3, 4)):
        return None, -1, -1, -1
    try:
        return match[1].decode(), int(match[2]), int(match[3]), int(match[4])
    except UnicodeDecodeError:
        return None, -1, -1, -1


@given(st.lists(st.one_of(good, good, good, other), max_size=30), st.integers(0, 3))
def test_sources_in_bulk_are_those_one_by_one(values: list[bytes | None], skipped: int) -> None:
    column = pa.array(values, pa.binary()).slice(skipped)
    found = headers.parse_sources(column)
    rows = list(
        zip(
            found.topics.to_pylist(),
            found.partitions.tolist(),
            found.offsets.tolist(),
            found.indexes.tolist(),
            strict=True,
        )
    )
    assert rows == [one_by_one(value) for value in values[skipped:]]


@given(st.lists(good, min_size=1, max_size=30))
def test_well_formed_sources_need_no_second_way(values: list[bytes]) -> None:
    if all(
        value.count(b":") == 1 and len(value.partition(b"@")[2].partition(b"#")[0]) < 19 for value in values
    ):
        assert headers._parse_fast(pa.array(values, pa.binary())) is not None


names = st.sampled_from(["a", "b", "hf-source"])
record = st.lists(st.tuples(names, st.one_of(st.none(), st.binary(max_size=4))), max_size=4)


@given(st.lists(st.one_of(st.none(), record), max_size=12), st.integers(0, 4), names)
def test_headers_are_found_by_name(
    records: list[list[tuple[str, bytes | None]] | None], skipped: int, name: str
) -> None:
    rows = [
        None if each is None else [{"key": key, "value": value} for key, value in each] for each in records
    ]
    column = pa.array(rows, HEADERS).slice(skipped)
    keys, values, ends = headers.flat_headers(column)
    at = headers.places_of(keys, name)
    first = headers.taken(values, headers.first_of_each(at, ends)).to_pylist()
    last = headers.taken(values, headers.last_of_each(at, ends)).to_pylist()
    own = [[value for key, value in each or () if key == name] for each in records[skipped:]]
    assert first == [each[0] if each else None for each in own]
    assert last == [each[-1] if each else None for each in own]


@given(
    st.lists(
        st.one_of(st.none(), st.binary(max_size=6), st.integers(0, 10**19).map(lambda n: str(n).encode()))
    )
)
def test_numbers_in_bulk_are_those_one_by_one(values: list[bytes | None]) -> None:
    found = headers.decimal(pa.array(values, pa.binary()))
    expected = [
        int(value) if value is not None and value.isdigit() and len(value) <= headers.DIGITS_MAX else -1
        for value in values
    ]
    assert found.tolist() == expected
    assert found.dtype == np.int64
