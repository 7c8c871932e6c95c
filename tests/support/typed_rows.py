"""Rows of every type from a seed, written and read without our code: what a pipeline is given, and what comes out.

A kind is a type in Spark's words, or a tuple of one: `("array", kind)`, `("map", kind)`, `("struct", (name, kind), …)`.
Values are plain: instants are microseconds, dates are days, both since 1970; structs and maps are dicts.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import random
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import fastavro
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.timestamp_pb2 import Timestamp

Kind = Any
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_MICROS = 86_400_000_000
INSTANTS = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The years 1 to 9999."""


def instant(text: str) -> int:
    return (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1)


def whole(bits: int) -> tuple[int, ...]:
    return 0, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)), 7


TIMES = (
    0,
    *INSTANTS,
    -1,
    instant(
        "1582-10-04T23:59:59.999999+00:00"
    ),  # the last day of the Julian calendar, and those that it lacks
    instant("1582-10-10T12:00:00+00:00"),
    instant("1883-11-18T17:00:00.000001+00:00"),  # the day of two noons
    instant("2026-03-29T01:30:00+01:00"),  # in the hour that Europe leaves out, and the one that it has twice
    instant("2026-10-25T02:30:00+02:00"),
    instant("2026-10-25T02:30:00+01:00"),
    instant("1677-09-21T00:12:43+00:00"),  # beyond what nanoseconds hold
    instant("2262-04-11T23:47:16.854776+00:00"),
    instant("2038-01-19T03:14:08.123456+00:00"),
)
NINES = "9" * 38
EXTREMES: Mapping[str, tuple[Any, ...]] = {
    "boolean": (True, False),
    "tinyint": whole(8),
    "smallint": whole(16),
    "int": whole(32),
    "bigint": (*whole(64), 2**53 + 1),
    "float": (
        *(0.0, -0.0, math.nan, math.inf, -math.inf),
        *(2.0**-149, 3.4028234663852886e38, 16777216.0, 0.10000000149011612),
    ),
    "double": (
        *(0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 0.1, 1e15, 1e-7),
        *(9007199254740993.0, 123456789012345680.0, 2.2250738585072014e-308),
    ),
    "decimal(38,0)": (Decimal(0), Decimal(NINES), Decimal(f"-{NINES}"), Decimal(1)),
    "decimal(38,38)": (Decimal(0), Decimal(f"0.{NINES}"), Decimal(f"-0.{NINES}"), Decimal("1E-38")),
    "decimal(10,2)": (Decimal("0.00"), Decimal("99999999.99"), Decimal("-0.01"), Decimal("1.50")),
    "decimal(20,0)": (Decimal(0), Decimal(2**64 - 1), Decimal(1)),
    "string": (
        *(
            "",
            " ",
            "a",
            "\0",
            "a\0b",
            "null",
            "NULL",
            "\\N",
            "\\.",
            "a\n\\.\nb",
            "\\x00",
            "NaN",
            "true",
            "-0",
        ),
        *('say "x", y;', "'", "\r", "\n", "\r\n", "\t", "\x7f\x01", " a "),
        *("\u00e9", "e\u0301", "\ufeffa", "\u2028"),
        *("\U0001f600", "\uffff", "中文", "{}", "[1]", "%41", "a=b/c", "x" * 70_000, "\u00df" * 3000),
    ),
    "binary": (b"", b"\0", b"\xff\xfe", bytes(range(256)), b"\\x00", b"a" * 70_000),
    "date": (0, -1, -719_162, 2_932_896, -141_428, -141_427, 20_541),
    "timestamp": TIMES,
    "timestamp_ntz": TIMES,
}
SCALARS = tuple(EXTREMES)


def ddl(kind: Kind) -> str:
    if isinstance(kind, str):
        return kind
    if kind[0] == "struct":
        return f"struct<{','.join(f'`{name}`:{ddl(inner)}' for name, inner in kind[1:])}>"
    return f"{'array<' if kind[0] == 'array' else 'map<string,'}{ddl(kind[1])}>"


def a_kind(rng: random.Random, depth: int, scalars: Sequence[str]) -> Kind:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(scalars)
    shape = rng.choice(("array", "map", "struct"))
    if shape != "struct":
        return (shape, a_kind(rng, depth - 1, scalars))
    names = rng.sample(("a", "b c", "d.e", "ü", "f`g", "Order"), rng.randint(1, 3))
    return ("struct", *((name, a_kind(rng, depth - 1, scalars)) for name in names))


