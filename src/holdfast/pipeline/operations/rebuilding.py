"""Rebuilding the state of a pipeline, for its definition as it stands, from the source; no sink is touched.

The source is read again from where the pipeline began to where its sinks stand, in the batches of then as far as they
are recorded, and every step with a state takes them from nothing. What comes out is one version of the state that
stands exactly where the sinks stand: the next run goes on from it.

- All sinks stand at one place, and no batch is half in one of them: else there is not one state but several. The
  definition that ran last brings them together, by one run.
- The state is made beside the old one, and takes its place by a rename when it is complete and flushed. A rebuild
  that is cut short leaves the old state, or none; a run then asks for a rebuild again.
- Reference tables are taken as they are now: their versions of then are not kept.
- What the source no longer has is named, and refused unless it is accepted. What a batch of then had and its range no
  longer has (compacted away meanwhile) is counted and told.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.changes.classifying import UnsafeChange, classify
from holdfast.pipeline.changes.levels import Level
from holdfast.pipeline.cluster.places import master_of, require_places
from holdfast.pipeline.core.failures import DefinitionWrong, PipelineError
from holdfast.pipeline.definition.fingerprint import canonical, state_marks
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.engine.deployment import Build, Deployment, explained
from holdfast.pipeline.engine.history import (
    Cut,
    Recorded,
    beginnings,
    best_cuts,
    kept_entries,
    of_entries,
    recorded_batches,
    recorded_offsets,
)
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.known_sinks import refuse_lost
from holdfast.pipeline.engine.planning import Limits, Log
from holdfast.pipeline.engine.progress import (
    BatchDone,
    Event,
    Progress,
    Started,
    StateNow,
    Warned,
    add_intakes,
)
from holdfast.pipeline.engine.routing import Router
from holdfast.pipeline.engine.running import now_ms, open_session
from holdfast.pipeline.engine.source_view import read_places
from holdfast.pipeline.engine.staging import stage, stage_spec, warm_up
from holdfast.pipeline.engine.stateful import FRESH, PipelineState
from holdfast.pipeline.ledger import STATELESS, Entry, Intake
from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.state.lookups import Lookups
from holdfast.pipeline.state.segments import StateDamaged, StepState
from holdfast.pipeline.state.store import StateStore, Version, discard_state, state_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.reader.cluster import Cluster

ASIDE: Final = "state.rebuild"
"""Beside the state, while it is made."""
BEFORE: Final = "state.before"
"""The old one, for the moment in which they change places."""


class CannotRebuild(PipelineError):
    """There is no one state to make, or the source no longer has what it would be made of. Nothing was changed."""


@dataclass(frozen=True)
class RebuildPlan:
    """What a rebuild would read; made without changing anything."""

    definition: PipelineDefinition
    """Secrets as references."""
    bootstrap: str | None
    begin: Mapping[Place, int]
    end: Positions
    cuts: tuple[Cut, ...]
    number: int
    """Of the newest version that ledgers or the old state know: the new ones count on."""
    missing: Mapping[Place, int]
    """Offsets that the source no longer has, by partition; accepted."""
    notes: tuple[str, ...]

    @property
    def offsets(self) -> int:
        return sum(cut.range.offsets for cut in self.cuts)

    def __str__(self) -> str:
        ranges = ", ".join(
            f"{place.topic}-{place.partition} [{self.begin[place]}, {at.offset})"
            for place, at in sorted(self.end.at.items())
        )
        lines = [
            f"the state of {', '.join(state_marks(canonical(self.definition)))} is rebuilt from {self.offsets:,} "
            f"offsets in {len(self.cuts):,} batches: {ranges}",
            *self.notes,
            "sinks are not touched",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild did."""

    pipeline: str
    version: Version
    batches: int
    intake: Intake
    shrunk: int
    """Batches whose range had more records when they were first read."""
    missing: int
    duration_ms: int

    def as_json(self) -> dict[str, Any]:
        return {
            "event": "rebuilt",
            "pipeline": self.pipeline,
            "version": self.version.number,
            "positions": self.version.positions.as_json(),
            "batches": self.batches,
            "intake": self.intake.as_json(),
            "batches_with_fewer_records": self.shrunk,
            "offsets_missing": self.missing,
            "steps": {
                name: {"rows": state.rows, "bytes": state.bytes} for name, state in self.version.steps.items()
            },
            "duration_ms": self.duration_ms,
        }

    def rows(self) -> list[tuple[str, str]]:
        """For people, as lines of two cells."""
        found = [
            ("batches", f"{self.batches:,}"),
            ("records", f"{self.intake.records:,}"),
            ("time", f"{self.duration_ms / 1000:,.1f} s"),
            ("version", f"{self.version.number:,}"),
        ]
        found += [
            (f"remembered by {name}", f"{state.rows:,} rows, {state.bytes:,} bytes")
            for name, state in self.version.steps.items()
        ]
        if self.missing:
            found.append(("offsets the source no longer had", f"{self.missing:,}"))
        if self.shrunk:
            found.append(("batches with fewer records than then", f"{self.shrunk:,}"))
        return found


