"""A consumer that commits only finished work.

    def handle(message: Message) -> None:
        send_mail(json.loads(message.value))

    Consumer("localhost:9092", group="mailer", topics=["orders"], workers=8).run(handle)

A handler that returns has handled its message. One that raises is asked again, as the `RetryPolicy` says, and when it
is given up on the message goes to the dead-letter topic, or the consumer stops. Positions follow finished work and
nothing else, per partition, however many workers there are. SIGTERM and SIGINT end it cleanly: what is under way
finishes or is handed back, positions are committed, the group is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

from confluent_kafka import Consumer as RawConsumer

from holdfast.client.consuming.assignment import LostPositions
from holdfast.client.consuming.loop import Loop
from holdfast.client.consuming.workers import Order, Work, Workers
from holdfast.client.dead_letters import DeadLetters
from holdfast.client.errors import ClientError
from holdfast.client.messages import DeadLetter, Message, Retry
from holdfast.client.retries import Again, RetryPolicy
from holdfast.client.settings import consumer_settings, is_incremental
from holdfast.client.signals import say, stopping_on_signals
from holdfast.errors import UsageError

Handler: TypeAlias = Callable[[Message], Any]
STOP_LOOK_SECONDS: Final = 0.2


class HandlerFailed(ClientError):
    """A message could not be handled, and the policy says to stop. Its position was not moved."""


class Consumer:
    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        topics: Sequence[str],
        workers: int = 1,
        order: Order = "partition",
        retry: RetryPolicy | None = None,
        dead_letter_topic: Callable[[str], str] = lambda topic: f"{topic}-dlt",
        lost_positions: LostPositions = "stop",
        in_flight_max: int = 1000,
        commit_seconds: float = 1.0,
        drain_seconds: float = 30.0,
        config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
    ) -> None:
        """`in_flight_max` bounds the messages of one partition that are under way; `drain_seconds` how long they may
        take to finish when the partition is taken away or the consumer stops."""
        if workers < 1:
            raise UsageError(f"workers={workers}: at least one is needed")
        if not topics:
            raise UsageError("a consumer needs a topic")
        self._bootstrap = bootstrap
        self._group = group
        self._topics = list(topics)
        self._worker_count = workers
        self._order = order
        self._retry = retry or RetryPolicy()
        self._dead_letter_topic = dead_letter_topic
        self._settings = consumer_settings(bootstrap, group, dict(config or {}), unsafe)
        self._loop_settings: dict[str, Any] = {
            "in_flight_max": in_flight_max,
            "commit_seconds": commit_seconds,
            "drain_seconds": drain_seconds,
            "lost_positions": lost_positions,
            "is_incremental": is_incremental(self._settings),
        }
        self._loop: Loop | None = None
        self._dead_letters: DeadLetters | None = None

    @property
    def handled(self) -> int:
        """Messages handled or set aside so far."""
        return self._loop.handled if self._loop is not None else 0

    def stop(self) -> None:
        """End `run` cleanly; safe from any thread and from signal handlers."""
        if self._loop is not None:
            self._loop.stop()

    def run(self, handler: Handler) -> None:
        """Handle messages until stopped. Raises when a message cannot be handled and may not be set aside."""
        workers = Workers(self._worker_count, self._order, lambda work: self._carry_out(handler, work))
        loop = self._loop = Loop(
            RawConsumer(self._settings), self._topics, workers, say=say, **self._loop_settings
        )
        with stopping_on_signals(loop.stop):
            try:
                loop.run()
            finally:
                if self._dead_letters is not None:
                    self._dead_letters.close()

    # In a worker

    def _carry_out(self, handler: Handler, work: Work) -> bool:
        """Handle one message to its end: handled, or set aside. False when it is not wanted any more."""
        message = work.message
        began = time.monotonic()
        attempt = 0
        while True:
            attempt += 1
            try:
                outcome = handler(message)
                if isinstance(outcome, Retry | DeadLetter):
                    raise outcome
            except Exception as error:
                verdict = self._retry.judge(error, attempt, time.monotonic() - began)
                if isinstance(verdict, Again):
                    if not self._wait(verdict.seconds, work):
                        return False
                    continue
                if self._retry.give_up == "stop" and not isinstance(error, DeadLetter):
                    raise HandlerFailed(f"{message.place}: {verdict.reason}") from error
                self._set_aside(message, verdict.reason, error, attempt)
            return True

    def _wait(self, seconds: float, work: Work) -> bool:
        """Wait for the next attempt, unless nobody wants it any more."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if work.tracker.is_draining or work.tracker.is_closed:
                return False
            time.sleep(min(left, STOP_LOOK_SECONDS))
        return not work.tracker.is_closed

    _dead_letters_lock = threading.Lock()

    def _set_aside(self, message: Message, reason: str, error: BaseException, attempts: int) -> None:
        """Into the dead-letter topic; returns when it is there, so that the position may move."""
        with self._dead_letters_lock:
            if self._dead_letters is None:
                self._dead_letters = DeadLetters(self._bootstrap, self._group, self._settings)
        self._dead_letters.add(self._dead_letter_topic(message.topic), message, reason, error, attempts)
