"""The decoder once more, slowly and plainly: what `arrow` is compared with.

It is written on `holdfast.wire.batch`, record by record, and shares no code with the machine code beside it. Both
must give the same rows and counts for the same bytes, or both must refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.errors import InvalidRecords
from holdfast.reader.errors import CorruptBatch
from holdfast.reader.fetch_messages import Aborted
from holdfast.reader.layout import OFFSET_MAX, TIMESTAMP_MS_MAX
from holdfast.seams import Buffer
from holdfast.wire.batch import (
    HEADER_SIZE,
    MAGIC,
    MAGIC_OFFSET,
    BatchHeader,
    Record,
    batch_crc,
    parse_records,
    read_header,
    records_bytes,
)


class Row(NamedTuple):
    offset: int
    timestamp_us: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


@dataclass
class Decoded:
    """The rows of a range and what the other offsets are."""

    rows: list[Row] = field(default_factory=list)
    control: int = 0
    aborted: int = 0
    missing: int = 0
    next_offset: int = -1


def decode(
    data: Buffer, start: int, end: int, aborted: Sequence[Aborted] = (), *, check_crc: bool = True
) -> Decoded:
    """What whole batches at the beginning of `data` hold of the offsets from `start` up to `end`."""
    decoded = Decoded(next_offset=start)
    pending = sorted(aborted, key=lambda each: each.first_offset)
    open_ids: set[int] = set()
    try:
        for header, batch in _batches(data, end, check_crc):
            decoded.next_offset = max(decoded.next_offset, min(end, header.next_offset))
            if header.last_offset < start or header.base_offset >= end:
                continue
            if header.is_control or header.is_transactional:
                while pending and pending[0].first_offset <= header.last_offset:
                    open_ids.add(pending.pop(0).producer_id)
            is_aborted = not header.is_control and header.is_transactional and header.producer_id in open_ids
            _take(decoded, header, batch, start, end, is_aborted)
            if header.is_control and header.producer_id in open_ids and _is_abort(header, batch):
                open_ids.discard(header.producer_id)
    except (InvalidRecords, ValueError) as error:
        raise CorruptBatch(str(error)) from None
    told = len(decoded.rows) + decoded.control + decoded.aborted
    decoded.missing = decoded.next_offset - start - told
    return decoded


def _batches(data: Buffer, end: int, check_crc: bool) -> Iterator[tuple[BatchHeader, Buffer]]:
    """The whole batches up to the first that reaches `end`, or begins behind it."""
    position = 0
    behind = 0
    view = memoryview(data)
    while len(view) - position > MAGIC_OFFSET and behind < end:
        length = int.from_bytes(view[position + 8 : position + 12], "big", signed=True)
        if view[position + MAGIC_OFFSET] != MAGIC or length + 12 < HEADER_SIZE:
            raise ValueError("no batch of format 2")
        if length + 12 > len(view) - position:
            return
        batch = view[position : position + 12 + length]
        header = read_header(batch)
        if check_crc and batch_crc(batch) != header.crc:
            raise ValueError("the checksum does not hold")
        if not behind <= header.base_offset <= OFFSET_MAX or header.last_offset_delta < 0:
            raise ValueError("offsets out of order")
        if not 0 <= header.records_count <= header.last_offset_delta + 1:
            raise ValueError("a number of records that cannot be")
        behind = header.next_offset
        position += len(batch)
        yield header, batch


def _take(
    decoded: Decoded, header: BatchHeader, batch: Buffer, start: int, end: int, is_aborted: bool
) -> None:
    is_whole = header.base_offset >= start and header.last_offset < end
    is_dense = header.records_count == header.last_offset_delta + 1
    if header.is_control or is_aborted:
        if is_whole:
            count = header.records_count
        elif is_dense:
            count = min(header.next_offset, end) - max(header.base_offset, start)
        else:
            count = sum(
                start <= header.base_offset + each.offset_delta < end for each in _records(header, batch)
            )
        if header.is_control:
            decoded.control += count
        else:
            decoded.aborted += count
        return
    for each in _records(header, batch):
        offset = header.base_offset + each.offset_delta
        if start <= offset < end:
            decoded.rows.append(
                Row(
                    offset,
                    _timestamp_us(header, each),
                    int(header.is_log_append_time),
                    each.key,
                    each.value,
                    tuple((_readable(name), value) for name, value in each.headers),
                )
            )


def _records(header: BatchHeader, batch: Buffer) -> list[Record]:
    body: Any = b""
    if header.records_count or not header.codec:
        body = records_bytes(batch, header)
    records = list(parse_records(body))
    if len(records) != header.records_count:
        raise ValueError(f"{len(records)} records where {header.records_count} are announced")
    previous = -1
    for each in records:
        if not previous < each.offset_delta <= header.last_offset_delta:
            raise ValueError("a record's offset is out of order")
        if not -(2**63) <= each.timestamp_delta < 2**63:
            raise ValueError("a timestamp of more than 64 bits")
        previous = each.offset_delta
    return records


def _timestamp_us(header: BatchHeader, record: Record) -> int:
    timestamp = header.base_timestamp + record.timestamp_delta
    if header.is_log_append_time:
        timestamp = header.max_timestamp
    return min(max(timestamp, -TIMESTAMP_MS_MAX), TIMESTAMP_MS_MAX) * 1000


def _readable(name: str) -> str:
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _is_abort(header: BatchHeader, batch: Buffer) -> bool:
    if not header.records_count:  # compaction keeps the last batch of a producer, empty
        return False
    marker = next(parse_records(records_bytes(batch, header)), None)
    if marker is None:
        raise ValueError("a control batch without its record")
    return marker.key is not None and len(marker.key) >= 4 and marker.key[2:4] == b"\0\0"
