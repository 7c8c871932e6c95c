"""The `.snapshot` file: what a partition knows of its producers at the offset the file is named after.

Kafka's format, version 1, big endian:

    int16 version, uint32 CRC-32C of all that follows, int32 count, then per entry
    int64 producer id, int16 epoch, int32 last sequence, int64 last offset, int32 offset delta,
    int64 timestamp, int32 coordinator epoch, int64 first offset of the open transaction (−1: none)

An entry names one batch: its last offset, its last sequence, and how many offsets (and so sequences) it
spans beyond the first. Last offset −1 means that no batch of this epoch is known.

Kafka writes one entry per producer, its newest batch, so that after a restart a retry of an older batch is
refused as out of sequence although it had been stored. We write an entry for each batch we remember, at
most five per producer, oldest first, and before them the newest with the broker's time when the producer
was heard of later than its records' timestamps say. Kafka reads such a file as it should be read, since of
several entries for one producer the last wins; and we read Kafka's. A retry therefore gets the same answer
before and after a restart.

Any change of a byte is found by the checksum: a snapshot is whole or it is `CorruptLog`, and then an older
one and the log rebuild the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from holdfast.errors import CorruptLog
from holdfast.seams import Buffer

SNAPSHOT_VERSION = 1
SNAPSHOT_SUFFIX = ".snapshot"

_PREFIX = Struct(">hI")
_COUNT = Struct(">i")
_ENTRY = Struct(">qhiqiqiq")
_HEADER_BYTES = _PREFIX.size + _COUNT.size


class SnapshotEntry(NamedTuple):
    producer_id: int
    epoch: int
    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int
    coordinator_epoch: int
    transaction_first_offset: int
    """−1 when no transaction is open."""


def encode_snapshot(entries: Sequence[SnapshotEntry]) -> bytes:
    body = b"".join((_COUNT.pack(len(entries)), *(_ENTRY.pack(*entry) for entry in entries)))
    return _PREFIX.pack(SNAPSHOT_VERSION, crc32c(body)) + body


def decode_snapshot(data: Buffer, path: str) -> list[SnapshotEntry]:
    """The entries in file order; `CorruptLog` naming `path` unless every byte is as written."""
    if len(data) < _HEADER_BYTES:
        raise CorruptLog(f"{path}: {len(data)} bytes are too few for a producer snapshot")
    version, crc = _PREFIX.unpack_from(data)
    if version != SNAPSHOT_VERSION:
        raise CorruptLog(f"{path}: producer snapshot version {version} is unknown")
    body = memoryview(data)[_PREFIX.size :]
    computed = crc32c(body)
    if crc != computed:
        raise CorruptLog(f"{path}: checksum {crc:#010x} stored, {computed:#010x} computed")
    (count,) = _COUNT.unpack_from(body)
    if count * _ENTRY.size != len(body) - _COUNT.size:
        raise CorruptLog(f"{path}: {count} entries announced in {len(data)} bytes")
    return [SnapshotEntry._make(fields) for fields in _ENTRY.iter_unpack(body[_COUNT.size :])]
