"""Where a member begins: asked as a member, and where a member is not answered, as somebody who is none."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client import Consumer as Member
from holdfast.client.consuming.assignment import Assignment, CommittedOffsetLost, LostOffsets, Start
from holdfast.client.consuming.commits import Note
from holdfast.client.consuming.marks import GroupMarks, Mark
from holdfast.client.spool.format import PartitionKey
from holdfast.client.topic_ids import TopicIds, TopicRecreated
from holdfast.testing.broker import BrokerProcess

SETTINGS: dict[str, Any] = {
    "group.id": "workers",
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "session.timeout.ms": 6000,
}


class Unanswered:
    """A member that is not told where its group is, as one that was expelled while it learned of its partitions."""

    def __init__(self, real: Consumer, code: int) -> None:
        self._real = real
        self._code = code
        self.assigned: list[TopicPartition] = []

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        raise KafkaException(KafkaError(self._code))

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
        return self._real.get_watermark_offsets(partition, timeout=timeout)

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.assigned = partitions


@pytest.fixture
def real(holdfast_broker: BrokerProcess) -> Any:
    consumer = Consumer({**SETTINGS, "bootstrap.servers": holdfast_broker.bootstrap_servers})
    yield consumer
    consumer.close()


def begin(broker: BrokerProcess, real: Consumer, code: int) -> list[int]:
    address: dict[str, Any] = {"bootstrap.servers": broker.bootstrap_servers}
    admin = AdminClient(address)
    admin.create_topics([NewTopic("work", 2)])["work"].result()
    real.commit(offsets=[TopicPartition("work", 1, 0)], asynchronous=False)
    member = Unanswered(real, code)
    assignment = Assignment(member, "stop", say=print, settings={**SETTINGS, **address})
    assignment.take_over([TopicPartition("work", 0), TopicPartition("work", 1)])
    return [each.offset for each in member.assigned]


def test_a_member_that_is_not_answered_asks_as_a_stranger(
    holdfast_broker: BrokerProcess, real: Consumer
) -> None:
    assert begin(holdfast_broker, real, KafkaError._TIMED_OUT) == [-2, 0]


def test_a_refusal_is_not_asked_around(holdfast_broker: BrokerProcess, real: Consumer) -> None:
    with pytest.raises(KafkaException, match="GROUP_AUTHORIZATION_FAILED"):
        begin(holdfast_broker, real, KafkaError.GROUP_AUTHORIZATION_FAILED)


def test_a_session_that_the_broker_refuses_is_not_asked_for_again_and_again(
    holdfast_broker: BrokerProcess,
) -> None:
    holdfast_broker.create_topic("work")
    short = {"session.timeout.ms": 1500}  # group.min.session.timeout.ms is 6000
    consumer = Member(holdfast_broker.bootstrap_servers, group="workers", topics=["work"], config=short)
    with pytest.raises(KafkaException, match="INVALID_SESSION_TIMEOUT"):
        consumer.run(print)


def test_a_position_behind_an_open_transaction_is_in_the_log(
    holdfast_broker: BrokerProcess, real: Consumer
) -> None:
    address: dict[str, Any] = {"bootstrap.servers": holdfast_broker.bootstrap_servers}
    admin = AdminClient(address)
    admin.create_topics([NewTopic("held", 1)])["held"].result()
    holder = Producer({**address, "transactional.id": "holder"})
    holder.init_transactions(60)
    holder.begin_transaction()
    holder.produce("held", b"open")
    assert holder.flush(60) == 0
    assert real.get_watermark_offsets(TopicPartition("held", 0), timeout=60) == (0, 0)
    assignment = Assignment(real, "stop", say=print, settings={**SETTINGS, **address})
    # As `groups reset-offsets --to-latest` sets it.
    assert assignment.start(TopicPartition("held", 0, 1)) == 1
    with pytest.raises(CommittedOffsetLost, match="committed offset 2 is outside the log"):
        assignment.start(TopicPartition("held", 0, 2))
    holder.abort_transaction(60)


class Busy(Unanswered):
    """A member that asks for its positions, and while it looks for marks another one works on its partitions."""

    def __init__(self, real: Consumer, answers: list[list[int]]) -> None:
        super().__init__(real, KafkaError._TIMED_OUT)
        self._answers = answers

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        offsets = self._answers.pop(0)
        return [
            TopicPartition(each.topic, each.partition, at)
            for each, at in zip(partitions, offsets, strict=True)
        ]

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]:
        return 0, 100


class Marks:
    def find(self, keys: list[PartitionKey]) -> dict[PartitionKey, Mark]:
        return {key: Mark("workers", *key, "id", 0) for key in keys}

    def known(self, key: PartitionKey) -> None:
        pass


def busy(real: Consumer, *answers: list[int], lost_offsets: LostOffsets = "stop") -> Assignment:
    marks = cast(GroupMarks, Marks())
    member = Busy(real, list(answers))
    return Assignment(member, lost_offsets, say=print, marks=marks)


def test_a_position_that_was_stored_since_it_was_asked_for_is_not_lost(real: Consumer) -> None:
    partitions = [TopicPartition("work", 0), TopicPartition("work", 1)]
    starts = busy(real, [-1001, 7], [12, 7]).take_over(partitions)
    assert starts == {("work", 0): Start(12), ("work", 1): Start(7)}


def test_a_position_that_is_still_missing_is_lost(real: Consumer) -> None:
    with pytest.raises(CommittedOffsetLost, match="work-0"):
        busy(real, [-1001], [-1001]).take_over([TopicPartition("work", 0)])


@pytest.mark.parametrize("answers", [([-1001], [-1001]), ([500],)])
def test_a_position_that_was_decided_on_is_not_taken_for_a_stored_one(
    real: Consumer, answers: tuple[list[int], ...]
) -> None:
    starts = busy(real, *answers, lost_offsets="latest").take_over([TopicPartition("work", 0)])
    assert starts == {("work", 0): Start(100, is_stored=False)}


class Ids:
    """Topic ids as somebody tells them, or as nobody does."""

    def __init__(self, found: dict[str, str] | None) -> None:
        self.found = found

    def known(self, topics: Collection[str], seconds: float = 0) -> dict[str, str]:
        if self.found is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return self.found


class Noted(Busy):
    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        note = Note(topic_id="old").encode()
        return [TopicPartition(each.topic, each.partition, 7, metadata=note) for each in partitions]


def test_a_stored_id_is_believed_while_nobody_tells_and_compared_when_somebody_does(real: Consumer) -> None:
    said: list[str] = []
    ids = Ids(None)
    assignment = Assignment(Noted(real, []), "stop", say=said.append, ids=cast(TopicIds, ids))
    key = ("work", 0)
    assert assignment.take_over([TopicPartition(*key)]) == {key: Start(7)}
    assert "shows later" in said[0]
    assert Note.decode(assignment.note(key)).topic_id == "old"
    assert assignment.recreated([key], waits=True) == {}
    ids.found = {"work": "new"}
    assert assignment.recreated([key], waits=True) == {key: "new"}
    with pytest.raises(TopicRecreated, match=r"'work'.*old.*new"):
        assignment.take_over([TopicPartition(*key)])
