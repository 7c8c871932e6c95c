"""HF307, HF308, HF310, HF311: partitions that change hands, messages that were taken back, effects done twice."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any, Final

from holdfast.client import Consumer, Message
from holdfast.client.database.store import open_database
from holdfast.lab.checking import ABORTED_READ, DUPLICATED
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import Background, Scene, numbers, take, value_of

REBALANCED: Final = "a second member takes one of the partitions over"
SHORT_POLLS: Final[dict[str, Any]] = {
    "max.poll.interval.ms": 2000,
    "session.timeout.ms": 2000,
    "heartbeat.interval.ms": 100,
}
COUNT: Final = 1000
"""So many messages at their pace last until any second member has come."""

# ---------------------------------------------------------------- HF307: an old owner that works on


def hf307_unsafe(lab: Lab) -> None:
    topic, group = lab.topic(partitions=2), lab.name("group")
    scene = lab.scene
    lab.plan(REBALANCED, successes=10)
    for partition in (0, 1):
        lab.write(scene, topic, [f"{partition}.{number}" for number in range(5)], partition)
    first = scene.consumer(group, {"heartbeat.interval.ms": 100})
    first.subscribe([topic])
    in_hand = take(first, 10)
    for message in in_hand:
        lab.given(group, "first", message)
    second = scene.consumer(group)
    second.subscribe([topic])
    handled = 0

    def second_reads() -> bool:
        nonlocal handled
        # The first takes part in the rebalance, which gives one of its partitions away, and works on what it has.
        first.poll(0)
        message = second.poll(0.1)
        if message is not None and message.error() is None:
            lab.reads(group, "second", message)
            handled += 1
        return handled == 5

    wait_until(second_reads, "the second member handles the messages of its partition")
    lab.fault(REBALANCED)
    for message in in_hand:
        lab.handles(group, "first", message)
    for consumer in (first, second):
        consumer.close()
    lab.scan(scene, topic, 2)


def hf307_safe(lab: Lab) -> None:
    topic, group = lab.topic(partitions=2), lab.name("group")
    scene = lab.scene
    lab.plan(REBALANCED, successes=2 * COUNT)
    for partition in (0, 1):
        lab.write(scene, topic, [f"{partition}.{number}" for number in range(COUNT)], partition)
    second_is_at_work = threading.Event()

    def handle(message: Message) -> None:
        second_is_at_work.wait(0.03)
        lab.handles(group, "first", message)

    def handle_second(message: Message) -> None:
        if not second_is_at_work.is_set():
            second_is_at_work.set()
            lab.fault(REBALANCED)
        lab.handles(group, "second", message)

    # As above, the first has everything in hand before the second comes.
    first, second = (
        Consumer(
            scene.bootstrap_servers,
            group=group,
            topics=[topic],
            workers=2,
            in_flight_max=COUNT,
            commit_seconds=0.05,
            config={"heartbeat.interval.ms": 100},
        )
        for _ in range(2)
    )
    running = Background(lambda: first.run(handle))
    wait_until(lambda: first.handled > 5, "the first member is at work")
    also_running = Background(lambda: second.run(handle_second))
    ends = {f"{topic}-0": COUNT, f"{topic}-1": COUNT}
    wait_until(lambda: scene.committed(group) == ends, "everything is handled and committed")
    second.stop()
    also_running.finish()
    first.stop()
    running.finish()
    for partition in (0, 1):
        lab.committed_offset(scene, group, topic, partition)
    lab.scan(scene, topic, 2)


# ---------------------------------------------------------------- HF308: work longer than max.poll.interval.ms

TOO_LONG: Final = "a handler is at work for longer than max.poll.interval.ms"


def plain_pair(lab: Lab, group: str, topic: str, *, watched: bool) -> None:
    """Two plain members; the first takes the message, and is at it until the group has given it to the second."""
    first, second = (lab.scene.consumer(group, SHORT_POLLS) for _ in range(2))
    first.subscribe([topic])
    (message,) = take(first, 1)
    second.subscribe([topic])
    (again,) = take(second, 1)
    if watched:
        lab.fault(TOO_LONG)
        lab.handles(group, "second", again)
        lab.handles(group, "first", message)
    for each in (first, second):
        each.close()


def hf308_unsafe(lab: Lab) -> None:
    topic, group = lab.topic(), lab.name("group")
    lab.plan(TOO_LONG, successes=1)
    lab.write(lab.scene, topic, ["long"])
    plain_pair(lab, group, topic, watched=True)
    lab.scan(lab.scene, topic)


def hf308_safe(lab: Lab) -> None:
    topic, other, group = lab.topic(), lab.topic("other"), lab.name("group")
    scene = lab.scene
    lab.plan(TOO_LONG, successes=2)
    scene.write(other, {0: ["long"]})
    is_enough = threading.Event()
    first, second = (
        Consumer(
            scene.bootstrap_servers,
            group=group,
            topics=[topic],
            drain_seconds=0.3,
            last_commit_seconds=0.3,
            in_flight_max=1,
            config={**SHORT_POLLS, "log_level": 0},
        )
        for _ in range(2)
    )

    def handle(actor: str, message: Message) -> None:
        if value_of(message) == "long":
            is_enough.wait(60)
        lab.handles(group, actor, message)

    running = Background(lambda: first.run(lambda message: handle("first", message)))
    also_running = Background(lambda: second.run(lambda message: handle("second", message)))
    wait_until(lambda: scene.members(group) == 2, "both are members")
    lab.write(scene, topic, ["long", "next"])
    # As long as it takes two plain members, with the same settings, to get the same message.
    plain_pair(lab, lab.name("others"), other, watched=False)
    lab.fault(TOO_LONG)
    is_enough.set()
    wait_until(lambda: scene.committed_offset(group, topic) == 2, "both are handled and committed")
    for consumer in (first, second):
        consumer.stop()
    running.finish()
    also_running.finish()
    lab.committed_offset(scene, group, topic)
    lab.scan(scene, topic)


# ---------------------------------------------------------------- HF310: messages that were taken back


class TakenBack:
    """A topic with messages that count, some that were taken back, and one that nobody has decided about."""

    def __init__(self, lab: Lab) -> None:
        self.topic = lab.topic()
        self.producer = lab.scene.producer({"transactional.id": self.topic})
        self.producer.init_transactions(30)
        pairs = lab.random.randint(1, 3)
        self.kept = [f"kept-{number}" for number in range(pairs)]
        for number in range(pairs):
            self._send(lab, f"kept-{number}", "committed")
            self._send(lab, f"taken-back-{number}", "aborted")
        self._send(lab, "undecided", None)
        self.decided = 4 * pairs
        """Messages and their markers."""
        self.all = 2 * pairs + 1

    def _send(self, lab: Lab, message: str, outcome: str | None) -> None:
        self.producer.begin_transaction()
        lab.note("begin", "program", txn=f"txn-{message}", ids=[message])
        lab.sends("program", self.topic, [message])
        self.producer.produce(self.topic, message)
        self.producer.flush(30)
        if outcome == "committed":
            self.producer.commit_transaction(30)
        elif outcome == "aborted":
            self.producer.abort_transaction(30)
        if outcome is not None:
            lab.note("end", "program", txn=f"txn-{message}", outcome=outcome)


def hf310_unsafe(lab: Lab) -> None:
    group = lab.name("group")
    lab.plan(successes=1)
    made = TakenBack(lab)
    consumer = lab.scene.consumer(group, {"isolation.level": "read_uncommitted"})
    consumer.subscribe([made.topic])
    for message in take(consumer, made.all):
        lab.reads(group, "member", message)
    consumer.close()
    made.producer.abort_transaction(30)


def hf310_safe(lab: Lab) -> None:
    group = lab.name("group")
    lab.plan(successes=1)
    made = TakenBack(lab)
    consumer = Consumer(lab.scene.bootstrap_servers, group=group, topics=[made.topic], commit_seconds=0.05)
    running = Background(lambda: consumer.run(lambda message: lab.reads(group, "member", message)))
    wait_until(
        lambda: lab.scene.committed_offset(group, made.topic) >= made.decided, "everything decided is read"
    )
    consumer.stop()
    running.finish()
    lab.committed_offset(lab.scene, group, made.topic)
    made.producer.abort_transaction(30)
    lab.scan(lab.scene, made.topic)


# ---------------------------------------------------------------- HF311: a side effect and its committed offset

DIES: Final = "the program dies between the effect and its committed offset"
PLAIN_ROWS: Final = """
import os, signal, sqlite3, sys
from confluent_kafka import Consumer
bootstrap, topic, path, *dies = sys.argv[1:]
database = sqlite3.connect(path, isolation_level=None)
consumer = Consumer({
    "bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest", "enable.auto.commit": False,
    "session.timeout.ms": 1000, "heartbeat.interval.ms": 200,
})
consumer.subscribe([topic])
while True:
    message = consumer.poll(1)
    if message is None:
        continue
    database.execute("insert into payments values (?)", (message.value().decode(),))
    if dies and message.value() == dies[0].encode():
        os.kill(os.getpid(), signal.SIGKILL)
    consumer.commit(message, asynchronous=False)
