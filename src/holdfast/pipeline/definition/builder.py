"""A pipeline in Python, in the words of YAML:

    from holdfast.pipeline import Pipeline

    orders = (
        Pipeline("orders")
        .read("orders", value={"format": "json", "fields": {"id": "long", "amount": "double", "note": "string?"}})
        .expect("amount > 0", name="positive")
        .sql("SELECT *, amount * 1.19 AS gross FROM input")
        .python(enrich, schema="id long, gross double")
        .write("parquet", path="out/orders")
    )

Each call returns a new pipeline and changes nothing, so a common beginning can be shared. What is given goes through
the table that YAML goes through: the same names, the same defaults, the same errors, and the same fingerprint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from holdfast.pipeline.definition.model import (
    DeadLetter,
    Decoding,
    EventTime,
    Missing,
    OnBreak,
    PipelineDefinition,
    PythonMode,
    SinkDefinition,
)
from holdfast.pipeline.definition.naming import kind_of_sink

DecodingWords = str | Mapping[str, Any] | Decoding
"""A format's name, the words of YAML, or the value itself."""


class PipelineBuilder:
    def __init__(
        self,
        name: str,
        *,
        trigger: str | None = None,
        home: str | None = None,
        monitoring_group: str | None = None,
        digest_key: str | None = None,
        spark: Mapping[str, str] | None = None,
    ) -> None:
        self._document: dict[str, Any] = {
            "pipeline": name,
            "source": None,
            "steps": [],
            "sinks": [],
            "trigger": trigger,
            "home": home,
            "monitoring_group": monitoring_group,
            "digest_key": digest_key,
            "spark": spark,
        }

    def __repr__(self) -> str:
        steps, sinks = self._document["steps"], self._document["sinks"]
        return f"<Pipeline {self._document['pipeline']!r}: {len(steps)} steps, {len(sinks)} sinks>"

    def read(
        self,
        *topics: str,
        pattern: str | None = None,
        bootstrap: str | None = None,
        settings: Mapping[str, str] | None = None,
        value: DecodingWords | None = None,
        key: DecodingWords | None = None,
        values: Mapping[str, DecodingWords] | None = None,
        event_time: str | Mapping[str, str] | EventTime | None = None,
        starting: str | None = None,
        batch_records: int | None = None,
        batch_bytes: int | str | None = None,
    ) -> Self:
        """What is read; once."""
        source = {name: given for name, given in locals().items() if name != "self"}
        source |= {"topics": topics or None, "value": _words(value), "key": _words(key)}
        if values is not None:
            source["values"] = {topic: _words(decoding) for topic, decoding in values.items()}
        if isinstance(event_time, EventTime):
            source["event_time"] = _given(event_time)
        return self._with(source=source)

    def expect(self, that: str, *, name: str | None = None, otherwise: OnBreak | None = None) -> Self:
        """A rule; `otherwise` says what becomes of a row that breaks it (warn, drop, quarantine, fail)."""
        return self._step("expect", {"that": that, "name": name, "else": otherwise})

    def filter(self, where: str, *, name: str | None = None) -> Self:
        """Rows for which this is true stay; the others are counted as filtered."""
        return self._step("filter", locals())

    def sql(self, query: str, *, name: str | None = None, expand: bool | None = None) -> Self:
        """A query over `input`; it selects `_hf`."""
        return self._step("sql", locals())

    def python(
        self,
        function: Callable[..., Any] | str,
        *,
        name: str | None = None,
        file: str | None = None,
        schema: str | Mapping[str, str] | None = None,
        mode: PythonMode | None = None,
        expand: bool | None = None,
    ) -> Self:
        """A function over batches of rows, or over a Spark DataFrame."""
        return self._step("python", locals())

    def dedupe(
        self,
        *key: str,
        by: Literal["key", "hf-id"] | None = None,
        within: str | None = None,
        unordered: bool | None = None,
        name: str | None = None,
    ) -> Self:
        """The first row of a key goes on; those that come after it within a time leave."""
        return self._step("dedupe", {**locals(), "key": key or None})

    def lookup(
        self,
        table: str,
        *,
        on: str | Sequence[str] | Mapping[str, str],
        columns: str | Sequence[str],
        query: str | None = None,
        missing: Missing | None = None,
        refresh: str | None = None,
        name: str | None = None,
    ) -> Self:
        """Columns of a reference table."""
        return self._step("lookup", locals())

    def window(
        self,
        aggregates: Mapping[str, str],
        *,
        size: str | None = None,
        every: str | None = None,
        gap: str | None = None,
        kind: Literal["tumbling", "sliding", "session"] | None = None,
        key: str | Sequence[str] | None = None,
        emit: Literal["closed", "changes"] | None = None,
        late: Literal["route", "correct"] | None = None,
        correct_within: str | None = None,
        name: str | None = None,
    ) -> Self:
        """Aggregates by key and windows of event time; `write(…, rows=name)` takes them."""
        return self._step("window", locals())

    def keyed(
        self,
        function: Callable[..., Any] | str,
        *,
        key: str | Sequence[str],
        schema: str | Mapping[str, str],
        state: str | Mapping[str, str],
        file: str | None = None,
        ttl: str | None = None,
        timers: Literal["event", "processing"] | None = None,
        unordered: bool | None = None,
        name: str | None = None,
    ) -> Self:
        """A function with a state for each key; `write(…, rows=name)` takes its rows."""
        return self._step("keyed", locals())

    def join(
        self,
        left: str,
        right: str,
        *,
        on: str | Sequence[str] | Mapping[str, str],
        select: Sequence[str] | Mapping[str, str],
        within: str | None = None,
        kind: Literal["inner", "left"] | None = None,
        name: str | None = None,
    ) -> Self:
        """Pairs of rows that happened near each other; `write(…, rows=name)` takes them."""
        return self._step("join", locals())

    def write(self, sink: SinkDefinition | str, **settings: Any) -> Self:
        """Another sink: `write("parquet", path="out")`, or `write(ParquetSink("out"))`; `rows` says whose."""
        if isinstance(sink, str):
            entry: dict[str, Any] = {sink: settings}
        else:
            entry = {kind_of_sink(sink): {**_given(sink), **settings}}
        return self._with(sinks=[*self._document["sinks"], entry])

    def dead_letter(self, topic: str | DeadLetter | None = None, **settings: Any) -> Self:
        """Where records go that cannot be parsed or break a rule: a topic, or `parquet=`, `delta=` or `postgres=`."""
        given = _given(topic) if isinstance(topic, DeadLetter) else {"topic": topic}
        words = {
            name: {key: each for key, each in _given(value).items() if key != "name"}
            if isinstance(value, SinkDefinition)
            else value
            for name, value in {**given, **settings}.items()
            if value is not None
        }
        return self._with(dead_letter=words)

    def definition(self, *, directory: str = ".") -> PipelineDefinition:
        """The pipeline as plain values; `DefinitionError` says everything that is wrong with it."""
        from holdfast.pipeline.definition.loading import from_document

        return from_document(self._document, directory=directory).definition

    def _step(self, kind: str, arguments: Mapping[str, Any]) -> Self:
        """The methods of steps have a parameter for each key, and give them all; None is as good as absent."""
        settings = {name: value for name, value in arguments.items() if name != "self"}
        return self._with(steps=[*self._document["steps"], {kind: settings}])

    def _with(self, **changes: Any) -> Self:
        other = type(self)(self._document["pipeline"])
        other._document = {**self._document, **changes}
        return other


def _words(decoding: DecodingWords | None) -> str | Mapping[str, Any] | None:
    if not isinstance(decoding, Decoding):
        return decoding
    words = _given(decoding)
    if decoding.fields:
        words["fields"] = {
            field.name: field.type + ("" if field.required else "?") for field in decoding.fields
        }
    return {"format": decoding.format, **words}


def _given(value: Any) -> dict[str, Any]:
    """What differs from the defaults, in the words of YAML."""
    words: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if field.default_factory is not dataclasses.MISSING:
            default: Any = field.default_factory()
        else:
            default = field.default
        if content != default:
            words[field.name] = (
                list(content) if isinstance(content, Sequence) and not isinstance(content, str) else content
            )
    return words
