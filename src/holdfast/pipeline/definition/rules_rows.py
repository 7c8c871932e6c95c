"""Rules of who takes which rows: what a sink's `rows` may name, what an append can keep, what an upsert can delete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from holdfast.pipeline.definition import model
from holdfast.pipeline.definition.columns import KEY_PREFIX, key_columns, plain_columns, source_columns
from holdfast.pipeline.definition.errors import Finding, Path, nearest
from holdfast.pipeline.definition.naming import kind_of_sink, kind_of_step
from holdfast.pipeline.definition.streams import (
    LATE,
    MAIN,
    Stream,
    has_own_rows,
    is_stateful,
    merged,
    streams,
    streams_of,
    takers,
)

RECORD_KEY: Final = "_key"


def check_rows(definition: model.PipelineDefinition) -> Iterator[Finding]:
    yield from _names_apart(definition)
    known = streams(definition)
    steps = {step.name: step for step in definition.steps}
    for index, sink in enumerate(definition.sinks):
        path: Path = ("sinks", index, kind_of_sink(sink))
        stream = known.get(sink.rows)
        if stream is None:
            yield Finding((*path, "rows"), _unknown(sink.rows, definition), rests_on=(("steps",),))
            continue
        step = steps.get(stream.step)
        if isinstance(step, model.Window) and not stream.kind:
            yield from _window_rows(step, sink, path)
        table = merged(sink)
        if table is not None and (stream.kind or not stream.step):
            yield from _deletes(definition, table, path)
        elif table is not None and table.mode == "scd2":
            message = f"rows of {stream.step!r} are made by a step and have no versions; use 'mode: upsert'"
            yield Finding((*path, "rows"), message)
            continue
        if table is not None and (told := last_of_key(definition, table)) is not None:
            yield Finding(path, told, "warning", rests_on=(("source",), ("steps",)))
    yield from _first_of_key(definition)
    yield from _untaken(definition)


def _names_apart(definition: model.PipelineDefinition) -> Iterator[Finding]:
    """`a.late` is the late rows of `a`; no step may be called so too."""
    names = {stream.text for step in definition.steps for stream in streams_of(step) if stream.kind}
    for index, step in enumerate(definition.steps):
        if step.name in names:
            message = f"{step.name!r} is what rows of another step are called; choose another name"
            yield Finding(("steps", index, kind_of_step(step), "name"), message)


def _unknown(rows: str, definition: model.PipelineDefinition) -> str:
    known = [name for name in streams(definition) if name]
    for step in definition.steps:
        if rows == step.name:
            return (
                f"{rows!r} makes no rows of its own: they go on to the end of the steps, where a sink without "
                "'rows' takes them"
            )
        if rows.rpartition(".")[0] == step.name and not is_stateful(step):
            return f"{step.name!r} has no {rows.rpartition('.')[2]!r} rows; stateful steps have"
    if not known:
        return f"there is no {rows!r}: no step makes rows of its own (window, keyed, join do)"
    return f"there is no {rows!r}{nearest(rows, known) or '; there are ' + ', '.join(known)}"


def _window_rows(step: model.Window, sink: model.SinkDefinition, path: Path) -> Iterator[Finding]:
    """A sink must be able to hold what a window gives: again when it changed, gone when it was joined to another."""
    reason = "emit: changes" if step.emit == "changes" else "late: correct" if step.late == "correct" else ""
    table = merged(sink)
    if reason and table is None and not isinstance(sink, model.KafkaSink):
        yield Finding(
            (*path, "rows"),
            f"a window of {step.name!r} is written again when it changes ({reason}), and this sink would keep every "
            "version of it; use postgres or delta with 'mode: upsert', or kafka, or only closed windows",
        )
    if isinstance(sink, model.KafkaSink) and sink.key is not None and "window_start" not in sink.key.lower():
        yield Finding(
            (*path, "key"),
            f"windows share a record key, and in a compacted topic they replace each other: a window of {step.name!r} "
            f"is known by {', '.join((*step.key, 'window_start'))}. Leave 'key' out, or name window_start in it",
            "error" if reason else "warning",
        )
    if table is not None:
        if reason and step.kind == "session" and "_tombstone" not in (table.delete_when or ""):
            yield Finding(
                path,
                f"two sessions of {step.name!r} can become one ({reason}), and the other is taken back by a row that "
                "is a tombstone; add 'delete_when: _tombstone'",
            )
        if reason and table.order_by is not None:
            message = f"a window of {step.name!r} is written again when it changes ({reason}): its last version counts"
            yield Finding(
                (*path, "order_by"),
                f"{message}, and an older one could be the greatest; leave 'order_by' out",
            )
        given = {column.lower() for column in table.key}
        lacking = [column for column in ("window_start", *step.key) if column.lower() not in given]
        if lacking and table.key:
            yield Finding(
                (*path, "key"),
                f"windows would replace each other: a window of {step.name!r} is known by "
                f"{', '.join((*step.key, 'window_start'))}; add {', '.join(lacking)}",
            )


def _deletes(
    definition: model.PipelineDefinition, sink: model.PostgresSink | model.DeltaSink, path: Path
) -> Iterator[Finding]:
    """A tombstone has no value, so a key that is made of the value's columns is null, and would delete nothing."""
    values, keys = source_columns(definition.source), key_columns(definition.source)
    if "_tombstone" not in (sink.delete_when or "") or values is None:
        return
    plain = plain_columns(definition, [*values, *keys], sink.rows).columns
    if sink.mode == "scd2" and plain.get(sink.order_by or "") in values:
        yield Finding(
            (*path, "order_by"),
            f"a tombstone has no value, so its {sink.order_by!r} is null and nothing says since when it counts: make "
            f"the column in a step, as 'SELECT * EXCEPT ({sink.order_by}), coalesce({sink.order_by}, _timestamp) AS "
            f"{sink.order_by} FROM input'",
            rests_on=(("source",), ("steps",)),
        )
    for name in sink.key:
        if plain.get(name) not in values:
            continue  # a step makes it, or it is the key's own
        own, type_ = KEY_PREFIX + name, values[plain[name]]
        if plain.get(own) != own:
            yield Finding(
                (*path, "delete_when"),
                f"a tombstone has no value, so its {name!r} is null and it would delete nothing: decode the record's "
                f"key with a field {name!r} (source.key, as {{format: json, fields: {{{name}: {type_}}}}}) and keep "
                f"{own!r} in every step, or make {name!r} of the key in a step",
                rests_on=(("source",), ("steps",)),
            )
        elif keys[own] != type_:
            yield Finding(
                (*path, "delete_when"),
                f"{name!r} is {type_} in the value and {keys[own]} in the record's key, where a "
                "tombstone has it: give both the same type",
                rests_on=(("source",),),
            )


