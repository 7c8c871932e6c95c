"""Making the state of a pipeline anew, for its definition as it stands, from the source; no sink is touched.

The source is read again from where the pipeline began to where its sinks stand, in the batches of then as far as they
are recorded, and every step with a memory takes its turns from nothing. What comes out is one version of the state that
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.changes.classifying import Level, UnsafeChange, classify
from holdfast.pipeline.changes.history import Recorded, beginnings, kept_entries, of_entries, recorded_batches
from holdfast.pipeline.cluster.places import master_of, require_places
from holdfast.pipeline.core.failures import DefinitionWrong, PipelineError
from holdfast.pipeline.definition.fingerprint import canonical, state_marks
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import client_settings, home_of
from holdfast.pipeline.definition.secrets import expand_definition
from holdfast.pipeline.engine.failures import explain_failure
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.known_sinks import KnownSinks, refuse_lost
from holdfast.pipeline.engine.lookups import Lookups
from holdfast.pipeline.engine.planning import Limits, Log
from holdfast.pipeline.engine.progress import BatchDone, Progress, Started, StateNow, Warned
from holdfast.pipeline.engine.running import build_sinks, open_session, own_topics, redacted
from holdfast.pipeline.engine.source_view import SourceView, read_places
from holdfast.pipeline.ledger import STATELESS, Entry, Intake
from holdfast.pipeline.operations.replaying import Cut, cuts, recorded_offsets
from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.pipeline.sinks.base import Sink, SinkContext
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.state.segments import StateDamaged, StepState
from holdfast.pipeline.state.store import StateStore, Version, discard_state, state_path
from holdfast.pipeline.state.watermarks import Clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.pipeline.engine.stateful import Memory
    from holdfast.reader.cluster import Cluster

ASIDE: Final = "state.rebuild"
"""Beside the state, while it is made."""
BEFORE: Final = "state.before"
"""The old one, for the moment in which they change places."""

Build = Callable[[PipelineDefinition], dict[str, Sink]]


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
            f"the state of {', '.join(state_marks(canonical(self.definition)))} is made anew from {self.offsets:,} "
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

    expanded, _ = expand_definition(definition)
    if not state_marks(canonical(definition)):
        raise DefinitionWrong("no step of the pipeline remembers anything: there is no state to rebuild")
    home, settings = home_of(expanded), client_settings(expanded, bootstrap)
    _refuse_refused(definition, home)
    entries = _ledgers(definition, expanded, settings, build or build_sinks)
    standing = _one_place(entries)
    with Cluster(settings) as cluster:
        logs = SourceView(cluster, expanded.source, own_topics(expanded)).look(dict(entries))
    histories = histories_of(expanded, home)
    end = _with_new_partitions(standing, logs)
    begin, notes = beginning_of(end, logs, histories)
    missing = {
        place: logs[place].start - first
        for place, first in begin.items()
        if place in logs and logs[place].start > first
    }
    if missing:
        told = ", ".join(
            f"{place.topic}-{place.partition} lacks offsets {begin[place]} to {logs[place].start - 1}"
            for place in sorted(missing)
        )
        if not from_available:
            raise CannotRebuild(
                f"the source no longer has {sum(missing.values()):,} of the offsets that the state was made of: "
                f"{told}. Nothing was changed; --from-available makes the state without them"
            )
        begin = {
            place: max(first, logs[place].start) if place in logs else first for place, first in begin.items()
        }
        notes.append(f"{sum(missing.values()):,} offsets are gone, and the state will lack them: {told}")
    ends = {place: at.offset for place, at in end.at.items()}
    begin = {place: min(first, ends[place]) for place, first in begin.items()}
    limits = Limits(expanded.source.batch_records, expanded.source.batch_bytes)
    chosen = max(
        (tuple(cuts(begin, ends, history, limits)) for history in [*histories, []]), key=recorded_offsets
    )
    own = sum(cut.range.offsets for cut in chosen) - recorded_offsets(chosen)
    if own:
        notes.append(f"the batches of {own:,} of the offsets are not recorded: they are cut anew")
    return RebuildPlan(
        definition, bootstrap, begin, end, chosen, _number(home, entries), missing, tuple(notes)
    )


def _refuse_refused(definition: PipelineDefinition, home: str) -> None:
    """A rebuild makes what needs one possible, and nothing that is refused."""
    from holdfast.pipeline.operations.against_running import kept_definition

    before = kept_definition(home)
    found = [] if before is None else classify(before, canonical(definition))
    refused = [change for change in found if change.level is Level.REFUSED]
    if refused:
        lines = "\n".join(f"  refused: {change}" for change in refused)
        raise UnsafeChange(
            f"A rebuild does not help: the definition cannot take over from the one that ran last\n{lines}",
            refused,
        )


def _ledgers(
    plain: PipelineDefinition, definition: PipelineDefinition, settings: Mapping[str, str], build: Build
) -> dict[str, Entry]:
    """The newest entry of every sink that has one; those that had one and have not are refused."""
    known = KnownSinks(Home(home_of(definition), definition.name), canonical(plain))
    context = SinkContext(definition.name, home_of(definition), settings, os.urandom(6).hex())
    with contextlib.ExitStack() as stack:
        sinks = build(definition)
        for name, sink in sinks.items():
            stack.callback(sink.close)
            sink.open(context, None)
            if sink.unfinished() is not None:
                raise CannotRebuild(_apart(f"sink {name!r} has a batch half"))
        ledgers = {name: sink.last_entry() for name, sink in sinks.items()}
        found = {name: entry for name, entry in ledgers.items() if entry is not None}
        refuse_lost(known.lost(sinks, ledgers), has_others=bool(found))
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


def _with_new_partitions(standing: Positions, logs: Mapping[Place, Log]) -> Positions:
    """Partitions that sinks do not know yet: the next run opens them at the start of their logs."""
    new = {place: Position(log.start) for place, log in logs.items() if place not in standing.at}
    return Positions({**standing.at, **new})


def histories_of(definition: PipelineDefinition, home: str) -> list[list[Recorded]]:
    """What the log and the ledgers know of the past, each by itself."""
    found = [recorded_batches(home)]
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
    expanded, redactor = expand_definition(plan.definition)
    try:
        master = master_of(expanded, master)
        require_places(expanded, master, shared_filesystem=shared_filesystem)
        return _perform(plan, expanded, master, progress, spark)
    except Exception as error:
        explained = redacted(explain_failure(error), redactor)
        if explained is error:
            raise
        raise explained from error


def _perform(
    plan: RebuildPlan,
    expanded: PipelineDefinition,
    master: str | None,
    progress: Progress | None,
    spark: SparkSession | None,
) -> Rebuilt:
    from holdfast.reader.cluster import Cluster

    started = time.monotonic()
    settings = client_settings(expanded, plan.bootstrap)
    with (
        Home(home_of(expanded), expanded.name) as home,
        open_session(expanded, home, master, spark, progress) as session,
        Cluster(settings) as cluster,
    ):
        turns = Turns(plan, expanded, settings, home, session, cluster, progress)
        try:
            version = turns.run()
        except BaseException:
            discard_state(turns.path)
            raise
        take_the_place(home.path)
        home.note_definition(canonical(plan.definition))
        rebuilt = Rebuilt(
            expanded.name,
            version,
            len(plan.cuts),
            turns.intake,
            turns.shrunk,
            sum(plan.missing.values()),
            round((time.monotonic() - started) * 1000),
        )
        home.log({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **rebuilt.as_json()})
    return rebuilt


class Turns:
    """One replay, from nothing to where the sinks stand."""

    def __init__(
        self,
        plan: RebuildPlan,
        definition: PipelineDefinition,
        settings: Mapping[str, str],
        home: Home,
        spark: SparkSession,
        cluster: Cluster,
        progress: Progress | None,
    ) -> None:
        self.path = os.path.join(home.path, ASIDE)
        self.intake = Intake()
        self.shrunk = 0
        self._plan = plan
        self._definition = definition
        self._settings = settings
        self._home = home
        self._spark = spark
        self._cluster = cluster
        self._progress = progress or (lambda event: None)
        self._now_ms = time.time_ns() // 1_000_000

    def run(self) -> Version:
        from holdfast.pipeline.engine.routing import Router
        from holdfast.pipeline.engine.staging import stage_spec, warm_up
        from holdfast.pipeline.engine.stateful import FRESH, Memory

        discard_state(self.path)
        event = self._definition.source.event_time
        assert event is not None, "the rules ask for one where a step remembers"
        marks = state_marks(canonical(self._plan.definition))
        memory = Memory(self._spark, StateStore(self.path), Clock.of(event), marks)
        self._spec = stage_spec(self._definition, self._settings)
        warm_up(self._spec)
        self._lookups = Lookups(self._definition, self._home.path)
        self._router = Router(self._spark, self._definition, self._lookups)
        self._progress(Started(self._definition.name, self._home.path, ("state",), self._plan.offsets))
        version = replace(FRESH, number=self._plan.number)
        at = {place: Position(first) for place, first in self._plan.begin.items()}
        left = self._plan.offsets
        for number, cut in enumerate(self._plan.cuts, start=1):
            at.update({place: self._position(place, span.end) for place, span in cut.range.spans.items()})
            is_last = number == len(self._plan.cuts)
            stands = dict(self._plan.end.at) if is_last else {place: at[place] for place in cut.opened}
            left -= cut.range.offsets
            version = self._turn(memory, version, cut, Positions(stands), number, left)
        if not self._plan.cuts:
            steps = {name: StepState(fingerprint=mark) for name, mark in marks.items()}
            version = Version(version.number + 1, self._plan.end, {}, steps, self._now_ms)
            memory.publish(version, is_catch_up=False)
        return version

    def _position(self, place: Place, offset: int) -> Position:
        final = self._plan.end.at[place]
        return final if final.offset == offset else Position(offset)

    def _turn(
        self, memory: Memory, start: Version, cut: Cut, positions: Positions, number: int, left: int
    ) -> Version:
        from holdfast.pipeline.engine.staging import stage

        began = time.monotonic()
        batch_time_ms = self._now_ms if cut.batch_time_ms is None else cut.batch_time_ms
        label, directory = self._home.new_stage()
        try:
            spec = replace(self._spec, directory=directory, rejected=cut.rejected)
            staged = stage(self._spark, self._cluster, spec, cut.range)
            turns = memory.begin(
                start,
                staged,
                batch_time_ms=batch_time_ms,
                positions=positions,
                known=read_places(self._definition.source, positions),
                label=label,
                scratch=directory,
            )
            pinned = self._lookups.pinned({}, self._now_ms)
            routed = self._router.walk(staged, batch_time_ms, directory, turns, pinned).settle()
            version = memory.publish(turns.version, is_catch_up=False)
            memory.store.gc([])
        finally:
            self._home.remove_stage(label)
        self._count(cut, staged.intake)
        self._progress(
            BatchDone(
                number=number,
                range=cut.range,
                batch_time_ms=batch_time_ms,
                intake=staged.intake,
                routes=routed.routes,
                warned=routed.warned,
                rows_by_sink={},
                duration_ms=round((time.monotonic() - began) * 1000),
                times_ms={},
                lag=left,
                turns=turns.counts,
                state=StateNow.of(version),
            )
        )
        return version

    def _count(self, cut: Cut, intake: Intake) -> None:
        from holdfast.pipeline.engine.progress import add_intakes

        self.intake = add_intakes(self.intake, intake)
        then = cut.intake
        if then is not None and (then.records, then.digest) != (intake.records, intake.digest):
            self.shrunk += 1
            if self.shrunk == 1:
                self._progress(
                    Warned(
                        f"the range {cut.range} had {then.records:,} records when it was first read, and has "
                        f"{intake.records:,} now: the state is made of what is there"
                    )
                )


def take_the_place(home: str, disk: Disk | None = None) -> None:
    """The new state becomes the state."""
    disk = disk or Disk()
    current, before = state_path(home), os.path.join(home, BEFORE)
    discard_state(before)
    if os.path.isdir(current):
        disk.rename(current, before)
    disk.rename(os.path.join(home, ASIDE), current)
    disk.flush_directory(home)
    discard_state(before)
