"""The reference tables of a run: which version of each a batch sees.

A version is pinned with the plan, and stands in plan and ledger: a batch that is made again sees the table it saw
first. Versions that neither names any more are removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from holdfast.pipeline.definition.model import Lookup, PipelineDefinition
from holdfast.pipeline.ledger import Entry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class Lookups:
    """Of one pipeline."""

    def __init__(self, definition: PipelineDefinition, home: str = "") -> None:
        """Without a home, for the schemas alone."""
        self._home = home
        self._directory = definition.directory
        self._steps = [step for step in definition.steps if isinstance(step, Lookup)]
        self._added: dict[str, StructType] = {}

    def schema_after(self, rows: StructType, step: Lookup) -> StructType:
        """Of the joined rows, with the flag where the step has a rule; `StepError` when they cannot be joined."""
        from pyspark.sql.pandas.types import from_arrow_schema
        from pyspark.sql.types import BooleanType, StructField, StructType

        from holdfast.pipeline.state import lookups
        from holdfast.pipeline.state.tables import Table

        table = from_arrow_schema(Table(step, self._directory).schema())
        lookups.check_rows(step, rows, table)
        self._added[step.name] = added = lookups.added_columns(step, self._directory)
        flags = [StructField(name, BooleanType()) for name in self.flags(step)]
        return StructType([*rows.fields, *added.fields, *flags])

    def flags(self, step: Lookup) -> tuple[str, ...]:
        """The column that the step's rule looks at, if it has one."""
        from holdfast.pipeline.state.lookups import found_column

        return () if step.missing == "null" else (found_column(step),)

    def join(self, frame: DataFrame, step: Lookup, version: str) -> DataFrame:
        """The rows with the table's columns of this version."""
        from holdfast.pipeline.state import lookups

        return lookups.join(frame, step, version, self._home, expected=self._added[step.name])

    def pinned(self, known: Mapping[str, str], now_ms: int) -> dict[str, str]:
        """A version for every lookup: the known one, else the one to use now."""
        if not self._steps:
            return {}
        from holdfast.pipeline.state import lookups

        return {
            step.name: known.get(step.name)
            or lookups.pin(step, now_ms, self._home, directory=self._directory)
            for step in self._steps
        }

    def forget(self, entries: Iterable[Entry]) -> None:
        """Remove the versions that no ledger names; between two batches."""
        if not self._steps:
            return
        from holdfast.pipeline.state import lookups

        kept = list(entries)
        for step in self._steps:
            lookups.forget(
                self._home,
                step.name,
                {entry.lookups[step.name] for entry in kept if step.name in entry.lookups},
            )
