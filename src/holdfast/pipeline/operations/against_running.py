"""A definition held against what ran last: what the home keeps, what the ledgers and the state say.

Whether rows fit the columns that sinks hold is told too, before a run meets it. Only the rows at the end of the steps
are judged: their columns are what `check` learns from Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.pipeline.changes.classifying import classify, worst
from holdfast.pipeline.changes.levels import WORST_FIRST, Change, Facts, Level, rebuild, refused, safe, show
from holdfast.pipeline.core.failures import EnvironmentFails
from holdfast.pipeline.definition.fingerprint import state_marks
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.definition.naming import VERSION_COLUMNS
from holdfast.pipeline.definition.streams import merged
from holdfast.pipeline.engine.deployment import Deployment
from holdfast.pipeline.engine.failures import explain_failure
from holdfast.pipeline.engine.status import Status, read_status
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place, to_text
from holdfast.pipeline.sinks.columns import is_stored


@dataclass(frozen=True)
class Judgement:
    """What a run with this definition would meet."""

    pipeline: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    """What could not be asked, and what to know beside the changes."""
    has_run: bool

    @property
    def level(self) -> Level:
        return worst(self.changes)

    @property
    def is_unsafe(self) -> bool:
        """A run would refuse it."""
        return self.level is not Level.SAFE

    def as_json(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline,
            "has_run": self.has_run,
            "level": self.level.value,
            "changes": [change.as_json() for change in self.changes],
            "notes": list(self.notes),
        }


def judge(
    definition: PipelineDefinition,
    *,
    bootstrap: str | None = None,
    columns: Mapping[str, Mapping[str, str]] | None = None,
) -> Judgement:
    """Every change since the last run; nothing is changed. What cannot be asked is noted, the rest stands.

    `EnvironmentFails` when neither the home nor a sink tells anything, and some could not be asked.
    `columns` are those of the rows that sinks take (by their `rows`), with their types, where Spark was asked.
    """
    deployed = Deployment.of(definition, bootstrap)
    status = read_status(definition, bootstrap=bootstrap)
    entries = {sink.name: sink.entry for sink in status.sinks if sink.entry is not None}
    notes = [*_problems(status)]
    before, after = deployed.home().kept_definition(), deployed.canonical
    if not entries and before is None:
        if notes:
            raise EnvironmentFails(
                f"whether it has run, and with which definition, is not known: {'; '.join(notes)}"
            )
        return Judgement(definition.name, (), ("it has not run yet: everything is new",), has_run=False)
    ids = _ids(deployed.settings, entries)
    facts = Facts(
        topics=frozenset(place.topic for entry in entries.values() for place in entry.positions.at)
        if entries and not _problems(status)
        else None,
        is_same_cluster=ids,
    )
    if before is not None:
        changes = classify(before, after, facts)
        notes += _other_fingerprints(before, entries)
    else:
        changes = [*_by_fingerprint(deployed.fingerprint, entries)]
    if entries:
        changes += _state(deployed.home_path, after, changes, entries)
    if columns:
        changes += _misfits(deployed.definition, columns, changes)
    changes.sort(key=lambda change: WORST_FIRST.index(change.level))
    told = tuple(deployed.redactor.redact(note) for note in notes)
    return Judgement(definition.name, tuple(changes), told, has_run=True)


def _problems(status: Status) -> list[str]:
    found = [
        f"sink {sink.name!r} could not be asked: {sink.problem}" for sink in status.sinks if sink.problem
    ]
    if status.source_problem:
        found.append(f"the source: {status.source_problem}")
    return found


def _ids(settings: Mapping[str, str], entries: Mapping[str, Entry]) -> bool | None:
    """Whether the topics that ledgers stand in are there with the ids they had; nothing when nobody answers."""
    from holdfast.reader.cluster import Cluster

    places: set[Place] = {place for entry in entries.values() for place in entry.positions.at}
    if not places:
        return None
    try:
        with Cluster(settings) as cluster:
            known = cluster.topics(pattern=".*")
    except (HoldfastError, OSError):
        return None
    found = [known[place.topic].topic_id == place.topic_id for place in places if place.topic in known]
    return all(found) if found else None


def _other_fingerprints(before: Mapping[str, Any], entries: Mapping[str, Entry]) -> Iterator[str]:
    import hashlib

    mark = hashlib.sha256(to_text(before).encode()).hexdigest()
    for name, entry in entries.items():
        if entry.fingerprint != mark:
            yield (
                f"the newest entry of sink {name!r} was made by an earlier definition ({entry.fingerprint[:16]}) than "
                f"the one compared with ({mark[:16]})"
            )


def _by_fingerprint(mark: str, entries: Mapping[str, Entry]) -> Iterator[Change]:
    others = sorted(name for name, entry in entries.items() if entry.fingerprint != mark)
    if others:
        yield safe(
            "pipeline",
            f"not the definition that sink {', '.join(others)} was written with",
            "Which definition ran last is not kept in the home, so that the changes cannot be listed; the next run "
            "keeps its own. Sinks refuse by themselves what they cannot take.",
            "Read what changed in your version control, with `holdfast pipeline check --against-running` in mind.",
        )


def _misfits(
    definition: PipelineDefinition, columns: Mapping[str, Mapping[str, str]], changes: list[Change]
) -> list[Change]:
    """What sinks would refuse, unless a change of the source says so already."""
    if any(change.level is Level.REFUSED and ".fields." in change.where for change in changes):
        return []
    return list(column_changes(definition, columns))


def _state(
    home: str, after: Mapping[str, Any], changes: list[Change], entries: Mapping[str, Entry]
) -> list[Change]:
    """What the versions of the state themselves say, which the engine goes by."""
    marks = state_marks(after)
    if not marks or any(change.level is Level.REBUILD for change in changes):
        return []
    if all(entry.state is None for entry in entries.values()):  # no offset was taken yet
        return []
    from holdfast.pipeline.state.segments import StateDamaged
    from holdfast.pipeline.state.store import StateStore, state_path

    try:
        newest = StateStore(state_path(home), is_writer=False).newest()
    except (StateDamaged, OSError) as error:
        text = str(explain_failure(error))
        return [rebuild("state", "it cannot be read", f"{text.rstrip('.')}.")]
    if newest is None:
        return [rebuild("state", "there is none", "Ledgers say that records were read.")]
    return [
        rebuild(f"steps.{name}", "its state is of other rules", "It was made by another definition.")
        for name, mark in marks.items()
        if name not in newest.steps or newest.steps[name].fingerprint != mark
    ]


# ---------------------------------------------------------------------------- the columns that sinks hold


RESERVED = "_"


def held_columns(definition: PipelineDefinition, sink: SinkDefinition) -> dict[str, str] | None:
    """Types by name, as Spark writes them; nothing for a sink that holds none. Secrets are expanded."""
    match sink:
        case ParquetSink():
            from holdfast.pipeline.sinks.parquet import ParquetSinkWriter

            text = ParquetSinkWriter(sink, definition.name, definition.directory).store.held_schema()
            return None if text is None else _types(json.loads(text)["columns"])
        case DeltaSink():
            from holdfast.pipeline.sinks.delta import DeltaSinkWriter

            table = DeltaSinkWriter(sink, definition.name, definition.directory).ledger.table()
            return None if table is None else _types(json.loads(table.schema().to_json()))
        case PostgresSink():
            document = _noted_columns(definition, sink)
            return None if document is None else _types(document)
        case KafkaSink():
            return None


def _noted_columns(definition: PipelineDefinition, sink: PostgresSink) -> Any:
    import psycopg
    from psycopg import sql

    from holdfast.pipeline.sinks.postgres_sql import ledger

    statement = sql.SQL(
        "SELECT columns FROM {} WHERE pipeline = %s AND sink = %s AND columns IS NOT NULL ORDER BY number DESC LIMIT 1"
    ).format(ledger(sink.schema_name))
    try:
        with psycopg.connect(sink.url, connect_timeout=10) as connection:
            found = connection.execute(statement, (definition.name, sink.name)).fetchone()
    except psycopg.Error:
        return None  # the ledger itself could not be read either, which is told
    return None if found is None else found[0]


def _types(document: Any) -> dict[str, str]:
    from pyspark.sql.types import StructType

    return {
        field.name: field.dataType.simpleString()
        for field in StructType.fromJson(document).fields
        if is_stored(field.name) and not field.name.startswith(RESERVED)
    }


def column_changes(
    definition: PipelineDefinition, columns: Mapping[str, Mapping[str, str]]
) -> Iterator[Change]:
    """What sinks would refuse of rows with these columns. Of a definition with its secrets expanded."""
    for sink in definition.sinks:
        if sink.rows not in columns or isinstance(sink, KafkaSink):
            continue
        held = held_columns(definition, sink)
        if held is not None:
            if (table := merged(sink)) is not None and table.mode == "scd2":
                held = {name: kind for name, kind in held.items() if name not in VERSION_COLUMNS}
            yield from misfits(sink.name, sink.schema, held, columns[sink.rows])


def misfits(sink: str, setting: str, held: Mapping[str, str], columns: Mapping[str, str]) -> Iterator[Change]:
    """Of one sink."""
    for name, kind in held.items():
        now = columns.get(name)
        if now is not None and now != kind:
            yield refused(
                f"sinks.{sink}",
                f"column {name!r} is {kind} there, and the rows bring {now}",
                "A type is never changed by itself.",
                f"Cast it in a step (CAST({name} AS {kind})), or give it another name.",
            )
    if setting != "fail":
        return
    for names, what in (
        ([name for name in columns if name not in held], "does not hold"),
        ([name for name in held if name not in columns], "holds, and the rows lack,"),
    ):
        if names:
            yield refused(
                f"sinks.{sink}",
                f"it {what} {show(names)}",
                "It takes rows with the columns it holds and no others (`schema: fail`).",
                "Write `schema: add-columns` in the sink, or give the rows the columns it has.",
            )
