"""Running a pipeline: the loop around batches, its start, its retries and its end.

At the start: the home is locked, the session is there, the steps are checked, sinks are open and have told their
ledgers, and every sink is opened for every partition. Then, batch after batch: guards, plan, batch, monitoring. The
loop holds no position of its own.

It ends when what was there at the start is done (available-now), or at a batch's end after SIGTERM or SIGINT; a second
signal ends it at once, which loses nothing that a sink has not taken back by itself at the next start.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from holdfast.admin.brokers import committed_metadata
from holdfast.admin.errors import ClusterError
from holdfast.pipeline.changes.classifying import refuse_unsafe
from holdfast.pipeline.changes.levels import Facts
from holdfast.pipeline.cluster.places import is_remote, master_of, require_places
from holdfast.pipeline.cluster.probing import probe
from holdfast.pipeline.core.failures import DefinitionWrong
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import monitoring_group
from holdfast.pipeline.definition.secrets import Redactor
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.engine.batches import Workshop, undescribe_jobs
from holdfast.pipeline.engine.deployment import Build, Deployment, build_sinks, explained
from holdfast.pipeline.engine.failures import explain_failure, is_transient
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.known_sinks import KnownSinks
from holdfast.pipeline.engine.lineage_events import Lineage
from holdfast.pipeline.engine.metrics import PipelineMetrics
from holdfast.pipeline.engine.monitoring import Monitoring
from holdfast.pipeline.engine.planning import (
    Bounds,
    Limits,
    Log,
    Plan,
    openings,
    plan_batch,
    remaining,
    unread,
)
from holdfast.pipeline.engine.progress import (
    BatchDone,
    Ended,
    Event,
    Failed,
    Preparing,
    Progress,
    Retrying,
    Started,
    Stopping,
    Summary,
    Waiting,
    Warned,
    add_counts,
    add_intakes,
    add_routes,
    told_to,
)
from holdfast.pipeline.engine.routing import Router
from holdfast.pipeline.engine.source_view import SourceView, ends_of
from holdfast.pipeline.engine.staging import stage_spec, warm_up
from holdfast.pipeline.engine.stateful import Growth, PipelineState
from holdfast.pipeline.ledger import Entry, lowest
from holdfast.pipeline.positions import Place
from holdfast.pipeline.sealing import heads_in, heads_of
from holdfast.pipeline.session import refuse_changed, refuse_session, workers_with_parts
from holdfast.pipeline.sinks.base import Sink, SinkError
from holdfast.pipeline.sinks.compacting import Merging
from holdfast.pipeline.sinks.parquet import ParquetSinkWriter
from holdfast.pipeline.state.store import state_path
from holdfast.pipeline.state.watermarks import Watermarks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.reader.cluster import Cluster

AVAILABLE_NOW: Final = "available-now"
INTERVAL_MS: Final = 1_000
"""Between looks at the source, for a definition without an interval that is told to go on."""
RETRIES_MAX: Final = 5
"""For a run that has an end; one that goes on tries for ever."""
WATCHED: Final = {"spark.ui.enabled": "true", "spark.port.maxRetries": "100"}
"""Of a session that runs batches: a port beyond 4040 is looked for, as long as other pipelines may have taken them."""
BACK_OFF_MS: Final = (500, 1_000, 2_000, 5_000, 10_000, 30_000)


class Stop:
    """Whether the loop is asked to end; set by a signal or by another thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.why = ""

    def ask(self, why: str) -> None:
        self.why = self.why or why
        self._event.set()

    @property
    def is_asked(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_ms: int) -> bool:
        return self._event.wait(max(0, timeout_ms) / 1000)


