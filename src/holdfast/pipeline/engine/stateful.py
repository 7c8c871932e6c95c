"""The pipeline's state in a batch: from which version it starts, and the version it makes.

- A batch starts from the version that stands exactly where its sinks stand. Nobody has taken an offset yet: it starts
  from nothing, as version 0, which is never written, or as the last number of a life before. Anything else without a
  version is `StateMissing`: a state is never assumed to be empty.
- The steps with a state run in the order of the definition, all from that version; what they give is one new version,
  numbered one more. It is durable before any sink prepares the batch.
- A version is of use only to steps that do what they did when it was made: `StateOutdated` else.
- A sink that catches up repeats a batch from the version where it stands. The steps give the same rows, and the
  version that is there already stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.failures import StateMissing, StateOutdated
from holdfast.pipeline.definition.fingerprint import state_marks
from holdfast.pipeline.definition.model import EventTime
from holdfast.pipeline.engine.progress import StateNow
from holdfast.pipeline.engine.staging import Staged
from holdfast.pipeline.ledger import STATELESS, Entry
from holdfast.pipeline.positions import Place, Positions
from holdfast.pipeline.state.operator import OperatorContext, OperatorResult, StatefulOperator
from holdfast.pipeline.state.segments import StepState
from holdfast.pipeline.state.store import StateStore, Version
from holdfast.pipeline.state.watermarks import Clock, Watermarks, own_watermark_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LARGE_BYTES: Final = 1024**3
"""A state of this size is told."""
FRESH = Version(0, Positions({}))
"""Before the first batch."""


@dataclass
class PipelineState:
    """The state of one pipeline while it runs."""

    spark: SparkSession
    store: StateStore
    clock: Clock
    marks: Mapping[str, str]
    """By step with a state: the fingerprint that must have."""

    @classmethod
    def of(
        cls, spark: SparkSession, path: str, event: EventTime, canonical: Mapping[str, Any]
    ) -> PipelineState:
        """`canonical` is the definition's, secrets as references."""
        return cls(spark, StateStore(path), Clock.of(event), state_marks(canonical))

    def start_anew(self, entries: Iterable[Entry]) -> None:
        """No sink has taken an offset: what is there is of a life before, or of a batch that nobody has.

        It goes, and its number stays, in a version with nothing else: rows that a step makes never have a lower number
        than those that sinks may hold of the life before.
        """
        newest = self.store.newest()
        if newest is None:
            return
        positions = shared_positions(entries)
        if newest.steps or not newest.stands_at(positions):
            self.store.publish(Version(newest.number + 1, positions))
        if len(self.store.versions()) > 1:
            self.store.gc([])

    def version_for(self, entries: Mapping[str, Entry]) -> Version:
        """The version from which a batch for these sinks starts; they all stand at the same place."""
        by_state = sorted(entries.items(), key=lambda item: -2 if item[1].state is None else item[1].state)
        sink, entry = by_state[-1]
        if entry.state is None:
            base = self.store.find(entry.positions)
            return base if base is not None and not base.steps else FRESH
        version = self._version_of(entry)
        if version is None:
            made = "by a pipeline without state" if entry.state == STATELESS else f"as version {entry.state}"
            raise StateMissing(
                f"sink {sink!r} stands where {self.store.path} has no state (its last batch was made {made}): without "
                "it, windows and keys would start from nothing. `holdfast pipeline rebuild FILE` makes the state again "
                "from the source, and touches no sink"
            )
        self._refuse_outdated(version)
        self.store.remove_unnamed()
        return version

    def _version_of(self, entry: Entry) -> Version | None:
        assert entry.state is not None
        if entry.state != STATELESS:
            version = self.store.find(entry.positions, entry.state)
            if version is not None:
                return version
        # Made anew since, for exactly this place: no partition may be there that it does not know.
        version = self.store.find(entry.positions)
        if version is None or version.number <= entry.state:
            return None
        return version if set(version.positions.at) == set(entry.positions.at) else None

    def _refuse_outdated(self, version: Version) -> None:
        name = self._outdated(version)
        if name is not None:
            what = "or a step before it has changed" if name in version.steps else "is new"
            raise StateOutdated(
                f"step {name!r} {what}, and the state in {self.store.path} was made without that. "
                "`holdfast pipeline check FILE --against-running` lists what changed; `holdfast pipeline rebuild "
                "FILE` makes the state again from the source, and touches no sink"
            )

    def _outdated(self, version: Version) -> str | None:
        """The first step whose state in this version was made by other rules, or is not there."""
        known = {name: state.fingerprint for name, state in version.steps.items()}
        return next((name for name, mark in self.marks.items() if known.get(name) != mark), None)

    def begin(
        self,
        start: Version,
        staged: Staged,
        *,
        batch_time_ms: int,
        positions: Positions,
        known: Iterable[Place],
        label: str,
        scratch: str,
    ) -> StateUpdate:
        """For a batch that ends at `positions`; `known` are the partitions that make the watermark."""
        before = Watermarks.from_json(start.watermark)
        after = before.after(self.clock, batch_time_ms, known, staged.greatest_ms)
        context = OperatorContext(
            self.spark,
            self.store,
            StepState(),
            batch_time_ms,
            before.watermark_ms,
            after.watermark_ms,
            number=start.number + 1,
            scratch=os.path.join(scratch, "steps"),
            label=label,
        )
        os.makedirs(context.scratch, exist_ok=True)
        seen_ms = {place: seen.greatest_ms for place, seen in before.places.items()}
        floors_ms = [
            own_watermark_ms(each, before.watermark_ms, self.clock) for each in staged.seen_before_ms(seen_ms)
        ]
        return StateUpdate(self, start, context, positions, after, floors_ms)

    def publish(self, made: Version, *, is_catch_up: bool) -> Version:
        """Make the version durable; one that stands there already stays when a batch is repeated."""
        known = self.store.find(made.positions) if is_catch_up else None
        if known is not None and known.number >= made.number and self._outdated(known) is None:
            return known
        self.store.publish(made)
        return made

    def forget(self, entries: Iterable[Entry]) -> None:
        """Remove the versions at which no sink stands; between two batches."""
        self.store.gc([entry.positions for entry in entries])


