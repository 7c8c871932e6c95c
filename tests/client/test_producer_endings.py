"""Whatever interrupts a producer, and however its process ends: no message is lost with exit code 0, nothing hangs.

Every way to end a program, with each kind of producer, is in `tests/endings`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from confluent_kafka import KafkaError
from tests.support.fake_producer import FakeCluster, Stored, Verdict
from tests.support.interrupting import interrupted_at

from holdfast.client import direct, exit_guard
from holdfast.client.delivery import FAILURES_KEPT_MAX, Bell, Delivery, Failures, Waiting
from holdfast.client.errors import DeliveryFailed, ForkedProducer, SendTimeout, UndeliveredMessages
from holdfast.client.process import say
from holdfast.client.producer import Producer
from holdfast.errors import UsageError


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"orders": 1})


@pytest.fixture
def producer(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Producer]:
    real = direct.DirectSender
    monkeypatch.setattr(direct, "DirectSender", lambda settings: real(settings, make=cluster.make))
    made = Producer("fake")
    yield made
    cluster.back()
    made.close()


@pytest.fixture
def owed() -> Iterator[list[int]]:
    """What the guard keeps until the end of the program, which is this one's to settle."""
    before = exit_guard._owed.copy()
    yield exit_guard._owed
    exit_guard._owed[:] = before


def refuse_all(topic: str, partition: int, message: Stored) -> Verdict:
    return Verdict(KafkaError.TOPIC_AUTHORIZATION_FAILED)


def test_what_ends_a_thread_and_no_more_is_owed(owed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_guard, "_print_end_of_thread", lambda ended: None)
    for error in (UndeliveredMessages([], 3), ValueError("not ours")):
        exit_guard._thread_ended(threading.ExceptHookArgs((type(error), error, None, None)))
    assert owed[-1:] == [3]


def test_what_a_daemon_thread_has_raised_and_nobody_has_caught_is_in_the_air() -> None:
    caught: list[UndeliveredMessages] = []

    def close() -> None:
        try:
            raise exit_guard.raised(UndeliveredMessages([], 3))
        except UndeliveredMessages as error:
            caught.append(error)

    for is_daemon in (False, True):
        thread = threading.Thread(target=close, daemon=is_daemon)
        thread.start()
        thread.join()
        assert set(caught) & set(exit_guard._in_the_air) == (set(caught) if is_daemon else set())
        caught.clear()
        gc.collect()
    assert not exit_guard._in_the_air


# Whole programs: nobody listens at the address, so that every message is under way when they end.

