"""Stateful steps in YAML: what they become, what is refused and why, who takes which rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from holdfast.pipeline import Pipeline
from holdfast.pipeline.definition.errors import DefinitionError
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.definition.model import (
    Decoding,
    Dedupe,
    EventTime,
    Field,
    Join,
    Keyed,
    Lookup,
    Window,
)
from holdfast.pipeline.definition.streams import (
    Stream,
    decodings_of,
    side_condition,
    stream_of,
    streams,
    takers,
)

FULL = """\
pipeline: shop
source:
  topics: [orders, payments]
  values:
    orders:
      format: json
      fields: {order_id: long, customer: string, amount: double, at: timestamp}
    payments:
      format: json
      fields: {order_id: long, paid: double, at: timestamp}
  event_time: {field: at, delay: 10m, idle: 1m, ahead: 2h}
steps:
  - dedupe: {name: once, key: [order_id, _key], within: 2d}
  - lookup:
      name: who
      table: postgresql://app:${PASSWORD}@db/shop
      query: SELECT id, city FROM customers
      on: {customer: id}
      columns: city
      missing: quarantine
      refresh: 10m
  - window:
      name: totals
      size: 1m
      key: customer
      aggregates: {rows: count(*), total: sum(amount)}
  - window: {name: slides, size: 10m, every: 1m, aggregates: {rows: count(*)}}
  - window:
      name: visits
      gap: 30m
      key: [customer, city]
      aggregates: {rows: count(*)}
      emit: changes
      late: correct
      correct_within: 2d
  - keyed:
      name: watch
      file: steps.py
      function: watch
      key: customer
      schema: customer string, score decimal(10,2)
      state: {seen: long, last: timestamp}
      ttl: 1d
      timers: processing
  - join:
      name: paid
      left: orders
      right: payments
      on: order_id
      within: 1h
      kind: left
      select: [l.order_id, r.paid AS paid, "l.amount - r.paid AS open"]
sinks:
  - parquet: out
  - parquet: {path: totals, name: totals, rows: totals}
  - kafka: {topic: late, rows: totals.late}
  - kafka: {topic: twice, name: twice, rows: once.duplicates}
  - kafka: {topic: slides, name: slides, rows: slides}
  - postgres:
      url: ${URL}
      table: visits
      rows: visits
      mode: upsert
      key: [customer, city, window_start]
      delete_when: _tombstone
  - kafka: {topic: watch, name: watch, rows: watch}
  - kafka: {topic: paid, name: paid, rows: paid}
"""
BASE = """\
pipeline: p
source:
  topics: [a, b]
  value:
    format: json
    fields: {id: long, name: string, at: timestamp, day: date}
  event_time: at
steps:
  - STEP
sinks:
  - parquet: out