def a_value(rng: random.Random, kind: Kind) -> Any:
    """Null one time in seven, an extreme often."""
    if rng.random() < 0.15:
        return None
    if isinstance(kind, str):
        return rng.choice(EXTREMES[kind]) if rng.random() < 0.6 else _at_random(rng, kind)
    if kind[0] == "struct":
        return {name: a_value(rng, inner) for name, inner in kind[1:]}
    size = rng.choice((0, 1, 2, 5))
    if kind[0] == "array":
        return [a_value(rng, kind[1]) for _ in range(size)]
    keys = rng.sample(("", "a", "A", "b.c", "\u00e9", "k\n", "null", "0"), size)
    return {key: a_value(rng, kind[1]) for key in keys}


def _at_random(rng: random.Random, kind: str) -> Any:
    if kind == "string":
        return "".join(
            chr(rng.choice((rng.randint(1, 127), rng.randint(160, 0x2FFF))))
            for _ in range(rng.randint(0, 20))
        )
    if kind == "binary":
        return rng.randbytes(rng.randint(0, 30))
    if kind.startswith("timestamp"):
        return rng.randint(*INSTANTS)
    if kind == "date":
        return rng.randint(-719_162, 2_932_896)
    if kind == "float":
        return struct.unpack("<f", struct.pack("<f", rng.uniform(-1e6, 1e6)))[0]
    if kind == "double":
        return rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300)
    return rng.choice(EXTREMES[kind])


@dataclass(frozen=True)
class Rows:
    """Columns by name, and rows of them; `id` counts."""

    kinds: Mapping[str, Kind]
    rows: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, seed: int, count: int, scalars: Sequence[str] = SCALARS, nested: int = 6) -> Rows:
        """Row by row every extreme of every scalar once, and what else `count` has room for by chance."""
        rng = random.Random(seed)
        kinds: dict[str, Kind] = {"id": "bigint"}
        kinds |= {f"c{at}": kind for at, kind in enumerate(scalars)}
        kinds |= {f"n{at}": a_kind(rng, 3, scalars) for at in range(nested)}
        found = []
        for number in range(count):
            row: dict[str, Any] = {"id": number}
            for at, kind in enumerate(scalars):
                extremes = EXTREMES[kind]
                row[f"c{at}"] = extremes[number] if number < len(extremes) else a_value(rng, kind)
            row |= {name: a_value(rng, kind) for name, kind in kinds.items() if name.startswith("n")}
            found.append(row)
        return cls(kinds, tuple(found))

    def numbered(self, first: int) -> Rows:
        return replace(self, rows=tuple({**row, "id": first + at} for at, row in enumerate(self.rows)))

    def only(self, names: Sequence[str]) -> Rows:
        return Rows(
            {name: self.kinds[name] for name in names},
            tuple({name: row[name] for name in names} for row in self.rows),
        )

    def fitted(self, fit: Callable[[Kind, Any], Any]) -> Rows:
        """The rows with every value as a format can write it."""
        return Rows(
            self.kinds,
            tuple({name: fit(self.kinds[name], value) for name, value in row.items()} for row in self.rows),
        )

    def plain(self) -> dict[int, dict[str, Any]]:
        return {
            row["id"]: {name: plain(kind, row[name]) for name, kind in self.kinds.items()}
            for row in self.rows
        }


def walk(kind: Kind, value: Any, change: Callable[[Kind, Any], Any]) -> Any:
    """The value with `change` made to everything in it, from the inside out."""
    if value is not None and not isinstance(kind, str):
        if kind[0] == "struct":
            value = {name: walk(inner, value[name], change) for name, inner in kind[1:]}
        elif kind[0] == "array":
            value = [walk(kind[1], each, change) for each in value]
        else:
            value = {key: walk(kind[1], each, change) for key, each in value.items()}
    return change(kind, value)


def texts_in(kind: Kind, value: Any) -> list[str]:
    found: list[str] = []

    def look(_: Kind, each: Any) -> Any:
        found.extend([each] if isinstance(each, str) else each if isinstance(each, dict) else [])
        return each

    walk(kind, value, look)
    return found


# What is equal


