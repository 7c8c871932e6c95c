"""Messages of a log changed where they lie: the broker's own files, patched as somebody with the disk would.

A value keeps its length, and the batch gets the checksum of what it holds now, so that no reader has a reason to look
twice. Batches are not compressed here: producers and sinks of these worlds are told so.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HEADER_BYTES: Final = 61
ATTRIBUTES_AT: Final = 21
CRC_AT: Final = 17
_POLYNOMIAL: Final = 0x82F63B78
Span = tuple[int, int]


def _table() -> list[int]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return found


_TABLE: Final = _table()


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value = (value >> 8) ^ _TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Stored:
    """A record, and where its parts lie in a file."""

    path: Path
    batch: Span
    partition: int
    offset: int
    key: Span | None
    value: Span | None
    headers: tuple[tuple[str, Span | None], ...]

    def bytes_at(self, span: Span) -> bytes:
        return self.path.read_bytes()[span[0] : span[1]]

    def patch(self, span: Span, new: bytes) -> None:
        assert len(new) == span[1] - span[0]
        data = bytearray(self.path.read_bytes())
        assert data[span[0] : span[1]] != new
        data[span[0] : span[1]] = new
        begin, end = self.batch
        struct.pack_into(">I", data, begin + CRC_AT, crc32c(bytes(data[begin + ATTRIBUTES_AT : end])))
        with open(self.path, "r+b") as file:
            file.seek(begin)
            file.write(data[begin:end])


def records(paths: list[Path]) -> Iterator[Stored]:
    """Every data record of these files, aborted ones too."""
    for path in paths:
        data = path.read_bytes()
        partition = int(path.parent.name.rpartition("-")[2])
        at = 0
        while at + HEADER_BYTES <= len(data):
            base, length = struct.unpack_from(">qi", data, at)
            if length <= 0:
                break
            end = at + 12 + length
            (attributes,) = struct.unpack_from(">h", data, at + ATTRIBUTES_AT)
            assert not attributes & 7, f"{path} has compressed batches"
            if not attributes & 0x20:
                yield from _in_batch(path, data, (at, end), partition, base)
            at = end


def _in_batch(path: Path, data: bytes, batch: Span, partition: int, base: int) -> Iterator[Stored]:
    (count,) = struct.unpack_from(">i", data, batch[0] + 57)
    at = batch[0] + HEADER_BYTES
    for _ in range(count):
        length, at = _varint(data, at)
        end = at + length
        _, at = _varint(data, at + 1)
        delta, at = _varint(data, at)
        key, at = _part(data, at)
        value, at = _part(data, at)
        headers = []
        number, at = _varint(data, at)
        for _ in range(number):
            name, at = _part(data, at)
            assert name is not None
            held, at = _part(data, at)
            headers.append((data[name[0] : name[1]].decode(), held))
        assert at == end
        yield Stored(path, batch, partition, base + delta, key, value, tuple(headers))


def _part(data: bytes, at: int) -> tuple[Span | None, int]:
    length, at = _varint(data, at)
    return (None, at) if length < 0 else ((at, at + length), at + length)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return (value >> 1) ^ -(value & 1), at
