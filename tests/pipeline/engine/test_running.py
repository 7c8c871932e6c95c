"""The loop: its start, its retries, its end, and what it tells meanwhile."""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from kio.schema.errors import ErrorCode

from holdfast.admin import brokers
from holdfast.admin.errors import refused
from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import AlreadyRunning, DefinitionWrong, EnvironmentFails, Unbalanced
from holdfast.pipeline.definition.model import Filter
from holdfast.pipeline.engine.home import Home, holder
from holdfast.pipeline.engine.progress import BatchDone, Ended, Event, Retrying, Started, Stopping, Waiting
from holdfast.pipeline.engine.running import Stop, handled_signals
from holdfast.pipeline.engine.status import read_status
from holdfast.pipeline.guards import GuardTripped
from holdfast.reader import Unreachable

if TYPE_CHECKING:
    from .conftest import Bench


@pytest.fixture
def bench(either_bench: Bench) -> Bench:
    return either_bench


def recreate(bench: Bench, topic: str, partitions: int) -> None:
    bench.admin.delete_topics([topic])[topic].result(30)
    bench.create(topic, partitions)


class TestEnding:
    def test_available_now_ends_with_what_was_there_at_the_start(self, bench: Bench) -> None:
        bench.produce_orders(10)
        bench.change(source=replace(bench.definition.source, batch_records=4))

        def more(point: str) -> None:
            if point == "monitored" and bench.produced < 40:
                bench.produce_orders(5)

        summary = bench.run(more)
        assert summary.reason == "done"
        assert summary.intake.records == 10
        assert bench.sinks["main"].ids == list(range(10))

    def test_an_interval_goes_on_until_it_is_stopped(self, bench: Bench) -> None:
        bench.change(trigger="10ms")
        stop = Stop()
        events: list[Event] = []

        def watch(event: Event) -> None:
            events.append(event)
            if isinstance(event, Waiting) and bench.produced < 9:
                bench.produce_orders(3)
            elif isinstance(event, Waiting):
                stop.ask("enough")

        summary = bench.run(progress=watch, stop=stop)
        assert summary.reason == "stopped"
        assert bench.sinks["second"].ids == list(range(9))
        assert [event.intake.records for event in events if isinstance(event, BatchDone)] == [3, 3, 3]

    def test_a_stop_waits_for_the_end_of_the_batch(self, bench: Bench) -> None:
        bench.produce_orders(10)
        bench.change(source=replace(bench.definition.source, batch_records=4))
        stop = Stop()
        summary = bench.run(lambda point: stop.ask("now") if point == "staged" else None, stop=stop)
        assert (summary.reason, summary.batches) == ("stopped", 1)
        assert len(bench.sinks["main"].content) == len(bench.sinks["second"].content) == 4

    def test_the_first_signal_asks_and_the_second_insists(self) -> None:
        stop = Stop()
        events: list[Event] = []
        before = signal.getsignal(signal.SIGTERM)
        with handled_signals(stop, events.append):
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.is_asked
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert isinstance(events[0], Stopping)
        assert signal.getsignal(signal.SIGTERM) is before

    def test_a_thread_leaves_signals_alone(self) -> None:
        failed: list[BaseException] = []

        def body() -> None:
            try:
                with handled_signals(Stop(), None):
                    pass
            except BaseException as error:  # noqa: BLE001  told to the test
                failed.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        assert not failed


class TestTwoCopies:
    def test_the_second_is_refused_by_the_process_id_of_the_first(self, bench: Bench) -> None:
        with Home(bench.definition.home, "orders"):
            assert holder(bench.definition.home) == os.getpid()
            with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}") as caught:
                bench.run()
            assert caught.value.exit_code == 3
        assert holder(bench.definition.home) is None
        bench.run()


