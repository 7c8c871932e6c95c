"""Tasks that send shares of a batch: retried, late, of a driver that is gone. Spark is played by this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from holdfast.pipeline.core.frames import raise_reported
from holdfast.pipeline.definition.model import KafkaSink
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.sinks import kafka
from holdfast.pipeline.sinks.base import RowsRejected, SinkContext, SinkError, SinkFenced, SinkUnavailable
from holdfast.pipeline.sinks.kafka import KafkaSinkWriter

from .test_kafka import committed
from .test_kafka_reset import ROWS, WRITERS, aside

pytestmark = [pytest.mark.check, pytest.mark.holdfast(mode="thread")]


@dataclass
class Jobs:
    """Runs those tasks of a job that `runs` names, and keeps all of them for later."""

    runs: Sequence[int] = range(WRITERS)
    tasks: list[Callable[[], list[Any]]] | None = None

    def range(self, start: int, end: int, step: int, partitions: int) -> Any:
        assert (start, step, end) == (0, 1, partitions)

        def map_in_arrow(task: Any, schema: str) -> Any:
            def run(number: int) -> list[Any]:
                batch = pa.record_batch({"id": pa.array([number])})
                return [SimpleNamespace(**row) for each in task(iter([batch])) for row in each.to_pylist()]

            self.tasks = [lambda at=at: run(at) for at in range(end)]  # type: ignore[misc]

            def collect() -> list[Any]:
                reports = [row for at in range(end) if at in self.runs for row in run(at)]
                if len(reports) < end:
                    raise PySparkException("a worker was killed")
                return reports

            return SimpleNamespace(collect=collect)

        return SimpleNamespace(mapInArrow=map_in_arrow)

    def late(self, number: int) -> None:
        """A task of the newest job runs only now."""
        assert self.tasks is not None
        raise_reported([json.loads(row.report) for row in self.tasks[number]()])


@pytest.fixture
def bootstrap(holdfast_broker: Any) -> str:
    return str(holdfast_broker.bootstrap_servers)


@pytest.fixture
def make(
    bootstrap: str, context: SinkContext, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Jobs], KafkaSinkWriter]]:
    monkeypatch.setattr(kafka, "TASK_ROWS", 0)
    opened: list[KafkaSinkWriter] = []

    def build(jobs: Any) -> KafkaSinkWriter:
        sink = KafkaSinkWriter(KafkaSink("out", writers=WRITERS), "shop")
        sink.open(replace(context, source={"bootstrap.servers": bootstrap}), jobs)
        opened.append(sink)
        return sink

    yield build
    for sink in opened:
        sink.close()


@dataclass
class Stage:
    """A sink that is written to."""

    make: Callable[[Any], KafkaSinkWriter]
    cut: Any
    directory: Any
    bootstrap: str
    topic: str = "out"
    asides: int = 0

    def send(self, sink: KafkaSinkWriter, first: int = 0, end: int | None = None, **changed: Any) -> Entry:
        """A batch of so many rows from offset `first` on; its range may go further."""
        self.asides += 1
        records = aside(str(self.directory / str(self.asides)), first)
        batch = self.cut.at(first, first + ROWS if end is None else end)
        return sink.send(replace(self.cut.entry(batch, sink.last_entry(), ROWS), **changed), records)

    @property
    def places(self) -> list[str]:
        return sorted(message.headers()[0][1].decode() for message in committed(self.bootstrap, self.topic))


def places(*starts: int) -> list[str]:
    return sorted(f"orders:0@{at}#0" for start in starts for at in range(start, start + ROWS))


@pytest.fixture
def stage(make: Any, batches: Any, tmp_path: Any, bootstrap: str) -> Stage:
    return Stage(make, batches("kafka"), tmp_path, bootstrap)


def test_tasks_send_and_the_driver_sends_what_is_small(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = stage.make(Jobs())
    assert sink.last_entry() is None
    first = stage.send(sink)
    assert sink.last_entry() == first
    stage.send(sink, ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(kafka, "send_by_tasks", None)
        patch.setattr(kafka, "TASK_ROWS", ROWS)
        stage.send(sink, 2 * ROWS)
    last = stage.send(sink, 3 * ROWS)
    assert (last.number, stage.make(Jobs()).last_entry()) == (3, last)
    assert stage.places == places(0, ROWS, 2 * ROWS, 3 * ROWS)


def test_a_task_that_is_run_again_after_its_commit_writes_nothing(stage: Stage) -> None:
    jobs = Jobs()
    stage.send(stage.make(jobs))
    jobs.late(1)
    assert stage.places == places(0)


@pytest.mark.parametrize("done", [pytest.param((), marks=pytest.mark.long), (0, 2)])
def test_a_batch_that_some_tasks_have_committed_is_finished(stage: Stage, done: tuple[int, ...]) -> None:
    first = stage.make(Jobs(runs=done))
    with pytest.raises(SinkUnavailable, match="a worker was killed"):
        stage.send(first)
    again = stage.make(Jobs())
    assert (again.last_entry(), again.unfinished() is not None) == (None, bool(done))
    stage.send(again)
    assert again.unfinished() is None
    assert stage.places == places(0)


def test_the_same_run_finishes_what_a_job_of_its_own_has_begun(stage: Stage) -> None:
    jobs = Jobs(runs=(2,))
    sink = stage.make(jobs)
    with pytest.raises(SinkUnavailable):
        stage.send(sink)
    jobs.runs = range(WRITERS)
    stage.send(sink)
    assert stage.places == places(0)


@pytest.mark.parametrize("is_same_run", [True, False])
def test_a_task_of_a_job_that_was_given_up_writes_nothing_of_the_batch_as_it_was_cut_then(
    stage: Stage, is_same_run: bool
) -> None:
    """Its rows would stand under a number that is another batch's now."""
    old = Jobs(runs=())
    sink = stage.make(old)
    with pytest.raises(SinkUnavailable):
        stage.send(sink)
    late = Jobs(tasks=old.tasks)
    again = sink if is_same_run else stage.make(Jobs())
    old.runs = range(WRITERS)
    assert again.last_entry() is None
    with pytest.raises(SinkFenced, match="later start"):
        late.late(1)
    assert stage.places == []
    entry = stage.send(again, ROWS)
    for number in range(WRITERS):
        with pytest.raises(SinkFenced, match="later start"):
            late.late(number)
    assert stage.places == places(ROWS)
    assert stage.make(Jobs()).last_entry() == entry


