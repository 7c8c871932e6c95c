"""What a pipeline promises, hop by hop: from the topic through each step to each sink, and the weakest of them.

A chain holds what its weakest hop holds. Each hop says what is promised, why it can be, and which setting would make
it stronger. What only a broker knows (how durable the topic itself is) is told when its answers are given. Nothing
here shows a secret: references stay references, and settings are shown by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

from holdfast.pipeline.definition import model
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.functions import name_of
from holdfast.pipeline.definition.naming import (
    DEAD_LETTER_NAME,
    dead_letter_of,
    dead_letter_sink,
    kind_of_sink,
    kind_of_step,
    letter_table,
)
from holdfast.pipeline.definition.streams import LATE, Stream, decodings_of, merged, takers


class Strength(IntEnum):
    """What a hop promises; a smaller one is weaker."""

    MAY_LOSE = 0
    SOME_LEFT_OUT = 1
    CONDITIONAL = 2
    FIELDS_LEFT_OUT = 3
    EXACTLY_ONCE = 4

    @property
    def words(self) -> str:
        return WORDS[self]


WORDS: Final = {
    Strength.MAY_LOSE: "may lose acknowledged records",
    Strength.SOME_LEFT_OUT: "exactly once, some records left out",
    Strength.CONDITIONAL: "exactly once, on a condition",
    Strength.FIELDS_LEFT_OUT: "exactly once, some fields left out",
    Strength.EXACTLY_ONCE: "exactly once",
}


@dataclass(frozen=True)
class Hop:
    name: str
    kind: str
    what: str
    why: str
    strength: Strength = Strength.EXACTLY_ONCE
    remedy: str | None = None
    """The setting that would make it stronger; nothing when there is none."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "what": self.what,
            "guarantee": self.strength.words,
            "strength": int(self.strength),
            "why": self.why,
            "raise": self.remedy,
        }


def without_password(address: str) -> str:
    """An address without the password in it; a reference stays, since it shows nothing."""
    hidden = re.sub(r"(://[^/@:]*):(?!\$\{)[^/@]*@", r"\1:***@", address)
    return re.sub(r"(?i)(password|secret|token)=(?!\$\{)[^&\s]+", r"\1=***", hidden)


def short(sql: str, most: int = 100) -> str:
    line = " ".join(sql.split())
    return line if len(line) <= most else line[: most - 1] + "…"


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


def explain(definition: model.PipelineDefinition, facts: Sequence[TopicFacts] = ()) -> Explanation:
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
            *([_parsing("key", source.key)] if source.key != model.Decoding() else []),
            *([] if source.event_time is None else [_event_time(source.event_time)]),
            *(_step(step, definition) for step in definition.steps),
        ),
        (_dead_letter(definition), *(_sink(sink) for sink in definition.sinks)),
    )


def _topic(topic: TopicFacts) -> Hop:
    what = f"{topic.partitions} partitions, {topic.replicas} replicas"
    for strength, why, remedy in _weaknesses(topic):
        return Hop(f"topic {topic.name}", "topic", what, why, strength, remedy)
    flushed = "flushed to disk before it is acknowledged"
    kept = (
        flushed
        if topic.settings.get("holdfast.flush") == "group"
        else "on several brokers before acknowledged"
    )
    return Hop(f"topic {topic.name}", "topic", what, f"what is sent with acks=all is {kept}")


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


def _reading(source: model.Source) -> Hop:
    topics = f"topics like {source.pattern}" if source.pattern else f"topic {', '.join(source.topics)}"
    what = f"{topics} at {source.bootstrap or 'the default broker'}{_settings(source.settings)}"
    if source.starting == "earliest":
        return Hop(
            "source",
            "source",
            what,
            "committed records by offset, topic id and leader epoch; a record that is gone stops the pipeline",
        )
    begins = "at the end" if source.starting == "latest" else f"at {source.starting}"
    return Hop(
        "source",
        "source",
        what,
        f"it begins {begins}: earlier records are not read; partitions found later are, from their start",
        Strength.SOME_LEFT_OUT,
        "source.starting: earliest",
    )


def _settings(settings: Mapping[str, str]) -> str:
    """By name alone: a value may be a secret."""
    return f" with {', '.join(sorted(settings))}" if settings else ""


