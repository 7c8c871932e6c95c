"""One world after the other: a program, its log, its history, and the audit's answer.

    with Estate(directory) as estate:
        world = World(estate, directory / "7", seed=7)
        world.live()                    # a random history: produced, ran, died, was changed, merged, refilled
        outcome = world.audit()         # exit code and report, as a user gets them

Broker and database are real and shared by the worlds of a process; each world has topics, a schema and a directory of
its own. A history is drawn from the operations of the guides, and ends with a run that has taken everything.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self
from unittest.mock import patch

import psycopg
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.audit.soundness.executor import without_spark
from tests.audit.soundness.programs import (
    BEGIN,
    MARK,
    NEW_COLUMN,
    Places,
    Program,
    Row,
    changed,
    make_program,
)

from holdfast import real
from holdfast.audit.pipeline_audit import AuditOptions, audit_pipeline
from holdfast.broker.server.embed import Broker
from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.loading import from_document
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.resetting import perform_reset, plan_reset
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.operations.rebuilding import perform_rebuild, plan_rebuild
from holdfast.pipeline.operations.refilling import perform_refill, plan_refill
from holdfast.pipeline.sinks.compacting import compact
from holdfast.testing.postgres import PostgresServer

BROKER: Final = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "log.flush.interval.messages": "1000000",
}
QUICK: Final = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "autovacuum=off")
CRASHED: Final = 70
"""In the place of an exit code."""
BURIED_AT_ONCE: Final = 20
POINTS: Final = (
    "planned", "staged", "routed", "state-written", "state-published", "prepared", "balanced", "aside-written",
    "committed", "committed", "committed", "monitored", "done",
)  # fmt: skip
PEOPLE: Final = ("ann", "bob", "cat", "dan", "eve", "fay")


class Crash(BaseException):
    """The driver is gone."""


class Estate:
    """What all worlds of a process share."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.broker = Broker(directory / "broker", settings=BROKER)
        self._server = PostgresServer(settings=QUICK)
        self._stack = contextlib.ExitStack()
        self._over: list[str] = []

    def __enter__(self) -> Self:
        for name in ("fsync", "fdatasync"):  # no machine fails here
            self._stack.enter_context(patch.object(os, name, lambda handle: None))
        self._stack.enter_context(patch.object(real, "is_flushed_whole", lambda device: False))
        self._stack.enter_context(self._server)
        self._stack.enter_context(self.broker)
        servers: dict[str, Any] = {"bootstrap.servers": self.broker.bootstrap_servers, "log_level": 0}
        self.admin = AdminClient(servers)
        self.producer = Producer({**servers, "linger.ms": 0})
        self.transactional = Producer({**servers, "linger.ms": 0, "transactional.id": "worlds"})
        self.transactional.init_transactions(30)
        self.database = self._stack.enter_context(psycopg.connect(self._server.url, autocommit=True))
        gc.collect()
        gc.freeze()  # what was imported is looked at no more: it is most of what there is
        self._stack.callback(gc.unfreeze)
        return self

    def __exit__(self, *_: object) -> None:
        del self.admin, self.producer, self.transactional
        self._stack.close()

    @property
    def database_url(self) -> str:
        return self._server.url

    def create_topic(self, name: str, partitions: int) -> None:
        self.admin.create_topics([NewTopic(name, partitions, 1)])[name].result(30)

    def forget(self, names: Sequence[str]) -> None:
        found = [name for name in self.admin.list_topics(timeout=30).topics if name in names]
        for future in self.admin.delete_topics(found).values() if found else ():
            future.result(30)

    def bury(self, name: str) -> None:
        """Topics and tables of a world that is over; many at once, since each costs a look at all."""
        self._over.append(name)
        if len(self._over) < BURIED_AT_ONCE:
            return
        topics = list(self.admin.list_topics(timeout=30).topics)
        of_world = re.compile(rf"(hf-ledger-)?({'|'.join(self._over)})-.*")
        self.forget([topic for topic in topics if of_world.fullmatch(topic)])
        for each in self._over:
            self.database.execute(f"DROP SCHEMA IF EXISTS {each} CASCADE")
        self._over.clear()

    def log_files(self, topic: str) -> list[Path]:
        return sorted((self.directory / "broker").glob(f"**/{topic}-[0-9]*/*.log"))


