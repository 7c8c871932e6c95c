"""What a pipeline promises, hop by hop: from the topic through each step to each sink, and the weakest of them.

A chain holds what its weakest hop holds. Each hop says what is promised, why it can be, and which setting would make
it stronger. What only a broker knows (how durable the topic itself is) is told when its answers are given. Nothing
here shows a secret: references stay references, and settings are shown by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.pipeline.definition.explaining_steps import explain_event_time, explain_step
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.hops import Hop, Strength, without_password
from holdfast.pipeline.definition.model import (
    Decoding,
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
    Source,
)
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, dead_letter_of, kind_of_sink
from holdfast.pipeline.definition.streams import decodings_of

__all__ = ["Explanation", "Hop", "Strength", "TopicFacts", "explain", "without_password"]


@dataclass(frozen=True)
class TopicFacts:
    """What a broker says about a source topic."""

    name: str
    partitions: int
    replicas: int
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    pipeline: str
    fingerprint: str
    before: tuple[Hop, ...]
    """Topics, the reading, the parsing and the steps: what every row goes through."""
    sinks: tuple[Hop, ...]

    @property
    def hops(self) -> tuple[Hop, ...]:
        return (*self.before, *self.sinks)

    @property
    def weakest(self) -> Hop:
        return min(self.hops, key=lambda hop: hop.strength)

    def as_json(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline,
            "fingerprint": self.fingerprint,
            "hops": [hop.as_json() for hop in self.before],
            "sinks": [hop.as_json() for hop in self.sinks],
            "weakest": self.weakest.as_json(),
        }


def explain(definition: PipelineDefinition, facts: Sequence[TopicFacts] = ()) -> Explanation:
    source = definition.source
    return Explanation(
        definition.name,
        fingerprint(definition),
        (
            *(_topic(topic) for topic in facts),
            _reading(source),
            *(
                _parsing("value" if topic is None else f"values.{topic}", decoding)
                for topic, decoding in decodings_of(source)
            ),
            *([_parsing("key", source.key)] if source.key != Decoding() else []),
            *([] if source.event_time is None else [explain_event_time(source.event_time)]),
            *(explain_step(step, definition) for step in definition.steps),
        ),
        (_dead_letter(definition), *(_sink(sink) for sink in definition.sinks)),
    )


def _topic(topic: TopicFacts) -> Hop:
    what = f"{topic.partitions} partitions, {topic.replicas} replicas"
    for strength, why, remedy in _weaknesses(topic):
        return Hop(f"topic {topic.name}", "topic", what, strength, why, remedy)
    flushed = "flushed to disk before it is acknowledged"
    kept = (
        flushed
        if topic.settings.get("holdfast.flush") == "group"
        else "on several brokers before acknowledged"
    )
    return Hop(
        f"topic {topic.name}", "topic", what, Strength.EXACTLY_ONCE, f"what is sent with acks=all is {kept}"
    )


def _weaknesses(topic: TopicFacts) -> Iterator[tuple[Strength, str, str]]:
    def alter(setting: str) -> str:
        return f"holdfast configs alter --topic {topic.name} --add-config {setting}"

    settings = topic.settings
    flush = settings.get("holdfast.flush")
    if flush == "os":
        yield (
            Strength.MAY_LOSE,
            "records are acknowledged before they are on disk (holdfast.flush=os): a power failure loses some",
            alter("holdfast.flush=group"),
        )
    if settings.get("unclean.leader.election.enable") == "true":
        yield (
            Strength.MAY_LOSE,
            "a replica that is behind may become leader, and what it lacks is gone",
            alter("unclean.leader.election.enable=false"),
        )
    if flush is None and topic.replicas < 2:
        yield (
            Strength.MAY_LOSE,
            "one broker has it, and acknowledges before it is on disk",
            "a replication factor of 3 and min.insync.replicas=2",
        )
    elif flush is None and settings.get("min.insync.replicas", "1") == "1":
        yield (
            Strength.MAY_LOSE,
            "a leader that is alone acknowledges alone (min.insync.replicas=1): losing it loses records",
            alter("min.insync.replicas=2"),
        )
    if "compact" in settings.get("cleanup.policy", ""):
        yield (
            Strength.SOME_LEFT_OUT,
            "compaction removes older values of a key, before they are read when the pipeline is behind",
            alter(f"min.compaction.lag.ms={24 * 3_600_000}"),
        )


def _reading(source: Source) -> Hop:
    topics = f"topics like {source.pattern}" if source.pattern else f"topic {', '.join(source.topics)}"
    what = f"{topics} at {source.bootstrap or 'the default broker'}{_settings(source.settings)}"
    if source.starting == "earliest":
        return Hop(
            "source",
            "source",
            what,
            Strength.EXACTLY_ONCE,
            "committed records by offset, topic id and leader epoch; a record that is gone stops the pipeline",
        )
    begins = "at the end" if source.starting == "latest" else f"at {source.starting}"
    return Hop(
        "source",
        "source",
        what,
        Strength.SOME_LEFT_OUT,
        f"it begins {begins}: earlier records are not read; partitions found later are, from their start",
        "source.starting: earliest",
    )


def _settings(settings: Mapping[str, str]) -> str:
    """By name alone: a value may be a secret."""
    return f" with {', '.join(sorted(settings))}" if settings else ""


def _parsing(part: str, decoding: Decoding) -> Hop:
    columns = ", ".join(
        f"{column.name} {column.type}{'' if column.required else '?'}" for column in decoding.fields
    )
    schema = "by the registry's schema" if decoding.registry else "by its schema" if decoding.schema else ""
    what = " ".join(part for part in (decoding.format, f"({columns})" if columns else "", schema) if part)
    name = f"parse {part}"
    if decoding.format in ("text", "bytes"):
        return Hop(name, "parse", what, Strength.EXACTLY_ONCE, "the bytes are kept as they are")
    if decoding.unknown == "ignore" and decoding.format != "csv":
        return Hop(
            name,
            "parse",
            what,
            Strength.FIELDS_LEFT_OUT,
            "what cannot be parsed is a dead letter; fields that are not listed are left out (unknown: ignore)",
            f"source.{part}.unknown: keep (or reject)",
        )
    return Hop(
        name, "parse", what, Strength.EXACTLY_ONCE, "strict: what cannot be parsed whole is a dead letter"
    )


def _dead_letter(definition: PipelineDefinition) -> Hop:
    dead = dead_letter_of(definition)
    where = f" at {dead.bootstrap}" if dead.bootstrap else ""
    return Hop(
        DEAD_LETTER_NAME,
        "kafka",
        f"topic {dead.topic}{where}{_settings(dead.settings)}",
        Strength.EXACTLY_ONCE,
        "committed first, in one transaction with its ledger; seen once by readers with read_committed",
    )


def _sink(sink: SinkDefinition) -> Hop:
    hop = _place(sink)
    return replace(hop, what=f"rows {sink.rows}: {hop.what}") if sink.rows else hop


def _place(sink: SinkDefinition) -> Hop:
    kind = kind_of_sink(sink)
    match sink:
        case ParquetSink():
            why = "a batch is a directory, flushed and renamed into place with its ledger entry: all of it, or none"
            return Hop(sink.name, kind, sink.path, Strength.EXACTLY_ONCE, why)
        case DeltaSink():
            why = "one commit of the table holds the batch's files and its positions"
            return Hop(sink.name, kind, without_password(sink.path), Strength.EXACTLY_ONCE, why)
        case PostgresSink():
            rows = f"the last row of each {', '.join(sink.key)}" if sink.mode == "upsert" else "every row"
            what = f"{rows} in {sink.schema_name}.{sink.table} of {without_password(sink.url)}"
            why = "rows and ledger change in one transaction; as durable as the server's fsync"
            return Hop(sink.name, kind, what, Strength.EXACTLY_ONCE, why)
        case KafkaSink():
            return _kafka(sink)


def _kafka(sink: KafkaSink) -> Hop:
    where = f" at {sink.bootstrap}" if sink.bootstrap else ""
    what = f"topic {sink.topic}{where}{_settings(sink.settings)}"
    if sink.writers == 1:
        why = "rows and ledger in one transaction; seen once by readers with read_committed"
        return Hop(sink.name, "kafka", what, Strength.EXACTLY_ONCE, why)
    return Hop(
        sink.name,
        "kafka",
        f"{what}, {sink.writers} writers",
        Strength.CONDITIONAL,
        f"each of {sink.writers} writers has a transaction of its own: readers may see part of a batch before the rest",
        f"writers: 1, in the sink {sink.name}",
    )
