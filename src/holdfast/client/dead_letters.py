"""Dead letters: messages set aside in a topic of their own, with where they came from and what went wrong.

The message goes as it was, key, value and headers; ours are added behind them. It counts as set aside when the broker
has acknowledged it, so a message is in its topic until its dead letter is safe: every error here is raised, and the
committed offset stays where it is.

A dead letter that is too large for its topic is tried again without the stack, then with short texts; one whose own
key, value and headers do not fit is refused with the setting that would let it in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from holdfast.client.dead_letter_dialects import (
    Dialect,
    Failure,
    Headers,
    class_name,
    failure_headers,
    stack_of,
)
from holdfast.client.errors import DeliveryFailed
from holdfast.client.messages import DeadLetter, Message, away_from_home, text_of
from holdfast.client.retries import History, without_history
from holdfast.client.side_topics import TOO_LARGE, Sends, SideTopics, send_smaller
from holdfast.client.transactional import Output


def dead_letters_of(topic: str) -> str:
    return f"{topic}-dlt"


def add_dead_letter(
    topics: Sends,
    group: str,
    topic: str,
    message: Message,
    reason: str,
    error: BaseException | None,
    attempts: int,
    history: History | None = None,
    dialect: Dialect = "holdfast",
) -> None:
    """Set a message aside, with headers of a dialect; returns when the broker has it, raises when it cannot."""
    failure = failure_of(message, group, reason, error, attempts, history)
    headers = headers_of(message, failure, dialect)
    send_smaller(topics, topic, message, headers, source=failure.topic or message.topic)


class OutputLetters:
    """Dead letters as outputs of transactions.

    Whether one fits its topic is known when the broker has refused it, and the transaction with it: then everything is
    done again with shorter headers, until a transaction was committed.
    """

    def __init__(
        self, group: str, topics: SideTopics, dead_letter_topic: Callable[[str], str], dialect: Dialect
    ) -> None:
        self._group = group
        self._side = topics
        self._dead_letter_topic = dead_letter_topic
        self._dialect: Dialect = dialect
        self._step = 0
        """How much shorter than they could be the headers are."""
        self._topics: set[str] = set()

    def compose(self, message: Message, reason: str, error: BaseException, attempts: int) -> list[Output]:
        """The dead letter of a message, the fullest first; nothing when it is time to stop and its topic unknown."""
        topic = self._dead_letter_topic(message.topic)
        count = self._side.partitions(topic, message.topic)
        self._topics.add(topic)
        if not count:
            return []
        failure = failure_of(message, self._group, reason, error, attempts)
        partition = message.partition if message.partition < count else None
        headers = headers_of(message, failure, self._dialect)
        return [Output(topic, message.value, message.key, each, partition) for each in headers[self._step :]]

    def go_to(self, topic: str) -> bool:
        """Whether there are dead letters in a topic."""
        return topic in self._topics

    def are_shorter_after(self, refused: DeliveryFailed) -> bool:
        """Whether it was a dead letter that was refused, and the next attempt is worth it."""
        if refused.code not in TOO_LARGE or not self.go_to(refused.topic) or self._step >= 2:
            return False
        self._step += 1
        return True

    def committed(self) -> None:
        self._step = 0

    def close(self) -> None:
        self._side.close()


def headers_of(message: Message, failure: Failure, dialect: Dialect) -> tuple[Headers, ...]:
    """The headers of a dead letter: the message's own and ours, and the same ever shorter."""
    own = away_from_home(without_history(message.headers))
    tries = (failure, replace(failure, stack=None), failure.shortened())
    return tuple((*own, *failure_headers(told, dialect)) for told in tries)


def failure_of(
    message: Message,
    group: str,
    reason: str,
    error: BaseException | None,
    attempts: int,
    history: History | None = None,
) -> Failure:
    """What is to be told of a message that is given up on now; without a history it failed here first."""
    cause = error
    if isinstance(error, DeadLetter) and error.__cause__ is not None:
        cause = error.__cause__
    history = history or History(message.here)
    origin = history.origin
    return Failure(
        topic=origin.topic,
        partition=origin.partition,
        offset=origin.offset,
        timestamp_ms=origin.timestamp_ms,
        group=group,
        error=None if cause is None else class_name(cause),
        message=None if cause is None else text_of(cause),
        reason=reason,
        stack=None if cause is None else stack_of(cause),
        attempts=history.attempts + attempts,
        failed_ms=time.time_ns() // 1_000_000,
    )