def plain(kind: Kind, value: Any) -> Any:
    """A value of any reader as something that is equal exactly when the value is: zeros have signs, NaN is NaN."""
    if value is None:
        return None
    if kind in ("float", "double"):
        return "NaN" if math.isnan(value) else struct.pack("<f" if kind == "float" else "<d", value).hex()
    if isinstance(kind, str):
        if isinstance(value, datetime):
            assert (value.tzinfo is None) == (kind == "timestamp_ntz"), (kind, value)
            return (value.replace(tzinfo=value.tzinfo or UTC) - EPOCH) // timedelta(microseconds=1)
        if isinstance(value, date):
            return (value - EPOCH.date()).days
        return bytes(value) if kind == "binary" else value
    if kind[0] == "array":
        return [plain(kind[1], each) for each in value]
    if kind[0] == "map":
        pairs = list(value.items()) if isinstance(value, dict) else list(value)
        assert len(dict(pairs)) == len(pairs)
        return {key: plain(kind[1], each) for key, each in pairs}
    return {name: plain(inner, value[name]) for name, inner in kind[1:]}


def of_json(kind: Kind, value: Any) -> Any:
    """What a reader of JSON makes of a parsed document (numbers as `Decimal` or int) that knows the types."""
    if value is None:
        return None
    if kind in ("float", "double"):
        return float(value)
    if kind == "binary":
        return base64.b64decode(value, validate=True)
    if kind == "date":
        return date.fromisoformat(value)
    if isinstance(kind, str) and kind.startswith("timestamp"):
        return datetime.fromisoformat(value)
    if isinstance(kind, str):
        assert isinstance(value, bool | str if kind in ("boolean", "string") else int | Decimal), (
            kind,
            value,
        )
        return Decimal(value) if kind.startswith("decimal") else value
    if kind[0] == "array":
        return [of_json(kind[1], each) for each in value]
    if kind[0] == "map":
        return {key: of_json(kind[1], each) for key, each in value.items()}
    assert set(value) == {name for name, _ in kind[1:]}, (kind, value)
    return {name: of_json(inner, value[name]) for name, inner in kind[1:]}


def parsed(text: str | bytes) -> Any:
    return json.loads(text, parse_float=Decimal)


# Formats


def _iso(micros: int, kind: str) -> str:
    text = (EPOCH.replace(tzinfo=None) + timedelta(microseconds=micros)).isoformat()
    return text + ("Z" if kind == "timestamp" else "")


def scalar_text(kind: str, value: Any) -> str:
    """As JSON and CSV write it, without quotes."""
    if kind in ("timestamp", "timestamp_ntz"):
        return _iso(value, kind)
    if kind == "date":
        return (EPOCH.date() + timedelta(days=value)).isoformat()
    if kind == "binary":
        return base64.b64encode(value).decode()
    if kind == "boolean":
        return "true" if value else "false"
    return (
        f"{value:f}"
        if isinstance(value, Decimal)
        else repr(value)
        if isinstance(value, float)
        else str(value)
    )


def json_text(kind: Kind, value: Any, is_ascii: bool) -> str:
    if value is None:
        return "null"
    if isinstance(kind, str):
        text = scalar_text(kind, value)
        is_quoted = kind in ("string", "binary", "date") or kind.startswith("timestamp")
        return json.dumps(text, ensure_ascii=is_ascii) if is_quoted else text
    if kind[0] == "array":
        return f"[{','.join(json_text(kind[1], each, is_ascii) for each in value)}]"
    inner = dict.fromkeys(value, kind[1]) if kind[0] == "map" else dict(kind[1:])
    pairs = (
        f"{json.dumps(name, ensure_ascii=is_ascii)}:{json_text(inner[name], value[name], is_ascii)}"
        for name in value
    )
    return "{" + ",".join(pairs) + "}"


def finite(kind: Kind, value: Any) -> Any:
    """JSON and CSV have no word for NaN and infinity."""
    return walk(
        kind, value, lambda _, each: None if isinstance(each, float) and not math.isfinite(each) else each
    )


def as_json(rows: Rows) -> list[bytes]:
    return [
        json_text(("struct", *rows.kinds.items()), row, is_ascii=row["id"] % 2 == 0).encode()
        for row in rows.rows
    ]


CSV_NULL = "<none>"


