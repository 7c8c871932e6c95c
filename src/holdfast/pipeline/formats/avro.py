"""Avro: binary records by a schema, the definition's own or the registry's.

Columns by type: int, long, float, double, boolean, string as they are called; enum and uuid are strings; bytes, fixed
and duration are binary; decimal, date, timestamp-millis, -micros and -nanos (cut to microseconds) are theirs,
local-timestamp-* is timestamp_ntz; time-millis and time-micros stay integers. A union with null makes a column that is
not required; int with long and float with double are their wider type; other unions have no column type. A schema that
is no record has one column, `value`. Integers may be read as any integer type they fit in, float as double.

With a registry, the definition's schema only names the columns: each record is read by the schema it was written with,
fields are matched by name, one that the writer lacks takes the default of the definition's schema. Aliases are not
followed.

fastavro decodes values, but takes more than the format allows: a negative choice of a union or an enum counts from the
end, as Python's lists do. So a value is also checked by machine code (`flat_kernel.check_avro`), which walks the same
schema and knows only what is right.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

import fastavro
import fastavro.schema
import numpy as np
import numpy.typing as npt

from holdfast.pipeline.formats import flat_layout as layout
from holdfast.pipeline.formats.base import Decoder, FormatError, Undecodable, shown_name
from holdfast.pipeline.formats.decoding import Decoding
from holdfast.pipeline.formats.flat_columns import Meaning, Step, flat_of
from holdfast.pipeline.formats.json_cells import Cells
from holdfast.pipeline.formats.registry import Registered
from holdfast.pipeline.formats.schema_rows import (
    Convert,
    Mismatch,
    Plan,
    SchemaRows,
    cannot,
    check_schema,
    checked,
    unknown_text,
)
from holdfast.pipeline.formats.texts import (
    DAY_END,
    DAY_MIN,
    Unfit,
    in_range_decimal,
    in_range_instant,
    in_range_integer,
)
from holdfast.pipeline.formats.types import INTEGER_BITS, PRECISION_MAX, Column, Type

VALUE: Final = "value"
"""The column of a schema that is no record."""
UNITS: Final = {"millis": (1000, 1), "micros": (1, 1), "nanos": (1, 1000)}


class Primitive(NamedTuple):
    """The column of an Avro type, and how it is read in bulk; no meaning: the schema tells more."""

    type: Type
    code: int
    meaning: Meaning | None


PRIMITIVES: Final = {
    "boolean": Primitive(Type("boolean"), layout.BOOLEAN, Meaning("boolean")),
    "int": Primitive(Type("int"), layout.ZIGZAG, Meaning("integer")),
    "long": Primitive(Type("bigint"), layout.ZIGZAG, Meaning("integer")),
    "float": Primitive(Type("float"), layout.FOUR_BYTES, Meaning("single")),
    "double": Primitive(Type("double"), layout.EIGHT_BYTES, Meaning("double")),
    "string": Primitive(Type("string"), layout.TEXT, Meaning("text")),
    "bytes": Primitive(Type("binary"), layout.BYTES, Meaning("bytes")),
    "fixed": Primitive(Type("binary"), layout.FIXED, None),
    "enum": Primitive(Type("string"), layout.ZIGZAG, None),
}
NESTED: Final = {"record": "struct", "array": "array", "map": "map"}
LOGICAL: Final = "holdfast.logical"
BROKEN: Final = (
    EOFError,
    IndexError,
    KeyError,
    ValueError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
    StopIteration,
)
"""What fastavro raises on bytes that are not of the schema."""

# ------------------------------------------------------------------------ schemas and their strict check


class Names:
    """The named types of a schema and of those it refers to; whoever is looked up was declared."""

    def __init__(self, text: str, references: Sequence[tuple[str, str]] = (), rejects: bool = False) -> None:
        self.rejects = rejects
        """Whether a writer's field that no column takes is refused."""
        self.types: dict[str, Any] = {}
        try:
            for _, each in references:
                fastavro.parse_schema(_plain(json.loads(each)), self.types)
            self.schema = fastavro.parse_schema(_plain(json.loads(text)), self.types)
        except json.JSONDecodeError as wrong:
            raise Mismatch(f"its Avro schema is not JSON: {wrong}") from None
        except (fastavro.schema.SchemaParseException, *BROKEN) as wrong:
            raise Mismatch(f"its Avro schema is not valid: {type(wrong).__name__}: {wrong}") from None

    def resolve(self, schema: Any) -> Any:
        while isinstance(schema, str) and schema in self.types:
            schema = self.types[schema]
        return schema

    @property
    def record(self) -> Any:
        """The schema itself when it is a record, else nothing."""
        found = self.resolve(self.schema)
        return found if isinstance(found, dict) and found["type"] == "record" else None


