"""The decoder's inner loops, written in the part of Python that numba turns into machine code.

They work on addresses and numbers, not on arrays: integers of 64 bits come in, a status comes out. So the code that
results depends on nothing but itself: it is kept on disk and loaded without numba (`kernel`). What would be one
mistake away from a crash in such code is kept safe by a few rules:

- Bytes of a batch are read at an address only after it was compared with the end of that batch.
- A varint ends within ten bytes and within its batch, or the batch is corrupt.
- A length is compared with the bytes that are left before it is added to anything.
- Rows are written below a capacity that the caller has allocated for.
- What `parse` has proven of the lengths, `gather` and `fill_headers` rely on: they walk the same bytes, which nobody
  else can reach meanwhile.

`layout` names the columns of the table of batches. Nothing here is imported unless machine code has to be made.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from holdfast.reader.layout import (
    BAD_COUNT,
    BAD_CRC,
    BAD_HEADERS,
    BAD_KEY,
    BAD_LENGTH,
    BAD_MAGIC,
    BAD_OFFSET,
    BAD_ORDER,
    BAD_RECORD,
    BAD_VALUE,
    BAD_VARINT,
    FINE,
    HEADER_BYTES,
    INT64_MAX,
    LEFT_OVER,
    OFFSET_MAX,
    TABLE_BYTES,
    TIMESTAMP_MS_MAX,
)

WORD: Final = 8
_BYTE = ir.IntType(8)
_HALF = ir.IntType(32)
_LONG = ir.IntType(64)


def _pointer(builder: Any, address: Any, width: Any) -> Any:
    """A pointer to an address that is a sum of numbers.

    LLVM may take any of the summands for the pointer and the others for offsets from it. One that is zero would then be
    the null pointer, which nothing can be read through, and the code would be left out as never reached. So functions
    that use addresses declare null to be a place like any other.
    """
    set.add(builder.function.attributes, "null_pointer_is_valid")
    return builder.inttoptr(address, width.as_pointer())


def _loader(width: Any, *, big_endian: bool, signed: bool) -> Any:
    """Reads a number at an address, which need not be aligned."""

    def load(typing_context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = builder.load(_pointer(builder, arguments[0], width))
            number.align = 1
            if big_endian:
                number = builder.bswap(number)
            if width is _LONG:
                return number
            return builder.sext(number, _LONG) if signed else builder.zext(number, _LONG)

        return types.int64(types.int64), code

    return intrinsic(load)


def _storer(width: Any) -> Any:
    """Writes a number at an address, as this machine keeps numbers."""

    def store(typing_context: Any, address: Any, number: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer(builder, arguments[0], width)
            number = arguments[1] if width is _LONG else builder.trunc(arguments[1], width)
            builder.store(number, pointer).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), code

    return intrinsic(store)


load_byte = _loader(_BYTE, big_endian=False, signed=False)
load_word = _loader(_LONG, big_endian=False, signed=True)
load_uint32 = _loader(_HALF, big_endian=False, signed=False)
load_int32_be = _loader(_HALF, big_endian=True, signed=True)
load_uint32_be = _loader(_HALF, big_endian=True, signed=False)
load_int64_be = _loader(_LONG, big_endian=True, signed=True)
store_byte = _storer(_BYTE)
store_int32 = _storer(_HALF)
store_word = _storer(_LONG)


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        cgutils.raw_memcpy(  # type: ignore[no-untyped-call]
            builder,
            _pointer(builder, arguments[0], _BYTE),
            _pointer(builder, arguments[1], _BYTE),
            arguments[2],
            1,
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@njit
def copy(target, source, size):  # type: ignore[no-untyped-def]
    """Short fields are copied by two words that overlap, without a call."""
    if size > 16:
        copy_bytes(target, source, size)  # type: ignore[call-arg]
    elif size >= 8:
        store_word(target, load_word(source))
        store_word(target + size - 8, load_word(source + size - 8))
    elif size >= 4:
        store_int32(target, load_uint32(source))
        store_int32(target + size - 4, load_uint32(source + size - 4))
    else:
        for index in range(size):
            store_byte(target + index, load_byte(source + index))


@njit
def read_varint(position, end):  # type: ignore[no-untyped-def]
    """A zigzag number of up to 64 bits and the position behind it, -1 when there is none."""
    value = 0
    shift = 0
    while position < end:
        byte = load_byte(position)
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if shift == 63 and byte > 1:
                break
            return ((value >> 1) & INT64_MAX) ^ -(value & 1), position
        shift += 7
        if shift > 63:
            break
    return 0, -1


@njit
def crc32c(tables, position, size):  # type: ignore[no-untyped-def]
    """CRC-32C, eight bytes at a step through eight tables."""
    crc = 0xFFFFFFFF
    end = position + size
    while end - position >= 8:
        word = load_word(position)
        low = (word & 0xFFFFFFFF) ^ crc
        high = (word >> 32) & 0xFFFFFFFF
        crc = (
            load_uint32(tables + 4 * (7 * 256 + (low & 0xFF)))
            ^ load_uint32(tables + 4 * (6 * 256 + (low >> 8 & 0xFF)))
            ^ load_uint32(tables + 4 * (5 * 256 + (low >> 16 & 0xFF)))
            ^ load_uint32(tables + 4 * (4 * 256 + (low >> 24)))
            ^ load_uint32(tables + 4 * (3 * 256 + (high & 0xFF)))
            ^ load_uint32(tables + 4 * (2 * 256 + (high >> 8 & 0xFF)))
            ^ load_uint32(tables + 4 * (1 * 256 + (high >> 16 & 0xFF)))
            ^ load_uint32(tables + 4 * (high >> 24))
        )
        position += 8
    while position < end:
        crc = load_uint32(tables + 4 * ((crc ^ load_byte(position)) & 0xFF)) ^ (crc >> 8)
        position += 1
    return crc ^ 0xFFFFFFFF


def survey(data, size, entry, tables, small_bytes, results):  # type: ignore[no-untyped-def]
    """Table the whole batches at the beginning of some bytes; check the checksums of small ones."""
    position = 0
    found = 0
    previous = -1
    status = FINE
    wanted = 0
    while size - position >= 17:
        address = data + position
        batch_bytes = load_int32_be(address + 8) + 12
        if load_byte(address + 16) != 2:
            status = BAD_MAGIC
            break
        if batch_bytes < HEADER_BYTES:
            status = BAD_LENGTH
            break
        if batch_bytes > size - position:
            wanted = batch_bytes
            break
        base_offset = load_int64_be(address)
        delta = load_int32_be(address + 23)
        count = load_int32_be(address + 57)
        crc = load_uint32_be(address + 17)
        checked = 0
        if batch_bytes <= small_bytes:
            if crc32c(tables, address + 21, batch_bytes - 21) != crc:
                status = BAD_CRC
                break
            checked = 1
        if base_offset <= previous or base_offset > OFFSET_MAX or delta < 0:
            status = BAD_ORDER
            break
        if count < 0 or count - 1 > delta:
            status = BAD_COUNT
            break
        previous = base_offset + delta
        store_word(entry, position)
        store_word(entry + 1 * WORD, batch_bytes)
        store_word(entry + 2 * WORD, base_offset)
        store_word(entry + 3 * WORD, previous)
        store_word(entry + 4 * WORD, load_int32_be(address + 21) >> 16)
        store_word(entry + 5 * WORD, load_int64_be(address + 27))
        store_word(entry + 6 * WORD, load_int64_be(address + 35))
        store_word(entry + 7 * WORD, load_int64_be(address + 43))
        store_word(entry + 8 * WORD, count)
        store_word(entry + 9 * WORD, address + HEADER_BYTES)
        store_word(entry + 10 * WORD, batch_bytes - HEADER_BYTES)
        store_word(entry + 11 * WORD, checked)
        store_word(entry + 12 * WORD, crc)
        store_word(entry + 13 * WORD, load_int32_be(address + 12))
        entry += TABLE_BYTES
        found += 1
        position += batch_bytes
    store_word(results, found)
    store_word(results + 1 * WORD, position)
    store_word(results + 2 * WORD, wanted)
    return status


@njit
def walk_headers(position, end, count):  # type: ignore[no-untyped-def]
    """Behind how many header fields the record ends, and the bytes of their names and values; -1 for corrupt."""
    name_bytes = 0
    value_bytes = 0
    for _ in range(count):
        size, position = read_varint(position, end)
        if position < 0 or size < 0 or size > end - position:
            return -1, 0, 0
        position += size
        name_bytes += size
        size, position = read_varint(position, end)
        if position < 0 or size > end - position:
            return -1, 0, 0
        if size > 0:
            position += size
            value_bytes += size
    return position, name_bytes, value_bytes


@njit
def timestamp_us(base_ms, delta_ms):  # type: ignore[no-untyped-def]
    """The sum in microseconds, at the edge of what they can tell when it lies beyond."""
    if delta_ms > 0 and base_ms > INT64_MAX - delta_ms:
        return TIMESTAMP_MS_MAX * 1000
    if delta_ms < 0 and base_ms < -INT64_MAX - delta_ms:
        return -TIMESTAMP_MS_MAX * 1000
    return min(max(base_ms + delta_ms, -TIMESTAMP_MS_MAX), TIMESTAMP_MS_MAX) * 1000


def parse(  # type: ignore[no-untyped-def]
    entry,
    batches,
    start,
    end,
    capacity,
    offsets,
    timestamps,
    key_ends,
    key_places,
    key_bits,
    value_ends,
    value_places,
    value_bits,
    header_ends,
    header_places,
    results,
):
    """Walk every record of the tabled batches; note where the fields of those within the range are."""
    row = 0
    key_nulls = 0
    key_total = 0
    value_nulls = 0
    value_total = 0
    header_total = 0
    name_total = 0
    header_value_total = 0
    status = FINE
    batch = 0
    previous = -1
    store_int32(key_ends, 0)
    store_int32(value_ends, 0)
    store_int32(header_ends, 0)
    while batch < batches:
        base_offset = load_word(entry + 2 * WORD)
        delta_max = load_word(entry + 3 * WORD) - base_offset
        is_append_time = load_word(entry + 4 * WORD) & 8
        base_ms = load_word(entry + 5 * WORD)
        max_ms = load_word(entry + 6 * WORD)
        count = load_word(entry + 8 * WORD)
        position = load_word(entry + 9 * WORD)
        batch_end = position + load_word(entry + 10 * WORD)
        previous = -1
        for _ in range(count):
            size, position = read_varint(position, batch_end)
            if position < 0:
                status = BAD_VARINT
                break
            if size < 6 or size > batch_end - position:
                status = BAD_RECORD
                break
            record_end = position + size
            delta_ms, position = read_varint(position + 1, record_end)
            if position < 0:
                status = BAD_VARINT
                break
            delta, position = read_varint(position, record_end)
            if position < 0:
                status = BAD_VARINT
                break
            if delta <= previous or delta > delta_max:
                status = BAD_OFFSET
                break
            previous = delta
            key_size, position = read_varint(position, record_end)
            if position < 0 or key_size > record_end - position:
                status = BAD_KEY
                break
            key_place = position
            if key_size > 0:
                position += key_size
            value_size, position = read_varint(position, record_end)
            if position < 0 or value_size > record_end - position:
                status = BAD_VALUE
                break
            value_place = position
            if value_size > 0:
                position += value_size
            header_count, position = read_varint(position, record_end)
            if position < 0 or header_count < 0 or header_count > record_end - position:
                status = BAD_HEADERS
                break
            header_place = position
            name_bytes = 0
            header_value_bytes = 0
            if header_count > 0:
                position, name_bytes, header_value_bytes = walk_headers(position, record_end, header_count)
            if position != record_end:
                status = BAD_HEADERS
                break
            offset = base_offset + delta
            if offset < start or offset >= end:
                continue
            if row >= capacity:
                status = BAD_COUNT
                break
            store_word(offsets + row * WORD, offset)
            store_word(
                timestamps + row * WORD,
                timestamp_us(max_ms, 0) if is_append_time else timestamp_us(base_ms, delta_ms),
            )
            bit = 1 << (row & 7)
            if key_size >= 0:
                key_total += key_size
                store_byte(key_bits + (row >> 3), load_byte(key_bits + (row >> 3)) | bit)
            else:
                key_nulls += 1
            if value_size >= 0:
                value_total += value_size
                store_byte(value_bits + (row >> 3), load_byte(value_bits + (row >> 3)) | bit)
            else:
                value_nulls += 1
            header_total += header_count
            name_total += name_bytes
            header_value_total += header_value_bytes
            store_word(key_places + row * WORD, key_place)
            store_word(value_places + row * WORD, value_place)
            store_word(header_places + row * WORD, header_place)
            row += 1
            store_int32(key_ends + row * 4, key_total)
            store_int32(value_ends + row * 4, value_total)
            store_int32(header_ends + row * 4, header_total)
        if status != FINE:
            break
        if position != batch_end:
            status = LEFT_OVER
            break
        batch += 1
        entry += TABLE_BYTES
    store_word(results, row)
    store_word(results + 1 * WORD, key_total)
    store_word(results + 2 * WORD, key_nulls)
    store_word(results + 3 * WORD, value_total)
    store_word(results + 4 * WORD, value_nulls)
    store_word(results + 5 * WORD, header_total)
    store_word(results + 6 * WORD, name_total)
    store_word(results + 7 * WORD, header_value_total)
    store_word(results + 8 * WORD, batch)
    store_word(results + 9 * WORD, previous)
    return status


def gather(rows, ends, places, target):  # type: ignore[no-untyped-def]
    """Copy the fields of one column to where its offsets say."""
    begin = 0
    for row in range(rows):
        end = load_uint32(ends + (row + 1) * 4)
        if end != begin:
            copy(target + begin, load_word(places + row * WORD), end - begin)
        begin = end
    return FINE


def fill_headers(rows, ends, places, name_ends, names, value_ends, values, value_bits, results):  # type: ignore[no-untyped-def]
    """Copy names and values of all headers; tells whether every name is ASCII, and how many values are null."""
    header = 0
    name_total = 0
    value_total = 0
    nulls = 0
    seen = 0
    store_int32(name_ends, 0)
    store_int32(value_ends, 0)
    for row in range(rows):
        last = load_uint32(ends + (row + 1) * 4)
        position = load_word(places + row * WORD)
        while header < last:
            size, position = read_varint(position, INT64_MAX)
            for index in range(size):
                byte = load_byte(position + index)
                seen |= byte
                store_byte(names + name_total + index, byte)
            name_total += size
            position += size
            size, position = read_varint(position, INT64_MAX)
            if size >= 0:
                copy(values + value_total, position, size)
                value_total += size
                position += size
                place = value_bits + (header >> 3)
                store_byte(place, load_byte(place) | 1 << (header & 7))
            else:
                nulls += 1
            header += 1
            store_int32(name_ends + header * 4, name_total)
            store_int32(value_ends + header * 4, value_total)
    store_word(results, seen)
    store_word(results + 1 * WORD, nulls)
    return FINE
