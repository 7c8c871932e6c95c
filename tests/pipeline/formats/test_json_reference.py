"""What strict JSON is: the reference's answers, case by case."""

import math
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import Decoder, compile_decoder


def decoder(kind: str = "long", *, required: bool = True, unknown: Any = "ignore") -> Decoder:
    return compile_decoder(Decoding("json", (Field("x", kind, required),), unknown=unknown))


def one(value: bytes | None, kind: str = "long", **options: Any) -> tuple[Any, str | None]:
    found = decoder(kind, **options).decode(pa.array([value], pa.binary()))
    return found.columns[0][0].as_py(), found.errors[0].as_py()


def test_a_tombstone_is_a_row_without_values_and_without_error() -> None:
    assert one(None) == (None, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "empty value"),
        (b" \n", "empty value: white space only"),
        (b'{"x":1}{"x":2}', "trailing content at character 7"),
        (b'{"x":1} x', "trailing content"),
        (b'{"x":1}\0', "trailing content"),
        (b'{"x":1', "not JSON"),
        (b"{'x':1}", "not JSON"),
        (b'{"x":1,}', "not JSON"),
        (b'{"x":01}', "not JSON"),
        (b'{"x":.5}', "not JSON"),
        (b'{"x":+1}', "not JSON"),
        (b'{"x":NaN}', "NaN is no JSON value"),
        (b'{"x":-Infinity}', "-Infinity is no JSON value"),
        (b'{"x":"\t"}', "not JSON: invalid control character"),
        (b'{"x":1/**/}', "not JSON"),
        (b'\xef\xbb\xbf{"x":1}', "not JSON"),
        (b'{"x":"\xff"}', "invalid UTF-8 at byte 6"),
        (b'{"x":"\xed\xa0\x80"}', "invalid UTF-8 at byte 6"),
        ('{"x":1}'.encode("utf-16"), "invalid UTF-8 at byte 0"),
        (b'{"x":1,"y":"\\ud800"}', "a lone surrogate"),
        (b'{"x":1,"\\udc00":1}', "a lone surrogate"),
        (b'{"x":1,"x":1}', 'duplicate key "x"'),
        (b'{"x":1,"\\u0078":1}', 'duplicate key "x"'),
        (b'{"x":1,"y":{"a":1,"a":2}}', 'duplicate key "a"'),
        (b'{"x":1,"y":[{"a":1,"a":2}]}', 'duplicate key "a"'),
        (b"[1]", "expected an object, found an array"),
        (b"1", "expected an object, found the number 1"),
        (b"null", "expected an object, found null"),
        (b"{}", 'required field "x" is missing'),
        (b'{"X":1}', 'required field "x" is missing'),
        (b'{"x":null}', 'required field "x" is null'),
    ],
)
def test_what_is_not_one_object_with_its_required_fields_is_an_error(value: bytes, reason: str) -> None:
    found, error = one(value)
    assert found is None
    assert error is not None
    assert error.startswith(reason) or reason in error


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("long", "9223372036854775807", 2**63 - 1),
        ("long", "-9223372036854775808", -(2**63)),
        ("long", "-0", 0),
        ("byte", "-128", -128),
        ("short", "32767", 32767),
        ("int", "-2147483648", -(2**31)),
        ("double", "1", 1.0),
        ("double", "-1e-7", -1e-7),
        ("double", "0.1", 0.1),
        ("double", "12345678901234567890123", 12345678901234567890123.0),
        ("double", "2.2250738585072011e-308", 2.2250738585072011e-308),
        ("double", "1e-400", 0.0),
        ("float", "0.1", 0.10000000149011612),
        ("float", "1.00000005960464477539062500000000001", 1.0000001192092896),  # not by way of a double
        ("float", "1.000000059604644775390625", 1.0),
        ("float", "7.0064923216240853546186479164495806564013097093825788587853e-46", 0.0),
        ("float", "7.0064923216240853546186479164495806564013097093825788587854e-46", 1.401298464324817e-45),
        ("boolean", "true", True),
        ("string", '"\\u00e9\\ud83d\\ude00\\n"', "é😀\n"),
        ("string", '""', ""),
        ("decimal(10,2)", "12.5", Decimal("12.50")),
        ("decimal(10,2)", "1.5000", Decimal("1.50")),
        ("decimal(10,2)", "1e3", Decimal("1000.00")),
        ("decimal(38,0)", "9" * 38, Decimal("9" * 38)),
        ("date", '"2024-02-29"', date(2024, 2, 29)),
        ("timestamp", '"2026-03-01T12:00:00Z"', datetime(2026, 3, 1, 12, tzinfo=UTC)),
        ("timestamp", '"2026-03-01 12:00:00.123456789+02:00"', datetime(2026, 3, 1, 10, 0, 0, 123456, UTC)),
        ("timestamp", '"2026-03-01T12:00-0130"', datetime(2026, 3, 1, 13, 30, tzinfo=UTC)),
        ("timestamp", "1772366400123", datetime(2026, 3, 1, 12, 0, 0, 123000, UTC)),
        ("timestamp", "-1", datetime(1969, 12, 31, 23, 59, 59, 999000, UTC)),
        ("timestamp_ntz", '"2026-03-01T12:00:00.5"', datetime(2026, 3, 1, 12, 0, 0, 500000)),
        ("binary", '"aGk="', b"hi"),
        ("binary", '""', b""),
        ("array<int>", "[1,null]", [1, None]),
        ("array<array<string>>", '[[],["a"]]', [[], ["a"]]),
        ("map<string,double>", '{"a":1,"b":null}', [("a", 1.0), ("b", None)]),
        (
            "struct<a:int,b:array<struct<c:date>>>",
            '{"b":[{"c":"2024-01-01"}]}',
            {"a": None, "b": [{"c": date(2024, 1, 1)}]},
        ),
    ],
)
def test_values_of_every_type(kind: str, text: str, value: Any) -> None:
    assert one(f'{{"x":{text}}}'.encode(), kind) == (value, None)


