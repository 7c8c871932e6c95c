"""What a batch must pass before it may enter a partition's log.

Cheap checks come first, and nothing is written before all have passed. A batch goes in as the bytes it came
as, unless the topic asks for the broker's time or for another compression, or its header tells an old time that is
not its records' own: nobody may make records expire early by what is written in front of them.

`Intake.accept_batch` is the one way in. Authorisation and quotas have their place there, in `permit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from kio.schema.errors import ErrorCode

from holdfast.broker.log.producer_state import Duplicate
from holdfast.broker.log.record_filter import largest_timestamp_delta
from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.context import Session
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.production import Production
from holdfast.errors import ApiError, CorruptLog, InvalidRecords
from holdfast.seams import Buffer, Now
from holdfast.wire.batch import (
    CODEC_MASK,
    HEADER_SIZE,
    NO_TIMESTAMP,
    BatchHeader,
    Record,
    check_batch,
    nearest_timestamp,
    parse_records,
    read_header,
    seal,
    with_log_append_time,
)
from holdfast.wire.codecs import Codec, compress

CODECS = {
    "uncompressed": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}

FRESH_MS = 60_000
"""A header that tells a time at most this old is believed without a look at the records: by whatever it hides from
retention, they expire no more than this early."""


INTERNAL_TOPICS: Final = frozenset(("__consumer_offsets", "__transaction_state", "__share_group_state"))


def permit(session: Session, topic: str, size: int) -> None:
    """Raise `ApiError` unless the client may write so many bytes to the topic now.

    Every principal may do everything: authorisation is off, and there are no quotas. ACLs and quotas will stand here.
    """


def require_client_topic(topic: str) -> None:
    if topic in INTERNAL_TOPICS:
        raise ApiError(ErrorCode.invalid_topic_exception, f"clients may not write to {topic}")


class Intake:
    """Where batches of clients enter logs, and which produce requests wait until they are committed."""

    def __init__(self, commit: GroupCommit) -> None:
        self._commit = commit
        self.parked: deque[tuple[Production, int]] = deque()
        """With the time at which their clients' patience ends. A connection has few requests under way."""

    def accept_batch(
        self,
        session: Session,
        hosted: HostedPartition,
        batch: Buffer,
        now: Now,
        checked: BatchHeader | None = None,
    ) -> BatchHeader | Duplicate:
        """Append a client's batch and have it flushed; returns it as stored, or the earlier batch it repeats.

        `checked` is the header of a batch that is known to pass `admit` unchanged. Raises what the client is told.
        """
        permit(session, hosted.topic, len(batch))
        if checked is None:
            admitted = admit(hosted, batch, now)
            if isinstance(admitted, Duplicate):
                return admitted
            checked, batch = admitted
        stored = hosted.append(checked, batch, now)
        self._commit.appended(hosted)
        return stored

    def park(self, production: Production, deadline_ms: int) -> None:
        """Answer a request that waits when its time-out passes. Those that ended are let go of as others come."""
        parked = self.parked
        while parked and not parked[0][0].waiting:
            parked.popleft()
        parked.append((production, deadline_ms))

    def timed_out(self, now_ms: int) -> list[Production]:
        """Whose time is over."""
        return [
            production
            for production, deadline_ms in self.parked
            if production.waiting and deadline_ms <= now_ms
        ]


def admit(hosted: HostedPartition, batch: Buffer, now: Now) -> tuple[BatchHeader, Buffer] | Duplicate:
    """The batch as it will be stored, or the earlier batch it repeats; raises what Kafka would answer."""
    log = hosted.log
    config = log.config
    _check_size(hosted, len(batch))
    header, records = check_batch(batch)
    if "compact" in config.cleanup_policy:
        missing = [index for index, record in enumerate(_parsed(records)) if record.key is None]
        if missing:
            raise InvalidRecords(
                ErrorCode.invalid_record,
                f"{hosted.topic} is compacted and needs a key in every record",
                missing,
            )
    stored: Buffer = batch
    if config.message_timestamp_type == "CreateTime" and header.max_timestamp < now.wall_ms - FRESH_MS:
        header, stored = _with_own_maximum(header, stored, records)
    _check_timestamps(hosted, header, records, now)
    if header.producer_id >= 0:
        verdict = log.producers.check(header, is_client=True)
        if isinstance(verdict, Duplicate):
            return verdict
    if config.compression_type != "producer":
        header, stored = _recompress(hosted, header, stored, records)
        _check_size(hosted, len(stored))
    if config.message_timestamp_type == "LogAppendTime":
        stored = with_log_append_time(header, stored, now.wall_ms)
        header = read_header(stored)
    return header, stored


