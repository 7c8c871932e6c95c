"""A short way for the usual Produce request: one plain batch for one partition, outside transactions.

Clients that wait for each answer send nothing else, and the general way through reader, handler and packer costs
several times what storing the batch does. `UsualProduce.begin` takes a request only if it is usual in every byte and
will succeed: a partition led and online here under rules that need no look into records, a batch that is
uncompressed, sound, within its bounds and next in its producer's sequence. Anything else it leaves alone, before
anything has changed, and the general way (`handlers.produce`) accepts it or says what is wrong. The tests hold
the two ways against each other, byte by byte.

The order of effects is the node's: append, flush, high watermark, response.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from uuid import UUID

from crc32c import crc32c

from holdfast.broker.log.producer_state import ACCEPT
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.intake import FRESH_MS, INTERNAL_TOPICS, Intake
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.broker.node.meter import Meter
from holdfast.broker.node.partitions import HostedPartitions
from holdfast.broker.node.production import (
    ACKS_ALL,
    NOT_FLUSHED_IN_TIME,
    BatchOutcome,
    FailedBatch,
    Production,
    failure,
)
from holdfast.config.topic import TopicConfig
from holdfast.errors import ApiError, InvalidRecords
from holdfast.seams import Buffer, Now
from holdfast.wire.apis import BY_KEY, PRODUCE
from holdfast.wire.batch import (
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    NO_TIMESTAMP,
    BatchHeader,
    count_records,
)
from holdfast.wire.hot import PRODUCE_FLEXIBLE, PRODUCE_TOPIC_IDS, Produced
from holdfast.wire.messages import RequestHeader
from holdfast.wire.varint import decode_uvarint

if TYPE_CHECKING:
    from holdfast.broker.node.connection import Connection, Exchange

VERSION_MAX: Final = BY_KEY[PRODUCE].max
TARGETS_MAX: Final = 4096
"""Partitions remembered; all are forgotten when there are more."""
ALL_TIME_MS: Final = 1 << 62
"""`message.timestamp.before.max.ms` from which every past time is allowed."""
NO_OFFSET: Final = -1

_BEGIN: Final = struct.Struct(">BhiB").unpack_from
"""Of the body: no transactional id, acks, time-out, the number of topics."""
_BEGIN_BYTES: Final = 8
_TOPIC_ID_BYTES: Final = 16
_PARTITION: Final = struct.Struct(">Bi").unpack_from
"""Behind the topic: the number of partitions, the first one's index."""
_PARTITION_BYTES: Final = 5
_INDEX_BYTES: Final = 4
_ANSWERED_ACKS: Final = (ACKS_ALL, 1)
_ONE: Final = 2
"""An array of one, as its length is written."""
_NO_TAGS: Final = b"\x00\x00\x00"
"""No tagged fields of the partition, the topic, the request."""
_ANSWER_HEAD: Final = struct.Struct(">iiBB").pack
_ANSWER: Final = struct.Struct(">ihqqqBBBBiB").pack
_ANSWER_BYTES: Final = 6 + 6 + 24 + 4 + 5
"""An answer without its length and what repeats the request."""

_read_header: Final = HEADER.unpack_from
_make_header: Final = BatchHeader._make


class ProduceTarget:
    """A partition as requests name it, and what a batch must keep to there."""

    __slots__ = (
        "after_max_ms",
        "batch_bytes_max",
        "config",
        "hosted",
        "index",
        "raw",
        "took",
        "topic",
        "waited",
    )

    def __init__(
        self,
        hosted: HostedPartition,
        topic: str | UUID,
        raw: bytes,
        noted: tuple[Callable[[int], None], Callable[[int], None]],
    ) -> None:
        config = hosted.log.config
        self.hosted = hosted
        self.index = hosted.index
        self.topic = topic
        self.raw = raw
        """The topic and the number of partitions, the same bytes in request and answer."""
        self.took, self.waited = noted
        """Take how long a request has taken and how much of that it was parked, in nanoseconds."""
        self.config = config
        self.batch_bytes_max = min(config.max_message_bytes, config.segment_bytes)
        self.after_max_ms = config.message_timestamp_after_max_ms

    @property
    def is_current(self) -> bool:
        hosted = self.hosted
        return hosted.log.config is self.config and not hosted.is_deleted and not hosted.directory.offline