@dataclass
class StateUpdate:
    """The version that one micro-batch makes of another, step by step."""

    state: PipelineState
    start: Version
    context: OperatorContext
    """Of the batch; each step gets it with its own state."""
    positions: Positions
    after: Watermarks
    floors_ms: list[int | None]
    """By piece of the stage: the least own watermark that a row of it can have."""
    results: dict[str, OperatorResult] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.context.number

    def run(self, operator: StatefulOperator, rows: DataFrame) -> OperatorResult:
        """Let one step take the batch."""
        state = self.start.steps.get(operator.name, StepState())
        result = self.results[operator.name] = operator.run(rows, replace(self.context, state=state))
        return result

    @property
    def version(self) -> Version:
        """What all steps together have made."""
        steps = {
            name: replace(result.state, fingerprint=self.state.marks[name])
            for name, result in self.results.items()
        }
        return Version(self.number, self.positions, self.after.as_json(), steps, self.context.batch_time_ms)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """By step: what it counted."""
        return {
            name: {
                **{key: count for key, count in result.counters.items() if count},
                "taken": result.taken.rows,
                "late": result.late.rows,
                **({"duplicate": result.duplicate.rows} if result.duplicate.rows else {}),
                "rows": result.row_count,
            }
            for name, result in self.results.items()
        }


@dataclass
class Growth:
    """Watches how large the state becomes: told when it is large, and each time it has doubled since."""

    told_bytes: int = LARGE_BYTES // 2

    def message(self, state: StateNow | None) -> str | None:
        """What to tell, if anything."""
        if state is None or state.bytes < 2 * self.told_bytes:
            return None
        self.told_bytes = state.bytes
        largest = max(state.steps, key=lambda name: state.steps[name][1])
        rows, size = state.steps[largest]
        return (
            f"the state has {state.bytes / 2**30:.1f} GiB, {size / 2**30:.1f} GiB of it ({rows:,} rows) of step "
            f"{largest!r}: shorter times, or fewer keys, bound it"
        )


def shared_positions(entries: Iterable[Entry]) -> Positions:
    """Where all these sinks stand, in the partitions all of them know."""
    standings = [entry.positions.at for entry in entries]
    first, *others = standings
    return Positions(
        {
            place: at
            for place, at in first.items()
            if all(place in other and other[place].offset == at.offset for other in others)
        }
    )
