"""What a group has worked on, remembered apart from its positions (HF305)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import NewPartitions
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client import CommittedOffsetLost, Consumer, Message, Output, Processor
from holdfast.client.consuming.marks import (
    MARKS_TOPIC,
    GroupMarks,
    Mark,
    decode_mark,
)
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import SETTINGS, Background, Scene, numbers, value_of


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path_factory.mktemp("marks") / "broker"), settings=SETTINGS) as process:
        yield process


@pytest.fixture
def here(broker: BrokerProcess) -> Scene:
    return Scene(broker)


def work(here: Scene, topic: str, count: int, **options: Any) -> list[str]:
    """What a consumer of group `topic` handles, until it is so much."""
    consumer = Consumer(here.bootstrap_servers, group=topic, topics=[topic], commit_seconds=0.05, **options)
    values: list[str] = []

    def handle(message: Message) -> None:
        values.append(value_of(message))
        if len(values) == count:
            consumer.stop()

    consumer.run(handle)
    return values


def marks(here: Scene, group: str) -> list[tuple[str, int]]:
    """The partitions a group has marks of, as often as they were written."""
    consumer = here.consumer("looks at marks")
    if MARKS_TOPIC not in here.admin.list_topics(timeout=30).topics:
        return []
    _, end = consumer.get_watermark_offsets(TopicPartition(MARKS_TOPIC, 0), timeout=30)
    consumer.assign([TopicPartition(MARKS_TOPIC, 0, 0)])
    found: list[tuple[str, int]] = []
    read = 0
    while read < end:
        raw: Any = wait_until(lambda: consumer.poll(1), "a mark")
        read = raw.offset() + 1
        mark = decode_mark(raw.key(), raw.value())
        assert mark is not None
        if mark.group == group:
            found.append((mark.topic, mark.partition))
    consumer.close()
    return sorted(found)


def forget(here: Scene, group: str) -> None:
    """As offsets.retention.minutes does."""
    here.await_state(group, "EMPTY")
    here.admin.delete_consumer_groups([group])[group].result(30)


def test_a_partition_is_marked_once(here: Scene) -> None:
    topic = here.create_topic("once", 2)
    here.write(topic, {0: ["a"], 1: ["b"]})
    consumer = Consumer(here.bootstrap_servers, group=topic, topics=[topic], commit_seconds=0.05)
    running = Background(lambda: consumer.run(lambda message: None))
    wait_until(lambda: marks(here, topic) == [(topic, 0), (topic, 1)], "both have a mark")
    here.write(topic, {0: ["c"], 1: ["d"]})
    wait_until(lambda: here.committed(topic) == {f"{topic}-0": 2, f"{topic}-1": 2}, "which is noted")
    consumer.stop()
    running.finish()
    here.write(topic, {0: ["e"], 1: ["f"]})
    assert sorted(work(here, topic, 2)) == ["e", "f"]
    assert marks(here, topic) == [(topic, 0), (topic, 1)]


def test_a_partition_in_which_there_was_nothing_is_marked_too(here: Scene) -> None:
    topic = here.create_topic("nothing", 2)
    here.write(topic, {0: ["only"]})
    consumer = Consumer(here.bootstrap_servers, group=topic, topics=[topic], commit_seconds=0.05)
    running = Background(lambda: consumer.run(lambda message: None))
    wait_until(lambda: here.committed(topic) == {f"{topic}-0": 1, f"{topic}-1": 0}, "both have a position")
    consumer.stop()
    running.finish()
    assert set(marks(here, topic)) == {(topic, 0), (topic, 1)}


def test_messages_that_expire_before_the_first_was_handled_are_missed(here: Scene) -> None:
    # HF206
    topic = here.create_topic("untouched")
    consumer = Consumer(here.bootstrap_servers, group=topic, topics=[topic], commit_seconds=0.05)
    running = Background(lambda: consumer.run(lambda message: None))
    wait_until(lambda: here.committed(topic) == {f"{topic}-0": 0}, "it has a position")
    consumer.stop()
    running.finish()
    here.write(topic, {0: numbers(0, 5)})
    (future,) = here.admin.delete_records([TopicPartition(topic, 0, 3)]).values()
    future.result(30)
    with pytest.raises(CommittedOffsetLost, match="3 messages expired"):
        work(here, topic, 1)


def test_a_group_that_lost_some_of_its_positions_stops_and_new_partitions_begin_at_their_beginning(
    here: Scene,
) -> None:
    # HF304, HF305
    topic = here.create_topic("some", 2)
    here.write(topic, {0: ["a"], 1: ["b"]})
    assert sorted(work(here, topic, 2)) == ["a", "b"]
    here.admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
    here.write(topic, {2: ["c"]})
    assert work(here, topic, 1) == ["c"]
    forget(here, topic)
    raw = here.consumer(topic)
    raw.commit(offsets=[TopicPartition(topic, 0, 1), TopicPartition(topic, 2, 1)], asynchronous=False)
    raw.close()
    with pytest.raises(CommittedOffsetLost, match=f"{topic}-1: group '{topic}' has worked here since"):
        work(here, topic, 1)


def test_positions_that_another_client_stored_are_marked(here: Scene) -> None:
    topic = here.create_topic("another")
    here.write(topic, {0: numbers(0, 3)})
    raw = here.consumer(topic)
    raw.commit(offsets=[TopicPartition(topic, 0, 2)], asynchronous=False)
    raw.close()
    assert work(here, topic, 1) == ["2"]
    forget(here, topic)
    with pytest.raises(CommittedOffsetLost, match="expired"):
        work(here, topic, 1)


def test_told_to_go_on_at_the_end_it_does(here: Scene) -> None:
    topic = here.create_topic("told")
    here.write(topic, {0: numbers(0, 3)})
    assert work(here, topic, 3) == numbers(0, 3)
    forget(here, topic)
    here.write(topic, {0: ["passed over"]})
    consumer = Consumer(
        here.bootstrap_servers, group=topic, topics=[topic], commit_seconds=0.05, lost_offsets="latest"
    )
    handled: list[str] = []
    running = Background(lambda: consumer.run(lambda message: handled.append(value_of(message))))
    wait_until(lambda: here.members(topic) == 1, "it is a member")

    def one_more() -> bool:
        here.write(topic, {0: ["new"]})
        return bool(handled)

    wait_until(one_more, "a new message is handled")
    consumer.stop()
    running.finish()
    assert set(handled) == {"new"}


def position(here: Scene, group: str) -> int:
    raw = here.consumer(group)
    (found,) = raw.committed([TopicPartition(group, 0)], timeout=30)
    raw.close()
    return int(found.offset)


@pytest.mark.parametrize("kind", ["consumer", "processor"])
@pytest.mark.check
def test_what_comes_behind_the_end_it_was_told_to_go_on_at_is_handled_after_a_restart(
    here: Scene, kind: str
) -> None:
    topic = here.create_topic(f"told-{kind}")
    here.write(topic, {0: numbers(0, 3)})
    assert work(here, topic, 3) == numbers(0, 3)
    forget(here, topic)
    here.write(topic, {0: ["passed over"]})
    handled: list[str] = []

    def run_until(is_over: Callable[[], bool], what: str) -> None:
        options: dict[str, Any] = {"group": topic, "topics": [topic], "commit_seconds": 0.05}
        options["lost_offsets"] = "latest"
        member: Consumer | Processor = (
            Consumer(here.bootstrap_servers, **options)
            if kind == "consumer"
            else Processor(here.bootstrap_servers, **options)
        )
        running = Background(lambda: member.run(lambda message: handled.append(value_of(message))))
        wait_until(is_over, what)
        member.stop()
        running.finish()

    run_until(lambda: position(here, topic) == 4, "the position is stored")
    assert handled == []
    here.write(topic, {0: ["between"]})
    run_until(lambda: handled != [], "a message is handled")
    assert handled == ["between"]


def test_a_topic_made_anew_is_new_to_the_group(here: Scene) -> None:
    topic = here.create_topic("anew")
    here.write(topic, {0: ["old"]})
    assert work(here, topic, 1) == ["old"]
    here.await_state(topic, "EMPTY")
    here.admin.delete_topics([topic])[topic].result(30)
    here.create_topic(topic)
    here.write(topic, {0: ["new"]})
    wait_until(lambda: here.committed(topic) == {}, "the positions of the old one are gone")
    assert work(here, topic, 1) == ["new"]


def test_without_marks_a_group_whose_committed_offsets_vanished_is_new(here: Scene) -> None:
    topic = here.create_topic("without")
    here.write(topic, {0: ["message"]})
    for _ in range(2):
        assert work(here, topic, 1, marks_topic=None) == ["message"]
        forget(here, topic)


def test_marks_that_may_not_be_used_are_said_once_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    marks = GroupMarks("mailer", {"bootstrap.servers": "127.0.0.1:1"}, said.append)

    def refuse() -> Any:
        raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))

    monkeypatch.setattr(marks, "_read", refuse)
    assert marks.find([("orders", 0)]) == {}
    assert marks.find([("orders", 0)]) == {}
    marks.remember([("orders", 0)])
    marks.close()
    assert not marks.is_remembered(("orders", 0))
    assert [("HF305" in line, MARKS_TOPIC in line) for line in said] == [(True, True)]


def test_a_broker_that_does_not_answer_is_not_taken_for_a_group_without_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks = GroupMarks("mailer", {"bootstrap.servers": "127.0.0.1:1"}, print)

    def late() -> Any:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr(marks, "_read", late)
    with pytest.raises(KafkaException):
        marks.find([("orders", 0)])


@given(st.text(), st.text(), st.integers(0, 2**31 - 1))
def test_a_mark_is_read_as_it_was_written(group: str, topic: str, partition: int) -> None:
    mark = Mark(group, topic, partition, "5d5cbd1e-0000-4000-8000-000000000000", 1_700_000_000_000)
    assert decode_mark(*mark.encode()) == mark


@given(st.none() | st.binary(), st.none() | st.binary())
def test_what_is_no_mark_is_none(key: bytes | None, value: bytes | None) -> None:
    assert decode_mark(key, value) is None


def test_a_processor_whose_positions_vanished_stops_before_it_produces_anything_again(here: Scene) -> None:
    source, target = here.create_topic("processed"), here.create_topic("processed-out")
    here.write(source, {0: numbers(0, 3)})

    def run(count: int, **options: Any) -> None:
        processor = Processor(
            here.bootstrap_servers, group=source, topics=[source], commit_seconds=0.05, **options
        )
        running = Background(lambda: processor.run(lambda message: [Output(target, message.value)]))
        try:
            wait_until(lambda: processor.committed == count or not running.is_alive, "it is done")
        finally:
            processor.stop()
            running.finish()

    run(3)
    here.write(source, {0: ["3"]})
    run(1)
    forget(here, source)
    with pytest.raises(CommittedOffsetLost, match="has worked here since"):
        run(1)
    assert here.read(target) == {0: numbers(0, 4)}
    run(4, lost_offsets="earliest")
    assert here.read(target) == {0: [*numbers(0, 4), *numbers(0, 4)]}