"""
WINDOW = "window: {name: w, size: 1m, key: name, aggregates: {n: count(*)}}"


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "steps.py").write_text("def watch(batch):\n    return batch\n")
    return str(tmp_path)


def found_in(text: str, directory: str = ".") -> list[str]:
    """Errors and warnings."""
    try:
        return [str(finding) for finding in parse_yaml(dedent(text), directory=directory).warnings]
    except DefinitionError as error:
        return str(error).splitlines()


def with_step(step: str, *changes: tuple[str, str]) -> str:
    text = BASE.replace("STEP", step)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


def test_every_word_reaches_the_definition(directory: str) -> None:
    definition = parse_yaml(FULL, directory=directory).definition
    assert definition.source.event_time == EventTime("at", "10m", "1m", "2h")
    assert definition.source.values["payments"] == Decoding(
        "json", (Field("order_id", "long"), Field("paid", "double"), Field("at", "timestamp"))
    )
    assert definition.steps == (
        Dedupe("once", ("order_id", "_key"), within="2d"),
        Lookup(
            "who",
            "postgresql://app:${PASSWORD}@db/shop",
            {"customer": "id"},
            ("city",),
            "SELECT id, city FROM customers",
            "quarantine",
            "10m",
        ),
        Window("totals", {"rows": "count(*)", "total": "sum(amount)"}, size="1m", key=("customer",)),
        Window("slides", {"rows": "count(*)"}, "sliding", "10m", "1m"),
        Window(
            "visits",
            {"rows": "count(*)"},
            "session",
            gap="30m",
            key=("customer", "city"),
            emit="changes",
            late="correct",
            correct_within="2d",
        ),
        Keyed(
            "watch",
            ("customer",),
            "steps.py",
            "watch",
            "customer string, score decimal(10,2)",
            "seen long, last timestamp",
            "1d",
            "processing",
        ),
        Join(
            "paid",
            "orders",
            "payments",
            {"order_id": "order_id"},
            "1h",
            {"order_id": "l.order_id", "paid": "r.paid", "open": "l.amount - r.paid"},
            "left",
        ),
    )
    assert [sink.rows for sink in definition.sinks[:4]] == ["", "totals", "totals.late", "once.duplicates"]


def test_python_says_the_same(directory: str) -> None:
    orders = {"order_id": "long", "customer": "string", "amount": "double", "at": "timestamp"}
    payments = Decoding(
        "json", (Field("order_id", "long"), Field("paid", "double"), Field("at", "timestamp"))
    )
    pipeline = (
        Pipeline("shop")
        .read(
            *("orders", "payments"),
            values={"orders": {"format": "json", "fields": orders}, "payments": payments},
            event_time=EventTime("at", "10m", "1m", "2h"),
        )
        .dedupe("order_id", "_key", within="2d", name="once")
        .lookup(
            "postgresql://app:${PASSWORD}@db/shop",
            query="SELECT id, city FROM customers",
            on={"customer": "id"},
            columns="city",
            missing="quarantine",
            refresh="10m",
            name="who",
        )
        .window({"rows": "count(*)", "total": "sum(amount)"}, size="1m", key="customer", name="totals")
        .window({"rows": "count(*)"}, size="10m", every="1m", name="slides")
        .window(
            {"rows": "count(*)"},
            gap="30m",
            key=["customer", "city"],
            emit="changes",
            late="correct",
            correct_within="2d",
            name="visits",
        )
        .keyed(
            "watch",
            file="steps.py",
            key="customer",
            schema="customer string, score decimal(10,2)",
            state={"seen": "long", "last": "timestamp"},
            ttl="1d",
            timers="processing",
            name="watch",
        )
        .join(
            "orders",
            "payments",
            on="order_id",
            within="1h",
            kind="left",
            select={"order_id": "l.order_id", "paid": "r.paid", "open": "l.amount - r.paid"},
            name="paid",
        )
        .write("parquet", path="out")
        .write("parquet", path="totals", name="totals", rows="totals")
        .write("kafka", topic="late", rows="totals.late")
        .write("kafka", topic="twice", name="twice", rows="once.duplicates")
        .write("kafka", topic="slides", name="slides", rows="slides")
        .write(
            "postgres",
            url="${URL}",
            table="visits",
            rows="visits",
            mode="upsert",
            key=["customer", "city", "window_start"],
            delete_when="_tombstone",
        )
        .write("kafka", topic="watch", name="watch", rows="watch")
        .write("kafka", topic="paid", name="paid", rows="paid")
    )
    from_yaml = parse_yaml(FULL, directory=directory).definition
    from_python = pipeline.definition(directory=directory)
    assert from_python == from_yaml
    assert fingerprint(from_python) == fingerprint(from_yaml)


def test_short_forms_mean_what_they_look_like() -> None:
    text = with_step("dedupe: [id, name]", ("event_time: at", "event_time: _timestamp"))
    definition = parse_yaml(text).definition
    assert definition.source.event_time == EventTime("_timestamp")
    assert definition.steps == (Dedupe("dedupe-1", ("id", "name")),)
    by_id = parse_yaml(with_step("dedupe: {by: hf-id, within: 1h}")).definition.steps
    assert by_id == (Dedupe("dedupe-1", by="hf-id", within="1h"),)


@pytest.mark.parametrize("written", ["null", "'null'", "~"])
def test_null_is_a_word_here_however_it_is_quoted(written: str) -> None:
    step = f"lookup: {{table: t.parquet, on: id, columns: city, missing: {written}}}"
    (lookup,) = parse_yaml(with_step(step)).definition.steps
    assert isinstance(lookup, Lookup)
    assert lookup.missing == "null"


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("dedupe: {within: 1h}", "steps[0].dedupe: it needs 'key'"),
        ("dedupe: {key: id, by: hf-id}", "hf-id stands in a header of the record; leave 'key' out"),
        ("dedupe: {key: idd}", "there is no column 'idd'; did you mean 'id'?"),
        ("dedupe: {key: _batch_time}", "'_batch_time' is a column of holdfast's own"),
        ("dedupe: {key: id, within: 5}", "has no unit of time"),
        ("lookup: {table: t.parquet, on: id}", "lookup needs 'columns'"),
        ("lookup: {table: t.parquet, on: [], columns: city}", "it needs a column that finds the table's row"),
        ("lookup: {table: t.parquet, on: id, columns: []}", "it brings nothing"),
        ("lookup: {table: t.parquet, on: id, columns: [city, City]}", "'City' is listed twice"),
        ("lookup: {table: t.parquet, on: id, columns: Name}", "the rows have a column 'name' already"),
        ("lookup: {table: t.parquet, on: idd, columns: city}", "there is no column 'idd'"),
        ("lookup: {table: 'postgresql://h/d', on: id, columns: city}", "a database needs 'query'"),
        ("lookup: {table: t.csv, query: SELECT 1, on: id, columns: city}", "a query is for a database"),
        ("lookup: {table: 'postgresql://h/d', query: DROP x, on: id, columns: c}", "begins with SELECT"),
        (
            "lookup: {table: 'postgresql://u:p@h/d', query: SELECT 1, on: id, columns: c}",
            "for everybody to read",
        ),
        ("lookup: {table: '${T', on: id, columns: c}", "a '${' is not closed"),
        ("window: {size: 1m}", "window needs 'aggregates'"),
        ("window: {size: 1m, aggregates: {}}", "it counts nothing"),
        ("window: {aggregates: {n: count(*)}}", "a tumbling window needs 'size', such as 'size: 1m'"),
        ("window: {kind: session, size: 1m, aggregates: {n: count(*)}}", "a session window needs 'gap'"),
        ("window: {kind: session, size: 1m, aggregates: {n: count(*)}}", "a session window has no 'size'"),
        (
            "window: {kind: tumbling, size: 1m, gap: 1m, aggregates: {n: count(*)}}",
            "has no 'gap'; it has size",
        ),
        ("window: {every: 1m, aggregates: {n: count(*)}}", "a sliding window needs 'size'"),
        ("window: {size: 1m, every: 2m, aggregates: {n: count(*)}}", "there would be rows in none"),
        ("window: {size: 1d, every: 1s, aggregates: {n: count(*)}}", "each row would be in 86400 windows"),
        ("window: {size: 0s, aggregates: {n: count(*)}}", "a duration above nothing"),
        (
            "window: {size: 1m, aggregates: {window_start: count(*)}}",
            "there is a column 'window_start' already",
        ),
        ("window: {size: 1m, key: name, aggregates: {Name: count(*)}}", "there is a column 'name' already"),
        ("window: {size: 1m, aggregates: {_n: count(*)}}", "names that start with '_'"),
        ("window: {size: 1m, aggregates: {n: count(now())}}", "now() changes when a batch is recomputed"),
        ("window: {size: 1m, aggregates: {n: (count(*)}}", "its parentheses do not match"),
        ("window: {size: 1m, key: nmae, aggregates: {n: count(*)}}", "there is no column 'nmae'"),
        ("window: {size: 1m, key: window_end, aggregates: {n: count(*)}}", "the window's own column"),
        ("window: {size: 1m, key: _key, aggregates: {n: count(*)}}", "'_key' is a column of holdfast's own"),
        ("keyed: {function: 'json:dumps', key: [], schema: n long, state: n long}", "it needs a column"),
        ("keyed: {function: 'json:dumps', key: id, schema: n lnog, state: n long}", "'lnog' is no type"),
        ("keyed: {function: 'json:dumps', key: id, schema: n, state: n long}", "'n' is no column"),
        (
            "keyed: {function: 'json:dumps', key: id, schema: n long, state: _n long}",
            "names that start with '_'",
        ),
        ("keyed: {function: 'json:dumps', key: id, schema: 'n long, N int', state: n long}", "listed twice"),
        ("keyed: {function: f, file: no.py, key: id, schema: n long, state: n long}", "cannot read 'no.py'"),
        ("join: {left: a, right: c, on: id, select: [l.id]}", "'c' is neither a topic that is read (a, b)"),
        ("join: {left: a, right: b, on: idd, select: [l.id]}", "there is no column 'idd'"),
        ("join: {left: a, right: b, on: [], select: [l.id]}", "it needs a column that both sides have"),
        ("join: {left: a, right: b, on: id, select: []}", "it makes no column"),
        ("join: {left: a, right: b, on: id, select: [l.id, r.id]}", "'r.id' cannot be a column's name"),
        ("join: {left: a, right: b, on: id, select: [l.id AS x, r.id AS x]}", "cannot be a column's name"),
        ("join: {left: a, right: b, on: id, select: [l.id + r.id]}", "cannot be a column's name"),
        ("join: {left: a, right: b, on: id, select: {left_hf: l.id}}", "there is a column 'left_hf' already"),
        ("join: {left: id > (1, right: b, on: id, select: [l.id]}", "its parentheses do not match"),
        ("join: {left: a, right: b, on: id, within: 0s, select: [l.id]}", "a duration above nothing"),
    ],
)
def test_what_is_wrong_with_a_step_is_said(step: str, error: str) -> None:
    found = found_in(with_step(step))
    assert any(error in line for line in found), found


def test_what_a_query_made_is_left_to_spark() -> None:
    steps = (
        "sql: SELECT *, 1 AS made FROM input\n  - window: {size: 1m, key: made, aggregates: {n: count(*)}}"
    )
    assert all(line.startswith("warning") for line in found_in(with_step(steps)))
    looked_up = "lookup: {table: t.parquet, on: id, columns: city}\n  - dedupe: city"
    assert all(line.startswith("warning") for line in found_in(with_step(looked_up)))


@pytest.mark.parametrize(
    "step", ["dedupe: id", WINDOW, "join: {left: a, right: b, on: id, select: [l.name]}"]
)
def test_a_step_with_a_memory_needs_to_know_when_things_happened(step: str) -> None:
    found = found_in(with_step(step, ("  event_time: at\n", "")))
    assert any("it goes by when things happened" in line for line in found), found


def test_a_lookup_needs_no_event_time() -> None:
    text = with_step("lookup: {table: t.parquet, on: id, columns: city}", ("  event_time: at\n", ""))
    assert found_in(text) == []


@pytest.mark.parametrize(
    ("event_time", "error"),
    [
        ("att", "there is no field 'att'; did you mean 'at'?"),
        ("day", "'day' is a date; event time is a timestamp"),
        ("{field: at, delay: soon}", "'soon' is not a duration"),
        ("{field: at, idle: 0s}", "a duration above nothing"),
        ("{delay: 1m}", "event_time needs 'field'"),
        ("{field: at, delay: 0s}", None),
        ("_timestamp", None),
    ],
)
def test_event_time_is_a_timestamp_of_the_records(event_time: str, error: str | None) -> None:
    found = found_in(with_step("dedupe: id", ("event_time: at", f"event_time: {event_time}")))
    if error is None:
        assert all("its late rows" in line or "several partitions" in line for line in found), found
    else:
        assert any(error in line for line in found), found


VALUES = """\
pipeline: p
source:
  topics: [a, b]
  values:
    a: {format: json, fields: {id: long, at: timestamp}}
    b: {format: json, fields: {id: long, at: timestamp}}
  event_time: at
