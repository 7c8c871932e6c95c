"""JSON values, record by record in plain Python: what is right is decided here. `JsonFast` decodes them in bulk.

A value is exactly one JSON object in UTF-8 (RFC 8259, no byte order mark), and nothing after it but white space. No key
stands twice in any object, escapes count as what they mean. Strings hold no lone surrogates. Nothing is nested deeper
than 100 levels. A field has its type's JSON kind and no other (see `texts` for how scalars are written); null is the
same as absent, and an error where the field is required. Order of complaints: the document, unknown fields, then the
fields in the definition's order, so that a record has one error text whichever way it was decoded.

`unknown: keep` adds the string column `_unknown`: a JSON object of the fields the definition does not name, null when
there are none. Inside a struct, array or map they stand under the field's name, the element's index, the entry's key:
`{"note": "x", "items": {"2": {"colour": "red"}}}`. Numbers keep their spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import pyarrow as pa

from holdfast.pipeline.formats import machine
from holdfast.pipeline.formats.base import (
    Decoded,
    Decoder,
    RowDecoder,
    Undecodable,
    shown,
    shown_bytes,
    shown_name,
    utf8,
)
from holdfast.pipeline.formats.decoding import Decoding
from holdfast.pipeline.formats.json_cells import Cells, Schema, decode_in_bulk
from holdfast.pipeline.formats.texts import Unfit, number_reader, string_reader
from holdfast.pipeline.formats.types import Column, Type

DEPTH_MAX: Final = 100
UNKNOWN_COLUMN: Final = "_unknown"

STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")

Unknowns = dict[str, Any]
Read = Callable[[Any, str, Unknowns], Any]
"""Turns a parsed JSON value that is not null into the column's value; gets its path and collects unknown fields."""


class Number(str):
    """A number as it is spelled."""

    __slots__ = ()


class _Twice(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return found


def _constant(text: str) -> NoReturn:
    raise Undecodable(f"not JSON: {text} is no JSON value")


_parse = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=Number, parse_int=Number, parse_constant=_constant
).decode


def _check_depth(raw: bytes) -> None:
    depth = 0
    for byte in STRING.sub(b"", raw):
        if byte in b"[{":
            depth += 1
            if depth > DEPTH_MAX:
                raise Undecodable(f"nested deeper than {DEPTH_MAX} levels")
        elif byte in b"]}":
            depth -= 1