def run_pipeline(
    definition: PipelineDefinition,
    *,
    bootstrap: str | None = None,
    master: str | None = None,
    shared_filesystem: bool = False,
    once: bool | None = None,
    progress: Progress | None = None,
    metrics: PipelineMetrics | None = None,
    lineage: Lineage | None = None,
    spark: SparkSession | None = None,
    signals: bool = True,
    faults: Faults = no_faults,
    stop: Stop | None = None,
    build: Build | None = None,
    bounds: Bounds | None = None,
    accept_loss: Collection[str] = (),
    shows_positions: bool = True,
) -> Summary:
    """Run until the end its trigger means, or until it is stopped; `once` decides where given.

    With `bounds` the pipeline is about that part of the source alone: the same in every run of it.
    `accept_loss` names sinks that go on where the others stand if they have lost what they had.
    `metrics` shows numbers of the run, and `lineage` tells of it as OpenLineage does.
    Unless it `shows_positions`, no group's offsets are committed.
    Whatever goes wrong is raised as a `HoldfastError` whose text says what to do and holds no secret.
    """
    with explained(Redactor()):
        deployed = Deployment.of(definition, bootstrap)
    expanded, stop = deployed.definition, stop or Stop()
    if metrics is not None:
        metrics.describe(expanded.name)
    if lineage is not None:
        lineage.describe(expanded, deployed.settings["bootstrap.servers"])
    progress = told_to(progress, metrics, lineage)
    with explained(deployed.redactor, deployed.home_path):
        master = master_of(expanded, master) if spark is None else spark.sparkContext.master
        require_places(expanded, master, shared_filesystem=shared_filesystem)
        with (
            deployed.home() as home,
            may_take_over(home, deployed.canonical),
            source_there(deployed, home, progress),
            open_session(expanded, home, master, spark, progress) as session,
            handled_signals(stop, progress, signals),
        ):
            loop = Loop(
                deployed,
                home,
                session,
                (build or build_sinks)(expanded),
                stop,
                progress,
                faults=faults,
                bounds=bounds,
                accept_loss=frozenset(accept_loss),
                shows_positions=shows_positions,
            )
            return loop.run(_interval_ms(expanded, once))


def _interval_ms(definition: PipelineDefinition, once: bool | None) -> int | None:
    """Nothing for a run that ends with what is there."""
    if once is None:
        once = definition.trigger == AVAILABLE_NOW
    if once:
        return None
    if definition.trigger == AVAILABLE_NOW:
        return INTERVAL_MS
    try:
        return parse_duration_ms(definition.trigger)
    except ValueError as error:
        raise DefinitionWrong(f"trigger: {error}, or available-now") from None


@contextlib.contextmanager
def may_take_over(home: Home, definition: Mapping[str, Any]) -> Iterator[None]:
    """Before Spark is started: the definition may follow the one that made the newest batch.

    Which topics another pattern leaves out, only the cluster knows: that is asked by the loop.
    """
    kept = home.kept_definition()
    if kept is not None and kept["source"].get("pattern") == definition["source"].get("pattern"):
        refuse_unsafe(kept, definition)
    yield


@contextlib.contextmanager
def source_there(deployed: Deployment, home: Home, progress: Progress | None) -> Iterator[None]:
    """Before Spark is started, which takes seconds: brokers answer, and every topic is there."""
    from holdfast.reader.cluster import Cluster

    try:
        with Cluster(deployed.settings) as cluster:
            deployed.source(cluster).look({})
    except Exception as error:
        report_failure(deployed, home, progress, error)
        raise
    yield


@contextlib.contextmanager
def open_session(
    definition: PipelineDefinition,
    home: Home,
    master: str | None,
    spark: SparkSession | None,
    progress: Progress | None = None,
) -> Iterator[SparkSession]:
    """The one that is given; else one of our own, which ends with what it is for."""
    from holdfast.pipeline.class_archive import class_archive
    from holdfast.pipeline.java import find_java
    from holdfast.pipeline.session import fit_to_cluster, spark_session

    def tell(what: str) -> None:
        if progress is not None:
            progress(Preparing(what))

    if spark is not None:
        refuse_session(spark)
        with workers_with_parts(spark, home.path, definition.spark, tell):
            if is_remote(spark.sparkContext.master):
                probe(spark, home.path, spark.version)
            try:
                yield spark
            finally:
                undescribe_jobs(spark)
        return
    archive = None if is_remote(master) else class_archive(find_java(), definition.spark)
    session = spark_session(
        definition.name,
        home.path,
        master=master,
        settings={**WATCHED, **definition.spark},
        tell=tell,
        archive=archive,
    )
    try:
        if session.sparkContext.uiWebUrl is not None:
            tell(f"Spark UI: {session.sparkContext.uiWebUrl}")
        if is_remote(master):
            probe(session, home.path, session.version)
            fit_to_cluster(session, definition.spark)
        with contextlib.nullcontext() if archive is None else archive.learning(session):
            yield session
    finally:
        session.stop()


