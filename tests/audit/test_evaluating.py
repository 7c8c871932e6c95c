"""Expressions computed on batches of records, and the form in which values are compared."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit.evaluating import (
    BYTES,
    TEXT,
    Evaluator,
    Kind,
    Values,
    canonical,
    fine,
    joined,
    kind_of,
    shown,
)
from holdfast.audit.json_paths import JsonPaths, found_at
from holdfast.audit.matching import parse_condition, parse_expression
from holdfast.reader import SCHEMA


def records(*values: bytes | None, keys: list[bytes | None] | None = None, **more: Any) -> pa.RecordBatch:
    count = len(values)
    columns = {
        "key": keys or [b"k"] * count,
        "value": list(values),
        "topic": ["orders"] * count,
        "partition": [3] * count,
        "offset": list(range(10, 10 + count)),
        "timestamp": [1_700_000_000_123_000] * count,
        "timestampType": [0] * count,
        "headers": [[]] * count,
        **more,
    }
    schema = SCHEMA()
    return pa.record_batch(
        [pa.array(columns[name], schema.field(name).type) for name in schema.names], schema
    )


def evaluate(text: str, batch: pa.RecordBatch) -> tuple[list[Any], list[bool]]:
    values = Evaluator([parse_expression(text)]).evaluate(batch)[0]
    return values.array.to_pylist(), values.bad.tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("topic || '-' || partition || '@' || offset", "orders-3@10"),
        ("upper(value.name)", "ÄNNE"),
        ("lower('ABC')", "abc"),
        ("trim(value.padded)", "x"),
        ("int(value.number)", 17),
        ("int(value.text)", 17),
        ("string(timestamp)", "2023-11-14T22:13:20.123Z"),
        ("int(timestamp)", 1_700_000_000_123),
        ("substring(value.name, 2, 2)", "nn"),
        ("replace(value.name, 'nn', 'm')", "Äme"),
        ("split_part('a:b:c', ':', 2)", "b"),
        ("split_part('a', ':', 2)", ""),
        ("coalesce(value.missing, value.name)", "Änne"),
        ("hex(key)", "6b"),
        ("md5('')", "d41d8cd98f00b204e9800998ecf8427e"),
        ("value.list[1]", "2"),
        ("value.inner", '{"a":[1,2.50],"b":null}'),
        ("value.flag", "true"),
        ("value.missing", None),
        ("concat(value.name, value.missing)", None),
    ],
)
def test_functions_on_a_record(text: str, expected: object) -> None:
    value = (
        '{"name":"Änne","padded":" x ","number":17,"text":"017","list":[1,2],"flag":true,'
        '"inner":{"b":null,"a":[1,2.50]}}'
    )
    assert evaluate(text, records(value.encode())) == ([expected], [False])


def test_what_cannot_be_read_is_bad_and_null_is_not() -> None:
    batch = records(b'{"id":1}', b"no json", None, b'{"id":"x"}', b"\xff")
    assert evaluate("value.id", batch) == (["1", None, None, "x", None], [False, True, False, False, True])
    assert evaluate("int(value.id)", batch)[1] == [False, True, False, True, True]
    assert evaluate("string(value)", batch)[1] == [False, False, False, False, True]


def test_the_last_header_of_a_name_counts() -> None:
    headers = [
        [{"key": "id", "value": b"1"}, {"key": "x", "value": b"y"}, {"key": "id", "value": b"2"}],
        [],
        [{"key": "id", "value": None}],
    ]
    assert evaluate("headers.id", records(b"", b"", b"", headers=headers)) == (
        [b"2", None, None],
        [False] * 3,
    )


@pytest.mark.parametrize(
    ("condition", "chosen"),
    [
        ("value.a = 9007199254740993", [False, True, False, False, False]),
        ("value.a > 9007199254740992", [False, True, False, False, True]),
        ("value.a <= 0", [False] * 5),
        ("value.a < 1", [False, False, True, False, False]),
        ("value.a != 5", [True, True, True, False, True]),
    ],
)
def test_numbers_are_compared_to_their_last_digit(condition: str, chosen: list[bool]) -> None:
    numbers = (b"9007199254740992", b"9007199254740993", b"0.1e-200", b"null", b"9007199254740992.0000000001")
    batch = records(*(b'{"a":%s}' % each for each in numbers))
    assert Evaluator([], parse_condition(condition)).chosen(batch)[0].tolist() == chosen


def test_which_of_a_word_and_a_number_is_greater_nobody_can_say() -> None:
    batch = records(b'{"a":"x"}', b'{"a":"7"}', b'{"a":null}')
    chosen, bad = Evaluator([], parse_condition("value.a > 5")).chosen(batch)
    assert (chosen.tolist(), bad.tolist()) == ([False, True, False], [True, False, False])
    chosen, bad = Evaluator([], parse_condition("value.a = 7")).chosen(batch)
    assert (chosen.tolist(), bad.tolist()) == ([False, True, False], [False] * 3)


def test_conditions_choose_records_and_name_those_that_cannot_be_read() -> None:
    batch = records(b'{"a":5,"k":"x"}', b'{"a":15,"k":"x"}', b'{"a":25,"k":"y"}', b"{}", b"broken")
    chosen, bad = Evaluator([], parse_condition("value.a > 9 AND value.k = 'x'")).chosen(batch)
    assert (chosen.tolist(), bad.tolist()) == ([False, True, False, False, False], [False] * 4 + [True])
    chosen, _ = Evaluator([], parse_condition("value.a IS NULL")).chosen(batch)
    assert chosen.tolist() == [False, False, False, True, False]
    chosen, _ = Evaluator([], parse_condition("value.a != 5")).chosen(batch)
    assert chosen.tolist() == [False, True, True, False, False]


def texts(*values: str | None) -> Values:
    return fine(pa.array(values, TEXT))


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (Kind.INTEGER, "0017", "17"),
        (Kind.INTEGER, "-0", "0"),
        (Kind.INTEGER, "+123456789012345678901234", "123456789012345678901234"),
        (Kind.NUMBER, "1.50", "1.5"),
        (Kind.NUMBER, "1e2", "100"),
        (Kind.NUMBER, "-0.0", "0"),
        (Kind.DOUBLE, "0.1000000000000000055", "0.1"),
        (Kind.SINGLE, "0.10000000149", "0.1"),
        (Kind.BOOLEAN, "TRUE", "t"),
        (Kind.MOMENT, "2024-05-06T07:08:09+02:00", "2024-05-06 05:08:09.000000Z"),
        (Kind.DATE, "2024-05-06T07:08:09", "2024-05-06"),
    ],
)
def test_the_same_value_in_other_words_is_the_same(kind: Kind, one: str, other: str) -> None:
    values = canonical(kind, texts(one, other, None))
    assert values.array[0] == values.array[1]
    assert values.array[2].as_py() is None
    assert not values.bad.any()


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Kind.INTEGER, "1.5"),
        (Kind.INTEGER, ""),
        (Kind.NUMBER, "many"),
        (Kind.DOUBLE, "x"),
        (Kind.BOOLEAN, "maybe"),
        (Kind.MOMENT, "yesterday"),
        (Kind.DATE, "2024-13-01"),
    ],
)
def test_what_is_no_such_value_is_bad(kind: Kind, wrong: str) -> None:
    assert canonical(kind, texts(wrong)).bad.tolist() == [True]


def test_moments_of_a_table_and_of_a_record_meet() -> None:
    stored = pa.array([1_700_000_000_123_000], pa.timestamp("us")).cast(pa.timestamp("ns"))
    record = Evaluator([parse_expression("timestamp")]).evaluate(records(b""))[0]
    assert canonical(Kind.MOMENT, fine(stored)).array == canonical(Kind.MOMENT, record).array


@given(st.integers(-(2**62), 2**62))
def test_whole_numbers_meet_as_numbers_and_as_texts(number: int) -> None:
    as_number = canonical(Kind.INTEGER, fine(pa.array([number], pa.int64())))
    assert as_number.array == canonical(Kind.INTEGER, texts(f" {number} ")).array
    assert canonical(Kind.NUMBER, texts(f"{number}.000")).array[0].as_py() == str(Decimal(number)).encode()


values_of_columns = st.lists(st.one_of(st.none(), st.binary(max_size=5)), min_size=2, max_size=2)


@given(st.lists(values_of_columns, min_size=1, max_size=8))
def test_joined_values_are_equal_exactly_where_all_parts_are(rows: list[list[bytes | None]]) -> None:
    columns = [fine(pa.array([row[place] for row in rows], BYTES)) for place in range(2)]
    whole = joined(columns).array.to_pylist()
    for one, row in zip(whole, rows, strict=True):
        for other, another in zip(whole, rows, strict=True):
            assert (one == other) == (row == another)
        assert (one is None) == (row == [None, None])
        parts = ["null" if part is None else part.decode("utf-8", "backslashreplace") for part in row]
        assert shown(one, 2) == ("null" if one is None else f"({', '.join(parts)})")


def test_types_that_can_be_compared() -> None:
    assert kind_of(pa.dictionary(pa.int8(), pa.string())) is Kind.TEXT
    assert kind_of(pa.decimal128(10, 2)) is Kind.NUMBER
    assert kind_of(pa.uint64()) is Kind.INTEGER
    assert kind_of(pa.list_(pa.int64())) is None


# ------------------------------------------------------------------- paths into JSON

names = st.sampled_from(["id", "a", "b_1", "none"])
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False), st.text(max_size=5)
)
objects = st.recursive(
    st.dictionaries(names, scalars, max_size=3),
    lambda inner: st.dictionaries(
        names, st.one_of(scalars, inner, st.lists(scalars, max_size=2)), max_size=3
    ),
    max_leaves=6,
)
documents = st.one_of(
    st.none(),
    objects.map(lambda value: json.dumps(value).encode()),
    objects.map(
        lambda value: json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")
    ),
    st.sampled_from(
        [b"", b" ", b"null", b"17", b"[]", b'{"id":-0}', b'{"id":1e3}', b'{"id":1,"id":2}', b"\xff{}"]
    ),
    st.binary(max_size=6),
)
paths = st.lists(names, min_size=1, max_size=2).map(tuple)


@given(st.lists(documents, min_size=1, max_size=20), paths)
def test_the_fast_way_reads_what_the_plain_way_reads(raw: list[bytes | None], path: tuple[str, ...]) -> None:
    values = pa.array(raw, pa.binary())
    fast, fast_bad = JsonPaths([path], fast_rows_min=0).read(values)[path]
    plain, plain_bad = JsonPaths([path], fast_rows_min=10**9).read(values)[path]
    assert fast.to_pylist() == plain.to_pylist()
    assert np.array_equal(fast_bad, plain_bad)


def test_a_path_that_leads_nowhere_is_null() -> None:
    assert found_at(b'{"a":[1]}', ("a", 1)) is None
    assert found_at(b'{"a":[1]}', ("a", "b")) is None
    assert found_at(b'"text"', ("a",)) is None
    with pytest.raises(ValueError, match="Expecting"):
        found_at(b"{", ("a",))