# ---------------------------------------------------------------------------- planning


def plan_rebuild(
    definition: PipelineDefinition,
    *,
    bootstrap: str | None = None,
    from_available: bool = False,
    build: Build | None = None,
) -> RebuildPlan:
    """Look at ledgers, log and source; nothing is changed."""
    from holdfast.reader.cluster import Cluster

    deployed = Deployment.of(definition, bootstrap)
    source = deployed.definition.source
    if not state_marks(deployed.canonical):
        raise DefinitionWrong("no step of the pipeline remembers anything: there is no state to rebuild")
    _refuse_refused(deployed)
    entries = _ledgers(deployed, build)
    standing = _one_place(entries)
    with Cluster(deployed.settings) as cluster:
        logs = deployed.source(cluster).look(dict(entries))
    histories = histories_of(deployed)
    # Partitions that sinks do not know yet: the next run opens them at the start of their logs.
    new = {place: Position(log.start) for place, log in logs.items() if place not in standing.at}
    end = Positions({**standing.at, **new})
    begin, notes = beginning_of(end, logs, histories)
    missing = {
        place: logs[place].start - first
        for place, first in begin.items()
        if place in logs and logs[place].start > first
    }
    if missing:
        told = lacking({place: (begin[place], logs[place].start) for place in missing})
        if not from_available:
            raise CannotRebuild(
                f"the source no longer has {sum(missing.values()):,} of the offsets that the state was made of: "
                f"{told}. Nothing was changed; --from-available makes the state without them"
            )
        begin = {place: first + missing.get(place, 0) for place, first in begin.items()}
        notes.append(f"{sum(missing.values()):,} offsets are gone, and the state will lack them: {told}")
    ends = {place: at.offset for place, at in end.at.items()}
    begin = {place: min(first, ends[place]) for place, first in begin.items()}
    chosen = best_cuts(begin, ends, histories, Limits(source.batch_records, source.batch_bytes))
    own = sum(cut.range.offsets for cut in chosen) - recorded_offsets(chosen)
    if own:
        notes.append(f"the batches of {own:,} of the offsets are not recorded: they are cut anew")
    number = _number(deployed.home_path, entries)
    return RebuildPlan(definition, bootstrap, begin, end, chosen, number, missing, tuple(notes))


def lacking(gone: Mapping[Place, tuple[int, int]]) -> str:
    """Which offsets the source no longer has: by partition from the one up to the other."""
    return ", ".join(
        f"{place.topic}-{place.partition} lacks offsets {first} to {start - 1}"
        for place, (first, start) in sorted(gone.items())
    )


def _refuse_refused(deployed: Deployment) -> None:
    """A rebuild makes what needs one possible, and nothing that is refused."""
    before = deployed.home().kept_definition()
    found = [] if before is None else classify(before, deployed.canonical)
    refused = [change for change in found if change.level is Level.REFUSED]
    if refused:
        lines = "\n".join(f"  refused: {change}" for change in refused)
        raise UnsafeChange(
            f"A rebuild does not help: the definition cannot take over from the one that ran last\n{lines}",
            refused,
        )


def _ledgers(deployed: Deployment, build: Build | None) -> dict[str, Entry]:
    """The newest entry of every sink that has one; those that had one and have not are refused."""
    with deployed.sinks(build) as sinks:
        for name, sink in sinks.items():
            if sink.unfinished() is not None:
                raise CannotRebuild(_apart(f"sink {name!r} has a batch half"))
        ledgers = {name: sink.last_entry() for name, sink in sinks.items()}
        found = {name: entry for name, entry in ledgers.items() if entry is not None}
        refuse_lost(deployed.known_sinks().lost(sinks, ledgers), has_others=bool(found))
    return found


