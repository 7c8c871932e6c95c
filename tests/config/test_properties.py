"""Java's .properties format: what the parser must make of every spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.properties import parse_properties
from holdfast.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("a=b", {"a": "b"}),
        ("a:b", {"a": "b"}),
        ("a b", {"a": "b"}),
        ("a = b", {"a": "b"}),
        ("a\t:\tb", {"a": "b"}),
        ("a  =  =b", {"a": "=b"}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("=b", {"": "b"}),
        ("a=b  ", {"a": "b  "}),
        ("  a=b", {"a": "b"}),
        ("# a=b\n! c=d\n  # e=f\n", {}),
        ("a=b # not a comment", {"a": "b # not a comment"}),
        ("a=b\r\nc=d\re=f\n", {"a": "b", "c": "d", "e": "f"}),
        ("a=one,\\\n   two", {"a": "one,two"}),
        ("a=one\\\n# two", {"a": "one# two"}),
        ("# comment \\\na=b", {"a": "b"}),
        ("a=b\\\\\nc=d", {"a": "b\\", "c": "d"}),
        ("a=b\\\\\\\nc", {"a": "b\\c"}),
        ("a=b\\\n\nc=d", {"a": "b", "c": "d"}),
        ("\\\n# comment\na=b", {"a": "b"}),
        ("a\\=b=c", {"a=b": "c"}),
        ("a\\ b c", {"a b": "c"}),
        ("a=\\u0041\\t\\n\\r\\f\\q", {"a": "A\t\n\r\fq"}),
        ("a=b\na=c", {"a": "c"}),
        ("a=b\\", {"a": "b"}),
        ("\\", {}),
        ("", {}),
    ],
)
def test_text_gives_the_pairs_that_java_gives(text: str, pairs: dict[str, str]) -> None:
    assert parse_properties(text) == pairs


def test_each_pair_knows_the_line_it_began_on() -> None:
    properties = parse_properties("# head\n\na=1\nb=2,\\\n  3\nc=4\n", "server.properties")
    assert {name: properties.where(name) for name in "abc"} == {
        "a": "server.properties:3",
        "b": "server.properties:4",
        "c": "server.properties:6",
    }


def test_repeated_keys_are_remembered_with_both_lines() -> None:
    assert parse_properties("a=1\nb=2\na=3").repeated == [("a", 1, 3)]


@pytest.mark.parametrize("text", ["a=1\nb=\\u12", "a=1\nb=\\uzzzz", "a=1\nb=\\u", "a=1\n\\u00e=2"])
def test_broken_unicode_escape_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"broker\.properties:2: .*four hexadecimal digits"):
        parse_properties(text, "broker.properties")


def test_bytes_are_utf_8_and_latin_1_when_they_cannot_be() -> None:
    assert parse_properties("a=é".encode()) == {"a": "é"}
    assert parse_properties("a=é".encode("latin-1")) == {"a": "é"}


CONTROLS = {"\t": "\\t", "\n": "\\n", "\r": "\\r", "\f": "\\f", "\\": "\\\\"}


def _escape_key(text: str) -> str:
    special = {character: "\\" + character for character in " =:#!"}
    return "".join((CONTROLS | special).get(character, character) for character in text)


def _escape_value(text: str) -> str:
    escaped = "".join(CONTROLS.get(character, character) for character in text)
    return "\\" + escaped if text[:1] in (" ", "=", ":") else escaped


some_text = st.text(st.characters(codec="utf-8"), max_size=12)
separators = st.sampled_from(["=", ":", " = ", "\t"])


@given(st.dictionaries(some_text.filter(bool), some_text, max_size=6), separators)
def test_what_is_written_with_escapes_is_read_back(pairs: dict[str, str], separator: str) -> None:
    lines = [f"{_escape_key(key)}{separator}{_escape_value(value)}\n" for key, value in pairs.items()]
    assert parse_properties("".join(lines)) == pairs


odd_text = st.text(st.sampled_from("ab=: \t\f\\\n\r#!u0é"), max_size=40)


@given(odd_text.filter(lambda text: "\\u" not in text))
def test_any_text_is_read_and_every_pair_has_a_line_of_the_file(text: str) -> None:
    properties = parse_properties(text)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1
    assert all(1 <= properties.lines[name] <= lines for name in properties)


names = st.from_regex(r"\A[a-z.]{1,8}\Z")
words = st.from_regex(r"\A[a-z0-9]{0,8}\Z")


@given(st.lists(st.tuples(names, words), max_size=6))
def test_splitting_a_line_with_backslashes_changes_nothing(pairs: list[tuple[str, str]]) -> None:
    whole = "".join(f"{key}={value}\n" for key, value in pairs)
    split = "".join(f"{key}=\\\n    {value}\n" for key, value in pairs)
    assert parse_properties(whole) == parse_properties(split)
