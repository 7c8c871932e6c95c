"""What a sink is to the auditor: a snapshot that is read and never written.

The rules of every reader:

- `open_sink` takes the snapshot. The ledger is read first, rows after it; what the pipeline adds meanwhile is not in
  the snapshot, or lies beyond the ledger's positions and is left alone by the comparison (`is_exact` says which).
- Nothing is locked, created, renamed or flushed: directories may be `r-x`, a role may only SELECT, a principal may
  only READ.
- What cannot be read is a finding or a gap, never an empty answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from holdfast.audit.lineage import LineageBatch
from holdfast.audit.model import AuditError, Finding, Unproven
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place, Positions

if TYPE_CHECKING:
    import pyarrow as pa


class SinkUnreadable(AuditError):
    """A sink cannot be reached or read at all; the message says what to do."""


@dataclass(frozen=True)
class SinkScope:
    """Which rows a reader must give: by partition, from the start up to and without the end. A reader may give more;
    rows of partitions that are not named here it always gives, since nobody knows them."""

    spans: Mapping[Place, tuple[int, int]]


@dataclass(frozen=True)
class WindowBatch:
    """Rows of a sink that takes the rows of a step with a memory."""

    rows: pa.RecordBatch
    """Columns as the sink has them: key columns, `window_start`, `window_end`, aggregates, `_hf_count`, `_hf_digest`,
    and the lineage as `_hf_topic` (the step's name), `_hf_partition`, `_hf_offset` (the turn), `_hf_index`. A row that
    takes a window back (a tombstone) has 0 in `_hf_count`."""
    where: str = ""


@dataclass(frozen=True)
class KeyedBatch:
    """Rows of an upsert table: one for each key, and the record it was last written by."""

    keys: pa.RecordBatch
    """The key's columns only."""
    lineage: LineageBatch
    """In the same order."""


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


class SinkReader(Protocol):
    """One sink, as it stood when it was opened."""

    name: str
    kind: str
    """parquet, delta, postgres, kafka, dead_letter."""
    takes: str
    """The step whose rows it has; nothing: those at the end of the steps."""
    is_exact: bool
    """Rows and ledger are of one moment: a row beyond the ledger was not written by the pipeline. Otherwise it may
    have come since, and only rows within the positions are judged."""

    def entries(self) -> Sequence[Entry]:
        """Every entry of the ledger that is kept, ascending. Nothing: the pipeline never wrote here."""

    def positions(self) -> Positions:
        """Where the newest entry stands; empty without one."""

    def rows(self, scope: SinkScope) -> Iterator[LineageBatch]:
        """The lineage of every row, each row once."""

    def windows(self) -> Iterator[WindowBatch]:
        """The rows of a step with a memory, whole."""

    def keys_of(self, columns: Sequence[str]) -> Iterator[KeyedBatch]:
        """For upsert: each key of the table and its row's lineage."""

    def table_batches(self, columns: Sequence[str], scope: SinkScope | None = None) -> Iterator[pa.Table]:
        """The rows with their lineage (`_hf_topic`, `_hf_partition`, `_hf_offset`, `_hf_index`) and these columns, as
        they are stored."""

    def find(self, place: Place, offset: int) -> list[str]:
        """Where the rows made of one record are: file and row, table row, topic record."""

    def problems(self) -> Sequence[Finding]:
        """What is wrong with the sink itself: files truncated, missing, or there and nobody's, holes in a log,
        rows of a file or batch that do not fit the ledger. May be asked for after `rows`."""

    def gaps(self) -> Sequence[Unproven]:
        """What of it cannot be read any more: expired, vacuumed, compacted."""

    def close(self) -> None: ...


class DeadLetterReader(SinkReader, Protocol):
    def letters(self) -> Iterator[tuple[LineageBatch, pa.Array]]:
        """Places, as runs of one partition, with the reason of each."""

    def dead_letters(self) -> Iterator[DeadLetterRow]:
        """With their reasons, for counts by reason and for a record's life."""
