"""The machine code's reading of JSON against the reference: same columns, same errors, whatever the bytes."""

import itertools
import json
import string
from datetime import datetime

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.pipeline.definition.model import Decoding, Field, Unknown
from holdfast.pipeline.formats import compile_columns, compile_decoder
from holdfast.pipeline.formats.json_reference import JsonFast

TYPES = {
    "id": "long",
    "i8": "byte",
    "i16": "short",
    "i32": "int",
    "text": "string",
    "größe": "string",
    "flag": "boolean",
    "ratio": "double",
    "single": "float",
    "price": "decimal(10,2)",
    "wide": "decimal(38,10)",
    "day": "date",
    "at": "timestamp",
    "clock": "timestamp_ntz",
    "blob": "binary",
    "tags": "array<string>",
    "matrix": "array<array<double>>",
    "scores": "map<string,long>",
    "quantity": "long",
    "a longer name": "string",
    "place": "struct<lat:double NOT NULL,lon:double,names:array<struct<n:string,w:int>>>",
    "nested": "map<string,struct<a:array<map<string,boolean>>>>",
}
FIELDS = tuple(Field(name, kind, required=name == "id") for name, kind in TYPES.items())
DECODERS = {
    unknown: JsonFast(Decoding("json", FIELDS, unknown=unknown), "", compile_columns(FIELDS))
    for unknown in ("keep", "ignore", "reject")
}
POLICIES = st.sampled_from(sorted(DECODERS))


def assert_same(values: list[bytes | None], unknown: str, *, slice_from: int = 0) -> None:
    decoder = DECODERS[unknown]
    array = pa.array(values, pa.binary()).slice(slice_from)
    fast, slow = decoder.decode(array), decoder.reference.decode(array)
    assert fast.errors.to_pylist() == slow.errors.to_pylist()
    for field, one, other in zip(decoder.arrow_fields, fast.columns, slow.columns, strict=True):
        one.validate(full=True)
        assert one.type == other.type == field.type
        assert repr(one.to_pylist()) == repr(other.to_pylist()), field.name


numbers = st.one_of(
    st.integers().map(str),
    st.integers(-(2**63) - 3, 2**63 + 3).map(str),
    st.integers(-200, 200).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9).map(
        str
    ),
    st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,4})?", fullmatch=True).filter(
        str.isascii
    ),
    st.sampled_from(
        [
            "-0",
            "-0.0",
            "0e5",
            "1e400",
            "-1e-400",
            "1E2",
            "01",
            "1.",
            ".5",
            "+1",
            "NaN",
            "-Infinity",
            "1e",
            "0x1",
        ]
    ),
    st.sampled_from(
        ["9223372036854775807", "-9223372036854775808", "9223372036854775808", "3.4028236e38", "3.4028235e38"]
    ),
)
times = st.one_of(
    st.datetimes().map(lambda when: when.isoformat() + "Z"),
    st.datetimes().map(lambda when: when.isoformat(" ") + "+02:30"),
    st.datetimes().map(lambda when: when.isoformat()),
    st.dates().map(str),
    st.from_regex(
        r"[012][0-9]{3}-[01][0-9]-[0-3][0-9][T ][0-2][0-9]:[0-5][0-9]"
        r"(:[0-6][0-9](\.[0-9]{1,10})?)?(Z|[+-][0-2][0-9](:?[0-6][0-9])?)?",
        fullmatch=True,
    ),
)
contents = st.one_of(
    times,
    st.text(max_size=20),
    st.text(string.ascii_letters + string.digits + "+/=", max_size=12),
    st.binary(max_size=12).map(lambda content: __import__("base64").b64encode(content).decode()),
)
strings = st.one_of(
    contents.map(lambda text: json.dumps(text, ensure_ascii=False)),
    contents.map(json.dumps),
    st.sampled_from(
        [
            '"\\ud800"',
            '"\\ud83d\\ude00"',
            '"\\udc00\\ud800"',
            '"\\u00e9\\/\\b\\f\\n\\r\\t"',
            '"\\x"',
            '"a\nb"',
            '"\x7f"',
        ]
    ),
)
keys = st.one_of(
    st.sampled_from([*TYPES, *TYPES, "a", "lat", "lon", "names", "n", "w"]).map(
        lambda key: json.dumps(key, ensure_ascii=False)
    ),
    st.sampled_from(['"i\\u0064"', '"\\u0061"', '"x"', '"y"', '""', '"ID"', '"gr\\u00f6\\u00dfe"']),
    strings,
)
spaces = st.sampled_from(["", "", "", "", " ", "\n\t\r ", "\x0b", "\xa0"])


def containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    member = st.tuples(keys, spaces, inner).map(lambda parts: parts[0] + parts[1] + ":" + parts[1] + parts[2])
    return st.one_of(
        st.tuples(spaces, st.lists(inner, max_size=4)).map(
            lambda parts: "[" + f",{parts[0]}".join(parts[1]) + "]"
        ),
        st.tuples(spaces, st.lists(member, max_size=4)).map(
            lambda parts: "{" + f"{parts[0]},".join(parts[1]) + "}"
        ),
    )


literals = st.sampled_from(["null", "true", "false", "nul", "True"])
anything = st.recursive(st.one_of(numbers, strings, literals), containers, max_leaves=8)


plain_strings = st.one_of(
    st.text(max_size=9).map(json.dumps),
    st.text(max_size=9).map(lambda text: json.dumps(text, ensure_ascii=False)),
)


def fitting(kind: str) -> st.SearchStrategy[str]:
    """What the type asks for, so that whole documents are good ones."""
    scalars = {
        "long": st.integers(-(2**63), 2**63 - 1).map(str),
        "byte": st.integers(-128, 127).map(str),
        "short": st.integers(-(2**15), 2**15 - 1).map(str),
        "int": st.integers(-(2**31), 2**31 - 1).map(str),
        "string": st.text(max_size=20).map(lambda text: json.dumps(text, ensure_ascii=False)),
        "boolean": st.sampled_from(["true", "false"]),
        "double": st.one_of(
            st.floats(allow_nan=False, allow_infinity=False).map(repr),
            st.from_regex(
                r"-?[1-9][0-9]{0,21}(\\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?", fullmatch=True
            ).filter(str.isascii),
        ),
        "float": st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
        "decimal(10,2)": st.decimals(-(10**8), 10**8, places=2).map(str),
        "decimal(38,10)": st.decimals(-(10**27), 10**27, places=10).map(lambda number: format(number, "f")),
        "date": st.dates().map(lambda day: f'"{day}"'),
        "timestamp": st.one_of(
            st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1)).map(lambda when: f'"{when.isoformat()}Z"'),
            st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1)).map(lambda when: f'"{when}-0730"'),
            st.integers(-(10**13), 10**14).map(str),
        ),
        "timestamp_ntz": st.datetimes().map(lambda when: f'"{when.isoformat()}"'),
        "binary": st.binary(max_size=9).map(
            lambda content: f'"{__import__("base64").b64encode(content).decode()}"'
        ),
        "array<string>": st.lists(plain_strings, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        "array<array<double>>": st.lists(
            st.lists(numbers, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
        ).map(lambda parts: f"[ {','.join(parts)} ]"),
        "map<string,long>": st.dictionaries(st.text(max_size=4), st.integers(-9, 9)).map(
            lambda found: json.dumps(found, ensure_ascii=False)
        ),
        TYPES["place"]: st.sampled_from(
            [
                '{"lat":1.5,"lon":-2}',
                '{"lon":null, "lat":0}',
                '{"lat":1,"names":[{"n":"a","w":1},null,{"w":2},{}]}',
                '{"lat":1,"names":[]}',
                '{"lon":3}',
                '{"lat":1,"lat":2}',
                '{"lat":1,"more":{"x":[1,{}]}}',
                '{"lat":1,"names":[{"n":"a","q":1e999}]}',
                "{}",
            ]
        ),
        TYPES["nested"]: st.sampled_from(
            [
                '{"k":{"a":[{"x":true},{},null]},"l":{}}',
                '{"k":null}',
                '{"k":{"a":[{"x":1}]}}',
                '{"k":{"b":1}}',
                "{}",
            ]
        ),
    }
    return scalars[kind]


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    names = draw(st.lists(st.sampled_from(sorted(TYPES)), max_size=6, unique=draw(st.booleans())))
    members = [
        f"{json.dumps(name, ensure_ascii=False)}:{draw(fitting(TYPES[name]))}" for name in ["id", *names]
    ]
    if draw(st.integers(0, 3)) == 0:
        members += draw(st.lists(st.tuples(keys, anything).map(":".join), max_size=2))
    if draw(st.booleans()):
        members.reverse()
    space = draw(spaces)
    text = space + "{" + f",{space}".join(members) + "}" + draw(spaces)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    document = bytearray(draw(documents()))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(document) - 1, 0)))
        action = draw(st.integers(0, 5))
        if action == 0 and document:
            document[place] ^= 1 << draw(st.integers(0, 7))
        elif action == 1:
            del document[place:]
        elif action == 2:
            del document[place : place + draw(st.integers(1, 4))]
        elif action == 3:
            document[place:place] = draw(
                st.sampled_from(
                    [
                        b'"',
                        b"\\",
                        b"{",
                        b"}",
                        b"[",
                        b"]",
                        b",",
                        b":",
                        b"\xc3",
                        b"\xed\xa0\x80",
                        b"\0",
                        b"1",
                        b"-",
                        b"e",
                    ]
                )
            )
        elif action == 4:
            document += bytes(document)
        else:
            document[place:place] = draw(st.binary(max_size=4))
    return bytes(document)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(documents(), mutated(), st.none()), max_size=6), POLICIES, st.integers(0, 2))
