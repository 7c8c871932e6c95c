"""HF307, HF308: partitions that change hands."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from holdfast.client import Consumer, Message
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import Background, Scene, numbers, take, value_of

SHORT_POLLS: dict[str, Any] = {
    "max.poll.interval.ms": 2000,
    "session.timeout.ms": 2000,
    "heartbeat.interval.ms": 100,
}

COUNT = 1000
"""So many messages at their pace last until any second member has come."""

# ---------------------------------------------------------------- HF307: an old owner that works on


def test_hf307_rebalance_plain_client_handles_twice(here: Scene) -> None:
    topic = here.create_topic("hf307-plain", 2)
    here.write(topic, {partition: numbers(0, 5) for partition in (0, 1)})
    handled: Counter[tuple[int | None, str]] = Counter()
    first = here.consumer(topic, {"heartbeat.interval.ms": 100})
    first.subscribe([topic])
    in_hand = take(first, 10)
    second = here.consumer(topic)
    second.subscribe([topic])

    def second_reads() -> bool:
        # The first takes part in the rebalance, which gives one of its partitions away, and works on what it has.
        first.poll(0)
        message = second.poll(0.1)
        if message is not None:
            handled[message.partition(), value_of(message)] += 1
        return handled.total() == 5

    wait_until(second_reads, "the second member handles the messages of its partition")
    for message in in_hand:
        handled[message.partition(), value_of(message)] += 1
    for consumer in (first, second):
        consumer.close()
    assert sorted(handled.values()) == [1] * 5 + [2] * 5


def test_hf307_rebalance_ours_hands_back_what_was_not_begun(here: Scene) -> None:
    topic = here.create_topic("hf307-ours", 2)
    here.write(topic, {partition: numbers(0, COUNT) for partition in (0, 1)})
    handled: list[tuple[int, str]] = []
    second_is_at_work = threading.Event()

    def handle(message: Message) -> None:
        second_is_at_work.wait(0.01)
        handled.append((message.partition, value_of(message)))

    def handle_second(message: Message) -> None:
        second_is_at_work.set()
        handle(message)

    # As above, the first has everything in hand before the second comes.
    first, second = (
        Consumer(
            here.bootstrap_servers,
            group=topic,
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
    wait_until(lambda: here.committed(topic) == ends, "everything is handled and committed")
    second.stop()
    also_running.finish()
    first.stop()
    running.finish()
    assert second_is_at_work.is_set()
    assert sorted(Counter(handled).values()) == [1] * (2 * COUNT)


# ---------------------------------------------------------------- HF308: work longer than max.poll.interval.ms


class PlainPair:
    """Two plain members; the first takes the message, and is at it until the group has given it to the second."""

    def __init__(self, here: Scene, topic: str) -> None:
        self._first, self._second = (here.consumer(topic, SHORT_POLLS) for _ in range(2))
        self._topic = topic
        self.handled: list[str] = []

    def run(self) -> None:
        self._first.subscribe([self._topic])
        (message,) = take(self._first, 1)
        self._second.subscribe([self._topic])
        (again,) = take(self._second, 1)
        self.handled += (value_of(again), value_of(message))
        for member in (self._first, self._second):
            member.close()


def test_hf308_long_work_plain_client_handles_twice(here: Scene) -> None:
    topic = here.create_topic("hf308-plain")
    here.write(topic, {0: ["long"]})
    pair = PlainPair(here, topic)
    pair.run()
    assert pair.handled == ["long", "long"]


def test_hf308_long_work_ours_keeps_its_partition(here: Scene) -> None:
    topic, other = here.create_topic("hf308-ours"), here.create_topic("hf308-other")
    here.write(other, {0: ["long"]})
    is_enough = threading.Event()
    handled: list[str] = []
    config = {**SHORT_POLLS, "log_level": 0}
    first, second = (
        Consumer(
            here.bootstrap_servers,
            group=topic,
            topics=[topic],
            drain_seconds=0.3,
            last_commit_seconds=0.3,
            in_flight_max=1,
            config=config,
        )
        for _ in range(2)
    )

    def handle(message: Message) -> None:
        if value_of(message) == "long":
            is_enough.wait(60)
        handled.append(value_of(message))

    running = Background(lambda: first.run(handle))
    also_running = Background(lambda: second.run(handle))
    wait_until(lambda: here.members(topic) == 2, "both are members")
    here.write(topic, {0: ["long", "next"]})
    # As long as it takes two plain members, with the same settings, to get the same message.
    PlainPair(here, other).run()
    is_enough.set()
    wait_until(lambda: here.position(topic, topic) == 2, "both are handled and committed")
    for consumer in (first, second):
        consumer.stop()
    running.finish()
    also_running.finish()
    assert handled == ["long", "next"]