@dataclass(frozen=True)
class Outcome:
    """What an audit answered."""

    exit_code: int
    report: Mapping[str, Any]
    said: str = ""
    """Where there was no report."""

    @property
    def verdict(self) -> str:
        return str(self.report.get("verdict", self.said))

    def trusted(self) -> list[str]:
        """`SINK.COLUMN` of what the table says is trusted."""
        rows = self.report["coverage"] if self.report else ()
        return [f"{each['sink']}.{each['column']}" for each in rows if each["trusted"]]

    def recomputed(self) -> list[str]:
        """`SINK.COLUMN` of what was made again from the log, every cell of it."""
        rows = self.report["coverage"] if self.report else ()
        return [
            f"{each['sink']}.{each['column']}" for each in rows if not each["unaltered"] + each["trusted"]
        ]

    def why(self) -> str:
        if not self.report:
            return self.said
        found = [f"{each['fate']} {each['sink']} {each['detail']}" for each in self.report["findings"]]
        gaps = [f"{each['what']}: {each['why']}" for each in self.report["unproven"] if each["is_gap"]]
        trusted = [
            f"{each['sink']}.{each['column']}: {each['trusted']} trusted: {each['why']}"
            for each in self.report["coverage"]
            if each["trusted"]
        ]
        return f"{self.verdict}: {found or [*gaps, *trusted]}"


