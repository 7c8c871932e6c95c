"""HF108, HF109: writers that were replaced, and writes that belong together."""

from __future__ import annotations

import threading
from typing import Any, Final

from holdfast.client import Message, Output, Processor
from holdfast.lab.checking import DUPLICATED, TORN, ZOMBIE
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.lab.watching import id_of
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import SHORT_SESSION, Background, take, value_of

CONSUMER: Final[dict[str, Any]] = {**SHORT_SESSION, "log_level": 0}
REPLACED: Final = "a worker's network is cut, and the group gives its job to another"
WRITER_KILLED: Final = "the writer is killed between two writes"

# ---------------------------------------------------------------- HF108: a writer that was replaced


def is_zombie(client_id: str) -> bool:
    """Whose connections are cut: all of the first worker's, and nobody else's."""
    return client_id == "zombie"


def hf108_unsafe(lab: Lab) -> None:
    scene, between = lab.engines.behind_a_link(lab.engine)
    source, target = lab.topic("jobs", scene=scene), lab.topic("results", scene=scene)
    lab.plan(REPLACED, successes=1)
    scene.write(source, {0: ["job"]})
    group = lab.name("group")
    workers = {
        actor: (
            scene.consumer(group, {**SHORT_SESSION, "client.id": actor}),
            scene.producer({"client.id": actor}),
        )
        for actor in ("zombie", "successor")
    }

    def write(actor: str, epoch: int, message: Any) -> None:
        lab.sends(actor, target, [value_of(message)], role="worker", epoch=epoch)
        workers[actor][1].produce(target, value_of(message), on_delivery=lab.report(actor))

    zombie, successor = (consumer for consumer, _ in workers.values())
    zombie.subscribe([source])
    lab.note("takeover", "zombie", role="worker", epoch=1)
    (job,) = take(zombie, 1)
    between.silence_clients(is_zombie)
    # It runs on, and works on its job; the group hears nothing of it and gives the job to another, who does it.
    successor.subscribe([source])
    (same,) = take(successor, 1)
    lab.note("takeover", "successor", role="worker", epoch=2)
    lab.fault(REPLACED)
    write("successor", 2, same)
    workers["successor"][1].flush(30)
    write("zombie", 1, job)
    between.mend()
    workers["zombie"][1].flush(30)
    for member in (zombie, successor):
        member.close()
    lab.scan(scene, target)


def hf108_safe(lab: Lab) -> None:
    scene, between = lab.engines.behind_a_link(lab.engine)
    source, target = lab.topic("jobs", scene=scene), lab.topic("results", scene=scene)
    lab.plan(REPLACED, successes=2)
    scene.write(source, {0: ["job"]})
    group = lab.name("group")
    is_replaced, has_begun = threading.Event(), threading.Event()

    def make(actor: str) -> Processor:
        return Processor(
            scene.bootstrap_servers,
            group=group,
            topics=[source],
            commit_seconds=0.1,
            config={**CONSUMER, "client.id": actor},
            producer_config={"log_level": 0, "client.id": actor},
        )

    def work(actor: str, epoch: int, message: Message) -> list[Output]:
        lab.sends(actor, target, [id_of(message.value)], role="worker", epoch=epoch)
        return [Output(target, message.value)]

    def slowly(message: Message) -> list[Output]:
        has_begun.set()
        is_replaced.wait(60)
        return work("zombie", 1, message)

    zombie, successor = make("zombie"), make("successor")
    lab.note("takeover", "zombie", role="worker", epoch=1)
    running = Background(lambda: zombie.run(slowly))
    has_begun.wait(60)
    between.silence_clients(is_zombie)
    also_running = Background(lambda: successor.run(lambda message: work("successor", 2, message)))
    wait_until(lambda: successor.committed == 1, "another does the job")
    lab.note("takeover", "successor", role="worker", epoch=2)
    lab.fault(REPLACED)
    # Still cut off, the first is done with it too, and sends its result into a network that comes back later.
    is_replaced.set()
    between.mend()
    # The next job is done once too: by then the zombie has learnt that the first was not its to finish.
    scene.write(source, {0: ["next"]})
    wait_until(lambda: zombie.committed + successor.committed == 2, "the next job is done")
    for processor in (zombie, successor):
        processor.stop()
    running.finish()
    also_running.finish()
    scene.await_decided(target)
    lab.scan(scene, target)


