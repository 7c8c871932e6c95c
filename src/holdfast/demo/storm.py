"""The storm: orders are sent and processed while the broker, the sender and the Spark job are each killed with SIGKILL.

The moments are chosen to hurt, by what has happened and never by the clock: a slow machine sees the same storm.

1. the job has finished a batch, and orders come in: the broker is killed;
2. the sender goes on taking orders without a broker, and is killed with them in hand; a new one is started, then the
   broker;
3. the job has made new rows visible, and has not finished the batch they belong to: it is killed, with all it started;
4. the rest of the orders comes, the sender ends, and the job ends once it has come to the end of the topic.

So that nothing is over before it was killed, the sender is told how far it may go.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.demo.orders import DEAD_LETTERS, PARTITIONS, SOURCE, Orders
from holdfast.demo.processes import DemoFailed, Engine, Job, Sender
from holdfast.demo.screen import Process, Screen

WAIT_SECONDS_MAX: Final = 300.0
"""For Spark to start or to do a batch, on a machine that has other work."""
POLL_SECONDS: Final = 0.02
WATCH_SECONDS: Final = 0.002
"""Between two looks while the moment of the kill is near."""
ASK_SECONDS: Final = 0.4
BEFORE_FIRST_BATCH: Final = 0.25
"""Share of the orders that is sent before anything is killed."""
WITHOUT_BROKER: Final = 0.02
"""Share that the sender takes while the broker is dead."""
BEFORE_JOB_IS_KILLED: Final = 0.65
MORE: Final = 0.05

BROKER, SENDER, JOB = "broker", "sender", "Spark job"
KILLED: Final = "bold red"


class Stored:
    """How many messages the source's topic holds, asked now and then by a thread: a dead broker does not answer."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "demo-stored", "log_level": 0})
        self._is_over = threading.Event()
        self.messages = 0
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._is_over.wait(ASK_SECONDS):
            try:
                self.messages = self.now()
            except KafkaException:
                continue  # the broker is dead: that is what the demo is about

    def now(self, timeout_s: float = 1.0) -> int:
        ends = [
            self._consumer.get_watermark_offsets(TopicPartition(SOURCE, partition), timeout_s)
            for partition in range(PARTITIONS)
        ]
        return sum(end for _, end in ends)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._consumer.close()


