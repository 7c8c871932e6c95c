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

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.consuming.workers import Work, Workers
from holdfast.client.errors import ClientError
from holdfast.client.messages import from_raw
from holdfast.client.spool.format import PartitionKey

POLL_SECONDS: Final = 0.05
BATCH_MESSAGES: Final = 500
ANSWER_SECONDS: Final = 30.0
"""How long the broker has to say where a group is."""
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


WAY_OUT: Final = (
    "Decide where to go on: lost_positions='earliest' or 'latest', or `holdfast groups reset-offsets`."
)


class PositionLost(ClientError):
    """The position of a group is no longer in the log; going on would skip or repeat, which is not ours to decide."""


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
        lost_positions: str,
        is_incremental: bool,
        say: Callable[[str], None],
    ) -> None:
        self._consumer = consumer
        self._topics = topics
        self._workers = workers
        self._in_flight_max = in_flight_max
        self._commit_seconds = commit_seconds
        self._drain_seconds = drain_seconds
        self._lost_positions = lost_positions
        self._is_incremental = is_incremental
        """Whether rebalances take single partitions: cooperative assignors, and the new group protocol."""
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
                for raw in self._consumer.consume(BATCH_MESSAGES, POLL_SECONDS):
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
            self._refused(raw, error)
            return
        message = from_raw(raw)
        tracker = self._trackers.get((message.topic, message.partition))
        if tracker is None or tracker.is_closed or message.offset < tracker.next_offset:
            return
        tracker.begin(message.offset)
        self._workers.give(Work(message, tracker))
        if len(tracker) >= self._in_flight_max:
            self._pause(message.topic, message.partition)

    def _refused(self, raw: Any, error: KafkaError) -> None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._error = PositionLost(
                f"{raw.topic()}-{raw.partition()}: the position {raw.offset()} of this group is not in the log any "
                f"more ({error.str()}). Messages may have expired before they were handled. {WAY_OUT}"
            )
        elif error.fatal() or error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            self._error = KafkaException(error)
        elif not error.retriable() and error.code() not in (
            KafkaError._PARTITION_EOF,
            KafkaError._ALL_BROKERS_DOWN,
        ):
            self._say(f"{error.name()}: {error.str()}")

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
            starts = self._starts(partitions)
        except (KafkaException, ClientError) as error:
            self._error = error
            return
        for start in starts:
            self._trackers[start.topic, start.partition] = PartitionTracker(
                start.topic, start.partition, max(start.offset, 0)
            )
        if self._is_incremental:
            self._consumer.incremental_assign(starts)
        else:
            self._consumer.assign(starts)

    def _starts(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Where to begin: the committed position; the beginning where there is none, of new partitions too (HF304)."""
        starts = []
        for committed in self._consumer.committed(partitions, timeout=ANSWER_SECONDS):
            if committed.error is not None:
                raise KafkaException(committed.error)
            offset = committed.offset
            if offset >= 0:
                offset = self._checked(committed)
            starts.append(
                TopicPartition(
                    committed.topic, committed.partition, offset if offset >= 0 else OFFSET_BEGINNING
                )
            )
        return starts

    def _checked(self, committed: TopicPartition) -> int:
        low, high = self._consumer.get_watermark_offsets(committed, timeout=ANSWER_SECONDS)
        if low <= committed.offset <= high:
            return int(committed.offset)
        if self._lost_positions in ("earliest", "latest"):
            self._say(
                f"{committed.topic}-{committed.partition}: position {committed.offset} is outside the log "
                f"({low} to {high}); going on at the {self._lost_positions}"
            )
            return int(low if self._lost_positions == "earliest" else high)
        raise PositionLost(
            f"{committed.topic}-{committed.partition}: this group's position {committed.offset} is outside the log, "
            f"which holds {low} to {high}: {max(0, low - committed.offset)} messages expired before they were handled. "
            f"{WAY_OUT}"
        )

    def _revoked(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        going = self._going(partitions)
        self._drain(going)
        self._commit(going)
        self._forget(going)
        if self._is_incremental:
            self._consumer.incremental_unassign(partitions)
        else:
            self._consumer.unassign()

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
