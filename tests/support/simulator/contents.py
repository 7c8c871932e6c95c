"""What producers send, and what readers make of it: every value is unique, so that a checker can name its batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.checkers_records import TOMBSTONE
from tests.support.history import Marker, StoredBatch

from holdfast.wire.batch import (
    HEADER_SIZE,
    BatchHeader,
    Record,
    build_batch,
    check_whole,
    iterate_records,
    read_header,
)
from holdfast.wire.codecs import Codec
from holdfast.wire.control_records import decode_end_marker

if TYPE_CHECKING:
    from tests.support.simulator.world import KnownPartition, World

_KEYS = tuple(b"key %d" % number for number in range(6))
_TOKEN = "token"
"""The header that carries a tombstone's value, as far as the history is concerned."""


class Contents(NamedTuple):
    """The records of a batch, and how the history names them."""

    values: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    records: tuple[Record, ...]


def make_contents(world: World, known: KnownPartition, producer: str, number: int) -> Contents:
    """Values no other batch has, mostly small, now and then larger than a page; in a compacted topic with keys."""
    rng = world.rng
    count = rng.choice((1, 1, 2, 3, 8))
    size = rng.choice((0, 10, 100, 400))
    if rng.random() < 0.06:
        count, size = 1, rng.choice((3_000, 6_000))
    padding = rng.choice((b"a", b"b", b"c")) * size
    values = tuple(b"%s:%d:%d:%s" % (producer.encode(), number, index, padding) for index in range(count))
    if not known.topic.is_compacted:
        return Contents(values, (), tuple(Record(i, 0, None, value) for i, value in enumerate(values)))
    keys = tuple(rng.choice(_KEYS) for _ in values)
    if rng.random() < 0.1:
        values = tuple(TOMBSTONE + value for value in values)
        return Contents(
            values,
            keys,
            tuple(Record(i, 0, keys[i], None, ((_TOKEN, value),)) for i, value in enumerate(values)),
        )
    return Contents(values, keys, tuple(Record(i, 0, keys[i], value) for i, value in enumerate(values)))


def encode(
    contents: Contents,
    timestamp: int,
    *,
    producer: tuple[int, int] = (-1, -1),
    sequence: int = -1,
    codec: Codec = Codec.NONE,
    is_transactional: bool = False,
) -> bytes:
    """The batch as a client sends it."""
    return build_batch(
        contents.records,
        base_timestamp=timestamp,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=sequence,
        codec=codec,
        is_transactional=is_transactional,
    )


class ReadBatch(NamedTuple):
    stored: StoredBatch
    producer_id: int
    """-1 when the batch belongs to no transaction."""


class BatchReader:
    """Record batches of fetch answers, decoded once each."""

    def __init__(self) -> None:
        self._known: dict[bytes, ReadBatch] = {}

    def read(self, records: Any) -> tuple[ReadBatch, ...]:
        data = bytes(records) if records else b""
        position = 0
        found = []
        while len(data) - position >= HEADER_SIZE:
            size = read_header(data, position).size
            if position + size > len(data):
                break
            raw = data[position : position + size]
            batch = self._known.get(raw)
            if batch is None:
                batch = self._known[raw] = _decode(raw)
            found.append(batch)
            position += size
        return tuple(found)


def _decode(raw: bytes) -> ReadBatch:
    header = check_whole(raw)
    records = tuple(iterate_records(raw))
    if header.is_control:
        return ReadBatch(_marker(header, records), header.producer_id)
    values = tuple(_value(record) for record in records)
    offsets: tuple[int, ...] = ()
    if len(records) != header.last_offset_delta + 1:
        offsets = tuple(header.base_offset + record.offset_delta for record in records)
    stored = StoredBatch(header.base_offset, values, header.leader_epoch, offsets, header.last_offset + 1)
    return ReadBatch(stored, header.producer_id if header.is_transactional else -1)


def _marker(header: BatchHeader, records: tuple[Record, ...]) -> StoredBatch:
    """A control batch; one that compaction has emptied ends nothing any more."""
    marker = None
    for record in records:
        end = decode_end_marker(record.key or b"", record.value or b"")
        if end is not None:
            marker = Marker(header.producer_id, "commit" if end.is_commit else "abort")
    return StoredBatch(header.base_offset, (), header.leader_epoch, (), header.last_offset + 1, marker)


def _value(record: Record) -> bytes:
    if record.value is not None:
        return record.value
    return next((value for name, value in record.headers if name in (_TOKEN, _TOKEN.encode()) and value), b"")


def hidden_batches(batches: Iterable[ReadBatch], aborted: Iterable[tuple[int, int]] | None) -> frozenset[int]:
    """First offsets of the batches that a reader of committed records leaves out.

    `aborted` are (producer id, first offset) of aborted transactions, as a fetch answer has them: each hides its
    producer's transactional batches from that offset up to its abort marker.
    """
    waiting = deque(sorted((first, producer) for producer, first in aborted or ()))
    hiding: set[int] = set()
    hidden: set[int] = set()
    for batch in batches:
        stored = batch.stored
        while waiting and waiting[0][0] < stored.next_offset:
            hiding.add(waiting.popleft()[1])
        if stored.marker is not None:
            if stored.marker.kind == "abort":
                hiding.discard(batch.producer_id)
        elif batch.producer_id in hiding:
            hidden.add(stored.base_offset)
    return frozenset(hidden)