def _check_size(hosted: HostedPartition, size: int) -> None:
    """As it came, and again when the topic's compression has made it larger."""
    config = hosted.log.config
    if size > config.max_message_bytes:
        raise InvalidRecords(
            ErrorCode.message_too_large,
            f"a batch of {size} bytes exceeds max.message.bytes={config.max_message_bytes} of {hosted.topic}",
        )
    if size > config.segment_bytes:
        raise InvalidRecords(
            ErrorCode.record_list_too_large,
            f"a batch of {size} bytes exceeds segment.bytes={config.segment_bytes} of {hosted.topic}",
        )


def _parsed(records: Buffer) -> Iterator[Record]:
    """Every record, where a topic's rules need a look inside. One that makes no sense is the client's own."""
    try:
        yield from parse_records(records)
    except InvalidRecords as error:
        raise InvalidRecords(ErrorCode.invalid_record, error.message) from None


def _with_own_maximum(header: BatchHeader, batch: Buffer, records: Buffer) -> tuple[BatchHeader, Buffer]:
    """The batch with the largest time of its records in its header, whatever its producer wrote there."""
    try:
        largest = nearest_timestamp(header.base_timestamp + largest_timestamp_delta(bytes(records)))
    except CorruptLog as error:
        raise InvalidRecords(ErrorCode.invalid_record, str(error)) from None
    largest = max(largest, NO_TIMESTAMP)
    if largest == header.max_timestamp:
        return header, batch
    stored = seal(header._replace(max_timestamp=largest), memoryview(batch)[HEADER_SIZE:])
    return read_header(stored), stored


def _check_timestamps(hosted: HostedPartition, header: BatchHeader, records: Buffer, now: Now) -> None:
    """Times too far from the broker's clock break retention by time, so a topic may bound them."""
    if header.is_log_append_time:
        raise InvalidRecords(
            ErrorCode.invalid_timestamp,
            "a producer may not claim the broker's time (LogAppendTime)",
            range(header.records_count),
        )
    config = hosted.log.config
    if config.message_timestamp_type == "LogAppendTime":
        return
    latest = now.wall_ms + config.message_timestamp_after_max_ms
    earliest = now.wall_ms - config.message_timestamp_before_max_ms
    first = (
        header.base_timestamp
    )  # the time of the first record, unless the producer's encoder is a strange one
    if max(header.max_timestamp, first) <= latest and earliest <= min(0, first):
        return
    outside = [
        index
        for index, record in enumerate(_parsed(records))
        if not earliest <= (timestamp := header.base_timestamp + record.timestamp_delta) <= latest
        and timestamp != NO_TIMESTAMP
    ]
    if outside or header.max_timestamp > latest:
        raise InvalidRecords(
            ErrorCode.invalid_timestamp,
            f"timestamps are more than message.timestamp.before.max.ms={config.message_timestamp_before_max_ms} "
            f"before or message.timestamp.after.max.ms={config.message_timestamp_after_max_ms} after the "
            f"broker's {now.wall_ms}",
            outside,
        )


def _recompress(
    hosted: HostedPartition, header: BatchHeader, batch: Buffer, records: Buffer
) -> tuple[BatchHeader, Buffer]:
    """The same records under the topic's own compression."""
    config = hosted.log.config
    codec = CODECS[config.compression_type]
    if header.codec == codec:
        return header, batch
    level = {
        Codec.GZIP: config.compression_gzip_level,
        Codec.LZ4: config.compression_lz4_level,
        Codec.ZSTD: config.compression_zstd_level,
    }.get(codec)
    body = compress(codec, records, level) if codec else bytes(records)
    changed = header._replace(attributes=header.attributes & ~CODEC_MASK | codec)
    stored = seal(changed, body)
    return read_header(stored), stored