@dataclass
class World:
    estate: Estate
    directory: Path
    seed: int
    spark: Any = None
    """Nothing: the steps' own Python stands for it."""
    program: Program = field(init=False)
    definition: PipelineDefinition = field(init=False, repr=False)
    history: list[str] = field(default_factory=list)
    produced: int = 0
    snapshots: list[Path] = field(default_factory=list)
    """Copies of the directory, made between runs."""
    were_reset: set[str] = field(default_factory=set)
    have_some_twice: set[str] = field(default_factory=set)
    """Sinks that were reset to a place before the one they stood at, and not emptied before."""
    have_some_of_nobody: set[str] = field(default_factory=set)
    """Upserts that were reset: what does not come again keeps a row that names no record (docs/GAPS.md)."""
    has_new_column: bool = False
    """By a change of the definition: what it means for rows of before is not asked of an audit."""

    def __post_init__(self) -> None:
        self.chance = random.Random(f"history {self.seed}")
        self.program = make_program(self.seed)
        self._clock = BEGIN
        self._known: dict[int, list[Row]] = {}

    def __str__(self) -> str:
        program = self.program
        sinks = [f"{sink.name}<-{sink.takes or 'main'} {dict(sink.words) or ''}" for sink in program.sinks]
        steps = [step.name for step in program.steps]
        return f"{program.format} {steps} {sinks}; {', '.join(self.history)}"

    # -------------------------------------------------------------------- building

    def begin(self) -> None:
        self.directory.mkdir(parents=True)
        (self.directory / "steps.py").write_text(MARK)
        people = "".join(f"{name},{name[::-1]}-city\n" for name in PEOPLE[:4])
        (self.directory / "people.csv").write_text(f"login,city\n{people}")
        self.estate.create_topic(self.program.topic, self.program.partitions)
        self.estate.database.execute(f"CREATE SCHEMA {self.program.name}")
        self.write_definition()

    @property
    def home(self) -> Path:
        return self.directory / "home"

    def write_definition(self) -> None:
        places = Places(str(self.directory), self.estate.broker.bootstrap_servers, self.estate.database_url)
        document = self.program.document(places)
        self.definition = from_document(document, directory=str(self.directory)).definition

    # -------------------------------------------------------------------- the log

    def produce(self, count: int) -> None:
        chance, estate = self.chance, self.estate
        for _ in range(count):
            partition = chance.randrange(self.program.partitions)
            message = self._message(partition)
            if chance.random() < 0.03:
                estate.transactional.begin_transaction()
                estate.transactional.produce(self.program.topic, partition=partition, **message)
                if chance.random() < 0.5:
                    estate.transactional.abort_transaction(30)
                else:
                    estate.transactional.commit_transaction(30)
            else:
                estate.producer.produce(self.program.topic, partition=partition, **message)
        assert estate.producer.flush(30) == 0
        self.history.append(f"produced {count}")

    def _message(self, partition: int) -> dict[str, Any]:
        chance, program = self.chance, self.program
        row = self._row(partition)
        value = program.encode(row)
        if chance.random() < 0.06:
            value = chance.choice((b"{", value + b"}", b"", b"\xff\xfe", value[: len(value) // 2]))
        headers = [("trace", b"t%d" % chance.randrange(9))] if chance.random() < 0.2 else []
        key = None if chance.random() < 0.1 else row["who"].encode()
        return {"value": value, "key": key, "headers": headers}

    def _row(self, partition: int) -> Row:
        chance = self.chance
        known = self._known.setdefault(partition, [])
        if known and chance.random() < 0.08:
            return dict(chance.choice(known))
        self._clock += timedelta(milliseconds=chance.randrange(500, 9000))
        at: datetime = self._clock
        if chance.random() < 0.08:
            at -= timedelta(milliseconds=chance.randrange(100_000, 300_000))
        row: Row = {each.name: each.make(chance) for each in self.program.fields}
        own = [name for at, name in enumerate(PEOPLE) if at % self.program.partitions == partition]
        self.produced += 1
        who = "trial" if chance.random() < 0.08 else chance.choice(own)
        row |= {"id": self.produced, "who": who, "at": at}
        known.append(row)
        return row

    # -------------------------------------------------------------------- operations

    def _session(self) -> contextlib.AbstractContextManager[Any]:
        return without_spark(self.program) if self.spark is None else contextlib.nullcontext(self.spark)

    def run(self, faults: Faults = no_faults, accept_loss: Sequence[str] = ()) -> None:
        with self._session() as session:
            run_pipeline(
                self.definition, spark=session, signals=False, faults=faults, accept_loss=accept_loss
            )
        self.history.append("ran")

    def die(self) -> None:
        """A run that is killed somewhere."""
        point = self.chance.choice(POINTS)
        left = self.chance.randrange(1, 4)

        def faults(name: str) -> None:
            nonlocal left
            if name.split(":")[0] == point or (name, point) == ("compacted", "done"):
                left -= 1
                if not left:
                    self.history.append(f"died at {name}")
                    raise Crash

        with contextlib.suppress(Crash):
            self.run(faults)

    def snapshot(self) -> None:
        kept = self.directory.with_name(f"{self.directory.name}-kept-{len(self.snapshots)}")
        shutil.copytree(self.directory, kept, copy_function=shutil.copyfile)
        self.snapshots.append(kept)

    def compact(self) -> None:
        compact(self.definition)
        self.history.append("compacted")

    def change(self) -> None:
        program, what = changed(self.program, self.chance)
        if what:
            self.program = program
            self.write_definition()
            self.has_new_column |= what == NEW_COLUMN
            self.history.append(what)

    def reset(self) -> None:
        sink = self.chance.choice(self.program.sinks)
        plan = plan_reset(self.definition, sinks=[sink.name])
        perform_reset(plan)
        self.were_reset.add(sink.name)
        if plan.sinks[0].replayed:
            self.have_some_twice.add(sink.name)
        elif sink.kind in ("upsert", "merge"):
            self.have_some_of_nobody.add(sink.name)
        self.history.append(f"reset {sink.name}")

    def refill(self) -> None:
        """A sink of files is lost, and written again from the log."""
        found = [
            sink
            for sink in self.program.sinks
            if sink.kind in ("parquet", "delta", "merge") and (self.directory / sink.name).exists()
        ]
        if not found:
            return
        sink = self.chance.choice(found)
        shutil.rmtree(self.directory / sink.name)
        with self._session() as session:
            perform_refill(plan_refill(self.definition, sink.name), spark=session)
        self.history.append(f"refilled {sink.name}")

    def rebuild(self) -> None:
        if not any(step.kind in ("window", "dedupe") for step in self.program.steps):
            return
        self.run()  # all sinks stand at one place then
        shutil.rmtree(self.home / "state")
        with self._session() as session:
            perform_rebuild(plan_rebuild(self.definition), spark=session)
        self.history.append("rebuilt")

    def live(self) -> None:
        """A random history."""
        chance = self.chance
        self.begin()
        self.produce(chance.randrange(8, 26))
        self.run()
        operations: Sequence[tuple[float, Callable[[], None]]] = (
            (0.35, self.die),
            (0.15, self.compact),
            (0.15, self.change),
            (0.12, self.refill),
            (0.12, self.rebuild),
            (0.06, self.reset),
        )
        for _ in range(chance.choice((0, 1, 1, 2))):
            self.snapshot()
            self.produce(chance.randrange(1, 16))
            for share, operation in operations:
                if chance.random() < share:
                    operation()
            self.run()

    # -------------------------------------------------------------------- asking

    def audit(self, accept: Sequence[str] = ()) -> Outcome:
        try:
            report = audit_pipeline(self.definition, options=AuditOptions(accepted=tuple(accept)))
        except HoldfastError as error:
            return Outcome(int(getattr(error, "exit_code", CRASHED)), {}, f"{type(error).__name__}: {error}")
        except Exception:  # noqa: BLE001 - whatever an audit raises that is no answer
            return Outcome(CRASHED, {}, traceback.format_exc(limit=-3))
        return Outcome(report.exit_code(), report.as_json())

    def end(self) -> None:
        """The world is over: its files, tables and topics go."""
        for path in (self.directory, *self.snapshots):
            shutil.rmtree(path, ignore_errors=True)
        self.estate.bury(self.program.name)


@contextlib.contextmanager
def lived(estate: Estate, seed: int, spark: Any = None) -> Iterator[World]:
    world = World(estate, estate.directory / "worlds" / str(seed), seed, spark)
    try:
        world.live()
        yield world
    finally:
        world.end()
