"""Which partition a message goes to, when the choice is ours: equal to the Java client's.

A key goes where every Kafka client of every language that keeps to Java's rule would send it: murmur2 of the key's
bytes, made positive, modulo the number of partitions. Messages without a key go to one partition until a batch's worth
was sent there, then to another: large batches, evenly spread.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from holdfast.seams import Randomness

SEED: Final = 0x9747B28C
MULTIPLIER: Final = 0x5BD1E995
MASK: Final = 0xFFFFFFFF
POSITIVE: Final = 0x7FFFFFFF
STICKY_BYTES: Final = 16 * 1024
_WORD: Final = Struct("<I")


def murmur2(data: bytes) -> int:
    """The 32-bit hash of Kafka's Java client, as an unsigned number."""
    length = len(data)
    value = (SEED ^ length) & MASK
    whole = length & ~3
    for (word,) in _WORD.iter_unpack(data[:whole]):
        word = (word * MULTIPLIER) & MASK
        word ^= word >> 24
        value = (value * MULTIPLIER & MASK) ^ (word * MULTIPLIER & MASK)
    rest = data[whole:]
    if rest:
        value ^= int.from_bytes(rest, "little")
        value = (value * MULTIPLIER) & MASK
    value ^= value >> 13
    value = (value * MULTIPLIER) & MASK
    return value ^ (value >> 15)


def partition_of_key(key: bytes, partitions: int) -> int:
    return (murmur2(key) & POSITIVE) % partitions


class StickyPartitioner:
    """One partition of a topic at a time for messages without a key."""

    def __init__(self, randomness: Randomness, sticky_bytes: int = STICKY_BYTES) -> None:
        self._randomness = randomness
        self._sticky_bytes = sticky_bytes
        self._current: dict[str, tuple[int, int]] = {}
        """Partition and bytes sent there, by topic."""

    def choose(self, topic: str, size: int, partitions: int) -> int:
        partition, sent = self._current.get(topic, (-1, self._sticky_bytes))
        if sent >= self._sticky_bytes or partition >= partitions:
            following = self._randomness.below(partitions)
            if following == partition and partitions > 1:
                following = (following + 1) % partitions
            partition, sent = following, 0
        self._current[topic] = (partition, sent + size)
        return partition
