"""The audit of one pipeline by Spark.

Scope, ledgers and what is wrong with a sink's own files come from the audit in memory, whose beginning this shares. The
places, and the contents of rows, are compared by Spark jobs, with the steps evaluated again for every batch that the
definition at hand has made. Windows, deduplication and upserts are made again on the driver, up to
`DRIVER_OFFSETS_MAX`; beyond that they are a gap.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

import holdfast
from holdfast.audit import ledgers
from holdfast.audit.decoding import SourceDecoder
from holdfast.audit.left import against, leaving
from holdfast.audit.model import (
    Examined,
    Fate,
    Finding,
    Kind,
    PartitionAccount,
    Report,
    SinkAccount,
    Unproven,
)
from holdfast.audit.pipeline_audit import AuditOptions, PipelineAudit, open_readers
from holdfast.audit.record_walk import Ground
from holdfast.audit.sink_judging import SinkJudge
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.audit.source import keys_at, walk
from holdfast.audit.spark.comparing import Held, findings_of, judged, outside, place_counts
from holdfast.audit.spark.content import compared
from holdfast.audit.spark.sinks import ASIDE, Scratch
from holdfast.audit.spark.source import Reading, batches_taken, source_frame
from holdfast.audit.spark.steps import PLACE, Evaluated, evaluate
from holdfast.audit.spool import SpoolFiles, judge
from holdfast.audit.spool_numbers import SpoolLines
from holdfast.pipeline.aside import AsideDamaged, batch_name, counts_of, read_all
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, client_settings, home_of
from holdfast.pipeline.definition.secrets import expand_definition
from holdfast.pipeline.digest import join_halves
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.reader import TopicPartition
from holdfast.reader.cluster import Cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DRIVER_OFFSETS_MAX: Final = 100_000_000
"""Windows, duplicates and upserts are made again in the driver's memory: some ten bytes for each offset."""
KEYED_MAX: Final = 20
"""Findings whose keys are read back."""


def audit_with_spark(
    definition: PipelineDefinition,
    *,
    bootstrap: str | None = None,
    options: AuditOptions | None = None,
    spark: SparkSession | None = None,
) -> Report:
    """Audit a pipeline as its definition stands, by Spark jobs; without a session one is made, and ended."""
    from holdfast.pipeline.session import refuse_session, spark_session

    options = options or AuditOptions()
    started = time.time()
    expanded, _ = expand_definition(definition)
    settings = {**client_settings(expanded, bootstrap), **options.settings}
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-audit-"))
        if spark is None:
            spark = spark_session(f"audit {definition.name}", directory, settings=expanded.spark)
            stack.callback(spark.stop)
        else:
            refuse_session(spark)
        reached = ledgers.reached(home_of(expanded))
        readers = open_readers(expanded, settings, stack)
        cluster = stack.enter_context(Cluster(settings))
        audit = SparkAudit(expanded, fingerprint(definition), cluster, readers, options, reached)
        report = audit.run_by(spark, settings, directory)
        versions = {
            "holdfast": holdfast.__version__,
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
            "spark": spark.version,
        }
    took_ms = round((time.time() - started) * 1000)
    return replace(report, started_ms=round(started * 1000), took_ms=took_ms, versions=versions)


