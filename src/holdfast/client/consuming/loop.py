"""The poll loop of a consumer: the one thread that talks to the broker.

It never stops polling while it is a member, so that long work does not cost membership (C8): partitions with too much
under way are paused, and resumed when there is room. Finished work comes back to this thread, which alone moves offsets
and commits them. A committed offset moves for one reason only: every message before it was handled, set aside in the
dead-letter topic, or a duplicate of one that was. Cancellation, shutdown, an exception and the loss of a partition move
nothing.

When partitions are taken away, what workers are at gets `drain_seconds` to finish; then the front of finished work is
committed and the partitions are let go of. What finishes later does not count. When partitions were lost, nothing is
committed: they may have a new owner already.

Messages are read in batches. Callbacks of a rebalance run inside the read, and a batch may hold messages that were read
before a partition was taken over anew; those are dropped, and the partition is read again from its committed offset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Literal

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from holdfast.client.consuming.assignment import Assignment, LostOffsets, Source, Start
from holdfast.client.consuming.commits import Commits
from holdfast.client.consuming.marks import MARKS_TOPIC, GroupMarks
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.consuming.workers import Pool, Reports
from holdfast.client.dedupe import Dedupe, Seen
from holdfast.client.errors import ClientError
from holdfast.client.messages import OFFSET, PARTITION, Fields, Message, all_fields, as_message
from holdfast.client.metrics import UNWATCHED, Tally
from holdfast.client.process import say
from holdfast.client.retries import HeldBack
from holdfast.client.spool.format import PartitionKey

POLL_SECONDS: Final = 0.05
BATCH_MESSAGES: Final = 600
"""Enough to make the hand-over cheap, few enough to stay in the cache until they are handled, and below the 700 new
objects after which Python looks for garbage."""
ROOM_SECONDS: Final = 0.05
"""How long to wait for room before partitions are paused: pausing throws away what was fetched ahead."""
LOOK_SECONDS: Final = 0.005
SPAN_MAX: Final = 100_000
"""Messages of a partition that may be finished behind one that is not: each is remembered."""
_PLACE: Final = itemgetter(1, 0)
"""Partition and topic of a message."""
CLOSE_SECONDS: Final = 1.0
"""How long idle workers have to end."""


@dataclass(frozen=True, slots=True)
class Options:
    """What holds for a member as a whole."""

    lost_offsets: LostOffsets = "stop"
    dedupe: Dedupe | Literal["hf-id"] | None = "hf-id"
    in_flight_max: int = 2000
    """Messages of one partition that are under way."""
    in_flight_bytes_max: int = 64 * 1024 * 1024
    """Bytes of values under way, over all partitions; what one read may bring beyond it is bounded by
    queued.max.messages.kbytes."""
    commit_seconds: float = 1.0
    drain_seconds: float = 20.0
    last_commit_seconds: float = 10.0
    """How long the commit is tried when partitions are let go of, and at the end."""
    marks_topic: str | None = MARKS_TOPIC


class Loop:
    def __init__(
        self,
        make_consumer: Callable[[Callable[..., None]], Any],
        topics: list[str],
        pool_of: Callable[[str], Pool],
        pools: list[Pool],
        reports: Reports,
        options: Options,
        *,
        is_stopping: Callable[[], bool],
        held: Mapping[str, HeldBack],
        marks: GroupMarks | None = None,
        settings: Mapping[str, Any] | None = None,
        sources: Sequence[Source] = (),
        tally: Tally = UNWATCHED,
    ) -> None:
        """`make_consumer` makes one that tells the function it is given of answers to commits; `held` keeps what is
        not due yet, by retry topic."""
        self._topics = topics
        # Of one topic, given by its name, the partition says where a message is, in a quarter of the time.
        self._place_of = PARTITION if len(topics) == 1 and not topics[0].startswith("^") else _PLACE
        self._pool_of = pool_of
        self._pools = pools
        self._reports = reports
        self._options = options
        self._is_stopping = is_stopping
        self._dedupe = Dedupe() if options.dedupe == "hf-id" else options.dedupe
        self._held = held
        self._consumer = make_consumer(lambda error, stored: self._commits.answered(error, stored))
        self._commits = Commits(self._consumer, say, self._note, tally)
        self._marks = marks
        self._assignment = Assignment(
            self._consumer,
            options.lost_offsets,
            marks=marks,
            settings=settings,
            sources=sources,
        )
        self._trackers: dict[PartitionKey, PartitionTracker] = {}
        self._seen: dict[PartitionKey, Seen] = {}
        self._paused: set[PartitionKey] = set()
        self._taken_over: set[PartitionKey] = set()
        """Taken over during the read that is going on."""
        self._at_beginning: set[PartitionKey] = set()
        """Begun at the beginning of the log, which may move until the first message has come."""
        self._has_decided = False
        """Whether there is a start that is not stored: a crash before it is would have it decided on again."""
        self._bytes = 0
        self._error: BaseException | None = None
        self.handled = 0
        self.duplicates = 0

    def run(self) -> None:
        """Consume until told to stop or something cannot go on, which is raised."""
        try:
            self._consumer.subscribe(
                self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
            )
            commit_due = time.monotonic() + self._options.commit_seconds
            while not self._is_stopping() and self._error is None:
                self._read()
                self._take_finished()
                self._give_due()
                self._make_room()
                self._resume()
                if (now := time.monotonic()) >= commit_due or self._has_decided:
                    self._has_decided = False
                    self._look_at_topics()
                    self._commits.commit_soon(self._trackers.values())
                    self._remember(self._trackers.values())
                    commit_due = now + self._options.commit_seconds
                self._error = self._error or self._commits.error
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._end()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        """Finish what is begun, commit what is finished, leave."""
        going = list(self._trackers.values())
        is_drained = False
        try:
            is_drained = self._drain(going)
            self._commits.commit_now(going, self._options.last_commit_seconds, is_last=True)
            self._remember(going)
        except (ClientError, KafkaException) as problem:
            if self._error is None:
                self._error = problem
            else:
                self._error.add_note(str(problem))
        finally:
            for tracker in going:
                tracker.close()
            self._trackers.clear()
            for pool in self._pools:
                pool.close(CLOSE_SECONDS if is_drained else 0.0)
            self._consumer.close()
            self._assignment.close()
            if self._marks is not None:
                self._marks.close()

    # Reading

    def _read(self) -> None:
        first = self._consumer.poll(POLL_SECONDS)
        if first is None:
            return
        # What one poll returns was read after the callbacks it ran; that is not so for a batch.
        self._taken_over.clear()
        room = self._room()
        batch = [first, *self._consumer.consume(room - 1, 0)] if room > 1 else [first]
        if self._taken_over:
            batch = self._without_stale(batch)
        self._received(batch)

    def _without_stale(self, batch: list[Any]) -> list[Any]:
        taken_over = self._taken_over & self._trackers.keys()
        stale = {key for raw in batch if (key := (raw.topic(), raw.partition())) in taken_over}
        if stale:
            self._read_again({key: self._goes_on_at(key) for key in stale})
        return [raw for raw in batch if (raw.topic(), raw.partition()) not in stale]

    def _goes_on_at(self, key: PartitionKey) -> int:
        return OFFSET_BEGINNING if key in self._at_beginning else self._trackers[key].next_offset

    def _read_again(self, starts: Mapping[PartitionKey, int]) -> None:
        others = {key: self._goes_on_at(key) for key in self._trackers if key not in starts}
        for key in starts if self._assignment.is_incremental else (*starts, *others):
            self._forget_held(key)
        self._assignment.restart(starts, others)

    def _received(self, batch: list[Any]) -> None:
        """Hand messages over, those of one partition that follow each other together."""
        if [raw for raw in batch if raw.error() is not None]:
            for raw in batch:
                error = raw.error()
                if error is None:
                    self._give(all_fields([raw]), len(raw))
                else:
                    self._failed(raw, error)
            return
        size_each = sum(map(len, batch)) // max(1, len(batch))
        for _, run in groupby(all_fields(batch), self._place_of):
            together = list(run)
            self._give(together, size_each * len(together))

    def _give(self, run: Sequence[Fields], size: int) -> None:
        if not run:
            return
        key = run[0][:2]
        tracker = self._trackers.get(key)
        if tracker is None or tracker.is_draining:
            return
        seen = self._seen.get(key)
        if OFFSET(run[0]) < tracker.next_offset:
            run = self._from_position(run, tracker, seen)
        if not run:
            return
        self._at_beginning.discard(key)
        held = self._held.get(tracker.topic)
        if held is not None:
            for message in map(as_message, run):
                self._give_when_due(message, tracker, held)
            return
        tracker.begin_all(list(map(OFFSET, run)))
        if seen is not None:
            fresh = seen.fresh(run)
            if len(fresh) < len(run):
                self._pass_over(run, fresh, tracker)
                run = fresh
        if run:
            self._hand_over(run, tracker, size)

    def _hand_over(self, run: Sequence[Fields], tracker: PartitionTracker, size: int) -> None:
        size_bytes = size // len(run) * len(run)
        self._bytes += size_bytes
        self._pool_of(tracker.topic).give(run, tracker, size_bytes)

    # Retry topics

    def _give_when_due(self, message: Message, tracker: PartitionTracker, held: HeldBack) -> None:
        """A message that must wait is not begun, so no committed offset passes it; its partition is paused
        meanwhile."""
        if held.hold(message, time.time_ns() // 1_000_000):
            self._pause([(tracker.topic, tracker.partition)])
            return
        self._give_retried(message, tracker, held)

    def _give_retried(self, message: Message, tracker: PartitionTracker, held: HeldBack) -> None:
        tracker.begin(message.offset)
        if held.is_foreign(message):
            tracker.finish(message.offset)
        else:
            self._hand_over([message], tracker, len(message.value or b""))

    def _give_due(self) -> None:
        for held in {id(each): each for each in self._held.values()}.values():
            for message in held.take_due(time.time_ns() // 1_000_000):
                tracker = self._trackers.get((message.topic, message.partition))
                if tracker is None or tracker.is_draining or message.offset < tracker.next_offset:
                    continue
                self._give_retried(message, tracker, held)

    def _is_held(self, key: PartitionKey) -> bool:
        held = self._held.get(key[0])
        return held is not None and key in held

    def _forget_held(self, key: PartitionKey) -> None:
        held = self._held.get(key[0])
        if held is not None:
            held.forget(key)

    @staticmethod
    def _from_position(
        run: Sequence[Fields], tracker: PartitionTracker, seen: Seen | None
    ) -> Sequence[Fields]:
        """Without what was read again only to learn from it."""
        position = tracker.next_offset
        if seen is not None:
            for message in map(as_message, run):
                if message.offset < position:
                    seen.learn(message)
        return [message for message in run if OFFSET(message) >= position]

    def _pass_over(self, run: Sequence[Fields], fresh: Sequence[Fields], tracker: PartitionTracker) -> None:
        """Duplicates are finished by being one; the committed offset waits for what is before them."""
        new = set(map(OFFSET, fresh))
        known = [offset for offset in map(OFFSET, run) if offset not in new]
        self.duplicates += len(known)
        tracker.finish_all(known)

    def _failed(self, raw: Any, error: KafkaError) -> None:
        key = (raw.topic(), raw.partition())
        tracker = self._trackers.get(key)
        if error.code() == KafkaError._PARTITION_EOF:
            if tracker is not None and not tracker.is_draining and not self._is_held(key):
                tracker.passed(raw.offset())
                self._at_beginning.discard(key)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and tracker is not None:
            self._out_of_range(key, tracker, raw.offset())
        else:
            self._error = self._error or self._assignment.judge(raw, error)

    def _out_of_range(self, key: PartitionKey, tracker: PartitionTracker, offset: int) -> None:
        if key in self._at_beginning or offset < tracker.next_offset:
            # Retention took what was only to be read again, or the beginning has moved meanwhile.
            self._read_again({key: self._goes_on_at(key)})
            return
        self._go_elsewhere(key, lambda: self._assignment.elsewhere(TopicPartition(*key, offset)))

    def _look_at_topics(self) -> None:
        """Notice, a moment later, that a topic was recreated: its messages have begun anew."""
        going = {key: tracker for key, tracker in self._trackers.items() if not tracker.is_draining}
        for key, new in self._assignment.recreated(going, waits=False).items():
            self._go_elsewhere(key, partial(self._assignment.start_of_recreated, key, new))

    def _go_elsewhere(self, key: PartitionKey, decide: Callable[[], int]) -> None:
        try:
            start = decide()
        except (ClientError, KafkaException) as error:
            self._error = self._error or error
            return
        self._trackers[key].close()
        self._begin(key, Start(start, is_stored=False))
        self._read_again({key: start})

    def numbers(self) -> dict[str, float]:
        """For `metrics`."""
        trackers = list(self._trackers.values())
        return {
            "holdfast_consumer_handled_total": self.handled,
            "holdfast_consumer_duplicates_total": self.duplicates,
            "holdfast_consumer_partitions": len(trackers),
            "holdfast_consumer_in_flight": sum(map(len, trackers)),
        }

    # Finished work

    def _take_finished(self) -> None:
        for pool in self._pools:
            for run in pool.at_work():
                self.handled += run.count()
        for run in self._reports.take():
            self.handled += run.count()
            self._bytes -= run.size_bytes
            if run.error is not None:
                self._error = self._error or run.error

    def _note(self, tracker: PartitionTracker) -> str:
        key = (tracker.topic, tracker.partition)
        seen = self._seen.get(key)
        return self._assignment.note(key, seen=seen.note(tracker.commit_offset) if seen is not None else "")

    def _remember(self, trackers: Iterable[PartitionTracker]) -> None:
        """That this group has committed offsets: those that are stored."""
        if self._marks is not None:
            self._marks.remember((each.topic, each.partition) for each in trackers if each.committed >= 0)

    # Bounding what is under way

    def _room(self) -> int:
        """How many messages the next read may bring: whichever partition they are of, none has too many."""
        fullest = max((len(t) for key, t in self._trackers.items() if key not in self._paused), default=0)
        return max(1, min(BATCH_MESSAGES, self._options.in_flight_max - fullest))

    def _full(self, share: float) -> list[PartitionKey]:
        """Partitions of ours that have more under way than this share of what they may."""
        if self._bytes >= self._options.in_flight_bytes_max * share:
            return [key for key, tracker in self._trackers.items() if len(tracker)]
        most, span = self._options.in_flight_max * share, SPAN_MAX * share
        return [
            key for key, tracker in self._trackers.items() if len(tracker) >= most or tracker.span >= span
        ]

    def _make_room(self) -> None:
        full = [key for key in self._full(1.0) if key not in self._paused]
        if not full:
            return
        deadline = time.monotonic() + ROOM_SECONDS
        while full and time.monotonic() < deadline:
            self._reports.wait(LOOK_SECONDS)
            self._take_finished()
            full = [key for key in self._full(0.75) if key not in self._paused]
        self._pause(full)

    def _pause(self, keys: Iterable[PartitionKey]) -> None:
        new = [key for key in keys if key not in self._paused]
        if new:
            self._paused.update(new)
            self._consumer.pause([TopicPartition(*key) for key in new])

    def _resume(self) -> None:
        if not self._paused:
            return
        full = self._full(0.5)
        free = [key for key in self._paused if key not in full and not self._is_held(key)]
        if free:
            self._paused.difference_update(free)
            self._consumer.resume([TopicPartition(*key) for key in free])

    # Rebalances

    def _assigned(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        lookback = self._dedupe.lookback if self._dedupe is not None else 0
        try:
            starts = self._assignment.take_over(partitions, lookback)
        except (KafkaException, ClientError) as error:
            self._error = self._error or error
            return
        for key, start in starts.items():
            self._taken_over.add(key)
            self._begin(key, start)
        self._remember(self._trackers[key] for key in starts)

    def _begin(self, key: PartitionKey, start: Start) -> None:
        position = start.offset
        self._trackers[key] = PartitionTracker(*key, position, is_stored=start.is_stored)
        self._has_decided |= position >= 0 and not start.is_stored
        if position < 0:
            self._at_beginning.add(key)
        else:
            self._at_beginning.discard(key)
        if self._dedupe is not None and key[0] not in self._held:
            self._seen[key] = self._dedupe.start(start.note, position)

    def _revoked(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        going = self._going(partitions)
        try:
            self._drain(going)
            self._commits.commit_now(going, self._options.last_commit_seconds, is_last=False)
            self._remember(going)
        except ClientError as error:
            self._error = self._error or error
        finally:
            self._forget(going)
            self._assignment.end(partitions)

    def _lost(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        going = self._going(partitions)
        if going:
            say(f"{', '.join(map(repr, going))} went to another member; what is under way does not count")
        self._forget(going)

    def _going(self, partitions: list[TopicPartition]) -> list[PartitionTracker]:
        keys = [(each.topic, each.partition) for each in partitions]
        return [self._trackers[key] for key in keys if key in self._trackers]

    def _drain(self, trackers: Iterable[PartitionTracker]) -> bool:
        """Let what workers are at finish, as long as there is time; what was not begun yet is handed back."""
        going = set(trackers)
        for tracker in going:
            tracker.is_draining = True
        deadline = time.monotonic() + self._options.drain_seconds
        while busy := {run.tracker for pool in self._pools for run in pool.at_work()} & going:
            left = deadline - time.monotonic()
            if left <= 0:
                say(f"work of {sorted(map(repr, busy))} did not finish in time; it will be done again")
                break
            self._reports.wait(min(left, LOOK_SECONDS))
            self._take_finished()
        self._take_finished()
        return not busy

    def _forget(self, trackers: Iterable[PartitionTracker]) -> None:
        for tracker in trackers:
            tracker.close()
            key = (tracker.topic, tracker.partition)
            self._trackers.pop(key, None)
            self._seen.pop(key, None)
            self._at_beginning.discard(key)
            self._forget_held(key)
            if key in self._paused:
                # The client would remember it if the partition came back.
                self._paused.discard(key)
                self._consumer.resume([TopicPartition(*key)])