def _parsing(part: str, decoding: model.Decoding) -> Hop:
    columns = ", ".join(
        f"{column.name} {column.type}{'' if column.required else '?'}" for column in decoding.fields
    )
    schema = "by the registry's schema" if decoding.registry else "by its schema" if decoding.schema else ""
    what = " ".join(part for part in (decoding.format, f"({columns})" if columns else "", schema) if part)
    name = f"parse {part}"
    if decoding.format in ("text", "bytes"):
        return Hop(name, "parse", what, "the bytes are kept as they are")
    if decoding.unknown == "ignore" and decoding.format != "csv":
        return Hop(
            name,
            "parse",
            what,
            "what cannot be parsed is a dead letter; fields that are not listed are left out (unknown: ignore)",
            Strength.FIELDS_LEFT_OUT,
            f"source.{part}.unknown: keep (or reject)",
        )
    return Hop(name, "parse", what, "strict: what cannot be parsed whole is a dead letter")


def _dead_letter(definition: model.PipelineDefinition) -> Hop:
    dead = dead_letter_of(definition)
    if letter_table(dead) is not None:
        hop = _place(dead_letter_sink(definition))
        return replace(hop, why=f"committed first; {hop.why}")
    where = f" at {dead.bootstrap}" if dead.bootstrap else ""
    return Hop(
        DEAD_LETTER_NAME,
        "kafka",
        f"topic {dead.topic}{where}{_settings(dead.settings)}",
        "committed first, in one transaction with its ledger; seen once by readers with read_committed",
    )


def _sink(sink: model.SinkDefinition) -> Hop:
    hop = _place(sink)
    return replace(hop, what=f"rows {sink.rows}: {hop.what}") if sink.rows else hop


def _place(sink: model.SinkDefinition) -> Hop:
    kind = kind_of_sink(sink)
    match sink:
        case model.ParquetSink():
            why = "a batch is a directory, flushed and renamed into place with its ledger entry: all of it, or none"
            return Hop(sink.name, kind, sink.path, why)
        case model.DeltaSink():
            why = "one commit of the table holds the batch's files and its positions"
            place = without_password(sink.path)
            return Hop(sink.name, kind, f"{_kept(sink)} in {place}" if merged(sink) else place, why)
        case model.PostgresSink():
            what = f"{_kept(sink)} in {sink.schema_name}.{sink.table} of {without_password(sink.url)}"
            why = "rows and ledger change in one transaction; as durable as the server's fsync"
            return Hop(sink.name, kind, what, why)
        case model.KafkaSink():
            return _kafka(sink)


def _kept(sink: model.PostgresSink | model.DeltaSink) -> str:
    kept = {"upsert": "the last row of each", "scd2": "every version of each"}.get(sink.mode)
    return f"{kept} {', '.join(sink.key)}" if kept else "every row"


def _kafka(sink: model.KafkaSink) -> Hop:
    where = f" at {sink.bootstrap}" if sink.bootstrap else ""
    what = f"topic {sink.topic}{where}{_settings(sink.settings)}"
    if sink.writers == 1:
        why = "rows and ledger in one transaction; seen once by readers with read_committed"
        return Hop(sink.name, "kafka", what, why)
    return Hop(
        sink.name,
        "kafka",
        f"{what}, {sink.writers} writers",
        f"each of {sink.writers} writers has a transaction of its own: readers may see part of a batch before the rest",
        Strength.CONDITIONAL,
        f"writers: 1, in the sink {sink.name}",
    )


# ------------------------------------------------------------------------ what each step promises

BROKEN: Final = {
    "warn": "kept, and counted in the log",
    "drop": "dropped: counted in the ledger, kept nowhere",
    "quarantine": "a dead letter, with the rule's name",
    "fail": "what stops the pipeline, before anything of its batch is committed",
}
MISSING: Final = {
    "null": "gets nulls",
    "filter": "leaves, counted under this name",
    "quarantine": "is a dead letter, with this name",
    "fail": "stops the pipeline, before anything of its batch is committed",
}
UNTAKEN: Final = "rows that are late are counted in the ledgers and kept nowhere"


