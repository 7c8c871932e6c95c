"""What a `.log` file holds, batch by batch, and every place where it is not what an append would have written.

Unlike recovery this reader does not stop at the first damage. It names the place, looks for the next whole batch,
and goes on: whoever inspects a damaged file wants to know what is behind it. It trusts nothing it reads: a length
is believed only as far as the file goes, a header only when its batch's checksum holds.

Events are plain documents with a `type`; `finding` is the one that means trouble. No file is ever written.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from crc32c import crc32c
from kio.schema.errors import ErrorCode

from holdfast.broker.dump.decoders import Decoded, Undecodable, decode_raft_control
from holdfast.broker.log.scan import CHUNK_BYTES, find_later_batch
from holdfast.broker.log.write_ahead import content_end
from holdfast.errors import CorruptLog, InvalidRecords
from holdfast.seams import File
from holdfast.wire import batch
from holdfast.wire.codecs import Codec
from holdfast.wire.control_records import decode_end_marker

Event: TypeAlias = dict[str, Any]
Decoder: TypeAlias = Callable[[bytes | None, bytes | None], Decoded]

INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True)
class DumpOptions:
    deep: bool = False
    """Open every batch: list its records and check that they are what the header says."""
    payload: bool = False
    """Show keys, values and headers of records; implies `deep`."""
    decoder: Decoder | None = None
    """Read keys and values as records of an internal topic; implies `payload`."""
    verify: bool = False
    """Check everything, show only what is wrong."""
    verify_index_only: bool = False
    index_sanity_check: bool = False
    message_bytes_max: int = batch.RECORDS_BYTES_MAX
    """A batch that is larger, packed or unpacked, is checked by its checksum and not opened."""
    bytes_max: int = INT32_MAX
    """Stop after so many bytes of batches."""

    @property
    def shows_records(self) -> bool:
        return (self.deep or self.payload or self.decoder is not None) and not self.verify

    @property
    def opens_batches(self) -> bool:
        return self.shows_records or self.verify


def finding(path: str, message: str, position: int | None = None, offset: int | None = None) -> Event:
    """Something that no append could have left behind."""
    return {"type": "finding", "path": path, "position": position, "offset": offset, "message": message}


def dump_batches(
    file: File, base_offset: int, options: DumpOptions, *, is_active: bool = False
) -> Iterator[Event]:
    """Batches (and records, when asked) of a log file in order, findings among them, a summary at the end.

    Behind the last batch of an active segment there may be zeros, written ahead; a sealed one has none.
    """
    return _Walk(file, base_offset, options, is_active).events()


class _Walk:
    def __init__(self, file: File, base_offset: int, options: DumpOptions, is_active: bool) -> None:
        self.file = file
        self.path = file.path
        self.options = options
        self.end = file.size()
        # Before anything else: a broker at work may be about to write there.
        self.zeros_from = content_end(file, 0, self.end) if is_active else self.end
        self.position = 0
        self.next_offset = base_offset
        self.batches = 0
        self.records = 0
        self.findings = 0

    def events(self) -> Iterator[Event]:
        while self.position < min(self.end, self.options.bytes_max):
            if self.position >= self.zeros_from:
                length = self.end - self.position
                yield {
                    "type": "written_ahead",
                    "path": self.path,
                    "position": self.position,
                    "bytes": length,
                }
                break
            try:
                header = self._header()
            except InvalidRecords as problem:
                yield self._find(problem.message)
                if not (yield from self._skip_damage()):
                    break
                continue
            yield from self._batch(header)
        yield {
            "type": "summary",
            "path": self.path,
            "batches": self.batches,
            "records": self.records,
            "bytes": self.position,
            "end_offset": self.next_offset,
            "findings": self.findings,
        }

    def _find(self, message: str, offset: int | None = None) -> Event:
        self.findings += 1
        return finding(self.path, message, self.position, offset)

    def _header(self) -> batch.BatchHeader:
        """The header here, or the reason why there cannot be one."""
        header = batch.read_header(self.file.pread(batch.HEADER_SIZE, self.position))
        left = self.end - self.position
        problem = None
        if header.magic != batch.MAGIC:
            problem = f"record format {header.magic} where {batch.MAGIC} is expected"
        elif header.batch_length < batch.HEADER_SIZE - batch.LOG_OVERHEAD:
            problem = f"batch length {header.batch_length} is less than a header's"
        elif header.size > left:
            problem = f"a batch of {header.size} bytes is cut off after {left}"
        elif header.base_offset < self.next_offset:
            problem = f"offset {header.base_offset} where {self.next_offset} or more is expected"
        elif header.last_offset_delta < 0 or header.records_count < 0:
            problem = f"{header.records_count} records with a last offset delta of {header.last_offset_delta}"
        if problem is not None:
            raise InvalidRecords(ErrorCode.corrupt_message, problem)
        return header

    def _skip_damage(self) -> Generator[Event, None, bool]:
        """Go to the next whole batch; the generator's value says whether there is one."""
        later = find_later_batch(self.file, self.position, self.next_offset, self.end)
        if later is None:
            left = self.end - self.position
            yield self._find(f"the last {left} bytes of the file hold no whole batch: a torn tail")
            return False
        gap = later.position - self.position
        message = (
            f"{gap} bytes are unreadable, and a whole batch follows at {later.position}: a damaged middle"
        )
        yield self._find(message, later.header.base_offset)
        self.position = later.position
        return True

    def _batch(self, header: batch.BatchHeader) -> Iterator[Event]:
        data = None
        if header.size <= self.options.message_bytes_max:
            data = self.file.pread(header.size, self.position)
            crc = crc32c(memoryview(data)[batch.CRC_START :])
        else:
            crc = self._crc_in_chunks(header)
        valid = crc == header.crc
        if not self.options.verify:
            yield batch_event(header, self.position, valid)
        if not valid:
            yield self._find(
                f"checksum {crc:#010x} of the bytes is not the batch's {header.crc:#010x}", header.base_offset
            )
            # Its length is outside the checksum's proof too: believe it only when a batch begins where it ends.
            if not self._begins_batch(self.position + header.size):
                yield from self._skip_damage_or_end()
                return
        elif data is not None and self.options.opens_batches:
            yield from self._records(header, data)
        self.batches += 1
        if valid:
            self.records += header.records_count
            self.next_offset = header.next_offset
        self.position += header.size

    def _skip_damage_or_end(self) -> Iterator[Event]:
        if not (yield from self._skip_damage()):
            self.position = self.end

    def _begins_batch(self, position: int) -> bool:
        if position == self.end:
            return True
        data = self.file.pread(batch.HEADER_SIZE, position)
        if len(data) < batch.HEADER_SIZE:
            return False
        header = batch.read_header(data)
        return (
            header.magic == batch.MAGIC
            and batch.HEADER_SIZE <= header.size <= self.end - position
            and header.base_offset >= self.next_offset
        )

    def _crc_in_chunks(self, header: batch.BatchHeader) -> int:
        crc = 0
        position, end = self.position + batch.CRC_START, self.position + header.size
        while position < end:
            data = self.file.pread(min(CHUNK_BYTES, end - position), position)
            crc = crc32c(data, crc)
            position += len(data)
        return crc

    def _records(self, header: batch.BatchHeader, data: bytes) -> Iterator[Event]:
        count = 0
        last_delta = -1
        try:
            for record in batch.parse_records(
                batch.records_bytes(data, header, self.options.message_bytes_max)
            ):
                if not last_delta < record.offset_delta <= header.last_offset_delta:
                    problem = f"record {count} has offset delta {record.offset_delta} after {last_delta}"
                    yield self._find(problem, header.base_offset)
                last_delta = record.offset_delta
                count += 1
                if self.options.shows_records:
                    yield record_event(header, record, self.options)
        except InvalidRecords as problem:
            yield self._find(f"its records cannot be read: {problem.message}", header.base_offset)
            return
        if count != header.records_count:
            yield self._find(
                f"the header counts {header.records_count} records and the batch holds {count}",
                header.base_offset,
            )


