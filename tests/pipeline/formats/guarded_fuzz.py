"""Damaged values in memory that ends where they end: run as `python guarded_fuzz.py FORMAT SEED ROUNDS`.

A read past a value's end is the end of the process, which is why this is one of its own. Every answer is also compared
with the reference's.
"""

import io
import json
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import fastavro
import pyarrow as pa
from google.protobuf import message_factory
from tests.support.reader_cases import GuardedMemory, damaged

from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import Decoded, compile_columns, compile_decoder
from holdfast.pipeline.formats.base import RowDecoder
from holdfast.pipeline.formats.json_reference import JsonFast
from holdfast.pipeline.formats.protobuf import Schema
from holdfast.pipeline.formats.schema_rows import SchemaRows

TYPES = {
    "id": "long",
    "text": "string",
    "customer": "string",
    "delivered_at": "timestamp",
    "flag": "boolean",
    "ratio": "double",
    "price": "decimal(12,2)",
    "day": "date",
    "at": "timestamp",
    "blob": "binary",
    "tags": "array<string>",
    "scores": "map<string,double>",
    "place": "struct<lat:double,names:array<struct<n:string,w:int>>>",
}
ENDS = [
    "",
    '"',
    '"a',
    '"\\',
    '"\\u',
    '"\\u00',
    '"\\ud83d',
    '"\\ud83d\\',
    "-",
    "1.",
    "1e",
    "1e+",
    "t",
    "nul",
    "fals",
    "[",
    "{",
]


def value_of(chance: random.Random, kind: str) -> Any:
    word = "".join(chance.choice('abc"\\\néß😀 ') for _ in range(chance.randrange(20)))
    return {
        "long": chance.randrange(-(2**63), 2**63),
        "string": word,
        "boolean": chance.random() < 0.5,
        "double": chance.choice([chance.random(), chance.randrange(100) / 4, 1e300 * chance.random(), 5]),
        "decimal(12,2)": chance.randrange(10**6) / 100,
        "date": f"20{chance.randrange(100):02}-{chance.randrange(1, 14):02}-{chance.randrange(1, 32):02}",
        "timestamp": f"2024-02-{chance.randrange(1, 31):02}T12:34:56.{chance.randrange(10**6)}+01:00",
        "binary": chance.choice(["", "YQ==", "YWI=", "YWJj", "a", "YQ=", "=YQ="]),
        "array<string>": [word, None, word][: chance.randrange(4)],
        "map<string,double>": {word: 1.5, "b": None, "c": -0.0},
        TYPES["place"]: {"lat": 1, "names": [{"n": word, "w": 3}, None, {}], word: [[], {}]},
    }[kind]


def document(chance: random.Random) -> bytes:
    names = chance.sample(sorted(TYPES), chance.randrange(1, len(TYPES)))
    found = {"id": 1} | {name: value_of(chance, TYPES[name]) for name in names}
    if chance.random() < 0.2:
        found["more"] = {"a": [found.copy()], "b": {}}
    text = json.dumps(
        found, ensure_ascii=chance.random() < 0.5, separators=chance.choice([(",", ":"), (" , ", "\n: ")])
    )
    data = text.encode()
    kind = chance.randrange(5)
    if kind == 0:
        return data
    if kind == 1:
        return data[: chance.randrange(len(data))]
    if kind == 2:
        return data[: chance.randrange(len(data))] + chance.choice(ENDS).encode()
    if kind == 3:
        return b'{"' + chance.choice(sorted(TYPES)).encode() + b'":' + chance.choice(ENDS).encode()
    return damaged(chance, data)


def guarded_array(memory: GuardedMemory, values: list[bytes]) -> pa.Array:
    """An Arrow array whose last value ends at the guard."""
    ends = [0]
    for value in values:
        ends.append(ends[-1] + len(value))
    offsets = pa.py_buffer(struct.pack(f"<{len(ends)}i", *ends))
    return pa.Array.from_buffers(
        pa.binary(), len(values), [None, offsets, pa.py_buffer(memory.put(b"".join(values)))]
    )