def test_generated_and_mutated_documents_are_read_the_same(
    values: list[bytes | None], unknown: str, slice_from: int
) -> None:
    assert_same(values, unknown, slice_from=slice_from)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=5), POLICIES)
@example(
    [b"", b" ", b"{", b"}", b'{"', b'{"id', b'{"id"', b'{"id":', b'{"id":1', b'{"id":1,', b"\xef\xbb\xbf{}"],
    "ignore",
)
def test_bytes_of_any_kind_are_read_the_same(values: list[bytes | None], unknown: str) -> None:
    assert_same(values, unknown)


@pytest.mark.parametrize("unknown", sorted(DECODERS))
@pytest.mark.parametrize("cut", [0, 1])
def test_every_prefix_of_a_document_is_read_the_same(unknown: Unknown, cut: int) -> None:
    document = (
        '{"id":-12,"text":"\\u00e4\\ud83d\\ude00 é","price":1.50,"at":"2026-03-01T12:00:00.123456+01:00","ratio":1e-7,'
        '"flag":true,"blob":"YWI=","day":"2024-02-29","tags":["a",null],"scores":{"a":1},'
        '"place":{"lat":1,"names":[{"n":"x"}]},"größe":"ü"}'
    ).encode()
    assert_same([document[: len(document) - each] + b" " * cut for each in range(len(document) + 1)], unknown)


@pytest.mark.parametrize("depth", [1, 60, 98, 99, 100, 101, 500, 20_000])
def test_deep_documents_are_read_the_same_and_bounded(depth: int) -> None:
    arrays = b'{"id":1,"x":' + b"[" * depth + b"]" * depth + b"}"
    objects = b'{"id":1,"x":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    quoted = b'{"id":1,"x":"' + b"[{" * depth + b'"}'
    open_ended = b'{"id":1,"x":' + b"[" * depth
    assert_same([arrays, objects, quoted, open_ended], "ignore")
    errors = DECODERS["ignore"].decode(pa.array([arrays, quoted], pa.binary())).errors.to_pylist()
    assert errors == [None if depth < 100 else "nested deeper than 100 levels", None]


@pytest.mark.parametrize("count", [1, 63, 64, 65, 2000])
def test_many_keys_are_told_apart(count: int) -> None:
    members = ",".join(f'"k{each}":{each}' for each in range(count))
    fine = f'{{"id":1,"x":{{{members}}},{members}}}'.encode()
    twice = f'{{"id":1,{members},"k0":1}}'.encode()
    inside = f'{{"id":1,"x":{{{members},"k0":1}}}}'.encode()
    assert_same([fine, twice, inside], "ignore")
    errors = DECODERS["ignore"].decode(pa.array([fine, twice, inside], pa.binary())).errors.to_pylist()
    assert errors == [None, 'duplicate key "k0"', 'duplicate key "k0"']


@pytest.mark.parametrize("size", range(1, 41))
@pytest.mark.parametrize("unknown", ["ignore", "keep", "reject"])
def test_names_of_every_length_are_found_in_any_order(size: int, unknown: Unknown) -> None:
    names = ["x", "a" * (size - 1) + "b", "a" * (size - 1) + "c", "d" + "a" * size]
    fields = tuple(Field(name, "int", required=False) for name in names)
    decoder = compile_decoder(Decoding("json", fields, unknown=unknown))
    orders = list(itertools.permutations(range(4)))
    values = [json.dumps({names[place]: place for place in order}).encode() for order in orders]
    found = decoder.decode(pa.array(values, pa.binary()))
    assert [column.to_pylist() for column in found.columns[:4]] == [
        [place] * len(orders) for place in range(4)
    ]
    assert found.errors.null_count == len(orders)
    if unknown == "keep":
        assert found.columns[4].null_count == len(orders)


def test_batches_larger_than_one_scan_keep_their_order() -> None:
    values: list[bytes | None] = [f'{{"id":{each},"text":"t{each}"}}'.encode() for each in range(70_000)]
    values[40_000] = None
    values[65_000] = b"broken"
    found = DECODERS["ignore"].decode(pa.array(values, pa.binary()))
    ids = found.columns[0].to_pylist()
    assert ids == [None if each in (40_000, 65_000) else each for each in range(70_000)]
    assert [place for place, error in enumerate(found.errors.to_pylist()) if error] == [65_000]


@pytest.mark.parametrize("values", [[], [None], [None, None], [b""], [b"", None]])
def test_batches_without_content(values: list[bytes | None]) -> None:
    assert_same(values, "keep")
