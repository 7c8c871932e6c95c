"""What may stand below `steps`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from holdfast.pipeline.definition.model import (
    Dedupe,
    Expect,
    Filter,
    Join,
    Keyed,
    Lookup,
    Missing,
    OnBreak,
    Python,
    Sql,
    Window,
)
from holdfast.pipeline.definition.shapes import (
    Choice,
    Duration,
    Either,
    Function,
    Key,
    ListOf,
    MapOf,
    Record,
    Text,
    Truth,
    Variants,
)
from holdfast.pipeline.definition.table_words import COLUMN_NAMES, COLUMNS, NAME, SQL, UNORDERED


def _make_lookup(table: str, name: str, on: Sequence[str] | Mapping[str, str] = (), **values: Any) -> Lookup:
    return Lookup(name, table, on=_pairs(on), **values)


def _make_window(name: str, kind: Any = None, **values: Any) -> Window:
    """Without a kind it is the one its other words mean."""
    if kind is None:
        kind = "session" if "gap" in values else "sliding" if "every" in values else "tumbling"
    return Window(name, kind=kind, **values)


def _make_join(
    left: str,
    right: str,
    on: Sequence[str] | Mapping[str, str],
    select: Sequence[str] | Mapping[str, str],
    name: str,
    **values: Any,
) -> Join:
    return Join(name, left, right, on=_pairs(on), select=_selected(select), **values)


def _pairs(on: Sequence[str] | Mapping[str, str]) -> Mapping[str, str]:
    """Columns that are called the same on both sides may be listed."""
    return on if isinstance(on, Mapping) else {column: column for column in on}


def _selected(select: Sequence[str] | Mapping[str, str]) -> Mapping[str, str]:
    """`l.id` is called `id`, `l.id AS order_id` as it says.

    What has no name of its own, or one that is taken, is called by its text, which the rules refuse.
    """
    if isinstance(select, Mapping):
        return select
    named: dict[str, str] = {}
    for text in select:
        given = re.fullmatch(r"(?s)\s*(.+?)\s+[aA][sS]\s+(?:`([^`]+)`|(\w+))\s*", text)
        column = re.fullmatch(r"\s*[lr]\.(?:`([^`]+)`|(\w+))\s*", text)
        name, sql = text.strip(), text.strip()
        if given:
            name, sql = given[2] or given[3], given[1]
        elif column:
            name = column[1] or column[2]
        named[text.strip() if name in named else name] = sql
    return named


STEP: Final = Variants(
    "a step",
    {
        "expect": Record(
            "expect",
            (
                Key("that", SQL, "True for a good row; null counts as broken.", required=True),
                NAME,
                Key(
                    "else",
                    Choice(get_args(OnBreak)),
                    "What becomes of a row that breaks it: kept and counted, dropped and counted, sent to the "
                    "dead letter topic, or the pipeline stops.",
                    default="quarantine",
                    attribute="otherwise",
                ),
            ),
            Expect,
            shorthand="that",
            doc="A rule that every row should keep.",
        ),
        "filter": Record(
            "filter",
            (
                Key("where", SQL, "Rows for which this is true stay.", required=True),
                NAME,
            ),
            Filter,
            shorthand="where",
            doc="Rows that leave on purpose, counted by this step's name.",
        ),
        "sql": Record(
            "sql",
            (
                Key("query", Text("a query"), "SELECT … FROM input; `_hf` must be selected.", required=True),
                NAME,
                Key("expand", Truth(), "A row may become several.", default=False),
            ),
            Sql,
            shorthand="query",
            doc="A query over `input`, the rows of the step before.",
        ),
        "python": Record(
            "python",
            (
                Key("function", Function(), "The function, or module:function.", required=True),
                Key("file", Text("a file"), "The Python file it stands in, beside the definition."),
                NAME,
                Key(
                    "schema",
                    COLUMNS,
                    "The columns it returns, as 'id long, total double' or as a mapping; without it the same.",
                ),
                Key(
                    "mode",
                    Choice(("arrow", "pandas")),
                    "What it takes and returns: a pyarrow RecordBatch or a pandas DataFrame.",
                    default="arrow",
                ),
                Key("expand", Truth(), "A row may become several.", default=False),
            ),
            Python,
            shorthand="function",
            doc="A Python function over batches of rows.",
        ),
        "dedupe": Record(
            "dedupe",
            (
                Key("key", COLUMN_NAMES, "Columns: rows that have the same in all of them are one."),
                Key(
                    "by",
                    Choice(("key", "hf-id")),
                    "By those columns, or by the number that a spooling producer gives each message.",
                    default=Dedupe.by,
                ),
                Key(
                    "within",
                    Duration(),
                    "How long a key is remembered, in event time.",
                    default=Dedupe.within,
                ),
                UNORDERED,
                NAME,
            ),
            Dedupe,
            shorthand="key",
            doc="The first row of a key goes on; those that come after it within a time leave, counted.",
        ),
        "lookup": Record(
            "lookup",
            (
                Key(
                    "table",
                    Text("a table"),
                    "A Parquet file or directory, a CSV file with a header, a Delta table, or "
                    "postgresql://user:${PASSWORD}@host/database with a 'query'.",
                    required=True,
                ),
                Key(
                    "on",
                    Either(COLUMN_NAMES, MapOf(Text("a column of the table"))),
                    "Columns of the rows with the table's they must equal; a list when they are called the same.",
                    required=True,
                ),
                Key(
                    "columns",
                    COLUMN_NAMES,
                    "What the rows get of the table.",
                    required=True,
                ),
                Key("query", Text("a query"), "PostgreSQL: what is read."),
                Key(
                    "missing",
                    Choice(get_args(Missing)),
                    "A row that the table has nothing for: gets nulls, leaves counted, is a dead letter, "
                    "or stops the pipeline.",
                    default=Lookup.missing,
                ),
                Key(
                    "refresh",
                    Duration(),
                    "How old a version of the table may be before it is read again.",
                    default=Lookup.refresh,
                ),
                NAME,
            ),
            _make_lookup,
            doc="Columns of a reference table, of one version for each batch.",
        ),
        "window": Record(
            "window",
            (
                Key(
                    "aggregates",
                    MapOf(SQL),
                    "SQL by the name of its column: count(*), sum(amount), approx_count_distinct(user)…",
                    required=True,
                ),
                Key(
                    "kind",
                    Choice(("tumbling", "sliding", "session")),
                    "Side by side, overlapping, or as long as rows keep coming; without it what 'size', "
                    "'every' or 'gap' mean.",
                ),
                Key("size", Duration(), "How long a window is."),
                Key("every", Duration(), "Sliding: a window begins each time this has passed."),
                Key("gap", Duration(), "Session: it ends when nothing came for so long."),
                Key("key", COLUMN_NAMES, "Columns; windows are apart for each of their values."),
                Key(
                    "emit",
                    Choice(("closed", "changes")),
                    "A row when a window is over, or each time it changes.",
                    default=Window.emit,
                ),
                Key(
                    "late",
                    Choice(("route", "correct")),
                    "Rows for windows that are over: into <step>.late, or the window is opened again and corrected.",
                    default=Window.late,
                ),
                Key(
                    "correct_within",
                    Duration(),
                    "How long after its end a window can still be corrected.",
                    default=Window.correct_within,
                ),
                NAME,
            ),
            _make_window,
            doc="Aggregates by key and windows of event time: rows of its own, for sinks with 'rows'.",
        ),
        "keyed": Record(
            "keyed",
            (
                Key("function", Function(), "The function, or module:function.", required=True),
                Key("key", COLUMN_NAMES, "Columns; each of their values has a state.", required=True),
                Key("schema", COLUMNS, "The columns of its rows, as 'id long, total double'.", required=True),
                Key("state", COLUMNS, "The columns of a key's state.", required=True),
                Key("file", Text("a file"), "The Python file it stands in, beside the definition."),
                Key(
                    "ttl",
                    Duration(),
                    "How long a key is remembered that nothing comes for.",
                    default=Keyed.ttl,
                ),
                Key(
                    "timers",
                    Choice(("event", "processing")),
                    "Whether its timers go by event time or by the time of batches.",
                    default=Keyed.timers,
                ),
                UNORDERED,
                NAME,
            ),
            Keyed,
            doc="A Python function with a state for each key: rows of its own, for sinks with 'rows'.",
        ),
        "join": Record(
            "join",
            (
                Key(
                    "left",
                    Text("a topic, or an SQL condition"),
                    "A topic of the source, or SQL that is true for left rows.",
                    required=True,
                ),
                Key(
                    "right",
                    Text("a topic, or an SQL condition"),
                    "A topic of the source, or SQL that is true for right rows.",
                    required=True,
                ),
                Key(
                    "on",
                    Either(COLUMN_NAMES, MapOf(Text("a column of the right"))),
                    "Columns of the left with the right's they must equal; a list when they are called the same.",
                    required=True,
                ),
                Key(
                    "select",
                    Either(ListOf(Text("a column such as l.id"), lone=True), MapOf(SQL)),
                    "Columns of the pair: SQL over l and r by name, or a list such as [l.id, r.amount].",
                    required=True,
                ),
                Key(
                    "within",
                    Duration(),
                    "How far apart the two events may be, either one first.",
                    default=Join.within,
                ),
                Key(
                    "kind",
                    Choice(("inner", "left")),
                    "Pairs alone, or left rows without one too, when their time is over.",
                    default=Join.kind,
                ),
                NAME,
            ),
            _make_join,
            doc="Pairs of rows that happened near each other: rows of its own, for sinks with 'rows'.",
        ),
    },
)
