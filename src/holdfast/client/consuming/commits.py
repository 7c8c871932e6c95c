"""Committing offsets: what is asked for, what a refusal means, and what is stored beside them.

While the consumer works, commits are sent and answered in the background; one is under way at a time, and what it did
not store is in the next one. When partitions are let go of, and at the end, the commit is waited for: it is repeated
until it is stored, until the broker says that it is not this member's to make any more, or until the time is up. The
last of these is an error at the end: whoever stopped the consumer should know that work will be done twice (HF309).

A member stores a `Note` beside an offset, in its metadata: in one record with it, and fenced like it. Fields come
first, each `name` or `name:value`, with a semicolon behind it; what follows them is what deduplication remembers (see
`dedupe`). An offset that somebody else has committed has no such fields, and is taken as it is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.errors import ClientError
from holdfast.client.metrics import UNWATCHED, Tally
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
"""The partitions are not ours to commit any more; the new owner does the work again."""
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


class OffsetsNotCommitted(ClientError):
    """Finished work whose offsets could not be committed: it will be handed out again."""


class Commits:
    def __init__(
        self,
        consumer: Any,
        say: Callable[[str], None],
        note: Callable[[PartitionTracker], str],
        tally: Tally = UNWATCHED,
    ) -> None:
        """`note` gives the metadata of an offset that is to be committed."""
        self._consumer = consumer
        self._say = say
        self._note = note
        self._tally = tally
        self._asked: dict[PartitionKey, tuple[PartitionTracker, int]] = {}
        """The commit under way."""
        self.error: BaseException | None = None
        """Why offsets can never be committed."""

    def commit_soon(self, trackers: Iterable[PartitionTracker]) -> None:
        """Send what there is to commit, unless an earlier commit has not been answered."""
        if self._asked:
            return
        news = [tracker for tracker in trackers if tracker.has_news and not tracker.is_closed]
        if not news:
            return
        self._asked = {(each.topic, each.partition): (each, each.commit_offset) for each in news}
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
        self._tally.add("holdfast_consumer_commits_total")
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
                problem = OffsetsNotCommitted(
                    f"finished work is not committed and will be handed out again: {error.name()}: {error.str()}; "
                    + ", ".join(
                        f"{each.topic}-{each.partition} to {each.commit_offset}, "
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
            self._tally.add("holdfast_consumer_commit_failures_total")
            return error
        self._tally.add("holdfast_consumer_commits_total")
        by_key = {(each.topic, each.partition): each for each in answers or ()}
        problem: KafkaError | None = None
        for tracker in news:
            answer = by_key.get((tracker.topic, tracker.partition))
            if answer is not None and answer.error is not None:
                problem = answer.error
            else:
                tracker.committed = tracker.commit_offset
        return problem

    def _asking(self, tracker: PartitionTracker) -> TopicPartition:
        note = self._note(tracker)
        if note:
            return TopicPartition(tracker.topic, tracker.partition, tracker.commit_offset, metadata=note)
        return TopicPartition(tracker.topic, tracker.partition, tracker.commit_offset)

    def _refused(self, error: KafkaError) -> None:
        self._tally.add("holdfast_consumer_commit_failures_total")
        kind = refusal(error)
        if kind is Refusal.HOPELESS:
            self.error = self.error or KafkaException(error)
        elif kind is Refusal.FENCED:
            self._say(f"these partitions are not ours to commit any more: {error.str()}")
        else:
            self._say(f"offsets were not committed, and will be again: {error.str()}")


REMEMBERED: Final = "hfk"
TOPIC_ID: Final = "hft"
CHANGELOG: Final = "hfc"
_FIELD = re.compile(rf"({REMEMBERED}|{TOPIC_ID}|{CHANGELOG})(?::([^;]*))?;")


class Note(NamedTuple):
    is_remembered: bool = False
    """Whether the group's mark for the partition is written; see `marks`."""
    topic_id: str = ""
    """The id of the topic that the committed offset belongs to: another topic of the same name begins anew. Empty where
    it is not known."""
    changelog: str = ""
    """Which state belongs to the committed offset; see `changelog`. Empty for a consumer without state."""
    seen: str = ""

    def encode(self) -> str:
        return (
            (f"{REMEMBERED};" if self.is_remembered else "")
            + (f"{TOPIC_ID}:{self.topic_id};" if self.topic_id else "")
            + (f"{CHANGELOG}:{self.changelog};" if self.changelog else "")
            + self.seen
        )

    @classmethod
    def decode(cls, metadata: str | None) -> Note:
        rest = metadata or ""
        fields: dict[str, str] = {}
        while (found := _FIELD.match(rest)) is not None:
            fields[found[1]] = found[2] or ""
            rest = rest[found.end() :]
        return cls(REMEMBERED in fields, fields.get(TOPIC_ID, ""), fields.get(CHANGELOG, ""), rest)
