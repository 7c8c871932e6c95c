"""The files of a keyed step's state: written, searched and merged by the workers themselves, with Arrow.

Keys are dealt into buckets by their hash, and each bucket of a segment is one file, sorted by that hash, so that a
worker with one bucket's rows needs that bucket's files alone, and of those the row groups that can hold its keys. State
does not pass through the JVM.

A row is a version of a key; the one with the greatest `_seq` counts. Its columns, then the key's own, then `_state`:

    _hash    of the key
    _seq     number of the state's version it was made for
    _last    greatest event time of its rows, milliseconds
    _timer   when its timer goes off; null without one
    _gone    the key was forgotten: it hides older versions
    _until   greatest of `_last` + ttl and event timers, over this and all earlier versions
    _hold    greatest processing timer, over this and all earlier versions

`_until` and `_hold` never decrease from version to version. So a row that both have passed can be left out, wherever
it lies: older versions of its key are over as well, and none comes to light again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.state.segments import StateDamaged

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

NEVER: Final = -(1 << 62)
"""Before all times: of a watermark that is not there yet, of a row that none was before."""
ROW_GROUP_ROWS: Final = 32_768
"""A lookup reads whole row groups: small enough that a few keys cost little, large enough to be read fast."""
MERGE_ROWS: Final = 262_144
"""Rows of a range of hashes that are merged at a time: what a worker holds in memory, however large the state is."""
NUMBERS: Final = ("_hash", "_seq", "_last", "_timer", "_gone", "_until", "_hold")
STATE: Final = "_state"


@dataclass(frozen=True)
class Passed:
    """Which times are over: by event time and by processing time."""

    watermark_ms: int = NEVER
    clock_ms: int = NEVER


def state_schema(keys: Sequence[pa.Field], value: pa.StructType) -> pa.Schema:
    import pyarrow as pa

    numbers = [
        pa.field(name, pa.bool_() if name == "_gone" else pa.int64(), nullable=name == "_timer")
        for name in NUMBERS
    ]
    return pa.schema([*numbers, *keys, pa.field(STATE, value)])


def file_name(bucket: int, label: str) -> str:
    return f"bucket-{bucket:04d}-{label}.parquet"


def bucket_of(path: str) -> int:
    return int(os.path.basename(path).split("-")[1])


class StateFile:
    """One file of a bucket. Anything but what was written there is `StateDamaged`."""

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def _file(self) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        return pq.ParquetFile(self.path, page_checksum_verification=True)

    @cached_property
    def _ranges(self) -> list[dict[str, tuple[int, int] | None]]:
        """For each row group the least and greatest of its numbers; None: there are only nulls."""
        groups = []
        for number in range(self._file.metadata.num_row_groups):
            group = self._file.metadata.row_group(number)
            found: dict[str, tuple[int, int] | None] = {}
            for column in map(group.column, range(len(NUMBERS))):
                known = column.statistics
                if known is None:
                    raise ValueError("its footer is not as it was written")
                found[column.path_in_schema] = (known.min, known.max) if known.has_min_max else None
            groups.append(found)
        return groups

    @property
    def rows(self) -> int:
        return int(self._guarded(lambda: self._file.metadata.num_rows))

    def due(self, column: str, above: int, to: int) -> np.ndarray[Any, Any]:
        """The hashes of rows whose number in this column is above the one and at most the other."""
        import numpy as np

        found = [np.empty(0, np.int64)]
        for number, ranges in enumerate(self._guarded(lambda: self._ranges)):
            known = ranges[column]
            if known is None or known[0] > to or known[1] <= above:
                continue
            table = self._read(number, ["_hash", column])
            values = table.column(column).fill_null(NEVER).to_numpy()
            found.append(table.column("_hash").to_numpy()[(values > above) & (values <= to)])
        return np.concatenate(found)

    def find(self, hashes: np.ndarray[Any, Any]) -> Iterator[pa.Table]:
        """The rows that have one of these hashes, which are sorted."""
        import numpy as np
        import pyarrow as pa

        for number, low, high in self._hash_ranges():
            first, end = np.searchsorted(hashes, low), np.searchsorted(hashes, high, "right")
            if first == end:
                continue
            wanted = hashes[first:end]
            present = self._read(number, ["_hash"]).column(0).to_numpy()
            places = np.minimum(np.searchsorted(wanted, present), len(wanted) - 1)
            mask = wanted[places] == present
            if mask.any():
                yield self._read(number, None).filter(pa.array(mask))

    def between(self, low: int, high: int) -> Iterator[pa.Table]:
        """The rows whose hash is at least the one and at most the other."""
        import pyarrow.compute as pc

        for number, least, greatest in self._hash_ranges():
            if greatest < low or least > high:
                continue
            table = self._read(number, None)
            if least < low or greatest > high:
                hashes = table.column("_hash")
                table = table.filter(pc.and_(pc.greater_equal(hashes, low), pc.less_equal(hashes, high)))
            yield table

    def _hash_ranges(self) -> Iterator[tuple[int, int, int]]:
        for number, ranges in enumerate(self._guarded(lambda: self._ranges)):
            known = ranges["_hash"]
            if known is not None:
                yield number, *known

    def _read(self, group: int, columns: list[str] | None) -> pa.Table:
        return self._guarded(lambda: self._file.read_row_group(group, columns=columns, use_threads=False))

    def _guarded(self, read: Any) -> Any:
        import pyarrow as pa

        try:
            return read()
        except FileNotFoundError:
            raise StateDamaged(self.path, "is missing") from None
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            raise StateDamaged(self.path, f"cannot be read ({error})") from error


def write_state(path: str, table: pa.Table) -> None:
    """Rows of one bucket as a file, sorted by their hash."""
    with _writer(path, table.schema) as writer:
        writer.write_table(table.take(_order(table)), row_group_size=ROW_GROUP_ROWS)


@dataclass(frozen=True)
class Merge:
    """Files of one bucket that are to become one."""

    files: Sequence[StateFile]
    schema: pa.Schema
    keys: Sequence[str]
    over: Passed
    is_all: bool
    """They are all there are: nothing is left that a forgotten key would have to hide."""

    def write(self, path: str) -> int:
        """Write the rows that count; how many those are. Without any there is no file."""
        ranges = max(1, -(-sum(file.rows for file in self.files) // MERGE_ROWS))
        width = -(-(1 << 64) // ranges)
        written = 0
        writer: pq.ParquetWriter | None = None
        try:
            for low in range(-(1 << 63), 1 << 63, width):
                table = self._between(low, min(low + width, 1 << 63) - 1)
                if table.num_rows:
                    writer = writer or _writer(path, self.schema)
                    writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
                    written += table.num_rows
        finally:
            if writer is not None:
                writer.close()
        return written

    def _between(self, low: int, high: int) -> pa.Table:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        parts = [part for file in self.files for part in file.between(low, high)]
        if not parts:
            return self.schema.empty_table()
        table = pa.concat_tables(parts)
        names = ["_hash", *self.keys]
        order = [(name, "ascending") for name in [*names, "_seq"]]
        table = table.take(pc.sort_indices(table, sort_keys=order))
        is_newest = np.append(first_of_run(table, names)[1:], True)
        is_over = pc.and_(
            pc.less_equal(table.column("_until"), self.over.watermark_ms),
            pc.less_equal(table.column("_hold"), self.over.clock_ms),
        )
        if self.is_all:
            is_over = pc.or_(is_over, table.column("_gone"))
        return table.filter(pc.and_not(pa.array(is_newest), is_over.combine_chunks())).cast(self.schema)


def first_of_run(table: pa.Table, names: Sequence[str]) -> np.ndarray[Any, Any]:
    """For each row whether it differs from the one before it in any of these columns; two nulls do not differ."""
    import numpy as np
    import pyarrow.compute as pc

    differs = np.zeros(table.num_rows, bool)
    if not table.num_rows:
        return differs
    differs[0] = True
    for name in names:
        column = table.column(name).combine_chunks()
        before, after = column.slice(0, len(column) - 1), column.slice(1)
        changed = pc.fill_null(pc.not_equal(before, after), False)
        if column.null_count:
            changed = pc.or_(changed, pc.xor(before.is_null(), after.is_null()))
        differs[1:] |= np.asarray(changed.to_numpy(zero_copy_only=False), bool)
    return differs


def _order(table: pa.Table) -> pa.Array:
    import pyarrow.compute as pc

    return pc.sort_indices(table, sort_keys=[("_hash", "ascending"), ("_seq", "ascending")])


def _writer(path: str, schema: pa.Schema) -> pq.ParquetWriter:
    import pyarrow.parquet as pq

    return pq.ParquetWriter(
        path,
        schema,
        compression="lz4",
        use_dictionary=False,
        write_statistics=list(NUMBERS),
        write_page_checksum=True,
    )