def test_minus_zero_keeps_its_sign() -> None:
    found, _ = one(b'{"x":-0.0}', "double")
    assert math.copysign(1, found) == -1


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("long", '"1"'),
        ("long", "1.0"),
        ("long", "1e3"),
        ("long", "true"),
        ("long", "9223372036854775808"),
        ("long", "1" * 5000),
        ("byte", "128"),
        ("int", "2147483648"),
        ("double", '"1.5"'),
        ("double", "1e400"),
        ("float", "3.5e38"),
        ("boolean", "1"),
        ("boolean", '"true"'),
        ("string", "1"),
        ("string", "{}"),
        ("decimal(10,2)", "1.234"),
        ("decimal(10,2)", "123456789.1"),
        ("decimal(10,2)", '"1.5"'),
        ("decimal(10,2)", "1e-400"),
        ("decimal(10,2)", "1e999999999999999999999"),
        ("date", '"2023-02-29"'),
        ("date", '"2023-1-1"'),
        ("date", "19000"),
        ("date", '"0000-01-01"'),
        ("timestamp", '"2026-03-01T12:00:00"'),
        ("timestamp", '"2026-03-01"'),
        ("timestamp", '"2026-03-01T24:00:00Z"'),
        ("timestamp", '"2026-03-01T12:00:60Z"'),
        ("timestamp", '"2026-03-01T12:00:00+19:00"'),
        ("timestamp", '"0001-01-01T00:00:00+01:00"'),
        ("timestamp", "1.5"),
        ("timestamp", "253402300800000"),
        ("timestamp_ntz", '"2026-03-01T12:00:00Z"'),
        ("timestamp_ntz", "1"),
        ("binary", '"aGk"'),
        ("binary", '"a*k="'),
        ("array<int>", "{}"),
        ("array<int>", '["1"]'),
        ("map<string,long>", "[]"),
        ("map<string,long>", '{"a":1.5}'),
        ("struct<a:int>", "[]"),
        ("struct<a:int>", '{"a":"1"}'),
        ("struct<a:int not null>", "{}"),
    ],
)
def test_nothing_is_coerced(kind: str, text: str) -> None:
    found, error = one(f'{{"x":{text}}}'.encode(), kind)
    assert found is None
    assert error is not None
    assert '"x' in error


def test_an_error_names_the_place_and_what_was_found() -> None:
    _, error = one(b'{"x":{"a":[{"b":1},{"b":"no"}]}}', "struct<a:array<struct<b:int>>>")
    assert error == 'field "x.a[1].b": expected int, found the string "no"'


@pytest.mark.parametrize("content", [b"A" * 5000, b"\\n" * 5000, "é".encode() * 5000, b"\\u0000" * 5000])
def test_an_error_shows_at_most_80_characters_of_content(content: bytes) -> None:
    for value in (
        b'{"x":"' + content + b'"}',
        b'{"x":1,"' + content + b'":1}',
        content,
        b'{"x":1}"' + content,
    ):
        _, error = one(value, "long", unknown="reject")
        assert error is not None
        shown = error.partition("found")[2] or error
        assert len(shown) < 130
        assert "\n" not in error


def test_optional_fields_may_be_absent_or_null() -> None:
    assert one(b"{}", required=False) == (None, None)
    assert one(b'{"x":null}', required=False) == (None, None)
    assert one(b'{"x":"1"}', required=False)[1] == 'field "x": expected long, found the string "1"'


def test_unknown_fields_are_ignored_rejected_or_kept() -> None:
    value = b'{"x":{"a":1,"b":[1.10,1e999]},"y":"\\u00e9","z":{"q":null}}'
    kind = "struct<a:int>"
    assert one(value, kind)[1] is None
    assert one(value, kind, unknown="reject")[1] == 'unknown field "y"'
    assert one(b'{"x":{"a":1,"b":2}}', kind, unknown="reject")[1] == 'unknown field "b" in "x"'
    kept = decoder(kind, unknown="keep").decode(pa.array([value, b'{"x":{}}'], pa.binary()))
    assert kept.columns[1].to_pylist() == ['{"y":"é","z":{"q":null},"x":{"b":[1.10,1e999]}}', None]


def test_a_decoder_travels_as_its_settings() -> None:
    original = decoder("array<int>", unknown="keep")
    copy = pickle.loads(pickle.dumps(original))
    assert copy.arrow_fields == original.arrow_fields
    values = pa.array([b'{"x":[1],"y":2}'], pa.binary())
    assert copy.decode(values).columns == original.decode(values).columns
    assert len(pickle.dumps(original)) < 2000


def test_without_fields_everything_can_be_kept() -> None:
    decoding = Decoding("json", unknown="keep")
    values = [b'{ "a" : [ 1.50 , {"b c":" "} ] ,"d":null}', b"{}", b'{"a":"\\u00e9"}', b'{"a":1,"a":2}', None]
    found = compile_decoder(decoding).decode(pa.array(values, pa.binary()))
    assert found.columns[0].to_pylist() == [
        '{"a":[1.50,{"b c":" "}],"d":null}',
        None,
        '{"a":"é"}',
        None,
        None,
    ]
    assert found.errors.to_pylist() == [None, None, None, 'duplicate key "a"', None]