def compare(found: Decoded, expected: Decoded, seed: int) -> None:
    assert found.errors.equals(expected.errors), f"seed {seed}: {found.errors} and not {expected.errors}"
    for one, other in zip(found.columns, expected.columns, strict=True):
        one.validate(full=True)
        # As text, since NaN is not equal to itself and minus zero is to zero.
        assert one.type == other.type
        assert repr(one.to_pylist()) == repr(other.to_pylist()), f"seed {seed}: {one} and not {other}"


def fuzz_json(seed: int, rounds: int) -> None:
    fields = tuple(Field(name, kind, required=False) for name, kind in TYPES.items())
    decoders = [
        JsonFast(Decoding("json", fields, unknown=unknown), "", compile_columns(fields))
        for unknown in ("ignore", "keep", "reject")
    ]
    memory = GuardedMemory(1 << 20)
    for number in range(seed, seed + rounds):
        chance = random.Random(number)
        decoder = chance.choice(decoders)
        values = guarded_array(memory, [document(chance) for _ in range(chance.choice((1, 1, 1, 4)))])
        compare(decoder.decode(values), decoder.reference.decode(values), number)


AVRO: dict[str, Any] = {
    "id": "long",
    "i": "int",
    "flag": "boolean",
    "single": "float",
    "ratio": "double",
    "name": ["null", "string"],
    "blob": ["bytes", "null"],
    "hash": {"type": "fixed", "name": "Hash", "size": 3},
    "status": {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID", "LOST"]},
    "price": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
    "day": {"type": "int", "logicalType": "date"},
    "millis": {"type": "long", "logicalType": "timestamp-millis"},
    "nanos": {"type": "long", "logicalType": "timestamp-nanos"},
    "clock": ["null", {"type": "long", "logicalType": "local-timestamp-micros"}],
    "text": "string",
}
NUMBERS = (
    0,
    1,
    -1,
    63,
    64,
    -64,
    127,
    128,
    2**31 - 1,
    -(2**31),
    2**31,
    2**62,
    2**63 - 1,
    -(2**63),
    253402300799999,
)


def avro_value(chance: random.Random, schema: Any) -> Any:
    kind = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(kind, list):
        return (
            None
            if chance.random() < 0.4
            else avro_value(chance, next(each for each in kind if each != "null"))
        )
    small = chance.choice([number for number in NUMBERS if abs(number) < 2**31])
    word = "".join(chance.choice("ab\0é😀") for _ in range(chance.choice((0, 1, 7, 8, 9, 30))))
    values = {
        "long": chance.choice((*NUMBERS, chance.randrange(10**15))),
        "int": chance.choice((small, chance.randrange(-(10**6), 10**6))),
        "boolean": chance.random() < 0.5,
        "float": chance.choice((0.5, -0.0, float("nan"), float("inf"), 3e38)),
        "double": chance.choice((0.1, -0.0, float("nan"), float("-inf"), 1e300, chance.random())),
        "string": word,
        "bytes": chance.randbytes(chance.choice((0, 1, 4, 5, 8, 9, 20))),
        "fixed": chance.randbytes(3),
        "enum": chance.choice(("NEW", "PAID", "LOST")),
    }
    return values[kind]


def flat_decoder(format_: Any, schema: str, fields: list[Field], unknown: Any, **more: Any) -> SchemaRows:
    decoder = compile_decoder(Decoding(format_, tuple(fields), schema=schema, unknown=unknown, **more))
    assert isinstance(decoder, SchemaRows)
    assert decoder.own is not None
    assert decoder.own.flat is not None
    return decoder


def fuzz_flat(
    decoders: list[SchemaRows], encode: Callable[[random.Random], bytes], seed: int, rounds: int
) -> None:
    memory = GuardedMemory(1 << 20)
    for number in range(seed, seed + rounds):
        chance = random.Random(number)
        decoder = chance.choice(decoders)
        values = []
        for _ in range(chance.choice((1, 1, 1, 4))):
            value = encode(chance)
            kind = chance.randrange(3)
            if kind == 1:
                value = value[: chance.randrange(len(value) + 1)] + chance.choice(
                    (b"", b"\xff", b"\x80", b"\0", b"\xc3")
                )
            elif kind == 2 and value:
                value = damaged(chance, value)
            values.append(value)
        array = guarded_array(memory, values)
        assert decoder.own is not None
        compare(decoder.decode(array), decoder.checked(decoder.own, array, 0), number)


def fuzz_avro(seed: int, rounds: int) -> None:
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": name, "type": kind} for name, kind in AVRO.items()],
    }
    plain = {name: json.loads(json.dumps(kind).replace("logicalType", "was")) for name, kind in AVRO.items()}
    raw = fastavro.parse_schema(
        {**schema, "fields": [{"name": name, "type": kind} for name, kind in plain.items()]}
    )

    def encode(chance: random.Random) -> bytes:
        stream = io.BytesIO()
        fastavro.schemaless_writer(
            stream, raw, {name: avro_value(chance, kind) for name, kind in plain.items()}
        )
        return stream.getvalue()

    some = [
        Field("name", "string"),
        Field("i", "short", required=False),
        Field("single", "double"),
        Field("id", "int"),
    ]
    text = json.dumps(schema)
    fuzz_nested_avro(seed, rounds)
    fuzz_flat(
        [flat_decoder("avro", text, [], "keep"), flat_decoder("avro", text, some, "ignore")],
        encode,
        seed,
        rounds,
    )


