"""What Avro and Protobuf share: rows by a writer's schema, which is the definition's or comes from a registry by id.

The columns are the definition's fields, or, where it names none, those of its schema. How a writer's schema fills them
is planned once for each schema: a plan knows for every column where the value is and what turns it into the column's
type, or why it cannot. A writer's field that no column takes is unknown: dropped, kept in `_unknown` as JSON, or a
reason to reject the record.
"""

from __future__ import annotations

import base64
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.formats import machine
from holdfast.pipeline.formats.base import Decoded, FormatError, RowDecoder, Undecodable, check_names, shown
from holdfast.pipeline.formats.decoding import Decoding
from holdfast.pipeline.formats.flat_columns import Flat
from holdfast.pipeline.formats.json_cells import Cells, cells_of, decode_in_bulk
from holdfast.pipeline.formats.json_layout import UNDECIDED
from holdfast.pipeline.formats.json_reference import UNKNOWN_COLUMN
from holdfast.pipeline.formats.registry import HEADER_BYTES, Registered, Registry, split_header
from holdfast.pipeline.formats.texts import Unfit
from holdfast.pipeline.formats.types import Column, Type

Convert = Callable[[Any], Any]


class Plan(NamedTuple):
    """How the records of one schema fill the columns."""

    row: Callable[[bytes], Sequence[Any]]
    """Decodes a payload to one value for each column; raises `Undecodable`."""
    flat: Flat | None
    """Decodes whole batches, where the schema is simple enough."""
    check: Callable[[Cells], npt.NDArray[np.uint8]] | None = None
    """Marks rows that are not exactly of the schema, where `row` would take them."""


class Mismatch(Exception):
    """A writer's type that cannot fill a column; the text says which and why."""


class SchemaRows(RowDecoder):
    """A format with schemas. `plan_for` makes a plan; `plan_key` finds which schema a value was written with."""

    def __init__(self, decoding: Decoding, prefix: str, columns: Sequence[Column]) -> None:
        kept = [Column(UNKNOWN_COLUMN, Type("string"), required=False)] if decoding.unknown == "keep" else []
        super().__init__(decoding, prefix, [*columns, *kept])
        check_names(columns)
        self.fields = tuple(columns)
        self.registry = Registry(decoding.registry) if decoding.registry is not None else None
        self._plans: dict[Hashable, Plan | str] = {}
        self.own: Plan | None = None
        if self.registry is None:
            try:
                self.own = self.own_plan()
            except Mismatch as mismatch:
                raise FormatError(f"format {decoding.format}: {mismatch}") from None

    @abstractmethod
    def own_plan(self) -> Plan:
        """The plan of the definition's own schema; raises `Mismatch`."""

    @abstractmethod
    def registered_plan(self, registered: Registered, place: Hashable) -> Plan:
        """The plan of a schema from the registry; raises `Mismatch`."""

    def split_place(self, payload: bytes) -> tuple[Hashable, bytes]:
        """What else of the header tells the writer's type (Protobuf's message indexes), and the rest."""
        return None, payload

    single_place: Hashable = None
    place_bytes = 0
    """What `split_place` finds in most records, and how many zero bytes say so."""

    def prepare(self) -> None:
        machine.load()

    def decode(self, values: pa.Array) -> Decoded:
        return self._decode(values.cast(pa.binary()), plainly=False)

    def decode_plainly(self, values: pa.Array) -> Decoded:
        return self._decode(values.cast(pa.binary()), plainly=True)

    def _decode(self, values: pa.Array, *, plainly: bool) -> Decoded:
        if self.own is not None:
            return self._decode_with(self.own, values, 0, plainly)
        groups = rows_by_id(values, HEADER_BYTES + self.place_bytes)
        if len(groups) == 1:
            return self._decode_group(values, next(iter(groups)), plainly)
        parts = [
            self._decode_group(values.take(pa.array(rows)), each, plainly) for each, rows in groups.items()
        ]
        back = pa.array(np.argsort(np.concatenate(list(groups.values())), kind="stable"))
        columns = [
            pa.concat_arrays(each).take(back) for each in zip(*(part.columns for part in parts), strict=True)
        ]
        return Decoded(columns, pa.concat_arrays([part.errors for part in parts]).take(back))

    def _decode_group(self, values: pa.Array, schema_id: int, plainly: bool) -> Decoded:
        if schema_id >= 0:
            try:
                plan = self._plan_of(schema_id, self.single_place)
            except Undecodable:
                return super().decode(values)
            return self._decode_with(plan, values, HEADER_BYTES + self.place_bytes, plainly)
        return super().decode(values)

    def _decode_with(self, plan: Plan, values: pa.Array, header_bytes: int, plainly: bool) -> Decoded:
        def slowly(some: pa.Array) -> Decoded:
            return self.checked(plan, some, header_bytes)

        if plan.flat is None or plainly:
            return slowly(values)
        return decode_in_bulk(values, self._bulk(plan.flat), slowly, header_bytes=header_bytes)

    def checked(self, plan: Plan, values: pa.Array, header_bytes: int) -> Decoded:
        """Row by row, and then what the plan's check refuses taken back."""
        found = super().decode(values)
        cells = cells_of(values, header_bytes) if plan.check is not None else None
        if cells is None or plan.check is None:
            return found
        refused = (plan.check(cells) == UNDECIDED) & found.errors.is_null().to_numpy(zero_copy_only=False)
        if not refused.any():
            return found
        mask = pa.array(refused)
        error = pa.scalar(
            f"not {self.decoding.format} of this schema: a choice that the schema does not have"
        )
        columns = [pc.if_else(mask, pa.scalar(None, each.type), each) for each in found.columns]
        return Decoded(columns, pc.if_else(mask, error, found.errors))

    def _bulk(self, flat: Flat) -> Callable[[Cells], list[pa.Array]]:
        if self.decoding.unknown != "keep":
            return flat.read
        return lambda cells: [*flat.read(cells), pa.nulls(len(cells), pa.string())]

    def decode_row(self, value: bytes) -> Sequence[Any]:
        if self.own is not None:
            return self.own.row(value)
        schema_id, payload = split_header(value)
        place, payload = self.split_place(payload)
        return self._plan_of(schema_id, place).row(payload)

    def _plan_of(self, schema_id: int, place: Hashable) -> Plan:
        assert self.registry is not None
        plan = self._plans.get((schema_id, place))
        if plan is None:
            registered = self.registry.get(schema_id)
            try:
                plan = self.registered_plan(registered, place)
            except Mismatch as mismatch:
                plan = f"schema id {schema_id}: {mismatch}"
            self._plans[schema_id, place] = plan
        if isinstance(plan, str):
            raise Undecodable(plan)
        return plan