def as_csv(rows: Rows) -> list[bytes]:
    found = []
    for row in rows.rows:
        text = io.StringIO(newline="")
        cells = [
            CSV_NULL if row[name] is None else scalar_text(kind, row[name])
            for name, kind in rows.kinds.items()
        ]
        csv.writer(text, lineterminator="\r\n").writerow(cells)
        found.append(text.getvalue().encode())
    return found


AVRO = {"tinyint": "int", "smallint": "int", "bigint": "long", "binary": "bytes"}
AVRO_LOGICAL = {
    "date": ("int", "date"),
    "timestamp": ("long", "timestamp-micros"),
    "timestamp_ntz": ("long", "local-timestamp-micros"),
}


def avro_schema(kind: Kind, path: str) -> Any:
    if isinstance(kind, str):
        if kind.startswith("decimal"):
            precision, scale = map(int, kind[8:-1].split(","))
            found: Any = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
        elif kind in AVRO_LOGICAL:
            found = dict(zip(("type", "logicalType"), AVRO_LOGICAL[kind], strict=True))
        else:
            found = AVRO.get(kind, kind)
    elif kind[0] == "struct":
        fields = [
            {"name": f"f{at}", "type": avro_schema(inner, f"{path}_{at}")}
            for at, (_, inner) in enumerate(kind[1:])
        ]
        found = {"type": "record", "name": f"R{path}", "fields": fields}
    else:
        word = "items" if kind[0] == "array" else "values"
        found = {"type": kind[0], word: avro_schema(kind[1], path + "_")}
    return ["null", found]


def avro_named(kind: Kind) -> Kind:
    """Names of Avro's (and Protobuf's) fields are letters, digits and underscores."""
    if isinstance(kind, str):
        return kind
    if kind[0] == "struct":
        return ("struct", *((f"f{at}", avro_named(inner)) for at, (_, inner) in enumerate(kind[1:])))
    return (kind[0], avro_named(kind[1]))


def renamed(rows: Rows) -> Rows:
    """The same rows, for formats with names of letters, digits and underscores."""

    def change(kind: Kind, value: Any) -> Any:
        if isinstance(kind, str) or kind[0] != "struct" or value is None:
            return value
        return {f"f{at}": value[name] for at, (name, _) in enumerate(kind[1:])}

    return Rows(
        {name: avro_named(kind) for name, kind in rows.kinds.items()},
        tuple(
            {name: walk(rows.kinds[name], value, change) for name, value in row.items()} for row in rows.rows
        ),
    )


def as_avro(rows: Rows) -> tuple[str, list[bytes]]:
    """The schema, and a value for each row."""
    fields = [{"name": name, "type": avro_schema(kind, name)} for name, kind in rows.kinds.items()]
    text = json.dumps({"type": "record", "name": "Typed", "fields": fields})
    schema = fastavro.parse_schema(json.loads(text))
    found = []
    for row in rows.rows:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, schema, row)
        found.append(stream.getvalue())
    return text, found


PROTO = {
    "boolean": "BOOL", "tinyint": "SINT32", "smallint": "INT32", "int": "SFIXED32", "bigint": "INT64",
    "decimal(20,0)": "UINT64", "float": "FLOAT", "double": "DOUBLE", "string": "STRING", "binary": "BYTES",
    "timestamp": "MESSAGE",
}  # fmt: skip
"""Kinds that Protobuf has a type for."""


def as_protobuf(rows: Rows) -> tuple[str, list[bytes]]:
    """A `FileDescriptorSet` in Base64, and a value for each row."""
    file = descriptor_pb2.FileDescriptorProto(name="typed.proto", package="typed", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    _message(file.message_type.add(name="Typed"), list(rows.kinds.items()), ".typed.Typed")
    clock = descriptor_pb2.FileDescriptorProto()
    Timestamp.DESCRIPTOR.file.CopyToProto(clock)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(clock)
    pool.Add(file)
    typed = message_factory.GetMessageClass(pool.FindMessageTypeByName("typed.Typed"))
    found = []
    for row in rows.rows:
        message = typed()
        _fill(message, list(rows.kinds.items()), row)
        found.append(message.SerializeToString())
    names = descriptor_pb2.FileDescriptorSet(file=[clock, file])
    return base64.b64encode(names.SerializeToString()).decode(), found


def _message(message: Any, columns: Sequence[tuple[str, Kind]], path: str) -> None:
    for number, (name, kind) in enumerate(columns, 1):
        field = message.field.add(name=name, number=number, label=1)
        if not isinstance(kind, str) and kind[0] == "map":
            entry = message.nested_type.add(
                name="".join(part.capitalize() for part in name.split("_")) + "Entry"
            )
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, label=1, type=9)
            _type(
                entry.field.add(name="value", number=2, label=1), entry, kind[1], f"{path}.{entry.name}", "v"
            )
            field.label, field.type, field.type_name = 3, 11, f"{path}.{entry.name}"
        elif not isinstance(kind, str) and kind[0] == "array":
            field.label = 3
            _type(field, message, kind[1], path, name)
        else:
            _type(field, message, kind, path, name)
            if field.type != field.TYPE_MESSAGE:
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{name}")


