"""What a step with a state is to the engine: rows and state in, rows and state out.

A step is asked once per micro-batch. It gets the rows that reach it, and as its context the state where the batch
begins, and the times; it gives its rows, what became late, and its state where the batch ends. It keeps nothing between
two batches: what it needs to know is in the state, so a batch repeated from the same version gives the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.definition.model import Dedupe, Join, Keyed, PipelineDefinition, Step, Window
from holdfast.pipeline.definition.streams import side_condition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from holdfast.pipeline.digest import Tally
    from holdfast.pipeline.state.segments import StepState
    from holdfast.pipeline.state.store import StateStore

LATE = "late"
DUPLICATES = "duplicates"


@dataclass(frozen=True)
class OperatorContext:
    """A step's state, the means to read and to add to it, and when it runs."""

    spark: SparkSession
    store: StateStore
    state: StepState
    batch_time_ms: int
    watermark_ms: int | None
    """Of the pipeline where the batch begins; None before the first event."""
    next_watermark_ms: int | None
    """Where it ends: what ends at or before it closes in this batch."""
    number: int
    """Of the version this batch makes: the `offset` in the lineage of the rows that the step makes."""
    scratch: str
    """A directory for what has to be written down; it goes with the batch."""
    label: str
    """Unique to this attempt."""

    def frame(
        self, schema: StructType | str, *, until_above: int | None = None, until_to: int | None = None
    ) -> DataFrame | None:
        """Its rows with `_until` above the one and not past the other; None when no segment can have any."""
        return self.store.frame(self.spark, self.state, schema, until_above=until_above, until_to=until_to)


@dataclass(frozen=True)
class OperatorResult:
    """What a step made of a batch."""

    rows: DataFrame
    """The step's own rows, where it `has_own_rows`; else the rows that go on."""
    state: StepState
    taken: Tally
    """Input rows that were used (or went on): with the others here all of the input, by number and lineage."""
    late: Tally
    duplicate: Tally
    row_count: int
    """Of `rows`."""
    streams: Mapping[str, DataFrame] = field(default_factory=dict)
    """`late` and `duplicates`: input rows as they came."""
    places: Mapping[str, DataFrame] = field(default_factory=dict)
    """Of such a stream, where that is known without its rows: their lineage as far as it says where they are."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """For progress and metrics: `closed`, `expired`, `corrected`, `late_windows`…"""


class StatefulOperator(Protocol):
    """One step with a state."""

    name: str
    has_own_rows: bool

    def schemas(self, spark: SparkSession, rows: StructType) -> Mapping[str, StructType]:
        """Of the rows it gives, under "" and by stream; `StepError` for a step that cannot work on such rows."""

    def run(self, rows: DataFrame, context: OperatorContext) -> OperatorResult:
        """Take a batch. May run jobs; frames it returns give the same rows however often they are read."""


def operator_of(step: Step, definition: PipelineDefinition) -> StatefulOperator:
    """The step as the engine runs it."""
    event, source = definition.source.event_time, definition.source
    if event is None:
        raise StepError(
            step.name,
            "it remembers rows by the time of their events, and the source does not say when those happen: name the "
            "field by `source.event_time`",
        )
    match step:
        case Dedupe():
            from holdfast.pipeline.state.dedupe import DedupeOperator

            return DedupeOperator(step)
        case Window():
            from holdfast.pipeline.state.windows import WindowOperator

            return WindowOperator(step)
        case Join():
            from holdfast.pipeline.state.joins import JoinOperator

            left, right = (side_condition(source, side) for side in (step.left, step.right))
            return JoinOperator(replace(step, left=left, right=right))
        case Keyed():
            from holdfast.pipeline.state.keyed import KeyedOperator

            return KeyedOperator(step, event, definition.directory)
        case _:
            raise AssertionError(f"{step.name!r} has no state")
