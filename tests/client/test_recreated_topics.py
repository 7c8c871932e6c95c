"""A topic that is deleted and recreated begins anew: none of its first messages is passed over in silence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.consumer import Consumer
from holdfast.client.messages import Message
from holdfast.client.processor import Processor
from holdfast.client.topic_ids import TopicIds, TopicRecreated
from holdfast.testing.broker import BrokerProcess

SETTINGS = {"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "500"}
SOON: dict[str, Any] = {"fetch.wait.max.ms": 20}
OLD, NEW = range(20), range(100, 150)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path_factory.mktemp("recreated") / "broker"), settings=SETTINGS) as process:
        yield process


class Scene:
    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.topic = f"t-{uuid4().hex[:8]}"
        self.admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        self.handled: list[int] = []
        self.create()
        self.fill(OLD)

    def create(self) -> None:
        while True:
            try:
                self.admin.create_topics([NewTopic(self.topic, 1)])[self.topic].result()
            except KafkaException:  # the old one is not gone yet
                threading.Event().wait(0.01)
            else:
                return

    def fill(self, numbers: range) -> None:
        producer = Producer({"bootstrap.servers": self.broker.bootstrap_servers})
        for number in numbers:
            producer.produce(self.topic, b"%d" % number)
        assert producer.flush(30) == 0

    def recreate(self) -> None:
        self.admin.delete_topics([self.topic])[self.topic].result()
        self.create()
        self.fill(NEW)

    def put_committed_offset(self, offset: int, metadata: str | None) -> None:
        raw = RawConsumer({"bootstrap.servers": self.broker.bootstrap_servers, "group.id": self.topic})
        raw.commit(
            offsets=[TopicPartition(self.topic, 0, offset, metadata=metadata or "")], asynchronous=False
        )
        raw.close()

    def committed_offset(self) -> TopicPartition:
        raw = RawConsumer({"bootstrap.servers": self.broker.bootstrap_servers, "group.id": self.topic})
        (found,) = raw.committed([TopicPartition(self.topic, 0)], timeout=30)
        raw.close()
        return found

    def consumer(self, **arguments: Any) -> Consumer:
        return Consumer(
            self.broker.bootstrap_servers,
            group=self.topic,
            topics=[self.topic],
            commit_seconds=0.05,
            config=SOON,
            **arguments,
        )

    def processor(self, **arguments: Any) -> Processor:
        return Processor(
            self.broker.bootstrap_servers,
            group=self.topic,
            topics=[self.topic],
            commit_seconds=0.02,
            config=SOON,
            **arguments,
        )

    def handle(self, message: Message) -> None:
        self.handled.append(int(message.value or b""))


@pytest.fixture
def scene(broker: BrokerProcess) -> Scene:
    return Scene(broker)


def consume_until(scene: Scene, last: int, consumer: Consumer) -> None:
    def handle(message: Message) -> None:
        scene.handle(message)
        if scene.handled[-1] == OLD[-1] and last != OLD[-1]:
            scene.recreate()
        if last in scene.handled and set(scene.handled) >= set(NEW if last in NEW else OLD):
            consumer.stop()

    consumer.run(handle)


def test_what_a_signals_handler_raises_while_topics_are_asked_for_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = TopicIds({"bootstrap.servers": "127.0.0.1:1"})

    def describe_topics(*_: object, **named: object) -> None:
        raise SystemError("returned a result with an exception set") from TimeoutError("time is up")

    monkeypatch.setattr(ids._admin, "describe_topics", describe_topics)
    with pytest.raises(TimeoutError, match="time is up"):
        ids.look(["orders"])


def test_a_consumer_stops_when_its_topic_is_recreated(scene: Scene) -> None:
    with pytest.raises(TopicRecreated, match=scene.topic):
        consume_until(scene, NEW[-1], scene.consumer())


def test_a_consumer_begins_at_the_start_of_a_recreated_topic_when_told_so(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    consume_until(scene, NEW[-1], scene.consumer(lost_offsets="earliest"))
    assert set(scene.handled) == {*OLD, *NEW}
    assert "recreated" in caplog.text


@pytest.mark.parametrize("kind", ["consumer", "processor"])
def test_a_position_of_the_topic_before_is_not_used_by_the_next_run(scene: Scene, kind: str) -> None:
    """A broker that keeps the positions of a deleted topic, or a member that committed after the deletion."""
    consume_until(scene, OLD[-1], scene.consumer())
    before = scene.committed_offset()
    assert before.offset == len(OLD)
    scene.recreate()
    scene.put_committed_offset(before.offset, before.metadata)
    with pytest.raises(TopicRecreated, match=scene.topic):
        if kind == "consumer":
            scene.consumer().run(scene.handle)
        else:
            scene.processor().run(lambda message: None)
    assert scene.handled == list(OLD)


@pytest.mark.parametrize("lost_offsets", ["stop", "earliest"])
def test_a_processor_commits_nothing_of_a_recreated_topic_that_it_took_for_the_old_one(
    scene: Scene, lost_offsets: Any
) -> None:
    processor = scene.processor(lost_offsets=lost_offsets)
    is_over = threading.Event()

    def recreate() -> None:
        for wanted, then in ((len(OLD), scene.recreate), (len(OLD) + len(NEW), processor.stop)):
            while processor.committed < wanted and not is_over.wait(0.01):
                pass
            then()

    helper = threading.Thread(target=recreate)
    helper.start()
    try:
        if lost_offsets == "stop":
            with pytest.raises(TopicRecreated, match=scene.topic):
                processor.run(scene.handle)
            assert processor.committed == len(OLD)
        else:
            processor.run(scene.handle)
            assert scene.handled[-len(NEW) :] == list(NEW)
    finally:
        is_over.set()
        helper.join()
