"""The poll loop of a consumer: the one thread that talks to the broker.

It never stops polling while it is a member, so that long work does not cost membership (C8): partitions with too much
under way are paused, and resumed when there is room. Finished work comes back to this thread, which alone moves
positions and commits them. A position moves for one reason only: every message before it was handled, or set aside in
the dead-letter topic. Cancellation, shutdown, an exception and the loss of a partition move nothing.

When partitions are taken away, what is under way gets `drain_seconds` to finish; then the front of finished work is
committed and the partitions are let go of. What finishes later does not count. When partitions were lost, nothing is
committed: they may have a new owner already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from holdfast.client.consuming.assignment import Assignment, LostPositions, messages
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.consuming.workers import Work, Workers
from holdfast.client.errors import ClientError
from holdfast.client.messages import from_raw
from holdfast.client.spool.format import PartitionKey

POLL_SECONDS: Final = 0.05
BATCH_MESSAGES: Final = 500
FENCED: Final = frozenset(
    (
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError._NO_OFFSET,
        KafkaError._STATE,
        KafkaError._ASSIGNMENT_LOST,
    )
)
"""A commit refused with one of these is not ours to make any more; the work will be done again by the new owner."""


class Loop:
    def __init__(
        self,
        consumer: Any,
        topics: list[str],
        workers: Workers,
        *,
        in_flight_max: int,
        commit_seconds: float,
        drain_seconds: float,
        lost_positions: LostPositions,
        is_incremental: bool,
        say: Callable[[str], None],
    ) -> None:
        self._consumer = consumer
        self._topics = topics
        self._workers = workers
        self._in_flight_max = in_flight_max
        self._commit_seconds = commit_seconds
        self._drain_seconds = drain_seconds
        self._assignment = Assignment(consumer, lost_positions, is_incremental=is_incremental, say=say)
        self._say = say
        self._trackers: dict[PartitionKey, PartitionTracker] = {}
        self._paused: set[PartitionKey] = set()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self.handled = 0

    def stop(self) -> None:
        """Finish or hand back what is under way, commit, leave the group. Safe from signals and other threads."""
        self._stopping.set()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def run(self) -> None:
        """Consume until `stop` is called or something cannot go on, which is raised."""
        self._consumer.subscribe(
            self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        commit_due = time.monotonic() + self._commit_seconds
        try:
            while not self._stopping.is_set() and self._error is None:
                for raw in messages(self._consumer, POLL_SECONDS, BATCH_MESSAGES):
                    self._received(raw)
                self._take_finished()
                self._resume()
                if time.monotonic() >= commit_due:
                    self._commit(self._trackers.values())
                    commit_due = time.monotonic() + self._commit_seconds
        finally:
            self._end()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        """Leaving commits what is finished, through the revocation of everything that is assigned."""
        self._stopping.set()
        self._drain(self._trackers.values())
        self._commit(self._trackers.values())
        for tracker in self._trackers.values():
            tracker.close()
        self._workers.close()
        self._consumer.close()

    # Messages

    def _received(self, raw: Any) -> None:
        error = raw.error()
        if error is not None:
            self._error = self._error or self._assignment.judge(raw, error)
            return
        message = from_raw(raw)
        tracker = self._trackers.get((message.topic, message.partition))
        if tracker is None or tracker.is_closed or message.offset < tracker.next_offset:
            return
        tracker.begin(message.offset)
        self._workers.give(Work(message, tracker))
        if len(tracker) >= self._in_flight_max:
            self._pause(message.topic, message.partition)

    def _take_finished(self) -> None:
        for work, is_done, error in self._workers.take_finished():
            if error is not None:
                self._error = self._error or error
            if not is_done:
                work.tracker.hand_back(work.message.offset)
            elif work.tracker.finish(work.message.offset):
                self.handled += 1

    # Bounding what is under way

    def _pause(self, topic: str, partition: int) -> None:
        if (topic, partition) not in self._paused:
            self._paused.add((topic, partition))
            self._consumer.pause([TopicPartition(topic, partition)])

    def _resume(self) -> None:
        room = self._in_flight_max // 2
        free = [key for key in self._paused if len(self._trackers[key]) <= room]
        if free:
            self._paused.difference_update(free)
            self._consumer.resume([TopicPartition(*key) for key in free])

    # Positions

    def _commit(self, trackers: Iterable[PartitionTracker]) -> None:
        """Commit, and wait for the answer: a position that is not known to be stored counts as not committed."""
        news = [tracker for tracker in trackers if tracker.position != tracker.committed]
        if not news:
            return
        offsets = [TopicPartition(each.topic, each.partition, each.position) for each in news]
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as refused:
            error = refused.args[0]
            if error.code() not in FENCED and not error.retriable():
                raise
            self._say(f"positions were not committed, and will be again: {error.str()}")
            return
        for tracker, offset in zip(news, offsets, strict=True):
            tracker.committed = offset.offset

    # Rebalances

    def _assigned(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        try:
            starts = self._assignment.begin(partitions)
        except (KafkaException, ClientError) as error:
            self._error = error
            return
        for key, offset in starts.items():
            self._trackers[key] = PartitionTracker(*key, max(offset, 0))

    def _revoked(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        going = self._going(partitions)
        self._drain(going)
        self._commit(going)
        self._forget(going)
        self._assignment.end(partitions)

    def _lost(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        self._forget(self._going(partitions))

    def _going(self, partitions: list[TopicPartition]) -> list[PartitionTracker]:
        keys = [(each.topic, each.partition) for each in partitions]
        return [self._trackers[key] for key in keys if key in self._trackers]

    def _drain(self, trackers: Iterable[PartitionTracker]) -> None:
        """Let what was begun finish, as long as there is time; what was not begun yet is handed back."""
        going = list(trackers)
        for tracker in going:
            tracker.is_draining = True
        deadline = time.monotonic() + self._drain_seconds
        self._take_finished()
        while any(tracker.is_busy for tracker in going):
            left = deadline - time.monotonic()
            if left <= 0:
                self._say(
                    f"work of {[t for t in going if t.is_busy]} did not finish in time; it will be done again"
                )
                return
            self._workers.news.wait(min(left, 1.0))
            self._take_finished()

    def _forget(self, trackers: Iterable[PartitionTracker]) -> None:
        for tracker in trackers:
            tracker.close()
            key = (tracker.topic, tracker.partition)
            self._trackers.pop(key, None)
            self._paused.discard(key)
