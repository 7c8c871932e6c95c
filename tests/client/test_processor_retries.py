"""Transforms that fail: tried again while other partitions go on, then a dead letter in the same transaction. X."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.dead_letter_dialects import read_failure
from holdfast.client.errors import HandlerFailed
from holdfast.client.messages import DeadLetter, Message, Retry, from_raw
from holdfast.client.processor import Output, Processor
from holdfast.client.retries import NO_RETRIES, RetryPolicy
from holdfast.client.side_topics import SideTopicMissing
from holdfast.client.transactional import TakenBack
from holdfast.testing.broker import BrokerProcess

PARTITIONS = 2
QUICK = RetryPolicy(attempts=3, first_seconds=0.01)
SOON = {"fetch.wait.max.ms": 50}
"""Whatever else a member asks its broker for waits behind its fetch."""
SETTINGS = {"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "1000"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("retries") / "broker"
    with BrokerProcess(str(directory), settings=SETTINGS) as process:
        yield process


class Scene:
    """A topic with forty numbers, one for what is made of them, and one for what could not be."""

    def __init__(
        self,
        broker: BrokerProcess,
        *,
        letters: dict[str, str] | None = None,
        target: dict[str, str] | None = None,
    ) -> None:
        self.bootstrap = broker.bootstrap_servers
        self.topic = f"in-{uuid4().hex[:8]}"
        self.target = f"{self.topic}-out"
        self.letters = f"{self.topic}-dlt"
        new = [NewTopic(self.topic, PARTITIONS, 1), NewTopic(self.target, PARTITIONS, 1, config=target or {})]
        if letters is not None:
            new.append(NewTopic(self.letters, PARTITIONS, 1, config=letters))
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        for made in admin.create_topics(new).values():
            made.result()
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True})
        for number in range(40):
            producer.produce(self.topic, b"%d" % number, partition=number % PARTITIONS)
        assert producer.flush(30) == 0

    def processor(self, retry: RetryPolicy | None = QUICK, **arguments: Any) -> Processor:
        return Processor(
            self.bootstrap,
            group=self.topic,
            topics=[self.topic],
            retry=retry,
            **{"commit_seconds": 0.02, "commit_messages": 7, "config": SOON, **arguments},
        )

    def copying(self, fail: Callable[[int], None]) -> Callable[[Message], list[Output]]:
        def transform(message: Message) -> list[Output]:
            fail(int(message.value or b""))
            return [Output(self.target, message.value, partition=message.partition)]

        return transform

    def run(self, transform: Callable[[Message], Any], processor: Processor | None = None) -> None:
        """Until the last message is done with."""
        processor = processor or self.processor()

        def watch() -> None:
            pause = threading.Event()
            while processor.committed < 40:
                pause.wait(0.02)
            processor.stop()

        watcher = threading.Thread(target=watch)
        watcher.start()
        processor.run(transform)
        watcher.join()

    def read(self, topic: str) -> list[Message]:
        consumer = RawConsumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "reader",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
            }
        )
        consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
        found: list[Message] = []
        ended = 0
        while ended < PARTITIONS:
            raw: Any = consumer.poll(10)
            assert raw is not None
            if raw.error():
                ended += 1
            else:
                found.append(from_raw(raw))
        consumer.close()
        return found

    def numbers(self, topic: str) -> list[list[int]]:
        """By partition, in order."""
        found: list[list[int]] = [[] for _ in range(PARTITIONS)]
        for message in self.read(topic):
            found[message.partition].append(int(message.value or b""))
        return found


def in_order(*without: int) -> list[list[int]]:
    return [[number for number in range(first, 40, 2) if number not in without] for first in (0, 1)]


def test_a_message_that_fails_at_first_keeps_its_place(broker: BrokerProcess) -> None:
    scene = Scene(broker)
    attempts: Counter[int] = Counter()

    def fail(number: int) -> None:
        attempts[number] += 1
        if number in (6, 9) and attempts[number] < 3:
            raise ValueError("not yet")

    scene.run(scene.copying(fail))
    assert scene.numbers(scene.target) == in_order()
    assert (attempts[6], attempts[9]) == (3, 3)


def test_other_partitions_go_on_and_what_is_before_it_is_committed_while_a_message_waits(
    broker: BrokerProcess,
) -> None:
    scene = Scene(broker)
    processor = scene.processor(RetryPolicy(attempts=10_000, first_seconds=0.01, longest_seconds=0.05))

    def fail(number: int) -> None:
        if number == 6 and processor.committed < 23:  # all of the other partition, and 0, 2 and 4
            raise Retry("wait for the others")

    scene.run(scene.copying(fail), processor)
    assert scene.numbers(scene.target) == in_order()


def test_a_message_that_is_given_up_on_becomes_one_dead_letter(broker: BrokerProcess) -> None:
    scene = Scene(broker, letters={})

    def fail(number: int) -> None:
        if number == 6:
            raise ValueError("never")
        if number == 9:
            raise DeadLetter("nobody wants it")

    scene.run(scene.copying(fail))
    assert scene.numbers(scene.target) == in_order(6, 9)
    letters = {int(each.value or b""): each for each in scene.read(scene.letters)}
    assert sorted(letters) == [6, 9]
    failure = read_failure(letters[6].headers)
    assert failure is not None
    assert (failure.topic, failure.partition, failure.offset) == (scene.topic, 0, 3)
    assert (failure.error, failure.message, failure.attempts) == ("ValueError", "never", 3)
    wanted = read_failure(letters[9].headers)
    assert wanted is not None
    assert (wanted.reason, wanted.attempts) == ("nobody wants it", 1)


def test_an_outcome_may_be_returned(broker: BrokerProcess) -> None:
    scene = Scene(broker, letters={})
    copy = scene.copying(lambda number: None)

    def transform(message: Message) -> list[Output] | DeadLetter:
        return DeadLetter("no") if message.value == b"6" else copy(message)

    scene.run(transform)
    assert scene.numbers(scene.target) == in_order(6)
    assert scene.numbers(scene.letters) == [[6], []]


def test_a_transaction_that_is_taken_back_takes_its_dead_letters_with_it(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(broker, letters={})
    processor = scene.processor(commit_messages=1000, commit_seconds=0.2)
    taken_back: list[int] = []
    from holdfast.client.transactional import TransactionalProducer

    commit = TransactionalProducer.commit

    def once(producer: TransactionalProducer, *arguments: Any) -> None:
        if not taken_back:
            taken_back.append(1)
            producer.abort()
            raise TakenBack("as if a rebalance had come")
        commit(producer, *arguments)

    monkeypatch.setattr(TransactionalProducer, "commit", once)

    def fail(number: int) -> None:
        if number == 6:
            raise DeadLetter("never")

    scene.run(scene.copying(fail), processor)
    assert taken_back
    assert scene.numbers(scene.target) == in_order(6)
    assert scene.numbers(scene.letters) == [[6], []]


def test_a_transform_that_fails_in_the_middle_leaves_no_half(broker: BrokerProcess) -> None:
    scene = Scene(broker)
    attempts: Counter[bytes | None] = Counter()

    def transform(message: Message) -> Iterator[Output]:
        attempts[message.value] += 1
        yield Output(scene.target, message.value, partition=message.partition)
        if attempts[message.value] == 1:
            raise ValueError("half of it")

    scene.run(transform)
    assert scene.numbers(scene.target) == in_order()


@pytest.mark.parametrize("size", [5_000, 2_000_000], ids=["for the topic", "for the client"])
@pytest.mark.check
def test_an_output_that_is_too_large_is_a_failure_of_its_message(broker: BrokerProcess, size: int) -> None:
    scene = Scene(broker, letters={}, target={"max.message.bytes": "3000"})

    def transform(message: Message) -> list[Output]:
        number = int(message.value or b"")
        larger = [Output(scene.target, b"x" * size)] if number == 6 else []
        return [Output(scene.target, message.value, partition=message.partition), *larger]

    scene.run(transform, scene.processor(NO_RETRIES, commit_messages=2))
    assert scene.numbers(scene.target) == in_order(6)
    assert scene.numbers(scene.letters) == [[6], []]


def test_a_policy_may_say_stop(broker: BrokerProcess) -> None:
    scene = Scene(broker)
    processor = scene.processor(RetryPolicy(attempts=2, first_seconds=0.01, give_up="stop"))

    def fail(number: int) -> None:
        if number == 6:
            raise ValueError("never")

    with pytest.raises(HandlerFailed, match=f"{scene.topic}-0@3.*2 attempts"):
        processor.run(scene.copying(fail))
    assert 6 not in scene.numbers(scene.target)[0]


def test_a_missing_dead_letter_topic_stops_it_with_the_message_in_place(broker: BrokerProcess) -> None:
    scene = Scene(broker)

    def fail(number: int) -> None:
        if number == 6:
            raise DeadLetter("never")

    with pytest.raises(SideTopicMissing, match=scene.letters):
        scene.processor().run(scene.copying(fail))
    scene.run(scene.copying(fail), _counting_on(scene))
    assert scene.numbers(scene.target) == in_order(6)
    assert scene.numbers(scene.letters) == [[6], []]


def _counting_on(scene: Scene) -> Processor:
    """A processor that may create topics, and counts what the one before it has done."""
    done = sum(map(len, scene.numbers(scene.target)))

    class CountingOn(Processor):
        @property
        def committed(self) -> int:
            return done + super().committed

    return CountingOn(
        scene.bootstrap, group=scene.topic, topics=[scene.topic], retry=QUICK, create_topics=True
    )


def test_a_dead_letter_that_the_topic_does_not_take_is_made_shorter(broker: BrokerProcess) -> None:
    scene = Scene(broker, letters={"max.message.bytes": "1500"})

    def fail(number: int) -> None:
        if number == 6:
            raise DeadLetter("x" * 5000)

    scene.run(scene.copying(fail))
    assert scene.numbers(scene.target) == in_order(6)
    (letter,) = scene.read(scene.letters)
    failure = read_failure(letter.headers)
    assert failure is not None
    assert (failure.offset, failure.stack) == (3, None)
