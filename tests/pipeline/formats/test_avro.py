"""Avro by its own schema and by a registry's."""

import io
import json
import pickle
import struct
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import Decoder, FormatError, compile_decoder
from holdfast.pipeline.formats.registry import RegistryUnavailable
from holdfast.testing.schema_registry import SchemaRegistry


def record(*fields: Any, name: str = "Order") -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "namespace": "shop",
        "fields": [{"name": a, "type": b} for a, b in fields],
    }


def encode(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def rows(decoder: Decoder, values: list[bytes | None]) -> list[tuple[Any, ...]]:
    found = decoder.decode(pa.array(values, pa.binary()))
    return list(zip(*(each.to_pylist() for each in (*found.columns, found.errors)), strict=True))


def plain(schema: Any, *fields: Field, **options: Any) -> Decoder:
    return compile_decoder(Decoding("avro", fields, schema=json.dumps(schema), **options))


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


EVERY = record(
    ("id", "long"),
    ("i", "int"),
    ("flag", "boolean"),
    ("single", "float"),
    ("ratio", "double"),
    ("name", ["null", "string"]),
    ("blob", "bytes"),
    ("hash", {"type": "fixed", "name": "Hash", "size": 2}),
    ("status", {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID"]}),
    ("before", ["Status", "null"]),
    ("price", logical("bytes", "decimal", precision=10, scale=2)),
    ("day", logical("int", "date")),
    ("millis", logical("long", "timestamp-millis")),
    ("micros", logical("long", "timestamp-micros")),
    ("clock", logical("long", "local-timestamp-millis")),
    ("uuid", logical("string", "uuid")),
    ("number", ["int", "long", "null"]),
    ("tags", {"type": "array", "items": ["null", "string"]}),
    ("scores", {"type": "map", "values": "long"}),
    ("place", record(("lat", "double"), ("lon", ["null", "double"]), name="Place")),
    ("places", {"type": "array", "items": "shop.Place"}),
)
VALUE = {
    "id": 2**63 - 1,
    "i": -5,
    "flag": True,
    "single": 0.5,
    "ratio": 0.1,
    "name": "grün",
    "blob": b"\0\xff",
    "hash": b"ab",
    "status": "PAID",
    "before": None,
    "price": Decimal("-12.34"),
    "day": date(2024, 2, 29),
    "millis": datetime(2024, 2, 29, 1, 2, 3, 4000, UTC),
    "micros": datetime(2024, 2, 29, 1, 2, 3, 4, UTC),
    "clock": datetime(2024, 2, 29, 1, 2, 3),
    "uuid": "6f0e8f9c-6d3b-4a63-9e42-0123456789ab",
    "number": 7,
    "tags": ["a", None],
    "scores": {"a": 1},
    "place": {"lat": 1.5, "lon": None},
    "places": [{"lat": 2.0, "lon": 3.0}],
}


def test_columns_are_derived_from_the_schema() -> None:
    decoder = plain(EVERY)
    assert decoder.spark_ddl == (
        "`id` bigint, `i` int, `flag` boolean, `single` float, `ratio` double, `name` string, `blob` binary, "
        "`hash` binary, `status` string, `before` string, `price` decimal(10,2), `day` date, `millis` timestamp, "
        "`micros` timestamp, `clock` timestamp_ntz, `uuid` string, `number` bigint, `tags` array<string>, "
        "`scores` map<string,bigint>, `place` struct<`lat`:double,`lon`:double>, "
        "`places` array<struct<`lat`:double,`lon`:double>>"
    )
    expected = {**VALUE, "scores": [("a", 1)]}
    nothing = (None,) * len(VALUE)
    assert rows(decoder, [encode(EVERY, VALUE), None]) == [(*expected.values(), None), (*nothing, None)]


def test_named_fields_are_picked_and_checked() -> None:
    schema = record(("id", "int"), ("ratio", "float"), ("name", ["null", "string"]), ("more", "bytes"))
    wider = plain(schema, Field("ratio", "double"), Field("id", "long"), Field("name", "string"))
    good = encode(schema, {"id": 1, "ratio": 0.5, "name": "a", "more": b""})
    nameless = encode(schema, {"id": 1, "ratio": 0.5, "name": None, "more": b""})
    assert rows(wider, [good, nameless]) == [
        (0.5, 1, "a", None),
        (None, None, None, 'required field "name" is null'),
    ]
    narrow = plain(schema, Field("id", "byte"))
    big = encode(schema, {"id": 1000, "ratio": 0.5, "name": "a", "more": b""})
    assert rows(narrow, [big]) == [(None, 'field "id": expected byte, found "1000": out of range')]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((Field("id", "string"),), 'field "id": Avro\'s long cannot be read as string'),
        ((Field("price", "double"),), 'field "price": Avro\'s decimal cannot be read as double'),
        ((Field("missing", "long"),), 'required field "missing" is not in the schema'),
        ((Field("place", "struct<alt:int not null>"),), 'required field "place.alt" is not in the schema'),
        ((Field("scores", "map<string,string>"),), "cannot be read as string"),
    ],
)
def test_fields_that_the_schema_cannot_fill_are_refused_at_once(
    fields: tuple[Field, ...], reason: str
) -> None:
    with pytest.raises(FormatError, match=reason.replace("[", r"\[")):
        plain(EVERY, *fields)


@pytest.mark.parametrize(
    "schema",
    [
        record(("a", ["string", "long"])),
        record(("a", "null")),
        record(("_a", "long")),
        record(("a", "long"), ("A", "long")),
        record(),
        record(("next", ["null", "shop.Order"])),
        {"type": "record", "name": "X"},
        "nothing",
    ],
)
def test_schemas_without_columns_are_refused(schema: Any) -> None:
    with pytest.raises(FormatError):
        plain(schema)


def test_a_schema_that_is_no_record_has_the_column_value() -> None:
    assert rows(plain("string"), [encode("string", "key"), b""]) == [("key", None), (None, "empty value")]
    assert plain(["null", "long"]).spark_ddl == "`value` bigint"
    assert rows(plain("long", Field("id", "long")), [encode("long", 5)]) == [(5, None)]


SIMPLE = record(("id", "long"), ("name", "string"), ("kind", ["null", "string"]))


def test_bytes_that_are_not_exactly_one_value_are_errors() -> None:
    good = encode(SIMPLE, {"id": 1, "name": "ab", "kind": None})
    found = rows(
        plain(SIMPLE), [good + b"\0", good[:-1], b"", b"\x02\x04\xff\xff\0", b"\x02\x04ab\x06", b"\xff" * 30]
    )
    assert [each[-1] for each in found] == [
        "trailing content: 1 bytes after the value",
        "not Avro of this schema: it ends too early",
        "empty value",
        "not Avro of this schema: invalid UTF-8 in a string",
        "not Avro of this schema: a choice that the schema does not have",
        found[-1][-1],
    ]
    assert found[-1][-1].startswith("not Avro of this schema")
    assert all(each[:-1] == (None, None, None) for each in found)


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=80), st.integers(0, 80), st.binary(max_size=3))
def test_any_bytes_are_a_row_or_an_error(noise: bytes, place: int, inserted: bytes) -> None:
    good = encode(EVERY, VALUE)
    values = [noise, good[:place] + inserted + good[place:], good[:place] + noise, good[:place]]
    found = plain(EVERY).decode(pa.array(values, pa.binary()))
    assert len(found.errors) == 4
    for column in found.columns:
        column.validate(full=True)