def last_of_key(
    definition: model.PipelineDefinition, sink: model.PostgresSink | model.DeltaSink | model.KafkaSink
) -> str | None:
    """Why the last row of a key, the one that stays, depends on batches, and what to do; nothing if it does not.

    Of an upsert, and of a topic that is compacted, which only the cluster knows. A window has one row, however often it
    is written.
    """
    stream = streams(definition).get(sink.rows, MAIN)
    step = next((step for step in definition.steps if step.name == stream.step and not stream.kind), None)
    choice = ""
    if isinstance(sink, model.KafkaSink):
        key: Sequence[str] = (RECORD_KEY,) if sink.key is None else (sink.key,)
    else:
        key, choice = sink.key, "name a column that grows in 'order_by'; or "
        if sink.mode != "upsert" or sink.order_by is not None:
            return None
    if isinstance(step, model.Keyed) and (key == (RECORD_KEY,) or set(step.key) <= set(key)):
        is_tied = _in_one_partition(definition, step.key, step.name)
    else:
        is_tied = step is None and _in_one_partition(definition, key, sink.rows)
    if sink.unordered or is_tied or isinstance(step, model.Window):
        return None
    return (
        "rows of one key may lie in several partitions, and then the one that is read last stays, which depends on how "
        f"batches are cut: {choice}where one topic is read and its producers key it so, decode its key (source.key) "
        "with fields of this key; or say 'unordered: true' if any of them may be the last"
    )


def _first_of_key(definition: model.PipelineDefinition) -> Iterator[Finding]:
    for index, step in enumerate(definition.steps):
        if not isinstance(step, model.Dedupe | model.Keyed) or not step.key or step.unordered:
            continue
        if _in_one_partition(definition, step.key, step.name):
            continue
        what = (
            "the one that is read first stays"
            if isinstance(step, model.Dedupe)
            else "the function gets them as read"
        )
        yield Finding(
            ("steps", index, kind_of_step(step)),
            f"rows of one key may lie in several partitions, and then {what}, which depends on how batches are cut: "
            "where one topic is read and its producers key it so, put '_key' into 'key', or decode the record's key "
            "(source.key) with fields of this 'key'; or say 'unordered: true' if it makes no difference, as between "
            "copies of a row",
            "warning",
            rests_on=(("source",),),
        )


def _in_one_partition(definition: model.PipelineDefinition, key: Sequence[str], rows: str) -> bool:
    """Rows that are equal in these columns have one record key, which producers send to one partition of its topic.

    That a field of the value is the same as the key's field of that name is taken for granted.
    """
    source, own = definition.source, key_columns(definition.source)
    if source.pattern is not None or len(source.topics) != 1:
        return False
    if RECORD_KEY in key or not own:
        return RECORD_KEY in key
    plain = plain_columns(definition, [*(source_columns(source) or ()), *own], rows).columns
    fields = {plain.get(name) for name in key}
    return all(name in fields or name.removeprefix(KEY_PREFIX) in fields for name in own)


def _untaken(definition: model.PipelineDefinition) -> Iterator[Finding]:
    """What is made and goes nowhere is counted all the same; the author should know."""
    for index, step in enumerate(definition.steps):
        path: Path = ("steps", index, kind_of_step(step))
        if has_own_rows(step) and not takers(definition, Stream(step.name)):
            message = f"no sink takes its rows; one with 'rows: {step.name}' does"
            yield Finding(path, message, "warning", rests_on=(("sinks",),))
        if is_stateful(step) and not takers(definition, Stream(step.name, LATE)):
            message = f"its late rows are counted and kept nowhere; a sink with 'rows: {step.name}.{LATE}' keeps them"
            yield Finding(path, message, "warning", rests_on=(("sinks",),))
    any_has_own_rows = any(has_own_rows(step) for step in definition.steps)
    if definition.sinks and not any_has_own_rows and not takers(definition, MAIN):
        yield Finding(
            ("sinks",), "no sink takes the rows at the end of the steps; one without 'rows' does", "warning"
        )