"""
OURS_ROWS: Final = """
import os, signal, sys
from holdfast.client import DatabaseSink
bootstrap, topic, path, *dies = sys.argv[1:]
def pay(message, connection):
    connection.execute("insert into payments values (?)", (message.value.decode(),))
    if dies and message.value == dies[0].encode():
        os.kill(os.getpid(), signal.SIGKILL)
DatabaseSink(
    bootstrap, group=topic, topics=[topic], database=path, batch_messages=2,
    config={"session.timeout.ms": 1000, "heartbeat.interval.ms": 200},
).run(pay)
"""
PAYMENTS: Final = 6


def payments(path: Path) -> list[str]:
    with sqlite3.connect(path) as database:
        rows = database.execute("select what from payments order by cast(what as integer)")
        return [row[0] for row in rows]


def pays(lab: Lab, program: str, path: Path) -> None:
    topic = lab.topic("payments")
    scene: Scene = lab.scene
    lab.plan(DIES, successes=PAYMENTS)
    lab.write(scene, topic, numbers(0, PAYMENTS))
    dies_at = str(lab.random.randrange(1, PAYMENTS - 1))
    code, _ = scene.program(program, topic, str(path), dies_at).ends()
    if code < 0:
        lab.fault(DIES)
    scene.program(program, topic, str(path))
    wait_until(lambda: str(PAYMENTS - 1) in payments(path), "everything is paid")
    for what in payments(path):
        lab.note("handle", "database", id=what, group="payments")
    lab.scan(scene, topic)


def hf311_unsafe(lab: Lab) -> None:
    pays(lab, PLAIN_ROWS, _payments_table(lab))


def hf311_safe(lab: Lab) -> None:
    path = _payments_table(lab)
    store = open_database(str(path))
    store.connect()
    store.migrate()
    store.close()
    pays(lab, OURS_ROWS, path)


def _payments_table(lab: Lab) -> Path:
    path = lab.directory / "payments"
    with sqlite3.connect(path) as database:
        database.execute("create table payments (what text)")
    return path


EXPERIMENTS: Final = (
    Experiment(
        "HF307",
        "two owners of a partition",
        hf307_unsafe,
        hf307_safe,
        "work in hand is finished after the partition is gone",
        "what was not begun is handed back, what was is finished and committed first",
        claim=Claim({DUPLICATED: 1}),
    ),
    Experiment(
        "HF308",
        "handling outlasts the poll interval",
        hf308_unsafe,
        hf308_safe,
        "the handler runs in the poll loop",
        "the consumer pauses and goes on polling",
        claim=Claim({DUPLICATED: 1}),
    ),
    Experiment(
        "HF310",
        "aborted messages are read",
        hf310_unsafe,
        hf310_safe,
        "isolation.level=read_uncommitted",
        "isolation.level=read_committed",
        claim=Claim({ABORTED_READ: 1}),
    ),
    Experiment(
        "HF311",
        "effect and committed offset are not one",
        hf311_unsafe,
        hf311_safe,
        "the effect, then the commit",
        "effect and committed offset in one database transaction",
        claim=Claim({DUPLICATED: 1}),
    ),
)
