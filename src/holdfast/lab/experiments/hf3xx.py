"""HF301 to HF306 and HF309: committed offsets that say more than was done, or nothing at all.

A group is judged by what it *handled*. When its member has died, `finish` reads on from the committed offset the group
left behind, as its successor would.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any, Final

from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition
from confluent_kafka.admin import NewPartitions

from holdfast.client import CommittedOffsetLost, Consumer, HandlerFailed, Message, RetryPolicy
from holdfast.lab.checking import DUPLICATED, LOST
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.lab.watching import id_of
from holdfast.testing.engines import wait_until
from holdfast.testing.processes import die_with_parent
from holdfast.testing.risks import SHORT_SESSION, Background, Program, numbers, take, value_of

MEMBER_KILLED: Final = "the consumer is killed"
BROKER_KILLED: Final = "the broker is killed"
COUNT: Final = 10


def filled(lab: Lab, fault: str, partitions: int = 1) -> tuple[str, str]:
    """A topic that is filled and a group to read it; the fault is planned."""
    lab.plan(fault, successes=COUNT)
    topic = lab.topic(partitions=partitions)
    for partition in range(partitions):
        prefix = "" if partitions == 1 else f"{partition}."
        lab.write(lab.scene, topic, [f"{prefix}{number}" for number in numbers(0, COUNT)], partition)
    return topic, lab.name("group")


def finish(lab: Lab, group: str, topic: str, partitions: int = 1, actor: str = "successor") -> None:
    """Handle what is left for a group, from its committed offsets to the ends."""
    positions = [lab.committed_offset(lab.scene, group, topic, index) for index in range(partitions)]
    consumer = lab.scene.consumer(group, {"enable.partition.eof": True})
    ended: set[int] = set()
    try:
        consumer.assign(
            [
                TopicPartition(topic, index, OFFSET_BEGINNING if position < 0 else position)
                for index, position in enumerate(positions)
            ]
        )
        for index, position in enumerate(positions):
            lab.note("assign", actor, group=group, topic=topic, partition=index, offset=max(position, 0))

        def read_on() -> bool:
            message: Any = consumer.poll(1.0)
            if message is not None and message.error() is None:
                lab.reads(group, actor, message)
            elif message is not None and message.error().code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            return len(ended) == partitions

        wait_until(read_on, f"{topic} is read to its end")
    finally:
        consumer.close()
    lab.scan(lab.scene, topic, partitions)


def member(lab: Lab, text: str, topic: str, group: str, *more: str) -> Program:
    """A program that says what it has handled."""

    def heard(line: str) -> None:
        word, _, message = line.partition(" ")
        if word == "handled":
            lab.note("handle", "member", id=message, group=group)

    return lab.scene.program(text, topic, group, *more, on_line=heard)


def end(lab: Lab, program: Program) -> None:
    program.kill()
    lab.fault(MEMBER_KILLED)


# ---------------------------------------------------------------- HF301: committed by time

PLAIN_BY_TIME: Final = """
import sys, threading
from confluent_kafka import Consumer
bootstrap, topic, group, count = sys.argv[1:]
consumer = Consumer({
    "bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest",
    "enable.auto.commit": True, "auto.commit.interval.ms": 50,
})
consumer.subscribe([topic])
messages = []
while len(messages) < 10:
    messages += consumer.consume(10 - len(messages), 1)
for message in messages[:int(count)]:
    print("handled", message.value().decode(), flush=True)
print("stuck", flush=True)
threading.Event().wait()
"""
OURS_AT_WORK: Final = """
import sys, threading
from holdfast.client import Consumer
bootstrap, topic, group, workers, order, stuck = sys.argv[1:]
def handle(message):
    if message.value == stuck.encode():
        print("stuck\\n", end="", flush=True)
        threading.Event().wait()
    # In one piece: others print too.
    print(f"handled {message.value.decode()}\\n", end="", flush=True)
Consumer(
    bootstrap, group=group, topics=[topic], workers=int(workers), order=order, commit_seconds=0.05
).run(handle)
"""


def hf301(lab: Lab, *, by_time: bool) -> None:
    topic, group = filled(lab, MEMBER_KILLED)
    done = lab.random.randint(1, COUNT - 1)
    if by_time:
        program, committed = member(lab, PLAIN_BY_TIME, topic, group, str(done)), COUNT
    else:
        program, committed = member(lab, OURS_AT_WORK, topic, group, "1", "partition", str(done)), done
    program.says("stuck")
    wait_until(
        lambda: lab.scene.committed_offset(group, topic) == committed, f"the committed offset is {committed}"
    )
    end(lab, program)
    finish(lab, group, topic)


# ---------------------------------------------------------------- HF302: committed while threads work

PLAIN_THREADS: Final = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from confluent_kafka import Consumer
bootstrap, topic, group, stuck = sys.argv[1:]
consumer = Consumer({
    "bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False,
})
consumer.subscribe([topic])
def handle(message):
    if message.value() == stuck.encode():
        threading.Event().wait()
    print(f"handled {message.value().decode()}\\n", end="", flush=True)
with ThreadPoolExecutor(4) as pool:
    while True:
        message = consumer.poll(1)
        if message is not None:
            pool.submit(handle, message)
            consumer.commit(message=message, asynchronous=False)
"""


