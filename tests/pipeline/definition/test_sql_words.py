"""What can be said about SQL without Spark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline.definition.sql_words import problems_of_expression, problems_of_query, tokens


@pytest.mark.parametrize(
    "sql",
    [
        "uuid() = id",
        "a > RAND ( )",
        "at < current_timestamp",
        "at < current_timestamp()",
        "at < Now()",
        "d = current_date",
        "unix_timestamp() - t > 5",
        "x = monotonically_increasing_id()",
        "/* now */ now() > 1",
        "id = shuffle(a)[0]",
    ],
)
def test_calls_that_change_are_refused(sql: str) -> None:  # HF410
    (problem,) = problems_of_expression(sql)
    assert "changes when a batch is recomputed after a crash" in problem


@pytest.mark.parametrize("name", ["now", "current_timestamp", "unix_timestamp", "current_date"])
def test_for_time_the_batch_time_is_offered(name: str) -> None:
    assert "use _batch_time" in next(iter(problems_of_expression(f"{name}() > x")))


@pytest.mark.parametrize(
    "sql",
    [
        "'now()' = a",
        '"rand()" = a',
        "`uuid` = 1",
        "now = 1",
        "rand > 3",
        "t.now() = 1",
        "-- now()\n a = 1",
        "unix_timestamp(at) > 3",
        "a = 1 /* rand() */",
        "upper(note) = 'IT''S (' AND b",
        "struct.current_date = 1",
        "a = 'x\\'(' ",
    ],
)
def test_words_in_texts_names_and_comments_are_no_calls(sql: str) -> None:
    assert list(problems_of_expression(sql)) == []


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("a > (1", "parentheses"),
        ("a) > (1", "parentheses"),
        ("a = 'x", "not closed"),
        ("a = 1; DROP TABLE t", "there is a ';'"),
    ],
)
def test_expressions_that_cannot_parse(sql: str, problem: str) -> None:
    assert any(problem in each for each in problems_of_expression(sql))


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("DELETE FROM input", "begins with SELECT"),
        ("SELECT * FROM other", "does not read from input"),
        ("SELECT a FROM input", "loses _hf"),
        ("SELECT * FROM input LIMIT 3", "LIMIT keeps other rows"),
        ("SELECT *, uuid() AS u FROM input", "uuid() changes"),
        ("SELECT * FROM input TABLESAMPLE (10 PERCENT)", "TABLESAMPLE keeps other rows"),
    ],
)
def test_queries_that_cannot_be_steps(sql: str, problem: str) -> None:
    assert any(problem in each for each in problems_of_query(sql))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM input",
        "select _hf, a from input;",
        "WITH x AS (SELECT * FROM input) SELECT * FROM x",
        "SELECT *, now AS n FROM `input`",
        "SELECT *, 1 AS current_date FROM input",
        "SELECT *, limit - 3 AS rest, _hf.offset FROM input WHERE limit > 3",
        "(SELECT * FROM input)",
    ],
)
def test_queries_that_can(sql: str) -> None:
    assert list(problems_of_query(sql)) == []


@given(st.text())
def test_any_text_is_cut_without_loss(sql: str) -> None:
    assert (
        "".join(token.text for token in tokens(sql)) in "".join(sql.split())
        or "--" in sql
        or "/*" in sql
        or any(token.kind in ("literal", "quoted") for token in tokens(sql))
    )
    list(problems_of_query(sql))
