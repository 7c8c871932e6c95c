"""Trying a definition out: its rows on some records of the source, kept in memory and written nowhere.

A trial is a run of the engine itself, with its decoding, its routes and its balances, whose sinks collect what they are
given. It has a home of its own that goes with it, begins with an empty state, creates no topic and commits no offset.
So it may look at the source of a pipeline that runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.sql import LINEAGE, quoted
from holdfast.pipeline.definition.model import KafkaSink, PipelineDefinition
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME
from holdfast.pipeline.engine.dataframe_steps import REPLAYED
from holdfast.pipeline.engine.deployment import Deployment, build_sinks
from holdfast.pipeline.engine.planning import Bounds, Log
from holdfast.pipeline.engine.progress import Progress, Summary
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.pipeline.row_digest import DigestKey
from holdfast.pipeline.sealing import Written
from holdfast.pipeline.sinks.base import Batch, Problem, Sink, SinkContext
from holdfast.pipeline.sinks.columns import stored_schema
from holdfast.pipeline.sinks.dead_letter import LettersAsRows, as_rows
from holdfast.pipeline.sinks.kafka import KafkaSinkWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from holdfast.reader.cluster import Cluster

NAME: Final = "{}.trial"
Row = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """What became of the records."""

    summary: Summary
    rows: Mapping[str, list[Row]]
    """By sink, in the order of the log: the columns it would store, or key, value and headers of a topic's records."""
    dead_letters: list[Row]
    """With `reason`, `error`, and the record: `topic`, `partition`, `offset`, `key`, `value`."""


def run_trial(
    definition: PipelineDefinition,
    *,
    bounds: Bounds | None = None,
    bootstrap: str | None = None,
    spark: SparkSession | None = None,
    progress: Progress | None = None,
    replays: bool = False,
) -> Trial:
    """Take this part of the source, or all of it, through the definition.

    With `replays`, steps of mode `spark` are run once more on the same rows in another order, and compared.
    """
    collecting: dict[str, CollectingSink] = {}

    def build(expanded: PipelineDefinition) -> dict[str, Sink]:
        headers = {sink.name: tuple(sink.headers) for sink in expanded.sinks if isinstance(sink, KafkaSink)}
        for name, real in build_sinks(expanded).items():
            collecting[name] = CollectingSink(name, real, headers.get(name, ()))
        return dict(collecting)

    with tempfile.TemporaryDirectory(prefix="holdfast-trial-") as home:
        alone = replace(
            definition,
            name=NAME.format(definition.name)[-100:],
            home=home,
            monitoring_group=None,
            trigger="available-now",
            digest_key=None,
            source=replace(definition.source, starting="earliest"),
        )
        replayed = REPLAYED.set(replays)
        try:
            summary = run_pipeline(
                alone,
                bootstrap=bootstrap,
                once=True,
                progress=progress,
                spark=spark,
                build=build,
                bounds=bounds,
                shows_positions=False,
            )
        finally:
            REPLAYED.reset(replayed)
    letters = collecting.pop(DEAD_LETTER_NAME).rows
    return Trial(summary, {name: sink.rows for name, sink in collecting.items()}, letters)


def newest(definition: PipelineDefinition, records: int, bootstrap: str | None = None) -> Bounds:
    """The last so many offsets of the source, evenly from all partitions as far as they have them."""
    from holdfast.reader.cluster import Cluster

    deployed = Deployment.of(definition, bootstrap)
    cluster: Cluster
    with Cluster(deployed.settings) as cluster:
        return last_of(deployed.source(cluster).look({}), records)


def last_of(logs: Mapping[Place, Log], records: int) -> Bounds:
    """Partitions that have little give their share to the others."""
    start: dict[Place, int] = {}
    shortest = sorted(logs.items(), key=lambda each: (each[1].end - each[1].start, each[0]))
    for at, (place, log) in enumerate(shortest):
        taken = min(log.end - log.start, -(-records // (len(shortest) - at)))
        start[place] = log.end - taken
        records -= taken
    return Bounds(start, {place: log.end for place, log in logs.items()})


# ---------------------------------------------------------------------------- sinks that collect


@dataclass
class Collected:
    """The rows of one batch, until it is committed."""

    sink: CollectingSink
    content: list[Row]
    rows: int
    digest: int | None = None
    written: Written | None = None

    def commit(self, entry: Entry) -> None:
        self.sink.rows += self.content
        self.sink.newest = entry

    def discard(self) -> None:
        self.content = []


@dataclass
class CollectingSink:
    """Stands for a sink of the definition, which is never opened."""

    name: str
    real: Sink
    headers: tuple[str, ...] = ()
    """What the headers of its records are called, where it is a topic."""
    rows: list[Row] = field(default_factory=list)
    newest: Entry | None = None
    key: DigestKey | None = None

    def check(self, rows: StructType) -> list[Problem]:
        return self.real.check(rows)

    def open(self, context: SinkContext, spark: SparkSession | None) -> None:
        return

    def last_entry(self) -> Entry | None:
        return self.newest

    def prepare(self, batch: Batch, rows: DataFrame) -> Collected:
        if batch.is_empty:
            return Collected(self, [], 0)
        found = self._stored(rows).collect()
        places = [tuple(row[LINEAGE]) for row in found]
        order = sorted(range(len(found)), key=places.__getitem__)
        content = [self._shown(found[at].asDict(recursive=True)) for at in order]
        return Collected(self, content, len(found))

    def _stored(self, rows: DataFrame) -> DataFrame:
        if isinstance(self.real, LettersAsRows):
            return as_rows(rows)
        if isinstance(self.real, KafkaSinkWriter):
            return self.real.records(rows)
        return rows.select(*(quoted(field.name) for field in stored_schema(rows.schema).fields))

    def _shown(self, row: Row) -> Row:
        place = row.pop(LINEAGE)
        if self.name == DEAD_LETTER_NAME:
            row = {name: row[name] for name in ("reason", "error", "key", "value")}
            return {**row, **{name: place[name] for name in ("topic", "partition", "offset")}}
        if isinstance(self.real, KafkaSinkWriter):
            headers = {name: row[f"header_{at}"] for at, name in enumerate(self.headers)}
            return {"key": row["key"], "value": row["value"], "headers": headers}
        return row

    def unfinished(self) -> Entry | None:
        return None

    def missing(self) -> str | None:
        return None

    def holds_rows(self) -> bool:
        return bool(self.rows)

    def forget(self) -> None:
        self.newest = None

    def close(self) -> None:
        return
