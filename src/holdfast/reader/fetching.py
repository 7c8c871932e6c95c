"""Reading ranges: which broker is asked for what, what its answers mean, and when to give up.

At any time at most one fetch is under way to each broker, for all ranges it leads. When an answer has come, the next
fetch leaves before the answer is decoded, so the broker and the network work while we do.

The rules:

- Topics are named by id. An answer that the id is unknown is checked against the topic's name: another id there means
  the topic was recreated, none that it was deleted. Both must show several times, since brokers learn of topics one
  after another.
- A range ends at its end, whatever lies before it. A log whose last offsets before the end are in no batch (all were
  compacted away) answers with nothing although it reaches further; the range that stands first in a request gets at
  least one batch if there is any, so nothing several times in that place means that nothing is there. Not so in remote
  storage: a read of it that outlasts the fetch is answered with nothing as well, so what the leader no longer has
  itself is asked for until it comes, or until time is over. After each such answer a fetch may wait longer.
- Every step forward of any range renews the time a range has. A range that may not get on (the log or its stable part
  ends before the range does) raises `EndNotReached` after `default.api.timeout.ms`, a broker that does not answer
  raises `Unreachable`.
- A broker that asks for time (throttling) gets it.
- When another epoch leads, the epoch of the last batch read is checked in the new leader's log: if it ends before our
  position there, records we have read are gone, and the range raises `OffsetGone`.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.admin.connection import Connection
from holdfast.admin.errors import ClusterError, NotAuthorised, Refused, Unreachable
from holdfast.errors import PeerError
from holdfast.reader import fetch_messages
from holdfast.reader.arrow import Reading, Survey, decode, survey
from holdfast.reader.errors import CorruptBatch, EndNotReached, OffsetGone, TopicMissing, TopicRecreated
from holdfast.reader.model import Isolation, PartitionRange, RangeReport, TopicPartition
from holdfast.wire import error_table

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.reader.cluster import Cluster

WAIT_MS: Final = 100
"""How long a broker may hold a fetch for which it has nothing."""
WAIT_MS_MAX: Final = 5_000
"""How long it may where it has answered with nothing although there should be something."""
CONFIRMATIONS: Final = 3
"""How often something must be seen that a broker may say in passing."""
FETCH_BYTES_MIN: Final = 64 << 10
FETCH_BYTES_MAX: Final = 1 << 30
OFFSET_BYTES_GUESS: Final = 1024
"""What one offset takes, before anything is known of a range."""

FORGIVEN_S_MIN: Final = 0.1

ELSEWHERE: Final = frozenset(
    {
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.unknown_topic_id,
        ErrorCode.inconsistent_topic_id,
        ErrorCode.kafka_storage_error,
        ErrorCode.replica_not_available,
    }
)
"""Answers that another broker, or better knowledge of who leads, may change, whatever the table of errors says."""


@dataclass
class _Range:
    """One range while it is read."""

    wanted: PartitionRange
    report: RangeReport
    position: int
    """Where the next fetch begins; the report is behind while batches are decoded."""
    deadline_s: float
    last_epoch: int
    """The leader epoch of the last batch read."""
    asked_epoch: int = -1
    """The leader epoch of the last fetch; -1 before the first."""
    bytes_per_offset: float = OFFSET_BYTES_GUESS
    batch_bytes: int = 0
    """The size of a batch that did not fit the last answer."""
    empty_answers: int = 0
    """How often in a row, standing first, it was answered with nothing although the log reaches its end."""
    wait_ms: int = WAIT_MS
    """How long a fetch may be held for this range."""
    local_start: int = 0
    """Offsets below this are in remote storage, as its leader last said."""
    contradictions: int = 0
    """How often in a row the topic's name had no or another id."""
    needs_leader: bool = False
    problem: ClusterError | None = None
    """What to raise when its time is over."""

    @property
    def place(self) -> TopicPartition:
        return TopicPartition(self.wanted.topic, self.wanted.partition)

    @property
    def key(self) -> tuple[UUID, int]:
        return self.wanted.topic_id, self.wanted.partition

    @property
    def name(self) -> str:
        return f"{self.wanted.topic}-{self.wanted.partition}"

    @property
    def is_done(self) -> bool:
        return self.position >= self.wanted.end

    def fetch_bytes(self, most: int, usual_batch_bytes: int) -> int:
        """About what the rest of the range takes, so that little is fetched beyond its end.

        A batch larger than this comes cut off, unless its range stands first, and has come in vain.
        """
        rest = int((self.wanted.end - self.position) * self.bytes_per_offset * 1.1)
        least = max(FETCH_BYTES_MIN, usual_batch_bytes)
        return min(max(min(rest + least, most), self.batch_bytes), FETCH_BYTES_MAX)


