"""HF305: where a group begins; what the lab does not show."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from holdfast.client import CommittedOffsetLost, Consumer, Message, UnsafeSetting
from holdfast.testing.engines import wait_until
from holdfast.testing.risks import Scene, numbers, value_of

LATEST = {"auto.offset.reset": "latest", "enable.partition.eof": True}


def first_after_the_end(here: Scene, group: str, topic: str, partition: int) -> str:
    """What a plain member of a group gets first of a partition, to which something is added when it is at its end."""
    consumer = here.consumer(group, LATEST)
    consumer.subscribe([topic])
    got: list[str] = []

    def more() -> bool:
        message = consumer.poll(1)
        if message is None or message.partition() != partition:
            return False
        error = message.error()
        if error is None:
            got.append(value_of(message))
        elif error.code() == KafkaError._PARTITION_EOF and not got:
            here.write(topic, {partition: ["later"]})
        return bool(got)

    wait_until(more, f"a message of {topic}-{partition}")
    consumer.close()
    return got[0]


def handled(here: Scene, group: str, topic: str, count: int, **options: Any) -> list[str]:
    """What a consumer of ours handles, until it is so much."""
    consumer = Consumer(here.bootstrap_servers, group=group, topics=[topic], **options)
    values: list[str] = []

    def handle(message: Message) -> None:
        values.append(value_of(message))
        if len(values) == count:
            consumer.stop()

    consumer.run(handle)
    return values


# ---------------------------------------------------------------- HF305: positions that have vanished


def group_at_3(here: Scene, topic: str) -> str:
    """A group that has handled three of ten messages."""
    here.create_topic(topic)
    here.write(topic, {0: numbers(0, 3)})
    assert handled(here, topic, topic, 3) == numbers(0, 3)
    here.write(topic, {0: numbers(3, 10)})
    return topic


def forget(here: Scene, group: str) -> None:
    """What happens to the positions of a group that has been away for longer than offsets.retention.minutes."""
    here.await_state(group, "EMPTY")
    here.admin.delete_consumer_groups([group])[group].result(30)
    assert here.committed(group) == {}


def test_hf305_forgotten_positions_ours_stops_and_asks(here: Scene) -> None:
    topic = group_at_3(here, "hf305-ours")
    forget(here, topic)
    with pytest.raises(CommittedOffsetLost, match=f"{topic}-0"):
        handled(here, topic, topic, 1)
    assert here.committed(topic) == {}
    assert handled(here, topic, topic, 10, lost_offsets="earliest") == numbers(0, 10)
    assert here.committed_offset(topic, topic) == 10
    # That settles it.
    here.write(topic, {0: ["later"]})
    assert handled(here, topic, topic, 1) == ["later"]


def test_hf305_new_group_plain_client_skips(here: Scene) -> None:
    topic = here.create_topic("hf305-new-plain")
    here.write(topic, {0: numbers(0, 5)})
    assert first_after_the_end(here, topic, topic, 0) == "later"


def test_hf305_new_group_ours_begins_at_the_beginning(here: Scene) -> None:
    topic = here.create_topic("hf305-new-ours")
    here.write(topic, {0: numbers(0, 5)})
    assert handled(here, topic, topic, 5) == numbers(0, 5)
    with pytest.raises(UnsafeSetting, match="HF305"):
        Consumer(here.bootstrap_servers, group=topic, topics=[topic], config={"auto.offset.reset": "latest"})


def expire(here: Scene, topic: str, before: int) -> None:
    """What retention does."""
    (future,) = here.admin.delete_records([TopicPartition(topic, 0, before)]).values()
    future.result(30)


@pytest.mark.check
def test_hf305_position_that_left_the_log_plain_client_skips(here: Scene) -> None:
    topic = group_at_3(here, "hf305-expired-plain")
    expire(here, topic, 5)
    # 3 and 4 are gone; 5 to 9 are there, and passed over.
    assert first_after_the_end(here, topic, topic, 0) == "later"


def test_hf305_position_that_left_the_log_ours_stops_and_asks(here: Scene) -> None:
    topic = group_at_3(here, "hf305-expired-ours")
    expire(here, topic, 5)
    with pytest.raises(CommittedOffsetLost, match="2 messages expired"):
        handled(here, topic, topic, 1)
    assert here.committed_offset(topic, topic) == 3