def fuzz_nested_avro(seed: int, rounds: int) -> None:
    """Only that nothing is read past the end: there is no second opinion."""
    inner = [
        {"name": "a", "type": {"type": "map", "values": ["null", "long", "string"]}},
        {"name": "b", "type": "float"},
    ]
    items = {"type": "array", "items": {"type": "record", "name": "I", "fields": inner}}
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "id", "type": "long"}, {"name": "items", "type": items}],
    }
    decoder = compile_decoder(Decoding("avro", (Field("id", "long"),), schema=json.dumps(schema)))
    memory = GuardedMemory(1 << 20)
    for number in range(seed, seed + rounds):
        chance = random.Random(number)
        rows = [{"a": {"k": chance.choice((None, 5, "x"))}, "b": 0.5} for _ in range(chance.randrange(4))]
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, schema, {"id": 1, "items": rows})
        value = stream.getvalue()
        value = (
            value[: chance.randrange(1, len(value) + 1)] if chance.random() < 0.5 else damaged(chance, value)
        )
        decoder.decode(guarded_array(memory, [value]))


PROTO = """
syntax = "proto3"; import "google/protobuf/timestamp.proto";
message M {
  int32 a = 1; int64 b = 2; uint32 c = 3; uint64 d = 4; sint32 e = 5; sint64 f = 6; fixed32 g = 7; fixed64 h = 8;
  sfixed32 i = 9; sfixed64 j = 10; bool k = 11; string l = 12; bytes m = 13; float n = 14; double o = 15;
  optional int32 p = 16; optional string q = 17; S r = 18; google.protobuf.Timestamp s = 100; optional bool t = 1000;
  enum S { NONE = 0; ONE = 1; MINUS = -1; }
}
"""


