"""Dead letters that are rows of files or of a table: the reader of that sink, which tells the reason of each too.

A row has the record as it came, in columns, and its lineage beside them; the audit compares the one with the log
(`holdfast.audit.content`) and counts the other as it counts any row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.audit.lineage import LineageBatch
from holdfast.audit.sinks.base import DeadLetterReader, DeadLetterRow, SinkScope, SinkUnreadable
from holdfast.audit.sinks.delta import DeltaReader
from holdfast.audit.sinks.parquet import ParquetReader
from holdfast.pipeline.definition.model import DeltaSink, ParquetSink, PipelineDefinition, PostgresSink

PLACE = ("_hf_topic", "_hf_partition", "_hf_offset", "_hf_index")


class LetterRows:
    """What a reader of rows needs to be one of dead letters."""

    kind = "dead_letter"

    if TYPE_CHECKING:
        name: str

        def rows(self, scope: SinkScope) -> Iterator[LineageBatch]: ...

        def table_batches(
            self, columns: Sequence[str], scope: SinkScope | None = None
        ) -> Iterator[pa.Table]: ...

    def letters(self) -> Iterator[tuple[LineageBatch, pa.Array]]:
        """Places, as runs of one partition, with the reason of each."""
        reasons = {
            (row.topic, row.partition, row.offset, row.index): row.reason for row in self.dead_letters()
        }
        for batch in self.rows(SinkScope({})):
            places = zip(batch.offsets.tolist(), batch.indexes.tolist(), strict=True)
            found = [reasons.get((batch.topic, batch.partition, *place), "") for place in places]
            yield batch, pa.array(found, pa.string())

    def dead_letters(self) -> Iterator[DeadLetterRow]:
        for table in self.table_batches(("reason", "error")):
            if not {*PLACE} <= {*table.column_names}:
                continue  # rows without lineage are nobody's, and told by whoever counts them
            columns = [
                table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows
                for name in (*PLACE, "reason", "error")
            ]
            for topic, partition, offset, index, reason, error in zip(*columns, strict=True):
                if None not in (topic, partition, offset, index):
                    where = f"{self.name}, row {index}" if index else self.name
                    yield DeadLetterRow(
                        topic, int(partition), int(offset), int(index), reason or "", error or "", where
                    )


class ParquetLetters(LetterRows, ParquetReader):
    """Dead letters in a directory of Parquet files."""


class DeltaLetters(LetterRows, DeltaReader):
    """Dead letters in a Delta table."""


def open_letters(
    definition: PipelineDefinition, sink: ParquetSink | DeltaSink | PostgresSink
) -> DeadLetterReader:
    """A snapshot of the dead letters in this sink."""
    match sink:
        case ParquetSink():
            return ParquetLetters(definition, sink)
        case DeltaSink():
            return DeltaLetters(definition, sink)
    try:
        from holdfast.audit.sinks.postgres import PostgresReader
    except ImportError as error:
        raise SinkUnreadable(
            f"sink {sink.name!r} needs PostgreSQL's client: pip install 'holdfast[postgres]' ({error})"
        ) from error

    class PostgresLetters(LetterRows, PostgresReader):
        """Dead letters in a table of PostgreSQL."""

    return PostgresLetters(definition, sink)