# ---------------------------------------------------------------- HF109: half of what belongs together

PLAIN_HALF: Final = """
import os, signal, sys
from confluent_kafka import Producer
bootstrap, taken, given = sys.argv[1:]
producer = Producer({"bootstrap.servers": bootstrap})
producer.produce(taken, "from-a")
producer.flush()
os.kill(os.getpid(), signal.SIGKILL)
producer.produce(given, "to-b")
producer.flush()
"""
OURS_HALF: Final = """
import os, signal, sys, threading
from confluent_kafka import Consumer, TopicPartition
from holdfast.client import Output, Processor
bootstrap, transfers, taken, given, attempt, *dies = sys.argv[1:]
def die():
    # Not before the first half is in the log.
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "looks", "isolation.level": "read_uncommitted"})
    while reader.get_watermark_offsets(TopicPartition(taken, 0))[1] == 0:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
if dies:
    threading.Thread(target=die).start()
def book(message):
    return [Output(taken, b"from-a-" + attempt.encode()), Output(given, b"to-b-" + attempt.encode())]
# Under the same names, so that the next to run takes over at once.
processor = Processor(
    bootstrap, group=transfers, topics=[transfers], commit_seconds=10 if dies else 0.1,
    config={"group.instance.id": "booker"}, producer_config={"transactional.id": transfers},
)
processor.run(book)
"""


def hf109_unsafe(lab: Lab) -> None:
    taken, given = lab.topic("taken"), lab.topic("given")
    lab.plan(WRITER_KILLED, successes=1)
    lab.note("begin", "program", txn="transfer", ids=["from-a", "to-b"])
    lab.sends("program", taken, ["from-a"])
    code, _ = lab.scene.program(PLAIN_HALF, taken, given).ends()
    if code < 0:
        lab.fault(WRITER_KILLED)
    lab.scan(lab.scene, taken)
    lab.scan(lab.scene, given)


def hf109_safe(lab: Lab) -> None:
    transfers, taken, given = lab.topic("transfers"), lab.topic("taken"), lab.topic("given")
    scene = lab.scene
    lab.plan(WRITER_KILLED, successes=2)
    scene.write(transfers, {0: ["a-to-b"]})
    _begin(lab, taken, given, "1")
    code, _ = scene.program(OURS_HALF, transfers, taken, given, "1", "dies").ends()
    if code < 0 and scene.read(taken, isolation="read_uncommitted")[0]:
        lab.fault(WRITER_KILLED)
    for topic in (taken, given):
        for value in scene.read(topic)[0]:
            lab.note(
                "deliver", "reader", id=id_of(value), group="readers", topic=topic, partition=0, offset=0
            )
    _begin(lab, taken, given, "2")
    scene.program(OURS_HALF, transfers, taken, given, "2")
    wait_until(lambda: scene.read(given)[0] == ["to-b-2"], "the transfer is made")
    wait_until(lambda: scene.read(taken)[0] == ["from-a-2"], "and what was half made is taken back")
    lab.note("end", "broker", txn="transfer-1", outcome="aborted")
    lab.note("end", "broker", txn="transfer-2", outcome="committed")
    lab.scan(scene, taken)
    lab.scan(scene, given)


def _begin(lab: Lab, taken: str, given: str, attempt: str) -> None:
    ids = [f"from-a-{attempt}", f"to-b-{attempt}"]
    lab.note("begin", "program", txn=f"transfer-{attempt}", ids=ids)
    for topic, message in zip((taken, given), ids, strict=True):
        lab.sends("program", topic, [message])


EXPERIMENTS: Final = (
    Experiment(
        "HF108",
        "a zombie producer goes on writing",
        hf108_unsafe,
        hf108_safe,
        "a producer without a transactional.id",
        "a transaction that holds the reader's committed offset: the replaced one is fenced",
        claim=Claim({ZOMBIE: 1, DUPLICATED: 1}),
    ),
    Experiment(
        "HF109",
        "writes that belong together are half visible",
        hf109_unsafe,
        hf109_safe,
        "two sends, one after the other",
        "one transaction around them",
        claim=Claim({TORN: 1}),
    ),
)
