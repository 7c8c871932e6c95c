"""Waiting for the markers of transactions.

Apache Kafka answers the end of a transaction when it is decided, and writes the markers afterwards: a reader of
committed messages that is quicker than the markers finds the topic as it was before. Whoever reads a topic to its end
to see what a transaction left there waits for them first.
"""

from __future__ import annotations

import time
from typing import Any, Final

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

QUIET: Final = {"log_level": 0}
ANSWER_SECONDS: Final = 30.0


def await_decided(bootstrap_servers: str, topic: str, seconds: float = 30.0) -> bool:
    """Wait until all that the topic holds now is committed or aborted; false when something stays open."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})
    found = admin.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic].partitions
    places = [TopicPartition(topic, number) for number in found]
    written = _ends(admin, places, IsolationLevel.READ_UNCOMMITTED)
    deadline = time.monotonic() + seconds
    while any(
        end < written[number] for number, end in _ends(admin, places, IsolationLevel.READ_COMMITTED).items()
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _ends(admin: Any, places: list[TopicPartition], isolation: IsolationLevel) -> dict[int, int]:
    specs: Any = OffsetSpec
    asked = {place: specs.latest() for place in places}
    answers = admin.list_offsets(asked, isolation_level=isolation, request_timeout=ANSWER_SECONDS)
    return {place.partition: future.result().offset for place, future in answers.items()}
