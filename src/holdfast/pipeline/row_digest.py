"""The digest of a row: a keyed hash of 128 bits over its lineage and every cell, taken in the pass that writes it.

A ledger's entry keeps the sum, modulo 2**128, of the digests of the rows that its batch wrote. The sum is the same in
any order and however rows are cut into files; a row that is changed, missing or there twice changes it, and so do
values that are exchanged between rows or columns. Whoever does not have the key can neither make the digest of a row
nor tell which changes would cancel out.

The hash is SipHash-2-4 with 128 bits of output, over words of 64 bits:

    row      the topic's word, partition, offset, index; then for each column that is not null, in the order of the
             names' bytes: tag, value
    tag      the first word of the hash of the column's name, its lowest byte replaced by the family of the type;
             of an element of a list, the family alone
    value    by family: see `Family`
    element  the hash of tag and value; of a null, the hash of nothing

Null cells take part in nothing, so a column that is added later does not change the digests of the rows before. Of a
text that is a column's name or a topic, the hash is that of its UTF-8 bytes. `docs/FORMAT.md` says what a cell is in
each kind of sink. `holdfast.pipeline.row_kernel` is the machine code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from enum import IntEnum
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.reader.kernel import Function, load_functions

_SOURCES: Final = ("kernel_source.py", "layout.py", os.path.join(os.path.dirname(__file__), "row_kernel.py"))
STATE_WORDS: Final = 5
CHUNK_ROWS: Final = 4096
"""Rows hashed at a time: their states stay in the processor's cache."""
KEY_BYTES: Final = 16
MASK: Final = (1 << 128) - 1
LINEAGE: Final = ("topic", "partition", "offset", "index")
Digests = npt.NDArray[np.uint64]
"""Two words for each row."""
Words = npt.NDArray[np.int64]


class Family(IntEnum):
    """Types whose values are written alike, and what their words are."""

    BOOLEAN = 1
    """0 or 1."""
    WHOLE = 2
    """The number, of any width, with its sign."""
    REAL = 3
    """The bits of a double; every NaN is one, and -0.0 is not 0.0."""
    DECIMAL = 4
    """The unscaled number in two words, the lower first; the scale is in the tag's second byte."""
    TEXT = 5
    """The number of bytes of its UTF-8, then those, the last word filled up with zeros. Bytes likewise."""
    BYTES = 6
    DATE = 7
    """Days since 1970-01-01."""
    INSTANT = 8
    """Microseconds since 1970-01-01 in UTC."""
    WALL_TIME = 9
    """Microseconds since 1970-01-01, without a zone."""
    LIST = 10
    """The number of elements, then the digest of each."""
    STRUCT = 11
    """The digest of its fields, as a row's columns, behind the family as a tag."""
    MAP = 12
    """The number of entries, then the sum of their digests: of the digests of key and value."""


class _Machine(NamedTuple):
    begin_rows: Function
    take_lineage: Function
    take_words: Function
    take_texts: Function
    take_lists: Function
    finish_rows: Function


@cache
def load() -> _Machine:
    """The machine code; made now where nobody has."""

    def functions() -> Mapping[str, Any]:
        from holdfast.pipeline import row_kernel

        return vars(row_kernel)

    return _Machine(*load_functions("rows", _Machine._fields, _SOURCES, functions))


class DigestKey:
    """The key of one pipeline's digests. Its id names it in ledgers without giving it away."""

    def __init__(self, secret: bytes) -> None:
        self.rows = hashlib.blake2b(b"rows", key=secret, digest_size=KEY_BYTES).digest()
        self.chain = hashlib.blake2b(b"chain", key=secret, digest_size=32).digest()
        self.id = hashlib.blake2b(b"id", key=secret, digest_size=8).hexdigest()

    def __repr__(self) -> str:
        return f"DigestKey({self.id})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DigestKey) and other.rows == self.rows

    def __hash__(self) -> int:
        return hash(self.rows)