def _apart(why: str) -> str:
    return (
        f"{why}, so that there is not one state to make. Run the pipeline once with the definition that ran last, then "
        "rebuild with the new one; `holdfast pipeline refill FILE SINK` brings a sink along where such a run cannot. "
        "Nothing was changed"
    )


def _one_place(entries: Mapping[str, Entry]) -> Positions:
    if not entries:
        raise CannotRebuild(
            "no sink has a ledger: the pipeline has not run, and there is no state to rebuild"
        )
    offsets = {
        name: {place: at.offset for place, at in entry.positions.at.items()}
        for name, entry in entries.items()
    }
    first, *others = offsets
    for name in others:
        if offsets[name] != offsets[first]:
            raise CannotRebuild(_apart(f"sinks {first!r} and {name!r} do not stand at the same place"))
    return entries[first].positions


def histories_of(deployed: Deployment) -> list[list[Recorded]]:
    """What the log and the ledgers know of the past, each by itself."""
    definition = deployed.definition
    found = [recorded_batches(deployed.home_path)]
    for sink in definition.sinks:
        entries = kept_entries(definition, sink)
        if entries:
            found.append(of_entries(entries))
    return [history for history in found if history]


def beginning_of(
    end: Positions, logs: Mapping[Place, Log], histories: Iterable[list[Recorded]]
) -> tuple[dict[Place, int], list[str]]:
    """Where the pipeline began in each partition: the earliest that is recorded, else the log's start; and what of it
    is to be said."""
    known: dict[Place, int] = {}
    for history in histories:
        for place, first in beginnings(history).items():
            known[place] = min(first, known.get(place, first))
    begin: dict[Place, int] = {}
    guessed: list[str] = []
    later: list[str] = []
    for place, at in end.at.items():
        name = f"{place.topic}-{place.partition}"
        log = logs.get(place)
        if place not in known:
            begin[place] = at.offset if log is None else log.start
            if begin[place] < at.offset:
                guessed.append(name)
            continue
        begin[place] = known[place]
        if log is not None and log.start < known[place] < at.offset:
            later.append(f"{name} at {known[place]} (its log begins at {log.start})")
    notes = []
    if guessed:
        where = ", ".join(sorted(guessed))
        notes.append(f"where the pipeline began in {where} is not recorded: it is read from the log's start")
    if later:
        notes.append(f"the earliest batch that is recorded began in {', '.join(sorted(later))}")
    return begin, notes


def _number(home: str, entries: Mapping[str, Entry]) -> int:
    known = [
        entry.state for entry in entries.values() if entry.state is not None and entry.state != STATELESS
    ]
    with contextlib.suppress(StateDamaged, OSError):
        newest = StateStore(state_path(home), is_writer=False).newest()
        if newest is not None:
            known.append(newest.number)
    return max(known, default=0)


# ---------------------------------------------------------------------------- doing it


def perform_rebuild(
    plan: RebuildPlan,
    *,
    master: str | None = None,
    shared_filesystem: bool = False,
    progress: Progress | None = None,
    spark: SparkSession | None = None,
) -> Rebuilt:
    """Make the state. A copy that runs keeps its home locked, and this is refused.

    Whatever goes wrong is raised as a `HoldfastError` whose text says what to do and holds no secret.
    """
    from holdfast.reader.cluster import Cluster

    started = time.monotonic()
    deployed = Deployment.of(plan.definition, plan.bootstrap)
    with explained(deployed.redactor):
        master = master_of(deployed.definition, master)
        require_places(deployed.definition, master, shared_filesystem=shared_filesystem)
        with (
            deployed.home() as home,
            open_session(deployed.definition, home, master, spark, progress) as session,
            Cluster(deployed.settings) as cluster,
        ):
            replay = Replay(plan, deployed, home, session, cluster, progress)
            try:
                version = replay.run()
            except BaseException:
                discard_state(replay.path)
                raise
            take_the_place(home.path)
            home.note_definition(deployed.canonical)
            rebuilt = Rebuilt(
                plan.definition.name,
                version,
                len(plan.cuts),
                replay.intake,
                replay.shrunk,
                sum(plan.missing.values()),
                round((time.monotonic() - started) * 1000),
            )
            home.log({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **rebuilt.as_json()})
        return rebuilt


