"""Rules of what is read: topics, decodings, event time."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.columns import RECORD_TIME, columns_of, conflicts
from holdfast.pipeline.definition.errors import Finding, Path, nearest
from holdfast.pipeline.definition.model import Decoding, EventTime, Source
from holdfast.pipeline.definition.naming import TOPIC
from holdfast.pipeline.definition.rules_shared import check_settings
from holdfast.pipeline.definition.secrets import is_reference
from holdfast.pipeline.definition.streams import decodings_of

SCHEMA_FORMATS: Final = ("avro", "protobuf")
FIELDS_REST_ON: Final[tuple[Path, ...]] = (("source", "value"), ("source", "values"))


def check_source(source: Source) -> Iterator[Finding]:
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
    yield from check_settings(source.settings, ("source", "settings"))
    yield from _decoding(source.value, ("source", "value"))
    for topic, decoding in source.values.items():
        yield from _decoding(decoding, ("source", "values", topic))
    yield from _values(source)
    if source.event_time is not None:
        yield from _event_time(source.event_time, source)
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


def _values(source: Source) -> Iterator[Finding]:
    for topic in source.values:
        path: Path = ("source", "values", topic)
        if source.pattern is not None:
            if not is_reference(source.pattern) and not _matches(source.pattern, topic):
                yield Finding(path, f"{topic!r} is not read: it does not match the pattern")
        elif topic not in source.topics and source.topics:
            message = f"{topic!r} is not read{nearest(topic, source.topics)}"
            yield Finding(path, message, rests_on=(("source", "topics"),))
    if source.values and source.value != Decoding() and all(topic for topic, _ in decodings_of(source)):
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


def _event_time(event_time: EventTime, source: Source) -> Iterator[Finding]:
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
            message = f"rows of {whose} have no {name!r}: to steps with a memory they are all late"
            yield Finding(path, message, "warning", rests_on=FIELDS_REST_ON)


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