def hf302_unsafe(lab: Lab) -> None:
    topic, group = filled(lab, MEMBER_KILLED)
    stuck = str(lab.random.randrange(COUNT - 1))
    program = member(lab, PLAIN_THREADS, topic, group, stuck)
    program.says(f"handled {COUNT - 1}")
    wait_until(lambda: lab.scene.committed_offset(group, topic) == COUNT, "everything is committed")
    end(lab, program)
    finish(lab, group, topic)


def hf302_safe(lab: Lab) -> None:
    topic, group = filled(lab, MEMBER_KILLED, partitions=2)
    stuck = lab.random.randrange(COUNT - 1)
    program = member(lab, OURS_AT_WORK, topic, group, "4", "none", f"0.{stuck}")
    handled = lab.recorder
    wanted = {f"{partition}.{number}" for partition in range(2) for number in range(COUNT)} - {f"0.{stuck}"}
    # What is committed now was committed after all of them, but one, were handled.
    lab.write(lab.scene, topic, ["1.last"], 1)
    program.says("handled 1.last")
    wait_until(
        lambda: lab.scene.committed_offset(group, topic, 1) == COUNT + 1, "the other partition is committed"
    )
    end(lab, program)
    done = {event.id for event in handled.history().of("handle")}
    lab.say(f"handled before the end: {len(done & wanted)} of {len(wanted)}")
    finish(lab, group, topic, 2)


# ---------------------------------------------------------------- HF303: a later commit overtakes a failure


def hf303_unsafe(lab: Lab) -> None:
    topic, group = filled(lab, "a handler fails once")
    failing = str(lab.random.randrange(COUNT - 1))
    consumer = lab.scene.consumer(group)
    consumer.subscribe([topic])
    for message in take(consumer, COUNT):
        if lab.given(group, "member", message) == failing:
            # It is not committed, so it will come again: so the thinking goes.
            lab.fault("a handler fails once")
            continue
        lab.handles(group, "member", message)
        consumer.commit(message=message, asynchronous=False)
    consumer.close()
    finish(lab, group, topic)


def hf303_safe(lab: Lab) -> None:
    topic, group = filled(lab, "a handler fails once")
    failing = str(lab.random.randrange(COUNT - 1))
    options: dict[str, Any] = {"group": group, "topics": [topic], "workers": 4, "order": "none"}
    first = Consumer(
        lab.scene.bootstrap_servers,
        retry=RetryPolicy(attempts=1, give_up="stop"),
        in_flight_max=COUNT,
        **options,
    )

    def handle(message: Message) -> None:
        if id_of(message.value) == failing:
            lab.fault("a handler fails once")
            raise ConnectionError("nobody answers")
        lab.handles(group, "member", message)

    with contextlib.suppress(HandlerFailed):
        first.run(handle)
    finish(lab, group, topic)


# ---------------------------------------------------------------- HF304, HF305: where a group begins

LATEST: Final = {"auto.offset.reset": "latest", "enable.partition.eof": True}


def reads_at_latest(lab: Lab, group: str, topic: str, partition: int) -> None:
    """A plain member of a group that begins at the end: "later" is written when it has reached it."""
    consumer = lab.scene.consumer(group, LATEST)
    consumer.subscribe([topic])
    wrote = False

    def more() -> bool:
        nonlocal wrote
        message: Any = consumer.poll(1)
        if message is None or message.partition() != partition:
            return False
        error = message.error()
        if error is None:
            lab.reads(group, "member", message)
            consumer.commit(message=message, asynchronous=False)
            return True
        if error.code() == KafkaError._PARTITION_EOF and not wrote:
            wrote = True
            lab.write(lab.scene, topic, [f"later-{partition}"], partition)
        return False

    wait_until(more, f"a message of {topic}-{partition}")
    consumer.close()
    lab.committed_offset(lab.scene, group, topic, partition)


