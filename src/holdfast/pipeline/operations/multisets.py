"""Two heaps of rows compared as multisets, without Spark and in bounded memory.

Rows come as tables whose columns are all bytes, null where there is no value: two values are the same if their bytes
are. Nothing is decided by a hash: hashes only deal rows out into buckets, so that equal rows meet in the same one, and
each bucket is compared value by value. A heap that grows past `rows_in_memory` goes to files, bucket by bucket.

Rows that have no equal on the other side are paired by their key, where they have one: such a pair *differs*, and it is
told in which columns; what finds no partner is only on its side.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.dealt import BUCKETS, DealtRows

ROWS_IN_MEMORY: Final = 500_000
"""Of one heap, before it goes to files."""
EXAMPLES_MAX: Final = 5
ORDER: Final = "_order"
"""A column of numbers, where only the last row of each key counts: that with the greatest."""
GONE: Final = "_gone"
"""Beside it, whether that row takes its key back."""

Numbers = npt.NDArray[np.int64]
Row = dict[str, str | None]


class Heap(DealtRows):
    """Rows of one side."""

    def __init__(
        self,
        columns: Sequence[str],
        directory: str,
        *,
        key: Sequence[str] = (),
        is_folded: bool = False,
        rows_in_memory: int = ROWS_IN_MEMORY,
    ) -> None:
        self.rows = 0
        self.columns = tuple(columns)
        """What is compared, beside the key."""
        self.key = tuple(key)
        """What deals rows out, and pairs them; nothing: all columns."""
        self.is_folded = is_folded
        """Only the last row of each key counts: rows have `ORDER` and `GONE`."""
        fields = [pa.field(name, pa.large_binary()) for name in dict.fromkeys([*key, *columns])]
        if is_folded:
            fields += [pa.field(ORDER, pa.int64()), pa.field(GONE, pa.bool_())]
        super().__init__(pa.schema(fields), directory, lambda rows: buckets_of(rows, self.key))
        self._rows_in_memory = rows_in_memory

    def add(self, rows: pa.Table) -> None:
        """Rows with these columns at least."""
        self.rows += rows.num_rows
        super().add(rows.select(self._schema.names))
        if self.rows > self._rows_in_memory:
            self.spill()


def buckets_of(rows: pa.Table, key: Sequence[str]) -> Numbers:
    """The same for equal keys."""
    total = np.zeros(rows.num_rows, np.int64)
    for place, name in enumerate(key or content_of(rows), start=1):
        column = _combined([rows.column(name)])
        encoded = pc.dictionary_encode(column, null_encoding="encode")
        hashes = np.array(
            [0 if value is None else zlib.crc32(value) for value in encoded.dictionary.to_pylist()], np.int64
        )
        if len(hashes):
            total += hashes[encoded.indices.to_numpy(zero_copy_only=False)] * (2 * place + 1)
    return total % BUCKETS


def content_of(rows: pa.Table) -> list[str]:
    return [name for name in rows.column_names if name not in (ORDER, GONE)]


@dataclass
class Differences:
    """What two heaps do not share."""

    rows_a: int = 0
    rows_b: int = 0
    only_a: int = 0
    only_b: int = 0
    differing: int = 0
    """Pairs of rows with the same key and other values."""
    columns: Counter[str] = field(default_factory=Counter)
    """In how many of the pairs each column differs."""
    examples_a: list[Row] = field(default_factory=list)
    examples_b: list[Row] = field(default_factory=list)
    examples: list[tuple[Row, Row]] = field(default_factory=list)

    @property
    def are_none(self) -> bool:
        return not (self.only_a or self.only_b or self.differing)


def compare(a: Heap, b: Heap) -> Differences:
    """How the rows of two heaps of the same form differ."""
    if a.is_spilled or b.is_spilled:
        a.spill()
        b.spill()
    found = Differences()
    for one, other in zip(a.buckets(), b.buckets(), strict=True):
        if a.is_folded:
            one, other = _folded(one, a.key), _folded(other, a.key)
        found.rows_a += one.num_rows
        found.rows_b += other.num_rows
        _compare_bucket(one, other, a.key, a.columns, found)
    return found


def _compare_bucket(
    one: pa.Table, other: pa.Table, key: Sequence[str], columns: Sequence[str], found: Differences
) -> None:
    numbers = numbered(one, other, list(dict.fromkeys([*columns, *key])))
    mine, theirs = numbers[: one.num_rows], numbers[one.num_rows :]
    size = int(numbers.max(initial=-1)) + 1
    surplus = np.bincount(mine, minlength=size) - np.bincount(theirs, minlength=size)
    left = _rows(one, _chosen(mine, surplus))
    right = _rows(other, _chosen(theirs, -surplus))
    if not left and not right:
        return
    waiting: dict[tuple[str | None, ...], list[Row]] = {}
    for row in right if key else []:
        waiting.setdefault(tuple(row[name] for name in key), []).append(row)
    alone = 0
    for row in left:
        partners = waiting.get(tuple(row[name] for name in key)) if key else None
        if not partners:
            alone += 1
            _example(found.examples_a, row)
            continue
        partner = partners.pop()
        found.differing += 1
        found.columns.update(name for name in columns if row[name] != partner[name])
        if len(found.examples) < EXAMPLES_MAX:
            found.examples.append((row, partner))
    found.only_a += alone
    rest = [row for partners in waiting.values() for row in partners] if key else right
    found.only_b += len(rest)
    for row in rest[:EXAMPLES_MAX]:
        _example(found.examples_b, row)


def _example(examples: list[Row], row: Row) -> None:
    if len(examples) < EXAMPLES_MAX:
        examples.append(row)


def numbered(one: pa.Table, other: pa.Table, columns: Sequence[str]) -> Numbers:
    """A number for each row of both, one after the other: the same for equal rows, and for no others."""
    total = np.zeros(one.num_rows + other.num_rows, np.int64)
    if len(total) == 0:
        return total
    for name in columns:
        column = _combined([one.column(name), other.column(name)])
        encoded = pc.dictionary_encode(column, null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        # Both are below the number of rows, so that the product stays far from overflow.
        total = np.unique(total * (int(codes.max()) + 1) + codes, return_inverse=True)[1].astype(np.int64)
    return total


def _combined(columns: Sequence[pa.ChunkedArray]) -> pa.Array:
    chunks = [chunk for column in columns for chunk in column.chunks]
    return pa.chunked_array(chunks, columns[0].type).combine_chunks()


def _chosen(numbers: Numbers, surplus: Numbers) -> Numbers:
    """Of each number that has a surplus, that many rows."""
    wanted = np.maximum(surplus, 0)
    places = np.flatnonzero(wanted[numbers] > 0) if len(numbers) else np.zeros(0, np.int64)
    chosen = []
    for place in places.tolist():
        if wanted[numbers[place]] > 0:
            wanted[numbers[place]] -= 1
            chosen.append(place)
    return np.array(chosen, np.int64)


def _rows(table: pa.Table, places: Numbers) -> list[Row]:
    taken = table.take(pa.array(places))
    return [{name: _text(value) for name, value in row.items()} for row in taken.to_pylist()]


def _text(value: Any) -> str | None:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def _folded(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last row of each key, and of those only what was not taken back."""
    if rows.num_rows == 0:
        return rows
    numbers = numbered(rows, rows.slice(0, 0), key)
    order = np.lexsort((rows.column(ORDER).to_numpy(), numbers))
    ends = np.append(np.flatnonzero(np.diff(numbers[order])), len(order) - 1)
    last = rows.take(pa.array(np.sort(order[ends])))
    return last.filter(pc.invert(last.column(GONE)))


# ---------------------------------------------------------------------------- values


def as_bytes(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Values in the one form in which they are compared."""
    values = _combined([column]) if isinstance(column, pa.ChunkedArray) else column
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    if pa.types.is_large_binary(kind):
        return values
    if pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return values.cast(pa.large_binary())
    if pa.types.is_nested(kind):
        texts = [None if value is None else _json(value) for value in values.to_pylist()]
        return pa.array(texts, pa.large_binary())
    if pa.types.is_timestamp(kind):
        values = values.cast(pa.timestamp("us", kind.tz), safe=False)
    return values.cast(pa.large_string()).cast(pa.large_binary())


def _json(value: Any) -> bytes:
    import json

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_other).encode()


def _other(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
