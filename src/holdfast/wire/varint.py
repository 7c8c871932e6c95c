"""Variable-length integers, as Kafka writes them: seven bits per byte, lowest first, the top bit says "more
follows".

Three kinds share the shape. Lengths and tags are *unsigned* varints of at most 32 bits. Record fields are
*zigzag* varints (32 bits) and varlongs (64 bits), where small negative numbers stay short. Readers return the
value and the position after it, never read past the end of the buffer, and raise `ValueError` for a number
that is cut off or that does not fit its width: callers know whether that means a malformed frame or a corrupt
batch.
"""

from __future__ import annotations

_SINGLE_BYTES = tuple(bytes([value]) for value in range(128))


def encode_uvarint(value: int) -> bytes:
    """The shortest encoding of a number that is not negative."""
    if value < 128:
        return _SINGLE_BYTES[value] if value >= 0 else _refuse_negative(value)
    out = bytearray()
    while value > 127:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _refuse_negative(value: int) -> bytes:
    raise ValueError(f"{value} is negative; an unsigned varint cannot hold it")


def encode_varint(value: int) -> bytes:
    """The zigzag encoding of a number of up to 64 bits; varint and varlong write the same bytes."""
    return encode_uvarint((value << 1) ^ (value >> 63))


def decode_uvarint(buffer: bytes | bytearray | memoryview, position: int) -> tuple[int, int]:
    """An unsigned 32-bit number and the position after it."""
    value, end = _decode(buffer, position, 5)
    if value > 0xFFFFFFFF:
        raise ValueError(f"varint at position {position} does not fit 32 bits")
    return value, end


def decode_varlong(buffer: bytes | bytearray | memoryview, position: int) -> tuple[int, int]:
    """A signed 64-bit number in zigzag form and the position after it."""
    value, end = _decode(buffer, position, 10)
    if value > 0xFFFFFFFFFFFFFFFF:
        raise ValueError(f"varlong at position {position} does not fit 64 bits")
    return (value >> 1) ^ -(value & 1), end


def _decode(buffer: bytes | bytearray | memoryview, position: int, size_max: int) -> tuple[int, int]:
    value = 0
    shift = 0
    try:
        for index in range(position, position + size_max):
            byte = buffer[index]
            if byte < 128:
                return value | byte << shift, index + 1
            value |= (byte & 0x7F) << shift
            shift += 7
    except IndexError:
        raise ValueError(f"varint at position {position} is cut off") from None
    raise ValueError(f"varint at position {position} is longer than {size_max} bytes")