@dataclass
class Replay:
    """The batches of then once more through the steps, from nothing to where the sinks stand."""

    plan: RebuildPlan
    deployed: Deployment
    home: Home
    spark: SparkSession
    cluster: Cluster
    progress: Progress | None
    intake: Intake = field(default_factory=Intake, init=False)
    shrunk: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.path = os.path.join(self.home.path, ASIDE)
        self._now_ms = now_ms()

    def run(self) -> Version:
        plan, definition = self.plan, self.deployed.definition
        discard_state(self.path)
        event = definition.source.event_time
        assert event is not None, "the rules ask for one where a step remembers"
        state = PipelineState.of(self.spark, self.path, event, canonical(plan.definition))
        self._spec = stage_spec(definition, self.deployed.settings)
        warm_up(self._spec)
        self._lookups = Lookups(definition, self.home.path)
        self._router = Router(self.spark, definition, self._lookups)
        self._tell(Started(definition.name, self.home.path, ("state",), plan.offsets))
        version = replace(FRESH, number=plan.number)
        at = {place: Position(first) for place, first in plan.begin.items()}
        left = plan.offsets
        for number, cut in enumerate(plan.cuts, start=1):
            at.update({place: self._position(place, span.end) for place, span in cut.range.spans.items()})
            is_last = number == len(plan.cuts)
            stands = dict(plan.end.at) if is_last else {place: at[place] for place in cut.opened}
            left -= cut.range.offsets
            version = self._batch(state, version, cut, Positions(stands), number, left)
        if not plan.cuts:
            steps = {name: StepState(fingerprint=mark) for name, mark in state.marks.items()}
            version = Version(version.number + 1, plan.end, {}, steps, self._now_ms)
            state.publish(version, is_catch_up=False)
        return version

    def _position(self, place: Place, offset: int) -> Position:
        final = self.plan.end.at[place]
        return final if final.offset == offset else Position(offset)

    def _batch(
        self, state: PipelineState, start: Version, cut: Cut, positions: Positions, number: int, left: int
    ) -> Version:
        began = time.monotonic()
        batch_time_ms = self._now_ms if cut.batch_time_ms is None else cut.batch_time_ms
        label, directory = self.home.new_stage()
        try:
            spec = replace(self._spec, directory=directory, rejected=cut.rejected)
            staged = stage(self.spark, self.cluster, spec, cut.range)
            update = state.begin(
                start,
                staged,
                batch_time_ms=batch_time_ms,
                positions=positions,
                known=read_places(self.deployed.definition.source, positions),
                label=label,
                scratch=directory,
            )
            pinned = self._lookups.pinned({}, self._now_ms)
            routed = self._router.walk(staged, batch_time_ms, directory, update, pinned).settle()
            version = state.publish(update.version, is_catch_up=False)
            state.store.gc([])
        finally:
            self.home.remove_stage(label)
        self._count(cut, staged.intake)
        self._tell(
            BatchDone(
                cut.range,
                batch_time_ms,
                staged.intake,
                routed.routes,
                routed.warned,
                rows_by_sink={},
                number=number,
                duration_ms=round((time.monotonic() - began) * 1000),
                lag=left,
                step_counts=update.counts,
                state=StateNow.of(version),
            )
        )
        return version

    def _count(self, cut: Cut, intake: Intake) -> None:
        self.intake = add_intakes(self.intake, intake)
        then = cut.intake
        if then is not None and (then.records, then.digest) != (intake.records, intake.digest):
            self.shrunk += 1
            if self.shrunk == 1:
                self._tell(
                    Warned(
                        f"the range {cut.range} had {then.records:,} records when it was first read, and has "
                        f"{intake.records:,} now: the state is made of what is there"
                    )
                )

    def _tell(self, event: Event) -> None:
        if self.progress is not None:
            self.progress(event)


def take_the_place(home: str) -> None:
    """The new state becomes the state."""
    disk = Disk()
    current, before = state_path(home), os.path.join(home, BEFORE)
    discard_state(before)
    if os.path.isdir(current):
        disk.rename(current, before)
    disk.rename(os.path.join(home, ASIDE), current)
    disk.flush_directory(home)
    discard_state(before)
