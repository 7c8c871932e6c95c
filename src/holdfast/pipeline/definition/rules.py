"""Rules of a definition that need neither Spark nor a broker.

They see the definition, not its text, so YAML and Python keep the same ones; a finding's path is in the words of YAML.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.spark_settings import changed
from holdfast.pipeline.definition import model, naming
from holdfast.pipeline.definition import rules_shared as shared
from holdfast.pipeline.definition.columns import RECORD_TIME, columns_of, conflicts
from holdfast.pipeline.definition.errors import Finding, Path, nearest
from holdfast.pipeline.definition.rules_rows import check_rows
from holdfast.pipeline.definition.rules_steps import check_steps
from holdfast.pipeline.definition.secrets import incomplete_references, is_reference
from holdfast.pipeline.definition.streams import decodings_of

SCHEMA_FORMATS: Final = ("avro", "protobuf")
FIELDS_REST_ON: Final[tuple[Path, ...]] = (("source", "value"), ("source", "values"))


def check_rules(definition: model.PipelineDefinition) -> list[Finding]:
    """Everything wrong with a definition; warnings among them."""
    return [
        *_names(definition),
        *_source(definition.source),
        *check_steps(definition),
        *_sinks(definition),
        *check_rows(definition),
        *_topics_apart(definition),
        *incomplete_references(definition),
    ]


def _names(definition: model.PipelineDefinition) -> Iterator[Finding]:
    if naming.NAME.fullmatch(definition.name) is None:
        yield Finding(("pipeline",), _bad_name(definition.name))
    if not definition.sinks:
        yield Finding(("sinks",), "there is no sink; add one, such as '- parquet: out/rows'")
    steps = [
        (step.name, ("steps", index, naming.kind_of_step(step), "name"))
        for index, step in enumerate(definition.steps)
    ]
    sinks = [
        (sink.name, ("sinks", index, naming.kind_of_sink(sink), "name"))
        for index, sink in enumerate(definition.sinks)
    ]
    for what, named in (("step", steps), ("sink", sinks)):
        seen: dict[str, int] = {}
        for index, (name, path) in enumerate(named):
            if naming.NAME.fullmatch(name) is None:
                yield Finding(path, _bad_name(name))
            elif name.lower() in seen:
                other = f"{what}s[{seen[name.lower()]}]"
                yield Finding(path, f"{other} is called {name!r} too; give this {what} a 'name' of its own")
            seen.setdefault(name.lower(), index)
    for name, path in sinks:
        if name == naming.DEAD_LETTER_NAME:
            yield Finding(path, f"{name!r} is the name of the dead letter sink; choose another")
    for name, path in steps:
        if name == "parse":
            yield Finding(path, "'parse' is the reason of records that cannot be parsed; choose another name")


def _bad_name(name: str) -> str:
    return (
        f"{name!r} cannot be a name: it is made of letters and digits, with single '.', '_' or '-' between them, "
        "100 characters at most"
    )


def _sinks(definition: model.PipelineDefinition) -> Iterator[Finding]:
    places: dict[tuple[str, ...], int] = {}
    for index, sink in enumerate(definition.sinks):
        path: Path = ("sinks", index, naming.kind_of_sink(sink))
        yield from _sink(sink, path)
        place = _place(definition, sink)
        if place in places:
            yield Finding(path, f"sinks[{places[place]}] writes to the same place; a sink's place is its own")
        places.setdefault(place, index)
    if definition.dead_letter is not None:
        yield from _dead_letter(
            definition.dead_letter, places.get(_place(definition, naming.dead_letter_sink(definition)))
        )
    yield from _spark(definition.spark)


def _dead_letter(dead: model.DeadLetter, taken: int | None) -> Iterator[Finding]:
    path: Path = ("dead_letter",)
    kinds = [name for name in ("topic", "parquet", "delta", "postgres") if getattr(dead, name)]
    if len(kinds) != 1:
        found = f"found {' and '.join(map(repr, kinds))}" if kinds else "found none of them"
        yield Finding(
            path, f"dead letters go to one place, 'topic', 'parquet', 'delta' or 'postgres'; {found}"
        )
        return
    table = naming.letter_table(dead)
    if table is None:
        yield from shared.check_topic(dead.topic, (*path, "topic"))
        yield from shared.check_settings(dead.settings, (*path, "settings"))
        return
    for name in ("bootstrap", "settings"):
        if getattr(dead, name):
            yield Finding((*path, name), f"it belongs to a topic, and dead letters go to {kinds[0]!r}")
    yield from _sink(table, (*path, kinds[0]))
    if taken is not None:
        yield Finding(
            (*path, kinds[0]), f"sinks[{taken}] writes to the same place; dead letters need their own"
        )


def _spark(settings: Mapping[str, str]) -> Iterator[Finding]:
    for name in settings:
        if not name.startswith("spark."):
            yield Finding(("spark", name), f"settings of Spark begin with 'spark.', as spark.{name}")
    for name, wanted in changed(settings):
        yield Finding(("spark", name), f"guarantees and results rest on {wanted}; leave it out")


def _sink(sink: model.SinkDefinition, path: Path) -> Iterator[Finding]:
    match sink:
        case model.ParquetSink() | model.DeltaSink():
            yield from shared.check_columns(sink.partition_by, (*path, "partition_by"))
            remote = re.match(r"(?!file:)[a-z][a-z0-9+.-]*://", sink.path)
            if isinstance(sink, model.ParquetSink) and remote:
                yield Finding(
                    (*path, "path"),
                    f"{remote[0]} cannot rename a directory in one step, which is how Parquet batches commit; "
                    "use a delta sink there",
                )
            if isinstance(sink, model.DeltaSink):
                yield from _merging(sink, path)
        case model.PostgresSink():
            yield from _merging(sink, path)
            yield from shared.check_password(sink.url, (*path, "url"))
        case model.KafkaSink():
            yield from shared.check_topic(sink.topic, (*path, "topic"))
            yield from shared.check_settings(sink.settings, (*path, "settings"))
            yield from shared.check_expressions({"key": sink.key, "value": sink.value}, path)
            yield from shared.check_expressions(dict(sink.headers), (*path, "headers"))
            for name in sink.headers:
                if name.startswith("hf-"):
                    message = "headers that start with 'hf-' are holdfast's own"
                    yield Finding((*path, "headers", name), message)


def _merging(sink: model.PostgresSink | model.DeltaSink, path: Path) -> Iterator[Finding]:
    """Of sinks that may merge rows by key."""
    if sink.mode != "append" and not sink.key:
        yield Finding(path, f"{sink.mode} needs 'key': the columns that make a row one of its own")
    if sink.mode == "scd2" and sink.order_by is None:
        yield Finding(path, "scd2 needs 'order_by': the column that says since when a version is valid")
    elif sink.mode == "scd2" and sink.order_by in sink.key:
        yield Finding((*path, "order_by"), "versions of one key differ in it; it cannot be part of the key")
    if sink.mode == "append" and sink.key:
        yield Finding((*path, "key"), "a key is for 'mode: upsert' or 'scd2'; append keeps every row")
    if sink.mode == "append" and sink.order_by is not None:
        yield Finding((*path, "order_by"), "append keeps every row; it needs 'mode: upsert' or 'scd2'")
    if sink.mode == "upsert" and sink.order_by is not None and sink.delete_when is not None:
        yield Finding(
            (*path, "order_by"),
            "a key that was deleted leaves nothing behind that an older row could be compared with, which is read "
            "later: use 'mode: scd2', which remembers deletions, and read the rows with is_current; or keep such rows, "
            "with a column that says so, and leave out 'delete_when'; or leave out 'order_by' where all rows of a key "
            "come through one partition",
        )
    if sink.mode == "append" and sink.delete_when is not None:
        yield Finding((*path, "delete_when"), "append deletes nothing; it needs 'mode: upsert' or 'scd2'")
    yield from shared.check_columns(sink.key, (*path, "key"))
    yield from shared.check_expressions({"delete_when": sink.delete_when}, path)


def _place(definition: model.PipelineDefinition, sink: model.SinkDefinition) -> tuple[str, ...]:
    match sink:
        case model.ParquetSink() | model.DeltaSink():
            return "path", naming.resolve_path(definition, sink.path)
        case model.PostgresSink():
            return "table", sink.url, sink.schema_name, sink.table
        case model.KafkaSink():
            return "topic", sink.bootstrap or "", sink.topic


@dataclass(frozen=True)
class _Topic:
    topic: str
    bootstrap: str | None
    path: Path


def _topics_apart(definition: model.PipelineDefinition) -> Iterator[Finding]:
    """What a pipeline writes must not be what it reads, nor dead letters stand among rows.

    A pattern leaves out what the pipeline itself writes, so it cannot do that.
    """
    source = definition.source
    written = [
        _Topic(sink.topic, sink.bootstrap, ("sinks", index, "kafka", "topic"))
        for index, sink in enumerate(definition.sinks)
        if isinstance(sink, model.KafkaSink)
    ]
    dead = naming.dead_letter_of(definition)
    if naming.letter_table(dead) is not None:
        dead = model.DeadLetter()
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


# ------------------------------------------------------------------------ what is read: topics, decodings, event time


def _source(source: model.Source) -> Iterator[Finding]:
    if source.topics and source.pattern:
        yield Finding(("source", "pattern"), "give 'topics' or 'pattern', not both")
    elif not source.topics and not source.pattern:
        yield Finding(("source",), "it reads nothing; give 'topics' or a 'pattern'")
    seen: set[str] = set()
    for index, topic in enumerate(source.topics):
        path: Path = ("source", "topics", index)
        if not is_reference(topic) and (naming.TOPIC.fullmatch(topic) is None or topic in (".", "..")):
            hint = "; for several topics by a regular expression use 'pattern'" if "*" in topic else ""
            yield Finding(path, f"{topic!r} cannot be a topic's name{hint}")
        elif topic in seen:
            yield Finding(path, f"{topic!r} is listed twice")
        seen.add(topic)
    if source.pattern and not is_reference(source.pattern):
        try:
            re.compile(source.pattern)
        except re.error as error:
            yield Finding(("source", "pattern"), f"this is no regular expression: {error}")
    yield from _starting(source.starting)
    yield from shared.check_settings(source.settings, ("source", "settings"))
    yield from _decoding(source.value, ("source", "value"))
    for topic, decoding in source.values.items():
        yield from _decoding(decoding, ("source", "values", topic))
    yield from _values(source)
    if source.event_time is not None:
        yield from _event_time(source.event_time, source)
    yield from _decoding(source.key, ("source", "key"))


def _starting(starting: str) -> Iterator[Finding]:
    if starting in ("earliest", "latest") or starting.startswith("checkpoint:") or is_reference(starting):
        return
    try:
        datetime.datetime.fromisoformat(starting)
    except ValueError:
        hint = nearest(starting, ("earliest", "latest"))
        yield Finding(
            ("source", "starting"),
            f"{starting!r} is neither earliest, latest, a time such as 2026-01-31T00:00:00Z nor checkpoint:DIRECTORY"
            f"{hint}",
        )


def _values(source: model.Source) -> Iterator[Finding]:
    for topic in source.values:
        path: Path = ("source", "values", topic)
        if source.pattern is not None:
            if not is_reference(source.pattern) and not _matches(source.pattern, topic):
                yield Finding(path, f"{topic!r} is not read: it does not match the pattern")
        elif topic not in source.topics and source.topics:
            message = f"{topic!r} is not read{nearest(topic, source.topics)}"
            yield Finding(path, message, rests_on=(("source", "topics"),))
    if source.values and source.value != model.Decoding() and all(topic for topic, _ in decodings_of(source)):
        message = "every topic has a decoding of its own below 'values'; leave this one out"
        yield Finding(("source", "value"), message, "warning")
    for owner, name, message in conflicts(source):
        where: Path = ("source", "value") if owner is None else ("source", "values", owner)
        yield Finding((*where, "fields", name), message)


def _matches(pattern: str, topic: str) -> bool:
    try:
        return re.fullmatch(pattern, topic) is not None
    except re.error:
        return True  # said already


def _event_time(event_time: model.EventTime, source: model.Source) -> Iterator[Finding]:
    path: Path = ("source", "event_time", "field")
    name = event_time.field
    if name == RECORD_TIME:
        return
    everywhere = [(topic, columns_of(decoding)) for topic, decoding in decodings_of(source)]
    known = {column: type_ for _, columns in everywhere for column, type_ in (columns or {}).items()}
    if name in known and known[name] != "timestamp":
        yield Finding(path, f"{name!r} is a {known[name]}; event time is a timestamp")
    if any(columns is None for _, columns in everywhere):
        return
    if name not in known:
        yield Finding(
            path,
            f"there is no field {name!r}{nearest(name, known)}; it is a field of the value, or {RECORD_TIME}, "
            "the time Kafka keeps",
            rests_on=FIELDS_REST_ON,
        )
        return
    for topic, columns in everywhere:
        if columns is not None and name not in columns:
            whose = "other topics" if topic is None else f"the topic {topic!r}"
            message = f"rows of {whose} have no {name!r}: to stateful steps they are all late"
            yield Finding(path, message, "warning", rests_on=FIELDS_REST_ON)


def _decoding(decoding: model.Decoding, path: Path) -> Iterator[Finding]:
    found = [*_decoding_keys(decoding, path), *_fields(decoding, path)]
    yield from found
    if not found and decoding.registry is None:
        yield from _compiled(decoding, path)


def _decoding_keys(decoding: model.Decoding, path: Path) -> Iterator[Finding]:
    format_ = decoding.format
    takes_schema = format_ in SCHEMA_FORMATS
    if format_ in ("json", "csv") and not decoding.fields:
        yield Finding(path, f"{format_} needs 'fields': the columns to parse, such as 'id: long'")
    if format_ in ("text", "bytes") and len(decoding.fields) > 1:
        yield Finding((*path, "fields"), f"{format_} becomes one column; name one field, or none for 'value'")
    if takes_schema and decoding.schema is None and decoding.registry is None:
        yield Finding(path, f"{format_} needs 'schema_file' (or 'schema'), or a 'registry'")
    if takes_schema and decoding.registry is not None and not decoding.fields and decoding.schema is None:
        yield Finding(
            path,
            "name the 'fields' that become columns (or give a 'schema_file'): the registry is asked by record, "
            "and columns must be known before",
        )
    url = "" if decoding.registry is None else decoding.registry.get("url", "")
    if (
        decoding.registry is not None
        and not is_reference(url)
        and not url.startswith(("http://", "https://"))
    ):
        yield Finding((*path, "registry"), "it needs a 'url' such as http://127.0.0.1:8081")
    if not takes_schema and (decoding.schema is not None or decoding.message is not None):
        yield Finding((*path, "schema"), f"{format_} takes no schema; list its 'fields'")
    if decoding.csv and format_ != "csv":
        yield Finding((*path, "csv"), f"the format is {format_}, not csv")
    for name, text in decoding.csv.items():
        if name in ("delimiter", "quote") and len(text) != 1:
            yield Finding((*path, "csv", name), f"{text!r} is not one character")


def _compiled(decoding: model.Decoding, path: Path) -> Iterator[Finding]:
    """What the format itself says about its schema and fields."""
    from holdfast.pipeline.formats import compile_decoder

    try:
        compile_decoder(decoding)
    except HoldfastError as error:
        yield Finding(path, str(error))


def _fields(decoding: model.Decoding, path: Path) -> Iterator[Finding]:
    from holdfast.pipeline.formats.types import parse_type

    seen: dict[str, str] = {}
    for field in decoding.fields:
        where: Path = (*path, "fields", field.name)
        if field.name.startswith("_"):
            yield Finding(where, "names that start with '_' are kept for holdfast's own columns")
        elif not field.name or "`" in field.name or not field.name.isprintable():
            yield Finding(where, f"{field.name!r} cannot be a column's name")
        elif field.name.lower() in seen:
            other = seen[field.name.lower()]
            yield Finding(where, f"{other!r} and {field.name!r} are one column to Spark, which ignores case")
        seen.setdefault(field.name.lower(), field.name)
        try:
            parse_type(field.type)
        except HoldfastError as error:
            yield Finding(where, str(error))
