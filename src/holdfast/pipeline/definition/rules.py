"""Rules of a definition that need neither Spark nor a broker.

They see the definition, not its text, so YAML and Python keep the same ones; a finding's path is in the words of YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.pipeline.core.spark_settings import changed
from holdfast.pipeline.definition.errors import Finding, Path
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.definition.naming import (
    DEAD_LETTER_NAME,
    NAME,
    dead_letter_of,
    kind_of_sink,
    kind_of_step,
    resolve_path,
)
from holdfast.pipeline.definition.rules_rows import check_rows
from holdfast.pipeline.definition.rules_shared import (
    check_columns,
    check_expressions,
    check_password,
    check_settings,
    check_topic,
)
from holdfast.pipeline.definition.rules_source import check_source
from holdfast.pipeline.definition.rules_steps import check_memory, check_steps
from holdfast.pipeline.definition.secrets import incomplete_references


def check_rules(definition: PipelineDefinition) -> list[Finding]:
    """Everything wrong with a definition; warnings among them."""
    return [
        *_names(definition),
        *check_source(definition.source),
        *check_steps(definition),
        *check_memory(definition),
        *_sinks(definition),
        *check_rows(definition),
        *_topics_apart(definition),
        *incomplete_references(definition),
    ]


def _names(definition: PipelineDefinition) -> Iterator[Finding]:
    if NAME.fullmatch(definition.name) is None:
        yield Finding(("pipeline",), _bad_name(definition.name))
    if not definition.sinks:
        yield Finding(("sinks",), "there is no sink; add one, such as '- parquet: out/rows'")
    steps = [
        (step.name, ("steps", index, kind_of_step(step), "name"))
        for index, step in enumerate(definition.steps)
    ]
    sinks = [
        (sink.name, ("sinks", index, kind_of_sink(sink), "name"))
        for index, sink in enumerate(definition.sinks)
    ]
    for what, named in (("step", steps), ("sink", sinks)):
        seen: dict[str, int] = {}
        for index, (name, path) in enumerate(named):
            if NAME.fullmatch(name) is None:
                yield Finding(path, _bad_name(name))
            elif name.lower() in seen:
                other = f"{what}s[{seen[name.lower()]}]"
                yield Finding(path, f"{other} is called {name!r} too; give this {what} a 'name' of its own")
            seen.setdefault(name.lower(), index)
    for name, path in sinks:
        if name == DEAD_LETTER_NAME:
            yield Finding(path, f"{name!r} is the name of the dead letter sink; choose another")
    for name, path in steps:
        if name == "parse":
            yield Finding(path, "'parse' is the reason of records that cannot be parsed; choose another name")


def _bad_name(name: str) -> str:
    return (
        f"{name!r} cannot be a name: it is made of letters and digits, with single '.', '_' or '-' between them, "
        "100 characters at most"
    )


def _sinks(definition: PipelineDefinition) -> Iterator[Finding]:
    places: dict[tuple[str, ...], int] = {}
    for index, sink in enumerate(definition.sinks):
        path: Path = ("sinks", index, kind_of_sink(sink))
        yield from _sink(sink, path)
        place = _place(definition, sink)
        if place in places:
            yield Finding(path, f"sinks[{places[place]}] writes to the same place; a sink's place is its own")
        places.setdefault(place, index)
    if definition.dead_letter is not None:
        yield from check_topic(definition.dead_letter.topic, ("dead_letter", "topic"))
        yield from check_settings(definition.dead_letter.settings, ("dead_letter", "settings"))
    yield from _spark(definition.spark)


def _spark(settings: Mapping[str, str]) -> Iterator[Finding]:
    for name in settings:
        if not name.startswith("spark."):
            yield Finding(("spark", name), f"settings of Spark begin with 'spark.', as spark.{name}")
    for name, wanted in changed(settings):
        yield Finding(("spark", name), f"guarantees and results rest on {wanted}; leave it out")


def _sink(sink: SinkDefinition, path: Path) -> Iterator[Finding]:
    match sink:
        case ParquetSink() | DeltaSink():
            yield from check_columns(sink.partition_by, (*path, "partition_by"))
            remote = re.match(r"(?!file:)[a-z][a-z0-9+.-]*://", sink.path)
            if isinstance(sink, ParquetSink) and remote:
                yield Finding(
                    (*path, "path"),
                    f"{remote[0]} cannot rename a directory in one step, which is how Parquet batches commit; "
                    "use a delta sink there",
                )
        case PostgresSink():
            if sink.mode == "upsert" and not sink.key:
                yield Finding(path, "upsert needs 'key': the columns of the primary key")
            if sink.mode == "append" and sink.key:
                yield Finding((*path, "key"), "a key is for 'mode: upsert'; append keeps every row")
            if sink.mode == "append" and sink.order is not None:
                yield Finding((*path, "order"), "append keeps every row; it needs 'mode: upsert'")
            if sink.order is not None and sink.delete_when is not None:
                yield Finding(
                    (*path, "order"),
                    "a key that was deleted leaves nothing behind that an older row could be compared with, which is "
                    "read later: keep such rows, with a column that says so, and leave out 'delete_when'; or leave out "
                    "'order' where all rows of a key come through one partition",
                )
            if sink.mode == "append" and sink.delete_when is not None:
                yield Finding((*path, "delete_when"), "append deletes nothing; it needs 'mode: upsert'")
            yield from check_columns(sink.key, (*path, "key"))
            yield from check_expressions({"delete_when": sink.delete_when}, path)
            yield from check_password(sink.url, (*path, "url"))
        case KafkaSink():
            yield from check_topic(sink.topic, (*path, "topic"))
            yield from check_settings(sink.settings, (*path, "settings"))
            yield from check_expressions({"key": sink.key, "value": sink.value}, path)
            yield from check_expressions(dict(sink.headers), (*path, "headers"))
            for name in sink.headers:
                if name.startswith("hf-"):
                    message = "headers that start with 'hf-' are holdfast's own"
                    yield Finding((*path, "headers", name), message)


def _place(definition: PipelineDefinition, sink: SinkDefinition) -> tuple[str, ...]:
    match sink:
        case ParquetSink() | DeltaSink():
            return "path", resolve_path(definition, sink.path)
        case PostgresSink():
            return "table", sink.url, sink.schema_name, sink.table
        case KafkaSink():
            return "topic", sink.bootstrap or "", sink.topic


@dataclass(frozen=True)
class _Topic:
    topic: str
    bootstrap: str | None
    path: Path


def _topics_apart(definition: PipelineDefinition) -> Iterator[Finding]:
    """What a pipeline writes must not be what it reads, nor dead letters stand among rows.

    A pattern leaves out what the pipeline itself writes, so it cannot do that.
    """
    source = definition.source
    written = [
        _Topic(sink.topic, sink.bootstrap, ("sinks", index, "kafka", "topic"))
        for index, sink in enumerate(definition.sinks)
        if isinstance(sink, KafkaSink)
    ]
    dead = dead_letter_of(definition)
    dead_path: Path = ("dead_letter", "topic") if definition.dead_letter else ("source",)
    dead_letter = _Topic(dead.topic, dead.bootstrap, dead_path)
    for each in (*written, dead_letter):
        if each.bootstrap in (None, source.bootstrap) and each.topic in source.topics:
            what = "dead letters go to" if each is dead_letter else "this writes to"
            yield Finding(
                each.path, f"{what} {each.topic!r}, which is also read: the pipeline would feed itself"
            )
    for each in written:
        if each.bootstrap == dead_letter.bootstrap and each.topic == dead_letter.topic:
            yield Finding(each.path, f"{each.topic!r} is the dead letter topic; rows need one of their own")
