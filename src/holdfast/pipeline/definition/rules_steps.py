"""Rules of steps, each for itself and in its place among the others; of stateful ones, and of lookups: what they
go by, how long, and under which names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition import model
from holdfast.pipeline.definition.columns import JOIN_COLUMNS, WINDOW_COLUMNS, columns_before, listed_columns
from holdfast.pipeline.definition.errors import Finding, Path, nearest
from holdfast.pipeline.definition.functions import functions_of, module_of, spec_of
from holdfast.pipeline.definition.naming import kind_of_step
from holdfast.pipeline.definition.rules_shared import check_columns, check_password
from holdfast.pipeline.definition.secrets import is_reference
from holdfast.pipeline.definition.sql_words import problems_of_expression, problems_of_query, tokens
from holdfast.pipeline.definition.streams import is_stateful
from holdfast.pipeline.definition.units import parse_duration_ms

WINDOWS_OF_A_ROW_MAX: Final = 1000
"""A row is counted in each window it is in; more of them is a mistake in the units."""
WINDOW_WORDS: Final = {"tumbling": ("size",), "sliding": ("size", "every"), "session": ("gap",)}
COLUMNS_REST_ON: Final[tuple[Path, ...]] = (("source", "value"), ("source", "values"), ("steps",))
RECORD_KEY: Final = re.compile(r"_key(_.+)?")
POSTGRES: Final = re.compile(r"postgres(ql)?://")


def check_steps(definition: model.PipelineDefinition) -> Iterator[Finding]:
    expanding = [
        (index, step)
        for index, step in enumerate(definition.steps)
        if isinstance(step, model.Sql | model.Python) and step.expand
    ]
    for index, surplus in expanding[1:]:
        where: Path = ("steps", index, kind_of_step(surplus), "expand")
        first = expanding[0][1].name
        yield Finding(where, f"{first!r} expands already, and one step of a pipeline may; join the two")
    for index, step in enumerate(definition.steps):
        path: Path = ("steps", index, kind_of_step(step))
        for inner, message in _step(step, definition.directory):
            yield Finding((*path, inner), message)
        yield from _stateful(step, path, definition, columns_before(definition, index))


def _step(step: model.Step, directory: str) -> Iterator[tuple[str, str]]:
    match step:
        case model.Expect():
            yield from (("that", problem) for problem in problems_of_expression(step.that))
        case model.Filter():
            yield from (("where", problem) for problem in problems_of_expression(step.where))
        case model.Sql():
            yield from (("query", problem) for problem in problems_of_query(step.query))
        case model.Python() | model.Keyed():
            yield from _function(step, directory)
            if isinstance(step, model.Python) and step.mode == "spark" and step.schema:
                yield "schema", "a function of mode spark says its columns itself; leave 'schema' out"


def _function(step: model.Python | model.Keyed, directory: str) -> Iterator[tuple[str, str]]:
    if not isinstance(step.function, str):
        if step.file is not None:
            yield "file", "the function itself is given; leave 'file' out"
        return
    if step.file is None:
        module, name = module_of(step.function)
        if spec_of(module) is None:
            yield (
                "function",
                f"{step.function!r}: there is no such module; give 'file', or write module:function",
            )
        elif not name.isidentifier():
            yield "function", f"{step.function!r} names no function"
        return
    path = os.path.join(directory, step.file)
    try:
        names = functions_of(path)
    except SyntaxError as error:
        yield "file", f"{step.file}:{error.lineno}: this is not Python: {error.msg}"
        return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        yield "file", f"cannot read {step.file!r}: {reason}"
        return
    if step.function.split(".")[0] not in names:
        yield "function", f"{step.file} has no function {step.function!r}{nearest(step.function, names)}"


def _stateful(
    step: model.Step, path: Path, definition: model.PipelineDefinition, known: frozenset[str] | None
) -> Iterator[Finding]:
    if is_stateful(step) and definition.source.event_time is None:
        yield Finding(
            path,
            "it goes by when things happened; name a timestamp of the records below 'source', as "
            "'event_time: at', or 'event_time: _timestamp' for the time Kafka keeps",
            rests_on=(("source", "event_time"),),
        )
    match step:
        case model.Dedupe():
            yield from _dedupe(step, path, known)
        case model.Lookup():
            yield from _lookup(step, path, known)
        case model.Window():
            yield from _window(step, path, known)
        case model.Keyed():
            yield from _keyed(step, path, known)
        case model.Join():
            yield from _join(step, path, known, definition)


def _dedupe(step: model.Dedupe, path: Path, known: frozenset[str] | None) -> Iterator[Finding]:
    if step.by == "key" and not step.key:
        yield Finding(path, "it needs 'key', the columns that make two rows the same; or 'by: hf-id'")
    if step.by == "hf-id" and step.key:
        yield Finding((*path, "key"), "hf-id stands in a header of the record; leave 'key' out")
    yield from _rows_columns(step.key, (*path, "key"), known)


def _lookup(step: model.Lookup, path: Path, known: frozenset[str] | None) -> Iterator[Finding]:
    is_database = POSTGRES.match(step.table) is not None
    if is_database and step.query is None:
        yield Finding(path, "a database needs 'query', such as SELECT id, name FROM customers")
    if step.query is not None and not is_database and not is_reference(step.table):
        yield Finding((*path, "query"), "a query is for a database; a file is read as it is")
    if step.query is not None:
        found = tokens(step.query.rstrip().removesuffix(";"))
        if not found or found[0].word not in ("select", "with", "values", "table"):
            yield Finding((*path, "query"), "a query begins with SELECT (or WITH)")
        elif any(token.text == ";" for token in found):
            yield Finding((*path, "query"), "there is a ';' in it; write one query")
    if (
        not is_database
        and re.match(r"(?!file:)[a-z][a-z0-9+.-]*://", step.table)
        and step.table.endswith(".csv")
    ):
        yield Finding((*path, "table"), "a CSV file is read from a path of this machine")
    yield from check_password(step.table, (*path, "table"))
    if not step.on:
        yield Finding((*path, "on"), "it needs a column that finds the table's row")
    if not step.columns:
        yield Finding((*path, "columns"), "it brings nothing; list columns of the table")
    yield from _rows_columns(tuple(step.on), (*path, "on"), known)
    yield from check_columns(step.columns, (*path, "columns"))
    taken = {column.lower(): column for column in known or ()}
    for index, column in enumerate(step.columns):
        if column.lower() in taken:
            yield Finding(
                (*path, "columns", index),
                f"the rows have a column {taken[column.lower()]!r} already; rename one of the two in a sql step "
                "or in the table",
            )


def _window(step: model.Window, path: Path, known: frozenset[str] | None) -> Iterator[Finding]:
    words = {"size": step.size, "every": step.every, "gap": step.gap}
    for word, value in words.items():
        needed = word in WINDOW_WORDS[step.kind]
        if needed and value is None:
            example = {"size": "1m", "every": "10s", "gap": "30m"}[word]
            yield Finding(path, f"a {step.kind} window needs {word!r}, such as '{word}: {example}'")
        elif not needed and value is not None:
            yield Finding(
                (*path, word),
                f"a {step.kind} window has no {word!r}; it has {' and '.join(WINDOW_WORDS[step.kind])}",
            )
    if step.kind == "sliding" and step.size is not None and step.every is not None:
        yield from _sliding(parse_duration_ms(step.size), parse_duration_ms(step.every), step, path)
    if not step.aggregates:
        yield Finding((*path, "aggregates"), "it counts nothing; such as 'rows: count(*)'")
    yield from _made_columns(step.aggregates, (*path, "aggregates"), (*step.key, *WINDOW_COLUMNS))
    yield from check_columns(step.key, (*path, "key"))
    yield from _rows_columns(step.key, (*path, "key"), known)
    for index, column in enumerate(step.key):
        if column.lower() in WINDOW_COLUMNS:
            yield Finding((*path, "key", index), f"{column!r} is what the window's own column is called")


def _sliding(size_ms: int, every_ms: int, step: model.Window, path: Path) -> Iterator[Finding]:
    if every_ms > size_ms:
        yield Finding(
            (*path, "every"),
            f"between two windows of {step.size} there would be rows in none; 'every' is {step.size} at most",
        )
    elif every_ms * WINDOWS_OF_A_ROW_MAX < size_ms:
        yield Finding(
            (*path, "every"),
            f"each row would be in {size_ms // every_ms} windows; {WINDOWS_OF_A_ROW_MAX} are the most",
        )


def _keyed(step: model.Keyed, path: Path, known: frozenset[str] | None) -> Iterator[Finding]:
    if not step.key:
        yield Finding((*path, "key"), "it needs a column: each of its values has a state")
    yield from check_columns(step.key, (*path, "key"))
    yield from _rows_columns(step.key, (*path, "key"), known)
    for word, text in (("schema", step.schema), ("state", step.state)):
        try:
            names = listed_columns(text)
        except (HoldfastError, ValueError) as error:
            yield Finding((*path, word), str(error))
            continue
        for name in names:
            if name.startswith("_"):
                message = f"{name!r}: names that start with '_' are kept for holdfast's own columns"
                yield Finding((*path, word), message)


def _join(
    step: model.Join, path: Path, known: frozenset[str] | None, definition: model.PipelineDefinition
) -> Iterator[Finding]:
    for side, text in (("left", step.left), ("right", step.right)):
        yield from _side(text, (*path, side), known, definition)
    if not step.on:
        yield Finding((*path, "on"), "it needs a column that both sides have")
    yield from _rows_columns((*step.on, *step.on.values()), (*path, "on"), known)
    if not step.select:
        yield Finding((*path, "select"), "it makes no column; such as [l.id, r.amount]")
    yield from _made_columns(step.select, (*path, "select"), JOIN_COLUMNS)


def _side(
    text: str, path: Path, known: frozenset[str] | None, definition: model.PipelineDefinition
) -> Iterator[Finding]:
    source = definition.source
    if text in source.topics:
        return
    is_name = re.fullmatch(r"[A-Za-z_][A-Za-z0-9._-]*", text.strip()) is not None
    is_column = known is None or text.strip().lower() in {column.lower() for column in known}
    if is_name and not is_column and text.strip().lower() not in ("true", "_tombstone"):
        topics = ", ".join(source.topics) or f"those like {source.pattern}"
        hint = nearest(text, source.topics)
        if source.pattern is not None:
            hint = f"; for a topic of a pattern write _hf.topic = '{text.strip()}'"
        message = f"{text!r} is neither a topic that is read ({topics}) nor a column{hint}"
        yield Finding(path, message, rests_on=(*COLUMNS_REST_ON, ("source", "topics")))
        return
    yield from (Finding(path, problem) for problem in problems_of_expression(text))


def _made_columns(columns: Mapping[str, str], path: Path, reserved: Sequence[str]) -> Iterator[Finding]:
    """Columns that a step makes by SQL."""
    seen: dict[str, str] = {name.lower(): name for name in reserved}
    for name, text in columns.items():
        where: Path = (*path, name)
        if name.startswith("_"):
            yield Finding(where, "names that start with '_' are kept for holdfast's own columns")
        elif not re.fullmatch(r"[^`.()\s'\"]+", name):
            yield Finding(where, f"{name!r} cannot be a column's name; give it one of its own")
        elif name.lower() in seen:
            yield Finding(where, f"there is a column {seen[name.lower()]!r} already; choose another name")
        seen.setdefault(name.lower(), name)
        yield from (Finding(where, problem) for problem in problems_of_expression(text))


def _rows_columns(columns: Sequence[str], path: Path, known: frozenset[str] | None) -> Iterator[Finding]:
    """Columns that the rows must have; the record's key may be one."""
    if known is None:
        return
    names = {column.lower() for column in known}
    for column in columns:
        if column.lower() in names or column.startswith("_"):
            if column.startswith("_") and RECORD_KEY.fullmatch(column) is None:
                yield Finding(path, f"{column!r} is a column of holdfast's own; choose another")
            continue
        listed = nearest(column, known) or f"; there are {', '.join(sorted(known))}"
        yield Finding(path, f"there is no column {column!r}{listed}", rests_on=COLUMNS_REST_ON)