def runs(lab: Lab, group: str, topic: str, count: int, **options: Any) -> None:
    """A consumer of ours, until it has handled so many."""
    consumer = Consumer(lab.scene.bootstrap_servers, group=group, topics=[topic], **options)
    handled = 0

    def handle(message: Message) -> None:
        nonlocal handled
        lab.handles(group, "member", message)
        handled += 1
        if handled == count:
            consumer.stop()

    consumer.run(handle)


ADDED: Final = "a partition is added, and messages are in it before any member knows"


def add_partition(lab: Lab, topic: str) -> list[str]:
    lab.scene.admin.create_partitions([NewPartitions(topic, 2)])[topic].result(30)
    ids = [f"added-{number}" for number in range(lab.random.randint(3, 8))]
    wait_until(
        lambda: len(lab.scene.admin.list_topics(topic, timeout=30).topics[topic].partitions) == 2, ADDED
    )
    lab.write(lab.scene, topic, ids, 1)
    lab.fault(ADDED)
    return ids


def hf304_unsafe(lab: Lab) -> None:
    topic, group = lab.topic(), lab.name("group")
    lab.plan(ADDED, successes=4)
    reads_at_latest(lab, group, topic, 0)
    add_partition(lab, topic)
    reads_at_latest(lab, group, topic, 1)
    lab.scan(lab.scene, topic, 2)


def hf304_safe(lab: Lab) -> None:
    topic, group = lab.topic(), lab.name("group")
    lab.plan(ADDED, successes=4)
    lab.write(lab.scene, topic, ["known"])
    runs(lab, group, topic, 1)
    added = add_partition(lab, topic)
    runs(lab, group, topic, len(added))
    for partition in (0, 1):
        lab.committed_offset(lab.scene, group, topic, partition)
    lab.note("read-end", "member", group=group, topic=topic)
    lab.scan(lab.scene, topic, 2)


FORGOTTEN: Final = "the group's committed offsets are gone"


def group_half_way(lab: Lab) -> tuple[str, str]:
    """A group that has handled some of its messages, and whose committed offsets are then gone.

    As after offsets.retention.minutes without a member.
    """
    topic, group = lab.topic(), lab.name("group")
    half = lab.random.randint(1, COUNT - 1)
    lab.plan(FORGOTTEN, successes=COUNT)
    lab.write(lab.scene, topic, numbers(0, half))
    runs(lab, group, topic, half)
    lab.write(lab.scene, topic, numbers(half, COUNT))
    lab.committed_offset(lab.scene, group, topic)
    lab.scene.await_state(group, "EMPTY")
    lab.scene.admin.delete_consumer_groups([group])[group].result(30)
    lab.note("reset", "lab", group=group, topic=topic, partition=0)
    lab.fault(FORGOTTEN)
    return topic, group


def hf305_unsafe(lab: Lab) -> None:
    topic, group = group_half_way(lab)
    reads_at_latest(lab, group, topic, 0)
    lab.scan(lab.scene, topic)


def hf305_safe(lab: Lab) -> None:
    topic, group = group_half_way(lab)
    try:
        runs(lab, group, topic, 1)
    except CommittedOffsetLost as error:
        lab.say(f"CommittedOffsetLost: {error}")
        runs(lab, group, topic, COUNT, lost_offsets="earliest")
    lab.committed_offset(lab.scene, group, topic)
    lab.scan(lab.scene, topic)


# ---------------------------------------------------------------- HF306: a message that always fails

POISON: Final = "a message that no handler can take"


def hf306_unsafe(lab: Lab) -> None:
    topic, group = filled(lab, POISON)
    poison = str(lab.random.randrange(COUNT - 1))
    consumer = lab.scene.consumer(group)
    consumer.subscribe([topic])
    for message in take(consumer, COUNT):
        if lab.given(group, "member", message) == poison:
            lab.fault(POISON)  # the handler raises; it is logged, and passed over
        else:
            lab.handles(group, "member", message)
        consumer.commit(message=message, asynchronous=False)
    consumer.close()
    finish(lab, group, topic)


def hf306_safe(lab: Lab) -> None:
    topic, group = filled(lab, POISON)
    dead_letters = lab.scene.create_topic(f"{topic}-dlt")
    poison = str(lab.random.randrange(COUNT - 1))
    consumer = Consumer(
        lab.scene.bootstrap_servers,
        group=group,
        topics=[topic],
        retry=RetryPolicy(attempts=3, first_seconds=0.01),
    )

    def handle(message: Message) -> None:
        if value_of(message) == poison:
            lab.fault(POISON)
            raise ValueError("cannot be parsed")
        lab.handles(group, "member", message)
        if value_of(message) == str(COUNT - 1):
            consumer.stop()

    consumer.run(handle)
    for value in lab.scene.read(dead_letters)[0]:
        lab.note("keep", "dead letters", id=id_of(value), where=dead_letters)
    finish(lab, group, topic)


