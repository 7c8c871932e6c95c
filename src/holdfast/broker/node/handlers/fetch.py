"""Fetch (1), versions 4 to 18: bytes of files as they are, from an offset, up to the high watermark.

Records are not parsed. A read_committed fetch ends at the last stable offset; it gets records of aborted
transactions along with the others and is told which producers aborted from which offset on.

A fetch that finds fewer than `min_bytes` is parked, holding no thread, until data arrives on one of its partitions
or `max_wait` passes. At least one whole batch is returned, however large, by the first partition that has data.

Left out: follower fetches (`replica_id` ≥ 0), which replication will serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Answer, Fields, Later, Packed, RequestContext, Session
from holdfast.broker.node.fetch_sessions import FetchPlan, PartitionKey, WantedPartition
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.meter import Refused
from holdfast.broker.node.services import DataServices
from holdfast.broker.node.timers import Timer
from holdfast.errors import ApiError, CorruptLog
from holdfast.saying import error as error_line
from holdfast.seams import Now
from holdfast.wire.api_keys import FETCH
from holdfast.wire.hot import FETCH_TOPIC_IDS, Fetched, pack_fetch_response

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1
ZERO_ID: Final = UUID(int=0)


@dataclass(slots=True, eq=False, repr=False)
class Reading:
    """One fetch under way: reads when asked, and can tell whether it has enough."""

    _node: DataServices
    session: Session
    version: int
    plan: FetchPlan
    min_bytes: int
    max_bytes: int
    read_committed: bool
    hosted: list[HostedPartition] = field(default_factory=list)
    """What the last reading has found."""
    later: Later | None = None
    timer: Timer | None = None
    _watched: list[HostedPartition] = field(default_factory=list)
    """Whose data this waits for."""
    _fetched: list[tuple[PartitionKey, Fetched]] = field(default_factory=list)

    def read(self) -> bool:
        """Read every partition once; true when the answer should leave now."""
        total = 0
        remaining = self.max_bytes
        self._fetched = fetched_all = []
        self.hosted = []
        has_news = False
        for key, wanted in self.plan.partitions:
            fetched = self._read_one(key, wanted, remaining, at_least_one=not total)
            fetched_all.append((key, fetched))
            if fetched.error_code or fetched.diverging is not None:
                has_news = True
            total += fetched.records_length
            remaining = max(0, remaining - fetched.records_length)
        return has_news or total >= self.min_bytes or not self.plan.partitions

    def _read_one(
        self, key: PartitionKey, wanted: WantedPartition, remaining: int, *, at_least_one: bool
    ) -> Fetched:
        topic, index = key
        try:
            if isinstance(topic, UUID):
                name = self._node.partitions.topic_name(topic)
                if name is None:
                    raise ApiError(ErrorCode.unknown_topic_id, None)
            else:
                name = topic
            hosted = self._node.partitions.leader_of(name, index)
            self.hosted.append(hosted)
            return self._read_hosted(hosted, wanted, remaining, at_least_one)
        except ApiError as error:
            return Fetched(index, error.code, -1, -1, -1, None, None, 0)
        except (OSError, CorruptLog) as error:
            text = f"reading {topic}-{index} at {wanted.fetch_offset} failed: {error}"
            self._node.say(error_line(text, kind=f"reading {topic}-{index}"))
            return Fetched(index, ErrorCode.kafka_storage_error, -1, -1, -1, None, None, 0)

    def _read_hosted(
        self, hosted: HostedPartition, wanted: WantedPartition, remaining: int, at_least_one: bool
    ) -> Fetched:
        hosted.traffic.fetches += 1
        log = hosted.log
        offsets = hosted.offsets
        check_leader_epoch(hosted, wanted.current_leader_epoch)
        high_watermark = offsets.high_watermark
        stable = offsets.last_stable_offset
        offset = wanted.fetch_offset
        if wanted.last_fetched_epoch >= 0:
            end = hosted.end_of_epoch(wanted.last_fetched_epoch, log.end_offset)
            if end.epoch < 0:  # an epoch we never had: nothing tells where the client parted from us
                return _out_of_range(hosted)
            if end.epoch < wanted.last_fetched_epoch or end.end_offset < offset:
                return Fetched(
                    hosted.index,
                    0,
                    high_watermark.offset,
                    stable,
                    log.start_offset,
                    None,
                    None,
                    0,
                    diverging=(end.epoch, end.end_offset),
                )
        if offset < log.start_offset or offset > log.end_offset:
            return _out_of_range(hosted)
        bound = hosted.readable_end(read_committed=self.read_committed)
        limit = min(wanted.partition_max_bytes, remaining)
        piece = (
            log.read(offset, limit, bound, at_least_one=at_least_one) if limit > 0 or at_least_one else None
        )
        aborted: Sequence[tuple[int, int]] | None = None
        if self.read_committed:
            aborted = log.aborted_in(offset, piece, bound.offset) if piece is not None else ()
        return Fetched(
            hosted.index,
            0,
            high_watermark.offset,
            stable,
            log.start_offset,
            aborted,
            piece,
            piece.length if piece is not None else 0,
        )

    # Parking

    def park(self, deadline_ms: int) -> Later:
        later = self.later = Later(self._leave)
        self._watched = self.hosted
        for hosted in self._watched:
            hosted.offsets.fetch_waiters[self] = None
        self.timer = self._node.timers.at(deadline_ms, lambda: later.take(self._answer, True))
        return later

    def data_arrived(self) -> None:
        assert self.later is not None
        self.later.take(self._answer, False)

    def _leave(self) -> None:
        """Wait no longer, for time or for data."""
        if self.timer is not None:
            self.timer.cancel()
        for hosted in self._watched:
            hosted.offsets.fetch_waiters.pop(self, None)

    def _answer(self, is_due: bool) -> None:
        if self.read() or is_due:
            self._leave()
            assert self.later is not None
            self.later.resolve(self.response())

    def response(self) -> Packed:
        session = self.plan.session
        topics: dict[str | UUID, list[Fetched]] = {}
        for key, fetched in self._fetched:
            if session is not None:
                if not self.plan.is_full and not session.is_news(key, fetched):
                    continue
                session.sent(key, fetched, is_full=self.plan.is_full)
            if fetched.error_code or fetched.records_length:
                self._count(key, fetched)
            topics.setdefault(key[0], []).append(fetched)
        return Packed(pack_fetch_response(self.version, 0, self.plan.session_id, list(topics.items())))

    def _count(self, key: PartitionKey, fetched: Fetched) -> None:
        topic, index = key
        meter = self._node.meter
        name = self._node.partitions.topic_name(topic) if isinstance(topic, UUID) else topic
        traffic = meter.known_traffic(name)
        traffic.bytes_out += fetched.records_length
        if fetched.error_code:
            traffic.failed_fetches += 1
            where = f"{name or topic}-{index}"
            refusal = Refused(ErrorCode(fetched.error_code), name, where, None)
            meter.refused(self.session, FETCH, refusal)


def _out_of_range(hosted: HostedPartition) -> Fetched:
    return Fetched(hosted.index, ErrorCode.offset_out_of_range, -1, -1, -1, None, None, 0)


def check_leader_epoch(hosted: HostedPartition, client_epoch: int) -> None:
    """KIP-320: a client whose metadata is older or newer than ours is told so."""
    if client_epoch < 0:
        return
    if client_epoch < hosted.leader_epoch:
        raise ApiError(
            ErrorCode.fenced_leader_epoch, f"{hosted.name} is at leader epoch {hosted.leader_epoch}"
        )
    if client_epoch > hosted.leader_epoch:
        raise ApiError(
            ErrorCode.unknown_leader_epoch, f"{hosted.name} is at leader epoch {hosted.leader_epoch}"
        )


def fetch(node: DataServices, context: RequestContext, request: Any, now: Now) -> Answer:
    by_id = context.version >= FETCH_TOPIC_IDS
    if request.isolation_level not in (READ_UNCOMMITTED, READ_COMMITTED):
        # Guessing would show a client what it may have asked not to see.
        return _refused(context.version, ErrorCode.invalid_request)
    wanted: dict[PartitionKey, WantedPartition] = {}
    for topic in request.topics:
        name = (topic.topic_id or ZERO_ID) if by_id else topic.topic
        for p in topic.partitions:
            wanted[name, p.partition] = WantedPartition(
                p.fetch_offset,
                p.partition_max_bytes,
                getattr(p, "current_leader_epoch", -1),
                getattr(p, "last_fetched_epoch", -1),
                getattr(p, "log_start_offset", -1),
            )
    forgotten: list[PartitionKey] = [
        ((topic.topic_id or ZERO_ID) if by_id else topic.topic, index)
        for topic in getattr(request, "forgotten_topics_data", ())
        for index in topic.partitions
    ]
    try:
        plan = node.fetch_sessions.plan(request, wanted, forgotten, now)
    except ApiError as error:
        return _refused(context.version, error.code)
    max_bytes = min(request.max_bytes, node.settings.broker.fetch_max_bytes)
    read_committed = request.isolation_level == READ_COMMITTED
    reading = Reading(
        node, context.session, context.version, plan, request.min_bytes, max_bytes, read_committed
    )
    max_wait_ms = int(request.max_wait.total_seconds() * 1000)
    if reading.read() or max_wait_ms <= 0 or node.timers.is_stopped:
        return reading.response()
    return reading.park(now.monotonic_ms + max_wait_ms)


def _refused(version: int, code: ErrorCode) -> Fields | Packed:
    return Packed(pack_fetch_response(version, code, 0, []))