def _plain(schema: Any) -> Any:
    """The schema with logical types moved to a property that fastavro keeps and does not act on."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: _plain(each) if name in ("type", "items", "values", "fields") else each
        for name, each in schema.items()
    }
    if "logicalType" in found:
        found[LOGICAL] = found.pop("logicalType")
    return found


def branches(schema: Any) -> tuple[list[Any], bool]:
    """The types a schema allows, and whether null is one of them."""
    if isinstance(schema, list):
        return [each for each in schema if each != "null"], "null" in schema
    return ([], True) if schema == "null" else ([schema], False)


def kind_of(schema: Any) -> tuple[str, str]:
    """An Avro type's name and its logical type."""
    if isinstance(schema, str):
        return schema, ""
    name = schema["type"]
    return (name, str(schema.get(LOGICAL, ""))) if isinstance(name, str) else kind_of(name)


class Check:
    """A schema as a table of nodes, the first of which is the schema itself."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._nodes: list[tuple[int, int, int]] = []
        self._children: list[int] = []
        self._known: dict[str, int] = {}
        """Nodes of records: one that holds itself is one node."""
        self._add(names.schema)
        self._table = np.array(self._nodes, np.int64).reshape(-1, layout.CHECK_WORDS)
        self._list = np.array([*self._children, 0], np.int64)

    def _add(self, schema: Any) -> int:
        schema = self._names.resolve(schema)
        if isinstance(schema, list):
            return self._family(layout.UNION, schema, None)
        kind, _ = kind_of(schema)
        if kind == "record":
            known = self._known.get(schema["name"])
            return (
                self._family(layout.RECORD, [each["type"] for each in schema["fields"]], schema["name"])
                if known is None
                else known
            )
        node = len(self._nodes)
        if kind == "fixed":
            self._nodes.append((layout.FIXED, int(schema["size"]), 0))
        elif kind == "enum":
            self._nodes.append((layout.ENUM, 0, len(schema["symbols"])))
        elif kind in ("array", "map"):
            code = layout.ARRAY if kind == "array" else layout.MAP
            self._nodes.append((code, 0, 0))
            self._nodes[node] = (code, self._add(schema["items" if kind == "array" else "values"]), 0)
        else:
            self._nodes.append((layout.EMPTY if kind == "null" else PRIMITIVES[kind].code, 0, 0))
        return node

    def _family(self, code: int, schemas: Sequence[Any], name: str | None) -> int:
        node = len(self._nodes)
        self._nodes.append((code, 0, len(schemas)))
        if name is not None:
            self._known[name] = node
        found = [self._add(each) for each in schemas]
        self._nodes[node] = (code, len(self._children), len(schemas))
        self._children.extend(found)
        return node

    def mark(self, cells: Cells) -> npt.NDArray[np.uint8]:
        """Marks of the document, in which rows are undecided that are not exactly one value of the schema."""
        document = cells.document
        document.machine.check_avro(
            document.base,
            len(cells),
            cells.begins.ctypes.data,
            cells.ends.ctypes.data,
            document.marks.ctypes.data,
            self._table.ctypes.data,
            self._list.ctypes.data,
            document.scratch.ctypes.data,
        )
        return document.marks


# ------------------------------------------------------------------------ columns and conversions


def derive(names: Names, schema: Any, path: str, above: tuple[str, ...] = ()) -> tuple[Type, bool]:
    """The column type of a schema by itself, and whether it may be null; raises `Mismatch`."""
    options, is_nullable = branches(schema)
    options = [names.resolve(each) for each in options]
    kinds = sorted(kind_of(each) for each in options)
    if len(options) > 1 and kinds in ([("int", ""), ("long", "")], [("double", ""), ("float", "")]):
        return PRIMITIVES["long" if kinds[0][0] == "int" else "double"].type, is_nullable
    if len(options) != 1:
        written = " and ".join(name for name, _ in kinds) or "null alone"
        raise Mismatch(f'field "{path}": a union of {written} has no column type')
    return _derive_one(names, options[0], path, above), is_nullable


def _derive_one(names: Names, schema: Any, path: str, above: tuple[str, ...]) -> Type:
    name, logical = kind_of(schema)
    if name == "record":
        if schema["name"] in above:
            raise Mismatch(f'field "{path}": the type {schema["name"]} holds itself: name the fields to read')
        return Type(
            "struct", columns=tuple(record_columns(names, schema, path + ".", (*above, schema["name"])))
        )
    if name in ("array", "map"):
        inner = schema["items" if name == "array" else "values"]
        return Type(name, element=derive(names, inner, path + "[]", above)[0])
    if logical == "decimal" and name in ("bytes", "fixed"):
        precision, scale = int(schema.get("precision", 0)), int(schema.get("scale", 0))
        if not 0 < precision <= PRECISION_MAX or not 0 <= scale <= precision:
            raise Mismatch(
                f'field "{path}": decimal({precision},{scale}) does not fit in {PRECISION_MAX} digits'
            )
        return Type("decimal", precision=precision, scale=scale)
    if (name, logical) == ("int", "date"):
        return Type("date")
    if name == "long" and logical.removeprefix("local-").startswith("timestamp-"):
        return Type("timestamp_ntz" if logical.startswith("local-") else "timestamp")
    if name not in PRIMITIVES:
        raise Mismatch(f'field "{path}": the Avro type {name} has no column type')
    return PRIMITIVES[name].type


def record_columns(names: Names, record: Any, path: str = "", above: tuple[str, ...] = ()) -> list[Column]:
    if not record["fields"]:
        raise Mismatch(f"the record {record['name']} has no fields")
    columns = []
    for field in record["fields"]:
        kind, is_nullable = derive(names, field["type"], path + field["name"], above)
        columns.append(Column(field["name"], kind, required=not is_nullable))
    return columns


def schema_columns(names: Names) -> list[Column]:
    if names.record is not None:
        return record_columns(names, names.record, above=(names.record["name"],))
    kind, is_nullable = derive(names, names.schema, VALUE)
    return [Column(VALUE, kind, required=not is_nullable)]


def _decimal(value: bytes, scale: int, kind: Type) -> Decimal:
    number = Decimal(int.from_bytes(value, "big", signed=True))
    exact = Decimal((number.as_tuple().sign, number.as_tuple().digits, -scale))
    return in_range_decimal(exact, kind.precision, kind.scale)


def _instant(logical: str) -> Convert:
    times, parts = UNITS[logical.rpartition("-")[2]]
    return lambda value: in_range_instant(value * times // parts)


def _day(value: int) -> int:
    if not DAY_MIN <= value < DAY_END:
        raise Unfit("out of the years 1 to 9999")
    return value


def converter(names: Names, schema: Any, kind: Type, path: str) -> Convert:
    """What turns fastavro's value of a schema into a column's; raises `Mismatch` when nothing can."""
    options, _ = branches(schema)
    resolved: Any = names.resolve(options[0]) if options else "null"
    name, logical = kind_of(resolved)
    is_nested = len(options) == 1 and name in NESTED
    written = Type(NESTED[name]) if is_nested else derive(names, options, path)[0]
    if kind.kind == written.kind == "struct":
        return _struct(names, resolved, kind, path)
    if kind.kind in INTEGER_BITS and written.kind in INTEGER_BITS:
        bits = INTEGER_BITS[kind.kind]
        return checked(lambda value: in_range_integer(value, bits), path, kind)
    if kind.kind == "double" and written.kind == "float":
        return float
    if kind.kind != written.kind:
        raise cannot(path, f"Avro's {logical or name}", kind)
    if kind.kind == "array":
        inner = nullable(converter(names, resolved["items"], kind.inner, path + "[]"))
        return lambda value: [inner(each) for each in value]
    if kind.kind == "map":
        inner = nullable(converter(names, resolved["values"], kind.inner, path + "[]"))
        return lambda value: [(key, inner(each)) for key, each in value.items()]
    if kind.kind == "decimal":
        return checked(lambda value: _decimal(value, written.scale, kind), path, kind)
    if kind.kind in ("timestamp", "timestamp_ntz"):
        return checked(_instant(logical), path, kind)
    if kind.kind == "date":
        return checked(_day, path, kind)
    return lambda value: value


def nullable(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _struct(names: Names, record: Any, kind: Type, path: str) -> Convert:
    read = record_reader(names, types_of(record), kind.columns, path + ".", {})
    fields = [each.name for each in kind.columns]
    return lambda value: dict(zip(fields, read(value), strict=True))


def types_of(record: Any) -> dict[str, Any]:
    return {field["name"]: field["type"] for field in record["fields"]}


def record_reader(
    names: Names,
    written: Mapping[str, Any],
    columns: Sequence[Column],
    path: str,
    defaults: Mapping[str, Any],
) -> Callable[[Mapping[str, Any]], list[Any]]:
    """What reads the columns of a record with these fields, in the columns' order."""
    unknown = [name for name in written if name not in {each.name for each in columns}]
    if unknown and names.rejects:
        raise Mismatch(f"unknown field {shown_name(unknown[0])}" + (f' in "{path[:-1]}"' if path else ""))
    parts: list[tuple[Column, Convert | None]] = []
    for column in columns:
        convert = None
        if column.name in written:
            convert = converter(names, written[column.name], column.type, path + column.name)
        elif column.required and column.name not in defaults:
            raise Mismatch(f'required field "{path}{column.name}" is not in the schema')
        parts.append((column, convert))

    def read(value: Mapping[str, Any]) -> list[Any]:
        row: list[Any] = []
        for column, convert in parts:
            found = value.get(column.name)
            if convert is None:
                row.append(defaults.get(column.name))
            elif found is not None:
                row.append(convert(found))
            elif column.required:
                raise Undecodable(f'required field "{path}{column.name}" is null')
            else:
                row.append(None)
        return row

    return read


