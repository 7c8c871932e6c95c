"""What a handler failed on, and what is to become of it: for clients that do their work in transactions.

One message of a partition at most is being tried again: those behind it wait. How often it failed is kept as long as
the partition is ours, through transactions that are taken back; a successor begins to count anew. A message that was
set aside is passed over until its committed offset has moved past it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.client.dead_letter_dialects import Dialect
from holdfast.client.dead_letters import add_dead_letter
from holdfast.client.errors import HandlerFailed
from holdfast.client.messages import DeadLetter, Message, away_from_home
from holdfast.client.metrics import UNWATCHED, Tally
from holdfast.client.retries import (
    Again,
    Enough,
    HeldBack,
    History,
    Later,
    RetryPolicy,
    RetryTopics,
    headers_for,
    next_history,
)
from holdfast.client.side_topics import SideTopics, send_smaller
from holdfast.client.spool.format import PartitionKey


@dataclass(slots=True)
class _Failing:
    offset: int
    began: float
    attempts: int = 0


class Failures:
    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self._failing: dict[PartitionKey, _Failing] = {}
        self._set_aside: dict[PartitionKey, set[int]] = {}

    def judge(self, message: Message, error: BaseException, now: float, began: float) -> Again | Enough:
        """The handler failed on a message once more, now, in an attempt that began before: what follows."""
        key = (message.topic, message.partition)
        failing = self._failing.get(key)
        if failing is None or failing.offset != message.offset:
            failing = self._failing[key] = _Failing(message.offset, began)
        failing.attempts += 1
        return self.policy.judge(error, failing.attempts, now - failing.began)

    def attempts(self, message: Message) -> int:
        """How often the handler has failed on it."""
        failing = self._failing.get((message.topic, message.partition))
        return failing.attempts if failing is not None and failing.offset == message.offset else 0

    def set_aside(self, message: Message) -> None:
        """It is safe elsewhere: no handler gets it again."""
        self._set_aside.setdefault((message.topic, message.partition), set()).add(message.offset)

    def is_set_aside(self, message: Message) -> bool:
        aside = self._set_aside
        return bool(aside) and message.offset in aside.get((message.topic, message.partition), ())

    def passed(self, key: PartitionKey, position: int) -> None:
        """Everything before the committed offset is over."""
        failing = self._failing.get(key)
        if failing is not None and failing.offset < position:
            del self._failing[key]
        if key in self._set_aside:
            self._set_aside[key] = {offset for offset in self._set_aside[key] if offset >= position}
            if not self._set_aside[key]:
                del self._set_aside[key]

    def forget(self, keys: Iterable[PartitionKey]) -> None:
        """Partitions are not ours any more."""
        for key in keys:
            self._failing.pop(key, None)
            self._set_aside.pop(key, None)


class FailureRouter:
    """What becomes of a message that its handler was given up on: the next retry topic, the dead-letter topic, a stop.

    A worker calls `FailureRouter`. It returns when the message is safe in another topic, acknowledged by the broker:
    then, and only then, the offset that is committed may pass it. Whatever goes wrong on the way is raised and stops
    the consumer, the message still in its place.
    """

    def __init__(
        self,
        bootstrap: str,
        group: str,
        topics: Sequence[str],
        retry: RetryPolicy | RetryTopics,
        consumer_settings: Mapping[str, Any],
        *,
        dead_letter_topic: Callable[[str], str],
        dialect: Dialect = "holdfast",
        create: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
        tally: Tally = UNWATCHED,
    ) -> None:
        self._group = group
        self.tally = tally
        self._retry = retry if isinstance(retry, RetryTopics) else None
        policy = retry.in_place if isinstance(retry, RetryTopics) else retry
        self._give_up = policy.give_up
        self.policy = replace(policy, give_up="dead-letter")
        """What is tried in place before we are called; whether to stop is decided here, after the last topic."""
        self._dead_letter_topic = dead_letter_topic
        self._dialect: Dialect = dialect
        create = create or (self._retry is not None and self._retry.create)
        self._topics = SideTopics(bootstrap, consumer_settings, create=create, is_wanted=is_wanted)
        self._sources = frozenset(topics)
        self._places = {} if self._retry is None else self._retry.places(topics)

    # For the poll loop

    @property
    def retry_topics(self) -> list[str]:
        """What is read besides the topics themselves."""
        return list(self._places)

    def held_back(self) -> HeldBack | None:
        """Keeps what is not due yet; None where nothing ever waits."""
        if self._retry is None:
            return None
        delays_ms = {
            topic: round(self._retry.delays[place.step] * 1000) for topic, place in self._places.items()
        }
        return HeldBack(delays_ms, self._group)

    def prepare(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Make sure that the retry topics are there before they are subscribed to: created, or an error.

        Waits for a broker for as long as it is wanted.
        """
        for topic, place in self._places.items():
            self._topics.partitions(topic, place.source, is_wanted)

    # In a worker

    def __call__(self, message: Message, reason: str, error: BaseException, attempts: int) -> None:
        """Bring a message to safety; returns when it is, raises when it cannot be."""
        history = self._history(message)
        if self._retry is not None:
            now_ms = time.time_ns() // 1_000_000
            following = self._retry.follow(history, error, attempts, now_ms)
            if isinstance(following, Later):
                history = next_history(history, self._group, following, attempts, now_ms)
                tries = (history, replace(history, error=""))
                send_smaller(
                    self._topics,
                    following.topic,
                    message,
                    (away_from_home(headers_for(message, told)) for told in tries),
                    source=history.origin.topic,
                )
                self.tally.add("holdfast_consumer_retry_topic_messages_total")
                return
            reason = following.reason
        if self._give_up == "stop" and not isinstance(error, DeadLetter):
            raise HandlerFailed(f"{message.place}: {reason}") from error
        topic = self._dead_letter_topic(history.origin.topic)
        add_dead_letter(
            self._topics, self._group, topic, message, reason, error, attempts, history, self._dialect
        )
        self.tally.add("holdfast_consumer_dead_letters_total")

    def _history(self, message: Message) -> History:
        """What a message has behind it: nothing, unless it comes from one of our retry topics.

        Elsewhere such headers were copied from another message, and lead to topics that nobody here reads. A message
        that somebody put into a retry topic by hand has no history, or not one of ours; the topic tells its step.
        """
        place = self._places.get(message.topic)
        if place is None:
            return History(message.here)
        history = History.read(message)
        if history.origin.topic not in self._sources:
            return History(message.here._replace(topic=place.source), step=place.step)
        return history if history.step is not None else replace(history, step=place.step)

    def close(self) -> None:
        self._topics.close()
