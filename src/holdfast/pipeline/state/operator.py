"""What a step with a memory is to the engine: rows and state in, rows and state out.

A step is asked once per batch. It gets the rows that reach it, its state as it stands where the batch begins, and the
moment; it gives its rows, what became late, and its state where the batch ends. It keeps nothing between two turns:
what it needs to know is in the state, so a turn repeated from the same version gives the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from holdfast.pipeline.digest import Tally
    from holdfast.pipeline.state.store import StateStore, StepState

LATE = "late"
DUPLICATES = "duplicates"


@dataclass(frozen=True)
class Moment:
    """When a turn is taken."""

    batch_time_ms: int
    watermark_ms: int | None
    """Of the pipeline where the batch begins; nothing before the first event."""
    next_watermark_ms: int | None
    """Where it ends: what ends at or before it closes in this turn."""
    number: int
    """Of the version this turn helps to make: the `offset` in the lineage of a tap's rows."""
    scratch: str
    """A directory for what has to be written down; it goes with the batch."""
    label: str
    """Unique to this attempt."""


@dataclass(frozen=True)
class Held:
    """A step's state, and the means to read and to add to it."""

    spark: SparkSession
    store: StateStore
    state: StepState

    def frame(
        self, schema: StructType | str, *, until_above: int | None = None, until_to: int | None = None
    ) -> DataFrame | None:
        """Its rows with `_until` above the one and not past the other; None when no segment can have any."""
        return self.store.frame(self.spark, self.state, schema, until_above=until_above, until_to=until_to)


@dataclass(frozen=True)
class Turn:
    """What a step made of a batch."""

    rows: DataFrame
    """A tap: its own rows. Else: the rows that go on."""
    state: StepState
    taken: Tally
    """Input rows that were used (or went on): with the others here all of the input, by number and lineage."""
    late: Tally
    duplicate: Tally
    row_count: int
    """Of `rows`."""
    streams: Mapping[str, DataFrame] = field(default_factory=dict)
    """`late` and `duplicates`: input rows as they came."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """For progress and metrics: `closed`, `expired`, `corrected`, `late_windows`…"""


class Operator(Protocol):
    """One step with a memory."""

    name: str
    is_tap: bool

    def schemas(self, spark: SparkSession, rows: StructType) -> Mapping[str, StructType]:
        """Of the rows it gives, under "" and by stream; `StepError` for a step that cannot work on such rows."""

    def run(self, rows: DataFrame, held: Held, moment: Moment) -> Turn:
        """Take a turn. May run jobs; frames it returns give the same rows however often they are read."""
