"""Protobuf by a .proto text, a descriptor set and a registry's schema."""

import base64
import contextlib
import pickle
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema as Registered
from confluent_kafka.schema_registry import SchemaReference, SchemaRegistryClient
from google.protobuf import descriptor_pb2, message_factory
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import Decoder, FormatError, compile_decoder
from holdfast.pipeline.formats.proto_text import parse_proto
from holdfast.pipeline.formats.protobuf import Schema
from holdfast.pipeline.formats.schema_rows import Mismatch
from holdfast.testing.schema_registry import SchemaRegistry

ORDER = """
syntax = "proto3"; // a comment
package shop.v1;
import "google/protobuf/timestamp.proto";
import public "google/protobuf/wrappers.proto";
option java_package = "org.example";

/* All of it. */
message Order {
  option deprecated = true;
  int64 id = 1;
  optional string name = 2 [json_name = "n", (some.option).x = { a: 1 }];
  google.protobuf.Timestamp at = 3;
  Status status = 4;
  repeated Item items = 5 [deprecated = true];
  map<string, Item> by_name = 6;
  map<int32, bool> flags = 7;
  oneof payment {
    string card = 8;
    .shop.v1.Order.Item.Voucher voucher = 9;
  }
  google.protobuf.DoubleValue weight = 10;
  bytes blob = 11;
  repeated int32 numbers = 12;
  uint64 wide = 13; uint32 half = 14; float single = 15; double ratio = 16; bool flag = 17; sint32 small = 0x12;
  reserved 30 to 40, 50; reserved "old";

  message Item {
    string sku = 1;
    message Voucher { string code = 1; }
  }
  enum Status { option allow_alias = true; UNKNOWN = 0; PAID = 1; SETTLED = 1 [deprecated = true]; LOST = -1; }
}
message Other { string a = 1; };
service Shop { rpc Buy(Order) returns (Other) { option idempotency_level = NO_SIDE_EFFECTS; } }
"""


def message_class(text: str, name: str) -> Any:
    return message_factory.GetMessageClass(Schema(text).message(name))


Order = message_class(ORDER, "shop.v1.Order")


def plain(
    *fields: Field, text: str = ORDER, message: str | None = "shop.v1.Order", **options: Any
) -> Decoder:
    return compile_decoder(Decoding("protobuf", fields, schema=text, message=message, **options))


def rows(decoder: Decoder, values: list[bytes | None]) -> list[tuple[Any, ...]]:
    found = decoder.decode(pa.array(values, pa.binary()))
    return list(zip(*(each.to_pylist() for each in (*found.columns, found.errors)), strict=True))


def full_order() -> Any:
    order = Order(
        id=-5, name="", status=1, blob=b"\xff", numbers=[1, -2], wide=2**64 - 1, half=2**32 - 1, small=-3
    )
    order.single, order.ratio, order.flag = 0.5, 0.1, True
    order.at.seconds, order.at.nanos = 1_700_000_000, 123_456_789
    order.items.add(sku="a")
    order.by_name["k"].sku = "b"
    order.flags[3] = True
    order.voucher.code = "v"
    order.weight.value = 1.5
    return order


def test_columns_are_derived_from_the_message() -> None:
    decoder = pickle.loads(pickle.dumps(plain()))
    item = "struct<`sku`:string>"
    assert decoder.spark_ddl == (
        "`id` bigint, `name` string, `at` timestamp, `status` string, "
        f"`items` array<{item}>, `by_name` map<string,{item}>, `flags` map<string,boolean>, `card` string, "
        "`voucher` struct<`code`:string>, `weight` double, `blob` binary, `numbers` array<int>, "
        "`wide` decimal(20,0), `half` bigint, `single` float, `ratio` double, `flag` boolean, `small` int"
    )
    at = datetime(2023, 11, 14, 22, 13, 20, 123456, UTC)
    row = (
        *(-5, "", at, "PAID", [{"sku": "a"}], [("k", {"sku": "b"})], [("3", True)], None, {"code": "v"}, 1.5),
        *(b"\xff", [1, -2], Decimal(2**64 - 1), 2**32 - 1, 0.5, 0.1, True, -3),
    )
    empty: tuple[Any, ...] = (
        0,
        None,
        None,
        "UNKNOWN",
        [],
        [],
        [],
        None,
        None,
        None,
        b"",
        [],
        0,
        0,
        0.0,
        0.0,
        False,
        0,
    )
    assert rows(decoder, [full_order().SerializeToString(), b"", None]) == [
        (*row, None),
        (*empty, None),
        ((None,) * 19),
    ]