class RowHasher:
    """Hashes rows under one key."""

    def __init__(self, key: DigestKey) -> None:
        self._words = tuple(int(each) for each in np.frombuffer(key.rows, "<i8"))
        self._machine = load()
        self._name = lru_cache(maxsize=4096)(self._hash_name)

    def digests(
        self,
        columns: Mapping[str, pa.Array],
        lineage: Mapping[str, pa.Array],
        constants: Mapping[str, str | None] | None = None,
    ) -> Digests:
        """Of each row: two words. `constants` are columns whose value is the same text in all of these rows."""
        rows = len(lineage["offset"])
        found = np.empty((rows, 2), np.uint64)
        texts = {name: text for name, text in (constants or {}).items() if text is not None}
        places = self._places(lineage)
        names = sorted({*columns, *texts}, key=lambda name: name.encode())
        for start in range(0, rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, rows - start)
            states = self._begin(count)
            topics, *parts = places
            self._machine.take_lineage(
                states.ctypes.data,
                count,
                topics.ctypes.data,
                *(each.ctypes.data + 8 * start for each in parts),
            )
            for name in names:
                column = (
                    pa.array([texts[name]]).take(pa.array(np.zeros(count, np.int32)))
                    if name in texts
                    else columns[name].slice(start, count)
                )
                self._take(states, column, self._name(name))
            self._finish(states, found[start : start + count])
        return found

    # -------------------------------------------------------------------- parts

    def _hash_name(self, name: str) -> int:
        """The first word of the hash of a text, as a number with a sign."""
        return int.from_bytes(
            siphash(self._words, name.encode()).to_bytes(16, "little")[:8], "little", signed=True
        )

    def _places(self, lineage: Mapping[str, pa.Array]) -> list[Words]:
        topics = lineage["topic"]
        if not pa.types.is_dictionary(topics.type):
            topics = pc.dictionary_encode(topics)
        hashes = [0 if each is None else self._name(each) for each in topics.dictionary.to_pylist()]
        codes = topics.indices.fill_null(len(hashes)).cast(pa.int64()).to_numpy()
        numbers = [lineage[name].fill_null(-1).cast(pa.int64()).to_numpy() for name in LINEAGE[1:]]
        return [np.array([*hashes, 0], np.int64), *(np.ascontiguousarray(each) for each in (codes, *numbers))]

    def _begin(self, rows: int) -> Words:
        states = np.empty((rows, STATE_WORDS), np.int64)
        self._machine.begin_rows(states.ctypes.data, rows, *self._words)
        return states

    def _finish(self, states: Words, found: Digests) -> None:
        self._machine.finish_rows(states.ctypes.data, len(states), found.ctypes.data)

    def _elements(self, array: pa.Array) -> Digests:
        """The digest of each element of an array."""
        found = np.empty((len(array), 2), np.uint64)
        states = self._begin(len(array))
        self._take(states, array, 0)
        self._finish(states, found)
        return found

    def _take(self, states: Words, array: pa.Array, name: int) -> None:
        """Let each row take its cell; `name` is the word of the column's, or 0."""
        if pa.types.is_null(array.type) or not len(array):
            return
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        family = family_of(array.type)
        tag = (name & ~0xFF) | family
        if family in (Family.TEXT, Family.BYTES):
            self._take_texts(states, array, tag)
        elif family in (Family.LIST, Family.MAP):
            self._take_list(states, array, tag, family)
        elif family is Family.STRUCT:
            self._take_words(states, array, self._fields(array), 2, tag)
        elif family is Family.DECIMAL:
            tag = (name & ~0xFFFF) | array.type.scale << 8 | family
            self._take_words(
                states, array, _fixed(array.cast(pa.decimal128(38, array.type.scale)), 16), 2, tag
            )
        else:
            self._take_words(states, array, _numbers(array, family), 1, tag, is_real=family is Family.REAL)

    def _take_words(
        self, states: Words, array: pa.Array, values: Any, words: int, tag: int, *, is_real: bool = False
    ) -> None:
        validity, bit = _validity(array)
        self._machine.take_words(
            states.ctypes.data, len(array), validity, bit, values.ctypes.data, words, int(is_real), tag
        )

    def _take_texts(self, states: Words, array: pa.Array, tag: int) -> None:
        _, offsets, data = array.buffers()
        width = 8 if pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type) else 4
        validity, bit = _validity(array)
        self._machine.take_texts(
            states.ctypes.data,
            len(array),
            validity,
            bit,
            offsets.address + width * array.offset,
            width,
            0 if data is None else data.address,
            tag,
        )

    def _take_list(self, states: Words, array: pa.Array, tag: int, family: Family) -> None:
        offsets = array.offsets.to_numpy().astype(np.int64)
        first, last = int(offsets[0]), int(offsets[-1])
        if family is Family.MAP:
            pairs = self._begin(last - first)
            for part in (array.keys, array.items):
                halves = self._elements(part.slice(first, last - first))
                self._machine.take_words(
                    pairs.ctypes.data, len(halves), 0, 0, halves.ctypes.data, 2, 0, Family.MAP
                )
            digests = np.empty((last - first, 2), np.uint64)
            self._finish(pairs, digests)
        else:
            digests = self._elements(array.values.slice(first, last - first))
        offsets -= first
        validity, bit = _validity(array)
        self._machine.take_lists(
            states.ctypes.data,
            len(array),
            validity,
            bit,
            offsets.ctypes.data,
            digests.ctypes.data,
            int(family is Family.MAP),
            tag,
        )

    def _fields(self, array: pa.StructArray) -> Digests:
        """The digest of each struct."""
        states = self._begin(len(array))
        ones = pa.array(np.full(len(array), Family.STRUCT, np.int64))
        self._take_words(states, ones, ones.to_numpy(), 1, 0)
        parts = dict(zip((each.name for each in array.type), array.flatten(), strict=True))
        for name in sorted(parts, key=lambda each: each.encode()):
            self._take(states, parts[name], self._name(name))
        found = np.empty((len(array), 2), np.uint64)
        self._finish(states, found)
        return found


