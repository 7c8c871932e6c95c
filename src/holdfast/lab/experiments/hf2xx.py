"""HF207, HF208: topics that nobody meant, and sizes that do not agree; on one broker of either kind."""

from __future__ import annotations

from typing import Any, Final

from confluent_kafka import KafkaError, Producer

from holdfast.lab.checking import UNSEEN
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import Scene, numbers

# ---------------------------------------------------------------- HF207: a mistyped topic

READ_SECONDS: Final = 120.0
"""The first group of a broker waits until its positions have a place."""
MISTYPED: Final = "the program sends to a topic that is spelt wrong"


def hf207(lab: Lab, *, creates_itself: bool) -> None:
    scene = lab.engines.scene(lab.engine, {"auto.create.topics.enable": str(creates_itself).lower()})
    topic, group = lab.topic(scene=scene), lab.name("readers")
    mistyped = topic.replace("orders", "oders")
    lab.plan(MISTYPED, successes=3)
    values = numbers(0, lab.random.randint(3, 9))
    failed = _send(lab, scene, topic, mistyped, values)
    lab.fault(MISTYPED)
    # Whoever is told corrects the name; whoever is not does not know.
    _send(lab, scene, topic, topic, failed)
    _read_to_the_end(lab, scene, group, topic)
    lab.scan(scene, topic)
    if not failed:
        lab.scan(scene, mistyped, _partitions(scene, mistyped))


def _send(lab: Lab, scene: Scene, meant: str, said: str, values: list[str]) -> list[str]:
    """Send to a topic by the name that was said; returns what was refused."""
    failed: list[str] = []

    def told(error: KafkaError | None, message: Any) -> None:
        lab.report("program")(error, message)
        if error is not None:
            failed.append(message.value().decode())

    producer = Producer(scene.plain({"message.timeout.ms": 5000, "topic.metadata.propagation.max.ms": 2000}))
    for value in values:
        lab.sends("program", meant, [value])
        producer.produce(said, value, on_delivery=told)
    wait_until(lambda: producer.flush(0.2) == 0, "something is said about every message")
    return failed


def _partitions(scene: Scene, topic: str) -> int:
    return len(scene.admin.list_topics(topic, timeout=30).topics[topic].partitions)


def _read_to_the_end(
    lab: Lab, scene: Scene, group: str, topic: str, settings: Any = None, *, patience: int | None = None
) -> bool:
    """A reader of the topic, until it has seen the end.

    With `patience`, until so many polls in a row have brought nothing after something had come: then it never will, and
    false is returned.
    """
    consumer = scene.consumer(group, {"enable.partition.eof": True, **(settings or {})})
    consumer.subscribe([topic])
    has_begun, idle, at_end = False, 0, False

    def read_on() -> bool:
        nonlocal has_begun, idle, at_end
        message: Any = consumer.poll(0.2)
        if message is not None and message.error() is None:
            lab.given(group, "reader", message)
            lab.handles(group, "reader", message)
            consumer.commit(message=message, asynchronous=False)
            has_begun, idle = True, 0
            return False
        idle += has_begun
        at_end = message is not None and message.error().code() == KafkaError._PARTITION_EOF
        return at_end or (patience is not None and idle >= patience)

    try:
        wait_until(read_on, f"the end of {topic}", READ_SECONDS)
    finally:
        consumer.close()
    lab.note("read-end", "reader", group=group, topic=topic)
    return at_end


# ---------------------------------------------------------------- HF208: sizes that do not agree

LARGE: Final = 200_000
SMALL_READER: Final = {
    "fetch.max.bytes": 10_000,
    "message.max.bytes": 10_000,
    "max.partition.fetch.bytes": 10_000,
    "receive.message.max.bytes": 11_000,
}
TOO_LARGE: Final = "a message that the topic takes, and that the reader's limits do not let through"


def hf208(lab: Lab, settings: dict[str, int]) -> None:
    scene = lab.scene
    topic, group = lab.topic(config={"max.message.bytes": str(4 * LARGE)}), lab.name("readers")
    lab.plan(TOO_LARGE, successes=4)
    values = numbers(0, lab.random.randint(4, 9))
    large = lab.random.randrange(1, len(values) - 1)
    for index, value in enumerate(values):
        lab.write(scene, topic, [f"{value} {'x' * LARGE}" if index == large else value])
    lab.fault(TOO_LARGE)
    if not _read_to_the_end(lab, scene, group, topic, settings, patience=20):
        lab.say("the reader asks for it again and again, and never gets past it")
    lab.scan(scene, topic)


EXPERIMENTS: Final = (
    Experiment(
        "HF207",
        "a mistyped topic creates itself",
        lambda lab: hf207(lab, creates_itself=True),
        lambda lab: hf207(lab, creates_itself=False),
        Claim({UNSEEN: 1}),
        "auto.create.topics.enable=true",
        "auto.create.topics.enable=false: the send is refused, and the name corrected",
    ),
    Experiment(
        "HF208",
        "size limits disagree",
        lambda lab: hf208(lab, dict(SMALL_READER)),
        lambda lab: hf208(lab, {}),
        Claim({UNSEEN: 1}),
        "a reader whose receive.message.max.bytes is below the topic's max.message.bytes",
        "the reader takes whatever the topic takes",
    ),
)
