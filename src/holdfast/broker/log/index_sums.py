"""Checksums of a segment's index files, which have none themselves: `*.sums`, written with them.

Four CRC-32C, big endian: of the offset index, of the time index, of the transaction index (of nothing when there is no
file), and of these three. An index that it does not prove is rebuilt from the batches. So a lost or damaged index costs
time and never shows a record of an aborted transaction, nor hides one from a lookup by time. Apache Kafka writes none:
then the offset and the time index prove themselves by their last entries, and the transaction index is rebuilt.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from holdfast.atomic import read_whole
from holdfast.seams import FileSystem

NO_CONTENT: Final = crc32c(b"")
_SUMS: Final = Struct(">III")
_CHECK: Final = Struct(">I")


class IndexSums(NamedTuple):
    offsets: int
    times: int
    transactions: int

    @classmethod
    def of(cls, *contents: bytes) -> IndexSums:
        """Of the files' contents in the order of the fields."""
        return cls(*map(crc32c, contents))

    def to_bytes(self) -> bytes:
        data = _SUMS.pack(*self)
        return data + _CHECK.pack(crc32c(data))


def read_sums(fs: FileSystem, path: str) -> IndexSums | None:
    """None when there is no such file, or it does not hold."""
    try:
        data = read_whole(fs, path)
    except FileNotFoundError:
        return None
    if len(data) != _SUMS.size + _CHECK.size:
        return None
    sums = IndexSums._make(_SUMS.unpack_from(data))
    return sums if sums.to_bytes() == data else None
