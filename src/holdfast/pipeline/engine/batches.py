"""One batch, from its plan to the sinks' ledgers.

The order is what the guarantees rest on:

1. the plan is on the disk;
2. the range is read once, into the stage, and counted;
3. every sink of the plan writes its rows aside, and counts them where they stand; rows are counted by route, before
   that or while the first sink takes them;
4. the routes agree with the intake, by number and by digest;
5. the sinks' counts agree with the routes;
6. only now each sink commits, rows and ledger entry in one act, the dead letter first.

A failure before 6 leaves nothing visible anywhere. A failure within 6 leaves some sinks ahead, and their ledgers say
so: the others catch up alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME
from holdfast.pipeline.engine.failures import PipelineError, Unbalanced
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.planning import Plan, opening_range
from holdfast.pipeline.engine.routing import Routed, Router
from holdfast.pipeline.engine.staging import Staged, StageSpec, Tally, stage
from holdfast.pipeline.ledger import NOWHERE, Decision, Entry, Intake, Routes, decide
from holdfast.pipeline.positions import BatchRange, Positions
from holdfast.pipeline.sinks.base import Batch, Prepared, Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from holdfast.reader.cluster import Cluster


@dataclass
class Stopwatch:
    """Milliseconds by phase."""

    times_ms: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            spent = round((time.monotonic() - started) * 1000)
            self.times_ms[name] = self.times_ms.get(name, 0) + spent


@dataclass(frozen=True)
class BatchResult:
    intake: Intake
    routes: Routes
    warned: Mapping[str, int]
    rows_by_sink: Mapping[str, int]
    times_ms: Mapping[str, int]


@dataclass
class Workshop:
    """What batches are made with."""

    spark: SparkSession
    cluster: Cluster
    definition: PipelineDefinition
    fingerprint: str
    home: Home
    router: Router
    spec: StageSpec
    sinks: Mapping[str, Sink]
    """By name, the dead letter first: the order in which they prepare and commit."""
    faults: Faults = no_faults
    ledgers: dict[str, Entry | None] = field(default_factory=dict)
    """The newest entry of each sink, as the sinks said or we committed."""

    def read_ledgers(self) -> None:
        self.ledgers = {name: sink.last_entry() for name, sink in self.sinks.items()}
        for name, entry in self.ledgers.items():
            if entry is not None and entry.pipeline != self.definition.name:
                raise PipelineError(
                    f"sink {name!r} holds the ledger of pipeline {entry.pipeline!r}, not of {self.definition.name!r}: "
                    "two pipelines cannot share a sink; give this one a place of its own"
                )

    def unfinished(self) -> dict[str, Entry]:
        found = {}
        for name, sink in self.sinks.items():
            entry = sink.unfinished()
            if entry is not None:
                found[name] = entry
        return found

    # -------------------------------------------------------------------- openings

    def open_at(self, name: str, positions: Positions, batch_time_ms: int) -> None:
        """Commit the entry by which a sink first knows these partitions; it has no rows."""
        batch = Batch(opening_range(positions), batch_time_ms, self.home.new_label(), 0)
        empty = self.router.empty_dead if name == DEAD_LETTER_NAME else self.router.empty_main
        prepared = self.sinks[name].prepare(batch, empty)
        entry = self._entry(name, batch.range, batch_time_ms)
        prepared.commit(replace(entry, positions=Positions({**entry.positions.at, **positions.at})))
        self.ledgers[name] = self.sinks[name].last_entry()
        self.faults(f"opened:{name}")

    def _entry(self, name: str, batch: BatchRange, batch_time_ms: int) -> Entry:
        last = self.ledgers[name]
        standing = NOWHERE if last is None else last.positions
        return Entry(
            pipeline=self.definition.name,
            sink=name,
            number=0 if last is None else last.number + 1,
            range=batch,
            positions=standing.moved(batch),
            batch_time_ms=batch_time_ms,
            fingerprint=self.fingerprint,
        )

    # -------------------------------------------------------------------- batches

    def run(self, plan: Plan) -> BatchResult:
        """Carry out a plan whose time is set."""
        assert plan.batch_time_ms is not None
        watch = Stopwatch()
        targets = [name for name in self.sinks if name in plan.targets]
        for name in targets:
            self._must_write(name, plan.range)
        with watch.phase("plan"):
            self.home.note_plan(plan, self.fingerprint)
        self.faults("planned")
        label, directory = self.home.new_stage()
        prepared: dict[str, Prepared] = {}
        try:
            with watch.phase("stage"):
                staged = stage(self.spark, self.cluster, replace(self.spec, directory=directory), plan.range)
            self.faults("staged")
            with watch.phase("route"):
                walk = self.router.walk(staged, plan.batch_time_ms, directory)
            batch = Batch(plan.range, plan.batch_time_ms, label)
            mains = [name for name in targets if name != DEAD_LETTER_NAME]
            if walk.is_observed and mains:
                # One pass less: the first sink's rows are counted by route while it writes them aside.
                self._prepare(mains[0], batch, walk.main, prepared, watch)
            with watch.phase("route"):
                routed = walk.settle(have_run=bool(prepared))
            self.faults("routed")
            for name in targets:
                if name not in prepared:
                    rows, tally = _rows_for(name, routed)
                    self._prepare(name, replace(batch, rows=tally.rows), rows, prepared, watch)
            _balance_sinks(prepared, routed)
            self.faults("balanced")
            counts = {name: each.rows for name, each in prepared.items()}
            for name in targets:
                with watch.phase("commit"):
                    self._commit(name, prepared.pop(name), plan, staged, routed, counts[name])
                self.faults(f"committed:{name}")
        except BaseException:
            _discard(prepared.values())
            raise
        finally:
            self.home.remove_stage(label)
        return BatchResult(staged.intake, routed.routes, routed.warned, counts, watch.times_ms)

    def _prepare(
        self, name: str, batch: Batch, rows: DataFrame, prepared: dict[str, Prepared], watch: Stopwatch
    ) -> None:
        with watch.phase("prepare"):
            prepared[name] = self.sinks[name].prepare(batch, rows)
        self.faults(f"prepared:{name}")

    def _must_write(self, name: str, batch: BatchRange) -> None:
        entry = self.ledgers[name]
        standing = NOWHERE if entry is None else entry.positions
        if decide(name, standing, batch) is not Decision.WRITE:
            raise Unbalanced(
                f"the batch {batch} was planned for sink {name!r}, which has it already; please report this"
            )

    def _commit(
        self, name: str, prepared: Prepared, plan: Plan, staged: Staged, routed: Routed, rows: int
    ) -> None:
        assert plan.batch_time_ms is not None
        entry = replace(
            self._entry(name, plan.range, plan.batch_time_ms),
            intake=staged.intake,
            routes=routed.routes,
            rows=rows,
        )
        try:
            prepared.commit(entry)
        except BaseException:
            # Whether it is in or not, only the sink's ledger knows; what was not committed goes.
            _discard([prepared])
            raise
        self.ledgers[name] = entry


def _rows_for(name: str, routed: Routed) -> tuple[DataFrame, Tally]:
    if name == DEAD_LETTER_NAME:
        return routed.dead, routed.dead_tally
    return routed.main, routed.main_tally


def _balance_sinks(prepared: Mapping[str, Prepared], routed: Routed) -> None:
    """What sinks have written aside is what the routes counted."""
    for name, each in prepared.items():
        _, tally = _rows_for(name, routed)
        if each.rows != tally.rows or (each.digest is not None and each.digest != tally.digest):
            raise Unbalanced(
                f"sink {name!r} wrote {each.rows} rows aside and the route has {tally.rows} (digests "
                f"{'none' if each.digest is None else f'{each.digest:016x}'} and {tally.digest:016x}). Nothing was "
                "committed; please report this"
            )


def _discard(prepared: Iterable[Prepared]) -> None:
    """Take back what was written aside; the failure that led here is the one to tell."""
    for each in list(prepared):
        try:
            each.discard()
        except (HoldfastError, OSError):
            continue
