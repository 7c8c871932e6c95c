"""When a program that never ends by itself has done its work."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition


def has_caught_up(bootstrap_servers: str, group: str, topics: list[str]) -> bool:
    """Whether nothing is left to read behind the positions of a group."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
            "isolation.level": "read_committed",
        }
    )
    try:
        places = consumer.committed(
            [TopicPartition(each, number) for each in topics for number in range(3)], 60
        )
        consumer.assign([TopicPartition(each.topic, each.partition, max(each.offset, 0)) for each in places])
        for _ in places:
            message: Any = consumer.poll(60)
            if message.error() is None:
                return False
            assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
        return True
    finally:
        consumer.close()
