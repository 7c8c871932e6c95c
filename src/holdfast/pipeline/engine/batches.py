"""One batch, from its plan to the sinks' ledgers.

The order is what the guarantees rest on:

1. the plan is on the disk;
2. the range is read once, into the stage, and counted;
3. every sink of the plan writes its rows aside, and counts them where they stand; rows are counted by route, before
   that or while the first sink takes them;
4. the routes agree with the intake, by number and by digest;
5. the sinks' counts agree with the routes;
6. the places of rows that left the chain are written down, durably (`engine.aside`);
7. only now each sink commits, rows and ledger entry in one act, the dead letter first.

Steps with a state run in 3, before any sink has rows; when the routes agree, the version they made is durable, and
only then sinks prepare. Versions that no sink stands at go after the batch.

A failure before 7 leaves nothing visible anywhere. A failure within 7 leaves some sinks ahead, and their ledgers say
so: the others catch up alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import PipelineError, StateMissing, StateOutdated, Unbalanced
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, DIGEST_KEY_NAME
from holdfast.pipeline.engine.aside import AsideFiles, collect_rows
from holdfast.pipeline.engine.deployment import Deployment
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.known_sinks import KnownSinks, refuse_lost
from holdfast.pipeline.engine.planning import Plan, opening_range
from holdfast.pipeline.engine.progress import BatchDone, StateNow
from holdfast.pipeline.engine.routing import MAIN, Routed, Router, Stream
from holdfast.pipeline.engine.source_view import read_places
from holdfast.pipeline.engine.staging import Staged, StageSpec, stage
from holdfast.pipeline.engine.stateful import PipelineState, StateUpdate, shared_positions
from holdfast.pipeline.ledger import NOWHERE, STATELESS, Decision, Entry, decide
from holdfast.pipeline.positions import BatchRange, Positions
from holdfast.pipeline.row_digest import DigestKey
from holdfast.pipeline.sealing import key_for, sealed
from holdfast.pipeline.sinks.base import REJECTED_MAX, Batch, Prepared, RowsRejected, Sink, SinkError
from holdfast.pipeline.sinks.columns import INVALID_TEXT, rejected_for_text, with_checked_text
from holdfast.pipeline.sinks.staged import SMALL_ROWS, LocalRows
from holdfast.pipeline.state.store import Version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from holdfast.pipeline.sinks.staged import StagedRows
    from holdfast.reader.cluster import Cluster


@dataclass
class Stopwatch:
    """Milliseconds by phase; the jobs of a phase are called by it in Spark's UI. Telling Spark takes a call of the JVM,
    so phases that have no jobs are not told: a batch commits to each sink."""

    describe: Callable[[str], None]
    times_ms: dict[str, int] = field(default_factory=dict)
    sink_times_ms: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, sink: str | None = None, *, has_jobs: bool = True) -> Iterator[None]:
        started = time.monotonic()
        if has_jobs:
            self.describe(f"{name} {sink}" if sink else name)
        try:
            yield
        finally:
            spent = round((time.monotonic() - started) * 1000)
            self.times_ms[name] = self.times_ms.get(name, 0) + spent
            if sink is not None:
                self.sink_times_ms[sink] = self.sink_times_ms.get(sink, 0) + spent


@dataclass(frozen=True)
class Offer:
    """Rows as sinks can take them."""

    rows: DataFrame
    checked: DataFrame
    """The same; a job over them fails at a text that is none."""
    staged: StagedRows | None
    local: LocalRows | None


@dataclass
class Offers:
    """What a batch offers to its sinks: the same to all that take the same rows."""

    makes_values: bool
    is_small: bool
    staged: StagedRows | None
    """Of the main rows."""
    _made: dict[str, Offer] = field(default_factory=dict)

    def of(self, name: str, rows: DataFrame, count: int | None = None) -> Offer:
        """`count` says how many rows there are, where they have been counted; else no step made several of one."""
        if name not in self._made:
            # Decoders give texts only; a step may make one of any bytes, which files would keep and JSON would mend.
            checked = with_checked_text(rows) if self.makes_values else rows
            staged = self.staged if name == MAIN else None
            is_small = self.is_small and (count is None or count <= SMALL_ROWS)
            self._made[name] = Offer(rows, checked, staged, LocalRows(checked, staged) if is_small else None)
        return self._made[name]


@dataclass
class Workshop:
    """What batches are made with."""

    spark: SparkSession
    cluster: Cluster
    deployed: Deployment
    home: Home
    router: Router
    spec: StageSpec
    sinks: Mapping[str, Sink]
    """By name, the dead letter first: the order in which they prepare and commit."""
    known: KnownSinks
    state: PipelineState | None = None
    """Of a pipeline that has steps with one."""
    faults: Faults = no_faults
    accepted: frozenset[str] = frozenset()
    """Sinks that may have lost what they had (`--accept-loss`)."""
    warn: Callable[[str], None] = lambda _: None
    ledgers: dict[str, Entry | None] = field(default_factory=dict)
    """The newest entry of each sink, as the sinks said or we committed."""
    beside: tuple[Entry, ...] = ()
    """The newest entries of sinks that this run does not write to: the record of rows that left is theirs too."""
    at_sink: str = ""
    """Which sink is at work, or was when it failed."""
    aside: AsideFiles = field(init=False)
    _key: DigestKey = field(init=False)

    def __post_init__(self) -> None:
        self.aside = AsideFiles(self.known.home_path)

    def read_ledgers(self) -> None:
        for name, sink in self.sinks.items():
            self.at_sink = name
            self.ledgers[name] = sink.last_entry()
        self.at_sink = ""
        own = self.deployed.definition.name
        for name, entry in self.ledgers.items():
            if entry is not None and entry.pipeline != own:
                raise PipelineError(
                    f"sink {name!r} holds the ledger of pipeline {entry.pipeline!r}, not of {own!r}: "
                    "two pipelines cannot share a sink; give this one a place of its own"
                )
        self._take_key()
        lost = self.known.lost(self.sinks, self.ledgers)
        for name in lost.keys() & self.accepted:
            self._begin_anew(name, lost.pop(name))
        refuse_lost(lost, has_others=any(entry is not None for entry in self.ledgers.values()))

    def _take_key(self) -> None:
        """The key of the digests, which a ledger may know of though the home does not."""
        may_be_new = DIGEST_KEY_NAME in self.accepted
        given = self.deployed.definition.digest_key
        key = key_for(self.known.home_path, given, self.ledgers.values(), may_be_new=may_be_new)
        for sink in self.sinks.values():
            sink.key = key
        self._key = key

    def _begin_anew(self, name: str, why: str) -> None:
        """Let a sink go on without what it had, as the user said."""
        self.sinks[name].forget()
        self.ledgers[name] = None
        self.known.begin_anew(name, self.ledgers)
        self.warn(f"sink {name!r} begins anew, as --accept-loss says: {why}")

    def unfinished(self) -> dict[str, Entry]:
        found = {}
        for name, sink in self.sinks.items():
            entry = sink.unfinished()
            if entry is not None:
                found[name] = entry
        return found

    # -------------------------------------------------------------------- openings

    def open_at(
        self, name: str, positions: Positions, batch_time_ms: int, state: Version | None = None
    ) -> None:
        """Commit the entry by which a sink first knows these partitions, or its state; it has no rows."""
        batch = Batch(opening_range(positions), batch_time_ms, self.home.new_label(), 0)
        is_dead_letter = name == DEAD_LETTER_NAME
        empty = self.router.empty_dead if is_dead_letter else self.router.empty(self._rows_of(name))
        self.at_sink = name
        prepared = self.sinks[name].prepare(batch, empty)
        number = self._opening_state(name, positions) if state is None else state.number
        entry = self._entry_of(name, replace(self._made(batch.range, batch_time_ms), state=number))
        entry = replace(entry, positions=Positions({**entry.positions.at, **positions.at}))
        prepared.commit(sealed(entry, self.ledgers[name], prepared.written, self._key))
        self.ledgers[name] = self.sinks[name].last_entry()
        self.at_sink = ""
        self.faults(f"opened:{name}")

    def _opening_state(self, name: str, positions: Positions) -> int | None:
        """A partition more changes nothing; a sink that is new joins those that stand where it begins."""
        last = self.ledgers[name]
        if last is not None:
            return last.state
        others = [entry for entry in self.ledgers.values() if entry is not None]
        here = [
            entry.state
            for entry in others
            if all(
                place in entry.positions.at and entry.positions.at[place].offset == at.offset
                for place, at in positions.at.items()
            )
        ]
        if not here and any(entry.state is not None for entry in others):
            return STATELESS  # nobody has a state for this place
        return max((state for state in here if state is not None), default=None)

    def _rows_of(self, name: str) -> str:
        """Which rows this sink takes."""
        return next((sink.rows for sink in self.deployed.definition.sinks if sink.name == name), MAIN)

    def _made(self, batch: BatchRange, batch_time_ms: int) -> Entry:
        """What the entries of all sinks say of a batch; no sink's yet."""
        definition = self.deployed.definition
        return Entry(definition.name, "", 0, batch, NOWHERE, batch_time_ms, self.deployed.fingerprint)

    def _entry_of(self, name: str, made: Entry) -> Entry:
        """The next entry of this sink, for a batch that is made."""
        last = self.ledgers[name]
        return replace(
            made,
            sink=name,
            number=0 if last is None else last.number + 1,
            positions=(NOWHERE if last is None else last.positions).moved(made.range),
            generation=self.known.generation(name, self.ledgers),
            others=self.known.others(name, self.ledgers),
        )

    # -------------------------------------------------------------------- batches

    def version_for(self, plan: Plan) -> Version | None:
        """The version of the state from which this batch starts; nothing for a pipeline without one."""
        if self.state is None:
            return None
        if all(entry.state is None for entry in self._entries()):
            self.state.start_anew(self._entries())
        entries = {name: self.ledgers[name] for name in plan.targets}
        try:
            return self.state.version_for(
                {name: entry for name, entry in entries.items() if entry is not None}
            )
        except StateOutdated:
            raise
        except StateMissing as missing:
            if len(entries) == len(self.ledgers):
                raise
            raise StateMissing(
                f"{', '.join(map(repr, entries))} stand behind the other sinks, where there is no state any more: "
                f"`holdfast pipeline refill FILE {next(iter(entries))}` writes what is lacking there from the log"
            ) from missing

    def run(self, plan: Plan, start: Version | None = None) -> BatchDone:
        """Carry out a plan whose time is set; with a state, from its `version_for` the plan.

        Where a sink rejects rows for what is in them, the batch is recomputed with their records as dead letters: so
        they are nobody's rows, and all sinks stay alike.
        """
        while True:
            try:
                return self._attempt(plan, start)
            except RowsRejected as refused:
                plan = self._without(plan, refused)

    def _without(self, plan: Plan, refused: RowsRejected) -> Plan:
        topics = {place.topic for place in plan.range.spans}
        found = {each[:3]: each for each in (*plan.rejected, *refused.rows)}
        if any(each.topic not in topics for each in refused.rows) or len(found) == len(plan.rejected):
            raise refused
        if DEAD_LETTER_NAME not in plan.targets:
            raise SinkError(
                f"{refused}. The dead letter sink has this batch already, so they cannot become dead letters: make the "
                "sink take them, or filter them in a step"
            ) from refused
        if len(found) > REJECTED_MAX:
            raise SinkError(
                f"{refused}. More than {REJECTED_MAX} records of one batch would become dead letters for that: this is "
                "about the sink, and not about single rows. Make the sink take them, or filter them in a step"
            ) from refused
        return replace(plan, rejected=tuple(sorted(found.values())))

    def _attempt(self, plan: Plan, start: Version | None) -> BatchDone:
        assert plan.batch_time_ms is not None
        watch = Stopwatch(partial(describe_jobs, self.spark, self._batch_text(plan)))
        self.at_sink = ""
        targets = [name for name in self.sinks if name in plan.targets]
        for name in targets:
            self._must_write(name, plan.range)
        with watch.phase("plan", has_jobs=False):
            self.home.note_plan(plan, self.deployed.fingerprint)
        self.faults("planned")
        label, directory = self.home.new_stage()
        prepared: dict[str, Prepared] = {}
        try:
            with watch.phase("stage"):
                spec = replace(self.spec, directory=directory, rejected=plan.rejected)
                staged = stage(self.spark, self.cluster, spec, plan.range)
            self.faults("staged")
            update = None
            with watch.phase("route"):
                if start is not None:
                    update = self._begin(plan, start, staged, label, directory)
                walk = self.router.walk(staged, plan.batch_time_ms, directory, update, plan.lookups)
            batch = Batch(plan.range, plan.batch_time_ms, label)
            offers = Offers(self.router.makes_values, staged.is_small, walk.staged_rows)
            first = next((name for name in targets if self._takes_main(name)), None)
            if walk.is_observed and first is not None:
                # One pass less: the first sink's rows are counted by route while it writes them aside.
                self._prepare(first, batch, offers.of(MAIN, walk.main), prepared, watch)
            with watch.phase("route"):
                routed = walk.settle(have_run=bool(prepared))
            self.faults("routed")
            version = self._publish(plan, update, watch)
            for name in targets:
                if name not in prepared:
                    stream = self._stream_for(name, routed)
                    rows = DEAD_LETTER_NAME if name == DEAD_LETTER_NAME else self._rows_of(name)
                    batch = replace(batch, rows=stream.tally.rows)
                    offer = offers.of(rows, stream.rows, stream.tally.rows)
                    self._prepare(name, batch, offer, prepared, watch)
            self._balance_sinks(prepared, routed)
            self.faults("balanced")
            counts = {name: each.rows for name, each in prepared.items()}
            with watch.phase("aside"):
                self._set_aside(plan, routed, directory)
            self.faults("aside-written")
            made = replace(
                self._made(plan.range, plan.batch_time_ms),
                intake=staged.intake,
                routes=routed.routes,
                watermark_ms=plan.watermark_ms,
                state=STATELESS if version is None else version.number,
                lookups=plan.lookups,
                taps=update.counts if update else {},
                digests=routed.digests,
                rejected=plan.rejected,
            )
            for name in targets:
                self.at_sink = name
                with watch.phase("commit", name, has_jobs=False):
                    self._commit(prepared.pop(name), self._entry_of(name, replace(made, rows=counts[name])))
                self.at_sink = ""
                self.faults(f"committed:{name}")
        except BaseException:
            _discard(prepared.values())
            raise
        finally:
            self.home.remove_stage(label)
        self._forget(watch)
        self.aside.merge([*self._entries(), *self.beside])
        return BatchDone(
            plan.range,
            plan.batch_time_ms,
            staged.intake,
            routed.routes,
            routed.warned,
            counts,
            watch.times_ms,
            sink_times_ms=watch.sink_times_ms,
            step_counts=made.taps,
            state=None if version is None else StateNow.of(version),
            rejected=plan.rejected,
        )

    def _batch_text(self, plan: Plan) -> str:
        """A batch as Spark's UI names it."""
        assert plan.batch_time_ms is not None
        when = datetime.fromtimestamp(plan.batch_time_ms / 1000, UTC)
        name = self.deployed.definition.name
        return f"{name}, batch of {when:%H:%M:%S.%f}: {plan.range.offsets:,} offsets"

    def _begin(self, plan: Plan, start: Version, staged: Staged, label: str, directory: str) -> StateUpdate:
        assert self.state is not None
        assert plan.batch_time_ms is not None
        entries = [entry for name in plan.targets if (entry := self.ledgers[name]) is not None]
        positions = shared_positions(entries).moved(plan.range)
        return self.state.begin(
            start,
            staged,
            batch_time_ms=plan.batch_time_ms,
            positions=positions,
            known=read_places(self.deployed.definition.source, positions),
            label=label,
            scratch=directory,
        )

    def _publish(self, plan: Plan, update: StateUpdate | None, watch: Stopwatch) -> Version | None:
        """Make the version that the steps have given durable, before any sink prepares."""
        if update is None or self.state is None:
            return None
        self.faults("state-written")
        with watch.phase("state"):
            version = self.state.publish(update.version, is_catch_up=plan.is_catch_up)
        self.faults("state-published")
        return version

    def _set_aside(self, plan: Plan, routed: Routed, scratch: str) -> None:
        """Write down which rows left the chain, before any sink has the batch."""
        rows = collect_rows(routed.aside, self.deployed.definition.source.topics, plan.range, scratch)
        self.aside.write(plan.range, self.deployed.fingerprint, rows, [*self._entries(), *self.beside])

    def _entries(self) -> list[Entry]:
        return [entry for entry in self.ledgers.values() if entry is not None]

    def _forget(self, watch: Stopwatch) -> None:
        if self.state is not None:
            with watch.phase("state"):
                self.state.forget(self._entries())

    def _takes_main(self, name: str) -> bool:
        return name != DEAD_LETTER_NAME and self._rows_of(name) == MAIN

    def _stream_for(self, name: str, routed: Routed) -> Stream:
        return routed.dead if name == DEAD_LETTER_NAME else routed.streams[self._rows_of(name)]

    def _prepare(
        self, name: str, batch: Batch, offer: Offer, prepared: dict[str, Prepared], watch: Stopwatch
    ) -> None:
        from pyspark.errors import PySparkException

        self.at_sink = name
        batch = replace(batch, staged=offer.staged, local=offer.local)
        with watch.phase("prepare", name):
            try:
                prepared[name] = self.sinks[name].prepare(batch, offer.checked)
            except PySparkException as error:
                if INVALID_TEXT not in str(error):
                    raise
                raise RowsRejected(rejected_for_text(name, offer.rows)) from error
        self.at_sink = ""
        self.faults(f"prepared:{name}")

    def _must_write(self, name: str, batch: BatchRange) -> None:
        entry = self.ledgers[name]
        standing = NOWHERE if entry is None else entry.positions
        if decide(name, standing, batch) is not Decision.WRITE:
            raise Unbalanced(
                f"the batch {batch} was planned for sink {name!r}, which has it already; please report this"
            )

    def _commit(self, prepared: Prepared, entry: Entry) -> None:
        try:
            entry = sealed(entry, self.ledgers[entry.sink], prepared.written, self._key)
            entry = prepared.commit(entry) or entry
        except BaseException:
            # Whether it is in or not, only the sink's ledger knows; what was not committed goes.
            _discard([prepared])
            raise
        self.ledgers[entry.sink] = entry

    def _balance_sinks(self, prepared: Mapping[str, Prepared], routed: Routed) -> None:
        """What sinks have written aside is what the routes counted."""
        for name, each in prepared.items():
            tally = self._stream_for(name, routed).tally
            if each.rows != tally.rows or (each.digest is not None and each.digest != tally.digest):
                raise Unbalanced(
                    f"sink {name!r} wrote {each.rows} rows aside and the route has {tally.rows} (digests "
                    f"{'none' if each.digest is None else f'{each.digest:016x}'} and {tally.digest:016x}). Nothing "
                    "was committed; please report this"
                )


def describe_jobs(spark: SparkSession, batch: str, phase: str) -> None:
    """Name the jobs and stages that this thread begins from now on, as Spark's UI shows them."""
    spark.sparkContext.setJobDescription(f"{batch}, {phase}")


def undescribe_jobs(spark: SparkSession) -> None:
    """Later jobs of this thread are not the pipeline's."""
    spark.sparkContext.setJobDescription(None)  # type: ignore[arg-type]


def _discard(prepared: Iterable[Prepared]) -> None:
    """Take back what was written aside; the failure that led here is the one to tell."""
    for each in list(prepared):
        try:
            each.discard()
        except (HoldfastError, OSError):
            continue