def _has_plain_rules(config: TopicConfig) -> bool:
    return (
        "compact" not in config.cleanup_policy
        and config.compression_type == "producer"
        and config.message_timestamp_type == "CreateTime"
        and config.message_timestamp_before_max_ms >= ALL_TIME_MS
    )


class ParkedProduce(Production):
    """One that waits for its commit, with its place among the answers of its connection."""

    __slots__ = ("base_offset", "exchange", "target")

    def __init__(self, exchange: Exchange, target: ProduceTarget, base_offset: int) -> None:
        # Not what a request of many batches needs.
        self.version = exchange.version
        self.exchange = exchange
        self.target = target
        self.base_offset = base_offset
        self.waiting = 1

    def __call__(self, error: Exception | None) -> None:
        """The batch is committed, or its outcome is unknown for good."""
        if not self.waiting:
            return
        self.waiting = 0
        exchange = self.exchange
        target = self.target
        try:
            connection = exchange.connection
            start_offset = target.hosted.log.start_offset
            if error is not None:
                self._tell(failure(target.index, error))
            elif not connection.metadata.is_durable:
                self._tell(Produced(target.index, self.base_offset, NO_TIMESTAMP, start_offset))
            else:
                answer = pack_answer(exchange.correlation_id, target, self.base_offset, start_offset)
                meter = connection.meter
                ready_ns = meter.clock.monotonic_ns()
                took_ns = ready_ns - exchange.arrived_ns
                if took_ns < meter.slow_ns and connection.send_next(exchange, answer, ready_ns):
                    target.took(took_ns)
                    target.waited(ready_ns - exchange.parked_ns)
                    return
                exchange.parts = [answer]
                exchange.ready_ns = ready_ns
                connection.send_ready(ready_ns)
            if self.base_offset != NO_OFFSET:
                target.hosted.traffic.produces += 1
        except Exception as defect:  # noqa: BLE001 - nobody else would close the connection
            exchange.give_up(defect)

    def time_out(self) -> None:
        self(NOT_FLUSHED_IN_TIME)

    def _tell(self, outcome: BatchOutcome) -> None:
        self.has_failures = isinstance(outcome, FailedBatch)
        self.topics = [(self.target.topic, [outcome])]
        self.exchange.deliver(self.response())


