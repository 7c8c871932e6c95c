"""Which partition a message goes to, when the choice is ours: equal to the Java client's unless told otherwise.

By default a key goes where every Kafka client of every language that keeps to Java's rule would send it: murmur2 of the
key's bytes, made positive, modulo the number of partitions. Messages without a key go to one partition until a batch's
worth was sent there, then to another: large batches, evenly spread.

The names are librdkafka's: a program that has always hashed with `consistent_random`, librdkafka's own default, finds
its keys where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import Final
from zlib import crc32

from holdfast.errors import ConfigError
from holdfast.seams import Randomness

SEED: Final = 0x9747B28C
MULTIPLIER: Final = 0x5BD1E995
MASK: Final = 0xFFFFFFFF
POSITIVE: Final = 0x7FFFFFFF
STICKY_BYTES: Final = 16 * 1024
KEYS_KEPT_MAX: Final = 65_536
"""Hashing takes longer than finding what came of it: this many keys are remembered."""
COUNTS_KEPT_MAX: Final = 16
"""For so many numbers of partitions."""
_WORD: Final = Struct("<I")

DEFAULT_PARTITIONER: Final = "murmur2_random"


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


def _murmur2_positive(key: bytes) -> int:
    return murmur2(key) & POSITIVE


def _crc32(key: bytes) -> int:
    return crc32(key) & MASK


def _fnv1a(key: bytes) -> int:
    value = 0x811C9DC5
    for byte in key:
        value = ((value ^ byte) * 0x01000193) & MASK
    # librdkafka takes the absolute value of the hash as a signed number.
    return value if value <= POSITIVE else (1 << 32) - value


class _Rule:
    """How keys are hashed; those without a hash of their own are spread."""

    __slots__ = ("hash_of", "spreads_empty", "spreads_none")

    def __init__(
        self, hash_of: Callable[[bytes], int] | None, *, spreads_none: bool, spreads_empty: bool
    ) -> None:
        self.hash_of = hash_of
        self.spreads_none = spreads_none
        self.spreads_empty = spreads_empty

    def spreads(self, key: bytes | None) -> bool:
        """Whether a message with this key goes anywhere."""
        if self.hash_of is None:
            return True
        return self.spreads_none if key is None else not key and self.spreads_empty


_RULES: Final[Mapping[str, _Rule]] = {
    "murmur2_random": _Rule(_murmur2_positive, spreads_none=True, spreads_empty=False),
    "murmur2": _Rule(_murmur2_positive, spreads_none=False, spreads_empty=False),
    "consistent_random": _Rule(_crc32, spreads_none=True, spreads_empty=True),
    "consistent": _Rule(_crc32, spreads_none=False, spreads_empty=False),
    "fnv1a_random": _Rule(_fnv1a, spreads_none=True, spreads_empty=False),
    "fnv1a": _Rule(_fnv1a, spreads_none=False, spreads_empty=False),
    "random": _Rule(None, spreads_none=True, spreads_empty=True),
}


PARTITIONERS: Final = frozenset(_RULES)


class Partitioner:
    """Chooses partitions by one of librdkafka's rules, by its name."""

    def __init__(self, name: str, randomness: Randomness) -> None:
        rule = _RULES.get(name)
        if rule is None:
            raise ConfigError(f"partitioner={name}: a spool knows {', '.join(_RULES)}")
        self._rule = rule
        self._sticky = StickyPartitioner(randomness)
        self._known: dict[int, dict[bytes | None, int]] = {}
        """By the number of partitions, where keys go."""

    def choose(self, topic: str, key: bytes | None, size: int, partitions: int) -> int:
        if partitions == 1:
            return 0
        rule = self._rule
        if rule.spreads(key):
            return self._sticky.choose(topic, size, partitions)
        known = self.known(partitions)
        partition = known.get(key)
        if partition is None:
            if len(known) >= KEYS_KEPT_MAX:
                known.clear()
            assert rule.hash_of is not None, "a key that is not spread is hashed"
            known[key] = partition = rule.hash_of(key or b"") % partitions
        return partition

    def settled(self, key: bytes | None, number: int, partitions: int) -> int:
        """As `choose`, without chance: where a message goes that has nothing to hash is said by a number of its own."""
        return number % partitions if self._rule.spreads(key) else self.choose("", key, 0, partitions)

    def known(self, partitions: int) -> dict[bytes | None, int]:
        """Where keys go that were chosen for before, among so many partitions: for whoever asks very often."""
        known = self._known.get(partitions)
        if known is None:
            if len(self._known) >= COUNTS_KEPT_MAX:
                self._known.clear()
            known = self._known[partitions] = {}
        return known