def flat_steps(names: Names, written: Mapping[str, Any]) -> list[Step] | None:
    """How the fields of a record are read in bulk; nothing when one of them is nested or a larger union."""
    steps: list[Step] = []
    for name, schema in written.items():
        null_branch = layout.NO_UNION
        if isinstance(schema, list):
            options, is_nullable = branches(schema)
            if len(options) != 1 or not is_nullable or len(schema) != 2:
                return None
            null_branch, schema = schema.index("null"), options[0]
        resolved = names.resolve(schema)
        kind, logical = kind_of(resolved)
        if kind not in PRIMITIVES:
            return None
        _, code, meaning = PRIMITIVES[kind]
        size = 0
        if kind == "enum":
            meaning = Meaning("names", names=dict(enumerate(resolved["symbols"])))
            size = len(resolved["symbols"])
        elif kind == "fixed" and logical != "decimal":
            meaning, size = Meaning("bytes"), int(resolved["size"])
        elif kind == "bytes" and logical == "decimal":
            code, meaning = layout.BIG_INTEGER, Meaning("decimal", scale=int(resolved.get("scale", 0)))
        elif (kind, logical) == ("int", "date"):
            meaning = Meaning("day")
        elif kind == "long" and logical.removeprefix("local-").startswith("timestamp-"):
            times, parts = UNITS[logical.rpartition("-")[2]]
            meaning = Meaning("instant", times=times, parts=parts)
        if meaning is None:
            return None
        steps.append(Step(name, code, meaning, null_branch=null_branch, size=size))
    return steps


