"""SipHash-2-4 with 128 bits of many rows at once, in the part of Python that becomes machine code.

Rows are hashed column by column: each row has a state of five words (the hash's four, and how many words it took), and
a function here lets every row of a batch take one column's cells. A row whose cell is null takes nothing. The last step
makes digests of states, two words each. `row_digest` says which words a cell becomes.

The rules of `holdfast.reader.kernel_source` hold: addresses and numbers come in, and the caller vouches for them.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit, types
from numba.extending import intrinsic

from holdfast.reader.kernel_source import load_byte, load_uint32, load_word, store_word

STATE_BYTES: Final = 40
DIGEST_BYTES: Final = 16
WORD_BYTES: Final = 8
REAL_SIGN_OFF: Final = 0x7FFFFFFFFFFFFFFF
REAL_INFINITE: Final = 0x7FF0000000000000
REAL_NAN: Final = 0x7FF8000000000000


def _rotated(typing_context: Any, word: Any, bits: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, left = arguments
        right = builder.sub(left.type(64), left)
        return builder.or_(builder.shl(number, left), builder.lshr(number, right))

    return types.int64(types.int64, types.int64), code


def _shifted(typing_context: Any, word: Any, bits: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(arguments[0], arguments[1])

    return types.int64(types.int64, types.int64), code


def _is_below(typing_context: Any, one: Any, other: Any) -> Any:
    """As numbers without a sign."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.icmp_unsigned("<", arguments[0], arguments[1]), arguments[0].type)

    return types.int64(types.int64, types.int64), code


rotated: Any = intrinsic(_rotated)
shifted: Any = intrinsic(_shifted)
is_below: Any = intrinsic(_is_below)


@njit
def mixed(v0, v1, v2, v3):  # type: ignore[no-untyped-def]
    v0 += v1
    v1 = rotated(v1, 13) ^ v0
    v0 = rotated(v0, 32)
    v2 += v3
    v3 = rotated(v3, 16) ^ v2
    v0 += v3
    v3 = rotated(v3, 21) ^ v0
    v2 += v1
    v1 = rotated(v1, 17) ^ v2
    v2 = rotated(v2, 32)
    return v0, v1, v2, v3


@njit
def taken(v0, v1, v2, v3, word):  # type: ignore[no-untyped-def]
    v3 ^= word
    v0, v1, v2, v3 = mixed(v0, v1, v2, v3)
    v0, v1, v2, v3 = mixed(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@njit
def loaded(state):  # type: ignore[no-untyped-def]
    return load_word(state), load_word(state + 8), load_word(state + 16), load_word(state + 24)


@njit
def stored(state, v0, v1, v2, v3, words):  # type: ignore[no-untyped-def]
    store_word(state, v0)
    store_word(state + 8, v1)
    store_word(state + 16, v2)
    store_word(state + 24, v3)
    store_word(state + 32, load_word(state + 32) + words)


@njit
def is_there(validity, row):  # type: ignore[no-untyped-def]
    """Whether the bit of this row is set; without bits, all are there."""
    return validity == 0 or (load_byte(validity + (row >> 3)) >> (row & 7)) & 1 == 1


@njit
def last_word(position, size):  # type: ignore[no-untyped-def]
    """The one to seven bytes before the end of a text, as a word filled up with zeros."""
    left = size & 7
    if size >= 8:
        return shifted(load_word(position + size - 8), 8 * (8 - left))
    word = 0
    for at in range(left):
        word |= load_byte(position + at) << (8 * at)
    return word


@njit
def begin_rows(states, rows, key0, key1):  # type: ignore[no-untyped-def]
    for row in range(rows):
        state = states + row * STATE_BYTES
        store_word(state, key0 ^ 0x736F6D6570736575)
        store_word(state + 8, key1 ^ 0x646F72616E646F6D ^ 0xEE)
        store_word(state + 16, key0 ^ 0x6C7967656E657261)
        store_word(state + 24, key1 ^ 0x7465646279746573)
        store_word(state + 32, 0)
    return 0


@njit
def take_lineage(states, rows, topics, codes, partitions, offsets, indexes):  # type: ignore[no-untyped-def]
    """Four words: the topic's, by its code, then partition, offset and index."""
    for row in range(rows):
        state = states + row * STATE_BYTES
        at = row * WORD_BYTES
        v0, v1, v2, v3 = loaded(state)
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, load_word(topics + WORD_BYTES * load_word(codes + at)))
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, load_word(partitions + at))
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, load_word(offsets + at))
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, load_word(indexes + at))
        stored(state, v0, v1, v2, v3, 4)
    return 0


