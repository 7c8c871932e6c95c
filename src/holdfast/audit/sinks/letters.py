"""Dead letters, in whatever sink they are: the place of each, and why it is there.

In files and tables a row has the record as it came, in columns, and its lineage beside them; in a topic the lineage is
in headers. The audit compares the record with the log (`holdfast.audit.content`) and counts the row as it counts any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from holdfast.audit.lineage import COLUMNS, LineageBatch, partitions_of
from holdfast.audit.sinks.base import SinkReader


@dataclass(frozen=True)
class DeadLetterRow:
    topic: str
    partition: int
    offset: int
    index: int
    reason: str
    """`parse`, or a rule's name."""
    error: str
    where: str


def letters(reader: SinkReader) -> Iterator[tuple[LineageBatch, pa.Array]]:
    """Places, as rows of one partition, with the reason of each."""
    for table in reader.table_batches(("reason",)):
        if not {*COLUMNS, "reason"} <= {*table.column_names}:
            continue  # without a lineage: told by whoever counts rows
        for topic, partition, rows, offsets in partitions_of(table):
            chosen = table.take(pa.array(rows))
            indexes = np.asarray(chosen.column(COLUMNS[3]).fill_null(-1), np.int32)
            yield LineageBatch(topic, partition, offsets, indexes), chosen.column("reason").combine_chunks()


def dead_letters(reader: SinkReader) -> Iterator[DeadLetterRow]:
    """One by one, for a record's life; rows without a lineage are nobody's."""
    for table in reader.table_batches(("reason", "error", "where")):
        for row in table.to_pylist():
            topic, partition, offset, index = (row.get(name) for name in COLUMNS)
            if None not in (topic, partition, offset, index):
                where = row.get("where") or (f"{reader.name}, row {index}" if index else reader.name)
                reason, error = row.get("reason") or "", row.get("error") or ""
                yield DeadLetterRow(topic, int(partition), int(offset), int(index), reason, error, where)