@dataclass
class SparkAudit(PipelineAudit):
    """One audit, from the readers to the report."""

    is_judged: bool = False
    """Places were judged in memory, because the pipeline has a memory."""

    def run_by(self, spark: SparkSession, settings: Mapping[str, str], directory: str) -> Report:
        tell = self.options.tell or (lambda what: None)
        scratch = Scratch(spark, directory)
        tell("reading the ledgers")
        self._decide()
        self.is_judged = self._remember()
        tell(f"reading {self.scope.offsets:,} offsets of the source")
        batches = ledgers.cover(self.entries, self.scope.spans)
        reading = Reading(settings, self.definition.source, batches_taken(batches, self.fingerprint))
        source_frame(spark, reading, self.scope.spans).write.parquet(scratch.path("source"))
        source = spark.read.parquet(scratch.path("source"))
        tell("reading what left the steps")
        aside = self._aside(scratch, batches)
        tell("evaluating the steps again")
        records = _undecoded(source.where("kind = 'record' AND is_current"), batches)
        evaluated = evaluate(spark, self.definition, records, aside)
        tell("comparing the sinks")
        dead, sinks = self._held(spark, scratch)
        is_known = not evaluated.unknown
        counts = place_counts(
            source,
            _places(evaluated.main) if is_known else None,
            evaluated.all_left(spark),
            aside,
            dead,
            sinks,
        )
        places = judged(counts, sinks, DEAD_LETTER_NAME, is_known=is_known, expands=evaluated.expands)
        places.write.parquet(scratch.path("places"))
        places = spark.read.parquet(scratch.path("places"))
        # What the audit in memory has named already is not named twice.
        has_found = self.is_judged and bool(self.examined.findings)
        found = [] if has_found else findings_of(_wrong(places), self._by_name())
        tell("comparing contents")
        for reader in self._opened().values():
            if reader.kind != "dead_letter" and not reader.takes:
                different = compared(scratch, self.definition, reader, evaluated)
                found += [] if different is None else findings_of(different, self._by_name())
        found += self._letters(scratch, source)
        self.examined += Examined(tuple(found)) + self._spools(scratch, source)
        for reader in self._opened().values():
            self.examined += Examined(tuple(reader.problems()), tuple(reader.gaps()))
        self._say(evaluated)
        self._rejections(batches)
        tell("")
        return self._made(source, places, sinks)

    # -------------------------------------------------------------------- what is read

    def _by_name(self) -> dict[tuple[str, int], Place]:
        return {(place.topic, place.partition): place for place in self.scope.spans}

    def _remember(self) -> bool:
        """Windows, duplicates, late rows and upserts, by the audit in memory, places too; whether there were any."""
        decoder = SourceDecoder(self.definition.source)
        memory, looker = self._memory(decoder)
        if memory is None or looker is None:
            return False
        if self.scope.offsets > DRIVER_OFFSETS_MAX:
            self.examined += Examined(
                unproven=(
                    Unproven(
                        "windows, duplicates, late rows and upserts",
                        f"they are made again in memory, up to {DRIVER_OFFSETS_MAX:,} offsets; audit a part of the "
                        "log with --from, or more often with --every",
                        is_gap=True,
                    ),
                )
            )
            return False
        left = self._left(memory)
        walked = walk(self.cluster, self.scope.spans, self.logs, decoder=decoder, observers=[looker])
        self._note_expired(walked)
        judge = SinkJudge(
            self.definition, self.scope, self.logs, self._opened(), self.entries, left, self.rows, walked
        )
        self.examined += judge.judge()
        ends = {place: end for place, (_, end) in self.scope.spans.items()}
        self.examined += memory.examine(list(self._opened().values()), ends).examined
        return True

    def _aside(self, scratch: Scratch, batches: list[Entry]) -> DataFrame:
        """What the pipeline recorded of rows that left, and whether the ledgers count the same."""
        wanted = {batch_name(entry.range, entry.fingerprint): entry for entry in batches}
        found: list[Finding] = []
        tables: list[pa.Table] = []
        missing = {name: entry for name, entry in wanted.items() if leaving(entry)}
        try:
            for batch, table in read_all(home_of(self.definition), wanted):
                missing.pop(batch.name, None)
                tables.append(table)
                found += against(wanted[batch.name], counts_of(table))
        except (AsideDamaged, OSError) as error:
            tables = []
            found = [
                Finding(Fate.ALTERED, "", count=1, detail=f"the pipeline's record of rows that left: {error}")
            ]
        gaps = (
            Unproven(
                f"which {sum(map(leaving, missing.values())):,} records left by a filter, as duplicates or late",
                "the pipeline's home has no record of them",
                is_gap=True,
            ),
        )
        if not self.is_judged:
            self.examined += Examined(tuple(found), gaps if missing else ())
        rows = (table.select([*PLACE, "route", "step"]).cast(ASIDE) for table in tables if table.num_rows)
        frame = scratch.table("aside", rows, ASIDE).where("route <> 'late-for'")
        return outside(frame.sparkSession, frame, self.scope.spans)[0]

    def _held(self, spark: SparkSession, scratch: Scratch) -> tuple[DataFrame, list[Held]]:
        """The places of dead letters, and of the sinks that keep every row of the end of the steps."""
        dead = self.readers[DEAD_LETTER_NAME]
        letters = self._places_of(spark, scratch, dead)
        held = [
            Held(name, self._places_of(spark, scratch, reader), self.scope.sink_starts.get(name, {}))
            for name, reader in self._mains().items()
        ]
        return letters, held

    def _places_of(self, spark: SparkSession, scratch: Scratch, reader: SinkReader) -> DataFrame:
        """Places within the scope; what is nobody's is a finding."""
        rows = reader.rows(SinkScope(self.scope.spans)) if self.entries.get(reader.name) else ()
        frame = scratch.places(f"places-{reader.name}", rows)
        inside, others = outside(spark, frame, self.scope.spans)
        positions = {place: at.offset for place, at in reader.positions().at.items()}
        cases = " ".join(
            f"WHEN topic = '{place.topic}' AND partition = {place.partition} THEN offset >= "
            f"{min(self.logs[place].end, positions.get(place, 0)) if reader.is_exact else self.logs[place].end}"
            for place in self.scope.spans
        )
        is_beyond = f"(CASE {cases} ELSE true END)" if cases else "true"
        stray = others.where(is_beyond).selectExpr(
            *PLACE,
            f"'{Fate.EXTRA}' AS fate",
            f"'{reader.name}' AS sink",
            "'it is no record that the pipeline has taken' AS why",
        )
        if not self.is_judged:
            self.examined += Examined(tuple(findings_of(stray, self._by_name())))
        return inside

    def _letters(self, scratch: Scratch, source: DataFrame) -> list[Finding]:
        """Dead letters that do not have key and value of their record."""
        reader: Any = self.readers[DEAD_LETTER_NAME]
        if not self.entries.get(DEAD_LETTER_NAME):
            return []
        tables = (table for table in reader.table_batches(("key", "value")) if table.num_rows)
        letters = scratch.table("letters", tables, empty=("key", "value")).selectExpr(
            *(f"_hf_{name} AS {name}" for name in PLACE),
            "cast(key AS binary) AS k",
            "cast(value AS binary) AS v",
        )
        different = source.where("kind = 'record'").join(letters, list(PLACE))
        wrong = different.where("NOT (k <=> _key) OR NOT (v <=> _raw)").selectExpr(
            *PLACE,
            f"'{Fate.ALTERED}' AS fate",
            f"'{DEAD_LETTER_NAME}' AS sink",
            "'key and value are not those of the record' AS why",
        )
        return findings_of(wrong, self._by_name())

    def _spools(self, scratch: Scratch, source: DataFrame) -> Examined:
        """The numbers of spooling producers, in the order of the log."""
        import pyarrow.dataset as ds

        numbered = source.where("kind = 'record' AND exists(_headers, h -> h.key = 'hf-id')")
        path = scratch.path("spools")
        numbered.select(*PLACE, numbered["_headers"].alias("headers")).orderBy(*PLACE).write.parquet(path)
        lines = SpoolLines()
        for batch in ds.dataset(path, format="parquet").to_batches():
            for part in _by_partition(batch):
                lines.take(part)
        if not lines.lines:
            return Examined()
        missing = self._missing(source)
        grounds = {
            TopicPartition(place.topic, place.partition): Ground(
                place, start, end, max(start, self.logs[place].start), end
            )
            for place, (start, end) in self.scope.spans.items()
        }
        return judge(lines, SpoolFiles(), grounds, missing, is_whole=False)[0]

    def _missing(self, source: DataFrame) -> dict[TopicPartition, int]:
        """By partition, offsets in no batch of the log."""
        seen = {
            (row["topic"], row["partition"]): row["count"]
            for row in source.groupBy("topic", "partition").count().collect()
        }
        return {
            TopicPartition(place.topic, place.partition): max(0, end - max(start, self.logs[place].start))
            - seen.get((place.topic, place.partition), 0)
            for place, (start, end) in self.scope.spans.items()
        }

    def _say(self, evaluated: Evaluated) -> None:
        if evaluated.unknown:
            self.examined += Examined(
                unproven=(
                    Unproven(
                        f"what step {evaluated.unknown!r} and those behind it made of the records",
                        "Python and lookups are not run again: their rows are judged by what was recorded",
                    ),
                )
            )

    # -------------------------------------------------------------------- the report

    def _made(self, source: DataFrame, places: DataFrame, sinks: list[Held]) -> Report:
        findings = tuple(
            replace(each, keys=tuple(keys_at(self.cluster, each.place, _first(each))))
            if number < KEYED_MAX and each.place is not None and not each.keys
            else each
            for number, each in enumerate(self.examined.findings)
        )
        ends = {place: log.end for place, log in self.logs.items()}
        return Report(
            subject=self.definition.name,
            mode="pipeline",
            scope=self.scope.summary(),
            partitions=self._accounts(source, places),
            sinks=tuple(
                SinkAccount(
                    name,
                    reader.kind,
                    self._rows_in(places, name, sinks),
                    len(self.entries[name]),
                    {
                        f"{p.topic}-{p.partition}": at.offset
                        for p, at in sorted(reader.positions().at.items())
                    },
                    takes=reader.takes,
                )
                for name, reader in self._opened().items()
            ),
            windows=self.examined.windows,
            findings=findings,
            unproven=tuple(dict.fromkeys(self.examined.unproven)),
            lag={
                name: sum(
                    max(0, ends[place] - at.offset)
                    for place, at in reader.positions().at.items()
                    if place in ends
                )
                for name, reader in self._opened().items()
            },
            notes=self.examined.notes,
            fingerprint=self.fingerprint,
        )

    def _rows_in(self, places: DataFrame, name: str, sinks: list[Held]) -> int:
        column = "dead" if name == DEAD_LETTER_NAME else None
        for number, each in enumerate(sinks):
            column = f"s_{number}" if each.name == name else column
        if column is None:
            return 0
        return int(places.selectExpr(f"sum({column}) AS n").collect()[0]["n"] or 0)

    def _accounts(self, source: DataFrame, places: DataFrame) -> tuple[PartitionAccount, ...]:
        kinds = _counted(source, "kind")
        fates = _counted(places.where("fate IS NOT NULL"), "fate")
        halves = "xxhash64(topic, partition, offset)"
        digests = {
            (row["topic"], row["partition"]): join_halves(row["low"], row["high"])
            for row in source.where("kind = 'record'")
            .groupBy("topic", "partition")
            .agg(_sum(f"{halves} & 4294967295L", "low"), _sum(f"shiftrightunsigned({halves}, 32)", "high"))
            .collect()
        }
        missing = self._missing(source)
        found = []
        for place, (start, end) in sorted(self.scope.spans.items()):
            name = (place.topic, place.partition)
            by_kind = dict(kinds.get(name, {}))
            if missing[TopicPartition(*name)]:
                by_kind[str(Kind.COMPACTED)] = missing[TopicPartition(*name)]
            if self.scope.expired.get(place):
                by_kind[str(Kind.EXPIRED)] = self.scope.expired[place]
            by_fate = dict(fates.get(name, {}))
            if self.logs[place].end > end:
                by_fate[str(Fate.PENDING)] = self.logs[place].end - end
            found.append(
                PartitionAccount(
                    place,
                    start,
                    end,
                    by_kind,
                    by_fate,
                    self.logs[place].start,
                    self.logs[place].end,
                    f"{digests.get(name, 0):016x}",
                )
            )
        return tuple(found)


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