def test_a_task_that_comes_after_a_reset_writes_nothing(stage: Stage) -> None:
    jobs = Jobs(runs=(0,))
    with pytest.raises(SinkUnavailable):
        stage.send(stage.make(jobs))
    stage.make(Jobs()).forget()
    with pytest.raises(SinkFenced):
        jobs.late(1)
    again = stage.make(Jobs())
    assert (again.last_entry(), again.unfinished()) == (None, None)


def test_an_older_copy_stops_when_another_has_taken_over(stage: Stage) -> None:
    """HF408: two copies of one pipeline, with homes of their own."""
    old = stage.make(Jobs())
    stage.send(old)
    new = stage.make(Jobs())
    with pytest.raises(SinkFenced, match="another copy"):
        stage.send(old, ROWS)
    with pytest.raises(SinkFenced, match="another copy"):
        old.last_entry()
    stage.send(new, ROWS)
    assert stage.places == places(0, ROWS)


@pytest.mark.parametrize("digests", [{"main": "01"}, pytest.param({}, marks=pytest.mark.long)])
def test_a_batch_that_comes_out_otherwise_is_not_finished(stage: Stage, digests: dict[str, str]) -> None:
    with pytest.raises(SinkUnavailable):
        stage.send(stage.make(Jobs(runs=(1,))), digests=digests)
    again = stage.make(Jobs())
    begun = stage.cut.entry(stage.cut.at(0, ROWS), None, ROWS)
    with pytest.raises(SinkError, match="comes out otherwise"):
        again.send(replace(begun, digests=digests), aside(str(stage.directory / "other"), 1))
    with pytest.raises(SinkError, match="comes out otherwise"):
        stage.send(again, digests=digests, rows=ROWS + 1)
    if digests:
        with pytest.raises(SinkError, match="comes out otherwise"):
            stage.send(again, digests={"main": "02"})
    assert stage.send(again, digests={"main": "01"}).digests == digests  # as it was begun
    assert stage.places == places(0)


def test_no_more_untaken_records_are_looked_for_than_may_become_dead_letters(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "REJECTED_MAX", 3)
    sink = stage.make(Jobs())
    sink._limit = kafka.BATCH_OVERHEAD_BYTES  # no record is that small
    monkeypatch.setattr(sink._writers[0], "refusal", lambda topic, message: "too large")
    records = replace(aside(str(stage.directory / "many")), largest=10)
    with pytest.raises(RowsRejected) as caught:
        sink._reject_untaken(records, sink.envelope(0))
    assert len(caught.value.rows) == 4
