"""Writing one sink again from the log, up to where the others stand; the others are not touched.

For a sink that was lost or restored from an older copy, for one that fell behind the state, and for a new one that
shall have the past too. It goes on from where the sink's own ledger ends, or from where that began; in the batches of
then, with their times, as far as they are recorded. What it writes is a new generation of the sink's ledger.

It is a run of the same definition with one sink, in a home of its own (`<home>/refill/<sink>`) with a state of its own;
only the record of rows that left is the pipeline's, since audits ask for it as long as the sink has the batches.
So it is exactly-once as every run is: killed at any moment, the same command goes on where it stopped. Where the sink
goes on in the middle and steps remember, their state at that place is made first, as `rebuild` makes it. The pipeline's
home stays locked meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.cluster.places import master_of, require_places
from holdfast.pipeline.core.failures import DefinitionWrong, PipelineError
from holdfast.pipeline.definition.fingerprint import canonical, state_marks
from holdfast.pipeline.definition.model import Lookup, PipelineDefinition
from holdfast.pipeline.engine.deployment import Build, Deployment, build_sinks, explained
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.history import Cut, best_cuts
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.known_sinks import KnownSinks
from holdfast.pipeline.engine.monitoring import Monitoring
from holdfast.pipeline.engine.planning import Bounds, Limits, Log, Plan, plan_batch
from holdfast.pipeline.engine.progress import Progress, Summary
from holdfast.pipeline.engine.running import Loop, Stop, handled_signals, may_take_over, now_ms, open_session
from holdfast.pipeline.engine.source_view import SourceView
from holdfast.pipeline.ledger import STATELESS, Entry, Reached
from holdfast.pipeline.operations.rebuilding import (
    RebuildPlan,
    Replay,
    beginning_of,
    histories_of,
    lacking,
    take_the_place,
)
from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.pipeline.sinks.base import Sink
from holdfast.pipeline.state.store import StateStore, Version, discard_state, state_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.reader.cluster import Cluster

DIRECTORY: Final = "refill"


class CannotRefill(PipelineError):
    """There is nothing to refill up to, or the source no longer has what the sink had. Nothing was changed."""


@dataclass(frozen=True)
class RefillPlan:
    """What a refill would read; made without changing anything."""

    definition: PipelineDefinition
    """Secrets as references."""
    bootstrap: str | None
    sink: str
    has_to_forget: bool
    """Its ledger speaks of rows that are gone."""
    pipeline_began: Mapping[Place, int]
    begin: Mapping[Place, int]
    """Where the sink goes on."""
    target: Entry
    """Of the sink up to which it goes: the one that is furthest behind of the others."""
    cuts: tuple[Cut, ...]
    before: tuple[Cut, ...]
    """The batches before `begin`, of which the state is made."""
    ledgers: Mapping[str, Entry | None]
    generation: int
    """That the sink's entries belong to from now on."""
    notes: tuple[str, ...]

    @property
    def end(self) -> dict[Place, int]:
        return {place: at.offset for place, at in self.target.positions.at.items()}

    @property
    def offsets(self) -> int:
        return sum(cut.range.offsets for cut in self.cuts)

    def __str__(self) -> str:
        ranges = ", ".join(
            f"{place.topic}-{place.partition} [{self.begin[place]}, {end})"
            for place, end in sorted(self.end.items())
        )
        lines = [
            f"sink {self.sink!r} is written from {self.offsets:,} offsets in {len(self.cuts):,} batches: {ranges}",
            *self.notes,
            "the other sinks are not touched",
        ]
        return "\n".join(lines)


# ---------------------------------------------------------------------------- planning


def plan_refill(
    definition: PipelineDefinition,
    sink: str,
    *,
    bootstrap: str | None = None,
    from_available: bool = False,
    build: Build | None = None,
) -> RefillPlan:
    """Look at ledgers, log and source; nothing is changed."""
    from holdfast.reader.cluster import Cluster

    deployed = Deployment.of(definition, bootstrap)
    source, known = deployed.definition.source, deployed.known_sinks()
    ledgers, is_lost, is_hollow = _ledgers(deployed, sink, known, build)
    target = _target(sink, ledgers)
    with Cluster(deployed.settings) as cluster:
        logs = deployed.source(cluster).look({target.sink: target})
    mine = None if is_hollow else ledgers[sink]
    histories = histories_of(deployed)
    pipeline_began, notes = beginning_of(target.positions, logs, histories)
    began = known.began(sink)
    begin = {place: _begin_in(place, first, target, mine, began) for place, first in pipeline_began.items()}
    has_state = bool(state_marks(deployed.canonical))
    needed = pipeline_began if has_state else begin
    gone = {
        place: (needed[place], logs[place].start)
        for place in needed
        if place in logs and needed[place] < min(logs[place].start, target.positions.at[place].offset)
    }
    if gone:
        if not from_available:
            raise CannotRefill(
                f"the source no longer has all that sink {sink!r} had: {lacking(gone)}. Nothing was changed; "
                "--from-available writes it without them"
            )
        notes.append(f"the source no longer has all of it, and the sink will lack the rest: {lacking(gone)}")
        begin, pipeline_began = (
            {place: max(first, gone.get(place, (0, 0))[1]) for place, first in each.items()}
            for each in (begin, pipeline_began)
        )
    if any(isinstance(step, Lookup) for step in definition.steps):
        notes.append("reference tables are taken as they are now: those of then are not kept")
    limits = Limits(source.batch_records, source.batch_bytes)
    end = {place: at.offset for place, at in target.positions.at.items()}
    begin = {place: min(first, end[place]) for place, first in begin.items()}
    return RefillPlan(
        definition,
        bootstrap,
        sink,
        is_hollow,
        pipeline_began,
        begin,
        target,
        best_cuts(begin, end, histories, limits),
        best_cuts(pipeline_began, begin, histories, limits) if has_state else (),
        {**ledgers, sink: mine},
        known.generation(sink, ledgers) + is_lost,
        tuple(notes),
    )


