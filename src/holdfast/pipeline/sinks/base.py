"""What every sink is to the engine: two steps, prepare and commit, around one ledger.

`prepare` does all the work that can be thrown away: it writes the rows aside (a directory nobody reads, a staging
table, files no table names yet) and counts them where they stand. The engine then balances the counts of all routes
against the intake, and only then calls `commit`, which makes rows and ledger entry visible in one atomic act. A crash
before it leaves nothing visible; a crash after it is found in the ledger. `discard` takes back what was prepared.

A sink reads its own ledger when it opens, and takes what it needs to be the only writer (a lock, a fence): of two
copies of a pipeline one is refused at `open` or loses at `commit`, with `SinkFenced`, and has written nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from holdfast.errors import HoldfastError
from holdfast.pipeline.ledger import Entry, Rejected
from holdfast.pipeline.positions import BatchRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from holdfast.pipeline.row_digest import DigestKey
    from holdfast.pipeline.sealing import Written
    from holdfast.pipeline.sinks.staged import LocalRows, StagedRows


class SinkError(HoldfastError):
    """A sink cannot take what it is given; the message says what to do. Nothing was committed."""

    exit_code = 3


class SinkUnavailable(SinkError):
    """A sink did not answer, or lost what was prepared; the same batch may be tried again, from its ledger on."""


REJECTED_MAX: Final = 1000
"""Records of one batch that may become dead letters for a sink's sake: beyond this the sink is wrong, not the rows, and
sinks look for no more of them."""


class RowsRejected(SinkError):
    """A sink takes a batch but for some rows, for what is in them; they become dead letters. Nothing was committed."""

    def __init__(self, rows: Sequence[Rejected]) -> None:
        first = rows[0]
        count = f"more than {REJECTED_MAX}" if len(rows) > REJECTED_MAX else str(len(rows))
        super().__init__(
            f"sink {first.sink!r} does not take {count} rows for what is in them, the first made of "
            f"{first.topic}-{first.partition} at offset {first.offset}: {first.why}; nothing was committed"
        )
        self.rows = tuple(rows)


class SinkFenced(SinkError):
    """Another copy of this pipeline writes to this sink."""


class SchemaChanged(SinkError):
    """The rows do not fit what the sink holds, and its `schema` setting does not allow the change."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """Something `check` found wrong, in words for the author of the pipeline."""

    where: str
    message: str


@dataclass(frozen=True)
class SinkContext:
    """What a sink may use."""

    pipeline: str
    home: str
    """The pipeline's own directory; a sink may keep scratch files in `<home>/sinks/<name>`."""
    source: Mapping[str, str]
    """The source's client settings, secrets expanded: the Kafka sinks' default."""
    attempt: str
    """Unique to this run of the driver: marks what it prepared."""
    warn: Callable[[str], None] = lambda message: None


@dataclass(frozen=True)
class Batch:
    """One batch, as a sink sees it."""

    range: BatchRange
    batch_time_ms: int
    label: str
    """Unique to this attempt at this batch."""
    rows: int | None = None
    """How many rows the frame has, where they were counted before: nothing needs to be run for none."""
    staged: StagedRows | None = None
    """The same rows as the frame's, where they stand in the stage as they are: a sink may take them from there."""
    local: LocalRows | None = None
    """The same rows of a small batch: a sink may take them from there, or do its tasks' work in the driver."""

    @property
    def is_empty(self) -> bool:
        """Nothing is to be written but the ledger."""
        return not self.range or self.rows == 0


class Prepared(Protocol):
    """Rows written aside."""

    rows: int
    """Counted where they stand."""
    digest: int | None
    """Digest of their lineage (`holdfast.pipeline.digest`), where the sink can take it from what it wrote."""
    written: Written | None
    """Digest of the rows themselves, where the sink was given a key."""

    def commit(self, entry: Entry) -> Entry | None:
        """Make rows and entry visible, at once and durably; the entry comes back where the sink completed it."""

    def discard(self) -> None:
        """Forget them. Called after a failure, so it does not fail where the rows are gone already."""


class Sink(Protocol):
    """One destination. Used from the driver's main thread only."""

    name: str
    key: DigestKey | None = None
    """Of the digests of rows, once the ledgers have been read; nothing: none are taken."""

    def check(self, rows: StructType) -> list[Problem]:
        """What is wrong with this sink's definition for rows of this schema; touches nothing outside."""

    def open(self, context: SinkContext, spark: SparkSession | None) -> None:
        """Connect, create what is missing, become the only writer. Without Spark: to read the ledger only."""

    def last_entry(self) -> Entry | None:
        """The newest entry of the sink's ledger, read from the sink itself."""

    def prepare(self, batch: Batch, rows: DataFrame) -> Prepared:
        """Write these rows aside; an empty frame is a batch too, and advances the ledger.

        `RowsRejected` names rows that the sink does not take for what is in them, all that it can find at once.
        """

    def unfinished(self) -> Entry | None:
        """A batch that is only partly in the sink, and has to be the next, cut exactly so; mostly there is none."""
        return None

    def missing(self) -> str | None:
        """What the ledger speaks of and is no longer there, in words; nothing when all is there."""

    def holds_rows(self) -> bool:
        """Whether rows are there that a ledger begun anew would repeat."""

    def forget(self) -> None:
        """Drop this pipeline's ledger in the sink (`pipeline reset`); the rows stay."""

    def close(self) -> None:
        """Let go of everything; what is not committed is discarded."""
