"""Which topic a name means: its id, that no other topic ever had.

A topic that is deleted and made anew has the same name and begins at position 0 again: positions of the old one mean
nothing in it. Looked at after messages were read and before they are stored, an unchanged id proves that they are of
the topic that the positions are of.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from holdfast.client.errors import ClientError

ANSWER_SECONDS: Final = 15.0
CONNECTION: Final = ("bootstrap.servers", "security.", "sasl.", "ssl.", "client.id", "socket.", "oauth")
"""What the names of such settings begin with."""
BITS: Final = 1 << 64


def connection_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a client's settings those that say how to reach the cluster."""
    return {name: value for name, value in settings.items() if name.startswith(CONNECTION)}


class TopicMadeAnew(ClientError):
    """A topic was deleted and made anew, so the stored positions are those of another topic."""


class TopicIds:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._admin = AdminClient(connection_settings(settings))

    def ask(self, topics: Collection[str]) -> dict[str, str]:
        """The ids that these topics have now. Raises KafkaException when nobody answers."""
        futures = self._admin.describe_topics(TopicCollection(sorted(topics)), request_timeout=ANSWER_SECONDS)
        ids: dict[str, str] = {}
        for topic, future in futures.items():
            found = future.result().topic_id
            number = (
                found.get_most_significant_bits() % BITS * BITS + found.get_least_significant_bits() % BITS
            )
            ids[topic] = str(uuid.UUID(int=number))
        return ids


def is_gone(error: KafkaException) -> bool:
    """Whether an answer says that there is no such topic."""
    return bool(error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART)
