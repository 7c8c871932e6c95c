"""The inner loops of compaction: keys and offsets of a batch's records, and the batch without some of them.

Records are walked by their lengths; only the offset, the key and whether there is a value are looked at.
Kept records are copied as the bytes they are, since their offsets and times are relative to a base that
stays. Only when a batch gets its delete horizon does the base of its times change, and each time with it.

A key is known by itself when it is shorter than a digest, by its digest otherwise, so that what is remembered
of a key is bounded and no two keys are ever taken for one another within 2^-120.

The loops are long because calls cost: varints of one or two bytes, nearly all there are, are read in place.

The bytes come from batches whose checksum holds and that were checked when they were produced. A walk that
does not end exactly at their end is damage all the same and says so.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

from holdfast.errors import CorruptLog
from holdfast.wire.batch import nearest_timestamp
from holdfast.wire.varint import decode_varlong, encode_varint

DIGEST_BYTES: Final = 15
NO_VALUE: Final = 0x01
"""The length -1 as a zigzag varint."""


def note_keys(data: bytes, base_offset: int, first_offset: int, offsets: dict[bytes, int]) -> None:
    """Put the offset of every record at `first_offset` or later into `offsets`, by key."""
    position = 0
    end = len(data)
    skip_below = first_offset - base_offset
    try:
        while position < end:
            length = data[position]
            position += 1
            if length > 0x7F:
                second = data[position]
                if second < 0x80:
                    length = length & 0x7F | second << 7
                    position += 1
                else:
                    length, position = _rest(data, length, position)
            following = position + (length >> 1)
            position += 1  # attributes
            while data[position] > 0x7F:  # the timestamp
                position += 1
            delta = data[position + 1]
            position += 2
            if delta > 0x7F:
                second = data[position]
                if second < 0x80:
                    delta = delta & 0x7F | second << 7
                    position += 1
                else:
                    delta, position = _rest(data, delta, position)
            size = data[position]
            position += 1
            if size > 0x7F:
                size, position = _rest(data, size, position)
            if not size & 1 and delta >> 1 >= skip_below:
                size >>= 1
                key = data[position : position + size]
                if size >= DIGEST_BYTES:
                    key = blake2b(key, digest_size=DIGEST_BYTES).digest()
                offsets[key] = base_offset + (delta >> 1)
            position = following
    except IndexError:
        raise _cut_off() from None
    if position != end:
        raise _cut_off()


class Kept(NamedTuple):
    """What is left of a batch's records."""

    data: bytes | None
    """None when all of them are."""
    records_count: int
    has_tombstone: bool
    """Whether a record without a value is among them."""


def keep_latest(data: bytes, base_offset: int, offsets: dict[bytes, int], drops_tombstones: bool) -> Kept:
    """The records that are the latest of their key as far as `offsets` knows; records without a key go.

    With `drops_tombstones` those without a value go as well.
    """
    position = 0
    end = len(data)
    count = 0
    has_tombstone = False
    pieces: list[bytes] = []
    keep_from = 0
    find = offsets.get
    try:
        while position < end:
            start = position
            length = data[position]
            position += 1
            if length > 0x7F:
                second = data[position]
                if second < 0x80:
                    length = length & 0x7F | second << 7
                    position += 1
                else:
                    length, position = _rest(data, length, position)
            following = position + (length >> 1)
            position += 1  # attributes
            while data[position] > 0x7F:  # the timestamp
                position += 1
            delta = data[position + 1]
            position += 2
            if delta > 0x7F:
                second = data[position]
                if second < 0x80:
                    delta = delta & 0x7F | second << 7
                    position += 1
                else:
                    delta, position = _rest(data, delta, position)
            size = data[position]
            position += 1
            if size > 0x7F:
                size, position = _rest(data, size, position)
            keeps = False
            if not size & 1:
                size >>= 1
                key = data[position : position + size]
                if size >= DIGEST_BYTES:
                    key = blake2b(key, digest_size=DIGEST_BYTES).digest()
                keeps = find(key, -1) <= base_offset + (delta >> 1)
                if keeps and data[position + size] == NO_VALUE:
                    keeps = not drops_tombstones
                    has_tombstone = has_tombstone or keeps
            if keeps:
                count += 1
            else:
                if keep_from < start:
                    pieces.append(data[keep_from:start])
                keep_from = following
            position = following
    except IndexError:
        raise _cut_off() from None
    if position != end:
        raise _cut_off()
    if not pieces and not keep_from:
        return Kept(None, count, has_tombstone)
    pieces.append(data[keep_from:])
    return Kept(b"".join(pieces), count, has_tombstone)


def largest_timestamp_delta(data: bytes) -> int:
    """The largest timestamp of records that are not none, relative to their batch's base."""
    position = 0
    end = len(data)
    largest: int | None = None
    try:
        while position < end:
            length = data[position]
            position += 1
            if length > 0x7F:
                length, position = _rest(data, length, position)
            delta = data[position + 1]
            if delta > 0x7F:
                delta, _ = _rest(data, delta, position + 2)
            delta = (delta >> 1) ^ -(delta & 1)
            if largest is None or delta > largest:
                largest = delta
            position += length >> 1
    except IndexError:
        raise _cut_off() from None
    assert largest is not None
    return largest


def shift_timestamps(data: bytes, shift: int) -> bytes:
    """The same records with every timestamp `shift` further from its batch's base, or as far as there are numbers."""
    out: list[bytes] = []
    position = 0
    end = len(data)
    while position < end:
        try:
            length, position = decode_varlong(data, position)
            following = position + length
            delta, rest = decode_varlong(data, position + 1)
        except ValueError:
            raise _cut_off() from None
        shifted = encode_varint(nearest_timestamp(delta + shift))
        out += (
            encode_varint(1 + len(shifted) + following - rest),
            data[position : position + 1],
            shifted,
            data[rest:following],
        )
        position = following
    return b"".join(out)


def _rest(data: bytes, value: int, position: int) -> tuple[int, int]:
    """A varint whose first byte, `value`, says that more follow; still in zigzag form."""
    value &= 0x7F
    shift = 7
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _cut_off() -> CorruptLog:
    return CorruptLog("records that do not fill their batch")