class TestWhatStopsIt:
    def test_no_such_topic(self, bench: Bench) -> None:
        bench.change(source=replace(bench.definition.source, topics=("ordres",)))
        with pytest.raises(
            DefinitionWrong, match=r"no topic 'ordres' on 127.* did you mean 'orders'\?"
        ) as caught:
            bench.run()
        assert caught.value.exit_code == 2
        assert bench.sinks["main"].ledger == []

    def test_nobody_there(self, bench: Bench) -> None:
        settings = {"socket.connection.setup.timeout.ms": "300"}
        bench.change(source=replace(bench.definition.source, bootstrap="127.0.0.1:1", settings=settings))
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1") as caught:
            bench.run()
        assert getattr(caught.value, "exit_code", None) == 3

    def test_a_topic_created_again(self, bench: Bench) -> None:  # HF408
        bench.produce_orders(10)
        bench.run()
        recreate(bench, "orders", 2)
        bench.produce_orders(30)
        with pytest.raises(GuardTripped, match="HF408"):
            bench.run()
        assert len(bench.sinks["main"].content) == 10

    def test_a_head_that_was_deleted_before_it_was_read(self, bench: Bench) -> None:  # HF401
        bench.produce_orders(10, partition=1)
        bench.run()
        bench.produce_orders(10, partition=1)
        cut = bench.admin.delete_records([TopicPartition("orders", 1, 15)])
        cut[TopicPartition("orders", 1)].result(30)
        with pytest.raises(GuardTripped, match="5 offsets of orders-1 are gone: this stands at 10"):
            bench.run()
        assert len(bench.sinks["main"].content) == 10
        status = read_status_with(bench)
        assert status.source_problem is not None
        assert "HF401" in status.source_problem

    def test_a_topic_that_is_gone(self, bench: Bench) -> None:
        bench.produce_orders(10)

        def delete(point: str) -> None:
            if point == "done":
                bench.admin.delete_topics(["orders"])["orders"].result(30)

        with pytest.raises(GuardTripped, match="topic 'orders' is gone"):
            bench.run(delete)

    def test_a_broker_that_restarted_without_new_records_is_no_reason(self, bench: Bench) -> None:
        bench.produce_orders(10)
        bench.run()
        bench.broker.restart()
        assert bench.run().batches == 0
        bench.produce_orders(3)
        assert bench.run().intake.records == 3

    def test_a_sink_of_another_pipeline(self, bench: Bench) -> None:
        bench.run()
        bench.change(name="other", home=bench.definition.home + "-other")
        with pytest.raises(HoldfastError, match="holds the ledger of pipeline 'orders', not of 'other'"):
            bench.run()

    def test_a_secret_never_shows_in_what_is_raised_or_logged(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TOPIC", "hush-hush")
        bench.change(source=replace(bench.definition.source, topics=("${TOPIC}",)))
        with pytest.raises(DefinitionWrong, match=re.escape("'${TOPIC}'")):
            bench.run()
        assert "hush" not in Path(bench.definition.home, "log.jsonl").read_text()


class TestRetrying:
    def test_a_broker_that_is_away_for_a_moment_costs_a_moment(self, bench: Bench) -> None:
        bench.produce_orders(10)
        events: list[Event] = []
        failures = [Unreachable("gone for a moment"), Unreachable("and again")]

        def fail(point: str) -> None:
            if point == "staged" and failures:
                raise failures.pop()

        summary = bench.run(fail, events.append)
        assert summary.batches == 1
        assert [event.reason for event in events if isinstance(event, Retrying)] == [
            "and again",
            "gone for a moment",
        ]
        assert bench.sinks["main"].ids == bench.sinks["second"].ids == list(range(10))

    def test_what_time_does_not_mend_is_not_tried_again(self, bench: Bench) -> None:
        bench.produce_orders(10)
        passed: list[str] = []

        def fail(point: str) -> None:
            passed.append(point)
            if point == "routed":
                raise Unbalanced("made up")

        with pytest.raises(Unbalanced):
            bench.run(fail)
        assert passed.count("routed") == 1


class TestMonitoring:
    def test_positions_are_shown_as_a_group(self, bench: Bench) -> None:
        bench.produce_orders(7, partition=0)
        bench.run()
        asked = bench.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("hf-orders")])
        offsets = asked["hf-orders"].result(30).topic_partitions
        assert {(each.partition, each.offset) for each in offsets} == {(0, 7), (1, 0)}

    def test_a_group_with_members_is_refused(self, bench: Bench) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": bench.broker.bootstrap_servers,
                "group.id": "theirs",
                "group.protocol": "classic",
            }
        )
        assigned = threading.Event()
        consumer.subscribe(["orders"], on_assign=lambda *_: assigned.set())
        while not assigned.is_set():
            consumer.poll(0.1)
        try:
            bench.change(monitoring_group="theirs")
            with pytest.raises(EnvironmentFails, match="the group 'theirs' has 1 members"):
                bench.run()
        finally:
            consumer.close()

    def test_a_group_that_cannot_be_written_is_only_told(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise refused("cannot commit", ErrorCode.group_authorization_failed)

        monkeypatch.setattr(brokers, "commit", refuse)
        bench.produce_orders(3)
        bench.run()
        assert len(bench.sinks["main"].content) == 3
        assert [line["event"] for line in bench.log] == ["warning", "batch", "summary"]


def read_status_with(bench: Bench) -> Any:
    import holdfast.pipeline.engine.status as module

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "build_sinks", lambda _: dict(bench.sinks))
        return read_status(bench.definition)


