"""Which topic a name means: its id, that no other topic ever had.

A topic that is deleted and recreated has the same name and begins at offset 0 again: committed offsets of the old one
mean nothing in it. Looked at after messages were read and before they are stored, an unchanged id proves that they are
of the topic that the committed offsets are of.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from holdfast.client.errors import ClientError
from holdfast.client.settings import shared_settings

ANSWER_SECONDS: Final = 15.0
BITS: Final = 1 << 64
NONE: Final = str(uuid.UUID(int=0))
"""What a broker says that gives topics no ids."""


class TopicRecreated(ClientError):
    """A topic was deleted and recreated, so the committed offsets are those of another topic."""


class TopicIds:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        # Silent: whoever asks says what it needs to be said.
        self._admin: AdminClient | None = AdminClient({**shared_settings(settings), "log_level": 0})
        self._asked: Mapping[str, Future[Any]] = {}

    def ask(self, topics: Collection[str]) -> dict[str, str]:
        """The ids that these topics have now. Raises KafkaException when nobody answers."""
        return {topic: _text(future.result()) for topic, future in self._futures(topics).items()}

    def known(self, topics: Collection[str], seconds: float = ANSWER_SECONDS) -> dict[str, str]:
        """The ids of those of them that there are."""
        ids: dict[str, str] = {}
        for topic, future in self._futures(topics, seconds).items():
            try:
                ids[topic] = _text(future.result())
            except KafkaException as error:
                if not is_gone(error):
                    raise
        return ids

    def look(self, topics: Collection[str]) -> dict[str, str]:
        """The ids that the last call has asked for, as far as they are known by now; asks again, and never waits."""
        if not all(future.done() for future in self._asked.values()):
            return {}
        answers = {topic: future.result() for topic, future in self._asked.items() if not future.exception()}
        self._asked = self._futures(topics)
        return {topic: _text(answer) for topic, answer in answers.items()}

    def close(self) -> None:
        """Let the connection go; from now on no topic is known."""
        self._admin, self._asked = None, {}

    def _futures(self, topics: Collection[str], seconds: float = ANSWER_SECONDS) -> Mapping[str, Future[Any]]:
        if not topics or self._admin is None:
            return {}
        try:
            found: Mapping[str, Future[Any]] = self._admin.describe_topics(
                TopicCollection(sorted(topics)), request_timeout=seconds
            )
        except SystemError as error:
            # What a signal's handler raised meanwhile: confluent-kafka does not look for it in time.
            raise error.__cause__ or error from None
        return found


def _text(described: Any) -> str:
    found = described.topic_id
    number = found.get_most_significant_bits() % BITS * BITS + found.get_least_significant_bits() % BITS
    return str(uuid.UUID(int=number))


def is_gone(error: KafkaException) -> bool:
    """Whether an answer says that there is no such topic."""
    return bool(error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART)