def _step(step: model.Step, definition: model.PipelineDefinition) -> Hop:
    kind = kind_of_step(step)
    match step:
        case model.Expect():
            dropping = step.otherwise == "drop"
            return Hop(
                step.name,
                kind,
                f"{short(step.that)}, else {step.otherwise}",
                f"a row that breaks it is {BROKEN[step.otherwise]}",
                Strength.SOME_LEFT_OUT if dropping else Strength.EXACTLY_ONCE,
                f"else: quarantine, in the rule {step.name}" if dropping else None,
            )
        case model.Filter():
            why = "rows that leave are counted under this name in every ledger"
            return Hop(step.name, kind, short(step.where), why)
        case model.Sql():
            why = (
                "the same rows give the same result; every row carries its place, and none vanishes uncounted"
            )
            return Hop(step.name, kind, short(step.query), why)
        case model.Python():
            function = step.function if isinstance(step.function, str) else name_of(step.function)
            what = f"{function} of {step.file}" if step.file else function
            if step.mode == "spark":
                why = (
                    "Spark's plan of the function is checked to take each row by itself, without time or chance; what "
                    "a udf in it does is not seen"
                )
                return Hop(step.name, kind, f"{what}, {step.mode}", why)
            return Hop(
                step.name,
                kind,
                f"{what}, {step.mode}",
                "if the function gives the same for the same rows: a crash between two sinks runs it again",
                Strength.CONDITIONAL,
                "no setting; keep time, chance and other services out of the function (_batch_time is fixed)",
            )
        case model.Dedupe():
            what = "hf-id" if step.by == "hf-id" else ", ".join(step.key)
            return _with_late(
                step,
                definition,
                f"the first row of each {what} within {step.within}",
                f"a copy leaves, counted as a duplicate; one that comes more than {step.within} after the first is "
                "a first one again",
            )
        case model.Lookup():
            why = (
                "every sink gets the rows of one version of the table, which the plan of the batch and the ledgers "
                f"name; a row it has nothing for {MISSING[step.missing]}"
            )
            what = f"{', '.join(step.columns)} of {without_password(step.table)}, at most {step.refresh} old"
            return Hop(step.name, kind, what, why)
        case model.Window():
            return _window(step, definition)
        case model.Join():
            pairs = ", ".join(
                left if left == right else f"{left} = {right}" for left, right in step.on.items()
            )
            alone = ", left rows without one too" if step.kind == "left" else ""
            return _with_late(
                step,
                definition,
                f"{short(step.left, 40)} with {short(step.right, 40)} on {pairs}, {step.within} apart{alone}",
                f"each pair once; a row is remembered until nothing within {step.within} of it can come",
            )
        case model.Keyed():
            late = _with_late(step, definition, "", "")
            function = step.function if isinstance(step.function, str) else name_of(step.function)
            what = f"{function} of {step.file}" if step.file else function
            why = (
                "rows and state are one version: if the function gives the same for the same rows and state. "
                f"A key that nothing comes for is forgotten after {step.ttl}, counted"
            )
            weaker = late.strength < Strength.CONDITIONAL
            return Hop(
                step.name,
                kind,
                f"{what} by {', '.join(step.key)}, {step.timers} timers",
                f"{why}; {UNTAKEN}" if weaker else why,
                late.strength if weaker else Strength.CONDITIONAL,
                late.remedy
                if weaker
                else "no setting; keep time, chance and other services out of the function",
            )


def _event_time(event_time: model.EventTime) -> Hop:
    what = f"{event_time.field}, {event_time.delay} late at most"
    if event_time.idle is None:
        return Hop(
            "event time",
            "event time",
            what,
            "which rows are late follows from the log alone, however it is cut into batches; "
            "a partition that nothing comes to holds windows open",
        )
    return Hop(
        "event time",
        "event time",
        f"{what}, idle partitions left out after {event_time.idle}",
        f"rows of a partition that was quiet for {event_time.idle} may be late because others went on: that depends "
        "on when they were read, and is fixed with the batch",
        Strength.CONDITIONAL,
        "leave source.event_time.idle out, if every partition gets records",
    )


def _window(step: model.Window, definition: model.PipelineDefinition) -> Hop:
    match step.kind:
        case "tumbling":
            windows = f"windows of {step.size}"
        case "sliding":
            windows = f"windows of {step.size} every {step.every}"
        case "session":
            windows = f"sessions that end after {step.gap}"
    key = f" by {', '.join(step.key)}" if step.key else ""
    emitted = (
        "one row for each window, when it is over"
        if step.emit == "closed"
        else "a row each time a window changes; the last one counts"
    )
    bound = "windows that are over are forgotten"
    if step.late == "correct":
        emitted += "; late rows correct it"
        bound = f"windows are forgotten {step.correct_within} after their end"
    what = f"{', '.join(step.aggregates)}{key} in {windows}"
    return _with_late(step, definition, what, f"{emitted}; every row counts in it once; {bound}")


def _with_late(step: model.Step, definition: model.PipelineDefinition, what: str, why: str) -> Hop:
    """Late rows that nobody takes are left out; with a sink for them none is."""
    kind = kind_of_step(step)
    if takers(definition, Stream(step.name, LATE)):
        return Hop(step.name, kind, what, f"{why}; late rows have a sink")
    return Hop(
        step.name,
        kind,
        what,
        f"{why}; {UNTAKEN}",
        Strength.SOME_LEFT_OUT,
        f"a sink with rows: {step.name}.{LATE}",
    )