class _Pending(NamedTuple):
    correlation_id: int
    asked: list[_Range]


class _Found(NamedTuple):
    surveyed: Survey
    reading: Reading


@dataclass
class RangesReader:
    cluster: Cluster
    ranges: Sequence[PartitionRange]
    isolation: Isolation
    batch_bytes: int
    headers: bool
    reports: list[RangeReport] = field(init=False)
    _pending: dict[Connection, _Pending] = field(init=False, default_factory=dict)
    _active: list[_Range] = field(init=False)
    _refresh_not_before_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.reports = [RangeReport(each) for each in self.ranges]
        deadline_s = self._deadline_s()
        self._active = [
            _Range(each, report, each.start, deadline_s, each.leader_epoch)
            for each, report in zip(self.ranges, self.reports, strict=True)
            if each.start < each.end
        ]

    def batches(self) -> Iterator[pa.RecordBatch]:
        deadline_s = self._deadline_s()
        for each in self._active:
            each.deadline_s = deadline_s
        try:
            self._locate(self._active)
            while self._active:
                self._ask_idle_brokers()
                answered = self._await_answer()
                if answered is None:
                    continue
                connection, found = answered
                self._active = [each for each in self._active if not each.is_done]
                self._ask(connection)
                for surveyed, reading in found:
                    for batch in decode(surveyed, reading):
                        yielded_s = time.monotonic()
                        yield batch
                        self._forgive(time.monotonic() - yielded_s)
        finally:
            for connection in self._pending:
                connection.abandon()
            self._pending.clear()

    # -------------------------------------------------------------------- asking

    def _deadline_s(self) -> float:
        return time.monotonic() + self.cluster.settings.deadline_ms / 1000

    def _forgive(self, seconds: float) -> None:
        """The time our caller takes between two batches is not the brokers' fault."""
        if seconds > FORGIVEN_S_MIN:
            for each in self._active:
                each.deadline_s += seconds

    def _locate(self, ranges: Sequence[_Range]) -> None:
        """Find out who leads, and whether the topics are still the ones we want."""
        known = self.cluster.refresh(each.wanted.topic for each in ranges)
        for each in ranges:
            each.needs_leader = False
            topic = known.get(each.wanted.topic)
            is_same = topic is not None and topic.topic_id == each.wanted.topic_id
            if topic is not None and is_same and each.wanted.partition in topic.partitions:
                each.contradictions = 0
                continue
            each.contradictions += 1
            each.needs_leader = True
            if topic is None:
                each.problem = TopicMissing(f"there is no topic '{each.wanted.topic}' any more")
            elif is_same:
                each.problem = TopicMissing(
                    f"topic '{topic.name}' has no partition {each.wanted.partition}; it has {len(topic.partitions)}"
                )
            else:
                each.problem = TopicRecreated(
                    f"topic '{each.wanted.topic}' was deleted and created again: its id is {topic.topic_id}, "
                    f"not {each.wanted.topic_id}; offsets {each.position} to {each.wanted.end - 1} of "
                    f"partition {each.wanted.partition} belong to the old one and cannot be read"
                )
            if each.contradictions >= CONFIRMATIONS:
                raise each.problem

    def _check_epoch(self, each: _Range, epoch: int) -> None:
        """Before the first fetch in a new epoch: does the new leader's log still hold what we have read?"""
        is_new = 0 <= each.asked_epoch < epoch
        has_read = each.last_epoch >= 0 and each.position > each.wanted.start
        if is_new and has_read:
            _, end = self.cluster.epoch_ends({each.place: each.last_epoch})[each.place]
            if 0 <= end < each.position:
                raise OffsetGone(
                    f"{each.name}: records before offset {each.position} were read, but the log of its new "
                    f"leader has them only up to {end}: an election has cut the log",
                    offset=each.position,
                    log_start=-1,
                    log_end=end,
                )
        each.asked_epoch = epoch

    def _ask_idle_brokers(self) -> None:
        now_s = time.monotonic()
        lost = [each for each in self._active if each.needs_leader]
        if lost and now_s >= self._refresh_not_before_s:
            self._refresh_not_before_s = now_s + self.cluster.settings.retry_backoff_ms / 1000
            self._locate(lost)
        busy = {id(each) for pending in self._pending.values() for each in pending.asked}
        leaders: dict[int, list[_Range]] = {}
        for each in self._active:
            if id(each) in busy or each.needs_leader:
                continue
            leader = self.cluster.leader(each.place)
            if leader is None or leader.leader < 0:
                self._lose(each, Unreachable(f"{each.name} has no leader"))
            else:
                leaders.setdefault(leader.leader, []).append(each)
        for leader_id, led in leaders.items():
            try:
                self._ask(self.cluster.connection(leader_id))
            except Unreachable as error:
                for each in led:
                    self._lose(each, error)

    def _ask(self, connection: Connection) -> None:
        """Send the next fetch to a broker, for all ranges it leads, unless one is under way."""
        if connection in self._pending or time.monotonic() < connection.not_before_s:
            return
        asked: list[_Range] = []
        keys: set[tuple[UUID, int]] = set()
        topics: dict[UUID, list[fetch_messages.Asked]] = {}
        # Ranges that may have nothing left stand first, where nothing is an answer.
        for each in sorted(self._active, key=lambda each: not each.empty_answers):
            leader = self.cluster.leader(each.place)
            if each.needs_leader or leader is None or each.key in keys:
                continue
            if not self.cluster.is_at(leader.leader, connection):
                continue
            try:
                self._check_epoch(each, leader.leader_epoch)
            except Unreachable as error:
                self._lose(each, error)
                continue
            keys.add(each.key)
            asked.append(each)
            topics.setdefault(each.wanted.topic_id, []).append(
                fetch_messages.Asked(
                    each.wanted.partition,
                    leader.leader_epoch,
                    each.position,
                    each.fetch_bytes(self.batch_bytes, self.cluster.batch_bytes.get(each.wanted.topic, 0)),
                )
            )
        if not asked:
            return
        body = fetch_messages.pack_fetch(
            version := connection.version(fetch_messages.FETCH, fetch_messages.LOWEST_VERSION),
            topics,
            isolation_level=int(self.isolation == "read_committed"),
            wait_ms=max(each.wait_ms for each in asked),
            bytes_max=max(self.batch_bytes, FETCH_BYTES_MIN),
        )
        try:
            self._pending[connection] = _Pending(connection.send(fetch_messages.FETCH, version, body), asked)
        except Unreachable as error:
            for each in asked:
                self._lose(each, error)

    # -------------------------------------------------------------------- answers

    def _await_answer(self) -> tuple[Connection, list[_Found]] | None:
        """The next answer of any broker; None when there was only time to pass."""
        connection = self._answering()
        if connection is None:
            self._check_time()
            return None
        pending = self._pending.pop(connection)
        try:
            answer = fetch_messages.walk_fetch(connection.receive(pending.correlation_id))
        except (Unreachable, PeerError) as error:
            connection.close()
            problem = error if isinstance(error, Unreachable) else Unreachable(str(error))
            for each in pending.asked:
                self._lose(each, problem)
            self._check_time()
            return None
        if answer.throttle_ms > 0:
            connection.not_before_s = time.monotonic() + answer.throttle_ms / 1000
        found = self._judge(answer, pending.asked)
        if not found:
            self._check_time()
        return connection, found

    def _answering(self) -> Connection | None:
        """A connection on which an answer begins, waited for no longer than until something else is due."""
        for connection, pending in self._pending.items():
            if not connection.is_open or connection.has_answer(pending.correlation_id):
                return connection
        if len(self._pending) == 1 and not any(each.needs_leader for each in self._active):
            return next(iter(self._pending))  # `receive` waits, with the time a request has
        wait_s = self.cluster.settings.retry_backoff_ms / 1000
        if not self._pending:
            time.sleep(wait_s)
            return None
        poll = select.poll()
        by_descriptor = {connection.fileno(): connection for connection in self._pending}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(wait_s * 1000)
        return by_descriptor[ready[0][0]] if ready else None

    def _judge(self, answer: fetch_messages.FetchAnswer, asked: list[_Range]) -> list[_Found]:
        if answer.error_code:
            problem = Refused(
                f"a fetch was refused: {error_table.describe(answer.error_code)}",
                ErrorCode(answer.error_code),
            )
            if not error_table.is_retriable(answer.error_code):
                raise problem
            for each in asked:
                self._lose(each, problem)
            return []
        by_key = {each.key: each for each in asked}
        found = []
        for fetched in answer.partitions:
            key = (fetched.topic_id, fetched.partition)
            if key not in by_key:
                continue
            each = by_key[key]
            if fetched.error_code:
                self._judge_error(each, fetched.error_code)
                continue
            is_first = each is asked[0] and not answer.throttle_ms
            taken = self._take(each, fetched, is_first)
            if taken is not None:
                found.append(taken)
        return found

    def _judge_error(self, each: _Range, code: int) -> None:
        error = ErrorCode(code)
        if error is ErrorCode.offset_out_of_range:
            raise self._gone(each)
        if error is ErrorCode.topic_authorization_failed:
            raise NotAuthorised(f"topic '{each.wanted.topic}' may not be read with these credentials")
        if error is ErrorCode.corrupt_message:
            raise CorruptBatch(f"{each.name}: the broker finds its log damaged at offset {each.position}")
        problem = Refused(f"{each.name}: {error_table.describe(error)}", error)
        if error not in ELSEWHERE and not error_table.is_retriable(error):
            raise problem
        self._lose(each, problem)

    def _take(self, each: _Range, fetched: fetch_messages.Fetched, is_first: bool) -> _Found | None:
        """What an answer holds for a range; moves its position behind it."""
        start, end = each.position, each.wanted.end
        surveyed = survey(fetched.records)
        next_offset = surveyed.next_offset
        self.cluster.note_batch_bytes(each.wanted.topic, surveyed.batch_bytes_max)
        if not len(surveyed.table) and surveyed.problem:
            raise CorruptBatch(f"{each.name}: the batch at offset {start} is damaged: {surveyed.problem}")
        if next_offset <= start:
            each.batch_bytes = min(surveyed.wanted_bytes, FETCH_BYTES_MAX)
            self._take_nothing(each, fetched, is_first)
            return None
        each.batch_bytes = 0
        each.empty_answers = 0
        each.wait_ms = WAIT_MS
        each.problem = None
        each.position = min(next_offset, end)
        each.last_epoch = surveyed.leader_epoch
        each.bytes_per_offset = len(fetched.records) / (next_offset - start)
        deadline_s = self._deadline_s()
        for other in self._active:
            other.deadline_s = deadline_s
        aborted = fetched.aborted if self.isolation == "read_committed" else ()
        reading = Reading(each.wanted, start, each.report, aborted, self.headers, self.batch_bytes)
        return _Found(surveyed, reading)

    def _take_nothing(self, each: _Range, fetched: fetch_messages.Fetched, is_first: bool) -> None:
        is_committed = self.isolation == "read_committed"
        reach = fetched.last_stable_offset if is_committed else fetched.high_watermark
        if reach < each.wanted.end:
            what = "the stable part of the log" if reach < fetched.high_watermark else "the log"
            each.problem = EndNotReached(
                f"{each.name}: offsets {each.position} to {each.wanted.end - 1} were asked for, but {what} ends at "
                f"{reach}" + (": a transaction is still open" if reach < fetched.high_watermark else "")
            )
            each.empty_answers = 0
            each.wait_ms = WAIT_MS
            return
        each.problem = _nothing_comes(each, reach)
        if is_first and not len(fetched.records):
            each.empty_answers += 1
            each.wait_ms = min(2 * each.wait_ms, WAIT_MS_MAX, self.cluster.settings.request_timeout_ms // 2)
        else:
            each.empty_answers = max(each.empty_answers, 1)  # it will stand first in the next request
        if each.empty_answers <= CONFIRMATIONS or self._is_remote(each, reach):
            return
        each.report.missing += each.wanted.end - each.position
        each.report.position = each.position = each.wanted.end

    def _is_remote(self, each: _Range, reach: int) -> bool:
        """Whether the leader may have to get what is asked for from elsewhere; then counting begins anew.

        Asked after the last empty answer: what is local now was so all along.
        """
        try:
            local_start = self.cluster.local_start(each.place)
        except Unreachable as error:
            self._lose(each, error)
            return True
        if local_start is None or local_start <= each.position:
            return False
        each.empty_answers = 1
        each.local_start = local_start
        each.problem = _nothing_comes(each, reach)
        return True

    # -------------------------------------------------------------------- trouble

    def _lose(self, each: _Range, problem: ClusterError) -> None:
        each.needs_leader = True
        each.problem = problem

    def _check_time(self) -> None:
        now_s = time.monotonic()
        for each in self._active:
            if now_s > each.deadline_s:
                raise each.problem or Unreachable(f"{each.name}: no answer came in time")

    def _gone(self, each: _Range) -> OffsetGone:
        starts = self.cluster.offsets([each.place], "earliest")
        ends = self.cluster.offsets([each.place], "latest")
        log_start, log_end = starts[each.place].offset, ends[each.place].offset
        if each.position < log_start:
            what = (
                f"offsets {each.position} to {min(log_start, each.wanted.end) - 1} are gone, "
                f"by retention or deletion: the log begins at {log_start}"
            )
        else:
            what = f"offset {each.position} does not exist: the log ends at {log_end}"
        return OffsetGone(f"{each.name}: {what}", offset=each.position, log_start=log_start, log_end=log_end)


def _nothing_comes(each: _Range, reach: int) -> EndNotReached:
    remote = f": offsets before {each.local_start} are in remote storage, which is slow or away"
    return EndNotReached(
        f"{each.name}: the broker answers with nothing at offset {each.position}, although its log reaches {reach}"
        + (remote if each.position < each.local_start else "")
    )