PROGRAM = """
import atexit, os, signal, sys, threading
from holdfast.client import Producer, exit_guard
exit_guard.LAST_CHANCE_SECONDS = 0.1
def producer():
    return Producer("127.0.0.1:1", config={"log_level": 0})
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_close_that_was_interrupted_is_finished_when_the_program_ends() -> None:
    done = run("""
        p = producer()
        p.send("orders", b"x")
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            p.close(30)
        except KeyboardInterrupt:
            pass
        """)
    assert done.returncode == exit_guard.EXIT_UNDELIVERED, done.stderr
    assert "1 message had not been delivered" in done.stderr


def test_the_exit_code_leaves_the_buffers_and_the_atexit_functions_of_the_program_alone(
    tmp_path: Path,
) -> None:
    done = run(f"""
        atexit.register(print, "registered before")
        p = producer()
        atexit.register(lambda: print("registered after,", p.under_way > 0))
        p.send("orders", b"x")
        file = open({str(tmp_path / "file")!r}, "w")
        file.write("written")
        print("printed", end=" ")
        """)
    assert done.returncode == exit_guard.EXIT_UNDELIVERED
    assert done.stdout.splitlines() == ["printed registered after, True", "registered before"]
    assert (tmp_path / "file").read_text() == "written"


def test_close_in_a_signal_handler_delivers_wherever_the_program_was() -> None:
    done = run("""
        p = Producer("nowhere", config={"test.mock.num.brokers": 1, "log_level": 0})
        p.send("orders", b"x").wait(30)
        sent = 1
        def end(*_):
            p.close()
            print(sent <= p._sender.delivered <= sent + 1, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while True:
            p.send("orders", b"x").then(lambda delivery: None)
            sent += 1
            if not sent % 100:
                p.flush()
        """)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


# Interrupts at every place where Python looks for signals

SENDING = (
    Producer.send,
    direct.DirectSender.send,
    direct.DirectSender._give_turn,
    Bell.ring,
    Bell.wait,
    Bell.__init__,
)
ENDING = (
    Producer.close,
    Producer.end,
    direct.DirectSender.flush,
    direct.DirectSender.close,
    Waiting.wait,
    Bell.wait,
    Delivery.wait,
    Delivery.then,
    Delivery.notify,
    Delivery._hook,
    Delivery.call_back,
)


def codes_of(functions: Collection[Callable[..., Any]]) -> frozenset[CodeType]:
    return frozenset(function.__code__ for function in functions)


def test_an_interrupt_anywhere_in_sending_leaves_every_other_delivery_settled(
    producer: Producer, cluster: FakeCluster
) -> None:
    sender: Any = producer._sender
    point = 0
    deliveries: list[Delivery] = []
    is_interrupted = True
    while is_interrupted:
        point += 1
        sender._is_due = True
        deliveries.append(producer.send("orders", b"before"))
        sender._is_due = True
        is_interrupted = interrupted_at(point, lambda: producer.send("orders", b"x"), codes_of(SENDING))
    assert point > 5
    assert producer.flush(30).is_complete
    assert all(delivery.delivered for delivery in deliveries)


def test_a_close_that_is_interrupted_anywhere_can_be_called_again_and_names_what_is_lost(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = direct.DirectSender
    monkeypatch.setattr(direct, "DirectSender", lambda settings: real(settings, make=cluster.make))
    cluster.away()
    point = 0
    while True:
        point += 1
        producer = Producer("fake")
        delivery = producer.send("orders", b"x")

        def end(delivery: Delivery = delivery, producer: Producer = producer) -> None:
            delivery.then(lambda delivery: None)
            with pytest.raises(TimeoutError):
                delivery.wait(0.001)
            producer.close(0.001)

        with pytest.raises((UndeliveredMessages, AssertionError)) as ended:
            assert not interrupted_at(point, end, codes_of(ENDING))
        if ended.type is UndeliveredMessages:
            break
        if not producer.is_closed:
            assert producer in exit_guard._open, "somebody will be told"
            with pytest.raises(UndeliveredMessages, match="1 message was not delivered"):
                producer.close(0)
        with pytest.raises(DeliveryFailed):
            delivery.wait(0)
        assert producer not in exit_guard._open
    assert point > 20


# Delivery callbacks


def test_a_callback_cannot_wait_for_the_thread_that_calls_it(
    producer: Producer, cluster: FakeCluster
) -> None:
    cluster.hold_reports()
    later = producer.send("orders", b"later")
    raised: list[str] = []
    over = threading.Event()

    def call(delivery: Delivery) -> None:
        for wait in (producer.close, producer.send("orders", b"more").wait, producer.flush):
            try:
                wait()
            except UsageError as error:
                raised.append(str(error))
        over.set()

    later.then(call)
    cluster.release_reports()
    assert over.wait(30)
    assert len(raised) == 3
    assert all("callback" in line for line in raised)
    assert producer.send("orders", b"goes on").wait(30)


def test_a_callback_that_ends_the_program_ends_nothing_and_is_not_forgotten(
    producer: Producer, owed: list[int]
) -> None:
    def end(delivery: Delivery) -> None:
        sys.exit(3)

    before = len(owed)
    producer.send("orders", b"x").then(end)
    assert producer.send("orders", b"goes on").wait(30)
    assert producer.flush(30).is_complete
    assert len(owed) == before + 1


# Reports


def test_a_report_is_not_complete_when_the_refused_are_only_counted(
    producer: Producer, cluster: FakeCluster
) -> None:
    cluster.refuse(refuse_all)
    deliveries = [producer.send("orders", b"x") for _ in range(FAILURES_KEPT_MAX + 1)]
    producer.wait_settled(30)
    for delivery in deliveries[:FAILURES_KEPT_MAX]:
        with pytest.raises(DeliveryFailed):
            delivery.wait(0)
    report = producer.flush(30)
    assert not report.is_complete
    assert (report.refused_count, len(report.refused)) == (1, 1)


def test_a_report_that_nobody_reads_tells_nobody(cluster: FakeCluster, producer: Producer) -> None:
    cluster.refuse(refuse_all)
    producer.send("orders", b"x")
    producer.flush(30)
    with pytest.raises(UndeliveredMessages, match="1 message was not delivered"):
        producer.close()


def test_failures_that_are_told_of_make_room_for_others() -> None:
    failures = Failures()
    told = [_failed() for _ in range(FAILURES_KEPT_MAX)]
    for delivery in told:
        failures.add(delivery)
        delivery.set_told()
    for _ in range(3):
        failures.add(_failed())
    seen = failures.seen()
    assert (len(seen.named), seen.total) == (3, 3)


def _failed() -> Delivery:
    delivery = Delivery()
    delivery._waiting = Waiting()
    delivery.topic, delivery.partition, delivery.key = "orders", None, None
    delivery._place = delivery._hooks = None
    delivery.error = SendTimeout("no room")
    return delivery


# Forks


def test_a_forked_child_is_told_to_make_its_own_producer_and_the_parent_loses_nothing() -> None:
    done = run("""
        from holdfast.client import ForkedProducer
        p = Producer("nowhere", config={"test.mock.num.brokers": 1, "log_level": 0})
        p.send("orders", b"x").wait(30)
        under_way = [p.send("orders", b"x") for _ in range(1000)]
        pid = os.fork()
        if not pid:
            refused = 0
            for use in (lambda: p.send("orders", b"y"), p.flush, under_way[-1].wait):
                try:
                    use()
                except ForkedProducer:
                    refused += 1
            p.close()
            sys.exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        for delivery in under_way:
            delivery.wait(30)
        p.close()
        """)
    assert done.returncode == 0, done.stderr


def test_a_producer_that_a_worker_process_made_and_did_not_close_is_said_with_its_exit_code() -> None:
    done = run("""
        import multiprocessing
        def work():
            producer().send("orders", b"x")
        worker = multiprocessing.get_context("fork").Process(target=work)
        worker.start()
        worker.join()
        sys.exit(worker.exitcode)
        """)
    assert done.returncode == exit_guard.EXIT_UNDELIVERED, done.stderr
    assert "1 message had not been delivered" in done.stderr


def test_a_line_for_an_operator_who_cannot_read_it_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in (None, _Broken()):
        monkeypatch.setattr(sys, "stderr", broken)
        say("nobody reads this")


class _Broken:
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None: ...


def test_an_orphan_refuses_in_words(producer: Producer) -> None:
    sender: Any = producer._sender
    producer.orphan()
    with pytest.raises(ForkedProducer, match="after the fork"):
        producer.send("orders", b"x")
    producer.close()
    sender.reports.orphaned = None
    sender.close()
