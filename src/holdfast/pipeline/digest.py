"""An order-independent digest of which records a set of rows came from.

Each record's place (topic, partition, offset) is hashed to 64 bits, and the hashes are added modulo 2**64: the sum does
not depend on the order of rows or on how they were cut into files, a row that is missing or there twice changes it,
and two sums can be added. The hash is Spark's own `xxhash64(topic, partition, offset)`, so that the engine evaluates
it in compiled code; the two other forms here give the same numbers without Spark.

The digest proves a multiset of places up to chance (one in 2**64), not against somebody who looks for collisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

SEED: Final = 42
MASK: Final = (1 << 64) - 1

P1: Final = 0x9E3779B185EBCA87
P2: Final = 0xC2B2AE3D27D4EB4F
P3: Final = 0x165667B19E3779F9
P4: Final = 0x85EBCA77C2B2AE63
P5: Final = 0x27D4EB2F165667C5


@dataclass(frozen=True)
class Tally:
    """Rows, by number and by the digest of their places: so that two counts can be held against each other."""

    rows: int = 0
    digest: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, (self.digest + other.digest) & MASK)

    def __sub__(self, other: Tally) -> Tally:
        """Without the rows of `other`, all of which are in it."""
        return Tally(self.rows - other.rows, (self.digest - other.digest) & MASK)


def place_hash(topic: str, partition: int, offset: int) -> int:
    """The hash of one record's place, as an unsigned number."""
    return _hash_long(offset & MASK, partition_seed(topic, partition))


@lru_cache(maxsize=65_536)
def partition_seed(topic: str, partition: int) -> int:
    """What the hash of topic and partition hands on to the hash of the offset."""
    return _hash_int(partition & 0xFFFFFFFF, _hash_bytes(topic.encode("utf-8"), SEED))


def digest_of_offsets(topic: str, partition: int, offsets: Any) -> int:
    """The digest of many offsets of one partition: `offsets` is a numpy array of int64."""
    import numpy as np

    if len(offsets) == 0:
        return 0
    return int(np.sum(hashes_of_offsets(topic, partition, offsets), dtype=np.uint64))


def hashes_of_offsets(topic: str, partition: int, offsets: Any) -> Any:
    """The hash of each of many offsets of one partition, as a numpy array of uint64."""
    import numpy as np

    with np.errstate(over="ignore"):
        mixed = offsets.astype(np.uint64) * np.uint64(P2)
        mixed = ((mixed << np.uint64(31)) | (mixed >> np.uint64(33))) * np.uint64(P1)
        value = np.uint64((partition_seed(topic, partition) + P5 + 8) & MASK) ^ mixed
        value = ((value << np.uint64(27)) | (value >> np.uint64(37))) * np.uint64(P1) + np.uint64(P4)
        value = (value ^ (value >> np.uint64(33))) * np.uint64(P2)
        value = (value ^ (value >> np.uint64(29))) * np.uint64(P3)
        return value ^ (value >> np.uint64(32))


def hash_sql(lineage: str = "_hf") -> str:
    """The hash of a row's place as a Spark SQL expression over its lineage."""
    return f"xxhash64({lineage}.topic, {lineage}.partition, {lineage}.offset)"


def tally_sql(hashed: str, *, when: str = "", prefix: str = "") -> list[str]:
    """Aggregates over rows with this hash that `tally_of` makes a tally of; with `when`, over those it is true for."""

    def of(sql: str) -> str:
        return f"CASE WHEN {when} THEN {sql} END" if when else sql

    return [
        f"count({of('1')}) AS {prefix}n",
        f"coalesce(sum({of(f'{hashed} & 4294967295L')}), 0L) AS {prefix}low",
        f"coalesce(sum({of(f'shiftrightunsigned({hashed}, 32)')}), 0L) AS {prefix}high",
    ]


def tally_of(row: Any, prefix: str = "") -> Tally:
    """The sums of the hashes' halves, which do not overflow, as a tally."""
    return Tally(row[f"{prefix}n"], join_halves(row[f"{prefix}low"], row[f"{prefix}high"]))


def join_halves(low: int, high: int) -> int:
    return (low + (high << 32)) & MASK


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & MASK


def _mix(value: int) -> int:
    value = ((value ^ (value >> 33)) * P2) & MASK
    value = ((value ^ (value >> 29)) * P3) & MASK
    return value ^ (value >> 32)


def _round(accumulator: int, lane: int) -> int:
    return (_rotate((accumulator + lane * P2) & MASK, 31) * P1) & MASK


def _hash_int(value: int, seed: int) -> int:
    hashed = (seed + P5 + 4) & MASK
    hashed ^= (value * P1) & MASK
    return _mix((_rotate(hashed, 23) * P2 + P3) & MASK)


def _hash_long(value: int, seed: int) -> int:
    hashed = (seed + P5 + 8) & MASK
    hashed ^= _round(0, value)
    return _mix((_rotate(hashed, 27) * P1 + P4) & MASK)


def _hash_bytes(data: bytes, seed: int) -> int:
    """XXH64 of these bytes."""
    position = 0
    if len(data) >= 32:
        lanes = [(seed + P1 + P2) & MASK, (seed + P2) & MASK, seed, (seed - P1) & MASK]
        while position <= len(data) - 32:
            for number in range(4):
                start = position + 8 * number
                lanes[number] = _round(lanes[number], int.from_bytes(data[start : start + 8], "little"))
            position += 32
        hashed = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            hashed = ((hashed ^ _round(0, lane)) * P1 + P4) & MASK
    else:
        hashed = (seed + P5) & MASK
    hashed = (hashed + len(data)) & MASK
    while position <= len(data) - 8:
        hashed ^= _round(0, int.from_bytes(data[position : position + 8], "little"))
        hashed = (_rotate(hashed, 27) * P1 + P4) & MASK
        position += 8
    if position <= len(data) - 4:
        hashed ^= (int.from_bytes(data[position : position + 4], "little") * P1) & MASK
        hashed = (_rotate(hashed, 23) * P2 + P3) & MASK
        position += 4
    for byte in data[position:]:
        hashed = (_rotate(hashed ^ ((byte * P5) & MASK), 11) * P1) & MASK
    return _mix(hashed)
