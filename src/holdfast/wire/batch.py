"""Record batches, format 2: the one shape a message has on the wire, on disk and in memory.

A batch is a header of 61 bytes and its records, perhaps compressed. The first 16 bytes (base offset,
length, leader epoch) are outside the checksum, so a broker assigns offsets without touching the rest.

Two readers with different duties live here:

- `check_batch` is what stands between a client and the log. It proves that the bytes are one whole
  batch whose checksum holds and whose records are as many as its header says, by walking their
  lengths. It never builds a record.
- `iterate_records` builds every record, for tools, compaction and tests.

Both decompress within a bound, and both raise `InvalidRecords` for anything that is not a batch:
never an IndexError, never a read past the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c
from kio.schema.errors import ErrorCode

from holdfast.errors import InvalidRecords
from holdfast.seams import Buffer
from holdfast.wire.codecs import Codec, compress, decompress

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
HEADER_SIZE: Final = 61
LOG_OVERHEAD: Final = 12
"""Base offset and length: what `batch_length` does not count."""
CRC_START: Final = 21
"""Where the bytes under the checksum begin: at the attributes."""
MAGIC: Final = 2
MAGIC_OFFSET: Final = 16
ATTRIBUTES_LOW_BYTE: Final = 22
"""Where the byte with codec, time type and the transactional bit stands."""
OLD_MESSAGE_BYTES_MIN: Final = 14
"""The least a message of format 0 can announce; a smaller length is damage in any format."""
NO_TIMESTAMP: Final = -1
TIMESTAMP_MIN: Final = -(2**63)
TIMESTAMP_MAX: Final = 2**63 - 1
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
SEQUENCE_MAX: Final = 2**31 - 1
RECORDS_BYTES_MAX: Final = 256 * 1024 * 1024
"""No batch may unpack to more: a bound on what a decompression bomb can cost."""

CODEC_MASK: Final = 0x07
LOG_APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20
DELETE_HORIZON: Final = 0x40

OFFSET_AND_EPOCH: Final = struct.Struct(">qii")
_CRC: Final = struct.Struct(">I")


class BatchHeader(NamedTuple):
    base_offset: int
    batch_length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int

    @property
    def size(self) -> int:
        return LOG_OVERHEAD + self.batch_length

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def is_log_append_time(self) -> bool:
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def has_delete_horizon(self) -> bool:
        return bool(self.attributes & DELETE_HORIZON)

    @property
    def last_sequence(self) -> int:
        """The sequence of the last record; sequences wrap to 0 after 2^31 - 1."""
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & SEQUENCE_MAX


class Record(NamedTuple):
    offset_delta: int
    timestamp_delta: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


_make_header = BatchHeader._make


def _corrupt(message: str) -> InvalidRecords:
    return InvalidRecords(ErrorCode.corrupt_message, message)


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header at `position`; its fields are not yet checked against anything."""
    if len(buffer) - position < HEADER_SIZE:
        raise _corrupt(f"{len(buffer) - position} bytes are less than a batch header's {HEADER_SIZE}")
    return _make_header(HEADER.unpack_from(buffer, position))


def nearest_timestamp(timestamp: int) -> int:
    """The time itself, or the nearest that a batch can hold: a base and a delta may add up to more."""
    return max(TIMESTAMP_MIN, min(timestamp, TIMESTAMP_MAX))


def batch_crc(batch: Buffer) -> int:
    """The checksum the batch should carry."""
    return crc32c(memoryview(batch)[CRC_START:])


