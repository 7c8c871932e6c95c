"""Running a range of the source through a definition once more, into places of its own.

A backfill is a pipeline of its own: `<pipeline>.<NAME>`, with the same source, steps and kinds of sinks, and with
ledgers, state, home, group and destinations that carry the name too. Nothing of the live pipeline is opened, locked or
moved, and it may run meanwhile. What the range is in offsets is decided once, when it begins, and kept in the home:
running the same command again goes on where it stopped, and once it is done it does nothing.

Stateful steps begin with an empty state at the range's start, and what is not closed by the range's
own events stays open at its end: a backfill's range should begin and end where windows do, with the delay to spare.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.atomic import write_atomically
from holdfast.errors import UsageError
from holdfast.pipeline.definition.model import (
    DeadLetter,
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.definition.naming import NAME, dead_letter_sink, kind_of_sink, own_topics
from holdfast.pipeline.definition.secrets import expand_definition
from holdfast.pipeline.engine.deployment import Deployment
from holdfast.pipeline.engine.planning import Bounds, Log
from holdfast.pipeline.engine.progress import Summary
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.engine.source_view import SourceView, starting_ms
from holdfast.pipeline.positions import Place, Position, Positions, to_text
from holdfast.reader import TopicPartition
from holdfast.real import RealFileSystem

if TYPE_CHECKING:
    from holdfast.reader.cluster import Cluster

NOTE: Final = "backfill.json"
NOTE_VERSION: Final = 1
IDENTIFIER_BYTES_MAX: Final = 63
"""Of a table's name in PostgreSQL."""
OFFSET: Final = re.compile(r"(?P<topic>[A-Za-z0-9._-]+):(?P<partition>\d+)=(?P<offset>\d+)")


@dataclass(frozen=True)
class Backfill:
    """A range, fixed in offsets, and the pipeline that takes it."""

    definition: PipelineDefinition
    """Of the backfill itself, secrets not expanded."""
    bounds: Bounds
    is_resumed: bool
    """It was begun before; the range is that of then."""

    @property
    def offsets(self) -> int:
        return sum(end - self.bounds.start[place] for place, end in self.bounds.end.items())

    @property
    def destinations(self) -> dict[str, str]:
        return destinations(self.definition)

    def __str__(self) -> str:
        ranges = ", ".join(
            f"{place.topic}-{place.partition} [{self.bounds.start[place]}, {end})"
            for place, end in sorted(self.bounds.end.items())
        )
        return f"{self.definition.name}: {ranges}"

    def as_json(self) -> dict[str, Any]:
        return {
            "pipeline": self.definition.name,
            "from": _positions(self.bounds.start).as_json(),
            "to": _positions(self.bounds.end).as_json(),
            "is_resumed": self.is_resumed,
            "destinations": self.destinations,
        }


# ---------------------------------------------------------------------------- places of its own


def derive(definition: PipelineDefinition, name: str) -> PipelineDefinition:
    """The pipeline of a backfill: the same rules, and every place under another name."""
    if NAME.fullmatch(name) is None:
        raise UsageError(
            f"--into {name!r}: a name has letters and digits, with single dots, dashes or underscores"
        )
    full = f"{definition.name}.{name}"
    if NAME.fullmatch(full) is None:
        raise UsageError(f"--into {name!r}: the name {full!r} has more than 100 characters")
    dead = dead_letter_sink(definition)
    derived = replace(
        definition,
        name=full,
        sinks=tuple(_elsewhere(sink, name) for sink in definition.sinks),
        dead_letter=_letters(_elsewhere(dead, name)),
        home=f"{definition.home.rstrip('/')}.{name}" if definition.home else "",
        monitoring_group=None,
        trigger="available-now",
    )
    _refuse_own_pattern(derived)
    return derived


def _letters(sink: SinkDefinition) -> DeadLetter:
    match sink:
        case KafkaSink():
            return DeadLetter(sink.topic, sink.bootstrap, sink.settings)
        case ParquetSink():
            return DeadLetter(parquet=sink)
        case DeltaSink():
            return DeadLetter(delta=sink)
        case PostgresSink():
            return DeadLetter(postgres=sink)


def _elsewhere(sink: SinkDefinition, name: str) -> SinkDefinition:
    match sink:
        case ParquetSink() | DeltaSink():
            return replace(sink, path=f"{sink.path.rstrip('/')}-{name}")
        case KafkaSink():
            return replace(sink, topic=f"{sink.topic}.{name}")
        case PostgresSink():
            table = f"{sink.table}_{re.sub('[^A-Za-z0-9]', '_', name)}"
            if len(table.encode()) > IDENTIFIER_BYTES_MAX:
                raise UsageError(
                    f"sink {sink.name!r}: the table {table!r} would have a name of more than {IDENTIFIER_BYTES_MAX} "
                    "bytes; choose a shorter --into"
                )
            return replace(sink, table=table)


def _refuse_own_pattern(derived: PipelineDefinition) -> None:
    """The live pipeline must not read what the backfill writes."""
    pattern = derived.source.pattern
    for topic in sorted(own_topics(derived)) if pattern is not None else ():
        if pattern is not None and re.fullmatch(pattern, topic):
            raise UsageError(
                f"the pattern {pattern!r} of the source finds the topic {topic!r} that the backfill would write, and "
                "the live pipeline would read it: choose an --into that it does not find, or name the topics"
            )


