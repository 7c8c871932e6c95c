"""Committing positions: what is asked for, and what a refusal means.

While the consumer works, commits are sent and answered in the background; one is under way at a time, and what it did
not store is in the next one. When partitions are let go of, and at the end, the commit is waited for: it is repeated
until it is stored, until the broker says that it is not this member's to make any more, or until the time is up. The
last of these is an error at the end: whoever stopped the consumer should know that work will be done twice (HF309).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.errors import ClientError
from holdfast.client.spool.format import PartitionKey

AGAIN_SECONDS: Final = 0.2

FENCED: Final = frozenset(
    (
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError._ASSIGNMENT_LOST,
        KafkaError._FENCED,
    )
)
"""The positions are not ours to move any more; the work will be done again by the new owner."""
HOPELESS: Final = frozenset(
    (
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.OFFSET_METADATA_TOO_LARGE,
        KafkaError.INVALID_GROUP_ID,
        KafkaError.INVALID_COMMIT_OFFSET_SIZE,
        KafkaError._INVALID_ARG,
        KafkaError._FATAL,
    )
)
"""No repetition helps: somebody has to look at it."""


class Refusal(Enum):
    """What to make of a commit that was not stored."""

    FENCED = auto()
    HOPELESS = auto()
    AGAIN = auto()


def refusal(error: KafkaError) -> Refusal:
    if error.code() in FENCED:
        return Refusal.FENCED
    return Refusal.HOPELESS if error.fatal() or error.code() in HOPELESS else Refusal.AGAIN


class PositionsNotCommitted(ClientError):
    """Finished work whose positions could not be stored: it will be handed out again."""


class Positions:
    def __init__(
        self, consumer: Any, say: Callable[[str], None], note: Callable[[PartitionTracker], str]
    ) -> None:
        """`note` gives what is stored beside a position, as of that position."""
        self._consumer = consumer
        self._say = say
        self._note = note
        self._asked: dict[PartitionKey, tuple[PartitionTracker, int]] = {}
        """The commit under way."""
        self.error: BaseException | None = None
        """Why positions can never be committed."""

    def commit_soon(self, trackers: Iterable[PartitionTracker]) -> None:
        """Send what there is to commit, unless an earlier commit has not been answered."""
        if self._asked:
            return
        news = [tracker for tracker in trackers if tracker.has_news and not tracker.is_closed]
        if not news:
            return
        self._asked = {(each.topic, each.partition): (each, each.position) for each in news}
        try:
            self._consumer.commit(offsets=[self._asking(each) for each in news], asynchronous=True)
        except KafkaException as refused:
            self._asked = {}
            self._refused(refused.args[0])

    def answered(self, error: KafkaError | None, stored: list[TopicPartition]) -> None:
        """The answer to a commit that was not waited for."""
        asked, self._asked = self._asked, {}
        if error is not None:
            self._refused(error)
            return
        for each in stored:
            tracker, position = asked.get((each.topic, each.partition), (None, -1))
            if each.error is not None:
                self._refused(each.error)
            elif tracker is not None and each.offset == position:
                tracker.committed = position

    def commit_now(self, trackers: Iterable[PartitionTracker], seconds: float, *, is_last: bool) -> None:
        """Commit and wait until it is stored, not ours any more, or too late, which at the end is an error."""
        going = list(trackers)
        deadline = time.monotonic() + seconds
        while news := [tracker for tracker in going if tracker.has_news]:
            error = self._try(news)
            if error is None:
                continue
            kind = refusal(error)
            if kind is Refusal.FENCED:
                self._refused(error)
                return
            if kind is Refusal.HOPELESS or time.monotonic() >= deadline:
                problem = PositionsNotCommitted(
                    f"finished work is not committed and will be handed out again: {error.name()}: {error.str()}; "
                    + ", ".join(
                        f"{each.topic}-{each.partition} to {each.position}, "
                        f"committed {each.committed if each.committed >= 0 else 'nothing'}"
                        for each in news
                    )
                )
                if is_last or kind is Refusal.HOPELESS:
                    raise problem
                self._say(str(problem))
                return
            time.sleep(AGAIN_SECONDS)

    def _try(self, news: list[PartitionTracker]) -> KafkaError | None:
        """One commit; returns why not all of it was stored."""
        try:
            answers = self._consumer.commit(offsets=[self._asking(each) for each in news], asynchronous=False)
        except KafkaException as refused:
            error: KafkaError = refused.args[0]
            return error
        by_key = {(each.topic, each.partition): each for each in answers or ()}
        problem: KafkaError | None = None
        for tracker in news:
            answer = by_key.get((tracker.topic, tracker.partition))
            if answer is not None and answer.error is not None:
                problem = answer.error
            else:
                tracker.committed = tracker.position
        return problem

    def _asking(self, tracker: PartitionTracker) -> TopicPartition:
        note = self._note(tracker)
        if note:
            return TopicPartition(tracker.topic, tracker.partition, tracker.position, metadata=note)
        return TopicPartition(tracker.topic, tracker.partition, tracker.position)

    def _refused(self, error: KafkaError) -> None:
        kind = refusal(error)
        if kind is Refusal.HOPELESS:
            self.error = self.error or KafkaException(error)
        elif kind is Refusal.FENCED:
            self._say(f"positions are not ours to commit any more: {error.str()}")
        else:
            self._say(f"positions were not committed, and will be again: {error.str()}")
