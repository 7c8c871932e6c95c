"""Whether rows hold what their record says: the evidence against values that stand under another's lineage.

Places alone cannot tell two rows whose lineage was exchanged, nor a value that was changed where it lies. So while the
source is walked, the fields of every record are hashed to 64 bits and kept by offset, one array for each set of fields
that some sink holds unchanged (`plain_columns`); the rows of the sinks are hashed in the same form and compared, place
by place. Dead letters are compared by the bytes of key and value.

The form is that of the source's type: what a sink keeps as text (PostgreSQL's copy, JSON in a topic) is read back as
that type first. Texts are hashed by Python's own keyed hash, so hashes mean something within one process only.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.decoding import Decode
from holdfast.pipeline.positions import Place

Hashes = npt.NDArray[np.uint64]
Columns = tuple[str, ...]
"""Names of the source's columns, in order: what one array of hashes is made of."""

RAW: Final[Columns] = ("_key", "_raw")
"""Key and value as bytes."""
_NULL: Final = np.uint64(0x9E3779B97F4A7C15)
_M1: Final = np.uint64(0xBF58476D1CE4E5B9)
_M2: Final = np.uint64(0x94D049BB133111EB)


class Incomparable(Exception):
    """Values that cannot be read as the source's type."""


def is_comparable(kind: pa.DataType) -> bool:
    """Nested values are not compared: their form differs from sink to sink."""
    return not pa.types.is_nested(kind)


# ---------------------------------------------------------------------------- hashing


def hash_rows(columns: Mapping[str, pa.Array]) -> Hashes:
    """One number for each row, of all its columns."""
    total: Hashes | None = None
    for name, values in columns.items():
        salt = np.uint64(zlib.crc32(name.encode()) * 0x9E3779B1 & 0xFFFFFFFFFFFFFFFF)
        hashed = _mixed(_hash_values(values) + salt)
        total = hashed if total is None else total + hashed
    assert total is not None, "rows without columns have nothing to compare"
    return total


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * _M1
    values = (values ^ (values >> np.uint64(27))) * _M2
    return values ^ (values >> np.uint64(31))


def _hash_values(values: pa.Array) -> Hashes:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    if pa.types.is_floating(kind):
        numbers = pc.fill_null(values.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        numbers = np.where(np.isnan(numbers), np.nan, numbers) + 0.0  # one NaN, one zero
        hashed = numbers.view(np.uint64)
    elif _is_whole(kind):
        hashed = pc.fill_null(_as_integers(values), 0).to_numpy(zero_copy_only=False).view(np.uint64)
    else:
        if pa.types.is_decimal(kind):
            values = values.cast(pa.string())
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            values = values.cast(pa.large_binary())
        items = values.to_pylist()
        hashed = np.fromiter(map(hash, items), np.int64, len(items)).view(np.uint64)
    if values.null_count:
        hashed = np.where(values.is_null().to_numpy(zero_copy_only=False), _NULL, hashed)
    return hashed


def _is_whole(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind) or types.is_boolean(kind) or types.is_date(kind) or types.is_timestamp(kind)
    )


def _as_integers(values: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", tz=values.type.tz))
    elif pa.types.is_date(values.type):
        values = values.cast(pa.date32()).cast(pa.int32())
    return values.cast(pa.int64())


# ---------------------------------------------------------------------------- reading back


def as_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """What a sink holds, in the source's type; `Incomparable` where it cannot be read so."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if values.type == kind:
        return values
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    try:
        if is_text and pa.types.is_boolean(kind):
            is_true = pc.is_in(values, pa.array(["t", "true"], values.type))
            return pc.if_else(values.is_null(), pa.scalar(None, pa.bool_()), is_true)
        if is_text and pa.types.is_binary(kind):
            return pa.array(
                [None if each is None else bytes.fromhex(each[2:]) for each in values.to_pylist()], kind
            )
        if is_text and pa.types.is_timestamp(kind):
            return values.cast(pa.timestamp("us", tz=kind.tz))
        return values.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise Incomparable(str(error)) from error


# ---------------------------------------------------------------------------- the source's side


@dataclass
class SourceContent:
    """What the records of the scope hold, as hashes by offset. An observer of the walk."""

    scope: Mapping[Place, tuple[int, int]]
    """First offset, and the one behind the last."""
    sets: Sequence[Columns]
    """The sets of columns that sinks will ask for."""
    only: Mapping[Columns, Mapping[Place, npt.NDArray[np.bool_]]] = field(default_factory=dict)
    """Of sets that are wanted for few offsets of the scope: for which."""
    hashes: dict[tuple[Place, Columns], Hashes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place, (start, end) in self.scope.items():
            for columns in self.sets:
                self.hashes[place, columns] = np.zeros(max(0, end - start), np.uint64)

    def take(self, place: Place, batch: pa.RecordBatch, decoded: Decode) -> None:
        if not self.sets or place not in self.scope or batch.num_rows == 0:
            return
        start, end = self.scope[place]
        at = batch.column("offset").to_numpy(zero_copy_only=False) - start
        is_inside = (at >= 0) & (at < end - start)
        for columns in self.sets:
            chosen = is_inside
            if columns in self.only:
                chosen = is_inside.copy()
                chosen[is_inside] = self.only[columns][place][at[is_inside]]
                if not chosen.any():
                    continue
            found = {name: _source_column(name, batch, decoded) for name in columns}
            if not chosen.all():
                found = {name: values.filter(pa.array(chosen)) for name, values in found.items()}
            self.hashes[place, columns][at[chosen]] = hash_rows(found)

    def inside(self, place: Place, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those in the scope."""
        start, end = self.scope[place]
        return offsets[(offsets >= start) & (offsets < end)]

    def different(
        self, place: Place, columns: Columns, offsets: npt.NDArray[np.int64], hashed: Hashes
    ) -> npt.NDArray[np.int64]:
        """The offsets of the scope whose record does not hold this.

        What is no record (expired, compacted away, aborted) has no hash: whether a row may be there is not asked here.
        """
        start, end = self.scope[place]
        is_inside = (offsets >= start) & (offsets < end)
        offsets, hashed = offsets[is_inside], hashed[is_inside]
        known = self.hashes[place, columns][offsets - start]
        found: npt.NDArray[np.int64] = offsets[(known != hashed) & (known != 0)]
        return found


def _source_column(name: str, batch: pa.RecordBatch, decoded: Decode) -> pa.Array:
    if name == "_raw":
        return batch.column("value")
    if name == "_key":
        return batch.column("key")
    return decoded().columns[name]
