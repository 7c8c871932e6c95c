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
from typing import Any

from holdfast.pipeline.definition.model import Decoding
from holdfast.pipeline.formats.base import FormatError, RowDecoder, Undecodable, check_names, shown
from holdfast.pipeline.formats.json_reference import UNKNOWN_COLUMN
from holdfast.pipeline.formats.registry import Registered, Registry, split_header
from holdfast.pipeline.formats.texts import Unfit
from holdfast.pipeline.formats.types import Column, Type

Convert = Callable[[Any], Any]
Plan = Callable[[bytes], Sequence[Any]]
"""Decodes a payload to one value for each column; raises `Undecodable`."""


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
        self._own: Plan | None = None
        if self.registry is None:
            try:
                self._own = self.own_plan()
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

    def decode_row(self, value: bytes) -> Sequence[Any]:
        if self._own is not None:
            return self._own(value)
        assert self.registry is not None
        schema_id, payload = split_header(value)
        place, payload = self.split_place(payload)
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
        return plan(payload)


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
