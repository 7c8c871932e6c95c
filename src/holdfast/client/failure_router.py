"""What becomes of a message that its handler was given up on: the next retry topic, the dead-letter topic, or a stop.

A worker calls `FailureRouter`. It returns when the message is safe in another topic, acknowledged by the broker: then,
and only then, the offset that is committed may pass it. Whatever goes wrong on the way is raised and stops the
consumer, the message still in its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.client.consuming.handling import HandlerFailed
from holdfast.client.dead_letter_dialects import Dialect
from holdfast.client.dead_letters import DeadLetters
from holdfast.client.messages import DeadLetter, Message, away_from_home
from holdfast.client.retries import RetryPolicy
from holdfast.client.retry_history import History
from holdfast.client.retry_topics import HeldBack, Later, RetryTopics, headers_for, next_history
from holdfast.client.side_topics import SideTopics, send_smaller


class FailureRouter:
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
    ) -> None:
        self._bootstrap = bootstrap
        self._group = group
        self._retry = retry if isinstance(retry, RetryTopics) else None
        policy = retry.in_place if isinstance(retry, RetryTopics) else retry
        self._give_up = policy.give_up
        self.policy = replace(policy, give_up="dead-letter")
        """What is tried in place before we are called; whether to stop is decided here, after the last topic."""
        self._settings = consumer_settings
        self._dead_letter_topic = dead_letter_topic
        self._dialect: Dialect = dialect
        self._create = create or (self._retry is not None and self._retry.create)
        self._is_wanted = is_wanted
        self._sources = frozenset(topics)
        self._places = {} if self._retry is None else self._retry.places(topics)
        self._lock = threading.Lock()
        self._topics: SideTopics | None = None
        self._dead_letters: DeadLetters | None = None

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
            self._side_topics().partitions(topic, place.source, is_wanted)

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
                return send_smaller(
                    self._side_topics(),
                    following.topic,
                    message,
                    (away_from_home(headers_for(message, told)) for told in tries),
                    source=history.origin.topic,
                )
            reason = following.reason
        if self._give_up == "stop" and not isinstance(error, DeadLetter):
            raise HandlerFailed(f"{message.place}: {reason}") from error
        topic = self._dead_letter_topic(history.origin.topic)
        self._side_topics()
        assert self._dead_letters is not None
        self._dead_letters.add(topic, message, reason, error, attempts, history)
        return None

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

    def _side_topics(self) -> SideTopics:
        with self._lock:
            if self._topics is None:
                self._topics = SideTopics(
                    self._bootstrap, self._settings, create=self._create, is_wanted=self._is_wanted
                )
                self._dead_letters = DeadLetters(
                    self._bootstrap, self._group, self._settings, dialect=self._dialect, topics=self._topics
                )
            return self._topics

    def close(self) -> None:
        if self._topics is not None:
            self._topics.close()
