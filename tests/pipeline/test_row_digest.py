"""The digests of rows against a plain implementation of their definition, value by value."""

from __future__ import annotations

import hashlib
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.pipeline.row_digest import DigestKey, RowHasher, siphash, total, totals

KEY = DigestKey(b"k" * 32)
SECRET = hashlib.blake2b(b"rows", key=b"k" * 32, digest_size=16).digest()
WORDS = struct.unpack("<qq", SECRET)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DOUBLE_NAN = 0x7FF8000000000000

KIND = pa.struct([("b", pa.string()), ("a", pa.list_(pa.int32()))])
SCHEMA = pa.schema(
    [
        ("flag", pa.bool_()),
        ("small", pa.int16()),
        ("id", pa.int64()),
        ("single", pa.float32()),
        ("double", pa.float64()),
        ("price", pa.decimal128(20, 3)),
        ("name", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("wall", pa.timestamp("us")),
        ("tags", pa.list_(pa.string())),
        ("inner", KIND),
        ("by", pa.map_(pa.string(), pa.int64())),
        ("many", pa.list_(KIND)),
    ]
)


def _digest(words: list[int]) -> int:
    return siphash(WORDS, b"".join(struct.pack("<Q", word & (1 << 64) - 1) for word in words))


def _halves(digest: int) -> list[int]:
    return [digest & (1 << 64) - 1, digest >> 64]


def _text(raw: bytes) -> list[int]:
    padded = raw + bytes(-len(raw) % 8)
    return [len(raw), *(int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))]


def _real(value: float) -> list[int]:
    return [DOUBLE_NAN if value != value else struct.unpack("<Q", struct.pack("<d", value))[0]]


def _cell(kind: pa.DataType, value: Any) -> tuple[int, list[int]]:
    """The low bytes of the tag, and the words behind it."""
    types = pa.types
    if types.is_boolean(kind):
        return 1, [int(value)]
    if types.is_integer(kind):
        return 2, [value]
    if types.is_floating(kind):
        return 3, _real(value)
    if types.is_decimal(kind):
        unscaled = int(value.scaleb(kind.scale)) & (1 << 128) - 1
        return kind.scale << 8 | 4, _halves(unscaled)
    if types.is_string(kind):
        return 5, _text(value.encode())
    if types.is_binary(kind):
        return 6, _text(value)
    if types.is_date(kind):
        return 7, [(value - date(1970, 1, 1)).days]
    if types.is_timestamp(kind):
        moment = value if kind.tz else value.replace(tzinfo=UTC)
        since = moment - EPOCH
        return (8 if kind.tz else 9), [(since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds]
    if types.is_map(kind):
        pairs = [
            _digest(
                [12, *_halves(_element(kind.key_type, key)), 12, *_halves(_element(kind.item_type, item))]
            )
            for key, item in value
        ]
        return 12, [len(pairs), *_halves(sum(pairs) & (1 << 128) - 1)]
    if types.is_list(kind):
        found = [half for each in value for half in _halves(_element(kind.value_type, each))]
        return 10, [len(value), *found]
    assert types.is_struct(kind)
    words = [0, 11]
    for name, inner in sorted((each.name.encode(), each.type) for each in kind):
        words += _tagged(name, inner, value[name.decode()])
    return 11, _halves(_digest(words))


def _tagged(name: bytes, kind: pa.DataType, value: Any) -> list[int]:
    if value is None:
        return []
    low, words = _cell(kind, value)
    mask = 0xFFFF if low > 0xFF or pa.types.is_decimal(kind) else 0xFF
    return [siphash(WORDS, name) & (1 << 64) - 1 & ~mask | low, *words]


def _element(kind: pa.DataType, value: Any) -> int:
    if value is None:
        return siphash(WORDS, b"")
    low, words = _cell(kind, value)
    return _digest([low, *words])


def reference(place: tuple[str, int, int, int], row: dict[str, Any], schema: pa.Schema = SCHEMA) -> int:
    topic, partition, offset, index = place
    words = [siphash(WORDS, topic.encode()) & (1 << 64) - 1, partition, offset, index]
    for name in sorted(schema.names, key=str.encode):
        words += _tagged(name.encode(), schema.field(name).type, row[name])
    return _digest(words)


def lineage(rows: int) -> dict[str, pa.Array]:
    return {
        "topic": pa.array(["orders", "refunds"] * rows).slice(0, rows),
        "partition": pa.array(np.arange(rows) % 3, pa.int32()),
        "offset": pa.array(np.arange(rows) * 7, pa.int64()),
        "index": pa.array(np.arange(rows) % 2, pa.int32()),
    }


def places(rows: int) -> list[tuple[str, int, int, int]]:
    columns = (lineage(rows)[name].to_pylist() for name in ("topic", "partition", "offset", "index"))
    return list(zip(*columns, strict=True))


def digested(table: pa.Table, at: dict[str, pa.Array] | None = None) -> list[int]:
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    found = RowHasher(KEY).digests(columns, at or lineage(table.num_rows))
    return [int(low) | int(high) << 64 for low, high in found]


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def inner() -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"a": maybe(st.lists(maybe(st.integers(-5, 5)), max_size=3)), "b": maybe(st.text(max_size=9))}
    )


