"""HF101 to HF107: messages that never arrive, or arrive twice.

In each unsafe half a plain confluent-kafka producer is set, or used, as the risk says. `drop` is what the *program*
does: it counts an error and goes on, it ends, it believes that all is well. In each safe half a producer of ours goes
through the same.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.client import DeliveryFailed, Producer, UndeliveredMessages
from holdfast.client.spool.refused import RefusedMessages
from holdfast.lab.checking import DUPLICATED, REORDERED
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.lab.experiments.hf2xx import hf102_replicated
from holdfast.lab.watching import id_of
from holdfast.real import RealFileSystem
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import numbers

QUIET: Final[dict[str, Any]] = {"log_level": 0, "reconnect.backoff.max.ms": 500}
LIMIT: Final = {"max.message.bytes": "1000"}
BALLAST: Final = " " + "x" * 5000
"""More than such a topic takes; see `id_of`."""
ONE_BY_ONE: Final[dict[str, Any]] = {"linger.ms": 0, "batch.num.messages": 1}
"""Each message is a batch of its own: what is refused takes no other along."""
KILLED: Final = "the broker is killed"
FROZEN: Final = "the broker is frozen"
PROGRAM_KILLED: Final = "the program is killed"


def some(lab: Lab, least: int = 5, most: int = 15) -> list[str]:
    return numbers(0, lab.random.randint(least, most))


def with_a_large_one(lab: Lab) -> list[str]:
    """Some messages; one of them, anywhere, is more than the topic takes."""
    values = some(lab)
    large = lab.random.randrange(len(values))
    return [f"{value}{BALLAST}" if index == large else value for index, value in enumerate(values)]


# ---------------------------------------------------------------- HF101: nobody looks at the result


def hf101_unsafe(lab: Lab) -> None:
    topic = lab.topic(config=LIMIT)
    lab.plan(successes=4)
    producer = lab.scene.producer(ONE_BY_ONE)
    ids = []
    for value in (*some(lab), f"large{BALLAST}"):
        ids += lab.sends("program", topic, [value])
        producer.produce(topic, value)
    if producer.flush(60) == 0:
        lab.drops("program", ids, "flush() left nothing to send, and it takes that for a success")
    lab.scan(lab.scene, topic)


def hf101_safe(lab: Lab) -> None:
    topic = lab.topic(config=LIMIT)
    lab.plan(successes=4)
    deliveries = []
    try:
        with Producer(lab.scene.bootstrap_servers, config={**ONE_BY_ONE, **QUIET}) as producer:
            for value in (*some(lab), f"large{BALLAST}"):
                (message,) = lab.sends("program", topic, [value])
                deliveries.append((message, producer.send(topic, value, key=message)))
        lab.drops("program", [message for message, _ in deliveries], "the producer was left without an error")
    except UndeliveredMessages as error:
        lab.say(f"UndeliveredMessages: {error}")
    for message, delivery in deliveries:
        if delivery.is_acknowledged:
            lab.delivered("program", message, topic, delivery)
        else:
            lab.note("fail", "program", id=message, error="UndeliveredMessages")
    lab.scan(lab.scene, topic)


# ---------------------------------------------------------------- HF102: confirmed before it is stored


def hf102_unsafe(lab: Lab) -> None:
    if lab.engine == "kafka":
        hf102_replicated(lab, acks="1")
        return
    topic = lab.topic()
    lab.plan(KILLED, successes=1)
    scene = lab.scene
    producer = scene.producer({"acks": 0, "message.timeout.ms": 60_000})

    lab.produce(producer, topic, "before")
    wait_until(lambda: producer.poll(0) or scene.read(topic)[0], "the first message is stored")
    with scene.frozen():
        for value in some(lab):
            lab.produce(producer, topic, value)
        producer.flush(60)
        scene.crash()
        lab.fault(KILLED)
    scene.revive()
    lab.scan(scene, topic)


def hf102_safe(lab: Lab) -> None:
    if lab.engine == "kafka":
        hf102_replicated(lab, acks="all")
        return
    topic = lab.topic()
    lab.plan(KILLED, successes=2)
    scene = lab.scene
    with Producer(scene.bootstrap_servers, config=QUIET) as producer:
        lab.sends("program", topic, ["before"])
        lab.delivered("program", "before", topic, producer.send(topic, "before"))
        with scene.frozen():
            ids = lab.sends("program", topic, some(lab))
            deliveries = producer.send_many(topic, ids)
            producer.flush(0.5)
            scene.crash()
            lab.fault(KILLED)
        early = [message for message, each in zip(ids, deliveries, strict=True) if each.is_acknowledged]
        for message in early:
            lab.note("ack", "program", id=message, topic=topic)
        scene.revive()
        lab.all_delivered("program", topic, ids, deliveries)
    lab.scan(scene, topic)


# ---------------------------------------------------------------- HF103: given up on too early

IMPATIENT: Final = {"message.timeout.ms": 300}


def hf103_unsafe(lab: Lab) -> None:
    topic = lab.topic()
    lab.plan(KILLED, successes=1)
    scene = lab.scene
    lab.write(scene, topic, ["before"])
    producer = scene.producer(IMPATIENT)
    scene.crash()
    lab.fault(KILLED)
    ids = lab.sends("program", topic, some(lab))
    for message in ids:
        producer.produce(topic, message, on_delivery=lab.report("program"))
    wait_until(lambda: producer.flush(0.1) == 0, "the messages are given up on")
    lab.drops("program", ids, "the producer gave up after message.timeout.ms, and the program goes on")
    scene.revive()
    lab.scan(scene, topic)


def hf103_safe(lab: Lab) -> None:
    topic = lab.topic()
    lab.plan(KILLED, successes=2)
    scene = lab.scene
    lab.write(scene, topic, ["before"])
    impatient = scene.producer(IMPATIENT)
    with Producer(scene.bootstrap_servers, config=QUIET) as producer:
        scene.crash()
        lab.fault(KILLED)
        ids = lab.sends("program", topic, some(lab))
        deliveries = producer.send_many(topic, ids)
        impatient.produce(topic, "given-up")
        wait_until(lambda: impatient.flush(0.1) == 0, "another producer has given up")
        scene.revive()
        lab.all_delivered("program", topic, ids, deliveries)
    lab.scan(scene, topic)


# ---------------------------------------------------------------- HF104: what is in memory dies with its process

PLAIN_MEMORY: Final = """
import sys, threading
from confluent_kafka import Producer
bootstrap, topic, count = sys.argv[1:]
producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 60000, "message.timeout.ms": 600000})
for number in range(int(count)):
    producer.produce(topic, str(number))
    print("sent", number, flush=True)
