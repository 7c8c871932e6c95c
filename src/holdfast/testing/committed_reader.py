"""What a read_committed consumer makes of a fetch: the rules every Kafka client applies to one answer.

An answer holds whole batches, the last of which may be cut, and a list of aborted transactions: producer id and
first offset. The reader walks the batches in order. Once it has reached a transaction's first offset, that
producer's transactional batches are dropped, until the producer's abort marker. Control batches are never shown.
Nothing is remembered from one fetch to the next, so each answer must tell all that its batches need.

Tests and the simulator read with these rules, so that a list which lacks a transaction, or a bound that lets an
undecided one through, shows up as a record that nobody should see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from holdfast.broker.log.log import Log
from holdfast.wire.batch import HEADER_SIZE, BatchHeader, Record, iterate_records, read_header
from holdfast.wire.control_records import decode_end_marker
from holdfast.wire.positions import LogPosition


class Shown(NamedTuple):
    """One record as the application gets it."""

    offset: int
    key: bytes | None
    value: bytes | None


class ReadResult(NamedTuple):
    records: list[Shown]
    next_offset: int
    """Where the next fetch begins: behind the last whole batch, shown or not."""


def whole_batches(data: bytes) -> Iterator[tuple[BatchHeader, bytes]]:
    """Every batch that is there in full; a cut one at the end is fetched again."""
    position = 0
    while position + HEADER_SIZE <= len(data):
        header = read_header(data, position)
        if position + header.size > len(data):
            return
        yield header, data[position : position + header.size]
        position += header.size


class Visible(NamedTuple):
    records: list[tuple[int, BatchHeader, Record]]
    """Each with its offset and the head of its batch."""
    next_offset: int


def visible(data: bytes, fetch_offset: int, aborted: Iterable[tuple[int, int]] | None = None) -> Visible:
    """What an application is shown of one fetch. Without a list, as read_uncommitted: nothing is dropped."""
    waiting = sorted((first_offset, producer_id) for producer_id, first_offset in aborted or ())
    dropped: set[int] = set()
    shown: list[tuple[int, BatchHeader, Record]] = []
    next_offset = fetch_offset
    for header, batch in whole_batches(data):
        records = list(iterate_records(batch))
        next_offset = header.next_offset
        while waiting and waiting[0][0] <= header.last_offset:
            dropped.add(waiting.pop(0)[1])
        if header.is_control:
            if _is_abort(records):
                dropped.discard(header.producer_id)
            continue
        if header.is_transactional and header.producer_id in dropped:
            continue
        shown += [
            (offset, header, record)
            for record in records
            if (offset := header.base_offset + record.offset_delta) >= fetch_offset
        ]
    return Visible(shown, next_offset)


def read_answer(
    data: bytes, fetch_offset: int, aborted: Iterable[tuple[int, int]] | None = None
) -> ReadResult:
    """The records of one fetch, as `visible` has them."""
    seen = visible(data, fetch_offset, aborted)
    return ReadResult(
        [Shown(at, record.key, record.value) for at, _, record in seen.records], seen.next_offset
    )


def _is_abort(records: list[Record]) -> bool:
    for record in records:
        marker = decode_end_marker(record.key, record.value)
        return marker is not None and not marker.is_commit
    return False


Fetch = Callable[[int], tuple[bytes, Iterable[tuple[int, int]] | None]]
"""From an offset: the bytes of an answer, and its aborted transactions."""


def read_through(fetch: Fetch, offset: int) -> list[Shown]:
    """Everything a consumer sees from `offset` until an answer brings it no further."""
    shown: list[Shown] = []
    while True:
        data, aborted = fetch(offset)
        result = read_answer(data, offset, aborted)
        shown += result.records
        if result.next_offset <= offset:
            return shown
        offset = result.next_offset


def read_committed(
    log: Log, end: LogPosition, *, offset: int | None = None, max_bytes: int = 1
) -> list[Shown]:
    """What a read_committed consumer sees of a log whose last stable offset is at `end`, one small fetch at a time."""

    def fetch(at: int) -> tuple[bytes, Iterable[tuple[int, int]]]:
        piece = log.read(at, max_bytes, end, at_least_one=True)
        if piece is None:
            return b"", ()
        return piece.file.pread(piece.length, piece.position), log.aborted_in(at, piece, end.offset)

    return read_through(fetch, log.start_offset if offset is None else offset)