def test_named_fields_are_picked_and_required() -> None:
    decoder = plain(Field("name", "string"), Field("wide", "long"), Field("missing", "int", required=False))
    found = rows(
        decoder,
        [
            Order(name="a", wide=5).SerializeToString(),
            Order().SerializeToString(),
            Order(name="a", wide=2**63).SerializeToString(),
        ],
    )
    assert found[0] == ("a", 5, None, None)
    assert [each[-1] for each in found[1:]] == [
        'required field "name" is missing',
        'field "wide": expected long, found "9223372036854775808": out of range',
    ]


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (Field("id", "string"), "cannot be read as string"),
        (Field("items", "string"), "a repeated field cannot be read as string"),
        (Field("by_name", "array<string>"), "a map cannot be read"),
        (Field("voucher", "string"), "the message shop.v1.Order.Item.Voucher cannot be read as string"),
        (Field("none", "string"), 'required field "none" is not in the message'),
    ],
)
def test_fields_that_the_message_cannot_fill_are_refused_at_once(field: Field, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        plain(field)


def test_bytes_that_are_no_such_message_are_errors() -> None:
    good = Order(id=1).SerializeToString()
    found = rows(
        plain(Field("id", "long"), Field("status", "string")),
        [good + b"\x08", good + b"\x0a\x01a", good + b"\x12\x01\xff", b"\x20\x09", b"{}"],
    )
    assert [each[-1] for each in found] == [
        "not a message shop.v1.Order: its bytes do not parse",
        'field "id": written with the wire type 2 of another type',
        "not a message shop.v1.Order: its bytes do not parse",
        'field "status": expected string, found "9": no value of the enum',
        "not a message shop.v1.Order: its bytes do not parse",
    ]


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=60), st.integers(0, 120))
def test_any_bytes_are_a_row_or_an_error(noise: bytes, place: int) -> None:
    good = full_order().SerializeToString()
    values = [noise, good[:place] + noise + good[place:], good[:place], good + noise]
    found = plain(unknown="keep").decode(pa.array(values, pa.binary()))
    assert len(found.errors) == 4
    for column in found.columns:
        column.validate(full=True)


def test_unknown_fields_follow_the_policy() -> None:
    value = Order(id=1, name="a", numbers=[1, 2]).SerializeToString() + b"\xa0\x06\x07"
    fields = (Field("id", "long"),)
    assert rows(plain(*fields), [value]) == [(1, None)]
    assert rows(plain(*fields, unknown="reject"), [value]) == [(None, 'unknown field "100"')]
    assert rows(plain(*fields, unknown="reject"), [Order(name="a").SerializeToString()]) == [
        (None, 'unknown field "name"')
    ]
    assert rows(plain(*fields, unknown="keep"), [value]) == [
        (1, '{"100":[7],"name":"a","numbers":[1,2]}', None)
    ]


@pytest.mark.parametrize(
    "broken",
    [
        b"\x12\x02\xff\xfe",  # name
        b"\x1a\x01\xff",  # tags
        b"\x22\x06\x0a\x01a\x12\x01\xff",  # a map's value
        b"\x22\x03\x0a\x01\xff",  # a map's key
        b"\x2a\x05\x0a\x03\xed\xa0\x80",  # a surrogate, in a message
    ],
)
def test_a_text_of_proto2_that_is_not_utf_8_is_an_error_of_its_record(broken: bytes) -> None:
    schema = """syntax = "proto2"; message M {
      optional int64 id = 1; optional string name = 2; repeated string tags = 3; map<string, string> by_name = 4;
      optional N inner = 5; } message N { optional string text = 1; }"""
    decoder = compile_decoder(Decoding("protobuf", schema=schema, message="M"))
    columns, errors = decoder.decode(pa.array([b"\x08\x01", broken, b"\x08\x02"], pa.binary()))
    assert columns[0].to_pylist() == [1, None, 2]
    first, second, third = errors.to_pylist()
    assert (first, third) == (None, None)
    assert "utf" in second.lower()


def test_proto2_requires_its_required_fields() -> None:
    text = (
        'package p; message A { required int32 a = 1; optional string b = 2 [default = "x"]; '
        "repeated Nothing c = 3; message Nothing {} }"
    )
    decoder = plain(Field("a", "int"), Field("b", "string", required=False), text=text, message="p.A")
    assert rows(decoder, [b"\x08\x01", b"\x12\x01a"]) == [
        (1, None, None),
        (None, None, 'required field "a" is missing'),
    ]


def test_a_descriptor_set_serves_as_well() -> None:
    files = descriptor_pb2.FileDescriptorSet()
    files.file.append(Schema(ORDER).file)
    text = base64.b64encode(files.SerializeToString()).decode()
    assert rows(plain(Field("id", "long"), text=text), [Order(id=3).SerializeToString()]) == [(3, None)]