class Avro(SchemaRows):
    def __init__(
        self, decoding: Decoding, prefix: str, columns: Sequence[Column], defaults: Mapping[str, Any]
    ) -> None:
        self.defaults = defaults
        super().__init__(decoding, prefix, columns)

    def own_plan(self) -> Plan:
        assert self.decoding.schema is not None
        return self._plan(Names(self.decoding.schema, rejects=self.decoding.unknown == "reject"))

    def registered_plan(self, registered: Registered, place: Hashable) -> Plan:
        if registered.kind != "AVRO":
            raise Mismatch(f"it is a schema of {registered.kind}, not of Avro")
        rejects = self.decoding.unknown == "reject"
        return self._plan(Names(registered.text, registered.references, rejects))

    def _plan(self, names: Names) -> Plan:
        record = names.record
        only = self.fields[0].name if len(self.fields) == 1 else VALUE
        written = {only: names.schema} if record is None else types_of(record)
        read_record = record_reader(names, written, self.fields, "", self.defaults)
        keeps = self.decoding.unknown == "keep"
        unknown = [name for name in written if name not in {each.name for each in self.fields}]

        def read(payload: bytes) -> list[Any]:
            value = read_one(payload, names)
            value = {only: value} if record is None else value
            row = read_record(value)
            if keeps:
                row.append(unknown_text({name: value[name] for name in unknown}))
            return row

        steps = None if keeps and unknown else flat_steps(names, written)
        flat = flat_of(steps, self.fields, is_protobuf=False, is_open=True, defaults=self.defaults)
        return Plan(read, flat, Check(names).mark)


