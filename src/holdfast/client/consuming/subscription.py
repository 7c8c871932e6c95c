"""What a member takes of the topics that match its patterns: not the topics that its own dead letters go to.

Otherwise `^orders` would take `orders-dlt`, hand dead letters to the handler that could not handle them, and set them
aside in `orders-dlt-dlt`, and so on. A topic that is subscribed to by its name is taken whatever it holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException

ANSWER_SECONDS: Final = 30.0


def takes(topics: Iterable[str], topic: str) -> bool:
    """Whether a topic is among these; names that begin with ^ are patterns, as everywhere in the client."""
    return any(topic == each or (each.startswith("^") and re.search(each, topic)) for each in topics)


class Source(NamedTuple):
    """Topics by name or pattern, and where what fails of each goes."""

    topics: Collection[str]
    dead_letter_topic: Callable[[str], str]

    def letters(self, topic: str) -> str | None:
        if not takes(self.topics, topic):
            return None
        try:
            return self.dead_letter_topic(topic)
        except Exception:  # noqa: BLE001 - a user's function that does not know the topic: nothing of it goes anywhere
            return None


def own_dead_letters(sources: Collection[Source], consumer: Any) -> frozenset[str]:
    """Topics that a pattern would take although they hold our own dead letters. Raises KafkaException when nobody
    answers."""
    names = {each for source in sources for each in source.topics}
    if not any(each.startswith("^") for each in names):
        return frozenset()
    found = consumer.list_topics(timeout=ANSWER_SECONDS)
    if found is None:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return frozenset(
        letters
        for source in sources
        for topic in found.topics
        if (letters := source.letters(topic)) is not None and letters != topic and letters not in names
    )