hasher_of = lru_cache(maxsize=4)(RowHasher)


def family_of(kind: pa.DataType) -> Family:
    types = pa.types
    if types.is_timestamp(kind):
        return Family.WALL_TIME if kind.tz is None else Family.INSTANT
    known = (
        (types.is_boolean, Family.BOOLEAN),
        (types.is_integer, Family.WHOLE),
        (types.is_floating, Family.REAL),
        (types.is_decimal, Family.DECIMAL),
        (types.is_string, Family.TEXT),
        (types.is_large_string, Family.TEXT),
        (types.is_binary, Family.BYTES),
        (types.is_large_binary, Family.BYTES),
        (types.is_date, Family.DATE),
        (types.is_map, Family.MAP),
        (types.is_list, Family.LIST),
        (types.is_large_list, Family.LIST),
        (types.is_struct, Family.STRUCT),
    )
    for matches, family in known:
        if matches(kind):
            return family
    raise TypeError(f"values of the type {kind} have no digest")


def database_form(kind: str) -> str:
    """In SQL, the text of a column `{0}` of this type of PostgreSQL as `from_database` takes it: a time by its number,
    of days or of microseconds since 1970."""
    number = _NUMBERS.get(kind.split("(")[0].strip())
    if number is None:
        return "({0})::text"
    return f"(CASE WHEN {{0}} IS NULL THEN NULL WHEN isfinite({{0}}) THEN {number} ELSE 'endless' END)"


_MICROSECONDS: Final = "round(extract(epoch from {0}) * 1000000)::int8::text"
_NUMBERS: Final = {
    "date": "({0} - date '1970-01-01')::text",
    "timestamp with time zone": _MICROSECONDS,
    "timestamp without time zone": _MICROSECONDS,
}


def from_database(array: pa.Array, kind: str) -> pa.Array:
    """A column as a database gives or takes it, in the form in which it is digested; `kind` is its type for Spark.

    Texts of numbers, truths and times become values; bytes are the text of their digits in small letters; what is
    nested is JSON in one spelling. A text that is no value of its type stays one.
    """
    if kind.startswith(("array", "map", "struct")):
        return pa.array(
            [None if each is None else canonical_json(each) for each in array.to_pylist()], pa.string()
        )
    if kind == "binary":
        return pc.ascii_lower(array)
    wanted = _VALUES.get(kind)
    if kind.startswith("decimal("):
        precision, scale = kind[8:-1].split(",")
        wanted = pa.decimal128(int(precision), int(scale))
    if wanted is None or not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        return array
    try:
        if pa.types.is_temporal(wanted):
            number = pa.int32() if pa.types.is_date(wanted) else pa.int64()
            return array.cast(number).view(wanted)
        return array.cast(wanted)
    except pa.ArrowInvalid:
        return array