class UsualProduce:
    def __init__(
        self, intake: Intake, partitions: HostedPartitions, metadata: MetadataLog, meter: Meter
    ) -> None:
        self._intake = intake
        self._meter = meter
        self._clock = meter.clock
        self._monotonic_ns = meter.clock.monotonic_ns
        self._partitions = partitions
        self._metadata = metadata
        self._targets: list[dict[bytes, ProduceTarget]] = [{} for _ in range(VERSION_MAX + 1)]
        """By version of the request and the bytes that name the partition there."""

    def begin(self, connection: Connection, head: RequestHeader, frame: Buffer, now: Now) -> bool:
        """Begin a Produce request if it is a usual one; otherwise nothing has happened."""
        _, version, correlation_id, _, position = head
        if not PRODUCE_FLEXIBLE <= version <= VERSION_MAX:
            return False
        try:
            transactional_id, acks, timeout_ms, topics = _BEGIN(frame, position)
            start = position + _BEGIN_BYTES
            targets = self._targets[version]
            if version >= PRODUCE_TOPIC_IDS:
                end = start + _TOPIC_ID_BYTES + _PARTITION_BYTES
            else:
                end = start + frame[start] + _PARTITION_BYTES
            place = bytes(frame[start:end])
            target = targets.get(place)
            size = frame[end]
            start = end + 1
            if size >= 0x80:
                more = frame[start]
                if more < 0x80:
                    size += (more << 7) - 0x80
                    start += 1
                else:
                    size, start = decode_uvarint(frame, end)
            size -= 1
            end = start + size
            fields = _read_header(frame, start)
        except (struct.error, IndexError, ValueError):
            return False
        if target is None or not target.is_current:
            target = self._find(version, place)
            if target is None:
                return False
        (
            base_offset,
            length,
            _,
            magic,
            crc,
            attributes,
            delta,
            oldest,
            newest,
            producer_id,
            epoch,
            sequence,
            count,
        ) = fields
        if (
            transactional_id
            or topics != _ONE
            or acks not in _ANSWERED_ACKS
            or frame[end:] != _NO_TAGS
            or length != size - LOG_OVERHEAD
            or size > target.batch_bytes_max
            or magic != MAGIC
            or base_offset
            or attributes
            or count <= 0
            or delta != count - 1
            or not now.wall_ms - FRESH_MS <= newest <= now.wall_ms + target.after_max_ms
            or not 0 <= oldest <= newest
        ):
            return False
        batch = memoryview(frame)[start:end]
        header = _make_header(fields)
        hosted = target.hosted
        log = hosted.log
        try:
            if crc32c(batch[CRC_START:]) != crc or count_records(frame, start + HEADER_SIZE, end) != count:
                return False
            if producer_id >= 0 and (
                epoch < 0 or sequence < 0 or log.producers.check(header, is_client=True) is not ACCEPT
            ):
                return False
        except (ApiError, InvalidRecords):
            return False
        try:
            stored = self._intake.accept_batch(connection.session, hosted, batch, now, header)
        except ApiError as error:
            ParkedProduce(connection.enqueue(PRODUCE, version, correlation_id), target, NO_OFFSET)(error)
            return True
        assert isinstance(stored, BatchHeader)
        base_offset = stored.base_offset
        if acks == ACKS_ALL and log.end_offset > hosted.offsets.high_watermark.offset:
            exchange = connection.enqueue(PRODUCE, version, correlation_id)
            exchange.parked_ns = self._monotonic_ns()
            parked = ParkedProduce(exchange, target, base_offset)
            hosted.offsets.when_committed(log.end_offset, parked)
            self._intake.park(parked, now.monotonic_ms + timeout_ms)
        elif self._metadata.is_durable and not connection.requests_under_way:
            connection.transmit([pack_answer(correlation_id, target, base_offset, log.start_offset)])
            target.took(self._monotonic_ns() - (connection.arrived_ns or self._clock.read_ns))
        else:
            ParkedProduce(connection.enqueue(PRODUCE, version, correlation_id), target, base_offset)(None)
        return True

    def _find(self, version: int, place: bytes) -> ProduceTarget | None:
        """The partition that a request names by these bytes, if usual requests may go there."""
        partitions, index = _PARTITION(place, len(place) - _PARTITION_BYTES)
        raw = place[: len(place) - _INDEX_BYTES]
        topic: str | UUID
        name: str | None
        targets = self._targets[version]
        if version >= PRODUCE_TOPIC_IDS:
            topic = UUID(bytes=raw[:_TOPIC_ID_BYTES])
            name = self._partitions.topic_name(topic)
        else:
            if not 1 < place[0] < 0x80:
                return None
            try:
                topic = name = raw[1:-1].decode()
            except UnicodeDecodeError:
                return None
        hosted = self._partitions.get(name, index) if name is not None else None
        if (
            hosted is None
            or hosted.directory.offline
            or partitions != _ONE
            or name in INTERNAL_TOPICS
            or not _has_plain_rules(hosted.log.config)
        ):
            targets.pop(place, None)
            return None
        if len(targets) >= TARGETS_MAX:
            targets.clear()
        noted = self._meter.took(hosted.topic, version)
        target = targets[place] = ProduceTarget(hosted, topic, raw, noted)
        return target


def pack_answer(correlation_id: int, target: ProduceTarget, base_offset: int, log_start_offset: int) -> bytes:
    """A whole response, its length included, to a request that succeeded."""
    raw = target.raw
    # No error; no record errors, no message, no tagged fields; of the topic none; no throttling; none at all.
    return b"%b%b%b" % (
        _ANSWER_HEAD(_ANSWER_BYTES + len(raw), correlation_id, 0, _ONE),
        raw,
        _ANSWER(target.index, 0, base_offset, NO_TIMESTAMP, log_start_offset, 1, 0, 0, 0, 0, 0),
    )
