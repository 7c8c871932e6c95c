"""The streaming side of `format("holdfast")`, from Spark 4.2 on: there a source is told how much a batch may hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span
from holdfast.pipeline.source import PieceReader, Planner, cut, from_offset, pieces, to_offset
from holdfast.pipeline.source_options import SourceOptions


class StreamReader(PieceReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming query. `latestOffset` cuts, `partitions` packs, `read` runs in the workers."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._planner: Planner | None = None
        self._target: Positions | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What goes to the workers: connections stay here."""
        return {"_options": self._options, "_planner": None, "_target": None}

    @property
    def _plan(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._options)
        return self._planner

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return to_offset(Positions(self._plan.resolve(self._plan.topics(), self._options.starting)))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.max_offsets)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = Positions(self._plan.resolve(self._plan.topics(), "latest"))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        standing = from_offset(start)
        ends = self._plan.ends(standing)
        new = self._plan.starts_of_new(standing, ends)
        if new:
            return to_offset(Positions({**new, **standing.at}))
        goals = {place: self._goal(place, ends) for place in standing}
        return to_offset(cut(standing.at, goals, limit.max_rows if isinstance(limit, ReadMaxRows) else None))

    def _goal(self, place: Place, ends: Positions) -> Position:
        end = ends.at[place]
        if self._target is None:
            return end
        return min(end, self._target.at.get(place, Position(0)))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        before, after = from_offset(start), from_offset(end)
        new = {place: position for place, position in after.at.items() if place not in before.at}
        starts = {**before.at, **(self._plan.starts_of_new(before, Positions(new)) if new else {})}
        spans = {
            place: Span(
                starts[place].offset, max(starts[place].offset, position.offset), position.leader_epoch
            )
            for place, position in after.at.items()
        }
        return pieces(BatchRange(spans), self._options)

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()
