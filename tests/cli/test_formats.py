from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.formats import LineFormat, MalformedLine, ParsedLine
from holdfast.cli.producing import Line, read_lines
from holdfast.errors import ConfigError


def line_format(**properties: str) -> LineFormat:
    return LineFormat.from_properties(
        {name.replace("_", "."): value for name, value in properties.items()}, "--reader-property"
    )


def test_a_plain_line_is_a_value() -> None:
    assert line_format().parse(b"a\tb") == ParsedLine(None, b"a\tb", [])


def test_key_and_headers_come_first() -> None:
    form = line_format(parse_key="true", parse_headers="TRUE", key_separator="::", headers_delimiter="|")
    assert form.parse(b"a:1,b:2:3|key::value::more") == ParsedLine(
        b"key", b"value::more", [("a", b"1"), ("b", b"2:3")]
    )


def test_the_null_marker_stands_for_null_everywhere_but_in_a_headers_name() -> None:
    form = line_format(parse_key="true", parse_headers="true", null_marker="-")
    assert form.parse(b"a:-\t-\t-") == ParsedLine(None, None, [("a", None)])
    assert form.parse(b"-\tk\tv") == ParsedLine(b"k", b"v", [])
    with pytest.raises(MalformedLine, match=r"null\.marker"):
        form.parse(b"-:1\tk\tv")


def test_missing_parts_are_refused_or_ignored() -> None:
    strict = line_format(parse_key="true", parse_headers="true")
    for line, missing in (
        (b"no tab", "headers.delimiter"),
        (b"a:1\tno key", "key.separator"),
        (b"a1\tk\tv", "headers.key.separator"),
    ):
        with pytest.raises(MalformedLine, match=missing):
            strict.parse(line)
    lenient = line_format(parse_key="true", parse_headers="true", ignore_error="true")
    assert lenient.parse(b"all of it") == ParsedLine(None, b"all of it", [])
    assert lenient.parse(b"a1\tk\tv") == ParsedLine(b"k", b"v", [("a1", None)])


@pytest.mark.parametrize(
    "properties",
    [
        {"headers_delimiter": ","},
        {"headers_separator": ":"},
        {"null_marker": "\t"},
        {"key_separator": "|", "null_marker": "|"},
        {"key_separator": ""},
        {"parse_keys": "true"},
    ],
)
def test_marks_that_make_lines_ambiguous_are_refused(properties: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        line_format(**properties)


def lines_of(content: bytes, line_bytes_max: int = 1_000_000) -> list[Line]:
    reading, writing = os.pipe()
    try:
        os.write(writing, content)
        os.close(writing)
        return list(read_lines(reading, line_bytes_max, lambda: True))
    finally:
        os.close(reading)


@given(content=st.lists(st.binary(max_size=20).filter(lambda part: b"\n" not in part)).map(b"\n".join))
def test_lines_are_those_of_the_input(content: bytes) -> None:
    expected = content.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    ended = [line.removesuffix(b"\r") for line in expected]
    if not content.endswith(b"\n") and expected:
        ended[-1] = expected[-1]
    assert lines_of(content) == [Line(number, line) for number, line in enumerate(ended, 1)]


def test_a_line_past_the_bound_is_numbered_and_dropped_without_being_held() -> None:
    content = b"a\n" + b"x" * 50_000 + b"\nb\n" + b"y" * 5_000
    assert lines_of(content, 1_000) == [Line(1, b"a"), Line(2, None), Line(3, b"b"), Line(4, None)]
    assert lines_of(b"x" * 10 + b"\n" + b"y" * 11, 10) == [Line(1, b"x" * 10), Line(2, None)]


def test_reading_ends_when_its_turn_says_so() -> None:
    reading, writing = os.pipe()
    answers: Iterator[bool] = iter([True, False])
    try:
        os.write(writing, b"a\nno end")
        assert list(read_lines(reading, 10, lambda: next(answers))) == [Line(1, b"a")]
    finally:
        os.close(writing)
        os.close(reading)