class Storm:
    """One run of one side, ours or plain; it leaves the broker running for whoever counts."""

    def __init__(self, screen: Screen, orders: Orders, engine: Engine, sender: Sender, job: Job) -> None:
        self._screen = screen
        self._orders = orders
        self._engine = engine.machine
        self._engine_name = engine.name
        self._sender = sender
        self._job = job
        self._stored: Stored | None = None
        self.outage_taken = 0
        """Orders that were taken while the broker was dead."""
        for name in (BROKER, SENDER, JOB):
            screen.processes[name] = Process(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave no process behind, whatever happened; a second Ctrl-C does not come between."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.ExitStack() as ends:
            ends.callback(signal.signal, signal.SIGINT, before)
            ends.callback(self._engine.crash)
            if self._stored is not None:
                ends.callback(self._stored.close)
            ends.callback(self._sender.kill)
            ends.callback(self._job.kill)

    def run(self) -> None:
        self._begin()
        self._kill_broker_and_sender()
        self._kill_job()
        self._finish()

    # The four parts

    def _begin(self) -> None:
        self._start_broker(f"{self._engine_name} is ready")
        bootstrap = self._engine.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        topics = [NewTopic(SOURCE, PARTITIONS, 1), NewTopic(DEAD_LETTERS, PARTITIONS, 1)]
        for future in admin.create_topics(topics).values():
            future.result(30)
        self._stored = Stored(bootstrap)
        self._start_job("the Spark job starts")
        self._start_sender("the sender takes orders")
        self._sender.allow(self._share(BEFORE_FIRST_BATCH))
        self._until(lambda: self._job.batches() >= 1, "the first batch")
        self._processes_are(JOB, "running")
        self._screen.say("the first batch is written")

    def _kill_broker_and_sender(self) -> None:
        self._sender.allow(self._share(BEFORE_JOB_IS_KILLED))
        self._until(lambda: self._sender.taken > self._share(BEFORE_FIRST_BATCH), "orders to come in")
        self._note_kill(BROKER, f"SIGKILL to the broker, pid {self._engine.pid}")
        self._engine.crash()
        before = self._sender.taken
        self._until(
            lambda: self._sender.taken >= before + self._share(WITHOUT_BROKER),
            "orders to be taken without a broker",
        )
        pid = self._sender.pid
        self._sender.kill()
        self.outage_taken = self._sender.taken - before
        self._note_kill(
            SENDER,
            f"SIGKILL to the sender, pid {pid}: it took {self.outage_taken:,} orders since the broker died",
        )
        self._start_sender("the sender is back, the broker not yet")
        self._start_broker("the broker is back")

    def _kill_job(self) -> None:
        visible = self._job.outputs()
        self._until(lambda: self._has_more_than(visible), "the next output", WATCH_SECONDS)
        pid = self._job.pid
        processes = self._job.kill()
        self._note_kill(
            JOB,
            f"SIGKILL to the Spark job, pid {pid} ({processes} processes), {self._job.unfinished()}",
        )
        self._start_job("the Spark job starts again")
        finished = self._job.batches()
        self._sender.allow(self._orders.count)
        self._until(lambda: self._job.batches() > finished, "the first batch after the kill")
        self._processes_are(JOB, "running")
        self._screen.say("the Spark job goes on where its outputs stand")

    def _has_more_than(self, outputs: int) -> bool:
        """Whether new rows can be seen; a job that has nothing left to make them of is given more."""
        if self._job.outputs() > outputs:
            return True
        assert self._stored is not None
        taken = self._sender.taken
        if taken >= self._sender.until and self._job.position() >= self._stored.messages >= taken:
            self._sender.allow(min(self._orders.count, taken + self._share(MORE)))
        return False

    def _finish(self) -> None:
        self._until(lambda: self._sender.is_done, "the last order to be sent")
        self._processes_are(SENDER, "done")
        self._screen.say(f"the sender is done: {self._sender.taken:,} orders taken")
        assert self._stored is not None
        end = self._stored.messages = self._stored.now(30)
        self._until(lambda: self._job.position() >= end, "the job to reach the end of the topic")
        self._job.stop()
        self._look()
        self._processes_are(JOB, "done")
        self._screen.say("the Spark job has read everything, and is stopped")

    # Processes

    def _start_broker(self, what: str) -> None:
        self._processes_are(BROKER, "starting")
        self._engine.start()
        self._processes_are(BROKER, "running", self._engine.pid)
        self._screen.say(f"{what}, pid {self._engine.pid}")

    def _start_sender(self, what: str) -> None:
        self._sender.start(self._engine.bootstrap_servers)
        self._processes_are(SENDER, "running", self._sender.pid)
        self._screen.say(f"{what}, pid {self._sender.pid}")

    def _start_job(self, what: str) -> None:
        self._job.start(self._engine.bootstrap_servers)
        self._processes_are(JOB, "starting", self._job.pid)
        self._screen.say(f"{what}, pid {self._job.pid}")

    def _processes_are(self, name: str, state: str, pid: int | None = None) -> None:
        process = self._screen.processes[name]
        process.state = state
        process.pid = pid or process.pid

    def _note_kill(self, name: str, what: str) -> None:
        process = self._screen.processes[name]
        process.kills += 1
        process.state = "killed"
        self._screen.set("kills", sum(each.kills for each in self._screen.processes.values()))
        self._screen.say(what, KILLED)

    # Waiting

    def _share(self, part: float) -> int:
        return max(1, int(self._orders.count * part))

    def _until(self, come_about: Callable[[], bool], what: str, poll_s: float = POLL_SECONDS) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        look_due = 0.0
        while not come_about():
            now = time.monotonic()
            self._job.require_alive()
            self._sender.require_alive()
            if now > deadline:
                raise DemoFailed(f"{what}: not within {WAIT_SECONDS_MAX:.0f} s")
            if now >= look_due:
                look_due = now + 0.2
                self._look()
            time.sleep(poll_s)
        self._look()

    def _look(self) -> None:
        """Bring the figures up to date."""
        counts = self._job.counts()
        screen = self._screen
        screen.set("sent", self._sender.taken)
        screen.set("stored", self._stored.messages if self._stored is not None else 0)
        screen.set("output", counts.output)
        screen.set("dead letter", counts.dead_letter)
        screen.set("duplicate", counts.duplicate)
        screen.set("late", counts.late)
        screen.set("windows", counts.windows)
        screen.tick()