def _check_surrogates(value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_surrogates(key)
            _check_surrogates(inner)
    elif isinstance(value, list):
        for inner in value:
            _check_surrogates(inner)
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise Undecodable(f"a lone surrogate in the string {shown(value)}") from None


def parse_document(raw: bytes) -> Any:
    """The one JSON value that these bytes are, numbers as `Number`; raises `Undecodable`."""
    text = utf8(raw)
    if not text.strip(" \t\r\n"):
        raise Undecodable("empty value" if not text else "empty value: white space only")
    if raw.count(b"[") + raw.count(b"{") > DEPTH_MAX:
        _check_depth(raw)
    try:
        found = _parse(text)
    except _Twice as twice:
        raise Undecodable(f"duplicate key {shown_name(str(twice))}") from None
    except json.JSONDecodeError as wrong:
        near = shown(text[wrong.pos : wrong.pos + 30], 20)
        if wrong.msg == "Extra data":
            raise Undecodable(f"trailing content at character {wrong.pos}: {near}") from None
        what = wrong.msg[:1].lower() + wrong.msg[1:]
        raise Undecodable(f"not JSON: {what} at character {wrong.pos}: {near}") from None
    if SURROGATE.search(text) is not None:
        _check_surrogates(found)
    return found


def json_text(value: Any) -> str:
    """Compact JSON of what `parse_document` returned, numbers spelled as they were."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json_text(str(key))}:{json_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(json_text(each) for each in value) + "]"
    if isinstance(value, Number):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def kind_of(value: Any) -> str:
    """The JSON kind of a parsed value, with the beginning of what it holds."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Number):
        return f"the number {value if len(value) <= 40 else value[:39] + '…'}"
    if isinstance(value, str):
        return f"the string {shown(value, 40)}"
    return "an object" if isinstance(value, dict) else "an array"


def _scalar(kind: Type) -> Read:
    of_number, of_string = number_reader(kind), string_reader(kind)

    def read(value: Any, path: str, unknowns: Unknowns) -> Any:
        reader = of_number if type(value) is Number else of_string if type(value) is str else None
        if reader is None:
            raise Undecodable(f'field "{path}": expected {kind}, found {kind_of(value)}')
        try:
            return reader(value)
        except Unfit as unfit:
            raise Undecodable(f'field "{path}": expected {kind}, found {kind_of(value)}: {unfit}') from None

    return read


def _boolean(value: Any, path: str, unknowns: Unknowns) -> Any:
    if value is not True and value is not False:
        raise Undecodable(f'field "{path}": expected boolean, found {kind_of(value)}')
    return value


def _elements(kind: Type, reject: bool) -> Read:
    """Of an array or a map: each element that is not null, with its place in the path."""
    inner = reading(kind.inner, reject)
    wanted = dict if kind.kind == "map" else list

    def read(value: Any, path: str, unknowns: Unknowns) -> Any:
        if not isinstance(value, wanted):
            raise Undecodable(f'field "{path}": expected {kind.kind}, found {kind_of(value)}')
        found: list[Any] = []
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            below: Unknowns = {}
            where = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{shown_name(key)[1:-1]}"
            element = None if each is None else inner(each, where, below)
            found.append(element if isinstance(key, int) else (key, element))
            if below:
                unknowns[str(key)] = below
        return found

    return read


def _struct(kind: Type, reject: bool) -> Read:
    columns = object_reading(kind.columns, reject)
    names = [each.name for each in kind.columns]

    def read(value: Any, path: str, unknowns: Unknowns) -> Any:
        if not isinstance(value, dict):
            raise Undecodable(f'field "{path}": expected struct, found {kind_of(value)}')
        return dict(zip(names, columns(value, path + ".", unknowns), strict=True))

    return read


def reading(kind: Type, reject: bool) -> Read:
    if kind.kind == "boolean":
        return _boolean
    if kind.kind in ("array", "map"):
        return _elements(kind, reject)
    if kind.kind == "struct":
        return _struct(kind, reject)
    return _scalar(kind)


def object_reading(
    columns: Sequence[Column], reject: bool
) -> Callable[[Mapping[str, Any], str, Unknowns], list[Any]]:
    """What reads the fields of an object, in the columns' order."""
    readers = [(each.name, each.required, reading(each.type, reject)) for each in columns]
    names = frozenset(each.name for each in columns)

    def read(value: Mapping[str, Any], path: str, unknowns: Unknowns) -> list[Any]:
        for key, each in value.items():
            if key not in names:
                if reject:
                    raise Undecodable(
                        f"unknown field {shown_name(key)}" + (f' in "{path[:-1]}"' if path else "")
                    )
                unknowns[key] = each
        row: list[Any] = []
        for name, required, reader in readers:
            found = value.get(name)
            if found is not None:
                below: Unknowns = {}
                row.append(reader(found, path + name, below))
                if below:
                    unknowns[name] = below
            elif required:
                state = "is null" if name in value else "is missing"
                raise Undecodable(f'required field "{path}{name}" {state}')
            else:
                row.append(None)
        return row

    return read


class JsonReference(RowDecoder):
    """The decoder of `format: json` in plain Python."""

    def __init__(self, decoding: Decoding, prefix: str, fields: Sequence[Column]) -> None:
        self.keep = decoding.unknown == "keep"
        kept = [Column(UNKNOWN_COLUMN, Type("string"), required=False)] if self.keep else []
        super().__init__(decoding, prefix, [*fields, *kept])
        self._read = object_reading(fields, decoding.unknown == "reject")

    def decode_row(self, value: bytes) -> Sequence[Any]:
        found = parse_document(value)
        if not isinstance(found, dict):
            raise Undecodable(f"expected an object, found {kind_of(found)}: {shown_bytes(value, 20)}")
        unknowns: Unknowns = {}
        row = self._read(found, "", unknowns)
        if self.keep:
            row.append(json_text(unknowns) if unknowns else None)
        return row


class JsonFast(Decoder):
    """The decoder of `format: json`, in bulk: machine code finds and reads the fields, Arrow makes the columns.

    A batch is scanned once (`json_kernel.scan`), which gives for every field and row a slice and its kind. Each column
    is then made from its slices by type; a struct is scanned again for its own fields, arrays and maps are listed into
    the slices of their elements, and so on inwards. Rows that the machine code does not decide go to the reference,
    whole.
    """

    def __init__(self, decoding: Decoding, prefix: str, fields: Sequence[Column]) -> None:
        self.reference = JsonReference(decoding, prefix, fields)
        super().__init__(decoding, prefix, self.reference.columns)
        # What is kept of structs stands in another place of the text: such rows are the reference's.
        is_ignoring = decoding.unknown == "ignore"
        self._schema = Schema(fields, is_open=is_ignoring or self.reference.keep, is_open_inside=is_ignoring)

    def prepare(self) -> None:
        machine.load()

    def decode(self, values: pa.Array) -> Decoded:
        return decode_in_bulk(values.cast(pa.binary()), self._read, self.reference.decode)

    def decode_plainly(self, values: pa.Array) -> Decoded:
        return self.reference.decode(values)

    def _read(self, cells: Cells) -> list[pa.Array]:
        columns = self._schema.read(cells, cells.document.marks)
        if self.reference.keep:
            columns.append(self._schema.unknown(cells))
        return columns
