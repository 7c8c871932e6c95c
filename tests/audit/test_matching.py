"""The language of matches: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.audit.matching import (
    FIELDS,
    FUNCTIONS,
    LITERAL_ARGUMENTS,
    Call,
    Constant,
    Expression,
    Field,
    MatchError,
    fields_of,
    parse_condition,
    parse_expression,
    parse_match,
    quoted,
)


def test_a_match_pairs_columns_with_expressions() -> None:
    match = parse_match(
        'order_id = value.order.id AND "the day" = substring(value.at, 1, 10) and `a.b`.c = key'
    )
    assert [pair.path for pair in match.pairs] == [("order_id",), ("the day",), ("a.b", "c")]
    assert match.expressions == (
        Field("value", ("order", "id")),
        Call("substring", (Field("value", ("at",)), Constant(1), Constant(10))),
        Field("key"),
    )


def test_headers_elements_casts_and_joining() -> None:
    assert parse_expression("headers.hf-id") == Field("headers", ("hf-id",))
    assert parse_expression('headers."a b"') == Field("headers", ("a b",))
    assert parse_expression("value.items[2].id") == Field("value", ("items", 2, "id"))
    assert parse_expression("CAST(key AS bigint)") == Call("int", (Field("key"),))
    assert parse_expression("topic || '-' || partition") == Call(
        "concat", (Field("topic"), Constant("-"), Field("partition"))
    )
    assert parse_expression("'it''s'") == Constant("it's")


def test_a_topics_columns_are_expressions() -> None:
    (pair,) = parse_match("headers.id = value.id", is_topic=True).pairs
    assert (pair.left, pair.right) == (Field("headers", ("id",)), Field("value", ("id",)))


def test_conditions() -> None:
    found = parse_condition("value.amount >= 10 AND key IS NOT NULL and value.kind <> 'trial'")
    assert [str(each) for each in found] == [
        "value.amount >= 10",
        "key is not null",
        "value.kind != 'trial'",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected a column of the sink, but it ends at character 1"),
        ("id", "expected '='"),
        ("id = ", "expected an expression on the record"),
        ("id = order_id", "for a field of JSON write value.NAME), but 'order_id' stands at character 6"),
        ("id = value.id junk", "expected AND, or the end, but 'junk' stands at character 15"),
        ("id = lower(key, key)", "lower takes 1 arguments, not 2"),
        ("id = nothing(key)", "a function that there is"),
        ("id = value.a[x]", "the number of an element"),
        ("id = offset.x", "nothing behind 'offset'"),
        ("id = headers", "one header's name"),
        ("id = 'open", "a quote that is not closed, at character 6"),
        ("id = key; drop", "';' means nothing here"),
        ("id = cast(key as blob)", "expected a type"),
        ("id = substring(key, 0)", "counts characters from 1"),
        ("id = replace(key, '', 'x')", "not empty"),
        ("id = split_part(key, key, 1)", "argument 2 of split_part has to be a text or a number"),
        ("id = key AND id = value", "'id' stands twice"),
        ("id = " + "(" * 30 + "key" + ")" * 30, "nested at most 20 deep"),
    ],
)
def test_what_means_nothing_is_refused_with_the_place(text: str, complaint: str) -> None:
    with pytest.raises(MatchError) as refused:
        parse_match(text)
    assert complaint in str(refused.value)
    assert "--match" in str(refused.value)


@pytest.mark.parametrize("text", ["key", "key like 'x'", "key is 5", "key ="])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(MatchError, match="--where"):
        parse_condition(text)


names = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=6)


@st.composite
def called(draw: st.DrawFn, inner: st.SearchStrategy[Expression]) -> Expression:
    name = draw(st.sampled_from([name for name in FUNCTIONS if name not in LITERAL_ARGUMENTS]))
    least, most = FUNCTIONS[name]
    return Call(name, tuple(draw(st.lists(inner, min_size=least, max_size=min(3, most)))))


def calls(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    return st.one_of(
        called(inner), inner.map(lambda each: Call("replace", (each, Constant("a"), Constant("b"))))
    )


expressions: st.SearchStrategy[Expression] = st.recursive(
    st.one_of(
        st.sampled_from([name for name in FIELDS if name != "headers"]).map(Field),
        names.map(lambda name: Field("headers", (name,))),
        st.tuples(
            st.sampled_from(["key", "value"]),
            st.lists(st.one_of(names, st.integers(0, 99)), min_size=1, max_size=3),
        ).map(lambda made: Field(made[0], tuple(made[1]))),
        st.one_of(names, st.integers(-(10**6), 10**6)).map(Constant),
    ),
    calls,
    max_leaves=6,
)


@given(expressions)
def test_what_is_printed_is_read_as_the_same(expression: Expression) -> None:
    assert parse_expression(str(expression)) == expression
    assert all(field.name in FIELDS for field in fields_of([expression]))


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_match, parse_condition, parse_expression):
        with contextlib.suppress(MatchError):
            parse(text)


@given(st.lists(names.filter(lambda name: "." not in name), min_size=1, max_size=2))
def test_a_quoted_column_is_the_column(parts: list[str]) -> None:
    (pair,) = parse_match(f"{quoted('.'.join(parts))} = key").pairs
    assert pair.path == tuple(parts)