def _ledgers(
    deployed: Deployment, sink: str, known: KnownSinks, build: Build | None
) -> tuple[dict[str, Entry | None], bool, bool]:
    """The newest entries of sinks that have what they had, and of this one; whether it is lost, its rows at least."""
    with deployed.sinks(build) as sinks:
        if sink not in sinks:
            raise DefinitionWrong(f"there is no sink {sink!r}; there are {', '.join(sinks)}")
        ledgers = {name: each.last_entry() for name, each in sinks.items()}
        lost = known.lost(sinks, ledgers)
        is_hollow = ledgers[sink] is not None and sinks[sink].missing() is not None
        if (ledgers[sink] is None or is_hollow) and sinks[sink].holds_rows():
            raise CannotRefill(
                f"sink {sink!r} holds rows, and no ledger says which: they would be there twice. Nothing was changed; "
                "move them away, or remove them, and refill again"
            )
    healthy = {name: entry for name, entry in ledgers.items() if name == sink or name not in lost}
    return healthy, sink in lost, is_hollow


def _target(sink: str, ledgers: Mapping[str, Entry | None]) -> Entry:
    others = [entry for name, entry in ledgers.items() if name != sink and entry is not None]
    if not others:
        raise CannotRefill(
            f"no other sink of the pipeline has its ledger, so nobody says how far {sink!r} is to be filled. "
            "`holdfast pipeline run FILE --accept-loss=…` with every sink begins where the definition says"
        )
    return min(others, key=lambda entry: sum(at.offset for at in entry.positions.at.values()))


def _begin_in(place: Place, first: int, target: Entry, mine: Entry | None, began: Positions | None) -> int:
    """Where the sink goes on in one partition."""
    for known in (None if mine is None else mine.positions, began if mine is None else None):
        if known is not None and place in known.at:
            return min(known.at[place].offset, target.positions.at[place].offset)
    return first


# ---------------------------------------------------------------------------- doing it


def perform_refill(
    plan: RefillPlan,
    *,
    master: str | None = None,
    shared_filesystem: bool = False,
    progress: Progress | None = None,
    spark: SparkSession | None = None,
    signals: bool = True,
    faults: Faults = no_faults,
    build: Build | None = None,
) -> Summary:
    """Write the sink, or what is left of it. A copy that runs keeps its home locked, and this is refused.

    Whatever goes wrong is raised as a `HoldfastError` whose text says what to do and holds no secret.
    """
    deployed = Deployment.of(plan.definition, plan.bootstrap)
    expanded, stop = deployed.definition, Stop()
    with explained(deployed.redactor):
        master = master_of(expanded, master)
        require_places(expanded, master, shared_filesystem=shared_filesystem)
        with deployed.home() as main, may_take_over(main, deployed.canonical):
            directory = os.path.join(main.path, DIRECTORY, plan.sink)
            sinks = tuple(each for each in expanded.sinks if each.name == plan.sink)
            alone = replace(deployed, definition=replace(expanded, sinks=sinks, home=directory))
            with (
                alone.home() as home,
                open_session(alone.definition, home, master, spark, progress) as session,
                handled_signals(stop, progress, signals),
            ):
                loop = Refill(
                    alone,
                    home,
                    session,
                    {plan.sink: (build or build_sinks)(expanded)[plan.sink]},
                    stop,
                    progress,
                    faults=faults,
                    bounds=Bounds(plan.begin, plan.end),
                    refill=plan,
                    main=main,
                )
                summary = loop.run(None)
            if summary.reason == "done":
                shutil.rmtree(directory, ignore_errors=True)
                told = {"pipeline": expanded.name, "sink": plan.sink, "batches": summary.batches}
                main.log({"event": "refilled", **told})
        return summary