ROWS = st.fixed_dictionaries(
    {
        "flag": maybe(st.booleans()),
        "small": maybe(st.integers(-(2**15), 2**15 - 1)),
        "id": maybe(st.integers(-(2**63), 2**63 - 1)),
        "single": maybe(st.floats(width=32)),
        "double": maybe(st.floats()),
        "price": maybe(st.integers(-(10**19), 10**19).map(lambda each: Decimal(each).scaleb(-3))),
        "name": maybe(st.text(max_size=20)),
        "raw": maybe(st.binary(max_size=20)),
        "day": maybe(st.dates()),
        "at": maybe(st.datetimes(timezones=st.just(UTC))),
        "wall": maybe(st.datetimes()),
        "tags": maybe(st.lists(maybe(st.text(max_size=9)), max_size=3)),
        "inner": maybe(inner()),
        "by": maybe(
            st.dictionaries(st.text(max_size=5), maybe(st.integers(-9, 9)), max_size=3).map(
                lambda each: list(each.items())
            )
        ),
        "many": maybe(st.lists(maybe(inner()), max_size=3)),
    }
)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "a3817f04ba25a8e66df67214c7550293"),
        (1, "da87c1d86b99af44347659119b22fc45"),
    ],
)
def test_the_hash_is_siphash_with_128_bits(size: int, expected: str) -> None:
    """The first vectors that its authors publish."""
    key = struct.unpack("<qq", bytes(range(16)))
    assert siphash(key, bytes(range(size))).to_bytes(16, "little").hex() == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=9), st.integers(0, 3))
def test_digests_are_those_of_the_definition(rows: list[dict[str, Any]], cut: int) -> None:
    table = pa.Table.from_pylist(rows, SCHEMA)
    expected = [
        reference(place, row) for place, row in zip(places(len(rows)), table.to_pylist(), strict=True)
    ]
    assert digested(table) == expected
    kept = table.slice(min(cut, len(rows)))
    at = {name: column.slice(min(cut, len(rows))) for name, column in lineage(len(rows)).items()}
    assert digested(kept, at) == expected[min(cut, len(rows)) :], "of a part of the same buffers"


def test_many_rows_are_hashed_piece_by_piece() -> None:
    rows = 10_000
    table = pa.table({"id": pa.array(range(rows)), "name": pa.array([f"n{each}" for each in range(rows)])})
    schema = table.schema
    expected = [
        reference(place, row, schema) for place, row in zip(places(rows), table.to_pylist(), strict=True)
    ]
    found = RowHasher(KEY).digests(
        {name: table.column(name).chunk(0) for name in table.column_names}, lineage(rows)
    )
    assert total(found) == sum(expected) % (1 << 128)
    groups = np.arange(rows) % 3
    assert totals(found, groups, 4) == [sum(expected[at::3]) % (1 << 128) for at in range(3)] + [0]


@pytest.mark.parametrize(
    "other",
    [
        {"a": [2, 1], "b": [1, 2]},  # exchanged between rows
        {"a": [1, 1], "b": [2, 2]},  # and between columns
        {"a": [1, 2], "c": [2, 1]},
        {"a": [1, 2], "b": [2, None]},
        {"a": ["1", "2"], "b": [2, 1]},
    ],
)
def test_any_other_rows_have_another_sum(other: dict[str, list[Any]]) -> None:
    mine = total(RowHasher(KEY).digests({"a": pa.array([1, 2]), "b": pa.array([2, 1])}, lineage(2)))
    theirs = {name: pa.array(values) for name, values in other.items()}
    assert total(RowHasher(KEY).digests(theirs, lineage(2))) != mine


def test_a_null_column_is_as_no_column_and_a_constant_as_a_column() -> None:
    hasher, two = RowHasher(KEY), pa.array([1, 2])
    alone = total(hasher.digests({"a": two}, lineage(2)))
    assert total(hasher.digests({"a": two, "b": pa.nulls(2, pa.string())}, lineage(2), {"c": None})) == alone
    named = total(hasher.digests({"a": two, "c": pa.array(["x", "x"])}, lineage(2)))
    assert total(hasher.digests({"a": two}, lineage(2), {"c": "x"})) == named != alone


def test_another_key_gives_other_digests() -> None:
    columns = {"a": pa.array([1])}
    mine = total(RowHasher(KEY).digests(columns, lineage(1)))
    assert total(RowHasher(DigestKey(b"l" * 32)).digests(columns, lineage(1))) != mine