# ---------------------------------------------------------------- HF309: the last commit

LAST_COMMIT: Final = """
import json, os, sys
from confluent_kafka import Consumer
settings, topic, count = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
consumer = Consumer(settings)
consumer.subscribe([topic])
messages = []
while len(messages) < count:
    messages += [each for each in consumer.consume(count, 1) if each.error() is None]
print("handled", flush=True)
sys.stdin.readline()
consumer.commit(message=messages[-1], asynchronous=True)
os._exit(0)
"""
"""A program that ends as soon as it has asked for its last commit."""
RESTART_SECONDS: Final = 120
"""Apache Kafka takes most of a minute to come back on a crowded machine."""
EARLIEST: Final = {"auto.offset.reset": "earliest", "enable.auto.commit": False, "log_level": 0}


def hf309_unsafe(lab: Lab) -> None:
    topic, group = filled(lab, BROKER_KILLED)
    address = {"bootstrap.servers": lab.scene.bootstrap_servers, "group.id": group}
    settings = {**address, **EARLIEST, **SHORT_SESSION}
    program = subprocess.Popen(
        [sys.executable, "-c", LAST_COMMIT, json.dumps(settings), topic, str(COUNT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    )
    try:
        assert program.stdout is not None
        if program.stdout.readline() == "handled\n":
            for message in numbers(0, COUNT):
                lab.note("handle", "member", id=message, group=group)
        lab.scene.crash()
        lab.fault(BROKER_KILLED)
        program.communicate("\n", timeout=60)
        lab.say(f"the program ended with {program.returncode}, and knows of nothing")
    finally:
        program.kill()
        program.wait()
    lab.scene.revive()
    finish(lab, group, topic)


def hf309_safe(lab: Lab) -> None:
    topic, group = filled(lab, BROKER_KILLED)
    consumer = Consumer(
        lab.scene.bootstrap_servers,
        group=group,
        topics=[topic],
        commit_seconds=3600,
        last_commit_seconds=RESTART_SECONDS,
        config={"session.timeout.ms": RESTART_SECONDS * 1000, "log_level": 0},
    )

    def handle(message: Message) -> None:
        lab.handles(group, "member", message)

    running = Background(lambda: consumer.run(handle))
    wait_until(lambda: consumer.handled == COUNT, "everything is handled")
    lab.scene.crash()
    lab.fault(BROKER_KILLED)
    consumer.stop()
    lab.scene.revive()
    running.finish()
    finish(lab, group, topic)


EXPERIMENTS: Final = (
    Experiment(
        "HF301",
        "committed before it is handled",
        lambda lab: hf301(lab, by_time=True),
        lambda lab: hf301(lab, by_time=False),
        "enable.auto.commit=true",
        "committed after handling",
    ),
    Experiment(
        "HF302",
        "threads handle, the poll loop commits",
        hf302_unsafe,
        hf302_safe,
        "a pool of threads, and commit() in the loop",
        "the committed offset waits for the slowest thread",
        claim=Claim({LOST: 1}, tolerates=frozenset({DUPLICATED})),
    ),
    Experiment(
        "HF303",
        "a later commit overtakes a failed message",
        hf303_unsafe,
        hf303_safe,
        "commit(message) of each that went well",
        "only the contiguous prefix is committed",
        claim=Claim({LOST: 1}, tolerates=frozenset({DUPLICATED})),
    ),
    Experiment(
        "HF304",
        "new partitions are read from their end",
        hf304_unsafe,
        hf304_safe,
        "auto.offset.reset=latest",
        "auto.offset.reset=earliest",
    ),
    Experiment(
        "HF305",
        "a group without committed offsets starts at the end",
        hf305_unsafe,
        hf305_safe,
        "auto.offset.reset=latest",
        "stop and ask; then earliest",
        claim=Claim({LOST: 1}, tolerates=frozenset({DUPLICATED})),
    ),
    Experiment(
        "HF306",
        "a poison message is skipped",
        hf306_unsafe,
        hf306_safe,
        "the error is logged, and the committed offset moves on",
        "a bounded number of retries, then a dead-letter topic",
    ),
    Experiment(
        "HF309",
        "the last commit is not waited for",
        hf309_unsafe,
        hf309_safe,
        "commit(asynchronous=True), and the program ends",
        "the last commit is repeated until it is stored",
        claim=Claim({DUPLICATED: 1}),
    ),
)