@dataclass(kw_only=True)
class Refill(Loop):
    """A run of one sink, from where it goes on to where the others stand."""

    refill: RefillPlan
    main: Home
    """Of the pipeline itself."""

    def _refuse_unsafe(self, source: SourceView) -> None:
        """Asked before, of the pipeline's own home."""

    def _monitoring(self, cluster: Cluster) -> Monitoring | None:
        return None

    def _known(self, cluster: Cluster) -> KnownSinks:
        return _Refilled(self.main, self.refill)

    def _open_sinks(self, opened: contextlib.ExitStack) -> None:
        super()._open_sinks(opened)
        if self.refill.has_to_forget:
            self.sinks[self.refill.sink].forget()

    def _repeat(self, source: SourceView, interval_ms: int | None) -> None:
        state = self._state_before()
        name, at = self.refill.sink, self.workshop.ledgers[self.refill.sink]
        others = (entry for each, entry in self.refill.ledgers.items() if each != name)
        self.workshop.beside = tuple(entry for entry in others if entry is not None)
        missing = {
            place: Position(offset)
            for place, offset in self.refill.begin.items()
            if at is None or place not in at.positions.at or at.positions.at[place].offset < offset
        }
        if missing or at is None:
            self.workshop.open_at(name, Positions(missing), now_ms(), state)
            self.known.note(self.workshop.ledgers)
        super()._repeat(source, interval_ms)
        if not self.stop.is_asked:
            self._join_the_others()

    def _open_partitions(self, source: SourceView, logs: Mapping[Place, Log]) -> None:
        """All are opened; those that are new since are the next run's."""

    def _plan(self, logs: Mapping[Place, Log], until: Mapping[Place, int] | None) -> Plan | None:
        """The next batch of then; where a batch was begun otherwise, what is left is cut anew."""
        unfinished = self.workshop.unfinished()
        entry = self.workshop.ledgers[self.refill.sink]
        assert entry is not None, "it was opened"
        at = {place: position.offset for place, position in entry.positions.at.items()}
        for cut in () if unfinished else self.refill.cuts:
            if all(at.get(place) == span.start for place, span in cut.range.spans.items()):
                return Plan(cut.range, (self.refill.sink,), cut.batch_time_ms, rejected=cut.rejected)
        return plan_batch(self.workshop.ledgers, logs, self._limits(), until=until, unfinished=unfinished)

    # -------------------------------------------------------------------- the state

    def _state_before(self) -> Version | None:
        """The state where the sink goes on: made now, unless it is there from an earlier attempt, or begins there."""
        state, begin = self.workshop.state, self.refill.begin
        entry = self.workshop.ledgers[self.refill.sink]
        if state is None:
            return None
        if begin == self.refill.pipeline_began:
            if entry is None or entry.state is None:  # what an earlier attempt has left would only count on
                discard_state(state.store.path)
                state.store = StateStore(state.store.path)
            return None
        start = Positions({place: Position(offset) for place, offset in begin.items()})
        found = state.store.find(start)
        if found is None:
            known = None if entry is None or entry.state == STATELESS else entry.state
            plan = RebuildPlan(
                replace(self.refill.definition, sinks=()),
                self.refill.bootstrap,
                self.refill.pipeline_began,
                start,
                self.refill.before,
                max(0, (known or 0) - len(self.refill.before)),
                {},
                (),
            )
            cluster = self.workshop.cluster
            found = Replay(plan, self.deployed, self.home, self.spark, cluster, self.progress).run()
            take_the_place(self.home.path)
            state.store = StateStore(state_path(self.home.path))
        return found

    def _join_the_others(self) -> None:
        """The next run goes on from the pipeline's own state: the sink's ledger names that."""
        target, name = self.refill.target, self.refill.sink
        entry = self.workshop.ledgers[name]
        assert entry is not None, "it was opened"
        if self.workshop.state is None or entry.state == target.state:
            return
        store = StateStore(state_path(self.main.path))
        version = store.find(target.positions)
        if version is None:
            return  # the next run says that the state is missing, for all sinks alike
        if entry.state is not None and version.number < entry.state:
            # Rows that a stateful step makes carry the number: none that comes may be below one that the sink has.
            version = replace(version, number=entry.state)
            store.publish(version)
        self.workshop.open_at(name, target.positions, now_ms(), version)
        self.known.note(self.workshop.ledgers)


class _Refilled(KnownSinks):
    """Of the sink that is refilled: what it lacks is known, and its entries begin a generation."""

    def __init__(self, home: Home, plan: RefillPlan) -> None:
        super().__init__(home, canonical(plan.definition))
        self._plan = plan

    def lost(self, sinks: Mapping[str, Sink], ledgers: Mapping[str, Entry | None]) -> dict[str, str]:
        return {}

    def generation(self, name: str, ledgers: Mapping[str, Entry | None]) -> int:
        return self._plan.generation

    def others(self, name: str, ledgers: Mapping[str, Entry | None]) -> dict[str, Reached]:
        return super().others(name, self._plan.ledgers)
