"""Going back to a position, and knowing which generation of its group a member belongs to."""

from __future__ import annotations

import time
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicPartition

SEEK_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 0.005
METADATA: Final = b"CGMDv2:"
"""How librdkafka's serialised group metadata begins; the generation follows, as a 32-bit number."""


def seek(consumer: Any, place: TopicPartition) -> None:
    """Seek; a partition that was assigned a moment ago is not ready for it at once."""
    deadline = time.monotonic() + SEEK_SECONDS
    while True:
        try:
            consumer.seek(place)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._STATE or time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_SECONDS)
        else:
            return


def is_member(consumer: Any, metadata: bytes) -> bool:
    """Whether group metadata is that of a member.

    A member that lost its membership and has not been told yet has none, and a broker takes positions that come in a
    transaction without a member as those of a program that uses no group: nothing would fence them.
    """
    if metadata.startswith(METADATA):
        generation = metadata[len(METADATA) : len(METADATA) + 4]
        return int.from_bytes(generation, "little", signed=True) >= 0
    return bool(consumer.memberid())
