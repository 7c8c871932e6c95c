"""The last record of each key, as compaction sees it: what a compacted log must keep.

Records of a transaction count when it is committed, and not at all when it is aborted; those of an open one are
`pending`. Batches come in the order of the log, from a file or over the wire.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

from holdfast.broker.log.scan import Batch
from holdfast.errors import CorruptLog
from holdfast.wire.batch import BatchHeader, Record, parse_records, records_bytes
from holdfast.wire.control_records import decode_end_marker

T = TypeVar("T")

TABLE_MAGIC: Final = b"hf-keys1"
_ROW: Final = struct.Struct(">16sq16s?")


class Latest(NamedTuple, Generic[T]):
    offset: int
    content: T


class LastByKey(Generic[T]):
    """`content_of` makes of a record what is kept of it, `key_of` of its key."""

    def __init__(
        self, key_of: Callable[[bytes], bytes], content_of: Callable[[BatchHeader, Record], T]
    ) -> None:
        self._key_of = key_of
        self._content_of = content_of
        self.latest: dict[bytes, Latest[T]] = {}
        self._pending: dict[int, list[tuple[bytes, Latest[T]]]] = {}

    def add(self, batch: Batch) -> None:
        header = batch.header
        records = parse_records(records_bytes(batch.data, header))
        if header.is_control:
            if header.is_transactional:
                self._decide(header.producer_id, records)
            return
        found = [
            (
                self._key_of(record.key),
                Latest(header.base_offset + record.offset_delta, self._content_of(header, record)),
            )
            for record in records
            if record.key is not None
        ]
        if header.is_transactional:
            self._pending.setdefault(header.producer_id, []).extend(found)
        else:
            self._apply(found)

    def _decide(self, producer_id: int, records: Iterable[Record]) -> None:
        for record in records:
            marker = decode_end_marker(record.key, record.value)
            if marker is not None:
                pending = self._pending.pop(producer_id, [])
                if marker.is_commit:
                    self._apply(pending)

    def _apply(self, found: Iterable[tuple[bytes, Latest[T]]]) -> None:
        for key, latest in found:
            known = self.latest.get(key)
            if known is None or known.offset < latest.offset:
                self.latest[key] = latest

    def pending(self) -> Iterator[tuple[int, bytes, Latest[T]]]:
        """What open transactions wrote: by which producer, under which key."""
        for producer_id, found in self._pending.items():
            yield from ((producer_id, key, latest) for key, latest in found)

    def add_pending(self, producer_id: int, key: bytes, latest: Latest[T]) -> None:
        self._pending.setdefault(producer_id, []).append((key, latest))


class RecordDigest(NamedTuple):
    """What the table of keys has of a record."""

    digest: bytes
    is_tombstone: bool


def key_digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()


def record_digest(header: BatchHeader, record: Record) -> RecordDigest:
    """Of what a consumer sees: time, key, value and headers; not of how they are packed."""
    found = hashlib.blake2b(digest_size=16)
    appended = header.is_log_append_time
    timestamp = header.max_timestamp if appended else header.base_timestamp + record.timestamp_delta
    found.update(struct.pack(">q", timestamp))
    for part in (record.key, record.value, *(each for pair in record.headers for each in pair)):
        if isinstance(part, str):
            part = part.encode("utf-8", "surrogateescape")
        found.update(struct.pack(">i", -1 if part is None else len(part)))
        found.update(part or b"")
    return RecordDigest(found.digest(), record.value is None)


def keys_of_log() -> LastByKey[RecordDigest]:
    return LastByKey(key_digest, record_digest)


def encode_table(latest: Mapping[bytes, Latest[RecordDigest]]) -> bytes:
    rows = (_ROW.pack(key, each.offset, *each.content) for key, each in sorted(latest.items()))
    return TABLE_MAGIC + b"".join(rows)


def decode_table(data: bytes, path: str) -> dict[bytes, Latest[RecordDigest]]:
    body = memoryview(data)[len(TABLE_MAGIC) :]
    if data[: len(TABLE_MAGIC)] != TABLE_MAGIC or len(body) % _ROW.size:
        raise CorruptLog(f"{path} is no table of keys")
    return {
        key: Latest(offset, RecordDigest(digest, is_tombstone))
        for key, offset, digest, is_tombstone in _ROW.iter_unpack(body)
    }