def read_one(payload: bytes, names: Names) -> Any:
    """The one value that these bytes are; raises `Undecodable`."""
    if not payload:
        raise Undecodable("empty value")
    stream = io.BytesIO(payload)
    try:
        value = fastavro.schemaless_reader(stream, names.schema, None)
    except BROKEN as broken:
        why = {
            EOFError: "it ends too early",
            UnicodeDecodeError: "invalid UTF-8 in a string",
            IndexError: "a choice that the schema does not have",
        }.get(type(broken), "its bytes do not follow the schema")
        raise Undecodable(f"not Avro of this schema: {why}") from None
    left = len(payload) - stream.tell()
    if left:
        raise Undecodable(f"trailing content: {left} bytes after the value")
    return value


def _defaults(names: Names, columns: Sequence[Column]) -> dict[str, Any]:
    """What the columns of a reader's schema are in records of writers that lack them."""
    record = names.record
    if record is None:
        return {}
    found: dict[str, Any] = {}
    kinds = {each.name: each.type for each in columns}
    for field in record["fields"]:
        if "default" not in field or field["name"] not in kinds:
            continue
        default = field["default"]
        if isinstance(default, str) and kinds[field["name"]].kind in ("binary", "decimal"):
            default = default.encode("latin-1", "replace")
        if default is not None:
            default = converter(names, field["type"], kinds[field["name"]], field["name"])(default)
        found[field["name"]] = default
    return found


def avro_decoder(decoding: Decoding, prefix: str, columns: Sequence[Column]) -> Decoder:
    check_schema(decoding, columns)
    if decoding.schema is None:
        return Avro(decoding, prefix, columns, {})
    try:
        names = Names(decoding.schema)
        found = list(columns) or schema_columns(names)
        return Avro(decoding, prefix, found, _defaults(names, found) if decoding.registry is not None else {})
    except Mismatch as mismatch:
        raise FormatError(f"format avro: {mismatch}") from None
    except Undecodable as wrong:
        raise FormatError(f"format avro: a default of the schema: {wrong}") from None
