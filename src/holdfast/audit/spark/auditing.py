"""The audit of one pipeline with its steps evaluated again by Spark.

Everything else is the audit in memory: scope, places, ledgers, windows, columns that no step computes. Spark reads the
records of every batch that the definition at hand has made, and evaluates rules, filters and queries on them. What must
be in the sinks and among the dead letters by their word is then held against what is, offset by offset, and columns
that steps compute are compared with the sinks' own. A record about which the audit in memory has found something
already is not named twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from holdfast.audit.compare import Holding, finding, marked
from holdfast.audit.content import ContentCheck, Spans
from holdfast.audit.lineage import LineageBatch, Offsets, split_columns
from holdfast.audit.model import Examined, Fate, Finding, Report, Unproven
from holdfast.audit.pipeline_audit import AuditOptions, PipelineAudit, audit_pipeline
from holdfast.audit.sink_judging import SinkJudge, made_by
from holdfast.audit.sinks.base import SinkReader
from holdfast.audit.spark.content import Scratch, comparable, different, not_compared
from holdfast.audit.spark.steps import PLACE, Evaluated, Reading, batches_taken, evaluate, source_frame
from holdfast.pipeline.aside import AsideDamaged, batch_name, read_all
from holdfast.pipeline.definition.model import PipelineDefinition, SinkDefinition
from holdfast.pipeline.definition.naming import home_of
from holdfast.pipeline.definition.secrets import expand_definition
from holdfast.pipeline.ledger import Entry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ASIDE: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("route", pa.string()),
        ("step", pa.string()),
    ]
)


def audit_with_spark(
    definition: PipelineDefinition,
    *,
    bootstrap: str | None = None,
    options: AuditOptions | None = None,
    spark: SparkSession | None = None,
) -> Report:
    """Audit a pipeline as its definition stands, its steps too; without a session one is made, and ended."""
    from holdfast.pipeline.session import refuse_session, spark_session

    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-audit-"))
        if spark is None:
            expanded, _ = expand_definition(definition)
            spark = spark_session(f"audit {definition.name}", directory, settings=expanded.spark)
            stack.callback(spark.stop)
        else:
            refuse_session(spark)
        steps = StepsAgain(spark, Scratch(spark, directory))
        report = audit_pipeline(definition, bootstrap=bootstrap, options=options, steps=steps.examine)
        return replace(report, versions={**report.versions, "spark": spark.version})


@dataclass
class StepsAgain:
    """Evaluates the steps of a pipeline whose places are judged."""

    spark: SparkSession
    scratch: Scratch

    def examine(self, audit: PipelineAudit, judge: SinkJudge, content: ContentCheck) -> Examined:
        """What the steps say, held against dead letters and sinks; `content` has compared what no step computes."""
        taken = batches_taken(judge.batches, audit.fingerprint)
        reading = Reading(audit.settings, audit.definition.source, taken)
        source_frame(self.spark, reading, audit.scope.spans).write.parquet(self.scratch.path("source"))
        source = self.spark.read.parquet(self.scratch.path("source"))
        aside = self._aside(audit.definition, judge.batches)
        evaluated = evaluate(self.spark, audit.definition, _undecoded(source, judge.batches), aside)
        found = _disagreements(judge, self._due(evaluated, judge), audit.fingerprint)
        unproven: list[Unproven] = []
        if evaluated.unknown:
            unproven.append(
                Unproven(
                    f"what step {evaluated.unknown!r} and those behind it made of the records",
                    "Python and lookups are not run again: their rows are judged by what was recorded",
                )
            )
        for sink in audit.definition.sinks:
            reader = judge.readers.get(sink.name)
            if reader is None:
                continue
            why = not_compared(sink, evaluated)
            if why and sink.name in content.computed:
                unproven.append(Unproven(f"columns in {sink.name} that steps compute", why))
            elif not why:
                known = content.compared(sink.name)
                columns = comparable(sink, reader, evaluated.main.schema, known)
                found += self._altered(sink, reader, evaluated, columns, audit.scope.spans) if columns else []
        return Examined(tuple(found), tuple(unproven))

    def _aside(self, definition: PipelineDefinition, batches: list[Entry]) -> DataFrame:
        """What the pipeline recorded of rows that left; that it can be read was looked at before."""
        wanted = [batch_name(entry.range, entry.fingerprint) for entry in batches]
        try:
            tables = [table for _, table in read_all(home_of(definition), wanted)]
        except (AsideDamaged, OSError):
            tables = []
        rows = (table.select(ASIDE.names).cast(ASIDE) for table in tables if table.num_rows)
        return self.scratch.table("aside", rows, ASIDE)

    def _due(self, evaluated: Evaluated, judge: SinkJudge) -> Due:
        def held(name: str, frame: DataFrame) -> Holding:
            holding = Holding(name, judge.scope.spans)
            holding.add(self._collected(name, frame))
            return holding

        left = evaluated.all_left(self.spark)
        main = evaluated.main.selectExpr(*(f"_hf.{name} AS {name}" for name in PLACE))
        return Due(
            None if evaluated.unknown else held("due", main),
            held("due-dead", left.where(f"route = '{Fate.DEAD_LETTER}'").select(*PLACE)),
            held("due-left", left.where(f"route <> '{Fate.DEAD_LETTER}'").select(*PLACE)),
        )

    def _collected(self, name: str, frame: DataFrame) -> Iterator[LineageBatch]:
        """The places of a frame, through files: no more than a batch is in memory."""
        import pyarrow.dataset as ds

        frame.write.parquet(self.scratch.path(name))
        for batch in ds.dataset(self.scratch.path(name), format="parquet").to_batches():
            topics, partitions, offsets = (batch.column(each) for each in PLACE)
            yield from split_columns(topics, partitions, offsets, pa.array(np.zeros(len(offsets), np.int32)))

    def _altered(
        self, sink: SinkDefinition, reader: SinkReader, evaluated: Evaluated, columns: list[str], spans: Spans
    ) -> list[Finding]:
        """Rows whose computed columns are others than the steps make."""
        places = different(self.scratch, sink, reader, evaluated, columns)
        offsets: dict[tuple[str, int], list[Offsets]] = {}
        for rows in self._collected(f"different-{sink.name}", places):
            offsets.setdefault((rows.topic, rows.partition), []).append(rows.offsets)
        by_name = {(place.topic, place.partition): place for place in spans}
        detail = (
            f"the row does not hold what the steps make of the record at its place ({', '.join(columns)})"
        )
        return [
            finding(Fate.ALTERED, sink.name, by_name[name], np.unique(np.concatenate(parts)), detail)
            for name, parts in sorted(offsets.items())
        ]


@dataclass
class Due:
    """What must be where by the word of the steps, of the records that the definition at hand has made."""

    main: Holding | None
    """Rows at the end of the steps; nothing where a step is not evaluated."""
    dead: Holding
    left: Holding
    """Filtered; and duplicates and late rows, as the pipeline recorded them."""


def _disagreements(judge: SinkJudge, due: Due, fingerprint: str) -> list[Finding]:
    """Where the steps say otherwise than dead letters and sinks do."""
    found: list[Finding] = []
    made = made_by(fingerprint, judge.batches, judge.scope.spans)
    dead = judge.routes[Fate.DEAD_LETTER]
    doubtful = judge.doubtful()
    for part in judge.parts:
        open_ = part.records & made[part.place] & ~doubtful[part.place]
        must_die, gone = due.dead.counts[part.place], due.left.counts[part.place]
        must_stay = None if due.main is None else due.main.counts[part.place]
        known = open_ if must_stay is not None else open_ & ((must_die > 0) | (gone > 0))
        have = dead.counts[part.place]
        found += marked(
            Fate.LOST, dead.name, part, known & (have < must_die), "the steps make them dead letters"
        )
        found += marked(
            Fate.DUPLICATED, dead.name, part, known & (have > must_die), "the steps let them pass"
        )
        for name, reader in judge.mains.items():
            have = judge.rows.of(reader).counts[part.place]
            if must_stay is None:
                found += marked(Fate.DUPLICATED, name, part, known & (have > 0), "the steps let them go")
                continue
            lost = known & (have < must_stay)
            since = judge.scope.sink_starts.get(name, {}).get(part.place, part.start)
            lost[: max(0, since - part.start)] = False
            found += marked(Fate.LOST, name, part, lost, "the steps let them pass")
            more = "the steps let them go, or make fewer rows of them"
            found += marked(Fate.DUPLICATED, name, part, known & (have > must_stay), more)
    return found


def _undecoded(records: DataFrame, batches: list[Entry]) -> DataFrame:
    """Records of which a sink did not take a row never reach the steps, as if they could not be decoded."""
    from pyspark.sql import functions

    found = [(*each[:3], each.why) for entry in batches for each in entry.rejected]
    if not found:
        return records
    ddl = "topic string, partition int, offset bigint, _rejected string"
    rejected = functions.broadcast(records.sparkSession.createDataFrame(found, ddl))
    errors = functions.coalesce("_error", "_rejected")
    return records.join(rejected, list(PLACE), "left").withColumn("_error", errors).drop("_rejected")