_VALUES: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), pa.int64()),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


def canonical_json(text: str) -> str:
    """JSON in one spelling: names in order, numbers by their value, nothing between."""
    try:
        value = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_number)
    except ValueError:
        return text
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _number(text: str) -> dict[str, str]:
    """As an object that no JSON text has, since its name is none: numbers are compared by value, of any length."""
    try:
        number = Decimal(text)
    except ArithmeticError:
        return {"\0": text}
    return {"\0": str(number.normalize(_EXACT)) if number else "0"}


_EXACT: Final = Context(prec=100_000, Emax=MAX_EMAX, Emin=MIN_EMIN)
"""No digit is rounded away."""


def _validity(array: pa.Array) -> tuple[int, int]:
    """Where its bits are, and the number of the first one."""
    bits = array.buffers()[0]
    return (0, 0) if bits is None or array.null_count == 0 else (bits.address, array.offset)


def _numbers(array: pa.Array, family: Family) -> Words:
    if family is Family.REAL:
        array = array.cast(pa.float64())
    elif family in (Family.INSTANT, Family.WALL_TIME):
        array = array.cast(pa.timestamp("us", tz=array.type.tz))
    elif family is Family.DATE:
        array = array.cast(pa.date32()).view(pa.int32()).cast(pa.int64())
    else:
        array = array.cast(pa.int64())
    return _fixed(array, 8)


def _fixed(array: pa.Array, width: int) -> Words:
    """The words of values of this many bytes, whatever nulls have there."""
    values = array.buffers()[1]
    return np.frombuffer(values, np.int64, len(array) * width // 8, array.offset * width)


def total(digests: Digests) -> int:
    """Their sum, modulo 2**128."""
    halves = np.uint64(0xFFFFFFFF), np.uint64(32)
    low, high = digests[:, 0], digests[:, 1]
    parts = (low & halves[0], low >> halves[1], high & halves[0], high >> halves[1])
    return sum(int(part.sum(dtype=np.uint64)) << (32 * at) for at, part in enumerate(parts)) & MASK


def totals(digests: Digests, groups: Words, count: int) -> list[int]:
    """Their sums by group, the groups numbered from 0."""
    found = [0] * count
    if not len(groups):
        return found
    order = np.argsort(groups, kind="stable")
    sorted_groups = groups[order]
    bounds = [0, *(np.flatnonzero(np.diff(sorted_groups)) + 1).tolist(), len(order)]
    for begin, end in pairwise(bounds):
        found[int(sorted_groups[begin])] = total(digests[order[begin:end]])
    return found


def add(sums: Iterable[int]) -> int:
    return sum(sums) & MASK


def siphash(key: tuple[int, ...], data: bytes) -> int:
    """SipHash-2-4 with 128 bits, of one text: for names, of which there are few."""
    mask = (1 << 64) - 1
    key0, key1 = (each & mask for each in key)
    v = [
        key0 ^ 0x736F6D6570736575,
        key1 ^ 0x646F72616E646F6D ^ 0xEE,
        key0 ^ 0x6C7967656E657261,
        key1 ^ 0x7465646279746573,
    ]

    def turn(times: int) -> None:
        for _ in range(times):
            v[0] = (v[0] + v[1]) & mask
            v[1] = _left(v[1], 13) ^ v[0]
            v[0] = _left(v[0], 32)
            v[2] = (v[2] + v[3]) & mask
            v[3] = _left(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & mask
            v[3] = _left(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & mask
            v[1] = _left(v[1], 17) ^ v[2]
            v[2] = _left(v[2], 32)

    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        turn(2)
        v[0] ^= word
    v[2] ^= 0xEE
    turn(4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    turn(4)
    return low | (v[0] ^ v[1] ^ v[2] ^ v[3]) << 64


def _left(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & ((1 << 64) - 1)