sinks:
  - parquet: out
"""


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("    b: {", "    c: {"), "source.values.c: 'c' is not read"),
        (
            ("b: {format: json, fields: {id: long", "b: {format: json, fields: {id: int"),
            "a column has one type",
        ),
        (
            ("b: {format: json, fields: {id: long", "b: {format: json, fields: {ID: long"),
            "are one column to Spark",
        ),
        (
            ("b: {format: json, fields: {id: long, at: timestamp}}", "b: text"),
            "rows of the topic 'b' have no 'at'",
        ),
        (
            ("    b: {format: json, fields: {id: long, at: timestamp}}\n", ""),
            "rows of other topics have no 'at'",
        ),
        (("  values:", "  value: text\n  values:"), "every topic has a decoding of its own"),
        (("topics: [a, b]", "pattern: '[a]'"), "source.values.b: 'b' is not read: it does not match"),
        (
            ("b: {format: json, fields:", "b: {format: avro, schema_file: no.avsc, fields:"),
            "cannot read 'no.avsc'",
        ),
        (("b: {format: json", "b: {format: jsn"), "source.values.b.format: 'jsn' is not one of"),
    ],
)
def test_topics_may_have_decodings_of_their_own(change: tuple[str, str], error: str) -> None:
    assert found_in(VALUES) == []
    assert change[0] in VALUES
    found = found_in(VALUES.replace(*change))
    assert any(error in line for line in found), found


def test_topics_have_decodings_of_their_own_or_the_common_one() -> None:
    both = parse_yaml(VALUES).definition.source
    assert [topic for topic, _ in decodings_of(both)] == ["a", "b"]
    some = replace(both, values={"a": both.values["a"]})
    assert [topic for topic, _ in decodings_of(some)] == ["a", None]


CHANGING = "window: {name: w, size: 1m, key: name, aggregates: {n: count(*)}, emit: changes}"
CORRECTING = "window: {name: w, size: 1m, key: name, aggregates: {n: count(*)}, late: correct}"
SESSIONS = "window: {name: w, gap: 1m, key: name, aggregates: {n: count(*)}, emit: changes}"
UPSERT = "postgres: {url: u, table: t, rows: w, mode: upsert, key: [window_start, name]}"


@pytest.mark.parametrize(
    ("step", "sink", "error"),
    [
        (WINDOW, "parquet: {path: o, rows: w}", None),
        (WINDOW, "parquet: {path: o, rows: w.late}", None),
        (WINDOW, "parquet: {path: o, rows: ww}", "there is no 'ww'; did you mean 'w'?"),
        (WINDOW, "parquet: {path: o, rows: w.duplicates}", "there is no 'w.duplicates'; did you mean"),
        ("filter: {name: f, where: id > 1}", "parquet: {path: o, rows: f}", "makes no rows of its own"),
        ("filter: {name: f, where: id > 1}", "parquet: {path: o, rows: f.late}", "'f' has no 'late' rows"),
        ("filter: {name: f, where: id > 1}", "parquet: {path: o, rows: g}", "no step makes rows of its own"),
        ("dedupe: {name: d, key: id}", "parquet: {path: o, rows: d}", "makes no rows of its own"),
        (CHANGING, "parquet: {path: o, rows: w}", "is written again when it changes (emit: changes)"),
        (CHANGING, "kafka: {topic: o, rows: w, key: name}", "windows share a record key"),
        (CHANGING, "delta: {path: o, rows: w}", "this sink would keep every version"),
        (CHANGING, "delta: {path: o, rows: w, mode: upsert, key: [window_start, name]}", None),
        (CORRECTING, "postgres: {url: u, table: t, rows: w}", "(late: correct)"),
        (CHANGING, "kafka: {topic: o, rows: w}", None),
        (CHANGING, "parquet: {path: o, rows: w.late}", None),
        (CORRECTING, UPSERT, None),
        (CHANGING, UPSERT.replace("window_start, ", ""), "add window_start"),
        (CORRECTING, UPSERT.replace("key:", "order_by: n, key:"), "an older one could be the greatest"),
        (WINDOW, UPSERT.replace("key:", "order_by: n, key:"), None),
        (WINDOW, UPSERT.replace(", name]", "]"), "windows would replace each other"),
        (SESSIONS, UPSERT, "add 'delete_when: _tombstone'"),
        (SESSIONS, UPSERT.replace("mode: upsert", "mode: upsert, delete_when: _tombstone"), None),
    ],
)
def test_a_sink_takes_what_it_can_keep(step: str, sink: str, error: str | None) -> None:
    found = found_in(with_step(step, ("parquet: out", sink)))
    problems = [line for line in found if not line.startswith("warning")]
    if error is None:
        assert problems == []
    else:
        assert any(error in line for line in problems), found


def test_what_nobody_takes_is_a_warning() -> None:
    assert found_in(with_step(WINDOW)) == [
        "warning: steps[0].window: no sink takes its rows; one with 'rows: w' does",
        "warning: steps[0].window: its late rows are counted and kept nowhere; a sink with 'rows: w.late' keeps them",
    ]
    taken = with_step(
        WINDOW, ("parquet: out", "parquet: {path: o, rows: w}\n  - kafka: {topic: l, rows: w.late}")
    )
    assert found_in(taken) == []
    copies = with_step(
        "dedupe: {name: d, key: id}", ("parquet: out", "parquet: {path: o, rows: d.duplicates}")
    )
    assert any("no sink takes the rows at the end of the steps" in line for line in found_in(copies))


def test_no_step_is_called_like_the_rows_of_another() -> None:
    found = found_in(with_step(f"{WINDOW}\n  - filter: {{name: w.late, where: id > 1}}"))
    assert any("is what rows of another step are called" in line for line in found), found


def test_streams_are_told_apart(directory: str) -> None:
    definition = parse_yaml(FULL, directory=directory).definition
    assert list(streams(definition)) == [
        *("", "once.duplicates", "once.late", "totals", "totals.late", "slides", "slides.late"),
        *("visits", "visits.late", "watch", "watch.late", "paid", "paid.late"),
    ]
    assert stream_of(definition, definition.sinks[2]) == Stream("totals", "late")
    assert takers(definition, Stream("totals")) == (definition.sinks[1],)


def test_a_side_of_a_join_is_a_topic_or_a_condition(directory: str) -> None:
    source = parse_yaml(FULL, directory=directory).definition.source
    assert side_condition(source, "orders") == "_hf.topic = 'orders'"
    assert side_condition(source, "amount > 1") == "amount > 1"


def test_what_follows_from_an_error_is_not_said_again() -> None:
    sinks = ("parquet: out", "parquet: {path: o, rows: w}")
    wrong_step = with_step(WINDOW.replace("size: 1m", "size: soon, emitt: x"), sinks)
    assert len([line for line in found_in(wrong_step) if "rows" in line.split(": ")[0]]) == 0
    wrong_time = with_step(WINDOW, ("event_time: at", "event_time: {field: at, dely: 1m}"))
    assert [line for line in found_in(wrong_time) if not line.startswith("warning")] == [
        "source.event_time.dely: event_time has no key 'dely'; did you mean 'delay'?"
    ]
    wrong_fields = with_step(WINDOW, ("name: string", "name: [string]"))
    assert [line.split(": ")[0] for line in found_in(wrong_fields) if not line.startswith("warning")] == [
        "source.value.fields.name"
    ]


def test_a_step_whose_name_cannot_be_read_is_checked_all_the_same() -> None:
    found = found_in(VALUES.replace("sinks:", "steps:\n  - filter: {name: [a], where: true}\nsinks:"))
    assert any("expected a name" in line for line in found), found
