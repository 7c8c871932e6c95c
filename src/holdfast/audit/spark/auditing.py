"""The audit of one pipeline with its steps evaluated again by Spark.

Everything else is the audit in memory: scope, places, ledgers, windows, columns that no step computes. Spark reads the
records of every batch that the definition at hand has made, and evaluates rules, filters and queries on them. What must
be in the sinks and among the dead letters by their word is then held against what is, offset by offset, and columns
that steps compute are compared with the sinks' own. A record about which the audit in memory has found something
already is not named twice.
"""

from __future__ import annotations

import operator
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from holdfast.audit.compare import Holding, marked
from holdfast.audit.content import HEADERS, KEY, ContentCheck, Expected, Plan, compare, made_by, plan_of
from holdfast.audit.coverage import ANY
from holdfast.audit.lineage import LineageBatch, split_columns
from holdfast.audit.model import STEPS, ColumnCoverage, Examined, Fate, Finding, Report
from holdfast.audit.pipeline_audit import AuditOptions, PipelineAudit, audit_pipeline
from holdfast.audit.sink_judging import SinkJudge
from holdfast.audit.sinks.base import SinkReader
from holdfast.audit.spark.content import (
    TOPIC_TYPES,
    Scratch,
    is_stored,
    named,
    of_topic,
    to_arrow,
    with_places,
)
from holdfast.audit.spark.steps import (
    LINEAGE,
    PLACE,
    Evaluated,
    Reading,
    batches_taken,
    evaluate,
    source_frame,
)
from holdfast.pipeline.aside import AsideDamaged, batch_name, read_all
from holdfast.pipeline.definition.model import KafkaSink, PipelineDefinition, SinkDefinition
from holdfast.pipeline.definition.naming import home_of
from holdfast.pipeline.definition.secrets import expand_definition
from holdfast.pipeline.ledger import Entry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ASIDE: Final = pa.schema(
    {"topic": "string", "partition": "int32", "offset": "int64", "route": "string", "step": "string"}
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
        report = audit_pipeline(definition, bootstrap=bootstrap, options=options, steps=steps)
        return replace(report, versions={**report.versions, "spark": spark.version})


@dataclass
class StepsAgain:
    """Evaluates the steps of a pipeline whose places are judged."""

    spark: SparkSession
    scratch: Scratch
    evaluated: Evaluated = field(init=False)

    def begin(self, audit: PipelineAudit, judge: SinkJudge) -> None:
        """Read the records that the definition at hand has taken, and evaluate the steps on them."""
        taken = batches_taken(judge.batches, audit.fingerprint)
        reading = Reading(audit.settings, audit.definition.source, taken)
        source_frame(self.spark, reading, audit.scope.spans).write.parquet(self.scratch.path("source"))
        source = self.spark.read.parquet(self.scratch.path("source"))
        aside = self._aside(audit.definition, judge.batches)
        self.evaluated = evaluate(self.spark, audit.definition, _undecoded(source, judge.batches), aside)

    def rows(self, stream: str, columns: Mapping[str, str]) -> Iterator[pa.Table] | None:
        """Of the rows before a step, or of those that a sink takes: their lineage, and these expressions by name."""
        from pyspark.sql import functions

        frame = self.evaluated.before.get(stream) or self.evaluated.rows_of(stream)
        if frame is None or self.evaluated.expands:
            return None
        made = [functions.expr(text).alias(name) for name, text in columns.items()]
        return self.scratch.rows(with_places(frame, made))

    def aggregates(
        self, step: str, members: pa.Table, aggregates: Mapping[str, str]
    ) -> Mapping[str, dict[int, Any]]:
        """Of the rows before a window step, in groups (`topic`, `partition`, `offset`, `group`): each aggregate by
        group. Rows of a group are aggregated in the order of the step."""
        from pyspark.sql import functions

        frame = self.evaluated.before.get(step)
        if frame is None or self.evaluated.expands:
            return {}
        places = self.scratch.table(self.scratch.new("members"), [members], members.schema)
        same = [functions.col(f"{LINEAGE}.{name}") == places[name] for name in PLACE]
        joined = frame.join(places, reduce(operator.and_, same))
        order = ["group", "order", *(f"{LINEAGE}.{name}" for name in PLACE)]
        grouped = joined.repartition("group").sortWithinPartitions(*order).groupBy("group")
        made = grouped.agg(*(functions.expr(text).alias(name) for name, text in aggregates.items()))
        found: dict[str, dict[int, Any]] = {name: {} for name in aggregates}
        for table in self.scratch.rows(made):
            groups = table.column("group").to_pylist()
            for name in aggregates:
                found[name].update(zip(groups, table.column(name).to_pylist(), strict=True))
        return found

    def examine(self, audit: PipelineAudit, judge: SinkJudge, content: ContentCheck) -> Examined:
        """What the steps say, held against dead letters and sinks; `content` has compared what no step computes."""
        examined = Examined(
            tuple(_disagreements(judge, self._due(self.evaluated, judge), audit.fingerprint)),
            coverage=tuple(_steps(audit.definition, judge.batches, self.evaluated)),
        )
        for sink in audit.definition.sinks:
            reader = judge.readers.get(sink.name)
            if reader is not None:
                examined += self._content(audit, sink, reader, content.compared(sink.name))
        return examined

    def _content(
        self, audit: PipelineAudit, sink: SinkDefinition, reader: SinkReader, known: Collection[str]
    ) -> Examined:
        """The columns of a sink that no field of the source is, against what the steps make."""
        frame = self.evaluated.rows_of(sink.rows)
        if frame is None:
            step = self.evaluated.unknown or sink.rows
            why = f"step {step!r} made it, which is not run again"
            return Examined(coverage=(ColumnCoverage(sink.name, ANY, why=why),))
        marks = {audit.fingerprint}
        made = made_by(marks, reader.entries(), audit.scope.spans)
        whys: list[ColumnCoverage] = []
        if isinstance(sink, KafkaSink):
            columns = of_topic(sink, frame)
            parts = {"key": KEY, "value": "value", "headers": HEADERS}
            parts = {name: must for name, must in parts.items() if name not in known}
            plan = Plan(sink.name, parts, TOPIC_TYPES, is_topic=True, covers=tuple(parts), made=made)
        else:
            fields = [
                field for field in frame.schema.fields if is_stored(field.name) and field.name not in known
            ]
            kinds = to_arrow(frame)
            types = {
                field.name: (kinds.field(field.name).type, field.dataType.simpleString()) for field in fields
            }
            names = {field.name: field.name for field in fields}
            plan, whys = plan_of(reader, sink, names, types, is_all=True)
            plan = replace(plan, made=made)
            columns = [named(frame, name) for name in plan.columns]
        if not plan.columns:
            return Examined(coverage=tuple(whys))
        expected = Expected(audit.scope.spans)
        for table in self.scratch.rows(with_places(frame, columns)):
            expected.put(plan.key, table)
        detail = (
            "the row does not hold what the steps make of the record at its place "
            f"({', '.join(plan.columns)})"
        )
        return compare(reader, plan, expected, detail) + Examined(coverage=tuple(whys))

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
            holding.add(self._collected(frame))
            return holding

        left = evaluated.all_left(self.spark)
        main = evaluated.main.selectExpr(*(f"_hf.{name} AS {name}" for name in PLACE))
        return Due(
            None if evaluated.unknown else held("due", main),
            held("due-dead", left.where(f"route = '{Fate.DEAD_LETTER}'").select(*PLACE)),
            held("due-left", left.where(f"route <> '{Fate.DEAD_LETTER}'").select(*PLACE)),
        )

    def _collected(self, frame: DataFrame) -> Iterator[LineageBatch]:
        """The places of a frame, through files: no more than a batch is in memory."""
        for table in self.scratch.rows(frame):
            topics, partitions, offsets = (table.column(each).combine_chunks() for each in PLACE)
            yield from split_columns(topics, partitions, offsets, pa.array(np.zeros(len(offsets), np.int32)))


def _steps(
    definition: PipelineDefinition, batches: Sequence[Entry], evaluated: Evaluated
) -> Iterator[ColumnCoverage]:
    """Of what each step let go: evaluated again, or not behind one that is not run."""
    names = [step.name for step in definition.steps]
    known = names[: names.index(evaluated.unknown)] if evaluated.unknown else names
    counts: Counter[str] = Counter()
    for entry in batches:
        counts.update(entry.routes.filtered)
        counts.update(entry.routes.dead_letter)
    for step, count in sorted(counts.items()):
        if step in known:
            yield ColumnCoverage(STEPS, step, recomputed=count)
        elif step in names:
            why = f"step {evaluated.unknown!r} before it is not run again"
            yield ColumnCoverage(STEPS, step, unaltered=count, why=why)


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
    made = made_by({fingerprint}, judge.batches, judge.scope.spans)
    dead = judge.routes[Fate.DEAD_LETTER]
    doubtful = judge.doubtful()
    for part in judge.parts:
        open_ = part.records & made[part.place] & ~doubtful[part.place]
        must_die, gone = due.dead.counts[part.place], due.left.counts[part.place]
        must_stay = None if due.main is None else due.main.counts[part.place]
        known = open_ if must_stay is not None else open_ & ((must_die > 0) | (gone > 0))
        have = dead.counts[part.place]
        if not judge.has_forgotten_dead_letters:
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