def check_whole(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header of a whole batch at `position` whose checksum holds, or `InvalidRecords`."""
    header = read_header(buffer, position)
    if header.magic != MAGIC:
        raise InvalidRecords(
            ErrorCode.unsupported_for_message_format if header.magic in (0, 1) else ErrorCode.corrupt_message,
            f"record format {header.magic} is not served; only format 2 is"
            if header.magic in (0, 1)
            else f"no record format has the number {header.magic}",
        )
    size = LOG_OVERHEAD + header.batch_length
    if size < HEADER_SIZE:
        raise _corrupt(f"a batch of length {header.batch_length} cannot hold its own header")
    if len(buffer) - position < size:
        raise _corrupt(f"the batch says {size} bytes and only {len(buffer) - position} are there")
    found = crc32c(memoryview(buffer)[position + CRC_START : position + size])
    if found != header.crc:
        raise _corrupt(f"checksum {found:#010x} of the bytes is not the batch's {header.crc:#010x}")
    return header


def records_bytes(batch: Buffer, header: BatchHeader, limit_bytes: int = RECORDS_BYTES_MAX) -> Buffer:
    """The records of a batch, decompressed within `limit_bytes`."""
    body = memoryview(batch)[HEADER_SIZE : header.size]
    codec = header.attributes & CODEC_MASK
    if codec == 0:
        return body
    if codec > Codec.ZSTD:
        raise InvalidRecords(ErrorCode.unsupported_compression_type, f"no compression has the number {codec}")
    return decompress(Codec(codec), body, limit_bytes)


RUN_BEGINS: Final = 4
RUN_WINDOW: Final = 512
"""How many records of one size are counted at a stroke; bounds what a batch of adversarial sizes can cost."""


def count_records(data: Buffer, start: int = 0, end: int | None = None) -> int:
    """How many records `data` holds from `start` to `end`, found by walking their lengths; they must fill it exactly.

    Producers tend to send records of one size. After a few neighbours of the same length, the run they belong to
    is counted with strided slices, an order of magnitude faster than stepping from one to the next.
    """
    if not isinstance(data, bytes | bytearray):
        data = bytes(data)
    count = previous = alike = 0
    position = start
    if end is None:
        end = len(data)
    # One record by itself, as clients send that wait for each answer: its length, of two bytes, is all there is.
    size = end - start - 2
    if 0x40 <= size < 0x2000 and data[start] == size << 1 & 0x7F | 0x80 and data[start + 1] == size >> 6:
        return 1
    try:
        while position < end:
            # Most lengths fit one or two bytes of zigzag varint; the last branch is the general case.
            length = data[position]
            width = 1
            if length >= 0x80:
                second = data[position + 1]
                if second < 0x80:
                    length = (length & 0x7F) | second << 7
                    width = 2
                else:
                    length, after = _read_unsigned(data, position)
                    width = after - position
            if length & 1:
                raise _corrupt("a record has a negative length")
            position += width + (length >> 1)
            count += 1
            if length != previous:
                previous = length
                alike = 0
                continue
            alike += 1
            if alike == RUN_BEGINS:
                alike = 0
                step = width + (length >> 1)
                run = _run_length(data, position, end, step, data[position - step : position - step + width])
                position += run * step
                count += run
    except IndexError:
        raise _corrupt("the last record is cut off inside its length") from None
    if position != end:
        raise _corrupt("the last record is cut off")
    return count


def _run_length(
    data: bytes | bytearray, position: int, end: int, step: int, prefix: bytes | bytearray
) -> int:
    """How many records from `position` to `end`, `step` bytes apart, begin with the same length prefix."""
    run = RUN_WINDOW
    for at in range(len(prefix)):
        column = data[position + at : min(position + RUN_WINDOW * step, end) : step]
        run = min(run, len(column) - len(column.lstrip(prefix[at : at + 1])))
    return run


def check_batch(batch: Buffer, *, limit_bytes: int = RECORDS_BYTES_MAX) -> tuple[BatchHeader, Buffer]:
    """One whole client batch and nothing else: its header and its unpacked records.

    Checksum, format, codec, count = last delta + 1 = records found, sequence and producer fields that fit
    together. What depends on the topic (size, timestamps, keys, producer state) is the caller's.
    """
    try:
        header = check_whole(batch)
    except InvalidRecords as error:
        raise _as_sent_by_client(batch, error) from None
    if header.base_offset != 0:
        raise InvalidRecords(
            ErrorCode.invalid_record, f"a client's batch begins at offset 0, not at {header.base_offset}"
        )
    if header.size != len(batch):
        raise InvalidRecords(
            ErrorCode.invalid_record,
            f"a produce request carries exactly one batch per partition; {len(batch) - header.size} bytes follow it",
        )
    count = header.records_count
    if count <= 0 or header.last_offset_delta != count - 1:
        raise InvalidRecords(
            ErrorCode.invalid_record,
            f"{count} records do not fit a last offset delta of {header.last_offset_delta}",
        )
    if header.attributes & CONTROL:
        raise InvalidRecords(ErrorCode.invalid_record, "clients may not write control batches")
    if header.producer_id >= 0:
        if header.producer_epoch < 0 or header.base_sequence < 0:
            raise InvalidRecords(
                ErrorCode.invalid_record, "a batch with a producer id needs an epoch and a sequence"
            )
    elif header.attributes & TRANSACTIONAL:
        raise InvalidRecords(ErrorCode.invalid_record, "a transactional batch needs a producer id")
    try:
        data = records_bytes(batch, header, limit_bytes)
        # Uncompressed records are counted in place: a megabyte need not be copied to be walked.
        found = count_records(data) if header.attributes & CODEC_MASK else count_records(batch, HEADER_SIZE)
    except InvalidRecords as error:
        if error.code is ErrorCode.corrupt_message:
            # The checksum holds, so this is what the client meant. CORRUPT_MESSAGE would have it try again.
            raise InvalidRecords(ErrorCode.invalid_record, error.message) from None
        raise
    if found != count:
        raise InvalidRecords(
            ErrorCode.invalid_record, f"the header counts {count} records and the batch holds {found}"
        )
    return header, data


def _as_sent_by_client(batch: Buffer, error: InvalidRecords) -> InvalidRecords:
    """What is wrong with a client's batch that is not whole, under the code Kafka gives it.

    CORRUPT_MESSAGE makes clients send again, which helps against damage on the way. A batch cut short or of a
    format before 2 is what the client meant to send: INVALID_RECORD.
    """
    if len(batch) <= MAGIC_OFFSET:
        return InvalidRecords(ErrorCode.invalid_record, error.message)
    length = int.from_bytes(batch[8:12], "big", signed=True)
    magic = batch[MAGIC_OFFSET]
    if length >= OLD_MESSAGE_BYTES_MIN and (
        magic < MAGIC or (magic == MAGIC and len(batch) < LOG_OVERHEAD + length)
    ):
        return InvalidRecords(ErrorCode.invalid_record, error.message)
    return _corrupt(error.message)


def _read_unsigned(data: Buffer, position: int) -> tuple[int, int]:
    value = 0
    shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise _corrupt("a variable-length integer does not end")


def _read_signed(data: Buffer, position: int) -> tuple[int, int]:
    value, position = _read_unsigned(data, position)
    return (value >> 1) ^ -(value & 1), position


def _take(data: Buffer, position: int, length: int) -> tuple[bytes, int]:
    end = position + length
    if end > len(data):
        raise _corrupt("a record's field reaches past the end of its batch")
    return bytes(data[position:end]), end


def _parse_record(data: Buffer, position: int) -> tuple[Record, int]:
    length, position = _read_signed(data, position)
    end = position + length
    if length < 0 or end > len(data):
        raise _corrupt("a record reaches past the end of its batch")
    position += 1  # record attributes: none are defined
    timestamp_delta, position = _read_signed(data, position)
    offset_delta, position = _read_signed(data, position)
    key_length, position = _read_signed(data, position)
    key: bytes | None = None
    if key_length >= 0:
        key, position = _take(data, position, key_length)
    value_length, position = _read_signed(data, position)
    value: bytes | None = None
    if value_length >= 0:
        value, position = _take(data, position, value_length)
    headers_count, position = _read_signed(data, position)
    if headers_count < 0 or headers_count > length:
        raise _corrupt(f"a record cannot have {headers_count} headers")
    headers = []
    for _ in range(headers_count):
        name_length, position = _read_signed(data, position)
        if name_length < 0:
            raise _corrupt("a record header has no name")
        name, position = _take(data, position, name_length)
        header_length, position = _read_signed(data, position)
        header_value: bytes | None = None
        if header_length >= 0:
            header_value, position = _take(data, position, header_length)
        headers.append((name.decode("utf-8", "surrogateescape"), header_value))
    if position != end:
        raise _corrupt(f"a record of {length} bytes ends {position - end:+d} bytes off")
    return Record(offset_delta, timestamp_delta, key, value, tuple(headers)), position


def iterate_records(batch: Buffer, *, limit_bytes: int = RECORDS_BYTES_MAX) -> Iterator[Record]:
    """Every record of a whole batch, in order."""
    header = check_whole(batch)
    return parse_records(records_bytes(batch, header, limit_bytes))


def parse_records(data: Buffer) -> Iterator[Record]:
    """Every record of unpacked record bytes."""
    position = 0
    while position < len(data):
        try:
            record, position = _parse_record(data, position)
        except IndexError:
            raise _corrupt("a record is cut off") from None
        yield record


def _signed(value: int) -> bytes:
    encoded = (value << 1) ^ (value >> 63)
    if encoded < 0x80:
        return bytes((encoded,))
    out = bytearray()
    while encoded >= 0x80:
        out.append(encoded & 0x7F | 0x80)
        encoded >>= 7
    out.append(encoded)
    return bytes(out)


def encode_record(record: Record) -> bytes:
    parts = [b"\x00", _signed(record.timestamp_delta), _signed(record.offset_delta)]
    for field in (record.key, record.value):
        if field is None:
            parts.append(b"\x01")
        else:
            parts += (_signed(len(field)), field)
    parts.append(_signed(len(record.headers)))
    for name, value in record.headers:
        encoded = name.encode("utf-8", "surrogateescape")
        parts += (_signed(len(encoded)), encoded)
        if value is None:
            parts.append(b"\x01")
        else:
            parts += (_signed(len(value)), value)
    body = b"".join(parts)
    return _signed(len(body)) + body


def seal(header: BatchHeader, records: Buffer) -> bytes:
    """A batch of `header` and already encoded (and compressed) `records`, with length and checksum set."""
    batch = bytearray(HEADER_SIZE)
    HEADER.pack_into(
        batch, 0, *header._replace(batch_length=HEADER_SIZE - LOG_OVERHEAD + len(records), magic=MAGIC, crc=0)
    )
    batch += records
    _CRC.pack_into(batch, 17, crc32c(memoryview(batch)[CRC_START:]))
    return bytes(batch)


def build_batch(
    records: Sequence[Record],
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    base_timestamp: int = 0,
    codec: Codec = Codec.NONE,
    level: int | None = None,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    is_transactional: bool = False,
    is_control: bool = False,
    log_append_time: bool = False,
    max_timestamp: int | None = None,
    last_offset_delta: int | None = None,
    delete_horizon: bool = False,
) -> bytes:
    """A whole batch; timestamps of records are deltas to `base_timestamp`."""
    body = b"".join(map(encode_record, records))
    attributes = (
        int(codec)
        | (LOG_APPEND_TIME if log_append_time else 0)
        | (TRANSACTIONAL if is_transactional else 0)
        | (CONTROL if is_control else 0)
        | (DELETE_HORIZON if delete_horizon else 0)
    )
    if max_timestamp is None:
        max_timestamp = base_timestamp + max((r.timestamp_delta for r in records), default=0)
    if last_offset_delta is None:
        last_offset_delta = records[-1].offset_delta if records else 0
    header = BatchHeader(
        base_offset=base_offset,
        batch_length=0,
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=attributes,
        last_offset_delta=last_offset_delta,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        records_count=len(records),
    )
    return seal(header, compress(codec, body, level) if codec else body)


def make_batch(
    values: Iterable[bytes | tuple[bytes | None, bytes | None] | None], *, timestamp: int = 0, **options: int
) -> bytes:
    """A batch of plain values, or (key, value) pairs, all of one time: for tests and tools."""
    records = [
        Record(index, 0, *(item if isinstance(item, tuple) else (None, item)))
        for index, item in enumerate(values)
    ]
    return build_batch(records, base_timestamp=timestamp, **options)  # type: ignore[arg-type]


def with_log_append_time(header: BatchHeader, batch: Buffer, now_ms: int) -> bytes:
    """The same batch stamped by the broker: type and maximum change, so the checksum does too."""
    stamped = header._replace(attributes=header.attributes | LOG_APPEND_TIME, max_timestamp=now_ms)
    return seal(stamped, memoryview(batch)[HEADER_SIZE : header.size])