def test_status_tells_where_each_sink_stands(bench: Bench) -> None:
    bench.produce_orders(10)
    bench.run()
    bench.produce_orders(5)
    bench.change(steps=(Filter("all", "true"),))
    status = read_status_with(bench)
    assert status.lag == 5
    main = next(sink for sink in status.sinks if sink.name == "main")
    assert (main.kind, main.lag, main.is_of_this_definition) == ("parquet", 5, False)
    assert main.entry == bench.sinks["main"].ledger[-1]
    assert status.last_batch["intake"]["records"] == 10
    assert status.running_pid is None
    assert status.as_json()["sinks"][0]["entry"]["positions"]["orders"]["partitions"]


def test_reset_says_what_comes_again_and_forgets(bench: Bench) -> None:
    import holdfast.pipeline.engine.resetting as module

    bench.produce_orders(10)
    bench.run()
    bench.produce_orders(5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("holdfast.pipeline.engine.deployment.build_sinks", lambda _: dict(bench.sinks))
        one = module.plan_reset(bench.definition, sinks=["second"])
        assert [(sink.name, sink.replayed, sink.left_out) for sink in one.sinks] == [("second", 0, 0)]
        every = module.plan_reset(bench.definition)
        assert {sink.name: sink.replayed for sink in every.sinks} == {
            "dead-letter": 10,
            "main": 10,
            "second": 10,
        }
        assert "main: 10 offsets again, 0 left out" in str(every)
        with Home(bench.definition.home, "orders"), pytest.raises(AlreadyRunning):
            module.perform_reset(every)
        module.perform_reset(every)
    bench.run()
    assert sorted(bench.sinks["main"].ids) == sorted([*range(10), *range(15)])


def test_a_pattern_takes_new_topics_and_never_its_own_dead_letters(bench: Bench) -> None:
    bench.create("orders-eu", 1)
    bench.create("orders-dlt", 1)
    bench.change(source=replace(bench.definition.source, topics=(), pattern="orders.*"))
    bench.produce_orders(2)
    bench.produce_orders(2, topic="orders-eu")
    bench.produce([b"x"], topic="orders-dlt")
    bench.run()
    bench.create("orders-us", 1)
    bench.produced -= 1
    bench.produce_orders(3, topic="orders-us")
    bench.run()
    assert bench.sinks["main"].ids == list(range(7))
    assert bench.sinks["dead-letter"].content == []


def test_events_and_log_say_what_was_done(bench: Bench) -> None:
    bench.produce_orders(4)
    events: list[Event] = []
    bench.run(progress=events.append)
    started, done, ended = events
    assert isinstance(started, Started)
    assert isinstance(done, BatchDone)
    assert ended == Ended("done")
    assert started.lag == 4
    assert done.lag == 0
    assert done.rows_by_sink == {"dead-letter": 0, "main": 4, "second": 4}
    assert set(done.sink_times_ms) == {"dead-letter", "main", "second"}
    assert set(done.times_ms) == {"plan", "stage", "route", "prepare", "aside", "commit"}
    batch, summary = bench.log
    assert batch["range"] == done.range.as_json()
    assert batch["routes"]["main"] == summary["routes"]["main"] == 4
    assert batch["pipeline"] == "orders"