def destinations(definition: PipelineDefinition) -> dict[str, str]:
    """By sink, where its rows are, in words; secrets stay references."""
    found: dict[str, str] = {}
    for sink in (dead_letter_sink(definition), *definition.sinks):
        match sink:
            case ParquetSink() | DeltaSink():
                found[sink.name] = f"{kind_of_sink(sink)} {sink.path}"
            case KafkaSink():
                found[sink.name] = f"topic {sink.topic}"
            case PostgresSink():
                found[sink.name] = f"table {sink.schema_name}.{sink.table}"
    return found


# ---------------------------------------------------------------------------- the range


def plan_backfill(
    definition: PipelineDefinition, *, begin: str, end: str, into: str, bootstrap: str | None = None
) -> Backfill:
    """What a backfill of this name would read, or goes on reading; nothing is changed but its own home's note."""
    from holdfast.reader.cluster import Cluster

    derived = derive(definition, into)
    deployed = Deployment.of(derived, bootstrap)
    home = deployed.home_path
    noted = _noted(home)
    if noted is None and not into.replace("_", "").isalnum():
        for sink in definition.sinks:
            if isinstance(sink, PostgresSink):
                raise UsageError(
                    f"--into {into!r}: sink {sink.name!r} is a table, whose name has letters, digits and underscores "
                    "only: names that differ in dots and dashes would make one table"
                )
    if noted is not None:
        if (noted["begin"], noted["end"]) != (begin, end):
            raise UsageError(
                f"the backfill {derived.name!r} was begun from {noted['begin']} to {noted['end']}: run it again so, or "
                "choose another --into"
            )
        return Backfill(derived, _bounds(noted), is_resumed=True)
    with Cluster(deployed.settings) as cluster:
        live, _ = expand_definition(definition)
        own = own_topics(live) | own_topics(deployed.definition)
        logs = SourceView(cluster, live.source, own).look({})
        bounds = resolve(cluster, logs, begin, end)
    backfill = Backfill(derived, bounds, is_resumed=False)
    os.makedirs(home, exist_ok=True)
    note = {
        "version": NOTE_VERSION,
        "begin": begin,
        "end": end,
        "from": _positions(bounds.start).as_json(),
        "to": _positions(bounds.end).as_json(),
    }
    write_atomically(RealFileSystem(), os.path.join(home, NOTE), to_text(note).encode())
    return backfill


def resolve(cluster: Cluster, logs: Mapping[Place, Log], begin: str, end: str) -> Bounds:
    """The range in offsets; `UsageError` for one that the logs do not hold."""
    starts, ends = (_resolved(cluster, logs, text, flag) for flag, text in (("--from", begin), ("--to", end)))
    chosen = sorted(starts.keys() & ends.keys())
    for place in chosen:
        log, start, behind = logs[place], starts[place], ends[place]
        name = f"{place.topic}-{place.partition}"
        if start > behind:
            raise UsageError(f"{name}: --from is offset {start}, behind --to, which is offset {behind}")
        if start < log.start:
            raise UsageError(
                f"{name}: offset {start} is gone: the log begins at {log.start}. Begin there, or at earliest"
            )
        if behind > log.end:
            raise UsageError(f"{name}: offset {behind} does not exist yet: the log ends at {log.end}")
    if not any(ends[place] > starts[place] for place in chosen):
        raise UsageError(f"there is nothing between {begin} and {end}")
    return Bounds({place: starts[place] for place in chosen}, {place: ends[place] for place in chosen})


def _resolved(cluster: Cluster, logs: Mapping[Place, Log], text: str, flag: str) -> dict[Place, int]:
    if text == "earliest":
        return {place: log.start for place, log in logs.items()}
    if text == "latest":
        return {place: log.end for place, log in logs.items()}
    if "=" in text:
        return _offsets(logs, text, flag)
    try:
        moment_ms = starting_ms(text)
    except Exception as error:
        raise UsageError(
            f"{flag} {text!r}: write earliest, latest, a time such as 2026-01-31T12:00:00Z, or offsets such as "
            "orders:0=100,orders:1=120"
        ) from error
    partitions = {TopicPartition(place.topic, place.partition): place for place in logs}
    answers = cluster.offsets(partitions, moment_ms)
    return {
        place: min(answers[partition].offset, logs[place].end)
        if answers[partition].offset >= 0
        else logs[place].end
        for partition, place in partitions.items()
    }


def _offsets(logs: Mapping[Place, Log], text: str, flag: str) -> dict[Place, int]:
    found: dict[Place, int] = {}
    places = {(place.topic, place.partition): place for place in logs}
    for part in text.split(","):
        match = OFFSET.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"{flag} {part.strip()!r}: write TOPIC:PARTITION=OFFSET, as in orders:0=100,orders:1=120"
            )
        place = places.get((match["topic"], int(match["partition"])))
        if place is None:
            raise UsageError(f"{flag}: the pipeline reads no partition {match['topic']}:{match['partition']}")
        found[place] = int(match["offset"])
    return found


def _positions(offsets: Mapping[Place, int]) -> Positions:
    return Positions({place: Position(offset) for place, offset in offsets.items()})


def _noted(home: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(home, NOTE), encoding="utf-8") as file:
            document: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return document


def _bounds(noted: Mapping[str, Any]) -> Bounds:
    start, end = (Positions.from_json(noted[name]) for name in ("from", "to"))
    return Bounds(
        {place: at.offset for place, at in start.at.items()},
        {place: at.offset for place, at in end.at.items()},
    )


# ---------------------------------------------------------------------------- running it


def run_backfill(backfill: Backfill, **options: Any) -> Summary:
    """Take the range, or what is left of it; options as those of `run_pipeline`."""
    return run_pipeline(backfill.definition, once=True, bounds=backfill.bounds, **options)