NESTED = record(
    ("tags", {"type": "array", "items": ["null", "string"]}),
    ("scores", {"type": "map", "values": "long"}),
    ("place", record(("kind", {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}), name="Place")),
)


@pytest.mark.parametrize(
    ("value", "is_fine"),
    [
        (b"\x02\x02\x02a\x00\x02\x02k\x04\x00\x02", True),
        (b"\x01\x06\x02\x02a\x00\x00\x02", True),  # a block with its size before it
        (b"\x02\x01\x02a\x00\x00\x02", False),  # the branch -1 of a union
        (b"\x00\x00\x01", False),  # the symbol -1 of an enum
        (b"\x00\x00\x04", False),
        (b"\x00\x00\x02\x00", False),
        (b"\xfe\xff\xff\xff\x0f\x00", False),  # more items than there are bytes
    ],
)
def test_a_nested_value_follows_its_schema_to_the_letter(value: bytes, is_fine: bool) -> None:
    row = rows(plain(NESTED), [value, None])[0]
    assert (row[-1] is None) == is_fine
    assert (row[2] is None) == (not is_fine)


def test_flat_records_follow_their_schema_to_the_letter() -> None:
    schema = record(
        ("kind", {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}), ("name", ["null", "string"])
    )
    found = rows(plain(schema), [b"\x02\x00", b"\x01\x00", b"\x02\x01", b"\x03\x00"])
    assert [each[-1] is None for each in found] == [True, False, False, False]


def test_instants_out_of_the_calendar_are_errors() -> None:
    decoder = plain(record(("at", logical("long", "timestamp-micros")), ("day", logical("int", "date"))))
    raw = record(("at", "long"), ("day", "int"))
    errors = [
        each[-1]
        for each in rows(
            decoder, [encode(raw, {"at": 2**62, "day": 0}), encode(raw, {"at": 0, "day": 2**31 - 1})]
        )
    ]
    assert ['field "at"' in errors[0], 'field "day"' in errors[1]] == [True, True]