def test_the_only_message_of_a_file_needs_no_name() -> None:
    decoder = plain(text='syntax = "proto3"; message A { int32 a = 1; }', message=None)
    assert rows(decoder, [b"\x08\x05"]) == [(5, None)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('syntax = "proto3"; import "other.proto"; message A { int32 a = 1; }', "only google/protobuf"),
        ('syntax = "proto3"; message A { B b = 1; }', "no type B"),
        ('syntax = "proto3"; message A { int32 a = 1', "ends too early"),
        ('syntax = "proto3"; message A { int32 a = x; }', "expected a number"),
        ('syntax = "proto3"; message A { int32 a = 1; int32 b = 1; }', "not valid"),
        ('syntax = "proto3"; message A { A next = 1; }', "holds itself"),
        ('syntax = "proto3"; message A { }', "no fields"),
        ('syntax = "proto4"; message A { }', "neither proto2 nor proto3"),
        ('edition = "2023"; message A { int32 a = 1; }', "FileDescriptorSet"),
        ("message A { int32 a = 1; }", "required, optional or repeated"),
        ('syntax = "proto3";\n\nmessage A { int32 a = 1; \x01 }', "line 3"),
        ('syntax = "proto3"; message B { int32 a = 1; }', "no message A"),
        ("", "no message A"),
    ],
)
def test_a_text_that_cannot_be_used_says_why(text: str, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        plain(text=text, message="A")


@example(ORDER.index("map<") + 3, "")
@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(0, len(ORDER)), st.sampled_from(["", "{", "}", ";", '"', "map<", "[", "=", "message", "\x00"])
)
def test_broken_texts_are_refused_and_never_crash(place: int, inserted: str) -> None:
    with contextlib.suppress(Mismatch):
        parse_proto(ORDER[:place] + inserted)
    with contextlib.suppress(Mismatch):
        Schema(ORDER[:place] + inserted + ORDER[place:])


# ------------------------------------------------------------------------ with a registry


@pytest.fixture
def registry() -> Iterator[SchemaRegistry]:
    with SchemaRegistry() as running:
        yield running


def register(registry: SchemaRegistry, subject: str, text: str, references: Any = ()) -> int:
    client = SchemaRegistryClient({"url": registry.url})
    return int(client.register_schema(subject, Registered(text, "PROTOBUF", list(references))))


def test_the_header_points_at_the_message(registry: SchemaRegistry) -> None:
    schema_id = register(registry, "a-value", ORDER)
    avro_id = int(
        SchemaRegistryClient({"url": registry.url}).register_schema("b", Registered('"string"', "AVRO"))
    )
    header = struct.pack(">bI", 0, schema_id)
    fields = (Field("id", "long", required=False), Field("a", "string", required=False))
    decoder = compile_decoder(Decoding("protobuf", fields, registry={"url": registry.url}))
    order = Order(id=3).SerializeToString()
    found = rows(
        decoder,
        [
            header + b"\0" + order,
            header + b"\x02\0" + order,
            header + b"\x02\x02\x0a\x01x",
            header + b"\x02\x08\x0a\x01x",
            header,
            header + b"\xff",
            header + b"\x7f",
            struct.pack(">bI", 0, avro_id) + b"\0" + order,
        ],
    )
    assert found == [
        (3, None, None),
        (3, None, None),
        (None, "x", None),
        (None, None, f"schema id {schema_id}: it has no message at [4]"),
        (None, None, "no schema registry header: its message indexes are cut short"),
        (None, None, "no schema registry header: its message indexes are cut short"),
        (None, None, "no schema registry header: -64 message indexes"),
        (None, None, f"schema id {avro_id}: it is a schema of AVRO, not of Protobuf"),
    ]
    only = compile_decoder(
        Decoding("protobuf", schema=ORDER, message="shop.v1.Other", registry={"url": registry.url})
    )
    assert rows(only, [header + b"\x02\x02\x0a\x01x", header + b"\0" + order]) == [
        ("x", None),
        (None, f"schema id {schema_id}: the message is shop.v1.Order, expected shop.v1.Other"),
    ]


def test_imports_come_from_the_registrys_references(registry: SchemaRegistry) -> None:
    register(registry, "place", 'syntax = "proto3"; package geo; message Place { double lat = 1; }')
    text = 'syntax = "proto3"; import "geo/place.proto"; message A { geo.Place place = 1; }'
    schema_id = register(registry, "a-value", text, [SchemaReference("geo/place.proto", "place", 1)])
    decoder = compile_decoder(
        Decoding("protobuf", (Field("place", "struct<lat:double>"),), registry={"url": registry.url})
    )
    payload = b"\x0a\x09\x09" + struct.pack("<d", 1.5)
    value = struct.pack(">bI", 0, schema_id) + b"\0" + payload
    assert rows(decoder, [value]) == [({"lat": 1.5}, None)]
