"""CSV, text and bytes."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import FormatError, compile_decoder

FIELDS = (
    Field("id", "long"),
    Field("name", "string", required=False),
    Field("price", "decimal(8,2)", required=False),
)


def rows(values: list[bytes | None], decoding: Decoding) -> list[tuple[Any, ...]]:
    """Each row's values, with its error last."""
    found = compile_decoder(decoding).decode(pa.array(values, pa.binary()))
    return list(zip(*(each.to_pylist() for each in (*found.columns, found.errors)), strict=True))


@pytest.mark.parametrize(
    ("value", "row"),
    [
        (b"1,a,2.50", (1, "a", Decimal("2.50"))),
        (b"1,a,2.50\n", (1, "a", Decimal("2.50"))),
        (b"1,a,2.50\r\n", (1, "a", Decimal("2.50"))),
        (b"1,,", (1, None, None)),
        (b'1,"",', (1, "", None)),
        (b'1,"a,""b""\nc",2', (1, 'a,"b"\nc', Decimal("2.00"))),
        ("1,ü,0".encode(), (1, "ü", Decimal("0.00"))),
    ],
)
def test_a_value_is_one_record_by_position(value: bytes, row: tuple[Any, ...]) -> None:
    assert rows([value], Decoding("csv", FIELDS)) == [(*row, None)]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "empty value"),
        (b"\n", "empty value"),
        (b"1,a", "expected 3 columns, found 2"),
        (b"1,a,2,3", "expected 3 columns, found 4"),
        (b"1,a,2\n2,b,3", "a second line"),
        (b"1,a,2\n\n", "a second line"),
        (b'1,"a,2', "never closed"),
        (b'1,"a"b,2', "unexpected"),
        (b'1,a"b,2', "unexpected"),
        (b"x,a,2", 'field "id": expected long, found "x": no integer'),
        (b" 1,a,2", "no integer"),
        (b",a,2", 'required field "id" is null'),
        (b"1,a,2.555", "more than 2 digits"),
        (b"1,\xff,2", "invalid UTF-8 at byte 2"),
    ],
)
def test_what_is_no_such_record_is_an_error(value: bytes, reason: str) -> None:
    (row,) = rows([value], Decoding("csv", FIELDS))
    assert row[:-1] == (None, None, None)
    assert reason in row[-1]


def test_delimiter_quote_and_null_are_settings() -> None:
    decoding = Decoding("csv", FIELDS, csv={"delimiter": ";", "quote": "'", "null": "NULL"})
    assert rows([b"1;'a;''b';NULL", b"1;;3", None], decoding) == [
        (1, "a;'b", None, None),
        (1, "", Decimal("3.00"), None),
        (None, None, None, None),
    ]


def test_cells_of_every_scalar_type() -> None:
    kinds = ["boolean", "double", "date", "timestamp", "timestamp", "binary", "float", "timestamp_ntz"]
    decoding = Decoding("csv", tuple(Field(f"f{place}", kind) for place, kind in enumerate(kinds)))
    value = b"true,1e3,2024-02-29,2024-02-29T00:00:00Z,1000,aGk=,0.5,2024-01-01 00:00"
    at = datetime(2024, 2, 29, tzinfo=UTC)
    later = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert rows([value], decoding) == [
        (True, 1000.0, date(2024, 2, 29), at, later, b"hi", 0.5, datetime(2024, 1, 1), None)
    ]


@pytest.mark.parametrize(
    "decoding",
    [
        Decoding("csv"),
        Decoding("csv", (Field("a", "array<int>"),)),
        Decoding("csv", FIELDS, csv={"separator": ";"}),
        Decoding("csv", FIELDS, csv={"delimiter": ";;"}),
        Decoding("csv", FIELDS, csv={"delimiter": '"'}),
        Decoding("csv", FIELDS, csv={"quote": "\n"}),
        Decoding("text", (Field("a", "long"),)),
        Decoding("text", (Field("a", "string"), Field("b", "string"))),
        Decoding("bytes", (Field("a", "string"),)),
        Decoding("xml"),  # type: ignore[arg-type]
    ],
)
def test_a_definition_that_cannot_work_is_refused(decoding: Decoding) -> None:
    with pytest.raises(FormatError):
        compile_decoder(decoding)


@pytest.mark.parametrize("delimiter", list("\t|^]-\\.*"))
def test_any_character_can_be_the_delimiter(delimiter: str) -> None:
    decoding = Decoding("csv", FIELDS, csv={"delimiter": delimiter})
    assert rows([delimiter.join(["1", "a", "2"]).encode()], decoding) == [(1, "a", Decimal("2.00"), None)]


def test_text_is_utf_8_or_an_error() -> None:
    assert rows(["grün".encode(), b"", None], Decoding("text")) == [("grün", None), ("", None), (None, None)]
    assert rows([b"ok", b"a\xffb", None], Decoding("text")) == [
        ("ok", None),
        (None, "invalid UTF-8 at byte 1"),
        (None, None),
    ]


def test_bytes_are_what_they_are() -> None:
    assert rows([b"\xff\0", b"", None], Decoding("bytes")) == [(b"\xff\0", None), (b"", None), (None, None)]
    decoder = compile_decoder(Decoding("bytes", (Field("payload", "binary"),)), prefix="_key_")
    assert [each.name for each in decoder.arrow_fields] == ["_key_payload"]
