"""What an error says of a message: that it can never arrive, or that its topic or partition takes none now.

Nothing is final that may pass with time. A message is set aside for an error of its own alone: it is too large, or not
what its topic allows, or no topic can have its name, or its timestamp is wrong on this machine too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from confluent_kafka import KafkaError

from holdfast.client.spool.groups import SpooledDelivery
from holdfast.client.spool.topics import Place

RECENT_MS: Final = 24 * 3_600_000
"""A message stamped within so long of this machine's clock is stamped right, as far as anybody can tell."""

NO_TOPIC_CODES: Final = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC))
TOPIC_CODES: Final = NO_TOPIC_CODES | {KafkaError.TOPIC_AUTHORIZATION_FAILED}
"""No message of the topic can arrive now: there is none, or nobody may write to it."""
PARTITION_CODES: Final = frozenset(
    (KafkaError._UNKNOWN_PARTITION, KafkaError.POLICY_VIOLATION, KafkaError.UNSUPPORTED_COMPRESSION_TYPE)
)
"""No message of the partition can arrive now."""
REFUSED_CODES: Final = frozenset((KafkaError.TOPIC_EXCEPTION,))
"""No message of the topic can ever arrive: no topic can have its name."""
BATCH_CODES: Final = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
    )
)
"""Errors of a message that no attempt can mend; a broker may give them to a whole batch for one message's sake."""
FINAL_CODES: Final = REFUSED_CODES | BATCH_CODES


def place_to_hold(item: SpooledDelivery, error: KafkaError) -> Place | None:
    """What cannot take messages now, and may later; None when it is not for the place's sake that one was refused."""
    code = error.code()
    if code in TOPIC_CODES:
        return item.topic, None
    # Brokers hold a timestamp against their own clock. One that is right here was refused for theirs.
    if code in PARTITION_CODES or (code == KafkaError.INVALID_TIMESTAMP and is_recent(item)):
        return item.topic, item.partition
    return None


def is_recent(item: SpooledDelivery) -> bool:
    return abs(item.timestamp_ms - time.time_ns() // 1_000_000) <= RECENT_MS


def misdated_places(failed: Iterable[tuple[SpooledDelivery, KafkaError]]) -> set[Place]:
    """Partitions with a refused message whose timestamp is wrong here too: others may be refused for its sake alone."""
    return {
        (item.topic, item.partition)
        for item, error in failed
        if error.code() == KafkaError.INVALID_TIMESTAMP and not is_recent(item)
    }