def test_unknown_fields_follow_the_policy() -> None:
    value = encode(SIMPLE, {"id": 1, "name": "ab", "kind": "x"})
    kept = plain(SIMPLE, Field("id", "long"), unknown="keep")
    assert rows(kept, [value]) == [(1, '{"name":"ab","kind":"x"}', None)]
    with pytest.raises(FormatError, match="unknown field"):
        plain(SIMPLE, Field("id", "long"), unknown="reject")


# ------------------------------------------------------------------------ with a registry


@pytest.fixture
def registry() -> Iterator[SchemaRegistry]:
    with SchemaRegistry() as running:
        yield running


def register(registry: SchemaRegistry, subject: str, schema: Any, references: Any = ()) -> int:
    client = SchemaRegistryClient({"url": registry.url})
    return int(client.register_schema(subject, Schema(json.dumps(schema), "AVRO", list(references))))


def framed(schema_id: int, payload: bytes) -> bytes:
    return struct.pack(">bI", 0, schema_id) + payload


def by_registry(registry: SchemaRegistry, *fields: Field, **options: Any) -> Decoder:
    settings = {"url": registry.url, "max.retries": "0"}
    return compile_decoder(Decoding("avro", fields, registry=settings, **options))


def test_each_record_is_read_by_the_schema_it_was_written_with(registry: SchemaRegistry) -> None:
    first, second = record(("id", "int")), record(("name", ["null", "string"]), ("id", "long"))
    one, two = register(registry, "a-value", first), register(registry, "b-value", second)
    other = register(registry, "c-value", record(("id", "string")))
    decoder = by_registry(registry, Field("id", "long"), Field("name", "string", required=False))
    decoder = pickle.loads(pickle.dumps(decoder))
    found = rows(
        decoder,
        [
            framed(one, encode(first, {"id": 1})),
            framed(two, encode(second, {"id": 2, "name": "b"})),
            None,
            framed(other, b"\x02a"),
            framed(999, b"\0"),
            b"\0\0",
            b"",
            b'{"id":1}',
        ],
    )
    assert found[:3] == [(1, None, None), (2, "b", None), (None, None, None)]
    assert [each[-1] for each in found[3:]] == [
        f'schema id {other}: field "id": Avro\'s string cannot be read as long'.replace("long", "bigint"),
        "schema id 999: the registry does not know it",
        'no schema registry header: expected a zero byte and an id, found "\\u0000\\u0000"',
        "empty value",
        'no schema registry header: expected a zero byte and an id, found "{\\"id\\":1}"',
    ]


def test_the_definitions_schema_names_columns_and_defaults(registry: SchemaRegistry) -> None:
    reader = record(("id", "long"))
    reader["fields"].append({"name": "country", "type": "string", "default": "SE"})
    written = record(("id", "int"))
    schema_id = register(registry, "a-value", written)
    decoder = by_registry(registry, schema=json.dumps(reader))
    assert rows(decoder, [framed(schema_id, encode(written, {"id": 1}))]) == [(1, "SE", None)]


def test_references_to_other_subjects_are_followed(registry: SchemaRegistry) -> None:
    place = record(("lat", "double"), name="Place")
    register(registry, "place", place)
    order = record(("id", "long"), ("place", "shop.Place"))
    schema_id = register(registry, "a-value", order, [SchemaReference("shop.Place", "place", 1)])
    decoder = by_registry(registry, Field("id", "long"), Field("place", "struct<lat:double>"))
    inline = record(("id", "long"), ("place", place))
    value = framed(schema_id, encode(inline, {"id": 1, "place": {"lat": 1.5}}))
    assert rows(decoder, [value]) == [(1, {"lat": 1.5}, None)]


def test_a_registry_that_is_away_stops_the_batch_and_blames_no_record(registry: SchemaRegistry) -> None:
    schema_id = register(registry, "a-value", SIMPLE)
    value = framed(schema_id, encode(SIMPLE, {"id": 1, "name": "ab", "kind": None}))
    decoder = by_registry(registry, Field("id", "long"))
    registry.stop()
    with pytest.raises(RegistryUnavailable, match="does not answer"):
        rows(decoder, [value])
    registry.start()
    assert rows(decoder, [value]) == [(1, None)]
    registry.stop()
    assert rows(decoder, [value]) == [(1, None)]


def test_a_registry_decoder_needs_an_address_and_columns(registry: SchemaRegistry) -> None:
    with pytest.raises(FormatError, match="name the fields"):
        by_registry(registry)
    with pytest.raises(FormatError, match="url"):
        compile_decoder(Decoding("avro", (Field("id", "long"),), registry={}))
    with pytest.raises(FormatError, match="schema"):
        compile_decoder(Decoding("avro", (Field("id", "long"),)))
