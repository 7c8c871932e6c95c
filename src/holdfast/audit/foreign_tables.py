"""The sinks that an audit can be pointed at by `--sink`, opened.

    parquet:PATH                        a directory of Parquet files, or one file
    delta:PATH                          a Delta table's newest version
    postgresql://…/db?table=NAME        one table, in one snapshot
    sqlite:PATH?table=NAME              the same of a SQLite file
    topic:NAME                          a topic's committed records

All are read only, and as everybody reads them.

Dead letters of plain consumers and foreign jobs, as the offsets they came from.

Every dialect that `holdfast.client.dead_letter_dialects` reads is understood; a letter that does not say where it came
from accounts for nothing, nor does one of another group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from holdfast.audit.evaluating import Evaluator, Kind
from holdfast.audit.foreign_databases import PostgresTable, SqliteTable
from holdfast.audit.foreign_files import DeltaTableRows, ParquetTable
from holdfast.audit.foreign_rows import ForeignTable, RowBatch
from holdfast.audit.matched_values import Numbers
from holdfast.audit.matching import Call, Condition, Expression, Field, Match, parse_match
from holdfast.audit.record_walk import await_decided
from holdfast.client.dead_letter_dialects import read_failure
from holdfast.errors import UsageError
from holdfast.reader import Cluster, RangeReport, TopicPartition, ranges_of


@dataclass(frozen=True)
class DeadLetters:
    """What was set aside."""

    offsets: Mapping[TopicPartition, Numbers] = field(default_factory=dict)
    """Of the records, by partition."""
    undecided: int = 0
    """How many letters there may be that nobody can read yet: behind a transaction that is still open."""


def read_dead_letters(
    topic: str | None, settings: Mapping[str, str], group: str | None = None
) -> DeadLetters:
    """The origins of a topic's letters, by partition; nothing without a topic.

    With a group, those that it gave up on: of dialects that do not name one, all.
    """
    if topic is None:
        return DeadLetters()
    found: dict[TopicPartition, list[int]] = {}
    with Cluster(settings) as cluster:
        # A `Processor` sets aside in the transaction that moves its position on.
        undecided = sum(await_decided(cluster, [topic]).values())
        for batch in cluster.read(ranges_of(cluster, topic)):
            for headers in batch.column("headers").to_pylist():
                failure = read_failure([(each["key"], each["value"]) for each in headers or ()])
                if failure is None or (group is not None and failure.group not in (None, group)):
                    continue
                origin, partition, offset = failure.topic, failure.partition, failure.offset
                if origin is not None and partition is not None and offset is not None:
                    found.setdefault(TopicPartition(origin, partition), []).append(offset)
    by_place = {place: np.unique(np.array(offsets, np.int64)) for place, offsets in found.items()}
    return DeadLetters(by_place, undecided)


# ---------------------------------------------------------------------------- foreign tables


SINKS: Final = "parquet:PATH, delta:PATH, postgresql://…?table=NAME, sqlite:PATH?table=NAME or topic:NAME"


KINDS: Final[Mapping[str, Callable[[str, Match], ForeignTable]]] = {
    "parquet": ParquetTable,
    "delta": DeltaTableRows,
    "postgres": PostgresTable,
    "sqlite": SqliteTable,
}


def parse_sink(text: str) -> tuple[str, str]:
    """The kind and the place of `--sink`."""
    kind, _, place = text.partition(":")
    if kind in ("parquet", "delta", "topic", "sqlite") and place:
        return kind, place
    if text.startswith(("postgresql://", "postgres://")):
        return "postgres", text
    raise UsageError(f"--sink {text!r}: write {SINKS}")


def open_table(sink: str, match_text: str, settings: Mapping[str, str]) -> ForeignTable:
    """The sink of `--sink` with its match; `settings` reach the cluster of a topic."""
    kind, place = parse_sink(sink)
    match = parse_match(match_text, is_topic=kind == "topic")
    return KINDS[kind](place, match) if kind in KINDS else TopicTable(place, match, settings)


def column_names(kind: str, place: str) -> list[str]:
    """The columns of a sink that is no topic."""
    return KINDS[kind](place, Match(())).names()


# ---------------------------------------------------------------------------- a topic


class TopicTable(ForeignTable):
    kind = "topic"

    def __init__(
        self, topic: str, match: Match, settings: Mapping[str, str], conditions: Sequence[Condition] = ()
    ) -> None:
        """`conditions` choose the records that count."""
        super().__init__(f"topic:{topic}", match)
        self._conditions = tuple(conditions)
        self._topic = topic
        self._settings = dict(settings)

    def kinds(self) -> list[Kind]:
        with Cluster(self._settings) as cluster:
            cluster.topics([self._topic])
        return [
            Kind.BYTES if is_bytes(pair.left) and is_bytes(pair.right) else Kind.TEXT
            for pair in self.match.pairs
        ]

    def batches(self, *, headers: bool = True) -> Iterator[pa.RecordBatch]:
        """The committed records there are now, those of transactions whose markers are still being written too."""
        with Cluster(self._settings) as cluster:
            self.undecided = sum(await_decided(cluster, [self._topic]).values())
            ranges = ranges_of(cluster, self._topic)
            reports: list[RangeReport] = []
            for batch in cluster.read(ranges, headers=headers, reports=reports):
                if batch.num_rows:
                    yield batch
        self.forgotten = sum(each.start for each in ranges) + sum(each.missing for each in reports)

    def rows(self) -> Iterator[RowBatch]:
        expressions = [pair.left for pair in self.match.pairs if pair.left is not None]
        evaluator = Evaluator(expressions, self._conditions)
        for batch in self.batches(headers=evaluator.needs_headers):
            if self._conditions:
                batch = batch.filter(pa.array(evaluator.chosen(batch)[0]))
            if batch.num_rows:
                place = f"{self._topic}-{batch.column('partition')[0].as_py()}"
                offsets = batch.column("offset").to_numpy()
                yield RowBatch(evaluator.evaluate(batch), place, int(offsets[0]), offsets)


def is_bytes(expression: Expression | None) -> bool:
    """Whether an expression gives bytes as they are, rather than texts."""
    if isinstance(expression, Call):
        return expression.function == "digest"
    return isinstance(expression, Field) and (
        expression.name == "headers" or (expression.name in ("key", "value") and not expression.path)
    )