def fuzz_protobuf(seed: int, rounds: int) -> None:
    message = message_factory.GetMessageClass(Schema(PROTO).message("M"))
    limits = {
        "a": 31,
        "b": 63,
        "e": 31,
        "f": 63,
        "i": 31,
        "j": 63,
        "p": 31,
        "c": 32,
        "d": 64,
        "g": 32,
        "h": 64,
    }

    def encode(chance: random.Random) -> bytes:
        found = message()
        for name, bits in limits.items():
            low = 0 if name in "cdgh" else -(2**bits)
            if chance.random() < 0.5:
                setattr(found, name, chance.choice((low, 2**bits - 1, chance.randrange(low, 2**bits), 1)))
        found.k, found.n, found.o = (
            chance.random() < 0.5,
            chance.choice((0.5, -0.0, float("nan"))),
            chance.random(),
        )
        found.l = "".join(chance.choice("ab\0é😀") for _ in range(chance.choice((0, 1, 7, 8, 30))))
        found.m, found.r = chance.randbytes(chance.choice((0, 3))), chance.choice((0, 1, -1, 7))
        if chance.random() < 0.5:
            found.q, found.t = "", False
            found.s.seconds = chance.choice((0, 5, 1_700_000_000, -62135596800, 253402300800))
            found.s.nanos = chance.choice((0, 1, 999_999_999, 10**9, -1))
        extra = chance.choice((b"", b"", b"\xf8\x7f\x01", b"\x08\x05", b"\xa2\x06\x02\x08\x01", b"\x0a\x01a"))
        return bytes(found.SerializeToString() + extra)

    some = [
        Field("q", "string"),
        Field("a", "byte"),
        Field("d", "long"),
        Field("n", "double"),
        Field("z", "int", False),
    ]
    decoders = [flat_decoder("protobuf", PROTO, [], unknown) for unknown in ("ignore", "keep", "reject")]
    decoders.append(flat_decoder("protobuf", PROTO, some, "ignore"))
    fuzz_flat(decoders, encode, seed, rounds)


def fuzz_csv(seed: int, rounds: int) -> None:
    kinds = ("long", "string", "double", "boolean", "timestamp", "date", "decimal(8,2)", "binary", "byte")
    fields = tuple(Field(f"f{place}", kind, required=place == 0) for place, kind in enumerate(kinds))
    cells: dict[str, tuple[str, ...]] = {
        "long": ("1", "-5", "9223372036854775807", "9223372036854775808", "1.0", "01", "+1", "-", " 1"),
        "string": (
            "",
            "a",
            "grün😀",
            "NULL",
            "a b",
            '"q"',
            '"a,b"',
            '"a""b"',
            '"open',
            "a\nb",
            '"a\nb"',
            "\0",
        ),
        "double": ("1", "-0.0", "1e5", "1e400", ".5", "nan", "0.1", '"2.5"', "12345678901234567890"),
        "boolean": ("true", "false", "null", "True", '"true"', "tru"),
        "timestamp": (
            "0",
            "-1",
            "1.5",
            "2024-01-01T00:00:00Z",
            "2024-01-01 00:00+01",
            "2024-01-01",
            '"5"',
            "x",
        ),
        "date": ("2024-02-29", "2023-02-29", "x"),
        "decimal(8,2)": ("1.50", "1.555", "123456.78", "1234567.8", "1e2", "-0"),
        "binary": ("YQ==", "YQ", "", '""'),
        "byte": ("127", "128", "-128", '"1"'),
    }
    settings: tuple[dict[str, str], ...] = (
        {},
        {"delimiter": ";", "quote": "'"},
        {"null": "NULL"},
        {"null": "ü"},
        {"delimiter": "\t"},
    )
    decoders = [compile_decoder(Decoding("csv", fields, csv=each)) for each in settings]
    memory = GuardedMemory(1 << 20)
    for number in range(seed, seed + rounds):
        chance = random.Random(number)
        place = chance.randrange(len(settings))
        good = chance.random() < 0.5
        row = [cells[kind][0] if good else chance.choice((*cells[kind], "")) for kind in kinds]
        text = settings[place].get("delimiter", ",").join(row) + chance.choice(
            ("", "", "\n", "\r\n", "\r", "\n\n", ",x")
        )
        value = text.encode()
        value = (
            damaged(chance, value)
            if chance.random() < 0.3
            else value[: chance.choice((len(value), len(value), 9))]
        )
        decoder = decoders[place]
        assert isinstance(decoder, RowDecoder)
        array = guarded_array(memory, [value])
        compare(decoder.decode(array), RowDecoder.decode(decoder, array), number)


if __name__ == "__main__":
    format_, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    {"json": fuzz_json, "avro": fuzz_avro, "protobuf": fuzz_protobuf, "csv": fuzz_csv}[format_](seed, rounds)
    print(f"{rounds} rounds")