def batch_event(header: batch.BatchHeader, position: int, valid: bool) -> Event:
    codec = header.codec
    return {
        "type": "batch",
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "count": header.records_count,
        "base_sequence": header.base_sequence,
        "last_sequence": header.last_sequence,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "leader_epoch": header.leader_epoch,
        "is_transactional": header.is_transactional,
        "is_control": header.is_control,
        "delete_horizon_ms": header.base_timestamp if header.has_delete_horizon else None,
        "position": position,
        "timestamp_type": _timestamp_type(header),
        "max_timestamp_ms": header.max_timestamp,
        "size": header.size,
        "magic": header.magic,
        "codec": Codec(codec).name.lower() if codec <= Codec.ZSTD else f"unknown ({codec})",
        "crc": header.crc,
        "is_valid": valid,
    }


def record_event(header: batch.BatchHeader, record: batch.Record, options: DumpOptions) -> Event:
    sequence = batch.NO_SEQUENCE
    if header.base_sequence != batch.NO_SEQUENCE:
        sequence = (header.base_sequence + record.offset_delta) & batch.SEQUENCE_MAX
    event: Event = {
        "type": "record",
        "offset": header.base_offset + record.offset_delta,
        "timestamp_type": _timestamp_type(header),
        "timestamp_ms": header.max_timestamp
        if header.is_log_append_time
        else header.base_timestamp + record.timestamp_delta,
        "key_size": -1 if record.key is None else len(record.key),
        "value_size": -1 if record.value is None else len(record.value),
        "sequence": sequence,
        "header_keys": [name for name, _ in record.headers],
    }
    if header.is_control:
        event["control"] = _control(record)
    elif options.decoder is not None:
        event |= _decoded(record, options.decoder)
    elif options.payload:
        event |= _payload(record)
    return event


def _timestamp_type(header: batch.BatchHeader) -> str:
    return "LogAppendTime" if header.is_log_append_time else "CreateTime"


def _control(record: batch.Record) -> Event:
    try:
        marker = decode_end_marker(record.key, record.value)
        if marker is not None:
            kind = "COMMIT" if marker.is_commit else "ABORT"
            return {"type": kind, "data": {"coordinator_epoch": marker.coordinator_epoch}}
        return decode_raft_control(record.key, record.value)
    except (CorruptLog, Undecodable) as problem:
        return {"type": "UNKNOWN", "data": {"problem": str(problem)}}


def _decoded(record: batch.Record, decoder: Decoder) -> Event:
    try:
        decoded = decoder(record.key, record.value)
    except Undecodable as problem:
        return _payload(record) | {"undecodable": str(problem)}
    return {"key": decoded.key, "value": decoded.value}


def _payload(record: batch.Record) -> Event:
    key, key_encoding = as_text(record.key)
    value, value_encoding = as_text(record.value)
    headers = []
    for name, data in record.headers:
        text, encoding = as_text(data)
        headers.append({"key": name, "value": text, "value_encoding": encoding})
    return {
        "key": key,
        "key_encoding": key_encoding,
        "value": value,
        "value_encoding": value_encoding,
        "headers": headers,
    }


def as_text(data: bytes | None) -> tuple[str | None, str | None]:
    """Text and its encoding: as it stands when it is UTF-8, base64 when not."""
    if data is None:
        return None, None
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode("ascii"), "base64"
