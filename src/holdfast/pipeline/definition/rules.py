"""Rules of a definition that need neither Spark nor a broker.

They see the definition, not its text, so YAML and Python keep the same ones; a finding's path is in the words of YAML.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.errors import Finding, Path, nearest
from holdfast.pipeline.definition.functions import functions_of
from holdfast.pipeline.definition.model import (
    Decoding,
    DeltaSink,
    Expect,
    Filter,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Python,
    SinkDefinition,
    Source,
    Sql,
    Step,
)
from holdfast.pipeline.definition.naming import (
    DEAD_LETTER_NAME,
    NAME,
    TOPIC,
    dead_letter_of,
    kind_of_sink,
    kind_of_step,
    resolve_path,
)
from holdfast.pipeline.definition.secrets import SECRET_NAME, check_references, is_reference
from holdfast.pipeline.definition.sql_words import problems_of_expression, problems_of_query

OURS: Final = {
    "bootstrap.servers": "it has a key of its own, 'bootstrap'",
    "group.id": "a pipeline joins no group; its positions are in the sinks' ledgers",
    "enable.auto.commit": "a pipeline's positions are in the sinks' ledgers",
    "auto.offset.reset": "the key 'starting' says where it begins; later on a lost position is an error",
    "isolation.level": "a pipeline reads committed records only",
    "transactional.id": "it is made of the pipeline's and the sink's names, which is what fences a second copy",
    "enable.idempotence": "it is always on",
    "acks": "it is always 'all'",
}
"""Client settings that the guarantees rest on."""
SCHEMA_FORMATS: Final = ("avro", "protobuf")


def check_rules(definition: PipelineDefinition) -> list[Finding]:
    """Everything wrong with a definition; warnings among them."""
    return [
        *_names(definition),
        *_source(definition.source),
        *_steps(definition),
        *_sinks(definition),
        *_topics_apart(definition),
        *_references(definition),
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


def _source(source: Source) -> Iterator[Finding]:
    if source.topics and source.pattern:
        yield Finding(("source", "pattern"), "give 'topics' or 'pattern', not both")
    elif not source.topics and not source.pattern:
        yield Finding(("source",), "it reads nothing; give 'topics' or a 'pattern'")
    seen: set[str] = set()
    for index, topic in enumerate(source.topics):
        path: Path = ("source", "topics", index)
        if not is_reference(topic) and (TOPIC.fullmatch(topic) is None or topic in (".", "..")):
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
    yield from _settings(source.settings, ("source", "settings"))
    yield from _decoding(source.value, ("source", "value"))
    yield from _decoding(source.key, ("source", "key"))


def _starting(starting: str) -> Iterator[Finding]:
    if starting in ("earliest", "latest") or is_reference(starting):
        return
    try:
        datetime.datetime.fromisoformat(starting)
    except ValueError:
        hint = nearest(starting, ("earliest", "latest"))
        yield Finding(
            ("source", "starting"),
            f"{starting!r} is neither earliest, latest nor a time such as 2026-01-31T00:00:00Z{hint}",
        )


def _settings(settings: Mapping[str, str], path: Path) -> Iterator[Finding]:
    for name, value in settings.items():
        if name in OURS:
            yield Finding((*path, name), f"{name} cannot be set: {OURS[name]}")
        elif SECRET_NAME.match(name) and not is_reference(value):
            yield Finding(
                (*path, name),
                f"{name} is written in the definition for everybody to read; use ${{VARIABLE}} or file:/path",
                "warning",
            )


def _decoding(decoding: Decoding, path: Path) -> Iterator[Finding]:
    found = [*_decoding_keys(decoding, path), *_fields(decoding, path)]
    yield from found
    if not found and decoding.registry is None:
        yield from _compiled(decoding, path)


def _decoding_keys(decoding: Decoding, path: Path) -> Iterator[Finding]:
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


def _compiled(decoding: Decoding, path: Path) -> Iterator[Finding]:
    """What the format itself says about its schema and fields."""
    from holdfast.pipeline.formats import compile_decoder

    try:
        compile_decoder(decoding)
    except HoldfastError as error:
        yield Finding(path, str(error))


def _fields(decoding: Decoding, path: Path) -> Iterator[Finding]:
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


def _steps(definition: PipelineDefinition) -> Iterator[Finding]:
    expanding = [
        (index, step)
        for index, step in enumerate(definition.steps)
        if isinstance(step, Sql | Python) and step.expand
    ]
    for index, surplus in expanding[1:]:
        where: Path = ("steps", index, kind_of_step(surplus), "expand")
        first = expanding[0][1].name
        yield Finding(where, f"{first!r} expands already, and one step of a pipeline may; join the two")
    for index, step in enumerate(definition.steps):
        path: Path = ("steps", index, kind_of_step(step))
        for inner, message in _step(step, definition.directory):
            yield Finding((*path, inner), message)


def _step(step: Step, directory: str) -> Iterator[tuple[str, str]]:
    match step:
        case Expect():
            yield from (("that", problem) for problem in problems_of_expression(step.that))
        case Filter():
            yield from (("where", problem) for problem in problems_of_expression(step.where))
        case Sql():
            yield from (("query", problem) for problem in problems_of_query(step.query))
        case Python():
            yield from _python(step, directory)


def _python(step: Python, directory: str) -> Iterator[tuple[str, str]]:
    if not isinstance(step.function, str):
        if step.file is not None:
            yield "file", "the function itself is given; leave 'file' out"
        return
    if step.file is None:
        module, _, name = step.function.replace(":", ".").rpartition(".")
        try:
            known = bool(module) and importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            known = False
        if not known:
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
        yield from _topic(definition.dead_letter.topic, ("dead_letter", "topic"))
        yield from _settings(definition.dead_letter.settings, ("dead_letter", "settings"))
    yield from _spark(definition.spark)


def _spark(settings: Mapping[str, str]) -> Iterator[Finding]:
    from holdfast.pipeline.session import FIXED

    for name, value in settings.items():
        if not name.startswith("spark."):
            yield Finding(("spark", name), f"settings of Spark begin with 'spark.', as spark.{name}")
        elif name in FIXED and value.lower() != FIXED[name].lower():
            yield Finding(("spark", name), f"exactly-once output rests on {FIXED[name]!r}; leave it out")


def _sink(sink: SinkDefinition, path: Path) -> Iterator[Finding]:
    match sink:
        case ParquetSink() | DeltaSink():
            yield from _columns(sink.partition_by, (*path, "partition_by"))
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
            if sink.mode == "append" and sink.delete_when is not None:
                yield Finding((*path, "delete_when"), "append deletes nothing; it needs 'mode: upsert'")
            yield from _columns(sink.key, (*path, "key"))
            yield from _expressions({"delete_when": sink.delete_when}, path)
            if re.search(r"://[^/@]*:(?!\$\{)[^/@$]+@", sink.url):
                yield Finding(
                    (*path, "url"),
                    "the password is written in the definition for everybody to read; use ${VARIABLE}",
                    "warning",
                )
        case KafkaSink():
            yield from _topic(sink.topic, (*path, "topic"))
            yield from _settings(sink.settings, (*path, "settings"))
            yield from _expressions({"key": sink.key, "value": sink.value}, path)
            yield from _expressions(dict(sink.headers), (*path, "headers"))
            for name in sink.headers:
                if name.startswith("hf-"):
                    message = "headers that start with 'hf-' are holdfast's own"
                    yield Finding((*path, "headers", name), message)


def _columns(columns: Sequence[str], path: Path) -> Iterator[Finding]:
    for index, column in enumerate(columns):
        if column.startswith("_"):
            yield Finding((*path, index), f"{column!r} is a column of holdfast's own; choose another")
        elif column.lower() in {other.lower() for other in columns[:index]}:
            yield Finding((*path, index), f"{column!r} is listed twice")


def _expressions(texts: Mapping[str, str | None], path: Path) -> Iterator[Finding]:
    for name, text in texts.items():
        for problem in problems_of_expression(text or ""):
            yield Finding((*path, name), problem)


def _topic(topic: str, path: Path) -> Iterator[Finding]:
    if not is_reference(topic) and TOPIC.fullmatch(topic) is None:
        yield Finding(path, f"{topic!r} cannot be a topic's name")


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


def _references(definition: PipelineDefinition) -> Iterator[Finding]:
    """References must be whole; whether they lead anywhere shows when a run begins."""
    for path, text in _referring(definition):
        wrong = check_references(text)
        if wrong is not None:
            yield Finding(path, wrong)


def _referring(definition: PipelineDefinition) -> Iterator[tuple[Path, str]]:
    source = definition.source
    for index, topic in enumerate(source.topics):
        yield ("source", "topics", index), topic
    yield ("source", "bootstrap"), source.bootstrap or ""
    yield ("home",), definition.home
    yield from ((("source", "settings", name), text) for name, text in source.settings.items())
    for part, decoding in (("value", source.value), ("key", source.key)):
        for name, text in (decoding.registry or {}).items():
            yield ("source", part, "registry", name), text
    for index, sink in enumerate(definition.sinks):
        path: Path = ("sinks", index, kind_of_sink(sink))
        match sink:
            case ParquetSink() | DeltaSink():
                yield (*path, "path"), sink.path
            case PostgresSink():
                yield (*path, "url"), sink.url
                yield (*path, "table"), sink.table
            case KafkaSink():
                yield (*path, "topic"), sink.topic
                yield (*path, "bootstrap"), sink.bootstrap or ""
                yield from (((*path, "settings", name), text) for name, text in sink.settings.items())
    if definition.dead_letter:
        yield ("dead_letter", "topic"), definition.dead_letter.topic
        for name, text in definition.dead_letter.settings.items():
            yield ("dead_letter", "settings", name), text