@njit
def take_words(states, rows, validity, bit, values, words, is_real, tag):  # type: ignore[no-untyped-def]
    """The tag, and the one or two words of the cell; every NaN is the same one."""
    for row in range(rows):
        if not is_there(validity, row + bit):
            continue
        state = states + row * STATE_BYTES
        value = values + row * words * WORD_BYTES
        v0, v1, v2, v3 = loaded(state)
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, tag)
        word = load_word(value)
        if is_real != 0 and (word & REAL_SIGN_OFF) > REAL_INFINITE:
            word = REAL_NAN
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, word)
        if words == 2:
            v0, v1, v2, v3 = taken(v0, v1, v2, v3, load_word(value + WORD_BYTES))
        stored(state, v0, v1, v2, v3, 1 + words)
    return 0


@njit
def take_texts(states, rows, validity, bit, offsets, width, data, tag):  # type: ignore[no-untyped-def]
    """The tag, the number of bytes, and the bytes, the last word filled up with zeros."""
    for row in range(rows):
        if not is_there(validity, row + bit):
            continue
        state = states + row * STATE_BYTES
        if width == 4:
            begin, end = load_uint32(offsets + 4 * row), load_uint32(offsets + 4 * row + 4)
        else:
            begin, end = load_word(offsets + 8 * row), load_word(offsets + 8 * row + 8)
        size = end - begin
        position = data + begin
        v0, v1, v2, v3 = loaded(state)
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, tag)
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, size)
        for at in range(0, size - 7, 8):
            v0, v1, v2, v3 = taken(v0, v1, v2, v3, load_word(position + at))
        if size & 7 != 0:
            v0, v1, v2, v3 = taken(v0, v1, v2, v3, last_word(position, size))
        stored(state, v0, v1, v2, v3, 2 + ((size + 7) >> 3))
    return 0


@njit
def take_lists(states, rows, validity, bit, offsets, digests, is_sum, tag):  # type: ignore[no-untyped-def]
    """The tag, how many elements, and their digests one by one; of a map, the sum of its entries' digests."""
    for row in range(rows):
        if not is_there(validity, row + bit):
            continue
        state = states + row * STATE_BYTES
        begin, end = load_word(offsets + 8 * row), load_word(offsets + 8 * row + 8)
        v0, v1, v2, v3 = loaded(state)
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, tag)
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, end - begin)
        words = 2
        low = 0
        high = 0
        for at in range(begin, end):
            one = load_word(digests + DIGEST_BYTES * at)
            other = load_word(digests + DIGEST_BYTES * at + WORD_BYTES)
            if is_sum != 0:
                low += one
                high += other + is_below(low, one)
            else:
                v0, v1, v2, v3 = taken(v0, v1, v2, v3, one)
                v0, v1, v2, v3 = taken(v0, v1, v2, v3, other)
                words += 2
        if is_sum != 0:
            v0, v1, v2, v3 = taken(v0, v1, v2, v3, low)
            v0, v1, v2, v3 = taken(v0, v1, v2, v3, high)
            words += 2
        stored(state, v0, v1, v2, v3, words)
    return 0


@njit
def finish_rows(states, rows, digests):  # type: ignore[no-untyped-def]
    for row in range(rows):
        state = states + row * STATE_BYTES
        v0, v1, v2, v3 = loaded(state)
        v0, v1, v2, v3 = taken(v0, v1, v2, v3, ((load_word(state + 32) * 8) & 0xFF) << 56)
        v2 ^= 0xEE
        for _ in range(4):
            v0, v1, v2, v3 = mixed(v0, v1, v2, v3)
        store_word(digests + DIGEST_BYTES * row, v0 ^ v1 ^ v2 ^ v3)
        v1 ^= 0xDD
        for _ in range(4):
            v0, v1, v2, v3 = mixed(v0, v1, v2, v3)
        store_word(digests + DIGEST_BYTES * row + WORD_BYTES, v0 ^ v1 ^ v2 ^ v3)
    return 0
