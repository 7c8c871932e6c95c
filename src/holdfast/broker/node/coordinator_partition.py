"""A coordinator's partition: the journal its machine writes, and the gate its answers pass.

Groups and transactions are each spread over the partitions of an internal topic, by the hash of their name. One
coordinator partition is one such partition: a machine, and the log it is rebuilt from. What the machine says is held
back until everything the log held when it was said is durable, so that no answer, reads included, tells what a crash
could take back.

A coordinator partition whose log has failed answers COORDINATOR_NOT_AVAILABLE until the next start rebuilds it from
what the disk has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kio.schema.errors import ErrorCode

from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.context import Answer, Fields, Later
from holdfast.broker.node.hosted import HostedPartition
from holdfast.errors import ApiError, LogDirectoryOffline
from holdfast.seams import Now
from holdfast.wire.batch import BatchHeader, Record, build_batch, iterate_records, read_header

Refusal = Callable[[ErrorCode], Fields]
"""The answer of an API that says nothing but this error."""


class CoordinatorPartition:
    """A `Journal` on a hosted partition."""

    def __init__(self, commit: GroupCommit, hosted: HostedPartition) -> None:
        self._commit = commit
        self.hosted = hosted
        self._has_unhurried = False
        """Whether the log ends with records that no flush was asked for."""

    # The journal

    def append(
        self,
        records: Sequence[tuple[bytes, bytes | None]],
        now: Now,
        *,
        producer: tuple[int, int] | None = None,
    ) -> None:
        if records:
            self._write(records, now, producer)
            self._has_unhurried = False
            self._commit.appended(self.hosted)

    def append_unhurried(self, records: Sequence[tuple[bytes, bytes | None]], now: Now) -> None:
        """Append what nobody waits for: it becomes durable with what is appended next, or when an answer needs it."""
        self._write(records, now, None)
        if self.hosted.flushes_in_groups:
            self._has_unhurried = True
        else:
            self._commit.appended(self.hosted)

    def _write(
        self, records: Sequence[tuple[bytes, bytes | None]], now: Now, producer: tuple[int, int] | None
    ) -> None:
        self.require_online()
        producer_id, producer_epoch = producer or (-1, -1)
        batch = build_batch(
            [Record(index, 0, key, value) for index, (key, value) in enumerate(records)],
            base_timestamp=now.wall_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            is_transactional=producer is not None,
        )
        hosted = self.hosted
        limit = min(hosted.log.config.max_message_bytes, hosted.log.config.segment_bytes)
        if len(batch) > limit:
            raise ApiError(
                ErrorCode.message_too_large,
                f"{len(batch)} bytes in {hosted.topic}, whose batches have at most {limit}",
            )
        header = read_header(batch)
        if producer is not None:
            hosted.log.producers.check(header, is_client=False)
        try:
            hosted.append(header, batch, now)
        except ApiError as error:
            raise ApiError(ErrorCode.coordinator_not_available, error.message) from error

    def when_durable(self, done: Callable[[Exception | None], None]) -> None:
        if self._has_unhurried:
            self._has_unhurried = False
            self._commit.request(self.hosted)
        self.hosted.offsets.when_committed(self.hosted.log.end_offset, done)

    @property
    def is_durable(self) -> bool:
        offsets = self.hosted.offsets
        return offsets.failure is None and offsets.is_committed(self.hosted.log.end_offset)

    def require_online(self) -> None:
        if self.hosted.offline or self.hosted.is_deleted or self.hosted.offsets.failure is not None:
            raise ApiError(
                ErrorCode.coordinator_not_available,
                f"{self.hosted.name} is offline, and the coordinator it belongs to with it",
            )

    # The gate

    def answer(self, fields: Fields, refusal: Refusal) -> Answer:
        """What the machine has said just now, when it may leave."""
        if self.is_durable:
            return fields
        later = Later()
        self.release(later, fields, refusal)
        return later

    def release(self, later: Later, fields: Fields, refusal: Refusal) -> None:
        """Resolve a parked response with what the machine has said just now, once that is durable."""

        def pass_gate(error: Exception | None) -> None:
            later.resolve(fields if error is None else refusal(outcome_unknown(error)))

        self.when_durable(later.step(pass_gate))


def outcome_unknown(error: Exception) -> ErrorCode:
    """What a client is told whose request may or may not have been carried out: to ask for the coordinator again."""
    if isinstance(error, LogDirectoryOffline):
        return ErrorCode.coordinator_not_available
    return error.code if isinstance(error, ApiError) else ErrorCode.coordinator_not_available


def stored_batches(hosted: HostedPartition) -> Iterator[tuple[BatchHeader, list[Record]]]:
    """Everything a coordinator partition is rebuilt from, in order: at start, when all of it is durable."""
    log = hosted.log
    for found in log.batches_from(log.start_offset):
        header = found.header
        segment = log.segments[log.segment_for(header.base_offset)]
        yield header, list(iterate_records(segment.file.pread(header.size, found.position)))


def partition_for(key: str, partitions: int) -> int:
    """Which partition of an internal topic coordinates `key`: the hash of a Java string, as every Kafka has it."""
    value = 0
    data = key.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(data), 2):
        value = (31 * value + (data[at] << 8 | data[at + 1])) & 0xFFFFFFFF
    signed = value - (1 << 32) if value >> 31 else value
    # Java's smallest integer has no positive counterpart; Kafka takes 0 for it.
    return 0 if value == 1 << 31 else abs(signed) % partitions