def _places(rows: DataFrame) -> DataFrame:
    return rows.selectExpr(*(f"_hf.{name} AS {name}" for name in PLACE))


def _wrong(places: DataFrame) -> DataFrame:
    return places.where("size(wrong) > 0").selectExpr(*PLACE, "inline(wrong)")


def _sum(text: str, name: str) -> Any:
    from pyspark.sql import functions

    return functions.sum(functions.expr(text)).alias(name)


def _counted(frame: DataFrame, column: str) -> dict[tuple[str, int], dict[str, int]]:
    """Rows of each partition by the values of a column."""
    found: dict[tuple[str, int], dict[str, int]] = {}
    for row in frame.groupBy("topic", "partition", column).count().collect():
        found.setdefault((row["topic"], row["partition"]), {})[row[column]] = row["count"]
    return found


def _by_partition(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Runs of one partition."""
    start = 0
    names = list(zip(batch.column("topic").to_pylist(), batch.column("partition").to_pylist(), strict=True))
    for at in range(1, len(names) + 1):
        if at == len(names) or names[at] != names[start]:
            yield batch.slice(start, at - start)
            start = at


def _first(finding: Finding) -> list[int]:
    return [
        offset for first, last in finding.ranges[:5] for offset in range(first, min(last, first + 4) + 1)
    ][:5]