@contextlib.contextmanager
def handled_signals(stop: Stop, progress: Progress | None, wanted: bool = True) -> Iterator[None]:
    """SIGTERM and SIGINT end the loop at the end of the batch; the second one at once."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_asked:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        stop.ask(name)
        if progress is not None:
            progress(Stopping(f"{name}: stopping when this batch is done; once more stops at once"))

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Loop:
    """One run."""

    deployed: Deployment
    home: Home
    spark: SparkSession
    sinks: dict[str, Sink]
    """By name, the dead letter first."""
    stop: Stop
    progress: Progress | None
    faults: Faults = field(default=no_faults, kw_only=True)
    bounds: Bounds | None = field(default=None, kw_only=True)
    accept_loss: frozenset[str] = field(default=frozenset(), kw_only=True)
    shows_positions: bool = field(default=True, kw_only=True)
    summary: Summary = field(init=False)
    merging: dict[str, Merging] = field(default_factory=dict, init=False)
    """By name, the Parquet sinks whose small batches are merged as they come."""
    growth: Growth = field(default_factory=Growth, init=False)
    _settings: str = field(default="", init=False)
    """Of the session, as they were looked at."""

    @property
    def definition(self) -> PipelineDefinition:
        """With its secrets."""
        return self.deployed.definition

    def run(self, interval_ms: int | None) -> Summary:
        from holdfast.pipeline.state.lookups import Lookups
        from holdfast.reader.cluster import Cluster

        started = time.monotonic()
        self.summary = Summary(self.definition.name)
        try:
            with Cluster(self.deployed.settings) as cluster, contextlib.ExitStack() as opened:
                source = self.deployed.source(cluster)
                self._refuse_unsafe(source)
                spec = stage_spec(self.definition, self.deployed.settings)
                warm_up(spec)
                self.lookups = Lookups(self.definition, self.home.path)
                router = Router(self.spark, self.definition, self.lookups)
                self.monitoring = self._monitoring(cluster)
                self._open_sinks(opened)
                self.known = self._known(cluster)
                self.workshop = Workshop(
                    self.spark,
                    cluster,
                    self.deployed,
                    self.home,
                    router,
                    spec,
                    self.sinks,
                    self.known,
                    state=self._state(router),
                    faults=self.faults,
                    accepted=self.accept_loss,
                    warn=self.warn,
                )
                self._read_ledgers()
                self.noted = self.home.unfinished_plan(self.deployed.fingerprint)
                self._repeat(source, interval_ms)
        except Exception as error:
            report_failure(self.deployed, self.home, self.progress, error, self._at_sink)
            raise
        spent = round((time.monotonic() - started) * 1000)
        self.summary = replace(
            self.summary, duration_ms=spent, reason="stopped" if self.stop.is_asked else "done"
        )
        self._log(self.summary.as_json())
        self._tell(Ended(self.summary.reason))
        return self.summary

    def _monitoring(self, cluster: Cluster) -> Monitoring | None:
        if not self.shows_positions:
            return None
        monitoring = Monitoring(cluster, monitoring_group(self.definition), self.warn)
        monitoring.refuse_members()
        return monitoring

    def _known(self, cluster: Cluster) -> KnownSinks:
        group = monitoring_group(self.definition)
        try:
            heads = heads_in(committed_metadata(cluster, group).values())
        except ClusterError as error:
            heads = {}  # a right that the pipeline may lack
            self.warn(f"how far the sinks had come could not be read from the group {group!r}: {error}")
        return KnownSinks(self.home, self.deployed.canonical, heads)

    def _refuse_unsafe(self, source: SourceView) -> None:
        """The definition may take over from the one that made the newest batch: before sinks are opened."""
        kept = self.home.kept_definition()
        if kept is not None:
            facts = Facts(topics=source.found_by(kept["source"].get("pattern")))
            refuse_unsafe(kept, self.deployed.canonical, facts)

    def _state(self, router: Router) -> PipelineState | None:
        event = self.definition.source.event_time
        if not router.operators or event is None:
            return None
        return PipelineState.of(self.spark, state_path(self.home.path), event, self.deployed.canonical)

    def _open_sinks(self, opened: contextlib.ExitStack) -> None:
        context = replace(
            self.deployed.sink_context(), home=self.home.path, attempt=self.home.attempt, warn=self.warn
        )
        for sink in self.sinks.values():
            opened.callback(sink.close)
            sink.open(context, self.spark)
            if isinstance(sink, ParquetSinkWriter):
                self.merging[sink.name] = Merging(sink.store, sink.definition)

    # -------------------------------------------------------------------- the loop

    def _repeat(self, source: SourceView, interval_ms: int | None) -> None:
        until: dict[Place, int] | None = None
        attempts = 0
        is_first = True
        are_stale = False
        while not self.stop.is_asked:
            began = time.monotonic()
            try:
                if are_stale:
                    self._read_ledgers()
                    are_stale = False
                logs = source.look(self.workshop.ledgers)
                if self.bounds is not None:
                    logs = self.bounds.within(logs)
                if interval_ms is None and until is None:
                    until = ends_of(logs)
                if until is not None:
                    logs = {place: log for place, log in logs.items() if place in until}
                self._open_partitions(source, logs)
                if is_first:
                    self._tell(
                        Started(
                            self.definition.name, self.home.path, tuple(self.workshop.sinks), self._lag(logs)
                        )
                    )
                    is_first = False
                has_run = self._one_batch(logs, until)
                attempts = 0
            except Exception as error:
                if not is_transient(error) or (interval_ms is None and attempts >= RETRIES_MAX):
                    raise
                self._back_off(error, attempts)
                attempts += 1
                are_stale = True  # what was committed is not known; the sink may still be away
                continue
            if has_run and (interval_ms is None or self._lag(logs)):
                continue
            if interval_ms is None:
                return
            if not has_run:
                self._tell(Waiting(self._lag(logs)))
            self.stop.wait(interval_ms - round((time.monotonic() - began) * 1000))

    def _read_ledgers(self) -> None:
        """A batch that all sinks had when a run died is made known outside them, though nothing is left to do of it."""
        self.workshop.read_ledgers()
        if self.known.is_behind(self.workshop.ledgers):
            self._show()

    def _show(self) -> None:
        positions = {name: entry.positions for name, entry in self._entries().items()}
        if self.monitoring is not None:
            self.monitoring.show(lowest(positions), heads_of(self.workshop.ledgers, self.known.places))
        self.faults("monitored")
        self.known.note(self.workshop.ledgers)

    def _open_partitions(self, source: SourceView, logs: Mapping[Place, Log]) -> None:
        ledgers = self.workshop.ledgers
        is_new = all(entry is None for entry in ledgers.values())
        beginning: Mapping[Place, int] = {}
        if is_new:
            beginning = source.beginning(logs) if self.bounds is None else self.bounds.start
        needed = openings(ledgers, logs, beginning)
        for warning in unread(ledgers, logs, needed) if self.bounds is None else ():
            self.warn(warning)
        for name, positions in needed.items():
            self.workshop.open_at(name, positions, now_ms())
        if needed:
            self.known.note(self.workshop.ledgers)

    def _plan(self, logs: Mapping[Place, Log], until: Mapping[Place, int] | None) -> Plan | None:
        return plan_batch(
            self.workshop.ledgers,
            logs,
            self._limits(),
            until=until,
            unfinished=self.workshop.unfinished(),
            noted=self.noted,
        )

    def _one_batch(self, logs: Mapping[Place, Log], until: Mapping[Place, int] | None) -> bool:
        began = time.monotonic()
        plan = self._plan(logs, until)
        if plan is None:
            return False
        self._settings = refuse_changed(self.spark, self._settings)
        start = self.workshop.version_for(plan)
        time_ms = now_ms() if plan.batch_time_ms is None else plan.batch_time_ms
        plan = replace(plan, batch_time_ms=time_ms, lookups=self.lookups.pinned(plan.lookups, time_ms))
        if start is not None:
            plan = replace(plan, watermark_ms=Watermarks.from_json(start.watermark).watermark_ms)
        done = self.workshop.run(plan, start)
        self.lookups.forget(self._entries().values())
        self.noted = None
        duration_ms = round((time.monotonic() - began) * 1000)
        number = self.summary.batches + 1
        self._after(plan, replace(done, number=number, duration_ms=duration_ms, lag=self._lag(logs)))
        return True

    def _after(self, plan: Plan, done: BatchDone) -> None:
        self._show()
        self.home.note_plan(plan, self.deployed.fingerprint, is_done=True)
        self.home.note_definition(self.deployed.canonical)
        large = self.growth.message(done.state)
        if large is not None:
            self.warn(large)
        self.summary = add_batch(self.summary, done)
        self._log(done.as_json())
        self._tell(done)
        self.faults("done")
        self._merge()

    def _merge(self) -> None:
        """A bounded piece; the rows are where they were whether it succeeds or not, so the run goes on."""
        for name, merging in list(self.merging.items()):
            try:
                merged = merging.turn()
            except SinkError as error:
                del self.merging[name]
                self.warn(f"small batches are not merged in this run: {error}")
                continue
            if merged is not None:
                self._log({"event": "compacted", **merged.as_json()})
                self.faults("compacted")

    def _back_off(self, error: Exception, attempts: int) -> None:
        wait_ms = BACK_OFF_MS[min(attempts, len(BACK_OFF_MS) - 1)]
        reason = self.deployed.redactor.redact(str(error))
        self._log({"event": "retry", "reason": reason, "in_ms": wait_ms})
        self._tell(Retrying(reason, wait_ms, self._at_sink))
        self.stop.wait(wait_ms)

    # -------------------------------------------------------------------- small things

    @property
    def _at_sink(self) -> str:
        return self.workshop.at_sink if hasattr(self, "workshop") else ""

    def _entries(self) -> dict[str, Entry]:
        return {name: entry for name, entry in self.workshop.ledgers.items() if entry is not None}

    def _lag(self, logs: Mapping[Place, Log]) -> int:
        return remaining(self.workshop.ledgers, ends_of(logs))

    def _limits(self) -> Limits:
        source = self.definition.source
        intakes = [entry.intake for entry in self._entries().values() if entry.intake.records]
        if not intakes:
            return Limits(source.batch_records, source.batch_bytes)
        largest = max(intakes, key=lambda intake: intake.records)
        return Limits(source.batch_records, source.batch_bytes, max(1, largest.bytes // largest.records))

    def warn(self, message: str) -> None:
        message = self.deployed.redactor.redact(message)
        self._log({"event": "warning", "message": message})
        self._tell(Warned(message))

    def _tell(self, event: Event) -> None:
        if self.progress is not None:
            self.progress(event)

    def _log(self, document: Mapping[str, Any]) -> None:
        log(self.home, self.definition.name, document)


def log(home: Home, pipeline: str, document: Mapping[str, Any]) -> None:
    home.log({"time": _now_text(), "pipeline": pipeline, **document})


def report_failure(
    deployed: Deployment, home: Home, progress: Progress | None, error: Exception, at_sink: str = ""
) -> None:
    """In the home's log and to whoever watches, without a secret."""
    reason = deployed.redactor.redact(str(explain_failure(error, home.path)))
    log(home, deployed.definition.name, {"event": "failed", "error": reason})
    if progress is not None:
        progress(Failed(reason, at_sink))


def add_batch(summary: Summary, done: BatchDone) -> Summary:
    """A batch that went to sinks behind was counted when it went to the others, in this run or an earlier one."""
    return replace(
        summary,
        batches=done.number,
        intake=add_intakes(summary.intake, done.intake),
        routes=add_routes(summary.routes, done.routes),
        warned=add_counts(summary.warned, done.warned),
        rows_by_sink=add_counts(summary.rows_by_sink, done.rows_by_sink),
        lag=done.lag,
    )


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _now_text() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