def _type(field: Any, message: Any, kind: Kind, path: str, name: str) -> None:
    if isinstance(kind, str):
        field.type = getattr(field, f"TYPE_{PROTO[kind]}")
        if kind == "timestamp":
            field.type_name = ".google.protobuf.Timestamp"
        return
    holder = message
    inner = holder.nested_type.add(name=f"M{name}")
    field.type, field.type_name = field.TYPE_MESSAGE, f"{path}.M{name}"
    _message(inner, list(kind[1:]), f"{path}.M{name}")


def _fill(message: Any, columns: Sequence[tuple[str, Kind]], row: Mapping[str, Any]) -> None:
    for name, kind in columns:
        value = row[name]
        if value is None:
            continue
        if kind == "timestamp":
            _stamp(getattr(message, name), value)
        elif isinstance(kind, str):
            setattr(message, name, int(value) if isinstance(value, Decimal) else value)
        elif kind[0] == "struct":
            getattr(message, name).SetInParent()
            _fill(getattr(message, name), kind[1:], value)
        else:
            held = getattr(message, name)
            pairs = enumerate(value) if kind[0] == "array" else value.items()
            for key, each in pairs:
                _one(held, key, kind, each)


def _one(held: Any, key: Any, kind: Kind, value: Any) -> None:
    inner = kind[1]
    if inner == "timestamp":
        _stamp(held.add() if kind[0] == "array" else held[key], value)
    elif not isinstance(inner, str):
        _fill(held.add() if kind[0] == "array" else held[key], inner[1:], value)
    elif kind[0] == "array":
        held.append(int(value) if isinstance(value, Decimal) else value)
    else:
        held[key] = int(value) if isinstance(value, Decimal) else value


def _stamp(message: Any, micros: int) -> None:
    message.SetInParent()
    message.seconds, message.nanos = micros // 1_000_000, micros % 1_000_000 * 1000


def is_protobuf(kind: Kind) -> bool:
    """Whether Protobuf can have it: lists and maps lie in messages only."""
    if isinstance(kind, str):
        return kind in PROTO
    if kind[0] == "struct":
        return all(is_protobuf(inner) for _, inner in kind[1:])
    inner = kind[1]
    return (isinstance(inner, str) or inner[0] == "struct") and is_protobuf(inner)


def unabsent(kind: Kind, value: Any) -> Any:
    """Protobuf's lists and maps are never null, nor is what they hold."""

    def change(each_kind: Kind, each: Any) -> Any:
        if isinstance(each_kind, str) or each_kind[0] == "struct":
            return each
        if each is None:
            return [] if each_kind[0] == "array" else {}
        if each_kind[0] == "array":
            return [one for one in each if one is not None]
        return {key: one for key, one in each.items() if one is not None}

    return walk(kind, value, change)


def differences(
    kinds: Mapping[str, Kind], expected: Mapping[int, Mapping[str, Any]], found: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Every cell that is not equal, and rows that are missing, too many or there twice."""
    told: list[str] = []
    seen: set[int] = set()
    for row in found:
        number = row["id"]
        if number in seen or number not in expected:
            told.append(f"row {number} is there {'twice' if number in seen else 'for no reason'}")
            continue
        seen.add(number)
        for name, kind in kinds.items():
            try:
                value = plain(kind, row[name])
            except (AssertionError, ValueError, TypeError, KeyError, AttributeError) as error:
                value = f"{type(error).__name__} {error} of {row.get(name)!r}"
            if value != expected[number][name]:
                told.append(
                    f"row {number}, {name} {ddl(kind)}: {expected[number][name]!r:.200} became {value!r:.200}"
                )
    return told + [f"row {number} is missing" for number in expected.keys() - seen]