print("waits", flush=True)
threading.Event().wait()
"""
OURS_MEMORY: Final = """
import sys, threading
from holdfast.client import Producer
bootstrap, topic, count, spool = sys.argv[1:]
producer = Producer(bootstrap, spool=spool, config={"linger.ms": 60000, "log_level": 0})
deliveries = []
for number in range(int(count)):
    deliveries.append(producer.send(topic, str(number)))
    print("sent", number, flush=True)
for delivery in deliveries:
    delivery.wait_stored()
print("waits", flush=True)
threading.Event().wait()
"""


def _dies_with_messages(lab: Lab, program: str, topic: str, *more: str) -> None:
    count = len(some(lab))
    lab.plan(PROGRAM_KILLED, successes=1)
    lab.write(lab.scene, topic, ["before"])

    def heard(line: str) -> None:
        word, _, number = line.partition(" ")
        if word == "sent":
            lab.sends("program", topic, [number])

    running = lab.scene.program(program, topic, str(count), *more, on_line=heard)
    running.says("waits")
    running.kill()
    lab.fault(PROGRAM_KILLED)
    lab.drops("program", numbers(0, count), "its process is gone")


def hf104_unsafe(lab: Lab) -> None:
    topic = lab.topic()
    _dies_with_messages(lab, PLAIN_MEMORY, topic)
    lab.scan(lab.scene, topic)


def hf104_safe(lab: Lab) -> None:
    topic = lab.topic()
    spool = lab.directory / "spool"
    _dies_with_messages(lab, OURS_MEMORY, topic, str(spool))
    with Producer(lab.scene.bootstrap_servers, spool=spool, config=QUIET) as producer:
        producer.flush(60)
    lab.scan(lab.scene, topic)


# ---------------------------------------------------------------- HF105: the buffer is full

ROOM: Final = 10
FEW: Final[dict[str, Any]] = {"queue.buffering.max.messages": ROOM}


def hf105_unsafe(lab: Lab) -> None:
    topic = lab.topic()
    lab.plan(FROZEN, successes=ROOM)
    producer = lab.scene.producer(FEW)
    with lab.scene.frozen():
        lab.fault(FROZEN)
        for value in some(lab, 20, 40):
            (message,) = lab.sends("program", topic, [value])
            try:
                producer.produce(topic, value, on_delivery=lab.report("program"))
            except BufferError:
                # What programs do that may not wait: count it, and go on.
                lab.drops("program", [message], "BufferError: the queue is full")
    producer.flush(60)
    lab.scan(lab.scene, topic)


def hf105_safe(lab: Lab) -> None:
    topic = lab.topic()
    lab.plan(FROZEN, successes=ROOM + 1)
    spool = lab.directory / "spool"
    with Producer(lab.scene.bootstrap_servers, spool=spool, config={**FEW, **QUIET}) as producer:
        with lab.scene.frozen():
            lab.fault(FROZEN)
            ids = lab.sends("program", topic, some(lab, 20, 40))
            deliveries = producer.send_many(topic, ids)
            for delivery in deliveries:
                delivery.wait_stored(60)
            lab.drops("program", ids, "stored in the spool: the program need not keep them")
        lab.all_delivered("program", topic, ids, deliveries)
    lab.scan(lab.scene, topic)


# ---------------------------------------------------------------- HF106: sent again

PRODUCE: Final = 0
ANSWER_LOST: Final = "answers to two sends get lost, and with them the connection"


def hf106_unsafe(lab: Lab) -> None:
    scene, between = lab.engines.behind_a_link(lab.engine)
    topic = lab.topic(scene=scene)
    lab.plan(ANSWER_LOST, successes=2)
    producer = scene.producer({"enable.idempotence": False, **ONE_BY_ONE})
    producer.list_topics(topic, timeout=30)
    lost = between.swallow(PRODUCE, 2)
    for value in ("a", "b"):
        lab.produce(producer, topic, value)
    producer.flush(60)
    if lost.is_done:
        lab.fault(ANSWER_LOST)
    lab.scan(scene, topic)


def hf106_safe(lab: Lab) -> None:
    scene, between = lab.engines.behind_a_link(lab.engine)
    topic = lab.topic(scene=scene)
    lab.plan(ANSWER_LOST, successes=2)
    lost = between.swallow(PRODUCE, 2)
    with Producer(scene.bootstrap_servers, config={**ONE_BY_ONE, **QUIET}) as producer:
        ids = lab.sends("program", topic, ["a", "b"])
        lab.all_delivered("program", topic, ids, producer.send_many(topic, ids))
    if lost.is_done:
        lab.fault(ANSWER_LOST)
    lab.scan(scene, topic)


# ---------------------------------------------------------------- HF107: refused for good


def hf107_unsafe(lab: Lab) -> None:
    topic = lab.topic(config=LIMIT)
    lab.plan(successes=4)
    producer = lab.scene.producer()
    for value in with_a_large_one(lab):
        lab.produce(producer, topic, value)
        producer.flush(60)
    failed = [event.id for event in lab.recorder.history().of("fail")]
    lab.drops("program", failed, "it logs the error and goes on")
    lab.scan(lab.scene, topic)


def hf107_safe(lab: Lab) -> None:
    topic = lab.topic(config=LIMIT)
    lab.plan(successes=4)
    spool = lab.directory / "spool"
    with Producer(lab.scene.bootstrap_servers, spool=spool, config={**ONE_BY_ONE, **QUIET}) as producer:
        for value in with_a_large_one(lab):
            # One at a time, as above: what is in flight behind a refused message is sent again, at least once.
            (message,) = lab.sends("program", topic, [value])
            delivery = producer.send(topic, value)
            try:
                lab.delivered("program", message, topic, delivery)
            except DeliveryFailed as error:
                lab.note("fail", "program", id=message, error=str(error)[:200])
                lab.drops("program", [message], "it logs the error and goes on")
    for refused in {path.parent.parent for path in spool.rglob("refused/messages")}:
        for kept in RefusedMessages(RealFileSystem(), str(refused)):
            lab.note("keep", "spool", id=id_of(kept.message.value), where="the spool's refused messages")
    lab.scan(lab.scene, topic)


EXPERIMENTS: Final = (
    Experiment(
        "HF101",
        "nobody looks at the result of a send",
        hf101_unsafe,
        hf101_safe,
        "produce() without a callback, then flush()",
        "our producer, whose end raises what was not delivered",
    ),
    Experiment(
        "HF102",
        "acknowledged before it is stored",
        hf102_unsafe,
        hf102_safe,
        "acks=0; on three brokers of Apache Kafka acks=1",
        "acks=all (our producer has nothing else)",
    ),
    Experiment(
        "HF103",
        "the producer gives up before a broker is back",
        hf103_unsafe,
        hf103_safe,
        "message.timeout.ms=300",
        "minutes to deliver in, and idempotence",
    ),
    Experiment(
        "HF104",
        "the producer's buffer dies with its process",
        hf104_unsafe,
        hf104_safe,
        "messages in memory, linger.ms=60000",
        "a spool on disk",
    ),
    Experiment(
        "HF105",
        "a full buffer drops messages",
        hf105_unsafe,
        hf105_safe,
        "BufferError is counted, and the program goes on",
        "a spool on disk",
    ),
    Experiment(
        "HF106",
        "retries duplicate and reorder",
        hf106_unsafe,
        hf106_safe,
        "enable.idempotence=false",
        "enable.idempotence=true",
        claim=Claim({DUPLICATED: 1, REORDERED: 1}),
    ),
    Experiment(
        "HF107",
        "a fatal send error is swallowed",
        hf107_unsafe,
        hf107_safe,
        "the callback logs the error",
        "failed messages are kept aside",
    ),
)