def check_schema(decoding: Decoding, columns: Sequence[Column]) -> None:
    """Raises `FormatError` where it is not known how records are written, or which columns they have."""
    if decoding.schema is None and decoding.registry is None:
        raise FormatError(f"format {decoding.format}: give the `schema`, or the `registry` that has it")
    if decoding.schema is None and not columns:
        raise FormatError(
            f"format {decoding.format}: give a `schema` or name the fields; the registry is asked only record by record"
        )


def rows_by_id(values: pa.Array, header_bytes: int) -> dict[int, npt.NDArray[np.int64]]:
    """The rows of each schema id, by headers that are whole and zero but for the id; under -1 all others."""
    rows = len(values)
    _, offsets_buffer, data = values.buffers()
    if rows == 0 or data is None:
        return {-1: np.arange(rows)}
    offsets = np.frombuffer(offsets_buffer, np.int32, rows + 1, values.offset * 4).astype(np.int64)
    content = np.frombuffer(data, np.uint8)
    whole = offsets[1:] - offsets[:-1] >= header_bytes
    begins = np.where(whole, offsets[:-1], 0)
    ids = np.full(rows, -1, np.int64)
    if whole.any():
        header = [content[begins + place].astype(np.int64) for place in range(header_bytes)]
        for place in (0, *range(HEADER_BYTES, header_bytes)):
            whole &= header[place] == 0
        ids = np.where(whole, header[1] << 24 | header[2] << 16 | header[3] << 8 | header[4], -1)
    if values.null_count:
        # Tombstones go with whoever is there.
        nulls = values.is_null().to_numpy(zero_copy_only=False)
        ids[nulls] = ids[~nulls][0] if not nulls.all() else -1
    return {int(each): np.flatnonzero(ids == each) for each in np.unique(ids)}


def checked(convert: Convert, path: str, kind: Type) -> Convert:
    """The same conversion, whose complaints name the field."""

    def read(value: Any) -> Any:
        try:
            return convert(value)
        except Unfit as unfit:
            raise Undecodable(
                f'field "{path}": expected {kind}, found {shown(str(value), 40)}: {unfit}'
            ) from None

    return read


def cannot(path: str, written: str, kind: Type) -> Mismatch:
    return Mismatch(f'field "{path}": {written} cannot be read as {kind.ddl}')


def json_value(value: Any) -> Any:
    """A decoded value as JSON can hold it: bytes in Base64, numbers that JSON lacks as their names."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def unknown_text(unknown: Mapping[str, Any]) -> str | None:
    if not unknown:
        return None
    return json.dumps(json_value(unknown), ensure_ascii=False, separators=(",", ":"))
